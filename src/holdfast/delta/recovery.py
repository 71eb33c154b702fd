"""Recovery: the newest whole base of a run, and the records from there on, into a live model.

A base that does not verify gives way to the one before it, whose records reach further back. A record that is missing,
does not verify, or does not give what training had, ends the chain: the step before it is where the run continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import Damaged, HoldfastError, NoCommit
from ..io.buffers import Buffer
from ..state.live import BUFFERS, LiveState
from ..store.journal import StoredRecord, read_segment, segments
from ..store.local import LocalStore
from ..store.manifest import Manifest, Point
from ..store.reader import RunReader
from ..store.reading import read_file
from ..store.retention import ancestry
from .replay import apply, fingerprint, payloads, tensors_of
from .script import Script


@dataclass
class Chain:
    """The records that follow ``base`` on its line, to the last that can be used; why it ends there."""

    base: Manifest
    records: list[StoredRecord]
    end: str = ""

    @property
    def last(self) -> Point:
        return self.records[-1] if self.records and self.records[-1].step > self.base.step else self.base

    @property
    def progress(self) -> dict[str, Any]:
        last = self.last
        return last.about["progress"] if isinstance(last, StoredRecord) else self.base.progress


@dataclass
class Journal:
    """The records of a run's current line by step, and where reading a segment ended before its clean end."""

    records: dict[int, StoredRecord] = field(default_factory=dict)
    odd: dict[int, Damaged] = field(default_factory=dict)
    """By the last step before it."""


def read_journal(store: RunReader, stream: str) -> Journal:
    """The headers of all records of ``stream`` on the current line."""
    journal = Journal()
    limits = dict(ancestry(store.timelines()[0], store.tip()))
    for ref in segments(store.disk, stream):
        if ref.timeline not in limits:
            continue
        limit = limits[ref.timeline]
        found, odd = read_segment(store.disk, ref)
        for record in found:
            if limit is None or record.step <= limit:
                journal.records[record.step] = record
        if odd is not None:
            journal.odd[found[-1].step if found else ref.first_step - 1] = odd
    return journal


def chain_of(base: Manifest, journal: Journal, target: int | None) -> Chain:
    """What follows ``base`` without a gap, to ``target`` at most. Raises ``Damaged`` if records are missing that the
    base itself needs."""
    records: list[StoredRecord] = []
    step, end = base.oldest_step, ""
    while target is None or step < target:
        record = journal.records.get(step + 1)
        if record is None:
            end = str(journal.odd[step]) if step in journal.odd else ""
            break
        if records and record.previous != _digest_before(record, records[-1]):
            end = f"the record of step {step + 1} does not follow that of step {step}"
            break
        records.append(record)
        step += 1
    if step < base.step:
        raise Damaged(
            f"{base.path} needs the records of steps {base.oldest_step + 1} to {base.step}, and that of step"
            f" {step + 1} cannot be used. {end}",
            path=base.path,
        )
    return Chain(base, records, end)


def _digest_before(record: StoredRecord, before: StoredRecord) -> str:
    return before.digest if before.timeline == record.timeline else record.key


def recover(
    store: LocalStore,
    state: LiveState,
    script: Script,
    *,
    stream: str,
    target: int | None = None,
    exact: bool = False,
    after_update: Callable[[], None] | None = None,
) -> tuple[Point, list[str]]:
    """Bring ``state`` and ``script`` to the newest step that can be had, at most ``target``; just that one if
    ``exact``. Returns the commit or the record that the run continues, and what was wrong with later ones.

    Raises ``NoCommit`` if ``target`` cannot be had, ``Damaged`` if no base is whole, ``RunMismatch`` if the run is that
    of another model (with nothing changed then).
    """
    journal, odd = read_journal(store, stream), []
    bases = [ref for ref in store.line() if target is None or ref.step <= target]
    for ref in bases:
        try:
            base = store.load(ref)
            chain = _replayed(store, state, base, journal, target, after_update, odd)
        except Damaged as error:
            odd.append(str(error))
            continue
        if exact and chain.last.step != target:
            raise NoCommit(
                f"{store.root} cannot be brought to step {target}: after step {chain.last.step} the records end."
                f" {chain.end or 'Nothing was recorded after it.'}"
            )
        if chain.end:
            odd.append(chain.end)
        script.check(chain.progress)
        script.restore(chain.progress)
        return chain.last, odd
    if not bases:
        raise NoCommit(f"{store.root} has no commit of step {target} or before it.")
    raise Damaged(f"no commit of {store.root} is whole: {odd[0]} `holdfast verify {store.root}` says more.")


class _Differs(HoldfastError):
    """Replay of a record did not give what training had."""


def _replayed(
    store: LocalStore,
    state: LiveState,
    base: Manifest,
    journal: Journal,
    target: int | None,
    after_update: Callable[[], None] | None,
    odd: list[str],
) -> Chain:
    """Load ``base`` and do the steps after it. What ends the chain early is its ``end``, or in ``odd``."""
    atoms = store.atoms(base)
    state.check({key: (atom["dtype"], tuple(atom["shape"])) for key, atom in atoms.items()})
    while True:
        chain = chain_of(base, journal, target)
        state.forget_optimizer_state()
        for tensors in _loaded(store, base):
            state.load(tensors)
        state.load_values(base.progress["values"])
        try:
            _replay(store, state, chain, atoms, after_update)
        except _Differs as error:
            odd.append(str(error))
            target = chain.records[-1].step - 1
            continue
        return chain


def _loaded(store: LocalStore, base: Manifest) -> Iterator[dict[str, torch.Tensor]]:
    """The verified tensors of each file of ``base``, whose memory is used again for the next but one."""
    queue = store.queue
    files = list(base.files.values())
    buffers = [Buffer(max(file.bytes for file in files), "recovery") for _ in range(2)]
    try:
        futures = []
        for number in range(len(files) + 1):
            if number < len(files):
                view = buffers[number % 2].view[: files[number].bytes]
                futures.append((view, read_file(store.disk, queue, files[number], view)))
            if number:
                view, future = futures[number - 1]
                future.result()
                yield tensors_of(view)
    finally:
        for _, future in futures:
            future.exception()
        for buffer in buffers:
            buffer.free()


def _replay(
    store: LocalStore,
    state: LiveState,
    chain: Chain,
    atoms: dict[str, Any],
    after_update: Callable[[], None] | None,
) -> None:
    """Do the steps of ``chain``, which is cut where a record does not verify."""
    of_step = {
        BUFFERS if atom["slot"] == "buffer" else atom["name"]: chain.base.files[
            atom["fragments"][0]["unit"]
        ].step
        for atom in atoms.values()
    }
    done = 0
    try:
        for record, parts in payloads(store.disk, store.queue, chain.records):
            skipped = [o for o, step in of_step.items() if step is not None and step >= record.step]
            if record.step <= chain.base.step:  # what is of the commit's own step is ahead as well
                skipped += [o for o, step in of_step.items() if step is None]
            apply(state, record.about, parts, skipped=frozenset(skipped), after_update=after_update)
            done += 1
            if record.step >= chain.base.step and record.about["fingerprint"] != fingerprint(
                state, record.step
            ):
                del chain.records[done:]
                raise _Differs(
                    f"replaying step {record.step} did not give what training had. The run continues after step"
                    f" {record.step - 1}."
                )
    except Damaged as error:
        if chain.base.oldest_step + done < chain.base.step:
            raise
        del chain.records[done:]
        chain.end = str(error)
