"""The tensors that a model and its optimizers hold at this moment, as tensor entries.

An optimizer's state comes and goes (most make theirs in the first step), so it is read each time. A parameter with
everything that belongs to it is one *owner*; so are the persistent buffers together. Of a distributed tensor, this
process holds the local part: shapes are local, and ``box`` gives the part's region.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn

from ..errors import BadInput, ModelNotSupported, RunMismatch
from .capture import BufferPlace, Captured, CapturedParameter, buffer_at, capture
from .encoding import decode, encode, laid_out
from .layout.overlaps import (
    PLACED,
    Key,
    OverlappingMemory,
    Shared,
    described,
    key_names,
    overlaps,
    put_within,
    tensors_within,
)
from .layout.regions import (
    AnyRegion,
    Region,
    ReplicatedRegion,
    box_of,
    copy_common,
    is_cut_alike,
    is_distributed,
    is_nothing,
    local_held,
    local_of,
)
from .module_places import Changes, ModulePlaces
from .plain_tensors import TO_NAME, is_plain, unsupported_kind
from .quantised_slots import block_size, blocks_in, quantised_classes, restore_values, with_parts
from .tensor_entries import QUANTISED, RESIDUAL, TensorEntry

BUFFERS = "buffers"
"""The owner of all persistent buffers."""
Rounds = Generator[Collection[str], None, None]
"""Names of parameters, some at a time."""
Held = dict[str, tuple[TensorEntry, torch.Tensor]]
"""Tensor entries by key, each with the tensor that holds it now."""


class LiveState:
    """The state of ``model``, its ``optimizers``, and modules ``beside`` it.

    The optimizers share no parameter. Entries of the modules beside the model are named ``name:...``. Tied weights
    are one parameter. ``residuals`` are the error feedback of lossy gradients by parameter; they come and go as well.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        beside: Mapping[str, nn.Module] | None = None,
        residuals: dict[torch.Tensor, torch.Tensor] | None = None,
        captures: Sequence[Captured] = (),
    ) -> None:
        """Capture the tensors of the state by name.

        ``captures`` are the captures of the model with each optimizer, where they are not to be made from these
        objects. Raises ``BadInput`` and its subclasses for anything that cannot be stored by name and value.
        """
        captures = captures or [capture(model, each) for each in optimizers]
        self.optimizers = tuple(optimizers)
        self.residuals: dict[torch.Tensor, torch.Tensor] = {} if residuals is None else residuals
        self.parameters: tuple[CapturedParameter, ...] = captures[0].parameters
        self._buffers, self._buffers_beside = dict(captures[0].buffers), {}
        self.passing = dict(captures[0].passing)
        """The buffers that are not persistent, by name."""
        self.carried: set[str] = set()
        """Names of non-persistent buffers that the run stores all the same."""
        self.rebound: set[str] = set()
        """Names of non-persistent buffers that are replaced and not changed in place."""
        for prefix, module in (beside or {}).items():
            captured = capture(module)
            self.parameters += tuple(_named(p, prefix) for p in captured.parameters)
            self._buffers_beside |= {f"{prefix}:{name}": place for name, place in captured.buffers.items()}
            self.passing |= {f"{prefix}:{name}": place for name, place in captured.passing.items()}
        self._places = ModulePlaces({"": model, **(beside or {})})
        self.made_joined: set[str] = set()
        """Names of buffers that overlapped only with one another before ``arrange_buffers``."""
        self._optimizer_of: dict[str, int] = {}
        for index, captured in enumerate(captures):
            for parameter in captured.parameters:
                if (
                    parameter.group is not None
                    and self._optimizer_of.setdefault(parameter.name, index) != index
                ):
                    raise BadInput(
                        f"{parameter.name} belongs to two optimizers; give each parameter to one of them"
                    )
        self._parameter = {captured.name: captured for captured in self.parameters}
        self.name_of = {id(captured.parameter): captured.name for captured in self.parameters}
        self.boxes: dict[str, AnyRegion] = {
            p.name: box_of(p.name, p.parameter) if p.stretch is None else p.stretch for p in self.parameters
        }
        """The region of each parameter that this process holds, by name."""
        self.wholes = {p.name: p.shape for p in self.parameters}
        """The shape of each whole parameter, by name."""
        self.own_residuals = False
        """True if each rank has residuals of its own, even for a parameter that others hold too."""
        self.stored = self.parameters
        """The parameters that this process stores, with everything that belongs to them."""
        self.copies: Sequence[ReplicatedRegion] = ()
        """Regions of parameters that several ranks hold, whichever ranks these are."""
        self.own: Sequence[Any] = ()
        """The state of each optimizer that belongs to no parameter, where a training loop has that observed."""
        self.layouts: dict[str, list[list[int]]] = {}
        """Shape and strides, by key, of loaded tensors whose layout is not the usual one."""
        self.on_host: dict[str, bool] = {}
        """True for loaded optimizer tensors that stay on the host, by key, False for others, where that is unusual."""
        self.elsewhere: Collection[str] = ()
        """Names of the parameters and buffers that any rank holds: more than this one in a pipeline."""

    def store_only(self, names: Collection[str]) -> None:
        """Store only the parameters ``names``, because other ranks store the others."""
        self.stored = tuple(p for p in self.parameters if p.name in names)

    def place_of(self, atom: TensorEntry) -> tuple[tuple[int, ...], AnyRegion]:
        """Return the shape of the whole tensor of which ``atom`` is the local part, and the part's region."""
        region = self.boxes.get(atom.name)
        if atom.slot != "buffer" and region is not None and atom.shape == region.shape:
            return self.wholes[atom.name], region
        if size := self.block_size(atom):
            whole = self.wholes[atom.name]
            return (prod(whole) // size,), blocks_in(atom.name, whole, self.boxes[atom.name], size)
        return atom.shape, Region.whole(atom.shape)

    def block_size(self, atom: TensorEntry) -> int | None:
        """Return how many elements of its parameter share one element of ``atom``; None if each has its own."""
        if "." not in atom.slot:
            return None
        classes = quantised_classes(self._state(self.parameter(atom.name)))
        return block_size(classes, atom.slot, atom.elements, self.wholes[atom.name], self.boxes[atom.name])

    def lacks(self, name: str) -> bool:
        """Return whether this process holds nothing of a parameter, and its optimizer nothing for it."""
        return is_nothing(self.boxes.get(name))

    def parameter(self, name: str) -> CapturedParameter:
        return self._parameter[name]

    def is_trained(self, parameter: CapturedParameter) -> bool:
        """Return whether one of the optimizers updates the parameter."""
        return parameter.requires_grad and parameter.name in self._optimizer_of

    def optimizer_of(self, parameter: CapturedParameter) -> int | None:
        """Return the index of the optimizer that has the parameter."""
        return self._optimizer_of.get(parameter.name)

    def owned(self, parameter: CapturedParameter) -> Held:
        """Return the parameter and the tensors that its optimizer holds for it.

        Raises ``ModelNotSupported`` if one of them is a distributed tensor that is not sharded as the parameter is,
        such as a factor of second moments. By its shape alone it could be taken for a part of the parameter.
        """
        held: dict[str, torch.Tensor] = {"param": parameter.held()}
        held |= {slot: v for slot, v in self._state(parameter).items() if isinstance(v, torch.Tensor)}
        for slot, tensor in held.items():
            if not is_cut_alike(tensor, parameter.parameter):
                raise ModelNotSupported(
                    f"{parameter.name}/{slot}, of the shape {list(tensor.shape)}, is not cut over the ranks as its"
                    " parameter is, so it could not be brought back. Use an optimizer whose state has the shape of its"
                    " parameters, such as AdamW or Muon."
                )
        return dict(_held(parameter.name, slot, tensor) for slot, tensor in with_parts(held).items())

    def refuse_unsupported_state(self) -> None:
        """Raise ``BadInput`` if an optimizer holds something that no snapshot can. Takes longer than ``owned``."""
        for parameter in self.parameters:
            for key, (_, tensor) in self.owned(parameter).items():
                if kind := "on meta" if tensor.is_meta else unsupported_kind(tensor):
                    raise _refused_kind(key, kind)
        self.values()
        self._refuse_shared_parts()

    def _refuse_shared_parts(self) -> None:
        """Raise ``BadInput`` where distributed tensors of optimizers overlap, which could not be restored."""
        for group in overlaps(self.memory()):
            for name, slot, *_ in (key for key in group if key[1:] not in PLACED):
                if is_distributed(self._state(self.parameter(name))[slot]):
                    raise BadInput(
                        f"{key_names(group)} are one memory, and a resume would give each its own. Have the optimizer"
                        " keep copies: .clone()."
                    )

    def residuals_held(self) -> Held:
        """Return the present residuals of stored parameters, or of all where each rank has its own."""
        held = self.parameters if self.own_residuals else self.stored
        named = [(p.name, self.residuals.get(p.parameter)) for p in held]
        return dict(_held(name, RESIDUAL, tensor) for name, tensor in named if tensor is not None)

    def buffers(self, beside: bool = True) -> Held:
        """Return the present persistent buffers, with those of the modules ``beside`` the model."""
        places = self._buffers | self._buffers_beside if beside else self._buffers
        return dict(_held(name, "buffer", buffer_at(place)) for name, place in places.items())

    def present_buffers(self) -> Held:
        """Return those of ``buffers`` that have not been set to None since."""
        places = self.buffer_places().items()
        there = [(name, place) for name, place in places if place[0]._buffers.get(place[1]) is not None]
        return dict(_held(name, "buffer", buffer_at(place)) for name, place in there)

    def buffer_places(self) -> dict[str, BufferPlace]:
        """Return the module of each of ``buffers`` and the buffer's name there, by its full name."""
        return self._buffers | self._buffers_beside

    def buffer_tensors(self) -> list[torch.Tensor]:
        """Return the same tensors without their entries, which take longer."""
        places = (*self._buffers.values(), *self._buffers_beside.values())
        found = [module._buffers.get(name) for module, name in places]
        return [buffer for buffer in found if buffer is not None]

    def follow_modules(self, at_once: bool = True) -> bool:
        """Look where the names of the state lead now, and follow buffers into modules that have replaced others.

        ``changes`` is then what this object cannot follow. Returns whether a buffer is in another module than before.
        Without ``at_once``, a model of n times 2,000 modules is only looked at in each n-th call.
        """
        if not self._places.look(at_once):
            return False
        found, has_moved = self._places.buffers, False
        for places in (self._buffers, self._buffers_beside, self.passing):
            for name, place in places.items():
                if name in found and found[name][0] is not place[0]:
                    places[name], has_moved = found[name], True
        return has_moved

    @property
    def changes(self) -> Changes:
        """The parameters and persistent buffers that came, went or were replaced, as ``follow_modules`` last saw."""
        return self._places.changes

    def memory(self) -> dict[Key, torch.Tensor]:
        """Return all tensors that this process holds now, whoever stores them.

        That includes those in lists and dictionaries.
        """
        found: dict[Key, torch.Tensor] = {}
        for parameter in self.parameters:
            found[parameter.name, "param"] = local_held(parameter.parameter)
        for atom, tensor in self.present_buffers().values():
            found[atom.name, "buffer"] = tensor
        for parameter in self.parameters:
            for slot, value in self._state(parameter).items():
                found.update(tensors_within(value, (parameter.name, slot)))
        return {key: local for key, tensor in found.items() if is_plain(local := local_held(tensor))}

    def shared(self) -> Shared:
        """Return which tensors of ``memory`` overlap, and how, as JSON."""
        return described(self.memory())

    def bundles(self) -> list[list[str]]:
        """Return the owners whose tensors overlap, even within one owner: these must be of one step."""
        return [
            list(dict.fromkeys(BUFFERS if key[1:] == ("buffer",) else key[0] for key in group))
            for group in overlaps(self.memory())
        ]

    @torch.no_grad()
    def share(self, shared: Shared) -> None:
        """Make the optimizers' tensors overlap as in ``shared``, with one another and with the model's.

        Raises ``RunMismatch`` where that is impossible.
        """
        held = self.memory() if shared else {}
        for group in shared:
            memory = self._memory_for(group, held)
            for key, offset, strides in group:
                way = tuple(key[1:])
                if memory is None or tuple(key) not in held or way in PLACED:
                    continue
                made = memory.view(offset, strides, held[tuple(key)])
                if made is None:
                    raise RunMismatch(
                        f"{key_names(tuple(key) for key, *_ in group)} were one memory in the run, and cannot be here."
                        " Resume with the model and optimizer, and as many ranks, as the run had."
                    )
                slots = self._state(self.parameter(key[0]))
                slots[way[0]] = put_within(slots[way[0]], way[1:], made)

    def _memory_for(
        self, group: Sequence[Sequence[Any]], held: Mapping[Key, torch.Tensor]
    ) -> OverlappingMemory | None:
        """Return the memory of a group: around the model's tensor in it, else new.

        Returns None if fewer than two of the group are here.
        """
        here = [(tuple(key), offset) for key, offset, _ in group if tuple(key) in held]
        if len(here) < 2:
            return None
        anchor = next(((key, offset) for key, offset in here if key[1:] in PLACED), None)
        if anchor is None:
            return OverlappingMemory.empty(group, held)
        return OverlappingMemory.around(held[anchor[0]], anchor[1])

    def values(self) -> dict[str, dict[str, Any]]:
        """Return the optimizers' values for stored parameters that are no tensors, by parameter and slot, as JSON."""
        found = {}
        for parameter in self.stored:
            slots = self._state(parameter)
            plain = {s: v for s, v in slots.items() if not isinstance(v, torch.Tensor)}
            if classes := quantised_classes(slots):
                found[parameter.name] = classes
            if plain:
                known = self._known_beside(parameter.parameter.device)
                found[parameter.name] = classes | (
                    {s: encode(v, f"{parameter.name}/{s}", known) for s, v in plain.items()}
                    if all(isinstance(slot, str) and not slot.startswith("__") for slot in plain)
                    else encode(plain, parameter.name, known)
                )
        return found

    def _known_beside(self, home: torch.device) -> Any:
        """Return the function by which ``encode`` stores tensors among values.

        Parameters are stored by name, and tensors on another device than ``home`` with their device.
        """

        def known(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return None
            if id(value) in self.name_of:
                return {"__parameter__": self.name_of[id(value)]}
            return None if value.device == home else {**encode(value), "device": str(value.device)}

        return known

    def layouts_now(self) -> dict[str, list[list[int]]]:
        """Return shape and strides, by key, of optimizer tensors that ``load`` would lay out otherwise, as JSON."""
        found = {}
        for parameter in self.stored:
            for slot, value in self._state(parameter).items():
                plain = type(value) is torch.Tensor and value.layout == torch.strided
                if plain and value.stride() != self._usual_strides(parameter, value.shape):
                    found[f"{parameter.name}/{slot}"] = [list(value.shape), list(value.stride())]
        return found

    def on_host_now(self) -> dict[str, bool]:
        """Return whether optimizer tensors are on the host, by key, where that is not as usual beside a device.

        Of parameters in host memory it is what was loaded.
        """
        found = {}
        for parameter in self.stored:
            on_device = parameter.parameter.device.type != "cpu"
            for slot, value in self._state(parameter).items():
                key, usual = f"{parameter.name}/{slot}", self._usually_on_host(parameter.name, slot)
                is_on_host = value.device.type == "cpu" if type(value) is torch.Tensor else usual
                if (place := is_on_host if on_device else self._stays_on_host(parameter.name, slot)) != usual:
                    found[key] = place
        return found

    def _usual_strides(self, parameter: CapturedParameter, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the strides of the parameter for a tensor of its shape, else those of a contiguous tensor."""
        held = local_of(parameter.held())
        if held.shape == shape and torch.ops.aten.is_non_overlapping_and_dense(held):
            return held.stride()
        return torch.empty(shape, device="meta").stride()

    def standing(self) -> dict[str, Any]:
        """Return, as JSON, the optimizers' state besides tensors that a snapshot has in its progress.

        It consists of values, layouts, what is on the host, and state that belongs to no parameter.
        """
        layouts, on_host = self.layouts_now(), self.on_host_now()
        own = [each.carried(self) for each in self.own]
        return {
            "values": self.values(),
            **({"layouts": layouts} if layouts else {}),
            **({"on_host": on_host} if on_host else {}),
            **({"own": own} if any(own) else {}),
        }

    def load_standing(self, progress: Mapping[str, Any], owners: Collection[str]) -> None:
        """Restore the values of ``standing`` for the parameters among ``owners``."""
        self.load_values({name: slots for name, slots in progress["values"].items() if name in owners})

    def load_own(self, progress: Mapping[str, Any]) -> None:
        """Restore the state in ``standing`` that belongs to no parameter."""
        carried = progress.get("own", [])
        for number, each in enumerate(self.own):
            each.restore(self, carried[number] if number < len(carried) else [])

    def carry(self, names: Iterable[str]) -> None:
        """Treat those of the buffers ``names`` that are not persistent as if they were."""
        for name in names:
            module, own = self.passing.get(name, (None, ""))
            if module is not None and module._buffers.get(own) is not None:
                self.carried.add(name)
                (self._buffers_beside if ":" in name else self._buffers)[name] = self.passing[name]

    def drop_carried(self, name: str) -> None:
        """Stop treating the buffer ``name`` as persistent, which it is not."""
        self.carried.discard(name)
        (self._buffers_beside if ":" in name else self._buffers).pop(name, None)

    def check(self, kinds: dict[str, tuple[str, tuple[int, ...]]]) -> None:
        """Raise ``RunMismatch`` unless entries of these kinds (dtype and shape by key) are a state of this model."""
        self.carry(key.removesuffix("/buffer") for key in kinds if key.endswith("/buffer"))
        targets = {f"{p.name}/param": (p.parameter.dtype, p.shape) for p in self.parameters}
        targets |= {key: (held.dtype, tuple(held.shape)) for key, (_, held) in self.buffers().items()}
        for key, (dtype, shape) in targets.items():
            here = (TO_NAME[dtype], shape)
            if kinds.get(key) != here:
                there = "none" if key not in kinds else "{} {}".format(*kinds[key])
                raise _mismatch(f"of {key} it has {there}, this one has {here[0]} {here[1]}")
        names = {key.rpartition("/")[0] for key in targets}
        for key in kinds:
            name, _, slot = key.rpartition("/")
            if name not in names and name in self.elsewhere:
                continue
            if name not in names or (slot not in ("param", "buffer") and name not in self._optimizer_of):
                made_later = " yet: run a forward pass before the Checkpointer is made, if that makes it"
                raise _mismatch(
                    f"it has {key}, and this one has no such tensor{made_later if slot == 'buffer' else ''}"
                )

    def forget_optimizer_state(self) -> None:
        """Clear the optimizers' state and the residuals.

        Call it before ``load`` and ``load_values`` of a whole state: what they do not name, optimizers do not hold.
        """
        for optimizer in self.optimizers:
            for key in [key for key in optimizer.state if isinstance(key, torch.Tensor)]:
                del optimizer.state[key]
        self.forget_residuals()

    def forget_residuals(self) -> None:
        """Clear the residuals, which then begin at zero."""
        self.residuals.clear()

    @torch.no_grad()
    def load(self, atoms: dict[str, torch.Tensor]) -> None:
        """Copy ``atoms``, by key, to where the model and the optimizers hold them.

        The entries have been checked before. If this process holds nothing of a parameter, its optimizer gets nothing
        for it.
        """
        buffers = self.buffers()
        for key, value in atoms.items():
            name, _, slot = key.rpartition("/")
            if slot == "buffer":
                if name in self.rebound:
                    module, own = self.passing[name]
                    module._buffers[own] = value.to(buffers[key][1].device, copy=True)
                elif key in buffers or name not in self.elsewhere:
                    buffers[key][1].copy_(value)
            elif self.lacks(name):
                continue
            elif slot == "param":
                local_of(self._parameter[name].held()).copy_(value)
            elif slot == RESIDUAL:
                parameter = self._parameter[name].parameter
                self.residuals[parameter] = value.to(parameter.device, copy=True)
            else:
                self._load_slot(name, slot, value)

    @torch.no_grad()
    def load_part(
        self, name: str, slot: str, value: torch.Tensor, box: AnyRegion, block_size: int | None = None
    ) -> None:
        """Copy this process's part of the region ``box`` of a parameter or a tensor of its shape.

        Such tensors belong to its optimizer or its error feedback.

        Args:
            name: The name of the parameter.
            slot: The slot of the tensor.
            value: The tensor's elements in ``box``.
            box: The region of ``value``: of the parameter, or of the tensor's blocks with ``block_size``.
            block_size: The elements of the parameter that share one element of the tensor; None if each has its own.
        """
        here, captured = self.boxes[name], self._parameter[name]
        if block_size:
            here = blocks_in(name, self.wholes[name], here, block_size)
        if self.lacks(name):
            return
        if slot == RESIDUAL:
            if captured.parameter not in self.residuals:
                device = captured.parameter.device
                self.residuals[captured.parameter] = torch.zeros(here.shape, dtype=value.dtype, device=device)
            copy_common(self.residuals[captured.parameter], here, value, box)
            return
        if slot != "param" and slot not in with_parts(self._state(captured)):  # even if it is empty here
            self._load_slot(name, slot, value.new_empty(here.shape))
        held = captured.held() if slot == "param" else with_parts(self._state(captured))[slot]
        copy_common(local_of(held), here, value, box)

    def load_values(self, values: Mapping[str, dict[str, Any]], counts_anew: bool = False) -> None:
        """Restore the result of ``values``.

        With ``counts_anew``, for a foreign state, numbers of steps become tensors where the optimizer counts with
        these.
        """
        values = {name: slots for name, slots in values.items() if not self.lacks(name)}
        for name, slots in values.items():
            optimizer, parameter = self.optimizers[self._optimizer_of[name]], self._parameter[name].parameter
            resolve = self._resolve_on(parameter.device)
            restore_values(optimizer.state[parameter], decode(slots, resolve), parameter)
        counted = {self._optimizer_of[name] for name, slots in values.items() if "step" in slots}
        for optimizer in (self.optimizers[number] for number in sorted(counted) if counts_anew):
            # load_state_dict does so too: torch's own optimizers turn step counts from before 1.12 into tensors
            optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})

    def _resolve_on(self, home: torch.device) -> Any:
        def resolve(told: dict[str, Any]) -> Any:
            if "__parameter__" in told:
                return self._parameter[told["__parameter__"]].parameter
            if QUANTISED in told:
                return told
            if "__tensor__" not in told or (home.type == "cpu" and "device" not in told):
                return None
            return decode(told).to(told.get("device", home))

        return resolve

    def rounds(self, optimizer: torch.optim.Optimizer, names: Collection[str]) -> Rounds:
        """Yield the parameters ``names``, as many at a time as ``optimizer`` updates at once.

        During each round, they are where they are to be updated; here that is all of them, in place. Close the
        generator if you stop early, which brings moved parameters back.
        """
        yield names

    def _load_slot(self, name: str, slot: str, value: torch.Tensor) -> None:
        """Make a new tensor where torch would have made it.

        Step counts stay on the host, except for some kernels.
        """
        parameter, optimizer = self._parameter[name], self.optimizers[self._optimizer_of[name]]
        slots = self._state(parameter)
        part = None if slot in slots else with_parts(slots).get(slot)
        if part is not None:  # of a quantised tensor that is made already
            part.copy_(value)
            return
        device = torch.device("cpu") if self._stays_on_host(name, slot) else parameter.parameter.device
        shape, strides = self.layouts.get(f"{name}/{slot}", (None, ()))
        if shape == list(value.shape) and not is_distributed(parameter.parameter):
            optimizer.state[parameter.parameter][slot] = laid_out(value.to(device), strides)
            return
        # fused kernels require that both have the same memory layout
        if value.shape == self.boxes[name].shape:
            made = torch.empty_like(parameter.held(), dtype=value.dtype, device=device)
            local_of(made).copy_(value)
            optimizer.state[parameter.parameter][slot] = made
        else:
            optimizer.state[parameter.parameter][slot] = value.to(device, copy=True)

    def _stays_on_host(self, name: str, slot: str) -> bool:
        """Return whether the state ``slot`` stays on the host: as it was loaded, else as in a new optimizer."""
        return self.on_host.get(f"{name}/{slot}", self._usually_on_host(name, slot))

    def _usually_on_host(self, name: str, slot: str) -> bool:
        group = self.optimizers[self._optimizer_of[name]].param_groups[self._parameter[name].group or 0]
        return slot == "step" and counts_on_host(group)

    def _state(self, parameter: CapturedParameter) -> dict[str, Any]:
        index = self._optimizer_of.get(parameter.name)
        return {} if index is None else self.optimizers[index].state.get(parameter.parameter, {})


def counts_on_host(group: Mapping[str, Any]) -> bool:
    """Return whether torch's optimizers keep the step counts of the ``group`` on the host.

    That is independent of the parameters' device.
    """
    return not (group.get("capturable") or group.get("fused"))


def _named(parameter: CapturedParameter, prefix: str) -> CapturedParameter:
    return replace(parameter, names=tuple(f"{prefix}:{name}" for name in parameter.names))


def _held(name: str, slot: str, tensor: torch.Tensor) -> tuple[str, tuple[TensorEntry, torch.Tensor]]:
    if not is_plain(tensor):
        raise _refused_kind(f"{name}/{slot}", unsupported_kind(tensor))
    if tensor.dtype not in TO_NAME:
        raise _refused_kind(f"{name}/{slot}", str(tensor.dtype))
    tensor = local_of(tensor)
    atom = TensorEntry(name, slot, tuple(tensor.shape), TO_NAME[tensor.dtype])
    return atom.key, (atom, tensor)


def _refused_kind(key: str, kind: str | None) -> BadInput:
    return BadInput(
        f"{key} is {kind}, which commits do not hold. Take an optimizer that keeps plain tensors with values, of a type"
        " such as float32."
    )


def _mismatch(what: str) -> RunMismatch:
    return RunMismatch(
        f"the run holds another model: {what}. Build model and optimizers as the run's were, or give these their own"
        " directory."
    )
