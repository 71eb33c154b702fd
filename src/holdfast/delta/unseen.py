"""Unseen: parameters that something else than an optimizer changes, which records do not hold.

Each tensor counts its changes in place. The count moves by what an optimizer does, and by what is done to the tensor
itself; not by what is done through ``.data`` or NumPy.
"""

from __future__ import annotations

import warnings

import torch

from ..errors import BadInput
from ..state.live import LiveState

PATIENCE = 1000
"""Iterations, more than gradients are accumulated over."""


class Unseen:
    """Of the parameters of ``state``. ``settle`` at the end of each step, ``stepped`` after each optimizer's."""

    def __init__(self, state: LiveState) -> None:
        self._told = False
        self._strange = 0
        self.watch(state)

    def watch(self, state: LiveState) -> None:
        """From here on ``state`` says what there is."""
        self._state = state
        self._of: list[list[int]] = [[] for _ in state.optimizers]
        for place, parameter in enumerate(state.parameters):
            index = state.optimizer_of(parameter)
            if index is not None:
                self._of[index].append(place)
        self.settle()

    def settle(self) -> None:
        """What parameters are now is known."""
        self._counts = [changes_of(p.parameter) for p in self._state.parameters]

    def stepped(self, index: int) -> None:
        """What optimizer ``index`` has done is known."""
        for place in self._of[index]:
            self._counts[place] = changes_of(self._state.parameters[place].parameter)

    def found(self, updated: bool) -> bool:
        """Whether parameters were changed otherwise, with a warning at the first time.

        Raises ``BadInput`` if that went on for ``PATIENCE`` iterations in which no optimizer ``updated`` any: nothing
        of the run would be recorded.
        """
        both = zip(self._state.parameters, self._counts, strict=True)
        names = [p.name for p, count in both if changes_of(p.parameter) != count]
        self._strange = self._strange + 1 if names and not updated else 0
        if not names:
            return False
        which = names[0] + (f" and {len(names) - 1} others" if names[1:] else "")
        if self._strange >= PATIENCE:
            raise BadInput(
                f"{which} changed in each of the last {PATIENCE} iterations, and none of the optimizers that the"
                " Checkpointer was given has stepped, so nothing could be recorded. Give it the optimizer whose step()"
                " the script calls; one that wraps another is given as the one inside."
            )
        self.settle()
        if not self._told:
            self._told = True
            warnings.warn(
                f"{which} changed otherwise than by a step of an optimizer that the Checkpointer was given, which no"
                " record would bring back: a base is made after every such step, which takes long. Pass what changes"
                " them as after_update=: then it is done in a replay, too.",
                stacklevel=6,
            )
        return True


def changes_of(tensor: torch.Tensor) -> int:
    """How often it was changed in place; of a tensor of inference mode nobody counts."""
    return 0 if tensor.is_inference() else tensor._version
