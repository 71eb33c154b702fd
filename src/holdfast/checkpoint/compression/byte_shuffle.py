"""Lossless compression in place: bytes of one significance are grouped, then compressed by zstd.

Signs and exponents of neighbouring numbers are similar, while mantissas are noise. Separated, the former shrink and the
latter are stored as they are. Sizes are bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import BadInput
from ...quantities import MiB, round_up

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
        planes = np.ascontiguousarray(
            chunk.reshape(-1, width).T
        )  # a copy, since the code below overwrites the chunk
        if planes.base is not None:
            planes = planes.copy()
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
    try:
        import zstandard
    except ImportError as error:
        raise BadInput(
            "the record is compressed, and the package zstandard is not there: pip install 'holdfast[compress]'"
        ) from error

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
