"""Nothing read ahead, where memory is short: the bits of a run that reads ahead, and no state beside the head."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
import torch

import holdfast
from holdfast import token_chunks
from holdfast.models.decoder import Decoder, DecoderConfig
from holdfast.offload.model.blocks import find_blocks, with_embedding_and_head
from holdfast.offload.setup.block_measurement import measure
from holdfast.quantities import KiB
from holdfast.schedule import work
from holdfast.schedule.planner.placement import choose
from holdfast.schedule.work import LEAST_MEMORY
from support.grouped import grouped
from training import adamw, batches


def made_model():
    torch.manual_seed(0)
    return Decoder(
        DecoderConfig(vocabulary=2048, width=64, heads=2, kv_heads=1, blocks=2, hidden=64, context=8)
    )


@pytest.fixture
def short(monkeypatch):
    """A function that gives the next runs the placement of least memory, or as it is chosen."""
    planning = import_module("holdfast.offload.setup.step_planning")
    monkeypatch.setattr(work, "TILE_BYTES", 400 * KiB)

    def chosen(*args, **options):
        return replace(choose(*args, **options), saving=LEAST_MEMORY)

    return lambda is_short: monkeypatch.setattr(planning, "choose", chosen if is_short else choose)


def offload(model, directory, **options):
    given = {"dtype": "bf16", "clip_norm": 0.5, "embedding_and_head": "streamed", **options}
    sample = {"sample": batches(0, 1)[0], "micro_batches": 2}
    return holdfast.offload(model, adamw(model, fused=True), directory, **sample, **grouped(**given))


def test_no_state_is_in_memory_while_the_head_computes(tmp_path, short):
    short(True)
    model, held = made_model(), []
    with offload(model, tmp_path, clip_norm=None, commit_every=0) as engine:
        pool = engine._run.residency.pool

        def look(*_):
            idle = [
                b.memory_bytes for each in pool._idle.values() for b in each if b.kind == "optimizer state"
            ]
            held.append(pool._by_kind["optimizer state"] + sum(idle))

        model.head.register_forward_hook(look)
        for step in range(3):
            engine.step(batches(step, 2))
        engine.evaluate(batches(9, 2))
        largest = max(tile.layout.file_bytes for unit in engine._run.blocks for tile in unit.tiles)
        assert largest <= pool.most_by_kind["optimizer state"] <= 2 * largest
        assert pool.most_by_kind["parameters"] == max(unit.copy_bytes for unit in engine._run.blocks)
    assert held == [0] * 8


def test_what_a_trace_measures_leaves_out_the_parameters():
    """Of few tokens the gradient of the head's weight is nearly all."""
    model, sample = made_model(), batches(0, 1, rows=1)[0]
    blocks = with_embedding_and_head(model, find_blocks(model))
    found = measure(model, blocks, sample, torch.float32)
    logits = 4 * sample["tokens"].numel() * 2048
    assert 4 * 2048 * 64 < found.last_bytes < 4 * 2048 * 64 + 4 * logits


def test_a_streamed_head_is_measured_in_tiles(monkeypatch):
    """Of many tokens: without the sum of the gradients, and with logits that are computed once more."""
    monkeypatch.setattr(token_chunks, "LOGITS_PER_CHUNK", 4 * 2048)
    monkeypatch.setattr(token_chunks, "WORDS_PER_TILE", 256)
    model, sample = made_model(), batches(0, 1, rows=4)[0]
    alone, weights = find_blocks(model), 64 * 2048
    whole = measure(model, alone, sample, torch.float32)
    found = measure(model, with_embedding_and_head(model, alone), sample, torch.float32)
    assert whole.last_bytes > 4 * weights > 2 * found.last_bytes
    assert found.head_flop == whole.head_flop * 4 / 3 == 8 * sample["tokens"].numel() * weights


def test_a_trace_counts_the_products_of_a_block_and_of_the_head():
    tokens, weights = 8, 64 * 64 * 2 + 64 * 32 * 2 + 64 * 64 * 3
    model, sample = made_model(), batches(0, 1, rows=1)[0]
    found = measure(model, find_blocks(model), sample, torch.float32)
    assert (found.block_flop, found.head_flop) == (2 * tokens * weights, 3 * 2 * tokens * 64 * 2048)
