"""Default devices: Holdfast creates its tensors on the host, whatever ``torch.set_default_device`` the script has set.

What the engine creates without naming a device belongs on the host, so every public call runs with the host as the
default device. The model's own code gets the caller's default back (``callers_default``): blocks on the calling thread,
the rest of the model on its micro-batch's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

HOST = torch.device("cpu")

_callers: ContextVar[torch.device | None] = ContextVar("holdfast_default_device", default=None)
"""The caller's default device, inside a call that has changed it."""

P = ParamSpec("P")
R = TypeVar("R")


def on_host_by_default(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap the public call ``function`` so that the host is the default device inside it."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        before = torch.get_default_device()
        if before == HOST:
            return function(*args, **kwargs)
        token = _callers.set(before)
        try:
            with HOST:
                return function(*args, **kwargs)
        finally:
            _callers.reset(token)

    return called


def callers_default_device() -> torch.device:
    """Return the default device that the script has set."""
    return _callers.get() or torch.get_default_device()


@contextmanager
def callers_default() -> Iterator[None]:
    """Restore the script's own default device, for code of its model."""
    device = _callers.get()
    if device is None:
        yield
        return
    with device:
        yield
