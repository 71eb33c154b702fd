"""LoRA adapters on the model of a folder, made by PEFT's own ``get_peft_model`` as the section ``[lora]`` says.

The model is on ``meta``, so PEFT makes its adapters there, and the engine has PEFT draw their first values. DoRA begins
with magnitudes that are made of the layers' weights; these are read here, one layer at a time. What does not fit the
model is refused before anything is written. Called by the recipe of ``holdfast train``.
"""

from __future__ import annotations

import json
import warnings
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import nn

from ..config import AdapterConfig, literal
from ..errors import BadInput, ConfigError
from ..libraries import library
from ..offload.exit_hook import deferred
from ..offload.model.peft_adapters import lora_layers
from ..offload.model.quantised_layers import weight_from, weight_parts
from ..quantities import first_line, shown
from ..state.capture import AS_STORED
from .keeping import ADAPTER_CONFIG, CONFIG
from .pretrained import Weights

NAME = "default"
"""The name that PEFT gives the only adapter of a model."""
ALL_LINEAR = "all-linear"


def peft_for(what: str) -> Any:
    """Return the PEFT library. Raises ``BadInput`` if it is not installed."""
    with deferred():
        return library("peft", what, "pip install 'holdfast[adapters]'")


def refuse_adapter_folder(folder: Path) -> None:
    """Raise ``BadInput`` if ``folder`` holds adapters, which would be ignored beside a model."""
    if (folder / ADAPTER_CONFIG).is_file():
        whole = "has adapters beside its model" if (folder / CONFIG).is_file() else "holds adapters alone"
        raise BadInput(
            f"{folder} {whole} ({ADAPTER_CONFIG}), and adapters on adapters are not trained. Merge them first"
            " (model.merge_and_unload() of PEFT, then save_pretrained), or give the folder of the model without them."
        )


def with_adapters(model: nn.Module, how: AdapterConfig, folder: Path, *, packs: bool = False) -> Any:
    """Return ``model`` with the adapters that ``how`` describes. It is changed in place, and its own weights frozen.

    Args:
        model: The causal language model of ``folder``, on ``meta``.
        how: The section ``[lora]``.
        folder: The folder of the model, for messages.
        packs: Whether the weights of linear layers but the head will be packed.

    Raises:
        ConfigError: A target is no layer of the model, or of a kind that PEFT does not adapt.
        BadInput: PEFT is not installed.
    """
    peft = peft_for(f"lora.rank = {how.rank}")
    all_linear = how.targets == (ALL_LINEAR,)
    if not all_linear:
        _refuse_unmatched(model, "targets", how.targets, folder)
    _refuse_unmatched(model, "modules_to_save", how.modules_to_save, folder)
    _refuse_packed(model, how, folder, packs)
    assert how.rank != "none"
    alpha = 2 * how.rank if how.alpha == "auto" else how.alpha
    config = peft.LoraConfig(
        r=how.rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
        lora_dropout=how.dropout,
        target_modules=ALL_LINEAR if all_linear else list(how.targets),
        rank_pattern=how.ranks,
        alpha_pattern={end: 2 * rank for end, rank in how.ranks.items()} if how.alpha == "auto" else {},
        use_dora=how.dora,
        use_rslora=how.rslora,
        modules_to_save=list(how.modules_to_save) or None,
        bias=how.bias,
        task_type="CAUSAL_LM",
    )
    try:
        made = adapted(model, config, NAME)
    except (ValueError, TypeError, NotImplementedError) as error:
        saved = f", lora.modules_to_save = {literal(how.modules_to_save)}" if how.modules_to_save else ""
        raise ConfigError(
            f"lora.targets = {literal(how.targets)}{saved}: PEFT makes no such adapters on the model in {folder}:"
            f" {first_line(error)}"
        ) from error
    wrapped = [name for name, layer in lora_layers(made) if type(layer).__name__ == "ParamWrapper"]
    if wrapped:
        raise ConfigError(
            f"lora.targets = {literal(how.targets)}: on the model in {folder} PEFT would adapt the fused weights of"
            f" {wrapped[0]}, by changing them as the model runs, which is not done out of core. Name linear layers,"
            " such as --set lora.targets=[q_proj,v_proj]."
        )
    layers = [name for name, _ in lora_layers(made)]
    for end in how.ranks:
        if not any(name.endswith(f".{end}") for name in layers):
            raise ConfigError(
                f"lora.rank_pattern: no adapted layer of the model in {folder} is called {literal(end)}. Those that"
                f" lora.targets = {literal(how.targets)} adapts are {shown(_ends(layers), 12)}."
            )
    return made


def _ends(names: list[str]) -> list[str]:
    return [*dict.fromkeys(name.rpartition(".")[2] for name in names)]


def adapted(model: nn.Module, config: Any, name: str) -> Any:
    """Return ``model`` as PEFT adapts it, in place, with the adapter ``name`` of PEFT's configuration ``config``."""
    with warnings.catch_warnings():  # what PEFT corrects by itself, and what it uses of transformers
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing. is deprecated")
        warnings.filterwarnings("ignore", message=".*fan_in_fan_out is set")
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys")
        return peft_for("lora.rank").get_peft_model(model, config, adapter_name=name)


def set_magnitudes(model: nn.Module, weights: Weights) -> None:
    """Set DoRA's first magnitudes: the norms of the weights that ``weights`` has, of one layer after the other.

    Raises ``ConfigError`` for an adapted embedding, whose magnitudes are others.
    """
    layers = lora_layers(model)
    for name, layer in layers:
        if type(layer.lora_magnitude_vector[NAME]).__name__ != "DoraLinearLayer":
            raise ConfigError(
                f"lora.dora = true: {name} is no linear layer. Leave it out of lora.targets, or set lora.dora = false."
            )
    values = weights.read(part for _, layer in layers for part in weight_parts(layer.get_base_layer()))
    for _, layer in layers:
        base = layer.get_base_layer()
        weight = weight_from(base, [next(values) for _ in weight_parts(base)])
        magnitude = layer.lora_magnitude_vector[NAME]
        norms = magnitude.get_weight_norm(weight, weight.new_zeros(()), 1)  # an adapter begins with zero
        magnitude.weight = nn.Parameter(norms)


def adapter_config(model: Any, folder: Path) -> bytes:
    """Return the ``adapter_config.json`` of an adapted model, with ``folder`` as the place of its base."""
    told = model.peft_config[NAME].to_dict()
    told |= {"base_model_name_or_path": str(folder.absolute()), "inference_mode": True}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in told.items()}
    return json.dumps(plain, indent=2, sort_keys=True).encode() + b"\n"


def _refuse_unmatched(model: nn.Module, key: str, targets: tuple[str, ...], folder: Path) -> None:
    """Raise ``ConfigError`` naming a target that no layer of ``model`` is called by; PEFT would pass it over."""
    modules = dict(model.named_modules())
    for target in targets:
        if any(name == target or name.endswith(f".{target}") for name in modules):
            continue
        kind = "linear layers" if key == "targets" else "modules"
        layers = [n for n, m in modules.items() if _is_linear(m) or (kind == "modules" and m._parameters)]
        ends = _ends(layers)
        near = get_close_matches(target, ends, n=1)
        hint = f"; did you mean {literal(near[0])}?" if near else "."
        raise ConfigError(
            f"lora.{key}: no layer of the model in {folder} is called {literal(target)}{hint} Its {kind} are"
            f" {shown(ends, 12)}."
        )


def _refuse_packed(model: Any, how: AdapterConfig, folder: Path, packs: bool) -> None:
    """Raise ``ConfigError`` for a module to save whose weights are packed, or will be: they have no gradient."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if not name.endswith(
            how.modules_to_save
        ):  # PEFT compares the texts, so "norm" is also "input_layernorm"
            continue
        linear = any(_is_linear(each) and each is not head for each in module.modules())
        if (packs and linear) or any(hasattr(each, AS_STORED) for each in module.parameters()):
            raise ConfigError(
                f"lora.modules_to_save = {literal(how.modules_to_save)}: the weights of {name} in {folder} are"
                " quantised, and packed values are not trained. Leave it out, or name it in lora.targets."
            )


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
