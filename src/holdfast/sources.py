"""The starting points of a training: a run, a step replayed from its log, or a checkpoint of another library.

All ranks must name the same state, and what they will read is verified before any rank is changed. Ranks that see the
same files on one machine check each part once between them: a part that one has read lies in the page cache of all.
What a source lacks is reported in warnings. Called by ``Checkpointer``, ``offload`` and the integrations.
"""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .checkpoint.recovery.run_recovery import recover, require_intact_snapshot
from .checkpoint.training_state import TrainingState
from .distributed import BOOT, Ranks
from .errors import BadInput
from .formats import packs
from .formats.entry_keys import unwrapped
from .formats.entry_matching import Allowed, ExpectedTensor, Match, match
from .formats.load import check_all, refuse_unequal
from .formats.restore import kept_by, needs_of, read_tensors, restore, set_hyper_parameters
from .formats.rules_source import UnderRules
from .formats.source import Source, SourceTensor
from .opening import is_weights_alone, source_of
from .regular_files import home_path
from .state.capture import Captured, buffer_at
from .state.encoding import decode
from .state.layout.regions import Region
from .state.plain_tensors import TO_NAME
from .store.object_store import NamedCommit, Url
from .store.run_store import LocalStore

NOT_ALL_GROUPS = "it does not say the hyper-parameters of all groups; the optimizer's stay"
NO_RANDOM = "it has no random numbers; the script's go on as they are: state-exact, not continuation-exact"
"""Warnings about what a source lacks."""


@dataclass(frozen=True)
class From(Allowed):
    """The state at ``path``, of any format, to begin from: RUN, RUN@STEP, or what another library wrote.

    ``rename`` maps full names here to names in the source by regular expressions; the first match counts. ``partial``
    leaves unchanged what the source lacks, and unread what the model does not want. ``cast`` converts floating-point
    tensors of another dtype. ``rules``, a file or a pack, transforms the tensors first; ``values`` is a JSON file, such
    as a config.json, with numbers that rules name and the source lacks. The effects are reported in warnings.
    """

    path: str | Path
    rules: str | Path | None = None
    values: str | Path | None = None

    @property
    def plain(self) -> bool:
        """True if nothing but the exact state is accepted."""
        return self == From(self.path)

    def source(self) -> Source:
        """Open the source. Raises as ``source_of``, and ``RuleError`` if the rules do not fit."""
        found = source_of(str(self.path))
        if self.rules is None:
            return found
        values = None if self.values is None else home_path(self.values)
        return UnderRules(found, packs.find(str(self.rules), values, found.numbers))

    @property
    def place(self) -> Path | None:
        """The path of the source; None if it is on no disk."""
        path = NamedCommit.parse(str(self.path)).run
        return None if isinstance(path, Url) else path

    def open(self) -> OpenedSource:
        """Open the source for ``offload``. Raises as ``source``."""
        return OpenedSource(self.source(), self, self.place)


class OpenedSource:
    """A state from which a fresh run of ``offload`` begins."""

    fresh = False
    """False: a run begins with this state, so facts that only a continued run has may be missing."""

    def __init__(self, source: Source, allowed: Allowed, place: Path | None) -> None:
        """Wrap ``source``, which lies at ``place`` (None: on no disk)."""
        self._source, self._allowed, self._place, self._match = source, allowed, place, Match()
        self.path = source.path
        self.step: int = source.progress.get("step") or 0
        self.progress = source.progress
        self.kept: dict[str, frozenset[str] | None] = {}

    def match(self, captured: Captured, optimizer: torch.optim.Optimizer) -> list[str]:
        """Match the state with a model and its optimizer; return a message for each difference.

        Afterwards ``kept`` has the slots that the optimizer keeps under the hyper-parameters of this state. Raises
        ``RunMismatch`` unless it is their state.
        """
        forms = [
            ExpectedTensor(p.names, p.shape, (TO_NAME[p.parameter.dtype], "F32"), p.trained)
            for p in captured.parameters
        ]
        buffers = {name: buffer_at(place) for name, place in captured.buffers.items()}
        forms += [
            ExpectedTensor((n,), tuple(b.shape), (TO_NAME[b.dtype],), is_buffer=True)
            for n, b in buffers.items()
        ]
        trained = {id(p.parameter): p.name for p in captured.parameters if p.trained}

        def keeps(there: Mapping[str, str]) -> Mapping[str, frozenset[str] | None]:
            self.kept = kept_by([optimizer], trained, self.progress, there)
            return self.kept

        self._match = match(forms, self._source, self._allowed, keeps=keeps)
        return differences_from(self._match, self._source)

    def check(self, ranks: Ranks) -> None:
        """Verify what was matched, divided over all ranks. Raises ``Damaged`` on all ranks.

        Collective: every rank must call this.
        """
        found = [each for slots in self._match.found.values() for each in slots.values()]
        pieces = [one for each in found for one in each.every]
        parts = {number for one in pieces for number in one.part.tolist()}
        check_between(ranks, self._source, self._place, lambda: (parts, found))

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a parameter's matched tensors, by slot."""
        return {slot: each.atom.shape for slot, each in self._match.found.get(name, {}).items()}

    def identity(self) -> list[Any]:
        """Return the identity of the source."""
        return self._source.identity()

    def parameter(self, name: str) -> torch.Tensor | None:
        """Return a whole parameter; None if the source has none. Raises ``Damaged``."""
        return self._read(name, {"param"}).get("param")

    def state(self, name: str, boxes: Mapping[str, Region]) -> dict[str, torch.Tensor]:
        """Return the optimizer state of a parameter, by slot; for slots in ``boxes`` only that region."""
        found = self._read(name, self._match.found.get(name, {}).keys() - {"param", "buffer"}, boxes)
        values = self._match.values.get(name, {})
        numbers = {slot: decode(value) for slot, value in values.items() if slot not in found}
        return found | {
            slot: torch.tensor(n, device="cpu")
            for slot, n in numbers.items()
            if isinstance(n, (bool, int, float))
        }

    def buffer(self, name: str) -> torch.Tensor | None:
        return self._read(name, {"buffer"}).get("buffer")

    def _read(
        self, name: str, slots: Collection[str], boxes: Mapping[str, Region] = MappingProxyType({})
    ) -> dict[str, torch.Tensor]:
        there = {slot: each for slot, each in self._match.found.get(name, {}).items() if slot in slots}
        wanted = [(each, boxes.get(slot, Region.whole(each.atom.shape))) for slot, each in there.items()]
        return dict(zip(there, read_tensors(self._source, wanted), strict=True))

    def set_hyper_parameters(self, groups: list[dict[str, Any]], names: list[list[str]]) -> bool:
        """Set the hyper-parameters of ``groups`` and return whether the source had those of all groups."""
        return set_hyper_parameters(groups, self._match.in_source(names), self.progress)


def begin_from(
    start: From, training: TrainingState, emit: Callable[..., None], approximate: bool = False
) -> None:
    """Bring ``loop`` to the state of ``start``; what the source lacks is reported in warnings.

    With ``approximate`` records of another kind of processor are replayed with the arithmetic of this one.

    Collective: every rank must call this. Raises, on all ranks, as ``From.source``, and ``RunMismatch`` if the source
    belongs to another model.
    """
    ranks, target = training.ranks, NamedCommit.parse(str(start.path))
    if start.plain and ranks.first_does(partial(_is_resumable, target)):
        _begin_from_run(target, training, approximate)
        return
    source = opened_alike(start, ranks)
    if start.rules is None and not start.rename:
        source = _on_all(ranks, partial(under_names_of, training.model, source))
    if not ranks.alone:
        check_between(ranks, source, start.place, partial(needs_of, training.state, source, start))
    training.steps_done, differences = ranks.all_do(lambda: _bring(training, source, start))[ranks.rank]
    emit("began_from", path=str(start.path), step=training.steps_done, told=differences)
    for text in differences:
        warnings.warn(f"beginning from {text}", stacklevel=4)


def under_names_of(model: nn.Module, source: Source) -> Source:
    """Return ``source`` under the names that ``model`` has, if it is a folder of Hugging Face under other names.

    transformers stores some models otherwise than it holds them: a mixture of experts by single experts, or under names
    of earlier versions. Its own conversions are applied, as ``from_pretrained`` does. Any other source, and one whose
    names are those of ``model``, is returned unchanged. Raises ``Damaged`` if the folder's tensors do not fit together.
    """
    while isinstance(model, DistributedDataParallel):
        model = model.module
    folder = Path(source.path)
    names = {stored.atom.name for stored in source.atoms.values()}
    parameters = {unwrapped(name): parameter for name, parameter in model.named_parameters()}
    here = parameters | {unwrapped(name): buffer for name, buffer in model.named_buffers()}
    is_of_transformers = hasattr(model, "base_model_prefix") and hasattr(model, "config")
    weights_alone = all(stored.atom.slot in ("param", "buffer") for stored in source.atoms.values())
    if not is_of_transformers or not weights_alone or not (folder / "config.json").is_file():
        return source
    if parameters.keys() <= names:
        return source
    from .formats.naming import by_model  # imported here so that other sources do without transformers

    return by_model(source, model, here)


def opened_alike(start: From, ranks: Ranks) -> Source:
    """Open ``start`` on all ranks and check that all name the same state. Collective: every rank must call this.

    Raises as ``From.source``, on all ranks.
    """
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


def _on_all(ranks: Ranks, make: Callable[[], Source]) -> Source:
    """Return what ``make`` makes on this rank. Collective: every rank must call this. Raises on all ranks."""
    made: list[Source] = []
    ranks.all_do(lambda: made.append(make()))
    return made[0]


def check_between(
    ranks: Ranks,
    source: Source,
    path: Path | None,
    need: Callable[[], tuple[Iterable[int], Iterable[SourceTensor]]],
) -> None:
    """Verify what the ranks will read of ``source``, before any rank is changed.

    Collective: every rank must call this.

    Args:
        ranks: All ranks.
        source: The source.
        path: The path of the source; None if it is on no disk.
        need: Return the parts and the tensors that this rank will read.
    """
    wanted = list[SourceTensor]()

    def needed() -> Need:
        parts, stored = need()
        wanted.extend(stored)
        return Need.of(source, path, parts)

    mine, checked = divided(ranks.all_do(needed), ranks.rank, source)
    ranks.all_do(partial(check_all, source, mine))
    source.trust(checked)
    ranks.all_do(partial(refuse_unequal, source, wanted))


def _begin_from_run(target: NamedCommit, training: TrainingState, approximate: bool) -> None:
    """Begin from what another run has recorded."""
    with LocalStore(target.run) as store:
        training.ranks.first_does(partial(require_intact_snapshot, store, target.step, target.timeline))
        found = recover(
            store, training.state, training.script, ranks=training.ranks, target=target.step, tip=target.timeline,
            exact=target.step is not None, approximate=approximate, after_update=training.update_again,
        )  # fmt: skip
    training.continue_from(found)


def _bring(training: TrainingState, source: Source, allowed: Allowed) -> tuple[int, list[str]]:
    """Restore ``loop``; return the step of ``source`` and a message for each difference."""
    script, ranks = training.script, training.ranks
    script.check_place(source.progress, ranks.world_size)
    found, complete = restore(training.state, source, allowed)
    about = differences_from(found, source) + script.adopt(source.progress, ranks.rank)
    if not complete:
        about.append(NOT_ALL_GROUPS)
    step = source.progress.get("step") or 0
    if step and "random" not in source.progress:  # a source without a step begins a training
        training.exactness = "state"
        about.append(NO_RANDOM)
    return step, [f"{source.path} ({source.format}): {text}" for text in about]


def differences_from(found: Match, source: Source) -> list[str]:
    """Return a message for each difference from ``source``."""
    if not source.unread:
        return found.differences()
    beside = (
        f"its weights alone are read, and not {', '.join(source.unread)}: the optimizer's state begins anew"
    )
    return [*replace(found, without_state=[]).differences(), beside]


def _is_resumable(target: NamedCommit) -> bool:
    """Return whether ``target`` is a step that a Checkpointer recorded, with more than its weights."""
    return has_records(target.run) and not is_weights_alone(target.run, target.step, target.timeline)


def has_records(path: Path | Url) -> bool:
    """Return whether ``path`` holds a run of a Checkpointer."""
    if not isinstance(path, Url) and not (path / "commits").is_dir():
        return False
    head = LocalStore.read(path).head()
    return head is not None and "optimizers" in head.progress_of(head.streams[0])


class Need(NamedTuple):
    """The parts of a source that one rank will read: ``parts`` has one bit for each of ``count`` parts, compressed.

    Ranks with equal ``place`` see the same files on one machine; None means that the place is unknown.
    """

    place: tuple[str, int, int] | None
    count: int
    parts: bytes

    @classmethod
    def of(cls, source: Source, path: Path | None, parts: Iterable[int]) -> Need:
        """Build the need of ``parts``, for a source that lies at ``path`` (None: on no disk)."""
        bits = np.zeros(len(source.parts), dtype=bool)
        bits[list(parts)] = True
        return cls(
            None if path is None else _place_of(path),
            len(bits),
            zlib.compress(np.packbits(bits).tobytes(), 1),
        )


def divided(needs: Sequence[Need], rank: int, source: Source) -> tuple[list[int], list[int]]:
    """Return the parts that ``rank`` checks, and all parts that are checked on its machine.

    Parts are dealt out by size, so that ranks check about equally many bytes.
    """
    mine = needs[rank]
    near = [
        number
        for number, need in enumerate(needs)
        if number == rank or (need.place is not None and need[:2] == mine[:2])
    ]
    bits = np.zeros(-(-mine.count // 8), np.uint8)
    for number in near:
        bits |= np.frombuffer(zlib.decompress(needs[number].parts), np.uint8)
    parts = np.flatnonzero(np.unpackbits(bits, count=mine.count))
    sizes = np.array([source.parts[part].nbytes for part in parts.tolist()], dtype=np.int64)
    parts = parts[np.argsort(-sizes, kind="stable")]
    return np.sort(parts[near.index(rank) :: len(near)]).tolist(), parts.tolist()


def _place_of(path: Path) -> tuple[str, int, int] | None:
    try:
        status = os.stat(path)
        return BOOT.read_text(), status.st_dev, status.st_ino
    except OSError:  # no Linux, or nothing there
        return None
