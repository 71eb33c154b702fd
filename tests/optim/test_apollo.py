"""APOLLO is its published update rule, and its projections are the same after a resume."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from holdfast.optim import Apollo, apollo_mini
from holdfast.optim.low_rank import drawn, projection

LR, BETAS, EPS, DECAY, GAP = 0.01, (0.9, 0.99), 1e-6, 0.1, 3


def published(weight, grads, rank, scale, channels, seed):
    """Weights after steps with ``grads``, of the rule as the paper has it, in float64."""
    weight, moments, before = weight.double(), None, None
    for t, grad in enumerate(grads, 1):
        tall = grad.shape[0] > grad.shape[1]
        g = (grad.T if tall else grad).double()
        y = projection(rank, len(g), drawn(seed, (t - 1) // GAP)).double() @ g
        m, v = moments or (torch.zeros_like(y), torch.zeros_like(y))
        m, v = BETAS[0] * m + (1 - BETAS[0]) * y, BETAS[1] * v + (1 - BETAS[1]) * y**2
        moments, scaled = (m, v), m / (v.sqrt() + EPS)
        s = scaled.norm(dim=0) / (y.norm(dim=0) + 1e-8) if channels else scaled.norm() / (y.norm() + 1e-8)
        update = g * s * scale**0.5
        if before is not None and update.norm() / before > 1.01:
            update = update / (update.norm() / before / 1.01)
        before = update.norm()
        rate = LR * (1 - BETAS[1] ** t) ** 0.5 / (1 - BETAS[0] ** t)
        weight = weight - rate * (update.T if tall else update) - LR * DECAY * weight
    return weight


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8), (1, 5)])
@pytest.mark.parametrize("kind, rank, scale", [(Apollo, 3, 1.0), (apollo_mini, 1, 128.0)])
def test_it_is_the_published_update_rule(kind, shape, rank, scale):
    torch.manual_seed(1)
    param = nn.Parameter(torch.randn(shape))
    start, grads = param.detach().clone(), [torch.randn(shape) * (1 + t) for t in range(8)]
    optimizer = kind(
        [param], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, rank=rank, update_gap=GAP, seed=5
    )
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    expected = published(start, grads, min(rank, *shape), scale, kind is Apollo, drawn(5, 0))
    torch.testing.assert_close(param.detach().double(), expected, rtol=1e-5, atol=1e-6)
    assert (param.detach() - start).abs().max() > 1e-2


def test_state_is_two_narrow_matrices_a_count_a_norm_and_a_seed():
    param = nn.Parameter(torch.ones(40, 100))
    param.grad = torch.ones(40, 100)
    optimizer = Apollo([param], rank=4)
    optimizer.step()
    shapes = {name: tuple(value.shape) for name, value in optimizer.state[param].items()}
    assert shapes == {"step": (), "seed": (), "norm": (), "exp_avg": (4, 100), "exp_avg_sq": (4, 100)}


def test_every_matrix_has_a_seed_of_its_own_and_every_period_another_projection():
    params = [nn.Parameter(torch.ones(4, 4)) for _ in range(3)]
    optimizer = Apollo([{"params": params[:2]}, {"params": params[2:]}], rank=2, seed=3)
    seeds = [int(optimizer.state[p]["seed"]) for p in params]
    assert len(set(seeds)) == 3
    again = Apollo([{"params": params[:2]}, {"params": params[2:]}], rank=2, seed=3)
    assert [int(again.state[p]["seed"]) for p in params] == seeds
    assert not torch.equal(projection(2, 4, drawn(seeds[0], 0)), projection(2, 4, drawn(seeds[0], 1)))


def test_projections_have_variance_one_over_rank():
    assert projection(16, 20_000, 1).var().item() == pytest.approx(1 / 16, rel=0.02)


def test_vectors_and_groups_without_rank_are_adamws():
    torch.manual_seed(0)
    mine = [nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5, 4))]
    theirs = [nn.Parameter(p.detach().clone()) for p in mine]
    apollo = Apollo(
        [{"params": mine[:1]}, {"params": mine[1:], "rank": None}], lr=0.1, eps=1e-8, weight_decay=0.1
    )
    adamw = torch.optim.AdamW(theirs, lr=0.1, eps=1e-8, weight_decay=0.1, fused=True)
    for _ in range(4):
        for a, b in zip(mine, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        apollo.step()
        adamw.step()
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_state_dict_brings_back_the_seed_of_each_matrix():
    params = [nn.Parameter(torch.ones(6, 6)) for _ in range(2)]
    optimizer, other = (
        Apollo([p], rank=2, update_gap=2, seed=s) for p, s in zip(params, (1, 2), strict=True)
    )
    for step in range(3):
        params[0].grad = torch.full((6, 6), 1.0 + step)
        optimizer.step()
    params[1].data.copy_(params[0].data)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.state[params[1]]["seed"].dtype == torch.int64
    for param, each in zip(params, (optimizer, other), strict=True):
        param.grad = torch.eye(6)
        each.step()
    assert torch.equal(*params)


@pytest.mark.parametrize(
    "wrong", [{"rank": 0}, {"scale": 0}, {"update_gap": 0}, {"lr": -1.0}, {"betas": (0.9, 1.0)}]
)
def test_wrong_hyper_parameters_are_refused(wrong):
    with pytest.raises(ValueError, match=" must "):
        Apollo([nn.Parameter(torch.ones(2, 2))], **wrong)
