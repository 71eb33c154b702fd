"""Holder: a run's parameters and optimizers of its classes, made from what a base says, without the script.

Only where replay in it is what training did: optimizers of torch that update each element by itself, nothing done after
the update, the same version of torch and kind of device. Anything else is refused with the reason.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import BadInput
from ..state.capture import FROM_NAME
from ..state.live import RESIDUAL, LiveState
from ..state.progress import decode
from ..store.manifest import Manifest
from ..update.optimizer import ELEMENTWISE


def replay_info(state: LiveState, after_update: bool) -> dict[str, Any]:
    """What ``rebuilt`` needs to know, as JSON; a part of a base's progress."""
    parameters = [captured.parameter for captured in state.parameters]
    return {
        "classes": [f"{type(o).__module__}.{type(o).__qualname__}" for o in state.optimizers],
        "parameters": [
            [[state.name_of[id(p)] for p in group["params"]] for group in optimizer.param_groups]
            for optimizer in state.optimizers
        ],
        "after_update": after_update,
        "devices": sorted({parameter.device.type for parameter in parameters}),
        "strides": {
            captured.name: list(captured.parameter.stride())
            for captured in state.parameters
            if not captured.parameter.is_contiguous()
        },
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def rebuilt(base: Manifest, atoms: dict[str, dict[str, Any]]) -> LiveState:
    """A state of the form of ``base``, of which ``atoms`` are, with values that mean nothing yet. Raises ``BadInput``,
    with the reason, where it could not be replayed in."""
    about = base.progress.get("replay")
    if about is None:
        raise _refused(
            "its base does not say what optimizer it had: it was made by an older version, or by offload"
        )
    if any(atom["slot"] == RESIDUAL for atom in atoms.values()):
        raise _refused("it has residuals of error feedback, which records cannot bring forward")
    _refuse(about, atoms)
    [device] = about["devices"]
    parameters, model = _holder(atoms, about["strides"], device)
    optimizers = [
        _optimizer(kind, [[parameters[name] for name in names] for names in members], groups)
        for kind, members, groups in zip(
            about["classes"], about["parameters"], base.progress["groups"], strict=True
        )
    ]
    torch.set_num_threads(about["threads"])
    return LiveState(model, optimizers)


def _refuse(about: dict[str, Any], atoms: dict[str, dict[str, Any]]) -> None:
    kinds = about["classes"]
    foreign = [
        kind for kind in kinds if not kind.startswith("torch.optim.") or _class_name(kind) not in ELEMENTWISE
    ]
    if foreign:
        raise _refused(f"its optimizer {foreign[0]} is not one of {', '.join(ELEMENTWISE)} of torch.optim")
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


def _class_name(kind: str) -> str:
    return kind.rpartition(".")[2]


def _optimizer(
    kind: str, members: list[list[nn.Parameter]], groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """With the hyper-parameters of the base; each record brings its own."""
    hyper = [{key: decode(value) for key, value in group.items()} for group in groups]
    return getattr(torch.optim, _class_name(kind))(
        [{"params": params, **values} for params, values in zip(members, hyper, strict=True)]
    )


def _holder(
    atoms: dict[str, dict[str, Any]], strides: dict[str, list[int]], device: str
) -> tuple[dict[str, nn.Parameter], nn.Module]:
    """A tree of modules with nothing in it but parameters and buffers of the names and forms of ``atoms``."""
    root, parameters = nn.Module(), {}
    for atom in atoms.values():
        name, shape, dtype = atom["name"], tuple(atom["shape"]), FROM_NAME[atom["dtype"]]
        path, _, last = name.rpartition(".")
        if atom["slot"] == "param":
            layout = strides.get(name)
            data = (
                torch.empty(shape, dtype=dtype, device=device)
                if layout is None
                else torch.empty_strided(shape, layout, dtype=dtype, device=device)
            )
            trained = dtype.is_floating_point
            parameters[name] = _at(root, path)._parameters[last] = nn.Parameter(data, requires_grad=trained)
        elif atom["slot"] == "buffer":
            _at(root, path)._buffers[last] = torch.empty(shape, dtype=dtype, device=device)
    return parameters, root


def _at(root: nn.Module, path: str) -> nn.Module:
    module = root
    for part in path.split(".") if path else ():
        child = module._modules.get(part)
        if child is None:
            child = module._modules[part] = nn.Module()
        module = child
    return module
