"""State that several ranks hold together: which rank stores which region, and a check that copies have the same bits.

``look`` scans the state on all ranks before the first step and gives each region to one rank, so that nothing is stored
twice and nothing is missing. A copy on another rank that differs would stay unseen until a resume, so copies are
compared: at once for a snapshot that all ranks make together, otherwise beside training:

1. The first rank writes to the board at which step the comparison begins, early enough for all ranks to read it.
2. From that step on each rank digests a part of the replicated state at the end of every step, in one order.
3. Each rank writes one digest of everything, and the individual digests where ranks differ.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any, ClassVar, NamedTuple

import torch
import xxhash
from torch import nn

from ..distributed import Ranks
from ..errors import ModelNotSupported
from ..quantities import MiB, packed, shown
from ..state.capture import aliases_of
from ..state.layout.regions import AnyRegion, ReplicatedRegion, copies, owners, refuse_gaps
from ..state.live_state import BUFFERS, LiveState
from ..state.quantised_slots import refuse_unequal_quantisation
from .capture.staging_buffers import tensors_of
from .capture.state_digests import digests
from .snapshot.snapshot_chunks import UNIT_BYTES
from .snapshot.snapshot_image import image_of

BYTES_PER_STEP = 16 * MiB
"""Bytes of parameters that are digested, with their optimizer state, at the end of one step."""
LEAD_SECONDS = 1.0
"""Seconds from announcing a comparison to its beginning: many times the delay of the board."""
Digests = dict[str, str]
"""Digests by what was digested."""


class ComparisonResult(NamedTuple):
    """The result of comparison ``number``.

    ``different`` names the ranks that differ from the rank that stores the region, and in which tensors.
    """

    number: int = 0
    step: int = 0
    different: str = ""


class RankConsistency:
    """The comparison of replicated state, as one rank takes part in it.

    ``tell`` writes to the board, ``emit`` writes an event. The training thread calls ``advance`` and ``compare``; the
    thread of the agreement calls ``lead`` and ``note``.
    """

    common: ClassVar = {"compare": "[0, 0]", "verdict": json.dumps(ComparisonResult())}
    NOTHING = "[0, null]"
    """The entry of each rank on the board before any comparison."""

    def __init__(self, ranks: Ranks, emit: Callable[..., None]) -> None:
        self._ranks, self._emit = ranks, emit
        self.tell: Callable[[str, str], None] = lambda name, value: None
        self._wanted, self._verdict = (0, 0), ComparisonResult()
        self._number = self._warned = self._judged = 0
        self._left: list[list[int]] = []
        self._found: Digests = {}
        self._state: LiveState | None = None
        self._seconds, self._stepped_at = 0.0, time.monotonic()

    @property
    def differs(self) -> bool:
        """Return whether the last comparison found different copies."""
        return bool(self._verdict.different)

    def marked(self, progress: dict[str, Any]) -> dict[str, Any]:
        """Return ``progress`` of a snapshot, marked if copies differed and have not been found equal since."""
        step, different = self._verdict[1:]
        return {**progress, "copies": {"step": step, "different": different}} if different else progress

    def begin(self, state: LiveState, step: int) -> None:
        """Start a comparison soon after ``step``, unless one is under way. The first rank chooses the step."""
        under_way = self._left or self._number < self._wanted[0]
        if self._ranks.rank == 0 and state.copies and not under_way:
            lead = 1 + ceil(LEAD_SECONDS / max(self._seconds, 1e-3))
            self.tell("compare", json.dumps([self._number + 1, step + lead]))

    def advance(self, state: LiveState, step: int) -> None:
        """Digest the next batch of the current comparison. Called at the end of ``step``."""
        now = time.monotonic()
        self._seconds, self._stepped_at = now - self._stepped_at, now
        self._warn()
        number, at = self._wanted
        if number > self._number:
            self._number, self._state, self._found = number, state, {}
            self._left = _batches(state.copies) if step <= at else []
            if not self._left:  # the announcement was read too late
                self._tell(None)
        if self._left and self._state is not state:  # the state has changed its form
            self._left = []
            self._tell(None)
        elif self._left and step >= at:
            self._found |= self._digests(state, self._left.pop(0))
            if not self._left:
                self._tell(self._found)

    def compare(self, state: LiveState, step: int) -> None:
        """Compare all copies at once, at a ``step`` that all ranks have reached.

        Collective: every rank must call this.
        """
        if not state.copies:
            return
        found = self._digests(state, range(len(state.copies)))
        self._take(
            ComparisonResult(self._verdict.number, step, _judged(self._ranks.everyone(found), state.copies))
        )
        self._report()
        self._warn()

    def lead(self, found: dict[str, str], board: Any) -> None:
        """Judge the comparison once all ranks have reported. Called on the first rank."""
        ranks = range(self._ranks.world_size)
        told = [json.loads(found[f"alike/{rank}"]) for rank in ranks]
        number, step = json.loads(found["compare"])
        if number <= self._judged or any(each[0] != number for each in told) or self._state is None:
            return
        self._judged = number
        if any(each[1] is None for each in told):
            self._emit("copies", step=step, compared=False)
            return
        groups = {group for each in told for group in each[1]}
        if any(len({each[1].get(group) for each in told if group in each[1]}) > 1 for group in groups):
            every = [json.loads(board.get(f"digests/{rank}")) for rank in ranks]
            verdict = ComparisonResult(number, step, _judged(every, self._state.copies))
        else:
            verdict = ComparisonResult(number, step)
        self._take(verdict)
        self._report()
        board.set("verdict", json.dumps(verdict))

    def note(self, found: dict[str, str]) -> None:
        """Read the announcement and the verdict from the board."""
        number, at = json.loads(found["compare"])
        self._wanted = max(self._wanted, (number, at))
        verdict = ComparisonResult(*json.loads(found["verdict"]))
        if verdict.number > self._judged and self._ranks.rank:
            self._judged = verdict.number
            self._take(verdict)

    def _tell(self, found: Digests | None) -> None:
        if found is not None:
            self.tell(f"digests/{self._ranks.rank}", json.dumps(found))
        assert self._state is not None
        told = None if found is None else _joined(found, self._state.copies)
        self.tell(f"alike/{self._ranks.rank}", json.dumps([self._number, told]))

    def _digests(self, state: LiveState, places: Sequence[int]) -> Digests:
        """Return the digests of those ``places`` in ``state.copies`` that this rank holds."""
        mine = [place for place in places if self._ranks.rank in state.copies[place].ranks]
        return {
            str(place): xxhash.xxh3_64_hexdigest(
                json.dumps(sorted(digests(state, state.copies[place].name).items())).encode()
            )
            for place in mine
        }

    def _take(self, verdict: ComparisonResult) -> None:
        if verdict.step < self._verdict.step:  # older than the last comparison at once
            return
        self._verdict = verdict
        self._warned = min(self._warned, verdict.step - 1) if verdict.different else verdict.step

    def _report(self) -> None:
        _, step, different = self._verdict
        self._emit("copies", step=step, compared=True, different=different or None)

    def _warn(self) -> None:
        """Warn of a difference, once. Called by the training thread."""
        _, step, different = self._verdict
        if different and self._warned < step:
            self._warned = step
            warnings.warn(
                f"at step {step} ranks that should hold the same do not: {different}. Bases have what the rank has that"
                " stores it, and are marked. Find out what only some ranks do (an update without the others, a device"
                " that computes wrongly), and resume from a step before.",
                stacklevel=6,
            )


def _batches(copies: Sequence[ReplicatedRegion]) -> list[list[int]]:
    """Return the places in ``copies`` in batches that are digested at the end of one step each."""
    return list(packed(range(len(copies)), lambda place: copies[place].nbytes, BYTES_PER_STEP)) or [[]]


def _joined(found: Digests, copies: Sequence[ReplicatedRegion]) -> Digests:
    """Return one digest for each set of ranks that hold something together."""
    joined: dict[str, Any] = {}
    for place, digest in sorted(found.items()):
        group = ",".join(map(str, sorted(copies[int(place)].ranks)))
        joined.setdefault(group, xxhash.xxh3_64()).update(f"{place} {digest} ".encode())
    return {group: each.hexdigest() for group, each in joined.items()}


def _judged(found: Sequence[Digests], copies: Sequence[ReplicatedRegion]) -> str:
    """Describe for a person which ranks differ from the rank that stores the region."""
    other: dict[tuple[int, int], list[str]] = {}
    for place, copied in enumerate(copies):
        owner = copied.ranks[0]
        for rank in copied.ranks[1:]:
            if found[rank].get(str(place)) != found[owner].get(str(place)):
                other.setdefault((rank, owner), []).append(copied.name)
    return "; ".join(
        f"rank {rank} has other {shown(names)} than rank {owner}"
        for (rank, owner), names in sorted(other.items())
    )


def look(
    ranks: Ranks,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    averages: nn.Module | Mapping[str, nn.Module] | None,
    residuals: dict[torch.Tensor, torch.Tensor],
    own_residuals: bool,
) -> LiveState:
    """Return the training state as it is now, with this rank's stored part marked.

    Args:
        averages: Modules with averaged parameters, by name or alone.
        residuals: The residuals of error feedback, by parameter.
        own_residuals: Whether residuals belong to this rank alone where there are several.

    Collective: every rank must call this.
    """
    beside = {"average": averages} if isinstance(averages, nn.Module) else averages
    state = seen_together(ranks, lambda: LiveState(model, optimizers, beside, residuals))
    state.own_residuals = own_residuals and not ranks.alone
    return state


def seen_together(ranks: Ranks, make: Callable[[], LiveState]) -> LiveState:
    """Return the state that ``make`` builds on this rank, with this rank's stored part marked.

    Collective: every rank must call this. Raises ``ModelNotSupported`` where the regions of a parameter on all ranks
    leave gaps or overlap.
    """
    made: list[LiveState] = []

    def held() -> tuple[dict[str, tuple[AnyRegion, int]], set[str], list[list[str]]]:
        made.append(state := make())
        bundles = state.bundles()
        if not ranks.alone:
            _refuse_shared_buffers(bundles)
        boxes = state.boxes
        parameters = {
            p.name: (boxes[p.name], boxes[p.name].elements * p.parameter.element_size())
            for p in state.parameters
            if not state.lacks(p.name)
        }
        names = {name for p in state.parameters for name in p.names}
        names |= {atom.name for atom, _ in state.buffers().values()}
        return parameters, names, bundles

    parts = ranks.all_do(held)
    held_by = [parameters for parameters, *_ in parts]
    [state] = made

    def check() -> None:
        regions = [{name: region for name, (region, _) in parameters.items()} for parameters in held_by]
        refuse_gaps(regions, state.boxes)
        refuse_unequal_quantisation(state.optimizers, state.name_of, state.wholes, regions)

    ranks.all_do(check)
    if not ranks.alone:
        stored = owners(held_by)
        bundles = dict.fromkeys(tuple(bundle) for *_, told in parts for bundle in told)  # a stage has its own
        _store_together(held_by, stored, list(bundles))
        state.store_only(stored[ranks.rank])
        state.copies = copies(held_by, stored)
        # an alias here is no tensor of another rank: a run without the tie is not of this model
        state.elsewhere = set().union(*(names for _, names, _ in parts)) - aliases_of(state.parameters).keys()
    return state


def _refuse_shared_buffers(bundles: Sequence[Sequence[str]]) -> None:
    """Raise ``ModelNotSupported`` where a buffer, stored by every rank, shares memory with a parameter, stored by one
    rank.
    """
    for bundle in bundles:
        if BUFFERS in bundle and len(bundle) > 1:
            names = " and ".join(name for name in bundle if name != BUFFERS)
            raise ModelNotSupported(
                f"{names} and a buffer are one memory, of which several ranks would each store a part at another step."
                " Register the buffer with persistent=False, or as a copy: .clone()."
            )


def _store_together(
    held_by: Sequence[Mapping[str, tuple[AnyRegion, int]]],
    stored: list[set[str]],
    bundles: Sequence[Sequence[str]],
) -> None:
    """Assign parameters that share memory to the rank that stores the first of them.

    So all of them are of one step.
    """
    for first, *others in bundles:
        for rank in [rank for rank, names in enumerate(stored) if first in names]:
            for name in others:
                region = held_by[rank].get(name, (None, 0))[0]
                for other in range(len(stored)):
                    if other != rank and held_by[other].get(name, (None, 0))[0] == region:
                        stored[other].discard(name)
                stored[rank] |= {name} & held_by[rank].keys()


def broadcast_missing_state(state: LiveState, ranks: Ranks) -> None:
    """Send what this rank stores of ``state`` to ranks that hold the same regions, and receive theirs.

    Called after a recovery in which some rank could not bring forward what another one stores, or not to the same bits.
    Collective: every rank must call this.
    """
    stored = {p.name for p in state.stored}
    lacking = {name: box for name, box in state.boxes.items() if name not in stored}
    wanted = {pair for each in ranks.everyone(lacking) for pair in each.items()}
    offered = _divided(state, [p.name for p in state.stored if (p.name, state.boxes[p.name]) in wanted])
    values = state.values()
    gathered = ranks.everyone((offered, values))
    for rank, (groups, its_values) in enumerate(gathered):
        taken = {name for group in groups for name, box in group.items() if lacking.get(name) == box}
        for group in groups:
            image = ranks.spread(_image(state, group) if rank == ranks.rank else None, rank)
            tensors = tensors_of(image.numpy().data)
            state.load({key: tensor for key, tensor in tensors.items() if key.rpartition("/")[0] in taken})
        state.load_values({name: slots for name, slots in its_values.items() if name in taken})


def _divided(state: LiveState, names: list[str]) -> list[dict[str, AnyRegion]]:
    """Return ``names`` with their regions, joined to groups of about the size of a chunk."""

    def nbytes(name: str) -> int:
        return sum(atom.nbytes for atom, _ in state.owned(state.parameter(name)).values())

    return [{name: state.boxes[name] for name in group} for group in packed(names, nbytes, UNIT_BYTES)]


def _image(state: LiveState, names: dict[str, AnyRegion]) -> torch.Tensor:
    held = [state.owned(state.parameter(name)) for name in names]
    image = image_of({key: tensor for each in held for key, (_, tensor) in each.items()})
    return torch.frombuffer(image, dtype=torch.uint8)
