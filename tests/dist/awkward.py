"""The awkward decoder under the parallelisms that there are, on gloo.

Every topology computes the same function of the same global batch, so losses differ by the order of summation alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from dist.awkward_decoder import (
    BLOCKS,
    LENGTH,
    ROWS,
    Awkward,
    Experts,
    Form,
    Mlp,
    batch_of,
    loss_of,
    optimizer_of,
)
from dist.training import whole_tensors
from formats.rank_writers import ACCELERATE, save_by_dcp, save_live
from holdfast import From, offload
from holdfast.checkpoint.replica import replica_client, replica_process
from holdfast.checkpointer import Checkpointer
from holdfast.store.run_store import LocalStore
from replica_run import Forked
from survive_run import digest


@dataclass
class Training:
    """What a rank has: ``step(n)`` leaves gradients and gives the loss over the global batch."""

    model: nn.Module
    step: Callable[[int], float]


def _data_parallel(model: nn.Module, index: int, count: int) -> Training:
    def step(number: int) -> float:
        tokens, targets = batch_of(number)
        loss = loss_of(model(tokens[index::count]), targets[index::count])
        loss.backward()
        total = loss.detach().clone()
        if count > 1:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        return float(total)

    return Training(model, step)


def plain(rank: int, size: int, form: Form) -> Training:
    return _data_parallel(Awkward(form), 0, 1)


def ddp(rank: int, size: int, form: Form) -> Training:
    model = Awkward(form)
    return _data_parallel(DistributedDataParallel(model) if size > 1 else model, rank, size)


def fsdp(rank: int, size: int, form: Form) -> Training:
    model, mesh = Awkward(form), init_device_mesh("cpu", (size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return _data_parallel(fully_shard(model, mesh=mesh), rank, size)


def hsdp(rank: int, size: int, form: Form) -> Training:
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    return _data_parallel(fully_shard(Awkward(form), mesh=mesh), rank, size)


def _tensor_parallel(model: Awkward, mesh: Any) -> Awkward:
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate()),
    }  # fmt: skip
    for n in range(BLOCKS):
        plan |= {f"blocks.{n}.attention.{part}": ColwiseParallel() for part in "qkv"}
        plan[f"blocks.{n}.attention.o"] = RowwiseParallel()
        if isinstance(model.blocks[n].mlp, Mlp):
            plan |= {f"blocks.{n}.mlp.gate_up": ColwiseParallel(), f"blocks.{n}.mlp.down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    model.head.weight = model.embed.weight  # which it has untied
    return model


def tp(rank: int, size: int, form: Form) -> Training:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    return _data_parallel(_tensor_parallel(Awkward(form), mesh), 0, 1)


def fsdp_tp(rank: int, size: int, form: Form) -> Training:
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    model = _tensor_parallel(Awkward(form), mesh["tp"])
    return _data_parallel(fully_shard(model, mesh=mesh["dp"]), mesh.get_local_rank("dp"), 2)


def experts(rank: int, size: int, form: Form) -> Training:
    model, mesh = Awkward(form), init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    for block in model.blocks:
        if isinstance(block.mlp, Experts):
            block.mlp.weight = nn.Parameter(distribute_tensor(block.mlp.weight.detach(), mesh, [Shard(0)]))
            block.mlp.over_ranks = True
    return _data_parallel(model, 0, 1)


def pipeline(rank: int, size: int, form: Form, virtual: int = 1) -> Training:
    """One chunk after the other, the whole batch at once. With ``virtual`` stages a rank has several chunks."""
    per_chunk = BLOCKS // (size * virtual)
    chunks = [range(n * per_chunk, (n + 1) * per_chunk) for n in range(size * virtual)]
    mine = [n for chunk in range(rank, len(chunks), size) for n in chunks[chunk]]
    model = Awkward(form, mine)
    ends = dist.new_group([0, size - 1])

    def step(number: int) -> float:
        tokens, targets = batch_of(number)
        ins: dict[int, torch.Tensor] = {}
        outs: dict[int, torch.Tensor] = {}
        loss = torch.zeros(())
        for c in range(rank, len(chunks), size):
            if c == 0:
                x = model.embed(tokens)
            else:
                x = torch.empty(ROWS, LENGTH, form.width)
                dist.recv(x, (c - 1) % size)
                ins[c] = x.requires_grad_()
            for n in chunks[c]:
                x = model.blocks[str(n)](x)
            outs[c] = x
            if c == len(chunks) - 1:
                outs[c] = loss = loss_of(model.logits(x), targets)
            else:
                dist.send(x.detach().contiguous(), (c + 1) % size)
        for c in reversed(range(rank, len(chunks), size)):
            grad = None
            if c < len(chunks) - 1:
                grad = torch.empty(ROWS, LENGTH, form.width)
                dist.recv(grad, (c + 1) % size)
            outs[c].backward(grad)
            if c:
                dist.send(ins[c].grad.contiguous(), (c - 1) % size)
        if rank in (0, size - 1):
            dist.all_reduce(model.embed.weight.grad, group=ends)
        total = loss.detach().clone()
        dist.broadcast(total, size - 1)
        return float(total)

    return Training(model, step)


def virtual_pipeline(rank: int, size: int, form: Form) -> Training:
    return pipeline(rank, size, form, virtual=2)


TOPOLOGIES: dict[str, tuple[int, Callable[[int, int, Form], Training]]] = {
    "plain": (1, plain), "ddp2": (2, ddp), "ddp4": (4, ddp), "fsdp2": (2, fsdp), "fsdp3": (3, fsdp), "fsdp4": (4, fsdp),
    "hsdp2x2": (4, hsdp), "tp2": (2, tp), "tp4": (4, tp), "fsdp2xtp2": (4, fsdp_tp), "pp2": (2, pipeline),
    "pp4": (4, pipeline), "pp2v2": (2, virtual_pipeline), "ep2": (2, experts), "ep4": (4, experts),
}  # fmt: skip
"""By name the number of ranks, and what makes the training of one."""


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All that this rank knows of the whole state: each tensor whole, by name and slot. Called on all ranks."""
    return whole_tensors(model, optimizer) | {
        name.removeprefix("module."): buffer for name, buffer in model.named_buffers()
    }


def digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """A digest of each tensor of the whole state. Called on all ranks."""
    return {key: digest({key: tensor}) for key, tensor in state_of(model, optimizer).items()}


def out_of_core(
    say: Callable[..., None], *, steps: int, form: Form, root: str, source: str | None,
    told: Sequence[int] | None = None,
) -> None:  # fmt: skip
    """As ``train``, by the engine, from the state of ``source``, or of the run in ``root`` if there is one."""
    model = Awkward(form)
    optimizer = optimizer_of(model)
    losses, found = [], {}

    def note() -> None:
        if told is not None and engine.steps_done not in told:
            return
        reader = LocalStore.read(root)
        manifest = reader.at(engine.steps_done)
        tensors = {}
        for key, atom in reader.atoms(manifest).items():
            raw = reader.read_atom(manifest, atom)
            flat = torch.frombuffer(raw, dtype=torch.float32) if raw else torch.empty(0)
            tensors[key.removesuffix("/buffer")] = flat.view(atom["shape"])
        found[engine.steps_done] = {key: digest({key: tensor}) for key, tensor in tensors.items()}

    start = None if source is None else From(source)
    with offload(model, optimizer, root, precision="fp32", source=start) as engine:
        note()
        say(resumed=engine.steps_done)
        for number in range(engine.steps_done, steps):
            tokens, targets = batch_of(number)
            losses.append(engine.step([{"tokens": tokens, "targets": targets}]))
            engine.wait()
            note()
    say(finished=True, losses=losses, digests=found)


def train(
    rank: int,
    world_size: int,
    say: Callable[..., None],
    *,
    topology: str,
    steps: int,
    form: Sequence[Any] = Form(),
    root: str | None = None,
    source: str | None = None,
    rename: dict[str, str] | None = None,
    fails_after: int | None = None,
    told: Sequence[int] | None = None,
    rank_files: str | None = None,
    beyond: int = 0,
    **options: Any,
) -> None:
    """Train to ``steps``, with a checkpointer in ``root`` if there is one, and then without to ``beyond``. Says losses,
    and digests of steps to be ``told``, else of all. After the step ``fails_after`` the script fails. ``rename`` is for
    the names in ``source``. At the end each rank saves what it holds in the folder ``rank_files``."""
    if topology == "engine":
        assert root is not None
        return out_of_core(say, steps=steps, form=Form(*form), root=root, source=source, told=told)
    if options.get("replica"):
        replica_process.start_process, replica_client.LINGER_SECONDS = Forked, 20.0
    training = TOPOLOGIES[topology][1](rank, world_size, Form(*form))
    model, optimizer = training.model, optimizer_of(training.model)
    losses, found = [], {}

    def note(done: int) -> None:
        if told is None or done in told:
            found[done] = digests(model, optimizer)

    def go_on(done: int, last: Callable[[], None]) -> None:
        note(done)
        for number in range(done, steps):
            losses.append(training.step(number))
            optimizer.step()
            optimizer.zero_grad()
            last()
            note(number + 1)
            if number + 1 == fails_after:
                dist.barrier()  # all have come so far
                raise ValueError("a mistake of the script")

    if root is None:
        go_on(0, lambda: None)
    else:
        with Checkpointer(root, model=model, optimizer=optimizer, **options) as checkpointer:
            start = source if source is None or rename is None else From(source, rename=rename)
            done = checkpointer.resume(source=start)
            say(resumed=done)
            go_on(done, checkpointer.step)
    for number in range(steps, beyond):
        losses.append(training.step(number))
        optimizer.step()
        optimizer.zero_grad()
    if rank_files is not None:
        save_live(Path(rank_files), model, optimizer, rank, world_size, ACCELERATE)
        save_by_dcp(f"{rank_files}-dcp", model, optimizer)
    say(finished=True, losses=losses, digests=found)


def train_each(
    rank: int, world_size: int, say: Callable[..., None], *, sources: dict[str, str], root: str, **order: Any
) -> None:
    """As ``train`` from one of ``sources`` after the other, each in a run of its own below ``root``. What is said is by
    their names."""
    for name, source in sources.items():
        said: dict[str, Any] = {}
        order |= {"root": f"{root}/{name}", "source": source}
        train(rank, world_size, lambda said=said, **what: said.update(what), **order)
        say(**{name: said})
