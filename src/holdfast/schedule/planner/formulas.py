"""Formulas for what a step of equal blocks moves, computes and holds, given what stays in host memory.

The unknowns lie between 0 and 1: the fractions of ``FRACTIONS`` that stay in host memory, and ``RECYCLED``, the part of
waiting gradients that lies in buffers which are dead by then. Everything else is a number, so each formula is affine:
the linear program takes it as a row, and a report evaluates it. Bytes and seconds, per block and pass (``Phase``) or
for the whole step.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...quantities import MiB
from ..step_builder import (
    DEVICE_SLOTS,
    INPUT_SLOTS,
    OUTPUT_SLOTS,
    PARAM_SLOTS,
    REDO_SLOTS,
    RESIDENT_GRAD_SLOTS,
    SHORT_STATE_SLOTS,
    STATE_SLOTS,
    UPDATED_SLOTS,
    device_input_slots,
    inputs_stay_on_device,
)
from ..work import tile_count
from .training_setting import Affine, Setting

FRACTIONS = ("params", "optimizer", "activations", "gradients")
RECYCLED = "recycled"

COMPUTE, OPTIMIZER, BUS, SSD = "computing", "optimizer", "copies", "SSD"

PROCESS_BYTES = 512 * MiB
"""Host memory of Python, torch and its kernels."""


@dataclass(frozen=True)
class Phase:
    """One block in the forward or the backward pass: all micro-batches, and the updates beside them."""

    compute_seconds: float
    updated_elements: float
    up: Affine
    """Bytes to the device."""
    down: Affine
    read: Affine
    """Bytes from the SSD."""
    written: Affine


def forward(s: Setting) -> Phase:
    """Return the forward pass, with the delayed updates of the step before."""
    m, size, stay = s.micro_batches, s.input_bytes, _num_staying(s)
    params, state, inputs, delayed = (
        on_ssd(s, "params"),
        on_ssd(s, "optimizer"),
        _spilled(s),
        s.delayed_fraction,
    )
    passes = _forward_passes(s)
    written = delayed * (_updated(s) + _stored(s, state)) + passes * inputs
    return Phase(
        compute_seconds=passes * m * s.forward_seconds,
        updated_elements=delayed * s.elements,
        up=Affine(passes * ((m - stay) * size + s.param_bytes + s.model.routed.reads(m)[0])),
        down=Affine(m * size),
        read=passes * (params + s.model.routed.reads(m)[0])
        + delayed * (_read_by_update(s, state, _copies_alone(s)) + on_ssd(s, "gradients")),
        written=written
        + (_each_commit(s) if s.saving.resident_state else 1.0) * s.resident_state_bytes / s.blocks,
    )


def backward(s: Setting) -> Phase:
    """Return the backward pass with the recomputation, and the updates that are not delayed."""
    m, size, stay = s.micro_batches, s.input_bytes, _num_staying(s)
    params, state, now = on_ssd(s, "params"), on_ssd(s, "optimizer"), 1 - s.delayed_fraction
    has_copy = _copies_alone(s) + (1 - Affine.of("params")) * s.holds_copies
    return Phase(
        compute_seconds=m * s.backward_seconds,
        updated_elements=now * s.elements,
        up=Affine(
            (2 * m - stay) * size
            + s.param_bytes
            + s.model.routed.reads(m)[1]
            + (s.tied_param_bytes + s.tied_grad_bytes) / s.blocks
        ),
        down=Affine((m - stay) * size + s.grad_bytes + s.tied_grad_bytes / s.blocks),
        read=_forward_passes(s) * _spilled(s)
        + params
        + s.model.routed.reads(m)[1]
        + s.tied_param_bytes / s.blocks * (1 - Affine.of("params"))
        + now * _read_by_update(s, state, has_copy),
        written=now * (_updated(s) + _stored(s, state)) + waiting(s) * on_ssd(s, "gradients"),
    )


def lanes(s: Setting, phase: Phase) -> dict[str, list[Affine]]:
    """Return the seconds that each lane takes for ``phase``, as rows whose largest value counts.

    On a device that shares the host's cores, computing and the optimizer take turns.
    """
    compute = phase.compute_seconds
    update = phase.updated_elements / s.machine.update_elements_per_second
    if s.machine.device_shares_host:
        compute += update
    return {
        COMPUTE: [Affine(compute)],
        OPTIMIZER: [Affine(update)],
        BUS: s.bus.rows(phase.up, phase.down),
        SSD: s.ssd.rows(phase.read, phase.written),
    }


def other_seconds(s: Setting) -> float:
    """Return the seconds of a step besides its blocks.

    They are those of the head and, between two steps, of the update of what stays on the device. Its state, where that
    is on the SSD, is read meanwhile, except for what the first tiles hold.
    """
    head = s.micro_batches * s.head_seconds
    elements, bus = s.resident_elements, s.bus
    moved = s.method.grad_bytes * elements / bus.other + s.method.param_bytes * elements / bus.one
    tiles = tile_count(s.resident_state_bytes)
    late = (
        0.0 if s.saving.resident_state else s.resident_state_bytes * max(0, tiles - _state_slots(s)) / tiles
    )
    return head + moved + max(elements / s.machine.update_elements_per_second, late / s.ssd.one)


def waiting(s: Setting) -> float:
    """Return the fraction of a step's gradients that waits for the end of the backward pass."""
    return 1.0 if s.method.keeps_all_gradients else s.delayed_fraction


def on_ssd(s: Setting, what: str) -> Affine:
    """Return the bytes of one block's params, optimizer state or gradients (``what``) that live on the SSD."""
    size = {"params": s.param_bytes, "optimizer": s.state_bytes, "gradients": s.grad_bytes}[what]
    return size * (1 - Affine.of(what))


def _copies_alone(s: Setting) -> Affine:
    """Return the fraction of blocks whose compute copy stays in host memory and whose state does not.

    A state stays only where the compute copy does, because a compute copy saves more traffic for its bytes.
    """
    return Affine.of("params") - Affine.of("optimizer")


def dead_bytes(s: Setting) -> Affine:
    """Return the bytes of dead buffers in which gradients may wait.

    These are block inputs that were used, in whose place the gradients of delayed updates lie.
    """
    if s.method.keeps_all_gradients:
        return Affine()
    return s.blocks * s.micro_batches * s.input_bytes * Affine.of("activations")


def waiting_bytes(s: Setting) -> float:
    """Return the bytes of the gradients that wait, all blocks together."""
    return waiting(s) * s.blocks * s.grad_bytes


def host_bytes(s: Setting) -> Affine:
    """Return the most host memory that is held: that of the operation lists' slots, and of what stays.

    A buffer for moving what does not stay is counted in proportion to how much moves.
    """
    params, state, inputs = Affine.of("params"), Affine.of("optimizer"), Affine.of("activations")
    m, size, shares = s.micro_batches, s.input_bytes, s.machine.device_shares_host
    stay = _all_stay(s)
    rows = (s.units - stay) * m * inputs + (m + 2 * INPUT_SLOTS) * (1 - inputs)
    rows += (1 - stay) * (m + 1) + m * shares
    held = 1.0 if shares else min(RESIDENT_GRAD_SLOTS / tile_count(s.resident_state_bytes), 1.0)
    resident = s.resident_elements * (held * s.method.grad_bytes + s.method.param_bytes)
    resident += s.model.frozen_resident_bytes
    return (
        rows * size
        + s.param_bytes * s.blocks * params
        + (s.largest_param_bytes * _param_slots(s) + s.tied_param_bytes) * (1 - params)
        + _updated(s) / s.tiles * UPDATED_SLOTS
        + s.state_bytes * (s.blocks * state + _state_slots(s) / s.tiles * (1 - state))
        + (REDO_SLOTS * s.state_bytes / s.tiles if s.method.clipping == "speculate" else 0.0)
        + (s.resident_state_bytes if s.saving.resident_state else 0)
        + s.saving.grad_slots * s.largest_grad_bytes
        + s.tied_grad_bytes * (1 - waiting(s) * Affine.of("gradients"))
        + resident
        + (s.workspace_bytes + s.slot_bytes if shares else s.slot_staging_bytes)
        + waiting_bytes(s) * (Affine.of("gradients") - Affine.of(RECYCLED))
        + PROCESS_BYTES
    )


def device_bytes(s: Setting) -> float:
    """Return the most memory of a separate device that is held, for any number of blocks.

    The model's own forward holds one block input for each micro-batch.
    """
    stay = _all_stay(s)
    brought = (2 - stay) * device_input_slots(s.input_bytes)
    inputs = (brought + OUTPUT_SLOTS + (1 + stay) * s.micro_batches) * s.input_bytes
    resident = (
        s.resident_elements * (s.method.param_bytes + s.method.grad_bytes) + s.model.frozen_resident_bytes
    )
    block = DEVICE_SLOTS * s.largest_param_bytes + s.saving.grad_slots * s.largest_grad_bytes
    block += s.tied_param_bytes + s.tied_grad_bytes
    return block + inputs + resident + s.workspace_bytes + s.slot_bytes


def ssd_bytes(s: Setting) -> Affine:
    """Return the space that the run takes on the SSDs.

    Frozen parameters are there once, whether they stay in host memory or not.
    """
    method = s.method
    files = method.retain + (1 if method.commit_every == 1 else 2)
    state = files * (s.blocks * s.state_bytes + s.resident_state_bytes)
    waits = waiting(s) * s.blocks * on_ssd(s, "gradients")
    routed = s.model.routed
    block = s.model.frozen_block_bytes + routed.count * routed.nbytes
    frozen = s.blocks * block + s.model.frozen_resident_bytes
    return state + s.blocks * (_updated(s) + _spilled(s)) + waits + frozen


def written_bytes(s: Setting) -> Affine:
    """Return the bytes that one step writes to the SSDs."""
    return s.blocks * (forward(s).written + backward(s).written)


def read_bytes(s: Setting) -> Affine:
    """Return the bytes that one step reads from the SSDs."""
    return s.blocks * (forward(s).read + backward(s).read) + (
        0 if s.saving.resident_state else s.resident_state_bytes
    )


def frozen_moved_bytes(s: Setting) -> float:
    """Return the bytes of the blocks' frozen parameters that the passes of one step bring to the device."""
    return s.blocks * (_forward_passes(s) + 1) * s.model.frozen_block_bytes + _routed_bytes(s)


def frozen_read_bytes(s: Setting) -> Affine:
    """Return the bytes of the blocks' frozen parameters that one step reads from the SSDs."""
    routed = _routed_bytes(s)
    return (frozen_moved_bytes(s) - routed) * (1 - Affine.of("params")) + routed


# -- helpers ----------------------------------------------------------------------------------------


def _all_stay(s: Setting) -> bool:
    """Return whether all tensors between two blocks stay on a separate device until they are used."""
    may = s.saving.inputs_stay and not s.machine.device_shares_host
    return may and inputs_stay_on_device(s.input_bytes, s.micro_batches)


def _num_staying(s: Setting) -> int:
    """Return the number of micro-batches whose tensors between two blocks stay on the device."""
    return s.micro_batches if _all_stay(s) else int(s.method.order == "snake")


def _routed_bytes(s: Setting) -> float:
    """Return the bytes of experts that one step reads one by one, at worst."""
    forward, backward = s.model.routed.reads(s.micro_batches)
    return s.blocks * (_forward_passes(s) * forward + backward)


def _forward_passes(s: Setting) -> float:
    """Return the mean number of forward passes of a block: the last has none of its own, unless the head is a unit."""
    return 1.0 if s.tables else (s.blocks - 1) / s.blocks


def _spilled(s: Setting) -> Affine:
    """Return the bytes of one block's inputs that go to the SSD and come back."""
    return s.micro_batches * s.input_bytes * (1 - Affine.of("activations"))


def _each_commit(s: Setting) -> float:
    """Return the number of commits per step."""
    return 1 / s.method.commit_every if s.method.commit_every else 0.0


def _stored(s: Setting, state: Affine) -> Affine:
    """Return the bytes of a block's state that an update writes to the SSD.

    It writes the state that lives there, and at a commit also the rest.
    """
    return state + _each_commit(s) * (s.state_bytes - state)


def _read_by_update(s: Setting, state: Affine, has_copy: Affine) -> Affine:
    """Return the bytes of a block's state that an update reads from the SSD.

    ``has_copy`` is the fraction of blocks whose compute copy is in host memory. If masters are split, the copy is not
    read with the rest of such a block's state.
    """
    return state - s.trained_param_bytes * s.method.is_split * has_copy


def _updated(s: Setting) -> Affine:
    """Return the bytes of a block's parameters that an update writes to the SSD, besides those of its state."""
    return s.trained_param_bytes * (not s.method.is_split) * (1 - Affine.of("params"))


def _loads_ahead(s: Setting) -> bool:
    """Return whether compute copies and states are read before they are needed."""
    return s.saving.loads_ahead or not s.machine.device_shares_host


def _param_slots(s: Setting) -> int:
    """Return the number of compute copies in host memory at once, besides those that stay."""
    return (PARAM_SLOTS if _loads_ahead(s) else 1) + (s.holds_copies and s.delayed_fraction < 1)


def _state_slots(s: Setting) -> int:
    """Return the number of optimizer states in host memory at once, besides those that stay."""
    return STATE_SLOTS if _loads_ahead(s) else SHORT_STATE_SLOTS
