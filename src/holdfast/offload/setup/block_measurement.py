"""The measurement of a model without running it: one micro-batch through fake tensors.

The model's own forward and backward are traced with tensors that have shapes and no bytes. The trace gives:

* the bytes that flow between blocks,
* the floating-point operations of a block,
* the most memory that activations take: of one block while it runs forward and backward, and of the last block with the
  epilogue and the loss,
* the bytes that a block's graph holds.

Of equal blocks one is traced (``equal_calls``), so a model of any size is measured in a second, before anything is
allocated.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ...chunked_loss import COLLECTOR, PartCollector
from ...errors import ModelNotSupported
from ...garbage import without_collection
from ...state.capture import AS_STORED
from ..model.blocks import Blocks, Patch, configurations, has_own_forward, unrepeated_parameters
from ..model.chunked_head import ChunkedHead, has_ordinary_loss
from ..model.microbatches import extract_loss, module_call
from .equal_calls import TracedCall, call_form, output_maker


@dataclass(frozen=True, kw_only=True)
class MeasuredBlocks:
    """The cost of one micro-batch, in bytes and floating-point operations."""

    input_bytes: int
    """Bytes of the float tensors that flow from one block to the next."""
    block_bytes: int
    """Bytes of activations of one block at their peak, forward and backward, beyond its input."""
    last_bytes: int
    """The same for the epilogue and the loss, with the last block unless the epilogue is streamed."""
    activation_bytes: tuple[int, ...]
    """Bytes that the graph of each block's forward pass holds, beyond the block's input."""
    block_flop: float
    """Floating-point operations of one forward pass of one block."""
    head_flop: float
    """Floating-point operations of prologue, epilogue and loss, forward and backward."""


class _Counter(TorchDispatchMode):
    """Counts floating-point operations, and the bytes of storages that operations made and that are still alive.

    A view of a tensor that was there before counts nothing if the tensor is ``known``. ``FlopCounterMode`` of torch
    counts the same operations in more time than the rest of the trace takes, and its hooks keep graphs alive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.flop = 0
        self.known: set[int] = set()
        """Identities of the storages that are counted, and of those that are not to be."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device  # asked twice as often as anything is computed
        run, kwargs = _grouped_mm if func is torch.ops.aten._grouped_mm.default else func, kwargs or {}
        out = run(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flop += formula(*args, **kwargs, out_val=out)
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.known:
            return
        nbytes = storage.nbytes()
        self.known.add(key)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key, nbytes)

    def _gone(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.live -= nbytes


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    """Compute a grouped matrix product of fake tensors in any float dtype.

    The fake kernel of torch accepts only bfloat16, although the real ones multiply float32 as well.
    """
    half = [torch.empty_like(each, dtype=torch.bfloat16) for each in (a, b)]
    out = torch.ops.aten._grouped_mm.default(*half, *rest, **options)
    return torch.empty_like(out, dtype=a.dtype)


class _Probe:
    """Replacement for the blocks' forwards that measures them.

    It measures the first block whose inputs need gradients, passes the others, and keeps the graph of the last, unless
    the epilogue is a unit of its own.
    """

    def __init__(self, blocks: Blocks, counter: _Counter, backward: bool) -> None:
        self.counter, self.backward, self.blocks = counter, backward, blocks
        self.patch = Patch(blocks, self.call)
        self.alone = [has_own_forward(module) for module in blocks.modules]
        """True for each block that is compiled or has a forward of its own, and so cannot be compared with others."""
        self.input_bytes = self.block_bytes = self.last_start = 0
        self.measured = False
        self.moving: list[int] = []
        """Positions of a block's flattened inputs that need gradients."""
        self.traced: list[TracedCall] = []
        self.ends: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Outputs of the last block that need gradients, and what the epilogue gets in their place."""
        self.activation_bytes = [0] * len(blocks.modules)
        self.block_flop = self.blocks_flop = 0.0

    def call(self, index: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        last = index == len(self.patch.forwards) - 1
        args, kwargs = detached((args, kwargs))
        nbytes = _moving_bytes((args, kwargs))
        if not self.measured and (nbytes or last):
            self.measured, self.input_bytes = True, nbytes
            self.moving = [i for i, leaf in enumerate(pytree.tree_leaves((args, kwargs))) if moves(leaf)]
            output = self._measure(index, args, kwargs)
            if not last:
                return output
        if not last:
            return self._pass(index, args, kwargs)
        if self.blocks.epilogue:
            args, kwargs = moving(self._pass(index, args, kwargs), ()), {}
        self.blocks_flop = self.counter.flop
        self.last_start, self.counter.peak = self.counter.live, self.counter.live
        if self.blocks.epilogue:
            return args
        with torch.set_grad_enabled(self.backward):
            output = self.patch.forwards[index](*args, **kwargs)
        return self._cut(output, (args, kwargs)) if self.backward else output

    def _cut(self, output: Any, inputs: Any) -> Any:
        """Return the last block's output for a backward pass that comes before the block's, as in a step."""
        cut = moving(output, inputs)
        pairs = zip(pytree.tree_leaves(output), pytree.tree_leaves(cut), strict=True)
        self.ends = [(root, leaf) for root, leaf in pairs if moves(root) and leaf is not root]
        return cut

    def run_last_backward(self) -> None:
        """Run the backward pass of the last block, after that of the epilogue."""
        ends = [(root, leaf.grad) for root, leaf in self.ends if leaf.grad is not None]
        if ends:
            torch.autograd.backward([root for root, _ in ends], [grad for _, grad in ends])

    def _pass(self, index: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the output of a block before the last, or of an epilogue's last.

        The bytes that its graph would hold are counted, and not kept.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for position in self.moving:
            leaf = leaves[position] if position < len(leaves) else None
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                leaves[position] = leaf.detach().requires_grad_()
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        form = self._form(index, args, kwargs) if self.measured else None
        for equal in self.traced:
            if form is not None and equal.form == form:
                self.activation_bytes[index] = equal.activation_bytes
                return equal.output(leaves)
        output = self._forward(index, args, kwargs, keep=False)
        self.blocks_flop = self.counter.flop
        if not self.measured:
            return moving(output, (args, kwargs))
        self._note(form, index, leaves, output)
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output)

    def _measure(self, index: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Measure the peak bytes of a forward and a backward, and their operations; return the output."""
        form = self._form(index, args, kwargs)
        before = self.counter.flop
        start = self.counter.peak = self.counter.live
        output = self._forward(index, args, kwargs, keep=True)
        roots = [t for t in pytree.tree_leaves(output) if moves(t)]
        if roots:
            torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
        self.block_bytes = self.counter.peak - start
        self.block_flop = (self.counter.flop - before) / (3 if self.backward else 1)
        self.blocks_flop = self.counter.flop
        self._note(form, index, pytree.tree_leaves((args, kwargs)), output)
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output)

    def _forward(self, index: int, args: tuple, kwargs: dict[str, Any], keep: bool) -> Any:
        """Run a block's forward pass, and count the bytes that its graph holds. ``keep`` the graph or not."""
        before, held = self.counter.known.copy(), {}

        def pack(tensor: torch.Tensor) -> torch.Tensor | None:
            storage = tensor.untyped_storage()
            if storage._cdata in self.counter.known and storage._cdata not in before:
                held[storage._cdata] = storage
            return tensor if keep else None

        with torch.set_grad_enabled(self.backward), saved_tensors_hooks(pack, _unpacked):
            output = self.patch.forwards[index](*args, **kwargs)
        self.activation_bytes[index] = sum(storage.nbytes() for storage in held.values())
        held.clear()
        return output

    def _form(self, index: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        place = index - self.blocks.embeddings  # among the model's own blocks
        return None if self.alone[index] else call_form(self.blocks.modules[index], place, args, kwargs)

    def _note(self, form: Any, index: int, inputs: list[Any], output: Any) -> None:
        """Note what the trace of a call found, for calls of the same ``form``."""
        made = None if form is None else output_maker(output, inputs)
        if made is not None:
            self.traced.append(TracedCall(form, self.activation_bytes[index], made))


def _unpacked(packed: torch.Tensor | None) -> torch.Tensor:
    assert packed is not None, "no backward pass goes through this graph"
    return packed


def moves(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def moving(output: Any, inputs: Any) -> Any:
    """Return a block's output as the next block gets it in training: what the block computed needs gradients."""
    constants = {id(leaf) for leaf in pytree.tree_leaves(inputs)}

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or id(leaf) in constants or not leaf.is_floating_point():
            return leaf
        return leaf.detach().requires_grad_()

    return pytree.tree_map(moved, output)


def detached(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.detach().requires_grad_() if moves(leaf) else leaf, tree)


def _moving_bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(tree) if moves(leaf))


def measure(
    model: nn.Module,
    blocks: Blocks,
    sample: Any,
    dtype: torch.dtype,
    loss_fn: Any = None,
    backward: bool = True,
) -> MeasuredBlocks:
    """Trace one micro-batch, forward and, if ``backward``, also backward.

    Raises ``ModelNotSupported`` if the model cannot be traced this way. Training may still work; only the prediction is
    missing.
    """
    try:
        return _trace(model, blocks, sample, dtype, loss_fn, backward)
    except Exception as error:
        raise ModelNotSupported(
            f"{type(model).__name__} cannot be traced with fake tensors: {error}"
        ) from error


def _trace(
    model: nn.Module, blocks: Blocks, sample: Any, dtype: torch.dtype, loss_fn: Any, backward: bool
) -> MeasuredBlocks:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    counter = _Counter()
    probe = _Probe(blocks, counter, backward)
    here = partial(_fake_here, fake)
    in_parts = unrepeated_parameters(model, blocks)
    fakes = swapped(model.modules(), lambda own: _faked(own, dtype, id(own) in in_parts), here)
    is_chunked = loss_fn is None and has_ordinary_loss(model)
    head = ChunkedHead(model, quiet=True).applied() if is_chunked else nullcontext()
    with (
        without_collection(),  # a model's own cycles are not to be freed while a block is measured
        fake,
        restored(model),
        _experts_together(model),
        fakes,
        probe.patch.applied(),
        head,
    ):
        counter.known |= {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        inputs = dict(sample) if isinstance(sample, Mapping) else sample
        inputs = pytree.tree_map(lambda x: here(x) if isinstance(x, torch.Tensor) else x, inputs)
        with counter, torch.enable_grad():
            loss = extract_loss(module_call(model, inputs, loss_fn)())
            after = counter.flop
            if backward:
                loss.backward(retain_graph=True)  # as a step does
                del loss
                probe.run_last_backward()
    end = counter.flop
    last_flop = 0.0 if blocks.epilogue else probe.block_flop
    head_flop = end - probe.blocks_flop - 3 * last_flop
    if not backward:
        head_flop = 3 * (after - probe.blocks_flop - last_flop)
    return MeasuredBlocks(
        input_bytes=probe.input_bytes,
        block_bytes=probe.block_bytes,
        last_bytes=counter.peak - probe.last_start,
        activation_bytes=tuple(probe.activation_bytes),
        block_flop=float(probe.block_flop),
        head_flop=float(max(head_flop, 0)),
    )


@contextmanager
def _experts_together(model: nn.Module) -> Iterator[None]:
    """Have experts of transformers computed together inside the context: a loop over some of them cannot be traced."""
    name = "_experts_implementation_internal"
    found = [config for _, config in configurations(model) if getattr(config, name, None) == "eager"]
    for config in found:
        setattr(config, name, "grouped_mm")
    try:
        yield
    finally:
        for config in found:
            setattr(config, name, "eager")


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restore every module's attributes, and the containers among them, on exit.

    Otherwise a table that a model creates at its first forward would stay fake.
    """
    saved: list[tuple[Any, Any]] = []
    for module in model.modules():
        inside = [value for value in vars(module).values() if type(value) in (dict, OrderedDict, list, set)]
        saved += [(table, table.copy()) for table in (*inside, vars(module))]
    try:
        yield
    finally:
        for table, before in saved:
            table.clear()
            table.extend(before) if isinstance(table, list) else table.update(before)


@contextmanager
def swapped(
    modules: Iterable[nn.Module],
    parameter: Callable[[nn.Parameter], nn.Parameter],
    buffer: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[None]:
    """Replace parameters and buffers of ``modules`` inside the context.

    Each parameter is replaced by the result of ``parameter``, called once for each, and each buffer by that of
    ``buffer``.
    """
    made: dict[int, nn.Parameter] = {}
    saved: list[tuple[dict[str, Any], str, Any]] = []
    for module in modules:
        for name, own in module._parameters.items():
            if own is not None:
                if id(own) not in made:
                    made[id(own)] = parameter(own)
                saved.append((module._parameters, name, own))
                module._parameters[name] = made[id(own)]
        for name, own in module._buffers.items():
            if own is not None:
                saved.append((module._buffers, name, own))
                module._buffers[name] = buffer(own)
    try:
        yield
    finally:
        for table, name, value in saved:
            table[name] = value


def _fake_here(fake: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake of ``tensor`` on the CPU, because parameters, buffers and inputs must be on one device."""
    if tensor.device.type == "cpu":
        return fake.from_tensor(tensor)
    with fake:
        there = fake.from_tensor(tensor.detach().to("meta"))
        return torch.empty_like(there, device="cpu").requires_grad_(tensor.requires_grad)


def _faked(parameter: nn.Parameter, dtype: torch.dtype, in_parts: bool) -> nn.Parameter:
    """Return a fake parameter in the compute dtype whose gradient is dropped as soon as it arrives, as in training.

    With ``in_parts`` a loss in chunks has it in parts.
    """
    as_stored = hasattr(parameter, AS_STORED)
    empty = torch.empty(parameter.shape, dtype=parameter.dtype if as_stored else dtype, device="cpu")
    new = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    if as_stored:
        setattr(new, AS_STORED, getattr(parameter, AS_STORED))
    if new.requires_grad:
        new.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        if in_parts:
            setattr(new, COLLECTOR, PartCollector(lambda parts: deque(parts, maxlen=0)))
    return new
