"""A run is looked at while it trains: what its writer retires meanwhile is no damage."""

import json
import re

import pytest

from holdfast.store.disk import Disk
from tiny_run import TENSORS, TinyRun, index_of


@pytest.fixture
def run(tmp_path):
    with TinyRun(tmp_path / "run") as tiny:
        tiny.take_step()
        yield tiny


@pytest.fixture
def overtaken(monkeypatch, run):
    """``overtaken("data/", 1)``: when a file there is looked at for the first time, the writer takes three steps
    before it is read, and so writes to all files that were there. It does so ``times`` times."""

    def arm(directory, times):
        writing = False  # the writer looks at its files as well

        def first(original):
            def call(disk, path):
                nonlocal times, writing
                if times and not writing and path.startswith(directory):
                    times, writing = times - 1, True
                    for _ in range(3):
                        run.take_step()
                    writing = False
                return original(disk, path)

            return call

        for name in ("size", "read_bytes"):
            monkeypatch.setattr(Disk, name, first(getattr(Disk, name)))

    return arm


def check_said_to_be_retired(result, step=r"\d+"):
    assert (result.code, result.out) == (2, "")
    [line] = result.err.strip().splitlines()
    assert re.match(rf"error: step {step} of .* was retired by its writer while it was read\.", line)


@pytest.mark.parametrize("verb", ["verify", "diff"])
def test_the_newest_step_is_the_newer_one_if_it_is_retired_while_it_is_read(run, overtaken, holdfast, verb):
    overtaken("data/", 1)
    root = run.store.root
    result = holdfast(verb, root) if verb == "verify" else holdfast(verb, root, root)
    assert result.code == 0, result.err
    assert result.out.count("@4") == (1 if verb == "verify" else 2)


@pytest.mark.parametrize("verb", ["verify", "diff"])
def test_a_step_that_was_named_is_said_to_be_retired(run, overtaken, holdfast, verb):
    overtaken("data/", 1)
    named = f"{run.store.root}@1"
    check_said_to_be_retired(holdfast(verb, named, *([named] if verb == "diff" else [])), 1)


@pytest.mark.parametrize("verb", ["verify", "diff"])
def test_a_writer_that_is_always_faster_is_not_chased_for_ever(run, overtaken, holdfast, verb):
    overtaken("data/", 100)
    root = run.store.root
    result = holdfast(verb, root) if verb == "verify" else holdfast(verb, root, root)
    check_said_to_be_retired(result)


def test_a_step_that_is_named_beside_the_newest_is_said_to_be_gone(run, overtaken, holdfast):
    overtaken("data/", 1)
    result = holdfast("diff", run.store.root, f"{run.store.root}@1")
    assert result.code == 2
    assert "has no step 1. It has: 3, 4." in result.err


def test_show_takes_the_newer_step_if_the_index_goes_with_the_older(run, overtaken, holdfast):
    run.index = run.store.put_index(index_of(TENSORS))
    overtaken("index/", 1)
    assert json.loads(holdfast("show", run.store.root, "--json").out)["step"] == 4


def test_ls_leaves_out_what_was_retired_since_it_was_listed(run, overtaken, holdfast):
    run.take_step()
    overtaken("commits/", 1)
    assert [row["step"] for row in json.loads(holdfast("ls", run.store.root, "--json").out)] == []


def test_damage_of_a_step_that_is_listed_is_damage(run, holdfast):
    path = run.store.root / run.store.head().files["block_1"].path
    path.write_bytes(bytes(path.stat().st_size))
    for verb in ("verify", "diff"):
        result = holdfast(verb, *[run.store.root] * (1 if verb == "verify" else 2))
        assert result.code == 1
        assert "checksum: expected xxh3:" in result.out + result.err
