"""The reference decoder in the format of Hugging Face's library, whose Llama computes the same."""

from __future__ import annotations

from typing import Any

from .decoder import DecoderConfig

PACK = "decoder-to-llama"
"""The rules that give the decoder's tensors their names in that library."""


def llama_config(config: DecoderConfig) -> dict[str, Any]:
    """Return the content of ``config.json`` beside the tensors."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "intermediate_size": config.hidden_width,
        "num_hidden_layers": config.blocks,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": config.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
