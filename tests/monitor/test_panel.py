"""The panel: every number a person needs, in a picture of 80 columns or in plain lines."""

import io
import itertools
import os
import signal

import pytest
from rich.console import Console

from holdfast.cli.train.orderly_stop import StopRequest
from holdfast.monitor.training_panel import TrainingPanel, sparkline

STEP = {
    "step": 12, "loss": 2.3051, "grad_norm": 0.9, "seconds": 0.5, "tokens": 4096,
    "learning_rate": [2e-3, 1e-3], "durable_step": 11, "read_bytes": 200_000_000,
    "written_bytes": 150_000_000, "host_bytes": 612 * 2**20, "skipped": None,
}  # fmt: skip


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def plain(width=200, **kwargs):
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=width, force_terminal=False)
    return TrainingPanel(console, title="runs/a", steps=100, clock=clock, **kwargs), out, clock


def terminal(width, **kwargs):
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None, legacy_windows=False)
    return TrainingPanel(console, title="runs/a", steps=100, host_budget=4 * 2**30, **kwargs), out, console


def test_a_plain_line_says_all_of_it():
    panel, out, _ = plain(host_budget=4 * 2**30)
    with panel:
        panel.step(STEP)
    assert out.getvalue() == (
        "step  12/100  loss 2.305  8,192 tokens/s  read 0.40 GB/s  write 0.30 GB/s  "
        "memory 612.0 MiB of 4.0 GiB  durable 11  44.0 s left\n"
    )


def printed_steps(out):
    return [int(line.split("/")[0].split()[1]) for line in out.getvalue().splitlines()]


def test_plain_lines_come_first_last_and_every_two_seconds():
    panel, out, clock = plain()
    with panel:
        for step in (1, 2, 3, 4, 99, 100):
            panel.step(STEP | {"step": step})
            clock.now += 0.9
    assert printed_steps(out) == [1, 4, 100]


def test_plain_lines_become_fewer_until_there_is_one_a_minute():
    panel, out, clock = plain()
    panel.steps = 10_000
    for step in range(1, 10_001):
        panel.step(STEP | {"step": step})
        clock.now += 1
    steps = printed_steps(out)
    assert steps[:4] == [1, 3, 5, 7]
    assert 300 < next(step for step in steps if step > 300) <= 310
    assert {b - a for a, b in itertools.pairwise(steps[:-1]) if a > 1900} == {60}


def test_plain_lines_are_not_wrapped():
    panel, out, _ = plain(width=40)
    panel.step(STEP)
    panel.note("SIGINT: finishing this step, committing it, and leaving; once more to leave at once")
    assert len(out.getvalue().splitlines()) == 2


def test_a_skipped_step_is_told_and_is_not_drawn():
    panel, out, _ = plain()
    panel.step(STEP | {"skipped": "the loss of micro-batch 0 is nan", "loss": float("nan")})
    assert "step 12 was skipped: the loss of micro-batch 0 is nan\n" in out.getvalue()
    assert "loss nan" in out.getvalue()
    panel.picture()


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    panel, out, _ = terminal(120)
    with panel:
        panel.step(STEP)
    assert out.getvalue().startswith("step  12/100")


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_picture_fits_and_nothing_in_it_is_cut_off(width):
    panel, _, console = terminal(width)
    huge = {"host_bytes": 123 * 2**30, "step": 99, "tokens": 123_456_789, "durable_step": 2}
    with panel:
        for _ in range(60):
            panel.step(STEP)
        panel.step(STEP | huge)
        with console.capture() as captured:
            console.print(panel.picture())
    lines = captured.get().splitlines()
    assert {len(line) for line in lines} == {width}
    assert "…" not in captured.get()
    for text in (
        "step 99 of 100",
        "99%",
        "read ",
        "GB/s",
        "123.0 GiB of 4.0 GiB",
        "97 steps behind",
        "▁▁",
        "gradient norm",
    ):
        assert text in captured.get(), text


def test_long_name_loses_its_beginning():
    panel, _, console = terminal(40)
    panel.title = "/mnt/a/long/way/to/runs/default"
    panel.step(STEP)
    with console.capture() as captured:
        console.print(panel.picture())
    assert "─ …y/to/runs/default  step 12 of 100 ─╮" in captured.get()


def test_the_last_picture_stays_on_the_terminal():
    panel, out, _ = terminal(80)
    with panel:
        panel.step(STEP | {"step": 100, "durable_step": 100})
    last = out.getvalue().rsplit("╭", 1)[1]
    assert "survives power loss" in last
    assert "0.0 s left" in last


def test_a_panel_without_any_step_shows_nothing_and_ends():
    panel, out, _ = plain()
    with panel:
        pass
    assert out.getvalue() == ""


def test_rates_are_those_of_the_recent_steps():
    panel, out, _ = plain()
    panel.step(STEP | {"seconds": 100.0, "tokens": 1})
    for _ in range(20):
        panel.step(STEP | {"step": 100})
    assert "8,192 tokens/s" in out.getvalue().splitlines()[-1]


def test_a_step_may_be_added_while_the_picture_is_drawn():
    """The picture is drawn by a thread of its own."""
    panel, _, console = terminal(80)

    class Interrupting(dict):
        def __getitem__(self, key):
            panel._recent.append(STEP)
            panel._losses.append(1.0)
            return super().__getitem__(key)

    for _ in range(3):
        panel.step(Interrupting(STEP))
    console.print(panel.picture())


@pytest.mark.parametrize("count", [1, 2, 35, 36, 37, 1000])
def test_a_sparkline_is_never_wider_than_asked(count):
    line = sparkline([float(count - i) for i in range(count)], 36)
    assert len(line) == min(count, 36)
    assert list(line) == sorted(line, reverse=True)


def test_sixty_columns_hold_how_to_leave():
    panel, _, console = terminal(60)
    with StopRequest(panel.announce_stop, str), panel:
        panel.step(STEP)
        os.kill(os.getpid(), signal.SIGTERM)
        with console.capture() as captured:
            console.print(panel.picture())
    last = captured.get().splitlines()[-1]
    assert "SIGTERM: committing this step; again to leave at once" in last
    assert len(last) == 60


def test_the_panel_shows_the_speed_of_light():
    panel, out, console = terminal(80, busiest_seconds=("ssd", 0.25))
    panel.step(STEP | {"seconds": 9.0})
    console.print(panel.picture())
    assert "speed of light" not in out.getvalue()  # nothing runs beside the first step
    panel.step(STEP)
    console.print(panel.picture())
    assert "50% of the speed of light (the SSD)" in out.getvalue()
