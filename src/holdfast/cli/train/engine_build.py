"""The engine of ``holdfast train``, built from a configuration: optimizer, learning rate, placement and loader.

The recipe gives the model and the text, the configuration everything else. A continued run gets the hyper-parameters of
the configuration, not those of its commit. The same seed gives the same bits. Called by ``train_job`` and ``sizing``.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR

from ...config import Config, OffloadConfig, literal
from ...data.loader import SampleLoader
from ...errors import ConfigError
from ...events import EventLog
from ...mlp_tiles import tile_mlps
from ...offload.api import Budget, offload
from ...offload.engine import Engine
from ...offload.model.blocks import find_blocks
from ...offload.model.model_parts import ONE_BY_ONE
from ...offload.offload_options import IO, Clipping, Durability, Placement
from ...offload.setup.preflight import Preflight
from ...optim import AdamW8bit, AdamWBF16, Apollo, Grass, Joined, MeZO, apollo_mini
from ..machine import choose_device
from .recipe import Recipe

BETAS, EPSILON = (0.9, 0.95), 1e-8
"""Settings of AdamW."""
OF_MATRICES = ("muon", "apollo", "apollo-mini", "grass")
"""Optimizers that update the matrices of the blocks; AdamW updates all other parameters."""
Group = dict[str, Any]


def make_engine(
    config: Config,
    recipe: Recipe,
    loader: SampleLoader,
    micro_batches: int,
    events: EventLog,
    confirm: Callable[[Preflight], None],
    before_first_commit: Callable[[], object] | None = None,
    say: Callable[[str], object] | None = None,
) -> Engine:
    """Build the engine for the recipe's model, optimizer, schedule and text.

    The training state is fresh, or that of the newest commit. ``micro_batches`` is this rank's number in a step, and
    ``before_first_commit`` is called in a fresh directory.
    """
    seed_all(config.run.seed)
    if config.train.mlp_tokens:
        tile_mlps(recipe.model, config.train.mlp_tokens)
    choose_experts = getattr(recipe.model, "set_experts_implementation", None)
    if config.offload.expert_slots and callable(choose_experts):
        choose_experts(ONE_BY_ONE)
    optimizer = make_optimizer(recipe, config)
    warmup, steps = config.train.warmup_steps, config.train.steps
    scheduler = LambdaLR(optimizer, lambda step: learning_rate_factor(step, warmup, steps))
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    chosen = config.offload
    # train.dtype was chosen by measurement, or set on purpose
    warnings.filterwarnings("ignore", message='precision="bf16": this processor')
    # the run's own hyper-parameters are restored, and replaced below
    warnings.filterwarnings("ignore", message="the run's own hyper-parameters are kept")
    engine = offload(
        recipe.model,
        optimizer,
        chosen.ssd or config.run.dir,
        scheduler=scheduler,
        loader=loader,
        source=recipe.source,
        seed=config.run.seed,
        device=choose_device(chosen.device),
        precision=config.train.dtype,
        budget=Budget(device=chosen.device_budget_bytes or "auto", host=chosen.host_budget_bytes or "auto"),
        placement=_placement(chosen),
        schedule=chosen.schedule,
        order=chosen.order,
        clipping=Clipping(
            None if config.train.optimizer == "mezo" else config.train.clip_norm or None,
            config.train.clipping,
        ),
        normalize=recipe.normalize,
        sample=recipe.sample,
        micro_batches=micro_batches,
        durability=Durability(commit_every=config.durability.every, retain=config.durability.retain),
        io=_io(config),
        events=events,
        confirm=confirm,
        before_first_commit=before_first_commit,
        say=say,
    )
    _set_rates(optimizer, scheduler, config, decays)
    return engine


def _placement(chosen: OffloadConfig) -> Placement:
    return Placement(
        params_on_host=chosen.params_on_host, optimizer_on_host=chosen.optimizer_on_host,
        activations_on_host=chosen.activations_on_host, delayed_fraction=chosen.delayed_fraction,
        recomputed_fraction=chosen.recomputed_fraction,
        embedding_and_head=None if chosen.embedding_and_head == "auto" else chosen.embedding_and_head,
        expert_slots=chosen.expert_slots or None,
    )  # fmt: skip


def _io(config: Config) -> IO:
    return IO(
        drives=config.offload.drives, direct=config.io.direct, threads=config.io.threads,
        read_limit=config.io.read_limit_bytes_per_second, write_limit=config.io.write_limit_bytes_per_second,
    )  # fmt: skip


def _set_rates(
    optimizer: torch.optim.Optimizer, scheduler: LambdaLR, config: Config, decays: list[float]
) -> None:
    """Set the configuration's learning rate and weight decay, which apply from here on, also in a continued run."""
    highest = config.train.highest_rate
    scheduler.base_lrs = [highest for _ in decays]
    factor = learning_rate_factor(scheduler.last_epoch, config.train.warmup_steps, config.train.steps)
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        group |= {"initial_lr": highest, "lr": highest * factor, "weight_decay": decay}


def make_optimizer(recipe: Recipe, config: Config) -> torch.optim.Optimizer:
    """Build the optimizer. Weight decay applies to matrices, not to norms (by dimension) or the embedding.

    Raises ``ConfigError`` if the optimizer would have nothing to update.
    """
    kind, rate, decay = config.train.optimizer, config.train.highest_rate, config.train.weight_decay
    embeddings = recipe.embeddings()
    trained = [p for p in recipe.model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.dim() >= 2 and id(p) not in embeddings]
    others = [p for p in trained if p.dim() < 2 or id(p) in embeddings]
    if kind in OF_MATRICES:
        return _of_matrices(recipe, config, decayed, _group(others, 0.0))
    groups = [*_group(decayed, decay), *_group(others, 0.0)]
    if kind == "adafactor":
        return torch.optim.Adafactor(groups, lr=rate)
    if kind == "mezo":
        return MeZO(groups, lr=rate, seed=config.run.seed)
    if kind == "adamw-8bit-24":
        return AdamW8bit(groups, lr=rate, betas=BETAS, master_bits=24)
    adamw = {"adamw": torch.optim.AdamW, "adamw-bf16": AdamWBF16, "adamw-8bit": AdamW8bit}[kind]
    return adamw(groups, lr=rate, betas=BETAS)


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


def _of_matrices(
    recipe: Recipe, config: Config, decayed: list[torch.nn.Parameter], others: list[Group]
) -> torch.optim.Optimizer:
    kind, rate, decay = config.train.optimizer, config.train.highest_rate, config.train.weight_decay
    in_blocks = {id(p) for block in find_blocks(recipe.model).modules for p in block.parameters()}
    matrices = [p for p in decayed if p.dim() == 2 and id(p) in in_blocks]
    if not matrices:
        raise ConfigError(
            f"train.optimizer = {literal(kind)}: the blocks of this model have no matrices, which it is for. Take"
            ' "adamw".'
        )
    known = {id(p) for p in matrices}
    rest = [*_group([p for p in decayed if id(p) not in known], decay), *others]
    if kind == "muon":  # scaled so that the learning rates of AdamW fit
        muon = torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        return Joined(muon, torch.optim.AdamW(rest, lr=rate, betas=BETAS)) if rest else muon
    by_adamw = {"rank": None, "betas": BETAS, "eps": EPSILON}
    groups = [*_group(matrices, decay), *(group | by_adamw for group in rest)]
    if kind == "apollo-mini":
        return apollo_mini(groups, lr=rate, seed=config.run.seed)
    projected = {"apollo": Apollo, "grass": Grass}[kind]
    return projected(groups, lr=rate, rank=config.train.rank, seed=config.run.seed)


def _group(parameters: list[torch.nn.Parameter], decay: float) -> list[Group]:
    """Return a list of one parameter group, or an empty list without parameters."""
    return [{"params": parameters, "weight_decay": decay}] if parameters else []
