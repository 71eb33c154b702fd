"""dcp.save and dcp.load into runs of this library: at any world size what torch itself loads, or not at all."""

from __future__ import annotations

import datetime
import enum
import io
import json
import pickle
import shutil
import struct
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, LoadPlan
from torch.distributed.checkpoint.planner import SavePlanner
from torch.testing._internal.two_tensor import TwoTensor
from typer.testing import CliRunner

from dist.world import World
from formats.test_dcp import read
from holdfast.checkpointer import Checkpointer
from holdfast.cli.main import app
from holdfast.errors import BadInput, NoCommit, RunLocked
from holdfast.formats.dcp.dcp_reader import DcpFolder
from holdfast.formats.dcp.dcp_writer import write_dcp
from holdfast.formats.run_directory import CommitSource
from holdfast.integrations.dcp import PlanOfCommit, StorageReader, StorageWriter
from holdfast.state.layout.regions import Region
from holdfast.store.commit.pruning import prune
from holdfast.store.commit.retention import Keep
from holdfast.store.reader import RunReader
from killed import Killed

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated"
)

SOURCES = [("ddp", 2), ("fsdp1", 2), ("fsdp2", 4), ("fsdp2_tp", 4), ("hsdp", 4)]
TARGETS = [("ddp", 1), ("ddp", 2), ("fsdp2", 3), ("fsdp2", 2), ("fsdp2_tp", 4)]


@pytest.fixture(scope="module")
def world():
    with World("saving") as world:
        yield world


@pytest.fixture(scope="module")
def saved(world, tmp_path_factory):
    """What a world of a kind saved at once into a folder of torch's and a run of ours, and what its first rank said."""
    root, known = tmp_path_factory.mktemp("saved"), {}

    def get(kind, size):
        key = f"{kind}-{size}"
        if key not in known:
            places = {"theirs": root / key / "theirs", "ours": root / key / "ours"}
            said = world.run(size, job="save", kind=kind, **places)
            assert all(each.get("finished") and "error" not in each for each in said), said
            known[key] = places["theirs"], places["ours"], said[0]["digest"]
        return known[key]

    return get


def state(seed=0, **more):
    torch.manual_seed(seed)
    model = {
        "w": torch.randn(5, 3),
        "b": torch.randn(3).bfloat16(),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 2),
    }
    return {
        "model": model,
        "step": seed,
        "when": ("a", None, 2.5),
        "raw": b"\xff\0",
        "list": [1, {"x": torch.ones(2)}],
    } | more


def save(value, run, **options):
    dcp.save(value, storage_writer=StorageWriter(run, **options), no_dist=True)


def load(value, run, **options):
    dcp.load(value, storage_reader=StorageReader(run, **options), no_dist=True)
    return value


def cause_of(error):
    """What went wrong on the first rank."""
    return next(iter(error.value.failures.values()))[0]


PAIRS = [(source, TARGETS[(2 * i + k) % 5]) for i, source in enumerate(SOURCES) for k in (0, 3)]


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_what_any_world_saved_any_other_loads_as_torch_does(world, saved, source, target):
    kind, size = target
    theirs, ours, digest = saved(*source)
    for said in world.run(size, job="load", kind=kind, theirs=theirs, ours=ours):
        assert said.get("theirs") == said.get("ours") == digest, said


@pytest.mark.parametrize("source", SOURCES)
def test_a_run_and_a_folder_of_torch_are_the_same_source(saved, source):
    theirs, ours, _ = saved(*source)
    reader = RunReader(ours)
    commit, folder = CommitSource(reader, reader.head()), DcpFolder(theirs)
    assert read(commit) == read(folder)
    assert commit.progress == folder.progress


def test_each_rank_writes_its_own_file_and_nothing_twice(saved):
    manifest = RunReader(saved("fsdp2", 4)[1]).head()
    assert list(manifest.shares) == [f"rank-{rank:05d}" for rank in range(4)]
    assert [len(share.files) for share in manifest.shares.values()] == [1] * 4
    stored = [
        f for atom in RunReader(saved("fsdp2", 4)[1]).atoms(manifest).values() for f in atom["fragments"]
    ]
    assert all(
        Region.from_json(fragment["global"]).elements for fragment in stored
    )  # where a rank has nothing of some
    reader = RunReader(saved("ddp", 2)[1])
    assert all(len(atom["fragments"]) == 1 for atom in reader.atoms(reader.head()).values())


def test_nothing_in_a_run_is_a_pickle(saved):
    for path in (saved("fsdp2_tp", 4)[1]).rglob("*"):
        if path.suffix == ".safetensors":
            [length] = struct.unpack("<Q", path.read_bytes()[:8])
            json.loads(path.read_bytes()[8 : 8 + length])
        elif path.is_file() and path.stat().st_size:
            json.loads(path.read_bytes())


def test_the_tools_know_such_a_run(saved, tmp_path):
    run = CliRunner()
    ours = str(saved("fsdp2", 4)[1])
    shown = run.invoke(app, ["show", ours]).output
    assert "first.weight" in shown and "exp_avg_sq" in shown and "in 4 files" in shown
    assert "is whole" in run.invoke(app, ["verify", ours]).output
    same = run.invoke(app, ["diff", ours, str(saved("ddp", 2)[1])])
    assert same.exit_code == 0 and "bit for bit" in same.output, same.output
    save(state(1), tmp_path / "x")
    save(state(2), tmp_path / "x")
    differs = run.invoke(app, ["diff", f"{tmp_path / 'x'}@0", f"{tmp_path / 'x'}@1"])
    assert differs.exit_code == 1 and "w/param" in differs.output


@pytest.mark.slow
def test_a_save_in_the_background_is_a_commit_when_its_future_says_so(world, tmp_path):
    for kind, size in (("fsdp2", 2), ("ddp", 2)):
        run = tmp_path / kind
        said = world.run(size, job="save", kind=kind, ours=run, background=True)
        assert all(each.get("finished") and "error" not in each for each in said), said
        [loaded] = world.run(1, job="load", kind="ddp", ours=run)
        assert loaded.get("ours") == said[0]["digest"], loaded


def test_everything_comes_back_as_it_was(tmp_path):
    save(state(3), tmp_path / "run")
    loaded = load(state(4, raw=b"", when=()), tmp_path / "run")
    assert repr(loaded) == repr(state(3))


def test_tensors_that_cannot_be_read_into_are_copied(tmp_path, monkeypatch):
    from holdfast.integrations import dcp as module

    monkeypatch.setattr(module, "BATCH_BYTES", 20)
    save({"a": torch.arange(24.0).reshape(4, 6), "b": torch.arange(6.0)}, tmp_path / "run")
    target = {"a": torch.zeros(6, 4).T, "b": torch.zeros(6, dtype=torch.float64)}
    assert torch.equal(load(target, tmp_path / "run")["a"], torch.arange(24.0).reshape(4, 6))
    assert torch.equal(target["b"], torch.arange(6.0).double())


def test_parameters_that_require_grad_and_buffers_are_loaded_in_place(tmp_path):
    model, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    nn.init.normal_(other.weight)
    save({"m": other}, tmp_path / "run")
    load({"m": model}, tmp_path / "run")
    assert torch.equal(model.weight, other.weight)


# Steps and timelines


def steps_of(run):
    return [(ref.step, ref.timeline) for ref in RunReader(run).line()]


def test_saves_that_follow_one_another_are_steps_of_one_timeline(tmp_path):
    for number in range(4):
        save(state(number), tmp_path, keep=Keep(last=3))
    assert steps_of(tmp_path) == [(3, 1), (2, 1), (1, 1)]
    assert load(state(9), tmp_path)["step"] == 3 and load(state(9), tmp_path, step=1)["step"] == 1
    assert len(list((tmp_path / "data").iterdir())) == 3


def test_a_save_of_a_step_that_is_there_or_before_it_begins_another_timeline(tmp_path):
    for number, step in enumerate((10, 20, 30, 20, 25)):
        save(state(number), tmp_path, step=step, keep=Keep(last=5))
    assert steps_of(tmp_path) == [(25, 2), (20, 2), (20, 1), (10, 1)]
    assert load(state(9), tmp_path)["step"] == 4
    assert load(state(9), tmp_path, step=30, timeline=1)["step"] == 2
    with pytest.raises(dcp.api.CheckpointException) as error:
        load(state(9), tmp_path, step=30)
    assert isinstance(cause_of(error), NoCommit)
    with pytest.raises(dcp.api.CheckpointException) as error:
        save(state(), tmp_path, step=5)
    assert isinstance(cause_of(error), BadInput) and "begins with step 10" in str(cause_of(error))


def test_one_writer_makes_as_many_commits_as_it_is_asked_for(tmp_path):
    writer = StorageWriter(tmp_path)
    for number in range(3):
        dcp.save(state(number), storage_writer=writer, no_dist=True)
    dcp.save(state(7), checkpoint_id=tmp_path / "other", storage_writer=writer, no_dist=True)
    assert load(state(9), tmp_path)["step"] == 2 and load(state(9), tmp_path / "other")["step"] == 7


def test_a_run_that_a_checkpointer_wrote_is_neither_gone_on_with_nor_loaded(tmp_path):
    model = nn.Linear(2, 2)
    with Checkpointer(
        tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1)
    ) as checkpointer:
        checkpointer.resume()
    before = {
        path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"
    }
    with pytest.raises(dcp.api.CheckpointException, match=r"a run that dcp\.save did not write"):
        save(state(), tmp_path)
    assert {path: path.read_bytes() for path in before} == before
    with pytest.raises(dcp.api.CheckpointException, match=r"was not written by dcp\.save.*--to dcp"):
        load(state(), tmp_path)


def test_what_a_checkpointer_wrote_is_loaded_once_it_is_converted(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    with Checkpointer(tmp_path / "run", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
        optimizer.step()
        checkpointer.step()
        checkpointer.save()
    reader = RunReader(tmp_path / "run")
    write_dcp(CommitSource(reader, reader.head()), tmp_path / "out")
    names = dict(model.named_parameters())
    target = {
        "model": {name: torch.zeros_like(p.detach()) for name, p in names.items()},
        "optim": {"state": {name: {"exp_avg": torch.zeros_like(p.detach())} for name, p in names.items()},
                  "param_groups": [{"lr": 0.0, "params": []}]},
    }  # fmt: skip
    dcp.load(target, checkpoint_id=tmp_path / "out", no_dist=True)
    for name, parameter in names.items():
        assert torch.equal(target["model"][name], parameter)
        assert torch.equal(target["optim"]["state"][name]["exp_avg"], optimizer.state[parameter]["exp_avg"])
    assert target["optim"]["param_groups"] == [{"lr": 1e-3, "params": list(names)}]


class Phase(enum.Enum):
    """Of a training."""

    WARM = 1


VALUES = {
    "bytes": b"x", "texts": {"a", "b"}, "frozen": frozenset([1]), "complex": 1j, "slice": slice(1, None, 2),
    "date": datetime.datetime(2026, 1, 1, 12), "delta": datetime.timedelta(1), "member": Phase.WARM,
    "dtype": torch.bfloat16, "device": torch.device("cuda:1"), "size": torch.Size([2, 3]), "number": np.float32(0.1),
    "large": 1 << 80, "not a number": float("inf"), "queue": deque([1, 2], 5),
    "path": Path("a/b"), "array": np.arange(3)[::-1],
}  # fmt: skip


def test_values_come_back_with_their_types(tmp_path):
    """As torch itself gives them back, type by type."""
    save({"w": torch.ones(2), **VALUES}, tmp_path / "run")
    dcp.save({"w": torch.ones(2), **VALUES}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    ours, theirs = ({"w": torch.zeros(2), **dict.fromkeys(VALUES, "x")} for _ in range(2))
    load(ours, tmp_path / "run")
    dcp.load(theirs, checkpoint_id=tmp_path / "theirs", no_dist=True)
    for name, value in VALUES.items():
        assert type(ours[name]) is type(theirs[name]) is type(value), name
        assert np.array_equal(ours[name], value) if name == "array" else ours[name] == value, name


def test_a_file_in_memory_comes_back_at_its_place(tmp_path):
    """As torch's end-to-end tests keep the losses of a training."""
    data = io.BytesIO()
    torch.save([1.5, 0.5], data)
    save({"w": torch.ones(2), "losses": data}, tmp_path / "run")
    found = load({"w": torch.zeros(2), "losses": io.BytesIO()}, tmp_path / "run")["losses"]
    assert found.tell() == data.tell() and found.getvalue() == data.getvalue()
    found.seek(0)
    assert torch.load(found) == [1.5, 0.5]


def test_a_tensor_of_a_class_of_its_own_is_refused(tmp_path):
    """Whose bytes are not its values."""

    class Twice(TwoTensor):
        pass

    for name, odd in {
        "odd": Twice(torch.ones(2), torch.ones(2)),
        "empty": torch.ones(2, device="meta"),
    }.items():
        with pytest.raises(dcp.api.CheckpointException) as error:
            save({"w": torch.ones(2), name: odd}, tmp_path / "run")
        assert isinstance(cause_of(error), BadInput) and str(cause_of(error)).startswith(f"{name} is o")
    assert not (tmp_path / "run/commits").exists() or not steps_of(tmp_path / "run")


# Refusals


@pytest.mark.parametrize(
    ("value", "text"),
    [(object(), "odd holds a object, which cannot be stored by value"),
     (torch.ones(2, dtype=torch.complex128), r"odd is of torch\.complex128, which commits do not hold")],
)  # fmt: skip
def test_what_cannot_be_stored_by_value_is_refused_by_name_and_nothing_is_published(tmp_path, value, text):
    save(state(1), tmp_path)
    writer = StorageWriter(tmp_path)
    with pytest.raises(dcp.api.CheckpointException, match=text):
        dcp.save(state(2, odd=value), storage_writer=writer, no_dist=True)
    assert steps_of(tmp_path) == [(0, 1)]
    save(state(3), tmp_path)  # while the other writer is still there
    assert load(state(9), tmp_path)["step"] == 3


@pytest.mark.slow
def test_a_rank_that_has_what_cannot_be_stored_ends_the_save_of_all(world, tmp_path):
    world.run(2, job="save", kind="fsdp2", ours=tmp_path)
    said = world.run(2, job="save", kind="fsdp2", ours=tmp_path, unstorable=1, steps=[None, None])
    assert all("odd holds a function, which cannot be stored by value" in each["error"] for each in said), (
        said
    )
    assert len(steps_of(tmp_path)) == 1
    assert len(list((tmp_path / "data").iterdir())) >= 2


def test_ranks_that_do_not_share_the_directory_are_told_so(world, tmp_path):
    said = world.run(2, job="save", kind="ddp", ours=tmp_path / "run", elsewhere=1)
    assert all("rank 1 does not see in" in each["error"] and "share" in each["error"] for each in said), said
    assert not (tmp_path / "run" / "commits").exists() or not steps_of(tmp_path / "run")


def test_ranks_that_found_different_commits_do_not_load_a_mixture(tmp_path):
    plans = [PlanOfCommit([], commit=f"{tmp_path}@{step}") for step in (4, 5)]
    for each in (plans, [replace(plan, storage_data={"own": 1}) for plan in plans]):
        with pytest.raises(BadInput, match=r"different commits.*step="):
            StorageReader(tmp_path).prepare_global_plan(each)
    assert StorageReader(tmp_path).prepare_global_plan(plans[:1] * 2)


def test_plans_that_hide_their_commit_are_refused(tmp_path):
    """A planner that makes new plans is taken with a step alone, which is then the same on all ranks."""
    plans = [LoadPlan([]), LoadPlan([])]
    with pytest.raises(BadInput, match=r"do not say what commit.*step="):
        StorageReader(tmp_path).prepare_global_plan(plans)
    assert StorageReader(tmp_path, step=4).prepare_global_plan(plans) == plans


def test_a_timeline_without_a_step_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"timeline=1 without step="):
        StorageReader(tmp_path, timeline=1)


def test_planner_data_in_plans_is_kept(tmp_path):
    """A planner may put data of its own into a plan that is loaded."""

    class Own(DefaultLoadPlanner):
        def create_global_plan(self, plans):
            return [replace(plan, storage_data={"own": 1}) for plan in plans]

    saved, loaded = state(), state(1)
    dcp.save(saved, storage_writer=StorageWriter(tmp_path), no_dist=True)
    dcp.load(loaded, storage_reader=StorageReader(tmp_path), planner=Own(), no_dist=True)
    assert torch.equal(loaded["model"]["w"], saved["model"]["w"])


def test_saves_and_loads_have_identities(tmp_path):
    """Planners get the identity of a save, as from torch's own writer."""
    seen = []

    class Own(DefaultSavePlanner):
        def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
            seen.append(storage_meta)
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    writer, reader = StorageWriter(tmp_path), StorageReader(tmp_path)
    for _ in range(2):
        dcp.save(state(), checkpoint_id=tmp_path, storage_writer=writer, planner=Own(), no_dist=True)
    found = reader.read_metadata().storage_meta
    assert seen[0].save_id != seen[1].save_id == writer.save_id
    assert found.load_id == reader.load_id
    assert found.checkpoint_id == seen[1].checkpoint_id == str(tmp_path)


def test_a_save_without_collectives_of_one_rank_is_whole(tmp_path):
    saved, loaded = state(), state(1)
    dcp.save(saved, storage_writer=StorageWriter(tmp_path), no_dist=True, use_collectives=False)
    load(loaded, tmp_path)
    assert torch.equal(loaded["model"]["w"], saved["model"]["w"])


def test_a_save_without_collectives_of_several_ranks_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(BadInput, match="use_collectives=False saves each rank by itself"):
        StorageWriter(tmp_path).set_up_storage_writer(True, use_collectives=False)


class Caching(DefaultSavePlanner):
    def __init__(self):
        super().__init__(enable_plan_caching=True)


class CachingToo(Caching):
    pass


@pytest.fixture
def caches():
    """Those of torch's planners, which are of the process, empty before and after."""
    found = [getattr(DefaultSavePlanner, name) for name in vars(SavePlanner) if name.startswith("_cached")]
    assert found
    for each in found:
        each.clear()
    yield
    for each in found:
        each.clear()


def test_saves_with_cached_plans_have_steps_of_their_own(tmp_path, caches):
    for step in (3, 4, 9):
        writer = StorageWriter(tmp_path, step=step, keep=Keep(last=4))
        dcp.save(state(step), storage_writer=writer, no_dist=True, planner=Caching())
    writer = StorageWriter(tmp_path, keep=Keep(last=4))
    dcp.save(state(5, more=torch.ones(2)), storage_writer=writer, no_dist=True, planner=Caching())
    assert steps_of(tmp_path) == [(10, 1), (9, 1), (4, 1), (3, 1)]
    for step, seed in ((4, 4), (9, 9), (10, 5)):
        loaded = state(0, more=torch.zeros(2)) if step == 10 else state(0)
        dcp.load(loaded, storage_reader=StorageReader(tmp_path, step=step), no_dist=True)
        assert torch.equal(loaded["model"]["w"], state(seed)["model"]["w"])
        assert loaded["step"] == seed


def test_ranks_with_cached_plans_write_each_step_whole(world, tmp_path):
    said = world.run(2, job="save", kind="fsdp2", ours=tmp_path, steps=[3, 7, 8], keep=3, caching=True)
    assert all(each.get("finished") and "error" not in each for each in said), said
    assert steps_of(tmp_path) == [(8, 1), (7, 1), (3, 1)]
    for step in (3, 8):
        [loaded] = world.run(1, job="load", kind="ddp", ours=tmp_path, step=step)
        assert loaded["ours"] == said[0]["digest"]


def test_cached_plans_of_several_planners_are_refused(tmp_path, caches):
    for planner in (Caching(), CachingToo()):
        dcp.save(state(), storage_writer=StorageWriter(tmp_path), no_dist=True, planner=planner)
    with pytest.raises(dcp.api.CheckpointException, match="there are 2 caches"):
        dcp.save(state(), storage_writer=StorageWriter(tmp_path), no_dist=True, planner=Caching())
    assert len(steps_of(tmp_path)) == 2


@pytest.mark.parametrize("step", [-1, 2.0])
def test_a_step_that_no_commit_can_have_is_refused(tmp_path, step):
    with pytest.raises(BadInput, match="a number from 0 on"):
        StorageWriter(tmp_path, step=step)


def test_a_place_that_is_no_directory_or_none_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for place, text in ((tmp_path / "file", "is a file"), ("", "no directory was given")):
        with pytest.raises(dcp.api.CheckpointException, match=text):
            save(state(), place)
    for place in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(dcp.api.CheckpointException):
            load(state(), place)


def test_metadata_that_cannot_be_read_says_why_to_who_looks(tmp_path):
    with pytest.raises(NoCommit, match="nothing was saved there"):
        _ = StorageReader(tmp_path / "none").read_metadata().state_dict_metadata


def test_two_saves_into_one_run_at_once_are_refused(tmp_path):
    writer = StorageWriter(tmp_path)
    real = writer.write_data
    errors = []

    def write_data(*args):
        with pytest.raises(dcp.api.CheckpointException) as error:
            save(state(2), tmp_path)
        errors.append(cause_of(error))
        return real(*args)

    writer.write_data = write_data
    dcp.save(state(1), storage_writer=writer, no_dist=True)
    assert isinstance(errors[0], RunLocked)
    assert steps_of(tmp_path) == [(0, 1)]


# Damage and death


def data_of(run, rank=0):
    [path] = (run / "data").glob(f"*.rank-{rank:05d}.0.safetensors")
    return path


@pytest.fixture
def of_four(saved, tmp_path):
    """A run that four ranks saved, to be damaged."""
    return shutil.copytree(saved("fsdp2", 4)[1], tmp_path / "run")


@pytest.mark.slow
def test_a_flipped_bit_ends_the_load_on_every_rank_before_a_tensor_is_touched(world, of_four, tmp_path):
    path = data_of(tmp_path / "run", 2)
    data = bytearray(path.read_bytes())
    manifest = RunReader(tmp_path / "run").head()
    layout = RunReader(tmp_path / "run").layout(manifest.files[path.name.removesuffix(".0.safetensors")])
    data[layout.entries[0].offset] ^= 1
    path.write_bytes(data)
    for kind, size in (("fsdp2", 3), ("ddp", 1)):
        for each in world.run(size, job="load", kind=kind, ours=tmp_path / "run"):
            assert path.name in each["error"] and "@" in each["error"] and "checksum" in each["error"], each
            assert each["untouched"]


def test_damage_at_the_end_of_a_file_is_found_before_its_beginning_is_loaded(tmp_path):
    value = {name: torch.full((3, 500_000), float(i)) for i, name in enumerate("abc")}
    save(value, tmp_path)
    path = data_of(tmp_path)
    with open(path, "r+b") as file:
        file.seek(-8192, 2)
        file.write(b"\1")
    target = {name: torch.full((3, 500_000), 7.0) for name in value}
    with pytest.raises(dcp.api.CheckpointException, match=rf"'c/param@0,0' fails its checksum.*{path.name}"):
        load(target, tmp_path)
    assert all((tensor == 7).all() for tensor in target.values())


def test_a_file_of_a_rank_that_is_gone_or_cut_short_is_named(of_four):
    for rank in range(4):
        path = data_of(of_four, rank)
        whole = path.read_bytes()
        for damage in (lambda: path.write_bytes(whole[:-4096]), path.unlink):  # noqa: B023
            damage()
            with pytest.raises(dcp.api.CheckpointException, match=path.name):
                load({"step": 0}, of_four)
        path.write_bytes(whole)


def test_a_share_of_a_rank_that_is_gone_is_named(of_four):
    manifest = RunReader(of_four).head()
    for path in [
        *(ref["path"] for ref in manifest.index_refs),
        *(share.path for share in manifest.shares.values()),
    ]:
        data = (of_four / path).read_bytes()
        (of_four / path).unlink()
        with pytest.raises(dcp.api.CheckpointException, match=path):
            load({"step": 0}, of_four)
        (of_four / path).write_bytes(data)


@pytest.mark.slow
def test_a_rank_that_dies_leaves_the_commit_before_and_the_next_save_cleans_up(world, tmp_path):
    run = tmp_path / "run"
    first = world.run(2, job="save", kind="fsdp2", ours=run)
    files = set((run / "data").iterdir())
    said = world.run(2, job="save", kind="fsdp2", ours=run, kill=1)
    assert not any(each.get("finished") for each in said), said
    assert steps_of(run) == [(0, 1)] and set((run / "data").iterdir()) > files
    [loaded] = world.run(1, job="load", kind="ddp", ours=run)
    assert loaded["ours"] == first[0]["digest"]
    said = world.run(2, job="save", kind="fsdp2", ours=run, keep=1)
    assert all(each.get("finished") for each in said), said
    assert steps_of(run) == [(1, 1)] and len(list((run / "data").iterdir())) == 2


@pytest.mark.parametrize(
    "point",
    ["after_timeline_opened", "before_data_sync", "after_data_sync", "after_manifest_write", "after_manifest_sync",
     "after_manifest_rename", "after_directory_sync", "before_retire", "after_retire_unlink"],
)  # fmt: skip
def test_a_save_that_is_killed_anywhere_leaves_a_whole_commit(tmp_path, kill_at, point, monkeypatch):
    from holdfast import failpoints

    if point != "after_timeline_opened":
        save(state(1), tmp_path, keep=Keep(last=1))
    kill_at(point)
    with pytest.raises((Killed, dcp.api.CheckpointException)):
        save(state(2), tmp_path, keep=Keep(last=1))
    monkeypatch.setattr(failpoints, "armed", "")
    if point != "after_timeline_opened":
        done = point in (
            "after_manifest_rename",
            "after_directory_sync",
            "before_retire",
            "after_retire_unlink",
        )
        assert load(state(9), tmp_path)["step"] == (2 if done else 1)
    save(state(3), tmp_path, keep=Keep(last=1))
    loaded = load(state(9), tmp_path)
    assert repr(loaded) == repr(state(3))
    assert len(list((tmp_path / "data").iterdir())) == 1


@pytest.mark.parametrize("point", ["after_timeline_opened", "before_data_sync", "after_manifest_sync"])
def test_a_save_of_an_earlier_step_that_comes_to_no_end_leaves_the_run_where_it_was(
    tmp_path, kill_at, point, monkeypatch
):
    from holdfast import failpoints

    for number in range(4):
        save(state(number), tmp_path, keep=Keep(last=4))
    kill_at(point)
    with pytest.raises((Killed, dcp.api.CheckpointException)):
        save(state(7), tmp_path, step=1, keep=Keep(last=4))
    monkeypatch.setattr(failpoints, "armed", "")
    assert steps_of(tmp_path) == [(3, 1), (2, 1), (1, 1), (0, 1)]
    assert load(state(9), tmp_path)["step"] == 3
    with RunReader(tmp_path) as reader:
        assert reader.tip() == 1 and reader.line_and_damage()[1] == []
    save(state(4), tmp_path, keep=Keep(last=4))
    assert steps_of(tmp_path) == [(4, 3), (3, 1), (2, 1), (1, 1)]
    save(state(8), tmp_path, step=2, keep=Keep(last=4))
    assert steps_of(tmp_path)[:2] == [(2, 4), (2, 1)] and load(state(9), tmp_path)["step"] == 8


def test_a_save_that_is_refused_retires_nothing(tmp_path):
    for number in range(6):
        save(state(number), tmp_path, keep=Keep(last=6))
    before = steps_of(tmp_path)
    with pytest.raises(dcp.api.CheckpointException, match="cannot be stored by value"):
        save({"odd": object()}, tmp_path, step=2)
    assert steps_of(tmp_path) == before and len(before) == 6
    save(state(6), tmp_path, step=2)
    assert steps_of(tmp_path) == [(2, 3), (2, 1)]


def test_a_run_whose_only_commit_of_a_line_is_damaged_and_pruned_does_not_go_back_to_another_line(tmp_path):
    for step in (0, 1, 2, 3, 2):
        save(state(step), tmp_path, step=step, keep=Keep(last=4))
    path = tmp_path / RunReader(tmp_path).head().path
    path.write_text("{}")
    prune(tmp_path, Keep(last=4))
    assert not path.exists() and steps_of(tmp_path) == [(2, 1), (1, 1), (0, 1)]
    save(state(3), tmp_path, keep=Keep(last=4))
    assert steps_of(tmp_path)[0] == (3, 3) and load(state(9), tmp_path)["step"] == 3


def test_a_damaged_record_of_a_save_that_did_not_end_does_not_keep_others_from_saving(
    tmp_path, kill_at, monkeypatch
):
    from holdfast import failpoints

    for number in range(3):
        save(state(number), tmp_path, keep=Keep(last=4))
    kill_at("after_timeline_opened")
    with pytest.raises((Killed, dcp.api.CheckpointException)):
        save(state(7), tmp_path, step=1, keep=Keep(last=4))
    monkeypatch.setattr(failpoints, "armed", "")
    (tmp_path / "timelines" / "t0002.json").write_text("{}")
    save(state(3), tmp_path, keep=Keep(last=4))
    assert steps_of(tmp_path)[:2] == [(3, 3), (2, 1)] and load(state(9), tmp_path)["step"] == 3


def test_a_writer_can_be_sent_to_another_process(tmp_path):
    writer = pickle.loads(pickle.dumps(StorageWriter(tmp_path, step=4)))
    dcp.save(state(1), storage_writer=writer, no_dist=True)
    assert steps_of(tmp_path) == [(4, 1)]


def test_a_tensor_that_is_not_dense_is_refused_by_name_before_anything_is_made(tmp_path):
    with pytest.raises(dcp.api.CheckpointException) as error:
        save({"w": torch.ones(2), "eye": torch.eye(3).to_sparse()}, tmp_path / "run")
    assert isinstance(cause_of(error), BadInput)
    assert str(cause_of(error)).startswith("eye is torch.sparse_coo, and commits hold dense tensors")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_views_of_complex_numbers_are_saved_as_what_they_show(tmp_path):
    there = torch.randn(3, dtype=torch.complex64)
    save({"conjugate": there.conj(), "negative": there.conj().imag}, tmp_path / "run")
    here = load({"conjugate": torch.empty_like(there), "negative": torch.empty(3)}, tmp_path / "run")
    assert torch.equal(here["conjugate"], there.conj()) and torch.equal(here["negative"], -there.imag)
