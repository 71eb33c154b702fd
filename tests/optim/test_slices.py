"""The host optimizer has the bits of the user's own optimizer, whatever the sizes and however a tensor is cut."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from holdfast.errors import BadInput, OptimizerNotSupported
from holdfast.optim import AdamW8bit, AdamWBF16, Apollo, Grass, Joined
from holdfast.optim import host_optimizer as host
from holdfast.optim.declared_state import Form, Slots
from holdfast.optim.host_optimizer import SplitMaster
from holdfast.optim.kinds import ELEMENTWISE, REFUSED, WHOLE, kind_of
from holdfast.optim.torch_threads import update_threads
from holdfast.state.split_masters import carry_bytes
from holdfast.state.tensor_entries import STEP

SIZES = (0, 1, 255, 256, 257, 4095, 4096, 4097, 10007)
KINDS = [*(getattr(torch.optim, name) for name in ELEMENTWISE), AdamWBF16, AdamW8bit]
SHAPES = ((5, 7), (7, 5), (64, 64), (1, 9), (3,))


def plain(kind, shape, steps):
    """Parameter and state after so many steps of the optimizer itself."""
    param = nn.Parameter(values(shape, 0))
    optimizer = kind(
        [param], lr=0.01, **({"fused": True} if "fused" in kind.__init__.__code__.co_varnames else {})
    )
    for step in range(1, steps + 1):
        param.grad = values(shape, step)
        optimizer.step()
    return {"param": param.detach(), **{k: v for k, v in optimizer.state[param].items() if v is not None}}


def in_parts(value):
    """An fp32 tensor as a master in parts."""
    count = value.numel()
    sizes = 2 * count, 2 * count, carry_bytes(count)
    master = SplitMaster.of(tuple(value.shape), *(torch.zeros(size, dtype=torch.uint8) for size in sizes))
    master.set(value)
    return master


def by_the_host(kind, shape, steps, threads=1, is_split=False):
    """The same of the host optimizer, and a copy in bf16."""
    optimizer = host.HostOptimizer(kind([nn.Parameter(torch.ones(1, 1))], lr=0.01))
    optimizer.start_helpers(2, threads)
    slots = optimizer.slots(0, shape)
    state = host.ParameterState(
        param=in_parts(values(shape, 0)) if is_split else values(shape, 0), grad=torch.empty(shape),
        copy=torch.empty(shape, dtype=torch.bfloat16), group=0,
        tensors={name: torch.zeros(form.shape, dtype=form.dtype) for name, form in slots.tensors.items()},
        scalars={name: torch.zeros((), dtype=dtype) for name, dtype in {**slots.scalars, STEP: torch.float32}.items()},
    )  # fmt: skip
    for name, value in optimizer.state_of(optimizer._optimizer.param_groups[0]["params"][0]).items():
        if name in state.scalars:
            state.scalars[name].copy_(value)
    for step in range(1, steps + 1):
        state.grad = values(shape, step)
        optimizer.update(state, optimizer.snapshot())
    optimizer.close()
    param = state.param.joined() if isinstance(state.param, SplitMaster) else state.param
    assert torch.equal(state.copy, param.bfloat16())
    return {"param": param, **state.tensors, **state.scalars}


def values(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same(found, expected):
    assert found.keys() - expected.keys() <= {STEP}
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("elements", SIZES)
def test_slices_have_the_bits_of_the_whole_at_all_sizes(monkeypatch, kind, elements):
    monkeypatch.setattr(host, "SLICE_ELEMENTS", 4096)
    same(by_the_host(kind, (elements,), 7), plain(kind, (elements,), 7))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_threads_that_share_slices_leave_the_bits(monkeypatch, kind):
    monkeypatch.setattr(host, "SLICE_ELEMENTS", 4096)
    monkeypatch.setattr(host, "SHARED_SLICE_ELEMENTS", 16 * 4096)
    same(by_the_host(kind, (200_007,), 4, threads=3), plain(kind, (200_007,), 4))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("elements, threads", [(0, 1), (257, 1), (4097, 1), (10007, 1), (100_007, 3)])
def test_masters_in_parts_have_the_bits_of_whole_ones(monkeypatch, kind, elements, threads):
    for name in ("SLICE_ELEMENTS", "SPLIT_SLICE_ELEMENTS"):
        monkeypatch.setattr(host, name, 4096)
    same(by_the_host(kind, (elements,), 4, threads, is_split=True), plain(kind, (elements,), 4))


@pytest.mark.slow
def test_an_update_holds_no_memory_afterwards():
    """What it was given may be lent, and goes back when nothing refers to it."""
    optimizer = host.HostOptimizer(torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.01))
    given = {name: torch.zeros(64) for name in ("param", "grad", "exp_avg", "exp_avg_sq")}
    tensors = {name: given[name] for name in ("exp_avg", "exp_avg_sq")}
    state = host.ParameterState(
        param=given["param"], grad=given["grad"], tensors=tensors, scalars={STEP: torch.ones(())}, copy=None,
        group=0,
    )  # fmt: skip
    optimizer.update(state, optimizer.snapshot())
    left = [weakref.ref(tensor) for tensor in given.values()]
    del given, tensors, state
    gc.collect()
    assert [reference() for reference in left] == [None] * 4


@pytest.mark.parametrize(
    "cores, unified, count", [(16, False, 6), (8, False, 2), (7, False, 1), (2, False, 1), (16, True, 1)]
)
def test_idle_cores_help_beside_a_device(monkeypatch, cores, unified, count):
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    assert update_threads(unified, workers=2) == count


@pytest.mark.parametrize(
    "kind", [torch.optim.Adafactor, torch.optim.Muon, Apollo, Grass], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_whole_tensor_is_updated_at_once(monkeypatch, kind, shape):
    if kind is torch.optim.Muon and len(shape) != 2:
        return
    monkeypatch.setattr(host, "SLICE_ELEMENTS", 4096)
    for is_split in (False, True):
        same(by_the_host(kind, shape, 7, is_split=is_split), plain(kind, shape, 7))


def test_every_class_of_torch_is_elementwise_whole_or_refused():
    classes = {
        name
        for name in torch.optim.__all__
        if isinstance(getattr(torch.optim, name), type) and name != "Optimizer"
    }
    assert classes == {*ELEMENTWISE, *WHOLE, *REFUSED}


@pytest.mark.parametrize("name", REFUSED)
def test_a_class_that_is_refused_says_why_and_what_instead(name):
    optimizer = getattr(torch.optim, name)([nn.Parameter(torch.ones(2))])
    with pytest.raises(OptimizerNotSupported, match=f"{name} cannot be run out of core: .* Use Adam"):
        host.HostOptimizer(optimizer)


class Neighbours(AdamWBF16):
    """Each element is updated by the gradient of the one before it."""

    def update(self, param, grad, state, group):
        super().update(param, grad.roll(1), state, group)


def test_an_optimizer_that_says_it_can_be_cut_is_not_believed():
    with pytest.raises(OptimizerNotSupported, match=r"Neighbours .* gives other bits in 'param' on slices"):
        host.HostOptimizer(Neighbours([nn.Parameter(torch.ones(2))]))


def test_a_whole_optimizer_that_keeps_what_is_not_known_is_refused(monkeypatch):
    monkeypatch.setitem(WHOLE, "Muon", lambda shape: Slots({"momentum": Form(shape)}))
    with pytest.raises(
        OptimizerNotSupported, match=r"Muon of torch .* keeps .*momentum_buffer.* where .*'momentum'"
    ):
        host.HostOptimizer(torch.optim.Muon([nn.Parameter(torch.ones(2, 2))]))


def test_groups_of_joined_optimizers_are_each_updated_by_its_own():
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    joined = Joined(torch.optim.SGD([vector], lr=0.1), torch.optim.Muon([matrix]))
    found = host.HostOptimizer(joined)
    assert [set(found.slots(group, (2, 2)).tensors) for group in (0, 1)] == [set(), {"momentum_buffer"}]
    assert kind_of(joined.members[0], found.snapshot().groups[0]).cut


@pytest.mark.parametrize("way", ["register_step_pre_hook", "register_step_post_hook", "step"])
def test_what_waits_for_a_step_that_is_never_made_is_refused(way):
    adamw = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    host.HostOptimizer(adamw)
    if way == "step":
        adamw.step = print
    else:
        getattr(adamw, way)(print)
    with pytest.raises(BadInput, match=f"AdamW has a .*{way}.*, which would not be called"):
        host.HostOptimizer(Joined(adamw))
