"""Records of another kind of processor, whose square roots differ from this one's in the last bits."""

from __future__ import annotations

import json
import pickle
from functools import partial

import pytest
import torch
from torch import nn

from checkpoint.loops import cut_small, make, manifests, same
from holdfast.checkpoint import arithmetic
from holdfast.checkpoint.log import log_records
from holdfast.checkpointer import Checkpointer
from holdfast.errors import NoCommit, OtherArithmetic
from holdfast.opening import source_of
from holdfast.state.live_state import LiveState
from holdfast.state.progress import hyper_parameters
from holdfast.store.commit.retention import Keep
from support.other_processor import other_processor
from support.warm_python import call, environment_of
from test_checkpointer import ADAMW, go_on

STEPS = 8
CPU = torch.device("cpu")


def started(root, optimizer=ADAMW, **options):
    loop = make(optimizer)
    return loop, Checkpointer(root, model=loop.model, optimizer=loop.optimizers, keep=Keep(99), **options)


def killed(loop, checkpointer, steps):
    """Train to ``steps`` and end without a base of it; return the state."""
    go_on(loop, checkpointer, steps)
    checkpointer.wait()
    checkpointer.close(save=False)
    return loop.state()


def trained_elsewhere(root, optimizer=ADAMW, **options):
    with other_processor():
        loop, checkpointer = started(root, optimizer, **options)
        checkpointer.resume()
        return killed(loop, checkpointer, STEPS)


def events(root, name):
    lines = map(json.loads, (root / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["event"] == name]


@pytest.mark.parametrize("is_spread", [False, True])
def test_records_of_another_processor_are_refused(tmp_path, monkeypatch, is_spread):
    if is_spread:
        cut_small(monkeypatch)
    there = trained_elsewhere(tmp_path, base_every=3 if is_spread else None)
    bases = manifests(tmp_path)
    assert (bases[0].oldest_step < bases[0].step) == is_spread
    loop, checkpointer = started(tmp_path)
    before = loop.state()
    with pytest.raises(OtherArithmetic) as refused:
        checkpointer.resume()
    assert refused.value.step == max(base.step for base in bases if base.oldest_step == base.step)
    assert same(loop.state(), before) and manifests(tmp_path) == bases
    with pytest.raises(OtherArithmetic):
        source_of(f"{tmp_path}@{STEPS}")
    with other_processor():  # nothing was lost
        loop, checkpointer = started(tmp_path)
        assert checkpointer.resume() == STEPS
        assert same(loop.state(), there)
        checkpointer.close(save=False)


@pytest.mark.parametrize("is_spread", [False, True])
def test_an_approximate_resume_is_said_and_followed_exactly(tmp_path, monkeypatch, is_spread):
    if is_spread:
        cut_small(monkeypatch)
    there = trained_elsewhere(tmp_path, base_every=3 if is_spread else None)
    loop, checkpointer = started(tmp_path)
    with pytest.warns(UserWarning, match="arithmetic of this machine"):
        assert checkpointer.resume(exactness="approximate") == STEPS
    assert checkpointer.exactness == "approximate"
    here = loop.state()
    assert not same(here, there)
    for name, tensor in there["model"].items():
        torch.testing.assert_close(here["model"][name], tensor, rtol=1e-5, atol=1e-6)
    assert [event["approximate"] for event in events(tmp_path, "recovered")] == [True]
    bases = manifests(tmp_path)
    assert (bases[0].step, bases[0].oldest_step) == (STEPS, STEPS)
    with pytest.raises(NoCommit, match="another kind of processor"):  # and the process stays at its step
        checkpointer.rollback(STEPS - 1)
    last = killed(loop, checkpointer, STEPS + 2)
    loop, checkpointer = started(tmp_path)
    assert (checkpointer.resume(), checkpointer.exactness) == (STEPS + 2, "continuation")
    assert same(loop.state(), last)
    checkpointer.close(save=False)


def test_an_optimizer_without_roots_is_replayed_exactly(tmp_path):
    sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    there = trained_elsewhere(tmp_path, sgd)
    loop, checkpointer = started(tmp_path, sgd)
    assert checkpointer.resume(exactness="approximate") == STEPS
    assert checkpointer.exactness == "continuation" and same(loop.state(), there)
    assert (
        manifests(tmp_path)[0].step == STEPS
    )  # since the old base does not say what its records compute with
    checkpointer.close(save=False)


def test_records_of_two_processors_behind_one_base_are_refused(tmp_path):
    """The base between them is damaged, and the one before it was made on this processor."""
    loop, checkpointer = started(tmp_path)
    checkpointer.resume()
    here = killed(loop, checkpointer, STEPS)
    with other_processor():
        loop, checkpointer = started(tmp_path)
        with pytest.warns(UserWarning, match="arithmetic of this machine"):
            checkpointer.resume(exactness="approximate")
        killed(loop, checkpointer, STEPS + 2)
    between = manifests(tmp_path)[0]
    assert between.step == STEPS
    (tmp_path / between.path).write_bytes(b"damaged")
    loop, checkpointer = started(tmp_path)
    with pytest.raises(OtherArithmetic):
        checkpointer.resume()
    loop, checkpointer = started(tmp_path)
    with pytest.warns(UserWarning, match="fails its own digest"):
        assert checkpointer.resume(step=STEPS) == STEPS  # whose records are all of this processor
    assert same(loop.state(), here)
    checkpointer.close(save=False)


def test_approximation_is_only_between_processors(tmp_path, monkeypatch):
    loop, checkpointer = started(tmp_path)
    checkpointer.resume()
    killed(loop, checkpointer, STEPS)
    step = log_records._unhooked_step

    def differently(optimizer, *args, **kwargs):
        step(optimizer, *args, **kwargs)
        for group in optimizer.param_groups:
            torch._foreach_mul_(group["params"], 1.001)

    monkeypatch.setattr(log_records, "_unhooked_step", differently)
    loop, checkpointer = started(tmp_path)
    with pytest.warns(UserWarning, match="replaying step 1 did not give what training had"):
        assert checkpointer.resume(exactness="approximate") == 0
    assert checkpointer.exactness == "continuation"
    checkpointer.close(save=False)


def train_large(root, steps):
    """Train a model of some thousands of parameters to ``steps``. Return what was noted, and the last sum of bits."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    checkpointer = Checkpointer(root, model=model, optimizer=optimizer)
    start = checkpointer.resume()
    for step in range(start, steps):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step()
    checkpointer.wait()
    checkpointer.close(save=False)
    bits = sum(int(p.detach().view(torch.int32).sum()) for p in model.parameters())
    return {"start": start, "noted": arithmetic.arithmetic_of(CPU), "bits": bits}


def test_a_run_under_other_instructions_is_exact_or_refused(tmp_path):
    """Where MKL obeys the variable and this processor has more than AVX2, square roots differ; elsewhere none does."""
    there = call(
        "checkpoint.test_arithmetic", "train_large", env=environment_of(MKL_ENABLE_INSTRUCTIONS="AVX2"),
        root=str(tmp_path), steps=6,
    )  # fmt: skip
    if there["noted"]["roots"] == arithmetic.arithmetic_of(CPU)["roots"]:
        assert train_large(tmp_path, 6) == {**there, "start": 6, "noted": arithmetic.arithmetic_of(CPU)}
    else:
        with pytest.raises(OtherArithmetic):
            train_large(tmp_path, 6)


def test_digests_do_not_depend_on_the_number_of_threads():
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            arithmetic.arithmetic_of.cache_clear()
            found.append(arithmetic.arithmetic_of(CPU))
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1] and "none" not in found[0].values()


def test_digests_do_not_depend_on_the_precision_of_products():
    plain = arithmetic.arithmetic_of(CPU)
    torch.set_float32_matmul_precision("medium")
    try:
        arithmetic.arithmetic_of.cache_clear()
        assert arithmetic.arithmetic_of(CPU) == plain
    finally:
        torch.set_float32_matmul_precision("highest")


def test_one_fused_group_leaves_the_roots_of_others():
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([{"params": [a], "fused": True}, {"params": [b]}])
    state = LiveState(nn.ParameterList([a, b]), [optimizer])
    update = {"optimizer": 0, "groups": hyper_parameters(optimizer.param_groups)}
    assert arithmetic.operations_of(state, [update], after_update=False) == ["linear", "roots", "fused"]


def test_a_script_that_now_says_fused_is_refused_records_of_roots(tmp_path):
    """The replay uses what the records have, whatever the script gives its optimizer now."""
    trained_elsewhere(tmp_path)
    loop, checkpointer = started(tmp_path, partial(torch.optim.AdamW, lr=0.01, fused=True))
    before = loop.state()
    with pytest.raises(OtherArithmetic) as refused:
        checkpointer.resume()
    assert refused.value.step == 0 and same(loop.state(), before)


def test_fused_records_need_no_roots_whatever_the_script_says_now(tmp_path):
    there = trained_elsewhere(tmp_path, partial(torch.optim.AdamW, lr=0.01, fused=True))
    loop, checkpointer = started(tmp_path, partial(torch.optim.AdamW, lr=0.01))
    with pytest.warns(UserWarning, match=r"param_groups\[0\]\['fused'\] is True"):
        assert checkpointer.resume() == STEPS
    assert same(loop.state(), there)
    checkpointer.close(save=False)


def test_the_refusal_passes_to_another_process():
    error = pickle.loads(pickle.dumps(OtherArithmetic("text", 3)))
    assert (str(error), error.step) == ("text", 3)


@pytest.mark.filterwarnings("ignore:.*fails its own digest")
@pytest.mark.filterwarnings("ignore:.*with the arithmetic of this machine")
def test_an_approximate_replay_does_not_pass_over_what_the_script_changed(tmp_path):
    """The base with the change is damaged; records after it follow another state than the replay has."""
    with other_processor():
        loop, checkpointer = started(tmp_path)
        checkpointer.resume()
        go_on(loop, checkpointer, 3)
        with torch.no_grad():
            loop.model.first.weight.mul_(0.5)
        checkpointer.save()
        killed(loop, checkpointer, STEPS)
    [changed] = [base for base in manifests(tmp_path) if base.step == 3]
    (tmp_path / changed.path).write_bytes(b"damaged")
    loop, checkpointer = started(tmp_path)
    with pytest.warns(UserWarning, match="not the one that step 4 was trained from"):
        assert checkpointer.resume(exactness="approximate") == 3
    checkpointer.close(save=False)


def test_16_bit_parameters_that_are_frozen_now_may_have_been_trained():
    body, head = nn.Linear(3, 3).to(torch.bfloat16), nn.Linear(3, 3)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    body.requires_grad_(False)
    state = LiveState(nn.ModuleList([body, head]), [optimizer])
    updates = [{"optimizer": 0, "groups": hyper_parameters(optimizer.param_groups)}]
    assert arithmetic.operations_of(state, updates, False) == ["linear", "half precision"]
    assert arithmetic.depends_on_products(state, None)
