"""Under torchrun a rank is killed, and training goes on by itself: with all ranks, or with those that are left."""

from __future__ import annotations

import json
import os
import socket
import time

import psutil
import pytest

from combined import one_in, some_of
from dist.world import World
from holdfast.events import read_events
from support.warm_python import TESTS, environment_of, start_torchrun

STEPS = 25


@pytest.fixture(scope="module")
def world():
    with World() as world:
        yield world


def torchrun(kind, root, out, *arguments, killed=-1, pause=0.02, memory=()):
    """A torchrun of the script."""
    out.mkdir(exist_ok=True)
    with (out / "stderr").open("ab") as errors:
        # without sharing a store: else gloo may take addresses of the attempt before
        return start_torchrun(
            *arguments, TESTS / "dist" / "script.py", kind, root, out, STEPS, killed, pause, *memory,
            env=environment_of(GLOO_SOCKET_IFNAME="lo", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
            stdout=errors.fileno(), stderr=errors.fileno(), cwd=out,
        )  # fmt: skip


def kill(node):
    """A node with all that runs on it; its ranks are in sessions of their own."""
    processes = [process := psutil.Process(node.pid), *process.children(recursive=True)]
    for process in processes:
        process.kill()


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def heard(out):
    """What the ranks of each attempt said, by the number of restarts and the rank, with the size of their world."""
    found = {}
    for path in sorted(out.glob("*-of-*")):
        restarts, rank, _, world_size = path.name.split("-")
        said = {"world_size": int(world_size)}
        for line in path.read_text().splitlines():
            said |= json.loads(line)
        found[int(restarts), int(rank)] = said
    return found


@pytest.mark.campaign(keep=1)
@pytest.mark.crash
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind, ranks", one_in(2, ["ddp", "fsdp"], [2, 4]))
def test_a_killed_rank_is_started_again_and_all_go_on(world, tmp_path, kind, ranks):
    cut = killed_and_started_again(world, tmp_path, kind, ranks)
    resumed = {said["resumed"] for (restarts, _), said in cut.items() if restarts == 1}
    told = max(said["durable"] for (restarts, _), said in cut.items() if restarts == 0)
    assert len(resumed) == 1 and told <= resumed.pop() <= 12


@pytest.mark.campaign(keep=1)
@pytest.mark.crash
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_killed_rank_with_a_replica_is_started_again_and_all_go_on_from_memory(world, tmp_path, kind):
    (tmp_path / "memory").mkdir()
    cut = killed_and_started_again(world, tmp_path, kind, 2, memory=[str(tmp_path / "memory")])
    assert {said["resumed"] for (restarts, _), said in cut.items() if restarts == 1} == {11}
    events = [*read_events(tmp_path / "run" / "events.jsonl")]
    assert [event["step"] for event in events if event["event"] == "resumed"] == [11]
    assert os.listdir(tmp_path / "memory") == []


def killed_and_started_again(world, tmp_path, kind, ranks, memory=()):
    """What the ranks said; from where they resumed they had the bits of those of a run that was not cut."""
    process = torchrun(
        kind, tmp_path / "run", tmp_path / "out", f"--nproc-per-node={ranks}", "--max-restarts=2",
        "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1",
        killed=ranks - 1, memory=memory,
    )  # fmt: skip
    assert process.wait(180) == 0, (tmp_path / "out" / "stderr").read_text()[-4000:]
    whole, cut = world.run_undisturbed(ranks, kind=kind, steps=STEPS), heard(tmp_path / "out")
    assert max(restarts for restarts, _ in cut) == 1
    for rank in range(ranks):
        before, after = whole[rank], cut[1, rank]
        assert after["finished"] and after["durable"] == STEPS
        assert after["losses"] == before["losses"][after["resumed"] :]
        assert after["digests"].items() <= before["digests"].items()
    return cut


@pytest.mark.crash
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", some_of(2, ["fsdp", "ddp"]))
def test_a_lost_node_leaves_the_others_to_go_on_with_fewer_ranks(tmp_path, kind):
    """Two nodes of two ranks; one is killed with all that runs on it."""
    arguments = [
        "--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=test",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1",
    ]  # fmt: skip
    out, conf = tmp_path / "out", "--rdzv-conf=last_call_timeout=15,join_timeout=120,is_host="
    nodes = [
        torchrun(kind, tmp_path / "run", out, *arguments, conf + hosts, pause=0.3)
        for hosts in ("true", "false")
    ]
    try:
        end = time.monotonic() + 150
        while not any(said.get("at", 0) >= 8 for said in heard(out).values()):
            assert time.monotonic() < end, (out / "stderr").read_text()[-4000:]
            time.sleep(0.05)
        assert {said["world_size"] for said in heard(out).values()} == {4}
        kill(nodes[1])
        assert nodes[0].wait(180) == 0, (out / "stderr").read_text()[-4000:]
    finally:
        for node in nodes:
            if node.poll() is None:
                kill(node)
            node.wait()
    said = heard(out)
    before = [each for each in said.values() if each["world_size"] == 4]
    after = [each for each in said.values() if each["world_size"] == 2]
    assert all(each.get("finished") and each["durable"] == STEPS for each in after) and len(after) == 2
    resumed = after[0]["resumed"]
    assert max(each["durable"] for each in before) <= resumed
    assert after[0]["digests"][str(resumed)] == before[0]["digests"][str(resumed)]
