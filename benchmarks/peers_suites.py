"""Tests that other projects have for themselves, run with Holdfast in the place of what they test.

    python benchmarks/peers_suites.py dcp FILES...         torch's test/distributed/checkpoint
    python benchmarks/peers_suites.py lightning FOLDERS... Lightning's tests/tests_pytorch/checkpointing and loops

Nothing of those projects is kept here: name files of a checkout, and have installed what they import. Each suite runs
twice, first as it is. Printed is each test that passes there and fails with Holdfast, with the last line of its error:
that line is a refusal by name, or a fault. ``dcp`` also puts gloo on a CPU in the place of devices.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

SUITE, REPLACED = "HOLDFAST_PEERS_SUITE", "HOLDFAST_PEERS_REPLACED"


def replace_in_dcp(replaced: bool) -> None:
    """Run without devices, and save and load with Holdfast's storage in the place of torch's files if ``replaced``."""
    import torch
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import _storage_utils, filesystem, format_utils
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed._tensor import common_dtensor

    from holdfast.integrations.dcp import StorageReader, StorageWriter

    def storage(kind: type, name: str) -> type:
        def init(self: Any, path: Any = "", *_: Any, **__: Any) -> None:
            kind.__init__(self, path)

        return type(name, (kind,), {"__init__": init, "__module__": __name__})

    classes = {
        "FileSystemWriter": storage(StorageWriter, "FileSystemWriter"),
        "FileSystemReader": storage(StorageReader, "FileSystemReader"),
    }
    globals().update(classes)  # a writer is sent to other processes by its name
    for module in (checkpoint, filesystem, format_utils, _storage_utils) if replaced else ():
        vars(module).update(classes)
    for module in (common_distributed, common_dtensor):
        for name in ("skip_if_lt_x_gpu", "requires_nccl", "requires_accelerator_dist_backend"):
            vars(module)[name] = lambda *_, **__: lambda test: test
    fork = torch.multiprocessing.get_context("fork").Process  # imports are the time of most of these tests
    common_distributed.MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(fork)
    for owner in (torch.Tensor, torch.nn.Module):
        owner.cuda = lambda self, *_, **__: self
    wrap, cpu = FullyShardedDataParallel.__init__, {"device_id": torch.device("cpu")}
    FullyShardedDataParallel.__init__ = lambda self, *args, **options: wrap(self, *args, **cpu | options)


def replace_in_lightning(replaced: bool) -> None:
    """Add a HoldfastCallback with a run of its own to each Trainer."""
    from lightning.pytorch import Trainer

    from holdfast.integrations.lightning import HoldfastCallback

    own = Trainer.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        given = inspect.signature(own).bind(self, *args, **options).arguments
        callbacks = given.get("callbacks") or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        own(**{**given, "callbacks": [*callbacks, HoldfastCallback(Path(tempfile.mkdtemp(), "run"))]})

    if replaced:
        Trainer.__init__ = init


REPLACE = {"dcp": replace_in_dcp, "lightning": replace_in_lightning}


def run(suite: str, tests: list[Path], replaced: bool) -> dict[str, tuple[str, str]]:
    """Return of each test whether it passed, and the last line of its error."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""), str(Path.cwd())]
        told = {
            SUITE: suite,
            REPLACED: str(int(replaced)),
            "PYTHONPATH": os.pathsep.join(paths),
            "TMPDIR": folder,
        }
        files = [within(folder, each) for each in tests] if suite == "dcp" else tests
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=", "-p", "peers_suites"]
        command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", *map(str, files)]
        subprocess.run(command, env=os.environ | told, check=False)
        return dict(map(outcome, ElementTree.parse(report).iter("testcase")))


def within(folder: str, test: Path) -> Path:
    """Copy a test whose ranks are processes of their own, so that each of them replaces what it imports."""
    copy = Path(folder, test.name)
    copy.write_text("import peers_suites\n" + test.read_text())
    return copy


def outcome(case: ElementTree.Element) -> tuple[str, tuple[str, str]]:
    failed = next((case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None)
    name = f"{case.get('classname')}::{case.get('name')}"
    if failed is None:
        return name, ("skipped" if case.find("skipped") is not None else "passed", "")
    lines = [line[1:].strip() for line in (failed.text or "").splitlines() if line.startswith("E ")]
    said = [line for line in lines if re.match(r"(\w+\.)*[A-Z]\w*(Error|Exception)?: ", line)]
    return name, ("failed", next(iter(said[-1:] or lines[-1:]), ""))


def main() -> None:
    suite, *tests = sys.argv[1:]
    before, after = (run(suite, [Path(each) for each in tests], replaced) for replaced in (False, True))
    passed = [name for name, (how, _) in before.items() if how == "passed"]
    for name in passed:
        how, why = after.get(name, ("did not run", ""))
        if how != "passed":
            print(f"{name}: {how}: {why}")
    kept = sum(after.get(name, ("", ""))[0] == "passed" for name in passed)
    print(f"{len(before)} tests; {len(passed)} pass as they are, {kept} of these with Holdfast in place")


if __name__ == "__main__":
    main()
elif SUITE in os.environ:
    REPLACE[os.environ[SUITE]](os.environ[REPLACED] == "1")
