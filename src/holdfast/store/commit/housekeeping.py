"""The repairs that a new writer makes before it begins.

The rule: only files that are known to be ours by name are touched. Everything else in the directory belongs to somebody
else.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import xxhash

from holdfast.errors import Damaged, NoCommit, RunMismatch
from holdfast.store.disk import TEMPORARY, AnyDisk, write_durably
from holdfast.store.drive_links import data_paths, folders, unneeded
from holdfast.store.format.manifest import HOME, REFERENCE, CommitRef, FileRef, Manifest, Timeline, is_ours
from holdfast.store.format.payload_files import encode_index, index_of, unverified_layout
from holdfast.store.log.segments import SegmentRef, segments, streams, stripe_paths, written_bytes
from holdfast.store.log.striping import loose_stripes

if TYPE_CHECKING:
    from holdfast.store.run_store import LocalStore


_SCRATCH_NAME = re.compile(
    r"(params|gradients|inputs-\d+)(-rank-\d{5})?\.bin|note-[a-z]+-t\d{4,}-rank-\d{5}\.json(\.tmp)?"
)


def sweep(disk: AnyDisk, retained: Mapping[CommitRef, Manifest | None]) -> None:
    """Remove the temporary files and the scratch of an earlier process.

    Files of stripes without their segment are removed too, if none of the ``retained`` commits may need them.
    """
    for directory in ("commits", "index", "timelines"):
        for name in disk.listdir(directory):
            if name.endswith(TEMPORARY) and is_ours(directory, name.removesuffix(TEMPORARY)):
                disk.unlink(f"{directory}/{name}")
    for name in disk.listdir(HOME):
        if name.endswith(REFERENCE + TEMPORARY):
            disk.unlink(f"{HOME}/{name}")
    for name in disk.listdir("scratch"):
        if _SCRATCH_NAME.fullmatch(name):
            disk.unlink(f"scratch/{name}")
    _sweep_stripes(disk, retained)


def _sweep_stripes(disk: AnyDisk, retained: Mapping[CommitRef, Manifest | None]) -> None:
    """Remove the files of stripes without their segment in which no commit may need a record.

    A kill leaves such a file where a segment was being made or removed. A file that a commit may need stays, because
    the segment's own file may only have been moved away.
    """
    loose = {path: SegmentRef.of_path(segment) for path, segment in loose_stripes(disk).items()}
    if not loose:
        return
    refs = {*loose.values(), *(ref for stream in streams(disk) for ref in segments(disk, stream))}
    for path, ref in loose.items():
        same = [other.first_step for other in refs if other._replace(first_step=ref.first_step) == ref]
        last = min((first for first in same if first > ref.first_step), default=sys.maxsize) - 1
        may_be_needed = any(
            commit.timeline <= ref.timeline and (manifest is None or manifest.oldest_step < last)
            for commit, manifest in retained.items()
        )
        with unneeded(disk, path.rpartition("/")[0]):
            if not may_be_needed or not written_bytes(disk, path):
                disk.unlink(path)


def sync_all(disk: AnyDisk, retained: Mapping[CommitRef, Manifest | None]) -> None:
    """Make durable every file that the commits ``retained`` need.

    Nobody may have synced them: the directory may be a copy.
    """
    manifests = [manifest for manifest in retained.values() if manifest is not None]
    payload = {ref.path for manifest in manifests for ref in manifest.files.values()} | {*stripe_paths(disk)}
    records = [f"timelines/{name}" for name in disk.listdir("timelines") if is_ours("timelines", name)]
    for why, paths in (
        ("reopen data", payload),
        ("reopen index", {path for manifest in manifests for path in manifest.small_paths}),
        *(
            (f"reopen journal/{stream}", [ref.path for ref in segments(disk, stream)])
            for stream in streams(disk)
        ),
        ("reopen timelines", records),
        ("reopen commits", [ref.path for ref in retained]),
    ):
        for path in sorted(paths):
            with suppress(
                FileNotFoundError, Damaged
            ):  # of a commit that is not whole: verifying it reports that
                disk.sync(path, why=why)
        directory = why.removeprefix("reopen ")
        needed = {path.rpartition("/")[0] for path in paths}
        for place in folders(disk) if directory == HOME else (directory,):
            named = directory != HOME or place in needed
            with suppress(FileNotFoundError), nullcontext() if named else unneeded(disk, place):
                disk.sync_dir(place, why=f"{why} directory")


def refuse_other_data(store: LocalStore) -> None:
    """Raise ``RunMismatch`` if a directory without commits holds more than an interrupted fresh start leaves.

    Such files may be a run that lost its commits, or belong to somebody else.
    """
    records, _ = store.timelines()
    for record in records.values():
        if record.parent is not None:
            raise RunMismatch(
                f"{store.root} has no commit, and had some: {record.path} continues step {record.fork_step}. commits/"
                f" was emptied or not restored. {_OTHER_PLACE}"
            )
    for stream in streams(store.disk):
        for segment in segments(store.disk, stream)[-1:]:
            raise RunMismatch(
                f"{store.root} has no commit, and had some: {segment.path} has records that follow one. commits/ was"
                f" emptied or not restored. {_OTHER_PLACE}"
            )
    for path, segment in loose_stripes(store.disk).items():
        if written_bytes(store.disk, path):
            raise RunMismatch(
                f"{store.root} has no commit, and had some: {path} has records of {segment}, which is missing too."
                f" {_OTHER_PLACE}"
            )
    for path in data_paths(store.disk):
        if path.endswith(".safetensors") and (not records or _was_written_later(store.disk, path)):
            raise RunMismatch(
                f"{store.root} has no commit, and {path} is in it, which no fresh start made. {_OTHER_PLACE}"
            )


def refuse_two_runs(store: LocalStore, retained: Mapping[CommitRef, Manifest | None]) -> None:
    """Raise ``RunMismatch`` if the directory holds parts of two runs.

    Two signs show that: records and manifests give one number to two timelines, or the commits have two beginnings.
    Files of another run, or of a copy that continued by itself, then lie among the run's own.
    """
    records = store.timelines()[0]
    said = [(record.path, record) for record in records.values()]
    said += [(m.path, m.timeline_record) for m in retained.values() if m is not None]
    known: dict[int | None, tuple[str | None, str]] = {}
    for path, record in said:
        for timeline, key in ((record.id, record.key), (record.parent, record.parent_key)):
            other_key, other_path = known.setdefault(timeline, (key, path))
            if other_key != key:
                raise RunMismatch(
                    f"{store.root} holds parts of two runs: {path} and {other_path} mean different timelines by the"
                    f" number {timeline}. Nothing was changed: move the files of one of them away, with its data."
                )
    beginnings = {}
    for ref in retained:
        record = records.get(ref.timeline)
        while (
            record is not None and not record.run and record.parent is not None and record.parent < record.id
        ):
            record = records.get(record.parent)
        if record is not None:
            beginnings[record.run or record.key or str(record.id)] = ref.path
    if len(beginnings) > 1:
        raise RunMismatch(
            f"{store.root} holds parts of two runs: {' and '.join(beginnings.values())} have no beginning in common."
            " Nothing was changed: move the files of one of them away, with its data."
        )


_OTHER_PLACE = (
    "Nothing was changed: put commits/ and timelines/ back if this is a run,"
    " or give the new one another directory."
)


def _was_written_later(disk: AnyDisk, path: str) -> bool:
    """Return whether the file is a generation that is first written after a first commit."""
    number = path.removesuffix(".safetensors").rpartition(".")[2]
    if number == "0" or not number.isdecimal():
        return False
    with suppress(Damaged):  # after a power cut, reserved space holds anything
        unverified_layout(disk, FileRef(path, disk.size(path), ()))
        return True
    return False


def restore(disk: AnyDisk, timelines: Mapping[int, Timeline], damaged: Iterable[Damaged]) -> None:
    """Rewrite the damaged timeline records whose content manifests repeat."""
    lost = {error.path for error in damaged}
    for record in timelines.values():
        if record.path in lost:
            write_durably(disk, record.path, record.encode(), why="timeline")


def restore_index(store: LocalStore, data: dict[str, Any]) -> list[Damaged]:
    """Rewrite the index ``data`` if commits name it by its hash and its file is damaged.

    All commits of a run share this file, so its loss would be theirs; the hash proves that ``data`` is what they
    mean. Called before a commit is verified. Returns the damage that was found.
    """
    path = f"index/{xxhash.xxh3_128_hexdigest(encode_index(data))}.json"
    for ref in store.commits():
        with suppress(Damaged, NoCommit):
            manifest = store.load(ref)
            if manifest.shares or manifest.index["path"] != path:
                continue
            try:
                index_of(store.disk, manifest)
            except Damaged as error:
                store.put_index(data)
                return [error]
            return []
    return []
