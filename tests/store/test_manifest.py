"""Manifests and timeline records read back as they were written, or not at all."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import xxhash

from holdfast.errors import ManifestCorrupt, RunMismatch
from holdfast.store.format.manifest import (
    CommitRef,
    FileRef,
    Manifest,
    RankShare,
    Timeline,
    seal,
    timeline_of_name,
    unseal,
)

MANIFEST = Manifest(
    step=12,
    timeline=3,
    parent=2,
    fork_step=10,
    key="ab",
    parent_key="cd",
    files={
        "block_0": FileRef("data/block_0.1.safetensors", 8192, ("00" * 8,)),
        "ü": FileRef("data/u", 0, ()),
    },
    index={"path": "index/ab.json", "bytes": 3, "xxh3_128": "ab"},
    progress={"rate": 0.1 + 0.2, "none": None, "infinite": float("inf"), "text": "é\n"},
    created=1790000000.25,
    writer={"pid": 1, "host": "h", "library": "holdfast 0"},
)


def test_a_manifest_reads_back_equal():
    assert Manifest.decode(MANIFEST.encode(), MANIFEST.path) == MANIFEST
    assert MANIFEST.path == "commits/step-000000000012.t0003.json"
    assert MANIFEST.total_bytes == 8192


def test_a_timeline_reads_back_equal():
    record = Timeline(3, 2, 10, "ab", "cd", 1790000000.25, {"pid": 1})
    assert Timeline.decode(record.encode(), "timelines/t0003.json") == record
    with pytest.raises(ManifestCorrupt, match="it is the record of timeline 3"):
        Timeline.decode(record.encode(), "timelines/t0004.json")


def test_the_file_is_json_one_line_per_key_and_per_unit():
    text = MANIFEST.encode().decode()
    table = json.loads(text)
    assert list(table)[:4] == ["format", "version", "step", "timeline"]
    assert list(table)[-1] == "digest"
    assert text.splitlines()[3] == ' "step": 12,'
    assert sum("xxh3_64" in line for line in text.splitlines()) == 2


def test_the_digest_covers_every_byte_before_it():
    data = MANIFEST.encode()
    body, _, _ = data.partition(b',\n "digest": ')
    assert data == body + b',\n "digest": "%s"\n}\n' % xxhash.xxh3_128_hexdigest(body).encode()


OUTSIDE = [
    "/etc/passwd", "../x", "data/../x", "data/drive_1/../../x", "data/drive_1/..", "data/a/b", "data/", "data/.x",
    "data/drive_0/x", "data/drive_1/drive_2/x", "index/x", "lock", "data/x\0", 7, None,
]  # fmt: skip


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_path_at_which_no_run_has_a_file_is_not_believed(path):
    """Whoever made the manifest: what it names is read, and removed when it goes."""
    ref = FileRef("data/x", 3, ())
    for odd in (
        replace(MANIFEST, files={"u": replace(ref, path=path)}),
        replace(MANIFEST, index={**MANIFEST.index, "path": "data/x" if path == "index/x" else path}),
        replace(MANIFEST, shares={"s": RankShare(str(path).removeprefix("index/"), 1, "", 1, {}, {}, {})}),
    ):
        with pytest.raises(ManifestCorrupt, match="does not read as one"):
            Manifest.decode(odd.encode(), odd.path)
    table = {
        "files": {"u": {**ref.to_json(), "path": path}},
        "index": MANIFEST.index,
        "step": 1,
        "progress": {},
    }
    with pytest.raises(ManifestCorrupt, match=r"index/ab.json .*does not read as one"):
        RankShare.from_json(MANIFEST.index, table)


def test_a_path_on_a_drive_is_believed():
    odd = replace(MANIFEST, files={"u": FileRef("data/drive_12/u.0.safetensors", 3, ())})
    assert Manifest.decode(odd.encode(), odd.path) == odd


@pytest.mark.parametrize("data", [b"", b"{}", MANIFEST.encode()[:-1], MANIFEST.encode() + b"\n"])
def test_anything_else_is_damage(data):
    with pytest.raises(ManifestCorrupt, match="fails its own digest"):
        Manifest.decode(data, MANIFEST.path)


def test_another_name_another_version_or_another_format_is_refused():
    with pytest.raises(ManifestCorrupt, match="it is the manifest of commits/step-000000000012"):
        Manifest.decode(MANIFEST.encode(), "commits/step-000000000011.t0003.json")
    with pytest.raises(RunMismatch, match="format version 2; this library reads 1"):
        unseal(seal({"format": "holdfast", "version": 2}), "x")
    for table in ({"format": "other", "version": 1}, {"a": 1}, {"format": "holdfast", "version": 1}):
        with pytest.raises(ManifestCorrupt, match="does not read as one"):
            Manifest.decode(seal(table), "x")


def test_names_of_others_are_no_commits_and_no_timelines():
    assert CommitRef.of_name("step-000000000012.t0003.json") == CommitRef(3, 12)
    assert CommitRef.of_name("step-1234567890123.t12345.json") == CommitRef(12345, 1234567890123)
    for name in ["step-12.t0003.json", "step-000000000012.t3.json", "step-0000000000012.t0003.json",
                 "step-000000000012.t0003.json.tmp", "notes.txt"]:  # fmt: skip
        assert CommitRef.of_name(name) is None
    assert timeline_of_name("t0003.json") == 3
    assert timeline_of_name("t00003.json") is timeline_of_name("t3.json") is None
