"""Measure what it costs training on a CUDA device to keep every step: ``benchmarks/survive.py`` for models there.

    python benchmarks/gpu/survive.py [--models gpt2 gpt2-medium] [--arms none exact bases replica ...] [--rounds 2]
                                     [--steps 40] [--seconds 5] [--folder /dev/shm] [--keep] [--small]

Parameters and AdamW's state are fp32, computation is bf16 under autocast, as scripts of one device have it. A step
ends when its loss is on the host, so that all which the device did for it, copies of gradients included, is in its
time; stall is what the training thread spends, or waits, beside. The replica does its updates on the same device, from
a process of its own. Without options about seven minutes, with ``--models gpt2 --arms none exact bases replica`` two.
Prints a line that begins with ``summary`` for each model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import survive
from arms import ARMS
from common import gpt
from survive import Plan
from trainings import Training

VOCABULARY = 50257
ON_HOST = ("checkfreq", "gemini", "naive")
"""Arms whose copies are of memory of the host."""

DEFAULT = ("none", "exact", "bases", "replica", "topk", "save")


def language_model(
    layers: int, width: int, vocabulary: int, batch: int, context: int
) -> Callable[[], Training]:
    def loss(model: nn.Module, data: torch.Generator) -> torch.Tensor:
        x = torch.randint(0, vocabulary, (batch, context), generator=data).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            return model(input_ids=x, labels=x).loss

    def made() -> Training:
        torch.manual_seed(0)
        return Training(gpt(layers, width, vocabulary, context, empty=False).cuda(), loss)

    return made


TRAININGS = {
    "gpt2": language_model(12, 768, VOCABULARY, 8, 1024),
    "gpt2-medium": language_model(24, 1024, VOCABULARY, 8, 1024),
    "tiny": language_model(2, 64, 256, 2, 32),
}
"""Of 124 M parameters, 355 M, and few."""

PLANS = {
    "gpt2": Plan(2, 9, 60, 6.0, {"bases": {"base_every": 20}}),
    "gpt2-medium": Plan(2, 9, 40, 8.0, {"bases": {"base_every": 20}}),
    "tiny": Plan(1, 1, 3, 1.0, {"bases": {"base_every": 20}}),
}


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("no CUDA device here: benchmarks/survive.py is the one for the host")
    survive.run("gpu/survive", TRAININGS, PLANS, [name for name in ARMS if name not in ON_HOST], DEFAULT)


if __name__ == "__main__":
    main()
