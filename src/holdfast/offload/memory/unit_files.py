"""The files of a unit: which bytes of which tensor entry lie where in a file and in its image.

Masters are fp32, or *split* into parts of which the first is the bf16 compute copy (``state/split_masters``). In a file
of split masters all high parts come first, placed as in the compute copy: one range of bytes, which a pass reads by
itself. Called by ``block_states``, which decides what each file of a unit holds, and by conversions of images.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import xxhash

from ...errors import BadInput
from ...optim.host_optimizer import SplitMaster
from ...quantities import PAGE, round_up
from ...state.layout.regions import Region
from ...state.plain_tensors import FROM_NAME
from ...state.split_masters import DTYPES, PARTS, carry_bytes, part_key
from ...state.tensor_entries import DTYPE_BYTES, TensorEntry
from ...store.format.payload_layout import LARGE, LARGE_ALIGNMENT, SMALL_ALIGNMENT, Layout
from .parameter_shards import ParameterShard

TILE, FROZEN, EXPERTS = ".tile", ".frozen", ".experts"
"""Parts of the names of files: of a tile of a state, of frozen parameters, and of frozen experts by themselves."""


def unit_of(file_name: str) -> str:
    """Return the name of a file without the number of its tile, and without a digest.

    Frozen experts count as the frozen parameters of their block, of which they may be a part.

    >>> unit_of("layers.0.tile3of8-01234567"), unit_of("layers.0.experts-01234567")
    ('layers.0', 'layers.0.frozen')
    """
    name = re.sub(rf"{re.escape(TILE)}\d+of\d+-[0-9a-f]{{8}}$", "", file_name)
    return re.sub(rf"({re.escape(FROZEN)}|{re.escape(EXPERTS)})-[0-9a-f]{{8}}$", FROZEN, name)


class PlacedEntry(NamedTuple):
    """A tensor entry of a file: the shape of the whole entry, and the region of it that the file holds."""

    entry: TensorEntry
    shape: tuple[int, ...]
    box: Region


class UnitFile:
    """A file of a unit: fragments of parameters, and the place of every tensor entry in it.

    A file of split masters holds their parts; its ``entries`` are the masters.
    """

    def __init__(
        self,
        pieces: Sequence[ParameterShard],
        entries: Sequence[PlacedEntry],
        alignment: int = SMALL_ALIGNMENT,
        master_bits: Mapping[str, int] | None = None,
    ) -> None:
        """Lay the file out.

        Args:
            pieces: The fragments of parameters that the file holds.
            entries: Their tensor entries, in the order of the file.
            alignment: Bytes. Small tensors, or the high parts of split masters, start at multiples of it.
            master_bits: Bits of each split master, by parameter name; None if masters are not split.
        """
        self.pieces, self.is_split = list(pieces), master_bits is not None
        self.entries = [placed.entry for placed in entries]
        self.places = {placed.entry.key: (placed.shape, placed.box) for placed in entries}
        """Shape of the whole tensor entry, and the region stored here, by the entry's key."""
        self.layout = (
            Layout.build([(e.key, e.dtype, e.shape) for e in self.entries], alignment=alignment)
            if master_bits is None
            else _split_layout(self.entries, alignment, master_bits)
        )
        self.name = ""
        """Name of the file, as commits use it."""

    @property
    def elements(self) -> int:
        return sum(piece.elements for piece in self.pieces)

    def view(self, image: torch.Tensor, name: str, slot: str = "param") -> torch.Tensor:
        """Return a tensor entry inside an image of the file, in its own shape."""
        entry = self.layout[f"{name}/{slot}"]
        here = image[entry.offset : entry.offset + entry.nbytes]
        return here.view(FROM_NAME[entry.dtype]).view(entry.shape)

    def master(self, image: torch.Tensor, name: str) -> torch.Tensor | SplitMaster:
        """Return a parameter inside an image of the file, which may hold it in parts."""
        if not self.is_split:
            return self.view(image, name)
        places = [self.layout[part_key(f"{name}/param", part)] for part in PARTS]
        return SplitMaster.of(places[0].shape, *(image[place.offset : place.end] for place in places))

    def values(self, image: torch.Tensor, name: str) -> torch.Tensor:
        """Return the values of a parameter inside an image of the file: a view, or joined from parts."""
        held = self.master(image, name)
        return held.joined() if isinstance(held, SplitMaster) else held

    def set_values(self, image: torch.Tensor, name: str, values: torch.Tensor) -> None:
        """Set a parameter inside an image. Raises ``BadInput`` for a value that the file's dtype does not hold."""
        held = self.master(image, name)
        if isinstance(held, SplitMaster):
            master = values
            if values.dtype != torch.float32 or values.device.type != "cpu":
                master = torch.empty(held.shape, dtype=torch.float32)
                copy_exactly(master, values, name)
            held.set(master)
        else:
            copy_exactly(held, values, name)

    def digest(self) -> str:
        """Return 8 hex digits that identify the regions that the file holds."""
        boxes = [self.places[entry.key][1].to_json() for entry in self.entries]
        return xxhash.xxh3_64_hexdigest(self.layout.header + json.dumps(boxes).encode())[:8]


class StateTile(UnitFile):
    """A part of a unit's state."""

    def __init__(
        self,
        pieces: Sequence[ParameterShard],
        entries: Sequence[PlacedEntry],
        itemsize: int,
        index: int,
        alignment: int = SMALL_ALIGNMENT,
        master_bits: Mapping[str, int] | None = None,
    ) -> None:
        """Lay the tile out, number ``index`` of its unit; one element of the compute copy has ``itemsize`` bytes."""
        super().__init__(pieces, entries, alignment, master_bits)
        self.index = index
        self.copy_start = min((piece.copy_at for piece in pieces), default=0) // PAGE * PAGE
        """Offset of the tile in this rank's shard of the compute copy."""
        end = max((piece.copy_at + piece.elements * itemsize for piece in pieces), default=0)
        self.copy_bytes = round_up(end - self.copy_start)
        self.high_start = len(self.layout.header)
        """Offset in the file of the high parts, ``copy_bytes`` of them, if masters are split."""
        for piece in pieces if self.is_split else ():
            place = self.layout[part_key(f"{piece.name}/param", "high")]
            assert place.offset - self.high_start == piece.copy_at - self.copy_start, piece.name

    @property
    def rest_bytes(self) -> int:
        """Bytes of the file behind the high parts; all of it if masters are not split."""
        return self.layout.file_bytes - (self.cuts[-1] if self.is_split else 0)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Offsets in the file between which bytes are read by themselves."""
        return (self.high_start, self.high_start + self.copy_bytes) if self.is_split else ()


class ExpertPart(NamedTuple):
    """The rows of one parameter that one expert has: whole pages of a file, which begin ``skip`` bytes before them."""

    name: str
    start: int
    stop: int
    skip: int
    nbytes: int
    """Bytes of the rows."""


class ExpertFile(UnitFile):
    """The frozen experts of a block: parameters whose first dim counts experts, each of which is read by itself."""

    @property
    def num_experts(self) -> int:
        return self.entries[0].shape[0] if self.entries else 0

    def parts(self, expert: int) -> list[ExpertPart]:
        """Return where the file has the rows of ``expert``, of each parameter."""
        found = []
        for entry in self.entries:
            place = self.layout[entry.key]
            nbytes = place.nbytes // self.num_experts
            begin = place.offset + expert * nbytes
            start = begin // PAGE * PAGE
            found.append(ExpertPart(entry.name, start, round_up(begin + nbytes), begin - start, nbytes))
        return found

    @property
    def cuts(self) -> tuple[int, ...]:
        """Offsets in the file between which bytes are read by themselves."""
        parts = (part for expert in range(self.num_experts) for part in self.parts(expert))
        return tuple(sorted({offset for part in parts for offset in (part.start, part.stop)}))

    def fill(self, values: Mapping[str, torch.Tensor], view: memoryview, start: int) -> None:
        """Put the bytes of the file from ``start`` on into ``view``, of parameters with ``values`` by name.

        Raises ``BadInput`` for a value that the file's dtype does not hold.
        """
        stop = start + len(view)
        view[:] = bytes(len(view))
        header = self.layout.header[start:stop]
        view[: len(header)] = header
        for entry in self.entries:
            place = self.layout[entry.key]
            first, last = max(place.offset, start), min(place.end, stop)
            if first < last:
                here = torch.frombuffer(view[first - start : last - start], dtype=FROM_NAME[entry.dtype])
                done = (first - place.offset) // here.itemsize
                copy_exactly(here, values[entry.name].reshape(-1)[done : done + len(here)], entry.name)

    @property
    def expert_bytes(self) -> int:
        """The most bytes that are read for one expert."""
        sizes = (sum(part.stop - part.start for part in self.parts(each)) for each in range(self.num_experts))
        return max(sizes, default=0)


def _split_layout(entries: Sequence[TensorEntry], alignment: int, master_bits: Mapping[str, int]) -> Layout:
    """Return the layout of a file of split masters: high parts, low parts, carries, then all other entries.

    High parts start at multiples of ``alignment``, as in a compute copy, and what follows them at a page.
    """
    masters = [entry for entry in entries if entry.slot == "param"]
    shapes = {
        "high": [master.shape for master in masters],
        "low": [master.shape for master in masters],
        "carry": [(carry_bytes(master.elements),) for master in masters],
    }
    tensors = [
        (part_key(master.key, part), DTYPES[master_bits[master.name]][place], shape)
        for place, part in enumerate(PARTS)
        for master, shape in zip(masters, shapes[part], strict=True)
    ]
    tensors += [(entry.key, entry.dtype, entry.shape) for entry in entries if entry.slot != "param"]
    own = {key: alignment for key, _, _ in tensors[: len(masters)]}
    first, dtype, shape = tensors[len(masters)]
    own[first] = LARGE_ALIGNMENT if DTYPE_BYTES[dtype] * math.prod(shape) >= LARGE else PAGE
    return Layout.build(tensors, own=own)


def copy_exactly(target: torch.Tensor, source: torch.Tensor, name: str) -> None:
    """Copy ``source`` into ``target``, which may be of a narrower dtype. Raises ``BadInput`` if that loses bits."""
    way_out = "Masters are kept in fp32: make the source float32."
    if target.dtype != torch.float32:
        way_out = f"Build the model with this parameter in {source.dtype}."
    target.copy_(source)
    if torch.promote_types(target.dtype, source.dtype) != target.dtype:
        same = target.to(source.dtype) == source
        if not bool((same | source.isnan()).all()):
            raise BadInput(
                f"parameter {name} is stored in {target.dtype}, which does not hold the values that it has in the"
                f" source ({source.dtype}). {way_out}"
            )
