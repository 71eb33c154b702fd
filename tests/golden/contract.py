"""Everything that a user's script or another program may rely on, as one document.

    PYTHONPATH=src:tests python tests/golden/contract.py > tests/golden/contract.json

Written anew on purpose only: its difference is what a change does to users.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import holdfast
from holdfast.cli.main import app
from holdfast.integrations import accelerate, dcp, deepspeed, lightning, transformers

VERBS = (
    "train", "ls", "show", "verify", "diff", "convert", "plan", "simulate", "probe", "watch", "report", "compact",
    "prune", "push", "drill", "standby", "rules",
)  # fmt: skip


def signatures(module: Any, names: list[str]) -> dict[str, str]:
    """Signatures of functions, and of classes with their public methods."""
    found = {}
    for name in names:
        thing = getattr(module, name)
        exception = inspect.isclass(thing) and issubclass(thing, Exception)
        found[name] = "exception" if exception else signature(thing)
        if inspect.isclass(thing):
            for member, method in inspect.getmembers(thing, inspect.isfunction):
                if not member.startswith("_") and method.__module__.startswith("holdfast"):
                    found[f"{name}.{member}"] = signature(method)
    return found


def signature(thing: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(thing)))


def help_of(verb: str | None) -> list[str]:
    """What ``--help`` prints in 100 columns."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        app(args=[verb, "--help"] if verb else ["--help"], prog_name="holdfast", standalone_mode=False)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def documents(run: Path) -> dict[str, Any]:
    """Keys of a run's manifests, timelines and events."""
    found: dict[str, Any] = {}
    for folder in ("commits", "timelines"):
        for path in sorted((run / folder).glob("*.json")):
            found[folder] = sorted({*found.get(folder, ()), *json.loads(path.read_text())})
    for event in events(run):
        name = f"event {event['event']}"
        found[name] = sorted({*found.get(name, ()), *event})
    return found


def events(run: Path) -> Iterator[dict[str, Any]]:
    for line in (run / "events.jsonl").read_text().splitlines():
        yield json.loads(line)


def contract() -> dict[str, Any]:
    os.environ["COLUMNS"] = "100"
    return {
        "names": signatures(holdfast, sorted(holdfast.__all__)),
        "integrations": {
            module.__name__: signatures(module, names)
            for module, names in (
                (transformers, ["HoldfastCallback", "attach", "offloaded"]),
                (accelerate, ["AcceleratedCheckpointer", "offloaded"]),
                (lightning, ["HoldfastCallback", "OffloadedDDPStrategy", "OffloadedStrategy"]),
                (dcp, dcp.__all__),
                (deepspeed, deepspeed.__all__),
            )
        },
        "help": {verb or "holdfast": help_of(verb) for verb in (None, *VERBS)},
    }


if __name__ == "__main__":
    print(json.dumps(contract(), indent=1))
