"""The user state of an engine's run: what the script holds that belongs to every commit besides the model's tensors.

It is stored by value with each commit: random generators, hyper-parameters, schedule and data position. Called by
``offload`` and the engine.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ..errors import RunMismatch
from ..optim.joined import kind_name
from ..state.capture import Captured, aliases_of
from ..state.encoding import decode, encode
from ..state.progress import (
    UngivenSchedulers,
    adopt,
    hyper_parameters,
    load_hyper_parameters,
    needs_arguments,
    override_warnings,
    random_state,
    refuse_other_groups,
    refuse_other_ranks,
    refuse_place_of_first,
)

SAID = {
    "dtype": "precision",
    "clip_norm": "the norm of clipping",
    "clipping": "the mode of clipping",
    "quantised_compute_dtype": "compute_dtype of quantised layers",
}
"""The word for a setting in messages, where its key in a commit is another one."""


@dataclass(frozen=True)
class UserState:
    """The optimizer (for its hyper-parameters), the scheduler and the loader of a run."""

    model: Captured
    optimizer: torch.optim.Optimizer
    scheduler: Any = None
    loader: Any = None
    settings: dict[str, Any] = field(default_factory=dict)
    """Choices of the run that affect its numbers, by name, as JSON."""
    given: list[dict[str, Any]] = field(default_factory=list)
    """The ``hyper_parameters`` as the script had them, before a resume replaces them by the run's."""
    ranks: int = 1

    def now(self) -> dict[str, Any]:
        """Return random generators, hyper-parameters, schedule and data position, as JSON.

        Raises ``BadInput`` naming the first value that cannot be stored by value.
        """
        progress = {
            "random": encode(random_state()),
            "optimizer": kind_name(self.optimizer),
            "groups": hyper_parameters(self.optimizer.param_groups),
            "given": self.given,
            "group_parameters": self.group_parameters(),
            "settings": self.settings,
        }
        if self.ranks > 1:
            progress["ranks"] = self.ranks
        if aliases := aliases_of(self.model.parameters):
            progress["aliases"] = aliases
        for name, thing in self._stateful():
            progress[name] = encode(thing.state_dict(), f"{name}.state_dict()")
        return progress

    def show_all(self, progresses: Sequence[Mapping[str, Any]]) -> None:
        """Give a loader with an attribute ``of_ranks`` its states on all ranks of the run, if those are others.

        Each has the ``results`` of the newest step as well. Called before ``restore``.
        """
        if len(progresses) != self.ranks and hasattr(self.loader, "of_ranks"):
            self.loader.of_ranks = [
                decode(each["loader"]) | {"results": each.get("results")}
                for each in progresses
                if "loader" in each
            ]

    def restore(self, progress: dict[str, Any]) -> None:
        """Set hyper-parameters, scheduler and loader to the progress of a commit.

        Raises ``RunMismatch``. Warns of what the run did not have, or had otherwise.
        """
        self._refuse_another(progress)
        self.check_place(progress)
        self._warn_of_changes(progress)
        load_hyper_parameters(self.optimizer.param_groups, progress["groups"])
        for name, thing in self._stateful():
            if name in progress:
                thing.load_state_dict(decode(progress[name]))

    def check_place(self, progress: dict[str, Any]) -> None:
        """Raise ``RunMismatch`` if the loader cannot continue from a progress that another number of ranks wrote."""
        refuse_other_ranks(self.loader, progress, self.ranks)

    def check_source(self, progress: dict[str, Any]) -> None:
        """Raise ``RunMismatch`` if the loader cannot begin from the progress of a state that several ranks wrote."""
        self.check_place(progress)
        refuse_place_of_first(self.loader, progress)

    def adopt(self, progress: dict[str, Any]) -> list[str]:
        """Set scheduler and loader to the progress of another run. Returns sentences about what differs from it."""
        return adopt(dict(self._stateful()), progress)

    @property
    def is_late(self) -> bool:
        """True if the loader has the state of a step when the loop's own code of the step is over, not before."""
        return getattr(self.loader, "is_late", False)

    def step_scheduler(self) -> None:
        """Step the scheduler, unless the script has to step it with a value of its own."""
        if self.scheduler is not None and not needs_arguments(self.scheduler):
            self.scheduler.step()

    def look_for_forgotten(self) -> None:
        """Warn of a scheduler that is in use and was not passed to ``offload``."""
        self._forgotten.look(
            "Pass it as scheduler=: the engine steps it, and the script no longer does; one whose step() takes a metric"
            " the script goes on stepping.",
            stacklevel=4,
        )

    @cached_property
    def _forgotten(self) -> UngivenSchedulers:
        return UngivenSchedulers([self.optimizer], [self.scheduler, self.loader])

    def hand_over(self) -> None:
        """Mark the optimizer as stepped, so that a scheduler does not warn of one that is not stepped.

        From here on the engine steps instead of the optimizer.
        """
        if getattr(self.optimizer.step, "_wrapped_by_lr_sched", False):
            self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def group_parameters(self) -> list[list[str]]:
        """Return, for each parameter group, the names of the trained parameters that its hyper-parameters apply to."""
        groups: list[list[str]] = [[] for _ in self.optimizer.param_groups]
        for parameter in self.model.parameters:
            if parameter.trained and parameter.group is not None:
                groups[parameter.group].append(parameter.name)
        return groups

    def _stateful(self) -> list[tuple[str, Any]]:
        things = (("scheduler", self.scheduler), ("loader", self.loader))
        return [(name, thing) for name, thing in things if thing is not None]

    def _warn_of_changes(self, progress: dict[str, Any]) -> None:
        for name, thing in self._stateful():
            if name not in progress:
                warnings.warn(
                    f"the run had no {name} so far: this {type(thing).__name__} starts from its own state, not "
                    "from the run's step",
                    stacklevel=6,
                )
        saved = progress.get("settings", {})  # absent in a run of an earlier version
        changed = [
            f"{SAID.get(key, key)} was {saved[key]} and is {value}"
            for key, value in self.settings.items()
            if saved.get(key, value) != value
        ]
        if changed:
            warnings.warn(
                f"this run goes on with other settings, so with other numbers than without them: {'; '.join(changed)}",
                stacklevel=6,
            )
        before = progress.get("given", [])  # absent in a run of an earlier version
        kept = override_warnings(before, progress["groups"], self.given, "offload returns")
        if kept is not None:
            warnings.warn(kept, stacklevel=6)

    def _refuse_another(self, progress: dict[str, Any]) -> None:
        given = dict(self._stateful())
        for name in ("scheduler", "loader"):
            if name in progress and name not in given:
                raise RunMismatch(
                    f"the run has a {name}, and none was passed, so its position would be lost. Pass {name}= as when "
                    "the run was made."
                )
        refuse_other_groups("the optimizer", progress["groups"], self.optimizer.param_groups)
        saved = progress.get("group_parameters", [])  # absent in a run of an earlier version
        was_in = {name: group for group, names in enumerate(saved) for name in names}
        for group, names in enumerate(self.group_parameters()):
            for name in names:
                if was_in.get(name, group) != group:
                    raise RunMismatch(
                        f"{name} was in parameter group {was_in[name]} of the run's optimizer and is in group {group} "
                        "of this one. Build it with the groups that the run was made with, in the same order."
                    )
        theirs, ours = progress.get("optimizer"), kind_name(self.optimizer)
        if theirs not in (None, ours):
            raise RunMismatch(
                f"the run was made with {theirs}, this optimizer is {ours}. Use {theirs}, or another directory."
            )
