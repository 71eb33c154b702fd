"""A script of ``Trainer`` or ``Accelerator`` is killed; started again, it goes on to the same end."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="Trainer needs it")

from support.warm_python import TESTS, environment_of, start_python

MODULES = (
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
    "holdfast.integrations.transformers",
)


def run(script, *places, kill_at=None):
    """The steps that the script said, and what it said at its end; killed as soon as it says ``kill_at``, two steps
    after which it waits for that."""
    waits_after = [] if kill_at is None else [kill_at + 2]
    process = start_python(TESTS / script, *places, *waits_after, env=environment_of(), modules=MODULES)
    steps, end = [], {}
    with process.stdout, process.stderr:
        for line in process.stdout:
            said = json.loads(line) if line.startswith('{"') else {}
            steps += [said["step"]] if "step" in said else []
            end = said if "digest" in said else end
            if kill_at is not None and kill_at in steps:
                process.kill()
    assert process.wait() == (0 if kill_at is None else -9)
    return steps, end


@pytest.mark.crash
def test_a_killed_trainer_goes_on(tmp_path):
    def here(name, kill_at=None):
        return run("trainer_run.py", tmp_path / "output", tmp_path / name, kill_at=kill_at)

    steps, whole = here("undisturbed")
    assert steps == list(range(1, 17))
    resumed = []
    for kill_at in (3, 9):
        steps, _ = here("killed", kill_at)
        resumed.append(steps[0])
    steps, end = here("killed")
    resumed.append(steps[0])
    assert resumed == sorted(resumed) and resumed[0] == 1 < resumed[-1]
    assert end["losses"] == whole["losses"][-len(end["losses"]) :]
    assert end["digest"] == whole["digest"]


@pytest.mark.crash
@pytest.mark.parametrize("script", ["offloaded_script.py", "offloaded_loop_script.py"])
def test_a_killed_offloaded_script_goes_on(tmp_path, script):
    steps, whole = run(script, tmp_path / "undisturbed")
    assert steps == list(range(1, 9))
    killed, _ = run(script, tmp_path / "killed", kill_at=5)
    steps, end = run(script, tmp_path / "killed")
    assert killed[0] == 1 and 4 <= steps[0] <= killed[-1]  # step 5 may have been under way
    assert end["digest"] == whole["digest"]
