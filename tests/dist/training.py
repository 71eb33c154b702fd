"""What a rank of a world does: a tiny model under DDP or FSDP2, with a checkpointer."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from checkpoint.test_leaving import Device
from dist.unread import lose_payload
from holdfast import failpoints
from holdfast.checkpoint import coordinator
from holdfast.checkpoint.capture import device_staging
from holdfast.checkpoint.capture.layer_copies import LayerHooks
from holdfast.checkpoint.collective_snapshots import CollectiveSnapshot
from holdfast.checkpoint.compression.lossy import Int8, TopK
from holdfast.checkpoint.nodes.local_disks import LocalDisks
from holdfast.checkpoint.recovery import model_description
from holdfast.checkpoint.replica import multi_rank_server, replica_liveness, replica_process, replica_server
from holdfast.checkpoint.replica import replica_client as replica
from holdfast.checkpoint.replica.multi_rank_client import Replicas
from holdfast.checkpointer import Checkpointer
from holdfast.data.loader import loader as loader_of
from holdfast.errors import BadInput, DiskFull
from holdfast.io.queue import Throttle
from holdfast.optim import AdamW8bit, Apollo, Joined
from holdfast.state.layout.regions import local_of
from read_only import make_read_only
from replica_run import Forked, drifting
from support.switching import switch_often
from survive_run import digest


class Global(torch.optim.Optimizer):
    """Each update depends on the gradients of all parameters, and on a count that is no tensor."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).sum() + 1e-3
        for p in parameters:
            self.state[p]["count"] = self.state[p].get("count", 0) + 1
            p.sub_(p.grad * self.param_groups[0]["lr"] / norm / self.state[p]["count"])


class Factored(torch.optim.Optimizer):
    """What Adafactor does, in operations that torch has for distributed tensors: each rank holds the factors whole."""

    def __init__(self, parameters: Any, lr: float, first: int = 1) -> None:
        """The ``first`` step that it does anything in."""
        super().__init__(parameters, {"lr": lr, "first": first})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["first"] -= 1
        if self.param_groups[0]["first"] > 0:
            return
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            square, dims = p.grad * p.grad, (-1, -2) if p.ndim == 2 else (-1,)
            means = [self._whole(square.mean(dim, keepdim=True)) for dim in dims]
            for name, mean in zip(("row", "column"), means, strict=False):
                self.state[p][name] = self.state[p].get(name, mean * 0).lerp(mean, 0.1)
            held = self.state[p]
            scale = held["row"] @ held["column"] / held["row"].mean() if p.ndim == 2 else held["row"]
            update = p.grad * (scale + 1e-6).rsqrt()
            update = update.redistribute(placements=p.placements) if isinstance(p, DTensor) else update
            p.add_(update, alpha=-self.param_groups[0]["lr"])

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "faster adamw": lambda p: torch.optim.AdamW(p, lr=0.02),
    "foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "global": lambda p: Global(p, lr=0.01),
    "apollo": lambda p: Apollo(p, lr=0.01, rank=2, update_gap=3),
    "8bit": lambda p: AdamW8bit(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "factored": lambda p: Factored(p, lr=0.01),
    "factored later": lambda p: Factored(p, lr=0.01, first=3),
    "muon": lambda p: muon(list(p)),
    "powers": lambda p: torch.optim.SGD(p, lr=2**-4, momentum=0.5),
}
"""``powers`` of two make a replay exact on every machine."""


def schedule_of(optimizer: torch.optim.Optimizer, name: str) -> torch.optim.lr_scheduler.LRScheduler:
    if name == "powers":
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


def muon(parameters: list[Any]) -> torch.optim.Optimizer:
    """For the matrices, and AdamW for the rest."""
    matrices = [p for p in parameters if p.ndim == 2]
    rest = [p for p in parameters if p.ndim != 2]
    return Joined(torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01))


CODECS = {"topk": TopK, "int8": lambda block: Int8(int(block))}


def strided() -> DTensor:
    """A matrix of which each of two ranks holds two pieces."""
    mesh, placement = init_device_mesh("cpu", (2,)), _StridedShard(0, split_factor=2)
    return DTensor.from_local(torch.zeros(6, 7), mesh, [placement], shape=torch.Size((12, 7)), stride=(7, 1))


SPOILT: dict[str, Callable[[Any], dict[str, Any]]] = {
    "by a hook": lambda model: model.register_comm_hook(None, allreduce_hook) or {},
    "by strides": lambda model: setattr(model.first, "weight", nn.Parameter(strided())) or {},
}
"""What keeps a codec, or a model, from being used."""


class Cursor:
    """A loader that knows how many batches its own rank has had, as torchdata's StatefulDataLoader does."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


class Elastic(Cursor):
    """One that says that this is the same on any number of ranks."""

    elastic = True


LOADERS = {"cursor": Cursor, "elastic": Elastic, "holdfast": lambda: loader_of(list(torch.arange(64)), 2)}


class Net(nn.Module):
    """Odd shapes, some smaller than the world, a frozen parameter, buffers."""

    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, width), nn.Linear(width, 3)
        self.norm, self.dropout = nn.BatchNorm1d(width), nn.Dropout(0.2)
        self.scale = nn.Parameter(torch.ones(1))
        self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.dropout(torch.relu(self.norm(self.first(x))))) * self.scale


class Mlp(nn.Module):
    """What tensor parallelism cuts, and a parameter that it does not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, width), nn.Linear(width, 3)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))) * self.scale.sum()


def wrapped(
    kind: str, world_size: int, width: int = 13, tiny: bool = False, mlp: int = 0, device: str = "cpu"
) -> nn.Module:
    """A ``tiny`` one, or one of ``width`` 0, has one parameter and nothing else. ``mlp`` is the width of an ``Mlp``."""
    torch.manual_seed(0)
    model = nn.Linear(7, 1, bias=False) if tiny or not width else Mlp(mlp) if mlp else Net(width)
    model = model.to(device)
    if kind == "ddp":
        return DistributedDataParallel(model) if world_size > 1 else model
    if kind == "fsdp":
        return fully_shard(model, mesh=init_device_mesh(device, (world_size,)))
    if kind == "hsdp":
        return fully_shard(
            model, mesh=init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("r", "s"))
        )
    if kind.startswith("fsdp1"):
        model.requires_grad_(True)
        whole = FullyShardedDataParallel(
            model, use_orig_params="flat" not in kind, device_id=torch.device("cpu")
        )
        return whole.module if "inside" in kind else whole
    if kind in ("tp", "fsdp_tp"):
        mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("data", "tensor"))
        odd = {
            "first": ColwiseParallel(output_layouts=Replicate())
        }  # of which torch cannot cut the next layer alike
        even = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], odd if mlp % 2 else even)
        return fully_shard(model, mesh=mesh["data"]) if kind == "fsdp_tp" else model
    return model


def whole_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters and optimizer state by name and slot, each tensor whole. Called on all ranks.

    What all ranks hold a part of is exchanged at once: ``full_tensor`` takes an exchange for each.
    """
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        for slot, value in {"param": parameter.detach(), **optimizer.state.get(parameter, {})}.items():
            found[f"{name.removeprefix('module.')}/{slot}"] = value
    cut = {key: value for key, value in found.items() if isinstance(value, DTensor)}
    rows = {key: value.to_local() for key, value in cut.items() if is_cut_in_rows(value)}
    if rows:
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, rows)
        found |= {key: torch.cat([part[key] for part in parts]) for key in rows}
    return found | {key: value.full_tensor() for key, value in cut.items() if key not in rows}


def is_cut_in_rows(value: DTensor) -> bool:
    """Whether each of all ranks has some rows, in their order."""
    return value.placements == (Shard(0),) and value.device_mesh.size() == dist.get_world_size()


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer, averages: nn.Module | None = None) -> str:
    """A digest of parameters and optimizer state, whole, the same under any parallelism."""
    found = whole_tensors(model, optimizer)
    if averages is not None:
        found |= {f"average:{name}": p.detach() for name, p in averages.named_parameters()}
    return digest(dict(sorted(found.items())))


def full(*_: Any, **__: Any) -> None:
    raise DiskFull("no space left")


def publish_slowly(
    real: Callable[..., None], soon: Callable[[], bool], seconds: float, how: str, replica: Any
) -> None:
    """Of the second base: after so many seconds, or ``soon``. Meanwhile it "beats" or is "silent", or then "fails"."""
    is_second = replica._base_step == 0
    end = time.monotonic() + seconds
    while is_second and time.monotonic() < end and not soon():
        time.sleep(0.2)
        if how == "beats":
            replica._beat()
    if is_second and how == "fails":
        full()
    real(replica)


def wait_until(met: Callable[[], bool]) -> None:
    """In a plain sleep, which nothing that other ranks do breaks off. Goes on after a while, whatever is met."""
    end = time.monotonic() + 30
    while not met() and time.monotonic() < end:
        time.sleep(0.005)


def dying_at_object(number: int) -> None:
    """Of those that a copy in a bucket gets one by one, before it is there."""
    from holdfast.store.object_store import ObjectDisk

    put_new, count = ObjectDisk.put_new, itertools.count(1)

    def put(self: Any, path: str, data: bytes) -> bool:
        if next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return put_new(self, path, data)

    ObjectDisk.put_new = put


class Meeting:
    """Files in ``folder``, by which ranks wait for each other where a collective would fail with the first of them."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self._rank = folder, rank

    def tell(self, what: str) -> None:
        """This rank has got to ``what``."""
        (self.folder / f"{what}-{self._rank}").touch()

    def have(self, what: str, ranks: Iterable[int]) -> bool:
        """Whether all of ``ranks`` have got there."""
        return all((self.folder / f"{what}-{rank}").exists() for rank in ranks)


def but_news(real: Callable[..., None], about: dict[str, Any], *data: Any) -> None:
    """Send ``about``, unless it is what all ranks have."""
    if "all_have" not in about:
        real(about, *data)


def left_here() -> list[int]:
    """Threads and groups of this process."""
    return [len(os.listdir("/proc/self/task")), len(dist.distributed_c10d._world.pg_map)]


def main(rank: int, world_size: int, rendezvous: str, say: Callable[..., None], **order: Any) -> None:
    if "topology" in order:
        from dist import awkward

        if "replica" in order:
            Forked.prepare()
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
        run = awkward.train_each if "sources" in order else awkward.train
        run(rank, world_size, say, **order)
        return dist.destroy_process_group()
    train(rank, world_size, rendezvous, say, **order)


def train(
    rank: int,
    world_size: int,
    rendezvous: str,
    say: Callable[..., None],
    *,
    kind: str,
    root: str,
    steps: int,
    optimizer: str = "adamw",
    resume: dict[str, int] | None = None,
    kill: tuple[int | str, int] | None = None,
    signal_at: tuple[int, int] | None = None,
    stuck_at: tuple[int, int] | None = None,
    failpoint: tuple[int, str] | None = None,
    raises: tuple[int, int] | None = None,
    read_only: tuple[int, int] | None = None,
    slow: tuple[int, int, int] | None = None,
    lose_at: tuple[int, int] | None = None,
    wait_at: int | None = None,
    unit_bytes: int = 100,
    save_at: int | None = None,
    changed_at: tuple[int, int] | None = None,
    save_every: int | None = None,
    pause: float = 0.0,
    loader: str | None = None,
    elsewhere: int | None = None,
    average: bool = False,
    resume_of: dict[str, dict[str, int]] | None = None,
    slow_publish: float = 0.0,
    codec: tuple[str, float] | None = None,
    width: int = 13,
    keep_last: int = 2,
    keep_every: int | None = None,
    keep_best: int | None = None,
    values: dict[str, float] | None = None,
    own_values: bool = False,
    valueless: int | None = None,
    keeps_more: int | None = None,
    dies_at_best: tuple[int, int] | None = None,
    least_storage: int | None = None,
    tiny: bool = False,
    unfreeze_at: int | None = None,
    clip: bool = True,
    kill_replica: tuple[int, int] | None = None,
    drift_at: tuple[int, int] | None = None,
    drifting_slot: str | None = None,
    linger_seconds: float = 20.0,
    killed_after: dict[str, int] | None = None,
    deaf_from: int | None = None,
    numb: bool = False,
    killed_in: dict[str, float] | None = None,
    orphans_persist: bool = True,
    disk_fails_orphans: bool = False,
    between: int | None = None,
    options_of: dict[str, dict[str, Any]] | None = None,
    dense_at: int | None = None,
    altered: tuple[int, int] | None = None,
    halved_at: int | None = None,
    forgets: tuple[int | str, int] | None = None,
    moved_at: int | None = None,
    spoilt: str | None = None,
    mlp: int = 0,
    sleeps_at: tuple[int, int, float] | None = None,
    slow_share: tuple[int, float, str] | None = None,
    deaf_replica: tuple[int, int] | None = None,
    orphan_fails: int | None = None,
    settle_at: tuple[int | str, int] | None = None,
    survives_as: list[int] | None = None,
    asked_seconds: float | None = None,
    accumulate: int = 1,
    copied_at: int | None = None,
    copies_every: float = 0.02,
    killed_copying: int | None = None,
    device: bool = False,
    unread: dict[str, int] | None = None,
    nodes: list[int] | None = None,
    disks: list[int] | None = None,
    partner_offset: int = 1,
    switching: bool = False,
    digests_from: int = 0,
    **options: Any,
) -> None:
    """Train to ``steps``, on a ``device`` that is played where one is asked for; ``kill`` and its like name a rank, or
    "all", and a step. Those that are killed at the same step wait for each other. ``survives_as`` is what
    ``replica_step`` is to become after each step. ``digests_from`` is the first step whose state is told."""
    from holdfast import checkpointer as module
    from holdfast.checkpoint import bucket_copy, collective_snapshots
    from holdfast.checkpoint.snapshot import snapshot_chunks
    from holdfast.measure import drive_rates
    from holdfast.store.commit.retention import Keep
    from holdfast.store.log import journal, striping

    snapshot_chunks.UNIT_BYTES, module.BASE_BYTES_PER_STEP, journal.GROUPS_PER_SEGMENT = unit_bytes, 1, 3
    bucket_copy.SECONDS = copies_every
    if "drives" in options:  # as if they were different disks, which nobody measures
        drive_rates.rate_of, drive_rates.device_of = lambda directory, limits: 1e9, hash
        striping.STRIPE_BYTES = 4096
    if switching:
        switch_often()
    if killed_copying is not None:
        dying_at_object(killed_copying)
    collective_snapshots.LEAST_STORAGE = least_storage or collective_snapshots.LEAST_STORAGE
    meeting = Meeting(Path(rendezvous.removeprefix("file://")).parent, rank)
    root = f"{root}-{rank}" if rank == elsewhere else root
    if codec is not None:
        options["codec"] = CODECS[codec[0]](codec[1])
    options |= (options_of or {}).get(str(rank), {})
    if nodes is not None:  # each with a directory of its own, the number of its disk
        options["nodes"] = LocalDisks(node=nodes[rank], partner_offset=partner_offset)
        root = f"{root}-{(disks or nodes)[rank]}"
    early: list[bool] = []
    if slow_publish:
        real = CollectiveSnapshot.publish_shares
        CollectiveSnapshot.publish_shares = lambda *args: (time.sleep(slow_publish), real(*args))[1]
    if failpoint is not None and failpoint[0] == rank:
        failpoints.armed = failpoint[1]
        failpoints.action = lambda: os.kill(os.getpid(), signal.SIGKILL)
    if device:
        Device(pytest.MonkeyPatch())
        model_description.visited, device_staging.VISIT_BYTES = lambda held: "cpu", 1
    if options.get("replica"):
        replica.LINGER_SECONDS = linger_seconds
        replica_process.start_process, Forked.stacks = Forked, meeting.folder / f"stacks-{rank}-replica"
        if drift_at is not None and drift_at[0] == rank:
            replica_server.apply = partial(drifting, replica_server.apply, drift_at[1], slot=drifting_slot)
        if not orphans_persist:
            multi_rank_server.MultiRankReplicaServer._persist = lambda self, notes: None
        if disk_fails_orphans:
            replica_liveness.write_durably = full
        multi_rank_server.ASKED_SECONDS = asked_seconds or multi_rank_server.ASKED_SECONDS
        if slow_share is not None and slow_share[0] == rank:
            # one that fails does so when all ranks wait for the base, and have handed over the steps since
            soon = partial(meeting.have, "base-2", range(world_size))
            publish = multi_rank_server.MultiRankReplicaServer._publish
            multi_rank_server.MultiRankReplicaServer._publish = lambda self: publish_slowly(
                publish, soon, *slow_share[1:], self
            )
        if slow_share is not None and slow_share[2] == "fails":
            until_ended = Replicas._until_ended
            Replicas._until_ended = lambda self: (meeting.tell(f"base-{self._number}"), until_ended(self))[1]
        if orphan_fails == rank:
            multi_rank_server.MultiRankReplicaServer._persist = full
        if numb:  # to what the replica says of drift
            hear = Replicas._hear
            Replicas._hear = lambda self, about: None if "drift" in about else hear(self, about)
        arrived = LayerHooks.arrived
        LayerHooks.arrived = lambda *args: early.append(True) or arrived(*args)
        Forked.prepare()
    if world_size > 1 or kind.startswith("fsdp"):
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    model = wrapped(kind, world_size, width, tiny, mlp)
    if spoilt is not None:
        options |= SPOILT[spoilt](model)
    chosen = OPTIMIZERS[optimizer](model.parameters())
    resume = (resume_of or {}).get(str(rank), resume)
    plain = getattr(model, "module", model)
    if loader is not None:
        options["loader"] = LOADERS[loader]()
    averages = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if average else None
    if averages is not None:
        options |= {"after_update": lambda: averages.update_parameters(plain), "averages": averages}
    schedule = schedule_of(chosen, optimizer)
    same_batch = {"plain": world_size, "tp": 2, "fsdp_tp": 2}.get(kind, 1)  # so many ranks in a row
    torch.manual_seed(100 + rank // same_batch)
    losses: list[float] = []
    digests: dict[int, str] = {}
    survived: list[int] = []
    if str(rank) in (killed_in or {}):
        threading.Timer(killed_in[str(rank)], lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    doomed = {int(each): step for each, step in (killed_after or {}).items()}
    if kill is not None:
        doomed |= dict.fromkeys(range(world_size) if kill[0] == "all" else [kill[0]], kill[1])

    def die(step: int) -> None:
        fellows = [each for each, at in doomed.items() if at == step]
        if len(fellows) > 1:
            meeting.tell(f"dying-{step}")
            wait_until(lambda: meeting.have(f"dying-{step}", fellows))
        say(died=time.time())
        os.kill(os.getpid(), signal.SIGKILL)

    if (
        kind == "ddp"
    ):  # which forms its buckets anew after the first backward, and then adds up in another order
        model(torch.zeros(5, 7)).sum().backward()
        model.zero_grad()
    if str(rank) in (unread or {}):
        lose_payload(Path(root), f"rank-{rank:05d}", unread[str(rank)])
    before = left_here()
    say(before=before)
    keep = Keep(keep_last + (rank == keeps_more), keep_every, best=keep_best, metric=keep_best and "loss")
    with Checkpointer(
        root, model=model, optimizer=chosen, scheduler=schedule, keep=keep, **options
    ) as checkpointer:
        done = checkpointer.resume(**(resume or {}))
        say(resumed=done, exactness=checkpointer.exactness, first_rate=chosen.param_groups[0]["lr"])
        digests[done] = whole_state(model, chosen, averages)
        for step in range(done + 1, steps + 1):
            if step == deaf_from:  # to what the others have
                time.sleep(0.1)
                coordinator.BUSY_SECONDS = coordinator.IDLE_SECONDS = 60.0
                coordinator.RankCoordinator.scan_soon = lambda self: None
                time.sleep(0.3)
            if lose_at is not None and (rank, step) == tuple(lose_at):  # and the others are not called
                checkpointer._backend.recorder.take_slot = lambda wait: None
                checkpointer._backend.pace._together.call = lambda: None
            if deaf_replica is not None and (rank, step) == tuple(deaf_replica):  # to what all ranks have
                checkpointer._backend.replica._helper.send = partial(
                    but_news, checkpointer._backend.replica._helper.send
                )
            if sleeps_at is not None and (rank, step) == tuple(sleeps_at[:2]):
                time.sleep(sleeps_at[2])
            if step == unfreeze_at:
                plain.first.bias.requires_grad_(True)
            for _ in range(accumulate - 1):
                with model.no_sync():
                    model(torch.randn(5, 7)).pow(2).mean().backward()
                checkpointer.step()  # in mid-accumulation it does nothing
            loss = model(torch.randn(5, 7)).pow(2).mean()
            losses.append(float(loss.detach()))
            loss.backward()
            if unfreeze_at is not None and step >= unfreeze_at:  # DDP does not know of it
                dist.all_reduce(plain.first.bias.grad)
            if clip and not mlp:  # torch cannot clip what is on several meshes
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if step == dense_at:
                plain.first.weight.grad += 1e-3
            chosen.step()
            schedule.step()
            chosen.zero_grad()
            if altered is not None and (rank, step) == tuple(altered):
                local_of(plain.second.weight.data).add_(1)  # nobody sees it
            if step == halved_at:
                with torch.no_grad():
                    plain.second.weight.mul_(0.5)
            if forgets is not None and forgets[0] in (rank, "all") and forgets[1] == step:
                for held in chosen.state.values():
                    held["exp_avg"].zero_()
            if kill_replica is not None and (rank, step) == tuple(kill_replica):
                if survives_as is not None:  # ranks before this one are to read what survives after the step
                    wait_until(lambda: meeting.have(f"stepped-{step}", range(rank)))  # noqa: B023
                checkpointer._backend.replica._helper._process.kill()
            if kill is not None and kill[0] in (rank, "all") and kill[1] == step:
                die(step)
            if signal_at is not None and (rank, step) == tuple(signal_at):
                os.kill(os.getpid(), signal.SIGTERM)
            if raises is not None and (rank, step) == tuple(raises):
                raise ValueError("a mistake of the script")
            if read_only is not None and (rank, step) == tuple(read_only):
                checkpointer._backend.recorder.wait(step - 1)
                make_read_only(Path(root))
            if slow is not None and rank == slow[0] and step in slow[1:]:
                rate = 100_000 if step == slow[1] else None
                checkpointer._queue._throttles[True] = Throttle(rate)
            if step >= digests_from:
                digests[step] = whole_state(model, chosen, averages)
            say(digests=digests, losses=losses, at=step)
            value = (values or {}).get(str(step))
            if dies_at_best == [rank, step]:  # between the metric and the base
                checkpointer._save_snapshot = lambda again: os.kill(os.getpid(), signal.SIGKILL)
            value = None if rank == valueless else value
            checkpointer.step(None if value is None else {"loss": value + rank * own_values})
            if stuck_at is not None and (rank, step) == tuple(stuck_at):  # as in a collective
                threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
                time.sleep(600)
            if (killed_after or {}).get(str(rank)) == step:
                die(step)
            if settle_at is not None and settle_at[0] in (rank, "all") and settle_at[1] == step:
                checkpointer._backend.replica.drain()
            if average:  # which has been updated now
                digests[step] = whole_state(model, chosen, averages)
            if step == wait_at:
                checkpointer.wait()
            time.sleep(pause)
            if copied_at == step and rank == 0:
                wait_until(lambda: checkpointer.remote_durable_step >= step)  # noqa: B023
            say(durable=checkpointer.durable_step, survives=checkpointer.replica_step)
            say(copied=checkpointer.remote_durable_step)
            if survives_as is not None:
                meeting.tell(f"stepped-{step}")
                expected = survives_as[min(step, len(survives_as)) - 1]
                wait_until(lambda: checkpointer.replica_step == expected)  # noqa: B023
            survived.append(checkpointer.replica_step)
            say(survived=survived)
            if survives_as is not None:  # what ranks before this one read does not change until they have
                meeting.tell(f"read-{step}")
                wait_until(lambda: meeting.have(f"read-{step}", range(rank)))  # noqa: B023
            if world_size > 1 and not options.get("replica"):
                store = checkpointer._store
                say(lost=checkpointer._backend.pace._losses, recording=checkpointer._backend.pace.recording)
                say(
                    cap=[store.cap_bytes, store.cap_share],
                    full=sum(checkpointer._backend.pace.bases.expected_bytes()),
                )
            if step == moved_at:
                schedule.step()
                say(rate=chosen.param_groups[0]["lr"])
            if changed_at is not None and step == changed_at[1]:
                checkpointer.save()
                if rank == changed_at[0]:
                    local_of(plain.second.weight.data).mul_(2)  # nobody sees it
                digests[step] = whole_state(model, chosen, averages)
            if step == save_at and rank == between:  # of two steps
                model(torch.ones(5, 7)).sum().backward()
                chosen.step()
                try:
                    checkpointer.save()
                except BadInput as error:
                    say(refused=f"BadInput: {error}")
                    time.sleep(1)  # a script that does not end at once
                    raise ValueError("a mistake that is told later") from error
            if step == save_at or (save_every is not None and step % save_every == 0):
                checkpointer.save()
                say(saved=checkpointer.durable_step)
    if kind == "plain":  # nothing else has threads; those of a group end soon after it
        wait_until(lambda: left_here() == before)
    say(finished=True, durable=checkpointer.durable_step, digests=digests, losses=losses, after=left_here())
    say(copied=checkpointer.remote_durable_step)
    if options.get("replica"):
        say(copied_again=checkpointer._optimizer_hooks.copied_again, early=sum(early))
    if dist.is_initialized():
        dist.destroy_process_group()
