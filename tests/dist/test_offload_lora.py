"""LoRA of PEFT on several ranks: the bits of a plain loop that adds up rank by rank, nothing kept or written for what
is frozen, gone on with by other ranks."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import tiny_folders
from dist.adapting import task
from dist.test_offload_ways import CLIPPING, go_through
from dist.world import World
from holdfast.store.run_store import LocalStore
from plain_loops import PLACEMENTS
from support.adapter_runs import TINY, losses
from training import differing, read_atoms

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`", "ignore:.*fan_in_fan_out")


@pytest.fixture(scope="module")
def world():
    with World("adapting") as world:
        yield world


WAYS = {
    "ssd": {"options": {"delayed_fraction": 0.5, **CLIPPING["defer"], **PLACEMENTS["ssd"]}},
    "half": {
        "options": {"dtype": "fp16", "clipping": "speculate", **PLACEMENTS["mixed"]},
        "scale": (2.0**12, 2),
    },
}


def test_adapters_have_every_bit_and_go_on_with_any_number_of_ranks(world, tmp_path):
    go_through(
        world,
        tmp_path,
        [(2, 2, 2), (3, 1, 3), (4, 3, 1)],
        WAYS,
        tasks=task,
        optimizer="of adapters",
    )
    trained = {name for name, p in task().model.named_parameters() if p.requires_grad}
    for name in WAYS:
        kept = {key.rpartition("/")[0] for key in read_atoms(tmp_path / name) if not key.endswith("/param")}
        assert kept == trained


def test_a_rank_writes_its_part_of_the_adapters_and_nothing_of_their_base(world, tmp_path):
    run = {"root": tmp_path / "run", "steps": 2, "optimizer": "of adapters", "counted": True}
    said = world.run(2, runs={"run": run})
    block = next(iter(task().model.get_base_model().model.layers))
    frozen = 4 * sum(p.numel() for p in block.parameters() if not p.requires_grad)
    assert 0 < max(each["run"]["written"] for each in said) < frozen / 5


def test_adapters_of_a_folder_that_is_never_in_memory_have_the_bits_of_one_process(world, tmp_path):
    """Of two micro-batches; each of two ranks has one."""
    equal_on_ranks(world, tmp_path, tiny_folders.write_folder(tmp_path / "folder"))


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("kind", ["nf4", "int8", "fp8", "torchao"])
def test_adapters_of_a_quantised_folder_have_the_bits_of_one_process(world, tmp_path, kind):
    pytest.importorskip("bitsandbytes")
    equal_on_ranks(world, tmp_path, tiny_folders.write_quantised(tmp_path / "folder", kind))


def test_several_ranks_copy_a_base_that_one_process_reads_from_its_folder(world, tmp_path):
    """One leaves it there, and two go on with copies of their parts; and the other way round."""
    equal_on_ranks(world, tmp_path, tiny_folders.write_folder(tmp_path / "folder"), reference=True)
    found = {name: bool(LocalStore.read(tmp_path / name, direct=False).head().referenced) for name in "12"}
    assert found == {"1": False, "2": True}


def equal_on_ranks(world, tmp_path, folder, **what):
    what = {"folder": str(folder), "optimizer": "of adapters", **what}
    for ranks in (1, 2):
        run = {"root": tmp_path / f"{ranks}", "steps": 3, "micro_batches": 2 // ranks}
        (said, *_) = world.run(ranks, runs={"run": {**run, **what}})
        assert said.get("finished"), said.get("trace")
    expected = read_atoms(tmp_path / "1")
    assert any("lora_B" in key and key.endswith("exp_avg") for key in expected)
    assert differing(read_atoms(tmp_path / "2"), expected) == []
    # and what one process has begun, two go on with, from what is in its files
    for ranks in (2, 1):
        run = {"root": tmp_path / f"{ranks}", "steps": 5, "micro_batches": ranks}
        (said, *_) = world.run(3 - ranks, runs={"run": {**run, **what}})
        assert said.get("finished"), said.get("trace")
    assert differing(read_atoms(tmp_path / "2"), read_atoms(tmp_path / "1")) == []


COMMANDED = {
    "lora": ("lora.dropout=0.2",),
    "dora": ("lora.dora=true",),
    "nf4": ("lora.dropout=0.2", "quantization.bits=4"),
}


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kind", COMMANDED)
def test_the_command_has_the_bits_of_one_process_on_any_number_of_ranks(world, tmp_path, kind):
    """Killed on two ranks and gone on with by one, and the other way round."""
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
    folder, text = tiny_folders.write_folder(tmp_path / "folder"), tmp_path / "text.txt"
    text.write_text(tiny_folders.TEXT * 12)

    def train(ranks, name, steps=4, **more):
        keys = TINY | {"run.dir": tmp_path / name, "data.text": text, "train.steps": steps, "lora.rank": 4}
        sets = [*(f"{key}={value}" for key, value in keys.items()), *COMMANDED[kind]]
        words = ["train", "--model", folder, *(word for each in sets for word in ("--set", each))]
        return [said.get("finished", False) for said in world.run(ranks, words=words, **more)]

    assert train(1, "whole") == [True]
    for name, first, then in (("2-1", 2, 1), ("1-2", 1, 2)):
        assert train(first, name, kill=[first - 1, 2]) == [False] * first
        assert train(then, name) == [True] * then
        assert differing(read_atoms(tmp_path / name), read_atoms(tmp_path / "whole")) == []
        assert losses(tmp_path / name) == losses(tmp_path / "whole") and len(losses(tmp_path / name)) == 4
