"""The chunks of a snapshot: how a state is divided into files, and how one writer's share is loaded again.

A snapshot is written over many steps, so each chunk is copied by itself and may be of an earlier step than the commit;
log records bring it forward. Therefore tensors that share memory, and everything that an optimizer updates together,
are in one chunk. What no record brings forward is copied last, at the commit's own step. Frozen parameters are in
chunks of their own, whose files later snapshots name again. ``SnapshotShard`` loads the chunks of one writer, whose
part of a run is called a stream. Called by ``snapshot_writer`` and by recovery. Sizes are
bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from math import prod
from typing import Any

import torch
import xxhash

from ...io.buffers import Buffer
from ...optim.kinds import is_elementwise
from ...quantities import MiB, packed
from ...state.layout.regions import FLAT, AnyRegion, FlatRange, Region, regions_of
from ...state.live_state import BUFFERS, Held, LiveState
from ...state.tensor_entries import CARRIED, RESIDUAL, SUBSPACE, TensorEntry, fragment
from ...store.commit.generations import Generations
from ...store.format.manifest import HOME, FileRef, Manifest
from ...store.format.payload_files import index_of_stream, read_file
from ...store.format.payload_layout import METADATA, Layout
from ...store.run_store import LocalStore
from ..capture.staging_buffers import tensors_of

UNIT_BYTES = 64 * MiB
"""The approximate size of a chunk.

A larger parameter is divided by rows if its optimizer is elementwise, and is one chunk otherwise.
"""


@dataclass
class SnapshotChunk:
    name: str
    owners: tuple[str, ...]
    layout: Layout
    files: Generations | None = None
    """None until the recorder has made the files."""
    late: bool = False
    """True if no log record brings the content forward. Such a chunk is copied last, at the commit's own step."""
    rows: range | None = None
    """The rows of its one owner, if that is divided. The first chunk of the owner also has everything without rows."""
    stretches: Mapping[str, FlatRange] = field(default_factory=dict)
    """The flat ranges of parameters stored as such, by name. Each region of a range is a tensor of its own."""
    is_frozen: bool = False
    """True if it holds frozen parameters alone. Snapshots name its file again while the content stays equal."""
    folder: str = HOME
    """The folder of its files, which names their drive."""

    def held_of(self, owned: Mapping[str, Held]) -> Held:
        """Return the content of the chunk, out of all that is ``owned``."""
        return _held_of(owned, self.owners, self.rows)

    def tensors_of(self, owned: Mapping[str, Held]) -> dict[str, torch.Tensor]:
        """Return the tensors of the chunk's file, by key."""
        return {
            key: tensor
            for atom, whole in self.held_of(owned).values()
            for key, tensor in _in_file(atom, whole, self.stretches)
        }


def divided(
    owned: dict[str, Held], state: LiveState, prefix: str = "", frozen: Collection[str] = ()
) -> tuple[list[SnapshotChunk], dict[str, Any]]:
    """Return ``chunks_of(...)`` and the index of their content."""
    units = chunks_of(owned, state, prefix, frozen)
    return units, _index_of(units, owned, state)


def chunks_of(
    owned: dict[str, Held], state: LiveState, prefix: str = "", frozen: Collection[str] = ()
) -> list[SnapshotChunk]:
    """Return what is ``owned`` as chunks without files yet.

    The parameters ``frozen`` come first, in chunks without any other.
    """
    groups = _groups(owned, state, frozen)
    return [_unit(prefix, number, *of, owned, state, frozen) for number, of in enumerate(groups)]


def frozen_in(state: LiveState) -> set[str]:
    """Return the parameters of the model that no optimizer trains now, and that this process stores.

    Those of modules beside the model are not among them, because the script changes them after each step.
    """
    return {
        p.name
        for p in state.stored
        if ":" not in p.name and not (p.parameter.requires_grad and state.optimizer_of(p) is not None)
    }


def of_one_base(index: dict[str, Any], timeline: int | None, step: int, prefix: str = "") -> dict[str, Any]:
    """Return ``index`` made unique to one snapshot and one rank.

    So the loss of an index file affects one snapshot only, and no two ranks write the same file.
    """
    return {**index, "timeline": timeline, "step": step, "prefix": prefix}


def owned_by(state: LiveState) -> dict[str, Held]:
    """Return the content of a snapshot of ``state``, by owner."""
    owned = {p.name: state.owned(p) for p in state.stored}
    buffers = state.buffers()
    if buffers:
        owned[BUFFERS] = buffers
    return owned | {key: {key: held} for key, held in state.residuals_held().items()}


def atoms_of(owned: dict[str, Held]) -> dict[str, TensorEntry]:
    """Return the tensor entries of a snapshot, by key."""
    return {key: atom for held in owned.values() for key, (atom, _) in held.items()}


class SnapshotShard:
    """The share of ``stream`` in the snapshot ``base``.

    Its tensors have *owners*: the parameter that they belong to, or all buffers.
    """

    def __init__(self, store: LocalStore, base: Manifest, stream: str) -> None:
        self._store, self._base, self._stream = store, base, stream

    @cached_property
    def atoms(self) -> dict[str, dict[str, Any]]:
        """The tensor entries of the share, by key."""
        return index_of_stream(self._store.disk, self._base, self._stream)["atoms"]

    @cached_property
    def boxes(self) -> dict[str, AnyRegion]:
        """The region of each parameter that the writer stored."""
        return {
            atom["name"]: regions_of(atom["shape"], atom["fragments"])[0]
            for atom in self.atoms.values()
            if atom["slot"] == "param"
        }

    @property
    def files(self) -> dict[str, FileRef]:
        """The files of the share, by chunk."""
        return self._base.files_of(self._stream)

    @cached_property
    def progress(self) -> dict[str, Any]:
        return self._base.progress_of(self._stream)

    @property
    def has_foreign_residuals(self) -> bool:
        """Return whether the share has residuals of parameters that its writer does not store.

        That is so where each rank had residuals of its own.
        """
        return any(
            atom["slot"] == RESIDUAL and f"{atom['name']}/param" not in self.atoms
            for atom in self.atoms.values()
        )

    @property
    def residual_step(self) -> int:
        """The step of the share's residuals; that of the snapshot if it has none."""
        carried = [atom for atom in self.atoms.values() if atom["slot"] in CARRIED]
        return min((self._step_of(f) for atom in carried for f in atom["fragments"]), default=self._base.step)

    @property
    def steps_loaded(self) -> dict[str, int]:
        """The step of each owner's content that is loaded first: all of it, or some rows."""
        return {
            _owner(atom): min(self._step_of(fragment) for fragment in atom["fragments"])
            for atom in self.atoms.values()
            if atom["slot"] not in CARRIED  # always of the commit's own step
        }

    def later_rows(self, names: Collection[str]) -> dict[int, set[str]]:
        """Return by step the chunks with rows of the parameters ``names`` whose other rows are of an earlier step.

        They are loaded when replay has reached that step. Until then replay updates these rows, too, and the result is
        discarded.
        """
        found: dict[int, set[str]] = {}
        for atom in self.atoms.values():
            if atom["name"] not in names:
                continue
            steps = [self._step_of(fragment) for fragment in atom["fragments"]]
            for stored, step in zip(atom["fragments"], steps, strict=True):
                if step > min(steps):
                    found.setdefault(step, set()).add(stored["unit"])
        return found

    def load(
        self,
        state: LiveState,
        units: Collection[str],
        wanted: Collection[str],
        loaded: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Load from the files of ``units`` the content of the owners ``wanted``.

        Args:
            units: The chunks to read.
            wanted: The owners to load. With ``RESIDUAL`` among them, the parameters' residuals as well.
            loaded: Called with the bytes of each file.
        """
        files = {unit: file for unit, file in self.files.items() if unit in units}
        for unit, tensors in _read(self._store, files, loaded):
            told = {self._placed[unit, there]: tensor for there, tensor in tensors.items()}
            found = [(*at, each) for at, each in told.items() if self._is_wanted(at[0], wanted, state)]
            if all(box is None for _, box, _ in found):
                state.load({key: tensor for key, _, tensor in found})
                continue
            # one by one, since an optimizer keeps its state in the order in which it is given
            for key, box, tensor in found:
                if box is None:
                    state.load({key: tensor})
                else:
                    atom = self.atoms[key]
                    state.load_part(atom["name"], atom["slot"], tensor, box)

    @cached_property
    def _placed(self) -> dict[tuple[str, str], tuple[str, Region | None]]:
        """The tensor entry and the region of each stored tensor, by chunk and name in its file.

        The region is None for a tensor that is all that its writer stored of the entry, in that shape.
        """
        return {
            (fragment["unit"], fragment["key"]): (
                key,
                Region.from_json(fragment["global"]) if atom["fragments"][1:] or FLAT in fragment else None,
            )
            for key, atom in self.atoms.items()
            for fragment in atom["fragments"]
        }

    def _is_wanted(self, key: str, wanted: Collection[str], state: LiveState) -> bool:
        """Return whether a tensor belongs to the owners ``wanted``, or is one of this rank's residuals.

        False for subspaces, which an earlier version stored and nothing uses.
        """
        owner, slot = _owner(self.atoms[key]), self.atoms[key]["slot"]
        if slot == SUBSPACE:
            return False
        return owner in wanted or (slot == RESIDUAL and RESIDUAL in wanted and owner in state.boxes)

    def _step_of(self, fragment: dict[str, Any]) -> int:
        step = self._base.files[fragment["unit"]].step
        return self._base.step if step is None else step


def _in_file(
    atom: TensorEntry, held: torch.Tensor, stretches: Mapping[str, FlatRange]
) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that stand for ``held`` in a file, with their keys there."""
    stretch = stretches.get(atom.name)
    if stretch is None or stretch.shape != atom.shape:  # not held as its parameter is
        return [(atom.key, held)]
    return [(_key_in_file(atom, box), view) for box, view in stretch.views(held)]


def _key_in_file(atom: TensorEntry, box: Region) -> str:
    return f"{atom.key}@{','.join(map(str, box.start))}"


def _unit(
    prefix: str,
    number: int,
    owners: tuple[str, ...],
    rows: range | None,
    owned: dict[str, Held],
    state: LiveState,
    frozen: Collection[str],
) -> SnapshotChunk:
    held, stretches = _held_of(owned, owners, rows), _stretches(state, owners, rows)
    entries = [
        (key, atom.dtype, tuple(tensor.shape))
        for atom, whole in held.values()
        for key, tensor in _in_file(atom, whole, stretches)
    ]
    layout = Layout.build(entries, METADATA)
    form, is_frozen = xxhash.xxh3_64_hexdigest(layout.header)[:8], bool(owners) and owners[0] in frozen
    name = f"{prefix}unit_{number:03d}-{form}"
    if is_frozen:  # by what it holds, so that it keeps its name whatever comes and goes before it
        fragments = [
            _fragments("", part, _region_of(state, owned[part.name][key][0], part, rows))
            for key, (part, _) in held.items()
        ]
        name = f"{prefix}frozen-{xxhash.xxh3_64_hexdigest(layout.header + json.dumps(fragments).encode())}"
    return SnapshotChunk(
        name, owners, layout, late=_is_late(held), rows=rows, stretches=stretches, is_frozen=is_frozen
    )


def _stretches(state: LiveState, owners: Sequence[str], rows: range | None) -> dict[str, FlatRange]:
    regions = {name: state.boxes.get(name) for name in owners}
    found = {name: region for name, region in regions.items() if isinstance(region, FlatRange)}
    return found if rows is None else {name: stretch.rows(rows) for name, stretch in found.items()}


def _held_of(owned: Mapping[str, Held], owners: Sequence[str], rows: range | None) -> Held:
    held = {key: found for owner in owners for key, found in owned[owner].items()}
    return held if rows is None else _rows_of(held, rows)


def _groups(
    owned: dict[str, Held], state: LiveState, frozen: Collection[str] = ()
) -> list[tuple[tuple[str, ...], range | None]]:
    """Return groups of owners, each with the rows it covers, None for all.

    Owners stay in order, but ``frozen`` ones come first, apart. Overlapping owners stay together. Groups are joined to
    about ``UNIT_BYTES``; a larger owner is divided by rows. Residuals come last, apart. A rank that stores nothing has
    one empty group, so that it has a share of the snapshot all the same.
    """
    found: list[tuple[tuple[str, ...], range | None]] = []
    # an optimizer that needs the whole state at once has all chunks at one step
    bundles = state.bundles() if all(map(is_elementwise, state.optimizers)) else []
    bundled = {owner for bundle in bundles for owner in bundle}

    def place(owners: list[str]) -> int:
        return 0 if all(owner in frozen for owner in owners) else 2 if _is_late(owned[owners[0]]) else 1

    for _, alike in groupby(sorted(_together(owned, bundles), key=place), place):
        for group in packed(alike, lambda owners: sum(_bytes_of(owned[o]) for o in owners), UNIT_BYTES):
            first, names = group[0][0], tuple(owner for owners in group for owner in owners)
            is_large = _bytes_of(owned[first]) > UNIT_BYTES  # then it is alone in its group
            if is_large and first not in bundled and _has_rows(first, owned[first], state):
                found += [(names, rows) for rows in _divided_rows(owned[first])]
            else:
                found.append((names, None))
    return found or [((), None)]


def _together(owned: Mapping[str, Held], bundles: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the owners in order, each with those whose tensors overlap its own.

    A chunk has all of such a group or none.
    """
    group_of = {owner: [owner] for owner in owned}
    for bundle in bundles:
        joined = {other for owner in bundle if owner in owned for other in group_of[owner]}
        in_order = [owner for owner in owned if owner in joined]
        group_of |= dict.fromkeys(joined, in_order)
    return [group for owner, group in group_of.items() if group[0] == owner]


def _is_late(held: Held) -> bool:
    """Return whether no log record brings forward what is held."""
    return any(atom.slot in CARRIED for atom, _ in held.values())


def _bytes_of(held: Held) -> int:
    return sum(atom.nbytes for atom, _ in held.values())


def _has_rows(owner: str, held: Held, state: LiveState) -> bool:
    """Return whether rows of a parameter can be of other steps than the rest.

    That needs an elementwise optimizer whose state is either of the parameter's shape or one number for all rows.
    """
    if any(atom.slot in ("buffer", *CARRIED) for atom, _ in held.values()):
        return False
    index = state.optimizer_of(state.parameter(owner))
    whole = _whole_shape(held)
    alike = all(atom.shape == whole or prod(atom.shape) == 1 for atom, _ in held.values())
    return alike and len(whole) > 0 and (index is None or is_elementwise(state.optimizers[index]))


def _divided_rows(held: Held) -> list[range]:
    """Divide the rows of a parameter into ranges of at most ``UNIT_BYTES`` with their state, at least one row each."""
    rows = _whole_shape(held)[0]
    count = -(-rows // max(rows * UNIT_BYTES // _bytes_of(held), 1))
    return [range(rows * i // count, rows * (i + 1) // count) for i in range(count)]


def _rows_of(held: Held, rows: range) -> Held:
    """Return the part of an owner's content that belongs to ``rows``."""
    whole = _whole_shape(held)
    part: Held = {}
    for key, (atom, tensor) in held.items():
        if atom.shape == whole:
            there = replace(atom, shape=(len(rows), *whole[1:]))
            part[key] = there, tensor.narrow(0, rows.start, len(rows))
        elif rows.start == 0:
            part[key] = atom, tensor
    return part


def _whole_shape(held: Held) -> tuple[int, ...]:
    """Return the shape of the parameter, which is the first entry of an owner."""
    return next(iter(held.values()))[0].shape


def _index_of(units: Sequence[SnapshotChunk], owned: dict[str, Held], state: LiveState) -> dict[str, Any]:
    atoms: dict[str, Any] = {}
    whole = atoms_of(owned)
    for unit in units:
        for key, (part, _) in unit.held_of(owned).items():
            atom = whole[key]
            known = replace(atom, shape=state.place_of(atom)[0]).to_json()
            region = _region_of(state, atom, part, unit.rows)
            atoms.setdefault(key, known | {"fragments": []})["fragments"] += _fragments(
                unit.name, part, region
            )
    atoms = {key: atoms[key] for key in whole}  # fingerprints are of parameters in the order of the model
    if not atoms:  # so that two ranks that store nothing write two different files
        return {"version": 1, "units": [unit.name for unit in units], "atoms": atoms}
    return {"version": 1, "atoms": atoms}


def _region_of(state: LiveState, atom: TensorEntry, part: TensorEntry, rows: range | None) -> AnyRegion:
    """Return the region of the whole tensor that ``part`` is: all that this process holds of ``atom``, or ``rows``."""
    region = state.place_of(atom)[1]
    return region.rows(rows) if part.shape != atom.shape and rows is not None else region


def _fragments(unit: str, part: TensorEntry, region: AnyRegion) -> list[dict[str, Any]]:
    """Return the fragments of ``part``, which is stored in ``unit`` and is ``region`` of the whole tensor."""
    if isinstance(region, Region):
        return [fragment(unit, part.key, region)]
    return [
        fragment(unit, _key_in_file(part, box), box) | {FLAT: list(elements)}
        for box, elements in zip(region.boxes, region.ranges, strict=True)
    ]


def _owner(atom: dict[str, Any]) -> str:
    return BUFFERS if atom["slot"] == "buffer" else atom["name"]


def _read(
    store: LocalStore, files: Mapping[str, FileRef], loaded: Callable[[int], None]
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield the verified tensors of each of ``files``, by chunk, with as many files read ahead as there are drives.

    The memory of the tensors is reused by later files.
    """
    units, refs = list(files), list(files.values())
    ahead = len({ref.path.rpartition("/")[0] for ref in refs})
    buffers = [Buffer(max((ref.bytes for ref in refs), default=1), "recovery") for _ in range(ahead + 1)]
    futures: list[tuple[memoryview, Future]] = []
    try:
        for number in range(len(refs) + ahead):
            if number < len(refs):
                view = buffers[number % len(buffers)].view[: refs[number].bytes]
                futures.append((view, read_file(store.disk, store.queue, refs[number], view)))
            if number >= ahead:
                view, future = futures[number - ahead]
                future.result()
                loaded(len(view))
                yield units[number - ahead], tensors_of(view)
    finally:
        for _, future in futures:
            future.exception()
        for buffer in buffers:
            buffer.free()
