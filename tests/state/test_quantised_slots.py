"""Optimizer state in blocks, divided among ranks: whole blocks, or an error that says what is in the way."""

from __future__ import annotations

import pytest

from holdfast.errors import RunMismatch
from holdfast.state.layout.regions import Region, whole_blocks
from holdfast.state.quantised_slots import refuse_divided_blocks
from holdfast.state.tensor_entries import QUANTISED

WHOLE = (128, 64)
ALL = Region((0, 0), WHOLE)
PARAM = {"name": "w", "slot": "param", "shape": [*WHOLE]}
SCALE = {"name": "w", "slot": "exp_avg.scale", "shape": [32]}
VALUES = {"w": {"exp_avg": {QUANTISED: ["OptimStateFp8", []]}}}


@pytest.mark.parametrize(
    ("start", "stop", "blocks"),
    [
        ((0, 0), (128, 64), (0, 32)),
        ((4, 0), (12, 64), (1, 3)),
        ((2, 0), (12, 64), None),
        ((4, 0), (10, 64), None),
        ((0, 0), (128, 32), None),
    ],
)
def test_only_rows_between_borders_are_whole_blocks(start, stop, blocks):
    found = whole_blocks(WHOLE, Region(start, stop), 256)
    assert found == (blocks and Region(blocks[:1], blocks[1:]))


def test_a_border_inside_a_block_is_refused():
    share = [PARAM, SCALE], VALUES
    refuse_divided_blocks([share], {"w": WHOLE}, {"w": Region((0, 0), (64, 64))})
    with pytest.raises(RunMismatch, match="blocks of 256 elements"):
        refuse_divided_blocks([share], {"w": WHOLE}, {"w": Region((0, 0), (63, 64))})


def test_a_mixture_that_a_run_has_is_refused_on_other_ranks():
    """As ranks with unlike versions of torchao might write it."""
    shares = [([PARAM], VALUES), ([PARAM], {})]
    refuse_divided_blocks(shares[:1], {"w": WHOLE}, {"w": ALL})
    with pytest.raises(RunMismatch, match="by some ranks"):
        refuse_divided_blocks(shares, {"w": WHOLE}, {"w": ALL})
