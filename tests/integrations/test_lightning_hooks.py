"""What Lightning's callbacks and hooks keep and set up comes back in mid-epoch, or is refused by name."""

from __future__ import annotations

import pickle

import pytest
import torch

lightning = pytest.importorskip("lightning")

from lightning.pytorch.callbacks import (  # noqa: E402
    BackboneFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import Strategy  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim.swa_utils import AveragedModel  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from holdfast.errors import BadInput  # noqa: E402
from holdfast.integrations.lightning import HoldfastCallback  # noqa: E402
from survive_run import digest  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]

POINTS = TensorDataset(torch.randn(18, 6, generator=torch.Generator().manual_seed(1)))
STEPS_BEFORE = 8
"""Of the run that is interrupted in the second epoch of five batches."""


class Net(lightning.LightningModule):
    """A backbone and a head; ``weight`` scales the loss."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 2)
        self.weight = 1.0

    def training_step(self, batch, index):
        loss = self.weight * self.head(self.backbone(batch[0])).square().mean()
        self.log("train", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.05)


class Interrupted(Exception):
    pass


@pytest.fixture(autouse=True)
def no_strategy_is_asked(monkeypatch):
    """For the optimizer's state: FSDP2's strategy makes a first one by a step of its own."""
    monkeypatch.delattr(Strategy, "optimizer_state")


class Interrupts(lightning.Callback):
    def __init__(self, after):
        self.batches_left = after

    def on_train_batch_start(self, *_):
        self.batches_left -= 1
        if self.batches_left < 0:
            raise Interrupted


def fit(make, tmp_path, run=None, after=None, own=False, **loader):
    """Return everything that the training made by ``make`` ends with."""
    torch.manual_seed(0)
    if own:
        loader["generator"] = torch.Generator().manual_seed(5)
    model, callbacks, options = make()
    every = list(callbacks)
    if run is not None:  # first, so that no order of callbacks is needed
        every.insert(0, HoldfastCallback(run, base_every=3))
    if after is not None:
        every.append(Interrupts(after))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, callbacks=every, **({"max_epochs": 4} | options),
    )  # fmt: skip
    trainer.fit(model, DataLoader(POINTS, shuffle=True, **{"batch_size": 4} | loader))
    end = {
        "model": model.state_dict(),
        "optimizers": [_in_order(each) for each in trainer.optimizers],
        "callbacks": [each.state_dict() for each in callbacks],
        "trained": [p.requires_grad for p in model.parameters()],
        "steps": trainer.global_step,
        "random": torch.get_rng_state(),
        "accumulates": trainer.accumulate_grad_batches,
    }
    return {name: digest(value) for name, value in end.items()}


def _in_order(optimizer):
    state = optimizer.state_dict()
    slots = [dict(sorted(held.items())) for _, held in sorted(state["state"].items())]
    return {"slots": slots, "groups": state["param_groups"]}


def averaged():
    return Net(), [EMAWeightAveraging(decay=0.9)], {}


def averaged_to_a_number_of_steps():
    return Net(), [EMAWeightAveraging(decay=0.9)], {"max_steps": 9, "max_epochs": -1}


def accumulating_by_epochs():
    return Net(), [GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})], {}


def unfreezing():
    return Net(), [BackboneFinetuning(unfreeze_backbone_at_epoch=1)], {}


def adding_a_group():
    class Adds(lightning.Callback):
        def setup(self, trainer, module, stage):
            module.backbone.requires_grad_(False)

        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == 1:
                module.backbone.requires_grad_(True)
                trainer.optimizers[0].add_param_group(
                    {"params": list(module.backbone.parameters()), "lr": 0.01}
                )

    return Net(), [Adds()], {}


def set_up_by_epochs():
    class Sets(lightning.Callback):
        def on_train_epoch_start(self, trainer, module):
            module.weight = 1.0 + trainer.current_epoch
            module.backbone[1].train(trainer.current_epoch % 2 == 0)
            trainer.gradient_clip_val = 0.1 * (1 + trainer.current_epoch)

    return Net(), [Sets()], {"gradient_clip_val": 0.5}


def counting_in_attributes():
    class Counts(lightning.Callback):
        def on_train_start(self, trainer, module):
            self.num_batches = 10

        def on_train_batch_start(self, trainer, module, batch, index):
            self.num_batches += 1
            module.weight = 1.0 + self.num_batches / 100

    return Net(), [Counts()], {}


def saving_by_hooks():
    class Saves(Net):
        def __init__(self):
            super().__init__()
            object.__setattr__(self, "teacher", nn.Linear(4, 2))

        def training_step(self, batch, index):
            with torch.no_grad():
                self.teacher.weight.lerp_(self.head.weight, 0.1)
            hidden = self.backbone(batch[0])
            return (self.head(hidden) - self.teacher(hidden)).square().mean() + super().training_step(
                batch, index
            )

        def on_save_checkpoint(self, checkpoint):
            checkpoint["teacher"] = self.teacher.state_dict()

        def on_load_checkpoint(self, checkpoint):
            self.teacher.load_state_dict(checkpoint["teacher"])

    return Saves(), [], {}


def stopping_by_a_sum_of_the_epoch():
    return Net(), [EarlyStopping("train", patience=1, min_delta=0.05)], {"max_epochs": 6}


MAKES = [
    averaged,
    averaged_to_a_number_of_steps,
    accumulating_by_epochs,
    unfreezing,
    adding_a_group,
    set_up_by_epochs,
    counting_in_attributes,
    saving_by_hooks,
    stopping_by_a_sum_of_the_epoch,
]


@pytest.mark.parametrize("make", MAKES)
def test_interrupted_in_mid_epoch_ends_the_same(tmp_path, make):
    whole = fit(make, tmp_path)
    with pytest.raises(Interrupted):
        fit(make, tmp_path, tmp_path / "run", after=STEPS_BEFORE)
    assert fit(make, tmp_path, tmp_path / "run") == whole


def test_a_finished_run_ends_with_averages(tmp_path):
    whole = fit(averaged_to_a_number_of_steps, tmp_path)
    fit(averaged_to_a_number_of_steps, tmp_path, tmp_path / "run")
    again = fit(averaged_to_a_number_of_steps, tmp_path, tmp_path / "run")
    assert again["model"] == whole["model"]


class Validated(Net):
    def validation_step(self, batch, index):
        self.log("validated", self.head(self.backbone(batch[0])).square().mean())


def test_second_fit_of_trainer_continues(tmp_path):
    """With validation, which the trainer has run in its first fit."""

    def weights(*ends, run=None):
        torch.manual_seed(0)
        model, loader = Validated(), DataLoader(POINTS, batch_size=6, shuffle=True)
        trainer = lightning.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=1,
            enable_model_summary=False, callbacks=[] if run is None else [HoldfastCallback(run)],
        )  # fmt: skip
        for end in ends:
            trainer.fit_loop.max_epochs = end
            trainer.fit(model, loader, DataLoader(POINTS, batch_size=9))
        return trainer.global_step, digest(model.state_dict())

    assert weights(2, 4, run=tmp_path / "run") == weights(4)


def test_nothing_stays_on_the_loader(tmp_path):
    """So that a trainer can be pickled after a fit."""
    loader = DataLoader(POINTS, batch_size=6)
    before = dict(vars(loader))
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=1,
        enable_model_summary=False, callbacks=[HoldfastCallback(tmp_path / "run")],
    )  # fmt: skip
    trainer.fit(Net(), loader)
    assert vars(loader) == before
    assert pickle.dumps(trainer)


def test_objects_of_epoch_hooks_are_told(tmp_path):
    class Sets(lightning.Callback):
        def on_train_epoch_start(self, trainer, module):
            self.made = object()

    with pytest.warns(UserWarning, match="Sets.made got other objects in on_train_epoch_start"):
        fit(lambda: (Net(), [Sets()], {"max_epochs": 2}), tmp_path, tmp_path / "run")


@pytest.mark.parametrize(
    "callback, text",
    [
        (lambda: StochasticWeightAveraging(0.01), "take lightning.pytorch.callbacks.WeightAveraging"),
        (lambda: ModelPruning("l1_unstructured", amount=0.5), "prune after training"),
        (LearningRateFinder, "trains in on_fit_start"),
    ],
)
def test_a_callback_without_resume_is_refused(tmp_path, callback, text):
    with pytest.raises(BadInput, match=text):
        fit(lambda: (Net(), [callback()], {}), tmp_path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_large_state_of_a_callback_is_refused(tmp_path):
    class Keeps(lightning.Callback):
        def state_dict(self):
            return {"all": torch.zeros(5 << 20)}

    with pytest.raises(BadInput, match=r"has 20\.0 MiB of tensors in its state"):
        fit(lambda: (Net(), [Keeps()], {}), tmp_path, tmp_path / "run")


# Closures


class Polyak(torch.optim.Optimizer):
    """Steps by the loss that its closure returns."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * loss * parameter.grad)
        return loss


class Twice(torch.optim.SGD):
    """Sharpness-aware: gradients of two places in one step."""

    @torch.no_grad()
    def step(self, closure=None):
        for _ in range(2):
            with torch.enable_grad():
                loss = closure()
        super().step()
        return loss


class Late(torch.optim.SGD):
    """Changes parameters before their gradients are computed."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(0.9)
        with torch.enable_grad():
            return super().step(closure)


def with_optimizer(kind):
    class Optimized(Net):
        def configure_optimizers(self):
            return kind(self.parameters())

    return lambda: (Optimized(), [], {})


def test_a_loss_that_a_step_uses_is_replayed(tmp_path):
    test_interrupted_in_mid_epoch_ends_the_same(tmp_path, with_optimizer(Polyak))


@pytest.mark.parametrize("kind", [Twice, Late])
def test_a_step_of_several_gradients_is_refused(tmp_path, kind):
    with pytest.raises(BadInput, match=f"{kind.__name__} calls its closure more than once"):
        fit(with_optimizer(kind), tmp_path, tmp_path / "run")


def test_lbfgs_is_refused_before_the_run_begins(tmp_path):
    with pytest.raises(BadInput, match=r"LBFGS.step\(\) needs a closure"):
        fit(with_optimizer(torch.optim.LBFGS), tmp_path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_guard_is_refused_before_there_is_a_run(tmp_path):
    with pytest.raises(BadInput, match="no rollback"):
        HoldfastCallback(tmp_path / "run", guard=True)
    assert not [*tmp_path.iterdir()]


class Count:
    """An object with a state, which each update counts in."""

    number = 0

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


def test_what_the_callback_is_given_comes_back_beside_lightnings_averages(tmp_path):
    def script(run, *callbacks):
        torch.manual_seed(0)
        model, count = Net(), Count()
        average = AveragedModel(model.head)

        def update():
            average.update_parameters(model.head)
            count.number += 1

        recording = HoldfastCallback(run, averages=average, after_update=update, also={"count": count})
        trainer = lightning.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=2,
            enable_model_summary=False, callbacks=[recording, EMAWeightAveraging(decay=0.9), *callbacks],
        )  # fmt: skip
        trainer.fit(model, DataLoader(POINTS, batch_size=4, shuffle=True))
        return digest([model.state_dict(), average.state_dict(), count.number])

    whole = script(tmp_path / "whole")
    with pytest.raises(Interrupted):
        script(tmp_path / "run", Interrupts(7))
    assert script(tmp_path / "run") == whole


@pytest.mark.parametrize(
    ("epochs", "limit", "accumulated", "loader"),
    [
        (1, 3, 1, {}),
        (2, 3, 2, {}),
        (1, 3, 1, {"own": True, "batch_size": 6}),  # the whole epoch, of whole batches
        (1, 3, 1, {"own": True, "batch_size": 6, "num_workers": 1}),
        (1, 2, 1, {"own": True, "num_workers": 1}),  # of five, and the worker asks for two more
        (1, 2, 1, {"own": True, "batch_size": 6, "num_workers": 1}),  # and here for the end
    ],
)
def test_interrupted_just_between_two_epochs_it_ends_the_same(tmp_path, epochs, limit, accumulated, loader):
    """``limit`` batches make an epoch. A generator of the loader's own draws when a sampler ends, too."""

    def limited():
        return Net(), [], {"limit_train_batches": limit, "accumulate_grad_batches": accumulated}

    whole = fit(limited, tmp_path, **loader)
    with pytest.raises(Interrupted):
        fit(limited, tmp_path, tmp_path / "run", after=epochs * limit, **loader)
    assert fit(limited, tmp_path, tmp_path / "run", **loader) == whole
