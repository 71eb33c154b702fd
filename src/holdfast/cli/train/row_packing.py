"""Packing of samples into rows, as ``data.packing`` asks for it and as far as the model takes it.

1. Text that is cut into windows has no samples to pack, and a model without ``position_ids`` cannot tell them apart.
   Both are found before anything is written. Otherwise attention is computed sample by sample (``packed_attention``).
2. A fresh run compares losses with the weights that it begins with (``packing_fault``), before its first step. If they
   show that samples of a row are not kept apart, the run sorts them by length instead. So does a run that begins to
   pack when it is continued, one whose record is gone, and one with micro-batches of another size.
3. The run's record then has "lengths", which stays, whatever is asked for later. A continued run's record has "on" only
   after the comparison, which is not made again.

The position in the data is the same number of samples in all of these. Called by ``train_job``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from ...config import Config
from ...data.loader import SampleLoader, step_loader
from ...data.packing import PackedLoader, Sample, packing_fault, takes_positions
from ...data.tokens import Tokens
from ...models.packed_attention import attend_by_sample
from .recipe import Recipe

if TYPE_CHECKING:
    from ...offload.engine import Engine

SORTED = "The samples of a step are sorted by length and padded instead."


def with_possible_packing(config: Config, recipe: Recipe, say: Callable[[str], object]) -> Config:
    """Return ``config`` without packing that is not possible, which ``say`` receives as a line."""
    if config.data.packing != "on":
        return config
    if not _has_samples(recipe):
        say("Nothing is packed: the text is cut into windows, which are full.")
        return config  # the same command continues the run, and names the same packing
    if not takes_positions(recipe.model):
        say(f"Nothing is packed: {type(recipe.model).__name__} has no position_ids. {SORTED}")
        return _with_packing(config, "lengths")
    attend_by_sample()
    return config


def loader_of(config: Config, recipe: Recipe, micro_batches: int) -> SampleLoader:
    """Return the loader of a run's steps; ``micro_batches`` is the number of this rank."""
    size, seed, packing, text = (
        config.train.micro_batch_size, config.run.seed, config.data.packing, recipe.corpus,
    )  # fmt: skip
    if packing != "off" and isinstance(text, Tokens) and text.pairs:
        return PackedLoader(text, size, micro_batches, packs=packing == "on", seed=seed)
    return step_loader(text, size, micro_batches, seed=seed, stack=recipe.stack)


def with_verified_packing(
    config: Config, engine: Engine, recipe: Recipe, loader: SampleLoader, say: Callable[[str], object]
) -> Config:
    """Return ``config`` with the packing that the model takes, and set ``loader`` to it.

    Collective: every rank must call this.
    """
    if not isinstance(loader, PackedLoader) or not loader.packs:
        return config
    samples = _two_samples(loader)

    def loss_of(batch: Sample) -> float:
        return engine.evaluate([batch])

    exact = config.train.dtype == "fp32"
    rows = loader.micro_batch_size
    fault = (
        packing_fault(loss_of, samples, loader.text, recipe.choices, exact=exact, num_rows=rows)
        if samples
        else ""
    )
    if not fault:
        say(
            "Samples are packed into rows; beside others and with other ones before it, a sample has the loss that it"
            " has alone."
        )
        return config
    loader.packs = False
    say(f"Nothing is packed: this model mixes the samples of a row ({fault}). {SORTED}")
    return _with_packing(config, "lengths")


def _two_samples(loader: PackedLoader) -> list[Sample]:
    """Return the first two samples from the position on that have a target; none if there are none."""
    numbers = range(loader.consumed, loader.consumed + len(loader.text.training))
    found = list(islice((number for number in numbers if loader.length(number) > 1), 2))
    return [loader.sample(number) for number in (found * 2)[:2]] if loader.text.context > 3 else []


def _has_samples(recipe: Recipe) -> bool:
    return isinstance(recipe.corpus, Tokens) and recipe.corpus.pairs


def _with_packing(config: Config, packing: Any) -> Config:
    return replace(config, data=replace(config.data, packing=packing))
