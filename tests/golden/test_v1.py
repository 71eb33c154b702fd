"""Format version 1, byte for byte: this library writes it so, and every later one must read it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors
import xxhash

from golden import make_v1
from holdfast.store.format.payload_layout import Layout
from holdfast.store.run_store import LocalStore

V1 = Path(__file__).parent / "v1"


def files_of(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_this_library_writes_the_same_bytes(tmp_path):
    make_v1.write(tmp_path / "run")
    written = files_of(tmp_path / "run")
    assert written.pop("lock") == b""
    assert written == files_of(V1)


def test_the_run_reads_as_it_was_written():
    reader = LocalStore.read(V1, direct=False)
    assert [ref.step for ref in reader.line()] == [2, 1]
    for step in (1, 2):
        manifest = reader.at(step)
        assert reader.verify(manifest) == []
        assert manifest.progress == {"step": step, "rate": 0.1}
        atoms, sizes = reader.atoms(manifest), {"w/param": 24, "w/exp_avg": 12, "n/step": 8}
        assert list(atoms) == list(sizes)
        for key, nbytes in sizes.items():
            assert reader.read_atom(manifest, atoms[key]) == make_v1.payload(key, step, nbytes)


def test_the_literal_bytes_of_a_payload_file():
    data = (V1 / "data/block_000.1.safetensors").read_bytes()
    assert len(data) == 8192
    assert data[:8] == b"\xf8\x0f\0\0\0\0\0\0"
    assert data[8:58] == b'{"__metadata__":{"format":"holdfast","version":"1"'
    assert data[4096:4136] == b"2:w/param|2:w/param|2:w/" + bytes(16)
    assert data[4160:4172] == b"2:w/exp_avg|"
    assert data[4224:4232] == b"2:n/step"
    assert data[4232:] == bytes(8192 - 4232)


def test_the_literal_bytes_of_a_manifest_and_its_digests():
    data = (V1 / "commits/step-000000000002.t0001.json").read_bytes()
    lines = data.decode().splitlines()
    assert lines[:7] == ["{", ' "format": "holdfast",', ' "version": 1,', ' "step": 2,', ' "timeline": 1,',
                         ' "parent": null,', ' "fork_step": null,']  # fmt: skip
    table = json.loads(data)
    assert table["digest"] == xxhash.xxh3_128_hexdigest(data[:-50])
    assert data[-50:] == b',\n "digest": "%s"\n}\n' % table["digest"].encode()
    (payload,) = table["files"].values()
    assert payload["xxh3_64"] == [xxhash.xxh3_64_hexdigest((V1 / payload["path"]).read_bytes())]
    index = (V1 / table["index"]["path"]).read_bytes()
    assert table["index"] == {
        "path": f"index/{xxhash.xxh3_128_hexdigest(index)}.json",
        "bytes": len(index),
        "xxh3_128": xxhash.xxh3_128_hexdigest(index),
    }


@pytest.mark.parametrize("generation", [0, 1])
def test_any_safetensors_reader_opens_a_payload_file(generation):
    data = (V1 / f"data/block_000.{generation}.safetensors").read_bytes()
    theirs = dict(safetensors.deserialize(data))
    assert sorted(name for name in theirs if not name.startswith("__pad__")) == [
        "n/step",
        "w/exp_avg",
        "w/param",
    ]
    for entry in Layout.parse(data).entries:
        assert bytes(theirs[entry.key]["data"]) == data[entry.offset : entry.end]
