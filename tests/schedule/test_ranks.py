"""The lists of several ranks: what each moves, and that ranks never wait for each other for ever."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from holdfast.schedule.operations import COMPUTE, EXCHANGE, SSD_READ, SSD_WRITE, Key, Op, traffic
from holdfast.schedule.vertical import forward_only, vertical
from holdfast.schedule.work import BlockPlacement, StepShape, Work, kept_blocks
from plan_steps import grid, uneven
from support.schedules import check_schedule


def of_ranks(work: Work) -> Work:
    """The same of one of two ranks."""
    blocks = tuple(
        replace(
            b, param_share_bytes=b.param_bytes // 2 + 7, param_gather_bytes=b.param_bytes // 2 + 1,
            trained_param_bytes=b.trained_param_bytes // 2, state_bytes=b.state_bytes // 2,
            grad_share_bytes=b.grad_bytes // 2 + 3, grad_reduce_bytes=b.grad_bytes // 2 + 5,
        )
        for b in work.blocks
    )  # fmt: skip
    return replace(
        work,
        blocks=blocks,
        ranks=2,
        resident_gather_bytes=11,
        resident_reduce_bytes=13,
        resident_grad_share_bytes=17,
    )


@pytest.mark.slow
def test_every_list_is_one_that_can_be_run_and_moves_shares():
    for work, placement, shape in grid((1, 2, 3)):
        made = vertical(of_ranks(work), placement, shape)
        check_schedule(made)
        moved, blocks = traffic(made), of_ranks(work).blocks
        kept = kept_blocks(shape, len(blocks))
        passes = [*range(len(blocks) - 1), *(b for b in range(len(blocks)) if not kept[b])]
        assert moved[EXCHANGE, "gather_params"] == sum(blocks[b].param_gather_bytes for b in passes)
        assert moved[EXCHANGE, "reduce_grads"] == sum(b.grad_reduce_bytes for b in blocks)
        assert moved[EXCHANGE, "gather_resident"] == 11 and moved[EXCHANGE, "reduce_resident"] == 13
        loaded = [blocks[b].param_share_bytes for b in passes if not placement.params[b]]
        assert moved[SSD_READ, "load_params"] == sum(loaded)
        spilled = [blocks[op.key.block].grad_share_bytes for op in made if op.key.kind == "store_grads"]
        assert moved[SSD_WRITE, "store_grads"] == sum(spilled)
    check_schedule(
        forward_only(of_ranks(uneven(3)), BlockPlacement.fractions(3, params=0.5), StepShape(micro_batches=2))
    )


class Rank:
    """One rank's operations of several steps: which are over, and which may run now."""

    def __init__(self, steps: list[list[Op]], in_order: bool) -> None:
        self.ops: list[tuple[Op, set[int]]] = []
        latest: dict[Key, int] = {}
        chain: dict[str, int] = {}
        for listed in steps:
            mine: dict[Key, int] = {}
            for op in listed:
                needs = {mine[key] for key in op.needs} | {
                    latest[k] for k in op.needs_previous if k in latest
                }
                if op.lane == COMPUTE or (op.lane == EXCHANGE and in_order):
                    needs |= {chain[op.lane]} if op.lane in chain else set()
                    chain[op.lane] = len(self.ops)
                mine[op.key] = len(self.ops)
                self.ops.append((op, needs))
            latest |= mine
        self.over: set[int] = set()
        self.arrived: int | None = None
        """The exchange that its one thread for them is in."""

    def ready(self) -> list[int]:
        return [
            index
            for index, (op, needs) in enumerate(self.ops)
            if index not in self.over and needs <= self.over and (op.lane != EXCHANGE or self.arrived is None)
        ]


def _run(steps, seed, in_order):
    """Whether two ranks come to the end if their operations end in an order by chance."""
    chance, ranks = random.Random(seed), [Rank(steps, in_order) for _ in range(2)]
    while any(len(rank.over) < len(rank.ops) for rank in ranks):
        met = ranks[0].arrived
        if met is not None and met == ranks[1].arrived:
            for rank in ranks:
                rank.over.add(met)
                rank.arrived = None
            continue
        can = [(rank, index) for rank in ranks for index in rank.ready()]
        if not can:
            return False
        rank, index = chance.choice(can)
        if rank.ops[index][0].lane == EXCHANGE:
            rank.arrived = index
        else:
            rank.over.add(index)
    return True


@pytest.mark.campaign(cover=2)
@pytest.mark.parametrize("clipping", ["none", "defer", "speculate", "per_block"])
@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("host", [0.0, 0.5, 1.0])
def test_ranks_never_wait_for_each_other_for_ever(clipping, unified, host):
    placement = BlockPlacement.fractions(4, params=host, optimizer=host, gradients=host)
    shape = StepShape(micro_batches=2, clipping=clipping, delayed_fraction=0.5, order="snake")
    work = of_ranks(uneven(4, unified))
    step = vertical(work, placement, shape)
    steps = [step, forward_only(work, placement, StepShape(micro_batches=2)), step]
    assert all(_run(steps, seed, in_order=True) for seed in range(4))


def test_without_the_order_they_would():
    placement = BlockPlacement.fractions(4, params=0.5, optimizer=0.0)
    step = vertical(of_ranks(uneven(4)), placement, StepShape(micro_batches=2))
    assert not all(_run([step, step], seed, in_order=False) for seed in range(20))
