"""JSON files and headers that carry the digest of their own content, such as manifests.

The last line holds the xxh3_128 of every byte before it. So a flip of any bit is found without a canonical form of
JSON, and a person can still read the file. Sizes are bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import xxhash

from holdfast.errors import HoldfastError, ManifestCorrupt, RunMismatch

FORMAT, VERSION = "holdfast", 1
_SEAL = ',\n "digest": "{}"\n}}\n'
_SEAL_BYTES = len(_SEAL.format("0" * 32))


def seal(table: dict[str, Any], nbytes: int = 0) -> bytes:
    """Return ``table`` as JSON with its digest in the last line.

    There is one line per key (and per item of "files"). A shorter text is padded with spaces to ``nbytes``.
    """
    lines = ",\n".join(f" {json.dumps(key)}: {_value(key, value)}" for key, value in table.items())
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


def _value(key: str, value: Any) -> str:
    if key != "files" or not value:
        return json.dumps(value)
    return (
        "{\n" + ",\n".join(f"  {json.dumps(name)}: {json.dumps(item)}" for name, item in value.items()) + "}"
    )


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
