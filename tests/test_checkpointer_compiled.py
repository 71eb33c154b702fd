"""A model that torch.compile has compiled, wrapped or in place, is recorded as the model that it was made of."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

from checkpoint.loops import same
from holdfast.checkpoint.compression.lossy import TopK
from holdfast.checkpoint.replica import replica_process
from holdfast.checkpointer import Checkpointer
from holdfast.errors import BadInput
from holdfast.events import read_events
from replica_run import Forked

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # tracing looks

STEPS, STOP = 7, 4


class Counting:
    """A compiler that runs what another makes of forward and backward, and counts how often: as they are, unless
    told otherwise."""

    def __init__(self):
        self.runs, self.compiler = 0, "aot_eager"

    def __call__(self, graph, inputs):
        traced = torch._dynamo.lookup_backend(self.compiler)(graph, inputs)

        def run(*args):
            self.runs += 1
            return traced(*args)

        return run


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch):
    monkeypatch.setattr(replica_process, "start_process", Forked)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def quick_inductor():
    """Compile in this process, and without vector instructions, whose headers take g++ most of its time."""
    from torch._inductor import config  # whose import warns

    plain_code = {"compile_threads": 1, "cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": False}
    with config.patch(plain_code):
        yield


def plain(model, backend):
    return model


def wrapped(model, backend):
    return torch.compile(model, backend=backend)


def in_place(model, backend):
    model.compile(backend=backend)
    return model


def by_inductor(model, backend):
    backend.compiler = "inductor"
    return in_place(model, backend)


class Net(nn.Module):
    """Odd shapes, buffers, and random numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(7, 13), nn.Linear(13, 3)
        self.norm, self.dropout = nn.BatchNorm1d(13), nn.Dropout(0.2)

    def forward(self, x):
        return self.second(self.dropout(torch.relu(self.norm(self.first(x)))))


class Script:
    """A model, compiled by ``form``, and its training."""

    def __init__(self, form, seed=0):
        torch._dynamo.reset()  # or the compiled code of another one runs, by its compiler
        torch.manual_seed(seed)
        self.backend = Counting()
        self.inside = Net()
        self.model = form(self.inside, self.backend)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.losses = []

    def checkpointer(self, root, **options):
        return Checkpointer(root, model=self.model, optimizer=self.optimizer, base_every=3, **options)

    def train(self, steps, step=lambda: None):
        for _ in range(steps):
            loss = self.model(torch.randn(5, 7)).pow(2).mean()
            self.losses.append(float(loss.detach()))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            step()

    def state(self):
        slots = [self.optimizer.state.get(p, {}) for p in self.inside.parameters()]
        return {
            "model": {name: value.clone() for name, value in self.inside.state_dict().items()},
            "slots": [{key: value.clone() for key, value in held.items()} for held in slots],
            "random": torch.get_rng_state(),
        }


WAYS = {"exact": {}, "topk": {"codec": TopK(0.3)}, "replica": {"replica": True}}


@pytest.mark.slow
@pytest.mark.usefixtures("quick_inductor")
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize(
    "form", [wrapped, in_place, pytest.param(by_inductor, marks=pytest.mark.skipif(
        shutil.which("g++") is None, reason="inductor needs a C++ compiler"))],
)  # fmt: skip
def test_a_compiled_model_is_resumed_compiled_in_either_form_and_as_it_was(tmp_path, form, way):
    whole = Script(form)
    with whole.checkpointer(tmp_path / "whole", **WAYS[way]) as checkpointer:
        checkpointer.resume()
        whole.train(STEPS, checkpointer.step)
    cut = Script(form)
    with cut.checkpointer(tmp_path / "cut", **WAYS[way]) as checkpointer:
        checkpointer.resume()
        cut.train(STOP, checkpointer.step)
        state = cut.state()
    assert cut.backend.runs == STOP
    for other in (plain, in_place, wrapped):
        again = Script(other, seed=1)
        with again.checkpointer(tmp_path / "cut", **WAYS[way]) as checkpointer:
            assert checkpointer.resume() == STOP
            assert same(again.state(), state)
    again = Script(form, seed=1)
    with again.checkpointer(tmp_path / "cut", **WAYS[way]) as checkpointer:
        assert checkpointer.resume() == STOP
        again.train(STEPS - STOP, checkpointer.step)
    assert again.losses == whole.losses[STOP:] and same(again.state(), whole.state())
    assert again.backend.runs == STEPS - STOP
    assert not [
        event for event in read_events(tmp_path / "cut" / "events.jsonl") if event["event"] == "drift"
    ]


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ["method", "function", "everything"])
@pytest.mark.filterwarnings("ignore:Dynamo does not know", "ignore:.torch.jit.script_method")
def test_a_compiled_step_of_the_optimizer_is_refused_with_the_way_out(tmp_path, backend, how):
    """From the first one on, and what was recorded before is there."""
    for compiled_from in (3, 99):
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def train(model=model, optimizer=optimizer):
            model(torch.ones(2, 5)).pow(2).mean().backward()
            optimizer.step()

        compiled = torch.compile(train if how == "everything" else optimizer.step, backend=backend)
        if how == "function":
            compiled = torch.compile(lambda optimizer=optimizer: optimizer.step(), backend=backend)
        checkpointer = Checkpointer(tmp_path, model=model, optimizer=optimizer, base_every=1000)
        assert checkpointer.resume() == (0 if compiled_from == 3 else 3)
        for step in range(checkpointer.steps_done, 6):
            if step < compiled_from:
                train()
            elif how == "everything":
                compiled()
            else:
                model(torch.ones(2, 5)).pow(2).mean().backward()
                compiled()
            optimizer.zero_grad()
            if step == compiled_from:
                with pytest.raises(
                    BadInput, match=r"step was compiled.* Compile the model, and call optimizer"
                ):
                    checkpointer.step()
                break
            checkpointer.step()
        else:
            assert checkpointer.durable_step <= checkpointer.steps_done == 6
        checkpointer.close()
