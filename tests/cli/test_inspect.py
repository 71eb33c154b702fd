"""``ls``, ``show`` and ``verify`` on a run without a model: text for people, JSON for tools, exit codes."""

import json
import signal

import numpy as np
import pytest
from safetensors.numpy import save_file

from formats.deepspeed_files import random_state, write
from holdfast.cli import foreign_states
from holdfast.cli.inspect import _facts
from holdfast.store.object_store import NamedCommit
from holdfast.store.reader import RunReader
from tiny_run import TinyRun


@pytest.fixture
def run(tmp_path):
    """Three steps, of which the newest two are kept."""
    with TinyRun(tmp_path / "run") as tiny:
        for _ in range(3):
            tiny.take_step()
    return tmp_path / "run"


def flip_bit(path, offset=5000):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def newest_file(run, holdfast):
    """The payload file of unit block_1 that the newest commit names."""
    [manifest] = (run / "commits").glob("step-000000000003.*")
    return run / json.loads(manifest.read_text())["files"]["block_1"]["path"]


def test_ls_lists_commits_newest_first(run, holdfast):
    result = holdfast("ls", run)
    header, newest, older = result.out.splitlines()
    assert result.code == 0
    assert header.split() == ["step", "timeline", "written", "size"]
    assert newest.split()[0] == "3"
    assert newest.rstrip().endswith("newest")
    assert older.split()[0] == "2"


def test_ls_as_json(run, holdfast):
    newest, older = json.loads(holdfast("ls", run, "--json").out)
    assert (newest["step"], older["step"]) == (3, 2)
    assert newest["timeline"] == 1
    assert newest["current"] is True
    assert newest["bytes"] > 0


def test_ls_tells_steps_left_behind_by_a_resume(run, holdfast):
    with TinyRun(run, fork=2, copies=5) as tiny:
        tiny.take_step()
    rows = json.loads(holdfast("ls", run, "--json").out)
    assert [(row["step"], row["timeline"], row["current"]) for row in rows] == [
        (3, 2, True),
        (3, 1, False),
        (2, 1, True),
    ]
    assert "left behind by a later resume" in holdfast("ls", run).out.splitlines()[2]


def test_the_newest_step_is_the_one_that_goes_on_however_new_those_left_behind_are(run, holdfast):
    with TinyRun(run, fork=2, copies=5):
        pass  # went back, and ended before its first step
    left, newest = holdfast("ls", run).out.splitlines()[1:]
    assert "B   left behind by a later resume, and 8.0 KiB in files of another" in left
    assert newest.split()[0] == "2"
    assert newest.rstrip().endswith("newest")


def test_a_step_that_was_left_behind_is_named_with_its_timeline(run, holdfast):
    with TinyRun(run, fork=2, copies=5) as tiny:
        tiny.take_step()
    assert holdfast("verify", f"{run}@3.t1").out.startswith(f"{run}@3.t1 is whole")
    assert holdfast("verify", f"{run}@3").out.startswith(f"{run}@3 is whole")
    assert holdfast("verify", f"{run}@2").out.startswith(f"{run}@2 is whole")


def test_ls_lists_a_damaged_manifest_as_damaged(run, holdfast):
    [manifest] = (run / "commits").glob("step-000000000003.*")
    flip_bit(manifest, 20)
    result = holdfast("ls", run)
    assert result.code == 0
    assert "damaged manifest" in result.out.splitlines()[1]
    assert "damaged" in json.loads(holdfast("ls", run, "--json").out)[0]


def test_ls_of_a_run_without_commits_says_so(tmp_path, holdfast):
    with TinyRun(tmp_path / "run"):
        pass
    result = holdfast("ls", tmp_path / "run")
    assert (result.code, "has no commit yet" in result.out) == (0, True)
    assert json.loads(holdfast("ls", tmp_path / "run", "--json").out) == []


def test_show_tells_where_a_commit_came_from_and_what_it_holds(run, holdfast):
    result = holdfast("show", run)
    assert result.code == 0
    for text in ("step         3", "1, from the beginning", "4,145 in 3 tensors", "a.weight", "5x7"):
        assert text in result.out, text
    assert "F32 param exp_avg" in result.out
    assert "BF16 param, F32 exp_avg" in result.out


def test_show_tells_rates_data_and_skipped_steps_where_the_writer_kept_them(run):
    reader = RunReader(run)
    progress = {
        "optimizer": "AdamW",
        "groups": [{"lr": 1e-3}, {"lr": 1e-3}, {"lr": 5e-4}],
        "loader": {"consumed": 1200},
        "skipped_steps": 1,
    }
    facts = _facts(reader.head(), [], 3, 3, progress)
    assert facts["optimizer"] == "AdamW, learning rate 0.001, 0.0005"
    assert facts["data"] == "1,200 samples consumed"
    assert facts["skipped"] == "1 step whose loss or gradient was no number"
    assert facts["parameters"] == "0 in 0 tensors"


def test_tables_have_no_blanks_at_the_end_of_a_line(run, holdfast):
    for verb in ("ls", "show"):
        out = holdfast(verb, run).out
        assert [line for line in out.splitlines() if line != line.rstrip()] == []


def test_show_an_older_step_by_number(run, holdfast):
    shown = json.loads(holdfast("show", f"{run}@2", "--json").out)
    assert shown["step"] == 2
    assert shown["progress"] == {"step": 2}
    assert {"name": "a.weight", "slot": "param"}.items() <= shown["atoms"][0].items()


def test_verify_a_whole_commit(run, holdfast):
    result = holdfast("verify", run)
    assert (result.code, result.err) == (0, "")
    assert f"{run}@3 is whole" in result.out
    assert json.loads(holdfast("verify", run, "--json").out)["whole"] is True


def test_verify_names_file_offset_and_atom_of_damage_and_exits_1(run, holdfast):
    path = newest_file(run, holdfast)
    flip_bit(path)
    result = holdfast("verify", run)
    assert result.code == 1
    assert "is damaged in 1 place:" in result.out
    found = holdfast("verify", run, "--json")
    assert found.code == 1
    assert json.loads(found.out)["whole"] is False
    [damage] = json.loads(found.out)["damaged"]
    assert damage["path"] == str(path.relative_to(run))
    assert damage["offset"] == 0
    assert "b.weight/param" in damage["atoms"]
    assert holdfast("verify", f"{run}@2").code == 0


def test_damage_names_an_older_step_to_check_and_what_goes_on(run, holdfast):
    flip_bit(newest_file(run, holdfast))
    [line] = [line for line in holdfast("verify", run).out.splitlines() if "checksum" in line]
    assert " fail their checksum: expected xxh3:" in line
    assert (
        f"check it with `holdfast verify {run}@2`. Running again resumes from the newest whole step, if there is one."
        in line
    )


def test_damage_of_a_file_of_every_step_says_so(tmp_path, holdfast):
    with TinyRun(tmp_path / "run") as tiny:
        tiny.take_step()
    path = tmp_path / "run" / tiny.store.head().files["block_1"].path
    flip_bit(path)
    out = holdfast("verify", tmp_path / "run").out
    assert "No step to go on from is without this file: put a copy of it in its place" in out


def test_verify_a_damaged_manifest_exits_1(run, holdfast):
    [manifest] = (run / "commits").glob("step-000000000003.*")
    flip_bit(manifest, 20)
    assert holdfast("verify", run).code == 1
    found = json.loads(holdfast("verify", run, "--json").out)
    assert found["whole"] is False
    assert found["damaged"][0]["path"].startswith("commits/step-000000000003")


@pytest.mark.parametrize("verb", ["ls", "show", "verify"])
def test_what_is_not_a_run_is_refused_in_one_line(tmp_path, holdfast, verb):
    (tmp_path / "empty").mkdir()
    for path, said in (
        (tmp_path / "nowhere", "is not a directory"),
        (tmp_path / "empty", "not a run directory"),
    ):
        result = holdfast(verb, path)
        assert (result.code, result.out) == (2, "")
        assert result.err.startswith("error: ")
        assert said in result.err
        assert len(result.err.splitlines()) == 1
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize("verb", ["show", "verify", "diff", "convert"])
def test_a_step_that_is_not_there_is_refused_with_those_that_are(run, tmp_path, holdfast, verb):
    more = {"diff": [run], "convert": [tmp_path / "out.pt", "--to", "torch"]}.get(verb, [])
    result = holdfast(verb, f"{run}@7", *more)
    assert result.code == 2
    assert "has no step 7. It has: 2, 3." in result.err


def test_ls_takes_no_step_and_says_so(run, holdfast):
    result = holdfast("ls", f"{run}@2")
    assert (result.code, result.out) == (2, "")
    assert (
        f"names a step, and all of a run is asked for: {run}. `holdfast show {run}@2` shows one" in result.err
    )


@pytest.mark.parametrize("verb", ["show", "verify"])
def test_a_step_is_a_number(run, holdfast, verb):
    result = holdfast(verb, f"{run}@newest")
    assert (result.code, result.out) == (2, "")
    assert f"'newest' in {run}@newest is not a step, which is a number; `holdfast ls {run}`" in result.err


@pytest.mark.parametrize("verb", ["ls", "show", "verify"])
def test_a_directory_of_runs_names_them(run, tmp_path, holdfast, verb):
    with TinyRun(tmp_path / "another"):
        pass
    result = holdfast(verb, tmp_path)
    assert (result.code, result.out) == (2, "")
    assert (
        f"{tmp_path} is not a run, but holds runs: name one of {tmp_path / 'another'}, {run}\n" in result.err
    )


def test_a_run_whose_state_lies_elsewhere_is_found_through_its_configuration(run, tmp_path, holdfast):
    (tmp_path / "front").mkdir()
    (tmp_path / "front" / "config.toml").write_text(f'[offload]\nssd = "{run}"\n')
    assert json.loads(holdfast("ls", tmp_path / "front", "--json").out)[0]["step"] == 3


def test_looking_changes_nothing(run, holdfast):
    def everything():
        return {path: path.stat().st_mtime_ns for path in sorted(run.rglob("*"))}

    before = everything()
    for verb in ("ls", "show", "verify"):
        holdfast(verb, run)
    holdfast("diff", run, f"{run}@2")
    assert everything() == before


def test_a_directory_with_an_at_sign_is_a_directory(tmp_path):
    (tmp_path / "run@3").mkdir()
    assert NamedCommit.parse(str(tmp_path / "run@3")) == NamedCommit(tmp_path / "run@3")
    assert NamedCommit.parse("run@3") == NamedCommit(NamedCommit.parse("run").run, 3)
    assert NamedCommit.parse("run@3.t12") == NamedCommit(NamedCommit.parse("run").run, 3, 12)
    assert NamedCommit.parse("run@x").step is None


@pytest.mark.parametrize("words", [["ls"], ["show"], ["show", "--json"], ["verify"], ["verify", "--json"]])
def test_who_prints_leaves_quietly_when_nobody_reads(run, holdfast_process, words):
    """A shell says 128 + SIGPIPE = 141."""
    process = holdfast_process(words[0], run, *words[1:])
    process.stdout.close()
    assert process.wait(timeout=60) == -signal.SIGPIPE
    assert process.stderr.read() == ""


def test_show_tells_how_states_of_others_are_cut_and_who_wrote_them(tmp_path, holdfast, monkeypatch):
    state = random_state([{"w": (6, 2), "one": (1,)}], slots=("exp_avg",))
    write(tmp_path / "zero", state, 1, 2)
    asked, cuts_of = [], foreign_states._cuts_of  # of millions of pieces, which only JSON has
    monkeypatch.setattr(foreign_states, "_cuts_of", lambda stored: asked.append(stored) or cuts_of(stored))
    shown = holdfast("show", tmp_path / "zero").out
    assert "written by   DeepSpeed 0.19.8, 2 ranks" in shown
    header, *rows = shown.splitlines()[-3:]
    assert header.split() == ["tensor", "shape", "cut", "slots"]
    assert rows[0].split()[:5] == ["w", "6x2", "2", "parts", "F32"] and "parts" not in rows[1]
    assert asked == []
    told = json.loads(holdfast("show", tmp_path / "zero", "--json").out)
    assert len(asked) == len(told["atoms"])
    assert told["writer"] == "DeepSpeed 0.19.8, 2 ranks"
    atom = next(atom for atom in told["atoms"] if (atom["name"], atom["slot"]) == ("w", "param"))
    assert (atom["parts"], atom["copies"]) == (2, 1)
    assert sum((b[0] - a[0]) * (b[1] - a[1]) for a, b in atom["cuts"]) == 12 and len(atom["cuts"]) >= 2


def test_show_has_no_column_of_cuts_where_nothing_is_cut(run, tmp_path, holdfast):
    assert "cut" not in holdfast("show", run).out.split()
    made = holdfast("convert", run, tmp_path / "x.safetensors", "--to", "safetensors")
    assert made.code == 0, made.err
    shown = holdfast("show", tmp_path / "x.safetensors").out
    assert "written by   holdfast" in shown and "cut" not in shown.split()


def test_ls_of_foreign_checkpoint_points_to_show(tmp_path, holdfast):
    """Any reader recognizes it: a file here, and a folder."""
    save_file({"weight": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        result = holdfast("ls", path)
        assert result.code == 2 and f"`holdfast show {path}` lists its tensors" in result.err
