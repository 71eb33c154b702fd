"""A ``Trainer`` with the callback ends, after any interruption, as one that was never interrupted."""

from __future__ import annotations

import shutil
import threading
from functools import cache

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="Trainer needs it")

from holdfast.adapters.transformers import HoldfastCallback, attach  # noqa: E402
from holdfast.checkpointer import Checkpointer  # noqa: E402
from holdfast.errors import BadInput, RunMismatch  # noqa: E402
from survive_run import digest  # noqa: E402
from trainer_run import SAMPLES, Stream, Texts, everything, make  # noqa: E402

KINDS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "workers": {"dataloader_num_workers": 2},
    "masks": {"data": Texts(noise=True)},
    "masks and accumulation": {"data": Texts(noise=True), "gradient_accumulation_steps": 2},
    "groups": {"train_sampling_strategy": "group_by_length"},
    "drop": {"dataloader_drop_last": True},
    "stream": {"data": Stream(), "max_steps": 12},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True},
    "by epochs": {"eval_strategy": "epoch", "logging_strategy": "epoch"},
    "steps": {"max_steps": 11, "optim": "adafactor"},
}
"""8 batches in an epoch, two epochs, the last batch of each short."""


class Interrupted(Exception):
    pass


class Interrupt(transformers.TrainerCallback):
    """Raises at an ``event`` when ``step`` steps are done."""

    def __init__(self, step, event="on_step_begin"):
        self._step, self._event = step, event

    def __getattribute__(self, name):
        if name == object.__getattribute__(self, "_event"):
            return object.__getattribute__(self, "_raise")
        return object.__getattribute__(self, name)

    def _raise(self, args, state, control, **_):
        if state.global_step == self._step:
            raise Interrupted


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


def compare(trainer, kind, first=None):
    """``trainer`` took part of the steps of the undisturbed one, from micro-batch ``first``, to the same end."""
    losses, end = whole(kind)
    own = getattr(trainer, "losses", [])
    assert own == losses[len(losses) - len(own) :]
    assert first is None or len(own) == len(losses) - first
    assert digests(trainer) == end


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("step", [0, 1, 3, 7, 8, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_before_a_step_it_ends_the_same(tmp_path, kind, step):
    if "accumulation" in kind:
        step //= 2
    interrupted(tmp_path, kind, Interrupt(step), base_every=3)
    compare(resumed(tmp_path, kind, base_every=3), kind)
