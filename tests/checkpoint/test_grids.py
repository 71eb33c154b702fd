"""Gradients that a device compresses together: the bits of each by itself, in few operations, without a question to the
device. There is none here: the host's tensors are taken for a device's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.checkpoint.capture.staging_buffers import StagingBuffer
from holdfast.checkpoint.compression import lossy
from holdfast.checkpoint.compression.codecs import ArrayReader, array_key, expand
from holdfast.checkpoint.compression.grids import alike
from holdfast.checkpoint.compression.lossy import Int8, TopK
from holdfast.state.live_state import LiveState
from training import same_bits

SHAPES = [(), (0,), (3, 0), (1,), (2,), (1023,), (1024,), (1025,), (3, 700), (5000,), (40, 1024)]
CODECS = [TopK(r) for r in (0.001, 0.01, 0.2, 0.6, 0.999, 1.0)] + [
    TopK(0.2, error_feedback=False), Int8(16), Int8(), Int8(error_feedback=False)
]  # fmt: skip

WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique",
    "_unique2",
    "equal",
    "item",
    "repeat_interleave",
}
"""Operations whose result the host has to know, or whose size only the device does."""


class Counting(TorchDispatchMode):
    """Counts operations that a device would begin, views apart, and those that the host would wait for."""

    def __init__(self):
        super().__init__()
        self.begun = self.waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        is_view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        self.begun += not is_view
        chosen = name.startswith("index") and any(
            isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8)
            for given in args
            if isinstance(given, list | tuple)
            for each in given
        )
        self.waits += chosen or name in WAITS
        return func(*args, **(kwargs or {}))


def parameters(dtype):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES] + [
        nn.Parameter(torch.randn(40, 30, dtype=dtype).T)
    ]


def consumed(codec, dtype, together, monkeypatch):
    """After each of three steps, the second of which is skipped: gradients, residuals, and what replay makes of the
    arrays."""
    monkeypatch.setattr(lossy, "is_accelerator", lambda device: together)
    trained, residuals, found = parameters(dtype), {}, []
    for step in range(3):
        for number, parameter in enumerate(trained):
            torch.manual_seed(step * 100 + number)
            parameter.grad = torch.randn_like(parameter)
        trained[9].grad[7], trained[9].grad[8], trained[9].grad[9] = torch.nan, torch.inf, -torch.inf
        if not isinstance(codec, TopK):
            trained[8].grad = torch.randn(1, 700, dtype=dtype).expand(3, 700)
        named = [(f"{number:02}", parameter) for number, parameter in enumerate(trained)]
        arrays = codec.consume(named, residuals, skipped=step == 1)
        replayed = [read(codec, arrays[name], p) for name, p in named]
        found.append(([p.grad for p in trained], [r.clone() for r in residuals.values()], replayed))
        if step != 1:
            assert all(same_bits(one, p.grad) for one, p in zip(replayed, trained, strict=True))
    return found


def read(codec, arrays, parameter):
    reader = ArrayReader({array_key(name, array.dtype): array for name, array in arrays.items()})
    flat = expand(codec.about(), reader.take, parameter.numel(), parameter.dtype)
    reader.check_end()
    return flat.view(parameter.shape)


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_together_has_bits_of_each_alone(monkeypatch, codec, dtype):
    """Of bf16 gradients many are as large as each other, so which of them are the largest may differ."""
    together = consumed(codec, dtype, True, monkeypatch)
    if dtype != torch.bfloat16 or isinstance(codec, Int8):
        alone = consumed(codec, dtype, False, monkeypatch)
        for one, other in zip(together, alone, strict=True):
            for mine, theirs in zip(one, other, strict=True):
                assert len(mine) == len(theirs) and all(map(same_bits, mine, theirs))


@pytest.mark.parametrize("codec", [TopK(0.2), Int8()], ids=str)
def test_dtypes_are_compressed_apart(monkeypatch, codec):
    found = []
    for together in (False, True):
        monkeypatch.setattr(lossy, "is_accelerator", lambda device, together=together: together)
        torch.manual_seed(0)
        trained = [
            nn.Parameter(torch.randn(1500, dtype=dtype)) for dtype in (torch.float32, torch.float64) * 2
        ]
        for parameter in trained:
            parameter.grad = torch.randn_like(parameter)
        codec.consume(
            [(f"{number}", parameter) for number, parameter in enumerate(trained)], {}, skipped=False
        )
        found.append([parameter.grad for parameter in trained])
    assert all(map(same_bits, *found))


@pytest.mark.parametrize("codec", [TopK(0.2), TopK(1.0), Int8()], ids=str)
def test_operations_do_not_grow_with_parameters(monkeypatch, codec):
    """From gradients to the slot; nothing that the host waits for."""
    monkeypatch.setattr(lossy, "is_accelerator", lambda device: True)
    counts = []
    for many in (4, 150):
        model = nn.ParameterList([torch.randn(70 + n, 11) for n in range(many)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        slot = StagingBuffer(codec.layouts(LiveState(model, [optimizer])))
        trained, residuals = list(model.named_parameters()), {}
        for _, parameter in trained:
            parameter.grad = torch.randn_like(parameter)
        codec.consume(trained, residuals, skipped=False)  # what is asked of the shapes is kept from here on
        with Counting() as counting:
            assert codec.write(slot, 0, codec.consume(trained, residuals, skipped=False)) is not None
        assert counting.waits == 0
        counts.append(counting.begun)
    assert counts[0] == counts[1] < 45


def test_too_many_elements_are_compressed_in_parts(monkeypatch):
    monkeypatch.setattr("holdfast.checkpoint.compression.grids.ELEMENTS_AT_ONCE", 3000)
    trained = [(str(number), parameter) for number, parameter in enumerate(parameters(torch.float32))]
    for _, parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    sizes = [[parameter.numel() for _, parameter in group] for group in alike(trained)]
    assert len(sizes) > 3 and all(sum(each) <= 3000 or len(each) == 1 for each in sizes)
    whole = consumed(TopK(0.2), torch.float32, False, monkeypatch)
    parts = consumed(TopK(0.2), torch.float32, True, monkeypatch)
    assert all(
        same_bits(*pair) for a, b in zip(whole, parts, strict=True) for pair in zip(a[0], b[0], strict=True)
    )
