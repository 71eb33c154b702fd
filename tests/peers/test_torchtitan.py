"""torchtitan's own Trainer saves into runs and goes on from them: as from its own folders, at any number of ranks."""

from __future__ import annotations

import shutil
from importlib.util import find_spec

import pytest
import torch
from typer.testing import CliRunner

from dist.world import World
from holdfast.cli.main import app
from holdfast.store.reader import RunReader

pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(180),
    pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not there (make test-peers)"),
]

STEPS = 6
OTHER_RANKS = ["--checkpoint.exclude_from_loading", "dataloader"]
"""The place in the data is of a number of ranks, torchtitan says."""


@pytest.fixture(scope="module")
def titan():
    """Train in a folder, and get what each rank said."""
    with World("titan") as world:

        def train(folder, *options, config="ours", ranks=2, steps=STEPS, **order):
            options = ["--dump_folder", folder, "--training.steps", steps, *options]
            return world.run(ranks, config=config, options=[str(option) for option in options], **order)

        yield train


@pytest.fixture(scope="module")
def never_ended(titan, tmp_path_factory):
    """A folder of torchtitan's own checkpoints after 2, 4 and 6 steps, and what is true at the end."""
    folder = tmp_path_factory.mktemp("theirs")
    return folder, titan(folder, config="theirs")


@pytest.fixture(scope="module")
def saved(titan, tmp_path_factory):
    """The same into a run."""
    folder = tmp_path_factory.mktemp("ours")
    return folder, titan(folder)


def run_of(folder):
    return folder / "checkpoint"


def steps_of(folder):
    return [ref.step for ref in RunReader(run_of(folder)).line()]


def ends_as(said, never_ended):
    for one, other in zip(said, never_ended[1], strict=True):
        assert "error" not in one, one
        assert (one["ended"], one["tokens"]) == (other["ended"], other["tokens"])
        assert one["last"] == other["last"]
    return True


def test_the_tools_find_in_a_commit_what_is_in_the_folder_of_torchtitan(saved, never_ended):
    run = CliRunner()
    assert ends_as(saved[1], never_ended)
    assert steps_of(saved[0]) == [6, 4, 2]
    for step in (2, 4, 6):
        ours, theirs = f"{run_of(saved[0])}@{step}", str(run_of(never_ended[0]) / f"step-{step}")
        assert "is whole" in run.invoke(app, ["verify", ours]).output
        same = run.invoke(app, ["diff", ours, theirs])
        assert same.exit_code == 0 and "bit for bit" in same.output, same.output
    shown = run.invoke(app, ["show", str(run_of(saved[0]))]).output
    assert "layers.0.attention.wo.weight" in shown and "exp_avg_sq" in shown and "of 2 ranks" in shown


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(
    ("rank", "point", "mode", "began"),
    [(1, "after_data_sync:2", "disabled", 2), (0, "after_manifest_sync:2", "async", 2),
     (0, "after_manifest_rename:2", "async", 4)],
)  # fmt: skip
def test_a_training_that_is_killed_in_a_save_goes_on_from_the_last_whole_commit(
    titan, never_ended, tmp_path, rank, point, mode, began
):
    options = ["--checkpoint.async_mode", mode]
    said = titan(tmp_path, *options, kill=(rank, point))
    assert said[rank]["code"] == -9 and not any("ended" in each for each in said), said
    said = titan(tmp_path, *options)
    assert all(each["loaded"] and each["began"] == began for each in said), said
    assert ends_as(said, never_ended)


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(
    ("ranks", "more"), [(1, []), (2, ["--parallelism.tensor_parallel_degree", 2]), (3, [])]
)
def test_other_ranks_go_on_as_from_torchtitans_own(titan, saved, never_ended, tmp_path, ranks, more):
    ends = []
    for config, source in (("ours", saved[0]), ("theirs", never_ended[0])):
        folder = tmp_path / config
        folder.mkdir()
        run_of(folder).symlink_to(run_of(source))
        said = titan(folder, "--checkpoint.load_step", 4, "--checkpoint.load_only", *OTHER_RANKS, *more,
                     config=config, ranks=ranks)  # fmt: skip
        assert all("error" not in each and each["began"] == 4 for each in said), said
        ends.append([(each["state"], each["last"]) for each in said])
    assert ends[0] == ends[1]


def test_as_many_checkpoints_stay_as_torchtitan_is_told(titan, tmp_path):
    for keep, kept in ((2, [6, 5]), (0, [6, 5, 4, 3, 2, 1])):
        folder = tmp_path / str(keep)
        titan(folder, "--checkpoint.interval", 1, "--checkpoint.keep_latest_k", keep)
        assert steps_of(folder) == kept


def test_after_going_back_the_newest_is_what_was_saved_since(titan, tmp_path):
    titan(tmp_path, "--checkpoint.interval", 1)
    said = titan(
        tmp_path, "--checkpoint.load_step", 2, "--checkpoint.interval", 3, kill=(0, "before_data_sync:2")
    )
    assert all(each["began"] == 2 for each in said)
    newest = RunReader(run_of(tmp_path)).line()[0]
    assert (newest.step, newest.timeline) == (3, 2)
    assert all(each["began"] == 3 for each in titan(tmp_path))


def test_damage_is_told_on_every_rank_before_a_parameter_changes(titan, tmp_path):
    titan(tmp_path, steps=4)
    [path] = (run_of(tmp_path) / "data").glob("save-000000000004.*.rank-00001.0.safetensors")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    for ranks in (1, 2):
        for each in titan(tmp_path, *OTHER_RANKS, ranks=ranks):
            assert path.name in each["error"] and "checksum" in each["error"], each
            assert each["untouched"]
    assert all(each["began"] == 2 for each in titan(tmp_path, "--checkpoint.load_step", 2))


def test_a_folder_of_torchtitans_own_checkpoints_is_gone_on_with(titan, never_ended, tmp_path):
    titan(tmp_path, "--checkpoint.interval", 1, config="theirs")
    for step in (4, 5, 6):
        (run_of(tmp_path) / f"step-{step}" / ".metadata").unlink()  # as if it had been killed
    said = titan(tmp_path, "--checkpoint.keep_latest_k", 2)
    assert all(each["began"] == 3 for each in said) and ends_as(said, never_ended)
    assert steps_of(tmp_path) == [6, 4]
    assert all(each["began"] == 6 for each in titan(tmp_path))
    assert all(each["began"] == 2 for each in titan(tmp_path, "--checkpoint.load_step", 2))


def test_what_ends_a_training_is_as_torchtitan_has_it_and_begins_another(titan, saved, never_ended, tmp_path):
    titan(tmp_path / "a", "--checkpoint.last_save_model_only")
    path = run_of(tmp_path / "a")
    said = titan(tmp_path / "b", "--checkpoint.initial_load_path", path, steps=1)
    weights = {
        key: value for key, value in saved[1][0]["last"].items() if not key.startswith(("optimizer", "lr_"))
    }
    assert all(weights.items() <= each["state"].items() and each["began"] == 0 for each in said), said
    titan(tmp_path / "c", "--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf")
    [exported] = run_of(tmp_path / "c").glob("step-6/*.safetensors")
    shown = CliRunner().invoke(app, ["show", str(exported)]).output
    assert "model.layers.0.self_attn.o_proj.weight" in shown
    assert steps_of(tmp_path / "c") == [4, 2]


def test_a_step_that_there_is_not_is_refused(titan, saved):
    for each in titan(saved[0], "--checkpoint.load_step", 3):
        assert "has no step 3. It has: 2, 4, 6" in each["error"], each


def test_a_place_that_is_no_directory_is_refused(titan, tmp_path):
    for each in titan(tmp_path, "--checkpoint.folder", "s3://bucket/run"):
        assert "is no directory" in each["error"], each


def test_every_step_is_recorded_and_a_killed_training_ends_the_same(titan, never_ended, tmp_path):
    said = titan(tmp_path, config="steps", kill=(1, "after_step_sealed:4"))
    assert said[1]["code"] == -9 and not any("ended" in each for each in said), said
    said = titan(tmp_path, config="steps")
    assert all(each["loaded"] and each["began"] == 3 for each in said), said
    assert ends_as(said, never_ended)
    newest = max((run_of(tmp_path) / "commits").iterdir())
    newest.write_bytes(
        newest.read_bytes().replace(b"step", b"stop", 1)
    )  # the one before it is continued from
    said = titan(tmp_path, "--checkpoint.load_step", 5, config="steps")
    assert all(each.get("began") == 5 for each in said), said


def test_a_node_lost_with_its_disk_is_replaced(titan, never_ended, tmp_path):
    """After another restart, at which the newest manifest of the other node could not be read."""
    folder = tmp_path / "node-RANK"
    said = titan(folder, config="nodes", kill=(1, "after_step_sealed:4"))
    assert said[1]["code"] == -9, said
    newest = max((run_of(tmp_path / "node-1") / "commits").iterdir())
    newest.write_bytes(newest.read_bytes().replace(b"step", b"stop", 1))
    said = titan(folder, config="nodes", kill=(0, "after_step_sealed:3"))
    assert said[0]["code"] == -9 and all(each["began"] == 3 for each in said), said
    shutil.rmtree(tmp_path / "node-0")
    said = titan(folder, config="nodes")
    assert all(each["loaded"] and each["began"] == 5 for each in said), said
    assert ends_as(said, never_ended)


@pytest.mark.campaign
@pytest.mark.parametrize("config", ["experts", "stages", "interleaved"])
def test_parts_of_a_model_continue_after_a_kill(titan, tmp_path, config):
    """A mixture of experts, and pipelines with one and with two parts on a rank."""
    whole = titan(tmp_path / "whole", config=config)
    said = titan(tmp_path / "cut", config=config, kill=(1, "after_step_sealed:4"))
    assert said[1]["code"] == -9, said
    said = titan(tmp_path / "cut", config=config)
    assert all(each["loaded"] and each["began"] == 3 for each in said), said
    assert ends_as(said, (tmp_path, whole))
    assert config == "experts" or said[0]["last"].keys() != said[1]["last"].keys()


def test_other_ranks_continue_after_the_newest_step(titan, tmp_path):
    """With as many samples in a step, and a loader that counts the samples of all ranks."""
    schedule = ["--lr_scheduler.total_steps", 8]
    titan(tmp_path / "whole", *schedule, config="shared", steps=8)
    begun = titan(tmp_path / "cut", *schedule, config="shared", steps=4)
    for ranks, steps in ((1, 5), (4, 8)):
        options = [*schedule, "--training.local_batch_size", 4 // ranks]
        said = titan(tmp_path / "cut", *options, config="shared", ranks=ranks, steps=steps)
        assert all("error" not in each and each["state"] == begun[0]["last"] for each in said), said
        begun = said
    expected, found = (torch.load(tmp_path / name / "weights-0.pt") for name in ("whole", "cut"))
    for name, tensor in expected.items():  # AdamW divides gradients near 0 by their own size
        assert (found[name] - tensor).norm() < 1e-3 * tensor.norm(), name


def test_a_run_of_steps_begins_at_torchtitans_own_checkpoint(titan, never_ended, tmp_path):
    """Its steps count, and the weights that torchtitan saves at the end are no checkpoint to continue from."""
    run_of(tmp_path).mkdir()
    (run_of(tmp_path) / "step-4").symlink_to(run_of(never_ended[0]) / "step-4")
    said = titan(tmp_path, "--checkpoint.last_save_model_only", config="steps")
    assert all(each["loaded"] and each["began"] == 4 for each in said), said
    assert ends_as(said, never_ended)
    weights = run_of(tmp_path) / "step-6"
    assert (weights / ".metadata").is_file()
    said = titan(tmp_path, "--checkpoint.load_step", 5, config="steps")
    assert all(each["began"] == 5 for each in said) and ends_as(said, never_ended)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--checkpoint.load_only"], "load_only=True records nothing"),
        (["--checkpoint.exclude_from_loading", "optimizer"], "a run is resumed as a whole"),
    ],
)
def test_options_that_a_run_of_steps_cannot_heed_are_refused(titan, tmp_path, options, text):
    [said] = titan(tmp_path, *options, config="steps", ranks=1)
    assert text in said["error"], said
    assert not run_of(tmp_path).exists()
