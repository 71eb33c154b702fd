"""The removal of commits and log records that a policy does not keep, and what depends on them.

What would be lost is known before anything is removed: a commit leads to later steps by log records, so removing it may
lose steps that have no commit. The newest commit that stays must be whole. Called by ``holdfast prune`` and by
compaction. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.errors import BadInput, Damaged, DiskFailed, Unreadable
from holdfast.store.commit.retention import (
    Keep,
    Need,
    certified_in,
    dropped,
    kept_for_good,
    lineage,
    needs,
    unneeded_segments,
    writer_of,
)
from holdfast.store.format.manifest import CommitRef, Manifest, is_reference
from holdfast.store.joined_nodes import STREAMS
from holdfast.store.log.chain import Journal, chain_of, read_journal, verify_records
from holdfast.store.log.segments import streams
from holdfast.store.log.striping import segment_bytes
from holdfast.store.node_store import NodeStore, even_out
from holdfast.store.reader import RunReader
from holdfast.store.run_store import LocalStore


@dataclass(frozen=True)
class RemovedCommit:
    """A commit that a policy removes, and the last step that can be recovered from it.

    Steps that no other commit leads to are lost with it.
    """

    ref: CommitRef
    bytes: int
    """The bytes of files that no other commit needs."""
    leads_to: int
    current: bool


@dataclass(frozen=True)
class Pruning:
    """The effect of a policy on a run."""

    going: tuple[RemovedCommit, ...]
    kept: tuple[CommitRef, ...]
    segments: tuple[str, ...]
    segment_bytes: int
    lost: tuple[tuple[int, int], ...]
    """The steps, as (first, last), that can be recovered now and not afterwards.

    They are on the current timeline or on an abandoned one.
    """
    needed: tuple[Need, ...]
    unread: tuple[str, ...] = ()
    """The reasons why some log records cannot be read, so that their steps are unknown."""

    @property
    def total_bytes(self) -> int:
        return self.segment_bytes + sum(going.bytes for going in self.going)


def planned(reader: RunReader, keep: Keep) -> Pruning:
    """Return what ``keep`` would remove of a run. Reads headers alone and writes nothing."""
    manifests = {ref: reader._load_or_none(ref) for ref in reader.commits()}
    timelines, tip = reader.timelines()[0], reader.tip()
    known = [manifest for manifest in manifests.values() if manifest is not None]
    unreadable = {ref for ref, manifest in manifests.items() if manifest is None}
    line = lineage(set(manifests) - unreadable, timelines, tip)
    for_good = kept_for_good([m for m in known if m.ref in line], keep)
    for_good |= certified_in([manifest for ref in line if (manifest := manifests[ref]) is not None])
    going = dropped(
        manifests, timelines, tip, retain=keep.last, room=keep.last, for_good=for_good, damaged=unreadable
    )
    kept = [manifest for manifest in known if manifest.ref not in going]
    needed = needs(kept, for_good - set(line[: keep.last]))
    gone = tuple(unneeded_segments(reader.disk, needed, None))
    before, after = reach_of_lines(reader, known), reach_of_lines(reader, kept, without=gone)
    files = {file.path for manifest in kept for file in manifest.files.values()}
    rows = [
        RemovedCommit(
            ref,
            _own_bytes(manifests[ref], files),  # a file that several name counts with the first
            before.lines.get(tip if ref in line else ref.timeline, {}).get(ref, ref.step),
            ref in line,
        )
        for ref in going
    ]
    return Pruning(
        tuple(rows), tuple(m.ref for m in kept), gone, sum(segment_bytes(reader.disk, path) for path in gone),
        tuple(in_spans(lost_of(reader, before, after))), tuple(needed), tuple(before.reasons),
    )  # fmt: skip


def _own_bytes(manifest: Manifest | None, others: set[str]) -> int:
    """Return the bytes of the files that are not among ``others``, and add these files to them."""
    files = manifest.files.values() if manifest is not None else ()
    own = [file for file in files if file.path not in others]
    others.update(file.path for file in own)
    return sum(file.bytes for file in own if not is_reference(file.path))


def prune(root: Path, keep: Keep) -> Pruning:
    """Remove what ``keep`` does not keep: commits first, then files, then log records.

    A kill in between leaves everything that is kept with what it needs.

    Raises:
        RunLocked: The run is being written.
        Damaged: The newest commit that would stay is damaged; nothing has been removed.
    """
    with LocalStore.open(root) as store:
        found = planned(store, keep)
        if found.going or found.segments:
            refuse_damaged(store, found.kept)
            store.retire([going.ref for going in found.going], found.needed)
    return found


def prune_nodes(reader: RunReader, directories: Sequence[Path], keep: Keep) -> Pruning:
    """Remove what ``keep`` does not keep from the directories of all nodes, and the copies of it at their partners.

    ``reader`` reads all of ``directories`` together. A kill in between leaves every directory whole; the next resume
    gives all the same commits. Raises as ``prune``, and ``BadInput`` if the directory of a node is not among them.
    """
    with ExitStack() as opened:
        stores = [opened.enter_context(NodeStore(each, leads=True)) for each in directories]
        for store in stores:
            store.enter()
        _refuse_some(reader, stores)
        found = planned(reader, keep)
        if found.going or found.segments:
            refuse_damaged(reader, found.kept)
            even_out(stores)
            for store in stores:
                store.retire_copies([going.ref for going in found.going], found.needed)
    return found


def _refuse_some(reader: RunReader, stores: Sequence[NodeStore]) -> None:
    """Raise ``BadInput`` if no directory of ``stores`` is that of the node of some share of the newest commit.

    Another directory may hold a newer commit, which needs files that would be removed.
    """
    newest = next((manifest for ref in reader.line() if (manifest := reader._load_or_none(ref))), None)
    if newest is None:
        return
    records = [record for store in stores for record in store.timelines()[0].values()]
    hosted = {stream for each in records if each.key == newest.key for stream in each.writer.get(STREAMS, [])}
    if lost := sorted({*newest.streams} - hosted):
        raise BadInput(
            f"{reader.root} are not the directories of all nodes: that with the share of {lost[0]} of step"
            f" {newest.step} is not among them. Name it too; if it is lost, resume first, on a node in its place."
        )


def refuse_damaged(store: RunReader, kept: tuple[CommitRef, ...]) -> None:
    """Raise ``Damaged`` unless every byte of the newest commit of ``kept`` is intact.

    That includes the log records that bring its parts to one step.
    """
    newest = next((ref for ref in store.line() if ref in kept), None)
    if newest is None:
        return
    manifest = store.load(newest)
    damaged = store.verify(manifest)
    last, damage = verify_records(store, manifest)
    if last < manifest.step:
        damaged += damage
    if damaged:
        raise Damaged(
            f"nothing was removed, since step {newest.step}, which is kept, is damaged: {damaged[0]}",
            path=damaged[0].path,
        )


@dataclass(frozen=True)
class RecordReach:
    """The last steps that log records lead to, by line and commit.

    A line is named by its newest timeline.

    Attributes:
        lines: By line and commit, the last step that can be recovered.
        unread: By line, the commits whose own or later log records cannot be read.
        reasons: The reasons for ``unread``.
    """

    lines: dict[int, dict[CommitRef, int]] = field(default_factory=dict)
    unread: dict[int, set[CommitRef]] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    def needs_alone(self, ref: CommitRef) -> bool:
        """Return whether an unreadable record of some line may follow ``ref`` and no other commit."""
        return any(
            ref in unread
            and not any(
                other != ref and self.lines[line].get(other) == self.lines[line].get(ref) for other in unread
            )
            for line, unread in self.unread.items()
        )


def reach_of_lines(reader: RunReader, commits: list[Manifest], without: Collection[str] = ()) -> RecordReach:
    """Return how far ``commits`` lead on the current and on abandoned timelines, by record headers.

    The paths in ``without`` count as absent.
    """
    timelines, tip = reader.timelines()[0], reader.tip()
    found = RecordReach()
    for each in {tip, *timelines}:
        line = lineage([manifest.ref for manifest in commits], timelines, each)
        _add_line(found, reader, each, [m for m in commits if m.ref in line], without)
    return found


def _add_line(
    reach: RecordReach, reader: RunReader, tip: int, line: list[Manifest], without: Collection[str]
) -> None:
    journals = {stream: read_journal(reader, stream, tip) for stream in streams(reader.disk)}
    for journal in journals.values():
        journal.records = {k: record for k, record in journal.records.items() if record.path not in without}
    found, unread = reach.lines.setdefault(tip, {}), reach.unread.setdefault(tip, set())
    for manifest in line:
        steps = [manifest.step] * (not manifest.streams)
        try:
            for stream in manifest.streams:
                try:
                    steps.append(chain_of(manifest, stream, journals.get(stream, Journal()), None).last.step)
                except DiskFailed as error:
                    steps.append(error.step if isinstance(error, Unreadable) else -1)
                    unread.add(manifest.ref)
                    text = str(error.error if isinstance(error, Unreadable) else error)
                    if text not in reach.reasons:
                        reach.reasons.append(text)
        except Damaged:
            continue
        if min(steps) >= manifest.step:
            found[manifest.ref] = min(steps)


def reach_needs(reach: RecordReach, commits: Collection[Manifest]) -> list[Need]:
    """Return the log records that ``commits`` need, so that everything they lead to stays recoverable."""
    last: dict[CommitRef, int] = {}
    for each in reach.lines.values():
        for ref, step in each.items():
            last[ref] = max(step, last.get(ref, step))
    for ref in set().union(*reach.unread.values()):  # these may need any record
        last.pop(ref, None)
    return [(manifest.oldest_step, last.get(manifest.ref)) for manifest in commits]


def lost_of(
    reader: RunReader, before: RecordReach, after: RecordReach, without: Collection[CommitRef] = ()
) -> set[int]:
    """Return the steps that ``resume(step=)`` no longer gives, or gives from another timeline.

    The commits in ``without`` count as absent afterwards.
    """
    there, left = _whose(reader, before, ()), _whose(reader, after, without)
    return {step for step, timeline in there.items() if left.get(step) != timeline}


def _whose(reader: RunReader, reach: RecordReach, without: Collection[CommitRef]) -> dict[int, int]:
    """Return the timeline that wrote each step that ``resume(step=)`` gives.

    A step of several timelines counts for the current one, or else for the newest.
    """
    timelines, tip = reader.timelines()[0], reader.tip()
    found: dict[int, int] = {}
    for each in dict.fromkeys((tip, *sorted(reach.lines, reverse=True))):
        lead = [(ref.step, last) for ref, last in reach.lines.get(each, {}).items() if ref not in without]
        for step in {step for first, last in lead for step in range(first, last + 1)}:
            found.setdefault(step, writer_of(timelines, each, step))
    return found


def in_spans(steps: set[int]) -> list[tuple[int, int]]:
    """Return the first and last of each run of consecutive ``steps``.

    >>> in_spans({4, 2, 3, 7})
    [(2, 4), (7, 7)]
    """
    spans: list[tuple[int, int]] = []
    for step in sorted(steps):
        if spans and spans[-1][1] == step - 1:
            spans[-1] = (spans[-1][0], step)
        else:
            spans.append((step, step))
    return spans


def spans_text(spans: Collection[tuple[int, int]]) -> str:
    """Return ``spans`` as text for a person.

    >>> spans_text([(2, 4), (7, 7)])
    '2 to 4, 7'
    """
    return ", ".join(f"{a:,}" if a == b else f"{a:,} to {b:,}" for a, b in spans)
