"""Families of models of transformers, tiny and random, and what is known of each out of core.

    python tests/families.py > docs/families.md

``FAMILIES`` has an entry for each class. What it claims is tried by ``models/test_families.py``, and the page is made
of the same entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY, ROWS, TOKENS = 50, 2, 10
SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "use_cache": False,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEADS = {"head_dim": 8}
WIDE = SIZES | {"intermediate_size": 128}
"""Text beside images has most of the parameters."""
IMAGE = 4
"""The token that stands for a part of an image."""
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
ROUTED = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "num_key_value_heads": 2,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
MULTIMODAL_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}

Batch = dict[str, Any]


def text(generator: torch.Generator, number: int) -> Batch:
    """Of another length in each micro-batch, the first row with padding before its text."""
    tokens = torch.randint(5, VOCABULARY, (ROWS, TOKENS - number), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0
    return {
        "input_ids": tokens,
        "labels": tokens.masked_fill(mask == 0, -100),
        "attention_mask": mask,
    }


def of_images(generator: torch.Generator, number: int) -> Batch:
    """An image of four parts before the text of each row."""
    batch = text(generator, number)
    batch["input_ids"][:, :IMAGE] = IMAGE
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["labels"] = batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE, -100)
    return batch | {"pixel_values": torch.randn(ROWS, 3, 8, 8, generator=generator)}


def with_types(generator: torch.Generator, number: int) -> Batch:
    batch = of_images(generator, number)
    return batch | {"token_type_ids": (batch["input_ids"] != IMAGE).long()}


def in_patches(generator: torch.Generator, number: int) -> Batch:
    """Images as rows of patches: of 4 by 4, which are merged by fours, so an image of 16 patches has four tokens."""
    batch = of_images(generator, number)
    del batch["pixel_values"]
    return batch | {
        "pixel_values": torch.randn(ROWS * 16, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * ROWS),
        "mm_token_type_ids": (batch["input_ids"] == IMAGE).int(),
    }


def balanced(generator: torch.Generator, number: int) -> Batch:
    """Text, and the wish for the loss of the routers."""
    return text(generator, number) | {"output_router_logits": True}


def classified(generator: torch.Generator, number: int) -> Batch:
    return text(generator, number) | {"labels": torch.randint(0, 3, (ROWS,), generator=generator)}


def right_padded(generator: torch.Generator, number: int) -> Batch:
    """Padding after the text, as encoders have it."""
    batch = classified(generator, number)
    mask = batch["attention_mask"].flip(1)
    return batch | {"attention_mask": mask, "input_ids": batch["input_ids"].masked_fill(mask == 0, 0)}


def pictures(generator: torch.Generator, number: int) -> Batch:
    return {
        "pixel_values": torch.randn(ROWS + number, 3, 8, 8, generator=generator),
        "labels": torch.randint(0, 3, (ROWS + number,), generator=generator),
    }


def sounds(generator: torch.Generator, number: int) -> Batch:
    labels = text(generator, number)["labels"]
    return {"input_features": torch.randn(ROWS, 8, 32, generator=generator), "labels": labels}


@dataclass(frozen=True)
class Family:
    """A class of transformers, a tiny configuration of it, and what is known of it."""

    kind: str
    """The heading of its table."""
    options: dict[str, Any] = field(default_factory=dict)
    """What its configuration has beyond ``sizes``."""
    sizes: dict[str, Any] = field(default_factory=lambda: SIZES)
    batch: Callable[[torch.Generator, int], Batch] = text
    blocks: Callable[[nn.Module], list[nn.Module]] | None = None
    named: str = ""
    """``blocks``, as a script writes it."""
    micro_batches: int = 2
    attention: str = ""
    """The implementation of attention, where it is not the usual one."""
    says: str = ""
    """What a user has to know."""
    quick: bool = False
    """True if it is tried in the quick tier, too."""


DENSE = "Dense"
EXPERTS = "Mixtures of experts, with the balancing loss of their routers (`output_router_logits`)"
LATENT_ATTENTION = "Latent attention"
HYBRID = "State spaces and linear attention"
SHARED = "Keys and values shared between layers"
IMAGES = "Images and text"
TWO = "Encoder and decoder"
ENCODERS = "Encoders"

TWO_SIDES = "one micro-batch, since both sides share a matrix"


def both(encoder: str, decoder: str) -> Callable[[nn.Module], list[nn.Module]]:
    return lambda model: [*model.get_submodule(encoder), *model.get_submodule(decoder)]


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(DENSE, {"attention_dropout": 0.1}, quick=True),
    "MistralForCausalLM": Family(DENSE, {"sliding_window": 4}),
    "Qwen2ForCausalLM": Family(DENSE, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "Qwen3ForCausalLM": Family(DENSE, HEADS),
    "GemmaForCausalLM": Family(DENSE, HEADS),
    "Gemma2ForCausalLM": Family(DENSE, HEADS | {"sliding_window": 4, "query_pre_attn_scalar": 8}),
    "Gemma3ForCausalLM": Family(DENSE, HEADS | {"sliding_window": 4, "layer_types": SLIDING}),
    "PhiForCausalLM": Family(DENSE, {"num_key_value_heads": 2}),
    "Phi3ForCausalLM": Family(DENSE),
    "GPT2LMHeadModel": Family(
        DENSE,
        {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32, "vocab_size": VOCABULARY, "use_cache": False,
         "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0}, {},
        says="with its dropout of 0.1",
    ),
    "GPTNeoXForCausalLM": Family(
        DENSE, {"hidden_dropout": 0.1}, {key: value for key, value in SIZES.items() if key != "num_key_value_heads"},
    ),
    "OPTForCausalLM": Family(
        DENSE,
        {"hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "word_embed_proj_dim": 16,
         "vocab_size": VOCABULARY, "max_position_embeddings": 32, "use_cache": False, "tie_word_embeddings": False,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}, {},
    ),
    "FalconForCausalLM": Family(
        DENSE,
        {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": VOCABULARY,
         "use_cache": False, "tie_word_embeddings": False, "max_position_embeddings": 32, "bos_token_id": 1,
         "eos_token_id": 2}, {},
    ),
    "BloomForCausalLM": Family(
        DENSE,
        {"hidden_size": 16, "n_layer": 3, "n_head": 2, "vocab_size": VOCABULARY, "use_cache": False,
         "tie_word_embeddings": False}, {},
    ),
    "Olmo2ForCausalLM": Family(DENSE),
    "SmolLM3ForCausalLM": Family(DENSE, {"no_rope_layers": [1, 0, 1]}),
    "GraniteForCausalLM": Family(DENSE, {"residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "Starcoder2ForCausalLM": Family(DENSE),
    "Cohere2ForCausalLM": Family(DENSE, {"sliding_window": 4, "layer_types": SLIDING}),
    "Glm4ForCausalLM": Family(DENSE, HEADS),

    "MixtralForCausalLM": Family(EXPERTS, ROUTED | {"num_local_experts": 4}, quick=True),
    "Qwen2MoeForCausalLM": Family(
        EXPERTS, ROUTED | {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    ),
    "Qwen3MoeForCausalLM": Family(EXPERTS, ROUTED | {"num_experts": 4, "moe_intermediate_size": 8}),
    "OlmoeForCausalLM": Family(EXPERTS, ROUTED | {"num_experts": 4}),
    "GptOssForCausalLM": Family(EXPERTS, ROUTED | HEADS | {"num_local_experts": 4, "sliding_window": 4}),
    "PhimoeForCausalLM": Family(EXPERTS, ROUTED | {"num_local_experts": 4}),
    "GraniteMoeForCausalLM": Family(EXPERTS, ROUTED | {"num_local_experts": 4}),
    "JambaForCausalLM": Family(
        EXPERTS,
        ROUTED | {"num_hidden_layers": 4, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
                  "mamba_d_state": 4, "mamba_dt_rank": 4},
        says="layers of two classes, attention and state spaces",
    ),
    "Qwen3NextForCausalLM": Family(
        EXPERTS,
        ROUTED | HEADS | {
            "num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
            "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
        says="linear and full attention by turns",
    ),

    "DeepseekV2ForCausalLM": Family(
        LATENT_ATTENTION, LATENT | {"topk_method": "group_limited_greedy"}, says="no balancing loss in transformers"
    ),
    "DeepseekV3ForCausalLM": Family(
        LATENT_ATTENTION, LATENT | {"num_experts_per_tok": 2},
        says="no balancing loss in transformers; the bias of its routers is a buffer and stays",
    ),

    "MambaForCausalLM": Family(
        HYBRID,
        {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 3, "vocab_size": VOCABULARY, "use_cache": False,
         "tie_word_embeddings": False, "time_step_rank": 4}, {},
    ),
    "Mamba2ForCausalLM": Family(
        HYBRID,
        {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 3, "vocab_size": VOCABULARY, "use_cache": False,
         "num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 4, "pad_token_id": 0}, {},
    ),
    "BambaForCausalLM": Family(
        HYBRID,
        {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 4},
    ),
    "FalconH1ForCausalLM": Family(
        HYBRID,
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 4,
         "head_dim": 8},
    ),
    "Zamba2ForCausalLM": Family(
        HYBRID,
        {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_d_state": 4,
         "n_mamba_heads": 4, "mamba_ngroups": 1, "chunk_size": 4, "num_key_value_heads": 2, "adapter_rank": 4,
         "tie_word_embeddings": True},
        micro_batches=1,
        says="layers of two classes; weights that hybrid ones share stay on the device; one micro-batch",
    ),
    "Lfm2ForCausalLM": Family(HYBRID, {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8}),

    "Gemma3nForCausalLM": Family(
        SHARED,
        HEADS | {
            "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 4, "layer_types": SLIDING[:2] * 2,
            "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 4, "altup_num_inputs": 2,
            "laurel_rank": 4, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        },
        quick=True,
    ),
    "Gemma4ForCausalLM": Family(
        SHARED,
        HEADS | {
            "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 4, "layer_types": SLIDING[:2] * 2,
            "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 4, "global_head_dim": 8,
        },
    ),

    "LlavaForConditionalGeneration": Family(
        IMAGES,
        {"text_config": {"model_type": "llama", **WIDE}, "vision_config": {"model_type": "clip_vision_model", **VISION},
         "image_token_index": IMAGE}, {}, batch=of_images,
    ),
    "PaliGemmaForConditionalGeneration": Family(
        IMAGES,
        {"text_config": {"model_type": "gemma", **WIDE, **HEADS},
         "vision_config": {"model_type": "siglip_vision_model", **VISION, "vision_use_head": False},
         "projection_dim": 16, "hidden_size": 16, "image_token_index": IMAGE, "tie_word_embeddings": False}, {},
        batch=with_types,
    ),
    "Qwen2VLForConditionalGeneration": Family(
        IMAGES,
        {"text_config": {**WIDE, "rope_parameters": MULTIMODAL_ROPE},
         "vision_config": {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4,
                           "mlp_ratio": 2},
         "image_token_id": IMAGE, "vision_start_token_id": 3, "tie_word_embeddings": False}, {},
        batch=in_patches,
    ),
    "Gemma3ForConditionalGeneration": Family(
        IMAGES,
        {"text_config": {**WIDE, **HEADS, "sliding_window": 4, "layer_types": SLIDING},
         "vision_config": {"model_type": "siglip_vision_model", **VISION, "vision_use_head": False},
         "mm_tokens_per_image": 4, "image_token_index": IMAGE, "boi_token_index": 3, "eoi_token_index": 3,
         "tie_word_embeddings": False}, {},
        batch=with_types,
    ),

    "Qwen3VLForConditionalGeneration": Family(
        IMAGES,
        {"text_config": {**WIDE, **HEADS, "rope_parameters": MULTIMODAL_ROPE},
         "vision_config": {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
                           "out_hidden_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
         "image_token_id": IMAGE, "vision_start_token_id": 3, "tie_word_embeddings": False}, {},
        batch=in_patches,
        says="features of the image are added between layers",
    ),

    "T5ForConditionalGeneration": Family(
        TWO,
        {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 2,
         "vocab_size": VOCABULARY, "dropout_rate": 0.0, "decoder_start_token_id": 0, "tie_word_embeddings": False,
         "use_cache": False}, {},
        attention="eager",
        blocks=both("encoder.block", "decoder.block"),
        named="[*model.encoder.block, *model.decoder.block]",
        micro_batches=1,
        says='with `attn_implementation="eager"`; ' + TWO_SIDES,
    ),
    "BartForConditionalGeneration": Family(
        TWO,
        {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
         "encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": VOCABULARY,
         "max_position_embeddings": 32, "use_cache": False, "tie_word_embeddings": False,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": 2}, {},
        blocks=both("model.encoder.layers", "model.decoder.layers"),
        named="[*model.model.encoder.layers, *model.model.decoder.layers]",
        micro_batches=1,
        says="with its dropout of 0.1; " + TWO_SIDES,
    ),
    "WhisperForConditionalGeneration": Family(
        TWO,
        {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
         "encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": VOCABULARY, "num_mel_bins": 8,
         "max_source_positions": 16, "max_target_positions": 32, "use_cache": False, "tie_word_embeddings": False,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3,
         "suppress_tokens": [], "begin_suppress_tokens": []}, {},
        batch=sounds,
        blocks=both("model.encoder.layers", "model.decoder.layers"),
        named="[*model.model.encoder.layers, *model.model.decoder.layers]",
    ),

    "SwitchTransformersForConditionalGeneration": Family(
        TWO,
        {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2,
         "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 4, "vocab_size": VOCABULARY,
         "dropout_rate": 0.0, "decoder_start_token_id": 0, "tie_word_embeddings": False, "use_cache": False}, {},
        attention="eager",
        batch=balanced,
        blocks=both("encoder.block", "decoder.block"),
        named="[*model.encoder.block, *model.decoder.block]",
        micro_batches=1,
        says='with `attn_implementation="eager"` and `output_router_logits=True` in each micro-batch; ' + TWO_SIDES,
    ),

    "BertForSequenceClassification": Family(
        ENCODERS, {"num_labels": 3}, batch=right_padded, says="with its dropout of 0.1"
    ),
    "RobertaForSequenceClassification": Family(
        ENCODERS, {"num_labels": 3, "max_position_embeddings": 40}, batch=right_padded, says="with its dropout of 0.1"
    ),
    "ModernBertForMaskedLM": Family(ENCODERS, {"local_attention": 4, "cls_token_id": 1, "sep_token_id": 2}),
    "ViTForImageClassification": Family(ENCODERS, VISION | {"num_labels": 3}, {}, batch=pictures, quick=True),
    "Dinov2ForImageClassification": Family(
        ENCODERS, VISION | {"num_labels": 3, "drop_path_rate": 0.1}, {}, batch=pictures
    ),
}  # fmt: skip


def build(name: str) -> nn.Module:
    """Return the model of a family, with the same values every time."""
    family, made = FAMILIES[name], getattr(transformers, name)
    torch.manual_seed(0)
    options = {**family.sizes, **family.options}
    chosen = {"attn_implementation": family.attention} if family.attention else {}
    model = made._from_config(made.config_class(**options), dtype=torch.float32, **chosen)
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.1, 0.1)
    return model.train()


def micro_batches(name: str, step: int) -> list[Batch]:
    """Return the micro-batches of a step."""
    family = FAMILIES[name]
    return [
        family.batch(torch.Generator().manual_seed(100 * step + number), number)
        for number in range(family.micro_batches)
    ]


ONE_BY_ONE = (
    "MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM", "GptOssForCausalLM",
    "PhimoeForCausalLM", "GraniteMoeForCausalLM", "JambaForCausalLM", "Qwen3NextForCausalLM", "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
)  # fmt: skip
"""Mixtures whose experts, frozen, are read one by one."""

DIFFUSION = {
    "PixArtTransformer2DModel": ("", ""),
    "SD3Transformer2DModel": ("", ""),
    "FluxTransformer2DModel": ("[*model.transformer_blocks, *model.single_transformer_blocks]", ""),
    "DiTTransformer2DModel": (
        "model.transformer_blocks[1:]",
        "the first block's embedding is used after the last block too; one micro-batch",
    ),
}
"""Classes of diffusers, tried by ``models/test_diffusion.py``: their blocks, and what a user has to know."""


def page() -> str:
    """Return the page as Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Families of models\n\nMade by `python tests/families.py`. Not edited by hand.\n"
    yield (
        f"Tests train each of these {len(FAMILIES)} classes of transformers {transformers.__version__} out of core,"
        " unmodified, with a tiny random configuration on a CPU in fp32: in memory, killed in the third step and"
        " resumed; on `meta` from its folder (`holdfast.pretrained(FOLDER)`); and written back by"
        " `holdfast convert RUN OUT --to huggingface`, from where its own class loads every tensor. Losses, parameters"
        " and optimizer state of three steps have the bits of a plain loop. Embedding and head have separate weights;"
        " [one that both share](fits.md#what-works-with-it) differs by the order of one sum. Not tried: these models on"
        " a GPU.\n"
    )
    yield (
        "`holdfast.offload` finds the blocks, unless a list for `blocks=` stands here. *One micro-batch*: with more,"
        " gradients of a shared weight are summed in another order.\n"
    )
    for kind in dict.fromkeys(family.kind for family in FAMILIES.values()):
        said = {name: (family.named, family.says) for name, family in FAMILIES.items() if family.kind == kind}
        yield from _section(kind, said)
    yield (
        "## Experts one by one\n\n"
        'With [`expert_slots`](fits.md#experts-one-by-one), frozen experts and `set_experts_implementation("eager")` '
        "these have the bits of a plain loop, too: " + ", ".join(f"`{name}`" for name in ONE_BY_ONE) + ".\n"
    )
    yield from _section("Diffusion transformers, of diffusers", DIFFUSION)
    yield (
        "Tried in a module of the script that computes the loss, in memory, killed and resumed: the bits are those of a"
        " plain loop; `save_pretrained` writes what `model.load_state_dict(engine.state_dict())` has loaded.\n"
    )
    yield (
        "## Refused in the first step\n\nLayers that are called several times (ALBERT), and a mapping that blocks"
        " share and from which one removes an entry. [Others](fits.md#what-works-with-it) before anything is written."
    )


def _section(kind: str, classes: dict[str, tuple[str, str]]) -> Iterator[str]:
    """Yield a heading, the classes without a remark in one line, and each of the others in a line of its own."""
    yield f"## {kind}\n"
    plain = [name for name, remarks in classes.items() if not any(remarks)]
    if plain:
        yield ", ".join(f"`{name}`" for name in plain) + "\n"
    others = {name: remarks for name, remarks in classes.items() if any(remarks)}
    for name, (blocks, says) in others.items():
        yield f"* `{name}`: " + "; ".join([f"`{blocks}`"] * bool(blocks) + [says] * bool(says))
    if others:
        yield ""


if __name__ == "__main__":
    print(page(), end="")
