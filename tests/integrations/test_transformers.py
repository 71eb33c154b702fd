"""A ``Trainer`` with the callback ends, after any interruption, as one that was never interrupted."""

from __future__ import annotations

import itertools
import shutil
import threading
from functools import cache

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="Trainer needs it")

from holdfast.errors import BadInput, RunMismatch  # noqa: E402
from holdfast.integrations.transformers import HoldfastCallback, attach  # noqa: E402
from holdfast.state import encoding  # noqa: E402
from holdfast.store.commit.retention import Keep  # noqa: E402
from holdfast.store.log.chain import read_journal  # noqa: E402
from holdfast.store.run_store import LocalStore  # noqa: E402
from integrations_interrupt import Interrupt, Interrupted  # noqa: E402
from survive_run import digest  # noqa: E402
from trainer_run import SAMPLES, Stream, Texts, everything, make  # noqa: E402

KINDS = {
    "plain": {},
    "masks and accumulation": {"data": Texts(noise=True), "gradient_accumulation_steps": 3},
    "workers that drop": {"dataloader_num_workers": 2, "dataloader_drop_last": True},
    "groups in bf16": {"train_sampling_strategy": "group_by_length", "bf16": True},
    "stream": {"data": Stream(), "max_steps": 12},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True},
    "best": {
        "eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4,
        "load_best_model_at_end": True,
    },
    "by epochs": {"eval_strategy": "epoch", "logging_strategy": "epoch"},
    "steps": {"max_steps": 11, "optim": "adafactor"},
    "logged": {"logging_steps": 1},
}  # fmt: skip
"""8 batches in an epoch, two epochs, the last batch of each short."""

BEGIN = "on_step_begin"
INTERRUPTS = {
    "plain": [
        (2, BEGIN, 2), (2, BEGIN, 2), (5, "on_optimizer_step", 5),
        (6, "on_step_end", 5),  # of the step just done, which is not recorded yet
        (6, "on_log", 6), (8, BEGIN, 8), (9, BEGIN, 9), (16, "on_train_end", 16),
    ],
    "masks and accumulation": [(1, BEGIN, 3), (4, BEGIN, 11)],
    "workers that drop": [(1, BEGIN, 1), (9, BEGIN, 9)],
    "groups in bf16": [(3, BEGIN, 3), (8, BEGIN, 8)],
    "stream": [(0, BEGIN, 0), (9, BEGIN, 9)],
    "evaluation": [(1, BEGIN, 1), (6, "on_prediction_step", 6), (6, "on_evaluate", 6)],
    "best": [(0, BEGIN, 0), (7, BEGIN, 7)],
    "by epochs": [
        (1, BEGIN, 1), (8, "on_epoch_end", 8), (8, "on_evaluate", 8), (8, "on_epoch_begin", 8), (16, "on_evaluate", 16),
    ],
    "steps": [(3, BEGIN, 3), (11, "on_train_end", 11)],
}  # fmt: skip
"""Where each kind is interrupted in turn: the step, the event, and the micro-batch that is then the first."""


def digests(trainer):
    return {name: digest(value) for name, value in everything(trainer).items()}


@cache
def whole(kind):
    """The losses and the end of a trainer without a run."""
    trainer = make("unused", **KINDS[kind])
    trainer.train()
    return trainer.losses, digests(trainer)


def interrupted(root, kind, *interrupts, **options):
    trainer = make(
        root / "output", callbacks=[HoldfastCallback(root / "run", **options), *interrupts], **KINDS[kind]
    )
    with pytest.raises(Interrupted):
        trainer.train()
    return trainer


def resumed(root, kind, **options):
    trainer = make(root / "output", callbacks=[HoldfastCallback(root / "run", **options)], **KINDS[kind])
    trainer.train()
    return trainer


def begins(trainer, kind, first):
    """The micro-batches of ``trainer`` are those of the undisturbed one from ``first``."""
    own = getattr(trainer, "losses", [])
    assert own == whole(kind)[0][first : first + len(own)]
    return first + len(own)


def compare(trainer, kind, first):
    """``trainer`` took the steps of the undisturbed one from micro-batch ``first``, to the same end."""
    assert begins(trainer, kind, first) == len(whole(kind)[0])
    assert digests(trainer) == whole(kind)[1]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", INTERRUPTS)
def test_interrupted_again_and_again_it_ends_the_same(tmp_path, kind):
    """Before a step, amid it, and in what comes after it, as its evaluation, in which it is not lost."""
    first = 0
    for step, event, then in INTERRUPTS[kind]:
        begins(interrupted(tmp_path, kind, Interrupt(step, event), base_every=3), kind, first)
        first = then
    compare(resumed(tmp_path, kind, base_every=3), kind, first)


@pytest.mark.campaign
@pytest.mark.parametrize("kind, step", [*itertools.product(INTERRUPTS, [0, 1, 3, 7, 8, 9])])
def test_interrupted_before_any_step_it_ends_the_same(tmp_path, kind, step):
    if "accumulation" in kind:
        step //= 2
    interrupted(tmp_path, kind, Interrupt(step), base_every=3)
    trainer = resumed(tmp_path, kind, base_every=3)
    compare(trainer, kind, len(whole(kind)[0]) - len(getattr(trainer, "losses", [])))


@pytest.mark.slow
def test_a_record_has_of_the_history_what_was_logged_since_the_one_before(tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "LONG_TEXT", 1)
    for step in (9, 13):
        interrupted(tmp_path, "logged", Interrupt(step), base_every=4, keep=Keep(last=99))
    trainer = resumed(tmp_path, "logged", base_every=4, keep=Keep(last=99))
    compare(trainer, "logged", 13)
    with LocalStore.read(tmp_path / "run") as store:
        records = read_journal(store, "rank-00000").records
    told = {
        step: record.about["progress"]["things"]["loader"]["log_history"] for step, record in records.items()
    }
    assert sorted(told) == list(range(1, 17))
    ends = [text[encoding.ADDED] for text in told.values() if isinstance(text, dict)]
    assert len(ends) >= 9 and all(end.count("\n") <= 2 for end in ends)  # one of a step, and one of an epoch


class Read(Texts):
    def __init__(self):
        super().__init__()
        self.read = []

    def __getitem__(self, i):
        self.read.append(i)
        return super().__getitem__(i)


@pytest.mark.slow
def test_the_order_of_the_run_goes_before_what_the_script_says(tmp_path):
    """Its seed, and a checkpoint. Batches that were trained on are not read again."""
    trainer = make("unused")
    attach(trainer, tmp_path / "run")  # as it is there already
    trainer.add_callback(Interrupt(5))
    with pytest.raises(Interrupted):
        trainer.train()
    data = Read()
    trainer = make("unused", data=data, callbacks=[HoldfastCallback(tmp_path / "run")], seed=7)
    with pytest.warns(UserWarning, match="is not used"):
        trainer.train(resume_from_checkpoint=True)
    compare(trainer, "plain", 5)
    assert len(data.read) == SAMPLES - 5 * 3 + SAMPLES


@pytest.mark.slow
def test_recording_changes_no_number_and_a_run_that_has_ended_stays_so(tmp_path):
    compare(resumed(tmp_path, "plain"), "plain", 0)
    trainer = resumed(tmp_path, "plain")
    compare(trainer, "plain", 16)
    with pytest.raises(BadInput, match="make another trainer"):
        trainer.train()


@pytest.mark.slow
def test_a_run_that_has_ended_is_given_more_to_do(tmp_path):
    def train(epochs, *callbacks):
        trainer = make(
            "unused",
            callbacks=callbacks,
            num_train_epochs=epochs,
            lr_scheduler_type="constant",
            warmup_steps=0,
        )
        trainer.train()
        return trainer

    at_once = train(2)
    train(1, HoldfastCallback(tmp_path / "run"))
    trainer = train(2, HoldfastCallback(tmp_path / "run"))
    assert trainer.losses == at_once.losses[8:]
    assert digests(trainer) == digests(at_once)


@pytest.mark.slow
def test_other_callbacks_go_on_counting(tmp_path):
    def stopping(*callbacks):
        return make(
            "unused", callbacks=[transformers.EarlyStoppingCallback(2, early_stopping_threshold=99.0), *callbacks],
            eval_strategy="steps", eval_steps=2, metric_for_best_model="loss", greater_is_better=False,
        )  # fmt: skip

    alone = stopping()
    alone.train()
    assert 2 < alone.state.global_step < 16
    trainer = stopping(HoldfastCallback(tmp_path / "run"), Interrupt(5))
    with pytest.raises(Interrupted):
        trainer.train()
    trainer = stopping(HoldfastCallback(tmp_path / "run"))
    trainer.train()
    assert trainer.losses == alone.losses[5:]
    assert digests(trainer) == digests(alone)
    assert trainer.state.best_metric == alone.state.best_metric


@pytest.mark.slow
def test_nothing_is_left_behind_and_the_same_trainer_goes_on(tmp_path):
    before = threading.active_count()
    trainer = interrupted(tmp_path, "plain", Interrupt(5))
    for is_complete in (False, True):
        assert threading.active_count() == before
        assert not trainer.optimizer.optimizer._optimizer_step_pre_hooks
        assert not {"_run_epoch", "_maybe_log_save_evaluate", "_load_rng_state"} & set(vars(trainer))
        batches = trainer.callback_handler.train_dataloader.base_dataloader.batch_sampler
        assert type(batches) is torch.utils.data.BatchSampler
        if not is_complete:
            trainer.pop_callback(Interrupt)
            trainer.losses.clear()
            trainer.train()
    compare(trainer, "plain", 5)
    shutil.rmtree(tmp_path / "run")  # and no lock: the directory is free


# What is refused


def test_a_callback_that_would_record_nothing_says_so(tmp_path):
    trainer = make("unused")
    trainer.add_callback(HoldfastCallback(tmp_path / "run"))
    with pytest.raises(BadInput, match=r"attach\(trainer, run\)"):
        trainer.train()


def test_a_run_does_not_begin_at_a_checkpoint(tmp_path):
    trainer = make("unused", callbacks=[HoldfastCallback(tmp_path / "run")])
    with pytest.raises(BadInput, match="has no step yet"):
        trainer.train(resume_from_checkpoint="checkpoint-8")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_place_that_the_script_does_not_have_is_refused(tmp_path):
    interrupted(tmp_path, "plain", Interrupt(9))
    for changed, text in (
        ({"per_device_train_batch_size": 4}, "batch_size 3, now it is 4"),
        ({"num_train_epochs": 1}, "is in epoch 2, and the script ends after 1"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps 1, now it is 2"),
        ({"data": torch.utils.data.Subset(Texts(), range(9))}, "dataset length 23, now it is 9"),
    ):
        trainer = make("unused", callbacks=[HoldfastCallback(tmp_path / "run")], **changed)
        with pytest.raises(RunMismatch, match=text):
            trainer.train()
    compare(resumed(tmp_path, "plain"), "plain", 9)


@pytest.mark.parametrize(
    "options",
    [
        {"auto_find_batch_size": True},
        {"ignore_data_skip": True},
        {"accelerator_config": {"dispatch_batches": True}},
    ],
    ids=str,
)
def test_settings_that_lose_the_position_are_refused(tmp_path, options):
    trainer = make("unused", callbacks=[HoldfastCallback(tmp_path / "run")], **options)
    with pytest.raises(BadInput, match=r"(auto_find_batch_size|ignore_data_skip|dispatch_batches)=True"):
        trainer.train()
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adalora_has_a_warning(tmp_path):
    """The averages by which it chooses ranks are in no state. Trainer itself never updates them."""
    peft = pytest.importorskip("peft")
    trainer = make("unused", callbacks=[HoldfastCallback(tmp_path / "run")])
    given = peft.AdaLoraConfig(
        target_modules=["c_attn"], init_r=4, target_r=2, total_step=8, fan_in_fan_out=True
    )
    trainer.model = trainer.model_wrapped = peft.get_peft_model(trainer.model, given)
    with pytest.warns(UserWarning, match="AdaLoRA's rankallocator"):
        trainer.train()


# What callbacks set up


class Halves(transformers.TrainerCallback):
    """At the beginning of an epoch, weights and a hyper-parameter are half of what they were."""

    def on_epoch_begin(self, args, state, control, model=None, optimizer=None, **_):
        with torch.no_grad():
            model.transformer.ln_f.weight.mul_(0.5)
        for group in optimizer.param_groups:
            group["weight_decay"] = group["weight_decay"] * 0.5 + 0.1


class SetsUp(transformers.TrainerCallback):
    """By the number of the epoch: what is trained, clipped and dropped out."""

    def on_train_begin(self, args, state, control, model=None, **_):
        model.transformer.h[0].requires_grad_(False)

    def on_epoch_begin(self, args, state, control, model=None, **_):
        epoch = int(state.epoch or 0)
        args.max_grad_norm = 0.1 * (1 + epoch)
        model.transformer.drop.p = 0.1 + 0.2 * epoch
        model.transformer.h[0].requires_grad_(epoch > 0)


class Counts(transformers.TrainerCallback):
    """In an attribute, of which dropout follows."""

    num_steps = 0

    def on_step_begin(self, args, state, control, model=None, **_):
        self.num_steps += 1
        model.transformer.h[1].mlp.dropout.p = self.num_steps / 50


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*changed otherwise than by a step")  # by Halves, which is seen
def test_set_up_of_callbacks_is_not_done_twice(tmp_path):
    def kinds():
        return [Halves(), SetsUp(), Counts()]

    alone = make("unused", callbacks=kinds())
    alone.train()
    recording = HoldfastCallback(tmp_path / "run", base_every=3)
    with pytest.raises(Interrupted):
        make("unused", callbacks=[*kinds(), recording, Interrupt(11)]).train()
    trainer = make("unused", callbacks=[*kinds(), HoldfastCallback(tmp_path / "run", base_every=3)])
    trainer.train()
    assert trainer.losses == alone.losses[11:]
    assert digests(trainer) == digests(alone)


@pytest.mark.slow
def test_callbacks_have_the_arguments_of_the_run(tmp_path):
    """Where that is asked for, as by the Trainer's own checkpoints."""

    def patience(given, restored):
        stopping = transformers.EarlyStoppingCallback(given, early_stopping_threshold=-99.0)
        options = {
            "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss", "greater_is_better": False,
            "load_best_model_at_end": False, "restore_callback_states_from_checkpoint": restored,
        }  # fmt: skip
        trainer = make(
            "unused", callbacks=[stopping, HoldfastCallback(tmp_path / "run"), Interrupt(5)], **options
        )
        with pytest.raises(Interrupted):
            trainer.train()
        return stopping.early_stopping_patience

    assert patience(7, False) == 7
    assert patience(3, True) == 7


def test_guard_is_refused_before_there_is_a_run(tmp_path):
    with pytest.raises(BadInput, match="no rollback"):
        HoldfastCallback(tmp_path / "run", guard=True)
    assert not [*tmp_path.iterdir()]


class Accumulates(transformers.TrainerCallback):
    def on_epoch_begin(self, args, state, control, **_):
        args.gradient_accumulation_steps = 1 + int(state.epoch or 0)


def test_another_accumulation_in_training_is_refused(tmp_path):
    for _ in range(2):
        trainer = make("unused", callbacks=[Accumulates(), HoldfastCallback(tmp_path / "run")])
        with pytest.raises(
            BadInput, match="gradient_accumulation_steps was 1 when training began and is 2 now"
        ):
            trainer.train()


def test_fewer_steps_at_a_resume_are_none_more(tmp_path):
    with pytest.raises(Interrupted):
        make("unused", callbacks=[HoldfastCallback(tmp_path / "run"), Interrupt(5)]).train()
    trainer = make("unused", max_steps=4, callbacks=[HoldfastCallback(tmp_path / "run")])
    trainer.train()
    assert trainer.state.global_step == 5


def test_options_that_are_the_trainers_are_refused(tmp_path):
    with pytest.raises(BadInput, match="optimizer= is the trainer's"):
        HoldfastCallback(tmp_path / "run", optimizer=None)
