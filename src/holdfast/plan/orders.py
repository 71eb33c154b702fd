"""Orders: which way micro-batches go through a block of the vertical schedule, which blocks are updated late, and
which are not computed again in the backward pass.

``"plain"`` is ascending everywhere, so that gradients are added as in an ordinary accumulation loop. ``"snake"``
turns at every block: ascending through even ones, descending through odd ones, forward and backward alike. So
the last micro-batch of a block is the first of the next, and what flows between the two stays on the device.
Gradients of odd blocks are then added the other way round.

The delayed fraction (``alpha -> delayed_fraction``) is of the blocks: the updates of those it chooses are left to
the next forward pass, whole and spread evenly over the model.
"""

from __future__ import annotations

from collections.abc import Sequence

from .work import StepShape, spread

ORDERS = ("plain", "snake")


def micro_batches(shape: StepShape, block: int) -> Sequence[int]:
    """The micro-batches in the order in which they go through ``block``.

    >>> list(micro_batches(StepShape(micro_batches=3, order="snake"), 1))
    [2, 1, 0]
    """
    ascending = range(shape.micro_batches)
    return ascending[::-1] if shape.order == "snake" and block % 2 else ascending


def input_stays(shape: StepShape, block: int, micro_batch: int) -> bool:
    """Is what ``block`` takes from the block before still on the device when it is wanted?"""
    return shape.order == "snake" and block > 0 and micro_batch == micro_batches(shape, block)[0]


def grad_stays(shape: StepShape, block: int, micro_batch: int) -> bool:
    """Is the gradient of what ``block`` took still on the device when the block before wants it?"""
    return shape.order == "snake" and block > 0 and micro_batch == micro_batches(shape, block)[-1]


def delayed_blocks(shape: StepShape, count: int) -> tuple[bool, ...]:
    """Of ``count`` blocks, those that are updated beside the next forward pass. The last block is the first to be
    chosen: it is wanted last.

    >>> delayed_blocks(StepShape(micro_batches=1, delayed_fraction=0.5), 4)
    (False, True, False, True)
    """
    return spread(count, shape.delayed_fraction)


def kept_blocks(shape: StepShape, count: int) -> tuple[bool, ...]:
    """Of ``count`` blocks, those whose activations stay from their forward pass to their backward pass. The last has no
    forward pass of its own.

    >>> kept_blocks(StepShape(micro_batches=1, recomputed_fraction=0.75), 5)
    (False, False, False, True, False)
    """
    return (*spread(count - 1, 1 - shape.recomputed_fraction), False)
