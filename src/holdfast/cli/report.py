"""``report``: a run as one page, as a trace for Perfetto, or as JSON."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from ..errors import BadInput, Damaged, NoCommit
from ..monitor.drive_wear import drive_of
from ..monitor.history import History
from ..monitor.run_report import Look, document, html
from ..monitor.trace import chrome_trace
from ..quantities import parse_seconds, visible
from ..store.remote.push_target import Url, place_of
from .flags import parsed
from .output import print_json
from .runs import open_run

LOG = "events.jsonl"


def report(run: Path, *, out: Path | None, trace: Path | None, predicted: str | None, as_json: bool) -> None:
    """Write the page to ``out`` (RUN/report.html), or only a trace, or print the facts."""
    seconds = None if predicted is None else parsed("--predicted", parse_seconds, predicted)
    history = History.read(log_of(run))
    if trace is not None:
        _write(trace, json.dumps(chrome_trace(history, str(run)), separators=(",", ":"), allow_nan=False))
        print(f"{trace} is a trace of {run}: open it at ui.perfetto.dev, or in chrome://tracing")
    if trace is not None and out is None and not as_json:
        return
    commits, place = commits_of(run)
    look = Look(str(run), history, commits, drive_of(place), seconds, time.time())
    if as_json:
        print_json(document(look))
        return
    out = out or run / "report.html"
    _write(out, html(look))
    print(f"{out} is the report of {run}: one file, which any browser opens")


def log_of(run: Path) -> Path:
    """Return the event log of ``run``. Raises ``BadInput`` if there is none."""
    if isinstance(place_of(run), Url):
        raise BadInput(
            f"{run} is in a bucket, where no log of events is: name the directory that the run was trained in"
        )
    if not run.is_dir():
        raise NoCommit(f"{run} is not a directory; name the directory of a run, such as runs/default")
    path = run / LOG
    if not path.is_file():
        raise BadInput(
            f"{run} has no {LOG}: nothing was logged there. A run of `holdfast train` has it in its run.dir, also where"
            " offload.ssd keeps the state elsewhere."
        )
    return path


def commits_of(run: Path) -> tuple[list[dict[str, Any]], Path]:
    """Return the readable commits of ``run``, newest first, and the directory that holds them."""
    found: list[dict[str, Any]] = []
    place = run
    try:
        reader = open_run(run)
        place = reader.root if isinstance(reader.root, Path) else run
        for ref in reader.line():
            try:
                manifest = reader.load(ref)
            except (NoCommit, Damaged):  # retired meanwhile; `holdfast verify` is for damage
                continue
            found.append({"step": manifest.step, "created": manifest.created, "bytes": manifest.total_bytes})
    except (NoCommit, Damaged):
        pass
    return found, place


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(visible(text, lines=True), encoding="utf-8")
    except OSError as error:
        raise BadInput(
            f"{path} cannot be written: {error.strerror}. Name another file, with --out or --trace."
        ) from error
