"""What this machine has to compute on, and which of several processes this is. Imports no torch by itself."""

from __future__ import annotations

import os

from ..config import Dtype
from ..errors import ConfigError

FASTER = 0.8
"""Of bf16's time fp32 has to take less: its working copies have twice the bytes."""


def launched() -> tuple[int, int]:
    """The rank of this process and how many there are, if torchrun has started it; else 0 of 1."""
    if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE") or 1)


def choose_device(wanted: str) -> str:
    """Return ``wanted`` if this machine has it, or for "auto" its accelerator if there is one. It becomes the calling
    thread's current device. Of several devices, each rank of torchrun's on this machine takes another.

    Raises ``ConfigError``.
    """
    import torch

    from .. import accelerators

    here = accelerators.names_here()
    kind = accelerators.current_kind() if here else None
    chosen = wanted
    if kind is not None and wanted in ("auto", kind):
        rank = os.environ.get("LOCAL_RANK")
        chosen = kind if rank is None else here[int(rank) % len(here)]
        if wanted == "auto" and not accelerators.can_offload(torch.device(kind)):
            chosen = "cpu"
    elif wanted == "auto":
        chosen = "cpu"
    known = ["cpu", *([kind] if kind else []), *here]
    if chosen not in known:
        raise ConfigError(
            f"offload.device = {wanted!r}: this machine has {', '.join(known)}; --set offload.device=cpu"
        )
    accelerators.use_device(torch.device(chosen))  # threads of the script inherit no device
    return chosen


def choose_dtype(device: str) -> Dtype:
    """What to compute in on ``device``: bf16, but fp32 on a CPU that multiplies faster in it. That is measured, as what
    processors say of themselves does not tell it: some with instructions for bf16 are half as fast in it."""
    if not device.startswith("cpu"):
        return "bf16"
    from ..probe.host import product_seconds

    return "fp32" if product_seconds("float32") < FASTER * product_seconds("bfloat16") else "bf16"
