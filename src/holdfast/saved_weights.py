"""Copies of the weights of a run at some steps, without the optimizer's state: ``Keep(weights=1000)``.

A copy has the parameters that train and the buffers of the model, by their own names, with checksums. Frozen
parameters are left out, because the run has them once already. Training waits while a copy is written; it is durable
when ``step`` returns. Whatever reads safetensors reads it. It is no step to resume: a training can begin from it as
from any pretrained weights. Called by ``Checkpointer`` on one process. Sizes are bytes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from .checkpoint.snapshot.snapshot_chunks import frozen_in, owned_by
from .formats.memory_source import InMemory
from .formats.readers.huggingface import write_single
from .quantities import format_bytes
from .state.capture import aliases_of
from .state.live_state import LiveState
from .state.tensor_entries import TensorEntry
from .store.commit.retention import copies_in, copy_path, is_on_line, remove_unfinished
from .store.format.manifest import CommitRef
from .store.run_store import LocalStore

STEP = "weights_of_step"
"""The name, among what a copy says of its progress, of the step whose weights it has."""


class SavedWeights:
    """The writer of copies at every ``every`` steps of the run in ``store``, once its timeline is open.

    ``make_room`` returns whether so many bytes more fit within the run's cap; it may retire older bases for that.
    """

    def __init__(
        self, store: LocalStore, every: int, make_room: Callable[[int], bool], emit: Callable[..., None]
    ) -> None:
        self._store, self._every, self._make_room, self._emit = store, every, make_room, emit
        remove_unfinished(store.disk)

    def is_due(self, step: int) -> bool:
        """Return whether ``step`` is to have a copy, and has none in the present line."""
        if step <= 0 or step % self._every:
            return False
        return not any(ref.step == step and self._is_on_line(ref) for ref in copies_in(self._store.disk))

    def make(self, state: LiveState, step: int) -> None:
        """Write the copy of ``step``, at which ``state`` is, and remove those of abandoned steps up to it.

        Warns, and writes nothing, if it does not fit within the cap of the run.
        """
        atoms = weights_in(state)
        nbytes, store = sum(atom.nbytes for atom, _ in atoms), self._store
        if not self._make_room(nbytes):
            warnings.warn(
                f"the weights of step {step} are not kept: storage = {format_bytes(store.run_cap_bytes)} has no room"
                f" for {format_bytes(nbytes)} more. Give more, or keep fewer.",
                stacklevel=4,
            )
            return
        ref = CommitRef(store.opened.id, step)
        path = Path(store.root) / copy_path(ref)
        source = InMemory(str(path), "holdfast", atoms, {STEP: step})
        source.aliases = aliases_of(state.parameters)
        write_single(source, path, dtype=None)
        for other in copies_in(store.disk):
            if other.step <= step and not self._is_on_line(other):
                store.disk.unlink(copy_path(other))
        self._emit("weights", step=step, bytes=nbytes)

    def _is_on_line(self, ref: CommitRef) -> bool:
        return is_on_line(ref, self._store._timelines, self._store.opened.id)


def weights_in(state: LiveState) -> list[tuple[TensorEntry, torch.Tensor]]:
    """Return the parameters of the model that train, and its buffers, each with its tensor."""
    frozen = frozen_in(state)
    return [
        (atom, tensor)
        for owner, held in owned_by(state).items()
        for atom, tensor in held.values()
        if owner not in frozen and atom.slot in ("param", "buffer") and ":" not in atom.name
    ]
