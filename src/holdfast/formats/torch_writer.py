"""Writer of ``.pt`` files as a plain training loop saves them, for scripts without this library.

    checkpoint = torch.load("ckpt.pt", weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])

Tensors are read while they are written, one window at a time. Parameters are numbered in the order of the optimizer's
groups, as ``optimizer.state_dict()`` numbers them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import BadInput
from ..state.encoding import decode
from ..state.tensor_entries import CARRIED
from ..store.disk import Disk
from .entry_keys import EXTRA, nested
from .entry_matching import groups_by_optimizer, refuse_quantised
from .source import Source, SourceTensor
from .torch_archive.archive_writer import Streamed, save_torch_durably, streamed

SUFFIXES = (".pt", ".pth")
MODEL, OPTIMIZER, OPTIMIZERS, STEP, RANDOM = "model", "optimizer", "optimizers", "step", "random"
"""Keys of the file. Other values of a script have their own keys."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
"""Types that ``torch.load(weights_only=True)`` accepts, beside tensors and containers."""


def write_torch(source: Source, path: Path, *, report: Callable[[int], None] = lambda nbytes: None) -> Path:
    """Write all of ``source`` as the file ``path``. Durable on return.

    Before it writes anything, it raises ``BadInput`` if the file exists or the optimizer group of a parameter is
    unknown. Raises ``RunLocked`` if another conversion writes the file; ``DiskFull``.
    """
    if path.is_dir() or os.path.lexists(path):
        raise BadInput(f"{path} is there already. Name a file that is not there.")
    refuse_quantised(source, "torch")
    content = _content(source, lambda stored: _counted(streamed(source, stored), report))
    disk = Disk(path.parent)
    disk.makedirs("")

    def check() -> None:
        source.refuse_rewritten()
        if os.path.lexists(path):  # another conversion may have ended just now
            raise BadInput(f"{path} is there already. Name a file that is not there.")

    save_torch_durably(disk, path.name, content, check)
    return path


def _content(source: Source, tensor: Callable[[SourceTensor], Streamed]) -> dict[str, Any]:
    """Return the content of the file; ``tensor`` returns the stand-in for a tensor entry."""
    weights = [each for each in source.atoms.values() if each.atom.slot in ("param", "buffer")]
    model = {each.atom.name: tensor(each) for each in weights}
    model |= {alias: model[name] for alias, name in source.aliases.items()}  # one memory, as in the source
    content: dict[str, Any] = {MODEL: model}
    optimizers = _optimizers(source, tensor)
    if len(optimizers) == 1:
        content[OPTIMIZER] = optimizers[0]
    elif optimizers:
        content[OPTIMIZERS] = optimizers
    if source.progress.get("step") is not None:
        content[STEP] = source.progress["step"]
    for key, value in _beside(source):
        if key in content:
            continue
        try:
            content[key] = _loadable(decode(value))
        except (BadInput, TypeError, ValueError, KeyError):
            warnings.warn(
                f"{key} is not written: torch.load(weights_only=True) would refuse it", stacklevel=4
            )
    extra = {each.atom.name: each for each in source.atoms.values() if each.atom.slot == EXTRA}
    return content | {name: tensor(each) for name, each in extra.items() if name not in content}


def _beside(source: Source) -> Iterator[tuple[str, Any]]:
    """Yield the values that a script kept beside model and optimizer, under its own names, as JSON."""
    progress = source.progress
    yield from progress.get("things", {}).items()
    for key in ("scheduler", "loader", "scaler", RANDOM):
        if progress.get(key):
            yield key, progress[key]
    extra = {key: value for key, value in progress.get("extra", {}).items() if key != STEP}
    yield from (nested(extra) if _was_flattened(source) else extra).items()


def _optimizers(source: Source, tensor: Callable[[SourceTensor], Streamed]) -> list[dict[str, Any]]:
    """Return a state dict of each optimizer, in torch's numbered form."""
    state = _state(source, tensor)
    found = []
    for groups in groups_by_optimizer(source.progress):
        numbers: dict[str, int] = {}
        for name in (name for _, names in groups for name in names):
            numbers.setdefault(source.aliases.get(name, name), len(numbers))
        held = {number: state.pop(name) for name, number in numbers.items() if name in state}
        options = [
            {key: _loadable(decode(value)) for key, value in group.items()}
            | {"params": [numbers[source.aliases.get(name, name)] for name in names]}
            for group, names in groups
        ]
        found.append({"state": held, "param_groups": options})
    if state:
        raise BadInput(
            f"{source.path} does not say in which group of its optimizer {next(iter(state))} is, and a state dict of"
            " torch knows parameters by their place in the groups. Resume it with holdfast and save it, or write --to"
            " safetensors."
        )
    return found


def _state(source: Source, tensor: Callable[[SourceTensor], Streamed]) -> dict[str, dict[str, Any]]:
    """Return the optimizers' state, by parameter and slot."""
    state: dict[str, dict[str, Any]] = {}
    for each in source.atoms.values():
        atom = each.atom
        if atom.slot in CARRIED:
            warnings.warn(f"{atom.key} is not written: optimizers of torch do not hold it", stacklevel=5)
        elif atom.slot not in ("param", "buffer", EXTRA):
            state.setdefault(atom.name, {})[atom.slot] = tensor(each)
    for name, values in (source.progress.get("values") or {}).items():
        for slot, value in values.items():
            state.setdefault(name, {})[slot] = _loadable(decode(value))
    flattened = _was_flattened(source)
    return {name: _nested(name, held, source) if flattened else held for name, held in state.items()}


def _was_flattened(source: Source) -> bool:
    """Return whether a reader or a conversion has flattened dictionaries and lists into keys with dots."""
    return source.format != "holdfast" or "converted_from" in source.progress


def _nested(name: str, held: dict[str, Any], source: Source) -> dict[str, Any]:
    """Return flattened state as nested dictionaries and lists. Raises ``BadInput`` if it cannot be rebuilt."""
    if lost := sorted(source.unnested & held.keys()):
        raise BadInput(f"{name} of {source.path} has nested state ({lost[0]}), by keys that are no names")
    return nested(held)


def _loadable(value: Any) -> Any:
    """Return ``value`` in types that ``torch.load(weights_only=True)`` accepts.

    Raises ``BadInput`` if there are none.

    NumPy arrays become tensors, NumPy numbers those of Python.
    """
    import torch

    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in _PLAIN or isinstance(value, torch.Tensor | torch.dtype | torch.device | torch.Size):
        return value
    if type(value) in (list, tuple, set):
        return type(value)(_loadable(item) for item in value)
    if isinstance(value, dict):
        return {_loadable(key): _loadable(item) for key, item in value.items()}
    raise BadInput(f"a {type(value).__name__} is not what torch.load(weights_only=True) takes")


def _counted(tensor: Streamed, report: Callable[[int], None]) -> Streamed:
    """Return ``tensor``, calling ``report`` with the bytes of each chunk that is read."""

    def chunks() -> Iterator[Any]:
        for chunk in tensor.chunks():
            report(len(chunk))
            yield chunk

    return replace(tensor, chunks=chunks)
