"""A run of the store alone, without a model: what its tests write, kill, cut and damage.

Two small units and a frozen one; every byte is a pure function of (unit, tensor, step), so that whoever
recovers a step can say whether it is right.
"""

from __future__ import annotations

import numpy as np

from holdfast.io.buffers import BufferPool
from holdfast.io.queue import IOQueue
from holdfast.store.format.payload_layout import Layout
from holdfast.store.run_store import LocalStore

TENSORS = {
    "block_0": [
        ("a.weight/param", "F32", (5, 7)),
        ("a.weight/exp_avg", "F32", (5, 7)),
        ("a.step/step", "I64", ()),
    ],
    "block_1": [("b.weight/param", "BF16", (4099,)), ("b.weight/exp_avg", "F32", (4099,))],
}
FROZEN = {"frozen": [("c.weight/param", "U8", (11,))]}


def content(key: str, timeline: int, step: int, nbytes: int) -> bytes:
    """The bytes of a tensor at ``step`` of ``timeline``."""
    return np.random.default_rng([timeline, step, *key.encode()]).bytes(nbytes)


def index_of(tensors: dict) -> dict:
    """The index of a run in which every atom is one tensor of one unit."""
    atoms = {}
    for unit, rows in tensors.items():
        for key, dtype, shape in rows:
            box = [[0] * len(shape), list(shape)]
            name, slot = key.split("/")
            fragment = {"unit": unit, "key": key, "global": box, "local": box}
            atoms[key] = {
                "name": name,
                "slot": slot,
                "shape": list(shape),
                "dtype": dtype,
                "fragments": [fragment],
            }
    return {"version": 1, "atoms": atoms}


class TinyRun:
    """Opens ``root`` (resuming if it has commits), takes steps, checks what is recovered."""

    def __init__(self, root, *, copies=3, tensors=None, frozen=None, threads=2, fork=None, **options):
        self.tensors = TENSORS if tensors is None else tensors
        self.frozen = FROZEN if frozen is None else frozen
        self.queue = IOQueue(threads)
        self.pool = BufferPool()
        try:
            self.store = LocalStore.open(root, queue=self.queue, **options)
            self._begin(copies, fork)
        except BaseException:
            self.close()
            raise

    def _begin(self, copies, fork):
        self.resumed = None
        if self.store.commits():
            self.resumed = self.store.newest_whole()[0] if fork is None else self.store.at(fork)
        self.step = self.resumed.step if self.resumed else 0
        self.timeline = self.store.begin(self.resumed)
        self.units = {
            name: self.store.unit(name, Layout.build(rows), copies) for name, rows in self.tensors.items()
        }
        self.frozen_units = {
            name: self.store.unit(name, Layout.build(rows), 1) for name, rows in self.frozen.items()
        }
        for unit in [*self.units.values(), *self.frozen_units.values()]:
            unit.create()
        self.index = self.store.put_index(index_of({**self.tensors, **self.frozen}))
        self.fixed = {name: self._frozen_file(name, unit) for name, unit in self.frozen_units.items()}

    def _frozen_file(self, name, unit):
        if self.resumed is not None:
            ref = self.resumed.files[name]
            return unit.generation_of(ref.path), ref.checksums
        generation = unit.acquire()
        return generation, self.write(unit, generation, 0, 0)

    def write(self, unit, generation, timeline, step):
        """Write ``unit`` as it is at ``step`` of ``timeline`` to ``generation``; the checksums."""
        buffer = self.pool.take(unit.layout.file_bytes, "state")
        for entry in unit.layout.entries:
            buffer.view[entry.offset : entry.end] = content(entry.key, timeline, step, entry.nbytes)
        future = unit.write(
            generation, buffer.view[: unit.layout.file_bytes], kind="state", phase="update", priority=1
        )
        try:
            return future.result(30)
        finally:
            self.pool.give(buffer)

    def take_step(self):
        """One optimizer step: write all units, publish. Returns the manifest."""
        self.step += 1
        files = dict(self.fixed)
        for name, unit in self.units.items():
            generation = unit.acquire()
            files[name] = generation, self.write(unit, generation, self.timeline, self.step)
        return self.store.publish(self.step, files, self.index, {"step": self.step})

    def close(self):
        if hasattr(self, "store"):
            self.store.close()
        self.queue.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def check_content(reader, manifest) -> None:
    """Every atom of ``manifest`` has the bytes that its step wrote."""
    for key, atom in reader.atoms(manifest).items():
        data = reader.read_atom(manifest, atom)
        frozen = atom["fragments"][0]["unit"] in FROZEN
        of = (0, 0) if frozen else (manifest.timeline, manifest.step)
        assert data == content(key, *of, len(data)), (manifest.path, key)


def flip(path, bit) -> None:
    """Change one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))
