"""The manifests, small JSON files that define commits, the records of timelines, and the seal of such JSON.

No manifest, no commit. Files and headers that must not be believed when damaged carry the digest of their own content
(``seal``): the last line holds the xxh3_128 of every byte before it. So a flip of any bit is found without a canonical
form of JSON, and a person can still read the file. Sizes are bytes, times are unix seconds.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import xxhash

from holdfast import __version__
from holdfast.errors import HoldfastError, ManifestCorrupt, RunMismatch

FORMAT, VERSION = "holdfast", 1
_SEAL = ',\n "digest": "{}"\n}}\n'
_SEAL_BYTES = len(_SEAL.format("0" * 32))
HOME, FOLDER = "data", r"drive_[1-9]\d{0,2}"
"""The directory of the payload files on the run's own drive, and the pattern of the names of those in it on others."""
SAFETENSORS, REFERENCE = ".safetensors", ".reference"
"""The suffixes of the names of payload files, and of reference files in their place."""
ALONE = "rank-00000"
"""The log of a process that trains by itself, and of the first of several ranks."""
WITH_REFERENCES = 2
"""The version of manifests that name reference files, which earlier versions of this library refuse."""
_COMMIT_NAME = re.compile(r"step-(\d{12,})\.t(\d{4,})\.json")
_PAYLOAD_PATH = re.compile(rf"data/({FOLDER}/)?[^./\0][^/\0]*")
_SMALL_PATH = re.compile(r"index/[^./\0][^/\0]*")
_INDEX_NAME = re.compile(r"[0-9a-f]{32}\.json")
_TIMELINE_NAME = re.compile(r"t(\d{4,})\.json")


def is_reference(path: str) -> bool:
    """Return whether the payload file at ``path`` is a reference file, by its name."""
    return path.endswith(REFERENCE)


class CommitRef(NamedTuple):
    """The name of a commit. Sorts in the order in which commits were made."""

    timeline: int
    step: int

    @property
    def path(self) -> str:
        return f"commits/step-{self.step:012d}.t{self.timeline:04d}.json"

    @classmethod
    def of_name(cls, name: str) -> CommitRef | None:
        """Return the commit whose manifest is the file ``name`` in ``commits/``, or None."""
        match = _COMMIT_NAME.fullmatch(name)
        ref = cls(int(match[2]), int(match[1])) if match else None
        return ref if ref is not None and ref.path == f"commits/{name}" else None


class Point(Protocol):
    """A step of a timeline that can be continued: a commit, or a log record."""

    @property
    def step(self) -> int: ...
    @property
    def timeline(self) -> int: ...
    @property
    def key(self) -> str: ...


@dataclass(frozen=True)
class FileRef:
    """A payload file as a commit names it.

    ``checksums`` are the xxh3_64 of its blocks, in hex. ``step`` is the step of its content if that is not the
    commit's; the log records between the two bring it to the commit's step.
    """

    path: str
    bytes: int
    checksums: tuple[str, ...]
    step: int | None = None

    def to_json(self) -> dict[str, Any]:
        table = {"path": self.path, "bytes": self.bytes, "xxh3_64": list(self.checksums)}
        return table if self.step is None else {**table, "step": self.step}

    @classmethod
    def from_json(cls, item: dict[str, Any]) -> FileRef:
        """Decode the JSON.

        Raises ``ValueError`` for a path at which no run has payload. Nothing outside of those paths is ever read or
        removed.
        """
        _require(_PAYLOAD_PATH, item["path"])
        return cls(item["path"], item["bytes"], tuple(item["xxh3_64"]), item.get("step"))


def object_path(ref: FileRef) -> str:
    """Return the name of a copy of a payload file, in a bucket or at a partner, derived from its content.

    The directory writes its file again, so its name would not do. The drive plays no part.
    """
    digest = xxhash.xxh3_128_hexdigest(" ".join((str(ref.bytes), *ref.checksums)).encode())
    name = ref.path.rpartition("/")[2].removesuffix(SAFETENSORS).removesuffix(REFERENCE).rpartition(".")[0]
    return f"{HOME}/{name}.{digest}.safetensors"


@dataclass(frozen=True)
class RankShare:
    """The part of a commit that one rank wrote, in a file of ``index/`` that the manifest names by hash.

    ``step`` is that of ``progress``; each of ``files`` has a step of its own.
    """

    path: str
    bytes: int
    xxh3_128: str
    step: int
    files: dict[str, FileRef]
    index: dict[str, Any]
    progress: dict[str, Any]

    @property
    def ref(self) -> dict[str, Any]:
        return {"path": self.path, "bytes": self.bytes, "xxh3_128": self.xxh3_128}

    def to_json(self) -> dict[str, Any]:
        """Return the content of the share's file."""
        files = {unit: file.to_json() for unit, file in self.files.items()}
        return {
            "version": 1,
            "step": self.step,
            "index": self.index,
            "files": files,
            "progress": self.progress,
        }

    @classmethod
    def from_json(cls, ref: dict[str, Any], table: dict[str, Any]) -> RankShare:
        with reading(ref["path"]):
            files = {unit: FileRef.from_json(item) for unit, item in table["files"].items()}
            _require(_SMALL_PATH, table["index"]["path"])
        return cls(**ref, files=files, **{name: table[name] for name in ("step", "index", "progress")})


@dataclass(frozen=True)
class Timeline:
    """The line of steps since a resume, forked from ``parent`` after ``fork_step`` (None: from nothing).

    ``key`` is drawn at random when the timeline is opened; ``parent_key`` is the parent's. The keys tell a run from
    another one, and from a copy of it that continued by itself.
    """

    id: int
    parent: int | None = None
    fork_step: int | None = None
    key: str = ""
    parent_key: str | None = None
    created: float = 0.0
    writer: dict[str, Any] = field(default_factory=dict)
    by_saves: bool = False
    """True if saves of whole states make the timeline. The run is then on it only from its first commit on."""
    run: str = ""
    """The key of the run: that of its first timeline, whose record may be gone.

    Empty in records of earlier versions.
    """
    begun: float = 0.0
    """The time at which the run was begun; 0 if unknown."""

    @property
    def path(self) -> str:
        return timeline_path(self.id)

    def encode(self) -> bytes:
        table = asdict(self)
        implied = {"by_saves": (False,), "run": ("", self.key), "begun": (0.0, self.created)}
        for name, values in implied.items():  # a record without these names implies the same
            if table[name] in values and (self.parent is None or not table[name]):
                del table[name]
        return seal({"format": FORMAT, "version": VERSION, "timeline": table.pop("id"), **table})

    @classmethod
    def decode(cls, data: bytes, path: str) -> Timeline:
        table = unseal(data, path)
        with reading(path):
            names = ("parent", "fork_step", "key", "parent_key", "created", "writer")
            record = cls(table["timeline"], **{name: table[name] for name in names})
            first = record.parent is None
            record = replace(
                record,
                by_saves=table.get("by_saves") is True,
                run=str(table.get("run", record.key if first else "")),
                begun=float(table.get("begun", record.created if first else 0.0)),
            )
        if record.path != path:
            raise unreadable(path, f"it is the record of timeline {record.id}", len(data))
        return record


@dataclass(frozen=True)
class Manifest:
    """One commit: the files that hold it (by unit), the index of its tensor entries, and the progress.

    A commit of several ranks has ``shares``, one per rank by the stream of its log. ``files`` are then those of all
    ranks, and each share has its own index and progress.
    """

    step: int
    timeline: int
    parent: int | None
    fork_step: int | None
    key: str
    parent_key: str | None
    files: dict[str, FileRef]
    index: dict[str, Any]
    progress: dict[str, Any]
    created: float
    writer: dict[str, Any]
    shares: dict[str, RankShare] = field(default_factory=dict)

    @property
    def ref(self) -> CommitRef:
        return CommitRef(self.timeline, self.step)

    @property
    def path(self) -> str:
        return self.ref.path

    @property
    def timeline_record(self) -> Timeline:
        """The timeline record as the manifest repeats it."""
        return Timeline(self.timeline, self.parent, self.fork_step, self.key, self.parent_key)

    @property
    def oldest_step(self) -> int:
        """The step after which log records are needed; the commit's own step if it stands alone."""
        return min((file.step for file in self.files.values() if file.step is not None), default=self.step)

    @property
    def streams(self) -> list[str]:
        """The logs that continue from this commit, by name."""
        return list(self.shares) or [ALONE]

    def files_of(self, stream: str) -> dict[str, FileRef]:
        """Return the files that the writer of ``stream`` wrote."""
        if not self.shares:
            return self.files
        return {unit: self.files[unit] for unit in self.shares[stream].files}

    def oldest_step_of(self, stream: str) -> int:
        """Return the step after which log records of ``stream`` are needed."""
        share = self.shares.get(stream)
        steps = [file.step for file in self.files_of(stream).values() if file.step is not None]
        return min([*steps, self.step if share is None else share.step])

    @property
    def metrics(self) -> dict[str, Any]:
        """The values that the script measured at this step, by name; empty if it gave none."""
        found = self.progress_of(self.streams[0]).get("metrics")
        return found if isinstance(found, dict) else {}

    @property
    def certified_step(self) -> int | None:
        """The newest step that a guard of the loss had certified at this step; None without a guard."""
        found = self.progress_of(self.streams[0]).get("certified")
        return found if isinstance(found, int) else None

    def progress_of(self, stream: str) -> dict[str, Any]:
        return self.shares[stream].progress if self.shares else self.progress

    @property
    def index_refs(self) -> list[dict[str, Any]]:
        """The index files: one per share, or the only one."""
        return [share.index for share in self.shares.values()] or [self.index]

    @property
    def small_paths(self) -> list[str]:
        """The files in ``index/`` that the commit needs."""
        paths = [ref["path"] for ref in self.index_refs] + [share.path for share in self.shares.values()]
        return list(dict.fromkeys(paths))

    def with_shares(self, shares: dict[str, RankShare]) -> Manifest:
        """Return a copy that includes the content of its ``shares``."""
        files = {
            unit: replace(file, step=None if file.step == self.step else file.step)
            for share in shares.values()
            for unit, file in share.files.items()
        }
        return replace(self, files=files, shares=shares)

    @property
    def referenced(self) -> dict[str, FileRef]:
        """The payload files whose bytes lie in a folder outside of the run, by unit."""
        return {unit: file for unit, file in self.files.items() if is_reference(str(file.path))}

    @property
    def total_bytes(self) -> int:
        """The bytes of all payload files."""
        return sum(file.bytes for file in self.files.values())

    def encode(self) -> bytes:
        """Return the content of the manifest's file."""
        if self.shares:
            what: dict[str, Any] = {"shares": {stream: share.ref for stream, share in self.shares.items()}}
        else:
            files = {unit: file.to_json() for unit, file in self.files.items()}
            what = {"progress": self.progress, "index": self.index, "files": files}
        return seal(
            {
                "format": FORMAT,
                "version": WITH_REFERENCES if self.referenced else VERSION,
                "step": self.step,
                "timeline": self.timeline,
                "parent": self.parent,
                "fork_step": self.fork_step,
                "key": self.key,
                "parent_key": self.parent_key,
                "created": self.created,
                "writer": self.writer,
                **what,
            }
        )

    @classmethod
    def decode(cls, data: bytes, path: str) -> Manifest:
        """Decode ``data``, the content of ``path``, without the content of its ``shares``.

        That content is in files of their own. Raises ``ManifestCorrupt``.
        """
        table = unseal(data, path, WITH_REFERENCES)
        with reading(path):
            names = ("step", "timeline", "parent", "fork_step", "key", "parent_key", "created", "writer")
            if "shares" in table:
                table |= {"index": {}, "progress": {}, "files": {}}
            files = {unit: FileRef.from_json(item) for unit, item in table["files"].items()}
            shares = {
                stream: RankShare(**ref, step=table["step"], files={}, index={}, progress={})
                for stream, ref in table.get("shares", {}).items()
            }
            fields = {name: table[name] for name in (*names, "index", "progress")}
            manifest = cls(files=files, shares=shares, **fields)
            for ref in [*table.get("shares", {}).values(), *([] if shares else [table["index"]])]:
                _require(_SMALL_PATH, ref["path"])
        if manifest.path != path:
            raise unreadable(path, f"it is the manifest of {manifest.path}", len(data))
        return manifest


def _require(pattern: re.Pattern[str], path: str) -> None:
    if not pattern.fullmatch(path):
        raise ValueError(f"{path!r} is no path of a run's file")


def timeline_path(timeline: int) -> str:
    return f"timelines/t{timeline:04d}.json"


def timeline_of_name(name: str) -> int | None:
    """Return the timeline whose record is the file ``name`` in ``timelines/``, or None."""
    match = _TIMELINE_NAME.fullmatch(name)
    return int(match[1]) if match and timeline_path(int(match[1])) == f"timelines/{name}" else None


def is_ours(directory: str, name: str) -> bool:
    """Return whether a file of this name in ``commits``, ``timelines`` or ``index`` belongs to the store."""
    if directory == "index":
        return _INDEX_NAME.fullmatch(name) is not None
    return (CommitRef.of_name if directory == "commits" else timeline_of_name)(name) is not None


def this_writer() -> dict[str, Any]:
    """Return the identity of this writer for manifests, timeline records and the lock."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "library": f"holdfast {__version__}"}


def seal(table: dict[str, Any], nbytes: int = 0) -> bytes:
    """Return ``table`` as JSON with its digest in the last line.

    There is one line per key (and per item of "files"). A shorter text is padded with spaces to ``nbytes``.
    """
    texts = [
        _by_item(value) if key == "files" and value else json.dumps(value) for key, value in table.items()
    ]
    lines = ",\n".join([f' "{key}": {text}' for key, text in zip(table, texts, strict=True)])
    body = f"{{\n{lines}".encode().ljust(nbytes - _SEAL_BYTES)
    return body + _SEAL.format(xxhash.xxh3_128_hexdigest(body)).encode()


def unseal(data: bytes, path: str, newest: int = VERSION) -> dict[str, Any]:
    """Return the table sealed in ``data``, of a version up to ``newest``.

    Raises ``ManifestCorrupt`` if any byte has changed, ``RunMismatch`` for another version of the format.
    """
    body = data[:-_SEAL_BYTES]
    digest = xxhash.xxh3_128_hexdigest(body)
    if data[-_SEAL_BYTES:] != _SEAL.format(digest).encode():
        raise unreadable(path, "it fails its own digest", len(data))
    with reading(path):
        table = json.loads(data)
        if table["format"] == FORMAT and table["version"] not in range(VERSION, newest + 1):
            raise RunMismatch(
                f"{path} has format version {table['version']}; this library reads {newest}: use a newer one"
            )
        if table["format"] != FORMAT:
            raise ValueError(f"its format is {table['format']!r}")
    return table


def _by_item(files: dict[str, Any]) -> str:
    """Return ``files`` as JSON with a line for each item."""
    lines = [f"  {json.dumps(name)}: {json.dumps(item)}" for name, item in files.items()]
    return "{\n" + ",\n".join(lines) + "}"


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn the errors that parsing raises into ``ManifestCorrupt``."""
    try:
        yield
    except HoldfastError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise unreadable(path, f"it does not read as one ({error!r})", 0) from error


def unreadable(path: str, what: str, nbytes: int) -> ManifestCorrupt:
    return ManifestCorrupt(
        f"{path} is damaged: {what}. The step it stands for cannot be used; the older ones can:"
        f" run again to resume from the newest whole one, or list them with `holdfast ls`.",
        path=path,
        nbytes=nbytes,
    )
