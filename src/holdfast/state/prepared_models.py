"""Models that another library has prepared, so that their parameters are not what or where they seem.

One table holds what was done, how to recognise it, and the way out. ``holdfast.offload`` and ``Checkpointer`` refuse
what they recognise before anything is written. Nothing is imported for this: classes and attributes are known by
name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import ModelNotSupported


@dataclass(frozen=True)
class Preparation:
    """One way in which a module or a parameter may have been prepared.

    ``found`` recognises it; ``what`` completes "NAME ..." and ``way_out`` is a sentence of advice.
    """

    found: Callable[[Any], bool]
    what: str
    way_out: str


def _has_ancestor(thing: object, *names: str) -> bool:
    """Return whether a class of ``thing``, or one of its bases, begins with one of ``names``, module included."""
    return any(f"{kind.__module__}.{kind.__qualname__}".startswith(names) for kind in type(thing).__mro__)


def _moves_parameters(module: nn.Module) -> bool:
    """Return whether accelerate's hook on ``module`` brings its parameters for a forward pass and takes them away."""
    hook = getattr(module, "_hf_hook", None)
    each = [hook, *getattr(hook, "hooks", ())]
    kept_away = any(getattr(one, "offload", False) for one in each)
    return kept_away or any(_has_ancestor(one, "accelerate.hooks.CpuOffload") for one in each)


def _is_spread(module: nn.Module) -> bool:
    """Return whether accelerate's hooks below ``module`` move activations between several devices."""
    places = getattr(module, "hf_device_map", None) or {}
    return len(set(map(str, places.values()))) > 1 and any(hasattr(m, "_hf_hook") for m in module.modules())


def _changes_buffers(module: nn.Module) -> bool:
    """Return whether the forward pass of ``module`` changes its own buffers while it trains."""
    if not module.training:
        return False
    if getattr(module, "track_running_stats", False) and getattr(module, "running_mean", None) is not None:
        return True
    hooks = module._forward_pre_hooks.values()
    return (
        any(_has_ancestor(hook, "torch.nn.utils.spectral_norm.SpectralNorm") for hook in hooks)
        or _has_ancestor(module, "torch.nn.utils.parametrizations._SpectralNorm")
        or _has_ancestor(module, "torch.ao.quantization.fake_quantize.", "torch.ao.quantization.observer.")
    )


def _sets_weights(module: nn.Module) -> bool:
    """Return whether a hook before the forward pass of ``module`` computes its weight and keeps it in an attribute."""
    kinds = ("torch.nn.utils.weight_norm.WeightNorm", "torch.nn.utils.prune.")
    return any(_has_ancestor(hook, *kinds) for hook in module._forward_pre_hooks.values())


def _is_quantized(module: nn.Module) -> bool:
    kinds = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.ao.nn.sparse.quantized",
             "bitsandbytes.nn", "hqq.", "optimum.quanto", "auto_gptq", "gptqmodel", "awq.",
             "transformers.integrations.finegrained_fp8.")  # fmt: skip
    return _has_ancestor(module, *kinds) and not _has_ancestor(
        module,
        "bitsandbytes.nn.modules.StableEmbedding",
        "holdfast.offload.model.quantised_layers.",  # everything that they compute with is a parameter
        "holdfast.offload.model.fp8_experts.",
    )


def _computes_otherwise(parameter: nn.Parameter) -> bool:
    """Return whether the class of ``parameter`` overrides what operations on it do."""
    kind = type(parameter)
    return (
        kind.__torch_function__ is not nn.Parameter.__torch_function__
        or kind.__torch_dispatch__ is not nn.Parameter.__torch_dispatch__  # type: ignore[attr-defined]
    )


QUANTISED_ADVICE = (
    "Out of core, adapters train on linear layers of bitsandbytes in 4 or 8 bits, in fp8, or on a base in bf16:"
    " load the model with such a quantization_config=, or without one"
)

ELSEWHERE = (
    Preparation(
        _moves_parameters,
        "was dispatched by accelerate (device_map= or an offload hook), which keeps its parameters elsewhere and brings"
        " other tensors for each forward pass",
        "Load the model without device_map=, or call accelerate.hooks.remove_hook_from_submodules(model) while its"
        " values are in memory",
    ),
)

DIVIDED = (
    Preparation(
        lambda p: hasattr(p, "ds_id"),
        "is partitioned by DeepSpeed ZeRO-3, so this process has a part of it at most",
        "Build the model outside of deepspeed.zero.Init() and before deepspeed.initialize(); what DeepSpeed has trained"
        " is read by source=holdfast.From(its checkpoint)",
    ),
)
"""The modules and parameters that both the engine and a ``Checkpointer`` refuse."""

MODULES = (
    *ELSEWHERE,
    Preparation(
        _is_spread,
        "was spread over several places by accelerate (hf_device_map)",
        "Load the model without device_map=: an engine computes on one device per process",
    ),
    Preparation(
        lambda m: isinstance(m, torch.jit.ScriptModule) and next(m.parameters(), None) is not None,
        "was scripted or traced by torch.jit, which holds on to its parameters",
        "Give the model from which it was made",
    ),
    Preparation(
        lambda m: isinstance(m, nn.parallel.DistributedDataParallel),
        "is a DistributedDataParallel, whose gradients would be summed twice",
        "Give model.module: with several ranks, holdfast.offload sums gradients itself",
    ),
    Preparation(
        lambda m: isinstance(m, nn.DataParallel) and len(m.device_ids) > 1,
        "is a DataParallel over several devices",
        "Give model.module: an engine computes on one device per process",
    ),
    Preparation(
        lambda m: _has_ancestor(m, "torch.distributed._composable.replicate."),
        "was given to torch's replicate(), which sums gradients as well",
        "Give the model before replicate(): with several ranks, holdfast.offload sums gradients itself",
    ),
    Preparation(
        _is_quantized,
        "is quantised, and what it computes with is no parameter",
        QUANTISED_ADVICE,
    ),
)
"""The modules that the engine refuses."""

PARAMETERS = (
    *DIVIDED,
    Preparation(
        lambda p: _has_ancestor(p, "torch.distributed.tensor.", "torch.distributed._tensor."),
        "is divided over ranks by FSDP2 or tensor parallelism (DTensor)",
        "Give the model before fully_shard() or parallelize_module(): the engine divides it itself. A Checkpointer"
        " takes it as it is, and source=holdfast.From(a run of that) begins with its values",
    ),
    Preparation(
        lambda p: hasattr(p, "quant_state") or _has_ancestor(p, "bitsandbytes.", "torchao."),
        "is quantised",
        QUANTISED_ADVICE,
    ),
    Preparation(
        _computes_otherwise,
        "is of a class of its own that decides what is computed with it, and blocks compute with plain tensors",
        "Make it a torch.nn.Parameter of a plain torch.Tensor",
    ),
    Preparation(
        lambda p: any(size > 1 and stride == 0 for size, stride in zip(p.shape, p.stride(), strict=True)),
        "is expanded: several of its elements are one in memory, so no update can tell them apart",
        "Make it from tensor.clone()",
    ),
)

IN_BLOCKS = (
    Preparation(
        _changes_buffers,
        "changes its buffers in each forward pass, and blocks run twice",
        "Call eval() on it before this, or take a layer without running statistics (LayerNorm, GroupNorm;"
        " parametrizations.weight_norm)",
    ),
    Preparation(
        _sets_weights,
        "computes its weight in a hook and keeps it in an attribute, which has no gradient of its own",
        "Use torch.nn.utils.parametrizations.weight_norm, or make pruning permanent by torch.nn.utils.prune.remove",
    ),
)
"""The modules that the engine refuses inside of a block."""


def refuse_away(model: nn.Module) -> None:
    """Raise ``ModelNotSupported`` where parameters are not where they seem to be, whoever trains them."""
    _refuse(model, ELSEWHERE, DIVIDED)


def refuse_prepared(model: nn.Module) -> None:
    """Raise ``ModelNotSupported`` naming the first thing in ``model`` that cannot be trained out of core."""
    _refuse(model, MODULES, PARAMETERS)


def refuse_in_block(name: str, block: nn.Module) -> None:
    """Raise ``ModelNotSupported`` naming a module in ``block`` that must not run twice."""
    _refuse(block, IN_BLOCKS, (), name)


def _refuse(
    model: nn.Module, modules: tuple[Preparation, ...], parameters: tuple[Preparation, ...], prefix: str = ""
) -> None:
    for path, module in model.named_modules():
        where = ".".join(filter(None, (prefix, path)))
        found = next((each for each in modules if each.found(module)), None)
        if found is not None:
            name = f"{where} ({type(module).__name__})" if where else f"the model ({type(module).__name__})"
            raise ModelNotSupported(f"{name} {found.what}. {found.way_out}.")
        for key, parameter in module._parameters.items() if parameters else ():
            if parameter is None or is_lazy(parameter):
                continue
            found = next((each for each in parameters if each.found(parameter)), None)
            if found is not None:
                name = f"{where}.{key}" if where else key
                raise ModelNotSupported(f"parameter {name} {found.what}. {found.way_out}.")
