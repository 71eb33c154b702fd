"""The copy of a run in a bucket, kept up to date by a separate thread while training continues.

The thread reads only what the run has on its disk, so training never waits for it. After a failure it tries again in
the next round. Times are seconds. Called by ``Checkpointer``.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Collection
from pathlib import Path

from ..errors import BadInput, HoldfastError
from ..events import EventLog
from ..store.commit.retention import Keep
from ..store.object_store import Url, place_of
from ..store.pushing import Pusher

SECONDS = 1.0
"""The time between two rounds."""
PATIENCE_SECONDS = 20.0
"""The longest time that a node waits, at the end, for the copies of the others."""
ABORT_WAIT_SECONDS = 10.0
"""The longest time that a run which is not copied to its end waits for a copy under way."""
POLL_SECONDS = 0.1


class Remote:
    """The copy at ``address`` of the run in ``root``.

    Call ``start`` once the run can be read, and ``close`` at the end.
    """

    def __init__(
        self,
        root: str | Path,
        address: str,
        keep: Keep | None,
        events: EventLog,
        streams: Collection[str] | None = None,
    ) -> None:
        """Prepare the copy, without any request. Raises ``BadInput`` if ``address`` is no place in a bucket.

        ``streams`` are the ranks whose shares the directory holds, where nodes have a directory each.
        """
        place = place_of(address)
        if not isinstance(place, Url):
            raise BadInput(f"remote = {address!r} is no place in a bucket: give s3://BUCKET/PREFIX")
        self._root, self._place, self._events = Path(root), place, events
        self._pusher = Pusher(self._root, place, keep=keep, streams=streams)
        self._patience_seconds = 0.0 if streams is None else PATIENCE_SECONDS
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._error, self._damaged = "", False

    @property
    def durable_step(self) -> int:
        """The newest step that can be recovered from the bucket alone; -1 before there is one."""
        step = self._pusher.durable_step
        return -1 if step is None else step

    def check(self) -> None:
        """Raise ``RunMismatch`` if the bucket holds another run, ``DiskFailed`` if it does not answer."""
        self._pusher.check()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._follow, name="holdfast-remote", daemon=True)
        self._thread.start()

    def close(self, step: int | None, waits: bool = True) -> None:
        """End the thread. With ``step``, the newest of the run, first copy what is missing.

        Warns if not everything could be copied. A copy under way ends with the process without ``waits``, and without
        ``step`` where it takes long. A second call does nothing.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._ending.set()
        if not waits:
            return
        thread.join(ABORT_WAIT_SECONDS if step is None else None)
        if step is None:
            self._events = EventLog(None)  # the run's is closed next
            return
        self._push()
        end = time.monotonic() + self._patience_seconds
        while self.durable_step < step and time.monotonic() < end:  # other nodes copy as well
            time.sleep(POLL_SECONDS)
            self._push()
        if self.durable_step < step:
            warnings.warn(
                f"the copy of {self._root} in {self._place} ends at step {self.durable_step} of {step}:"
                f" {self._error or 'what follows is not durable in the run either.'} To copy what can be:"
                f" `holdfast push {self._root} {self._place}`.",
                stacklevel=2,
            )

    def _follow(self) -> None:
        while not self._ending.wait(SECONDS):
            self._push()

    def _push(self) -> None:
        try:
            done = self._pusher.push()
        except Exception as error:  # any error: training continues, and the error is reported
            known = isinstance(error, HoldfastError | OSError)
            text = str(error) if known else f"{type(error).__name__}: {error}"
            if text != self._error:
                self._events.emit("push_failed", step=self.durable_step, error=text)
            self._error, self._damaged = text, False
            return
        if done.damaged or not self._damaged:  # damage is reported once
            self._error, self._damaged = (str(done.damaged[-1]), True) if done.damaged else ("", False)
        for damage in done.damaged:
            self._events.emit("push_failed", step=self.durable_step, error=str(damage))
        if done.commits:
            self._events.emit("pushed", step=self.durable_step, bytes=done.bytes)
