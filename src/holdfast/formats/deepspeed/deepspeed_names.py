"""Code shared by ZeRO checkpoints and universal folders: names, tensor entries of a parameter, and progress."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...errors import BadInput
from ...quantities import MiB, counted
from ...state.layout.fragments import Fragments, dense
from ...state.layout.regions import Region
from ...state.tensor_entries import TensorEntry
from ..entry_keys import unwrapped
from ..fragment_reads import WithNumbers
from ..source import SourceTensor
from ..torch_archive.pickled_json import Plain
from ..torch_archive.pickles import Tensor
from .model_states import ModelStates
from .tensor_parallel import PlacedParameter

LARGEST_EXTRA = 1 * MiB
"""The largest tensor of the client state, in bytes, that is kept. Larger ones are dropped and listed."""
_OWN = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "global_steps", "mp_world_size", "universal_checkpoint_info",
})  # fmt: skip
"""Keys of the model states that are read as something other than ``extra``."""


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


def others_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an optimizer stores beside its tensors."""
    known = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
    return {key: state[key] for key in known if key in state}


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


def writer_of(model: ModelStates, ranks: int | None = None) -> str:
    """Return the DeepSpeed version that claims to have written the checkpoint and the number of ranks, for messages."""
    version = str(model.content.get("ds_version") or "of an unknown version")[:40]
    return f"DeepSpeed {version}" + (f", {counted(ranks, 'rank')}" if ranks else "")
