"""Handing a model over and resuming it: nothing of the user's is lost, nothing goes to the wrong place."""

from __future__ import annotations

import time
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import BadInput, ModelNotSupported, RunMismatch
from holdfast.offload.setup import checks
from holdfast.store.disk import Disk
from holdfast.store.run_store import LocalStore
from support.grouped import grouped
from training import adamw, batches, decoder, stored


class Pair(nn.Module):
    """Blocks whose two equal-shaped layers may be registered in either order."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self._block(order) for _ in range(2)])
        self.head = nn.Linear(4, 1)

    @staticmethod
    def _block(order: str) -> nn.Module:
        block = Residual()
        for name in order:
            block.add_module(name, nn.Linear(4, 4))
        return block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class Residual(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(self.a(x).tanh())


INPUTS = [{"x": torch.ones(2, 4)}]


def offload(model: nn.Module, root, **choices) -> holdfast.Engine:
    optimizer = choices.pop("optimizer", None) or torch.optim.AdamW(model.parameters(), lr=1e-2)
    return holdfast.offload(model, optimizer, root, **grouped(dtype="fp32", **choices))


def test_a_run_whose_tensors_lie_in_another_order_is_refused_and_left_alone(tmp_path):
    with offload(Pair("ab"), tmp_path) as engine:
        engine.step(INPUTS)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(RunMismatch, match="another order"):
        offload(Pair("ba"), tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_real_values_beside_empty_ones_are_kept(tmp_path):
    model = decoder()
    weight = model.embed.weight.detach().clone()
    model.head.weight = nn.Parameter(torch.empty_like(model.head.weight, device="meta"))
    with offload(model, tmp_path, init=lambda module: nn.init.ones_(module.weight)):
        pass
    assert torch.equal(stored(tmp_path)["embed.weight/param"], weight)
    assert torch.equal(model.embed.weight, weight)


def test_a_parameter_that_nothing_initialises_is_named(tmp_path):
    with holdfast.empty_parameters():
        model = decoder()
    with pytest.raises(ModelNotSupported, match=r"nothing initialises parameter blocks\.0"):
        offload(model, tmp_path, init=lambda module: None)


def test_a_loader_that_cannot_be_stored_costs_no_weights_and_writes_nothing(tmp_path):
    class Loader:
        def state_dict(self) -> dict:
            return {"position": object()}

    model = decoder()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(BadInput, match="loader"):
        offload(model, tmp_path / "run", loader=Loader())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_parameter_that_something_holds_on_to_is_named_and_none_is_lost(tmp_path):
    model = decoder()
    loss = model(**batches(0, 1)[0])
    with pytest.raises(BadInput, match="holds on to it"):
        offload(model, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not any(parameter.is_meta for parameter in model.parameters()) and loss.grad_fn is not None


@pytest.mark.slow
def test_at_most_one_step_is_not_yet_durable(tmp_path, monkeypatch):
    publish = LocalStore.publish

    def slowly(*arguments, **options):
        time.sleep(0.05)
        return publish(*arguments, **options)

    monkeypatch.setattr(LocalStore, "publish", slowly)
    for choices in (
        {},
        {"clip_norm": 1.0},
        {"params_on_host": 1.0, "optimizer_on_host": 1.0, "clip_norm": 1.0},
    ):
        with offload(decoder(blocks=2), tmp_path / str(len(choices)), **choices) as engine:
            for step in range(6):
                engine.step(batches(step, 1))
                assert engine.steps_done - engine.durable_step <= 1


def test_a_buffer_that_the_model_rebinds_is_committed_as_it_is(tmp_path):
    class Counting(type(decoder())):
        def forward(self, tokens, targets=None):
            self.seen = self.seen + 1
            return super().forward(tokens, targets)

    def make() -> nn.Module:
        model = decoder()
        model.__class__ = Counting
        model.register_buffer("seen", torch.zeros(()))
        return model

    with offload(make(), tmp_path) as engine:
        for step in range(3):
            engine.step(batches(step, 1))
    assert stored(tmp_path)["seen/buffer"] == 3
    model = make()
    with offload(model, tmp_path):
        assert model.seen == 3


def test_a_commit_at_the_end_has_the_position_of_its_step(tmp_path):
    class Position:
        at = 0

        def state_dict(self) -> dict:
            return {"at": self.at}

        def load_state_dict(self, state: dict) -> None:
            self.at = state["at"]

    loader = Position()
    with offload(decoder(), tmp_path, loader=loader, commit_every=5) as engine:
        for step in range(3):
            loader.at = step + 1
            engine.step(batches(step, 1))
        loader.at = 100  # the loop has fetched a batch that no step has used
    resumed = Position()
    with offload(decoder(), tmp_path, loader=resumed):
        assert resumed.at == 3


def test_what_the_optimizer_holds_already_is_taken_over(tmp_path):
    plain, handed_over = decoder(), decoder()
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True) for model in (plain, handed_over)
    ]
    for model, optimizer in zip((plain, handed_over), optimizers, strict=True):
        model(**batches(0, 1)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    plain(**batches(1, 1)[0]).backward()
    optimizers[0].step()
    with offload(handed_over, tmp_path, optimizer=optimizers[1]) as engine:
        engine.step(batches(1, 1))
    for name, value in handed_over.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name


def test_another_optimizer_or_other_groups_are_refused(tmp_path):
    with offload(decoder(), tmp_path, optimizer=None) as engine:
        engine.step(batches(0, 1))
    model = decoder()
    with pytest.raises(RunMismatch, match="groups"):
        offload(model, tmp_path, optimizer=adamw(model))
    with pytest.raises(RunMismatch, match="made with AdamW"):
        offload(model, tmp_path, optimizer=torch.optim.Adam(model.parameters()))


@pytest.mark.slow
def test_commits_at_every_second_step_go_on_after_a_damaged_one(tmp_path):
    with offload(decoder(), tmp_path, commit_every=2) as engine:
        for step in range(4):
            engine.step(batches(step, 1))
    newest = LocalStore.read(tmp_path).head()
    path = tmp_path / newest.files["blocks.0"].path
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    with pytest.warns(UserWarning, match="damage") as warned:
        engine = offload(decoder(), tmp_path, commit_every=2)
    assert warned[0].filename == __file__  # where offload was called
    with engine:
        assert engine.steps_done == 2
        for step in range(2, 9):
            engine.step(batches(step, 1))


def test_a_model_that_a_failed_engine_emptied_starts_no_other_run(tmp_path):
    model = decoder(blocks=2)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(IndexError), offload(model, tmp_path / "first") as engine:
        engine.step([{"tokens": torch.full((1, 4), 99), "targets": torch.zeros(1, 4, dtype=torch.int64)}])
    with pytest.raises(BadInput, match=r"parameter embed\.weight has no values: .*first.* Resume that"):
        offload(model, tmp_path / "second")
    assert not (tmp_path / "second").exists()
    offload(model, tmp_path / "first").close()
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    offload(model, tmp_path / "second").close()


def test_a_model_that_an_engine_is_training_is_refused_until_it_is_closed(tmp_path):
    for real in (True, False):
        with nullcontext() if real else holdfast.empty_parameters():
            model = decoder(blocks=2)
        with (
            offload(model, tmp_path / f"{real}"),
            pytest.raises(BadInput, match=r"parameter embed\.weight is being trained by another engine"),
        ):
            offload(model, tmp_path / "other")
        assert not (tmp_path / "other").exists()
        offload(model, tmp_path / f"{real} again").close()


def test_a_parameter_keeps_its_attributes(tmp_path):
    model = decoder(blocks=2)
    for parameter in model.parameters():
        parameter.kept = True
    with offload(model, tmp_path):
        assert model.blocks[0].mlp.gate.weight.kept
    assert [vars(parameter) for parameter in model.parameters()] == [{"kept": True}] * len(
        list(model.parameters())
    )


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_comes_to_be_while_training_is_refused_unless_it_need_not_be_kept(tmp_path, persistent):
    class Averaging(type(decoder())):
        def forward(self, tokens, targets=None):
            self.mean = tokens.float().mean() if self.mean is None else self.mean
            return super().forward(tokens, targets)

    model = decoder(blocks=2)
    model.__class__ = Averaging
    model.register_buffer("mean", None, persistent=persistent)
    refused = pytest.raises(ModelNotSupported, match=r"buffer mean was None.*persistent=False")
    with refused if persistent else nullcontext(), offload(model, tmp_path) as engine:
        engine.step(batches(0, 1))
        engine.wait()
        assert engine.durable_step == 1
    assert LocalStore.read(tmp_path).head().step == (0 if persistent else 1)


def test_a_refusal_while_values_are_made_leaves_no_files_but_those_of_others(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").write_text("kept")
    for init, kind in ((lambda module: None, ModelNotSupported), (lambda module: 1 / 0, ZeroDivisionError)):
        with holdfast.empty_parameters():
            model = decoder(blocks=2)
        with pytest.raises(kind):
            offload(model, tmp_path, init=init)
        assert sorted(path.name for path in tmp_path.rglob("*")) == ["data", "mine"]


def test_a_refusal_removes_nothing_that_others_put_there_while_values_were_made(tmp_path):
    def init(module):
        (tmp_path / "data" / "mine").write_text("kept")
        (tmp_path / "commits" / "mine").write_text("kept")
        raise ZeroDivisionError

    with holdfast.empty_parameters():
        model = decoder(blocks=2)
    with pytest.raises(ZeroDivisionError):
        offload(model, tmp_path, init=init)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["commits", "data", "mine", "mine"]


def test_a_refusal_leaves_a_run_that_was_put_in_the_place_of_the_fresh_one(tmp_path):
    other, run = tmp_path / "other", tmp_path / "run"
    with offload(decoder(blocks=2), other) as engine:
        engine.step(batches(0, 1))

    def init(module):
        run.rename(tmp_path / "aside")
        other.rename(run)
        raise KeyboardInterrupt

    before = sorted(path.name for path in other.rglob("*"))
    with holdfast.empty_parameters():
        model = decoder(blocks=2)
    with pytest.raises(KeyboardInterrupt):
        offload(model, run, init=init)
    assert sorted(path.name for path in run.rglob("*")) == before
    stored(run)


def test_a_refusal_that_is_cut_short_leaves_a_directory_to_begin_in(tmp_path, monkeypatch):
    with holdfast.empty_parameters():
        model = decoder(blocks=2)

    def init(module):
        unlink, left = Disk.unlink, iter(range(4))

        def cut_short(disk, path):
            if next(left, None) is None:
                raise KeyboardInterrupt
            unlink(disk, path)

        monkeypatch.setattr(Disk, "unlink", cut_short)
        raise ZeroDivisionError

    with pytest.raises(KeyboardInterrupt):
        offload(model, tmp_path, init=init)
    monkeypatch.undo()
    assert list((tmp_path / "timelines").iterdir())
    offload(decoder(blocks=2), tmp_path).close()


def test_a_parameter_that_comes_to_be_held_before_the_first_commit_leaves_none(tmp_path):
    model, held = decoder(blocks=2), []
    with pytest.raises(BadInput, match=r"parameter head\.weight cannot be moved out of memory"):
        offload(model, tmp_path, confirm=lambda _: held.append(model.head.weight.view(-1)))
    assert not any(tmp_path.iterdir())


def test_an_optimizer_that_keeps_state_from_the_start_works_on_an_empty_model(tmp_path):
    with holdfast.empty_parameters():
        model = decoder(blocks=2)
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    with offload(model, tmp_path, optimizer=optimizer) as engine:
        engine.step(batches(0, 1))
    assert float(stored(tmp_path)["head.weight/sum"].min()) >= 0.5


@pytest.mark.parametrize("name", ["my blocks", "bl\u00f6cke", "b" * 300])
def test_blocks_whose_name_is_no_name_of_a_file_are_refused(tmp_path, name):
    model = nn.Module()
    model.add_module(name, nn.ModuleList(nn.Linear(2, 2) for _ in range(2)))
    with pytest.raises(ModelNotSupported, match="cannot name a file"):
        offload(model, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "dtype, times, told", [("bf16", 5.0, True), ("bf16", 3.0, False), ("fp32", 5.0, False)]
)
def test_a_processor_that_is_slow_in_the_default_type_is_told(tmp_path, monkeypatch, dtype, times, told):
    seconds = {"bfloat16": times, "float32": 1.0}
    monkeypatch.setattr(checks, "product_seconds", seconds.__getitem__)
    checks._times_as_fast.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = decoder()
        with holdfast.offload(model, adamw(model), tmp_path, precision=dtype):
            pass
    checks._times_as_fast.cache_clear()
    found = [(each.filename, str(each.message)) for each in caught if "this processor" in str(each.message)]
    assert len(found) == told
    assert all(name == __file__ and '5 times as fast in fp32, so "fp32"' in text for name, text in found)
