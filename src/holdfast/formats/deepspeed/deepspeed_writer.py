"""Writer of universal folders, which DeepSpeed loads with ``"checkpoint": {"load_universal": true}`` at any world size.

DeepSpeed accepts only folders of its own ZeRO family, so the caller names the stage. Its loader takes trained
parameters with their optimizer state, hyper-parameters, the schedule and counts. It ignores the folder's frozen
parameters and buffers, and keeps those of the script. Files are pickles, because the format demands it; no file of this
library's own formats is.
"""

from __future__ import annotations

import json
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import xxhash

from ...errors import BadInput
from ...state.encoding import decode
from ...state.tensor_entries import RESIDUAL, TensorEntry
from ...store.disk import Disk, alone_in, write_durably
from ..entry_matching import Group, groups_of
from ..load import checks, in_threads
from ..source import Source, SourceTensor, StoredArray, places_of
from ..torch_archive.archive_writer import CHUNK, Size, Streamed, save_torch, streamed

STAGES = (1, 2, 3)
VERSION = "0.19.8"
"""The version of DeepSpeed that defines the format."""
ADAM = {"param", "exp_avg", "exp_avg_sq", "step"}
Slots = dict[str, dict[str, SourceTensor]]
"""Tensor entries by name and slot."""
_MARK = ".holdfast-conversion-"
"""The prefix of the mark file of a conversion; the tag follows."""
_FILES = {"param": "fp32"}
"""Names of the files of slots, where they differ from the slot."""
_NO_FILES = (".", "..", *_FILES.values())
"""Names that no slot may have."""
_RESERVED = frozenset({
    "dp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version", "skipped_steps", "global_samples",
    "loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad", "not_carried", "num_experts", "ds_autoep_layers",
})  # fmt: skip
"""Keys of ``extra`` that are written elsewhere, or describe the old checkpoint alone."""


def write_deepspeed(
    source: Source, folder: Path, stage: int, *, report: Callable[[int], None] = lambda nbytes: None
) -> list[Path]:
    """Write all of ``source`` as a universal folder for ZeRO-``stage``, with ``latest_universal``.

    Durable on return.

    An interrupted conversion with the same arguments is continued. Raises ``BadInput``, before anything is written, for
    what DeepSpeed would not read; ``RunLocked`` if another conversion writes there; ``DiskFull``.
    """
    if stage not in STAGES:
        raise BadInput(f"stage {stage} is not one of {', '.join(map(str, STAGES))}")
    slots = _slots(source)
    groups = _groups(source, slots)
    _refuse(source, groups, slots, stage)
    with alone_in(disk := Disk(folder)):
        tag = _write_folder(source, disk, stage, groups, slots, report)
    return sorted((folder / tag).rglob("*.pt"))


def _write_folder(
    source: Source,
    disk: Disk,
    stage: int,
    groups: list[Group],
    slots: Slots,
    report: Callable[[int], None],
) -> str:
    tag = f"global_step{source.progress.get('step') or 0}"
    model = f"{'zero_pp_rank_0_' if stage == 3 else ''}mp_rank_00_model_states.pt"
    _begin(disk, tag, model, [stage, source.identity(), places_of(source.atoms.values())])
    in_threads(_jobs(source, disk, f"{tag}/zero", groups, slots, report))
    _write(disk, f"{tag}/zero/optimizer_state.pt", _common(source, groups, stage))
    _write(disk, f"{tag}/{model}", _model_states(source, groups, stage))
    disk.sync_dir(f"{tag}/zero", why="universal")
    disk.sync_dir(tag, why="universal")
    source.refuse_rewritten()
    write_durably(disk, "latest_universal", tag.encode(), why="universal")
    disk.unlink(_MARK + tag)
    return tag


def _jobs(
    source: Source, disk: Disk, folder: str, groups: list[Group], slots: Slots, report: Callable[[int], None]
) -> Iterator[Callable[[], int]]:
    """Yield jobs that write each parameter.

    Jobs before it verify the large parts that contain its fragments, while earlier parameters are written.
    """
    begun = set[int]()
    for name in (name for _, names in groups for name in names):
        if not disk.exists(f"{folder}/{name}"):
            parts = {part for stored in slots[name].values() for part in stored.pieces.part.tolist()} - begun
            shared = [part for part in sorted(parts) if _is_read_in_pieces(source.parts[part])]
            begun.update(shared)
            yield from checks(source, shared)
        yield partial(_write_parameter, source, disk, f"{folder}/{name}", slots[name], report)


def _is_read_in_pieces(part: StoredArray) -> bool:
    """Return whether a whole part must be read before its first fragment can be returned."""
    return part.crc32 is not None and part.nbytes > CHUNK


def _slots(source: Source) -> Slots:
    found: Slots = {}
    for stored in source.atoms.values():
        if stored.atom.slot == RESIDUAL:
            warnings.warn(
                f"{stored.atom.key} is not written: DeepSpeed has no residuals of error feedback",
                stacklevel=4,
            )
        else:
            found.setdefault(stored.atom.name, {})[stored.atom.slot] = stored
    return found


def _groups(source: Source, slots: Slots) -> list[Group]:
    """Return the groups with their trained names; parameters without state are frozen where others have state.

    Raises ``BadInput`` if the source does not list the parameters of groups.
    """
    groups = [
        ({k: decode(v) for k, v in group.items()}, names) for group, names in groups_of(source.progress)
    ]
    if not any(names for _, names in groups):
        raise BadInput(
            f"{source.path} does not say which parameters are in which group of the optimizer, and DeepSpeed reads a"
            " state by groups. Resume it with holdfast and save it, or write --to huggingface."
        )
    for name in (name for _, names in groups for name in names):
        if "param" not in slots.get(name, {}):
            raise BadInput(f"{source.path} has no parameter {name}, which a group of the optimizer has")
    stateless = not any(len(slots[name]) > 1 for _, names in groups for name in names)
    return [(group, [n for n in names if stateless or len(slots[n]) > 1]) for group, names in groups]


def _refuse(source: Source, groups: list[Group], slots: Slots, stage: int) -> None:
    """Raise ``BadInput`` for what DeepSpeed's loader would refuse."""
    trained = {name for _, names in groups for name in names}
    for name, held in slots.items():
        if "/" in name or name in (".", ".."):
            raise BadInput(f"{name} cannot be the name of a folder")
        if slot := next((slot for slot in held if "/" in slot or slot in _NO_FILES), None):
            raise BadInput(
                f"{held[slot].atom.key}: {slot} cannot be the name of a file for each element's state. Rename what the"
                " optimizer keeps under that name, or write --to huggingface."
            )
        if name in trained:
            _refuse_state(name, {slot: stored.atom for slot, stored in held.items()}, stage)
        elif not held.keys() <= {"param", "buffer"}:
            key = next(stored.atom.key for slot, stored in held.items() if slot not in ("param", "buffer"))
            raise BadInput(f"{key} is of a parameter that no group of the optimizer has")
    if values := {name: held for name, held in (source.progress.get("values") or {}).items() if held}:
        name, held = next(iter(values.items()))
        raise BadInput(f"{sorted(held)} of {name} are no tensors, which DeepSpeed's loader cannot take")


def _refuse_state(name: str, held: dict[str, TensorEntry], stage: int) -> None:
    master = held["param"]
    if master.dtype not in ("F32", "BF16", "F16"):
        raise BadInput(f"{master.key} is {master.dtype}, and DeepSpeed's master parameters are fp32")
    for slot, atom in held.items():
        if slot not in ("buffer", "step") and atom.shape != master.shape:
            raise BadInput(
                f"{atom.key} is {list(atom.shape)} and the parameter {list(master.shape)}: DeepSpeed's loader takes"
                " state of each element, and a count of steps. Use an optimizer with such, or write --to huggingface."
            )
    if stage == 3 and held.keys() != ADAM:
        raise BadInput(
            f"{name} has {sorted(held.keys() - {'param'})}: DeepSpeed's ZeRO-3 loader reads exp_avg, exp_avg_sq and"
            " step of every parameter, and nothing else. Write --stage 1 or 2, or train a step with Adam."
        )


def _begin(disk: Disk, tag: str, model: str, what: list[Any]) -> None:
    """Create the folders, or find those of an interrupted conversion with the same arguments.

    A mark file is written before the folders and removed when the checkpoint is complete. Raises ``BadInput`` if the
    folder holds another checkpoint.
    """
    mark = xxhash.xxh3_128_hexdigest(json.dumps(what).encode()).encode()
    made = disk.exists(_MARK + tag) and disk.read_bytes(_MARK + tag) == mark
    names = {*disk.listdir(tag)} if disk.exists(tag) else set()
    if model in names and disk.exists(f"{tag}/zero/optimizer_state.pt"):
        names.remove(model)  # it is written after that file
    if disk.exists("latest_universal") or (disk.exists(tag) and not (made and names <= {"zero"})):
        raise BadInput(f"{disk.root} holds a checkpoint already, or a part of another. Give another folder.")
    write_durably(disk, _MARK + tag, mark, why="universal")
    disk.makedirs(f"{tag}/zero")


def _write_parameter(
    source: Source, disk: Disk, folder: str, held: dict[str, SourceTensor], report: Callable[[int], None]
) -> int:
    """Write the folder of one parameter, which gets its name when it is complete."""
    if not disk.exists(folder):
        disk.mkdir(f"{folder}.part")
        paths = {slot: f"{folder}.part/{_FILES.get(slot, slot)}.pt" for slot in held}
        for slot, stored in held.items():
            tensor = streamed(source, stored, "F32" if slot == "param" else None)
            content = tensor if slot == "step" else {"param": tensor, "cat_dim": 0}
            save_torch(disk, paths[slot], content)
        for path in paths.values():  # together: files share the cost of a sync
            disk.sync(path, why="universal")
        disk.sync_dir(f"{folder}.part", why="universal")
        disk.rename(f"{folder}.part", folder)
    nbytes = sum(stored.atom.nbytes for stored in held.values())
    report(nbytes)
    return nbytes


def _write(disk: Disk, path: str, content: Any) -> None:
    save_torch(disk, path, content)
    disk.sync(path, why="universal")


def _common(source: Source, groups: list[Group], stage: int) -> dict[str, Any]:
    """Return the content of ``optimizer_state.pt``, which does not depend on one parameter."""
    params = [{**group, "params": [number]} for number, (group, _) in enumerate(groups)]
    common: dict[str, Any] = {
        "zero_stage": stage, "ds_version": VERSION, "overflow": False, "param_groups": params,
        "partition_count": 1 if stage == 3 else [1] * len(groups),
    }  # fmt: skip
    if isinstance(clip := (source.progress.get("extra") or {}).get("clip_grad"), float | int):
        common["clip_grad"] = clip
    if stage == 3:
        names = next(names for _, names in groups if names)
        step = streamed(source, source.atoms[f"{names[0]}/step"])
        common["optimizer_state_dict"] = {"state": {0: {"step": step}}, "param_groups": params}
    return common


def _model_states(source: Source, groups: list[Group], stage: int) -> dict[str, Any]:
    """Return the model states of a checkpoint with one rank."""
    trained = {name for _, names in groups for name in names}
    extra = source.progress.get("extra") or {}
    model = {key: stored for key, stored in source.atoms.items() if stored.atom.slot in ("param", "buffer")}
    buffers = {s.atom.name: streamed(source, s) for s in model.values() if s.atom.slot == "buffer"}
    frozen = {
        stored.atom.name: streamed(source, stored)
        for stored in model.values()
        if stored.atom.slot == "param" and stored.atom.name not in trained
    }
    flat = {name: Streamed(each.dtype, (_elements(each),), each.chunks) for name, each in frozen.items()}
    shapes = [{name: source.atoms[f"{name}/param"].atom.shape for name in names} for _, names in groups]
    states = {key: decode(value) for key, value in extra.items() if key not in _RESERVED}
    things = source.progress.get("things", source.progress)  # written by a Checkpointer, or by others
    scheduler = things.get("scheduler")
    states |= {
        "module": OrderedDict(buffers if stage == 3 else buffers | frozen),
        "buffer_names": list(buffers),
        "optimizer": None,
        "param_shapes": [
            OrderedDict((name, Size(shape)) for name, shape in group.items()) for group in shapes
        ],
        "frozen_param_shapes": {name: Size(each.shape) for name, each in frozen.items()} or None,
        "frozen_param_fragments": (flat if stage == 3 else frozen) or None,
        "shared_params": dict(source.aliases),
        "lr_scheduler": decode(scheduler) if scheduler else None,
        "data_sampler": decode(extra.get("data_sampler")),
        "random_ltd": None,
        "skipped_steps": extra.get("skipped_steps", 0),
        "global_steps": source.progress.get("step") or 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": {},
        "ds_version": VERSION,
    }
    return states | ({"global_samples": extra["global_samples"]} if "global_samples" in extra else {})


def _elements(tensor: Streamed) -> int:
    return prod(tensor.shape)
