"""A script's model as the engine of an offloaded trainer or loop needs it, and its weights as scripts save them."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch

from ...offload.engine import Engine
from ...quantities import round_up
from ...state.plain_tensors import flat_bytes


def weights_of(engine: Engine, model: Any, is_kept: bool = True) -> dict[str, torch.Tensor]:
    """Return the weights in the dtypes of ``model``, on the host; of one with adapters, what PEFT saves of it.

    They are in a file without a name in the run's directory, from where they come into memory as they are used. What
    does not fit on the disk is in memory. A process where they are not kept gets none. Collective: every process must
    call this.
    """
    only_trained = hasattr(model, "peft_config")
    if not is_kept:
        return engine.state_dict(trained=only_trained, keep=None)
    parameters = {each.name: each.parameter for each in engine.held.captured.parameters}
    nbytes = sum(round_up(max(each.element_size(), 4) * each.numel()) for each in parameters.values())
    with ExitStack() as opened:
        put: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach
        with suppress(OSError):
            put = opened.enter_context(
                closing(_Pages(Path(engine.preflight.directory) / "scratch", nbytes))
            ).put

        def keep(name: str, value: torch.Tensor) -> torch.Tensor:
            value = value.to(parameters[name].dtype)
            with suppress(OSError):
                return put(value)
            return value

        return engine.state_dict(trained=only_trained, keep=keep)


class _Pages:
    """Tensors in a file without a name, whose pages the system may drop from memory and read again.

    The file lasts as long as a tensor in it. A tensor may be changed.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        """Make a file for tensors of ``nbytes``, each in whole pages. Raises ``OSError``."""
        self._file = TemporaryFile(dir=folder)  # noqa: SIM115 (until ``close``)
        self._file.truncate(nbytes)
        # shared, for a private mapping of more than the machine's memory would be refused
        self._memory = mmap.mmap(self._file.fileno(), nbytes)

    def put(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``value`` from the file. Raises ``OSError`` if the disk is full."""
        if value.numel() == 0:
            return value
        start = round_up(self._file.tell())
        self._file.seek(start)
        self._file.write(
            flat_bytes(value).numpy().data
        )  # not through the mapping, where a full disk is a signal
        self._file.flush()
        flat = torch.frombuffer(self._memory, dtype=value.dtype, count=value.numel(), offset=start)
        return flat.view(value.shape)

    def close(self) -> None:
        self._file.close()


def precision_of(model: Any, mixed: bool) -> str:
    """Return the dtype to compute in: bf16 if the script has asked for it (``mixed``) or loaded the model so."""
    short = any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
    return "bf16" if mixed or short else "fp32"


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
