"""Several ranks train out of core, each with its share: the bits of a plain loop that adds up as they do."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import holdfast
from dist.offloading import made, plain
from dist.world import World, flip
from holdfast.cli.main import main
from holdfast.store.run_store import LocalStore
from plain_loops import PLACEMENTS
from training import adamw, differing, read_atoms

STEPS = 6


@pytest.fixture(scope="module")
def world():
    with World("offloading") as world:
        yield world


def pieces_of(root):
    """By parameter: the regions in which the ranks have it, in the order of the ranks."""
    reader = LocalStore.read(root, direct=False)
    manifest = reader.head()
    found = {}
    for atom in reader.atoms(manifest).values():
        if atom["slot"] == "param":
            boxes = [fragment["global"] for fragment in atom["fragments"]]
            found[atom["name"]] = [tuple(slice(a, b) for a, b in zip(*box, strict=True)) for box in boxes]
    return found


def check(said, root, losses, norms, state):
    """All ranks say what the plain loop has, and the newest commit, which is whole, holds its state."""
    for each in said:
        assert each.get("finished") and each["given_back"], each.get("trace") or each
        assert each["losses"] == losses[len(losses) - len(each["losses"]) :]
        if norms:
            assert each["norms"] == norms[len(norms) - len(each["norms"]) :]
    assert len({each["evaluated"] for each in said}) == len({each["digest"] for each in said}) == 1
    reader = LocalStore.read(root, direct=False)
    assert reader.verify(reader.head()) == []
    assert differing(read_atoms(root), state) == []


@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_norm": 0.5},
        {"clip_norm": 0.5, "clipping": "speculate"},
        {"clip_norm": 100.0, "clipping": "speculate", "delayed_fraction": 0.5},
        {"delayed_fraction": 0.5, "commit_every": 3, **PLACEMENTS["mixed"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_tensors_that_are_cut_have_the_same_bits(world, tmp_path, ranks, options):
    """The norm of one is that of its pieces' norms."""
    said = world.run(ranks, root=tmp_path, steps=STEPS, micro_batches=2, kind="wide", options=options)
    pieces = pieces_of(tmp_path)
    assert any(len(found) > 1 for found in pieces.values())
    expected = plain([(STEPS, ranks, 2)], "wide", clip_norm=options.get("clip_norm"), pieces=pieces)
    check(said, tmp_path, *expected)


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("first, second", [("speculate", "defer"), ("defer", "speculate")])
def test_first_rank_chooses_the_way_of_clipping(world, tmp_path, first, second):
    options, ways = {"clip_norm": 0.5, "clipping": "auto"}, {"0": first, "1": second}
    said = world.run(2, root=tmp_path, steps=STEPS, micro_batches=2, ways=ways, options=options)
    check(said, tmp_path, *plain([(STEPS, 2, 2)], clip_norm=0.5))
    assert [each["clipping"] for each in said] == [sorted({"defer", first})] * 2


def test_all_ranks_wait_for_the_norm_where_one_does(world, tmp_path):
    """That one has no memory for guesses, or was told to wait."""
    options, ways = {"clip_norm": 0.5}, {"0": "speculate", "1": "speculate"}
    said = world.run(
        2, root=tmp_path, steps=3, options=options, wrong={"1": {"clipping": "defer"}}, ways=ways
    )
    check(said, tmp_path, *plain([(3, 2, 1)], clip_norm=0.5))
    assert [each["clipping"] for each in said] == [["defer"]] * 2


def test_ranks_compute_in_what_the_first_finds_fast(world, tmp_path):
    """Others would find another dtype; and so would all of them at the resume, which keeps that of the run."""
    for steps, fast in ((2, {"0": "fp32", "1": "bf16"}), (4, {"0": "bf16", "1": "bf16"})):
        said = world.run(2, root=tmp_path, steps=steps, options={"dtype": "auto"}, fast=fast)
    check(said, tmp_path, *plain([(4, 2, 1)]))


def test_one_rank_that_asks_for_another_dtype_is_refused(world, tmp_path):
    options, wrong = {"dtype": "auto"}, {"1": {"dtype": "bf16"}}
    said = world.run(2, root=tmp_path / "run", steps=2, options=options, wrong=wrong, fast={"0": "fp32"})
    for each in said:
        assert "dtype is bf16 on rank 1 and fp32 on rank 0" in each["error"], each
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("little, recomputed", [([], [1.0, 0.0]), ([1], [1.0])])
def test_ranks_recompute_what_one_has_to(world, tmp_path, little, recomputed):
    """A run that was given nothing: from the second step on graphs are kept, if they fit on all ranks."""
    said = world.run(2, root=tmp_path, steps=3, dropout=0.2, little=little)
    check(said, tmp_path, *plain([(3, 1, 2)], dropout=0.2))
    assert [each["recomputed"] for each in said] == [recomputed] * 2


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("kind, clip_norm, way", [("narrow", 0.5, "streamed"), ("wide", None, "resident")])
def test_a_run_goes_on_with_any_number_of_ranks(world, tmp_path, kind, clip_norm, way):
    phases = [(1, 1, 2), (3, 3, 1), (4, 2, 2), (5, 2, 1), (6, 1, 3)]
    for steps, ranks, micro_batches in phases:
        said = world.run(
            ranks, root=tmp_path, steps=steps, micro_batches=micro_batches, kind=kind,
            options={"clip_norm": clip_norm, "retain": 1, "embedding_and_head": way},
        )  # fmt: skip
    check(said, tmp_path, *plain(phases, kind, clip_norm=clip_norm))
    left = {path.name for path in (tmp_path / "data").iterdir()}
    assert not [name for name in left if name.startswith("rank-")], "of ranks that are gone"


def test_a_streamed_tied_embedding_has_the_bits_of_one_that_stays(world, tmp_path):
    found = {}
    for way in ("resident", "streamed"):
        options = {"clip_norm": 0.5, "embedding_and_head": way, "params_on_host": 0.5}
        said = world.run(2, root=tmp_path / way, steps=4, micro_batches=2, kind="tied", options=options)
        assert all(each.get("finished") for each in said), said
        found[way] = [(each["losses"], each["norms"], each["evaluated"], each["digest"]) for each in said]
        assert any(path.name.count("epilogue") for path in (tmp_path / way / "data").iterdir()) == (
            way == "streamed"
        )
    assert found["streamed"] == found["resident"]
    assert differing(read_atoms(tmp_path / "streamed"), read_atoms(tmp_path / "resident")) == []


def test_a_rank_moves_its_share(world, tmp_path):
    """Of what goes to and from the SSD; and what its list says, of which it exchanges the rest."""
    given: dict = {"steps": 2, "kind": "wide", "settle": True, "options": {"recomputed_fraction": 1.0}}
    alone = world.run(1, root=tmp_path / "one", **given)[0]
    said = world.run(2, root=tmp_path / "two", **given)
    for each in said:
        moved = {key: n for key, n in each["moved"][1].items() if n and "input" not in key}
        assert moved == each["listed"]
    for key in ("ssd_read load_state", "ssd_write store_state", "ssd_read load_params"):
        shares = [each["moved"][1][key] for each in said]
        assert all(0.4 * alone["moved"][1][key] < share < 0.6 * alone["moved"][1][key] for share in shares), (
            key
        )
    assert sum(each["moved"][1]["exchange gather_params"] for each in said) > 0


def test_a_rank_that_hangs_is_not_waited_for_longer_than_the_deadline(world, tmp_path):
    said = world.run(2, root=tmp_path, steps=3, hang=[1, 1], options={"deadline_seconds": 3.0})
    assert all(each["error"].startswith("RankFailed") for each in said), said


def test_a_commit_that_takes_longer_to_verify_than_the_deadline_is_waited_for(world, tmp_path):
    options = {"deadline_seconds": 2.0}
    world.run(2, root=tmp_path, steps=2, options=options)
    said = world.run(2, root=tmp_path, steps=3, options=options, slow_seconds=3.5)
    assert [each["resumed"] for each in said] == [2, 2]
    check(said, tmp_path, *plain([(3, 2, 1)]))


def test_a_commit_that_cannot_be_verified_ends_all_ranks(world, tmp_path):
    world.run(2, root=tmp_path, steps=2)
    for path in (tmp_path / "data").iterdir():
        if path.is_file():
            os.truncate(path, 100)
    said = world.run(2, root=tmp_path, steps=3)
    assert said[0]["error"].startswith("Damaged") and said[1]["error"].startswith(
        "RankFailed: rank 0 failed"
    ), said


def test_ranks_begin_with_the_values_of_the_first(world, tmp_path):
    said = world.run(2, root=tmp_path, steps=3, other_values=True)
    check(said, tmp_path, *plain([(3, 2, 1)]))


def test_buffers_are_those_of_the_first_rank(world, tmp_path):
    said = world.run(2, root=tmp_path, steps=3, micro_batches=2, kind="buffered")
    assert all(each["finished"] for each in said)
    for each in said:
        assert each["buffers"] == {"count": 6, "blocks.1.seen": [6.0, 6.0, 6.0]}
    assert int(read_atoms(tmp_path)["count/buffer"]) == 6


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"schedule": "horizontal"}, "schedule='horizontal' is of one process"),
        ({"host_budget": 1000}, "and its budget is 1000 B"),
        ({"clip_norm": -1.0}, "norm = -1.0 must be a positive number"),
    ],
)
def test_what_one_rank_is_refused_all_are_told_and_nothing_is_written(world, tmp_path, wrong, message):
    root = tmp_path / "run"
    said = world.run(2, root=root, steps=2, wrong={"1": wrong})
    assert message in said[1]["error"] and said[1]["error"].startswith(("BadInput", "DoesNotFit"))
    assert said[0]["error"].startswith("RankFailed: rank 1 failed") and message in said[0]["error"]
    assert not Path(root).exists()


def test_a_rank_that_leaves_while_another_goes_on_is_named(world, tmp_path):
    said = world.run(2, root=tmp_path, steps=3, leave_at=[1, 2])
    assert said[0]["error"].startswith("RankFailed: rank 1 calls close, and rank 0 step 3."), said[0]
    assert said[1]["error"] == "ValueError: an error of the script"


def test_what_one_rank_gives_wrong_is_refused_on_all_and_nothing_is_lost_by_it(world, tmp_path):
    """No list of micro-batches, another learning rate, and a parameter that it has edited, which is put back."""
    said = world.run(2, root=tmp_path, steps=5, refuse_at=[1, 1], faster_at=[1, 2], edit_at=[1, 3])
    first, second = (each["refused"] for each in said)
    assert second[0].startswith("the micro-batches are a dict, not a list of them")
    assert first[0].startswith("step 2 is not done on any rank, for what rank 1 is told: the micro-")
    for _, rates, edited in (first, second):
        assert "unlike hyper-parameters: param_groups[1]['lr'] is 0.012 on rank 1" in rates
        assert edited.startswith("parameter head.weight changed outside of engine.step")
    check(said, tmp_path, *plain([(5, 2, 1)]))


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize(
    "way", [{"budget": "auto"}, {"host_budget": 1 << 33, "optimizer_on_host": "auto"}], ids=str
)
def test_what_stays_is_chosen_for_all_ranks_alike(world, tmp_path, way):
    """By what fits, since nothing is measured; the numbers are the same."""
    said = world.run(2, root=tmp_path, steps=STEPS, sampled=True, options=way)
    check(said, tmp_path, *plain([(STEPS, 2, 1)]))
    kept = "100%" if "budget" in way else "0%"
    line = f"plan: {kept} of parameters, 100% of optimizer state, 100% of block inputs in host memory, by what fits"
    assert [each["planned"] for each in said] == [[line], []]


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"seed": 1}, "seed is 1 on rank 1 and 0 on rank 0"),
        ({"commit_every": 2}, "commit_every is 2 on rank 1 and 1 on rank 0"),
        ({"clip_norm": 1.0}, "clip_norm is 1.0 on rank 1 and 0.5 on rank 0"),
        ({"clipping": "speculate"}, "clipping is speculate on rank 1 and auto on rank 0"),
        ({"params_on_host": 0.5}, "params_on_host is 0.5 on rank 1 and None on rank 0"),
        ({"dtype": "bf16"}, "dtype is bf16 on rank 1 and fp32 on rank 0"),
    ],
    ids=str,
)
def test_unlike_arguments_are_refused_on_all_ranks_and_nothing_is_written(world, tmp_path, wrong, message):
    root = tmp_path / "run"
    said = world.run(2, root=root, steps=2, options={"clip_norm": 0.5}, wrong={"1": wrong})
    for each in said:
        assert each["error"].startswith(f"BadInput: the ranks have unlike arguments: {message}"), each
    assert not root.exists()


def test_an_unlike_model_is_refused_by_the_first_tensor_that_differs(world, tmp_path):
    said = world.run(2, root=tmp_path / "run", steps=2, kind_of={"1": "wide"})
    for each in said:
        assert "weight/param is ['F32', [64]] on rank 1 and ['F32', [16]] on rank 0" in each["error"], each


def test_ranks_that_would_begin_from_unlike_states_are_refused(world, tmp_path):
    world.run(1, root=tmp_path / "run", steps=3)
    said = world.run(
        2, root=tmp_path / "on", steps=5, sources=[f"{tmp_path / 'run'}@{step}" for step in (3, 2)]
    )
    for each in said:
        assert each["error"].startswith("BadInput: the ranks have unlike states to begin from: path is "), (
            each
        )
    assert not (tmp_path / "on").exists()


def test_the_ranks_of_a_machine_read_a_source_once_between_them(world, tmp_path):
    world.run(1, root=tmp_path / "run", steps=3, kind="wide")
    said = world.run(
        2, root=tmp_path / "on", steps=3, kind="wide", counted=True, sources=[str(tmp_path / "run")] * 2
    )
    first, second = (set(each["checked"]) for each in said)
    assert first and second and not first & second
    assert max(len(first), len(second)) <= 2 * min(len(first), len(second))
    atoms = read_atoms(tmp_path / "run")
    wanted = sum(tensor.nbytes for tensor in atoms.values())
    assert wanted <= sum(each["read"] for each in said) <= 1.01 * wanted
    assert differing(atoms, read_atoms(tmp_path / "on")) == []


def test_what_one_rank_finds_damaged_of_a_source_is_refused_on_all_and_nothing_is_written(world, tmp_path):
    world.run(1, root=tmp_path / "run", steps=1, kind="wide")
    for path in (tmp_path / "run" / "data").glob("blocks.1*"):
        flip(path, path.stat().st_size // 2)
    said = world.run(2, root=tmp_path / "on", steps=2, kind="wide", sources=[str(tmp_path / "run")] * 2)
    for each in said:
        assert each["error"].startswith("ChunkCorrupt") and "blocks.1" in each["error"], each
    assert not (tmp_path / "on").exists()


def test_a_place_in_the_data_that_is_each_ranks_own_is_not_taken_from_the_first(world, tmp_path):
    world.run(2, root=tmp_path / "run", steps=3, cursor=True)
    said = world.run(2, root=tmp_path / "run", steps=4, cursor=True)
    assert all(each["resumed"] == 3 and each["finished"] for each in said), said
    said = world.run(2, root=tmp_path / "on", steps=5, cursor=True, sources=[str(tmp_path / "run")] * 2)
    for each in said:
        assert (
            "RunMismatch: the place in the data that Cursor keeps is each rank's own: 2 ranks"
            in each["error"]
        )


def test_ranks_that_give_unlike_steps_are_told(world, tmp_path):
    said = world.run(2, root=tmp_path, steps=2, micro_batches=2, fewer_at=[1, 1])
    assert "rank 1 calls step 2 with 1 micro-batches, and rank 0 step 2 with 2" in said[0]["error"]
    assert said[1]["error"].startswith("RankFailed")


def test_a_checkpointer_begins_from_a_run_of_several_ranks(world, tmp_path):
    world.run(2, root=tmp_path / "run", steps=3, kind="wide")
    model = made("wide")
    optimizer = adamw(model)
    with holdfast.Checkpointer(tmp_path / "on", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume(source=holdfast.From(tmp_path / "run"))
        found = {f"{name}/param": p.detach() for name, p in model.named_parameters()}
    assert differing(read_atoms(tmp_path / "run"), found) == []


def test_the_command_line_reads_a_run_of_several_ranks_as_any_other(world, tmp_path, capsys, monkeypatch):
    world.run(2, root=tmp_path / "two", steps=3, kind="wide")
    world.run(1, root=tmp_path / "one", steps=3, micro_batches=2, kind="wide")

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["holdfast", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, capsys.readouterr().out

    assert call("verify", tmp_path / "two")[0] == 0
    assert call("show", f"{tmp_path / 'two'}@3")[0] == 0
    assert call("diff", tmp_path / "two", tmp_path / "one")[0] == 0
    code, _ = call("diff", f"{tmp_path / 'two'}@2", f"{tmp_path / 'two'}@3")
    assert code == 1
