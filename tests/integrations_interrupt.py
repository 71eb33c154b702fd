"""Help for tests of trainers: an interrupt by a callback, the comparison of two logs, the end of a process."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import TrainerCallback

from holdfast.offload import exit_hook


class Interrupted(Exception):
    pass


class Interrupt(TrainerCallback):
    """Raises at an ``event`` when ``step`` steps are done."""

    def __init__(self, step: int, event: str = "on_step_begin") -> None:
        self._step, self._event = step, event

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "_event"):
            return object.__getattribute__(self, "_raise")
        return object.__getattribute__(self, name)

    def _raise(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            raise Interrupted


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float = 1e-5) -> None:
    """Two logs have the same entries, with numbers within ``tolerance``."""
    assert [entry.keys() for entry in found] == [entry.keys() for entry in expected]
    for mine, theirs in zip(found, expected, strict=True):
        for key, value in theirs.items():
            assert mine[key] == pytest.approx(value, rel=tolerance, abs=tolerance), key


def close_engines() -> None:
    """Close the engines that stay open after ``train``, as the end of a process does."""
    for engine in [*exit_hook._open]:
        engine.close()
