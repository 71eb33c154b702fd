"""The verb ``probe``: measure this machine, and print the result as a profile for the planner.

The profile names the source of each figure, and ``holdfast plan --machine FILE`` reads it. Bad options are refused
before anything is measured. Of a decoder, a block of a usual size is timed first, forward and backward. The block of a
named model is timed only if it will end in the given time and fits on the device; otherwise a warning says that a
smaller one was timed. Called by ``plan_commands``.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ...accelerators import is_accelerator, synchronize
from ...errors import ConfigError
from ...measure.free_memory import free_host_bytes
from ...measure.hardware_rates import fast_dtype, median_seconds
from ...measure.machine_probe import BlockTimes, Probed, precision_of, probe_machine
from ...models.decoder import Block, DecoderConfig, rotary_table
from ...offload.memory.device import open_device
from ...offload.model.model_parts import DTYPES
from ...profiles import ModelProfile, load_model, to_toml
from ...quantities import format_seconds, parse_bytes
from ..output import error_console, parsed, print_json, refuse_no_directory


def probe(
    directory: Path,
    out: Path | None,
    *,
    model: str | None,
    device: str,
    seconds: float,
    size: str,
    as_json: bool,
) -> None:
    """Measure the machine and print the profile, or write it to ``out``. Bad options are refused before measuring."""
    if not directory.is_dir():
        raise ConfigError(f"--dir {directory} is no directory; name one on the SSD that a run would use")
    refuse_no_directory("--out", out)
    file_bytes = parsed("--size", parse_bytes, size)
    chosen = None if model is None else load_model(model)
    target = open_device(device).torch_device
    dtype = DTYPES[fast_dtype(target)]
    with error_console().status("measuring") as status:
        found = probe_machine(
            directory,
            target,
            free_host_bytes(),
            file_bytes=file_bytes,
            seconds=seconds,
            time_block=lambda seconds: measure_block(target, chosen, seconds, dtype),
            say=lambda what: status.update(f"measuring {what}"),
        )
    text = _text(found)
    if out is not None:
        out.write_text(text, encoding="utf-8")
    if as_json:
        print_json(_document(found))
    elif out is None:
        print(text, end="")
    else:
        print(f"Measured in {format_seconds(found.seconds)}, written to {out}. Plan with:")
        print(f"  holdfast plan --model gpt-46m --machine {out}")


def _text(found: Probed) -> str:
    times = (
        f"# One micro-batch through one block: forward {found.block.forward_seconds * 1e3:.3g} ms, backward with "
        f"recomputation {found.block.backward_seconds * 1e3:.3g} ms.\n"
    )
    return times + to_toml(found.profile, found.sources)


def _document(found: Probed) -> dict[str, Any]:
    return {
        "profile": asdict(found.profile),
        "sources": found.sources,
        "ssd": asdict(found.ssd),
        "block": asdict(found.block),
        "copies": asdict(found.copies) if found.copies else None,
        "seconds": found.seconds,
    }


ON_CPU = ModelProfile(
    description="a block of the reference decoder",
    blocks=1,
    width=512,
    heads=8,
    hidden=1408,
    gated=True,
    vocabulary=256,
    sequence=256,
)
"""The block that is timed unless a model is named."""
ON_DEVICE = replace(ON_CPU, width=4096, heads=32, hidden=11008, sequence=2048, micro_batch=2)
TIMES = 2
"""Least number of times that a pass is timed, including the first, which does not count."""


def measure_block(
    device: torch.device, model: ModelProfile | None, seconds: float, dtype: torch.dtype
) -> BlockTimes:
    """Time a decoder's block in ``dtype``, with ``model``'s sizes if it is fast enough and fits on the device.

    The block has a gated MLP and no biases, whatever the model has.
    """
    usual = ON_DEVICE if is_accelerator(device) else ON_CPU
    if model is None:
        return _time_block(device, usual, seconds, dtype)
    small = _time_block(device, usual, seconds / 2, dtype)
    expected = TIMES * 4 * model.forward_flop / small.flop_per_second
    why = f"would take about {expected:.0f} s" if expected > seconds else ""
    try:
        if not why:
            return _time_block(device, model, seconds / 2, dtype)
    except torch.OutOfMemoryError:
        why = "does not fit on the device"
    warnings.warn(f"a block of {model.description} {why}; a smaller one was timed", stacklevel=2)
    return small


def _time_block(device: torch.device, model: ModelProfile, seconds: float, dtype: torch.dtype) -> BlockTimes:
    timed = replace(model, gated=True, biases=False, head_size=0)
    config = DecoderConfig(
        blocks=1,
        width=timed.width,
        heads=timed.heads,
        kv_heads=timed.kv_heads or timed.heads,
        context=timed.sequence,
        hidden=timed.hidden or 4 * timed.width,
    )
    with torch.device(device):
        block = Block(config).to(dtype)
        x = torch.randn(timed.micro_batch, timed.sequence, timed.width, dtype=dtype)
    cos, sin = (table.to(device) for table in rotary_table(timed.sequence, config.head_size, 10000.0))

    def forward() -> None:
        with torch.no_grad():
            block(x, cos, sin)
        synchronize(device)

    def backward() -> None:
        block(x, cos, sin).sum().backward()
        block.zero_grad()
        synchronize(device)

    one, other = median_seconds(forward, seconds / 2), median_seconds(backward, seconds / 2)
    rate = 4 * timed.forward_flop / (one + other)
    what = f"a block of width {timed.width}, {timed.tokens} tokens, in {str(dtype).removeprefix('torch.')}"
    return BlockTimes(one, other, rate, what, precision_of(dtype))
