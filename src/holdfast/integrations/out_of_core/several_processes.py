"""The agreements of several processes of an offloaded trainer or loop, beside the exchanges of the engine.

The engine's sum over ranks is the only reduction of gradients: no ``DistributedDataParallel`` wraps the model. Batches,
numbers of items, logs and metrics are divided and gathered by the trainer's own code, over the process group of the
script. Where a process decides by itself how the loop goes on, all have to decide alike, or some would wait for ever:
the flags of the trainer's control are agreed on here. Called by the trainer and by accelerate's loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch import nn

from ...errors import BadInput
from ...offload.engine import Engine
from ...offload.setup.equal_on_ranks import refuse_unlike
from ...quantities import shown
from .prepared_objects import BatchesAhead

STOPS = "should_training_stop", "should_epoch_stop"
"""The flags of a control that end the loop."""
FLAGS = (*STOPS, "should_log", "should_evaluate", "should_save")
"""The flags of a control that decide how the loop goes on."""
OF_TRL = "SFTTrainer", "RewardTrainer", "DPOTrainer", "GRPOTrainer", "RLOOTrainer"
"""The trainers of TRL that train in several processes."""


def refuse_processes(trainer: Any) -> None:
    """Raise ``BadInput`` for several processes that would not train as those of the unmodified trainer do."""
    world_size, args = trainer.args.world_size, trainer.args
    refuse_other_count(world_size, "the trainer", "TrainingArguments")
    if world_size == 1:
        return
    kinds = [
        kind for kind in type(trainer).__mro__ if "_engine_options" not in vars(kind)
    ]  # not those made here
    of_trl = next((kind for kind in kinds if kind.__module__.split(".")[0] == "trl"), None)
    if of_trl is not None and of_trl.__name__ not in OF_TRL:
        raise BadInput(
            f"offloaded({of_trl.__name__}) trains in one process, and here are {world_size}: start the script by"
            f" itself. Of TRL's trainers {shown(OF_TRL)} train in several"
        )
    settings = args.accelerator_config
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise BadInput("the model was loaded in parts (distributed_config): load it whole, or on meta")
    if not settings.even_batches:
        raise BadInput(
            "even_batches=False in accelerator_config may give a process fewer batches than the others, which would"
            " wait for it: leave it out, or give dataloader_drop_last=True instead"
        )


def refuse_other_count(num_processes: int, host: str, sets_up: str) -> None:
    """Raise ``BadInput`` unless torch.distributed has ``num_processes``, as ``host`` counts them."""
    of_torch = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if of_torch != num_processes:
        raise BadInput(
            f"torch.distributed has {of_torch} processes here, and {host} counts {num_processes}: let {sets_up} set"
            " torch.distributed up, as it does in a script that torchrun starts"
        )


def refuse_unlike_processes(mine: Mapping[str, Any]) -> None:
    """Raise ``BadInput`` on all processes unless the values ``mine``, as JSON by name, are the same on all.

    Collective: every process must call this.
    """
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, dict(mine))
    refuse_unlike(gathered, "loaders", "Every process has to do the same steps; nothing was written")


def set_remainder(active: Any, loader: Any) -> None:
    """Let the ``active`` loader, with which an epoch goes on, know how many samples the last batch of ``loader`` has.

    accelerate counts these of all processes, and not in the loader that it makes to skip batches. Losses that gather
    metrics leave out by that number what the last batch was filled up with.
    """
    with suppress(TypeError, AttributeError):  # of unknown length, or no loader of accelerate
        if not loader._drop_last:
            active.remainder = loader.total_dataset_length % loader.total_batch_size


class AgreedControl:
    """The flags of a trainer's control, which are set for all processes if they are set in one of them."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._stops: set[str] = set()
        """The stops that were asked for in the middle of the step under way."""
        self._end_substep = trainer.callback_handler.on_substep_end
        vars(trainer.callback_handler)["on_substep_end"] = self.end_substep

    def close(self) -> None:
        """Restore the trainer."""
        vars(self._trainer.callback_handler).pop("on_substep_end", None)

    def end_substep(self, args: Any, state: Any, control: Any) -> Any:
        """Call ``on_substep_end`` of callbacks, and keep a stop for the end of the step, which is done already."""
        control = self._end_substep(args, state, control)
        for name in STOPS:
            if getattr(control, name):
                self._stops.add(name)
                setattr(control, name, False)
        return control

    def agree(self, engine: Engine, control: Any, where: str) -> bool:
        """Set each flag that is set in any process, and return whether the trainer logs, evaluates or saves.

        Collective: every process must call this, and name the same place ``where`` the loop is.
        """
        stops, self._stops = self._stops, set()
        mine = [name for name in FLAGS if name in stops or getattr(control, name)]
        agreed = set().union(*engine.gather(where, mine))
        for name in agreed:
            setattr(control, name, True)
        return not agreed <= {*STOPS}


@contextmanager
def ends_noted(
    model: nn.Module, calls: Sequence[Callable[[], Any]], ahead: BatchesAhead
) -> Iterator[list[Any]]:
    """Yield ``calls``, each of which sees in its loss whether its batch is the loader's last.

    ``gather_for_metrics`` of accelerate leaves out what the last batch was filled up with, and asks the loader. Losses
    that gather metrics, as TRL's do, run in one pass for all batches at hand.

    Args:
        model: The model, which each call calls once.
        calls: The calls for the batches at hand.
        ahead: The batches.
    """
    if not ahead.at_end:
        yield list(calls)
        return
    here, before = threading.local(), ahead.end_of_dataloader

    def numbered(number: int) -> Any:
        here.number = number
        return calls[number]()

    def set_end(*_: Any) -> None:
        ahead.set_end(here.number == len(calls) - 1)

    hook = model.register_forward_hook(set_end)
    try:
        yield [lambda number=number: numbered(number) for number in range(len(calls))]
    finally:
        hook.remove()
        ahead.set_end(before)
