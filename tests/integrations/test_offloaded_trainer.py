"""A ``Trainer`` of ``offloaded`` trains out of core as the class that it was given trains in memory."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="Trainer needs it")

from transformers import LlamaForCausalLM, Trainer  # noqa: E402

import holdfast  # noqa: E402
from holdfast.errors import BadInput, RunMismatch  # noqa: E402
from holdfast.integrations.transformers import HoldfastCallback, offloaded  # noqa: E402
from integrations_interrupt import Interrupt, Interrupted, close_engines, same  # noqa: E402
from offloaded_script import Texts, everything, logged, make, model  # noqa: E402
from survive_run import digest  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*use_cache was switched off")


@pytest.fixture(autouse=True)
def engines_are_closed():
    yield
    close_engines()


EVALUATED = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 2}


@pytest.mark.parametrize(
    "options",
    [
        EVALUATED,
        pytest.param({"max_grad_norm": 0.0, "gradient_accumulation_steps": 1}, marks=pytest.mark.slow),
        pytest.param({"label_smoothing_factor": 0.1}, marks=pytest.mark.slow),
    ],
    ids=["evaluated", "unclipped", "smoothed"],
)
def test_the_log_is_that_of_the_unmodified_trainer(tmp_path, options):
    plain, trainer = (
        make(Trainer, tmp_path / "a", **options),
        make(offloaded(Trainer), tmp_path / "b", **options),
    )
    outputs = [each.train() for each in (plain, trainer)]
    same(logged(trainer), logged(plain))
    assert outputs[1].training_loss == pytest.approx(outputs[0].training_loss, rel=1e-5)
    trainer.engine.close()
    for mine, theirs in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_a_step_has_the_bits_of_the_engines_own_loop(tmp_path):
    """In the order of the samples, without a shuffle."""
    options = {"train_sampling_strategy": "sequential", "num_train_epochs": 1}
    trainer = make(offloaded(Trainer), tmp_path / "trainer", **options)
    trainer.train()
    script = make(Trainer, tmp_path / "loop", **options)
    script.create_optimizer_and_scheduler(4)
    losses = []
    with holdfast.offload(
        script.model, script.optimizer, tmp_path / "run", scheduler=script.lr_scheduler, precision="fp32",
        clipping=1.0, normalize="sum",
    ) as engine:  # fmt: skip
        batches = iter(script.get_train_dataloader())
        for count in (3, 3, 3, 2):
            step = [next(batches) for _ in range(count)]
            targets = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in step)
            losses.append(
                engine.step([{**batch, "num_items_in_batch": torch.tensor(targets)} for batch in step])
            )
    assert [entry["loss"] for entry in logged(trainer)[:-1]] == pytest.approx(losses, rel=1e-6)
    assert digest(everything(trainer)["model"]) == digest(script.model.state_dict())


class Squared(Trainer):
    """A loss of its own, a mean over samples, and a value that every call of it changes."""

    calls = 0
    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"])
        loss = outputs.logits.float().square().mean() + 0.5
        self.calls += model.training
        return (loss, outputs) if return_outputs else loss


def test_the_loss_is_the_classs_own(tmp_path):
    plain, trainer = make(Squared, tmp_path / "a"), make(offloaded(Squared), tmp_path / "b")
    for each in (plain, trainer):
        each.train()
    same(logged(trainer), logged(plain))
    assert trainer.calls == plain.calls == 22


@pytest.mark.slow
def test_evaluation_and_prediction_are_those_of_the_class(tmp_path):
    def count(predicted):
        return {"right": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}

    options = {"per_device_eval_batch_size": 3, "num_train_epochs": 1, "compute_metrics": count}
    plain, trainer = (
        make(Trainer, tmp_path / "a", **options),
        make(offloaded(Trainer), tmp_path / "b", **options),
    )
    before = [each.evaluate() for each in (plain, trainer)]
    for each in (plain, trainer):
        each.train()
    after = [each.evaluate() for each in (plain, trainer)]
    for theirs, mine in (before, after):
        assert mine["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-5)
        assert mine["eval_right"] == theirs["eval_right"]
    predicted = [each.predict(each.eval_dataset) for each in (plain, trainer)]
    torch.testing.assert_close(
        torch.tensor(predicted[1].predictions), torch.tensor(predicted[0].predictions), rtol=1e-4, atol=1e-5
    )
    assert trainer.engine is not None


def test_what_is_saved_has_the_weights_of_the_engine(tmp_path):
    trainer = make(offloaded(Trainer), tmp_path / "out", save_strategy="steps", save_steps=3, max_steps=4)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    values = trainer.engine.state_dict()
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert digest(dict(loaded.state_dict())) == digest(values)
    folder = tmp_path / "out" / "checkpoint-3"
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 3
    assert (folder / "model.safetensors").exists() and (folder / "scheduler.pt").exists()
    assert not (folder / "optimizer.pt").exists()


KINDS = {
    "plain": {},
    "evaluated": EVALUATED | {"logging_steps": 2},
    "workers": {"dataloader_num_workers": 2},
    "own loss": {},
    "noise": {"train_dataset": Texts(noise=True)},
}


def script(root, kind, *callbacks):
    trainer = Squared if kind == "own loss" else Trainer
    return make(offloaded(trainer), root, callbacks=callbacks, **KINDS[kind])


@cache
def whole(kind, root):
    trainer = script(root / "whole" / kind, kind)
    trainer.train()
    return digest(everything(trainer)), getattr(trainer, "calls", None)


@pytest.mark.parametrize(
    "kind, step, event",
    [
        pytest.param("plain", 0, "on_step_begin", marks=pytest.mark.slow),
        pytest.param("plain", 2, "on_optimizer_step", marks=pytest.mark.slow),
        ("plain", 3, "on_step_end"),
        pytest.param("plain", 4, "on_epoch_begin", marks=pytest.mark.slow),
        pytest.param("plain", 4, "on_epoch_end", marks=pytest.mark.slow),
        pytest.param("plain", 5, "on_substep_end", marks=pytest.mark.slow),
        pytest.param("plain", 8, "on_train_end", marks=pytest.mark.slow),
        pytest.param("evaluated", 3, "on_evaluate", marks=pytest.mark.slow),
        ("evaluated", 6, "on_prediction_step"),
        pytest.param("own loss", 5, "on_step_end", marks=pytest.mark.slow),
        pytest.param("noise", 2, "on_step_end", marks=pytest.mark.slow),
        pytest.param("noise", 4, "on_step_end", marks=pytest.mark.slow),
        pytest.param("workers", 5, "on_step_end", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_training_ends_the_same(tmp_path, tmp_path_factory, kind, step, event):
    interrupted = script(tmp_path, kind, Interrupt(step, event))
    with pytest.raises(Interrupted):
        interrupted.train()
    trainer = script(tmp_path, kind)
    trainer.train()
    end, calls = whole(kind, tmp_path_factory.getbasetemp())
    assert digest(everything(trainer)) == end
    assert getattr(trainer, "calls", None) == calls


@pytest.mark.slow
def test_a_step_that_is_durable_is_not_computed_again(tmp_path):
    with pytest.raises(Interrupted):
        script(tmp_path, "own loss", Interrupt(3, "on_step_end")).train()
    trainer, seen = script(tmp_path, "own loss"), []
    compute_loss = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: seen.append(1) or compute_loss(*args, **kwargs)
    trainer.train()
    assert len(seen) == 22 - 9  # three steps of three are in the run
    assert trainer.calls == 22


@pytest.mark.slow
def test_a_run_goes_before_a_checkpoint(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    with pytest.raises(BadInput, match="has no step yet"):
        make(offloaded(Trainer), tmp_path, **options).train(resume_from_checkpoint="checkpoint-2")
    with pytest.raises(Interrupted):
        make(offloaded(Trainer), tmp_path, callbacks=[Interrupt(5)], **options).train()
    trainer = make(offloaded(Trainer), tmp_path, **options)
    with pytest.warns(UserWarning, match="goes on after the newest step"):
        trainer.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in logged(trainer)] == [*range(1, 9), 8]


@pytest.mark.slow
def test_the_best_model_is_loaded_at_the_end(tmp_path):
    options = EVALUATED | {"save_strategy": "steps", "save_steps": 3, "load_best_model_at_end": True}
    plain, trainer = (
        make(Trainer, tmp_path / "a", **options),
        make(offloaded(Trainer), tmp_path / "b", **options),
    )
    for each in (plain, trainer):
        each.train()
    assert trainer.engine is None
    assert trainer.state.best_global_step == plain.state.best_global_step
    for mine, theirs in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_activation_checkpointing_is_left_to_the_engine(tmp_path):
    plain, trainer = (
        make(Trainer, tmp_path / "a"),
        make(offloaded(Trainer), tmp_path / "b", activation_checkpointing=True),
    )
    for each in (plain, trainer):
        each.train()
    same(logged(trainer), logged(plain))


class Dtypes(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        self.dtypes = [*vars(self).get("dtypes", []), str(outputs.logits.dtype)]
        return loss


@pytest.mark.parametrize("options, dtype", [({"bf16": True}, "torch.bfloat16"), ({}, "torch.float32")])
def test_the_dtype_is_that_of_the_arguments(tmp_path, options, dtype):
    trainer = make(offloaded(Dtypes), tmp_path, max_steps=1, **options)
    trainer.train()
    assert trainer.dtypes == 3 * [dtype]


@pytest.mark.parametrize(
    "options, text",
    [
        ({"torch_compile": True}, "torch_compile=True"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True"),
        ({"bf16_full_eval": True}, "bf16_full_eval=True"),
        ({"use_liger_kernel": True}, "use_liger_kernel=True"),
        ({"callbacks": [HoldfastCallback("unused")]}, "HoldfastCallback"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, options, text):
    with pytest.raises(BadInput, match=text):
        make(offloaded(Trainer), tmp_path, **options)
    assert not (tmp_path / "_holdfast").exists()


class OwnLoop(Trainer):
    def _inner_training_loop(self, *args, **kwargs):
        raise NotImplementedError


def test_classes_that_cannot_work_are_refused():
    with pytest.raises(BadInput, match="_inner_training_loop"):
        offloaded(OwnLoop)
    with pytest.raises(BadInput, match="subclasses"):
        offloaded(dict)
    with pytest.raises(BadInput, match="normalize"):
        offloaded(Trainer, normalize="tokens")


@pytest.mark.slow
def test_another_batch_size_is_refused(tmp_path):
    with pytest.raises(Interrupted):
        script(tmp_path, "plain", Interrupt(3)).train()
    with pytest.raises(RunMismatch, match="batch_size"):
        make(offloaded(Trainer), tmp_path, per_device_train_batch_size=3).train()


@pytest.mark.slow
def test_a_model_on_meta_begins_from_its_folder(tmp_path):
    model().save_pretrained(tmp_path / "folder")
    empty, weights = holdfast.pretrained(tmp_path / "folder")
    trainer = make(offloaded(Trainer, tmp_path / "run", source=weights), tmp_path / "out", model=empty)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    plain = make(offloaded(Trainer), tmp_path / "b")
    plain.train()
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert digest(dict(loaded.state_dict())) == digest(plain.engine.state_dict())
