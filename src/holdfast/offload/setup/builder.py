"""The builder of a run's runtime in its open store, filled afresh, from another state, or from a commit.

Units are filled one at a time, so that the model is never whole in memory. Every byte that comes from a commit is
verified. Called by ``offload``, once its checks have passed.
"""

from __future__ import annotations

from contextlib import ExitStack
from itertools import accumulate, count

import torch

from ...io.buffers import Buffer, BufferPool
from ...optim.declared_state import anew
from ...quantities import round_up
from ...schedule.memory_use import buffers
from ...store.commit.generations import Generations
from ...store.drive_links import HOME
from ...store.format.manifest import Manifest
from ...store.run_store import LocalStore
from .. import rng
from ..data_parallel import DataParallelGroup
from ..memory.block_states import BlockState, as_tensor
from ..memory.device import Device
from ..memory.residency import Residency
from ..memory.transfer_pool import CROSSING
from ..mezo_engine import ZerothOrderState
from ..model.blocks import Patch
from ..model.initial_values import Init, initial_values
from ..model.microbatches import hand_over
from ..model.model_parts import ModelParts
from ..runtime import InputScratch, Runtime, StoredBlock
from .drive_setup import Drives
from .engine_resume import ReshardedCommit, other_layout
from .existing_state import held_for, part_of
from .starting_state import StartingState
from .step_planning import RunPlan


def stored_units(parts: ModelParts, store: LocalStore, drives: Drives) -> dict[str, Generations]:
    """Return the generation files of every unit, by the name that commits use. Writes nothing yet."""
    found = {}
    for unit in parts.all_units:
        folder = drives.folders_of.get(unit.file_name, HOME)
        found[unit.file_name] = store.unit(unit.file_name, unit.layout, store.retain + store.spare, folder)
        if unit.frozen:
            found[unit.frozen_name] = store.unit(unit.frozen_name, unit.frozen_layout, 1, folder)
    return found


def build(
    parts: ModelParts,
    plan: RunPlan,
    store: LocalStore,
    stored: dict[str, Generations],
    device: Device,
    fellows: DataParallelGroup,
    seed: int,
) -> Runtime:
    """Build the runtime with all its files and resident memory, not yet filled with values."""
    limit = None if plan.memory is None else plan.memory.pinned_bytes
    pool = BufferPool() if device.unified else BufferPool(device.pin, CROSSING, limit)
    resident, extents = parts.resident, count()
    kept = 0 if device.unified else buffers(plan.operations).get(("host", "kept_inputs"), 0)
    for files in stored.values():
        files.create()
    params, grads = plan.param_scratch_bytes, plan.grad_scratch_bytes
    mine = "" if fellows.alone else f"-{fellows.control.stream}"
    with ExitStack() as undo:
        undo.callback(pool.close)
        run = Runtime(
            model=parts.model,
            device=device,
            fellows=fellows,
            seed=seed,
            blocks=parts.units,
            resident=resident,
            placement=plan.placement,
            optimizer=parts.optimizer,
            residency=Residency(pool, parts.units, resident, device.torch_device, kept, _largest_lent(plan)),
            store=store,
            patch=Patch(parts.blocks, hand_over(parts.blocks)),
            stored=stored,
            index=store.put_index(parts.index()),
            param_scratch=store.scratch(f"params{mine}", params) if params else None,
            param_offsets=_offsets([unit.share_copy_bytes for unit in parts.units]),
            grad_scratch=store.scratch(f"gradients{mine}", grads) if grads else None,
            grad_offsets=_offsets([unit.share_grad_bytes for unit in parts.units]),
            input_scratch=InputScratch(
                lambda nbytes: store.scratch(f"inputs-{next(extents)}{mine}", nbytes), store.remove_scratch
            ),
            resident_buffer=pool.take(resident.layout.file_bytes, "resident state"),
            resident_copy=as_tensor(pool.take(max(resident.copy_bytes, 1), "resident parameters")),
            parameter_order=[parameter.name for parameter in parts.captured.parameters],
            zeroth=None if parts.optimizer.takes_gradients else ZerothOrderState(),
        )
        undo.pop_all()
    return run


def _largest_lent(plan: RunPlan) -> int:
    """Return the most bytes that the plan needs for one input of a block, or for its gradient."""
    holds = (hold for op in plan.operations for hold in op.takes)
    return round_up(max((hold.nbytes for hold in holds if hold.kind in ("inputs", "input_grads")), default=0))


def _offsets(sizes: list[int]) -> list[int]:
    """Return the offset of each item when items of ``sizes`` bytes lie one after another."""
    return list(accumulate(sizes, initial=0))[:-1]


def fill(run: Runtime, found: Manifest | None, init: Init | None, beginning: StartingState | None) -> None:
    """Fill every unit from the commit ``found``; in a fresh run from ``beginning``, or with initial values."""
    if found is None:
        _fill_fresh(run, init, beginning)
    else:
        _fill_from(run, found)


def _fill_fresh(run: Runtime, init: Init | None, beginning: StartingState | None) -> None:
    """Write initial values as the first generation of every unit, and derive the unit's compute copy.

    All ranks use the values of the first rank.
    """
    run.agreed_buffers()
    with rng.own_generators(torch.device("cpu")):
        for block, unit in enumerate(run.units):
            values = _values(run, unit, init, beginning)
            state, frozen = _images(run, block)
            unit.write_images(values, as_tensor(state), None if frozen is None else as_tensor(frozen))
            for piece in unit.pieces:
                made = held_for(run.optimizer, piece.member)
                if beginning is None:
                    made = part_of(unit, piece, made)
                else:
                    made = beginning.state(piece.name, unit.boxes_of(piece)) or anew(made)
                unit.write_state(piece, as_tensor(state), made)
            del values
            _write(run, unit.file_name, state)
            if frozen is not None:
                _write(run, unit.frozen_name, frozen)
            _derive(run, block, state, frozen)


def _values(
    run: Runtime, unit: BlockState, init: Init | None, beginning: StartingState | None
) -> dict[str, torch.Tensor]:
    """Return the values of a unit's parameters, as the first rank has them."""
    if run.fellows.rank == 0:
        values = _own_values(run, unit, init, beginning)
    else:
        values = {m.name: torch.empty(m.shape, dtype=torch.float32) for m in unit.members}
    if run.fellows.alone:
        return values
    values = {member.name: values[member.name].to("cpu", torch.float32) for member in unit.members}
    run.fellows.from_first(list(values.values()))
    return values


def _own_values(
    run: Runtime, unit: BlockState, init: Init | None, beginning: StartingState | None
) -> dict[str, torch.Tensor]:
    if beginning is None:
        return initial_values(run.model, unit, init, run.seed)
    there = {member.name: beginning.parameter(member.name) for member in unit.members}
    found = {name: value for name, value in there.items() if value is not None}
    if len(found) == len(there):
        return found
    return initial_values(run.model, unit, init, run.seed, known=found) | found


def _fill_from(run: Runtime, manifest: Manifest) -> None:
    """Fill every unit from ``manifest``, and verify each byte as it is read.

    State in other files (of another number of ranks, or on another drive) is written to this rank's own files.
    """
    recut = ReshardedCommit(run.store, manifest)
    for block, unit in enumerate(run.units):
        state, frozen = _images(run, block)
        _fill_image(run, recut, unit, unit.file_name, state)
        if frozen is not None:
            _fill_image(run, recut, unit, unit.frozen_name, frozen)
        _derive(run, block, state, frozen)
    run.resident.read_buffers(as_tensor(run.resident_buffer))


def _fill_image(run: Runtime, recut: ReshardedCommit, unit: BlockState, name: str, image: Buffer) -> None:
    """Fill one unit's image from the file of the same name, or from other files."""
    files = run.stored[name]
    ref = recut.file(name, name == unit.frozen_name, files.is_mine)
    if ref is None or not files.is_mine(ref.path):
        recut.fill(image.view, files.layout, unit.places)
        _write(run, name, image)
        return
    generation = files.generation_of(ref.path)
    files.read(generation, image.view, ref.checksums, kind="state", phase="setup", priority=0).result()
    if bytes(image.view[: len(files.layout.header)]) != files.layout.header:
        raise other_layout(ref.path)
    run.newest[name] = StoredBlock(generation, ref.checksums)


def _images(run: Runtime, block: int) -> tuple[Buffer, Buffer | None]:
    """Return buffers for a unit's state image and its frozen image.

    The state image is allocated where it will stay.
    """
    unit, pool = run.units[block], run.residency.pool
    frozen = pool.take(unit.frozen_layout.file_bytes, "frozen parameters") if unit.frozen else None
    if unit is run.resident:
        return run.resident_buffer, frozen
    state = run.residency.images[block] = pool.take(unit.layout.file_bytes, "optimizer state")
    return state, frozen


def _write(run: Runtime, name: str, image: Buffer) -> None:
    """Write ``image`` as the first generation of the file ``name``."""
    files = run.stored[name]
    generation = files.acquire()
    checksums = files.write(generation, image.view, kind="state", phase="setup", priority=0).result()
    run.newest[name] = StoredBlock(generation, tuple(checksums))


def _derive(run: Runtime, block: int, state: Buffer, frozen: Buffer | None) -> None:
    """Put a unit's compute copy where the device will read it, and release images that do not stay."""
    unit, residency = run.units[block], run.residency
    images = as_tensor(state), None if frozen is None else as_tensor(frozen)
    if unit is run.resident:
        unit.write_copy(*images, run.resident_copy, whole=True)
        run.fellows.gather_copy(unit, run.resident_copy)
    else:
        copy = residency.pool.take(unit.share_copy_bytes, "parameters")
        unit.write_copy(*images, as_tensor(copy))
        _place_copy(run, block, unit, copy)
        if not run.placement.optimizer[block]:
            residency.pool.give(residency.images.pop(block))
    if frozen is not None:
        residency.pool.give(frozen)


def _place_copy(run: Runtime, block: int, unit: BlockState, copy: Buffer) -> None:
    if run.placement.params[block]:
        run.residency.copies[block] = copy
        return
    offset = run.param_offsets[block]
    for part in unit.copy_parts:
        if part.start == part.stop:
            continue
        assert run.param_scratch is not None  # None only if this rank has nothing of any block
        run.param_scratch.write(
            offset + part.at, copy.view[part.at : part.end], kind="params", phase="setup", priority=0
        ).result()
    run.residency.pool.give(copy)
