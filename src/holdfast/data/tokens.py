"""Text or JSON lines as token ids, encoded once, kept in a file and read on demand.

Documents are encoded one after the other into one long row of ids, which is divided into windows of ``context``. Window
``k`` begins with the last id of the window before, so a model that shifts its labels predicts each id once per epoch.
Lines with a prompt and a completion, and conversations, are samples of their own, and only the completion, or the turns
of the assistant, are targets. Every n-th window or sample is held out.

Text gets the tokens that it has as a whole: a completion is encoded together with its prompt, and a piece of a long
document with the text around it. Kept ids are used only if they are complete and were made of the same files by the
same tokenizer; otherwise they are made again.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn, Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor

from ..errors import BadInput, Damaged, DiskFailed
from ..quantities import MiB, counted
from ..regular_files import home_path, load_json, open_regular, read_regular
from ..store.disk import Disk, write_durably
from .chats import Chat
from .corpus import Windows, find_files, split
from .documents import PLAIN, chunks, form_of, records, tables_of

IGNORED = -100
"""The label of an id that is not a target."""
NO_TARGET = 1 << 31
"""The bit of a stored id of a conversation that is not a target."""
IDS, SAMPLES, ABOUT = "ids.u32", "samples.i64", "about.json"
PIECE_CHARACTERS = 1 << 16
"""The approximate characters that are encoded at once; a piece ends with a line."""
PIECES_AT_ONCE = 64
AROUND = 2048
"""The characters before and after a piece that are encoded with it."""
AGREEING = 8
"""The number of tokens that two pieces must have in common at their joint."""
ENCODING = 2
"""The version of this module's encoding, stored with the ids.

Version 1 encoded completions and pieces by themselves. Ids of that version that a run has kept stay in use, so that
the run continues with the samples that it began with.
"""
Encoded = tuple[list[int], list[int]]
"""The ids of a text, and for each the number of the text's characters up to its end."""


class Encoder(Protocol):
    """A tokenizer.

    ``begin`` and ``end`` are the ids around each document, ``pad`` fills rows up, ``digest`` identifies the
    tokenizer.
    """

    begin: list[int]
    end: list[int]
    pad: int
    digest: str

    def encode(self, texts: list[str]) -> list[list[int]]: ...
    def encode_with_ends(self, texts: list[str]) -> list[Encoded] | None:
        """Return the ids and their ends, or None if the tokenizer does not know where tokens end."""
        ...

    def encode_chat(
        self, messages: list[dict[str, Any]], tools: Any, where: str, /
    ) -> tuple[list[int], list[bool]]:
        """Return the ids of a conversation, and for each whether it is a target. Raises ``BadInput``."""
        ...

    @property
    def template_digest(self) -> str:
        """The identity of what writes conversations as text."""
        ...


class TextPiece(NamedTuple):
    """Text to be encoded, a document or a part of one.

    ``opens`` and ``closes`` mark the ends of a document. The ``prompt`` of a pair comes before ``text``; ``before``
    and ``after`` are the text around a part of a document.
    """

    text: str
    opens: bool
    closes: bool
    prompt: str | None = None
    before: str = ""
    after: str = ""
    chat: Chat | None = None
    where: str = ""

    @property
    def kind(self) -> str:
        """The kind of text: "text", "pairs" or "chats"."""
        return "chats" if self.chat is not None else "text" if self.prompt is None else "pairs"


@dataclass(eq=False)
class Tokens:
    """Encoded text.

    ``training`` and ``validation`` are map-style datasets of ``{"input_ids", "labels"}``, int64 of ``context`` ids,
    or fewer where samples are pairs or conversations.
    """

    paths: list[Path]
    num_bytes: int
    context: int
    validation_fraction: float
    fingerprint: dict[str, Any]
    ids: np.ndarray
    samples: np.ndarray
    """One row per pair: its first id, the ids of its prompt, its ids in all. No rows where the text is in windows."""
    pairs: bool
    """True if samples are pairs or conversations."""
    pad: int
    chats: bool = False
    """True if ids have the bit ``NO_TARGET``."""
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
        """Return sample ``index`` of the whole text."""
        if not self.pairs:
            start, prompt, length = index * (self.context - 1), 0, self.context
        else:
            start, prompt, length = self.samples[index].tolist()
        ids = torch.from_numpy(self.ids[start : start + length].astype(np.int64))
        if self.chats:
            masked, ids = ids >= NO_TARGET, ids % NO_TARGET
            labels = ids.masked_fill(masked, IGNORED)
        else:
            labels = ids.clone()
            labels[:prompt] = IGNORED
        return {"input_ids": ids, "labels": labels}

    def length(self, index: int) -> int:
        """Return the number of ids of sample ``index`` of the whole text."""
        return int(self.samples[index, 2]) if self.pairs else self.context

    def stack(self, samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return a micro-batch.

        Pairs are padded on the right to the longest; ``attention_mask`` leaves the padding out.
        """
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
    before_encoding: Callable[[], object] = lambda: None,
) -> Tokens:
    """Encode the text that ``text`` names, keep it in ``folder``, and return it.

    ``text`` is a file, a folder or a glob; see ``documents`` for the forms of files. ``before_encoding`` is
    called before anything is encoded. Raises ``BadInput``.
    """
    if context < 2:
        raise BadInput(f"model.context = {context}: a sample of less than 2 tokens predicts nothing")
    root, paths = _files_of(text)
    stats = [(path, path.stat()) for path in paths]
    sized = [(path.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    about: dict[str, Any] | None
    first: dict[str, Any] = {"files": sized, "tokenizer": encoder.digest, "context": context}
    of = first | {"encoding": ENCODING}
    about = _kept(folder, [json.loads(json.dumps(each)) for each in (of, first)])
    template = None if about is None else about.get("template")
    if template is not None and template != encoder.template_digest:
        about = None
    if about is None:
        before_encoding()
        about = {"of": of, **_encode(paths, encoder, folder, context)}
        write_durably(Disk(folder), ABOUT, json.dumps(about).encode(), why="token index")
    fingerprint = {"tokens": about["ids"], "samples": about["samples"], "xxh3": about["xxh3"]}
    if about.get("template") is not None:
        fingerprint["template"] = about["template"]
    return Tokens(
        [path for path, stat in stats if stat.st_size], sum(size for _, size, _ in sized), context,
        validation_fraction, fingerprint | {"tokenizer": encoder.digest},
        _mapped(folder / IDS, np.uint32, about["ids"]),
        _mapped(folder / SAMPLES, np.int64, 3 * about["samples"]).reshape(-1, 3), about["pairs"], encoder.pad,
        about.get("template") is not None,
    )  # fmt: skip


def _files_of(text: str) -> tuple[Path, list[Path]]:
    """Return the files of a text as ``find_files`` does, or the tables of a saved dataset. Raises ``BadInput``."""
    folder = home_path(text)
    tables = tables_of(folder) if folder.is_dir() else None
    return find_files(text) if tables is None else (folder, tables)


def _mapped(path: Path, dtype: Any, count: int) -> np.ndarray:
    return np.memmap(path, dtype, "r", shape=(count,)) if count else np.empty(0, dtype)


def _kept(folder: Path, of: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the description of the ids in ``folder`` if they are whole and were made of one of ``of``."""
    try:
        about = load_json(read_regular(folder / ABOUT))
        good = about["of"] in of and about["xxh3"] == _digest(folder)
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
    """Write the ids and the samples. Only a few pieces are in memory at once, and wrong input leaves nothing there."""
    made = [each for each in (folder.parent, folder) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    parts = [folder / f"{name}.part" for name in (IDS, SAMPLES)]  # a run may be reading the present files
    try:
        count = _write_parts(paths, encoder, parts, context)
        for name in (IDS, SAMPLES):
            Disk(folder).rename(f"{name}.part", name)
    except BadInput:
        for part in parts:
            part.unlink(missing_ok=True)
        for each in reversed(made):
            with suppress(OSError):
                each.rmdir()
        raise
    except OSError as error:
        raise DiskFailed(
            f"the text could not be encoded into {folder}: {error}. Nothing of the run was touched."
        ) from error
    if count.left_out:
        warnings.warn(
            f"{count.left_out:,} of {count.samples + count.left_out:,} samples are left out: their prompts alone have"
            f" model.context = {context} tokens or more",
            stacklevel=3,
        )
    if count.cut:
        kind = "conversations" if count.kind == "chats" else "samples"
        warnings.warn(
            f"{count.cut:,} of {count.samples:,} {kind} are longer than model.context = {context} tokens, and"
            " are cut there",
            stacklevel=3,
        )
    about: dict[str, Any] = {
        "ids": count.ids,
        "samples": count.samples,
        "pairs": count.kind in ("pairs", "chats"),
    }
    if count.kind == "chats":
        about["template"] = encoder.template_digest
    return about | {"xxh3": _digest(folder)}


@dataclass
class _Written:
    """The numbers of ids and samples, of samples without room for a target and of those that were cut; their kind."""

    ids: int = 0
    samples: int = 0
    left_out: int = 0
    cut: int = 0
    kind: str = "text"


def _write_parts(paths: list[Path], encoder: Encoder, parts: list[Path], context: int) -> _Written:
    kinds, texts, count = set[str](), _Texts(encoder), _Written()
    with open(parts[0], "wb") as into, open(parts[1], "wb") as rows:
        every = chain.from_iterable(map(_pieces, paths))
        while pieces := list(islice(every, PIECES_AT_ONCE)):
            kinds |= {piece.kind for piece in pieces}
            if len(kinds) > 1:
                _refuse_kinds(kinds)
            for piece, prompt, found in texts.ids_of(pieces):
                if piece.kind == "text":
                    count.ids += _write(into, found)
                elif prompt >= context:
                    count.left_out += 1
                else:
                    count.cut += len(found) > context
                    found = found[:context]
                    _write(rows, [count.ids, prompt, len(found)], "<i8")
                    count.ids, count.samples = count.ids + _write(into, found), count.samples + 1
    count.kind = next(iter(kinds), "text")
    return count


def _refuse_kinds(kinds: set[str]) -> NoReturn:
    names = {
        "pairs": "lines with prompt and completion",
        "chats": "lines with messages",
        "text": "other text",
    }
    there = [names[kind] for kind in ("pairs", "chats", "text") if kind in kinds]
    raise BadInput(
        f"the text has {' and '.join(there)} besides. Name the one or the other: pairs and conversations are samples"
        " of their own, text is cut into windows."
    )


def _write(into: BinaryIO, values: Sequence[int], dtype: str = "<u4") -> int:
    into.write(np.array(values, dtype=dtype).tobytes())
    return len(values)


class _Texts:
    """Encodes the pieces of documents, one after the other."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._ahead: list[tuple[int, int]] = []
        """The tokens after the last piece of a document under way, and their ends in it."""
        self._place = self._done = 0
        """The characters of the document in the pieces before, and those up to the end of the last token."""

    def ids_of(self, pieces: Sequence[TextPiece]) -> Iterator[tuple[TextPiece, int, list[int]]]:
        """Yield each piece with the number of its ids that are prompt, and its ids."""
        if pieces[0].chat is not None:
            for piece in pieces:
                yield (piece, *self._of_chat(piece))
            return
        texts = [(piece.prompt or piece.before) + piece.text + piece.after for piece in pieces]
        found = self._encoder.encode_with_ends(texts)
        if found is None:
            yield from self._by_themselves(pieces)
            return
        for piece, (ids, ends) in zip(pieces, found, strict=True):
            if piece.prompt is None:
                own = self._continued(piece, ids, ends)
                prompt = 0
            else:
                own = ids
                prompt = next((n for n, end in enumerate(ends) if end > len(piece.prompt)), len(ids))
            begin = self._encoder.begin if piece.opens else []
            yield piece, len(begin) + prompt, begin + own + (self._encoder.end if piece.closes else [])

    def _of_chat(self, piece: TextPiece) -> tuple[int, list[int]]:
        """Return the number of ids before the first target, and the ids with the bit of those that are none."""
        assert piece.chat is not None
        ids, targets = self._encoder.encode_chat(*piece.chat, piece.where)
        assert max(ids) < NO_TARGET
        marked = [each if target else each | NO_TARGET for each, target in zip(ids, targets, strict=True)]
        return targets.index(True), marked

    def _continued(self, piece: TextPiece, ids: list[int], ends: list[int]) -> list[int]:
        """Return the ids of a piece that continue those of the piece before.

        Where the two disagree on the tokens at their joint, tokens of the piece before are used up to a place where
        both agree.
        """
        if piece.opens:
            self._ahead, self._place, self._done = [], 0, -1
        shift = self._place - len(piece.before)
        tokens = [(token, end + shift) for token, end in zip(ids, ends, strict=True)]
        taken: list[tuple[int, int]] = []
        ahead, rest = self._ahead, [each for each in tokens if each[1] > self._done]
        for count in range(len(ahead)):
            done = ahead[count - 1][1] if count else self._done
            follows = [each for each in rest if each[1] > done]
            if follows[:AGREEING] == ahead[count : count + AGREEING]:
                taken, rest = ahead[:count], follows
                break
        self._place += len(piece.text)
        limit = tokens[-1][1] if piece.closes and tokens else self._place
        found = taken + [each for each in rest if each[1] <= limit]
        self._ahead = [each for each in rest if each[1] > limit]
        self._done = found[-1][1] if found else self._done
        return [token for token, _ in found]

    def _by_themselves(self, pieces: Sequence[TextPiece]) -> Iterator[tuple[TextPiece, int, list[int]]]:
        """Yield the same, each text encoded by itself, because the encoder cannot say where tokens end."""
        prompts = self._encoder.encode([piece.prompt or "" for piece in pieces])
        texts = self._encoder.encode([piece.text for piece in pieces])
        for piece, prompt, text in zip(pieces, prompts, texts, strict=True):
            before = self._encoder.begin if piece.opens else []
            before = before + (prompt if piece.prompt is not None else [])
            yield piece, len(before), before + text + (self._encoder.end if piece.closes else [])


def _pieces(path: Path) -> Iterator[TextPiece]:
    if form_of(path) != PLAIN:
        for record in records(path):
            yield TextPiece(record.text, True, True, record.prompt, chat=record.chat, where=record.where)
        return
    before, opens = "", True
    ahead = chunks(path, PIECE_CHARACTERS)
    text = next(ahead, "")
    while text:
        following = next(ahead, "")
        yield TextPiece(text, opens, not following, before=before, after=following[:AROUND])
        before, opens, text = (before + text)[-AROUND:], False, following
