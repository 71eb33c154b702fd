"""A snapshot with the log records that all writers have after it, and their replay into a live state.

Replay must run with the shapes of the writer, because kernels round differently on other shapes. Where this process
holds exactly the regions that the writers stored, records are replayed on the live model. Under another parallelism
each writer's shard is rebuilt on plain tensors (``ShardState``), replayed by itself, and copied into the live state. A
record that does not verify, or does not reproduce the fingerprint of training, ends the lineage at the step before. The
log of one writer is called a stream. Called by ``run_recovery``, by compaction, and by replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from ...errors import Damaged, DiskFailed, HoldfastError, OtherArithmetic, RunMismatch, Unreadable
from ...optim.kinds import is_elementwise
from ...state.layout.overlaps import (
    BUFFER,
    PARAMETERS,
    Shared,
    arrange_buffers,
    key_names,
    placed,
)
from ...state.live_state import BUFFERS, LiveState
from ...state.quantised_slots import refuse_divided_blocks
from ...state.tensor_entries import RESIDUAL
from ...store.format.manifest import Manifest, Point
from ...store.log.chain import Chain, Journal, chain_of, payloads, read_journal
from ...store.log.segments import StoredRecord
from ...store.run_store import LocalStore
from ..arithmetic import (
    DESCRIPTIONS,
    Arithmetic,
    arithmetic_here,
    computing_as,
    depends_on_products,
    differing,
    operations_of,
    recorded_settings,
)
from ..capture.state_digests import digest_of
from ..compression.codecs import ShardingMismatch, Spreads
from ..log.log_records import ARITHMETIC, FOLLOWS, FlatViews, ReplayRecord, apply, fingerprint, fingerprint_as
from ..log.recorder import BOUND
from ..snapshot.snapshot_chunks import SnapshotShard
from ..snapshot.snapshot_state import strides_of
from .recovery_progress import RecoveryProgress
from .shard_state import ShardState, copy_into


@dataclass
class Lineage:
    """A snapshot with its log records, all cut to the same last ``step``.

    ``chains`` holds the records by stream. ``damage`` is the reason why there are no more, if that is known.
    """

    store: LocalStore
    base: Manifest
    chains: dict[str, Chain]
    step: int
    damage: Damaged | None
    watch: RecoveryProgress = field(default_factory=RecoveryProgress)
    """Observer of the recovery's progress."""
    acknowledged: int = -1
    """A step known from the logs to have been durable on all streams."""
    ends_early: Callable[[], bool] = lambda: False
    """Asked before each record: whether the replay shall end there."""
    allows_approximation: bool = False
    """True if records of another kind of processor may be replayed with this one's arithmetic."""
    is_approximate: bool = False
    """True once the replay uses other arithmetic than the writer's: fingerprints then say nothing."""

    @classmethod
    def of(
        cls,
        store: LocalStore,
        base: Manifest,
        target: int | None,
        tip: int | None = None,
        known: Mapping[str, Journal] | None = None,
    ) -> Lineage:
        """Build the line from ``base`` to at most ``target``, by headers alone.

        Args:
            tip: The timeline that the line belongs to; None for the current one.
            known: The headers by stream, where they have been read already.

        Raises ``Damaged`` if records are missing that the snapshot needs.
        """
        known = known or {}
        journals = {stream: known.get(stream) or read_journal(store, stream, tip) for stream in base.streams}
        chains, unread = _chains(base, journals, target)
        acknowledged = min(  # at most BOUND steps are on their way
            max(journals[stream].acknowledged, chain.last.step - BOUND) for stream, chain in chains.items()
        )
        shortest = min(chains.values(), key=lambda chain: (chain.last.step, chain.stream in unread))
        for chain in chains.values():
            chain.cut_to(shortest.last.step)
        step = shortest.last.step
        damage = shortest.damage or (
            None if step == target else _left_out(shortest, journals[shortest.stream])
        )
        return cls(store, base, chains, step, damage, acknowledged=acknowledged)

    @property
    def point(self) -> Point:
        """The commit or a record that further training continues."""
        return next(iter(self.chains.values())).last

    @property
    def residuals_dropped(self) -> bool:
        """Return whether training continued without residuals since the snapshot, by a codec without any."""
        records = [r for chain in self.chains.values() for r in chain.records if r.step > self.base.step]
        updated = [record for record in records if record.about["updates"]]  # a skipped step changes none
        return bool(updated) and not uses_feedback(updated[-1].about)

    @cached_property
    def shares(self) -> dict[str, SnapshotShard]:
        """The share of each stream in the snapshot."""
        return {stream: SnapshotShard(self.store, self.base, stream) for stream in self.chains}

    def progress(self, rank: int) -> dict[str, Any]:
        """Return the progress of ``rank`` after the last step; the first rank's if there was no such rank."""
        return self.chains[self.stream_of(rank)].progress

    def trained(self, rank: int) -> set[str]:
        """Return the parameters that the last step trained; none if the version of the snapshot does not say."""
        stream = self.stream_of(rank)
        replay, records = self.shares[stream].progress.get("replay", {}), self.chains[stream].records
        if "frozen" not in replay:
            return set()
        updates = records[-1].about["updates"] if records and records[-1].step > self.base.step else []
        without = {name for update in updates for name in update["without"]}
        members = [{name for names in groups for name in names} for groups in replay["parameters"]]
        told = set[str]().union(*(members[update["optimizer"]] for update in updates))
        frozen = set(replay["frozen"]) - told  # some may have begun to train since the snapshot
        return set[str]().union(*members) - frozen - without

    def replay_into(
        self,
        state: LiveState,
        rank: int,
        after_update: Callable[[int], None] | None,
        reached: Reached | None = None,
    ) -> None:
        """Load the snapshot and replay the steps after it.

        A record that does not verify ends the line. Steps that ``state`` has ``reached`` on this line are left out.

        Raises ``Damaged`` if the snapshot cannot be loaded, ``ReplayMismatch`` with the state unusable, and
        ``RunMismatch`` if the run is another model's, and ``OtherArithmetic``, with nothing changed.
        """
        self.refuse_other_model(state)
        self._arrange_buffers(state, rank)
        sources, stream, here = self._sources(state), self.stream_of(rank), state.shared()
        self._refuse_joined(here, stream, is_cut_alike=sources is not None)
        if not self.overlap_alike(state, stream, here):
            self._refuse_apart(state, after_update)
        as_written = self.is_as_written(state, rank, here)
        self.refuse_other_arithmetic(state, after_update is not None, rank, here)
        if as_written and reached is not None and self._continues(reached, stream):
            self.watch.begins(self.base, list(self.chains.values()), reached.step)
            self._step_on(state, self._takings(state, sources or {}, stream), after_update, reached.step)
            self._arrange_buffers(state, rank)
            return
        self.watch.begins(self.base, list(self.chains.values()))
        state.forget_optimizer_state()
        if as_written and sources is not None:
            self._replay(state, sources, stream, after_update)
        else:
            self._recut(state, after_update)
        self._arrange_buffers(state, rank)  # it may have ended at an earlier step

    def is_as_written(self, state: LiveState, rank: int, here: Shared | None = None) -> bool:
        """Return whether ``state`` holds exactly the regions that the writers stored, and is replayed itself.

        ``here`` is how tensors of ``state`` overlap, where that is known.
        """
        stream = self.stream_of(rank)
        is_cut_alike = self._sources(state) is not None and self.overlap_alike(state, stream, here)
        return is_cut_alike and self._has_buffers_of(state, stream)

    def refuse_other_model(self, state: LiveState) -> None:
        """Raise ``RunMismatch`` if the snapshot holds tensors of another model. Nothing is changed."""
        kinds = {
            key: (atom["dtype"], tuple(atom["shape"]))
            for share in self.shares.values()
            for key, atom in share.atoms.items()
        }
        state.check(kinds)

    def refuse_other_arithmetic(
        self, state: LiveState, after_update: bool, rank: int | None = None, here: Shared | None = None
    ) -> None:
        """Raise ``OtherArithmetic`` if the records that ``rank`` replays (None: all) would not give training's bits.

        Changes nothing. Where the line allows an approximation, note that it is one. ``here`` is that of
        ``is_as_written``.
        """
        streams = set(self.chains)
        if rank is not None and self.is_as_written(state, rank, here):
            streams = {*(self._sources(state) or {}).values()} or {self.stream_of(rank)}
        records = [record for stream in streams for record in self.chains[stream].records]
        updates = (update for record in records for update in record.about["updates"])
        needed, ours = operations_of(state, updates, after_update), arithmetic_here(state)
        notes = [there for stream in streams for there in self.writers_arithmetic(stream)]
        found = {name for there in notes for name in differing(there, ours, needed)}
        if not found or self.allows_approximation:
            self.is_approximate = bool(found)
            return
        alone = self._newest_alone()
        standing = (
            "no base of this run stands alone"
            if alone is None
            else f"go on from step {alone}, the newest base that needs no record, by resume(step={alone})"
        )
        writer = self.store.timelines()[0].get(self.base.timeline)
        machines = "machines like those that trained, rank by rank"
        if len(self.chains) == 1:
            host = None if writer is None else writer.writer.get("host")
            machines = f"{host} or a machine like it" if host else "a machine like the one that trained"
        raise OtherArithmetic(
            f"{self.store.root}: the records of steps {self.base.oldest_step + 1} to {self.step} were written by"
            " another kind of processor or device, or another version of torch, whose arithmetic differs from this"
            f" one's in the last bits (of {' and '.join(sorted(map(DESCRIPTIONS.__getitem__, found)))}), so a replay"
            " here would not give what training had. Nothing is damaged, and nothing was changed. Resume on"
            f" {machines}; or {standing}; or replay with the arithmetic of this machine, by"
            ' exactness="approximate", which resume() and HoldfastCallback() take.',
            alone,
        )

    def writers_arithmetic(self, stream: str) -> list[Arithmetic]:
        """Return what the writers of the records of ``stream`` computed with, as they noted it.

        The snapshot's writer may not be that of all records: a damaged snapshot gives way to an older one.
        """
        records = self.chains[stream].records
        noted = [record.about[ARITHMETIC] for record in records if ARITHMETIC in record.about]
        if not records or ARITHMETIC in records[0].about:
            return noted
        return [self.shares[stream].progress.get("replay", {}).get("arithmetic", {}), *noted]

    def _newest_alone(self) -> int | None:
        """Return the newest step, not after this line's snapshot, whose snapshot needs no record; None without one."""
        for ref in self.store.line(self.base.timeline):
            if ref.step <= self.base.step:
                with suppress(Damaged, DiskFailed):
                    if self.store.load(ref).oldest_step == ref.step:
                        return ref.step
        return None

    def _arrange_buffers(self, state: LiveState, rank: int) -> None:
        """Arrange buffers that shared memory when the model was made as they lay after the last step."""
        shared = self.progress(rank).get("joined", self._shared(self.stream_of(rank)))
        if shared is not None:
            arrange_buffers(state, shared)

    def _shared(self, stream: str) -> Shared | None:
        """Return which tensors overlapped at the writer of ``stream``; None where its version did not say."""
        return self.shares[stream].progress.get("replay", {}).get("shared")

    def overlap_alike(self, state: LiveState, stream: str, here: Shared | None = None) -> bool:
        """Return whether parameters overlap in memory as they did at the writer of ``stream``.

        Buffers are not compared: they are recorded, and a forward pass may replace them. ``here`` is how tensors of
        ``state`` overlap, where that is known.
        """
        shared = self._shared(stream)
        if shared is None:
            return True
        return placed(shared, PARAMETERS) == placed(state.shared() if here is None else here, PARAMETERS)

    def _refuse_joined(self, here: Shared, stream: str, is_cut_alike: bool) -> None:
        """Raise ``RunMismatch`` where tensors share memory ``here``, but had separate values in the run."""
        told = [placed(shared) for each in self.shares if (shared := self._shared(each)) is not None]
        for keys, lies in placed(here).items() if len(told) == len(self.shares) else ():
            if all(key[1:] == BUFFER for key in keys):
                continue  # arranged as after the last step, and records hold every change
            together = [there for groups in told for there in groups if keys <= there]
            as_here = lies in placed(self._shared(stream) or []).values()
            if not together or (is_cut_alike and not as_here):
                raise RunMismatch(
                    f"{key_names(sorted(keys))} are one memory here, and were not in the run, or otherwise, so not all"
                    " of their values could be brought back. Build the model as the run's was, each with memory of its"
                    " own (.clone())."
                )

    def apart(self, state: LiveState, stream: str) -> list[str]:
        """Return the names of parameters that shared memory in the run and do not here, by group."""
        there = placed(self._shared(stream) or [], PARAMETERS)
        here = placed(state.shared(), PARAMETERS) if there else {}
        return [key_names(sorted(keys)) for keys in there if not any(keys <= together for together in here)]

    def _refuse_apart(self, state: LiveState, after_update: Callable[[int], None] | None) -> None:
        """Raise ``RunMismatch`` where tensors do not share memory here, but replay needs them to."""
        odd_one = after_update is not None or not all(map(is_elementwise, state.optimizers))
        names = [name for stream in self.shares for name in self.apart(state, stream)]
        if names and odd_one and any(chain.records for chain in self.chains.values()):
            raise RunMismatch(
                f"{names[0]} were one memory in the run, and are not here: its records can be replayed only where they"
                " are, since there is an after_update= or an optimizer that is not elementwise. Build the model as the"
                " run's was, resume, call save(), and change it then."
            )

    def stream_of(self, rank: int) -> str:
        streams = list(self.chains)
        return streams[rank if rank < len(streams) else 0]

    def _sources(self, state: LiveState) -> dict[str, str] | None:
        """Return for each parameter the stream with exactly the region that ``state`` holds; None if any has none."""
        sources: dict[str, str] = {}
        for stream, share in self.shares.items():
            for name, box in share.boxes.items():
                if state.boxes.get(name) == box:
                    sources.setdefault(name, stream)
        return sources if sources.keys() == state.boxes.keys() else None

    def _has_buffers_of(self, state: LiveState, stream: str) -> bool:
        """Return whether one stream has all buffers that ``state`` holds: each stage of a pipeline has its own."""
        return state.buffers().keys() <= self.shares[stream].atoms.keys()

    def _recut(self, state: LiveState, after_update: Callable[[int], None] | None) -> None:
        """Replay each stream in its writer's sharding, and copy from it what ``state`` holds."""
        odd_one = after_update is not None or not all(map(is_elementwise, state.optimizers))
        if odd_one and any(chain.records for chain in self.chains.values()):
            raise RunMismatch(
                f"{self.store.root} was written under another parallelism, and its records from step"
                f" {self.base.oldest_step + 1} on can be replayed only under that one, since there is an after_update="
                " or an optimizer that is not elementwise. Resume with as many ranks as before, call save(), and"
                " change the parallelism then."
            )
        shares = self.shares.values()
        stored = [(share.atoms.values(), share.progress.get("values", {})) for share in shares]
        refuse_divided_blocks(stored, state.wholes, state.boxes)
        step = self.step
        self._pour(state)
        while self.step < step:
            # the records of one stream end earlier than their headers say: start again, up to there
            step = self.step
            state.forget_optimizer_state()
            self._pour(state)

    def _pour(self, state: LiveState) -> None:
        buffers: dict[str, torch.Tensor] = {}
        for _, ghost in self.parts(state):
            copy_into(ghost, state)
            buffers = {**ghost.loaded_buffers, **buffers}
        state.load(buffers)
        if state.own:
            state.load_own(next(iter(self.shares.values())).progress)

    def parts(self, state: LiveState) -> Iterator[tuple[str, ShardState]]:
        """Yield each stream with its state after the last step, in its writer's sharding.

        ``state`` provides the parameters' form and the optimizers.
        """
        self.refuse_other_arithmetic(state, False)
        for stream, share in self.shares.items():
            ghost = ShardState(state, share.boxes, self._shared(stream) or [])
            self._replay(ghost, dict.fromkeys(ghost.boxes, stream), stream, None)
            yield stream, ghost

    def _replay(
        self,
        state: LiveState,
        sources: Mapping[str, str],
        with_buffers: str,
        after_update: Callable[[int], None] | None,
    ) -> None:
        """Load each parameter of ``state`` from its source stream, and replay the steps. Buffers come from
        ``with_buffers``.
        """
        taking = self._takings(state, sources, with_buffers)
        for stream, each in sorted(taking.items(), key=lambda item: item[0] == with_buffers):  # its own last
            wanted = each.owners | ({RESIDUAL} if stream == with_buffers else set())
            later = {unit for units in each.later.values() for unit in units}
            state.layouts |= each.share.progress.get("layouts", {})
            state.on_host |= each.share.progress.get("on_host", {})
            state.rebound |= state.carried.intersection(self.progress(0).get("rebound", ()))
            each.share.load(state, each.share.files.keys() - later, wanted, self.watch.loaded)
            state.load_standing(each.share.progress, each.owners)
        if state.own:
            state.load_own(taking[with_buffers].share.progress)
        state.share(self._shared(with_buffers) or [])
        self._step_on(state, taking, after_update)

    def _takings(self, state: LiveState, sources: Mapping[str, str], with_buffers: str) -> dict[str, _Taking]:
        owners = {with_buffers: {BUFFERS}}
        for name, stream in sources.items():
            owners.setdefault(stream, set()).add(name)
        return {stream: _Taking(self.shares[stream], names, state) for stream, names in owners.items()}

    def _step_on(
        self,
        state: LiveState,
        taking: Mapping[str, _Taking],
        after_update: Callable[[int], None] | None,
        after: int | None = None,
    ) -> None:
        """Replay the steps. The first stream's records provide everything but the gradients.

        With ``after`` the state has that step, which is not before the snapshot's.
        """
        step = min(self.base.oldest_step_of(stream) for stream in taking) if after is None else after
        records = {
            stream: [record for record in self.chains[stream].records if after is None or record.step > after]
            for stream in taking
        }
        products = depends_on_products(state, after_update)
        with ExitStack() as stack:
            following = {
                stream: stack.enter_context(
                    closing(payloads(self.store.disk, self.store.queue, records[stream]))
                )
                for stream in taking
            }
            while step < self.step:
                if step >= self.base.step and self.ends_early():
                    self._end_at(step, None)
                    return
                try:
                    found = [
                        (each, *next(following[stream]))
                        for stream, each in taking.items()
                        if step >= self.base.oldest_step_of(stream)
                    ]
                except Damaged as error:
                    if step < self.base.step:
                        raise
                    self._end_at(step, error)
                    return
                except DiskFailed as error:
                    if step < self.base.step:
                        raise
                    raise Unreadable(error, step) from error
                step += 1
                is_reached = step > self.base.step
                if is_reached and any(each.follows_another(record) for each, record, _ in found):
                    or_unknown = " (or this approximate replay cannot tell)" if self.is_approximate else ""
                    raise ReplayMismatch(
                        step,
                        f"the state after step {step - 1} is not the one that step {step} was trained from{or_unknown}:"
                        f" the base of step {step - 1} held another one, which the script had changed before save() or"
                        " before a resume, and is not used here. `holdfast verify` says what is damaged; resume(step=)"
                        " begins from a base that is there.",
                    )
                taken = [each.of(record, parts) for each, record, parts in found]
                how = recorded_settings(taken[0].about["progress"], found[0][0].share.progress)
                again = None if after_update is None else partial(after_update, step - 1)
                try:
                    with computing_as(how, products):
                        apply(state, taken, again)
                except ShardingMismatch as error:  # of a later timeline, whose own snapshot is not whole
                    raise ReplayMismatch(step) from error
                except Damaged as error:  # whole by its checksums, and no record of these parameters
                    raise ReplayMismatch(step, str(error)) from error
                for each in taking.values():
                    if units := each.later.get(step):
                        each.share.load(state, units, each.owners)  # counts as replay time
                self.watch.replayed(len(found))
                compares = step >= self.base.step and not self.is_approximate
                if compares and any(each.differs(record) for each, record, _ in found):
                    raise ReplayMismatch(step)

    def reached(self, rank: int) -> Reached:
        """Return the point that a state has reached into which this line was replayed."""
        stream = self.stream_of(rank)
        points = {each: chain.last for each, chain in self.chains.items()}
        return Reached(self.base, points, self._form(stream))

    def _continues(self, reached: Reached, stream: str) -> bool:
        """Return whether ``reached`` is a point of this line, on every stream.

        A record names the digest of the one before, so two lines that share a record share all before it.
        """
        return (
            self.base == reached.base
            and self.chains.keys() == reached.points.keys()
            and all(self._has_point(each, point) for each, point in reached.points.items())
            and self._form(stream) == reached.form
        )

    def _has_point(self, stream: str, wanted: Point) -> bool:
        points: list[Point] = [self.base, *self.chains[stream].records]
        return any(point == wanted for point in points if point.step == wanted.step)

    def _form(self, stream: str) -> dict[str, Any]:
        """Return what the script made of the tensors' memory by the last step, which a replay does not follow."""
        progress = self.chains[stream].progress
        return {key: progress.get(key) for key in ("rebound", "joined")}

    def end_before_feedback(self) -> None:
        """End the line before the first record that changed residuals after the snapshot had copied them."""
        steps = self._feedback_steps()
        if steps:
            self._end_at(max(min(steps) - 1, self.base.step), None)

    def leave_last(self) -> None:
        """Leave out the last step after the snapshot, whose record one of several writers may still be writing."""
        self._end_at(max(self.step - 1, self.base.step), None)

    @property
    def residuals_lost(self) -> bool:
        """Return whether a record changed residuals after the snapshot had copied them."""
        return bool(self._feedback_steps())

    def _feedback_steps(self) -> list[int]:
        return [
            record.step
            for stream, chain in self.chains.items()
            for record in chain.records
            if uses_feedback(record.about) and record.step > self.shares[stream].residual_step
        ]

    @property
    def is_torn(self) -> bool:
        """Return whether the line ends in a record that a killed process was writing.

        False if a later step is known to have been durable.
        """
        return self.damage is not None and self.damage.offset is not None and self.step >= self.acknowledged

    def _end_at(self, step: int, why: Damaged | None) -> None:
        self.step, self.damage = step, why
        for chain in self.chains.values():
            chain.cut_to(step)


@dataclass(frozen=True)
class Reached:
    """A point of a run that a live state is at: the snapshot it was loaded from, and the last record of each stream."""

    base: Manifest
    points: Mapping[str, Point]
    form: Mapping[str, Any]
    """Changes by the script to the memory of its tensors until then, which no record brings forward."""

    @property
    def step(self) -> int:
        return next(iter(self.points.values())).step


class _Taking:
    """The content that a replay takes from one stream: that of ``owners``."""

    def __init__(self, share: SnapshotShard, owners: set[str], state: LiveState) -> None:
        self.share, self.owners, self.later = share, owners, share.later_rows(owners)
        self._state = state
        self._loaded = share.steps_loaded
        # equal regions are stored once, empty ones too, by a rank whose other regions may not be those of this one
        boxes = state.boxes
        self._shapes = {name: box.shape for name, box in share.boxes.items() if boxes.get(name, box) != box}
        # in the writer's order; a fingerprint can be compared only where all parameters are taken
        names = share.boxes if share.boxes.keys() <= owners else ()
        self._compared = [state.parameter(name) for name in names]
        told = share.progress.get("replay", {}).get("strides")
        self._strides = told if told or strides_of(state) else None
        """The strides in whose order bytes are compared; None for the order here, where all are contiguous."""
        self._views = FlatViews()
        self._spreads: dict[int, Spreads] = {}

    def of(self, record: StoredRecord, parts: Sequence[memoryview]) -> ReplayRecord:
        """Return the part of ``record`` that the replay takes."""
        skipped = {o for o, at in self._loaded.items() if at >= record.step or o not in self.owners}
        return ReplayRecord(
            record.about, parts, skipped, self.share.boxes.keys(), self._shapes, self._spreads
        )

    def follows_another(self, record: StoredRecord) -> bool:
        """Return whether ``record`` says that it follows another state than the present one."""
        told = record.about.get(FOLLOWS)
        return bool(told and self._compared) and told != digest_of(
            self._state, [each.name for each in self._compared]
        )

    def differs(self, record: StoredRecord) -> bool:
        """Return whether the state differs from that of training after ``record``, as far as fingerprints tell."""
        told = record.about["fingerprint"]
        if not self._compared:
            return False
        if self._strides is None:
            return told != fingerprint(self._compared, record.step, self._views)
        return told != fingerprint_as(self._compared, record.step, self._strides)


class ReplayMismatch(HoldfastError):
    """Replay of the log record of ``step`` did not give the state that training had."""

    def __init__(self, step: int, why: str = "") -> None:
        what = why or f"replaying step {step} did not give what training had."
        super().__init__(f"{what} The run continues after step {step - 1}.")
        self.step = step


def _chains(
    base: Manifest, journals: Mapping[str, Journal], target: int | None
) -> tuple[dict[str, Chain], set[str]]:
    """Return the chain of each stream, and the streams that continue unreadably; these reach as far as the others.

    Raises ``Unreadable`` where all others lead further than one of them.
    """
    chains: dict[str, Chain] = {}
    ended: dict[str, Unreadable] = {}
    for stream, journal in journals.items():
        try:
            chains[stream] = chain_of(base, stream, journal, target)
        except Unreadable as error:
            ended[stream] = error
    if not ended:
        return chains, set()
    first = min(ended.values(), key=lambda error: error.step)
    least = min((chain.last.step for chain in chains.values()), default=first.step + 1)
    if first.step < least:
        raise first
    chains |= {stream: chain_of(base, stream, journals[stream], least) for stream in ended}
    return {stream: chains[stream] for stream in journals}, {*ended}


def _left_out(chain: Chain, journal: Journal) -> Damaged | None:
    """Return the reason why the chain ends although there are records of later steps; None if there are none."""
    step = chain.last.step
    later = min((other for other in journal.records if other > step), default=None)
    if later is None:
        return None
    return Damaged(
        f"there is no record of step {step + 1} in journal/{chain.stream}, and one of step {later}: a segment was"
        f" removed, or the steps between were not recorded. The run continues after step {step}.",
        path=f"journal/{chain.stream}",
    )


def uses_feedback(about: dict[str, Any]) -> bool:
    """Return whether the step of a record changed residuals."""
    return any(update.get("codec", {}).get("feedback") for update in about["updates"])
