"""The sender of steps to a replica, in order, each once it has fully arrived from the device.

Steps that are complete are sent by the training thread, before ``put`` returns. From the first step with copies still
under way, a thread waits for the copies and sends, so that training does not wait.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import torch

from ...accelerators import use_device
from ...optim.torch_threads import keep_torch_threads, one_torch_thread
from ..log.recorder import FinalizedStep


class RecordSender:
    """A sender that calls ``send`` with each complete step."""

    def __init__(self, send: Callable[[FinalizedStep], None], devices: Sequence[torch.device] = ()) -> None:
        """Prepare a sender for steps that come from ``devices``."""
        self._send, self._devices = send, list(devices)
        self._failure: BaseException | None = None
        self._waiting: queue.SimpleQueue[FinalizedStep | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, sealed: FinalizedStep) -> None:
        if self._thread is None and not sealed.is_late:
            return self._send(sealed)
        if self._thread is None:
            keep_torch_threads()
            self._thread = threading.Thread(target=self._work, name="holdfast-post", daemon=True)
            self._thread.start()
        self._waiting.put(sealed)

    def check(self) -> None:
        """Raise the error of the thread, which sends nothing after it."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Return when everything has been sent, or the thread has failed."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()

    def _work(self) -> None:
        one_torch_thread()
        for device in self._devices[:1]:
            use_device(device)
        while (sealed := self._waiting.get()) is not None:
            try:
                sealed.complete()
                self._send(sealed)
            except BaseException as error:
                self._failure = error
                return
