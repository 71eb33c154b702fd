"""The takeover of a model: its own parameters leave memory, and the resident parameters are put in their place.

Each parameter carries a mark that names the run which has taken it, so that no other engine takes an empty parameter
for a fresh one.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from threading import get_ident
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...errors import BadInput, ModelNotSupported
from ...optim.host_optimizer import refuse_step_hooks
from ...state.capture import Captured
from ..memory.parameter_shards import memory_order
from ..runtime import Runtime
from .absent_parameters import AS_TENSORS
from .blocks import EMPTY, configurations, install
from .microbatches import on_micro_batch

MARK = "_holdfast_taken"


class OriginalDevices:
    """The devices on which a model's parameters and buffers were when it was handed over, and return to.

    An engine computes on its device and keeps parameters out of memory. A model that is given back works as before only
    if everything is on one device again. Nothing is freed or copied until ``give_back_buffers``.
    """

    def __init__(self, whole: nn.Module, model: Captured) -> None:
        self._whole = whole
        self._parameters = {p.name: _home_of(p.name, p.parameter) for p in model.parameters}
        self._buffers = {(id(module), key): held.device for module, key, held in _buffers(whole)}
        known = [*self._parameters.values(), *self._buffers.values()]
        self._usual = next((device for device in known if device.type != "meta"), torch.device("cpu"))

    def of_parameter(self, name: str) -> torch.device:
        return self._parameters[name]

    def give_back_buffers(self) -> None:
        """Put every buffer back on its device; a buffer that the model has made since goes to its parameters'
        device."""
        moved: dict[int, torch.Tensor] = {}  # a buffer of several modules stays one
        for module, key, held in _buffers(self._whole):
            home = self._buffers.get((id(module), key), self._usual)
            if home != held.device and home.type != "meta":
                module._buffers[key] = moved.setdefault(id(held), held.to(home))


def _home_of(name: str, parameter: nn.Parameter) -> torch.device:
    """Return the device of a parameter; if a failed engine has emptied it, the device on which it was before."""
    taken = getattr(parameter, MARK, None)
    return parameter.device if taken is None else taken.homes.of_parameter(name)


def _buffers(model: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """Return every buffer of every module, with the module and its name there."""
    return [
        (module, key, held)
        for module in model.modules()
        for key, held in module._buffers.items()
        if held is not None
    ]


@dataclass
class TakenModel:
    """The value of ``MARK`` on a parameter: the run that it was handed over to."""

    directory: str
    homes: OriginalDevices
    open: bool = True
    """True while an engine trains the parameter.

    If False and the parameter is on ``meta``, only the directory has its values.
    """


def refuse_open(model: nn.Module) -> None:
    """Raise ``BadInput`` naming a parameter that another engine is training."""
    for name, parameter in model.named_parameters():
        taken = getattr(parameter, MARK, None)
        if taken is not None and taken.open:
            raise BadInput(
                f"parameter {name} is being trained by another engine, in {taken.directory}. Close that engine first."
            )


def refuse_emptied(model: Captured) -> None:
    """Raise ``BadInput`` naming a parameter that an engine has emptied: a fresh run would start without it."""
    for captured in model.parameters:
        taken = getattr(captured.parameter, MARK, None)
        if taken is not None:
            raise BadInput(
                f"parameter {captured.name} has no values: an engine that failed had taken them to {taken.directory}. "
                "Resume that directory, or build the model anew."
            )


def refuse_partly_empty(model: Captured) -> None:
    """Raise ``BadInput`` if some parameters have values and others, on ``meta``, seem to have lost theirs.

    Parameters that ``empty_parameters()`` made are meant to be initialised, and so is a model that is all on ``meta``.
    """
    empty = [each for each in model.parameters if each.parameter.is_meta]
    lost = next((each.name for each in empty if not hasattr(each.parameter, EMPTY)), None)
    if lost is not None and len(empty) < len(model.parameters):
        raise BadInput(
            f"parameter {lost} is on meta and has no values, while {len(model.parameters) - len(empty)} others have"
            " theirs: a fresh run would give it random ones. Load the rest, build the model in"
            " holdfast.empty_parameters(), or say by init= or source= what it begins with."
        )


def refuse_held(model: Captured) -> None:
    """Raise ``BadInput`` naming a parameter that cannot be emptied, because something else refers to it."""
    for captured in model.parameters:
        parameter = captured.parameter
        held = weakref.getweakrefcount(parameter) or parameter._use_count() > 2  # type: ignore[attr-defined]
        if held and not parameter.is_meta:
            raise _held(captured.name)


def _held(name: str) -> BadInput:
    return BadInput(
        f"parameter {name} cannot be moved out of memory, because something else holds on to it. Let go of earlier "
        "outputs of the model, and of weak references to its parameters (nn.LSTM, nn.GRU and nn.RNN hold some)."
    )


class WatchedModel:
    """The modules, their parameters, and which of these are trained, as they were handed over.

    A run's files are laid out for them, so they must not change.
    """

    def __init__(
        self,
        whole: nn.Module,
        model: Captured,
        leaves: dict[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._model, self._modules = whole, _modules(whole)
        self._parameters = [(p.name, p.parameter, p.parameter.requires_grad) for p in model.parameters]
        self._parameters += [(name, leaf, leaf.requires_grad) for name, leaf in leaves.items()]
        self._optimizer, self._groups = optimizer, _members(optimizer)

    def refuse_changes(self) -> None:
        """Raise ``BadInput`` naming the first thing that has changed; nothing is lost by it."""
        refuse_step_hooks(self._optimizer)
        with AS_TENSORS():
            changed = [(name, before) for name, p, before in self._parameters if p.requires_grad != before]
        if changed:
            name, before = changed[0]
            raise BadInput(
                f"parameter {name} had requires_grad={before} when the run was opened and has {not before} now; what is"
                " trained cannot change within a run. Set it back."
            )
        modules = _modules(self._model)
        for name in {**self._modules, **modules} if modules != self._modules else ():
            if modules.get(name) != self._modules.get(name):
                raise BadInput(
                    f"module {name} is another one than when the run was opened, or has other parameters, which would"
                    " not be trained. Set it back, or build the model whole before offload()."
                )
        if _members(self._optimizer) != self._groups:
            raise BadInput(
                "the optimizer's parameter groups hold other parameters than when the run was opened. Build it with "
                "all its groups before offload(); their hyper-parameters may change at any time."
            )


def _modules(model: nn.Module) -> dict[str, tuple[nn.Module, tuple[str, ...]]]:
    """Return each module by name, with the names of its parameters."""
    return {
        name: (module, tuple(key for key, held in module._parameters.items() if held is not None))
        for name, module in model.named_modules()
    }


def _members(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


def refuse_use(model: nn.Module, in_engine: Callable[[], bool]) -> list[RemovableHandle]:
    """Make ``model`` refuse to be saved, to be loaded, and to run unless ``in_engine()``.

    It does so until the returned handles are removed.
    """

    def refuse_forward(model: nn.Module, args: Any) -> None:
        if not in_engine():
            raise ModelNotSupported(
                _instead("was called directly", "Call engine.step, engine.evaluate or engine.generate")
            )

    return [
        model.register_forward_pre_hook(refuse_forward),
        model.register_state_dict_pre_hook(_refuse_state_dict),
        model.register_load_state_dict_pre_hook(_refuse_load),
    ]


class HeldState:
    """Stands in for an optimizer's ``state`` while an engine is open, and refuses every use until ``remove``.

    The run holds the real state. The optimizer's own is empty or old, so a script that saved it would lose the run's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._kind = type(optimizer).__name__
        self._own = [(each, each.state) for each in (optimizer, *getattr(optimizer, "members", ()))]
        for each, _ in self._own:
            each.state = self  # type: ignore[bad-assignment]

    def remove(self) -> None:
        """Put the optimizer's own state back, unless the script has given it another one."""
        for optimizer, state in self._own:
            if optimizer.state is self:
                optimizer.state = state

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ModelNotSupported(
            f"the state of {self._kind} was used (.state or state_dict()) while an engine holds it. Leave that use"
            " out; `holdfast convert RUN OUT --to torch` writes weights and optimizer state."
        )

    __contains__ = __delitem__ = __getitem__ = __iter__ = __len__ = __reversed__ = __setitem__ = _refuse
    clear = copy = get = items = keys = pop = popitem = setdefault = update = values = _refuse


class DirectCalls:
    """The forward of ``module`` until ``remove``: as it was on a micro-batch, and elsewhere a call for ``run``."""

    def __init__(self, module: nn.Module, run: Callable[[Callable[[], Any]], Any]) -> None:
        """Replace the forward.

        Args:
            module: The model, or one inside of it that scripts call.
            run: Returns what the call returns that it is given, from a pass of the engine.
        """
        self._module, self._own, forward = module, vars(module).get("forward"), module.forward
        thread = get_ident()

        @wraps(forward)  # libraries look at its signature
        def direct(*args: Any, **kwargs: Any) -> Any:
            call = partial(forward, *args, **kwargs)
            if on_micro_batch() or self._is_removed:
                return call()
            if get_ident() != thread:
                raise ModelNotSupported(
                    _instead("was called on another thread", "Call it on the thread that trains")
                )
            if torch.is_grad_enabled():
                raise ModelNotSupported(
                    _instead("was called outside of a training step", "Call it under torch.no_grad()")
                )
            with torch.inference_mode(False), torch.no_grad():
                return run(call)

        self._direct, self._is_removed = direct, False
        vars(module)["forward"] = direct

    def remove(self) -> None:
        """Put the module's own forward back, unless the script has given it another one."""
        self._is_removed = True
        if vars(self._module).get("forward") is self._direct:
            del vars(self._module)["forward"]
            if self._own is not None:
                vars(self._module)["forward"] = self._own


def _refuse_state_dict(model: nn.Module, prefix: str, keep_vars: bool) -> None:
    raise ModelNotSupported(_instead("was asked for its state_dict()", "Call engine.state_dict()"))


def _refuse_load(model: nn.Module, *_: Any) -> None:
    raise ModelNotSupported(_instead("was given a state_dict", "Load it before offload()"))


def _instead(what: str, instead: str) -> str:
    return f"the model {what}, but its parameters are on the SSD. {instead}, or engine.close() first."


def take_over(run: Runtime, model: Captured, taken: TakenModel) -> None:
    """Make the model compute with the parameters that ``run`` holds. Raises ``BadInput`` if it cannot be emptied."""
    _install_resident(run, taken)
    with run.transient.moving():
        run.device.take_buffers(run.model)
    _empty_originals(model, taken)  # last, so that a failure before loses no values


def _install_resident(run: Runtime, taken: TakenModel) -> None:
    """Give the prologue and epilogue parameters to compute with, whose gradients are summed in fp32."""
    for member in run.resident.members:
        view = run.device.bring(run.resident.copy_view(run.resident_copy, member))
        view = view.data  # with a version counter of its own, by which edits are detected
        parameter = run.residency.leaf(run.resident, member, view, lambda: run.residency.resident_grads)
        setattr(parameter, MARK, taken)
        run.resident_leaves[member.name] = parameter
        install(member.owned, parameter)


def _empty_originals(model: Captured, taken: TakenModel) -> None:
    """Move the model's own parameters to ``meta``: their values live in the store now. Moves all or none.

    The objects stay the same, so the optimizer's groups still refer to them, and keep their attributes. Raises
    ``BadInput`` naming a parameter that something else refers to.
    """
    moved: list[tuple[nn.Parameter, nn.Parameter]] = []
    for captured in model.parameters:
        parameter = captured.parameter
        if parameter.is_meta:
            setattr(parameter, MARK, taken)
            continue
        parameter.grad = None
        empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        empty.__dict__.update(parameter.__dict__, **{MARK: taken})
        try:
            torch.utils.swap_tensors(parameter, empty)
        except BaseException as error:
            for original, real in moved:
                torch.utils.swap_tensors(original, real)
            raise _held(captured.name) if isinstance(error, RuntimeError) else error from error
        moved.append((parameter, empty))


def switch_off_cache(model: nn.Module) -> list[Any]:
    """Switch off key-value caches in every configuration of ``model``; return those that had them on.

    A cache is an input that changes, and training does not need it.
    """
    on = [(name, config) for name, config in configurations(model) if getattr(config, "use_cache", False)]
    for _, config in on:
        config.use_cache = False
    if on:
        names = ", ".join(f"{name}.use_cache" for name, _ in on)
        warnings.warn(
            f"{names} {'was' if len(on) == 1 else 'were'} switched off until the engine is closed: out-of-core blocks"
            " keep no cache",
            stacklevel=5,
        )
    return [config for _, config in on]


def switch_on_cache(configs: list[Any]) -> None:
    """Undo ``switch_off_cache``."""
    while configs:
        configs.pop().use_cache = True


def mark_released(model: Captured, taken: TakenModel, were_real: set[str]) -> None:
    """Mark the parameters as no longer in use by an engine, after the engine was closed.

    Parameters that were on ``meta`` before are as they were.
    """
    taken.open = False
    for captured in model.parameters:
        if captured.name not in were_real:
            captured.parameter.__dict__.pop(MARK, None)


def give_back(model: Captured, values: dict[str, torch.Tensor], homes: OriginalDevices) -> None:
    """Give the model's own parameters that ``values`` names their trained values.

    Each keeps its own dtype and the device on which it was.
    """
    for captured in model.parameters:
        if captured.name in values:
            parameter = captured.parameter
            value = values[captured.name].to(parameter.dtype).to(homes.of_parameter(captured.name))
            if memory_order(parameter) is not None:
                value = torch.empty_like(parameter, device=value.device, requires_grad=False).copy_(value)
            real = nn.Parameter(value, requires_grad=parameter.requires_grad)
            real.__dict__.update({k: v for k, v in parameter.__dict__.items() if k != MARK})
            torch.utils.swap_tensors(parameter, real)
