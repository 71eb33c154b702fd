"""Which steps can still be had of timelines that a later resume left."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.errors import Damaged, DiskFailed, NoCommit
from holdfast.store.log.chain import Journal, chain_of, read_journal
from holdfast.store.reader import RunReader


def reached(store: RunReader, tip: int, until: int | None = None) -> Iterator[range]:
    """The steps, to ``until`` at most, that can be had of the line of ``tip``: of each base, newest first,
    its own and those that its records lead to. Raises ``DiskFailed`` if the newest cannot be seen."""
    journals: dict[str, Journal] = {}
    seen = False
    for ref in store.line(tip):
        if until is not None and ref.step > until:
            continue
        try:
            base = store.load(ref)
            for stream in base.streams:
                journals[stream] = journals.get(stream) or read_journal(store, stream, tip)
            chains = [chain_of(base, stream, journals[stream], until) for stream in base.streams]
        except (Damaged, NoCommit):
            continue
        except DiskFailed:
            if not seen:
                raise
            continue
        seen = True
        yield range(base.step, min(chain.last.step for chain in chains) + 1)


def left_behind(store: RunReader, after: int) -> set[int]:
    """The steps after ``after`` that can be had of lines which later resumes left."""
    left = store.timelines()[0].keys() - {store.tip()}
    lines = [steps for tip in left for steps in reached(store, tip)]
    return {step for steps in lines for step in steps if step > after}
