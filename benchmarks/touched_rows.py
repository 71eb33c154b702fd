"""What it saves and costs to leave rows of zeros out of records.

    python benchmarks/touched_rows.py [--models words experts dense] [--rounds 5] [--steps 12]
                                      [--folder FOLDER] [--keep] [--small]

``words`` is an embedding of 131,072 rows of which a step touches some 2,000; ``experts`` a stack of 64 experts of which
a step calls 4; of ``dense`` every gradient is dense. One training goes on and on, and three arms take turns on it: no
record, whole records (as before rows were left out), and records as they are. Each turn has a fresh folder, some steps
that do not count, and ``--steps`` steps that do; it ends when all of them are durable. Told is by how much a step is
longer than without a record, and how much more it takes of the processors, which other work on the machine changes
less; and the recorder's seconds for one record: packing, hashing, writing and syncing. After each turn its last step is
resumed, and compared bit for bit. Prints a table and one line of JSON with every measurement.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import finish, options_of, table
from torch import nn

from holdfast import Checkpointer, Exact
from holdfast.quantities import format_bytes

WARM_UP = 3
Found = dict[str, dict[str, list[float]]]


class Whole(Exact):
    """The codec of records that hold rows of zeros, too."""

    def pack(self, about: dict[str, Any], parts: tuple[memoryview, ...]) -> tuple[memoryview, ...]:
        return parts


ARMS: dict[str, Exact | None] = {"none": None, "whole": Whole(), "rows": Exact()}


class Words(nn.Module):
    """An embedding and a small network behind it."""

    def __init__(self, words: int, width: int, tokens: int) -> None:
        super().__init__()
        self.embed, self.tokens = nn.Embedding(words, width), tokens
        self.body = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, data: torch.Generator) -> torch.Tensor:
        tokens = torch.randint(0, self.embed.num_embeddings, (self.tokens,), generator=data)
        return self.body(self.embed(tokens)).square().mean()


class Experts(nn.Module):
    """Experts in two tensors, of which each step calls some."""

    def __init__(self, experts: int, width: int, called: int, tokens: int) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.randn(experts, width, 2 * width) / width)
        self.outer = nn.Parameter(torch.randn(experts, 2 * width, width) / width)
        self.called, self.tokens = called, tokens

    def forward(self, data: torch.Generator) -> torch.Tensor:
        chosen = torch.randperm(len(self.inner), generator=data)[: self.called]
        x = torch.randn(self.called, self.tokens, self.inner.shape[1], generator=data)
        return torch.bmm(torch.relu(torch.bmm(x, self.inner[chosen])), self.outer[chosen]).square().mean()


class Dense(nn.Module):
    """Layers whose gradients have no zeros."""

    def __init__(self, layers: int, width: int, tokens: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.width, self.tokens = width, tokens

    def forward(self, data: torch.Generator) -> torch.Tensor:
        return self.layers(torch.randn(self.tokens, self.width, generator=data)).square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "words": lambda: Words(131_072, 256, 2048),
    "experts": lambda: Experts(64, 512, 4, 512),
    "dense": lambda: Dense(24, 1024, 512),
}
SMALL: dict[str, Callable[[], nn.Module]] = {
    "words": lambda: Words(4096, 32, 64),
    "experts": lambda: Experts(16, 64, 2, 16),
    "dense": lambda: Dense(3, 128, 16),
}


class Training:
    """A model with its optimizer; a step's data follow from its number."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        torch.manual_seed(0)
        self.model, self.steps_done = make(), 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self) -> None:
        self.model(torch.Generator().manual_seed(self.steps_done)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps_done += 1

    def state(self) -> list[torch.Tensor]:
        held = [self.optimizer.state[p] for p in self.model.parameters()]
        slots = [slots[name] for slots in held for name in sorted(slots)]
        return [tensor.detach().clone() for tensor in (*self.model.parameters(), *slots)]


def turn(training: Training, codec: Exact | None, run: Path, steps: int) -> dict[str, float]:
    """Train ``steps`` steps on, with or without a record of each."""
    if codec is None:
        for _ in range(WARM_UP):
            training.step()
        started, computed = time.perf_counter(), time.process_time()
        for _ in range(steps):
            training.step()
        return {
            "step_seconds": (time.perf_counter() - started) / steps,
            "cpu_seconds": (time.process_time() - computed) / steps,
        }
    ckpt = Checkpointer(
        run,
        model=training.model,
        optimizer=training.optimizer,
        codec=codec,
        base_every=10**6,
        storage="100GB",
    )
    ckpt.resume()
    recorder = ckpt._backend.recorder  # type: ignore[attr-defined]
    for _ in range(WARM_UP):
        training.step()
        ckpt.step()
    ckpt.wait()
    written, seconds = recorder.written_bytes, recorder.write_seconds
    started, computed = time.perf_counter(), time.process_time()
    for _ in range(steps):
        training.step()
        ckpt.step()
    ckpt.wait()
    found = {
        "step_seconds": (time.perf_counter() - started) / steps,
        "cpu_seconds": (time.process_time() - computed) / steps,
        "record_bytes": (recorder.written_bytes - written) / steps,
        "thread_seconds": (recorder.write_seconds - seconds) / steps,
    }
    ckpt.close(save=False)
    return found


def resume_seconds(make: Callable[[], nn.Module], training: Training, run: Path, steps: int) -> float:
    """Seconds of a resume from ``steps`` records, whose result must be the state of ``training``."""
    again = Training(make)
    ckpt = Checkpointer(run, model=again.model, optimizer=again.optimizer, base_every=10**6, storage="100GB")
    started = time.perf_counter()
    step = ckpt.resume()
    seconds = time.perf_counter() - started
    pairs = zip(training.state(), again.state(), strict=True)
    assert step == steps and all(torch.equal(a, b) for a, b in pairs), (
        f"step {step} of {steps} came back otherwise"
    )
    ckpt.close(save=False)
    return seconds


def measure(make: Callable[[], nn.Module], rounds: int, steps: int, folder: Path) -> Found:
    """Train in turn; the measurements of each arm, by what was measured."""
    training, found = Training(make), {name: dict[str, list[float]]() for name in ARMS}
    for _ in range(rounds):
        for name, codec in ARMS.items():
            run = folder / name
            measured = turn(training, codec, run, steps)
            if codec is not None:
                measured["resume_seconds"] = resume_seconds(make, training, run, WARM_UP + steps)
                shutil.rmtree(run)
            for what, value in measured.items():
                found[name].setdefault(what, []).append(value)
    return found


def rows_of(model: str, found: Found) -> list[list[str]]:
    bare, lines = {what: statistics.median(values) for what, values in found["none"].items()}, []
    for name in ("whole", "rows"):
        arm = {what: statistics.median(values) for what, values in found[name].items()}
        more = [f"{1000 * (arm[what] - bare[what]):.1f}" for what in ("step_seconds", "cpu_seconds")]
        lines.append([
            f"{model}, {name}", format_bytes(round(arm["record_bytes"])), f"{1000 * bare['step_seconds']:.0f}", *more,
            f"{1000 * arm['thread_seconds']:.1f}", f"{arm['resume_seconds']:.2f}",
        ])  # fmt: skip
    return lines


def main() -> None:
    parser = options_of(__doc__ or "")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    if options.small:
        options.rounds, options.steps = 1, 2
    models, result = SMALL if options.small else MODELS, {}
    lines = [["", "a record", "step without, ms", "longer, ms", "processor, ms", "thread, ms", "resume, s"]]
    for model in options.models:
        with tempfile.TemporaryDirectory(dir=options.folder, prefix="holdfast-bench-") as folder:
            result[model] = measure(models[model], options.rounds, options.steps, Path(folder))
        lines += rows_of(model, result[model])
    table(lines)
    finish("touched_rows", {"rounds": options.rounds, "steps": options.steps, "models": result}, options.keep)


if __name__ == "__main__":
    main()
