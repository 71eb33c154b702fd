"""The command line in this process (quick) or in one of its own (signals, kills)."""

import signal
import sys
import warnings
from dataclasses import dataclass

import pytest

from holdfast.cli.main import main
from support.warm_python import environment_of, start_python


@dataclass
class Result:
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def short_sample(monkeypatch):
    """A run writes one token at its end, and reads little held-out text. (Processes: ``support.short_sample``.)"""
    monkeypatch.setattr("holdfast.cli.train.train_job.SAMPLE_TOKENS", 1)
    monkeypatch.setattr("holdfast.cli.train.train_job.VALIDATION_SAMPLES", 4)


@pytest.fixture
def holdfast(monkeypatch, capsys):
    """``holdfast("ls", run)`` runs the verb here: exit code, standard output, standard error."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["holdfast", *map(str, arguments)])
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main replaces it
        monkeypatch.setenv("COLUMNS", "200")
        capsys.readouterr()
        before = sys.stdout, sys.stderr, signal.getsignal(signal.SIGPIPE)
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            sys.stdout, sys.stderr = before[:2]
            signal.signal(signal.SIGPIPE, before[2])
        out, err = capsys.readouterr()
        return Result(ended.value.code or 0, out, err)

    return call


@pytest.fixture
def holdfast_process():
    """``holdfast_process("train", ...)`` starts the verb in a process that ends with the test."""
    started = []

    def start(*arguments):
        process = start_python("-m", "holdfast", *arguments, env=environment_of())
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
