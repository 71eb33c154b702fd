"""Reconstruction of a run's parameters and optimizers from a snapshot, without the script.

Done only where replay in the result equals training; anything else is refused with the reason:

- The optimizers are torch's or this library's. They are elementwise, or work tensor by tensor and one rank recorded the
  run.
- Nothing is done after the update.
- The version of torch and the kind of device are the same.

Models are made as trees of plain modules, and optimizers without ``__init__``. Called by compaction, replicas and
``state_at``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import BadInput
from ...optim.kinds import ELEMENTWISE, WHOLE, class_named, name_of_class
from ...state.encoding import decode, joined_members
from ...state.live_state import LiveState
from ...state.plain_tensors import FROM_NAME
from ...state.tensor_entries import RESIDUAL
from ...store.format.manifest import Manifest
from ..arithmetic import arithmetic_here


def rebuilt(base: Manifest, atoms: dict[str, dict[str, Any]]) -> LiveState:
    """Build a state of the form of the snapshot ``base``, with undefined values.

    Raises ``BadInput`` with the reason, where the run cannot be replayed in it.

    Args:
        atoms: The tensor entries of the snapshot, by key.
    """
    progress = base.progress_of(base.streams[0])  # hyper-parameters and flags are the same on all ranks
    about = progress.get("replay")
    if any(progress.get("own", [])):
        raise _refused("its optimizer keeps state that belongs to no parameter")
    if about is None:
        raise _refused(
            "its base does not say what optimizer it had: it was made by an older version, or by offload"
        )
    if any(atom["slot"] == RESIDUAL for atom in atoms.values()):
        raise _refused("it has residuals of error feedback, which records cannot bring forward")
    _refuse(about, atoms, len(base.streams))
    [device] = about["devices"]
    held = {
        atom["name"]: _empty(atom, about["strides"], device)
        for atom in atoms.values()
        if atom["slot"] in ("param", "buffer")
    }
    kinds = [class_named(kind) for kind in about["classes"]]
    members = joined_members([base.progress_of(s)["replay"]["parameters"] for s in base.streams])
    if [len(groups) for groups in members] != [len(groups) for groups in progress["groups"]]:
        raise _refused("its ranks have unlike optimizers or parameter groups, as stages of a pipeline may")
    described = zip(kinds, members, progress["groups"], strict=True)
    optimizers = [optimizer_of(kind, members, groups, held) for kind, members, groups in described]
    torch.set_num_threads(about["threads"])
    return LiveState(module_of(held), optimizers)


def replay_info(state: LiveState, after_update: bool) -> dict[str, Any]:
    """Return as JSON what ``rebuilt`` needs; it is stored in a snapshot's progress."""
    parameters = [captured.parameter for captured in state.parameters]
    return {
        "classes": [name_of_class(type(o)) for o in state.optimizers],
        "parameters": [members_of(state, optimizer) for optimizer in state.optimizers],
        "after_update": after_update,
        "devices": sorted({parameter.device.type for parameter in parameters}),
        "arithmetic": arithmetic_here(state),
        "strides": strides_of(state),
        "shared": state.shared(),
        "frozen": [p.name for p in state.parameters if not p.parameter.requires_grad],
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def beside_records(progress: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of ``progress`` that only snapshots hold, since they never change."""
    kept = ("given", "given_schedule", "given_frozen", "replay", "rates", "aliases", "every")
    return {name: progress[name] for name in kept if name in progress}


def strides_of(state: LiveState) -> dict[str, list[int]]:
    """Return the strides of parameters that are not contiguous, by name."""
    return {p.name: list(p.parameter.stride()) for p in state.parameters if not p.parameter.is_contiguous()}


def _refuse(about: dict[str, Any], atoms: dict[str, dict[str, Any]], ranks: int) -> None:
    for kind in about["classes"]:
        known = class_named(kind)
        if known is None:
            raise _refused(
                f"its optimizer {kind} is not one of {', '.join((*ELEMENTWISE, *WHOLE))} of torch.optim, or of"
                " holdfast.optim (but Joined)"
            )
        if ranks > 1 and known.__name__ not in ELEMENTWISE:
            raise _refused(
                f"its optimizer {kind} needs whole tensors, and {ranks} ranks recorded parts of them"
            )
    if about["after_update"] or any(":" in atom["name"] for atom in atoms.values()):
        raise _refused("something is done after every update (after_update=), which only the script can do")
    if about["torch"] != torch.__version__:
        raise _refused(f"it was trained with torch {about['torch']}, and this is {torch.__version__}")
    devices = about["devices"]
    if len(devices) != 1 or (devices != ["cpu"] and not _is_here(devices[0])):
        raise _refused(f"it was trained on {' and '.join(devices) or 'no device'}, which is not here as one")


def _refused(why: str) -> BadInput:
    return BadInput(
        f"the run cannot be replayed without its script: {why}. A base from the live state is what the script makes:"
        " call save() of its Checkpointer."
    )


def _is_here(device: str) -> bool:
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return here is not None and here.type == device


def _empty(atom: dict[str, Any], strides: dict[str, list[int]], device: str) -> torch.Tensor:
    """Return an empty parameter or buffer of the form of the tensor entry ``atom``."""
    shape, dtype = tuple(atom["shape"]), FROM_NAME[atom["dtype"]]
    layout = strides.get(atom["name"])
    data = (
        torch.empty(shape, dtype=dtype, device=device)
        if layout is None
        else torch.empty_strided(shape, layout, dtype=dtype, device=device)
    )
    return (
        data
        if atom["slot"] == "buffer"
        else nn.Parameter(data, requires_grad=dtype.is_floating_point or dtype.is_complex)
    )


def module_of(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a tree of modules that holds ``tensors`` at their names: parameters as such, others as buffers."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        module: Any = root
        for part in path:
            module = module._modules.setdefault(part, nn.Module())
        held = module._parameters if isinstance(tensor, nn.Parameter) else module._buffers
        held[leaf] = tensor
    return root


def members_of(state: LiveState, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of the parameters in each group."""
    return [[state.name_of[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def places_of(optimizers: Sequence[Sequence[Sequence[str]]]) -> dict[str, tuple[int, int]]:
    """Return for each parameter the numbers of its optimizer and group, from the ``members_of`` all optimizers."""
    return {
        name: (number, group)
        for number, groups in enumerate(optimizers)
        for group, names in enumerate(groups)
        for name in names
    }


def optimizer_of(
    kind: Any,
    members: Sequence[Sequence[str]],
    groups: Sequence[Mapping[str, Any]],
    parameters: Mapping[str, torch.Tensor],
    defaults: Any = None,
) -> torch.optim.Optimizer:
    """Return an optimizer of the class ``kind`` without state.

    Made as ``copy.deepcopy`` does, by ``__setstate__`` instead of ``__init__``. ``groups`` and ``defaults`` are
    hyper-parameters, as JSON.
    """
    made = kind.__new__(kind)
    made.__setstate__({
        "defaults": decode(defaults or {}),
        "state": defaultdict(dict),
        "param_groups": [
            {"params": [parameters[name] for name in names], **{k: decode(v) for k, v in group.items()}}
            for names, group in zip(members, groups, strict=True)
        ],
    })  # fmt: skip
    return made
