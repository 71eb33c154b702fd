"""A run with LoRA adapters, read as the model with the adapters merged into its weights.

PEFT merges: its layers are on ``meta``, and one at a time gets the values of its weight and of its adapter. So the
result has the bits of ``merge_and_unload()``, and no more than two layers are in memory. Packed weights of a quantised
base are unpacked first. Called by ``holdfast convert --merge``.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import BadInput, RunMismatch
from ..formats.load import read_bytes
from ..formats.restore import read_tensors
from ..formats.source import DerivedSource, Source, SourceTensor, StoredArray, places_of
from ..offload.model.fp8_experts import SCALES_END, unpacked_experts
from ..offload.model.int8_layers import SCALE, VALUES, unpacked_int8
from ..offload.model.peft_adapters import lora_layers
from ..offload.model.quantised_layers import QUANT_STATE, SCALES, unpacked
from ..state.layout.fragments import Fragments, dense
from ..state.layout.regions import Region
from ..state.plain_tensors import FROM_NAME, TO_NAME, host_bytes
from ..state.tensor_entries import TensorEntry
from .keeping import ADAPTER_CONFIG, CONFIG
from .lora_adapters import adapted, peft_for
from .pretrained import empty_model
from .quantised_weights import LAYER_TENSOR

PREFIX = "base_model.model."
"""The beginning that PEFT gives the names of a model."""
KEPT = 2
"""The number of merged tensors that stay in memory: a tensor is read in pieces, one after the other."""
PACKED = ("I8", "U8", "F8_E4M3", "F8_E5M2")
"""The dtypes of weights that are nothing without their scales."""
_ADAPTER = re.compile(r"(?P<layer>.+)\.(?P<tensor>lora_\w+\.[^.]+(?:\.weight)?)")
_SAVED = re.compile(r"(?P<module>.+)\.modules_to_save\.[^.]+\.(?P<rest>.+)")
_REPLACED = re.compile(r"(?P<module>.+)\.original_module\.(?P<rest>.+)")


def merged(source: Source, adapter: Path, folder: Path, dtype: torch.dtype | None) -> Merged:
    """Return ``source`` with its adapters merged, under the names that the model has without them.

    Args:
        source: A run of the adapted model.
        adapter: The folder of the adapter's configuration.
        folder: The folder of the model's configuration.
        dtype: The dtype that weights are merged in, as PEFT does on a model of that dtype; None keeps that of each.

    Raises:
        BadInput: PEFT is not installed, or cannot read its configuration.
        RunMismatch: The run's tensors are not those of this model with these adapters.
    """
    peft = peft_for("--merge")
    found = [match for each in source.atoms.values() if (match := _ADAPTER.fullmatch(each.atom.name))]
    names = {match["tensor"].split(".")[1] for match in found}
    if len(names) != 1:
        raise RunMismatch(
            f"{source.path} has the adapters {', '.join(sorted(names)) or '(none)'} of LoRA, and one is merged here"
        )
    [name] = names
    try:
        config = peft.PeftConfig.from_pretrained(str(adapter))
        config.base_model_name_or_path = None  # the model is built from a copy of its configuration
        config.init_lora_weights = True  # others (PiSSA) need weights, and the run has what came of them
        model = adapted(empty_model(folder, plain=True), config, name)
    except (ValueError, TypeError, KeyError) as error:
        raise BadInput(
            f"{adapter / ADAPTER_CONFIG} cannot be used on the model of {folder}: {error}"
        ) from error
    if getattr(config, "target_parameters", None):
        raise BadInput(
            f"{adapter / ADAPTER_CONFIG} has target_parameters, adapters of tensors that are no layer's weight, which"
            " --merge does not know: resume the run and save model.merge_and_unload()"
        )
    quantization = json.loads((folder / CONFIG).read_bytes()).get("quantization_config") or {}
    identity = json.loads((adapter / ADAPTER_CONFIG).read_bytes())
    return Merged(source, model, dtype, identity, quantization.get("weight_block_size"))


@dataclass
class _Part:
    """One tensor of the merged model: the stored tensors that make it, by their names in its layer."""

    stored: dict[str, SourceTensor]
    layer: Any = None
    """PEFT's layer, if an adapter is merged into the weight."""
    dtype: str = ""
    """The dtype in which a tensor that was trained whole is written, if that is not the stored one."""

    @property
    def is_made(self) -> bool:
        """True unless the tensor is stored as it is."""
        return self.layer is not None or len(self.stored) > 1


class Merged(DerivedSource):
    """The weights of ``source``, a run of ``model``, with the adapters merged in and packed weights unpacked."""

    def __init__(
        self, source: Source, model: Any, dtype: torch.dtype | None, identity: Any, tile: Sequence[int] | None
    ) -> None:
        """Describe the merged tensors without reading data. Raises ``RunMismatch``.

        ``identity`` is the configuration of the adapters, and ``tile`` the rows and columns that share a scale in fp8.
        """
        super().__init__(source)
        self._dtype, self._adapters, self._tile = dtype, identity, tile
        self._of_part: list[_Part] = []
        self._made: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()
        weights = {
            each.atom.name: each for each in source.atoms.values() if each.atom.slot in ("param", "buffer")
        }
        layers = dict(lora_layers(model))
        groups, adapters, originals = _grouped(weights)
        self._refuse_other_layers(layers, adapters)
        self._refuse_tied(layers, model)
        narrow = {} if dtype is not None else _dtypes_of_base(groups, originals, identity.get("bias", "none"))
        for name, group in groups.items():
            layer = layers.get(name.removesuffix(".base_layer.weight"))
            if layer is not None and name.endswith(".base_layer.weight"):
                part = _Part(group | adapters[name.removesuffix(".base_layer.weight")], layer)
            else:
                part = _Part(group, dtype=narrow.get(name, ""))
            self._add_part(_plain_name(name), part, model)

    def read(self, part: int, offset: int, into: memoryview) -> None:
        described = self._of_part[part]
        if not described.is_made and not described.dtype:
            [stored] = described.stored.values()
            read_bytes(self._source, stored, offset, into)
            return
        with self._lock:
            tensor = self._tensor(part)
        into[:] = host_bytes(tensor)[offset : offset + len(into)].data

    def made_of(self, part: int) -> Iterable[SourceTensor]:
        return self._of_part[part].stored.values()

    def identity(self) -> list[Any]:
        every = [each for part in self._of_part for each in part.stored.values()]
        return [self._adapters, str(self._dtype), places_of(every), self._source.identity()]

    def _refuse_other_layers(self, layers: Mapping[str, Any], adapters: Mapping[str, Any]) -> None:
        for here, there, where in ((layers, adapters, "the configuration"), (adapters, layers, "the run")):
            if alone := [name for name in here if name not in there]:
                raise RunMismatch(
                    f"{self.path} was trained with other adapters than its {ADAPTER_CONFIG} describes: {alone[0]} has"
                    f" one in {where} alone. Give the configuration of the adapters that were trained."
                )

    def _refuse_tied(self, layers: Mapping[str, Any], model: nn.Module) -> None:
        """Raise ``BadInput`` if an adapted weight is another module's too, which would change with it, or instead."""
        held = [
            (id(each), name) for name, module in model.named_modules() for each in module._parameters.values()
        ]
        adapted = [(name, layer.get_base_layer().weight) for name, layer in layers.items()]
        saved = [(n, m) for n, m in model.named_modules() if n.endswith(".original_module")]
        adapted += [(n.removesuffix(".original_module"), p) for n, m in saved for p in m.parameters()]
        for name, weight in adapted:
            if others := [
                other for each, other in held if each == id(weight) and not other.startswith(f"{name}.")
            ]:
                other = _plain_name(others[0]).removesuffix(".base_layer").removesuffix(".original_module")
                raise BadInput(
                    f"the weight of {_plain_name(name)} in {self.path} is also that of {other} (tie_word_embeddings),"
                    " and what was trained is of the one alone, so no single weight has it merged. Write the adapter"
                    " alone, with --to peft."
                )

    def _add_part(self, name: str, described: _Part, model: Any) -> None:
        if "weight" not in described.stored:
            raise RunMismatch(f"{self.path} has scales of {name}, and not the weight itself")
        stored = described.stored["weight"]
        _refuse_without_scales(stored, described, self.path)
        shape, dtype = stored.atom.shape, described.dtype or stored.atom.dtype
        if described.is_made:
            weight = self._weight_of(model, name)
            shape = tuple(weight.shape)
            dtype = TO_NAME[self._dtype or _own_dtype(stored)]
        atom = TensorEntry(name, stored.atom.slot, shape, dtype)
        part = self.add_part(StoredArray(self.path, 0, atom.nbytes, dtype))
        self._of_part.append(described)
        self.add(SourceTensor(atom, Fragments.of([dense(Region.whole(shape), part)], len(shape))))

    def _weight_of(self, model: Any, name: str) -> Any:
        """Return the weight that the adapted ``model`` has under ``name`` without its adapters."""
        try:
            module = model.get_base_model().get_submodule(name.rpartition(".")[0])
        except AttributeError as error:
            raise RunMismatch(
                f"{self.path} has {name}, which {type(model.get_base_model()).__name__} has not"
            ) from error
        held = module.get_base_layer() if hasattr(module, "get_base_layer") else module
        return getattr(held, name.rpartition(".")[2])

    def _tensor(self, part: int) -> torch.Tensor:
        """Return the merged or unpacked tensor of ``part``."""
        if part not in self._made:
            while len(self._made) >= KEPT:
                self._made.popitem(last=False)
            described = self._of_part[part]
            wanted = [(each, Region.whole(each.atom.shape)) for each in described.stored.values()]
            tensors = dict(zip(described.stored, read_tensors(self._source, wanted), strict=True))
            weight = self._unpacked(tensors).to(FROM_NAME[self.parts[part].dtype])
            if described.layer is not None:
                weight = _merged_weight(described.layer, weight, tensors)
            self._made[part] = weight.contiguous()
        return self._made[part]

    def _unpacked(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the weight among the ``tensors`` of a layer, unpacked as its kernels would."""
        weight = tensors["weight"]
        if SCALES_END in tensors:
            return unpacked_experts(weight, tensors[SCALES_END], self._tile)
        if SCALES in tensors:
            return unpacked(weight, tensors[SCALES], self._tile, torch.float32)
        if SCALE in tensors:
            return unpacked_int8(weight, tensors[SCALE], torch.float32)
        if "SCB" in tensors:
            from bitsandbytes.functional import int8_vectorwise_dequant

            return int8_vectorwise_dequant(weight, tensors["SCB"])
        if any(name.startswith(QUANT_STATE) for name in tensors):
            from bitsandbytes.functional import QuantState, dequantize_4bit

            parts = {name: each for name, each in tensors.items() if name.startswith("weight.")}
            state = QuantState.from_dict(parts, device=torch.device("cpu"))
            return dequantize_4bit(weight, state)
        return weight


def _grouped(
    weights: Mapping[str, SourceTensor],
) -> tuple[dict[str, dict[str, SourceTensor]], dict[str, dict[str, SourceTensor]], dict[str, SourceTensor]]:
    """Return the tensors that make each tensor of the base, by its name, and those of the adapter of each layer.

    Last are the tensors of the base that trained copies replace, by their names.
    """
    groups: dict[str, dict[str, SourceTensor]] = {}
    adapters: dict[str, dict[str, SourceTensor]] = {}
    originals: dict[str, SourceTensor] = {}
    for name, stored in weights.items():
        if match := _ADAPTER.fullmatch(name):
            adapters.setdefault(match["layer"], {})[match["tensor"]] = stored
        elif match := _SAVED.fullmatch(name):
            groups.setdefault(f"{match['module']}.{match['rest']}", {})["weight"] = stored
        elif (match := LAYER_TENSOR.fullmatch(name)) and match["tensor"] != "weight":
            part = "weight" if match["tensor"] == VALUES else match["tensor"]
            groups.setdefault(f"{match['layer']}.weight", {})[part] = stored
        elif name.endswith(SCALES_END):  # of experts in fp8
            groups.setdefault(name.removesuffix(SCALES_END), {})[SCALES_END] = stored
        elif match := _REPLACED.fullmatch(name):
            originals[f"{match['module']}.{match['rest']}"] = stored
        else:
            groups.setdefault(name, {})["weight"] = stored
    return groups, adapters, originals


def _dtypes_of_base(
    groups: Mapping[str, Mapping[str, SourceTensor]], originals: Mapping[str, SourceTensor], bias: str
) -> dict[str, str]:
    """Return the dtype of the base for each tensor that was trained whole, in fp32, by its name.

    That is the dtype of the tensor that a copy replaces; for a bias, if ``bias`` says that such are trained, that of
    the weight beside it.
    """
    found = {name: _own_dtype(stored) for name, stored in originals.items()}
    for name in groups if bias != "none" else ():
        beside = groups.get(f"{name.removesuffix('bias')}weight", {}).get("weight")
        if name.endswith(".bias") and name not in found and beside is not None:
            found[name] = _own_dtype(beside)
    stored = {name: groups[name]["weight"].atom.dtype for name in found if "weight" in groups.get(name, {})}
    return {
        name: TO_NAME[found[name]] for name, dtype in stored.items() if dtype == "F32" != TO_NAME[found[name]]
    }


def _plain_name(name: str) -> str:
    return name.removeprefix(PREFIX).replace(".base_layer.", ".")


def _own_dtype(stored: SourceTensor) -> torch.dtype:
    """Return the dtype of a stored weight; bf16 if it is packed, which published models were before."""
    dtype = FROM_NAME[stored.atom.dtype]
    return dtype if dtype.is_floating_point and dtype.itemsize > 1 else torch.bfloat16


def _refuse_without_scales(weight: SourceTensor, part: _Part, path: str) -> None:
    """Raise ``BadInput`` for a packed weight whose scales are not stored, as bitsandbytes keeps them in attributes."""
    others = [name for name in part.stored if name != "weight" and not name.startswith("lora_")]
    if weight.atom.slot == "param" and weight.atom.dtype in PACKED and not others:
        raise BadInput(
            f"{weight.atom.name} of {path} is packed ({weight.atom.dtype}), and the run has not its scales: a"
            " Checkpointer does not see those of bitsandbytes. Write the adapter alone, with --to peft, or resume the"
            " run and save model.merge_and_unload()."
        )


def _merged_weight(layer: Any, weight: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return ``weight`` after PEFT has merged an adapter into it. The layer is on ``meta`` again afterwards."""
    places = [(layer.get_base_layer(), "weight", weight)]
    for name, value in tensors.items():
        if name.startswith("lora_"):
            path, _, end = name.rpartition(".")
            places.append((layer.get_submodule(path), end, value))
    before = [module._parameters[end] for module, end, _ in places]
    try:
        for module, end, value in places:
            module._parameters[end] = nn.Parameter(value, requires_grad=False)
        with torch.no_grad():
            layer.merge()
        return layer.get_base_layer().weight.data
    finally:
        layer.merged_adapters.clear()
        for (module, end, _), held in zip(places, before, strict=True):
            module._parameters[end] = held
