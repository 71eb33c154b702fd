"""The verb ``diff``: compare two states tensor by tensor, whatever their formats and files are.

Equal means equal bits: -0.0 differs from 0.0, and a NaN equals the same NaN. Where bits differ, the largest difference
of values tells rounding from damage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from rich.markup import escape

from ..formats.load import read_flat
from ..formats.source import Source, SourceTensor
from ..quantities import format_bytes
from ..state.tensor_entries import DTYPE_BYTES, TensorEntry, values_of
from .foreign_states import about, named, passed_over, with_sources
from .output import console, plain_table, print_json, print_table

CHUNK = 1 << 20
"""The elements that are compared at once, which keeps the copies small."""
SHOWN = 20
"""The number of rows that are printed; ``--json`` has all."""


def diff(a: str, b: str, *, as_json: bool) -> bool:
    """Print how the states ``a`` and ``b`` differ, of any formats; return True if they are equal."""
    return with_sources([a, b], partial(_diff, as_json=as_json))


def _diff(a: Source, b: Source, *, as_json: bool) -> bool:
    found = compare(a, b)
    if as_json:
        print_json({"a": about(a), "b": about(b), **found})
    else:
        print(f"a  {named(a)}")
        print(f"b  {named(b)}")
        print_found(found)
        for source in (a, b):
            if source.passed_over:
                print(
                    f"Not compared, since Holdfast has no such type: {passed_over(source)} of {source.path}"
                )
    return found["equal"]


def compare(a: Source, b: Source) -> dict[str, Any]:
    """Return the differences: tensor entries in one source only, of different kinds, and with different bits."""
    pairs = _pairs(a, b)
    different, other_kind, nbytes = [], [], 0
    for key, left, right in pairs:
        kind_a, kind_b = _kind_of(left.atom), _kind_of(right.atom)
        if kind_a != kind_b:
            other_kind.append({"atom": key, "a": kind_a, "b": kind_b})
            continue
        nbytes += left.atom.nbytes
        found = _compare_atoms(a, left, b, right)
        if found["differing"]:
            different.append({"atom": key, **found})
    met = {id(each) for _, *both in pairs for each in both}
    only_a, only_b = ([key for key, stored in x.atoms.items() if id(stored) not in met] for x in (a, b))
    return {
        "equal": not (different or other_kind or only_a or only_b or a.passed_over or b.passed_over),
        "compared": len(pairs) - len(other_kind),
        "bytes": nbytes,
        "different": different,
        "other_kind": other_kind,
        "only_in_a": only_a,
        "only_in_b": only_b,
        "progress": [
            key for key in {**a.progress, **b.progress} if a.progress.get(key) != b.progress.get(key)
        ],
    }


def _pairs(a: Source, b: Source) -> list[tuple[str, SourceTensor, SourceTensor]]:
    """Return the pairs of tensors that both have, by a key of ``a``.

    Tied tensors appear once, under any of their names.
    """
    in_a = _under_all_names(a)
    in_b = _as_in(in_a, _under_all_names(b))
    found: dict[tuple[int, int], tuple[str, SourceTensor, SourceTensor]] = {}
    for key, left in in_a.items():
        if (right := in_b.get(key)) is not None:
            found.setdefault((id(left), id(right)), (key, left, right))
    return [*found.values()]


def _under_all_names(source: Source) -> dict[str, SourceTensor]:
    """Return the tensor entries by key, and also by the keys under other names of tied weights."""
    found, names = dict(source.atoms), {}
    for alias, name in source.aliases.items():
        names.setdefault(name, []).append(alias)
    for stored in source.atoms.values():
        for alias in names.get(stored.atom.name, ()):
            found.setdefault(f"{alias}/{stored.atom.slot}", stored)
    return found


def _as_in(a: Mapping[str, SourceTensor], b: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
    """Return ``b`` under the keys of ``a``, as formats without buffers call them parameters."""
    found = {}
    for key, stored in b.items():
        name, _, slot = key.rpartition("/")
        other = f"{name}/{'buffer' if slot == 'param' else 'param'}"
        swapped = slot in ("param", "buffer") and key not in a and other in a
        found[other if swapped else key] = stored
    return found


def _compare_atoms(a: Source, left: SourceTensor, b: Source, right: SourceTensor) -> dict[str, Any]:
    """Compare two tensors as ``compare_bytes`` does, one chunk at a time."""
    count, largest, atom = 0, 0.0, left.atom
    known = True
    for start in range(0, atom.elements, CHUNK):
        stop = min(start + CHUNK, atom.elements)
        x, y = (
            read_flat(source, stored, start, stop).tobytes() for source, stored in ((a, left), (b, right))
        )
        if x != y:
            found = compare_bytes(x, y, atom.dtype)
            count += found["differing"]
            known = known and found["largest"] is not None
            largest = max(largest, found["largest"] or 0.0)
    return {"elements": atom.elements, "differing": count, "largest": largest if known else None}


def compare_bytes(a: bytes | bytearray, b: bytes | bytearray, dtype: str) -> dict[str, Any]:
    """Return how many elements differ in any bit, and by how much at most.

    ``largest`` is None if a difference is not finite.
    """
    bits = np.dtype(f"<u{DTYPE_BYTES[dtype]}")
    left, right = np.frombuffer(a, bits), np.frombuffer(b, bits)
    changed, largest = left != right, 0.0
    if changed.any():
        with np.errstate(invalid="ignore"):
            distances = np.abs(_values(left[changed], dtype) - _values(right[changed], dtype))
        largest = float(distances.max())
    count = int(changed.sum())
    return {"elements": len(left), "differing": count, "largest": largest if math.isfinite(largest) else None}


def _values(bits: np.ndarray, dtype: str) -> np.ndarray:
    there = values_of(bits.view(np.uint8), dtype)
    return there.astype(np.complex128 if there.dtype.kind == "c" else np.float64)


def _kind_of(atom: TensorEntry) -> dict[str, Any]:
    return {"shape": list(atom.shape), "dtype": atom.dtype}


def print_found(found: dict[str, Any]) -> None:
    """Print the result of ``compare``."""
    progress = ", ".join(found["progress"])
    if found["equal"]:
        print(f"equal: {found['compared']:,} tensors, {format_bytes(found['bytes'])}, bit for bit")
        if progress:
            print(f"The progress beside them differs in: {progress}")
        return
    for side in ("a", "b"):
        _print_some([f"only in {side}: {key}" for key in found[f"only_in_{side}"]])
    _print_some([f"another kind: {_kind(row)}" for row in found["other_kind"]])
    if found["different"]:
        print(f"different: {len(found['different']):,} of {found['compared']:,} tensors")
        _print_table(found["different"])


def _print_table(different: list[dict[str, Any]]) -> None:
    """Print a table: parameters first, those with the largest differences at the top."""
    table = plain_table("tensor", ">elements that differ", ">by at most")
    ordered = sorted(different, key=lambda row: (not row["atom"].endswith("/param"), -_largest(row)))
    for row in ordered[:SHOWN]:
        largest = "not a number" if row["largest"] is None else f"{row['largest']:.3g}"
        table.add_row(escape(row["atom"]), f"{row['differing']:,} of {row['elements']:,}", largest)
    print_table(console(), table)
    _print_rest(len(ordered) - SHOWN)


def _largest(row: dict[str, Any]) -> float:
    return math.inf if row["largest"] is None else row["largest"]


def _print_some(lines: list[str]) -> None:
    for line in lines[:SHOWN]:
        print(line)
    _print_rest(len(lines) - SHOWN)


def _print_rest(count: int) -> None:
    if count > 0:
        print(f"... and {count:,} more; --json lists all")


def _kind(row: dict[str, Any]) -> str:
    a, b = (f"{row[side]['dtype']} {row[side]['shape']}" for side in "ab")
    return f"{row['atom']} is {a} in a, {b} in b"
