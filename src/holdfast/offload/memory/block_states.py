"""The units of a model: the bytes of one block (or of the resident rest) in each of their forms.

A unit has *state images* (fp32 master, optimizer state and counters of its trained parameters, exactly the bytes of a
generation file), a *frozen image* (parameters that never change), a *compute copy* (every parameter in the compute
dtype, which the device reads) and *gradients* (fp32). All four are flat, with fixed offsets; tensors are views. A
change of micro-batches, fractions or schedule changes none of them.

The state of a large unit is cut into *tiles* of about ``TILE_BYTES``, each with a file and an image of its own, so that
an update needs a few tiles in memory and never a whole block. A tile is cut where ranks are: between rows, where an
update of a part equals that part of the update. Optimizers that need a whole tensor have it in one tile.

In bf16 the masters of a block are *split* (``state/split_masters``): a pass reads the compute copy, which is a part of
the masters, from the newest files of the state (``unit_files``). It is not stored a second time.

With several ranks each has its ``pieces`` of a unit. Its images hold only these, while a compute copy that computes and
gradients that are being summed are those of the whole unit on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...errors import ModelNotSupported
from ...io.buffers import Buffer
from ...optim.declared_state import Form, Slots
from ...optim.host_optimizer import HostOptimizer, ParameterState, copied, round_to_24_bits
from ...quantities import PAGE, round_up
from ...schedule.work import tile_count
from ...state.capture import BufferPlace, buffer_at
from ...state.layout.regions import Region
from ...state.plain_tensors import TO_NAME
from ...state.tensor_entries import STEP, TensorEntry
from ...store.format.payload_layout import SMALL_ALIGNMENT, Layout
from ..model.blocks import Owned
from .parameter_shards import (
    CopyPart,
    ParameterEntry,
    ParameterShard,
    RowRange,
    copy_parts,
    divided,
    joined,
    memory_order,
    range_of,
)
from .unit_files import EXPERTS, FROZEN, TILE, ExpertFile, PlacedEntry, StateTile, UnitFile

ALIGN = 256
"""Bytes. Tensors in compute copies, gradients and packed inputs start at multiples of it.

cuBLASLt chooses its algorithm, and so the last bits, by alignment up to this value. A tensor that torch allocates has
at least this alignment.
"""


def as_tensor(buffer: Buffer) -> torch.Tensor:
    """Return the bytes of a buffer as a uint8 tensor that shares them."""
    return torch.frombuffer(buffer.view, dtype=torch.uint8)


class BlockState:
    """The forms of one unit's bytes."""

    def __init__(
        self,
        name: str,
        owned: Sequence[Owned],
        optimizer: HostOptimizer,
        dtype: torch.dtype,
        buffers: dict[str, BufferPlace] | None = None,
        absent: dict[str, BufferPlace] | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        prefix: str = "",
        may_split: bool = False,
        routed: Collection[str] = (),
    ) -> None:
        """Lay the unit out. ``prefix`` begins the names of this rank's files.

        Masters are split if they ``may_split`` and their high parts can be the compute copy of one process. The frozen
        parameters in ``routed`` are experts, which are read one by one and are no part of the compute copy.
        """
        self.name, self.dtype, self._optimizer, self.may_split = name, dtype, optimizer, may_split
        self._slots: dict[tuple[int, tuple[int, ...]], Slots] = {}
        experts = [one for one in owned if one.captured.name in routed]
        owned = [one for one in owned if one.captured.name not in routed]
        self.routed = [ParameterEntry(one, -1, -1, _copy_dtype(one, dtype)) for one in experts]
        """The same as entries, which are not among ``members``: they have no place in the compute copy."""
        trains_alone = world_size == 1 and optimizer.takes_gradients
        self.is_split = may_split and trains_alone and _can_split(owned, dtype)
        """True if the files of the state hold the masters in parts."""
        self.computes_with_frozen_file = trains_alone and _is_copy(owned, dtype)
        """True if the bytes of the frozen file are the frozen part of the compute copy."""
        self.buffers, self._absent = buffers or {}, absent or {}
        count = self._tile_count(owned, world_size)
        self.members = self._place(owned, ALIGN if count == 1 else PAGE)
        self.trained = [m for m in self.members if m.trained]
        self.frozen = [m for m in self.members if not m.trained]
        divided_pieces = self._divide(rank, world_size, count)
        self.tiles = [self._tile(index, pieces, count) for index, pieces in enumerate(divided_pieces)]
        """The parts of the state, each in a file of its own."""
        self.copy_parts = self._parts_by_tile()
        """This rank's shard of the compute copy as the scratch holds it: the part of each tile, and the frozen part."""
        starts = [min((piece.grad_at for piece in tile.pieces), default=None) for tile in self.tiles]
        self.tile_grads = _ranges(starts, self.share_grad_bytes)
        """Range of bytes of each tile in this rank's shard of the gradients."""
        self.frozen_file = UnitFile(
            self.frozen_pieces, _frozen_entries(self.frozen_pieces), _alignment(owned)
        )
        """The parameters that never change, except for experts that are read one by one."""
        self.owners |= {member.name: [(0, member.elements)] for member in self.routed}
        whole = [ParameterShard(member, 0, member.elements, -1, -1) for member in self.routed]
        self.expert_file = ExpertFile(whole, _frozen_entries(whole), ALIGN)
        """The parameters of experts that are read one by one."""
        self._name_files(prefix)

    def _place(self, owned: Sequence[Owned], alignment: int) -> list[ParameterEntry]:
        """Place the trained parameters in the compute copy and in the gradients, and then the frozen ones.

        Trained parameters start at multiples of ``alignment`` in the compute copy: tiles are written by themselves, so
        no page of the copy belongs to two of them.
        """
        members: list[ParameterEntry] = []
        frozen_layout = _frozen_layout(owned)
        copy_end = grad_end = 0
        for trained in (True, False):
            for one in owned:
                if one.captured.trained != trained:
                    continue
                elements = one.captured.parameter.numel()
                kind = _copy_dtype(one, self.dtype)
                if not trained and self.computes_with_frozen_file:
                    offset = self.trained_copy_bytes + frozen_layout[f"{one.captured.name}/param"].offset
                    members.append(ParameterEntry(one, offset, -1, kind))
                    continue
                members.append(ParameterEntry(one, copy_end, grad_end if trained else -1, kind))
                copy_end = round_up(copy_end + elements * kind.itemsize, alignment)
                grad_end = round_up(grad_end + elements * 4, ALIGN) if trained else grad_end
            copy_end = round_up(copy_end)
            if trained:
                self.trained_copy_bytes = copy_end
        self.copy_bytes = copy_end + (frozen_layout.file_bytes if self.computes_with_frozen_file else 0)
        self.grad_bytes = round_up(grad_end) if self._optimizer.takes_gradients else 0
        return members

    def _tile(self, index: int, pieces: Sequence[ParameterShard], count: int) -> StateTile:
        """Return tile ``index`` of ``count``. The first one has the buffers."""
        entries = self._state_entries(pieces, self.buffers if index == 0 else {})
        if not (self.is_split and pieces):
            return StateTile(pieces, entries, self.dtype.itemsize, index)
        bits = {piece.name: self.member_slots(piece.member).master_bits for piece in pieces}
        return StateTile(
            pieces, entries, self.dtype.itemsize, index, ALIGN if count == 1 else PAGE, master_bits=bits
        )

    def _tile_count(self, owned: Sequence[Owned], world_size: int) -> int:
        """Return the number of tiles that hold a rank's share of the state of ``owned``."""
        if not self._optimizer.takes_gradients:
            return 1
        nbytes = 0
        for captured in (one.captured for one in owned if one.captured.trained):
            assert captured.group is not None
            kept = self._optimizer.slots(captured.group, captured.shape).tensors.values()
            nbytes += 4 * captured.parameter.numel()
            nbytes += sum(math.prod(form.shape) * form.dtype.itemsize for form in kept)
        return tile_count(nbytes // world_size)

    def _name_files(self, prefix: str) -> None:
        """Name the files.

        A file never changes its size. The number of ranks and of tiles and the order of dims in memory decide what each
        has, so with several the name identifies the content.
        """
        count = len(self.tiles)
        for tile in self.tiles:
            part = "" if count == 1 and not tile.is_split else f"{TILE}{tile.index}of{count}"
            tile.name = f"{prefix}{self.name}{part}" + (f"-{tile.digest()}" if prefix or part else "")
        frozen = self.frozen_file
        changes = prefix or self.routed or any(entry.dtype != "F32" for entry in frozen.entries)
        frozen.name = f"{prefix}{self.name}{FROZEN}" + (f"-{frozen.digest()}" if changes else "")
        self.expert_file.name = f"{prefix}{self.name}{EXPERTS}-{self.expert_file.digest()}"

    def _divide(self, rank: int, world_size: int, count: int) -> list[list[ParameterShard]]:
        """Divide the unit over the ranks, and return the fragments in each of the ``count`` tiles of this rank."""
        cut = divided([(m.shape, self._cuts(m)) for m in self.trained], world_size * count)
        trained = [joined(cut[first : first + count]) for first in range(0, len(cut), count)]
        frozen = divided([(m.shape, True) for m in self.frozen], world_size)
        self.owners: dict[str, list[tuple[int, int]]] = {m.name: [(0, 0)] * world_size for m in self.members}
        """Range of elements that each rank has of each parameter, by parameter name."""
        for members, divisions in ((self.trained, trained), (self.frozen, frozen)):
            for owner, parts in enumerate(divisions):
                for index, start, stop in parts:
                    self.owners[members[index].name][owner] = start, stop
        self.copy_ranges = [
            [
                range_of(self.trained, t, _place_in_copy),
                range_of(self.frozen, f, _place_in_copy),
            ]
            for t, f in zip(trained, frozen, strict=True)
        ]
        """Byte ranges of the compute copy of each rank: of trained and of frozen parameters."""
        self.grad_ranges = [range_of(self.trained, t, lambda m: (m.grad_offset, 4)) for t in trained]
        if self.computes_with_frozen_file:
            self.copy_ranges[0][1] = self.trained_copy_bytes, self.copy_bytes  # with header and filler
        self._trained_part, self._frozen_part = copy_parts(self.copy_ranges[rank])
        first = self.grad_ranges[rank][0]
        shifts = [part.start - part.at for part in (self._trained_part, self._frozen_part)]
        size = self.dtype.itemsize

        def shards(ranges: Sequence[RowRange]) -> list[ParameterShard]:
            found = ((self.trained[i], start, stop) for i, start, stop in ranges)
            return [
                ParameterShard(
                    m,
                    start,
                    stop,
                    m.copy_offset + start * size - shifts[0],
                    m.grad_offset + start * 4 - first,
                )
                for m, start, stop in found
            ]

        self.pieces = shards(trained[rank])
        self.frozen_pieces = [
            ParameterShard(m, start, stop, m.copy_offset + start * m.copy_dtype.itemsize - shifts[1], -1)
            for m, start, stop in ((self.frozen[i], start, stop) for i, start, stop in frozen[rank])
        ]
        self.share_copy_bytes = self._frozen_part.end
        self.share_trained_copy_bytes = self._trained_part.end
        start, stop = self.grad_ranges[rank]
        self.share_grad_bytes = round_up(stop - start)
        self.gathered_bytes = sum(b - a for ranges in self.copy_ranges for a, b in ranges)
        self.gathered_bytes -= sum(b - a for a, b in self.copy_ranges[rank])
        """Bytes of a compute copy that other ranks send."""
        self.reduced_bytes = (stop - start) * (world_size - 1)
        """Bytes of gradients that other ranks send."""
        return [shards(ranges) for ranges in cut[rank * count : (rank + 1) * count]]

    def _parts_by_tile(self) -> list[CopyPart]:
        shift = self._trained_part.start - self._trained_part.at
        ends = ((tile.copy_start, tile.copy_start + tile.copy_bytes) for tile in self.tiles)
        trained = [CopyPart(at, at + shift, end + shift) for at, end in ends if at < end]
        return trained if self.computes_with_frozen_file else [*trained, self._frozen_part]

    def _cuts(self, member: ParameterEntry) -> bool:
        """Return whether ``member`` may be divided: by its optimizer, and by its place in memory."""
        return self._optimizer.cuts(member.group) and member.order is None

    @property
    def state_bytes(self) -> int:
        """Bytes of all files of the state."""
        return sum(tile.layout.file_bytes for tile in self.tiles)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the scratch for this rank's shard of the compute copy."""
        return self.copy_parts[-1].end if self.copy_parts else 0

    @property
    def files(self) -> list[UnitFile]:
        """All files of the unit."""
        return [*self.tiles, *self.frozen_files]

    @property
    def frozen_files(self) -> list[UnitFile]:
        """The files of what never changes."""
        frozen = [self.frozen_file] if self.frozen else []
        return [*frozen, self.expert_file] if self.routed else frozen

    @property
    def all_members(self) -> list[ParameterEntry]:
        """All parameters of the unit: those of the compute copy, and experts that are read one by one."""
        return [*self.members, *self.routed]

    @property
    def elements(self) -> int:
        """Number of trained elements."""
        return sum(m.elements for m in self.trained)

    def kept(self, member: ParameterEntry | ParameterShard) -> Slots:
        """Return what the optimizer keeps for a parameter, or for a fragment of one."""
        return self._optimizer.slots(member.group, member.shape)

    def member_slots(self, member: ParameterEntry | ParameterShard) -> Slots:
        """Return what the optimizer keeps for a parameter or a fragment, with the count of its updates."""
        key = member.group, member.shape
        if key not in self._slots:
            slots = self.kept(member)
            self._slots[key] = replace(slots, scalars={**slots.scalars, STEP: torch.float32})
        return self._slots[key]

    def _state_entries(
        self, pieces: Sequence[ParameterShard], buffers: Mapping[str, BufferPlace]
    ) -> list[PlacedEntry]:
        """Return the entries of ``pieces``: parameters, then state name by state name, then counters and buffers."""
        found = [_placed(TensorEntry(p.name, "param", p.shape, "F32"), p.member.shape, p.box) for p in pieces]
        slots = [(p, self.member_slots(p), self.member_slots(p.member)) for p in pieces]
        names = dict.fromkeys(name for _, here, _ in slots for name in here.tensors)
        for name in names:
            for p, here, whole in slots:
                if name in here.tensors:
                    form = whole.tensors[name]
                    found.append(
                        _placed(_entry(p, name, here.tensors[name]), tuple(form.shape), p.box_in(form))
                    )
        found += [
            _placed(TensorEntry(p.name, name, (), TO_NAME[dtype]))
            for p, here, _ in slots
            for name, dtype in here.scalars.items()
        ]
        for name, place in buffers.items():
            buffer = buffer_at(place)
            found.append(_placed(TensorEntry(name, "buffer", tuple(buffer.shape), TO_NAME[buffer.dtype])))
        return found

    # Views

    def copy_view(self, copy: torch.Tensor, member: ParameterEntry) -> torch.Tensor:
        """Return a parameter inside a compute copy."""
        end = member.copy_offset + member.elements * member.copy_dtype.itemsize
        return member.arranged(copy[member.copy_offset : end].view(member.copy_dtype))

    def grad_view(self, grads: torch.Tensor, member: ParameterEntry) -> torch.Tensor:
        """Return a parameter's gradient inside the gradients."""
        end = member.grad_offset + member.elements * 4
        return grads[member.grad_offset : end].view(torch.float32).view(member.shape)

    def piece_of_copy(self, copy: torch.Tensor, piece: ParameterShard, start: int | None = 0) -> torch.Tensor:
        """Return a fragment inside a compute copy.

        ``copy`` is this rank's shard of it from the offset ``start`` on; the whole copy if None.
        """
        dtype = piece.member.copy_dtype
        size = dtype.itemsize
        start = piece.member.copy_offset + piece.start * size if start is None else piece.copy_at - start
        flat = copy[start : start + piece.elements * size].view(dtype)
        return piece.member.arranged(flat) if piece.is_whole else flat.view(piece.shape)

    def piece_of_grads(self, grads: torch.Tensor, piece: ParameterShard, start: int = 0) -> torch.Tensor:
        """Return a fragment inside this rank's shard of the gradients, given from the offset ``start`` on."""
        first = piece.grad_at - start
        return grads[first : first + piece.elements * 4].view(torch.float32).view(piece.shape)

    def parameter_state(
        self,
        tile: StateTile,
        piece: ParameterShard,
        image: torch.Tensor,
        grad: torch.Tensor,
        copy: torch.Tensor | None,
    ) -> ParameterState:
        """Return what the host optimizer needs of one parameter, or of a fragment of it, as views.

        ``grad`` and ``copy`` are the fragment's gradient and its place in the compute copy.
        """
        slots = self.member_slots(piece)

        def view(slot: str) -> torch.Tensor:
            return tile.view(image, piece.name, slot)

        return ParameterState(
            param=tile.master(image, piece.name),
            grad=grad,
            tensors={slot: view(slot) for slot in slots.tensors},
            scalars={slot: view(slot) for slot in slots.scalars},
            copy=copy,
            group=piece.group,
            order=piece.member.order,
        )

    # Conversions of whole files, used when a run begins or resumes

    def write_copy(
        self, file: UnitFile, image: torch.Tensor, copy: torch.Tensor, start: int | None = 0
    ) -> None:
        """Derive from the ``image`` of a file its part of the compute copy.

        ``copy`` is this rank's shard of it from the offset ``start`` on; the whole copy if None.
        """
        if file is self.expert_file:
            return
        for piece in file.pieces:
            self.piece_of_copy(copy, piece, start).copy_(copied(file.master(image, piece.name)))

    def write_image(self, file: UnitFile, values: dict[str, torch.Tensor], image: torch.Tensor) -> None:
        """Fill a fresh image of ``file``: parameters from ``values`` by name, everything else zero.

        Masters of 24 bits are rounded, in parts or whole. Raises ``BadInput`` for a value that the file's dtype does
        not hold.
        """
        image.zero_()
        for piece in file.pieces:
            file.set_values(image, piece.name, piece.of(values[piece.name]))
            is_master = piece.member.trained and not file.is_split
            if is_master and self.member_slots(piece.member).master_bits == 24:
                round_to_24_bits(file.view(image, piece.name))
        if file is self.tiles[0]:
            self.write_buffers(image, self.buffer_values())

    def boxes_of(self, piece: ParameterShard) -> dict[str, Region]:
        """Return the fragment's region of each tensor that the optimizer keeps for its parameter, by state name."""
        return {slot: piece.box_in(form) for slot, form in self.member_slots(piece.member).tensors.items()}

    def write_state(
        self, tile: StateTile, piece: ParameterShard, image: torch.Tensor, state: dict[str, Any]
    ) -> None:
        """Write the optimizer state that exists for ``piece``, if there is any."""
        slots = self.member_slots(piece.member)
        for slot in slots.tensors:
            if slot in state:
                tile.view(image, piece.name, slot).copy_(state[slot])
        for slot in slots.scalars:
            if slot in state:
                tile.view(image, piece.name, slot).copy_(torch.as_tensor(state[slot]))
        if state and STEP not in state:
            tile.view(image, piece.name, STEP).fill_(1)

    def buffer_values(self) -> dict[str, torch.Tensor]:
        """Return the model's persistent buffers as they are now, by name."""
        for name, (module, key) in self._absent.items():
            if module._buffers.get(key) is not None:
                raise ModelNotSupported(
                    f"buffer {name} was None when the run began and is a tensor now, which no commit would hold. Make "
                    "it before offload(), with the shape it will have, or register it with persistent=False."
                )
        return {name: buffer_at(place).clone() for name, place in self.buffers.items()}

    def write_buffers(self, state: torch.Tensor, values: dict[str, torch.Tensor]) -> None:
        """Copy the result of ``buffer_values`` into the image of the first tile."""
        for name, buffer in values.items():
            view = self.tiles[0].view(state, name, "buffer")
            if (view.shape, view.dtype) != (buffer.shape, buffer.dtype):
                raise ModelNotSupported(
                    f"buffer {name} was {view.dtype} {tuple(view.shape)} and is {buffer.dtype} {tuple(buffer.shape)} "
                    "now; the state of a run keeps its shapes."
                )
            view.copy_(buffer)

    def read_buffers(self, state: torch.Tensor) -> None:
        """Set the model's persistent buffers from the image of the first tile."""
        for name, place in self.buffers.items():
            buffer_at(place).copy_(self.tiles[0].view(state, name, "buffer"))


def _place_in_copy(member: ParameterEntry) -> tuple[int, int]:
    """Return the offset of a parameter in the compute copy, and the bytes of one of its elements."""
    return member.copy_offset, member.copy_dtype.itemsize


def _entry(piece: ParameterShard, slot: str, form: Form) -> TensorEntry:
    return TensorEntry(piece.name, slot, form.shape, TO_NAME[form.dtype])


def _ranges(starts: Sequence[int | None], stop: int) -> list[tuple[int, int]]:
    """Return ranges that cover everything up to ``stop``; one without a start is empty.

    >>> _ranges([0, None, 8], 16)
    [(0, 8), (8, 8), (8, 16)]
    """
    found: list[tuple[int, int]] = []
    for start in reversed(starts):
        found.append((stop if start is None else start, stop))
        stop = found[-1][0]
    return found[::-1]


def _copy_dtype(owned: Owned, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a parameter of a unit that computes in ``dtype`` is computed with."""
    return owned.captured.parameter.dtype if owned.captured.as_stored else dtype


def _frozen_entries(pieces: Sequence[ParameterShard]) -> list[PlacedEntry]:
    """Return the tensor entries of fragments of frozen parameters."""
    return [
        _placed(TensorEntry(p.name, "param", p.shape, _stored_dtype(p.member.owned)), p.member.shape, p.box)
        for p in pieces
    ]


def _stored_dtype(owned: Owned) -> str:
    """Return the dtype in which a frozen parameter is stored: that of its values, if it is one of 16 bits or packed."""
    dtype = owned.captured.stored or owned.captured.parameter.dtype
    if owned.captured.as_stored:
        return TO_NAME[owned.captured.parameter.dtype]
    return TO_NAME[dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32]


def _frozen_layout(owned: Sequence[Owned]) -> Layout:
    """Return the layout of the frozen file of a process that trains by itself."""
    frozen = [one for one in owned if not one.captured.trained]
    return Layout.build(
        [(f"{one.captured.name}/param", _stored_dtype(one), one.captured.shape) for one in frozen],
        alignment=_alignment(owned),
    )


def _alignment(owned: Sequence[Owned]) -> int:
    """Return the alignment of small tensors in a frozen file; that of fp32 alone is as in all runs before."""
    narrow = any(_stored_dtype(one) != "F32" for one in owned if not one.captured.trained)
    return ALIGN if narrow else SMALL_ALIGNMENT


def _can_split(owned: Sequence[Owned], dtype: torch.dtype) -> bool:
    """Return whether the high parts of the masters can be the compute copy: in bf16, in the usual memory order."""
    trained = [one.captured.parameter for one in owned if one.captured.trained]
    return dtype == torch.bfloat16 and bool(trained) and all(memory_order(each) is None for each in trained)


def _is_copy(owned: Sequence[Owned], dtype: torch.dtype) -> bool:
    """Return whether frozen parameters are stored as the device computes with them.

    Each is packed or in 16 bits, and in the usual memory order.
    """
    frozen = [one for one in owned if not one.captured.trained]
    if dtype == torch.float32 and not any(one.captured.as_stored for one in frozen):
        return False
    return bool(frozen) and all(
        (one.captured.as_stored or _stored_dtype(one) == TO_NAME[dtype])
        and memory_order(one.captured.parameter) is None
        for one in frozen
    )


def _placed(
    entry: TensorEntry, shape: tuple[int, ...] | None = None, box: Region | None = None
) -> PlacedEntry:
    """Return ``entry`` with its place; by default it is whole."""
    return PlacedEntry(entry, shape or entry.shape, box or Region.whole(entry.shape))
