"""Curves of a run for TensorBoard and for Weights & Biases, written by these programs' own libraries.

They are fed beside the run's events, which remain the record. A run that is resumed goes on with the same curves, and
no step is there twice: TensorBoard is given the step from which earlier points are void, and Weights & Biases, which
takes none back, gets only steps that it does not have yet. A logger that fails is left out with one warning; training
goes on. Nothing is sent: ``wandb sync`` does that, whenever a person wants it. Called by ``train_job``.
"""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...config import LogConfig
from ...errors import Damaged
from ...events import read_events
from ...libraries import library

EXTRA = "pip install 'holdfast[logging]'"


class StepLoggers:
    """The loggers that the section ``[log]`` asks for, perhaps none."""

    def __init__(self, how: LogConfig, run: Path, first_step: int, config: Mapping[str, Any]) -> None:
        """Open the loggers.

        Args:
            how: The section ``[log]``.
            run: The directory of the run.
            first_step: The number of steps that are done already.
            config: The configuration of the run, as keys and values.
        """
        self._loggers: list[_Logger] = []
        if how.tensorboard:
            self._open("TensorBoard", lambda: _TensorBoard(run, first_step))
        if how.wandb:
            self._open("Weights & Biases", lambda: _WeightsAndBiases(how.wandb, run, config))

    def step(self, event: Mapping[str, Any]) -> None:
        """Write the curves' points of a step, given the fields of its event."""
        values = {"loss": event["loss"], "gradient norm": event["grad_norm"]}
        if event["learning_rate"]:
            values["learning rate"] = event["learning_rate"][0]
        if event["seconds"]:
            values["tokens per second"] = event["tokens"] / event["seconds"]
        self._write({f"train/{name}": value for name, value in values.items()}, event["step"])

    def validation(self, event: Mapping[str, Any]) -> None:
        """Write the validation loss, given the fields of its event."""
        self._write({"validation/loss": event["loss"]}, event["step"])

    def close(self) -> None:
        """Close the loggers, so that their files are complete."""
        for logger in self._loggers:
            self._try(logger.name, logger.close)
        self._loggers = []

    def _open(self, name: str, make: Callable[[], _Logger]) -> None:
        self._try(name, lambda: self._loggers.append(make()))

    def _write(self, values: Mapping[str, Any], step: int) -> None:
        points = {name: float(value) for name, value in values.items() if value is not None}
        for logger in [*self._loggers]:
            if not self._try(logger.name, lambda of=logger: of.write(points, step)):
                self._loggers.remove(logger)

    @staticmethod
    def _try(name: str, what: Callable[[], object]) -> bool:
        """Call ``what`` and return whether it worked. A failure is one warning."""
        try:
            what()
        except Exception as error:
            warnings.warn(
                f"no more is logged to {name}, and training continues: {type(error).__name__}: {error}",
                stacklevel=3,
            )
            return False
        return True


def refuse_missing_loggers(how: LogConfig) -> None:
    """Raise ``BadInput`` if the library of a wanted logger is not installed."""
    if how.tensorboard:
        library("tensorboard", "log.tensorboard = true", EXTRA)
    if how.wandb:
        _forbid_reports()
        library("wandb", "log.wandb", EXTRA)


class _TensorBoard:
    """Curves in ``RUN/tensorboard``."""

    name = "TensorBoard"

    def __init__(self, run: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run / "tensorboard"), purge_step=first_step + 1)

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Add a point at ``step`` to each curve of ``values``."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a step that was committed is not done again, so its point must not be lost

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """Curves in ``RUN/wandb``, of one run under an id that all sittings share."""

    name = "Weights & Biases"

    def __init__(self, project: str, run: Path, config: Mapping[str, Any]) -> None:
        _forbid_reports()
        import wandb

        place = run / "wandb" / "holdfast-id"
        if place.is_file():
            told, self._known = place.read_text().strip(), _newest_step(run / "events.jsonl")
        else:
            told, self._known = secrets.token_hex(8), -1
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(told + "\n")
        settings = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True)
        self._run = wandb.init(
            project=project,
            dir=str(run),
            id=told,
            resume="allow",
            mode="offline",
            config=dict(config),
            settings=settings,
        )

    def write(self, values: Mapping[str, float], step: int) -> None:
        if step > self._known:
            self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


_Logger = _TensorBoard | _WeightsAndBiases


def _forbid_reports() -> None:
    """Have wandb send no reports of its own errors, which it would over the network."""
    os.environ["WANDB_ERROR_REPORTING"] = "false"


def _newest_step(path: Path) -> int:
    """Return the newest step of any sitting, by the event log; -1 if it tells none."""
    try:
        return max((event["step"] for event in read_events(path) if event["event"] == "step"), default=-1)
    except (OSError, Damaged):
        return -1
