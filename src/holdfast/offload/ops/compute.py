"""The computations of a step: a block's forward, its recomputation with backward, and the loss.

All run on the engine's own thread. A block's parameters are installed for one pass: each place in the modules holds a
leaf that shares the memory of the compute copy. The leaf's gradient is added to the fp32 sum as soon as it arrives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...errors import ModelNotSupported
from ...schedule.mezo_schedule import DISPLACED
from ...schedule.operations import TIED, Op
from ...schedule.work import micro_batches
from .. import rng
from ..memory.block_states import BlockState
from ..memory.residency import Gradients
from ..model.blocks import install, is_compiled
from ..model.boundaries import BlockOutput, Boundary, Graph, refuse_hidden, samples_of
from ..model.embedding_gradients import EmbeddingInParts
from ..model.input_changes import InputWatch
from ..model.microbatches import (
    RESIDENT,
    BlockCall,
    ForwardEnd,
    autocast_as,
    casts,
    extract_loss,
    without_autocast,
)
from ..runtime import MicroBatch, Runtime, Step
from ..setup.process_settings import callers_default
from . import input_ops, parameter_ops

FORWARD = "forward"
Held = Callable[[], Gradients]
"""Function that returns the place to which a block's gradients are added, once there are any."""


def forward(run: Runtime, op: Op, step: Step) -> None:
    """Run a block for one micro-batch, and keep its input, or its graph, for the backward pass."""
    block, m = op.key.block, op.key.micro_batch
    boundary = _reach(run, step, m, block)
    with _installed(run, op, step, (lambda: run.residency.grads[block]) if step.kept[block] else None):
        boundary.remember()
        if step.kept[block] and not casts(boundary.autocast):
            with torch.enable_grad():
                output, boundary.graph = _with_graph(run, step, m, boundary)
        else:
            args, kwargs, _ = boundary.inputs()
            with torch.no_grad():
                output = _run_block(run, step, m, boundary, args, kwargs)
            if run.attributes.looking and m == 0:
                boundary.samples = samples_of(output)
    _deliver(run, step, m, boundary, output)
    if block and boundary.host is not None:  # what stayed goes to the host now
        boundary.device = None


def evaluate(run: Runtime, op: Op, step: Step) -> None:
    """Run a block for one micro-batch without gradients; after the last block also the epilogue."""
    _free_states(run, op)
    block, m = op.key.block, op.key.micro_batch
    batch = step.micro_batches[m]
    boundary = None if block == run.epilogue else _reach(run, step, m, block)
    with _installed(run, op, step, None):
        if boundary is not None:
            del batch.boundaries[block]
            args, kwargs, _ = boundary.inputs()
            _enter(run, step, m, block)
            with autocast_as(boundary.autocast), callers_default(), run.experts.computing(block):
                output = run.patch.forwards[block](*args, **kwargs)
            _deliver(run, step, m, boundary, output)
        if block == len(run.blocks) - 1:
            batch.result = _finish(run, step, m)
    if block == len(run.blocks) - 1:
        parameter_ops.refuse_sampled(run, step)


def displaced(run: Runtime, op: Op, step: Step) -> None:
    """Run a block for one micro-batch with displaced parameters; after the last block also epilogue and loss."""
    block, m = op.key.block, op.key.micro_batch
    batch = step.micro_batches[m]
    with _displaced(run, block, m // step.shape.micro_batches):
        if block != run.epilogue:
            boundary = _reach(run, step, m, block)
            del batch.boundaries[block]
            args, kwargs, _ = boundary.inputs()
            _enter(run, step, m, block)
            with autocast_as(boundary.autocast), callers_default():
                output = run.patch.forwards[block](*args, **kwargs)
            _deliver(run, step, m, boundary, output)
        if block == len(run.blocks) - 1:
            loss = extract_loss(_finish(run, step, m))
            batch.loss = 0.0 if batch.weight == 0.0 else float(loss)
            batch.deliveries.pop(len(run.patch.forwards) - 1).device = None
    if m == len(step.micro_batches) - 1:
        parameter_ops.release(run, step, DISPLACED, block, -1)


def backward(run: Runtime, op: Op, step: Step) -> None:
    """Run a block's backward for one micro-batch; for the last block, epilogue and loss come before it.

    The block is computed again, with a graph, unless the graph of its forward pass was kept.
    """
    _free_states(run, op)
    block, m = op.key.block, op.key.micro_batch
    batch, is_last = step.micro_batches[m], block == len(run.blocks) - 1
    place = None if run.device.unified else run.device.torch_device
    grads = run.residency.start_grads(block, place)
    if is_last and run.tied is not None:
        run.residency.start_grads(run.tied, place)
    if is_last and block != run.epilogue:
        with torch.enable_grad():
            _reach(run, step, m, block)
    with _installed(run, op, step, lambda: grads), torch.enable_grad():
        if block == run.epilogue:
            batch.tracker.running.set()
            with without_autocast():
                _loss_and_backward(run, step, m)
            batch.tracker.running.clear()
            return
        boundary = batch.boundaries[block]
        graph, boundary.graph = boundary.graph, None
        if not is_last and (graph is None or step.must_repeat):
            boundary.refuse_changes(run.blocks[block].name)
        if graph is None:
            if (
                boundary.device is None
            ):  # its graph was to be kept, but autocast was on, and a graph would hold copies of parameters
                assert boundary.host is not None
                boundary.device = [run.device.bring(tensor) for tensor in boundary.host]
            output, graph = _with_graph(run, step, m, boundary)
            run.attributes.rounds_otherwise |= boundary.rounds_otherwise(output, run.blocks[block].name)
            if is_last:
                _deliver(run, step, m, boundary, output)
            elif step.gauge is not None:
                step.gauge.note(m, boundary, graph, run.patch.blocks.modules[block])
            del output
        batch.tracker.running.set()
        with without_autocast():  # autocast is for the forward alone, as in torch
            if is_last:
                _loss_and_backward(run, step, m)
            run.absent.enter_backward(block)
            batch.deliveries.pop(block).backward(graph, boundary.seeds(graph.leaves))
            del graph
            boundary.send_back()
        batch.tracker.running.clear()
    del batch.boundaries[block], boundary
    input_ops.used(run, block, m)
    if block == 0 and m == len(step.micro_batches) - 1:
        step.buffers, step.transient = run.agreed_buffers(), run.transient.changed()


def _free_states(run: Runtime, op: Op) -> None:
    """Return the memory of idle optimizer states to the system, if ``op`` computes in their place."""
    if any(hold.kind == "state" for hold in op.takes):
        run.residency.pool.free_idle("optimizer state")


def check_losses(run: Runtime, op: Op, step: Step) -> None:
    """Skip the step if a loss is not finite on any rank; no update has started yet.

    The NaN of a micro-batch without targets skips nothing if its gradient is finite. That of a mean over no labels is
    zero, but that of a sum divided by their number is NaN. Collective: every rank must call this.
    """
    for batch in step.micro_batches:
        if isinstance(batch.loss, torch.Tensor):
            batch.loss = float(run.device.fetch(batch.loss))
    parameter_ops.refuse_sampled(run, step)
    here = [
        (
            loss := float(batch.loss or 0.0),
            batch.weight,
            # MeZO moves by the losses themselves
            math.isfinite(loss)
            or (step.delta is None and batch.lacks_targets() and _has_finite_gradients(run, step, batch)),
        )
        for batch in step.micro_batches
    ]
    gathered = run.data_parallel.control.everyone(here)
    step.losses = [(loss, weight) for losses in gathered for loss, weight, _ in losses]
    bad = [
        (rank, m)
        for rank, losses in enumerate(gathered)
        for m, (*_, is_good) in enumerate(losses)
        if not is_good
    ]
    if bad:
        rank, m = bad[0]
        of = "" if run.data_parallel.alone else f" of rank {rank}"
        step.skipped = True
        step.reason = f"the loss of micro-batch {m % step.shape.micro_batches}{of} is {gathered[rank][m][0]}"


def _has_finite_gradients(run: Runtime, step: Step, batch: MicroBatch) -> bool:
    """Return whether gradients came back to the last block's output, and all of them were finite.

    So must be the sums of the last block and of what stays on the device, in which those of the epilogue are.
    """
    last = len(run.blocks) - 1
    sums = [(run.blocks[last], run.residency.grads[last]), (run.resident, step.resident_grads)]
    views = [
        held.view(unit, member)
        for unit, held in sums
        for member in unit.members
        if held is not None and member.name in held.touched
    ]
    bounds = [run.device.fetch(pair) for pair in batch.returned + _bounds(views)]
    return bool(batch.returned) and all(bool(torch.isfinite(pair).all()) for pair in bounds)


def _bounds(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """Return the least and the largest number in each tensor that has any, both NaN if one is."""
    real = [torch.view_as_real(each) if each.is_complex() else each for each in tensors if each is not None]
    return [torch.stack(torch.aminmax(each)) for each in real if each.numel()]


def _reach(run: Runtime, step: Step, m: int, block: int) -> Boundary:
    """Run the thread of micro-batch ``m`` to its call of ``block``, and return the call's boundary."""
    batch = step.micro_batches[m]
    if step.training and block == m == 0:
        run.attributes.begin(len(step.micro_batches), not step.horizontal)
    attending = step.training and run.attributes.attending
    with run.attributes.before(block, m) if attending else nullcontext():
        event = _to_next_block(run, step, m, block)
    if not isinstance(event, BlockCall) or event.block != block:
        name, embeddings = run.blocks[block].name, run.patch.blocks.embeddings
        got = f"called block {event.block}" if isinstance(event, BlockCall) else "returned"
        if block < embeddings:
            raise ModelNotSupported(
                f"the model {got} before it called {name}, a streamed embedding. Every micro-batch must call it once,"
                f" before all blocks. Give {RESIDENT}."
            )
        raise ModelNotSupported(
            f"after block {block - 1} the model {got}, where block {block} was to come. Every micro-batch must"
            " call every block once, in order (no early exit, no layer drop)."
            + (f" Embeddings count as blocks, unless {RESIDENT}." if embeddings else "")
        )
    boundary = batch.boundaries[block] = batch.tracker.boundary(event, run.blocks[block].name)
    if block:
        input_ops.hand_on(run, batch.deliveries[block - 1], boundary)
    return boundary


def _to_next_block(run: Runtime, step: Step, m: int, block: int) -> BlockCall | ForwardEnd:
    """Run the model's own code, which must call ``block`` next."""
    batch = step.micro_batches[m]
    _leave(run, step, m, block - 1)
    with _drawing_nothing(run, step, block):
        if block == 0:
            return batch.coroutine.start()
        return batch.coroutine.resume(batch.deliveries[block - 1].reply())


def _with_graph(run: Runtime, step: Step, m: int, boundary: Boundary) -> tuple[Any, Graph]:
    """Return a block's output, and the graph that computed it."""
    name = run.blocks[boundary.block].name
    args, kwargs, leaves = boundary.inputs()
    output = _run_block(run, step, m, boundary, args, kwargs)
    if run.attributes.looking:
        run.attributes.find_gradients(boundary.block)
    refuse_hidden(pytree.tree_leaves(output), name, "output")
    return output, Graph.of(output, boundary.constants, leaves)


def _run_block(run: Runtime, step: Step, m: int, boundary: Boundary, args: tuple, kwargs: dict) -> Any:
    """Run the block's own forward with its random numbers, and check that it changed nothing else."""
    watch = InputWatch(args, kwargs, run.patch.blocks.buffer_holders[boundary.block])
    _enter(run, step, m, boundary.block)
    attending = step.training and run.attributes.attending
    inside = run.attributes.inside(boundary.block, m) if attending else nullcontext()
    with (
        inside,
        _drawing_nothing(run, step, boundary.block),
        autocast_as(boundary.autocast),
        callers_default(),
        run.experts.computing(boundary.block),
        _embedding_in_parts(run, boundary.block),
    ):
        output = run.patch.forwards[boundary.block](*args, **kwargs)
    watch.refuse_changes(run.blocks[boundary.block].name)
    return output


def _embedding_in_parts(run: Runtime, block: int) -> AbstractContextManager[object]:
    """Return a context in which the gradient of a block that is an embedding comes in parts, where that can be done."""
    blocks = run.patch.blocks
    if block < blocks.embeddings and not is_compiled(blocks.modules[block]):
        return EmbeddingInParts()
    return nullcontext()


def _deliver(run: Runtime, step: Step, m: int, boundary: Boundary, output: Any) -> None:
    """Keep a block's output for the model's thread, which gets it at the next block's turn."""
    batch = step.micro_batches[m]
    moves = bool(run.blocks[boundary.block].trained or boundary.moving)
    needs_grad = step.training and torch.is_grad_enabled() and moves
    delivery = BlockOutput(output, boundary.constants, needs_grad)
    batch.deliveries[boundary.block] = delivery
    batch.tracker.delivered(delivery)


def _finish(run: Runtime, step: Step, m: int) -> Any:
    """Run the thread from the last block's output to the model's return, and return the model's result."""
    batch, last = step.micro_batches[m], len(run.patch.forwards) - 1
    _leave(run, step, m, last)
    attending = step.training and run.attributes.attending
    with run.attributes.before(last + 1, m) if attending else nullcontext():
        event = batch.coroutine.resume(batch.deliveries[last].reply())
    if run.epilogue is not None:  # it was the input of another unit
        batch.deliveries[last].host = batch.deliveries[last].device = None
    if not isinstance(event, ForwardEnd):
        raise ModelNotSupported(
            f"the model called {run.blocks[event.block].name} again after its last block, as models do whose layers"
            " share their parameters (ALBERT, universal transformers). Every micro-batch must call every block once:"
            " pass blocks= that do, or train this model in memory, with a Checkpointer."
        )
    return event.value


def _loss_and_backward(run: Runtime, step: Step, m: int) -> None:
    """Run epilogue and loss, and the backward of both down to the last block's output."""
    batch = step.micro_batches[m]
    loss = extract_loss(_finish(run, step, m))
    if batch.weight == 0.0:  # no target tokens: the mean loss is NaN, and the micro-batch has no share
        batch.loss = 0.0
        return
    batch.loss = loss.detach().clone()  # read when all losses are there
    count = run.data_parallel.world_size * len(step.micro_batches)
    scaled = loss / count if batch.weight is None else loss * batch.weight
    if step.loss_scale is not None:
        scaled = step.loss_scale.enlarge(scaled)
    batch.tracker.end_at_earlier(loss)
    scaled.backward(retain_graph=True)  # the prologue's graph is still needed; the rest goes with its tensors
    batch.returned = _bounds(batch.deliveries[len(run.patch.forwards) - 1].grads)


@contextmanager
def _drawing_nothing(run: Runtime, step: Step, block: int) -> Iterator[None]:
    """Raise ``ModelNotSupported`` if random numbers are drawn before the end of a streamed embedding.

    The prologue's generators are seeded again after it, so the same numbers would be drawn twice.
    """
    if block >= run.patch.blocks.embeddings or not step.training:
        yield
        return
    before = rng.states(run.device.torch_device)
    yield
    if rng.states(run.device.torch_device) != before:
        raise ModelNotSupported(
            f"the model draws random numbers before or in {run.blocks[block].name}, a streamed embedding. Give"
            ' embedding_and_head="resident".'
        )


def _enter(run: Runtime, step: Step, m: int, block: int) -> None:
    """Enter the code of a block, with its random numbers; embeddings belong to the prologue."""
    run.absent.enter(block)
    _seed(run, step, m, block, rng.inside)


def _leave(run: Runtime, step: Step, m: int, block: int) -> None:
    """Enter the code after a block, with its random numbers; before the first one if ``block`` is -1."""
    run.absent.leave(block)
    _seed(run, step, m, block, rng.after)


def _seed(run: Runtime, step: Step, m: int, block: int, place_of: Callable[[int], str]) -> None:
    if step.training:
        repeated = block - run.patch.blocks.embeddings
        place = rng.PROLOGUE if repeated < 0 else place_of(repeated)
        count = step.shape.micro_batches  # a zeroth-order step runs each twice, with the same numbers
        number = run.data_parallel.rank * count + m % count
        rng.seed_generators(rng.key_seed(run.seed, step.number, number, place), run.device.torch_device)


@contextmanager
def _installed(run: Runtime, op: Op, step: Step, held: Held | None) -> Iterator[None]:
    """Install the block's parameters in the modules for one computation, in the last block's also the tied ones.

    Their gradients are added to what ``held`` returns at that time. After the pass's last computation the parameters
    leave the device, unless the graph of the forward pass is kept, which needs them.
    """
    block, kept = op.key.block, step.training and step.kept[op.key.block]
    phase = FORWARD if kept else op.key.phase or op.key.kind
    for micro_batch in (op.key.micro_batch, -1):
        if (phase, block, micro_batch) in run.residency.on_device:
            break
    places = {(phase, block, micro_batch): held}
    if run.tied is not None and block == run.epilogue:
        tied = run.tied
        places[TIED, tied, micro_batch] = held and (lambda: run.residency.grads[tied])
    members = [member for _, number, _ in places for member in run.blocks[number].members]
    try:
        for place, to in places.items():
            unit = run.blocks[place[1]]
            for member, parameter in zip(unit.members, _leaves(run, place, unit, to), strict=True):
                install(member.owned, parameter)
        yield
    finally:
        for member in members:
            install(member.owned, run.absent.stand_in(member))
        torch.clear_autocast_cache()  # the cache would hold every parameter of every block
    is_final = micro_batch >= 0 or op.key.micro_batch == micro_batches(step.shape, block)[-1]
    if is_final:
        for place in places:
            if kept and op.key.kind == FORWARD:
                parameter_ops.refuse_changes(run, step, *place)
            else:
                parameter_ops.release(run, step, *place)


@torch.inference_mode(False)  # as at ``parameter_ops.upload``
def _leaves(run: Runtime, place: tuple, unit: BlockState, held: Held | None) -> list[torch.nn.Parameter]:
    """Return the leaves that a pass computes with, created at its first computation."""
    leaves = run.residency.leaves.get(place)
    if leaves is None:
        copy = run.residency.on_device[place]
        in_parts = not run.patch.blocks.is_repeated(place[1])
        leaves = run.residency.leaves[place] = [
            run.residency.leaf(unit, member, unit.copy_view(copy, member), held, in_parts)
            for member in unit.members
        ]
        run.residency.samples[place] = run.residency.samples_of(place[1]).read(copy)
    return leaves


@contextmanager
def _displaced(run: Runtime, block: int, stream: int) -> Iterator[None]:
    """Install a block's parameters and those of prologue and epilogue, displaced in one direction (``stream``)."""
    unit, place = run.blocks[block], (DISPLACED, block, -1)
    if place not in run.residency.leaves:
        both = run.residency.on_device[place]
        run.residency.leaves[place] = [
            run.residency.leaf(unit, member, unit.copy_view(copy if member.trained else both, member), None)
            for copy in (both, both[unit.copy_bytes :])
            for member in unit.members
        ]
    assert run.zeroth is not None
    leaves, resident = run.residency.leaves[place], run.zeroth.leaves[stream]
    try:
        for number, member in enumerate(unit.members, stream * len(unit.members)):
            install(member.owned, leaves[number])
        for member in run.resident.trained:
            install(member.owned, resident[member.name])
        yield
    finally:
        for member in unit.members:
            install(member.owned, run.absent.stand_in(member))
        for member in run.resident.trained:
            install(member.owned, run.resident_leaves[member.name])
        torch.clear_autocast_cache()  # the cache would hold every parameter of every block
