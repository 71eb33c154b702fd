"""Curves for TensorBoard and Weights & Biases: one of each run, however often it was resumed, and never its end."""

from __future__ import annotations

import socket
import struct
import sys
import threading
from types import SimpleNamespace

import pytest

from holdfast.cli.train.step_loggers import StepLoggers, refuse_missing_loggers
from holdfast.config import LogConfig
from holdfast.errors import BadInput
from holdfast.events import EventLog, read_events
from support.tiny_keys import IN_MEMORY, TINY, words


def step(number, loss, **fields):
    usual = {"grad_norm": 0.5, "learning_rate": [0.1, 0.1], "seconds": 2.0, "tokens": 64}
    return usual | {"step": number, "loss": loss} | fields


def tensorboard_curve(run, name):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    return [(event.step, round(event.value, 4)) for event in found.Scalars(name)]


def test_steps_done_again_are_there_once_in_tensorboard(tmp_path):
    """The first sitting is killed after its third step, of which the first was durable."""
    pytest.importorskip("tensorboard")
    first = StepLoggers(LogConfig(tensorboard=True), tmp_path, 0, {})
    first.validation({"step": 0, "loss": 5.0})
    for number in (1, 2, 3):
        first.step(step(number, 4.0 - number))
    second = StepLoggers(LogConfig(tensorboard=True), tmp_path, 1, {})
    for number in (2, 3, 4):
        second.step(step(number, 14.0 - number))
    second.close()
    assert tensorboard_curve(tmp_path, "train/loss") == [(1, 3.0), (2, 12.0), (3, 11.0), (4, 10.0)]
    assert tensorboard_curve(tmp_path, "train/tokens per second")[0] == (1, 32.0)
    assert tensorboard_curve(tmp_path, "validation/loss") == [(0, 5.0)]


def test_steps_done_again_are_logged_once_to_weights_and_biases(tmp_path, monkeypatch):
    """It takes nothing back: what an earlier sitting logged is not logged again, and the id stays."""
    begun, logged = [], []

    def init(**options):
        begun.append(options)
        return SimpleNamespace(
            log=lambda values, step: logged.append((step, values["train/loss"])), finish=int
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
    events = EventLog(tmp_path / "events.jsonl")
    for first, last in ((1, 3), (2, 4)):  # killed when step 1 was durable
        loggers = StepLoggers(LogConfig(wandb="mine"), tmp_path, first - 1, {"run.seed": 0})
        for number in range(first, last + 1):
            events.emit("step", step=number)
            loggers.step(step(number, 9.0 - number))
        loggers.close()
    assert logged == [(1, 8.0), (2, 7.0), (3, 6.0), (4, 5.0)]
    assert [each["mode"] for each in begun] == ["offline", "offline"]
    assert begun[0]["id"] == begun[1]["id"] and begun[0]["project"] == "mine"


def test_what_a_step_lacks_is_no_point(tmp_path):
    loggers, points = StepLoggers(LogConfig(), tmp_path, 0, {}), []
    loggers._loggers = [Recorder(points)]
    loggers.step(step(1, 2.0, grad_norm=None, learning_rate=[], seconds=0.0))
    assert points == [({"train/loss": 2.0}, 1)]


class Recorder:
    name = "recorder"

    def __init__(self, points):
        self.points = points

    def write(self, values, step):
        self.points.append((dict(values), step))

    def close(self):
        pass


def test_a_logger_that_fails_is_left_out_with_one_warning(tmp_path):
    class Failing(Recorder):
        name = "failing"

        def write(self, values, step):
            raise OSError("no space")

    loggers, points = StepLoggers(LogConfig(), tmp_path, 0, {}), []
    loggers._loggers = [Failing([]), Recorder(points)]
    with pytest.warns(
        UserWarning, match="no more is logged to failing, and training continues: OSError: no space"
    ):
        loggers.step(step(1, 2.0))
    loggers.step(step(2, 2.0))
    loggers.close()
    assert [number for _, number in points] == [1, 2]


@pytest.mark.slow
@pytest.mark.filterwarnings("default:no more is logged")
def test_a_logger_that_cannot_begin_does_not_end_training(tmp_path, holdfast):
    pytest.importorskip("tensorboard")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/tensorboard").write_text("in the way")
    result = holdfast(*arguments(tmp_path / "run", 1, tensorboard="true"))
    assert result.code == 0 and "no more is logged to TensorBoard" in result.err


@pytest.mark.parametrize(
    ("how", "library"), [({"tensorboard": True}, "tensorboard"), ({"wandb": "mine"}, "wandb")]
)
def test_a_library_that_is_not_there_is_one_line(monkeypatch, how, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(BadInput, match=rf"log\.{library}.* pip install 'holdfast\[logging\]'"):
        refuse_missing_loggers(LogConfig(**how))
    refuse_missing_loggers(LogConfig())


def arguments(run, steps, **log):
    """The command line of a run of ``steps``, and its text."""
    text = run.parent / "text"
    text.write_bytes(bytes(range(256)) * 8)
    logs = {f"log.{key}": value for key, value in log.items()}
    return [
        "train",
        *words(TINY | IN_MEMORY | {"run.dir": run, "data.text": text, "train.steps": steps} | logs),
    ]


def history(run):
    """The steps in the files of Weights & Biases, by the name of what was logged, in order."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        for record in records(path.read_bytes()):
            told = Record.FromString(record)
            if told.WhichOneof("record_type") == "history":
                items = {item.key or ".".join(item.nested_key): item.value_json for item in told.history.item}
                found.append((path, items))
    return found


def records(data):
    """The records of a file of Weights & Biases: a header, and the log format of LevelDB in blocks of 32 KiB."""
    place, held = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        held += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            yield held
            held = b""


@pytest.mark.slow
def test_weights_and_biases_is_written_offline_and_has_each_step_once(
    tmp_path, holdfast_process, monkeypatch
):
    """Nothing connects to the server that the environment names."""
    pytest.importorskip("wandb")
    called = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: (accepted(server), called.set()), daemon=True).start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        for name in ("WANDB_BASE_URL", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, address)
        run = tmp_path / "run"
        for steps in (2, 4):
            process = holdfast_process(*arguments(run, steps, wandb="mine"))
            _, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
        assert not called.is_set()
    found = history(run)
    losses = {
        event["step"]: event["loss"]
        for event in read_events(run / "events.jsonl")
        if event["event"] == "step"
    }
    logged = [
        (int(items["_step"]), float(items["train/loss"])) for _, items in found if "train/loss" in items
    ]
    assert logged == sorted(losses.items()) and len(logged) == 4
    assert len({path for path, _ in found}) == 2
    assert len({path.name for path, _ in found}) == 1  # one id


def accepted(server):
    try:
        server.accept()
    except OSError:
        threading.Event().wait()  # closed, and nobody called
