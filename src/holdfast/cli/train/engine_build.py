"""Construction of the engine from a configuration: the recipe's model, its optimizer and its learning rate."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR

from ...config import Config
from ...data.loader import SampleLoader
from ...events import EventLog
from ...offload.api import Budget, offload
from ...offload.engine import Engine
from ...offload.offload_options import IO, Clipping, Durability, Placement
from ...offload.setup.preflight import Preflight
from ..machine import choose_device
from .chosen_optimizer import make_optimizer
from .recipe import Recipe


def make_engine(
    config: Config,
    recipe: Recipe,
    loader: SampleLoader,
    micro_batches: int,
    events: EventLog,
    confirm: Callable[[Preflight], None],
    say: Callable[[str], object] | None = None,
) -> Engine:
    """Build the engine for the recipe's model, optimizer, schedule and text.

    The training state is fresh, or that of the newest commit. ``micro_batches`` is this rank's number in a step.
    """
    seed_all(config.run.seed)
    model = recipe.model
    optimizer = make_optimizer(recipe, config)
    warmup, steps = config.train.warmup_steps, config.train.steps
    scheduler = LambdaLR(optimizer, lambda step: learning_rate_factor(step, warmup, steps))
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    # train.dtype was chosen by measurement, or set on purpose
    warnings.filterwarnings("ignore", message='precision="bf16": this processor')
    # the run's own hyper-parameters are restored, and replaced below
    warnings.filterwarnings("ignore", message="the run's own hyper-parameters are kept")
    engine = offload(
        model,
        optimizer,
        config.offload.ssd or config.run.dir,
        scheduler=scheduler,
        loader=loader,
        source=recipe.source,
        seed=config.run.seed,
        device=choose_device(config.offload.device),
        precision=config.train.dtype,
        budget=Budget(
            device=config.offload.device_budget_bytes or "auto",
            host=config.offload.host_budget_bytes or "auto",
        ),
        placement=Placement(
            params_on_host=config.offload.params_on_host,
            optimizer_on_host=config.offload.optimizer_on_host,
            activations_on_host=config.offload.activations_on_host,
            delayed_fraction=config.offload.delayed_fraction,
            recomputed_fraction=config.offload.recomputed_fraction,
        ),
        schedule=config.offload.schedule,
        order=config.offload.order,
        clipping=Clipping(
            None if config.train.optimizer == "mezo" else config.train.clip_norm or None,
            config.train.clipping,
        ),
        normalize=recipe.normalize,
        sample=recipe.sample,
        micro_batches=micro_batches,
        durability=Durability(commit_every=config.durability.every, retain=config.durability.retain),
        io=IO(
            drives=config.offload.drives,
            direct=config.io.direct,
            threads=config.io.threads,
            read_limit=config.io.read_limit_bytes_per_second,
            write_limit=config.io.write_limit_bytes_per_second,
        ),
        events=events,
        confirm=confirm,
        say=say,
    )
    # the configuration's hyper-parameters and number of steps apply from here on, also in a continued run
    highest = config.train.highest_rate
    scheduler.base_lrs = [highest for _ in decays]
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        rate = highest * learning_rate_factor(scheduler.last_epoch, warmup, steps)
        group |= {"initial_lr": highest, "lr": rate, "weight_decay": decay}
    return engine


def learning_rate_factor(step: int, warmup_steps: int, steps: int) -> float:
    """Return the factor of the highest learning rate at ``step``, which counts from 0.

    After a linear warm-up it follows a cosine down to 0.1 at ``steps``.

    >>> [round(learning_rate_factor(step, 2, 10), 3) for step in (0, 1, 2, 6, 10)]
    [0.5, 1.0, 1.0, 0.55, 0.1]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def seed_all(seed: int) -> None:
    """Seed the global generators. They are part of every commit, so that repeating a run commits the same bits."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
