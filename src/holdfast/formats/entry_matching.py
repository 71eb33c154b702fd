"""The matching of tensors between a source and a model, and the tensors of either that are left over.

Names, shapes and dtypes must agree, unless the caller allows a difference by name. A source of another model is refused
with the first tensors that differ. Called by ``restore`` and by writers that name tensors after a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..errors import BadInput, RunMismatch
from ..quantities import shown
from ..state.tensor_entries import CARRIED, FLOATS, SEED, STEP, quantised_in
from .source import Source, SourceTensor

Group = tuple[dict[str, Any], list[str]]
"""The hyper-parameters of a parameter group, and the names of its parameters."""


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """Differences between source and model that the caller allows.

    ``rename`` maps full names here to names in the source by regular expressions; the first match counts. ``partial``
    leaves unchanged what the source lacks, and unread what the model does not want. ``cast`` converts floating-point
    tensors of another dtype.
    """

    rename: Mapping[str, str] = field(default_factory=dict)
    partial: bool = False
    cast: bool = False


class ExpectedTensor(NamedTuple):
    """A tensor of the model: all its names, its global shape, and the dtypes that a source may store unconverted."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    trained: bool = False
    is_buffer: bool = False


@dataclass
class Match:
    """The result of matching; ``found`` holds the source's tensors by slot, by name here.

    The lists hold names: ``missing`` is what the source lacks, ``unused`` what nothing here wants, ``cast`` what is
    converted, ``without_state`` the trained parameters whose optimizer state begins anew.
    """

    found: dict[str, dict[str, SourceTensor]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    without_state: list[str] = field(default_factory=list)
    never_updated: list[str] = field(default_factory=list)
    """Parameters without optimizer state in a source whose optimizer does list them."""
    names: dict[str, str] = field(default_factory=dict)
    """The name in the source, by name here."""
    left: list[str] = field(default_factory=list)
    """Tensors that are of use in the source's own run alone: residuals of error feedback."""
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Optimizer values that are no tensors, as JSON: by name here, then by slot."""
    nested: dict[str, list[str]] = field(default_factory=dict)
    """Slots that are elements of lists and dictionaries and must be rebuilt, by name here."""
    apart: set[str] = field(default_factory=set)
    """Names here of parameters whose nested optimizer state cannot be rebuilt."""
    another: dict[str, str] = field(default_factory=dict)
    """The difference of optimizer state that is of another kind, by name here."""

    def differences(self) -> list[str]:
        """Return one message for each difference from the source."""
        found = []
        if self.missing:
            found.append(f"it has no {shown(self.missing)}, which stay as they are")
        if self.unused:
            found.append(f"nothing here wants its {shown(self.unused)}")
        if self.cast:
            found.append(f"{shown(self.cast)} were converted to another type")
        if self.left:
            found.append(f"its {shown(self.left)} are left, so error feedback begins anew")
        if self.without_state:
            found.append(f"it has no optimizer state of {shown(self.without_state)}, which begins anew")
        if self.never_updated:
            found.append(
                f"its optimizer had not updated {shown(self.never_updated)} yet, and has no state of them"
            )
        if self.another:
            names = shown(self.another)
            found.append(f"its optimizer state of {names} is of another kind of optimizer, and begins anew")
        return found

    def in_source(self, groups: list[list[str]]) -> list[list[str]]:
        """Return the names in the source for the names of ``groups``; empty where the optimizer was of another kind."""
        return [
            ["" if name in self.another else self.names.get(name, name) for name in names] for names in groups
        ]


Keeps = Callable[[Mapping[str, str]], Mapping[str, frozenset[str] | None]]
"""A function from the source's names, by name here, to the slots that optimizers keep; None for unknown."""


def match(
    forms: Iterable[ExpectedTensor],
    source: Source,
    allowed: Allowed,
    elsewhere: Collection[str] = (),
    keeps: Keeps = lambda names: {},
) -> Match:
    """Find the tensors of ``forms`` in ``source``. Raises ``RunMismatch`` on any difference that is not allowed.

    Args:
        forms: The tensors of this rank's model.
        source: The source to search.
        allowed: Differences to accept.
        elsewhere: Names that other pipeline stages hold; they count as used.
        keeps: Return the slots that optimizers keep.
    """
    forms = list(forms)
    held, result = _Held(source), Match()
    result.left = [key for key, stored in source.atoms.items() if stored.atom.slot in CARRIED]
    wanted = [*(form.names for form in forms), *((name,) for name in elsewhere)]
    allowed = _with_module(wanted, held.by_name, allowed)
    places = {form.names[0]: _there(form.names, held.by_name, allowed) for form in forms}
    result.names = {name: held.tied.get(there, there) for name, there in places.items() if there is not None}
    kept = keeps(result.names)
    for form in forms:
        name = form.names[0]
        if name not in result.names:
            result.missing.append(name)
            continue
        there = result.names[name]  # the optimizer's name of it
        main, others = held.take(there, form.is_buffer)
        _compare(form, main, allowed, result)
        main = held.with_copies(main, {_renamed(each, allowed) for each in form.names})
        if form.is_buffer:
            result.found[name] = {"buffer": main}
        elif not form.trained:
            result.unused += [f"{there}/{slot}" for slot in others]
            result.found[name] = {"param": main}
        else:
            values, lacking = source.progress.get("values", {}).get(there, {}), held.lacking(there, result)
            result.found[name] = _state(
                name, {"param": main, **others}, values, kept.get(name), lacking, result
            )
    for name in held.by_name.keys() & {_renamed(name, allowed) for name in elsewhere}:
        held.use(name)
    result.unused += [name for name in held.by_name if name not in held.used]
    _find_nested(source, result)
    _refuse(source, result, allowed, held.weights_only)
    return result


class _Held:
    """The tensors of a source by name and slot, without those that only continue the source's own run.

    All names of a tied tensor lead to the tensors of the first, by ``tied``. ``used`` holds the names that something
    here wants.
    """

    def __init__(self, source: Source) -> None:
        self.by_name: dict[str, dict[str, SourceTensor]] = {}
        for stored in source.atoms.values():
            if stored.atom.slot not in CARRIED:
                self.by_name.setdefault(stored.atom.name, {})[stored.atom.slot] = stored
        self.tied = {alias: name for alias, name in source.aliases.items() if name in self.by_name}
        self.by_name |= {alias: self.by_name[name] for alias, name in self.tied.items()}
        self.weights_only = all(slots.keys() <= {"param", "buffer"} for slots in self.by_name.values())
        self.used: set[str] = set()
        self._same: dict[int, set[str]] = {}
        for name, slots in self.by_name.items():
            self._same.setdefault(id(slots), set()).add(name)
        self._grouped = {name for _, names in groups_of(source.progress) for name in names}
        self._is_fresh = self.weights_only and bool(source.progress.get("groups"))

    def use(self, name: str) -> dict[str, SourceTensor]:
        """Return the tensors of ``name`` by slot and mark all names of these tensors as used."""
        slots = self.by_name[name]
        self.used |= self._same[id(slots)]
        return dict(slots)

    def take(self, name: str, is_buffer: bool) -> tuple[SourceTensor, dict[str, SourceTensor]]:
        """Return the parameter or buffer ``name`` and its other tensors by slot, and mark them as used."""
        slots = self.use(name)
        kinds = ("buffer", "param") if is_buffer else ("param", "buffer")  # some formats go by dtype
        return slots.pop(next(kind for kind in kinds if kind in slots)), slots

    def with_copies(self, main: SourceTensor, names: set[str]) -> SourceTensor:
        """Return ``main`` with copies stored under others of its ``names``, as some formats store a tied tensor."""
        for name in names & self.by_name.keys() - self.used:
            copy = self.by_name[name].get("param")
            if copy is not None and _alike(copy, main):
                main = replace(main, copies=(*main.copies, copy.pieces))
                self.used.add(name)
        return main

    def lacking(self, name: str, result: Match) -> list[str] | None:
        """Return the list of ``result`` for a parameter without optimizer state; None where none is expected."""
        if self._is_fresh:
            return None
        return result.never_updated if name in self._grouped else result.without_state


def _state(
    name: str,
    slots: dict[str, SourceTensor],
    values: Mapping[str, Any],
    kept: frozenset[str] | None,
    lacking: list[str] | None,
    result: Match,
) -> dict[str, SourceTensor]:
    """Return the tensors of a parameter that its optimizer keeps, and note the rest in ``result``.

    Args:
        name: The parameter here.
        slots: The source's tensors of the parameter, by slot.
        values: The optimizer's values that are no tensors, by slot.
        kept: The slots that the optimizer here keeps; None for unknown.
        lacking: The list that gets ``name`` if the source has no state of it; None if none is expected.
        result: The match to update.
    """
    held = {slot: value for slot, value in values.items() if value is not None or "." in slot}
    there = (slots.keys() | held.keys()) - {"param"}
    if not there:
        if kept != frozenset() and lacking is not None:
            lacking.append(name)
    elif kept is not None and quantised_in(held):
        result.another[name] = (
            f"of {name} it has what torchao quantised, and the one here keeps numbers in full"
        )
        return {"param": slots["param"]}
    elif kept is not None:
        more, less = there - kept - {STEP}, kept - there  # an engine counts the steps of every optimizer
        unstepped = SEED in kept and there <= {STEP, SEED}
        if (less and not unstepped) or (more and not kept):
            ours = ", ".join(sorted(kept)) or "nothing"
            result.another[name] = (
                f"of {name} it has {', '.join(sorted(there))}, and the one here keeps {ours}"
            )
            return {"param": slots["param"]}
        result.unused += [f"{name}/{slot}" for slot in sorted(more)]
    wanted = there if kept is None else there & kept
    if held.keys() & wanted:
        result.values[name] = {slot: value for slot, value in held.items() if slot in wanted}
    return {slot: stored for slot, stored in slots.items() if slot in wanted or slot == "param"}


def refuse_quantised(source: Source, library: str) -> None:
    """Raise ``BadInput`` for optimizer state in parts, of which ``library`` cannot make what it was."""
    for name, values in (source.progress.get("values") or {}).items():
        if quantised_in(values):
            raise BadInput(
                f"the optimizer state of {name} in {source.path} was quantised by torchao, and {library} could not load"
                " its parts. Write --to holdfast or safetensors, or the weights alone --to huggingface; or resume the"
                " run and save what the script holds."
            )


def _find_nested(source: Source, result: Match) -> None:
    """Note which found state is nested: slots with a dot, except those of a run.

    Nested state can be rebuilt only if nothing is lost, and torch drops empty containers when it flattens.
    """
    for name in result.found if "replay" not in source.progress else ():
        slots = {**result.found[name], **result.values.get(name, {})}
        whole = quantised_in(slots)
        slots = [slot for slot in slots if "." in slot or slot in source.unnested]
        slots = [slot for slot in slots if slot.rpartition(".")[0] not in whole]
        odd = sorted(source.unnested & set(slots))
        if slots and source.format == "torch.save" and not odd:
            result.nested[name] = slots
        elif slots:
            of = (odd or slots)[0].partition(".")[0]
            why = "by keys that are no names" if odd else "which is only taken from torch.save"
            result.apart.add(name)
            result.another[name] = f"of {name} it has nested state ({of}), {why}"
            result.found[name] = {"param": result.found[name]["param"]}
            result.values.pop(name, None)


def groups_by_optimizer(progress: Mapping[str, Any]) -> list[list[Group]]:
    """Return the parameter groups of each optimizer of a source."""
    groups, names = progress.get("groups", []), progress.get("group_parameters")
    if names is None and "replay" in progress:  # written by a Checkpointer
        pairs = zip(groups, progress["replay"]["parameters"], strict=True)
        return [list(zip(*each, strict=True)) for each in pairs]
    found = list(zip(groups, names or [], strict=False))
    return [found] if found else []


def groups_of(progress: Mapping[str, Any]) -> list[Group]:
    """Return the parameter groups of all optimizers of a source."""
    return [group for each in groups_by_optimizer(progress) for group in each]


def _alike(one: SourceTensor, other: SourceTensor) -> bool:
    return (one.atom.shape, one.atom.dtype) == (other.atom.shape, other.atom.dtype)


def _there(names: tuple[str, ...], by_name: Mapping[str, Any], allowed: Allowed) -> str | None:
    """Return the name in the source of the tensor that has ``names`` here."""
    for name in (_renamed(name, allowed) for name in names):
        if name in by_name and by_name[name].keys() & {"param", "buffer"}:
            return name
    return None


def _with_module(wanted: list[tuple[str, ...]], by_name: Mapping[str, Any], allowed: Allowed) -> Allowed:
    """Return ``allowed`` with a rename that adds or removes ``module.``, where no name matches without one.

    Wrappers add ``module.``, and a model may call its only child so. ``wanted`` holds the names of all tensors of the
    whole model, so that all ranks decide alike.
    """
    for rename in ({}, {r"module\.(.*)": r"\1"}, {"(.*)": r"module.\1"}) if not allowed.rename else ():
        each = replace(allowed, rename=rename)
        if any(_there(names, by_name, each) for names in wanted):
            return each
    return allowed


def _renamed(name: str, allowed: Allowed) -> str:
    """Return the name that ``name`` has in the source, if the source has it."""
    for pattern, replacement in allowed.rename.items():
        if found := re.fullmatch(pattern, name):
            return found.expand(replacement)
    return name


def _compare(form: ExpectedTensor, stored: SourceTensor, allowed: Allowed, result: Match) -> None:
    """Raise ``RunMismatch`` if ``stored`` has another shape or dtype; note a conversion in ``result``."""
    name, atom = form.names[0], stored.atom
    if atom.shape != form.shape:
        raise RunMismatch(
            f"{name} is {list(atom.shape)} in the source and {list(form.shape)} here. Build the model as it was."
        )
    if atom.dtype in form.dtypes:
        return
    if not (allowed.cast and atom.dtype in FLOATS and form.dtypes[0] in FLOATS):
        raise RunMismatch(
            f"{name} is {atom.dtype} in the source and {form.dtypes[0]} here. Pass cast=True to convert floating-point"
            " tensors, or build the model in that type."
        )
    result.cast.append(name)


def _refuse(source: Source, result: Match, allowed: Allowed, weights_only: bool) -> None:
    if result.another and not allowed.partial and result.another.keys() == result.apart:
        raise RunMismatch(
            f"{source.path} has state of its optimizer that cannot be put together again:"
            f" {shown(result.another.values())}. Begin from the file of torch.save, if it was made of one whose"
            " state has keys that are names, or give holdfast.From(..., partial=True) to begin the optimizer's state"
            " anew."
        )
    if result.another and not allowed.partial:
        of = source.progress.get("optimizers") or [source.progress.get("optimizer")]
        kind = f" ({' and '.join(map(str, of))})" if of != [None] else ""
        raise RunMismatch(
            f"{source.path} is of another kind of optimizer{kind}: {shown(result.another.values())}. Give the"
            " optimizer that it was made with, or holdfast.From(..., partial=True) to begin the optimizer's state anew."
        )
    odd = [f"it has no {name}" for name in result.missing] + [
        f"nothing here wants its {n}" for n in result.unused
    ]
    if not weights_only:
        odd += [f"it has no optimizer state of {name}" for name in result.without_state]
    if odd and not allowed.partial:
        by_number = any(re.search(r"(^|\.)state\.\d+(\.|$)", name) for name in result.unused)
        names = " Its optimizer knows parameters by numbers, which do not tell here which they are: save it with names,"
        names += (
            " by param_names in its groups (an optimizer of named_parameters() has them) or get_state_dict."
        )
        raise RunMismatch(
            f"{source.path} is not the state of this model: {shown(odd)}.{names if by_number else ''} Build model and"
            " optimizers as they were, give rename= for other names, or partial=True to take what there is."
        )
