"""The micro-batches of a step as coroutines: the model's ordinary forward, suspended at every block.

Each micro-batch runs ``model(...)`` on a thread of its own, and one thread runs at a time. Where the model calls a
block, the thread hands over the call and waits. The engine runs the block when the schedule says so and hands the
output back. Models therefore need no rewriting.

A thread inherits the caller's grad and inference mode, autocast, default device, device, stream, intra-op thread count
and context variables. Cancelling raises inside the thread, which is then joined.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...accelerators import current_kind, current_stream_in_use, on_stream, use_device
from ...errors import BadInput, BlockInputChanged, ModelNotSupported
from ..setup.process_settings import callers_default_device, end_openmp_threads
from .blocks import BlockFunction, Blocks

RESIDENT = 'embedding_and_head="resident"'
"""The way out of what a streamed embedding does not allow."""
_running = threading.local()
Autocast = tuple[tuple[str, bool, torch.dtype], ...]
"""Autocast state for each kind of device: the kind, whether autocast is on, and its dtype."""


class _Cancelled(BaseException):
    """Raised inside a waiting thread to unwind the model's forward."""


@dataclass
class BlockCall:
    """The model's call of block ``block``."""

    block: int
    args: tuple
    kwargs: dict[str, Any]
    autocast: Autocast = ()
    """The autocast state that the model has set around the call."""
    sequence: int = 0
    """The next sequence number of autograd in the thread: nodes made before the call have lower ones."""


@dataclass
class ForwardEnd:
    """The end of the model's forward, which returned ``value``."""

    value: Any


@dataclass
class OwnCall:
    """A micro-batch whose forward pass and loss are a function of the script, which calls the model once itself."""

    run: Callable[[], Any]
    """Returns the loss in a step. It brings the inputs to the device by itself."""
    inputs: Mapping[str, Any]
    """The tensors of the micro-batch, to count tokens and to compare sizes."""
    results: dict[str, Any]
    """Results of the step for its commit, as JSON: one dict that all own calls of a step fill."""
    takes_loss: bool = False
    """True if ``run`` takes nothing but the loss of the model, so that logits need not exist whole."""


class _Signal:
    """A signal from one thread to another, made of a bare lock, which an interrupt cannot leave half taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def give(self) -> None:
        with suppress(RuntimeError):  # signalled already
            self._lock.release()

    def take(self) -> None:
        self._lock.acquire()


class Coroutine:
    """A function on a thread of its own, such as one micro-batch's forward.

    ``start`` and ``resume`` run it to its next event: a ``BlockCall``, another event that it hands over, or its end.
    """

    def __init__(self, run: Callable[[], Any], is_micro_batch: bool = True) -> None:
        """Prepare the thread. One that ``is_micro_batch`` hands over calls of blocks."""
        self._run, self._is_micro_batch = run, is_micro_batch
        self._go, self._back = _Signal(), _Signal()
        self._reply: Any = None
        self._event: Any = None
        self._error: BaseException | None = None
        self._cancelled = self.finished = self._grad = False
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def start(self) -> Any:
        enter, self._grad = _thread_state(), torch.is_grad_enabled()
        context = contextvars.copy_context()
        thread = threading.Thread(
            target=context.run, args=(self._main, enter), name="holdfast-micro-batch", daemon=True
        )
        try:
            thread.start()
            self._thread = thread
        except BaseException:  # an interrupt; if the thread was created, it ends at once
            self._cancelled = True
            self._go.give()
            if self._ended.wait(1.0):
                thread.join()
            raise
        return self._switch()

    def resume(self, reply: Any) -> Any:
        """Let the waiting call return ``reply``, and return the next event."""
        self._reply = reply
        return self._switch()

    def cancel(self) -> None:
        """Unwind the thread, wherever it waits, and join it."""
        if self._thread is None:
            return
        if not self.finished:
            self._cancelled = True
            self._go.give()
        self._thread.join()
        self._thread = None

    def call_block(
        self, block: int, args: tuple, kwargs: dict[str, Any], name: str = "", way_out: str = ""
    ) -> Any:
        """Hand the call of ``block`` over to the engine and wait for its output.

        Its ``name`` and a further ``way_out`` are for an error. Called by the coroutine's thread.
        """
        if self._cancelled:  # a model that catches everything and tries again
            raise _Cancelled
        if self._grad and not torch.is_grad_enabled():
            raise ModelNotSupported(
                f"the model called block {block} ({name}) under torch.no_grad(), as torch.utils.checkpoint does with"
                " use_reentrant=True. Give use_reentrant=False, or take requires_grad from the parameters that are not"
                f" to be trained instead{way_out}."
            )
        self._event = BlockCall(block, args, kwargs, autocast_state(), torch.autograd._get_sequence_nr())
        del args, kwargs
        return self._wait_for_reply()

    def hand_over(self, event: Any) -> Any:
        """Let ``start`` or ``resume`` return ``event``, and wait for the reply.

        Called by a thread that the coroutine waits for.
        """
        if self._cancelled:
            raise _Cancelled
        self._event = event
        del event
        return self._wait_for_reply()

    def _wait_for_reply(self) -> Any:
        self._hand_back()
        self._go.take()
        if self._cancelled:
            raise _Cancelled
        reply, self._reply = self._reply, None
        return reply

    def _hand_back(self) -> None:
        end_openmp_threads()
        self._back.give()

    def _switch(self) -> Any:
        self._go.give()
        self._back.take()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        event, self._event = self._event, None
        assert event is not None
        return event

    def _main(self, enter: Callable[[ExitStack], None]) -> None:
        self._go.take()
        try:
            if not self._cancelled:
                with ExitStack() as stack:
                    enter(stack)
                    _running.coroutine = self if self._is_micro_batch else None
                    self._event = ForwardEnd(self._run())
        except _Cancelled as error:
            if not self._cancelled:  # a coroutine that waits for this one was
                self._error = error
        except RuntimeError as error:
            self._error = _in_place(error) or error
        except BaseException as error:
            self._error = error
        finally:
            self.finished = True
            self._ended.set()
            self._hand_back()


def _in_place(error: RuntimeError) -> BlockInputChanged | None:
    """Return the error to raise if the model changed a tensor in place that a block had returned to it."""
    if "a leaf Variable that requires grad" not in str(error):
        return None
    changed = BlockInputChanged(
        f"the model changed a block's output in place ({error}). It is the next block's input and is kept"
        " for its second run: write x = x + y instead of x += y."
    )
    changed.__cause__ = error
    return changed


def _thread_state() -> Callable[[ExitStack], None]:
    """Return a function that sets the caller's thread-local torch settings in another thread."""
    grad, threads, device = torch.is_grad_enabled(), torch.get_num_threads(), callers_default_device()
    autocast, inference, cached = (
        autocast_state(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_cache_enabled(),
    )
    stream = current_stream_in_use()

    def enter(stack: ExitStack) -> None:
        torch.set_num_threads(threads)
        if inference:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(grad))
        if device != torch.device("cpu"):
            stack.enter_context(device)
        stack.enter_context(autocast_as(autocast, cached))
        if stream is not None:
            use_device(stream.device)
            stack.enter_context(on_stream(stream))

    return enter


def on_micro_batch() -> bool:
    """Return whether this thread runs a micro-batch, whose calls of blocks the engine takes."""
    return getattr(_running, "coroutine", None) is not None


def casts(autocast: Autocast) -> bool:
    """Return whether autocast is on. If it is, a graph holds copies of parameters, separate for every micro-batch."""
    return any(enabled for _, enabled, _ in autocast)


def autocast_state() -> Autocast:
    """Return this thread's autocast settings."""
    kinds = ("cpu", current_kind() or "cuda")
    return tuple([(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds])


def autocast_as(wanted: Autocast, cached: bool = True) -> AbstractContextManager[object]:
    """Return a context with the autocast settings ``wanted``, as another thread had them."""
    changed = [
        mode
        for mode, current in zip(wanted, autocast_state(), strict=True)
        if mode != current and (mode[1] or current[1])
    ]
    return _autocast(changed, cached) if changed else nullcontext()


@contextmanager
def _autocast(modes: Iterable[tuple[str, bool, torch.dtype]], cached: bool) -> Iterator[None]:
    with ExitStack() as stack:
        for kind, enabled, dtype in modes:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
        yield


def without_autocast() -> AbstractContextManager[object]:
    """Return a context without autocast, whatever the engine's caller has set."""
    enabled = [(kind, False, dtype) for kind, is_on, dtype in autocast_state() if is_on]
    return _autocast(enabled, True) if enabled else nullcontext()


def hand_over(blocks: Blocks) -> BlockFunction:
    """Return the function that the model's threads call instead of a block.

    It hands over to the engine and waits.
    """

    def call(block: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        coroutine = getattr(_running, "coroutine", None)
        way_out = f", or give {RESIDENT}" if block < blocks.embeddings else ""
        if coroutine is None:
            raise ModelNotSupported(
                f"{blocks.names[block]} was called apart from the model's forward pass: again in the backward pass, as"
                " torch.utils.checkpoint does, or on a thread of the script. Call it once, outside of"
                f" torch.utils.checkpoint{way_out}: the engine computes blocks again by itself."
            )
        return coroutine.call_block(block, args, kwargs, blocks.names[block], way_out)

    return call


@contextmanager
def all_cancelled(coroutines: list[Coroutine]) -> Iterator[None]:
    """Cancel ``coroutines`` on exit, so that none of their threads is left, whatever happened inside."""
    try:
        yield
    finally:
        for coroutine in coroutines:
            coroutine.cancel()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode inside the context, and restore the modes on exit."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def extract_loss(value: Any) -> torch.Tensor:
    """Return the loss in a model's result: a scalar tensor, ``.loss``, ``["loss"]`` or the first of a tuple."""
    loss = value
    if isinstance(value, dict) and "loss" in value:
        loss = value["loss"]
    elif not isinstance(value, torch.Tensor):
        loss = getattr(value, "loss", value[0] if isinstance(value, tuple) and value else None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise ModelNotSupported(
            f"the model returned {type(value).__name__} without a scalar loss. Pass labels in the micro-batch, "
            "or tuples (inputs..., target) with loss_fn=."
        )
    return loss


def checked_batches(
    micro_batches: Iterable[Any], loss_fn: Callable[..., Any] | None, blocks: Blocks
) -> list[Any]:
    """Return the micro-batches of one call as a list, mappings as dicts.

    Raises ``BadInput`` if they are not a list of mappings or of tuples, if mappings come with a ``loss_fn``, which is
    for tuples, or if they have embedded tokens, and one of the ``blocks`` is the embedding.
    """
    if isinstance(micro_batches, (Mapping, torch.Tensor, str)):
        raise BadInput(
            f"the micro-batches are a {type(micro_batches).__name__}, not a list of them: for one micro-batch call"
            " engine.step([batch])."
        )
    checked = [_checked(index, batch, loss_fn) for index, batch in enumerate(micro_batches)]
    for index, batch in enumerate(checked if blocks.embeddings else ()):
        if isinstance(batch, dict) and batch.get("inputs_embeds") is not None:
            raise BadInput(
                f'micro-batch {index} has "inputs_embeds", and {blocks.names[0]}, which is streamed, has to be called'
                f" in every forward pass: give input_ids, or {RESIDENT}."
            )
    return checked


def _checked(index: int, batch: Any, loss_fn: Callable[..., Any] | None) -> Any:
    if isinstance(batch, OwnCall):
        return batch
    if isinstance(batch, Mapping):
        if loss_fn is not None:
            raise BadInput(
                f"micro-batch {index} is a {type(batch).__name__}, and loss_fn is for tuples (inputs..., target):"
                " give a tuple, or leave loss_fn out and have the model return its loss."
            )
        return dict(batch)
    if not isinstance(batch, (tuple, list)):
        raise BadInput(
            f"micro-batch {index} is a {type(batch).__name__}; give a dict of the model's keyword arguments, or a"
            " tuple of its positional ones, (tokens,) for a single tensor."
        )
    return batch


def late_call(
    model: nn.Module, batch: Any, loss_fn: Callable[..., Any] | None, send: Callable[[Any], Any]
) -> Callable[[], Any]:
    """Return a call of ``model`` that brings ``batch`` to the device with ``send`` when the call begins.

    The tensors are released when the call ends: of many micro-batches, only those under way are on the device.
    """
    return lambda: module_call(model, send(batch), loss_fn)()


def module_call(model: nn.Module, inputs: Any, loss_fn: Callable[..., Any] | None) -> Callable[[], Any]:
    """Return a call: ``model(**inputs)`` for a mapping; ``loss_fn(model(*inputs[:-1]), inputs[-1])`` for a tuple."""
    if isinstance(inputs, OwnCall):
        return inputs.run
    if isinstance(inputs, Mapping):
        return lambda: model(**inputs)
    if loss_fn is None:
        return lambda: model(*inputs)
    return lambda: loss_fn(model(*inputs[:-1]), inputs[-1])
