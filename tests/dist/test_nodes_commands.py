"""The commands on a run whose nodes have a directory each, which are named together."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import xxhash

from dist.world import ended
from holdfast.cli.diff import compare
from holdfast.cli.foreign_states import with_sources
from holdfast.cli.inspect import show, verify
from holdfast.cli.maintenance import compact_run, prune_run
from holdfast.errors import BadInput, RunMismatch
from holdfast.store.commit.retention import Keep
from holdfast.store.reader import RunReader

ORDER = {"kind": "fsdp", "nodes": [0, 1, 2], "save_every": 3}


def joined(folder, *nodes):
    return ",".join(str(folder / f"run-{node}") for node in nodes)


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    """A run of three ranks in a shared directory, and the same in three: their parent."""
    folder = tmp_path_factory.mktemp("runs")
    ended(world.run(3, kind="fsdp", root=folder / "shared", steps=8, save_every=3))
    ended(world.run(3, root=folder / "run", steps=8, **ORDER))
    return folder


@pytest.mark.parametrize("nodes", [(0, 1, 2), (2, 0)], ids=["all", "without one, whose partner has its copy"])
def test_the_directories_are_read_as_one_run(runs, nodes, capsys):
    name = joined(runs, *nodes)
    assert verify(name, as_json=True)
    assert json.loads(capsys.readouterr().out)["records_to"] == 8
    show(name, as_json=True)
    assert json.loads(capsys.readouterr().out)["ranks"] == 3
    for step in ("", "@7"):  # replayed by the records of all nodes
        found = with_sources([name + step, f"{runs / 'shared'}{step}"], compare)
        assert found["equal"], found


def test_a_share_that_is_nowhere_is_damage(runs, capsys):
    assert not verify(joined(runs, 0), as_json=True)  # with the copy of its partner's share
    damaged = json.loads(capsys.readouterr().out)["damaged"]
    assert damaged and all("rank-00001" in each["path"] for each in damaged)


def test_directories_of_two_runs_are_refused(world, runs, tmp_path):
    ended(world.run(3, root=tmp_path / "run", steps=2, **ORDER))
    with pytest.raises(RunMismatch, match="two runs"):
        verify(f"{joined(runs, 0)},{joined(tmp_path, 1)}", as_json=True)


def test_a_node_with_a_directory_of_another_run_is_refused(world, runs, tmp_path):
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    ended(world.run(3, root=tmp_path / "other/run", steps=2, **ORDER))
    shutil.rmtree(tmp_path / "run-1")
    shutil.move(tmp_path / "other/run-1", tmp_path / "run-1")
    for said in world.run(3, root=tmp_path / "run", steps=9, **ORDER):
        assert (
            "RunMismatch" in said["error"]
            and "of rank 0 and the directory of rank 1 hold two runs" in said["error"]
        )


def test_pruned_nodes_keep_what_the_newest_base_needs(world, runs, tmp_path, capsys):
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    name = joined(tmp_path, 0, 1, 2)
    before = {*tmp_path.glob("run-*/partner/data/*")}
    prune_run(name, Keep(1), dry_run=True, as_json=True)
    planned = json.loads(capsys.readouterr().out)
    assert planned["commits"] and before == {*tmp_path.glob("run-*/partner/data/*")}
    prune_run(name, Keep(1), dry_run=False, as_json=True)
    assert json.loads(capsys.readouterr().out) == planned | {"dry_run": False}
    for node in range(3):
        assert len(RunReader(tmp_path / f"run-{node}").commits()) == 1
    assert len({*tmp_path.glob("run-*/partner/data/*")}) < len(before)
    assert verify(name, as_json=True)
    shutil.rmtree(tmp_path / "run-1")
    said = ended(world.run(3, root=tmp_path / "run", steps=9, **ORDER))
    assert said[0]["resumed"] == 8


def test_some_of_the_nodes_are_not_pruned(runs, tmp_path):
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    before = {*tmp_path.glob("run-*/*/*")}
    with pytest.raises(BadInput, match="the share of rank-00001 of step"):
        prune_run(joined(tmp_path, 0, 2), Keep(1), dry_run=False, as_json=True)
    assert {*tmp_path.glob("run-*/*/*")} == before


def test_a_commit_that_only_one_node_has_keeps_its_files_on_all(runs, tmp_path, capsys):
    """A kill while it was published. It names files of an earlier commit again, as frozen parameters have it."""
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    first = RunReader(tmp_path / "run-0")
    newest, earlier, *_ = map(first.load, first.line())
    shares = {}
    for stream, share in newest.shares.items():
        share = replace(share, files=dict(earlier.shares[stream].files))
        text = json.dumps(share.to_json()).encode()
        digest = xxhash.xxh3_128_hexdigest(text)
        (tmp_path / "run-0" / "index" / f"{digest}.json").write_bytes(text)
        shares[stream] = replace(share, path=f"index/{digest}.json", bytes=len(text), xxh3_128=digest)
    for node in range(3):
        (tmp_path / f"run-{node}" / newest.path).unlink()
    (tmp_path / "run-0" / newest.path).write_bytes(newest.with_shares(shares).encode())
    name = joined(tmp_path, 0, 1, 2)
    assert verify(name, as_json=True)
    prune_run(name, Keep(1), dry_run=False, as_json=True)
    assert verify(name, as_json=True)
    for lost in range(3):
        assert verify(joined(tmp_path, *({0, 1, 2} - {lost})), as_json=True)


@pytest.mark.parametrize("nodes", [(0, 1, 2), (0,)])
def test_what_would_change_shares_is_refused(runs, nodes):
    with pytest.raises(BadInput, match="several nodes"):
        compact_run(joined(runs, *nodes), None, as_json=True)
    if len(nodes) == 1:
        with pytest.raises(BadInput, match="several nodes"):
            prune_run(joined(runs, *nodes), Keep(1), dry_run=False, as_json=True)
