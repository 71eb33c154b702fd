"""Damage in a state of another library is found before a tensor of a live model is touched, naming file and atom."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from formats.deepspeed_files import random_state, write, write_universal
from holdfast.checkpointer import Checkpointer
from holdfast.errors import ChunkCorrupt, Damaged, RuleError
from holdfast.formats.dcp.dcp_writer import write_dcp
from holdfast.formats.foreign_formats import open_source
from holdfast.store.reader import RunReader

SHAPES = {"0.weight": (12, 10), "0.bias": (12,), "1.weight": (7, 12), "1.bias": (7,)}
SLOTS = ("param", "exp_avg", "exp_avg_sq")
RULES = r"""
version = 1
mesh = {tp = 2}
[axes]
tp = "replicate"
[[files]]
match = 'rank(?P<tp>\d)\.pt'
[[rule]]
match = 'step\.(.*)'
slot = "step"
rename = "{1}"
[[rule]]
match = '(param|exp_avg|exp_avg_sq)\.(0\..*)'
shard = "tp"
dim = 0
slot = "{1}"
rename = "{2}"
[[rule]]
match = '(param|exp_avg|exp_avg_sq)\.(1\..*)'
slot = "{1}"
rename = "{2}"
"""


def zero1(root, state):
    write(root, state, 1, 2)


def zero3(root, state):
    write(root, state, 3, 2)


def universal(root, state):
    write_universal(root.parent / "universal", state, 1)
    (root.parent / "universal").rename(root)


def dcp(root, state):
    write(root.parent / "whole", state, 1, 1)
    write_dcp(open_source(root.parent / "whole"), root)


def rules(root, state):
    root.mkdir()
    (root / "rules.toml").write_text(RULES)
    for rank in range(2):
        content = {slot: {} for slot in (*SLOTS, "step")}
        for key, tensor in state.expected.items():
            name, _, slot = key.rpartition("/")
            cut = name.startswith("0.") and slot != "step"
            content[slot][name] = tensor.chunk(2)[rank].clone() if cut else tensor
        torch.save(content, root / f"rank{rank}.pt")


def huggingface(root, state):
    root.mkdir()
    save_file(state.groups[0], root / "model.safetensors")


FORMATS = {  # what makes it, and the files that its tensors are in
    zero1: "*/*optim_states.pt", zero3: "*/*optim_states.pt", universal: "*/zero/*/*.pt", dcp: "*.distcp",
    rules: "rank*.pt",
}  # fmt: skip


class Live:
    """A model with an optimizer that has stepped, and what it was before."""

    def __init__(self):
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(10, 12), nn.Linear(12, 7))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.5)
        self.model(torch.ones(1, 10)).sum().backward()
        self.optimizer.step()
        self.before = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def resume(self, root, source):
        with Checkpointer(root, model=self.model, optimizer=self.optimizer) as checkpointer:
            return checkpointer.resume(source=source)

    def is_untouched(self):
        (weights, optimizer), now = self.before, self.optimizer.state_dict()
        assert (
            now["param_groups"] == optimizer["param_groups"]
            and now["state"].keys() == optimizer["state"].keys()
        )
        pairs = [(weights[name], tensor) for name, tensor in self.model.state_dict().items()]
        for number, held in optimizer["state"].items():
            assert held.keys() == now["state"][number].keys()
            pairs += [(held[slot], now["state"][number][slot]) for slot in held]
        return all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture
def state():
    return random_state([SHAPES])


def held_by(live):
    found = {}
    for name, parameter in live.model.named_parameters():
        held = {"param": parameter.detach(), **live.optimizer.state[parameter]}
        found |= {f"{name}/{slot}": tensor for slot, tensor in held.items()}
    return found


def refused(tmp_path, source, error):
    """What was raised, when nothing was changed and nothing written."""
    live = Live()
    with pytest.raises(error) as raised:
        live.resume(tmp_path / "run", source)
    assert live.is_untouched()
    assert RunReader(tmp_path / "run").commits() == []
    return raised.value


@pytest.mark.filterwarnings("ignore:.*it has no random numbers")
@pytest.mark.parametrize("made", FORMATS)
def test_what_is_whole_is_resumed(tmp_path, state, made):
    made(tmp_path / "source", state)
    live = Live()
    if made is rules:
        with pytest.warns(UserWarning, match="hyper-parameters"):
            live.resume(tmp_path / "run", tmp_path / "source")
    else:
        live.resume(tmp_path / "run", tmp_path / "source")
    found = held_by(live)
    assert found.keys() == state.expected.keys()
    assert all(torch.equal(tensor, state.expected[key]) for key, tensor in found.items())


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("made", FORMATS)
def test_a_flipped_bit_is_refused_with_its_file_and_atom(tmp_path, state, made, slot):
    made(tmp_path / "source", state)
    tensor = state.expected[f"0.weight/{slot}"]
    path = flipped(tmp_path / "source", FORMATS[made], tensor.reshape(-1)[:8].numpy().tobytes())
    error = refused(tmp_path, tmp_path / "source", ChunkCorrupt)
    assert error.path == str(path) and str(path) in str(error)
    key = "model.0.weight" if slot == "param" else f"optim.state.0.weight.{slot}"
    assert (key if made is dcp else f"0.weight/{slot}") in error.atoms
    assert any(atom in str(error) for atom in error.atoms)


def flipped(root: Path, pattern: str, data: bytes) -> Path:
    """The file that has ``data``, of which a bit is another one now."""
    [path] = [path for path in root.glob(pattern) if data in path.read_bytes()]
    content = bytearray(path.read_bytes())
    content[content.index(data) + 5] ^= 8
    path.write_bytes(content)
    return path


ABSENT = {
    zero1: "data-parallel rank 1",
    zero3: "data-parallel rank 1",
    rules: "there is none at 1 of 2: it is missing",
}
"""How a file is named that is not there, where that is not by its name."""
FAULTS = [(made, fault) for made in FORMATS for fault in ("cut", "missing")]


@pytest.mark.parametrize(("made", "fault"), [*FAULTS, (huggingface, "cut")])
def test_a_file_that_is_cut_or_missing_is_refused_by_name(tmp_path, state, made, fault):
    made(tmp_path / "source", state)
    path = sorted((tmp_path / "source").glob(FORMATS.get(made, "*.safetensors")))[-1]
    if fault == "cut":
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    else:
        path.unlink()
    error = refused(tmp_path, tmp_path / "source", (Damaged, RuleError))
    assert (ABSENT.get(made, path.name) if fault == "missing" else path.name) in str(error)


def swapped(root: Path, pattern: str) -> None:
    one, two = sorted(root.glob(pattern))[:2]
    one.rename(root / "aside")
    two.rename(one)
    (root / "aside").rename(two)


@pytest.mark.parametrize("made", [zero1, zero3, universal])
def test_files_in_each_others_place_are_refused_by_name(tmp_path, state, made):
    made(tmp_path / "source", state)
    swapped(tmp_path / "source", FORMATS[made])
    assert "a file in the place of another" in str(refused(tmp_path, tmp_path / "source", Damaged))


@pytest.mark.parametrize("made", [zero1, zero3, rules])
def test_a_file_of_another_step_is_refused_by_name(tmp_path, state, made):
    later = random_state([SHAPES], step=state.step + 2)
    for name, of in (("source", state), ("later", later)):
        made(tmp_path / name, of)
    path = sorted((tmp_path / "source").glob(FORMATS[made]))[-1]
    path.write_bytes((tmp_path / "later" / path.relative_to(tmp_path / "source")).read_bytes())
    said = str(refused(tmp_path, tmp_path / "source", (Damaged, RuleError)))
    assert str(path) in said and ("0.weight/step differ" if made is rules else "of two checkpoints") in said
