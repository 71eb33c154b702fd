"""Standing: the state of a run at a step, in memory, without the script that trained it."""

from __future__ import annotations

from pathlib import Path

from ..errors import BadInput, NoCommit
from ..state.live import LiveState
from ..store.local import LocalStore
from ..store.manifest import Point
from .holder import rebuilt
from .ranks import Ranks
from .recovery import recover
from .script import NoScript
from .watching import Recovery


def state_at(root: Path, step: int | None, watch: Recovery | None = None) -> tuple[LiveState, Point]:
    """What the run in ``root`` has at ``step`` (None: at its newest), from a base and the records after it.

    Takes no lock and changes nothing. Raises ``NoCommit`` if there is no such step, ``BadInput`` if it takes the script
    to bring the state there.
    """
    with LocalStore(root) as store:
        bases = [ref for ref in store.line() if step is None or ref.step <= step]
        if not bases:
            raise NoCommit(f"{root} has no base of step {step} or before it: `holdfast ls {root}` lists them")
        base = store.load(bases[0])
        state = rebuilt(base, store.atoms(base))
        found = recover(
            store, state, NoScript(), ranks=Ranks(), target=step, exact=step is not None, watch=watch
        )
        if found.residuals_lost:
            raise BadInput(
                f"{root} has no base of step {found.point.step}, and the residuals of error feedback at it are in no"
                " record. Name a step that `holdfast ls` lists."
            )
        return state, found.point
