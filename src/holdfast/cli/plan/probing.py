"""The verb ``probe``: measure this machine, and print the result as a profile for the planner.

The profile names the source of each figure, and ``holdfast plan --machine FILE`` reads it. Bad options are refused
before anything is measured. Called by ``plan_commands``.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...measure.machine_probe import Probed, free_host_bytes, probe_machine
from ...models.block_timing import measure_block
from ...offload.memory.device import open_device
from ...offload.model.model_parts import DTYPES
from ...profiles import load_model, to_toml
from ...quantities import format_seconds, parse_bytes
from ..machine import choose_dtype
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
    dtype = DTYPES[choose_dtype(str(target))]
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
