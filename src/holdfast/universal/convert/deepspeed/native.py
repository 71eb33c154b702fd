"""Checkpoints as ZeRO saves them, one optimizer file for each rank, read in place.

``param`` is the fp32 master; of parameters that the optimizer does not have, and of buffers, what the model has.
Buffers that every rank keeps for itself are those of rank 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ....errors import BadInput, Damaged
from ....state.atoms import DTYPE_BYTES
from ....state.capture import FROM_NAME
from ...load import read_flat
from ...pickles import Record
from . import zero3, zero12
from .common import Names, add_parameter, progress_of
from .folder import Folder, check_ranks, files_of, need, opened
from .local import Local, Rank, WithNumbers, elements, shapes_of
from .model import ModelStates, add_model, check_models

_SAME = (
    "param_groups",
    "loss_scaler",
    "dynamic_loss_scale",
    "overflow",
    "clip_grad",
    "zero_stage",
    "ds_version",
)
"""What every rank's optimizer has to say alike."""
SAMPLED = 64
"""Parameters that are looked at, to tell whether the model is that of the optimizer."""


class Native(WithNumbers):
    """The checkpoint in ``path``, the folder of a tag."""

    def __init__(self, path: Path) -> None:
        """Raises ``FileMissing`` and ``Damaged`` naming the file that is not as it should be, ``BadInput`` for what is
        not read."""
        folder = files_of(path)
        models, ranks = _files(folder)
        super().__init__(str(path), f"deepspeed zero-{_stage(folder, ranks)}")
        first = models[0]
        shapes = shapes_of(need(first.content, "param_shapes", first.archive.path), first.archive.path)
        zero = zero3 if folder.partitioned else zero12
        locals_ = zero.locals_of(self, shapes, ranks)
        names = Names({*locals_, *first.names})
        groups = _groups(ranks[0])
        self.progress = progress_of(first, _others(ranks[0]), groups)
        count = max([len(groups), *(local.group + 1 for local in locals_.values())])
        self.progress["group_parameters"] = [
            [names[name] for name, local in locals_.items() if local.group == group] for group in range(count)
        ]
        for name, local in locals_.items():
            add_parameter(self, names[name], local)
        self.aliases = {names[alias]: names[name] for alias, name in first.aliases.items()}
        add_model(self, models, set(locals_), names, folder.partitioned)
        self._check_steps(first, locals_, names)

    def _check_steps(self, model: ModelStates, trained: dict[str, Local], names: Names) -> None:
        """Raise ``Damaged`` if the optimizer's files are of another step than the model states.

        An optimizer may have done fewer steps than the model, if it was begun anew; then the model's parameters tell.
        """
        counts = [value for local in trained.values() if (value := local.steps) is not None]
        steps = model.content.get("global_steps", 0) - (model.content.get("skipped_steps") or 0)
        if not counts or max(counts) == steps:
            return
        mixed = max(counts) > steps
        if not mixed and (
            held := [key for key in trained if elements(trained[key].shape) and model.holds(key)]
        ):
            mixed = not any(self._is_copy(model, key, names[key]) for key in held[:SAMPLED])
        if mixed:
            raise Damaged(
                f"{model.archive.path} is of {steps} steps, and the optimizer's files of {max(counts):g}: two"
                " checkpoints are mixed. Take all files from one.",
                path=str(model.archive.path),
            )

    def _is_copy(self, model: ModelStates, key: str, name: str) -> bool:
        """Whether the first element of the model's parameter is that of the master."""
        tensor, master = model.module[key], self.atoms[f"{name}/param"]
        here, dtype = FROM_NAME[master.atom.dtype], FROM_NAME[tensor.storage.dtype]
        data = bytearray(DTYPE_BYTES[tensor.storage.dtype])
        self.read(model.part(self, tensor), tensor.offset * len(data), memoryview(data))
        first = torch.from_numpy(read_flat(self, master, 0, 1).view("u1")).view(here)
        return torch.equal(first.to(dtype), torch.frombuffer(data, dtype=dtype))


def _files(folder: Folder) -> tuple[list[ModelStates], list[Rank]]:
    """Opened, in the order of their ranks, and checked to be of one checkpoint."""
    path = folder.models[min(folder.models)]
    first = ModelStates(opened(path))
    world, parallel = (need(first.content, key, path) for key in ("dp_world_size", "mp_world_size"))
    if parallel != 1 or any(mp for mp, _ in folder.models):
        raise BadInput(
            f"{folder.path} is of {parallel} tensor- or pipeline-parallel ranks, which are not read here yet"
        )
    if not folder.optimizers:
        raise BadInput(
            f"{folder.path} has no *_optim_states.pt: ZeRO was off (stage 0), or only the model was saved. The module"
            f" in {path.name} is a state dict of torch."
        )
    check_ranks(folder.optimizers, parallel, world, "the optimizer's file", folder.path)
    models = [first]
    if folder.partitioned:
        check_ranks(folder.models, parallel, world, "the file of model states", folder.path)
        models += [ModelStates(opened(folder.models[0, rank])) for rank in range(1, world)]
        check_models(models)
    ranks = []
    for rank in range(world):
        archive = opened(folder.optimizers[0, rank])
        ranks.append(Rank(archive, need(archive.content, "optimizer_state_dict", archive.path)))
    _check_same(ranks)
    return models, ranks


def _check_same(ranks: list[Rank]) -> None:
    def said(rank: Rank) -> dict[str, Any]:
        return {"param_groups": _groups(rank)} | {key: rank.state[key] for key in _SAME if key in rank.state}

    first = said(ranks[0])
    for rank in ranks[1:]:
        for key, value in said(rank).items():
            if value != first.get(key):
                raise Damaged(
                    f"{rank.path}: {key} is not what it is in {ranks[0].path.name}: the files are of two checkpoints."
                    " Take all of them from one.",
                    path=str(rank.path),
                )


def _groups(rank: Rank) -> list[dict[str, Any]]:
    """The optimizer's groups, with their hyper-parameters; none where the format does not have them."""
    base = rank.state.get("base_optimizer_state") or rank.state.get("optimizer_state_dict")
    return list(base.get("param_groups") or ()) if isinstance(base, dict) else []


def _others(rank: Rank) -> dict[str, Any]:
    """What the optimizer says beside its tensors."""
    known = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
    return {key: rank.state[key] for key in known if key in rank.state}


def _stage(folder: Folder, ranks: list[Rank]) -> int:
    stage = ranks[0].state.get("zero_stage")
    if isinstance(stage, Record) and stage.args and isinstance(stage.args[0], int):
        stage = stage.args[0]
    found = stage if isinstance(stage, int) else (3 if folder.partitioned else 1)
    if (found == 3) != folder.partitioned:
        raise Damaged(
            f"{ranks[0].path} is of ZeRO-{found}, and the model states are not: two checkpoints in one folder",
            path=str(ranks[0].path),
        )
    return found
