"""Small runs of every kind, whose numbers are exact in any order of summation, on any machine.

    PYTHONPATH=src:tests python tests/golden/make_runs.py TARGET

Each gradient is a sum of products of small integers, and each hyper-parameter a power of two: a replay anywhere has the
bits of the machine that wrote the run. The runs in ``tests/golden/runs_v1`` are never written anew: they are what a
later library must resume.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import xxhash
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.integrations.dcp import StorageReader, StorageWriter
from holdfast.store.reader import RunReader

STEPS = 7
"""Of every run, but for those that say otherwise."""
LATER = 2
"""Steps that follow a resume."""


class Layer(nn.Module):
    """One block: ``x`` plus a product, so that gradients do not depend on parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (x.detach() @ self.weight + self.bias)


class Tiny(nn.Module):
    """Two layers, and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                values = torch.arange(parameter.numel()).remainder(5 + len(name) % 3) - 2
                parameter.copy_(values.reshape(parameter.shape) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x).sum() + self.layers[1](2 * x).sum()


class Blocks(nn.Module):
    """Layers one after the other, for the engine. The first one's inputs are integers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Tiny().layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.25, momentum=0.5)


def batch(step: int, rank: int = 0) -> torch.Tensor:
    """Integers from -2 to 2, another order of them in each step and on each rank."""
    return (torch.arange(8).mul(3 + step).add(2 * rank).remainder(5) - 2).reshape(2, 4).float()


class Counter:
    """What a script keeps besides."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "name": "counter"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class Script:
    """A plain training script of ``Tiny`` under a ``Checkpointer``, in one process or as one of several ranks."""

    def __init__(self, run: Path, codec: Any = None) -> None:
        self.model = Tiny()
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        if dist.is_initialized():
            for layer in self.model.layers:
                fully_shard(layer)
            fully_shard(self.model)
        self.optimizer = sgd(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.counter = Counter()
        self.checkpointer = holdfast.Checkpointer(
            run, model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, also={"counter": self.counter},
            codec=codec, base_every=3, keep=holdfast.Keep(9), direct=False,
        )  # fmt: skip

    def train(self, steps: int, at: int | None = None) -> None:
        """Go on by ``steps``, from the newest step or from step ``at``."""
        start = self.checkpointer.resume() if at is None else self.checkpointer.resume(step=at)
        for step in range(start, start + steps):
            self.model(batch(step, self.rank)).backward()
            self.model.calls += 1
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.counter.steps += 1
            self.checkpointer.step()

    def digests(self) -> dict[str, Any]:
        """Of every tensor, whole, and of what the script keeps."""
        names = dict(self.model.named_parameters())
        found = digests_of(self.model.state_dict())
        for name, parameter in names.items():
            found |= digests_of({f"{name}/momentum": self.optimizer.state[parameter]["momentum_buffer"]})
        return found | {
            "lr": self.optimizer.param_groups[0]["lr"],
            "epoch": self.scheduler.last_epoch,
            "counter": self.counter.steps,
        }


def digests_of(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return one digest for each whole tensor's bytes."""
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    return {
        name: xxhash.xxh3_64_hexdigest(
            t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
        for name, t in whole.items()
    }


def plain(run: Path, steps: int, codec: Any = None, at: int | None = None) -> dict[str, Any]:
    script = Script(run, codec)
    with script.checkpointer:
        script.train(steps, at)
    return script.digests()


def left(run: Path, steps: int) -> dict[str, Any]:
    """One that has gone back: steps 6 and 7 of its first timeline were left."""
    if not run.exists():
        plain(run, steps)
        return plain(run, 1, at=5)
    return plain(run, steps)


def ranks(run: Path, steps: int) -> dict[str, Any]:
    """Two ranks of FSDP2, whose gradients are means of two."""
    answer = run.parent / f"{run.name}.answer"
    mp.start_processes(_rank, (run, steps, answer), nprocs=2, start_method="fork")
    found = json.loads(answer.read_text())
    answer.unlink()
    answer.with_suffix(".meeting").unlink(missing_ok=True)
    return found


@contextmanager
def process_group(rank: int, meeting: Path) -> Iterator[None]:
    """Two ranks that meet by the file ``meeting``, which is new."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _rank(rank: int, run: Path, steps: int, answer: Path) -> None:
    torch.set_num_threads(1)
    with process_group(rank, answer.with_suffix(".meeting").absolute()):
        found = plain(run, steps)
        if rank == 0:
            answer.write_text(json.dumps(found))


def engine(run: Path, steps: int) -> dict[str, Any]:
    """Out of core. The state at its end is exported as a state of torch."""
    model = Blocks()
    optimizer = sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    with holdfast.offload(
        model,
        optimizer,
        run,
        scheduler=scheduler,
        precision="fp32",
        io=holdfast.IO(direct=False),
        blocks=[*model.layers],
    ) as engine:
        for step in range(engine.steps_done, engine.steps_done + steps):
            engine.step([(batch(step),), (batch(step, 1),)])
    return stored(run)


class Straight(nn.Module):
    """Layers whose inputs are the model's, integers: whatever the parameters are, gradients are exact in bf16."""

    class Block(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            added = (x.detach().to(self.weight.dtype) @ self.weight + self.bias).float()
            return x + (added - added.detach())

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Block(), self.Block()])
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                values = torch.arange(1, 1 + parameter.numel()).reshape(parameter.shape)
                parameter.copy_(values * (-1.0) ** number / 3)  # of all 24 bits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def engine_bf16(run: Path, steps: int, precision: str = "bf16") -> dict[str, Any]:
    """Out of core with bf16 copies of fp32 masters; the run's own ``precision`` is "auto", too."""
    model = Straight()
    with holdfast.offload(
        model,
        sgd(model.parameters()),
        run,
        precision=precision,
        io=holdfast.IO(direct=False),
        blocks=[*model.layers],
    ) as engine:
        for step in range(engine.steps_done, engine.steps_done + steps):
            engine.step([(batch(step),), (batch(step, 1),)])
    return stored(run)


def stored(run: Path) -> dict[str, Any]:
    """Digests of the tensors of the newest commit, by the reader."""
    with RunReader(run) as reader:
        manifest = reader.head()
        return {
            key: xxhash.xxh3_64_hexdigest(reader.read_atom(manifest, atom))
            for key, atom in reader.atoms(manifest).items()
        }


def saved(run: Path, steps: int) -> dict[str, Any]:
    """One that ``dcp.save`` wrote, or, where it is there, what ``dcp.load`` finds in it."""
    model = Tiny()
    optimizer = sgd(model.parameters())
    if not run.exists():
        for step in range(steps):
            model(batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    state = dict(zip(("model", "optimizer"), dcp_state_dict.get_state_dict(model, optimizer), strict=True))
    if run.exists():
        dcp.load(state, storage_reader=StorageReader(run), no_dist=True)
    else:
        dcp.save(state, storage_writer=StorageWriter(run, step=steps), no_dist=True)
    return digests_of(state["model"] | _momenta(state["optimizer"]))


def _momenta(optimizer: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {f"{name}/momentum": each["momentum_buffer"] for name, each in optimizer["state"].items()}


KINDS: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "plain": plain,
    "topk": lambda run, steps: plain(run, steps, holdfast.TopK(0.25)),
    "left": left,
    "ranks": ranks,
    "engine": engine,
    "engine_whole": engine_bf16,  # by a version that stored the compute copy beside whole masters
    "engine_split": engine_bf16,
    "saved": saved,
}
"""By kind: begins the run with so many steps or goes on by them; returns digests of its end."""


def go_on(kind: str, run: str, steps: int) -> dict[str, Any]:
    """Go on as ``KINDS`` says, in a process that a test has just started."""
    return KINDS[kind](Path(run), steps)


def write(target: Path) -> None:
    """Write each run and, beside it, digests of its end and of where a copy of it comes by ``LATER`` steps."""
    for kind, go_on in KINDS.items():
        ends = {"end": go_on(target / kind, 3 if kind.startswith("engine") else STEPS)}
        if kind != "saved":
            shutil.copytree(target / kind, target / "copy")
            ends["later"] = go_on(target / "copy", LATER)
            shutil.rmtree(target / "copy")
        (target / kind / "lock").unlink(missing_ok=True)
        (target / f"{kind}.json").write_text(json.dumps(ends, indent=1) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
