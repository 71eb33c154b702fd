"""Runs in an S3-compatible object store, read like a disk, and the names of places that hold runs.

Copies of runs are written by ``push``. The invariant: an object appears whole or not at all and is never written again
with other content, so ranges of it may be read at any time. Requests that fail are repeated for a while, then raise
``DiskFailed``. The usual variables give the address and the credentials: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL. A person names a commit as RUN, RUN@STEP or RUN@STEP.tTIMELINE, where
RUN is a directory or s3://bucket/prefix. Called by readers of runs, by ``push`` and by the command line. Offsets and
sizes are bytes.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from ..errors import BadInput, DiskFailed
from ..quantities import KiB, MiB
from ..regular_files import home_path
from .disk import ReadOnly
from .joined_nodes import JoinedNodes

if TYPE_CHECKING:
    from obstore.store import S3Store


AHEAD = 64 * KiB
"""The least bytes of a read, because the headers of small records lie close together."""
PART_BYTES = 8 * MiB
"""The bytes of one part of an object that is sent in parts."""
RETRIES = 5
CONNECT_SECONDS, REQUEST_SECONDS, RETRY_SECONDS = 10, 180, 120
"""The longest times of a connection's beginning, of one request, and of the repetitions of a request that fails."""
LISTINGS = 3
"""The number of attempts to get a listing that seems to lack its end."""
ATTEMPTS, SOON = 3, 5.0
"""The number of attempts to read an answer that breaks off, and the seconds within which it must do so."""


class ObjectDisk(ReadOnly):
    """The objects under the prefix ``root`` of a bucket. Safe to use from several threads."""

    def __init__(self, root: Url) -> None:
        """Prepare access without sending a request.

        Raises ``BadInput`` if ``root`` names no bucket or the client library is not installed.
        """
        self.root: Any = root
        if len(root.parts) < 2:
            raise BadInput(f"{root} names no bucket: give s3://BUCKET/PREFIX")
        self._store = _connected(root)

    def listdir(self, path: str) -> list[str]:
        """Return the sorted names directly below ``path``; none if there are no such objects."""
        with self._asking("list", path):
            found = _repeated(lambda: self._list(path))
            return sorted(name.rpartition("/")[2] for name in (*found["common_prefixes"], *_paths(found)))

    def sizes(self, path: str) -> dict[str, int]:
        """Return the sizes of the objects directly below ``path``, by their full paths."""
        with self._asking("list", path):
            return {item["path"]: item["size"] for item in _repeated(lambda: self._list(path))["objects"]}

    def facts(self, path: str) -> dict[str, ObjectFacts]:
        """Return the sizes and times of the objects directly below ``path``, by their full paths."""
        with self._asking("list", path):
            found = _repeated(lambda: self._list(path))["objects"]
            return {
                each["path"]: ObjectFacts(each["size"], each["last_modified"].timestamp()) for each in found
            }

    def exists(self, path: str) -> bool:
        """Return whether there is such an object, or any below it."""
        try:
            return self.size(path) >= 0
        except FileNotFoundError:
            return bool(self.listdir(path))

    def size(self, path: str) -> int:
        """Return the bytes of the object. Raises ``FileNotFoundError`` if it is absent."""
        import obstore

        with self._asking("find", path):
            return _repeated(lambda: obstore.head(self._store, path))["size"]

    def read_bytes(self, path: str) -> bytes:
        """Return the content of a small object. Raises ``FileNotFoundError`` if it is absent."""
        import obstore

        with self._asking("read", path):
            return _repeated(lambda: obstore.get(self._store, path).bytes().to_bytes())

    def read_range(self, path: str, offset: int, nbytes: int) -> memoryview:
        """Return ``nbytes`` from ``offset``, or fewer where the object ends before."""
        import obstore

        with self._asking("read", path):
            for _ in range(ATTEMPTS):
                data = memoryview(
                    _repeated(lambda: obstore.get_range(self._store, path, start=offset, length=nbytes))
                )
                if len(data) == nbytes or offset + len(data) >= self.size(path):
                    return data
        raise DiskFailed(
            f"cannot read {self.root / path}: fewer than the {nbytes} bytes from {offset} were given, {ATTEMPTS} times."
            " Check the network, then run again."
        )

    def open(self, path: str, *, write: bool = True, direct: bool = True) -> ObjectFile:
        """Open an object for reading by ranges, whatever mode is asked for.

        An absent object shows at the first read.
        """
        return ObjectFile(self, path)

    def put(self, path: str, data: bytes | Iterator[bytes]) -> None:
        """Store ``data`` under ``path``, durably on return. If ``data`` raises, nothing is stored."""
        import obstore

        with self._asking("write", path):
            obstore.put(self._store, path, data, chunk_size=PART_BYTES)

    def put_new(self, path: str, data: bytes) -> bool:
        """Store ``data`` unless the object exists, and return whether it was stored.

        Of two calls at the same time, one succeeds.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with self._asking("write", path):
            try:
                obstore.put(self._store, path, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
            return True

    def unlink(self, path: str) -> None:
        """Remove ``path``; nothing happens if it is absent."""
        import obstore

        with self._asking("remove", path):
            obstore.delete(self._store, path)

    def link_of(self, path: str) -> str | None:
        return None

    def free_bytes(self) -> int:
        self._refuse()

    def is_named(self, path: str, file: Any) -> bool:
        self._refuse()

    def data_end(self, path: str) -> int:
        return self.size(path)

    def is_locked(self, path: str) -> bool:
        return False

    def _refuse(self) -> NoReturn:
        raise BadInput(
            f"{self.root} is in a bucket, and no run is written there: write it in a directory, and copy it with"
            f" `holdfast push DIRECTORY {self.root}`."
        )

    def _list(self, path: str) -> Any:
        """Return the listing of ``path``, confirmed by a second request.

        A page that lacks its end, or an answer that is no listing at all, looks like the last page.
        """
        import obstore

        for _ in range(LISTINGS):
            found = obstore.list_with_delimiter(self._store, path or None)
            if self._is_whole(path, found):
                mark = path.strip("/")  # some tools leave an object that is named like the folder itself
                objects = [each for each in found["objects"] if each["path"].strip("/") != mark]
                return {**found, "objects": objects}
        raise DiskFailed(
            f"cannot list {self.root / path}: its answers end before their end, {LISTINGS} times. Nothing was concluded"
            " from them: check the network and what lies between here and the bucket, then run again."
        )

    def _is_whole(self, path: str, found: Any) -> bool:
        """Return whether nothing follows ``found`` in the listing directly below ``path``."""
        import obstore

        ends = [*_paths(found), *(f"{prefix}0" for prefix in found["common_prefixes"])]  # "0" follows "/"
        rest = obstore.list(self._store, path or None, offset=max(ends, default=None), chunk_size=1)
        if any(each["path"].strip("/") != path.strip("/") for page in rest for each in page):
            return False
        return bool(ends) or not self._has_any_object()

    def _has_any_object(self) -> bool:
        """Return whether the server claims to have an object of a random name, so it is no object store."""
        import obstore

        try:
            obstore.head(self._store, f"none-{secrets.token_hex(8)}")
        except FileNotFoundError:
            return False
        return True

    @contextmanager
    def _asking(self, verb: str, path: str) -> Iterator[None]:
        """Turn the errors of the client library into ours."""
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            if "NoSuchBucket" in str(error):
                raise BadInput(f"{self.root}: there is no bucket {self.root.parts[1]!r}") from error
            if isinstance(error, FileNotFoundError):
                raise FileNotFoundError(f"{self.root / path} is not there") from None
            raise DiskFailed(
                f"cannot {verb} {self.root / path}: {_plain(error)}. What was there before still is: check the"
                " network and the AWS_ variables, then run again."
            ) from error


class ObjectFacts(NamedTuple):
    """The size of an object, and the time when it was put, in seconds by the clock of the bucket."""

    bytes: int
    seconds: float


class ObjectFile:
    """An object that is read by ranges."""

    def __init__(self, disk: ObjectDisk, path: str) -> None:
        self._disk, self._name = disk, path
        self._lock = threading.Lock()
        self._ahead, self._from = memoryview(b""), 0

    @property
    def path(self) -> Path:
        return self._disk.root / self._name

    def read(self, view: memoryview, offset: int) -> None:
        """Fill all of ``view`` from ``offset``. Raises ``DiskFailed`` if the object ends before."""
        data = (
            self._near(offset, len(view))
            if len(view) < AHEAD
            else self._disk.read_range(self._name, offset, len(view))
        )
        if len(data) < len(view):
            raise DiskFailed(
                f"cannot read {self.path}: it ends at {offset + len(data)}, {len(view)} bytes from {offset} are wanted"
            )
        view[:] = data

    def write(self, view: memoryview, offset: int) -> None:
        self._disk._refuse()

    def close(self) -> None:
        """Do nothing, since nothing stays open."""

    def _near(self, offset: int, nbytes: int) -> memoryview:
        with self._lock:
            if not (self._from <= offset and offset + nbytes <= self._from + len(self._ahead)):
                self._ahead, self._from = self._disk.read_range(self._name, offset, AHEAD), offset
            start = offset - self._from
            return self._ahead[start : start + nbytes]


class Url(PurePosixPath):
    """A place in an object store, ``s3://bucket/prefix``.

    A path that lost one of the slashes is understood.

    >>> print(Url("s3:/bucket/run") / "commits")
    s3://bucket/run/commits
    """

    def __str__(self) -> str:
        return "s3://" + super().__str__().removeprefix("s3:/")


class Nodes(Url):
    """A run whose nodes have a directory each, as ``DIRECTORY,DIRECTORY,...``: read like one in a bucket."""

    @property
    def directories(self) -> list[Path]:
        """The directories of the nodes."""
        return [Path(each) for each in str(self).split(",")]

    def __str__(self) -> str:
        return PurePosixPath.__str__(self)


@dataclass(frozen=True)
class NamedCommit:
    """A commit as a person named it; without a step the newest one.

    >>> NamedCommit.parse("runs/7b@1200.t2")
    NamedCommit(run=PosixPath('runs/7b'), step=1200, timeline=2)
    """

    run: Path | Url
    step: int | None = None
    timeline: int | None = None

    @classmethod
    def parse(cls, text: str) -> NamedCommit:
        match = re.fullmatch(r"(.+)@(\d+)(?:\.t(\d+))?", text)
        if match is None or home_path(text).is_dir():
            return cls(place_of(text))
        return cls(place_of(match[1]), int(match[2]), int(match[3]) if match[3] else None)


def place_of(path: str | PurePath) -> Path | Url:
    """Return the place of a run. ``Path`` merges the two slashes of an address.

    A comma separates the directories of a run's nodes, each of which is there, unless it is part of one name.
    """
    if isinstance(path, Nodes):
        return path
    text = str(path)
    if text.startswith("s3:/"):
        return Url(path)
    nodes = [home_path(each) for each in text.split(",") if each]
    if len(nodes) > 1 and all((each / "commits").is_dir() for each in nodes) and not os.path.lexists(text):
        return Nodes(",".join(map(str, nodes)))
    return home_path(path)


def holds_run(path: Path | Url) -> bool:
    """Return whether ``path`` holds a run, or the configuration of one."""
    if isinstance(path, Url):  # only runs are read from a bucket
        return True
    return (path / "commits").is_dir() or (path / "config.toml").is_file()


def remote_disk(place: Path | Url) -> ObjectDisk | JoinedNodes | None:
    """Return a reader for a run in a bucket, or in several nodes' directories; None for a run in one directory."""
    if isinstance(place, Nodes):
        return JoinedNodes(place.directories)
    return ObjectDisk(place) if isinstance(place, Url) else None


T = TypeVar("T")


def _connected(root: Url) -> S3Store:
    try:
        from obstore.store import S3Store
    except ImportError as error:
        raise BadInput(f"{root} is in a bucket, which takes obstore: pip install 'holdfast[s3]'") from error
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise BadInput(f"AWS_ENDPOINT_URL is {endpoint!r}: it begins with http:// or https://")
    elsewhere = {"endpoint": endpoint} if endpoint else {}  # any place but Amazon's
    return S3Store(
        root.parts[1],
        prefix="/".join(root.parts[2:]) or None,
        **elsewhere,
        client_options={
            "allow_http": endpoint.startswith("http://"),
            "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
            "timeout": timedelta(seconds=REQUEST_SECONDS),
        },
        retry_config={
            "max_retries": RETRIES,
            "retry_timeout": timedelta(seconds=RETRY_SECONDS),
            "backoff": {
                "init_backoff": timedelta(milliseconds=100),
                "max_backoff": timedelta(seconds=10),
                "base": 2,
            },
        },
    )


def _repeated(ask: Callable[[], T]) -> T:
    """Return the result of ``ask``, repeated where the answer breaks off.

    The client library itself repeats only requests that fail before an answer begins.
    """
    from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

    for _ in range(ATTEMPTS - 1):
        started = time.monotonic()
        try:
            return ask()
        except (FileNotFoundError, PermissionDeniedError, UnauthenticatedError):
            raise
        except BaseError as error:
            if "NoSuchBucket" in str(error) or time.monotonic() - started > SOON:
                raise
    return ask()


def _paths(found: Any) -> list[str]:
    return [item["path"] for item in found["objects"]]


def _plain(error: Exception) -> str:
    """Return the library's message without its debug output."""
    text = " ".join(str(error).partition("\n\nDebug source")[0].split())
    return text.removeprefix("Generic S3 error: ").rstrip(" .:")
