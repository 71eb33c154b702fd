"""The trainer's side of replicas where several ranks train: each rank's replica holds what that rank stores.

A step survives the trainers' death once all ranks have handed it over, so replicas hold back steps that some rank may
not have. A snapshot is of one step on all ranks, found by counting, and becomes a commit when every replica has its
share on the disk. Messages between ranks go over the ``RankCoordinator``, as for records. After a recovery from memory,
ranks that hold the same regions send each other what only one of them had stored (``broadcast_missing_state``). Called
by ``replicating``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import xxhash

from ...distributed import Ranks, stream_of
from ...errors import BadInput, Damaged, NoCommit
from ...state.live_state import LiveState
from ...store.disk import Disk
from ...store.format.manifest import Point
from ...store.run_store import LocalStore
from ..capture import state_digests
from ..coordinator import RankCoordinator, RankStatus
from ..log.recorder import FinalizedStep
from ..rank_consistency import broadcast_missing_state
from ..recovery.model_description import describe, rebuild
from ..recovery.run_recovery import RecoveryResult, recover
from ..recovery.shard_state import copy_into
from ..user_state import ScriptState
from . import retained_state, shared_memory
from .replica_client import Replica
from .replica_liveness import ReplicaLocks, StragglerMonitor, has_kept, is_orphan


class Replicas(Replica):
    """The replica of this rank among ``ranks``.

    Snapshots, and everything that waits for them, are collective: every rank must call them.
    """

    def __init__(self, *args: Any, ranks: Ranks, **options: Any) -> None:
        super().__init__(*args, ranks=ranks, **options)
        self._ranks = ranks
        self._number = self._shared = self._ended = 0
        """Numbers of snapshots: the last begun, the last whose share the replica reported, the last known to have
        ended.
        """
        self._base_at = self._next_base = -1
        self._heard_of = (-1, 0)
        self._timeline: dict[str, Any] = {}
        self._run = Disk(self._terms.run)
        self._locks = ReplicaLocks(self._run)

    @property
    def replica_step(self) -> int:
        """The newest step that survives the death of all trainers, as far as this rank knows.

        Each rank contributes what its replica was handed, until that replica has drifted or died. Its own rank learns
        that at once, other ranks some hundredths of a second later, or some seconds later if its trainer died with it.
        The step then falls to the ``durable_step``, which never falls.
        """
        agreement = self.agreement
        if agreement is None or self._drift is not None or self._helper.failure is not None:
            return self.durable_step
        return max(agreement.standing.durable_step, self.durable_step)

    # Start

    def start(self, takes: bool) -> None:
        ranks = self._ranks
        if len(asked := set(ranks.everyone(self._base_every))) > 1:
            raise BadInput(
                f"base_every is not the same on all ranks ({', '.join(map(str, sorted(asked)))}): give all the same"
            )
        ranks.all_do(lambda: self._make_earlier_ones_leave(takes))
        ranks.first_does(self._start)  # the first rank's replica acquires the run
        ranks.all_do(lambda: self._start() if ranks.rank else None)

    def recover(
        self, store: LocalStore, script: ScriptState, *, target: int | None, exact: bool, approximate: bool
    ) -> RecoveryResult:
        """Recover as a single replica does: from memory if all ranks can reach the same step there."""
        ranks, problems = self._ranks, list[str]()
        mine = [each for each in self._kept(store) if each.cut == cut_of(self._state, ranks)]
        newest = ranks.first_does(lambda: retained_state.newest(store, target))
        there = ranks.everyone(mine)
        found = retained_state.agreed(there, newest, target, exact)
        if found is not None:
            own = retained_state.leading_to(found.step, mine)
            assert own is not None
            progress, told = dict[str, Any](), list[str]()
            wrong = ranks.all_do(lambda: self._load(own, found.step, script, progress, told))
            problems = [
                f"what the replica of rank {rank} kept is not whole: {text}"
                for rank, text in enumerate(wrong)
                if text
            ]
            if not problems:
                if own.folder == retained_state.SYNC and not self._told_of_stray(own):
                    retained_state.take_sync(self._place)
                broadcast_missing_state(self._state, ranks)
                self._helper.durable_step = newest
                self._events.emit("resumed", source="replica", step=found.step, durable_step=newest)
                return RecoveryResult(found, told + self._told_of_stray(own), progress=progress)
        recovered = recover(
            store, self._state, script, ranks=ranks, target=target, exact=exact, approximate=approximate
        )
        self._helper.durable_step = recovered.point.step
        if target is None and not problems:
            without = [rank for rank, each in enumerate(there) if not each]
            problems = self._not_used(store, recovered.point.step, _why_not(without, ranks.world_size))
        return replace(recovered, problems=problems + recovered.problems, same_cut=True, residuals_lost=False)

    def _load(
        self,
        own: retained_state.RetainedState,
        step: int,
        script: ScriptState,
        progress: dict[str, Any],
        told: list[str],
    ) -> str | None:
        """Bring this rank's part of the state to ``step``, from its kept state ``own``.

        Fills ``progress``, and ``told`` with warnings of what the script gave otherwise. Returns the reason if the step
        cannot be reached, otherwise None.
        """
        part = rebuild(describe(self._state))
        try:
            with shared_memory.opened(own.path) as memory:
                found = recover(memory, part, script, ranks=Ranks(), target=step, exact=True)
                kept = memory.load(memory.line()[0]).progress
        except (Damaged, NoCommit) as error:
            return str(error)
        self._state.forget_optimizer_state()
        copy_into(part, self._state)
        self._state.load({key: tensor for key, (_, tensor) in part.buffers().items()})
        progress.update(found.progress)
        told += script.override_warnings(kept, found.progress)
        return None

    def begin(self, fork: Point | None, step: int, progress: dict[str, Any], num_slots: int) -> None:
        ranks = self._ranks

        def hand_over(timeline: dict[str, Any]) -> dict[str, Any]:
            about = {**self._beginning(fork), "join": timeline}
            self.sync(self._state, step, progress, num_slots, begin=about)
            return self._timeline

        self._timeline = timeline = ranks.first_does(lambda: hand_over({}))
        ranks.all_do(lambda: hand_over(timeline) if ranks.rank else None)
        for rank in range(ranks.world_size):  # all replicas exist now
            self._locks.gone(rank)
        self._clean_up_after_others()
        self.agreement = RankCoordinator(
            ranks, how_far=self._how_far, steps_done=lambda: self.last_put, publish=self._publish,
            follow=lambda: None, hear=self._hear_of_all, sure="with the replicas, or durable,",
            is_there=self._is_there, survives=self._survives, deadline_seconds=self._deadline,
        )  # fmt: skip
        self._next_base = step + self._base_every
        if self.durable_step < step:
            self._ask_for_base(step)
        if fork is None:
            self.wait(step)

    def sync(
        self,
        state: LiveState,
        step: int,
        progress: dict[str, Any],
        num_slots: int,
        again: bool = False,
        **more: Any,
    ) -> None:
        """Hand over the state as a single replica does. Until all ranks are at ``step`` the replica keeps its earlier
        state.
        """
        self._until_ended()
        super().sync(state, step, progress, num_slots, again, cut=cut_of(state, self._ranks), **more)

    def _mark(self, state: LiveState) -> dict[str, Any]:
        """Return the marks of a kept state, for every state after the first, which opens the timeline."""
        run = self._timeline
        return (
            retained_state.mark([run["id"], run["key"]], cut_of(state, self._ranks)) if self.agreement else {}
        )

    def _suffixes(self) -> list[str]:
        return [f".{stream_of(rank)}" for rank in range(self._ranks.world_size)]

    def _resync(self, step: int, progress: dict[str, Any]) -> None:
        """Hand over the state again after drift, and have all ranks make the snapshot that this replica had missed."""
        super()._resync(step, progress)
        assert self.agreement is not None
        self.agreement.call()

    def _hand(self, about: dict[str, Any], persist: bool) -> None:
        super()._hand(about, persist=False)
        self.last_put = self._done = self._handed = about["step"]
        self._look_soon()

    # Every step

    def _send(self, sealed: FinalizedStep) -> None:
        super()._send(sealed)
        self._look_soon()

    def advance(self, step: int, progress: Callable[[], dict[str, Any]], most_bytes: int) -> None:
        """Begin a snapshot when one is due. Called at the end of ``step``.

        All ranks find the same step by counting, and wait there for the snapshot before it.
        """
        self._check()
        if self._drift is not None:
            self._resync(step, progress())
        if step >= self._next_base:
            self._until_ended()
            self._ask_for_base(step)
            self._next_base = step + self._base_every

    def save(self, step: int, progress: Callable[[], dict[str, Any]], again: bool = False) -> None:
        """Make a snapshot of the current ``step`` on all ranks at once. It is durable on return.

        Collective: every rank must call this.
        """
        self._until_ended()
        while again or self.durable_step < step:
            again = False
            self.drain()
            if self._drift is not None:
                self._resync(step, progress())
            self._ask_for_base(step)
            self._until_ended()

    def _ask_for_base(self, step: int) -> None:
        """Have the replica compare all its tensors, and make its share of a snapshot of ``step``."""
        number = self._begin_base(step)
        compared = state_digests.take(self._state, state_digests.owners(self._state), 1 << 62)
        about = {"compare": compared, "last": True, "base": number}
        self._wait_for_post()
        self._helper.send({**about, "values": self._state.values()})

    def _begin_base(self, step: int) -> int:
        """Count a snapshot of ``step``, which all ranks begin now, and return its number."""
        assert self.agreement is not None
        self._number, self._base_at = self._number + 1, step
        if self._ranks.rank == 0:
            self.agreement.begin_base()
        return self._number

    # Going back

    def settle(self, makes_base: bool) -> None:
        """Return as a single replica does, once that is so on all ranks.

        Collective: every rank must call this. Raises ``BadInput`` if ranks have done different numbers of steps.
        """
        ranks, step = self._ranks, self.last_put
        if len(done := set(ranks.everyone(step))) > 1:
            raise BadInput(
                f"the ranks have done different numbers of steps ({', '.join(map(str, sorted(done)))}), and replicas do"
                " a step once all ranks have. Go back at the end of the same step on all ranks."
            )
        with ranks.agreeing():
            self.drain()
            self._until_ended()
        if not any(ranks.everyone(makes_base and self.durable_step < step)):
            return
        with ranks.agreeing():
            self._wait_for_post()
            self._helper.send({"make_base": True, "base": self._begin_base(step), "step": step})
            self._until_ended()

    def went_back(self, step: int) -> None:
        """Note as a single replica does. Snapshots are counted anew, by the agreement of another timeline."""
        super().went_back(step)
        self.agreement = None
        self._number = self._shared = self._ended = 0
        self._base_at, self._heard_of = -1, (-1, 0)

    # Messages to and from the other ranks

    def _how_far(self) -> int:
        """Return the step up to which this rank's part survives. Reports a failure of the replica to all, once."""
        failure = self._helper.failure
        if failure is not None and self.agreement is not None and self.agreement.failure is None:
            self.agreement.failure = failure
            self.agreement.fail(failure)
        return self._handed if failure is None and self._drift is None else self.durable_step

    def _is_there(self, rank: int) -> bool:
        """Return whether the trainer of ``rank`` lives: its replica lives, and left no note of the trainer's death."""
        return not (is_orphan(self._run, self._timeline["id"], rank) or self._locks.gone(rank))

    def _survives(self, rank: int, step: int) -> int:
        """Return up to which step the part of an ended ``rank`` survives.

        That is ``step`` if its replica lives or has kept the state.
        """
        has_it = not self._locks.gone(rank) or has_kept(self._run, self._timeline["id"], rank)
        return step if has_it else min(step, self.durable_step)

    def _publish(self, refs: list[dict[str, Any]]) -> None:
        """Have the replica publish the shares ``refs``. Called on the first rank."""
        self._helper.send({"publish": refs})
        self._helper.wait_for_word("published")

    def _hear_of_all(self, standing: RankStatus) -> None:
        """Tell the replica what all ranks have, and how a snapshot ended."""
        ended = max(standing.published, standing.given_up)
        if (standing.durable_step, ended) == self._heard_of or not self._started:
            return
        self._heard_of = (standing.durable_step, ended)
        about: dict[str, Any] = {"all_have": standing.durable_step}
        is_news, is_there = ended > self._ended, standing.published == ended
        if is_news:
            about |= {"ended": ended, "published": self._base_at if is_there else None}
        self._helper.send(about)
        if is_news:
            with self._helper.changed:
                self._ended = ended
                if is_there:
                    self._helper.durable_step = self._base_at
                self._helper.changed.notify_all()

    def _hear(self, about: dict[str, Any]) -> None:
        if "begun" in about:
            self._timeline = about["begun"]
        elif "share" in about:
            assert self.agreement is not None
            self._shared, ref = about["share"]
            self.agreement.share(self._shared, -1, ref)  # all ranks have its step, or there would be no share
        elif "lost" in about:
            assert self.agreement is not None
            self._shared = about["lost"]
            self.agreement.share_nothing(self._shared)
        elif "beat" in about:
            assert self.agreement is not None
            self.agreement.heartbeat(str(time.monotonic()))
        else:
            super()._hear(about)

    def _until_ended(self) -> None:
        """Return when no snapshot is under way: the last one is a commit, or was given up."""
        self._wait_for(lambda: self._ended >= self._number)

    def _wait_for(self, reached: Callable[[], bool]) -> None:
        """Wait as a single replica does, but demand nothing from the replica while other ranks have to act first."""
        agreement = self.agreement
        if agreement is None:
            return super()._wait_for(reached)
        others = StragglerMonitor(agreement, self._deadline, self.last_put, self._number, self._base_at)

        def owes() -> bool:
            if self._is_late:
                return False
            all_have = agreement.standing.durable_step >= self.last_put
            if all_have and not self._ended < self._number <= self._shared:
                return True
            others.check(self.durable_step)
            return False

        self._helper.wait_for(lambda: self._check() or reached(), owes)

    def _check(self) -> None:
        super()._check()
        if self.agreement is not None:
            self.agreement.check()

    def _look_soon(self) -> None:
        if self.agreement is not None:
            self.agreement.scan_soon()

    def close(self) -> None:
        """End the replica if everything is durable; otherwise disconnect from it.

        A disconnected replica keeps its state for the next trainer, as after this one's death. Raises the replica's
        error.
        """
        if not self._started:
            return
        self._started = False
        self._post.close()
        if self._helper.failure is None and self.agreement is not None and self.durable_step < self.last_put:
            self._helper.leave()
            return
        if self.agreement is not None:
            self.agreement.leave()
        if self._helper.failure is None:
            self._helper.send({"close": True})
        self._helper.end()
        self._post.check()


def cut_of(state: LiveState, ranks: Ranks) -> str:
    """Return a digest of the part of the state that a rank stores."""
    boxes = {p.name: state.boxes[p.name].to_json() for p in state.stored}
    return xxhash.xxh3_64_hexdigest(
        json.dumps([ranks.rank, ranks.world_size, boxes], sort_keys=True).encode()
    )


def _why_not(without: list[int], world_size: int) -> str:
    who = " and ".join(map(str, without))
    if without:
        return f"and rank {who} of {world_size} has nothing that goes with it"
    return "and they have no step in common"
