"""The batches of a loader, fetched in groups, so that the out-of-core engine can take a whole group together.

Called by the integrations whose own loops go through one batch after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class BatchesAhead:
    """The batches of ``loader``, fetched in groups of up to ``count``, so that one pass takes a whole group.

    accelerate's loaders say at their last batch that they are at the end; they say so here as well, and not earlier.
    """

    def __init__(
        self,
        loader: Any,
        count: int | Callable[[], int],
        batches: Any = None,
        between: Callable[[], object] = lambda: None,
    ) -> None:
        """Wrap ``loader``.

        Args:
            loader: The loader.
            count: The most batches of a group, or a function that returns it for the next group.
            batches: The object to iterate over, where one counts the batches of ``loader``.
            between: A function that is called before each group is fetched.
        """
        self._loader, self._count, self._between = loader, count, between
        self._batches = loader if batches is None else batches
        self.group: list[Any] = []
        """The batches of the present group."""
        self.results: dict[int, Any] = {}
        """Results for batches of the group that are not handed out yet, by their ``id``."""

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        loader, batches = self._loader, iter(self._batches)
        ended = False
        while not ended:
            self._between()
            self.group, at_end = [], False
            count = self._count() if callable(self._count) else self._count
            while len(self.group) < count and not at_end:
                batch = next(batches, self)
                if ended := batch is self:
                    break
                self.group.append(batch)
                at_end = bool(getattr(loader, "end_of_dataloader", False))
            for number, batch in enumerate(self.group, 1):
                if at_end:
                    loader.end_of_dataloader = number == len(self.group)
                yield batch
            if at_end:
                self._between()
                ended = next(batches, self) is self  # lets the loader end its pass
