"""Blocks that are not computed again in the backward pass: the bits of a loop that keeps all of its graph."""

from __future__ import annotations

import pytest

from combined import one_in
from plain_loops import PLACEMENTS, STEPS, check
from training import differing, read_atoms, stored

PARTS = [0.0, 0.5]


@pytest.mark.parametrize(
    "num_micro_batches, placement, recomputed_fraction, clip_norm, schedule",
    one_in(3, [1, 2, 3, 5], PLACEMENTS, PARTS, [None, 0.5], ["vertical", "horizontal"]),
)
def test_twenty_steps_have_every_bit_of_a_plain_loop(
    tmp_path, num_micro_batches, placement, recomputed_fraction, clip_norm, schedule
):
    options = {"recomputed_fraction": recomputed_fraction, "schedule": schedule, **PLACEMENTS[placement]}
    check(tmp_path, STEPS, num_micro_batches, clip_norm, **options)


@pytest.mark.parametrize("recomputed_fraction", PARTS)
def test_dropout_draws_what_a_plain_loop_draws(tmp_path, recomputed_fraction):
    options = {"recomputed_fraction": recomputed_fraction, "delayed_fraction": 0.5, **PLACEMENTS["mixed"]}
    check(tmp_path, STEPS, 3, 0.5, dropout=0.2, **options)
    assert differing(read_atoms(tmp_path), stored(tmp_path)) == []
