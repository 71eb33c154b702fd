"""``holdfast``: the verbs, and how they end.

A verb imports what it needs when it runs, so that ``holdfast ls`` costs no torch. Every error is one clear
line on stderr and an exit code: 0 good; 1 the thing asked about is not so; 2 bad usage or configuration;
3 the world failed, with the state left recoverable. ``HOLDFAST_DEBUG=1`` adds the traceback.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import HoldfastError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Training state that fits, survives and moves: train out of core, with every step durable.",
)

Commit = Annotated[
    str, typer.Argument(metavar="RUN[@STEP]", help="A run directory; its newest step, or this one.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]


@app.command()
def train(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG.toml", help="The run; every key has a default.")
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a key, such as train.steps=200."),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the configuration, every key explained, and leave.")
    ] = False,
) -> None:
    """Train a language model, or continue the run where it was."""
    from ..config import load_config, to_toml

    chosen = load_config(config, sets or ())
    if print_config:
        print(to_toml(chosen), end="")
        return
    # torch's threads share the cores with ours: those that wait must sleep, not spin (read when torch loads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from .train import train as run

    run(chosen)


@app.command()
def ls(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")], json: AsJson = False
) -> None:
    """List the commits of a run, newest first."""
    from .inspect import ls as list_commits

    list_commits(run, as_json=json)


@app.command()
def show(commit: Commit, json: AsJson = False) -> None:
    """Show what a commit holds."""
    from .inspect import show as show_commit

    show_commit(commit, as_json=json)


@app.command()
def verify(commit: Commit, json: AsJson = False) -> None:
    """Read every byte of a commit again; exit 1 if any is not as it was written."""
    from .inspect import verify as verify_commit

    raise typer.Exit(0 if verify_commit(commit, as_json=json) else 1)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A[@STEP]", help="A run directory and step.")],
    b: Annotated[str, typer.Argument(metavar="B[@STEP]", help="Another, or another step of the same.")],
    json: AsJson = False,
) -> None:
    """Compare two commits tensor by tensor; exit 1 if any bit differs."""
    from .diff import diff as compare

    raise typer.Exit(0 if compare(a, b, as_json=json) else 1)


def main() -> None:
    """The entry point of the ``holdfast`` script."""
    warnings.showwarning = show_warning
    try:
        app()
    except Exception as error:
        if os.environ.get("HOLDFAST_DEBUG"):
            traceback.print_exc()
        print(f"error: {text_of(error)}", file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, HoldfastError) else 3)


def text_of(error: Exception) -> str:
    """One line for a person. What is not ours or the system's is named as the bug it probably is."""
    text = " ".join(str(error).split())
    if isinstance(error, (HoldfastError, OSError)):
        return text
    return f"{type(error).__name__}: {text} (unexpected; HOLDFAST_DEBUG=1 shows where)"


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning is one line on stderr too."""
    print(f"warning: {message}", file=sys.stderr)
