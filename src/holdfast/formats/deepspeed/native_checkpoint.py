"""Checkpoints as ZeRO saves them, with one optimizer file for each rank, read in place.

``param`` is the fp32 master; parameters without optimizer state, and buffers, come from the model states. Buffers that
differ between ranks are those of rank 0.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from ...errors import BadInput, Damaged
from ...state.tensor_entries import DTYPE_BYTES
from ..fragment_reads import WithNumbers
from ..load import read_flat, tensor_of
from ..torch_archive.pickles import PickledObject
from .deepspeed_contents import (
    Folder,
    ModelStates,
    Names,
    add_parameter,
    beside,
    check_models,
    check_ranks,
    files_of,
    need,
    opened,
    others_of,
    progress_of,
    writer_of,
)
from .local_tensors import Info, LocalParameter, PlacedParameter, Rank, shapes_of
from .zero_partitions import flat_groups, single_parameters

_SAME = (
    "param_groups",
    "loss_scaler",
    "dynamic_loss_scale",
    "overflow",
    "clip_grad",
    "zero_stage",
    "ds_version",
)
"""Keys in which the optimizer files of all ranks must agree."""
SAMPLED = 64
"""The number of parameters that are compared to tell whether model and optimizer files belong together."""


class NativeCheckpoint(WithNumbers):
    """The checkpoint in ``path``, the folder of a tag."""

    def __init__(self, path: Path) -> None:
        """Read the checkpoint.

        Raises ``FileMissing`` and ``Damaged``, which name the file, and ``BadInput`` for unsupported checkpoints.
        """
        folder = files_of(path)
        models, ranks = _files(folder)
        super().__init__(str(path), f"deepspeed zero-{_stage(folder, ranks[0])}")
        read = single_parameters if folder.partitioned else flat_groups
        trained = [
            read(self, shapes_of(need(m[0].content, "param_shapes", m[0].archive.path), m[0].archive.path), r)
            for m, r in zip(models, ranks, strict=True)
        ]
        others = [
            beside(self, m, set(mine), folder.partitioned) for m, mine in zip(models, trained, strict=True)
        ]
        first = models[0][0]
        tensor_ranks, _ = _degrees(first, len(models))
        info = Info(first.content.get("universal_checkpoint_info"), tensor_ranks, first.archive.path)
        wholes = self._wholes(info, trained, tensor_ranks) | self._wholes(info, others, tensor_ranks)
        info.check_used()
        names = Names({*wholes, *(name for m in models for name in m[0].names)})
        groups = _groups(ranks[0][0])
        self.writer = writer_of(first, sum(map(len, ranks)))
        self.progress = progress_of(first, others_of(ranks[0][0].state), groups)
        count = max([len(groups), *(whole.group + 1 for whole in wholes.values())])
        self.progress["group_parameters"] = [
            [names[name] for name, whole in wholes.items() if whole.group == group] for group in range(count)
        ]
        self.aliases = {names[a]: names[n] for m in models for a, n in m[0].aliases.items()}
        for name, whole in wholes.items():
            add_parameter(self, names[name], whole)
        for model, mine in zip(models, trained, strict=True):
            self._check_steps(model[0], mine, names)

    def _wholes(
        self, info: Info, by_rank: list[dict[str, LocalParameter]], tensor_ranks: int
    ) -> dict[str, PlacedParameter]:
        """Join the tensor-parallel ranks of each pipeline stage; a parameter of two stages appears once, with copies.

        Buffers are those of the first tensor-parallel rank.
        """
        found: dict[str, PlacedParameter] = {}
        for start in range(0, len(by_rank), tensor_ranks):
            stage = by_rank[start : start + tensor_ranks]
            for name in dict.fromkeys(name for rank in stage for name in rank):
                missing = [start + i for i, rank in enumerate(stage) if name not in rank]
                if missing:
                    raise Damaged(
                        f"{self.path}: mp_rank_{missing[0]:02d} has no {name}, others have", path=self.path
                    )
                is_buffer = "buffer" in stage[0][name].pieces
                whole = info.join(name, [rank[name] for rank in stage[: 1 if is_buffer else None]])
                if name not in found:
                    found[name] = whole
                elif found[name].shape == whole.shape and (info.is_tied(name) or whole.group < 0):
                    found[name].add_copies(whole)
                else:
                    raise Damaged(
                        f"{self.path}: two pipeline stages have a parameter {name} each", path=self.path
                    )
        return found

    def _check_steps(self, model: ModelStates, trained: dict[str, LocalParameter], names: Names) -> None:
        """Raise ``Damaged`` if the optimizer files and the model states are of different steps.

        An optimizer that was started anew may have done fewer steps than the model; then the model's parameters are
        compared with the masters.
        """
        counts = [value for local in trained.values() if (value := local.steps) is not None]
        steps = model.content.get("global_steps", 0) - (model.content.get("skipped_steps") or 0)
        if not counts or max(counts) == steps:
            return
        mixed = max(counts) > steps
        if not mixed and (held := [key for key in trained if prod(trained[key].shape) and model.holds(key)]):
            mixed = not any(self._is_copy(model, key, names[key]) for key in held[:SAMPLED])
        if mixed:
            raise Damaged(
                f"{model.archive.path} is of {steps} steps, and the optimizer's files of {max(counts):g}: two"
                " checkpoints are mixed. Take all files from one.",
                path=str(model.archive.path),
            )

    def _is_copy(self, model: ModelStates, key: str, name: str) -> bool:
        """Return whether the first element of the model's parameter equals that of the master."""
        import torch

        from ...state.plain_tensors import FROM_NAME

        tensor, master = model.module[key], self.atoms[f"{name}/param"]
        dtype = FROM_NAME[tensor.storage.dtype]
        data = bytearray(DTYPE_BYTES[tensor.storage.dtype])
        self.read(model.archive.part_in(self, tensor.storage), tensor.offset * len(data), memoryview(data))
        first = tensor_of(read_flat(self, master, 0, 1), master.atom.dtype)
        return torch.equal(first.to(dtype), torch.frombuffer(data, dtype=dtype))


def _files(folder: Folder) -> tuple[list[list[ModelStates]], list[list[Rank]]]:
    """Open the files of one checkpoint: by model-parallel rank, then in the order of data-parallel ranks.

    Raises ``FileMissing``, ``Damaged`` or ``BadInput`` if they do not form one checkpoint.
    """
    path = folder.models[min(folder.models)]
    first = ModelStates(opened(path))
    world, parallel = (need(first.content, key, path) for key in ("dp_world_size", "mp_world_size"))
    parallel = max(parallel, len({mp for mp, _ in folder.models}))
    if not folder.optimizers:
        raise BadInput(
            f"{folder.path} has no *_optim_states.pt: ZeRO was off (stage 0), or only the model was saved. The module"
            f" in {path.name} is a state dict of torch."
        )
    check_ranks(folder.optimizers, parallel, world, "the optimizer's file", folder.path)
    each = world if folder.partitioned else 1
    check_ranks(folder.models, parallel, each, "the file of model states", folder.path)
    models = [[ModelStates(opened(folder.models[mp, dp])) for dp in range(each)] for mp in range(parallel)]
    ranks = [[_rank(folder.optimizers[mp, dp]) for dp in range(world)] for mp in range(parallel)]
    for model, mine in zip(models, ranks, strict=True):
        check_models(model, ("param_shapes", "frozen_param_shapes"))
        check_models([models[0][0], model[0]])
        _check_same([ranks[0][0], *mine])
    return models, ranks


def _rank(path: Path) -> Rank:
    archive = opened(path)
    return Rank(archive, need(archive.content, "optimizer_state_dict", archive.path))


def _degrees(model: ModelStates, ranks: int) -> tuple[int, int]:
    """Return the degrees of tensor and pipeline parallelism."""
    said = model.content.get("checkpoint_parallel_dimensions") or {}
    tensor, pipeline = said.get("tp_degree") or 1, said.get("pp_degree") or 1
    if not said and ranks > 1:
        layer = sorted(
            p.name.split("-")[0] for p in model.archive.path.parent.glob("layer_*-model_*-model_states.pt")
        )
        tensor = layer.count(layer[0]) if layer else ranks
        pipeline = ranks // tensor
    if tensor * pipeline != ranks:
        raise Damaged(
            f"{model.archive.path} says that {tensor} x {pipeline} tensor- and pipeline-parallel ranks saved, and"
            f" there are {ranks}",
            path=str(model.archive.path),
        )
    return tensor, pipeline


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
    """Return the optimizer's groups with their hyper-parameters; none where the format lacks them."""
    base = rank.state.get("base_optimizer_state") or rank.state.get("optimizer_state_dict")
    return list(base.get("param_groups") or ()) if isinstance(base, dict) else []


def _stage(folder: Folder, ranks: list[Rank]) -> int:
    stage = ranks[0].state.get("zero_stage")
    if isinstance(stage, PickledObject) and stage.args and isinstance(stage.args[0], int):
        stage = stage.args[0]
    found = stage if isinstance(stage, int) else (3 if folder.partitioned else 1)
    if (found == 3) != folder.partitioned:
        raise Damaged(
            f"{ranks[0].path} is of ZeRO-{found}, and the model states are not: two checkpoints in one folder",
            path=str(ranks[0].path),
        )
    return found
