"""Every test computes on one thread: small operations on more of them are many times slower when cores are
shared, and some sums come out in another order."""

import gc
import os
import py_compile
import sys
import threading
from contextlib import suppress
from importlib.util import cache_from_source
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from _pytest.assertion import rewrite

from buckets import emptied, served
from combined import CAMPAIGN, covering, spread
from holdfast import failpoints
from holdfast.measure import hardware_rates
from killed import kill
from matrix.cells import told

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start

with suppress(ImportError):  # the environments of the peers have no hypothesis
    from hypothesis import settings

    # Examples are the same in every run; `make campaign` draws new ones.
    settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
    settings.register_profile("campaign", deadline=None)
    settings.load_profile("campaign" if CAMPAIGN else "fixed")

os.environ.setdefault(
    "HOLDFAST_MACHINE", "cpu-2-core"
)  # nothing is measured, and no profile kept, unless a test does

measured_product_seconds = hardware_rates.product_seconds
hardware_rates.product_seconds = lambda dtype: 1.0  # so precision="auto" is bf16 on every machine


@pytest.fixture
def product_seconds():
    """The function that measures, in whose place tests have a constant."""
    return measured_product_seconds


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """Every engine and queue of a test is closed by its end."""
    before = set(threading.enumerate())
    yield
    left = [t.name for t in threading.enumerate() if t.name.startswith("holdfast") and t not in before]
    assert not left, f"threads left: {left}"


@pytest.fixture
def kill_at(monkeypatch):
    """Arms a failpoint that raises ``Killed``."""

    def arm(name):
        monkeypatch.setattr(failpoints, "armed", name)
        monkeypatch.setattr(failpoints, "_arrivals", {})

    monkeypatch.setattr(failpoints, "action", kill)
    return arm


@pytest.fixture
def in_memory(tmp_path):
    """A directory whose syncs cost nothing, for what does not depend on a disk."""
    place = "/dev/shm" if os.path.isdir("/dev/shm") else tmp_path
    with TemporaryDirectory(prefix="holdfast-test-", dir=place) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def s3():
    """The address of an S3 server, one for each module that asks for it."""
    yield from served()


@pytest.fixture
def bucket(s3, monkeypatch):
    """A place in an empty bucket, which the environment says how to reach."""
    return emptied(s3, monkeypatch)


def pytest_configure(config):
    """Compile in a fresh clone each file once for all workers: each worker begins elsewhere.

    Compiling all files takes 12 CPU seconds, which each worker could spend otherwise, at the same time.
    """
    if not hasattr(config, "workerinput") or sys.dont_write_bytecode:
        return
    tests = Path(__file__).parent
    files = [*sorted(tests.rglob("*.py")), *sorted((tests.parent / "src").rglob("*.py"))]
    number, count = int(config.workerinput["workerid"].removeprefix("gw")), config.workerinput["workercount"]
    first = number * len(files) // count
    for path in files[first:] + files[:first]:
        with suppress(SyntaxError):  # which the import tells
            compile_once(path, config)


def compile_once(path, config):
    """Compile ``path`` as its import would, unless that was done."""
    if not path.name.startswith("test_"):
        if not os.path.exists(cache_from_source(path)):
            py_compile.compile(path, doraise=True)
        return
    cached = rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)
    if not cached.exists():
        cached.parent.mkdir(exist_ok=True)
        about, code = rewrite._rewrite_test(path, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, about, cached)


def pytest_ignore_collect(collection_path, config):
    """Leave unread a file without a slow test where only those are asked for: importing takes as long as many tests."""
    of_slow = config.option.markexpr.startswith("slow") and collection_path.name.startswith("test_")
    return True if of_slow and "mark.slow" not in collection_path.read_text() else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leave tests to ``make campaign``, and lay files that wait among those that compute."""
    if not CAMPAIGN:
        leave_to_campaign(config, items)
    yield  # in which others say what time their tests have
    items[:] = among_others(items, lambda item: item.get_closest_marker("timeout") is not None)


def leave_to_campaign(config, items):
    """Deselect cases of tests marked ``campaign``.

    ``keep=n`` keeps n cases, ``cover=True`` each parameter value once, ``cover=2`` each pair.
    """
    left, cases = set(), {}
    for item in items:
        for marker in item.iter_markers("campaign"):
            if marker.kwargs:
                cases.setdefault((item.function, *marker.kwargs.items()), []).append(item)
            else:
                left.add(item)
    for (_, (how, number)), each in cases.items():
        kept = (
            spread(number, range(len(each)))
            if how == "keep"
            else covering([parameters(item) for item in each], number)
        )
        left |= {*each} - {each[place] for place in kept}
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]


def among_others(items, waits):
    """Spread the files whose tests have a timeout of their own among the other files, up to the last tenth.

    They wait for other processes more than they compute. Side by side on all workers they leave cores idle; the longest
    are among them, and none of them should be what the others wait for at the end.
    """
    files = []
    for is_waiting, part in ((True, 0.9), (False, 1.0)):
        of_kind = [item for item in items if waits(item) is is_waiting]
        for number, item in enumerate(of_kind):
            if not files or files[-1][1] != (is_waiting, item.path):
                files.append((part * number / len(of_kind), (is_waiting, item.path), []))
            files[-1][2].append(item)
    files.sort(key=lambda file: file[0])
    return [item for *_, of_file in files for item in of_file]


class Survivors:
    """Keeps objects that outlive a test out of garbage collections and searches for referrers.

    They are frozen between two tests if there was a collection of all objects since, so that each of them is gone
    through about once. Objects of a test that runs are never frozen: some tests wait for their end.
    """

    def __init__(self):
        self._has_grown = False
        gc.callbacks.append(self._note)

    def _note(self, phase, info):
        self._has_grown |= phase == "stop" and info["generation"] == 2

    def freeze(self):
        gc.collect()
        gc.freeze()
        self._has_grown = False

    def pytest_runtest_logfinish(self):
        if self._has_grown:
            self.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    gc.disable()  # what is imported stays
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session):
    survivors = Survivors()
    survivors.freeze()
    session.config.pluginmanager.register(survivors)


def parameters(item):
    """What tells the values of a case's parameters from others."""
    plain = (str, int, float, tuple, dict, type(None))
    return {name: repr(v) if isinstance(v, plain) else id(v) for name, v in item.callspec.params.items()}


def pytest_terminal_summary(terminalreporter):
    """The cells of the matrix that were tried, as docs/moves.md has them."""
    for line in told(terminalreporter.stats):
        terminalreporter.line(line)
