"""Random numbers keyed by (seed, step, micro-batch, place in the model).

Dropout then does not depend on the order in which blocks and micro-batches run, and the recomputation of a block draws
what its forward pass drew. The keys apply to the global generators of torch, Python and NumPy, which are restored after
a step. Engines on several threads take turns with them, step by step. ``keyed_rng`` gives the same keys to an ordinary
training loop and takes no turns: nothing else may draw beside it.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ..accelerators import generator_state, seed_generator, set_generator_state, with_index
from ..errors import EngineFailed
from .model.blocks import find_blocks

PROLOGUE = "prologue"


def key_seed(seed: int, step: int, micro_batch: int, place: str) -> int:
    """Return a 63-bit seed for one place of one micro-batch of one step."""
    text = f"{seed}/{step}/{micro_batch}/{place}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def inside(block: int) -> str:
    """Return the name of the place inside block ``block``."""
    return f"block {block}"


def after(block: int) -> str:
    """Return the name of the place between block ``block`` and the next; after the last block, the epilogue."""
    return f"after {block}"


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the default generators that modules on ``device`` draw from."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)
    torch.default_generator.manual_seed(seed)
    seed_generator(seed, device)


def states(device: torch.device) -> tuple[Any, ...]:
    """Return the states of the default generators, which compare equal if nothing was drawn in between."""
    numpy: Any = np.random.get_state()
    on_device = generator_state(device)
    tensors = [torch.get_rng_state()] + ([] if on_device is None else [on_device.cpu()])
    return (random.getstate(), numpy[2:], *map(bytes, (numpy[1], *(state.numpy() for state in tensors))))


@contextmanager
def preserved_generators(device: torch.device) -> Iterator[None]:
    """Restore the default generators on exit."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_device = generator_state(device)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        set_generator_state(on_device, device)


PATIENCE_SECONDS = 120.0
"""The longest wait of an engine for a step of another one that waits for a loop of the script."""


@dataclass
class Turn:
    """A step's turn to use the default generators."""

    is_over: bool = False
    loop: threading.Thread | None = None
    """The thread of the script whose loop the step waits for; None while the engine works."""
    give_up: Callable[[], None] = lambda: None
    """Gives up a step that waits for a loop."""


_taken = threading.Lock()
_newest = Turn(is_over=True)
"""The turn of the step that has the generators, or had them last."""
_mine: ContextVar[Turn] = ContextVar("holdfast_generators", default=_newest)
"""The turn of this context's step: a model may call another engine on a micro-batch's thread, and so may a loop that
takes part in a step."""


@contextmanager
def own_generators(device: torch.device, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Wait for the turn to use the default generators, and restore them on exit.

    A step whose loop has ended with its thread is given up. ``waiting`` is called from time to time until then and may
    raise. Raises ``EngineFailed`` if a loop on another thread, which a step waits for, does not go on.
    """
    global _newest
    if not _mine.get().is_over:
        with preserved_generators(device):
            yield
        return
    since = time.monotonic()
    while not _taken.acquire(timeout=0.2):
        waiting()
        holder = _newest
        if holder.loop is None:
            since = time.monotonic()
        elif not holder.loop.is_alive():
            holder.give_up()
        elif time.monotonic() - since > PATIENCE_SECONDS:
            raise EngineFailed(
                f"another engine of this process is in the middle of a step, and its loop, on the thread"
                f" {holder.loop.name}, has not gone on for {PATIENCE_SECONDS:.0f} s. Call end_training() of its"
                " accelerator if an error has ended the loop, or train in a process of its own."
            )
    turn = _newest = Turn()
    token = _mine.set(turn)
    try:
        with preserved_generators(device):
            yield
    finally:
        _mine.reset(token)
        turn.is_over = True
        _taken.release()


def present_turn() -> Turn:
    """Return the turn of the step that this context belongs to."""
    return _mine.get()


def share(turn: Turn, give_up: Callable[[], None]) -> None:
    """Let the calling context use the generators in a ``turn`` whose step waits for its loop, which goes on here.

    The loop may call other engines then, also after an error has left it. ``give_up`` gives the step up.
    """
    turn.loop, turn.give_up = threading.current_thread(), give_up
    _mine.set(turn)


def give_up_left_step() -> None:
    """Give up the step that waits for a loop of this thread, which an error has left."""
    turn = present_turn()
    if not turn.is_over and turn.loop is threading.current_thread():
        turn.give_up()


class RngKeys:
    """Tells which step and micro-batch the next call of the model belongs to."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.device = seed, device
        self.step = self.micro_batch = 0

    def at(self, step: int, micro_batch: int) -> None:
        """Set the step and micro-batch of the next call, both counted from 0."""
        self.step, self.micro_batch = step, micro_batch

    def enter(self, place: str) -> None:
        seed_generators(key_seed(self.seed, self.step, self.micro_batch, place), self.device)


@contextmanager
def keyed_rng(
    model: nn.Module,
    seed: int = 0,
    blocks: Sequence[nn.Module] | nn.ModuleList | None = None,
    device: str = "cpu",
) -> Iterator[RngKeys]:
    """Give a plain training loop the random numbers of an offloaded run.

    Inside, call ``keys.at(step, micro_batch)`` before each ``model(...)``. Hooks are removed and the generators
    restored on exit.
    """
    keys = RngKeys(seed, with_index(torch.device(device)))
    found = find_blocks(model, blocks)
    hooks = [model.register_forward_pre_hook(lambda *_: keys.enter(PROLOGUE))]
    for index, block in enumerate(found.modules):
        hooks.append(block.register_forward_pre_hook(lambda *_, i=index: keys.enter(inside(i))))
        hooks.append(block.register_forward_hook(lambda *_, i=index: keys.enter(after(i))))
    try:
        with preserved_generators(keys.device):
            yield keys
    finally:
        for hook in hooks:
            hook.remove()
