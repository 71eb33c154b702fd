"""The progress bar over the steps of an engine. That of a recovery is in tests/checkpoint/test_watching.py."""

import io
import re

import pytest
from rich.console import Console

import holdfast
from holdfast.errors import BadInput
from training import adamw, batches, decoder


class StandIn:
    """An engine that only counts: each step takes half a second and has a hundred tokens."""

    def __init__(self, done=0):
        self.steps_done, self.last = done, {}

    @property
    def durable_step(self):
        return self.steps_done - 1

    def step(self):
        self.steps_done += 1
        loss = 3.0 - self.steps_done / 10
        self.last = {"step": self.steps_done, "loss": loss, "seconds": 0.5, "tokens": 100, "skipped": None}


def terminal(is_one=True, width=80):
    return Console(file=io.StringIO(), force_terminal=is_one, width=width, _environ={"TERM": "xterm"})


def drawn(engine, until, *, on=None, body=lambda: None):
    """What the bar of a loop writes, and the numbers that the loop gets."""
    numbers, console = [], on or terminal()
    for number in holdfast.progress_bar(console).steps(engine, until):
        numbers.append(number)
        engine.step()
        body()
    return console.file.getvalue(), numbers


def test_steps_are_drawn_with_loss_and_speed():
    text, numbers = drawn(StandIn(done=2), until=5)
    assert numbers == [2, 3, 4]
    assert "step 2/5" in text
    assert text.count("loss 2.500  200 tokens/s  500 ms/step  durable 4  0.0 s left") >= 1
    lines = [line for line in text.replace("\r", "\n").splitlines() if "loss 2.500" in line]
    assert all("step 5/5" in line for line in lines)


@pytest.mark.parametrize("width", [30, 40, 60, 79])
def test_narrow_terminals_keep_step_and_loss(width):
    """What does not fit is left out, and nothing is cut."""
    text, _ = drawn(StandIn(done=1233), until=1234, on=terminal(width=width))
    *_, last = [line for line in re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", text).splitlines() if line]
    assert last.startswith("step 1234/1234 ") and "loss -120.400" in last
    assert len(last) <= width and "…" not in last
    assert ("left" in last, "durable" in last) == (width >= 60, width >= 79)


def test_no_terminal_gets_nothing():
    assert drawn(StandIn(), until=3, on=terminal(False)) == ("", [0, 1, 2])


def test_what_a_script_prints_stays_in_its_file(capsys):
    """Standard output is no terminal here, so what it gets is not drawn above the bar."""
    text, _ = drawn(StandIn(), until=2, body=lambda: print("mine"))
    assert "step 2/2" in text and "mine" not in text
    assert capsys.readouterr().out == "mine\nmine\n"


def test_the_cursor_stays_visible():
    """A run may be killed at any step, and nobody shows the cursor again then."""
    console = terminal()

    def check():
        text = console.file.getvalue()
        assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0

    drawn(StandIn(), until=2, on=console, body=check)


def test_a_failed_loop_ends_its_bar():
    console = terminal()
    with pytest.raises(ZeroDivisionError):
        drawn(StandIn(), until=9, on=console, body=lambda: 1 // 0)
    before = console.file.getvalue()
    console.print("after")  # a bar that was still there would be drawn anew below this
    assert console.file.getvalue() == before + "after\n"


def test_only_the_first_rank_draws(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    assert drawn(StandIn(), until=2) == ("", [0, 1])


def test_a_resumed_engine_goes_on_with_its_next_step(tmp_path, capsys):
    for until, expected in ((2, [0, 1]), (3, [2])):
        model, numbers = decoder(blocks=2), []
        with holdfast.offload(model, adamw(model), tmp_path / "run", precision="fp32") as engine:
            for number in holdfast.progress_bar().steps(engine, until):
                numbers.append(number)
                engine.step(batches(number, 2))
        assert numbers == expected
    assert "loss" not in capsys.readouterr().err


def test_a_body_without_a_step_is_an_error():
    """It would get the same number for ever."""
    with pytest.raises(BadInput, match=r"did not call engine\.step for step 0"):
        for _ in holdfast.progress_bar(terminal()).steps(StandIn(), 2):
            pass
