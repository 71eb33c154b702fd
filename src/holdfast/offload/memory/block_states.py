"""The units of a model: the bytes of one block (or of the resident rest) in each of their forms.

A unit has a *state image* (fp32 master, optimizer state and counters of its trained parameters, exactly the bytes of
its generation file), a *frozen image* (parameters that never change), a *compute copy* (every parameter in the compute
dtype, which the device reads) and *gradients* (fp32). All four are flat, with fixed offsets; tensors are views. A
change of micro-batches, fractions or schedule changes none of them.

With several ranks each has its ``pieces`` of a unit. Its images hold only these, while a compute copy that computes and
gradients that are being summed are those of the whole unit on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import xxhash

from ...errors import ModelNotSupported
from ...io.buffers import Buffer
from ...optim.declared_state import Form, Slots
from ...optim.host_optimizer import HostOptimizer, ParameterState
from ...quantities import round_up
from ...state.capture import BufferPlace, buffer_at
from ...state.layout.regions import Region
from ...state.plain_tensors import FROM_NAME, TO_NAME
from ...state.tensor_entries import STEP, TensorEntry
from ...store.format.file_names import Layout
from ..model.blocks import Owned
from .parameter_shards import ParameterShard, copy_parts, divided, range_of

ALIGN = 256
"""Bytes. Tensors in compute copies, gradients and packed inputs start at multiples of it.

cuBLASLt chooses its algorithm, and so the last bits, by alignment up to this value. A tensor that torch allocates has
at least this alignment.
"""


def as_tensor(buffer: Buffer) -> torch.Tensor:
    """Return the bytes of a buffer as a uint8 tensor that shares them."""
    return torch.frombuffer(buffer.view, dtype=torch.uint8)


@dataclass(frozen=True, eq=False)
class ParameterEntry:
    """One parameter of a unit, with its offsets in bytes. ``grad_offset`` is -1 for a frozen one."""

    owned: Owned
    copy_offset: int
    grad_offset: int

    @property
    def name(self) -> str:
        return self.owned.captured.name

    @property
    def trained(self) -> bool:
        return self.owned.captured.trained

    @property
    def shape(self) -> tuple[int, ...]:
        return self.owned.captured.shape

    @property
    def elements(self) -> int:
        return self.owned.captured.parameter.numel()

    @property
    def group(self) -> int:
        assert self.owned.captured.group is not None
        return self.owned.captured.group

    @cached_property
    def order(self) -> tuple[int, ...] | None:
        """Dims from the slowest to the fastest in memory, as for ``channels_last``; None if contiguous.

        Kernels, and so the last bits, depend on the order: compute copies have it, and files do not.
        """
        return memory_order(self.owned.captured.parameter)

    def arranged(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the elements in ``flat`` in the parameter's shape, laid out as the parameter is."""
        if self.order is None:
            return flat.view(self.shape)
        there = flat.view([self.shape[dim] for dim in self.order])
        return there.permute([self.order.index(dim) for dim in range(len(self.order))])


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dims of ``tensor`` from the slowest to the fastest in memory; None if that is their order."""
    strides = torch.empty_like(tensor, device="meta").stride()  # those of a clone, without gaps
    dims = [dim for dim, size in enumerate(tensor.shape) if size != 1]
    order = sorted(dims, key=lambda dim: -strides[dim])
    if order == dims or not tensor.numel():
        return None
    return (*(dim for dim, size in enumerate(tensor.shape) if size == 1), *order)


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
    ) -> None:
        """Lay the unit out. ``prefix`` begins the names of this rank's files."""
        self.name, self.dtype, self._optimizer = name, dtype, optimizer
        self.buffers, self._absent = buffers or {}, absent or {}
        self.members: list[ParameterEntry] = []
        copy_end = grad_end = 0
        for trained in (True, False):
            for one in owned:
                if one.captured.trained != trained:
                    continue
                elements = one.captured.parameter.numel()
                self.members.append(ParameterEntry(one, copy_end, grad_end if trained else -1))
                copy_end = round_up(copy_end + elements * dtype.itemsize, ALIGN)
                grad_end = round_up(grad_end + elements * 4, ALIGN) if trained else grad_end
            copy_end = round_up(copy_end)
            if trained:
                self.trained_copy_bytes = copy_end
        self.copy_bytes = copy_end
        self.grad_bytes = round_up(grad_end) if optimizer.takes_gradients else 0
        self.trained = [m for m in self.members if m.trained]
        self.frozen = [m for m in self.members if not m.trained]
        self._divide(rank, world_size)
        self.places: dict[str, tuple[tuple[int, ...], Region]] = {}
        """Shape of the whole tensor entry, and the region stored here, by key of each entry that is stored here."""
        self.state_atoms = self._state_atoms()
        self.frozen_atoms = [
            self._placed(TensorEntry(p.name, "param", p.shape, "F32"), p.member.shape, p.box)
            for p in self.frozen_pieces
        ]
        self.layout = _layout(self.state_atoms)
        self.frozen_layout = _layout(self.frozen_atoms)
        self.file_name = self._file_name(prefix, name, self.layout)
        """Name of the file of the unit's state, as commits use it."""
        self.frozen_name = self._file_name(prefix, f"{name}.frozen", self.frozen_layout)
        """Name of the file that holds the parameters which never change."""

    def _divide(self, rank: int, world_size: int) -> None:
        """Divide the unit over the ranks."""
        trained = divided([(m.shape, self._optimizer.cuts(m.group)) for m in self.trained], world_size)
        frozen = divided([(m.shape, True) for m in self.frozen], world_size)
        self.owners: dict[str, list[tuple[int, int]]] = {m.name: [(0, 0)] * world_size for m in self.members}
        """Range of elements that each rank has of each parameter, by parameter name."""
        for members, divisions in ((self.trained, trained), (self.frozen, frozen)):
            for owner, parts in enumerate(divisions):
                for index, start, stop in parts:
                    self.owners[members[index].name][owner] = start, stop
        self.copy_ranges = [
            [
                range_of(self.trained, t, lambda m: m.copy_offset, self.dtype.itemsize),
                range_of(self.frozen, f, lambda m: m.copy_offset, self.dtype.itemsize),
            ]
            for t, f in zip(trained, frozen, strict=True)
        ]
        """Byte ranges of the compute copy of each rank: of trained and of frozen parameters."""
        self.grad_ranges = [range_of(self.trained, t, lambda m: m.grad_offset, 4) for t in trained]
        self.copy_parts = copy_parts(self.copy_ranges[rank])
        """This rank's shard of the compute copy: its trained and its frozen part."""
        first = self.grad_ranges[rank][0]
        shifts = [part.start - part.at for part in self.copy_parts]
        size = self.dtype.itemsize
        self.pieces = [
            ParameterShard(
                m, start, stop, m.copy_offset + start * size - shifts[0], m.grad_offset + start * 4 - first
            )
            for m, start, stop in ((self.trained[i], start, stop) for i, start, stop in trained[rank])
        ]
        self.frozen_pieces = [
            ParameterShard(m, start, stop, m.copy_offset + start * size - shifts[1], -1)
            for m, start, stop in ((self.frozen[i], start, stop) for i, start, stop in frozen[rank])
        ]
        self.share_copy_bytes = self.copy_parts[-1].end
        self.share_trained_copy_bytes = self.copy_parts[0].end
        start, stop = self.grad_ranges[rank]
        self.share_grad_bytes = round_up(stop - start)
        self.gathered_bytes = sum(b - a for ranges in self.copy_ranges for a, b in ranges)
        self.gathered_bytes -= sum(b - a for a, b in self.copy_ranges[rank])
        """Bytes of a compute copy that other ranks send."""
        self.reduced_bytes = (stop - start) * (world_size - 1)
        """Bytes of gradients that other ranks send."""

    @property
    def elements(self) -> int:
        """Number of trained elements."""
        return sum(m.elements for m in self.trained)

    def kept(self, member: ParameterEntry | ParameterShard) -> Slots:
        """Return what the optimizer keeps for a parameter, or for a fragment of one."""
        return self._optimizer.slots(member.group, member.shape)

    def member_slots(self, member: ParameterEntry | ParameterShard) -> Slots:
        """Return what the optimizer keeps for a parameter or a fragment, with the count of its updates."""
        slots = self.kept(member)
        return Slots(slots.tensors, {**slots.scalars, STEP: torch.float32})

    def _state_atoms(self) -> list[TensorEntry]:
        """Return the tensor entries of the state: parameters, then state name by state name, then counters and
        buffers."""
        placed = self._placed
        atoms = [
            placed(TensorEntry(p.name, "param", p.shape, "F32"), p.member.shape, p.box) for p in self.pieces
        ]
        slots = [(p, self.member_slots(p), self.member_slots(p.member)) for p in self.pieces]
        names = dict.fromkeys(name for _, here, _ in slots for name in here.tensors)
        for name in names:
            for p, here, whole in slots:
                if name in here.tensors:
                    form = whole.tensors[name]
                    atoms.append(
                        placed(_atom(p, name, here.tensors[name]), tuple(form.shape), p.box_in(form))
                    )
        atoms += [
            placed(TensorEntry(p.name, name, (), TO_NAME[dtype]))
            for p, here, _ in slots
            for name, dtype in here.scalars.items()
        ]
        for name, place in self.buffers.items():
            buffer = buffer_at(place)
            atoms.append(placed(TensorEntry(name, "buffer", tuple(buffer.shape), TO_NAME[buffer.dtype])))
        return atoms

    def _placed(
        self, atom: TensorEntry, shape: tuple[int, ...] | None = None, box: Region | None = None
    ) -> TensorEntry:
        """Note the shape of the whole tensor entry and the region of it that ``atom`` is; by default all of it."""
        self.places[atom.key] = shape or atom.shape, box or Region.whole(atom.shape)
        return atom

    def _file_name(self, prefix: str, name: str, layout: Layout) -> str:
        """Return the name of a file in which a rank keeps its part of a unit.

        With several ranks the name identifies the content: a file never changes its size, and the number of ranks
        decides what each has.
        """
        if not prefix:
            return name
        boxes = [self.places[entry.key][1].to_json() for entry in layout.entries]
        return f"{prefix}{name}-{xxhash.xxh3_64_hexdigest(layout.header + json.dumps(boxes).encode())[:8]}"

    # Views

    def state_view(self, image: torch.Tensor, name: str, slot: str) -> torch.Tensor:
        """Return a tensor entry inside a state image, in its own shape."""
        return _view(self.layout, image, f"{name}/{slot}")

    def frozen_view(self, image: torch.Tensor, name: str) -> torch.Tensor:
        return _view(self.frozen_layout, image, f"{name}/param")

    def copy_view(self, copy: torch.Tensor, member: ParameterEntry) -> torch.Tensor:
        """Return a parameter inside a compute copy."""
        end = member.copy_offset + member.elements * self.dtype.itemsize
        return member.arranged(copy[member.copy_offset : end].view(self.dtype))

    def grad_view(self, grads: torch.Tensor, member: ParameterEntry) -> torch.Tensor:
        """Return a parameter's gradient inside the gradients."""
        end = member.grad_offset + member.elements * 4
        return grads[member.grad_offset : end].view(torch.float32).view(member.shape)

    def piece_of_copy(self, copy: torch.Tensor, piece: ParameterShard, whole: bool = False) -> torch.Tensor:
        """Return a fragment inside this rank's shard of a compute copy, or inside a ``whole`` copy."""
        size = self.dtype.itemsize
        start = piece.member.copy_offset + piece.start * size if whole else piece.copy_at
        flat = copy[start : start + piece.elements * size].view(self.dtype)
        return piece.member.arranged(flat) if piece.is_whole else flat.view(piece.shape)

    def piece_of_grads(self, grads: torch.Tensor, piece: ParameterShard) -> torch.Tensor:
        """Return a fragment inside this rank's shard of the gradients."""
        end = piece.grad_at + piece.elements * 4
        return grads[piece.grad_at : end].view(torch.float32).view(piece.shape)

    def parameter_state(
        self,
        piece: ParameterShard,
        image: torch.Tensor,
        grads: torch.Tensor,
        copy: torch.Tensor | None,
        whole_copy: bool = False,
    ) -> ParameterState:
        """Return what the host optimizer needs of one parameter, or of this rank's fragment of it, as views."""
        slots = self.member_slots(piece)

        def view(slot: str) -> torch.Tensor:
            return self.state_view(image, piece.name, slot)

        return ParameterState(
            param=view("param"),
            grad=self.piece_of_grads(grads, piece),
            tensors={slot: view(slot) for slot in slots.tensors},
            scalars={slot: view(slot) for slot in slots.scalars},
            copy=None if copy is None else self.piece_of_copy(copy, piece, whole_copy),
            group=piece.group,
            order=piece.member.order,
        )

    # Whole-unit conversions, used when a run begins or resumes

    def write_copy(
        self, state: torch.Tensor, frozen: torch.Tensor | None, copy: torch.Tensor, whole: bool = False
    ) -> None:
        """Derive this rank's shard of the compute copy from its images: into a shard, or into a ``whole`` copy."""
        self.write_trained_copy(state, copy, whole)
        for piece in self.frozen_pieces:
            assert frozen is not None
            self.piece_of_copy(copy, piece, whole).copy_(self.frozen_view(frozen, piece.name))

    def write_trained_copy(self, state: torch.Tensor, copy: torch.Tensor, whole: bool = False) -> None:
        """Derive the trained part of the compute copy."""
        for piece in self.pieces:
            self.piece_of_copy(copy, piece, whole).copy_(self.state_view(state, piece.name, "param"))

    def write_images(
        self, values: dict[str, torch.Tensor], state: torch.Tensor, frozen: torch.Tensor | None
    ) -> None:
        """Fill fresh images: parameters from ``values`` by name, everything else zero."""
        state.zero_()
        for piece in self.pieces:
            self.state_view(state, piece.name, "param").copy_(piece.of(values[piece.name]))
        if frozen is not None:
            frozen.zero_()
            for piece in self.frozen_pieces:
                self.frozen_view(frozen, piece.name).copy_(piece.of(values[piece.name]))
        self.write_buffers(state, self.buffer_values())

    def boxes_of(self, piece: ParameterShard) -> dict[str, Region]:
        """Return the fragment's region of each tensor that the optimizer keeps for its parameter, by state name."""
        return {slot: piece.box_in(form) for slot, form in self.member_slots(piece.member).tensors.items()}

    def write_state(self, piece: ParameterShard, image: torch.Tensor, state: dict[str, Any]) -> None:
        """Write the optimizer state that exists for ``piece``, if there is any."""
        slots = self.member_slots(piece.member)
        for slot in slots.tensors:
            if slot in state:
                self.state_view(image, piece.name, slot).copy_(state[slot])
        for slot in slots.scalars:
            if slot in state:
                self.state_view(image, piece.name, slot).copy_(torch.as_tensor(state[slot]))
        if state and STEP not in state:
            self.state_view(image, piece.name, STEP).fill_(1)

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
        """Copy the result of ``buffer_values`` into the state image."""
        for name, buffer in values.items():
            view = self.state_view(state, name, "buffer")
            if (view.shape, view.dtype) != (buffer.shape, buffer.dtype):
                raise ModelNotSupported(
                    f"buffer {name} was {view.dtype} {tuple(view.shape)} and is {buffer.dtype} {tuple(buffer.shape)} "
                    "now; the state of a run keeps its shapes."
                )
            view.copy_(buffer)

    def read_buffers(self, state: torch.Tensor) -> None:
        """Set the model's persistent buffers from the state image."""
        for name, place in self.buffers.items():
            buffer_at(place).copy_(self.state_view(state, name, "buffer"))


def _atom(piece: ParameterShard, slot: str, form: Form) -> TensorEntry:
    return TensorEntry(piece.name, slot, form.shape, TO_NAME[form.dtype])


def _layout(atoms: Sequence[TensorEntry]) -> Layout:
    return Layout.build([(atom.key, atom.dtype, atom.shape) for atom in atoms])


def _view(layout: Layout, image: torch.Tensor, key: str) -> torch.Tensor:
    entry = layout[key]
    return image[entry.offset : entry.offset + entry.nbytes].view(FROM_NAME[entry.dtype]).view(entry.shape)
