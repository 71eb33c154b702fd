"""The files of a model's folder other than weights, copied into a run.

With these, the run resumes and is exported without the original folder.
"""

from __future__ import annotations

import json
from pathlib import Path

from ..errors import BadInput
from ..formats.readers.huggingface import INDEX, SINGLE
from ..regular_files import home_path
from ..store.disk import Disk, write_durably

CONFIG = "config.json"
ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
"""The files of a folder that holds an adapter of PEFT."""
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".ot", ".ckpt")
"""The suffixes of files that hold weights in other formats."""
ADAPTER = "adapter"
"""The directory within a run for the configuration of its adapters."""
MODEL = "model"
"""The directory within a run for these files."""


def checked(folder: str | Path) -> Path:
    """Return ``folder`` as a path. Raises ``BadInput`` if it has no configuration."""
    path = home_path(folder)
    if not (path / CONFIG).is_file():
        what = "is not a directory" if not path.is_dir() else f"has no {CONFIG}"
        raise BadInput(
            f"{path} {what}: name a folder with {CONFIG}, *.safetensors and the files of a tokenizer, as"
            " save_pretrained() writes it. Nothing is downloaded."
        )
    return path


def kept_folder(run: Path) -> Path | None:
    """Return the directory of the kept files, or None if the run has none."""
    return run / MODEL if (run / MODEL / CONFIG).is_file() else None


def kept_adapter(run: Path) -> Path | None:
    """Return the directory of the configuration of a run's adapters, or None if it trains none."""
    return run / ADAPTER if (run / ADAPTER / ADAPTER_CONFIG).is_file() else None


def keep(folder: Path, destination: Path, dtype: str | None = None, *, plain: bool = False) -> None:
    """Copy all files of ``folder`` except weights to ``destination``, durably.

    These are configuration, tokenizer, templates and licence. The configuration comes last, with its dtype set to
    ``dtype`` if that is given. With ``plain`` it does not say that weights are quantised.
    """
    disk = Disk(destination)
    disk.makedirs("")
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and _goes_along(path)]
    for path in [*(each for each in files if each.name != CONFIG), folder / CONFIG]:
        data = path.read_bytes()
        if path.name == CONFIG and dtype is not None:
            left_out = ("torch_dtype", "quantization_config") if plain else ("torch_dtype",)
            told = {key: value for key, value in json.loads(data).items() if key not in left_out}
            data = json.dumps({**told, "dtype": dtype}, indent=2).encode() + b"\n"
        write_durably(disk, path.name, data, why="file of the model's folder")


def _goes_along(path: Path) -> bool:
    weights = path.suffix in (".safetensors", *OTHER_WEIGHTS) or path.name.endswith(".index.json")
    return not weights and path.name not in (INDEX, SINGLE) and not path.name.startswith(".")
