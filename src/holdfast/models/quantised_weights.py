"""Model folders that bitsandbytes has quantised: their models get quantised layers on ``meta``, without the weights.

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
from ..formats.readers.safetensors_files import SafetensorsFiles
from ..formats.restore import read_tensors
from ..offload.model.quantised_layers import QUANT_STATE, is_quantised, missing_tensors, open_on_meta
from ..state.layout.regions import Region
from ..state.plain_tensors import FROM_NAME
from .naming import names_by_model

LIBRARY = "bitsandbytes"
_UNPACKING = r"weight\.(?:nested_)?(?:absmax|quant_map)|weight\.quant_state\..+|SCB|weight_format"
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
    kind = config.get("quant_method") if isinstance(config, dict) else config
    in_bits = isinstance(config, dict) and (config.get("load_in_4bit") or config.get("load_in_8bit"))
    if kind not in (None, LIBRARY) or not in_bits:
        raise ModelNotSupported(
            f"{path} holds weights that were quantised by {kind or 'something unknown'}, and adapters train on those of"
            f" {LIBRARY} in 4 or 8 bits. Give such a folder, or the one that these were made from."
        )
    try:
        __import__(LIBRARY)
    except ImportError as error:
        raise BadInput(
            f"{path} holds weights that were quantised by {LIBRARY}, which cannot be imported ({error}):"
            f" pip install {LIBRARY}"
        ) from error


def insert_quantised_layers(model: Any, path: Path) -> None:
    """Put the quantised layers of the folder ``path`` into ``model``, which is on ``meta``, and open them.

    Raises ``Damaged`` if the folder lacks a tensor of a layer, or has a quant state that cannot be read.
    """
    from transformers.quantizers.auto import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(model.config.quantization_config, pre_quantized=True)
    quantizer.preprocess_model(model=model, device_map=None)
    quantizer.postprocess_model(model)
    layers = {name: module for name, module in model.named_modules() if is_quantised(module)}
    found = _tensors_of(layers, model, SafetensorsFiles(path))
    for name, layer in layers.items():
        tensors = found.get(name, {})
        try:
            if lacking := missing_tensors(layer, tensors):
                raise Damaged(f"{path} lacks {name}.{lacking[0]}, which unpacks the layer", path=str(path))
            open_on_meta(layer, tensors)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Damaged(
                f"{path} has a quant state of {name} that cannot be read: {error!r}", path=str(path)
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
