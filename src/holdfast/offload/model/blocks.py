"""The repeated blocks of a model, and which parameter belongs to which block.

Blocks are modules that the user names, or those of the ``nn.ModuleList`` that ``candidates`` ranks first. A
parameter belongs to a block if every module that holds it lies in that block. A parameter that the prologue, the
epilogue or several blocks hold is resident, unless embedding and head are streamed too: then an embedding is one more
block before the others, and the parameters after the last block are one more unit.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ...errors import ModelNotSupported
from ...quantities import KiB
from ...state.capture import Captured, CapturedParameter, join, plain_paths
from .side_outputs import SideOutputs, with_side_outputs

SMALL = 64 * KiB
"""Bytes. Smaller tensors leave no holes in the heap that matter."""

EPILOGUE = "epilogue"
"""Name of the unit with the parameters of the epilogue, where they are streamed."""

LEAST_STREAMED = 1 / 10
"""Least size of an embedding or an epilogue that is worth streaming, as a fraction of the largest block's."""

EMPTY = "_holdfast_empty"
"""Attribute set on a parameter that ``empty_parameters`` has made empty."""

Place = tuple[nn.Module, str]
"""A module and the name under which it holds a parameter."""


@dataclass(frozen=True)
class Blocks:
    """The blocks of a model, in the order in which they run, with their names."""

    modules: tuple[nn.Module, ...]
    names: tuple[str, ...]
    embeddings: int = 0
    """Number of embeddings that come before the repeated blocks and are streamed like them."""
    epilogue: tuple[nn.Module, ...] = ()
    """Modules after the blocks whose parameters are streamed as one more unit; empty if they stay on the device."""
    tied: int | None = None
    """Number of the streamed embedding whose parameter the epilogue uses too, as its head; None if there is none."""

    @property
    def streams_all(self) -> bool:
        """True if an embedding or the epilogue is streamed."""
        return bool(self.embeddings or self.epilogue)

    @property
    def unit_names(self) -> tuple[str, ...]:
        """The names of the units that are streamed."""
        return (*self.names, EPILOGUE) if self.epilogue else self.names

    def is_repeated(self, unit: int) -> bool:
        """Return whether the unit with this number is a repeated block, neither embedding nor epilogue.

        The gradients of the others may come in parts.
        """
        return self.embeddings <= unit < len(self.modules)

    @property
    def repeated(self) -> Blocks:
        """The repeated blocks alone."""
        return Blocks(self.modules[self.embeddings :], self.names[self.embeddings :])

    @property
    def summary(self) -> str:
        """The first and the last block's name, for a person."""
        more = f" to {self.names[-1]}" if len(self.names) > 1 else ""
        return f"{self.names[0]}{more}"

    @cached_property
    def buffer_holders(self) -> list[list[tuple[str, nn.Module]]]:
        """The modules with buffers in each block, with their names."""
        return [
            [(name, holder) for name, holder in module.named_modules() if holder._buffers]
            for module in self.modules
        ]


COMPILED = "_compiled_call_impl"
"""Attribute in which ``Module.compile`` keeps what is called instead of the module."""

REPLACED = ("forward", COMPILED)

BlockFunction = Callable[[int, tuple, dict[str, Any]], Any]
"""Function called with a block's index and its arguments; returns what the block would return."""


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module or one inside of it is compiled."""
    return any(
        each._compiled_call_impl is not None or type(each).__name__ == "OptimizedModule"
        for each in module.modules()
    )


def has_own_forward(module: nn.Module) -> bool:
    """Return whether a module is compiled, or has another forward than its class."""
    return "forward" in vars(module) or is_compiled(module)


class Patch:
    """Replaces the forward of every block by ``call`` while applied."""

    def __init__(self, blocks: Blocks, call: BlockFunction) -> None:
        self.blocks, self._call = blocks, call
        self._before = [
            {name: module.__dict__[name] for name in REPLACED if name in module.__dict__}
            for module in blocks.modules
        ]
        self.forwards = [
            with_side_outputs(self._forward(index), name, is_compiled(blocks.modules[index]))
            for index, name in enumerate(blocks.names)
        ]
        """The blocks' own forwards."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        try:
            for index in range(len(self.blocks.modules)):
                self._put(index)
            yield
        finally:
            for index in range(len(self.blocks.modules)):
                self._take_away(index)

    def _put(self, index: int) -> None:
        stand_in = {"forward": lambda *args, **kwargs: self._stand_in(index, args, kwargs), COMPILED: None}
        self.blocks.modules[index].__dict__.update(stand_in)

    def _stand_in(self, index: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Hand a call of a block over, with what leaves the block beside its return value."""
        side = SideOutputs.of(args, kwargs)
        if side is None:
            return self._call(index, args, kwargs)
        return side.receive(self._call(index, *side.enclose(args, kwargs)))

    def _take_away(self, index: int) -> None:
        """Restore the block's attributes as they were."""
        held = self.blocks.modules[index].__dict__
        for name in REPLACED:
            held.pop(name, None)
        held.update(self._before[index])

    def _forward(self, index: int) -> Callable[..., Any]:
        """Return the block's own forward, or its compiled call if the block was compiled in place.

        The patch is removed from the block while the compiled call runs.
        """
        module = self.blocks.modules[index]
        compiled = self._before[index].get(COMPILED)
        if compiled is None:
            return module.forward

        def call(*args: Any, **kwargs: Any) -> Any:
            applied = COMPILED in module.__dict__ and module.__dict__[COMPILED] is None
            self._take_away(index)
            try:
                return compiled(*args, **kwargs)
            finally:
                if applied:
                    self._put(index)

        return call


@dataclass(frozen=True, eq=False)
class Owned:
    """A parameter with every place that holds it."""

    captured: CapturedParameter
    places: tuple[Place, ...]


def find_blocks(model: nn.Module, chosen: Sequence[nn.Module] | nn.ModuleList | None = None) -> Blocks:
    """Return the blocks of ``model``: those ``chosen``, or the repeated ones, in the order in which they run.

    Raises ``ModelNotSupported`` if there are none.
    """
    if chosen is not None:
        return _chosen(model, list(chosen))
    lists = candidates(model)
    if not lists:
        raise ModelNotSupported(
            f"{type(model).__name__} has no nn.ModuleList of blocks. Pass blocks=model.path.to.the.list,"
            " or several modules in the order in which they run: out-of-core training streams repeated blocks."
        )
    name, module = lists[0]
    prefix = plain_paths(model)[name]
    return Blocks(tuple(module), tuple(join(prefix, str(i)) for i in range(len(module))))


def candidates(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """Return the outermost lists of modules that repeat, with their names, the likeliest blocks first.

    The modules are of one class, or, in hybrid models, of several classes of which one comes at least twice. Modules
    that consist of others come before plain layers, such as tables and heads; then the larger list comes first.
    """
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and _repeats(module)
    ]
    return sorted(
        _outermost(lists), key=lambda item: (_is_composed(item[1]), parameter_bytes(item[1])), reverse=True
    )


def _is_composed(modules: nn.ModuleList) -> bool:
    return any(True for _ in modules[0].children())


def parameter_bytes(module: nn.Module) -> int:
    """Return the bytes of the parameters of ``module``. Lazy parameters have no shape yet, are refused later, and count
    0."""
    shaped = (p for p in module.parameters() if not nn.parameter.is_lazy(p))
    return sum(parameter.numel() * parameter.element_size() for parameter in shaped)


def _chosen(model: nn.Module, modules: list[nn.Module]) -> Blocks:
    """Return ``modules`` as blocks. Raises ``ModelNotSupported`` unless they are separate modules of ``model``."""
    names = {id(module): name for name, module in model.named_modules()}
    inside = [id(below) for module in modules for below in module.modules() if below is not module]
    for place, module in enumerate(modules):
        held = "is not in the model"
        if id(module) in names:
            held = "lies in another one" if id(module) in inside else "is the whole model" * (module is model)
        if held or modules.index(module) != place:
            raise ModelNotSupported(
                f"blocks[{place}], a {type(module).__name__}, {held or 'is there twice'}. Pass"
                " blocks=model.path.to.the.list, or several modules of the model in the order in which they run."
            )
    if not modules:
        raise ModelNotSupported(
            "blocks= is empty. Leave it out to take the largest list of modules of one class."
        )
    plain = plain_paths(model)
    return Blocks(tuple(modules), tuple(plain[names[id(module)]] for module in modules))


def _outermost(lists: list[tuple[str, nn.ModuleList]]) -> list[tuple[str, nn.ModuleList]]:
    """Return the lists that lie in no other list: a block's list of experts is part of the block."""
    return [item for item in lists if not any(item[0].startswith(f"{name}.") for name, _ in lists if name)]


def _repeats(module: nn.ModuleList) -> bool:
    kinds = {type(child) for child in module}
    if len(kinds) <= 1:
        return bool(kinds)
    return len(kinds) < len(module) and all(any(True for _ in child.children()) for child in module)


def with_embedding_and_head(model: nn.Module, blocks: Blocks, tied: bool = True) -> Blocks:
    """Return ``blocks`` with the embeddings before them and what comes after them, the head above all.

    A parameter that an embedding and the epilogue share belongs to the embedding, or stays if ``tied`` is False. Other
    parameters that are also held elsewhere stay, and so does what is small. Embeddings are taken in the order in which
    the model registered them. Raises ``ModelNotSupported`` if nothing is left to stream.
    """
    if not can_stream(model, blocks, tied):
        raise ModelNotSupported(
            f"{type(model).__name__} has no embedding or head that would be worth streaming: they are small, or share a"
            f" parameter with other modules{'' if tied else ' (with MeZO one that both share stays)'}. Leave"
            ' embedding_and_head="streamed" out.'
        )
    embeddings, epilogue, shared = _streamable(model, blocks, tied)
    names, plain = {id(module): name for name, module in model.named_modules()}, plain_paths(model)
    return Blocks(
        (*embeddings, *blocks.modules),
        (*(plain[names[id(module)]] for module in embeddings), *blocks.names),
        len(embeddings),
        epilogue,
        shared,
    )


def can_stream(model: nn.Module, blocks: Blocks, tied: bool = True) -> bool:
    """Return whether ``model`` has an embedding or a head that is worth streaming, one that is ``tied`` included."""
    embeddings, epilogue, _ = _streamable(model, blocks, tied)
    return bool(embeddings or epilogue)


def _streamable(
    model: nn.Module, blocks: Blocks, tied: bool
) -> tuple[tuple[nn.Module, ...], tuple[nn.Module, ...], int | None]:
    """Return the embeddings and the modules of the epilogue that are worth streaming, and which embedding is tied."""
    before, after = _around(model, blocks)
    places = _places(model)
    least = LEAST_STREAMED * max(map(parameter_bytes, blocks.modules))

    def own_bytes(*modules: nn.Module) -> int:
        """Return the bytes of the parameters of the first that are held by ``modules`` alone."""
        inside = {id(each) for module in modules for each in module.modules()}
        held = (p for p in modules[0].parameters() if all(id(m) in inside for m, _ in places[id(p)]))
        return sum(parameter.numel() * parameter.element_size() for parameter in held)

    uncalled = {id(each) for module in model.modules() for each in _replaced(module)}
    inner = [
        each for module in before for each in module.modules()
        if isinstance(each, nn.Embedding) and id(each) not in uncalled
    ]  # fmt: skip
    shared = [
        each for each in inner
        if not own_bytes(each) and own_bytes(each, *after) > least and any(map(own_bytes, after))
    ]  # fmt: skip
    shared = shared if tied and len(shared) == 1 else []
    found = [each for each in inner if each in shared or own_bytes(each) > least]
    epilogue = tuple(after) if shared or sum(map(own_bytes, after)) > least else ()
    return tuple(found), epilogue, found.index(shared[0]) if shared else None


def _replaced(module: nn.Module) -> list[nn.Module]:
    """Return the modules for which PEFT calls a trained copy (``modules_to_save``), if ``module`` holds both."""
    original, copies = (module._modules.get(name) for name in ("original_module", "modules_to_save"))
    return [] if original is None or not isinstance(copies, nn.ModuleDict) else [*original.modules()]


def _around(model: nn.Module, blocks: Blocks) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the outermost modules that were registered before the first block, and after the last one."""
    inside, before, after = {id(module) for module in blocks.modules}, [], []
    left = len(inside)

    def visit(module: nn.Module) -> None:
        nonlocal left
        for child in module.children():
            if id(child) in inside:
                left -= 1
            elif any(id(each) in inside for each in child.modules()):
                visit(child)
            elif left == len(inside):
                before.append(child)
            elif left == 0:
                after.append(child)

    visit(model)
    return before, after


def _places(model: nn.Module) -> dict[int, list[Place]]:
    """Return every place of each parameter, by the parameter's identity."""
    places: dict[int, list[Place]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return places


def configurations(model: nn.Module) -> list[tuple[str, Any]]:
    """Return every configuration of ``model`` and of its modules, nested ones included, each once, with its name."""
    found: dict[int, tuple[str, Any]] = {}

    def visit(name: str, config: Any) -> None:
        if not hasattr(config, "to_dict") or isinstance(config, type) or id(config) in found:
            return
        found[id(config)] = name, config
        for key, value in vars(config).items():
            visit(f"{name}.{key}", value)

    for path, module in model.named_modules():
        visit(join("model" if not path else f"model.{path}", "config"), getattr(module, "config", None))
    return list(found.values())


def owned_parameters(
    model: nn.Module, captured: Captured, blocks: Blocks
) -> tuple[list[list[Owned]], list[Owned]]:
    """Return the parameters of each streamed unit, and the resident parameters, both in the model's order."""
    block_of = {id(m): index for index, block in enumerate(blocks.modules) for m in block.modules()}
    epilogue = len(blocks.modules)
    block_of |= {id(m): epilogue for module in blocks.epilogue for m in module.modules()}
    places = _places(model)
    by_block: list[list[Owned]] = [[] for _ in blocks.unit_names]
    resident: list[Owned] = []
    for parameter in captured.parameters:
        owned = Owned(parameter, tuple(places[id(parameter.parameter)]))
        holders = {block_of.get(id(module)) for module, _ in owned.places}
        if blocks.tied is not None and holders == {blocks.tied, epilogue}:
            holders = {blocks.tied}
        (block,) = holders if len(holders) == 1 else (None,)
        (resident if block is None else by_block[block]).append(owned)
    return by_block, resident


def unrepeated_parameters(model: nn.Module, blocks: Blocks) -> set[int]:
    """Return the identities of the parameters of streamed embeddings and of the epilogue, of units not repeated."""
    modules = [*blocks.modules[: blocks.embeddings], *blocks.epilogue]
    inside = {id(each) for module in modules for each in module.modules()}
    return {key for key, held in _places(model).items() if all(id(module) in inside for module, _ in held)}


def install(owned: Owned, parameter: nn.Parameter) -> None:
    """Make every place of ``owned`` hold ``parameter``."""
    for module, name in owned.places:
        module._parameters[name] = parameter


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Build modules whose parameters are on ``meta`` and whose buffers are real.

    A model of any size can be created inside this context. ``holdfast.offload`` then materialises it block by block,
    with the modules' ``reset_parameters`` and the model's ``_init_weights``. Values that constructors give parameters
    in any other way (a projection set to zero, a bias of 0.5) are lost: pass ``offload(init=...)``, a function that
    sets what one module itself holds.

    Memory that a layer allocates for a parameter and throws away does not come from the heap. It would leave a hole
    there for each block, and training would fill the holes.
    """
    _patch.enter()
    try:
        with _OutsideTheHeap():
            yield
    finally:
        _patch.leave()


class _EmptyParameters(threading.local):
    """Patch of ``nn.Module.register_parameter``, applied while any thread is inside ``empty_parameters``.

    Only parameters that such a thread registers are made empty.
    """

    depth = 0  # of this thread
    _lock, _inside = threading.Lock(), 0
    _register = nn.Module.register_parameter

    def enter(self) -> None:
        with _EmptyParameters._lock:
            if _EmptyParameters._inside == 0:
                _EmptyParameters._register = nn.Module.register_parameter
                nn.Module.register_parameter = _register_empty  # type: ignore[method-assign]
            _EmptyParameters._inside += 1
        self.depth += 1

    def leave(self) -> None:
        self.depth -= 1
        with _EmptyParameters._lock:
            _EmptyParameters._inside -= 1
            if _EmptyParameters._inside == 0:
                nn.Module.register_parameter = _EmptyParameters._register  # type: ignore[method-assign]


_patch = _EmptyParameters()


def _register_empty(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    _EmptyParameters._register(module, name, param)
    if _patch.depth and param is not None and not param.is_meta:
        empty = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
        empty.__dict__.update(param.__dict__, **{EMPTY: True})
        module._parameters[name] = empty


class _OutsideTheHeap(TorchFunctionMode):
    """Makes ``torch.empty`` of host memory return pages that go back to the system together with the tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plain = kwargs.keys() <= {"device", "dtype"} and kwargs.get("device") is None
        if func is not torch.empty or not plain or torch.get_default_device() != torch.device("cpu"):
            return func(*args, **kwargs)
        shape = torch.Size(args if args and isinstance(args[0], int) else args[0] if args else ())
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        nbytes = shape.numel() * dtype.itemsize
        if nbytes < SMALL:
            return func(*args, **kwargs)
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=dtype).view(shape)
