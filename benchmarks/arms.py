"""Arms: the ways to keep a training's state that benchmarks compare, by name. Those that are not Holdfast's are in
``baselines.py``. One more way to use Holdfast is one more line: ``partial(Holdfast, codec=...)``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from baselines import Arm, CheckFreq, Dcp, Gemini, NaiveDiff, Save
from trainings import Training

from holdfast import Checkpointer, TopK
from holdfast.checkpoint.recording import LogBackend
from holdfast.schedule.interval.snapshot_interval import Limits
from holdfast.schedule.interval.step_cadence import CadenceChoice, StepRates
from holdfast.schedule.interval.waste import MeasuredCosts


class Holdfast(Arm):
    """A record of every step, and bases; with ``every`` more than 1 bases alone. ``options`` are those of
    ``Checkpointer``."""

    def __init__(self, folder: Path, training: Training, every: int | str = 1, **options: Any) -> None:
        super().__init__(folder, training, 1)
        self._checkpointer = Checkpointer(
            folder, model=training.model, optimizer=training.optimizer, loader=_Step(training), every=every,
            **options,
        )  # fmt: skip

    @property
    def durable_step(self) -> int:  # type: ignore[override]
        """Of ``Checkpointer``: it survives the machine's death as well."""
        return self._checkpointer.durable_step

    @durable_step.setter
    def durable_step(self, step: int) -> None:
        pass

    @property
    def lag(self) -> int:
        return self._checkpointer.steps_done - self._checkpointer.durable_step

    @property
    def tuned(self) -> tuple[MeasuredCosts, Limits, StepRates | None]:
        """What its tuner has measured so far, the limits that it keeps to, and what ``every="auto"`` has measured. Not
        with a replica."""
        pace = self._backend.pace
        assert pace.tuner is not None
        return pace.tuner.measured, pace.tuner.limits, pace.cadence.rates

    @property
    def is_settled(self) -> bool:  # type: ignore[override]
        """Whether it keeps steps as it goes on to: ``every="auto"`` measures first, then writes what it recorded."""
        backend = self._checkpointer._backend
        if not isinstance(backend, LogBackend) or not backend.pace.cadence.is_auto:
            return True
        if backend.pace.cadence.is_measuring:
            return False
        self._checkpointer.wait()
        return True

    @property
    def _backend(self) -> LogBackend:
        backend = self._checkpointer._backend
        assert isinstance(backend, LogBackend)
        return backend

    def resume(self, **options: int) -> int:
        return self._checkpointer.resume(**options)

    def step(self) -> None:
        self._checkpointer.step()
        self.stall_seconds = self._checkpointer.stall_seconds

    def close(self) -> None:
        self._checkpointer.close()


class Sparse(Arm):
    """Training consumes the gradients of a lossy codec, and nothing is kept: what recording them is compared with. Its
    stall is the time of the codec, which is in the stall of recording too."""

    def __init__(self, folder: Path, training: Training, every: int = 1, ratio: float = 0.01) -> None:
        super().__init__(folder, training, every)
        self._codec, self._residuals, self._seconds = TopK(ratio), {}, 0.0
        self._hook = training.optimizer.register_step_pre_hook(self._consume)

    def _consume(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        started = time.perf_counter()
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._codec.consume([(str(n), p) for n, p in enumerate(parameters)], self._residuals, False)
        self._seconds += time.perf_counter() - started

    def step(self) -> None:
        self.stall_seconds, self._seconds = self._seconds, 0.0

    def close(self) -> None:
        self._hook.remove()


class _Step:
    """A training's place in its data is its step."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def state_dict(self) -> dict[str, int]:
        return {"step": self._training.steps_done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._training.steps_done = state["step"]


class Copies(Holdfast):
    """Copies in memory every ``copies`` steps and a base every ``every``, as ``every="auto"`` has chosen before."""

    def __init__(self, folder: Path, training: Training, every: int, copies: int) -> None:
        super().__init__(folder, training, "auto")
        self._chosen = CadenceChoice(every, 0.0, 0.0, copies / 2, StepRates(1.0, 1.0, 1.0, 1.0), copies, 0.0)

    def resume(self, **options: int) -> int:
        step = super().resume(**options)
        self._backend.pace.cadence.adopt(self._chosen)
        return step


def _auto(
    folder: Path, training: Training, every: int | str = 1, copies: int = 0, **options: Any
) -> Holdfast:
    """``every="auto"``, or what it has chosen before."""
    if copies:
        return Copies(folder, training, int(every), copies)
    return Holdfast(folder, training, "auto" if every == 1 else every, **options)


ARMS: dict[str, Callable[..., Arm]] = {
    "none": Arm,
    "exact": Holdfast,
    "bases": Holdfast,
    "auto": _auto,
    "replica": partial(Holdfast, replica=True),
    "sparse": Sparse,
    "topk": partial(Holdfast, codec=TopK(0.01)),
    "save": Save,
    "dcp": Dcp,
    "checkfreq": CheckFreq,
    "gemini": Gemini,
    "naive": NaiveDiff,
}

AGAINST: dict[str, str] = {"topk": "sparse"}
"""Arms that are compared with another one than "none": a codec with the same training and nothing recorded."""
