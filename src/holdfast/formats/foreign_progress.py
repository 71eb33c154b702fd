"""Parsing of progress that a foreign or editable file holds as JSON; everything is checked before use."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..errors import Damaged, HoldfastError
from ..state.encoding import decode
from .entry_matching import groups_of


def told(text: str | None, what: str, path: str) -> dict[str, Any]:
    """Parse ``text``, the entry ``what`` of ``path``, as a JSON object; None gives an empty one. Raises ``Damaged``."""
    try:
        found = json.loads("{}" if text is None else text)
        if not isinstance(found, dict):
            raise ValueError(f"it is a {type(found).__name__}, not an object")
        return found
    except (ValueError, TypeError, RecursionError) as error:
        raise _damaged(what, path, error) from error


def told_progress(text: str | None, what: str, path: str) -> dict[str, Any]:
    """Parse progress as ``told`` does, and check the entries that all formats share (see ``Source``)."""
    progress = told(text, what, path)
    try:
        check_progress(progress)
        if "random" in progress:
            _check_random(decode(progress["random"]))
    except Exception as error:  # any kind: the file may hold anything
        raise _damaged(what, path, error) from error
    return progress


def check_progress(progress: dict[str, Any]) -> None:
    """Raise an error of any kind if an entry with the same meaning in all formats has the wrong form."""
    decode(progress, strict=False)
    step, groups = progress.get("step"), groups_of(progress)
    if step is not None and (type(step) is not int or step < 0):
        raise ValueError(f"{step!r} is no step")
    for name in ("values", "extra", "things"):
        _need(name, progress.get(name, {}), dict)
    _need("a group", [group for group, _ in groups], list, dict)
    _need("group_parameters", [names for _, names in groups], list, list)
    _need("a name of a parameter", [name for _, names in groups for name in names], list, str)
    aliases = progress.get("aliases", {})
    _need("aliases", aliases, dict)
    _need("a name of a tied tensor", [*aliases.values()], list, str)
    _need("optimizers", progress.get("optimizers", []), list, str)
    _need("values", [*progress.get("values", {}).values()], list, dict)


@contextmanager
def state_dict_of(path: str) -> Iterator[None]:
    """Turn errors that arise while ``path`` is read as a state dict into ``Damaged``, which names ``path``."""
    try:
        yield
    except HoldfastError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError) as error:
        raise Damaged(
            f"{path} does not read as a state dict ({type(error).__name__}: {error})", path=path
        ) from error


def _need(what: str, value: Any, kind: type, of: type | None = None) -> None:
    if not isinstance(value, kind) or (of is not None and not all(isinstance(each, of) for each in value)):
        raise ValueError(f"{what} is not of the form that it has")


def _check_random(state: dict[str, Any]) -> None:
    """Raise the error that setting the generators to ``state`` would raise."""
    import torch

    version, words, gauss = state["python"]
    random.Random().setstate((version, tuple(int(word) for word in words), gauss))
    np.random.RandomState().set_state(state["numpy"])
    torch.Generator().set_state(state["torch"])


def _damaged(what: str, path: str, error: Exception) -> Damaged:
    return Damaged(
        f"{path}: {what} does not read as what is written there ({type(error).__name__}: {error}). Take another copy of"
        " it, or remove that entry to read the tensors alone.",
        path=path,
    )
