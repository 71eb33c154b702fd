"""Fresh Python processes that have torch loaded: forked from one server, which the first of them starts.

    process = start_python("-m", "holdfast", "train", env=environment)       # what ``python -m holdfast train`` does
    answer = call("dist.world", "supervise", env=environment, ...)           # what a function returns
    launcher = start_torchrun("--nproc-per-node=2", script, env=environment) # torchrun, whose ranks are forks too

The server has run nothing but imports, in one thread. A process takes a hundredth of a second to start, where a new
interpreter takes seconds to load the same.

A process that starts others by ``subprocess`` has a server of its own, forked before anything else ran in it. Each
interpreter that it starts is a fork of that one, and a child of its own like any other (``fork_interpreters``).
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
LIMIT = 1 << 17
"""The most bytes of an order, environment included."""
COMMANDS = ("holdfast.cli.main", "holdfast.cli.train.train_job", "support.short_sample")
"""The modules that commands of ``holdfast`` import when they train."""
LAUNCHER = "torch.distributed.run"
"""The module that starts others by ``subprocess``."""
LAUNCHED = (
    *COMMANDS,
    LAUNCHER,
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "dist.training",
)
"""The modules of the launcher and of what tests launch."""
PR_SET_CHILD_SUBREAPER = 36


def environment_of(**more: str) -> dict[str, str]:
    """Return this process's environment, changed to compute on one thread and to import from ``src`` and ``tests``."""
    paths = [str(TESTS.parent / "src"), str(TESTS)]
    return {**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(paths), **more}


class WarmProcess:
    """A process that the server has forked, with what tests use of ``subprocess.Popen``. Its streams are pipes."""

    _server: tuple[subprocess.Popen[bytes], socket.socket] | None = None

    def __init__(self, order: dict[str, Any], stderr: int | None = None, stdout: int | None = None) -> None:
        """Start the process. With a descriptor ``stderr`` its errors go there, and ``self.stderr`` is closed."""
        line = json.dumps(order, default=str).encode()
        assert len(line) < LIMIT, len(line)
        ours, theirs = zip(*(os.pipe() for _ in range(3)), strict=True)
        _, connection = self._connect()
        fds = [0, theirs[0] if stdout is None else stdout, theirs[1] if stderr is None else stderr, theirs[2]]
        socket.send_fds(connection, [line], fds)
        for fd in theirs:
            os.close(fd)
        self._status = open(ours[2], "rb", buffering=0)  # noqa: SIM115 (until the process ends)
        self.stdout, self.stderr = open(ours[0]), open(ours[1])  # noqa: SIM115 (as long as this)
        for stream, given in ((self.stdout, stdout), (self.stderr, stderr)):
            if given is not None:
                stream.close()
        self.pid, self.returncode = self._read_number(), None
        self.args = order
        self._readers: list[threading.Thread] = []

    @classmethod
    def _connect(cls) -> tuple[subprocess.Popen[bytes], socket.socket]:
        if cls._server is None or cls._server[0].poll() is not None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                command = [sys.executable, __file__, str(theirs.fileno())]
                server = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment_of())
            cls._server = server, ours
            atexit.register(lambda: (ours.close(), server.wait()))
        return cls._server

    def _read_number(self) -> int:
        word = self._status.read(8)
        assert word, "the server of warm processes has ended; see its errors"
        return int.from_bytes(word, "little", signed=True)

    def poll(self) -> int | None:
        """Return the exit code, or minus the signal that ended the process; None while it runs."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.args), timeout or 0)
            self.returncode = self._read_number()
            self._status.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return what the process writes on standard output and standard error, up to its end."""
        said = ["", ""]

        def read(number: int, stream: Any) -> None:
            with stream:
                said[number] = stream.read()

        streams = [(n, each) for n, each in enumerate((self.stdout, self.stderr)) if not each.closed]
        self._readers = [threading.Thread(target=read, args=each, daemon=True) for each in streams]
        for reader in self._readers:
            reader.start()
        self.wait(timeout)
        for reader in self._readers:
            reader.join(timeout)
        return said[0], said[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """Kill the process, and close the pipes: those that are read by their readers, which come to their end then."""
        self.kill()
        self.wait()
        for reader in self._readers:
            reader.join(1)  # what the process started may hold the pipe still


def start_python(
    *words: Any,
    env: dict[str, str],
    cwd: str | Path | None = None,
    modules: Sequence[str] = COMMANDS,
    starts_others: bool = False,
    stdout: int | None = None,
    stderr: int | None = None,
) -> WarmProcess:
    """Start ``python -m MODULE ...`` or ``python FILE ...``. The server imports ``modules`` before it forks.

    With ``starts_others`` the interpreters that the process starts are forks too. Output goes to the descriptors
    ``stdout`` and ``stderr`` where they are given.
    """
    order = {"words": [str(word) for word in words], "environment": env, "modules": [*modules]}
    order |= {"folder": os.fspath(cwd or os.getcwd()), "starts_others": starts_others}
    return WarmProcess(order, stderr, stdout)


def start_torchrun(*words: Any, **how: Any) -> WarmProcess:
    """Start ``torchrun ...``, with ranks that are forks."""
    return start_python("-m", LAUNCHER, *words, modules=LAUNCHED, **how)


def run_python(*words: Any, timeout: float | None = None, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run ``python`` as ``start_python`` does, to its end."""
    process = start_python(*words, **how)
    try:
        out, err = process.communicate(timeout)
    except BaseException:
        process.end()
        raise
    return subprocess.CompletedProcess(words, process.wait(), out, err)


def call(module: str, function: str, *modules: str, env: dict[str, str], **arguments: Any) -> Any:
    """Return the result of a function (as JSON) from a process that has ``modules``. Its stderr is the test's."""
    order = {"module": module, "function": function, "arguments": arguments, "environment": env}
    process = WarmProcess({**order, "modules": [module, *modules], "folder": os.getcwd()}, stderr=2)
    with process.stdout:
        answer = process.stdout.readline()  # not up to the end: what it leaves behind may hold the pipe
        assert process.wait() == 0, f"{module}.{function} ended with {process.returncode}"
    return json.loads(answer)


def serve(connection: socket.socket) -> dict[str, Any]:
    """Run the server. Returns in each process that it forks, with its order; ends when the test's end is closed."""
    import torch
    import torch._dynamo  # what an optimizer imports at its first step
    import torch.distributed.checkpoint

    torch.set_num_threads(1)
    running: dict[int, tuple[int, int]] = {}
    while True:
        for ready in select.select([connection, *running], [], [])[0]:
            if ready is not connection:
                pid, status = running.pop(ready)
                os.close(ready)
                _write_number(status, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                os.close(status)
                continue
            line, fds, _, _ = socket.recv_fds(connection, LIMIT, 4)
            if not line:
                sys.exit()
            order = json.loads(line)
            _import(order["modules"])
            pid = os.fork()
            if pid == 0:
                connection.close()
                for fd in (*running, *(status for _, status in running.values()), fds[3]):
                    os.close(fd)
                _enter(order, fds[:3])
                return order
            _write_number(fds[3], pid)
            running[os.pidfd_open(pid)] = pid, fds[3]
            for fd in fds[:3]:
                os.close(fd)


def fork_interpreters() -> None:
    """Make each interpreter that this process starts by ``subprocess`` a fork of what this process is now."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    launcher = os.getpid()
    if os.fork() == 0:
        ours.close()
        _run(_serve_launcher(theirs, launcher))
        sys.exit()
    theirs.close()
    started, sending, libc = subprocess.Popen._execute_child, threading.Lock(), ctypes.CDLL(None)

    def execute(self: Any, args: Any, *how: Any) -> None:
        names = ("executable", "preexec_fn", "close_fds", "pass_fds", "cwd", "env", "startupinfo", "creationflags",
                 "shell", "p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite", "restore_signals",
                 "gid", "gids", "uid", "umask", "start_new_session", "process_group")  # fmt: skip
        said = dict(zip(names, how, strict=True))
        if (
            isinstance(args, str)
            or args[0] != sys.executable
            or said["pass_fds"]
            or said["shell"]
            or args[1] == "-c"
        ):
            return started(self, args, *how)
        order = {
            "words": [str(word) for word in args[1:] if word != "-u"], "modules": [],
            "environment": dict(os.environ if said["env"] is None else said["env"]),
            "folder": os.fspath(said["cwd"] or os.getcwd()),
            "session": said["start_new_session"], "group": said["process_group"],
        }  # fmt: skip
        pipes = (said["p2cread"], said["c2pwrite"], said["errwrite"])
        with sending:
            # the fork's parent ends at once, so that it is ours
            libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            fds = [number if fd == -1 else fd for number, fd in enumerate(pipes)]
            socket.send_fds(ours, [json.dumps(order).encode()], fds)
            self.pid = int(ours.recv(16))
            libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        self._child_created = True
        self._close_pipe_fds(*how[9:15])

    subprocess.Popen._execute_child = execute


def _serve_launcher(connection: socket.socket, launcher: int) -> dict[str, Any]:
    """Return in each process that the launcher starts, with its order; end with the launcher."""
    while True:
        line, fds, _, _ = socket.recv_fds(connection, LIMIT, 3)
        if not line:
            os._exit(0)
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            for fd in fds:
                os.close(fd)
            continue
        if os.fork():
            os._exit(0)
        order = json.loads(line)
        if order["session"]:
            os.setsid()
        elif order["group"] >= 0:
            os.setpgid(0, order["group"])
        while os.getppid() != launcher:
            time.sleep(0.0005)
        _enter(order, fds)
        connection.send(str(os.getpid()).encode())
        connection.close()
        return order


def _write_number(fd: int, number: int) -> None:
    with suppress(BrokenPipeError):  # nobody waits for it
        os.write(fd, number.to_bytes(8, "little", signed=True))


def _import(modules: Sequence[str]) -> None:
    missing = [name for name in modules if name not in sys.modules]
    for name in missing:
        importlib.import_module(name)
    if missing:
        # of threads, one goes with a fork; the allocator of pyarrow has one too, and begins it anew
        assert threading.active_count() == 1, threading.enumerate()
        gc.freeze()  # collections, and searches for referrers, in a process need not go through what is here


def _enter(order: dict[str, Any], fds: Sequence[int]) -> None:
    """Take the streams, the environment and the folder of the test."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115 (as long as the process)
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ |= order["environment"]
    os.chdir(order["folder"])
    paths = order["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    if failpoints := sys.modules.get("holdfast.failpoints"):  # which asks when it is imported
        failpoints.armed = os.environ.get("HOLDFAST_FAILPOINT", "")


def _run(order: dict[str, Any]) -> None:
    if "function" in order:
        answer = getattr(sys.modules[order["module"]], order["function"])(**order["arguments"])
        os.write(1, json.dumps(answer).encode() + b"\n")
        os._exit(0)
    first, *rest = order["words"]
    if order.get("starts_others") or [first, *rest[:1]] == ["-m", LAUNCHER]:
        fork_interpreters()
    if first == "-m":
        sys.argv = ["-m", *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    sys.path[0] = str(TESTS)  # and not this folder
    _run(serve(socket.socket(fileno=int(sys.argv[1]))))
