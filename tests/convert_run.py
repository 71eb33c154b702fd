"""A conversion, as a process that is killed runs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.formats.dcp.dcp_writer import write_dcp
from holdfast.formats.deepspeed.deepspeed_writer import write_deepspeed
from holdfast.formats.foreign_formats import open_source
from holdfast.formats.readers.huggingface import write_huggingface, write_single
from holdfast.formats.run_directory import write_run
from holdfast.formats.torch_writer import write_torch

WRITERS: dict[str, tuple[Callable[..., Any], str]] = {
    "deepspeed": (lambda source, folder: write_deepspeed(source, folder, 1), ""),
    "dcp": (write_dcp, ""),
    "huggingface": (write_huggingface, ""),
    "safetensors": (
        lambda source, folder: write_single(source, folder / "all.safetensors"),
        "all.safetensors",
    ),
    "torch": (lambda source, folder: write_torch(source, folder / "all.pt"), "all.pt"),
    "holdfast": (write_run, ""),
}
"""What writes to a folder, and what is opened of it then."""


def convert(
    source: str, out: str, kind: str, *, said: Callable[..., None], acknowledge: Callable[[int], None]
) -> None:
    WRITERS[kind][0](open_source(Path(source)), Path(out))
    said(finished=True)
