"""Golden values: the bytes of GPT-65B, against figures worked out apart."""

import pytest

from holdfast.profiles import load_machine, load_model
from holdfast.schedule import step_builder
from holdfast.schedule.operation_lists import shape_of, work_of
from holdfast.schedule.operations import traffic
from holdfast.schedule.planner.training_setting import Method, Setting
from holdfast.schedule.work import BlockPlacement
from plan_steps import SCHEDULES

GB = 1e9


def setting(micro_batches: int, order: str = "plain") -> Setting:
    """A step of GPT-65B on one A100."""
    return Setting(
        machine=load_machine("a100-80g"),
        model=load_model("gpt-65b"),
        method=Method(order=order, commit_every=0),
        micro_batches=micro_batches,
    )


CROSSING = [(1, 537, 537), (4, 2921, 698), (8, 6099, 913), (16, 12455, 1342), (32, 25169, 2201)]
"""Micro-batches, GB between host and device in horizontal and in vertical snake order."""


@pytest.mark.parametrize("micro_batches, horizontal, vertical", CROSSING)
def test_bytes_between_host_and_device_of_gpt_65b(monkeypatch, micro_batches, horizontal, vertical):
    monkeypatch.setattr(step_builder, "STAYING_BYTES", 0)  # the paper moves all that flows between blocks
    s = setting(micro_batches, "snake")
    assert listed_bytes(s, "horizontal") / GB == pytest.approx(horizontal, rel=0.01)
    assert listed_bytes(s, "vertical") / GB == pytest.approx(vertical, rel=0.015)


def listed_bytes(s: Setting, order: str) -> int:
    """Between host and device, of the blocks."""
    everywhere = BlockPlacement.fractions(s.blocks, params=1.0, optimizer=1.0)
    moved = traffic(SCHEDULES[order](work_of(s), everywhere, shape_of(s)))
    return sum(
        n for (lane, kind), n in moved.items() if lane in ("upload", "download") and "resident" not in kind
    )


def test_state_of_gpt_65b():
    s = setting(1)
    sizes = [s.blocks * size / GB for size in (s.param_bytes, s.state_bytes, s.grad_bytes, s.input_bytes)]
    assert sizes == pytest.approx([129, 773, 258, 10.7], rel=0.005)
