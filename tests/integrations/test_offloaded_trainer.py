"""A ``Trainer`` of ``offloaded`` trains out of core as the class that it was given trains in memory."""

from __future__ import annotations

import errno
import json
from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch.utils.data import IterableDataset

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="Trainer needs it")

from transformers import (  # noqa: E402
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
)

import holdfast  # noqa: E402
from holdfast.errors import BadInput, ModelNotSupported, RunMismatch  # noqa: E402
from holdfast.integrations.out_of_core import script_model  # noqa: E402
from holdfast.integrations.transformers import HoldfastCallback, offloaded  # noqa: E402
from holdfast.quantities import round_up  # noqa: E402
from integrations_interrupt import Interrupt, Interrupted, close_engines, same  # noqa: E402
from offloaded_script import SIZES, Texts, arguments, everything, logged, make, model  # noqa: E402
from survive_run import digest  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*use_cache was switched off")


@pytest.fixture(autouse=True)
def engines_are_closed():
    yield
    close_engines()


EVALUATED = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 2}
BEST = {"save_strategy": "steps", "save_steps": 3, "load_best_model_at_end": True}


@pytest.mark.parametrize(
    "options, more",
    [
        (EVALUATED | BEST, {}),
        pytest.param(
            {"max_grad_norm": 0.0, "gradient_accumulation_steps": 1, "label_smoothing_factor": 0.1},
            {"activation_checkpointing": True},  # which is left to the engine
            marks=pytest.mark.slow,
        ),
    ],
    ids=["evaluated", "unclipped"],
)
@pytest.mark.slow
def test_the_log_is_that_of_the_unmodified_trainer(tmp_path, options, more):
    plain, trainer = (
        make(Trainer, tmp_path / "a", **options),
        make(offloaded(Trainer), tmp_path / "b", **options, **more),
    )
    outputs = [each.train() for each in (plain, trainer)]
    same(logged(trainer), logged(plain))
    assert outputs[1].training_loss == pytest.approx(outputs[0].training_loss, rel=1e-5)
    if "load_best_model_at_end" in options:
        assert trainer.engine is None
        assert trainer.state.best_global_step == plain.state.best_global_step
    else:
        trainer.engine.close()
    for mine, theirs in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
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
    plain, trainer = (
        make(kind, tmp_path / str(i), num_train_epochs=1)
        for i, kind in enumerate((Squared, offloaded(Squared)))
    )
    for each in (plain, trainer):
        each.train()
    same(logged(trainer), logged(plain))
    assert trainer.calls == plain.calls == 11
    trainer.engine.close()
    with pytest.raises(BadInput, match="holds the training that has ended"):
        trainer.train()  # which would train nothing


class TwoLosses(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        outputs = model.train()(**self._prepare_inputs(inputs))
        other = outputs.logits.square().mean()
        self.accelerator.backward(outputs.loss, retain_graph=True)
        self.accelerator.backward(other)
        return (outputs.loss + other).detach()


def test_gradients_of_two_losses_add_up(tmp_path):
    logs = []
    for kind in (TwoLosses, offloaded(TwoLosses)):
        trainer = make(kind, tmp_path / kind.__name__, max_steps=2)
        trainer.train()
        logs.append(logged(trainer))
    same(logs[1], logs[0])


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


@pytest.mark.slow
def test_texts_of_an_evaluation_are_those_of_the_class(tmp_path):
    def total(predicted):
        return {"sum": float(predicted.predictions.sum())}

    logs = []
    for kind in (Seq2SeqTrainer, offloaded(Seq2SeqTrainer)):
        arguments_of = Seq2SeqTrainingArguments(
            **arguments(tmp_path / kind.__name__, **EVALUATED, max_steps=3), predict_with_generate=True,
            generation_max_length=13,
        )  # fmt: skip
        trainer = kind(
            model=model(), args=arguments_of, train_dataset=Texts(), eval_dataset=Texts(7, 100),
            compute_metrics=total,
        )  # fmt: skip
        trainer.train()
        logs.append(logged(trainer))
    same(logs[1], logs[0])
    assert any("eval_sum" in entry for entry in logs[1])


def full(*_):
    raise OSError(errno.ENOSPC, "no space left on device")


class Room(NamedTuple):
    free: int


def test_what_is_saved_has_the_weights_of_the_engine(tmp_path, monkeypatch):
    put, found = script_model._Pages.put, []

    def noted(pages, value):
        found.append((value, put(pages, value)))
        return found[-1][1]

    monkeypatch.setattr(script_model._Pages, "put", noted)
    trainer = make(offloaded(Trainer), tmp_path / "out", save_strategy="steps", save_steps=3, max_steps=4)
    trainer.train()

    def saved_in(folder):
        """Save the model, and return the numbers of tensors that were in the file and in memory."""
        found.clear()
        trainer.save_model(tmp_path / folder)
        return Counter(given is not kept for given, kept in found)

    count = len(trainer.engine.held.captured.parameters)
    assert saved_in("saved") == {True: count}
    values = trainer.engine.state_dict()
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert digest(dict(loaded.state_dict())) == digest(values)
    with monkeypatch.context() as patched:
        patched.setattr(script_model.os, "pwrite", full)  # the disk gets full
        assert saved_in("full") == {False: count}
    nbytes = sum(round_up(value.nbytes) for value in values.values())
    with monkeypatch.context() as patched:  # too little for the file and what is saved
        patched.setattr(script_model.shutil, "disk_usage", lambda _: Room(nbytes * 3 // 2))
        assert saved_in("small") == {}
    expected = (tmp_path / "saved" / "model.safetensors").read_bytes()
    assert all((tmp_path / each / "model.safetensors").read_bytes() == expected for each in ("full", "small"))
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
INTERRUPTS = {
    "plain": [
        (0, "on_step_begin"), (2, "on_optimizer_step"), (3, "on_step_end"), (4, "on_epoch_end"), (4, "on_epoch_begin"),
        (5, "on_substep_end"), (8, "on_train_end"),
    ],
    "evaluated": [(3, "on_evaluate"), (6, "on_prediction_step")],
    "own loss": [(3, "on_step_end"), (5, "on_step_end")],
    "noise": [(2, "on_step_end"), (4, "on_step_end")],
    "workers": [(5, "on_step_end")],
}  # fmt: skip
"""Where each kind is interrupted, one after the other; the last step is then in the run."""


def script(root, kind, *callbacks):
    trainer = Squared if kind == "own loss" else Trainer
    return make(offloaded(trainer), root, callbacks=callbacks, **KINDS[kind])


@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=[pytest.mark.slow] * (each != "evaluated")) for each in INTERRUPTS]
)
@pytest.mark.slow
def test_interrupted_again_and_again_it_ends_the_same(tmp_path, kind):
    """No step that is durable is computed again."""
    whole = script(tmp_path / "whole", kind)
    whole.train()
    end = digest(everything(whole))
    for interrupt in [*INTERRUPTS[kind], None]:
        trainer = script(tmp_path, kind, *([] if interrupt is None else [Interrupt(*interrupt)]))
        compute_loss, seen = trainer.compute_loss, []
        trainer.compute_loss = partial(counted, compute_loss, seen)
        with nullcontext() if interrupt is None else pytest.raises(Interrupted):
            trainer.train()
    assert digest(everything(trainer)) == end
    assert kind == "evaluated" or len(seen) == 22 - micro_batches(INTERRUPTS[kind][-1][0])
    assert (
        getattr(trainer, "calls", None)
        == getattr(whole, "calls", None)
        == (22 if kind == "own loss" else None)
    )


def test_experts_have_their_balancing_loss_after_a_resume(tmp_path):
    """The hooks that record routers are made anew in each process."""

    def script(root, *callbacks):
        torch.manual_seed(0)
        experts = transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                **SIZES, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5
            )
        )
        options = {"model": experts, "max_steps": 2, "gradient_accumulation_steps": 1}
        return make(offloaded(Trainer), root, callbacks=callbacks, **options)

    with pytest.raises(Interrupted):
        script(tmp_path / "run", Interrupt(1, "on_step_end")).train()
    whole, resumed = script(tmp_path / "whole"), script(tmp_path / "run")
    for each in (whole, resumed):
        each.train()
    assert logged(resumed) == logged(whole)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Texts()[i] for i in range(22))


class Means(Trainer):
    """Losses are means of micro-batches, which the trainer divides."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs)


@pytest.mark.parametrize("kind", [Trainer, Means])
@pytest.mark.slow
def test_batches_left_at_the_end_of_a_stream_are_of_the_next_step(tmp_path, kind):
    """Three steps of three micro-batches, and two more, whose gradients the trainer carries into its next pass."""
    options = {"max_steps": 5, "train_dataset": Stream()}
    plain = make(kind, tmp_path / "plain", **options)
    plain.train()
    for step in (3, 4, None):
        callbacks = [] if step is None else [Interrupt(step, "on_step_end")]
        trainer = make(offloaded(kind), tmp_path / "run", callbacks=callbacks, **options)
        with nullcontext() if step is None else pytest.raises(Interrupted):
            trainer.train()
        close_engines()
    same(logged(trainer), logged(plain))


class EndsEpochs(TrainerCallback):
    """Ends the first epoch after the first micro-batch of a step."""

    def __init__(self, step):
        self.step, self.epochs = step, 0

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.epochs += 1

    def on_substep_end(self, args, state, control, **kwargs):
        control.should_epoch_stop |= state.global_step == self.step and self.epochs == 1


@pytest.mark.parametrize("step", [1, 3])
def test_an_epoch_that_ends_amid_a_step_ends_after_it(tmp_path, step):
    """The step is done and counted; what was asked for in batches left at the end of a pass is over with it."""
    ends = EndsEpochs(step)
    trainer = make(offloaded(Trainer), tmp_path, max_steps=5, train_dataset=Stream(), callbacks=[ends])
    trainer.train()
    assert ends.epochs == 2
    assert trainer.engine.steps_done == trainer.state.global_step == 5


def counted(compute_loss, seen, *args, **kwargs):
    seen.append(1)
    return compute_loss(*args, **kwargs)


def micro_batches(steps):
    """How many are in so many steps: 4 of an epoch have 11."""
    return steps // 4 * 11 + steps % 4 * 3


@pytest.mark.slow
def test_a_run_goes_before_a_checkpoint(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    with pytest.raises(BadInput, match="has no step yet"):
        make(offloaded(Trainer), tmp_path, **options).train(resume_from_checkpoint="checkpoint-2")
    with pytest.raises(Interrupted):
        make(offloaded(Trainer), tmp_path, callbacks=[Interrupt(5)], **options).train()
    with pytest.raises(RunMismatch, match="batch_size"):
        make(offloaded(Trainer), tmp_path, per_device_train_batch_size=3).train()
    trainer = make(offloaded(Trainer), tmp_path, **options)
    with pytest.warns(UserWarning, match="goes on after the newest step"):
        trainer.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in logged(trainer)] == [*range(1, 9), 8]


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
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True"),
        ({"callbacks": [HoldfastCallback("unused")]}, "HoldfastCallback"),
        ({"optim": "apollo_adamw_layerwise"}, "apollo_adamw_layerwise.*in the backward pass"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, options, text):
    with pytest.raises(BadInput, match=text):
        make(offloaded(Trainer), tmp_path, **options)
    assert not (tmp_path / "_holdfast").exists()


def test_clipping_of_what_is_not_trained_is_refused(tmp_path):
    """In memory its gradient is part of the norm."""
    trainer = make(offloaded(Trainer), tmp_path)
    trainer.optimizer = torch.optim.AdamW([*trainer.model.parameters()][1:], lr=0.01)
    with pytest.raises(BadInput, match="requires a gradient and is not in the optimizer"):
        trainer.train()
    assert not (tmp_path / "_holdfast").exists()
    trainer.args.max_grad_norm = 0.0
    assert trainer.train().global_step == 8


class SetsRate(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, optimizer, **_):
        optimizer.param_groups[0]["lr"] *= 1 + state.global_step


def test_a_rate_set_when_the_step_is_done_is_refused(tmp_path):
    """Also when the step is repeated after a resume."""
    for _ in range(2):
        trainer = make(offloaded(Trainer), tmp_path, callbacks=[SetsRate()], max_steps=3)
        with pytest.raises(BadInput, match="changed in the middle of step 2"):
            trainer.train()
    assert make(offloaded(Trainer), tmp_path, max_steps=3).train().global_step == 3


class SetsNorm(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        args.max_grad_norm = 0.1


def test_a_norm_set_in_training_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"args\.max_grad_norm was 1\.0 when the run"):
        make(offloaded(Trainer), tmp_path, callbacks=[SetsNorm()]).train()


class Accumulates(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        args.gradient_accumulation_steps = 3 + (state.global_step == 2)


def test_another_accumulation_in_training_is_refused(tmp_path):
    trainer = make(offloaded(Trainer), tmp_path, callbacks=[Accumulates()])
    with pytest.raises(BadInput, match="gradient_accumulation_steps was 3 when training began and is 4 now"):
        trainer.train()
    assert make(offloaded(Trainer), tmp_path, max_steps=3).train().global_step == 3


class ReadsGradients(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model, **_):
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)


def test_a_callback_that_reads_gradients_is_refused(tmp_path):
    trainer = make(offloaded(Trainer), tmp_path, callbacks=[ReadsGradients()])
    with pytest.raises(ModelNotSupported, match=r"the gradient of .* was read"):
        trainer.train()
    assert trainer.model.zero_grad.__func__ is torch.nn.Module.zero_grad  # the model has its own back


class ZeroesGradients(TrainerCallback):
    def __init__(self, *events):
        for event in events:
            setattr(self, event, self.zero)

    def zero(self, args, state, control, optimizer, **_):
        optimizer.zero_grad()


def test_gradients_that_are_zeroed_between_steps_change_nothing(tmp_path):
    callback = ZeroesGradients("on_step_begin", "on_optimizer_step", "on_step_end")
    trainer = make(offloaded(Trainer), tmp_path, callbacks=[callback], max_steps=2)
    assert trainer.train().global_step == 2
    optimizer = trainer.optimizer
    trainer.engine.close()
    assert "zero_grad" not in vars(getattr(optimizer, "optimizer", optimizer))


def test_gradients_that_are_zeroed_amid_a_step_are_refused(tmp_path):
    trainer = make(
        offloaded(Trainer), tmp_path, callbacks=[ZeroesGradients("on_pre_optimizer_step")], max_steps=2
    )
    with pytest.raises(BadInput, match=r"zero_grad.* was called between a backward pass and"):
        trainer.train()


class OwnClipping(Trainer):
    def _clip_grad_norm(self, model):
        return super()._clip_grad_norm(model)


class OwnLoop(Trainer):
    def _inner_training_loop(self, *args, **kwargs):
        raise NotImplementedError


def test_classes_that_cannot_work_are_refused():
    with pytest.raises(BadInput, match="_inner_training_loop"):
        offloaded(OwnLoop)
    with pytest.raises(BadInput, match="_clip_grad_norm of its own"):
        offloaded(OwnClipping)
    with pytest.raises(BadInput, match="subclasses"):
        offloaded(dict)
    with pytest.raises(BadInput, match="normalize"):
        offloaded(Trainer, normalize="tokens")


@pytest.mark.slow
def test_a_model_on_meta_begins_from_its_folder(tmp_path):
    model().save_pretrained(tmp_path / "folder")
    empty, weights = holdfast.pretrained(tmp_path / "folder")
    trainer = make(
        offloaded(Trainer, tmp_path / "run", source=weights), tmp_path / "out", model=empty, max_steps=2
    )
    before = trainer.evaluate()
    assert all(parameter.is_meta for parameter in empty.parameters())
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    trainer.engine.close()
    with pytest.raises(BadInput, match="no values in memory"):
        trainer.evaluate()
    plain = make(offloaded(Trainer), tmp_path / "b", max_steps=2)
    assert plain.evaluate()["eval_loss"] == before["eval_loss"]
    plain.train()
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert digest(dict(loaded.state_dict())) == digest(plain.engine.state_dict())
