"""While an engine has a model, what would mislead is refused; afterwards nothing of that is left."""

from __future__ import annotations

import sys

import pytest
import torch

import holdfast
from holdfast.errors import BadInput, ModelNotSupported
from holdfast.offload.executor import Executor
from holdfast.store.run_store import LocalStore
from support.grouped import grouped
from training import adamw, batches, decoder, stored


def opened(model, root, **options) -> holdfast.Engine:
    return holdfast.offload(model, adamw(model), root, **grouped(**{"dtype": "fp32", **options}))


def test_a_model_in_training_says_what_to_call_instead(tmp_path):
    model = decoder(blocks=2)
    values = model.state_dict()
    before = {name: len(value) for name, value in vars(model).items() if "hooks" in name}
    with opened(model, tmp_path) as engine:
        for misuse, instead in (
            (lambda: model(**batches(0, 1)[0]), r"called directly.*engine\.evaluate"),
            (model.state_dict, r"engine\.state_dict\(\)"),
            (lambda: model.load_state_dict(values), r"Load it before offload\(\)"),
        ):
            with pytest.raises(ModelNotSupported, match=instead):
                misuse()
        engine.step(batches(0, 1))
        engine.evaluate(batches(0, 1))
    assert {name: len(value) for name, value in vars(model).items() if "hooks" in name} == before
    model(**batches(0, 1)[0])
    model.load_state_dict(model.state_dict())


def test_calls_of_the_model_between_steps_are_passes_of_the_engine(tmp_path):
    model, batch = decoder(blocks=2), batches(0, 1)[0]
    with opened(model, tmp_path) as engine:
        engine.step(batches(0, 1))
        for _ in range(2):
            engine.take_calls([model])
        with torch.no_grad():
            loss = model(**batch)
        assert not loss.requires_grad and loss.item() == engine.evaluate([batch])
        with pytest.raises(ModelNotSupported, match=r"outside of a training step.*Call it under"):
            model(**batch)
        with pytest.raises(ModelNotSupported, match=r"engine\.state_dict\(\)"):
            model.state_dict()
        engine.step(batches(1, 1))
    assert "forward" not in vars(model)
    model(**batch).backward()


@pytest.mark.parametrize("name", ["blocks.0.mlp.gate.weight", "head.weight"])
def test_what_is_trained_cannot_change_within_a_run(tmp_path, name):
    model = decoder(blocks=2)
    with opened(model, tmp_path) as engine:
        engine.step(batches(0, 1))
        model.get_parameter(name).requires_grad_(False)
        with pytest.raises(BadInput, match=f"parameter {name} had requires_grad=True.* Set it back"):
            engine.step(batches(1, 1))
        model.get_parameter(name).requires_grad_(True)
        engine.step(batches(1, 1))
    assert LocalStore.read(tmp_path).head().step == 2


def test_a_parameter_group_that_comes_later_is_refused(tmp_path):
    model = decoder(blocks=2)
    optimizer = torch.optim.AdamW(model.blocks.parameters())
    with holdfast.offload(model, optimizer, tmp_path, precision="fp32") as engine:
        optimizer.add_param_group({"params": [model.head.weight]})
        with pytest.raises(BadInput, match=r"groups hold other parameters.* before offload"):
            engine.step(batches(0, 1))
        del optimizer.param_groups[1]
        engine.step(batches(0, 1))


@pytest.mark.parametrize("leave", [lambda: sys.exit(0), lambda: 1 / 0], ids=["exit", "error"])
@pytest.mark.parametrize("commit_every", [1, 5])
def test_a_script_that_ends_early_loses_no_whole_step(tmp_path, leave, commit_every):
    model = decoder(blocks=2)
    with (
        pytest.raises((SystemExit, ZeroDivisionError)),
        opened(model, tmp_path, commit_every=commit_every) as engine,
    ):
        for step in range(3):
            engine.step(batches(step, 1))
        leave()
    assert LocalStore.read(tmp_path).head().step == 3
    assert torch.equal(stored(tmp_path)["head.weight/param"], model.head.weight)


def test_after_a_key_press_in_close_a_second_one_gives_the_weights_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = decoder(blocks=2)
    engine = opened(model, "run")
    engine.step(batches(0, 1))
    engine.wait()
    monkeypatch.chdir("run")

    def pressed(executor):
        raise KeyboardInterrupt

    with monkeypatch.context() as during, pytest.raises(KeyboardInterrupt):
        during.setattr(Executor, "drain", pressed)
        engine.close()
    assert model.head.weight.is_meta
    engine.close()
    kept = stored(tmp_path / "run")
    assert all(torch.equal(kept[f"{name}/param"], value) for name, value in model.named_parameters())
