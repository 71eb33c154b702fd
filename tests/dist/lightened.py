"""What a rank does that trains a tiny model with Lightning, with the callback or, without ``root``, without."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import worker

from holdfast.integrations.lightning import HoldfastCallback
from survive_run import digest

SAMPLES, BATCH = 23, 3


class Points(Dataset):
    """Sample ``i`` is a function of ``i``; with ``noise``, of the global generator as well."""

    def __init__(self, noise: bool) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> torch.Tensor:
        x = torch.linspace(-1, 1, 7) * i / SAMPLES
        return x + torch.randn(7) if self.noise else x


class Losses(list):
    """Of this process alone: the callback keeps plain lists, and leaves this one out."""


class Net(L.LightningModule):
    def __init__(self, plateau: bool, by_hand: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(7, 13), nn.BatchNorm1d(13), nn.ReLU(), nn.Dropout(0.3), nn.Linear(13, 3)
        )
        self.plateau, self.automatic_optimization = plateau, not by_hand
        self.losses = Losses()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.net(batch).pow(2).mean()
        self.losses.append(float(loss.detach()))
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        loss = self.net(batch).abs().mean() + 0.1 * torch.rand(())
        self.losses.append(float(loss))
        self.log("validation", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if self.plateau:
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "validation"}}
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Kill(L.Callback):
    """This process, in step ``step``, which is not recorded."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self._step:
            time.sleep(1.3)  # longer than steps wait to be written
            os.kill(os.getpid(), signal.SIGKILL)


def main(
    rank: int,
    world_size: int,
    rendezvous: str,
    say: Callable[..., None],
    *,
    root: str | None = None,
    kill: tuple[int, int] | None = None,
    noise: bool = False,
    num_workers: int = 0,
    own_generator: bool = False,
    plateau: bool = False,
    by_hand: bool = False,
    stopping: bool = False,
    validate: bool = True,
    output: str = "",
    ckpt_path: str | None = None,
    **options: Any,
) -> None:
    """``kill`` names a rank and a step."""
    warnings.simplefilter("ignore")
    worker.MP_STATUS_CHECK_INTERVAL = 0.05  # how soon a worker notices that its trainer was killed
    if world_size > 1:
        os.environ |= {
            "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(world_size), "MASTER_PORT": "1",
            "TORCHELASTIC_RUN_ID": "test",
        }  # fmt: skip
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    torch.manual_seed(5)
    model = Net(plateau, by_hand)
    generator = torch.Generator().manual_seed(9) if own_generator else None
    loader = DataLoader(Points(noise), BATCH, shuffle=True, num_workers=num_workers, generator=generator)
    checks = DataLoader(Points(False), BATCH, num_workers=num_workers)
    torch.manual_seed(100 + rank)
    callbacks: list[L.Callback] = [ModelCheckpoint(output, monitor="validation" if validate else None)]
    if stopping:
        callbacks.append(EarlyStopping("validation", patience=1, min_delta=0.2))
    if root is not None:
        callbacks.append(HoldfastCallback(root, base_every=3))
    if kill is not None and rank == kill[0]:
        callbacks.append(Kill(kill[1]))
    trainer = L.Trainer(
        default_root_dir=output, accelerator="cpu", devices=world_size, strategy="ddp" if world_size > 1 else "auto",
        callbacks=callbacks, logger=False, enable_progress_bar=False, enable_model_summary=False,
        **({"max_epochs": 3, "gradient_clip_val": None if by_hand else 0.5} | options),
    )  # fmt: skip
    trainer.fit(model, loader, checks if validate else None, ckpt_path=ckpt_path)
    optimizer = trainer.optimizers[0].state_dict()
    whole = {
        "model": model.state_dict(),
        "slots": [dict(sorted(held.items())) for _, held in sorted(optimizer["state"].items())],
        "groups": optimizer["param_groups"],
        "schedule": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "random": torch.get_rng_state(),
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "logged": trainer.fit_loop.epoch_loop._batches_that_stepped,
        "batches": trainer.fit_loop.epoch_loop.total_batch_idx,
        "best": trainer.checkpoint_callback.best_model_score,
    }
    say(
        losses=model.losses, digests={name: digest(value) for name, value in whole.items()},
        steps=trainer.global_step, processes=trainer.world_size, finished=True,
    )  # fmt: skip
