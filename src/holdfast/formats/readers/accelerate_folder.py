"""Reader of what accelerate and its Trainer save of an FSDP model: folders of DCP for the model and for the optimizer.

Both are one state, under the keys ``model`` and ``optimizer``. The schedule lies beside them, and the Trainer's step.
Opened by ``formats.readers``.
"""

from __future__ import annotations

from pathlib import Path

from ..dcp.dcp_metadata import METADATA
from ..dcp.dcp_reader import DcpFolder
from ..source import Source
from .rank_files import schedule_of
from .safetensors_files import unread_in
from .trainer_folder import STATE, trainer_state

MODEL_FOLDER, OPTIMIZER_FOLDER = "pytorch_model_fsdp_0", "optimizer_0"


def is_accelerate(path: Path) -> bool:
    """Return whether ``path`` has the folder of a model that accelerate saved by ranks."""
    return (path / MODEL_FOLDER / METADATA).is_file()


def open_accelerate(path: Path) -> Source:
    """Open the model in ``path``, and the optimizer if there is one.

    Raises ``Damaged`` as ``DcpFolder``, or if the Trainer's state has no step.
    """
    if not (path / OPTIMIZER_FOLDER).is_dir():
        source = DcpFolder(path, path / MODEL_FOLDER)
        source.unread = unread_in(path)
        return source
    source = DcpFolder(path, path / MODEL_FOLDER, path / OPTIMIZER_FOLDER)
    for way, value in schedule_of(path).items():
        source.progress[".".join(way)] = value
    if (path / STATE).is_file():
        source.progress["step"] = trainer_state(path)["global_step"]
    source.writer = f"accelerate, {source.writer}"
    return source
