"""Universal folders of DeepSpeed: read as its converter makes them, written as its loader reads them, from any source.

That DeepSpeed itself loads what is written is tested in ``tests/peers``.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from formats.deepspeed_files import random_state, save, write, write_universal
from formats.test_deepspeed import SHAPES, bits, expected, state_of
from holdfast.errors import BadInput, Damaged, FileMissing
from holdfast.formats.deepspeed.deepspeed_writer import write_deepspeed
from holdfast.formats.foreign_formats import open_source
from holdfast.formats.memory_source import InMemory
from holdfast.formats.torch_archive import archive_writer
from holdfast.formats.torch_archive.archives import Archive, Plain
from holdfast.state.encoding import decode, encode
from holdfast.state.tensor_entries import TensorEntry
from holdfast.store.disk import Disk

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_tensor_of_a_universal_folder_is_what_it_was(tmp_path, stage, dtype):
    state = state_of(dtype=dtype)
    folder = write_universal(tmp_path, state, stage)
    source = open_source(tmp_path)
    assert bits(source) == expected(state)
    assert (source.path, source.format) == (str(folder), "deepspeed universal")
    assert source.progress["step"] == 9 and source.aliases == {"head.weight": "embed.weight"}
    assert source.progress["group_parameters"] == [list(group) for group in SHAPES]


def test_a_count_of_steps_that_is_a_number_is_read(tmp_path):
    state = state_of(step_is_tensor=False)
    for stage in (1, 3):
        write_universal(tmp_path / str(stage), state, stage)
        assert bits(open_source(tmp_path / str(stage))) == expected(state)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("slot", ["fp32", "exp_avg", "exp_avg_sq"])
def test_a_tensor_that_is_missing_is_named(tmp_path, stage, slot):
    folder = write_universal(tmp_path, state_of(), stage)
    (folder / "zero" / "up.weight" / f"{slot}.pt").unlink()
    with pytest.raises(FileMissing, match=rf"zero/up\.weight/{slot}\.pt is missing"):
        open_source(tmp_path)


def test_a_file_in_the_place_of_another_is_refused(tmp_path):
    folder = write_universal(tmp_path, state_of(), 1) / "zero" / "up.weight"
    (folder / "exp_avg.pt").rename(folder / "x")
    (folder / "exp_avg_sq.pt").rename(folder / "exp_avg.pt")
    (folder / "x").rename(folder / "exp_avg_sq.pt")
    with pytest.raises(Damaged, match=r"exp_avg\.pt was exp_avg_sq\.pt when it was saved"):
        open_source(tmp_path)


def test_a_tensor_of_another_shape_than_the_model_says_is_refused(tmp_path):
    folder = write_universal(tmp_path, state_of(), 3)
    save(torch.zeros(129), folder / "zero" / "up.weight" / "fp32.pt")
    with pytest.raises(Damaged, match=r"fp32\.pt is \[129\], and the model states say \[13, 10\]"):
        open_source(tmp_path)


def test_an_empty_schedule_is_written_as_none(tmp_path):
    write(tmp_path / "source", state_of(), 1, 1)
    source = open_source(tmp_path / "source")
    source.progress["scheduler"] = {}
    write_deepspeed(source, tmp_path / "out", 1)
    [path] = (tmp_path / "out").rglob("*model_states.pt")
    assert torch.load(path, weights_only=False)["lr_scheduler"] is None


@pytest.mark.campaign(cover=2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source_stage", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_written_for_any_stage_is_what_was_read_of_any(
    tmp_path, source_stage, stage, dtype, monkeypatch
):
    monkeypatch.setattr(archive_writer, "CHUNK", 64)
    state = state_of(dtype=dtype)
    write(tmp_path / "source", state, source_stage, 3)
    source = open_source(tmp_path / "source")
    told = []
    write_deepspeed(source, tmp_path / "out", stage, report=told.append)
    again = open_source(tmp_path / "out")
    assert bits(again) == expected(state) == bits(source)
    for key in ("step", "groups", "group_parameters", "scheduler"):
        assert again.progress[key] == source.progress[key]
    assert again.aliases == source.aliases
    extra = source.progress["extra"]
    kept = {"epoch", "skipped_steps", "global_samples"} | ({"clip_grad"} & set(extra))
    assert {key: again.progress["extra"][key] for key in kept} == {key: extra[key] for key in kept}
    trained = {
        f"{name}/{slot}"
        for group in SHAPES
        for name in group
        for slot in ("param", "exp_avg", "exp_avg_sq", "step")
    }
    assert sum(told) == sum(source.atoms[key].atom.nbytes for key in trained)


def test_torch_loads_what_is_written_as_plain_data(tmp_path):
    state = state_of()
    write(tmp_path / "source", state, 1, 2)
    files = write_deepspeed(open_source(tmp_path / "source"), tmp_path / "out", 3)
    for path in files:
        torch.load(path, weights_only=True)
    names = {str(path.relative_to(tmp_path / "out")) for path in files}
    assert "global_step9/zero/up.weight/exp_avg.pt" in names
    assert "global_step9/zero_pp_rank_0_mp_rank_00_model_states.pt" in names
    atom = torch.load(tmp_path / "out/global_step9/zero/up.weight/fp32.pt", weights_only=True, mmap=True)
    assert torch.equal(atom["param"], state.groups[0]["up.weight"])
    assert not [path for path in (tmp_path / "out").rglob("*") if path.suffix in (".part", ".tmp")]


@pytest.mark.parametrize("kind", ["?", "i1", "i8", "u8", "f2", "f4", "f8", ">f4"])
def test_numbers_of_numpy_are_written_as_those_of_python(tmp_path, kind):
    """Wherever they are, also as keys, and read again as what they were."""
    number = np.array([1.1]).astype(kind)[0]
    archive_writer.save_torch(
        Disk(tmp_path), "a.pt", {"at": [number, (number, {number: number})], "own": 2.5}
    )
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert found == {"at": [number.item(), (number.item(), {number.item(): number.item()})], "own": 2.5}
    assert type(found["at"][0]) is type(number.item())


@pytest.mark.parametrize("raw", [b"", b"\x00\xffbytes", bytes(range(256))])
def test_bytes_are_written_as_bytes(tmp_path, raw):
    archive_writer.save_torch(Disk(tmp_path), "a.pt", {"raw": raw, "again": [raw, "text"]})
    assert torch.load(tmp_path / "a.pt", weights_only=True) == {"raw": raw, "again": [raw, "text"]}
    [read] = Archive(tmp_path / "a.pt").content["again"][:1]
    assert Plain(Archive(tmp_path / "a.pt"))(read) == encode(raw)


@pytest.mark.parametrize(
    "value", [np.complex64(1j), np.longdouble(1), np.datetime64(1, "s"), np.zeros(2), object()]
)
def test_what_is_no_number_of_python_is_refused(tmp_path, value):
    with pytest.raises(BadInput, match="is no data"):
        archive_writer.save_torch(Disk(tmp_path), "a.pt", {"a": value})


def test_what_a_script_put_beside_an_engine_comes_through(tmp_path):
    atoms = [
        (TensorEntry("w", slot, (), "F32"), torch.ones(()))
        for slot in ("param", "exp_avg", "exp_avg_sq", "step")
    ]
    best = {"loss": np.float64(0.25), "raw": b"\xff\0", "count": np.int64(3)}
    progress = {"step": 1, "groups": [{"lr": encode(np.float32(0.1))}], "group_parameters": [["w"]]}
    source = InMemory("it", "memory", atoms, progress | {"extra": {"best": encode(best)}})
    write_deepspeed(source, tmp_path, 1)
    again = open_source(tmp_path).progress
    assert decode(again["extra"]["best"]) == {"loss": 0.25, "raw": b"\xff\0", "count": 3}
    assert again["groups"] == [{"lr": np.float32(0.1).item()}]


def test_parameters_of_16_bits_are_written_as_the_fp32_that_they_are(tmp_path):
    tensor = torch.randn(3, 2).bfloat16()
    source = InMemory(
        "here",
        "memory",
        [(TensorEntry("w", "param", (3, 2), "BF16"), tensor)],
        {"groups": [{}], "group_parameters": [["w"]]},
    )
    write_deepspeed(source, tmp_path, 1)
    found = torch.load(tmp_path / "global_step0/zero/w/fp32.pt", weights_only=True)["param"]
    assert found.dtype == torch.float32 and torch.equal(found, tensor.float())


def test_a_conversion_that_was_interrupted_goes_on_where_it_was(tmp_path):
    state = state_of()
    write(tmp_path / "source", state, 1, 2)
    source = open_source(tmp_path / "source")
    out, told = tmp_path / "out", []

    def stop(nbytes):
        told.append(nbytes)
        if len(told) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_deepspeed(source, out, 1, report=stop)
    assert not (out / "latest_universal").exists()
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.pt") if ".part" not in str(path)}
    assert before
    with pytest.raises(BadInput, match="holds a checkpoint already, or a part of another"):
        write_deepspeed(source, out, 2)
    write_deepspeed(source, out, 1)
    assert before.items() <= {path: path.stat().st_mtime_ns for path in out.rglob("*.pt")}.items()
    assert bits(open_source(out)) == expected(state)
    with pytest.raises(BadInput, match="holds a checkpoint already"):
        write_deepspeed(source, out, 1)


@pytest.mark.parametrize(
    ("about", "stage", "said"),
    [
        ({"slots": ("momentum_buffer",), "step": None}, 3, "loader reads exp_avg, exp_avg_sq and step"),
        ({}, 4, "stage 4 is not one of 1, 2, 3"),
    ],
)
def test_what_deepspeed_would_not_read_is_refused_before_anything_is_written(tmp_path, about, stage, said):
    write(tmp_path / "source", state_of(**about), 1, 2)
    with pytest.raises(BadInput, match=said):
        write_deepspeed(open_source(tmp_path / "source"), tmp_path / "out", stage)
    assert not (tmp_path / "out").exists()


W, ROW = TensorEntry("w", "param", (3, 2), "F32"), TensorEntry("w", "exp_avg_sq_row", (3,), "F32")
GROUPS = {"groups": [{"lr": 1.0}], "group_parameters": [["w"]]}


@pytest.mark.parametrize(
    ("atoms", "progress", "said"),
    [
        ([W], {}, "does not say which parameters are in which group"),
        ([W, ROW], GROUPS, r"w/exp_avg_sq_row is \[3\] and the parameter \[3, 2\]"),
        ([], GROUPS, "has no parameter w"),
        ([TensorEntry("w", "param", (3, 2), "F64")], GROUPS, "master parameters are fp32"),
        ([W, TensorEntry("v", "exp_avg", (3,), "F32")], GROUPS, "v/exp_avg is of a parameter that no group"),
        ([W], {**GROUPS, "values": {"w": {"eta": 1.0}}}, r"\['eta'\] of w are no tensors"),
    ],
)
def test_sources_that_deepspeed_cannot_hold_are_refused(tmp_path, atoms, progress, said):
    kinds = {"F32": torch.float32, "F64": torch.float64}
    held = [(atom, torch.zeros(atom.shape, dtype=kinds[atom.dtype])) for atom in atoms]
    with pytest.raises(BadInput, match=said):
        write_deepspeed(InMemory("here", "memory", held, progress), tmp_path / "out", 1)
    assert not (tmp_path / "out").exists()


def test_an_optimizer_of_other_state_of_each_element_is_written_for_zero_1_and_2(tmp_path):
    state = random_state(SHAPES, slots=("momentum_buffer",), step=None)
    write(tmp_path / "source", state, 3, 2)
    write_deepspeed(open_source(tmp_path / "source"), tmp_path / "out", 2)
    assert bits(open_source(tmp_path / "out")) == expected(state)
