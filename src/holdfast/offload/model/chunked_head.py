"""The loss of a causal language model of transformers in chunks of tokens, with the model's code unchanged.

While the patch is applied, the model's output head returns ``PendingLogits`` where its logits would be more than one
chunk. They have a shape and no values. What models do with logits before a loss (casts, factors, tanh, shifts, views)
is noted, and ``F.cross_entropy`` computes head, noted operations and loss chunk by chunk (``chunked_loss``). So the
shift of labels, ``ignore_index`` and ``num_items_in_batch`` stay those of the model's own loss. Anything else that uses
the logits gets them whole, with the bits of the model without the patch, and a warning names it once.

The first loss is compared with the ordinary one on as many tokens as one chunk has. Used by the engine, in steps and
evaluations, and by the measurement of a model's memory; only for models and losses that are transformers' own, because
code that is not known might do with logits what cannot be noted.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import resolve_name
from torch.utils import _pytree as pytree

from ...chunked_loss import REDUCTIONS, Elementwise, cross_entropy_of, is_plain_linear
from ...errors import ModelNotSupported
from ...quantities import format_bytes
from ...token_chunks import rows_per_chunk
from .absent_parameters import AbsentParameter
from .microbatches import Autocast, autocast_as, autocast_state

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-8}
"""Accepted difference from the ordinary loss, by the dtype of the head's products.

Relative to the loss, or to 1 nat a token where the loss is less. On a processor up to 2e-7 was measured in all three,
so 16 bits have room for kernels that round products of other shapes otherwise, by one step of bf16.
"""


def has_ordinary_loss(model: Any) -> bool:
    """Return whether ``model`` is a causal language model as transformers has it, with that library's own loss.

    A model with code of its own might use its logits in ways that are not known.
    """
    base = model.get_base_model() if callable(getattr(model, "get_base_model", None)) else model  # PEFT's
    loss = getattr(base, "loss_function", None)
    names = type(base).__module__, f"{getattr(loss, '__module__', '')}.{getattr(loss, '__name__', '')}"
    return (
        names[0].startswith("transformers.models.")
        and names[1] == "transformers.loss.loss_utils.ForCausalLMLoss"
    )


class ChunkedHead:
    """The output head of a model, and whether its loss is computed in chunks."""

    def __init__(self, model: nn.Module, quiet: bool = False) -> None:
        """Find the head, if ``model`` names one (``get_output_embeddings``). With ``quiet``, never warn."""
        head = None
        with suppress(AttributeError, NotImplementedError):
            head = model.get_output_embeddings()  # type: ignore[operator]
        self.head = head if isinstance(head, nn.Module) else None
        self.name, self._quiet = type(model).__name__, quiet
        self.is_verified = self.is_off = False

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Compute the loss in chunks inside the context."""
        head = self.head
        if head is None:
            yield
            return
        plain = is_plain_linear(head, AbsentParameter)  # of a streamed head, before its pass
        own, before = head.forward, vars(head).get("forward")
        head.__dict__["forward"] = self._pending(head, own) if plain else self._watched(own)
        try:
            yield
        finally:
            del head.__dict__["forward"]
            if before is not None:
                head.__dict__["forward"] = before

    def _pending(self, head: Any, own: Callable[..., Any]) -> Callable[..., Any]:
        def forward(input: Tensor) -> Tensor:
            rows = input.shape[:-1].numel()
            if self.is_off or rows <= rows_per_chunk(head.out_features):
                return own(input)
            return PendingLogits.of(self, head, own, input)

        return forward

    def _watched(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            logits = own(*args, **kwargs)
            shape = logits.shape if isinstance(logits, Tensor) and logits.dim() else torch.Size([0])
            if shape[:-1].numel() > rows_per_chunk(max(shape[-1], 1)):
                self.say(shape, "its head is not a plain nn.Linear")
            return logits

        return forward

    def say(self, shape: torch.Size, why: str) -> None:
        """Warn, once, that logits of ``shape`` are computed whole."""
        if not self._quiet:
            self._quiet = True
            warnings.warn(
                f"the logits of {self.name} are computed whole, which takes about {format_bytes(16 * shape.numel())}"
                f" for {shape[:-1].numel():,} tokens, because {why}. Smaller micro-batches take less; a loss_fn with"
                " holdfast.chunked_cross_entropy takes none.",
                stacklevel=2,
            )

    def verify(self, logits: PendingLogits, targets: Tensor, ignore_index: int) -> None:
        """Compare the loss in chunks with the ordinary one, once, on tokens that count, one chunk of them at most."""
        if self.is_verified or isinstance(logits.hidden, FakeTensor):
            return
        rows = rows_per_chunk(logits.shape[-1])
        chosen = (targets != ignore_index).nonzero().flatten()[:rows]
        with torch.no_grad():
            hidden, targets = logits.hidden[chosen], targets[chosen]
            small = (len(chosen) + 1) // 2
            whole = float(logits.plain_loss(hidden, targets, ignore_index))
            cut = float(logits.loss(hidden, targets, ignore_index, "sum", max(1, small)))
        if not len(chosen) or not math.isfinite(whole):
            return
        self.is_verified = True
        if abs(cut - whole) > BOUNDS.get(logits.product_dtype, 1e-5) * max(abs(whole), len(chosen)):
            self.is_off = True
            self.say(
                logits.shape, f"in chunks the loss of {len(chosen)} tokens is {cut}, and {whole} otherwise"
            )


class PendingLogits(Tensor):
    """The logits of a head for the tokens of ``hidden``, which no one has computed."""

    owner: ChunkedHead
    hidden: Tensor
    """Hidden states [..., width]: one row for each row of the logits."""
    head: tuple[Tensor, Tensor | None]
    """Weight and bias."""
    steps: tuple[Elementwise, ...]
    """Functions that were applied to each element of the head's output, in their order."""
    autocast: Autocast
    """The autocast state around the head."""
    product_dtype: torch.dtype
    is_recorded: bool
    """True if gradients were recorded when the head and each function were called."""
    version: int
    """The version of ``hidden`` when it was given."""
    own: Callable[[Tensor], Tensor]
    """The head's own forward."""
    whole: _Computed
    """The logits as the model itself would compute them."""
    computed: list[bool]
    """A list that is empty until logits of this call of the head are computed whole."""

    @classmethod
    def of(cls, owner: ChunkedHead, head: Any, own: Callable[..., Any], hidden: Tensor) -> PendingLogits:
        """Return the logits of ``head`` for ``hidden``, pending."""
        autocast, weight, modes = autocast_state(), head.weight, _modes()
        dtype = {kind: cast for kind, enabled, cast in autocast if enabled}.get(
            hidden.device.type, hidden.dtype
        )

        def whole() -> Tensor:
            made.refuse_changed_input()
            with modes(), autocast_as(autocast):
                return own(hidden)

        made = cls._made((*hidden.shape[:-1], len(weight)), dtype, hidden, weight)
        made.owner, made.hidden, made.head, made.steps = owner, hidden, (weight, head.bias), ()
        made.autocast, made.product_dtype, made.own = autocast, dtype, own
        made.is_recorded, made.version = torch.is_grad_enabled(), _version(hidden)
        made.whole, made.computed = _Computed(whole), []
        return made

    @classmethod
    def _made(
        cls, shape: tuple[int, ...], dtype: torch.dtype, hidden: Tensor, weight: Tensor
    ) -> PendingLogits:
        needs = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        made = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=hidden.device, requires_grad=needs
        )
        if needs:  # a function that torch does not ask about would end its gradient here
            with torch._C.DisableTorchFunctionSubclass():
                made.register_hook(_refuse_gradient)
        return made  # type: ignore[return-value]

    def then(
        self,
        func: Callable[[Tensor], Tensor],
        hidden: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> PendingLogits:
        """Return the logits after ``func``: an operation on each element, or one that chose or arranged ``hidden``."""
        self.refuse_changed_input()
        by_element, hidden = hidden is None, self.hidden if hidden is None else hidden
        before, modes = self.whole, _modes()
        shape = (*hidden.shape[:-1], self.shape[-1])
        made = self._made(shape, dtype or self.dtype, hidden, self.head[0])
        made.__dict__.update(self.__dict__)

        def whole() -> Tensor:
            source = before.get()
            with modes():
                after = func(source)
            if before.is_changed and (by_element or not _share_memory(after, source)):
                raise ModelNotSupported(
                    f"{self.owner.name} changes its logits in place after it has computed others of them: write"
                    " logits = logits * 2 instead of logits *= 2."
                )
            return after

        made.hidden, made.version, made.whole = hidden, _version(hidden), _Computed(whole)
        made.steps = (*self.steps, func) if by_element else self.steps
        made.is_recorded = self.is_recorded and torch.is_grad_enabled()
        return made

    def refuse_changed_input(self) -> None:
        """Raise ``ModelNotSupported`` if the hidden states were changed after the head was called."""
        if _version(self.hidden) != self.version:
            raise ModelNotSupported(
                f"{self.owner.name} changes the input of its output head in place after the head was called: write"
                " x = x * 2 instead of x *= 2."
            )

    def plain_loss(self, hidden: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        """Return the summed cross entropy for the tokens of ``hidden`` as the model itself would compute it."""
        with autocast_as(self.autocast):
            return F.cross_entropy(
                self._logits(self.own(hidden)), targets, ignore_index=ignore_index, reduction="sum"
            )

    def _logits(self, out: Tensor) -> Tensor:
        """Return the logits, given the output of the head."""
        for step in self.steps:
            out = step(out)
        return out

    def loss(
        self, hidden: Tensor, targets: Tensor, ignore_index: int, reduction: str, rows: int | None = None
    ) -> Tensor:
        """Return the cross entropy of these logits for the tokens of ``hidden``, in chunks of ``rows`` tokens."""
        self.refuse_changed_input()
        with autocast_as(self.autocast), torch.set_grad_enabled(torch.is_grad_enabled() and self.is_recorded):
            return cross_entropy_of(hidden, *self.head, targets, self._logits, ignore_index, reduction, rows)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DESCRIBING:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        note = _noting(func, args, kwargs)
        made = NotImplemented if note is None else note()
        if made is not NotImplemented:
            return made
        args, kwargs = pytree.tree_map_only(cls, lambda each: each.compute(func), (args, kwargs))
        return func(*args, **kwargs)

    def compute(self, func: Any) -> Tensor:
        """Return the logits themselves, because ``func`` needs them."""
        self.computed.append(True)
        self.owner.say(self.shape, f"{resolve_name(func) or func} needs them")
        return self.whole.get()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise ModelNotSupported(
            f"{func} has reached logits that no one has computed. Compute this loss with holdfast.chunked_cross_entropy"
            " in a loss_fn, with which logits stay as they are."
        )


def _noting(func: Any, args: tuple, kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return a function that notes ``func`` for these arguments, or None if they are not such as are noted."""
    known = _KNOWN.get(func)
    if known is None or any(isinstance(each, PendingLogits) and each.computed for each in args):
        return None
    try:
        bound = signature(known).bind(*args, **kwargs)
    except TypeError:
        return None
    return lambda: known(*bound.args, **bound.kwargs)


class _Computed:
    """A tensor that is computed at its first use."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self._made: Tensor | None = None
        self._version = 0

    def get(self) -> Tensor:
        if self._made is None:
            self._made = self._compute()
            self._version = _version(self._made)
        return self._made

    @property
    def is_changed(self) -> bool:
        """True once the tensor, or a view of it, was changed in place."""
        return self._made is not None and _version(self._made) != self._version


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _modes() -> Callable[[], AbstractContextManager[object]]:
    """Return a function that returns a context with the grad and inference mode of this moment."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    @contextmanager
    def modes() -> Iterator[None]:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            yield

    return modes


def _refuse_gradient(grad: Tensor) -> None:
    raise ModelNotSupported(
        "a loss was computed from logits by a function that torch does not show, such as a fused cross entropy, and its"
        " gradient would be lost. Pass a loss_fn with holdfast.chunked_cross_entropy, or that function in a loss_fn."
    )


# -- operations that are noted. Each returns NotImplemented for arguments that it does not know. ------


def _cast(logits: Any, dtype: Any) -> Any:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return NotImplemented
    return logits if dtype == logits.dtype else logits.then(lambda out: out.to(dtype), dtype=dtype)


def _float(logits: Any) -> Any:
    return _cast(logits, torch.float32)


def _tanh(logits: Any) -> Any:
    return logits.then(torch.tanh)


def _times(logits: Any, factor: Any) -> Any:
    if not isinstance(logits, PendingLogits):
        logits, factor = factor, logits
    return logits.then(lambda out: out * factor) if type(factor) in (int, float) else NotImplemented


def _over(logits: Any, divisor: Any) -> Any:
    known = isinstance(logits, PendingLogits) and type(divisor) in (int, float)
    return logits.then(lambda out: out / divisor) if known else NotImplemented


def _viewed(logits: Any, *given: Any) -> Any:
    size = tuple(given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given)
    if not size or not all(type(each) is int for each in size) or size[-1] != logits.shape[-1]:
        return NotImplemented
    hidden = logits.hidden.reshape(*size[:-1], logits.hidden.shape[-1])
    return logits.then(lambda out: out.reshape(size), hidden)


def _flattened(logits: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    if end_dim % logits.dim() == logits.dim() - 1:
        return NotImplemented
    begin, end = start_dim % logits.dim(), end_dim % logits.dim()
    return logits.then(lambda out: out.flatten(begin, end), logits.hidden.flatten(begin, end))


def _contiguous(logits: Any) -> Any:
    return logits.then(lambda out: out.contiguous(), logits.hidden)


def _chosen(logits: Any, index: Any) -> Any:
    """Choose tokens by slices, which leave the dim of the vocabulary whole."""
    entries = index if isinstance(index, tuple) else (index,)
    if not entries or not all(each is ... or isinstance(each, slice) for each in entries):
        return NotImplemented
    every = slice(None)
    if entries[-1] is ... and len(entries) > logits.dim():  # it stands for no dim
        return NotImplemented
    if entries[-1] is not ... and entries[-1] != every and (... in entries or len(entries) >= logits.dim()):
        return NotImplemented
    return logits.then(lambda out: out[index], logits.hidden[index])


def _cross_entropy(
    logits: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    ordinary = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    if not ordinary or reduction not in REDUCTIONS or not isinstance(logits, PendingLogits):
        return NotImplemented
    fits = logits.dtype == torch.float32 and logits.dim() == 2 and not logits.owner.is_off
    if not fits or target.dtype != torch.int64 or target.shape != logits.shape[:1]:
        return NotImplemented
    logits.owner.verify(logits, target, ignore_index)
    if logits.owner.is_off:
        return NotImplemented
    return logits.loss(logits.hidden, target, ignore_index, reduction)


_KNOWN: dict[Any, Callable[..., Any]] = {
    Tensor.float: _float, Tensor.to: _cast, torch.tanh: _tanh, Tensor.tanh: _tanh,
    torch.mul: _times, Tensor.mul: _times, Tensor.__mul__: _times, Tensor.__rmul__: _times,
    torch.div: _over, Tensor.div: _over, Tensor.__truediv__: _over,
    Tensor.view: _viewed, Tensor.reshape: _viewed, torch.flatten: _flattened, Tensor.flatten: _flattened,
    Tensor.contiguous: _contiguous, Tensor.__getitem__: _chosen, F.cross_entropy: _cross_entropy,
}  # fmt: skip

_DESCRIBING = {
    Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__, Tensor.layout.__get__, Tensor.is_meta.__get__,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__, Tensor.is_cpu.__get__,  # type: ignore[attr-defined]
    Tensor.size, Tensor.dim, Tensor.numel, torch.numel, Tensor.is_floating_point, torch.is_floating_point,
    Tensor.__len__,
}  # fmt: skip
