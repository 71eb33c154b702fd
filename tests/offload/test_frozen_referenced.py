"""Frozen weights that a run reads from the folder of a pretrained model, in place of a copy of its own."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

import holdfast
from holdfast.errors import ChunkCorrupt, FileMissing
from holdfast.models.pretrained import Weights
from holdfast.store.disk import reference_at
from holdfast.store.run_store import LocalStore
from training import differing, read_atoms

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

import tiny_folders  # noqa: E402  (needs transformers)
from tiny_folders import VOCABULARY, write_folder  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`", "ignore:.*fan_in_fan_out")

STEPS = 4


def wide_llama():
    return tiny_folders.llama(hidden_size=32, intermediate_size=4096)


def folder_of(path, make=wide_llama, **options):
    """A folder of three shards; a block lies in two of them."""
    return write_folder(path, make, max_shard_size="1MB", **options)


def opened(folder, run, *, reference=True, **options):
    model, weights = holdfast.pretrained(folder, reference=reference)
    return offloaded(model, run, weights, **options)


def offloaded(model, run, source, **options):
    torch.manual_seed(0)
    adapters = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(model, adapters).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    options = {"precision": "bf16", "sample": micro_batches(0)[0], "micro_batches": 2} | options
    return holdfast.offload(model, optimizer, run, source=source, **options)


def micro_batches(step):
    tokens = torch.randint(0, VOCABULARY, (2, 2, 10), generator=torch.Generator().manual_seed(step))
    return [{"input_ids": each, "labels": each} for each in tokens]


def train(folder, run, steps, **options):
    """The losses of ``steps`` by number, all parameters, and the engine."""
    with opened(folder, run, **options) as engine:
        losses = [engine.step(micro_batches(step)) for step in steps]
        values = {name: value.clone() for name, value in engine.state_dict().items()}
        return losses, values, engine


def referenced(run):
    manifest = LocalStore.read(run, direct=False).head()
    assert manifest is not None
    return manifest.referenced


def bytes_of(directory):
    return sum(os.path.getsize(each) for each in directory.rglob("*") if each.is_file())


@pytest.mark.parametrize("placement", [{}, {"params_on_host": 1.0}, {"activations_on_host": 0.0}])
def test_bits_are_those_of_a_copy(tmp_path, placement):
    folder, there = folder_of(tmp_path / "folder"), holdfast.Placement(**placement)
    copied = train(folder, tmp_path / "copied", range(STEPS), reference=False, placement=there)
    losses = train(folder, tmp_path / "run", range(2), placement=there)[0]
    found = train(folder, tmp_path / "run", range(2, STEPS), placement=there)
    assert losses + found[0] == copied[0]
    assert differing(found[1], copied[1]) == []
    here, there = read_atoms(tmp_path / "run"), read_atoms(tmp_path / "copied")
    assert differing(here, there) == []
    assert len(referenced(tmp_path / "run")) == 4 and not referenced(tmp_path / "copied")


def test_a_block_lies_in_two_shards_and_is_read_whole(tmp_path):
    folder = folder_of(tmp_path / "folder")
    train(folder, tmp_path / "run", range(1))
    disk = LocalStore.read(tmp_path / "run", direct=False).disk
    read = [reference_at(disk, file.path) for file in referenced(tmp_path / "run").values()]
    assert len({name for each in read for name in each.files}) == 3
    assert max(len(each.files) for each in read) == 2


def test_nothing_of_the_base_is_written_and_a_pass_reads_as_much(tmp_path):
    folder = folder_of(tmp_path / "folder")
    _, _, copied = train(folder, tmp_path / "copied", range(STEPS), reference=False)
    _, _, engine = train(folder, tmp_path / "run", range(STEPS))
    base = 2 * engine.preflight.streamed_parameters
    assert bytes_of(tmp_path / "copied") - bytes_of(tmp_path / "run") > 0.9 * base
    assert copied.preflight.needed_bytes - engine.preflight.needed_bytes > 0.9 * base
    assert engine.last["read_bytes"] == engine.preflight.read_bytes_per_step
    assert engine.last["read_bytes"] == copied.last["read_bytes"]


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


@pytest.mark.parametrize(
    ("change", "error"), [(changed_byte, ChunkCorrupt), (cut_short, FileMissing), (remove_shard, FileMissing)]
)
def test_a_changed_folder_is_refused_with_nothing_written(tmp_path, change, error):
    folder, run = folder_of(tmp_path / "folder"), tmp_path / "run"
    shutil.copytree(folder, tmp_path / "whole")
    train(folder, run, range(2))
    change(folder)
    before = names_in(run)
    for source in (folder, None):
        with pytest.raises(error) as raised:
            resumed(tmp_path / "whole", run, source)
        assert str(folder) in str(raised.value) and "holdfast.pretrained(FOLDER" in str(raised.value)
        assert names_in(run) == before
    copied = train(tmp_path / "whole", tmp_path / "copied", range(STEPS), reference=False)
    found = train(tmp_path / "whole", run, range(2, STEPS))  # the way out that the message names
    assert found[0] == copied[0][2:] and differing(found[1], copied[1]) == []
    shutil.rmtree(folder)
    assert train(tmp_path / "whole", run, range(STEPS, STEPS))[0] == []


def resumed(model_folder, run, source):
    """Resume with the model of one folder and the weights of another one, or with none."""
    model, _ = holdfast.pretrained(model_folder)
    return offloaded(model, run, None if source is None else Weights(source, model, reference=True))
