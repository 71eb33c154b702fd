"""A run that ranks of FSDP1 wrote in format 1 stays readable, though no such model is trained any more."""

from __future__ import annotations

import shutil
from math import prod

import pytest

from golden.flattened import ARCHIVE, DIGESTS
from golden.resuming import resumed
from holdfast.errors import RuleError
from holdfast.formats.readers.huggingface import write_single
from holdfast.formats.rules_source import infer
from holdfast.opening import source_of
from holdfast.state.layout.regions import Region
from holdfast.state.tensor_entries import DTYPE_BYTES
from holdfast.store.format.payload_files import regions
from holdfast.store.log.chain import verify_records
from holdfast.store.reader import RunReader


@pytest.fixture
def run(tmp_path):
    shutil.unpack_archive(ARCHIVE, tmp_path / "run")
    return tmp_path / "run"


def test_stretches_verify_and_read_whole(run):
    with RunReader(run) as reader:
        manifest = reader.head()
        assert reader.verify(manifest) == []
        assert verify_records(reader, manifest) == (8, [])
        atoms = reader.atoms(manifest)
        for key, atom in atoms.items():
            expected = prod(atom["shape"]) * DTYPE_BYTES[atom["dtype"]]
            assert len(reader.read_atom(manifest, atom)) == expected, key
        assert regions(manifest, atoms)["first.weight/momentum_buffer"] == [
            (0, Region((0, 0), (7, 7))),
            (0, Region((7, 0), (8, 4))),
            (1, Region((7, 4), (8, 7))),
            (1, Region((8, 0), (13, 7))),
        ]
        with pytest.raises(RuleError, match="stretches of the flattened"):
            infer(reader, manifest)


@pytest.mark.parametrize("step", [7, 8])
def test_stretches_resume_in_one_process(run, step):
    assert resumed(run, step=step) == (step, DIGESTS[step])


def test_stretches_are_a_source(run, tmp_path):
    """By themselves, and converted."""
    file = write_single(source_of(f"{run}@7"), tmp_path / "state.safetensors")
    for number, source in enumerate((f"{run}@8", file)):
        step, digest = resumed(tmp_path / f"from-{number}", source=source)
        assert (step, digest) == (8 - number, DIGESTS[8 - number])
