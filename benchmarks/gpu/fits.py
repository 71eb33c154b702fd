"""Training out of core on a CUDA device: what it costs, what goes on at once, and whether memory is as planned.

    python benchmarks/gpu/fits.py [--size 350m|1.3b|3b] [--micro-batches 8] [--rows 8] [--steps 20] [--on-host 0.0]
                                  [--delayed 0.0] [--commit-every 1] [--clipping defer|speculate|auto]
                                  [--only speed overlap memory curves kill] [--cases resident vertical ...]
                                  [--folder FOLDER] [--keep] [--small]

* speed: tokens per second of a model that stays on the device, of the engine in both orders, and of DeepSpeed's ZeRO-3
  with parameters and optimizer on the host, where that package can be imported; ``--cases`` leaves some out
* overlap: the part of the time of copies during which something is computed, by torch's profiler; how long the
  operations of each kind took in a step, by the engine's own clock: what takes as long as the step is what binds; and
  whether the host starts kernels in time: the computations of a step, how long the host was at each, how much of that
  its thread computed (the rest it waited, for Python or for autograd's thread), and the part of a step in which kernels
  ran
* memory: the device's and pinned memory at their peaks against the plan
* curves: losses of the resident model and of the engine from the same weights
* kill: the engine is killed (SIGKILL), resumes, and has the losses of a run that was not

The resident model has fp32 masters and sums, computes in bf16 and recomputes each block in the backward pass, as
the engine does. Each case runs in a process of its own. Every step is committed to the SSD unless ``--commit-every``
says otherwise; with 0 and ``--on-host 1`` nothing is written, and what is measured is computing and copies. The kill
commits each step all the same. Prints a table, one line of JSON per measurement, and at the end a line that begins with
``summary``. With ``--device cpu`` it runs where there is no device, and measures nothing that needs one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # read at the first product: the same bits every time

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import finish, options_of, table

import holdfast
from holdfast.models.decoder import Decoder, DecoderConfig
from holdfast.schedule.memory_use import CROSSING

SIZES = {
    "tiny": DecoderConfig(blocks=3, width=64, heads=2, kv_heads=2, vocabulary=256, context=32),
    "350m": DecoderConfig(blocks=24, width=1024, heads=16, kv_heads=16, vocabulary=32000, context=1024),
    "1.3b": DecoderConfig(blocks=24, width=2048, heads=16, kv_heads=16, vocabulary=32000, context=1024),
    "3b": DecoderConfig(blocks=32, width=2560, heads=32, kv_heads=32, vocabulary=32000, context=2048),
}
MEASUREMENTS = ("speed", "overlap", "memory", "curves", "kill")
ENGINES = ("vertical", "horizontal")
CASES = ("resident", *ENGINES, "deepspeed")
CLIPPING = ("none", "defer", "speculate", "auto")
UNREACHED_NORM = 1e6
WARM_UP = 3
"""Steps; after them every buffer has been used."""
LEARNING_RATE = 1e-4


def main() -> None:
    options = parsed()
    if options.case:
        run_case(options)
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here: --device cpu runs the same on the host")
    found: dict[str, dict] = {}

    def case(name: str, *more: str) -> dict:
        """What a case said, once for all measurements."""
        key = " ".join((name, *more))
        if key not in found:
            with folder_of(options) as folder:
                found[key] = in_a_child(options, name, folder, *more)
            seconds = ", ".join(f"{each:.3f}" for each in found[key]["seconds"])
            print(f"{key}: steps of {seconds} s", flush=True)  # what is known if the time runs out
        return found[key]

    measure = {"speed": speed, "overlap": overlap, "memory": memory, "curves": curves, "kill": kill}
    about = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "size": options.size, "micro_batches": options.micro_batches, "rows": options.rows,
        "on_host": options.on_host, "delayed": options.delayed, "steps": options.steps,
        "commit_every": options.commit_every, "clipping": options.clipping,
    }  # fmt: skip
    rows, told = [["", "", "", ""]], []
    for name in options.only:
        result = measure[name](options, case)
        rows += [
            [f"{name}: {what}", *map(str, values), *[""] * (3 - len(values))]
            for what, *values in result.pop("rows")
        ]
        told.append(f"{name}: {result.pop('told')}")
        finish("gpu/fits", {"measurement": name, **about, **result}, options.keep)
    table(rows)
    print(f"summary gpu/fits {options.size}: {'; '.join(told)}")


def parsed() -> argparse.Namespace:
    parser = options_of(__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--size", choices=SIZES, default="350m")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8, help="sequences in a micro-batch")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--on-host", type=float, default=0.0, help="of parameters and optimizer state")
    parser.add_argument("--delayed", type=float, default=0.0)
    parser.add_argument("--commit-every", type=int, default=1, help="steps; 0 writes no commits")
    parser.add_argument("--clipping", choices=CLIPPING, default="none", help="at a norm that no step reaches")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="of speed")
    parser.add_argument("--only", nargs="+", choices=MEASUREMENTS, default=list(MEASUREMENTS))
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--exact", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.small:
        options.size, options.micro_batches, options.rows, options.steps = "tiny", 2, 2, 4
    return options


# Measurements: a result, with the rows of the table


def speed(options: argparse.Namespace, case) -> dict:
    """Tokens per second of each case; the ratio to the resident model's."""
    tokens = options.micro_batches * options.rows * SIZES[options.size].context
    seconds = {name: case(name)["seconds"] for name in options.cases if name != "deepspeed"}
    if "deepspeed" in options.cases and options.device == "cuda" and has_deepspeed():
        with suppress(SystemExit):  # what it lacks here, it has said; the other figures stand without it
            seconds["deepspeed"] = case("deepspeed")["seconds"]
    rates = {name: tokens / statistics.median(found) for name, found in seconds.items()}
    first = next(iter(rates))
    rows = [
        (name, f"{rate:.0f} tokens/s", f"{rate / rates[first]:.2f} of {first}")
        for name, rate in rates.items()
    ]
    told = ", ".join(f"{name} {rate:.0f} tokens/s" for name, rate in rates.items())
    return {"tokens_per_second": rates, "step_seconds": seconds, "rows": rows, "told": told}


def has_deepspeed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def overlap(options: argparse.Namespace, case) -> dict:
    """How much of the copies was hidden, each way."""
    said = case("vertical", "--profiled")
    found, busy = said["overlap"], said["busy_seconds"]
    rows = [(name, f"{one['hidden']:.3f}", f"{one['seconds'] * 1e3:.1f} ms") for name, one in found.items()]
    rows += [(kind, "", f"{seconds * 1e3:.1f} ms") for kind, seconds in busy.items()]
    told = ", ".join(f"{name} {one['hidden']:.1%} hidden" for name, one in found.items()) or "no device"
    longest = ", ".join(f"{kind} {seconds:.2f} s" for kind, seconds in [*busy.items()][:3])
    host, kernels = said["host"], said["kernel_seconds"]
    for kind, one in host.items():
        rows.append(
            (
                f"host: {kind}",
                f"{one['count']:.0f} a step",
                f"{one['ms']:.2f} ms, {one['cpu_ms']:.2f} computed",
            )
        )
    busy_part = kernels / statistics.median(said["seconds"])
    rows.append(("kernels ran", f"{busy_part:.1%}", f"{kernels * 1e3:.1f} ms a step"))
    each = ", ".join(f"{kind} {one['ms']:.2f} ms" for kind, one in host.items())
    told = f"{told}; longest: {longest}; kernels ran {busy_part:.1%} of a step; host: {each}"
    result = {"overlap": found, "busy_seconds": busy, "host": host, "kernel_seconds": kernels}
    return {**result, "kernel_busy": busy_part, "rows": rows, "told": told}


def memory(options: argparse.Namespace, case) -> dict:
    """Bytes at their peaks and as planned."""
    one = case("vertical")
    result = {name: {"measured": one[name], "planned": one["planned"][name]} for name in ("device", "pinned")}
    rows = []
    for name, both in result.items():
        values = (f"{both[key] / 2**20:.1f} MiB" if both[key] else "none" for key in ("measured", "planned"))
        ratio = f"{both['measured'] / both['planned']:.3f}" if both["measured"] and both["planned"] else ""
        rows.append((name, *values, ratio))
    told = ", ".join(f"{row[0]} {row[3]} of the plan" for row in rows if row[3])
    return {"memory": result, "rows": rows, "told": told or "no device"}


def curves(options: argparse.Namespace, case) -> dict:
    """Losses step by step; the largest difference of the two, in parts of the resident's."""
    losses = {name: case(name, "--exact")["losses"] for name in ("resident", "vertical")}
    apart = max(abs(a - b) / abs(a) for a, b in zip(*losses.values(), strict=True))
    rows = [(name, f"{found[0]:.4f}", f"{found[-1]:.4f}") for name, found in losses.items()]
    rows.append(("furthest apart", f"{apart:.2e}"))
    return {"losses": losses, "furthest_apart": apart, "rows": rows, "told": f"{apart:.1e} apart"}


def kill(options: argparse.Namespace, case) -> dict:
    """Losses of a run that was killed half way and resumed, against those of one that was not."""
    committing = argparse.Namespace(**{**vars(options), "commit_every": 1})
    whole = case("vertical", "--exact")["losses"]
    at = len(whole) // 2
    with folder_of(options) as folder:
        before = in_a_child(committing, "vertical", folder, "--exact", kill_after=at)["losses"]
        again = in_a_child(committing, "vertical", folder, "--exact")
    first = again["first"]
    same = before == whole[: len(before)] and again["losses"] == whole[first:]
    rows = [("killed after, resumed from", str(len(before)), str(first), "equal" if same else "NOT equal")]
    told = f"resumed from {first}, {'equal' if same else 'NOT equal'}"
    return {"killed_after": len(before), "resumed_from": first, "equal": same, "rows": rows, "told": told}


@contextmanager
def folder_of(options: argparse.Namespace) -> Iterator[str]:
    folder = tempfile.mkdtemp(dir=options.folder, prefix="holdfast-bench-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def in_a_child(
    options: argparse.Namespace, name: str, folder: str, *more: str, kill_after: int | None = None
) -> dict:
    """A case in a process of its own, which is killed once it has said the loss of ``kill_after`` steps."""
    command = [sys.executable, "-W", "ignore", __file__, "--case", name, "--folder", folder, *more]
    passed = (
        "device",
        "size",
        "micro_batches",
        "rows",
        "steps",
        "on_host",
        "delayed",
        "commit_every",
        "clipping",
    )
    for option in passed:
        command += [f"--{option.replace('_', '-')}", str(getattr(options, option))]
    losses: list[float] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            said = json.loads(line)
            if "loss" not in said:
                return {**said, "losses": losses}
            losses.append(said["loss"])
            if len(losses) == kill_after:
                child.send_signal(signal.SIGKILL)
                return {"losses": losses}
    sys.exit(f"{name} ended with {child.returncode} after {len(losses)} steps")


# One case, in its own process: a line for each loss, and one with the rest


def run_case(options: argparse.Namespace) -> None:
    if options.exact:
        torch.use_deterministic_algorithms(True, warn_only=True)
    training = {"resident": Resident, "deepspeed": DeepSpeed}.get(options.case, OutOfCore)(options)
    seconds, result = [], {"first": training.first}
    for step in range(training.first, options.steps + WARM_UP):
        start = time.perf_counter()
        loss = training.step(batches(options, step))
        if step >= training.first + WARM_UP:
            seconds.append(time.perf_counter() - start)
        print(json.dumps({"loss": loss}), flush=True)
    if options.profiled:
        result["busy_seconds"] = busy(options, training)
        result["host"] = at_host(options, training)
        result |= profiled(options, training)
    print(json.dumps({**result, "seconds": seconds, **training.close()}), flush=True)


def batches(options: argparse.Namespace, step: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that can be learnt: each counts on from a random number."""
    config, generator = SIZES[options.size], torch.Generator().manual_seed(step)
    made = []
    for _ in range(options.micro_batches):
        start = torch.randint(0, config.vocabulary, (options.rows, 1), generator=generator)
        tokens = (start + torch.arange(config.context + 1)) % config.vocabulary
        made.append({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
    return made


def model_of(options: argparse.Namespace) -> Decoder:
    """A model on the host whose first values are drawn on the device, which takes a fraction of the time."""
    torch.manual_seed(0)
    with torch.device(options.device):
        model = Decoder(SIZES[options.size])
    return model.cpu()


class Resident:
    """Everything on the device: fp32 masters, sums of gradients and moments, bf16 to compute with."""

    first = 0

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = options.device
        model = model_of(options).to(self.device)
        self.masters = [p.detach().clone() for p in model.parameters()]
        self.model = model.bfloat16()
        for block in self.model.blocks:
            block.forward = recomputed(block)
        self.optimizer = torch.optim.AdamW(self.masters, lr=LEARNING_RATE, fused=True)

    def step(self, batches: list[dict[str, torch.Tensor]]) -> float:
        losses = []
        for batch in batches:
            loss = self.model(**{name: value.to(self.device) for name, value in batch.items()})
            (loss / len(batches)).backward()
            losses.append(loss.detach())
            for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
                grad, parameter.grad = parameter.grad.float(), None
                master.grad = grad if master.grad is None else master.grad.add_(grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
                parameter.copy_(master)
        return float(torch.stack(losses).mean())

    def close(self) -> dict:
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else None
        return {"device": peak, "pinned": None, "planned": {"device": None, "pinned": None}}


def recomputed(block: nn.Module):
    forward = block.forward
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


class OutOfCore:
    """The engine, in the folder that the case was given."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, model = options, model_of(options)
        self.engine = holdfast.offload(
            model,
            torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE),
            Path(options.folder) / "run",
            device=options.device,
            precision="bf16",
            schedule=options.case,
            placement=holdfast.Placement(
                params_on_host=options.on_host,
                optimizer_on_host=options.on_host,
                delayed_fraction=options.delayed if options.case == "vertical" else 0.0,
            ),
            sample=batches(options, 0)[0],
            micro_batches=options.micro_batches,
            durability=holdfast.Durability(commit_every=options.commit_every),
            clipping=None
            if options.clipping == "none"
            else holdfast.Clipping(UNREACHED_NORM, options.clipping),
        )
        self.first = self.engine.steps_done

    def step(self, batches: list[dict[str, torch.Tensor]]) -> float:
        return self.engine.step(batches)

    def close(self) -> dict:
        measured = {
            "device": self.engine.last.get("device_bytes"),
            "pinned": self.engine.last.get("pinned_bytes"),
        }
        self.engine.close()
        lines = (Path(self.options.folder) / "run" / "events.jsonl").read_text().splitlines()
        told = [event for event in map(json.loads, lines) if event["event"] == "engine"][-1]
        planned = {"device": told["device_bytes_predicted"], "pinned": None}
        if not told["unified"]:
            planned["pinned"] = sum(told["memory_predicted"]["host"].get(what, 0) for what in CROSSING)
        return {**measured, "planned": planned}


class DeepSpeed:
    """ZeRO-3 in bf16, fp32 masters, parameters and optimizer on the host, activations recomputed. Writes nothing."""

    first = 0

    def __init__(self, options: argparse.Namespace) -> None:
        import deepspeed

        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))
        model = model_of(options)
        for block in model.blocks:
            block.forward = recomputed(block)
        on_host = {"device": "cpu", "pin_memory": True}
        self.device = options.device
        self.engine, *_ = deepspeed.initialize(
            model=model,
            config={
                "train_micro_batch_size_per_gpu": options.rows,
                "gradient_accumulation_steps": options.micro_batches,
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": 3, "offload_optimizer": on_host, "offload_param": on_host},
                "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
            },
        )

    def step(self, batches: list[dict[str, torch.Tensor]]) -> float:
        losses = []
        for batch in batches:
            loss = self.engine(**{name: value.to(self.device) for name, value in batch.items()})
            self.engine.backward(loss)
            self.engine.step()  # updates after the last of a step's micro-batches
            losses.append(loss.detach())
        return float(torch.stack(losses).mean())

    def close(self) -> dict:
        return {
            "device": torch.cuda.max_memory_allocated(), "pinned": None, "planned": {"device": None, "pinned": None}
        }  # fmt: skip


# Overlap


def busy(options: argparse.Namespace, training: OutOfCore, steps: int = 3) -> dict[str, float]:
    """Seconds per step of each kind of operation, the longest first; several threads may have done them."""
    spans: list = []
    total = Counter[str]()
    training.engine.trace(spans)
    for step in range(steps):
        training.step(batches(options, step))
    training.engine.wait()
    training.engine.trace(None)
    for span in spans:
        total[f"{span.lane}: {span.key.kind}"] += (span.end - span.start) / steps
    return dict(total.most_common())


def at_host(options: argparse.Namespace, training: OutOfCore, steps: int = 3) -> dict[str, dict[str, float]]:
    """By kind of computation: how many a step has, and the time and processor time of the thread that starts one."""
    handlers = training.engine._executor._handlers
    spent: dict[str, list[tuple[float, float]]] = {"forward": [], "backward": []}

    def timed(kind: str, handler):
        def handle(op, step):
            wall, cpu = time.perf_counter(), time.thread_time()
            over = handler(op, step)
            spent[kind].append((time.perf_counter() - wall, time.thread_time() - cpu))
            return over

        return handle

    before = {kind: handlers[kind] for kind in spent}
    handlers.update({kind: timed(kind, handler) for kind, handler in before.items()})
    for step in range(steps):
        training.step(batches(options, step))
    handlers.update(before)
    means = {kind: [1e3 * statistics.mean(each) for each in zip(*times)] for kind, times in spent.items()}
    return {
        kind: {"count": len(spent[kind]) / steps, "ms": wall, "cpu_ms": cpu}
        for kind, (wall, cpu) in means.items()
    }


def profiled(options: argparse.Namespace, training: OutOfCore, steps: int = 3) -> dict:
    """Copies of some steps that follow each other: seconds, and the part of them during which a kernel ran.

    Also the time of a step in which kernels ran.
    """
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CUDA] if options.device == "cuda" else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        for step in range(steps):
            training.step(batches(options, step))
    trace = Path(options.folder) / "trace.json"
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    kernels = sum(end - start for start, end in joined(spans(events, "kernel", ""))) / 1e6
    return {"overlap": hidden(events), "kernel_seconds": kernels / steps}


def hidden(events: list[dict]) -> dict:
    """By direction, of the events of a trace, whose times are microseconds."""
    kernels = joined(spans(events, "kernel", ""))
    found = {}
    for name in ("HtoD", "DtoH"):
        copies = joined(spans(events, "gpu_memcpy", name))
        seconds = sum(end - start for start, end in copies)
        if seconds:
            found[name] = {"hidden": shared(copies, kernels) / seconds, "seconds": seconds / 1e6}
    return found


def spans(events: list[dict], category: str, name: str) -> list[tuple[float, float]]:
    chosen = (e for e in events if e.get("cat") == category and name in e["name"])
    return [(float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in chosen]


def joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time, in spans that do not touch, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def shared(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
    """The time in both, each as ``joined`` gives it."""
    total, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        total += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total


if __name__ == "__main__":
    main()
