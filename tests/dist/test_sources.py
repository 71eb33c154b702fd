"""Ranks begin a run from one that others wrote, with records in it, under another parallelism or in one process."""

from __future__ import annotations

import pytest

from dist.world import World
from holdfast.sources import source_of
from holdfast.store.reader import RunReader
from holdfast.universal.convert.huggingface import write_single

STEPS = 9
KINDS = [("plain", 1), ("ddp", 2), ("fsdp", 2), ("fsdp", 3), ("hsdp", 4)]


@pytest.fixture(scope="module")
def world():
    with World() as world:
        yield world


@pytest.fixture(scope="module")
def written(world, tmp_path_factory):
    """By kind and size a run, and what it said."""
    found = {}
    for kind, size in KINDS:
        root = tmp_path_factory.mktemp(f"{kind}{size}")
        found[kind, size] = root, world.run(size, kind=kind, root=root, steps=STEPS)[0]
    return found


@pytest.mark.parametrize("target", KINDS, ids=lambda kind: "-".join(map(str, kind)))
@pytest.mark.parametrize("source", KINDS, ids=lambda kind: "-".join(map(str, kind)))
def test_a_run_begins_from_that_of_another_parallelism(world, written, tmp_path, source, target):
    root, said = written[source]
    assert said["finished"], said.get("trace")
    kind, size = target
    ranks = world.run(size, kind=kind, root=tmp_path, steps=STEPS + 2, resume={"source": str(root)})
    for rank in ranks:
        assert rank.get("finished"), rank.get("trace")
        assert rank["resumed"] == STEPS
        assert rank["digests"][str(STEPS)] == said["digests"][str(STEPS)]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_another_kind_of_optimizer_is_refused_on_all_ranks(world, written, tmp_path, kind):
    root, _ = written["plain", 1]
    source = write_single(source_of(str(root)), tmp_path / "adamw.safetensors")
    said = world.run(
        2, kind=kind, root=tmp_path / "run", steps=2, optimizer="sgd", resume={"source": str(source)}
    )
    text = "exp_avg, exp_avg_sq, step, and the one here keeps momentum_buffer"
    assert all("of another kind of optimizer (AdamW)" in rank["error"] and text in rank["error"] for rank in said)
    assert RunReader(tmp_path / "run").commits() == []
