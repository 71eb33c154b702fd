"""Folders of ranks' files that say nothing of their layout, with rules beside them, are sources like others."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from holdfast.checkpointer import Checkpointer
from holdfast.errors import BadInput, ChunkCorrupt, Damaged, RuleError
from holdfast.formats.entry_matching import groups_of
from holdfast.formats.foreign_formats import format_of, open_source
from holdfast.formats.load import refuse_unequal, unequal_copies
from holdfast.formats.memory_source import InMemory
from holdfast.formats.restore import read_tensors
from holdfast.formats.rules_source import UnderRules
from holdfast.opening import source_of
from holdfast.state.layout.regions import Region
from holdfast.state.rules.rule_language import Rules
from holdfast.state.tensor_entries import TensorEntry

TEXT = r"""
version = 1
[mesh]
pp = 2
tp = 2
[axes]
pp = "unique"
[[files]]
match = 'stage(?P<pp>\d+)/tensor(?P<tp>\d+)\.pt'
[[files]]
match = 'extra\.safetensors'
[[rule]]
match = 'model\.h\.(\d+)\.up'
shard = "tp"
dim = 0
rename = "layers.{1 + layers_each * pp}.up"
[[rule]]
match = 'model\.embed'
shard = "tp"
dim = 1
pad = {dim = 0, size = "vocab_size"}
rename = "embed"
[[rule]]
match = 'optimizer\.(exp_avg)\.h\.(\d+)\.up'
shard = "tp"
dim = 0
slot = "{1}"
rename = "layers.{2 + layers_each * pp}.up"
[[rule]]
match = 'norm'
"""


def tensors_of(source):
    """All of a source, by the key."""
    wanted = [(stored, Region.whole(stored.atom.shape)) for stored in source.atoms.values()]
    return dict(zip(source.atoms, read_tensors(source, wanted)))


@pytest.fixture
def folder(tmp_path):
    """Two stages of two layers, over two tensor parallel ranks each, whose vocabulary is padded; and what it is of."""
    generator = torch.Generator().manual_seed(0)
    whole = {f"layers.{n}.up/{slot}": torch.randn(6, 4, generator=generator)
             for n in range(4) for slot in ("param", "exp_avg")}  # fmt: skip
    whole["embed/param"] = torch.randn(5, 4, generator=generator)
    whole["norm/param"] = torch.randn(3, generator=generator)
    padded = torch.cat([whole["embed/param"], torch.full((3, 4), torch.nan)])
    for stage in range(2):
        (tmp_path / f"stage{stage}").mkdir()
        for t in range(2):
            rows = slice(3 * t, 3 * t + 3)
            model = {f"h.{n}.up": whole[f"layers.{2 * stage + n}.up/param"][rows] for n in range(2)}
            state = {f"h.{n}.up": whole[f"layers.{2 * stage + n}.up/exp_avg"][rows].clone() for n in range(2)}
            if stage == 0:
                model["embed"] = padded[:, 2 * t : 2 * t + 2]  # a view with strides of its own
            content = {"model": model, "optimizer": {"exp_avg": state}, "iteration": 7, "args": {"lr": 0.5}}
            torch.save(content, tmp_path / f"stage{stage}/tensor{t}.pt")
    save_file({"norm": whole["norm/param"]}, tmp_path / "extra.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 5, "layers_each": 2, "name": "x"}))
    (tmp_path / "rules.toml").write_text(TEXT)
    return tmp_path, whole


def test_files_of_ranks_are_whole_tensors_by_the_rules_beside_them(folder):
    path, whole = folder
    assert format_of(path) == "rules"
    source = open_source(path)
    found = tensors_of(source)
    assert sorted(found) == sorted(whole)
    for key, tensor in whole.items():
        assert torch.equal(found[key].reshape(tensor.shape), tensor), key
    assert source.progress["extra"]["files"]["stage1/tensor0.pt"] == {"iteration": 7, "args.lr": 0.5}
    for part in range(len(source.parts)):
        source.check(part)


def test_what_rules_average_or_drop_is_said_in_the_progress(tmp_path):
    for rank in range(2):
        torch.save({"norm": torch.full((3,), 2.0 * rank), "mask": torch.zeros(2)}, tmp_path / f"{rank}.pt")
    text = "version = 1\nmesh = {tp = 2}\nfiles = {match = '(?P<tp>\\d+)[.]pt'}\n"
    text += "[[rule]]\nmatch = 'mask'\ndrop = true\n[[rule]]\nmatch = 'norm'\naverage = 'tp'"
    (tmp_path / "rules.toml").write_text(text)
    source = open_source(tmp_path)
    assert source.progress["extra"] == {"averaged": ["norm/param"], "dropped": ["mask"]}
    assert torch.equal(tensors_of(source)["norm/param"], torch.ones(3))


def test_a_flipped_bit_of_a_file_is_found(folder):
    path, whole = folder
    file = path / "stage0/tensor0.pt"
    data = bytearray(file.read_bytes())
    data[data.index(whole["layers.0.up/param"][:3].numpy().tobytes()) + 5] ^= 1
    file.write_bytes(data)
    source = open_source(path)
    with pytest.raises(ChunkCorrupt, match=r"tensor0\.pt .*fails its CRC-32"):
        for part in range(len(source.parts)):
            source.check(part)


@pytest.mark.parametrize(
    "gone, number", [("stage0/tensor1.pt", 1), ("stage1/tensor0.pt", 0), ("*/tensor1.pt", 1)]
)
def test_files_that_are_missing_are_told(folder, gone, number):
    path, _ = folder
    for file in path.glob(gone):
        file.unlink()
    with pytest.raises(
        RuleError, match=rf"up/param: shard over tp: there is none at {number} of 2: it is missing"
    ):
        open_source(path)


def test_a_file_that_is_cut_short_or_no_archive_is_damaged(folder):
    path, _ = folder
    file = path / "stage1/tensor1.pt"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(Damaged, match=r"tensor1\.pt"):
        open_source(path)


def test_a_file_of_which_the_rules_say_nothing_is_refused(folder):
    path, _ = folder
    torch.save({}, path / "other.pt")
    with pytest.raises(
        RuleError, match=r"rules\.toml: 0 of 2 \[\[files\]\] match 'other\.pt', and one has to"
    ):
        open_source(path)


@pytest.mark.parametrize(
    "old, new, says",
    [
        (r"(?P<pp>\d+)/", "(?P<pp>.)/", r"has a group 'pp' that is not \(\?P<pp>\\d\+\)"),
        ("pp = 2", "dp = 2", "names the axis 'pp', and .mesh. does not say how long it is"),
        ("pp = 2", "pp = 1", "is said to be at pp 1 of 1"),
        ("[[files]]", "[[file]]", "'file', which nothing reads here"),
        ("match = 'norm'", "match = 'other'", r"no rule matches norm/param \[3\]"),
    ],
)  # fmt: skip
def test_rules_that_do_not_fit_the_files_are_refused(folder, old, new, says):
    path, _ = folder
    (path / "rules.toml").write_text(TEXT.replace(old, new))
    with pytest.raises(RuleError, match=says):
        open_source(path)


def test_a_configuration_that_is_none_is_refused(folder):
    path, _ = folder
    for text in ("[", '{"a":' * 5000):
        (path / "config.json").write_text(text)
        with pytest.raises(BadInput, match=r"its rules\.toml or config\.json cannot be read"):
            open_source(path)


# Under rules from outside


ALL = "[[rule]]\nmatch = '(.*)'\n"


def under(source, text):
    return UnderRules(source, Rules.parse(f"version = 1\n{text}", "rules"))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("equal", [True, False])
def test_copies_that_ranks_have_are_compared_under_other_rules_as_well(tmp_path, equal, turned):
    weight = torch.arange(6.0).reshape(2, 3)
    for rank in range(3):
        torch.save({"w": weight + (rank == 2 and not equal)}, tmp_path / f"{rank}.pt")
    text = "version = 1\nmesh = {tp = 3}\naxes = {tp = 'replicate'}\n"
    text += "files = {match = '(?P<tp>\\d+)[.]pt'}\n[[rule]]\nmatch = 'w'\n"
    (tmp_path / "rules.toml").write_text(text)
    source = under(open_source(tmp_path), ALL + ("transpose = true\n" if turned else ""))
    [stored] = source.atoms.values()
    assert len(stored.copies) == 2
    assert torch.equal(tensors_of(source)["w/param"], weight.T if turned else weight)
    if equal:
        refuse_unequal(source, [stored])
    else:
        [damage] = unequal_copies(source, [stored])
        assert "the copies of w/param differ" in str(damage)


@pytest.mark.parametrize(
    ("text", "aliases"),
    [
        (ALL, {"h": "e"}),
        (ALL + "rename = 'model.{$1}'\n", {"model.h": "model.e"}),
        ("[[rule]]\nmatch = 'h'\nrename = 'head'\nalias_of = 'e'\n" + ALL, {"head": "e"}),
        ("[[rule]]\nmatch = 'e'\nrename = 'x'\n", {}),
        ("[[rule]]\nmatch = '.'\nrename = 'x'\n", {}),
        ("[[rule]]\nmatch = 'h'\ndrop = true\n" + ALL, {}),
    ],
)  # fmt: skip
def test_other_names_of_a_tensor_are_those_that_rules_give_them(text, aliases):
    source = InMemory("there", "test", [(TensorEntry("e", "param", (2, 2), "F32"), torch.zeros(2, 2))], {})
    source.aliases["h"] = "e"
    assert under(source, text).aliases == aliases


def test_groups_of_a_run_have_the_names_that_rules_give(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([{"params": [model.bias], "lr": 0.5}, {"params": [model.weight]}])
    with Checkpointer(tmp_path, model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
    source = source_of(str(tmp_path))
    found = groups_of(under(source, ALL + "rename = 'inner.{$1}'\n").progress)
    assert [names for _, names in found] == [["inner.bias"], ["inner.weight"]]
    assert [group for group, _ in found] == [group for group, _ in groups_of(source.progress)]
