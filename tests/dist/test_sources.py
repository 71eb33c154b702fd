"""Ranks begin a run from one that others wrote, with records in it, under another parallelism or in one process."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dist.awkward import TOPOLOGIES
from dist.world import ended
from holdfast.formats.readers.huggingface import write_single
from holdfast.formats.readers.safetensors_files import KEYS, PROGRESS
from holdfast.opening import source_of
from holdfast.store.reader import RunReader


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_another_kind_of_optimizer_is_refused_on_all_ranks(world, tmp_path, kind):
    ended(world.run(1, kind="plain", root=tmp_path / "plain", steps=2))
    source = write_single(source_of(str(tmp_path / "plain")), tmp_path / "adamw.safetensors")
    said = world.run(
        2, kind=kind, root=tmp_path / "run", steps=2, optimizer="sgd", resume={"source": str(source)}
    )
    text = "exp_avg, exp_avg_sq, step, and the one here keeps momentum_buffer"
    assert all(
        "of another kind of optimizer (AdamW)" in rank["error"] and text in rank["error"] for rank in said
    )
    assert RunReader(tmp_path / "run").commits() == []


THEIRS = {r"head\.weight": "wte", r"(.*)": r"old.\1"}
"""Names in the source by those here: the second name of what the first and the last stage have, and all others."""


@pytest.fixture(scope="module")
def renamed(world, tmp_path_factory):
    """A state under other names, and what the run said that it is of; a second one has a tensor more."""
    folder = tmp_path_factory.mktemp("renamed")
    [said] = world.run(1, topology="plain", root=folder / "run", steps=3)
    assert said.get("finished"), said.get("trace")
    file = write_single(source_of(str(folder / "run")), folder / "plain.safetensors")
    with safe_open(file, "pt") as opened:
        slots = json.loads(opened.metadata()[KEYS])
    theirs = {name: "wte" if name == "embed.weight" else f"old.{name}" for name, _ in slots.values()}
    found = {f"{theirs[slots[key][0]]}/{slots[key][1]}": tensor for key, tensor in load_file(file).items()}
    for name, more in (("same", {}), ("more", {"old.blocks.9.extra/param": torch.ones(2)})):
        told = {key: key.rsplit("/", 1) for key in found | more}
        metadata = {KEYS: json.dumps(told), PROGRESS: json.dumps({"step": 3})}
        save_file(found | more, folder / f"{name}.safetensors", metadata)
    return folder, said


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("topology", ["pp2v2", "pp4", "tp2", "pp2"])
def test_names_of_the_source_are_told_to_all_stages_at_once(world, renamed, tmp_path, topology):
    """A stage has a part of the names: a rule may be of another stage's, and so may a tensor that it does not have."""
    folder, plain = renamed
    size = TOPOLOGIES[topology][0]
    ranks = world.run(
        size, topology=topology, root=tmp_path, steps=4, source=folder / "same.safetensors", rename=THEIRS
    )
    for rank in ranks:
        assert rank.get("finished"), rank.get("trace")
        assert rank["resumed"] == 3
        here = rank["digests"]["3"]
        assert here == {key: plain["digests"]["3"][key] for key in here}
    assert {key for rank in ranks for key in rank["digests"]["3"]} == plain["digests"]["3"].keys()


def test_a_tensor_that_no_stage_wants_is_refused_on_all(world, renamed, tmp_path):
    folder, _ = renamed
    said = world.run(
        2, topology="pp2", root=tmp_path, steps=4, source=folder / "more.safetensors", rename=THEIRS
    )
    assert all("nothing here wants its old.blocks.9.extra" in rank["error"] for rank in said)
