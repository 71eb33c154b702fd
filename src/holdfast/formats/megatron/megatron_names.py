"""Progress of a Megatron checkpoint, from ``common.pt`` and the objects that ranks stored."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from ...errors import Damaged
from ...state.encoding import decode
from ..torch_archive.archives import Archive
from ..torch_archive.pickled_json import Plain
from .parameter_names import shard_of

_TOP = {"iteration", "opt_param_scheduler", "args"}


class CommonState:
    """The content of ``common.pt`` as JSON."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises ``Damaged`` if torch did not write it, or if it names code."""
        archive = Archive(path)
        if not isinstance(archive.content, dict):
            raise Damaged(
                f"{path} holds a {type(archive.content).__name__} and no dictionary", path=str(path)
            )
        self._path, plain = path, Plain(archive)
        self.content: dict[str, Any] = {str(key): plain(value) for key, value in archive.content.items()}

    @property
    def arguments(self) -> dict[str, Any]:
        """The command line arguments that the checkpoint was made with, by name."""
        given = self.content.get("args")
        return dict(given.get("fields", {})) if isinstance(given, dict) else {}

    def progress(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        """Return the progress (as in ``Source``) except for parameters; ``objects`` are the ranks' objects by key."""
        step = self.content.get("iteration")
        if step is not None and (type(step) is not int or step < 0):
            raise Damaged(f"{self._path} says that the iteration is {step!r}", path=str(self._path))
        progress: dict[str, Any] = {} if step is None else {"step": step}
        schedule = self.content.get("opt_param_scheduler")
        if isinstance(schedule, dict):
            progress["scheduler"] = schedule
        extra = {key: value for key, value in self.content.items() if key not in _TOP}
        progress["extra"] = {**extra, "args": self.arguments, **objects}
        return progress


class Groups:
    """The parameter groups of an optimizer, from every place of a checkpoint that has them.

    Several optimizers follow one another, and each model-parallel rank repeats its groups.
    """

    def __init__(self, held: list[Any]) -> None:
        self.groups: list[dict[str, Any]] = []
        self.steps: set[float] = set()
        for value in held:
            self._take(decode(value))

    def _take(self, value: Any) -> None:
        """Collect groups and steps at any depth of ``value``."""
        if isinstance(value, dict):
            for key, inner in value.items():
                if key == "param_groups" and isinstance(inner, list):
                    self._add(inner)
                elif key == "common_step":
                    self._count(inner)
                else:
                    self._take(inner)
        elif isinstance(value, list | tuple):
            for inner in value:
                self._take(inner)

    def _add(self, groups: list[Any]) -> None:
        for group in groups:
            options = {k: v for k, v in dict(group).items() if k not in ("params", "step")}
            self._count(group.get("step"))
            if not any(_same(options, known) for known in self.groups):
                self.groups.append(options)

    def _count(self, step: Any) -> None:
        number = step.item() if hasattr(step, "numel") and step.numel() == 1 else step
        if isinstance(number, int | float) and not isinstance(number, bool):
            self.steps.add(float(number))

    def common(self) -> dict[str, Any]:
        """Return the hyper-parameters that are equal in all groups."""
        first, *others = self.groups or [{}]
        return {
            key: value
            for key, value in first.items()
            if all(key in other and _same(value, other[key]) for other in others)
        }


def _same(one: Any, other: Any) -> bool:
    if hasattr(one, "numel") or hasattr(other, "numel"):  # tensors
        return type(one) is type(other) and one.equal(other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other)


def check_objects(keys: list[str], where: str) -> None:
    """Raise ``Damaged`` unless each object that ranks stored in parts has all its parts."""
    found: dict[tuple[str, tuple[int, ...]], set[tuple[int, ...]]] = {}
    for shard in filter(None, map(shard_of, keys)):
        inside = len(shard.place) == len(shard.shape) and all(
            at < n for at, n in zip(shard.place, shard.shape, strict=True)
        )
        if not inside:
            raise Damaged(
                f"{where}: the part {list(shard.place)} of {shard.name} is none of {list(shard.shape)}",
                path=where,
            )
        found.setdefault((shard.name, shard.shape), set()).add(shard.place)
    for (name, shape), places in found.items():
        if len(places) != prod(shape):
            raise Damaged(
                f"{where}: of {name} there are {len(places)} of {prod(shape)} parts: one of a rank is missing",
                path=where,
            )


def numbers_of(arguments: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of the command line that rules may name, called as in config.json.

    Without a vocabulary size, the padded one is used.
    """
    given = dict(arguments)
    if not given.get("group_query_attention"):
        given["num_query_groups"] = given.get("num_attention_heads")
    given["vocab_size"] = given.get("vocab_size") or given.get("padded_vocab_size")
    return {name: given[key] for key, name in _CALLED.items() if type(given.get(key)) is int}


_CALLED = {
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "num_experts": "num_local_experts",
    "vocab_size": "vocab_size",
}
