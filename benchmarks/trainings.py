"""What the benchmarks of checkpoints train: a GPT-2 small, a ResNet-18 and a VGG-11-BN for CIFAR, and a tiny one.

Each is a ``Training``: model, AdamW and synthetic data that follows from the step, so that a training that goes on
from step 7 does what one that was never interrupted does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import gpt
from torch import nn
from torch.nn.functional import cross_entropy

CLASSES = 100


class Training:
    """A loop's body in one place: ``step`` is one optimizer step, ``state`` all that is needed to go on."""

    def __init__(
        self, model: nn.Module, loss: Callable[[nn.Module, torch.Generator], torch.Tensor], seed: int = 0
    ) -> None:
        self.model, self._loss, self._seed = model.train(), loss, seed
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.steps_done = 0

    def step(self) -> float:
        data = torch.Generator().manual_seed(self._seed * 1_000_003 + self.steps_done)
        loss = self._loss(self.model, data)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps_done += 1
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        """Of the live tensors, not of copies."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.steps_done,
            "random": torch.get_rng_state(),
        }

    def load(self, state: dict[str, Any]) -> int:
        """Go on where ``state`` was taken; returns its step."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        self.steps_done = state["step"]
        return self.steps_done


def gpt2(batch: int = 4, context: int = 256) -> Training:
    """124 M parameters in fp32, 1,024 tokens a step."""
    return _language_model(12, 768, 50257, batch, context)


def tiny(batch: int = 2, context: int = 32) -> Training:
    return _language_model(2, 64, 256, batch, context)


def job(batch: int = 2, context: int = 128) -> Training:
    """5.8 M parameters: a step takes some 0.2 s on one core, and a save of everything about half of that."""
    return _language_model(6, 256, 4096, batch, context)


def resnet18(batch: int = 8) -> Training:
    """11.2 M parameters."""
    return _classifier(ResNet18(), batch)


def vgg11(batch: int = 8) -> Training:
    """VGG-11 with batch norm and the two wide layers behind it, at a quarter of ImageNet's width: 10.6 M parameters."""
    layers: list[nn.Module] = []
    width = 3
    for out in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if out == 0:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(width, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
        width = out
    head = [nn.Flatten(), nn.Linear(512, 1024), nn.ReLU(), nn.Dropout(), nn.Linear(1024, 1024), nn.ReLU()]
    return _classifier(nn.Sequential(*layers, *head, nn.Dropout(), nn.Linear(1024, CLASSES)), batch)


TRAININGS: dict[str, Callable[..., Training]] = {
    "gpt2": gpt2, "resnet18": resnet18, "resnet18-b64": partial(resnet18, 64), "vgg11": vgg11, "job": job,
    "tiny": tiny,
}  # fmt: skip


class ResNet18(nn.Module):
    """For 32 x 32 images: a 3 x 3 stem, four stages of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        widths = [(64, 64), (64, 128), (128, 256), (256, 512)]
        self.stages = nn.Sequential(
            *(nn.Sequential(_Residual(a, b, 1 if a == b else 2), _Residual(b, b, 1)) for a, b in widths)
        )
        self.head = nn.Linear(512, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


class _Residual(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.beside = nn.Sequential()
        if stride != 1:
            self.beside = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.beside(x))


def _language_model(layers: int, width: int, vocabulary: int, batch: int, context: int) -> Training:
    torch.manual_seed(0)
    model = gpt(layers, width, vocabulary, context, empty=False)

    def loss(model: nn.Module, data: torch.Generator) -> torch.Tensor:
        x = torch.randint(0, vocabulary, (batch, context), generator=data)
        return model(input_ids=x, labels=x).loss

    return Training(model, loss)


def _classifier(model: nn.Module, batch: int) -> Training:
    def loss(model: nn.Module, data: torch.Generator) -> torch.Tensor:
        x = torch.randn(batch, 3, 32, 32, generator=data)
        return cross_entropy(model(x), torch.randint(0, CLASSES, (batch,), generator=data))

    return Training(model, loss)
