"""The least memory in which a model trains with everything on the SSD that can be, as predicted and as measured.

    python benchmarks/memory_floor.py [--before CHECKOUT] [--only CASE] [--folder FOLDER] [--keep] [--small]

Cases: a decoder of which embedding and head are most ("words"), the same with a loss in several chunks ("head"), one of
wide blocks ("wide"), and one of many tokens and words ("tokens"). Each has two micro-batches, AdamW and one thread. It
computes in bf16, or in fp32 if that is over 4 times as fast. A line of one case is shown beside those of all.

1. A process asks ``offload`` for the least budget.
2. Another one trains three steps in it (one of many tokens), and is killed in the middle of the next.
3. Another one continues that run for a step.

The last two are under a hard limit: a memory cgroup (version 1, as root) of the budget less the pages of files that a
process has mapped. Where there can be none, or where it kills one of them, they run without, and the result says so.
The peak is the most that a process holds, libraries included, from its start to its end. With ``--before`` all is done
with the library of another checkout too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from common import fast_precision, finish, hard_limit, memory_of_process, options_of, table

HERE = Path(__file__).parents[1]
MIB = 1024**2
MICRO_BATCHES = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of a decoder and of a micro-batch."""

    vocabulary: int
    width: int
    blocks: int = 4
    heads: int = 8
    tokens: int = 128
    steps: int = 3


CASES = {
    "words": Case(vocabulary=131072, width=512),
    "head": Case(vocabulary=131072, width=512, blocks=2, tokens=512, steps=1),
    "wide": Case(vocabulary=256, width=3072, heads=24),
    "tokens": Case(vocabulary=131072, width=64, blocks=2, heads=1, tokens=16384, steps=1),
}
SMALL = {
    "words": Case(vocabulary=16384, width=64, blocks=2, steps=1),
    "head": Case(vocabulary=16384, width=64, blocks=2, tokens=4096, steps=1),
    "wide": Case(vocabulary=256, width=256, blocks=2, steps=1),
    "tokens": Case(vocabulary=65536, width=32, blocks=2, tokens=1024, steps=1),
}


# One process: prints a JSON object per event


def train(case: Case, run: str, budget: str, steps: int, dies: bool, precision: str) -> None:
    """Train to the step ``steps`` within ``budget``, and die in the middle of the next one."""
    import holdfast
    from holdfast import failpoints
    from holdfast.models.decoder import Decoder, DecoderConfig

    torch.set_num_threads(1)
    config = DecoderConfig(
        vocabulary=case.vocabulary,
        blocks=case.blocks,
        width=case.width,
        heads=case.heads,
        kv_heads=max(case.heads // 2, 1),
        context=case.tokens,
    )
    with holdfast.empty_parameters():
        model = Decoder(config)
    engine = holdfast.offload(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
        run,
        precision=precision,
        budget=holdfast.Budget(host=budget),
        placement=holdfast.Placement(params_on_host=0.0, optimizer_on_host=0.0, activations_on_host=0.0),
        durability=holdfast.Durability(retain=1),
        sample=batches(case, 0)[0],
        micro_batches=MICRO_BATCHES,
        say=lambda line: None,
    )
    say(
        resumed=engine.resumed_from,
        predicted=engine.preflight.host_bytes_predicted,
        state=engine.preflight.state_bytes,
        set_up=memory_of_process("VmHWM"),
    )
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    while engine.steps_done < steps:
        engine.step(batches(case, engine.steps_done))
    engine.wait()
    say(steps=memory_of_process("VmHWM"), durable=engine.durable_step, loss=engine.last["loss"])
    if dies:
        failpoints.armed = f"before_data_sync:{case.blocks // 2}"
        engine.step(batches(case, engine.steps_done))
    engine.close()


def batches(case: Case, step: int) -> list[dict]:
    generator = torch.Generator().manual_seed(step)
    shape = (1, case.tokens)
    tokens = [torch.randint(0, case.vocabulary, shape, generator=generator) for _ in range(MICRO_BATCHES)]
    return [{"tokens": one, "targets": one} for one in tokens]


def least_budget(case: Case, run: str, precision: str) -> None:
    """Say the least budget with a margin, and the bytes of files that a process has mapped."""
    from holdfast.errors import DoesNotFit

    try:
        train(case, run, "1MiB", 0, False, precision)
    except DoesNotFit as error:
        found = re.search(r'[Gg]ive it "([^"]+)"', str(error))
        assert found is not None, error
        say(budget=found[1], of_files=memory_of_process("RssFile"))
        return
    raise AssertionError("a run fits in 1 MiB")


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


# The processes of one case and one checkout


def run(checkout: Path, group: Path | None, **order: object) -> tuple[int, dict]:
    """Return the exit code of a process in ``group``, and what it said, merged."""
    path = os.pathsep.join([str(checkout / "src"), str(HERE / "benchmarks")])
    command = [sys.executable, "-P", __file__, "--measure", json.dumps(order)]
    procs = None if group is None else group / "cgroup.procs"
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=None if procs is None else lambda: procs.write_text(str(os.getpid())),
    )
    assert done.returncode in (0, -9), f"{order}: exit code {done.returncode}"
    said: dict = {}
    for line in done.stdout.splitlines():
        said |= json.loads(line)
    return done.returncode, said


def killed_and_resumed(checkout: Path, group: Path | None, run_folder: Path, order: dict) -> dict | None:
    """Train, kill and continue in ``group``; None if its limit ended a process."""
    order, peaks = {**order, "run": str(run_folder)}, []
    steps = (SMALL if order["small"] else CASES)[order["case"]].steps
    try:
        code, said = run(checkout, group, **order, steps=steps, dies=True)
        if "durable" not in said:
            return None
        assert code == -9 and said["durable"] == steps, (code, said)
        peaks += [said["set_up"], said["steps"]]
        predicted = [said["predicted"]]
        code, again = run(checkout, group, **order, steps=steps + 1, dies=False)
        if code == -9:
            return None
        assert again["resumed"] >= steps and again["durable"] == steps + 1, again
        peaks += [again["set_up"], again["steps"]]
        predicted.append(again["predicted"])
    finally:
        shutil.rmtree(run_folder, ignore_errors=True)
    names = ("set_up", "steps", "resume", "steps_after")
    return {
        "state": said["state"],
        "predicted": max(predicted),
        **dict(zip(names, peaks)),
        "peak": max(peaks),
    }


def figures(checkout: Path, folder: Path, name: str, small: bool, precision: str) -> dict:
    """Return the bytes of one case with the library of ``checkout``."""
    order = {"case": name, "small": small, "precision": precision}
    asked = run(checkout, None, **order, run=str(folder / "run"))[1]
    budget, order = asked["budget"], {**order, "budget": asked["budget"]}
    limit = int(budget.removesuffix("MiB")) * MIB - asked["of_files"]
    with hard_limit(limit) as group:
        found = None if group is None else killed_and_resumed(checkout, group, folder / "run", order)
    held = found is not None
    if found is None:
        found = killed_and_resumed(checkout, None, folder / "run", order)
        assert found is not None, f"{name}: a process was killed without a limit"
    kept = {"budget": budget, "limit": limit, "under_limit": held if group is not None else None}
    return {**kept, **found, "ratio": round(found["peak"] / found["predicted"], 3)}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--before", type=Path, default=None, help="another checkout of this repository")
    parser.add_argument("--only", choices=CASES, help="one case")
    parser.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(**options.measure)
        return
    checkouts = {"before": options.before, "now": HERE} if options.before else {"now": HERE}
    found: dict[str, dict[str, dict]] = {}
    precision = fast_precision()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for name in [options.only] if options.only else CASES:
            found[name] = {
                side: figures(checkout, Path(folder), name, options.small, precision)
                for side, checkout in checkouts.items()
            }
    report(found)
    before = commit_of(options.before)
    only = {"measurement": options.only} if options.only else {}
    finish("memory_floor", {**only, "before": before, "precision": precision, "cases": found}, options.keep)


def measure(
    case: str, small: bool, run: str, precision: str, budget: str = "", steps: int = 0, dies: bool = False
) -> None:
    sizes = (SMALL if small else CASES)[case]
    if budget:
        train(sizes, run, budget, steps, dies, precision)
    else:
        least_budget(sizes, run, precision)


def report(found: dict[str, dict[str, dict]]) -> None:
    """Print MiB, by case and checkout."""
    rows = [
        ["MiB", "state", "predicted", "peak", "/ predicted", "/ before", "set up", "steps", "resume", "held"]
    ]
    held = {True: "hard", False: "killed", None: "no cgroup"}
    for name, sides in found.items():
        for side, one in sides.items():
            before = sides.get("before", one)["peak"]
            sizes = [f"{one[key] / MIB:.0f}" for key in ("state", "predicted", "peak")]
            ratios = [f"{one['ratio']:.2f}", f"{one['peak'] / before:.2f}"]
            parts = [f"{one[key] / MIB:.0f}" for key in ("set_up", "steps", "resume")]
            rows.append([f"{name}, {side}", *sizes, *ratios, *parts, held[one["under_limit"]]])
    table(rows)


def commit_of(checkout: Path | None) -> str | None:
    if checkout is None:
        return None
    git = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
