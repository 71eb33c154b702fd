"""Quantised linear layers of bitsandbytes and in fp8, with all that they compute with as parameters.

Such a layer keeps its weight packed. In bitsandbytes the scales and tables that unpack it are attributes, which
``parameters()`` does not list. Out of core they must move with the block. ``open_layers`` therefore makes them frozen
parameters, under the names that they have in published files. The ``weight`` of an open layer is a property that puts
an object of the library's class together from these parameters, in their memory. The kernels of the library, and PEFT,
compute with it as before. ``close_layers`` undoes it.

The quant state of a 4-bit layer (block sizes, dtypes, shape, offset of the scales) is needed on the host before the
layer computes. It is a parameter as well, and the layer reads it (``set_quant_state``) whenever files are read.

The kernels of transformers' fp8 layers are fetched from the network, run on few GPUs and round activations to fp8. An
open fp8 layer computes in the dtype of its input instead, with its weight unpacked by torch on any device: the bits of
the model that transformers loads with ``dequantize=True``.

bitsandbytes and transformers are not imported here: a model that has such layers has imported them.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from ...errors import ModelNotSupported
from ...state.capture import AS_STORED

LIBRARY = "bitsandbytes.nn.modules"
FP8_LIBRARY = "transformers.integrations.finegrained_fp8"
QUANT_STATE = "weight.quant_state.bitsandbytes__"
"""The beginning of the name of the tensor that holds the quant state of a 4-bit layer, as JSON."""
SCALES = "weight_scale_inv"
"""The name of the scales of an fp8 layer: the values that its weights are multiplied by."""
NOT_QUANTISED = (
    'has not quantised its weight. That happens when the model is moved to a device: model.to("cpu"). Weights that are'
    " trained cannot be quantised."
)


def open_layers(model: nn.Module) -> None:
    """Make what the quantised layers of ``model`` compute with frozen parameters. Open layers stay as they are.

    Raises ``ModelNotSupported``, with nothing changed, for a layer that has not quantised its weight yet, has packed it
    anew for inference, or rounds its inputs by a stored scale.
    """
    found = [
        (name, module, opened) for name, module in model.named_modules() if (opened := _open_class(module))
    ]
    for name, module, opened in found:
        if why := opened.refusal(module):
            raise ModelNotSupported(f"{name} ({type(module).__name__}) {why}")
    # all before the first is open, as layers may share a weight
    every = [module.state_dict() for _, module, _ in found]
    for (_, module, opened), tensors in zip(found, every, strict=True):
        opened.drop_tensors(module)
        _open(module, opened, tensors)


def open_on_meta(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Open a quantised layer on ``meta``, with the shapes and dtypes of ``tensors``.

    Args:
        module: The layer.
        tensors: The layer's tensors by their names in it, on ``meta`` except for the quant state, which has values.

    Raises ``ValueError`` for tensors of other dtypes or shapes than the layer's, and ``ModelNotSupported`` for a layer
    that cannot be opened.
    """
    opened = _open_class(module)
    assert opened is not None
    opened.check_tensors(module, tensors)
    module._parameters["weight"] = nn.Parameter(tensors["weight"].to("meta"), requires_grad=False)
    opened.drop_tensors(module)
    _open(module, opened, tensors)


def close_layers(model: nn.Module) -> None:
    """Turn open layers back into layers of the library, with the values of their parameters.

    Layers on ``meta`` stay open: the library has none there.
    """
    for module in model.modules():
        close_layer(module)


def close_layer(module: nn.Module) -> None:
    """Close one layer of a model, if it is open and not on ``meta``."""
    if not isinstance(module, OpenLayer) or module._parameters[module.packed].is_meta:
        return
    module.give_back()


def is_quantised(module: nn.Module) -> bool:
    """Return whether ``module`` is a quantised layer that is not open."""
    return _open_class(module) is not None


def missing_tensors(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors that a quantised layer needs and that are not among ``tensors``."""
    opened = _open_class(module)
    return [] if opened is None else [name for name in opened.needed(tensors) if name not in tensors]


def compute_dtypes(model: nn.Module) -> list[str]:
    """Return the dtypes that 4-bit layers of ``model`` were told to compute in, whatever their input is."""
    layers: list[Any] = [module for module in model.modules() if isinstance(module, _Open4bit)]
    return sorted({str(each.compute_dtype) for each in layers if each.compute_dtype is not None})


def is_quant_state(module: nn.Module, name: str) -> bool:
    """Return whether the parameter ``name`` of ``module`` is the quant state of an open layer."""
    return isinstance(module, _Open4bit) and name.startswith(QUANT_STATE)


def set_quant_state(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Have an open layer read its quant state from ``value``, if its parameter ``name`` is the quant state."""
    if isinstance(module, _Open4bit) and is_quant_state(module, name):
        module.read_quant_state(value)


def weight_parts(module: Any) -> list[nn.Parameter]:
    """Return the parameters of which ``weight_from`` makes the weight of a layer, open or not."""
    return module.parts() if isinstance(module, OpenLayer) else [module.weight]


def weight_from(module: Any, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the weight of a layer, unpacked in fp32 if it is packed, from the ``values`` of its ``weight_parts``."""
    return module.unpacked_from(values) if isinstance(module, OpenLayer) else values[0]


def are_unpacked_here(model: nn.Module) -> bool:
    """Return whether torch unpacks all open layers of ``model``: those of bitsandbytes have kernels of the library."""
    return not any(isinstance(module, (_Open4bit, _Open8bit)) for module in model.modules())


def _open_class(module: nn.Module) -> type[OpenLayer] | None:
    """Return the class of ``module`` once it is open; None unless it is a quantised layer that is not open."""
    if isinstance(module, OpenLayer):
        return None
    for library, name, mixin in _LAYERS:
        kind = getattr(sys.modules.get(library), name, None)
        if kind is not None and isinstance(module, kind):
            return _subclass(mixin, type(module))
    return None


@cache
def _subclass(mixin: type, kind: type) -> type[OpenLayer]:
    """Return the class ``kind`` of the library with the methods of an open layer; each class is made once."""
    return type(kind.__name__, (mixin, kind), {})


def _open(module: Any, opened: type[OpenLayer], tensors: Mapping[str, torch.Tensor]) -> None:
    weight = module._parameters["weight"]
    weight.__class__ = nn.Parameter
    weight.__dict__.clear()
    setattr(weight, AS_STORED, module.in_features * module.out_features)
    module.__class__ = opened
    for name, tensor in tensors.items():
        if name not in ("weight", "bias"):
            part = module._parameters.get(name)
            if part is None or weight.is_meta:
                device = weight.device if weight.is_meta else tensor.device
                part = nn.Parameter(tensor.detach().to(device), requires_grad=False)
            module._parameters[name] = part
            setattr(part, AS_STORED, 0)
            set_quant_state(module, name, tensor)


class OpenLayer:
    """A layer whose ``weight`` is put together from its parameters, in their memory.

    Setting the weight closes the layer: PEFT does that where it merges an adapter.
    """

    packed = "weight"
    """The name of the parameter that holds the packed weight."""
    _parameters: dict[str, Any]

    @staticmethod
    def needed(tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names of the tensors that the layer needs, as far as ``tensors`` tell."""
        raise NotImplementedError

    @staticmethod
    def refusal(module: Any) -> str | None:
        """Return why ``module`` cannot be opened, and the way out; None if it can."""
        raise NotImplementedError

    @staticmethod
    def check_tensors(module: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise ``ValueError`` if ``tensors`` are none of a layer such as ``module``."""

    @staticmethod
    def drop_tensors(module: Any) -> None:
        """Remove the attributes of ``module`` that would keep its tensors in memory."""

    def library_weight(self, weight: Any) -> Any:
        """Return the packed parameter ``weight`` as an object of the library's class."""
        raise NotImplementedError

    def close(self) -> None:
        """Remove the parameters that ``open_layers`` has added, and become a layer of the library again."""
        for name in [name for name, part in self._parameters.items() if getattr(part, AS_STORED, 1) == 0]:
            del self._parameters[name]
        self.__class__ = type(self).__bases__[1]  # type: ignore[assignment]

    def give_back(self) -> None:
        """Close the layer, with the values of its parameters."""
        made, weight = self.weight, self._parameters["weight"]
        self.close()
        weight.__dict__.clear()
        weight.__class__ = type(made)  # the object stays the same, as an optimizer may refer to it
        weight.__dict__.update(made.__dict__)

    @property
    def weight(self) -> Any:
        """The weight as an object of the library's class."""
        weight = self.__dict__.get("_weight_in_pass")
        return self.library_weight(self._parameters[self.packed]) if weight is None else weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias. Within a pass it has its dtype, or the library would give the parameter other memory."""
        bias, dtype = self._parameters["bias"], self.__dict__.get("_bias_dtype")
        return bias if bias is None or dtype is None else bias.to(dtype)

    def bias_dtype(self, x: torch.Tensor) -> torch.dtype:
        """Return the dtype in which the bias is added for the input ``x``."""
        return x.dtype

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            here = self._parameters[self.packed]
            if value is not None and not here.is_meta and value.data_ptr() == here.data_ptr():
                return  # DoRA puts the weight back that it has read
            self.close()
        nn.Module.__setattr__(self, name, value)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.__dict__["_weight_in_pass"] = self.weight  # a pass reads it several times
        self.__dict__["_bias_dtype"] = self.bias_dtype(x)
        try:
            return super().forward(x)  # type: ignore[misc]
        finally:
            del self.__dict__["_weight_in_pass"], self.__dict__["_bias_dtype"]

    def _save_to_state_dict(self, *args: Any) -> None:
        nn.Module._save_to_state_dict(self, *args)  # type: ignore[arg-type]

    def parts(self) -> list[nn.Parameter]:
        """Return the parameters that ``unpacked_from`` needs, of a layer that torch unpacks."""
        raise NotImplementedError

    def unpacked_from(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the weight, [outputs, inputs] in fp32, from the ``values`` of ``parts``."""
        raise NotImplementedError

    def _part(self, name: str) -> torch.Tensor:
        return self._parameters[name].data


class _Open4bit(OpenLayer):
    """A layer of 4-bit values in blocks, each block with a scale. The scales may be quantised as well."""

    _quant_state: dict[str, Any]

    @staticmethod
    def needed(tensors: Mapping[str, torch.Tensor]) -> list[str]:
        numbers = next((name for name in tensors if name.startswith(QUANT_STATE)), f"{QUANT_STATE}nf4")
        needed = ["weight", "weight.absmax", "weight.quant_map", numbers]
        if numbers in tensors and "nested_offset" in _parsed(tensors[numbers]):
            needed += ["weight.nested_absmax", "weight.nested_quant_map"]
        return needed

    @staticmethod
    def refusal(module: Any) -> str | None:
        state = getattr(module.weight, "quant_state", None)
        if state is None or module.weight.requires_grad:
            return NOT_QUANTISED
        if getattr(state, "packing_format_for_cpu", False):
            return (
                "was packed anew when the model ran in evaluation mode on this CPU, which rounds its scales. Load the"
                " model again, and let the engine evaluate it: engine.evaluate."
            )
        return None

    @staticmethod
    def drop_tensors(module: Any) -> None:
        module.quant_state = None

    def give_back(self) -> None:
        super().give_back()
        self.quant_state = self._parameters["weight"].quant_state

    @property
    def support_avx512bf16_for_cpu(self) -> bool:
        """False: in an evaluation the library would pack the weight anew, in memory that the next block uses."""
        return False

    def bias_dtype(self, x: torch.Tensor) -> torch.dtype:
        told: torch.dtype | None = self.compute_dtype  # type: ignore[attr-defined]
        if not self.compute_type_is_set and x.dtype != torch.float16:  # type: ignore[attr-defined]
            return x.dtype
        return told or x.dtype

    def read_quant_state(self, value: torch.Tensor) -> None:
        numbers = _parsed(value)
        numbers["dtype"] = getattr(torch, numbers["dtype"])
        if "nested_offset" in numbers:
            numbers["nested_dtype"] = getattr(torch, numbers["nested_dtype"])
        shape = (self.out_features, self.in_features)  # type: ignore[attr-defined]
        if tuple(numbers["shape"]) != shape:
            raise ModelNotSupported(
                f"a 4-bit layer of {shape[1]} inputs and {shape[0]} outputs has a weight that was quantised as"
                f" {numbers['shape']}. Quantise it with the library's present version."
            )
        self.__dict__["_quant_state"] = numbers
        self.__dict__.pop("_offset", None)

    def library_weight(self, weight: Any) -> Any:
        numbers, offset, scales = self._quant_state, None, None
        if nested := "nested_offset" in numbers:
            offset = self.__dict__.get("_offset")
            if offset is None or offset.device != weight.device:
                offset = self.__dict__["_offset"] = torch.tensor(
                    numbers["nested_offset"], device=weight.device
                )
            scales = _library("functional").QuantState(
                absmax=self._part("weight.nested_absmax"),
                blocksize=numbers["nested_blocksize"],
                code=self._part("weight.nested_quant_map"),
                dtype=numbers["nested_dtype"],
            )
        state = _library("functional").QuantState(
            absmax=self._part("weight.absmax"),
            shape=torch.Size(numbers["shape"]),
            code=self._part("weight.quant_map"),
            blocksize=numbers["blocksize"],
            quant_type=numbers["quant_type"],
            dtype=numbers["dtype"],
            offset=offset,
            state2=scales,
        )
        if type(weight.data) is not torch.Tensor:  # a fake tensor, say, cannot become a Params4bit
            weight.quant_state = state
            return weight
        return _library("nn.modules").Params4bit(
            weight.data,
            quant_state=state,
            blocksize=numbers["blocksize"],
            compress_statistics=nested,
            quant_type=numbers["quant_type"],
            quant_storage=weight.dtype,
            bnb_quantized=True,
        )


class _Open8bit(OpenLayer):
    """A layer of 8-bit values, each row with a scale."""

    @staticmethod
    def needed(tensors: Mapping[str, torch.Tensor]) -> list[str]:
        return ["weight", "SCB"]

    @staticmethod
    def refusal(module: Any) -> str | None:
        scales = getattr(module.weight, "SCB", None) if module.state.SCB is None else module.state.SCB
        return NOT_QUANTISED if scales is None or module.state.has_fp16_weights else None

    @staticmethod
    def drop_tensors(module: Any) -> None:
        module.state.CB = module.state.SCB = None

    def library_weight(self, weight: Any) -> Any:
        scales = self._part("SCB")
        if type(weight.data) is not torch.Tensor:
            weight.CB, weight.SCB = weight.data, scales
            return weight
        kind = _library("nn.modules").Int8Params
        return kind(weight.data, requires_grad=False, CB=weight.data, SCB=scales)

    @property
    def state(self) -> Any:
        """The library's record of a layer for its kernels: a new one for each use, as parameters are moved."""
        if (state := self.__dict__.get("_state_in_pass")) is not None:
            return state
        fresh = copy.copy(self.__dict__["state"])
        fresh.CB, fresh.SCB = self._parameters["weight"].data, self._part("SCB")
        return fresh

    @state.setter
    def state(self, value: Any) -> None:
        self.__dict__["state"] = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.__dict__["_state_in_pass"] = self.state
        try:
            return super().forward(x)
        finally:
            del self.__dict__["_state_in_pass"]


class _OpenFp8(OpenLayer):
    """A layer of fp8 values with a scale for each tile of the weight, or one scale for all of it."""

    @staticmethod
    def needed(tensors: Mapping[str, torch.Tensor]) -> list[str]:
        return ["weight", SCALES]

    @staticmethod
    def refusal(module: Any) -> str | None:
        if hasattr(module, "n_groups"):
            return "divides its inputs into groups, which only transformers' own kernels compute in fp8."
        if module.activation_scale is not None:
            return (
                "rounds its inputs to fp8 by a stored scale (activation_scheme static). Give the folder that it was"
                " made from, or one with dynamic scales."
            )
        if module.weight.dtype != torch.float8_e4m3fn:
            return f"has a weight in {module.weight.dtype}. Load the model again, or with dequantize=True."
        return None

    @staticmethod
    def check_tensors(module: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        shape = (module.out_features, module.in_features)
        weight, scales, tile = tensors["weight"], tensors[SCALES], module.block_size
        if weight.dtype != torch.float8_e4m3fn or weight.shape != shape:
            raise ValueError(f"a weight {[*weight.shape]} in {weight.dtype}, not {[*shape]} in float8_e4m3fn")
        grid = [-(-size // each) for size, each in zip(shape, tile, strict=True)] if tile else None
        fits = scales.numel() == 1 if grid is None else [*scales.shape] == grid
        if not fits or not scales.is_floating_point():
            raise ValueError(
                f"scales {[*scales.shape]} in {scales.dtype} for a weight {[*shape]} in tiles {tile}, not {grid or [1]}"
            )

    def close(self) -> None:
        del self._parameters[SCALES].__dict__[AS_STORED]
        self.__class__ = type(self).__bases__[1]  # type: ignore[assignment]

    def give_back(self) -> None:
        weight = self._parameters["weight"]
        self.close()
        del weight.__dict__[AS_STORED]

    def library_weight(self, weight: Any) -> torch.Tensor:
        """Return the unpacked weight in fp32, for PEFT, which creates adapters of its dtype."""
        return self.unpacked_from([weight.data, self._part(SCALES)])

    def parts(self) -> list[nn.Parameter]:
        return [self._parameters["weight"], self._parameters[SCALES]]

    def unpacked_from(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        weight, scales = values
        return unpacked(weight, scales, self.block_size, torch.float32)  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parameters = self._parameters
        return UnpackedLinear.apply(
            x,
            parameters["weight"],
            parameters[SCALES],
            parameters["bias"],
            self.block_size,  # type: ignore[attr-defined]
        )


class UnpackedLinear(torch.autograd.Function):
    """A product with an fp8 weight that is unpacked in both passes. What it keeps between them is packed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        tile: Sequence[int] | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(weight, scales)
        ctx.tile = tile
        return nn.functional.linear(x, unpacked(weight, scales, tile, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        weight, scales = ctx.saved_tensors
        of_input = of_bias = None
        if ctx.needs_input_grad[0]:
            of_input = gradient @ unpacked(weight, scales, ctx.tile, gradient.dtype)
        if ctx.needs_input_grad[3]:
            of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        return of_input, None, None, of_bias, None


def unpacked(
    weight: torch.Tensor, scales: torch.Tensor, tile: Sequence[int] | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return ``weight * scales``, computed in fp32 and rounded once to ``dtype``.

    Args:
        weight: Values of shape [rows, columns] in fp8.
        scales: One for each tile, [rows / tile, columns / tile] rounded up, or a single one without tiles.
        tile: The rows and columns of a tile. Those at the edges may be smaller.
        dtype: Dtype of the result, of at least 16 bits.
    """
    made, scales = weight.to(dtype), scales.to(torch.float32)  # no fp8 value is rounded
    if tile is None:
        return made.mul_(scales.reshape(1, 1))
    rows, columns = weight.shape
    by_row = scales.repeat_interleave(tile[0], 0)[:rows]
    whole = columns // tile[1]
    end = whole * tile[1]
    made[:, :end].unflatten(1, (whole, tile[1])).mul_(by_row[:, :whole, None])
    made[:, end:].mul_(by_row[:, whole:])
    return made


_LAYERS: tuple[tuple[str, str, type[OpenLayer]], ...] = (
    (LIBRARY, "Linear4bit", _Open4bit),
    (LIBRARY, "Linear8bitLt", _Open8bit),
    (FP8_LIBRARY, "FP8Linear", _OpenFp8),
)
"""The layers that can be opened: module and name of the class, and the class's methods once it is open."""


def _parsed(numbers: torch.Tensor) -> dict[str, Any]:
    return json.loads(bytes(numbers.cpu().numpy()))


def _library(module: str) -> Any:
    return sys.modules[f"bitsandbytes.{module}"]
