"""Every recipe runs, made tiny by --set, and what its header says is made of it can be made."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
pytest.importorskip("tensorboard")

from support.tiny_keys import IN_MEMORY, STEP, words  # noqa: E402
from tiny_folders import TEXT, write_folder  # noqa: E402

RECIPES = sorted((Path(__file__).parents[2] / "examples" / "recipes").glob("*.toml"))
KEYS = STEP | IN_MEMORY | {"model.context": 16, "train.warmup_steps": 1}
OF_RECIPE = {
    "pretrain": {"model.blocks": 2, "model.width": 16, "model.heads": 2, "model.kv_heads": 1},
    "long-dora": {"train.mlp_tokens": 8},
}


def test_there_are_five():
    assert {path.stem for path in RECIPES} == {"full", "lora", "qlora", "pretrain", "long-dora"}


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing", "ignore:steps are predicted by their floating"
)
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_runs_and_its_commands_too(tmp_path, monkeypatch, holdfast, path):
    """The first of them twice: the second sitting continues the first."""
    folder = write_folder(tmp_path / "folder")
    (tmp_path / "text.txt").write_text(TEXT * 12)
    commands = re.findall(r"^#   (holdfast .*)$", path.read_text(), re.MULTILINE)
    places = {f"examples/recipes/{path.name}": str(path), "FOLDER": str(folder)}
    places |= {"data.text=TEXT": f"data.text={tmp_path / 'text.txt'}"}
    places |= {name: str(tmp_path / name.lower()) for name in ("OUT", "ADAPTER")}
    monkeypatch.chdir(tmp_path)
    (train, *exports) = ([places.get(word, word) for word in shlex.split(each)[1:]] for each in commands)
    assert train[0] == "train" and exports
    for steps in (1, 2) if path == RECIPES[0] else (1,):
        keys = KEYS | {"train.steps": steps} | OF_RECIPE.get(path.stem, {})
        result = holdfast(*train, *words(keys))
        assert result.code == 0, result.err
        assert f"Finished step {steps} of {steps}, which is durable" in result.out
    for export in exports:
        result = holdfast(*export)
        assert result.code == 0, result.err
        out = Path(export[2])
        assert (out / ("adapter_config.json" if "peft" in export else "config.json")).is_file()
        if "peft" not in export:
            _, told = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
            assert not any(told.values())
