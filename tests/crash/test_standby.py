"""A standby of whole processes: the one that trains is killed, another goes on at once, and the bits are the same."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from holdfast.checkpoint.recovery.following import NICE
from holdfast.cli.diff import diff
from support.warm_python import LAUNCHED, run_python, start_python

from .test_drill import DRILLED, ENVIRONMENT, TORCHRUN

STEPS = 24


def train(run, *command, **environment):
    """An uninterrupted training."""
    done = run_python(
        *command, env={**ENVIRONMENT, "RUN": str(run), **environment}, modules=LAUNCHED, timeout=200
    )
    assert done.returncode == 0, done.stderr


class Standby:
    """``holdfast standby`` of a script, with what it prints."""

    def __init__(self, run, out, *command, **environment):
        self.out = out
        with open(out, "wb") as file, open(f"{out}.told", "wb") as told:
            self.process = start_python(
                "-m", "holdfast", "standby", "--", sys.executable, *command,
                env={**ENVIRONMENT, "RUN": str(run), **environment}, modules=LAUNCHED, starts_others=True,
                stdout=file.fileno(), stderr=told.fileno(),
            )  # fmt: skip

    @property
    def told(self):
        return Path(f"{self.out}.told").read_text()

    def steps(self):
        """Steps and the processes that did them, of the lines that are whole."""
        whole, _, _ = self.out.read_text().rpartition("\n")
        return [tuple(map(int, line.split())) for line in whole.splitlines()]

    def until(self, true, seconds=200):
        end = time.monotonic() + seconds
        while not true():
            assert self.process.poll() is None and time.monotonic() < end, self.told[-4000:]
            time.sleep(0.002)

    def follows(self):
        """Whether the process that waits has looked at what is written: its thread for that, of low priority, has
        begun to wait many times."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            for task in Path(f"/proc/{process.pid}/task").glob("*"):
                with suppress(OSError):  # it has ended
                    nice = (task / "stat").read_text().rpartition(")")[2].split()[16]
                    waits = (
                        (task / "status").read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0]
                    )
                    if int(nice) == NICE and int(waits) > 20:
                        return True
        return False

    def at_work(self, ready):
        """The process that trains, a few steps after another was ready to take over, and follows."""
        self.until(lambda: "is ready to take over" in self.told and self.follows())
        Path(ready).touch()
        self.until(lambda: self.steps() and self.steps()[-1][0] >= 12)
        return self.steps()[-1][1]


@pytest.mark.crash
@pytest.mark.timeout(300)
def test_killed_trainer_is_taken_over_with_the_same_bits(tmp_path):
    train(tmp_path / "whole", DRILLED / "sound.py", STEPS=str(STEPS))
    ready = str(tmp_path / "ready")
    standby = Standby(
        tmp_path / "run", tmp_path / "out", DRILLED / "sound.py", STEPS=str(STEPS), PAUSE="0.1", UNTIL=ready
    )
    trainer = standby.at_work(ready)
    step = standby.steps()[-1][0]
    os.kill(trainer, signal.SIGKILL)
    killed = time.monotonic()
    standby.until(lambda: standby.steps()[-1][1] != trainer)
    seconds = time.monotonic() - killed
    assert standby.process.wait(100) == 0, standby.told
    assert next(each for each, pid in standby.steps() if pid != trainer) <= step + 3
    assert seconds < 2, "a start alone takes longer"
    assert diff(f"{tmp_path}/whole@{STEPS}", f"{tmp_path}/run@{STEPS}", as_json=False)
    assert f"{trainer} ended with SIGKILL" in standby.told and "takes over" in standby.told


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.mark.crash
@pytest.mark.timeout(300)
def test_ranks_of_torchrun_are_taken_over(tmp_path):
    """By those of another torchrun: when a rank is killed, which torchrun starts again as the next standby; and when
    torchrun itself is, whose ranks would train on."""
    train(tmp_path / "whole", *TORCHRUN, DRILLED / "torch_ranks.py", STEPS=str(STEPS))
    held = tmp_path / "held"
    held.mkdir()
    for step in (9, 14):
        (held / str(step)).touch()
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--rdzv-backend=c10d",
                f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1")  # fmt: skip
    standby = Standby(
        tmp_path / "run", tmp_path / "out", *torchrun, DRILLED / "torch_ranks.py", STEPS=str(STEPS), PAUSE="0.1",
        HELD=str(held), BASE_EVERY="100",
    )  # fmt: skip
    # a newer base would be taken instead of what was followed

    def at_work(step, ready):
        """The rank that trains a few steps after ``step``, where it was held until a standby was ready."""
        standby.until(lambda: standby.told.count("is ready to take over") == ready and standby.follows())
        (held / str(step)).unlink()
        standby.until(lambda: standby.steps() and standby.steps()[-1][0] >= step + 3)
        return standby.steps()[-1][1]

    trainers = [at_work(9, 1)]
    os.kill(trainers[0], signal.SIGKILL)
    trainers.append(at_work(14, 2))
    psutil.Process(trainers[1]).parent().kill()
    assert standby.process.wait(150) == 0, standby.told[-4000:]
    assert standby.told.count("followed to step") == 2
    assert standby.told.count("has taken over from the workers") == standby.told.count("takes over") == 1
    pids = [*dict.fromkeys(pid for _, pid in standby.steps())]
    assert pids[:2] == trainers and len(pids) == 3
    assert diff(f"{tmp_path}/whole@{STEPS}", f"{tmp_path}/run@{STEPS}", as_json=False)
