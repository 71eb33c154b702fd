"""Each micro-batch's forward runs on a thread of its own as if it ran on the caller's, and never outlives the step."""

from __future__ import annotations

import contextvars
import gc
import os
import signal
import threading
import time
from collections import UserDict

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import holdfast
from holdfast.errors import BadInput, EngineFailed, ModelNotSupported
from holdfast.offload.model.absent_parameters import AbsentParameter
from holdfast.offload.model.microbatches import (
    BlockCall,
    Coroutine,
    ForwardEnd,
    autocast_state,
    extract_loss,
    module_call,
)
from holdfast.store.run_store import LocalStore
from support.grouped import grouped
from training import adamw, batches, decoder, differing, stored

TAG = contextvars.ContextVar("tag", default="unset")


def run_on_a_thread(function):
    """What ``function`` returns on a coroutine's thread."""
    coroutine = Coroutine(function)
    event = coroutine.start()
    coroutine.cancel()
    assert isinstance(event, ForwardEnd)
    return event.value


# What a thread takes with it


def settings():
    return {
        "thread": threading.current_thread() is not threading.main_thread(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "autocast of cuda": torch.is_autocast_enabled("cuda"),
        "cache": torch.is_autocast_cache_enabled(),
        "device": torch.empty(1).device.type,
        "threads": torch.get_num_threads(),
        "tag": TAG.get(),
    }


@pytest.mark.parametrize(
    "enter",
    [
        torch.enable_grad,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
        lambda: torch.autocast("cpu", enabled=False),
        lambda: torch.device("meta"),
    ],
    ids=["grad", "no grad", "inference", "bf16", "fp16 uncached", "no autocast", "meta"],
)
def test_a_thread_has_the_callers_settings(enter):
    def check():
        TAG.set("mine")
        with enter():
            assert run_on_a_thread(settings) == {**settings(), "thread": True, "tag": "mine"}

    contextvars.copy_context().run(check)


def test_what_a_thread_sets_stays_on_it():
    def change():
        TAG.set("its own")
        torch.set_grad_enabled(False)
        return TAG.get()

    assert run_on_a_thread(change) == "its own"
    assert TAG.get() == "unset"
    assert torch.is_grad_enabled()


def test_training_under_autocast_equals_a_plain_loop(tmp_path):
    model = decoder(blocks=3)
    optimizer = adamw(model, fused=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = []
        for batch in batches(0, 2):
            loss = model(**batch)
            (loss / 2).backward()
            losses.append(loss.item())
    optimizer.step()
    expected = {f"{name}/param": p.detach().clone() for name, p in model.named_parameters()}
    model = decoder(blocks=3)
    engine = holdfast.offload(model, adamw(model), tmp_path, precision="fp32")
    with engine, torch.autocast("cpu", dtype=torch.bfloat16):
        assert engine.step(batches(0, 2)) == sum(losses) / 2
    assert differing(stored(tmp_path), expected) == []


class CastsInside(nn.Module):
    """A decoder that autocasts its blocks, but the second one, whatever its caller does."""

    def __init__(self):
        super().__init__()
        self.inner = decoder(blocks=3)

    def forward(self, tokens, targets):
        inner = self.inner
        x = inner.embed(tokens)
        for index, block in enumerate(inner.blocks):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=index != 1):
                x = block(x, inner.cos[: x.shape[1]], inner.sin[: x.shape[1]])
        logits = inner.head(inner.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def test_autocast_that_the_model_sets_around_its_blocks_holds_in_them(tmp_path):
    model = CastsInside()
    optimizer = adamw(model, fused=True)
    losses = [model(**batch) for batch in batches(0, 2)]
    for loss in losses:
        (loss / 2).backward()
    optimizer.step()
    expected = {f"{name}/param": p.detach().clone() for name, p in model.named_parameters()}
    model.eval()
    with torch.no_grad():
        evaluated = sum(model(**batch).item() for batch in batches(1, 2)) / 2
    model = CastsInside()
    with holdfast.offload(model, adamw(model), tmp_path, precision="fp32") as engine:
        assert engine.step(batches(0, 2)) == sum(loss.item() for loss in losses) / 2
        assert engine.evaluate(batches(1, 2)) == evaluated
        assert not torch.is_autocast_enabled("cpu")
    assert differing(stored(tmp_path), expected) == []


def test_a_block_called_without_gradients_is_refused_by_name(tmp_path):
    model = decoder(blocks=3)
    forward = model.blocks[0].forward
    with holdfast.offload(model, adamw(model), tmp_path, precision="fp32") as engine:
        model.forward = torch.no_grad()(model.forward)
        assert engine.evaluate(batches(0, 1)) > 0
        with pytest.raises(ModelNotSupported, match=r"called block 0 \(blocks\.0\) under torch.no_grad\(\)"):
            engine.step(batches(0, 1))
    assert model.blocks[0].forward == forward


def test_a_block_that_is_called_again_by_a_checkpoint_is_refused_by_name(tmp_path):
    model = decoder(blocks=3)
    whole = model.forward
    model.forward = lambda **batch: checkpoint(lambda: whole(**batch), use_reentrant=False)
    with (
        pytest.raises(ModelNotSupported, match=r"blocks\.\d was called apart .*torch\.utils\.checkpoint"),
        holdfast.offload(model, adamw(model), tmp_path, precision="fp32") as engine,
    ):
        engine.step(batches(0, 1))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_is_refused_and_another_can_follow(tmp_path, mode):
    model = decoder(blocks=3)
    with holdfast.offload(model, adamw(model), tmp_path, precision="fp32") as engine:
        with mode(), pytest.raises(BadInput, match="a step needs gradients"):
            engine.step(batches(0, 1))
        engine.step(batches(0, 1))


def test_an_error_in_an_evaluation_loses_nothing(tmp_path):
    """The model is handed bad tokens; a hook of the last block fails; the training goes on as if nothing was."""
    states = []
    for disturbed in (False, True):
        model = decoder(blocks=4)
        options = {"dtype": "fp32", "commit_every": 0, "clip_norm": 0.5, "activations_on_host": 0.5}
        with holdfast.offload(model, adamw(model), tmp_path / str(disturbed), **grouped(**options)) as engine:
            for step in range(3):
                engine.step(batches(step, 2))
                if disturbed:
                    evaluate_badly(engine, model)
        states.append(stored(tmp_path / str(disturbed)))
    assert differing(*states) == []


def evaluate_badly(engine, model):
    bad = batches(0, 3)
    bad[1]["tokens"][:] = 10**6
    good = engine.evaluate(batches(0, 3))
    pool = engine._run.residency.pool
    engine.wait()
    held = pool.in_use_bytes
    with pytest.raises(IndexError):
        engine.evaluate(bad)
    handle = model.blocks[-1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.evaluate(batches(0, 3))
    handle.remove()
    assert pool.in_use_bytes == held
    assert engine.evaluate(batches(0, 3)) == good
    assert model.training


def test_an_evaluation_holds_no_outputs(tmp_path):
    """A model returns its logits along with the loss; those of earlier micro-batches are gone."""
    model, alive = decoder(blocks=2), []
    model.register_forward_hook(lambda module, args, output: Output(output, alive))
    with holdfast.offload(model, adamw(model), tmp_path, precision="fp32") as engine:
        engine.evaluate(batches(0, 8))
    assert len(alive) == 8 and max(alive) == 1


class Output:
    """Knows how many of it there are."""

    count = 0

    def __init__(self, loss, alive):
        self.loss = loss
        Output.count += 1
        alive.append(Output.count)

    def __del__(self):
        Output.count -= 1


def test_evaluation_in_inference_mode_gives_the_same(tmp_path):
    model = decoder(blocks=3)
    with holdfast.offload(model, adamw(model), tmp_path, precision="fp32") as engine:
        plain = engine.evaluate(batches(0, 3))
        with torch.inference_mode():
            assert engine.evaluate(batches(0, 3)) == plain
        engine.step(batches(0, 2))


# Handing over


def test_a_coroutine_stops_at_every_block_call_and_gets_its_reply():
    def forward():
        return coroutine.call_block(0, (1,), {}) + coroutine.call_block(1, (2,), {"three": 3})

    coroutine = Coroutine(forward)
    modes = autocast_state()
    assert coroutine.start() == BlockCall(0, (1,), {}, modes)
    with torch.autocast("cpu"):  # of this thread, which is not the coroutine's
        assert coroutine.resume(10) == BlockCall(1, (2,), {"three": 3}, modes)
    assert coroutine.resume(20) == ForwardEnd(30)
    assert coroutine.finished
    coroutine.cancel()


def test_an_error_of_the_thread_is_raised_where_it_was_resumed_with_its_traceback():
    def forward():
        coroutine.call_block(0, (), {})
        raise LookupError("deep in the model")

    coroutine = Coroutine(forward)
    coroutine.start()
    with pytest.raises(LookupError, match="deep in the model") as caught:
        coroutine.resume(None)
    assert "forward" in [entry.name for entry in caught.traceback]
    coroutine.cancel()


def test_cancelling_unwinds_the_thread_through_its_own_cleanups():
    cleaned = []

    def forward():
        try:
            coroutine.call_block(0, (), {})
        finally:
            cleaned.append(True)

    coroutine = Coroutine(forward)
    coroutine.start()
    coroutine.cancel()
    coroutine.cancel()
    assert cleaned == [True]


def test_a_thread_that_catches_everything_and_tries_again_is_cancelled_all_the_same():
    def forward():
        for _ in range(3):
            try:
                coroutine.call_block(0, (), {})
            except BaseException:
                continue

    coroutine = Coroutine(forward)
    coroutine.start()
    coroutine.cancel()


def test_a_coroutine_that_was_not_started_is_cancelled_at_no_cost():
    Coroutine(lambda: None).cancel()


# Losses


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(2.0),
        torch.tensor([2.0]),
        {"loss": torch.tensor(2.0), "logits": torch.zeros(3)},
        (torch.tensor(2.0), torch.zeros(3)),
        type("Output", (), {"loss": torch.tensor(2.0)})(),
    ],
    ids=["tensor", "one element", "dict", "tuple", "attribute"],
)
def test_a_loss_is_found_in_what_models_return(value):
    assert extract_loss(value).item() == 2.0


@pytest.mark.parametrize("value", [None, torch.zeros(3), {"logits": 1}, (), (1, 2), "loss", {"loss": None}])
def test_a_model_without_a_scalar_loss_is_told_what_to_pass(value):
    with pytest.raises(ModelNotSupported, match="without a scalar loss"):
        extract_loss(value)


def test_tuples_are_positional_inputs_and_a_target_for_the_loss_function():
    def model(a, b=0, c=0):
        return a + 10 * b + 100 * c

    assert module_call(model, {"a": 1, "c": 3}, None)() == 301
    assert module_call(model, (1, 2, 3), None)() == 321
    assert module_call(model, (1, 2, 7), lambda output, target: (output, target))() == (21, 7)


@pytest.mark.slow
def test_a_mapping_is_a_dict_of_keywords(tmp_path):
    losses = []
    for kind in (dict, UserDict):
        model = decoder(blocks=2)
        options = {"dtype": "fp32", "normalize": "tokens", "sample": kind(batches(0, 1)[0])}
        with holdfast.offload(model, adamw(model), tmp_path / kind.__name__, **grouped(**options)) as engine:
            losses.append(engine.step([kind(batch) for batch in batches(0, 2)]))
            losses.append(engine.evaluate(kind(batch) for batch in batches(0, 2)))
            assert engine.last["tokens"] == 2 * batches(0, 1)[0]["tokens"].numel()
    assert losses[:2] == losses[2:]


TOKENS = torch.zeros(1, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    "given, loss_fn, said",
    [
        ({"tokens": TOKENS}, None, r"the micro-batches are a dict, not a list of them.*step\(\[batch\]\)"),
        (UserDict(tokens=TOKENS), None, "the micro-batches are a UserDict, not a list"),
        (TOKENS, None, "the micro-batches are a Tensor, not a list"),
        ([TOKENS], None, r"micro-batch 0 is a Tensor; give a dict .* \(tokens,\) for a single tensor"),
        ((TOKENS, TOKENS), None, "micro-batch 0 is a Tensor"),
        ([{"tokens": TOKENS}], max, "micro-batch 0 is a dict, and loss_fn is for tuples"),
        ([(TOKENS, TOKENS), {"tokens": TOKENS}], max, "micro-batch 1 is a dict, and loss_fn is for tuples"),
    ],
)
def test_what_is_no_list_of_micro_batches_is_refused_and_a_step_can_follow(tmp_path, given, loss_fn, said):
    model = decoder(blocks=2)
    with holdfast.offload(model, adamw(model), tmp_path, precision="fp32") as engine:
        for call in (engine.step, engine.evaluate):
            with pytest.raises(BadInput, match=said):
                call(given, loss_fn)
        engine.step(batches(0, 1))


def test_tuples_with_a_loss_function_train_as_keywords_do(tmp_path):
    def cross_entropy(logits, targets):
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    losses = {}
    for kind in ("keywords", "tuples"):
        model = decoder(blocks=2)
        with holdfast.offload(model, adamw(model), tmp_path / kind, precision="fp32") as engine:
            if kind == "keywords":
                losses[kind] = [engine.step(batches(0, 2)), engine.evaluate(batches(1, 2))]
            else:
                data = [[(b["tokens"], b["targets"]) for b in batches(step, 2)] for step in range(2)]
                losses[kind] = [
                    engine.step(data[0], loss_fn=cross_entropy),
                    engine.evaluate(data[1], loss_fn=cross_entropy),
                ]
    assert losses["keywords"] == losses["tuples"]
    assert differing(stored(tmp_path / "tuples"), stored(tmp_path / "keywords")) == []


# Errors and interrupts leave nothing behind


class Trouble(Exception):
    pass


def raising(error):
    def hook(module, *args):
        if hook.armed and torch.is_grad_enabled() == hook.wanted_grad:
            hook.armed -= 1
            if not hook.armed:
                raise error

    hook.armed, hook.wanted_grad = 0, True
    return hook


PLACES = {
    "prologue": (lambda model: model.embed, True),
    "a block's forward": (lambda model: model.blocks[1].mlp, False),
    "a block's recomputation": (lambda model: model.blocks[1].mlp, True),
    "the last block": (lambda model: model.blocks[2].mlp, True),
    "epilogue": (lambda model: model.norm, True),
}


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
@pytest.mark.parametrize("error", [Trouble("in the model"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("place", PLACES)
def test_an_error_in_the_model_leaves_no_thread_and_no_patch_and_a_run_that_resumes(
    tmp_path, place, error, schedule
):
    model = decoder(blocks=3)
    forwards = [dict(block.__dict__) for block in model.blocks]
    module, wanted_grad = PLACES[place]
    hook = raising(error)
    hook.wanted_grad = wanted_grad
    handle = module(model).register_forward_pre_hook(hook)
    placement = holdfast.Placement(recomputed_fraction=1.0)
    engine = holdfast.offload(
        model, adamw(model), tmp_path, precision="fp32", schedule=schedule, placement=placement
    )
    threads = [t for t in threading.enumerate() if t.name.startswith("holdfast")]
    assert threads
    engine.step(batches(0, 3))
    hook.armed = 2  # for the second micro-batch
    with pytest.raises(type(error)) as caught:
        engine.step(batches(1, 3))
    assert caught.value is error
    assert not any(t.name.startswith("holdfast") for t in threading.enumerate())
    assert [block.__dict__.keys() for block in model.blocks] == [before.keys() for before in forwards]
    whole = engine.durable_step
    assert whole == 1 if isinstance(error, Exception) else whole in (0, 1)  # whoever presses a key leaves now
    with pytest.raises(EngineFailed, match=f"its run is whole up to step {whole}"):
        engine.step(batches(1, 3))
    engine.close()
    handle.remove()
    resumed = decoder(blocks=3)
    with holdfast.offload(resumed, adamw(resumed), tmp_path, precision="fp32", schedule=schedule) as engine:
        assert engine.steps_done == whole
        for step in range(whole, 2):
            engine.step(batches(step, 3))
    assert differing(stored(tmp_path), two_steps(tmp_path / "whole")) == []


def two_steps(directory):
    """The state of a run of two steps without trouble."""
    model = decoder(blocks=3)
    with holdfast.offload(model, adamw(model), directory, precision="fp32") as engine:
        for step in range(2):
            engine.step(batches(step, 3))
    return stored(directory)


@pytest.mark.slow
def test_an_error_in_the_model_does_not_lose_the_step_before_it(tmp_path):
    """Its state is still on the way to a slow disk."""
    model = decoder(blocks=3)
    engine = holdfast.offload(
        model, adamw(model), tmp_path, precision="fp32", io=holdfast.IO(write_limit=200_000)
    )
    engine.step(batches(0, 2))
    assert engine.durable_step == 0
    model.norm.register_forward_pre_hook(raising_once(Trouble()))
    with pytest.raises(Trouble):
        engine.step(batches(1, 2))
    assert engine.durable_step == 1
    reader = LocalStore.read(tmp_path)
    assert reader.head().step == 1
    assert reader.verify(reader.head()) == []


def raising_once(error):
    hook = raising(error)
    hook.armed = 1
    return hook


def test_an_error_in_the_loss_function_is_the_error_of_the_step(tmp_path):
    def broken(output, target):
        raise Trouble("in the loss")

    model = decoder(blocks=3)
    engine = holdfast.offload(model, adamw(model), tmp_path, precision="fp32")
    with pytest.raises(Trouble, match="in the loss"):
        engine.step([(b["tokens"], b["targets"]) for b in batches(0, 2)], loss_fn=broken)


def test_a_block_called_outside_of_the_engine_says_what_to_call(tmp_path):
    model = decoder(blocks=3)
    calls = []

    def call_from_another_thread(module, args):
        other = threading.Thread(target=lambda: calls.append(attempt(model)))
        other.start()
        other.join()

    def attempt(model):
        try:
            return model.blocks[0](torch.zeros(1, 1, 16), None, None)
        except ModelNotSupported as error:
            return error

    handle = model.embed.register_forward_pre_hook(call_from_another_thread)
    with holdfast.offload(model, adamw(model), tmp_path, precision="fp32") as engine:
        engine.step(batches(0, 1))
    handle.remove()
    assert "blocks.0 was called apart from the model's forward pass" in str(calls[0])


def press_a_key(after_seconds):
    time.sleep(after_seconds)
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_a_key_press_at_any_time_leaves_no_thread_and_a_run_that_resumes(tmp_path):
    """Control-C lands anywhere: in the model, in a handler, while waiting for the disk, between steps."""
    done = attempt = 0
    while attempt < 6 or (not done and attempt < 60):  # a busy machine needs longer for its first step
        attempt += 1
        model = decoder(blocks=3)
        engine = holdfast.offload(model, adamw(model), tmp_path, precision="fp32")
        assert engine.steps_done >= done
        finger = threading.Thread(target=press_a_key, args=(0.02 * attempt,))
        with pytest.raises(KeyboardInterrupt), engine:
            finger.start()
            while True:
                engine.step(batches(engine.steps_done, 3))
                done = engine.durable_step
        finger.join()
        assert not any(t.name.startswith("holdfast") for t in threading.enumerate())
        with pytest.raises(EngineFailed):
            engine.step(batches(0, 1))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert done > 0


def live_parameters(blocks, directory):
    """Parameters of blocks that are alive when block 0 runs backward under autocast."""
    model, counts = decoder(blocks=blocks), []
    gc.collect()

    def count(module, args):
        if torch.is_grad_enabled():
            found = (thing for thing in gc.get_objects() if type(thing) in (nn.Parameter, AbsentParameter))
            counts.append(
                sum(p.shape == (24, 16) and not p.is_meta and id(p) not in stand_ins for p in found)
            )

    with holdfast.offload(model, adamw(model), directory, precision="fp32") as engine:
        run = engine._run
        stand_ins = {id(run.absent.stand_in(member)) for unit in run.blocks for member in unit.members}
        model.blocks[0].mlp.register_forward_pre_hook(count)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            engine.step(batches(0, 1))
    return counts


@pytest.mark.slow
def test_autocast_holds_no_more_than_one_blocks_parameters(tmp_path):
    assert live_parameters(3, tmp_path / "few") == live_parameters(9, tmp_path / "many")
