"""Random generators that a script or an optimizer holds itself, as values: those of torch, NumPy and Python.

A generator is stored by its kind and its state. Restoring sets the state of the generator that is there, since other
objects may hold it too, or makes one where a script makes it only when it first draws. Called for optimizers
(``optimizer_attributes``) and for the attributes of a script's objects (``changed_attributes``).
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ..errors import BadInput
from .encoding import decode, encode

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_KINDS: dict[str, type] = {
    "torch": torch.Generator,
    "numpy": np.random.Generator,
    "numpy_legacy": np.random.RandomState,
    "python": random.Random,
}
"""The kinds of generators, by their names in JSON."""
_BITS: dict[str, type[np.random.BitGenerator]] = {
    kind.__name__: kind
    for kind in (
        np.random.MT19937,
        np.random.PCG64,
        np.random.PCG64DXSM,
        np.random.Philox,
        np.random.SFC64,
    )
}
"""The kinds of bits that a generator of NumPy may draw from."""
_MARK = "__generator__"


def generator_state(generator: Any) -> Any:
    """Return the state of ``generator``; of torch's, a tensor of bytes."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate()


def set_generator(generator: Any, state: Any) -> None:
    """Set ``generator`` to a result of ``generator_state``."""
    if isinstance(generator, (torch.Generator, np.random.RandomState)):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.setstate(state)


def generator_json(value: Any) -> dict[str, Any] | None:
    """Return a generator as JSON, for ``encode``; None for other values, also for one of unknown bits."""
    kind = next((name for name, kind in _KINDS.items() if type(value) is kind), None)
    if kind is None or not _is_known(value):
        return None
    device = {"device": str(value.device)} if kind == "torch" else {}
    return {_MARK: kind, "state": encode(generator_state(value)), **device}


def _is_known(generator: Any) -> bool:
    """Return whether a new generator would draw as this one, which NumPy may have given other bits."""
    if isinstance(generator, np.random.Generator):
        return type(generator.bit_generator) in _BITS.values()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)["bit_generator"] == "MT19937"
    return True


def is_generator_json(told: Any) -> bool:
    """Return whether ``told`` is JSON that ``generator_json`` made."""
    return isinstance(told, dict) and _MARK in told


def generator_from(told: dict[str, Any]) -> Any:
    """Return a new generator of the JSON that ``generator_json`` made, for ``decode``; None for other JSON.

    Raises ``BadInput`` for kinds that ``generator_json`` does not store, and for a device that is not here.
    """
    if not is_generator_json(told):
        return None
    kind, state = told[_MARK], decode(told["state"])
    bits = state["bit_generator"] if kind == "numpy" else ""
    if kind not in _KINDS or (kind == "numpy" and bits not in _BITS):
        raise BadInput(f"no random generator of the kind {kind} {bits}".rstrip() + " is known here")
    if kind == "torch":
        try:
            made: Any = torch.Generator(told["device"])
        except RuntimeError as error:
            raise BadInput(f"a random generator was on {told['device']}, which is not here") from error
    elif kind == "numpy":
        made = np.random.Generator(_BITS[bits]())
    else:
        made = _KINDS[kind]()
    set_generator(made, state)
    return made


def is_set(generator: Any, told: dict[str, Any]) -> bool:
    """Set ``generator`` to JSON that ``generator_json`` made, and return whether it is one of that kind.

    Raises ``BadInput`` for a generator on another kind of device.
    """
    if type(generator) is not _KINDS.get(told[_MARK]) or not _is_known(generator):
        return False
    state = decode(told["state"])
    if isinstance(generator, torch.Generator) and generator.device.type != torch.device(told["device"]).type:
        raise BadInput(f"a random generator was on {told['device']}, and here it is on {generator.device}")
    bits = getattr(generator, "bit_generator", None)
    if bits is not None and type(bits) is not _BITS.get(state["bit_generator"]):
        return False
    set_generator(generator, state)
    return True
