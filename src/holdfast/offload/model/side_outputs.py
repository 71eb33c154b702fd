"""Values that leave a block beside its return value, made outputs of the block like the others.

Blocks run apart from the model's forward pass, and twice. Two things that models do would be lost by that:

* transformers records values inside of blocks (``output_router_logits``, for the balancing loss of experts). Hooks on
  modules add them to lists of the forward pass that is under way in the same context.
* Layers that share keys and values put them into a ``UserDict`` argument, and later layers read them there.

A call of a block that has such lists or mappings goes to the engine in this form:

1. ``SideOutputs.enclose``, where the model calls the block: mappings become plain dicts, whose tensors are inputs of
   the block like any other, and the argument ``DECLARED`` names them and the lists.
2. ``with_side_outputs``, where the block itself runs: mappings and lists are new ones. The block's output becomes the
   tuple of its return value, what was recorded, and the entries that were put into the mappings.
3. ``SideOutputs.receive``, back in the model's forward: lists and mappings get their values, and the model its return
   value.

So gradients come back to these values, and the values are computed again with the block. Called by ``blocks.Patch``.
"""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree

from ...errors import ModelNotSupported

DECLARED = "_holdfast_side_outputs"
"""Name of the argument that tells what leaves a call beside the return value."""
RECORDER = "transformers.utils.output_capturing"
"""The module of transformers that holds the lists of the forward pass that is under way."""

Place = int | str
"""The position or the name of an argument."""


def recorder() -> Any:
    """Return the context variable of transformers that holds the lists to which its hooks add.

    None if transformers is not imported, or records in another way.
    """
    found = getattr(sys.modules.get(RECORDER), "_active_collector", None)
    return found if all(hasattr(found, name) for name in ("get", "set", "reset")) else None


@dataclass(frozen=True)
class SideOutputs:
    """The lists and mappings of one call of a block, as the model's forward has them."""

    lists: dict[str, list[Any]]
    """Lists to which values inside of the block are added, by what is recorded."""
    mappings: dict[Place, UserDict]
    """Arguments that the block reads and puts entries into."""

    @classmethod
    def of(cls, args: tuple, kwargs: Mapping[str, Any]) -> SideOutputs | None:
        """Return those of a call with these arguments; None if there are none. Called by the model's thread."""
        variable = recorder()
        active = variable.get() if variable is not None else None
        lists = {key: held for key, held in (active or {}).items() if isinstance(held, list)}
        named: list[tuple[Place, Any]] = [*enumerate(args), *kwargs.items()]
        mappings = {place: each for place, each in named if _is_shared(each)}
        return cls(lists, mappings) if lists or mappings else None

    def enclose(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments of the call as the engine gets them."""
        counts = {key: len(held) for key, held in self.lists.items()}
        kinds = {place: type(each) for place, each in self.mappings.items()}
        plain = {place: dict(each.data) for place, each in self.mappings.items()}
        args = tuple(plain.get(place, each) for place, each in enumerate(args))
        kwargs = {name: plain.get(name, each) for name, each in kwargs.items()}
        return args, kwargs | {DECLARED: (counts, kinds)}

    def receive(self, returned: Any) -> Any:
        """Put the values of a call into lists and mappings, and return what the block returned."""
        output, recorded, entries = returned
        for key, values in recorded.items():
            self.lists[key].extend(values)
        for place, found in entries.items():
            self.mappings[place].update(found)
        return output


def _is_shared(value: Any) -> bool:
    """Return whether an argument is a mapping that blocks may put entries into."""
    return isinstance(value, UserDict) and type(value) not in pytree.SUPPORTED_NODES


def with_side_outputs(forward: Callable[..., Any], block: str, compiled: bool) -> Callable[..., Any]:
    """Return a function that calls ``forward``, of the block of this name, with arguments as ``enclose`` makes them.

    Arguments without ``DECLARED`` are passed on as they are. The function raises ``ModelNotSupported`` if the block
    removes an entry of a mapping, or is ``compiled`` and has something to record: hooks inside might not be called.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        if DECLARED not in kwargs:
            return forward(*args, **kwargs)
        counts, kinds = kwargs.pop(DECLARED)
        if counts and compiled:
            raise ModelNotSupported(
                f"{block} is compiled, and what the model records inside of it ({', '.join(counts)}) would be lost."
                " Leave that out, or do not compile blocks."
            )
        given = {place: args[place] if isinstance(place, int) else kwargs[place] for place in kinds}
        shared = {place: kinds[place](entries) for place, entries in given.items()}
        args = tuple(shared.get(place, each) for place, each in enumerate(args))
        kwargs = {name: shared.get(name, each) for name, each in kwargs.items()}
        with _recording(counts) as lists:
            output = forward(*args, **kwargs)
        recorded = {key: held[counts[key] :] for key, held in lists.items()}
        entries = {place: _put(given[place], each.data, block) for place, each in shared.items()}
        return output, recorded, entries

    return run


def _put(before: Mapping[Any, Any], after: Mapping[Any, Any], block: str) -> dict[Any, Any]:
    """Return the entries that are new, or other objects than before."""
    gone = [key for key in before if key not in after]
    if gone:
        raise ModelNotSupported(
            f"{block} removed the entry {gone[0]!r} of a mapping that it shares with other blocks. Out-of-core training"
            " runs a block twice: leave the entry, or give later blocks another mapping."
        )
    return {key: value for key, value in after.items() if key not in before or value is not before[key]}


@contextmanager
def _recording(counts: Mapping[str, int]) -> Iterator[dict[str, list[Any]]]:
    """Give hooks inside of a block new lists, which begin as long as those of the model's forward are.

    Hooks ask for the length to know whether anything was recorded before.
    """
    lists: dict[str, list[Any]] = {key: [None] * count for key, count in counts.items()}
    variable = recorder()
    if variable is None or not lists:
        yield lists
        return
    token = variable.set(lists)
    try:
        yield lists
    finally:
        variable.reset(token)
