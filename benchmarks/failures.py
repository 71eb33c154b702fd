"""What failures cost in all: one job, killed at random moments, to its end under each way to keep its state.

    python benchmarks/failures.py [--minutes 1 3 10] [--compression 12] [--limit 20] [--steps STEPS] [--repeats 1]
                                  [--arms ...] [--folder FOLDER] [--keep] [--small]

The job is a small language model of 5.8 M parameters, whose step takes some 0.2 s on one core. In proportion to the
step its saves and its gradients are those of a GPT-2 small on two: a save takes about half a step. Time is
compressed: a mean of 3 minutes between failures is one of 15 seconds at the default of 12. What is not compressed
counts so many times as much: a restart of 0.4 s is one of 5. The whole run takes about ``--limit`` minutes: each mean
has a third of them, and the job of each is as long as that allows, unless ``--steps`` says how long.

Each arm is at its best for each mean. Baselines save at Young's interval: with t seconds per step, C that a save
adds, measured beforehand where it does not wait for the one before, and M between failures, least is wasted where
sqrt(2 C M) / t steps lie between two saves. A Checkpointer records every step, and its bases are as far apart as
``snapshot_interval.optimum`` says for M and what the tuner has measured. ``auto`` is measured beforehand, too: it keeps
steps as ``step_cadence.choose`` says for M and what ``every="auto"`` has measured in a job of its own; what it copies
into memory outlives the process, too, and the machine is believed to fail once a day. With the smallest mean,
baselines also save at every step. ``gemini`` keeps steps in /dev/shm, as ``replica`` does: they outlive the process,
which is what is killed here, and not the machine. Two are left out unless asked for: ``topk`` trains with other
gradients, and so does another job; ``replica`` begins with another process that imports torch, some seconds that do not
shrink with time, so ask with a ``--compression`` of 3 or less.

What is wasted is said beside the job that is never killed, run before and after: *restarting* from a kill until
training goes on, replay included; *redoing* steps that did not come back; *saving* is the rest. The end is compared
bit for bit. Prints tables and one line of JSON; ``--keep`` writes ``results/failures.md`` and draws
``results/failures.svg`` as well.
"""

from __future__ import annotations

import argparse
import math
import pickle
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from baselines import clear
from common import RESULTS, finish, machine, markdown, options_of, table
from jobs import NEVER, Job, Outcome, kills, on_one_thread, run
from plot import bars
from trainings import TRAININGS

from holdfast.errors import DoesNotFit
from holdfast.schedule.interval.snapshot_interval import Limits, optimum
from holdfast.schedule.interval.step_cadence import StepRates, choose
from holdfast.schedule.interval.tuner import FIRST_STEPS
from holdfast.schedule.interval.waste import MeasuredCosts

TITLES = {
    "exact": "Checkpointer", "auto": "Checkpointer, auto", "replica": "replica=True", "topk": "TopK(0.01)",
    "save": "torch.save", "dcp": "async_save", "checkfreq": "CheckFreq-style", "gemini": "Gemini-style",
    "naive": "Check-N-Run-style",
}  # fmt: skip
AUTO = "auto"
RECORDED = {"exact", "replica", "topk"}
"""Arms that keep every step, so that there is no interval to choose."""
TUNED = {"exact", "topk"}
"""Arms whose bases are as far apart as the model says."""

MEASURING = 170
"""Steps in which ``every="auto"`` has measured, with some to spare."""
PROBE, APART = 24, 3
"""Steps that are measured beforehand, and from one save to the next in them, so that none waits for the one before."""
PATIENCE, LEAST_PATIENCE = 8, 60.0
"""Times the undisturbed job's time, and seconds at least; an arm that takes longer will not end."""


@dataclass(frozen=True)
class Line:
    """An arm as it is run for one mean."""

    name: str
    every: int = 1
    base_every: int | None = None
    copies: int = 0
    """Steps from one copy in memory to the next, where ``auto`` has chosen such."""

    @property
    def label(self) -> str:
        if self.name in RECORDED or self.arm in RECORDED:
            return self.name + ("" if self.base_every is None else f", a base every {self.base_every}")
        if self.copies:
            return f"{self.name}, a copy every {self.copies}, a base every {self.every}"
        return f"{self.name}, every {self.every}"

    @property
    def arm(self) -> str:
        """Of ``arms.ARMS``. Where records of every step were chosen, nothing is to be chosen again."""
        return "exact" if self.name == AUTO and self.every == 1 else self.name

    @property
    def options(self) -> dict[str, Any]:
        told = {"base_every": self.base_every, "copies": self.copies or None}
        return {name: value for name, value in told.items() if value is not None}


def best_interval(step_seconds: float, save_seconds: float, mean: float) -> int:
    """Steps between two saves for which least is wasted: half of them are lost at a failure.

    >>> best_interval(step_seconds=0.1, save_seconds=0.2, mean=10.0)
    20
    """
    return max(1, round(math.sqrt(2 * save_seconds * mean) / step_seconds))


def best_bases(measured: MeasuredCosts, limits: Limits, mean: float) -> int:
    """Steps between two bases for which least is wasted, by the library's model."""
    try:
        return optimum(replace(measured, mean_seconds_between_failures=mean), limits).steps
    except DoesNotFit:
        return FIRST_STEPS


@dataclass
class Contest:
    """All arms on one job."""

    options: argparse.Namespace
    folder: Path
    step_seconds: float = 0.0
    """Of the job that nothing is kept of."""
    saves: dict[tuple[str, int], float] = field(default_factory=dict)
    """Seconds that a save adds, by arm and interval."""
    restarts: dict[str, float] = field(default_factory=dict)
    """Seconds until a job that is begun again trains, as far as it was measured."""
    tuned: dict[str, tuple[MeasuredCosts, Limits, StepRates | None]] = field(default_factory=dict)

    def prepare(self) -> None:
        """What a save of each arm costs, and what tuners measure; the bare step right before each."""
        self.run(Line("none"), PROBE)  # whoever comes first reads what is not in the page cache yet
        steps = []
        for name in self.options.arms:
            steps.append(self.run(Line("none"), PROBE).step_seconds)
            if name == AUTO:
                self._ask_auto()
                continue
            for every in [1] if name in RECORDED else [1, APART]:
                found = self.run(Line(name, every), PROBE).step_seconds
                self.saves[name, every] = max(1e-6, every * (found - steps[-1]))
            if name in TUNED:
                self._ask_tuner(name)
        self.step_seconds = statistics.median(steps)

    def _ask_auto(self) -> None:
        """What ``every="auto"`` measures in a job, and in one that goes on where that ended."""
        told, place = self.folder / "told", self.folder / "run"
        try:
            for steps in (MEASURING, MEASURING + 2):
                job = Job(AUTO, place, steps, self.options.model, told=told)
                self.restarts[AUTO] = run(job).ready_seconds
            self.tuned[AUTO] = pickle.loads(told.read_bytes())
        finally:
            clear(place)
        rates = self.tuned[AUTO][2]
        assert rates is not None
        self.saves[AUTO, 1] = max(1e-6, rates.recorded_seconds - rates.plain_seconds)
        self.saves[AUTO, APART] = max(1e-6, rates.held_seconds or rates.copy_seconds)

    def _ask_tuner(self, name: str) -> None:
        """Runs the job, and once more where that ended: bases are made, and records replayed."""
        told, line = self.folder / "told", Line(name, base_every=PROBE // 4)
        place = self.folder / "run"
        try:
            for part in (1, 2):
                job = Job(name, place, part * (PROBE - 2), self.options.model, 1, line.options, told)
                self.restarts[name] = run(job).ready_seconds
            self.tuned[name] = pickle.loads(told.read_bytes())
        finally:
            clear(place)

    def run(self, line: Line, steps: int, gaps: Any = NEVER, limit: float = math.inf) -> Outcome:
        place = self.folder / "run"
        try:
            return run(Job(line.arm, place, steps, self.options.model, line.every, line.options), gaps, limit)
        finally:
            clear(place)

    def lines(self, mean: float) -> list[Line]:
        """What is run for a ``mean`` time between failures."""
        return [line for name in self.options.arms for line in self._lines(name, mean)]

    def _lines(self, name: str, mean: float) -> list[Line]:
        if name in self.tuned:
            measured, limits, rates = self.tuned[name]
            measured = replace(
                measured, step_seconds=self.step_seconds, record_stall_seconds=self.saves[name, 1],
                restart_seconds=self.restarts[name],
            )  # fmt: skip
            if rates is not None:
                between = replace(measured, mean_seconds_between_failures=mean)
                choice = choose(between, limits, rates)
                if choice.every > 1:
                    return [Line(name, choice.every, copies=choice.copies)]
            return [Line(name, base_every=best_bases(measured, limits, mean))]
        if name in RECORDED:
            return [Line(name)]
        best = best_interval(self.step_seconds, self.saves[name, APART], mean)
        also = [1] if mean == self.means[0] else []
        return [Line(name, every) for every in sorted({*also, best})]

    @property
    def means(self) -> list[float]:
        """Seconds between failures, the smallest first."""
        return [60 * minutes / self.options.compression for minutes in sorted(self.options.minutes)]

    def seconds(self, mean: float) -> float:
        """That one step of the job takes about, over all that is run of it for this ``mean``."""
        restart = max(self.restarts.values(), default=0.5)
        found = 2 * self.step_seconds
        for line in self.lines(mean):
            every = 1 if line.every == 1 else APART
            step = self.step_seconds + self.saves[line.name, every] / (line.copies or line.every)
            found += (
                self.options.repeats * step * (1 + (restart + (line.copies or line.every) / 2 * step) / mean)
            )
        return found

    def measure(self, mean: float, steps: int) -> dict[str, Any]:
        """Every arm to the end of the job of ``steps``, under the same failures."""
        outcomes, bare = {}, [self.run(Line("none"), steps)]
        limit = max(LEAST_PATIENCE, PATIENCE * bare[0].seconds)
        for line in self.lines(mean):
            outcomes[line] = [
                self.run(line, steps, kills(mean, repeat), limit) for repeat in range(self.options.repeats)
            ]
        bare.append(self.run(Line("none"), steps))
        found = {line.label: asdict(line) | summary(outcomes[line], bare) for line in outcomes}
        bare_seconds = [outcome.seconds for outcome in bare]
        return {"mean_seconds": mean, "steps": steps, "bare_seconds": bare_seconds, "arms": found}


def summary(outcomes: list[Outcome], bare: list[Outcome]) -> dict[str, Any]:
    """Means over the repeats; shares are of the time of the job that is never killed."""

    def mean(what: str) -> float:
        return statistics.mean(getattr(outcome, what) for outcome in outcomes)

    seconds = statistics.mean(outcome.seconds for outcome in bare)
    step_seconds = statistics.mean(outcome.step_seconds for outcome in bare)
    wasted = mean("seconds") / seconds - 1
    restarting = mean("restart_seconds") / seconds
    redoing = mean("redone_steps") * step_seconds / seconds
    return {
        "seconds": mean("seconds"),
        "wasted": wasted,
        "saving": wasted - restarting - redoing,
        "restarting": restarting,
        "redoing": redoing,
        "failures": mean("failures"),
        "lost_steps": mean("lost_steps"),
        "redone_steps": mean("redone_steps"),
        "finished": all(outcome.finished for outcome in outcomes),
        "same_end": all(outcome.digest == bare[0].digest for outcome in outcomes),
    }


SHARES = ("wasted", "saving", "restarting", "redoing")


def rows(found: dict[str, Any]) -> list[list[str]]:
    lines = [["", "seconds", "wasted %", *SHARES[1:], "failures", "lost steps", "same end"]]
    for label, about in found["arms"].items():
        said = ["not finished", *[""] * len(SHARES)]
        if about["finished"]:
            said = [f"{about['seconds']:.1f}", *(f"{100 * about[share]:.0f}" for share in SHARES)]
        label = label.replace(about["name"], TITLES[about["name"]], 1)
        counts = [f"{about[key]:g}" for key in ("failures", "lost_steps")]
        lines.append([label, *said, *counts, "yes" if about["same_end"] else "no"])
    return lines


def heading(minutes: str, found: dict[str, Any]) -> str:
    low, high = sorted(found["bare_seconds"])
    return (
        f"{minutes} min between failures, {found['mean_seconds']:.2f} s here: a job of {found['steps']} steps that "
        f"takes {low:.1f} to {high:.1f} s undisturbed"
    )


def page(result: dict[str, dict], step_seconds: float, compression: float, repeats: int) -> str:
    """All tables, and what they are of."""
    about = machine()
    out = [
        "# Wasted under failures\n",
        f"By `python benchmarks/failures.py`, commit {about['commit']}, {about['date']}; {about['machine']}; "
        f"{about['system']}. A step takes {step_seconds:.2f} s, time is compressed {compression:g} times: what takes a "
        f"second here is {compression:g} seconds of a job with so many minutes between failures. Runs of each arm: "
        f"{repeats}. Killed is the process, not the machine, which `replica=True`, copies in memory of `auto` "
        "and those of Gemini would not survive. In the script is what the words mean.\n",
    ]
    for minutes, found in result.items():
        out += [f"## {heading(minutes, found)}\n", *markdown(rows(found)), ""]
    return "\n".join(out)


def picture(result: dict[str, dict], compression: float) -> str:
    """What every arm wastes, at every step and at its best."""
    groups: dict[str, dict[str, float | None]] = {}
    for minutes, found in result.items():
        for about in found["arms"].values():
            name, every = about["name"], about["every"]
            group = TITLES[name] + ("" if name in RECORDED else ", each step" if every == 1 else ", best")
            groups.setdefault(group, {})[f"{minutes} min between failures"] = (
                100 * about["wasted"] if about["finished"] else None
            )
    return bars(f"Wasted under failures, % of an undisturbed job ({compression:g}:1)", groups, "%")


def job_steps(contest: Contest, mean: float, started: float, left: int) -> int:
    """Of the job for this ``mean``, where so many are ``left`` to run."""
    options = contest.options
    share = (60 * options.limit - (time.monotonic() - started)) / left
    return options.steps or max(PROBE, int(share / contest.seconds(mean)))


def main() -> None:
    on_one_thread()
    parser = options_of(__doc__)
    parser.add_argument("--model", choices=TRAININGS, default="job")
    parser.add_argument("--steps", type=int, help="of the job; what --limit allows if not given")
    parser.add_argument("--limit", type=float, default=20.0, help="minutes that all of it takes, about")
    parser.add_argument("--minutes", type=float, nargs="+", default=[1, 3, 10], help="mean between failures")
    parser.add_argument("--compression", type=float, default=12.0, help="of time")
    parser.add_argument("--repeats", type=int, default=1, help="with other moments of the failures")
    default = ["exact", "auto", "save", "dcp", "checkfreq", "gemini", "naive"]
    parser.add_argument("--arms", nargs="+", choices=TITLES, default=default)
    options = parser.parse_args()
    if options.small:
        options.model, options.steps, options.minutes = "tiny", 60, [1]
        options.arms = ["exact", "save", "naive"]
    started, result = time.monotonic(), {}
    if options.steps is None:
        print(f"about {options.limit:g} minutes in all, the first of them to measure saves\n", flush=True)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="holdfast-bench-") as folder:
        contest = Contest(options, Path(folder))
        contest.prepare()
        if options.small:  # jobs are killed as often on a slow machine as on a fast one
            options.compression = 60 / contest.run(Line("none"), options.steps).seconds
        for number, mean in enumerate(contest.means):
            minutes = f"{sorted(options.minutes)[number]:g}"
            steps = job_steps(contest, mean, started, len(contest.means) - number)
            expected = steps * contest.seconds(mean) / 60
            print(
                f"{minutes} min between failures: {steps} steps, {expected:.1f} minutes for all arms",
                flush=True,
            )
            found = result[minutes] = contest.measure(mean, steps)
            print(f"\n{heading(minutes, found)}\n")
            table(rows(found))
            print()
    if options.keep:
        (RESULTS / "failures.svg").write_text(picture(result, options.compression))
        text = page(result, contest.step_seconds, options.compression, options.repeats)
        (RESULTS / "failures.md").write_text(text)
    asked = {name: getattr(options, name) for name in ("model", "limit", "compression", "repeats")}
    saves = {f"{name}, every {every}": seconds for (name, every), seconds in contest.saves.items()}
    measured = {name: asdict(found) for name, (found, *_) in contest.tuned.items()}
    rates = {name: found._asdict() for name, (_, _, found) in contest.tuned.items() if found is not None}
    about = {
        "step_seconds": contest.step_seconds,
        "save_seconds": saves,
        "measured": measured,
        "rates": rates,
    }
    finish("failures", asked | about | {"minutes": result}, options.keep)


if __name__ == "__main__":
    main()
