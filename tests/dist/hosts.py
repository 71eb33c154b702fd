"""What a rank does that trains a tiny model with a library that shards, with Holdfast or, without ``root``, without.

``host`` is "accelerate", "trainer", "lightning" or "torch". The last is the reference: a loop of torch alone that saves
by ``torch.distributed.checkpoint`` and reads its own batches, so that it can go on with another number of ranks.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import TrainerCallback

from dist.training import whole_state
from holdfast.integrations.accelerate import AcceleratedCheckpointer
from holdfast.integrations.lightning import HoldfastCallback as LightningCallback
from holdfast.integrations.shared.changed_attributes import innermost
from holdfast.integrations.transformers import HoldfastCallback as TrainerHoldfast
from survive_run import digest
from trainer_run import TOKENS, VOCABULARY, make

SAMPLES, PASSES = 48, 3


class Points(Dataset):
    """Sample ``i`` begins with ``i``, so that a batch says what is in it."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.cat([torch.tensor([float(i)]), torch.linspace(-1, 1, 7) * i / SAMPLES])


class Sentences(Dataset):
    """Sentence ``i`` begins with token ``i``. In batches of 12 the last one is filled up."""

    def __len__(self) -> int:
        return 46

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(i))
        tokens[0] = i
        return {"input_ids": tokens, "labels": tokens}


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 13), nn.Linear(13, 3)
        self.norm, self.dropout = nn.LayerNorm(13), nn.Dropout(dropout)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(torch.relu(self.norm(self.first(batch[:, 1:]))))
        return self.second(hidden).pow(2).mean()


def sharding_on_cpus() -> None:
    """Let accelerate shard over CPUs. It has the code, and asks for devices before it."""
    begin = AcceleratorState.__init__

    def begin_sharded(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        begin(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = begin_sharded


class Diary:
    """What a rank saw and held at each step, and when it is killed."""

    def __init__(self, say: Callable[..., None], kill: Any, rank: int) -> None:
        self.say, self._kill, self._rank = say, kill, rank
        self.losses: dict[int, list[float]] = {}
        self.seen: dict[int, list[int]] = {}
        self.digests: dict[int, str] = {}
        self.means: dict[int, float] = {}
        """Of an epoch, what all ranks logged."""

    def saw(self, step: int, batch: torch.Tensor, loss: torch.Tensor) -> None:
        """Of micro-batches of ``step``, which is not done yet."""
        self.losses.setdefault(step, []).append(float(loss.detach()))
        self.seen.setdefault(step, []).extend(int(i) for i in batch[:, 0])

    def found(self, model: nn.Module, optimizer: Any) -> None:
        """Of the first step that is done here: what it begins with."""
        if not self.digests:
            self.say(digest=whole_state(model, optimizer))

    def held(self, step: int, model: nn.Module, optimizer: Any) -> None:
        self.digests[step] = whole_state(model, optimizer)
        self.say(losses=self.losses, seen=self.seen, digests=self.digests)
        if self._kill is not None and (self._rank, step) == tuple(self._kill):
            os.kill(os.getpid(), signal.SIGKILL)

    def end(self, step: int, **more: Any) -> None:
        self.say(steps=step, finished=True, **more)


# accelerate


def by_accelerate(
    rank: int,
    world_size: int,
    diary: Diary,
    *,
    kind: str,
    batch: int,
    root: str | None = None,
    split: bool = False,
    accumulate: int = 1,
    order: str = "generator",
    dropout: float = 0.3,
    samples: int = SAMPLES,
    passes: int = PASSES,
    registers: bool = True,
    save_at: int | None = None,
    load: bool = False,
    stop_at: int | None = None,
) -> None:
    """``batch`` is what the script gives its loader: of one rank, or with ``split`` of all."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if kind == "fsdp" else None
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=accumulate,
        dataloader_config=DataLoaderConfiguration(
            split_batches=split, use_seedable_sampler=order == "seedable"
        ),
    )  # fmt: skip
    torch.manual_seed(5)
    model = Net(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    generator = torch.Generator().manual_seed(9) if order == "generator" else None
    loader = DataLoader(Points(samples), batch, shuffle=order != "in order", generator=generator)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if registers:
        accelerator.register_for_checkpointing(schedule)
    else:
        schedule = accelerator.prepare(schedule)
    torch.manual_seed(100 + rank)
    taken, begin, step, checkpointer = loader, 0, 0, None
    if root is not None:
        checkpointer = AcceleratedCheckpointer(root, accelerator, loader, base_every=4, wait_each_step=True)
        if load:
            accelerator.load_state(f"{root}.saved")
        else:
            checkpointer.resume()
        taken, begin, step = checkpointer.batches, checkpointer.batches.epoch, checkpointer.steps_done
        diary.found(model, innermost(optimizer))
    with checkpointer or nullcontext():
        for _ in range(begin, passes):
            for x in taken:
                if step == stop_at:
                    break
                with accelerator.accumulate(model):
                    loss = model(x)
                    diary.saw(step + 1, x, loss)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    if accelerator.sync_gradients or not registers:
                        schedule.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    step += 1
                    diary.held(step, model, innermost(optimizer))
                if checkpointer is not None:
                    checkpointer.step()
                    if step == save_at and accelerator.sync_gradients:
                        accelerator.save_state(f"{root}.saved")
    diary.end(step, rate=schedule.get_last_lr(), random=digest(torch.get_rng_state()))


# torch alone


def by_torch(
    rank: int,
    world_size: int,
    diary: Diary,
    *,
    kind: str,
    batch: int,
    folder: str,
    begin: bool,
    accumulate: int = 1,
    order: str = "generator",
    dropout: float = 0.3,
    stop_at: int | None = None,
) -> None:
    """``batch`` is of one rank. Begins and saves at ``stop_at``, or goes on from there."""
    torch.manual_seed(5)
    model = Net(dropout)
    if kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    elif world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    generator = torch.Generator().manual_seed(9)
    torch.manual_seed(100 + rank)
    step, first, skipped, random = 0, 0, 0, None
    if not begin:
        restore(folder, model, optimizer)
        own = torch.load(Path(folder) / f"rank{rank if rank < count(folder) else 0}.pt")
        step, first, random = own["step"], own["pass"], own["random"]
        skipped = own["samples"] // (batch * world_size)
        generator.set_state(own["generator"])
        schedule.load_state_dict(own["schedule"])
    for number in range(first, PASSES):
        before = generator.get_state()
        for done, x in enumerate(batches_of(order, generator, number, batch * world_size), 1):
            if done <= skipped:
                continue
            if random is not None:
                torch.set_rng_state(random)
                random = None
            x = x[rank::world_size] if order == "distributed" else x[rank * batch : (rank + 1) * batch]
            is_last = done % accumulate == 0
            if kind == "fsdp":
                model.set_requires_gradient_sync(is_last)
            loss = model(x)
            diary.saw(step + 1, x, loss)
            (loss / accumulate).backward()
            if not is_last:
                continue
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            diary.held(step, model, optimizer)
            if step == stop_at:
                place = {"step": step, "pass": number, "samples": done * batch * world_size}
                place |= {"random": torch.get_rng_state(), "generator": before}
                save(folder, rank, model, optimizer, place | {"schedule": schedule.state_dict()})
                return diary.end(step)
        skipped = 0
    diary.end(step, rate=schedule.get_last_lr(), random=digest(torch.get_rng_state()))


def batches_of(order: str, generator: torch.Generator, number: int, size: int) -> Iterator[torch.Tensor]:
    """The batches of all ranks together, of pass ``number``."""
    points = Points()
    if order == "generator":
        yield from DataLoader(points, size, shuffle=True, generator=generator)
    elif order == "distributed":
        sampler = DistributedSampler(points, 1, 0, shuffle=True)
        sampler.set_epoch(number)
        yield from DataLoader(points, size, sampler=sampler)
    else:
        yield from DataLoader(points, size)


def save(folder: str, rank: int, model: nn.Module, optimizer: Any, place: dict[str, Any]) -> None:
    held, slots = get_state_dict(model, optimizer)
    dcp.save({"model": held, "optimizer": slots}, checkpoint_id=f"{folder}/dcp")
    torch.save(place, Path(folder) / f"rank{rank}.pt")


def restore(folder: str, model: nn.Module, optimizer: Any) -> None:
    held, slots = get_state_dict(model, optimizer)
    state = {"model": held, "optimizer": slots}
    dcp.load(state, checkpoint_id=f"{folder}/dcp")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def count(folder: str) -> int:
    return len(list(Path(folder).glob("rank*.pt")))


# transformers


class Notes(TrainerCallback):
    """Says what a trainer holds at each step, and stops it once it has saved."""

    def __init__(self, diary: Diary, stops: bool) -> None:
        self.diary, self.stops, self.trainer = diary, stops, None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer: Any = self.trainer
        self.diary.found(trainer.model_wrapped, innermost(trainer.optimizer))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer: Any = self.trainer
        self.diary.held(state.global_step + 1, trainer.model_wrapped, innermost(trainer.optimizer))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= self.stops


def by_trainer(
    rank: int,
    world_size: int,
    diary: Diary,
    *,
    kind: str,
    batch: int,
    root: str | None = None,
    output: str = "",
    accumulate: int = 1,
    save_at: int | None = None,
    checkpoint: str | None = None,
    **options: Any,
) -> None:
    """Without ``root`` the trainer saves at ``save_at`` and stops, or goes on from its own ``checkpoint``."""
    if kind == "fsdp":
        options |= {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": "GPT2Block"}}
    if save_at is not None:
        options |= {"save_strategy": "steps", "save_steps": save_at}
    notes = Notes(diary, stops=save_at is not None)
    callbacks = [TrainerHoldfast(root, base_every=4, wait_each_step=True)] if root is not None else []
    trainer = make(
        output or f"{root}.output", data=Sentences(), callbacks=[*callbacks, notes],
        per_device_train_batch_size=batch, gradient_accumulation_steps=accumulate, logging_steps=1,
        num_train_epochs=3, **options,
    )  # fmt: skip
    notes.trainer, compute_loss = trainer, trainer.compute_loss

    def compute_and_note(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = compute_loss(model, inputs, *args, **kwargs)
        diary.saw(trainer.state.global_step + 1, inputs["input_ids"], loss)
        return loss

    trainer.compute_loss = compute_and_note
    trainer.train(resume_from_checkpoint=checkpoint)
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    diary.end(
        trainer.state.global_step, rate=trainer.lr_scheduler.get_last_lr(), history=history,
        random=digest(torch.get_rng_state()),
    )  # fmt: skip


# Lightning


class Module(L.LightningModule):
    def __init__(self, diary: Diary, dropout: float, shards: bool) -> None:
        super().__init__()
        self.net, self.shards = Net(dropout), shards
        self.__dict__["diary"] = diary

    def configure_model(self) -> None:
        if self.shards and not isinstance(next(self.net.parameters()), DTensor):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.net(batch)
        self.diary.saw(self.trainer.global_step + 1, batch, loss)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Held(L.Callback):
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if "loss" in trainer.callback_metrics:  # of the epoch before
            module.diary.means[trainer.current_epoch - 1] = float(trainer.callback_metrics["loss"])
            module.diary.say(means=module.diary.means)

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        module.diary.found(module.net, trainer.optimizers[0])

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        module.diary.held(trainer.global_step, module.net, trainer.optimizers[0])


def by_lightning(
    rank: int,
    world_size: int,
    diary: Diary,
    *,
    kind: str,
    batch: int,
    root: str | None = None,
    output: str = "",
    dropout: float = 0.3,
    order: str = "distributed",
    tensor_parallel: int = 1,
    **options: Any,
) -> None:
    os.environ |= {"GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(world_size), "TORCHELASTIC_RUN_ID": "test"}
    torch.manual_seed(5)
    model = Module(diary, dropout, shards=kind == "fsdp")
    torch.manual_seed(100 + rank)
    strategy: Any = "ddp" if world_size > 1 else "auto"
    if kind == "fsdp":
        strategy = ModelParallelStrategy(world_size // tensor_parallel, tensor_parallel)
    callbacks = [Held()] + (
        [LightningCallback(root, base_every=4, wait_each_step=True)] if root is not None else []
    )
    trainer = L.Trainer(
        default_root_dir=output or f"{root}.output", accelerator="cpu", devices=world_size, strategy=strategy,
        callbacks=callbacks, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, gradient_clip_val=0.5, **({"max_epochs": PASSES} | options),
    )  # fmt: skip
    trainer.fit(model, DataLoader(Points(), batch, shuffle=order == "distributed"))
    diary.end(
        trainer.global_step, rate=trainer.lr_scheduler_configs[0].scheduler.get_last_lr(),
        random=digest(torch.get_rng_state()),
    )  # fmt: skip


HOSTS = {
    "accelerate": by_accelerate,
    "torch": by_torch,
    "trainer": by_trainer,
    "lightning": by_lightning,
}


def main(
    rank: int,
    world_size: int,
    rendezvous: str,
    say: Callable[..., None],
    *,
    host: str,
    kill: tuple[int, int] | None = None,
    **options: Any,
) -> None:
    """``kill`` names a rank and a step that it does not record."""
    if world_size > 1:
        os.environ |= {"LOCAL_RANK": str(rank), "MASTER_PORT": "1"}
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    sharding_on_cpus()
    HOSTS[host](rank, world_size, Diary(say, kill, rank), **options)
