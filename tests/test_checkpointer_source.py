"""A fresh run begins from another run, or from a state of another library, and training goes on as it would have."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from checkpoint.loops import FEATURES, cut_small, make, same
from holdfast import sources
from holdfast.checkpointer import Checkpointer
from holdfast.errors import BadInput, ChunkCorrupt, Damaged, NoCommit, RunMismatch
from holdfast.events import read_events
from holdfast.formats.readers.huggingface import write_huggingface
from holdfast.formats.run_directory import CommitSource, write_run
from holdfast.opening import source_of
from holdfast.optim import AdamWBF16
from holdfast.sources import From
from holdfast.store.reader import RunReader
from test_checkpointer import ADAMW, go_on, reference, start

HAVE_THEIR_SCRIPT = ("average", "ema")
"""What is done after an update only the script can replay, so such runs are begun from where they saved."""


@pytest.fixture
def other(tmp_path):
    """A run of 7 steps, the last ones in records."""
    return run_of(tmp_path / "other", "batchnorm")


def run_of(root, feature, save=False):
    loop, checkpointer = start(root, feature)
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 7)
        if save:
            checkpointer.save()
    return root


@pytest.mark.campaign(keep=5)
@pytest.mark.parametrize("feature", ["", *FEATURES])
def test_training_goes_on_from_another_run_as_if_it_were_that_one(tmp_path, feature):
    other = run_of(tmp_path / "other", feature, save=feature in HAVE_THEIR_SCRIPT)
    states, losses = reference(12, feature)
    loop = make(ADAMW, feature, seed=5)
    checkpointer = Checkpointer(tmp_path / "run", model=loop.model, optimizer=loop.optimizers, **loop.things)
    with checkpointer:
        assert checkpointer.resume(source=other) == 7
        assert same(loop.state(), states[7])
        go_on(loop, checkpointer, 12)
    assert same(loop.state(), states[12]) and loop.losses == losses[-len(loop.losses) :]
    assert RunReader(tmp_path / "run").head().step >= 7


def test_a_run_that_has_steps_goes_on_from_its_own(tmp_path, other):
    loop, checkpointer = start(tmp_path / "run")
    with checkpointer:
        checkpointer.resume(source=f"{other}@0")
        go_on(loop, checkpointer, 3)
    loop, checkpointer = start(tmp_path / "run")
    with checkpointer:
        assert checkpointer.resume(source=other) == 3


def test_a_step_that_records_lead_to_can_be_begun_from(tmp_path, other):
    states, _ = reference(7)
    loop, checkpointer = start(tmp_path / "run")
    with checkpointer:
        assert checkpointer.resume(source=f"{other}@5") == 5
        assert same(loop.state(), states[5])
    loop, checkpointer = start(tmp_path / "run2")
    with checkpointer, pytest.raises(NoCommit, match="cannot be brought to step 70"):
        checkpointer.resume(source=f"{other}@70")


@pytest.mark.parametrize("wrong", [{"source": "nowhere"}, {"step": 5}])
def test_refused_resume_leaves_nothing(tmp_path, wrong):
    """A directory is left as it was found: absent, or with the files of others alone."""
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    for run in ("used", "new/run"):
        checkpointer = start(tmp_path / run)[1]
        with checkpointer, pytest.raises(BadInput):
            checkpointer.resume(**wrong)
    assert sorted(tmp_path.rglob("*")) == before


def test_weights_alone_begin_a_run_at_step_0_and_say_what_they_lack(tmp_path, other):
    reader = RunReader(other)
    write_huggingface(CommitSource(reader, reader.at(0)), tmp_path / "hf")
    states, _ = reference(0)
    loop = make(ADAMW, "batchnorm", seed=5)
    checkpointer = Checkpointer(tmp_path / "run", model=loop.model, optimizer=loop.optimizers)
    with checkpointer, pytest.warns(UserWarning) as warned:
        assert checkpointer.resume(source=tmp_path / "hf") == 0
    assert all(map(torch.equal, loop.model.state_dict().values(), states[0]["model"].values()))
    texts = "\n".join(str(each.message) for each in warned)
    assert "no optimizer state of scale, first.weight" in texts and "hyper-parameters" in texts
    [event] = [e for e in read_events(tmp_path / "run" / "events.jsonl") if e["event"] == "began_from"]
    assert event["step"] == 0 and len(event["told"]) == 2


class Renamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)


@pytest.fixture
def weights(tmp_path):
    torch.manual_seed(1)
    tensors = {
        "old.body.weight": torch.randn(3, 4),
        "old.body.bias": torch.randn(3).bfloat16(),
        "more": torch.ones(2),
    }
    save_file(tensors, tmp_path / "w.safetensors")
    return tensors


def begin(tmp_path, start):
    torch.manual_seed(2)
    model = Renamed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with Checkpointer(tmp_path / "run", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume(source=start)
    return model.state_dict(), before


def test_names_types_and_what_is_missing_differ_only_where_that_is_allowed(tmp_path, weights):
    start = From(tmp_path / "w.safetensors", rename={r"body\.(.*)": r"old.body.\1"}, partial=True, cast=True)
    with pytest.warns(UserWarning) as warned:
        after, before = begin(tmp_path, start)
    assert torch.equal(after["body.weight"], weights["old.body.weight"])
    assert torch.equal(after["body.bias"], weights["old.body.bias"].float())
    assert torch.equal(after["head.weight"], before["head.weight"])
    texts = "\n".join(str(each.message) for each in warned)
    assert "it has no head.weight, head.bias, which stay as they are" in texts
    assert "nothing here wants its more" in texts and "body.bias were converted" in texts


@pytest.mark.parametrize(
    ("allowed", "text"),
    [
        ({}, "it has no body.weight, it has no body.bias, it has no head.weight and"),
        (
            {"rename": {r"body\.(.*)": r"old.body.\1"}, "partial": True},
            r"body\.bias is BF16 in the source and F32 here",
        ),
        ({"rename": {r"body\.(.*)": r"old.body.\1"}, "cast": True}, "it has no head.weight"),
        (
            {"rename": {r"(body|head).weight": "old.body.weight"}, "partial": True},
            r"is \[3, 4\] in the source and \[2, 3\]",
        ),
    ],
)
def test_what_is_not_allowed_is_refused_with_nothing_changed_and_nothing_written(
    tmp_path, weights, allowed, text
):
    torch.manual_seed(2)
    model = Renamed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    checkpointer = Checkpointer(tmp_path / "run", model=model, optimizer=optimizer)
    with checkpointer, pytest.raises(RunMismatch, match=text):
        checkpointer.resume(source=From(tmp_path / "w.safetensors", **allowed))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert RunReader(tmp_path / "run").commits() == []


@pytest.mark.parametrize("slot", ["param", "exp_avg"])
def test_damage_is_found_before_a_tensor_is_touched(tmp_path, other, slot):
    copy = tmp_path / "copy"
    write_run(source_of(str(other)), copy)
    reader = RunReader(copy)
    commit = CommitSource(reader, reader.at(7))
    part = commit.parts[next(iter(commit.atoms[f"second.weight/{slot}"].pieces)).part]
    data = bytearray((copy / part.path).read_bytes())
    data[part.offset] ^= 1
    (copy / part.path).write_bytes(data)
    loop = make(ADAMW, "batchnorm", seed=5)
    loop.iteration(0, lambda: None)
    before = loop.state()
    checkpointer = Checkpointer(tmp_path / "run", model=loop.model, optimizer=loop.optimizers)
    with checkpointer, pytest.raises(ChunkCorrupt, match="fail"):
        checkpointer.resume(source=f"{copy}@7")
    assert same(loop.state(), before)


def test_a_process_by_itself_has_nobody_to_divide_with(tmp_path, weights, monkeypatch):
    monkeypatch.setattr(sources, "check_between", None)
    start = From(tmp_path / "w.safetensors", rename={r"body\.(.*)": r"old.body.\1"}, partial=True, cast=True)
    with pytest.warns(UserWarning) as warned:
        after, _ = begin(tmp_path, start)
    assert torch.equal(after["body.weight"], weights["old.body.weight"]) and warned


def test_a_run_that_was_converted_has_all_but_the_position_of_the_script(tmp_path, other):
    """Its tensors and hyper-parameters, and what it knows of the rest."""
    write_run(source_of(str(other)), tmp_path / "copy")
    states, _ = reference(7)
    loop = make(ADAMW, "batchnorm", seed=5)
    checkpointer = Checkpointer(tmp_path / "run", model=loop.model, optimizer=loop.optimizers)
    with checkpointer:
        assert checkpointer.resume(source=From(tmp_path / "copy", cast=True)) == 7
    assert same(loop.state(), states[7])


def test_a_source_that_is_not_there_or_of_no_known_format_is_refused(tmp_path):
    (tmp_path / "odd.txt").write_text("hello")
    for path, text in ((tmp_path / "none", "is not there"), (tmp_path / "odd.txt", "neither a run nor")):
        _loop, checkpointer = start(tmp_path / "run")
        with checkpointer, pytest.raises(BadInput, match=text):
            checkpointer.resume(source=path)


@pytest.mark.slow
def test_a_base_of_several_steps_has_the_script_and_its_hyper_parameters(tmp_path, monkeypatch):
    """Records bring its parts to one step, and say nothing of the script themselves."""
    cut_small(monkeypatch)
    loop, checkpointer = start(tmp_path / "other", "schedule", base_every=2)
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 7)
    reader = RunReader(tmp_path / "other")
    mixed = reader.load(reader.line()[0])
    assert mixed.oldest_step < mixed.step
    states, _ = reference(7, "schedule")
    loop = make(ADAMW, "schedule", seed=5)
    checkpointer = Checkpointer(tmp_path / "run", model=loop.model, optimizer=loop.optimizers, **loop.things)
    with checkpointer:
        assert checkpointer.resume(source=From(f"{tmp_path / 'other'}@{mixed.step}", cast=True)) == mixed.step
        assert same(loop.state(), states[mixed.step])


def test_the_timeline_that_is_named_is_the_one_that_is_taken(tmp_path):
    kept = []
    for seed, options in ((1, {}), (2, {"step": 0})):
        loop, checkpointer = start(tmp_path / "run")
        with checkpointer:
            checkpointer.resume(**options)
            torch.manual_seed(seed)
            go_on(loop, checkpointer, 3)
            checkpointer.save()
        kept.append(loop.state()["model"])
    assert not same(*kept)
    for timeline, expected in enumerate(kept, 1):
        loop, checkpointer = start(tmp_path / f"again-{timeline}")
        with checkpointer:
            assert checkpointer.resume(source=f"{tmp_path / 'run'}@3.t{timeline}") == 3
        assert same(loop.state()["model"], expected)


@pytest.mark.parametrize("same_values", [True, False])
def test_both_names_of_a_tied_weight_are_known_and_compared(tmp_path, same_values):
    torch.manual_seed(1)
    weight = torch.randn(3, 3)
    other = weight.clone() if same_values else weight + 1
    save_file({"one.weight": weight, "two.weight": other}, tmp_path / "w.safetensors")
    model = nn.ModuleDict({"one": nn.Linear(3, 3, bias=False), "two": nn.Linear(3, 3, bias=False)})
    model["two"].weight = model["one"].weight
    before = model["one"].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = Checkpointer(tmp_path / "run", model=model, optimizer=optimizer)
    if same_values:
        with checkpointer, pytest.warns(UserWarning):  # of what weights alone do not have
            checkpointer.resume(source=tmp_path / "w.safetensors")
        assert torch.equal(model["one"].weight, weight)
    else:
        with checkpointer, pytest.raises(Damaged, match=r"copies of one\.weight/param differ"):
            checkpointer.resume(source=tmp_path / "w.safetensors")
        assert torch.equal(model["one"].weight, before)


SGD, MOMENTUM = partial(torch.optim.SGD, lr=0.5), partial(torch.optim.SGD, lr=0.5, momentum=0.5)
OTHERS = {
    "momentum": (ADAMW, MOMENTUM, "exp_avg, exp_avg_sq, step, and the one here keeps momentum_buffer"),
    "nothing": (ADAMW, SGD, "exp_avg, exp_avg_sq, step, and the one here keeps nothing"),
    "other averages": (ADAMW, torch.optim.RMSprop, "step, and the one here keeps square_avg, step"),
    "more of them": (MOMENTUM, ADAMW, "momentum_buffer, and the one here keeps exp_avg, exp_avg_sq, step"),
}


@pytest.fixture(params=OTHERS)
def another(tmp_path, request):
    """A run of 3 steps, a loop with another kind of optimizer, and what is said of the two."""
    there, here, text = OTHERS[request.param]
    loop = make(there)
    with Checkpointer(tmp_path / "other", model=loop.model, optimizer=loop.optimizers) as checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 3)
    return loop.state(), make(here, seed=5), text


def test_another_kind_of_optimizer_is_refused_with_nothing_changed(tmp_path, another):
    _, loop, text = another
    before = loop.state()
    checkpointer = Checkpointer(tmp_path / "run", model=loop.model, optimizer=loop.optimizers)
    with checkpointer, pytest.raises(RunMismatch, match=rf"of another kind of optimizer \(.*\): of .*{text}"):
        checkpointer.resume(source=From(tmp_path / "other", cast=True))
    assert same(loop.state(), before) and not any(optimizer.state for optimizer in loop.optimizers)
    assert RunReader(tmp_path / "run").commits() == []


def test_another_kind_of_optimizer_begins_anew_where_that_is_allowed(tmp_path, another):
    """With its own hyper-parameters: those of the other mean something else."""
    there, loop, _ = another
    before = loop.state()
    with Checkpointer(tmp_path / "run", model=loop.model, optimizer=loop.optimizers) as checkpointer:
        with pytest.warns(UserWarning) as warned:
            assert checkpointer.resume(source=From(tmp_path / "other", partial=True)) == 3
        assert same(loop.state()["model"], there["model"]) and same(loop.state()["groups"], before["groups"])
        assert not any(optimizer.state for optimizer in loop.optimizers)
        go_on(loop, checkpointer, 5)
    texts = "\n".join(str(each.message) for each in warned)
    assert "is of another kind of optimizer, and begins anew" in texts and "hyper-parameters" in texts


def weights_and_state(path, **slots):
    """A file of ours with a parameter ``w``, and these tensors for it; nothing of hyper-parameters."""
    keys = {name: ["w", name] for name in slots}
    save_file(
        {"w": torch.ones(3), **slots},
        path,
        metadata={"holdfast.keys": json.dumps(keys | {"w": ["w", "param"]})},
    )
    return path


def test_what_an_optimizer_has_more_is_left_where_that_is_allowed_and_refused_otherwise(tmp_path):
    held = {"exp_avg": torch.full((3,), 2.0), "exp_avg_sq": torch.ones(3), "step": torch.tensor(4.0)}
    path = weights_and_state(tmp_path / "w.safetensors", **held, max_exp_avg_sq=torch.ones(3))
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(3))})
    optimizer = torch.optim.Adam(model.parameters())
    checkpointer = Checkpointer(tmp_path / "refused", model=model, optimizer=optimizer)
    with checkpointer, pytest.raises(RunMismatch, match="nothing here wants its w/max_exp_avg_sq"):
        checkpointer.resume(source=path)
    assert not optimizer.state and not model["w"].any()
    checkpointer = Checkpointer(tmp_path / "run", model=model, optimizer=optimizer)
    with checkpointer, pytest.warns(UserWarning, match=r"wants its w/max_exp_avg_sq|hyper-parameters"):
        checkpointer.resume(source=From(path, partial=True))
    assert same(optimizer.state[model["w"]], held)


def test_hyper_parameters_of_the_source_say_what_is_kept(tmp_path):
    """The optimizer here has them when the source has been taken, and so keeps what that kept."""
    loop = make(partial(ADAMW, amsgrad=True))
    with Checkpointer(tmp_path / "other", model=loop.model, optimizer=loop.optimizers) as checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 3)
    again = make(ADAMW, seed=5)
    with Checkpointer(tmp_path / "run", model=again.model, optimizer=again.optimizers) as checkpointer:
        assert checkpointer.resume(source=From(tmp_path / "other", cast=True)) == 3
        assert same(again.state(), loop.state())


def of_type(dtype, optimizer_of=torch.optim.NAdam, steps=0):
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(dtype)
    optimizer = optimizer_of(model.named_parameters(), lr=0.25)
    for _ in range(steps):
        model(torch.ones(1, 3, dtype=dtype)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("optimizer_of", [torch.optim.NAdam, AdamWBF16])
@pytest.mark.parametrize("types", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_what_an_optimizer_keeps_is_converted_with_its_parameter_as_torch_does(tmp_path, types, optimizer_of):
    """But for numbers, and optimizers that say of what types their state is."""
    there, here = of_type(types[0], optimizer_of, steps=2), of_type(types[1], optimizer_of)
    torch.save({"model": there[0].state_dict(), "optimizer": there[1].state_dict()}, tmp_path / "x.pt")
    checkpointer = Checkpointer(tmp_path / "run", model=here[0], optimizer=here[1])
    with checkpointer, pytest.warns(UserWarning, match="were converted to another type"):
        checkpointer.resume(source=From(tmp_path / "x.pt", cast=True))
    expected = of_type(types[1], optimizer_of)[1]
    expected.load_state_dict(there[1].state_dict())
    for mine, theirs in zip(here[1].state.values(), expected.state.values(), strict=True):
        assert same({n: v for n, v in mine.items() if v.dim()}, {n: v for n, v in theirs.items() if v.dim()})
        assert {v.dtype for v in mine.values() if not v.dim()} == {torch.float32}
    here[0](torch.ones(1, 3, dtype=types[1])).sum().backward()
    here[1].step()


def test_what_is_kept_of_a_parameter_that_is_a_number_is_converted_with_it(tmp_path):
    def made(dtype):
        model = nn.ParameterDict({"alpha": nn.Parameter(torch.tensor(0.5, dtype=dtype))})
        return model, torch.optim.AdamW(model.parameters())

    there, here = made(torch.bfloat16), made(torch.float32)
    there[0]["alpha"].grad = torch.ones_like(there[0]["alpha"])
    there[1].step()
    torch.save({"model": there[0].state_dict(), "optimizer": there[1].state_dict()}, tmp_path / "x.pt")
    checkpointer = Checkpointer(tmp_path / "run", model=here[0], optimizer=here[1])
    with checkpointer, pytest.warns(UserWarning, match="were converted to another type"):
        checkpointer.resume(source=From(tmp_path / "x.pt", cast=True))
    expected = made(torch.float32)[1]
    expected.load_state_dict(there[1].state_dict())
    assert same(list(here[1].state.values()), list(expected.state.values()))


def test_the_names_in_a_group_stay_those_of_the_parameters_here(tmp_path):
    """Under other names, and where a group here has what were two."""
    model = nn.Linear(3, 2)
    optimizer = ADAMW([{"params": [named]} for named in model.named_parameters()], lr=0.25)
    with Checkpointer(tmp_path / "other", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        checkpointer.step()
    outer = nn.ModuleDict({"inner": nn.Linear(3, 2)})
    its_optimizer = ADAMW(outer.named_parameters(), lr=0.5)
    start = From(tmp_path / "other", rename={r"inner\.(.*)": r"\1"})
    with Checkpointer(tmp_path / "run", model=outer, optimizer=its_optimizer) as checkpointer:
        assert checkpointer.resume(source=start) == 1
    [group] = its_optimizer.param_groups
    assert group["param_names"] == ["inner.weight", "inner.bias"] and group["lr"] == 0.25


def test_a_group_whose_optimizer_keeps_nothing_lacks_nothing(tmp_path):
    def made(seed):
        loop = make(SGD, "groups", seed=seed)
        loop.optimizers[0].param_groups[1]["momentum"] = 0.5
        return loop, Checkpointer(tmp_path / str(seed), model=loop.model, optimizer=loop.optimizers)

    loop, checkpointer = made(0)
    with checkpointer:
        checkpointer.resume()
        go_on(loop, checkpointer, 3)
    again, checkpointer = made(5)
    with checkpointer:
        assert checkpointer.resume(source=From(tmp_path / "0", cast=True)) == 3
        assert same(again.state(), loop.state())


def test_a_count_of_steps_that_only_the_engine_keeps_is_left(tmp_path):
    path = weights_and_state(
        tmp_path / "w.safetensors", momentum_buffer=torch.ones(3), step=torch.tensor(4.0)
    )
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(3))})
    optimizer = MOMENTUM(model.parameters())
    checkpointer = Checkpointer(tmp_path / "run", model=model, optimizer=optimizer)
    with checkpointer, pytest.warns(UserWarning, match="hyper-parameters"):
        checkpointer.resume(source=path)
    assert same(optimizer.state[model["w"]], {"momentum_buffer": torch.ones(3)})


def test_state_of_any_type_of_elements_is_taken_as_it_is(tmp_path):
    """Also of those that a model computes with seldom."""
    kinds = {
        "momentum_buffer": torch.tensor([1.5, -0.25, 3.0]).to(torch.float8_e4m3fn),
    }
    path = weights_and_state(tmp_path / "w.safetensors", **kinds)
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(3))})
    optimizer = MOMENTUM(model.parameters())
    checkpointer = Checkpointer(tmp_path / "run", model=model, optimizer=optimizer)
    with checkpointer, pytest.warns(UserWarning, match="hyper-parameters"):
        checkpointer.resume(source=path)
        held = optimizer.state[model["w"]]["momentum_buffer"]
        assert held.dtype == torch.float8_e4m3fn
        assert torch.equal(held.float(), torch.tensor([1.5, -0.25, 3.0]))
