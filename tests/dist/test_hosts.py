"""Scripts of libraries that shard are killed, and end as if they never had been; also with another number of ranks."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("lightning")

from dist.world import World, finished

Said = list[dict[str, Any]]
RESUMED = 7
"""The step that is recorded last. Three passes over 48 samples, 12 in a step: it is the third of the second pass."""


@pytest.fixture(scope="module")
def world():
    with World("hosts") as world:
        yield world


def killed(world: World, ranks: int, **script: Any) -> Said:
    """What ``ranks`` said of whom the last was killed in the step after ``RESUMED``."""
    said = world.run(ranks, kill=[ranks - 1, RESUMED + 1], **script)
    assert said[-1]["code"] == -9, said
    assert not any(each.get("finished") for each in said)
    return said


def compare(rest: Said, whole: Said) -> None:
    """``rest`` did the steps after ``RESUMED`` as ``whole`` did them, and ended as it did."""
    for one, other in zip(whole, rest, strict=True):
        assert min(map(int, other["digests"])) == RESUMED + 1
        for what in ("digests", "losses", "seen"):
            for step, value in other.get(what, {}).items():
                assert value == one[what][step], (what, step)
        for what in ("steps", "rate", "random", "history"):
            assert other.get(what) == one.get(what), what


@pytest.fixture(scope="module")
def by_torch(world, tmp_path_factory):
    """What ``after`` ranks do from where ``before`` saved after ``RESUMED``, by torch alone."""
    known: dict[str, Said] = {}

    def changed(before: int, after: int, **second: Any) -> Said:
        if (key := repr((before, after, second))) not in known:
            script = {"host": "torch", "kind": "fsdp", "folder": tmp_path_factory.mktemp("torch")}
            first = {**second, "accumulate": 1, "batch": 12 // before}
            finished(world.run(before, begin=True, stop_at=RESUMED, **script, **first))
            known[key] = finished(world.run(after, begin=False, **script, **second))
        return known[key]

    return changed


@pytest.mark.parametrize(
    "script",
    [
        {"host": "accelerate", "batch": 2, "samples": 23, "accumulate": 2, "order": "seedable"},
        {"host": "trainer", "batch": 6},
        {"host": "lightning", "batch": 6},
    ],
    ids=lambda script: script["host"],
)
def test_killed_it_ends_the_same_with_as_many_ranks(world, tmp_path, script):
    script = {**script, "kind": "fsdp", **({} if "order" in script else {"output": tmp_path / "output"})}
    whole = finished(world.run(2, **script))
    killed(world, 2, root=tmp_path / "run", **script)
    compare(finished(world.run(2, root=tmp_path / "run", **script)), whole)


# Another number of ranks


def test_three_ranks_of_accelerate_are_killed_and_two_go_on(world, by_torch, tmp_path):
    script = {"host": "accelerate", "kind": "fsdp", "root": tmp_path / "run"}
    killed(world, 3, batch=4, **script)
    accumulated = {"batch": 3, "accumulate": 2}
    killed(world, 2, **script, **accumulated)
    compare(finished(world.run(2, **script, **accumulated)), by_torch(3, 2, **accumulated))


def test_two_ranks_of_accelerate_are_killed_and_three_go_on(world, by_torch, tmp_path):
    """Without random numbers, of which the new ranks have their own; of batches that are split."""
    script = {"host": "accelerate", "kind": "fsdp", "root": tmp_path / "run", "dropout": 0.0}
    script |= {"batch": 12, "split": True, "registers": False}
    killed(world, 2, **script)
    rest = finished(world.run(3, **script))
    expected = by_torch(2, 3, batch=4, dropout=0.0)
    assert len({said.pop("random") for said in rest}) == 3
    compare(rest, [{**said, "random": None} for said in expected])


def test_three_processes_of_a_trainer_are_killed_and_two_go_on(world, tmp_path):
    """As from the trainer's own checkpoint. Two others have begun before, and were killed before their first step."""
    script = {"host": "trainer", "kind": "fsdp"}
    killed(world, 3, root=tmp_path / "run", batch=4, **script)
    killed(world, 2, root=tmp_path / "run", batch=6, **script)
    rest = finished(world.run(2, root=tmp_path / "run", batch=6, **script))
    own = {**script, "output": tmp_path / "output"}
    finished(world.run(3, batch=4, save_at=RESUMED, **own))
    compare(
        rest, finished(world.run(2, batch=6, checkpoint=tmp_path / f"output/checkpoint-{RESUMED}", **own))
    )


def test_three_processes_of_lightning_are_killed_and_two_go_on(world, by_torch, tmp_path):
    """The mean of an epoch is over the losses of the three and of the two. Two were killed before their first step."""
    script = {"host": "lightning", "kind": "fsdp", "root": tmp_path / "run"}
    first = killed(world, 3, batch=4, **script)
    killed(world, 2, batch=6, **script)
    rest = finished(world.run(2, batch=6, **script))
    compare(rest, by_torch(3, 2, batch=6, order="distributed"))
    before = sum(4 * loss for said in first for step in "567" for loss in said["losses"][step])
    after = sum(6 * loss for said in rest for loss in said["losses"]["8"])
    assert [said["means"]["1"] for said in rest] == pytest.approx([(before + after) / 48] * 2)


@pytest.mark.parametrize(
    "script, ranks, kinds",
    [
        ({"host": "accelerate", "order": "shuffled"}, [2, 3, 1], ["fsdp", "ddp", "ddp"]),
        ({"host": "accelerate"}, [1, 2], ["ddp", "fsdp"]),
        ({"host": "trainer"}, [2, 1, 3], ["ddp", "ddp", "fsdp"]),
        ({"host": "lightning"}, [3, 2, 3], ["fsdp", "ddp", "fsdp"]),
    ],
)
def test_a_run_goes_from_one_parallelism_to_the_next(world, tmp_path, script, ranks, kinds):
    """Each does one step, with the state of the last to the bit, and none sees a sample twice in a pass."""
    script = {"root": tmp_path / "run", **script}
    seen: list[int] = []
    digest = ""
    for step, (count, kind) in enumerate(zip(ranks, kinds, strict=True), 1):
        ends = {"stop_at" if script["host"] == "accelerate" else "max_steps": step}
        said = finished(world.run(count, kind=kind, batch=12 // count, **ends, **script))
        assert [list(each["digests"]) for each in said] == [[str(step)]] * count
        assert step == 1 or {each["digest"] for each in said} == {digest}
        digest = said[0]["digests"][str(step)]
        seen += [i for each in said for i in each["seen"][str(step)]]
    assert len(seen) == len(set(seen)) == 12 * len(ranks)


# What another number of ranks cannot continue


def test_other_samples_and_another_order_are_refused(world, tmp_path):
    script = {"host": "accelerate", "kind": "ddp", "root": tmp_path / "run"}
    finished(world.run(2, batch=6, stop_at=2, **script))
    for changed, text in {
        "batch": (
            3,
            "A step of the run has 12 samples (12 in a batch of all ranks, 1 accumulated), and here 3",
        ),
        "samples": (47, "the dataset has 47 samples instead of 48"),
        "order": (
            "in order",
            "The run reads an order by the sampler's generator, and this script the order of the",
        ),
    }.items():
        [said] = world.run(1, **{**script, "batch": 12, changed: text[0]})
        assert said["error"].startswith("RunMismatch: the run was trained by 2 ranks, and here are 1"), said
        assert text[1] in said["error"]
    finished(world.run(2, batch=6, stop_at=3, **script))


def test_a_schedule_that_every_process_moves_is_refused(world, tmp_path):
    script = {"host": "accelerate", "kind": "ddp", "root": tmp_path / "run", "registers": False}
    finished(world.run(2, batch=6, stop_at=1, **script))
    [said] = world.run(1, batch=12, **script)
    assert "Each process moves the schedule once, 2 times a step in the run and 1 here" in said["error"]


@pytest.mark.parametrize("order", ["distributed", "in order"])
def test_one_process_of_lightning_has_no_order_of_several(world, tmp_path, order):
    script = {"host": "lightning", "root": tmp_path / "run", "order": order}
    finished(world.run(1, kind="ddp", batch=12, max_steps=1, **script))
    for said in world.run(2, kind="fsdp", batch=6, **script):
        assert "and this script an order by seed and epoch. Resume with 1, or begin" in said["error"]


def test_tensor_parallelism_of_lightning_is_refused_with_nothing_written(world, tmp_path):
    root = tmp_path / "run"
    for said in world.run(2, host="lightning", kind="fsdp", root=root, batch=6, tensor_parallel=2):
        assert said["error"].startswith("BadInput: ModelParallelStrategy with tensor parallelism"), said
    assert not root.exists()


def test_a_step_of_save_state_is_gone_back_to_by_another_number_of_ranks(world, by_torch, tmp_path):
    """The accelerator counts batches of its own, of which the step is no multiple of the new accumulation."""
    script = {"host": "accelerate", "kind": "fsdp", "root": tmp_path / "run"}
    finished(world.run(3, batch=4, save_at=RESUMED, stop_at=RESUMED + 1, **script))
    rest = finished(world.run(2, batch=3, accumulate=2, load=True, **script))
    compare(rest, by_torch(3, 2, batch=3, accumulate=2))
