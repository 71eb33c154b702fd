"""Ranks with parts of a model of their own, unlike in number and in groups; and ties that a run does not have."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from dist.world import World
from holdfast.checkpoint.recovery.compaction import compact
from holdfast.cli.main import app
from holdfast.errors import BadInput


@pytest.fixture(scope="module")
def world():
    with World("staged") as world:
        yield world


def test_ranks_with_unlike_optimizers_and_groups_go_on(world, tmp_path):
    begun = world.run(2, root=tmp_path, steps=3, kind="stages")
    said = world.run(2, root=tmp_path, steps=5, kind="stages")
    assert [(each["resumed"], each["state"]) for each in said] == [(3, each["ended"]) for each in begun]
    shown = CliRunner().invoke(app, ["show", str(tmp_path)])
    assert shown.exit_code == 0 and all(f"{name}.weight" in shown.output for name in "abc"), shown.output
    out = tmp_path / "out.pt"
    converted = CliRunner().invoke(app, ["convert", f"{tmp_path}@0", str(out), "--to", "torch"])
    assert converted.exit_code == 0, converted.output
    assert torch.load(out)["model"].keys() >= {"a.weight", "b.weight", "c.weight", "more"}
    with pytest.raises(BadInput, match="its ranks have unlike optimizers or parameter groups"):
        compact(tmp_path, 4)


def test_a_tie_that_the_run_has_not_is_refused(world, tmp_path):
    """It would leave the trained values of one of the two unread."""
    world.run(2, root=tmp_path, steps=2, kind="apart")
    for each in world.run(2, root=tmp_path, steps=2, kind="tied"):
        assert each["error"].startswith("RunMismatch") and "c.weight" in each["error"], each
