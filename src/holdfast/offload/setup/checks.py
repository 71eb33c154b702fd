"""The checks of the arguments of ``offload``, before anything else is done with them.

Each check refuses a combination that could not work, with the way out, or warns of one that is slow. Nothing is changed
or written.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from ...accelerators import emulates_bf16, is_accelerator, name_of
from ...errors import BadInput, ModelNotSupported
from ...measure.hardware_rates import product_seconds
from ...optim.mezo import epsilon_of
from ...schedule.work import ORDERS
from ...state.capture import join
from ..model.blocks import Blocks, candidates, configurations, is_compiled, parameter_bytes
from ..model.side_outputs import recorder
from ..offload_options import IO, Clipping, Durability, Placement, Precision
from .step_planning import SCHEDULES, Budget


def check_choices(schedule: str, order: str, normalize: Any) -> None:
    for name, value, allowed in (
        ("schedule", schedule, tuple(SCHEDULES)),
        ("order", order, ORDERS),
        ("normalize", "tokens" if callable(normalize) else normalize, ("micro_batches", "tokens", "sum")),
    ):
        if value not in allowed:
            raise BadInput(f"{name} = {value!r} is not one of {', '.join(allowed)}")
    if order == "snake" and schedule != "vertical":
        raise BadInput(
            "order='snake' is of the vertical schedule: in the horizontal one each micro-batch goes through the model"
            " by itself. Leave one of the two out."
        )


OBJECTS = {
    "placement": Placement, "clipping": Clipping, "precision": Precision, "durability": Durability, "io": IO,
}  # fmt: skip
"""The arguments that are objects, and their classes."""


def check_objects(**options: Any) -> None:
    """Raise ``BadInput`` for an argument of ``OBJECTS`` that is no such object, or one that cannot be meant."""
    for name, given in options.items():
        if not isinstance(given, OBJECTS[name]):
            raise BadInput(f"{name} = {given!r} is not a holdfast.{OBJECTS[name].__name__}")
        given.check()


def check_together(clipping: Clipping, precision: Precision, schedule: str, durability: Durability) -> None:
    """Raise ``BadInput`` for options that exclude each other."""
    if clipping.mode == "per_block" and precision.dtype == "fp16":
        raise BadInput(
            "precision='fp16' skips a step in which anything has overflowed, which the clipping mode 'per_block' knows"
            " too late. Use the mode 'defer' or 'speculate', or precision='bf16'."
        )
    if clipping.mode != "speculate":
        return
    if schedule != "vertical":
        raise BadInput(
            "clipping: the mode 'speculate' is of the vertical schedule: in the horizontal one every update comes after"
            " the norm anyway. Leave it out."
        )
    if durability.commit_every != 1:
        raise BadInput(
            "clipping: the mode 'speculate' undoes an update from the commit of the step before, so it needs one at"
            f" every step: commit_every=1 (here {durability.commit_every!r}), or the mode 'defer'."
        )


def check_budget(budget: Budget | str | None) -> None:
    if budget not in (None, "auto") and not isinstance(budget, Budget):
        raise BadInput(
            f"budget = {budget!r} does not say of what: write budget=holdfast.Budget(host={budget!r}), and device= for "
            'a separate device; or budget="auto", which is what is free.'
        )


def check_source(source: Any) -> None:
    """Raise ``BadInput`` for a path in the place of an object with ``open()``."""
    if isinstance(source, str | os.PathLike):
        raise BadInput(f"source = {str(source)!r} is a path: write source=holdfast.From({str(source)!r})")


RECORDED = ("output_hidden_states", "output_attentions")
"""Settings of transformers models that keep values of every block until the end of the forward pass."""
ROUTERS = "output_router_logits"
"""Setting of transformers models with experts that records what the balancing loss is computed from."""
SKIPPING = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
"""Settings of transformers models that leave layers out of a forward pass at random."""


def check_recorded(model: nn.Module, blocks: Blocks) -> None:
    """Raise ``ModelNotSupported`` if the model records what would fill the memory, or what cannot be recorded here."""
    for path, config in configurations(model):
        for name in RECORDED:
            if getattr(config, name, False):
                raise ModelNotSupported(
                    f"{path}.{name} keeps values of every block on the device, for all micro-batches, which no budget"
                    f" counts. Set {path}.{name} = False."
                )
        if not getattr(config, ROUTERS, False):
            continue
        pairs = zip(blocks.names, blocks.modules, strict=True)
        compiled = next((name for name, block in pairs if is_compiled(block)), None)
        if compiled is not None or recorder() is None:
            why = "this version of transformers records in another way"
            why = f"{compiled} is compiled" if compiled else why
            raise ModelNotSupported(
                f"{path}.{ROUTERS} records what happens inside of blocks, and {why}, so nothing would be recorded and"
                f" experts would be trained without their balancing loss. Set {path}.{ROUTERS} = False to do that."
            )


def check_skipped(model: nn.Module, blocks: Blocks) -> None:
    """Raise ``ModelNotSupported`` if a module that contains blocks skips layers at random."""
    for path, module in model.named_modules():
        config = getattr(module, "config", None)
        for name in SKIPPING:
            fraction = getattr(config, name, 0)
            if fraction and any(each in blocks.modules for each in module.modules()):
                place = f"{join('model', path) if path else 'model'}.config.{name}"
                raise ModelNotSupported(
                    f"{place} = {fraction} skips layers at random, and every micro-batch must call every block."
                    f" Build the model with {name} = 0."
                )


def check_renormalised(model: nn.Module) -> None:
    """Raise ``ModelNotSupported`` for an embedding whose forward changes weights (``max_norm``).

    The forward would change only copies of the weights.
    """
    for name, module in model.named_modules():
        kinds = (nn.Embedding, nn.EmbeddingBag)
        if isinstance(module, kinds) and module.max_norm is not None:
            raise ModelNotSupported(
                f"{name or 'the model'} has max_norm={module.max_norm}, by which the forward pass changes weights, of"
                " which the run would know nothing. Leave it out."
            )


def check_compiled(model: nn.Module, blocks: Blocks) -> None:
    """Raise ``ModelNotSupported`` for a compiled module that contains blocks, and for a compiled block with hooks.

    Code around the blocks is suspended at each block call, so only blocks may be compiled.
    """
    whole = {id(module) for block in blocks.modules for module in block.modules()}
    for name, module in model.named_modules():
        compiled = module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
        if compiled and id(module) not in whole and any(b in blocks.modules for b in module.modules()):
            raise ModelNotSupported(
                f"{name or 'the model'} is compiled with its blocks in it, and these run one by one. Compile the blocks"
                f" instead, here {len(blocks.names)} like {blocks.names[0]}: for block in blocks: block.compile()."
            )
    for name, block in zip(blocks.names, blocks.modules, strict=True):
        if block._compiled_call_impl is not None and (block._forward_hooks or block._forward_pre_hooks):
            raise ModelNotSupported(
                f"{name} is compiled and has hooks on its forward, which would be called twice. Remove them, or wrap"
                " it: blocks[i] = torch.compile(blocks[i])."
            )


def check_graphs(device: torch.device, blocks: Blocks) -> None:
    """Raise ``ModelNotSupported`` for a block that is compiled to replay recorded graphs of ``device``.

    The block's parameters lie elsewhere in every pass, and a graph's output is overwritten while it is still being
    copied.
    """
    if not is_accelerator(device):
        return
    for name, block in zip(blocks.names, blocks.modules, strict=True):
        for module in block.modules():
            compiled = module if type(module).__name__ == "OptimizedModule" else module._compiled_call_impl
            config = getattr(compiled, "get_compiler_config", lambda: None)() or {}
            if config.get("triton.cudagraphs"):
                raise ModelNotSupported(
                    f'{name} is compiled with mode="reduce-overhead" (CUDA graphs), which replays the addresses of its'
                    ' parameters, and these move. Compile blocks without a mode, or with "max-autotune-no-cudagraphs".'
                )


def check_sample(sample: Any) -> None:
    if sample is not None and not isinstance(sample, (Mapping, tuple, list)):
        raise BadInput(
            f"sample is a {type(sample).__name__}, not a micro-batch as engine.step takes it: a dict of the model's "
            "keyword arguments, or a tuple of its positional ones."
        )


def check_zeroth(
    groups: Sequence[Mapping[str, Any]],
    schedule: str,
    order: str,
    placement: Placement,
    clipping: Clipping,
    precision: Precision,
) -> None:
    """Raise ``BadInput`` for arguments that do not apply to MeZO, which has no gradients, backward pass or moments."""
    forward_only = "there is no backward pass for which something could stay"
    no_norm = "there is no gradient whose norm could be taken"
    waits = "every update waits for the next step's forward pass"
    for name, given, usual, why in (
        ("schedule", schedule, ("vertical",), "it has a schedule of its own, of forward passes alone"),
        ("order", order, ("plain",), "nothing flows back through the blocks"),
        ("delayed_fraction", placement.delayed_fraction, (None, "auto"), waits),
        ("expert_slots", placement.expert_slots, (None,), "a pass computes a whole block twice"),
        ("recomputed_fraction", placement.recomputed_fraction, (None, "auto", 1, 1.0), forward_only),
        ("clipping: norm", clipping.norm, (None,), no_norm),
        ("clipping: mode", clipping.mode, ("auto", "defer"), no_norm),
    ):
        if given not in usual:
            raise BadInput(f"{name} = {given!r} is not of MeZO: {why}. Leave it out.")
    if precision.dtype == "fp16":
        raise BadInput("precision='fp16' is not of MeZO: losses are not scaled. Use 'bf16' or 'fp32'.")
    try:
        epsilon_of(groups)
    except ValueError as error:
        raise BadInput(f"{error}. Give all groups of MeZO the same.") from None


def warn_of_resident(model: nn.Module, blocks: Blocks) -> None:
    """Warn if blocks chosen by default have less than half of the parameters, and others might be added."""
    streamed, whole = sum(map(parameter_bytes, blocks.modules)), parameter_bytes(model)
    others = [(name, each) for name, each in candidates(model) if each[0] not in blocks.modules]
    others = [(name, each) for name, each in others if any(True for _ in each[0].children())]
    if others and 2 * streamed < whole:
        name, other = others[0]
        warnings.warn(
            f"blocks are {blocks.summary}, with {streamed / whole:.0%} of the parameters; all others stay in memory,"
            f" with their optimizer state. {name} has {parameter_bytes(other) / whole:.0%}: to stream both, pass"
            " blocks=[*one, *other], in the order in which they run",
            stacklevel=5,
        )


MANY = 4
"""Factor by which matrix products must be faster in fp32 than in bf16 for a warning."""


def warn_of_slow_bf16(device: torch.device, dtype: str) -> None:
    """Warn if ``dtype`` is bf16 and ``device`` computes many times faster in fp32 or fp16.

    Such a device is a processor that was timed, or an accelerator that reports that it emulates bf16.
    """
    if dtype == "bf16" and is_accelerator(device) and emulates_bf16(device):
        warnings.warn(
            f'precision="bf16": {name_of(device)} has no arithmetic in bf16 and emulates it, many times slower, so'
            ' "fp16" or "fp32" trains faster. A run keeps what it began with',
            stacklevel=5,
        )
    if dtype == "bf16" and device.type == "cpu" and (times := _times_as_fast()) >= MANY:
        warnings.warn(
            f'precision="bf16": this processor multiplies matrices {times:.0f} times as fast in fp32, so "fp32" may'
            " train that much faster. A run keeps what it began with",
            stacklevel=5,
        )


@cache
def _times_as_fast() -> float:
    """Return how many times faster this processor multiplies matrices in fp32 than in bf16.

    Measured once, with the threads that the process has at the first call.
    """
    return product_seconds("bfloat16") / product_seconds("float32")
