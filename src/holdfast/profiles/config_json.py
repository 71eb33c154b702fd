"""Model profiles read from the ``config.json`` of a transformers model folder.

``holdfast plan --model FOLDER`` takes the folder that ``holdfast train --model FOLDER`` trains. Only architectures
whose parameters the profile counts within one percent (tests/profiles/test_pretrained.py) are accepted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .model_profile import ModelProfile

GATED = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "granite",
    "olmo2",
    "smollm3",
)
"""Architectures whose MLP has three matrices, and whose matrices have few biases or none."""
PLAIN = ("gpt2", "gpt_neox")
"""Architectures whose MLP has two matrices, and whose matrices and norms have biases."""
LEARNED_POSITIONS = ("gpt2",)
DEFAULT_SEQUENCE = 2048
"""The tokens of one sequence, or fewer where the model is limited to fewer."""


def model_of_folder(folder: Path) -> ModelProfile:
    """Return the profile of the model in ``folder``.

    Raises ``ConfigError`` where transformers is missing, the configuration cannot be read, or the architecture is
    not one that a profile describes.
    """
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ConfigError(
            f"reading {folder} takes transformers: pip install transformers; or describe the model in a TOML file"
            " (docs/plan.md)"
        ) from error
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many classes, by what is wrong in the file
        raise ConfigError(f"{folder} has no configuration that transformers reads: {error}") from error
    return model_of_config(config.get_text_config(), f"the model in {folder}")


def model_of_config(config: Any, what: str) -> ModelProfile:
    """Return the profile of a decoder with the transformers configuration ``config``; errors name it ``what``."""
    kind = config.model_type
    if kind not in GATED + PLAIN:
        raise ConfigError(
            f"{what} is of type {kind!r}, whose blocks no profile describes. Types that are read:"
            f" {', '.join(sorted(GATED + PLAIN))}. Describe it in a TOML file (docs/plan.md)"
        )
    plain = kind in PLAIN
    hidden = getattr(config, "n_inner", None) if kind == "gpt2" else config.intermediate_size
    longest = config.max_position_embeddings
    return ModelProfile(
        description=f"{kind} of {Path(config.name_or_path).name or 'a folder'}",
        blocks=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or 0,
        head_size=getattr(config, "head_dim", None) or 0,
        hidden=hidden or 0,
        gated=not plain,
        biases=plain,
        vocabulary=config.vocab_size,
        tied=bool(config.tie_word_embeddings),
        positions=longest if kind in LEARNED_POSITIONS else 0,
        sequence=min(DEFAULT_SEQUENCE, longest),
        micro_batch=1,
    )
