"""Recovery of every optimizer step of an unmodified Lightning ``Trainer`` script, bit for bit.

    trainer = L.Trainer(..., callbacks=[HoldfastCallback("runs/x")])
    trainer.fit(model)  # begins the run, or goes on after its newest step

``OffloadedStrategy`` and, in several processes, ``OffloadedDDPStrategy`` train out of core.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

from ..checkpoint.options import Exactness, refuse_bad_resume
from ..errors import BadInput
from .lightning_fit import Fit, FitCallback
from .lightning_state import refuse_callbacks
from .out_of_core.offloaded_strategy import OffloadedDDPStrategy, OffloadedStrategy
from .shared.callback_options import refuse_callback_options

__all__ = ["HoldfastCallback", "OffloadedDDPStrategy", "OffloadedStrategy"]


class HoldfastCallback(FitCallback):
    """A callback that makes ``fit`` of its trainer begin or continue the run in the directory ``run``.

    ``exactness`` is that of ``Checkpointer.resume``, ``options`` are of ``Checkpointer``. State is restored that passes
    through Lightning's own hooks (``state_dict`` and ``on_save_checkpoint`` of other callbacks, the module, the
    datamodule and the precision plugin), and plain values that training has set as attributes. Another number of
    processes continues if a batch of all of them together has as many samples.
    """

    def __init__(self, run: str | Path, *, exactness: Exactness = "state", **options: Any) -> None:
        refuse_callback_options(options)
        refuse_bad_resume(None, None, exactness)
        super().__init__(run, options, exactness)

    def _make_fit(self, trainer: Trainer) -> Fit:
        _refuse(trainer)
        return Fit(trainer, self)


def _refuse(trainer: Any) -> None:
    """Raise ``BadInput`` for settings that prevent recording of steps or of the place in the data."""
    if type(trainer.strategy) not in (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy):
        raise BadInput(
            f"{type(trainer.strategy).__name__} is not a strategy whose state this callback knows: train on one device,"
            ' with strategy="ddp", or with ModelParallelStrategy and fully_shard in configure_model'
        )
    mesh = getattr(trainer.strategy, "device_mesh", None)
    if mesh is not None and mesh["tensor_parallel"].size() > 1:
        raise BadInput(
            "ModelParallelStrategy with tensor parallelism was never resumed here: give it tensor_parallel_size=1, or"
            " use holdfast.Checkpointer in a loop of your own"
        )
    refuse_callbacks(trainer)
    if trainer.reload_dataloaders_every_n_epochs:
        raise BadInput("reload_dataloaders_every_n_epochs gives up the place in the data; leave it out")
