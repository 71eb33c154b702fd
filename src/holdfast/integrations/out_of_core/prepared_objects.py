"""The objects that ``prepare`` of an offloaded ``Accelerator`` returns: a model and loaders for the engine.

The script uses them as those of accelerate. Calls of the model go to the engine, and batches are fetched a step at a
time. Called by ``offloaded_loop``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import nn

from ...errors import BadInput
from ..shared.position import Batches
from .model_calls import CallPattern, ModelCall, settings_of

AHEAD = 8
"""The most batches of an evaluation that go through the blocks together."""


class TakesCalls(Protocol):
    """The object that answers what the script asks the model for."""

    model: nn.Module | None

    @property
    def weights_are_here(self) -> bool: ...
    def called(self, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any: ...
    def weights(self) -> dict[str, torch.Tensor] | None: ...
    def zero_grad(self) -> None: ...


def give_calls(model: nn.Module, to: TakesCalls) -> None:
    """Let ``to`` answer calls of ``model`` and its ``state_dict``.

    The class of the model becomes a subclass of the same name. A copy of the model answers them itself.
    """
    kind = type(model)

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = super(made, self).__call__
        return to.called(own, args, kwargs) if self is to.model else own(*args, **kwargs)

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        values = to.weights() if self is to.model else None
        return super(made, self).state_dict(*args, **kwargs) if values is None else values

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        if self is not to.model or to.weights_are_here:
            super(made, self).zero_grad(set_to_none)
        else:
            to.zero_grad()

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    own = {"__call__": __call__, "state_dict": state_dict, "zero_grad": zero_grad}
    made: Any = type(kind.__name__, (kind,), {**own, **names})
    model.__class__ = made


class TrainingBatches:
    """The batches of the loader that training iterates over, fetched in groups of an optimizer step.

    Passes that the run has ended are empty, and the pass that it is in has the batches that remain. The step before is
    over when the loop asks for the next group.
    """

    def __init__(
        self, loader: Any, num_ranks: int, accumulation: Callable[[], int], between: Callable[[], object]
    ) -> None:
        """Wrap the loader.

        Args:
            loader: The loader that accelerate prepared.
            num_ranks: The number of processes that train.
            accumulation: Returns the number of micro-batches in a step.
            between: A function that is called before each group is fetched, and before each pass.
        """
        self._loader, self._accumulation, self._between = loader, accumulation, between
        self.position = Batches(loader, num_ranks)
        self.is_passing_over = False
        """True from the beginning of a pass that the run has ended to that of the next."""
        self._passes = 0
        self._ahead = BatchesAhead(loader, 1)
        self._taken: list[Any] = []

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        self.position.end_left_pass()
        self._between()
        self._passes += 1
        self.is_passing_over = self._passes <= self.position.epoch
        if self.is_passing_over:
            return
        self._ahead = BatchesAhead(self._loader, self._accumulation(), self.position, self._between)
        yield from self._ahead

    def group(self) -> list[Any]:
        """Return the batches of the next step. Raises ``BadInput`` if there are none that were not trained on."""
        if not self._ahead.group or self._ahead.group is self._taken:
            raise BadInput(
                "the model was called in training mode with no new batch of the first loader that was prepared, which"
                " is the one to train from. For an evaluation call model.eval() and use torch.no_grad()."
            )
        self._taken = self._ahead.group
        return self._taken

    def has(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Return whether a call of the model takes its arguments from the next step's batches."""
        return self._ahead.group is not self._taken and _found(self._ahead.group, args, kwargs) is not None


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
        self.at_end = False
        """True if the present group has the last batch of a loader that says so."""
        self.results: dict[int, Any] = {}
        """Results for batches of the group that are not handed out yet, by their ``id``."""

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def set_end(self, is_last: bool) -> None:
        """Let the loader say whether the batch in hand is its last."""
        self._loader.end_of_dataloader = is_last

    def __iter__(self) -> Iterator[Any]:
        loader, batches = self._loader, iter(self._batches)
        ended = False
        while not ended:
            self._between()
            self.group, self.at_end = [], False
            count = self._count() if callable(self._count) else self._count
            while len(self.group) < count and not self.at_end:
                batch = next(batches, self)
                if ended := batch is self:
                    break
                self.group.append(batch)
                self.at_end = bool(getattr(loader, "end_of_dataloader", False))
            for number, batch in enumerate(self.group, 1):
                if self.at_end:
                    self.set_end(number == len(self.group))
                yield batch
            if self.at_end:
                self._between()
                ended = next(batches, self) is self  # lets the loader end its pass


class EvaluationBatches(BatchesAhead):
    """The batches of another loader, fetched in groups, so that one pass of the engine takes a whole group."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader, AHEAD)
        self._passes: list[tuple[dict[str, Any], list[tuple[ModelCall, Any]]]] = []
        """The passes over the present group, one for each of the settings that the model had after it.

        Each has the calls of the model that remain, with their results.
        """
        self._of: tuple[int, list[Any]] = (0, [])
        """The number of optimizer steps that were done before these passes, and their group."""

    def answer(
        self,
        args: tuple,
        kwargs: dict[str, Any],
        run: Callable[[list[ModelCall]], list[Any]],
        step: int,
        model: nn.Module,
    ) -> tuple[bool, Any]:
        """Return whether a call of the model is one with the next batch, and its result.

        Others of the group go through the blocks in the same pass.

        Args:
            args: The positional arguments of the call.
            kwargs: Its keywords.
            run: Returns the results of several calls.
            step: The number of optimizer steps done.
            model: The model.
        """
        if self._of[0] != step or self._of[1] is not self.group:
            self._passes, self._of = [], (step, self.group)
        settings = settings_of(model) if self._passes else {}
        for results in (results for before, results in self._passes if before == settings):
            for number, (call, result) in enumerate(results):
                if call.is_called(args, kwargs) and not call.has_changed:
                    del results[: number + 1]
                    return True, result
        found = _found(self.group, args, kwargs)
        if found is None:
            return False, None
        first, pattern = found
        calls = [pattern.of(batch) for batch in self.group[first:]]
        results = run(calls)
        settings = settings_of(model)  # afterwards, as the model may count its calls
        self._passes = [each for each in self._passes if each[0] != settings]
        self._passes.append((settings, list(zip(calls[1:], results[1:], strict=True))))
        return True, results[0]


def _found(group: list[Any], args: tuple, kwargs: dict[str, Any]) -> tuple[int, CallPattern] | None:
    """Return the number of the batch that the arguments of a call come from, and the pattern of the call."""
    for number, batch in enumerate(group):
        with suppress(BadInput):
            pattern = CallPattern(args, kwargs, batch)
            if pattern.uses_batch:
                return number, pattern
    return None
