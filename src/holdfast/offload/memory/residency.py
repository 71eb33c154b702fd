"""The place of every tensor of a run in memory, and the buffers that hold it.

Handlers of operations acquire and release buffers here, so that none is used twice. For each block it knows the compute
copy (kept on the host, or loaded for one pass), the state image (kept, or loaded for one update) and the gradients. For
each block and micro-batch it knows the moving inputs. Buffers come from one pool of exact sizes; tensors are views of
them.

A parameter of a pass shares the memory of its unit's compute copy. A change in place is counted by the parameter's
version, but one through ``.data`` is not, and it would be lost, or last until the next update. So the bytes of a few
elements of every parameter are read when a pass begins and compared when it ends (``ParameterSamples``). A change that
spares all of these elements is not found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from ...chunked_loss import COLLECTOR, Part, PartCollector
from ...io.buffers import Buffer, BufferPool
from .block_states import BlockState, as_tensor
from .parameter_shards import ParameterEntry
from .transfer_pool import PackedForm, TransferPool, forms_of, packed_bytes, unpacked

SUMMED_AT_ONCE = 1 << 20
"""Elements added at once.

torch adds a bf16 tensor to an fp32 one through an fp32 copy of it. The memory of a large copy comes from the system
anew every time, which is eight times slower on 8 M elements.
"""


@dataclass
class Gradients:
    """The accumulated gradients of one unit: the sum, and the members that have a gradient in this step."""

    flat: torch.Tensor
    buffer: Buffer | None
    """Host memory of the gradients, once there is any; ``flat`` shares it, unless ``flat`` is on a separate device."""
    touched: set[str]
    start: int = 0
    """Offset of ``flat`` in this rank's shard of the unit's gradients."""
    views: dict[str, torch.Tensor] = field(default_factory=dict)
    """Members' gradients inside ``flat``, each since it was first asked for."""

    def view(self, unit: BlockState, member: ParameterEntry) -> torch.Tensor:
        """Return the gradient of ``member``; making the view takes longer than adding to a small one."""
        found = self.views.get(member.name)
        if found is None:
            found = self.views[member.name] = unit.grad_view(self.flat, member)
        return found


class Residency:
    """The places of one engine's bytes. Handlers of different lanes use different keys."""

    def __init__(
        self,
        pool: BufferPool,
        blocks: list[BlockState],
        resident: BlockState,
        device: torch.device,
        kept_bytes: int = 0,
        planned_bytes: int = 0,
    ) -> None:
        """Create the pools.

        ``kept_bytes`` is the size of the arena for what a separate device keeps on the host. ``planned_bytes`` is the
        size of the largest block input, or gradient of one, that the plan has counted.
        """
        self.pool, self.blocks = pool, blocks
        self._lending = TransferPool(pool, kept_bytes, pool.pins, planned_bytes)
        self.lend, self.lender = self._lending.lend, self._lending.lender
        self.copies: dict[int, Buffer] = {}
        """Compute copies that stay on the host."""
        self.images: dict[tuple[int, int], Buffer] = {}
        """State images by (unit, tile): those that stay on the host; during an update also those that do not."""
        self.lack_copy: set[tuple[int, int]] = set()
        """Keys of images that were read without the compute copy, a part of the masters, which is in memory anyway."""
        self.loaded: dict[tuple[str, int, int], Buffer] = {}
        """Compute copies loaded for one pass, by (phase, block, micro-batch)."""
        self.on_device: dict[tuple[str, int, int], torch.Tensor] = {}
        """Compute copies on the device for one pass."""
        self.leaves: dict[tuple[str, int, int], list[torch.nn.Parameter]] = {}
        """Parameters that share the memory of these copies, in the order of the unit's members."""
        self.samples: dict[tuple[str, int, int], torch.Tensor] = {}
        """Samples of these copies, as they were when the pass began."""
        self._sampled_places: dict[int, ParameterSamples] = {}
        """Places of the samples, by block."""
        self.redone: dict[tuple[int, int], Buffer] = {}
        """State images by (block, tile) that are updated once more, from the step before."""
        self.outgoing: dict[tuple[int, int], Buffer] = {}
        """Updated compute copies on their way to the SSD, by (block, tile)."""
        self.grads: dict[int, Gradients] = {}
        self._resident_sums = torch.empty(resident.grad_bytes, dtype=torch.uint8, device=device)
        self.resident_grads: Gradients | None = None
        """Destination of the prologue's and epilogue's gradients in the present step."""
        self.inputs: dict[tuple[int, int], Buffer] = {}
        """Block inputs read back from the SSD."""

    # Gradients

    def start_grads(self, block: int, device: torch.device | None) -> Gradients:
        """Return the gradients of ``block``, allocated once per step: on ``device``, or in a host buffer if None."""
        held = self.grads.get(block)
        if held is None:
            unit = self.blocks[block]
            if device is None:
                buffer = self.pool.take(unit.grad_bytes, "gradients")
                held = Gradients(as_tensor(buffer), buffer, set())
            else:
                flat = torch.empty(unit.grad_bytes, dtype=torch.uint8, device=device)
                held = Gradients(flat, None, set())
            self.grads[block] = held
        return held

    def start_resident_grads(self) -> Gradients:
        """Return the gradients of prologue and epilogue, with none collected yet.

        They use the same memory in every step, because no step computes before the last has updated them.
        """
        self.resident_grads = Gradients(self._resident_sums, None, set())
        return self.resident_grads

    def free_grads(self, block: int, in_inputs: bool) -> None:
        """Release the gradients of ``block``, if there are any here.

        With ``in_inputs``, the memory is that of block inputs and goes to the next inputs.
        """
        held = self.grads.pop(block, None)
        if held is not None and held.buffer is not None:
            (self.pool.drop if in_inputs else self.pool.give)(held.buffer)

    def leaf(
        self,
        unit: BlockState,
        member: ParameterEntry,
        view: torch.Tensor,
        held: Callable[[], Gradients | None] | None,
        in_parts: bool = False,
    ) -> torch.nn.Parameter:
        """Return a parameter that shares the memory of ``view``.

        If it is trained and ``held`` is given, its gradient is added to the sums that ``held`` returns, as soon as the
        gradient arrives; with ``in_parts`` by a collector, if an operation makes it in parts. A trained parameter
        requires grad even without ``held``, because operations choose their kernels by that.
        """
        # ``data`` has a version counter of its own, by which changes in place are found
        parameter = torch.nn.Parameter(view.data, requires_grad=member.trained)
        if held is not None and parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: self._collect(unit, held(), member, p))
            if in_parts and member.order is None:
                collector = PartCollector(lambda parts: self._collect_parts(unit, held(), member, parts))
                setattr(parameter, COLLECTOR, collector)
        return parameter

    def _collect(
        self, unit: BlockState, held: Gradients | None, member: ParameterEntry, parameter: torch.Tensor
    ) -> None:
        if parameter.grad is None:  # a source collected all that was on its way here
            return
        assert held is not None
        view = held.view(unit, member)
        if member.name in held.touched:
            add_in_parts(view, parameter.grad)
        else:  # the first gradient of a step starts the sum
            view.copy_(parameter.grad)
            held.touched.add(member.name)
        parameter.grad = None

    def _collect_parts(
        self, unit: BlockState, held: Gradients | None, member: ParameterEntry, parts: Iterable[Part]
    ) -> None:
        """Add a gradient like ``_collect``, part after part."""
        assert held is not None
        view, starts = held.view(unit, member), member.name not in held.touched
        for place, grad in parts:
            if starts:
                view[place].copy_(grad)
            else:
                add_in_parts(view[place], grad)
        held.touched.add(member.name)

    def samples_of(self, block: int) -> ParameterSamples:
        """Return the sampled places of the compute copy of ``block``."""
        found = self._sampled_places.get(block)
        if found is None:
            found = ParameterSamples(self.blocks[block], self._resident_sums.device)
            self._sampled_places[block] = found
        return found

    # Block inputs on the SSD

    def pack_input(self, tensors: list[torch.Tensor]) -> tuple[Buffer, list[PackedForm]]:
        """Return a buffer with the bytes of ``tensors`` one after another, and the forms needed to unpack it."""
        forms = forms_of(tensors)
        buffer = self.pool.take(packed_bytes(forms), "block inputs")
        for packed, tensor in zip(unpacked(as_tensor(buffer), forms), tensors, strict=True):
            packed.copy_(tensor)
        return buffer, forms

    def drop_pass(self, *phases: str) -> None:
        """Release what an interrupted pass has loaded, in any of ``phases``."""
        for place in [place for place in self.on_device if place[0] in phases]:
            del self.on_device[place]
            self.leaves.pop(place, None)
            self.samples.pop(place, None)
        for place in [place for place in self.loaded if place[0] in phases]:
            self.pool.give(self.loaded.pop(place))

    def release(self) -> None:
        """Release everything; the memory returns to the system as soon as no tensor refers to it."""
        for held in (self.copies, self.images, self.loaded, self.redone, self.outgoing, self.inputs):
            held.clear()
        self.leaves.clear()
        self.samples.clear()
        self.on_device.clear()
        self.grads.clear()
        self.resident_grads, self._resident_sums = None, torch.empty(0)
        self._lending.close()
        self.pool.close()


def add_in_parts(total: torch.Tensor, grad: torch.Tensor) -> None:
    """Add ``grad`` to the fp32 sum ``total``, in parts if it is large and on the host."""
    if total.device.type != "cpu" or total.numel() <= SUMMED_AT_ONCE:
        total.add_(grad)
        return
    if total.is_contiguous():
        total, grad = total.flatten(), grad.flatten()
    rows = max(1, SUMMED_AT_ONCE // total[0].numel())
    for some, more in zip(total.split(rows), grad.split(rows), strict=True):
        some.add_(more)


SAMPLED = 64
"""Elements of each parameter that are compared, spread evenly; all of a smaller parameter."""


class ParameterSamples:
    """The sampled places of one unit."""

    def __init__(self, unit: BlockState, device: torch.device) -> None:
        """Choose the places. Samples are read on ``device``."""
        found = [
            _places(member.copy_offset, member.elements, member.copy_dtype.itemsize)
            for member in unit.members
        ]
        self._names = [member.name for member in unit.members]
        self._counts = [len(each) for each in found]
        self._places = torch.cat(found).to(device)

    def read(self, copy: torch.Tensor) -> torch.Tensor:
        """Return the sampled bytes (uint8 [count]) of the whole compute copy ``copy``, on its device."""
        return copy[self._places]

    def changed(self, before: torch.Tensor, after: torch.Tensor) -> list[str]:
        """Return the names of the parameters whose samples differ."""
        if torch.equal(before, after):
            return []
        parts = (before != after).split(self._counts)
        return [name for name, part in zip(self._names, parts, strict=True) if bool(part.any())]


def _places(offset: int, elements: int, itemsize: int) -> torch.Tensor:
    """Return the offsets (int64 [count]) of the bytes of the sampled elements of one parameter."""
    return (offset + sampled(elements)[:, None] * itemsize + torch.arange(itemsize)).flatten()


def sampled(elements: int) -> torch.Tensor:
    """Return the numbers (int64) of the elements that are compared, of a tensor of so many."""
    return torch.linspace(0, max(elements - 1, 0), min(elements, SAMPLED), dtype=torch.float64).round().long()
