"""What reshard.py does with DeepSpeed: a ZeRO checkpoint converted, and resumed by other ranks, by either library.

Everything is a command, from its start to its end, and the times are those of commands: importing torch is in all of
them, importing DeepSpeed in those of DeepSpeed. What that alone takes are cases of their own, "start of ...": the same
command with nothing converted, loaded or resumed. Ratios are of whole commands, and of what is beyond their starts.
Four ranks wrote what two take: DeepSpeed's engine from a universal folder ("deepspeed load"), the same engine from the
checkpoint itself ("load", of holdfast.integrations.deepspeed), and FSDP2 with a Checkpointer, whose base is
durable ("resume"). As a script it is what the ranks do, under an interpreter that has what they need.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from common import forget, in_a_process, interleaved, paired_ratio
from torch import nn

WRITERS, READERS = 4, 2
LAYERS = 12


def compare(folder: Path, peers: str, stage: int, mib: int, rounds: int) -> dict:
    """Seconds of each command over a ZeRO-``stage`` checkpoint of ``mib`` MiB of parameters, and what they took of the
    disk for the time being. ``peers`` is a Python that has DeepSpeed."""
    source = folder / "source"
    ranks(peers, WRITERS, "write", source, mib, stage)
    cases = {
        "start of ds_to_universal": partial(imported, peers, "deepspeed.checkpoint.ds_to_universal"),
        "ds_to_universal": partial(ds_to_universal, peers, source, folder / "theirs", stage),
        "start of convert": partial(imported, sys.executable, "holdfast.cli.convert"),
        "convert": partial(convert, source, folder / "ours", stage),
        "convert to a run": partial(convert, source, folder / "run", None),
        "start of deepspeed load": partial(ranks, peers, READERS, "start_deepspeed", source, mib, stage),
        "deepspeed load": partial(ranks, peers, READERS, "load", folder / "theirs", mib, stage),
        "start of load": partial(ranks, peers, READERS, "start_live", source, mib, stage),
        "load": partial(ranks, peers, READERS, "load_live", source, mib, stage),
        "start of resume": partial(ranks, sys.executable, READERS, "start", source, mib, stage),
        "resume": partial(ranks, sys.executable, READERS, "resume", source, mib, stage),
    }
    made = {"ds_to_universal": "theirs", "convert": "ours", "convert to a run": "run"}

    def prepare(case: str) -> None:
        shutil.rmtree(folder / made.get(case, "none"), ignore_errors=True)
        shutil.rmtree(folder / "resumed", ignore_errors=True)
        forget(folder)

    temporary = {}
    for case, name in made.items():
        prepare(case)
        most, left = most_bytes(folder / name, cases[case])
        temporary[case] = most - left
    seconds = interleaved(cases, rounds, warm_up=0, before=prepare)
    started = {f"beyond {case}": beyond(seconds, case) for case in cases if f"start of {case}" in cases}
    return {
        "stage": stage, "parameter_bytes": parameters(mib) * 4, "source_bytes": bytes_in(source), "seconds": seconds,
        "temporary_bytes": temporary, "first_base_seconds": first_base_seconds(folder / "resumed"),
        "converted_faster": paired_ratio(seconds["ds_to_universal"], seconds["convert"]),
        "resumed_faster": paired_ratio(added(seconds, "ds_to_universal", "deepspeed load"), seconds["resume"]),
        "loaded_faster": paired_ratio(added(seconds, "ds_to_universal", "deepspeed load"), seconds["load"]),
        "loaded_faster_beyond_start": paired_ratio(
            added(started, "beyond ds_to_universal", "beyond deepspeed load"), started["beyond load"]
        ),
        "converted_faster_beyond_start": paired_ratio(started["beyond ds_to_universal"], started["beyond convert"]),
        "resumed_faster_beyond_start": paired_ratio(
            added(started, "beyond ds_to_universal", "beyond deepspeed load"), started["beyond resume"]
        ),
    }  # fmt: skip


def beyond(seconds: dict[str, list[float]], case: str) -> list[float]:
    """What a case takes after its start, round by round."""
    return [a - b for a, b in zip(seconds[case], seconds[f"start of {case}"], strict=True)]


def added(seconds: dict[str, list[float]], *cases: str) -> list[float]:
    return [sum(each) for each in zip(*(seconds[case] for case in cases), strict=True)]


def first_base_seconds(run: Path) -> float:
    """Of a resumption: how long the base took that makes the new run durable by itself, before `resume` returned."""
    from holdfast.events import read_events  # which the peers' Python does not have

    times = {event["event"]: event["time"] for event in read_events(run / "events.jsonl")}
    return times["base"] - times["began_from"]


def imported(python: str, module: str) -> None:
    in_a_process(python, "-c", f"import {module}")


def ranks(python: str, count: int, *arguments: object) -> None:
    """What this file does as a script, by so many ranks."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    in_a_process(python, *torchrun, __file__, *map(str, arguments))


def ds_to_universal(python: str, source: Path, made: Path, stage: int) -> None:
    tag = (source / "latest").read_text().strip()
    folders = ["--input_folder", source / tag, "--output_folder", made / tag]
    inject = [] if stage == 3 else ["--inject_missing_state"]
    made.mkdir()
    in_a_process(python, "-m", "deepspeed.checkpoint.ds_to_universal", *map(str, folders), *inject)
    (made / "latest_universal").write_text(tag)


def convert(source: Path, made: Path, stage: int | None) -> None:
    to = ["--to", "holdfast"] if stage is None else ["--to", "deepspeed", "--stage", str(stage)]
    in_a_process(sys.executable, "-m", "holdfast", "convert", str(source), str(made), *to)


def most_bytes(folder: Path, run: Callable[[], None]) -> tuple[int, int]:
    """How many bytes there were in ``folder`` at most while it ran, looked at often, and how many are left."""
    most, ended = 0, threading.Event()

    def look() -> None:
        nonlocal most
        while not ended.wait(0.02):
            most = max(most, bytes_in(folder))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        run()
    finally:
        ended.set()
        looking.join()
    left = bytes_in(folder)
    return max(most, left), left


def bytes_in(folder: Path) -> int:
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(where, name)).st_size
            except FileNotFoundError:  # it was removed meanwhile
                continue
    return total


def model_of(mib: int) -> nn.Module:
    """About so many MiB of parameters in fp32, in the layers of an encoder, without values."""
    width = max(1, int((mib * 2**20 / 4 / LAYERS / 12) ** 0.5) // 32) * 32
    with torch.device("meta"):
        layers = [nn.TransformerEncoderLayer(width, width // 32, 4 * width, 0.0) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def parameters(mib: int) -> int:
    return sum(parameter.numel() for parameter in model_of(mib).parameters())


def engine_of(mib: int, stage: int, universal: bool):
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    deepspeed.init_distributed("gloo")
    model = model_of(mib).to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    config = {
        "train_batch_size": deepspeed.comm.get_world_size(),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
        "checkpoint": {"load_universal": universal},
    }
    optimizer = torch.optim.AdamW(model.parameters())
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def write(folder: str, mib: int, stage: int) -> None:
    """Train one step, and save it."""
    engine = engine_of(mib, stage, universal=False)
    width = engine.module[0].linear1.in_features
    engine.backward(engine(torch.randn(2, 1, width)).square().mean())
    engine.step()
    engine.save_checkpoint(folder)


def start_deepspeed(folder: str, mib: int, stage: int) -> None:
    engine_of(mib, stage, universal=True)


def load(folder: str, mib: int, stage: int) -> None:
    engine_of(mib, stage, universal=True).load_checkpoint(folder)


def start_live(folder: str, mib: int, stage: int) -> None:
    from holdfast.integrations.deepspeed import load

    assert load
    engine_of(mib, stage, universal=False)


def load_live(folder: str, mib: int, stage: int) -> None:
    from holdfast.integrations.deepspeed import load

    assert load(engine_of(mib, stage, universal=False), folder) == 1


def sharded(mib: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model under FSDP2 and its optimizer, without values."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = fully_shard(model_of(mib), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model.to_empty(device="cpu")
    return model, torch.optim.AdamW(model.parameters())


def start(folder: str, mib: int, stage: int) -> None:
    import holdfast

    assert holdfast.Checkpointer
    sharded(mib)


def resume(folder: str, mib: int, stage: int) -> None:
    import holdfast

    model, optimizer = sharded(mib)
    run = Path(folder).parent / "resumed"
    assert holdfast.Checkpointer(run, model=model, optimizer=optimizer).resume(source=folder) == 1


if __name__ == "__main__":
    what, where, *sizes = sys.argv[1:]
    {each.__name__: each for each in (write, load, load_live, resume, start, start_deepspeed, start_live)}[
        what
    ](where, *map(int, sizes))
    torch.distributed.barrier()
    os._exit(0)  # a process that ends after this aborts now and then, in torch and in DeepSpeed
