"""Tiny folders as Hugging Face keeps models: random weights, and a tokenizer that was trained here."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXT = (
    "The frigate lay at anchor in the bay, and nobody on board knew what the night would bring.\n"
    "Three lanterns hung from the mast; the captain counted them twice and wrote the number down.\n"
    "In the morning the wind had turned, and the lanterns were two.\n"
)
VOCABULARY = 320
SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "bos_token_id": 256,
    "eos_token_id": 257, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2}


def llama(**options):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | options))


def llama_tied():
    return llama(tie_word_embeddings=True)


def mistral():
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=8))


def qwen3():
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=8))


def mixtral():
    """Of twelve experts, so that their numbers have one and two digits."""
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, **EXPERTS, num_local_experts=12)
    )


def qwen2_moe():
    sizes = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "num_experts": 4}
    return transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**SIZES, **EXPERTS, **sizes))


def gpt2():
    sizes = {"n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=256, eos_token_id=257))


def gpt_neox():
    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes))


EVERY = {
    each.__name__: each for each in (llama, llama_tied, mistral, qwen3, mixtral, qwen2_moe, gpt2, gpt_neox)
}


@cache
def tokenizer(first: str) -> transformers.PreTrainedTokenizerFast:
    """Bytes, the marks <s> and </s>, and merges; ``first`` is put before any text, and </s> ends one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 2, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    own.train_from_iterator([TEXT], trainer)
    own.add_special_tokens(["<s>", "</s>"])
    own.post_processor = processors.TemplateProcessing(
        single=f"{first} $A", pair=f"{first} $A $B", special_tokens=[(first, own.token_to_id(first))]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=own, bos_token=first, eos_token="</s>")


def write_tokenizer(folder: Path, first: str = "<s>") -> None:
    tokenizer(first).save_pretrained(folder)


def write_folder(folder: Path, make=llama, dtype=torch.bfloat16, **options) -> Path:
    """A folder of the model that ``make`` makes; ``options`` are those of ``save_pretrained``."""
    torch.manual_seed(0)
    make().to(dtype).save_pretrained(folder, **options)
    write_tokenizer(folder)
    (folder / "LICENSE").write_text("As you like.\n")
    return folder


QUANTISED = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}
"""Ways of bitsandbytes to quantise."""


def write_quantised(folder: Path, kind: str, make=llama) -> Path:
    """A folder as the library publishes it, of a model that ``make`` makes; of the kinds "fp8" and "torchao" too."""
    plain = write_folder(folder / "plain", make)
    if kind in ("fp8", "torchao"):
        return (as_fp8 if kind == "fp8" else as_int8)(plain, folder / kind)
    config = transformers.BitsAndBytesConfig(**QUANTISED[kind])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=config, dtype=torch.bfloat16, device_map="cpu"
    )
    model.save_pretrained(folder / kind)
    return folder / kind


def as_fp8(
    plain: Path,
    folder: Path,
    tile: tuple[int, int] | None = (8, 8),
    scales: torch.dtype = torch.float32,
    **told,
) -> Path:
    """A copy of a folder whose linear layers, without the head, are in fp8 with a scale for each tile."""
    shutil.copytree(plain, folder)
    config = json.loads((folder / "config.json").read_text())
    quantised = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": tile,
    }
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantised | told}))
    tensors = load_file(plain / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("_proj.weight", "_with_mqa.weight"))]:
        tensors[name], tensors[f"{name}_scale_inv"] = in_fp8(tensors[name], tile, scales)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def in_fp8(
    weight: torch.Tensor, tile: tuple[int, int] | None, scales: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in fp8, and the scale of each tile of it; tiles at the edges are smaller."""
    down, across = tile or weight.shape
    rows, columns = -(-weight.shape[0] // down), -(-weight.shape[1] // across)
    whole = torch.zeros(rows * down, columns * across)
    whole[: weight.shape[0], : weight.shape[1]] = weight
    tiles = whole.view(rows, down, columns, across)
    grid = (tiles.abs().amax((1, 3)) / 448).to(scales)
    packed = (tiles / grid.float()[:, None, :, None]).clamp(-448, 448).view(whole.shape)
    packed = packed[: weight.shape[0], : weight.shape[1]].to(torch.float8_e4m3fn).contiguous()
    return packed, grid if tile else grid.reshape(())


def from_fp8(packed: torch.Tensor, grid: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """The matrix that ``in_fp8`` packed, in fp32, element by element."""
    rows, columns = (torch.arange(size) // each for size, each in zip(packed.shape, tile))
    return packed.float() * grid.float()[rows[:, None], columns]


def as_int8(plain: Path, folder: Path, group: int | None = None) -> Path:
    """A copy of a folder whose linear layers, without the head, torchao has quantised: by rows, or groups of them."""
    shutil.copytree(plain, folder)
    config = json.loads((folder / "config.json").read_text())
    kind = {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {"group_size": group}}
    told = {"quant_method": "torchao", "quant_type": {"default": kind}, "modules_to_not_convert": None}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": told}))
    tensors = load_file(plain / "model.safetensors")
    metadata = dict.fromkeys(tensors, json.dumps({"_type": "Tensor"})) | {"format": "pt"}
    metadata["tensor_names"] = json.dumps([*tensors])
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors.pop(name)
        values, scale = in_int8(weight, group or weight.shape[1])
        before = f"{name.removesuffix('weight')}_weight_"
        zeros = torch.zeros(scale.shape, dtype=torch.int8)
        tensors |= {f"{before}qdata": values, f"{before}scale": scale, f"{before}zero_point": zeros}
        data = {
            "act_quant_kwargs": None, "reduce_range": False, "block_size": [1, group or weight.shape[1]],
            "dtype": {"_type": "torch.dtype", "_data": "bfloat16"},
        }  # fmt: skip
        parts = ["zero_point", "qdata", "scale"]
        metadata[name] = json.dumps({"_type": "Int8Tensor", "_data": data, "_tensor_data_names": parts})
    save_file(tensors, folder / "model.safetensors", metadata)
    return folder


def in_int8(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in int8, and the scale of each group of columns of each row."""
    grouped = weight.float().unflatten(1, (-1, group))
    scale = (grouped.abs().amax(2) / 127.5).clamp(min=1e-12)
    values = (grouped / scale[:, :, None]).round().clamp(-128, 127).flatten(1)
    return values.to(torch.int8), scale


def from_int8(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The matrix that ``in_int8`` packed, in fp32, element by element."""
    groups = torch.arange(values.shape[1]) // (values.shape[1] // scale.shape[1])
    return values.float() * scale.float()[:, groups]


def write_pairs(path: Path, count: int = 40) -> Path:
    lines = [
        {"prompt": f"{number} and {number} is", "completion": f" {2 * number}."} for number in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
