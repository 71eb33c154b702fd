"""A conversion is killed at random moments: what it left is refused, or is all of it, and the same conversion ends."""

from __future__ import annotations

import random
import shutil

import pytest

from combined import CAMPAIGN
from convert_run import WRITERS
from formats.deepspeed_files import random_state, write
from formats.test_deepspeed import bits
from holdfast.errors import HoldfastError
from holdfast.opening import source_of


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    write(folder, random_state([{f"{number}.weight": (128, 1024) for number in range(6)}]), 1, 2)  # 9 MiB
    return folder


def found(path):
    """The bits of what a reader takes for whole; None if it takes nothing for that."""
    try:
        return bits(source_of(str(path)))
    except HoldfastError:
        return None


@pytest.mark.campaign(keep=3)
@pytest.mark.crash
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", WRITERS)
def test_a_conversion_that_is_killed_can_be_done_again(server, source, tmp_path, kind, seed):
    """Twice in turn, each time, in the same folder."""
    chance, name = random.Random(seed), WRITERS[kind][1]
    order = {"convert": True, "source": source, "kind": kind}
    seconds = server.run(out=tmp_path / "undisturbed", **order).seconds
    wanted = found(tmp_path / "undisturbed" / name)
    assert wanted
    killed = cut = 0
    for number in range(200):
        out = tmp_path / str(number)
        for moment in (chance.uniform(0.0, seconds), chance.uniform(0.0, seconds), None):
            was_whole = found(out / name) == wanted
            outcome = server.run(out=out, kill_after=moment, **order)
            assert outcome.killed or outcome.finished or was_whole, outcome.error
            left = found(out / name)
            assert left == wanted if moment is None or was_whole else left in (None, wanted)
            killed += outcome.killed
            cut += left is None and out.exists() and any(out.iterdir())
        shutil.rmtree(out)
        if cut >= (10 if CAMPAIGN else 4):
            return
    raise AssertionError(f"{killed} kills left {cut} parts of a conversion")
