"""The settings of a process, and the random numbers of a step, that decide the bits of an update.

The number of torch's threads changes the order of sums in a matrix product, denormal numbers may be flushed to zero,
and the default dtype applies to tensors made without one, such as step counts. Some updates draw from the global
generators. Each log record holds both, and replay computes under the recorded settings and with the recorded draws. The
settings of the process are restored afterwards. Called by the optimizer hooks, by ``replay``, and by recovery for its
warnings.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..accelerators import current_kind, random_states
from ..optim.kinds import is_elementwise
from ..optim.torch_threads import set_torch_threads
from ..state.encoding import decode, encode
from ..state.live_state import LiveState
from ..state.progress import restore_random_state

Told = Mapping[str, Any]


def computing() -> dict[str, Any]:
    """Return the current settings of this process, as JSON."""
    tiny = torch.tensor(1e-39, dtype=torch.float32, device="cpu")  # the script may have other defaults
    dtype = str(torch.get_default_dtype()).removeprefix("torch.")
    return {"threads": torch.get_num_threads(), "flush_denormal": bool(tiny * 1 == 0), "default_dtype": dtype}


def told_in(progress: Mapping[str, Any], base: Mapping[str, Any]) -> Told:
    """Return the settings of the last step of ``progress``, which follows the snapshot progress ``base``.

    Earlier versions stored only the number of threads, and only in snapshots.
    """
    replay = base.get("replay", {})
    return progress.get("computing", {"threads": replay["threads"]} if "threads" in replay else {})


def needs_threads(state: LiveState, after_update: Callable | None) -> bool:
    """Return whether the bits of a step may depend on the number of threads.

    An elementwise update has the same bits with any number.
    """
    return after_update is not None or not all(map(is_elementwise, state.optimizers))


@contextmanager
def computing_as(told: Told, threads: bool) -> Iterator[None]:
    """Apply the settings ``told`` inside the context, the number of threads only with ``threads``, and restore them
    after.
    """
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
    """Return warnings where the settings of this process differ from those ``told`` of the run's last step."""
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


def generators() -> list[Any]:
    """Return the states of all global generators, in the form that compares fastest."""
    of_devices = [state for states in random_states().values() for state in states]
    return [random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state(), *of_devices]


def drawn_since(before: list[Any]) -> Any:
    """Return the states ``before`` as JSON if anything was drawn since; otherwise None."""
    python, numpy, *torchs = before
    now = generators()
    if now[0] == python and _alike(now[1], numpy) and all(map(torch.equal, now[2:], torchs)):
        return None
    version, words, gauss = python
    packed = (version, np.array(words, dtype=np.uint32), gauss)
    of_devices = {current_kind() or "cuda": torchs[1:]}
    return encode({"python": packed, "numpy": numpy, "torch": torchs[0], **of_devices})


def draw_again(drawn: Any) -> None:
    """Set the generators to the states that ``drawn_since`` returned; None leaves them as they are."""
    if drawn is not None:
        restore_random_state(decode(drawn))


def _alike(one: Any, other: Any) -> bool:
    return one[2:] == other[2:] and np.array_equal(one[1], other[1])
