"""``torch.distributed.checkpoint`` to and from a run directory of this library.

    dcp.save(state, storage_writer=StorageWriter("runs/x", step=100))
    dcp.load(state, storage_reader=StorageReader("runs/x"))

A save is a commit: when it returns, it survives power loss, and ``holdfast show``, ``verify`` and ``diff`` can read it.
A load verifies everything that it will read, on every rank, before it touches a tensor of any rank. torch plans which
rank reads what, so a load at another world size is an ordinary one. Values that are no tensors are stored as JSON.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata as theirs
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ..errors import BadInput, HoldfastError, NoCommit, RunMismatch
from ..formats.entry_keys import KEY
from ..formats.load import ReadPlan, ReadRange, ReadTarget, array_of, in_threads, plan, read_all
from ..formats.run_directory import CommitSource
from ..formats.source import SourceTensor
from ..quantities import MiB, packed
from ..state.encoding import decode
from ..state.layout.regions import Region
from ..state.plain_tensors import FROM_NAME
from ..store.reader import RunReader
from .dcp_write import RunPlace, StorageWriter

__all__ = ["StorageReader", "StorageWriter"]

BATCH_BYTES = 64 * MiB
"""The bytes that are read at once for tensors that cannot be read into directly; larger tensors are read singly."""


@dataclass
class PlanOfCommit(LoadPlan):
    """A rank's plan, with the commit that the rank would read."""

    commit: str = ""


class StorageReader(RunPlace, dcp.StorageReader):
    """The reader of a commit that a ``StorageWriter`` made of the run in ``root``: of ``step``, or the newest.

    ``timeline`` names the timeline of a step that a save of an earlier step has abandoned.
    """

    def __init__(
        self, root: str | os.PathLike = "", *, step: int | None = None, timeline: int | None = None
    ) -> None:
        if timeline is not None and step is None:
            raise BadInput(
                f"timeline={timeline} without step=: a timeline tells steps of one number apart. Give both"
            )
        super().__init__(root, step)
        self._timeline = timeline
        self._source: CommitSource | None = None
        self._values: dict[str, Any] = {}
        self._paths: dict[str, tuple[Any, ...]] = {}

    @property
    def load_id(self) -> str:
        return self.call_id

    def _let_go(self) -> None:
        self._source = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> theirs.Metadata:
        """Return torch's metadata of the commit.

        If the commit cannot be read, the returned object raises the error when it is used: ``Damaged``, ``NoCommit``,
        or ``RunMismatch`` if ``dcp.save`` did not make the commit. An error raised here would lose its text in torch
        before 2.13.
        """
        try:
            return self._metadata()
        except HoldfastError as error:
            return _Unreadable(error)

    def _metadata(self) -> theirs.Metadata:
        reader = RunReader(self.root)
        manifest = reader.head() if self.step is None else reader.at(self.step, self._timeline)
        if manifest is None:
            raise NoCommit(
                f"{self.root} has no commit: nothing was saved there, or another directory is meant"
            )
        told = manifest.progress_of(manifest.streams[0]).get(KEY)
        if told is None:
            raise RunMismatch(
                f"{self.root}@{manifest.step} was not written by dcp.save, so its tensors have no keys of a state dict."
                f" `holdfast convert {self.root}@{manifest.step} FOLDER --to dcp` makes a folder that dcp.load reads."
            )
        self._source = source = CommitSource(reader, manifest)
        self._values = told["values"]
        self._paths = {key: tuple(path) for key, path in told["paths"].items()}
        about: dict[str, Any] = {key: _metadata_of(stored) for key, stored in source.by_key.items()}
        about |= {key: theirs.BytesStorageMetadata() for key in self._values}
        about = {key: about[key] for key in self._paths}
        meta = theirs.StorageMeta(self.root, load_id=self.load_id)
        return theirs.Metadata(about, self._paths, {}, meta)

    def set_up_storage_reader(
        self, metadata: theirs.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if isinstance(metadata, _Unreadable):
            raise metadata.error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Verify what this rank will read. Raises ``Damaged``, which ends the load on all ranks."""
        source = self._opened
        in_threads(partial(_verify, source, run) for run in self._runs(plan))
        return PlanOfCommit(plan.items, plan.storage_data, plan.planner_data, source.path)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raise ``BadInput`` where ranks would load different commits, or a planner has hidden which they would load.

        Called on the coordinator, after the planner's own ``create_global_plan``.
        """
        commits = {plan.commit if isinstance(plan, PlanOfCommit) else None for plan in plans}
        if len(commits) > 1:
            raise BadInput(
                f"the ranks would load different commits of {self.root}, as one was made meanwhile. Say which:"
                " StorageReader(root, step=...)."
            )
        if commits == {None} and len(plans) > 1 and self.step is None:
            raise BadInput(
                "the planner made plans of its own, which do not say what commit each rank would load. Say which:"
                " StorageReader(root, step=...), or let it use dataclasses.replace on the plans that it is given."
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                data = io.BytesIO()
                torch.save(decode(self._values[item.storage_index.fqn]), data)
                data.seek(0)
                planner.load_bytes(item, data)
        for batch in _batches([item for item in plan.items if item.type == LoadItemType.TENSOR]):
            self._read(batch, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @property
    def _opened(self) -> CommitSource:
        assert self._source is not None, "read_metadata comes first"
        return self._source

    def _read(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        """Read the items of one batch."""
        targets, ways = [], []
        for item in items:
            stored, box = self._wanted(item)
            tensor = planner.resolve_tensor(item).detach()
            made = torch.empty(box.shape, dtype=FROM_NAME[stored.atom.dtype])
            is_view = tensor.is_conj() or tensor.is_neg()  # the bytes of a view are not its values
            lies_alike = tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.dtype == made.dtype
            at_once = lies_alike and not is_view
            into = tensor if at_once else made
            targets.append(ReadTarget(stored, box, array_of(into).reshape(box.shape)))
            ways.append((item, tensor, into))
        read_all(self._opened, targets)
        for item, tensor, into in ways:
            if into is not tensor:
                tensor.copy_(into)
            planner.commit_tensor(item, tensor)

    def _runs(self, loaded: LoadPlan) -> ReadPlan:
        items = [item for item in loaded.items if item.type == LoadItemType.TENSOR]
        nothing = np.empty(0)
        return plan(self._opened, [ReadTarget(*self._wanted(item), nothing) for item in items])

    def _wanted(self, item: ReadItem) -> tuple[SourceTensor, Region]:
        stored = self._opened.by_key[item.storage_index.fqn]
        offset = item.storage_index.offset or (0,) * len(stored.atom.shape)
        start = tuple(a + b for a, b in zip(offset, item.storage_offsets, strict=True))
        return stored, Region(start, tuple(a + n for a, n in zip(start, item.lengths, strict=True)))


class _Unreadable(theirs.Metadata):
    """Metadata of a commit that cannot be read; every use raises the error."""

    def __init__(self, error: HoldfastError) -> None:
        self.error = error

    def __getattr__(self, name: str) -> Any:
        raise self.error


def _metadata_of(stored: SourceTensor) -> theirs.TensorStorageMetadata:
    """Return torch's metadata of a tensor, with the stored regions as chunks."""
    boxes = [piece.box for piece in stored.pieces] or [Region.whole(stored.atom.shape)]
    chunks = [theirs.ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape)) for box in boxes]
    properties = theirs.TensorProperties(FROM_NAME[stored.atom.dtype])
    return theirs.TensorStorageMetadata(properties, torch.Size(stored.atom.shape), chunks)


def _verify(source: CommitSource, run: ReadRange) -> int:
    where = source.parts[run.part]
    nbytes = run.count * where.itemsize
    source.read(run.part, run.start * where.itemsize, memoryview(bytearray(nbytes)))
    return nbytes


def _batches(items: list[ReadItem]) -> Iterator[list[ReadItem]]:
    """Yield batches of about ``BATCH_BYTES`` at most."""
    return packed(items, lambda item: 4 * item.lengths.numel(), BATCH_BYTES)
