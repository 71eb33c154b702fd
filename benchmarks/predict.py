"""What the planner predicts of a step against what it takes, and what it chooses against a grid.

    python benchmarks/predict.py [--rounds 4] [--part steps grid] [--keep] [--small]

As for a user, the machine is probed at the first start, and the profile is corrected by the steps of a few sittings, of
a configuration that is none of those that follow (`--sittings 0`: of none). That profile is used for all. Then six
configurations (sizes, micro-batches, placements, delayed fractions, limits of the SSD) are predicted and measured:
their engines live in one process and take turns of a few steps, each after one that is not timed. Then one model with a
limited SSD and a host budget that does not hold it: the planner's own choice, and all placements of a grid that fit,
likewise; the fastest few of the grid and the choice are measured again, with more rounds. Prints two tables and one
line of JSON. About eight minutes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from common import finish, options_of, paired_ratio, table

import holdfast
from holdfast.errors import DoesNotFit
from holdfast.events import EventLog
from holdfast.models.decoder import Decoder, DecoderConfig
from holdfast.offload.profile_correction import FIRST_STEP, NUM_STEPS
from holdfast.offload.setup import step_planning
from holdfast.quantities import format_bytes

STEPS, GRID_STEPS = 3, 2
"""Of one engine before the next engine's turn."""

BEST = 3
"""Of the grid, that are measured again."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration; fractions of None are the planner's to choose."""

    blocks: int
    width: int
    context: int
    micro_batches: int
    params: float | None = None
    optimizer: float | None = None
    activations: float | None = None
    delayed: float | None = None
    limit: int | None = None
    """Bytes per second of the SSD, both ways together."""
    dtype: str = "fp32"
    host_budget: int | None = None

    def batches(self) -> list[dict]:
        tokens = torch.randint(0, 256, (1, self.context))
        return [{"tokens": tokens, "targets": tokens}] * self.micro_batches

    def small(self) -> Case:
        return replace(self, blocks=3, width=64, context=16, micro_batches=2)


CASES = {
    "all in memory": Case(
        blocks=8, width=512, context=128, micro_batches=4, params=1, optimizer=1, activations=1, delayed=0
    ),
    "state on the SSD": Case(
        blocks=8, width=512, context=128, micro_batches=4, params=1, optimizer=0, activations=1, delayed=0
    ),
    "all on a slow SSD": Case(
        blocks=12, width=256, context=128, micro_batches=8, params=0, optimizer=0, activations=1, delayed=0,
        limit=150_000_000,
    ),
    "half delayed, slow SSD": Case(
        blocks=16, width=256, context=128, micro_batches=4, params=1, optimizer=0, activations=1, delayed=0.5,
        limit=200_000_000,
    ),
    "inputs on the SSD": Case(
        blocks=8, width=256, context=256, micro_batches=8, params=0.5, optimizer=0.5, activations=0, delayed=0.25,
        limit=250_000_000,
    ),
    "large blocks, one micro-batch": Case(
        blocks=6, width=1024, context=128, micro_batches=1, params=0, optimizer=0, activations=1, delayed=0
    ),
}  # fmt: skip

FITTED = Case(
    blocks=8, width=384, context=192, micro_batches=4, params=0.5, optimizer=0.5, activations=1, delayed=0
)  # fmt: skip
"""Whose steps correct the profile."""

STEPS_OF_A_SITTING = FIRST_STEP + NUM_STEPS
"""After which the profile is corrected."""

GRID = Case(blocks=16, width=256, context=128, micro_batches=4, limit=200_000_000)
"""Its block inputs are always the planner's."""

PARAMS, OPTIMIZER, DELAYED = (0.0, 1.0), (0.0, 0.25, 0.5), (0.0, 0.25, 0.5)

ROOM = 0.4
"""Of what the grid's model takes more in memory than on the SSD, what its budget allows."""


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--sittings", type=int, default=4)
    parser.add_argument("--part", nargs="+", choices=["steps", "grid"], default=["steps", "grid"])
    options = parser.parse_args()
    if options.small:
        options.rounds = options.sittings = 1
    with profile(options) as path:
        result = {"rounds": options.rounds, "sittings": options.sittings, "machine_profile": path.read_text()}
        if "steps" in options.part:
            result["cases"] = steps_part(options)
        if "grid" in options.part:
            result["grid"] = grid_part(options)
    finish("predict", result, options.keep)


@contextmanager
def profile(options: argparse.Namespace) -> Iterator[Path]:
    """A profile of this machine, which every engine then plans by, and which nothing corrects any more."""
    folder = Path(tempfile.mkdtemp(dir=options.folder, prefix="holdfast-bench-"))
    os.environ.pop("HOLDFAST_MACHINE", None)
    os.environ["XDG_CACHE_HOME"] = str(folder)
    case = FITTED.small() if options.small else FITTED
    try:
        for sitting in range(
            options.sittings + 1
        ):  # the last makes the engine alone, with what the others have left
            with engine_of(options, case) as engine:
                for _ in range(STEPS_OF_A_SITTING if sitting < options.sittings else 0):
                    engine.step(case.batches())
        (path,) = folder.glob("holdfast/machine-*.toml")
        os.environ["HOLDFAST_MACHINE"] = str(path)
        yield path
    finally:
        shutil.rmtree(folder)


def steps_part(options: argparse.Namespace) -> dict[str, dict]:
    """Predicted and measured seconds of each configuration."""
    cases = {name: case.small() if options.small else case for name, case in CASES.items()}
    with ExitStack() as stack:
        engines = {name: stack.enter_context(engine_of(options, case)) for name, case in cases.items()}
        taken = turns(engines, cases, options.rounds, STEPS)
        found = {name: compared(engines[name], taken[name]) for name in cases}
    rows = [["configuration", "predicted ms", "measured ms", "measured / predicted", "busiest", "busy"]]
    table(rows + [[name, *cells(entry)] for name, entry in found.items()])
    print()
    return found


def grid_part(options: argparse.Namespace) -> dict:
    """The planner's choice against all placements of a grid that fit its budget."""
    step_planning.process_bytes = lambda: (
        0
    )  # engines live side by side, each with a budget as if it were alone
    base = GRID.small() if options.small else GRID
    budget = budget_of(options, base)
    grid = {
        f"{params:g} {optimizer:g} {delayed:g}": replace(
            base, params=params, optimizer=optimizer, delayed=delayed, host_budget=budget
        )
        for params, optimizer, delayed in product(PARAMS, OPTIMIZER, DELAYED)
    }
    if options.small:
        grid = {name: grid[name] for name in ("0 0 0", "1 0 0")}
    with ExitStack() as stack:
        engines = {}
        cases = {"chosen": replace(base, host_budget=budget)}
        engines["chosen"] = stack.enter_context(engine_of(options, cases["chosen"]))
        for name, case in grid.items():
            try:
                engines[name] = stack.enter_context(engine_of(options, case))
                cases[name] = case
            except DoesNotFit:
                continue
        taken = turns(engines, cases, max(options.rounds // 2, 1), GRID_STEPS)
        found = {name: compared(engines[name], taken[name]) for name in engines}
        others = sorted((name for name in found if name != "chosen"), key=lambda n: found[n]["measured"])
        finalists = {name: engines[name] for name in ("chosen", *others[:BEST])}
        again = turns(finalists, cases, options.rounds + 2, GRID_STEPS)
    medians = {name: statistics.median(seconds) for name, seconds in again.items()}
    best = min(others[:BEST], key=medians.__getitem__)
    ratio = paired_ratio(again["chosen"], again[best])
    print(f"Host budget {format_bytes(budget)}; {len(others)} placements fit. Parameters, state, delayed:\n")
    rows = [["placement", "predicted ms", "measured ms", "measured / predicted", "busiest", "busy"]]
    table(rows + [[name, *cells(found[name])] for name in ("chosen", *others)])
    print(
        f"\nAgain: chosen {medians['chosen'] * 1e3:.0f} ms, best ({best}) {medians[best] * 1e3:.0f} ms: {ratio:.3f}\n"
    )
    return {
        "host_budget": budget,
        "placements": found,
        "again": medians,
        "best": best,
        "chosen_over_best": ratio,
    }


def budget_of(options: argparse.Namespace, base: Case) -> int:
    """A host budget between what the model takes on the SSD and what it takes in memory."""
    needs = []
    for part in (0, 1):
        with engine_of(options, replace(base, params=part, optimizer=part, delayed=0)) as engine:
            needs.append(engine.preflight.host_bytes_predicted)
    low, high = needs
    return int(low + ROOM * (high - low))


def turns(
    engines: dict[str, holdfast.Engine], cases: dict[str, Case], rounds: int, steps: int
) -> dict[str, list[float]]:
    """Seconds per step in each round, as training goes on: what the last step leaves is not waited for."""
    taken: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(rounds + 1):
        for name, engine in engines.items():
            batches = cases[name].batches()
            engine.step(batches)
            start = time.perf_counter()
            for _ in range(steps):
                engine.step(batches)
            if turn:
                taken[name].append((time.perf_counter() - start) / steps)
            engine.wait()
    return taken


def compared(engine: holdfast.Engine, seconds: list[float]) -> dict:
    prediction = engine.preflight.prediction
    assert prediction is not None
    measured, predicted = statistics.median(seconds), prediction.choice.step_seconds
    return {
        "predicted": predicted,
        "measured": measured,
        "least": min(seconds),
        "most": max(seconds),
        "ratio": measured / predicted,
        "busiest": prediction.busiest,
        "on_host": prediction.choice.fractions,
        "delayed": prediction.shape.delayed_fraction,
        "times": prediction.event()["times"],
    }


def cells(found: dict) -> list[str]:
    name, part = found["busiest"]
    ms = [f"{found[key] * 1e3:.0f}" for key in ("predicted", "measured")]
    return [*ms, f"{found['ratio']:.2f}", name, f"{part:.0%}"]


@contextmanager
def engine_of(options: argparse.Namespace, case: Case) -> Iterator[holdfast.Engine]:
    folder = tempfile.mkdtemp(dir=options.folder, prefix="holdfast-bench-")
    config = DecoderConfig(
        blocks=case.blocks, width=case.width, heads=case.width // 32, kv_heads=case.width // 32,
        context=case.context, dropout=0.0,
    )  # fmt: skip
    with holdfast.empty_parameters():
        model = Decoder(config)
    try:
        with holdfast.offload(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-4),
            folder,
            precision=case.dtype,
            budget="auto" if case.host_budget is None else holdfast.Budget(host=case.host_budget),
            placement=holdfast.Placement(
                params_on_host=given(case.params),
                optimizer_on_host=given(case.optimizer),
                activations_on_host=given(case.activations),
                delayed_fraction=given(case.delayed),
            ),
            sample=case.batches()[0],
            micro_batches=case.micro_batches,
            durability=holdfast.Durability(retain=1),
            io=holdfast.IO(total_limit=case.limit),
            events=EventLog(None),
            say=lambda text: None,
        ) as engine:
            yield engine
    finally:
        shutil.rmtree(folder)


def given(fraction: float | None) -> float | str:
    return "auto" if fraction is None else fraction


if __name__ == "__main__":
    main()
