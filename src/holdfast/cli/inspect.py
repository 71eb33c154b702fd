"""The verbs ``ls``, ``show`` and ``verify``: list what a run holds, and check whether it is whole.

Each command gathers plain data first and then prints it, as text or as one JSON document.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn

from ..errors import BadInput, CommitRetired, Damaged, DiskFailed, NoCommit, Unreadable
from ..quantities import counted, format_bytes
from ..store.commit.retention import WEIGHTS, copies_in
from ..store.disk import reference_at
from ..store.format.manifest import CommitRef, Manifest
from ..store.format.payload_files import regions
from ..store.log.chain import last_step, progress_at, verify_records
from ..store.object_store import NamedCommit, place_of
from ..store.reader import RunReader
from ..store.repairing import repair
from ..store.run_store import LocalStore
from .output import atom_table, console, plain_table, print_facts, print_json, print_table, progress
from .runs import (
    directory_of,
    label,
    local_time,
    open_commit,
    open_run,
    summary,
    while_training,
    with_commits,
)

if TYPE_CHECKING:
    from ..formats.source import Source

MEMORY = Path("/dev/shm")
"""The directory in which copies in memory are looked for."""
WAY_OUT = (
    "A copy of the run has its own: `holdfast verify RUN --repair COPY` puts it there, from a directory or from"
    " s3://BUCKET/PREFIX."
)


def ls(run: Path, *, as_json: bool) -> None:
    """Print the commits of ``run``, newest first. A manifest that cannot be read is listed as damaged."""
    reader = open_run(run)
    line = reader.line()
    commits: list[dict[str, Any]] = []
    files: dict[CommitRef, dict[str, int]] = {}
    for ref in reader.commits():
        entry: dict[str, Any] = {"step": ref.step, "timeline": ref.timeline, "current": ref in line}
        try:
            manifest = reader.load(ref)
            entry |= summary(manifest) | {"records_to": _readable_to(reader, manifest)}
            files[ref] = {file.path: file.bytes for file in manifest.files.values()}
        except CommitRetired:  # retired since it was listed
            continue
        except Damaged as error:
            if not reader.disk.exists(ref.path):  # retired as well, and its records are gone
                continue
            entry["damaged"] = str(error)
        commits.append(entry)
    shared = _shared_bytes(sorted(files, key=lambda ref: ref not in line), files)
    for entry in commits:
        if nbytes := shared.get(CommitRef(entry["timeline"], entry["step"])):
            entry["shared_bytes"] = nbytes
    if as_json:
        print_json(commits)
        return
    if not commits:
        print(f"{run} has no commit yet; `holdfast train` makes the first one")
        return
    table = plain_table(">step", ">timeline", "written", ">size", "")
    newest = next((entry for entry in commits if entry["current"]), None)
    for entry in commits:
        table.add_row(*_row(entry, newest=entry is newest))
    print_table(console(), table)
    if copies := copies_in(reader.disk):
        print(f"Weights alone, in {reader.root / WEIGHTS}: {_steps([ref.step for ref in copies])}")
    if (step := _step_in_memory(reader)) is not None:
        print(f"In the memory of this machine alone, for the next start: step {step:,}")


def _step_in_memory(reader: RunReader) -> int | None:
    """Return the step of a copy in memory that the next process continues from; None without one.

    Imports torch only where such memory belongs to the run's directory.
    """
    if not isinstance(reader.root, Path):
        return None
    mark = f'"inode": {reader.root.stat().st_ino},'
    owners = MEMORY.glob(f"holdfast-{os.getuid()}-*/run.json")
    if not any(mark in _text_if_there(owner) for owner in owners):
        return None
    from ..checkpoint.snapshot.memory_copies import newest_copy

    with LocalStore(reader.root) as store:
        kept = newest_copy(store, None, exact=False)
    return None if kept is None else kept.last


def _text_if_there(path: Path) -> str:
    """Return the content of ``path``; "" if its owner has removed it, as a trainer does at its end."""
    with suppress(OSError):
        return path.read_text()
    return ""


def _shared_bytes(order: list[CommitRef], files: dict[CommitRef, dict[str, int]]) -> dict[CommitRef, int]:
    """Return the bytes of each commit in files that one before it in ``order`` names as well."""
    found: dict[CommitRef, int] = {}
    known: set[str] = set()
    for ref in order:
        found[ref] = sum(nbytes for path, nbytes in files[ref].items() if path in known)
        known |= files[ref].keys()
    return found


def show(commit: str, *, as_json: bool) -> None:
    """Print the content of a step: its origin and its tensors. A run without a step means its newest one."""
    if is_foreign(commit):
        from .foreign_states import show as show_foreign

        return show_foreign(open_foreign(commit), as_json=as_json)
    while_training([commit], lambda: _show(*open_step(commit), as_json=as_json))


def _show(
    reader: RunReader, manifest: Manifest, step: int, newest: int | None, tip: int | None, *, as_json: bool
) -> None:
    """Print ``step``, a commit or what records bring it to.

    ``newest`` is the step that records reach on the timeline ``tip``; None if those that the commit needs cannot be
    used.
    """
    stored = reader.atoms(manifest)
    atoms = list(stored.values())
    progress = manifest.progress if step == manifest.step else _progress_at(reader, manifest, step, tip)
    if as_json:
        units = {name: manifest.step if f.step is None else f.step for name, f in manifest.files.items()}
        print_json(
            summary(manifest)
            | {
                "step": step,
                "base_step": manifest.step,
                "records_to": newest,
                "writer": manifest.writer,
                "ranks": len(manifest.streams),
                "progress": progress,
                "units": units,
                "atoms": atoms,
            }
        )
        return
    out = console()
    print_facts(
        out,
        _facts(manifest, atoms, step, newest, progress)
        | _shared(reader, manifest)
        | _referenced(reader, manifest),
    )
    out.print()
    parts = {key: len(held) for key, held in regions(manifest, stored).items()}
    print_table(out, atom_table([{**atom, "parts": parts[key]} for key, atom in stored.items()]))


def verify(commit: str, *, as_json: bool, repair_from: str | None = None) -> bool:
    """Print whether every byte of a commit is as it was written, and return that.

    With ``repair_from``, a copy of the run, damaged payload files are first replaced by those of the copy.
    """
    try:
        if is_foreign(commit):
            from .foreign_states import verify as verify_foreign

            if repair_from is not None:
                raise BadInput(f"{commit} is no run: --repair is for runs of this library")
            return verify_foreign(open_foreign(commit), as_json=as_json)
        return with_commits([commit], partial(_verify, as_json=as_json, repair_from=repair_from))
    except Damaged as error:
        if as_json:
            print_json({"whole": False, "damaged": [_damage(error)]})
        else:
            print(f"damaged: {error}")
        return False


def _verify(reader: RunReader, manifest: Manifest, *, as_json: bool, repair_from: str | None) -> bool:
    """Verify a commit with the log records after it. Records that end before a clean end are damaged."""
    damaged, repaired = _verify_showing_progress(reader, manifest, quiet=as_json), list[str]()
    if repair_from is not None and damaged:
        root = directory_of(reader.root, "verify --repair")
        repaired = repair(
            root, [error.path for error in damaged if error.path], open_run(place_of(repair_from))
        )
        damaged = _verify_showing_progress(reader, manifest, quiet=as_json)
    last, damage = verify_records(reader, manifest)
    damaged += damage
    if as_json:
        print_json(
            summary(manifest)
            | {"whole": not damaged, "records_to": last, "damaged": [_damage(error) for error in damaged]}
            | ({} if repair_from is None else {"repaired": repaired})
        )
        return not damaged
    for path in repaired:
        print(f"{path} was replaced by that of {repair_from}")
    if damaged:
        print(f"{label(reader, manifest)} is damaged in {counted(len(damaged), 'place')}:")
        for error in damaged:
            print(f"  {error}")
        for path, steps in shared_with(reader, manifest, {error.path for error in damaged}).items():
            print(f"{path} is a file of the bases of {_steps(steps)} as well. {WAY_OUT}")
    else:
        print(f"{label(reader, manifest)} is whole: {_size(manifest)}, every byte as it was written")
        if last > manifest.step:
            print(f"So are the records of {counted(last - manifest.step, 'step')} after it, to step {last:,}")
    return not damaged


def shared_with(reader: RunReader, manifest: Manifest, paths: Collection[str | None]) -> dict[str, list[int]]:
    """Return the steps of other commits that name one of the files ``paths`` of ``manifest``, by path."""
    own = {file.path for file in manifest.files.values()} & {*paths}
    others = [
        m for ref in reader.commits() if ref != manifest.ref and (m := reader._load_or_none(ref)) is not None
    ]
    found: dict[str, list[int]] = {}
    for other in sorted(others, key=lambda other: other.step):
        for path in own & {file.path for file in other.files.values()}:
            found.setdefault(path, []).append(other.step)
    return found


def _steps(steps: list[int]) -> str:
    return f"{'steps' if steps[1:] else 'step'} {', '.join(f'{step:,}' for step in steps)}"


def is_foreign(text: str) -> bool:
    """Return whether ``text`` is a path of a foreign format.

    The readers of such formats are imported only if it is no run.
    """
    path = Path(text)
    if (path / "commits").is_dir() or not path.exists():
        return False
    from ..formats.foreign_formats import is_of_others

    return is_of_others(path)


def open_foreign(text: str) -> Source:
    from ..formats.foreign_formats import open_source

    return open_source(Path(text))


def _progress_at(reader: RunReader, manifest: Manifest, step: int, tip: int | None) -> dict[str, Any]:
    """Return the progress, as the first rank has it, of a ``step`` that records after a commit lead to."""
    stream = manifest.streams[0]
    return {**manifest.progress_of(stream), **progress_at(reader, manifest, stream, step, tip)}


def _facts(
    manifest: Manifest, atoms: list[dict[str, Any]], step: int, newest: int | None, progress: dict[str, Any]
) -> dict[str, str]:
    """Return the facts of a ``step`` that are printed before its tensors.

    ``newest`` is the step that log records reach; None if those that the commit needs cannot be
    used. ``progress`` is whatever the writer stored.
    """
    fork = (
        "the beginning"
        if manifest.parent is None
        else f"step {manifest.fork_step} of timeline {manifest.parent}"
    )
    writer, base = manifest.writer, manifest.step
    sizes = [math.prod(atom["shape"]) for atom in atoms if atom["slot"] == "param"]
    records = ""
    if newest is None:
        records = "; records that it needs cannot be used (holdfast verify)"
    elif step > base:
        one, several = f"record of step {step:,}", f"records of steps {base + 1:,} to {step:,}"
        records = f", by the {one if step == base + 1 else several} after the base of step {base:,}"
    elif newest > base:
        records = f", and records of every step to {newest:,}"
    facts = {
        "step": f"{step:,}{records}",
        "timeline": f"{manifest.timeline}, from {fork}",
        "written": f"{local_time(manifest.created)} by process {writer.get('pid')} on {writer.get('host')}"
        + (f", one of {len(manifest.streams)} ranks" if len(manifest.streams) > 1 else ""),
        "size": _size(manifest),
        "parameters": f"{sum(sizes):,} in {counted(len(sizes), 'tensor')}",
    }
    if manifest.oldest_step < manifest.step:
        facts["made"] = _made(manifest)
    if "optimizer" in progress:
        rates = dict.fromkeys(f"{group['lr']:.4g}" for group in progress["groups"] if "lr" in group)
        facts["optimizer"] = f"{progress['optimizer']}, learning rate {', '.join(rates) or 'not kept'}"
    if "consumed" in progress.get("loader", {}):
        facts["data"] = f"{counted(progress['loader']['consumed'], 'sample')} consumed"
    if progress.get("skipped_steps"):
        facts["skipped"] = (
            f"{counted(progress['skipped_steps'], 'step')} whose loss or gradient was no number"
        )
    return facts


def _shared(reader: RunReader, manifest: Manifest) -> dict[str, str]:
    """Return the fact of the bytes in files that other commits name as well, if there are any."""
    sizes = {file.path: file.bytes for file in manifest.files.values()}
    found = shared_with(reader, manifest, sizes.keys())
    if not found:
        return {}
    steps = sorted({step for each in found.values() for step in each})
    return {"shared": f"{format_bytes(sum(sizes[path] for path in found))} of that, with {_steps(steps)}"}


def _referenced(reader: RunReader, manifest: Manifest) -> dict[str, str]:
    """Return the fact of the bytes that lie outside of the run, if there are any."""
    files = manifest.referenced.values()
    if not files:
        return {}
    folders = set()
    for file in files:
        with suppress(Damaged, FileNotFoundError):
            folders.add(reference_at(reader.disk, file.path).folder)
    nbytes = sum(file.bytes for file in files)
    return {
        "not copied": f"{format_bytes(nbytes)} of that, read from {', '.join(sorted(folders)) or 'a folder'}"
    }


def open_step(text: str) -> tuple[RunReader, Manifest, int, int | None, int | None]:
    """Return the reader of the step that ``text`` names, the commit that leads there, the step, the last one, and tip.

    The last is the step to which records lead from the commit; None if those that it needs cannot be used. The tip is
    the timeline on which they do; None is that of the commit. Raises ``NoCommit`` if neither a commit nor records have
    the step.
    """
    target = NamedCommit.parse(text)
    try:
        reader, manifest = open_commit(text)
    except NoCommit:
        if target.step is None:
            raise
        reader = open_run(target.run)
        before = [ref for ref in reader.line(target.timeline) if ref.step < target.step]
        if not before:
            raise
        manifest = reader.load(before[0])
        last = _records_to(reader, manifest, target.timeline)
        if last is None or last < target.step:
            raise
        return reader, manifest, target.step, last, target.timeline
    last = _records_to(reader, manifest)
    step = target.step if target.step is not None else max(manifest.step, last or 0)
    return reader, manifest, step, last, None


def _records_to(reader: RunReader, manifest: Manifest, tip: int | None = None) -> int | None:
    """Return the step to which log records lead from a commit, or None if the records that it needs cannot be used.

    Raises ``CommitRetired`` where a writer has removed them with the commit, meanwhile.
    """
    try:
        return _readable_to(reader, manifest, tip)
    except (Damaged, DiskFailed):
        if not reader.disk.exists(manifest.path):
            raise reader.retired(manifest.ref) from None
        return None


def _readable_to(reader: RunReader, manifest: Manifest, tip: int | None = None) -> int:
    """Return the step to which log records that can be read lead. Raises as ``last_step``, but for ``Unreadable``."""
    try:
        return last_step(reader, manifest, tip)
    except Unreadable as error:
        return error.step


def _made(manifest: Manifest) -> str:
    """Describe which steps the parts of a snapshot belong to."""
    steps = [manifest.step if file.step is None else file.step for file in manifest.files.values()]
    return (
        f"beside training: {counted(len(steps), 'part')} of steps {min(steps):,} to {max(steps):,}, which the records"
        f" of steps {min(steps) + 1:,} to {manifest.step:,} bring to one"
    )


def _size(manifest: Manifest) -> str:
    return f"{format_bytes(manifest.total_bytes)} in {counted(len(manifest.files), 'file')}"


def _row(entry: dict[str, Any], *, newest: bool) -> tuple[str, ...]:
    damaged = "damaged" in entry
    remarks = ["damaged manifest"] * damaged + ["newest"] * newest
    if entry.get("records_to", entry["step"]) > entry["step"]:
        remarks.append(f"records to {entry['records_to']:,}")
    remarks += ["left behind by a later resume"] * (not entry["current"])
    remarks += [f"{name} {value:.6g}" for name, value in entry.get("metrics", {}).items()]
    written = "-" if damaged else local_time(entry["created"])
    shared = entry.get("shared_bytes", 0)
    remarks += [f"and {format_bytes(shared)} in files of another"] * bool(shared)
    size = "-" if damaged else format_bytes(entry["bytes"] - shared)
    return f"{entry['step']:,}", str(entry["timeline"]), written, size, ", ".join(remarks)


def _verify_showing_progress(reader: RunReader, manifest: Manifest, *, quiet: bool) -> list[Damaged]:
    columns = "reading", BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn()
    with progress(*columns, quiet=quiet) as bar:
        task = bar.add_task("reading", total=manifest.total_bytes)
        return reader.verify(manifest, report=lambda done: bar.update(task, completed=done))


def _damage(error: Damaged) -> dict[str, Any]:
    return {
        "error": type(error).__name__,
        "path": error.path,
        "offset": error.offset,
        "bytes": error.nbytes,
        "atoms": list(error.atoms),
        "text": str(error),
    }
