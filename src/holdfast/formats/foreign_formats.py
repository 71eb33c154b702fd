"""The formats of other libraries: one reader for each, which opens a path as a ``Source``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePath

from ..errors import BadInput
from .dcp.dcp_reader import DcpFolder, is_dcp
from .deepspeed.deepspeed_checkpoints import open_deepspeed
from .deepspeed.deepspeed_contents import is_deepspeed
from .megatron.megatron_contents import is_megatron
from .megatron.megatron_reader import open_megatron
from .readers.rank_files import RankFiles, is_accelerate, is_rank_files, open_accelerate
from .readers.safetensors_files import ShardedSafetensors, is_safetensors, is_sharded
from .readers.torch_save import is_saved
from .readers.trainer_folder import open_saved, open_weights
from .rules_source import RuledFolder, is_ruled
from .source import Source, looking_at

FORMATS: list[tuple[str, Callable[[Path], bool], Callable[[Path], Source]]] = [
    ("rules", is_ruled, RuledFolder),
    ("deepspeed", is_deepspeed, open_deepspeed),  # before the weights that others store beside it
    ("megatron", is_megatron, open_megatron),
    ("rank files", is_rank_files, RankFiles),
    ("dcp", is_accelerate, open_accelerate),
    ("safetensors", is_safetensors, open_weights),
    ("dcp", is_dcp, DcpFolder),
    ("safetensors shards", is_sharded, ShardedSafetensors),
    ("torch.save", is_saved, open_saved),
]
"""The foreign formats: name, a function that recognizes a path, and a function that opens it."""


def format_of(path: Path) -> str | None:
    """Return the format of ``path``; None if it is unknown."""
    with looking_at(path):
        return next((name for name, is_it, _ in FORMATS if path.exists() and is_it(path)), None)


def is_of_others(path: PurePath) -> bool:
    """Return whether ``path`` has a foreign format and no commits."""
    return isinstance(path, Path) and not (path / "commits").is_dir() and format_of(path) is not None


def open_source(path: Path) -> Source:
    """Open the training state at ``path``, of any foreign format.

    Raises ``BadInput`` for an unknown format, ``Damaged`` if the state is damaged, ``DiskFailed`` if it cannot be read.
    """
    with looking_at(path):
        if not path.exists():
            raise BadInput(f"{path} is not there")
        for _, is_it, opened in FORMATS:
            if is_it(path):
                return opened(path)
    known = ", ".join(dict.fromkeys(name for name, _, _ in FORMATS))
    raise BadInput(f"{path} is neither a run nor of another format that is known here: {known}")
