"""The documents in text files and tables, read piece by piece, with errors that name file, line and byte.

The name of a file gives its form, in any case: ``.jsonl`` and ``.ndjson`` hold one JSON object a line, ``.json`` an
array of objects or objects one after another, ``.parquet`` and ``.arrow`` a table with one record a row, all others
plain text. ``.gz`` or ``.zst`` at the end marks a compressed file. Text is UTF-8, with or without a byte order mark.
Anything else raises ``BadInput``.

Tables are Parquet files, and the Arrow files of folders that ``datasets.save_to_disk`` writes. They are read batch by
batch, so memory does not grow with a file. pyarrow is imported when the first one is opened.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from ..errors import BadInput
from ..libraries import library
from ..quantities import first_line, shown
from .chats import Chat, chat_of

LINES, VALUES, TABLE, PLAIN = "lines", "values", "table", "plain"
FORMS = {".jsonl": LINES, ".ndjson": LINES, ".json": VALUES, ".parquet": TABLE, ".arrow": TABLE}
PACKED = (".gz", ".zst")
OTHER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16",
}  # fmt: skip
"""The byte order marks of encodings that are not read.

The longer ones come first, since they begin with the shorter ones.
"""


class Document(NamedTuple):
    """A document; of a pair, ``prompt`` comes before ``text``. ``where`` is its file and line.

    Of a conversation there is ``chat`` alone, and ``text`` is empty.
    """

    text: str
    prompt: str | None
    where: str
    chat: Chat | None = None


def form_of(path: Path) -> str:
    """Return the form of the content of ``path``, by its name."""
    name = path.name.lower()
    for ending in PACKED:
        name = name.removesuffix(ending)
    return FORMS.get(os.path.splitext(name)[1], PLAIN)


def is_packed(path: Path) -> bool:
    return path.name.lower().endswith(PACKED)


def records(path: Path) -> Iterator[Document]:
    """Yield the records of a file of JSON, or of a table."""
    if form_of(path) == TABLE:
        for number, row in rows_of(path):
            yield _record(_Object(row.items()), f"{path}, row {number}")
        return
    if form_of(path) == LINES:
        for number, line in _lines(path):
            if line.strip():
                yield _record(_parsed(line, path, number), f"{path}:{number}")
        return
    for number, value in _values("".join(line for _, line in _lines(path)), path):
        yield _record(value, f"{path}:{number}")


def chunks(path: Path, characters: int) -> Iterator[str]:
    """Yield the text of a file in chunks of about ``characters``, which end with a line if possible."""
    with _Reader(path) as reader:
        while text := reader.read(characters):
            yield text if text.endswith("\n") else text + reader.readline(characters)


class _Reader:
    """A reader of the text of a file that tracks its line and byte."""

    def __init__(self, path: Path) -> None:
        self._path, self._line, self._offset, self._begun = path, 1, 0, False
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._file = _opened(path)

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, nbytes: int) -> str:
        """Return the next text of about ``nbytes``; an empty string only at the end."""
        return self._text(self._file.read, nbytes)

    def readline(self, nbytes: int = -1) -> str:
        """Return the next line, or as much of it as ``nbytes`` hold."""
        return self._text(self._file.readline, nbytes)

    def _text(self, read: Any, nbytes: int) -> str:
        while True:
            data = self._bytes(read, nbytes)
            text = self._decoded(data)
            if text or not data:
                return text

    def _bytes(self, read: Any, nbytes: int) -> bytes:
        try:
            return read(nbytes)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise BadInput(
                f"{self._path} is no whole gzip file: {error}. Pack it again or leave it out."
            ) from error
        except Exception as error:
            if type(error).__module__.partition(".")[0] != "zstandard":
                raise
            raise BadInput(
                f"{self._path} is no whole zstd file: {error}. Pack it again or leave it out."
            ) from error

    def _decoded(self, data: bytes) -> str:
        """Decode ``data``, which follows the bytes read before.

        Empty ``data`` is the end, where characters must be whole. Raises ``BadInput`` for anything but UTF-8 text.
        """
        if self._offset == 0:
            self._refuse_other_marks(data)
        waiting = len(self._decoder.getstate()[0])
        try:
            text = self._decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            at = self._offset - waiting + error.start
            line = self._line + error.object[: error.start].count(b"\n")
            raise BadInput(
                f"{self._path}:{line} is no text in UTF-8 (byte {at} of the file, 0x{error.object[error.start]:02x})."
                " Convert it or leave it out."
            ) from error
        if "\0" in text:
            before = text[: text.index("\0")]
            raise BadInput(
                f"{self._path}:{self._line + before.count(chr(10))} has a NUL (byte"
                f" {self._offset - waiting + len(before.encode())} of the file), so it is UTF-16 without a mark, or no"
                " text. Convert it to UTF-8 or leave it out."
            )
        self._offset += len(data)
        self._line += text.count("\n")
        if not self._begun and text:
            self._begun, text = True, text.removeprefix("\ufeff")
        return text

    def _refuse_other_marks(self, data: bytes) -> None:
        for mark, name in OTHER_MARKS.items():
            if data.startswith(mark):
                raise BadInput(
                    f"{self._path} is {name}, by its byte order mark. Convert it: iconv -f {name} -t UTF-8 {self._path}"
                )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file, numbered from 1."""
    with _Reader(path) as reader:
        number = 1
        while line := reader.readline():
            yield number, line
            number += 1


def _opened(path: Path) -> BinaryIO:
    if not os.access(path, os.R_OK):
        raise BadInput(f"{path} may not be read. Change its mode or leave it out.")
    name = path.name.lower()
    if name.endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if not name.endswith(".zst"):
        return path.open("rb")
    unpack = library(
        "zstandard", str(path), "pip install 'holdfast[compress]', or unpack it first"
    ).ZstdDecompressor()
    packed = unpack.stream_reader(path.open("rb"), read_across_frames=True, closefd=True)
    return io.BufferedReader(packed)  # type: ignore[return-value]


class _Object(list[tuple[str, Any]]):
    """A JSON object with all of its keys, repeated ones included."""


_decoder = json.JSONDecoder(object_pairs_hook=_Object)
_space = re.compile(r"[ \t\n\r]*")


def _parsed(line: str, path: Path, number: int) -> Any:
    """Return the JSON value of one line."""
    line = line.rstrip()  # a parser error at the end of the line then names this line
    start = len(line) - len(line.lstrip())
    value, end = _raw(line, start, path, number)
    if line[end:].strip():
        _refuse_json(path, number, "something follows its value", end + 1)
    return value


def _values(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the values of an array, or values one after another, each with its line."""
    place, line, in_array = 0, 1, False
    first = True

    def skip() -> None:
        nonlocal place, line
        end = _space.match(text, place).end()  # type: ignore[union-attr]
        line += text.count("\n", place, end)
        place = end

    skip()
    if text.startswith("[", place):
        in_array, place = True, place + 1
    while True:
        skip()
        if in_array and text.startswith("]", place):
            in_array, place = False, place + 1
            skip()
            if place < len(text):
                _refuse_json(path, line, "something follows its array")
        if place >= len(text):
            break
        if in_array and not first:
            if not text.startswith(",", place):
                _refuse_json(path, line, "a comma is missing between its records")
            place += 1
            skip()
        value, end = _raw(text, place, path, line)
        yield line, value
        line += text.count("\n", place, end)
        place, first = end, False
    if in_array:
        _refuse_json(path, line, "its array has no end")


def _raw(text: str, start: int, path: Path, line: int) -> tuple[Any, int]:
    try:
        return _decoder.raw_decode(text, start)
    except json.JSONDecodeError as error:
        _refuse_json(path, line + text.count("\n", start, error.pos), error.msg, error.colno)
    except ValueError as error:
        _refuse_json(path, line, str(error))
    except RecursionError:
        _refuse_json(path, line, "it is nested too deeply")


def _refuse_json(path: Path, line: int, why: str, column: int | None = None) -> NoReturn:
    at = "" if column is None else f" (column {column})"
    raise BadInput(f"{path}:{line} is no JSON: {why}{at}")


def _record(value: Any, where: str) -> Document:
    pairs = value if isinstance(value, _Object) else []
    told = dict(pairs)
    for key in KEYS:
        if sum(name == key for name, _ in pairs) > 1:
            raise BadInput(f'{where} has "{key}" twice. Leave one of them out.')
        _refuse_halves(key, told.get(key), where)
    is_text, is_pair = _are_texts(told, "text"), _are_texts(told, "prompt", "completion")
    if told.get("messages") is not None:
        if is_text or is_pair:
            other = '"text"' if is_text else '"prompt" and "completion"'
            raise BadInput(f'{where} has "messages" and {other}. Leave out what is not meant.')
        messages, tools = (_plain(told.get(key), key, where) for key in ("messages", "tools"))
        return Document("", None, where, chat_of(messages, tools, where))
    if is_text and is_pair:
        raise BadInput(
            f'{where} has "text", and "prompt" and "completion". Leave out what is not meant: of a text all is learned,'
            " of a pair the completion."
        )
    if is_text:
        return Document(told["text"], None, where)
    if is_pair:
        return Document(told["completion"], told["prompt"], where)
    raise BadInput(
        f'{where} has neither "messages" nor "text" nor "prompt" and "completion", as text in quotes; it has'
        f" {', '.join(told) or 'no keys'}"
    )


def _are_texts(told: dict[str, Any], *keys: str) -> bool:
    return all(isinstance(told.get(key), str) for key in keys)


def _plain(value: Any, key: str, where: str) -> Any:
    """Return ``value`` with dicts for its objects. Raises ``BadInput`` where an object has a key twice."""
    if isinstance(value, _Object):
        found = {name: _plain(each, key, where) for name, each in value}
        if len(found) < len(value):
            raise BadInput(f'{where} has an object in "{key}" that has a key twice. Leave one of them out.')
        return found
    if isinstance(value, list):
        return [_plain(each, key, where) for each in value]
    if isinstance(value, dict):  # of a table
        return {name: _plain(each, key, where) for name, each in value.items() if each is not None}
    _refuse_halves(key, value, where)
    return value


def _refuse_halves(key: str, text: Any, where: str) -> None:
    """Raise ``BadInput`` where ``text`` has half of a character, which no encoding can represent."""
    try:
        if isinstance(text, str):
            text.encode()
    except UnicodeEncodeError as error:
        raise BadInput(
            f'{where} has \\u{ord(text[error.start]):04x} in "{key}" (character {error.start}), which is half of a'
            " character (a lone surrogate). Write the whole character, or leave it out."
        ) from error


ROWS = 256
"""The rows that are read at once."""
KEYS = ("text", "prompt", "completion", "messages", "tools")
"""The keys of a record that are read: those of a JSON object, or the columns of a table."""
STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
"""The files beside the tables of a saved dataset; ``SPLITS`` names several of them."""


def rows_of(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a table, numbered from 1, as values by column.

    Raises ``BadInput`` if pyarrow cannot be imported, or the file is not whole.
    """
    way_out = "pip install 'holdfast[tables]', or write it as JSON lines first"
    pyarrow, parquet = (library(name, str(path), way_out) for name in ("pyarrow", "pyarrow.parquet"))
    number = 0
    try:
        with path.open("rb") as file:
            if path.suffix.lower() == ".parquet":
                table = parquet.ParquetFile(file)
                names = table.schema_arrow.names
                batches = table.iter_batches(ROWS, columns=_columns(names))
            else:
                batches = pyarrow.ipc.open_stream(file)
                names = batches.schema.names
            _refuse_without_columns(path, names)
            for batch in batches:
                read = batch.select(_columns(names))
                for start in range(0, len(read), ROWS):
                    for row in read.slice(start, ROWS).to_pylist():
                        number += 1
                        yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise BadInput(
            f"{path} is no whole table after row {number}: {first_line(error)}. Write it again or leave it out."
        ) from error


def tables_of(folder: Path) -> list[Path] | None:
    """Return the tables of a dataset that was saved in ``folder``, in their order; None if it is no such folder.

    Raises ``BadInput`` for a folder of several splits, because one of them may be for tests.
    """
    if (folder / SPLITS).is_file():
        names = sorted(path.name for path in folder.iterdir() if (path / STATE).is_file())
        raise BadInput(
            f"{folder} has the splits {shown(names)}: name one, such as data.text={folder / (names or ['train'])[0]},"
            " and give another as data.validation"
        )
    if not ((folder / STATE).is_file() and (folder / INFO).is_file()):
        return None
    try:
        told = json.loads((folder / STATE).read_text(encoding="utf-8"))
        names = [str(each["filename"]) for each in told["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{folder / STATE} does not name the tables of a saved dataset: {error}") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise BadInput(f"{folder} lacks {shown(missing)}, which its {STATE} names. Save the dataset again.")
    return [folder / name for name in names]


def _columns(names: list[str]) -> list[str]:
    return [name for name in KEYS if name in names]


def _refuse_without_columns(path: Path, names: list[str]) -> None:
    if not _columns(names):
        raise BadInput(
            f'{path} has neither a column "messages" nor "text" nor "prompt" and "completion"; it has {shown(names)}'
        )
