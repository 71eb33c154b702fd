"""What this machine has to compute on."""

from __future__ import annotations

from ..errors import ConfigError


def choose_device(wanted: str) -> str:
    """``wanted`` if this machine has it, or for "auto" CUDA where there is one. Raises ``ConfigError``."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto":
        return "cuda" if count else "cpu"
    known = ["cpu", *(["cuda"] if count else []), *(f"cuda:{number}" for number in range(count))]
    if wanted not in known:
        raise ConfigError(
            f"offload.device = {wanted!r}: this machine has {', '.join(known)}; --set offload.device=cpu"
        )
    return wanted
