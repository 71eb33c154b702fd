"""Scripts of every kind that a Checkpointer keeps, on the device of the tests."""

from __future__ import annotations

import shutil
from pathlib import Path
from sysconfig import get_paths

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import named_optimizers
from gpu.training import DEVICE, Net
from holdfast.checkpointer import Checkpointer
from holdfast.store.commit.retention import Keep


class Setup:
    """A script of one of ``KINDS``: ``make`` returns a model, its optimizers and more for the Checkpointer."""

    def __init__(self, make):
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(0)
        self.model, self.optimizers, self.more = make()
        self.batch = (16, 31)
        if "batch" in self.more:
            self.batch = self.more.pop("batch")
        self.before, self.after = self.more.pop("before", None), self.more.pop("after", lambda: None)

    def step(self, i):
        return self.train(self.batch_of(i)).cpu()

    def batch_of(self, i):
        x = torch.randn(self.batch, generator=torch.Generator().manual_seed(i), device="cpu").to(DEVICE)
        return x if self.before is None else self.before(x)

    def train(self, x):
        """One iteration, which waits for nothing."""
        loss = self.model(x).float().pow(2).mean()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.after()
        return loss.detach()

    def state(self):
        found = {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}
        for number, optimizer in enumerate(self.optimizers):
            for parameter, slots in optimizer.state_dict()["state"].items():
                found |= {f"{number}/{parameter}/{slot}": value.detach().cpu().clone() for slot, value in slots.items()
                          if isinstance(value, torch.Tensor)}  # fmt: skip
        return found

    def checkpointer(self, root, **options):
        return Checkpointer(
            root,
            model=self.model,
            optimizer=self.optimizers,
            base_every=3,
            keep=Keep(9),
            **self.more,
            **options,
        )


def net():
    return Net().to(DEVICE)


def adamw(parameters, **options):
    return torch.optim.AdamW(parameters, lr=0.01, **options)


def groups():
    model = net()
    matrices, rest = named_optimizers.matrices(model), named_optimizers.vectors(model)
    given = [{"params": matrices, "weight_decay": 0.1}, {"params": [p for p in rest if p.dim()], "lr": 0.003},
             {"params": [p for p in rest if not p.dim()], "betas": (0.5, 0.9)}]  # fmt: skip
    return model, [adamw(given)], {}


def several():
    model = net()
    matrices, rest = named_optimizers.matrices(model), named_optimizers.vectors(model)
    return model, [torch.optim.Muon(matrices, lr=0.01), adamw(rest, fused=True)], {}


def masters():
    """Parameters in bf16, and an optimizer of copies in fp32."""

    class Masters(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net().bfloat16()
            copies = (torch.nn.Parameter(p.detach().float()) for p in self.net.parameters())
            self.masters = torch.nn.ParameterList(copies)
            self.net.requires_grad_(False)

        def forward(self, x):
            names = [name for name, _ in self.net.named_parameters()]
            rounded = {name: p.bfloat16() for name, p in zip(names, self.masters, strict=True)}
            return torch.func.functional_call(self.net, rounded, x.bfloat16())

    model = Masters().to(DEVICE)
    return model, [adamw(model.masters.parameters())], {}


def bf16():
    model = net().bfloat16()
    return model, [adamw(model.parameters())], {"before": lambda x: x.bfloat16()}


def autocast():
    model = net()
    forward = model.forward

    def cast(x):
        with torch.autocast(DEVICE, torch.bfloat16):
            return forward(x)

    model.forward = cast
    return model, [adamw(model.parameters())], {}


def channels_last():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 9, 3), torch.nn.BatchNorm2d(9), torch.nn.Conv2d(9, 5, 1), torch.nn.Dropout2d(0.3)
    ).to(DEVICE, memory_format=torch.channels_last)
    more = {"batch": (4, 3, 7, 7), "before": lambda x: x.to(memory_format=torch.channels_last)}
    return model, [adamw(model.parameters())], more


def averaged():
    model = net()
    averages = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return model, [adamw(model.parameters())], {
        "averages": averages, "after_update": lambda: averages.update_parameters(model)
    }  # fmt: skip


def scheduled():
    """A learning rate in a tensor of the device, as a compiled or captured step would have it."""
    model = net()
    if DEVICE == "cuda":
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=torch.tensor(0.01, device=DEVICE), capturable=True
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), foreach=False)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return model, [optimizer], {"scheduler": scheduler, "after": scheduler.step}


class Noise:
    """A generator of the device, whose position is the script's to keep."""

    def __init__(self):
        self.generator = torch.Generator(device=DEVICE).manual_seed(3)

    def __call__(self, x):
        return x + 0.1 * torch.randn(x.shape, generator=self.generator, device=DEVICE)

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])


def noisy():
    model, noise = net(), Noise()
    return model, [adamw(model.parameters())], {"also": {"noise": noise}, "before": noise}


def lora():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["first", "second"], lora_dropout=0.1)
    model = peft.get_peft_model(Net(), config).to(DEVICE).train()
    return model, [adamw([p for p in model.parameters() if p.requires_grad])], {}


def compiled_by(backend):
    def compiled():
        torch._dynamo.reset()
        model = net()
        model.compile(backend=backend)
        return model, [adamw(model.parameters())], {}

    return compiled


def named(name):
    def named_one():
        model = net()
        return model, [named_optimizers.OPTIMIZERS[name](model)], {}

    return named_one


def graphed():
    """Forward and backward captured as graphs, which torch runs for the model from then on."""
    model = torch.nn.Sequential(torch.nn.Linear(31, 257), torch.nn.ReLU(), torch.nn.Linear(257, 5)).to(DEVICE)
    if DEVICE == "cuda":
        model = torch.cuda.make_graphed_callables(model, (torch.randn(16, 31, device=DEVICE),))
        for parameter in model.parameters():
            parameter.grad = None
    return model, [adamw(model.parameters(), fused=True)], {}


def by_default():
    """A script that makes everything on the device unasked, and touches few rows of an embedding."""
    torch.set_default_device(DEVICE)
    model = torch.nn.Sequential(torch.nn.Embedding(600, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 5))
    words = {"before": lambda x: (x[:, :5].abs() * 997).long() % 600}
    return model, [adamw(model.parameters())], words


IN_NET = ("adafactor", "grass", "grass, rows by chance", "apollo", "apollo-mini", "adamw in bf16", "adamw in bytes",
          "muon and adamw")  # fmt: skip
KINDS = {
    each.__name__: each
    for each in (
        groups,
        several,
        masters,
        bf16,
        autocast,
        channels_last,
        averaged,
        scheduled,
        noisy,
        lora,
        graphed,
        by_default,
    )
}
KINDS |= {name: named(name) for name in IN_NET}
KINDS |= {"compiled eagerly": compiled_by("aot_eager")}
if (
    DEVICE == "cuda" and shutil.which("gcc") and (Path(get_paths()["include"]) / "Python.h").exists()
):  # for Triton
    KINDS["compiled by inductor"] = compiled_by("inductor")
