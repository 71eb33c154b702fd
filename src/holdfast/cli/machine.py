"""The compute devices of this machine, and the rank of this process, as the verbs ask for them.

torch is imported only inside functions, so that verbs without training start at once.
"""

from __future__ import annotations

import os

from ..config import Dtype
from ..errors import ConfigError

FASTER = 0.8
"""The share of bf16's time below which fp32 is chosen: its compute copies take twice the bytes."""


def launched() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks if torchrun started it; else 0 and 1."""
    if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE") or 1)


def choose_device(wanted: str) -> str:
    """Return ``wanted`` if this machine has it, or for "auto" its accelerator if there is one.

    The device becomes the calling thread's current device. With several devices, each local rank of torchrun takes its
    own. Raises ``ConfigError``.
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
    accelerators.use_device(torch.device(chosen))  # threads that the script starts inherit no device
    return chosen


def choose_dtype(device: str) -> Dtype:
    """Return the compute dtype for ``device``: bf16, but fp32 on a CPU that multiplies faster in fp32.

    The speed is measured, because processor flags do not tell it: some CPUs with bf16 instructions are half as fast in
    bf16.
    """
    if not device.startswith("cpu"):
        return "bf16"
    from ..measure.hardware_rates import product_seconds

    return "fp32" if product_seconds("float32") < FASTER * product_seconds("bfloat16") else "bf16"
