"""The process of a replica as the trainer sees it: start, send, listen, end.

A thread receives the messages of the process. Every waiting caller gets the error with which the process failed,
including its death, so no caller waits for a dead process. The process has a session of its own, so a signal that ends
the trainer does not reach it. ``ReplicaConfig`` is what the process is told when it starts. Called by the replica
clients.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import holdfast.errors

from ...errors import EngineFailed, ReplicaDied, WriterHung
from .. import running_clock
from ..log.recorder import writer_hung
from .channel import Channel, ChannelClosed

LAST_WORD = "closed"
_left: list[StartedProcess] = []
"""Processes that were released, to be reaped once they have ended."""


class ReplicaProcess:
    """A helper process as this one sees it.

    ``hear`` is called with each message, with the lock ``changed`` held. After an error every call raises it.
    """

    def __init__(self, hear: Callable[[dict[str, Any]], None], deadline_seconds: float) -> None:
        """Prepare the connection; ``start`` starts the process."""
        self.changed = threading.Condition()
        self.durable_step = -1
        """The step that errors name as durable."""
        self.failure: BaseException | None = None
        self._hear, self._deadline = hear, deadline_seconds
        self._said: set[str] = set()
        self._heard = running_clock.now()
        self._process: StartedProcess | None = None
        self._channel: Channel | None = None
        self._sending = threading.Lock()
        self._let_go = False
        self._thread = threading.Thread(target=self._listen, name="holdfast-replica", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Return whether the process may still use what it was given."""
        return self._thread.is_alive()

    def start(self) -> None:
        for earlier in list(_left):
            with suppress(subprocess.TimeoutExpired):
                earlier.wait(0)
                _left.remove(earlier)
        ours, theirs = socket.socketpair()
        try:
            self._process = start_process(theirs)
        finally:
            theirs.close()
        self._channel = Channel(ours, self._deadline)
        self._thread.start()

    def send(self, about: dict[str, Any], data: bytes | bytearray = b"") -> None:
        """Send a message. Raises the process's error, and ``WriterHung`` if it accepts no data any more."""
        assert self._channel is not None
        try:
            with self._sending:
                self._channel.send(about, memoryview(data))
        except TimeoutError:
            raise self._hung(self._deadline) from None
        except OSError:  # the process is gone; the listening thread knows why, or is about to
            if self._let_go:
                return
            with self.changed:
                self.changed.wait_for(lambda: self.failure is not None, 10)
            self.check()
            raise

    def wait_for(self, reached: Callable[[], bool], owes: Callable[[], bool] = lambda: True) -> None:
        """Return when ``reached`` is true.

        Raises the error of the process, and ``WriterHung`` if it sends nothing for too long while ``owes`` is true.
        """
        started = running_clock.now()
        with self.changed:
            while not reached():
                if not owes():
                    started = running_clock.now()
                self.check(started)
                self.changed.wait(0.1)

    def wait_for_word(self, word: str, wait_for: Callable[[Callable[[], bool]], None] | None = None) -> None:
        """Return when the process has sent ``word`` since the last call for it.

        ``wait_for`` replaces the plain wait, where more has to be watched meanwhile.
        """
        (wait_for or self.wait_for)(lambda: word in self._said)
        self._said.discard(word)

    def check(self, waiting_since: float | None = None) -> None:
        if self.failure is not None:
            raise self.failure
        if self._let_go:
            raise ReplicaDied(f"the replica was let go of. Step {self.durable_step} is durable on the disk.")
        silent = 0.0 if waiting_since is None else running_clock.now() - max(waiting_since, self._heard)
        if silent > self._deadline:
            raise self._hung(silent)

    def leave(self) -> None:
        """Disconnect from the process as if this one had died. The process then does as it would after that."""
        assert self._process is not None
        self._let_go = True
        with self.changed:
            self.changed.notify_all()
        self._disconnect()
        _left.append(self._process)

    def end(self) -> None:
        """Wait until the process has sent ``LAST_WORD``, and end it. It has ended or was killed when this returns.

        A process that has failed sends it when its state is kept in memory. Raises the error of the process.
        """
        assert self._process is not None
        try:
            self.wait_for(lambda: LAST_WORD in self._said)
            self.check()
        finally:
            if self.failure is not None:
                self._wait_until_kept()
            self._let_go = True
            self._disconnect()
            try:
                self._process.wait(10 if LAST_WORD in self._said and self.failure is None else 1)
            except subprocess.TimeoutExpired:
                self._process.kill()
                with suppress(
                    subprocess.TimeoutExpired
                ):  # a process that hangs in the kernel ends when the kernel lets it
                    self._process.wait(10)

    def _wait_until_kept(self) -> None:
        """Wait for the last word of a process that has failed, which may have gigabytes to copy, or for its end."""
        until = running_clock.now() + self._deadline
        with self.changed:
            while LAST_WORD not in self._said and self._thread.is_alive() and running_clock.now() < until:
                self.changed.wait(0.1)

    def _disconnect(self) -> None:
        """End the connection, and close it once no thread receives or sends any more."""
        assert self._channel is not None
        self._channel.end()
        self._thread.join()
        with self._sending:
            self._channel.close()

    def _listen(self) -> None:
        assert self._channel is not None
        with suppress(ChannelClosed, OSError, ValueError):
            while True:
                message = self._channel.receive()
                assert message is not None
                with self.changed:
                    self._heard = running_clock.now()
                    self._note(message.about)
                    self.changed.notify_all()
        if LAST_WORD in self._said or self._let_go:
            return
        died = self._died()
        with self.changed:
            self.failure = self.failure or died
            self.changed.notify_all()

    def _note(self, about: dict[str, Any]) -> None:
        if "error" in about:
            name, text = about["error"]
            self.failure = getattr(holdfast.errors, name, EngineFailed)(text)
        elif "word" in about:
            self._said.add(about["word"])
        else:
            self._hear(about)

    def _hung(self, seconds: float) -> WriterHung:
        return writer_hung("the replica has said nothing", seconds, self.durable_step)

    def _died(self) -> ReplicaDied:
        assert self._process is not None
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(5)
        how = f"ended with {code}" if code is None or code >= 0 else f"was ended by signal {-code}"
        return ReplicaDied(
            f"the replica {how} while training went on. Step {self.durable_step} is durable, later ones are not. Make"
            " another Checkpointer to resume."
        )


def start_process(sock: socket.socket) -> StartedProcess:
    """Start a replica's process, which serves the other end of ``sock``.

    The process gets none of this one's output streams, because a reader may wait for their end.
    """
    source = str(Path(holdfast.errors.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(
        [sys.executable, "-m", "holdfast.checkpoint.replica.replica_main", str(sock.fileno())],
        pass_fds=(sock.fileno(),), start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


class StartedProcess(Protocol):
    """The interface of a started process."""

    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


@dataclass(frozen=True)
class ReplicaConfig:
    """The configuration of a replica's process. ``memory`` bounds the copies for a snapshot, in bytes."""

    run: str
    place: str
    keep: tuple[int, int | None, float | None]
    direct: bool
    memory: int
    linger_seconds: float
    trainer: int
    failpoint: str
    rank: int = 0
    world_size: int = 1
