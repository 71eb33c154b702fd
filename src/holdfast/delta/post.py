"""Post: steps go to a replica in their order, each when all of it is there.

Where nothing is on its way from a device, that is on the thread that trains, before ``put`` returns. From the first
step on that is late a thread waits for what is on its way, so that training does not, and sends what has arrived.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import torch

from ..accelerators import use_device
from ..update.threads import keep_torch_threads, one_torch_thread
from .recorder import Sealed


class Post:
    """``send`` is called with each step that is there."""

    def __init__(self, send: Callable[[Sealed], None], devices: Sequence[torch.device] = ()) -> None:
        """``devices`` are those that steps come from."""
        self._send, self._devices = send, list(devices)
        self._failure: BaseException | None = None
        self._waiting: queue.SimpleQueue[Sealed | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, sealed: Sealed) -> None:
        if self._thread is None and not sealed.is_late:
            return self._send(sealed)
        if self._thread is None:
            keep_torch_threads()
            self._thread = threading.Thread(target=self._work, name="holdfast-post", daemon=True)
            self._thread.start()
        self._waiting.put(sealed)

    def check(self) -> None:
        """Raise what went wrong on the thread, which sends nothing any more then."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Return when everything has been sent, or nothing will be."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()

    def _work(self) -> None:
        one_torch_thread()
        for device in self._devices[:1]:
            use_device(device)
        while (sealed := self._waiting.get()) is not None:
            try:
                sealed.settle()
                self._send(sealed)
            except BaseException as error:
                self._failure = error
                return
