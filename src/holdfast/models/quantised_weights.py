"""The weights of folders that bitsandbytes has quantised, as the quantised layers of their models.

transformers puts these layers into a model. Their shapes are known from the headers of the folder's files, so nothing
but a few numbers of each layer is read for this.
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
from ..offload.model.quantised_layers import NUMBERS, expect, is_quantised, missing
from ..state.layout.regions import Region
from ..state.plain_tensors import FROM_NAME
from .naming import names_by_model

LIBRARY = "bitsandbytes"
_TENSOR = re.compile(r"(?P<layer>.+?)\.(?P<tensor>weight|weight\..+|SCB|weight_format)")
_PACKED = re.compile(r".+\.(weight\..+|SCB|weight_format)")


def is_packed(name: str) -> bool:
    """Return whether the tensor ``name`` of a folder unpacks a weight.

    >>> is_packed("layers.0.up.weight.absmax"), is_packed("layers.0.up.weight")
    (True, False)
    """
    return _PACKED.fullmatch(name) is not None


def refuse_unknown(path: Path, told: Any) -> None:
    """Raise unless ``told``, the ``quantization_config`` of a folder, is of a kind that can be trained on.

    Raises ``ModelNotSupported`` for another kind, and ``BadInput`` if the library is not installed.
    """
    kind = told.get("quant_method") if isinstance(told, dict) else told
    in_bits = isinstance(told, dict) and (told.get("load_in_4bit") or told.get("load_in_8bit"))
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


def pack(model: Any, path: Path) -> None:
    """Replace the layers of ``model`` on ``meta`` that are quantised in the folder ``path``, and open them.

    Raises ``Damaged`` if the folder lacks a tensor of one of them.
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
            if lacking := missing(layer, tensors):
                raise Damaged(f"{path} lacks {name}.{lacking[0]}, which unpacks the layer", path=str(path))
            expect(layer, tensors)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Damaged(
                f"{path} has numbers of {name} that cannot be read: {error!r}", path=str(path)
            ) from error


def _tensors_of(
    layers: dict[str, nn.Module], model: nn.Module, source: SafetensorsFiles
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors of each of ``layers`` in the folder, by name: the numbers with values, others on ``meta``."""
    matches = {
        atom.name: _TENSOR.fullmatch(atom.name) for atom in (each.atom for each in source.atoms.values())
    }
    ends = {match["tensor"] for match in matches.values() if match}
    here = dict.fromkeys(f"{layer}.{end}" for layer in layers for end in ends)
    names = names_by_model(source, model, here)
    found: dict[str, dict[str, torch.Tensor]] = {}
    for stored in source.atoms.values():
        match = _TENSOR.fullmatch(names.get(stored.atom.name, ""))
        if match is None or match["layer"] not in layers:
            continue
        if match["tensor"].startswith(NUMBERS):
            (tensor,) = read_tensors(source, [(stored, Region.whole(stored.atom.shape))])
        else:
            tensor = torch.empty(stored.atom.shape, dtype=FROM_NAME[stored.atom.dtype], device="meta")
        found.setdefault(match["layer"], {})[match["tensor"]] = tensor
    return found
