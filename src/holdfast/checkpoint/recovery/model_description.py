"""Description of a model's tensors and its optimizers, from which another process can build equal ones.

No code of the model is involved: parameters are described by name, shape and strides, an optimizer by its class and
hyper-parameters. What cannot be described so is refused, with the way out. With several ranks each describes what it
stores: the regions of parameters that it holds, as separate tensors.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection
from importlib import import_module
from typing import Any

import torch
from torch import nn

from ...accelerators import free_bytes, is_accelerator, use_device
from ...errors import BadInput
from ...optim.kinds import is_elementwise
from ...quantities import packed
from ...state.capture import CapturedParameter
from ...state.encoding import encode
from ...state.layout.overlaps import key_names
from ...state.layout.regions import AnyRegion, Region, local_of
from ...state.live_state import LiveState, Rounds
from ...state.plain_tensors import FROM_NAME, TO_NAME
from ...state.progress import hyper_parameters
from ..arithmetic import product_precision, set_product_precision
from ..capture import device_staging
from ..capture.device_staging import PinnedHomes, StagedOnDevice, visit_bytes
from ..capture.optimizer_attributes import OF_TORCH
from ..snapshot.snapshot_state import members_of, module_of, optimizer_of

_INSTEAD = "Leave out replica=, and every step is recorded on the disk instead."

HOST = torch.device("cpu")

SHARE_OF_DEVICE = 1 / 8
"""The largest share of a device's free memory that a replica's state takes there."""

TIMES_PARAMETERS = 6
"""Assumed bytes of parameters, gradients, optimizer state and an update's temporaries, as a multiple of the
parameters'."""


class RankState(LiveState):
    """One rank's shard of a training state, with the region ``box`` of each parameter as a tensor.

    Tensor entries are named by their place in the whole parameter. A tensor with an entry in ``devices`` is stored on
    the host and copied to that device for each update. All others are updated where they are stored.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        boxes: dict[str, AnyRegion],
        wholes: dict[str, tuple[int, ...]],
        devices: dict[str, torch.device],
        on_host: dict[str, set[str]],
    ) -> None:
        """Build the shard.

        Args:
            boxes: The region of each parameter.
            wholes: The shapes of the whole parameters.
            devices: The device on which a parameter is updated, if that is not where it is stored.
            on_host: Names of optimizer state that stays on the host during an update, where that is known.
        """
        super().__init__(model, optimizers)
        self.boxes, self.wholes = boxes, wholes
        self._devices, self._on_host = devices, on_host
        self._homes = {
            device: PinnedHomes(device) for device in {*devices.values()} if is_accelerator(device)
        }

    def rounds(self, optimizer: torch.optim.Optimizer, names: Collection[str]) -> Rounds:
        """Yield the parameters to update, in groups, while each group is on its device.

        Only an optimizer that is known to be elementwise gets several groups.
        """
        if not self._devices:
            yield names
            return
        with_all = not is_elementwise(optimizer)
        members = {
            self.name_of[id(p)]: p
            for group in optimizer.param_groups
            for p in group["params"]
            if with_all or self.name_of[id(p)] in names
        }
        sizes = {name: visit_bytes(parameter, optimizer) for name, parameter in members.items()}
        some_at_a_time = list(packed(members, lambda name: sizes[name], device_staging.VISIT_BYTES))
        try:
            for some in [list(members)] if with_all else some_at_a_time or [[]]:
                for homes in self._homes.values():
                    homes.make_room()
                visits = {name: self._visit(name, members[name], optimizer) for name in some}
                try:
                    yield some
                finally:
                    self._on_host |= {name: visit.end() for name, visit in visits.items()}
        finally:
            for homes in self._homes.values():
                homes.wait_for_copies()

    def _visit(self, name: str, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> StagedOnDevice:
        stays = self._on_host.get(name)
        if stays is None:  # it was loaded to where a new optimizer would have it
            slots = {"step", *optimizer.state.get(parameter, ())}
            stays = {slot for slot in slots if self._stays_on_host(name, slot)}
        device = self._devices[name]
        return StagedOnDevice(parameter, optimizer, device, stays, self._homes.get(device))

    def _stays_on_host(self, name: str, slot: str) -> bool:
        """Return whether the trainer has the state ``slot`` of a parameter on the host, where that is known."""
        stays = self._on_host.get(name)
        return super()._stays_on_host(name, slot) if stays is None else slot in stays

    def free(self) -> None:
        """Free the memory of tensors that are updated on devices. The state is invalid afterwards."""
        for homes in self._homes.values():
            homes.free()

    def check(self, kinds: dict[str, tuple[str, tuple[int, ...]]]) -> None:
        """Check as ``LiveState.check`` does; ``kinds`` hold the shapes of whole parameters."""
        here = dict(kinds)
        for name, whole in self.wholes.items():
            dtype, shape = kinds.get(f"{name}/param", ("", ()))
            if shape == whole:
                here[f"{name}/param"] = (dtype, self.boxes[name].shape)
        super().check(here)


def refuse_what_cannot_be_rebuilt(state: LiveState) -> None:
    """Raise ``BadInput`` for an optimizer or a parameter that another process cannot rebuild."""
    for index, optimizer in enumerate(state.optimizers):
        kind = type(optimizer)
        if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
            raise BadInput(
                f"optimizer {index} is a {kind.__qualname__} of {kind.__module__}, which another process cannot import:"
                f" put the class into a module of its own. {_INSTEAD}"
            )
        own = sorted(set(vars(optimizer)) - OF_TORCH)
        if own:
            raise BadInput(
                f"optimizer {index}, a {kind.__name__}, holds {own[0]}, which is neither its state nor a"
                f" hyper-parameter, so another process could not go on with it. {_INSTEAD}"
            )
    _refuse_shared(state)
    kinds = {p.parameter.device.type: p for p in state.parameters}
    odd = [p for kind, p in kinds.items() if kind == "meta"] or list(kinds.values())[1:]
    if odd:
        raise BadInput(
            f"{odd[0].name} is on {odd[0].parameter.device}, and a replica takes parameters that are all on the host or"
            f" all on accelerators of one kind. {_INSTEAD}"
        )


def _refuse_shared(state: LiveState) -> None:
    """Raise ``BadInput`` for tensors that share memory. Buffers may, because records hold these by value."""
    shared = [[tuple(key) for key, *_ in group] for group in state.shared()]
    if trained := [keys for keys in shared if any(key[1:] != ("buffer",) for key in keys)]:
        names = key_names(trained[0])
        raise BadInput(f"{names} are one memory, and would not be in a replica. {_INSTEAD}")


def describe(state: LiveState) -> dict[str, Any]:
    """Return as JSON what ``rebuild`` needs of the state stored here. Raises ``BadInput`` for tensors that share
    memory.
    """
    _refuse_shared(state)
    parameters = []
    for p in state.stored:
        held = local_of(p.parameter.detach())
        device = visited(held)
        parameters.append({
            "name": p.name, "dtype": TO_NAME[held.dtype], "shape": list(held.shape), "stride": list(held.stride()),
            "requires_grad": p.parameter.requires_grad, "whole": list(p.shape), "box": state.boxes[p.name].to_json(),
            "device": device, "on_host": None if device is None else _on_host(state, p),
        })  # fmt: skip
    return {
        "parameters": parameters,
        "buffers": [[atom.name, atom.dtype, list(atom.shape)] for atom, _ in state.buffers().values()],
        "optimizers": [_described(state, optimizer) for optimizer in state.optimizers],
        "path": [entry or "." for entry in sys.path],
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": product_precision(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }


def visited(held: torch.Tensor) -> str | None:
    """Return the device on which a parameter is updated; None if that is where it is stored."""
    return None if held.device.type == "cpu" else str(held.device)


def _on_host(state: LiveState, parameter: CapturedParameter) -> list[str] | None:
    """Return the names of the parameter's optimizer state on the host; None if there is no state yet."""
    held = {key.rpartition("/")[2]: tensor for key, (_, tensor) in state.owned(parameter).items()}
    del held["param"]
    return [slot for slot, tensor in held.items() if tensor.device.type == "cpu"] if held else None


def _described(state: LiveState, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    stored = {p.name for p in state.stored}
    return {
        "class": [type(optimizer).__module__, type(optimizer).__qualname__],
        "defaults": encode(optimizer.defaults, "defaults"),
        "members": [[name for name in names if name in stored] for names in members_of(state, optimizer)],
        "groups": hyper_parameters(optimizer.param_groups),
    }


def adopt(about: dict[str, Any]) -> None:
    """Set this process's numerics, import path and device as in the process that was described."""
    torch.set_num_threads(about["threads"])
    torch.use_deterministic_algorithms(about["deterministic"])
    set_product_precision(about["precision"])
    torch.set_default_dtype(getattr(torch, about["default_dtype"]))
    sys.path[:] = about["path"]
    for device in updating_devices(about)[:1]:
        use_device(device)


def updating_devices(about: dict[str, Any]) -> list[torch.device]:
    """Return the devices other than the host on which the described parameters are updated, each once."""
    return [
        torch.device(name) for name in dict.fromkeys(item["device"] for item in about["parameters"]) if name
    ]


def rebuild(about: dict[str, Any], on_host: bool = False) -> RankState:
    """Build the described state, with undefined values. Raises ``BadInput`` if that is impossible here.

    Where it fits beside the trainer's memory it is stored on the device that updates it, so that no step moves it over
    the bus; with ``on_host`` never.
    """
    items = about["parameters"]
    visiting = {item["name"]: torch.device(item["device"]) for item in items if item["device"]}
    stored = visiting if not on_host and _fits_on_devices(items, visiting) else {}
    parameters = {item["name"]: _parameter(item, stored.get(item["name"], HOST)) for item in items}
    buffers = {
        name: torch.zeros(shape, dtype=FROM_NAME[dtype], device="cpu")
        for name, dtype, shape in about["buffers"]
    }
    optimizers = [
        optimizer_of(_class_of(item), item["members"], item["groups"], parameters, item["defaults"])
        for item in about["optimizers"]
    ]
    state = RankState(
        module_of({**parameters, **buffers}),
        optimizers,
        {item["name"]: Region.from_json(item["box"]) for item in about["parameters"]},
        {item["name"]: tuple(item["whole"]) for item in about["parameters"]},
        {} if stored else visiting,
        {item["name"]: set(item["on_host"]) for item in about["parameters"] if item["on_host"] is not None},
    )
    there, here = json.dumps(list(parameters)), json.dumps([p.name for p in state.parameters])
    if there != here:
        raise BadInput(f"the names of the model's parameters cannot be kept in a replica. {_INSTEAD}")
    return state


def _fits_on_devices(items: list[dict[str, Any]], devices: dict[str, torch.device]) -> bool:
    """Return whether the parameters with an entry in ``devices`` fit there with their optimizer state.

    The trainer may not have allocated all that it needs yet, so a replica takes a small share of the free memory.
    """
    needed = dict.fromkeys(devices.values(), 0)
    for item in items:
        if item["name"] in devices:
            nbytes = math.prod(item["shape"]) * FROM_NAME[item["dtype"]].itemsize
            needed[devices[item["name"]]] += TIMES_PARAMETERS * nbytes
    return all(
        is_accelerator(device) and nbytes <= SHARE_OF_DEVICE * free_bytes(device)
        for device, nbytes in needed.items()
    )


def _parameter(item: dict[str, Any], device: torch.device) -> nn.Parameter:
    tensor = torch.empty_strided(item["shape"], item["stride"], dtype=FROM_NAME[item["dtype"]], device=device)
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        tensor = torch.empty(item["shape"], dtype=tensor.dtype, device=device)
    return nn.Parameter(tensor.zero_(), requires_grad=item["requires_grad"])


def _class_of(item: dict[str, Any]) -> Any:
    module, qualname = item["class"]
    try:
        found: Any = import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise BadInput(
            f"another process cannot import the optimizer {qualname} of {module}: {error}. {_INSTEAD}"
        ) from error
    return found
