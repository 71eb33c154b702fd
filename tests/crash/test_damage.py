"""Damage to a run at rest: a bit flipped anywhere in what the newest commit refers to, files cut, gone, swapped.

``verify`` names file, atom and offset. Training goes on from the step before, says why, and ends as if nothing
had been; what both steps need is made again or refused with nothing written.
"""

from __future__ import annotations

import os
import random
import shutil
from functools import partial

import pytest

from combined import CAMPAIGN
from crash_run import STEPS
from holdfast.errors import ChunkCorrupt, FileMissing, ManifestCorrupt
from holdfast.store.format.manifest import timeline_path
from holdfast.store.format.payload_files import VerifiedFiles
from holdfast.store.run_store import LocalStore
from tiny_run import flip

NEWEST = 6
FLIPS, RESUMED = (1000, 50) if CAMPAIGN else (100, 3)


@pytest.fixture(scope="module")
def whole(server, text, tmp_path_factory):
    """A run of ``NEWEST`` steps in two processes, never damaged: tests take copies."""
    root = tmp_path_factory.mktemp("whole") / "run"
    for steps in (3, NEWEST):
        assert server.run(root=root, text=text, steps=steps).finished
    return root


@pytest.fixture
def run(whole, tmp_path):
    return copy_of(whole, tmp_path / "run")


def copy_of(whole, root):
    shutil.copytree(whole, root)
    return root


def parts_of(reader, manifest):
    """Every file that the commit stands for: its unit, or what it is."""
    files = {file.path: unit for unit, file in manifest.files.items()}
    own = {manifest.path: "manifest", manifest.index["path"]: "index"}
    return files | own | {timeline_path(manifest.timeline): "timeline"}


def random_bit(rng, root, parts):
    path = rng.choice(sorted(parts))
    return path, rng.randrange(os.path.getsize(root / path) * 8)


def check_found(reader, manifest, layouts, path, bit, found):
    """``found`` is exactly this bit, by file, offset and atom."""
    assert [error.path for error in found] == [path], (path, bit)
    (error,) = found
    assert path in str(error)
    if path not in layouts:
        assert isinstance(error, ManifestCorrupt)
        return
    assert isinstance(error, ChunkCorrupt)
    assert error.offset <= bit // 8 < error.offset + error.nbytes
    assert f"offset {error.offset}" in str(error)
    hit = layouts[path].keys_between(bit // 8, bit // 8 + 1)
    assert set(hit) <= set(error.atoms) and error.atoms and repr(error.atoms[0]) in str(error)


def layouts_of(reader, manifest):
    files = VerifiedFiles(reader.disk)
    return {ref.path: files.layout(ref) for ref in manifest.files.values()}


def find_flips(run, queue, rng, count):
    reader = LocalStore.read(run, queue=queue)
    manifest = reader.head()
    layouts, parts = layouts_of(reader, manifest), parts_of(reader, manifest)
    assert reader.verify(manifest) == []
    for _ in range(count):
        path, bit = random_bit(rng, run, parts)
        flip(run / path, bit)
        check_found(reader, manifest, layouts, path, bit, reader.verify(manifest))
        flip(run / path, bit)
    assert reader.verify(manifest) == []


@pytest.mark.slow
def test_every_flipped_bit_is_found(run, queue):
    find_flips(run, queue, random.Random(1), FLIPS)


def check_resumed(server, reference, text, root, expected, path):
    """Training goes on from ``expected``, says that it is because of ``path``, and ends as it should."""
    outcome = server.run(root=root, text=text, steps=STEPS)
    assert outcome.finished and outcome.resumed == expected, (path, outcome)
    assert len(outcome.warnings) == 1 and path in outcome.warnings[0], outcome
    assert outcome.losses == reference.losses[expected:]
    assert reference.check_run(root)[0] == STEPS


def resume_after_flips(server, reference, text, whole, folder, rng, count):
    """For each flipped bit in a fresh copy: what training makes of it."""
    for number in range(count):
        root = copy_of(whole, folder / f"run{number}")
        reader = LocalStore.read(root)
        parts = parts_of(reader, reader.head())
        path, bit = random_bit(rng, root, parts)
        flip(root / path, bit)
        shared = parts[path] in ("index", "timeline")  # both steps have it, and it can be made again
        check_resumed(server, reference, text, root, NEWEST if shared else NEWEST - 1, path)


@pytest.mark.slow
def test_training_goes_on_after_any_flipped_bit(server, reference, text, whole, tmp_path):
    """From the step before, where the newest one cannot be mended."""
    resume_after_flips(server, reference, text, whole, tmp_path, random.Random(3), RESUMED)


def truncate(path):
    os.truncate(path, os.path.getsize(path) - 1)


def extend(path):
    os.truncate(path, os.path.getsize(path) + 4096)


def empty(path):
    os.truncate(path, 0)


HARMS, PARTS = [truncate, os.unlink, extend, empty], ["blocks.1", "manifest", "index", "timeline"]


def harmed(run, harm, what):
    """A function that returns what ``verify`` finds, and where it should."""
    reader = LocalStore.read(run)
    manifest = reader.head()
    (path,) = [path for path, kind in parts_of(reader, manifest).items() if kind == what]
    harm(run / path)
    return partial(reader.verify, manifest), path


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
def test_a_file_cut_or_gone_is_found(whole, tmp_path, harm):
    for what in PARTS:
        if (what, harm) == ("manifest", os.unlink):  # then there is no such commit
            continue
        verify, path = harmed(copy_of(whole, tmp_path / what), harm, what)
        (error,) = verify()
        assert isinstance(error, (FileMissing, ManifestCorrupt)) and error.path == path and path in str(error)


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("what", PARTS)
def test_training_goes_on_from_a_file_cut_or_gone(server, reference, text, run, harm, what):
    _, path = harmed(run, harm, what)
    if (what, harm) == ("manifest", os.unlink):  # then there is no such commit
        assert server.run(root=run, text=text, steps=STEPS).resumed == NEWEST - 1
    else:
        check_resumed(
            server, reference, text, run, NEWEST if what in ("index", "timeline") else NEWEST - 1, path
        )


def test_swapped_files_are_found_and_training_goes_on(server, reference, text, run):
    """Two blocks have files of one size and one layout."""
    reader = LocalStore.read(run)
    manifest = reader.head()
    one, two = manifest.files["blocks.1"].path, manifest.files["blocks.2"].path
    os.rename(run / one, run / "kept")
    os.rename(run / two, run / one)
    os.rename(run / "kept", run / two)
    found = reader.verify(manifest)
    assert {error.path for error in found} == {one, two}
    assert all(isinstance(error, ChunkCorrupt) for error in found)
    outcome = server.run(root=run, text=text, steps=STEPS)
    assert outcome.resumed == NEWEST - 1 and len(outcome.warnings) == 2
    assert reference.check_run(run)[0] == STEPS


def test_the_file_of_another_step_is_found(server, reference, text, run):
    """Bytes that were right once."""
    reader = LocalStore.read(run)
    newest, older = reader.head(), reader.at(NEWEST - 1)
    path = newest.files["resident"].path
    shutil.copy(run / older.files["resident"].path, run / path)
    (error,) = reader.verify(newest)
    assert isinstance(error, ChunkCorrupt) and error.path == path
    check_resumed(server, reference, text, run, NEWEST - 1, path)


def test_damage_to_all_steps_is_refused_and_nothing_is_written(server, text, run):
    reader = LocalStore.read(run)
    for ref in reader.commits():
        flip(run / reader.load(ref).files["blocks.0"].path, 80_000)
    before = contents(run)
    outcome = server.run(root=run, text=text, steps=STEPS)
    assert outcome.error.startswith("Damaged: ") and outcome.exit_code == 1
    assert "none of its 2 commits is whole" in outcome.error and "blocks.0" in outcome.error
    assert before == contents(run)


@pytest.mark.slow
def test_damage_to_what_all_steps_share_is_refused_and_nothing_is_written(server, text, tmp_path):
    """A frozen parameter is stored once: its loss cannot be mended from the run."""
    run = tmp_path / "run"
    assert server.run(root=run, text=text, steps=3, frozen=True).finished
    path = run / "data/blocks.1.frozen.0.safetensors"
    flip(path, 8 * 5000)
    before = contents(run)
    outcome = server.run(root=run, text=text, steps=STEPS, frozen=True)
    assert outcome.error.startswith("Damaged: ") and outcome.exit_code == 1
    assert "'blocks.1.attention.query.weight/param'" in outcome.error
    assert before == contents(run)
    flip(path, 8 * 5000)
    assert server.run(root=run, text=text, steps=STEPS, frozen=True).resumed == 3


def contents(run):
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
