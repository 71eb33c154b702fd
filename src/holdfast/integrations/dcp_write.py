"""The writer of ``integrations.dcp``: each rank writes its tensors into its own file, the first rank publishes.

1. The first rank opens the run when it has the plans of all ranks, and sends each rank the step and the timeline with
   its plan.
2. Each rank writes its file and returns where its share is.
3. The first rank publishes the commit in ``finish``: it exists when ``finish`` returns, and not before.

The items of a plan are stored as tensor entries: name, slot and region. Called by ``torch.distributed.checkpoint``.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import asdict, dataclass, replace
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..checkpoint.snapshot.snapshot_image import SnapshotImage
from ..distributed import stream_of
from ..errors import BadInput
from ..formats.entry_keys import KEY, ShapeAndType, name_all
from ..state.encoding import encode
from ..state.layout.regions import Region
from ..state.plain_tensors import TO_NAME, unsupported_kind
from ..state.tensor_entries import TensorEntry, fragment
from ..store.commit.commit_writer import Written
from ..store.commit.retention import Keep, refuse_best, refuse_weights
from ..store.format.manifest import Timeline
from ..store.format.payload_layout import METADATA, Layout
from ..store.run_store import LocalStore
from .shared.collective_commit import OpenedRun, check_step, joined_run, unit_of


class RunPlace:
    """The place of a reader or writer: the directory of a run."""

    def __init__(self, root: str | os.PathLike, step: int | None) -> None:
        self.root, self.step = os.fspath(root), step
        self.call_id = uuid4().hex
        """Identifies the saves, or the loads, since the last ``reset``."""

    @property
    def checkpoint_id(self) -> str:
        return self.root

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return "://" not in os.fspath(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        self.root = os.fspath(checkpoint_id) if checkpoint_id else self.root
        self.call_id = uuid4().hex
        self._let_go()

    def _let_go(self) -> None:
        """Release what the last call had open."""
        raise NotImplementedError


class StorageWriter(RunPlace, dcp.StorageWriter):
    """The writer that makes every ``dcp.save`` a commit of the run in ``root``, which it creates if absent.

    ``step`` is the step of the commit; None means one more than the newest. A step that exists already, or has later
    steps, begins another timeline, as a resume from it does. ``keep`` tells which commits stay.
    """

    def __init__(
        self, root: str | os.PathLike = "", *, step: int | None = None, keep: Keep | None = None
    ) -> None:
        check_step(step)
        super().__init__(root, step)
        self.keep = keep or Keep()
        refuse_best(self.keep, "dcp.save")
        refuse_weights(self.keep, "dcp.save")
        self._paths: dict[str, tuple[Any, ...]] = {}
        self._first: _Opened | None = None

    @property
    def save_id(self) -> str:
        return self.call_id

    def storage_meta(self) -> StorageMeta:
        """Return the directory and the identity of the save, which torch hands to planners."""
        return StorageMeta(checkpoint_id=self.root, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True) and _num_ranks() > 1:
            raise BadInput(
                "use_collectives=False saves each rank by itself, and a commit is of all ranks: save with collectives,"
                " or with no_dist=True on one rank"
            )
        if not self.root:
            raise BadInput(
                "no directory was given: StorageWriter(root), or dcp.save(..., checkpoint_id=root)"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Open the run and name what is written. Called on the first rank."""
        plans = _complete(plans)
        items = [item for plan in plans for item in plan.items]
        paths = {key: path for plan in reversed(plans) for key, path in (plan.planner_data or {}).items()}
        paths |= {item.index.fqn: (item.index.fqn,) for item in items if item.index.fqn not in paths}
        there = {item.index.fqn for item in items}
        self._paths = {key: path for key, path in paths.items() if key in there}
        names = name_all(
            {i.index.fqn: kind_of(i) for i in items if i.tensor_data is not None}, self._paths, {}
        ).tensors
        self._first = opened = _Opened(self)
        told = []
        for rank, plan in enumerate(plans):
            keys = {item.index.fqn for item in plan.items} & names.keys()
            is_all = len(keys) == len(names)  # as mostly: then all plans have one table
            mine = names if is_all else {key: names[key] for key in keys}
            save = SaveFacts(opened.step, asdict(opened.store.opened), rank, mine)
            told.append(replace(plan, storage_data=save))
        return told

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors; durable on return. Called on every rank."""
        save: SaveFacts = plan.storage_data
        try:
            store = (
                self._first.store
                if self._first is not None
                else joined_run(self.root, self.keep, Timeline(**save.timeline), save.rank)
            )
            try:
                share, values = _write(store, save, plan.items, planner, first=self._first)
            finally:
                if self._first is None:
                    store.close()
        except BaseException:
            self._let_go()
            raise
        results = [WriteResult(item.index, nbytes_of(item), None) for item in plan.items]
        if results:
            results[0] = replace(results[0], storage_data=(save.rank, share, values))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish what all ranks wrote as a commit, which survives power loss on return. Called on the first rank."""
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
            self._let_go()

    def _let_go(self) -> None:
        first, self._first = self._first, None
        if first is not None:
            first.close()


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _complete(plans: list[SavePlan]) -> list[SavePlan]:
    """Return ``plans`` with those that a planner has cached in place of the empty ones that say "as before".

    Each rank is then sent its whole plan, because its step is new. Called on the first rank. Raises ``BadInput`` if
    planners of several classes cache plans, as nothing tells which of them made ``plans``.
    """
    if all(plan.usable for plan in plans):
        return plans
    cached = [*getattr(SavePlanner, "_cached_global_plan", {}).values()]
    if len(cached) != 1 or len(cached[0]) != len(plans):
        raise BadInput(
            f"the plans of this save are cached (enable_plan_caching=True), and there are {len(cached)} caches, by the"
            " classes of planners. Cache the plans of one class, and not for several numbers of ranks."
        )
    return [plan if plan.usable else whole for plan, whole in zip(plans, cached[0], strict=True)]


class _Opened(OpenedRun):
    """The run of ``writer``, opened on the first rank, and what that rank has ``written`` to it."""

    def __init__(self, writer: StorageWriter) -> None:
        self.written: tuple[Written, dict[str, Any]] | None = None
        super().__init__(writer.root, writer.keep, writer.step, lambda told: KEY in told, "dcp.save")


def _write(
    store: LocalStore, save: SaveFacts, items: list[WriteItem], planner: SavePlanner, first: _Opened | None
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Write a rank's tensors; return the reference of its share and its values by key.

    The reference is None on the first rank, which adds its share in ``finish``.
    """
    values = {i.index.fqn: value_of(planner, i) for i in items if i.type == WriteItemType.BYTE_IO}
    tensors = {name_of(save, i): i for i in items if i.tensor_data is not None and box_of(i).elements}
    if not tensors and first is None and not items:
        return None, {}
    atoms = {
        key: TensorEntry(key, "", box_of(item).shape, kind_of(item).dtype) for key, item in tensors.items()
    }
    layout = Layout.build([(key, atom.dtype, atom.shape) for key, atom in atoms.items()], METADATA)
    image = SnapshotImage(layout, Resolved(tensors, planner))
    files: Written = {save.unit: store.write_unit(save.unit, layout, image.fill)}
    index = store.put_index(index_of(save, items, tensors))
    if first is not None:
        first.written = files, index
        return None, values
    return store.share(save.step, files, index, {}, {save.unit: save.step}).ref, values


@dataclass(frozen=True)
class SaveFacts:
    """The facts about a save that the first rank sends to each rank."""

    step: int
    timeline: dict[str, Any]
    rank: int
    names: dict[str, tuple[str, str]]
    """The name and the slot of each tensor that the rank writes, by key."""

    @property
    def unit(self) -> str:
        return unit_of(self.step, self.timeline["id"], self.rank)


class Resolved(dict[str, torch.Tensor]):
    """Tensors by their names in the file, requested from the planner when they are needed."""

    def __init__(self, items: dict[str, WriteItem], planner: SavePlanner) -> None:
        self._items, self._planner = items, planner

    def __missing__(self, key: str) -> torch.Tensor:
        item = self._items[key]
        tensor = self._planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)
        kind = "on meta, without values" if tensor.is_meta else unsupported_kind(tensor)
        if kind is not None:
            raise BadInput(
                f"{item.index.fqn} is {kind}, and commits hold plain tensors. Save what it is made of, or leave it out."
            )
        if (tuple(tensor.shape), TO_NAME.get(tensor.dtype)) != (box_of(item).shape, kind_of(item).dtype):
            raise BadInput(
                f"{item.index.fqn} is {list(tensor.shape)} of {tensor.dtype} by now, and was planned to be"
                f" {list(box_of(item).shape)} of {kind_of(item).dtype}: it was changed while it was saved"
            )
        return tensor.detach().resolve_conj().resolve_neg()


def value_of(planner: SavePlanner, item: WriteItem) -> Any:
    """Return a value that is no tensor, as JSON. Raises ``BadInput``, which names it."""
    key = item.index.fqn
    look_up = getattr(planner, "lookup_object", None)
    if look_up is not None:
        return encode(look_up(item.index), key)
    data: Any = planner.resolve_data(item)
    data.seek(0)
    try:
        value = torch.load(data, weights_only=True)
    except pickle.UnpicklingError as error:
        raise BadInput(
            f"{key} is no data that torch.load(weights_only=True) takes, as which this planner gives it: {error}"
        ) from error
    return encode(value, key)


def index_of(save: SaveFacts, items: list[WriteItem], tensors: dict[str, WriteItem]) -> dict[str, Any]:
    atoms: dict[str, Any] = {}
    for item in items:
        if item.tensor_data is None:
            continue
        name, slot = save.names[item.index.fqn]
        atom = TensorEntry(name, slot, *kind_of(item))
        atoms[atom.key] = atom.to_json() | {KEY: item.index.fqn, "fragments": []}
    for key, item in tensors.items():
        name, slot = save.names[item.index.fqn]
        atoms[f"{name}/{slot}"]["fragments"].append(fragment(save.unit, key, box_of(item)))
    return {"version": 1, "units": [save.unit], "atoms": atoms}


def kind_of(item: WriteItem) -> ShapeAndType:
    assert item.tensor_data is not None
    dtype, layout = item.tensor_data.properties.dtype, item.tensor_data.properties.layout
    if layout != torch.strided:
        raise BadInput(
            f"{item.index.fqn} is {layout}, and commits hold dense tensors. Save it with .to_dense(), or leave it out."
        )
    if dtype not in TO_NAME:
        raise BadInput(
            f"{item.index.fqn} is of {dtype}, which commits do not hold. Convert it, or leave it out."
        )
    return ShapeAndType(tuple(item.tensor_data.size), TO_NAME[dtype])


def box_of(item: WriteItem) -> Region:
    """Return the region of ``item`` in its tensor."""
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return Region(tuple(chunk.offsets), tuple(a + n for a, n in zip(chunk.offsets, chunk.sizes, strict=True)))


def name_of(save: SaveFacts, item: WriteItem) -> str:
    """Return the name of ``item`` in the file: that of its tensor entry, and where the region begins."""
    name, slot = save.names[item.index.fqn]
    start = ",".join(map(str, box_of(item).start))
    return f"{name}/{slot}@{start}"


def nbytes_of(item: WriteItem) -> int:
    return (
        0 if item.tensor_data is None else box_of(item).elements * item.tensor_data.properties.dtype.itemsize
    )
