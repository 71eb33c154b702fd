"""Any text as windows of bytes: nothing lost between files, nothing trained on that is held out."""

import itertools
import os
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli.train.recipe import recipe_of
from holdfast.config import Config
from holdfast.data import corpus as corpora
from holdfast.data.corpus import Corpus, find_files
from holdfast.data.loader import step_loader
from holdfast.errors import BadInput, DiskFailed, RunMismatch


@pytest.fixture
def folder(tmp_path):
    """Three files of 100, 0 and 57 bytes, and what must be left out."""
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    (tmp_path / "b" / "empty.txt").write_bytes(b"")
    (tmp_path / "b" / "z.txt").write_bytes(bytes(range(100, 157)))
    (tmp_path / ".hidden").write_bytes(b"no")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"no")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    return tmp_path


def test_a_folder_is_its_files_in_sorted_order_end_to_end(folder):
    corpus = Corpus(str(folder), context=4)
    assert [path.name for path in corpus.paths] == ["a.txt", "z.txt"]
    assert corpus.read(0, 157) == bytes(range(157))
    assert corpus.num_windows == 39


@given(start=st.integers(0, 156), length=st.integers(0, 157))
def test_any_stretch_reads_as_one_string(tmp_path_factory, start, length):
    folder = tmp_path_factory.getbasetemp() / "stretches"
    folder.mkdir(exist_ok=True)
    text, ends = bytes(range(157)), [0, 1, 50, 51, 157]
    for begin, end in itertools.pairwise(ends):
        (folder / f"{begin:03}").write_bytes(text[begin:end])
    length = min(length, 157 - start)
    assert Corpus(str(folder), context=4).read(start, length) == text[start : start + length]


def test_targets_are_the_tokens_one_byte_later_and_windows_meet(folder):
    corpus = Corpus(str(folder), context=10)
    windows = [corpus.window(k) for k in range(corpus.num_windows)]
    tokens = torch.cat([window["tokens"] for window in windows])
    targets = torch.cat([window["targets"] for window in windows])
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == list(range(150))
    assert targets.tolist() == list(range(1, 151))


@pytest.mark.parametrize("fraction, held_out", [(0.0, 0), (0.02, 1), (0.1, 3), (0.25, 9), (0.5, 19)])
def test_training_and_validation_share_no_window_and_leave_none_out(folder, fraction, held_out):
    corpus = Corpus(str(folder), context=4, validation_fraction=fraction)
    assert len(corpus.validation) == held_out

    def firsts(part):
        return [part[index]["tokens"][0].item() for index in range(len(part))]

    training, validation = firsts(corpus.training), firsts(corpus.validation)
    assert sorted(training + validation) == list(range(0, 156, 4))
    assert training == sorted(training)


@pytest.mark.parametrize("size, windows", [(9, 2), (10, 2), (12, 2), (13, 3)])
def test_a_window_needs_one_byte_more_than_its_context(tmp_path, size, windows):
    (tmp_path / "text").write_bytes(bytes(size))
    corpus = Corpus(str(tmp_path / "text"), context=4)
    assert corpus.num_windows == windows
    assert len(corpus.window(windows - 1)["targets"]) == 4


def test_an_index_past_the_end_ends_iteration(folder):
    corpus = Corpus(str(folder), context=4)
    assert len(list(corpus.training)) == 38
    with pytest.raises(IndexError):
        corpus.training[38]


def test_a_file_and_a_glob_name_the_same_text(folder, monkeypatch):
    by_name = Corpus(str(folder / "a.txt"), context=4)
    by_glob = Corpus(str(folder / "*.txt"), context=4)
    assert [path.name for path in find_files(str(folder / "**/**/*.txt"))[1]] == [
        "a.txt",
        "empty.txt",
        "z.txt",
    ]
    monkeypatch.chdir(folder)
    relative = Corpus("*.txt", context=4)
    assert by_name.fingerprint == by_glob.fingerprint == relative.fingerprint
    both = Corpus("**/*.txt", context=4)
    assert both.fingerprint == Corpus(str(folder), context=4).fingerprint


def test_the_fingerprint_follows_names_sizes_and_content_not_the_place(folder, tmp_path_factory):
    first = Corpus(str(folder), context=4).fingerprint
    moved = tmp_path_factory.mktemp("elsewhere") / "text"
    os.rename(folder, moved)
    assert Corpus(str(moved), context=4).fingerprint == first
    os.rename(moved / "a.txt", moved / "c.txt")
    assert Corpus(str(moved), context=4).fingerprint["xxh3"] != first["xxh3"]
    (moved / "c.txt").write_bytes(bytes(99))
    assert Corpus(str(moved), context=4).fingerprint["bytes"] == 156


def test_a_text_that_was_changed_in_place_is_another(folder):
    state = step_loader(Corpus(str(folder), context=4), 2, 2).state_dict()
    content = (folder / "a.txt").read_bytes()
    (folder / "a.txt").write_bytes(content[::-1])
    with pytest.raises(RunMismatch, match="the data is not what the run was trained on: content was"):
        step_loader(Corpus(str(folder), context=4), 2, 2).load_state_dict(state)
    (folder / "a.txt").write_bytes(content)
    step_loader(Corpus(str(folder), context=4), 2, 2).load_state_dict(state)


def test_a_renamed_file_is_refused_by_its_cause(folder):
    state = step_loader(Corpus(str(folder), context=4), 2, 2).state_dict()
    os.rename(folder / "a.txt", folder / "aa.txt")
    with pytest.raises(RunMismatch, match="other names, order or boundaries"):
        step_loader(Corpus(str(folder), context=4), 2, 2).load_state_dict(state)
    (folder / "aa.txt").write_bytes((folder / "aa.txt").read_bytes()[::-1])
    with pytest.raises(RunMismatch, match="the data is not what the run was trained on"):
        step_loader(Corpus(str(folder), context=4), 2, 2).load_state_dict(state)


def test_a_state_of_before_content_was_looked_at_goes_on(folder):
    state = step_loader(Corpus(str(folder), context=4), 2, 2).state_dict()
    del state["fingerprint"]["content"]
    step_loader(Corpus(str(folder), context=4), 2, 2).load_state_dict(state)


@pytest.mark.parametrize("most, noticed", [(1000, 157), (40, 40), (1, 10)])
def test_of_a_large_text_pieces_all_over_it_are_looked_at(folder, monkeypatch, most, noticed):
    monkeypatch.setattr(corpora, "HASHED_BYTES", most)
    monkeypatch.setattr(corpora, "PIECE_BYTES", 10)

    def content():
        return Corpus(str(folder), context=4).fingerprint["content"]

    before, changes = content(), []
    for name in ("a.txt", "b/z.txt"):
        text = (folder / name).read_bytes()
        for place in range(len(text)):
            (folder / name).write_bytes(text[:place] + b"\xff" + text[place + 1 :])
            changes.append(content() != before)
        (folder / name).write_bytes(text)
    assert sum(changes) == noticed
    assert any(changes[:40]) and (most == 1 or any(changes[-40:]))


def test_the_standard_library_is_always_there_and_holds_nobody_elses_code():
    root, paths = find_files("stdlib")
    names = {path.relative_to(root).as_posix() for path in paths}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert not any(part in ("site-packages", "test") for name in names for part in name.split("/"))
    assert Corpus("stdlib", context=256).num_bytes > 3_000_000


def test_opening_reads_no_text(monkeypatch):
    monkeypatch.setattr(os, "pread", None)
    start = time.perf_counter()
    Corpus("stdlib", context=256)
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    "name, expected",
    [
        ("nowhere", "does not exist; name a file, a folder"),
        ("*.nothing", "names no files"),
        ("bare", "names no files"),
        ("short", "has 8 bytes; with a context of 4 at least 9 are needed"),
        ("empty", "has 0 bytes; with a context of 4 at least 9 are needed"),
    ],
)
def test_missing_and_empty_texts_are_refused_in_one_line(tmp_path, name, expected):
    (tmp_path / "bare").mkdir()
    (tmp_path / "short").write_bytes(bytes(8))
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(BadInput) as caught:
        Corpus(str(tmp_path / name), context=4)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_smallest_text_that_is_accepted_has_a_window_on_each_side(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(9)))
    corpus = Corpus(str(tmp_path / "text"), context=4)
    assert (len(corpus.training), len(corpus.validation)) == (1, 1)
    assert corpus.validation[0]["targets"].tolist() == [5, 6, 7, 8]


def test_a_file_that_became_shorter_is_named(folder):
    corpus = Corpus(str(folder), context=4)
    os.truncate(folder / "a.txt", 50)
    with pytest.raises(DiskFailed, match=r"a\.txt gave 2 of 5 bytes at offset 48"):
        corpus.window(12)


def test_an_unreadable_file_is_refused_before_training(folder, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "z.txt")
    with pytest.raises(BadInput, match=r"z\.txt, which may not be read"):
        Corpus(str(folder), context=4)


def test_a_run_inside_the_folder_is_no_part_of_the_text(folder):
    def fingerprint():
        return Corpus(str(folder), context=8).fingerprint

    before = fingerprint()
    for name in ("run/events.jsonl", "run/state/data/1", "else/commits/1.json", "else/timelines/1.json"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    assert fingerprint() == before
    (folder / "timelines").mkdir()
    (folder / "timelines" / "b.py").write_text("y")
    assert fingerprint() != before


def test_a_link_to_a_folder_is_told_of(tmp_path_factory):
    """The glob that the warning names reads it, and what lies in the folder itself only once."""
    root, other = tmp_path_factory.mktemp("a[1]"), tmp_path_factory.mktemp("other")
    (other / "far.txt").write_text("far")
    (root / "near.txt").write_text("near")
    (root / "more").symlink_to(other)
    (root / "again").symlink_to(root)
    with pytest.warns(UserWarning, match="is a link to a folder, which is not read") as told:
        assert find_files(str(root))[1] == [root / "near.txt"]
    _, found = find_files(str(told[0].message).rpartition(" ")[2])
    assert sorted(path.name for path in found) == ["far.txt", "near.txt"]


def test_held_out_text_that_is_trained_on_is_told_of(folder):
    told = Config()
    text = {"text": str(folder), "validation": str(folder / "a.txt")}
    config = replace(told, data=replace(told.data, **text), model=replace(told.model, context=16))
    with pytest.warns(UserWarning, match=r"a\.txt, which is also in data\.text"):
        recipe_of(config, print)
