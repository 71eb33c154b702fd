"""The memory of scripts with a trainer, unmodified and with the one line that keeps their state on the SSD, in MiB.

    python benchmarks/trainer_memory.py [--only HOST] [--folder FOLDER] [--keep] [--small]

Each script loads a folder with a Llama, trains it with AdamW in fp32, evaluates it and saves it: with the Trainer of
Hugging Face, TRL's SFT and DPO, accelerate, and Lightning. Each process computes on one thread.

1. "unmodified" does all that.
2. "one line" is the same script with that line. It is killed in the middle of training; another process continues the
   run, evaluates and saves.

Each process is forked from one that has loaded all the libraries. The peak is the most memory of a process that is its
own (anonymous), and the libraries; pages of files that the system can drop at any time do not count. "before" is what
it has at its beginning. 2 runs under a hard limit, a memory cgroup (version 1, as root), for what comes on top of
that: what comes on top in the unmodified script, divided by 1.5.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from common import finish, hard_limit, memory_of_process, options_of

MIB = 1024**2
HOSTS = ("trainer", "sft", "dpo", "accelerate", "lightning")
MODULES = (
    "transformers.trainer", "transformers.models.llama.modeling_llama", "holdfast.integrations.transformers",
    "trl.trainer.sft_trainer", "trl.trainer.dpo_trainer", "holdfast.integrations.accelerate", "lightning.pytorch",
    "holdfast.integrations.lightning", "torch._dynamo",
)  # fmt: skip
"""The modules that are loaded before the scripts are forked."""
WAYS = ("unmodified", "one line")
WORDS = 250
"""The number of words of the texts; the tokenizer has four marks more."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of a Llama, and of a sample."""

    width: int = 192
    hidden: int = 768
    layers: int = 48
    tokens: int = 32


SMALL = Case(width=128, hidden=512, layers=48, tokens=16)
LESS = 1.5
"""The factor by which the unmodified script exceeds the limit."""
MICRO_BATCHES, STEPS, EVALUATED = 2, 3, 2


def write_folder(folder: Path, case: Case) -> Path:
    """Write a folder of random weights in fp32, with a tokenizer of ``WORDS`` words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    marks = ["<s>", "</s>", "<pad>", "<unk>"]
    config = LlamaConfig(
        hidden_size=case.width, intermediate_size=case.hidden, num_hidden_layers=case.layers,
        num_attention_heads=max(1, case.width // 64), num_key_value_heads=max(1, case.width // 64),
        vocab_size=WORDS + len(marks), max_position_embeddings=4 * case.tokens, use_cache=False,
        bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    vocabulary = {word: n for n, word in enumerate([*marks, *(f"w{n}" for n in range(WORDS))])}
    own = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=own, **names).save_pretrained(folder)
    return folder


# A script, in a process of its own: prints a JSON object per event


@dataclass(frozen=True, kw_only=True)
class Order:
    host: str
    way: str
    folder: str
    """The folder with the model."""
    out: str
    """The folder for the run and what is saved."""
    tokens: int
    predicts: bool = True
    """True if the engine is given a sample, by which it predicts its memory."""
    dies_after: int = 0
    """The step after which the process kills itself; 0 for none."""
    group: str = ""
    """The folder of a memory cgroup that the process puts itself into."""


class Script:
    """One of the scripts: what differs between the three ways, and what is said."""

    def __init__(self, order: Order) -> None:
        self.order, self.out = order, Path(order.out)
        self._engine: Callable[[], Any] = lambda: None
        self._at_first = 0

    def begin(self) -> None:
        self._at_first = memory_of_process("RssAnon")
        say(phase="begun", before=self._at_first)

    @property
    def grown(self) -> int:
        """The most memory of its own that the process has had, beyond that at first."""
        return memory_of_process("VmHWM") - memory_of_process("RssFile") - self._at_first

    def evaluated(self) -> None:
        say(phase="evaluated", grown=self.grown)

    def model(self) -> Any:
        """The model in the folder."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.order.folder)
        say(phase="loaded")
        return model

    @property
    def is_out_of_core(self) -> bool:
        return self.order.way != "unmodified"

    @property
    def run(self) -> str:
        return str(self.out / "run")

    def options(self, rows: int = 1) -> dict[str, Any]:
        """Options of the added line, where a micro-batch has so many ``rows``: all that can be is on the SSD."""
        import holdfast

        given: dict[str, Any] = {"placement": holdfast.Placement(activations_on_host=0.0)}
        if self.order.predicts:
            tokens = torch.zeros(rows, self.order.tokens, dtype=torch.int64)
            given["sample"] = {
                "input_ids": tokens,
                "attention_mask": torch.ones_like(tokens),
                "labels": tokens,
            }
        return given

    def has(self, engine: Callable[[], Any]) -> None:
        """Take the function that returns the script's engine."""
        self._engine = engine

    def stepped(self, step: int) -> None:
        """Say that a step has ended, and die after it if that was ordered."""
        engine = self._engine()
        about = {}
        if engine is not None:
            preflight = engine.preflight
            about = {
                "resumed": engine.resumed_from, "durable": engine.durable_step,
                "predicted": preflight.host_bytes_predicted, "state": preflight.state_bytes,
            }  # fmt: skip
        say(phase="steps", step=step, grown=self.grown, **about)
        if step == self.order.dies_after:
            while engine.durable_step < step - 1:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


class Samples(torch.utils.data.Dataset):
    """Random tokens."""

    def __init__(self, count: int, tokens: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._tokens = torch.randint(4, 4 + WORDS, (count, tokens), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        row = self._tokens[i]
        return {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row}


def samples(script: Script) -> tuple[Samples, Samples]:
    tokens = script.order.tokens
    return Samples(STEPS * MICRO_BATCHES, tokens, 0), Samples(EVALUATED, tokens, 1)


def texts(script: Script, *names: str) -> tuple[Any, Any]:
    """Return two data sets, whose rows have texts under ``names`` that are half of a sample long."""
    import datasets

    found = []
    for data in samples(script):
        half = script.order.tokens // 2 - 1
        rows = [[f"w{int(token) - 4}" for token in row["input_ids"]] for row in data]
        found.append(
            datasets.Dataset.from_dict(
                {name: [" ".join(row[n : n + half]) for row in rows] for n, name in enumerate(names)}
            )
        )
    return found[0], found[1]


def arguments(script: Script) -> dict[str, Any]:
    return {
        "output_dir": str(script.out), "per_device_train_batch_size": 1, "gradient_accumulation_steps": MICRO_BATCHES,
        "max_steps": STEPS, "learning_rate": 1e-4, "optim": "adamw_torch", "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False, "log_level": "error", "bf16": False,
        "per_device_eval_batch_size": 1, "logging_steps": 1,
    }  # fmt: skip


def with_trainer(script: Script, kind: type, rows: int = 1, **given: Any) -> None:
    """A script with a trainer of class ``kind``."""
    from transformers import TrainerCallback

    from holdfast.integrations.transformers import offloaded

    class Says(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            script.stepped(state.global_step)

    model = script.model()
    if script.is_out_of_core:
        kind = offloaded(kind, script.run, **script.options(rows))
    trainer: Any = kind(model=model, callbacks=[Says()], **given)
    del model
    script.has(lambda: getattr(trainer, "engine", None))
    trainer.train()
    trainer.evaluate()
    script.evaluated()
    trainer.save_model(str(script.out / "saved"))


def trainer(script: Script) -> None:
    from transformers import Trainer, TrainingArguments

    train, evaluated = samples(script)
    given = {"train_dataset": train, "eval_dataset": evaluated}
    with_trainer(script, Trainer, args=TrainingArguments(**arguments(script)), **given)


def sft(script: Script) -> None:
    import trl
    from transformers import AutoTokenizer

    train, evaluated = texts(script, "prompt", "completion")
    args = trl.SFTConfig(**arguments(script), gradient_checkpointing=False)
    given = {"train_dataset": train, "eval_dataset": evaluated}
    tokenizer = AutoTokenizer.from_pretrained(script.order.folder)
    with_trainer(script, trl.SFTTrainer, args=args, processing_class=tokenizer, **given)


def dpo(script: Script) -> None:
    import trl
    from transformers import AutoTokenizer

    train, evaluated = texts(script, "prompt", "chosen", "rejected")
    args = trl.DPOConfig(**arguments(script), gradient_checkpointing=False, precompute_ref_log_probs=True)
    given = {"train_dataset": train, "eval_dataset": evaluated}
    tokenizer = AutoTokenizer.from_pretrained(script.order.folder)
    with_trainer(script, trl.DPOTrainer, 2, args=args, processing_class=tokenizer, **given)


def accelerate(script: Script) -> None:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from holdfast.integrations.accelerate import offloaded

    net = script.model()
    kind = Accelerator
    if script.is_out_of_core:
        kind = offloaded(Accelerator, script.run, clipping=1.0, **script.options())
    accelerator = kind(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    script.has(lambda: getattr(accelerator, "engine", None))
    train, evaluated = (DataLoader(data, batch_size=1) for data in samples(script))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    net, optimizer, train, evaluated = accelerator.prepare(net, optimizer, train, evaluated)
    step = getattr(accelerator, "steps_done", 0)
    for batch in train:
        with accelerator.accumulate(net):
            accelerator.backward(net(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            script.stepped(step)
    net.eval()
    with torch.no_grad():
        for batch in evaluated:
            net(**batch).loss.item()
    script.evaluated()
    accelerator.save_model(net, str(script.out / "saved"))
    say(phase="saved")
    accelerator.end_training()


def lightning(script: Script) -> None:
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader

    from holdfast.integrations.lightning import OffloadedStrategy

    class Module(L.LightningModule):
        def __init__(self, net: Any) -> None:
            super().__init__()
            self.net = net

        def forward(self, **batch: Any) -> Any:
            return self.net(**batch)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            return self(**batch).loss

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("validation", self(**batch).loss, batch_size=1)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    class Says(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step > self.step:
                self.step = trainer.global_step
                script.stepped(self.step)

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.step = trainer.global_step

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            script.evaluated()

    module = Module(script.model())
    keeper = ModelCheckpoint(script.out / "saved", every_n_epochs=1)
    strategy: Any = "auto"
    if script.is_out_of_core:
        strategy = OffloadedStrategy(script.run, **script.options())
        script.has(lambda: strategy.engine)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, accumulate_grad_batches=MICRO_BATCHES, gradient_clip_val=1.0,
        logger=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        default_root_dir=script.out, callbacks=[Says(), keeper], strategy=strategy,
    )  # fmt: skip
    train, evaluated = (DataLoader(data, batch_size=1) for data in samples(script))
    trainer.fit(module, train, evaluated)


def measure(order: dict[str, Any]) -> None:
    """Run one script."""
    torch.set_num_threads(1)
    script = Script(Order(**order))
    if script.order.group:
        Path(script.order.group, "cgroup.procs").write_text(str(os.getpid()))
    script.begin()
    globals()[script.order.host](script)
    say(phase="ended")
    atexit._run_exitfuncs()
    os._exit(0)  # the end of an interpreter writes to all objects, which a fork shares until then


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


# The processes


def run(order: Order, group: Path | None) -> tuple[int, dict[str, Any], dict[str, int]]:
    """Return the exit code of a script in ``group``, what it said, merged, and its peak by phase."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(replace(order, group=str(group or "")), write)
    os.close(write)
    said: dict[str, Any] = {"phase": "begun"}
    peaks: dict[str, int] = {}
    with open(read) as lines:
        reader = threading.Thread(target=_merge, args=(lines, said))
        reader.start()
        while reader.is_alive():
            phase = said["phase"]
            with suppress(OSError, KeyError):
                own, files = _memory_of(pid)
                said["libraries"] = min(said.get("libraries", files), files)
                peaks[phase] = max(peaks.get(phase, 0), own)
            reader.join(0.005)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -9), f"{order} has ended with {code}"
    return code, said, peaks


def _child(order: Order, write: int) -> NoReturn:
    try:
        os.dup2(write, 1)
        measure(asdict(order))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


def _merge(lines: Iterator[str], said: dict[str, Any]) -> None:
    for line in lines:
        if line.startswith('{"phase"'):
            said.update(json.loads(line))


def _memory_of(pid: int) -> tuple[int, int]:
    """Return the bytes of a process that are its own, and those of files that it has mapped."""
    found = dict(re.findall(r"^(Rss\w+):\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
    own = int(found["RssAnon"]) + int(found["RssShmem"])
    return own * 1024, int(found["RssFile"]) * 1024


def of_script(host: str, way: str, case: Case, folder: Path, group: Path | None) -> dict[str, Any]:
    """Return the peaks of a script, by phase; empty where a process was killed that ought not to be."""
    order = {"host": host, "way": way, "folder": str(folder / "model"), "tokens": case.tokens}
    out = folder / "out"
    peaks: dict[str, int] = {}
    said: dict[str, Any] = {}
    try:
        for dies_after in (0,) if way == "unmodified" else (2, 0):
            code, now, more = run(Order(**order, out=str(out), dies_after=dies_after), group)
            if code != (-9 if dies_after else 0) or (dies_after and now.get("step") != dies_after):
                return {}
            if way != "unmodified" and not dies_after:
                assert now["resumed"] >= 1, now
            said |= now
            for phase, peak in more.items():
                name = f"{phase}, resumed" if phase in peaks and way != "unmodified" else phase
                peaks[name] = max(peak, peaks.get(name, 0))
    finally:
        shutil.rmtree(out, ignore_errors=True)
    peak = max(peaks.values()) + said["libraries"]
    sizes = {"peak": peak, "before": said["before"] + said["libraries"]}
    sizes |= {name: said[name] for name in ("predicted", "state") if name in said}
    return {name: each // MIB for name, each in (sizes | peaks).items()}


def figures(host: str, case: Case, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the figures of a host, by way."""
    plain = of_script(host, "unmodified", case, folder, None)
    limit = round((plain["peak"] - plain["before"]) / LESS)
    with hard_limit(limit * MIB) as group:
        held = of_script(host, "one line", case, folder, group)
    ours = held or of_script(host, "one line", case, folder, None)
    return {
        "unmodified": plain,
        "one line": ours | ({} if group is None else {"limit": limit, "held": bool(held)}),
    }


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--only", choices=HOSTS, help="one host")
    parser.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure)
        return
    case = SMALL if options.small else Case()
    hosts = [options.only] if options.only else HOSTS[:1] if options.small else HOSTS
    for module in MODULES:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # so that no collection in a fork writes to objects that are shared
    folder = Path(tempfile.mkdtemp(dir=options.folder))  # which no exit function of a fork removes
    try:
        write_folder(folder / "model", case)
        for host in hosts:
            ways = figures(host, case, folder)
            finish("trainer_memory", {"measurement": host, "sizes": asdict(case), "ways": ways}, options.keep)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
