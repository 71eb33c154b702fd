"""Keys of ``holdfast train`` for runs of a tiny model, and their words on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STEP = {"train.micro_batches": 2, "train.micro_batch_size": 2, "train.dtype": "fp32"}
TINY = {
    "model.blocks": 2, "model.width": 16, "model.heads": 2, "model.kv_heads": 1, "model.context": 16, **STEP,
}  # fmt: skip
IN_MEMORY = {
    "offload.host_budget": "8GiB", "io.direct": "false", "offload.params_on_host": 1, "offload.optimizer_on_host": 1,
    "offload.activations_on_host": 1, "offload.delayed_fraction": 0, "offload.recomputed_fraction": 1,
}  # fmt: skip
"""Everything stays in host memory, and nothing is planned."""


def words(keys: Mapping[str, Any]) -> list[str]:
    """Return the words that set ``keys``."""
    return [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
