"""Computing: what decides the bits of a step besides numbers, and is the process's own.

How many threads torch has (sums within a matrix are in another order with another number), whether numbers that are
nearly zero are computed as zero, and the type of tensors that are made without one, such as the counts of steps. Each
record says how its step was computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..state.live import LiveState
from ..update.kinds import is_elementwise
from ..update.threads import set_torch_threads

Told = Mapping[str, Any]


def computing() -> dict[str, Any]:
    """How this process computes now, as JSON."""
    tiny = torch.tensor(1e-39, dtype=torch.float32, device="cpu")  # the script may have other defaults
    dtype = str(torch.get_default_dtype()).removeprefix("torch.")
    return {"threads": torch.get_num_threads(), "flush_denormal": bool(tiny * 1 == 0), "default_dtype": dtype}


def told_in(progress: Mapping[str, Any], base: Mapping[str, Any]) -> Told:
    """How the last step of ``progress`` was computed, which follows ``base``: earlier versions said of bases alone how
    many threads there were."""
    replay = base.get("replay", {})
    return progress.get("computing", {"threads": replay["threads"]} if "threads" in replay else {})


def needs_threads(state: LiveState, after_update: Callable | None) -> bool:
    """Whether the bits of a step may depend on how many there are: an update of each element by itself has the same
    with any."""
    return after_update is not None or not all(map(is_elementwise, state.optimizers))


@contextmanager
def computing_as(told: Told, threads: bool) -> Iterator[None]:
    """Compute as was ``told``, with as many threads too if ``threads`` says so, and afterwards as before."""
    here = computing()
    there = {**here, **told}
    if not threads:
        there["threads"] = here["threads"]
    _compute_as(here, there)
    try:
        yield
    finally:
        _compute_as(there, here)


def _compute_as(before: Told, now: Told) -> None:
    if before["flush_denormal"] != now["flush_denormal"]:
        torch.set_flush_denormal(now["flush_denormal"])
    if before["threads"] != now["threads"]:
        set_torch_threads(now["threads"])
    if before["default_dtype"] != now["default_dtype"]:
        torch.set_default_dtype(getattr(torch, now["default_dtype"]))


def told_of_other(told: Told, threads: bool) -> list[str]:
    """What is to be said where this process computes otherwise than was ``told`` of the run's last step."""
    here = computing()
    there = {**here, **told}
    texts = []
    if there["flush_denormal"] != here["flush_denormal"]:
        run, script = (f"torch.set_flush_denormal({each['flush_denormal']})" for each in (there, here))
        texts.append(
            f"the run was trained under {run} and is replayed so, and this script has {script}, with which it goes on."
            f" To go on as before, call {run} at the beginning of the script."
        )
    if there["default_dtype"] != here["default_dtype"]:
        run, script = (f"torch.set_default_dtype(torch.{each['default_dtype']})" for each in (there, here))
        texts.append(
            f"the run was trained under {run} and is replayed so, and this script has {script}, with which it goes on:"
            f" what its optimizer makes from here on has another type. To go on as before, call {run} at the beginning"
            " of the script."
        )
    if threads and there["threads"] != here["threads"]:
        run, script = there["threads"], here["threads"]
        texts.append(
            f"the run was trained with torch.set_num_threads({run}) and is replayed so, and this process has {script},"
            " with which it goes on: the last bits of what its optimizer computes may be others. To go on as before,"
            f" call torch.set_num_threads({run}) at the beginning of the script."
        )
    return texts
