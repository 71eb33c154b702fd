"""``diff``: equal means equal bits, by tensor, whatever files they lie in."""

import copy
import json
import math
import struct

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.checkpointer import Checkpointer
from holdfast.cli.diff import CHUNK, compare_bytes
from holdfast.io.queue import IOQueue
from holdfast.store.format.payload_layout import Layout
from holdfast.store.run_store import LocalStore
from tiny_run import index_of

NAMES = {"float32": "F32", "float16": "F16", "int64": "I64", "uint8": "U8"}


def values(step=2, **changed):
    """Six tensors as they are at ``step``."""
    rng = np.random.default_rng(step)
    made = {f"w{i}/param": rng.normal(size=(i + 1, 3)).astype(np.float32) for i in range(5)}
    made["clock/step"] = np.int64(step)
    return made | changed


def write_run(root, *steps, divided=False, progress=None):
    """A run whose n-th commit holds the n-th of ``steps``, in one file or in one for each tensor."""
    tensors = {key: np.asarray(value) for key, value in steps[0].items()}
    units = {f"unit{i}": [key] for i, key in enumerate(tensors)} if divided else {"all": list(tensors)}
    rows = {
        unit: [(key, NAMES[tensors[key].dtype.name], tensors[key].shape) for key in keys]
        for unit, keys in units.items()
    }
    queue = IOQueue(1)
    store = LocalStore.open(root, queue=queue, direct=False)
    store.begin(None)
    made = {name: store.unit(name, Layout.build(row), 3) for name, row in rows.items()}
    index = store.put_index(index_of(rows))
    for unit in made.values():
        unit.create()
    for number, step in enumerate(steps, 1):
        files = {name: write_unit(unit, step) for name, unit in made.items()}
        store.publish(number, files, index, {"position": number} if progress is None else progress)
    store.close()
    queue.close()
    return root


def write_unit(unit, tensors):
    image = bytearray(unit.layout.header.ljust(unit.layout.file_bytes, b"\0"))
    for entry in unit.layout.entries:
        if entry.key in tensors:
            image[entry.offset : entry.end] = np.asarray(tensors[entry.key]).tobytes()
    generation = unit.acquire()
    written = unit.write(generation, memoryview(image), kind="state", phase="update", priority=0)
    return generation, written.result(30)


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "a", values(1), values(2))


def test_two_runs_of_the_same_steps_are_equal(run, tmp_path, holdfast):
    other = write_run(tmp_path / "b", values(1), values(2))
    result = holdfast("diff", run, other)
    assert result.code == 0
    assert "equal: 6 tensors, 188 B, bit for bit" in result.out
    found = json.loads(holdfast("diff", run, other, "--json").out)
    assert (found["equal"], found["compared"], found["bytes"]) == (True, 6, 188)
    assert found["progress"] == []


def test_the_division_into_files_makes_no_difference(run, tmp_path, holdfast):
    other = write_run(tmp_path / "b", values(1), values(2), divided=True)
    assert holdfast("diff", run, other).code == 0


def test_other_steps_differ_and_exit_1(run, holdfast):
    result = holdfast("diff", run, f"{run}@1")
    assert result.code == 1
    assert "different: 6 of 6 tensors" in result.out
    assert "clock/step" in result.out


def test_one_changed_tensor_is_named_with_its_largest_difference(run, tmp_path, holdfast):
    changed = values(2)["w3/param"].copy()
    changed[2, 1] += 0.5
    other = write_run(tmp_path / "b", values(1), values(2, **{"w3/param": changed}))
    found = holdfast("diff", run, other, "--json")
    assert found.code == 1
    [row] = json.loads(found.out)["different"]
    assert (row["atom"], row["elements"], row["differing"]) == ("w3/param", 12, 1)
    assert row["largest"] == pytest.approx(0.5)
    line = holdfast("diff", run, other).out.splitlines()[-1]
    assert line.split() == ["w3/param", "1", "of", "12", "0.5"]


def test_parameters_are_shown_first_and_then_what_differs_most(tmp_path, holdfast):
    """Step counters differ by whole numbers and would hide the rest."""
    names = ("w0/param", "w1/param", "w0/step", "w2/param")
    steps = [
        {key: np.float32(0) for key in names},
        dict(zip(names, map(np.float32, (1, 3, 9, 2)), strict=True)),
    ]
    run = write_run(tmp_path / "many", *steps)
    rows = holdfast("diff", f"{run}@1", run).out.splitlines()[-4:]
    assert [row.split()[0] for row in rows] == ["w1/param", "w2/param", "w0/param", "w0/step"]


def test_tensors_that_only_one_has_or_of_another_kind_differ(run, tmp_path, holdfast):
    tensors = values(2, **{"new/param": np.zeros(3, np.uint8), "w1/param": np.zeros((3, 2), np.float32)})
    del tensors["w2/param"]
    other = write_run(tmp_path / "b", tensors, tensors)
    result = holdfast("diff", run, other)
    assert result.code == 1
    assert "only in a: w2/param" in result.out
    assert "only in b: new/param" in result.out
    assert "another kind: w1/param is F32 [2, 3] in a, F32 [3, 2] in b" in result.out
    found = json.loads(holdfast("diff", run, other, "--json").out)
    assert (found["equal"], found["compared"], found["different"]) == (False, 4, [])


@pytest.mark.parametrize("order", [1, -1])
def test_a_tensor_too_many_on_either_side_is_a_difference(run, tmp_path, holdfast, order):
    more = write_run(tmp_path / "b", *(values(step, **{"new/param": np.uint8(1)}) for step in (1, 2)))
    found = holdfast("diff", *(run, more)[::order], "--json")
    assert found.code == 1
    assert json.loads(found.out)["different"] == []


class Tied(nn.Module):
    """Whose weights are called by the first of their names that was registered; with ``copies`` they are not tied."""

    def __init__(self, first, copies=False):
        super().__init__()
        self.add_module(first, nn.Linear(4, 6, bias=False))
        for name in ("embed", "head"):
            if name != first:
                self.add_module(name, nn.Linear(4, 6, bias=False))
                setattr(self, name, copy.deepcopy(getattr(self, first)) if copies else getattr(self, first))


def tied(path, first, copies=False, value=1.0):
    model = Tied(first, copies)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
        getattr(model, first).weight[0, 0] = value
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(path, model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
        sum(parameter.sum() for parameter in model.parameters()).backward()
        optimizer.step()
        checkpointer.step()
    torch.save({"model": model.state_dict()}, f"{path}.pt")
    return path


def test_tied_weights_are_compared_under_any_of_their_names(tmp_path, holdfast):
    run, other = tied(tmp_path / "a", "embed"), tied(tmp_path / "b", "head")
    for a, b in ((run, other), (f"{run}.pt", f"{other}.pt"), (f"{other}.pt", f"{run}.pt")):
        assert holdfast("diff", a, b).out.splitlines()[2].startswith("equal: ")
    found = json.loads(holdfast("diff", run, tied(tmp_path / "c", "head", value=2.0), "--json").out)
    assert [row["atom"] for row in found["different"]] == ["embed.weight/param"]
    assert found["only_in_a"] == found["only_in_b"] == []


def test_tied_weights_are_compared_with_each_copy_of_them(tmp_path, holdfast):
    run = tied(tmp_path / "a", "embed")
    same, other = (
        tied(tmp_path / name, "embed", copies=True, value=v) for name, v in (("b", 1.0), ("c", 2.0))
    )
    assert json.loads(holdfast("diff", f"{run}.pt", f"{same}.pt", "--json").out)["compared"] == 2
    for a, b in ((run, other), (other, run)):
        found = json.loads(holdfast("diff", f"{a}.pt", f"{b}.pt", "--json").out)
        assert (found["compared"], len(found["different"])) == (2, 1)
        assert found["only_in_a"] == found["only_in_b"] == []


def test_progress_that_differs_is_told_beside_equal_tensors(run, tmp_path, holdfast):
    other = write_run(tmp_path / "b", values(1), values(2), progress={"position": 2, "loader": 7})
    result = holdfast("diff", run, other)
    assert result.code == 0
    assert "The progress beside them differs in: loader" in result.out


def test_long_lists_are_cut_for_people_and_whole_in_json(tmp_path, holdfast):
    steps = [{f"w{i:02}/param": np.full(2, step, np.float32) for i in range(30)} for step in (1, 2)]
    run = write_run(tmp_path / "many", *steps)
    result = holdfast("diff", f"{run}@1", run)
    assert result.out.count("/param") == 20
    assert "... and 10 more; --json lists all" in result.out
    assert len(json.loads(holdfast("diff", f"{run}@1", run, "--json").out)["different"]) == 30


def test_damage_is_no_difference(run, tmp_path, holdfast):
    other = write_run(tmp_path / "b", values(1), values(2))
    for path in (other / "data").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    result = holdfast("diff", run, other)
    assert (result.code, result.out) == (1, "")
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
        ("F8_E4M3", b"\x38", b"\x00", 1.0),
        ("F8_E5M2", b"\x3c", b"\x00", 1.0),
        ("C64", np.complex64(3 + 4j).tobytes(), np.complex64(0).tobytes(), 5.0),
        ("U64", struct.pack("<Q", 7), struct.pack("<Q", 4), 3.0),
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
