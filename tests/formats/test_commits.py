"""Commits of this library as sources: any region, verified, and little more read than is asked for."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from torch import nn

from checkpoint.loops import cut_small
from holdfast.checkpointer import Checkpointer
from holdfast.errors import BadInput, ChunkCorrupt, FileMissing
from holdfast.formats.deepspeed.deepspeed_writer import write_deepspeed
from holdfast.formats.load import ReadTarget, read_all
from holdfast.formats.run_directory import CommitSource
from holdfast.state.layout.regions import Region
from holdfast.store.format.payload_layout import CHECKSUM_BLOCK
from holdfast.store.reader import RunReader
from test_checkpointer import go_on, start


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1200, 2000), nn.Linear(2000, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(root, model=model, optimizer=optimizer) as ckpt:
        ckpt.resume()
        for _ in range(2):
            model(torch.randn(4, 1200)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step()
        ckpt.save()
    return root


@pytest.fixture
def commit(run):
    reader = RunReader(run)
    return CommitSource(reader, reader.at(2))


def array_of(stored, box):
    size = {"F32": np.uint32, "I64": np.uint64}[stored.atom.dtype]
    return ReadTarget(stored, box, np.empty(box.shape, size))


def test_every_atom_is_what_the_store_reads(run, commit):
    reader = RunReader(run)
    manifest = reader.at(2)
    targets = {key: array_of(stored, Region.whole(stored.atom.shape)) for key, stored in commit.atoms.items()}
    read_all(commit, list(targets.values()))
    atoms = reader.atoms(manifest)
    assert targets.keys() == atoms.keys() and len(atoms) == 6 * 3 + 6 + 3
    for key, target in targets.items():
        assert target.array.tobytes() == bytes(reader.read_atom(manifest, atoms[key])), key
    assert commit.bytes_read <= manifest.total_bytes + 4 * CHECKSUM_BLOCK


def test_a_part_of_a_tensor_needs_the_blocks_that_it_lies_in_and_no_others(commit):
    before = commit.bytes_read
    rows = array_of(commit.atoms["0.weight/exp_avg"], Region((500, 0), (1500, 1200)))
    read_all(commit, [rows])
    assert commit.bytes_read - before <= rows.array.nbytes + 2 * CHECKSUM_BLOCK


@pytest.mark.slow
@pytest.mark.parametrize("in_whole_block", [True, False])
def test_a_flipped_bit_is_found_where_it_is_read_and_not_elsewhere(run, tmp_path, commit, in_whole_block):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    stored = commit.atoms["0.weight/param"]
    piece = next(iter(stored.pieces))
    part = commit.parts[piece.part]
    first_whole = -(-part.offset // CHECKSUM_BLOCK) * CHECKSUM_BLOCK
    assert first_whole + CHECKSUM_BLOCK < part.offset + part.nbytes
    place = first_whole + 4 if in_whole_block else part.offset + part.nbytes - 4
    data = bytearray((copy / part.path).read_bytes())
    data[place] ^= 1
    (copy / part.path).write_bytes(data)
    reader = RunReader(copy)
    damaged = CommitSource(reader, reader.at(2))
    stored = damaged.atoms["0.weight/param"]
    row = (place - part.offset) // (1200 * 4)
    other = 0 if row > 1000 else 1999
    read_all(damaged, [array_of(stored, Region((other, 0), (other + 1, 1200)))])
    rows = Region((0, 0), (2000, 1200)) if in_whole_block else Region((row, 0), (row + 1, 1200))
    with pytest.raises(ChunkCorrupt, match=r"0\.weight/"):
        read_all(damaged, [array_of(stored, rows)])


@pytest.mark.slow
def test_a_file_that_is_gone_is_named(run, tmp_path, commit):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / commit.parts[0].path).unlink()
    reader = RunReader(copy)
    with pytest.raises(FileMissing, match=commit.parts[0].path):
        CommitSource(reader, reader.at(2))


@pytest.mark.slow
def test_a_file_that_goes_while_the_commit_is_read_is_named_as_missing(run, tmp_path):
    """And not as one that cannot be written, by who writes what is read."""
    shutil.copytree(run, copy := tmp_path / "copy")
    reader = RunReader(copy)
    commit = CommitSource(reader, reader.at(2))
    for path in {part.path for part in commit.parts}:
        (copy / path).unlink()
    for write in (lambda: write_deepspeed(commit, tmp_path / "out", 1), lambda: commit.check(0)):
        with pytest.raises(FileMissing, match=commit.parts[0].path):
            write()


def test_a_base_whose_parts_are_of_several_steps_is_no_source(tmp_path, monkeypatch):
    cut_small(monkeypatch)
    loop, checkpointer = start(tmp_path, "", base_every=2)
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 7)
    reader = RunReader(tmp_path)
    mixed = reader.load(reader.line()[0])
    with pytest.raises(BadInput, match=f"of steps {mixed.oldest_step} to {mixed.step}"):
        CommitSource(reader, mixed)
