"""Tokens: text or JSON lines as token ids, made once, kept in a file and read on demand.

Documents are encoded one after the other into one long row of ids, which is cut into windows of ``context``: window
``k`` begins with the last id of the one before, so each id is predicted once per epoch by a model that shifts its
labels. Lines with a prompt and a completion are samples of their own, and only the completion is a target. Every n-th
window or sample is held out. What is kept counts only if it was made of the same files by the same tokenizer and all
of it is there; otherwise it is made again.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor

from ..errors import BadInput, Damaged, DiskFailed
from ..regular import load_json, open_regular, read_regular
from ..store.files import Disk, write_durably
from ..units import MiB, counted
from .corpus import Windows, find_files, split

IGNORED = -100
"""The label of what is no target."""

IDS, SAMPLES, ABOUT = "ids.u32", "samples.i64", "about.json"
PIECE_CHARACTERS = 1 << 16
"""About, of text that is encoded at once; a piece ends with a line."""
PIECES_AT_ONCE = 64


class Encoder(Protocol):
    """A tokenizer. ``begin`` and ``end`` are the ids around each document, ``pad`` fills rows up, ``digest`` tells it
    from others."""

    begin: list[int]
    end: list[int]
    pad: int
    digest: str

    def encode(self, texts: list[str]) -> list[list[int]]: ...


class Piece(NamedTuple):
    """Text to be encoded. ``opens`` and ``closes`` a document; of a pair, ``prompt`` comes before ``text``."""

    text: str
    opens: bool
    closes: bool
    prompt: str | None = None


@dataclass(eq=False)
class Tokens:
    """Encoded text. ``training`` and ``validation`` are map-style datasets of ``{"input_ids", "labels"}``, int64 of
    ``context`` ids, or fewer where samples are pairs."""

    paths: list[Path]
    num_bytes: int
    context: int
    validation_fraction: float
    fingerprint: dict[str, Any]
    ids: np.ndarray
    samples: np.ndarray
    """Of pairs: first id, ids of the prompt, ids in all; no rows where the text is cut into windows."""
    pairs: bool
    pad: int
    training: Windows = field(init=False)
    validation: Windows = field(init=False)

    def __post_init__(self) -> None:
        needed = 2 if self.validation_fraction else 1
        if self.num_windows < needed:
            there = counted(len(self.samples), "sample") if self.pairs else counted(len(self.ids), "token")
            raise BadInput(
                f"the text has {there}, which makes {counted(self.num_windows, 'sample')} of {self.context} tokens; at"
                f" least {needed} are needed. Name more text, or lower model.context."
            )
        self.training, self.validation = split(self, self.validation_fraction)

    @property
    def num_windows(self) -> int:
        return len(self.samples) if self.pairs else max(0, len(self.ids) - 1) // (self.context - 1)

    def window(self, index: int) -> dict[str, Tensor]:
        """Sample ``index`` of the whole text."""
        if not self.pairs:
            start, prompt, length = index * (self.context - 1), 0, self.context
        else:
            start, prompt, length = self.samples[index].tolist()
        ids = torch.from_numpy(self.ids[start : start + length].astype(np.int64))
        labels = ids.clone()
        labels[:prompt] = IGNORED
        return {"input_ids": ids, "labels": labels}

    def stack(self, samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """A micro-batch: pairs are filled up on the right to the longest, which ``attention_mask`` leaves out."""
        if not self.pairs:
            return {key: torch.stack([sample[key] for sample in samples]) for key in ("input_ids", "labels")}
        longest = max(len(sample["labels"]) for sample in samples)
        masks = [{"attention_mask": torch.ones_like(sample["labels"])} | sample for sample in samples]
        fill = {"input_ids": self.pad, "labels": IGNORED, "attention_mask": 0}
        return {
            key: torch.stack([_filled(sample[key], longest, fill[key]) for sample in masks]) for key in fill
        }


def _filled(row: Tensor, length: int, value: int) -> Tensor:
    return torch.nn.functional.pad(row, (0, length - len(row)), value=value)


def encoded(
    text: str,
    encoder: Encoder,
    folder: Path,
    *,
    context: int,
    validation_fraction: float = 0.0,
    told: Callable[[], object] = lambda: None,
) -> Tokens:
    """The text that ``text`` names (a file, a folder, a glob; files that end in .jsonl hold one object a line),
    encoded and kept in ``folder``. ``told`` is called before anything is encoded. Raises ``BadInput``."""
    if context < 2:
        raise BadInput(f"model.context = {context}: a sample of less than 2 tokens predicts nothing")
    root, paths = find_files(text)
    stats = [(path, path.stat()) for path in paths]
    sized = [(path.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    of = json.loads(json.dumps({"files": sized, "tokenizer": encoder.digest, "context": context}))
    about = _kept(folder, of)
    if about is None:
        told()
        about = {"of": of, **_encode(paths, encoder, folder, context)}
        write_durably(Disk(folder), ABOUT, json.dumps(about).encode(), why="token index")
    fingerprint = {"tokens": about["ids"], "samples": about["samples"], "xxh3": about["xxh3"]}
    return Tokens(
        [path for path, stat in stats if stat.st_size], sum(size for _, size, _ in sized), context,
        validation_fraction, fingerprint | {"tokenizer": encoder.digest},
        _mapped(folder / IDS, np.uint32, about["ids"]),
        _mapped(folder / SAMPLES, np.int64, 3 * about["samples"]).reshape(-1, 3), about["pairs"], encoder.pad,
    )  # fmt: skip


def _mapped(path: Path, dtype: Any, count: int) -> np.ndarray:
    return np.memmap(path, dtype, "r", shape=(count,)) if count else np.empty(0, dtype)


def _kept(folder: Path, of: dict[str, Any]) -> dict[str, Any] | None:
    """What is said of what is kept in ``folder``, if it is whole and was made of the same."""
    try:
        about = load_json(read_regular(folder / ABOUT))
        good = about["of"] == of and about["xxh3"] == _digest(folder)
    except (OSError, Damaged, ValueError, KeyError, TypeError):
        return None
    return about if good else None


def _digest(folder: Path) -> str:
    digest = xxhash.xxh3_128()
    for name in (IDS, SAMPLES):
        with open(open_regular(folder / name), "rb") as file:
            while data := file.read(4 * MiB):
                digest.update(data)
    return digest.hexdigest()


def _encode(paths: list[Path], encoder: Encoder, folder: Path, context: int) -> dict[str, Any]:
    """Write the ids, and what of them is a sample. Never more in memory than a few pieces."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds, left_out, ids, samples = set[bool](), 0, 0, 0
    try:
        parts = [folder / f"{name}.part" for name in (IDS, SAMPLES)]  # what is there may be read by a run
        with open(parts[0], "wb") as into, open(parts[1], "wb") as rows:
            every = chain.from_iterable(map(_pieces, paths))
            while pieces := list(islice(every, PIECES_AT_ONCE)):
                kinds |= {piece.prompt is not None for piece in pieces}
                if len(kinds) == 2:
                    raise BadInput(
                        "the text has lines with prompt and completion and other text besides. Name the one or the"
                        " other: pairs are samples of their own, text is cut into windows."
                    )
                for piece, prompt, found in _ids_of(pieces, encoder):
                    if piece.prompt is None:
                        ids += _write(into, found)
                    elif prompt >= context:
                        left_out += 1
                    else:
                        found = found[:context]
                        _write(rows, [ids, prompt, len(found)], "<i8")
                        ids, samples = ids + _write(into, found), samples + 1
        for name in (IDS, SAMPLES):
            Disk(folder).rename(f"{name}.part", name)
    except OSError as error:
        raise DiskFailed(
            f"the text could not be encoded into {folder}: {error}. Nothing of the run was touched."
        ) from error
    if left_out:
        warnings.warn(
            f"{left_out:,} of {samples + left_out:,} samples are left out: their prompts alone have model.context ="
            f" {context} tokens or more",
            stacklevel=3,
        )
    about = {"ids": ids, "samples": samples, "pairs": kinds == {True}}
    return about | {"xxh3": _digest(folder)}


def _write(into: BinaryIO, values: Sequence[int], dtype: str = "<u4") -> int:
    into.write(np.array(values, dtype=dtype).tobytes())
    return len(values)


def _ids_of(pieces: Sequence[Piece], encoder: Encoder) -> Iterator[tuple[Piece, int, list[int]]]:
    """Each piece with the number of its ids that are prompt, and its ids."""
    prompts = encoder.encode([piece.prompt or "" for piece in pieces])
    texts = encoder.encode([piece.text for piece in pieces])
    for piece, prompt, text in zip(pieces, prompts, texts, strict=True):
        before = (encoder.begin if piece.opens else []) + (prompt if piece.prompt is not None else [])
        yield piece, len(before), before + text + (encoder.end if piece.closes else [])


def _pieces(path: Path) -> Iterator[Piece]:
    if not os.access(path, os.R_OK):
        raise BadInput(f"{path} may not be read. Change its mode or leave it out.")
    try:
        with open(path, encoding="utf-8", newline="") as file:
            if path.suffix == ".jsonl":
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield _of_line(line, f"{path}:{number}")
                return
            opens = True
            ahead = _lines(file)
            text = next(ahead, "")
            while text:
                following = next(ahead, "")
                yield Piece(text, opens, closes=not following)
                opens, text = False, following
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{path} is no text in UTF-8 (byte {error.start}). Convert it or leave it out."
        ) from error


def _lines(file: Any) -> Iterator[str]:
    """Text in pieces that end with a line, but for a line that is longer."""
    while text := file.read(PIECE_CHARACTERS):
        yield text + ("" if text.endswith("\n") else file.readline(PIECE_CHARACTERS))


def _of_line(line: str, where: str) -> Piece:
    try:
        told = json.loads(line)
    except ValueError as error:
        raise BadInput(f"{where} is no JSON: {error}") from error
    told = told if isinstance(told, dict) else {}
    if isinstance(told.get("text"), str):
        return Piece(told["text"], True, True)
    if isinstance(told.get("prompt"), str) and isinstance(told.get("completion"), str):
        return Piece(told["completion"], True, True, told["prompt"])
    raise BadInput(
        f'{where} has neither "text" nor "prompt" and "completion", as text in quotes; it has'
        f" {', '.join(told) or 'no keys'}"
    )
