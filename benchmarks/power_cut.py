"""What a power cut leaves of a checkpoint, right after the call that wrote it has returned.

    python benchmarks/power_cut.py [--trials 10] [--folder FOLDER] [--keep] [--small]

Each trial is a process on a fresh directory of a file system in a file: it writes step 1, waits until the
system has written everything back, writes step 2, and cuts the power (``FS_IOC_SHUTDOWN`` without a log
flush), at once or after another file has been written and synced, as a logger does. The file system is
mounted again, and what it holds is loaded and compared tensor by tensor. Needs root; says so otherwise.
Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import tempfile
import unittest
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # imported here once, not in every trial
import torch.distributed.checkpoint as dcp
from common import finish, table
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import CheckpointException

import holdfast
from holdfast.errors import HoldfastError
from holdfast.models.decoder import Decoder, DecoderConfig
from holdfast.store.run_store import LocalStore

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from powercut import power_cut_disk, shut_down

State = dict[str, torch.Tensor]
LAST = 2
OUTCOMES = (f"step {LAST}", f"step {LAST - 1}", "nothing")
MOMENTS = ("at once", "after a sync of another file")


def state_of(step: int) -> State:
    """A model with its AdamW state, about 3 MB: other values at each step."""
    generator = torch.Generator().manual_seed(step)
    names = [f"layers.{i}.{slot}" for i in range(4) for slot in ("param", "exp_avg", "exp_avg_sq")]
    return {name: torch.randn(256, 256, generator=generator) for name in names}


def equal(found: State, expected: State) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[k], v) for k, v in expected.items())


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


class Saver:
    """One way to write a checkpoint. ``write`` returns; then the power goes."""

    def __init__(
        self, name: str, save: Callable[[State, Path], object], load: Callable[[Path], State], new: bool
    ):
        self.name, self._save, self._load, self._new = name, save, load, new

    def path(self, folder: Path, step: int) -> Path:
        return folder / (f"step-{step}" if self._new else "checkpoint")

    def write(self, folder: Path, cut: Callable[[], None]) -> dict:
        for step in range(1, LAST + 1):
            os.sync()
            self._save(state_of(step), self.path(folder, step))
        cut()
        return {}

    def found(self, folder: Path, said: dict) -> tuple[str, str]:
        """The newest step that is there, and why it is not the last one."""
        why = ""
        for step in range(LAST, 0, -1):
            try:
                if equal(self._load(self.path(folder, step)), state_of(step)):
                    return f"step {step}", why
                why = why or "the bytes of the step before"
            except (Exception, CheckpointException) as error:
                why = why or f"{self._looks(self.path(folder, LAST))}: {type(error).__name__}"
        return "nothing", why

    def _looks(self, path: Path) -> str:
        if not path.exists():
            return "no such name"
        files = [path] if path.is_file() else sorted(path.iterdir())
        return ", ".join(f"{file.name} {file.stat().st_size} B" for file in files) or "an empty directory"


def torch_load(path: Path) -> State:
    return torch.load(path, weights_only=True)


def torch_save_synced(state: State, path: Path) -> None:
    """By hand, as it must be done with plain files: temporary name, fsync, rename, fsync of the directory."""
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    sync(temporary)
    temporary.rename(path)
    sync(path.parent)


def dcp_save(state: State, path: Path) -> None:
    dcp.save(dict(state), checkpoint_id=path, no_dist=True)


def dcp_load(path: Path) -> State:
    state = {name: torch.empty_like(value) for name, value in state_of(1).items()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


class Holdfast:
    """Training with the engine; the power goes when it has acknowledged a step, or right after ``step``."""

    def __init__(self, name: str, wait: bool) -> None:
        self.name, self._wait = name, wait

    def write(self, folder: Path, cut: Callable[[], None]) -> dict:
        engine = engine_of(folder / "run")
        for step in range(1, LAST + 1):
            engine.wait()
            os.sync()
            take_step(engine, step)
        if self._wait:
            engine.wait()
        durable = engine.durable_step
        cut()
        return {"durable": durable}

    def found(self, folder: Path, said: dict) -> tuple[str, str]:
        """The newest whole step, compared with the same training undisturbed."""
        try:
            manifest, damaged = LocalStore.read(folder / "run").newest_whole()
        except HoldfastError as error:
            return "nothing", str(error)
        assert manifest.step >= said["durable"] and not damaged, "an acknowledged step is gone"
        with tempfile.TemporaryDirectory() as other:
            with engine_of(Path(other)) as engine:
                for step in range(1, manifest.step + 1):
                    take_step(engine, step)
            expected = LocalStore.read(other).at(manifest.step)
        assert [f.checksums for f in manifest.files.values()] == [
            f.checksums for f in expected.files.values()
        ]
        return f"step {manifest.step}", "" if manifest.step == LAST else "it was not acknowledged yet"


def engine_of(root: Path) -> holdfast.Engine:
    """A model of about 3 MB with its AdamW state, on the SSD."""
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(blocks=4, width=96, heads=2, kv_heads=1, context=16))
    return holdfast.offload(model, torch.optim.AdamW(model.parameters()), root, precision="fp32")


def take_step(engine: holdfast.Engine, step: int) -> None:
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(step))
    engine.step([{"tokens": tokens, "targets": tokens}])


WAYS = [
    Saver("torch.save, same name", torch.save, torch_load, new=False),
    Saver("torch.save, new name", torch.save, torch_load, new=True),
    Saver("safetensors.save_file, same name", save_file, load_file, new=False),
    Saver("safetensors.save_file, new name", save_file, load_file, new=True),
    Saver("torch.distributed.checkpoint.save, new name", dcp_save, dcp_load, new=True),
    Saver("torch.save, fsync, rename, fsync by hand", torch_save_synced, torch_load, new=False),
    Holdfast("holdfast: engine.step returned", wait=False),
    Holdfast(f"holdfast: durable_step == {LAST}", wait=True),
]


def trial(way: Saver | Holdfast, disk, moment: str) -> tuple[str, str]:
    folder = disk.folder / "trial"
    folder.mkdir()
    sync(disk.folder)

    def cut() -> None:
        if moment != MOMENTS[0]:
            with open(disk.folder / "log", "a") as log:
                log.write("a line\n")
                log.flush()
                os.fsync(log.fileno())
        shut_down(disk.mount)

    said = in_child(lambda: way.write(folder, cut))
    disk.reboot()
    found = in_child(lambda: way.found(folder, said))
    shutil.rmtree(folder)
    return tuple(found)


def in_child(work: Callable[[], object]) -> dict:
    """The result of ``work`` in a forked process, which is gone afterwards with all that it had open."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        logging.disable()
        try:
            os.write(writing, json.dumps(work()).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "the trial's process failed"
    return json.loads(said)


def measure(folder: Path, systems: list[str], trials: int) -> list[dict]:
    rows = []
    for system in systems:
        with power_cut_disk(folder, system) as disk:
            for moment in MOMENTS:
                for way in WAYS:
                    results = [trial(way, disk, moment) for _ in range(trials)]
                    counts = Counter(outcome for outcome, _ in results)
                    left = Counter(why for _, why in results if why)
                    rows.append(
                        {"way": way.name, "system": system, "moment": moment}
                        | {outcome: counts[outcome] for outcome in OUTCOMES}
                        | {"left": [why for why, _ in left.most_common()]}
                    )
    return rows


def report(rows: list[dict], trials: int) -> None:
    """One row per way, one column per file system and moment: how often which step was there."""
    print(
        f"The power is cut when the call has returned; step 1 was written back before. {trials} trials each."
    )
    print(f"What is there afterwards: {' / '.join(OUTCOMES)}, in so many trials.\n")
    columns = list(dict.fromkeys((row["system"], row["moment"]) for row in rows))
    cells = {(row["way"], row["system"], row["moment"]): row for row in rows}
    lines = [["", *(f"{system}, {moment}" for system, moment in columns)]]
    for way in dict.fromkeys(row["way"] for row in rows):
        found = [cells[way, *column] for column in columns]
        lines.append([way, *(" / ".join(str(row[outcome]) for outcome in OUTCOMES) for row in found)])
    table(lines)
    print(f"\nWhat lies where step {LAST} should be:\n")
    for row in rows:
        for left in row["left"]:
            print(f"{row['way']} ({row['system']}, {row['moment']}): {left}")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--folder", default=None, help="where the disk images go; the default is temporary")
    parser.add_argument("--keep", action="store_true", help="append the result to benchmarks/results/")
    parser.add_argument("--small", action="store_true", help="seconds, for the tests")
    options = parser.parse_args()
    systems, trials = (["ext4"], 1) if options.small else (["ext4", "xfs"], options.trials)
    folder = Path(tempfile.mkdtemp(dir=options.folder, prefix="holdfast-bench-"))
    try:
        rows = measure(folder, systems, trials)
    except unittest.SkipTest as reason:
        print(f"No power can be cut here: {reason}")
        finish("power_cut", {"skipped": str(reason)}, False)
        return
    finally:
        shutil.rmtree(folder)
    report(rows, trials)
    finish("power_cut", {"trials": trials, "rows": rows}, options.keep)


if __name__ == "__main__":
    main()
