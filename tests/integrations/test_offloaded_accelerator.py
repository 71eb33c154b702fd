"""A script with an ``Accelerator`` of ``offloaded`` trains out of core as it trains in memory."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from accelerate.utils import GradientAccumulationPlugin  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import holdfast  # noqa: E402
from holdfast.errors import BadInput, EngineFailed, ModelNotSupported  # noqa: E402
from holdfast.integrations.accelerate import offloaded  # noqa: E402
from holdfast.offload import exit_hook, rng  # noqa: E402
from holdfast.offload.model.microbatches import Coroutine  # noqa: E402
from integrations_interrupt import Interrupted, close_engines  # noqa: E402
from offloaded_loop_script import NORM, everything, of_logits, train  # noqa: E402
from offloaded_script import Texts, model  # noqa: E402
from support.warm_python import environment_of, run_python  # noqa: E402
from survive_run import digest  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*use_cache was switched off")


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(7)
    yield
    close_engines()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def out_of_core(root: Path, **options):
    return offloaded(Accelerator, root / "run", **{"clipping": NORM, **options})


ONE_GROUP_OVER_PASSES = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
KINDS = {
    "evaluated": {"evaluates": True, "noise": True},
    "own loss": {"loss_of": of_logits, "by_pass": True},
    "workers": {"workers": 2},
}
INTERRUPTS = {"evaluated": (2, 4, 5, 8), "own loss": (5, 6), "workers": (6,)}
"""The steps after which each kind is interrupted, one after the other."""


def test_the_numbers_are_those_of_the_unmodified_script(tmp_path):
    plain = train(Accelerator, **KINDS["evaluated"])
    torch.manual_seed(7)
    mine = train(out_of_core(tmp_path), **KINDS["evaluated"])
    for name in ("losses", "norms", "rates", "evaluated"):
        assert getattr(mine, name) == pytest.approx(getattr(plain, name), rel=1e-5), name
    assert len(mine.losses) == 22 and len(mine.norms) == 8
    for name, value in plain.weights.items():
        torch.testing.assert_close(mine.weights[name], value, rtol=1e-5, atol=1e-6)
    assert digest(mine.rest[0]) == digest(mine.weights)  # the model has its values back


@pytest.mark.slow
def test_an_unclipped_loss_of_the_scripts_own(tmp_path):
    """A loss of the logits, with a draw that is another in the engine, where it is the same in each run."""

    def script(kind):
        torch.manual_seed(7)
        return train(kind, loss_of=of_logits, clips=False).losses

    mine = script(out_of_core(tmp_path, clipping=None))
    assert mine == script(out_of_core(tmp_path / "again", clipping=None))
    assert mine[:11] == pytest.approx(script(Accelerator)[:11], rel=2e-2)  # later passes have another order


def test_a_step_has_the_bits_of_the_engines_own_loop(tmp_path):
    mine = train(out_of_core(tmp_path), samples=18, shuffle=False)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    batches = [*DataLoader(Texts(18), batch_size=2)] * 2
    losses, norms = [], []
    with holdfast.offload(
        net, optimizer, tmp_path / "loop", scheduler=schedule, precision="fp32", clipping=NORM
    ) as engine:
        for first in range(0, len(batches), 3):
            losses.append(engine.step(batches[first : first + 3]))
            norms.append(engine.last["grad_norm"])
    assert digest(mine.weights) == digest(net.state_dict())
    assert mine.norms == pytest.approx(norms, rel=1e-7)
    assert [sum(mine.losses[i : i + 3]) / 3 for i in range(0, 18, 3)] == pytest.approx(losses, rel=1e-6)


def losses_at_rates(kind, *, clips: bool, after_clipping: bool = False):
    """The losses of a loop that sets the rate of each step when its gradients are there."""
    accelerator = kind(cpu=True, gradient_accumulation_steps=2)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(Texts(12), batch_size=2))
    losses, rate = [], 0.08
    for batch in loader:
        with accelerator.accumulate(net):
            loss = net(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                if clips and after_clipping:
                    accelerator.clip_grad_norm_(net.parameters(), NORM)
                rate = optimizer.param_groups[0]["lr"] = rate / 4
                if clips and not after_clipping:
                    accelerator.clip_grad_norm_(net.parameters(), NORM)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.end_training()
    return losses


@pytest.mark.parametrize("clips", [False, True])
def test_a_rate_set_after_backward_is_that_of_the_step(tmp_path, clips):
    mine = losses_at_rates(out_of_core(tmp_path, clipping=NORM if clips else None), clips=clips)
    assert mine == pytest.approx(losses_at_rates(Accelerator, clips=clips), rel=1e-5)


def test_a_rate_set_after_clipping_is_refused(tmp_path):
    with pytest.raises(BadInput, match="between clip_grad_norm_ and"):
        losses_at_rates(out_of_core(tmp_path), clips=True, after_clipping=True)
    assert len([*(tmp_path / "run" / "commits").iterdir()]) == 1


@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=[pytest.mark.slow] * (each != "evaluated")) for each in INTERRUPTS]
)
@pytest.mark.slow
def test_interrupted_again_and_again_it_ends_the_same(tmp_path, kind):
    whole = train(out_of_core(tmp_path / "whole"), **KINDS[kind])
    for number, step in enumerate(INTERRUPTS[kind]):

        def stop(done, accelerator, step=step):
            if done == step:
                while accelerator.engine.durable_step < step - 1:
                    time.sleep(0.01)
                accelerator.engine.give_up()  # as a kill does: the state after the step was not taken
                raise Interrupted

        torch.manual_seed(7 + number)  # which is of no importance where the run goes on
        with pytest.raises(Interrupted):
            train(out_of_core(tmp_path), **KINDS[kind], after_step=stop)
    torch.manual_seed(3)
    rest = train(out_of_core(tmp_path), **KINDS[kind])
    assert everything(rest) == everything(whole)
    assert rest.losses == whole.losses[len(whole.losses) - len(rest.losses) :]
    assert len(rest.norms) == 8 - (step - 1)


@pytest.mark.slow
def test_a_loop_that_an_error_leaves_goes_on_amid_its_pass(tmp_path):
    """Its script ends the training all the same, as in ``finally``."""
    begun = []

    def stop(done, accelerator):
        begun[:] = [accelerator]
        if done == 2:
            raise Interrupted

    whole = train(out_of_core(tmp_path / "whole"))
    torch.manual_seed(7)
    with pytest.raises(Interrupted):
        train(out_of_core(tmp_path), after_step=stop)
    begun[0].end_training()
    rest = train(out_of_core(tmp_path))
    assert len(rest.losses) == 22 - 6
    assert everything(rest) == everything(whole)


FAILS = """
import sys
from accelerate import Accelerator
from torch.optim.lr_scheduler import CosineAnnealingLR
from holdfast.integrations.accelerate import offloaded
from offloaded_loop_script import NORM, train

move = CosineAnnealingLR.step

def fails(self, *args):
    if self.last_epoch == 1:
        raise ValueError("amid the loop's code")
    return move(self, *args)

CosineAnnealingLR.step = fails
train(offloaded(Accelerator, sys.argv[1], clipping=NORM))
"""


@pytest.mark.slow
def test_an_error_before_the_schedule_moves_leaves_the_step_out(tmp_path):
    """The commit would have a schedule that is a move behind."""
    script = tmp_path / "script.py"
    script.write_text(FAILS)
    environment, modules = environment_of(), ["offloaded_loop_script"]
    done = run_python(script, tmp_path / "run", env=environment, modules=modules, timeout=60)
    assert "amid the loop's code" in done.stderr
    assert max((tmp_path / "run" / "commits").iterdir()).name.startswith("step-000000000001")


@pytest.mark.parametrize("where", ["as the step ends", "in accumulate", "in the loop", "and it is closed"])
def test_an_exit_before_the_schedule_moves_leaves_the_step_out(tmp_path, monkeypatch, caplog, where):
    """``sys.exit``, which leaves no trace of the place that it was called at."""
    accelerator, net, optimizer, loader = prepared(tmp_path)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    if where == "as the step ends":
        resume = Coroutine.resume

        def exits(self, reply):
            event = resume(self, reply)
            return sys.exit() if self.finished and accelerator.engine.steps_done == 2 else event

        monkeypatch.setattr(Coroutine, "resume", exits)
    monkeypatch.delattr(sys, "last_value", raising=False)
    caplog.set_level("INFO", "holdfast")
    with pytest.raises(SystemExit):
        for batch in loader:
            with nullcontext() if where == "in the loop" else accelerator.accumulate(net):
                accelerator.backward(net.train()(**batch).loss)
                optimizer.step()
                if accelerator.steps_done == 2:
                    sys.exit()
                schedule.step()
                optimizer.zero_grad()
    if where == "and it is closed":
        accelerator.end_training()
    accelerator._loop._leave()
    assert ("step 2 is left out" in caplog.text) == (where == "in the loop")
    exit_hook._finish()
    accelerator, _, optimizer, _ = prepared(tmp_path)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    assert (accelerator.steps_done, schedule.get_last_lr()) == (1, [0.005])


def test_a_schedule_of_epochs_leaves_no_step_out(tmp_path):
    """A script that just ends, a step after the schedule's only move."""
    accelerator, net, optimizer, loader = prepared(tmp_path)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    for epoch in range(2):
        for batch in loader:
            with accelerator.accumulate(net):
                accelerator.backward(net.train()(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.steps_done == (2, 3)[epoch]:
                break
        if not epoch:
            schedule.step()
    accelerator._loop._leave()
    exit_hook._finish()
    accelerator, _, optimizer, _ = prepared(tmp_path)
    accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    assert accelerator.steps_done == 3


def left_amid_a_step(root):
    """The accelerator of a loop that an error outside of ``accumulate`` has left, with a step under way."""
    accelerator, net, _, loader = prepared(root, gradient_accumulation_steps=2)
    with suppress(Interrupted):
        for batch in loader:
            net.train()(**batch)
            raise Interrupted
    return accelerator


def one_step(run):
    net = model()
    with holdfast.offload(net, torch.optim.AdamW(net.parameters()), run, precision="fp32") as engine:
        engine.step([next(iter(DataLoader(Texts(), batch_size=2)))])


@pytest.mark.parametrize("where", ["this thread", "one that has ended", "one that goes on"])
def test_an_error_amid_a_step_does_not_stop_another_engine(tmp_path, monkeypatch, where):
    """The step has the turn to use the random generators, and waits for its loop."""
    monkeypatch.setattr(rng, "PATIENCE_SECONDS", 0.1)
    failed, is_over = [], threading.Event()

    def loop():
        failed.append(left_amid_a_step(tmp_path))
        failed.append(where)
        if where == "one that goes on":
            is_over.wait()

    thread = threading.Thread(target=loop)
    if where == "this thread":
        loop()
    else:
        thread.start()
    while len(failed) < 2:
        time.sleep(0.01)
    with (
        pytest.raises(EngineFailed, match="has not gone on") if where == "one that goes on" else nullcontext()
    ):
        one_step(tmp_path / "other")
    assert (failed[0].engine is None) == (where == "one that has ended")
    is_over.set()
    failed[0].end_training()


def test_a_loop_that_an_error_left_amid_a_step_is_run_again(tmp_path):
    """In the same process, as a cell of a notebook is."""
    before = threading.active_count()
    left_amid_a_step(tmp_path)
    accelerator, net, optimizer, loader = prepared(tmp_path)
    for batch in loader:
        accelerator.backward(net.train()(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    assert threading.active_count() == before


def test_a_loop_may_ask_another_engine_amid_a_step(tmp_path):
    """A teacher, say, whose use changes no number that the loop draws."""

    def losses(of_teacher):
        torch.manual_seed(7)
        told = train(out_of_core(tmp_path / str(len(found))), passes=1, samples=6, loss_of=of_teacher)
        AcceleratorState._reset_state(reset_partial_state=True)
        found.append(told.losses)

    def alone(net, batch):
        return net(**batch).loss * (1 + torch.rand(()))

    def asked(net, batch):
        loss = net(**batch).loss
        asked_for.append(engine.evaluate([batch]))
        return loss * (1 + torch.rand(()))

    found, asked_for, teacher = [], [], model()
    losses(alone)
    with holdfast.offload(
        teacher, torch.optim.AdamW(teacher.parameters()), tmp_path / "teacher", precision="fp32"
    ) as engine:
        losses(asked)
    assert found[0] == found[1] and len(asked_for) == 3


@pytest.mark.slow
def test_an_interrupt_gives_up_the_step(tmp_path):
    """Ctrl-C while the engine computes on a thread of its own."""
    accelerators, pressed = [], []
    original = transformers.LlamaForCausalLM.forward

    def forward(self, *args, **kwargs):
        if accelerators and accelerators[0].engine.steps_done == 3:
            pressed.append(1)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)  # the other thread hears of it
        return original(self, *args, **kwargs)

    before = threading.active_count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.LlamaForCausalLM, "forward", forward)
        with pytest.raises(KeyboardInterrupt):
            train(out_of_core(tmp_path), after_step=lambda step, each: accelerators.append(each))
    assert threading.active_count() == before
    assert len(pressed) == 1  # no other micro-batch began
    torch.manual_seed(7)
    whole = train(out_of_core(tmp_path / "whole"))
    assert everything(train(out_of_core(tmp_path))) == everything(whole)


@pytest.mark.slow
def test_bf16_is_that_of_the_accelerator(tmp_path):
    dtypes = set()

    def loss_of(net, batch):
        output = net(**batch)
        dtypes.add(output.logits.dtype)
        return output.loss

    mine = train(out_of_core(tmp_path), loss_of=loss_of, precision="bf16", passes=1)
    assert dtypes == {torch.float32}
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(7)
    exact = train(out_of_core(tmp_path / "fp32"), passes=1)
    assert mine.losses != exact.losses
    assert mine.losses == pytest.approx(exact.losses, rel=5e-2)


def test_weights_are_saved_while_the_engine_has_them(tmp_path):
    def save(step, accelerator):
        if step == 3:
            net = accelerator.unwrap_model(accelerator._models[0])
            net.save_pretrained(tmp_path / "pretrained", save_function=accelerator.save)
            accelerator.save_model(net, tmp_path / "model")
            with pytest.warns(UserWarning, match="save_state writes no folder"):
                accelerator.save_state(str(tmp_path / "state"))
            saved.append((digest(accelerator.engine.state_dict()), accelerator.engine.durable_step))

    saved = []
    train(out_of_core(tmp_path), after_step=save, passes=1)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "pretrained", dtype=torch.float32)
    assert saved == [(digest(dict(loaded.state_dict())), 3)]
    assert (tmp_path / "model" / "model.safetensors").exists() and not (tmp_path / "state").exists()
    assert loaded.config.architectures == ["LlamaForCausalLM"]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_an_evaluation_with_adapters_and_without(tmp_path):
    """The engine computes several batches in a pass: each result is of the adapters as they are at the call."""
    peft = pytest.importorskip("peft")

    def compared(kind):
        accelerator = kind(cpu=True)
        torch.manual_seed(1)
        options = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
        net = peft.get_peft_model(model(), peft.LoraConfig(**options))
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
        loaders = DataLoader(Texts(4), batch_size=2), DataLoader(Texts(7, 100), batch_size=2)
        net, optimizer, _, others = accelerator.prepare(net, optimizer, *loaders)
        found = [getattr(accelerator, "steps_done", 0)]  # opens the run, with adapters
        net.eval()
        with torch.no_grad():
            for batch in others:
                with net.disable_adapter():
                    found.append(float(net(**batch).loss))
                found.append(float(net(**batch).loss))
        accelerator.end_training()
        return found

    assert compared(out_of_core(tmp_path)) == pytest.approx(compared(Accelerator), rel=1e-5)


def test_a_schedule_that_moves_after_the_last_save_is_in_the_run(tmp_path):
    def opened():
        accelerator, net, optimizer, loader = prepared(tmp_path)
        schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        return accelerator, net, optimizer, loader, schedule

    accelerator, net, optimizer, loader, schedule = opened()
    batch = next(iter(loader))
    accelerator.backward(net.train()(**batch).loss)
    optimizer.step()
    with pytest.warns(UserWarning, match="save_state writes no folder"):
        accelerator.save_state()
    schedule.step()
    accelerator.end_training()
    accelerator, *_, schedule = opened()
    assert (accelerator.steps_done, schedule.get_last_lr()) == (1, [0.005])


# Refusals


def twice(net, batch):
    return net(**batch).loss + net(**batch).loss


def made_in_the_loop(net, batch):
    return net(input_ids=batch["input_ids"] + 0, labels=batch["labels"]).loss


def changed_in_the_loop(net, batch):
    batch["labels"][:, :2] = -100
    return net(**batch).loss


class Alternating:
    calls = 0

    def __call__(self, net, batch):
        self.calls += 1
        return net(**batch, output_attentions=self.calls % 2 == 0).loss


def detached(net, batch):
    return net(**batch).loss.detach()


def with_a_weight(net, batch):
    return net(**batch).loss + net.lm_head.weight.square().sum()


def without_gradients(net, batch):
    with torch.no_grad():
        return net(**batch).loss


def reads_a_gradient(net, batch):
    loss = net(**batch).loss
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    return loss


def changes_the_model(net, batch):
    net.model.layers[1].self_attn.scaling *= 2
    return net(**batch).loss


def asks_for_weights(net, batch):
    loss = net(**batch).loss
    net.state_dict()
    return loss


@pytest.mark.parametrize(
    "loss_of, error, text",
    [
        (twice, BadInput, "was called again before accelerator.backward"),
        (made_in_the_loop, BadInput, "not in the loader's batch"),
        (changed_in_the_loop, BadInput, "changed a batch in place"),
        (Alternating(), BadInput, "other arguments than the first"),
        (detached, BadInput, "no scalar that depends on the model's output"),
        (with_a_weight, BadInput, r"depends on a parameter of shape \[50, 16\]"),
        (without_gradients, BadInput, "call model.eval"),
        (reads_a_gradient, ModelNotSupported, "clip by accelerator.clip_grad_norm_"),
        (changes_the_model, BadInput, r"changed model.layers.1.self_attn.scaling of the model"),
        (asks_for_weights, BadInput, "in the middle of an optimizer step"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_a_loss_that_cannot_be_computed_is_refused(tmp_path, loss_of, error, text):
    before = threading.active_count()
    with pytest.raises(error, match=text):
        train(out_of_core(tmp_path), loss_of=loss_of)
    close_engines()
    assert threading.active_count() == before
    assert len([*(tmp_path / "run" / "commits").iterdir()]) == 1  # that of before the first step


@pytest.mark.parametrize(
    "options, given, text",
    [
        ({"clipping": 1.0}, {}, "give offloaded"),
        ({"clipping": None}, {}, "give offloaded"),
        ({}, {"clips": False}, "has not called accelerator.clip_grad_norm_"),
    ],
)
def test_clipping_that_differs_is_refused_before_the_first_step(tmp_path, options, given, text):
    with pytest.raises(BadInput, match=text):
        train(out_of_core(tmp_path, **options), **given)
    assert (tmp_path / "run" / "commits").is_dir() and len([*(tmp_path / "run" / "commits").iterdir()]) == 1


def test_clipping_of_what_is_not_trained_is_refused(tmp_path):
    """In memory its gradient is part of the norm."""
    accelerator, net = out_of_core(tmp_path)(cpu=True), model()
    optimizer = torch.optim.AdamW([*net.parameters()][1:], lr=0.01)
    net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(Texts(), batch_size=2))
    accelerator.backward(net(**next(iter(loader))).loss)
    with pytest.raises(BadInput, match="requires a gradient and is not in the optimizer"):
        accelerator.clip_grad_norm_(net.parameters(), NORM)


def prepared(root, **options):
    accelerator = out_of_core(root, clipping=None)(cpu=True, **options)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    loader = DataLoader(Texts(), batch_size=2)
    return accelerator, *accelerator.prepare(net, optimizer, loader)


def test_what_is_prepared_when_the_run_is_open_is_refused(tmp_path):
    """Its state would not be in the run, and after a resume it would begin anew."""
    accelerator, _, optimizer, _ = prepared(tmp_path)
    assert accelerator.steps_done == 0
    with pytest.raises(BadInput, match="a schedule was prepared when the run was open"):
        accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    with pytest.raises(BadInput, match="registered for checkpointing when"):
        accelerator.register_for_checkpointing(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_schedule_that_is_not_prepared_is_told_of(tmp_path, is_prepared):
    """It was made of the optimizer that ``prepare`` returned."""
    accelerator, net, optimizer, loader = prepared(tmp_path)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    if is_prepared:
        schedule = accelerator.prepare(schedule)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batch = next(iter(loader))
        accelerator.backward(net.train()(**batch).loss)
        optimizer.step()
    accelerator.end_training()
    told = [str(each.message) for each in caught if "StepLR moves learning rates" in str(each.message)]
    assert bool(told) != is_prepared and all("accelerator.prepare" in each for each in told)


def test_accumulation_by_hand_is_refused(tmp_path):
    accelerator, net, _, loader = prepared(tmp_path)
    net.train()
    with pytest.raises(BadInput, match="before it had stepped the optimizer"):
        for batch in loader:
            accelerator.backward(net(**batch).loss)
    with pytest.raises(EngineFailed, match="a step was given up"):
        net(**batch)


@pytest.mark.parametrize(
    "place, text",
    [
        ("never", "not zeroed since the step before"),
        ("by hand", r"call optimizer.zero_grad\(\) after .*grad = None is not seen"),
        ("first", "drops some of the step"),
        ("last", "drops some of the step"),
    ],
)
def test_gradients_that_memory_adds_up_or_drops_are_refused(tmp_path, place, text):
    """Where ``zero_grad`` is not called between two steps, or is called in the middle of one."""

    def opened():
        accelerator = out_of_core(tmp_path)(cpu=True, gradient_accumulation_steps=2)
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        loader = DataLoader(Texts(12), batch_size=2)
        return accelerator, *accelerator.prepare(net, optimizer, loader)

    accelerator, net, optimizer, loader = opened()
    with pytest.raises(BadInput, match=text):
        for batch in loader:
            with accelerator.accumulate(net):
                if place == "first":
                    optimizer.zero_grad()  # at the last micro-batch, too
                accelerator.backward(net(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), NORM)
                if place == "last" and accelerator.sync_gradients:
                    net.zero_grad()
                optimizer.step()
                if place == "by hand" and accelerator.sync_gradients:
                    for parameter in net.parameters():
                        parameter.grad = None
    close_engines()
    assert opened()[0].steps_done == (place in ("never", "by hand"))


def test_a_backward_of_torch_is_refused(tmp_path):
    _, net, optimizer, loader = prepared(tmp_path)
    net.train()
    with pytest.raises(BadInput, match="was called before"):
        for batch in loader:
            net(**batch).loss.backward()
            optimizer.step()


@pytest.mark.parametrize(
    "options, text",
    [
        ({"mixed_precision": "fp16"}, "mixed_precision"),
        ({"gradient_accumulation_plugin": ONE_GROUP_OVER_PASSES}, "sync_with_dataloader"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, options, text):
    with pytest.raises(BadInput, match=text):
        out_of_core(tmp_path)(cpu=True, **options)
    assert not (tmp_path / "run").exists()


def test_what_the_run_cannot_have_is_refused(tmp_path):
    with pytest.raises(BadInput, match="normalize"):
        offloaded(Accelerator, tmp_path, normalize="tokens")
    with pytest.raises(BadInput, match="subclasses"):
        offloaded(dict, tmp_path)
    accelerator, *_ = prepared(tmp_path)
    with pytest.raises(BadInput, match="goes on by itself"):
        accelerator.load_state("x")
    with pytest.raises(BadInput, match="two models"):
        accelerator.prepare(model())
    assert not (tmp_path / "run").exists()
