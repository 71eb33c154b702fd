"""A state that this user may not read: an error that says so, by the file's name, whatever the format."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from holdfast.errors import DiskFailed
from holdfast.opening import source_of

NOBODY = 65534
STATE = {"w": torch.arange(3.0)}


@pytest.fixture
def root():
    """Into which any user gets, where pytest's is for its owner alone."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@contextmanager
def forbidden(path, mode=0):
    """To whoever is not root."""
    os.chmod(path, mode)
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)
        os.chmod(path, 0o755)


def read(path):
    source = source_of(str(path))
    data = bytearray(12)
    source.read(0, 0, memoryview(data))
    assert bytes(data) == STATE["w"].numpy().tobytes()


def of_safetensors(root):
    save_file(STATE, root / "model.safetensors")
    return root


def of_one_file(root):
    save_file(STATE, root / "one.safetensors")
    return root / "one.safetensors"


def of_torch(root):
    torch.save(STATE, root / "pytorch_model.bin")
    return root


def of_dcp(root):
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(STATE, checkpoint_id=str(root / "dcp"), no_dist=True)
    return root / "dcp"


@pytest.mark.parametrize("write", [of_safetensors, of_one_file, of_torch, of_dcp])
def test_each_file_that_may_not_be_read_is_named(root, write):
    path = write(root)
    read(path)
    files = [path] if path.is_file() else [each for each in path.iterdir() if each.is_file()]
    for file in files:
        with forbidden(file), pytest.raises(DiskFailed, match=f"cannot look at {file}: Permission denied"):
            read(path)
    read(path)


@pytest.mark.parametrize("mode", [0o000, 0o111])
def test_a_folder_that_may_not_be_listed_is_named(root, mode):
    (root / "folder").mkdir()
    path = of_safetensors(root / "folder")
    with (
        forbidden(path, mode),
        pytest.raises(DiskFailed, match=f"cannot look at {path}.*: Permission denied"),
    ):
        read(path)
