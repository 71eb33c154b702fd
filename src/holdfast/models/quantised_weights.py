"""Folders of bitsandbytes or in fp8: their models get quantised layers on ``meta``, without the weights.

transformers puts these layers into a model. Shapes and dtypes are in the headers of the folder's files. Values are read
only of the quant state of each 4-bit layer (block sizes, dtypes and shape, as JSON). Called by ``pretrained``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import BadInput, Damaged, ModelNotSupported
from ..formats.naming import names_by_model
from ..formats.readers.safetensors_files import SafetensorsFiles
from ..formats.restore import read_tensors
from ..libraries import library
from ..offload.model.quantised_layers import (
    FP8_LIBRARY,
    QUANT_STATE,
    SCALES,
    is_quantised,
    missing_tensors,
    open_on_meta,
)
from ..state.layout.regions import Region
from ..state.plain_tensors import FROM_NAME

LIBRARY, FP8 = "bitsandbytes", "fp8"
_UNPACKING = (
    r"weight\.(?:nested_)?(?:absmax|quant_map)|weight\.quant_state\..+|SCB|weight_format|weight_scale_inv"
)
_UNPACKING_TENSOR = re.compile(rf".+\.(?:{_UNPACKING})")
_LAYER_TENSOR = re.compile(rf"(?P<layer>.+?)\.(?P<tensor>weight|{_UNPACKING})")


def unpacks_weight(name: str) -> bool:
    """Return whether the tensor ``name`` of a folder has the scales, values or quant state that unpack a weight.

    >>> unpacks_weight("layers.0.up.weight.absmax"), unpacks_weight("layers.0.up.weight")
    (True, False)
    """
    return _UNPACKING_TENSOR.fullmatch(name) is not None


def refuse_unknown(path: Path, config: Any) -> None:
    """Raise unless adapters can train on the folder ``path``, whose ``quantization_config`` is ``config``.

    Raises ``ModelNotSupported`` for another kind, and ``BadInput`` if the library is not installed.
    """
    told = config if isinstance(config, dict) else {"quant_method": config}
    kind = told.get("quant_method")
    if kind == FP8:
        _refuse_other_fp8(path, told)
        return
    if kind not in (None, LIBRARY) or not (told.get("load_in_4bit") or told.get("load_in_8bit")):
        raise ModelNotSupported(
            f"{path} holds weights that were quantised by {kind or 'something unknown'}, and adapters train on those of"
            f" {LIBRARY} in 4 or 8 bits, or in {FP8}. Give such a folder, or the one that these were made from."
        )
    library(LIBRARY, f"{path} with its quantised weights", f"pip install {LIBRARY}")


def _refuse_other_fp8(path: Path, told: dict[str, Any]) -> None:
    scheme, form = told.get("activation_scheme", "dynamic"), told.get("fmt") or "e4m3"
    tile = told.get("weight_block_size")
    if scheme != "dynamic" or form != "e4m3":
        raise ModelNotSupported(
            f"{path} holds fp8 weights of the kind {form} whose layers scale their inputs in the {scheme} way, and"
            " adapters train on those of e4m3 with dynamic scales. Give the folder that these were made from."
        )
    if tile is not None and not (
        isinstance(tile, list) and len(tile) == 2 and all(isinstance(n, int) and n > 0 for n in tile)
    ):
        raise BadInput(f"{path}: weight_block_size must be two sizes of at least 1, not {tile!r}")


def insert_quantised_layers(model: Any, path: Path) -> None:
    """Put the quantised layers of the folder ``path`` into ``model``, which is on ``meta``, and open them.

    Raises ``Damaged`` if the folder lacks a tensor of a layer, or has a quant state or scales that cannot be read, and
    ``ModelNotSupported`` for quantised layers of another kind, such as experts.
    """
    from transformers.quantizers.auto import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(model.config.quantization_config, pre_quantized=True)
    quantizer.preprocess_model(model=model, device_map=None)
    quantizer.postprocess_model(model)
    layers = {name: module for name, module in model.named_modules() if is_quantised(module)}
    other = [
        f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if type(module).__module__ == FP8_LIBRARY and name not in layers
    ]
    if other:
        raise ModelNotSupported(
            f"{path} has fp8 weights in {other[0]}, and adapters train on linear layers alone. Give the folder that it"
            " was made from."
        )
    found = _tensors_of(layers, model, SafetensorsFiles(path))
    for name, layer in layers.items():
        tensors = found.get(name, {})
        try:
            if lacking := missing_tensors(layer, tensors):
                raise Damaged(f"{path} lacks {name}.{lacking[0]}, which unpacks the layer", path=str(path))
            open_on_meta(layer, tensors)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Damaged(
                f"{path} has {'scales' if SCALES in tensors else 'a quant state'} of {name} that cannot be read:"
                f" {error!r}",
                path=str(path),
            ) from error


def _tensors_of(
    layers: dict[str, nn.Module], model: nn.Module, source: SafetensorsFiles
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors of each of ``layers`` in ``source``, by name: quant states with values, others on ``meta``."""
    matches = [_LAYER_TENSOR.fullmatch(stored.atom.name) for stored in source.atoms.values()]
    ends = {match["tensor"] for match in matches if match}
    here = dict.fromkeys(f"{layer}.{end}" for layer in layers for end in ends)
    names = names_by_model(source, model, here)
    found: dict[str, dict[str, torch.Tensor]] = {}
    for stored in source.atoms.values():
        match = _LAYER_TENSOR.fullmatch(names.get(stored.atom.name, ""))
        if match is None or match["layer"] not in layers:
            continue
        if match["tensor"].startswith(QUANT_STATE):
            (tensor,) = read_tensors(source, [(stored, Region.whole(stored.atom.shape))])
        else:
            tensor = torch.empty(stored.atom.shape, dtype=FROM_NAME[stored.atom.dtype], device="meta")
        found.setdefault(match["layer"], {})[match["tensor"]] = tensor
    return found
