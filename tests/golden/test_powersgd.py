"""A run that two ranks of DDP recorded in format 1 with ``holdfast.PowerSGD``, which is gone, is still read.

Its bases are of steps 0 and 8, the second with residuals and subspaces. The records of steps 3 to 8 have two narrow
matrices in place of large gradients. The model is ``dist.training.Net`` under SGD with momentum. Commit 22b07fe9 wrote
it, by ``make_removed.py``, whose hyper-parameters make a replay exact on every machine.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from golden.resuming import resumed

ARCHIVE = Path(__file__).with_name("powersgd.tar.xz")

DIGESTS = {2: "f00fe4f40234777d", 5: "a462d29e500841dc", 7: "3088dbf2e0745dc0", 8: "feb9d14de06b537e"}
"""By step, what ``dist.training.whole_state`` said of the writer's parameters and optimizer state."""


@pytest.fixture
def run(tmp_path):
    shutil.unpack_archive(ARCHIVE, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("step", DIGESTS)
def test_lowrank_records_resume(run, step):
    assert resumed(run, step=step) == (step, DIGESTS[step])


def test_lowrank_run_is_a_source(run, tmp_path):
    assert resumed(tmp_path / "other", source=f"{run}@7") == (7, DIGESTS[7])
