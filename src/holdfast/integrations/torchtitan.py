"""The checkpoints of torchtitan as commits of one run of this library.

    config.checkpoint = CheckpointManager.Config(enable=True, interval=100)  # in a function that --config names

Where torchtitan makes a folder for each step, this makes a commit of the run in ``<dump_folder>/<folder>``, by
``integrations.dcp``. torchtitan still decides when to save and what stays. The overridden methods are those by which
torchtitan 0.3 names, finds, writes, reads and removes the checkpoint of a step.
"""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass
from typing import Any

from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torchtitan.components import checkpoint as titan  # pyrefly: ignore[missing-import]
from torchtitan.tools.utils import GarbageCollection  # pyrefly: ignore[missing-import]

from ..errors import BadInput
from ..store.commit.retention import Keep
from ..store.reader import RunReader
from .dcp import StorageReader, StorageWriter

__all__ = ["CheckpointManager"]


class CheckpointManager(titan.CheckpointManager):
    """A replacement for torchtitan's manager, with its options: ``keep_latest_k`` counts commits, 0 keeps all.

    The newest checkpoint is the newest of the current timeline: after a ``load_step`` that went back, the newest saved
    since. Folders ``step-N`` that torchtitan's own manager saved are loaded unchanged, and stay.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan.CheckpointManager.Config):
        """torchtitan's configuration; its class tells torchtitan to build this manager."""

    def __init__(self, config: Config, **options: Any) -> None:
        super().__init__(config, **options)
        if self.enable and "://" in self.folder:
            raise BadInput(
                f"checkpoint.folder = {self.folder!r} is no directory, and a run is in one that all ranks share. Give"
                " such a directory; `holdfast push` copies the run to a bucket."
            )

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: titan.AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Make a commit, or a folder for Hugging Face as torchtitan does.

        The commit is durable on return or when the future is done.
        """
        assert isinstance(checkpoint_id, _Step)
        if to_hf:
            return super().dcp_save(
                state_dict, checkpoint_id.folder, async_mode, enable_garbage_collection, True
            )
        keep = Keep(last=self.keep_latest_k or sys.maxsize)
        writer = StorageWriter(str(checkpoint_id), step=checkpoint_id.step, keep=keep)
        saved = None
        if async_mode == titan.AsyncMode.DISABLED:
            dcp.save(state_dict, storage_writer=writer)
        else:
            how: dict[str, Any] = {"process_group": self.pg}
            if async_mode == titan.AsyncMode.ASYNC_WITH_PINNED_MEM:
                how |= {"async_checkpointer_type": AsyncCheckpointerType.PROCESS, "async_stager": self.stager}
            saved = dcp.async_save(state_dict, storage_writer=writer, **how)
        if enable_garbage_collection:
            GarbageCollection.collect("after a save")
        return saved

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load a checkpoint; all that is read is verified before any of it is used.

        ``initial_load_path`` may be a run; its newest commit is loaded.
        """
        step = None
        if isinstance(checkpoint_id, _Step):
            step = checkpoint_id.step
            if not _has(str(checkpoint_id), step) and _is_torchs(checkpoint_id.folder):
                checkpoint_id = checkpoint_id.folder
        if from_hf or _is_torchs(checkpoint_id):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        dcp.load(state_dict, storage_reader=StorageReader(str(checkpoint_id), step=step))
        if titan.MODEL in self.states:
            self.states[titan.MODEL].load_state_dict(state_dict)

    def _find_load_step(self, folder: str = "") -> int:
        newest, of_titan = RunReader(folder or self.folder).head(), super()._find_load_step(folder)
        if newest is None:
            return of_titan
        if of_titan > newest.step:
            warnings.warn(
                f"{folder or self.folder} has step-{of_titan} of torchtitan's own, and the newest commit is of step"
                f" {newest.step}, which is loaded. Set checkpoint.load_step to load the other.",
                stacklevel=2,
            )
        return newest.step

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:
        return _Step(folder or self.folder, step, super()._create_checkpoint_id(step, folder))

    def _should_purge(self) -> bool:
        return False  # the next publish removes what ``Keep`` retires


class _Step(str):
    """The directory of the run, which torchtitan requests and passes on, with the step."""

    step: int
    folder: str
    """The folder that torchtitan's own manager would use for the step."""

    def __new__(cls, root: str, step: int, folder: str) -> _Step:
        made = super().__new__(cls, root)
        made.step, made.folder = step, folder
        return made


def _has(root: str, step: int) -> bool:
    return any(ref.step == step for ref in RunReader(root).commits())


def _is_torchs(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, ".metadata"))
