"""Descriptions of the weights that torchao has quantised, in the files of a folder, and which of them are supported.

torchao's objects are taken apart for safetensors: their tensors have names of their own, and the metadata of a file
names the class of each weight, and how it is divided into blocks. The blocks of int8 weights follow from shapes too, so
only what would change the product is looked up. torchao is not imported. Called by ``quantised_weights``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import Damaged, ModelNotSupported
from ..formats.readers.safetensors_files import INDEX, SINGLE, files_of, header_of

TORCHAO = "torchao"
INT8 = "Int8Tensor"
"""torchao's class of int8 weights."""
PARTS = {"qdata", "scale", "zero_point"}
"""The tensors of such a weight."""


def refuse_other_weights(path: Path) -> None:
    """Raise ``ModelNotSupported`` unless all quantised weights of the folder ``path`` are int8, and no inputs are.

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
