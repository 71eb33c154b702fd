"""The placement by budget: which parts of the state stay in host memory, as far as they fit.

Fractions are of the blocks, budgets are bytes. Fractions that are not given are filled in by how much traffic they save
per byte kept: parameters first (written once, read twice a step for two bytes each), then gradients that wait for
clipping, then block inputs, and last the optimizer's state, which costs most memory for its traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from ...config import Fraction
from ...errors import BadInput, DoesNotFit
from ...garbage import without_collection
from ...quantities import ample_budget, format_bytes
from ..memory_use import MakesOps, Memory, largest_fitting, predict
from ..mezo_schedule import zeroth
from ..step_builder import inputs_stay_on_device
from ..vertical import vertical
from ..work import FASTEST, MEMORY_SAVINGS, BlockPlacement, MemorySaving, StepShape, Work

ORDER = ("params", "gradients", "activations", "optimizer")
STATE_FIRST = ("optimizer", "gradients", "activations", "params")
"""Order for a step of forward passes alone, which reads and writes the state and no compute copy."""


@without_collection()
def choose(
    work: Work,
    shape: StepShape,
    host_budget_bytes: int | None,
    *,
    params: Fraction = "auto",
    activations: Fraction = "auto",
    optimizer: Fraction = "auto",
    schedule: MakesOps = vertical,
    evaluation_batches: int = 0,
    held_bytes: int = 0,
    order: Sequence[str] = ORDER,
    device_budget_bytes: int | None = None,
    savings: Sequence[MemorySaving] = MEMORY_SAVINGS,
    waiting_bytes: float = inf,
) -> BlockPlacement:
    """Return the placement with the fractions given, and the others as large as the budget allows, in this ``order``.

    Gradients that wait are in memory up to ``waiting_bytes``. Time is spent for memory (``MemorySaving``) only where
    nothing fits otherwise. The budget covers ``held_bytes`` that the process holds anyway, and evaluations of
    ``evaluation_batches`` micro-batches at once. None is no limit. Raises ``DoesNotFit`` if even the smallest of the
    others does not fit, and ``BadInput`` for a value that is no fraction.
    """
    asked: dict[str, Fraction] = {
        "params": params,
        "gradients": "auto",
        "activations": activations,
        "optimizer": optimizer,
    }
    search = _Search(
        work, shape, schedule, evaluation_batches, host_budget_bytes, held_bytes, device_budget_bytes, savings,
        waiting_bytes,
    )  # fmt: skip
    fractions = search.smallest({kind: checked(kind, asked[kind]) for kind in ORDER})
    search.choose_saving(fractions)
    if not search.fits(fractions):
        raise _does_not_fit(search, asked, fractions)
    for kind in order:
        if asked[kind] == "auto":
            fractions[kind] = search.largest(fractions, kind)
    return search.placement(fractions)


class _Search:
    """Placements of one kind of step, and their memory."""

    def __init__(
        self,
        work: Work,
        shape: StepShape,
        schedule: MakesOps,
        evaluation_batches: int,
        budget: int | None,
        held: int,
        device_budget: int | None,
        savings: Sequence[MemorySaving],
        waiting_bytes: float,
    ) -> None:
        self.work, self.shape, self.schedule = work, shape, schedule
        self.evaluation_batches, self.budget, self.held = evaluation_batches, budget, held
        self.savings, self._waiting_bytes = savings, waiting_bytes
        self._predicted: dict[BlockPlacement, Memory] = {}
        no_limit = work.unified or device_budget is None
        self.device_bytes, self.saving = inf if no_limit else device_budget, FASTEST

    def placement(self, fractions: dict[str, float]) -> BlockPlacement:
        placement = BlockPlacement.fractions(len(self.work.blocks), **fractions)
        return replace(placement, saving=self.saving)

    def choose_saving(self, fractions: dict[str, float]) -> None:
        """Take the first saving that fits in host memory, and on a separate device if one does; else the last."""
        fitting = []
        for saving in savings_of(self.work, self.shape, self.schedule, self.savings):
            self.saving = saving
            if self.fits(fractions):
                fitting.append(saving)
                if self._memory(fractions).device_bytes <= self.device_bytes:
                    return
        if fitting:
            self.saving = fitting[0]

    def host_bytes(self, fractions: dict[str, float]) -> int:
        return self.held + self._memory(fractions).host_bytes

    def _memory(self, fractions: dict[str, float]) -> Memory:
        placement = self.placement(fractions)
        found = self._predicted.get(placement)
        if found is None:
            found = predict(self.work, placement, self.shape, self.schedule, self.evaluation_batches)
            self._predicted[placement] = found
        return found

    def fits(self, fractions: dict[str, float]) -> bool:
        return self.budget is None or self.host_bytes(fractions) <= self.budget

    def smallest(self, asked: dict[str, float | None]) -> dict[str, float]:
        """Return the fractions of least memory with those that were given.

        Usually nothing more stays. With few blocks, keeping all may take less than the buffers for moving them.
        """
        fractions = {kind: 0.0 if value is None else value for kind, value in asked.items()}
        for kind in ORDER:
            if asked[kind] is None:
                fractions[kind] = min(0.0, 1.0, key=lambda f, k=kind: self.host_bytes({**fractions, k: f}))
        return fractions

    def largest(self, fractions: dict[str, float], kind: str) -> float:
        """Return the largest fraction of ``kind`` that fits beside the others."""
        rows = max(len(self.work.blocks) - (kind == "activations"), 1)
        least = round(fractions[kind] * rows)
        waiting = sum(b.kept_grad_bytes for b in self.work.blocks) if kind == "gradients" else 0

        def fits(n: int) -> bool:
            return waiting * n / rows <= self._waiting_bytes and self.fits({**fractions, kind: n / rows})

        return largest_fitting(least, rows, fits) / rows


def savings_of(
    work: Work, shape: StepShape, schedule: MakesOps, savings: Sequence[MemorySaving] = MEMORY_SAVINGS
) -> list[MemorySaving]:
    """Return those ``savings`` with which ``schedule`` works, and which save something.

    MeZO has no operation that reads the resident state. Copies wait for updates only where they are parts of masters.
    Copies for a separate device are always read ahead. Inputs stay there in steps of ``shape``, or in none.
    """
    is_split = any(block.is_split for block in work.blocks)
    found = [each for each in savings if each.resident_state or schedule is not zeroth]
    found = [each for each in found if each.keeps_copies or is_split]
    if work.unified:  # it makes no difference
        return list(dict.fromkeys(replace(each, inputs_stay=True) for each in found))
    found = [each for each in found if each.loads_ahead]
    may_stay = inputs_stay_on_device(work.input_bytes, shape.micro_batches)
    return list(dict.fromkeys(replace(each, inputs_stay=each.inputs_stay and may_stay) for each in found))


def checked(kind: str, value: Fraction) -> float | None:
    """Return a given fraction, or None for one to be chosen. Raises ``BadInput`` for a value that is neither."""
    if value == "auto":
        return None
    if not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise BadInput(f'{kind}_on_host = {value!r} is neither a fraction between 0 and 1 nor "auto"')
    return float(value)


def _does_not_fit(search: _Search, asked: dict[str, Fraction], fractions: dict[str, float]) -> DoesNotFit:
    needed, least = search.host_bytes(fractions), search.host_bytes(search.smallest(dict.fromkeys(ORDER)))
    explicit = {f"{kind}_on_host": asked[kind] for kind in ORDER if asked[kind] != "auto"}
    having = f" with {', '.join(f'{key}={value}' for key, value in explicit.items())}" if explicit else ""
    lower = ""
    if ample_budget(least) != ample_budget(needed):
        sets = {"host_budget": ample_budget(least), **dict.fromkeys(explicit, "auto")}
        keys = " ".join(f"--set offload.{key}={value}" for key, value in sets.items())
        lower = f'; or "{ample_budget(least)}" and "auto" for {", ".join(explicit)} (holdfast train: {keys})'
    return DoesNotFit(
        f"the run needs {format_bytes(needed)} of host memory{having}, and its budget is "
        f'{format_bytes(search.budget or 0)}. Give it "{ample_budget(needed)}" (a margin included){lower}. Fewer or '
        "smaller micro-batches need less."
    )
