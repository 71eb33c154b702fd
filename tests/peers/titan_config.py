"""A module of configurations as torchtitan takes it: ``--module peers.titan_config --config ours``.

The model is torchtitan's Llama 3, made small, with the attention that needs no GPU; the data are random tokens.
"""

from __future__ import annotations

import os
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
from torchtitan.models import qwen3
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.rope import CosSinRoPE
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from holdfast.checkpoint.nodes.local_disks import LocalDisks
from holdfast.integrations.torchtitan import CheckpointManager, StepCheckpointManager

LENGTH, VOCABULARY = 16, 260


def ours() -> Trainer.Config:
    config = tiny()
    config.checkpoint = CheckpointManager.Config(enable=True, interval=2, last_save_model_only=False)
    return config


def steps(num_layers: int = 1) -> Trainer.Config:
    """Every step durable before the next one."""
    config = tiny(num_layers)
    config.checkpoint = StepCheckpointManager.Config(
        enable=True, last_save_model_only=False, options={"wait_each_step": True, "base_every": 2}
    )
    return config


def shared() -> Trainer.Config:
    config = steps()
    config.dataloader = Tokens.Config(shared=True)
    return config


def nodes() -> Trainer.Config:
    """Each rank on a node of its own, whose disk the other does not see."""
    config = steps()
    config.checkpoint.options["nodes"] = LocalDisks(node=int(os.environ["LOCAL_RANK"]))
    return config


def stages() -> Trainer.Config:
    """A pipeline of two ranks, each with one part of the model."""
    config = steps(num_layers=2)
    config.parallelism.pipeline_parallel_degree = 2
    return config


def interleaved() -> Trainer.Config:
    """A pipeline of two ranks, each with two parts of the model that are not neighbours."""
    config = steps(num_layers=4)
    config.parallelism.pipeline_parallel_degree = 2
    config.parallelism.pipeline_parallel_schedule = "Interleaved1F1B"
    return config


def experts() -> Trainer.Config:
    """A mixture of experts, balanced by a bias that a hook of the optimizer moves."""
    config = steps()
    config.model_spec = qwen3.model_registry("debugmodel_moe")
    model = config.model_spec.model
    model.layers = qwen3._build_qwen3_moe_layers(
        n_layers=1, dim=model.dim, n_heads=4, n_kv_heads=2, head_dim=32, moe_hidden_dim=32, num_experts=4, top_k=2,
        attn_backend="flex", rope=CosSinRoPE.Config(dim=32, max_seq_len=LENGTH, theta=1e4), moe_comm_backend="standard",
    )  # fmt: skip
    shrink(model)
    return config


def theirs() -> Trainer.Config:
    config = tiny()
    config.checkpoint = Theirs.Config(enable=True, interval=2, last_save_model_only=False)
    return config


def shrink(model: Any) -> None:
    """Give the configuration of a model fewer tokens, and attention that needs no GPU."""
    model.vocab_size = VOCABULARY
    model.tok_embeddings.num_embeddings = model.lm_head.out_features = VOCABULARY
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()


def tiny(num_layers: int = 1) -> Trainer.Config:
    """torchtitan's debugging model with some of its layers and fewer tokens."""
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:num_layers]
    shrink(spec.model)
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
    """Tokens by their number, of which a rank takes each ``every``-th. The next number is the state of the loader."""

    def __init__(self, first: int, every: int) -> None:
        self._first, self._every, self.number = first, every, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(self._first + self.number)
            self.number += self._every
            tokens = torch.randint(VOCABULARY, (LENGTH + 1,), generator=generator)
            yield {"input": tokens[:-1]}, tokens[1:]

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


class Tokens(ParallelAwareDataloader):
    """Tokens of each rank's own, whose place torchtitan keeps for so many ranks.

    With ``shared`` the ranks take turns, and the place is the number of samples that all of them have had.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        shared: bool = False

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any
    ) -> None:
        self.elastic = config.shared
        data = Random(dp_rank, dp_world_size) if self.elastic else Random(1000 * dp_rank, 1)
        super().__init__(data, dp_rank=dp_rank, dp_world_size=dp_world_size, batch_size=local_batch_size)

    def state_dict(self) -> dict[str, Any]:
        return self.dataset.state_dict() if self.elastic else super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        (self.dataset if self.elastic else super()).load_state_dict(state_dict)
