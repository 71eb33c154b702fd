"""Grass is its published update rule, in whatever rows; those are the same after a resume."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from holdfast.errors import OptimizerNotSupported
from holdfast.optim import Grass
from holdfast.optim.low_rank import drawn, sampled_rows

LR, BETAS, EPS, DECAY, GAP, SCALE = 0.01, (0.9, 0.99), 1e-6, 0.1, 3, 0.5


def largest(norms, rank):
    """The paper's choice without chance: rows, and what they are scaled by."""
    return sorted(range(len(norms)), key=lambda row: -norms[row])[:rank], [1.0] * rank


def by_chance(norms, rank, seed):
    """Its choice by chance: each row where a number from 0 to 1 falls, if each has as much room as its norm."""
    numbers = torch.rand(rank, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).tolist()
    total, rows = sum(norms), []
    for number in numbers:
        row = 0
        while sum(norms[: row + 1]) <= number * total:
            row += 1
        rows.append(row)
    return rows, [(rank * norms[row] / total) ** -0.5 for row in rows]


def published(weight, grads, choose):
    """Weights after steps with ``grads``, of the rule as the paper has it, with the whole matrix P, in float64."""
    weight = weight.double()
    for t, grad in enumerate(grads):
        tall = grad.shape[0] > grad.shape[1]
        g = (grad.T if tall else grad).double()
        if t % GAP == 0:
            rows, scales = choose([row.norm().item() for row in g], t // GAP)
            p = torch.zeros(len(g), len(rows), dtype=torch.float64)
            for column, (row, scale) in enumerate(zip(rows, scales, strict=True)):
                p[row, column] = scale
            m, v = torch.zeros(2, len(rows), g.shape[1], dtype=torch.float64)
        y, k = p.T @ g, t % GAP + 1
        m, v = BETAS[0] * m + (1 - BETAS[0]) * y, BETAS[1] * v + (1 - BETAS[1]) * y**2
        u = (m / (1 - BETAS[0] ** k)) / ((v / (1 - BETAS[1] ** k)).sqrt() + EPS)
        update = p @ u
        weight = weight - LR * DECAY * weight - LR * SCALE * (update.T if tall else update)
    return weight


def stepped(shape, sampled, rank=3, steps=8):
    """A parameter's values before, its gradients, and its values after."""
    torch.manual_seed(1)
    param = nn.Parameter(torch.randn(shape))
    heights = 2.0 ** torch.arange(min(shape))
    towards = heights[None, :] if shape[0] > shape[1] else heights[:, None]
    start, grads = param.detach().clone(), [torch.randn(shape) * towards for _ in range(steps)]
    optimizer = Grass(
        [param], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, rank=rank, scale=SCALE, sampled=sampled,
        update_gap=GAP, seed=5,
    )  # fmt: skip
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return start, grads, param.detach()


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8), (1, 5), (2, 4)])
@pytest.mark.parametrize("sampled", [False, True], ids=["largest", "by chance"])
def test_it_is_the_published_update_rule(shape, sampled):
    start, grads, found = stepped(shape, sampled)
    rank, drawn_twice = min(3, *shape), False

    def choose(norms, period):
        nonlocal drawn_twice
        chosen = by_chance(norms, rank, drawn(drawn(5, 0), period)) if sampled else largest(norms, rank)
        drawn_twice |= len(set(chosen[0])) < rank
        return chosen

    torch.testing.assert_close(found.double(), published(start, grads, choose), rtol=1e-5, atol=1e-6)
    assert (found - start).abs().max() > 1e-2
    assert drawn_twice == sampled or rank < 3  # of few rows it did not happen


def test_the_mean_of_the_projection_there_and_back_is_the_identity():
    norms, there_and_back = torch.tensor([1.0, 2.0, 5.0, 0.5]).double(), torch.zeros(4, 4).double()
    for seed in range(4000):
        rows, scales = sampled_rows(norms, 2, seed)
        p = torch.zeros(4, 2).double()
        p[rows, range(2)] = scales[0]
        there_and_back += p @ p.T / 4000
    torch.testing.assert_close(there_and_back, torch.eye(4).double(), rtol=0, atol=0.15)


def test_a_row_that_is_drawn_several_times_is_moved_by_one_of_its_updates_alone():
    rows, scales = sampled_rows(torch.tensor([1.0, 4.0, 2.0]).double(), 9, seed=3)
    assert rows.tolist() == sorted(rows.tolist()) and len(set(rows.tolist())) == 3
    for row in range(3):
        there, back = scales[:, rows == row]
        assert back.tolist() == [there[0] * len(there), *[0.0] * (len(there) - 1)]


def test_of_all_rows_it_is_adamw_until_they_are_chosen_anew():
    torch.manual_seed(0)
    mine = nn.Parameter(torch.randn(5, 7))
    theirs = nn.Parameter(mine.detach().clone())
    grass = Grass([mine], lr=0.1, weight_decay=0.1, rank=9, update_gap=4)
    adamw = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.1)
    for step in range(5):
        mine.grad = torch.randn_like(mine)
        theirs.grad = mine.grad.clone()
        grass.step()
        adamw.step()
        assert torch.allclose(mine, theirs, atol=1e-5) == (step < 4)


def test_rows_that_were_not_chosen_stay_and_others_come_next():
    param = nn.Parameter(torch.zeros(6, 8))
    optimizer, moved = Grass([param], rank=2, update_gap=2), []
    for step in range(4):
        before = param.detach().clone()
        param.grad = torch.eye(6, 8) * (1.0 + torch.arange(6).roll(step))[:, None]
        optimizer.step()
        moved.append((param.detach() != before).any(dim=1).nonzero().flatten().tolist())
    assert moved == [[4, 5], [4, 5], [0, 1], [0, 1]]


def test_state_is_two_narrow_matrices_their_rows_and_a_count():
    def kept(**options):
        param = nn.Parameter(torch.ones(100, 40))
        param.grad = torch.ones(100, 40)
        optimizer = Grass([param], rank=4, **options)
        optimizer.step()
        return optimizer.state[param]

    shapes = {name: tuple(value.shape) for name, value in kept().items()}
    assert shapes == {"step": (), "exp_avg": (4, 100), "exp_avg_sq": (4, 100), "rows": (4,)}
    assert kept(sampled=True).keys() == {*shapes, "scales", "seed"}
    for sampled in (False, True):
        state = kept(sampled=sampled).values()
        tensors = sum(value.nbytes for value in state if value.dim())
        assert tensors == 8 * 4 * 100 + (16 if sampled else 8) * 4


def test_what_is_drawn_differs_between_matrices_and_periods_and_not_between_runs():
    def rows(seed):
        params = [nn.Parameter(torch.ones(50, 60)) for _ in range(2)]
        optimizer, found = Grass(params, rank=5, sampled=True, update_gap=1, seed=seed), []
        for _ in range(2):
            for param in params:
                param.grad = torch.ones(50, 60)
            optimizer.step()
            found += [optimizer.state[param]["rows"].tolist() for param in params]
        return found

    assert rows(1) == rows(1)
    assert len({str(each) for each in rows(1) + rows(2)}) == 8


def test_a_gradient_of_zeros_moves_nothing():
    for sampled in (False, True):
        param = nn.Parameter(torch.ones(4, 5))
        param.grad = torch.zeros(4, 5)
        Grass([param], rank=2, sampled=sampled).step()
        assert torch.equal(param.detach(), torch.ones(4, 5))


def test_parameters_of_other_types_and_sizes_are_updated():
    for shape in ((0, 3), (3, 0), (1, 1)):
        for sampled in (False, True):
            param = nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))
            param.grad = torch.ones_like(param)
            Grass([param], lr=0.5, rank=2, sampled=sampled).step()
            assert torch.equal(param.detach(), torch.full_like(param, 0.5))


def test_vectors_and_groups_without_rank_are_adamws():
    torch.manual_seed(0)
    mine = [nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5, 4))]
    theirs = [nn.Parameter(p.detach().clone()) for p in mine]
    grass = Grass([{"params": mine[:1]}, {"params": mine[1:], "rank": None}], lr=0.1, weight_decay=0.1)
    adamw = torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.1, fused=True)
    for _ in range(4):
        for a, b in zip(mine, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        grass.step()
        adamw.step()
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("sampled", [False, True], ids=["largest", "by chance"])
def test_a_state_dict_brings_back_the_rows_and_what_is_drawn_next(sampled):
    params = [nn.Parameter(torch.ones(6, 6)) for _ in range(2)]
    optimizer, other = (
        Grass([p], rank=2, update_gap=4, seed=s, sampled=sampled) for p, s in zip(params, (1, 2), strict=True)
    )
    for step in range(3):
        params[0].grad = torch.arange(36.0).view(6, 6) + step
        optimizer.step()
    params[1].data.copy_(params[0].data)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.state[params[1]]["rows"].dtype == torch.int64
    for step in range(3):
        for param, each in zip(params, (optimizer, other), strict=True):
            param.grad = torch.arange(36.0).view(6, 6).flip(0) - step
            each.step()
        assert torch.equal(*params), step


def test_sharded_parameters_are_refused_with_the_way_out():
    param = nn.Parameter(torch.ones(4, 4))
    param.grad, param.to_local = torch.ones(4, 4), lambda: param  # as of a DTensor
    with pytest.raises(OptimizerNotSupported, match=r"Grass does not take .* \(DTensor, .* Use Distributed"):
        Grass([param], rank=2).step()
    assert torch.equal(param.detach(), torch.ones(4, 4))


@pytest.mark.parametrize(
    "wrong", [{"rank": 0}, {"scale": 0}, {"update_gap": 0}, {"lr": -1.0}, {"betas": (0.9, 1.0)}]
)
def test_wrong_hyper_parameters_are_refused(wrong):
    with pytest.raises(ValueError, match=" must "):
        Grass([nn.Parameter(torch.ones(2, 2))], **wrong)
