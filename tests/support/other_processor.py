"""A stand-in for another kind of processor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from holdfast.checkpoint import arithmetic
from holdfast.state.layout.regions import local_of


@contextmanager
def other_processor() -> Iterator[None]:
    """Compute square roots as a processor does that rounds all of them up."""
    root = torch.Tensor.sqrt

    def rounded_up(x: torch.Tensor) -> torch.Tensor:
        found = root(x)
        here = local_of(found)
        here.copy_(torch.nextafter(here, here.new_full((), torch.inf)))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "sqrt", rounded_up)
        arithmetic.arithmetic_of.cache_clear()
        try:
            yield
        finally:
            arithmetic.arithmetic_of.cache_clear()
