"""Folders of bitsandbytes, of torchao in int8 or in fp8: their models get quantised layers, without the weights.

transformers puts these layers into a model; those of torchao, for which it has no class, are put there here. All are on
``meta``. Shapes and dtypes are in the headers of the folder's files. Values are read only of the quant state of each
4-bit layer (block sizes, dtypes and shape, as JSON) and of torchao's zero points. Called by ``pretrained``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import BadInput, Damaged, ModelNotSupported
from ..formats.naming import by_model, names_by_model
from ..formats.readers.safetensors_files import INDEX, SINGLE, SafetensorsFiles, files_of, header_of
from ..formats.restore import read_tensors
from ..libraries import library
from ..offload.model.fp8_experts import is_fp8_experts, open_experts
from ..offload.model.int8_layers import VALUES, ZERO_POINT, open_int8
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
    r"|_weight_(?:scale|zero_point)"
)
_UNPACKING_TENSOR = re.compile(rf".+\.(?:{_UNPACKING})")
LAYER_TENSOR = re.compile(rf"(?P<layer>.+?)\.(?P<tensor>weight|{VALUES}|{_UNPACKING})")
"""The name of a tensor of a layer's weight: the layer, and the tensor's name in it."""


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
    if kind == TORCHAO:
        refuse_other_weights(path)
        return
    if kind not in (None, LIBRARY) or not (told.get("load_in_4bit") or told.get("load_in_8bit")):
        raise ModelNotSupported(
            f"{path} holds weights that were quantised by {kind or 'something unknown'}, and adapters train on those of"
            f" {LIBRARY} in 4 or 8 bits, of {TORCHAO} in int8, or in {FP8}. Give such a folder, or the one that these"
            " were made from."
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
    ``ModelNotSupported`` for quantised layers of another kind.
    """
    told: Any = model.config.quantization_config
    if isinstance(told, dict) and told.get("quant_method") == TORCHAO:
        _insert_int8_layers(model, path)
        return
    from transformers.quantizers.auto import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(told, pre_quantized=True)
    quantizer.preprocess_model(model=model, device_map=None)
    quantizer.postprocess_model(model)
    layers = {name: module for name, module in model.named_modules() if is_quantised(module)}
    experts = {name: module for name, module in model.named_modules() if is_fp8_experts(module)}
    other = [
        f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if type(module).__module__ == FP8_LIBRARY and name not in layers and name not in experts
    ]
    if other:
        raise ModelNotSupported(
            f"{path} has fp8 weights in {other[0]}, and adapters train beside linear layers and experts alone. Give the"
            " folder that it was made from."
        )
    if experts:
        _open_experts(experts, model, path)
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


def _open_experts(experts: dict[str, nn.Module], model: Any, path: Path) -> None:
    """Open the modules of experts in fp8. Raises ``Damaged`` for tensors that do not make one."""
    stored = by_model(SafetensorsFiles(path), model, model.state_dict()).atoms.values()
    found = {
        each.atom.name: torch.empty(each.atom.shape, dtype=FROM_NAME[each.atom.dtype], device="meta")
        for each in stored
        if "experts" in each.atom.name
    }
    for name, module in experts.items():
        own = {
            key.removeprefix(f"{name}."): each for key, each in found.items() if key.startswith(f"{name}.")
        }
        try:
            open_experts(module, own)
        except (ValueError, KeyError) as error:
            raise Damaged(
                f"{path} has experts of {name} that cannot be read in fp8: {error!r}", path=str(path)
            ) from error


def _insert_int8_layers(model: Any, path: Path) -> None:
    """Open the linear layers of ``model`` whose weights torchao has quantised in ``path``.

    Raises ``Damaged`` for tensors that make no layer, and ``ModelNotSupported`` for weights of other layers, or with
    zero points.
    """
    source = SafetensorsFiles(path)
    layers: dict[str, Any] = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    found = {name: each for name, each in _tensors_of(layers, model, source).items() if VALUES in each}
    stored = [name for each in source.atoms.values() if (name := each.atom.name).endswith(f".{VALUES}")]
    if len(found) != len(stored):
        raise ModelNotSupported(
            f"{path} has {len(stored)} weights that {TORCHAO} has quantised, and {len(found)} of them are linear layers"
            f" of {type(model).__name__}. Quantise these alone, or give the folder that it was made from."
        )
    for name, tensors in found.items():
        zeros = tensors.get(ZERO_POINT)
        if zeros is not None and bool(zeros.any()):
            raise ModelNotSupported(
                f"{path} has zero points of {name} that are not zero, which {TORCHAO}'s own product leaves out."
                " Quantise it by Int8WeightOnlyConfig."
            )
        try:
            open_int8(layers[name], tensors)
        except (ValueError, KeyError) as error:
            raise Damaged(
                f"{path} has tensors of {name} that make no int8 weight: {error!r}", path=str(path)
            ) from error


def _tensors_of(
    layers: dict[str, nn.Module], model: nn.Module, source: SafetensorsFiles
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors of each of ``layers`` in ``source``, by name, on ``meta``.

    Quant states and zero points have values.
    """
    matches = [LAYER_TENSOR.fullmatch(stored.atom.name) for stored in source.atoms.values()]
    ends = {match["tensor"] for match in matches if match}
    here = dict.fromkeys(f"{layer}.{end}" for layer in layers for end in ends)
    names = names_by_model(source, model, here)
    found: dict[str, dict[str, torch.Tensor]] = {}
    for stored in source.atoms.values():
        match = LAYER_TENSOR.fullmatch(names.get(stored.atom.name, ""))
        if match is None or match["layer"] not in layers:
            continue
        if match["tensor"].startswith((QUANT_STATE, ZERO_POINT)):
            (tensor,) = read_tensors(source, [(stored, Region.whole(stored.atom.shape))])
        else:
            tensor = torch.empty(stored.atom.shape, dtype=FROM_NAME[stored.atom.dtype], device="meta")
        found.setdefault(match["layer"], {})[match["tensor"]] = tensor
    return found


TORCHAO = "torchao"
INT8 = "Int8Tensor"
"""torchao's class of int8 weights."""
PARTS = {"qdata", "scale", "zero_point"}
"""The tensors of such a weight."""


def refuse_other_weights(path: Path) -> None:
    """Raise ``ModelNotSupported`` unless all quantised weights of the folder ``path`` are int8, and no inputs are.

    The metadata of a file names the class of each weight that torchao quantised, and how it is divided into blocks.
    Those of int8 weights follow from shapes too, so only what would change the product is read.

    Raises ``Damaged`` if the files do not say how their weights were quantised.
    """
    found = _described(path)
    if not found:
        raise Damaged(
            f"{path}: by its config.json {TORCHAO} has quantised it, and the metadata of its files describe no"
            " quantised weight. Save it again with save_pretrained() of transformers 5.",
            path=str(path),
        )
    for name, description in found.items():
        if why := _refusal(description):
            raise ModelNotSupported(
                f"{path} has {name} as an object of {TORCHAO} {why}, and adapters train on {INT8} alone, quantised by"
                " Int8WeightOnlyConfig. Give such a folder, or the one that this was made from."
            )


def _described(path: Path) -> dict[str, dict[str, Any]]:
    """Return what the metadata of the files in ``path`` say about each quantised weight, by its name."""
    found: dict[str, dict[str, Any]] = {}
    for file in files_of(path, SINGLE, INDEX)[0]:
        for name, text in header_of(file).metadata.items():
            try:
                description = json.loads(text)
            except (ValueError, RecursionError):
                continue  # a text of another kind
            if isinstance(description, dict) and description.get("_type", "Tensor") != "Tensor":
                found[name] = description
    return found


def _refusal(description: dict[str, Any]) -> str | None:
    """Return why a weight cannot be used, as the end of a sentence; None if it can."""
    if description["_type"] != INT8:
        return f"of the class {description['_type']}"
    data, parts = description.get("_data"), description.get("_tensor_data_names")
    if not isinstance(data, dict) or not isinstance(parts, list):
        return "that is not described"
    if data.get("act_quant_kwargs") is not None or set(map(str, parts)) - PARTS:
        return "whose inputs are quantised or scaled, too"
    blocks, dtype = data.get("block_size"), data.get("dtype")
    if not (isinstance(blocks, list) and len(blocks) == 2 and all(isinstance(each, int) for each in blocks)):
        return f"in blocks of {blocks!r}"
    if dtype != {"_type": "torch.dtype", "_data": "bfloat16"}:
        return f"that was made of {dtype['_data'] if isinstance(dtype, dict) else dtype} and not of bfloat16"
    return None
