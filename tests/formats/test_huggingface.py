"""Safetensors: what Hugging Face's libraries wrote is read, and what is written here they load."""

from __future__ import annotations

import errno
import json
import os
import struct
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from combined import some_of
from holdfast.checkpointer import Checkpointer
from holdfast.cli.inspect import is_foreign
from holdfast.cli.main import app
from holdfast.errors import BadInput, ChunkCorrupt, Damaged, DiskFailed
from holdfast.formats import restore
from holdfast.formats.load import ReadTarget, read_all
from holdfast.formats.readers import huggingface
from holdfast.formats.readers.huggingface import write_huggingface, write_single
from holdfast.formats.readers.safetensors_files import INDEX, SafetensorsFiles, digest_of, header_of
from holdfast.formats.restore import read_tensors
from holdfast.formats.run_directory import write_run
from holdfast.formats.source import ReadFiles
from holdfast.opening import source_of
from holdfast.state.layout.regions import Region
from holdfast.state.plain_tensors import FROM_NAME
from holdfast.state.tensor_entries import DTYPE_BYTES


def tensors():
    torch.manual_seed(0)
    return {
        "embed.weight": torch.randn(37, 16),
        "layers.0.w": torch.randn(5, 7, 3),
        "layers.0.half": torch.randn(33).bfloat16(),
        "count": torch.tensor(5),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
    }


def read(source):
    """All of a source, by key, as bytes."""
    targets = {
        key: ReadTarget(
            stored, Region.whole(stored.atom.shape), np.empty(stored.atom.shape, f"u{stored.atom.itemsize}")
        )
        for key, stored in source.atoms.items()
    }
    read_all(source, list(targets.values()))
    return {key: target.array.tobytes() for key, target in targets.items()}


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture
def source(tmp_path):
    save_file(tensors(), tmp_path / "source.safetensors")
    return SafetensorsFiles(tmp_path / "source.safetensors")


def test_a_file_is_read_as_it_was_written(source):
    assert read(source) == {f"{name}/param": bits(tensor) for name, tensor in tensors().items()}


@pytest.mark.parametrize("file_bytes", [1, 1000, 2000, 10**6])
def test_files_written_here_are_loaded_there_and_read_again(source, tmp_path, file_bytes):
    folder = tmp_path / "out"
    files = write_huggingface(source, folder, file_bytes=file_bytes)
    loaded = {}
    for file in files:
        loaded |= load_file(file)
    assert loaded.keys() == tensors().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors().items())
    assert {path.name for path in folder.iterdir()} == {f.name for f in files} | (
        {INDEX} if len(files) > 1 else set()
    )
    assert read(SafetensorsFiles(folder)) == read(source)


def test_floating_point_tensors_become_another_type_and_no_others(source, tmp_path):
    [file] = write_huggingface(source, tmp_path / "out", dtype="BF16")
    loaded = load_file(file)
    for name, tensor in tensors().items():
        expected = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert loaded[name].dtype == expected.dtype and torch.equal(loaded[name], expected)


def test_a_long_tensor_is_copied_a_stretch_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface, "CHUNK", 100)
    big = {"w": torch.randn(40, 11), "wide": torch.randn(2, 300)}
    save_file(big, tmp_path / "a.safetensors")
    told = []
    [file] = write_huggingface(
        SafetensorsFiles(tmp_path / "a.safetensors"), tmp_path / "out", report=told.append
    )
    assert all(torch.equal(load_file(file)[name], tensor) for name, tensor in big.items())
    assert max(told) <= 100 and sum(told) == sum(t.nbytes for t in big.values())


def test_a_single_file_holds_all_that_there_is_and_says_what_it_is(source, tmp_path):
    source.progress = {"step": 7}
    first = write_single(source, tmp_path / "one.safetensors")
    again = SafetensorsFiles(first)
    assert again.progress == {"step": 7} and read(again) == read(source)


def test_an_interrupted_conversion_goes_on_with_the_files_that_are_missing(source, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    write, written = huggingface._write_file, []

    def failing(source, disk, name, *rest):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(name)
        write(source, disk, name, *rest)

    monkeypatch.setattr(huggingface, "_write_file", failing)
    with pytest.raises(KeyboardInterrupt):
        write_huggingface(source, folder, file_bytes=1)
    first, written = written, []
    monkeypatch.setattr(huggingface, "_write_file", lambda *a: (written.append(a[2]), write(*a)))
    files = write_huggingface(source, folder, file_bytes=1)
    assert first + written == [file.name for file in files] and len(first) == 2
    assert read(SafetensorsFiles(folder)) == read(source)


@pytest.mark.parametrize("after", ["_write_file", "write_durably"])
@pytest.mark.parametrize("file_bytes", [1000, 1 << 30])
def test_a_conversion_that_is_killed_once_a_file_has_its_name_goes_on(
    source, tmp_path, monkeypatch, after, file_bytes
):
    """Also that of the index."""
    real = getattr(huggingface, after)

    def killed(first, second, *more, **how):
        real(first, second, *more, **how)
        if after == "_write_file" or second == huggingface.INDEX:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(huggingface, after, killed)
        write_huggingface(source, tmp_path / "out", file_bytes=file_bytes)
    if after == "_write_file" or file_bytes == 1000:
        write_huggingface(source, tmp_path / "out", file_bytes=file_bytes)
    assert read(SafetensorsFiles(tmp_path / "out")) == read(source)
    assert not (tmp_path / "out" / huggingface._Done.NAME).exists()


def test_files_of_another_conversion_are_not_mixed_with_its_own(source, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(huggingface._Done, "finish", lambda self: None)
        [file] = write_huggingface(source, folder, dtype="BF16")
    before = file.read_bytes()
    for options in ({}, {"dtype": "BF16", "file_bytes": 1}):
        with pytest.raises(BadInput, match=r"has model\.safetensors, which would be mixed"):
            write_huggingface(source, folder, **options)
    write_huggingface(source, folder, dtype="BF16")
    assert file.read_bytes() == before


def test_a_folder_beside_a_configuration_of_ours_is_what_it_is(source, tmp_path):
    folder = tmp_path / "out"
    write_huggingface(source, folder)
    (folder / "config.toml").write_text("")
    assert source_of(str(folder)).format == "safetensors" and is_foreign(str(folder))


def test_a_state_is_not_exported_into_its_own_folder(source, tmp_path):
    before = (tmp_path / "source.safetensors").read_bytes()
    with pytest.raises(BadInput, match="would be mixed"):
        write_huggingface(source, tmp_path)
    assert (tmp_path / "source.safetensors").read_bytes() == before


def header(table, data=b""):
    text = json.dumps(table).encode() if isinstance(table, dict) else table
    return struct.pack("<Q", len(text)) + text + data


def entry(start, stop, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    "data",
    [
        b"", b"123", struct.pack("<Q", 1 << 60) + b"{}", header(b"[1]"), header(b"not json"),
        header({"a": entry(0, 8, [2])}, b"1234567"), header({"a": entry(0, 8, [2])}, b"123456789"),
        header({"a": entry(0, 8, [3])}, b"12345678"), header({"a": entry(4, 8, [1])}, b"12345678"),
        header({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, b"123456781234"),
        header({"a": entry(0, 8, [-2, -1])}, b"12345678"), header({"a": entry(0, 8, [1 << 40, 1 << 40])}, b"12345678"),
        header({"a": entry(0, -8, [2])}, b"12345678"),
        header({"a": 3}), header({"a": {"dtype": "F32"}}), header({"__metadata__": [1]}),
        header(b'{"a":[' * 5000), header({"a": entry(0, 0, [0, 1 << 70])}),
        header({"a": entry(0, 8, [2.0])}, b"12345678"),
        header({"a": entry(0, 8.0, [2])}, b"12345678"), header({"a": entry(0, 1, [True], "U8")}, b"1"),
    ],
)  # fmt: skip
def test_headers_of_no_sense_are_refused_by_file(tmp_path, data):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(Damaged, match=r"bad\.safetensors"):
        SafetensorsFiles(path)


MINE = [torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


@pytest.mark.parametrize("dtype", MINE)
def test_newer_types_are_what_they_were(tmp_path, dtype):
    held = {"w": torch.ones(2, 2), "scale": torch.tensor([0.5, 2.0]).to(dtype)}
    save_file(held, tmp_path / "a.safetensors")
    found = SafetensorsFiles(tmp_path / "a.safetensors")
    assert read(found) == {f"{name}/param": bits(tensor) for name, tensor in held.items()}
    write_single(found, tmp_path / "b.safetensors")
    again = load_file(tmp_path / "b.safetensors") if dtype != torch.float8_e8m0fnu else {}
    assert all(tensor.dtype == held[name].dtype for name, tensor in again.items())


@pytest.mark.parametrize(
    ("dtype", "shape"), [("F4", [2, 2]), ("F6_E2M3", [4]), ("F6_E3M2", [4, 1]), ("F99", [2])]
)
def test_types_that_no_tensor_has_are_passed_over(tmp_path, dtype, shape):
    """And named; the other tensors are read."""
    size = 8 if dtype == "F99" else {"F4": 2}.get(dtype, 3)
    table = {"w": entry(0, 8, [2]), "odd": entry(8, 8 + size, shape, dtype)}
    path = tmp_path / "a.safetensors"
    path.write_bytes(header(table, b"12345678" + bytes(size)))
    found = SafetensorsFiles(path)
    assert read(found) == {"w/param": b"12345678"} and found.passed_over == {"odd": dtype}
    shown, verified = (CliRunner().invoke(app, [verb, str(path)]) for verb in ("show", "verify"))
    assert shown.exit_code == 0 and f"odd ({dtype})" in shown.output
    assert verified.exit_code == (dtype == "F99") and dtype in verified.output
    same = CliRunner().invoke(app, ["diff", str(path), str(path)])
    assert (
        same.exit_code == 1 and f"Not compared, since Holdfast has no such type: odd ({dtype})" in same.output
    )


def described(name, dtype, shape, start, stop):
    return f'"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{start},{stop}]}}'


ONE = described("a", "F32", [2], 0, 8)
WITH = {  # beside a tensor of eight bytes
    "as it was": "",
    "no metadata": '"__metadata__":null,',
    "empty ones": described("e", "F32", [0, 3], 8, 8) + ",",
    "metadata twice": '"__metadata__":{},"__metadata__":{},',
    "metadata of numbers": '"__metadata__":{"a":1},',
    "metadata in a list": '"__metadata__":[],',
    "gap between": described("b", "U8", [1], 9, 10) + ",",
    "overlap": described("b", "F32", [1], 4, 8) + ",",
    "too large on the way": described("e", "F32", [1 << 40, 1 << 40, 0], 8, 8) + ",",
}
HEADERS = {name: f"{{{more}{ONE}}}".encode() for name, more in WITH.items()}
AS_IT_WAS = HEADERS["as it was"]
HEADERS |= {
    "spaces around": b"  " + AS_IT_WAS + b"   ",
    "other order": f"{{{described('b', 'F32', [1], 4, 8)},{described('a', 'F32', [], 0, 4)}}}".encode(),
    "more of a tensor": AS_IT_WAS.replace(b'"F32"', b'"F32","more":[1]'),
    "not a number": AS_IT_WAS.replace(b'"F32"', b'"F32","more":NaN'),
    "type twice": AS_IT_WAS.replace(b'"F32"', b'"F32","dtype":"I32"'),
    "half a pair": AS_IT_WAS.replace(b'"a"', b'"\\ud800"'),
    "three offsets": AS_IT_WAS.replace(b"[0,8]", b"[0,8,8]"),
    "one offset": AS_IT_WAS.replace(b"[0,8]", b"[0]"),
    "gap before": AS_IT_WAS.replace(b"[0,8]", b"[4,12]"),
    "backwards": AS_IT_WAS.replace(b"[0,8]", b"[8,0]"),
    "half a byte": f"{{{described('a', 'F4', [3], 0, 8)}}}".encode(),
    "bytes behind": f"{{{described('a', 'F32', [1], 0, 4)}}}".encode(),
    "nothing": b"",
    "marked": b"\xef\xbb\xbf" + AS_IT_WAS,
    "of two bytes": AS_IT_WAS.decode().encode("utf-16"),
    "no utf-8": AS_IT_WAS.replace(b'"a"', b'"\xff"'),
    "surrogates": AS_IT_WAS.replace(b'"a"', b'"\xed\xa0\x80"'),
    "zeros behind": AS_IT_WAS + b"\0\0",
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_are_taken_as_their_library_does(tmp_path, name):
    """What safetensors opens is read, and what it does not open is refused."""
    path, text = tmp_path / "a.safetensors", HEADERS[name]
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"12345678")
    try:
        with safe_open(path, "pt") as file:
            theirs = {*file.keys()}
    except (SafetensorError, UnicodeDecodeError):
        theirs = None
    if theirs is None:
        with pytest.raises(Damaged, match=r"a\.safetensors"):
            SafetensorsFiles(path)
    else:
        assert {each.atom.name for each in SafetensorsFiles(path).atoms.values()} == theirs


def test_a_name_that_is_there_twice_is_refused(tmp_path):
    """The format forbids it, and readers differ in which of the two they take."""
    path, text = tmp_path / "a.safetensors", f"{{{ONE},{ONE}}}".encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"12345678")
    with pytest.raises(Damaged, match="'a' is in it twice"):
        SafetensorsFiles(path)


def test_an_index_that_is_nested_too_deep_is_refused(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map":' * 5000)
    with pytest.raises(Damaged, match="is no index of files"):
        SafetensorsFiles(tmp_path)


@pytest.mark.parametrize("change", ["missing file", "missing tensor", "outside", "no json"])
def test_an_index_that_is_not_so_is_refused(source, tmp_path, change):
    folder = tmp_path / "out"
    files = write_huggingface(source, folder, file_bytes=1)
    index = json.loads((folder / INDEX).read_text())
    if change == "missing file":
        files[1].unlink()
    elif change == "missing tensor":
        index["weight_map"]["more"] = files[0].name
    elif change == "outside":
        index["weight_map"]["more"] = "../source.safetensors"
    (folder / INDEX).write_text("{" if change == "no json" else json.dumps(index))
    with pytest.raises(Damaged, match=r"is missing|is in no file|is no index"):
        SafetensorsFiles(folder)


def test_a_source_without_parameters_is_not_exported(source, tmp_path):
    source.atoms.clear()
    with pytest.raises(BadInput, match="no parameters"):
        write_huggingface(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_header_of_gives_metadata(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors", metadata={"who": "me"})
    assert header_of(tmp_path / "a.safetensors").metadata == {"who": "me"}


def test_what_belongs_to_a_parameter_keeps_its_type_in_a_single_file(source, tmp_path):
    stored = source.atoms["embed.weight/param"]
    source.atoms["embed.weight/exp_avg"] = replace(stored, atom=replace(stored.atom, slot="exp_avg"))
    again = SafetensorsFiles(write_single(source, tmp_path / "one.safetensors", dtype="BF16"))
    kinds = {key: again.atoms[key].atom.dtype for key in ("embed.weight/param", "embed.weight/exp_avg")}
    assert kinds == {"embed.weight/param": "BF16", "embed.weight/exp_avg": "F32"}


TIMES = '{"a":[' * 5000
RANDOM = {"python": [3, [1], None], "numpy": 1, "torch": {"__tensor__": "U8", "shape": [1], "bytes": "AA=="}}
WRONG = {
    "no json": "{",
    "a list": "[1]",
    "deep": TIMES,
    "a step of another kind": {"step": "7"},
    "a negative step": {"step": -1},
    "a group that is a number": {"groups": [1], "group_parameters": [["a"]]},
    "names that are none": {"groups": [{}], "group_parameters": [[1]]},
    "groups of nothing": {"groups": 3, "group_parameters": [[]]},
    "values": {"values": [1]},
    "values of a parameter": {"values": {"a": 1}},
    "extra": {"extra": 1},
    "things": {"things": []},
    "a tensor without bytes": {"scheduler": {"__tensor__": "F32", "shape": [1]}},
    "a tensor of no type": {"scheduler": {"__tensor__": "F99", "shape": [1], "bytes": ""}},
    "a tensor of another shape": {"scheduler": {"__tensor__": "F32", "shape": [9], "bytes": "AAAAAA=="}},
    "bytes that are none": {"loader": {"__bytes__": "A"}},
    "a dictionary that is none": {"loader": {"__dict__": [1]}},
    "random numbers": {"random": RANDOM},
    "of a Checkpointer": {"groups": [[{}]], "replay": {}},
    "optimizers": {"optimizers": [1]},
    "names of tied tensors": {"aliases": {"b": 1}},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_progress_in_a_header_that_is_none_is_refused(tmp_path, name):
    text = WRONG[name] if isinstance(WRONG[name], str) else json.dumps(WRONG[name])
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors", metadata={"holdfast.progress": text})
    with pytest.raises(Damaged, match=r"a\.safetensors: holdfast\.progress does not read"):
        SafetensorsFiles(tmp_path / "a.safetensors")


def test_a_name_that_is_tied_to_nothing_is_refused(tmp_path):
    save_file(
        {"a": torch.ones(1)},
        tmp_path / "a.safetensors",
        metadata={"holdfast.progress": '{"aliases": {"b": "c"}}'},
    )
    with pytest.raises(Damaged, match=r"a\.safetensors: holdfast\.progress ties something to c"):
        SafetensorsFiles(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    "keys", ["{", "[]", '{"a": "ab"}', '{"a": ["a"]}', '{"a": ["a", 1]}', '{"a": [["a"], "param"]}']
)
def test_keys_in_a_header_that_are_none_are_refused(tmp_path, keys):
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors", metadata={"holdfast.keys": keys})
    with pytest.raises(Damaged, match=r"a\.safetensors: holdfast\.keys"):
        SafetensorsFiles(tmp_path / "a.safetensors")


def test_tensors_of_every_type_that_torch_knows_too_are_what_they_were(tmp_path):
    there = {name: torch.tensor([1, 0, 3, 1]).to(FROM_NAME[name]) for name in DTYPE_BYTES}
    save_file(there, tmp_path / "a.safetensors")
    source = SafetensorsFiles(tmp_path / "a.safetensors")
    assert {key.removesuffix("/param"): each.atom.dtype for key, each in source.atoms.items()} == {
        name: name for name in DTYPE_BYTES
    }
    wanted = [(each, Region.whole(each.atom.shape)) for each in source.atoms.values()]
    for stored, tensor in zip(source.atoms.values(), read_tensors(source, wanted), strict=True):
        assert bits(tensor) == bits(there[stored.atom.name]) and tensor.dtype == there[stored.atom.name].dtype


@pytest.mark.slow
def test_a_bit_that_is_flipped_anywhere_in_what_is_written_is_told(source, tmp_path, monkeypatch):
    """But where blanks fill the header up, and in the name of the entry that has the checksums."""
    monkeypatch.setattr(huggingface, "CHUNK", 100)
    source.progress = {"step": 7}
    path = write_single(source, tmp_path / "one.safetensors", dtype="BF16")
    data, expected = path.read_bytes(), read(SafetensorsFiles(path))
    assert all(part.has_checksum for part in SafetensorsFiles(path).parts)
    name, silent = data.index(b"holdfast.xxh3"), 0
    for place in some_of(5, range(len(data))):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        try:
            assert read(SafetensorsFiles(path)) == expected
            assert name <= place < name + len("holdfast.xxh3") or data[place] == ord(" "), place
            silent += 1
        except Damaged:
            continue
    assert silent < 40


@pytest.mark.parametrize("whole", [True, False])
def test_damage_of_what_is_written_names_the_tensor_and_the_place(source, tmp_path, monkeypatch, whole):
    monkeypatch.setattr(huggingface, "CHUNK", 16 * 4 * 3)
    [path] = write_huggingface(source, tmp_path / "out")
    where = SafetensorsFiles(path)
    part = where.parts[where.atoms["embed.weight/param"].pieces.part[0]]
    assert part.sums.stretch == 192 and len(part.sums.digests) == 13
    data = bytearray(path.read_bytes())
    data[part.offset + 200] ^= 1
    path.write_bytes(data)
    again = SafetensorsFiles(path)
    stored = again.atoms["embed.weight/param"]
    rest = [(each, Region.whole(each.atom.shape)) for each in again.atoms.values() if each is not stored]
    read_tensors(again, rest)
    box = Region.whole((37, 16)) if whole else Region((30, 0), (37, 16))
    text = (
        rf"embed\.weight fails its checksum: .* at .*model\.safetensors offset {part.offset + 192}, 192 bytes"
    )
    with pytest.raises(ChunkCorrupt, match=text) as raised:
        read_tensors(again, [(stored, box)])
    assert raised.value.atoms == ("embed.weight",)


@pytest.mark.parametrize(
    "sums", ["{", "[]", "{}", '{"tensors": {"a": 1}}', '{"tensors": {"a": [0, ""]}}', '{"tensors": {"a": [4, "ab"]}}',
             '{"tensors": {"a": [4, 7]}}', '{"tensors": {}}']
)  # fmt: skip
def test_checksums_in_a_header_that_are_none_are_refused(tmp_path, sums):
    path = tmp_path / "a.safetensors"
    metadata = {"holdfast.xxh3": sums}
    if sums.startswith('{"t'):  # with the header's own, as it is
        table = {"__metadata__": {}, "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
        said = json.loads(sums)
        said["header"] = digest_of(table, said["tensors"])
        metadata = {"holdfast.xxh3": json.dumps(said)}
    save_file({"a": torch.ones(1)}, path, metadata=metadata)
    with pytest.raises(Damaged, match=r"a\.safetensors: (holdfast\.xxh3|the header fails its checksum)"):
        SafetensorsFiles(path)


def test_metadata_of_another_file_says_how_it_is_left_out(source, tmp_path):
    """As tools make it that copy what a file says and change its tensors."""
    written = write_single(source, tmp_path / "a.safetensors")
    metadata = header_of(written).metadata
    save_file({"other": torch.ones(2)}, tmp_path / "b.safetensors", metadata=metadata)
    with pytest.raises(Damaged, match=r"b\.safetensors: the header .* without the holdfast\.xxh3"):
        SafetensorsFiles(tmp_path / "b.safetensors")


def test_checksums_that_are_nested_as_deep_as_can_be_read_are_refused(tmp_path):
    path, limit = tmp_path / "a.safetensors", sys.getrecursionlimit()
    for depth in range(limit - 150, limit):
        save_file(
            {"a": torch.ones(1)},
            path,
            metadata={"holdfast.xxh3": f'{{"tensors": {"[" * depth}{"]" * depth}}}'},
        )
        with pytest.raises(Damaged, match=r"a\.safetensors"):
            SafetensorsFiles(path)


def test_files_of_others_have_no_checksums_and_are_read(source):
    assert not any(part.has_checksum for part in source.parts) and source.writer == ""
    assert read(source)


def test_nothing_is_read_of_a_file_that_was_written_again(source, tmp_path):
    path = tmp_path / "source.safetensors"
    save_file({name: torch.ones_like(tensor) for name, tensor in tensors().items()}, path)
    os.utime(path, (1, 1))
    for ask in (lambda: read(source), source.refuse_rewritten):
        with pytest.raises(Damaged, match=f"{path} was written again meanwhile"):
            ask()


def test_what_a_file_system_says_of_a_source_is_told_by_its_path(source, tmp_path, monkeypatch):
    def stale(*_, **__):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    (tmp_path / "folder").mkdir()
    for name, ask in {
        "stat": source.refuse_rewritten,
        "scan": lambda: ReadFiles(str(tmp_path / "folder"), ""),
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", stale) if name == "stat" else patch.setattr(Path, "iterdir", stale)
            with pytest.raises(DiskFailed, match=f"cannot look at {tmp_path}/.*: Stale file handle"):
                ask()


def test_what_was_read_of_a_file_that_is_gone_by_now_is_what_was_in_it(source, tmp_path):
    read(source)
    (tmp_path / "source.safetensors").unlink()
    source.refuse_rewritten()


def test_a_model_is_left_as_it_is_by_a_file_that_is_written_again(tmp_path, monkeypatch):
    model = torch.nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    path = tmp_path / "a.safetensors"
    save_file({name: value + 1 for name, value in before.items()}, path)
    check_all = restore.check_all
    monkeypatch.setattr(restore, "check_all", lambda *a: (check_all(*a), os.utime(path, (1, 1))))
    checkpointer = Checkpointer(tmp_path / "run", model=model, optimizer=optimizer)
    with checkpointer, pytest.raises(Damaged, match="was written again meanwhile"):
        checkpointer.resume(source=path)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_one_file_goes_before_the_index_of_an_earlier_save_as_in_transformers(source, tmp_path):
    transformers = pytest.importorskip("transformers")
    from tiny_folders import llama, write_folder

    folder = write_folder(tmp_path / "folder", llama)
    for place in sorted(folder.glob("*.safetensors")):
        assert place.name == "model.safetensors"
    wanted = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    stale = {"weight_map": dict.fromkeys(wanted, "model-00001-of-00006.safetensors")}
    (folder / INDEX).write_text(json.dumps(stale))
    found = source_of(str(folder))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for key, data in read(found).items():
        assert data == bits(loaded[key.removesuffix("/param")]) == bits(wanted[key.removesuffix("/param")])


def test_a_tensor_of_others_that_is_called_as_filler_is_a_tensor(tmp_path, source):
    held = {"__pad__0": torch.ones(3), "w": torch.ones(2), "__pad__1": torch.ones(5, dtype=torch.uint8)}
    save_file(held, tmp_path / "a.safetensors")
    found = SafetensorsFiles(tmp_path / "a.safetensors")
    assert read(found) == {f"{name}/param": bits(tensor) for name, tensor in held.items()}
    with pytest.raises(BadInput, match="__pad__0/param: names that begin with __pad__ are reserved"):
        write_run(found, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    write_run(source, tmp_path / "run")
    [payload] = tmp_path.glob("run/data/*.safetensors")
    assert b"__pad__0" in payload.read_bytes()  # of a file of a run, named by itself
    assert SafetensorsFiles(payload).atoms.keys() == {f"{key}/param" for key in source.atoms}
