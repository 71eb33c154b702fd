"""The commit from which an engine resumes: the newest whole one, checked to be one of this model.

A commit of another model, of other ``blocks=``, or with tensors in another order is refused by name. Commits that are
passed over because of damage are warned about. Where other ranks made the commit, ``ReshardedCommit`` reads from it the
regions that this rank has, and every byte is verified as it is read. Called by ``offload`` and by the builder of an
engine.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import PurePath
from typing import Any

import torch

from ...distributed import Ranks
from ...errors import Damaged, NoCommit, RunMismatch
from ...io.buffers import Buffer
from ...optim.declared_state import master_bits_of
from ...state.plain_tensors import FROM_NAME
from ...store.commit.generations import Generations
from ...store.commit.housekeeping import restore_index
from ...store.disk import AnyDisk
from ...store.format.manifest import FileRef, Manifest
from ...store.format.payload_files import VerifiedFiles, read_box
from ...store.run_store import LocalStore
from ..memory.block_states import as_tensor
from ..memory.unit_files import UnitFile, copy_exactly, unit_of
from ..model.model_parts import REST, ModelParts

FROZEN_DTYPES = ("F32", "BF16", "F16")
"""Dtypes in which a frozen parameter may be stored."""


def newest_commit(store: LocalStore, parts: ModelParts) -> Manifest:
    """Return the newest whole commit to continue. Warns about commits passed over.

    Raises ``RunMismatch`` if it is another model's, ``Damaged`` if none is whole.
    """
    for problem in restore_index(store, parts.index()):
        warnings.warn(f"the model says the same, so it was written anew: {problem}", stacklevel=7)
    readable = _newest_readable(store)
    if readable is not None:
        _same_model(parts, store, readable)
    manifest, damaged = store.newest_whole()
    for problem in dict.fromkeys(map(str, damaged)):
        warnings.warn(f"resuming from step {manifest.step} in spite of damage: {problem}", stacklevel=7)
    _same_model(parts, store, manifest)
    return manifest


@dataclass(frozen=True)
class RunContents:
    """The dtypes and units of a run that exists, on which its layout depends."""

    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    """The dtype in which each parameter is stored, by name."""
    streams_all: bool = False
    """True if embedding and head are units like blocks."""


def contents_of(root: str | PurePath, disk: AnyDisk | None) -> RunContents | None:
    """Return the contents of the newest readable commit of a run; None if there is none."""
    with suppress(NoCommit), LocalStore.read(root, disk=disk) as reader:
        for ref in reader.line():
            with suppress(Damaged, NoCommit):
                manifest = reader.load(ref)
                atoms = reader.atoms(manifest).values()
                return RunContents(
                    {atom["name"]: FROM_NAME[atom["dtype"]] for atom in atoms if atom["slot"] == "param"},
                    REST in map(unit_of, manifest.files),
                )
    return None


def dtype_of_run(root: str | PurePath, disk: AnyDisk | None = None) -> Any:
    """Return the compute dtype of a run, as its newest readable commit has it; None if there is no run.

    Commits of the first versions name no dtype; they were written in bf16, the default then.
    """
    with suppress(NoCommit), LocalStore.read(root, disk=disk) as reader:
        # without readable timeline records, no commit's line is known
        for ref in reader.line() or reader.commits():
            with suppress(Damaged, NoCommit):
                manifest = reader.load(ref)
                return manifest.progress_of(manifest.streams[0]).get("settings", {}).get("dtype", "bf16")
    return None


def same_files(stored: dict[str, Generations], store: LocalStore, manifest: Manifest) -> None:
    """Raise ``RunMismatch`` if the files of a commit of this model are not those that this run would write."""
    _same_blocks(stored, store, manifest)
    _same_layouts(stored, store, manifest)


class ReshardedCommit:
    """A commit of an open run. Every byte is verified as it is read."""

    def __init__(self, store: LocalStore, manifest: Manifest) -> None:
        self._store, self._manifest, self._files = store, manifest, VerifiedFiles(store.disk)

    @cached_property
    def _atoms(self) -> dict[str, dict[str, Any]]:
        return self._store.atoms(self._manifest)

    def file(self, name: str, never_changes: bool, is_here: Callable[[str], bool]) -> FileRef | None:
        """Return the commit's file called ``name``, whose name identifies its content.

        For a file that ``never_changes``, a file of another commit may be returned: one with the same content that
        ``is_here`` is preferred.
        """
        found = self._manifest.files.get(name)
        if not never_changes or (found is not None and is_here(found.path)):
            return found
        for ref in self._store.commits():
            with suppress(Damaged, NoCommit):
                other = self._store.load(ref).files.get(name)
                if other is not None and (found is None or (_is_same(found, other) and is_here(other.path))):
                    return other
        return found

    def fill(self, image: Buffer, file: UnitFile) -> None:
        """Fill ``image``, of ``file``, with the commit's values of the regions that the file holds."""
        image.view[:] = bytes(len(image.view))
        for entry in file.entries:
            box, atom = file.places[entry.key][1], self._atoms[entry.key]
            found = read_box(self._files, self._manifest, atom, box)
            if atom["dtype"] != entry.dtype:  # a frozen parameter that was stored in another one
                found = _converted(found, atom, entry.dtype)
            if file.is_split and entry.slot == "param":
                values = torch.frombuffer(found, dtype=torch.float32) if found else torch.empty(0)
                file.set_values(as_tensor(image), entry.name, values.view(entry.shape))
            else:
                place = file.layout[entry.key]
                image.view[place.offset : place.end] = found


def _converted(raw: bytearray, atom: dict[str, Any], dtype: str) -> bytes:
    """Return the values of a frozen parameter in another dtype. Raises ``BadInput`` if that loses bits."""
    values = torch.frombuffer(raw, dtype=FROM_NAME[atom["dtype"]]) if raw else torch.empty(0)
    target = torch.empty(values.shape, dtype=FROM_NAME[dtype])
    copy_exactly(target, values, atom["name"])
    return target.view(torch.uint8).numpy().tobytes()


def progress_of_rank(manifest: Manifest, ranks: Ranks) -> Manifest:
    """Return ``manifest`` with the progress of this rank, or that of the first rank if this rank has none."""
    streams = [ranks.stream, *manifest.streams]
    stream = next(each for each in streams if each in manifest.streams)
    return replace(manifest, progress=manifest.progress_of(stream))


def _newest_readable(store: LocalStore) -> Manifest | None:
    """Return the newest commit whose manifest and index can be read; its data may be damaged."""
    for ref in store.line():
        with suppress(Damaged, NoCommit):
            manifest = store.load(ref)
            store.atoms(manifest)
            return manifest
    return None


def _same_model(parts: ModelParts, store: LocalStore, manifest: Manifest) -> None:
    """Raise ``RunMismatch`` naming the first tensor entry in which the run differs from the model."""
    theirs = store.atoms(manifest)
    ours = parts.index()["atoms"]
    frozen = {f"{member.name}/param" for unit in parts.all_units for member in (*unit.frozen, *unit.routed)}
    for key in [*ours, *theirs]:
        there, here = (_sort(atoms.get(key), key in frozen) for atoms in (theirs, ours))
        if there != here:
            raise RunMismatch(
                f"{store.root} holds another model or optimizer: {key} is {there} there and {here} here. "
                "Give this one its own directory, or build the model and optimizer that the run was made with."
            )
    groups = manifest.progress.get("groups", [])
    for number, (group, here) in enumerate(zip(groups, parts.optimizer.master_bits)):
        if (there := master_bits_of(group)) != here:
            raise RunMismatch(
                f"{store.root} has masters of {there} bits, and param_groups[{number}]['master_bits'] is {here}. They"
                " cannot change within a run: give the optimizer the same, or begin another run from this one"
                " (source=holdfast.From(...))."
            )


def _sort(atom: dict[str, Any] | None, frozen: bool) -> str:
    """Return dtype and shape of a tensor entry. A frozen parameter has the dtype in which it was stored."""
    if atom is None:
        return "absent"
    dtype = atom["dtype"]
    if frozen and dtype in FROZEN_DTYPES:
        dtype = "of any dtype"
    elif atom["slot"] == "param" and dtype in ("BF16", "F16"):  # masters of trained ones are F32
        dtype = f"frozen, {dtype}"
    return f"{dtype} {atom['shape']}"


def _same_blocks(stored: dict[str, Generations], store: LocalStore, manifest: Manifest) -> None:
    """Raise ``RunMismatch`` if the run was made with another choice of ``blocks=``."""
    theirs, ours = {unit_of(name) for name in manifest.files}, {unit_of(name) for name in stored}
    if (REST in theirs) != (
        REST in ours
    ):  # embedding and head become units, or cease to be; the state is cut anew
        return
    there, here = (", ".join(sorted(one - other)) for one, other in ((theirs, ours), (ours, theirs)))
    if there or here:
        raise RunMismatch(
            f"{store.root} was made with other blocks= of this model: there are files of {there or 'no others'} in "
            f"it, and here of {here or 'no others'}. Pass the blocks= that the run was made with, or give this one its "
            "own directory."
        )


def _same_layouts(stored: dict[str, Generations], store: LocalStore, manifest: Manifest) -> None:
    """Raise ``RunMismatch`` if a file of the run has its tensors at other places.

    Names, shapes and dtypes are the same then, in another order, as after a change of the model's code.
    """
    for name, unit in stored.items():
        ref = manifest.files.get(name)  # None if the unit was in tiles of another size
        if ref is not None and store.layout(ref).header != unit.layout.header:
            raise other_layout(ref.path)


def other_layout(path: str) -> RunMismatch:
    """Return the error for a file whose tensors are not where this model would have them."""
    return RunMismatch(
        f"{path} holds its tensors in another order than this model has them. Build the model with the code that the "
        "run was made with, or give this one its own directory."
    )


def _is_same(one: FileRef, other: FileRef) -> bool:
    return (one.bytes, one.checksums) == (other.bytes, other.checksums)
