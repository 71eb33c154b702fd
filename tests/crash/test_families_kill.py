"""A killed run of a model with values beside its layers' return values goes on with the bits of one that never was."""

from __future__ import annotations

import signal

import pytest

from support.warm_python import TESTS, environment_of, run_python
from training import differing, stored

pytest.importorskip("transformers")

pytestmark = pytest.mark.crash

STEPS = 4


def process(name, run, failpoint=""):
    environment = environment_of(HOLDFAST_FAILPOINT=failpoint)
    return run_python(
        TESTS / "families_run.py", name, run, STEPS, env=environment, modules=["families"], timeout=100
    )


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("name", ["MixtralForCausalLM", "Gemma3nForCausalLM"])
def test_killed_family_goes_on_bit_equal(tmp_path, name):
    whole = process(name, tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    killed = process(name, tmp_path / "killed", "after_manifest_sync:3")  # the first is of the initial state
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = process(name, tmp_path / "killed")
    assert resumed.returncode == 0, resumed.stderr
    losses, later = whole.stdout.split(), resumed.stdout.split()
    assert len(losses) == STEPS and later == losses[-len(later) :] and 0 < len(later) < STEPS
    assert differing(stored(tmp_path / "killed"), stored(tmp_path / "whole")) == []
