"""Sources to begin from: a run, a step that its records lead to, or a state of another library."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from .delta.loop import Loop
from .delta.recovery import recover, refuse_unless_one_is_whole
from .errors import BadInput
from .opening import source_of
from .ranks import Ranks
from .regular import home_path
from .state.boxes import Box
from .state.capture import Captured, buffer_at
from .state.dtypes import TO_NAME
from .state.encoding import decode
from .store.local import LocalStore
from .store.target import Target, Url
from .universal import packs
from .universal.checking import refuse_unequal
from .universal.dividing import Need, divided
from .universal.hyper import kept_by, set_hyper_parameters
from .universal.load import check_all
from .universal.matching import Allowed, Form, Match, match
from .universal.restore import needs_of, read_tensors, restore
from .universal.ruled import UnderRules
from .universal.source import Source, Stored

NOT_ALL_GROUPS = "it does not say the hyper-parameters of all groups; the optimizer's stay"
NO_RANDOM = "it has no random numbers; the script's go on as they are: state-exact, not continuation-exact"
"""Told of a source."""


@dataclass(frozen=True)
class From(Allowed):
    """The state at ``path``, of whatever format, to begin from: RUN, RUN@STEP, or what another library wrote.

    ``rename`` gives the names in it by regular expressions over names here, the first that matches in full.
    ``partial`` leaves what it does not have as it is, and what is not wanted of it unread. ``cast`` converts
    floating-point tensors of another type. ``rules``, a file or a pack, makes other tensors of it first; ``values`` is
    a JSON file with numbers that they name and it does not say itself, such as a config.json. What came of these is
    told in warnings.
    """

    path: str | Path
    rules: str | Path | None = None
    values: str | Path | None = None

    @property
    def plain(self) -> bool:
        """Nothing but the very state will do."""
        return self == From(self.path)

    def source(self) -> Source:
        """Raises as ``source_of``; ``RuleError`` if the rules do not fit."""
        found = source_of(str(self.path))
        if self.rules is None:
            return found
        values = None if self.values is None else home_path(self.values)
        return UnderRules(found, packs.find(str(self.rules), values, found.numbers))

    @property
    def place(self) -> Path | None:
        """Where it lies, None if on no disk."""
        path = Target.parse(str(self.path)).run
        return None if isinstance(path, Url) else path

    def open(self) -> Beginning:
        """Raises as ``source``."""
        return Beginning(self.source(), self, self.place)


class Beginning:
    """A state that a fresh run of ``offload`` begins from."""

    fresh = False
    """A run begins with it: what only a run that went on would have is not missed."""

    def __init__(self, source: Source, allowed: Allowed, place: Path | None) -> None:
        """``source`` lies at ``place`` (None: on no disk)."""
        self._source, self._allowed, self._place, self._match = source, allowed, place, Match()
        self.path = source.path
        self.step: int = source.progress.get("step") or 0
        self.progress = source.progress
        self.kept: dict[str, frozenset[str] | None] = {}

    def match(self, captured: Captured, optimizer: torch.optim.Optimizer) -> list[str]:
        """Raise ``RunMismatch`` unless it is the state of this model and optimizer. What of it is not as it was, for a
        person. ``kept`` are from then on the slots that the optimizer keeps with the hyper-parameters of this state."""
        forms = [
            Form(p.names, p.shape, (TO_NAME[p.parameter.dtype], "F32"), p.trained)
            for p in captured.parameters
        ]
        buffers = {name: buffer_at(place) for name, place in captured.buffers.items()}
        forms += [Form((n,), tuple(b.shape), (TO_NAME[b.dtype],), is_buffer=True) for n, b in buffers.items()]
        trained = {id(p.parameter): p.name for p in captured.parameters if p.trained}

        def keeps(there: Mapping[str, str]) -> Mapping[str, frozenset[str] | None]:
            self.kept = kept_by([optimizer], trained, self.progress, there)
            return self.kept

        self._match = match(forms, self._source, self._allowed, keeps=keeps)
        return told_of(self._match, self._source)

    def check(self, ranks: Ranks) -> None:
        """Read, between all ranks, what was matched. Raises ``Damaged`` on all if it is not as it was written."""
        found = [each for slots in self._match.found.values() for each in slots.values()]
        pieces = [one for each in found for one in each.every]
        parts = {number for one in pieces for number in one.part.tolist()}
        check_between(ranks, self._source, self._place, lambda: (parts, found))

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Of what was matched of a parameter, the shapes of the tensors by slot."""
        return {slot: each.atom.shape for slot, each in self._match.found.get(name, {}).items()}

    def identity(self) -> list[Any]:
        """As that of the source."""
        return self._source.identity()

    def parameter(self, name: str) -> torch.Tensor | None:
        """Whole; None if there is none. Raises ``Damaged``."""
        return self._read(name, {"param"}).get("param")

    def state(self, name: str, boxes: Mapping[str, Box]) -> dict[str, torch.Tensor]:
        """What the optimizer held for a parameter, by slot; of those in ``boxes`` that region."""
        found = self._read(name, self._match.found.get(name, {}).keys() - {"param", "buffer"}, boxes)
        values = self._match.values.get(name, {})
        numbers = {slot: decode(value) for slot, value in values.items() if slot not in found}
        return found | {
            slot: torch.tensor(n) for slot, n in numbers.items() if isinstance(n, (bool, int, float))
        }

    def buffer(self, name: str) -> torch.Tensor | None:
        return self._read(name, {"buffer"}).get("buffer")

    def _read(
        self, name: str, slots: Collection[str], boxes: Mapping[str, Box] = MappingProxyType({})
    ) -> dict[str, torch.Tensor]:
        there = {slot: each for slot, each in self._match.found.get(name, {}).items() if slot in slots}
        wanted = [(each, boxes.get(slot, Box.whole(each.atom.shape))) for slot, each in there.items()]
        return dict(zip(there, read_tensors(self._source, wanted), strict=True))

    def set_hyper_parameters(self, groups: list[dict[str, Any]], names: list[list[str]]) -> bool:
        """Whether there were those of all groups."""
        return set_hyper_parameters(groups, self._match.in_source(names), self.progress)


def begin_from(start: From, loop: Loop, emit: Callable[..., None]) -> None:
    """Bring ``loop``, on all its ranks, to where ``start`` is, as far as it says; what it does not say is told.

    Raises as ``From.source``, and ``RunMismatch`` if it is of another model; on all ranks alike."""
    ranks, target = loop.ranks, Target.parse(str(start.path))
    if start.plain and ranks.first_does(partial(has_records, target.run)):
        _begin_from_run(target, loop)
        return
    source = opened_alike(start, ranks)
    if not ranks.alone:
        check_between(ranks, source, start.place, partial(needs_of, loop.state, source, start))
    loop.steps_done, told = ranks.all_do(lambda: _bring(loop, source, start))[ranks.rank]
    emit("began_from", path=str(start.path), step=loop.steps_done, told=told)
    for text in told:
        warnings.warn(f"beginning from {text}", stacklevel=4)


def opened_alike(start: From, ranks: Ranks) -> Source:
    """What ``start`` names, the same on all ranks. Raises as ``From.source``, on all alike."""
    opened: list[Source] = []

    def look() -> str:
        opened.append(start.source())
        return opened[0].path

    if len(several := sorted(set(ranks.all_do(look)))) > 1:
        raise BadInput(
            f"the ranks would begin from different states, as one was made meanwhile: {', '.join(several)}."
            " Say which: RUN@STEP."
        )
    return opened[0]


def check_between(
    ranks: Ranks,
    source: Source,
    path: Path | None,
    need: Callable[[], tuple[Iterable[int], Iterable[Stored]]],
) -> None:
    """Check between all ranks, before any of them is changed, what they will take of ``source``, which lies at ``path``
    (None: on no disk): of each, ``need`` says the parts and the atoms."""
    wanted = list[Stored]()

    def told() -> Need:
        parts, stored = need()
        wanted.extend(stored)
        return Need.of(source, path, parts)

    mine, checked = divided(ranks.all_do(told), ranks.rank, source)
    ranks.all_do(partial(check_all, source, mine))
    source.trust(checked)
    ranks.all_do(partial(refuse_unequal, source, wanted))


def _begin_from_run(target: Target, loop: Loop) -> None:
    """By what another run has recorded."""
    with LocalStore(target.run) as store:
        loop.ranks.first_does(partial(refuse_unless_one_is_whole, store, target.step, target.timeline))
        found = recover(
            store, loop.state, loop.script, ranks=loop.ranks, target=target.step, tip=target.timeline,
            exact=target.step is not None, after_update=loop.update_again,
        )  # fmt: skip
    loop.go_on(found)


def _bring(loop: Loop, source: Source, allowed: Allowed) -> tuple[int, list[str]]:
    """The step that ``source`` is at, and what of it is not as it was, for a person."""
    script, ranks = loop.script, loop.ranks
    script.check_place(source.progress, ranks.world_size)
    found, complete = restore(loop.state, source, allowed)
    about = told_of(found, source) + script.adopt(source.progress, ranks.rank)
    if not complete:
        about.append(NOT_ALL_GROUPS)
    step = source.progress.get("step") or 0
    if step and "random" not in source.progress:  # what is of no step begins a training
        loop.exactness = "state"
        about.append(NO_RANDOM)
    return step, [f"{source.path} ({source.format}): {text}" for text in about]


def told_of(found: Match, source: Source) -> list[str]:
    """What is not as ``source`` has it, for a person."""
    if not source.unread:
        return found.told()
    beside = (
        f"its weights alone are read, and not {', '.join(source.unread)}: the optimizer's state begins anew"
    )
    return [*replace(found, without_state=[]).told(), beside]


def has_records(path: Path | Url) -> bool:
    """Whether in ``path`` there is a run of a Checkpointer."""
    if not isinstance(path, Url) and not (path / "commits").is_dir():
        return False
    head = LocalStore.read(path).head()
    return head is not None and "optimizers" in head.progress_of(head.streams[0])
