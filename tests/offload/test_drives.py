"""A run over several drives: every bit that it has on one, each drive with its part of the bytes, and one run for
whoever reads it."""

from __future__ import annotations

import json
import os
import shutil
import time
from threading import Event

import pytest
import torch

import holdfast
from holdfast.errors import BadInput, DoesNotFit, RunMismatch
from holdfast.io.queue import DriveQueues, IOQueue, Request
from holdfast.measure import drive_rates
from holdfast.measure import drive_rates as probe
from holdfast.offload.setup import preflight
from holdfast.store.commit.pruning import prune
from holdfast.store.commit.retention import Keep
from holdfast.store.disk import Disk
from holdfast.store.run_store import LocalStore
from plain_loops import Task, check
from support.drive_rates import Rates
from support.grouped import grouped
from training import adamw, batches, decoder, differing, stored, warm_up

pytestmark = pytest.mark.filterwarnings("ignore:the drives .* are on one file system")


@pytest.fixture(autouse=True)
def rates(monkeypatch):
    rates = Rates()
    monkeypatch.setattr(drive_rates, "rate_of", rates.rate_of)
    return rates


def files_of(root):
    """The newest commit's files, by the directory in which they really are."""
    found: dict[str, list[str]] = {}
    for unit, ref in LocalStore.read(root).head().files.items():
        found.setdefault(os.path.basename((root / ref.path).resolve().parent), []).append(unit)
    return found


def train(root, steps, used=(), blocks=4, **options):
    """Take ``steps`` more steps; the losses."""
    model = decoder(blocks=blocks)
    model.blocks[2].mlp.up.weight.requires_grad_(False)
    optimizer = adamw(model)
    options = {"dtype": "fp32", "scheduler": warm_up(optimizer), **options}
    with holdfast.offload(model, optimizer, root, **grouped(drives=used, **options)) as engine:
        return [engine.step(batches(engine.steps_done, 2)) for _ in range(steps)]


# The bits


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit_with_any_other_list_of_drives(tmp_path, rates):
    whole = train(tmp_path / "whole", 9)
    root, one, two = tmp_path / "run", tmp_path / "one", tmp_path / "two"
    rates |= {"one": 2e9}
    losses = train(root, 1)
    for used, steps in ([one], 1), ([one], 1), ([two, one], 1), ([two], 2), ([], 2):
        losses += train(root, steps, used)
        LocalStore.read(root).verify(LocalStore.read(root).head())
    assert losses + train(root, 1) == whole
    assert differing(stored(root), stored(tmp_path / "whole")) == []
    assert list(files_of(root)) == ["data"]
    assert not list(one.iterdir()) and not list(two.iterdir()), "a drive that is left is left empty"
    assert not (root / "drives.json").exists() and not (root / "data" / "drive_1").is_symlink()
    assert len(list((root / "data").iterdir())) == len(list((tmp_path / "whole" / "data").iterdir()))


@pytest.mark.slow
def test_what_a_drive_had_goes_when_no_commit_names_it(tmp_path, rates):
    rates |= {"one": 1e12, "two": 1e15}
    train(tmp_path / "run", 2)
    for used, left in ([tmp_path / "one"], tmp_path / "run" / "data"), ([tmp_path / "two"], tmp_path / "one"):
        before = len(list(left.glob("*.safetensors")))
        train(tmp_path / "run", 1, used)
        assert len(list(left.glob("*.safetensors"))) < before
        train(tmp_path / "run", 2, used)
        assert not list(left.glob("*.safetensors"))


@pytest.mark.slow
def test_a_guess_is_undone_from_files_of_another_drive(tmp_path):
    options = {"clip_norm": 0.5, "clipping": "speculate"}
    whole = train(tmp_path / "whole", 4, **options)
    losses = train(tmp_path / "run", 2, [tmp_path / "one"], **options)
    assert losses + train(tmp_path / "run", 2, [tmp_path / "two"], **options) == whole


@pytest.mark.slow
def test_frozen_parameters_move_with_their_block(tmp_path, rates):
    rates["one"] = 1e12
    check(tmp_path / "run", Task(steps=2), drives=[tmp_path / "one"])
    assert sorted(files_of(tmp_path / "run")["one"])[2:4] == ["blocks.2", "blocks.2.frozen"]
    manifest = LocalStore.read(tmp_path / "run").head()
    assert len(manifest.files) == 6


@pytest.mark.slow
def test_frozen_parameters_move_there_and_back_while_earlier_commits_are_kept(tmp_path):
    whole = train(tmp_path / "whole", 4)
    losses = []
    for number, used in enumerate(([tmp_path / "one"], [], [tmp_path / "one"], [])):
        losses += train(tmp_path / "run", 1, used)
        with LocalStore.read(tmp_path / "run") as reader:
            assert all(reader.verify(reader.load(ref)) == [] for ref in reader.commits()), number
    assert losses == whole


# Where files are


@pytest.mark.slow
def test_each_drive_has_its_part_of_every_stretch_of_blocks(tmp_path, rates):
    """State kept in host memory moves as it is committed, and little else does: 1 to 2 to 1."""
    rates |= {"one": 2e9}
    options = {"params_on_host": 1.0, "optimizer_on_host": 1.0}
    root = tmp_path / "run"
    train(root, 1, [tmp_path / "one", tmp_path / "two"], blocks=12, sample=batches(0, 1)[0], **options)
    blocks = {unit: place for place, units in files_of(root).items() for unit in units if "blocks" in unit}
    order = [blocks[f"blocks.{k}"] for k in range(12)]
    for first in 0, 4, 8:
        assert sorted(order[first : first + 4]) == ["data", "one", "one", "two"], order


@pytest.mark.slow
def test_a_list_of_drives_is_measured_once_and_files_stay_where_they_are(tmp_path, rates):
    used = [tmp_path / "one", tmp_path / "two"]
    train(tmp_path / "run", 2, used)
    before, asked = files_of(tmp_path / "run"), rates.asked
    rates |= {"one": 1e12}
    train(tmp_path / "run", 2, used[::-1])
    assert (files_of(tmp_path / "run"), rates.asked, asked) == (before, 3, 3)


def test_measuring_a_drive_leaves_nothing_on_it(tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(drive_rates, "FILE_BYTES", probe.LEAST_BYTES)
    monkeypatch.setattr(drive_rates, "SECONDS", 0.1)
    assert drive_rates.rate_of(tmp_path / "not" / "there", (None, None, None)) > 1
    assert drive_rates.rate_of(tmp_path, (None, 500, None)) <= 1000
    assert drive_rates.rate_of(tmp_path, (None, None, 700)) <= 700
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rest", [0.0, 1.0])
def test_what_is_on_the_runs_own_drive_anyway_counts_as_its_part(tmp_path, rest):
    """Working copies and block inputs; with all of that in host memory, two equal drives have half of the state."""
    on_host = {f"{kind}_on_host": rest for kind in ("params", "optimizer", "activations")}
    train(tmp_path / "run", 1, [tmp_path / "one"], **on_host)
    first, second = json.loads((tmp_path / "run" / "drives.json").read_bytes())["drives"]
    assert first["share"] + second["share"] == pytest.approx(1)
    assert first["share"] == pytest.approx(0.5) if rest else first["share"] < 0.4


@pytest.mark.slow
def test_the_planner_knows_of_all_drives(tmp_path, rates):
    rates["one"] = 2e9
    taken = []
    for name, used in ("run", []), ("other", [tmp_path / "one"]):
        model = decoder()
        options = {"sample": batches(0, 1)[0], "micro_batches": 2, "budget": "auto", "say": str}
        with holdfast.offload(
            model, adamw(model), tmp_path / name, **grouped(drives=used, **options)
        ) as engine:
            prediction = engine.preflight.prediction
            machine = prediction.choice.simulation.machine
            taken.append((machine.ssd_read_bytes_per_second, machine.ssd_write_bytes_per_second))
            assert prediction.ssd_adjusted == bool(used), (
                "a profile is of one drive, and not corrected by several"
            )
    assert taken[1] == pytest.approx(tuple(3 * rate for rate in taken[0]))


# Speed


@pytest.mark.slow
def test_two_slow_drives_take_nearly_twice_what_one_takes(tmp_path):
    """Each takes 3 MiB a second, so that little else counts; a busy machine has three tries. The second drive has as
    much of the state as leaves both busy for the same time."""
    options = {
        "total_limit": 3 << 20, "blocks": 12, "width": 32, "params_on_host": 1.0, "optimizer_on_host": 0.0,
        "activations_on_host": 1.0,
    }  # fmt: skip
    ratios = []
    for number in range(3):
        one = seconds_of(tmp_path / f"one{number}", (), **options)
        two = seconds_of(tmp_path / f"two{number}", [tmp_path / f"drive{number}"], **options)
        ratios.append(one / two)
        if 1.6 < one / two < 2.3:
            return
    raise AssertionError(f"two drives take {ratios} of what one takes")


def seconds_of(root, used, blocks, width, **options):
    """Of three steps, all of which are durable at the end."""
    model = decoder(blocks=blocks, width=width, hidden=64)
    with holdfast.offload(
        model, adamw(model), root, **grouped(drives=used, dtype="fp32", **options)
    ) as engine:
        engine.step(batches(0, 1))
        engine.save()
        started = time.perf_counter()
        for step in 1, 2, 3:
            engine.step(batches(step, 1))
        engine.save()
        return time.perf_counter() - started


def test_the_traffic_of_all_drives_is_that_of_one(tmp_path):
    moved = []
    for name, used in ("one", ()), ("two", [tmp_path / "drive"]):
        model = decoder()
        with holdfast.offload(
            model, adamw(model), tmp_path / name, io=holdfast.IO(drives=used), precision="fp32"
        ) as engine:
            engine.step(batches(0, 2))
            engine.save()
            moved.append(engine._run.store.queue.counters())
    assert moved[0] == moved[1]


# One run for who reads it


@pytest.mark.slow
def test_whoever_reads_verifies_prunes_or_copies_the_run_need_not_know(tmp_path):
    root, drive = tmp_path / "run", tmp_path / "drive"
    train(root, 3, [drive], retain=3)
    reader = LocalStore.read(root)
    assert reader.verify(reader.head()) == []
    before = stored(root)
    shutil.copytree(root, tmp_path / "copy")  # follows links, as cp -rL does
    assert differing(stored(tmp_path / "copy"), before) == []
    files = len(written_on(drive))
    prune(root, Keep(last=1))
    assert [ref.step for ref in reader.commits()] == [3]
    assert len(written_on(drive)) == files // 2, "of two commits of three, and one file is free"
    assert differing(stored(root), before) == []
    assert train(tmp_path / "copy", 1) == train(root, 1, [drive])


def written_on(drive):
    return [path for path in drive.glob("*.safetensors") if "frozen" not in path.name]


@pytest.mark.slow
def test_damage_on_a_drive_is_found(tmp_path):
    train(tmp_path / "run", 2, [tmp_path / "drive"])
    reader = LocalStore.read(tmp_path / "run")
    path = next(ref.path for ref in reader.head().files.values() if "drive_1" in ref.path)
    with open(tmp_path / "run" / path, "r+b") as file:
        file.seek(5000)
        file.write(b"\xff\x00\xff")
    assert [error.path for error in reader.verify(reader.head())] == [path]


# What is refused, with nothing written


@pytest.mark.slow
def test_a_drive_that_is_not_there_is_named_with_the_way_out(tmp_path):
    root, drive = tmp_path / "run", tmp_path / "mnt" / "drive"
    losses = train(root, 2, [drive])
    (tmp_path / "mnt").rename(tmp_path / "unmounted")
    before = sorted(root.rglob("*"))
    for used in [drive], []:
        with pytest.raises(
            RunMismatch, match=rf"drive {drive}, which is not there. Mount its disk; .*drive_1 to"
        ):
            train(root, 1, used)
        with pytest.raises(RunMismatch, match="not there"):
            prune(root, Keep(last=1))
    drive.mkdir(parents=True)
    with pytest.raises(RunMismatch, match=r"does not say whose it is.* Is its disk mounted"):
        train(root, 1, [drive])
    assert not list(drive.iterdir()) and sorted(root.rglob("*")) == before
    reader = LocalStore.read(root)
    drive.rmdir()
    assert f"its drive {drive} is not there" in str(reader.verify(reader.head())[0])
    (tmp_path / "mnt").rmdir()
    (tmp_path / "unmounted").rename(tmp_path / "mnt")
    assert losses + train(root, 1, [drive]) == train(tmp_path / "whole", 3)


@pytest.mark.slow
def test_a_drive_that_is_mounted_elsewhere_is_found_by_its_link(tmp_path):
    root = tmp_path / "run"
    losses = train(root, 2, [tmp_path / "old"])
    (tmp_path / "old").rename(tmp_path / "new")
    (root / "data" / "drive_1").unlink()
    (root / "data" / "drive_1").symlink_to(tmp_path / "new")
    losses += train(root, 1, [tmp_path / "new"])
    root.rename(tmp_path / "moved")
    assert losses + train(tmp_path / "moved", 1, [tmp_path / "new"]) == train(tmp_path / "whole", 4)
    assert json.loads((tmp_path / "new" / "holdfast-drive.json").read_bytes())["run"] == str(
        tmp_path / "moved"
    )


@pytest.mark.slow
def test_drives_whose_mounts_are_swapped_are_refused_with_nothing_changed(tmp_path):
    """Without the right disks the newest commit would seem to lack its files, and they would be written over."""
    root, a, c = tmp_path / "run", tmp_path / "a", tmp_path / "c"

    def swap():
        a.rename(tmp_path / "other")
        c.rename(a)
        (tmp_path / "other").rename(c)

    train(root, 2)
    train(root, 1, [a, c])
    swap()
    for used in ([a, c], []):
        with pytest.raises(RunMismatch, match=r"mount the.* disks .*as they were, or turn the links"):
            train(root, 1, used)
    swap()
    assert list(LocalStore.read(root).verify(LocalStore.read(root).head())) == []
    train(root, 1, [a, c])
    assert LocalStore.read(root).head().step == 4


@pytest.mark.slow
@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("used", [["a"], []])
def test_a_link_that_is_gone_is_named(tmp_path, used):
    root, used = tmp_path / "run", [tmp_path / name for name in used]
    train(root, 2)
    train(root, 1, [tmp_path / "a"])
    link = root / "data" / "drive_1"
    link.unlink()
    with pytest.raises(RunMismatch):
        train(root, 1, used)
    link.symlink_to(tmp_path / "a")
    train(root, 1, used)
    assert LocalStore.read(root).head().step == 4


@pytest.mark.slow
def test_a_copy_of_the_run_does_not_write_to_its_drives(tmp_path):
    train(tmp_path / "run", 2, [tmp_path / "drive"])
    shutil.copytree(tmp_path / "run", tmp_path / "copy", symlinks=True)
    before = {path: path.read_bytes() for path in (tmp_path / "drive").iterdir()}
    for used in [tmp_path / "drive"], []:
        with pytest.raises(RunMismatch, match=r"is a drive of (another|the) run"):
            train(tmp_path / "copy", 1, used)
    assert before == {path: path.read_bytes() for path in (tmp_path / "drive").iterdir()}
    whole = train(tmp_path / "run", 1, [tmp_path / "drive"])
    assert len(whole) == 1


@pytest.mark.slow
def test_a_drive_of_a_run_whose_own_disk_is_not_mounted_is_not_written_over(tmp_path):
    train(tmp_path / "run", 2, [tmp_path / "drive"])
    (tmp_path / "run").rename(tmp_path / "unmounted")
    for name, text in ("run", "it has .* files in it, such as"), ("other", "is a drive of another run"):
        with pytest.raises(RunMismatch, match=text):
            train(tmp_path / name, 1, [tmp_path / "drive"])
        assert not (tmp_path / name).exists()


def test_a_directory_that_cannot_be_a_drive_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    root, before = tmp_path / "run", sorted(tmp_path.rglob("*"))
    for used, error, text in (
        ([root], BadInput, "one directory, or lie one in the other"),
        ([root / "more"], BadInput, "lie one in the other"),
        ([tmp_path], BadInput, "lie one in the other"),
        ([tmp_path / "a", tmp_path / "b" / ".." / "a"], BadInput, "one directory"),
        ([tmp_path / "a", tmp_path / "a" / "b"], BadInput, "lie one in the other"),
        ([tmp_path / "file"], BadInput, "is a file"),
        ([tmp_path / "file" / "x"], BadInput, "cannot be"),
        ([tmp_path / "full"], RunMismatch, "1 files in it, such as mine.txt"),
        (str(tmp_path / "a"), BadInput, "give a list"),
    ):
        with pytest.raises(error, match=text):
            train(root, 1, used)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.filterwarnings("default:the drives .* are on one file system")
def test_drives_of_one_file_system_are_warned_of(tmp_path):
    with pytest.warns(UserWarning, match=f"{tmp_path}/run and {tmp_path}/drive are on one file system"):
        train(tmp_path / "run", 1, [tmp_path / "drive"])


def test_too_little_space_on_one_drive_is_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "device_of", hash)  # as if they were different disks
    monkeypatch.setattr(
        preflight,
        "Disk",
        lambda directory: SmallDisk(directory) if directory.endswith("small") else Disk(directory),
    )
    with pytest.raises(DoesNotFit, match=rf"drive {tmp_path}/small needs .* and 4.0 KiB are free"):
        train(tmp_path / "run", 1, [tmp_path / "large", tmp_path / "small"])
    assert not list(tmp_path.iterdir())


def test_drives_are_of_the_file_system(tmp_path):
    with pytest.raises(BadInput, match="disk= is another"):
        train(tmp_path / "run", 1, [tmp_path / "one"], disk=Disk(tmp_path))
    assert not list(tmp_path.iterdir())


class SmallDisk(Disk):
    def free_bytes(self):
        return 4096


def test_a_start_that_is_given_up_leaves_the_drive_as_it_was(tmp_path):
    def init(module):
        raise ValueError("no values")

    (tmp_path / "drive").mkdir()
    with torch.device("meta"):
        model = decoder()
    with pytest.raises(ValueError, match="no values"):
        holdfast.offload(
            model,
            adamw(model),
            tmp_path / "run",
            io=holdfast.IO(drives=[tmp_path / "drive"]),
            precision="fp32",
            init=init,
        )
    assert not list((tmp_path / "drive").iterdir())
    assert not (tmp_path / "run" / "data" / "drive_1").is_symlink()
    assert not (tmp_path / "run" / "drives.json").exists()


# The queues


class Slow:
    """A file of a drive whose transfers wait for somebody."""

    def __init__(self, path, gate=None):
        self.path, self.gate = path, gate

    def read(self, view, offset):
        assert self.gate is None or self.gate.wait(10)

    write = read


def test_a_drive_that_hangs_holds_up_no_other(tmp_path):
    gate, view = Event(), memoryview(bytearray(4096))
    queues = DriveQueues([tmp_path / "drive_1"], threads=2)
    try:
        assert isinstance(queues, IOQueue)
        options = {"kind": "state", "phase": "test", "priority": 0}
        hung = [
            queues.submit([Request(Slow(tmp_path / "drive_1" / "x", gate), view, 0, write)], **options)
            for write in (False, True)
            for _ in range(3)
        ]
        for _ in range(4):
            queues.submit([Request(Slow(tmp_path / "y"), view, 0, True)], **options).result(10)
        assert queues.submit([], **options).result(10) is None
        assert not any(future.done() for future in hung)
        gate.set()
        for future in hung:
            future.result(10)
        assert queues.counters() == {
            ("read", "state", "test"): 3 * 4096,
            ("write", "state", "test"): 7 * 4096,
        }
    finally:
        gate.set()
        queues.close()
