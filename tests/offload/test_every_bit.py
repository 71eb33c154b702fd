"""Out-of-core training has the bits of an ordinary loop, whatever options come together.

Any two values of two options are in a case together; in a campaign any three are.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest

from combined import CAMPAIGN, together
from holdfast.io.queue import DriveQueues, Throttle
from holdfast.measure import drive_rates
from holdfast.offload.engine import Engine
from holdfast.offload.model import blocks
from holdfast.offload.setup import drive_setup, run_planning, step_planning
from holdfast.offload.step_maker import ClippingChoice
from holdfast.quantities import KiB
from holdfast.schedule import step_builder, work
from holdfast.schedule.work import LEAST_MEMORY
from holdfast.store.run_store import LocalStore
from plain_loops import PLACEMENTS, STEPS, Task, check, plain_loop
from streams import Apart
from support.drive_rates import Rates
from training import batches, differing, read_atoms, stored

pytestmark = pytest.mark.filterwarnings("ignore:the drives .* are on one file system")


GUESSING = ["guessed", "guessed wrong", "guessed right", "by turns"]
FACTORS = {
    "count": [2, 1, 3, 5],
    "blocks": [4, 1, 2],
    "placement": ["mixed", "ssd", "host"],
    "order": ["plain", "snake", "horizontal"],
    "clipping": ["none", "deferred", *GUESSING, "per block"],
    "delayed": [0.0, 0.5, 1.0],
    "recomputed": [1.0, 0.5, 0.0],
    "dropout": [0.0, 0.2],
    "ends": ["resident", "streamed"],
    "precision": ["fp32", "bf16", "fp16"],
    "normalize": ["micro-batches", "tokens"],
    "commits": ["each", "one kept", "every second"],
    "device": ["host", "apart", "apart, nothing stays"],
    "memory": ["ample", "gradients on the SSD", "least"],
    "files": ["whole", "tiles"],
    "drives": [0, 2],
    "left": ["never", "closed", "killed"],
    "gradients": ["finite", "infinite"],
}
FORBIDDEN = [
    {"ends": ["streamed"], "order": ["snake"]},
    {"ends": ["streamed"], "clipping": ["per block"]},
    {"precision": ["fp16"], "clipping": ["per block"]},
    {"clipping": GUESSING, "order": ["horizontal"]},
    {"clipping": GUESSING, "commits": ["every second"]},
    {"normalize": ["tokens"], "count": [1]},
    {"gradients": ["infinite"], "clipping": ["none"], "precision": ["fp32", "bf16"]},  # no norm is taken
]
CASES = together(FACTORS, FORBIDDEN, 3 if CAMPAIGN else 2)
COMMITS = {"each": {}, "one kept": {"retain": 1}, "every second": {"commit_every": 2}}
LEAVE = {"never": None, "closed": Engine.close, "killed": lambda engine: (engine.wait(), engine.give_up())}


def task_of(case):
    precise = case["precision"] == "fp16"
    task = Task(
        count=case["count"],
        blocks=case["blocks"],
        dropout=case["dropout"],
        wide=case["files"] == "tiles",
        snake=case["order"] == "snake",
        precision=case["precision"],
        tokens=case["normalize"] == "tokens",
        spoiled=frozenset({1, 4} if case["gradients"] == "infinite" else ()),
        steps=STEPS + 2 if precise else STEPS,
    )
    if case["clipping"] in ("guessed wrong", "guessed right"):
        return replace(task, clip_norm=1e-3 if case["clipping"] == "guessed wrong" else inf)
    return (
        task
        if case["clipping"] == "none"
        else replace(task.clipped_sometimes(), per_block=case["clipping"] == "per block")
    )


def options_of(case, directory):
    return {
        **COMMITS[case["commits"]],
        "delayed_fraction": case["delayed"],
        "recomputed_fraction": case["recomputed"],
        "embedding_and_head": case["ends"],
        "drives": [directory / f"drive{k}" for k in range(case["drives"])],
        **({"schedule": "horizontal"} if case["order"] == "horizontal" else {}),
        **({"clipping": "auto"} if case["clipping"] == "by turns" else {}),
        **({"clipping": "defer"} if case["clipping"] == "deferred" else {}),
        **({"clipping": "speculate"} if case["clipping"].startswith("guessed") else {}),
        **({"sample": batches(0, 1)[0], "micro_batches": case["count"]} if case["device"] != "host" else {}),
    }


def slow_first(*args, **options):
    """Queues of which that of the first further drive is slow."""
    queues = DriveQueues(*args, **options)
    next(iter(queues.others.values()))._total = Throttle(8 << 20)
    return queues


def choose_others(monkeypatch, **changes):
    """Have each placement made with ``changes``, functions of it."""
    usual = step_planning.choose

    def choose(*args, **options):
        placement = usual(*args, **options)
        return replace(placement, **{name: change(placement) for name, change in changes.items()})

    monkeypatch.setattr(step_planning, "choose", choose)


@pytest.fixture
def devices(monkeypatch):
    """Devices apart that engines have opened."""
    opened = []

    def arrange(case):
        if case["device"] != "host":
            monkeypatch.setattr(
                run_planning, "open_device", lambda name: opened.append(Apart(seed=len(opened))) or opened[-1]
            )
        if (
            case["device"] == "apart, nothing stays"
        ):  # as where the device has no room for what flows between blocks
            monkeypatch.setattr(step_builder, "STAYING_BYTES", 0)
        if case["memory"] == "gradients on the SSD":
            choose_others(monkeypatch, gradients=lambda placement: (False,) * len(placement.gradients))
        elif case["memory"] == "least":
            choose_others(monkeypatch, saving=lambda placement: LEAST_MEMORY)
        if case["files"] == "tiles":
            monkeypatch.setattr(work, "TILE_BYTES", 100 * KiB)
        if case["ends"] == "streamed":
            monkeypatch.setattr(blocks, "LEAST_STREAMED", 0.0)
        if case["drives"]:
            monkeypatch.setattr(drive_rates, "rate_of", Rates(drive0=3e9, drive1=1.5e9).rate_of)
            monkeypatch.setattr(drive_setup, "DriveQueues", slow_first)
        if case["clipping"] == "by turns":
            change_ways(monkeypatch)
        return opened

    return arrange


def change_ways(monkeypatch):
    """Have ways of clipping change in every other step, whatever the times. Returns those of the steps done."""
    modes = []

    def over(self, mode, clipped, seconds):
        modes.append((mode, clipped))
        self.mode = "speculate" if len(modes) % 4 in (1, 2) else "defer"

    monkeypatch.setattr(ClippingChoice, "over", over)
    return modes


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(map(str, case.values())))
def test_steps_have_every_bit_of_a_plain_loop(tmp_path, devices, case):
    opened, task, run = devices(case), task_of(case), tmp_path / "run"
    names = [*PLACEMENTS]
    here = names.index(case["placement"])
    parts = [(task.steps, PLACEMENTS[names[here]])]
    if case["left"] != "never":  # and goes on in another placement
        parts = [(3, PLACEMENTS[names[here]]), (task.steps, PLACEMENTS[names[here - 1]])]
    check(run, task, *parts, leave=LEAVE[case["left"]], **options_of(case, tmp_path))
    assert differing(read_atoms(run), stored(run)) == []
    assert [device.problems for device in opened] == [[]] * len(opened)
    assert bool(opened) == (case["device"] != "host")
    files = LocalStore.read(run).head().files
    assert any(".tile1of" in name for name in files) == (case["files"] == "tiles"), [*files]
    on_drives = {folder for each in files.values() if "drive_" in (folder := each.path.rpartition("/")[0])}
    assert len(on_drives) == case["drives"], on_drives


@pytest.mark.slow
def test_ways_that_change_meet_steps_of_both_kinds(tmp_path, monkeypatch):
    modes = change_ways(monkeypatch)
    choose_others(monkeypatch, gradients=lambda placement: (False,) * len(placement.gradients))
    task = Task(count=3, steps=16).clipped_sometimes()
    check(tmp_path, task, clipping="auto", delayed_fraction=0.34, **PLACEMENTS["mixed"])
    assert {*modes} == {(mode, clipped) for mode in ("defer", "speculate") for clipped in (True, False)}


def test_the_scale_of_a_loop_falls_and_grows():
    scales = plain_loop(Task(count=3, precision="fp16", steps=STEPS + 2)).scales
    assert {b > a for a, b in pairwise(scales) if a != b} == {False, True}
