"""The builder of a run's runtime in its open store, filled afresh, from another state, or from a commit.

Units are filled one at a time, so that the model is never whole in memory. Every byte that comes from a commit is
verified. Called by ``offload``, once its checks have passed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import accumulate, count

import torch

from ...io.buffers import Buffer, BufferPool
from ...optim.declared_state import anew
from ...quantities import round_up
from ...schedule.memory_use import buffers
from ...store.commit.generations import Generations
from ...store.format.manifest import HOME, Manifest
from ...store.format.reference_files import Reference
from ...store.run_store import LocalStore
from .. import rng
from ..data_parallel import DataParallelGroup
from ..memory.block_states import BlockState, as_tensor
from ..memory.device import Device
from ..memory.residency import Residency
from ..memory.transfer_pool import PINNED_KINDS
from ..memory.transient_buffers import BuffersInManifest
from ..memory.unit_files import ExpertFile, StateTile, UnitFile
from ..memory.zeroth_order import ZerothOrderState
from ..model.blocks import Patch
from ..model.initial_values import Init, initial_values
from ..model.microbatches import hand_over
from ..model.model_parts import ModelParts
from ..model.quantised_layers import is_quant_state, set_quant_state
from ..runtime import InputScratch, Runtime, StoredBlock
from .drive_setup import Drives
from .engine_resume import ReshardedCommit, other_layout
from .process_settings import return_freed_at_once
from .starting_state import StartingState, held_for, part_of
from .step_planning import RunPlan


def stored_units(
    parts: ModelParts, store: LocalStore, drives: Drives, references: Mapping[str, Reference]
) -> dict[str, Generations]:
    """Return the generation files of every unit, by the name that commits use. Writes nothing yet.

    Those with ``references`` are read from a folder.
    """
    found = {}
    for unit in parts.all_units:
        for file in unit.files:
            reference = references.get(file.name)
            folder = HOME if reference is not None else drives.folders_of.get(file.name, HOME)
            copies = store.retain + store.spare if isinstance(file, StateTile) else 1
            cuts = file.cuts if isinstance(file, (StateTile, ExpertFile)) else ()
            found[file.name] = store.unit(file.name, file.layout, copies, folder, cuts, reference)
    return found


def build(
    parts: ModelParts,
    plan: RunPlan,
    store: LocalStore,
    stored: dict[str, Generations],
    device: Device,
    data_parallel: DataParallelGroup,
    seed: int,
) -> Runtime:
    """Build the runtime with all its files and resident memory, not yet filled with values."""
    if not plan.placement.saving.loads_ahead:
        return_freed_at_once()
    limit = None if plan.memory is None else plan.memory.pinned_bytes
    pool = BufferPool() if device.unified else BufferPool(device.pin, PINNED_KINDS, limit)
    resident, extents = parts.resident, count()
    kept = 0 if device.unified else buffers(plan.operations).get(("host", "kept_inputs"), 0)
    for files in stored.values():
        files.create()
    params, grads = plan.param_scratch_bytes, plan.grad_scratch_bytes
    mine = "" if data_parallel.alone else f"-{data_parallel.control.stream}"
    with ExitStack() as undo:
        undo.callback(pool.close)
        run = Runtime(
            model=parts.model,
            device=device,
            data_parallel=data_parallel,
            seed=seed,
            blocks=parts.units,
            resident=resident,
            placement=plan.placement,
            optimizer=parts.optimizer,
            residency=Residency(
                pool, parts.units, resident, device.torch_device, kept, _largest_input_bytes(plan)
            ),
            store=store,
            patch=Patch(parts.blocks, hand_over(parts.blocks)),
            stored=stored,
            index=store.put_index(parts.index()),
            param_scratch=store.scratch(f"params{mine}", params) if params else None,
            param_offsets=_param_offsets(parts, plan),
            grad_scratch=store.scratch(f"gradients{mine}", grads) if grads else None,
            grad_offsets=_offsets([unit.share_grad_bytes for unit in parts.units]),
            input_scratch=InputScratch(
                lambda nbytes: store.scratch(f"inputs-{next(extents)}{mine}", nbytes), store.remove_scratch
            ),
            resident_copy=as_tensor(pool.take(max(resident.copy_bytes, 1), "resident parameters")),
            parameter_order=[parameter.name for parameter in parts.captured.parameters],
            transient=BuffersInManifest(parts.captured.passing),
            zeroth=None if parts.optimizer.takes_gradients else ZerothOrderState(),
            expert_slots=parts.expert_slots,
        )
        undo.pop_all()
    return run


def _largest_input_bytes(plan: RunPlan) -> int:
    """Return the most bytes that the plan needs for one input of a block, or for its gradient."""
    holds = (hold for op in plan.operations for hold in op.takes)
    return round_up(max((hold.nbytes for hold in holds if hold.kind in ("inputs", "input_grads")), default=0))


def _param_offsets(parts: ModelParts, plan: RunPlan) -> list[int]:
    """Return the offset in the scratch at which each block's whole compute copy would begin.

    Less than 0 where only what follows the trained parameters is in the scratch.
    """
    offsets = _offsets(plan.placement.scratch_bytes(plan.work))
    return [
        offset - (unit.share_trained_copy_bytes if plan.placement.reads_state(plan.work, block) else 0)
        for block, (offset, unit) in enumerate(zip(offsets, parts.units, strict=True))
    ]


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
        for block in range(len(run.units)):
            _fill_with_values(run, block, init, beginning)


def _fill_with_values(run: Runtime, block: int, init: Init | None, beginning: StartingState | None) -> None:
    """Write the first generation of a unit's files, with the values that the run begins with."""
    unit = run.units[block]
    values = _values(run, unit, init, beginning)

    def begin(file: UnitFile, image: Buffer) -> None:
        unit.write_image(file, values, as_tensor(image))
        if isinstance(file, StateTile):
            _write_existing_state(run, unit, file, image, beginning)
        _write(run, file.name, image)

    _fill_unit(run, block, begin)
    if unit.routed:
        _write_experts(run, unit.expert_file, values)


def _write_existing_state(
    run: Runtime, unit: BlockState, tile: StateTile, image: Buffer, beginning: StartingState | None
) -> None:
    """Write the optimizer state with which a fresh run begins."""
    for piece in tile.pieces:
        made = held_for(run.optimizer, piece.member)
        if beginning is None:
            made = part_of(unit, piece, made)
        else:
            made = beginning.state(piece.name, unit.boxes_of(piece)) or anew(made)
        unit.write_state(tile, piece, as_tensor(image), made)


def _fill_unit(run: Runtime, block: int, fill: Callable[[UnitFile, Buffer], None]) -> None:
    """Have each file's image of a unit filled by ``fill``, except for experts, and derive the unit's compute copy.

    The copy goes where the device will read it. A state image is allocated where it will stay, and released where it
    does not.
    """
    unit, pool, is_resident = run.units[block], run.residency.pool, block == len(run.blocks)
    stays = run.state_stays(block)
    copy = None if is_resident else pool.take(unit.share_copy_bytes, "parameters")
    target, start = (run.resident_copy, None) if copy is None else (as_tensor(copy), 0)
    for file in (file for file in unit.files if file is not unit.expert_file):
        kind = "frozen parameters"
        if isinstance(file, StateTile):
            kind = "resident state" if is_resident and stays else "optimizer state"
        image = pool.take(file.layout.file_bytes, kind)
        fill(file, image)
        unit.write_copy(file, as_tensor(image), target, start)
        if file is unit.frozen_file:
            _set_quant_states(run, unit, as_tensor(image))
        if stays and isinstance(file, StateTile):
            run.residency.images[block, file.index] = image
        else:
            pool.give(image)
    if copy is None:
        run.data_parallel.gather_copy(unit, run.resident_copy)
    else:
        _place_copy(run, block, copy)


def _set_quant_states(run: Runtime, unit: BlockState, image: torch.Tensor) -> None:
    """Have the 4-bit layers of a unit read their quant states, which they need before they compute.

    ``image`` is this rank's image of the frozen file. Each state is whole in that of one rank: it is too small to be
    divided. Collective: every rank must call this.
    """
    held = {piece.name for piece in unit.frozen_pieces}
    for member in unit.frozen:
        for module, name in member.owned.places:
            if is_quant_state(module, name):
                state = torch.zeros(member.shape, dtype=member.value_dtype)
                if member.name in held:
                    state.copy_(unit.frozen_file.view(image, member.name))
                run.data_parallel.gather_value(unit, member.name, state)
                set_quant_state(module, name, state)


def _values(
    run: Runtime, unit: BlockState, init: Init | None, beginning: StartingState | None
) -> dict[str, torch.Tensor]:
    """Return the values of a unit's parameters, as the first rank has them."""
    if run.data_parallel.rank == 0:
        values = _own_values(run, unit, init, beginning)
    else:
        values = {m.name: torch.empty(m.shape, dtype=m.value_dtype) for m in unit.all_members}
    if run.data_parallel.alone:
        return values
    values = {member.name: values[member.name].to("cpu", member.value_dtype) for member in unit.all_members}
    run.data_parallel.from_first(list(values.values()))
    return values


def _own_values(
    run: Runtime, unit: BlockState, init: Init | None, beginning: StartingState | None
) -> dict[str, torch.Tensor]:
    blocks = run.patch.blocks
    by_module = unit not in run.blocks[blocks.embeddings : len(blocks.modules)]
    if beginning is None:
        return initial_values(run.model, unit, init, run.seed, by_module=by_module)
    there = {member.name: beginning.parameter(member.name) for member in unit.all_members}
    found = {name: value for name, value in there.items() if value is not None}
    if len(found) == len(there):
        return found
    return initial_values(run.model, unit, init, run.seed, found, by_module) | found


def _fill_from(run: Runtime, manifest: Manifest) -> None:
    """Fill every unit from ``manifest``, and verify each byte as it is read.

    State in other files (of another number of ranks, or on another drive) is written to this rank's own files.
    """
    recut = ReshardedCommit(run.store, manifest)

    def read(file: UnitFile, image: Buffer) -> None:
        _fill_image(run, recut, file, image)
        if file is run.resident.tiles[0]:
            run.resident.read_buffers(as_tensor(image))

    for block in range(len(run.units)):
        _fill_unit(run, block, read)
        if run.units[block].routed:
            _find_experts(run, recut, run.units[block].expert_file)


def _fill_image(run: Runtime, recut: ReshardedCommit, file: UnitFile, image: Buffer) -> None:
    """Fill one image from the file of the same name, or from other files."""
    name, files = file.name, run.stored[file.name]
    ref = recut.file(name, not isinstance(file, StateTile), files.is_mine)
    if ref is None or not files.is_mine(ref.path):
        recut.fill(image, file)
        _write(run, name, image)
        return
    generation = files.generation_of(ref.path)
    files.read(generation, image.view, ref.checksums, kind="state", phase="setup", priority=0).result()
    if bytes(image.view[: len(files.layout.header)]) != files.layout.header:
        raise other_layout(ref.path)
    files.keep_reference()
    run.newest[name] = StoredBlock(generation, ref.checksums)


def _write_experts(run: Runtime, file: ExpertFile, values: dict[str, torch.Tensor]) -> None:
    """Write the file of the experts of a block by pieces, with ``values`` by name; or find where it refers to."""
    files = run.stored[file.name]
    if files.reference is not None:
        image = run.residency.pool.take(file.layout.file_bytes, "frozen parameters")
        file.fill(values, image.view, 0)
        _write(run, file.name, image)
        run.residency.pool.drop(image)
        return
    generation = files.acquire()
    checksums = files.write_through(generation, partial(file.fill, values), phase="setup", priority=0)
    run.newest[file.name] = StoredBlock(generation, checksums)


def _find_experts(run: Runtime, recut: ReshardedCommit, file: ExpertFile) -> None:
    """Verify the file of the experts of a block by pieces; or write it, if experts came with their block before."""
    files = run.stored[file.name]
    ref = recut.file(file.name, True, files.is_mine)
    if ref is None or not files.is_mine(ref.path):
        image = run.residency.pool.take(file.layout.file_bytes, "frozen parameters")
        recut.fill(image, file)
        _write(run, file.name, image)
        run.residency.pool.drop(image)
        return
    generation = files.generation_of(ref.path)
    files.verify_through(generation, ref.checksums)
    files.keep_reference()
    run.newest[file.name] = StoredBlock(generation, ref.checksums)


def _write(run: Runtime, name: str, image: Buffer) -> None:
    """Write ``image`` as the first generation of the file ``name``, or find the same bytes where it refers to."""
    files = run.stored[name]
    if files.reference is not None:
        found = files.adopt(image.view)
        run.newest[name] = StoredBlock(0, found)
        return
    generation = files.acquire()
    checksums = files.write(generation, image.view, kind="state", phase="setup", priority=0).result()
    run.newest[name] = StoredBlock(generation, tuple(checksums))


def _place_copy(run: Runtime, block: int, copy: Buffer) -> None:
    if run.placement.params[block]:
        run.residency.copies[block] = copy
        return
    offset = run.param_offsets[block]
    for part in run.scratch_parts(block):
        assert run.param_scratch is not None  # None only if this rank has nothing of any block
        run.param_scratch.write(
            offset + part.at, copy.view[part.at : part.end], kind="params", phase="setup", priority=0
        ).result()
    run.residency.pool.give(copy)
