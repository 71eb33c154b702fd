"""A universal folder that is written counts when all of it is durable, and goes on with nothing but its own."""

from __future__ import annotations

import re

import pytest
import torch

from formats.deepspeed_files import random_state, write
from formats.test_deepspeed import bits, expected
from holdfast.errors import BadInput, DiskFull
from holdfast.formats import load
from holdfast.formats.deepspeed import deepspeed_writer as module
from holdfast.formats.deepspeed.deepspeed_writer import write_deepspeed
from holdfast.formats.foreign_formats import open_source
from holdfast.formats.memory_source import InMemory
from holdfast.formats.rules_source import UnderRules
from holdfast.formats.source import places_of
from holdfast.state.rules.rule_language import Rules
from holdfast.state.tensor_entries import TensorEntry

SHAPES = [{"a": (4, 4), "b": (5,), "c": (2, 3)}]


class PowerCuts(module.Disk):
    """What a power cut would take: a file that was not synced since it was written, a name whose directory was not.
    ``lost`` are those that something was made of that counts. A sync of ``left_out`` does nothing."""

    left_out = ""
    asked: list[str]
    lost: list[str]

    def __init__(self, root):
        super().__init__(root)
        self.unsynced, self.unnamed = set(), set()
        type(self).asked, type(self).lost = [], []

    def made(self, path, nbytes):
        self._is_new(path)
        return super().made(path, nbytes)

    def write_bytes(self, path, data):
        self._is_new(path)
        super().write_bytes(path, data)

    def _is_new(self, path):
        self.unsynced.add(path)
        self.unnamed.add(path)

    def mkdir(self, path):
        self.unnamed.add(path)
        super().mkdir(path)

    def sync(self, target, *, why):
        if self._is_done(f"{target}"):
            self.unsynced.discard(target)

    def sync_dir(self, path, *, why):
        if self._is_done(f"{path}/"):
            self.unnamed = {name for name in self.unnamed if name.rpartition("/")[0] != path}

    def _is_done(self, what):
        self.asked.append(what)
        return what != self.left_out

    def rename(self, src, dst):
        """What gets a name that counts has to be whole, and so has all else where that says that all is there."""
        inside = [n for n in self.unsynced | self.unnamed if n.startswith(f"{src}/")] + [
            n for n in self.unsynced if n == src
        ]
        self.lost += inside if dst != "latest_universal" else self.unsynced | (self.unnamed - {src})
        self.unsynced = {dst if name == src else name for name in self.unsynced}
        self.unnamed = {dst if name == src else name for name in self.unnamed}
        super().rename(src, dst)


@pytest.fixture
def source(tmp_path):
    write(tmp_path / "source", random_state(SHAPES), 1, 2)
    return open_source(tmp_path / "source")


def lost(source, folder, monkeypatch, left_out=""):
    """What a power cut might have taken of something that counted."""
    monkeypatch.setattr(load, "THREADS", 1)  # so that what is asked comes in one order
    monkeypatch.setattr(PowerCuts, "left_out", left_out)
    made = []

    def disk(root):
        made.append(PowerCuts(root))
        return made[-1]

    monkeypatch.setattr(module, "Disk", disk)
    write_deepspeed(source, folder, 1)
    [disk] = made
    return disk.lost + sorted(disk.unsynced | disk.unnamed)


def test_nothing_counts_that_a_power_cut_could_take(source, tmp_path, monkeypatch):
    assert lost(source, tmp_path / "out", monkeypatch) == []


def test_without_any_one_sync_a_power_cut_could_take_what_counts(source, tmp_path, monkeypatch):
    lost(source, tmp_path / "out", monkeypatch)
    every = sorted(set(PowerCuts.asked))
    assert (
        len(every) == 3 * 4 + 3 + 2 + 1 + 2 + 2
    )  # slots, folders, what is beside, the mark, folders above, latest
    for number, left_out in enumerate(every):
        assert lost(source, tmp_path / str(number), monkeypatch, left_out), left_out


def begun(source, folder):
    """A conversion that was interrupted when a parameter was written."""

    def stop(nbytes):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_deepspeed(source, folder, 1, report=stop)
    assert list(folder.rglob("fp32.pt")) and not (folder / "latest_universal").exists()


def test_a_source_that_was_written_again_is_another(source, tmp_path):
    begun(source, tmp_path / "out")
    other = random_state(SHAPES, seed=1)
    write(tmp_path / "other", other, 1, 2)
    for path in (tmp_path / "source/global_step7").iterdir():
        path.write_bytes((tmp_path / "other/global_step7" / path.name).read_bytes())
    again = open_source(tmp_path / "source")
    assert bits(again) == expected(other) and again.progress == source.progress
    with pytest.raises(BadInput, match="a part of another"):
        write_deepspeed(again, tmp_path / "out", 1)


ALL = "[[rule]]\nmatch = '.*'\n"


def under(source, text):
    return UnderRules(source, Rules.parse(f"version = 1\n{text}", "rules"))


def test_other_rules_of_equal_names_make_another(source, tmp_path):
    plain, turned = under(source, ALL), under(source, f"[[rule]]\nmatch = 'a'\ntranspose = true\n{ALL}")
    assert plain.atoms.keys() == turned.atoms.keys()
    begun(plain, tmp_path / "out")
    with pytest.raises(BadInput, match="a part of another"):
        write_deepspeed(turned, tmp_path / "out", 1)
    write_deepspeed(under(open_source(tmp_path / "source"), ALL), tmp_path / "out", 1)
    assert open_source(tmp_path / "out").writer == "DeepSpeed 0.19.8, or holdfast for it"
    assert bits(open_source(tmp_path / "out")) == bits(source)


def test_other_rules_inside_of_equal_names_make_another(tmp_path):
    """Of a folder with rules of its own, under rules from outside."""
    folder = tmp_path / "source"
    folder.mkdir()
    torch.save({"w": torch.arange(9.0).reshape(3, 3)}, folder / "a.pt")
    (folder / "rules.toml").write_text("version = 1\n[[files]]\nmatch = '.*'\n" + ALL)
    plain = under(open_source(folder), ALL)
    (folder / "rules.toml").write_text("version = 1\n[[files]]\nmatch = '.*'\n" + ALL + "transpose = true\n")
    turned = under(open_source(folder), ALL)
    assert places_of(plain.atoms.values()) == places_of(turned.atoms.values())
    assert plain.identity() != turned.identity()
    assert turned.identity() == under(open_source(folder), ALL).identity()


@pytest.mark.parametrize("slot", ["../../elsewhere", "a/b", "..", "fp32"])
def test_a_slot_that_no_file_can_be_called_is_refused_before_anything_is_written(tmp_path, slot):
    tensors = {key: torch.zeros(2, 3) for key in ("w/param", f"w/{slot}")}
    source = InMemory(
        "x",
        "holdfast",
        [(TensorEntry(*key.split("/", 1), (2, 3), "F32"), t) for key, t in tensors.items()],
        {"groups": [{"lr": 0.1}], "group_parameters": [["w"]]},
    )
    with pytest.raises(BadInput, match=f"w/{re.escape(slot)}: .* cannot be the name of a file"):
        write_deepspeed(source, tmp_path / "out", 1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("file", ["a.part/fp32.pt", "a.part/exp_avg.pt"])
def test_a_full_disk_is_named(source, tmp_path, file):
    """/dev/full has no room for anything."""
    out = tmp_path / "out"
    begun(source, out)
    folder = out / "global_step9/zero"
    name = file.partition(".")[0]
    for whole in folder.iterdir():
        whole.rename(tmp_path / whole.name)
    (folder / f"{name}.part").mkdir(exist_ok=True)
    (folder / file).unlink(missing_ok=True)
    (folder / file).symlink_to("/dev/full")
    with pytest.raises(DiskFull, match=rf"no space left in {folder}/a\.part: \d\d\d bytes .* are needed for"):
        write_deepspeed(source, out, 1)
    (folder / file).unlink()
    write_deepspeed(source, out, 1)
    assert bits(open_source(out)) == bits(source)


def test_partitions_are_checked_ahead_each_once(tmp_path, monkeypatch):
    """Of a source whose partitions are longer than what is read at once."""
    monkeypatch.setattr(module, "CHUNK", 16)
    write(tmp_path / "source", random_state(SHAPES), 3, 2)
    source, looked = open_source(tmp_path / "source"), []
    real = source.check
    monkeypatch.setattr(source, "check", lambda part: (looked.append(part), real(part))[1])
    jobs = module._jobs(
        source, module.Disk(tmp_path), "zero", [({}, ["a", "b", "c"])], module._slots(source), lambda _: None
    )
    first = [next(jobs) for _ in range(6)]
    for job in first:
        job()
    assert len(set(looked)) == len(looked) == 6 and source.checked >= set(looked)
    assert len(list(jobs)) == 3


def test_a_checkpoint_of_deepspeeds_that_came_under_the_name_since_is_left_alone(tmp_path, monkeypatch):
    write(tmp_path / "source", random_state(SHAPES), 1, 2)
    source, out = open_source(tmp_path / "source"), tmp_path / "out"

    def full(*_):
        raise DiskFull("no space left")

    with monkeypatch.context() as patch, pytest.raises(DiskFull):
        patch.setattr(module, "in_threads", full)
        write_deepspeed(source, out, 1)
    [tag] = [path for path in out.iterdir() if path.is_dir()]
    theirs = tag / "mp_rank_00_model_states.pt"
    theirs.write_bytes(b"of DeepSpeed")
    with pytest.raises(BadInput, match="holds a checkpoint already, or a part of another"):
        write_deepspeed(source, out, 1)
    assert theirs.read_bytes() == b"of DeepSpeed"
    theirs.unlink()
    write_deepspeed(source, out, 1)
    assert bits(open_source(out)) == bits(source)
