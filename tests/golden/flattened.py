"""A run of format 1 that two ranks of FSDP1 wrote, with fragments that are stretches of flattened tensors.

The version that wrote it, of November 2026, took live FSDP1 models. The model is ``dist.training.Net`` under AdamW, the
base has parts of steps 3 to 7, and there are records of every step to 8.
"""

from __future__ import annotations

from pathlib import Path

ARCHIVE = Path(__file__).with_name("fsdp1.tar.xz")

DIGESTS = {7: "8625fd7a5b6dcdfa", 8: "49a42935a4ed3fae"}
"""By step, what ``dist.training.whole_state`` said of the writer's parameters and optimizer state."""
