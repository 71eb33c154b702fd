"""``diff``: equal means equal bits, by tensor, whatever files they lie in."""

import json
import math
import struct

import numpy as np
import pytest

import tiny_run
from holdfast.cli.diff import CHUNK, compare_bytes
from tiny_run import TENSORS, TinyRun


def make(root, steps=2, **kwargs):
    with TinyRun(root, **kwargs) as tiny:
        for _ in range(steps):
            tiny.take_step()
    return root


@pytest.fixture
def pair(tmp_path):
    return make(tmp_path / "a"), make(tmp_path / "b")


def test_two_runs_of_the_same_steps_are_equal(pair, holdfast):
    result = holdfast("diff", *pair)
    assert result.code == 0
    assert "equal: 6 tensors" in result.out
    found = json.loads(holdfast("diff", *pair, "--json").out)
    assert found["equal"] is True
    assert found["compared"] == 6
    assert found["progress"] == []


def test_a_commit_equals_itself_whatever_the_division_into_files(tmp_path, holdfast):
    joined = {"all": [row for rows in TENSORS.values() for row in rows]}
    a, b = make(tmp_path / "a"), make(tmp_path / "b", tensors=joined)
    assert holdfast("diff", a, b).code == 0


def test_other_steps_differ_and_exit_1(pair, holdfast):
    result = holdfast("diff", pair[0], f"{pair[1]}@1")
    assert result.code == 1
    assert "different: 5 of 6 tensors" in result.out
    assert "b.weight/exp_avg" in result.out


def test_one_changed_tensor_is_named_with_its_largest_difference(tmp_path, holdfast, monkeypatch):
    a = make(tmp_path / "a")
    ordinary = tiny_run.content

    def changed(key, step, nbytes):
        data = bytearray(ordinary(key, step, nbytes))
        if key == "b.weight/exp_avg" and step == 2:
            data[:8] = struct.pack("<2f", 1.5, -0.0)
        return bytes(data)

    def base(key, step, nbytes):
        data = bytearray(ordinary(key, step, nbytes))
        if key == "b.weight/exp_avg" and step == 2:
            data[:8] = struct.pack("<2f", 1.0, 0.0)
        return bytes(data)

    monkeypatch.setattr(tiny_run, "content", base)
    a = make(tmp_path / "base")
    monkeypatch.setattr(tiny_run, "content", changed)
    b = make(tmp_path / "changed")
    found = holdfast("diff", a, b, "--json")
    assert found.code == 1
    [row] = json.loads(found.out)["different"]
    assert row == {"atom": "b.weight/exp_avg", "elements": 4099, "differing": 2, "largest": 0.5}
    text = holdfast("diff", a, b).out
    assert "2 of 4,099" in text
    assert "0.5" in text


def test_tensors_that_only_one_has_or_of_another_kind_differ(tmp_path, holdfast):
    other = {
        "block_0": [("a.weight/param", "F32", (7, 5)), ("a.weight/exp_avg", "F32", (5, 7))],
        "block_1": [*TENSORS["block_1"], ("d.weight/param", "U8", (3,))],
    }
    a, b = make(tmp_path / "a"), make(tmp_path / "b", tensors=other)
    result = holdfast("diff", a, b)
    assert result.code == 1
    assert "only in a: a.step/step" in result.out
    assert "only in b: d.weight/param" in result.out
    assert "another kind: a.weight/param is F32 [5, 7] in a, F32 [7, 5] in b" in result.out
    found = json.loads(holdfast("diff", a, b, "--json").out)
    assert (found["equal"], found["compared"], found["different"]) == (False, 4, [])


def test_progress_that_differs_is_told_beside_equal_tensors(tmp_path, holdfast):
    a, b = make(tmp_path / "a"), tmp_path / "b"
    with TinyRun(b) as tiny:
        tiny.take_step()
        files = {name: (unit.acquire(), None) for name, unit in tiny.units.items()}
        files = {n: (g, tiny.write(tiny.units[n], g, 2)) for n, (g, _) in files.items()}
        tiny.store.publish(2, tiny.fixed | files, tiny.index, {"step": 2, "loader": 7})
    result = holdfast("diff", a, b)
    assert result.code == 0
    assert "The progress beside them differs in: loader" in result.out


def test_long_lists_are_cut_for_people_and_whole_in_json(tmp_path, holdfast):
    rows = {"many": [(f"w{i:02}/param", "F32", (2,)) for i in range(30)]}
    a = make(tmp_path / "a", tensors=rows)
    result = holdfast("diff", f"{a}@1", a)
    assert result.out.count("/param") == 20
    assert "... and 10 more; --json lists all" in result.out
    assert len(json.loads(holdfast("diff", f"{a}@1", a, "--json").out)["different"]) == 30


def test_damage_is_no_difference(pair, holdfast):
    for path in (pair[1] / "data").glob("block_0.*"):
        path.write_bytes(bytes(path.stat().st_size))
    result = holdfast("diff", *pair)
    assert result.code == 1
    assert result.err.startswith("error: ")
    assert "checksum" in result.err


def floats(*values):
    return struct.pack(f"<{len(values)}f", *values)


@pytest.mark.parametrize(
    "a, b, differing, largest",
    [
        (floats(1.0, 2.0), floats(1.0, 2.25), 1, 0.25),
        (floats(0.0), floats(-0.0), 1, 0.0),
        (floats(math.nan), floats(1.0), 1, None),
        (floats(math.inf), floats(1.0), 1, None),
        (floats(math.nan, 1.0), floats(math.nan, 3.0), 1, 2.0),
        (b"", b"", 0, 0.0),
    ],
)
def test_bits_decide_and_values_measure(a, b, differing, largest):
    assert compare_bytes(a, b, "F32") == {"elements": len(a) // 4, "differing": differing, "largest": largest}


@pytest.mark.parametrize(
    "dtype, a, b, largest",
    [
        ("BF16", struct.pack("<H", 0x3F80), struct.pack("<H", 0x4000), 1.0),
        ("F16", np.float16(1.5).tobytes(), np.float16(-1).tobytes(), 2.5),
        ("I64", struct.pack("<q", -3), struct.pack("<q", 4), 7.0),
        ("U8", b"\xff", b"\x00", 255.0),
        ("BOOL", b"\x01", b"\x00", 1.0),
        ("F8_E4M3", b"\x01", b"\x00", None),
    ],
)
def test_every_kind_of_element_is_measured_in_its_own_values(dtype, a, b, largest):
    assert compare_bytes(a, b, dtype) == {"elements": 1, "differing": 1, "largest": largest}


def test_differences_are_found_in_every_chunk():
    a = np.zeros(2 * CHUNK + 3, dtype=np.float32)
    b = a.copy()
    b[[0, CHUNK, 2 * CHUNK + 2]] = 1, 3, 2
    assert compare_bytes(a.tobytes(), b.tobytes(), "F32")["largest"] == 3
    b[-1] = math.nan
    assert compare_bytes(a.tobytes(), b.tobytes(), "F32") == {
        "elements": len(a),
        "differing": 3,
        "largest": None,
    }
