"""What any writer wrote of tensors of any shape, type and cut is what comes back of it, whole and by regions."""

from __future__ import annotations

import tempfile
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.formats.dcp import dcp_writer
from holdfast.formats.dcp.dcp_writer import write_dcp
from holdfast.formats.deepspeed.deepspeed_writer import write_deepspeed
from holdfast.formats.load import ReadTarget, read_all
from holdfast.formats.readers import huggingface
from holdfast.formats.readers.huggingface import write_huggingface, write_single
from holdfast.formats.run_directory import write_run
from holdfast.formats.source import Source, SourceTensor, StoredArray
from holdfast.opening import source_of
from holdfast.state.layout.fragments import Fragments, flat
from holdfast.state.layout.regions import Region
from holdfast.state.tensor_entries import DTYPE_BYTES, FLOATS, TensorEntry

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated"
)

SHAPES = st.lists(st.integers(0, 17), max_size=4).map(tuple).filter(lambda shape: prod(shape) <= 5000)
SLOTS = ("param", "exp_avg", "exp_avg_sq")


class Ranks(Source):
    """Tensors by key, each flattened and divided between so many ranks at random places; some have nothing."""

    def __init__(self, tensors, data):
        super().__init__("ranks", "test")
        self.whole, self._bytes = tensors, []
        for (name, slot), (array, dtype) in tensors.items():
            world = data.draw(st.integers(1, 9))
            ends = sorted(data.draw(st.integers(0, array.size)) for _ in range(world - 1))
            pieces = []
            for start, stop in zip([0, *ends], [*ends, array.size], strict=True):
                part = self.add_part(StoredArray("memory", 0, (stop - start) * array.itemsize, dtype))
                self._bytes.append(array.reshape(-1)[start:stop].tobytes())
                pieces += flat(array.shape, start, stop, part)
            self.add(
                SourceTensor(TensorEntry(name, slot, array.shape, dtype), Fragments.of(pieces, array.ndim))
            )
        trained = [name for name, slot in tensors if slot == "exp_avg"]
        groups = {"groups": [{"lr": 0.5}], "group_parameters": [trained]} if trained else {}
        self.progress = {"step": 7, **groups}

    def read(self, part, offset, into):
        into[:] = self._bytes[part][offset : offset + len(into)]

    def check(self, part):
        pass


def drawn(data, adam):
    """Tensors by name and slot, with their types; with ``adam`` all are trained and of fp32."""
    tensors = {}
    for number in range(data.draw(st.integers(1, 4))):
        name, shape = f"t.{number}", data.draw(SHAPES)
        dtype = "F32" if adam else data.draw(st.sampled_from(sorted(DTYPE_BYTES)))
        of_model = "param" if dtype in FLOATS or dtype == "C64" else "buffer"
        state = of_model == "param" and (adam or data.draw(st.booleans()))
        for slot in SLOTS if state else (of_model,):
            raw = np.random.default_rng(number).bytes(prod(shape) * DTYPE_BYTES[dtype])
            tensors[name, slot] = np.frombuffer(raw, f"V{DTYPE_BYTES[dtype]}").reshape(shape), dtype
        if state:
            tensors[name, "step"] = np.frombuffer(b"\0\0\xe0\x40", "V4").reshape(()), "F32"
    return tensors


def read(source, boxes):
    """Regions of a source by name and slot, as bytes."""
    targets = {}
    for key, box in boxes.items():
        stored = source.atoms["/".join(key)]
        targets[key] = ReadTarget(stored, box, np.empty(box.shape, f"V{stored.atom.itemsize}"))
    read_all(source, list(targets.values()))
    return {key: target.array.tobytes() for key, target in targets.items()}


def box_in(shape, data):
    ends = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
    return Region(tuple(a for a, _ in ends), tuple(b for _, b in ends))


def weights_of(tensors):
    return {key: value for key, value in tensors.items() if key[1] in ("param", "buffer")}


WRITERS = {
    "holdfast": lambda source, path: write_run(source, path / "run") and path / "run",
    "safetensors": lambda source, path: write_single(source, path / "x.safetensors"),
    "huggingface": lambda source, path: (
        write_huggingface(source, path / "hf", file_bytes=3000) and path / "hf"
    ),
    "dcp": lambda source, path: write_dcp(source, path / "dcp"),
    "deepspeed": lambda source, path: write_deepspeed(source, path / "zero", 1) and path / "zero",
}


@pytest.mark.slow
@pytest.mark.parametrize("writer", WRITERS)
@settings(deadline=None, max_examples=25)
@given(st.data())
def test_load_after_save_is_the_identity(writer, data):
    source = Ranks(drawn(data, adam=writer == "deepspeed"), data)
    expected = weights_of(source.whole) if writer == "huggingface" else source.whole
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        chunk = data.draw(st.sampled_from([48, 1000]))
        patch.setattr(huggingface, "CHUNK", chunk)
        patch.setattr(dcp_writer, "CHUNK", chunk)
        again = source_of(str(WRITERS[writer](source, Path(folder))))
        of_model = {
            key: (name, slot)
            for key, (name, slot) in zip(expected, map(_slot_in(again), expected), strict=True)
        }
        assert again.atoms.keys() == {"/".join(key) for key in of_model.values()}
        for key, (array, dtype) in expected.items():
            atom = again.atoms["/".join(of_model[key])].atom
            assert (atom.shape, atom.dtype) == (array.shape, dtype)
        boxes = {key: box_in(array.shape, data) for key, (array, _) in expected.items()}
        wholes = {key: Region.whole(array.shape) for key, (array, _) in expected.items()}
        for wanted in (wholes, boxes):
            found = read(again, {of_model[key]: box for key, box in wanted.items()})
            for key, (array, _) in expected.items():
                assert found[of_model[key]] == array[(*wanted[key].slices, ...)].tobytes(), key


def _slot_in(source):
    """What a source calls a tensor: others than ours say of none that it is a buffer."""
    return lambda key: (key[0], "param") if f"{key[0]}/{key[1]}" not in source.atoms else key
