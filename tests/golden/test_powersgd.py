"""A run that two ranks of DDP recorded in format 1 with ``holdfast.PowerSGD``, which is gone, is still read.

Its bases are of steps 0 and 8, the second with residuals and subspaces. The records of steps 3 to 8 have two narrow
matrices in place of large gradients. The model is ``dist.training.Net`` under AdamW.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from golden.resuming import resumed

ARCHIVE = Path(__file__).with_name("powersgd.tar.xz")

DIGESTS = {2: "79e509742eef11f6", 5: "732d2a2fca2fe101", 7: "4b54b6b0eb951c46", 8: "1bef1b7a439ec6bd"}
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
