"""Worlds: several ranks that train together, forked from a server that has torch loaded, over gloo on loopback.

with World() as world:
    said = world.run(2, kind="ddp", root="run", steps=8)       # by rank, what it said
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
PATIENCE_SECONDS = 90.0
"""How long a world may take before what is left of it is killed, which is a failure of the test."""


class World:
    """The test's end. Runs one world at a time, whose ranks do what ``main`` of ``script`` says."""

    def __init__(self, script: str = "training") -> None:
        path = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
        env = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "PYTHONPATH": path}
        self._process = subprocess.Popen(
            [sys.executable, __file__, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **ONE_THREAD, **env},
        )  # fmt: skip

    def run(self, world_size: int, **order: Any) -> list[dict[str, Any]]:
        """What each rank of a world said, put together, with ``code``: 0, or minus the signal that ended it."""
        assert self._process.stdin and self._process.stdout
        print(
            json.dumps({"world_size": world_size, **order}, default=str), file=self._process.stdin, flush=True
        )
        answer = json.loads(self._process.stdout.readline())
        for rank, said in enumerate(answer["ranks"]):
            if "stacks" in said:  # it crashed or hung, and pytest shortens what an assertion prints
                print(f"rank {rank} ended with {said['code']}:\n{said['stacks']}", file=sys.stderr)
        assert not answer["late"], f"{order} took more than {PATIENCE_SECONDS:.0f} s: {answer['ranks']}"
        return answer["ranks"]

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(PATIENCE_SECONDS)
        self._process.stdout.close()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def script() -> Any:
    """The module that the ranks run."""
    return importlib.import_module(f"dist.{sys.argv[1]}")


def serve() -> None:
    import torch
    import torch._dynamo  # what an optimizer imports at its first step
    import torch.distributed.checkpoint  # what FSDP2 imports at its first forward pass

    script()
    torch.set_num_threads(1)
    use_one_gloo_thread()
    gc.freeze()  # collections, and searches for referrers, in a rank need not go through what it was forked with
    for line in sys.stdin:
        print(json.dumps(_supervise(**json.loads(line))), flush=True)


def use_one_gloo_thread() -> None:
    """Give each gloo group one worker thread, where torch gives it two.

    In torch 2.13 each worker notes the name of the collective that it ended, without a lock. A name of more than 15
    characters is on the heap (DTensor's ALLGATHER_COALESCED), so two workers at once may free it twice: the process
    aborts with "malloc(): unaligned tcache chunk detected".
    """
    from torch.distributed import distributed_c10d

    class OneWorker(distributed_c10d.ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = self._Options()
            options._threads, options._timeout = 1, timeout
            options._devices = [self.create_device(interface="lo")]
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OneWorker


def _supervise(world_size: int, **order: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        pids = [_fork(rank, world_size, Path(folder), order) for rank in range(world_size)]
        codes, late = _wait(pids)
        ranks = []
        for rank in range(world_size):
            said: dict[str, Any] = {"code": codes[rank]}
            for line in (Path(folder) / f"said-{rank}").read_text().splitlines():
                said |= json.loads(line)
            stacks = sorted(Path(folder).glob(f"stacks-{rank}*"))
            if text := "\n".join(filter(None, (path.read_text() for path in stacks))):
                said["stacks"] = text
            ranks.append(said)
    return {"ranks": ranks, "late": late}


def _fork(rank: int, world_size: int, folder: Path, order: dict[str, Any]) -> int:
    path = folder / f"said-{rank}"
    path.touch()
    pid = os.fork()
    if pid:
        return pid
    import faulthandler
    import warnings

    stacks = open(folder / f"stacks-{rank}", "w")  # noqa: SIM115 (open until the process ends)
    faulthandler.enable(stacks)
    faulthandler.dump_traceback_later(PATIENCE_SECONDS - 5, exit=True, file=stacks)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}

    def say(**what: Any) -> None:
        with open(path, "a") as file:
            print(json.dumps(what), file=file)

    def note(message: Any, *_: Any, **__: Any) -> None:
        warned.append(str(message))
        say(warnings=warned)

    warned: list[str] = []
    warnings.showwarning = note
    try:
        script().main(rank, world_size, f"file://{folder}/rendezvous", say, **order)
    except BaseException as error:
        import traceback

        say(error=f"{type(error).__name__}: {error}", trace=traceback.format_exc(), raised_at=time.time())
    finally:
        os._exit(0)


def _wait(pids: list[int]) -> tuple[list[int], bool]:
    codes: dict[int, int] = {}
    end, late = time.monotonic() + PATIENCE_SECONDS, False
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > end and not late:
            late = True
            for each in set(pids) - set(codes):
                os.kill(each, signal.SIGKILL)
        else:
            time.sleep(0.01)
    return [codes[pid] for pid in pids], late


def ended(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All ranks came to the end, with one state."""
    for said in ranks:
        assert said.get("finished"), (said.get("trace", ""), said.get("stacks", ""), said)
    assert all(said["digests"] == ranks[0]["digests"] for said in ranks)
    return ranks


def flip(path: Path, offset: int) -> None:
    """Change a bit of the byte at ``offset`` of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose training.py is not that of all tests
    serve()
