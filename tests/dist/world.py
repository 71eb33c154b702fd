"""Worlds: several ranks that train together, forked from the server of ``support.warm_python``, over gloo on loopback.

with World() as world:
    said = world.run(2, kind="ddp", root="run", steps=8)       # by rank, what it said
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from support.warm_python import call, environment_of

LEAST_STEPS = 14
"""The fewest steps of a run that others are compared with, so that one is enough for tests of unlike lengths."""
PATIENCE_SECONDS = 90.0
"""How long a world may take before what is left of it is killed, which is a failure of the test."""


class World:
    """The test's end. Runs one world at a time, whose ranks do what ``main`` of ``script`` says."""

    undisturbed: dict[str, list[dict[str, Any]]] = {}  # noqa: RUF012 (of this process)

    def __init__(self, script: str = "training", patience_seconds: float = PATIENCE_SECONDS) -> None:
        """``script`` is a module of ``dist``, or the full name of another one."""
        self._script = script if "." in script else f"dist.{script}"
        self._patience = patience_seconds

    def run(self, world_size: int, **order: Any) -> list[dict[str, Any]]:
        """What each rank of a world said, put together, with ``code``: 0, or minus the signal that ended it."""
        environment = environment_of(
            GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1", WORLD_SIZE=str(world_size)
        )
        how = {"script": self._script, "patience_seconds": self._patience, "order": order}
        answer = call("dist.world", "supervise", self._script, env=environment, **how)
        for rank, said in enumerate(answer["ranks"]):
            if "stacks" in said:  # it crashed or hung, and pytest shortens what an assertion prints
                print(f"rank {rank} ended with {said['code']}:\n{said['stacks']}", file=sys.stderr)
        assert not answer["late"], f"{order} took more than {self._patience:.0f} s: {answer['ranks']}"
        return answer["ranks"]

    def run_each(self, world_size: int, orders: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """By order, what each rank of one world said, which does one after the other in one process group."""
        ranks = self.run(world_size, each=orders)
        return [[{**said, **said.get(str(number), {})} for said in ranks] for number in range(len(orders))]

    def run_undisturbed(self, world_size: int, has_run: bool = True, **order: Any) -> list[dict[str, Any]]:
        """What each rank said that had a run directory of its own, or only a folder for what else it writes.

        Made once for each order, whatever its ``steps``, and only to be read.
        """
        if steps := order.get("steps"):
            order["steps"] = max(steps, LEAST_STEPS)
        key = json.dumps([self._script, world_size, has_run, order], sort_keys=True, default=str)
        if key not in World.undisturbed:
            with tempfile.TemporaryDirectory() as folder:
                place = {"root": f"{folder}/run"} if has_run else {"output": f"{folder}/output"}
                World.undisturbed[key] = self.run(world_size, **place, **order)
        return [up_to(steps, said) if steps else said for said in World.undisturbed[key]]

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the server to others."""


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


def up_to(steps: int, said: dict[str, Any]) -> dict[str, Any]:
    """What a rank would have said that ended after ``steps``."""
    losses, digests = said.get("losses", []), said.get("digests", {})
    return said | {
        "losses": losses[:steps],
        "digests": {step: digest for step, digest in digests.items() if int(step) <= steps},
    }


def do_each(
    main: Callable[..., None],
    rank: int,
    world_size: int,
    rendezvous: str,
    say: Callable[..., None],
    each: list[dict[str, Any]],
) -> None:
    """Do one order after the other, and say of each what it says by its number."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    dist.init_process_group = dist.destroy_process_group = lambda *_, **__: None
    for number, order in enumerate(each):
        said: dict[str, Any] = {}

        def tell(said: dict[str, Any] = said, number: int = number, **what: Any) -> None:
            said |= what
            say(**{str(number): said})

        main(rank, world_size, rendezvous, tell, **order)


def supervise(script: str, patience_seconds: float, order: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own: fork the ranks, wait for them, and put together what they say."""
    use_one_gloo_thread()
    main, world_size = sys.modules[script].main, int(os.environ["WORLD_SIZE"])
    main = partial(do_each, main) if "each" in order else main
    main = partial(main, **order)
    with tempfile.TemporaryDirectory() as folder:
        pids = [_fork(main, rank, world_size, Path(folder), patience_seconds) for rank in range(world_size)]
        codes, late = _wait(pids, patience_seconds)
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


def _fork(
    main: Callable[..., None], rank: int, world_size: int, folder: Path, patience_seconds: float
) -> int:
    path = folder / f"said-{rank}"
    path.touch()
    pid = os.fork()
    if pid:
        return pid
    import faulthandler
    import warnings

    stacks = open(folder / f"stacks-{rank}", "w")  # noqa: SIM115 (open until the process ends)
    faulthandler.enable(stacks)
    faulthandler.dump_traceback_later(patience_seconds - 5, exit=True, file=stacks)
    os.environ["RANK"] = str(rank)
    os.dup2(2, 1)  # what libraries print is not part of the answer

    def say(**what: Any) -> None:
        with open(path, "a") as file:
            print(json.dumps(what), file=file)

    def note(message: Any, *_: Any, **__: Any) -> None:
        warned.append(str(message))
        say(warnings=warned)

    warned: list[str] = []
    warnings.showwarning = note
    try:
        main(rank, world_size, f"file://{folder}/rendezvous", say)
    except BaseException as error:
        import traceback

        say(error=f"{type(error).__name__}: {error}", trace=traceback.format_exc(), raised_at=time.time())
    finally:
        os._exit(0)


def _wait(pids: list[int], patience_seconds: float) -> tuple[list[int], bool]:
    codes: dict[int, int] = {}
    end, late = time.monotonic() + patience_seconds, False
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


def finished(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All ranks came to the end, whatever they hold."""
    for said in ranks:
        assert said.get("finished"), (said.get("trace", ""), said.get("stacks", ""), said)
    return ranks


def ended(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All ranks came to the end, with one state."""
    finished(ranks)
    assert all(said["digests"] == ranks[0]["digests"] for said in ranks)
    return ranks


def flip(path: Path, offset: int) -> None:
    """Change a bit of the byte at ``offset`` of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
