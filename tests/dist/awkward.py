"""A small decoder that has everything awkward, and the parallelisms that it is trained under, on gloo.

Vocabulary 37, grouped-query attention, a fused gate and up projection, tied embeddings, a frozen parameter, a scalar
buffer and an empty one, two parameter groups, four experts. Every topology computes the same function of the same
global batch, so losses differ by the order of summation alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from holdfast import From, offload
from holdfast.checkpointer import Checkpointer
from holdfast.delta import helper, replica
from holdfast.store.local import LocalStore
from replica_run import Forked
from survive_run import digest

VOCABULARY, HEAD, ROWS, LENGTH, BLOCKS, EXPERTS = 37, 4, 12, 6, 4, 4


class _Copied(torch.autograd.Function):
    """What every rank has, used by each in part: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class _Summed(torch.autograd.Function):
    """The sum of what every rank has a part of."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Attention(nn.Module):
    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        width = heads * HEAD
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * HEAD, bias=False)
        self.v = nn.Linear(width, kv_heads * HEAD, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v))
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
        scores = (q @ k.transpose(-1, -2)) / HEAD**0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        mixed = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        return self.o(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Gate and up lie in turn, so that a cut between rows is one between pairs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = self.gate_up(x).unflatten(-1, (-1, 2))
        return self.down(F.silu(pairs[..., 0]) * pairs[..., 1])


class Experts(nn.Module):
    """Every token goes to all of them, weighted. Held by a mesh, each rank has its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.weight = nn.Parameter(torch.randn(EXPERTS, width, width) / width)
        self.over_ranks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.router(x).softmax(-1)
        weight = self.weight
        if not self.over_ranks:
            return torch.einsum("bte,btw,ewv->btv", shares, x, weight)
        local = weight.to_local()
        first = dist.get_rank() * local.shape[0]
        shares, x = _Copied.apply(shares), _Copied.apply(x)
        mine = shares[..., first : first + local.shape[0]]
        return _Summed.apply(torch.einsum("bte,btw,ewv->btv", mine, x, local))


class Block(nn.Module):
    def __init__(self, heads: int, kv_heads: int, has_experts: bool) -> None:
        super().__init__()
        width = heads * HEAD
        self.norm, self.attention = nn.RMSNorm(width), Attention(heads, kv_heads)
        self.mlp = Experts(width) if has_experts else Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Awkward(nn.Module):
    """``blocks`` are those that this rank has, of a pipeline; the first has the embedding, the last the head as well,
    which is tied to it."""

    def __init__(self, heads: int, kv_heads: int, blocks: Sequence[int] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, heads * HEAD)
        made = {str(n): Block(heads, kv_heads, has_experts=n == 2) for n in range(BLOCKS)}
        made["0"].norm.weight.requires_grad_(False)
        nn.init.normal_(self.embed.weight, std=0.2)
        self.head = nn.Linear(heads * HEAD, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        kept = range(BLOCKS) if blocks is None else blocks
        alone = blocks is None  # then they are a list, as out-of-core training takes them
        self.blocks = nn.ModuleList(made.values()) if alone else nn.ModuleDict({str(n): made[str(n)] for n in kept})
        if 0 not in kept and BLOCKS - 1 not in kept:
            del self.embed, self.head
        self.register_buffer("scalar", torch.tensor(1.5))
        self.register_buffer("empty", torch.empty(0, 3))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) if targets is None else loss_of(self.head(x), targets)


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of ``step``."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass
class Training:
    """What a rank has: ``step(n)`` leaves gradients and gives the loss over the global batch."""

    model: nn.Module
    step: Callable[[int], float]

    def optimizer(self) -> torch.optim.Optimizer:
        """Matrices decay, vectors do not."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1, "lr": 0.001},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.002},
        ]
        return torch.optim.AdamW(groups, foreach=False)


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


def plain(rank: int, size: int, heads: int, kv_heads: int) -> Training:
    return _data_parallel(Awkward(heads, kv_heads), 0, 1)


def ddp(rank: int, size: int, heads: int, kv_heads: int) -> Training:
    model = Awkward(heads, kv_heads)
    return _data_parallel(DistributedDataParallel(model) if size > 1 else model, rank, size)


def fsdp(rank: int, size: int, heads: int, kv_heads: int) -> Training:
    model, mesh = Awkward(heads, kv_heads), init_device_mesh("cpu", (size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return _data_parallel(fully_shard(model, mesh=mesh), rank, size)


def hsdp(rank: int, size: int, heads: int, kv_heads: int) -> Training:
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    return _data_parallel(fully_shard(Awkward(heads, kv_heads), mesh=mesh), rank, size)


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


def tp(rank: int, size: int, heads: int, kv_heads: int) -> Training:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    return _data_parallel(_tensor_parallel(Awkward(heads, kv_heads), mesh), 0, 1)


def fsdp_tp(rank: int, size: int, heads: int, kv_heads: int) -> Training:
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    model = _tensor_parallel(Awkward(heads, kv_heads), mesh["tp"])
    return _data_parallel(fully_shard(model, mesh=mesh["dp"]), mesh.get_local_rank("dp"), 2)


def experts(rank: int, size: int, heads: int, kv_heads: int) -> Training:
    model, mesh = Awkward(heads, kv_heads), init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    for block in model.blocks:
        if isinstance(block.mlp, Experts):
            block.mlp.weight = nn.Parameter(distribute_tensor(block.mlp.weight.detach(), mesh, [Shard(0)]))
            block.mlp.over_ranks = True
    return _data_parallel(model, 0, 1)


def pipeline(rank: int, size: int, heads: int, kv_heads: int, virtual: int = 1) -> Training:
    """One chunk after the other, the whole batch at once. With ``virtual`` stages a rank has several chunks."""
    per_chunk = BLOCKS // (size * virtual)
    chunks = [range(n * per_chunk, (n + 1) * per_chunk) for n in range(size * virtual)]
    mine = [n for chunk in range(rank, len(chunks), size) for n in chunks[chunk]]
    model = Awkward(heads, kv_heads, mine)
    ends = dist.new_group([0, size - 1])
    width = heads * HEAD

    def step(number: int) -> float:
        tokens, targets = batch_of(number)
        ins: dict[int, torch.Tensor] = {}
        outs: dict[int, torch.Tensor] = {}
        loss = torch.zeros(())
        for c in range(rank, len(chunks), size):
            if c == 0:
                x = model.embed(tokens)
            else:
                x = torch.empty(ROWS, LENGTH, width)
                dist.recv(x, (c - 1) % size)
                ins[c] = x.requires_grad_()
            for n in chunks[c]:
                x = model.blocks[str(n)](x)
            outs[c] = x
            if c == len(chunks) - 1:
                outs[c] = loss = loss_of(model.head(x), targets)
            else:
                dist.send(x.detach().contiguous(), (c + 1) % size)
        for c in reversed(range(rank, len(chunks), size)):
            grad = None
            if c < len(chunks) - 1:
                grad = torch.empty(ROWS, LENGTH, width)
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


def virtual_pipeline(rank: int, size: int, heads: int, kv_heads: int) -> Training:
    return pipeline(rank, size, heads, kv_heads, virtual=2)


TOPOLOGIES: dict[str, tuple[int, Callable[[int, int, int, int], Training]]] = {
    "plain": (1, plain), "ddp2": (2, ddp), "ddp4": (4, ddp), "fsdp2": (2, fsdp), "fsdp3": (3, fsdp), "fsdp4": (4, fsdp),
    "hsdp2x2": (4, hsdp), "tp2": (2, tp), "tp4": (4, tp), "fsdp2xtp2": (4, fsdp_tp), "pp2": (2, pipeline),
    "pp4": (4, pipeline), "pp2v2": (2, virtual_pipeline), "ep2": (2, experts), "ep4": (4, experts),
}  # fmt: skip
"""By name the number of ranks, and what makes the training of one."""


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All that this rank knows of the whole state: each tensor whole, by name and slot. Called on all ranks."""
    found = {}
    for name, parameter in model.named_parameters():
        held = {"param": parameter.detach(), **optimizer.state.get(parameter, {})}
        for slot, value in held.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found[f"{name.removeprefix('module.')}/{slot}"] = whole
    return found | {name.removeprefix("module."): buffer for name, buffer in model.named_buffers()}


def digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """A digest of each tensor of the whole state. Called on all ranks."""
    return {key: digest({key: tensor}) for key, tensor in state_of(model, optimizer).items()}


def out_of_core(
    say: Callable[..., None], *, steps: int, sizes: tuple[int, int], root: str, source: str | None
) -> None:
    """As ``train``, by the engine, from the state of ``source``, or of the run in ``root`` if there is one."""
    model = Awkward(*sizes)
    optimizer = Training(model, lambda number: 0.0).optimizer()
    losses, found = [], {}

    def note() -> None:
        reader = LocalStore.read(root)
        manifest = reader.at(engine.steps_done)
        tensors = {}
        for key, atom in reader.atoms(manifest).items():
            raw = reader.read_atom(manifest, atom)
            flat = torch.frombuffer(raw, dtype=torch.float32) if raw else torch.empty(0)
            tensors[key.removesuffix("/buffer")] = flat.view(atom["shape"])
        found[engine.steps_done] = {key: digest({key: tensor}) for key, tensor in tensors.items()}

    start = None if source is None else From(source)
    with offload(model, optimizer, root, dtype="fp32", source=start) as engine:
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
    sizes: tuple[int, int] = (6, 2),
    root: str | None = None,
    source: str | None = None,
    fails_after: int | None = None,
    **options: Any,
) -> None:
    """Train to ``steps``, with a checkpointer in ``root`` if there is one. Says losses and digests by step. After the
    step ``fails_after`` the script fails."""
    if topology == "engine":
        assert root is not None
        return out_of_core(say, steps=steps, sizes=sizes, root=root, source=source)
    if options.get("replica"):
        helper.start_process, replica.LINGER_SECONDS = Forked, 20.0
    training = TOPOLOGIES[topology][1](rank, world_size, *sizes)
    model, optimizer = training.model, training.optimizer()
    losses, found = [], {}

    def go_on(done: int, last: Callable[[], None]) -> None:
        found[done] = digests(model, optimizer)
        for number in range(done, steps):
            losses.append(training.step(number))
            optimizer.step()
            optimizer.zero_grad()
            last()
            found[number + 1] = digests(model, optimizer)
            if number + 1 == fails_after:
                dist.barrier()  # all have come so far
                raise ValueError("a mistake of the script")

    if root is None:
        go_on(0, lambda: None)
    else:
        with Checkpointer(root, model=model, optimizer=optimizer, **options) as checkpointer:
            done = checkpointer.resume(source=source)
            say(resumed=done)
            go_on(done, checkpointer.step)
    say(finished=True, losses=losses, digests=found)
    if dist.is_initialized():
        dist.destroy_process_group()
