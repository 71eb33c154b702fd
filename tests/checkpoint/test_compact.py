"""A newer base from an older one and its records, without the script: bit for bit what the script would have had, and
refused where it could not be."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from checkpoint.loops import cut_small, make, same
from checkpoint.test_replay import OPTIMIZERS
from holdfast.checkpoint import arithmetic
from holdfast.checkpoint.compression.lossy import TopK
from holdfast.checkpoint.recovery.compaction import compact
from holdfast.checkpoint.snapshot import snapshot_state
from holdfast.checkpointer import Checkpointer
from holdfast.errors import BadInput, Damaged, NoCommit, RunLocked
from holdfast.store.commit.retention import Keep
from holdfast.store.run_store import LocalStore

FEATURES = ("", "schedule", "groups", "clip", "scaler", "unused", "tied", "frozen", "batchnorm", "two")
STEPS = 11


def trained(root, optimizer, feature="", steps=STEPS, **options):
    """The states of a run by step."""
    loop = make(optimizer, feature)
    options = {"base_every": 1000} | options
    with Checkpointer(
        root, model=loop.model, optimizer=loop.optimizers, **loop.things, **options
    ) as checkpointer:
        checkpointer.resume()
        states = {0: loop.state()}
        for i in range(steps):
            loop.iteration(i, checkpointer.step)
            states[checkpointer.steps_done] = loop.state()
    return states


def resumed(root, optimizer, feature="", step=None):
    loop = make(optimizer, feature, seed=1)
    with Checkpointer(
        root, model=loop.model, optimizer=loop.optimizers, keep=Keep(99), **loop.things
    ) as checkpointer:
        return checkpointer.resume(step=step), loop.state()


def steps_of(root):
    with LocalStore.read(root) as reader:
        return [ref.step for ref in reader.line()]


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_compacted_base_is_that_of_the_script_bit_for_bit(tmp_path, name, feature):
    states = trained(tmp_path, OPTIMIZERS[name], feature)
    done = compact(tmp_path, 7)
    assert (done.base.step, done.from_step, steps_of(tmp_path)) == (7, 0, [7])
    for step in (STEPS, 7):
        assert same(resumed(tmp_path, OPTIMIZERS[name], feature, step)[1], states[step])


ADAMW = OPTIMIZERS["adamw"]


def test_of_bases_whose_units_are_of_several_steps_one_of_one_step_is_made(tmp_path, monkeypatch):
    cut_small(monkeypatch)
    states = trained(tmp_path, ADAMW, "batchnorm", 40, base_every=15, keep=Keep(9))
    before = steps_of(tmp_path)
    done = compact(tmp_path, before[0] + 2)
    assert done.base.oldest_step == done.base.step and done.from_step == before[0]
    assert steps_of(tmp_path) == [done.base.step, *before[1:]]
    for step in (40, done.base.step, before[1] + 3, before[1]):  # others lead to what they led to
        assert same(resumed(tmp_path, ADAMW, "batchnorm", step)[1], states[step])


@pytest.mark.slow
def test_without_a_step_nothing_is_dropped(tmp_path):
    states = trained(tmp_path, ADAMW)
    assert not compact(tmp_path, None).dropped
    assert steps_of(tmp_path) == [STEPS, 0]
    for step in reversed(range(STEPS + 1)):
        assert same(resumed(tmp_path, ADAMW, step=step)[1], states[step])


@pytest.mark.slow
def test_the_run_goes_on_from_a_compacted_base_as_if_nothing_had_been(tmp_path):
    states = trained(tmp_path / "a", ADAMW, "schedule", 20)
    loop = make(ADAMW, "schedule")
    for stop in (8, 14, 20):
        with Checkpointer(
            tmp_path / "b", model=loop.model, optimizer=loop.optimizers, **loop.things
        ) as checkpointer:
            for i in range(checkpointer.resume(), stop):
                loop.iteration(i, checkpointer.step)
        compact(tmp_path / "b", stop - 2)
        loop = make(ADAMW, "schedule", seed=2)
    step, state = resumed(tmp_path / "b", ADAMW, "schedule")
    assert step == 20 and same(state, states[20])


def test_numbers_that_training_flushed_to_zero_are_zero_in_the_base(tmp_path):
    def built():
        torch.manual_seed(0)
        model = nn.Linear(16, 16)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    assert torch.set_flush_denormal(True)
    try:
        model, optimizer = built()
        with Checkpointer(tmp_path, model=model, optimizer=optimizer, base_every=1000) as checkpointer:
            checkpointer.resume()
            for _ in range(5):
                for parameter in model.parameters():
                    parameter.grad = torch.randn(parameter.shape) * 3e-18
                optimizer.step()
                checkpointer.step()
    finally:
        torch.set_flush_denormal(False)
    moments = optimizer.state[model.weight]["exp_avg_sq"]
    assert (moments == 0).any()
    compact(tmp_path, None)
    assert torch.tensor(1e-39) * 1 != 0  # here it is as it was
    model, again = built()
    with pytest.warns(UserWarning, match=r"trained under torch.set_flush_denormal\(True\)"):
        checkpointer = Checkpointer(tmp_path, model=model, optimizer=again)
        with checkpointer:
            assert checkpointer.resume() == 5
    assert torch.equal(again.state[model.weight]["exp_avg_sq"], moments)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam])
def test_counts_keep_default_dtype_of_script(tmp_path, kind):
    """The script makes them in float64; a compaction, in a process that has another default, does too."""

    def built():
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        return model, kind(model.parameters(), lr=0.01)

    def train(until):
        model, optimizer = built()
        with Checkpointer(tmp_path, model=model, optimizer=optimizer, base_every=1000) as checkpointer:
            for i in range(checkpointer.resume(), until):
                model(torch.randn(2, 4, generator=torch.Generator().manual_seed(i))).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                checkpointer.step()
        return model.weight.detach(), {
            k: (v.dtype, v.clone()) for k, v in optimizer.state[model.weight].items()
        }

    torch.set_default_dtype(torch.float64)
    try:
        before = train(5)
        torch.set_default_dtype(torch.float32)
        compact(tmp_path, None)
        assert torch.get_default_dtype() == torch.float32
        torch.set_default_dtype(torch.float64)
        after = train(5)
    finally:
        torch.set_default_dtype(torch.float32)
    assert after[1]["step"][0] == torch.float64 and same(after[0], before[0]) and same(after[1], before[1])


def test_a_channels_last_model_comes_back(tmp_path):
    def built(seed):
        torch.manual_seed(seed)
        model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    model, optimizer = built(0)
    with Checkpointer(tmp_path, model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
        for _ in range(5):
            model(torch.randn(2, 3, 5, 5)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
    compact(tmp_path, 5)
    other, its = built(1)
    with Checkpointer(tmp_path, model=other, optimizer=its) as again:
        assert again.resume() == 5
    assert same(dict(other.state_dict()), dict(model.state_dict()))


class Mine(torch.optim.AdamW):
    """Somebody's own."""


def other_torch(monkeypatch):
    monkeypatch.setattr(snapshot_state.torch, "__version__", "1.0")


@pytest.mark.parametrize(
    "optimizer, feature, change, message",
    [
        (partial(Mine, lr=0.01), "", None, r"its optimizer .*Mine is not one of .*AdamW.* of torch\.optim"),
        (ADAMW, "ema", None, "something is done after every update"),
        (ADAMW, "average", None, "something is done after every update"),
        (ADAMW, "", other_torch, "it was trained with torch .*, and this is 1.0"),
    ],
)
def test_what_cannot_be_replayed_without_its_script_is_refused(
    tmp_path, monkeypatch, optimizer, feature, change, message
):
    trained(tmp_path, optimizer, feature)
    before = steps_of(tmp_path)
    if change is not None:
        change(monkeypatch)
    with pytest.raises(BadInput, match=message + r".* call save\(\)"):
        compact(tmp_path, 5)
    assert steps_of(tmp_path) == before


def test_a_replay_that_differs_is_refused(tmp_path, monkeypatch):
    """What changes parameters behind the optimizer's back shows in the fingerprints."""
    loop = make(ADAMW)
    with Checkpointer(tmp_path, model=loop.model, optimizer=loop.optimizers) as checkpointer:
        checkpointer.resume()
        for i in range(6):
            loop.iteration(i, checkpointer.step)
            if i == 3:
                loop.model.scale.data.mul_(2)  # which nobody counts
    with pytest.raises(
        BadInput, match=r"replaying step 5 did not give what training had.* Nothing was removed"
    ):
        compact(tmp_path, 6)
    assert steps_of(tmp_path) == [0]


def test_a_run_that_is_being_written_is_refused(tmp_path):
    loop = make(ADAMW)
    with Checkpointer(tmp_path, model=loop.model, optimizer=loop.optimizers) as checkpointer:
        checkpointer.resume()
        loop.iteration(0, checkpointer.step)
        with pytest.raises(RunLocked):
            compact(tmp_path, None)


@pytest.mark.parametrize(
    "to, message", [(0, "step 0 is a base already"), (99, "records lead to step 11, and not to 99")]
)
def test_where_there_is_nothing_to_compact_it_is_said(tmp_path, to, message):
    trained(tmp_path, ADAMW)
    with pytest.raises(NoCommit, match=message):
        compact(tmp_path, to)


def test_a_damaged_base_is_not_compacted_from(tmp_path):
    trained(tmp_path, ADAMW)
    [path] = (tmp_path / "data").glob("*.0.safetensors")
    data = bytearray(path.read_bytes())
    data[4200] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damaged, match="nothing was changed, since the base of step 0 is damaged"):
        compact(tmp_path, 5)
    assert steps_of(tmp_path) == [0]


def test_a_new_base_that_does_not_verify_removes_nothing(tmp_path, monkeypatch):
    states = trained(tmp_path, ADAMW)
    monkeypatch.setattr(LocalStore, "verify", damaged_if_new)
    with pytest.raises(Damaged, match="the new base of step 5 is not whole, and nothing was removed"):
        compact(tmp_path, 5)
    monkeypatch.undo()
    assert 0 in steps_of(tmp_path)
    assert same(resumed(tmp_path, ADAMW, step=3)[1], states[3])


def damaged_if_new(store, manifest, **_):
    return [Damaged("a bit has flipped")] if manifest.step == 5 else []


def test_a_base_without_the_residuals_that_training_had_is_not_made(tmp_path):
    loop = make(ADAMW)
    checkpointer = Checkpointer(tmp_path, model=loop.model, optimizer=loop.optimizers, codec=TopK(0.2))
    checkpointer.resume()
    for i in range(4):
        loop.iteration(i, checkpointer.step)
    checkpointer.close(save=False)
    with pytest.raises(
        BadInput, match=r"training had residuals of error feedback there.* Nothing was removed"
    ):
        compact(tmp_path, None)
    assert steps_of(tmp_path) == [0]


def test_a_compacted_base_has_the_note_of_the_last_process(tmp_path, monkeypatch):
    """Its own base had none, as those of earlier versions have for some operations."""
    with monkeypatch.context() as earlier:
        earlier.setattr(snapshot_state, "arithmetic_here", lambda state: {})
        trained(tmp_path, ADAMW)
    compact(tmp_path, 4)
    noted = LocalStore.read(tmp_path).at(4).progress["replay"]["arithmetic"]
    assert set(noted["cpu"]) == set(arithmetic.GROUPS)
