"""A script's model as the engine of an offloaded trainer or loop needs it, and its weights as scripts save them."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import torch
from torch import nn

from ...errors import BadInput
from ...offload.engine import Engine
from ...quantities import counted, round_up
from ...state.plain_tensors import flat_bytes


def weights_of(engine: Engine, model: Any, is_kept: bool = True) -> dict[str, torch.Tensor]:
    """Return the weights in the dtypes of ``model``, on the host; of one with adapters, what PEFT saves of it.

    They are in a file without a name in the run's directory, from where they come into memory as they are used. What
    does not fit on the disk is in memory, and so is what PEFT saves beside the trained adapter. A process where they
    are not kept gets none. Collective: every process must call this.
    """
    only_trained = hasattr(model, "peft_config")
    if not is_kept:
        return engine.state_dict(trained=only_trained, keep=None)
    parameters = {each.name: each.parameter for each in engine.held.captured.parameters}
    kept = [each.parameter for each in engine.held.captured.parameters if each.trained or not only_trained]
    nbytes = sum(round_up(each.element_size() * each.numel()) for each in kept)
    folder = Path(engine.preflight.directory) / "scratch"
    folder.mkdir(exist_ok=True)
    pages = _Pages.made_in(folder, nbytes)

    def keep(name: str, value: torch.Tensor) -> torch.Tensor:
        value = value.to(parameters[name].dtype)
        return value if pages is None else pages.put(value)

    try:
        return engine.state_dict(trained=only_trained, keep=keep)
    finally:
        if pages is not None:
            pages.close()


class _Pages:
    """Tensors in a file without a name, whose pages the system may drop from memory and read again.

    The file lasts as long as a tensor in it. A tensor may be changed.
    """

    def __init__(self, file: IO[bytes], nbytes: int) -> None:
        self._file, self._end = file, 0
        file.truncate(nbytes)
        # shared, for a private mapping of more than the machine's memory would be refused
        self._memory = mmap.mmap(file.fileno(), nbytes)

    @classmethod
    def made_in(cls, folder: Path, nbytes: int) -> _Pages | None:
        """Return a file in ``folder`` for tensors of ``nbytes``, each in whole pages.

        None if the disk has too little room for it and for as many bytes that are saved from it.
        """
        if not nbytes or shutil.disk_usage(folder).free < 2 * nbytes:
            return None
        return cls(TemporaryFile(dir=folder, buffering=0), nbytes)

    def put(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``value`` from the file; ``value`` itself if the file or the disk has no room for it."""
        start, data = self._end, flat_bytes(value).numpy().data
        if not 0 < data.nbytes <= len(self._memory) - start:
            return value
        written = 0
        try:  # not through the mapping, where a full disk is a signal
            while written < data.nbytes:
                written += os.pwrite(self._file.fileno(), data[written:], start + written)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return value
        self._end = round_up(start + written)
        flat = torch.frombuffer(self._memory, dtype=value.dtype, count=value.numel(), offset=start)
        return flat.view(value.shape)

    def close(self) -> None:
        self._file.close()


def precision_of(model: Any, mixed: bool) -> str:
    """Return the dtype to compute in: bf16 if the script has asked for it (``mixed``) or loaded the model so."""
    short = any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
    return "bf16" if mixed or short else "fp32"


def names_outside_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of parameters of ``model`` that require a gradient and are not in ``optimizer``."""
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    return [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in held]


def refuse_clipping_of_others(names: Sequence[str]) -> None:
    """Raise ``BadInput`` if there are ``names``: parameters that a loop clips and its optimizer lacks.

    In memory their gradients are part of the norm; the engine computes gradients only of what it trains.
    """
    if names:
        raise BadInput(
            f"{names[0]} requires a gradient and is not in the optimizer ({counted(len(names), 'parameter')}). Clipping"
            " in memory counts its gradient, and the engine computes none: call requires_grad_(False) for it, give it"
            " to the optimizer, or do not clip."
        )


def refuse_other_norm(option: str, before: Any, now: Any) -> None:
    """Raise ``BadInput`` if the trainer's ``option``, the norm to clip to, is not what it was ``before``."""
    if now != before:
        raise BadInput(
            f"{option} was {before} when the run was opened and is {now} now: the engine clips all steps alike"
        )


def switch_off_checkpointing(model: Any) -> None:
    """Switch off activation checkpointing, which would call blocks again in the backward pass."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False


def do_nothing(*_: Any, **__: Any) -> None:
    """Take the place of a method whose work is the engine's."""


def left_to_the_engine(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method for an optimizer that calls ``step``; schedules take it for one that they have wrapped."""

    def method(optimizer: Any, closure: Any = None) -> Any:
        return step(closure)

    method._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return method
