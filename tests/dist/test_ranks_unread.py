"""Ranks that do not get back all that they wrote: what is named as the way out, all of them can have."""

from __future__ import annotations

import json
import os
import re
import shutil

import pytest

from dist.unread import lose
from dist.world import ended
from holdfast.checkpoint.recovery.lineage import Lineage
from holdfast.cli.inspect import ls, show
from holdfast.errors import Unreadable
from holdfast.store.disk import Disk
from holdfast.store.log.segments import segments
from holdfast.store.run_store import LocalStore

RUN = {"kind": "fsdp", "steps": 20, "base_every": 1000}


@pytest.fixture(scope="module")
def begun(world, tmp_path_factory):
    """A run begun three times, so that there are three segments of each stream: from steps 1, 7 and 14 on; and the
    state by step."""
    root, digests = tmp_path_factory.mktemp("begun") / "run", {}
    for steps in (6, 13, 20):
        digests |= ended(world.run(2, root=root, keep_last=9, **RUN | {"steps": steps}))[0]["digests"]
    return root, digests


@pytest.fixture
def run(begun, tmp_path):
    shutil.copytree(begun[0], tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("lost", [{"0": 16, "1": 12}, {"0": 12, "1": 16}, {"0": 12}, {"1": 12}])
def test_the_step_that_is_named_is_one_that_every_rank_can_have(world, begun, run, lost):
    refused = world.run(2, root=run, unread=lost, **RUN)
    for rank, said in enumerate(refused):
        assert re.search(r"resume\(step=(\d+)\)", said["error"])[1] == "11", said
        assert said["error"].startswith("Unreadable" if str(rank) in lost else "RankFailed")
    [said, *_] = ended(world.run(2, root=run, unread=lost, resume={"step": 11}, **RUN))
    assert said["resumed"] == 11 and said["digests"]["11"] == begun[1]["11"]


@pytest.fixture
def read_anew(monkeypatch):
    monkeypatch.setattr(os, "preadv", os.preadv)


def line_of(run):
    with LocalStore.read(run) as store:
        return Lineage.of(store, store.load(store.line()[-1]), None)


@pytest.mark.parametrize("streams", [("rank-00000", "rank-00001"), ("rank-00001", "rank-00000")])
def test_of_two_streams_that_cannot_be_read_the_one_that_ends_first_is_named(run, read_anew, streams):
    for stream, place in zip(streams, (1, 2), strict=True):
        lose(run / segments(Disk(run), stream)[place].path)
    with pytest.raises(Unreadable) as raised:
        line_of(run)
    assert raised.value.step == 6


def test_what_follows_the_end_of_another_stream_needs_not_be_read(run, read_anew):
    (run / segments(Disk(run), "rank-00001")[1].path).unlink()
    lose(run / segments(Disk(run), "rank-00000")[2].path)
    line = line_of(run)
    assert (line.step, line.damage and line.damage.path) == (6, "journal/rank-00001")


@pytest.mark.parametrize("harm", [lose, os.unlink], ids=["unreadable", "missing"])
def test_commands_name_the_step_that_every_stream_reaches(run, read_anew, capsys, harm):
    """The first stream cannot be read after step 13, the second not after step 6."""
    lose(run / segments(Disk(run), "rank-00000")[2].path)
    harm(run / segments(Disk(run), "rank-00001")[1].path)
    show(str(run), as_json=True)
    assert json.loads(capsys.readouterr().out)["step"] == 6
    ls(run, as_json=True)
    assert [entry["records_to"] for entry in json.loads(capsys.readouterr().out)] == [6]
