"""What a rank does that trains a tiny Llama with ``Trainer``, by ``offloaded`` or, if it is ``plain``, under DDP."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets  # noqa: F401 (accelerate imports it where there are several ranks; it takes seconds)
import peft
import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback

from holdfast.integrations.transformers import offloaded
from integrations_interrupt import close_engines
from offloaded_script import Texts, everything, logged, make, model
from survive_run import digest


class Some(Texts):
    """Texts of which those of ``silent`` have no targets."""

    def __init__(self, samples: int, silent: Sequence[int] = (), noise: bool = False) -> None:
        super().__init__(samples, noise=noise)
        self.silent = silent

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        item = super().__getitem__(i)
        if i in self.silent:
            item["labels"][:] = -100
        return item


class At(TrainerCallback):
    """Does ``what`` in this process at an ``event`` when ``step`` steps are done."""

    def __init__(self, what: str, event: str, step: int) -> None:
        self._what, self._event, self._step = what, event, step

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "_event"):
            return object.__getattribute__(self, "_act")
        return object.__getattribute__(self, name)

    def _act(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if state.global_step != self._step:
            return control
        if self._what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._what == "fail":
            raise ValueError("of this process alone")
        setattr(control, self._what, True)
        return control


def right(predicted: Any) -> dict[str, float]:
    return {"right": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


def adapted(base: Any) -> Any:
    torch.manual_seed(1)
    chosen = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(base, chosen)


def main(
    rank: int,
    world_size: int,
    rendezvous: str,
    say: Callable[..., None],
    *,
    root: str,
    plain: bool = False,
    adapters: bool = False,
    dropout: float = 0.0,
    samples: int = 22,
    silent: Sequence[int] = (),
    noise: bool = False,
    counts: bool = False,
    act: Sequence[Any] = (),
    spoilt: str = "",
    **options: Any,
) -> None:
    """``act`` is a rank, and what it does at an event and a step. One that fails lives until the others have ended.
    ``root`` gets the output and the weights."""
    if world_size > 1:
        os.environ |= {"LOCAL_RANK": str(rank)}
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    base, began = model(attention_dropout=dropout), time.time()
    callbacks = [At(*act[1:])] if act and act[0] == rank else []
    if spoilt == "another loader" and rank:
        samples += 9
    trainer = make(
        Trainer if plain else offloaded(Trainer),
        root,
        callbacks=callbacks,
        model=adapted(base) if adapters else base,
        train_dataset=Some(samples, silent, noise),
        **({"compute_metrics": right} if counts else {}),
        **options,
    )
    ended = [Path(f"{root}/ended-{each}") for each in range(world_size)]
    try:
        trainer.train()
    except Exception:
        ended[rank].touch()
        while act[1:2] == ["fail"] and not all(path.exists() for path in ended) and time.time() < began + 60:
            time.sleep(0.01)
        raise
    trainer.save_model(f"{root}/saved")
    if plain:
        say(logged=logged(trainer), steps=trainer.state.global_step)
    else:
        close_engines()
        whole = everything(trainer)
        say(
            logged=whole["logged"], steps=whole["step"],
            digests={name: digest(value) for name, value in whole.items()},
        )  # fmt: skip
    values = trainer.model.state_dict()
    torch.save(values, f"{root}/weights-{rank}.pt")
    say(processes=trainer.args.world_size, finished=True, best=trainer.state.best_global_step)
