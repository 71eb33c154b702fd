"""The guard of a training loop: it finds a bad loss, goes back to before it, and passes over the batches since.

The rule: a loss is bad if it is not finite, or if it exceeds the median of the last good losses by more than ``spike``
times their median absolute deviation; a gradient norm is bad if it is not finite, or exceeds ``norm_spike`` times the
median of the last good norms. A rule by medians is not moved by the outlier that it has to find. The positions in the
data are not restored, so what was read since the restored step is not read again. Made by ``Checkpointer.guard``;
called by the training thread.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..distributed import Ranks
from ..errors import BadInput, Diverged
from ..quantities import counted

LEAST_VALUES = 16
"""The number of good values before which only values that are not finite are bad."""
LEAST_DEVIATION = 0.01
"""The least deviation that is assumed, as a share of the median: losses may be nearly constant."""


@dataclass(frozen=True, kw_only=True)
class GuardOptions:
    """The options of a guard. Raises ``BadInput`` for bad values."""

    max_rollbacks: int = 3
    """Rollbacks in a row, without a good loss at a later step, after which the guard gives up."""
    spike: float = 20.0
    """Median absolute deviations above the median at which a loss is bad."""
    norm_spike: float = 50.0
    """Multiple of the median at which a gradient norm is bad."""
    window: int = 64
    """The number of last good values that are compared with."""
    copy_every: int | None = None
    """Steps between two copies of the state into host memory; None for none."""

    def __post_init__(self) -> None:
        if not (isinstance(self.max_rollbacks, int) and self.max_rollbacks >= 1):
            raise BadInput(f"max_rollbacks = {self.max_rollbacks!r} must be a whole number of 1 or more")
        if not (isinstance(self.window, int) and self.window >= LEAST_VALUES):
            raise BadInput(f"window = {self.window!r} must be a whole number of {LEAST_VALUES} or more")
        copied = self.copy_every
        if copied is not None and not (isinstance(copied, int) and copied >= 2):
            raise BadInput(f"copy_every = {copied!r} must be a whole number of 2 or more: one copy is held")
        for name, least in (("spike", 0.0), ("norm_spike", 1.0)):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and value > least):
                raise BadInput(f"{name} = {value!r} must be a number above {least:g}")


class GoodValues:
    """The last good values of one quantity, each with its step."""

    def __init__(self, window: int, limit: Callable[[list[float]], float]) -> None:
        """Remember ``window`` values. ``limit`` returns the greatest good value from those remembered."""
        self._held: deque[tuple[int, float]] = deque(maxlen=window)
        self._limit = limit

    def limit(self) -> float:
        """Return the greatest value that is good now; infinity while too few are known."""
        values = [value for _, value in self._held]
        return self._limit(values) if len(values) >= LEAST_VALUES else math.inf

    def is_bad(self, value: float) -> bool:
        return not math.isfinite(value) or value > self.limit()

    def add(self, step: int, value: float) -> None:
        self._held.append((step, value))

    def forget_after(self, step: int) -> None:
        """Forget the values of steps after ``step``, which are abandoned."""
        while self._held and self._held[-1][0] > step:
            self._held.pop()


def loss_limit(spike: float) -> Callable[[list[float]], float]:
    """Return the function that computes the greatest good loss from earlier ones.

    >>> loss_limit(4.0)([2.0, 2.5, 1.5, 2.0, 3.0])
    4.0
    """

    def limit(values: list[float]) -> float:
        median = statistics.median(values)
        deviation = statistics.median(abs(value - median) for value in values)
        return median + spike * max(deviation, LEAST_DEVIATION * abs(median))

    return limit


def norm_limit(norm_spike: float) -> Callable[[list[float]], float]:
    """Return the function that computes the greatest good gradient norm from earlier ones."""
    return lambda values: norm_spike * statistics.median(values)


@dataclass(frozen=True)
class GuardedRun:
    """The parts of a run that its guard uses."""

    ranks: Ranks
    steps_done: Callable[[], int]
    base_step: Callable[[], int]
    """Returns the step of the newest snapshot that this rank knows of."""
    go_back: Callable[[int, str], int]
    """Goes back to a step for a reason, and returns the step that was reached. Positions in data stay."""
    is_sound: Callable[[], bool]
    """Returns whether this rank's state is finite, and equal to the copies that other ranks hold."""
    certify: Callable[[int], None]
    """Notes that training was good up to a step. The newest snapshot up to that step is kept."""


class LossGuard:
    """A guard of the loss. Call ``check`` once in each iteration, best between ``backward`` and ``optimizer.step``.

    A rollback goes to the step before the bad one; if the loss is bad there again, twice as far, and so on.

    >>> import holdfast, tempfile, torch
    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> folder = tempfile.TemporaryDirectory()
    >>> with folder, holdfast.Checkpointer(folder.name, model=model, optimizer=optimizer) as ckpt:
    ...     start, guard = ckpt.resume(), ckpt.guard()
    ...     for loss in (1.0, 0.9, float("nan"), 0.8):  # of a forward and a backward pass
    ...         if not guard.check(loss):
    ...             optimizer.step()
    ...             ckpt.step()
    ...     ckpt.steps_done, guard.rollbacks
    (2, 1)
    """

    def __init__(self, run: GuardedRun, options: GuardOptions) -> None:
        self._run, self._options = run, options
        self._losses = GoodValues(options.window, loss_limit(options.spike))
        self._norms = GoodValues(options.window, norm_limit(options.norm_spike))
        self._in_a_row, self._failed_at = 0, -1
        self._certified_base = -1
        self.rollbacks = 0
        """The number of rollbacks so far."""

    def check(self, loss: Any, grad_norm: Any = None) -> bool:
        """Return whether the process went back, because ``loss`` or ``grad_norm`` was bad.

        After True, begin the next iteration: the gradients are gone, and the batches since then are passed over.
        ``steps_done`` of the Checkpointer is the step that the process is at. Collective: every rank must call this.

        Args:
            loss: The loss of this iteration, a number or a tensor of one element. Of several ranks the mean counts.
            grad_norm: The norm of all gradients, as ``clip_grad_norm_`` returns it. Of several ranks the largest
                counts.

        Raises ``Diverged`` after ``max_rollbacks`` in a row, and what ``Checkpointer.rollback`` raises.
        """
        step = self._run.steps_done()
        loss, norm, base = self._agreed(_number(loss), None if grad_norm is None else _number(grad_norm))
        why = self._judged(loss, norm)
        if why:
            self._go_back(step, why)
            return True
        self._losses.add(step, loss)
        if norm is not None:
            self._norms.add(step, norm)
        if self._certified_base < base <= step:
            self._certify(step, base)
        return False

    def _agreed(self, loss: float, norm: float | None) -> tuple[float, float | None, int]:
        """Return the mean loss, the largest norm, and the newest snapshot that all ranks know of."""
        losses, norms, bases = zip(
            *self._run.ranks.everyone((loss, norm, self._run.base_step())), strict=True
        )
        known = [each for each in norms if each is not None]
        worst = next((each for each in known if not math.isfinite(each)), max(known, default=None))
        return sum(losses) / len(losses), worst, min(bases)

    def _judged(self, loss: float, norm: float | None) -> str:
        """Return why the values are bad; empty if they are good."""
        if self._losses.is_bad(loss):
            return f"the loss is {loss:.6g}, and at most {self._losses.limit():.6g} was expected"
        if norm is not None and self._norms.is_bad(norm):
            return f"the gradient norm is {norm:.6g}, and at most {self._norms.limit():.6g} was expected"
        return ""

    def _go_back(self, step: int, why: str) -> None:
        again = step <= self._failed_at
        self._in_a_row = self._in_a_row + 1 if again else 1
        self._failed_at = max(self._failed_at, step)
        if self._in_a_row > self._options.max_rollbacks:
            raise Diverged(
                f"at step {step} {why}, after {counted(self._in_a_row - 1, 'rollback')} in a row. Later batches do not"
                " help: look at the data, the learning rate and the device. Every recorded step is kept:"
                f" resume(before={step})."
            )
        reached = self._run.go_back(max(step - 2 ** (self._in_a_row - 1), 0), why)
        self.rollbacks += 1
        self._certified_base = min(self._certified_base, reached)
        for values in (self._losses, self._norms):
            values.forget_after(reached)

    def _certify(self, step: int, base: int) -> None:
        """Certify the state at ``step``, and with it the snapshot of step ``base``, if it is sound on all ranks."""
        if all(self._run.ranks.everyone(self._run.is_sound())):
            self._certified_base = base
            self._run.certify(step)


def _number(value: Any) -> float:
    """Return the value of a number or of a tensor of one element, distributed ones included."""
    value = value.detach() if hasattr(value, "detach") else value
    return float(value.full_tensor() if hasattr(value, "full_tensor") else value)
