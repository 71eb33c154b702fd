"""``watch``: a run that another process trains, live on a terminal, in lines elsewhere."""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import count
from pathlib import Path

from rich.live import Live

from ..watch.history import History
from ..watch.live import LivePanel, Tail
from .output import console, print_json
from .report import log_of

SECONDS, SECONDS_BETWEEN_LINES = 0.5, 2.0
"""Between two looks, and between two lines where there is no terminal."""

LOOKS = 4
"""After which the picture is drawn anew, though nothing was logged: how long it has been silent changes."""

LEISURE = 20
"""So many times as long as drawing takes nothing is drawn: of a long log it takes a while, and the run has better use
for the core."""

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
    """Look again and again."""
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
    """Whether there was anything new."""
    new = list(tail.new())
    for event in new:
        panel.history.add(event)
    return bool(new)
