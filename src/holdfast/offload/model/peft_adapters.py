"""Initial values of what PEFT adds to a model: LoRA adapters, and copies of modules that are trained whole.

PEFT creates both on ``meta`` if the layer that they belong to is on ``meta``.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ...errors import ModelNotSupported
from ...state.capture import Captured

DRAWN = (True, False, "gaussian")
"""Initialisations of LoRA that need no values of the layer."""


def lora_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the layers of ``model`` that LoRA adapts, with their names."""
    named: list[tuple[str, Any]] = list(model.named_modules())
    return [(name, m) for name, m in named if callable(getattr(m, "reset_lora_parameters", None))]


def layers_of(model: nn.Module) -> dict[int, nn.Module]:
    """Return the adapted layer of each module that belongs to an adapter, by the module's ``id``."""
    found: dict[int, nn.Module] = {}
    for _, layer in lora_layers(model):
        base = {id(module) for module in layer.get_base_layer().modules()} | {id(layer)}
        found |= {id(module): layer for module in layer.modules() if id(module) not in base}
    return found


def initialise(model: nn.Module, layers: Iterable[Any]) -> None:
    """Let PEFT initialise the adapters of ``layers``.

    DoRA's magnitudes stay as they are, if they have values. Raises ``ModelNotSupported`` for adapters whose initial
    values are computed from the values of their layers.
    """
    configs: list[Any] = [getattr(module, "peft_config", None) for module in model.modules()]
    told: dict[str, Any] = next((each for each in configs if isinstance(each, dict)), {})
    for layer in layers:
        for name in layer.r:
            _refuse_other_kinds(name, told.get(name))
            how = told[name].init_lora_weights if name in told else True
            if how not in DRAWN or (name in layer.lora_variant and not _has_magnitudes(layer, name)):
                raise ModelNotSupported(
                    f"adapter {name!r} begins with values that are made of the layer's own (init_lora_weights ="
                    f" {how!r}, or a variant such as DoRA), and those are on meta. Use LoRA with init_lora_weights="
                    "True, or a model in memory."
                )
            layer.reset_lora_parameters(name, how)


def _has_magnitudes(layer: Any, name: str) -> bool:
    """Return whether the adapter is DoRA's and its magnitudes have values, which the script has set."""
    magnitudes = getattr(layer, "lora_magnitude_vector", {})
    if name not in magnitudes:
        return False
    weight = magnitudes[name].weight
    return not weight.is_meta and not bool(torch.isnan(weight).any())  # a parameter on meta is drawn over NaN


def _refuse_other_kinds(name: str, config: Any) -> None:
    """Raise ``ModelNotSupported`` for adapters such as AdaLoRA, which are built like LoRA but initialised
    differently."""
    kind = getattr(config, "peft_type", "LORA")
    if kind != "LORA":
        raise ModelNotSupported(
            f"adapter {name!r} is of the kind {getattr(kind, 'value', kind)}, and it is on meta: only LoRA's values are"
            " made here. Use LoRA, or a model in memory."
        )


_COPIED = re.compile(r"(?P<module>.+)\.modules_to_save\.[^.]+\.(?P<rest>.+)")


def copied_modules(captured: Captured) -> dict[str, tuple[str, ...]]:
    """Return the names of the original of each parameter and buffer that PEFT's ``modules_to_save`` has copied."""
    known = {name: each.names for each in captured.parameters for name in each.names}
    known |= {name: (name,) for name in captured.buffers}
    found: dict[str, tuple[str, ...]] = {}
    for name, names in known.items():
        match = _COPIED.fullmatch(name)
        original = known.get(f"{match['module']}.original_module.{match['rest']}") if match else None
        if original is not None:
            found[names[0]] = original
    return found


def saved_with_adapters(model: nn.Module, captured: Captured) -> set[str]:
    """Return the names of the parameters and buffers that PEFT saves of ``model``; none if it has no adapters.

    Some of them are frozen: adapters that are not active, and embeddings whose number of tokens the script has changed.
    PEFT chooses from empty tensors here.
    """
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict):
        return set()
    from peft import get_peft_model_state_dict

    empty = {name: torch.empty(p.shape, device="meta") for p in captured.parameters for name in p.names}
    empty |= {name: torch.empty(0, device="meta") for name in captured.buffers}
    named = {id(value): name for name, value in empty.items()}
    found: set[str] = set()
    with warnings.catch_warnings(action="ignore"):  # they come again when PEFT saves
        for adapter, config in configs.items():
            if not config.is_prompt_learning:  # its values are trained, and computed for each file
                chosen = get_peft_model_state_dict(model, empty, adapter_name=adapter).values()
                found |= {named[id(value)] for value in chosen if id(value) in named}
    return found
