"""The settings of a process that decide the bits of an update.

The number of torch's threads changes the order of sums in a matrix product, fp32 products may be made of TF32 or bf16
ones, denormal numbers may be flushed to zero, and the default dtype applies to tensors made without one, such as step
counts. Replay computes under the recorded settings, and those of the process are restored afterwards. Called where
progress is recorded, by replay and replicas, and by recovery for its warnings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from ..accelerators import current_kind
from ..optim.kinds import is_elementwise
from ..optim.torch_threads import set_torch_threads
from ..state.live_state import LiveState

Settings = Mapping[str, Any]
LEAST_EXACT = 4
"""The bytes of the smallest element whose update has the same bits in a vector and by itself, on a CPU."""


def computing() -> dict[str, Any]:
    """Return the current settings of this process, as JSON."""
    tiny = torch.tensor(1e-39, dtype=torch.float32, device="cpu")  # the script may have other defaults
    dtype = str(torch.get_default_dtype()).removeprefix("torch.")
    return {
        "threads": torch.get_num_threads(),
        "flush_denormal": bool(tiny * 1 == 0),
        "default_dtype": dtype,
        "products": product_precision(),
    }


def product_precision() -> dict[str, str]:
    """Return the precision of fp32 matrix products by backend, and torch's one name of it.

    torch refuses that name where a script has set single backends otherwise.
    """
    found = {name: getattr(torch.backends, name).matmul.fp32_precision for name in ("cuda", "mkldnn")}
    with suppress(RuntimeError):
        found["name"] = torch.get_float32_matmul_precision()
    return found


def set_product_precision(precision: Mapping[str, str]) -> None:
    """Restore what ``product_precision`` returned."""
    if "name" in precision:
        torch.set_float32_matmul_precision(precision["name"])  # sets the backends, too
    for name in precision.keys() - {"name"}:
        getattr(torch.backends, name).matmul.fp32_precision = precision[name]


def recorded_settings(progress: Mapping[str, Any], base: Mapping[str, Any]) -> Settings:
    """Return the settings of the last step of ``progress``, which follows the snapshot progress ``base``.

    Earlier versions stored only the number of threads, and only in snapshots.
    """
    replay = base.get("replay", {})
    return progress.get("computing", {"threads": replay["threads"]} if "threads" in replay else {})


def depends_on_products(state: LiveState, after_update: Callable | None) -> bool:
    """Return whether the bits of a step may depend on the number of threads or the precision of matrix products.

    An elementwise update has the same bits with any, unless it is of 16-bit parameters on the host: the ends of the
    pieces that threads get are computed element by element, and rounded otherwise than whole vectors.
    """
    if after_update is not None or not all(map(is_elementwise, state.optimizers)):
        return True
    own = (each.parameter for each in state.parameters if state.is_trained(each))
    return any(p.device.type == "cpu" and p.element_size() < LEAST_EXACT for p in own)


@contextmanager
def computing_as(recorded: Settings, threads: bool) -> Iterator[None]:
    """Apply the settings ``recorded`` inside the context, those of matrix products only with ``threads``, and restore
    them after.
    """
    here = computing()
    there = {**here, **recorded}
    if not threads:
        there |= {name: here[name] for name in ("threads", "products")}
    _compute_as(here, there)
    try:
        yield
    finally:
        _compute_as(there, here)


def _compute_as(before: Settings, now: Settings) -> None:
    if before["flush_denormal"] != now["flush_denormal"]:
        torch.set_flush_denormal(now["flush_denormal"])
    if before["threads"] != now["threads"]:
        set_torch_threads(now["threads"])
    if before["default_dtype"] != now["default_dtype"]:
        torch.set_default_dtype(getattr(torch, now["default_dtype"]))
    if before["products"] != now["products"]:
        set_product_precision(now["products"])


def autocast_now() -> dict[str, str] | None:
    """Return the dtype of autocast by type of device, as JSON, where it is on; None if it is off."""
    kinds = [kind for kind in ("cpu", current_kind()) if kind is not None and torch.is_autocast_enabled(kind)]
    return {kind: str(torch.get_autocast_dtype(kind)).removeprefix("torch.") for kind in kinds} or None


@contextmanager
def autocast_as(told: Mapping[str, str] | None) -> Iterator[None]:
    """Apply the autocast that ``autocast_now`` returned inside the context. Matrix products depend on it."""
    here, there = autocast_now() or {}, told or {}
    with ExitStack() as stack:
        for kind in {**here, **there}:
            dtype = getattr(torch, there.get(kind, here.get(kind, "")))
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=kind in there, cache_enabled=False))
        yield


def settings_warnings(recorded: Settings, threads: bool) -> list[str]:
    """Return warnings where the settings of this process differ from those ``recorded`` of the run's last step."""
    here = computing()
    there = {**here, **recorded}
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
    if threads and there["products"] != here["products"]:
        run, script = there["products"], here["products"]
        texts.append(
            f"the run was trained with matrix products of precision {run} (torch.set_float32_matmul_precision) and is"
            f" replayed so, and this process has {script}, with which it goes on: what its optimizer computes may be"
            " rounded otherwise. To go on as before, set that precision at the beginning of the script."
        )
    return texts
