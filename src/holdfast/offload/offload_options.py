"""The options of ``offload`` that belong together, as frozen objects with defaults, and the rules that they make.

The ``check`` of options is called by ``offload`` and not at construction, so that with several ranks an error of one is
an error of all. Each raises ``BadInput``. Rates are bytes per second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ..config import Fraction
from ..errors import BadInput
from ..schedule.work import CLIPPING, ClippingMode, StepShape
from ..store.drive_links import refuse_no_list
from .loss_scaling import LossScale


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Fractions of the state that stay in memory, spread evenly over the blocks. They change the speed and no bit.

    None: with a ``budget`` of "auto" the planner chooses it; otherwise it is 0, but 1 for
    ``activations_on_host`` and ``recomputed_fraction``. Where no fraction, budget or sample is given, the engine
    chooses ``recomputed_fraction`` from the second step on, by the memory that is free.
    "auto": the planner chooses it with any budget, which needs ``sample``.
    """

    params_on_host: Fraction | None = None
    """Fraction of the compute copies that stays in host memory."""
    optimizer_on_host: Fraction | None = None
    """Fraction of the optimizer state that stays in host memory."""
    activations_on_host: Fraction | None = None
    """Fraction of the inputs of blocks that stays in host memory."""
    delayed_fraction: Fraction | None = None
    """Fraction of the blocks that is updated beside the next step's forward pass, with the hyper-parameters of its own
    step, so that the SSD is busy then too. 1 is all, which clipping by "defer" and the horizontal schedule imply.
    Gradients wait in host memory, in the place of used inputs as far as these reach. Code that reads weights waits for
    the updates, and so does the step's commit."""
    recomputed_fraction: Fraction | None = None
    """Fraction of the blocks that is computed again in the backward pass (activation checkpointing). What the others
    compute in the forward pass stays in device memory, for every micro-batch, with their parameters. Under
    ``torch.autocast`` all are computed again."""
    embedding_and_head: Literal["resident", "streamed"] | None = None
    """"streamed": embedding and head come and go as blocks do, each by itself, which takes least memory. "resident":
    their compute copies and gradients stay on the device. None: as the run has had it so far; a fresh run streams them
    where a budget could not be kept to otherwise."""
    expert_slots: int | None = None
    """Number of experts whose weights are in memory at once. Frozen experts of mixtures are then no part of their
    block: each is read when a token is routed to it, and makes room for another. None: a block has all of its experts
    while it computes."""

    @property
    def fractions(self) -> dict[str, Fraction | None]:
        """The fractions by name; None where none is given."""
        others = ("embedding_and_head", "expert_slots")
        return {name: value for name, value in asdict(self).items() if name not in others}

    def check(self) -> None:
        if self.embedding_and_head not in (None, "resident", "streamed"):
            raise BadInput(
                f'embedding_and_head = {self.embedding_and_head!r} must be "resident" or "streamed"; None chooses'
            )
        if self.expert_slots is not None:
            require_integer("expert_slots", self.expert_slots, 1)
        for name in ("delayed_fraction", "recomputed_fraction"):
            value = getattr(self, name)
            if value not in (None, "auto") and not (isinstance(value, (int, float)) and 0 <= value <= 1):
                raise BadInput(f'{name} = {value!r} must lie between 0 and 1, or be "auto"')


@dataclass(frozen=True)
class Clipping:
    """Clipping of the gradient norm to ``norm``, of the gradients of all parameters in the optimizer.

    ``clip_grad_norm_(model.parameters())`` counts every parameter that requires grad. ``math.inf`` takes the norm and
    clips nothing. None takes none, except that fp16 takes it to detect an overflow.

    - ``"auto"`` takes one of the next two before each step, whichever has been faster; ``"defer"`` where there is not a
      commit at every step, where the budget holds no more, and in the horizontal schedule.
    - ``"defer"`` lets all updates wait for the norm, beside the next forward pass.
    - ``"speculate"`` updates at once, and once more if the norm is above ``norm``, from the state in the commit of the
      step before, so it needs a commit at every step. All three give the bits of ``clip_grad_norm_``.
    - ``"per_block"`` is another algorithm: the gradients of each block, and those outside of blocks, are clipped by
      themselves, to ``norm`` times the square root of their fraction of all trained elements. The norm over all is at
      most ``norm``, and nothing waits.
    """

    norm: float | None = None
    mode: ClippingMode | Literal["auto"] = "auto"

    @classmethod
    def of(cls, given: float | Clipping | None) -> Clipping:
        return given if isinstance(given, Clipping) else cls(given)

    def check(self) -> None:
        number = isinstance(self.norm, (int, float)) and not isinstance(self.norm, bool)
        if self.norm is not None and not (number and self.norm > 0):
            raise BadInput(f"clipping: norm = {self.norm!r} must be a positive number; None is no clipping")
        modes = ("auto", *CLIPPING[1:])
        if self.mode not in modes:
            raise BadInput(f"clipping: mode = {self.mode!r} is not one of {', '.join(modes)}")
        if self.mode == "per_block" and self.norm is None:
            raise BadInput(
                "clipping: mode = 'per_block' says how to clip, and no norm says to what: give it, too"
            )


@dataclass(frozen=True)
class Precision:
    """The dtype of the compute copy: "auto", "bf16", "fp32" or "fp16".

    "auto" is what the run was begun with, on whatever machine. A fresh run computes in bf16, but in fp32 on a processor
    that is measured to be faster in it; with several ranks rank 0 decides.
    "fp16" multiplies losses by ``loss_scale``, which moves as that of ``torch.amp.GradScaler`` and is part of every
    commit, and takes the norm of each step to detect an overflow.
    """

    dtype: str = "auto"
    loss_scale: LossScale | None = None

    @classmethod
    def of(cls, given: str | Precision) -> Precision:
        return given if isinstance(given, Precision) else cls(given)

    def check(self) -> None:
        scale = self.loss_scale
        if not isinstance(scale, (LossScale, type(None))):
            raise BadInput(f"loss_scale = {scale!r} is none: write holdfast.LossScale(scale={scale!r})")
        if scale is not None and self.dtype != "fp16":
            raise BadInput(
                f"loss_scale is of fp16, and the precision is {self.dtype!r}: give 'fp16', or leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class Durability:
    """The rhythm of commits, and their retention."""

    commit_every: int = 1
    """Steps from one commit to the next; with 0 nothing is durable."""
    retain: int = 2
    """Number of newest commits that are kept."""

    def check(self) -> None:
        require_integer("commit_every", self.commit_every, 0)
        require_integer("retain", self.retain, 1)


@dataclass(frozen=True, kw_only=True)
class IO:
    """Drives, limits and threads of the transfers between host memory and SSDs. None of it changes a bit."""

    drives: Sequence[str | Path] = ()
    """Directories on further SSDs, each for this run alone (created if absent). The state's files are shared out among
    them and the run's directory in proportion to their rates, which are measured once. The run names them by links.
    With another list, files are read where they are, and written to their new places as the run continues. All ranks
    give the same list, of directories that all of them see."""
    direct: bool = True
    """True for ``O_DIRECT``, past the page cache; buffered with a warning where that is refused."""
    threads: int = 4
    """Threads that read and write."""
    read_limit: int | None = None
    write_limit: int | None = None
    total_limit: int | None = None
    """Limits of reading, of writing and of both together."""
    update_workers: int = 2
    """Threads that run optimizer steps."""

    def check(self) -> None:
        refuse_no_list(self.drives)
        if not isinstance(self.direct, bool):
            raise BadInput(f"direct = {self.direct!r} must be True or False")
        require_integer("threads", self.threads, 1)
        require_integer("update_workers", self.update_workers, 1)
        for name in ("read_limit", "write_limit", "total_limit"):
            rate = getattr(self, name)
            if rate is not None and not (isinstance(rate, (int, float)) and rate > 0):
                raise BadInput(f"{name} = {rate!r} must be positive, in bytes per second; None is no limit")

    @property
    def limits(self) -> tuple[int | None, int | None, int | None]:
        """The limits of reading, writing, and both."""
        return self.read_limit, self.write_limit, self.total_limit


def require_integer(name: str, count: object, least: int) -> None:
    """Raise ``BadInput`` unless ``count`` is a whole number of at least ``least``."""
    if not isinstance(count, int) or count < least:
        raise BadInput(f"{name} = {count!r} must be at least {least}, and whole")


@dataclass(frozen=True, kw_only=True)
class StepRules:
    """Rules for making steps; all of them may change from one resume to the next."""

    schedule: str
    order: str
    delayed_fraction: float
    recomputed_fraction: float
    clip_norm: float | None
    clipping: ClippingMode | Literal["auto"]
    loss_scale: LossScale | None
    """Loss scale of a fresh run; None unless it computes in fp16."""
    commit_every: int
    normalize: str | Callable[[Any], float]
    chooses_recomputed: bool = False
    """True if ``recomputed_fraction`` is chosen before each step, by the memory that is free."""

    @classmethod
    def of(
        cls,
        schedule: str,
        order: str,
        clipping: Clipping,
        precision: Precision,
        durability: Durability,
        normalize: str | Callable[[Any], float],
    ) -> StepRules:
        """Return the rules of a run whose fractions are not planned yet."""
        fp16, mode = precision.dtype == "fp16", clipping.mode
        if mode == "auto" and (schedule != "vertical" or durability.commit_every != 1):
            mode = "defer"
        return cls(
            schedule=schedule, order=order, delayed_fraction=0.0, recomputed_fraction=1.0,
            clip_norm=clipping.norm, clipping=mode,
            loss_scale=(precision.loss_scale or LossScale()) if fp16 else None,
            commit_every=durability.commit_every, normalize=normalize,
        )  # fmt: skip

    @property
    def normalize_name(self) -> str:
        return self.normalize if isinstance(self.normalize, str) else "a function"

    @property
    def chooses(self) -> bool:
        """True if each step may wait for the norm or guess it."""
        return self.clipping == "auto" and (self.clip_norm is not None or self.loss_scale is not None)

    def shape(self, micro_batches: int, commit: bool, clipping: ClippingMode | None = None) -> StepShape:
        """Return the shape of a training step, with the way ``clipping`` where there are two.

        Without ``clipping`` it guesses the norm, which needs as much memory in every class as waiting, or more.
        """
        mode = "speculate" if self.clipping == "auto" else self.clipping
        return StepShape(
            micro_batches=micro_batches,
            clipping="none" if self.clip_norm is None and self.loss_scale is None else clipping or mode,
            order=self.order,
            delayed_fraction=self.delayed_fraction,
            recomputed_fraction=self.recomputed_fraction,
            commit=commit,
        )
