"""Exchange of state between ranks that hold the same regions, where only one of them has the content.

Under DDP all ranks hold everything and each stores a part, so what their replicas kept is whole only together. The
bytes travel over the ranks' own group, a bounded number at a time.
"""

from __future__ import annotations

import torch

from ...distributed import Ranks
from ...quantities import packed
from ...state.layout.flat_ranges import AnyRegion
from ...state.live_state import LiveState
from ..capture.staging_buffers import tensors_of
from ..snapshot.snapshot_chunks import UNIT_BYTES
from ..snapshot.snapshot_image import image_of


def give_to_others(state: LiveState, ranks: Ranks) -> None:
    """Send what this rank stores of ``state`` to ranks that hold the same regions, and receive theirs.

    Optimizers have no state yet for what is received. Collective: every rank must call this.
    """
    stored = {p.name for p in state.stored}
    lacking = {name: box for name, box in state.boxes.items() if name not in stored}
    wanted = {pair for each in ranks.everyone(lacking) for pair in each.items()}
    offered = _divided(state, [p.name for p in state.stored if (p.name, state.boxes[p.name]) in wanted])
    values = state.values()
    told = ranks.everyone((offered, values))
    for rank, (groups, its_values) in enumerate(told):
        taken = {name for group in groups for name, box in group.items() if lacking.get(name) == box}
        for group in groups:
            image = ranks.spread(_image(state, group) if rank == ranks.rank else None, rank)
            tensors = tensors_of(image.numpy().data)
            state.load({key: tensor for key, tensor in tensors.items() if key.rpartition("/")[0] in taken})
        state.load_values({name: slots for name, slots in its_values.items() if name in taken})


def _divided(state: LiveState, names: list[str]) -> list[dict[str, AnyRegion]]:
    """Return ``names`` with their regions, joined to groups of about the size of a chunk."""

    def nbytes(name: str) -> int:
        return sum(atom.nbytes for atom, _ in state.owned(state.parameter(name)).values())

    return [{name: state.boxes[name] for name in group} for group in packed(names, nbytes, UNIT_BYTES)]


def _image(state: LiveState, names: dict[str, AnyRegion]) -> torch.Tensor:
    held = [state.owned(state.parameter(name)) for name in names]
    image = image_of({key: tensor for each in held for key, (_, tensor) in each.items()})
    return torch.frombuffer(image, dtype=torch.uint8)
