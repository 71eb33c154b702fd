"""The state of a run at a given step, in memory, without the script that trained it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ...distributed import Ranks
from ...errors import BadInput
from ...state.encoding import joined
from ...state.live_state import LiveState
from ...store.remote.push_target import Url
from ...store.run_store import LocalStore
from ..snapshot.snapshot_state import rebuilt
from ..user_state import NoScriptState
from .run_recovery import recover


class _Kept(NoScriptState):
    """A stand-in for the script that keeps the progress which would be restored."""

    def restore(self, progress: dict[str, Any]) -> None:
        self.progress = progress


def state_at(root: Path | Url, step: int, tip: int | None) -> tuple[LiveState, dict[str, Any]]:
    """Return the state of the run in ``root`` at ``step``, and the progress of its script there.

    Loads the snapshot before the step and replays the records after it, on the timeline ``tip``. Takes no lock and
    changes nothing. Raises ``NoCommit`` if no records lead to the step, ``BadInput`` if the replay needs the script.
    """
    with LocalStore(root) as store:
        line = store.line(tip)
        base, script = store.load(next(ref for ref in line if ref.step <= step)), _Kept()
        threads = torch.get_num_threads()
        try:
            state = rebuilt(base, store.atoms(base))  # which sets the run's number of threads
            found = recover(store, state, script, ranks=Ranks(), target=step, tip=tip, exact=True)
        finally:
            torch.set_num_threads(threads)
        if found.residuals_lost:
            raise BadInput(
                f"{root} has no base of step {found.point.step}, and the residuals of error feedback at it are in no"
                " record. Name a step that `holdfast ls` lists."
            )
        told = joined([base.progress_of(stream) for stream in base.streams])
        return state, {"ranks": len(base.streams), **script.progress, "aliases": told.get("aliases", {})}
