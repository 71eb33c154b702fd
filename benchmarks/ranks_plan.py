"""How long planning takes for 2,048 ranks and a million stored regions, and the memory that it takes on one of them.

Each case runs in a process of its own, which plays one rank; nothing is read or written.

* ``read``: the plan of one rank's reads, a part of every tensor, of a source in 2,048 files;
* ``verify``: the exchange of what all ranks will read, and one rank's share of the checks;
* ``save``: the first rank's work for ``dcp.save`` into a run: the names of a million items and a plan for each rank;
* ``save again``: the same with cached plans.

Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from common import finish, in_a_process, options_of, table

from holdfast.formats.load import ReadTarget, plan
from holdfast.formats.source import Source, SourceTensor, StoredArray
from holdfast.sources import Need, divided
from holdfast.state.layout.fragments import Fragments
from holdfast.state.layout.regions import Region
from holdfast.state.tensor_entries import TensorEntry

RANKS, NEAR, WIDTH = 2048, 8, 64
CASES = ("read", "verify", "save", "save again")


def source_of(ranks: int, tensors: int) -> Source:
    """``tensors`` tensors, each divided over all ranks along its first dim."""
    found = Source("planned", "dcp")
    start = np.stack([np.arange(ranks), np.zeros(ranks, np.int64)], axis=1)
    stop = np.stack([np.arange(ranks) + 1, np.full(ranks, WIDTH)], axis=1)
    strides = np.tile(np.array([WIDTH, 1]), (ranks, 1))
    for number in range(tensors):
        first = len(found.parts)
        found.parts += [
            StoredArray(f"__{rank}_0.distcp", number * 4 * WIDTH, 4 * WIDTH, "F32") for rank in range(ranks)
        ]
        part = np.arange(first, first + ranks)
        pieces = Fragments(start, stop, part, np.zeros(ranks, np.int64), strides)
        found.add(SourceTensor(TensorEntry(f"p{number}", "param", (ranks, WIDTH), "F32"), pieces))
    return found


def read(ranks: int, tensors: int) -> float:
    source, array = source_of(ranks, tensors), np.empty((ranks // NEAR // 8, WIDTH), "V4")
    rows = len(array)
    targets = [
        ReadTarget(each, Region((rows, 0), (2 * rows, WIDTH)), array) for each in source.atoms.values()
    ]
    before = time.perf_counter()
    assert len(plan(source, targets)) == rows * tensors
    return time.perf_counter() - before


def verify(ranks: int, tensors: int) -> float:
    source = source_of(ranks, tensors)
    before = time.perf_counter()
    own = Need.of(source, Path("/"), range(7, len(source.parts), ranks))
    seconds = time.perf_counter() - before
    needs = []
    for rank in range(ranks):
        need = Need.of(source, None, range(rank, len(source.parts), ranks))
        place = own.place if rank < NEAR else (f"machine {rank // NEAR}", 0, 0)
        needs.append(need._replace(place=place))
    told = pickle.dumps(needs)
    before = time.perf_counter()
    mine, near = divided(pickle.loads(told), 7, source)
    assert len(mine) * NEAR == len(near) == tensors * NEAR
    return seconds + time.perf_counter() - before


def save(ranks: int, tensors: int, again: bool) -> float:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import (
        SavePlan,
        SavePlanner,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    from holdfast.integrations.dcp_write import StorageWriter

    def item(rank: int, number: int) -> WriteItem:
        offset = torch.Size((rank, 0))
        data = TensorWriteData(ChunkStorageMetadata(offset, one), kind, shape)
        return WriteItem(MetadataIndex(f"model.p{number}", offset), WriteItemType.SHARD, tensor_data=data)

    one, shape, kind = torch.Size((1, WIDTH)), torch.Size((ranks, WIDTH)), TensorProperties(torch.float32)
    paths = {f"model.p{number}": ("model", f"p{number}") for number in range(tensors)}
    plans = [
        SavePlan([item(rank, number) for number in range(tensors)], planner_data=paths)
        for rank in range(ranks)
    ]
    if again:
        SavePlanner._cached_global_plan["planner"] = plans
        plans = [SavePlan([], usable=False)] * ranks
    with tempfile.TemporaryDirectory() as folder:
        writer = StorageWriter(folder)
        before = time.perf_counter()
        writer.prepare_global_plan(plans)
        seconds = time.perf_counter() - before
        writer.reset()
    return seconds


def measured(case: str, ranks: int, tensors: int) -> dict:
    """The seconds of ``case``, the peak memory of this process, and that before the case planned anything."""
    act = {"read": read, "verify": verify}.get(case)
    seconds = act(ranks, tensors) if act else save(ranks, tensors, again=case == "save again")
    peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
    return {"case": case, "seconds": round(seconds, 2), "peak_bytes": peak}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    ranks, tensors = (64, 8) if args.small else (RANKS, 512)
    if args.case:
        return print(json.dumps(measured(args.case, ranks, tensors)))
    small = ["--small"] if args.small else []
    cases = [json.loads(in_a_process(sys.executable, __file__, "--case", case, *small)) for case in CASES]
    rows = [["planning", "time", "peak memory"]]
    rows += [
        [each["case"], f"{each['seconds']:.2f} s", f"{each['peak_bytes'] / 1e9:.2f} GB"] for each in cases
    ]
    table(rows)
    finish("ranks_plan", {"ranks": ranks, "regions": ranks * tensors, "cases": cases}, args.keep)


if __name__ == "__main__":
    main()
