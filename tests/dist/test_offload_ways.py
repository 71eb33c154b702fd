"""Every way of training out of core, on several ranks: the bits of a plain loop that adds up rank by rank."""

from __future__ import annotations

import math
import re
from functools import cache

import pytest

from combined import one_in
from dist.test_offload import pieces_of
from dist.ways import plain, task
from dist.world import World
from holdfast.store.run_store import LocalStore
from named_optimizers import OPTIMIZERS
from plain_loops import PLACEMENTS
from training import differing, read_atoms

CLIPPING = {
    "none": {},
    "defer": {"clip_norm": 0.56},
    "speculate": {"clip_norm": 0.56, "clipping": "speculate"},
    "per_block": {"clip_norm": 0.56, "clipping": "per_block"},
}


@pytest.fixture(scope="module")
def world():
    with World("ways") as world:
        yield world


def check(said, name, root, told, last):
    """All ranks say of the run ``name`` what the plain loop was ``told`` up to its step ``last``, whose state the
    newest commit has."""
    for each in said:
        run = each.get(name)
        assert run is not None and run["given_back"], each.get("trace") or each
        here = slice(last - len(run["losses"]), last)
        assert same(run["losses"], told.losses[here])
        assert [scale or 1.0 for scale in run["scales"]] == told.scales[here]
        assert [why is not None for why in run["skipped"]] == told.skipped[here]
        assert [left for left, why in zip(run["left_out"], run["skipped"], strict=True) if why is None] == [
            left for left, bad in zip(told.left_out[here], told.skipped[here], strict=True) if not bad
        ]
        assert run["norms"][0] is None or same(run["norms"], told.norms[here])
    assert len({each[name]["digest"] for each in said}) == 1
    reader = LocalStore.read(root, direct=False)
    assert reader.verify(reader.head()) == []
    assert differing(read_atoms(root), told.states[last - 1]) == []


def same(found, expected):
    """Numbers that are not finite are of one kind."""
    return len(found) == len(expected) and all(
        one == other or not (math.isfinite(one) or math.isfinite(other))
        for one, other in zip(found, expected, strict=True)
    )


def go_through(world, root, phases, names, tasks=task, **common):
    """Let each of ``names`` go through ``phases`` (the last step, the ranks, the micro-batches of a rank), and compare
    each with the plain loop after every phase; with what that was told, by name."""
    told = {name: plain(phases, tasks, **common, **more) for name, more in names.items()}
    for last, ranks, count in phases:
        runs = {
            name: {"root": root / name, "steps": last, "micro_batches": count, **common, **more}
            for name, more in names.items()
        }
        said = world.run(ranks, runs=runs)
        for name in names:
            check(said, name, root / name, told[name], last)
    return told


# What is delayed, where it stays, which way, how it is clipped


@cache
def reference(order, clip_norm, by_block):
    clipping = {"clipping": "per_block"} if by_block else {}
    options = {"order": order, **({} if clip_norm is None else {"clip_norm": clip_norm}), **clipping}
    return plain([(4, 2, 3)], kind="narrow", dropout=0.1, options=options)


def test_a_snake_of_three_micro_batches_has_other_bits_and_some_steps_are_clipped():
    """So that what follows can tell."""
    plain_one, snake = (reference(order, None, False) for order in ("plain", "snake"))
    assert differing(snake.states[0], plain_one.states[0]) != []
    norms = reference("plain", 0.56, False).norms
    assert min(norms) < 0.56 < max(norms)


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("clipping", CLIPPING)
def test_two_ranks_have_every_bit_whatever_is_delayed_and_wherever_it_is(world, tmp_path, clipping):
    runs, told = {}, {}
    for how, order, fraction, placement in one_in(
        4, CLIPPING, ["plain", "snake"], [0.0, 0.25, 0.5, 1.0], PLACEMENTS
    ):
        if how == clipping:
            name = f"{order} {fraction} {placement}"
            options = {"order": order, "delayed_fraction": fraction, **CLIPPING[how], **PLACEMENTS[placement]}
            options["recomputed_fraction"] = 1.0 - fraction
            common = {"kind": "narrow", "steps": 4, "micro_batches": 3, "dropout": 0.1}
            runs[name] = {"root": tmp_path / name, "options": options, **common}
            told[name] = reference(order, CLIPPING[how].get("clip_norm"), how == "per_block")
    assert len(runs) == 6
    said = world.run(2, runs=runs)
    for name, expected in told.items():
        check(said, name, tmp_path / name, expected, 4)


def test_a_snake_of_three_ranks_that_cut_tensors_has_its_own_bits(world, tmp_path):
    options = {"order": "snake", "delayed_fraction": 0.5, **PLACEMENTS["mixed"]}
    go_through(world, tmp_path, [(2, 3, 3), (4, 2, 4)], {"snake": {}}, kind="wide", options=options)


@pytest.mark.parametrize("ranks, kind", [(2, "wide"), (3, "thin")])
def test_gradients_that_wait_on_the_ssd_are_each_ranks_part(world, tmp_path, ranks, kind):
    """Which of a block that is one matrix is nothing on two of three."""
    runs, told = {}, {}
    for how, fraction in (("defer", 0.0), ("speculate", 0.5), ("per_block", 1.0)):
        options = {**CLIPPING[how], "delayed_fraction": fraction, **PLACEMENTS["mixed"]}
        run = {"root": tmp_path / how, "steps": 3, "micro_batches": 2, "spilled": True}
        runs[how] = {**run, "kind": kind, "options": options}
    said = world.run(ranks, runs=runs)
    for how, run in runs.items():
        assert all(each[how]["spills"] for each in said), said[0].get("trace")
        pieces = pieces_of(tmp_path / how)
        told[how] = plain([(3, ranks, 2)], kind=kind, pieces=pieces, options=run["options"])
        check(said, how, tmp_path / how, told[how], 3)


# fp16


OVERFLOWING = {"scale": (2.0**12, 2), "factors": [[1, 3, 2e4], [0, 5, 2e4]]}
"""Each of these overflows on one rank alone."""


def test_a_scale_falls_by_what_one_rank_alone_sees_and_grows_and_goes_on_with_other_ranks(world, tmp_path):
    """Twice right after it has fallen, and once in the middle of the steps after which it grows."""
    ways = {
        "defer": {"options": {"dtype": "fp16", "delayed_fraction": 0.5, **PLACEMENTS["mixed"]}},
        "speculate": {"options": {"dtype": "fp16", **CLIPPING["speculate"], **PLACEMENTS["mixed"]}},
        "snake": {"options": {"dtype": "fp16", "order": "snake", **CLIPPING["defer"], **PLACEMENTS["ssd"]}},
    }
    told = go_through(
        world, tmp_path, [(4, 2, 3), (6, 2, 2), (7, 1, 4), (9, 3, 1)], ways, kind="narrow", dropout=0.1,
        **OVERFLOWING,
    )  # fmt: skip
    for each in told.values():
        assert each.overflown == [[1] if step == 3 else [0] if step == 5 else [] for step in range(9)]
        assert each.scales == [2.0**power for power in (12, 12, 13, 13, 12, 12, 11, 11, 12)]


def test_a_rank_killed_after_the_scale_has_fallen_goes_on_with_the_fallen_one(world, tmp_path):
    options = {"dtype": "fp16", **CLIPPING["speculate"], **PLACEMENTS["mixed"]}
    common = {"kind": "narrow", "options": options, "scale": (2.0**12, 2), "factors": [[1, 2, 2e4]]}
    run = {"root": tmp_path, "steps": 6, "micro_batches": 2, **common}
    cut = world.run(2, runs={"run": {**run, "kill": [1, 4]}})
    assert cut[1]["code"] == -9 and cut[0]["error"].startswith("RankFailed"), cut
    said = world.run(2, runs={"run": run})
    assert {each["run"]["resumed"] for each in said} <= {3, 4}
    told = plain([(6, 2, 2)], **common)
    assert told.scales[2:4] == [2.0**13, 2.0**12]
    check(said, "run", tmp_path, told, 6)


# bf16


def test_masters_in_parts_go_on_whole_with_other_ranks_and_in_parts_again(world, tmp_path):
    ways = {
        name: {"options": {"dtype": "bf16", **CLIPPING[clipping], **PLACEMENTS[place]}}
        for name, clipping, place in (("ssd", "none", "ssd"), ("mixed", "speculate", "mixed"))
    }
    go_through(world, tmp_path, [(2, 1, 4), (4, 2, 2), (6, 1, 4)], ways, kind="narrow", dropout=0.1)
    for name in ways:
        with LocalStore.read(tmp_path / name, direct=False) as reader:
            files = reader.head().files
            keys = [entry.key for file in files.values() for entry in reader.layout(file).entries]
        assert any(key.endswith("/param.high") for key in keys), name


# Gradients and losses that are no numbers, on one rank alone


def test_blocks_without_a_finite_norm_on_one_rank_are_left_out_on_all(world, tmp_path):
    spoiled = {"spoiled": [[1, 1], [0, 3]]}
    ways = {
        place: {"options": {"delayed_fraction": 0.5, **CLIPPING["per_block"], **PLACEMENTS[place]}, **spoiled}
        for place in PLACEMENTS
    }
    told = go_through(world, tmp_path, [(3, 2, 2), (4, 3, 1)], ways, kind="narrow")
    left_out = ["blocks.0", "blocks.1", "blocks.2", "resident"]
    assert told["ssd"].left_out == [left_out if step in (1, 3) else None for step in range(4)]


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_tensors_that_are_cut_are_clipped_block_by_block_with_the_same_bits(world, tmp_path, ranks):
    options = {**CLIPPING["per_block"], "clip_norm": 0.3, "delayed_fraction": 0.5}
    common = {"kind": "wide", "options": options, "spoiled": [[1, 2]]}
    said = world.run(ranks, runs={"run": {"root": tmp_path, "steps": 4, "micro_batches": 2, **common}})
    pieces = pieces_of(tmp_path)
    assert any(len(found) > 1 for found in pieces.values())
    told = plain([(4, ranks, 2)], pieces=pieces, **common)
    assert told.left_out[2] is not None
    check(said, "run", tmp_path, told, 4)


def test_a_loss_that_is_no_number_on_one_rank_skips_the_step_however_it_is_clipped(world, tmp_path):
    ways = {name: {"options": {**clipping, **PLACEMENTS["mixed"]}} for name, clipping in CLIPPING.items()}
    ways["fp16"] = {"options": {"dtype": "fp16", **PLACEMENTS["mixed"]}, "scale": (2.0**12, 2)}
    told = go_through(world, tmp_path, [(4, 2, 2)], ways, kind="narrow", factors=[[1, 2, math.nan]])
    assert all(each.skipped == [False, False, True, False] for each in told.values())


def test_losses_by_tokens_have_every_bit_where_one_rank_has_none(world, tmp_path):
    """And so no gradient."""
    common = {"normalize": "tokens", "delayed_fraction": 0.5, **PLACEMENTS["mixed"]}
    ways = {name: {"options": {**common, **CLIPPING[name]}} for name in ("speculate", "per_block")}
    ways["fp16"] = {"options": {"dtype": "fp16", "normalize": "tokens"}, "scale": (2.0**12, 2)}
    go_through(world, tmp_path, [(2, 2, 1), (3, 3, 1)], ways, kind="narrow", uneven=True)


# Autocast


def test_steps_under_autocast_have_the_bits_of_a_loop_whose_forward_pass_is_under_it(world, tmp_path):
    ways = {
        "ssd": {"options": {"delayed_fraction": 1.0, **PLACEMENTS["ssd"]}},
        "host": {"options": {"order": "snake", **PLACEMENTS["host"]}},
    }
    common = {"kind": "wide", "dropout": 0.1}
    told = go_through(world, tmp_path, [(2, 2, 3), (3, 3, 1)], ways, autocast=True, **common)
    without = plain([(1, 2, 3)], **common)
    assert told["ssd"].losses[0] != without.losses[0]


# Optimizers that need whole matrices, and those of few bits


FROZEN = "blocks.2.mlp.up.weight"
WHOLE = {"muon and adamw", "adafactor", "apollo", "apollo, embeddings of adamw", "apollo-mini", "grass"}
WHOLE |= {"grass, rows by chance"}


def test_optimizers_of_whole_matrices_and_of_few_bits_go_on_with_any_number_of_ranks(world, tmp_path):
    ways = {name: {"optimizer": name} for name in OPTIMIZERS}
    phases = [(1, 1, 2), (2, 2, 1), (3, 1, 2)]
    go_through(world, tmp_path, phases, ways, kind="wide", options=PLACEMENTS["mixed"])


def test_matrices_that_are_updated_whole_are_one_ranks_each(world, tmp_path):
    """However they are clipped and delayed."""
    clipping = ["defer", "speculate", "per_block", "none"]
    for_each = {
        name: {
            "optimizer": name,
            "options": {**CLIPPING[clipping[n % 4]], "delayed_fraction": n % 3 / 2, **PLACEMENTS["host"]},
        }
        for n, name in enumerate([*sorted(WHOLE), "adamw in bytes"])
    }
    runs = {
        name: {"root": tmp_path / name, "kind": "wide", "steps": 3, "micro_batches": 2, **way}
        for name, way in for_each.items()
    }
    said = world.run(3, runs=runs)
    for name, way in for_each.items():
        pieces = pieces_of(tmp_path / name)
        cut = {key for key, found in pieces.items() if len(found) > 1} - {FROZEN}
        assert bool(cut) is (name not in WHOLE), (name, cut)
        told = plain([(3, 3, 2)], kind="wide", pieces=pieces, **way)
        check(said, name, tmp_path / name, told, 3)


def test_a_rank_may_have_no_matrix_of_any_block(world, tmp_path):
    go_through(
        world, tmp_path, [(3, 3, 1), (4, 2, 1)], {"muon": {"optimizer": "muon and adamw"}}, kind="thin"
    )


# An optimizer that has made steps


def test_an_optimizer_that_has_made_steps_goes_on_with_what_it_holds(world, tmp_path):
    ways = {name: {"optimizer": name} for name in ("adamw", "adamw in bytes", "apollo")}
    common = {"kind": "wide", "begun": 2}
    told = go_through(world, tmp_path, [(2, 3, 1)], ways, **common)
    anew = plain([(1, 3, 1)], kind="wide")
    assert differing(told["adamw"].states[0], anew.states[0]) != []


@pytest.mark.parametrize(
    "how, message",
    [
        (
            "an element",
            r"blocks.1.mlp.down.weight/exp_avg_sq is float32 \[16, 24\] with xxh3:\w+ on rank 1",
        ),
        (
            "all of it",
            r"blocks.0.\S+ is absent on rank 1 and float32 .* on rank 0. Give holdfast.offload an optimizer",
        ),
    ],
)
def test_what_optimizers_hold_otherwise_is_refused_on_all_ranks_and_nothing_is_written(
    world, tmp_path, how, message
):
    run = {"root": tmp_path / "run", "kind": "narrow", "steps": 2, "begun": 1, "unlike": {"1": how}}
    for each in world.run(2, runs={"run": run}):
        assert re.search(f"BadInput: the ranks have unlike optimizer state: {message}", each["error"]), each
    assert not (tmp_path / "run").exists()


# What is refused


@pytest.mark.parametrize(
    "run, message",
    [
        (
            {"options": {"dtype": "fp16", **CLIPPING["per_block"]}},
            "BadInput: precision='fp16' skips a step in which",
        ),
        ({"optimizer": "mezo"}, "BadInput: 2 ranks train together here, and MeZO is of one process"),
        (
            {"options": {"schedule": "horizontal"}},
            "BadInput: 2 ranks .* schedule='horizontal' is of one process",
        ),
        (
            {"options": {"clipping": "speculate", "commit_every": 2}},
            "BadInput: clipping: the mode 'speculate' undoes",
        ),
    ],
    ids=str,
)
def test_what_ranks_cannot_do_is_refused_on_all_and_nothing_is_written(world, tmp_path, run, message):
    for each in world.run(2, runs={"run": {"root": tmp_path / "run", "kind": "narrow", "steps": 2, **run}}):
        assert re.match(message, each["error"]), each
    assert not (tmp_path / "run").exists()
