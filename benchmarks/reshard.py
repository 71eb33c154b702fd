"""What it takes to read a state under another parallelism, and to export it, beside what others take.

    python benchmarks/reshard.py [--mib 1024] [--rounds 5] [--folder FOLDER] [--keep] [--small]
                                    [--peers PYTHON] [--zero-mib 256]

Two ranks of FSDP2 write one state with torch DCP and as a run. In turn, each from the disk and not from the page cache:

* ``load``: one process loads it whole into arrays that are there, with every byte verified, against ``dcp.load``, which
  verifies nothing;
* ``export``: the parameters as a Hugging Face folder, durable, against a copy of as many bytes, synced;
* ``half``: half of the rows of every tensor, with the bytes that were read of those that were wanted.

``plan`` is how long planning takes for a quarter, a half and a whole million of fragments, in a process of its own,
with its peak memory. With ``--peers``, a Python that has DeepSpeed (`make test-peers` makes one in .venv-peers), what
four ranks of ZeRO-1 and 3 wrote is converted and resumed by two, by either library: ``zero.py``. Prints a table and one
line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import finish, forget, in_a_process, interleaved, options_of, paired_ratio, table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from zero import compare

import holdfast
from holdfast.formats.load import ReadTarget, plan, read_all
from holdfast.formats.readers.huggingface import write_huggingface
from holdfast.formats.run_directory import CommitSource
from holdfast.formats.source import Source, SourceTensor, StoredArray
from holdfast.opening import source_of
from holdfast.state.layout.fragments import Fragments, flat
from holdfast.state.layout.regions import Region
from holdfast.state.tensor_entries import TensorEntry

LAYERS = 16


def model_of(mib: int) -> nn.Module:
    """Parameters of so many MiB in fp32, in matrices of equal size."""
    width = int((mib * 2**20 / 4 / LAYERS) ** 0.5) // 64 * 64
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


def write(folder: Path, mib: int) -> None:
    """On each of the ranks: a state with Adam's, by DCP and as a run."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = fully_shard(model_of(mib), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with holdfast.Checkpointer(folder / "run", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
        checkpointer.save()
    held = {name: p.detach() for name, p in model.named_parameters()}
    slots = {f"{n}.{s}": v for n, p in model.named_parameters() for s, v in optimizer.state[p].items()}
    dcp.save({"model": held, "optim": slots}, checkpoint_id=folder / "dcp")
    dist.barrier()
    os._exit(0)  # torch 2.13 aborts now and then when a process ends after dcp.save


def load_run(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    source = source_of(str(folder / "run"))
    whole = [(key, stored, Region.whole(stored.atom.shape)) for key, stored in source.atoms.items()]
    read_all(source, [ReadTarget(stored, box, arrays[key]) for key, stored, box in whole])


def arrays_of(folder: Path) -> dict[str, np.ndarray]:
    """Empty arrays for all that the run has, by its keys."""
    atoms = [(key, stored.atom) for key, stored in source_of(str(folder / "run")).atoms.items()]
    return {key: np.empty(atom.shape, f"V{atom.itemsize}") for key, atom in atoms}


def load_dcp(folder: Path, targets: dict) -> None:
    dcp.load(targets, checkpoint_id=folder / "dcp", no_dist=True)


def targets_of(folder: Path) -> dict:
    """Empty tensors for all that a DCP folder has."""
    metadata = dcp.FileSystemReader(folder / "dcp").read_metadata().state_dict_metadata
    found: dict = {"model": {}, "optim": {}}
    for key, about in metadata.items():
        kind, _, name = key.partition(".")
        found[kind][name] = torch.empty(about.size, dtype=about.properties.dtype)
    return found


def export(folder: Path) -> None:
    shutil.rmtree(folder / "hf", ignore_errors=True)
    write_huggingface(source_of(str(folder / "run")), folder / "hf")


def copy(folder: Path, nbytes: int) -> None:
    """As many bytes from one file to another, 16 MiB at a time, synced."""
    source, made = folder / "raw", folder / "copy"
    if not source.exists():
        with source.open("wb") as file:
            for _ in range(nbytes >> 20):
                file.write(os.urandom(1 << 20))
    with source.open("rb", 0) as file, made.open("wb", 0) as out:
        while data := file.read(16 << 20):
            out.write(data)
        os.fsync(out.fileno())
    made.unlink()


def amplification(folder: Path) -> float:
    """Bytes verified for half of the rows of every tensor, by those that were wanted."""
    source = source_of(str(folder / "run"))
    assert isinstance(source, CommitSource)
    before, targets = source.bytes_read, []
    for stored in source.atoms.values():
        if len(stored.atom.shape) == 2:
            rows, columns = stored.atom.shape
            array = np.empty((rows // 2, columns), f"u{stored.atom.itemsize}")
            targets.append(ReadTarget(stored, Region((0, 0), (rows // 2, columns)), array))
    read_all(source, targets)
    return (source.bytes_read - before) / sum(target.array.nbytes for target in targets)


def plan_millions(fragments: int, atoms: int) -> dict:
    """Plan one read of everything, of ``fragments`` flat parts; each is up to three boxes."""
    shape = (4096, 1024)
    elements, ranks = shape[0] * shape[1], fragments // atoms
    each = -(-elements // ranks)
    contents = Source("planned", "flat")
    contents.parts = [StoredArray(f"rank{r}", 0, (each * atoms + 1) * 4, "F32") for r in range(ranks)]
    targets, array = [], np.empty(shape, np.uint32)
    for number in range(atoms):
        pieces = [
            p
            for r in range(ranks)
            for p in flat(shape, r * each, min((r + 1) * each, elements), r, number * each)
        ]
        stored = SourceTensor(TensorEntry(f"p{number}", "param", shape, "F32"), Fragments.of(pieces, 2))
        targets.append(ReadTarget(stored, Region.whole(shape), array))
    before = time.perf_counter()
    runs = plan(contents, targets)
    seconds = time.perf_counter() - before
    status = Path(
        "/proc/self/status"
    ).read_text()  # getrusage has the peak of the process that began this one
    peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    return {"fragments": fragments, "runs": len(runs), "seconds": round(seconds, 2), "peak_bytes": peak}


def measure(folder: Path, mib: int, rounds: int, warm_up: int) -> dict:
    """What loading and exporting take, of what two ranks write here."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    in_a_process(sys.executable, *torchrun, __file__, "--write", "--mib", str(mib), "--folder", str(folder))
    arrays, targets = arrays_of(folder), targets_of(folder)
    export(folder)
    exported = sum(path.stat().st_size for path in (folder / "hf").iterdir())
    seconds = interleaved(
        {
            "load": lambda: load_run(folder, arrays), "dcp.load": lambda: load_dcp(folder, targets),
            "export": lambda: export(folder), "copy": lambda: copy(folder, exported),
        },
        rounds, warm_up, before=lambda case: forget(folder),
    )  # fmt: skip
    return {
        "state_bytes": sum(array.nbytes for array in arrays.values()), "exported_bytes": exported, "seconds": seconds,
        "load_of_dcp": paired_ratio(seconds["load"], seconds["dcp.load"]),
        "export_of_copy": paired_ratio(seconds["copy"], seconds["export"]),
        "half_read_of_wanted": amplification(folder),
    }  # fmt: skip


def rows_of(seconds: dict[str, list[float]], nbytes: dict[str, int]) -> list[list[str]]:
    """By case the median, and the bytes in that time, where it has any."""
    medians = {case: statistics.median(taken) for case, taken in seconds.items()}
    rates = {case: f"{nbytes[case] / medians[case] / 1e6:.0f}" for case in nbytes}
    return [[case, f"{each:.2f}", rates.get(case, "")] for case, each in medians.items()]


def show(result: dict) -> None:
    sizes = {
        case: result["state_bytes" if "load" in case else "exported_bytes"] for case in result["seconds"]
    }
    table([["", "seconds", "MB/s"], *rows_of(result["seconds"], sizes)])
    for each in result["plan"]:
        print(
            f"plan of {each['fragments']:,} fragments: {each['seconds']} s, {each['peak_bytes'] / 1e6:.0f} MB at most"
        )
    for each in result["zero"]:
        sizes = {
            case: 3 * each["parameter_bytes"] for case in each["seconds"] if not case.startswith("start")
        }
        table([[f"ZeRO-{each['stage']}", "seconds", "MB/s"], *rows_of(each["seconds"], sizes)])
        print(
            f"converted {each['converted_faster']:.2f} times as fast, loaded by the same engine"
            f" {each['loaded_faster']:.2f} times, resumed {each['resumed_faster']:.2f} times;"
            f" beyond the starts {each['converted_faster_beyond_start']:.2f},"
            f" {each['loaded_faster_beyond_start']:.2f} and {each['resumed_faster_beyond_start']:.2f} times;"
            f" of a resumption {each['first_base_seconds']:.2f} s are its first base; temporary bytes:"
            f" {each['temporary_bytes']}"
        )


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="of the parameters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--peers", default="", help="a Python that has DeepSpeed; without it that part is left out"
    )
    parser.add_argument("--zero-mib", type=int, default=256, help="of the parameters of those checkpoints")
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--plan", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        return write(Path(args.folder), args.mib)
    if args.plan:
        return print(json.dumps(plan_millions(args.plan, 40 if args.small else 1000)))
    mib, zero_mib, rounds = (4, 4, 1) if args.small else (args.mib, args.zero_mib, args.rounds)
    small = ["--small"] if args.small else []
    counts = [4000] if args.small else [250_000, 500_000, 1_000_000]
    plans = [in_a_process(sys.executable, __file__, "--plan", str(count), *small) for count in counts]
    result = {"plan": [json.loads(each) for each in plans], "zero": []}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        result |= measure(Path(name), mib, rounds, warm_up=0 if args.small else 1)
    stages = (3,) if args.small else (1, 3)
    for stage in stages if args.peers else ():
        with tempfile.TemporaryDirectory(dir=args.folder) as name:
            result["zero"].append(compare(Path(name), args.peers, stage, zero_mib, rounds))
    show(result)
    finish("reshard", result, args.keep)


if __name__ == "__main__":
    main()
