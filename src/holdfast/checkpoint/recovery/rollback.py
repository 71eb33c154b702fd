"""The return of a living ``Checkpointer`` to a recorded step, and what a guard of the loss uses of it.

What a new process does in ``resume(step=)`` happens to the live objects, without giving up the run's lock. A recovery
changes live tensors as it goes, and a new process may fail in the middle without harm. A living one may not. The
invariant: nothing is changed before every rank knows that it can go back. Called by ``Checkpointer``, by the training
thread, in this order:

1. ``prepare`` finds the step that can be reached, by headers alone (``reachable_step``). Any error leaves the process
   as it was.
2. ``go_back`` removes what the unfinished iteration left in objects that no run stores (``drop_iteration``), and
   restores the step: from the disk, or from a copy in host memory (``HostCopy``). After an error the state is of no
   step, so the process has to end.
3. ``report`` tells people.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...distributed import Ranks
from ...errors import BadInput, Damaged, DiskFailed, NoCommit, OtherArithmetic, RunMismatch
from ...events import EventLog, tell
from ...state.capture import CapturedParameter, changes_of
from ...state.layout.overlaps import buffers_within
from ...state.layout.regions import is_distributed
from ...state.live_state import LiveState
from ...store.run_store import LocalStore
from ..loss_guard import GuardedRun, GuardOptions, LossGuard
from ..user_state import NoScriptState, ScriptState, is_no_place
from .lineage import Lineage
from .run_recovery import refuse_other_script

if TYPE_CHECKING:
    from ..capture.optimizer_hooks import OptimizerHooks
    from ..durability import DurabilityBackend
    from ..training_state import TrainingState


class Rollback:
    """The return of one rank to recorded steps."""

    def __init__(
        self,
        training: TrainingState,
        backend: DurabilityBackend,
        hooks: OptimizerHooks,
        store: LocalStore,
        events: EventLog,
    ) -> None:
        self._ranks: Ranks = training.ranks
        self._training, self._backend, self._hooks = training, backend, hooks
        self._store, self._events = store, events
        self._is_guarded = False
        self._copy: HostCopy | None = None

    def guard(self, options: GuardOptions, go_back: Callable[[int, str], int]) -> LossGuard:
        """Return a guard of the loss. ``go_back`` goes to a step for a reason, and returns the step reached."""
        self._training.refuse_rollback(keeps_places=True)
        self._backend.refuse_rollback()
        every, after_update = options.copy_every, self._training.after_update is not None
        if every is not None and self._backend.beside:
            raise BadInput(
                f"copy_every = {every} needs records of steps, and a run with a replica has none: leave it out. A"
                " rollback then goes to a base (base_every=)."
            )
        self._is_guarded = True
        self._copy = None if every is None else HostCopy(every, with_frozen=after_update)
        run = GuardedRun(
            self._ranks, lambda: self._training.steps_done, lambda: self._backend.base_step,
            go_back, self._is_sound, self._certify,
        )  # fmt: skip
        return LossGuard(run, options)

    def begin_step(self) -> None:
        """Forget the certified step where no guard judges the loss. Called before a step is recorded."""
        if not self._is_guarded:
            self._training.certified_step = self._store.certified_step = None

    def end_step(self) -> None:
        """Advance the copy of the state in host memory, if there is one.

        Called after a step was recorded, and after a base of it was made again, since the script had changed it.
        """
        if self._copy is not None:
            self._copy.advance(self._training.state, self._training.steps_done)

    def prepare(self, step: int, keeps_places: bool, refuse: Callable[[], None]) -> int:
        """Return the step that ``go_back`` will reach. Changes nothing live.

        Collective: every rank must call this.

        Args:
            step: The step asked for.
            keeps_places: Positions in data stay. Then a step that nothing leads to gives way to the oldest snapshot's.
            refuse: Raises ``BadInput`` where this rank cannot go back now.
        """

        def checked() -> int:
            refuse()
            self._refuse_step(step)
            self._training.refuse_rollback(keeps_places)
            self._backend.refuse_rollback()
            return step

        asked = self._ranks.all_do(checked)
        if len(set(asked)) > 1:
            raise BadInput(
                f"rollback was called with other steps on other ranks: {asked}; call it alike on all"
            )
        copy, leads_there = self._copy, self._backend.records_steps  # without records only a base would
        if copy is not None and keeps_places and leads_there and 0 <= copy.step <= step:
            step = copy.step
        return self._backend.prepare_rollback(step, nearest=keeps_places)

    def _refuse_step(self, step: Any) -> None:
        done = self._training.steps_done
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= done:
            raise BadInput(f"step = {step!r} must be a whole number from 0 to {done}, the steps done")

    def go_back(self, target: int, keeps_places: bool) -> None:
        """Restore step ``target``, which ``prepare`` returned, and begin a timeline there.

        Collective: every rank must call this.
        """
        training, backend, hooks, copy = self._training, self._backend, self._hooks, self._copy
        backend.give_back(hooks.discard())
        hooks.detach()  # a replay steps the optimizers
        training.drop_iteration()
        restores = is_no_place if keeps_places else lambda name, thing: True
        found = backend.go_back(target, restores, copy)
        if copy is not None and copy.step > target:
            copy.step = -1  # the step that it is of was abandoned
        certified = training.certified_step
        training.continue_from(found)
        training.certified_step = None if certified is None else min(certified, target)
        self._store.certified_step = training.certified_step
        training.begin_iteration()
        backend.begin(found)
        hooks.watch(training.state)
        hooks.attach()

    def report(self, target: int, before: int, seconds: float, keeps_places: bool, why: str) -> None:
        """Write the event of a rollback from step ``before``, and print a line on the first rank."""
        self._events.emit("rollback", step=target, from_step=before, seconds=seconds, why=why or None)
        if not self._ranks.rank:
            passed = " The batches since are passed over." * keeps_places
            cause = f" at step {before:,}, since {why}" if why else f" from step {before:,}"
            tell(f"{self._store.root} went back to step {target:,}{cause}.{passed}")

    def _is_sound(self) -> bool:
        """Return whether the state is finite here, and no comparison has found other copies on other ranks."""
        return all_finite(self._training.state) and not self._backend.copies_differ

    def _certify(self, step: int) -> None:
        self._training.certified_step = self._store.certified_step = step
        self._events.emit("certified", step=step, base_step=self._backend.base_step)


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


def reachable_step(store: LocalStore, training: TrainingState, step: int, nearest: bool = False) -> int:
    """Return ``step`` if every rank can replay to it from a snapshot. Reads headers, and changes nothing.

    With ``nearest``, if that is not possible, return the newest recorded step before it, or else the step of the first
    later snapshot that every rank can use.

    Collective: every rank must call this. Raises ``NoCommit`` if there is no such step, and ``RunMismatch`` if the
    model had another form then.
    """
    ranks = training.ranks
    reached = ranks.all_do(lambda: _reachable_here(store, training, step, nearest))
    if len(set(reached)) > 1:  # a rank that had to take a later snapshot cannot replay to an earlier step
        common = max(reached) if max(reached) > step else min(reached)
        reached = ranks.all_do(lambda: _reachable_here(store, training, common, False))
    return reached[0]


def _reachable_here(store: LocalStore, training: TrainingState, step: int, nearest: bool) -> int:
    """Return the step that this rank can reach; ``reachable_step`` has the rules."""
    state, updates = training.state, training.after_update is not None
    refs, problems = store.line(), list[str]()
    later = sorted(ref.step for ref in refs if ref.step > step) if nearest else []
    for wanted in (step, *later):
        line = line_to(store, wanted, problems, nearest)
        if line is not None:
            try:
                refuse_other_script(line, state, training.script, training.ranks, updates)
                line.refuse_other_model(state)
                line.refuse_other_arithmetic(state, updates, training.ranks.rank)
            except (OtherArithmetic, RunMismatch) as error:
                if isinstance(error, RunMismatch) and not nearest:
                    raise
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


Slots = dict[str, Any]
Marks = dict[str, tuple[int, int]]
"""Address and change count of tensors, by key."""


class HostCopy:
    """A copy in host memory of all tensors of one step, from which a rollback restores them without the disk.

    It is taken every ``every`` steps, into the same memory each time. It holds the tensors that steps change, and the
    optimizers' plain values. Everything else that belongs to the step is in its record, which is durable by the time
    the copy is used.

    With ``with_frozen`` it holds the model's frozen parameters too, since the script may change them after steps.
    Without it those whose changes torch counts, which are all but distributed tensors, stay as they are, with their
    optimizer state, and the copy is of no use once one of them changed.
    """

    def __init__(self, every: int, with_frozen: bool) -> None:
        self.step = -1
        """The step that the copy is of; -1 while there is none."""
        self._every, self._with_frozen = every, with_frozen
        self._held: dict[str, torch.Tensor] = {}
        self._frozen: Marks = {}
        """The tensors that steps did not change, as they were at the step of the copy."""
        self._plain: list[tuple[int, torch.Tensor, Slots]] = []
        """The optimizers' values that are no tensors: the optimizer's number, the parameter, and values by slot."""

    @torch.no_grad()
    def advance(self, state: LiveState, step: int) -> None:
        """Take the copy if it is due at ``step``, at whose end ``state`` is."""
        if step % self._every:
            return
        self.step = -1
        before, self._held = self._held, {}
        if any(own.has_leaves for own in state.own) or buffers_within(state.shared()):
            return  # only a replay restores an optimizer's attributes, and which buffers are one memory
        for key, tensor in self._tensors(state):
            there = before.pop(key, None)
            if there is None or (there.shape, there.dtype) != (tensor.shape, tensor.dtype):
                there = torch.empty_like(tensor, device="cpu")
            self._held[key] = there.copy_(tensor)
        self._frozen = self._frozen_now(state)
        self._plain = [(number, p, deepcopy(slots)) for number, p, slots in _plain(state) if slots]
        self.step = step

    def is_of(self, step: int, state: LiveState) -> bool:
        """Return whether the copy is of ``step``, and ``state`` differs from that step only in what the copy holds."""
        if self.step != step or _places(self._held) != _places(dict(self._tensors(state))):
            return False
        return self._frozen == self._frozen_now(state)

    @torch.no_grad()
    def restore(self, state: LiveState) -> None:
        """Put the copy back into ``state``, in place. Optimizer state that came later is removed."""
        live, missing = dict(self._tensors(state)), {}
        for key, tensor in self._held.items():
            if key in live and (live[key].shape, live[key].dtype) == (tensor.shape, tensor.dtype):
                live[key].copy_(tensor)
            else:
                missing[key] = tensor
        for parameter in filter(partial(self._holds, state), state.parameters):
            number = state.optimizer_of(parameter)
            slots = {} if number is None else state.optimizers[number].state.get(parameter.parameter, {})
            for slot in [slot for slot in slots if f"{parameter.name}/{slot}" not in self._held]:
                del slots[slot]
        state.load(missing)
        for number, parameter, slots in self._plain:
            state.optimizers[number].state[parameter].update(deepcopy(slots))

    def _tensors(self, state: LiveState) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield by key the tensors of the state that steps change, whichever rank stores them."""
        for parameter in filter(partial(self._holds, state), state.parameters):
            yield from ((key, tensor) for key, (_, tensor) in state.owned(parameter).items())
        yield from ((key, tensor) for key, (_, tensor) in state.buffers().items())

    def _holds(self, state: LiveState, parameter: CapturedParameter) -> bool:
        """Return whether the copy holds the parameter, with what its optimizer holds for it."""
        tensor = parameter.parameter
        is_trained = tensor.requires_grad and state.optimizer_of(parameter) is not None
        return self._with_frozen or is_trained or is_distributed(tensor)

    def _frozen_now(self, state: LiveState) -> Marks:
        """Return address and change count of each tensor of the other parameters, by key."""
        others = (parameter for parameter in state.parameters if not self._holds(state, parameter))
        owned = (state.owned(parameter).items() for parameter in others)
        return {key: (tensor.data_ptr(), changes_of(tensor)) for each in owned for key, (_, tensor) in each}


def _plain(state: LiveState) -> Iterator[tuple[int, torch.Tensor, Slots]]:
    """Yield the optimizer's number, the parameter, and its values that are no tensors, for each parameter."""
    for parameter in state.parameters:
        number = state.optimizer_of(parameter)
        if number is not None:
            slots = state.optimizers[number].state.get(parameter.parameter, {})
            plain = {slot: value for slot, value in slots.items() if not isinstance(value, torch.Tensor)}
            yield number, parameter.parameter, plain


def _places(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of parameters and buffers, by key. Optimizer state may come and go."""
    return {
        key: (tensor.shape, tensor.dtype)
        for key, tensor in tensors.items()
        if key.endswith(("/param", "/buffer"))
    }
