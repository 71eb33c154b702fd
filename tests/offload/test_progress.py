"""What a run had besides its model is there when it goes on, or it is said that it is not."""

from __future__ import annotations

import warnings

import pytest
import torch

import holdfast
from holdfast.errors import RunMismatch
from holdfast.opening import source_of
from holdfast.store.run_store import LocalStore
from support.grouped import grouped
from training import adamw, batches, decoder, warm_up


class Loader:
    at = 0

    def state_dict(self) -> dict:
        return {"at": self.at}

    def load_state_dict(self, state: dict) -> None:
        self.at = state["at"]


def script(
    root, *, scheduler: bool = False, group=(), **options
) -> tuple[holdfast.Engine, torch.optim.Optimizer]:
    """A run, and its optimizer, whose first ``group`` has these hyper-parameters."""
    model = decoder(blocks=2)
    optimizer = adamw(model)
    optimizer.param_groups[0].update(group)
    made = warm_up(optimizer) if scheduler else None
    engine = holdfast.offload(
        model, optimizer, root, **grouped(scheduler=made, **{"dtype": "fp32", **options})
    )
    return engine, optimizer


def opened(root, **options) -> holdfast.Engine:
    return script(root, **options)[0]


def one_step(engine: holdfast.Engine) -> None:
    with engine:
        engine.step(batches(engine.steps_done, 1))


def test_every_name_of_a_tied_weight_is_in_a_commit(tmp_path):
    model = decoder(blocks=2)
    model.head.weight = model.embed.weight
    one_step(holdfast.offload(model, adamw(model), tmp_path, precision="fp32"))
    assert source_of(str(tmp_path)).aliases == {"head.weight": "embed.weight"}


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
    with pytest.warns(
        UserWarning, match=f"the run had no {what} so far.*starts from its own state"
    ) as warned:
        engine = opened(tmp_path, **with_it)
    assert warned[0].filename == __file__  # where offload was called
    one_step(engine)
    opened(tmp_path, **with_it).close()  # from now on it has one


@pytest.mark.parametrize(
    "options, said",
    [
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"dtype": "bf16"}, "precision was fp32 and is bf16"),
        ({"clip_norm": 0.5}, "the norm of clipping was None and is 0.5"),
        ({"normalize": len}, "normalize was micro_batches and is a function"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_setting_that_decides_about_numbers_and_changed_is_named(tmp_path, options, said):
    one_step(opened(tmp_path))
    with pytest.warns(UserWarning, match=f"other settings.*: {said}$") as warned:
        engine = opened(tmp_path, **options)
    assert warned[0].filename == __file__  # where offload was called
    one_step(engine)
    opened(tmp_path, **options).close()


def test_a_run_that_does_not_say_its_settings_or_what_was_given_goes_on_in_silence(tmp_path, monkeypatch):
    publish = LocalStore.publish

    def as_before(store, step, files, index, progress, **options):
        less = {k: v for k, v in progress.items() if k not in ("settings", "given")}
        return publish(store, step, files, index, less, **options)

    with monkeypatch.context() as earlier:
        earlier.setattr(LocalStore, "publish", as_before)
        one_step(opened(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened(tmp_path, seed=5, group={"lr": 0.5}).close()


def test_a_hyper_parameter_that_changed_and_is_put_back_is_named_with_what_to_do(tmp_path):
    one_step(opened(tmp_path))
    changed = {"lr": 0.5, "betas": (0.8, 0.9)}
    said = (
        r"the run's own hyper-parameters are kept: param_groups\[0\]\['lr'\] is 0\.01 and not 0\.5, .*; "
        r"param_groups\[0\]\['betas'\] is \(0\.9, 0\.999\) and not \(0\.8, 0\.9\), .* after offload returns"
    )
    with pytest.warns(UserWarning, match=said) as warned:
        engine = opened(tmp_path, group=changed)
    assert warned[0].filename == __file__  # where offload was called
    one_step(engine)
    opened(tmp_path, group=changed).close()  # it was said


@pytest.mark.slow
def test_a_learning_rate_that_a_scheduler_or_the_script_moved_is_no_change(tmp_path):
    """It is put back where the run had it, which is what was asked for."""
    for number in range(3):
        engine, optimizer = script(tmp_path, scheduler=True)
        with engine:
            optimizer.param_groups[0]["eps"] = 0.5
            engine.step(batches(number, 1))


def test_a_changed_base_of_a_schedule_is_named(tmp_path):
    one_step(opened(tmp_path, scheduler=True))
    with pytest.warns(UserWarning, match=r"\['initial_lr'\] is 0\.01 and not 0\.5"):
        opened(tmp_path, group={"lr": 0.5}, scheduler=True).close()


def test_a_hyper_parameter_as_the_run_has_it_by_now_is_no_change(tmp_path):
    engine, optimizer = script(tmp_path)
    with engine:
        optimizer.param_groups[0]["lr"] = 0.5
        engine.step(batches(0, 1))
    opened(tmp_path, group={"lr": 0.5}).close()


def test_clipping_takes_the_norm_over_what_is_in_the_optimizer(tmp_path):
    model, plain = decoder(blocks=2), decoder(blocks=2)
    plain(**batches(0, 1)[0]).backward()
    grads = [p.grad for name, p in plain.named_parameters() if "head" not in name]
    trained = [p for name, p in model.named_parameters() if "head" not in name]
    with holdfast.offload(
        model, torch.optim.AdamW(trained), tmp_path, precision="fp32", clipping=0.1
    ) as engine:
        engine.step(batches(0, 1))
        assert engine.last["grad_norm"] == pytest.approx(float(torch.nn.utils.get_total_norm(grads)))
