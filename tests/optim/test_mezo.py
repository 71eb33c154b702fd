"""MeZO is the published rule, bit for bit, with a direction that any part of which can be drawn again."""

from __future__ import annotations

import hashlib
import io
import math

import pytest
import torch
from torch import nn

from holdfast.optim import Joined, MeZO, mezo
from holdfast.optim.mezo import SLICE_ELEMENTS, Delta, noise


def drawn(*numbers):
    made = hashlib.blake2b("/".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(made, "little") >> 1


def direction(seed, step, elements):
    """Slice by slice, each from a key of its own."""
    slices = []
    for number in range(-(-elements // SLICE_ELEMENTS)):
        generator = torch.Generator().manual_seed(drawn(seed, step, number))
        slices.append(
            torch.randn(min(SLICE_ELEMENTS, elements - number * SLICE_ELEMENTS), generator=generator)
        )
    return torch.cat(slices)


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    sizes = [(7, 5), (11,), (SLICE_ELEMENTS + 9,)]
    return [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]


def loss_of(params):
    return sum((param * 3 - index).float().cos().sum() for index, param in enumerate(params))


def two_groups(params, **options):
    groups = [{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:], "lr": 1e-4}]
    return MeZO(groups, lr=1e-3, epsilon=1e-2, seed=5, **options)


def test_a_step_is_the_published_rule_bit_for_bit():
    params = parameters()
    optimizer = two_groups(params)
    expected, epsilon = [param.detach().clone() for param in params], 1e-2
    for step in range(4):
        z = [direction(drawn(5, k), step, w.numel()).view(w.shape) for k, w in enumerate(expected)]
        losses = [float(loss_of([w + d * by for w, d in zip(expected, z)])) for by in (epsilon, -epsilon)]
        g = (losses[0] - losses[1]) / (2 * epsilon)
        decayed = [expected[0] * (1 - 1e-3 * 0.1), *expected[1:]]
        expected = [w - d * (rate * g) for w, d, rate in zip(decayed, z, (1e-3, 1e-4, 1e-4))]
        assert optimizer.step(lambda: loss_of(params)) == (losses[0] + losses[1]) / 2
        assert all(torch.equal(param, w) for param, w in zip(params, expected))


def test_it_goes_downhill():
    params = [nn.Parameter(torch.full((20,), 3.0))]
    optimizer = MeZO(params, lr=1e-2)
    losses = [optimizer.step(lambda: params[0].square().sum()) for _ in range(200)]
    assert losses[-1] < 0.05 * losses[0]


def test_a_direction_is_normal_and_another_for_each_seed_step_and_slice():
    size = SLICE_ELEMENTS
    found = [
        noise(seed, step, start, start + size) for seed in (1, 2) for step in (0, 1) for start in (0, size)
    ]
    for z in found:
        assert abs(z.mean()) < 4 / math.sqrt(size) and abs(z.square().mean() - 1) < 6 / math.sqrt(size)
    for i, one in enumerate(found):
        assert all(abs((one * other).mean()) < 5 / math.sqrt(size) for other in found[:i])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_direction_is_one_whatever_the_default_dtype(dtype):
    """A script may have another than the command that reads its run."""
    before = noise(1, 2, 0, 100)
    torch.set_default_dtype(dtype)
    try:
        found = noise(1, 2, 0, 100)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32 and torch.equal(found, before)


@pytest.mark.parametrize("elements", [1, 15, 16, 17, 63, 64, 65, 200])
def test_any_part_moves_as_it_does_within_the_whole(monkeypatch, elements):
    monkeypatch.setattr(mezo, "SLICE_ELEMENTS", 64)
    delta = Delta(0.7, ({"lr": 0.1, "weight_decay": 0.1},))
    before = torch.randn(elements, generator=torch.Generator().manual_seed(1))
    whole, step = before.clone(), torch.tensor(3.0)
    delta.apply(whole, torch.tensor(9), step, 0)
    assert step == 4 and not torch.equal(whole, before)
    for first in range(0, elements, 13):
        for stop in range(first, elements + 1, 17):
            part = before[first:stop].clone()
            delta.apply_part(part, first, elements, 9, 3, 0)
            assert torch.equal(part, whole[first:stop]), (first, stop)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_moves_nothing_and_the_next_step_has_another_direction(bad):
    params = parameters()
    optimizer, before = two_groups(params), [param.detach().clone() for param in params]
    losses = iter([1.0, bad, 1.0, 2.0])
    assert not math.isfinite(optimizer.step(lambda: next(losses)))
    assert all(torch.equal(param, w) for param, w in zip(params, before))
    optimizer.step(lambda: next(losses))
    moved = (before[1] - params[1]).detach()
    z = direction(drawn(5, 1), 1, 11)
    assert torch.allclose(moved, z * (1e-4 * (1.0 - 2.0) / 2e-2), rtol=1e-3)


def test_parameters_that_do_not_require_grad_stay_and_have_no_noise():
    params = parameters()
    params[0].requires_grad_(False)
    optimizer, before = two_groups(params), params[0].detach().clone()

    def loss():
        assert torch.equal(params[0], before)
        return loss_of(params)

    optimizer.step(loss)
    assert torch.equal(params[0], before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_goes_on_from_a_state_dict(dtype):
    params = parameters(dtype)
    optimizer = two_groups(params)
    optimizer.step(lambda: loss_of(params))
    torch.save(optimizer.state_dict(), kept := io.BytesIO())
    kept.seek(0)
    others = [nn.Parameter(param.detach().clone()) for param in params]
    resumed = MeZO([{"params": others[:1]}, {"params": others[1:]}], seed=77)
    resumed.load_state_dict(torch.load(kept))
    for _ in range(2):
        assert resumed.step(lambda: loss_of(others)) == optimizer.step(lambda: loss_of(params))
    assert all(torch.equal(one, other) for one, other in zip(params, others))


def test_both_losses_see_the_same_random_numbers():
    params, drawn = [nn.Parameter(torch.ones(3))], []
    optimizer = MeZO(params)
    for _ in range(2):
        optimizer.step(lambda: drawn.append(torch.rand(2)) or 1.0)
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[2], drawn[3])
    assert not torch.equal(drawn[0], drawn[2])


def test_a_loss_that_fails_leaves_parameters_as_they_were():
    params = parameters()
    optimizer, before = two_groups(params), [param.detach().clone() for param in params]
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert all(torch.equal(param, w) for param, w in zip(params, before))


def test_what_it_cannot_do_is_refused():
    params = parameters()
    with pytest.raises(ValueError, match="takes a closure"):
        MeZO(params).step()
    for epsilon in (1.0, 0.0):
        with pytest.raises(ValueError, match="epsilon is one for all"):
            MeZO([{"params": params[:1]}, {"params": params[1:], "epsilon": epsilon}])
    with pytest.raises(ValueError, match="and positive"):
        MeZO([{"params": params, "epsilon": 0.0}])
    with pytest.raises(ValueError, match="cannot be joined"):
        Joined(MeZO(params[:1]), torch.optim.SGD(params[1:], lr=0.1))
    for options in ({"lr": -1.0}, {"epsilon": 0.0}, {"weight_decay": -0.1}):
        with pytest.raises(ValueError, match="must not be negative"):
            MeZO(params, **options)
