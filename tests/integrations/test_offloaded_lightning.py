"""A script of Lightning with ``OffloadedStrategy`` trains out of core as it trains in memory."""

from __future__ import annotations

import pytest
import torch

L = pytest.importorskip("lightning")
transformers = pytest.importorskip("transformers")

from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import holdfast  # noqa: E402
from holdfast.errors import BadInput, ModelNotSupported  # noqa: E402
from holdfast.integrations.lightning import HoldfastCallback, OffloadedStrategy  # noqa: E402
from integrations_interrupt import Interrupted, close_engines  # noqa: E402
from offloaded_script import Texts, model  # noqa: E402
from survive_run import digest  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use_cache was switched off"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


@pytest.fixture(autouse=True)
def engines_are_closed():
    torch.manual_seed(7)
    yield
    close_engines()


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def training_step(self, batch, number):
        loss = self.net(**batch).loss
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=2, sync_dist=True)
        return {"loss": loss, "number": number}

    def validation_step(self, batch, number):
        self.log("validation", self.net(**batch).loss, batch_size=2, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Notes(L.Callback):
    """Notes what each batch was logged with, and raises after step ``stop``."""

    def __init__(self, stop: int | None = None) -> None:
        self.told, self.stop = Told(), stop

    def on_train_batch_end(self, trainer, module, outputs, batch, number):
        assert outputs["number"] == number
        self.told.append(
            (float(outputs["loss"]), float(trainer.callback_metrics["loss_step"]), trainer.global_step)
        )
        if trainer.global_step == self.stop:
            raise Interrupted


class Told(list):
    """A list that no callback keeps."""


def fit(
    root,
    *callbacks,
    module=None,
    shuffle=True,
    noise=False,
    samples=22,
    batch_size=2,
    strategy=None,
    **options,
):
    usual = {
        "accelerator": "cpu", "devices": 1, "max_epochs": 2, "accumulate_grad_batches": 3, "gradient_clip_val": 0.5,
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "num_sanity_val_steps": 1, "log_every_n_steps": 1, "default_root_dir": root,
    }  # fmt: skip
    notes = next((each for each in callbacks if isinstance(each, Notes)), Notes())
    others = [each for each in callbacks if each is not notes]
    trainer = L.Trainer(callbacks=[notes, *others], strategy=strategy or "auto", **(usual | options))
    module = module or Module()
    trainer.fit(
        module,
        DataLoader(Texts(samples, noise=noise), batch_size=batch_size, shuffle=shuffle),
        DataLoader(Texts(7, 100), batch_size=2),
    )
    return trainer, module, notes.told


def out_of_core(root, *callbacks, **options):
    return fit(root, *callbacks, strategy=OffloadedStrategy(root / "run"), **options)


def ended(trainer, module):
    return {
        "weights": digest(dict(module.state_dict())),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "schedule": digest(trainer.lr_scheduler_configs[0].scheduler.state_dict()),
        "random": digest(torch.get_rng_state()),
        "steps": trainer.global_step,
    }


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"gradient_clip_val": None, "limit_train_batches": 7}, marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_the_numbers_are_those_of_the_unmodified_script(tmp_path, options):
    plain, theirs, expected = fit(tmp_path, **options)
    torch.manual_seed(7)
    trainer, module, told = out_of_core(tmp_path, **options)
    assert len(told) == len(expected) > 0
    for mine, other in zip(told, expected, strict=True):
        assert mine == pytest.approx(other, rel=1e-5)
    found, wanted = ({k: float(v) for k, v in each.callback_metrics.items()} for each in (trainer, plain))
    assert found == pytest.approx(wanted, rel=1e-5)
    for one, other in zip(module.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


class SetsRates(Module):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_before_optimizer_step(self, optimizer):
        optimizer.param_groups[0]["lr"] = 0.02 / (1 + self.trainer.global_step)


def test_a_rate_set_by_a_hook_is_that_of_the_step(tmp_path):
    options = {"max_epochs": 1, "shuffle": False}
    *_, expected = fit(tmp_path, module=SetsRates(), **options)
    *_, told = out_of_core(tmp_path, module=SetsRates(), **options)
    assert [loss for loss, *_ in told] == pytest.approx([loss for loss, *_ in expected], rel=1e-5)


@pytest.mark.slow
def test_a_step_has_the_bits_of_the_engines_own_loop(tmp_path):
    _, module, _ = out_of_core(tmp_path, samples=18, shuffle=False)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    batches = [*DataLoader(Texts(18), batch_size=2)] * 2
    with holdfast.offload(
        net, optimizer, tmp_path / "loop", scheduler=schedule, precision="fp32", clipping=0.5
    ) as engine:
        for first in range(0, len(batches), 3):
            engine.step(batches[first : first + 3])
    assert digest(dict(module.net.state_dict())) == digest(dict(net.state_dict()))


@pytest.mark.slow
def test_interrupted_again_and_again_it_ends_the_same(tmp_path):
    options = {"noise": True, "val_check_interval": 3}
    trainer, module, whole = out_of_core(tmp_path / "whole", **options)
    end = ended(trainer, module)
    for before, step in ((None, 3), (3, 4), (4, 6), (6, 8)):
        torch.manual_seed(4 + step)  # which is of no importance where the run goes on
        notes = Notes(step)
        with pytest.raises(Interrupted):
            out_of_core(tmp_path, notes, **options)
        if before is not None:
            assert notes.told[0][2] in (before - 2, before - 1)  # the step of the interrupt was not complete
    trainer, module, rest = out_of_core(tmp_path, **options)
    assert ended(trainer, module) == end
    assert rest == whole[len(whole) - len(rest) :]
    assert rest[0][2] in (6, 7)


@pytest.mark.slow
def test_checkpoints_have_the_weights_of_the_engine(tmp_path):
    keeper = ModelCheckpoint(tmp_path / "kept", save_top_k=-1, every_n_train_steps=2)
    trainer, module, _ = out_of_core(tmp_path, keeper, enable_checkpointing=True, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "later.ckpt")
    for path in max((tmp_path / "kept").iterdir()), tmp_path / "later.ckpt":
        last = torch.load(path, weights_only=False)
        assert last["global_step"] == 4
        assert digest(sorted(last["state_dict"].items())) == digest(sorted(module.state_dict().items()))
        assert "optimizer_states" not in last and last["lr_schedulers"]  # Lightning refuses to resume from it


class Stops(Module):
    def on_train_batch_end(self, outputs, batch, number):
        self.trainer.should_stop = number == 4


def test_training_that_is_stopped_within_a_step_ends_after_it(tmp_path):
    trainer, module, told = out_of_core(tmp_path, module=Stops())
    assert (trainer.global_step, len(told)) == (2, 6)
    assert not any(parameter.is_meta for parameter in module.parameters())


class LeavesOut(Module):
    def on_train_batch_start(self, batch, number):
        return -1 if number == 4 else None


@pytest.mark.parametrize("epochs, text", [(1, "ended in the middle"), (2, "batch 4 of the epoch")])
def test_batches_left_out_within_a_step_are_refused(tmp_path, epochs, text):
    with pytest.raises(BadInput, match=text):
        out_of_core(tmp_path, module=LeavesOut(), max_epochs=epochs, limit_val_batches=0)


class ByHand(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(Module):
    def backward(self, loss):
        loss.backward()


class Skips(Module):
    def training_step(self, batch, number):
        super().training_step(batch, number)


class ReadsGradients(Module):
    def on_before_optimizer_step(self, optimizer):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)


@pytest.mark.parametrize(
    "kind, options, error, text",
    [
        (ByHand, {"gradient_clip_val": None, "accumulate_grad_batches": 1}, BadInput, "manual optimization"),
        (OwnBackward, {}, BadInput, "a backward of its own"),
        (Module, {"precision": "64-true"}, BadInput, "precision="),
        (Module, {"gradient_clip_algorithm": "value"}, BadInput, "not values"),
        (Skips, {}, BadInput, "returned None"),
        (ReadsGradients, {}, ModelNotSupported, "gradient_clip_val"),
        (Module, {"val_check_interval": 2}, BadInput, "in the middle of an optimizer step"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, kind, options, error, text):
    with pytest.raises(error, match=text):
        out_of_core(tmp_path, module=kind(), **options)
    run = tmp_path / "run" / "commits"
    assert not run.exists() or len([*run.iterdir()]) == 1


class KeepsGradients(Module):
    """Zeroes them every second time, so that two steps add up."""

    def optimizer_zero_grad(self, epoch, number, optimizer):
        if number % 2 == 0:
            optimizer.zero_grad()


class DropsGradients(Module):
    def on_before_optimizer_step(self, optimizer):
        optimizer.zero_grad()


class ClipsOtherwise(Module):
    def on_train_batch_start(self, batch, number):
        self.trainer.gradient_clip_val = 0.1


@pytest.mark.parametrize(
    "kind, text",
    [(DropsGradients, "which drops some of the step"), (ClipsOtherwise, "was 0.5 when the run was opened")],
)
def test_a_step_that_memory_does_otherwise_is_refused(tmp_path, kind, text):
    with pytest.raises(BadInput, match=text):
        out_of_core(tmp_path, module=kind())


def test_gradients_that_memory_adds_up_are_refused(tmp_path):
    notes = Notes()
    with pytest.raises(BadInput, match="gradients were not zeroed since the step before"):
        out_of_core(tmp_path, notes, module=KeepsGradients())
    assert [step for *_, step in notes.told] == [0, 0, 1]


def test_the_callback_for_training_in_memory_is_refused(tmp_path):
    with pytest.raises(BadInput, match="HoldfastCallback does not work"):
        out_of_core(tmp_path, HoldfastCallback(tmp_path / "other"))
    with pytest.raises(BadInput, match="BackboneFinetuning does not work"):
        out_of_core(tmp_path, BackboneFinetuning())
    with pytest.raises(BadInput, match="clipping follows from the trainer"):
        OffloadedStrategy(tmp_path, clipping=1.0)
