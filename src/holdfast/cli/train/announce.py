"""The texts of ``holdfast train``: what it will do before the first step, and how to go on after the last.

Commands are printed as the person would type them, with the arguments that this process was started with. The sample of
text is printed as it is generated. Called by ``train_job``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ...config import Config
from ...monitor.facts import wear
from ...quantities import counted, format_bytes
from ..machine import launched
from ..output import print_facts

if TYPE_CHECKING:
    from ...data.corpus import Windowed
    from ...offload.setup.preflight import Preflight


MARGIN = "    "
"""The margin left of generated text."""


def announce(
    console: Console, config: Config, corpus: Windowed, preflight: Preflight, steps_left: int, num_ranks: int
) -> None:
    """Print all resources that the run will use, before it uses them. A run of common size fits 80 columns."""
    written, read = preflight.written_bytes_per_step, preflight.read_bytes_per_step
    needed, free = format_bytes(preflight.needed_bytes), format_bytes(preflight.free_bytes)
    console.print(Text.assemble(("holdfast", "bold"), "  ", config.run.dir), soft_wrap=True)
    facts = {
        "model": f"{preflight.parameters:,} parameters in {counted(len(preflight.block_names), 'block')}, "
        f"{format_bytes(preflight.state_bytes)} of training state",
        "blocks": f"{preflight.streamed_parameters / max(1, preflight.parameters):.0%} of the parameters streamed, in "
        f"{preflight.block_names[0]} to {preflight.block_names[-1]}; the others stay in memory",
        **({"adapters": _adapters(config)} if config.lora.are_wanted else {}),
        "update": f"{config.train.optimizer}, learning rate {config.train.highest_rate:g} at its highest, computed in"
        f" {config.train.dtype}",
        "text": f"{config.data.text}: {counted(len(corpus.paths), 'file')}, {format_bytes(corpus.num_bytes)}; "
        f"{counted(len(corpus.training), 'sample')} and {len(corpus.validation):,} held out",
        "space": f"{needed} needed, {free} free in {preflight.directory}",
        **({"drives": _drives(preflight)} if preflight.drives else {}),
        "SSD": f"{format_bytes(written)} written and {format_bytes(read)} read per step",
        "wear": wear(written * steps_left),
        "memory": _memory(preflight, config.offload.host_budget == "auto"),
    }
    if num_ranks > 1:
        facts["ranks"] = f"{num_ranks}; SSD, wear and memory are those of the first"
    if preflight.plan is not None:
        facts["plan"] = preflight.plan
    print_facts(console, facts, indent="  ")
    console.print()


def _adapters(config: Config) -> str:
    """Describe what is trained, and what it is trained on."""
    lora, quantization = config.lora, config.quantization
    kind = f"{'rank-stabilised ' * lora.rslora}{'DoRA' if lora.dora else 'LoRA'}"
    packed = {"none": "", 4: f", quantised to {quantization.type.upper()}", 8: ", quantised to int8"}[
        quantization.bits
    ]
    others = ", ".join(f"{rank} on {end}" for end, rank in lora.ranks.items())
    ranks = f"{lora.rank} ({others})" if others else f"{lora.rank}"
    whole = f"; {', '.join(lora.modules_to_save)} whole" if lora.modules_to_save else ""
    biases = {"none": "", "all": "; all biases", "lora_only": "; the biases of these layers"}[lora.bias]
    return f"{kind} of rank {ranks} on {', '.join(lora.targets)}{biases}{whole}; all else is frozen{packed}"


def _drives(preflight: Preflight) -> str:
    """Describe the needed and the free space of each further drive."""
    return "; ".join(
        f"{format_bytes(needed)} needed, {format_bytes(free)} free in {directory}"
        for directory, needed, free in preflight.drives
    )


def say_how_to_go_on(console: Console, config: Config, *, extend: tuple[str, int] | None = None) -> None:
    """Print the commands that continue, inspect and export the run, ready to be copied.

    ``extend`` is the key, and its value, with which a run that has ended continues.
    """
    again = same_command()
    if extend is None:
        commands = {"continue": again}
    else:
        key, value = extend
        commands = {"extend": [*without_key(again, key), "--set", f"{key}={value}"]}
    commands |= {verb: [*program(), verb, config.run.dir] for verb in ("show", "verify", "report")}
    if extend is not None and config.lora.are_wanted:
        commands["export"] = [*program(), "convert", config.run.dir, "OUT", "--to", "peft"]
        commands["merge"] = [*program(), "convert", config.run.dir, "OUT", "--to", "huggingface", "--merge"]
    elif extend is not None and config.model.path:
        commands["export"] = [*program(), "convert", config.run.dir, "OUT", "--to", "huggingface"]
    console.print()
    for name, command in commands.items():
        console.print(Text.assemble("  ", (f"{name:<10}", "dim"), shlex.join(command)), soft_wrap=True)


def same_command() -> list[str]:
    """Return the command that continues this run on as many ranks.

    "..." stands for the options by which several machines find each other.
    """
    if launched()[1] == 1:
        return [*program(), *sys.argv[1:]]
    nodes, here = os.environ.get("GROUP_WORLD_SIZE", "1"), os.environ.get("LOCAL_WORLD_SIZE", "1")
    where = ["--standalone"] if nodes == "1" else ["--nnodes", nodes, "..."]
    torchrun = [*_as_called(Path(sys.executable)), "-m", "torch.distributed.run"]
    if shutil.which("torchrun"):
        torchrun = ["torchrun"]
    return [*torchrun, *where, "--nproc-per-node", here, "-m", "holdfast", *sys.argv[1:]]


def without_key(command: list[str], key: str) -> list[str]:
    """Return ``command`` without its settings of ``key``."""
    kept: list[str] = []
    for word in command:
        if word.startswith(f"{key}=") and kept[-1:] == ["--set"]:
            kept.pop()
        elif not word.startswith(f"--set={key}="):
            kept.append(word)
    return kept


def print_sample(console: Console, prompt: str, pieces: Iterable[str]) -> str:
    """Print text as a model writes it, after the bold ``prompt``, and return all of it.

    Lines end at the terminal's edge; control characters become visible replacements.
    """
    console.print("\nA sample of what it writes:\n")
    console.print(Text.assemble(MARGIN, (prompt, "bold")), end="")
    written, column, last = "", len(prompt), console.width - len(MARGIN)
    for piece in pieces:
        written += piece
        for character in piece.replace("\t", "    "):
            if character == "\n" or column == last:
                console.file.write("\n")
                column = 0
            if character != "\n":
                shown = character if character.isprintable() else "\N{REPLACEMENT CHARACTER}"
                console.file.write(shown if column else MARGIN + shown)
                column += 1
        console.file.flush()
    console.file.write("\n")
    return written


def program() -> list[str]:
    """Return the words by which this program was called, so that its hints can be pasted."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return [*_as_called(Path(sys.executable)), "-m", "holdfast"]
    return _as_called(called)


def _as_called(path: Path) -> list[str]:
    """Return the name of ``path`` if the shell finds it, else the shorter of its relative and absolute form."""
    found = shutil.which(path.name)
    if found is not None and os.path.abspath(found) == os.path.abspath(path):
        return [path.name]
    relative = os.path.relpath(path)
    return [relative if len(relative) < len(str(path)) else str(path)]


def _memory(preflight: Preflight, automatic: bool) -> str:
    if preflight.host_budget is None:
        limit = "no budget"
    else:
        limit = (
            f"the budget is {format_bytes(preflight.host_budget)}"
            + ", nine tenths of what is free" * automatic
        )
    if preflight.host_bytes_predicted is None:
        return f"use was not predicted; {limit}"
    return f"{format_bytes(preflight.host_bytes_predicted)} predicted; {limit}"
