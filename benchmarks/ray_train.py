"""Ray Train's workers with a Checkpointer: one is killed, Ray starts all again, then other numbers of them go on.

    pip install "ray[train]" && python benchmarks/ray_train.py [--folder FOLDER] [--keep]

Ray is a cluster of its own on this machine, and trains a small model under DDP over gloo. The steps are checked: after
the kill, and with another number of workers, training goes on from the bits of a step that was reached, and the killed
one ends with the bits of one that was not. Seconds are from the kill to the end of the next step; most of them are
Ray's own, and the time until torch is imported. Where a number of workers goes on, it begins a cluster's next job.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from common import finish, options_of, table

STEPS, KILLED_AT = 40, 25
OTHERS = 3, 1
"""The numbers of workers that go on after two, for as many steps again."""


def loop(config: dict[str, Any]) -> None:
    """Train in one worker, and tell each step in a file of its own."""
    import ray.train.torch
    import torch
    import torch.distributed as dist

    import holdfast

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.GELU(), torch.nn.Linear(256, 16))
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def digest() -> str:
        return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()

    def say(**told: Any) -> None:
        line = {**told, "digest": digest(), "time": time.time(), "workers": num_ranks}
        with open(f"{config['out']}/{rank}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")

    killed = Path(config["out"], "killed")
    with holdfast.Checkpointer(config["run"], model=model, optimizer=optimizer) as checkpointer:
        start = checkpointer.resume()
        say(event="began", step=start)
        for step in range(start, config["steps"]):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(12, 16, generator=generator)[rank::num_ranks]
            (model(x) - x.roll(1, 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
            say(event="stepped", step=step + 1)
            time.sleep(0.02)  # as a larger model would take
            if rank == 1 and step + 1 == config["kill"] and not killed.exists():
                killed.write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)


def fit(
    folder: Path, name: str, workers: int, steps: int, kill: int = 0, run: str = ""
) -> list[dict[str, Any]]:
    """Let Ray train, and return what the first worker said."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    out = folder / name
    out.mkdir()
    result = TorchTrainer(
        loop,
        train_loop_config={"out": str(out), "run": run or str(out / "run"), "steps": steps, "kill": kill},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name=name, storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=2)
        ),
    ).fit()
    assert result.error is None, result.error
    return [json.loads(line) for line in (out / "0.jsonl").read_text().splitlines()]


def main() -> None:
    options = options_of(__doc__).parse_args()
    import ray

    ray.init(num_cpus=max(OTHERS), include_dashboard=False, object_store_memory=10**8, log_to_driver=False)
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        folder = Path(place).resolve()
        whole = fit(folder, "whole", 2, STEPS)
        at = {line["step"]: line["digest"] for line in whole}
        cut = fit(folder, "cut", 2, STEPS, kill=KILLED_AT)
        assert all(at[line["step"]] == line["digest"] for line in cut), "other bits than without a kill"
        [again] = [n for n, line in enumerate(cut) if n and line["event"] == "began"]
        killed_at = float((folder / "cut" / "killed").read_text())
        rows: list[dict[str, Any]] = [{
            "workers": 2, "before": "2, killed after step 25", "resumed after step": cut[again]["step"],
            "seconds": round(cut[again + 1]["time"] - killed_at, 1),
        }]  # fmt: skip
        before, last = 2, cut[-1]
        for turn, workers in enumerate(OTHERS, 2):
            said = fit(folder, f"of {workers}", workers, turn * STEPS, run=str(folder / "cut" / "run"))
            assert (said[0]["step"], said[0]["digest"]) == (last["step"], last["digest"]), "another state"
            rows.append({"workers": workers, "before": str(before), "resumed after step": said[0]["step"]})
            before, last = workers, said[-1]
    version = ray.__version__
    ray.shutdown()
    table([list(rows[0]), *([str(row.get(key, "")) for key in rows[0]] for row in rows)])
    finish("ray_train", {"measurement": "two workers", "ray": version, "rows": rows}, options.keep)


if __name__ == "__main__":
    main()
