"""Keeping: what of a folder a run needs beside its tensors, so that it goes on and is given back without it."""

from __future__ import annotations

import json
from pathlib import Path

from ..errors import BadInput
from ..regular import home_path
from ..store.files import Disk, write_durably
from ..universal.convert.huggingface import INDEX, SINGLE

CONFIG = "config.json"
ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
"""What a folder of an adapter of PEFT has."""

OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".ot", ".ckpt")
"""Ends of the names of files that hold weights in other formats."""

MODEL = "model"
"""The directory in that of a run where it is kept."""


def checked(folder: str | Path) -> Path:
    """``folder``, which has a configuration. Raises ``BadInput`` if it has none."""
    path = home_path(folder)
    if not (path / CONFIG).is_file():
        what = "is not a directory" if not path.is_dir() else f"has no {CONFIG}"
        raise BadInput(
            f"{path} {what}: name a folder with {CONFIG}, *.safetensors and the files of a tokenizer, as"
            " save_pretrained() writes it. Nothing is downloaded."
        )
    return path


def kept_folder(run: Path) -> Path | None:
    """Where what is needed of its folder lies, if the run has one."""
    return run / MODEL if (run / MODEL / CONFIG).is_file() else None


def keep(folder: Path, destination: Path, dtype: str | None = None) -> None:
    """Copy all files of ``folder`` but weights to ``destination``, durably: configuration, tokenizer, templates,
    licence. The configuration comes last, and says ``dtype`` if that is given."""
    disk = Disk(destination)
    disk.makedirs("")
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and _goes_along(path)]
    for path in [*(each for each in files if each.name != CONFIG), folder / CONFIG]:
        data = path.read_bytes()
        if path.name == CONFIG and dtype is not None:
            told = {key: value for key, value in json.loads(data).items() if key != "torch_dtype"}
            data = json.dumps({**told, "dtype": dtype}, indent=2).encode() + b"\n"
        write_durably(disk, path.name, data, why="file of the model's folder")


def _goes_along(path: Path) -> bool:
    weights = path.suffix in (".safetensors", *OTHER_WEIGHTS) or path.name.endswith(".index.json")
    return not weights and path.name not in (INDEX, SINGLE) and not path.name.startswith(".")
