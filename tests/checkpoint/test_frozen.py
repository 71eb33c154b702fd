"""Frozen parameters under a Checkpointer: written once, named again by later bases, and written again once changed."""

from __future__ import annotations

import json
import shutil
import warnings
from copy import deepcopy

import pytest
import torch
from torch import nn

from checkpoint.loops import manifests, same
from holdfast import Checkpointer, Keep
from holdfast.checkpoint.recovery.compaction import compact
from holdfast.checkpoint.snapshot import frozen_chunks, snapshot_writer
from holdfast.cli.inspect import ls, show, verify
from holdfast.errors import BadInput, PoolExhausted
from holdfast.store.commit.pruning import prune
from holdfast.store.pushing import Pusher
from holdfast.store.run_store import LocalStore

RANK = 2
HIDDEN = "changed in a way that nothing counts"


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter, as PEFT makes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(width, RANK, bias=False), nn.Linear(RANK, width, bias=False)
        nn.init.normal_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Loop:
    """A training of adapters, one step at a time."""

    def __init__(
        self, root, width: int = 200, seed: int = 0, known_frozen: bool | None = None, **options
    ) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(*[Adapted(width) for _ in range(4)])
        self.model.register_buffer("count", torch.zeros(()))
        self.width = width
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if known_frozen is not None:  # the optimizer has it all the time
            trained.append(self.model[3].base.weight.requires_grad_(not known_frozen))
        self.optimizer = torch.optim.AdamW(trained, lr=0.01)
        options = {"base_every": 3, "keep": Keep(2)} | options
        self.checkpointer = Checkpointer(root, model=self.model, optimizer=self.optimizer, **options)

    def __enter__(self) -> Loop:
        self.start = self.checkpointer.resume()
        return self

    def __exit__(self, *error) -> None:
        self.checkpointer.__exit__(*error)

    @property
    def writer(self):
        return self.checkpointer._backend.pace.bases

    def train(self, count: int) -> None:
        for _ in range(count):
            self.model(torch.randn(3, self.width)).pow(2).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            with torch.no_grad():
                self.model.count += 1
            self.checkpointer.step()
            self.checkpointer._backend.recorder.drain()

    def state(self):
        return deepcopy([dict(self.model.state_dict()), self.optimizer.state_dict()["state"]])


def frozen_files(manifest):
    return {name: file for name, file in manifest.files.items() if "frozen-" in name}


@pytest.fixture(params=["at once", "beside"])
def compared(request, monkeypatch):
    """Whether the training thread or the recorder's compares what is frozen."""
    if request.param == "beside":
        monkeypatch.setattr(frozen_chunks, "COMPARED_AT_ONCE", 0)
    return request.param


def test_later_bases_name_the_frozen_file_again(tmp_path, compared):
    with Loop(tmp_path) as loop:
        [first] = manifests(tmp_path)
        written = loop.writer.written_bytes
        loop.train(12)
        later = loop.writer.written_bytes - written
        state = loop.state()
    newest, *others = manifests(tmp_path)
    assert newest.step >= 9 and len(others) == 1
    assert [(f.path, f.checksums) for f in frozen_files(newest).values()] == [
        (f.path, f.checksums) for f in frozen_files(first).values()
    ]
    assert newest.step - newest.oldest_step <= 2  # no record is needed for the sake of what is frozen
    assert later < 3 * sum(f.bytes for f in frozen_files(first).values()) / 2  # three bases of the rest
    with LocalStore.read(tmp_path) as reader:
        assert reader.verify(newest) == []
    with Loop(tmp_path, seed=1) as again:
        assert again.start == 12 and same(again.state(), state)


def test_every_step_comes_back_after_the_process_is_gone(tmp_path, compared):
    with Loop(tmp_path / "run", base_every=4) as loop:
        states = {0: loop.state()}
        for step in range(1, 11):
            loop.train(1)
            states[step] = loop.state()
            shutil.copytree(tmp_path / "run", tmp_path / f"{step}")
    for step in (1, 5, 7, 10):
        with Loop(tmp_path / f"{step}", seed=1) as again:
            assert again.start == step and same(again.state(), states[step])


def test_a_resumed_process_names_the_file_again(tmp_path, compared):
    with Loop(tmp_path) as loop:
        loop.train(4)
    [file] = frozen_files(manifests(tmp_path)[0]).values()
    with Loop(tmp_path, seed=1) as again:
        before = again.writer.written_bytes
        again.train(8)
        state, written = again.state(), again.writer.written_bytes - before
    newest = manifests(tmp_path)[0]
    assert newest.step > 8 and [f.path for f in frozen_files(newest).values()] == [file.path]
    assert written < 2 * file.bytes
    with Loop(tmp_path, seed=2) as last:
        assert same(last.state(), state)


def hidden(parameter):
    parameter.data.mul_(2)


def by_numpy(parameter):
    parameter.detach().numpy()[...] += 1


def counted(parameter):
    with torch.no_grad():
        parameter.mul_(2)


def replaced(parameter):
    parameter.data = parameter.data * 2


@pytest.mark.parametrize("change", [hidden, by_numpy, counted, replaced])
def test_a_change_of_a_frozen_parameter_is_in_the_next_base(tmp_path, compared, change):
    with warnings.catch_warnings(record=True) as told, Loop(tmp_path) as loop:
        warnings.simplefilter("always")
        loop.train(4)
        change(loop.model[2].base.weight)
        loop.train(1)
        step = loop.checkpointer.steps_done
        loop.train(4)
        state, newest = loop.state(), loop.checkpointer._backend.base_step
        loop.checkpointer.wait()
    assert newest >= step and any(
        "2.base.weight" in text or HIDDEN in text for text in (str(each.message) for each in told)
    )
    with Loop(tmp_path, seed=1) as again:
        assert again.start == 9 and same(again.state(), state)


def test_save_has_a_hidden_change(tmp_path):
    with Loop(tmp_path, base_every=100) as loop:
        loop.train(4)
        hidden(loop.model[1].base.bias)
        with pytest.warns(UserWarning, match=HIDDEN):
            loop.checkpointer.save()
        state = loop.state()
    with Loop(tmp_path, seed=1) as again:
        assert again.start == 4 and same(again.state(), state)


def test_files_of_replaced_values_go_with_their_bases(tmp_path, compared):
    with Loop(tmp_path) as loop:
        for _ in range(6):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                counted(loop.model[0].base.weight)
                loop.train(4)
        state = loop.state()
    named = {f.path for m in manifests(tmp_path) for f in frozen_files(m).values()}
    there = {f"data/{path.name}" for path in (tmp_path / "data").iterdir() if "frozen-" in path.name}
    assert named <= there and len(there) <= 4  # two bases, one that is made, and the first file, which stays
    with Loop(tmp_path, seed=1) as again:
        assert same(again.state(), state)


@pytest.mark.parametrize("frozen_first", [True, False])
def test_parameters_are_frozen_and_unfrozen_in_the_middle(tmp_path, compared, frozen_first):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Loop(tmp_path, known_frozen=frozen_first) as loop:
            loop.train(5)
            loop.model[3].base.weight.requires_grad_(frozen_first)
            loop.train(7)
            state, newest = loop.state(), manifests(tmp_path)[0]
        with LocalStore.read(tmp_path) as reader:
            [where] = {f["unit"] for f in reader.atoms(newest)["3.base.weight/param"]["fragments"]}
        assert newest.step > 6 and ("frozen-" in where) is not frozen_first
        with Loop(tmp_path, seed=1, known_frozen=not frozen_first) as again:
            assert again.start == 12 and same(again.state(), state)


def test_a_snapshot_of_adapters_copies_and_writes_a_hundredth(tmp_path, monkeypatch):
    copied = []
    real = snapshot_writer.SnapshotWriter._buffer
    monkeypatch.setattr(
        snapshot_writer.SnapshotWriter, "_buffer", lambda self, n: (copied.append(n), real(self, n))[1]
    )
    with Loop(tmp_path, width=2500, base_every=2) as loop:
        first = loop.writer.written_bytes
        loop.train(5)
        later = loop.writer.written_bytes - first
    bases = -(-loop.checkpointer._backend.base_step // 2)
    assert bases >= 2 and later <= bases * first / 100 and sum(copied) <= later


def test_storage_counts_the_file_once(tmp_path):
    with Loop(tmp_path, storage="1.5MB") as loop:  # 0.7 MB frozen: three copies and the rest would not fit
        loop.train(12)
        assert loop.checkpointer._store.measure() <= 1_500_000
        assert loop.checkpointer._store.for_good_bytes == 0
    assert manifests(tmp_path)[0].step >= 9


def test_kept_for_good_counts_what_it_alone_names(tmp_path):
    with Loop(tmp_path, keep=Keep(1, every=3)) as loop:
        loop.train(14)
        alone = loop.checkpointer._store.for_good_bytes
        [file] = frozen_files(manifests(tmp_path)[0]).values()
        assert 0 < alone < file.bytes


@pytest.mark.parametrize("of_both", [True, False], ids=["in an optimizer", "in none"])
def test_compact_names_the_file_again(tmp_path, of_both):
    with Loop(tmp_path, base_every=100, known_frozen=True if of_both else None) as loop:
        loop.train(5)
        state = loop.state()
    before = {f.path for f in frozen_files(manifests(tmp_path)[0]).values()}
    compact(tmp_path, 4)
    [base] = manifests(tmp_path)
    assert base.step == 4 and {f.path for f in frozen_files(base).values()} == before
    assert {path.name for path in (tmp_path / "data").iterdir()} >= {
        path.rpartition("/")[2] for path in before
    }
    with Loop(tmp_path, seed=1, known_frozen=True if of_both else None) as again:
        assert again.start == 5 and same(again.state(), state)


@pytest.mark.filterwarnings("ignore:.*changed otherwise than by a step", "ignore:step . was not recorded")
def test_prune_counts_a_file_once(tmp_path):
    with Loop(tmp_path, base_every=2, keep=Keep(9)) as loop:
        loop.train(6)
        counted(loop.model[0].base.weight)  # the file of the bases before is named by none of the later ones
        loop.train(5)
        state = loop.state()
    bases = manifests(tmp_path)
    files = {f.path: f.bytes for m in bases for f in m.files.values()}
    there = sum(path.stat().st_size for path in (tmp_path / "data").iterdir())
    found = prune(tmp_path, Keep(1))
    kept = {f.path for f in manifests(tmp_path)[0].files.values()}
    gone = sum(nbytes for path, nbytes in files.items() if path not in kept)
    assert len(bases) > 3 and sum(each.bytes for each in found.going) == gone
    assert sum(path.stat().st_size for path in (tmp_path / "data").iterdir()) == there - gone
    assert any("frozen-" in path for path in kept) and any("frozen-" in path for path in files.keys() - kept)
    with Loop(tmp_path, seed=1) as again:
        assert again.start == 11 and same(again.state(), state)


def test_push_copies_the_file_once(tmp_path, bucket):
    with Loop(tmp_path / "run", base_every=2, keep=Keep(9)) as loop:
        loop.train(9)
    done: list[int] = []
    totals = set()
    Pusher(tmp_path / "run", bucket).push(lambda total, nbytes: (totals.add(total), done.append(nbytes)))
    assert len(manifests(tmp_path / "run")) > 3
    files = {f.path: f.bytes for m in manifests(tmp_path / "run") for f in m.files.values()}
    assert totals == {sum(files.values())} == {sum(done)}


def test_older_bases_are_named_by_nothing_and_resume(tmp_path, monkeypatch):
    """A run of a version that writes frozen parameters into every base."""
    monkeypatch.setattr(snapshot_writer, "frozen_in", lambda state: set())
    with Loop(tmp_path) as loop:
        loop.train(4)
        state = loop.state()
    assert not frozen_files(manifests(tmp_path)[0])
    monkeypatch.undo()
    with Loop(tmp_path, seed=1) as again:
        assert same(again.state(), state)
        again.train(8)
        state = again.state()
    assert frozen_files(manifests(tmp_path)[0])
    monkeypatch.setattr(snapshot_writer, "frozen_in", lambda state: set())  # and back
    with Loop(tmp_path, seed=2) as last:
        assert same(last.state(), state)
        last.train(8)
        state = last.state()
    assert not frozen_files(manifests(tmp_path)[0])
    assert not any("frozen-" in path.name for path in (tmp_path / "data").iterdir())
    with Loop(tmp_path, seed=3) as again:
        assert same(again.state(), state)


@pytest.mark.filterwarnings("ignore:frozen parameters")
def test_a_file_of_a_snapshot_that_was_given_up_is_named_by_the_next(tmp_path):
    with Loop(tmp_path, base_every=100) as loop:
        loop.train(3)
        hidden(loop.model[0].base.weight)
        loop.writer.begin()
        [frozen] = [unit for unit in loop.writer._units if unit.is_frozen]
        while frozen in loop.writer._left:
            loop.writer.write_next(3)
        loop.writer.give_up()
        loop.checkpointer._backend.recorder.do(frozen.files.trim)
        with pytest.raises(PoolExhausted):  # nobody may write to it meanwhile
            frozen.files.acquire()
        before = loop.writer.written_bytes
        loop.checkpointer.save()
        state, written = loop.state(), loop.writer.written_bytes - before
    [file] = frozen_files(manifests(tmp_path)[0]).values()
    assert file.path.endswith(".1.safetensors") and written < file.bytes
    with Loop(tmp_path, seed=1) as again:
        assert again.start == 3 and same(again.state(), state)


@pytest.mark.parametrize("kind", ["4 bit", "8 bit"])
def test_packed_weights_are_frozen_like_any_other(tmp_path, kind):
    """The layers of bitsandbytes; what is beside a packed weight is made by the script again."""
    bnb = pytest.importorskip("bitsandbytes")

    def made(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        weights = model[0].weight.detach().clone()
        model[0] = (
            bnb.nn.Linear4bit(64, 64, quant_type="nf4", compute_dtype=torch.float32)
            if kind == "4 bit"
            else bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False)
        )
        model[0].load_state_dict({"weight": weights, "bias": torch.zeros(64)})
        model[0].requires_grad_(False).to("cpu")
        return model, torch.optim.AdamW(model[1].parameters(), lr=0.01)

    model, optimizer = made(0)
    with Checkpointer(tmp_path, model=model, optimizer=optimizer, base_every=3) as checkpointer:
        checkpointer.resume()
        for _ in range(10):
            model(torch.randn(3, 64)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
            checkpointer._backend.recorder.drain()
    newest, other = manifests(tmp_path)
    assert frozen_files(newest) != {} and newest.step > 6
    assert [f.path for f in frozen_files(newest).values()] == [f.path for f in frozen_files(other).values()]
    with LocalStore.read(tmp_path) as reader:
        atom = reader.atoms(newest)["0.weight/param"]
    assert (atom["dtype"] in ("U8", "I8")) and "frozen-" in atom["fragments"][0]["unit"]
    again, its = made(0)
    with torch.no_grad():
        again[1].weight.zero_()
        again[0].weight.data.zero_()
    with Checkpointer(tmp_path, model=again, optimizer=its) as checkpointer:
        assert checkpointer.resume() == 10
        assert same(again[0].weight.data, model[0].weight.data) and same(again[1].weight, model[1].weight)


def test_a_fresh_run_begins_from_such_a_base(tmp_path):
    with Loop(tmp_path / "run", base_every=4) as loop:
        loop.train(4)
        state = loop.state()
        loop.checkpointer.save()
        loop.train(4)
    other = Loop(tmp_path / "other", seed=2)
    with other.checkpointer:
        other.checkpointer.resume(source=tmp_path / "run@4")
        assert same(other.state(), state)


def flip(path):
    """Damage a file in its middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_ls_and_show_count_the_file_once(tmp_path, capsys):
    with Loop(tmp_path) as loop:
        loop.train(9)
    bases, there = manifests(tmp_path), {}
    for manifest in bases:
        there |= {file.path: file.bytes for file in manifest.files.values()}
    ls(tmp_path, as_json=True)
    listed = json.loads(capsys.readouterr().out)
    assert sum(each["bytes"] - each.get("shared_bytes", 0) for each in listed) == sum(there.values())
    assert [each["step"] for each in listed if "shared_bytes" in each] == [bases[1].step]
    ls(tmp_path, as_json=False)
    assert "in files of another" in capsys.readouterr().out
    show(str(tmp_path), as_json=False)
    assert f"of that, with step {bases[1].step}" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["directory", "bucket"])
def test_damaged_file_is_put_back_from_a_copy_of_the_run(tmp_path, request, capsys, place):
    with Loop(tmp_path / "run") as loop:
        loop.train(9)
        state = loop.state()
    if place == "bucket":
        copy = request.getfixturevalue("bucket")
        Pusher(tmp_path / "run", copy).push()
    else:
        copy = shutil.copytree(tmp_path / "run", tmp_path / "copy")
    newest, other = manifests(tmp_path / "run")
    [file] = frozen_files(newest).values()
    flip(tmp_path / "run" / file.path)
    assert not verify(str(tmp_path / "run"), as_json=False)
    said = capsys.readouterr().out
    assert f"{file.path} is a file of the bases of step {other.step} as well" in said
    assert verify(str(tmp_path / "run"), as_json=False, repair_from=str(copy))
    assert f"{file.path} was replaced" in capsys.readouterr().out
    with Loop(tmp_path / "run", seed=1) as again:
        assert again.start == 9 and same(again.state(), state)


def test_damaged_copy_repairs_nothing(tmp_path, capsys):
    with Loop(tmp_path / "run") as loop:
        loop.train(1)
    flip(tmp_path / "run" / (path := next(iter(frozen_files(manifests(tmp_path / "run")[0]).values())).path))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    before = (tmp_path / "run" / path).read_bytes()
    assert not verify(str(tmp_path / "run"), as_json=False, repair_from=str(tmp_path / "copy"))
    assert "replaced" not in capsys.readouterr().out
    assert (tmp_path / "run" / path).read_bytes() == before
    assert not list((tmp_path / "run" / "data").glob("*.tmp"))
    with pytest.raises(BadInput, match="is the run itself"):
        verify(str(tmp_path / "run"), as_json=False, repair_from=str(tmp_path / "run"))
