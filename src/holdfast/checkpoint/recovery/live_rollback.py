"""The checks and clean-up of a return of the living process to a recorded step, beside the recovery itself.

A recovery changes live tensors as it goes, and a new process may fail in the middle without harm. A living one may not,
so ``reachable_step`` finds out by headers alone whether records lead to the step, before anything is changed.
``drop_iteration`` removes what the unfinished iteration left in objects that no run stores. Called by
``Rollback`` and by the log backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import BadInput, Damaged, DiskFailed, NoCommit, OtherArithmetic
from ...state.live_state import LiveState
from ...store.run_store import LocalStore
from ..user_state import NoScriptState, ScriptState
from .lineage import Lineage


class LivingScript(NoScriptState):
    """The user state of a script that keeps running, as a recovery restores it.

    ``restores`` is a predicate on names and objects. The other objects stay as they are now. The script cannot have
    been given other settings since it began, so there is no warning of any.
    """

    def __init__(self, script: ScriptState, restores: Callable[[str, Any], bool]) -> None:
        super().__init__()
        self._script, self._restores = script, restores

    def check(self, progress: dict[str, Any], wrote: int, num_ranks: int) -> None:
        self._script.check(progress, wrote, num_ranks)

    def restore(
        self, progress: dict[str, Any], which: Callable[[str, Any], bool] = lambda name, thing: True
    ) -> None:
        self._script.restore(progress, self._restores)

    def scatter(self, rank: int) -> None:
        self._script.scatter(rank)


def reachable_step(
    store: LocalStore,
    state: LiveState,
    step: int,
    nearest: bool = False,
    refuse: Callable[[Lineage], None] = lambda line: None,
) -> int:
    """Return ``step`` if log records lead to it from a snapshot. Reads headers, and changes nothing.

    With ``nearest`` a step that nothing leads to gives way to the newest one before it that is there, or else to that
    of the first snapshot after it. ``refuse`` raises ``OtherArithmetic`` for a line that cannot be replayed here.
    Raises ``NoCommit`` if there is none, and ``RunMismatch`` if the model had another form then.
    """
    refs, problems = store.line(), list[str]()
    later = sorted(ref.step for ref in refs if ref.step > step)[: 1 if nearest else 0]
    for wanted in (step, *later):
        line = line_to(store, wanted, problems, nearest)
        if line is not None:
            line.refuse_other_model(state)
            try:
                refuse(line)
            except OtherArithmetic as error:
                problems.insert(0, str(error))
                continue
            return line.step
    oldest = f"The oldest base is of step {refs[-1].step}." if refs else "There is no base."
    raise NoCommit(
        f"{store.root} has nothing recorded that leads to step {step}, so the process stays at its step."
        f" {problems[0] if problems else oldest} Go back to a later step, or keep more bases:"
        " keep=holdfast.Keep(last=...)."
    )


def line_to(store: LocalStore, step: int, problems: list[str], nearest: bool = False) -> Lineage | None:
    """Return the line from the newest snapshot whose records lead to ``step``, by headers alone; None without one.

    With ``nearest`` steps up to ``step`` may lack records, as with ``every`` other than 1: the line then ends at the
    newest step that has them. Adds to ``problems`` why other snapshots do not lead there.
    """
    found: Lineage | None = None
    for ref in (ref for ref in store.line() if ref.step <= step):
        try:
            line = Lineage.of(store, store.load(ref), step)
        except (Damaged, DiskFailed) as error:
            problems.append(str(error))
            continue
        if line.step == step:
            return line
        problems.append(f"After step {line.step} the records end.")
        if found is None or line.step > found.step:
            found = line
    return found if nearest else None


def refuse_places(things: Mapping[str, Any]) -> None:
    """Raise ``BadInput`` for an object whose position a loop that is under way would not notice.

    A ``for`` loop holds an iterator. Only an object that is its own iterator continues from its restored position.
    """
    for name, thing in things.items():
        is_place = name == "loader" or hasattr(thing, "__iter__")
        if is_place and not hasattr(thing, "__next__"):
            raise BadInput(
                f"{name}: {type(thing).__name__} is not its own iterator, so a loop over it would continue where it is"
                " and not at the restored position. Give holdfast.loader(dataset, batch_size), or an object with"
                " __next__. guard() leaves positions alone and takes any loader; so does a new process with"
                " resume(step=)."
            )


def drop_iteration(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], scaler: Any) -> None:
    """Remove gradients, and what a forward pass or an unscaling of the unfinished iteration has left."""
    for module in model.modules():
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            _drop_gathered(module)
    for parameter in model.parameters():
        parameter.grad = None
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    if isinstance(scaler, torch.amp.GradScaler):
        scaler._per_optimizer_states.clear()  # otherwise unscale_() is refused as done already
    torch.clear_autocast_cache()


def _drop_gathered(module: Any) -> None:
    """Remove the parameters of an FSDP2 module that a forward pass gathered, and gradients that were not reduced yet.

    Both would stay as they were before the rollback, and be used.
    """
    module.reshard()
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    for group in [state._fsdp_param_group] if groups is None else groups:
        for held in () if group is None else group.fsdp_params:
            held.unsharded_accumulated_grad = None
            if hasattr(held, "_unsharded_param"):
                held._unsharded_param.grad = None


def all_finite(state: LiveState) -> bool:
    """Return whether the parameters and the optimizer state that this process stores hold neither NaN nor infinity.

    Buffers are left out, because masks hold infinities.
    """
    held = [tensor for p in state.stored for _, tensor in state.owned(p).values()]
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in held:
        if tensor.is_floating_point() and tensor.element_size() > 1 and tensor.numel():
            by_device.setdefault(tensor.device, []).append(tensor.detach())
    return all(
        bool(torch.stack([norm.isfinite() for norm in torch._foreach_norm(each, ord=float("inf"))]).all())
        for each in by_device.values()
    )
