"""A folder of full precision, written again with the weights of its linear layers packed by bitsandbytes.

transformers chooses the layers, as it would for ``BitsAndBytesConfig``, and bitsandbytes packs one weight at a time on
the processor. The folder that results is one as published, under the names of the first. ``config.json`` is written
last, so that a folder without it is written again from the start. ``ORIGIN`` says what it was made of, because a run
that failed before its first commit may begin again with other settings. Called by the recipe of ``holdfast train``.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from ..config import QuantizationConfig
from ..errors import Damaged, ModelNotSupported
from ..formats.naming import names_by_model
from ..formats.readers.safetensors_files import INDEX, SafetensorsFiles
from ..formats.restore import read_tensors
from ..libraries import library
from ..offload.exit_hook import deferred
from ..offload.model.blocks import empty_parameters
from ..offload.model.quantised_layers import is_quantised
from ..quantities import MiB
from ..regular_files import load_json, read_regular
from ..state.layout.regions import Region
from ..store.disk import Disk, write_durably
from .keeping import CONFIG
from .pretrained import empty_model

FILE_BYTES = 512 * MiB
"""The size from which a file of the folder is written, which is as much memory as this takes besides one tensor."""
WHY = "file of the quantised base"
SUFFIXES = (".safetensors", ".json")
"""The suffixes of the files of a folder from which packed weights follow."""
ORIGIN = "holdfast-origin.json"
"""The file beside the packed weights that describes the folder and the settings that they were made of."""


def refuse_lack_of_bitsandbytes(how: QuantizationConfig) -> None:
    """Raise ``BadInput`` if bitsandbytes, or accelerate that transformers wants for it, is not installed."""
    for name in ("bitsandbytes", "accelerate"):
        with deferred():
            library(name, f"quantization.bits = {how.bits}", "pip install 'holdfast[adapters]'")


def quantise_folder(folder: Path, destination: Path, how: QuantizationConfig) -> None:
    """Write the model in ``folder`` to ``destination``, with packed weights, unless it is there already.

    Packed weights of another folder or with other settings are removed first. Raises ``ModelNotSupported`` if there is
    no layer to pack.
    """
    if is_made_of(destination, folder, how):
        return
    model, config = empty_model(folder), _settings(how)
    names = names_by_model(SafetensorsFiles(folder), model, model.state_dict())
    layers = _chosen_layers(model, config, folder)
    if (destination / CONFIG).is_file():
        (destination / CONFIG).unlink()  # first, so that what an interrupt leaves is not complete
        shutil.rmtree(destination)
    disk = Disk(destination)
    disk.makedirs("")
    source = SafetensorsFiles(folder)
    held: dict[str, torch.Tensor] = {}
    places: dict[str, str] = {}
    for stored in source.atoms.values():
        name = stored.atom.name
        [value] = read_tensors(source, [(stored, Region.whole(stored.atom.shape))])
        layer, _, end = names[name].rpartition(".")
        if end == "weight" and layer in layers:
            before = name.removesuffix("weight")
            held |= {before + each: tensor.contiguous() for each, tensor in _packed(value, how).items()}
        else:
            held[name] = value
        if sum(tensor.nbytes for tensor in held.values()) >= FILE_BYTES:
            _write_file(disk, held, places)
            held = {}
    _write_file(disk, held, places)
    index = json.dumps({"metadata": {}, "weight_map": places}, indent=2)
    write_durably(disk, INDEX, index.encode(), why=WHY)
    write_durably(disk, ORIGIN, json.dumps(_origin(folder, how)).encode(), why=WHY)
    told = json.loads((folder / CONFIG).read_bytes()) | {"quantization_config": config.to_dict()}
    write_durably(disk, CONFIG, json.dumps(told, indent=2).encode() + b"\n", why=WHY)


def is_made_of(destination: Path, folder: Path, how: QuantizationConfig) -> bool:
    """Return whether ``destination`` is complete, and was made of ``folder`` as it is now, as ``how`` says."""
    if not (destination / CONFIG).is_file():
        return False
    try:
        return load_json(read_regular(destination / ORIGIN)) == _origin(folder, how)
    except (OSError, Damaged, ValueError):
        return False


def _origin(folder: Path, how: QuantizationConfig) -> dict[str, Any]:
    """Return what packed weights follow from: the files of ``folder``, and the settings."""
    found = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.suffix in SUFFIXES]
    files = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in found]
    return {"folder": str(folder.resolve()), "files": files, "settings": asdict(how)}


def _settings(how: QuantizationConfig) -> Any:
    """Return transformers' own description of ``how``."""
    from transformers import BitsAndBytesConfig

    if how.bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=how.type, bnb_4bit_use_double_quant=how.double
    )


def _chosen_layers(model: Any, config: Any, folder: Path) -> set[str]:
    """Return the names of the layers of ``model`` that transformers packs, and let it put empty packed layers there."""
    from transformers.quantizers.auto import AutoHfQuantizer

    with deferred(), empty_parameters():
        quantizer = AutoHfQuantizer.from_config(config, pre_quantized=True)
        quantizer.preprocess_model(model=model, device_map=None)
    layers = {name: module for name, module in model.named_modules() if is_quantised(module)}
    turned = [
        name for name, module in layers.items() if getattr(module, "source_cls", nn.Linear) is not nn.Linear
    ]
    if turned or not layers:
        why = "it has no linear layer besides the head"
        why = f"{turned[0]} keeps its weight transposed" if turned else why
        raise ModelNotSupported(
            f"the model in {folder} is not quantised here: {why}. Give a folder that bitsandbytes has quantised, or"
            " leave [quantization] out."
        )
    return set(layers)


def _packed(value: torch.Tensor, how: QuantizationConfig) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer of bitsandbytes that has packed ``value``, [outputs, inputs], by their names."""
    packing: Any = import_module("bitsandbytes.nn")

    rows, columns = value.shape
    layer: Any
    if how.bits == 8:
        layer = packing.Linear8bitLt(columns, rows, bias=False, has_fp16_weights=False, device="meta")
        layer.weight = packing.Int8Params(value, requires_grad=False, has_fp16_weights=False)
    else:
        kind = {"quant_type": how.type, "compress_statistics": how.double}
        layer = packing.Linear4bit(columns, rows, bias=False, device="meta", **kind)
        layer.weight = packing.Params4bit(value, requires_grad=False, **kind)
    return layer.to("cpu").state_dict()


def _write_file(disk: Disk, tensors: dict[str, torch.Tensor], places: dict[str, str]) -> None:
    """Write ``tensors`` as the next file, and note in ``places`` which file each is in."""
    if tensors:
        name = f"model-{len(set(places.values())) + 1:05}.safetensors"
        write_durably(disk, name, save(tensors, {"format": "pt"}), why=WHY)
        places |= dict.fromkeys(tensors, name)
