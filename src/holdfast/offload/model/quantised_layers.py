"""Quantised linear layers of bitsandbytes, with all that they compute with as parameters.

Such a layer keeps its weight packed, and what unpacks it (scales, tables of values) in attributes that no
``parameters()`` lists. Out of core they all are streamed with the block. ``open_layers`` lists them as frozen
parameters, under the names that they have in published files. The layer's ``weight`` is made of them whenever it is
asked for, so the library's own code and kernels compute as before, and PEFT's do. ``close_layers`` undoes it.

Nothing is imported for this: a model that has such layers has imported the library.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from ...errors import ModelNotSupported
from ...state.capture import AS_STORED

LIBRARY = "bitsandbytes.nn.modules"
NUMBERS = "weight.quant_state.bitsandbytes__"
"""The beginning of the name of a 4-bit layer's tensor that holds its numbers and shapes, as JSON."""


def open_layers(model: nn.Module) -> None:
    """List what the quantised layers of ``model`` compute with as frozen parameters. Open layers stay as they are.

    Raises ``ModelNotSupported`` for a layer that has not quantised its weight yet, or has packed it anew for inference,
    with nothing changed.
    """
    found = [(module, opened) for module in model.modules() if (opened := _opened(module))]
    names = {id(module): name for name, module in model.named_modules()}
    for module, opened in found:
        if not opened.is_ready(module):
            raise ModelNotSupported(
                f"{names[id(module)]} ({type(module).__name__}) has not quantised its weight. That happens when the"
                ' model is moved to a device: model.to("cpu"). Weights that are trained cannot be quantised.'
            )
        if getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
            raise ModelNotSupported(
                f"{names[id(module)]} was packed anew when the model ran in evaluation mode on this CPU, which rounds"
                " its scales. Load the model again, and let the engine evaluate it: engine.evaluate."
            )
    every = [
        module.state_dict() for module, _ in found
    ]  # before the first is open, as layers may share a weight
    for (module, opened), tensors in zip(found, every, strict=True):
        opened.forget(module)
        _open(module, opened, tensors)


def expect(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Open a quantised layer on ``meta``, which will have ``tensors``, by their names below the layer's own.

    Those on ``meta`` tell shapes and dtypes; the one with the layer's numbers has values.
    """
    opened = _opened(module)
    assert opened is not None
    module._parameters["weight"] = nn.Parameter(tensors["weight"].to("meta"), requires_grad=False)
    opened.forget(module)
    _open(module, opened, tensors)


def close_layers(model: nn.Module) -> None:
    """Make the layers that ``open_layers`` has opened what they were, with the values of their parameters.

    Those on ``meta`` stay open: the library has no such layers.
    """
    for module in model.modules():
        close_layer(module)


def close_layer(module: nn.Module) -> None:
    """Close one layer of a model, if it is open and not on ``meta``."""
    if not isinstance(module, _OpenLayer) or module._parameters["weight"].is_meta:
        return
    made, weight = module.weight, module._parameters["weight"]
    module.close()
    weight.__dict__.clear()
    weight.__class__ = type(made)  # the object stays the same, as an optimizer may refer to it
    weight.__dict__.update(made.__dict__)
    if isinstance(made, _library("nn.modules").Params4bit):
        module.quant_state = weight.quant_state  # type: ignore[assignment]


def is_quantised(module: nn.Module) -> bool:
    """Return whether ``module`` is a quantised layer that is not open."""
    return _opened(module) is not None


def missing(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors that a quantised layer needs and that are not among ``tensors``."""
    opened = _opened(module)
    return [] if opened is None else [name for name in opened.needed(tensors) if name not in tensors]


def is_open(module: nn.Module) -> bool:
    """Return whether ``module`` is a quantised layer that ``open_layers`` has opened."""
    return isinstance(module, _OpenLayer)


def has_numbers(module: nn.Module, name: str) -> bool:
    """Return whether the parameter ``name`` of ``module`` has numbers that the layer needs before it computes."""
    return isinstance(module, _OpenLayer) and name.startswith(NUMBERS)


def adopt(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Tell a layer the value of its parameter ``name``, if that has its numbers."""
    if isinstance(module, _OpenLayer) and has_numbers(module, name):
        module.adopt(value)


def _opened(module: nn.Module) -> type[_OpenLayer] | None:
    """Return the class of ``module`` once it is open; None unless it is a quantised layer that is not open."""
    library = sys.modules.get(LIBRARY)
    if library is None or isinstance(module, _OpenLayer):
        return None
    for name, mixin in (("Linear4bit", _Open4bit), ("Linear8bitLt", _Open8bit)):
        if isinstance(module, getattr(library, name)):
            return _class(mixin, type(module))
    return None


@cache
def _class(mixin: type, kind: type) -> type[_OpenLayer]:
    return type(kind.__name__, (mixin, kind), {})


def _open(module: Any, opened: type[_OpenLayer], tensors: Mapping[str, torch.Tensor]) -> None:
    weight = module._parameters["weight"]
    weight.__class__ = nn.Parameter
    weight.__dict__.clear()
    setattr(weight, AS_STORED, module.in_features * module.out_features)
    module.__class__ = opened
    for name, tensor in tensors.items():
        if name not in module._parameters:
            meta = weight.device if weight.is_meta else tensor.device
            module._parameters[name] = part = nn.Parameter(tensor.detach().to(meta), requires_grad=False)
            setattr(part, AS_STORED, 0)
            adopt(module, name, tensor)


class _OpenLayer:
    """A layer whose ``weight`` is made of its parameters, in their memory.

    A weight that is set anew, as PEFT does where it merges an adapter, closes the layer.
    """

    _parameters: dict[str, Any]

    @staticmethod
    def needed(tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names of the tensors that a layer with ``tensors``, if all are there, has."""
        raise NotImplementedError

    @staticmethod
    def is_ready(module: Any) -> bool:
        """Return whether the weight of ``module`` is quantised."""
        raise NotImplementedError

    @staticmethod
    def forget(module: Any) -> None:
        """Remove the attributes of ``module`` that would keep its tensors in memory."""
        raise NotImplementedError

    def made(self, weight: Any) -> Any:
        """Return what the library takes as weight."""
        raise NotImplementedError

    def adopt(self, value: torch.Tensor) -> None:
        """Read the layer's numbers."""

    def close(self) -> None:
        """Remove the parameters that ``open_layers`` has listed, and be a layer of the library again."""
        for name in [name for name, part in self._parameters.items() if getattr(part, AS_STORED, 1) == 0]:
            del self._parameters[name]
        self.__class__ = type(self).__bases__[1]  # type: ignore[assignment]

    @property
    def weight(self) -> Any:
        """The weight as the library has it."""
        pinned = self.__dict__.get("_pinned")
        return self.made(self._parameters["weight"]) if pinned is None else pinned

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias; within a pass in the dtype of the pass, as the library would give the parameter other memory."""
        bias, dtype = self._parameters["bias"], self.__dict__.get("_bias_dtype")
        return bias if bias is None or dtype is None else bias.to(dtype)

    def bias_dtype(self, x: torch.Tensor) -> torch.dtype:
        """Return the dtype in which the bias is added for the input ``x``."""
        return x.dtype

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            if value.data_ptr() == self._parameters["weight"].data_ptr():
                return  # DoRA puts the weight back that it has read
            self.close()
        nn.Module.__setattr__(self, name, value)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.__dict__["_pinned"] = self.weight  # it is asked for several times
        self.__dict__["_bias_dtype"] = self.bias_dtype(x)
        try:
            return super().forward(x)  # type: ignore[misc]
        finally:
            del self.__dict__["_pinned"], self.__dict__["_bias_dtype"]

    def _save_to_state_dict(self, *args: Any) -> None:
        nn.Module._save_to_state_dict(self, *args)  # type: ignore[arg-type]

    def _part(self, name: str) -> torch.Tensor:
        return self._parameters[name].data


class _Open4bit(_OpenLayer):
    """A layer of 4-bit values in blocks, each block with a scale. The scales may be quantised in their turn."""

    _numbers: dict[str, Any]

    @staticmethod
    def needed(tensors: Mapping[str, torch.Tensor]) -> list[str]:
        numbers = next((name for name in tensors if name.startswith(NUMBERS)), f"{NUMBERS}nf4")
        needed = ["weight", "weight.absmax", "weight.quant_map", numbers]
        if numbers in tensors and "nested_offset" in _parsed(tensors[numbers]):
            needed += ["weight.nested_absmax", "weight.nested_quant_map"]
        return needed

    @staticmethod
    def is_ready(module: Any) -> bool:
        return getattr(module.weight, "quant_state", None) is not None and not module.weight.requires_grad

    @staticmethod
    def forget(module: Any) -> None:
        module.quant_state = None

    @property
    def support_avx512bf16_for_cpu(self) -> bool:
        """False: in an evaluation the library would pack the weight anew, in memory that is lent."""
        return False

    def bias_dtype(self, x: torch.Tensor) -> torch.dtype:
        told: torch.dtype | None = self.compute_dtype  # type: ignore[attr-defined]
        if not self.compute_type_is_set and x.dtype != torch.float16:  # type: ignore[attr-defined]
            return x.dtype
        return told or x.dtype

    def adopt(self, value: torch.Tensor) -> None:
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
        self.__dict__["_numbers"] = numbers
        self.__dict__.pop("_offset", None)

    def made(self, weight: Any) -> Any:
        numbers, offset, scales = self._numbers, None, None
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
        if type(weight.data) is not torch.Tensor:  # one of a class of its own cannot be of a further class
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


class _Open8bit(_OpenLayer):
    """A layer of 8-bit values, each row with a scale."""

    @staticmethod
    def needed(tensors: Mapping[str, torch.Tensor]) -> list[str]:
        return ["weight", "SCB"]

    @staticmethod
    def is_ready(module: Any) -> bool:
        scales = getattr(module.weight, "SCB", None) if module.state.SCB is None else module.state.SCB
        return scales is not None and not module.state.has_fp16_weights

    @staticmethod
    def forget(module: Any) -> None:
        module.state.CB = module.state.SCB = None

    def made(self, weight: Any) -> Any:
        scales = self._part("SCB")
        if type(weight.data) is not torch.Tensor:
            weight.CB, weight.SCB = weight.data, scales
            return weight
        kind = _library("nn.modules").Int8Params
        return kind(weight.data, requires_grad=False, CB=weight.data, SCB=scales)

    @property
    def state(self) -> Any:
        """The library's record of a layer for its kernels: a new one for each use, as memory is lent."""
        if (pinned := self.__dict__.get("_pinned_state")) is not None:
            return pinned
        fresh = copy.copy(self.__dict__["state"])
        fresh.CB, fresh.SCB = self._parameters["weight"].data, self._part("SCB")
        return fresh

    @state.setter
    def state(self, value: Any) -> None:
        self.__dict__["state"] = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.__dict__["_pinned_state"] = self.state
        try:
            return super().forward(x)
        finally:
            del self.__dict__["_pinned_state"]


def _parsed(numbers: torch.Tensor) -> dict[str, Any]:
    return json.loads(bytes(numbers.cpu().numpy()))


def _library(module: str) -> Any:
    return sys.modules[f"bitsandbytes.{module}"]
