"""Orders of the vertical schedule: of micro-batches through a block, and which blocks are delayed or not recomputed.

``"plain"`` is ascending everywhere, so that gradients are added as in an ordinary accumulation loop. ``"snake"`` turns
at every block: ascending through even ones, descending through odd ones, forward and backward alike. So the last
micro-batch of a block is the first of the next, and the tensors between the two stay on the device. Gradients of odd
blocks are then added in reverse order.

The delayed fraction (``alpha -> delayed_fraction``) is of the blocks: the updates of those blocks are left to the next
forward pass, whole and spread evenly over the model.
"""

from __future__ import annotations

from collections.abc import Sequence

from .work import StepShape, spread

ORDERS = ("plain", "snake")


def micro_batches(shape: StepShape, block: int) -> Sequence[int]:
    """Return the micro-batches in the order in which they go through ``block``.

    >>> list(micro_batches(StepShape(micro_batches=3, order="snake"), 1))
    [2, 1, 0]
    """
    ascending = range(shape.micro_batches)
    return ascending[::-1] if shape.order == "snake" and block % 2 else ascending


def input_stays(shape: StepShape, block: int, micro_batch: int) -> bool:
    """Return whether the input of ``block`` is still on the device when ``block`` needs it."""
    return shape.order == "snake" and block > 0 and micro_batch == micro_batches(shape, block)[0]


def grad_stays(shape: StepShape, block: int, micro_batch: int) -> bool:
    """Return whether the gradient of the block's input is still on the device when the block before needs it."""
    return shape.order == "snake" and block > 0 and micro_batch == micro_batches(shape, block)[-1]


def delayed_blocks(shape: StepShape, count: int) -> tuple[bool, ...]:
    """Return for each of ``count`` blocks whether it is updated beside the next forward pass.

    The last block is the first to be chosen, because its parameters are needed last.

    >>> delayed_blocks(StepShape(micro_batches=1, delayed_fraction=0.5), 4)
    (False, True, False, True)
    """
    return spread(count, shape.delayed_fraction)


def kept_blocks(shape: StepShape, count: int) -> tuple[bool, ...]:
    """Return for each of ``count`` blocks whether its activations stay from its forward to its backward pass.

    The last block has no forward pass of its own.

    >>> kept_blocks(StepShape(micro_batches=1, recomputed_fraction=0.75), 5)
    (False, False, False, True, False)
    """
    return (*spread(count - 1, 1 - shape.recomputed_fraction), False)
