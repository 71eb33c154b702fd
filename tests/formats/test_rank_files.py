"""The files of ranks with distributed tensors are one state, under whichever division; anything else is refused."""

from __future__ import annotations

import io
import pickle
import random
import re
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor, Partial

from combined import CAMPAIGN
from formats.rank_writers import (
    ACCELERATE,
    DIVISIONS,
    VERL,
    as_rank,
    fully_sharded,
    hybrid,
    save_divided,
)
from formats.test_saved import exact, go_on, state_of, tensors_of
from holdfast.checkpointer import Checkpointer
from holdfast.errors import BadInput, Damaged, FileMissing, HoldfastError
from holdfast.formats.foreign_formats import open_source
from holdfast.formats.load import check_all, refuse_unequal
from holdfast.formats.torch_archive import pickles
from holdfast.formats.torch_archive.distributed_tensors import local_tensor

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:beginning from .* it has no random numbers"
)


class Small(nn.Module):
    """Without a tensor whose rows every world divides, and with a buffer."""

    def __init__(self):
        super().__init__()
        self.embed, self.inner = nn.Embedding(7, 5), nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, tokens):
        return self.norm(self.inner(self.embed(tokens)))


def trained(seed=1, steps=2):
    torch.manual_seed(seed)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    go_on(model, optimizer, steps, seed)
    return model, optimizer


def by_kind(parts, names):
    """As accelerate keeps a state, by names, or as verl does, by numbers."""
    if names is VERL:
        return {"model": parts[0].state_dict(), "optimizer": parts[1].state_dict()}
    return dict(zip(("model", "optimizer"), get_state_dict(*parts), strict=True))


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("names", [ACCELERATE, VERL], ids=["accelerate", "verl"])
@pytest.mark.parametrize("division", DIVISIONS)
def test_files_of_ranks_are_one_state_again(tmp_path, division, names):
    there, here = trained(), trained(seed=2)
    world, divide = DIVISIONS[division]
    folder = save_divided(tmp_path / "ranks", by_kind(there, names), world, divide, names)
    if names is ACCELERATE:
        torch.save({"last_epoch": 2}, folder / "scheduler.bin")
    source = open_source(folder)
    assert source.format == "rank files" and source.progress["scheduler"]["last_epoch"] == 2
    with Checkpointer(tmp_path / "run", model=here[0], optimizer=here[1]) as checkpointer:
        checkpointer.resume(source=folder)
    assert state_of(here) == state_of(there)


def test_folders_of_dcp_for_model_and_optimizer_are_one_state(tmp_path):
    """As accelerate and its Trainer save an FSDP model otherwise."""
    there, here = trained(), trained(seed=2)
    state = by_kind(there, ACCELERATE)
    folder = tmp_path / "checkpoint-2"
    for kind, name in (("model", "pytorch_model_fsdp_0"), ("optimizer", "optimizer_0")):
        dcp.save({kind: state[kind]}, checkpoint_id=folder / name, no_dist=True)
    torch.save({"last_epoch": 2}, folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text('{"global_step": 2}')
    assert open_source(folder).progress["scheduler"] == {"last_epoch": 2}
    with Checkpointer(tmp_path / "run", model=here[0], optimizer=here[1]) as checkpointer:
        assert checkpointer.resume(source=folder) == 2
    assert state_of(here) == state_of(there)


def test_random_states_of_all_ranks_are_kept(tmp_path):
    folder = save_divided(tmp_path / "ranks", by_kind(trained(), VERL), 2, fully_sharded(2), VERL)
    states = open_source(folder).progress["extra"]["extra_state.rng"]
    assert len(states) == 2 and states[0] != states[1]


def test_a_file_of_one_rank_alone_is_refused(tmp_path):
    folder = save_divided(tmp_path / "ranks", by_kind(trained(), VERL), 2, fully_sharded(2), VERL)
    with pytest.raises(BadInput, match="as one of 2 ranks wrote it"):
        open_source(folder / "model_world_size_2_rank_0.pt")


def test_a_sum_that_was_not_formed_is_refused(tmp_path):
    with as_rank(0, 1):
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        torch.save({"w": DTensor.from_local(torch.ones(3), mesh, [Partial()])}, tmp_path / "a.pt")
    with pytest.raises(BadInput, match="placement Partial"):
        open_source(tmp_path / "a.pt")


def test_the_optimizer_of_the_first_fsdp_is_not_read(tmp_path):
    folder = save_divided(tmp_path / "ranks", by_kind(trained(), VERL), 2, fully_sharded(2), VERL)
    (folder / "fsdp_config.json").write_text('{"FSDP_version": 1, "world_size": 2}')
    source = open_source(folder)
    assert {each.atom.slot for each in source.atoms.values()} <= {"param", "buffer"}
    assert source.unread == tuple(f"optim_world_size_2_rank_{rank}.pt" for rank in range(2))


# Damage


@dataclass(frozen=True)
class Saved:
    """Two saves of one run, and one of another, each by ranks."""

    folder: Path
    earlier: Path
    other: Path
    state: object


@pytest.fixture(scope="module", params=["accelerate", "verl", "replicas"])
def saved(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    names = ACCELERATE if request.param == "accelerate" else VERL
    world, divide = (4, hybrid) if request.param == "replicas" else (3, fully_sharded(3))
    folders = [
        save_divided(root / name, by_kind(parts, names), world, divide, names)
        for name, parts in (
            ("now", trained()),
            ("earlier", trained(steps=1)),
            ("other", trained(seed=3, steps=4)),
        )
    ]
    return Saved(*folders, exact(tensors_of(open_source(folders[0]))))


def outcome(folder):
    """All of a folder, read as a resume reads it, or the error."""
    try:
        source = open_source(folder)
        check_all(source, range(len(source.parts)))
        refuse_unequal(source, source.atoms.values())
        return exact(tensors_of(source))
    except HoldfastError as error:
        return error


def exchanged(folder, one, other):
    data = (folder / one).read_bytes()
    (folder / one).write_bytes((folder / other).read_bytes())
    (folder / other).write_bytes(data)


def misnamed(saved, folder, draw):
    """Files that are whole, each in a wrong place; the states that they hold are other ones."""
    files = sorted(path.name for path in folder.iterdir())
    one, other = draw.sample(files, 2)
    kinds = {name.split("_")[0]: [n for n in files if n.startswith(name.split("_")[0])] for name in files}
    alike = draw.sample(draw.choice([names for kind, names in kinds.items() if kind != "extra"]), 2)
    optimizers = next(names for kind, names in kinds.items() if kind.startswith("opt"))
    models = next(names for kind, names in kinds.items() if kind in ("pytorch", "model"))
    return {
        "exchanged": lambda: exchanged(folder, *alike),
        "exchanged kinds": lambda: exchanged(folder, draw.choice(models), optimizers[0]),
        "twice": lambda: shutil.copy(folder / alike[0], folder / alike[1]),
        "missing": lambda: (folder / one).unlink(),
        "empty": lambda: (folder / other).write_bytes(b""),
        "earlier optimizer": lambda: shutil.copy(saved.earlier / optimizers[1], folder / optimizers[1]),
        "optimizer of another run": lambda: shutil.copy(saved.other / optimizers[0], folder / optimizers[0]),
        "a rank more": lambda: shutil.copy(folder / one, folder / re.sub(r"(rank_?)\d+", r"\g<1>9", one)),
    }  # fmt: skip


def damages(folder, draw):
    files = sorted(path for path in folder.iterdir() if path.stat().st_size)
    path = draw.choice(files)
    data = bytearray(path.read_bytes())
    if draw.random() < 0.4:
        return path, bytes(data[: draw.randrange(len(data))])
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return path, bytes(data)


@pytest.mark.slow
def test_damaged_and_misnamed_files_are_never_another_state(saved, tmp_path):
    """Refused, or, where a bit means nothing (padding, a date), the same state."""
    draw, refused, count = random.Random(7), 0, 70 if CAMPAIGN else 26
    for number in range(count):
        folder = tmp_path / str(number)
        shutil.copytree(saved.folder, folder)
        if number < (24 if CAMPAIGN else 8):
            ways = misnamed(saved, folder, draw)
            name = list(ways)[number % len(ways)]
            ways[name]()
            found = outcome(folder)
            assert isinstance(found, HoldfastError), name
        else:
            path, data = damages(folder, draw)
            path.write_bytes(data)
            found = outcome(folder)
            assert isinstance(found, HoldfastError) or (
                found == saved.state and len(data) == (saved.folder / path.name).stat().st_size
            ), path.name
        refused += isinstance(found, HoldfastError)
        shutil.rmtree(folder)
    assert refused > 0.7 * count


def test_another_number_of_ranks_in_the_names_is_refused(tmp_path):
    folder = save_divided(tmp_path / "ranks", by_kind(trained(), VERL), 2, fully_sharded(2), VERL)
    for path in sorted(folder.iterdir()):
        path.rename(folder / path.name.replace("size_2", "size_1"))
    (folder / "model_world_size_1_rank_1.pt").unlink()
    with pytest.raises(BadInput, match="of rank 1, and its name says that there are 1"):
        open_source(folder)
    (folder / "optim_world_size_1_rank_1.pt").unlink()
    (folder / "extra_state_world_size_1_rank_1.pt").unlink()
    with pytest.raises(FileMissing, match="one of 2 ranks"):
        open_source(folder)


def test_files_of_two_worlds_are_refused(tmp_path):
    parts = by_kind(trained(), VERL)
    for world in (2, 3):
        save_divided(tmp_path, parts, world, fully_sharded(world), VERL)
    with pytest.raises(BadInput, match="rank files of several saves, of 2 and 3 ranks"):
        open_source(tmp_path)


def test_files_of_fewer_ranks_than_wrote_them_are_refused(tmp_path):
    folder = save_divided(tmp_path, by_kind(trained(), ACCELERATE), 3, fully_sharded(3), ACCELERATE)
    for name in ACCELERATE.values():
        (folder / name.format(rank=2)).unlink()
    with pytest.raises(FileMissing, match="one of 3 ranks, and there are files of 2"):
        open_source(folder)


# Hostile pickles


class Call:
    """What calls ``function`` when torch unpickles it."""

    def __init__(self, function: Callable, *args: object) -> None:
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


def with_pickle(path, change):
    """Change the pickle of an archive, with its checksum."""
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    name = next(each for each in entries if each.endswith("data.pkl"))
    entries[name] = change(entries[name])
    with zipfile.ZipFile(path, "w") as archive:
        for each, data in entries.items():
            archive.writestr(each, data)


def test_a_hostile_pickle_beside_distributed_tensors_runs_nothing(tmp_path):
    folder = save_divided(tmp_path / "ranks", by_kind(trained(), VERL), 2, fully_sharded(2), VERL)
    mark = tmp_path / "mark"
    path = folder / "model_world_size_2_rank_1.pt"
    for call in (Call(Path.touch, mark), Call(exec, f"open({str(mark)!r}, 'w')"), Call(eval, "1")):
        with_pickle(path, lambda data, call=call: pickle.dumps(call, 2))
        with pytest.raises(Damaged, match=r"Nothing was executed|no pickle that can be read"):
            open_source(folder)
    assert not mark.exists()


def description(rank, world, divide):
    """A distributed tensor of torch's as the reader describes it, of one rank."""
    with as_rank(rank, world):
        mesh, placements = divide()
        tensor = torch.distributed.tensor.distribute_tensor(
            torch.ones(5, 2), mesh, placements, src_data_rank=None
        )
        file = io.BytesIO()
        torch.save({"w": tensor}, file)
    with zipfile.ZipFile(file) as archive:
        return pickles.load(archive.read("archive/data.pkl"), "a file")["w"]


@pytest.fixture
def described():
    return description(1, 2, fully_sharded(2))


def without_order(spec):
    """Before torch recorded in which order axes divide."""
    spec.fields.pop("shard_order", None)


def with_flat_layout(spec):
    """As torch 2.9 has a mesh."""
    without_order(spec)
    layout = spec.fields["mesh"].fields["_layout"]
    axes = layout.fields.pop("axes")
    layout.fields["shape"] = tuple(n for axis in axes for n in axis.get("shape"))
    layout.fields["stride"] = tuple(n for axis in axes for n in axis.get("stride"))


def with_tensor(spec):
    """As torch 2.8 and before has a mesh."""
    without_order(spec)
    mesh = spec.fields["mesh"].fields
    axes = mesh.pop("_layout").get("axes")
    shape = tuple(n for axis in axes for n in axis.get("shape"))
    strides = tuple(n for axis in axes for n in axis.get("stride"))
    mesh["mesh"] = pickles.Tensor(pickles.Storage("0", "I32", 4), 0, shape, strides)
    mesh["_flatten_mesh_list"] = mesh.pop("_flatten_rank_map")
    mesh.pop("_rank")


@pytest.mark.parametrize("older", [without_order, with_flat_layout, with_tensor])
@pytest.mark.parametrize("division", ["twice", "strided", "hybrid", "both dims"])
def test_descriptions_of_earlier_versions_of_torch_mean_the_same(division, older):
    world, divide = DIVISIONS[division]
    for rank in range(world):
        here = description(rank, world, divide)
        now = local_tensor(here, "w", {})
        older(here.fields["_spec"])
        assert local_tensor(here, "w", {}) == now and now.rank == rank


def test_a_description_says_its_region_and_rank(described):
    local = local_tensor(described, "w", {})
    assert (local.shape, local.held.start, local.held.stop) == ((5, 2), (3, 0), (5, 2))
    assert (local.rank, local.ranks, local.last) == (1, {0, 1}, 1)


HUGE = 1 << 40


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.fields.update(shape=(HUGE, HUGE)),
        lambda d: d.fields.update(shape=(5, 3)),
        lambda d: d.fields.update(shape=(-5, 2)),
        lambda d: d.fields.update(dtype="F64"),
        lambda d: d.fields.update(_local_tensor=None),
        lambda d: d.fields.update(_spec=None),
        lambda d: d.fields["_spec"].fields.update(mesh=None),
        lambda d: d.fields["_spec"].fields.update(placements=()),
        lambda d: d.fields["_spec"].fields["placements"][0].fields.update(dim=2),
        lambda d: d.fields["_spec"].fields["placements"][0].fields.update(dim=1),
        lambda d: d.fields["_spec"].fields["placements"][0].fields.update(dim=HUGE),
        lambda d: d.fields["_spec"].fields["mesh"].fields.update(_coordinate_on_dim=(0,)),
        lambda d: d.fields["_spec"].fields["mesh"].fields.update(_coordinate_on_dim=(2,)),
        lambda d: d.fields["_spec"].fields["mesh"].fields.update(_coordinate_on_dim=None),
        lambda d: d.fields["_spec"].fields["mesh"].fields.update(_flatten_rank_map=(1, 1)),
        lambda d: d.fields["_spec"].fields["mesh"].fields.update(_flatten_rank_map=(1, 0)),
        lambda d: d.fields["_spec"].fields["mesh"].fields.update(_flatten_rank_map=(1,)),
        lambda d: d.fields["_spec"].fields["mesh"].fields.update(_rank=0),
        lambda d: d.fields["_spec"].fields["mesh"].fields.update(_rank=7),
        lambda d: d.fields["_spec"].fields["mesh"].fields.update(_layout=None),
        lambda d: d.fields["_spec"].fields["mesh"].fields["_layout"].fields["axes"][0].fields.update(shape=(HUGE,)),
        lambda d: d.fields["_spec"].fields["mesh"].fields["_layout"].fields["axes"][0].fields.update(stride=()),
    ],
    ids=range(22),
)  # fmt: skip
def test_a_description_that_contradicts_itself_is_refused(described, change):
    change(described)
    with pytest.raises((ValueError, TypeError, AttributeError, IndexError)):
        local_tensor(described, "w", {})
