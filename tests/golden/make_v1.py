"""Writes ``tests/golden/v1``: a run of two steps whose every byte is fixed. Run once per format version.

    PYTHONPATH=src:tests python tests/golden/make_v1.py TARGET

The files in the repository are never rewritten: they are what a later library must still read, and what
this one must still write.
"""

from __future__ import annotations

import sys
from unittest import mock

from holdfast.io.buffers import Buffer
from holdfast.store import run_store
from holdfast.store.commit import commit_writer
from holdfast.store.format.payload_layout import Layout
from holdfast.store.run_store import LocalStore
from tiny_run import index_of

TENSORS = [("w/param", "F32", (2, 3)), ("w/exp_avg", "BF16", (2, 3)), ("n/step", "I64", ())]
WRITER = {"pid": 4242, "host": "golden", "library": "holdfast 0.1.0"}


def payload(key: str, step: int, nbytes: int) -> bytes:
    """Bytes that a person recognises in a dump: the step, then the key, over and over."""
    text = f"{step}:{key}|".encode()
    return (text * (nbytes // len(text) + 1))[:nbytes]


def write(root) -> None:
    """Write the run of format version 1 to ``root``."""
    layout = Layout.build(TENSORS, {"format": "holdfast", "version": "1"})
    with (
        mock.patch.object(run_store, "this_writer", lambda: WRITER),
        mock.patch.object(commit_writer, "this_writer", lambda: WRITER),
        mock.patch.object(run_store.time, "time", lambda: 1790000000.5),
        mock.patch.object(run_store.secrets, "token_hex", lambda count: "42" * count),
        LocalStore.open(root, direct=False) as store,
    ):
        store.begin(None)
        unit = store.unit("block_000", layout, 3)
        unit.create()
        ref = store.put_index(index_of({"block_000": TENSORS}))
        for step in (1, 2):
            generation, image = unit.acquire(), Buffer(layout.file_bytes, "golden").view
            for entry in layout.entries:
                image[entry.offset : entry.end] = payload(entry.key, step, entry.nbytes)
            future = unit.write(generation, image, kind="state", phase="update", priority=0)
            store.publish(
                step, {"block_000": (generation, future.result(30))}, ref, {"step": step, "rate": 0.1}
            )


if __name__ == "__main__":
    write(sys.argv[1])
