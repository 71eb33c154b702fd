"""torch's own detector of data races on a CUDA device, entered on every thread that gives the device something to do.

It is run by itself: ``pytest -m gpu tests/gpu/sanitized.py``. The detector knows memory by the address at which
a tensor begins, so a view at an offset is other memory to it: what it finds is worth looking at, and what it does not
find says little.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from holdfast.offload.memory.device import SeparateDevice
from plain_loops import SETTINGS, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_access_races_with_another(tmp_path, monkeypatch, setting):
    """The detector raises where an access has no order. Its mode is a thread's own, so each lane enters it."""
    from torch.cuda import _sanitizer

    _sanitizer.enable_cuda_sanitizer()
    mode, lane = _sanitizer.cuda_sanitizer.dispatch, SeparateDevice.lane

    @contextmanager
    def watched(self, op):
        with lane(self, op), mode:
            yield

    monkeypatch.setattr(SeparateDevice, "lane", watched)
    train(tmp_path, "cuda", **SETTINGS[setting])
    torch.cuda.synchronize()
