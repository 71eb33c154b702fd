"""The devices of these tests.

cuBLAS asks once for its workspace, at the first call: without one of its own it gives other bits every time.
"""

import os

import pytest
import torch

from cli.conftest import holdfast  # noqa: F401

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

ON_CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
        pytest.mark.filterwarnings("default"),
    ],
)
# torch has one kind of accelerator in a process: where CUDA is, none is played.
DEVICES = [ON_CUDA]
if not torch.cuda.is_available():
    from played_device import played  # noqa: F401

    DEVICES.append("played")


@pytest.fixture(params=DEVICES)
def device(request):
    """CUDA, and where there is none a device that is played in Python."""
    if request.param == "played":
        request.getfixturevalue("played")
    return request.param


ON_HOST = pytest.param("cpu", marks=pytest.mark.campaign)
"""What tests/cli and tests/integrations show already, so that a case is known to be right."""


@pytest.fixture(params=[ON_CUDA] if torch.cuda.is_available() else [ON_HOST])
def cuda_or_host(request):
    return request.param


@pytest.fixture(params=[ON_CUDA])
def cuda(request):
    return request.param


@pytest.fixture(autouse=True)
def restored_settings():
    """What a test sets in torch is undone."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_default_device(None)


@pytest.fixture
def same_bits(restored_settings):
    """Kernels have the same bits every time."""
    torch.use_deterministic_algorithms(True, warn_only=True)
