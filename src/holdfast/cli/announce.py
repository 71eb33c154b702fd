"""What ``holdfast train`` says before the first step, after the last, and how to go on from there."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
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
    written, read = preflight.written_bytes_per_step, preflight.read_bytes_per_step
    needed, free = format_bytes(preflight.needed_bytes), format_bytes(preflight.free_bytes)
    console.print(Text.assemble(("holdfast", "bold"), "  ", config.run.dir))
    print_facts(
        console,
        {
            "model": f"{preflight.parameters:,} parameters in {len(preflight.block_names)} blocks, "
            f"{format_bytes(preflight.state_bytes)} of training state",
            "text": f"{config.data.text}: {len(corpus.paths):,} files, {format_bytes(corpus.num_bytes)}; "
            f"{len(corpus.training):,} samples to train on, {len(corpus.validation):,} held out",
            "space": f"{needed} needed, {free} free in {preflight.directory}",
            "SSD": f"{format_bytes(written)} written and {format_bytes(read)} read per step; "
            f"{format_bytes(written * steps_left)} written in {steps_left:,} steps",
            "wear": wear(written, steps_left),
            "memory": _memory(preflight),
        },
    )
    console.print()


def print_facts(console: Console, facts: dict[str, str]) -> None:
    """Names and what they are, the latter wrapped between words."""
    for name, text in facts.items():
        lines = textwrap.wrap(text, max(40, min(console.width, 100) - 12), break_long_words=False)
        for number, line in enumerate(lines):
            console.print(Text.assemble("  ", (f"{'' if number else name:<9}", "dim"), line), soft_wrap=True)


def wear(written_bytes_per_step: int, steps: int) -> str:
    """What writing so much means for the life of a drive.

    >>> wear(100_000_000, 300)
    'this run takes 0.005 % of a 1 TB drive rated for 600 TB written (typical, assumed): 6,000,000 such steps'
    """
    drive = (
        f"a {DRIVE_BYTES // 10**12} TB drive rated for {RATED_BYTES // 10**12} TB written (typical, assumed)"
    )
    if written_bytes_per_step == 0:
        return f"nothing is written: {drive} is not worn"
    share = 100 * written_bytes_per_step * steps / RATED_BYTES
    digits = max(0, 1 - math.floor(math.log10(share))) if 0 < share < 10 else 0
    precise = f"{share:.{digits}f}".rstrip("0").rstrip(".") if digits else f"{share:.0f}"
    lasts = RATED_BYTES // written_bytes_per_step
    return f"this run takes {precise} % of {drive}: {lasts:,} such steps"


def say_how_to_go_on(console: Console, config: Config, *, extend_to: int | None = None) -> None:
    """The commands that continue (to a later step) and inspect the run, to be copied as they stand."""
    again = [*program(), *sys.argv[1:]]
    if extend_to is None:
        commands = {"continue": again}
    else:
        commands = {"extend": [*without_steps(again), "--set", f"train.steps={extend_to}"]}
    commands |= {verb: [*program(), verb, config.run.dir] for verb in ("show", "verify")}
    console.print()
    for name, command in commands.items():
        console.print(Text.assemble("  ", (f"{name:<10}", "dim"), shlex.join(command)), soft_wrap=True)


def without_steps(command: list[str]) -> list[str]:
    """``command`` without its own setting of the number of steps."""
    kept: list[str] = []
    for word in command:
        if word.startswith("train.steps=") and kept[-1:] == ["--set"]:
            kept.pop()
        elif not word.startswith("--set=train.steps="):
            kept.append(word)
    return kept


def print_sample(console: Console, prompt: str, text: str) -> None:
    """Text that the model wrote, the given beginning in bold; control characters are shown as such."""
    shown = "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text.expandtabs(4)
    )
    console.print("\nA sample of what it writes:\n")
    first, *rest = shown.split("\n")
    console.print(Text.assemble("    ", (prompt, "bold"), first), soft_wrap=True)
    for line in rest:
        console.print(Text(f"    {line.rstrip()}".rstrip()), soft_wrap=True)


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


def _memory(preflight: Preflight) -> str:
    budget = preflight.host_budget
    limit = "no budget" if budget is None else f"the budget is {format_bytes(budget)}"
    if preflight.host_bytes_predicted is None:
        return f"{limit}; use was not predicted"
    return f"{format_bytes(preflight.host_bytes_predicted)} of host memory predicted; {limit}"
