"""The operation that makes a step's files the newest state: the manifest of its commit.

With several ranks each makes its share durable, and the first publishes. No commit names a file that is not durable,
and all ranks must publish the same step. Run by the executor.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...distributed import stream_of
from ...errors import RankFailed
from ...schedule.operations import Op
from ...state.tensor_entries import PENDING
from ...store.commit.commit_writer import Written
from ..runtime import Runtime, Step


def commit(run: Runtime, op: Op, step: Step) -> None:
    """Publish the step, whose files are all written and synced. When this returns, it survives power loss."""
    # taken when the step began, when it was not known whether it would be skipped; or when the loop's code was over
    progress = step.progress if step.late_progress is None else step.late_progress.result()
    progress["skipped_steps"] += step.skipped
    progress |= step.all_results()
    if step.loss_scale is not None:
        progress["loss_scale"] = step.loss_scale.after(step.skipped).progress()
    if step.delta is not None:
        progress[PENDING] = step.delta.to_json()
    publish(run, step.number + 1, progress)


def publish(run: Runtime, steps_done: int, progress: dict) -> None:
    """Publish the newest file of every unit as the state after ``steps_done`` steps; durable on return.

    With several ranks, the first publishes the files of all, once each has made its shard durable. Collective: every
    rank must call this.
    """
    files = {name: (newest.generation, newest.checksums) for name, newest in run.newest.items()}
    if run.fellows.alone:
        run.store.publish(steps_done, files, run.index, progress, again=steps_done == run.durable_step)
    else:
        _publish_share(run, steps_done, files, progress)
    run.durable_step = steps_done


def _publish_share(run: Runtime, steps_done: int, files: Written, progress: dict) -> None:
    ranks, store = run.fellows.commits, run.store
    steps = dict.fromkeys(files, steps_done)
    told = ranks.all_do(lambda: (steps_done, store.share(steps_done, files, run.index, progress, steps).ref))
    _refuse_unlike([step for step, _ in told])
    shares = {stream_of(rank): ref for rank, (_, ref) in enumerate(told)}
    ranks.first_does(lambda: store.publish_shares(shares).step)
    if ranks.rank:
        store.follow()
    for name, (generation, _) in files.items():
        run.stored[name].release(generation)


def _refuse_unlike(steps: Sequence[int]) -> None:
    """Raise ``RankFailed`` unless all ranks would publish the same step."""
    for rank, step in enumerate(steps):
        if step != steps[0]:
            raise RankFailed(
                f"rank {rank} has step {step} to make durable, and rank 0 step {steps[0]}: together they are the state"
                " of no step, so none was made. Every step that was durable still is; start all ranks again to resume."
            )
