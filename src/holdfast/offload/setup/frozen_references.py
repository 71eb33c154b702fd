"""The choice of frozen files that are read from the folder of a pretrained model, instead of being copied.

A frozen file can be referenced if each of its tensors lies in the folder with the bytes that a copy would have: in the
same dtype, as one tensor of the same elements, and whole on one process. Others are copied, with one warning. A resume
may name another folder with the same weights, since checksums of the run's commits decide. Called by ``offload``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ...errors import Damaged, FileMissing, NoCommit
from ...quantities import shown
from ...store.disk import Disk, reference_at
from ...store.format.manifest import HOME, REFERENCE, FileRef
from ...store.format.reference_files import WAYS_OUT, PlacedArray, Reference
from ...store.run_store import LocalStore
from ..model.model_parts import ModelParts

Places = Mapping[str, PlacedArray]
"""The place of each frozen parameter in a folder, by the key of its tensor entry."""


def frozen_references(
    source: Any, parts: ModelParts, store: LocalStore, *, alone: bool
) -> dict[str, Reference]:
    """Return the references of the run, by the name of the file that each stands for.

    ``source`` decides if it is of a folder; without one, a resumed run goes on as it is. Until the files of the run say
    the same, this process reads what commits name as references from where these say. Writes nothing. Raises
    ``Damaged`` if the run's folder has changed, or a reference is damaged, and ``source`` is of no folder.
    """
    there, lost = _in_run(store)
    is_folder = hasattr(source, "places")
    wanted = bool(source.reference) if is_folder else bool(there)
    if not isinstance(store.disk, Disk) or not (there or lost or wanted):
        return {}
    if lost and not is_folder:
        raise lost[0]
    is_given = is_folder and (wanted or bool(lost))
    places = _places_of(source, parts, bool(lost or there)) if is_given else _places_in(there)
    found: dict[str, Reference] = {}
    files = [file for unit in parts.all_units for file in unit.frozen_files]
    for file in files if wanted and alone else ():
        reference = Reference.of(file.layout, places)
        if reference is not None:
            found[file.name] = reference
    for path, held in there.items():
        moved = Reference.of(held.layout, places)
        if moved is not None:
            store.disk.references[path] = moved
    store.disk.references |= {f"{HOME}/{name}.0{REFERENCE}": each for name, each in found.items()}
    _warn_of_copies(parts, found, {each.folder for each in there.values()}, wanted=wanted, alone=alone)
    return found


def _warn_of_copies(
    parts: ModelParts, found: Mapping[str, Reference], before: set[str], *, wanted: bool, alone: bool
) -> None:
    """Warn about the frozen weights that are copied although they could be, or were, read from a folder."""
    copied = [
        unit.name for unit in parts.all_units if any(file.name not in found for file in unit.frozen_files)
    ]
    if not copied:
        return
    if alone and not wanted:
        warnings.warn(
            f"the frozen weights that the run read from {shown(before, 1)} are copied into it: pass"
            " holdfast.pretrained(FOLDER, reference=True) as source= to leave them there",
            stacklevel=4,
        )
        return
    why = (
        "the folder has them in another dtype or form, as experts one by one"
        if alone
        else "each of several ranks keeps its own part"
    )
    warnings.warn(f"frozen weights of {shown(copied)} are copied into the run: {why}", stacklevel=4)


def _places_of(source: Any, parts: ModelParts, is_resumed: bool) -> Places:
    """Return where the folder of ``source`` has each frozen parameter that it has as it is.

    Raises ``FileMissing`` if the folder is not whole and the run that ``is_resumed`` has references.
    """
    try:
        by_id: Mapping[int, PlacedArray] = source.places()
    except Damaged as error:
        if not is_resumed:
            raise
        raise FileMissing(
            f"the run reads frozen weights from a folder, and that of source= is not whole: {error}. {WAYS_OUT}",
            path=error.path,
        ) from error
    frozen = [each for each in parts.captured.parameters if not each.trained]
    known = {f"{each.name}/param": by_id.get(id(each.parameter)) for each in frozen}
    return {key: place for key, place in known.items() if place is not None}


def _places_in(there: Mapping[str, Reference]) -> Places:
    """Return where the references of a run say that each parameter lies."""
    found: dict[str, PlacedArray] = {}
    for reference in there.values():
        found |= reference.places()
    return found


def _in_run(store: LocalStore) -> tuple[dict[str, Reference], list[Damaged]]:
    """Return the references of the newest readable commit, by path, and why some cannot be used."""
    found: dict[str, Reference] = {}
    lost: list[Damaged] = []
    for ref in store.line():
        with suppress(Damaged, NoCommit):
            named: list[FileRef] = list(store.load(ref).referenced.values())
            for file in named:
                try:
                    found[file.path] = reference_at(store.disk, file.path)
                    found[file.path].check(file.path)
                except FileNotFoundError:
                    lost.append(FileMissing(f"{file.path} is missing. {WAYS_OUT}", path=file.path))
                except Damaged as error:
                    lost.append(error)
            break
    return found, lost
