"""``watch``: show a run of another process, live on a terminal, in lines elsewhere."""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import count
from pathlib import Path

from rich.live import Live

from ..monitor.history import History
from ..monitor.run_panel import LivePanel, Tail
from .output import console, print_json
from .report import log_of

SECONDS, SECONDS_BETWEEN_LINES = 0.5, 2.0
"""The seconds between two scans, and between two lines where there is no terminal."""

LOOKS = 4
"""The number of scans after which the picture is redrawn without new events, since the silent time changes."""

LEISURE = 20
"""The pause after drawing, as a multiple of the drawing time.

Drawing a long log takes a while, and the run has better use for the core.
"""

MOST_COLUMNS = 100


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
