"""Flat tensors as some of their elements, as integers with scales, and as memory that was squeezed."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from holdfast.checkpoint.compression.codecs import CHUNK, Exact, quantise, scaled, squeeze, unsqueeze
from holdfast.checkpoint.compression.sparse import BITS, SparseScratch, pick, spread
from holdfast.errors import BadInput
from training import same_bits

SIZES = [0, 1, 2, 1023, 1024, 1025, 4096, 5003]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("density", [0.0, 0.01, 0.49, 0.51, 0.65, 0.67, 0.9, 1.0])
@pytest.mark.parametrize("elements", SIZES)
def test_the_elements_that_are_there_come_back_and_take_no_more_than_all(elements, density, dtype):
    torch.manual_seed(elements)
    flat = torch.where(torch.rand(elements) < density, torch.randn(elements), 0.0).to(dtype)
    if elements > 2:
        flat[:1024] = -0.0  # a whole block of zeros that are there
        flat[-1] = torch.nan
    chosen = flat.view(BITS[flat.element_size()]) != 0
    arrays = pick(flat, chosen, 1024)
    nbytes = arrays["indices"].nbytes + arrays["values"].nbytes
    assert nbytes <= min(flat.nbytes, int(chosen.sum()) * (2 + flat.element_size()))
    assert same_bits(spread(lambda name, *_: arrays[name], elements, dtype, 1024), flat)


def test_memory_that_is_used_again_holds_what_new_memory_does_whatever_became_of_it():
    """Optimizers write over gradients: torch's momentum of Nesterov does."""
    memory = SparseScratch(SIZES, torch.float32, 1024, torch.device("cpu"))
    for seed, density in enumerate([0.01, 0.0, 1.0, 0.3, 0.01, 0.7]):
        torch.manual_seed(seed)
        flats = [torch.where(torch.rand(size) < density, torch.randn(size), 0.0) for size in SIZES]
        arrays = [pick(flat, flat != 0, 1024) for flat in flats]
        memory.fill(lambda name, *_, given=arrays: torch.cat([each[name] for each in given]))
        assert all(map(same_bits, memory.tensors, flats))
        if seed % 2:
            torch._foreach_add_(memory.tensors, 1.0)


@pytest.mark.parametrize("elements", SIZES)
def test_integers_with_scales_are_whole_multiples_of_a_127th(elements):
    torch.manual_seed(0)
    flat = torch.randn(elements) * torch.logspace(-30, 30, elements)
    flat[100:400] = 0.0
    arrays = quantise(flat, 64)
    back = scaled(lambda name, *_: arrays[name], elements, torch.float32, 64)
    for start in range(0, elements, 64):
        block = flat[start : start + 64]
        assert (back[start : start + 64] - block).abs().max() <= block.abs().max() / 127 * 0.5001
    assert torch.equal(back[100:400], torch.zeros_like(back[100:400]))


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("content", ["noise", "zeros", "floats"])
@pytest.mark.parametrize("nbytes", [0, 4096, CHUNK - 4096, CHUNK, 2 * CHUNK + 8192])
def test_squeezed_memory_comes_back_and_is_never_longer(width, content, nbytes):
    rng = np.random.default_rng(0)
    data = {
        "noise": lambda: rng.bytes(nbytes),
        "zeros": lambda: bytes(nbytes),
        "floats": lambda: rng.standard_normal(nbytes // 4, np.float32).tobytes(),
    }[content]()
    memory = bytearray(data)
    part, frames = squeeze(memoryview(memory), width)
    assert len(part) <= nbytes and len(part) % 4096 == 0 and not any(part[sum(frames["sizes"]) :])
    assert bytes(unsqueeze(part, frames)) == data
    if nbytes > 4096 and (content == "zeros" or (content == "floats" and width == 4)):
        assert len(part) < 0.95 * nbytes


def test_without_zstandard_compression_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"pip install 'holdfast\[compress\]'"):
        Exact(compress=True)
    with pytest.raises(BadInput, match=r"pip install 'holdfast\[compress\]'"):
        unsqueeze(memoryview(b""), {"bytes": 0, "width": 4, "sizes": []})
