"""A run goes on as what it was made as, and where its state is; other wishes are refused with the way out."""

import contextlib
import json
import os
import shutil

import pytest
import torch

from holdfast.cli.train.kept_config import write_record
from holdfast.config import load_config
from holdfast.events import read_events
from holdfast.measure.hardware_rates import fast_dtype
from holdfast.store.disk import Disk
from support.tiny_keys import TINY

KEYS = TINY | {"train.warmup_steps": 2, "train.steps": 2, "train.learning_rate": 1e-2}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(bytes(range(256)) * 8)
    return path


@pytest.fixture
def train(tmp_path, text, holdfast, monkeypatch):
    """``train("train.steps=3", dtype="bf16")``: sets on the command line, and keys of ``[train]`` in the file."""
    monkeypatch.chdir(tmp_path)

    def call(*sets, run="run", folder=tmp_path, **in_file):
        keys = KEYS | {"run.dir": run, "data.text": str(text)}
        keys |= {f"train.{key}": value for key, value in in_file.items()}
        lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
        (folder / "run.toml").write_text("\n".join(lines))
        with contextlib.chdir(folder):
            return holdfast("train", "run.toml", *(word for text in sets for word in ("--set", text)))

    return call


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of runs that are trained once, and copied for each test."""
    return tmp_path_factory.mktemp("trained")


def copy_of(kept, tmp_path, train, *sets):
    """A run of two steps, with its absolute paths."""
    if not kept.exists():
        kept.mkdir()
        assert train(*sets, folder=kept).code == 0
    shutil.copytree(kept, tmp_path, dirs_exist_ok=True)
    for record in tmp_path.glob("*/config.toml"):
        record.write_text(record.read_text().replace(str(kept), str(tmp_path)))
    return tmp_path / "run"


@pytest.fixture
def run(trained, tmp_path, train):
    """A run of two steps."""
    return copy_of(trained / "whole", tmp_path, train)


@pytest.mark.slow
@pytest.mark.parametrize(("faster", "chosen"), [("float32", "fp32"), ("bfloat16", "bf16")])
def test_auto_is_what_the_machine_is_fast_in_and_the_run_keeps_it(
    train, tmp_path, monkeypatch, faster, chosen
):
    monkeypatch.setattr(
        "holdfast.measure.hardware_rates.product_seconds", lambda dtype: 1.0 if dtype == faster else 2.0
    )
    result = train(dtype="auto")
    assert (result.code, f"computed in {chosen}" in result.out) == (0, True)
    assert load_config(tmp_path / "run" / "config.toml").train.dtype == chosen
    monkeypatch.setattr(
        "holdfast.measure.hardware_rates.product_seconds", lambda dtype: 2.0 if dtype == faster else 1.0
    )
    result = train("train.steps=3", dtype="auto")
    assert (result.code, f"computed in {chosen}" in result.out) == (0, True)
    assert (result.err, "dtype" in result.out) == ("", False)
    assert load_config(tmp_path / "run" / "config.toml").train.dtype == chosen


@pytest.mark.slow
def test_auto_keeps_what_the_run_computes_in_where_its_record_is_gone(train, tmp_path, monkeypatch):
    assert train(dtype="bf16").code == 0
    (tmp_path / "run" / "config.toml").unlink()
    monkeypatch.setattr(
        "holdfast.measure.hardware_rates.product_seconds", lambda dtype: 1.0 if dtype == "float32" else 2.0
    )
    result = train("train.steps=3", dtype="auto")
    assert (result.code, result.err, "computed in bf16" in result.out) == (0, "", True)


def test_bf16_that_is_a_little_slower_is_taken_and_a_gpu_is_not_asked(monkeypatch):
    monkeypatch.setattr(
        "holdfast.measure.hardware_rates.product_seconds", {"float32": 0.85, "bfloat16": 1.0}.get
    )
    assert fast_dtype(torch.device("cpu")) == "bf16"
    monkeypatch.setattr(
        "holdfast.measure.hardware_rates.product_seconds", {"float32": 0.75, "bfloat16": 1.0}.get
    )
    assert [fast_dtype(torch.device(kind)) for kind in ("cpu", "cuda:1")] == ["fp32", "bf16"]


def everything(directory):
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*")}


def sittings(run):
    return [event for event in read_events(run / "events.jsonl") if event["event"] == "run"]


@pytest.mark.slow
@pytest.mark.parametrize("wish", ["model.width=32", "run.seed=1", "data.validation_fraction=0.1"])
def test_what_a_run_is_cannot_be_changed_even_by_set(run, train, wish):
    before = everything(run)
    result = train(wish, "train.steps=9")
    key, value = wish.split("=")
    assert result.code == 2
    assert result.err.startswith(f"error: run is another run: its {key} is ")
    assert f"and {value} was asked for. Give the same value (--set {key}=" in result.err
    assert everything(run) == before


@pytest.mark.slow
def test_arithmetic_that_only_the_file_changes_is_refused_with_both_ways_out(run, train):
    before = everything(run)
    result = train("train.steps=3", clip_norm=0.5, dtype="bf16")
    assert result.code == 2
    assert result.err == (
        'error: run was trained otherwise: train.clip_norm 1.0 -> 0.5, train.dtype "fp32" -> "bf16". Say '
        "--set train.clip_norm=1.0 --set train.dtype=fp32 to go on as before, or --set train.clip_norm=0.5 "
        "--set train.dtype=bf16 to change it from here on; another run needs another directory, "
        "--set run.dir=...\n"
    )
    assert everything(run) == before


@pytest.mark.slow
def test_arithmetic_that_set_changes_is_reported_and_from_then_on_the_runs_own(run, train):
    wish = ["train.learning_rate=0.02", "train.weight_decay=0.0", "train.dtype=bf16"]
    result = train("train.steps=4", *wish)
    assert result.code == 0, result.err
    reported = (
        "Changed from here on: train.steps 2 -> 4, train.learning_rate 0.01 -> 0.02, train.weight_decay 0.1 -> 0.0, "
        'train.dtype "fp32" -> "bf16".\n'
    )
    assert reported in result.out
    first, second = sittings(run)
    assert first["changed"] == {}
    assert second["changed"]["train.learning_rate"] == [0.01, 0.02]
    *_, third, fourth = (event for event in read_events(run / "events.jsonl") if event["event"] == "step")
    assert third["learning_rate"] == pytest.approx([0.02] * 2)
    assert fourth["learning_rate"] == pytest.approx([0.02 * 0.55] * 2)
    forgotten = train("train.steps=5")
    assert forgotten.code == 2
    assert "train.learning_rate 0.02 -> 0.01" in forgotten.err
    again = train("train.steps=5", *wish)
    assert again.code == 0, again.err
    assert "Changed from here on: train.steps 4 -> 5.\n" in again.out


def test_ways_of_clipping_with_the_same_bits_need_no_word(run, train):
    """The record is of a version whose default was another."""
    record = run / "config.toml"
    record.write_text(record.read_text().replace('clipping = "auto"', 'clipping = "defer"'))
    assert 'clipping = "defer"' in record.read_text()
    result = train("train.steps=3")
    assert result.code == 0, result.err
    assert 'train.clipping "defer" -> "auto"' in result.out
    record.write_text(record.read_text().replace('clipping = "auto"', 'clipping = "per_block"'))
    assert 'train.clipping "per_block" -> "auto"' in train("train.steps=4").err


@pytest.mark.slow
def test_hyper_parameters_that_set_changes_are_those_of_the_next_commit(run, train, holdfast):
    train("train.steps=3", "train.learning_rate=0.02", "train.weight_decay=0.3")
    [decayed, other] = json.loads(holdfast("show", run, "--json").out)["progress"]["groups"]
    assert (decayed["initial_lr"], decayed["weight_decay"]) == (0.02, 0.3)
    assert (other["initial_lr"], other["weight_decay"]) == (0.02, 0.0)


@pytest.mark.slow
def test_what_does_not_enter_the_arithmetic_changes_freely_and_is_reported(run, train):
    result = train("train.steps=3", "io.threads=2", "durability.retain=1")
    assert result.code == 0, result.err
    assert (
        "Changed from here on: train.steps 2 -> 3, io.threads 4 -> 2, durability.retain 2 -> 1.\n"
        in result.out
    )


@pytest.mark.slow
def test_the_same_text_in_another_place_is_the_same_text(run, text, train, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(text, tmp_path / "elsewhere" / "text")
    assert train("train.steps=3", f"data.text={tmp_path}/elsewhere/text").code == 0
    (tmp_path / "elsewhere" / "text").write_bytes(bytes(3000))
    result = train("train.steps=4", f"data.text={tmp_path}/elsewhere/text")
    assert result.code == 2
    assert "the data is not what the run was trained on: bytes was 2048, now it is 3000" in result.err


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_record_that_does_not_read_is_not_considered(run, train):
    (run / "config.toml").write_text("[model]\nwings = 2\n")
    result = train("train.steps=3")
    assert result.code == 0
    assert result.err.startswith("warning: the run's own configuration is not considered: unknown")
    assert len(result.err.splitlines()) == 1


@pytest.mark.slow
def test_a_record_that_says_the_same_is_made_durable_too(run, train, monkeypatch):
    synced = []
    monkeypatch.setattr(Disk, "sync", lambda disk, target, *, why: synced.append((disk.root.name, target)))
    write_record(load_config(run / "config.toml"))
    assert synced == [("run", "config.toml")]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_other_settings_are_told_where_the_record_is_gone(run, train):
    (run / "config.toml").unlink()
    result = train("train.steps=3", "train.clip_norm=0.5")
    assert result.code == 0
    assert "this run goes on with other settings" in result.err
    assert "the norm of clipping was 1.0 and is 0.5" in result.err


@pytest.mark.slow
def test_a_run_that_was_copied_goes_on_in_its_copy(run, train, tmp_path):
    shutil.copytree(run, tmp_path / "copy")
    result = train("train.steps=3", run="copy")
    assert result.code == 0, result.err
    assert "Continuing after step 2" in result.out
    assert "Changed from here on: train.steps 2 -> 3.\n" in result.out


@pytest.mark.slow
def test_another_place_for_the_state_is_refused_instead_of_starting_anew(run, train, tmp_path):
    before = everything(run)
    result = train("train.steps=3", "offload.ssd=state")
    assert result.code == 2
    assert 'run has its state in run, and offload.ssd = "state" would begin another run there' in result.err
    assert '--set offload.ssd=""' in result.err
    assert len(result.err.splitlines()) == 1
    assert everything(run) == before
    assert not (tmp_path / "state").exists()


@pytest.fixture
def apart(trained, tmp_path, train):
    """A run whose state lies in another directory."""
    return copy_of(trained / "apart", tmp_path, train, "offload.ssd=state")


@pytest.mark.slow
def test_a_state_elsewhere_is_found_from_any_directory(apart, tmp_path, holdfast, monkeypatch):
    (tmp_path / "far").mkdir()
    monkeypatch.chdir(tmp_path / "far")
    for directory in ("../run", "../state"):
        assert json.loads(holdfast("ls", directory, "--json").out)[0]["step"] == 2
    assert load_config(apart / "config.toml").offload.ssd == str(tmp_path / "state")


@pytest.mark.slow
def test_the_record_of_a_state_elsewhere_lies_beside_it_too(apart, train, tmp_path):
    assert not (apart / "commits").exists()
    result = train("offload.ssd=state", "train.steps=3", run="other", weight_decay=0.3)
    assert result.code == 2
    assert "other was trained otherwise: train.weight_decay 0.1 -> 0.3" in result.err
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_another_name_of_the_same_directory_is_the_same_place(apart, train, tmp_path):
    (tmp_path / "link").symlink_to("state")
    assert train("offload.ssd=link", "train.steps=3").code == 0


@pytest.mark.slow
def test_a_state_that_was_moved_is_found_where_it_is_said_to_be(apart, train, tmp_path):
    os.rename(tmp_path / "state", tmp_path / "moved")
    result = train("offload.ssd=moved", "train.steps=3")
    assert result.code == 0, result.err
    assert "Continuing after step 2" in result.out


@pytest.mark.slow
def test_the_state_of_another_run_is_not_taken_for_one_that_was_moved(apart, train, tmp_path):
    assert train("offload.ssd=others", "run.seed=1", run="other").code == 0
    shutil.rmtree(tmp_path / "state")
    before = everything(tmp_path / "others")
    result = train("offload.ssd=others", "train.steps=3")
    assert result.code == 2
    assert "others is another run: its run.seed is 1, and 0 was asked for" in result.err
    assert everything(tmp_path / "others") == before


@pytest.mark.slow
def test_a_disk_that_is_not_mounted_does_not_begin_the_run_anew(apart, train, tmp_path):
    os.rename(tmp_path / "state", tmp_path / "elsewhere")
    (tmp_path / "state").mkdir()
    result = train("offload.ssd=state", "train.steps=3")
    assert result.code == 2
    assert f"run was trained with its state in {tmp_path / 'state'}, and there is none in state" in result.err
    assert "Is its disk mounted?" in result.err
    assert list((tmp_path / "state").iterdir()) == []


@pytest.mark.slow
def test_a_second_copy_of_the_state_is_refused_while_the_first_is_there(apart, train, tmp_path):
    shutil.copytree(tmp_path / "state", tmp_path / "copy")
    result = train("offload.ssd=copy", "train.steps=3")
    assert result.code == 2
    assert f"Say --set offload.ssd={tmp_path / 'state'}, or move" in result.err
