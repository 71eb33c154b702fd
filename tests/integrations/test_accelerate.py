"""A script with an ``Accelerator`` ends, after it was killed and started again, as one that was never interrupted."""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("accelerate")

from dist.habits import ACCELERATE, compare, ended, killed_it_ends_the_same
from dist.world import World


@pytest.fixture(scope="module")
def world():
    with World("accelerated") as world:
        yield world


@pytest.mark.slow
@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize("habit", ACCELERATE)
def test_killed_it_ends_the_same(world, tmp_path, habit):
    killed_it_ends_the_same(world, tmp_path, 1, ACCELERATE[habit])


@pytest.mark.slow
def test_killed_two_processes_end_the_same(world, tmp_path):
    """The other habits are in tests/crash."""
    killed_it_ends_the_same(world, tmp_path, 2, ACCELERATE["noise and accumulation"])


@pytest.mark.slow
def test_a_step_of_save_state_is_gone_back_to_by_load_state(world, tmp_path):
    said = ended(world.run(2, root=tmp_path / "run", save_at=8, keep_last=9))
    assert [each["saved"] for each in said] == [8] * 2
    rest = ended(world.run(2, root=tmp_path / "run", load=True))
    assert [each["resumed"] for each in rest] == [8] * 2
    compare(rest, ended(world.run_undisturbed(2, has_run=False)))


@pytest.mark.slow
def test_another_number_of_ranks_is_refused_by_name(world, tmp_path):
    ended(world.run(2, root=tmp_path / "run", passes=2))
    for others in (1, 3):
        [said, *_] = world.run(others, root=tmp_path / "run")
        assert (
            f"the run was trained by 2 ranks, and here are {others}. A step of the run has 6" in said["error"]
        )
        assert f"and here {3 * others} samples" in said["error"]
    rest = ended(world.run(2, root=tmp_path / "run"))
    compare(rest, ended(world.run_undisturbed(2, has_run=False)))


@pytest.mark.slow
def test_a_loader_that_counts_all_samples_goes_on_with_any_number_of_ranks(world, tmp_path):
    ended(world.run(2, root=tmp_path / "run", kind="holdfast", stop_at=5))
    for others, left in ((1, 13), (3, 5)):
        shutil.copytree(tmp_path / "run", tmp_path / str(others))
        [said, *_] = ended(world.run(others, root=tmp_path / str(others), kind="holdfast"))
        assert said["resumed"] == 5
        assert said["steps"] - 5 == left  # of 39 samples
        assert any("moved the schedule 2 times, once by each" in text for text in said["warnings"])


@pytest.mark.slow
def test_what_the_run_or_the_script_does_not_have_is_refused(world, tmp_path):
    """A place in other data, and a step of a folder after ``resume`` has gone to another."""
    ended(world.run(1, root=tmp_path / "run", passes=2, save_at=8))
    for changed, kind, text in (
        ({"batch": 4}, "RunMismatch", "a batch size of 3, now it is 4"),
        ({"samples": 22}, "RunMismatch", "a dataset of length 23, now it is 22"),
        (
            {"load": True, "resume_too": True},
            "",
            "resume() has brought the run to step 16, and load_state",
        ),
    ):
        [said] = world.run(1, root=tmp_path / "run", **changed)
        assert said["error"].startswith(kind) and text in said["error"]
    assert "Call one of them" in said["error"]


@pytest.mark.parametrize(
    "how, text",
    [
        ("a stream", "an IterableDataset is read one sample after the other"),
        ("dispatched", "prepare the loader with dispatch_batches=False"),
        ("two models", "has prepared 2 models"),
        ("an option", "optimizer= is the accelerator's"),
    ],
)
def test_what_cannot_be_resumed_is_refused_with_nothing_written(world, tmp_path, how, text):
    for said in world.run(2, root=tmp_path / "run", spoilt=how):
        assert said["error"].startswith("BadInput") and text in said["error"], said
    assert not (tmp_path / "run").exists()


def test_what_save_state_leaves_beside_the_weights_is_known(tmp_path):
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from holdfast.opening import source_of

    model = torch.nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    try:
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(model, optimizer, schedule)
        accelerator.save_state(str(tmp_path / "state"))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    source = source_of(str(tmp_path / "state"))
    assert source.unread == ("optimizer.bin", "random_states_0.pkl", "scheduler.bin")
    left = {each.name for each in (tmp_path / "state").iterdir()} - set(source.unread)
    assert left == {"model.safetensors"}


@pytest.mark.slow
def test_hooks_of_save_state_are_told(tmp_path):
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from holdfast.integrations.accelerate import AcceleratedCheckpointer

    def saves_an_average(models, weights, folder):
        """As scripts do with an average of the weights."""

    model = torch.nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(torch.zeros(8, 6))
    try:
        accelerator = Accelerator(cpu=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        accelerator.register_save_state_pre_hook(saves_an_average)
        with pytest.warns(UserWarning, match="saves_an_average of register_save_state_pre_hook"):
            AcceleratedCheckpointer(tmp_path / "run", accelerator, loader).close()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_a_loop_over_the_loader_itself_is_refused(tmp_path):
    """A place in it is not known, so that a resume would train on batches again."""
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from holdfast.errors import BadInput
    from holdfast.integrations.accelerate import AcceleratedCheckpointer

    model = torch.nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(torch.zeros(8, 6))
    try:
        accelerator = Accelerator(cpu=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        next(iter(loader))  # a look at a batch is no loop
        ckpt = AcceleratedCheckpointer(tmp_path / "run", accelerator, loader)
        next(iter(loader))
        ckpt.resume()
        for batch in ckpt.batches:
            accelerator.backward(model(batch).sum())
            optimizer.step()
            ckpt.step()
        ckpt.close()
        other = AcceleratedCheckpointer(tmp_path / "other", accelerator, loader)
        other.resume()
        for batch in loader:
            accelerator.backward(model(batch).sum())
            optimizer.step()
            with pytest.raises(BadInput, match="iterates over the loader itself"):
                other.step()
            break
        other.close(save=False)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    "by, more, text",
    [
        ("FSDP", {}, "set fsdp_version: 2"),
        (
            "DEEPSPEED",
            {},
            "trains by DEEPSPEED here.*holdfast.integrations.deepspeed saves and loads commits",
        ),
        (
            "FSDP",
            {"is_fsdp2": True, "parallelism_config": {"cp_enabled": True}},
            "context or sequence parallel",
        ),
        (
            "FSDP",
            {"is_fsdp2": True, "parallelism_config": {"tp_enabled": True}},
            "context or sequence parallel",
        ),
    ],
)
def test_what_lays_out_state_otherwise_is_refused_by_name(by, more, text):
    from types import SimpleNamespace

    from accelerate.utils import DistributedType

    from holdfast.errors import BadInput
    from holdfast.integrations.shared.changed_attributes import refuse_unless_torchs

    more = {**more, "parallelism_config": SimpleNamespace(**more.get("parallelism_config", {}))}
    with pytest.raises(BadInput, match=text):
        refuse_unless_torchs(SimpleNamespace(distributed_type=DistributedType(by), **more))
