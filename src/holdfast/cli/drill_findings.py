"""Findings from the lines of two starts of a script: the first step that differs, and the likely reason.

A reason is found by what differs beside the tensors at that step, between the same steps of both. Values that already
differ between the two uninterrupted runs (times, process ids) tell nothing and are left out. Where nothing else that is
seen differs, that is said. Called by ``drill``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from ..events import parsed
from ..quantities import counted
from ..supervised.attempt import BEGUN, STEP
from ..supervised.script_values import DATA, GENERATOR, POSITION, VALUE

Line = dict[str, Any]
SHOWN = 4
"""The number of names in a sentence."""
NONE: Line = {"tensors": {}, "progress": {}, "script": {}}


class Steps:
    """The lines that the starts in ``folder`` have written, by stream (a run's directory and a rank), as they come."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.lines: dict[str, list[Line]] = {}

    def read(self) -> list[Line]:
        """Read the new lines, and return them."""
        new = []
        for path in sorted(self._folder.glob("steps-*.jsonl")):
            with open(path, "rb") as file:
                file.seek(self._read.get(path, 0))
                whole = file.read().rpartition(b"\n")
            self._read[path] = self._read.get(path, 0) + len(whole[0] + whole[1])
            found = list(parsed(whole[0].splitlines()))
            self.lines.setdefault(path.stem.removeprefix("steps-"), []).extend(found)
            new += found
        return new

    @property
    def last_step(self) -> int:
        """The highest step that was done; -1 before one was."""
        return max((line["step"] for line in self._all(STEP)), default=-1)

    @property
    def runs(self) -> list[str]:
        """The directories of the runs whose steps were noted."""
        return sorted({stream.rpartition("-")[0] for stream in self.lines})

    def of(self, stream: str) -> dict[int, Line]:
        """Return the last line of each step of ``stream``."""
        return {line["step"]: line for line in self.lines.get(stream, []) if line["event"] == STEP}

    def left(self, stream: str, line: Line) -> list[Line]:
        """Return the earlier lines of the step of ``line``, which a rollback has abandoned."""
        found = [
            each
            for each in self.lines.get(stream, [])
            if (each["event"], each["step"]) == (STEP, line["step"])
        ]
        return found[:-1]

    def began(self, stream: str) -> Line | None:
        """Return the line of a stream's first opening."""
        return next((line for line in self.lines.get(stream, []) if line["event"] == BEGUN), None)

    def starts(self) -> list[int]:
        """Return the step after which each start opened its first run, oldest first."""
        found: dict[int, tuple[float, int]] = {}
        for line in self._all(BEGUN):
            found.setdefault(line["start"], (line["time"], line["step"]))
        return [step for _, step in sorted(found.values())]

    def step_seconds(self) -> float:
        """Return the mean time of a step; 0.1 where there are not two."""
        times = [line["time"] for line in self._all(STEP)]
        return (max(times) - min(times)) / (len(times) - 1) if len(times) > 1 else 0.1

    def _all(self, event: str) -> Iterator[Line]:
        return (line for lines in self.lines.values() for line in lines if line["event"] == event)


@dataclass(frozen=True)
class Difference:
    """The first line that differs from that of an uninterrupted run."""

    stream: str
    line: Line
    other: Line
    """The line of the uninterrupted run."""
    resumed: int
    """The step after which the process that wrote the line had resumed; 0 for a fresh start."""
    drawn_from: frozenset[str] = frozenset()
    """The global generators that the steps of the uninterrupted run draw from."""

    @property
    def step(self) -> int:
        return self.line["step"]

    @property
    def tensors(self) -> list[str]:
        """The names of the tensors that differ, parameters first."""
        names = _unequal(self.line["tensors"], self.other["tensors"])
        return sorted(names, key=lambda name: (not name.endswith("/param"), name))


@dataclass(frozen=True)
class Reason:
    """The likely reason of a difference: a kind for programs, a sentence, and the way out."""

    kind: str
    text: str
    way_out: str
    names: list[str] = field(default_factory=list)


def first_difference(whole: Steps, other: Steps) -> Difference | None:
    """Return the first line of ``other`` whose tensors, or loss, are not those of ``whole``; None if there is none."""
    found = [each for stream in other.lines if (each := _first_in(stream, whole, other)) is not None]
    return min(found, key=lambda each: (each.step, each.stream), default=None)


def _first_in(stream: str, whole: Steps, other: Steps) -> Difference | None:
    steps, resumed = whole.of(stream), 0
    for line in other.lines[stream]:
        there = steps.get(line["step"])
        if line["event"] == BEGUN:
            resumed = line["step"]
            there = there if resumed else whole.began(stream)
        if there is not None and not any(
            _is_alike(line, each) for each in (there, *whole.left(stream, line))
        ):
            return Difference(stream, line, there, resumed, _drawn_from(list(steps.values())))
    return None


def _drawn_from(lines: list[Line]) -> frozenset[str]:
    """Return the names of the global generators whose states are not the same at the end of every step."""
    parts = [{k: v for k, v in line["progress"].items() if k.startswith("random.")} for line in lines]
    return frozenset(name for part in parts[1:] for name in _unequal(parts[0], part))


def _is_alike(a: Line, b: Line) -> bool:
    losses = [each.get("progress", {}).get("loss") for each in (a, b)]
    return a["tensors"] == b["tensors"] and (None in losses or losses[0] == losses[1])


def self_reason(found: Difference) -> Reason:
    """Return why two uninterrupted runs differ."""
    if found.line["event"] == BEGUN:
        return Reason(
            "initial-values",
            "the two runs began with other values",
            "Seed the generators before the model is built: torch.manual_seed(0).",
        )
    script = _script_differences(found, {})
    if names := script[GENERATOR]:
        return Reason(
            "generator", f"{_list(names)}: a random generator that every start seeds otherwise",
            "Give it a fixed seed.", names,
        )  # fmt: skip
    if names := [name for name in _changed(found, "random.") if name in found.drawn_from]:
        return Reason(
            "global-generator", f"the global generators ({_list(names)}) are not at the same place",
            "Seed them at the beginning: torch.manual_seed(0), random.seed(0), numpy.random.seed(0).", names,
        )  # fmt: skip
    if names := script[DATA] + script[POSITION]:
        return Reason(
            "data", f"the data of the step are others: {_list(names)}",
            "Make their order and content depend on a seed and the step alone.", names,
        )  # fmt: skip
    return _unknown(
        script[VALUE],
        "kernels whose sums depend on the order of threads (on a GPU: torch.use_deterministic_algorithms(True)),"
        " another number of threads, the time, files that change",
    )


def nothing_resumed_reason(kills: int, step: int) -> Reason:
    """Return why equal states show nothing: each start after a kill began anew."""
    return Reason(
        "nothing-resumed",
        f"after {'the kill' if kills == 1 else f'each of {kills} kills'} the script began at its first step again: no"
        " resume was tried",
        f"If the run keeps a step seldom (every=), drill to a later step than {step} (--until), or with more kills"
        " (--kills). Otherwise the script does not call resume(), or removes its run when it starts.",
    )


def other_runs_reason(runs: list[str]) -> Reason:
    """Return why nothing was resumed: a start after a kill opened ``runs``, which no start had opened before."""
    return Reason(
        "another-run",
        f"a start after a kill opened another run, {_list(runs)}, so it resumed nothing",
        "Give the same directory in every start.",
        runs,
    )


def resumed_reason(found: Difference, noise: Mapping[str, Any]) -> Reason:
    """Return why a resumed run differs from the uninterrupted ones, whose own differences are ``noise``."""
    if found.line["event"] == BEGUN:
        return Reason(
            "restored-otherwise", f"what was restored is not the state that step {found.step} had left",
            "State that the script changes outside of optimizer steps is known only after save(): call it after such a"
            " change. Otherwise this is a bug of Holdfast.",
        )  # fmt: skip
    script = _script_differences(found, noise)
    for reason in (
        _by_generator(script),
        _by_data(script),
        _by_global(found, noise),
        _by_value(script),
        _by_groups(found),
    ):
        if reason is not None:
            return reason
    return _unknown(
        [], "kernels that depend on where memory lies or on the number of threads, files, the time"
    )


def _by_generator(script: dict[str, list[str]]) -> Reason | None:
    if not (names := script[GENERATOR]):
        return None
    return Reason(
        "generator", f"{_list(names)}: a random generator that is not part of the run, so a resume begins it anew",
        "Draw from the global generators, which are restored, or from one seeded by the step; or pass an object with"
        ' state_dict and load_state_dict that holds it: also={"generator": ...}.', names,
    )  # fmt: skip


def _by_data(script: dict[str, list[str]]) -> Reason | None:
    if not (names := script[POSITION] + script[DATA]):
        return None
    return Reason(
        "loader", f"the data of the step are others ({_list(names)}): the loader has no position, so a resume begins"
        " its data anew",
        "Pass loader=holdfast.loader(dataset, batch_size), or another loader with state_dict; or choose the batch by"
        " the step that resume() returns.", names,
    )  # fmt: skip


def _by_global(found: Difference, noise: Mapping[str, Any]) -> Reason | None:
    if not (names := [name for name in _changed(found, "random.") if name not in noise]):
        return None
    return Reason(
        "global-generator", f"the script drew from the global generators ({_list(names)}) otherwise than before: an"
        " iterator that begins after the resume, or code that runs once in a start, draws from them",
        "Draw before resume(), which then restores them; pass loader= an object with a position.", names,
    )  # fmt: skip


def _by_value(script: dict[str, list[str]]) -> Reason | None:
    if not (names := script[VALUE]):
        return None
    return Reason(
        "value", f"values of the script that are not part of the run: {_list(names)}, or one that they come from",
        'Compute them from the step, or pass an object with state_dict and load_state_dict: also={"name": ...}.',
        names,
    )  # fmt: skip


def _by_groups(found: Difference) -> Reason | None:
    if not (names := _changed(found, "groups")):
        return None
    return Reason(
        "hyper-parameters",
        f"hyper-parameters differ: {_list(names)}",
        "Set them after resume(), by the step.",
        names,
    )


def _unknown(names: list[str], others: str) -> Reason:
    seen = f" Values of the script that differ, perhaps only because of it: {_list(names)}." * bool(names)
    return Reason(
        "unknown", "not known. Generators, data and their positions are equal, as far as they are seen." + seen,
        f"What is not seen: {others}.", names,
    )  # fmt: skip


def noise_of(a: Steps, b: Steps) -> dict[str, Any]:
    """Return the names of values, and of parts of the user state, that differ between two uninterrupted runs."""
    return {
        name: True
        for stream in a.lines
        for step, line in a.of(stream).items()
        for part in ("script", "progress")
        for name in _unequal(line[part], b.of(stream).get(step, NONE)[part])
    }


def _script_differences(found: Difference, noise: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of the script's values that differ, by kind.

    A value that is the step of the resume, or a step number in general, differs by nature and is left out.
    """
    a, b = found.line.get("script", {}), found.other.get("script", {})
    start = xxhash.xxh3_64_hexdigest(repr(found.resumed).encode())
    kinds: dict[str, list[str]] = {GENERATOR: [], POSITION: [], DATA: [], VALUE: []}
    for name in _unequal(a, b):
        kind, digest = a.get(name) or b[name]
        if name in noise or (kind == VALUE and digest == start) or not (name in a and name in b):
            continue
        kinds[kind].append(name)
    return kinds


def _changed(found: Difference, prefix: str) -> list[str]:
    names = _unequal(found.line.get("progress", {}), found.other.get("progress", {}))
    return [name for name in names if name.startswith(prefix)]


def _unequal(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in {**a, **b} if a.get(name) != b.get(name))


def _list(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {counted(more, 'other')}" if more > 0 else "")
