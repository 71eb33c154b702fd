"""Slots: the dependencies that keep a schedule's memory bounded.

A schedule says what each operation produces and consumes, and how many buffers a class may have (``Hold.slots``).
``with_slots`` turns that into dependencies: in list order, take number i of a class waits for give number i - slots, of
this step or of the previous one. So each buffer taken beyond ``slots`` is matched with one given back. No more are ever
held, whatever the speeds of the lanes, and the bound of ``memory.py`` needs no simulation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .operations import Hold, Key, Op

AS_LISTED = -1
"""Number of slots that a class holds at once if its operations run one after another, in list order."""


@dataclass
class _Class:
    """A class of buffers: indices of the operations that take and give back, in list order."""

    slots: int
    takers: list[int] = field(default_factory=list)
    givers: list[int] = field(default_factory=list)


def with_slots(ops: Sequence[Op]) -> list[Op]:
    """Return ``ops`` with the dependencies that keep every class of buffers within its slots.

    The operation that a buffer waits for must come before it in the list; a schedule that breaks this needs more slots.
    """
    ops = _counted(ops)
    needs: dict[int, list[Key]] = {}
    needs_previous: dict[int, list[Key]] = {}
    for kind, found in _classes(ops).items():
        slots = min(found.slots, len(found.takers))
        for index, taker in enumerate(found.takers if slots else ()):
            giver = found.givers[index - slots]  # counted from the end, so of the previous step, if negative
            assert index < slots or giver < taker, f"{ops[taker].key} needs more than {slots} slots of {kind}"
            (needs_previous if index < slots else needs).setdefault(taker, []).append(ops[giver].key)
    return [_with(op, needs.get(i, ()), needs_previous.get(i, ())) for i, op in enumerate(ops)]


def _counted(ops: Sequence[Op]) -> Sequence[Op]:
    """Return ``ops`` with ``AS_LISTED`` replaced by a number."""
    counted = {hold.kind for op in ops for hold in op.takes if hold.slots == AS_LISTED}
    if not counted:
        return ops
    held, most = Counter[str](), Counter[str]()
    for op in ops:
        held.update(hold.kind for hold in op.takes)
        most |= held
        held.subtract(name[0] for name in op.gives)
    return [replace(op, takes=tuple(_counting(hold, counted, most) for hold in op.takes)) for op in ops]


def _counting(hold: Hold, counted: set[str], most: Counter[str]) -> Hold:
    return hold._replace(slots=most[hold.kind]) if hold.kind in counted else hold


def _classes(ops: Sequence[Op]) -> dict[str, _Class]:
    classes: dict[str, _Class] = {}
    for index, op in enumerate(ops):
        for hold in op.takes:
            found = classes.setdefault(hold.kind, _Class(hold.slots))
            assert found.slots == hold.slots, f"{hold.kind} has both {found.slots} and {hold.slots} slots"
            found.takers.append(index)
        for name in op.gives:
            classes[name[0]].givers.append(index)
    return classes


def _with(op: Op, needs: Sequence[Key], needs_previous: Sequence[Key]) -> Op:
    if not needs and not needs_previous:
        return op
    return replace(
        op,
        needs=tuple(dict.fromkeys((*op.needs, *needs))),
        needs_previous=tuple(dict.fromkeys((*op.needs_previous, *needs_previous))),
    )
