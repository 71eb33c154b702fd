"""A run of format 1 that two ranks of FSDP1 wrote, with fragments that are stretches of flattened tensors.

Commit 22b07fe9, the last one that took live FSDP1 models, wrote it by ``make_removed.py``, whose hyper-parameters make
a replay exact on every machine. The model is ``dist.training.Net`` under SGD with momentum, the base has parts of steps
2 to 6, and there are records of every step to 8.
"""

from __future__ import annotations

from pathlib import Path

ARCHIVE = Path(__file__).with_name("fsdp1.tar.xz")

DIGESTS = {7: "93092d67f9f42fb3", 8: "db62a0637e1e8e3a"}
"""By step, what ``dist.training.whole_state`` said of the writer's parameters and optimizer state."""
