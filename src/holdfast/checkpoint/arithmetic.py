"""The arithmetic of a process, as far as the last bits of an update depend on it: its machine, and its settings.

Some operations of torch are not correctly rounded, and their last bits differ by processor, device and version: on a
CPU ``sqrt`` is that of a vector library. A replay elsewhere then differs from training in bits, and fingerprints, which
sample, may not show it. So a snapshot, and the first record of each process, note digests of what fixed numbers give on
the writer's machine, by group of operations. Recovery compares the groups that the records to be replayed need.

Settings decide bits too. The number of torch's threads changes the order of sums in a matrix product, fp32 products may
be made of TF32 or bf16 ones, denormal numbers may be flushed to zero, and the default dtype applies to tensors made
without one, such as step counts. Replay computes under the recorded settings, and those of the process are restored
afterwards. Called where progress is recorded, by replay and replicas, and by recovery for its warnings.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from typing import Any

import torch
import xxhash

from ..accelerators import current_kind
from ..optim.kinds import is_elementwise
from ..optim.torch_threads import set_torch_threads
from ..state.capture import CapturedParameter
from ..state.live_state import LiveState
from ..state.plain_tensors import host_bytes

ELEMENTS = 8192
"""Number of elements of the fixed numbers. About one in 140 differs between the vector libraries of two processors."""
Compute = Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]
Arithmetic = Mapping[str, Mapping[str, str]]
"""Digests of results by group of operations, by type of device."""


def arithmetic_here(state: LiveState) -> dict[str, dict[str, str]]:
    """Return the digests of this machine's arithmetic, as JSON, for the devices of the parameters of ``state``."""
    devices = {
        device.type: device for device in (each.parameter.device for each in reversed(state.parameters))
    }  # the first one of each type
    return {kind: arithmetic_of(device) for kind, device in sorted(devices.items()) if kind != "meta"}


@cache
def arithmetic_of(device: torch.device) -> dict[str, str]:
    """Return the digests of one device by group of operations. Takes some milliseconds, once per process."""
    first, second = _fixed_numbers()
    return {name: _digest(compute, first, second, device) for name, compute in GROUPS.items()}


def operations_of(state: LiveState, updates: Iterable[Mapping[str, Any]], after_update: bool) -> list[str]:
    """Return the groups of operations on which the bits of recorded ``updates`` may depend; all where that is unknown.

    A replay uses the hyper-parameters of the record, ``fused`` among them, whatever the optimizers were made with.
    """
    if after_update or not all(map(is_elementwise, state.optimizers)):
        return list(GROUPS)
    rootless = {number for number, each in enumerate(state.optimizers) if type(each) is torch.optim.SGD}
    needed = {"linear"}
    for update in updates:
        for group in update["groups"]:
            if group.get("fused"):
                needed.add("fused")
            elif update["optimizer"] not in rootless:
                needed.add("roots")
    if any(p.parameter.element_size() < LEAST_EXACT for p in _in_optimizers(state)):
        needed.add("half precision")
        if "fused" in needed:
            needed.add("fused half precision")
    return [name for name in GROUPS if name in needed]


def differing(there: Arithmetic, here: Arithmetic, operations: Sequence[str]) -> list[str]:
    """Return those of ``operations`` whose results differ between two machines; none if one of them noted nothing.

    One type of device is compared with another, which may compute alike. A group that an earlier version did not note
    is not compared.
    """
    if not there or not here:
        return []
    if len(there) != len(here):
        return list(operations)
    pairs = list(zip(there.values(), here.values(), strict=True))
    return [
        name for name in operations if any(name in a and name in b and a[name] != b[name] for a, b in pairs)
    ]


def _fixed_numbers() -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors of positive numbers that are exact on every machine: 23 bits times powers of two."""
    whole = torch.arange(1, ELEMENTS + 1, dtype=torch.int64, device="cpu")
    scale = torch.bitwise_left_shift(torch.ones_like(whole), whole % 16 + 8).to(torch.float32)
    first = (whole * 2654435761 % 8388593).to(torch.float32) / scale
    second = (whole * 40503 % 8388593 + 1).to(torch.float32) / 8388608.0
    return first, second


@torch.no_grad()
def _digest(compute: Compute, first: torch.Tensor, second: torch.Tensor, device: torch.device) -> str:
    """Return the digest of what ``compute`` makes of two tensors; "none" where the device cannot do it."""
    try:
        with torch.autocast(device.type, enabled=False):
            results = compute(first.to(device), second.to(device))
            return xxhash.xxh3_64_hexdigest(b"".join(host_bytes(each).tobytes() for each in results))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError, TypeError):
        return "none"


def _linear(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    return [a.add(b, alpha=-0.01), a.mul(0.999), a.addcmul(a, b, value=0.001), a.lerp(b, 0.1)]


def _roots(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    root = a.sqrt()
    corrections = [beta**step for beta in (0.9, 0.95, 0.999) for step in range(1, 65)]  # by the C library
    beside = torch.frombuffer(bytearray(struct.pack(f"{len(corrections)}d", *corrections)), dtype=torch.uint8)
    return [root, a.div(b), a.addcdiv(b, root.add(1e-8), value=-0.01), b.pow(0.8), beside]


def _fused(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    tensors = [b.clone(), a.clone(), b.mul(0.1), a.mul(0.01)]
    parameters, gradients, first, second = ([tensor] for tensor in tensors)
    steps = [torch.full((), 3.0, dtype=torch.float32, device=a.device)]
    torch._fused_adamw_(
        parameters, gradients, first, second, [], steps, lr=0.01, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8,
        amsgrad=False, maximize=False,
    )  # fmt: skip
    return [parameters[0], first[0], second[0]]


def _others(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    # a product this small does not depend on the number of threads, nor in 64 bits on torch's matmul precision
    left, right = a[:1024].double().view(32, 32), b[:1024].double().view(32, 32)
    return [left @ right, a.rsqrt(), b.exp(), a[:1024].norm()]


def _half_precision(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    """Compute in 16 bits on short tensors: vector instructions and the scalar remainder round differently."""
    return [
        found
        for first, second in _short_pairs(a, b)
        for found in (
            *_linear(first, second),
            first.sqrt(),
            first.div(second),
            first.addcdiv(second, first.add(1e-2), value=-0.01),
        )
    ]


def _fused_half_precision(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    return [found for first, second in _short_pairs(a, b) for found in _fused(first, second)]


def _short_pairs(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pieces of two tensors in 16 bits, of a length that ends within a vector of any processor."""
    for dtype in (torch.bfloat16, torch.float16):
        for first, second in zip(a[:252].to(dtype).split(63), b[:252].to(dtype).split(63), strict=True):
            yield first.clone(), second.clone()


def _products(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    """Multiply matrices in bf16, as Muon does."""
    return [a[:2048].bfloat16().view(32, 64) @ b[:2048].bfloat16().view(64, 32)]


GROUPS: dict[str, Compute] = {
    "linear": _linear,
    "roots": _roots,
    "fused": _fused,
    "others": _others,
    "half precision": _half_precision,
    "fused half precision": _fused_half_precision,
    "bf16 products": _products,
}
"""The operations of optimizers, by the groups that are compared one by one."""
DESCRIPTIONS = {
    "linear": "sums and products",
    "roots": "roots, quotients and powers",
    "fused": "fused updates",
    "others": "matrix products, exponentials and norms",
    "half precision": "updates in 16 bits",
    "fused half precision": "fused updates in 16 bits",
    "bf16 products": "matrix products in bf16",
}
"""The groups in words."""


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
    own = (each.parameter for each in _in_optimizers(state))
    return any(p.device.type == "cpu" and p.element_size() < LEAST_EXACT for p in own)


def _in_optimizers(state: LiveState) -> list[CapturedParameter]:
    """Return the parameters that an optimizer has. Those that are frozen now may be trained in a record."""
    return [each for each in state.parameters if state.optimizer_of(each) is not None]


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


def autocast_now() -> dict[str, str]:
    """Return the dtype of autocast by type of device, as JSON; empty if it is off."""
    kinds = [kind for kind in ("cpu", current_kind()) if kind is not None and torch.is_autocast_enabled(kind)]
    return {kind: str(torch.get_autocast_dtype(kind)).removeprefix("torch.") for kind in kinds}


@contextmanager
def autocast_as(told: Mapping[str, str] | None) -> Iterator[None]:
    """Apply the autocast that ``autocast_now`` returned inside the context. Matrix products depend on it.

    With None, as in records of earlier versions, the autocast of the caller stays.
    """
    here = {} if told is None else autocast_now()
    there = told or {}
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
