"""Threads that step the optimizer: each computes by itself."""

from __future__ import annotations

import torch


def one_torch_thread() -> None:
    """Let torch compute on this thread alone, in a thread that works beside the model's computations.

    torch reads the process's count at a thread's first computation, whatever was set before: hence the first line.
    """
    torch.get_num_threads()
    torch.set_num_threads(1)
