"""The house's walls: which room may import which, who may touch the disk's order, and what costs torch."""

import ast
import graphlib
import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import holdfast

SOURCE = Path(__file__).parent.parent / "src"

FLOORS = [
    {
        *(
            "errors",
            "quantities",
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


def imports_of(tree: ast.AST, module: str) -> set[str]:
    """Full names of all that a module imports, at any depth, under TYPE_CHECKING too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*package, *filter(None, [node.module])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found


def wrong_arrows(source: str, module: str) -> list[str]:
    here = room_of(module)
    there = {room_of(name) for name in imports_of(ast.parse(source), module)} - {"", here}
    rooms = there & set.union(*FLOORS)
    beside = floor_of(here) == 0
    return [room for room in sorted(rooms) if floor_of(room) >= floor_of(here) + beside]


def ordering_calls(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            found += [alias.name for alias in node.names if alias.name in ORDERING_CALLS]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            found += [node.attr] if node.attr in ORDERING_CALLS else []
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "rename" and len(node.args) == 1:
            found += [] if isinstance(node.args[0], ast.Dict | ast.DictComp) else ["rename"]  # of a path
    return found


def test_windows_is_refused_in_one_line():
    code = "import sys; sys.platform = 'win32'; import holdfast"
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: Holdfast runs on Linux")


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_arrow_points_up_or_sideways(path):
    assert wrong_arrows(path.read_text(), name_of(path)) == []


class WithoutTypes(ast.NodeTransformer):
    """Leaves out what is imported for types alone."""

    def visit_If(self, node):
        return None if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)


def test_no_name_is_used_for_two_modules_and_no_folder_is_crowded():
    names = Counter(path.stem for path in MODULES if path.stem != "__init__")
    assert [name for name, count in names.items() if count > 1] == []
    crowded = {
        folder: count for folder, count in Counter(path.parent for path in MODULES).items() if count > 17
    }
    assert crowded == {}


@pytest.mark.slow
def test_no_modules_need_each_other():
    """Imports inside functions count too."""
    trees = {name_of(path): WithoutTypes().visit(ast.parse(path.read_text())) for path in MODULES}
    needs = {name: (imports_of(tree, name) & trees.keys()) - {name} for name, tree in trees.items()}
    assert sum(map(len, needs.values())) > 1000
    graphlib.TopologicalSorter(needs).prepare()  # raises CycleError


@pytest.mark.parametrize("path", [p for p in MODULES if room_of(name_of(p)) in WITHOUT_TORCH], ids=name_of)
def test_rooms_without_torch_import_none(path):
    assert not any(
        name.split(".")[0] == "torch" for name in imports_of(ast.parse(path.read_text()), name_of(path))
    )


@pytest.mark.parametrize(
    "path", [p for p in MODULES if room_of(name_of(p)) not in ("store", "events")], ids=name_of
)
def test_only_the_store_orders_the_disk(path):
    """But for the log of events, whose parts decide nothing and are never synced."""
    assert ordering_calls(path.read_text()) == []


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
    assert wrong_arrows(line, module) == wrong


@pytest.mark.parametrize(
    "source",
    ["import os\nos.replace(a, b)", "from os import fsync", "import os\nf = os.unlink", "(a / b).rename(c)"],
)
def test_calls_that_order_the_disk_are_seen(source):
    assert len(ordering_calls(source)) == 1
    assert ordering_calls("text.replace('a', 'b'); disk.rename(a, b)") == []


@pytest.mark.parametrize(
    "module",
    [
        "holdfast",
        "holdfast.config",
        "holdfast.events",
        *(
            f"holdfast.cli.{m}"
            for m in ("main", "inspect", "convert", "diff", "maintenance", "monitoring", "foreign_states")
        ),
    ],
)
def test_importing_costs_no_torch(module):
    check = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    assert subprocess.run([sys.executable, "-c", check], env=environment, timeout=60).returncode == 0


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
