"""What all crash tests share: the server that forks their processes, the text, and the uninterrupted run."""

from __future__ import annotations

import shutil

import pytest

from crash_run import STEPS, Reference, write_text
from fork_server import ForkServer
from holdfast.io.queue import IOQueue
from holdfast.store.run_store import LocalStore


def pytest_collection_modifyitems(items):
    """On a busy machine a long test may take many times what it does on an idle one. A process that hangs is
    told long before (``fork_server.PATIENCE_SECONDS``)."""
    for item in items:
        if item.get_closest_marker("crash") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="module")
def queue():
    queue = IOQueue(2)
    yield queue
    queue.close()


@pytest.fixture(scope="session")
def server():
    return ForkServer()


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def reference(server, text, tmp_path_factory):
    """Every step of the run that nobody disturbed, its losses, and how long a process of it takes."""
    root = tmp_path_factory.mktemp("reference") / "run"
    outcome = server.run(root=root, text=text, steps=STEPS, retain=STEPS + 1)
    assert outcome.finished, outcome
    reference = Reference(LocalStore.read(root), outcome.losses, outcome.seconds)
    assert sorted(reference.steps) == list(range(STEPS + 1))
    return reference


@pytest.fixture(scope="session")
def undisturbed_loop(server, tmp_path_factory):
    """What a run of ``survive_run`` with some options says at its end, made once for each."""
    made = {}

    def of(**options):
        key = repr(sorted(options.items()))
        if key not in made:
            root = tmp_path_factory.mktemp("undisturbed")
            made[key] = server.run(survive=True, root=root, **{"base_every": 1000, **options})
            assert made[key].finished, made[key].error
            shutil.rmtree(root)
        return made[key]

    return of
