"""A communication hook of ``DistributedDataParallel`` by which ranks exchange the largest elements of gradients.

Each rank adds its residual, selects its largest elements and sends them. All ranks add what was sent in the order of
ranks, starting from zeros, and divide by the number of ranks: a mean, as without the hook. So all ranks hold the same
bits, which are zero where no rank selected. ``lossy.Sparse`` records them as the optimizer consumes them.
"""

# No postponed annotations in this file: torch inspects those of a hook.

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...errors import BadInput
from ...state.plain_tensors import flat_bytes
from ..capture.early_averages import AveragingState, averaged
from .lossy import TopK
from .sparse import Arrays, spread

SENT = ("indices", "values")
"""The arrays that ranks exchange. Their counts are equal on all ranks."""
Forms = dict[str, tuple[int, torch.dtype]]
"""The bytes and the dtype of each array."""


@dataclass
class HookState:
    """The state of the hook: ``model.register_comm_hook(HookState(TopK(0.01)), topk_hook)``.

    ``scaler`` is the ``GradScaler`` of the loop, if there is one. ``residuals`` are this rank's alone, by parameter,
    unscaled.
    """

    codec: TopK
    group: dist.ProcessGroup | None = None
    scaler: torch.amp.GradScaler | None = None
    residuals: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    scale: float = 1.0
    """The loss scale of the gradients that are exchanged now."""
    active: bool = True
    """False where gradients are averaged as without the hook; a hook cannot be removed from a model."""
    _before: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)

    def restore_skipped(self) -> None:
        """Restore the residuals if the scaler has skipped the step.

        Call it after ``scaler.update`` and before residuals are read; otherwise the next backward calls it.
        """
        scale = self.scaler.get_scale() if self.scaler is not None else 1.0
        if scale < self.scale:
            self.residuals.update(self._before)
        self._before.clear()
        self.scale = scale

    def residual_of(self, parameter: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return the parameter's residual, which the caller is about to change, and keep a copy for a skipped step."""
        residual = self.residuals.get(parameter)
        if residual is None:
            residual = self.residuals[parameter] = torch.zeros_like(
                like, memory_format=torch.contiguous_format
            )
        if self.scaler is not None:
            self._before[parameter] = residual.clone()
        return residual


def topk_hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return the mean over ranks of the selected elements of the bucket's gradients, in their dtype.

    The sum is in fp32. A parameter whose gradient is all zero on a rank, such as an unused one, is left out there and
    keeps its residual. A gradient that is not finite on one rank is not finite on all.
    """
    group = state.group or dist.group.WORLD
    assert group is not None
    if not state.active:
        return averaged(group, bucket)
    if bucket.index() == 0:
        state.restore_skipped()
    pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
    with torch.no_grad():
        arrays = [_select(state, parameter, grad) for parameter, grad in pairs]
        sent = torch.cat([flat_bytes(found[name]) for found in arrays for name in SENT])
    forms = [{name: (found[name].nbytes, found[name].dtype) for name in SENT} for found in arrays]
    del arrays  # memory of this stream; the code below runs on another one
    received = [torch.empty_like(sent) for _ in range(group.size())]
    work = dist.all_gather(received, sent, group=group, async_op=True)
    assert work is not None

    def join(_: Any) -> torch.Tensor:
        sums = [torch.zeros(grad.numel(), dtype=_wide(grad), device=grad.device) for _, grad in pairs]
        for one in received:
            _add(state.codec, forms, one, sums, bucket.buffer().dtype)
        for (_, grad), total in zip(pairs, sums, strict=True):
            grad.copy_(total.div_(group.size()).mul_(state.scale).view(grad.shape))
        return bucket.buffer()

    return work.get_future().then(join)


def _select(state: HookState, parameter: torch.Tensor, grad: torch.Tensor) -> Arrays:
    """Return what this rank sends of ``grad``, and keep the rest as residual."""
    codec, flat = state.codec, grad.reshape(-1).to(_wide(grad)) / state.scale
    if not codec.error_feedback:
        return codec.compress(flat, grad.dtype)
    residual = state.residual_of(parameter, flat.view(grad.shape))
    used = (grad != 0).any()
    wanted = residual.view(-1) + flat
    arrays = codec.compress(wanted, grad.dtype)
    left = (wanted - _expand(codec, arrays, grad.numel(), grad.dtype)).view(grad.shape)
    residual.copy_(torch.where(used, left, residual))
    arrays["values"] = torch.where(used, arrays["values"], 0.0)
    return arrays


def _add(
    codec: TopK, forms: list[Forms], sent: torch.Tensor, sums: list[torch.Tensor], dtype: torch.dtype
) -> None:
    """Add to ``sums`` what one rank ``sent``. ``forms`` describes the arrays in it."""
    start = 0
    for own, total in zip(forms, sums, strict=True):
        arrays = {"counts": codec.counts(total.numel(), total.device)}
        for name, (nbytes, kind) in own.items():
            arrays[name] = sent[start : start + nbytes].clone().view(kind)
            start += nbytes
        total.add_(_expand(codec, arrays, total.numel(), dtype))


def _expand(codec: TopK, arrays: Arrays, elements: int, dtype: torch.dtype) -> torch.Tensor:
    return spread(lambda name, _, __: arrays[name], elements, dtype, codec.block)


def _wide(grad: torch.Tensor) -> torch.dtype:
    return torch.promote_types(grad.dtype, torch.float32)


def hooked(
    model: nn.Module, codec: TopK, scaler: Any, residuals: dict[torch.Tensor, torch.Tensor]
) -> HookState | None:
    """Return the state of the hook on ``model``; register the hook if there is none.

    Returns None if ``model`` is not ``DistributedDataParallel``: its gradients are averaged elsewhere and selected
    afterwards. Raises ``BadInput`` if the model has another hook.
    """
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return None
    there = [given for _, given in model._comm_hooks]
    if not there:
        there = [HookState(codec, model.process_group)]
        model.register_comm_hook(there[0], topk_hook)
    state = there[0]
    if not isinstance(state, HookState):
        raise BadInput(
            f"the model has a communication hook already, whose state is a {type(state).__name__}, so"
            f" codec={codec} cannot have one. Leave one of the two out; a hook stays until the model is wrapped anew."
        )
    state.codec, state.scaler, state.residuals, state.active = codec, scaler, residuals, True
    return state


def warn_of_hook_state(model: nn.Module) -> None:
    """Warn if ``model`` has a communication hook with an object of its own, whose state no commit holds.

    Torch's PowerSGD hook is one: its error feedback begins anew at a resume.
    """
    wrappers = (each for each in model.modules() if isinstance(each, nn.parallel.DistributedDataParallel))
    # each stage of a pipeline has a wrapper of its own
    for _, given in (hook for each in wrappers for hook in each._comm_hooks):
        if given is not None and not isinstance(given, (dist.ProcessGroup, HookState, AveragingState)):
            warnings.warn(
                f"the model's communication hook has a {type(given).__name__}, and no commit holds it. Recorded steps"
                " come back bit for bit; what the hook keeps from step to step begins anew at a resume, so the training"
                " that follows is another. codec=holdfast.TopK(...) and its residuals are kept.",
                stacklevel=4,
            )
