"""What a rank does that trains a tiny model with ``accelerate``, with a checkpointer or, without ``root``, without."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import datasets  # noqa: F401 (accelerate imports it where there are several ranks; it takes seconds)
import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils import worker

import holdfast
from holdfast.integrations.accelerate import AcceleratedCheckpointer
from survive_run import digest

SAMPLES, BATCH = 23, 3


class Points(Dataset):
    """Sample ``i`` is a function of ``i``; with ``noise``, of the global generator as well."""

    def __init__(self, noise: bool, samples: int = SAMPLES) -> None:
        self.noise, self.samples = noise, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> torch.Tensor:
        x = torch.linspace(-1, 1, 7) * i / SAMPLES
        return x + torch.randn(7) if self.noise else x


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(Points(noise=False)[i] for i in range(SAMPLES))


class Seen:
    """What a script registers for checkpointing."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


def loader_of(kind: str, points: Points, batch: int, num_workers: int) -> Any:
    if kind == "holdfast":
        return holdfast.loader(points, batch, num_workers, seed=3, epochs=3)
    generator = torch.Generator().manual_seed(9) if kind == "generator" else None
    return DataLoader(
        points, batch, shuffle=kind != "in order", num_workers=num_workers, generator=generator,
        persistent_workers=kind == "persistent",
    )  # fmt: skip


def main(
    rank: int,
    world_size: int,
    rendezvous: str,
    say: Callable[..., None],
    *,
    root: str | None = None,
    kill: tuple[int, int] | None = None,
    passes: int = 3,
    kind: str = "shuffled",
    noise: bool = False,
    num_workers: int = 0,
    accumulate: int = 1,
    scaler: bool = False,
    save_at: int | None = None,
    load: bool = False,
    resume_too: bool = False,
    leave_at: int | None = None,
    stop_at: int | None = None,
    batch: int = BATCH,
    samples: int = SAMPLES,
    keep_last: int = 2,
    spoilt: str = "",
    output: str = "",
    **options: Any,
) -> None:
    """``kill`` names a rank and a step. A pass is left after ``leave_at`` batches."""
    worker.MP_STATUS_CHECK_INTERVAL = 0.05  # how soon a worker notices that its trainer was killed
    if world_size > 1:
        os.environ |= {"LOCAL_RANK": str(rank)}
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    torch.manual_seed(5)
    norm = (
        nn.LayerNorm(13) if kind == "holdfast" else nn.BatchNorm1d(13)
    )  # whose last batch may be of one sample
    model = nn.Sequential(nn.Linear(7, 13), norm, nn.ReLU(), nn.Dropout(0.3), nn.Linear(13, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=accumulate,
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=kind == "seedable", dispatch_batches=spoilt == "dispatched"
        ),
    )  # fmt: skip
    if scaler:  # which it makes for devices only
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=3)
    seen, loader = Seen(), loader_of(kind, Points(noise, samples), batch, num_workers)
    if spoilt == "a stream":
        loader = DataLoader(Stream(), batch)
    elif spoilt == "two models":
        accelerator.prepare(nn.Linear(2, 2))
    elif spoilt == "an option":
        options["optimizer"] = optimizer
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    accelerator.register_for_checkpointing(seen)
    torch.manual_seed(100 + rank)
    losses: list[float] = []
    taken, begin, checkpointer = loader, 0, None
    if root is not None:
        checkpointer = AcceleratedCheckpointer(
            root, accelerator, loader, base_every=4, keep=holdfast.Keep(keep_last), **options
        )
        taken = checkpointer.batches
        if not load or resume_too:
            checkpointer.resume()
        if load:
            accelerator.load_state(f"{root}.saved")
        say(resumed=checkpointer.steps_done)
        begin = getattr(taken, "epoch", 0)

    step = 0 if checkpointer is None else checkpointer.steps_done
    with checkpointer or nullcontext():
        for number in range(begin, 1 if kind == "holdfast" else passes):
            for x in taken:
                if step == stop_at:
                    break
                if leave_at is not None and seen.batches == leave_at * (number + 1):
                    break
                with accelerator.accumulate(model):
                    loss = model(x).pow(2).mean()
                    losses.append(float(loss.detach()))
                    seen.batches += 1
                    accelerator.backward(loss)
                    if scaler and seen.batches == 5:
                        model.get_parameter("module.0.weight" if world_size > 1 else "0.weight").grad[
                            0, 0
                        ] = torch.inf
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                step += accelerator.sync_gradients
                if kill is not None and (rank, step) == tuple(kill) and accelerator.sync_gradients:
                    os.kill(os.getpid(), signal.SIGKILL)
                if checkpointer is not None:
                    checkpointer.step()
                    if kill is not None and step == kill[1] - 1:
                        checkpointer.wait()
                    say(durable=checkpointer.durable_step)
                    if step == save_at and accelerator.sync_gradients:
                        accelerator.save_state(f"{root}.saved")
                        say(saved=checkpointer.durable_step)
            losses.append(float(torch.rand(())))  # an evaluation, which draws
    whole = {
        "model": accelerator.unwrap_model(model).state_dict(),
        "slots": [dict(sorted(held.items())) for _, held in sorted(optimizer.state_dict()["state"].items())],
        "groups": optimizer.state_dict()["param_groups"],
        "schedule": schedule.state_dict(),
        "scaler": accelerator.scaler.state_dict() if scaler else None,
        "random": torch.get_rng_state(),
        "seen": seen.batches,
    }
    say(
        losses=losses,
        digests={name: digest(value) for name, value in whole.items()},
        steps=step,
        processes=accelerator.num_processes,
        finished=True,
    )
