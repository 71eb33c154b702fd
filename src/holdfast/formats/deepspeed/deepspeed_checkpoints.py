"""Checkpoints of DeepSpeed as sources, read in place: as ZeRO saves them, and as DeepSpeed's converter makes them.

The files of all ranks are compared with one another, since files of two checkpoints may be mixed. Called by
``readers``.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from ...errors import BadInput, Damaged, FileMissing, HoldfastError
from ...state.layout.fragments import Fragments, dense
from ...state.layout.regions import Region
from ...state.tensor_entries import DTYPE_BYTES, TensorEntry
from ..load import read_flat, tensor_of
from ..source import Source, SourceTensor, WithNumbers
from ..torch_archive.archives import Archive, piece_of
from ..torch_archive.pickles import PickledObject, Tensor
from .deepspeed_contents import (
    Folder,
    ModelStates,
    Names,
    add_parameter,
    beside,
    check_models,
    check_ranks,
    files_of,
    is_universal,
    need,
    opened,
    others_of,
    progress_of,
    tag_folder,
    writer_of,
)
from .local_tensors import Info, LocalParameter, PlacedParameter, Rank, Shape, shapes_of
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
_SLOTS = {"fp32": "param"}
SAMPLED = 64
"""The number of parameters that are compared to tell whether model and optimizer files belong together."""


def open_deepspeed(path: Path) -> Source:
    """Open the checkpoint at ``path``: the folder of a tag, or its parent with ``latest`` or ``latest_universal``.

    ``latest`` wins if both exist. Raises ``Damaged`` if the checkpoint is incomplete or mixes several, ``BadInput`` if
    it is of an unsupported kind.
    """
    folder = tag_folder(path)
    try:
        return UniversalCheckpoint(folder) if is_universal(folder) else NativeCheckpoint(folder)
    except HoldfastError:
        raise
    except (
        AttributeError,
        TypeError,
        LookupError,
        ValueError,
        OverflowError,
    ) as error:  # files may hold anything
        raise Damaged(
            f"{folder} has what no DeepSpeed checkpoint has: {type(error).__name__}: {error}",
            path=str(folder),
        ) from error


class NativeCheckpoint(WithNumbers):
    """The checkpoint in ``path``, the folder of a tag, as ZeRO saves it: one optimizer file for each rank.

    ``param`` is the fp32 master; parameters without optimizer state, and buffers, come from the model states. Buffers
    that differ between ranks are those of rank 0.
    """

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


class UniversalCheckpoint(WithNumbers):
    """The universal folder ``path``, that of a tag: a folder for each parameter, with a file for each slot.

    For a ZeRO-3 checkpoint the converter writes flat tensors; their shapes are in the model states, which it copies.
    Files that it writes for buffers, tied weights and frozen parameters (as fp32, if at all) are not read: the model
    states hold those tensors.
    """

    def __init__(self, path: Path) -> None:
        """Read the folder.

        Raises ``FileMissing`` and ``Damaged``, which name the file, and ``BadInput`` for unsupported folders.
        """
        super().__init__(str(path), "deepspeed universal")
        folder = files_of(path)
        models = _models(folder)
        first = models[0]
        shapes = shapes_of(need(first.content, "param_shapes", first.archive.path), first.archive.path)
        common = Archive(path / "zero" / "optimizer_state.pt")
        groups = need(common.content, "param_groups", common.path)
        trained = [name for named in shapes for name in named]
        names = Names({*trained, *first.names})
        self.writer = f"{writer_of(first)}, or holdfast for it"
        self.progress = progress_of(first, others_of(common.content), groups)
        self.progress["group_parameters"] = _members(shapes, groups, names)
        for named in shapes:
            self._add_group(path / "zero", named, names, common)
        self.aliases = {names[alias]: names[name] for alias, name in first.aliases.items()}
        info = Info(None, 1, first.archive.path)
        for key, local in beside(self, models, set(trained), folder.partitioned).items():
            add_parameter(self, names[key], info.join(key, [local]))

    def _add_group(self, root: Path, named: dict[str, Shape], names: Names, common: Archive) -> None:
        """Add parameters of one group, which must all have the same slots."""
        slots: set[str] | None = None
        for name, shape in named.items():
            if "/" in name:
                raise Damaged(f"{root.parent}: {name} cannot be the name of a folder", path=str(root.parent))
            folder = root / name
            found = (
                {file.stem for file in folder.iterdir() if file.suffix == ".pt"} if folder.is_dir() else set()
            )
            slots = found if slots is None else slots
            if "fp32" not in found or found != slots:
                missing = sorted((slots | {"fp32"}) - found) or sorted(found - slots)
                raise FileMissing(
                    f"{folder / missing[0]}.pt is missing, or is there for {name} alone of its group: the conversion"
                    " was not finished, or files were lost. Convert the checkpoint again.",
                    path=str(folder),
                )
            for slot in sorted(found):
                self._add_slot(_archive(folder / f"{slot}.pt"), names[name], _SLOTS.get(slot, slot), shape)
            if "step" not in found and (step := _common_step(common)) is not None:
                self._add_step(common, step, names[name])

    def _add_slot(self, archive: Archive, name: str, slot: str, shape: Shape) -> None:
        content = archive.content
        tensor = content.get("param") if isinstance(content, dict) else content
        if slot == "step":
            return self._add_step(archive, tensor, name)
        if not isinstance(tensor, Tensor):
            raise Damaged(f"{archive.path} has no tensor", path=str(archive.path))
        atom = TensorEntry(name, slot, shape, tensor.storage.dtype)
        if tensor.shape == (prod(shape),) and tensor.strides == (1,):
            piece = dense(Region.whole(shape), archive.part_in(self, tensor.storage), tensor.offset)
        elif tensor.shape == shape:
            piece = piece_of(tensor, archive.part_in(self, tensor.storage))
        else:
            raise Damaged(
                f"{archive.path} is {list(tensor.shape)}, and the model states say {list(shape)}",
                path=str(archive.path),
            )
        self.add(SourceTensor(atom, Fragments.of([piece], len(shape))))

    def _add_step(self, archive: Archive, step: Any, name: str) -> None:
        if isinstance(step, Tensor) and prod(step.shape) == 1:
            dtype, part, offset = step.storage.dtype, archive.part_in(self, step.storage), step.offset
        elif isinstance(step, int | float):
            dtype, part, offset = "F32", self.add_number(step), 0
        else:
            raise Damaged(f"{archive.path} has no count of steps", path=str(archive.path))
        self.add(
            SourceTensor(
                TensorEntry(name, "step", (), dtype), Fragments.of([dense(Region((), ()), part, offset)], 0)
            )
        )


def _models(folder: Folder) -> list[ModelStates]:
    """Open the model states, in the order of their ranks."""
    if any(mp for mp, _ in folder.models):
        raise BadInput(
            f"{folder.path} is of several tensor- or pipeline-parallel ranks, which are not read here yet"
        )
    first = ModelStates(opened(folder.models[min(folder.models)]))
    if not folder.partitioned:
        return [first]
    world = need(first.content, "dp_world_size", first.archive.path)
    check_ranks(folder.models, 1, world, "the file of model states", folder.path)
    models = [first, *(ModelStates(opened(folder.models[0, rank])) for rank in range(1, world))]
    check_models(models, ("param_shapes", "frozen_param_shapes"))
    return models


def _archive(path: Path) -> Archive:
    """Open the file of a slot. Raises ``Damaged`` if it was the file of another slot when written."""
    archive = Archive(path)
    if archive.name not in (path.stem, "archive"):
        raise Damaged(
            f"{path} was {archive.name}.pt when it was saved: a file in the place of another. Give the files their"
            " names back.",
            path=str(path),
        )
    return archive


def _common_step(common: Archive) -> Any:
    """Return the step count of a ZeRO-3 checkpoint, which is not written for each parameter."""
    states = (common.content.get("optimizer_state_dict") or {}).get("state") or {}
    return next((state["step"] for state in states.values() if "step" in state), None)


def _members(shapes: list[dict[str, Shape]], groups: list[dict[str, Any]], names: Names) -> list[list[str]]:
    """Return the parameter names of each optimizer group; with ZeRO-3 a group has several of ``shapes``."""
    return [
        [names[name] for number in group.get("params", ()) if number < len(shapes) for name in shapes[number]]
        for group in groups
    ]
