"""TRL's trainers out of core: log, metrics and adapters are those of the same script in memory."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from safetensors.torch import load_file  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)

from holdfast.errors import BadInput, ModelNotSupported  # noqa: E402
from holdfast.integrations.out_of_core.generation import EqualPasses, refuse_generation  # noqa: E402
from holdfast.integrations.transformers import attach, offloaded  # noqa: E402
from integrations_interrupt import Interrupt, Interrupted, close_engines, same  # noqa: E402
from offloaded_script import logged  # noqa: E402
from support.guides import Stopped, call, commands, run, scripts  # noqa: E402
from survive_run import digest  # noqa: E402
from tiny_folders import TEXT, write_folder  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("trl") is None, reason="needs trl"),  # which takes seconds to import
    pytest.mark.filterwarnings("default"),  # of TRL, PEFT and datasets
]
WORDS = TEXT.split()
USUAL = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4, "learning_rate": 0.01,
    "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
    "dataloader_pin_memory": False, "bf16": False, "max_length": 48, "eval_strategy": "steps", "eval_steps": 2,
    "log_level": "error",
}  # fmt: skip


def words(first, count=6):
    return " ".join(WORDS[(first + i) % len(WORDS)] for i in range(count))


PAIRS = {
    "prompt": [words(i, 3) for i in range(10)],
    "chosen": [" " + words(3 * i + 1, 3) for i in range(10)],
    "rejected": [" " + words(5 * i + 2, 2) for i in range(10)],
}


@pytest.fixture(autouse=True)
def engines_are_closed():
    yield
    close_engines()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("folder") / "llama", dtype=torch.float32)


def sft(kind, folder, output, *, adapters=False, callbacks=(), compute_metrics=None, **options):
    import datasets
    import trl

    texts = datasets.Dataset.from_dict({"prompt": PAIRS["prompt"], "completion": PAIRS["chosen"]})
    return kind(trl.SFTTrainer)(
        model=AutoModelForCausalLM.from_pretrained(folder),
        args=trl.SFTConfig(output_dir=str(output), **USUAL | options),
        train_dataset=texts,
        eval_dataset=texts.select(range(3)),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=lora() if adapters else None,
        callbacks=list(callbacks),
        compute_metrics=compute_metrics,
    )


def dpo(kind, folder, output, *, adapters=False, callbacks=(), pairs=None, **options):
    import datasets
    import trl

    pairs = datasets.Dataset.from_dict(PAIRS) if pairs is None else datasets.load_from_disk(pairs)
    return kind(trl.DPOTrainer)(
        model=AutoModelForCausalLM.from_pretrained(folder),
        args=trl.DPOConfig(output_dir=str(output), **USUAL | options),
        train_dataset=pairs,
        eval_dataset=pairs.select(range(3)),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=lora() if adapters else None,
        callbacks=list(callbacks),
    )


def kto(kind, folder, output, *, adapters=False, callbacks=(), **options):
    import datasets
    import trl

    samples = datasets.Dataset.from_dict(
        {
            "prompt": PAIRS["prompt"] * 2,
            "completion": PAIRS["chosen"] + PAIRS["rejected"],
            "label": [True, False] * 10,
        }
    )
    return kind(trl.KTOTrainer)(
        model=AutoModelForCausalLM.from_pretrained(folder),
        args=trl.KTOConfig(output_dir=str(output), **USUAL | options),
        train_dataset=samples,
        eval_dataset=samples.select(range(3)),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=lora() if adapters else None,
        callbacks=list(callbacks),
    )


def reward(kind, folder, output, *, callbacks=(), **options):
    import datasets
    import trl

    pairs = datasets.Dataset.from_dict(PAIRS)
    torch.manual_seed(0)  # of the head
    return kind(trl.RewardTrainer)(
        model=AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1),
        args=trl.RewardConfig(output_dir=str(output), **USUAL | options),
        train_dataset=pairs,
        eval_dataset=pairs.select(range(3)),
        processing_class=AutoTokenizer.from_pretrained(folder),
        callbacks=list(callbacks),
    )


def policy(kind, folder, output, *, trainer="GRPO", adapters=False, callbacks=(), **options):
    """A policy whose texts are the better, the more letters they have."""
    import datasets
    import trl

    prompts = datasets.Dataset.from_dict({"prompt": PAIRS["prompt"]})
    usual = {key: value for key, value in USUAL.items() if key != "max_length"}
    own = {"num_generations": 2, "max_completion_length": 5, "beta": 0.1 if adapters else 0.0}
    return kind(getattr(trl, f"{trainer}Trainer"))(
        model=AutoModelForCausalLM.from_pretrained(folder),
        args=getattr(trl, f"{trainer}Config")(output_dir=str(output), **usual | own | options),
        reward_funcs=Letters(),
        train_dataset=prompts,
        eval_dataset=prompts.select(range(2)),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=lora() if adapters else None,
        callbacks=list(callbacks),
    )


class Letters:
    """One letter more for each call, so that what it holds counts."""

    __name__ = "letters"

    def __init__(self):
        self.calls = 0

    def __call__(self, completions, **_):
        self.calls += 1
        return [float(len(text) * self.calls) for text in completions]


def lora():
    torch.manual_seed(1)
    return peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


def itself(kind):
    return kind


ENTROPY = {"entropy_coef": 0.05, "entropy_target": 5.77, "entropy_coef_delta": 0.02}
"""A coefficient of the loss that follows the entropy, at the last micro-batch of a step."""
SCRIPTS = {
    "reward": (reward, {}),
    "sft": (sft, {}),
    "dpo reference": (dpo, {}),
    "sft adapters": (sft, {"adapters": True}),
    "dpo": (dpo, {"precompute_ref_log_probs": True}),
    "sft packed": (sft, {"packing": True, "packing_strategy": "wrapped"}),
    "grpo": (
        policy,
        {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "use_adaptive_entropy": True} | ENTROPY,
    ),
    "grpo adapters": (policy, {"adapters": True}),
    "rloo": (policy, {"trainer": "RLOO"}),
    "dpo adapters": (dpo, {"adapters": True}),
    "kto adapters": (kto, {"adapters": True, "loss_type": "apo_zero_unpaired"}),
}


@pytest.mark.campaign(keep=5)
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_log_is_that_of_the_script_in_memory(tmp_path, folder, name):
    script, options = SCRIPTS[name]
    plain = script(itself, folder, tmp_path / "a", **options)
    trainer = script(offloaded, folder, tmp_path / "b", **options)
    for each in (plain, trainer):
        torch.manual_seed(0)  # which draws the tokens of texts
        each.train()
    same(logged(trainer), logged(plain))
    trainer.engine.close()
    for mine, theirs in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("name", ["sft adapters", "sft", "grpo adapters", "dpo adapters"])
def test_an_interrupted_script_ends_the_same(tmp_path, folder, name):
    script, options = SCRIPTS[name]
    whole = script(offloaded, folder, tmp_path / "a", **options, logging_first_step=True)
    torch.manual_seed(0)
    whole.train()
    interrupted = script(
        offloaded, folder, tmp_path / "b", callbacks=[Interrupt(3, "on_step_end")], **options
    )
    torch.manual_seed(0)
    with pytest.raises(Interrupted):
        interrupted.train()
    trainer = script(offloaded, folder, tmp_path / "b", **options)
    trainer.train()
    assert logged(trainer) == logged(whole)
    if options.get("adapters"):  # which are saved alone
        trainer.save_model(tmp_path / "saved")
    for each in (trainer, whole):
        each.engine.close()
    assert digest(dict(trainer.model.state_dict())) == digest(dict(whole.model.state_dict()))
    if "sft" in name and options.get("adapters"):
        base = AutoModelForCausalLM.from_pretrained(folder)
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "saved", is_trainable=True)
        assert digest(dict(loaded.state_dict())) == digest(dict(trainer.model.state_dict()))
        assert not (tmp_path / "saved" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_iterations": 2}, "num_iterations is 4, and a step has 2 micro-batches.*num_iterations=1"),
        ({"sync_ref_model": True, "beta": 0.1}, "sync_ref_model=True does not work"),
    ],
)
def test_texts_of_other_weights_are_refused(tmp_path, folder, options, said):
    with pytest.raises(BadInput, match=said):
        policy(offloaded, folder, tmp_path / "out", **options)
    assert not (tmp_path / "out" / "_holdfast").exists()


def test_generation_makes_equal_passes_until_the_model_is_its_own_again():
    """A callback may say otherwise, and a model may be pickled after training."""

    class Writer:
        def generate(self, *args, **kwargs):
            return args, kwargs

    model = Writer()
    passes = EqualPasses(model)
    assert model.generate(1, synced_gpus=False, n=2) == ((1,), {"synced_gpus": True, "n": 2})
    passes.remove()
    assert model.generate(1) == ((1,), {}) and vars(model) == {}


def test_tools_and_environments_are_refused_in_several_processes(tmp_path, folder):
    """With them each process generates as often as its own texts ask for."""
    trainer = policy(offloaded, folder, tmp_path / "out")
    processes = SimpleNamespace(**vars(trainer.args), world_size=2)
    for name, argument in (("tools", "tools"), ("environment_factories", "environment_factory")):
        vars(trainer)[name] = [words]
        refuse_generation(trainer)
        alone, trainer.args = trainer.args, processes
        with pytest.raises(BadInput, match=f"with {argument} each process generates"):
            refuse_generation(trainer)
        trainer.args = alone
        delattr(trainer, name)


def test_metrics_of_logits_are_those_of_the_script_in_memory(tmp_path, folder):
    """TRL calls the model again for them, and for each loss."""

    def count(predicted):
        return {"chosen": float(predicted.predictions.argmax(-1).sum()), "size": predicted.predictions.size}

    logs = []
    for kind in (itself, offloaded):
        trainer = sft(kind, folder, tmp_path / kind.__name__, compute_metrics=count, max_steps=2)
        trainer.train()
        logs.append(logged(trainer))
    same(logs[1], logs[0])
    assert any("eval_chosen" in entry for entry in logs[1])


def test_a_loss_of_sft_that_calls_the_model_twice_is_refused(tmp_path, folder):
    with pytest.warns(FutureWarning), pytest.raises(BadInput, match="label_smoothing_factor calls the model"):
        sft(offloaded, folder, tmp_path / "out", label_smoothing_factor=0.1)
    assert not (tmp_path / "out" / "_holdfast").exists()


def test_a_loss_of_kto_that_calls_the_model_twice_is_refused(tmp_path, folder):
    with pytest.raises(BadInput, match="apo_zero_unpaired"):
        kto(offloaded, folder, tmp_path / "out")


def test_a_trainer_that_failed_in_its_first_step_begins_anew(tmp_path, folder, monkeypatch):
    import trl

    whole = policy(offloaded, folder, tmp_path / "a")
    torch.manual_seed(0)
    whole.train()
    trainer = policy(offloaded, folder, tmp_path / "b")
    loss, calls = trl.GRPOTrainer.compute_loss, itertools.count()

    def failing(*args, **kwargs):
        value = loss(*args, **kwargs)
        if next(calls) == 1:  # when the first micro-batch is counted
            raise Interrupted
        return value

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(trl.GRPOTrainer, "compute_loss", failing)
        torch.manual_seed(0)
        trainer.train()
    trainer.reward_funcs[0].calls = 0
    trainer.train()
    assert logged(trainer) == logged(whole)


class Talks(TrainerCallback):
    """Continues a text after the second step, and is refused elsewhere."""

    def __init__(self, is_plain):
        self.texts, self.refused, self._is_plain = [], 0, is_plain

    def on_step_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        if state.global_step == 2:
            tokens = processing_class(words(0, 4), return_tensors="pt")
            with torch.inference_mode():
                self.texts.append(model.generate(**tokens, max_new_tokens=4, do_sample=False).tolist())
            if not self._is_plain:
                with (
                    ThreadPoolExecutor(1) as thread,
                    pytest.raises(ModelNotSupported, match="another thread"),
                ):
                    thread.submit(_called, model, tokens).result()

    def on_pre_optimizer_step(self, args, state, control, model=None, processing_class=None, **kwargs):
        if not self._is_plain:
            with pytest.raises(BadInput, match="the weights after the step already"):
                _called(model, processing_class(words(0, 4), return_tensors="pt"))
            self.refused += 1


def _called(model, tokens):
    with torch.no_grad():
        return model(**tokens)


@pytest.mark.parametrize("adapters", [False, True])
def test_a_callback_may_generate_between_steps(tmp_path, folder, adapters):
    plain, held = Talks(is_plain=True), Talks(is_plain=False)
    options = {"adapters": adapters, "gradient_checkpointing": False}  # which has no key-value cache
    sft(itself, folder, tmp_path / "a", callbacks=[plain], **options).train()
    trainer = sft(offloaded, folder, tmp_path / "b", callbacks=[held], **options)
    forward = vars(trainer.model).get("forward")
    trainer.train()
    assert held.texts == plain.texts and len(held.texts) == 1 and held.refused == 4
    with pytest.raises(ModelNotSupported, match="Call it under"):
        trainer.model(input_ids=torch.ones(1, 2, dtype=torch.int64))
    trainer.engine.close()
    assert vars(trainer.model).get("forward") is forward


def test_the_guides_script_is_stopped_and_ends_as_the_one_before(tmp_path, folder, monkeypatch):
    import datasets
    import trl

    monkeypatch.chdir(tmp_path)
    (tmp_path / "FOLDER").symlink_to(folder)
    before, after = [
        script.replace("max_steps=6", "max_steps=6, bf16=False") for script in scripts("from-trl")
    ]
    data = datasets.Dataset.from_dict({"prompt": PAIRS["prompt"], "completion": PAIRS["chosen"]})

    def adapter(script, **how):
        torch.manual_seed(0)  # of the adapters
        run(script, data=data, **how)
        return load_file("tuned/adapter_model.safetensors")

    expected = adapter(before)
    loss, calls = trl.SFTTrainer.compute_loss, itertools.count()

    def stopping(*args, **kwargs):
        if next(calls) == 3:
            raise Stopped
        return loss(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(trl.SFTTrainer, "compute_loss", stopping)
        adapter(after, is_stopped=True)
    found = adapter(after)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)
    for command in commands("from-trl", "convert"):
        call(command)
    exported = load_file("ADAPTER/adapter_model.safetensors")
    assert exported.keys() == found.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in found.items())


class Synced:
    """A DPO training in memory whose reference follows the model every second step, as ``sync_ref_model=True``."""

    def __init__(self, folder, root, run=None, **options):
        options |= {"ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5, "beta": 0.5}
        self.trainer = dpo(lambda plain: plain, folder, root / "out", **options)
        if run is not None:
            self.trainer.ref_model.register_buffer("steps", torch.tensor(0))
            attach(self.trainer, run, base_every=2, averages=self.trainer.ref_model, after_update=self.sync)

    def sync(self):
        from trl.trainer.callbacks import SyncRefModelCallback

        reference = self.trainer.ref_model
        reference.steps += 1
        if reference.steps % 2 == 0:
            SyncRefModelCallback.sync_target_model(self.trainer.model, reference, 0.5)

    def end(self, stop=None):
        if stop is not None:
            self.trainer.add_callback(stop)
            with pytest.raises(Interrupted):
                self.trainer.train()
            return None
        self.trainer.train()
        models = self.trainer.model, self.trainer.ref_model
        return [digest(dict(model.named_parameters())) for model in models]


def test_a_reference_that_follows_the_model_is_refused_and_comes_back_as_an_average(tmp_path, folder):
    """The refusal's advice gives the numbers of TRL's own way, and a resumed training has them too."""
    with pytest.raises(BadInput, match=r"sync_ref_model=True .* averages=trainer\.ref_model, after_update="):
        Synced(folder, tmp_path, tmp_path / "run", sync_ref_model=True).end()
    assert not (tmp_path / "run").exists()
    end = Synced(folder, tmp_path, sync_ref_model=True).end()
    Synced(folder, tmp_path, tmp_path / "run").end(stop=Interrupt(3, "on_step_begin"))
    assert Synced(folder, tmp_path, tmp_path / "run").end() == end
    base = AutoModelForCausalLM.from_pretrained(folder)
    assert len({*end, digest(dict(base.named_parameters()))}) == 3
