"""Facts about a machine with a device that the engine's design rests on, each measured by itself.

    python benchmarks/gpu/facts.py [--folder /tmp] [--gib 8] [--device cuda|cpu] [--keep] [--small]

* pinning: seconds for a GiB of anonymous memory and of a file in /dev/shm, and the kernel's flags of pinned pages
* fork: seconds for a fork beside ``--gib`` of pinned memory, with its pages shared and with them left out
* copies: bytes per second from and to pinned memory, and from pageable memory
* workspaces: device memory that eight threads take which have multiplied once
* alignment: whether a product has the same bits where its weights lie at 64 bytes as at 256
* waking: processor time of a thread that waits for an event
* refusal: whether a kernel goes through after memory could not be pinned
* ssd: rates of ``--folder`` by O_DIRECT

Prints a row for each, one line of JSON, and at the end a line that begins with ``summary``. About two minutes. What
fails is told in its row, and the rest goes on. With ``--device cpu`` only the last and alignment are measured.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import finish, options_of, table

from holdfast import accelerators
from holdfast.io.buffers import Buffer
from holdfast.measure.drive_rates import measure_ssd
from holdfast.measure.hardware_rates import measure_copies
from holdfast.quantities import GiB, MiB

CUDA = torch.device("cuda")


def main() -> None:
    options = parsed()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here: --device cpu measures what can be measured without one")
    facts = {**(ON_DEVICE if options.device == "cuda" else {}), **ANYWHERE}
    found: dict[str, dict] = {}
    for name, measure in facts.items():
        began = time.perf_counter()
        try:
            found[name] = measure(options)
        except Exception as error:  # a lease is short: the other facts are wanted all the same
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:200]}
        print(f"{name}: {found[name]} ({time.perf_counter() - began:.1f} s)", flush=True)
    about = {"device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu"}
    finish("gpu/facts", {**about, **found}, options.keep)
    table([["", ""], *([name, *[_told(one)]] for name, one in found.items())])
    print(f"summary gpu/facts: {'; '.join(f'{name}: {_told(one)}' for name, one in found.items())}")


def parsed() -> argparse.Namespace:
    parser = options_of(__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--gib", type=float, default=8.0, help="pinned beside a fork")
    options = parser.parse_args()
    options.folder = options.folder or tempfile.gettempdir()
    options.nbytes = 64 * MiB if options.small else GiB
    if options.small:
        options.gib = 0.125
    return options


def _told(fact: dict) -> str:
    return ", ".join(f"{what} {value}" for what, value in fact.items())


def pinning(options: argparse.Namespace) -> dict:
    """Anonymous memory, and a file in /dev/shm as the ring of the Checkpointer's replica is."""
    result = {}
    buffer = Buffer(options.nbytes, "facts")
    with _pinned(buffer) as seconds:
        result["anonymous seconds"], result["flags"] = round(seconds, 4), " ".join(_flags_of(buffer.view))
    buffer.free()
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        os.ftruncate(file.fileno(), options.nbytes)
        memory = mmap.mmap(file.fileno(), options.nbytes)
        began = time.perf_counter()
        accelerators.pin(memoryview(memory), CUDA)()
        result["/dev/shm seconds, both ways"] = round(time.perf_counter() - began, 4)
    return result


@contextmanager
def _pinned(buffer: Buffer, kept_from_forks: bool = True) -> Iterator[float]:
    began = time.perf_counter()
    unpin = accelerators.pin(buffer.view, CUDA)
    seconds = time.perf_counter() - began
    buffer.keep_from_forks(kept_from_forks)
    try:
        yield seconds
    finally:
        unpin()
        buffer.keep_from_forks(False)


def _flags_of(memory: memoryview) -> list[str]:
    """The kernel's flags of the pages; "dc" is "not copied by a fork"."""
    address, here = accelerators.address_of(memory), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            here = start <= address < end
        elif here and first == "VmFlags:":
            return rest
    return []


def fork(options: argparse.Namespace) -> dict:
    """Of this process, whose child ends at once."""
    buffer = Buffer(int(options.gib * GiB), "facts")
    torch.frombuffer(buffer.view, dtype=torch.uint8).fill_(1)
    result = {}
    for name, kept in (("shared seconds", False), ("left out seconds", True)):
        with _pinned(buffer, kept):
            began = time.perf_counter()
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
            result[name] = round(time.perf_counter() - began, 4)
    buffer.free()
    return result


def copies(options: argparse.Namespace) -> dict:
    rates = measure_copies(CUDA, 6.0, nbytes=options.nbytes // 4)
    assert rates is not None
    pageable, there = torch.empty(options.nbytes // 4, dtype=torch.uint8), None
    pageable.fill_(1)
    there = pageable.to(CUDA)
    accelerators.synchronize(CUDA)
    began = time.perf_counter()
    for _ in range(4):
        there.copy_(pageable)
    accelerators.synchronize(CUDA)
    slow = 4 * pageable.nbytes / (time.perf_counter() - began)
    both = {"up": rates.upload, "down": rates.download, "both": rates.both, "up, pageable": slow}
    return {f"{name} GB/s": round(rate / 1e9, 2) for name, rate in both.items()}


def workspaces(options: argparse.Namespace) -> dict:
    """Each thread that multiplies has a handle of cuBLAS, for which torch keeps a workspace."""
    before = torch.cuda.memory_reserved()

    def multiply() -> None:
        x = torch.ones(64, 64, device=CUDA, dtype=torch.bfloat16)
        (x @ x).sum().item()

    multiply()
    one = torch.cuda.memory_reserved()
    go, done = threading.Event(), threading.Barrier(9)

    def wait_and_multiply() -> None:
        go.wait()
        multiply()
        done.wait()

    threads = [threading.Thread(target=wait_and_multiply) for _ in range(8)]
    for thread in threads:
        thread.start()
    go.set()
    done.wait()
    eight = torch.cuda.memory_reserved()
    for thread in threads:
        thread.join()
    return {"first MiB": (one - before) / MiB, "each further MiB": (eight - one) / 8 / MiB}


def alignment(options: argparse.Namespace) -> dict:
    """``addmm`` with a bias, of weights that begin so many bytes behind a multiple of 512."""
    device = CUDA if options.device == "cuda" else torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 768, generator=generator).to(device, torch.bfloat16)
    weight = torch.randn(3072, 768, generator=generator).to(device, torch.bfloat16)
    bias = torch.randn(3072, generator=generator).to(device, torch.bfloat16)
    expected = torch.nn.functional.linear(x, weight, bias)
    room = torch.empty(weight.numel() + 512, dtype=torch.bfloat16, device=device)
    result = {}
    for offset in (64, 128, 256):
        start = (-room.data_ptr() // 2 % 256) + offset // 2
        there = room[start : start + weight.numel()].view_as(weight).copy_(weight)
        same = torch.equal(torch.nn.functional.linear(x, there, bias), expected)
        result[f"at {offset} bytes"] = "same bits" if same else "OTHER bits"
    return result


def waking(options: argparse.Namespace) -> dict:
    """An event that blocks, as the engine's do, and one that spins: of the thread that waits for about 10 ms."""
    result = {}
    for name, event in (("blocking", torch.cuda.Event(blocking=True)), ("spinning", torch.cuda.Event())):
        busy = []
        for _ in range(20):
            torch.cuda.synchronize()
            torch.cuda._sleep(20_000_000)
            event.record()
            began = time.thread_time()
            event.synchronize()
            busy.append(time.thread_time() - began)
        result[f"{name} us"] = round(statistics.median(busy) * 1e6)
    return result


def refusal(options: argparse.Namespace) -> dict:
    """Memory that is pinned already cannot be pinned again; the next kernel is not to hear of it."""
    buffer, said = Buffer(MiB, "facts"), "pinned twice"
    with _pinned(buffer):
        try:
            accelerators.pin(buffer.view, CUDA)
        except accelerators.CannotPin as error:
            said = error.reason
        torch.ones(4, device=CUDA).sum().item()
    buffer.free()
    return {"refused": said, "kernel after it": "ran"}


def ssd(options: argparse.Namespace) -> dict:
    found = measure_ssd(Path(options.folder), options.nbytes, 2.0 if options.small else 15.0)
    rates = {"read": found.read, "write": found.write, "mixed": found.mixed}
    told = {f"{name} MB/s": round(rate / 1e6) for name, rate in rates.items()}
    return {**told, "O_DIRECT": found.direct, "sync ms": round(found.sync_seconds * 1e3, 3)}


ON_DEVICE: dict[str, Callable[[argparse.Namespace], dict]] = {
    "pinning": pinning,
    "fork": fork,
    "copies": copies,
    "workspaces": workspaces,
    "waking": waking,
    "refusal": refusal,
}
ANYWHERE: dict[str, Callable[[argparse.Namespace], dict]] = {"alignment": alignment, "ssd": ssd}


if __name__ == "__main__":
    main()
