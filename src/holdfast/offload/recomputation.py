"""The choice of the blocks that a step computes again, for a run without a plan.

A run that was given no fraction, budget or sample knows nothing of its micro-batches until they come. The first step
computes every block again and measures what the graphs of its micro-batches hold (``GraphGauge``). From the next step
on as many blocks keep their graphs as fit. No bit depends on it.

1. A step whose micro-batches are larger in any dim than all that were measured is measured first, in the same way.
2. What keeping takes comes from the operation lists (``memory_use``): for the largest sizes so far, and for the step's
   own number of micro-batches. Block inputs are counted twice, since the steps before have had theirs.
3. It has to fit into what is free now, less a fifth, less what the process has held in earlier steps and will again.

Where one of these is not known, all is computed again. Of several ranks the one that keeps fewest decides. Called by
``StepMaker``. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .. import accelerators
from ..measure.free_memory import free_host_bytes
from ..quantities import round_up
from ..schedule.memory_use import largest_fitting, predict
from ..schedule.work import Work
from .memory.graph_sizes import GraphGauge, GraphSizes
from .model.microbatches import OwnCall
from .offload_options import StepRules
from .runtime import Runtime, Step
from .setup.process_settings import most_process_bytes, process_bytes
from .setup.step_planning import LISTS, RunPlan

FREE_RESERVE = 1 / 5
"""The part of the free memory that stays free."""
ALL_BLOCKS = 1.0
"""The fraction of a step that computes every block again."""
BatchSignature = tuple[Any, tuple[tuple[int, torch.dtype, torch.Size], ...]]
"""The names or number of a micro-batch's parts, and the tensors in it, by their position."""


class RecomputationChoice:
    """Chooses how many blocks each step computes again, by measured graph sizes and free memory."""

    def __init__(self, run: Runtime, plan: RunPlan, rules: StepRules) -> None:
        self._run, self._plan, self._rules = run, plan, rules
        self._modules = list(run.model.modules())
        self._modes: list[bool] = []
        """Flags per module: True if it was in training mode when the micro-batches were measured."""
        self._sizes: GraphSizes | None = None
        """The largest sizes that were measured."""
        self._measured: list[BatchSignature] = []
        self._covered: set[BatchSignature] = set()
        """Signatures that are no larger than a measured one."""
        self._fractions: dict[int, float] = {}
        """The choices so far, by the number of micro-batches."""
        self._new: dict[BatchSignature, int] = {}
        """Signatures that the next step measures, each with a micro-batch that has it."""

    def fraction(self, micro_batches: Sequence[Any]) -> float:
        """Return the fraction of the blocks that a step over ``micro_batches`` should compute again."""
        self._new = self._unmeasured(micro_batches)
        if self._new:
            return ALL_BLOCKS
        count = len(micro_batches)
        if count not in self._fractions:
            self._fractions[count] = self._chosen(count)
        return self._fractions[count]

    def gauge(self) -> GraphGauge | None:
        """Return what measures the step for which ``fraction`` was asked last; None if nothing in it is new."""
        return GraphGauge(self._new.values(), len(self._run.blocks)) if self._new else None

    def over(self, step: Step) -> None:
        """Take up what ``step`` has measured, if it is over."""
        sizes = None if step.gauge is None else step.gauge.sizes()
        if sizes is not None:
            self._sizes = sizes if self._sizes is None else self._sizes | sizes
            self._measured += self._new
            self._covered.update(self._new)
            self._fractions.clear()

    def _unmeasured(self, micro_batches: Sequence[Any]) -> dict[BatchSignature, int]:
        """Return the signatures that are larger than all measured ones, and for each a micro-batch that has it."""
        modes = [module.training for module in self._modules]
        if modes != self._modes:  # dropout, for one, holds more
            self._modes, self._sizes = modes, None
            self._measured, self._covered = [], set()
        signatures = {signature_of(batch): m for m, batch in enumerate(micro_batches)}
        new = {signature: m for signature, m in signatures.items() if signature not in self._covered}
        found: dict[BatchSignature, int] = {}
        for signature, m in sorted(new.items(), key=lambda item: -_elements(item[0])):
            if any(_covers(larger, signature) for larger in self._measured):
                self._covered.add(signature)
            elif not any(_covers(larger, signature) for larger in found):
                found[signature] = m
        return found

    def _chosen(self, count: int) -> float:
        """Return the smallest fraction with which ``count`` micro-batches fit into memory."""
        rows, room = len(self._run.blocks) - 1, self._room()
        if self._sizes is None or room is None:
            return ALL_BLOCKS
        work = _with_sizes(self._plan.work, self._sizes)
        most = self._bytes(self._plan.work, count, ALL_BLOCKS) + room
        kept = largest_fitting(0, rows, lambda n: self._bytes(work, count, (rows - n) / rows) <= most)
        return (rows - kept) / rows

    def _bytes(self, work: Work, count: int, fraction: float) -> int:
        """Return the bytes of a step where activations are kept: on the device, which may be the host."""
        shape = replace(self._rules.shape(count, self._rules.commit_every > 0), recomputed_fraction=fraction)
        memory = predict(work, self._plan.placement, shape, LISTS[self._rules.schedule])
        return memory.host_bytes if work.unified else memory.device_bytes

    def _room(self) -> float | None:
        """Return the bytes that a step may take beyond those before it; None if that is not known."""
        if self._run.device.unified:
            most = most_process_bytes()
            free = free_host_bytes() / self._run.data_parallel.on_host
            return None if most is None else (1 - FREE_RESERVE) * free - max(most - process_bytes(), 0)
        with suppress(AttributeError, RuntimeError):  # not every runtime counts its memory
            free = self._run.device.free_bytes()
            return (1 - FREE_RESERVE) * free - accelerators.given_back_bytes(self._run.device.torch_device)
        return None


@cache
def can_measure() -> bool:
    """Return whether this torch tells what a graph has saved."""
    return hasattr(torch._C._autograd.SavedTensor, "data")


def signature_of(batch: Any) -> BatchSignature:
    """Return what decides on how much memory a micro-batch takes."""
    batch = dict(batch.inputs) if isinstance(batch, OwnCall) else batch
    leaves = pytree.tree_leaves(batch)
    tensors = ((i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    parts = tuple(batch) if isinstance(batch, dict) else len(batch)
    return parts, tuple((i, tensor.dtype, tensor.shape) for i, tensor in tensors)


def _covers(larger: BatchSignature, signature: BatchSignature) -> bool:
    """Return whether ``larger`` has the parts of ``signature``, each at least as large in every dim."""
    kinds = [[(i, dtype, len(shape)) for i, dtype, shape in tensors] for _, tensors in (larger, signature)]
    if larger[0] != signature[0] or kinds[0] != kinds[1]:
        return False
    pairs = zip(larger[1], signature[1], strict=True)
    return all(n <= most for (_, _, a), (_, _, b) in pairs for most, n in zip(a, b, strict=True))


def _elements(signature: BatchSignature) -> int:
    return sum(shape.numel() for _, _, shape in signature[1])


def _with_sizes(work: Work, sizes: GraphSizes) -> Work:
    """Return ``work``, which knew nothing of micro-batches, with their sizes."""
    held = zip(work.blocks, sizes.activation_bytes, strict=True)
    return replace(
        work,
        blocks=tuple(replace(block, activation_bytes=nbytes) for block, nbytes in held),
        input_bytes=round_up(sizes.input_bytes),
    )
