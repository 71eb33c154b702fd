"""The formats in which gradients are recorded, and how replay reads each of them back.

A record must hold exactly what the optimizer consumed, so replay is exact with every codec. ``Exact`` copies gradients,
without rows of zeros (``touched_rows``), and can compress them without loss, by zstd over bytes of one significance.
Other codecs change what training consumes (``lossy``); what they write is expanded here, as one sparse vector, 8-bit
integers with a scale for each block, or two narrow matrices. Training and replay expand by the same functions, which
makes the bits equal. Each record names its codec, so a run can be resumed with another one. Called by the optimizer
hooks and by replay. Sizes are bytes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...errors import BadInput, HoldfastError, RunMismatch
from ...libraries import library
from ...quantities import MiB, round_up
from ...state.capture import CapturedParameter
from ...state.layout.regions import local_of
from ...state.live_state import LiveState
from ...state.plain_tensors import TO_NAME
from ...store.format.payload_layout import METADATA, Layout
from ..capture.staging_buffers import StagingBuffer, tensors_of
from .sparse import Arrays, SparseScratch, Take, num_blocks, spread, spread_into
from .touched_rows import KIND as ROWS
from .touched_rows import digest_of, leave_out_rows, order_of, put_back_rows

Trained = Sequence[tuple[str, torch.Tensor]]
"""The parameters that have a gradient now, with their names."""


class ShardingMismatch(HoldfastError):
    """A record belongs to another parallelism than the state that it is applied to."""


class Codec:
    """The interface of a codec, as ``Checkpointer`` uses it. One object serves any number of runs."""

    @property
    def error_feedback(self) -> bool:
        """Return whether the loss of each gradient is kept, as a residual, for the next one."""
        return False

    @property
    def changes_training(self) -> bool:
        """Return whether optimizers consume other gradients than without the codec."""
        return False

    def layouts(self, state: LiveState) -> list[Layout]:
        """Return for each optimizer a layout with the most bytes that its part of a record takes."""
        raise NotImplementedError

    def consume(self, trained: Trained, residuals: dict[torch.Tensor, torch.Tensor], skipped: bool) -> Any:
        """Turn the gradients into those that the optimizer consumes, and return what ``write`` needs of them.

        Gradients stay as they are if the optimizer will skip this step (``skipped``).
        """
        raise NotImplementedError

    def write(self, slot: StagingBuffer, index: int, consumed: Any) -> memoryview | None:
        """Write the result of ``consume`` into part ``index`` of the staging buffer ``slot``.

        Returns the memory to be written; None if it does not fit.
        """
        raise NotImplementedError

    def about(self) -> dict[str, Any]:
        """Return as JSON what the parts of a record hold."""
        raise NotImplementedError

    def pack(self, about: dict[str, Any], parts: tuple[memoryview, ...]) -> tuple[memoryview, ...]:
        """Return the parts of a record as they are to be written, in the memory of ``parts``.

        Called by the recorder's thread.
        """
        return parts


@dataclass(frozen=True)
class Exact(Codec):
    """A codec that records gradients bit for bit.

    Rows of zeros are left out of a record where that makes it smaller: those of tokens that were not in the batch, of
    experts without tokens, of parameters without a gradient.

    ``compress`` makes records smaller without loss, on the thread that writes them: it groups bytes of one significance
    and applies zstd. That saves about a fifth in fp32 and a third in bf16, and nearly all of rows of zeros. It needs
    the package ``zstandard``.
    """

    compress: bool = False

    def __post_init__(self) -> None:
        if self.compress and importlib.util.find_spec("zstandard") is None:
            raise BadInput(
                "Exact(compress=True) needs the package zstandard: pip install 'holdfast[compress]'"
            )

    def layouts(self, state: LiveState) -> list[Layout]:
        return [_dense_layout(state, trained) for trained in trained_of(state)]

    def consume(self, trained: Trained, residuals: dict[torch.Tensor, torch.Tensor], skipped: bool) -> Any:
        return {name: local_of(p.grad) for name, p in trained if p.grad is not None}

    def write(self, slot: StagingBuffer, index: int, consumed: Any) -> memoryview | None:
        part = slot.parts[index]
        if consumed:
            slot.put([slot.tensors[index][name] for name in consumed], list(consumed.values()))
        part[: len(slot.layouts[index].header)] = slot.layouts[index].header  # ``pack`` overwrites it
        return part

    def about(self) -> dict[str, Any]:
        return {"kind": "squeezed"} if self.compress else {"kind": "exact"}

    def pack(self, about: dict[str, Any], parts: tuple[memoryview, ...]) -> tuple[memoryview, ...]:
        packed = list(parts)
        for update in about["updates"]:
            number = update["part"]
            if self.compress:
                packed[number], update["codec"]["frames"] = squeeze(parts[number], _width(parts[number]))
            elif (smaller := leave_out_rows(parts[number], update["without"])) is not None:
                packed[number], update["codec"] = smaller
        return tuple(packed)


def trained_of(state: LiveState, everywhere: bool = False) -> list[list[CapturedParameter]]:
    """Return for each optimizer its parameters that require grad, in the model's order.

    Only parameters stored on this rank, or with ``everywhere`` those of all ranks.
    """
    found = []
    for optimizer in state.optimizers:
        known = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        among = state.parameters if everywhere else state.stored
        found.append([p for p in among if id(p.parameter) in known])
    return found


def _dense_layout(state: LiveState, trained: Sequence[CapturedParameter]) -> Layout:
    """Return the layout of a part that holds the gradients of ``trained`` whole."""
    kinds = [(p.name, TO_NAME[p.parameter.dtype], state.boxes[p.name].shape) for p in trained]
    kinds.sort(key=lambda kind: order_of(kind[0], kind[2]))
    return Layout.build([(f"{name}/grad", dtype, shape) for name, dtype, shape in kinds], METADATA)


def _width(part: memoryview) -> int:
    """Return the element size, in bytes, of the tensors that make up most of the part."""
    nbytes: dict[int, int] = {}
    for entry in Layout.parse(part).entries:
        width = entry.nbytes // max(torch.Size(entry.shape).numel(), 1)
        nbytes[width] = nbytes.get(width, 0) + entry.nbytes
    return max(nbytes, key=lambda width: nbytes[width], default=1) or 1


Spreads = dict[tuple[Any, ...], Any]
"""Buffers that are reused for the gradients of the next record of one optimizer and one rank."""


def decode(
    update: Mapping[str, Any], part: memoryview, parameters: Mapping[str, torch.Tensor], spreads: Spreads
) -> dict[str, torch.Tensor]:
    """Return the gradients that ``update`` of a record consumed, by name. Valid until ``part`` or ``spreads`` is
    reused.

    Args:
        update: The description of the update, from the record.
        part: The part of the record that holds its gradients.
        parameters: The parameters of the optimizer that the record's rank stores.
        spreads: Buffers reused from one record to the next.

    Raises ``RunMismatch`` for an unknown codec or other parameters, ``ShardingMismatch`` for other shapes, and
    ``Damaged`` for content that contradicts itself.
    """
    held, without = update.get("codec", {"kind": "exact"}), set(update["without"])
    if held["kind"] == "squeezed":
        part = unsqueeze(part, held["frames"])
    if held["kind"] in ("exact", "squeezed"):
        grads = tensors_of(part, "/grad")
        return {name: grad for name, grad in grads.items() if name not in without}
    likes = {name: local_of(parameters[name].detach()) for name in sorted(parameters.keys() - without)}
    if held["kind"] == ROWS:
        if held.get("parameters") != digest_of(likes):
            raise ShardingMismatch("a record holds gradients of other names, dtypes or shapes")
        return put_back_rows(part, likes, spreads)
    arrays = ArrayReader(tensors_of(part))
    kinds = {(like.dtype, like.device) for like in likes.values()}
    if held["kind"] == "sparse" and len(kinds) == 1:
        found = _spread(arrays, held["block"], likes, *kinds.pop(), spreads)
    else:
        found = {
            name: expand(held, arrays.on(like.device), like.numel(), like.dtype)
            for name, like in likes.items()
        }
    arrays.check_end()
    return {name: flat.view(likes[name].shape) for name, flat in found.items()}


def _spread(
    arrays: ArrayReader,
    block: int,
    likes: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
    spreads: Spreads,
) -> dict[str, torch.Tensor]:
    key = (block, dtype, device, *((name, like.numel()) for name, like in likes.items()))
    if key not in spreads:
        spreads.clear()
        spreads[key] = SparseScratch([like.numel() for like in likes.values()], dtype, block, device)
    spreads[key].fill(arrays.on(device))
    return dict(zip(likes, spreads[key].tensors, strict=True))


def expand(held: Mapping[str, Any], take: Any, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the flat gradient of one parameter. Training and replay both call this, so the bits are the same.

    Raises ``RunMismatch`` for an unknown codec.
    """
    if held["kind"] == "sparse":
        return spread(take, elements, dtype, held["block"])
    if held["kind"] == "int8":
        return scaled(take, elements, dtype, held["block"])
    if held["kind"] == "lowrank":
        return multiply_low_rank(take, elements, dtype)
    raise RunMismatch(
        f"a record holds gradients as {held['kind']!r}, which this version does not know. Resume with the version that"
        " wrote the run."
    )


def multiply_low_rank(take: Take, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat gradient that an earlier version's PowerSGD stored, as two narrow matrices or uncompressed.

    Only one ``bmm`` of the whole matrix, of operands that were copied, gives the bits that training consumed.
    """
    rows, rank = take("form", torch.int32, 2).tolist()
    if not rank:
        return take("grad", dtype, elements)
    left = take("left", dtype, rows * rank).clone().view(1, rows, rank)
    right = take("right", dtype, elements // rows * rank).clone().view(1, elements // rows, rank)
    product = torch.bmm(left, right.transpose(1, 2)).view(-1)
    [factor] = take("factor", torch.float64, 1).tolist()
    return product if factor == 1 else product.mul_(factor)


def expand_into(held: Mapping[str, Any], take: Take, given: torch.Tensor) -> torch.Tensor | None:
    """Write what ``expand`` would return into the flat tensor ``given``.

    Returns indices that include every nonzero element, or None if they are not known.
    """
    if held["kind"] == "sparse":
        return spread_into(given, take, held["block"])
    given.copy_(expand(held, take, given.numel(), given.dtype))
    return None


class ArrayReader:
    """Reader of the arrays of one part, one parameter after the other."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays, self._taken = arrays, dict.fromkeys(arrays, 0)

    def take(self, name: str, dtype: torch.dtype, count: int) -> torch.Tensor:
        key = array_key(name, dtype)
        if not count:
            return torch.empty(0, dtype=dtype, device="cpu")
        start = self._taken.get(key, 0)
        found = self._arrays.get(key, torch.empty(0, device="cpu"))[start : start + count]
        if found.numel() != count or found.dtype != dtype:
            raise _other_parameters()
        self._taken[key] = start + count
        return found

    def on(self, device: torch.device) -> Take:
        """Return ``take`` such that its tensors are on ``device``, where training expanded them."""
        return lambda name, dtype, count: self.take(name, dtype, count).to(device)

    def check_end(self) -> None:
        if any(self._arrays[key].numel() != taken for key, taken in self._taken.items()):
            raise _other_parameters()


def array_key(name: str, dtype: torch.dtype) -> str:
    """Return the key of an array in a part, which has one array per dtype."""
    return f"{name}/{TO_NAME[dtype]}"


def _other_parameters() -> RunMismatch:
    return RunMismatch(
        "a record holds the gradients of other parameters than its optimizer has now. Build model and optimizers as the"
        " run's were."
    )


CHUNK = 4 * MiB
LEVEL = 1


def squeeze(view: memoryview, width: int) -> tuple[memoryview, dict[str, Any]]:
    """Compress ``view``, whole pages of elements of ``width``, into its own beginning.

    Returns that beginning, in whole pages, and what ``unsqueeze`` needs, as JSON.
    """
    import zstandard

    compressor, sizes, end = zstandard.ZstdCompressor(level=LEVEL), [], 0
    for start in range(0, len(view), CHUNK):
        chunk = np.frombuffer(view[start : start + CHUNK], np.uint8)
        planes = np.array(
            chunk.reshape(-1, width).T, order="C"
        )  # a copy: the code below overwrites the chunk
        for plane in planes:
            frame = compressor.compress(plane.data)
            piece = frame if len(frame) < plane.nbytes else plane.data
            view[end : end + len(piece)] = piece
            sizes.append(len(piece))
            end += len(piece)
    stop = round_up(end)
    view[end:stop] = bytes(stop - end)
    return view[:stop], {"bytes": len(view), "width": width, "sizes": sizes}


def unsqueeze(part: memoryview, frames: dict[str, Any]) -> memoryview:
    """Return the memory that was passed to ``squeeze``. Raises ``BadInput`` without the package zstandard."""
    zstandard = library("zstandard", "a compressed record", "pip install 'holdfast[compress]'")
    width, sizes, start = frames["width"], iter(frames["sizes"]), 0
    whole, decompressor = np.empty(frames["bytes"], np.uint8), zstandard.ZstdDecompressor()
    for first in range(0, len(whole), CHUNK):
        chunk = whole[first : first + CHUNK].reshape(-1, width)
        for plane in range(width):
            size = next(sizes)
            piece = part[start : start + size]
            if size < len(chunk):
                piece = decompressor.decompress(piece, max_output_size=len(chunk))
            chunk[:, plane] = np.frombuffer(piece, np.uint8)
            start += size
    return whole.data


LARGEST = 127


def quantise(flat: torch.Tensor, block: int) -> Arrays:
    """Round ``flat``, in fp32 or wider, to 255 multiples of a scale: the block's largest magnitude over 127."""
    padded = torch.zeros(num_blocks(flat.numel(), block) * block, dtype=flat.dtype, device=flat.device)
    padded[: flat.numel()] = flat
    scales, steps = quantise_rows(padded.view(-1, block))
    return {"scales": scales, "steps": steps.view(-1)[: flat.numel()]}


def quantise_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale of each row, and the rows in 8 bits."""
    scales = (rows.abs().amax(1) / LARGEST).to(torch.float32) if rows.numel() else rows.new_empty(0).float()
    steps = torch.where(scales > 0, scales, torch.ones_like(scales)).to(rows.dtype)
    values = (rows / steps[:, None]).round_().nan_to_num_().clamp_(-LARGEST, LARGEST)
    return scales, values.to(torch.int8)


def scaled(take: Take, elements: int, dtype: torch.dtype, block: int) -> torch.Tensor:
    """Return the flat tensor whose arrays ``take`` gives."""
    scales = take("scales", torch.float32, num_blocks(elements, block))
    steps = take("steps", torch.int8, elements)
    padded = torch.zeros(scales.numel() * block, dtype=torch.float32, device=steps.device)
    padded[:elements] = steps
    return scaled_rows(scales, padded.view(-1, block)).view(-1)[:elements].to(dtype)


def scaled_rows(scales: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Return the values of rows in 8 bits, in fp32."""
    return steps * scales[:, None]
