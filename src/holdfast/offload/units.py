"""Units: the bytes of one block (or of the resident rest) in each of their forms.

A unit has a *state image* (fp32 master, optimizer state and counters of its trained parameters, exactly the
bytes of its generation file), a *frozen image* (parameters that never change), a *working copy* (every
parameter in the compute dtype: what the device reads) and *gradients* (fp32). All four are flat, with fixed
offsets; tensors are views. A change of micro-batches, fractions or schedule changes none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ModelNotSupported
from ..io.buffers import Buffer
from ..state.atoms import Atom
from ..state.capture import FROM_NAME, TO_NAME, BufferPlace, buffer_at
from ..store.layout import Layout
from ..units import round_up
from ..update.forms import STEP, Form, Slots
from ..update.optimizer import HostOptimizer, ParameterState
from .blocks import Owned

ALIGN = 64
"""Bytes. Tensors in working copies, gradients and packed inputs start at multiples of it."""


def as_tensor(buffer: Buffer) -> torch.Tensor:
    """The bytes of a buffer as a uint8 tensor that shares them."""
    return torch.frombuffer(buffer.view, dtype=torch.uint8)


@dataclass(frozen=True, eq=False)
class Member:
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


class Unit:
    """The forms of one unit's bytes."""

    def __init__(
        self,
        name: str,
        owned: Sequence[Owned],
        optimizer: HostOptimizer,
        dtype: torch.dtype,
        buffers: dict[str, BufferPlace] | None = None,
        absent: dict[str, BufferPlace] | None = None,
    ) -> None:
        self.name, self.dtype, self._optimizer = name, dtype, optimizer
        self.buffers, self._absent = buffers or {}, absent or {}
        self.members: list[Member] = []
        copy_end = grad_end = 0
        for trained in (True, False):
            for one in owned:
                if one.captured.trained != trained:
                    continue
                elements = one.captured.parameter.numel()
                self.members.append(Member(one, copy_end, grad_end if trained else -1))
                copy_end = round_up(copy_end + elements * dtype.itemsize, ALIGN)
                grad_end = round_up(grad_end + elements * 4, ALIGN) if trained else grad_end
            copy_end = round_up(copy_end)
            if trained:
                self.trained_copy_bytes = copy_end
        self.copy_bytes = copy_end
        self.grad_bytes = round_up(grad_end)
        self.trained = [m for m in self.members if m.trained]
        self.frozen = [m for m in self.members if not m.trained]
        self.state_atoms = self._state_atoms()
        self.frozen_atoms = [Atom(m.name, "param", m.shape, "F32") for m in self.frozen]
        self.layout = _layout(self.state_atoms)
        self.frozen_layout = _layout(self.frozen_atoms)

    @property
    def frozen_name(self) -> str:
        """The name of the file that holds the parameters which never change."""
        return f"{self.name}.frozen"

    @property
    def elements(self) -> int:
        """Trained elements."""
        return sum(m.elements for m in self.trained)

    @property
    def copy_parts(self) -> list[tuple[int, int]]:
        """The working copy's trained and frozen part, as they are moved: those of (start, stop) that hold bytes."""
        parts = ((0, self.trained_copy_bytes), (self.trained_copy_bytes, self.copy_bytes))
        return [(start, stop) for start, stop in parts if stop > start]

    def kept(self, member: Member) -> Slots:
        """What the optimizer keeps for a parameter."""
        return self._optimizer.slots(member.group, member.shape)

    def member_slots(self, member: Member) -> Slots:
        """The same, and how often it was updated."""
        slots = self.kept(member)
        return Slots(slots.tensors, {**slots.scalars, STEP: torch.float32})

    def _state_atoms(self) -> list[Atom]:
        """Parameters first, then slot after slot, then the small counters and buffers."""
        atoms = [Atom(m.name, "param", m.shape, "F32") for m in self.trained]
        slots = [(m, self.member_slots(m)) for m in self.trained]
        names = dict.fromkeys(name for _, s in slots for name in s.tensors)
        atoms += [_atom(m, name, s.tensors[name]) for name in names for m, s in slots if name in s.tensors]
        atoms += [
            Atom(m.name, name, (), TO_NAME[dtype]) for m, s in slots for name, dtype in s.scalars.items()
        ]
        for name, place in self.buffers.items():
            buffer = buffer_at(place)
            atoms.append(Atom(name, "buffer", tuple(buffer.shape), TO_NAME[buffer.dtype]))
        return atoms

    # Views

    def state_view(self, image: torch.Tensor, name: str, slot: str) -> torch.Tensor:
        """An atom inside a state image, in its own shape."""
        return _view(self.layout, image, f"{name}/{slot}")

    def frozen_view(self, image: torch.Tensor, name: str) -> torch.Tensor:
        return _view(self.frozen_layout, image, f"{name}/param")

    def copy_view(self, copy: torch.Tensor, member: Member) -> torch.Tensor:
        """A parameter inside a working copy."""
        end = member.copy_offset + member.elements * self.dtype.itemsize
        return copy[member.copy_offset : end].view(self.dtype).view(member.shape)

    def grad_view(self, grads: torch.Tensor, member: Member) -> torch.Tensor:
        """A gradient inside the gradients."""
        end = member.grad_offset + member.elements * 4
        return grads[member.grad_offset : end].view(torch.float32).view(member.shape)

    def parameter_state(
        self, member: Member, image: torch.Tensor, grads: torch.Tensor, copy: torch.Tensor | None
    ) -> ParameterState:
        """What the host optimizer needs of one parameter: views."""
        slots = self.member_slots(member)

        def view(slot: str) -> torch.Tensor:
            return self.state_view(image, member.name, slot)

        return ParameterState(
            param=view("param"),
            grad=self.grad_view(grads, member),
            tensors={slot: view(slot) for slot in slots.tensors},
            scalars={slot: view(slot) for slot in slots.scalars},
            copy=None if copy is None else self.copy_view(copy, member),
            group=member.group,
        )

    # Whole-unit conversions, used when a run begins or resumes

    def write_copy(self, state: torch.Tensor, frozen: torch.Tensor | None, copy: torch.Tensor) -> None:
        """Derive the working copy from the images."""
        self.write_trained_copy(state, copy)
        for member in self.frozen:
            assert frozen is not None
            self.copy_view(copy, member).copy_(self.frozen_view(frozen, member.name))

    def write_trained_copy(self, state: torch.Tensor, copy: torch.Tensor) -> None:
        """Derive its trained part."""
        for member in self.trained:
            self.copy_view(copy, member).copy_(self.state_view(state, member.name, "param"))

    def write_images(
        self, values: dict[str, torch.Tensor], state: torch.Tensor, frozen: torch.Tensor | None
    ) -> None:
        """Fill fresh images: parameters from ``values`` by name, everything else zero."""
        state.zero_()
        for member in self.trained:
            self.state_view(state, member.name, "param").copy_(values[member.name])
        if frozen is not None:
            frozen.zero_()
            for member in self.frozen:
                self.frozen_view(frozen, member.name).copy_(values[member.name])
        self.write_buffers(state, self.buffer_values())

    def write_state(self, member: Member, image: torch.Tensor, state: dict[str, Any]) -> None:
        """Take over what the user's optimizer holds for a parameter already, if it holds anything."""
        slots = self.member_slots(member)
        for slot in (*slots.tensors, *slots.scalars):
            if slot in state:
                self.state_view(image, member.name, slot).copy_(torch.as_tensor(state[slot]))
        if state and STEP not in state:
            self.state_view(image, member.name, STEP).fill_(1)

    def buffer_values(self) -> dict[str, torch.Tensor]:
        """The model's persistent buffers as they are now, by name."""
        for name, (module, key) in self._absent.items():
            if module._buffers.get(key) is not None:
                raise ModelNotSupported(
                    f"buffer {name} was None when the run began and is a tensor now, which no commit would hold. Make "
                    "it before offload(), with the shape it will have, or register it with persistent=False."
                )
        return {name: buffer_at(place).clone() for name, place in self.buffers.items()}

    def write_buffers(self, state: torch.Tensor, values: dict[str, torch.Tensor]) -> None:
        """Copy what ``buffer_values`` gave into the state image."""
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


def _atom(member: Member, slot: str, form: Form) -> Atom:
    return Atom(member.name, slot, form.shape, TO_NAME[form.dtype])


def _layout(atoms: Sequence[Atom]) -> Layout:
    return Layout.build([(atom.key, atom.dtype, atom.shape) for atom in atoms])


def _view(layout: Layout, image: torch.Tensor, key: str) -> torch.Tensor:
    entry = layout[key]
    return image[entry.offset : entry.offset + entry.nbytes].view(FROM_NAME[entry.dtype]).view(entry.shape)
