"""The checks and names with which a model, or an adapter, becomes a folder of Hugging Face.

``from_pretrained`` fills a tensor that it does not find with random values and says so only in a log line. So the names
and shapes of a folder are compared, before a byte is written, with those of the model that its ``config.json``
describes; of an adapter, with its ``adapter_config.json``. The reference decoder is written as a Llama, which computes
the same. Called by ``holdfast convert --to huggingface``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import BadInput, RunMismatch
from ..formats.entry_matching import groups_of
from ..formats.naming import as_folder, by_model
from ..formats.readers.safetensors_files import header_of
from ..formats.source import Source
from .decoder import DecoderConfig
from .keeping import ADAPTER_CONFIG, ADAPTER_FILE
from .pretrained import empty_model

_ADDED = re.compile(
    r"(?P<layer>.+)\.(?P<what>lora_\w+)\.(?P<adapter>[^.]+?)(?P<end>\.weight|\.bias)?"
    r"|(?P<module>.+)\.modules_to_save\.(?P<of>[^.]+)\.(?P<rest>.+)"
)
"""The names of tensors that PEFT adds to a model."""
BIASES = ("none", "all", "lora_only")
"""The values of PEFT's ``bias`` for LoRA."""


def loadable(source: Source, folder: Path, *, renamed: bool, plain: bool = False) -> Source:
    """Return ``source`` under the names that ``folder`` has for the model that its ``config.json`` describes.

    The model is of the class that was saved, or else the causal language model of that configuration. ``renamed``
    means that rules gave the tensors these names already, ``plain`` that a quantised model was unpacked. Raises
    ``RunMismatch`` if ``from_pretrained`` would not find a tensor of the model, or would not use one that is written.
    """
    try:
        return _written_for(empty_model(folder, kind="saved", plain=plain), source, folder, renamed)
    except RunMismatch as first:
        with suppress(BadInput):
            return _written_for(empty_model(folder, plain=plain), source, folder, renamed)
        raise first from None


def _written_for(model: nn.Module, source: Source, folder: Path, renamed: bool) -> Source:
    written = source if renamed else as_folder(source, model)
    refuse_unloadable(written, model, str(folder))
    return written


def refuse_unloadable(written: Source, model: nn.Module, folder: str) -> None:
    """Raise ``RunMismatch`` naming the first tensor that ``model`` lacks, or does not know, or has in another shape."""
    here: dict[str, Any] = model.state_dict()
    loaded = by_model(written, model, here)
    found = {each.atom.name: each.atom.shape for each in loaded.atoms.values() if _is_weight(each.atom.slot)}
    tied = _tied(model)
    present = {tied.get(name, name) for name in found}
    passed_over = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    missing = [
        name for name in here if tied.get(name, name) not in present and not _matches(name, passed_over)
    ]
    unexpected = [name for name in found if name not in here]
    if missing or unexpected:
        said = [f"lacks {missing[0]} ({len(missing)} of {len(here)} tensors)"] if missing else []
        said += [f"has {unexpected[0]}, which that model has not ({len(unexpected)})"] if unexpected else []
        raise RunMismatch(
            f"{written.path} is not a {type(model).__name__} as {folder} describes it: it {' and '.join(said)}."
            f" from_pretrained would begin with random values there. {_way_out(written)}"
        )
    for name, shape in found.items():
        if tuple(here[name].shape) != shape:
            raise RunMismatch(
                f"{name} is {list(shape)} in {written.path}, and {list(here[name].shape)} in the model that {folder}"
                " describes. Give the folder of the model that was trained, as model.save_pretrained(FOLDER) writes it."
            )


def refuse_nameless(source: Source) -> None:
    """Raise ``BadInput``, because nothing names the transformers model that ``source`` is a state of."""
    raise BadInput(
        f"{source.path} does not say which model it is of, and a folder without its config.json loads as random"
        f" weights. {_way_out(source)}"
    )


def _way_out(source: Source) -> str:
    if any(_ADDED.fullmatch(each.atom.name) for each in source.atoms.values()):
        return (
            "It has adapters of PEFT: give the folder with their adapter_config.json by --model (as"
            " model.save_pretrained(FOLDER) writes it at any step of the script), which makes a folder of the adapter;"
            " or resume the run and save model.merge_and_unload()."
        )
    return (
        "Give the folder of the model that was trained by --model FOLDER (as model.save_pretrained(FOLDER) writes it at"
        " any step), or write --to torch or --to safetensors, which take any model."
    )


def _is_weight(slot: str) -> bool:
    return slot in ("param", "buffer")


def _tied(model: nn.Module) -> dict[str, str]:
    """Return the first name of each tensor that has a second name, by the second name."""
    first: dict[int, str] = {}
    tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (known := first.setdefault(id(parameter), name)) != name:
            tied[name] = known
    return {name: tied.get(other, other) for name, other in tied.items() if name != tied.get(other, other)}


def _matches(name: str, patterns: Any) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


@dataclass
class Adapter:
    """The tensors of one LoRA adapter in a source.

    ``names`` gives each tensor's name in PEFT's file by its key in the source.
    """

    config: dict[str, Any]
    names: dict[str, str] = field(default_factory=dict)


def adapter_in(source: Source, folder: Path) -> Adapter:
    """Return the adapter in ``source`` that the ``adapter_config.json`` in ``folder`` describes.

    Raises:
        BadInput: The kind is not LoRA, or the file is no such configuration.
        RunMismatch: The tensors are not those that the configuration describes, or others were trained besides.
    """
    config = lora_config_in(folder)
    added = {
        key: match
        for key, each in source.atoms.items()
        if _is_weight(each.atom.slot) and (match := _ADDED.fullmatch(each.atom.name))
    }
    adapters = sorted({match["adapter"] or match["of"] for match in added.values()})
    if len(adapters) != 1:
        raise RunMismatch(
            f"{source.path} has {'no adapter' if not adapters else 'the adapters ' + ', '.join(adapters)} of LoRA, and"
            f" one is what {folder} describes. Resume the run and write it with model.save_pretrained()."
        )
    if shared := [name for name in source.aliases if _ADDED.fullmatch(name)]:
        raise RunMismatch(
            f"{shared[0]} of {source.path} shares its memory with {source.aliases[shared[0]]} (ensure_weight_tying),"
            " and PEFT's file has both. Resume the run and write it with model.save_pretrained()."
        )
    names = {key: _name_in_file(match) for key, match in added.items()} | _trained_biases(
        source, folder, config, added
    )
    names |= _saved_beside(source, folder, names)
    found = Adapter(config, names)
    _refuse_other_layers(source, folder, config, added)
    _refuse_trained_beside(source, found)
    return found


def lora_config_in(folder: Path) -> dict[str, Any]:
    """Return the content of ``adapter_config.json`` in ``folder``.

    Raises ``BadInput`` unless it is of LoRA.
    """
    path = folder / ADAPTER_CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        kind, bias = config["peft_type"], config.get("bias", "none")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(f"{path} cannot be read as the configuration of an adapter: {error}") from error
    if kind != "LORA" or bias not in BIASES:
        raise BadInput(
            f"{path} is of {kind} with bias {bias!r}, and only LoRA with bias {', '.join(BIASES)} is written here."
            " Resume the run and write it with model.save_pretrained()."
        )
    return config


def _trained_biases(
    source: Source, folder: Path, config: Mapping[str, Any], added: Mapping[str, re.Match[str]]
) -> dict[str, str]:
    """Return the names of the biases that were trained beside the adapters, as ``config`` says, by their keys.

    PEFT's file has them under the names that they have in the adapted model. Raises ``RunMismatch`` if one was not
    trained.
    """
    bias = config.get("bias", "none")
    layers = {match["layer"] for match in added.values()}
    found = {
        key: each.atom.name
        for key, each in source.atoms.items()
        if each.atom.slot == "param" and each.atom.name.endswith(".bias")
        and key not in added and ".original_module." not in each.atom.name
        and (bias == "all" or (bias == "lora_only" and each.atom.name.removesuffix(".base_layer.bias") in layers))
    }  # fmt: skip
    trained = _trained(source)
    if lacking := [name for name in found.values() if trained and name not in trained]:
        raise RunMismatch(
            f"{source.path} and {folder} differ in bias: by {bias!r} {lacking[0]} is trained, and in the run it was"
            " not. Give the configuration of the adapter that was trained."
        )
    return found


def _saved_beside(source: Source, folder: Path, names: Mapping[str, str]) -> dict[str, str]:
    """Return the names of the model's own tensors that PEFT has saved in ``folder``, by their keys.

    These are embeddings of another size than the base has, or with adapters. Whoever loads the adapter needs them.
    """
    path = folder / ADAPTER_FILE
    if not path.is_file():
        return {}
    beside = {entry.key for entry in header_of(path).entries} - {*names.values()}
    return {
        key: each.atom.name
        for key, each in source.atoms.items()
        if each.atom.slot == "param" and key not in names and each.atom.name in beside
    }


def _trained(source: Source) -> set[str]:
    """Return the names of the parameters that the optimizers of a run update; none if it has no optimizer."""
    frozen = set(source.progress.get("replay", {}).get("frozen", ()))
    return {name for _, names in groups_of(source.progress) for name in names} - frozen


def _name_in_file(match: re.Match[str]) -> str:
    if match["module"]:
        return f"{match['module']}.{match['rest']}"
    end = "" if match["what"] == "lora_magnitude_vector" else match["end"] or ""
    return f"{match['layer']}.{match['what']}{end}"


def _refuse_other_layers(
    source: Source, folder: Path, config: dict[str, Any], added: Mapping[str, re.Match[str]]
) -> None:
    """Raise ``RunMismatch`` if a layer, a saved module or a rank differs from ``config``."""
    inside = {
        f"{match['module']}.{match['rest'].rpartition('.')[0]}" for match in added.values() if match["module"]
    }
    left_out = config.get("exclude_modules") or ()
    for option, group in (("target_modules", "layer"), ("modules_to_save", "module")):
        said, there = config.get(option), {match[group] for match in added.values() if match[group]}
        if isinstance(said, str):  # a pattern of names cannot be compared
            continue
        dot = "." if option == "target_modules" else ""  # "norm" saves also "input_layernorm"
        strange = [name for name in there if not _ends_with_one(name, said or (), dot)]
        lacking = [
            name
            for name in said or ()
            if name not in left_out and not any(_ends_with_one(each, [name], dot) for each in there | inside)
        ]
        if strange or lacking:
            raise RunMismatch(
                f"{source.path} and {folder} differ in {option}: {(strange or lacking)[0]} is in"
                f" {'the run' if strange else 'the folder'} alone. Give the configuration of the adapter that was"
                " trained."
            )
    if config.get("rank_pattern"):
        return
    for key, match in added.items():
        rank = source.atoms[key].atom.shape[:1]
        if match["what"] in ("lora_A", "lora_embedding_A") and rank != (config.get("r"),):
            raise RunMismatch(
                f"{source.atoms[key].atom.name} is of rank {rank[0]}, and {folder} says r = {config.get('r')}. Give the"
                " configuration of the adapter that was trained."
            )


def _ends_with_one(name: str, ends: Any, dot: str) -> bool:
    return any(name == end or name.endswith(f"{dot}{end}") for end in ends)


def _refuse_trained_beside(source: Source, adapter: Adapter) -> None:
    """Raise ``RunMismatch`` if an optimizer has a parameter that the folder of the adapter would not hold."""
    for name in sorted(_trained(source)):
        if f"{name}/param" not in adapter.names:
            raise RunMismatch(
                f"{name} of {source.path} was trained beside the adapter, and a folder of the adapter would lose it."
                " Resume the run and write it with model.save_pretrained() or merge_and_unload()."
            )


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
