"""Checks of operation lists that tests make."""

from __future__ import annotations

from holdfast.schedule.operations import COMPUTE, Key, Op


def check_schedule(ops: list[Op]) -> None:
    """Assert what every schedule must satisfy: keys are unique, needs come earlier in the list, previous
    needs do not, each computation needs the one before it, and every buffer that is taken is given back
    exactly once."""
    seen: set[Key] = set()
    held: set[tuple] = set()
    computed: Key | None = None
    for op in ops:
        assert op.key not in seen, f"{op.key} twice"
        missing = [key for key in op.needs if key not in seen]
        assert not missing, f"{op.key} needs {missing}, which come later or never"
        assert not set(op.needs_previous) & seen, f"{op.key} waits for an earlier step's {op.needs_previous}"
        if op.lane == COMPUTE:
            assert computed is None or computed in op.needs, f"{op.key} does not need {computed}"
            computed = op.key
        seen.add(op.key)
        for hold in op.takes:
            assert hold.name not in held, f"{op.key} takes {hold.name} again"
            held.add(hold.name)
        for name in op.gives:
            assert name in held, f"{op.key} gives {name}, which nobody holds"
            held.remove(name)
    assert not held, f"never given back: {held}"
