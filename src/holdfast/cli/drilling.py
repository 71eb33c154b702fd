"""The verb ``drill``: a script is run, killed at random moments and resumed, and compared with itself uninterrupted.

1. The script runs twice from the beginning to a step. If these two differ, no resume could be exact: that is told.
2. It runs a third time. It is killed some times, and each time the same command resumes it.
3. The states at the step are compared as ``diff`` does, and all steps by the digests that the script's process noted.

Every start has its run directories in the drill's folder, so that no run of the user is written to; everything else the
script does as ever. Called by ``main``.
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import BadInput, NoCommit
from ..quantities import counted, format_seconds
from ..supervised.attempt import RUNS, Attempt, Supervisor
from .child_process import Child, ending
from .diff import compare, print_found
from .drill_findings import (
    Difference,
    Reason,
    Steps,
    first_difference,
    noise_of,
    nothing_resumed_reason,
    other_runs_reason,
    resumed_reason,
    self_reason,
)
from .foreign_states import with_sources
from .output import print_json

UNTIL = 20
"""The step at which a drill ends, unless told otherwise."""
LOOK_SECONDS = 0.002
SETTLE_SECONDS = 0.02
"""The time in which a process that is to stop dead at a moment has done so."""
LAST_BYTES, LAST_LINES = 4000, 5
"""The end of the output of a failed script that is shown."""


@dataclass(frozen=True, kw_only=True)
class DrillOptions:
    """The options of a drill. Times are seconds."""

    kills: int = 3
    until: int = UNTIL
    seed: int = 0
    tolerance: float = 0.0
    """The largest difference of values up to which the last states count as equal; 0 asks for equal bits."""
    timeout: float = 300.0
    """The longest time that a start may take to its next step."""
    keep: Path | None = None
    """The folder in which everything stays."""


@dataclass
class Verdict:
    """The result of a drill, as ``--json`` prints it."""

    equal: bool
    step: int
    runs: list[str]
    within_tolerance: bool = False
    kills: list[dict[str, Any]] = field(default_factory=list)
    equal_with_itself: bool = True
    first: dict[str, Any] | None = None
    """The first step that differs, its tensors, and the step after which that start had resumed."""
    reason: dict[str, Any] | None = None
    states: dict[str, Any] = field(default_factory=dict)
    """The result of ``diff`` of the last states, by run."""


class _Failed(Exception):
    """A start that ended with an error instead of its last step."""


def drill(command: Sequence[str], options: DrillOptions, *, as_json: bool) -> bool:
    """Drill ``command`` and print the result; return True if the resumed run is equal.

    Raises ``BadInput`` if the script cannot be drilled: it fails by itself, or records no step.
    """
    with _folder(options.keep) as folder, Supervisor(folder):
        verdict = _Drill(command, options, folder, shows=not as_json).run()
    if as_json:
        print_json(asdict(verdict))
    return verdict.equal or verdict.within_tolerance


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="holdfast-drill-") as name:
            yield Path(name).resolve()
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise BadInput(f"--keep {keep}: there is something already; name a folder that is new or empty")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep.resolve()


class _Drill:
    def __init__(self, command: Sequence[str], options: DrillOptions, folder: Path, shows: bool) -> None:
        self._command, self._options, self._folder, self._shows = command, options, folder, shows
        self._random = random.Random(options.seed)

    def run(self) -> Verdict:
        first = self._uninterrupted("first")
        step = min(first.last_step, self._options.until)
        self._options = replace(self._options, until=step)
        verdict = Verdict(True, step, first.runs)
        second = self._uninterrupted("second")
        if (found := first_difference(first, second)) is not None:
            verdict.equal_with_itself = False
            self._compare(verdict, "second")
            if not verdict.within_tolerance:
                self._tell_difference(verdict, found, self_reason(found))
                return verdict
            self._say(
                f"two uninterrupted runs differ, within {self._options.tolerance:g}: {self_reason(found).text}"
            )
        else:
            self._say(f"two uninterrupted runs are equal at each of {counted(step, 'step')}, bit for bit")
        try:
            killed = self._killed(verdict, first)
        except _Failed as error:
            verdict.equal = False
            reason = Reason(
                "fails", f"a start after a kill ended with {error}", "Mend the script's way to resume()."
            )
            verdict.reason = asdict(reason)
            self._say(f"different: {reason.text}")
            return verdict
        self._judge(verdict, first, second, killed)
        return verdict

    def _uninterrupted(self, name: str) -> Steps:
        began = time.monotonic()
        attempt = Attempt(self._folder / name, self._options.until)
        steps = Steps(attempt.folder)
        try:
            self._start(attempt, steps)
        except _Failed as error:
            raise BadInput(
                f"the script ended with {error}. A drill needs one that trains without help."
            ) from None
        if steps.last_step < 2:
            raise BadInput(
                f"the script ended without an error and recorded {counted(max(steps.last_step, 0), 'step')}, and a"
                " drill needs 2. It has to train with holdfast.Checkpointer, a trainer's HoldfastCallback, or"
                " holdfast.offload, in a process that keeps the environment that it was started with."
            )
        seconds = format_seconds(time.monotonic() - began)
        self._say(f"{name} uninterrupted run: {counted(steps.last_step, 'step')} in {seconds}")
        return steps

    def _killed(self, verdict: Verdict, whole: Steps) -> Steps:
        """Run the script with its kills, and once more to the end."""
        attempt = Attempt(self._folder / "killed", self._options.until)
        steps, seconds = Steps(attempt.folder), whole.step_seconds()
        for number, at in enumerate(self._moments(), 1):
            delay = self._random.uniform(0, seconds)
            self._start(replace(attempt, start=number - 1, kill_step=at, kill_delay=delay), steps)
            verdict.kills.append({"after_step": at, "seconds": delay, "done": max(steps.last_step, 0)})
            self._say_killed(number, verdict.kills, steps)
        self._start(replace(attempt, start=self._options.kills), steps)
        self._note_resumed(verdict.kills, steps)
        return steps

    def _say_killed(self, number: int, kills: list[dict[str, Any]], steps: Steps) -> None:
        self._note_resumed(kills, steps)
        at, seconds = kills[-1]["after_step"], kills[-1]["seconds"]
        self._say(f"kill {number} of {self._options.kills}: SIGKILL {seconds * 1000:.0f} ms after step {at}")

    def _note_resumed(self, kills: list[dict[str, Any]], steps: Steps) -> None:
        """Note after which step the start that followed each kill resumed, and say it for the last one."""
        starts = steps.starts()
        for kill, start in zip(kills, starts[1:], strict=False):
            if "resumed_after" not in kill:
                kill["resumed_after"] = start
                self._say(f"resumed after step {start}")

    def _moments(self) -> list[int]:
        """Return the steps after which the kills come: each start is to get a little further.

        None comes before the first step, after which a start would begin anew, unless there is no other.
        """
        kills, until = self._options.kills, self._options.until
        steps = range(min(1, until - 1), until)
        few = self._random.sample(steps, min(kills, len(steps)))
        return sorted([*few, *self._random.choices(steps, k=kills - len(few))])

    def _start(self, attempt: Attempt, steps: Steps) -> None:
        """Start the script, and return when it has ended or was killed. Raises ``_Failed`` and ``BadInput``."""
        log = self._folder / f"{attempt.folder.name}.log"
        with open(log, "ab") as output:
            child = Child(self._command, attempt.write(), output)
            try:
                self._follow(child, attempt, steps, log)
            finally:
                child.kill()
                steps.read()

    def _follow(self, child: Child, attempt: Attempt, steps: Steps, log: Path) -> None:
        since = time.monotonic()
        while (code := child.poll()) is None:
            new = steps.read()
            if new:
                since = time.monotonic()
            if attempt.kill_step is not None and any(line["step"] >= attempt.kill_step for line in new):
                time.sleep(attempt.kill_delay + SETTLE_SECONDS)
                return
            if time.monotonic() - since > self._options.timeout:
                raise BadInput(
                    f"no step was recorded in {self._options.timeout:g} s, and the script still runs. If a step, or"
                    " the way to the first, takes longer: --timeout. Otherwise it does not train with"
                    f" holdfast.Checkpointer or holdfast.offload, or it waits for something.{_tail(log)}"
                )
            time.sleep(LOOK_SECONDS)
        if code != 0:
            raise _Failed(f"{ending(code)}.{_tail(log)}")
        if attempt.kill_step is not None:
            raise _Failed("exit code 0 before its last step")

    # The result

    def _judge(self, verdict: Verdict, first: Steps, second: Steps, killed: Steps) -> None:
        found = first_difference(first, killed)
        other = [name for name in killed.runs if name not in first.runs]
        if other:
            opened = Attempt(self._folder / "killed", 0).opened()
            self._tell_other_runs(verdict, [opened[name] for name in other])
            return
        self._compare(verdict, "killed")
        if verdict.kills and found is None and not any(k.get("resumed_after", 0) > 0 for k in verdict.kills):
            verdict.equal = verdict.within_tolerance = False
            reason = nothing_resumed_reason(len(verdict.kills), verdict.step)
            verdict.reason = asdict(reason)
            self._say(f"nothing was shown: {reason.text}")
            self._say(reason.way_out)
            return
        if verdict.equal and found is None:
            kills = counted(len(verdict.kills), "kill")
            self._say(
                f"equal: step {verdict.step} after {kills} is that of an uninterrupted run, bit for bit"
            )
            return
        verdict.equal = False
        if verdict.within_tolerance:
            at = "" if found is None else f", from step {found.step} on"
            self._say(f"equal within {self._options.tolerance:g}: the bits differ{at}")
        if found is not None:
            self._tell_difference(verdict, found, resumed_reason(found, noise_of(first, second)))
        elif not verdict.within_tolerance:
            self._say(
                f"different: only the states of step {verdict.step} differ, or the script ended before it"
            )
        if not verdict.within_tolerance and self._shows:
            for states in verdict.states.values():
                print_found(states)

    def _tell_other_runs(self, verdict: Verdict, runs: list[str]) -> None:
        verdict.equal, reason = False, other_runs_reason(runs)
        verdict.reason = asdict(reason)
        self._say(f"different: {reason.text}")
        self._say(reason.way_out)

    def _compare(self, verdict: Verdict, name: str) -> None:
        """Compare the last states of the first run and of ``name``, as ``diff`` does."""
        for run in verdict.runs:
            a, b = (f"{self._folder / each / RUNS / run}" for each in ("first", name))
            try:
                found = with_sources([a, b], compare)
            except NoCommit:  # this one did not get there
                verdict.equal = verdict.within_tolerance = False
                return
            verdict.states[run] = found
            verdict.equal = verdict.equal and found["equal"]
        verdict.within_tolerance = bool(verdict.states) and all(
            self._is_near(found) for found in verdict.states.values()
        )

    def _is_near(self, found: dict[str, Any]) -> bool:
        others = found["other_kind"] or found["only_in_a"] or found["only_in_b"]
        largest = max((_largest(row) for row in found["different"]), default=0.0)
        return not others and self._options.tolerance > 0 and largest <= self._options.tolerance

    def _tell_difference(self, verdict: Verdict, found: Difference, reason: Reason) -> None:
        verdict.equal = False
        verdict.reason = asdict(reason)
        tensors = found.tensors
        verdict.first = {
            "step": found.step, "stream": found.stream, "resumed_after": found.resumed, "tensors": tensors,
        }  # fmt: skip
        named = f": {', '.join(tensors[:3])}" if tensors else ""
        more = f" and {len(tensors) - 3:,} more" if len(tensors) > 3 else ""
        how = f", resumed after step {found.resumed}" if found.resumed else ""
        if not verdict.within_tolerance:
            self._say(f"different: step {found.step} is the first that differs{how}{named}{more}")
        self._say(f"likely reason: {reason.text}")
        self._say(reason.way_out)

    def _say(self, text: str) -> None:
        print(text, file=sys.stdout if self._shows else sys.stderr, flush=True)


def _largest(row: dict[str, Any]) -> float:
    return math.inf if row["largest"] is None else row["largest"]


def _tail(log: Path) -> str:
    """Return the last lines of a script's output, as the end of a message."""
    with open(log, "rb") as file:
        file.seek(max(0, file.seek(0, 2) - LAST_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()[-LAST_LINES:]
    return f" Its last lines: {' | '.join(lines)}" if lines else " It printed nothing."
