"""``push``: copy a run to a bucket, once or continuously."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from ..errors import BadInput, DiskFailed
from ..quantities import counted, format_bytes
from ..store.commit.retention import Keep
from ..store.remote.copying import PushResult
from ..store.remote.push_target import Url, place_of
from ..store.remote.pushing import Pusher
from .output import print_json, transfer_progress
from .runs import directory_of

SECONDS = 2.0
"""The pause between two scans of a run that is followed, in seconds."""


def push_run(run: Path, destination: str, *, keep_last: int | None, follow: bool, as_json: bool) -> bool:
    """Copy what ``destination`` lacks of ``run``, and print it. Return whether all copied data was undamaged.

    With ``follow`` it repeats until Ctrl-C, through any network failure.
    """
    place = place_of(destination)
    if not isinstance(place, Url):
        raise BadInput(
            f"{destination} is no place in a bucket: give s3://BUCKET/PREFIX. A directory can be copied."
        )
    pusher = Pusher(directory_of(run, "push"), place, keep=None if keep_last is None else Keep(keep_last))
    whole, told = True, ""
    try:
        whole = not _push(pusher, place, follow, as_json).damaged
        while follow:
            time.sleep(SECONDS)
            try:
                whole &= not _push(pusher, place, follow, as_json).damaged
                told = ""
            except DiskFailed as error:
                if str(error) != told:
                    print(f"{error} It is tried again until Ctrl-C.", file=sys.stderr, flush=True)
                told = str(error)
    except KeyboardInterrupt:
        if not follow:
            raise
    return whole


def _push(pusher: Pusher, place: Url, follow: bool, as_json: bool) -> PushResult:
    began = time.perf_counter()
    with transfer_progress("copying", quiet=as_json) as bar:
        task = bar.add_task("copying", total=None)
        done = pusher.push(lambda total, nbytes: bar.update(task, total=total, advance=nbytes))
    if not follow or done.commits or done.records or done.removed or done.damaged:
        _say(done, place, time.perf_counter() - began, follow, as_json)
    return done


def _say(done: PushResult, place: Url, seconds: float, follow: bool, as_json: bool) -> None:
    if as_json:
        document = _document(done, seconds)
        print(json.dumps(document), flush=True) if follow else print_json(document)
        return
    steps = "".join(f", step {ref.step:,}" for ref in sorted(done.commits))
    print(
        f"{place}: {counted(len(done.commits), 'commit')}{steps}, and {counted(done.records, 'record')} copied,"
        f" {format_bytes(done.bytes)}, {seconds:.1f} s"
    )
    if done.retired:
        print(
            f"Not copied: {counted(len(done.retired), 'commit')} that the run retired meanwhile. Push again, or let it"
            " keep more of them: keep=Keep(last=...), or durability.retain."
        )
    if done.removed:
        print(f"Removed there: {counted(len(done.removed), 'older commit')}")
    for error in done.damaged:
        print(f"Not copied, since it is damaged: {error}")
    if done.durable_step is None:
        print("Nothing can be recovered from there yet: it has no commit")
    else:
        print(f"Everything up to step {done.durable_step:,} can be recovered from there", flush=True)


def _document(done: PushResult, seconds: float) -> dict[str, Any]:
    return {
        "commits": [{"step": ref.step, "timeline": ref.timeline} for ref in done.commits],
        "removed": [{"step": ref.step, "timeline": ref.timeline} for ref in done.removed],
        "retired": [{"step": ref.step, "timeline": ref.timeline} for ref in done.retired],
        "records": done.records,
        "bytes": done.bytes,
        "seconds": seconds,
        "durable_step": done.durable_step,
        "damaged": [{"path": error.path, "text": str(error)} for error in done.damaged],
    }
