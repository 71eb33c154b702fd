"""``convert``: from the command line, with what it says."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import holdfast as library
from holdfast.errors import BadInput, Damaged, RunLocked
from holdfast.formats.dcp import dcp_writer
from holdfast.formats.dcp.dcp_writer import write_dcp
from holdfast.formats.deepspeed.deepspeed_writer import write_deepspeed
from holdfast.formats.readers import huggingface
from holdfast.formats.readers.huggingface import write_huggingface, write_single
from holdfast.formats.restore import read_tensors
from holdfast.formats.run_directory import write_run
from holdfast.formats.torch_writer import write_torch
from holdfast.opening import source_of
from holdfast.state.layout.regions import Region
from holdfast.store.disk import Disk, alone_in

pytestmark = pytest.mark.filterwarnings("default:.*the folder gets no config.json")


@pytest.fixture
def trained(tmp_path):
    """A run of three steps in records, and its model."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with library.Checkpointer(tmp_path / "run", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
        for _ in range(3):
            model(torch.randn(2, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
    return tmp_path / "run", model


def as_they_are(folder):
    """Rules that leave each name as it is."""
    (folder / "same.toml").write_text("version = 1\n[[rule]]\nmatch = '(.*)'\n")
    return folder / "same.toml"


def test_the_newest_step_is_exported_with_what_was_left_out(trained, tmp_path, holdfast):
    run, model = trained
    result = holdfast(
        "convert", run, tmp_path / "hf", "--to", "huggingface", "--rules", as_they_are(tmp_path)
    )
    assert "gets no config.json" in result.err
    assert result.code == 0 and "2 tensors of" in result.out and "6 tensors of the optimizer" in result.out
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


def test_tensors_that_are_not_of_the_model_are_not_said_to_be_of_the_optimizer(tmp_path, holdfast):
    path = tmp_path / "a.pt"
    torch.save({"model": nn.Linear(6, 4).state_dict(), "noise": torch.zeros(1 << 19)}, path)
    result = holdfast(
        "convert", path, tmp_path / "hf", "--to", "huggingface", "--rules", as_they_are(tmp_path)
    )
    assert result.code == 0, result.err
    assert "parameters and buffers alone: 1 tensor of neither model nor optimizer\n" in result.out


def test_json_says_files_and_bytes(trained, tmp_path, holdfast):
    result = holdfast("convert", trained[0], tmp_path / "one.safetensors", "--to", "safetensors", "--json")
    found = json.loads(result.out)
    assert found["tensors"] == 8 and found["files"] == [str(tmp_path / "one.safetensors")]
    assert found["bytes"] == (tmp_path / "one.safetensors").stat().st_size
    assert holdfast("diff", trained[0], tmp_path / "one.safetensors").code == 0


@pytest.mark.parametrize("to", ["holdfast", "dcp"])
def test_there_and_back_every_tensor_is_the_same(trained, tmp_path, holdfast, to):
    assert holdfast("convert", trained[0], tmp_path / "a", "--to", to).code == 0
    assert holdfast("convert", tmp_path / "a", tmp_path / "b", "--to", "holdfast").code == 0
    assert holdfast("verify", tmp_path / "b").code == 0
    assert holdfast("diff", trained[0], tmp_path / "b").code == 0


def test_rules_give_other_names(trained, tmp_path, holdfast):
    (tmp_path / "rules.toml").write_text("version = 1\n[[rule]]\nmatch = '(.*)'\nrename = 'inner.{$1}'\n")
    result = holdfast(
        "convert", trained[0], tmp_path / "hf", "--to", "huggingface", "--rules", tmp_path / "rules.toml"
    )
    assert result.code == 0, result.err
    assert sorted(load_file(tmp_path / "hf" / "model.safetensors")) == ["inner.bias", "inner.weight"]


def test_copies_that_differ_are_told_before_a_folder_loses_them(tmp_path, holdfast):
    pytest.importorskip("transformers")
    from tiny_folders import llama, write_folder

    (tmp_path / "ranks").mkdir()
    for rank in range(2):
        torch.save({"w": torch.full((2,), 1.0 * rank)}, tmp_path / f"ranks/{rank}.pt")
    text = "version = 1\nmesh = {tp = 2}\naxes = {tp = 'replicate'}\nfiles = {match = '(?P<tp>\\d+)[.]pt'}\n"
    (tmp_path / "ranks/rules.toml").write_text(text + "[[rule]]\nmatch = 'w'\n")
    folder = write_folder(tmp_path / "folder", llama)
    result = holdfast(
        "convert", tmp_path / "ranks", tmp_path / "out", "--to", "huggingface", "--model", folder
    )
    assert result.code == 1 and "the copies of w/param differ" in result.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--to", "onnx"], "--to onnx is not one of"),
        (["--to", "holdfast", "--dtype", "bf16"], "--dtype is for exports"),
        (["--to", "huggingface", "--dtype", "int3"], "--dtype int3 is not one of"),
        (["--to", "safetensors"], "does not end in .safetensors"),
        (["--to", "huggingface", "--file-size", "soon"], "--file-size: 'soon' is not a number of bytes"),
        (["--to", "deepspeed"], "needs --stage"),
        (["--to", "huggingface", "--rules", "nothing"], "nothing"),
    ],
)
def test_what_cannot_be_is_one_line_with_nothing_written(trained, tmp_path, holdfast, arguments, text):
    result = holdfast("convert", trained[0], tmp_path / "out", *arguments)
    assert result.code == 2 and text in result.err and result.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_destination_that_holds_a_run_is_refused(trained, holdfast):
    result = holdfast("convert", trained[0], trained[0], "--to", "holdfast")
    assert result.code == 2 and "holds a run already" in result.err


WRITERS = {
    "dcp": write_dcp,
    "huggingface": write_huggingface,
    "safetensors": write_single,
    "torch": write_torch,
    "deepspeed": lambda source, path, report: write_deepspeed(source, path, 1, report=report),
}


@pytest.mark.parametrize("to", WRITERS)
def test_a_second_conversion_into_one_destination_is_refused_while_the_first_writes(
    trained, tmp_path, holdfast, to
):
    run, model = trained
    out, errors = tmp_path / ("out.pt" if to == "torch" else "out.safetensors"), []

    def told(nbytes):
        try:
            WRITERS[to](source_of(str(run)), out, report=lambda _: None)
        except RunLocked as error:
            errors.append(str(error))

    WRITERS[to](source_of(str(run)), out, report=told)
    assert errors == [
        f"{out} is being written by another conversion. Wait for it or stop it, or give another place."
    ] * len(errors)
    assert errors and holdfast("verify", out).code == 0
    again = source_of(str(out))
    for name, value in model.state_dict().items():
        [found] = read_tensors(again, [(again.atoms[f"{name}/param"], Region.whole(value.shape))])
        assert torch.equal(found, value)


def test_two_conversions_may_write_two_files_of_one_folder(trained, tmp_path, holdfast):
    codes = []

    def told(nbytes):
        out = tmp_path / f"{len(codes)}.safetensors"
        codes.append(holdfast("convert", trained[0], out, "--to", "safetensors").code)

    write_single(source_of(str(trained[0])), tmp_path / "out.safetensors", report=told)
    assert codes and not any(codes)


@pytest.mark.parametrize("itself", [False, True])
def test_a_single_file_takes_the_place_of_no_other(trained, tmp_path, holdfast, itself):
    first = tmp_path / "a.safetensors"
    assert holdfast("convert", trained[0], first, "--to", "safetensors").code == 0
    before = first.read_bytes()
    source = first if itself else trained[0]
    result = holdfast("convert", source, first, "--to", "safetensors", "--dtype", "bf16")
    assert result.code == 2 and "is there already" in result.err
    assert first.read_bytes() == before and [*tmp_path.glob("*.safetensors*")] == [first]


def test_a_single_file_that_was_made_meanwhile_stays(trained, tmp_path):
    out = tmp_path / "out.safetensors"
    file = huggingface.written_durably

    @contextmanager
    def late(*args, **kwargs):
        out.write_bytes(b"theirs")
        with file(*args, **kwargs) as opened:
            yield opened

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface, "written_durably", late)
        with pytest.raises(BadInput, match="is there already"):
            write_single(source_of(str(trained[0])), out)
    assert out.read_bytes() == b"theirs"


def test_what_only_ends_as_metadata_does_is_no_checkpoint(trained, tmp_path, holdfast):
    out = tmp_path / "out"
    out.mkdir()
    (out / "my.metadata").write_bytes(b"theirs")
    assert holdfast("convert", trained[0], out, "--to", "dcp").code == 0
    assert (out / "my.metadata").read_bytes() == b"theirs" and (out / ".metadata").exists()


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EACCES, errno.EINVAL, errno.EBADF, errno.ENOTSUP])
def test_a_lock_that_is_held_is_told_from_one_that_cannot_be(tmp_path, monkeypatch, number):
    """Which file systems say by different numbers."""

    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    if number in (errno.EAGAIN, errno.EACCES):
        with pytest.raises(RunLocked), alone_in(Disk(tmp_path)):
            pass
    else:
        with alone_in(Disk(tmp_path)):
            pass


@pytest.mark.parametrize("name", ["__0_0.distcp", "__3_1.distcp", "__0.metadata", ".metadata"])
def test_a_part_of_a_checkpoint_is_not_written_over(trained, tmp_path, holdfast, name):
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_bytes(b"precious")
    result = holdfast("convert", trained[0], out, "--to", "dcp")
    assert result.code == 2 and f"has a checkpoint already, or a part of one: {name}" in result.err
    assert [(path.name, path.read_bytes()) for path in out.iterdir()] == [(name, b"precious")]


def test_a_dcp_conversion_that_ended_before_its_metadata_is_done_again(trained, tmp_path, holdfast):
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(dcp_writer._Writing, "metadata", Mock(side_effect=KeyboardInterrupt))
        write_dcp(source_of(str(trained[0])), out)
    assert (out / "__0_0.distcp").exists() and not (out / ".metadata").exists()
    assert holdfast("convert", trained[0], out, "--to", "dcp").code == 0
    assert holdfast("diff", trained[0], out).code == 0
    assert sorted(path.name for path in out.iterdir()) == [".metadata", "__0_0.distcp"]


def test_no_run_is_written_into_what_another_library_wrote(trained, tmp_path, holdfast):
    out = tmp_path / "out"
    write_huggingface(source_of(str(trained[0])), out)
    result = holdfast("convert", trained[0], out, "--to", "holdfast")
    assert result.code == 2 and "holds safetensors; name a directory that is not there" in result.err
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("to", [*WRITERS, "holdfast"])
def test_a_source_that_is_written_again_meanwhile_is_made_into_nothing(tmp_path, holdfast, to):
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
    for number, path in enumerate(paths):
        model = nn.Linear(6, 4)
        nn.init.constant_(model.weight, number)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        os.utime(path, (number, number))  # files this small may have been written at one time
    assert paths[0].stat().st_size == paths[1].stat().st_size
    out = tmp_path / ("out.pt" if to == "torch" else "out.safetensors")

    def told(nbytes):
        if paths[1].exists():
            paths[1].rename(paths[0])

    write = {**WRITERS, "holdfast": write_run}[to]
    with pytest.raises(Damaged, match=f"{paths[0]} was written again meanwhile"):
        write(source_of(str(paths[0])), out, report=told)
    assert holdfast("show", out).code != 0


def test_the_schedule_of_a_checkpointer_goes_along_to_deepspeed(tmp_path, holdfast):
    model = nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    things = {"model": model, "optimizer": optimizer, "scheduler": schedule}
    with library.Checkpointer(tmp_path / "run", **things) as checkpointer:
        checkpointer.resume()
        model(torch.randn(2, 6)).sum().backward()
        optimizer.step()
        schedule.step()
        checkpointer.step()
    result = holdfast("convert", tmp_path / "run", tmp_path / "out", "--to", "deepspeed", "--stage", "1")
    assert result.code == 0, result.err
    states = torch.load(tmp_path / "out/global_step1/mp_rank_00_model_states.pt")
    assert states["lr_scheduler"] == schedule.state_dict()


@pytest.fixture(params=["model.safetensors", "pytorch_model.bin"])
def of_trainer(request, tmp_path):
    """A folder as the Trainer of transformers leaves it."""
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    weights = {"weight": torch.ones(4, 6), "bias": torch.ones(4)}
    (save_file if request.param == "model.safetensors" else torch.save)(weights, folder / request.param)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        torch.save({}, folder / name)
    for name in ("trainer_state.json", "config.json"):
        (folder / name).write_text("{}")
    return folder


UNREAD = "optimizer.pt, rng_state.pth, scheduler.pt, trainer_state.json"


def test_what_is_not_read_beside_weights_is_said(of_trainer, tmp_path, holdfast):
    shown = holdfast("show", of_trainer)
    assert [line.split(maxsplit=2)[2] for line in shown.out.splitlines() if line.startswith("not read")] == [
        UNREAD
    ]
    assert json.loads(holdfast("show", of_trainer, "--json").out)["unread"] == UNREAD.split(", ")
    converted = holdfast("convert", of_trainer, tmp_path / "out", "--to", "holdfast")
    assert f"the weights alone are read: {UNREAD}\n" in converted.out
    assert "alone are read" not in holdfast("convert", tmp_path / "out", tmp_path / "x", "--to", "dcp").out


@pytest.mark.filterwarnings("default:beginning from")
def test_a_resume_says_what_is_not_read_beside_weights(of_trainer, tmp_path):
    model = nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = library.Checkpointer(tmp_path / "run", model=model, optimizer=optimizer)
    with checkpointer, pytest.warns(UserWarning) as warned:
        checkpointer.resume(source=of_trainer)
    texts = " ".join(str(each.message) for each in warned)
    assert f"its weights alone are read, and not {UNREAD}: the optimizer's state begins anew" in texts
    assert "it has no optimizer state" not in texts


@pytest.mark.parametrize(
    ("to", "name", "text"),
    [
        ("dcp", "file.safetensors", "file.safetensors cannot be used as a directory: it is a file"),
        ("huggingface", "file.safetensors", "file.safetensors cannot be used as a directory: it is a file"),
        ("safetensors", "file.safetensors/x.safetensors", "cannot be used as a directory: it is a file"),
        ("safetensors", "folder.safetensors", "folder.safetensors is a directory. Name a file"),
    ],
)
def test_a_destination_of_another_kind_is_said_to_be_what_it_is(trained, tmp_path, holdfast, to, name, text):
    (tmp_path / "file.safetensors").write_text("x")
    (tmp_path / "folder.safetensors").mkdir()
    rules = ["--rules", as_they_are(tmp_path)] if to == "huggingface" else []
    result = holdfast("convert", trained[0], tmp_path / name, "--to", to, *rules)
    assert result.code == 2 and text in result.err
    assert (tmp_path / "file.safetensors").read_text() == "x"
    assert not [*(tmp_path / "folder.safetensors").iterdir()]
