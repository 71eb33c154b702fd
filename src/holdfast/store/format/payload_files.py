"""The reading of files that a manifest names, verified: whole, or bytes from anywhere in them, for many threads.

An index is trusted because the manifest names it by hash. Nothing of a payload file is trusted before its checksum
block has been verified, its header included. Verification works on whole blocks, so the blocks at the two ends of a
range are read in full. The last few of those are kept, because the next range most often begins where this one ended.
Offsets and sizes are bytes.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import xxhash

from holdfast.errors import Damaged, FileMissing, ManifestCorrupt
from holdfast.io.queue import IOQueue, Request
from holdfast.regular_files import load_json
from holdfast.state.layout.regions import Region, boxes_of, regions_of
from holdfast.state.split_masters import DTYPES, GROUP, PARTS, SplitArrays, carry_bytes, join, part_key
from holdfast.state.tensor_entries import DTYPE_BYTES
from holdfast.store.commit.generations import corrupt
from holdfast.store.disk import AnyDisk, OpenFile, reference_at
from holdfast.store.drive_links import lost_drive
from holdfast.store.format.manifest import FileRef, Manifest, RankShare, is_reference, reading
from holdfast.store.format.payload_layout import CHECKSUM_BLOCK, Layout, TensorInFile, block_spans

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


KEPT_BLOCKS = 16
"""The number of end blocks that are kept; 64 MiB."""
JOINED_AT_ONCE = 2 * 1024 * 1024
"""The number of elements of a split master that are joined at once, so that most blocks are read whole."""
NUM_LOCKS = 64
"""The number of locks, about the number of blocks read at once. Blocks that share a lock wait for one another."""


class VerifiedFiles:
    """Payload files, each open only while it is read. ``bytes_read`` counts the verified bytes."""

    def __init__(self, disk: AnyDisk) -> None:
        self._disk = disk
        self._layouts: dict[str, Layout] = {}
        self._kept: OrderedDict[tuple[str, int], memoryview] = OrderedDict()
        self._reading = [threading.Lock() for _ in range(NUM_LOCKS)]
        self._lock = threading.Lock()
        self.bytes_read = 0

    def layout(self, ref: FileRef) -> Layout:
        """Return the verified layout of a file.

        Raises ``FileMissing`` if the file is absent or of another size, ``Damaged`` if it fails verification.
        """
        if ref.path not in self._layouts:
            check_size(self._disk, ref)
            self._layouts[ref.path] = Layout.parse(self._header(ref))
        return self._layouts[ref.path]

    def entry(self, ref: FileRef, key: str) -> TensorInFile:
        """Return the tensor ``key`` of a file, which may be a master that is stored in parts.

        Such a tensor has the dtype F32, and the offset of its first part. Raises ``Damaged``.
        """
        layout = self.layout(ref)
        if key in layout:
            return layout[key]
        parts = _parts(layout, key)
        if parts is None:
            raise Damaged(f"{ref.path} has no tensor {key!r}. {INSPECT}", path=ref.path)
        high, low, carry = parts
        count = high.nbytes // 2
        if tuple(part.dtype for part in parts) not in DTYPES.values() or (
            low.shape != high.shape or carry.shape != (carry_bytes(count),)
        ):
            found = ", ".join(f"{part.dtype} {list(part.shape)}" for part in parts)
            raise Damaged(
                f"{ref.path}: the parts of {key!r} are {found}, which do not fit together. {INSPECT}",
                path=ref.path,
                atoms=(key,),
            )
        return TensorInFile(key, "F32", high.shape, high.offset, 4 * count)

    def tensor(self, ref: FileRef, key: str) -> np.ndarray:
        """Return a tensor of the file as an array of opaque elements. Raises ``Damaged``."""
        entry = self.entry(ref, key)
        data = np.empty(entry.nbytes, np.uint8)
        self.read_tensor(ref, key, 0, data.data)
        return data.view(f"V{DTYPE_BYTES[entry.dtype]}").reshape(entry.shape)

    def read_tensor(self, ref: FileRef, key: str, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes of a tensor from ``offset``, counted from its start. Raises as ``read`` does.

        A master that is stored in parts is joined.
        """
        entry, layout = self.entry(ref, key), self.layout(ref)
        if not 0 <= offset <= offset + len(into) <= entry.nbytes:
            raise Damaged(
                f"{key!r} has {entry.nbytes} bytes in {ref.path}, and {offset} to {offset + len(into)} are asked for."
                f" {INSPECT}",
                path=ref.path,
            )
        if key in layout:
            self.read(ref, entry.offset + offset, into)
            return
        done = 0
        while done < len(into):  # in slices, so that few parts are in memory at once
            start = (offset + done) // 4 // GROUP * GROUP
            stop = min(start + JOINED_AT_ONCE, -(-(offset + len(into)) // 4))
            master = self._joined(ref, layout, key, start, stop).view(np.uint8)
            first = offset + done - 4 * start
            piece = master[first : first + len(into) - done]
            into[done : done + len(piece)] = piece.data
            done += len(piece)

    def _joined(self, ref: FileRef, layout: Layout, key: str, start: int, stop: int) -> np.ndarray:
        """Return elements of a master that is stored in parts; ``start`` is a multiple of ``GROUP``."""
        count, narrow = stop - start, layout[part_key(key, "low")].dtype == "U8"
        low = np.empty(count, np.uint8 if narrow else np.uint16)
        read = SplitArrays(np.empty(count, np.uint16), low, np.empty(carry_bytes(count), np.uint8))
        begins = 2 * start, low.itemsize * start, start // GROUP
        for part, begin, data in zip(PARTS, begins, read, strict=True):
            self.read(ref, layout[part_key(key, part)].offset + begin, data.view(np.uint8).data)
        master = np.empty(count, np.uint32)
        join(read, master)
        return master

    def read(self, ref: FileRef, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes from ``offset`` on.

        Raises ``FileMissing`` if the file is gone, or ``Damaged``, when ``into`` may hold any bytes.
        """
        stop = offset + len(into)
        if not 0 <= offset <= stop <= ref.bytes:
            raise FileMissing(
                f"{ref.path} has {ref.bytes} bytes, and {offset} to {stop} are asked for. {INSPECT}",
                path=ref.path,
            )
        if not into:
            return
        with closing(self._open(ref)) as file:
            for block in range(offset // CHECKSUM_BLOCK, -(-stop // CHECKSUM_BLOCK)):
                start, end = _span(ref, block)
                first, last = max(start, offset), min(end, stop)
                piece = into[first - offset : last - offset]
                if (first, last) == (start, end):
                    self._read(file, ref, block, piece)
                else:
                    piece[:] = self._block(file, ref, block)[first - start : last - start]

    def _open(self, ref: FileRef) -> OpenFile:
        try:
            return self._disk.open(ref.path, write=False, direct=False)
        except FileNotFoundError:
            raise FileMissing(
                f"{ref.path} ({ref.bytes} bytes) is missing. {INSPECT}", path=ref.path
            ) from None

    def _block(self, file: OpenFile, ref: FileRef, block: int) -> memoryview:
        """Return a whole block, read by one thread for all that want it."""
        key = ref.path, block
        with self._reading[hash(key) % NUM_LOCKS]:  # of two threads that want a block, one reads it
            with self._lock:
                if key in self._kept:
                    self._kept.move_to_end(key)
                    return self._kept[key]
            start, end = _span(ref, block)
            data = np.empty(end - start, np.uint8).data
            self._read(file, ref, block, data)
            with self._lock:
                self._kept[key] = data
                while len(self._kept) > KEPT_BLOCKS:
                    self._kept.popitem(last=False)
            return data

    def _read(self, file: OpenFile, ref: FileRef, block: int, data: memoryview) -> None:
        start = block * CHECKSUM_BLOCK
        file.read(data, start)
        got = xxhash.xxh3_64_hexdigest(data)
        with self._lock:
            self.bytes_read += len(data)
        if got != ref.checksums[block]:
            known = self._layouts.get(ref.path)  # unknown while its header is read
            atoms = [] if known is None else known.keys_between(start, start + len(data))
            way_out = reference_at(self._disk, ref.path).way_out() if is_reference(ref.path) else INSPECT
            raise corrupt(ref.path, start, len(data), atoms, ref.checksums[block], got, way_out)

    def _header(self, ref: FileRef) -> bytearray:
        """Return the first blocks of the file, as many as the header needs: nearly always one."""
        header = bytearray()
        with closing(self._open(ref)) as file:
            for block in range(len(ref.checksums)):
                header += self._block(file, ref, block)
                if 8 + int.from_bytes(header[:8], "little") <= len(header):
                    break
        return header


def read_atom(disk: AnyDisk, manifest: Manifest, atom: dict[str, Any]) -> bytearray:
    """Return the bytes of one tensor entry of the index in C order, joined from its fragments."""
    return read_box(VerifiedFiles(disk), manifest, atom, Region.whole(tuple(atom["shape"])))


def read_box(files: VerifiedFiles, manifest: Manifest, atom: dict[str, Any], box: Region) -> bytearray:
    """Return the bytes of the region ``box`` of a tensor entry in C order.

    Raises ``Damaged`` where the fragments do not cover the region.
    """
    itemsize = DTYPE_BYTES[atom["dtype"]]
    result = bytearray(box.elements * itemsize)
    target = np.frombuffer(result, dtype=f"V{itemsize}").reshape(box.shape)
    covered = 0
    for fragment in atom["fragments"]:
        there, local = Region.from_json(fragment["global"]), Region.from_json(fragment["local"])
        common = there.intersect(box)
        if common is None:
            continue
        stored = files.tensor(manifest.files[fragment["unit"]], fragment["key"])
        part = stored[_within(common, there).moved(local.start).slices]
        target[_within(common, box).slices] = part
        covered += part.size
    if covered != box.elements:
        raise Damaged(
            f"atom '{atom['name']}/{atom['slot']}' of step {manifest.step}: its fragments cover {covered} elements"
            f" of {box.shape}"
        )
    return result


def _within(box: Region, other: Region) -> Region:
    """Return ``box``, which lies in ``other``, relative to the start of ``other``."""
    return box.moved(tuple(-start for start in other.start))


def _parts(layout: Layout, key: str) -> list[TensorInFile] | None:
    """Return the parts of the master ``key``; None if one of them is missing."""
    keys = [part_key(key, part) for part in PARTS]
    return [layout[each] for each in keys] if all(each in layout for each in keys) else None


def _span(ref: FileRef, block: int) -> tuple[int, int]:
    start = block * CHECKSUM_BLOCK
    return start, min(start + CHECKSUM_BLOCK, ref.bytes)
