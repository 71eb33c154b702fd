"""The repair of damaged payload files of a run with those of a copy of it, in another directory or in a bucket.

A file of the copy with the same size and the same checksums of all blocks has the same bytes, whatever its name is
there. Each block is verified on its way, and the file takes the place of the damaged one when it is whole and durable.
One file may serve many commits, as that of frozen parameters does. Called by ``holdfast verify --repair``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import closing
from pathlib import Path

import xxhash

from holdfast.errors import BadInput, Damaged, DiskFailed
from holdfast.store.disk import TEMPORARY, Disk, written_durably
from holdfast.store.format.manifest import FileRef, is_reference
from holdfast.store.format.payload_layout import block_spans
from holdfast.store.reader import RunReader
from holdfast.store.run_store import LocalStore


def repair(root: Path, paths: Collection[str], copy: RunReader) -> list[str]:
    """Replace the payload files ``paths`` of the run in ``root`` that ``copy`` has, and return which these were.

    Raises ``RunLocked`` while the run is being written, and ``BadInput`` if ``copy`` is the run itself.
    """
    if copy.root == root.absolute() or copy.root == root:
        raise BadInput(f"{root} is the run itself: name a copy of it, a directory or s3://BUCKET/PREFIX")
    with LocalStore.open(root) as store:
        own = {file.path: file for file in files_of_run(store)}
        found: dict[tuple[int, tuple[str, ...]], list[str]] = {}
        for file in files_of_run(copy):
            found.setdefault((file.bytes, file.checksums), []).append(file.path)
        mended = []
        for path in sorted({*paths} & own.keys()):
            file = own[path]
            places = dict.fromkeys(found.get((file.bytes, file.checksums), []))
            if not is_reference(path) and any(_replaced(root, file, copy, there) for there in places):
                mended.append(path)
        return mended


def files_of_run(reader: RunReader) -> Iterator[FileRef]:
    """Yield the payload files that readable commits name, once for each commit."""
    for ref in reader.commits():
        manifest = reader._load_or_none(ref)
        yield from manifest.files.values() if manifest is not None else ()


def _replaced(root: Path, file: FileRef, copy: RunReader, there: str) -> bool:
    """Put the file ``there`` of ``copy`` in the place of ``file``. Return False if it is damaged as well."""
    try:
        with (
            closing(copy.disk.open(there, write=False, direct=False)) as source,
            written_durably(Disk(root), file.path, file.bytes, why="repair") as target,
        ):
            for (start, stop), expected in zip(block_spans(file.bytes), file.checksums, strict=True):
                block = memoryview(bytearray(stop - start))
                source.read(block, start)
                if xxhash.xxh3_64_hexdigest(block) != expected:
                    raise Damaged(f"{there} is damaged in {copy.root} as well", path=there)
                target.write(block, start)
    except (Damaged, DiskFailed, FileNotFoundError):
        Disk(root).unlink(file.path + TEMPORARY)
        return False
    return True
