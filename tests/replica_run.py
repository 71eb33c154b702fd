"""A training loop with a replica, as a process that is killed runs it. Replicas are forked, not started anew."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import socket
import subprocess
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, ClassVar

from checkpoint.loops import make
from holdfast import failpoints
from holdfast.checkpoint.replica import replica_main, replica_server, retained_state
from holdfast.checkpointer import Checkpointer
from holdfast.errors import DiskFull
from holdfast.io.queue import Throttle
from holdfast.store.commit.retention import Keep
from holdfast.store.run_store import LocalStore
from survive_run import FEATURE, OPTIMIZER, digest


class Forked:
    """A replica's process that is a fork of this one. Where this one is to have threads, ``prepare`` it before."""

    stacks: ClassVar[Path | None] = None
    """Where one that hangs says at what."""

    _spares: ClassVar[list[tuple[int, socket.socket]]] = []

    def __init__(self, sock: socket.socket) -> None:
        self.code: int | None = None
        if self._spares:
            self.pid, channel = self._spares.pop()
            with channel:
                socket.send_fds(channel, [b"."], [sock.fileno()])
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # this process may have other threads
            self.pid = os.fork()
        if self.pid == 0:
            self.serve(os.dup(sock.fileno()))

    @classmethod
    def prepare(cls, number: int = 2) -> None:
        """Fork so many now, each of which waits to be needed: what other threads have locked stays locked in a fork."""
        for _ in range(number):
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                ours.close()
                _, descriptors, _, _ = socket.recv_fds(theirs, 1, 1)
                if not descriptors:  # nobody needed it
                    os._exit(0)
                cls.serve(descriptors[0])
            theirs.close()
            cls._spares.append((pid, ours))

    @classmethod
    def serve(cls, descriptor: int) -> None:
        """In the child: nothing of the parent's stays but its end of the channel."""
        try:
            gc.freeze()  # what the parent has dropped would close descriptors that are others by then
            os.setsid()
            failpoints._arrivals.clear()
            null = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(null, number)
            os.dup2(descriptor, 3)
            os.closerange(4, 1024)
            if cls.stacks is not None:
                stacks = open(cls.stacks, "w")  # noqa: SIM115 (until it ends)
                late = threading.Timer(20, lambda: faulthandler.dump_traceback(stacks))
                late.daemon = True
                late.start()
            replica_main.main(3)
            os._exit(0)
        except BaseException:
            os._exit(70)

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while self.code is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.code = os.waitstatus_to_exitcode(status)
                break
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired("replica", timeout or 0)
            time.sleep(0.002)
        return self.code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def stay_with(descriptor: int) -> None:
    """A child that has only this open for a while."""
    os.closerange(0, descriptor)
    os.closerange(descriptor + 1, 1024)
    time.sleep(60)
    os._exit(0)


def drifting(real: Callable[..., None], at: int, state: Any, records: Any, slot: str | None = None) -> None:
    """Do a step, and change the state behind its back after the step ``at``: a weight, or what is in ``slot``."""
    real(state, records)
    held = state.optimizers[0].state
    parameter = state.parameters[-1].parameter if slot is None else list(held)[-1]
    if next(iter(held.values()))["step"] == at:
        (parameter.data if slot is None else held[parameter][slot]).add_(1.0)


def slowly(real: Callable[..., None], seconds: float, *args: Any) -> None:
    time.sleep(seconds)
    real(*args)


def kept_beside_a_slow_disk(
    self: replica_server.ReplicaServer, real: Callable[..., None], rate: int, copies: bool
) -> None:
    """Keep the state; from then on so many bytes a second get to the disk, from copies or from the state itself."""
    real(self)
    self._store.queue._throttles[True] = Throttle(rate, burst_bytes=1)
    if not copies:
        self._terms = replace(self._terms, memory=0)


def without_a_disk(self: LocalStore, real: Callable[..., None], step: int, *rest: Any) -> None:
    """The run's has no room for more than the first base."""
    if step and not str(self.root).endswith(("sync", "state")):
        raise DiskFull("no space left")
    return real(self, step, *rest)


def train(
    root: str,
    steps: int,
    *,
    feature: str = FEATURE,
    said: Callable[..., None] = lambda **_: None,
    acknowledge: Callable[[int], None] = lambda step: None,
    before: int | None = None,
    dies_at: int | None = None,
    with_replica: bool = False,
    with_child: bool = False,
    drifts_at: int | None = None,
    slow_seconds: float = 0.0,
    linger_seconds: float = 20.0,
    no_memory: bool = False,
    no_disk: bool = False,
    slow_when_kept: int | None = None,
    copies: bool = True,
    unit_bytes: int = 100,
    keep_last: int = 2,
    **options: Any,
) -> None:
    """Resume and train to ``steps``. Says the step resumed from, every step that survives this process, and the digest
    at the end. Kills itself right after step ``dies_at``, and its replica before that, or with a child left that
    has all that it had open. With ``no_memory`` nothing can be kept there, with ``no_disk`` no base is written there
    after the first."""
    from holdfast import checkpointer as module
    from holdfast.checkpoint.replica import replica_client, replica_process
    from holdfast.checkpoint.snapshot import snapshot_chunks

    snapshot_chunks.UNIT_BYTES, module.BASE_BYTES_PER_STEP = unit_bytes, 1
    if slow_seconds:
        replica_server.apply = partial(slowly, replica_server.apply, slow_seconds)
    if drifts_at is not None:
        replica_server.apply = partial(drifting, replica_server.apply, drifts_at)
    if slow_when_kept is not None:
        replica_server.ReplicaServer._keep = partialmethod(
            kept_beside_a_slow_disk, replica_server.ReplicaServer._keep, slow_when_kept, copies
        )
    if no_disk:
        LocalStore.publish = partialmethod(without_a_disk, LocalStore.publish)
    replica_client.LINGER_SECONDS, replica_process.start_process = linger_seconds, Forked
    loop = make(OPTIMIZER, feature)
    with Checkpointer(
        root,
        model=loop.model,
        optimizer=loop.optimizers,
        replica=True,
        keep=Keep(keep_last),
        **loop.things,
        **options,
    ) as checkpointer:
        done = checkpointer.resume(before=before)
        pid = checkpointer._backend.replica._helper._process.pid
        said(resumed=done, replica=pid, durable_step=checkpointer.durable_step)
        if no_memory:
            (checkpointer._backend.replica._place / retained_state.KEPT).write_bytes(b"in the way")
        for i in range(done, steps):
            loop.iteration(i, checkpointer.step)
            said(durable_step=checkpointer.durable_step)
            acknowledge(checkpointer.replica_step)
            if i + 1 == dies_at:
                if with_child and os.fork() == 0:
                    stay_with(checkpointer._backend.replica._helper._channel._socket.fileno())
                for each in [pid] * with_replica + [os.getpid()]:
                    os.kill(each, signal.SIGKILL)
        checkpointer.wait()
    said(finished=True, losses=loop.losses, digest=digest(loop.state()))
