"""The compute devices of this machine, and the rank of this process, as the verbs ask for them.

torch is imported only inside functions, so that verbs without training start at once.
"""

from __future__ import annotations

import os

from ..errors import ConfigError


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
