"""What a rank of a world does that trains with torchtitan, on gloo without a GPU.

Its ``Trainer`` is built and run by its configuration, as ``torchtitan.train`` does it. torchtitan wants an accelerator,
so it is told that the host is one.
"""

from __future__ import annotations

import inspect
import os
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._utils
import torch.distributed as dist
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.distributed.tensor import DTensor

from holdfast import failpoints
from survive_run import digest

torch._utils._get_available_device_type = lambda: "cpu"

import torchtitan.trainer  # noqa: E402
from torchtitan.components import metrics  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.distributed import fsdp  # noqa: E402
from torchtitan.distributed import utils as of_ranks  # noqa: E402

import peers.titan_config  # noqa: E402, F401 (of every rank)

NO_MEMORY = metrics.DeviceMemStats(*[0] * 6)
MONITOR = types.SimpleNamespace(
    device_name="cpu", get_peak_stats=lambda: NO_MEMORY, reset_peak_stats=lambda: None
)
metrics.build_device_memory_monitor = lambda: MONITOR
of_ranks.set_pg_timeouts = lambda *_, **__: None  # waits for a device
torchtitan.trainer.time = types.SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)
undivided = fsdp.disable_fsdp_gradient_division


def summed(model: torch.nn.Module) -> None:
    """Gloo sums, and does not scale on the way."""
    undivided(model)
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


fsdp.disable_fsdp_gradient_division = summed


def step_given_micro_batches(
    schedule: Any,
    arg_mbs: Any,
    kwarg_mbs: Any,
    target_mbs: Any,
    losses: Any,
    loss_kwargs: Any,
    return_outputs: bool,
) -> None:
    """What torchtitan 0.3 calls, which torch 2.13 does not have yet."""
    for stage in schedule._stages if isinstance(schedule, PipelineScheduleMulti) else [schedule._stage]:
        stage.has_backward = schedule._has_backward
        stage.clear_runtime_states()
    schedule._step_microbatches(
        arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs
    )


if "arg_mbs" not in inspect.signature(PipelineScheduleSingle.step).parameters:
    PipelineScheduleSingle.step = PipelineScheduleMulti.step = step_given_micro_batches


def main(
    rank: int,
    world_size: int,
    rendezvous: str,
    say: Callable[..., None],
    *,
    config: str,
    options: list[str],
    kill: tuple[int, str] = (0, ""),
) -> None:
    """Train until the configured steps are done. ``kill`` is a rank and the failpoint at which it dies.

    ``RANK`` in ``options`` is the rank's number.
    """
    warnings.simplefilter("ignore")
    failpoints.armed = kill[1] if rank == kill[0] else ""
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    options = [option.replace("RANK", str(rank)) for option in options]
    args = ["--module", "peers.titan_config", "--config", config, *options]
    trainer = ConfigManager().parse_args(args).build()
    load = trainer.checkpointer.load

    def loaded(step: int = -1) -> bool:
        before = state_of(trainer)
        try:
            found = load(step)
        except BaseException as error:  # as that of torch is
            say(error=f"{type(error).__name__}: {error}", untouched=state_of(trainer) == before)
            raise
        say(loaded=found, began=trainer.step, state=state_of(trainer))
        return found

    trainer.checkpointer.load = loaded
    trainer.train()
    say(ended=trainer.step, last=state_of(trainer), tokens=trainer.ntokens_seen)
    torch.save(weights_of(trainer), f"{trainer.config.dump_folder}/weights-{rank}.pt")
    trainer.close()
    dist.destroy_process_group()


def state_of(trainer: Any) -> dict[str, str]:
    """By key: digests of the model and the optimizer, whole; the rest as it is."""
    manager = trainer.checkpointer
    found = dict(manager.states["model"].state_dict())
    for name in ("optimizer", "lr_scheduler"):
        found |= {f"{name}.{key}": value for key, value in manager.states[name].state_dict().items()}
    return {key: _told(key, value) for key, value in found.items()}


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: _whole(value.detach()) for name, value in trainer.model_parts[0].named_parameters()}


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _told(key: str, value: Any) -> str:
    value = _whole(value)
    return digest({key: value}) if isinstance(value, torch.Tensor) else repr(value)
