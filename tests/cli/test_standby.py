"""A standby: the wait at the opening of a run, and what the supervisor does with what its processes tell."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time

import pytest
import torch

import holdfast
from holdfast.cli.standby_job import stand_by, with_own_ports
from holdfast.distributed import Ranks
from holdfast.errors import BadInput, RunLocked
from holdfast.store.disk import Disk
from holdfast.store.lock import lock_of
from holdfast.store.run_store import LocalStore
from holdfast.supervised.attempt import Supervisor, is_supervised
from holdfast.supervised.standing_by import (
    OPENED,
    VARIABLE,
    WAITING,
    forget_closing,
    say_closed,
    say_opened,
    wait_for_run,
)


@pytest.fixture
def status(monkeypatch, tmp_path):
    """The status file of this process, whose supervisor is this process."""
    path = tmp_path / "standby" / "process-1.jsonl"
    path.parent.mkdir()
    monkeypatch.setenv(VARIABLE, str(path))
    with Supervisor(path.parent):
        yield path


def said(status):
    return [json.loads(line)["is"] for line in status.read_text().splitlines()] if status.exists() else []


def waiter(run):
    """A thread that waits for ``run``, with what it has found."""
    found = []

    def wait():
        try:
            wait_for_run(run)
            found.append(time.monotonic())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread, found


def until(true):
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_locked_run_is_waited_for_and_opened_at_once(status, tmp_path):
    store = LocalStore.open(tmp_path / "run")
    store.begin(None)
    thread, found = waiter(tmp_path / "run")
    until(lambda: said(status) == [WAITING])
    assert not found
    store.close()
    freed = time.monotonic()
    thread.join(10)
    assert found[0] - freed < 0.5


@pytest.mark.parametrize("leads", [True, False])
def test_rank_waits_for_the_lock_of_its_directory_or_of_its_part(status, monkeypatch, tmp_path, leads):
    ranks = Ranks(1)
    monkeypatch.setattr(ranks, "first_takes_its_time", lambda *_: None)
    lock = Disk(tmp_path).lock(lock_of(0 if leads else 1), {})
    with pytest.raises(RunLocked):
        wait_for_run(tmp_path, ranks, 0.1, leads)
    wait_for_run(tmp_path, ranks, 0.1, not leads)
    lock.release()


def test_run_that_nobody_writes_is_not_waited_for(status, tmp_path):
    wait_for_run(tmp_path / "run")
    assert said(status) == []


def test_locked_run_is_refused_without_a_supervisor(monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE, raising=False)
    with LocalStore.open(tmp_path / "run") as store:
        store.begin(None)
        wait_for_run(tmp_path / "run")
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with pytest.raises(RunLocked):
            holdfast.Checkpointer(tmp_path / "run", model=model, optimizer=optimizer).resume()


def test_wait_ends_with_its_supervisor(monkeypatch, tmp_path):
    path = tmp_path / "standby" / "process-1.jsonl"
    path.parent.mkdir()
    monkeypatch.setenv(VARIABLE, str(path))
    assert not is_supervised(path.parent)
    with LocalStore.open(tmp_path / "run") as store:
        store.begin(None)
        with pytest.raises(SystemExit, match="has ended"):
            wait_for_run(tmp_path / "run")


def test_run_closed_in_order_is_not_taken_over(status, monkeypatch, tmp_path):
    """The script that closed it may go on; only its failure makes the run free."""
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.setenv(VARIABLE, str(status.with_name("process-0.jsonl")))
    say_closed(run)
    wait_for_run(run)  # itself may open it again
    monkeypatch.setenv(VARIABLE, str(status))
    thread, found = waiter(run)
    until(lambda: said(status) == [WAITING])
    time.sleep(0.05)
    assert not found
    forget_closing(status.parent)
    thread.join(10)
    assert isinstance(found[0], float)


def test_checkpointer_tells_what_it_does(status, tmp_path):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with holdfast.Checkpointer(tmp_path / "run", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
        assert said(status) == [OPENED] and list(status.parent.glob("closed-*")) == []
    assert len(list(status.parent.glob("closed-*"))) == 1
    say_opened(tmp_path / "run", 3)
    assert list(status.parent.glob("closed-*")) == []


def test_replica_is_refused(status, tmp_path):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    with pytest.raises(BadInput, match="replica"):
        holdfast.Checkpointer(tmp_path / "run", model=model, optimizer=optimizer, replica=True)


FAKE = """
import json, os, sys, time
status, word = os.environ["HOLDFAST_STANDBY"], lambda **w: open(status, "a").write(json.dumps(w) + "\\n")
folder, number = os.path.dirname(status), int(status.rpartition("-")[2].split(".")[0])
turn = os.path.join(folder, "turn")
while number > 1 and not os.path.exists(f"{turn}-{number}"):
    word(**{"is": "waiting"})
    time.sleep(0.02)
word(**{"is": "opened", "step": int(sys.argv[1]) * number})
while not os.path.exists(os.path.join(folder, f"process-{number + 1}.jsonl")):
    time.sleep(0.02)
open(f"{turn}-{number + 1}", "w").close()
print(number, flush=True)
sys.exit(0 if number == int(sys.argv[2]) else 7)
"""
"""Stands for a script that opens a run at a step, dies with 7 once there is a standby, and ends well as process N."""


def job(capfd, per_process, good, **options):
    code = stand_by([sys.executable, "-c", FAKE, str(per_process), str(good)], **{"restarts": 10, **options})
    found = capfd.readouterr()
    return code, [int(line) for line in found.out.split()], found.err


def test_standbys_take_over_until_one_ends_well(capfd):
    code, ended, told = job(capfd, 5, 3)
    assert (code, ended) == (0, [1, 2, 3]) and told.count("takes over") == 2


def test_launcher_gets_a_free_port_in_place_of_a_named_one():
    variables = {"MASTER_PORT": "29500", "MASTER_ADDR": "localhost"}
    command = [
        "torchrun", "--master_port", "29500", "--rdzv-endpoint=[::1]:29400", "-m", "train", "--main_process_port=0",
    ]  # fmt: skip
    words, own = with_own_ports(command, variables)
    ports = {words.pop(2), words[2].rpartition(":")[2], own["MASTER_PORT"]}
    assert words == [
        command[0],
        command[1],
        f"--rdzv-endpoint=[::1]:{words[2].rpartition(':')[2]}",
        *command[4:],
    ]
    assert own.keys() == {"MASTER_PORT"} and not ports & {"29500", "29400"}
    for port in ports:
        with socket.socket() as free:
            free.bind(("", int(port)))


@pytest.mark.parametrize(
    "command, changed",
    [
        ("python -m torch.distributed.run --master-port 7 -m train --master-port 7", [4]),
        ("torchrun --master-port 7 --module train --master-port 7", [2]),
        ("python train.py --master-port 7", []),
        ("accelerate launch --main_process_port 7 train.py --main_process_port 7", [3]),
    ],
)
def test_options_of_the_script_itself_stay(command, changed):
    before = command.split()
    after, _ = with_own_ports(before, {})
    assert [i for i, word in enumerate(before) if word != after[i]] == changed


LAUNCHER = """
import json, os, sys, time
status, told, order = os.environ["HOLDFAST_STANDBY"], *sys.argv[1:]
word = lambda **w: open(status, "a").write(json.dumps({"time": time.time(), **w}) + "\\n")
folder, number = os.path.dirname(status), int(status.rpartition("-")[2].split(".")[0])
second = os.path.join(folder, "second")
def until(true):
    while not true():
        time.sleep(0.01)
def exists(name):
    return lambda: os.path.lexists(os.path.join(folder, name))
def taken_over(times):
    return lambda: open(told).read().count("has taken over") == times
if number == 1:
    word(**{"is": "opened", "step": 1})
    until(exists("process-2.jsonl"))
    open(os.path.join(folder, "first-died"), "w").close()
word(**{"is": "waiting"})
until(exists({1: "second", 2: "first-died"}.get(number, "never")))
if number == 1 and order == "death":
    until(lambda: not os.path.exists("/proc/" + os.readlink(second)))  # the job has reaped it
word(**{"is": "opened", "step": 5})
print(number, flush=True)
if number == 1:
    until(exists("process-3.jsonl"))
    sys.exit(0)
until(taken_over(1))
os.symlink(str(os.getpid()), second)
if order == "opening":
    until(taken_over(2))
sys.exit(7)
"""
"""Stands for two launchers: the workers of the first die, it starts others, and these take over from the second.

The job sees of the second takeover first the ``death`` of the second launcher or the ``opening`` by the first.
"""


@pytest.mark.parametrize("order, says", [("death", [1, 1]), ("opening", [2, 0])])
def test_launcher_that_starts_its_workers_again_becomes_the_standby(
    capfd, monkeypatch, tmp_path, order, says
):
    told = tmp_path / "told"
    with told.open("w") as err:
        monkeypatch.setattr(sys, "stderr", err)
        code = stand_by([sys.executable, "-c", LAUNCHER, str(told), order], restarts=10)
    assert (code, capfd.readouterr().out.split()) == (0, ["2", "1"])
    assert [
        told.read_text().count(words) for words in ("has taken over from the workers", "takes over")
    ] == says


def test_no_restart_leaves_the_exit_code(capfd):
    line = json.dumps({"is": "opened", "step": 1})
    code = f"import os, sys; open(os.environ['HOLDFAST_STANDBY'], 'a').write({line!r} + chr(10)); sys.exit(7)"
    assert stand_by([sys.executable, "-c", code], restarts=0) == 7
    assert "no restart is left" in capfd.readouterr().err


def test_script_that_dies_at_one_step_is_given_up(capfd):
    code, ended, told = job(capfd, 0, 99)
    assert code == 7 and len(ended) <= 3 and "the script is at fault" in told


def test_script_that_never_trains_is_not_started_again(capfd):
    assert stand_by([sys.executable, "-c", "import sys; sys.exit(9)"], restarts=10) == 9
    assert "takes over" not in capfd.readouterr().err


def test_signal_goes_to_the_trainer_and_nobody_takes_over(capfd, tmp_path):
    code = (
        "import json, os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "open(os.environ['HOLDFAST_STANDBY'], 'a').write(json.dumps({'is': 'opened', 'step': 1}) + '\\n')\n"
        "open(sys.argv[1], 'w').close()\n"
        "time.sleep(60)\n"
    )
    told = tmp_path / "told"

    def stop():
        until(told.exists)
        os.kill(os.getpid(), 15)

    thread = threading.Thread(target=stop)
    thread.start()
    assert stand_by([sys.executable, "-c", code, str(told)], restarts=10) == 143
    thread.join()
    assert "takes over" not in capfd.readouterr().err


def test_engine_waits_for_its_run(status, tmp_path):
    def opened():
        torch.manual_seed(0)
        model = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        model.forward = lambda x: model[2](model[1](model[0](x))).square().mean()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return holdfast.offload(model, optimizer, tmp_path / "run", precision="fp32")

    with opened() as engine:
        engine.step([(torch.ones(1, 4),)])
    store = LocalStore.open(tmp_path / "run")
    threading.Timer(0.3, store.close).start()
    began = time.monotonic()
    with opened() as engine:
        assert engine.steps_done == 1 and time.monotonic() - began > 0.2
    assert said(status) == [OPENED, WAITING, OPENED]
