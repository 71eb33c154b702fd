"""What the commands print commands no terminal, and paths mean what a person means by them."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from holdfast.checkpointer import Checkpointer
from holdfast.cli.output import Visible, VisibleConsole
from holdfast.config import from_values
from holdfast.quantities import visible

EVIL = "a\x1b]0;title\x07\nb\u202e"
SHOWN = "a\\x1b]0;title\\x07\\nb\\u202e"


class Odd(nn.Module):
    """Its parameter has a name that a terminal would obey."""

    def __init__(self):
        super().__init__()
        self.register_parameter(EVIL, nn.Parameter(torch.zeros(2)))

    def forward(self):
        return next(self.parameters()).sum()


def trained(run):
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(run, model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
        model().backward()
        optimizer.step()
        checkpointer.step()
    return run


def called(*arguments, **options):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **options.pop("env", {})}
    return subprocess.run(
        [sys.executable, "-m", "holdfast", *arguments], capture_output=True, env=env, **options
    )


@pytest.mark.slow
def test_names_are_shown_and_not_obeyed(tmp_path, holdfast):
    """Of tensors and of a directory whose name is no UTF-8, to a pipe and in errors."""
    run = trained(tmp_path / os.fsdecode(b"run\x1b[31m-\xff"))
    done = called("show", run)
    assert done.returncode == 0 and SHOWN in done.stdout.decode()
    assert b"\x1b" not in done.stdout and b"\x07" not in done.stdout
    assert r"run\x1b[31m-\xff@0 is whole" in holdfast("verify", run).out
    missing = called("ls", tmp_path / os.fsdecode(b"none\x1b[31m-\xff"))
    assert missing.returncode == 2 and rb"none\x1b[31m-\xff is not a directory" in missing.stderr
    report = holdfast("report", run)
    assert report.code == 0 and r"\xff/report.html" in report.out, report.err


def test_styles_of_a_terminal_stay(monkeypatch):
    stream = io.StringIO()
    console = VisibleConsole(file=stream, force_terminal=True, color_system="standard", no_color=False)
    console.print("[bold]x\x1by[/bold]")
    assert stream.getvalue() == "\x1b[1mx\\x1by\x1b[0m\n"
    shown = Visible(stream)
    print("\x1b[31m", file=shown)
    assert stream.getvalue().endswith("\\x1b[31m\n")


@pytest.mark.parametrize("text", ["plain", "grüße, 你好 🙂", "tab\tand\nline", "\\x1b"])
def test_what_is_no_control_character_stays(text):
    assert visible(text, lines=True) == text


def test_a_closed_output_is_no_error(tmp_path):
    run = trained(tmp_path / "run")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        ["sh", "-c", '"$0" -m holdfast ls "$1" >&-', sys.executable, run], capture_output=True, env=env
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.slow
def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch, holdfast):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    trained("~/run")
    assert (tmp_path / "run" / "commits").is_dir() and not (tmp_path / "~").exists()
    assert holdfast("ls", "~/run@0").code == 2  # which names a step
    assert holdfast("verify", "~/run@0").code == 0
    assert holdfast("report", "~/run", "--out=~/page.html").code == 0
    assert (tmp_path / "page.html").exists()
    places = {"run.dir": "~/a", "offload.drives": ["~/b", "/c"], "offload.ssd": "~", "model.path": "~x~"}
    config = from_values(places)
    assert (config.run.dir, config.offload.drives) == (f"{tmp_path}/a", (f"{tmp_path}/b", "/c"))
    assert (config.offload.ssd, config.model.path) == (str(tmp_path), "~x~")
