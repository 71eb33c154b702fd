"""Optimizers of whole tensors and of few bits under a Checkpointer: every step comes back bit for bit."""

from __future__ import annotations

import sys
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch

import holdfast
from checkpoint.loops import cut_small, make, manifests, same
from checkpoint.test_replay import STEPS, recovered, trained
from holdfast.checkpoint.arithmetic import product_precision, set_product_precision
from holdfast.checkpoint.compression.lossy import TopK
from holdfast.checkpoint.recovery.compaction import compact
from holdfast.checkpoint.recovery.model_description import adopt, describe
from holdfast.checkpoint.replica import replica_process, shared_memory
from holdfast.checkpoint.snapshot import snapshot_state
from holdfast.checkpointer import Checkpointer
from holdfast.errors import BadInput
from holdfast.events import read_events
from holdfast.optim import AdamW8bit, AdamWBF16, Apollo, Grass, Joined, apollo_mini
from holdfast.optim.kinds import is_elementwise
from holdfast.state.live_state import LiveState
from holdfast.store.commit.retention import Keep
from replica_run import Forked


def muon(params, **options):
    """Of matrices; AdamW has the rest."""
    matrices, rest = ([p for p in params if (p.dim() == 2) == wanted] for wanted in (True, False))
    return Joined(torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01))


OPTIMIZERS = {
    "muon": muon,
    "adafactor": partial(torch.optim.Adafactor, lr=0.01),
    "apollo": partial(Apollo, lr=0.01, rank=3, update_gap=3),
    "apollo-mini": partial(apollo_mini, lr=0.01, update_gap=3),
    "grass": partial(Grass, lr=0.01, rank=3, update_gap=3),
    "grass by chance": partial(Grass, lr=0.01, rank=3, update_gap=3, sampled=True),
    "bf16": partial(AdamWBF16, lr=0.01),
    "8bit": partial(AdamW8bit, lr=0.01),
}


@pytest.fixture
def small_units(monkeypatch):
    """A base would be of several units, one of them in each step."""
    cut_small(monkeypatch)


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("feature", ["", "schedule", "clip", "unused", "frozen"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_step_comes_back_bit_for_bit(tmp_path, small_units, name, feature):
    assert not is_elementwise(
        OPTIMIZERS[name]([torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,))])
    )
    states = trained(tmp_path, OPTIMIZERS[name], feature, base_every=4, keep=Keep(9))
    assert max(states) == STEPS and len({str(state["slots"]) for state in states.values()}) > STEPS // 2
    for step, state in states.items():
        found = recovered(tmp_path, OPTIMIZERS[name], feature, step)
        assert same(found, state), (step, [key for key in state if not same(found[key], state[key])])
    assert all(base.oldest_step == base.step for base in manifests(tmp_path))


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("name", ["apollo", "grass", "8bit"])
@pytest.mark.slow
def test_lossy_gradients_come_back_too(tmp_path, small_units, name):
    states = trained(tmp_path, OPTIMIZERS[name], "", codec=TopK(0.3), base_every=9, keep=Keep(9))
    for step, state in states.items():
        assert same(recovered(tmp_path, OPTIMIZERS[name], "", step), state), step


@pytest.mark.slow
@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path, name):
    whole = make(OPTIMIZERS[name], "schedule")
    for i in range(9):
        whole.iteration(i, lambda: None)
    for steps in (5, 9):
        loop = make(OPTIMIZERS[name], "schedule", seed=steps - 5)
        with Checkpointer(
            tmp_path, model=loop.model, optimizer=loop.optimizers, **loop.things
        ) as checkpointer:
            for i in range(checkpointer.resume(), steps):
                loop.iteration(i, checkpointer.step)
    assert same(loop.state(), whole.state())


@pytest.fixture
def forked(monkeypatch, tmp_path):
    """Replicas are forked, and keep what they have below the test's folder."""
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(replica_process, "start_process", Forked)
    monkeypatch.setattr(shared_memory, "MEMORY", memory)


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("name", ["adafactor", "apollo", "grass by chance", "bf16", "8bit"])
def test_a_replica_has_the_bits_of_the_trainer(tmp_path, forked, name):
    loop = make(OPTIMIZERS[name], "")
    with Checkpointer(
        tmp_path / "run", model=loop.model, optimizer=loop.optimizers, replica=True, keep=holdfast.Keep(99)
    ) as checkpointer:
        checkpointer.resume()
        states = []
        for i in range(5):
            loop.iteration(i, checkpointer.step)
            checkpointer.save()
            states.append(loop.state())
    for step, state in enumerate(states, 1):
        assert same(recovered(tmp_path / "run", OPTIMIZERS[name], "", step), state), step


def test_a_replica_takes_muon_and_adamw_as_a_list(tmp_path, forked):
    states = []
    for seed in (0, 1):
        loop = make(muon, "", seed)
        members = loop.optimizers[0].members
        with Checkpointer(
            tmp_path / "run", model=loop.model, optimizer=members, replica=not seed
        ) as checkpointer:
            for i in range(checkpointer.resume(), 5):
                loop.iteration(i, checkpointer.step)
                checkpointer.save()  # compares all that the replica has
        states.append(loop.state())
    assert same(*states)
    assert all(event["event"] != "drift" for event in read_events(tmp_path / "run" / "events.jsonl"))


@pytest.fixture
def own_threads():
    """A test may set how many threads torch has."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Dividing(torch.optim.Optimizer):
    """An update that depends on the number of threads, as sums in a product of matrices do on some processors."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1 * torch.get_num_threads())


def test_steps_come_back_with_another_number_of_threads(tmp_path, own_threads):
    """Each is replayed with as many as it had."""
    weights = []
    for threads, steps in ((2, 3), (1, 6), (2, 6)):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3, bias=False)
        optimizer = Dividing(model.parameters())
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with Checkpointer(tmp_path, model=model, optimizer=optimizer, base_every=1000) as checkpointer:
                done = checkpointer.resume()
                weights.append((done, model.weight.detach().clone()))
                for step in range(done, steps):
                    generator = torch.Generator().manual_seed(step)
                    model.weight.grad = torch.randn(model.weight.shape, generator=generator)
                    optimizer.step()
                    checkpointer.step()
        assert torch.get_num_threads() == threads
        assert [f"call torch.set_num_threads({3 - threads})" in str(each.message) for each in told] == [True][
            : bool(done)
        ]
        weights.append((steps, model.weight.detach().clone()))
    steps, found = zip(*weights[1:-1], strict=True)
    assert steps == (3, 3, 6, 6) and torch.equal(*found[:2]) and torch.equal(*found[2:])


class Rounding(torch.optim.Optimizer):
    """An update that depends on the precision of matrix products, as on a device that has TF32."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        rate = 0.2 if product_precision()["cuda"] == "tf32" else 0.1
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=rate)


@pytest.fixture
def own_products():
    """A test may set the precision of products in either way of torch's."""
    before = {name: getattr(torch.backends, name).matmul.fp32_precision for name in ("cuda", "mkldnn")}
    yield
    torch.set_float32_matmul_precision("highest")
    set_product_precision(before)


def one_name():
    torch.set_float32_matmul_precision("high")


def by_backend():
    torch.backends.cuda.matmul.fp32_precision = "tf32"


@pytest.mark.parametrize("lowers", [one_name, by_backend])
def test_steps_come_back_with_another_precision_of_products(tmp_path, own_products, lowers):
    weights, model = [], torch.nn.Linear(3, 1, bias=False)
    for is_lower in (True, False):
        torch.set_float32_matmul_precision("highest")
        if is_lower:
            lowers()
        precision = product_precision()
        torch.nn.init.ones_(model.weight)
        optimizer = Rounding(model.parameters())
        with Checkpointer(tmp_path, model=model, optimizer=optimizer, base_every=1000) as checkpointer:
            told = (
                nullcontext() if is_lower else pytest.warns(UserWarning, match="matrix products of precision")
            )
            with told:
                assert checkpointer.resume() == (0 if is_lower else 2)
            while checkpointer.steps_done < 2:
                model.weight.grad = torch.ones(1, 3)
                optimizer.step()
                checkpointer.step()
        assert product_precision() == precision
        weights.append(model.weight.detach().clone())
    assert torch.equal(*weights), weights


@pytest.mark.parametrize("lowers", [one_name, by_backend])
def test_a_replica_learns_the_precision_of_products(own_products, lowers):
    lowers()
    loop = make(OPTIMIZERS["bf16"], "")
    about, precision = describe(LiveState(loop.model, loop.optimizers)), product_precision()
    torch.set_float32_matmul_precision("highest")
    adopt({**about, "path": sys.path, "parameters": []})
    assert product_precision() == precision and precision["cuda"] == "tf32"


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("name", ["adafactor", "apollo", "grass by chance", "bf16", "8bit"])
def test_a_run_is_compacted_without_its_script(tmp_path, name):
    states = trained(tmp_path, OPTIMIZERS[name], "schedule", keep=Keep(9))
    compact(tmp_path, 6)
    assert 6 in {base.step for base in manifests(tmp_path)}
    for step in (6, STEPS):
        assert same(recovered(tmp_path, OPTIMIZERS[name], "schedule", step), states[step]), step


def test_what_several_ranks_recorded_of_whole_tensors_is_not_replayed_without_the_script():
    for kind in (
        "torch.optim.adafactor.Adafactor",
        "holdfast.optim.low_rank.Apollo",
        "holdfast.optim.low_rank.Grass",
    ):
        with pytest.raises(
            BadInput, match=r"needs whole tensors, and 2 ranks recorded parts of them.* call save\(\)"
        ):
            snapshot_state._refuse({"classes": [kind]}, {}, 2)


def test_joined_optimizers_are_refused_for_a_replica_with_the_way_out(tmp_path):
    loop = make(muon, "")
    with pytest.raises(BadInput, match=r"a Joined, holds members, .* Leave out replica="):
        Checkpointer(tmp_path, model=loop.model, optimizer=loop.optimizers, replica=True)
