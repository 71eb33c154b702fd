"""The weights with the lowest loss on held-out text, as a folder that other programs load.

The files of a run's blocks are recycled, so an older commit cannot stay beside the newest ones. What stays is what
`holdfast convert --to huggingface` writes of the commit: ``RUN/best/step-N``, streamed, without the optimizer's state.
The folder of the step before goes when the new one is complete. So does, at a resume, that of a later step, which is
trained again, perhaps with other settings. Called by ``train_job``.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

from ...errors import HoldfastError
from ...models.keeping import CONFIG

BEST = "best"


def keep_weights(run: Path, step: int) -> None:
    """Write the weights of the commit of ``step``, which has to be there, and remove those of other steps.

    A failure is a warning: the run goes on, and the folder of the step before stays.
    """
    from ..convert import write_folder

    destination = run / BEST / f"step-{step}"
    if (destination / CONFIG).is_file():  # which is written last
        return
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
