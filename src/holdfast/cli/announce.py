"""What ``holdfast train`` says before the first step, after the last, and how to go on from there."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..config import Config
from ..units import format_bytes

if TYPE_CHECKING:
    from ..data.corpus import Corpus
    from ..offload.preflight import Preflight

DRIVE_BYTES, RATED_BYTES = 10**12, 600 * 10**12
"""An SSD to measure wear by: 1 TB, rated for 600 TB written. Typical of consumer drives; ours to assume."""


def announce(console: Console, config: Config, corpus: Corpus, preflight: Preflight, steps_left: int) -> None:
    """Everything that the run will take, before it takes it."""
    written = preflight.written_bytes_per_step
    facts = _grid()
    facts.add_row(
        "model",
        f"{preflight.parameters:,} parameters in {len(preflight.block_names)} blocks, "
        f"{format_bytes(preflight.state_bytes)} of training state",
    )
    facts.add_row(
        "text",
        f"{escape(config.data.text)}: {corpus.fingerprint['files']:,} files, {format_bytes(corpus.num_bytes)}; "
        f"{len(corpus.training):,} samples to train on, {len(corpus.validation):,} held out",
    )
    facts.add_row(
        "space",
        f"{format_bytes(preflight.needed_bytes)} needed, {format_bytes(preflight.free_bytes)} free "
        f"in {escape(preflight.directory)}",
    )
    facts.add_row(
        "SSD",
        f"{format_bytes(written)} written and {format_bytes(preflight.read_bytes_per_step)} read per step; "
        f"{format_bytes(written * steps_left)} written in {steps_left:,} steps",
    )
    facts.add_row("wear", wear(written, steps_left))
    facts.add_row("memory", _memory(preflight))
    console.print(Text.assemble(("holdfast", "bold"), "  ", config.run.dir))
    console.print(Padding(facts, (0, 0, 1, 2)))


def wear(written_bytes_per_step: int, steps: int) -> str:
    """What writing so much means for the life of a drive.

    >>> wear(100_000_000, 300)
    'a 1 TB drive rated for 600 TB written (assumed, typical) lasts 6,000,000 such steps; this is 0.005 % of it'
    """
    drive = f"a {DRIVE_BYTES / 1e12:.0f} TB drive rated for {RATED_BYTES / 1e12:.0f} TB written (assumed, typical)"
    if written_bytes_per_step == 0:
        return f"{drive} is not worn: nothing is written"
    share = 100 * written_bytes_per_step * steps / RATED_BYTES
    digits = max(0, 1 - math.floor(math.log10(share))) if 0 < share < 10 else 0
    precise = f"{share:.{digits}f}".rstrip("0").rstrip(".") if digits else f"{share:.0f}"
    lasts = RATED_BYTES // written_bytes_per_step
    return f"{drive} lasts {lasts:,} such steps; this is {precise} % of it"


def say_how_to_go_on(console: Console, config: Config, *, extend: bool) -> None:
    """The commands that continue and inspect the run, to be copied as they stand."""
    again = [*program(), *sys.argv[1:]]
    if extend:
        again += ["--set", f"train.steps={2 * config.train.steps}"]
    run = config.run.dir
    facts = _grid()
    facts.add_row("go on" if not extend else "go further", escape(shlex.join(again)))
    facts.add_row("look", escape(shlex.join([*program(), "show", run])))
    facts.add_row("check", escape(shlex.join([*program(), "verify", run])))
    console.print(Padding(facts, (1, 0, 0, 2)), soft_wrap=True)


def print_sample(console: Console, prompt: str, text: str) -> None:
    """Text that the model wrote, the given beginning in bold; control characters are shown as such."""
    shown = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text.expandtabs(4))
    lines = Text.assemble((prompt, "bold"), shown)
    console.print("\nA sample of what it writes:")
    console.print(Padding(lines, (1, 4)), highlight=False)


def program() -> list[str]:
    """How this program was called, so that its hints can be pasted."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return ["python", "-m", "holdfast"]
    found = shutil.which(called.name)
    if found is not None and Path(found).resolve() == called.resolve():
        return [called.name]
    relative = os.path.relpath(called)
    return [relative if len(relative) < len(str(called)) else str(called)]


def _grid() -> Table:
    grid = Table.grid(padding=(0, 3))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def _memory(preflight: Preflight) -> str:
    budget = preflight.host_budget
    limit = "no budget" if budget is None else f"the budget is {format_bytes(budget)}"
    if preflight.host_bytes_predicted is None:
        return f"{limit}; use was not predicted"
    return f"{format_bytes(preflight.host_bytes_predicted)} of host memory predicted; {limit}"
