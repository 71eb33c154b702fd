"""What a run had besides its model is there when it goes on, or it is said that it is not."""

from __future__ import annotations

import warnings

import pytest
import torch

import holdfast
from holdfast.errors import RunMismatch
from holdfast.store.local import LocalStore
from training import adamw, batches, decoder, warm_up


class Loader:
    at = 0

    def state_dict(self) -> dict:
        return {"at": self.at}

    def load_state_dict(self, state: dict) -> None:
        self.at = state["at"]


def opened(root, *, scheduler: bool = False, **options) -> holdfast.Engine:
    model = decoder(blocks=2)
    optimizer = adamw(model)
    made = warm_up(optimizer) if scheduler else None
    return holdfast.offload(model, optimizer, root, scheduler=made, **{"dtype": "fp32", **options})


def one_step(engine: holdfast.Engine) -> None:
    with engine:
        engine.step(batches(engine.steps_done, 1))


@pytest.mark.parametrize("what", ["scheduler", "loader"])
def test_a_run_goes_on_with_all_that_it_has(tmp_path, what):
    with_it = {"scheduler": {"scheduler": True}, "loader": {"loader": Loader()}}[what]
    one_step(opened(tmp_path, **with_it))
    with pytest.raises(RunMismatch, match=f"the run has a {what}, and none was passed.* Pass {what}="):
        opened(tmp_path)
    opened(tmp_path, **with_it).close()


@pytest.mark.parametrize("what", ["scheduler", "loader"])
def test_what_a_run_did_not_have_is_said_to_start_from_its_own_state(tmp_path, what):
    with_it = {"scheduler": {"scheduler": True}, "loader": {"loader": Loader()}}[what]
    one_step(opened(tmp_path))
    with pytest.warns(UserWarning, match=f"the run had no {what} so far.*starts from its own state"):
        engine = opened(tmp_path, **with_it)
    one_step(engine)
    opened(tmp_path, **with_it).close()  # from now on it has one


@pytest.mark.parametrize(
    "options, said",
    [
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"dtype": "bf16"}, "dtype was fp32 and is bf16"),
        ({"clip_norm": 0.5}, "clip_norm was None and is 0.5"),
        ({"normalize": len}, "normalize was micro_batches and is a function"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_setting_that_decides_about_numbers_and_changed_is_named(tmp_path, options, said):
    one_step(opened(tmp_path))
    with pytest.warns(UserWarning, match=f"other settings.*: {said}$"):
        engine = opened(tmp_path, **options)
    one_step(engine)
    opened(tmp_path, **options).close()


def test_a_run_that_does_not_say_its_settings_goes_on_in_silence(tmp_path, monkeypatch):
    publish = LocalStore.publish

    def as_before(store, step, files, index, progress):
        return publish(store, step, files, index, {k: v for k, v in progress.items() if k != "settings"})

    with monkeypatch.context() as earlier:
        earlier.setattr(LocalStore, "publish", as_before)
        one_step(opened(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened(tmp_path, seed=5).close()


def test_clipping_takes_the_norm_over_what_is_in_the_optimizer(tmp_path):
    model, plain = decoder(blocks=2), decoder(blocks=2)
    plain(**batches(0, 1)[0]).backward()
    grads = [p.grad for name, p in plain.named_parameters() if "head" not in name]
    trained = [p for name, p in model.named_parameters() if "head" not in name]
    with holdfast.offload(model, torch.optim.AdamW(trained), tmp_path, dtype="fp32", clip_norm=0.1) as engine:
        engine.step(batches(0, 1))
        assert engine.last["grad_norm"] == pytest.approx(float(torch.nn.utils.get_total_norm(grads)))
