"""What the baselines share: a state taken apart into tensors and the rest, copies of it, and files that last."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from trainings import Training

from holdfast.optim.torch_threads import one_torch_thread

Tensors = dict[str, torch.Tensor]


class _At(str):
    """In a frame: where a tensor was."""


def take_apart(state: Any) -> tuple[Tensors, Any]:
    """The tensors of ``state`` by name, one that occurs twice only once, and the frame that they were in."""
    tensors: Tensors = {}
    names: dict[tuple, str] = {}

    def visit(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            same = (value.data_ptr(), value.shape, value.dtype) if value.numel() else (path,)
            if same not in names:
                names[same] = path
                tensors[path] = value.detach()
            return _At(names[same])
        if isinstance(value, dict):
            return {key: visit(item, f"{path}/{key}") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(visit(item, f"{path}/{i}") for i, item in enumerate(value))
        return value

    frame = visit(state, "")
    return tensors, frame


def put_together(frame: Any, tensors: Tensors) -> Any:
    """The inverse of ``take_apart``."""
    if isinstance(frame, _At):
        return tensors[str(frame)]
    if isinstance(frame, dict):
        return {key: put_together(item, tensors) for key, item in frame.items()}
    if isinstance(frame, (list, tuple)):
        return type(frame)(put_together(item, tensors) for item in frame)
    return frame


def save_durably(value: Any, path: Path) -> int:
    """``torch.save``, with the order of writes that survives a power cut. Returns the bytes."""
    beside = path.with_suffix(".tmp")
    torch.save(value, beside)
    sync(beside)
    os.replace(beside, path)
    sync(path.parent)
    return path.stat().st_size


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


class Snapshots:
    """Copies of a training's state, made beside the forward and backward of the next iteration.

    ``take`` copies what these change (buffers, generators) at once, and lets a thread copy parameters and optimizer
    state, which only the optimizer changes: it waits in a pre-hook until they are copied. ``then`` goes on with the
    copy, in the same thread. There is one snapshot at a time: the next one waits.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._executor = ThreadPoolExecutor(1, initializer=one_torch_thread)
        self._future: Future[None] | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._hook = training.optimizer.register_step_pre_hook(self._before_update)
        self.waited_seconds = 0.0
        """In the pre-hook, since it was last set to 0."""

    def take(
        self,
        state: dict[str, Any],
        target: Callable[[Tensors, Any], Tensors],
        then: Callable[[Tensors, Any], None],
    ) -> None:
        """Of ``state``, which is the training's or a part of it. ``target`` gives the tensors to copy to."""
        self.wait()
        tensors, frame = take_apart(state)
        copies = target(tensors, frame)
        changing = {f"/model/{name}" for name, _ in self._training.model.named_buffers()} | {"/random"}
        _copy(copies, {name: tensor for name, tensor in tensors.items() if name in changing})
        rest = {name: tensor for name, tensor in tensors.items() if name not in changing}
        self._copied.clear()
        self._future = self._executor.submit(self._work, copies, rest, frame, then)

    def _work(self, copies: Tensors, rest: Tensors, frame: Any, then: Callable[[Tensors, Any], None]) -> None:
        try:
            _copy(copies, rest)
        finally:
            self._copied.set()
        then(copies, frame)

    def _before_update(self, *_: Any) -> None:
        started = time.perf_counter()
        self._copied.wait()
        self.waited_seconds += time.perf_counter() - started

    def wait(self) -> None:
        """Return when nothing is under way. Raises what the last one failed with."""
        future, self._future = self._future, None
        if future is not None:
            future.result()

    def close(self) -> None:
        self._hook.remove()
        try:
            self.wait()
        finally:
            self._executor.shutdown()


def _copy(targets: Tensors, sources: Tensors) -> None:
    if sources:
        torch._foreach_copy_([targets[name] for name in sources], list(sources.values()))
