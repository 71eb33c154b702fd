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
from ..state.live import BUFFERS, LiveState
from ..store.chain import Chain, Journal, chain_of, payloads, read_journal
from ..store.local import LocalStore
from ..store.manifest import Manifest, Point
from ..store.reading import read_file
from .replay import apply, fingerprint, tensors_of
from .script import Script
from .watching import Recovery


def recover(
    store: LocalStore,
    state: LiveState,
    script: Script,
    *,
    stream: str,
    target: int | None = None,
    exact: bool = False,
    after_update: Callable[[], None] | None = None,
    watch: Recovery | None = None,
) -> tuple[Point, list[str]]:
    """Bring ``state`` and ``script`` to the newest step that can be had, at most ``target``; just that one if
    ``exact``. Returns the commit or the record that the run continues, and what was wrong with later ones.

    Raises ``NoCommit`` if ``target`` cannot be had, ``Damaged`` if no base is whole, ``RunMismatch`` if the run is that
    of another model (with nothing changed then).
    """
    journal, odd, watch = read_journal(store, stream), [], watch or Recovery()
    bases = [ref for ref in store.line() if target is None or ref.step <= target]
    for ref in bases:
        try:
            base = store.load(ref)
            chain = _replayed(store, state, script, base, journal, target, after_update, odd, watch)
        except Damaged as error:
            store.damaged.add(ref)
            odd.append(str(error))
            continue
        watch.ended()
        if exact and chain.last.step != target:
            raise NoCommit(
                f"{store.root} cannot be brought to step {target}: after step {chain.last.step} the records end."
                f" {chain.odd or 'Nothing was recorded after it.'}"
            )
        if chain.odd is not None:
            odd.append(str(chain.odd))
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
    after_update: Callable[[], None] | None,
    odd: list[str],
    watch: Recovery,
) -> Chain:
    """Load ``base`` and do the steps after it. What ends the chain early is its ``odd``, or in ``odd``."""
    atoms = store.atoms(base)
    state.check({key: (atom["dtype"], tuple(atom["shape"])) for key, atom in atoms.items()})
    while True:
        chain = chain_of(base, journal, target)
        script.check(chain.progress)
        watch.begins(chain)
        state.forget_optimizer_state()
        for tensors, nbytes in _loaded(store, base):
            state.load(tensors)
            watch.loaded(nbytes)
        state.load_values(base.progress["values"])
        try:
            _replay(store, state, chain, atoms, after_update, watch)
        except _Differs as error:
            odd.append(str(error))
            target = chain.records[-1].step - 1
            continue
        return chain


def _loaded(store: LocalStore, base: Manifest) -> Iterator[tuple[dict[str, torch.Tensor], int]]:
    """The verified tensors of each file of ``base``, and its bytes, whose memory is used again for the next but one."""
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
                yield tensors_of(view), len(view)
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
    watch: Recovery,
) -> None:
    """Do the steps of ``chain``, which is cut where a record does not verify."""
    of_step = {
        BUFFERS if atom["slot"] == "buffer" else atom["name"]: chain.base.files[
            atom["fragments"][0]["unit"]
        ].step
        for atom in atoms.values()
    }
    done = 0
    try:
        for record, parts in payloads(store.disk, store.queue, chain.records):
            skipped = [o for o, step in of_step.items() if step is not None and step >= record.step]
            if record.step <= chain.base.step:  # what is of the commit's own step is ahead as well
                skipped += [o for o, step in of_step.items() if step is None]
            apply(state, record.about, parts, skipped=frozenset(skipped), after_update=after_update)
            done += 1
            watch.replayed(record)
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
