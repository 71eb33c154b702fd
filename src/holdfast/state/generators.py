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

from .encoding import decode, encode

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_KINDS: dict[str, type] = {
    "torch": torch.Generator,
    "numpy": np.random.Generator,
    "numpy_legacy": np.random.RandomState,
    "python": random.Random,
}
"""The kinds of generators, by their names in JSON."""
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
    """Return a generator as JSON, for ``encode``; None for other values."""
    kind = next((name for name, kind in _KINDS.items() if type(value) is kind), None)
    if kind is None:
        return None
    device = {"device": str(value.device)} if kind == "torch" else {}
    return {_MARK: kind, "state": encode(generator_state(value)), **device}


def is_generator_json(told: Any) -> bool:
    """Return whether ``told`` is JSON that ``generator_json`` made."""
    return isinstance(told, dict) and _MARK in told


def generator_from(told: dict[str, Any]) -> Any:
    """Return a new generator of the JSON that ``generator_json`` made, for ``decode``; None for other JSON."""
    if not is_generator_json(told):
        return None
    kind, state = told[_MARK], decode(told["state"])
    if kind == "torch":
        made: Any = torch.Generator(told["device"])
    elif kind == "numpy":
        made = np.random.Generator(getattr(np.random, state["bit_generator"])())
    else:
        made = _KINDS[kind]()
    set_generator(made, state)
    return made
