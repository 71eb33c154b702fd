"""Calls to a device's runtime, the same for every kind of device.

What torch offers under one name for CUDA (ROCm is "cuda" too), XPU and others is called through
``torch.get_device_module``. The few calls that only some runtimes have are made in this module and nowhere else.

Invariant: a thread that waits for an event or pins memory calls ``use_device`` first. A new thread has device 0, and
the runtime makes a context there (about 0.5 GB of that device) at the first such call.
Called by ``offload`` (the engine's device) and by ``checkpoint`` and ``state`` (the Checkpointer). Run on CUDA
alone (an H200); of the other runtimes only the names were compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import torch

from .errors import BadInput

NO_ACCELERATOR = ("cpu", "meta")
"""Types of devices without streams, events and generators of their own."""

STREAMS = ("Stream", "Event", "stream", "current_stream", "set_device", "device")
"""Names that a runtime's module needs for copies beside computing."""

GENERATORS = ("get_rng_state", "get_rng_state_all", "set_rng_state", "manual_seed")
"""Names that a runtime's module needs for its random numbers to be recorded and set."""


def is_accelerator(device: torch.device) -> bool:
    """Return whether ``device`` has memory and streams of its own, as far as its type tells."""
    return device.type not in NO_ACCELERATOR


def devices_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """Return the accelerators that hold some of ``tensors``, each once."""
    return list(dict.fromkeys(tensor.device for tensor in tensors if is_accelerator(tensor.device)))


def module_of(device: torch.device) -> Any:
    """Return torch's module for the type of ``device``: ``torch.cuda`` for "cuda"."""
    return torch.get_device_module(device)


def current_kind() -> str | None:
    """Return the type of this machine's accelerator, such as "cuda"; None if there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def names_here() -> list[str]:
    """Return the names of this machine's accelerators: "cuda:0", "cuda:1"."""
    kind = current_kind()
    return [] if kind is None else [f"{kind}:{index}" for index in range(torch.accelerator.device_count())]


def with_index(device: torch.device) -> torch.device:
    """Return ``device`` with an index: the calling thread's current one if it has none."""
    if device.index is not None or not is_accelerator(device):
        return device
    return torch.device(device.type, module_of(device).current_device())


def use_device(device: torch.device) -> None:
    """Make ``device`` the calling thread's current one. Threads that wait for events or pin memory call this first."""
    if is_accelerator(device):
        module_of(device).set_device(with_index(device))


# Streams and events


def new_stream(device: torch.device) -> Any:
    return module_of(device).Stream(device)


def current_stream(device: torch.device) -> Any:
    """Return the stream on which the calling thread computes on ``device``."""
    return module_of(device).current_stream(device)


def current_stream_in_use() -> Any:
    """Return the stream on which the calling thread computes on its current accelerator; None if none is in use."""
    kind = current_kind()
    if kind is None or not torch.get_device_module(kind).is_initialized():
        return None
    return torch.get_device_module(kind).current_stream()


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Return a context in which the calling thread's operations go to ``stream``."""
    return module_of(stream.device).stream(stream)


def record_event(stream: Any) -> Any:
    """Return an event that completes when everything submitted to ``stream`` so far is over.

    A thread that waits for it sleeps where the runtime can do that: CUDA's events spin a core unless they are made to
    block.
    """
    module = module_of(stream.device)
    try:
        event = module.Event(blocking=True)
    except TypeError:  # XPU's events have no such option
        event = module.Event()
    event.record(stream)
    return event


def marks(devices: Iterable[torch.device]) -> list[Any]:
    """Return one event for each of ``devices``, of everything submitted so far to the streams in use there."""
    return [record_event(current_stream(device)) for device in devices]


def is_capturing(device: torch.device) -> bool:
    """Return whether the calling thread captures a graph on ``device``, whose replays run no Python."""
    if not is_accelerator(device):
        return False
    return getattr(module_of(device), "is_current_stream_capturing", lambda: False)()


def synchronize(device: torch.device) -> None:
    """Wait until everything submitted to ``device`` is over. Returns at once for a CPU."""
    if is_accelerator(device):
        module_of(device).synchronize(device)


# Memory


class CannotPin(Exception):
    """The runtime refused to pin host memory. ``reason``: "CUDA error 2", for a warning."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def pin(memory: memoryview, device: torch.device) -> Callable[[], object]:
    """Pin ``memory``, so that ``device`` copies from and to it by itself. Returns a function that unpins it.

    Raises ``CannotPin``. The runtime's own record of the error is then cleared, because the next kernel of this thread
    would raise it otherwise.
    """
    module = module_of(device)
    if not hasattr(module, "cudart"):
        raise CannotPin(f"torch.{device.type} registers no memory")
    runtime, address = module.cudart(), address_of(memory)
    with use_while_asked(device):  # pinned for the context of this device
        error = int(runtime.cudaHostRegister(address, len(memory), 0))
        if error:
            _clear_error(runtime, device)
            raise CannotPin(f"CUDA error {error}")
    return partial(_unpin, runtime, address, device)


def _unpin(runtime: Any, address: int, device: torch.device) -> None:
    with use_while_asked(device):
        if int(runtime.cudaHostUnregister(address) or 0):
            _clear_error(runtime, device)


def _clear_error(runtime: Any, device: torch.device) -> None:
    """Clear the runtime's last error, so that no unrelated kernel raises it."""
    take = getattr(runtime, "cudaGetLastError", None)
    if take is not None:
        take()
        return
    with suppress(RuntimeError):  # torch reads the last error after this kernel, and raises it here
        torch.zeros(1, device=device)


def address_of(memory: memoryview) -> int:
    """Return the address at which ``memory``, which is not empty, begins."""
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def free_bytes(device: torch.device) -> int:
    """Return the free memory of ``device``, including what this process has reserved and does not use."""
    module = module_of(device)
    kept = module.memory_reserved(device) - module.memory_allocated(device)
    return unclaimed_bytes(device) + kept


def unclaimed_bytes(device: torch.device) -> int:
    """Return the free memory of ``device``, without what this process has reserved."""
    return module_of(device).mem_get_info(device)[0]


def give_back_unused(device: torch.device) -> None:
    """Give back the memory of ``device`` that this process has reserved and does not use."""
    if is_accelerator(device):
        module_of(device).empty_cache()


def most_bytes(device: torch.device) -> int:
    """Return the largest number of bytes that this process has had in tensors on ``device`` at once."""
    return module_of(device).max_memory_allocated(device)


def given_back_bytes(device: torch.device) -> int:
    """Return by how many bytes the tensors of this process on ``device`` are fewer than at most."""
    return most_bytes(device) - module_of(device).memory_allocated(device)


def name_of(device: torch.device) -> str:
    """Return the maker's name of ``device``."""
    return module_of(device).get_device_name(device)


def emulates_bf16(device: torch.device) -> bool:
    """Return whether ``device`` computes bf16 in another dtype, as CUDA devices before Ampere do."""
    asked = getattr(module_of(device), "is_bf16_supported", None)
    with use_while_asked(device):
        return asked is not None and not asked(including_emulation=False)


def use_while_asked(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which ``device`` is the calling thread's current one."""
    return module_of(device).device(with_index(device))


# Random numbers


def refuse_unrecorded(devices: Iterable[torch.device]) -> None:
    """Raise ``BadInput``, naming a device whose random numbers could not be recorded.

    Dropout after a resume would differ silently.
    """
    for device in devices:
        if is_accelerator(device) and not _has(device, GENERATORS):
            raise BadInput(
                f"the state of the random numbers of {device.type} is not recorded, so a run would not go on as it was:"
                " torch has no get_rng_state_all for it. Train on CUDA (or ROCm), on XPU, or on the CPU."
            )


def refuse_without_streams(device: torch.device) -> None:
    """Raise ``BadInput`` if the runtime of ``device`` lacks streams and events for copies beside computing."""
    if not _has(device, STREAMS):
        of_mps = " (one stream, and the host's memory)" if device.type == "mps" else ""
        raise BadInput(
            f"device {device.type!r} has no streams for copies beside computing{of_mps}, which offloading needs. Pass"
            ' device="cpu", or use a CUDA (or ROCm) or XPU device.'
        )


def can_offload(device: torch.device) -> bool:
    """Return whether ``device`` passes both checks above."""
    return _has(device, (*STREAMS, *GENERATORS))


def _has(device: torch.device, names: Iterable[str]) -> bool:
    module = module_of(device)
    return all(hasattr(module, name) for name in names)


def random_states() -> dict[str, list[torch.Tensor]]:
    """Return the states of the default generators of every device of this machine's accelerator, by its type.

    Empty if no accelerator is in use, or if its generators cannot be read (``refuse_unrecorded`` reports that).
    """
    kind = current_kind()
    if kind is None:
        return {}
    device = torch.device(kind)
    if not _has(device, GENERATORS) or not module_of(device).is_initialized():
        return {}
    return {kind: list(module_of(device).get_rng_state_all())}


def set_random_states(kind: str, states: Iterable[torch.Tensor]) -> None:
    """Set the default generators of the first devices of ``kind`` to ``states``, as many as exist here."""
    if current_kind() != kind:
        return
    count = torch.accelerator.device_count()
    for index, state in enumerate(states):
        if index < count:
            module_of(torch.device(kind)).set_rng_state(state, index)


def seed_generator(seed: int, device: torch.device) -> None:
    """Seed the default generator of ``device``, if that is an accelerator."""
    if is_accelerator(device):
        with use_while_asked(device):
            module_of(device).manual_seed(seed)


def generator_state(device: torch.device) -> torch.Tensor | None:
    """Return the state of the default generator of ``device``; None for a CPU, whose generator is torch's own."""
    return module_of(device).get_rng_state(with_index(device)) if is_accelerator(device) else None


def set_generator_state(state: torch.Tensor | None, device: torch.device) -> None:
    """Set the default generator of ``device`` to a result of ``generator_state``."""
    if state is not None:
        module_of(device).set_rng_state(state, with_index(device))
