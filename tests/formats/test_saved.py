"""State dicts of torch.save are sources like others: of a model, or of a model and its optimizer in whatever form."""

from __future__ import annotations

import argparse
import json
import os
import re
import warnings
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from typer.testing import CliRunner

from combined import some_of
from holdfast.checkpointer import Checkpointer
from holdfast.cli.main import app
from holdfast.errors import BadInput, ChunkCorrupt, Damaged, FileMissing, HoldfastError, RunMismatch
from holdfast.formats import state_dict_progress
from holdfast.formats.dcp.dcp_writer import write_dcp
from holdfast.formats.foreign_formats import open_source
from holdfast.formats.restore import read_tensors
from holdfast.opening import source_of
from holdfast.sources import From
from holdfast.state.encoding import decode, encode
from holdfast.state.layout.regions import Region
from holdfast.state.progress import adopt

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:beginning from .* it has no random numbers"
)


class Decoder(nn.Module):
    """Tied at both ends, with a buffer and a norm: what scripts save by hand."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 4), nn.BatchNorm1d(4)
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.inner(self.norm(self.embed(tokens))))


def all_in_one(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def by_dimension(model):
    """Matrices before all else, as nanoGPT has them: numbers are not in the model's order."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.3}, {"params": others}], lr=0.1)


def by_name(model):
    """Groups in an order that no shapes tell, with names."""
    named = list(model.named_parameters())
    return torch.optim.AdamW([{"params": named[4:], "lr": 0.2}, {"params": named[:4]}], lr=0.1)


def go_on(model, optimizer, steps, seed):
    torch.manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randint(0, 7, (6,))).pow(2).mean().backward()
        optimizer.step()


def trained(optimizer_of=all_in_one, seed=1):
    return made_of(Decoder, optimizer_of, seed)


def made_of(cls, optimizer_of, seed):
    torch.manual_seed(seed)
    model = cls()
    optimizer = optimizer_of(model)
    go_on(model, optimizer, 3, seed)
    return model, optimizer


def exact(value):
    """With each tensor as its type, shape and bytes."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: exact(item) for key, item in value.items()}
    return [exact(item) for item in value] if isinstance(value, list | tuple) else value


def state_of(parts):
    return [exact(part.state_dict()) for part in parts]


def tensors_of(source):
    """All of a source, by the key."""
    wanted = [(stored, Region.whole(stored.atom.shape)) for stored in source.atoms.values()]
    return dict(zip(source.atoms, read_tensors(source, wanted), strict=True))


def lightning(model, optimizer):
    states = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    return {**states, "global_step": 3, "lr_schedulers": [], "callbacks": {}, "epoch": 0}


FORMS = {
    "nanoGPT": lambda m, o: {
        "model": m.state_dict(), "optimizer": o.state_dict(), "iter_num": 3, "config": {"lr": 0.1}, "best_loss": 2.5,
    },
    "tutorial": lambda m, o: {
        "epoch": 5, "model_state_dict": m.state_dict(), "optimizer_state_dict": o.state_dict(), "step": 3,
    },
    "lightning": lightning,
    "compiled": lambda m, o: {
        "net": {f"_orig_mod.{k}": v for k, v in m.state_dict().items()}, "optim": o.state_dict(),
        "step": torch.tensor(3),
    },
}  # fmt: skip


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("optimizer_of", [all_in_one, by_dimension, by_name])
@pytest.mark.parametrize("form", FORMS)
def test_a_training_goes_on_from_what_a_script_saved_of_it(tmp_path, form, optimizer_of):
    there = trained(optimizer_of)
    torch.save(FORMS[form](*there), tmp_path / "ckpt.pt")
    here = trained(optimizer_of, seed=2)
    with Checkpointer(tmp_path / "run", model=here[0], optimizer=here[1]) as checkpointer:
        assert checkpointer.resume(source=tmp_path / "ckpt.pt") == 3
    assert state_of(here) == state_of(there)
    for parts in (there, here):
        go_on(*parts, steps=2, seed=3)
    assert state_of(here) == state_of(there)


def test_names_of_parameters_from_get_state_dict_are_those_of_the_model(tmp_path):
    model, optimizer = trained(by_dimension)
    plain = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    torch.save(plain, tmp_path / "a.pt")
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "b.pt")
    one, other = (open_source(tmp_path / name) for name in ("a.pt", "b.pt"))
    assert one.progress["group_parameters"] == other.progress["group_parameters"]
    assert exact(tensors_of(one)) == exact({key: tensors_of(other)[key] for key in one.atoms})


class OwnModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.module, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.module(x))


@pytest.mark.parametrize("way", ["names", "numbers", "model", "wrapped", "dcp"])
def test_a_part_of_the_model_may_be_called_module(tmp_path, way):
    def made(seed):
        torch.manual_seed(seed)
        model = OwnModule()
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = made(0)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    weights = model.state_dict()
    names = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    if way == "dcp":
        with Checkpointer(tmp_path / "own", model=model, optimizer=optimizer) as checkpointer:
            checkpointer.resume()
        source = write_dcp(source_of(str(tmp_path / "own")), tmp_path / "dcp")
    else:
        wrapped = {"model": {f"module.{name}": weight for name, weight in weights.items()}}
        states = {
            "names": names,
            "numbers": {"model": weights, "optim": optimizer.state_dict()},
            "model": weights,
        }
        torch.save(
            {**states, "wrapped": wrapped | {"optim": names["optim"]}}[way], source := tmp_path / "a.pt"
        )
    other, its_optimizer = made(1)
    quiet = warnings.catch_warnings(action="ignore")  # of what such files do not have
    with quiet, Checkpointer(tmp_path / "run", model=other, optimizer=its_optimizer) as checkpointer:
        checkpointer.resume(source=source)
    assert repr(other.state_dict()) == repr(weights)
    if way != "model":
        assert repr(get_state_dict(other, its_optimizer)[1]) == repr(names["optim"])


class OnlyModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.module, self.dropout = nn.Linear(4, 4), nn.Dropout()


def test_the_only_child_of_a_model_may_be_called_module(tmp_path):
    there, here = (OnlyModule() for _ in range(2))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5) for model in (there, here)]
    there.module(torch.ones(1, 4)).sum().backward()
    optimizers[0].step()
    torch.save({"model": there.state_dict(), "optimizer": optimizers[0].state_dict()}, tmp_path / "x.pt")
    with Checkpointer(tmp_path / "run", model=here, optimizer=optimizers[1]) as checkpointer:
        checkpointer.resume(source=tmp_path / "x.pt")
    assert state_of((here, optimizers[1])) == state_of((there, optimizers[0]))


@pytest.mark.parametrize("at_top", [False, True])
def test_an_optimizer_of_a_part_does_not_make_the_part_the_model(tmp_path, at_top):
    model = nn.ModuleDict({"body": nn.Linear(3, 3), "head": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))})
    optimizer = torch.optim.AdamW(model["head"].named_parameters())
    model["head"](model["body"](torch.ones(1, 3))).sum().backward()
    optimizer.step()
    weights = model.state_dict() if at_top else {"model": model.state_dict()}
    torch.save({**weights, "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    found = open_source(tmp_path / "x.pt").atoms
    assert {atom.rpartition("/")[0] for atom in found if atom.endswith("/param")} == model.state_dict().keys()


def test_a_number_beside_a_model_is_not_the_model(tmp_path):
    torch.save(
        {"network": {"w": torch.ones(2), "b": torch.ones(())}, "best": torch.tensor(0.9)}, tmp_path / "x"
    )
    source = open_source(tmp_path / "x")
    assert source.atoms.keys() == {"w/param", "b/param"} and "best" in source.progress["extra"]


def test_dictionaries_in_what_is_called_a_model_are_parts_of_it(tmp_path):
    parts = {name: trained(seed=seed)[0].state_dict() for seed, name in enumerate(("encoder", "decoder"))}
    torch.save({"model": parts, "step": 4}, tmp_path / "x")
    found = tensors_of(open_source(tmp_path / "x"))
    assert torch.equal(found["decoder.embed.weight/param"], parts["decoder"]["embed.weight"])
    assert torch.equal(found["encoder.embed.weight/param"], parts["encoder"]["embed.weight"])


@pytest.mark.parametrize("suffix", [".pt", ".tar", ""])
def test_a_model_alone_is_weights_as_others_are(tmp_path, suffix):
    there, here = trained(), trained(seed=2)
    torch.save(there[0].state_dict(), tmp_path / f"model{suffix}")
    checkpointer = Checkpointer(tmp_path / "run", model=here[0], optimizer=here[1])
    with checkpointer, pytest.warns(UserWarning) as warned:
        assert checkpointer.resume(source=tmp_path / f"model{suffix}") == 0
    texts = "\n".join(str(each.message) for each in warned)
    assert "no optimizer state of embed.weight" in texts and "hyper-parameters" in texts
    assert exact(here[0].state_dict()) == exact(there[0].state_dict()) and not here[1].state


def test_what_is_the_same_memory_is_tied_and_nothing_else_is(tmp_path):
    model, _ = trained()
    torch.save(model.state_dict(), tmp_path / "a.pt")
    copied = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save({"ema": copied, "model": model.state_dict()}, tmp_path / "b.pt")
    for name in ("a.pt", "b.pt"):
        source = open_source(tmp_path / name)
        assert source.aliases == {"head.weight": "embed.weight"} and "head.weight/param" not in source.atoms
    torch.save(copied, tmp_path / "c.pt")
    assert open_source(tmp_path / "c.pt").aliases == {}


class HeadFirst(Decoder):
    """With the tied weight under its other name first, which is that of the file here."""

    def __init__(self):
        super().__init__()
        embed, norm, inner = self.embed, self.norm, self.inner
        del self.embed, self.norm, self.inner
        self.embed, self.norm, self.inner = embed, norm, inner


@pytest.mark.parametrize("is_updated", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_a_tied_weight_may_have_its_other_name_first(tmp_path, named, is_updated):
    def adamw(model):
        return torch.optim.AdamW(model.named_parameters() if named else model.parameters(), lr=0.1)

    there, here = made_of(Decoder, adamw, seed=1), made_of(HeadFirst, adamw, seed=2)
    if not is_updated:
        del there[1].state[there[0].embed.weight]
    torch.save({"model": there[0].state_dict(), "optimizer": there[1].state_dict()}, tmp_path / "x.pt")
    checkpointer = Checkpointer(tmp_path / "run", model=here[0], optimizer=here[1])
    with checkpointer, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        checkpointer.resume(source=tmp_path / "x.pt")
    assert not any("hyper-parameters" in str(each.message) for each in warned)
    assert exact(here[0].state_dict()) == exact(there[0].state_dict())
    mine, theirs = (
        {name: exact(o.state[p]) for name, p in m.named_parameters(remove_duplicate=False) if p in o.state}
        for m, o in (here, there)
    )
    assert mine == theirs and ("embed.weight" in mine) == is_updated


def test_numbers_that_may_mean_other_parameters_are_not_guessed(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    optimizer = torch.optim.AdamW([{"params": model[1].parameters()}, {"params": model[0].parameters()}])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    source = open_source(tmp_path / "x.pt")
    assert "optimizer.state.0/exp_avg" in source.atoms and "0.weight/exp_avg" not in source.atoms
    before = exact(model.state_dict())
    checkpointer = Checkpointer(tmp_path / "run", model=model, optimizer=optimizer)
    with (
        checkpointer,
        pytest.raises(RunMismatch, match=r"optimizer\.state\.0.* by param_names in its groups"),
    ):
        checkpointer.resume(source=tmp_path / "x.pt")
    assert exact(model.state_dict()) == before


@pytest.mark.parametrize("way", ["numbers", "dcp", "run"])
def test_what_no_gradient_has_reached_yet_has_no_state_and_needs_none(tmp_path, way):
    def made(seed):
        torch.manual_seed(seed)
        model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 2)])
        return model, torch.optim.AdamW(model.parameters())

    (model, optimizer), here = made(0), made(1)
    with Checkpointer(tmp_path / "run", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
        model[0](torch.ones(1, 3)).sum().backward()
        optimizer.step()
        checkpointer.step()
        checkpointer.save()
    if way == "dcp":
        write_dcp(source_of(str(tmp_path / "run")), tmp_path / "x")
    elif way == "numbers":
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x")
    start = From(tmp_path / ("run" if way == "run" else "x"), cast=True)
    checkpointer = Checkpointer(tmp_path / "here", model=here[0], optimizer=here[1])
    with checkpointer, pytest.warns(UserWarning, match=r"had not updated 1\.weight, 1\.bias yet"):
        checkpointer.resume(source=start)
    assert state_of(here) == state_of((model, optimizer)) and len(here[1].state) == 2


def by_dimension_of(cls):
    """Two groups, or one of all."""

    def made(model, two):
        groups = [[p for p in model.parameters() if (p.dim() >= 2) is matrices] for matrices in (True, False)]
        return cls([{"params": group} for group in groups] if two else model.parameters(), lr=0.1)

    return made


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("cls", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.Adafactor])
def test_numbers_and_factors_do_not_hide_which_parameter_a_number_is(tmp_path, cls, two):
    there, here = (trained(partial(by_dimension_of(cls), two=two), seed) for seed in (1, 2))
    torch.save({"model": there[0].state_dict(), "optimizer": there[1].state_dict()}, tmp_path / "x.pt")
    with Checkpointer(tmp_path / "run", model=here[0], optimizer=here[1]) as checkpointer:
        checkpointer.resume(source=tmp_path / "x.pt")
    assert state_of(here) == state_of(there)


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.alpha, self.inner = nn.Parameter(torch.tensor(0.5)), nn.Linear(7, 7, bias=False)

    def forward(self, x):
        return x + self.alpha * self.inner(x)


class Gated(Decoder):
    """With parameters that are numbers, as ReZero has them."""

    def __init__(self):
        super().__init__()
        self.gates = nn.Sequential(Gate(), Gate())

    def forward(self, tokens):
        return self.gates(super().forward(tokens))


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.NAdam])
def test_a_parameter_that_is_a_number_does_not_hide_which_the_others_are(tmp_path, cls, two):
    there, here = (made_of(Gated, partial(by_dimension_of(cls), two=two), seed) for seed in (1, 2))
    torch.save({"model": there[0].state_dict(), "optimizer": there[1].state_dict()}, tmp_path / "x.pt")
    with Checkpointer(tmp_path / "run", model=here[0], optimizer=here[1]) as checkpointer:
        checkpointer.resume(source=tmp_path / "x.pt")
    assert state_of(here) == state_of(there)


@pytest.mark.parametrize(
    "held", [{"row": torch.ones(3, 1)}, {"row": torch.ones(1, 2), "column": torch.ones(2, 1)}]
)
def test_state_of_other_shapes_than_the_model_has_is_not_named_by_order(tmp_path, held):
    """In a group alone too."""
    state = {"state": {0: held}, "param_groups": [{"params": [0]}]}
    torch.save({"model": {"w": torch.ones(3, 2)}, "optimizer": state}, tmp_path / "x.pt")
    assert "optimizer.state.0/row" in open_source(tmp_path / "x.pt").atoms


def test_views_and_types_are_what_they_were(tmp_path):
    tensors = {
        "transposed": torch.arange(24.0).reshape(4, 6).T, "bf16": torch.arange(5).bfloat16(),
        "scalar": torch.tensor(2.5),        "empty": torch.empty(0, 3), "part": torch.arange(30.0)[3:20:2],
        "fp8": torch.arange(4.0).to(torch.float8_e4m3fn),
        "expanded": torch.arange(3.0).reshape(3, 1).expand(3, 5), "parameter": nn.Parameter(torch.ones(2)),
    }  # fmt: skip
    torch.save(tensors, tmp_path / "x.pt")
    found = tensors_of(open_source(tmp_path / "x.pt"))
    for name, tensor in tensors.items():
        assert exact(found[f"{name}/param"]) == exact(tensor)


def test_what_is_neither_is_kept_beside(tmp_path, monkeypatch):
    monkeypatch.setattr(state_dict_progress, "SMALL_BYTES", 10)
    beside = {"numpy": np.float64(2.5), "rng": (1, (2, 3)), "raw": b"\0x", "ema": {"w": torch.ones(9)}}
    torch.save({"model": {"w": torch.zeros(9)}, "args": beside, "list": [{"a": 1}]}, tmp_path / "x.pt")
    source = open_source(tmp_path / "x.pt")
    assert source.atoms.keys() == {"w/param", "args.ema.w/extra"}
    extra = decode(source.progress["extra"])
    assert extra["args.raw"] == b"\0x" and extra["args.rng"] == (1, (2, 3)) and extra["list.0.a"] == 1


@pytest.mark.slow
def test_the_tools_know_them(tmp_path):
    torch.save(FORMS["nanoGPT"](*trained(by_dimension)), tmp_path / "ckpt.pt")
    path, run = str(tmp_path / "ckpt.pt"), CliRunner()
    shown = run.invoke(app, ["show", path]).output
    for text in ("torch.save", "step", "head.weight is embed.weight", "F32 param step exp_avg exp_avg_sq"):
        assert text in shown, shown
    assert json.loads(run.invoke(app, ["show", path, "--json"]).output)["writer"] == "torch.save"
    verified = run.invoke(app, ["verify", path])
    assert verified.exit_code == 0 and "stored arrays have one, and it agrees" in verified.output
    for to in ("holdfast", "safetensors"):
        made = str(tmp_path / f"made.{to}")
        assert run.invoke(app, ["convert", path, made, "--to", to]).exit_code == 0
        same = run.invoke(app, ["diff", path, made])
        assert same.exit_code == 0, same.output
    made = run.invoke(app, ["convert", path, str(tmp_path / "again.pt"), "--to", "torch"])
    assert made.exit_code == 0 and run.invoke(app, ["diff", path, str(tmp_path / "again.pt")]).exit_code == 0


# Damaged, hostile, or something else


def test_damage_is_found_before_a_tensor_is_touched(tmp_path):
    there, here = trained(), trained(seed=2)
    path = tmp_path / "ckpt.pt"
    torch.save(FORMS["nanoGPT"](*there), path)
    source = open_source(path)
    before, data = state_of(here), path.read_bytes()
    for key in ("norm.weight/param", "inner.weight/exp_avg"):
        [number] = source.atoms[key].pieces.part.tolist()
        flipped = bytearray(data)
        flipped[source.parts[number].offset + 1] ^= 16
        path.write_bytes(flipped)
        checkpointer = Checkpointer(tmp_path / "run", model=here[0], optimizer=here[1])
        with checkpointer, pytest.raises(ChunkCorrupt, match=r"ckpt\.pt at offset .* fails its CRC-32"):
            checkpointer.resume(source=path)
        assert state_of(here) == before
    assert not list((tmp_path / "run").glob("commits/*"))


@pytest.mark.slow
def test_a_bit_that_is_flipped_anywhere_is_told_or_changes_nothing(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"w": torch.arange(3.0), "optimizer": {"state": {}, "param_groups": []}, "step": 7}, path)
    data, expected = path.read_bytes(), exact((tensors_of(open_source(path)), open_source(path).progress))
    told = 0
    for place in some_of(5, range(len(data))):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        try:
            source = open_source(path)
            assert exact((tensors_of(source), source.progress)) == expected, place
        except HoldfastError:
            told += 1
    assert told > 30


class Runs:
    def __reduce__(self):
        return os.system, ("touch ran",)


def test_a_pickle_that_would_run_something_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"w": torch.ones(2)}, "more": Runs()}, tmp_path / "x.pt")
    here = trained()
    checkpointer = Checkpointer(tmp_path / "run", model=here[0], optimizer=here[1])
    with checkpointer, pytest.raises(Damaged, match=r"x\.pt names posix\.system.*Nothing was executed"):
        checkpointer.resume(source=tmp_path / "x.pt")
    torch.save(nn.Linear(2, 2), tmp_path / "whole.pt")
    with pytest.raises(Damaged, match=r"names torch\.nn\.modules\.linear\.Linear"):
        open_source(tmp_path / "whole.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([torch.ones(2)], "holds a list and no state dict"), (torch.ones(2), "holds a tensor and no state dict"),
        ({"lr": 0.1}, "holds no tensors"), ({}, "holds no tensors"),
    ],
)  # fmt: skip
def test_what_is_no_state_of_a_model_is_said_to_be_none(tmp_path, content, text):
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(BadInput, match=text):
        open_source(tmp_path / "x.pt")


@pytest.mark.parametrize(
    "content",
    [
        {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}},
        {"w": torch.ones(2), "optim": {"state": {0: {"x": torch.ones(2)}}, "param_groups": [1, 2]}},
        {
            "w": torch.ones(2),
            "optim": {"state": {0: {"x": torch.ones(2)}}, "param_groups": [{"params": [[1]]}]},
        },
        {"w": torch.ones(2), "optim": {"state": {}, "param_groups": [{"params": 3}]}},
        {"w": torch.ones(1).expand(1 << 30)},
        {
            "w": torch.ones(2),
            "optim": {"state": {}, "param_groups": [{"params": [[1]], "param_names": ["w"]}]},
        },
        {"w": torch.ones(2), "optim": {"state": {}, "param_groups": [{"params": [1], "param_names": [{}]}]}},
    ],
)
def test_a_state_dict_of_no_sense_is_refused_by_file(tmp_path, content):
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(Damaged, match=r"x\.pt"):
        open_source(tmp_path / "x.pt")


def test_milestones_are_those_that_were_counted(tmp_path):
    model, optimizer = trained()
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**states, "scheduler": schedule.state_dict()}, tmp_path / "x.pt")
    found = decode(open_source(tmp_path / "x.pt").progress["scheduler"])
    assert found == schedule.state_dict() and isinstance(found["milestones"], Counter)


def test_hyper_parameters_and_a_step_may_be_numbers_of_numpy(tmp_path):
    there, here = trained(), trained(seed=2)
    there[1].param_groups[0]["lr"] = np.float64(0.25)
    states = {"model": there[0].state_dict(), "optimizer": there[1].state_dict()}
    torch.save({**states, "step": np.int64(7)}, tmp_path / "x.pt")
    with Checkpointer(tmp_path / "run", model=here[0], optimizer=here[1]) as checkpointer:
        assert checkpointer.resume(source=tmp_path / "x.pt") == 7
    lr = here[1].param_groups[0]["lr"]
    assert lr == 0.25 and type(lr) is float


@pytest.mark.parametrize("way", ["a file", "dcp"])
def test_hyper_parameters_may_be_tensors_in_a_tuple_and_have_another_direction(tmp_path, way):
    betas = torch.tensor(0.8), torch.tensor(0.95)
    there, here = trained(), trained(seed=2)
    there[1].param_groups[0] |= {
        "lr": torch.tensor(0.25),
        "betas": betas,
        "capturable": True,
        "maximize": True,
    }
    state = dict(zip(("model", "optimizer"), get_state_dict(*there), strict=True))
    if way == "dcp":
        dcp.save(state, checkpoint_id=tmp_path / "x.pt", no_dist=True)
    else:
        torch.save(state, tmp_path / "x.pt")
    with Checkpointer(tmp_path / "run", model=here[0], optimizer=here[1]) as checkpointer:
        checkpointer.resume(source=tmp_path / "x.pt")
    [group] = here[1].param_groups
    assert exact(group["lr"]) == exact(torch.tensor(0.25)) and group["maximize"] is True
    assert type(group["betas"]) is tuple and exact(group["betas"]) == exact(betas)
    assert not group["capturable"]


def test_a_hyper_parameter_that_is_an_object_is_refused_before_anything_changes(tmp_path):
    there, here = trained(), trained(seed=2)
    there[1].param_groups[0]["lr"] = argparse.Namespace(a=1)
    torch.save({"model": there[0].state_dict(), "optimizer": there[1].state_dict()}, tmp_path / "x.pt")
    before = state_of(here)
    checkpointer = Checkpointer(tmp_path / "run", model=here[0], optimizer=here[1])
    with (
        checkpointer,
        pytest.raises(BadInput, match=r"'lr' of embed\.weight is an object .argparse\.Namespace"),
    ):
        checkpointer.resume(source=tmp_path / "x.pt")
    assert state_of(here) == before


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_old_versions_counted_in_numbers_are_counted_on(tmp_path, fused):
    there, here = trained(), trained(seed=2)
    here[1].param_groups[0]["fused"] = fused or None
    old = there[1].state_dict()
    old["state"] = {n: {**slots, "step": int(slots["step"])} for n, slots in old["state"].items()}
    torch.save({"model": there[0].state_dict(), "optimizer": old}, tmp_path / "x.pt")
    with Checkpointer(tmp_path / "run", model=here[0], optimizer=here[1]) as checkpointer:
        checkpointer.resume(source=tmp_path / "x.pt")
    steps = [slots["step"] for slots in here[1].state.values()]
    assert steps == [3.0] * len(old["state"]) and {step.dtype for step in steps} == {torch.float32}
    for parts in (there, here):
        go_on(*parts, steps=2, seed=3)
    if not fused:
        assert exact(here[0].state_dict()) == exact(there[0].state_dict())


class Counting(torch.optim.SGD):
    """Of those that count in numbers."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1
        return super().step(closure)


def test_a_class_that_counts_in_numbers_goes_on_with_numbers(tmp_path):
    there, here = (trained(lambda model: Counting(model.parameters(), lr=0.1), seed) for seed in (1, 2))
    torch.save({"model": there[0].state_dict(), "optimizer": there[1].state_dict()}, tmp_path / "x.pt")
    with Checkpointer(tmp_path / "run", model=here[0], optimizer=here[1]) as checkpointer:
        checkpointer.resume(source=tmp_path / "x.pt")
    assert [type(slots["step"]) for slots in here[1].state.values()] == [int] * len(here[1].state)
    assert state_of(here) == state_of(there)


class Preconditioned(Counting):
    """Of those that keep lists of tensors, some of them empty, as SOAP does."""

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                parts = [torch.full((n, n), float(n)) if n < 7 else [] for n in p.shape]
                self.state[p].setdefault("factors", {"left": parts, "order": [1, 2]})
        return loss


@pytest.mark.parametrize("way", ["a file", "names", "dcp"])
def test_lists_that_an_optimizer_keeps_are_lists_again_or_refused(tmp_path, way):
    there, here = (trained(lambda model: Preconditioned(model.parameters(), lr=0.1), seed) for seed in (1, 2))
    states = {"model": there[0].state_dict(), "optimizer": there[1].state_dict()}
    if way != "a file":
        states = dict(zip(("model", "optimizer"), get_state_dict(*there), strict=True))
    if way == "dcp":
        dcp.save(states, checkpoint_id=tmp_path / "x")
    else:
        torch.save(states, tmp_path / "x")
    checkpointer, before = Checkpointer(tmp_path / "run", model=here[0], optimizer=here[1]), state_of(here)
    with checkpointer:
        if way == "dcp":
            with pytest.raises(
                RunMismatch,
                match=r"embed\.weight it has nested state \(factors\), which is only.*from the file of torch\.save",
            ):
                checkpointer.resume(source=tmp_path / "x")
            assert state_of(here) == before
        else:
            checkpointer.resume(source=tmp_path / "x")
            assert state_of(here) == state_of(there)
            assert here[1].state[here[0].embed.weight]["factors"]["left"][0] == []


NESTED = {
    "none before": ([None, torch.ones(2)], True),
    "none after": ([torch.ones(2), None], True),
    "names": ({"a": torch.ones(2), "b": [None, {"c": torch.ones(1)}]}, True),
    "places": ({0: torch.ones(2), 1: torch.ones(2)}, False),
    "texts of places": ({"0": torch.ones(2), "1": torch.ones(2)}, False),
    "numbers": ({2: torch.ones(2), 5: torch.ones(2)}, False),
    "a dot": ({"a.b": torch.ones(2)}, False),
    "numbers in a list": ([{3: None}, torch.ones(2)], False),
}


@pytest.mark.parametrize("form", NESTED)
def test_nested_state_is_what_it_was_or_refused(tmp_path, form):
    nested, taken = NESTED[form]
    there, here = (trained(lambda model: Counting(model.parameters(), lr=0.1), seed) for seed in (1, 2))
    there[1].state[there[0].inner.weight]["factors"] = nested
    torch.save({"model": there[0].state_dict(), "optimizer": there[1].state_dict()}, tmp_path / "x.pt")
    before = state_of(here)
    with Checkpointer(tmp_path / "run", model=here[0], optimizer=here[1]) as checkpointer:
        if taken:
            checkpointer.resume(source=tmp_path / "x.pt")
        else:
            with pytest.raises(RunMismatch, match=r"inner\.weight it has nested state \(factors\), by keys"):
                checkpointer.resume(source=tmp_path / "x.pt")
    assert state_of(here) == (state_of(there) if taken else before)


@pytest.mark.parametrize("key", [0, "a.b"])
def test_a_slot_that_is_not_called_by_a_name_is_refused(tmp_path, key):
    there, here = (trained(lambda model: Counting(model.parameters(), lr=0.1), seed) for seed in (1, 2))
    there[1].state[there[0].inner.weight][key] = torch.ones(4, 4)
    torch.save({"model": there[0].state_dict(), "optimizer": there[1].state_dict()}, tmp_path / "x.pt")
    checkpointer = Checkpointer(tmp_path / "run", model=here[0], optimizer=here[1])
    with checkpointer, pytest.raises(RunMismatch, match="by keys that are no names"):
        checkpointer.resume(source=tmp_path / "x.pt")


def raised(state, by):
    return {name: tensor + by for name, tensor in state.items()}


BESIDE_AVERAGES = {
    "deeper": lambda m, o: {"ema": {"model": raised(m, 1)}, "model": m, "optimizer": o},
    "deeper, and no optimizer": lambda m, o: {"ema": {"model": raised(m, 1)}, "model": m},
    "deeper, by number": lambda m, o: {"a": {"state_dict": raised(m, 1)}, "state_dict": m, "optimizer": o},
    "deeper, by another name": lambda m, o: {"ema": {"model": raised(m, 1)}, "state_dict": m, "optimizer": o},
    "above": lambda m, o: {"ema": raised(m, 1), **m},
}


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("by_names", [False, True])
@pytest.mark.parametrize("form", BESIDE_AVERAGES)
def test_averages_are_not_taken_for_the_model(tmp_path, form, by_names):
    model, optimizer = trained()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    torch.save(
        BESIDE_AVERAGES[form](of_model, of_optimizer if by_names else optimizer.state_dict()), tmp_path / "x"
    )
    found = tensors_of(open_source(tmp_path / "x"))
    assert torch.equal(found["embed.weight/param"], model.embed.weight)


@pytest.mark.parametrize("with_optimizer", [False, True])
@pytest.mark.parametrize("names", [("ema", "unet"), ("unet", "ema"), ("a.model", "b.model")])
def test_which_of_two_is_the_model_is_not_guessed(tmp_path, names, with_optimizer):
    model, optimizer = trained()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    states = {}
    for by, name in enumerate(names):
        place = states
        for part in name.split("."):
            place = place.setdefault(part, {})
        place.update(raised(of_model, by))
    torch.save({**states, "optimizer": of_optimizer} if with_optimizer else states, tmp_path / "x.pt")
    with pytest.raises(BadInput, match=rf"x\.pt holds several .* model: {names[0]}, {names[1]}\. Save it"):
        open_source(tmp_path / "x.pt")


@pytest.mark.parametrize(
    ("steps", "step"),
    [
        ({"step": 37, "global_step": 120_000}, 120_000), ({"loop": {"step": 5}, "global_step": 9}, 9),
        ({"step": 37, "loop": {"global_step": 9}}, 37), ({"iter_num": 3}, 3),
    ],
)  # fmt: skip
def test_the_step_is_the_outermost_and_of_all_epochs(tmp_path, steps, step):
    torch.save({"model": {"w": torch.ones(2)}, **steps}, tmp_path / "x.pt")
    assert open_source(tmp_path / "x.pt").progress.get("step") == step


def test_a_schedule_by_numbers_is_no_list(tmp_path):
    torch.save(
        {"model": {"w": torch.ones(2)}, "scheduler": {"at": {5: 0.1, 7: 0.2}, "l": [{"a": 1}]}},
        tmp_path / "x.pt",
    )
    assert open_source(tmp_path / "x.pt").progress["scheduler"] == {
        "at": {"5": 0.1, "7": 0.2},
        "l": [{"a": 1}],
    }


def test_a_schedule_of_other_keys_is_left_and_named():
    _, optimizer = trained()
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    before = schedule.state_dict()
    for milestones, is_left in (({"a": 1}, True), ({"2.5": 1}, True), ({"3": 1}, False)):
        told = adopt({"scheduler": schedule}, {"scheduler": encode({**before, "milestones": milestones})})
        assert [text.startswith("its scheduler is of another kind; ") for text in told] == [True] * is_left
    assert schedule.milestones == Counter([3])


class Halving:
    """A rule for LambdaLR that is an object: what it is made of is kept, code is not."""

    def __call__(self, step):
        return 0.5**step


def lambda_of(rule):
    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rule)


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)


def of_older_torch(state):
    del state["_is_initial"]
    return {**state, "verbose": False}


SCHEDULES = {
    "of an older torch": (cosine, lambda state: {"scheduler": of_older_torch(state)},
        r"another version \(it has verbose, and it lacks _is_initial\); the rest"),
    "of Lightning": (cosine, lambda state: {"lr_schedulers": [state]}, None),
    "of an object": (lambda_of(Halving()), lambda s: {"scheduler": s}, None),
    "of no object": (lambda_of(lambda step: 0.5**step), lambda s: {"scheduler": s}, None),
    "after its name": (cosine, lambda s: {"scheduler": "cosine", "lr_scheduler": s}, None),
    "beside its name": (cosine, lambda s: {"config": {"scheduler": "cosine"}, "lr_scheduler": s}, None),
    "before its name": (
        cosine,
        lambda s: {"lr_schedulers": [s], "hyper_parameters": {"scheduler": "cosine"}},
        None,
    ),
    "beside what makes it": (
        cosine,
        lambda s: {"config": {"scheduler": {"T_max": 7, "warm": [3]}}, "lr_scheduler": s},
        None,
    ),
}  # fmt: skip


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("way", ["a file", "dcp"])
@pytest.mark.parametrize("form", SCHEDULES)
def test_a_schedule_goes_on_however_it_was_saved(tmp_path, form, way):
    made, saved_as, text = SCHEDULES[form]
    there, here = trained(), trained(seed=2)
    schedule, goes_on = made(there[1]), made(here[1])
    for _ in range(3):
        go_on(*there, steps=1, seed=3)
        schedule.step()
    states = dict(zip(("model", "optimizer"), get_state_dict(*there), strict=True))
    states |= saved_as(schedule.state_dict())
    torch.save(states, tmp_path / "x") if way == "a file" else dcp.save(states, checkpoint_id=tmp_path / "x")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with Checkpointer(
            tmp_path / "run", model=here[0], optimizer=here[1], scheduler=goes_on
        ) as checkpointer:
            checkpointer.resume(source=tmp_path / "x")
    texts = [str(each.message) for each in warned if "beginning from" in str(each.message)]
    assert len(texts) == (text is not None) and all(re.search(text, each) for each in texts), texts
    assert goes_on.last_epoch == 3 and goes_on.get_last_lr() == schedule.get_last_lr()
    assert "_is_initial" in goes_on.state_dict()


@pytest.mark.parametrize("saved", [[], None, {"last_epoch": 3, "gamma": 0.5}, [{"a": 1}, {"b": 2}], 3])
def test_a_schedule_that_is_not_there_and_one_of_another_kind_are_told_apart(saved):
    schedule = torch.optim.lr_scheduler.StepLR(trained()[1], 2)
    before = schedule.state_dict()
    [text] = adopt({"scheduler": schedule}, {"scheduler": saved})
    assert ("it has no scheduler" in text) == (not saved) and ("another kind" in text) == bool(saved)
    assert (
        schedule.state_dict() == before
        and adopt({"scheduler": schedule}, {"scheduler": encode(before)}) == []
    )


class Warming(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer):
        self._steps = 5
        super().__init__(optimizer)

    def get_lr(self):
        return [lr * min(1, (self.last_epoch + 1) / self._steps) for lr in self.base_lrs]


class Decaying(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer):
        self._factor = 0.5
        super().__init__(optimizer)

    def get_lr(self):
        return [lr * self._factor**self.last_epoch for lr in self.base_lrs]


def in_parts(*lengths):
    def made(optimizer):
        parts = [torch.optim.lr_scheduler.StepLR(optimizer, length) for length in lengths]
        return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [*range(1, len(parts))])

    return made


@pytest.mark.parametrize(
    ("there", "here"),
    [(Warming, Decaying), (in_parts(2, 3, 4), in_parts(2, 3)), (in_parts(2, 3), in_parts(2, 3, 4))],
)
def test_a_schedule_of_another_class_or_of_more_parts_is_left(there, here):
    saved, goes_on = there(trained()[1]), here(trained(seed=2)[1])
    before = exact(goes_on.state_dict())
    [text] = adopt({"scheduler": goes_on}, {"scheduler": encode(saved.state_dict())})
    assert "its scheduler is of another kind" in text and exact(goes_on.state_dict()) == before


def test_a_negative_step_is_none(tmp_path):
    torch.save({"model": {"w": torch.ones(2)}, "step": -3}, tmp_path / "x.pt")
    assert "step" not in open_source(tmp_path / "x.pt").progress


def test_a_file_without_the_zip_format_says_how_it_is_read(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(Damaged, match="loading and saving them again with torch"):
        open_source(tmp_path / "old.pt")


# Folders of several


@pytest.fixture
def folder(tmp_path):
    state = trained()[0].state_dict()
    folder, names = tmp_path / "hf", list(state)
    folder.mkdir()
    where = {}
    for number in (1, 2):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        mine = names[:2] if number == 1 else names[2:]
        torch.save({name: state[name] for name in mine}, folder / file)
        where |= dict.fromkeys(mine, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    return folder, state


def test_a_folder_with_an_index_is_one_model(tmp_path, folder):
    folder, state = folder
    found = tensors_of(open_source(folder))
    assert {key.rpartition("/")[0] for key in found} == state.keys()
    assert all(torch.equal(tensor, state[key.rpartition("/")[0]]) for key, tensor in found.items())
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert open_source(tmp_path).atoms.keys() == found.keys() - {"head.weight/param"}


@pytest.mark.parametrize("change", ["missing file", "missing tensor", "outside", "no json"])
def test_an_index_that_is_not_so_is_refused(folder, change):
    folder, _ = folder
    path = folder / "pytorch_model.bin.index.json"
    index = json.loads(path.read_text())
    if change == "missing file":
        (folder / "pytorch_model-00002-of-00002.bin").unlink()
    elif change == "missing tensor":
        index["weight_map"]["more"] = "pytorch_model-00001-of-00002.bin"
    elif change == "outside":
        index["weight_map"]["more"] = "../x.bin"
    path.write_text("{" if change == "no json" else json.dumps(index))
    error = FileMissing if change == "missing file" else Damaged
    with pytest.raises(error, match=r"is missing|is in no file|is no index"):
        open_source(folder)


def test_weights_of_another_shape_are_refused_with_nothing_changed(tmp_path):
    torch.save(nn.Linear(3, 3).state_dict(), tmp_path / "x.pt")
    model = nn.Linear(2, 2)
    before = exact(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = Checkpointer(tmp_path / "run", model=model, optimizer=optimizer)
    with checkpointer, pytest.raises(RunMismatch, match=r"weight is \[3, 3\] in the source"):
        checkpointer.resume(source=From(tmp_path / "x.pt", partial=True))
    assert exact(model.state_dict()) == before


def test_one_file_goes_before_the_index_of_an_earlier_save(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    stale = {"weight_map": {"w": "pytorch_model-00001-of-00002.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(stale))
    assert list(source_of(str(tmp_path)).atoms) == ["w/param"]


class Numbers(nn.Module):
    """All parameters of which are of no dimension."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return x * self.scale + self.shift


BESIDE = {
    "nothing": {},
    "a count": {"step": torch.tensor(3)},
    "a generator": {"rng": torch.get_rng_state()},
    "generators": {"random": {"cpu": torch.get_rng_state()}},
}


@pytest.mark.campaign(cover=2)
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("called", ["model", "mine"])
@pytest.mark.parametrize("kind", [Numbers, partial(nn.Linear, 1, 1)])
@pytest.mark.parametrize("way", ["a file", "dcp"])
def test_a_model_of_numbers_alone_is_found_beside_others(tmp_path, kind, called, beside, way):
    def made(seed):
        torch.manual_seed(seed)
        model = kind()
        optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
        for _ in range(seed):
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
        return model, optimizer

    there, here = made(2), made(1)
    states = {called: there[0].state_dict(), "optim": there[1].state_dict(), **BESIDE[beside]}
    torch.save(states, tmp_path / "x") if way == "a file" else dcp.save(states, checkpoint_id=tmp_path / "x")
    with Checkpointer(tmp_path / "run", model=here[0], optimizer=here[1]) as checkpointer:
        checkpointer.resume(source=tmp_path / "x")
    assert exact(here[0].state_dict()) == exact(there[0].state_dict())
    for one, other in zip(there[0].parameters(), here[0].parameters(), strict=True):
        assert exact(here[1].state[other]) == exact(there[1].state[one])
