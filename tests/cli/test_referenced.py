"""The verbs on a run that reads frozen weights from a folder, and on its copy in a bucket, which has them."""

from __future__ import annotations

import json
import shutil

import pytest

import holdfast as library
from holdfast.store.format.manifest import FileRef, object_path
from training import differing, read_atoms

pytest.importorskip("transformers")
pytest.importorskip("peft")

from referenced_runs import folder_of, offloaded, referenced, train

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`", "ignore:.*fan_in_fan_out")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two steps, its folder, and a copy of it, as they are in ``here``: runs name the path of their folder."""
    root = tmp_path_factory.mktemp("referenced")
    train(folder_of(root / "here" / "folder"), root / "here" / "run", range(2))
    shutil.copytree(root / "here" / "folder", root / "here" / "kept")
    return (root / "here").rename(root / "trained")


@pytest.fixture
def run(trained):
    here = trained.with_name("here")
    shutil.copytree(trained, here)
    yield here / "run"
    shutil.rmtree(here)


def content_of(folder):
    return {each.name: (each.read_bytes(), each.stat().st_mtime_ns) for each in folder.iterdir()}


def weights_of(run):
    return {key: value.float() for key, value in read_atoms(run).items() if key.endswith("/param")}


def began(model, run, source):
    return offloaded(model, run, library.From(str(source), cast=True))


@pytest.mark.slow
def test_verify_and_show_name_a_folder_that_changed(holdfast, run):
    folder = run.parent / "folder"
    assert holdfast("verify", run).out.startswith(f"{run}@2 is whole")
    assert f"readfrom{folder}" in "".join(holdfast("show", run).out.split())
    path = min(folder.glob("model-*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    result = holdfast("verify", run)
    assert result.code == 1 and f"read from {folder}, which was changed" in result.out
    shutil.rmtree(folder)
    result = holdfast("verify", run)
    assert result.code == 1 and f"{path} cannot be read" in result.out
    assert holdfast("show", run).code == 0 and holdfast("ls", run).code == 0
    result = holdfast("convert", run, run.parent / "out.safetensors", "--to", "safetensors")
    assert result.code == 1 and f"{path} cannot be read" in result.err
    assert not (run.parent / "out.safetensors").exists()


@pytest.mark.slow
def test_exports_have_the_weights_of_the_folder(holdfast, run):
    out = run.parent / "out.safetensors"
    assert holdfast("convert", run, out, "--to", "safetensors").code == 0
    assert holdfast("diff", run, out).code == 0
    model, _ = library.pretrained(run.parent / "folder")
    with pytest.warns(UserWarning, match="converted"), began(model, run.parent / "other", run):
        pass
    assert not referenced(run.parent / "other")
    assert differing(weights_of(run.parent / "other"), weights_of(run)) == []


def test_a_pruned_run_leaves_the_folder_as_it_is(holdfast, run):
    before = content_of(run.parent / "folder")
    train(run.parent / "folder", run, range(2, 3))
    assert holdfast("prune", run, "--keep-last", 1).code == 0
    assert len(referenced(run)) == 4 and content_of(run.parent / "folder") == before
    assert holdfast("verify", run).code == 0


@pytest.mark.slow
def test_a_copy_in_a_bucket_needs_no_folder(holdfast, run, bucket):
    assert holdfast("push", run, bucket).code == 0
    out, weights = run.parent / "out.safetensors", weights_of(run)
    shutil.rmtree(run.parent / "folder")
    shutil.rmtree(run)
    assert holdfast("verify", bucket).code == 0
    assert holdfast("convert", bucket, out, "--to", "safetensors").code == 0
    model, _ = library.pretrained(run.parent / "kept")
    with pytest.warns(UserWarning, match="converted"), began(model, run, bucket):
        pass
    assert differing(weights_of(run), weights) == []


def test_an_object_is_called_as_that_of_a_copy():
    copied, read = (
        FileRef(f"data/layers.0.frozen-1.0.{form}", 8, ("a",)) for form in ("safetensors", "reference")
    )
    assert object_path(copied) == object_path(read)


def test_a_push_of_a_changed_folder_copies_nothing_of_it(holdfast, run, bucket):
    shutil.rmtree(run.parent / "folder")
    result = holdfast("push", run, bucket)
    assert result.code == 1 and "Not copied, since it is damaged: " in result.out
    assert json.loads(holdfast("ls", bucket, "--json").out or "[]") == []
