"""A module of configurations as torchtitan takes it: ``--module peers.titan_config --config ours``.

The model is torchtitan's Llama 3, made small, with the attention that needs no GPU; the data are random tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset
from torchtitan.components.checkpoint import CheckpointManager as Theirs
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from holdfast.integrations.torchtitan import CheckpointManager, StepCheckpointManager

LENGTH, VOCABULARY = 16, 260


def ours() -> Trainer.Config:
    config = tiny()
    config.checkpoint = CheckpointManager.Config(enable=True, interval=2, last_save_model_only=False)
    return config


def steps() -> Trainer.Config:
    """Every step durable before the next one."""
    config = tiny()
    config.checkpoint = StepCheckpointManager.Config(
        enable=True, last_save_model_only=False, options={"wait_each_step": True, "base_every": 2}
    )
    return config


def shared() -> Trainer.Config:
    config = steps()
    config.dataloader = SharedTokens.Config()
    return config


def theirs() -> Trainer.Config:
    config = tiny()
    config.checkpoint = Theirs.Config(enable=True, interval=2, last_save_model_only=False)
    return config


def tiny() -> Trainer.Config:
    """torchtitan's debugging model with one of its layers and fewer tokens."""
    spec = model_registry("debugmodel")
    spec.model.vocab_size = VOCABULARY
    spec.model.tok_embeddings.num_embeddings = spec.model.lm_head.out_features = VOCABULARY
    spec.model.layers = spec.model.layers[:1]
    spec.model.layers[0].attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        model_spec=spec,
        tokenizer=NoTokenizer.Config(),
        dataloader=Tokens.Config(),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(local_batch_size=2, seq_len=LENGTH, steps=4, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        activation_checkpoint=None,
        metrics=MetricsProcessor.Config(log_freq=1),
        debug=DebugConfig(seed=7, deterministic=True),
    )


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    decode = get_vocab_size = encode


class Random(IterableDataset):
    """Tokens by rank and number, which goes into the state of the loader."""

    def __init__(self, rank: int) -> None:
        self.rank, self.number = rank, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(1000 * self.rank + self.number)
            self.number += 1
            tokens = torch.randint(VOCABULARY, (LENGTH + 1,), generator=generator)
            yield {"input": tokens[:-1]}, tokens[1:]

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


class Shared(Random):
    """Tokens by number alone: each rank takes its share of as many samples, however many ranks there are."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__(0)
        self._first, self._num_ranks = rank, num_ranks

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        samples = super().__iter__()
        while True:
            group = [next(samples) for _ in range(self._num_ranks)]
            yield group[self._first]


class Tokens(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any
    ) -> None:
        super().__init__(
            Random(dp_rank), dp_rank=dp_rank, dp_world_size=dp_world_size, batch_size=local_batch_size
        )


class SharedTokens(ParallelAwareDataloader):
    """A loader whose position is the number of samples that all ranks have had."""

    elastic = True

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any
    ) -> None:
        data = Shared(dp_rank, dp_world_size)
        super().__init__(data, dp_rank=dp_rank, dp_world_size=dp_world_size, batch_size=local_batch_size)

    def state_dict(self) -> dict[str, Any]:
        return self.dataset.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.dataset.load_state_dict(state_dict)
