"""Recovery: the newest whole base of a run, and the records from there on, into a live model.

A base that does not verify gives way to the one before it, whose records reach further back. A record that is missing,
does not verify, or does not give what training had, ends the chain: the step before it is where the run continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..errors import Damaged, HoldfastError, NoCommit
from ..io.buffers import Buffer
from ..state.live import BUFFERS, RESIDUAL, LiveState
from ..store.chain import Chain, Journal, chain_of, payloads, read_journal
from ..store.local import LocalStore
from ..store.manifest import Manifest, Point
from ..store.reading import read_file
from .replay import apply, fingerprint
from .script import Script
from .slots import tensors_of


def recover(
    store: LocalStore,
    state: LiveState,
    script: Script,
    *,
    stream: str,
    target: int | None = None,
    exact: bool = False,
    continuing: bool = False,
    after_update: Callable[[], None] | None = None,
) -> tuple[Point, list[str]]:
    """Bring ``state`` and ``script`` to the newest step that can be had, at most ``target``; just that one if
    ``exact``; with ``continuing`` to the newest from which training goes on as it did. Returns the commit or the record
    that the run continues, and what was wrong with later ones. Residuals are there if they are those of that point.

    Raises ``NoCommit`` if ``target`` cannot be had, ``Damaged`` if no base is whole, ``RunMismatch`` if the run is that
    of another model (with nothing changed then).
    """
    journal, odd = read_journal(store, stream), []
    bases = [ref for ref in store.line() if target is None or ref.step <= target]
    for ref in bases:
        try:
            base = store.load(ref)
            chain = _replayed(store, state, script, base, journal, target, continuing, after_update, odd)
        except Damaged as error:
            odd.append(str(error))
            continue
        if exact and chain.last.step != target and continuing and chain.odd is None:
            raise NoCommit(
                f"{store.root} cannot be brought to step {target} so that training goes on as it did: residuals are"
                f" part of bases alone, and the newest at or before it is of step {chain.last.step}. Resume there, or"
                ' with exactness="state".'
            )
        if exact and chain.last.step != target:
            raise NoCommit(
                f"{store.root} cannot be brought to step {target}: after step {chain.last.step} the records end."
                f" {chain.odd or 'Nothing was recorded after it.'}"
            )
        if chain.odd is not None:
            odd.append(str(chain.odd))
        if chain.last is not chain.base:
            state.residuals.clear()
        script.restore(chain.progress)
        return chain.last, odd
    if not bases:
        raise NoCommit(f"{store.root} has no commit of step {target} or before it.")
    raise Damaged(f"no commit of {store.root} is whole: {odd[0]} `holdfast verify {store.root}` says more.")


class _Differs(HoldfastError):
    """Replay of a record did not give what training had."""


def _replayed(
    store: LocalStore,
    state: LiveState,
    script: Script,
    base: Manifest,
    journal: Journal,
    target: int | None,
    continuing: bool,
    after_update: Callable[[], None] | None,
    odd: list[str],
) -> Chain:
    """Load ``base`` and do the steps after it. What ends the chain early is its ``odd``, or in ``odd``."""
    atoms = store.atoms(base)
    state.check({key: (atom["dtype"], tuple(atom["shape"])) for key, atom in atoms.items()})
    while True:
        chain = chain_of(base, journal, target)
        if continuing:
            _end_before_feedback(chain)
        script.check(chain.progress)
        state.forget_optimizer_state()
        for tensors in _loaded(store, base):
            state.load(tensors)
        state.load_values(base.progress["values"])
        try:
            _replay(store, state, chain, atoms, after_update)
        except _Differs as error:
            odd.append(str(error))
            target = chain.records[-1].step - 1
            continue
        return chain


def _end_before_feedback(chain: Chain) -> None:
    """Leave out the records after the base from the first on that changed residuals, which it does not hold."""
    for number, record in enumerate(chain.records):
        if record.step > chain.base.step and uses_feedback(record.about):
            del chain.records[number:]
            chain.odd = None
            return


def uses_feedback(about: dict[str, Any]) -> bool:
    """Whether the step of a record changed residuals."""
    return any(update.get("codec", {}).get("feedback") for update in about["updates"])


def _loaded(store: LocalStore, base: Manifest) -> Iterator[dict[str, torch.Tensor]]:
    """The verified tensors of each file of ``base``, whose memory is used again for the next but one."""
    queue = store.queue
    files = list(base.files.values())
    buffers = [Buffer(max(file.bytes for file in files), "recovery") for _ in range(2)]
    try:
        futures = []
        for number in range(len(files) + 1):
            if number < len(files):
                view = buffers[number % 2].view[: files[number].bytes]
                futures.append((view, read_file(store.disk, queue, files[number], view)))
            if number:
                view, future = futures[number - 1]
                future.result()
                yield tensors_of(view)
    finally:
        for _, future in futures:
            future.exception()
        for buffer in buffers:
            buffer.free()


def _replay(
    store: LocalStore,
    state: LiveState,
    chain: Chain,
    atoms: dict[str, Any],
    after_update: Callable[[], None] | None,
) -> None:
    """Do the steps of ``chain``, which is cut where a record does not verify."""
    of_step = {
        BUFFERS if atom["slot"] == "buffer" else atom["name"]: chain.base.files[
            atom["fragments"][0]["unit"]
        ].step
        for atom in atoms.values()
        if atom["slot"] != RESIDUAL  # always of the commit's own step
    }
    done = 0
    try:
        for record, parts in payloads(store.disk, store.queue, chain.records):
            skipped = [o for o, step in of_step.items() if step is not None and step >= record.step]
            if record.step <= chain.base.step:  # what is of the commit's own step is ahead as well
                skipped += [o for o, step in of_step.items() if step is None]
            apply(state, record.about, parts, skipped=frozenset(skipped), after_update=after_update)
            done += 1
            if record.step >= chain.base.step and record.about["fingerprint"] != fingerprint(
                state, record.step
            ):
                del chain.records[done:]
                raise _Differs(
                    f"replaying step {record.step} did not give what training had. The run continues after step"
                    f" {record.step - 1}."
                )
    except Damaged as error:
        if chain.base.oldest_step + done < chain.base.step:
            raise
        del chain.records[done:]
        chain.odd = error
