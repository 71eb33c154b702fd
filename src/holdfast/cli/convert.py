"""The verb ``convert``: write a state of any readable format in any writable one.

Importing torch takes over a second, so only the code that needs torch imports it.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadInput
from ..formats import packs
from ..formats.deepspeed.deepspeed_writer import write_deepspeed
from ..formats.entry_keys import EXTRA
from ..formats.load import refuse_unequal
from ..formats.readers.huggingface import write_huggingface, write_named, write_single
from ..formats.rules_source import UnderRules
from ..formats.run_directory import write_run
from ..formats.source import Source
from ..formats.torch_writer import SUFFIXES as TORCH_SUFFIXES
from ..formats.torch_writer import write_torch
from ..models.keeping import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    CONFIG,
    checked,
    keep,
    kept_adapter,
    kept_folder,
)
from ..opening import source_of
from ..quantities import counted, format_bytes, parse_bytes
from ..store.disk import Disk, write_durably
from ..store.object_store import NamedCommit, Url
from .foreign_states import passed_over
from .output import parsed, print_json, transfer_progress
from .runs import open_run
from .train.kept_config import NAME, read_record

if TYPE_CHECKING:
    from ..models.decoder import DecoderConfig
    from ..models.exports import Adapter


DTYPES = {
    "fp32": "F32",
    "float32": "F32",
    "bf16": "BF16",
    "bfloat16": "BF16",
    "fp16": "F16",
    "float16": "F16",
}
NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Names of dtypes in config.json."""
FORMATS = ("holdfast", "huggingface", "peft", "safetensors", "dcp", "deepspeed", "torch")
Report = Callable[[int], None]
"""A function that gets the number of bytes that were read."""


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """The options of the command.

    ``rules`` is a file or a pack, ``values`` a JSON file with the numbers that rules name, ``model`` the folder of the
    model that was trained, ``merge`` whether adapters are merged into it.
    """

    to: str
    dtype: str | None = None
    file_size: str = "5GB"
    stage: int | None = None
    rules: str | None = None
    values: Path | None = None
    model: Path | None = None
    merge: bool = False


def convert(source: str, destination: Path, how: ConvertOptions, *, as_json: bool) -> None:
    """Write ``source`` to ``destination``, and print what that took."""
    _refuse(destination, how)
    named = how.to
    if how.to == "peft":
        how = replace(how, to="huggingface", model=how.model or _kept_adapter(source))
        _refuse_no_adapter(how.model)
    began, to = time.perf_counter(), how.to
    opened = source_of(source, open_run)
    if to == "huggingface":
        export = _export_of(source, opened, how)
    else:
        export = Export(opened if how.rules is None else _under_rules(opened, how))
    opened = export.source
    if opened.passed_over:
        warnings.warn(f"not written, since Holdfast has no such type: {passed_over(opened)}", stacklevel=2)
    refuse_unequal(opened, opened.atoms.values())
    total = sum(each.atom.nbytes for key, each in opened.atoms.items() if export.has(key, to))
    with transfer_progress("writing", quiet=as_json) as bar:
        task = bar.add_task("writing", total=total)
        about = _write(export, destination, how, lambda nbytes: bar.advance(task, nbytes))
    export.finish(destination)
    about |= {
        "unread": list(opened.unread),
        "format": named,
        "from": opened.format,
        "bytes": sum(os.path.getsize(path) for path in about["files"]),
        "seconds": time.perf_counter() - began,
    }
    if as_json:
        print_json(about)
    else:
        _say(about, source, destination, export)


def write_folder(source: str, destination: Path) -> None:
    """Write the weights that ``source`` names as a folder of Hugging Face, adapters merged, and print nothing."""
    how = ConvertOptions(to="huggingface", merge=_kept_adapter(source) is not None)
    export = _export_of(source, source_of(source, open_run), how)
    refuse_unequal(export.source, export.source.atoms.values())
    _write(export, destination, how, lambda nbytes: None)
    export.finish(destination)


@dataclass(frozen=True)
class Export:
    """The tensors of ``source`` to write; for a folder with an ``adapter``, only the adapter's tensors."""

    source: Source
    finish: Callable[[Path], object] = lambda destination: None
    """A function that writes the files beside the tensors into the destination."""
    adapter: Adapter | None = None

    def has(self, key: str, to: str) -> bool:
        """Return whether the tensor entry ``key`` is written."""
        if self.adapter is not None:
            return key in self.adapter.names
        return to != "huggingface" or self.source.atoms[key].atom.slot in ("param", "buffer")


def _export_of(text: str, opened: Source, how: ConvertOptions) -> Export:
    """Return how ``opened``, which ``text`` names, becomes a folder that transformers or PEFT loads whole.

    Raises ``BadInput`` if nothing tells its model, ``RunMismatch`` if it belongs to another model, ``Damaged`` if
    copies that should be equal differ.
    """
    if how.merge:
        return _export_merged(text, opened, how)
    run, own = NamedCommit.parse(text).run, Path(text)
    if how.model is not None and _has_adapter(how.model):
        return _export_of_adapter(opened, how.model)
    if how.model is None and how.rules is None and _kept_adapter(text) is not None:
        raise BadInput(
            f"{text} trained adapters: --to peft writes them alone, and --to huggingface --merge the model with the"
            " adapters merged in"
        )
    if how.model is None and how.rules is None and _is_folder_of_others(own, opened):
        return Export(opened, partial(keep, own, dtype=None if how.dtype is None else _type_in(opened, how)))
    folder = checked(how.model) if how.model is not None else _kept(run)
    trained = _trained_here(run) if folder is None else None
    renamed = trained is not None or how.rules is not None
    refuse_unequal(opened, opened.atoms.values())  # a folder holds no copies
    as_llama, config = None, b""
    if trained is not None:
        from ..models.exports import PACK, llama_config

        as_llama = UnderRules(opened, packs.load(PACK))
        config = json.dumps(llama_config(trained), indent=2).encode()
    if renamed:
        opened = as_llama if how.rules is None and as_llama is not None else _under_rules(opened, how)
    if folder is not None:
        from ..models.exports import loadable

        written = loadable(opened, folder, renamed=renamed)
        return Export(written, partial(keep, folder, dtype=_type_in(opened, how)))
    if trained is not None and as_llama is not None and _weights_of(opened) == _weights_of(as_llama):
        return Export(opened, partial(_write_beside, name="config.json", data=config))
    if not renamed:
        from ..models.exports import refuse_nameless

        refuse_nameless(opened)
    warnings.warn(
        f"{text}: the folder gets no config.json, and nothing tells whether the names that the rules give are those of"
        " the model. With --model FOLDER they are compared, and its configuration and tokenizer come along.",
        stacklevel=2,
    )
    return Export(opened)


def _export_merged(text: str, opened: Source, how: ConvertOptions) -> Export:
    """Return how ``opened``, a run with adapters, becomes the folder of the model with the adapters merged in.

    Raises ``BadInput`` if the configuration of the adapters or of the model is not to be found.
    """
    adapter = how.model if _has_adapter(how.model) else _kept_adapter(text)
    if adapter is None:
        raise BadInput(
            f"{text} does not say which adapters it trained: give the folder with their configuration,"
            f" --model FOLDER with {ADAPTER_CONFIG}, which model.save_pretrained(FOLDER) writes at any time"
        )
    run = NamedCommit.parse(text).run
    refuse_unequal(opened, opened.atoms.values())  # a folder holds no copies
    from ..models.exports import loadable, lora_config_in
    from ..models.merged_adapters import merged
    from ..state.plain_tensors import FROM_NAME

    dtype = None if how.dtype is None else FROM_NAME[DTYPES[how.dtype]]
    told = lora_config_in(adapter)
    folder = checked(_kept(run) or told.get("base_model_name_or_path") or "")
    written = loadable(merged(opened, adapter, folder, dtype), folder, renamed=False, plain=True)
    return Export(written, partial(keep, folder, dtype=_type_in(written, how), plain=True))


def _export_of_adapter(opened: Source, folder: Path) -> Export:
    from ..models.exports import adapter_in

    config = (folder / ADAPTER_CONFIG).read_bytes()
    return Export(
        opened, partial(_write_beside, name=ADAPTER_CONFIG, data=config), adapter_in(opened, folder)
    )


def _write_beside(destination: Path, *, name: str, data: bytes) -> None:
    write_durably(Disk(destination), name, data, why="configuration")


def _under_rules(opened: Source, how: ConvertOptions) -> Source:
    """Return ``opened`` as seen through the given rules."""
    return UnderRules(opened, packs.find(how.rules or "", how.values, opened.numbers))


def _weights_of(source: Source) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters and buffers by name."""
    atoms = (each.atom for each in source.atoms.values())
    return {atom.name: atom.shape for atom in atoms if atom.slot in ("param", "buffer")}


def _is_folder_of_others(path: Path, opened: Source) -> bool:
    """Return whether ``opened`` is a Hugging Face folder already, with the configuration of its model."""
    return opened.format in ("safetensors", "torch.save") and (path / CONFIG).is_file()


def _type_in(source: Source, how: ConvertOptions) -> str:
    """Return the name in ``config.json`` of the written dtype: the requested one, else that of most elements."""
    if how.dtype is not None:
        return NAMES[DTYPES[how.dtype]]
    elements = Counter[str]()
    for each in source.atoms.values():
        if each.atom.slot == "param" and each.atom.dtype in NAMES:
            elements[each.atom.dtype] += each.atom.elements
    return NAMES[max(elements, key=lambda dtype: elements[dtype], default="F32")]


def _say(about: dict[str, Any], source: str, destination: Path, export: Export) -> None:
    """Print what was written, and what of ``source`` was not."""
    opened = export.source
    to, files = about["format"], counted(len(about["files"]), "file")
    print(
        f"{destination}: {counted(about['tensors'], 'tensor')} of {source} ({opened.format}) as {to},"
        f" {format_bytes(about['bytes'])} in {files}, {about['seconds']:.1f} s"
    )
    if opened.unread:
        print(f"Not in it, since of {source} the weights alone are read: {', '.join(opened.unread)}")
    if export.adapter is not None:
        print(
            "Not in it, since a folder of an adapter holds that alone: the model's own weights, the optimizer's state"
        )
    elif about["left_out"]:
        others = sum(each.atom.slot == EXTRA for each in opened.atoms.values())
        counts = {"of the optimizer": about["left_out"] - others, "of neither model nor optimizer": others}
        left = " and ".join(f"{counted(count, 'tensor')} {what}" for what, count in counts.items() if count)
        print(f"Not in it, since {to} holds parameters and buffers alone: {left}")


def _trained_here(run: Path | Url) -> DecoderConfig | None:
    """Return the sizes of the reference decoder, if ``run`` is a run of `holdfast train` that trains it."""
    config = read_record(run) if isinstance(run, Path) and (run / NAME).exists() else None
    if config is None or config.model.path:
        return None
    from .train.recipe import decoder_config

    return decoder_config(config)


def _kept(run: Path | Url) -> Path | None:
    """Return the folder of the trained model that ``run`` keeps; None if it keeps none."""
    return kept_folder(run) if isinstance(run, Path) else None


def _has_adapter(folder: Path | None) -> bool:
    """Return whether ``folder`` has the configuration of an adapter."""
    return folder is not None and (folder / ADAPTER_CONFIG).is_file()


def _kept_adapter(text: str) -> Path | None:
    """Return the folder with the configuration of the adapters that the run in ``text`` keeps; None if it has none."""
    run = NamedCommit.parse(text).run
    return kept_adapter(run) if isinstance(run, Path) else None


def _refuse(destination: Path, how: ConvertOptions) -> None:
    to, dtype, stage = how.to, how.dtype, how.stage
    if to not in FORMATS:
        raise BadInput(f"--to {to} is not one of {', '.join(FORMATS)}")
    if dtype is not None and dtype not in DTYPES:
        raise BadInput(f"--dtype {dtype} is not one of {', '.join(DTYPES)}")
    if how.merge and (to != "huggingface" or how.rules is not None):
        raise BadInput("--merge writes the folder of a model: it is for --to huggingface, without --rules")
    if how.model is not None and to not in ("huggingface", "peft"):
        raise BadInput(
            "--model names the folder of the model that was trained: it is for --to huggingface or peft"
        )
    if dtype is not None and to not in ("huggingface", "peft", "safetensors"):
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
    if to == "torch" and destination.suffix not in TORCH_SUFFIXES:
        raise BadInput(f"--to torch writes one file, and {destination} does not end in .pt or .pth")


def _refuse_no_adapter(folder: Path | None) -> None:
    """Raise ``BadInput`` unless ``folder`` has the configuration of an adapter."""
    if not _has_adapter(folder):
        raise BadInput(
            f"--to peft writes an adapter alone, and needs its configuration: --model FOLDER with {ADAPTER_CONFIG},"
            " which model.save_pretrained(FOLDER) writes at any time"
        )


def _refuse_packed(source: Source, how: ConvertOptions) -> None:
    """Raise ``BadInput`` if ``source`` has quantised weights: another dtype would change what they stand for."""
    from ..models.quantised_weights import (
        unpacks_weight,  # with torch, which tensors of another dtype need anyway
    )

    for stored in source.atoms.values():
        if unpacks_weight(stored.atom.name):
            raise BadInput(
                f"--dtype {how.dtype} would round the scales of quantised weights ({stored.atom.name}). Leave it out"
            )


def _write(export: Export, destination: Path, how: ConvertOptions, report: Report) -> dict[str, Any]:
    source, adapter = export.source, export.adapter
    tensors = sum(export.has(key, how.to) for key in source.atoms)
    dtype = DTYPES.get(how.dtype or "")
    if dtype is not None and adapter is None:
        _refuse_packed(source, how)
    if adapter is not None:
        path = destination / ADAPTER_FILE
        files = [write_named(source, path, adapter.names, dtype=dtype, report=report)]
    elif how.to == "huggingface":
        size = parse_bytes(how.file_size)
        files = write_huggingface(source, destination, dtype=dtype, file_bytes=size, report=report)
    elif how.to == "deepspeed":
        files = write_deepspeed(source, destination, how.stage or 0, report=report)
    elif how.to == "safetensors":
        files = [write_single(source, destination, dtype=dtype, report=report)]
    elif how.to == "dcp":
        from ..formats.dcp.dcp_writer import write_dcp

        files = list(write_dcp(source, destination, report=report).glob("*.distcp"))
    elif how.to == "torch":
        files = [write_torch(source, destination, report=report)]
    else:
        files = [destination / ref.path for ref in write_run(source, destination, report).files.values()]
    left_out = len(source.atoms) - tensors
    return {"files": [str(path) for path in files], "tensors": tensors, "left_out": left_out}
