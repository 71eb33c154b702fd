"""What the loss of a node with its disk costs, where nodes share no directory, and what the copies at partners cost.

    python benchmarks/node_loss.py [--kills 100] [--width 256] [--pause 0.03] [--folder FOLDER] [--keep] [--small]

Four nodes of one rank under torchrun, each with a directory of its own on this machine, train a small model under
FSDP2; torchrun starts all ranks again when one has died. Some random steps after each start a random node removes its
directory and kills itself, between its optimizer's step and the moment at which the step is acknowledged. Counted are
the steps that were lost, those that had been acknowledged and were lost, which must be none, and the seconds from the
kill to the next step, with the start of Python and torch. At the end the state is compared bit for bit with that of a
job that was never killed.

What the copies cost is measured on the same job without kills, in turn: nothing kept, one directory that all share, and
a directory for each node. Overhead is the median time of a step beside that of the job that keeps nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

BEGAN = time.time()
from common import finish, options_of, table  # noqa: E402  (imports torch, which is counted)

NODES = 4
LEAST_GAP, MOST_GAP = 2, 12
"""The fewest and the most steps from a start to the next kill."""


def main() -> None:
    parser = options_of(__doc__ or "")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument(
        "--width", type=int, default=256, help="of the model; it has 16 times its square parameters"
    )
    parser.add_argument(
        "--pause", type=float, default=0.03, help="seconds that a step computes on a device, say"
    )
    parser.add_argument("--steps", type=int, default=60, help="of each job that is timed")
    parser.add_argument("--rounds", type=int, default=5, help="in which each way to keep steps is timed once")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.small:
        options.kills, options.width, options.pause, options.steps, options.rounds = 2, 32, 0.0, 6, 1
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = {"nodes": NODES, "kills": options.kills}
        result |= killed(Path(folder), options)
        result |= timed(Path(folder), options)
    finish("node_loss", result, options.keep)


def killed(folder: Path, options: Any) -> dict[str, Any]:
    """Return what the kills cost."""
    job = {"width": options.width, "pause": options.pause, "seed": options.seed, "kills": options.kills}
    torchrun(folder / "cut", options.kills, **job, way="nodes", wait=True)
    starts = read(folder / "cut")
    kills = [(before, after) for before, after in pairwise(starts)]
    lost = [max(each["done"] for each in before) - after[0]["resumed"] for before, after in kills]
    broken = [max(each["durable"] for each in before) - after[0]["resumed"] for before, after in kills]
    back = [
        max(each["first_step"] for each in after) - max(each["last"] for each in before)
        for before, after in kills
    ]
    times = [{"killed": max(each["last"] for each in before)} | {
        name: max(each[name] for each in after) for name in ("began", "imported", "ready", "recovered", "first_step")
    } for before, after in kills]  # fmt: skip
    parts = {
        f"{first} to {second}": statistics.median(each[second] - each[first] for each in times)
        for first, second in pairwise(times[0])
    }
    steps = starts[-1][0]["done"]
    torchrun(folder / "whole", 0, **{**job, "kills": 0, "steps": steps}, way="nothing", wait=False)
    whole = read(folder / "whole")[-1]
    found = {
        "lost_steps": sorted(lost), "acknowledged_lost": max(0, *broken, 0), "seconds_back": sorted(back),
        "parts": parts,
        "tiers": sum(each[0]["from_partner"] for each in starts[1:]),
        "same_bits": [each["digest"] for each in starts[-1]] == [each["digest"] for each in whole],
    }  # fmt: skip
    table([
        ["kills", "most steps lost", "acknowledged and lost", "seconds back (median, most)", "same bits"],
        [str(len(kills)), str(max(lost)), str(found["acknowledged_lost"]),
         f"{statistics.median(back):.1f}, {max(back):.1f}", str(found["same_bits"])],
    ])  # fmt: skip
    assert len(kills) == options.kills and found["acknowledged_lost"] == 0 and found["same_bits"], found
    return found


def timed(folder: Path, options: Any) -> dict[str, Any]:
    """Return the median seconds of a step under each way, and what two of them add to that of the first."""
    seconds: dict[str, list[float]] = {"nothing": [], "shared": [], "nodes": []}
    for turn in range(options.rounds):
        for way, times in seconds.items():
            place = folder / f"{way}-{turn}"
            torchrun(place, 0, width=options.width, pause=options.pause, seed=0, kills=0, steps=options.steps,
                     way=way, wait=False)  # fmt: skip
            times.append(max(each["step_seconds"] for each in read(place)[-1]))
            for directory in folder.glob(f"{place.name}*"):
                shutil.rmtree(directory)
    overhead = {
        way: 100 * (statistics.median(a / b for a, b in zip(times, seconds["nothing"], strict=True)) - 1)
        for way, times in seconds.items()
    }
    points = statistics.median(
        100 * (a - b) / c
        for a, b, c in zip(seconds["nodes"], seconds["shared"], seconds["nothing"], strict=True)
    )
    table([
        ["", *seconds],
        ["step (ms)", *(f"{1000 * statistics.median(times):.1f}" for times in seconds.values())],
        ["overhead (%)", *(f"{each:.1f}" for each in overhead.values())],
    ])  # fmt: skip
    print(f"The copies cost {points:.1f} points.")
    return {"step_seconds": seconds, "overhead_percent": overhead, "copies_points": points}


def torchrun(place: Path, restarts: int, **job: Any) -> None:
    """Have torchrun run the job to its end."""
    place.mkdir(parents=True)
    source = Path(__file__).parent.parent / "src"
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={NODES}", f"--max-restarts={restarts + 3}",
        "--monitor-interval=0.1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1",
        __file__, "--rank", str(place), json.dumps(job),
    ]  # fmt: skip
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    with (place / "stderr").open("wb") as errors:
        done = subprocess.run(command, env=environment, stdout=errors, stderr=errors, check=False)
    assert done.returncode == 0, (place / "stderr").read_text()[-6000:]


def read(place: Path) -> list[list[dict[str, Any]]]:
    """Return what each rank of each start said last, by the number of restarts."""
    starts: dict[int, list[dict[str, Any]]] = {}
    for path in sorted(
        place.glob("said-*"), key=lambda path: [int(part) for part in path.name.split("-")[1:]]
    ):
        said: dict[str, Any] = {}
        for line in path.read_text().splitlines():
            said |= json.loads(line)
        if "resumed" in said and "done" in said:
            starts.setdefault(int(path.name.split("-")[1]), []).append(said)
    return [each for _, each in sorted(starts.items())]


def work(place: Path, job: dict[str, Any]) -> None:
    """What a rank does."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import holdfast

    imported = time.time()
    dist.init_process_group("gloo")
    rank, start = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(0)
    width = job["width"]
    model = nn.Sequential(nn.Linear(width, 8 * width), nn.ReLU(), nn.Linear(8 * width, width))
    model = fully_shard(model, mesh=init_device_mesh("cpu", (NODES,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)
    chance = random.Random(f"{job['seed']} {start}")
    victim, gap = chance.randrange(NODES), chance.randint(LEAST_GAP, MOST_GAP)
    file = open(place / f"said-{start}-{rank}", "a", buffering=1)  # noqa: SIM115 (until the process ends)

    def say(**what: Any) -> None:
        print(json.dumps(what), file=file)

    root = f"{place}-disk-{rank}" if job["way"] == "nodes" else f"{place}-disk"
    options = {"nodes": holdfast.LocalDisks(node=rank)} if job["way"] == "nodes" else {}
    kept = None
    if job["way"] != "nothing":
        kept = holdfast.Checkpointer(
            root, model=model, optimizer=optimizer, wait_each_step=job["wait"], base_every=20, memory="256 MiB",
            deadline_seconds=60, **options,
        )  # fmt: skip
    ready = time.time()
    done = 0 if kept is None else kept.resume()
    say(began=BEGAN, imported=imported, ready=ready, recovered=time.time())
    say(resumed=done, done=done, durable=done, last=time.time(), from_partner=was_from_partner(place, start))
    last = job.get("steps", done + gap if start >= job["kills"] else done + gap + 100)
    times = []
    for step in range(done + 1, last + 1):
        began = time.perf_counter()
        model(torch.randn(16, width)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(job["pause"])
        say(done=step, last=time.time())
        if start < job["kills"] and step == done + gap and rank == victim:
            if job["way"] == "nodes":
                shutil.rmtree(root)
            os.kill(os.getpid(), signal.SIGKILL)
        if kept is not None:
            kept.step()
            say(durable=kept.durable_step)
        if step == done + 1:
            say(first_step=time.time())
        times.append(time.perf_counter() - began)
    if kept is not None:
        kept.close()
    parts = [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    held = [part.to_local() if hasattr(part, "to_local") else part for part in parts]
    text = b"".join(part.detach().contiguous().numpy().tobytes() for part in held)
    say(digest=hashlib.sha256(text).hexdigest(), step_seconds=statistics.median(times or [0.0]))
    dist.destroy_process_group()


def was_from_partner(place: Path, start: int) -> bool:
    """Return whether the log of rank 0 says that a share came from a partner in this start."""
    log = Path(f"{place}-disk-0") / "events.jsonl"
    if not log.exists():
        return start > 0  # rank 0's disk is the one that was lost
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    found = [line for line in lines if line["event"] == "shares"]
    return bool(found) and "partner" in found[-1]["tiers"].values()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        work(Path(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        main()
