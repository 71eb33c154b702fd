"""One optimizer made of several, each for its own parameters, such as Muon for matrices and AdamW for the rest.

No parameter may be in two of them. Groups and state are those of the members, so each is updated, stored and restored
as by itself. Used by scripts, and by ``holdfast train`` with Muon.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import OptimizerNotSupported
from .declared_state import loss_of
from .mezo import MeZO


class Joined(torch.optim.Optimizer):
    """Several ``optimizers``, which share no parameter, as one.

    Its groups are theirs, one after another, and its state is theirs, so one scheduler drives all of them.

    >>> matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    >>> both = Joined(torch.optim.Muon([matrix], lr=0.1), torch.optim.AdamW([vector], lr=0.01))
    >>> [group["lr"] for group in both.param_groups]
    [0.1, 0.01]
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        if not optimizers or any(isinstance(optimizer, Joined) for optimizer in optimizers):
            raise ValueError("Joined() takes one optimizer or more, none of which is joined itself")
        if any(isinstance(optimizer, MeZO) for optimizer in optimizers):
            raise ValueError("MeZO takes no gradients, so it cannot be joined with optimizers that do")
        self.members = optimizers
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        state = {param: held for optimizer in optimizers for param, held in optimizer.state.items()}
        super().__init__(groups, {})
        self.state.update(state)
        self._share()

    @property
    def kind(self) -> str:
        """The name of the class and those of its members, in order."""
        return f"Joined({', '.join(type(optimizer).__name__ for optimizer in self.members)})"

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Do one step of each member."""
        loss = loss_of(closure)
        for optimizer in self.members:
            optimizer.step()
        return loss

    def load_state_dict(self, state_dict: Any) -> None:
        """Load each member's share of a state dict as the member would."""
        self.state.keys()  # raises here while an engine holds the state, before any member has changed
        numbers = iter(state_dict["param_groups"])
        for optimizer in self.members:
            groups = [next(numbers) for _ in optimizer.param_groups]
            known = {number for group in groups for number in group["params"]}
            state = {number: held for number, held in state_dict["state"].items() if number in known}
            optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.param_groups = [group for optimizer in self.members for group in optimizer.param_groups]
        for optimizer in self.members:
            self.state.update(optimizer.state)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if len(self.param_groups) == sum(len(optimizer.param_groups) for optimizer in self.members):
            raise ValueError(
                "a parameter group is added to one of the optimizers that are joined, before they are"
            )
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise OptimizerNotSupported(
            "joined optimizers cannot be copied or sent to another process. A Checkpointer takes them as a list:"
            " optimizer=[one, other]."
        )

    def _share(self) -> None:
        for optimizer in self.members:
            optimizer.state = self.state


def kind_name(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of an optimizer's class, with those that it joins, as a run records it."""
    return optimizer.kind if isinstance(optimizer, Joined) else type(optimizer).__name__


def member_of(optimizer: torch.optim.Optimizer, number: int) -> torch.optim.Optimizer:
    """Return the optimizer that updates group ``number``: ``optimizer`` itself, or one that it joins."""
    if not isinstance(optimizer, Joined):
        return optimizer
    return next(
        member
        for member in optimizer.members
        if any(g is optimizer.param_groups[number] for g in member.param_groups)
    )
