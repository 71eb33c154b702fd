"""Scripts of trainers with the one line train in memory that the same scripts without it exceed.

Each process is forked from one that has the libraries, so that what it takes is the model's and the engine's.
"""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from holdfast.store.run_store import LocalStore
from support.hard_limit import hard_limit
from support.warm_python import TESTS, environment_of, start_python

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

SCRIPT = TESTS.parent / "benchmarks" / "trainer_memory.py"
MODULES = (
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "holdfast.integrations.transformers",
)
OF_HOST = {
    "sft": ("trl.trainer.sft_trainer",),
    "accelerate": ("holdfast.integrations.accelerate",),
    "trainer": (),
    "lightning": ("lightning.pytorch", "holdfast.integrations.lightning"),
    "dpo": ("trl.trainer.dpo_trainer",),
}
"""By host what its scripts need. Outside a campaign it is one of each of this library's integrations."""
MIB = 1024**2
LIMIT = 352 * MIB
TOKENS = 16
SIZES = {"width": 192, "hidden": 768, "layers": 60, "tokens": TOKENS}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder of 36 million parameters: 142 MB of weights, and with gradients and the state of AdamW 568 MB."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        import trainer_memory
    return trainer_memory.write_folder(tmp_path_factory.mktemp("model"), trainer_memory.Case(**SIZES))


def run(host, way, model, out, group, **order):
    """The process's return code, and what it said, merged."""
    order |= {"host": host, "way": way, "folder": str(model), "out": str(out), "tokens": TOKENS}
    order |= {"predicts": False, "group": str(group or "")}
    process = start_python(
        SCRIPT,
        "--measure",
        json.dumps(order),
        env=environment_of(HF_HUB_OFFLINE="1"),
        modules=MODULES + OF_HOST[host],
    )
    printed, errors = process.communicate(timeout=200)
    said: dict = {}
    for line in printed.splitlines():
        said |= json.loads(line) if line.startswith('{"phase"') else {}
    if group:
        print(
            way,
            order.get("dies_after"),
            process.wait(),
            (Path(group) / "memory.max_usage_in_bytes").read_text(),
            said,
        )
    assert process.wait() in (0, -9), errors
    return process.wait(), said


def saved_in(folder: Path) -> dict[str, torch.Tensor]:
    """The weights in what a script has saved."""
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    [checkpoint] = folder.iterdir()
    return torch.load(checkpoint, mmap=True, weights_only=False)["state_dict"]


@pytest.mark.campaign(keep=3)
@pytest.mark.crash
@pytest.mark.root
@pytest.mark.parametrize("host", OF_HOST)
def test_one_line_keeps_a_script_within_a_limit_that_it_exceeds(host, model, tmp_path):
    """The script loads its folder, trains, is killed, continues, evaluates and saves."""
    if not all(find_spec(name.partition(".")[0]) for name in OF_HOST[host]):
        pytest.skip(f"needs the libraries of {host}")
    with hard_limit(LIMIT) as (group, reason):
        code, killed = run(host, "one line", model, tmp_path, group, dies_after=2)
        assert code == -9 and killed["step"] == 2, killed
        code, said = run(host, "one line", model, tmp_path, group)
        assert code == 0 and said["resumed"] >= 1 and said["phase"] == "ended", said
        if group is not None:
            (group / "memory.limit_in_bytes").write_text(str(LIMIT * 3 // 2))
        code, plain = run(host, "unmodified", model, tmp_path / "unmodified", group)
    if group is not None:
        assert code == -9 and "step" not in plain, plain
    else:
        print(reason)
        assert max(killed["grown"], said["grown"]) <= LIMIT < LIMIT * 3 // 2 < plain["grown"]
    reader = LocalStore.read(tmp_path / "run")
    manifest, damaged = reader.newest_whole()
    assert (manifest.step, damaged) == (3, [])
    saved, atoms = saved_in(tmp_path / "saved"), reader.atoms(manifest)
    assert len(saved) == sum(key.endswith("/param") for key in atoms)
    for name, value in saved.items():
        assert bytes(reader.read_atom(manifest, atoms[f"{name}/param"])) == value.numpy().tobytes(), name
    del saved, value
    shutil.rmtree(tmp_path / "run")  # 1.4 GB
