"""Matrices as products of narrow ones: to the last bit what torch's hook computes, and what a loop multiplies by."""

from __future__ import annotations

import pytest
import torch

from holdfast.delta.codecs import ArrayReader, array_key, expand
from holdfast.delta.lowrank import factor_between, narrow, same_bits, times, whole

SHAPES = [(7, 13), (64, 40), (768, 768), (1001, 333), (5000, 96), (5, 1), (1, 5)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def back(arrays, elements, dtype):
    """What a record of ``arrays`` is decoded to."""
    keyed = {array_key(name, array.dtype): array for name, array in arrays.items()}
    return expand({"kind": "lowrank"}, ArrayReader(keyed).take, elements, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", [1, 2, 4, 8])
def test_the_product_has_the_bits_that_it_has_in_a_bucket(dtype, rank):
    """Where DDP puts a gradient, and the hook its matrices, nothing is aligned."""
    torch.manual_seed(0)
    for rows, columns in SHAPES:
        few = min(rank, rows, columns)
        left, right = torch.randn(rows, few).to(dtype), torch.randn(columns, few).to(dtype)
        bucket = torch.empty(rows * columns + 3, dtype=dtype)
        torch.bmm(left[None], right[None].transpose(1, 2), out=bucket[3:].view(1, rows, columns))
        for clipped in (bucket[3:], bucket[3:] * torch.tensor(0.37, dtype=dtype)):
            factor = factor_between(bucket[3:], clipped)
            found = back(narrow(left, right, factor), rows * columns, dtype)
            assert same_bits(found, clipped), (rows, columns, factor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_factor_of_a_loop_that_clips_is_found(dtype):
    torch.manual_seed(0)
    for number in range(200):
        grad = torch.randn(2_000).to(dtype) * 10 ** (number % 5 - 2)
        grad[: number % 7] = 0
        clipped = torch.nn.Parameter(torch.zeros(2_000, dtype=dtype))
        clipped.grad = grad.clone()
        torch.nn.utils.clip_grad_norm_([clipped], 0.5 + 0.01 * number)
        factor = factor_between(grad, clipped.grad)
        assert same_bits(times(grad, factor), clipped.grad), number


def test_what_was_not_multiplied_has_no_factor():
    product = torch.randn(300)
    assert factor_between(product, product) == 1.0
    assert factor_between(product, product + 1e-3) == 1.0
    assert factor_between(torch.zeros(300), product) == 1.0


def test_a_gradient_that_is_no_product_is_there_as_it_is():
    flat = torch.randn(91)
    assert same_bits(back(whole(flat), 91, torch.float32), flat)


def test_signs_of_zeros_and_nan_count():
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
