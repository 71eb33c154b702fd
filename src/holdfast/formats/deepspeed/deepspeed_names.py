"""The part that ZeRO checkpoints and universal folders have in common: names, model states, and progress.

The model states file holds facts about the model, its buffers, and parameters that are not trained; the rest of a
parameter comes from other files and is added by ``add_parameter``. Files of two checkpoints are refused. Unknown
entries of the client state are carried as ``extra``; those that are too large are listed as left out. Called by the
readers of both formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

from ...errors import BadInput, Damaged
from ...quantities import MiB, counted
from ...state.layout.fragments import Fragments, dense, flat
from ...state.layout.regions import Region
from ...state.layout.zero_shares import cut
from ...state.tensor_entries import TensorEntry
from ..entry_keys import unwrapped
from ..fragment_reads import ReadFiles, WithNumbers
from ..source import SourceTensor
from ..torch_archive.archives import Archive, piece_of
from ..torch_archive.pickled_json import Plain
from ..torch_archive.pickles import Tensor
from .deepspeed_folder import need
from .local_tensors import LocalParameter, Shape, shapes_of
from .tensor_parallel import PlacedParameter

LARGEST_EXTRA = 1 * MiB
"""The largest tensor of the client state, in bytes, that is kept. Larger ones are dropped and listed."""
_OWN = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "global_steps", "mp_world_size", "universal_checkpoint_info",
})  # fmt: skip
"""Keys of the model states that are read as something other than ``extra``."""
SAME = ("global_steps", "skipped_steps", "dp_world_size", "mp_world_size", "ds_version")


class ModelStates:
    """The model states file of one rank; its tensors are in ``module``."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self.content: dict[str, Any] = archive.content
        need(self.content, "global_steps", archive.path)
        self.module: dict[str, Any] = self.content.get("module") or {}
        """The module's state dict; empty for a pipeline, whose layers have files of their own."""
        self.buffers = set(self.content.get("buffer_names") or ())
        self.aliases: dict[str, str] = dict(self.content.get("shared_params") or {})

    def holds(self, key: str) -> bool:
        """Return whether the module holds the whole parameter; ZeRO-3 leaves it empty."""
        tensor = self.module.get(key)
        return isinstance(tensor, Tensor) and prod(tensor.shape) > 0

    @property
    def names(self) -> set[str]:
        """All names of tensors in the model, aliases included."""
        return {*self.module, *self.aliases, *(self.content.get("frozen_param_shapes") or ())}

    def local(self, contents: ReadFiles, key: str, slot: str) -> LocalParameter:
        """Return the tensor ``key`` of the module."""
        tensor = self.module[key]
        local = LocalParameter(tensor.shape, -1)
        local.add(
            slot,
            tensor.storage.dtype,
            [piece_of(tensor, self.archive.part_in(contents, tensor.storage))],
            self.archive.path,
        )
        return local


def progress_of(
    model: ModelStates, optimizer: Mapping[str, Any], groups: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the progress from the model states and the optimizer's other values; ``extra`` holds unknown ones."""
    content, plain = model.content, Plain(model.archive, LARGEST_EXTRA)
    config = content.get("ds_config") if isinstance(content.get("ds_config"), dict) else {}
    progress: dict[str, Any] = {"step": int(content.get("global_steps") or 0)}
    if isinstance(kind := (config.get("optimizer") or {}).get("type"), str):
        progress["optimizer"] = kind
    progress["groups"] = [
        plain({key: value for key, value in group.items() if key != "params"}, f"param_groups[{i}]")
        for i, group in enumerate(groups)
    ]
    if content.get("lr_scheduler") is not None:
        progress["scheduler"] = plain(content["lr_scheduler"], "lr_scheduler")
    extra = {
        key: plain(value, key) for key, value in content.items() if key not in _OWN and value is not None
    }
    extra |= {key: plain(value, key) for key, value in optimizer.items()}
    extra |= {key: plain(value, key) for key, value in model.module.items() if not isinstance(value, Tensor)}
    progress["extra"] = extra | ({"not_carried": plain.left_out} if plain.left_out else {})
    return progress


def add_parameter(contents: WithNumbers, name: str, whole: PlacedParameter) -> None:
    """Add the tensor entries of a parameter to ``contents``."""
    for slot, laid in whole.slots.items():
        pieces, *copies = laid.copies
        contents.add(
            SourceTensor(
                TensorEntry(name, slot, whole.shape, laid.dtype), pieces, tuple(copies), laid.averaged
            )
        )
    for slot, value in whole.values.items():
        if value.dtype:
            atom, piece = (
                TensorEntry(name, slot, (), value.dtype),
                dense(Region((), ()), value.part, value.offset),
            )
        elif slot == "step":
            atom, piece = (
                TensorEntry(name, slot, (), "F32"),
                dense(Region((), ()), contents.add_number(value.number)),
            )
        else:
            contents.progress.setdefault("values", {}).setdefault(name, {})[slot] = value.number
            continue
        contents.add(SourceTensor(atom, Fragments.of([piece], 0)))


class Names(Mapping[str, str]):
    """Names without those of wrappers, by original name. Raises ``BadInput`` where two names become equal."""

    def __init__(self, names: Iterable[str]) -> None:
        found = {name: unwrapped(name) for name in sorted(names)}
        while found and all(name.startswith("module.") for name in found.values()):
            found = {name: plain.removeprefix("module.") for name, plain in found.items()}
        self._plain = found
        kept: dict[str, str] = {}
        for name, plain in found.items():
            if kept.setdefault(plain, name) != name:
                raise BadInput(f"{kept[plain]} and {name} are both {plain} without the names of wrappers")

    def __getitem__(self, name: str) -> str:
        return self._plain[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._plain)

    def __len__(self) -> int:
        return len(self._plain)


def beside(
    contents: ReadFiles, models: list[ModelStates], trained: set[str], partitioned: bool
) -> dict[str, LocalParameter]:
    """Return buffers and parameters that are not ``trained``.

    With ``partitioned`` (ZeRO-3), such a parameter is divided over the files of the data-parallel ranks.
    """
    first, found = models[0], dict[str, LocalParameter]()
    frozen = shapes_of([first.content.get("frozen_param_shapes") or {}], first.archive.path)[0]
    for key, tensor in first.module.items():
        if not isinstance(tensor, Tensor) or key in trained or key in first.aliases:
            continue
        if key in first.buffers or not partitioned:
            found[key] = first.local(contents, key, "buffer" if key in first.buffers else "param")
        elif key not in frozen:
            raise Damaged(
                f"{first.archive.path}: the model has {key}, of which it says neither that it is trained nor that it"
                " is frozen",
                path=str(first.archive.path),
            )
    return found | {key: _frozen(contents, models, key, frozen[key]) for key in frozen if partitioned}


def check_models(models: list[ModelStates], beside: tuple[str, ...] = ()) -> None:
    """Raise ``Damaged`` unless all model states agree in the keys of ``SAME`` and of ``beside``."""
    for key in (*SAME, *beside):
        for model in models[1:]:
            if model.content.get(key) != models[0].content.get(key):
                raise Damaged(
                    f"{model.archive.path}: {key} is not what it is in {models[0].archive.path.name}: the files are of"
                    " two checkpoints. Take all of them from one.",
                    path=str(model.archive.path),
                )


def writer_of(model: ModelStates, ranks: int | None = None) -> str:
    """Return the DeepSpeed version that claims to have written the checkpoint and the number of ranks, for messages."""
    version = str(model.content.get("ds_version") or "of an unknown version")[:40]
    return f"DeepSpeed {version}" + (f", {counted(ranks, 'rank')}" if ranks else "")


def others_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an optimizer stores beside its tensors."""
    known = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
    return {key: state[key] for key in known if key in state}


def _frozen(contents: ReadFiles, models: list[ModelStates], key: str, shape: Shape) -> LocalParameter:
    """Return a frozen parameter of ZeRO-3, which is divided as trained ones are."""
    local = LocalParameter(shape, -1)
    for rank, model in enumerate(models):
        fragment = (model.content.get("frozen_param_fragments") or {}).get(key)
        low, high = cut(prod(shape), rank, len(models))
        if not isinstance(fragment, Tensor) or fragment.strides != (1,) or fragment.shape[0] < high - low:
            raise Damaged(
                f"{model.archive.path} has no fragment of {high - low} elements of the frozen parameter {key}",
                path=str(model.archive.path),
            )
        pieces = flat(shape, low, high, model.archive.part_in(contents, fragment.storage), fragment.offset)
        local.add("param", fragment.storage.dtype, pieces, model.archive.path)
    return local
