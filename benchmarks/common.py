"""What the benchmarks share: models, interleaved timing, tables, and results with machine and commit."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import nn

RESULTS = Path(__file__).parent / "results"


class Stack(nn.Module):
    """Blocks one after another, in ``layers``; the loss is the mean of squares."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def options_of(doc: str) -> argparse.ArgumentParser:
    """A parser with the options that most benchmarks have; ``doc`` is the benchmark's own."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--folder", default=None, help="where to write; the default is the temporary folder")
    parser.add_argument("--keep", action="store_true", help="append the result to benchmarks/results/")
    parser.add_argument("--small", action="store_true", help="seconds, for the tests")
    return parser


def machine() -> dict:
    """What the figures were taken on."""
    commit, dirty = _git("rev-parse", "--short", "HEAD"), _git("status", "--porcelain", "-uno")
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {cpu_name()}",
        "system": f"Linux {platform.release()}, Python {platform.python_version()}, torch {torch.__version__}",
        "commit": (commit or "?") + ("+" if dirty else ""),
        "date": time.strftime("%Y-%m-%d"),
        "load": round(os.getloadavg()[0], 1),
    }


def _git(*arguments: str) -> str:
    """What git says; nothing where there is none."""
    try:
        return subprocess.run(["git", *arguments], capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return "unknown CPU"


def interleaved(
    cases: dict[str, Callable[[], object]],
    rounds: int,
    warm_up: int = 2,
    before: Callable[[str], None] = lambda case: None,
) -> dict[str, list[float]]:
    """Seconds of each case, taken in turn, so that a drifting machine drifts for all. What is done ``before`` each does
    not count."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds + warm_up):
        for name, case in cases.items():
            before(name)
            start = time.perf_counter()
            case()
            if turn >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def forget(folder: Path) -> None:
    """Let the page cache forget what is below ``folder``."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def in_a_process(python: str, *arguments: str) -> str:
    """What a command of an interpreter prints."""
    done = subprocess.run([python, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def paired_ratio(a: list[float], b: list[float]) -> float:
    """The median over pairs of a/b."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def table(rows: list[list[str]]) -> None:
    """Print ``rows``, the first of them the header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:]))]))


def markdown(rows: list[list[str]]) -> list[str]:
    """Lines of a table of ``rows``, the first of them the header.

    >>> markdown([["", "s"], ["a", "1.0"]])
    ['|  | s |', '|---|---|', '| a | 1.0 |']
    """
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]


def spread(values: list[float], digits: int = 2) -> list[str]:
    return [f"{v:.{digits}f}" for v in (min(values), statistics.median(values), max(values))]


def fast_precision() -> str:
    """Return the dtype that a run without ``precision=`` would compute in on this processor."""
    from holdfast.measure.hardware_rates import fast_dtype

    return fast_dtype(torch.device("cpu"))


GROUPS = Path("/sys/fs/cgroup/memory")


@contextmanager
def hard_limit(nbytes: int) -> Iterator[Path | None]:
    """Yield the folder of a memory cgroup (version 1) with a limit of ``nbytes``; None if none can be made."""
    group = GROUPS / f"holdfast-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(nbytes))
        (group / "memory.swappiness").write_text("0")
    except OSError:
        with suppress(OSError):
            group.rmdir()
        yield None
        return
    try:
        yield group
    finally:
        group.rmdir()


@contextmanager
def slow_disk(folder: str, bytes_per_second: int) -> Iterator[Path]:
    """Yield the folder of a cgroup (version 1, as root) that limits reads and writes on the disk of ``folder``.

    Reads and writes have the limit ``bytes_per_second`` each. The kernel writes the page cache without a limit.
    """
    device = os.stat(folder).st_dev
    group = Path("/sys/fs/cgroup/blkio") / f"holdfast-{os.getpid()}"
    group.mkdir()
    try:
        for way in ("read", "write"):
            limit = f"{os.major(device)}:{os.minor(device)} {bytes_per_second}"
            (group / f"blkio.throttle.{way}_bps_device").write_text(limit)
        yield group
    finally:
        group.rmdir()


def memory_of_process(name: str) -> int:
    """Return the bytes in the line ``name`` of /proc/self/status."""
    found = re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, name
    return int(found[1]) * 1024


def finish(name: str, result: dict, keep: bool) -> None:
    """Print the result as one line of JSON, and keep it under benchmarks/results/ if asked."""
    result = {"benchmark": name, **machine(), **result}
    line = json.dumps(result)
    print(line)
    if keep:
        kept = RESULTS / f"{name}.jsonl"
        kept.parent.mkdir(parents=True, exist_ok=True)
        with open(kept, "a") as file:
            file.write(line + "\n")


def gpt(layers: int, width: int, vocabulary: int = 16384, context: int = 256, empty: bool = True):
    """A GPT-2 of the sizes of the comparison: 12 x 512 has 46 M parameters, 24 x 1024 has 319 M."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    import holdfast

    logging.set_verbosity_error()
    config = GPT2Config(
        n_embd=width, n_layer=layers, n_head=width // 64, vocab_size=vocabulary, n_positions=context,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    if not empty:
        return GPT2LMHeadModel(config)
    with holdfast.empty_parameters():
        return GPT2LMHeadModel(config)


def token_batches(count: int, tokens: int, vocabulary: int = 16384) -> list[dict]:
    """``count`` micro-batches of one sequence each."""
    batches = []
    for _ in range(count):
        x = torch.randint(0, vocabulary, (1, tokens))
        batches.append({"input_ids": x, "labels": x})
    return batches


def with_masters(model: torch.nn.Module) -> Callable[[list[dict]], None]:
    """A step of mixed precision by hand, with AdamW and activation checkpointing: bf16 parameters are computed with,
    parameters and gradient sums are fp32."""
    masters = [p.detach().clone() for p in model.parameters()]
    model.to(torch.bfloat16).gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    pairs = list(zip(model.parameters(), masters, strict=True))

    def step(batches: list[dict]) -> None:
        for batch in batches:
            (model(**batch).loss / len(batches)).backward()
            for parameter, master in pairs:
                grad = parameter.grad.float()  # adding bf16 to fp32 directly is five times as slow
                master.grad = grad if master.grad is None else master.grad.add_(grad)
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter, master in pairs:
                parameter.copy_(master)

    return step
