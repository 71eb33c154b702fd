"""The verbs that show what a run did and does: ``report`` and ``watch``.

``report`` writes one page, a trace for Perfetto, or JSON. ``watch`` follows the run of another process, live on a
terminal and in lines elsewhere. Both read the run's event log, and the report its manifests too. They take no lock and
leave the run's state alone. Called by ``main``.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from rich.live import Live

from ..errors import BadInput, Damaged, NoCommit
from ..events import LOG
from ..monitor.facts import drive_of
from ..monitor.history import History
from ..monitor.run_panel import LivePanel, Tail
from ..monitor.run_report import Look, document, html
from ..monitor.trace import chrome_trace
from ..quantities import parse_seconds, visible
from ..store.object_store import Url, place_of
from .output import console, parsed, print_json
from .runs import open_run

SECONDS, SECONDS_BETWEEN_LINES = 0.5, 2.0
"""The seconds between two scans, and between two lines where there is no terminal."""
LOOKS = 4
"""The number of scans after which the picture is redrawn without new events, since the silent time changes."""
LEISURE = 20
"""The pause after drawing, as a multiple of the drawing time.

Drawing a long log takes a while, and the run has better use for the core.
"""
MOST_COLUMNS = 100


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


def watch(run: Path, *, once: bool, as_json: bool) -> None:
    """Show ``run`` until Ctrl-C, or once."""
    tail = Tail(log_of(run))
    panel = LivePanel(History(tail.new()), str(run))
    if as_json:
        print_json(panel.document(time.time()))
    elif once:
        out = console()
        out.print(panel.picture(time.time()), width=min(out.width, MOST_COLUMNS))
    else:
        with suppress(KeyboardInterrupt):
            _follow(tail, panel)


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


def _follow(tail: Tail, panel: LivePanel) -> None:
    """Scan and show the run until Ctrl-C."""
    out = console()
    if out.is_terminal and not out.is_dumb_terminal:
        with Live(panel.picture(time.time()), console=out, auto_refresh=False) as live:
            pause = SECONDS
            for look in count(1):
                time.sleep(pause)
                if _take(tail, panel) or look % LOOKS == 0:
                    began = time.perf_counter()
                    live.update(panel.picture(time.time()), refresh=True)
                    pause = max(SECONDS, LEISURE * (time.perf_counter() - began))
    said, last = "", float("-inf")
    while True:
        now = time.monotonic()
        line = panel.line(time.time())
        if line != said and now - last >= SECONDS_BETWEEN_LINES:
            print(line, flush=True)
            said, last = line, now
        time.sleep(SECONDS)
        _take(tail, panel)


def _take(tail: Tail, panel: LivePanel) -> bool:
    """Add new events to the history; return whether there were any."""
    new = list(tail.new())
    for event in new:
        panel.history.add(event)
    return bool(new)
