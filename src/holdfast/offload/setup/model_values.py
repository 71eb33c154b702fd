"""The script's model in an engine's hands: taken over, guarded against use and changes, and given back with its values.

A run keeps its values elsewhere: blocks are empty between steps, and the resident part in memory is a copy that the
next update overwrites. All ranks get all values. A change that a script makes to the model would never reach the run,
so it is refused by name, and the run's values are put back. A parameter is compared by identity, version and memory,
which takes a microsecond. Changes through ``.data`` or NumPy alter none of these and are not detected. A call
of the model by the script is refused while an engine holds it, or becomes a pass of the engine. Called by the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from ...io.buffers import Buffer
from ...optim.mezo import pending_of
from ...state.capture import Captured, buffer_at, join, plain_paths
from ...state.plain_tensors import FROM_NAME
from ...state.tensor_entries import SEED, STEP
from ...store.run_store import LocalStore
from ..memory.block_states import BlockState, as_tensor
from ..memory.parameter_shards import ParameterEntry
from ..memory.unit_files import UnitFile
from ..model.absent_parameters import AS_TENSORS
from ..model.blocks import Owned, install
from ..model.peft_adapters import saved_with_adapters
from ..model.quantised_layers import close_layers
from ..model.takeover import (
    MARK,
    DirectCalls,
    HeldState,
    OriginalDevices,
    TakenModel,
    WatchedModel,
    give_back,
    mark_released,
    refuse_use,
    switch_on_cache,
    take_over,
)
from ..runtime import Runtime
from .process_settings import give_back_freed

Keep = Callable[[str, torch.Tensor], torch.Tensor]
"""Function from the name and the value of a parameter to the tensor that is held in its place."""


def as_it_is(name: str, value: torch.Tensor) -> torch.Tensor:
    """Return ``value``."""
    return value


def state_dict(run: Runtime, captured: Captured, keep: Keep | None) -> dict[str, torch.Tensor]:
    """Return every parameter in fp32 and every persistent buffer, by the model's names, in host memory.

    The parts of quantised weights are as they are stored. Nothing may be under way. ``keep`` is called with the
    parameters of one unit after another; without it nothing is returned. Collective: every rank must call this.
    """
    values: dict[str, torch.Tensor] = {}
    for block in range(len(run.units)):
        values.update(_kept(values_of(run, block), keep))
    if keep is None:
        return {}
    ordered = {name: values[p.name] for p in captured.parameters for name in p.names}
    return ordered | _buffers_of(run, captured)


def _buffers_of(run: Runtime, captured: Captured) -> dict[str, torch.Tensor]:
    """Return every persistent buffer, by the model's names, in host memory."""
    plain, held = plain_paths(run.model), {(id(module), key) for module, key in captured.buffers.values()}
    return {
        join(plain[path], key): buffer_at((module, key)).detach().to("cpu", copy=True)
        for path, module in run.model.named_modules(
            remove_duplicate=False
        )  # also by the other names of a module
        for key in module._buffers
        if (id(module), key) in held
    }


def values_of(run: Runtime, block: int) -> dict[str, torch.Tensor]:
    """Return every parameter of one unit in fp32, or as stored if packed, by name. Nothing may be under way.

    Collective: every rank must call this.
    """
    return {**_trained(run, block), **_frozen(run, block)}


def _kept(values: dict[str, torch.Tensor], keep: Keep | None) -> dict[str, torch.Tensor]:
    """Return what ``keep`` returns for each of ``values``, whose memory is then free; nothing without it."""
    if keep is None:
        return {}
    if keep is as_it_is:
        return values
    kept = {name: keep(name, values.pop(name)) for name in list(values)}
    give_back_freed()  # by now in pieces, which the next unit's values would not all use
    return kept


def trained_values(run: Runtime, captured: Captured, keep: Keep | None) -> dict[str, torch.Tensor]:
    """Return every trained parameter in fp32, and what PEFT saves beside them, by the model's names.

    Nothing is returned without ``keep``.

    Nothing may be under way. Collective: every rank must call this.
    """
    here = sorted(
        saved_with_adapters(run.model, captured)
    )  # PEFT may ask the network, which may fail in one process
    beside = set().union(*run.data_parallel.call("what PEFT saves", lambda: here))
    wanted = {p.name for p in captured.parameters if p.trained or beside.intersection(p.names)}
    values: dict[str, torch.Tensor] = {}
    for block, unit in enumerate(run.units):
        if unit.trained:
            values.update(_kept(_trained(run, block), keep))
        if any(each.name in wanted for each in (*unit.frozen, *unit.routed)):
            frozen = _frozen(run, block)
            values.update(_kept({name: frozen[name] for name in frozen.keys() & wanted}, keep))
            del frozen
    if keep is None:
        return {}
    buffers = {name: value for name, value in _buffers_of(run, captured).items() if name in beside}
    return {
        name: values[p.name] for p in captured.parameters if p.name in wanted for name in p.names
    } | buffers


def newest_values(run: Runtime, names: set[str]) -> dict[str, torch.Tensor]:
    """Return the parameters in ``names`` as the run's newest whole commit has them."""
    with LocalStore.read(run.store.root, disk=run.store.disk, direct=run.store.direct) as reader:
        manifest, _ = reader.newest_whole()
        atoms, (delta, groups) = reader.atoms(manifest), pending_of(manifest.progress)

        def value(name: str, slot: str) -> torch.Tensor:
            atom = atoms[f"{name}/{slot}"]
            raw = reader.read_atom(manifest, atom)
            return torch.frombuffer(raw, dtype=FROM_NAME[atom["dtype"]]).view(atom["shape"])

        packed = {m.name for unit in run.units for m in unit.all_members if m.owned.captured.as_stored}
        read = {name: value(name, "param") for name in names}
        found = {name: each if name in packed else each.float() for name, each in read.items()}
        for name in groups.keys() & names:  # of MeZO: the last step is not in the files yet
            assert delta is not None
            seed, step = value(name, SEED), value(name, STEP)
            delta.apply(found[name], seed, step, groups[name])
        return found


class ExternalEdits:
    """Changes of one engine's model and optimizer since it was built or since ``undo``."""

    def __init__(self, run: Runtime, optimizer: torch.optim.Optimizer) -> None:
        self._run, self._optimizer = run, optimizer
        leaves = run.resident_leaves
        self._held: list[tuple[str, Owned, nn.Parameter]] = [
            (m.name, m.owned, leaves.get(m.name, m.owned.captured.parameter))
            for unit in run.units
            for m in unit.all_members
        ]
        with AS_TENSORS():
            self._memory = [parameter.data for _, _, parameter in self._held]
            self._look()

    def _look(self) -> None:
        self._seen = [_form(parameter) for _, _, parameter in self._held]
        self._state = self._optimizer.state
        self._buffers = [
            (module, key, buffer)
            for module in self._run.model.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]

    def names(self) -> list[str]:
        """Return the names of what was changed, for a person."""
        with AS_TENSORS():
            told = [
                f"parameter {name}"
                for (name, owned, parameter), seen in zip(self._held, self._seen, strict=True)
                if _form(parameter) != seen
                or any(module._parameters.get(key) is not parameter for module, key in owned.places)
            ]
            if self._optimizer.state is not self._state:
                told.append("the optimizer's state")
            if not told:
                self._look()
        return told

    def undo(self) -> None:
        """Put the run's values back. Nothing may be under way.

        Collective: every rank must call this.
        """
        values = values_of(self._run, len(self._run.units) - 1)
        for module, key, buffer in self._buffers:
            now = module._buffers.get(key)
            if now is not None and now.dtype != buffer.dtype:  # by Module.half() and the like
                module._buffers[key] = buffer
        with AS_TENSORS():
            for (name, owned, parameter), memory in zip(self._held, self._memory, strict=True):
                install(owned, parameter)
                parameter.data = memory
                if name in values:
                    memory.copy_(values[name])
            self._optimizer.state = self._state
            self._look()


def edits_text(found: Collection[str]) -> str:
    """Return the message about edits, without the advice."""
    first, more = min(found), f" and {len(found) - 1} more" if len(found) > 1 else ""
    return (
        f"{first}{more} changed outside of engine.step (in place, by load_state_dict, or another one is there), and the"
        " run has its values elsewhere, where that does not reach"
    )


def _trained(run: Runtime, block: int) -> dict[str, torch.Tensor]:
    """Return the master parameters of a unit, from memory if the unit's state stays there."""
    unit = run.units[block]
    values = _empty(unit.trained)
    for tile in unit.tiles:
        kept = run.residency.images.get((block, tile.index))
        _copy_values(run, tile, values, kept)
    return _gathered(run, unit, values)


def _frozen(run: Runtime, block: int) -> dict[str, torch.Tensor]:
    unit = run.units[block]
    values = _empty([*unit.frozen, *unit.routed])
    for file in unit.frozen_files:
        _copy_values(run, file, values)
    return _gathered(run, unit, values)


def _empty(members: list[ParameterEntry]) -> dict[str, torch.Tensor]:
    return {m.name: torch.empty(m.shape, dtype=m.value_dtype) for m in members}


def _copy_values(
    run: Runtime, file: UnitFile, values: dict[str, torch.Tensor], kept: Buffer | None = None
) -> None:
    """Copy what ``file`` holds into ``values``: from its image where that is ``kept`` in memory."""
    image = kept or _read(run, file.name)
    for piece in file.pieces:
        piece.of(values[piece.name]).copy_(file.values(as_tensor(image), piece.name))
    if kept is None:
        run.residency.pool.give(image)


def _gathered(run: Runtime, unit: BlockState, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return whole ``values``, of which this rank has its shard. Collective: every rank must call this."""
    for name, value in values.items():
        run.data_parallel.gather_value(unit, name, value)
    return values


def _read(run: Runtime, name: str) -> Buffer:
    """Read a file's newest generation, and verify every byte."""
    files, newest = run.stored[name], run.newest[name]
    buffer = run.residency.pool.take(files.layout.file_bytes, "export")
    files.read(
        newest.generation, buffer.view, newest.checksums, kind="state", phase="export", priority=0
    ).result()
    return buffer


def _form(parameter: nn.Parameter) -> tuple[Any, ...]:
    """Return values that differ after the parameter was changed in place or got other memory."""
    return parameter._version, parameter.dtype, None if parameter.is_meta else parameter.data_ptr()


class Hook(Protocol):
    """A change of a model that can be undone."""

    def remove(self) -> None: ...


class HeldModel:
    """A model and its optimizer while one engine trains them.

    Call order: ``take_over``, ``guard``, ``take_calls`` or not, ``unguard``, ``release``, ``give_back``.
    """

    _watched: WatchedModel

    def __init__(
        self, run: Runtime, captured: Captured, optimizer: torch.optim.Optimizer, caches: list[Any]
    ) -> None:
        """Note where everything is. ``caches`` are the configurations whose key-value cache ``release`` switches on."""
        self._run, self.captured, self._optimizer, self._caches = run, captured, optimizer, caches
        self._homes = OriginalDevices(run.model, captured)
        self._taken = TakenModel(str(run.store.root), self._homes)
        self.were_real = {
            p.name for p in captured.parameters if not p.parameter.is_meta or hasattr(p.parameter, MARK)
        }
        """Names of the parameters that had values when the model was handed over."""
        self.is_owed = False
        """True if the model still lacks its values, because a close was interrupted."""
        self.in_use = False
        """True while the engine runs the model."""
        self._edits: ExternalEdits | None = None
        self._hooks: list[Hook] = []

    def take_over(self) -> None:
        """Make the model compute with the run's parameters. Raises ``BadInput`` if its own cannot be emptied."""
        take_over(self._run, self.captured, self._taken)
        self._run.absent.refuse_own()

    def guard(self) -> None:
        """Make the model refuse direct use, and watch for changes from here on."""
        run = self._run
        self._watched = WatchedModel(run.model, self.captured, run.resident_leaves, self._optimizer)
        self._hooks = [*refuse_use(run.model, lambda: self.in_use), HeldState(self._optimizer)]
        self._edits = ExternalEdits(run, self._optimizer)

    def take_calls(self, modules: Sequence[nn.Module], run: Callable[[Callable[[], Any]], Any]) -> None:
        """Let calls of ``modules`` without gradients be passes of the engine, by ``run``, until ``unguard``.

        The first is the model; others are modules inside of it that scripts call.
        """
        self._hooks[0].remove()  # the refusal
        self._hooks += [DirectCalls(module, run) for module in modules]

    def until_unguard(self, hook: Hook) -> None:
        """Let ``unguard`` remove ``hook``."""
        self._hooks.append(hook)

    def refuse_changes(self) -> None:
        """Raise ``BadInput`` if modules, parameters or groups are other ones than when the model was handed over."""
        self._watched.refuse_changes()

    def edited(self) -> list[str]:
        """Return the names of values that the script has changed since the last step."""
        return [] if self._edits is None else self._edits.names()

    def undo_edits(self) -> None:
        """Put the run's values back. Nothing may be under way. Collective: every rank must call this."""
        if self._edits is not None:
            self._edits.undo()

    def refuse_gradients(self, way_out: str) -> None:
        """Make reading a parameter's gradient an error, which ends with ``way_out``. It is None otherwise."""
        self._run.absent.refuse_gradients(way_out)

    def unguard(self) -> None:
        """Let the model be used directly. First of all, so that it can be used even if the rest is interrupted."""
        for hook in reversed(self._hooks):
            hook.remove()

    def release(self) -> None:
        """Put the model's own parameters and buffers back in their places."""
        for unit in self._run.units:
            for member in unit.all_members:
                install(member.owned, member.owned.captured.parameter)
        self._run.absent.allow_own()
        self._homes.give_back_buffers()
        mark_released(self.captured, self._taken, self.were_real)
        switch_on_cache(self._caches)
        self._edits = None

    def give_back(self, values: dict[str, torch.Tensor]) -> None:
        """Give the model's own parameters the trained ``values``."""
        self._run.absent.allow_own()  # an interrupt may have come before ``release``
        give_back(self.captured, values, self._homes)
        close_layers(self._run.model)
        self.is_owed = False
