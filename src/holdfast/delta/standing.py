"""Standing: the state of a run at a step, in memory, without the script that trained it."""

from __future__ import annotations

from pathlib import Path

from ..errors import BadInput
from ..state.live import LiveState
from ..store.local import LocalStore
from ..store.manifest import Point
from ..store.target import Url
from .holder import rebuilt
from .ranks import Ranks
from .recovery import recover
from .script import NoScript
from .watching import Recovery


def state_at(root: Path | Url, step: int, watch: Recovery | None = None) -> tuple[LiveState, Point]:
    """What the run in ``root`` has at ``step``, from the base before it and the records after that.

    Takes no lock and changes nothing. Raises ``NoCommit`` if no records lead there, ``BadInput`` if it takes the script
    to bring the state there.
    """
    with LocalStore(root) as store:
        base = store.load(next(ref for ref in store.line() if ref.step <= step))
        state = rebuilt(base, store.atoms(base))
        found = recover(store, state, NoScript(), ranks=Ranks(), target=step, exact=True, watch=watch)
        if found.residuals_lost:
            raise BadInput(
                f"{root} has no base of step {found.point.step}, and the residuals of error feedback at it are in no"
                " record. Name a step that `holdfast ls` lists."
            )
        return state, found.point
