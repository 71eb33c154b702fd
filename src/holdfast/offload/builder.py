"""Building the runtime of a run in its open store, and filling it: afresh, or from a commit."""

from __future__ import annotations

from itertools import accumulate, count

import torch

from ..io.buffers import Buffer, BufferPool
from ..store.generations import Generations
from ..store.local import LocalStore
from ..store.manifest import Manifest
from ..update.forms import STEP
from . import rng
from .beginning import Beginning
from .blocks import Patch
from .device import Device
from .initial import Init, initial_values
from .microbatches import hand_over
from .parts import Parts
from .planning import Plan
from .residency import Residency
from .resume import other_layout
from .runtime import InputScratch, Runtime, Stored
from .units import Unit, as_tensor


def stored_units(parts: Parts, store: LocalStore) -> dict[str, Generations]:
    """The files of every unit, by the name under which a commit refers to them. Nothing is written yet."""
    found = {}
    for unit in parts.all_units:
        found[unit.name] = store.unit(unit.name, unit.layout, store.retain + store.spare)
        if unit.frozen:
            found[unit.frozen_name] = store.unit(unit.frozen_name, unit.frozen_layout, 1)
    return found


def build(
    parts: Parts, plan: Plan, store: LocalStore, stored: dict[str, Generations], device: Device, seed: int
) -> Runtime:
    """The runtime, with all its files and resident memory, not yet filled."""
    pool, resident, extents = BufferPool(), parts.resident, count()
    for files in stored.values():
        files.create()
    params, grads = plan.param_scratch_bytes, plan.grad_scratch_bytes
    return Runtime(
        model=parts.model,
        device=device,
        seed=seed,
        blocks=parts.units,
        resident=resident,
        placement=plan.placement,
        optimizer=parts.optimizer,
        residency=Residency(pool, parts.units, resident, device.torch_device),
        store=store,
        patch=Patch(parts.blocks, hand_over(parts.blocks)),
        stored=stored,
        index=store.put_index(parts.index()),
        param_scratch=store.scratch("params", params) if params else None,
        param_offsets=_offsets([unit.copy_bytes for unit in parts.units]),
        grad_scratch=store.scratch("gradients", grads) if grads else None,
        grad_offsets=_offsets([unit.grad_bytes for unit in parts.units]),
        input_scratch=InputScratch(
            lambda nbytes: store.scratch(f"inputs-{next(extents)}", nbytes), store.remove_scratch
        ),
        resident_buffer=pool.take(resident.layout.file_bytes, "resident state"),
        resident_copy=as_tensor(pool.take(max(resident.copy_bytes, 1), "resident parameters")),
        parameter_order=[parameter.name for parameter in parts.captured.parameters],
    )


def _offsets(sizes: list[int]) -> list[int]:
    """Where each lies when one follows the other."""
    return list(accumulate(sizes, initial=0))[:-1]


def fill(run: Runtime, found: Manifest | None, init: Init | None, beginning: Beginning | None) -> None:
    """Every unit as ``found`` has it; of a fresh run, with initial values, or as ``beginning`` has it."""
    if found is None:
        _fill_fresh(run, init, beginning)
    else:
        _fill_from(run, found)


def _fill_fresh(run: Runtime, init: Init | None, beginning: Beginning | None) -> None:
    """Initial values of every unit: written to its first generation, and its working copy derived."""
    with rng.own_generators(torch.device("cpu")):
        for block, unit in enumerate(run.units):
            values = _values(run, unit, init, beginning)
            state, frozen = _images(run, block)
            unit.write_images(values, as_tensor(state), None if frozen is None else as_tensor(frozen))
            for member in unit.trained:
                held = run.optimizer.state_of(member.owned.captured.parameter)
                made = {slot: v for slot, v in held.items() if not getattr(v, "is_meta", False)}
                if (
                    beginning is not None
                ):  # one without leaves what a fresh optimizer begins with, such as seeds
                    is_fresh = not float(made.get(STEP, 0))
                    made = beginning.state(member.name) or (made if is_fresh else {})
                unit.write_state(member, as_tensor(state), made)
            del values
            _write(run, unit.name, state)
            if frozen is not None:
                _write(run, unit.frozen_name, frozen)
            _derive(run, block, state, frozen)


def _values(
    run: Runtime, unit: Unit, init: Init | None, beginning: Beginning | None
) -> dict[str, torch.Tensor]:
    """Of a unit's parameters."""
    if beginning is None:
        return initial_values(run.model, unit, init, run.seed)
    there = {member.name: beginning.parameter(member.name) for member in unit.members}
    found = {name: value for name, value in there.items() if value is not None}
    if len(found) == len(there):
        return found
    return initial_values(run.model, unit, init, run.seed, known=found) | found


def _fill_from(run: Runtime, manifest: Manifest) -> None:
    """Every unit as ``manifest`` has it, each byte verified as it is read."""
    for block, unit in enumerate(run.units):
        state, frozen = _images(run, block)
        _read(run, manifest, unit.name, state)
        if frozen is not None:
            _read(run, manifest, unit.frozen_name, frozen)
        _derive(run, block, state, frozen)
    run.resident.read_buffers(as_tensor(run.resident_buffer))


def _images(run: Runtime, block: int) -> tuple[Buffer, Buffer | None]:
    """Buffers for a unit's state image, kept where it will stay, and its frozen image."""
    unit, pool = run.units[block], run.residency.pool
    frozen = pool.take(unit.frozen_layout.file_bytes, "frozen parameters") if unit.frozen else None
    if unit is run.resident:
        return run.resident_buffer, frozen
    state = run.residency.images[block] = pool.take(unit.layout.file_bytes, "optimizer state")
    return state, frozen


def _write(run: Runtime, name: str, image: Buffer) -> None:
    """Write ``image`` as a file's first generation."""
    files = run.stored[name]
    generation = files.acquire()
    checksums = files.write(generation, image.view, kind="state", phase="setup", priority=0).result()
    run.newest[name] = Stored(generation, tuple(checksums))


def _read(run: Runtime, manifest: Manifest, name: str, image: Buffer) -> None:
    """Read into ``image`` the generation of a file that ``manifest`` names."""
    ref, files = manifest.files[name], run.stored[name]
    generation = files.generation_of(ref.path)
    files.read(generation, image.view, ref.checksums, kind="state", phase="setup", priority=0).result()
    if bytes(image.view[: len(files.layout.header)]) != files.layout.header:
        raise other_layout(ref.path)
    run.newest[name] = Stored(generation, ref.checksums)


def _derive(run: Runtime, block: int, state: Buffer, frozen: Buffer | None) -> None:
    """The working copy, to where the device will read it; and let go of images that do not stay."""
    unit, residency = run.units[block], run.residency
    images = as_tensor(state), None if frozen is None else as_tensor(frozen)
    if unit is run.resident:
        unit.write_copy(*images, run.resident_copy)
    else:
        copy = residency.pool.take(unit.copy_bytes, "parameters")
        unit.write_copy(*images, as_tensor(copy))
        _place_copy(run, block, unit, copy)
        if not run.placement.optimizer[block]:
            residency.pool.give(residency.images.pop(block))
    if frozen is not None:
        residency.pool.give(frozen)


def _place_copy(run: Runtime, block: int, unit: Unit, copy: Buffer) -> None:
    if run.placement.params[block]:
        run.residency.copies[block] = copy
        return
    assert run.param_scratch is not None
    offset = run.param_offsets[block]
    for start, stop in unit.copy_parts:
        run.param_scratch.write(
            offset + start, copy.view[start:stop], kind="params", phase="setup", priority=0
        ).result()
    run.residency.pool.give(copy)
