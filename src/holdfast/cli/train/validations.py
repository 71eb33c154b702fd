"""The decisions by the losses on held-out text in the course of a run: when it ends early, and which weights stay.

The losses are kept durably, as ``validation.json`` in the run's directory, so a resumed run ends at the step at which
it would have ended. Losses after the step that a resume begins from are left out: those steps are trained again, with
the same bits.

The files of a run's blocks are recycled, so an older commit cannot stay beside the newest ones. What stays of the step
with the lowest loss is what `holdfast convert --to huggingface` writes of the commit: ``RUN/best/step-N``, streamed,
without the optimizer's state. The folder of the step before goes when the new one is complete. So does, at a resume,
that of a later step, which is trained again, perhaps with other settings. Called by ``train_job``.
"""

from __future__ import annotations

import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import xxhash

from ...errors import Damaged, HoldfastError
from ...models.keeping import CONFIG
from ...regular_files import load_json, read_regular
from ...store.disk import Disk, write_durably

BEST = "best"


def keep_weights(run: Path, step: int) -> None:
    """Write the weights of the commit of ``step``, which has to be there, and remove those of other steps.

    A failure is a warning: the run goes on, and the folder of the step before stays.
    """
    from ..convert import write_folder

    destination = run / BEST / f"step-{step}"
    if not (destination / CONFIG).is_file():  # which is written last
        shutil.rmtree(destination, ignore_errors=True)
        destination.parent.mkdir(exist_ok=True)
        try:
            write_folder(f"{run}@{step}", destination)
        except HoldfastError as error:
            shutil.rmtree(destination, ignore_errors=True)
            warnings.warn(
                f"the weights of step {step}, with the lowest loss, are not kept: {error}", stacklevel=2
            )
            return
    for other in destination.parent.iterdir():
        if other != destination:
            shutil.rmtree(other)


def drop_later_weights(run: Path, step: int) -> None:
    """Remove the weights that are kept of steps after ``step``, from which the run continues."""
    for kept in (run / BEST).glob("step-*"):
        number = kept.name.removeprefix("step-")
        if number.isdecimal() and int(number) > step:
            shutil.rmtree(kept)


NAME = "validation.json"


class Validations:
    """The losses on one held-out text, by step."""

    def __init__(self, patience: int, text: dict[str, Any], losses: dict[int, float]) -> None:
        """Hold ``losses`` on ``text``, which is a fingerprint.

        The run is over after ``patience`` losses in a row that were not below the lowest; 0 is never.
        """
        self.patience, self.text, self.losses = patience, text, losses

    @property
    def text_digest(self) -> str:
        """The identity of the text, as the event log has it."""
        return xxhash.xxh3_64_hexdigest(json.dumps(self.text, sort_keys=True).encode())

    def add(self, step: int, loss: float) -> bool:
        """Add the loss after ``step``. Return whether it is the lowest."""
        self.losses[step] = loss
        return self.best is not None and self.best[0] == step

    @property
    def best(self) -> tuple[int, float] | None:
        """The step with the lowest loss, the first of several, and that loss; None without a number."""
        found = [(loss, step) for step, loss in self.losses.items() if math.isfinite(loss)]
        if not found:
            return None
        loss, step = min(found)
        return step, loss

    @property
    def is_over(self) -> bool:
        """True if the last ``patience`` losses were not below the lowest before them."""
        return 0 < self.patience <= self.num_since_lowest

    @property
    def num_since_lowest(self) -> int:
        """The number of losses after the lowest."""
        since = -1 if self.best is None else self.best[0]
        return sum(step > since for step in self.losses)

    def write(self, run: Path) -> None:
        """Store the losses in the directory ``run``, durably."""
        losses = [[step, loss if math.isfinite(loss) else None] for step, loss in sorted(self.losses.items())]
        data = json.dumps({"text": self.text, "losses": losses}).encode()
        write_durably(Disk(run), NAME, data, why="losses on held-out text")


def kept_losses(run: Path, text: dict[str, Any], last_step: int) -> dict[int, float]:
    """Return the losses that ``run`` has kept up to ``last_step``; none of them if they are of another text."""
    told, losses = _read(run)
    if told != json.loads(json.dumps(text)):
        return {}
    return {step: loss for step, loss in losses.items() if step <= last_step}


def has_losses_of_another(run: Path, text: dict[str, Any]) -> bool:
    """Return whether ``run`` has kept losses, and they are on another text than ``text``."""
    told, losses = _read(run)
    return bool(losses) and told != json.loads(json.dumps(text))


def has_loss(run: Path, step: int) -> bool:
    """Return whether ``run`` has kept the loss after ``step``, on any text: a kill may have come before it."""
    return step in _read(run)[1]


def _read(run: Path) -> tuple[Any, dict[int, float]]:
    """Return the text that ``run`` has kept losses of, and the losses; None and no losses without a readable file."""
    try:
        told = load_json(read_regular(run / NAME))
        return told["text"], {
            int(step): math.nan if loss is None else float(loss) for step, loss in told["losses"]
        }
    except (OSError, Damaged, ValueError, KeyError, TypeError):
        return None, {}
