"""Optimizer hooks that copy what each optimizer step consumes, before the step can change it.

The hook of each optimizer is a pre-hook of its ``step``. It runs after averaging, unscaling and clipping, and after
other pre-hooks. It copies what the codec makes of the gradients. It keeps by value which gradients are None, the
hyper-parameters, and what a fused optimizer takes from a ``GradScaler``. Called by the training thread, inside
``optimizer.step``.
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

from ...accelerators import is_capturing
from ...errors import BadInput
from ...state.layout.regions import is_distributed, local_of
from ...state.live_state import LiveState
from ...state.plain_tensors import is_plain, unsupported_kind
from ...state.progress import drawn_since, generator_states, hyper_parameters
from ..arithmetic import autocast_now
from ..compression.codecs import Codec, Trained, trained_of
from .closures import WAY_OUT, ComputedClosure
from .mutation_check import MutationCheck
from .staging_buffers import StagingBuffer

CONSUMED = ("grad_scale", "found_inf")
"""Attributes through which a ``GradScaler`` passes values to a fused optimizer."""
OPTIONAL = (
    "coefficient",
    "arguments",
    "drawn",
    "drawn_after",
    "own",
    "autocast",
    "autocast_after",
    "strides",
)
"""Fields of an update that records contain only where they have a value."""


@dataclass
class Update:
    """One optimizer step: its hyper-parameters by group, as JSON, and the names of parameters without gradient."""

    optimizer: int
    slot: StagingBuffer | None
    """The staging buffer that owns ``part``; None where there was no room."""
    part: memoryview | None
    """The memory to be written for the gradients; None where there is none."""
    codec: dict[str, Any]
    groups: list[dict[str, Any]]
    without: list[str]
    consumed: dict[str, float]
    coefficient: Any = None
    """The factor, as JSON, by which the copied gradients are still to be multiplied; None where they are as consumed.
    """
    arguments: Any = None
    """The arguments of ``step``, by position and by name, as JSON; None without any."""
    drawn: Any = None
    """The state of the random generators before the step, as JSON; None where the step drew nothing."""
    drawn_after: Any = None
    """The state of the generators before ``after_update``, in the last update of an iteration."""
    own: Any = None
    """The optimizer's own state, besides that of parameters, that changed since its last step, as JSON; None if none.
    """
    autocast: Any = None
    """The autocast in which the step was made, as JSON, empty where it was off. Records of earlier versions lack it."""
    autocast_after: Any = None
    """The autocast in which ``after_update`` was called, in the last update of an iteration; None without."""
    strides: Any = None
    """The strides of gradients that lie otherwise in memory than their parameters, by name; None if none does.

    Sums, and fused kernels, depend on them.
    """

    def about(self) -> dict[str, Any]:
        """Return the update as JSON."""
        return {
            "optimizer": self.optimizer,
            "groups": self.groups,
            "without": self.without,
            "consumed": self.consumed,
            "codec": self.codec,
            **{name: value for name in OPTIONAL if (value := getattr(self, name)) is not None},
        }


class OptimizerHooks:
    """A collector of the updates of an iteration. ``take_slot`` returns memory for the next one, or None."""

    def __init__(
        self,
        state: LiveState,
        codec: Codec,
        take_slot: Callable[[], StagingBuffer | None],
        clip_norm: float | None = None,
    ) -> None:
        self._codec, self._take_slot, self._clip_norm = codec, take_slot, clip_norm
        self._see(state)
        self.updates: list[Update] = []
        """The updates since the iteration began."""
        self.changed = False
        """True if a step could not be recorded, for a reason that all ranks see.

        One reason is that staging buffers have no place for a gradient: a parameter was added, is trained now, or left
        a group, or a group came or went. Others are that another pre-hook was to run after this one, or that an update
        failed.
        """
        self.lost = ""
        """The reason why no record can reproduce the step, which only this rank may know; empty without one.

        Parameters or optimizer state were changed by something else than steps, or gradients had no room.
        """
        self.begins: Callable[[], None] = lambda: None
        """Called before the first update of an iteration."""
        self.records: Callable[[], bool] = lambda: True
        """Returns whether the step is to have a record. If not, gradients are not copied."""
        self.compiled = False
        """True if torch.compile made a step."""
        self.seconds = 0.0
        """Seconds spent in hooks since the iteration began."""
        self._hooks: list[Any] = []
        self._switched: list[torch.optim.Optimizer] = []
        self._ended: list[Any] = []
        self._open = [0 for _ in state.optimizers]
        self._generators: list[Any] = [None for _ in state.optimizers]
        """The state of the random generators before the open update of each optimizer."""
        self._changes = MutationCheck(state)
        self._unseen = False
        """True if there were steps without records since the last scan for changes."""
        self._settled = False
        """True if no watched state was changed by intention since the last scan for changes."""

    def watch(self, state: LiveState) -> None:
        """Use ``state`` as the training state from here on."""
        self._see(state)
        self.changed = False
        self._changes.watch(state)

    def _see(self, state: LiveState) -> None:
        self._state, self._places = state, _places(state)
        self._stored = {parameter.name for parameter in state.stored}
        self._members = [_members(optimizer) for optimizer in state.optimizers]

    def attach(self) -> None:
        """Attach the hooks. Raises ``BadInput`` if an optimizer has another tap."""
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
            # first, since changes by other hooks are not the optimizer's
            cast("OrderedDict[int, Any]", optimizer._optimizer_step_post_hooks).move_to_end(
                ended.id, last=False
            )
            self._watch_modes(optimizer)
        self._changes.accept()

    def _watch_modes(self, optimizer: Any) -> None:
        """Notice when ``train()`` or ``eval()`` of a schedule-free optimizer moves parameters.

        Change counters may not show it.
        """
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
            self._changes.accept()
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

    def end_step(self) -> None:
        """End the step, and move this hook behind other pre-hooks, which may change gradients."""
        if not self._settled:
            self._changes.accept()
        self._changes.idle = 0  # a skipped step is a step, too
        self.lost = ""
        for optimizer, hook in self._hooks:
            optimizer._optimizer_step_pre_hooks.move_to_end(hook.id)

    def take(self) -> list[Update]:
        """Return the updates of the iteration, and end it.

        Sets ``changed`` if an update did not return, and ``lost`` if anything else changed parameters. Raises
        ``BadInput`` after a compiled step.
        """
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
    def is_stepping(self) -> bool:
        """Return whether the caller runs inside a step of an optimizer."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if any(frame.f_locals.get("self") is optimizer for optimizer in self._state.optimizers):
                return True
            frame = frame.f_back
        return False

    def discard(self) -> list[Update]:
        """Return the updates of the unfinished iteration, and forget them, because the state goes back."""
        updates, self.updates = self.updates, []
        self._open = [0 for _ in self._open]
        self.lost, self.compiled, self.seconds = "", False, 0.0
        return updates

    @property
    def has_changes(self) -> bool:
        """Return whether parameters or optimizer state differ from what the last step left."""
        return bool(self.lost) or self._changes.is_other or any(own.has_changed for own in self._state.own)

    def saved(self) -> None:
        """Accept the current state as known, because a snapshot of it was made."""
        self._changes.accept()
        self.lost, self._unseen = "", False

    def _look_for_changes(self, updated: bool, index: int | None = None) -> None:
        """Set ``lost`` if anything unknown changed the state of optimizer ``index``, or of all optimizers."""
        if not self.records():  # the next snapshot holds it, whatever changed it
            self._unseen = True
            return
        if self._unseen:
            self._unseen = False
            self._changes.accept()
        self._settled = not self.changed and not any(self._open)
        if self._settled and self._changes.changed_unexpectedly(updated, index):
            self.lost = self.lost or (
                "parameters or an optimizer's state were changed otherwise than by an optimizer's step"
            )

    def after_step(self, index: int) -> None:
        """End an update of optimizer ``index``: its post-hook. An update that fails does not reach it."""
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
        """Call ``after_update`` after the last of ``updates``, and note the random numbers that it draws."""
        before = generator_states()
        self._settled = False
        updates[-1].autocast_after = autocast_now()
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
        """Return whether a step of optimizer ``index`` has begun and not ended."""
        return self._open[index] > 0

    def before_step(self, index: int, args: tuple, kwargs: dict[str, Any], within: bool) -> None:
        """Record what a step consumes: the pre-hook of optimizer ``index``.

        ``within`` is true inside another step of the same optimizer. Raises ``BadInput`` for a step that cannot be
        recorded.
        """
        started = time.perf_counter()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        _refuse_closure(closure)
        optimizer = self._state.optimizers[index]
        if self._open[index] and within:  # a subclass calls the step() it overrides: the same update
            self._open[index] += 1
            return
        if self._open[index]:  # the open update raised, and no record has what it had changed by then
            self._open[index], self.changed = 0, True
        if not self.updates:
            self.begins()
        self._look_for_changes(True, index)  # made by the script or by other pre-hooks
        trained, without = self._with_gradients(optimizer)
        scaled = _consumed(optimizer)
        _refuse_scaled(self._codec, scaled)
        slot = self._slot_for(index)
        # All ranks see the same here, whatever each of them stores, so they skip the record together.
        known = _fit(trained, self._places[index]) and _members(optimizer) == self._members[index]
        fits = known and (not self.records() or self._is_last(index))
        room = slot if fits else None
        if not fits:
            self.changed = True
        update = Update(
            index, slot, None, self._codec.about(), hyper_parameters(optimizer.param_groups), without, scaled,
            arguments=_arguments(args[1:], kwargs, closure),
            own=self._state.own[index].changed(self._state) if self._state.own else None,
            autocast=autocast_now(), strides=_other_strides(trained),
        )  # fmt: skip
        self.updates.append(update)
        try:
            update.part, update.coefficient = self._consume(
                room, index, trained, scaled.get("found_inf", 0.0) > 0
            )
        except BaseException:  # no record has what it had changed by then
            self.changed = True
            raise
        failpoints.reach("after_gradients_copied")
        self._open[index] += 1
        self._generators[index] = generator_states()
        if room is not None and update.part is None:
            self.lost = "its gradients were denser than a record has room for"
        self.seconds += time.perf_counter() - started

    def _with_gradients(self, optimizer: torch.optim.Optimizer) -> tuple[Trained, list[str]]:
        """Return the parameters of ``optimizer`` that have a gradient, and the names of the others."""
        trained, without = [], []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self._state.name_of.get(id(parameter), "")
                if parameter.grad is None:
                    without.append(name)
                elif is_plain(parameter.grad):
                    trained.append((name, parameter))
                else:
                    raise _unsupported(name, parameter.grad)
        return trained, without

    def _consume(
        self, slot: StagingBuffer | None, index: int, trained: Trained, skipped: bool
    ) -> tuple[memoryview | None, Any]:
        """Turn the gradients into those that the optimizer consumes, and write them into ``slot`` if there is one.

        Returns the part to be written, and the factor still to be applied to it: None here.
        """
        self._clipped(index, {name: p.grad for name, p in trained if p.grad is not None})
        started = time.perf_counter()
        consumed = self._codec.consume(trained, self._state.residuals, skipped)  # the same on all ranks
        if self._codec.changes_training:
            self.seconds -= time.perf_counter() - started  # training asked for this, recorded or not
        if slot is None:
            return None, None
        stored = {name: what for name, what in consumed.items() if name in self._stored}
        return self._codec.write(slot, index, stored), None

    def _clipped(self, index: int, grads: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """Clip ``grads`` if that is configured, and return the factor."""
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

    def _slot_for(self, index: int) -> StagingBuffer | None:
        """Return the iteration's staging buffer, or another one if this optimizer steps again and is recorded."""
        if self.updates and (self.changed or all(update.optimizer != index for update in self.updates)):
            return self.updates[-1].slot
        return self._take_slot()


@dataclass(frozen=True, eq=False)
class _Hook:
    """The pre-hook of one optimizer."""

    tap: OptimizerHooks
    index: int

    def __call__(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():  # the trace holds all that happens in later calls
            self.tap.compiled = True
        elif any(is_capturing(p.device) for p in optimizer.param_groups[0]["params"][:1]):
            raise BadInput(
                "the optimizer's step is being captured as a graph, whose replays no hook sees, so no later step would"
                " be recorded. Capture forward and backward alone, as torch.cuda.make_graphed_callables does, and call"
                " optimizer.step() outside of the graph."
            )
        else:
            within = self.tap.is_open(self.index) and _is_within(optimizer, sys._getframe(1))
            self.tap.before_step(self.index, args, kwargs, within)


def _is_within(optimizer: torch.optim.Optimizer, frame: FrameType) -> bool:
    """Return whether ``frame``, which torch wraps around a step of ``optimizer``, runs inside another such frame."""
    caller = frame.f_back
    while caller is not None:
        if caller.f_code is frame.f_code and caller.f_locals.get("self") is optimizer:
            return True
        caller = caller.f_back
    return False


def _end_hook_of(tap: OptimizerHooks, index: int) -> Callable[..., None]:
    def end(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            tap.after_step(index)

    return end


def clip(grads: list[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Clip ``grads`` as ``torch.nn.utils.clip_grad_norm_`` does, and return the factor.

    Collective where gradients are shards: every rank must call this.
    """
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
"""Shape and dtype of a gradient that fits, and the strides of its parameter, which snapshots hold."""


def _members(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """Return the ids of the parameters in each group."""
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


def _places(state: LiveState) -> list[dict[str, Place]]:
    """Return the places of each optimizer's parameters, by name, including those that other ranks store."""
    return [
        {p.name: (state.boxes[p.name].shape, p.parameter.dtype, p.parameter.stride()) for p in trained}
        for trained in trained_of(state, everywhere=True)
    ]


def _fit(trained: Trained, places: dict[str, Place]) -> bool:
    """Return whether each gradient fits its place, and each parameter has the strides that it had."""
    for name, p in trained:
        grad = p.grad
        if grad is None or places.get(name) != (tuple(local_of(grad).shape), grad.dtype, p.stride()):
            return False
    return True


def _other_strides(trained: Trained) -> dict[str, list[int]] | None:
    """Return the strides of gradients in ``trained`` that are not those of their parameters, as ``Update`` has them."""
    pairs = [(name, p.grad) for name, p in trained if p.grad is not None and p.grad.stride() != p.stride()]
    plain = [(name, grad) for name, grad in pairs if not is_distributed(grad)]
    dense = torch.ops.aten.is_non_overlapping_and_dense
    return {name: list(grad.stride()) for name, grad in plain if dense(grad)} or None


def _refuse_scaled(codec: Codec, consumed: dict[str, float]) -> None:
    if codec.error_feedback and "grad_scale" in consumed:
        raise BadInput(
            "a fused optimizer is given gradients that are still scaled, so what they lose could not be added to the"
            " next ones. Call scaler.unscale_(optimizer) before scaler.step(optimizer)."
        )


def _refuse_closure(closure: Any) -> None:
    """Raise ``BadInput`` for a closure, unless its gradients have been computed already."""
    if closure is not None and not isinstance(closure, ComputedClosure):
        raise BadInput(
            "an optimizer step with a closure may compute several gradients, of which only the last could be"
            " recorded. If it calls the closure once, call closure() yourself and then optimizer.step()."
            f" If it calls it more often, as SAM does, its steps cannot be recorded. {WAY_OUT}"
        )


def _unsupported(name: str, grad: torch.Tensor) -> BadInput:
    return BadInput(
        f"the gradient of {name} is {unsupported_kind(grad)}, which records do not hold. Build an embedding with"
        " sparse=False; make other gradients plain tensors before the step (parameter.grad.to_dense())."
    )


def _arguments(args: tuple, kwargs: dict[str, Any], closure: ComputedClosure | None) -> Any:
    """Return the arguments of ``step`` as JSON, without a closure that is None; None if nothing is left.

    A called closure is stored as what a replay needs. Raises ``BadInput`` for an argument that no record holds by
    value.
    """
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
