"""Several ranks of a ``Trainer`` by ``offloaded`` train as those of the unmodified one do under DDP."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="Trainer needs it")
pytest.importorskip("peft")
pytest.importorskip("datasets")

from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import Trainer

from dist.tuned import Some
from dist.world import World, finished
from holdfast.errors import RunMismatch
from holdfast.integrations.transformers import offloaded
from integrations.test_offloaded_trl import PAIRS
from integrations_interrupt import Interrupt, Interrupted, close_engines, same
from offloaded_script import make
from tiny_folders import VOCABULARY, write_folder


@pytest.fixture(autouse=True)
def engines_are_closed():
    yield
    close_engines()


@pytest.fixture(scope="module")
def world():
    with World("tuned") as world:
        yield world


USUAL: dict[str, Any] = {"gradient_accumulation_steps": 4}
"""Each rank has 6 batches in an epoch, the last of which begins anew: steps of 4 and of 2, in two epochs."""


def weights(root: Path, rank: int = 0) -> dict[str, torch.Tensor]:
    return torch.load(root / f"weights-{rank}.pt")


def test_losses_and_weights_are_those_under_ddp(world, tmp_path):
    """In the first step one rank has a micro-batch without targets. The best model is loaded at the end."""
    full = {
        "train_sampling_strategy": "sequential", "silent": [2, 3], "counts": True, "load_best_model_at_end": True,
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
        "per_device_eval_batch_size": 2, "include_num_input_tokens_seen": True, "max_grad_norm": 0.5,
    }  # fmt: skip
    orders = {"full": full, "adapters": {"adapters": True, "average_tokens_across_devices": False}}
    scripts = [
        USUAL | order | {"plain": plain, "root": str(tmp_path / f"{name}-{plain}")}
        for name, order in orders.items()
        for plain in (True, False)
    ]
    said = [finished(each) for each in world.run_each(2, scripts)]
    for n, name in enumerate(orders):
        theirs, mine = said[2 * n : 2 * n + 2]
        for one, other in zip(theirs, mine, strict=True):
            same(other["logged"], one["logged"])
            assert (other["steps"], other["best"], other["processes"]) == (one["steps"], one["best"], 2)
        for rank in (0, 1):
            expected = weights(tmp_path / f"{name}-True")
            torch.testing.assert_close(
                weights(tmp_path / f"{name}-False", rank), expected, rtol=1e-5, atol=1e-6
            )
    for name in ("full", "adapters"):
        saved = {p.relative_to(tmp_path / f"{name}-True") for p in (tmp_path / f"{name}-True").rglob("*")}
        own = {p.relative_to(tmp_path / f"{name}-False") for p in (tmp_path / f"{name}-False").rglob("*")}
        assert {str(each) for each in saved - own if each.name != "optimizer.pt"} == set()


def test_killed_they_end_with_the_same_bits(world, tmp_path):
    """Dropout in blocks and random numbers in the dataset; the kill comes while a step is under way."""
    script = USUAL | {"dropout": 0.2, "noise": True, "eval_strategy": "steps", "eval_steps": 2}
    cut = world.run(2, root=tmp_path / "cut", act=[1, "kill", "on_substep_end", 2], **script)
    assert cut[1]["code"] == -9 and not cut[0].get("finished"), cut
    scripts = [script | {"root": str(tmp_path / name)} for name in ("whole", "cut")]
    whole, rest = (finished(each) for each in world.run_each(2, scripts))
    for one, other in zip(whole, rest, strict=True):
        assert other["digests"] == one["digests"]
        assert other["logged"] == one["logged"]


def test_another_number_of_ranks_goes_on(world, tmp_path):
    """As many samples in a step, in one process and in two again. The others of a rank that fails get an error."""
    script = {"samples": 24, "max_grad_norm": 0.5, "logging_steps": 2, "num_train_epochs": 3}
    of_two = script | {"gradient_accumulation_steps": 3}
    cut = of_two | {"root": str(tmp_path / "cut")}
    begun = world.run(2, **cut, act=[0, "fail", "on_step_end", 2])
    assert "of this process alone" in begun[0]["error"] and "RankFailed" in begun[1]["error"], begun
    whole = finished(world.run(2, **of_two, root=tmp_path / "whole"))[0]
    commits = sorted((tmp_path / "cut/_holdfast/commits").iterdir())

    def alone(accumulation, *callbacks):
        given = script | {
            "gradient_accumulation_steps": accumulation,
            "train_dataset": Some(script["samples"]),
        }
        del given["samples"]
        return make(offloaded(Trainer), tmp_path / "cut", callbacks=callbacks, **given)

    with pytest.raises(RunMismatch, match="was trained by 2 ranks, and here are 1"):
        alone(3).train()
    assert sorted((tmp_path / "cut/_holdfast/commits").iterdir()) == commits
    with pytest.raises(Interrupted):
        alone(6, Interrupt(4, "on_step_end")).train()
    for said in finished(world.run(2, **cut)):
        same(said["logged"], whole["logged"])
    torch.testing.assert_close(weights(tmp_path / "cut"), weights(tmp_path / "whole"), rtol=1e-5, atol=1e-6)


def test_what_one_rank_decides_all_do(world, tmp_path):
    """A stop between two micro-batches, and a save."""
    scripts = [
        USUAL | {"root": str(tmp_path / "stop"), "act": [1, "should_training_stop", "on_substep_end", 2]},
        USUAL | {"root": str(tmp_path / "save"), "act": [1, "should_save", "on_step_end", 1]},
    ]
    stopped, saved = (finished(each) for each in world.run_each(2, scripts))
    assert [each["steps"] for each in stopped] == [3, 3]
    assert (tmp_path / "save" / "checkpoint-1" / "model.safetensors").exists()
    assert [each["steps"] for each in saved] == [4, 4]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(find_spec("trl") is None, reason="needs trl")
def test_trainers_of_trl_log_what_they_do_under_ddp(tmp_path):
    """With metrics that their losses gather; the last batches of an epoch and of an evaluation are filled up. Some are
    interrupted within an epoch. Texts that are generated end after unlike numbers of tokens."""
    folder = str(write_folder(tmp_path / "llama", dtype=torch.float32))
    held = load_file(f"{folder}/model.safetensors")  # a head whose entropies differ from text to text
    save_file(
        held | {"lm_head.weight": 30 * held["lm_head.weight"]},
        f"{folder}/model.safetensors",
        {"format": "pt"},
    )
    ends = {"eos_token_id": list(range(1, VOCABULARY, 4)), "pad_token_id": 0}
    (tmp_path / "llama/generation_config.json").write_text(json.dumps(ends))
    sft = {"script": "sft", "adapters": True, "per_device_eval_batch_size": 1, "texts": 9, "max_steps": 6}
    sft |= {"gradient_accumulation_steps": 1, "eval_steps": 3}
    dpo = {"script": "dpo", "adapters": True, "per_device_eval_batch_size": 1, "texts": 9}
    kept = {"script": "dpo", "max_steps": 1}  # with a second model in memory, the reference
    computed = {"script": "dpo", "precompute_ref_log_probs": True, "max_steps": 2}
    texts = {"script": "policy", "adapters": True, "per_device_eval_batch_size": 2, "max_steps": 3}
    more = {
        "script": "policy",
        "trainer": "RLOO",
        "max_steps": 1,
        "talks": True,
        "gradient_checkpointing": False,
    }
    orders: dict[str, dict[str, Any]] = {
        "plain": sft | {"plain": True},
        "whole": sft,
        "cut": sft | {"interrupt": 5},
        "rest": sft,
        "plain rewards": {"script": "reward", "max_steps": 2, "plain": True},
        "rewards": {"script": "reward", "max_steps": 2},
        "plain pairs": dpo | {"plain": True},
        "pairs": dpo,
        "cut pairs": dpo | {"interrupt": 3},
        "rest pairs": dpo,
        "plain kept": kept | {"plain": True},
        "kept": kept,
        "plain computed": computed | {"plain": True},
        "computed": computed,
        "plain texts": texts | {"plain": True},
        "texts": texts,
        "cut texts": texts | {"interrupt": 2},
        "rest texts": texts,
        "plain more texts": more | {"plain": True},
        "more texts": more,
        "refused": {"script": "kto"},
    }
    place = {name: str(tmp_path / name.replace("rest", "cut")) for name in orders}
    for name in ("plain computed", "computed"):  # beside which the first rank leaves what it has computed
        orders[name]["pairs"] = f"{place[name]}-data"
        Dataset.from_dict(PAIRS).save_to_disk(orders[name]["pairs"])
    with World("chatting", patience_seconds=180.0) as world:
        given = [order | {"folder": folder, "root": place[name]} for name, order in orders.items()]
        said = dict(zip(orders, world.run_each(2, given), strict=True))
    named = ("rewards", "pairs", "kept", "computed", "texts", "more texts")
    for theirs, mine in (("plain", "whole"), *((f"plain {each}", each) for each in named)):
        for one, other in zip(finished(said[theirs]), finished(said[mine]), strict=True):
            same(other["logged"], one["logged"])
            assert other.get("text") == one.get("text")
    for whole, rest in (("whole", "rest"), ("pairs", "rest pairs"), ("texts", "rest texts")):
        for one, other in zip(said[whole], said[rest], strict=True):
            assert (other["logged"], other["weights"]) == (one["logged"], one["weights"])
    for each in said["refused"]:
        assert "offloaded(KTOTrainer) trains in one process" in each["error"], each
    assert not (tmp_path / "refused/_holdfast").exists()


@pytest.mark.parametrize(
    "options, text",
    [
        ({"accelerator_config": {"even_batches": False}}, "even_batches=False"),
        ({"spoilt": "another loader"}, "batches in an epoch"),
    ],
)
def test_settings_that_cannot_work_are_refused(world, tmp_path, options, text):
    said = world.run(2, root=tmp_path, **USUAL | options)
    assert all(text in each["error"] for each in said), said
    assert not (tmp_path / "_holdfast").exists()
