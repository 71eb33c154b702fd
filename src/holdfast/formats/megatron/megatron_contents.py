"""The files of a Megatron distributed checkpoint beside those of its tensors, and the meaning of its keys and objects.

``metadata.json`` is written last and names the format. ``common.pt`` holds what all ranks have in common.
``integrity.json``, which is optional in Megatron, holds the SHA-256 of every file; it reveals a file of another save,
which checksums inside the files cannot.

Progress comes from ``common.pt`` and from objects that ranks stored. A key is a parameter's name in the whole model, or
that name after ``optimizer.state`` and a slot. Layers, and experts inside them, are stacked in one tensor or have
numbered keys; here each has its own name. An object of which a rank's part is missing is refused. Called by
``megatron_reader``.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import BadInput, ChunkCorrupt, Damaged, FileMissing
from ...quantities import MiB
from ...state.encoding import decode
from ..dcp.dcp_reader import METADATA
from ..entry_keys import canonical
from ..torch_archive.archives import Archive, Plain

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
MASTERS = ("fp32_param", "master_param")
"""Further names of the slot ``param``, the fp32 master."""
MOST = 1 << 20
"""A limit for the tensors in a stack, which no number of layers and experts reaches."""
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<slot>[^.]+)\.(?P<name>.+)")
_FLAT = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
_OBJECT = re.compile(r"(?P<name>.+)/shard_(?P<place>\d+(?:\.\d+)*)_(?P<shape>\d+(?:\.\d+)*)")


class TensorName(NamedTuple):
    """A tensor of the model, or, with a ``slot``, of its optimizer."""

    name: str
    slot: str | None


class ObjectPart(NamedTuple):
    """One part of an object that ranks stored in parts: its name, its place, and the shape of the grid of parts."""

    name: str
    place: tuple[int, ...]
    shape: tuple[int, ...]


def named(key: str) -> TensorName:
    """Return the name and slot of the tensor ``key``.

    >>> named("chained_0.optimizer.state.fp32_param.module.decoder.layers.mlp.linear_fc2.weight")
    TensorName(name='decoder.layers.mlp.linear_fc2.weight', slot='param')
    """
    match = _STATE.fullmatch(key)
    if match is None:
        return TensorName(canonical(key), None)
    slot = "param" if match["slot"] in MASTERS else match["slot"]
    return TensorName(canonical(match["name"]), slot)


def is_flat(key: str) -> bool:
    """Return whether ``key`` is a buffer of the distributed optimizer, which holds several parameters."""
    return _FLAT.match(key) is not None


def shard_of(key: str) -> ObjectPart | None:
    """Return the part of an object that ``key`` stands for; None if ranks did not store it in parts.

    >>> shard_of("rng_state/shard_0.1_1.2")
    ObjectPart(name='rng_state', place=(0, 1), shape=(1, 2))
    """
    match = _OBJECT.fullmatch(key)
    if match is None:
        return None
    place, shape = (tuple(map(int, match[name].split("."))) for name in ("place", "shape"))
    return ObjectPart(match["name"], place, shape)


def unstacked(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors that are stacked in the one of ``name`` and ``shape``, with their indices along the first axes.

    >>> list(unstacked("decoder.layers.mlp.experts.experts.linear_fc2.bias", (1, 2, 8)))[-1]
    ('decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.bias', (0, 1))
    >>> list(unstacked("decoder.layers.3.mlp.linear_fc2.bias", (8,)))
    [('decoder.layers.3.mlp.linear_fc2.bias', ())]
    """
    template, axes = _template(name)
    if axes > len(shape) or prod(shape[:axes]) > MOST:
        raise ValueError(f"{name} {list(shape)} is no stack of layers")
    for place in product(*map(range, shape[:axes])):
        yield template.format(*place), place


def _template(name: str) -> tuple[str, int]:
    """Return ``name`` as a template with a placeholder for each missing number, and the count of placeholders."""
    parts, found, axes = name.replace("{", "{{").replace("}", "}}").split("."), list[str](), 0
    for part, after, before in zip(parts, [*parts[1:], ""], ["", *parts], strict=False):
        of_experts = part == before == "experts"
        found.append("local_experts" if of_experts else part)
        if (of_experts or part == "layers") and after and not after.isdecimal():
            found.append("{}")
            axes += 1
    return ".".join(found), axes


TRACKER, CONFIG, COMMON, SUMS = (
    "latest_checkpointed_iteration.txt",
    "metadata.json",
    "common.pt",
    "integrity.json",
)
_ITERATION = re.compile(r"iter_\d{7,}")
"""The name that Megatron gives the folder of an iteration."""
LARGEST = 64 * MiB
"""A limit for the size of these JSON files."""


def is_megatron(path: Path) -> bool:
    """Return whether ``path`` is the folder of an iteration, or has a file that names the newest one.

    An incomplete folder counts as well.
    """
    if (path / TRACKER).is_file():
        return True
    if (path / COMMON).is_file():
        return (path / METADATA).is_file() or any(path.glob("*.distcp"))
    if _ITERATION.fullmatch(path.name) and (path / METADATA).is_file():
        return True
    try:
        return "sharded_backend" in _table(path / CONFIG)
    except Damaged:
        return False


def folder_of(path: Path) -> Path:
    """Return the folder of the iteration in the format ``torch_dist``: ``path``, or the newest of ``path``.

    Raises ``BadInput`` for another format, ``FileMissing`` and ``Damaged`` for an incomplete checkpoint.
    """
    folder = newest_of(path)
    if not (folder / CONFIG).is_file():
        if any(folder.glob("mp_rank_*")):
            raise BadInput(
                f"{folder} is of Megatron's format `torch`, a file of each rank, which records no layout. Save it with"
                " --ckpt-format torch_dist, or say what its files are in a rules.toml."
            )
        raise FileMissing(
            f"{folder / CONFIG} is missing, which Megatron writes last: the save was not finished, or is of another"
            " format than torch_dist",
            path=str(folder / CONFIG),
        )
    config = _table(folder / CONFIG)
    backend = config.get("sharded_backend"), config.get("sharded_backend_version", 1)
    if backend != ("torch_dist", 1):
        raise BadInput(
            f"{folder} is of the format {backend[0]!r}, version {backend[1]}; torch_dist, version 1, is the one that is"
            " read. Load it with Megatron and save it with --ckpt-format torch_dist."
        )
    if not (folder / COMMON).is_file():
        raise FileMissing(f"{folder / COMMON} is missing", path=str(folder / COMMON))
    return folder


def newest_of(path: Path) -> Path:
    """Return the folder of the newest iteration that ``path`` names; ``path`` itself if it names none.

    Raises ``Damaged`` if the name is none, ``FileMissing`` if the folder is missing.
    """
    tracker = path / TRACKER
    if not tracker.is_file():
        return path
    text = tracker.read_bytes()[:100].decode(errors="replace").strip()
    if text != "release" and not text.isdecimal():
        raise Damaged(f"{tracker} says {text!r}, which is no iteration", path=str(tracker))
    folder = path / (text if text == "release" else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise FileMissing(f"{tracker} names {folder.name}, which is no folder beside it", path=str(tracker))
    return folder


def _table(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ``Damaged`` if there is none."""
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        table = json.loads(path.read_bytes())
        if not isinstance(table, dict):
            raise ValueError(f"it holds a {type(table).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{path} does not read as JSON of Megatron: {error}", path=str(path)) from None
    return table


class IntegrityFile:
    """The checksums of ``integrity.json`` for the files of ``folder``; none without that file."""

    def __init__(self, folder: Path) -> None:
        """Read the checksums. Raises ``FileMissing`` if a listed file is missing."""
        self._where = folder / SUMS
        self._sums: dict[str, str] = {}
        self._verified: set[str] = set()
        self._lock = threading.Lock()
        if not self._where.is_file():
            return
        table = _table(self._where)
        files = table.get("files")
        if table.get("algorithm", "sha256") != "sha256" or not isinstance(files, dict):
            raise Damaged(f"{self._where} has no sums of SHA-256", path=str(self._where))
        for name, text in files.items():
            path = folder / name
            if Path(name).name != name:
                raise Damaged(
                    f"{self._where} names {name!r}, which is not in the folder", path=str(self._where)
                )
            if not path.is_file():
                raise FileMissing(f"{path} is missing, which {SUMS} names", path=str(path))
            self._sums[str(path)] = str(text)

    def check(self, path: str) -> None:
        """Verify a file, reading it once. Raises ``ChunkCorrupt`` if its checksum differs."""
        with self._lock:
            if not self._sums or path in self._verified:
                return
            if path not in self._sums:
                raise Damaged(f"{path} is not named by {SUMS}: it is of another checkpoint", path=path)
            with open(path, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != self._sums[path]:
                raise ChunkCorrupt(
                    f"{path} fails its SHA-256: {SUMS} says {self._sums[path][:16]}..., read {found[:16]}.... The file"
                    " is damaged, or of another checkpoint; take another copy of it.",
                    path=path,
                )
            self._verified.add(path)
