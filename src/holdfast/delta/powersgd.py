"""PowerSGD: ranks of ``DistributedDataParallel`` exchange their gradients as products of two narrow matrices.

torch's own hook does that. What this module adds: residuals and the matrices that the next exchange begins with are
kept by parameter, so that bases have them whatever buckets DDP forms, and a record has the two matrices in place of
every gradient that is their product to the last bit when the optimizer consumes it.
"""

# Annotations are evaluated here: torch looks at those of a hook.

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from ..errors import BadInput
from ..ranks import Ranks
from ..state.live import LiveState
from ..store.layout import Layout
from ..units import KiB
from .averaging import averaged
from .codecs import ArrayReader, Codec, Trained, array_key, expand
from .lossy import Lossy, Sizes
from .lowrank import factor_between, narrow, same_bits, times, whole
from .slots import Slot
from .sparse import Arrays

LEAST_RATE = 2
"""A matrix is exchanged as two narrow ones if they have less than half its elements: torch's default."""

EPSILON = 1e-8
"""Added to norms, so that a gradient of zeros does not become one of NaN."""

ROOM = 64 * KiB
"""Of a part, for what lies between its arrays."""


@dataclass(frozen=True)
class PowerSGD(Codec):
    """Gradients under ``DistributedDataParallel`` by torch's PowerSGD hook: of each matrix an approximation of rank
    ``matrix_rank``; what it lacks is added to the next gradient. Vectors, and matrices too small to gain anything, are
    averaged as they are. So is everything in the first ``start_step`` steps, where an approximation does most harm.

    Residuals take as much memory as the gradients, on every rank.
    """

    matrix_rank: int = 1
    start_step: int = 1000

    def __post_init__(self) -> None:
        if self.matrix_rank < 1 or self.start_step < 0:
            raise BadInput(
                f"PowerSGD(matrix_rank={self.matrix_rank}, start_step={self.start_step}): the rank is at least 1, the"
                " steps before it starts at least 0"
            )


Matrices = tuple[torch.Tensor, torch.Tensor]
"""The narrow ones of a gradient, (rows, rank) and (columns, rank)."""


@dataclass
class PowerState:
    """What the hook keeps: ``model.register_comm_hook(state, power_hook)``. ``residuals`` are this rank's alone,
    ``subspaces`` are alike on all: both by parameter, as they are after the last exchange."""

    codec: PowerSGD
    group: Any
    residuals: dict[torch.Tensor, torch.Tensor]
    subspaces: dict[torch.Tensor, torch.Tensor]
    steps_done: int = 0
    active: bool = True
    """Otherwise gradients are averaged as without the hook, which cannot be taken off a model again."""
    matrices: dict[torch.Tensor, Matrices] = field(default_factory=dict)
    """Of the gradients of the last exchange that were approximated."""
    of_torch: Any = None
    _buckets: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)
    """The parameters of each bucket, with the residuals that torch's hook left of them."""

    def __post_init__(self) -> None:
        self.of_torch = PowerSGDState(
            self.group, self.codec.matrix_rank, start_powerSGD_iter=2, min_compression_rate=LEAST_RATE,
            orthogonalization_epsilon=EPSILON,  # type: ignore[arg-type]
        )  # fmt: skip
        self.of_torch.iter = 2  # when to start is said here

    @property
    def compresses(self) -> bool:
        return self.active and self.steps_done >= self.codec.start_step

    def put(self, bucket: dist.GradBucket) -> None:
        """Residuals and subspaces of the bucket's parameters to where torch's hook looks for them, unless it has left
        them there itself."""
        index, parameters = bucket.index(), bucket.parameters()
        left = self._buckets.get(index, [])
        if [id(p) for p, _ in left] == list(map(id, parameters)) and all(
            self.residuals.get(p) is residual for p, residual in left
        ):
            return
        of_torch, buffer = self.of_torch, bucket.buffer()
        of_torch.error_dict[index] = torch.cat([self._residual_of(p).reshape(-1) for p in parameters]).to(
            buffer
        )
        subspaces = [self.subspaces.get(p) for p, *_ in self._narrowed(bucket)]
        known = [q.reshape(-1) for q in subspaces if q is not None]
        of_torch.p_memory_dict.pop(index, None)
        if len(known) == len(subspaces):  # else torch's begins with random ones, alike on all ranks
            lefts = sum(rows * rank for _, rows, _, rank in self._narrowed(bucket))
            of_torch.p_memory_dict[index] = buffer.new_empty(lefts)
            of_torch.q_memory_dict[index] = torch.cat([buffer.new_empty(0), *known]).to(buffer)

    def take(self, bucket: dist.GradBucket) -> None:
        """Note what torch's hook has left of the bucket's parameters."""
        index, of_torch = bucket.index(), self.of_torch
        errors = of_torch.error_dict[index].split([grad.numel() for grad in bucket.gradients()])
        pairs = list(zip(bucket.parameters(), errors, strict=True))
        self._buckets[index] = [(p, error.view(p.shape)) for p, error in pairs]
        self.residuals.update(self._buckets[index])
        start_left = start_right = 0
        for parameter, rows, columns, rank in self._narrowed(bucket):
            left = of_torch.p_memory_dict[index][start_left:][: rows * rank].view(rows, rank)
            right = of_torch.q_memory_dict[index][start_right:][: columns * rank].view(columns, rank)
            self.matrices[parameter], self.subspaces[parameter] = (left, right), right
            start_left, start_right = start_left + left.numel(), start_right + right.numel()

    def _residual_of(self, parameter: torch.Tensor) -> torch.Tensor:
        residual = self.residuals.get(parameter)
        return torch.zeros_like(parameter) if residual is None else residual

    def _narrowed(self, bucket: dist.GradBucket) -> list[tuple[torch.Tensor, int, int, int]]:
        """The parameters that are approximated, with their rows, columns and rank, in the order in which torch's hook
        lays them behind one another: those of one shape together."""
        by_shape: dict[tuple[int, int], list[tuple[torch.Tensor, int, int, int]]] = {}
        for parameter in bucket.parameters():
            rows, columns = parameter.shape[0], parameter.numel() // parameter.shape[0]
            rank = min(rows, columns, self.codec.matrix_rank)
            if (rows + columns) * rank * LEAST_RATE < rows * columns:
                by_shape.setdefault((rows, columns), []).append((parameter, rows, columns, rank))
        return [found for alike in by_shape.values() for found in alike]


def power_hook(state: PowerState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's ``powerSGD_hook``, or a plain average where ``state`` does not compress."""
    if not state.compresses:
        return averaged(state.group, bucket)
    state.put(bucket)

    def after(future: torch.futures.Future) -> torch.Tensor:
        given = future.value()
        state.take(bucket)
        return given

    future = powerSGD_hook(state.of_torch, bucket)
    if (
        bucket.buffer().device.type == "cpu"
    ):  # buckets of which each waits on a thread of gloo for another leave none
        future.wait()
    return future.then(after)


class LowRank(Lossy):
    """Gradients that ``power_hook`` left, as the optimizer consumes them: two narrow matrices and what their product
    was multiplied by since, clipped for instance, where that is the gradient bit for bit; else as they are."""

    def __init__(self, state: PowerState) -> None:
        self._state = state
        self._told = False

    @property
    def error_feedback(self) -> bool:
        return True

    @property
    def changes_training(self) -> bool:
        return False  # the hook has done that

    def sizes(self, elements: int, dtype: torch.dtype) -> Sizes:
        return {"form": (torch.int32, 2), "grad": (dtype, elements), "factor": (torch.float64, 1)}

    def layouts(self, state: LiveState) -> list[Layout]:
        """For gradients as they are, which those of the first steps are."""
        found = []
        for layout in super().layouts(state):
            entries = [(entry.key, entry.dtype, entry.shape) for entry in layout.entries]
            found.append(Layout.build([*entries, ("room", "U8", (ROOM,))]))
        return found

    def consume(self, trained: Trained, residuals: Any, skipped: bool) -> Any:
        return dict(trained)

    @torch.no_grad()
    def write(self, slot: Slot, index: int, consumed: Any) -> memoryview | None:
        return super().write(slot, index, {name: self._arrays(name, p) for name, p in consumed.items()})

    def _arrays(self, name: str, parameter: torch.Tensor) -> Arrays:
        """What to record of its gradient."""
        assert parameter.grad is not None
        flat, matrices = parameter.grad.detach().reshape(-1), self._state.matrices.get(parameter)
        if matrices is None or not self._state.compresses:
            return whole(flat)
        product = _product(narrow(*matrices), flat)
        factor = factor_between(product, flat)
        if same_bits(times(product, factor), flat):
            return narrow(*matrices, factor)
        self._tell(name, flat)
        return whole(flat)

    def _tell(self, name: str, flat: torch.Tensor) -> None:
        if not self._told:
            self._told = True
            warnings.warn(
                f"the gradient of {name} is not what the PowerSGD hook gave, times a number: something has changed it"
                f" since. It is recorded as it is, with {flat.nbytes} bytes, and so are others; this is said once.",
                stacklevel=8,
            )

    def about(self) -> dict[str, Any]:
        return {"kind": "lowrank", "feedback": self._state.compresses}


def _product(arrays: Arrays, like: torch.Tensor) -> torch.Tensor:
    """What a record of ``arrays`` is decoded to."""
    keyed = {array_key(name, array.dtype): array for name, array in arrays.items()}
    return expand({"kind": "lowrank"}, ArrayReader(keyed).take, like.numel(), like.dtype)


def approximated(
    ranks: Ranks,
    model: Any,
    codec: PowerSGD,
    scaler: Any,
    residuals: dict[torch.Tensor, torch.Tensor],
    subspaces: dict[torch.Tensor, torch.Tensor],
) -> PowerState:
    """The hook on ``model``, put there if there was none. Called on all ranks; raises ``BadInput`` where there can be
    none."""
    ranks.all_do(lambda: _refuse(model, codec, scaler))
    state = PowerState(codec, model.process_group, residuals, subspaces)
    if not model._comm_hooks:
        model.register_comm_hook(state, power_hook)
        return state
    there = model._comm_hooks[0][1]
    vars(there).update(vars(state))
    return there


def _refuse(model: nn.Module, codec: PowerSGD, scaler: Any) -> None:
    """What torch's hook fails at in the middle of a backward pass, or makes wrong."""
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        raise BadInput(
            f"codec={codec} is for gradients on their way between the ranks of DistributedDataParallel, and the model"
            f" is a {type(model).__name__}. Wrap it, or take holdfast.TopK or holdfast.Int8."
        )
    if scaler is not None and scaler.is_enabled():
        raise BadInput(
            f"codec={codec} with a GradScaler: torch's PowerSGD hook keeps what it lost of scaled gradients, infinite"
            " ones too, and adds it to all later ones. Train in bf16 without a scaler, or take holdfast.TopK."
        )
    foreign = [given for _, given in model._comm_hooks if not isinstance(given, PowerState)]
    if foreign:
        raise BadInput(
            f"the model has a communication hook already, whose state is a {type(foreign[0]).__name__}, so"
            f" codec={codec} cannot have one. Leave one of the two out; a hook stays until the model is wrapped anew."
        )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not (
            parameter.dim() and parameter.numel() and parameter.is_contiguous()
        ):
            raise BadInput(
                f"torch's PowerSGD hook cannot take {name}, {tuple(parameter.shape)} with strides"
                f" {parameter.stride()}: parameters must be contiguous and have a dimension and an element. Reshape it,"
                " or take holdfast.TopK."
            )
