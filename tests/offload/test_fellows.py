"""What several ranks of the engine agree on, each played by a value."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from holdfast.errors import BadInput, RankFailed
from holdfast.offload.ops.commit_ops import publish
from holdfast.offload.runtime import Runtime
from holdfast.offload.setup.equal_on_ranks import agree_on_placement, refuse_unlike
from holdfast.offload.setup.step_planning import RunPlan
from holdfast.schedule.memory_use import predict
from holdfast.schedule.vertical import vertical
from holdfast.schedule.work import BlockPlacement, StepShape
from plan_steps import uneven


def test_ranks_that_stand_at_unlike_steps_make_no_commit():
    told = [(3, {"path": "a"}), (4, {"path": "b"})]
    ranks = SimpleNamespace(all_do=lambda what: told, first_does=lambda what: pytest.fail("was published"))
    fellows = SimpleNamespace(alone=False, commits=ranks)
    run = SimpleNamespace(newest={}, store=None, data_parallel=fellows)
    with pytest.raises(RankFailed, match="rank 1 has step 4 to make durable, and rank 0 step 3"):
        publish(run, 3, {})


def test_buffers_are_sent_when_their_copies_to_the_host_are_there():
    """Those that a device leaves are written later."""
    sent = []
    run = SimpleNamespace(
        resident=SimpleNamespace(buffer_values=lambda: {"count": torch.tensor(7.0)}),
        device=SimpleNamespace(
            leave=lambda t: {n: torch.zeros_like(v) for n, v in t.items()}, fetch=lambda t: t
        ),
        data_parallel=SimpleNamespace(alone=False, rank=0, from_first=sent.extend),
    )
    found = Runtime.agreed_buffers(run)
    assert sent == [7.0] and found["count"] == 7.0


@pytest.mark.parametrize(
    "told, message",
    [
        ([{"lr": 1.0}, {"lr": 1.0}, {"lr": 2.0}], "lr is 2.0 on rank 2 and 1.0 on rank 0. Stop."),
        ([{"lr": 1.0}, {"lr": 1.0, "eps": 3}], "eps is 3 on rank 1 and absent on rank 0"),
        ([{"lr": 1.0, "eps": 3}, {"lr": 1.0}], "eps is absent on rank 1 and 3 on rank 0"),
    ],
)
def test_the_first_that_differs_is_named(told, message):
    with pytest.raises(BadInput, match=f"unlike rates: {message}"):
        refuse_unlike(told, "rates", "Stop")


def test_what_stays_is_what_all_ranks_have_room_for():
    work, shape = uneven(4), StepShape(micro_batches=2, clipping="defer")
    here, there = (
        BlockPlacement.fractions(4, params=1.0, optimizer=0.25),
        BlockPlacement.fractions(4, optimizer=0.5),
    )
    plan = RunPlan(
        work=work, placement=here, operations=vertical(work, here, shape), held_bytes=0, evaluation_batches=8,
        memory=predict(work, here, shape, vertical, 8),
    )  # fmt: skip
    found = agree_on_placement(
        plan, "vertical", shape, SimpleNamespace(everyone=lambda mine: [mine, (there, 4)])
    )
    assert found.placement == BlockPlacement.fractions(4, optimizer=0.25)
    assert found.evaluation_batches == 4
    assert found.operations == vertical(work, found.placement, shape) != plan.operations
    assert found.memory == predict(work, found.placement, shape, vertical, 4) != plan.memory
    assert (
        agree_on_placement(plan, "vertical", shape, SimpleNamespace(everyone=lambda mine: [mine, mine]))
        is plan
    )
