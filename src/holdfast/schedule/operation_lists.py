"""The conversion of a plan to the operation lists that the engine runs, and to the simulator's machine.

A model of equal blocks becomes ``Work``, fractions become whole blocks, and a machine's rates become those of the
mixture of bytes that the list moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, inf

from ..errors import DoesNotFit
from ..profiles import MachineProfile
from ..quantities import format_bytes, round_up
from .memory_use import MakesOps, predict
from .operations import COMPUTE, DOWNLOAD, SSD_READ, SSD_WRITE, UPDATE, UPLOAD, Op, as_guessed, lane_bytes
from .planner import formulas
from .planner.formulas import FRACTIONS, RECYCLED
from .planner.linear_program import Solution
from .planner.machine_rates import Machine
from .planner.plan_search import Case, best_at
from .planner.training_setting import Setting, bus_of, ssd_of
from .simulate import Simulation, simulate
from .vertical import vertical
from .work import LEAST_MEMORY, BlockPlacement, BlockWork, StepShape, TileWork, Work, tile_count

EVALUATION_BATCHES = 8
"""Micro-batches that an evaluation takes through the blocks together, if memory allows."""
TRIES = 8
"""Number of times that the linear program is run with less memory, until whole blocks fit."""
STEPS = 4
"""Number of times that a list is played."""
UPDATE_WORKERS = 2
"""Default number of a run's update workers; a machine's rate of updates is that of all of them together."""
COMMIT_SYNCS = 3
"""Syncs one after another until a commit is durable: the last file, the manifest, the directory."""


def work_of(setting: Setting) -> Work:
    """Return one step's work, as the engine would measure it."""
    s, method = setting, setting.method
    count = tile_count(s.resident_state_bytes)
    part = TileWork(
        elements=round(s.resident_elements / count),
        state_bytes=round_up(round(s.resident_state_bytes / count)),
        grad_bytes=round(s.resident_elements / count) * method.grad_bytes,
    )
    block = replace(
        _unit_work(s, s.model.trained_block_parameters, s.model.frozen_block_bytes),
        forward_flop=s.model.forward_flop,
        backward_flop=s.model.backward_flop,
        routed_bytes=s.model.routed.reads(s.micro_batches),
    )
    embedding = (_unit_work(s, s.tables),) * bool(s.tables)
    epilogue = (_unit_work(s, s.tables - s.tied_elements),) * bool(s.tables)
    return Work(
        blocks=(*embedding, *(block,) * s.blocks, *epilogue),
        input_bytes=round_up(s.input_bytes),
        resident_state_bytes=count * part.state_bytes,
        resident_cut=(part,) * count,
        resident_param_bytes=s.resident_elements * method.param_bytes + s.model.frozen_resident_bytes,
        resident_trained_param_bytes=s.resident_elements * method.param_bytes,
        resident_grad_bytes=count * part.grad_bytes,
        resident_elements=s.resident_elements,
        unified=s.machine.device_shares_host,
        head_flop=s.head_flop,
        tied_block=0 if s.tied_elements else None,
        expert_bytes=s.slot_bytes,
        expert_staging_bytes=s.slot_staging_bytes,
        workspace_bytes=s.workspace_bytes,
    )


def _unit_work(s: Setting, elements: int, frozen_bytes: int = 0) -> BlockWork:
    """Return the work of a unit of ``elements`` trained elements, without its floating-point operations."""
    state_bytes, param_bytes = round(elements * s.state_bytes_each), elements * s.method.param_bytes
    count = tile_count(state_bytes)
    rest_bytes = round_up(round((state_bytes - param_bytes) / count)) if s.method.is_split else 0
    tile = TileWork(
        elements=round(elements / count),
        state_bytes=round_up(round(state_bytes / count)),
        trained_param_bytes=round_up(round(param_bytes / count)),
        rest_bytes=rest_bytes,
    )
    return BlockWork(
        elements=elements,
        param_bytes=round_up(param_bytes + frozen_bytes),
        trained_param_bytes=round_up(param_bytes),
        state_bytes=count * tile.state_bytes,
        is_split=s.method.is_split,
        cut=(tile,) * count,
        grad_bytes=elements * s.method.grad_bytes,
    )


def shape_of(setting: Setting) -> StepShape:
    """Return the shape of a step that ends in a commit, if any step does."""
    method = setting.method
    return StepShape(
        micro_batches=setting.micro_batches,
        clipping=method.clipping,
        order=method.order,
        delayed_fraction=setting.delayed_fraction,
        commit=method.commit_every > 0,
    )


def placement_of(fractions: Mapping[str, float], blocks: int) -> BlockPlacement:
    """Return a placement with fractions rounded down to whole blocks.

    The last block's own inputs never leave, so the fraction of inputs is of the blocks before it.
    """
    rows = {name: max(blocks - (name == "activations"), 1) for name in FRACTIONS}
    down = {name: floor(fractions[name] * count + 1e-6) / count for name, count in rows.items()}
    return BlockPlacement.fractions(blocks, **down)


def machine_of(profile: MachineProfile, operations: Sequence[Op]) -> Machine:
    """Return the machine with which the simulator times ``operations``.

    If both ways together are faster or slower than in turns, rates are scaled so that these bytes take the right time.
    """
    moved, ssd, bus = lane_bytes(operations), ssd_of(profile), bus_of(profile)
    slow_ssd = ssd.slowdown(moved[SSD_READ], moved[SSD_WRITE])
    cores = _Cores.of(profile, operations, moved[SSD_READ] + moved[SSD_WRITE])
    slow_bus = 1.0 if bus.one == inf else bus.slowdown(moved[UPLOAD], moved[DOWNLOAD])
    return Machine(
        ssd_read_bytes_per_second=ssd.one / slow_ssd,
        ssd_write_bytes_per_second=ssd.other / slow_ssd,
        upload_bytes_per_second=bus.one / slow_bus,
        download_bytes_per_second=bus.other / slow_bus,
        compute_flop_per_second=profile.device_flop_per_second
        / (profile.compute_factor * cores.slow_compute),
        update_elements_per_second=profile.update_elements_per_second / cores.slow_update,
        commit_seconds=COMMIT_SYNCS * profile.ssd_sync_seconds,
        shared_ssd=True,
        shared_bus=True,
        shared_cores=cores.shared,
    )


@dataclass(frozen=True)
class _Cores:
    """The sharing of the host's cores by computing and updates.

    All that the SSD moves is checksummed on the cores as well; that time is added to their other work.
    """

    shared: bool = False
    """True if computing and updates take turns, because computing uses all cores."""
    slow_compute: float = 1.0
    slow_update: float = 1.0

    @classmethod
    def of(cls, profile: MachineProfile, operations: Sequence[Op], ssd_bytes: int) -> _Cores:
        if not profile.device_shares_host:
            return cls()
        flop = sum(op.work for op in operations if op.lane == COMPUTE)
        computing = flop * profile.compute_factor / profile.device_flop_per_second
        elements = sum(op.work for op in operations if op.lane == UPDATE)
        updating = elements / profile.update_elements_per_second
        checking = ssd_bytes / profile.check_bytes_per_second if profile.check_bytes_per_second else 0.0
        spare = profile.spare_cores
        if not spare:
            busy = computing + updating
            slow = 1 + checking / max(profile.host_cores, 1) / busy if busy else 1.0
            return cls(True, slow, slow)
        updating *= max(UPDATE_WORKERS / spare, 1.0)  # measured with all of them side by side
        slow = max(UPDATE_WORKERS / spare, 1.0) * (1 + checking / spare / updating if updating else 1.0)
        return cls(False, 1.0, slow)


def host_bytes(setting: Setting, placement: BlockPlacement, schedule: MakesOps = vertical) -> int:
    """Return the host memory of a run, from its operation list."""
    memory = predict(work_of(setting), placement, shape_of(setting), schedule, EVALUATION_BATCHES)
    return formulas.PROCESS_BYTES + memory.host_bytes


def play(
    setting: Setting, placement: BlockPlacement, schedule: MakesOps = vertical, steps: int = STEPS
) -> Simulation:
    """Simulate a placement, with every guess right."""
    operations = as_guessed(schedule(work_of(setting), placement, shape_of(setting)))
    return simulate([operations] * steps, machine_of(setting.machine, operations))


def fit(case: Case, micro_batches: int, delayed: float = 0.0) -> tuple[Solution, BlockPlacement]:
    """Return the best plan whose whole blocks and buffers fit, as the operation list counts them.

    The linear program counts a buffer for a kind of which a part stays as that part of a buffer. The shortage is
    subtracted from the memory that the program counts for the same whole blocks, so that it must propose others, and
    the program is run again; with half of the subtraction if there is no plan then. Returned fractions are of whole
    blocks.

    ``delayed`` is rounded to whole blocks. Raises ``DoesNotFit``.
    """
    allowed, blocks = case.machine.host_memory_bytes, case.setting(micro_batches).units
    delayed = round((case.method.delayed or delayed) * blocks) / blocks
    setting, above, less = case.setting(micro_batches, delayed), allowed, allowed
    for _ in range(TRIES):
        machine = replace(case.machine, host_memory_bytes=less)
        solution = best_at(replace(case, machine=machine), micro_batches, delayed)
        if solution is None:
            if less >= above - 1:
                break
            less = (less + above) // 2
            continue
        placement = replace(placement_of(solution.fractions, blocks), saving=solution.setting.saving)
        whole = _in_whole_blocks(setting, placement)
        over = host_bytes(setting, placement) - allowed
        if over <= 0:
            return whole, placement
        above, less = less, max(floor(whole.of(formulas.host_bytes)) - over, 1)
    nothing = replace(placement_of(dict.fromkeys(FRACTIONS, 0.0), blocks), saving=LEAST_MEMORY)
    needed = host_bytes(setting, nothing)
    if needed <= allowed:  # no plan near the best one was found, and this one fits
        return _in_whole_blocks(setting, nothing), nothing
    raise DoesNotFit(
        f"the engine's buffers for {micro_batches} micro-batches take {format_bytes(needed)} of host memory with "
        f"everything on the SSD, and there are {format_bytes(allowed)}. Fewer or smaller micro-batches need less."
    )


def _in_whole_blocks(setting: Setting, placement: BlockPlacement) -> Solution:
    """Return ``placement`` as a solution, with as many waiting gradients in dead buffers as possible."""
    setting = replace(setting, saving=placement.saving)
    shares, waits = placement.shares, formulas.waiting_bytes(setting)
    part = formulas.dead_bytes(setting)(shares) / waits if waits else 0.0
    return Solution(setting, {**shares, RECYCLED: min(part, shares["gradients"])})
