"""Frozen experts that come to the device when a token is routed to them, and leave it for the next ones.

A block's code takes one expert at a time by ``parameter[expert]``. The parameter is absent (``absent_parameters``), and
this one expression is answered with the rows of that expert, read from the SSD. What autograd saves of the rows for the
backward pass is replaced by their name, and they are read again when the backward pass asks for them. So the block's
own code and its graph are those of a model in memory, and so are the bits, while ``num_slots`` experts are held:

1. An expert that is held already is not read. One that is not needed soon makes room (``_make_room``).
2. Which experts follow is known from the indices that the module of experts was called with. The next ones are read
   while one computes.
3. The memory of an expert is lent, and used again when no tensor refers to it any more. So code that keeps rows takes
   memory, and never reads other numbers.

Used by the thread that computes, or on a separate device by the thread of the backward pass, while that one waits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from ...errors import ModelNotSupported
from ...schedule.operations import COMPUTE, NOW
from ...schedule.work import EXPERTS_AHEAD
from ...state.plain_tensors import FROM_NAME
from ...store.commit.generations import Generations
from ..executor import together
from .block_states import BlockState
from .device import Device
from .residency import sampled

KIND = "load_experts"
"""Kind of the reads, by which the SSD's queue counts their bytes."""


Lends = Callable[[int, str], tuple[torch.Tensor, memoryview]]
"""Function that lends host memory of a kind: as a flat uint8 tensor, and the same bytes for I/O."""


class ExpertKey(NamedTuple):
    """One expert of one block."""

    block: int
    expert: int


class SavedRows(NamedTuple):
    """Stand-in of a graph for a tensor in the memory of an expert."""

    key: ExpertKey
    name: str
    """A parameter whose rows lie in the same memory."""
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Elements."""
    order: Sequence[int]
    """The experts that the forward pass used, in their order."""


class HeldExpert:
    """One expert on its way to the device, or on it."""

    def __init__(self, reading: Future, memory: torch.Tensor) -> None:
        self.reading = reading
        self.memory: torch.Tensor | None = memory
        """Host memory that the expert is read into; None once it is on the device."""
        self.rows: dict[str, torch.Tensor] = {}
        """The expert's rows of each parameter on the device, by name."""
        self.samples: torch.Tensor | None = None
        """The sampled bytes of the rows, as they were read."""


class ExpertReader:
    """The experts of one engine that are held at present."""

    def __init__(
        self,
        units: Sequence[BlockState],
        device: Device,
        lend: Lends,
        stored: Mapping[str, Generations],
        newest: Mapping[str, Any],
        num_slots: int,
    ) -> None:
        """Prepare to read. Nothing is read yet.

        Args:
            units: The streamed units.
            device: The device that computes.
            lend: Lends host memory.
            stored: The files of every unit, by name.
            newest: The newest generation of each file and its checksums (``StoredBlock``), by name.
            num_slots: Number of experts that are held at once.
        """
        self._units, self._device, self._lend = units, device, lend
        self._stored, self._newest, self._num_slots = stored, newest, num_slots
        self._held: OrderedDict[ExpertKey, HeldExpert] = OrderedDict()
        """The one that was used longest ago comes first."""
        self._places: dict[int, tuple[ExpertKey, str]] = {}
        """The expert whose rows lie in a storage, and a parameter that has them, by the storage."""
        self._block = -1
        self._order: list[int] = []
        self._chosen: dict[int, torch.Tensor] = {}
        """The numbers of the elements that are compared, by the number of elements."""
        self._compared: list[tuple[ExpertKey, torch.Tensor, torch.Tensor]] = []
        """The samples of experts that the block has used, as they were read and as it left them."""

    @contextmanager
    def computing(self, block: int) -> Iterator[None]:
        """Read the experts of ``block`` inside the context, and keep none of their memory in graphs.

        Raises ``ModelNotSupported`` if the block has changed an expert in place.
        """
        unit = self._units[block]
        if not unit.routed:
            yield
            return
        self._block, self._order, self._compared = block, [], []
        modules = {id(module): module for member in unit.routed for module, _ in member.owned.places}
        with ExitStack() as undo:
            for module in modules.values():
                hook = module.register_forward_pre_hook(self._note_order, with_kwargs=True)
                undo.callback(hook.remove)
            undo.enter_context(saved_tensors_hooks(self._saved, self._restored))
            try:
                yield
            finally:
                self._block = -1
        for key, held in self._held.items():
            self._refuse_changes(key, held, block)
        self._refuse_sampled()

    def rows(self, block: int, name: str, expert: int) -> torch.Tensor | None:
        """Return the rows of ``expert`` of the parameter ``name``; None unless its ``block`` computes."""
        count = self._units[block].expert_file.num_experts
        if block != self._block or not -count <= expert < count:
            return None
        expert %= count
        is_forward_only = not torch.is_grad_enabled()
        return self._ready(ExpertKey(block, expert), self._order, is_forward_only).rows[name]

    def release(self) -> None:
        """Release all experts. No read may be under way."""
        self._held.clear()
        self._places.clear()

    # Reading

    @torch.inference_mode(False)  # a tensor of inference has no version counter
    def _ready(self, key: ExpertKey, order: Sequence[int], is_forward_only: bool = False) -> HeldExpert:
        """Return an expert on the device, and begin to read those that follow it in ``order``."""
        place = order.index(key.expert) + 1 if key.expert in order else len(order)
        ahead = min(EXPERTS_AHEAD, self._num_slots - 1)
        needed = [key, *(ExpertKey(key.block, expert) for expert in order[place : place + ahead])]
        for each in needed:
            if each in self._held:
                self._held.move_to_end(each)
                continue
            if len(self._held) >= self._num_slots:
                self._make_room(needed, is_forward_only)
            self._held[each] = self._begin(each)
        held = self._held[key]
        if not held.rows:
            try:
                held.reading.result()
                self._place(key, held)
            except BaseException:
                del self._held[key]
                raise
        return held

    def _begin(self, key: ExpertKey) -> HeldExpert:
        file = self._units[key.block].expert_file
        files, newest = self._stored[file.name], self._newest[file.name]
        memory, into = self._lend(file.expert_bytes, "experts")
        reads, at = [], 0
        for part in file.parts(key.expert):
            view = into[at : at + part.stop - part.start]
            reads.append(
                files.read(
                    newest.generation, view, newest.checksums, start=part.start, kind=KIND, phase=COMPUTE,
                    priority=NOW,
                )
            )  # fmt: skip
            at += part.stop - part.start
        return HeldExpert(together(reads), memory)

    def _place(self, key: ExpertKey, held: HeldExpert) -> None:
        """Bring an expert that has been read to the device, in the dtype that it is computed in."""
        unit = self._units[key.block]
        assert held.memory is not None
        whole, at = self._device.bring(held.memory), 0
        for member, part in zip(unit.routed, unit.expert_file.parts(key.expert), strict=True):
            stored = FROM_NAME[unit.expert_file.layout[f"{member.name}/param"].dtype]
            flat = whole[at + part.skip : at + part.skip + part.nbytes].view(stored)
            rows = flat.to(member.copy_dtype).view(member.shape[1:])
            # .data has a version counter of its own, by which changes are found
            held.rows[member.name] = rows.data
            at += part.stop - part.start
        held.memory, held.samples = None, self._samples(held)
        for name, rows in held.rows.items():
            self._places[rows.untyped_storage()._cdata] = key, name

    def _make_room(self, needed: Sequence[ExpertKey], is_forward_only: bool) -> None:
        """Release an expert that is not among ``needed``: the least recently used one.

        In a pass that ``is_forward_only`` it is the most recently used one of this block: the next micro-batch begins
        with the first expert again, whereas a backward pass begins with the last.
        """
        others = [key for key in self._held if key not in needed]
        takes_last = is_forward_only and others[0].block == needed[0].block
        key = others[-1 if takes_last else 0]
        held = self._held.pop(key)
        for rows in held.rows.values():
            self._places.pop(rows.untyped_storage()._cdata, None)
        if not held.rows:  # it was read ahead, and not used
            held.reading.exception()
        self._refuse_changes(key, held, self._block)

    def _refuse_changes(self, key: ExpertKey, held: HeldExpert, block: int) -> None:
        """Raise ``ModelNotSupported`` if an expert was changed. Samples of those of ``block`` are noted."""
        if any(rows._version for rows in held.rows.values()):
            raise self._changed(key)
        if key.block == block and held.samples is not None:
            self._compared.append((key, held.samples, self._samples(held)))

    def _refuse_sampled(self) -> None:
        """Raise ``ModelNotSupported`` if samples show a change through ``.data``. Waits once for the device."""
        compared, self._compared = self._compared, []
        if not compared:
            return
        before, after = (torch.cat([samples[i] for _, *samples in compared]) for i in range(2))
        if bool(self._device.fetch((before != after).any())):
            raise self._changed(next(key for key, was, now in compared if not torch.equal(was, now)))

    def _changed(self, key: ExpertKey) -> ModelNotSupported:
        return ModelNotSupported(
            f"the model changed expert {key.expert} of {self._units[key.block].name} in place as it ran. Out of core"
            " that change would be lost: compute with a changed copy instead (weight ="
            " self.weight[expert].clamp(-1, 1))."
        )

    def _samples(self, held: HeldExpert) -> torch.Tensor:
        """Return sampled bytes (uint8) of an expert's rows, on their device."""
        found = []
        for rows in held.rows.values():
            chosen = self._chosen.get(rows.numel())
            if chosen is None:
                chosen = self._chosen[rows.numel()] = sampled(rows.numel()).to(rows.device)
            found.append(rows.view(-1)[chosen].view(torch.uint8))
        return torch.cat(found)

    # What the model's code shows and autograd saves

    def _note_order(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note which experts a module will use: those in the first integer tensor that it is called with."""
        leaves = pytree.tree_leaves((args, kwargs))
        indices = (t for t in leaves if isinstance(t, torch.Tensor) and t.dtype in (torch.int64, torch.int32))
        for tensor in indices:
            count = self._units[self._block].expert_file.num_experts
            used = self._device.fetch(tensor).unique().tolist()  # in ascending order
            self._order = [expert for expert in used if 0 <= expert < count]
            return

    def _saved(self, tensor: torch.Tensor) -> torch.Tensor | SavedRows:
        is_dense = tensor.layout == torch.strided
        place = self._places.get(tensor.untyped_storage()._cdata) if is_dense else None
        if place is None:
            return tensor
        form = (tensor.dtype, tensor.size(), tensor.stride())
        return SavedRows(*place, *form, int(tensor.storage_offset()), self._order)

    def _restored(self, saved: torch.Tensor | SavedRows) -> torch.Tensor:
        if not isinstance(saved, SavedRows):
            return saved
        held = self._ready(saved.key, saved.order[::-1])
        memory = held.rows[saved.name].flatten().view(saved.dtype)
        return memory.as_strided(saved.size, saved.stride, saved.offset)
