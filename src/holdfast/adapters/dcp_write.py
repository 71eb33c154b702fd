"""The saving half of ``adapters.dcp``: each rank writes its tensors into a file of its own, the first one publishes.

The first rank opens the run when it has the plans of all, and tells each rank the step and the timeline with its plan.
What the ranks wrote it learns with their results; the commit is there when ``finish`` returns, and not before.
"""

from __future__ import annotations

import os
import re
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..delta.image import METADATA, Image
from ..delta.ranks import stream_of
from ..errors import BadInput, Damaged, RunMismatch
from ..state.atoms import Atom
from ..state.boxes import Box
from ..state.progress import encode
from ..store.layout import Layout
from ..store.local import LocalStore, Written
from ..store.manifest import Manifest, Timeline
from ..store.retention import Keep
from ..universal.keys import KEY, Kind, name_all
from ..universal.pickles import DTYPES

NAMES = {getattr(torch, theirs): ours for theirs, ours in DTYPES.items()}
_FILE = re.compile(r"save-\d+\.t\d+\.rank-\d+\.0\.safetensors")


@dataclass(frozen=True)
class Save:
    """What the first rank tells each of the save that is under way."""

    step: int
    timeline: dict[str, Any]
    rank: int
    names: dict[str, tuple[str, str]]
    """The name and the slot of each tensor that the rank writes, by key."""

    @property
    def unit(self) -> str:
        return f"save-{self.step:012d}.t{self.timeline['id']:04d}.{stream_of(self.rank)}"


class StorageWriter(dcp.StorageWriter):
    """Makes every ``dcp.save`` a commit of the run in the directory ``root``, which is made if absent.

    ``step`` is the commit's; without it, the one after the newest. A step that there is already, or after which there
    are others, begins another timeline, as a resume from it does. ``keep`` says which commits stay.
    """

    def __init__(
        self, root: str | os.PathLike = "", *, step: int | None = None, keep: Keep | None = None
    ) -> None:
        self.root, self.step, self.keep = os.fspath(root), step, keep or Keep()
        self._paths: dict[str, tuple[Any, ...]] = {}
        self._first: _Opened | None = None

    @property
    def checkpoint_id(self) -> str:
        return self.root

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return "://" not in os.fspath(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        self.root = os.fspath(checkpoint_id) if checkpoint_id else self.root
        self._close()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise BadInput(
                "use_collectives=False saves what is no whole, and a commit is one: save with collectives"
            )
        if not self.root:
            raise BadInput(
                "no directory was given: StorageWriter(root), or dcp.save(..., checkpoint_id=root)"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the first rank: opens the run, and names what is written."""
        if not all(plan.usable for plan in plans):
            raise BadInput("a planner with enable_plan_caching=True is not supported: pass one without it")
        items = [item for plan in plans for item in plan.items]
        paths = {key: path for plan in reversed(plans) for key, path in (plan.planner_data or {}).items()}
        paths |= {item.index.fqn: (item.index.fqn,) for item in items if item.index.fqn not in paths}
        there = {item.index.fqn for item in items}
        self._paths = {key: path for key, path in paths.items() if key in there}
        names = name_all(
            {i.index.fqn: _kind_of(i) for i in items if i.tensor_data is not None}, self._paths
        ).tensors
        self._first = opened = _Opened(self)
        told = []
        for rank, plan in enumerate(plans):
            mine = {item.index.fqn: names[item.index.fqn] for item in plan.items if item.index.fqn in names}
            save = Save(opened.step, asdict(opened.store.opened), rank, mine)
            told.append(replace(plan, storage_data=save))
        return told

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """On every rank: durable when it returns."""
        save: Save = plan.storage_data
        try:
            store = self._first.store if self._first is not None else _joined(self.root, self.keep, save)
            try:
                share, values = _write(store, save, plan.items, planner, first=self._first)
            finally:
                if self._first is None:
                    store.close()
        except BaseException:
            self._close()
            raise
        results = [WriteResult(item.index, _nbytes_of(item), None) for item in plan.items]
        if results:
            results[0] = replace(results[0], storage_data=(save.rank, share, values))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank: makes what all wrote a commit. When it returns, it survives power loss."""
        first = self._first
        assert first is not None and first.written is not None
        try:
            told = [
                result.storage_data for each in results for result in each if result.storage_data is not None
            ]
            values = {key: value for _, _, mine in told for key, value in mine.items()}
            files, index = first.written
            paths = {key: list(path) for key, path in self._paths.items()}
            progress = {KEY: {"paths": paths, "values": values}}
            step, unit = first.step, next(iter(files))
            refs = {stream_of(0): first.store.share(step, files, index, progress, {unit: step}).ref}
            refs |= {stream_of(rank): share for rank, share, _ in told if rank}
            first.store.publish_shares(refs)
        finally:
            self._close()

    def _close(self) -> None:
        first, self._first = self._first, None
        if first is not None:
            first.close()


class _Opened:
    """The run, open on the first rank for one save. Closed also when the writer goes without ``finish``, as after the
    failure of another rank."""

    def __init__(self, writer: StorageWriter) -> None:
        self.store = LocalStore(writer.root, keep=writer.keep)
        self.close = weakref.finalize(self, LocalStore.close, self.store)
        self.written: tuple[Written, dict[str, Any]] | None = None
        self.store.enter()
        try:
            before = _commit_before(self.store, writer.step)
            self.step = (
                writer.step if writer.step is not None else (before.step + 1 if before is not None else 0)
            )
            self._drop_others()
            self._begin(before)
        except BaseException:
            self.close()
            raise

    def _begin(self, before: Manifest | None) -> None:
        """A save after the newest is of the same timeline; any other begins one."""
        timelines = self.store.timelines()[0]
        newest = max(timelines, default=0)
        if (
            before is None
            or before.ref != self.store.line()[0]
            or before.timeline != newest
            or self.step <= before.step
        ):
            self.store.begin(before)
        else:
            self.store.go_on(timelines[newest])

    def _drop_others(self) -> None:
        """Remove the files of saves that did not come to their end."""
        try:
            commits = [self.store.load(ref) for ref in self.store.commits()]
        except Damaged:  # one that cannot be read may name any
            return
        named = {file.path for manifest in commits for file in manifest.files.values()}
        for name in self.store.disk.listdir("data"):
            if _FILE.fullmatch(name) and f"data/{name}" not in named:
                self.store.disk.unlink(f"data/{name}")


def _commit_before(store: LocalStore, step: int | None) -> Manifest | None:
    """The newest commit of the line that a save of ``step`` goes on from. Raises ``RunMismatch`` if the run is not one
    of these saves, ``BadInput`` if it begins later."""
    line = store.line()
    found = next((ref for ref in line if step is None or ref.step <= step), None)
    if line and found is None:
        raise BadInput(
            f"{store.root} begins with step {line[-1].step}, so step {step} cannot be saved there. Give another"
            " directory."
        )
    if found is None:
        return None
    manifest = store.load(found)
    if KEY not in manifest.progress_of(manifest.streams[0]):
        raise RunMismatch(
            f"{store.root} is a run that dcp.save did not write, so it cannot be gone on with. Give another directory."
        )
    return manifest


def _joined(root: str, keep: Keep, save: Save) -> LocalStore:
    """The run on a rank that is not the first, which has opened it."""
    store = LocalStore(root, keep=keep)
    timeline = Timeline(**save.timeline)
    with suppress(OSError):
        there = store.timelines()[0].get(timeline.id)
        if there is not None and there.key == timeline.key:
            store.join(timeline, save.rank)
            return store
    store.close()
    raise BadInput(
        f"rank {save.rank} does not see in {store.root} what the first rank wrote there. The directory has to be on a"
        " file system that all ranks share."
    )


def _write(
    store: LocalStore, save: Save, items: list[WriteItem], planner: SavePlanner, first: _Opened | None
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Write what a rank has. What its share is, on the first rank later, and its values by key."""
    values = {i.index.fqn: _value_of(planner, i) for i in items if i.type == WriteItemType.BYTE_IO}
    tensors = {_name_of(save, i): i for i in items if i.tensor_data is not None and _box_of(i).elements}
    if not tensors and first is None and not items:
        return None, {}
    atoms = {key: Atom(key, "", _box_of(item).shape, _kind_of(item).dtype) for key, item in tensors.items()}
    layout = Layout.build([(key, atom.dtype, atom.shape) for key, atom in atoms.items()], METADATA)
    unit = store.unit(save.unit, layout, copies=1)
    unit.create()
    generation = unit.acquire()
    image = Image(layout, _Resolved(tensors, planner))
    checksums = unit.write_through(generation, image.fill, kind="state", phase="save", priority=2)
    files: Written = {save.unit: (generation, checksums)}
    index = store.put_index(_index_of(save, items, tensors))
    if first is not None:
        first.written = files, index
        return None, values
    return store.share(save.step, files, index, {}, {save.unit: save.step}).ref, values


class _Resolved(dict[str, torch.Tensor]):
    """Tensors by their names in the file, each asked of the planner when it is needed."""

    def __init__(self, items: dict[str, WriteItem], planner: SavePlanner) -> None:
        self._items, self._planner = items, planner

    def __missing__(self, key: str) -> torch.Tensor:
        tensor = self._planner.resolve_data(self._items[key])
        assert isinstance(tensor, torch.Tensor)
        return tensor.detach()


def _value_of(planner: SavePlanner, item: WriteItem) -> Any:
    """What is no tensor, as JSON. Raises ``BadInput`` naming it."""
    key = item.index.fqn
    look_up = getattr(planner, "lookup_object", None)
    if look_up is not None:
        return encode(look_up(item.index), key)
    data: Any = planner.resolve_data(item)
    data.seek(0)
    return encode(torch.load(data, weights_only=True), key)


def _index_of(save: Save, items: list[WriteItem], tensors: dict[str, WriteItem]) -> dict[str, Any]:
    atoms: dict[str, Any] = {}
    for item in items:
        if item.tensor_data is None:
            continue
        name, slot = save.names[item.index.fqn]
        kind = _kind_of(item)
        atoms[f"{name}/{slot}"] = {
            "name": name, "slot": slot, "shape": list(kind.shape), "dtype": kind.dtype, KEY: item.index.fqn,
            "fragments": [],
        }  # fmt: skip
    for key, item in tensors.items():
        name, slot = save.names[item.index.fqn]
        box = _box_of(item)
        fragment = {
            "unit": save.unit,
            "key": key,
            "global": box.to_json(),
            "local": Box.whole(box.shape).to_json(),
        }
        atoms[f"{name}/{slot}"]["fragments"].append(fragment)
    return {"version": 1, "units": [save.unit], "atoms": atoms}


def _kind_of(item: WriteItem) -> Kind:
    assert item.tensor_data is not None
    dtype = item.tensor_data.properties.dtype
    if dtype not in NAMES:
        raise BadInput(
            f"{item.index.fqn} is of {dtype}, which commits do not hold. Convert it, or leave it out."
        )
    return Kind(tuple(item.tensor_data.size), NAMES[dtype])


def _box_of(item: WriteItem) -> Box:
    """The region of its tensor."""
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return Box(tuple(chunk.offsets), tuple(a + n for a, n in zip(chunk.offsets, chunk.sizes, strict=True)))


def _name_of(save: Save, item: WriteItem) -> str:
    """In the file: that of the atom, and where the region begins."""
    name, slot = save.names[item.index.fqn]
    start = ",".join(map(str, _box_of(item).start))
    return f"{name}/{slot}@{start}"


def _nbytes_of(item: WriteItem) -> int:
    return (
        0 if item.tensor_data is None else _box_of(item).elements * item.tensor_data.properties.dtype.itemsize
    )
