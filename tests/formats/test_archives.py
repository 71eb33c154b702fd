"""Files of torch.save are read in place; what is hostile or damaged in them is refused and does nothing."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import resource
import struct
import time
import zipfile
from collections import Counter, OrderedDict
from itertools import count, islice
from pathlib import PosixPath

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.errors import ChunkCorrupt, Damaged
from holdfast.formats.foreign_formats import open_source
from holdfast.formats.load import ReadTarget, read_all
from holdfast.formats.readers.safetensors_files import header_of
from holdfast.formats.source import ReadFiles, SourceTensor
from holdfast.formats.torch_archive import pickles
from holdfast.formats.torch_archive.archives import Archive, Plain, piece_of
from holdfast.formats.torch_archive.pickles import PickledObject
from holdfast.state.encoding import decode
from holdfast.state.layout.fragments import Fragment, Fragments
from holdfast.state.layout.regions import Region
from holdfast.state.tensor_entries import TensorEntry

TENSORS = {
    "plain": torch.arange(12.0).reshape(3, 4),
    "bf16": torch.arange(5).bfloat16(),
    "transposed": torch.arange(24.0).reshape(4, 6).T,
    "part": torch.arange(100)[10:90:3],
    "expanded": torch.arange(3.0).reshape(3, 1).expand(3, 5),
    "scalar": torch.tensor(7.5),
    "none": torch.empty(0, 3),
    "parameter": nn.Parameter(torch.arange(4.0)),
}


def archive_of(path, content):
    torch.save(content, path)
    return Archive(path)


def read_tensors(archive, tensors):
    """What ``tensors`` of the pickle of an archive hold, as NumPy arrays of unsigned integers."""
    source = ReadFiles(str(archive.path), "torch")
    targets = {}
    for name, tensor in tensors.items():
        part = source.add_part(archive.part(tensor.storage))
        pieces = Fragments.of([piece_of(tensor, part)], len(tensor.shape))
        source.add(SourceTensor(TensorEntry(name, "param", tensor.shape, tensor.storage.dtype), pieces))
        size = source.parts[part].itemsize
        targets[name] = ReadTarget(
            source.atoms[f"{name}/param"], Region.whole(tensor.shape), np.empty(tensor.shape, f"u{size}")
        )
    read_all(source, list(targets.values()))
    return {name: target.array for name, target in targets.items()}


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_tensors_of_any_strides_and_dtypes_are_what_they_were(tmp_path):
    archive = archive_of(tmp_path / "x.pt", TENSORS)
    found = read_tensors(archive, archive.content)
    assert {name: array.tobytes() for name, array in found.items()} == {
        n: bits(t) for n, t in TENSORS.items()
    }


def test_what_is_around_tensors_is_there_too(tmp_path):
    model = nn.Linear(2, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    content = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3, "args": argparse.Namespace(tp=2),
        "dtype": torch.bfloat16, "size": torch.Size([1, 2]), "device": torch.device("cpu"),
    }  # fmt: skip
    found = archive_of(tmp_path / "x.pt", content).content
    assert list(found["model"]) == ["weight", "bias"] and isinstance(found["model"], OrderedDict)
    assert found["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)
    assert found["optimizer"]["state"][0]["exp_avg"].shape == (3, 2)
    assert (found["step"], found["dtype"], found["size"], found["device"]) == (3, "BF16", (1, 2), "cpu")
    assert found["args"] == PickledObject("argparse.Namespace", (), {"tp": 2})


class Runs:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_a_tensor_with_attributes_is_read_and_no_other_way_to_make_one_is_known(tmp_path):
    tensor = torch.arange(5.0)
    tensor.note = "of DeepSpeed's flat groups"
    archive = archive_of(tmp_path / "x.pt", {"a": tensor})
    assert read_tensors(archive, archive.content)["a"].tobytes() == bits(tensor)
    for rebuild in (b"cbuiltins\ngetattr\n", b"ctorch\nSize\n"):
        data = b"ctorch._tensor\n_rebuild_from_type_v2\n(" + rebuild + b"ctorch\nTensor\n(I1\nt}tR."
        with pytest.raises(Damaged, match="a way that is not known"):
            pickles.load(data, "somewhere")


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [
        ((1 << 70,), (1,), 0), ((2,), (-1,), 1), ((2,), (1,), -3), ((-2,), (1,), 0), ((2, 2), (1,), 0),
        ((1 << 40, 1 << 40), (0, 0), 0),
    ],
)  # fmt: skip
def test_a_tensor_of_sizes_that_no_tensor_has_is_refused(shape, strides, offset):
    storage = pickles.Storage("0", "F32", 4)
    with pytest.raises(ValueError, match="a tensor of"):
        pickles._tensor(storage, offset, shape, strides)


@pytest.mark.parametrize(
    ("function", "argument"), [(os.system, "touch {}"), (eval, "open('{}', 'w')"), (print, "hello")]
)
def test_a_pickle_that_would_run_something_is_refused_by_name(tmp_path, function, argument):
    mark = tmp_path / "ran"
    torch.save({"x": Runs(function, argument.format(mark))}, tmp_path / "x.pt")
    with pytest.raises(
        Damaged, match=rf"names {function.__module__}\.{function.__name__}.* Nothing was executed"
    ):
        Archive(tmp_path / "x.pt")
    assert not mark.exists()


def test_an_allowed_name_is_not_imported_and_not_called(tmp_path):
    data = b"cbuiltins\ngetattr\n(cargparse\nNamespace\nX\x05\x00\x00\x00__doctR."
    found = pickles.load(data, "somewhere")
    assert isinstance(found, PickledObject) and found.name == "builtins.getattr"


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",  # a bytearray of a tebibyte
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b".",
        b"", b".", b"\x80\x04", b"garbage", b"\x80\x04N" * 5, b"(" * 100, b"\x80\x04]}R.", b"I1\nI2\nR.",
    ],
)  # fmt: skip
def test_pickles_of_no_sense_are_refused_without_memory_for_what_they_claim(data):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(Damaged, match="somewhere holds no pickle"):
        pickles.load(data, "somewhere")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04Nr" + struct.pack("<I", 0xFFFFFFF0) + b".",  # to be remembered at place 4 billion
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N.",  # a frame that is longer than the file
    ],
)
def test_places_and_lengths_that_are_only_claimed_take_no_memory(data):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert pickles.load(data, "somewhere") is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_a_flipped_bit_in_any_tensor_is_found(tmp_path):
    archive = archive_of(tmp_path / "x.pt", {"a": torch.arange(1000.0), "b": torch.arange(10.0)})
    part = archive.part(archive.content["b"].storage)
    data = bytearray((tmp_path / "x.pt").read_bytes())
    data[part.offset + 7] ^= 4
    (tmp_path / "x.pt").write_bytes(data)
    read_tensors(archive, {"a": archive.content["a"]})
    with pytest.raises(ChunkCorrupt, match="CRC-32"):
        read_tensors(archive, {"b": archive.content["b"]})


def test_a_flipped_bit_in_the_pickle_is_found(tmp_path):
    archive_of(tmp_path / "x.pt", {"a": torch.arange(4.0)})
    with zipfile.ZipFile(tmp_path / "x.pt") as file:
        info = next(each for each in file.infolist() if each.filename.endswith("data.pkl"))
    data = bytearray((tmp_path / "x.pt").read_bytes())
    data[data.index(b"\x80\x02}", info.header_offset) + 5] ^= 1
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(Damaged, match="CRC-32"):
        Archive(tmp_path / "x.pt")


def test_a_file_cut_short_or_of_another_kind_is_refused(tmp_path):
    archive_of(tmp_path / "x.pt", {"a": torch.arange(4.0)})
    whole = (tmp_path / "x.pt").read_bytes()
    for data in (whole[:-30], whole[:100], b"", b"PK\x03\x04" * 10):
        (tmp_path / "y.pt").write_bytes(data)
        with pytest.raises(Damaged, match=r"y\.pt is no archive of torch\.save"):
            Archive(tmp_path / "y.pt")
    torch.save({"a": torch.arange(4.0)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(Damaged, match=r"before 1\.6"):
        Archive(tmp_path / "old.pt")


def test_a_storage_that_is_smaller_than_its_tensor_is_refused(tmp_path):
    archive = archive_of(tmp_path / "x.pt", {"a": torch.arange(4.0)})
    tensor = archive.content["a"]
    with pytest.raises(Damaged, match="no entry data/0 of 5 elements"):
        archive.part(pickles.Storage("0", "F32", 5))
    source = ReadFiles("x", "torch")
    part = source.add_part(archive.part(tensor.storage))
    wide = pickles.Tensor(tensor.storage, 0, (4, 2), (1, 1))
    with pytest.raises(Damaged, match="lies outside"):
        source.add(
            SourceTensor(TensorEntry("a", "param", (4, 2), "F32"), Fragments.of([piece_of(wide, part)], 2))
        )


def test_a_tensor_that_was_expanded_very_far_says_how_it_is_saved(tmp_path):
    torch.save({"mask": torch.ones(1, 1).expand(1 << 11, 1 << 10)}, tmp_path / "x.pt")
    with pytest.raises(
        Damaged, match=r"mask/param \[2048, 1024\] is 2097152 elements made of 1 .*\.contiguous"
    ):
        open_source(tmp_path / "x.pt")


def test_a_pickle_without_a_checksum_says_how_it_was_made(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(4.0)}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    with pytest.raises(Damaged, match=r"fails its CRC-32.*set_crc32_options\(False\)"):
        Archive(tmp_path / "x.pt")


def test_an_archive_in_the_middle_of_a_file_is_read_there(tmp_path):
    buffer = io.BytesIO()
    torch.save({"a": TENSORS["transposed"]}, buffer)
    (tmp_path / "x").write_bytes(b"#" * 77 + buffer.getvalue() + b"#" * 9)
    archive = Archive(tmp_path / "x", 77, len(buffer.getvalue()))
    assert read_tensors(archive, archive.content)["a"].tobytes() == bits(TENSORS["transposed"])


def nested(depth, kind=list):
    """A few hundred bytes that are 2 ** depth values when they are written out."""
    value = kind([1, 2])
    for _ in range(depth):
        value = kind([value, value])
    return value


def many_lists(kind):
    return {"args": nested(60, kind)}


def in_objects():
    value = argparse.Namespace(a=1)
    for _ in range(60):
        value = argparse.Namespace(a=value, b=value)
    return value


def holding_itself():
    value = [1]
    value.append(value)
    return value


def deep():
    value = 1
    for _ in range(200):
        value = [value]
    return value


ENDLESS = {
    "lists": lambda: many_lists(list), "tuples": lambda: many_lists(tuple), "objects": in_objects,
    "a long text many times": lambda: ["x" * 1_000_000] * 1000, "itself": holding_itself, "too deep": deep,
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_a_pickle_that_nobody_can_go_through_is_refused_at_once(tmp_path, name):
    torch.save(ENDLESS[name](), tmp_path / "x.pt")
    with pytest.raises(Damaged, match=r"so often that they are over|holds itself|100 deep"):
        Archive(tmp_path / "x.pt")


def test_a_key_that_takes_long_to_look_up_is_refused_at_once():
    key = b"I1\nI2\n\x86" + b"2\x86" * 60  # a pair of the pair before it, sixty times
    for data in (
        b"\x80\x04}" + key + b"N" + b"s.",
        b"\x80\x04}(" + key + b"Nu.",
        b"\x80\x04(" + key + b"Nd.",
        b"\x80\x04\x8f(" + key + b"\x90.",
        b"\x80\x04(" + key + b"\x91.",
        b"\x80\x04cbuiltins\nset\n(]" + key + b"atR.",
        b"\x80\x04ccollections\nOrderedDict\n(](" + key + b"NlatR.",
    ):
        with pytest.raises(Damaged, match="a key of more than 256 values"):
            pickles.load(data, "somewhere")


def test_a_tensor_gets_no_attributes_after_it_was_checked(tmp_path):
    """With negative strides as_strided would give what lies around the bytes that were read."""
    whole, attributes = io.BytesIO(), b"}(X\x05\0\0\0shapeI2\nI2\n\x86X\x07\0\0\0stridesI7000\nI-7000\n\x86ub"
    torch.save({"w": torch.ones(1)}, whole)
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(tmp_path / "x.pt", "w") as new:
        for info in old.infolist():
            data = old.read(info)
            made = data.rindex(b"Rq") + 1 if info.filename.endswith("data.pkl") else len(data)
            new.writestr(info, data[:made] + attributes * (made < len(data)) + data[made:])
    with pytest.raises(Damaged, match="attributes of a Tensor"):
        Archive(tmp_path / "x.pt")


@pytest.mark.parametrize("strides", [(7000, -7000), (1 << 61, 1 << 61), (-1, 3)])
def test_a_source_has_nothing_at_places_before_its_start_or_beyond_all_numbers(tmp_path, strides):
    archive = archive_of(tmp_path / "x.pt", {"a": torch.arange(4.0)})
    source = ReadFiles("x", "torch")
    part = source.add_part(archive.part(archive.content["a"].storage))
    shape = (5, 5) if strides[0] == 1 << 61 else (2, 2)  # 8 * 2**61 is 0 in 64 bits
    piece = Fragment(Region.whole(shape), part, 1, strides)
    with pytest.raises(Damaged, match="lies outside of it"):
        source.add(SourceTensor(TensorEntry("a", "param", shape, "F32"), Fragments.of([piece], 2)))


def test_a_source_has_no_tensor_of_many_more_elements_than_are_stored(tmp_path):
    archive = archive_of(tmp_path / "x.pt", {"a": torch.ones(1)})
    source = ReadFiles("x", "torch")
    part = source.add_part(archive.part(archive.content["a"].storage))
    piece = Fragment(Region.whole((1 << 11, 1 << 10)), part, 0, (0, 0))
    with pytest.raises(Damaged, match=r"a/param \[2048, 1024\] has many more elements.*\.contiguous"):
        source.add(
            SourceTensor(TensorEntry("a", "param", (1 << 11, 1 << 10), "F32"), Fragments.of([piece], 2))
        )


def test_a_dictionary_that_hides_what_it_holds_is_refused():
    hidden = b"\x80\x02ccollections\nOrderedDict\n)R\x94"
    nothing = b"}(X\x04\0\0\0keysc__builtin__\nlist\nX\x06\0\0\0valuesc__builtin__\nlist\nub"
    data = hidden + b"X\x01\0\0\0ah\0s" + nothing + b"."
    with pytest.raises(Damaged, match="it holds itself"):
        pickles.load(data, "somewhere")


@pytest.mark.parametrize("data", [b"ccollections\nCounter\n(]tR.", b"cbuiltins\ndict\n)R}b.", b"]}b."])
def test_what_has_no_attributes_and_what_is_not_counted_is_refused(data):
    with pytest.raises(Damaged, match=r"attributes of a|was not counted"):
        pickles.load(b"\x80\x02" + data, "somewhere")


@pytest.mark.parametrize("change", [torch.conj, lambda z: z.conj().imag])
def test_a_view_that_torch_conjugates_when_it_is_read_is_refused(tmp_path, change):
    tensor = change(torch.tensor([1 + 2j, 3 - 4j]))
    torch.save({"c": tensor}, tmp_path / "x.pt")
    with pytest.raises(Damaged, match=r"conjugated or negated .*\.resolve_conj\(\)"):
        Archive(tmp_path / "x.pt")
    archive = archive_of(tmp_path / "y.pt", {"c": tensor.resolve_conj().resolve_neg()})
    assert read_tensors(archive, archive.content)["c"].tobytes() == bits(tensor.resolve_conj().resolve_neg())


def test_a_type_that_is_not_supported_says_so(tmp_path):
    torch.save({"c": torch.ones(2, dtype=torch.complex128)}, tmp_path / "x.pt")
    with pytest.raises(
        Damaged, match=r"holds a tensor of ComplexDoubleStorage, and supported are .*complex64"
    ):
        Archive(tmp_path / "x.pt")
    for name in ("complex128", "float4_e2m1fn_x2", "quint8"):
        with pytest.raises(Damaged, match=f"somewhere holds a tensor of {name}, and supported"):
            pickles.load(b"ctorch\n" + name.encode() + b"\n.", "somewhere")
    with pytest.raises(Damaged, match=r"names torch\.float_power, .* Nothing was executed"):
        pickles.load(b"ctorch\nfloat_power\n.", "somewhere")


def test_a_storage_of_a_type_that_is_none_is_refused():
    with pytest.raises(Damaged, match="no storage of torch"):
        pickles.load(b"(X\x07\0\0\0storageX\x01\0\0\0YX\x01\0\0\x000X\x03\0\0\0cpuI4\ntQ.", "somewhere")


def test_what_was_counted_is_so_again(tmp_path):
    archive = archive_of(tmp_path / "x.pt", {"milestones": Counter([2, 4, 4])})
    assert decode(json.loads(json.dumps(Plain(archive)(archive.content)))) == {
        "milestones": Counter([2, 4, 4])
    }


def test_copies_of_copies_are_refused_before_they_fill_the_memory():
    data = b"\x80\x04](" + b"N" * 100_000 + b"e\x94" + b"(cbuiltins\nlist\n(h\x00tR" * 1000 + b"l."
    with pytest.raises(Damaged, match="copies what it holds"):
        pickles.load(data, "somewhere")


def test_what_many_share_is_read_as_it_is(tmp_path):
    betas, numbers = (0.9, 0.999), list(range(100))
    groups = [{"betas": betas, "params": numbers} for _ in range(5000)]
    assert archive_of(tmp_path / "x.pt", {"groups": groups}).content["groups"] == groups


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float8_e4m3fn, "F8_E4M3"), (torch.float8_e5m2, "F8_E5M2"), (torch.uint16, "U16")],
)
def test_tensors_of_types_without_a_storage_of_their_own_are_what_they_were(tmp_path, dtype, name):
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    archive = archive_of(tmp_path / "x.pt", {"a": tensor, "b": tensor.T[1:]})
    assert archive.content["a"].storage.dtype == name
    found = read_tensors(archive, archive.content)
    assert {k: v.tobytes() for k, v in found.items()} == {"a": bits(tensor), "b": bits(tensor.T[1:])}


def test_what_is_beside_tensors_is_json_that_says_what_it_was(tmp_path):
    content = {
        "tensor": torch.tensor([1, 2]), "expanded": torch.tensor(3.0).expand(2, 2), "tuple": (1, (2.5, None)),
        "bytes": b"\xff\0", "numbered": {2: "two"}, "set": {3, 1}, "args": argparse.Namespace(tp=2),
        "complex": 1j,
    }  # fmt: skip
    archive = archive_of(tmp_path / "x.pt", content)
    found = json.loads(json.dumps(Plain(archive)(archive.content)))
    for name in ("tensor", "expanded"):
        assert torch.equal(decode(found.pop(name)), content[name])
    assert [decode(found.pop(name)) for name in ("tuple", "bytes", "numbered")] == [
        (1, (2.5, None)),
        b"\xff\0",
        {2: "two"},
    ]
    assert found == {
        "set": {"__object__": "set", "args": [[1, 3]]},
        "args": {"__object__": "argparse.Namespace", "fields": {"tp": 2}},
        "complex": {"__object__": "complex", "args": ["1j"]},
    }


def test_numbers_of_numpy_are_plain_ones(tmp_path):
    numbers = [
        np.float64(0.1),
        np.int64(-7),
        np.float32(2.5),
        np.uint8(200),
        np.bool_(True),
        np.float64("nan"),
    ]
    more = [np.dtype(">i4").type(5), np.array(3, ">i4")[()], np.datetime64(1, "s")]
    archive = archive_of(tmp_path / "x.pt", {"a": numbers, "b": more})
    found = Plain(archive)(archive.content)
    assert repr(found["a"]) == "[0.1, -7, 2.5, 200, True, nan]" and found["b"][:2] == [5, 3]
    assert found["b"][2]["__object__"].endswith("multiarray.scalar")


@pytest.mark.parametrize("scalar", [b"N", b"I1\n", b"X\x02\0\0\0ab"])
def test_numbers_of_numpy_of_other_bytes_are_refused(tmp_path, scalar):
    data = b"\x80\x02cnumpy.core.multiarray\nscalar\n(cnumpy\ndtype\n(X\x02\0\0\0f8tR" + scalar + b"tR."
    archive = archive_of(tmp_path / "x.pt", {})
    with pytest.raises(Damaged, match=r"x\.pt: lr is a number of f8 and has other bytes"):
        Plain(archive)(pickles.load(data, "somewhere"), "lr")


def test_long_tensors_are_named_where_they_are_not_wanted(tmp_path):
    archive = archive_of(tmp_path / "x.pt", {"a": {"b": [torch.ones(30)]}, "c": torch.ones(3)})
    plain = Plain(archive, longest=100)
    found = plain(archive.content)
    assert plain.left_out == [".a.b[0]"] and found["a"]["b"][0]["shape"] == [30]
    assert torch.equal(decode(found["c"]), torch.ones(3))


def test_a_tensor_that_is_held_very_often_is_refused(tmp_path):
    archive = archive_of(tmp_path / "x.pt", [torch.zeros(1).expand(1 << 20)] * 100)
    with pytest.raises(Damaged, match="so many times over"):
        Plain(archive)(archive.content)


PRIME, WHOLE = (1 << 61) - 1, 1 << 64
"""All multiples of the first have one hash; hashes are below the second."""


def pairs_of_one_hash():
    """Pairs of numbers that CPython's hash of tuples does not tell apart: the second makes up for the first."""
    first, second, third = 11400714785074694791, 14029467366897019727, 2870177450012600261
    for number in count(1):
        mixed = (third + number * second) % WHOLE
        mixed = (mixed << 31 | mixed >> 33) * first % WHOLE
        lane = -mixed * pow(second, -1, WHOLE) % WHOLE
        if lane < PRIME:
            yield number, lane


ALIKE = {
    "numbers": lambda: (number * PRIME for number in count(1)),
    "pairs": pairs_of_one_hash,
    "sets": lambda: (frozenset([number * PRIME]) for number in count(1)),
    "paths": lambda: (PosixPath(str(number)) for number in count(1)),
}


def pickled(keys, kind):
    """A dictionary, or a set, of ``keys``, which Python itself would take long to make."""
    parts = [pickle.dumps(key, 2)[2:-1] for key in keys]
    if kind == "set":
        return b"\x80\x04\x8f(" + b"".join(parts) + b"\x90."
    return b"\x80\x02}(" + b"".join(part + b"N" for part in parts) + b"u."


@pytest.mark.parametrize("kind", ["dictionary", "set"])
@pytest.mark.parametrize("name", ALIKE)
def test_keys_of_one_hash_are_read_fast(name, kind):
    """As fast as others, within a factor: comparing each with all before it would take a hundred times as long."""
    alike, others = pickled(islice(ALIKE[name](), 8_000), kind), pickled(map(str, range(8_000)), kind)
    seconds = {}
    for each in (others, alike):
        began = time.perf_counter()
        assert len(pickles.load(each, "it")) == 8_000
        seconds[each] = time.perf_counter() - began
    assert seconds[alike] < 30 * seconds[others] + 0.5


def test_keys_of_one_hash_are_what_they_were():
    keys = [number * PRIME for number in range(1, 100)]
    found = pickles.load(pickled([*keys, *keys], "dictionary"), "it")
    assert [getattr(key, "value", key) for key in found] == keys


def test_a_header_of_empty_lists_is_refused_before_it_is_parsed(tmp_path):
    text = b'{"a":[' + b"[]," * (1 << 20) + b"[]]}"
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(Damaged, match="many more lists than tensors"):
        header_of(path)
    names = json.dumps(
        {f"{'[' * 60}{n}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for n in range(12_000)}
    )
    path.write_bytes(struct.pack("<Q", len(names)) + names.encode())
    assert len(header_of(path).entries) == 12_000
