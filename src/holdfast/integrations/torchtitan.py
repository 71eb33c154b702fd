"""The checkpoints of torchtitan as commits of one run of this library, and its training with a record of every step.

    config.checkpoint = StepCheckpointManager.Config(enable=True)  # in a function that --config names
    config.checkpoint = CheckpointManager.Config(enable=True, interval=100)  # commits alone

``StepCheckpointManager`` holds a ``Checkpointer`` for the run in ``<dump_folder>/<folder>``. torchtitan's trainer asks
its manager to load before the first step, which resumes the run, and to save after each step, which ends the record of
the step.

``CheckpointManager`` makes a commit of that run, by ``integrations.dcp``, where torchtitan makes a folder for a step.
torchtitan still decides when to save and what stays. The overridden methods are those by which torchtitan 0.3 names,
finds, writes, reads and removes the checkpoint of a step.
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import closing
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

import tyro  # pyrefly: ignore[missing-import]
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torchtitan.components import checkpoint as titan  # pyrefly: ignore[missing-import]
from torchtitan.tools.utils import GarbageCollection  # pyrefly: ignore[missing-import]

from ..checkpointer import Checkpointer
from ..distributed import Ranks
from ..errors import BadInput
from ..quantities import shown
from ..store.commit.retention import Keep
from ..store.reader import RunReader
from .dcp import StorageReader, StorageWriter

__all__ = ["CheckpointManager", "StepCheckpointManager"]

OF_FOLDERS = "keep_latest_k", "async_mode", "enable_first_step_checkpoint"
"""The options of torchtitan that say when it makes folders and how many stay."""


class StepCheckpointManager(titan.CheckpointManager):
    """A replacement for torchtitan's manager with which every optimizer step is recorded.

    A restart continues after the newest step, with the bits of a training that was never interrupted. After the last
    step the model alone is saved to ``step-N`` as torchtitan does (``last_save_model_only``).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan.CheckpointManager.Config):
        """torchtitan's configuration, of which ``OF_FOLDERS`` have no meaning here."""

        options: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        """Options of ``holdfast.Checkpointer``, such as ``{"every": "auto"}``."""

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        self._checkpointer: Checkpointer | None = None
        if not self.enable:
            return
        self._parts, self._options = parts["model_parts"], config.options
        if self.load_only:
            raise BadInput("load_only=True records nothing: leave it out, or set enable=False")
        if others := sorted({*self.exclude_from_loading} - {titan.DATALOADER}):
            raise BadInput(
                f"exclude_from_loading = {others}: a run is resumed as a whole, but for {titan.DATALOADER!r}. To begin"
                " anew with its weights give another folder, and initial_load_path."
            )
        usual = {each.name: each.default for each in fields(config)}
        if unread := [name for name in OF_FOLDERS if getattr(config, name) != usual[name]]:
            warnings.warn(
                f"checkpoint.{shown(unread)} is not read: every step is recorded. What snapshots are made and stay is"
                " said by options={'base_every': ..., 'keep': ...}.",
                stacklevel=2,
            )

    def __del__(self) -> None:
        """Do nothing: a close is collective, and torchtitan calls it."""

    def _load(self, step: int = -1) -> bool:
        """Resume the run; begin a new one with what torchtitan loads (``initial_load_path``, or a folder of its own).

        Collective: every rank must call this.
        """
        with closing(Ranks.here(self._options.get("deadline_seconds", 300.0))) as ranks:
            # with nodes= a rank may have a new disk, and with damage a commit that cannot be read
            is_new = all(ranks.everyone(not RunReader(self.folder).commits()))
        is_loaded = is_new and super()._load(step)
        own = {titan.MODEL, titan.OPTIMIZER, titan.DATALOADER, titan.LR_SCHEDULER}
        loader = self.states[titan.DATALOADER]
        self._checkpointer = checkpointer = Checkpointer(
            self.folder,
            model=self._parts,
            optimizer=list(self.states[titan.OPTIMIZER]),
            scheduler=self.states[titan.LR_SCHEDULER],
            loader=None
            if loader is None
            else DataPosition(loader, titan.DATALOADER in self.exclude_from_loading),
            also={name: state for name, state in self.states.items() if name not in own},
            **self._options,
        )
        if is_new:  # the steps of what was loaded count, so that numbers of steps are those of torchtitan
            checkpointer._count_from(self.states[titan.TRAIN_STATE].step)
        done = checkpointer.resume(step=None if is_new or step == -1 else step)
        return is_loaded or done > 0

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """End the record of the step. Collective: every rank must call this.

        What torchtitan saves after the last step comes before its record: a process killed there does the step again.
        """
        if not curr_step:  # a seed checkpoint
            return super()._save(curr_step, last_step)
        if last_step and self.last_save_model_only:
            self._save_last_step(curr_step)
        assert self._checkpointer is not None
        self._checkpointer.step()
        return True

    def _close(self) -> None:
        super()._close()
        if self._checkpointer is not None:
            self._checkpointer.__exit__(*sys.exc_info())  # torchtitan closes where it handles an error, too


class DataPosition:
    """The place of torchtitan's loader, which a run keeps, and which is not loaded if it ``is_excluded``."""

    endless = True
    """A flag for the ``Checkpointer``: no end of an epoch is done again after a resume."""

    def __init__(self, loader: Any, is_excluded: bool) -> None:
        self._loader, self._is_excluded = loader, is_excluded
        self.elastic = is_excluded or getattr(loader, "elastic", False)

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self._is_excluded:
            self._loader.load_state_dict(state)


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
