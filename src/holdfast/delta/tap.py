"""Tap: sees what each optimizer step consumes, and copies it before the step can change it.

Attached as a pre-hook of each optimizer, it runs after averaging, unscaling and clipping, and after other pre-hooks.
What is copied is what the codec makes of the gradients; which of them are None, the hyper-parameters, and what a fused
optimizer takes from a ``GradScaler`` are kept by value.
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, cast

import torch

from holdfast import failpoints

from ..errors import BadInput
from ..state.cuts import is_distributed, local_of
from ..state.live import LiveState
from ..state.plain import is_plain, odd_kind
from ..state.progress import hyper_parameters
from .closures import WAY_OUT, Computed
from .codecs import Codec, Trained, trained_of
from .drawing import drawn_since, generators
from .slots import Slot
from .unseen import Unseen

CONSUMED = ("grad_scale", "found_inf")
"""Attributes by which a ``GradScaler`` hands over to a fused optimizer."""

OPTIONAL = ("coefficient", "arguments", "drawn", "drawn_after", "own")
"""Of an update, what records have only where there is any."""


@dataclass
class Update:
    """One optimizer step: its hyper-parameters by group, as JSON, and the names of the parameters without gradient."""

    optimizer: int
    slot: Slot | None
    """Whose memory ``part`` is; None where there was no room."""
    part: memoryview | None
    """What is to be written of the gradients; None where there is none of them."""
    codec: dict[str, Any]
    groups: list[dict[str, Any]]
    without: list[str]
    consumed: dict[str, float]
    coefficient: Any = None
    """As JSON, what the gradients in the slot are still to be multiplied by; None where they are as consumed."""
    arguments: Any = None
    """As JSON, what ``step`` was given, by position and by name; None where that was nothing."""
    drawn: Any = None
    """As JSON, the random generators before the step; None where it drew nothing."""
    drawn_after: Any = None
    """The same of ``after_update``, with the last update of an iteration."""
    own: Any = None
    """As JSON, what else than the parameters' state of the optimizer was changed since its last step; None if nothing
    was."""

    def about(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "optimizer": self.optimizer,
            "groups": self.groups,
            "without": self.without,
            "consumed": self.consumed,
            "codec": self.codec,
            **{name: value for name in OPTIONAL if (value := getattr(self, name)) is not None},
        }


class Tap:
    """Collects the updates of an iteration. ``take_slot`` gives memory for the next, or None."""

    def __init__(
        self,
        state: LiveState,
        codec: Codec,
        take_slot: Callable[[], Slot | None],
        clip_norm: float | None = None,
    ) -> None:
        self._codec, self._take_slot, self._clip_norm = codec, take_slot, clip_norm
        self._see(state)
        self.updates: list[Update] = []
        """Since the iteration began."""
        self.changed = False
        """Whether a step could not be recorded, as all ranks know: slots have no place for a gradient (a parameter was
        added, or is trained now, or left a group, or a group came or went), another pre-hook was to run after this one,
        or an update failed."""
        self.lost = ""
        """Why the step cannot be brought back by a record, as this rank alone may know: parameters or optimizers' state
        were changed otherwise than by steps, or gradients had no room."""
        self.begins: Callable[[], None] = lambda: None
        """Called before the first update of an iteration."""
        self.compiled = False
        """Whether a step was one that torch.compile made."""
        self.seconds = 0.0
        """Spent in hooks since the iteration began."""
        self._hooks: list[Any] = []
        self._switched: list[torch.optim.Optimizer] = []
        self._ended: list[Any] = []
        self._open = [0 for _ in state.optimizers]
        self._generators: list[Any] = [None for _ in state.optimizers]
        """By optimizer, as they were before the update that is open."""
        self._changes = Unseen(state)
        self._settled = False
        """Whether nothing that is watched has been changed on purpose since the iteration's changes were looked for."""

    def watch(self, state: LiveState) -> None:
        """From here on ``state`` says what there is."""
        self._see(state)
        self.changed = False
        self._changes.watch(state)

    def _see(self, state: LiveState) -> None:
        self._state, self._places = state, _places(state)
        self._stored = {parameter.name for parameter in state.stored}
        self._members = [_members(optimizer) for optimizer in state.optimizers]

    def attach(self) -> None:
        """Raises ``BadInput`` if an optimizer has another tap."""
        for index, optimizer in enumerate(self._state.optimizers):
            if any(isinstance(hook, _Hook) for hook in optimizer._optimizer_step_pre_hooks.values()):
                raise BadInput(
                    f"the steps of this {type(optimizer).__name__} are recorded by another Checkpointer. Close it"
                    " first; copies of one run in several places are made by remote= or `holdfast push`."
                )
            hook = optimizer.register_step_pre_hook(_Hook(self, index))
            self._hooks.append((optimizer, hook))
            ended = optimizer.register_step_post_hook(_end_hook_of(self, index))
            self._ended.append(ended)
            # first, since what other hooks change is not the optimizer's
            cast("OrderedDict[int, Any]", optimizer._optimizer_step_post_hooks).move_to_end(
                ended.id, last=False
            )
            self._watch_modes(optimizer)
        self._changes.settle()

    def _watch_modes(self, optimizer: Any) -> None:
        """Have it known when ``train()`` or ``eval()`` of a schedule-free optimizer has moved parameters, which may be
        done where no count of changes tells."""
        for name in ("train", "eval"):
            if not (
                callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))
            ):
                return
            setattr(optimizer, name, partial(self._switch, optimizer, getattr(optimizer, name)))
        self._switched.append(optimizer)

    def _switch(self, optimizer: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = [group.get("train_mode", self) for group in optimizer.param_groups]
        made = method(*args, **kwargs)
        if self in before or before != [group.get("train_mode") for group in optimizer.param_groups]:
            self._changes.settle()
            self.lost = "train() or eval() of the optimizer has moved parameters since the step before"
        return made

    def detach(self) -> None:
        for optimizer in self._switched:
            vars(optimizer).pop("train", None), vars(optimizer).pop("eval", None)
        self._switched.clear()
        for hook in [*(hook for _, hook in self._hooks), *self._ended]:
            hook.remove()
        self._hooks.clear()
        self._ended.clear()

    def settle(self) -> None:
        """The step is over. Other pre-hooks, which may change gradients, run first from here on."""
        if not self._settled:
            self._changes.settle()
        self._changes.idle = 0  # what was skipped is a step, too
        self.lost = ""
        for optimizer, hook in self._hooks:
            optimizer._optimizer_step_pre_hooks.move_to_end(hook.id)

    def take(self) -> list[Update]:
        """The updates of the iteration, which ends. ``changed`` is set if one of them did not return, and ``lost`` if
        parameters were changed otherwise than by them.

        Raises ``BadInput`` after a step that was compiled."""
        if self.compiled:
            raise BadInput(
                "the optimizer's step was compiled, and has other bits than its own code, with which records are"
                " replayed, so this step could not be brought back. Compile the model, and call optimizer.step()"
                " outside of what torch.compile is given."
            )
        updates, self.updates = self.updates, []
        self._look_for_changes(bool(updates))
        if updates and any(self._open):
            self.changed = True
            self._open = [0 for _ in self._open]
        return updates

    @property
    def has_changes(self) -> bool:
        """Whether parameters or optimizers' state are not as the last step left them."""
        return bool(self.lost) or self._changes.is_other or any(own.has_changed for own in self._state.own)

    def saved(self) -> None:
        """A base of what there is now was made."""
        self._changes.settle()
        self.lost = ""

    def _look_for_changes(self, updated: bool, index: int | None = None) -> None:
        """Of optimizer ``index``, or of all."""
        self._settled = not self.changed and not any(self._open)
        if self._settled and self._changes.found(updated, index):
            self.lost = self.lost or (
                "parameters or an optimizer's state were changed otherwise than by an optimizer's step"
            )

    def after_step(self, index: int) -> None:
        """The post-hook of optimizer ``index``, which an update that fails does not reach."""
        self._open[index] -= 1
        if self._open[index]:
            return
        self._changes.stepped(index)
        if self._state.own:
            self._state.own[index].stepped(self._state)
        update = next((update for update in reversed(self.updates) if update.optimizer == index), None)
        if update is not None:
            update.drawn = self._drawn_since(self._generators[index])

    def do_after(self, after_update: Callable[[], None], updates: list[Update]) -> None:
        """Call ``after_update``, after the last of ``updates``."""
        before = generators()
        self._settled = False
        after_update()
        updates[-1].drawn_after = self._drawn_since(before)

    def _drawn_since(self, before: list[Any]) -> Any:
        drawn = drawn_since(before)
        if drawn is not None and len(self._state.stored) < len(self._state.parameters):
            self.lost = (
                "it drew random numbers, and the ranks that hold a parameter may each have drawn others"
            )
        return drawn

    def is_open(self, index: int) -> bool:
        """Whether a step of optimizer ``index`` has begun, and has not ended."""
        return self._open[index] > 0

    def before_step(self, index: int, args: tuple, kwargs: dict[str, Any], within: bool) -> None:
        """The pre-hook of optimizer ``index``; ``within`` another step of it."""
        started = time.perf_counter()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None and not isinstance(closure, Computed):
            raise BadInput(
                "an optimizer step with a closure may compute several gradients, of which only the last could be"
                " recorded. If it calls the closure once, call closure() yourself and then optimizer.step()."
                f" If it calls it more often, as SAM does, its steps cannot be recorded. {WAY_OUT}"
            )
        optimizer = self._state.optimizers[index]
        if self._open[index] and within:  # a subclass calls the step() it overrides: part of the open update
            self._open[index] += 1
            return
        if self._open[index]:  # which has raised, and what it has changed by then is in no record
            self._open[index], self.changed = 0, True
        for flattened in self._state.flattened:
            flattened.held()  # gathered ones it would update for nothing
        if not self.updates:
            self.begins()
        self._look_for_changes(True, index)  # by the script, since the last step, or by other pre-hooks
        trained, without = [], []
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            name = self._state.name_of.get(id(parameter), "")
            if parameter.grad is None:
                without.append(name)
            else:
                _refuse_odd(name, parameter.grad)
                trained.append((name, parameter))
        scaled = _consumed(optimizer)
        _refuse_scaled(self._codec, scaled)
        slot = self._slot_for(index)
        # All ranks see the same here, whatever each of them stores: they go on without a record together.
        known = _fit(trained, self._places[index]) and _members(optimizer) == self._members[index]
        known &= self._have_places(index)
        room = slot if known and self._is_last(index) else None
        if slot is not room:
            self.changed = True
        update = Update(
            index, slot, None, self._codec.about(), hyper_parameters(optimizer.param_groups), without, scaled,
            arguments=_arguments(args[1:], kwargs, closure),
            own=self._state.own[index].changed(self._state) if self._state.own else None,
        )  # fmt: skip
        self.updates.append(update)
        try:
            update.part, update.coefficient = self._consume(
                room, index, trained, scaled.get("found_inf", 0.0) > 0
            )
        except BaseException:  # what it has changed by then is in no record
            self.changed = True
            raise
        failpoints.reach("after_gradients_copied")
        self._open[index] += 1
        self._generators[index] = generators()
        if room is not None and update.part is None:
            self.lost = "its gradients were denser than a record has room for"
        self.seconds += time.perf_counter() - started

    def _consume(
        self, slot: Slot | None, index: int, trained: Trained, skipped: bool
    ) -> tuple[memoryview | None, Any]:
        """Make the gradients what the optimizer is to consume, and put that into ``slot`` where there is one. Returns
        the part to be written, and what it is still to be multiplied by: nothing here."""
        self._clipped(index, {name: p.grad for name, p in trained if p.grad is not None})
        started = time.perf_counter()
        consumed = self._codec.consume(trained, self._state.residuals, skipped)  # alike on all ranks
        if self._codec.changes_training:
            self.seconds -= time.perf_counter() - started  # what training asked for, recorded or not
        if slot is None:
            return None, None
        stored = {name: what for name, what in consumed.items() if name in self._stored}
        return self._codec.write(slot, index, stored), None

    def _clipped(self, index: int, grads: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """Clip ``grads``, if that was asked for. Returns what they were multiplied by."""
        if self._clip_norm is None or not grads:
            return None
        if getattr(self._state.optimizers[index], "grad_scale", None) is not None:
            raise BadInput(
                "clip_norm= would clip gradients that are still scaled. Call scaler.unscale_(optimizer) before"
                " scaler.step(optimizer)."
            )
        in_order = [grads[p.name] for p in self._state.parameters if p.name in grads]
        return clip(in_order, self._clip_norm)

    def _is_last(self, index: int) -> bool:
        optimizer, hook = self._hooks[index]
        return next(reversed(optimizer._optimizer_step_pre_hooks)) == hook.id

    def _have_places(self, index: int) -> bool:
        """Whether slots have a place for every flattened parameter of an optimizer that is trained now: of one of which
        a rank has nothing it sees no gradient."""
        mine = (p for p in self._state.flattened if self._state.optimizer_of(p) == index)
        return all(p.name in self._places[index] for p in mine if p.parameter.requires_grad)

    def _slot_for(self, index: int) -> Slot | None:
        """The iteration's slot, or another one if this optimizer has stepped before in it and a record is made."""
        if self.updates and (self.changed or all(update.optimizer != index for update in self.updates)):
            return self.updates[-1].slot
        return self._take_slot()


@dataclass(frozen=True, eq=False)
class _Hook:
    """The pre-hook of one optimizer."""

    tap: Tap
    index: int

    def __call__(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():  # what is traced here is all that happens in each later call
            self.tap.compiled = True
        else:
            within = self.tap.is_open(self.index) and _is_within(optimizer, sys._getframe(1))
            self.tap.before_step(self.index, args, kwargs, within)


def _is_within(optimizer: torch.optim.Optimizer, frame: FrameType) -> bool:
    """Whether ``frame``, which torch wraps around a step of ``optimizer``, was called by such another one."""
    caller = frame.f_back
    while caller is not None:
        if caller.f_code is frame.f_code and caller.f_locals.get("self") is optimizer:
            return True
        caller = caller.f_back
    return False


def _end_hook_of(tap: Tap, index: int) -> Callable[..., None]:
    def end(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            tap.after_step(index)

    return end


def clip(grads: list[torch.Tensor], max_norm: float) -> torch.Tensor:
    """What ``torch.nn.utils.clip_grad_norm_`` does, for gradients. Returns what they were multiplied by. Where they are
    shards all ranks have to call it."""
    norm = torch.nn.utils.get_total_norm(grads)
    norm = cast(Any, norm).full_tensor() if is_distributed(norm) else norm
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    scale(grads, coefficient)
    return coefficient


@torch.no_grad()
def scale(grads: list[torch.Tensor], coefficient: torch.Tensor) -> None:
    for grad in grads:
        local_of(grad).mul_(coefficient.to(grad.device))


Place = tuple[tuple[int, ...], torch.dtype, tuple[int, ...]]
"""Shape and dtype of a gradient that slots have room for, and how its parameter lies in memory, of which bases tell."""


def _members(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """By group, which parameters it has."""
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


def _places(state: LiveState) -> list[dict[str, Place]]:
    """For each optimizer, by parameter: of those, too, that other ranks store."""
    return [
        {p.name: (state.boxes[p.name].shape, p.parameter.dtype, p.parameter.stride()) for p in trained}
        for trained in trained_of(state, everywhere=True)
    ]


def _fit(trained: Trained, places: dict[str, Place]) -> bool:
    """Whether each gradient has a place of its shape and dtype, and each parameter lies as it did."""
    return all(
        p.grad is not None and places.get(name) == (tuple(local_of(p.grad).shape), p.grad.dtype, p.stride())
        for name, p in trained
    )


def _refuse_scaled(codec: Codec, consumed: dict[str, float]) -> None:
    if codec.error_feedback and "grad_scale" in consumed:
        raise BadInput(
            "a fused optimizer is given gradients that are still scaled, so what they lose could not be added to the"
            " next ones. Call scaler.unscale_(optimizer) before scaler.step(optimizer)."
        )


def _refuse_odd(name: str, grad: torch.Tensor) -> None:
    if not is_plain(grad):
        raise BadInput(
            f"the gradient of {name} is {odd_kind(grad)}, which records do not hold. Build an embedding with"
            " sparse=False; make other gradients plain tensors before the step (parameter.grad.to_dense())."
        )


def _arguments(args: tuple, kwargs: dict[str, Any], closure: Computed | None) -> Any:
    """As JSON, but for a closure that is None; of another what a replay needs. Raises ``BadInput`` for what no record
    holds by value."""
    named = {name: value for name, value in kwargs.items() if name != "closure"}
    args = args if closure is None else args[1:]
    loss = None if closure is None else closure.about()
    if not named and all(value is None for value in args) and loss is None:
        return None
    for value in (*args, *named.values()):
        if not isinstance(value, (bool, int, float, str, type(None))):
            raise BadInput(
                f"the optimizer's step() was given a {type(value).__name__}, and records hold numbers and text. Give"
                " it those (tensor.item()), or put what it needs into param_groups before."
            )
    return [list(args), named] if loss is None else [list(args), named, loss]


def _consumed(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    found = {name: getattr(optimizer, name, None) for name in CONSUMED}
    return {name: float(value) for name, value in found.items() if value is not None}
