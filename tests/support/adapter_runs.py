"""Short runs of ``holdfast train`` that train adapters on a tiny folder."""

from __future__ import annotations

import torch

from holdfast.events import read_events
from support.tiny_keys import IN_MEMORY, STEP

TINY = STEP | IN_MEMORY | {
    "model.context": 16, "train.learning_rate": 0.01, "train.warmup_steps": 0, "data.validation_fraction": 0,
}  # fmt: skip


def train_adapters(holdfast, text, run, folder, steps, *sets):
    """Run ``holdfast train`` to the step ``steps`` and return the result."""
    keys = TINY | {"run.dir": run, "data.text": text, "train.steps": steps}
    every = [*(f"{key}={value}" for key, value in keys.items()), *sets]
    return holdfast("train", "--model", folder, *(word for each in every for word in ("--set", each)))


def losses(run):
    return {
        event["step"]: event["loss"]
        for event in read_events(run / "events.jsonl")
        if event["event"] == "step"
    }


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(20)[None] * 13 % 300).logits


def stored_adapter(run):
    """What ``convert`` has of the run, as its files may be references that no other tool reads."""
    from holdfast.cli.runs import open_run
    from holdfast.formats.restore import read_tensors
    from holdfast.opening import source_of
    from holdfast.state.layout.regions import Region

    source = source_of(str(run), open_run)
    wanted = {key: each for key, each in source.atoms.items() if "lora_" in key and key.endswith("/param")}
    tensors = read_tensors(source, [(each, Region.whole(each.atom.shape)) for each in wanted.values()])
    return dict(zip(wanted, tensors))
