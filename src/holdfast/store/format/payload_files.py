"""The reading of files that a manifest names, whole and verified; ``payload_ranges`` reads parts of them.

An index is trusted because the manifest names it by hash. Offsets and sizes are bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import xxhash

from holdfast.errors import FileMissing, ManifestCorrupt
from holdfast.io.queue import IOQueue, Request
from holdfast.regular_files import load_json
from holdfast.state.layout.regions import Region, boxes_of, regions_of
from holdfast.store.commit.generations import corrupt
from holdfast.store.disk import AnyDisk
from holdfast.store.drive_links import lost_drive
from holdfast.store.format.checksummed_json import reading
from holdfast.store.format.file_names import CHECKSUM_BLOCK, Layout, block_spans
from holdfast.store.format.manifest import FileRef, Manifest, RankShare

INSPECT = (
    "`holdfast ls RUN` lists the steps, `holdfast verify RUN@STEP` checks one; running again resumes from the newest "
    "whole step, if there is one."
)


def encode_index(data: dict[str, Any]) -> bytes:
    """Return the content of an index file: one line per tensor entry."""
    head = {key: value for key, value in data.items() if key != "atoms"}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    atoms = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in data["atoms"].items())
    return ("{\n" + "".join(f"{line},\n" for line in lines) + f' "atoms": {{\n{atoms}}}\n}}\n').encode()


def index_of(disk: AnyDisk, manifest: Manifest) -> dict[str, Any]:
    """Return the index that ``manifest`` names; for several ranks, their union.

    Regions that several ranks hold are listed once, by the first rank. Raises ``FileMissing`` or ``ManifestCorrupt``.
    """
    first, *others = [
        read_named(disk, ref, f"the index of step {manifest.step}") for ref in manifest.index_refs
    ]
    atoms = first["atoms"]
    for other in others:
        for key, atom in other["atoms"].items():
            known = atoms.setdefault(key, atom)["fragments"]
            regions = [fragment["global"] for fragment in known]
            known += [new for new in atom["fragments"] if new["global"] not in regions]
    return first


def regions(manifest: Manifest, atoms: Mapping[str, dict[str, Any]]) -> dict[str, list[tuple[int, Region]]]:
    """Return the regions that each rank stored of each of ``atoms``, by key.

    A region that one rank divided into several files counts as one.
    """
    ranks = {unit: rank for rank, stream in enumerate(manifest.streams) for unit in manifest.files_of(stream)}
    found: dict[str, list[tuple[int, Region]]] = {}
    for key, atom in atoms.items():
        by_rank: dict[int, list[dict[str, Any]]] = {}
        for fragment in atom["fragments"]:
            by_rank.setdefault(ranks[fragment["unit"]], []).append(fragment)
        found[key] = [
            (rank, box)
            for rank, own in by_rank.items()
            for each in regions_of(atom["shape"], own)
            for box in boxes_of(each)
        ]
    return found


def index_of_stream(disk: AnyDisk, manifest: Manifest, stream: str) -> dict[str, Any]:
    """Return the index of the writer of ``stream``. Raises as ``index_of`` does."""
    ref = manifest.shares[stream].index if manifest.shares else manifest.index
    return read_named(disk, ref, f"the index of step {manifest.step}")


def read_shares(disk: AnyDisk, manifest: Manifest) -> Manifest:
    """Return ``manifest`` with the content of its shares' files. Raises as ``index_of`` does."""
    found = {}
    for stream, share in manifest.shares.items():
        what = f"the share of {stream} in step {manifest.step}"
        found[stream] = RankShare.from_json(share.ref, read_named(disk, share.ref, what))
    return manifest.with_shares(found) if found else manifest


def read_named(disk: AnyDisk, ref: dict[str, Any], what: str) -> dict[str, Any]:
    """Return the JSON of a file that is named with its hash.

    Raises ``FileMissing`` or ``ManifestCorrupt``.
    """
    with reading(ref["path"]):
        return load_json(read_verified(disk, ref, what))


def read_verified(disk: AnyDisk, ref: dict[str, Any], what: str) -> bytes:
    """Return the content of a file that is named with its hash. Raises as ``read_named`` does."""
    path, expected = ref["path"], ref["xxh3_128"]
    try:
        text = disk.read_bytes(path)
    except FileNotFoundError:
        raise FileMissing(f"{path}, {what}, is missing. {INSPECT}", path=path) from None
    got = xxhash.xxh3_128_hexdigest(text)
    if got != expected:
        raise ManifestCorrupt(
            f"{path}, {what}, fails its checksum: expected xxh3:{expected}, read xxh3:{got}, {len(text)} bytes."
            f" {INSPECT}",
            path=path,
            nbytes=len(text),
        )
    return text


def read_file(
    disk: AnyDisk, queue: IOQueue, ref: FileRef, view: memoryview, *, direct: bool = True
) -> Future[None]:
    """Fill ``view``, of ``ref.bytes``, with a payload file and verify every block of it.

    Raises ``Damaged``.
    """
    check_size(disk, ref)
    file = disk.open(ref.path, write=False, direct=direct)
    requests = [
        Request(file, view[a:b], a, False, after=partial(_verify, ref, a, view[a:b], expected))
        for (a, b), expected in zip(block_spans(ref.bytes), ref.checksums, strict=True)
    ]
    future = queue.submit(requests, kind="state", phase="recover", priority=1)
    future.add_done_callback(lambda _: file.close())
    return future


def _verify(ref: FileRef, offset: int, piece: memoryview, expected: str) -> None:
    got = xxhash.xxh3_64_hexdigest(piece)
    if got != expected:
        raise corrupt(ref.path, offset, len(piece), (), expected, got, INSPECT)


def unverified_layout(disk: AnyDisk, ref: FileRef) -> Layout:
    """Return the layout that a payload file's header claims, to name what damaged bytes held.

    Raises ``Damaged``.
    """
    data = bytearray(min(ref.bytes, CHECKSUM_BLOCK))
    file = disk.open(ref.path, write=False, direct=False)
    try:
        file.read(memoryview(data), 0)
    finally:
        file.close()
    return Layout.parse(data)


def check_size(disk: AnyDisk, ref: FileRef) -> None:
    """Raise ``FileMissing`` if the file is absent or has another size than the manifest says."""
    try:
        size = disk.size(ref.path)
    except FileNotFoundError:
        where = lost_drive(disk, ref.path)
        raise FileMissing(
            f"{ref.path} ({ref.bytes} bytes) is missing{where}. {INSPECT}", path=ref.path
        ) from None
    if size != ref.bytes:
        raise FileMissing(
            f"{ref.path} has {size} bytes, the manifest says {ref.bytes}. {INSPECT}",
            path=ref.path,
            offset=min(size, ref.bytes),
            nbytes=abs(size - ref.bytes),
        )
