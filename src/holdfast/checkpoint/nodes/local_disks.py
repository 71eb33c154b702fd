"""The option for runs on the nodes' own disks, and which node keeps a copy of which.

A *node* is a failure domain: ranks that are lost together, with the disk that they share. Each node has a *partner*,
another node, which keeps a second copy of its shares. Everything here is pure, but for the environment variables of
torchrun, which say which node a rank is on. Called by ``Checkpointer``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...errors import BadInput


@dataclass(frozen=True, kw_only=True)
class LocalDisks:
    """The option that ``run=`` is a directory on each node's own disk, which the other nodes cannot see.

    Each node's records and snapshots are also sent to its partner node.

    >>> LocalDisks(partner_offset=2)
    LocalDisks(partner_offset=2, node=None)
    """

    partner_offset: int = 1
    """The distance to the partner in the order of nodes. Choose it so that partners share no rack and no power."""
    node: int | None = None
    """The number of this rank's node; None takes it from the environment of torchrun."""

    def __post_init__(self) -> None:
        for name, value in (("partner_offset", self.partner_offset), ("node", self.node)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise BadInput(f"LocalDisks({name}={value!r}) must be a whole number")


@dataclass(frozen=True)
class NodeLayout:
    """The ranks of each node, by the node's place in the order of nodes, and the distance to its partner."""

    ranks: tuple[tuple[int, ...], ...]
    partner_offset: int = 1

    @classmethod
    def of(cls, nodes: Sequence[int], offsets: Sequence[int]) -> NodeLayout:
        """Return the layout of ranks on ``nodes``, the number of each rank's node.

        ``offsets`` are the ``partner_offset`` of each rank. Raises ``BadInput`` where no partner is another node.

        >>> NodeLayout.of([0, 0, 1, 1], [1] * 4).ranks
        ((0, 1), (2, 3))
        """
        numbers = sorted(set(nodes))
        if len(numbers) < 2:
            raise BadInput(
                f"nodes= is for several nodes, and all {len(nodes)} ranks are on one: leave it out, or give each rank"
                " its node's number (nodes=LocalDisks(node=...))."
            )
        if len(set(offsets)) > 1:
            raise BadInput(f"partner_offset differs between ranks ({sorted(set(offsets))}): give one number")
        if offsets[0] % len(numbers) == 0:
            raise BadInput(
                f"partner_offset = {offsets[0]} makes each of {len(numbers)} nodes its own partner, so that a lost node"
                f" would take both copies: give a number from 1 to {len(numbers) - 1}."
            )
        ranks = tuple(tuple(rank for rank, node in enumerate(nodes) if node == number) for number in numbers)
        return cls(ranks, offsets[0])

    def place_of(self, rank: int) -> int:
        """Return the place of the node of ``rank``."""
        return next(place for place, ranks in enumerate(self.ranks) if rank in ranks)

    def mates(self, rank: int) -> tuple[int, ...]:
        """Return the ranks on the node of ``rank``, itself included."""
        return self.ranks[self.place_of(rank)]

    def leads(self, rank: int) -> bool:
        """Return whether ``rank`` is the first of its node, which writes what the node's ranks have in common."""
        return rank == self.mates(rank)[0]

    def partner_place(self, place: int) -> int:
        """Return the place of the node that keeps the copies of the node at ``place``."""
        return (place + self.partner_offset) % len(self.ranks)

    def partner_of(self, rank: int) -> int:
        """Return the rank that keeps the copies of ``rank``: one of the partner node, the ranks in turn."""
        place = self.place_of(rank)
        there = self.ranks[self.partner_place(place)]
        return there[self.ranks[place].index(rank) % len(there)]

    def copied_by(self, rank: int) -> tuple[int, ...]:
        """Return the ranks whose copies ``rank`` keeps."""
        everyone = sorted(each for ranks in self.ranks for each in ranks)
        return tuple(each for each in everyone if self.partner_of(each) == rank)

    def server_of(self, place: int, rank: int) -> int:
        """Return the rank at ``place`` that reads files for ``rank``, so that many readers share the work.

        Only ranks that keep copies answer requests: where a node has more ranks than the one before it, not all do.

        >>> NodeLayout(((0, 1), (2,), (3,))).server_of(0, 3)
        0
        """
        there = self._keepers[place]
        return there[rank % len(there)]

    @cached_property
    def _keepers(self) -> list[list[int]]:
        """The ranks of each node that keep copies. There is one at least: some rank's copies go to each node."""
        keepers = {self.partner_of(rank) for ranks in self.ranks for rank in ranks}
        return [[rank for rank in ranks if rank in keepers] for ranks in self.ranks]


def node_here(option: LocalDisks, environment: Mapping[str, str]) -> int:
    """Return the number of this rank's node, by ``option`` or by the environment of torchrun.

    Raises ``BadInput`` if neither says it.
    """
    if option.node is not None:
        return option.node
    if (group := environment.get("GROUP_RANK", "")).isdecimal():
        return int(group)
    rank, size = environment.get("RANK", ""), environment.get("LOCAL_WORLD_SIZE", "")
    if rank.isdecimal() and size.isdecimal() and int(size):
        return int(rank) // int(size)
    raise BadInput(
        "nodes= needs to know which ranks share a node, and neither GROUP_RANK nor LOCAL_WORLD_SIZE says it: start the"
        " ranks with torchrun, or give each its node's number (nodes=LocalDisks(node=...))."
    )
