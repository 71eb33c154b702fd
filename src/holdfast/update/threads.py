"""Threads that work beside the model's computations: each computes by itself."""

from __future__ import annotations

import threading

import torch

_setting = threading.Lock()


def keep_torch_threads() -> None:
    """Let the calling thread have what torch has now, whatever threads that it begins set for themselves: one that asks
    for the first time, in the moment in which another sets its own, would keep 1.

    Roots and the like go through MKL, which chooses its code at the first call: while another thread sets its number,
    one that gives 12 bits (torch 2.13). Of that step no replay would have the bits. So they are called here before.
    """
    with _setting:
        torch.get_num_threads()
        for dtype in (torch.float32, torch.float64):
            for function in (torch.sqrt, torch.exp, torch.log, torch.tanh):
                function(torch.ones(1, dtype=dtype))


def set_torch_threads(count: int) -> None:
    """As torch.set_num_threads, at no moment in which another thread sets its own and what those to come have."""
    with _setting:
        torch.set_num_threads(count)


def one_torch_thread() -> None:
    """Let torch compute on this thread alone; other threads, and those to come, are as they would be without. Who
    begins such threads calls ``keep_torch_threads`` before.

    libgomp keeps helpers for every thread that has computed with several. With more of them than cores it lets all
    sleep at the end of every parallel loop, the model's among them.
    """
    with _setting:
        before = torch.get_num_threads()
        torch.set_num_threads(1)  # and so would threads begin that have not computed yet
        other = threading.Thread(target=torch.set_num_threads, args=(before,))
        other.start()
        other.join()
