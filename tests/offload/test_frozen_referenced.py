"""Frozen weights that a run reads from the folder of a pretrained model, in place of a copy of its own."""

from __future__ import annotations

import os
import shutil
from types import SimpleNamespace

import pytest
import torch

import holdfast
from holdfast.errors import BadInput, ChunkCorrupt, Damaged, FileMissing, RunMismatch
from holdfast.models.pretrained import Weights
from holdfast.store.disk import reference_at
from holdfast.store.format.manifest import unseal
from holdfast.store.run_store import LocalStore
from training import differing, read_atoms

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

import tiny_folders  # noqa: E402  (needs transformers)
from referenced_runs import (  # noqa: E402
    folder_of,
    micro_batches,
    offloaded,
    opened,
    referenced,
    train,
    wide_llama,
)
from tiny_folders import write_quantised  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`", "ignore:.*fan_in_fan_out")

STEPS = 3


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("made") / "folder")


@pytest.fixture
def folder(in_memory, made):
    """A copy, which may be changed."""
    return shutil.copytree(made, in_memory / "folder")


@pytest.fixture(scope="module")
def copied(made, tmp_path_factory):
    """A run of four steps that copies the folder: its losses, the values after the last two, its reads and bytes."""
    run = tmp_path_factory.mktemp("copied")
    losses, values, reads = [], {}, []
    with opened(made, run, reference=False) as engine:
        for step in range(4):
            losses.append(engine.step(micro_batches(step)))
            reads.append(engine.last["read_bytes"])
            if step >= 2:
                values[step] = {name: value.clone() for name, value in engine.state_dict().items()}
    assert not referenced(run)
    preflight, atoms = engine.preflight, read_atoms(run)
    return SimpleNamespace(
        losses=losses, values=values, reads=reads, preflight=preflight, bytes=bytes_of(run), atoms=atoms
    )


def bytes_of(directory):
    return sum(os.path.getsize(each) for each in directory.rglob("*") if each.is_file())


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("placement", [{}, {"params_on_host": 1.0}, {"activations_on_host": 0.0}])
@pytest.mark.slow
def test_bits_are_those_of_a_copy(in_memory, made, copied, placement):
    there = holdfast.Placement(**placement)
    losses = train(made, in_memory / "run", range(2), placement=there)[0]
    found = train(made, in_memory / "run", range(2, 4), placement=there)
    assert losses + found[0] == copied.losses
    assert differing(found[1], copied.values[3]) == []
    assert differing(read_atoms(in_memory / "run"), copied.atoms) == []
    assert len(referenced(in_memory / "run")) == 4


def test_a_block_lies_in_two_shards_and_is_read_whole(in_memory, made):
    train(made, in_memory / "run", range(1))
    disk = LocalStore.read(in_memory / "run", direct=False).disk
    read = [reference_at(disk, file.path) for file in referenced(in_memory / "run").values()]
    assert len({name for each in read for name in each.files}) == 3
    assert max(len(each.files) for each in read) == 2


def test_nothing_of_the_base_is_written_and_a_pass_reads_as_much(in_memory, made, copied):
    _, _, engine = train(made, in_memory / "run", range(STEPS))
    base = 2 * engine.preflight.streamed_parameters
    assert copied.bytes - bytes_of(in_memory / "run") > 0.9 * base
    assert copied.preflight.needed_bytes - engine.preflight.needed_bytes > 0.9 * base
    assert engine.last["read_bytes"] == engine.preflight.read_bytes_per_step
    assert engine.last["read_bytes"] == copied.reads[2]


def names_in(run):
    return sorted((each.name, each.stat().st_mtime_ns) for each in run.rglob("*") if each.suffix != "")


def changed_byte(folder):
    """Change one byte of a matrix in the middle of the second shard, which keeps its size and times."""
    path = sorted(folder.glob("model-*.safetensors"))[1]
    status = path.stat()
    with open(path, "r+b") as file:
        file.seek(status.st_size // 2)
        byte = file.read(1)
        file.seek(status.st_size // 2)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def cut_short(folder):
    path = sorted(folder.glob("model-*.safetensors"))[1]
    os.truncate(path, path.stat().st_size - 1)


def remove_shard(folder):
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(
    ("change", "error"), [(changed_byte, ChunkCorrupt), (cut_short, FileMissing), (remove_shard, FileMissing)]
)
@pytest.mark.slow
def test_a_changed_folder_is_refused_with_nothing_written(in_memory, folder, made, copied, change, error):
    run = in_memory / "run"
    train(folder, run, range(2))
    change(folder)
    before = names_in(run)
    for source in (folder, None):
        with pytest.raises(error) as raised:
            resumed(made, run, source)
        assert str(folder) in str(raised.value) and "holdfast.pretrained(FOLDER" in str(raised.value)
        assert names_in(run) == before
    found = train(made, run, range(2, STEPS))  # the way out that the message names
    assert found[0] == copied.losses[2:STEPS] and differing(found[1], copied.values[2]) == []
    shutil.rmtree(folder)
    assert LocalStore.read(run, direct=False).newest_whole()[1] == []


def resumed(model_folder, run, source):
    """Resume with the model of one folder and the weights of another one, or with none."""
    model, _ = holdfast.pretrained(model_folder)
    return offloaded(model, run, None if source is None else Weights(source, model, reference=True))


def test_a_change_during_training_fails_the_pass(in_memory, folder):
    said = r"layers\.\d.*which was changed since the run began"
    with pytest.raises(ChunkCorrupt, match=said), opened(folder, in_memory / "run") as engine:
        engine.step(micro_batches(0))
        changed_byte(folder)
        for step in range(1, 4):
            engine.step(micro_batches(step))


@pytest.mark.slow
def test_a_lost_folder_makes_no_commit(in_memory, folder, copied):
    """The files are still open, so passes go on, but no step is published that could not be resumed."""
    with pytest.raises(FileMissing, match=r"cannot be read"), opened(folder, in_memory / "run") as engine:
        engine.step(micro_batches(0))
        engine.wait()
        folder.rename(in_memory / "moved")
        engine.step(micro_batches(1))
        engine.wait()
    losses = train(in_memory / "moved", in_memory / "run", range(1, STEPS))[0]
    assert losses == copied.losses[1:STEPS]


@pytest.mark.slow
def test_a_run_goes_from_a_reference_to_a_copy_and_back(in_memory, made, copied):
    folder, run = made, in_memory / "run"
    losses = train(folder, run, range(1))[0]
    with pytest.warns(
        UserWarning, match=r"are copied into it: pass holdfast.pretrained\(FOLDER, reference=True\)"
    ):
        losses += train(folder, run, range(1, 3), reference=False)[0]
    assert not referenced(run) and not list(run.rglob("*.reference"))
    assert bytes_of(run) > copied.bytes * 0.9
    losses += train(folder, run, range(3, 4))[0]
    assert len(referenced(run)) == 4 and losses == copied.losses
    train(folder, run, range(4, 6))
    assert not list(run.rglob("*.frozen*.safetensors")) and bytes_of(run) < copied.bytes / 4


@pytest.mark.slow
def test_another_base_is_refused_where_the_run_has_a_copy(in_memory, folder):
    run = in_memory / "run"
    train(folder, run, range(1), reference=False)
    changed_byte(folder)
    with pytest.raises(ChunkCorrupt, match=r"read from .*folder"):
        opened(folder, run)
    assert train(folder, run, range(1, 2), reference=False)[0]


@pytest.mark.slow
def test_a_run_with_references_goes_on_without_a_source(in_memory, made, copied):
    run = in_memory / "run"
    train(made, run, range(2))
    with resumed(made, run, None) as engine:
        assert engine.step(micro_batches(2)) == copied.losses[2]
        assert engine.evaluate(micro_batches(9)) > 0
    assert len(referenced(run)) == 4


@pytest.mark.slow
def test_streamed_embedding_and_head_are_read_from_the_folder_too(in_memory):
    folder, run = folder_of(in_memory / "folder", tiny_folders.llama), in_memory / "run"
    copied = train(folder, in_memory / "copied", range(3), reference=False)
    losses = train(folder, run, range(1))[0]
    streamed = holdfast.Placement(embedding_and_head="streamed")
    losses += train(folder, run, range(1, 2), placement=streamed)[0]
    assert len(referenced(run)) == 5
    resident = holdfast.Placement(embedding_and_head="resident")
    losses += train(folder, run, range(2, 3), placement=resident)[0]
    assert losses == copied[0] and len(referenced(run)) == 4


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.slow
def test_other_dtypes_are_read_as_they_lie(in_memory, dtype):
    """In fp32 and fp16 the compute copy is in the scratch, and the frozen file is read when a run begins."""
    folder = folder_of(in_memory / "folder", dtype=dtype)
    copied = train(folder, in_memory / "copied", range(2), reference=False)
    found = train(folder, in_memory / "run", range(2))
    assert found[0] == copied[0] and differing(found[1], copied[1]) == []
    assert len(referenced(in_memory / "run")) == 4


@pytest.mark.slow
def test_experts_that_are_stored_one_by_one_are_copied(in_memory):
    folder = folder_of(in_memory / "folder", tiny_folders.mixtral)
    copied = train(folder, in_memory / "copied", range(2), reference=False)
    said = r"frozen weights of .*layers.0.* are copied into the run: the folder has them in another dtype or form"
    with pytest.warns(UserWarning, match=said):
        found = train(folder, in_memory / "run", range(2))
    assert found[0] == copied[0] and len(referenced(in_memory / "run")) == 1


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("kind", ["nf4", "fp8", "int8"])
@pytest.mark.slow
def test_packed_weights_are_read_from_the_folder(in_memory, kind):
    if kind != "fp8":
        pytest.importorskip("bitsandbytes")
    folder = write_quantised(in_memory / "folder", kind, wide_llama)
    copied = train(folder, in_memory / "copied", range(2), reference=False)
    losses = train(folder, in_memory / "run", range(1))[0]
    found = train(folder, in_memory / "run", range(1, 2))
    assert losses + found[0] == copied[0] and differing(found[1], copied[1]) == []
    assert len(referenced(in_memory / "run")) == 4


def test_earlier_versions_refuse_such_a_run(in_memory, made):
    train(made, in_memory / "run", range(1))
    path = max((in_memory / "run" / "commits").iterdir())
    with pytest.raises(RunMismatch, match="format version 2"):
        unseal(path.read_bytes(), str(path))


def test_a_refused_beginning_leaves_no_reference_behind(in_memory, made):
    """Of the second block, when the first one has its reference."""
    run, calls = in_memory / "run", []

    def refuse(module):
        calls.append(module)
        if list(run.rglob("*.reference")):
            raise BadInput("not now")
        for parameter in module.parameters(recurse=False):
            torch.nn.init.ones_(parameter)

    with pytest.raises(BadInput, match="not now"):
        opened(made, run, init=refuse)
    assert calls and not list(run.rglob("*.reference*"))


@pytest.mark.slow
def test_references_of_an_interrupted_beginning_are_used_or_removed(in_memory, made, copied):
    run = in_memory / "run"
    train(made, in_memory / "other", range(1))
    (run / "data").mkdir(parents=True)
    for each in (in_memory / "other" / "data").glob("*.reference"):
        shutil.copy(each, run / "data" / each.name)
        (run / "data" / f"{each.name}.tmp").write_bytes(b"half")
    assert train(made, run, range(1), reference=False)[0] == copied.losses[:1]
    assert not list(run.rglob("*.reference*"))


def test_a_folder_of_links_is_read_through_them(in_memory, made, copied):
    """As the hub's cache has them."""
    folder = in_memory / "snapshot"
    folder.mkdir()
    for each in made.iterdir():
        (folder / each.name).symlink_to(each)
    assert train(folder, in_memory / "run", range(2))[0] == copied.losses[:2]


@pytest.mark.slow
def test_a_damaged_reference_is_put_right_by_a_resume_with_its_folder(in_memory, made, copied):
    folder, run = made, in_memory / "run"
    train(folder, run, range(1))
    path = min(run.rglob("*.reference"))
    path.write_bytes(path.read_bytes().replace(b'"folder"', b'"fodder"'))
    with pytest.raises(Damaged, match="damaged: it fails its own digest"):
        resumed(folder, run, None)
    assert train(folder, run, range(1, 2))[0] == copied.losses[1:2]
    assert LocalStore.read(run, direct=False).newest_whole()[1] == []


@pytest.mark.slow
def test_another_base_leaves_the_reference_of_older_commits(in_memory, folder):
    run = in_memory / "run"
    train(folder, run, range(1))
    shutil.copytree(folder, in_memory / "other")
    changed_byte(in_memory / "other")
    with pytest.warns(UserWarning, match="are copied into it"):
        train(folder, run, range(1, 2), reference=False)
    with pytest.raises(ChunkCorrupt, match=r"read from .*other"):
        opened(in_memory / "other", run)
    reader = LocalStore.read(run, direct=False)
    oldest = reader.load(reader.line()[-1])
    assert oldest.referenced and reader.verify(oldest) == []


@pytest.mark.slow
def test_a_run_whose_folder_was_moved_may_copy_it_from_there(in_memory, folder, copied):
    run = in_memory / "run"
    train(folder, run, range(1))
    folder.rename(in_memory / "moved")
    with pytest.warns(UserWarning, match="are copied into it"):
        losses = train(in_memory / "moved", run, range(1, 2), reference=False)[0]
    assert losses == copied.losses[1:2] and not referenced(run)
