"""Moments of few bits: rounding has its mean at the value, and AdamW with them learns what AdamW learns."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import nn

from holdfast.errors import OptimizerNotSupported
from holdfast.optim import AdamW8bit, AdamWBF16
from holdfast.optim.adamw import BLOCK, decode, dynamic_map, encode, to_24_bits, to_bf16


class AdamW24(AdamW8bit):
    """``AdamW8bit`` with masters of 24 bits."""

    def __init__(self, params, **options):
        super().__init__(params, **{"master_bits": 24, **options})


KINDS = [AdamWBF16, AdamW8bit, AdamW24]


def normal(count, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def rounded(value, coded, step):
    """Once, by the rounding called ``coded``."""
    if coded == "bf16":
        return to_bf16(value, step, 1).float()
    if coded == "24 bits":
        return to_24_bits(value, step, 1)
    codes, scales = encode(value, coded == "signed", step, 1)
    return decode(codes, scales, coded == "signed")


@pytest.mark.parametrize("coded", ["bf16", "24 bits", "signed", "unsigned"])
def test_rounding_by_chance_has_its_mean_at_the_value(coded):
    value = normal(8192).abs() if coded == "unsigned" else normal(8192)
    once = rounded(value, coded, 0) - value
    mean = sum(rounded(value, coded, step).double() for step in range(400)) / 400 - value
    assert mean.abs().mean() < 0.1 * once.abs().mean()  # by 20 at independent chances
    assert mean.mean().abs() < 0.01 * once.abs().mean()


@pytest.mark.parametrize("coded", ["bf16", "24 bits", "signed", "unsigned"])
def test_a_rounded_value_is_one_of_the_two_beside_it_and_what_has_few_bits_stays(coded):
    value = normal(4097).abs() if coded == "unsigned" else normal(4097)
    found = rounded(value, coded, 3)
    parts = {"bf16": 2**7, "24 bits": 2**15}
    bound = value.abs() / parts[coded] if coded in parts else value.abs().max() * 0.0142
    assert ((found - value).abs() <= bound).all()
    assert torch.equal(rounded(found, coded, 4), found) or coded not in parts
    assert torch.equal(rounded(torch.zeros(300), coded, 1), torch.zeros(300))


def test_a_value_that_is_not_finite_is_not_rounded():
    value = torch.tensor([torch.inf, -torch.inf, torch.nan])
    assert torch.equal(to_24_bits(value, 1, 1).view(torch.int32), value.view(torch.int32))


def test_updates_leave_masters_of_24_bits():
    param = nn.Parameter(normal(513))
    optimizer = AdamW24([param], lr=0.1)
    param.grad = normal(513, 1)
    optimizer.step()
    assert not (param.detach().view(torch.int32) & 0xFF).any()
    with pytest.raises(ValueError, match="master_bits = 16 must be 24 or 32"):
        AdamW24([param], master_bits=16)


def test_the_values_of_a_byte_are_256_ascending_up_to_1():
    for signed in (True, False):
        levels = dynamic_map(signed)
        assert len(levels) == 256 and (levels.diff() > 0).all() and levels[-1] == 1
    assert 0 in dynamic_map(True) and dynamic_map(False)[0] > 0


def test_what_is_not_zero_stays_so_beside_what_is_a_billion_times_larger():
    value = torch.full((BLOCK,), 1e-9)
    value[0] = 1.0
    codes, scales = encode(value, False, 1, 1)
    assert (decode(codes, scales, False) > 0).all()


def test_a_block_has_a_scale_of_its_own():
    value = torch.cat([torch.full((BLOCK,), 1e-20), torch.full((BLOCK,), 1e20), torch.tensor([3.0])])
    codes, scales = encode(value, True, 1, 1)
    assert codes.shape == (2 * BLOCK + 1,) and scales.tolist() == value[[0, BLOCK, -1]].tolist()
    assert torch.equal(decode(codes, scales, True), value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_a_second_moment_falls_when_gradients_become_small(kind):
    """Rounded to the nearest value it would stay where it was."""
    exact, few = (nn.Parameter(torch.zeros(4096)) for _ in range(2))
    optimizers = [torch.optim.AdamW([exact], lr=1e-3, fused=True), kind([few], lr=1e-3)]
    for step in range(800):
        grad = normal(4096, step) * (1.0 if step < 20 else 0.01)
        for param, optimizer in zip((exact, few), optimizers, strict=True):
            param.grad = grad.clone()
            optimizer.step()
    expected = optimizers[0].state[exact]["exp_avg_sq"]
    state = optimizers[1].state[few]
    found = (
        state["exp_avg_sq"].float()
        if kind is AdamWBF16
        else decode(state["rms"], state["rms_scale"], False) ** 2
    )
    ratio = (found.mean() / expected.mean()).item()
    assert 0.97 < ratio < 1.05


@cache
def learnt(kind):
    """The mean loss of the last tenth of 300 steps of a small net."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))
    optimizer, losses = kind(model.parameters(), lr=5e-3), []
    for _ in range(300):
        x = torch.randn(64, 16)
        loss = (model(x) - teacher(x).detach()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[0], sum(losses[-30:]) / 30


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_small_net_learns_as_with_adamw(kind):
    first, exact = learnt(torch.optim.AdamW)
    assert exact < 0.1 * first
    assert learnt(kind)[1] == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_brings_back_every_bit_and_type(kind):
    params = [nn.Parameter(normal(513)) for _ in range(2)]
    optimizer = kind(params[:1], lr=0.1)
    other = kind(params[1:], lr=0.1)
    for step in range(3):
        params[0].grad = normal(513, step)
        optimizer.step()
    params[1].data.copy_(params[0].data)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for name, value in optimizer.state[params[0]].items():
        assert other.state[params[1]][name].dtype == value.dtype
        assert torch.equal(other.state[params[1]][name], value)
    for param, each in zip(params, (optimizer, other), strict=True):
        param.grad = normal(513, 9)
        each.step()
    assert torch.equal(*params)


@pytest.mark.parametrize("kind", KINDS)
def test_sparse_gradients_and_sharded_parameters_are_refused_with_the_way_out(kind):
    param = nn.Parameter(torch.ones(4))
    param.grad = torch.ones(4).to_sparse()
    with pytest.raises(
        OptimizerNotSupported, match=f"{kind.__name__} does not take sparse gradients.* sparse=False"
    ):
        kind([param]).step()
    param.grad, param.to_local = torch.ones(4), lambda: param  # as of a DTensor
    with pytest.raises(
        OptimizerNotSupported, match=r"sharded over ranks \(DTensor, here of \(4,\)\).* Use Distr"
    ):
        kind([param]).step()
    assert torch.equal(param, torch.ones(4))


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_in_bf16_and_with_other_strides_are_updated_as_their_values_say(kind):
    for made in (lambda: normal(24).view(4, 6).t(), lambda: normal(24).view(6, 4).bfloat16()):
        param, like = nn.Parameter(made()), nn.Parameter(made().contiguous().float())
        for each in (param, like):
            optimizer = kind([each], lr=0.1)
            for step in range(3):
                each.grad = normal(24, step).view(6, 4).bfloat16().to(each.dtype)
                optimizer.step()
                for name, value in optimizer.state[each].items():  # as a Checkpointer restores them
                    if value.shape == each.shape:
                        optimizer.state[each][name] = torch.empty_like(each, dtype=value.dtype).copy_(value)
                each.data.copy_(each.detach().bfloat16())
        assert torch.equal(param.detach(), like.detach().to(param.dtype))
