"""Reading: verified bytes of single atoms out of a commit, without loading the rest.

Offsets and sizes are bytes. Nothing is believed before its checksum block has been verified, the header
of a payload file included; the index is believed because the manifest names it by hash.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import xxhash

from holdfast.errors import Damaged, FileMissing, ManifestCorrupt
from holdfast.io.buffers import Buffer
from holdfast.io.queue import IOQueue, Request
from holdfast.state.atoms import DTYPE_BYTES
from holdfast.state.boxes import Box
from holdfast.store.files import AnyDisk
from holdfast.store.generations import corrupt
from holdfast.store.layout import CHECKSUM_BLOCK, Entry, Layout, block_spans
from holdfast.store.manifest import FileRef, Manifest, Share

INSPECT = (
    "`holdfast ls RUN` lists the steps, `holdfast verify RUN@STEP` checks one; running again resumes from the newest "
    "whole step."
)


def encode_index(data: dict[str, Any]) -> bytes:
    """The file of an index: one line per atom."""
    head = {key: value for key, value in data.items() if key != "atoms"}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    atoms = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in data["atoms"].items())
    return ("{\n" + "".join(f"{line},\n" for line in lines) + f' "atoms": {{\n{atoms}}}\n}}\n').encode()


def index_of(disk: AnyDisk, manifest: Manifest) -> dict[str, Any]:
    """The index that ``manifest`` names; of several ranks' the sum: what more than one holds, by the first. Raises
    ``FileMissing`` or ``ManifestCorrupt``."""
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


def index_of_stream(disk: AnyDisk, manifest: Manifest, stream: str) -> dict[str, Any]:
    """What the writer of ``stream`` wrote. Raises as ``index_of``."""
    ref = manifest.shares[stream].index if manifest.shares else manifest.index
    return read_named(disk, ref, f"the index of step {manifest.step}")


def read_shares(disk: AnyDisk, manifest: Manifest) -> Manifest:
    """``manifest`` with what the files of its shares say. Raises as ``index_of``."""
    found = {}
    for stream, share in manifest.shares.items():
        what = f"the share of {stream} in step {manifest.step}"
        found[stream] = Share.from_json(share.ref, read_named(disk, share.ref, what))
    return manifest.with_shares(found) if found else manifest


def read_named(disk: AnyDisk, ref: dict[str, Any], what: str) -> dict[str, Any]:
    """The JSON in a file that is named with its hash. Raises ``FileMissing`` or ``ManifestCorrupt``."""
    return json.loads(read_verified(disk, ref, what))


def read_verified(disk: AnyDisk, ref: dict[str, Any], what: str) -> bytes:
    """All of a file that is named with its hash. Raises as ``read_named``."""
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


def read_atom(disk: AnyDisk, manifest: Manifest, atom: dict[str, Any], *, direct: bool = True) -> bytearray:
    """The bytes of one atom of the index in C order, joined from its fragments."""
    shape, itemsize = tuple(atom["shape"]), DTYPE_BYTES[atom["dtype"]]
    result = bytearray(math.prod(shape) * itemsize)
    target = np.frombuffer(result, dtype=f"V{itemsize}").reshape(shape)
    covered = 0
    for fragment in atom["fragments"]:
        stored = _read_fragment(disk, manifest.files[fragment["unit"]], fragment["key"], direct)
        part = stored[Box.from_json(fragment["local"]).slices]
        target[Box.from_json(fragment["global"]).slices] = part
        covered += part.size
    if covered != math.prod(shape):
        raise Damaged(
            f"atom '{atom['name']}/{atom['slot']}' of step {manifest.step}: its fragments cover {covered} elements"
            f" of {shape}"
        )
    return result


def _read_fragment(disk: AnyDisk, ref: FileRef, key: str, direct: bool) -> np.ndarray:
    """The tensor ``key`` of a payload file as an array of opaque elements."""
    with PayloadFile(disk, ref, direct=direct) as file:
        if key not in file.layout:
            raise Damaged(f"{ref.path} has no tensor {key!r}. {INSPECT}", path=ref.path)
        entry = file.layout[key]
        return np.frombuffer(file.read(entry), dtype=f"V{DTYPE_BYTES[entry.dtype]}").reshape(entry.shape)


class PayloadFile:
    """A published payload file, read block by block. ``layout`` is verified. A context manager."""

    def __init__(self, disk: AnyDisk, ref: FileRef, *, direct: bool = True) -> None:
        self.ref = ref
        self.layout = Layout((), (), b"", 0)  # nothing is known yet
        check_size(disk, ref)
        self._file = disk.open(ref.path, write=False, direct=direct)
        self._buffer = Buffer(CHECKSUM_BLOCK, "verify")
        self._block = -1
        try:
            self.layout = Layout.parse(self._header())
        except BaseException:
            self.close()
            raise

    def read(self, entry: Entry) -> bytearray:
        """The verified bytes of ``entry``."""
        result = bytearray()
        for block, start, stop in _blocks_of(entry):
            result += self._verified(block)[start:stop]
        return result

    def close(self) -> None:
        self._file.close()
        self._buffer.free()

    def __enter__(self) -> PayloadFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _header(self) -> bytearray:
        """The first blocks of the file, as many as the header needs: nearly always one."""
        header = bytearray()
        for block in range(len(self.ref.checksums)):
            header += self._verified(block)
            if 8 + int.from_bytes(header[:8], "little") <= len(header):
                break
        return header

    def _verified(self, block: int) -> memoryview:
        start = block * CHECKSUM_BLOCK
        view = self._buffer.view[: min(CHECKSUM_BLOCK, self.ref.bytes - start)]
        if block != self._block:
            self._file.read(view, start)
            self._block = block
            got = xxhash.xxh3_64_hexdigest(view)
            if got != self.ref.checksums[block]:
                self._block = -1
                atoms = self.layout.keys_between(start, start + len(view))
                raise corrupt(self.ref.path, start, len(view), atoms, self.ref.checksums[block], got, INSPECT)
        return view


def read_file(
    disk: AnyDisk, queue: IOQueue, ref: FileRef, view: memoryview, *, direct: bool = True
) -> Future[None]:
    """Fill ``view``, of ``ref.bytes``, with a payload file and verify every block of it. Raises ``Damaged``."""
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
    """The layout that a payload file's header claims, to say what damaged bytes held. Raises ``Damaged``."""
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
        raise FileMissing(f"{ref.path} ({ref.bytes} bytes) is missing. {INSPECT}", path=ref.path) from None
    if size != ref.bytes:
        raise FileMissing(
            f"{ref.path} has {size} bytes, the manifest says {ref.bytes}. {INSPECT}",
            path=ref.path,
            offset=min(size, ref.bytes),
            nbytes=abs(size - ref.bytes),
        )


def _blocks_of(entry: Entry) -> Iterator[tuple[int, int, int]]:
    """(block, start, stop) for each checksum block with bytes of ``entry``; offsets are within the block."""
    for block in range(entry.offset // CHECKSUM_BLOCK, -(-entry.end // CHECKSUM_BLOCK)):
        first = block * CHECKSUM_BLOCK
        yield block, max(entry.offset - first, 0), min(entry.end - first, CHECKSUM_BLOCK)
