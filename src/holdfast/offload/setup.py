"""Setting up a run: from a model and an optimizer to an engine, on a fresh directory or one to resume.

Nothing is written before everything has been checked: the model's blocks, the optimizer, the configuration,
the disk, the budget, and, on resume, that the run holds this model and that its newest commit is whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import nn

from ..errors import BadInput, ModelNotSupported, RunMismatch
from ..io.buffers import Buffer, BufferPool
from ..plan.work import BlockWork, Placement, Work
from ..state.atoms import Atom
from ..state.boxes import Box
from ..state.capture import Captured, capture
from ..store.generations import Generations as StoredUnit
from ..store.local import LocalStore
from ..store.manifest import Manifest
from ..units import round_up
from ..update.optimizer import HostOptimizer
from . import rng
from .blocks import Blocks, find_blocks, install, owned_parameters
from .device import Device
from .measure import Measured
from .microbatches import Patch
from .residency import Residency
from .runtime import InputScratch, Runtime, Step, Stored
from .units import Unit, as_tensor, leaf

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Parts:
    """A model described for out-of-core training; nothing has been changed or written yet."""

    model: nn.Module
    blocks: Blocks
    units: list[Unit]
    resident: Unit
    optimizer: HostOptimizer
    parameter_order: list[str]
    captured: Captured

    @classmethod
    def of(
        cls, model: nn.Module, optimizer: torch.optim.Optimizer, dtype: str, chosen: nn.ModuleList | None
    ) -> Parts:
        """Describe ``model``. Raises ``ModelNotSupported``, ``OptimizerNotSupported`` or ``BadInput``."""
        if dtype not in DTYPES:
            raise BadInput(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
        blocks = find_blocks(model, chosen)
        captured = capture(model, optimizer)
        _check_parameters(captured)
        by_block, resident = owned_parameters(model, captured, blocks)
        host = HostOptimizer(optimizer)
        units = [
            Unit(name, owned, host, DTYPES[dtype]) for name, owned in zip(blocks.names, by_block, strict=True)
        ]
        for unit in units:
            if not unit.members:
                raise ModelNotSupported(
                    f"{unit.name} has no parameters of its own, so there is nothing to stream."
                )
        rest = Unit("resident", resident, host, DTYPES[dtype], captured.buffers)
        return cls(model, blocks, units, rest, host, [p.name for p in captured.parameters], captured)

    @property
    def all_units(self) -> list[Unit]:
        return [*self.units, self.resident]

    def work(self, measured: Measured | None, unified: bool) -> Work:
        """The model's sizes, for the planner; block inputs count as nothing where they were not measured."""
        return Work(
            blocks=tuple(
                BlockWork(
                    elements=unit.elements,
                    param_bytes=unit.copy_bytes,
                    trained_param_bytes=unit.trained_copy_bytes,
                    state_bytes=unit.layout.file_bytes,
                    image_bytes=unit.layout.file_bytes,
                    grad_bytes=unit.grad_bytes,
                    forward_flop=measured.block_flop if measured else 0.0,
                )
                for unit in self.units
            ),
            input_bytes=round_up(measured.input_bytes) if measured else 0,
            resident_image_bytes=self.resident.layout.file_bytes,
            resident_state_bytes=self.resident.layout.file_bytes,
            resident_param_bytes=self.resident.copy_bytes,
            resident_elements=self.resident.elements,
            resident_grad_bytes=self.resident.grad_bytes,
            workspace_bytes=max(measured.block_bytes, measured.last_bytes) if measured else 0,
            head_flop=measured.head_flop if measured else 0.0,
            unified=unified,
        )

    def index(self) -> dict[str, Any]:
        """The index that every manifest of the run refers to: where each atom lies."""
        atoms: dict[str, Any] = {}
        for unit in self.all_units:
            for name, found in ((unit.name, unit.state_atoms), (frozen_name(unit), unit.frozen_atoms)):
                atoms.update({atom.key: _describe(atom, name) for atom in found})
        return {"version": 1, "atoms": atoms}


def frozen_name(unit: Unit) -> str:
    """The name of the unit that holds the parameters which never change."""
    return f"{unit.name}.frozen"


def _describe(atom: Atom, unit: str) -> dict[str, Any]:
    whole = Box.whole(atom.shape).to_json()
    return {
        "name": atom.name,
        "slot": atom.slot,
        "shape": list(atom.shape),
        "dtype": atom.dtype,
        "fragments": [{"unit": unit, "key": atom.key, "global": whole, "local": whole}],
    }


def _check_parameters(captured: Captured) -> None:
    for parameter in captured.parameters:
        if not parameter.parameter.is_floating_point():
            raise ModelNotSupported(
                f"parameter {parameter.name} is {parameter.parameter.dtype}; only floating-point ones are trained."
            )
        if parameter.parameter.dtype == torch.float64:
            raise ModelNotSupported(
                f"parameter {parameter.name} is torch.float64; masters are kept in fp32, which would lose bits. "
                "Call model.float() first."
            )
    if not any(parameter.trained for parameter in captured.parameters):
        raise BadInput(
            "no parameter both requires grad and is in the optimizer, so there is nothing to train."
        )


def same_model(parts: Parts, store: LocalStore, manifest: Manifest) -> None:
    """Raises ``RunMismatch`` naming the first atom in which the run differs from the model."""
    theirs = store.atoms(manifest)
    ours = parts.index()["atoms"]
    for key in [*ours, *theirs]:
        mine, other = ours.get(key), theirs.get(key)
        if (
            mine is None
            or other is None
            or (mine["shape"], mine["dtype"]) != (other["shape"], other["dtype"])
        ):
            raise RunMismatch(
                f"{store.root} holds another model or optimizer: {key} is {_sort(other)} there and {_sort(mine)} here. "
                "Give this one its own directory, or build the model and optimizer that the run was made with."
            )


def same_layouts(builder: Builder, manifest: Manifest) -> None:
    """Raises ``RunMismatch`` if a file of the run has its tensors at other places: the same names, shapes and
    dtypes in another order, as after a change of the model's code."""
    for name, stored in builder.by_file_name().items():
        ref = manifest.files.get(name)
        if ref is None or builder.store.layout(ref).header != stored.layout.header:
            raise _other_layout(ref.path if ref else name)


def _other_layout(path: str) -> RunMismatch:
    return RunMismatch(
        f"{path} holds its tensors in another order, or other blocks, than this model has. Build the model with the "
        "code and the blocks= that the run was made with, or give this one its own directory."
    )


def _sort(atom: dict[str, Any] | None) -> str:
    return "absent" if atom is None else f"{atom['dtype']} {atom['shape']}"


# Values


def materialise(
    parts: Parts, unit: Unit, modules: list[nn.Module], init: Callable[[nn.Module], Any] | None, seed: int
) -> dict[str, torch.Tensor]:
    """The initial values of a unit's parameters: their own where they are real; where they are on ``meta``,
    made by ``init`` or by the modules' own ``reset_parameters``. Each unit draws from its own key.

    Raises ``ModelNotSupported`` for a parameter that nothing initialises.
    """
    originals = {m.name: m.owned.captured.parameter for m in unit.members}
    made = {name: nn.Parameter(_fresh(p), p.requires_grad) for name, p in originals.items()}
    missing = {id(made[name]) for name, p in originals.items() if p.is_meta}
    for member in unit.members:
        install(member.owned, made[member.name])
    rng.seed_generators(rng.key_seed(seed, 0, 0, f"init {unit.name}"), torch.device("cpu"))
    try:
        with torch.no_grad():
            for module in modules:
                if any(id(p) in missing for p in module._parameters.values()):
                    _initialise(parts.model, module, init)
    finally:
        for member in unit.members:
            install(member.owned, member.owned.captured.parameter)
    for name, parameter in originals.items():
        if parameter.is_meta and bool(torch.isnan(made[name]).any()):
            raise ModelNotSupported(
                f"nothing initialises parameter {name}, which is on meta. Pass init=, a function that initialises the "
                "parameters that one module itself holds."
            )
    return {name: (made[name] if p.is_meta else p).detach() for name, p in originals.items()}


def _fresh(parameter: nn.Parameter) -> torch.Tensor:
    """Memory for an initialiser to fill: a copy of a real parameter, or nothing but NaN."""
    if not parameter.is_meta:
        return parameter.detach().clone()
    return torch.full(parameter.shape, float("nan"), dtype=parameter.dtype, device="cpu")


def _initialise(model: nn.Module, module: nn.Module, init: Callable[[nn.Module], Any] | None) -> None:
    """Initialise the parameters that ``module`` itself holds."""
    own = init or getattr(model, "_init_weights", None) or getattr(model, "init_weights_of", None)
    if own is not None:
        own(module)
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()  # type: ignore[operator]
    else:
        raise ModelNotSupported(
            f"{type(module).__name__} is on meta and has no reset_parameters(). Pass init=, a function that "
            "initialises the parameters of one module."
        )


def unit_modules(parts: Parts, unit: Unit) -> list[nn.Module]:
    """The modules that hold the parameters of ``unit``, in the model's order."""
    holders = {id(module) for member in unit.members for module, _ in member.owned.places}
    return [module for module in parts.model.modules() if id(module) in holders]


class Builder:
    """Makes the runtime of ``parts`` in an open store, and fills it afresh or from a commit."""

    def __init__(
        self,
        parts: Parts,
        store: LocalStore,
        device: Device,
        pool: BufferPool,
        placement: Placement,
        copies: int,
    ) -> None:
        self.parts, self.store, self.device = parts, store, device
        self.pool, self.placement = pool, placement
        self.stored = {unit.name: store.unit(unit.name, unit.layout, copies) for unit in parts.all_units}
        self.stored_frozen = {
            unit.name: store.unit(frozen_name(unit), unit.frozen_layout, 1)
            for unit in parts.all_units
            if unit.frozen
        }
        self.newest: dict[str, Stored] = {}
        self.frozen: dict[str, Stored] = {}
        self.residency = Residency(pool, parts.units, parts.resident, device.torch_device)
        self.param_offsets = _offsets([unit.copy_bytes for unit in parts.units])
        self.grad_offsets = _offsets([unit.grad_bytes for unit in parts.units])

    def by_file_name(self) -> dict[str, StoredUnit]:
        """Every unit's files by the name under which a manifest refers to them."""
        frozen = {f"{name}.frozen": stored for name, stored in self.stored_frozen.items()}
        return {**self.stored, **frozen}

    def space_needed(self, clip: bool, horizontal: bool, input_bytes: int) -> int:
        """Bytes that the run still has to take from the file system."""
        units = [*self.stored.values(), *self.stored_frozen.values()]
        scratch = input_bytes + sum(self._param_scratch_bytes())
        if clip or horizontal:
            scratch += self._grad_scratch_bytes()
        return self.store.space_needed(units, scratch)

    def _param_scratch_bytes(self) -> list[int]:
        if all(self.placement.params):
            return [0]
        return [unit.copy_bytes for unit in self.parts.units]

    def _grad_scratch_bytes(self) -> int:
        return 0 if all(self.placement.gradients) else sum(unit.grad_bytes for unit in self.parts.units)

    def create_files(self) -> None:
        """Reserve the space of all generations."""
        for unit in (*self.stored.values(), *self.stored_frozen.values()):
            unit.create()

    def build(self, model: nn.Module, seed: int, publish: Callable[[Step], None]) -> Runtime:
        """The runtime, with scratch files and resident memory, not yet filled."""
        parts, resident = self.parts, self.parts.resident
        params, grads = sum(self._param_scratch_bytes()), self._grad_scratch_bytes()
        extents = count()
        resident_copy = as_tensor(self.pool.take(max(resident.copy_bytes, 1), "resident parameters"))
        return Runtime(
            model=model,
            device=self.device,
            dtype=resident.dtype,
            seed=seed,
            blocks=parts.units,
            resident=resident,
            placement=self.placement,
            optimizer=parts.optimizer,
            residency=self.residency,
            store=self.store,
            patch=Patch(parts.blocks),
            block_units=[self.stored[unit.name] for unit in parts.units],
            resident_unit=self.stored[resident.name],
            frozen_units=self.stored_frozen,
            newest=self.newest,
            frozen=self.frozen,
            param_scratch=self.store.scratch("params", params) if params else None,
            param_offsets=self.param_offsets,
            grad_scratch=self.store.scratch("gradients", grads) if grads else None,
            grad_offsets=self.grad_offsets,
            input_scratch=InputScratch(lambda nbytes: self.store.scratch(f"inputs-{next(extents)}", nbytes)),
            resident_buffer=self.pool.take(resident.layout.file_bytes, "resident state"),
            resident_copy=resident_copy,
            resident_leaves={},
            parameter_order=parts.parameter_order,
            publish=publish,
        )

    # Filling

    def fill_fresh(self, run: Runtime, init: Callable[[nn.Module], Any] | None, seed: int) -> None:
        """Initial values of every unit: written to its first generation, and its working copy derived."""
        with rng.preserved_generators(torch.device("cpu")):
            for index, unit in enumerate([*self.parts.units, self.parts.resident]):
                values = materialise(self.parts, unit, unit_modules(self.parts, unit), init, seed)
                state, frozen = self._image(run, index), self._frozen_image(unit)
                unit.write_images(values, as_tensor(state), None if frozen is None else as_tensor(frozen))
                parts_state = self.parts.optimizer.state_of
                for member in unit.trained:
                    unit.write_state(member, as_tensor(state), parts_state(member.owned.captured.parameter))
                del values
                self._write(unit, self.stored[unit.name], state, self.newest)
                if frozen is not None:
                    self._write(unit, self.stored_frozen[unit.name], frozen, self.frozen)
                self._derive(run, index, unit, state, frozen)

    def fill_from(self, run: Runtime, manifest: Manifest) -> None:
        """Every unit as ``manifest`` has it, each byte verified as it is read."""
        for index, unit in enumerate([*self.parts.units, self.parts.resident]):
            state, frozen = self._image(run, index), self._frozen_image(unit)
            self._read(manifest, unit.name, self.stored[unit.name], state, unit.name, self.newest)
            if frozen is not None:
                self._read(
                    manifest, frozen_name(unit), self.stored_frozen[unit.name], frozen, unit.name, self.frozen
                )
            self._derive(run, index, unit, state, frozen)
        run.resident.read_buffers(as_tensor(run.resident_buffer))

    def _image(self, run: Runtime, index: int) -> Buffer:
        """The buffer for a unit's state image; that of a unit which stays on the host is kept."""
        if index == len(self.parts.units):
            return run.resident_buffer
        buffer = self.pool.take(self.parts.units[index].layout.file_bytes, "optimizer state")
        self.residency.images[index] = buffer
        return buffer

    def _frozen_image(self, unit: Unit) -> Buffer | None:
        return self.pool.take(unit.frozen_layout.file_bytes, "frozen parameters") if unit.frozen else None

    def _write(self, unit: Unit, stored: StoredUnit, image: Buffer, book: dict[str, Stored]) -> None:
        generation = stored.acquire()
        checksums = stored.write(generation, image.view, kind="state", phase="setup", priority=0).result()
        book[unit.name] = Stored(generation, tuple(checksums))

    def _read(
        self,
        manifest: Manifest,
        name: str,
        stored: StoredUnit,
        image: Buffer,
        unit: str,
        book: dict[str, Stored],
    ) -> None:
        ref = manifest.files[name]
        generation = stored.generation_of(ref.path)
        stored.read(generation, image.view, ref.checksums, kind="state", phase="setup", priority=0).result()
        if bytes(image.view[: len(stored.layout.header)]) != stored.layout.header:
            raise _other_layout(ref.path)
        book[unit] = Stored(generation, ref.checksums)

    def _derive(self, run: Runtime, index: int, unit: Unit, state: Buffer, frozen: Buffer | None) -> None:
        """The working copy, to where the device will read it; and let go of images that do not stay."""
        is_resident = index == len(self.parts.units)
        images = as_tensor(state), None if frozen is None else as_tensor(frozen)
        if is_resident:
            unit.write_copy(*images, run.resident_copy)
        else:
            copy = self.pool.take(unit.copy_bytes, "parameters")
            unit.write_copy(*images, as_tensor(copy))
            self._place_copy(run, index, unit, copy)
            if not self.placement.optimizer[index]:
                self.pool.give(self.residency.images.pop(index))
        if frozen is not None:
            self.pool.give(frozen)

    def _place_copy(self, run: Runtime, index: int, unit: Unit, copy: Buffer) -> None:
        if self.placement.params[index]:
            self.residency.copies[index] = copy
            return
        assert run.param_scratch is not None
        offset, trained = run.param_offsets[index], unit.trained_copy_bytes
        for start, stop in ((0, trained), (trained, unit.copy_bytes)):
            if stop > start:
                run.param_scratch.write(
                    offset + start, copy.view[start:stop], kind="params", phase="setup", priority=0
                ).result()
        self.pool.give(copy)


def install_resident(run: Runtime) -> None:
    """Give the prologue and epilogue parameters to compute with, whose gradients are summed in fp32."""
    for member in run.resident.members:
        view = run.resident.copy_view(run.resident_copy, member)
        parameter = leaf(run.device.upload(view), member.trained)
        if member.trained:
            parameter.register_post_accumulate_grad_hook(_resident_accumulator(run, member))
        run.resident_leaves[member.name] = parameter
        install(member.owned, parameter)


def _resident_accumulator(run: Runtime, member):
    def accumulate(parameter: torch.Tensor) -> None:
        held = run.residency.resident_grads
        if parameter.grad is None:  # a source took all that was on its way here
            return
        assert held is not None
        run.residency.accumulate(run.resident, held, member, parameter.grad)
        parameter.grad = None

    return accumulate


def empty_originals(parts: Parts) -> None:
    """Move the model's own parameters to ``meta``: their values live in the store now. The objects stay the
    same, so the optimizer's groups still refer to them. Either all are moved or none.

    Raises ``BadInput`` naming a parameter that something else holds on to.
    """
    moved: list[tuple[nn.Parameter, nn.Parameter]] = []
    for captured in parts.captured.parameters:
        parameter = captured.parameter
        if parameter.is_meta:
            continue
        parameter.grad = None
        empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        try:
            torch.utils.swap_tensors(parameter, empty)
        except RuntimeError as error:
            for original, real in moved:
                torch.utils.swap_tensors(original, real)
            raise BadInput(
                f"parameter {captured.name} cannot be moved out of memory, because something else holds on to it: "
                f"{error}. Let go of earlier outputs of the model, and of weak references to its parameters."
            ) from error
        moved.append((parameter, empty))


def _offsets(sizes: list[int]) -> list[int]:
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += size
    return offsets


def switch_off_cache(model: nn.Module) -> None:
    """A key-value cache is an input that changes; training does not need it."""
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # type: ignore[union-attr]
        warnings.warn(
            "model.config.use_cache was switched off: out-of-core blocks keep no cache", stacklevel=3
        )
