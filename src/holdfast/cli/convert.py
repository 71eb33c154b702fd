"""``convert``: a state of any format that is read, as one of any format that is written.

torch takes over a second to be imported, so only what needs it imports it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadInput
from ..folders.keeping import checked, keep, kept_folder
from ..opening import source_of
from ..store.files import Disk, write_durably
from ..store.target import Target, Url
from ..units import counted, format_bytes, parse_bytes
from ..universal import packs
from ..universal.checking import refuse_unequal
from ..universal.convert.deepspeed import write_deepspeed
from ..universal.convert.huggingface import write_huggingface, write_single
from ..universal.keys import EXTRA
from ..universal.ruled import UnderRules
from ..universal.save import write_run
from ..universal.source import Source
from .flags import parsed
from .output import print_json, transfer_progress
from .record import NAME, read_record
from .runs import open_run

if TYPE_CHECKING:
    from ..models.decoder import DecoderConfig

DTYPES = {
    "fp32": "F32",
    "float32": "F32",
    "bf16": "BF16",
    "bfloat16": "BF16",
    "fp16": "F16",
    "float16": "F16",
}
NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""What config.json calls them."""
FORMATS = ("holdfast", "huggingface", "safetensors", "dcp", "deepspeed")

Told = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class How:
    """What the options say. ``rules`` is a file or a pack, ``values`` a JSON file with the numbers that they name,
    ``model`` the folder whose model was trained."""

    to: str
    dtype: str | None = None
    file_size: str = "5GB"
    stage: int | None = None
    rules: str | None = None
    values: Path | None = None
    model: Path | None = None


def convert(source: str, destination: Path, how: How, *, as_json: bool) -> None:
    """Write ``source`` to ``destination``, and say what that took."""
    _refuse(destination, how)
    began, to = time.perf_counter(), how.to
    opened = source_of(source, open_run)
    run = Target.parse(source).run
    folder = _folder_of(run, how)
    trained = _trained_here(run) if to == "huggingface" and folder is None else None
    opened = _as_wanted(opened, how, folder, trained)
    total = sum(each.atom.nbytes for each in opened.atoms.values() if _goes_along(each.atom.slot, to))
    with transfer_progress("writing", quiet=as_json) as bar:
        task = bar.add_task("writing", total=total)
        about = _write(opened, destination, how, lambda nbytes: bar.advance(task, nbytes))
    if folder is not None:
        keep(folder, destination, dtype=NAMES[DTYPES.get(how.dtype or "fp32", "F32")])
    if trained is not None:
        from ..models.llama import llama_config

        text = json.dumps(llama_config(trained), indent=2)
        write_durably(Disk(destination), "config.json", text.encode(), why="configuration")
    about |= {
        "unread": list(opened.unread),
        "format": to,
        "from": opened.format,
        "bytes": sum(os.path.getsize(path) for path in about["files"]),
        "seconds": time.perf_counter() - began,
    }
    if as_json:
        print_json(about)
    else:
        _say(about, source, destination, opened)


def _as_wanted(opened: Source, how: How, folder: Path | None, trained: DecoderConfig | None) -> Source:
    """``opened`` under the rules that were given, or with the names of the ``folder`` whose model was trained, or with
    those that transformers has for the reference decoder. Raises ``Damaged`` if copies differ that should be equal."""
    rules = None if how.rules is None else packs.find(how.rules, how.values, opened.numbers)
    if trained is not None and rules is None:
        from ..models.llama import PACK

        rules = packs.load(PACK)
    if rules is not None:
        opened = UnderRules(opened, rules)
    elif folder is not None:
        from ..folders.naming import as_folder
        from ..folders.pretrained import empty_model

        refuse_unequal(opened, opened.atoms.values())  # of which the folder has no copies
        opened = as_folder(opened, empty_model(folder))
    refuse_unequal(opened, opened.atoms.values())
    return opened


def _say(about: dict[str, Any], source: str, destination: Path, opened: Source) -> None:
    """What was written, and what of ``source`` was not."""
    to, files = about["format"], counted(len(about["files"]), "file")
    print(
        f"{destination}: {counted(about['tensors'], 'tensor')} of {source} ({opened.format}) as {to},"
        f" {format_bytes(about['bytes'])} in {files}, {about['seconds']:.1f} s"
    )
    if opened.unread:
        print(f"Not in it, since of {source} the weights alone are read: {', '.join(opened.unread)}")
    if about["left_out"]:
        others = sum(each.atom.slot == EXTRA for each in opened.atoms.values())
        counts = {"of the optimizer": about["left_out"] - others, "of neither model nor optimizer": others}
        left = " and ".join(f"{counted(count, 'tensor')} {what}" for what, count in counts.items() if count)
        print(f"Not in it, since {to} holds parameters and buffers alone: {left}")


def _trained_here(run: Path | Url) -> DecoderConfig | None:
    """The sizes of the reference decoder, if ``run`` is one of `holdfast train`, which trains that."""
    config = read_record(run) if isinstance(run, Path) and (run / NAME).exists() else None
    if config is None or config.model.path:
        return None
    from .recipe import decoder_config

    return decoder_config(config)


def _folder_of(run: Path | Url, how: How) -> Path | None:
    """The folder whose model ``run`` trained, if it did, or what is kept of it."""
    if how.model is not None:
        return checked(how.model)
    return kept_folder(run) if how.to == "huggingface" and isinstance(run, Path) else None


def _refuse(destination: Path, how: How) -> None:
    to, dtype, stage = how.to, how.dtype, how.stage
    if to not in FORMATS:
        raise BadInput(f"--to {to} is not one of {', '.join(FORMATS)}")
    if dtype is not None and dtype not in DTYPES:
        raise BadInput(f"--dtype {dtype} is not one of {', '.join(DTYPES)}")
    if how.model is not None and (to != "huggingface" or how.rules is not None):
        raise BadInput(
            "--model names the folder that comes back: it is for --to huggingface, without --rules"
        )
    if dtype is not None and to in ("holdfast", "dcp", "deepspeed"):
        raise BadInput(
            "--dtype is for exports of parameters: a training state keeps its tensors as training had them"
        )
    parsed("--file-size", parse_bytes, how.file_size)
    if (to == "deepspeed") != (stage is not None):
        raise BadInput(
            "--to deepspeed needs --stage 1, 2 or 3, that of the ZeRO that will load it; nothing else has one"
        )
    if to == "safetensors" and destination.suffix != ".safetensors":
        raise BadInput(f"--to safetensors writes one file, and {destination} does not end in .safetensors")


def _goes_along(slot: str, to: str) -> bool:
    return to != "huggingface" or slot in ("param", "buffer")


def _write(source: Source, destination: Path, how: How, told: Told) -> dict[str, Any]:
    left_out = [key for key, each in source.atoms.items() if not _goes_along(each.atom.slot, how.to)]
    dtype = DTYPES.get(how.dtype or "")
    if how.to == "huggingface":
        size = parse_bytes(how.file_size)
        files = write_huggingface(source, destination, dtype=dtype, file_bytes=size, told=told)
    elif how.to == "deepspeed":
        files = write_deepspeed(source, destination, how.stage or 0, told=told)
    elif how.to == "safetensors":
        files = [write_single(source, destination, dtype=dtype, told=told)]
    elif how.to == "dcp":
        from ..universal.convert.dcp_writer import write_dcp

        files = list(write_dcp(source, destination, told=told).glob("*.distcp"))
    else:
        files = [destination / ref.path for ref in write_run(source, destination, told).files.values()]
    tensors = len(source.atoms) - len(left_out)
    return {"files": [str(path) for path in files], "tensors": tensors, "left_out": len(left_out)}
