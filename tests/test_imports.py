"""The house's walls: which room may import which, who may touch the disk's order, and what costs torch."""

import ast
import graphlib
import os
import pickle
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import holdfast

SOURCE = Path(__file__).parent.parent / "src"

FLOORS = [
    {
        *(
            "errors",
            "quantities",
            "garbage",
            "regular_files",
            "libraries",
            "failpoints",
            "events",
            "config",
            "profiles",
            "distributed",
        ),
        *("accelerators", "token_chunks", "chunked_loss", "mlp_tiles"),
    },
    {"state", "io", "schedule"},
    {"store", "optim"},
    {"measure", "supervised"},
    {"offload", "checkpoint", "formats"},
    {"opening"},
    {"sources", "saved_weights"},
    {"checkpointer", "monitor"},
    {"models", "data", "integrations"},
    {"cli"},
]
"""From the ground up. A room imports from floors below; on the ground floor also from beside."""

WITHOUT_TORCH = {"io", "schedule", "store"}

ORDERING_CALLS = {
    "fsync",
    "fdatasync",
    "rename",
    "replace",
    "renames",
    "unlink",
    "remove",
    "rmdir",
    "truncate",
}
"""Of the ``os`` module: what durability depends on, so that only ``store`` calls it."""

MODULES = sorted(path for path in (SOURCE / "holdfast").rglob("*.py") if path.parent.name != "holdfast")
MODULES += sorted(
    path for path in (SOURCE / "holdfast").glob("*.py") if path.name not in ("__init__.py", "__main__.py")
)


def room_of(module: str) -> str:
    """``"io"`` of ``"holdfast.io.queue"``; nothing of the package itself, whose names are lazy."""
    return module.split(".")[1] if module.startswith("holdfast.") else ""


def floor_of(room: str) -> int:
    [floor] = [number for number, rooms in enumerate(FLOORS) if room in rooms]
    return floor


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def imports_of(tree: ast.AST, module: str, types: bool = True, functions: bool = True) -> set[str]:
    """Full names of all that a module imports; unless ``types``, not what is under TYPE_CHECKING; unless
    ``functions``, not what functions import when they are called."""
    found, waiting = set(), [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*package, *filter(None, [node.module])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        for_types = isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        if (types or not for_types) and (functions or not isinstance(node, ast.FunctionDef)):
            waiting += ast.iter_child_nodes(node)
    return found


def wrong_arrows(imports: set[str], module: str) -> list[str]:
    here = room_of(module)
    there = {room_of(name) for name in imports} - {"", here}
    rooms = there & set.union(*FLOORS)
    beside = floor_of(here) == 0
    return [room for room in sorted(rooms) if floor_of(room) >= floor_of(here) + beside]


def ordering_calls(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            found += [alias.name for alias in node.names if alias.name in ORDERING_CALLS]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            found += [node.attr] if node.attr in ORDERING_CALLS else []
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "rename" and len(node.args) == 1:
            found += [] if isinstance(node.args[0], ast.Dict | ast.DictComp) else ["rename"]  # of a path
    return found


class Module(NamedTuple):
    imports: set[str]
    needs: set[str]
    """``imports`` without those for types alone."""
    at_import: set[str]
    """``needs`` without those of functions."""
    ordering_calls: list[str]


@cache
def modules() -> dict[str, Module]:
    """Return what is asked of every module, each parsed once."""
    trees = ((name_of(path), ast.parse(path.read_text())) for path in MODULES)
    return {
        name: Module(
            imports_of(tree, name),
            imports_of(tree, name, types=False),
            imports_of(tree, name, types=False, functions=False),
            ordering_calls(tree),
        )
        for name, tree in trees
    }


def test_windows_is_refused_in_one_line():
    code = "import sys; sys.platform = 'win32'; import holdfast"
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: Holdfast runs on Linux")


def test_no_arrow_points_up_or_sideways():
    wrong = {name: wrong_arrows(module.imports, name) for name, module in modules().items()}
    assert {name: rooms for name, rooms in wrong.items() if rooms} == {}


def test_no_name_is_used_for_two_modules_and_no_folder_is_crowded():
    names = Counter(path.stem for path in MODULES if path.stem != "__init__")
    assert [name for name, count in names.items() if count > 1] == []
    crowded = {
        folder: count for folder, count in Counter(path.parent for path in MODULES).items() if count > 17
    }
    assert crowded == {}


def with_packages(needed: set[str], name: str) -> set[str]:
    """Return what ``name`` needs, and the packages around that, whose modules run first, but for its own."""
    around = {".".join(each.split(".")[:depth]) for each in needed for depth in range(2, each.count(".") + 1)}
    return needed | {f"{each}.__init__" for each in around if not name.startswith(f"{each}.")}


def test_no_modules_need_each_other():
    """Imports inside functions count too, and those for types alone do not."""
    needs = {
        name: (with_packages(module.needs & modules().keys(), name) & modules().keys()) - {name}
        for name, module in modules().items()
    }
    assert sum(map(len, needs.values())) > 1000
    graphlib.TopologicalSorter(needs).prepare()  # raises CycleError


def test_a_checkpointer_imports_no_readers_of_formats():
    """A process that is started again pays for every import; readers are needed only for a ``source=``."""
    found, waiting = set(), {"holdfast.checkpointer"}
    while waiting:
        name = waiting.pop()
        found.add(name)
        waiting |= (with_packages(modules()[name].at_import, name) & modules().keys()) - found
    assert len(found) > 80
    assert {room_of(name) for name in found} & {"formats", "sources", "config", "profiles"} == set()


def test_rooms_without_torch_import_none():
    found = {name: module.imports for name, module in modules().items() if room_of(name) in WITHOUT_TORCH}
    assert len(found) > 50
    assert [
        name for name, imports in found.items() if "torch" in {each.split(".")[0] for each in imports}
    ] == []


def test_only_the_store_orders_the_disk():
    """But for the log of events, whose parts decide nothing and are never synced."""
    calls = {name: module.ordering_calls for name, module in modules().items() if module.ordering_calls}
    assert {room_of(name) for name in calls} <= {"store", "events"}


@pytest.mark.parametrize(
    "module, line, wrong",
    [
        ("holdfast.io.queue", "from ..state.atoms import Atom", ["state"]),
        ("holdfast.io.queue", "from holdfast import schedule", ["schedule"]),
        ("holdfast.schedule.operations", "import holdfast.store.run_store", ["store"]),
        ("holdfast.store.run_store", "from ..io import queue", []),
        (
            "holdfast.offload.engine",
            "from ..checkpoint.capture.optimizer_hooks import OptimizerHooks",
            ["checkpoint"],
        ),
        ("holdfast.offload.engine", "def f():\n    from ..models import decoder", ["models"]),
        ("holdfast.offload.ops.load", "from ...cli import main", ["cli"]),
        ("holdfast.offload.ops.load", "from ..blocks import find", []),
        ("holdfast.config", "from .errors import ConfigError", []),
        ("holdfast.config", "from .state import atoms", ["state"]),
        ("holdfast.cli.train.train_job", "from ..models.decoder import Decoder", []),
    ],
)
def test_the_walls_are_seen(module, line, wrong):
    assert wrong_arrows(imports_of(ast.parse(line), module), module) == wrong


@pytest.mark.parametrize(
    "source",
    ["import os\nos.replace(a, b)", "from os import fsync", "import os\nf = os.unlink", "(a / b).rename(c)"],
)
def test_calls_that_order_the_disk_are_seen(source):
    assert len(ordering_calls(ast.parse(source))) == 1
    assert ordering_calls(ast.parse("text.replace('a', 'b'); disk.rename(a, b)")) == []


def test_importing_costs_no_torch():
    verbs = ("main", "inspect", "convert", "diff", "maintenance", "monitoring", "foreign_states")
    names = ("holdfast", "holdfast.config", "holdfast.events", *(f"holdfast.cli.{verb}" for verb in verbs))
    check = (
        f"import sys\nfor name in {names}:\n    __import__(name)\n    assert 'torch' not in sys.modules, name"
    )
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", check], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_ranks_of_tests_need_no_package_that_the_environment_of_the_peers_lacks():
    """Worlds train there as well."""
    lacking = ("zstandard", "lightning", "hypothesis", "moto", "obstore", "peft", "highspy")
    text = f"import sys; sys.modules.update(dict.fromkeys({lacking})); import dist.training, dist.awkward"
    path = os.pathsep.join([str(SOURCE), str(SOURCE.parent / "tests")])
    subprocess.run([sys.executable, "-c", text], env={**os.environ, "PYTHONPATH": path}, check=True)


def test_package_is_sent_to_other_processes_by_its_name():
    """As Ray sends a function that uses it."""
    assert pickle.loads(pickle.dumps(holdfast)) is holdfast
