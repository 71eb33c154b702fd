"""The values that a training script holds by itself, as far as they can be found: by name, with a kind and a digest.

A drill compares them between an uninterrupted run and a resumed one at the same step. A value that differs is no part
of the run, so it may be the reason why training went another way. The search begins at the variables of the functions
that are running and of their modules, and follows containers and the script's own objects; libraries' own objects are
passed over, as are a model's tensors. It only reads, runs no code of the script, and stops at ``MOST_VALUES``. Called
at the end of each step of a drill.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import sysconfig
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, FunctionType, GeneratorType, MethodType, SimpleNamespace
from typing import Any

import xxhash

MOST_VALUES, MOST_DEPTH, MOST_ITEMS = 2000, 5, 64
"""Bounds of the search: values that are found, objects on the way to one, items of a container."""
MOST_BYTES = 16 << 20
"""The bytes of a tensor above which it is passed over."""
GENERATOR, POSITION, DATA, VALUE = "generator", "position", "data", "value"
"""The kinds of values: random generators, positions of loaders, tensors and arrays, anything else that is plain."""
PLAIN = (bool, int, float, complex, str, bytes, type(None))
Values = dict[str, tuple[str, str]]
"""Kind and digest of each value, by the name that a person would look for."""

_HERE = str(Path(__file__).parents[1])
_PATHS = sysconfig.get_paths()
_LIBRARIES = tuple({_HERE, *(_PATHS[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))})


def script_values() -> Values:
    """Return the values of the script that runs above this call. An object that cannot be read is left out."""
    search = _Search()
    for frame in _frames():
        search.visit_variables(frame)
    search.visit_suspended()
    return search.found


def is_of_script(file: str | None) -> bool:
    """Return whether ``file`` is the script's own code: not of Python, an installed package, or this library."""
    return file is not None and not file.startswith(("<frozen", *_LIBRARIES))


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_of_script(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


class _Search:
    def __init__(self) -> None:
        self.found: Values = {}
        self._seen: set[int] = set()
        self._counts: Counter[str] = Counter()
        torch: Any = sys.modules.get("torch")
        numpy: Any = sys.modules.get("numpy")
        self._tensor: Any = getattr(torch, "Tensor", ())
        self._module: Any = torch.nn.Module if torch else ()
        self._generator: Any = getattr(torch, "Generator", ())
        self._array: Any = getattr(numpy, "ndarray", ())
        self._numpy: Any = (numpy.random.Generator, numpy.random.RandomState) if numpy else ()
        data: Any = sys.modules.get("torch.utils.data.dataloader")
        self._loader: Any = data.DataLoader if data else ()
        self._iterators: Any = data._BaseDataLoaderIter if data else ()

    def visit_variables(self, frame: FrameType) -> None:
        """Find the values of the variables of a running function, and of its module."""
        code = frame.f_code
        of = "" if code.co_name == "<module>" else f" in {code.co_name}()"
        where = f"{of} ({Path(code.co_filename).name})"
        self._visit_all(frame.f_locals, where)
        if of and id(frame.f_globals) not in self._seen:
            self._visit_all(frame.f_globals, f" ({Path(code.co_filename).name})")
        self._seen.add(id(frame.f_globals))

    def visit_suspended(self) -> None:
        """Find the variables of the script's suspended generator functions, and iterators of loaders in any loop."""
        for each in gc.get_objects():
            kind = type(each)
            if kind is GeneratorType:
                frame = each.gi_frame
                if frame is not None and is_of_script(each.gi_code.co_filename):
                    self.visit_variables(frame)
            elif (
                self._iterators and kind.__name__.endswith("LoaderIter") and isinstance(each, self._iterators)
            ):
                self._visit_iterator(each)

    def _visit_all(self, variables: Mapping[str, Any], where: str) -> None:
        for name, value in list(variables.items()):
            if type(name) is str and not name.startswith("__"):
                self._visit(name, where, value, MOST_DEPTH)

    def _visit(self, name: str, where: str, value: Any, depth: int) -> None:
        if len(self.found) >= MOST_VALUES or depth == 0:
            return
        try:
            self._look(name, where, value, depth)
        except Exception:  # an object of the script may do anything when it is read
            return

    def _look(self, name: str, where: str, value: Any, depth: int) -> None:
        if isinstance(value, PLAIN):
            self._put(name, where, VALUE, repr(value).encode())
        elif isinstance(value, (self._tensor, self._array)):
            self._look_at_tensor(name, where, value)
        elif id(value) in self._seen:
            return
        else:
            self._seen.add(id(value))
            if (state := self._state_of_generator(value)) is not None:
                self._put(name, where, GENERATOR, state)
                return
            for part, inner in self._parts(value):
                self._visit(name + part, where, inner, depth - 1)

    def _parts(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield the values inside ``value``, each with what follows the name of ``value``."""
        if isinstance(value, dict):
            for key, inner in list(value.items())[:MOST_ITEMS]:
                yield f"[{key!r}]", inner
        elif isinstance(value, (list, tuple, deque)):
            if len(value) > MOST_ITEMS and all(isinstance(each, PLAIN) for each in value):
                yield "", repr(value)
                return
            for i, inner in enumerate(list(value)[:MOST_ITEMS]):
                yield f"[{i}]", inner
        elif isinstance(value, (set, frozenset)):
            yield "", repr(sorted(map(repr, value)))
        elif isinstance(value, (FunctionType, MethodType)):
            yield from _closed_over(value)
        elif isinstance(value, self._loader):
            yield ".generator", value.generator
            yield ".sampler", value.sampler
        elif self._iterators and isinstance(value, self._iterators):
            self._seen.discard(id(value))
            self._visit_iterator(value)
        elif isinstance(value, self._module):
            yield from self._parts_of_module(value)
        elif isinstance(value, (argparse.Namespace, SimpleNamespace)) or _is_own(type(value)):
            for key, inner in _attributes(value):
                yield f".{key}", inner
        elif type(value).__module__ == "torch.utils.data.sampler":
            for key, inner in vars(value).items():
                if key != "data_source":
                    yield f".{key}", inner

    def _parts_of_module(self, module: Any) -> Iterator[tuple[str, Any]]:
        """Yield the script's own attributes of a model and its parts; parameters and buffers are in the run."""
        for name, part in module.named_modules():
            if _is_own(type(part)):
                for key, inner in _attributes(part):
                    if not key.startswith("_") and not isinstance(inner, (self._module, self._tensor)):
                        yield f".{name}.{key}" if name else f".{key}", inner

    def _visit_iterator(self, iterator: Any) -> None:
        if id(iterator) not in self._seen:
            self._seen.add(id(iterator))
            self._put("an iterator of a DataLoader", "", POSITION, str(iterator._num_yielded).encode())

    def _look_at_tensor(self, name: str, where: str, value: Any) -> None:
        if isinstance(value, self._array):
            if value.nbytes <= MOST_BYTES and value.dtype != object:
                self._put(name, where, DATA, value.tobytes())
            return
        known = type(value) is self._tensor and not value.is_meta and not value.requires_grad
        if known and value.is_leaf and value.nbytes <= MOST_BYTES:
            from ..state.plain_tensors import host_bytes, is_plain

            if is_plain(value):
                self._put(name, where, DATA, host_bytes(value).data)

    def _state_of_generator(self, value: Any) -> Any:
        if isinstance(value, self._generator):
            return value.get_state().numpy().data
        if isinstance(value, random.Random):
            return repr(value.getstate()).encode()
        if isinstance(value, self._numpy):
            state = value.bit_generator.state if hasattr(value, "bit_generator") else value.get_state()
            return repr(state).encode()
        return None

    def _put(self, name: str, where: str, kind: str, content: Any) -> None:
        key = name + where
        self._counts[key] += 1
        if self._counts[key] > 1:
            key = f"{key} #{self._counts[key]}"
        self.found[key] = kind, xxhash.xxh3_64_hexdigest(content)


def _is_own(kind: type) -> bool:
    """Return whether the script defines the class."""
    module = sys.modules.get(kind.__module__)
    return kind.__module__ == "__main__" or is_of_script(getattr(module, "__file__", None))


def _attributes(value: Any) -> list[tuple[str, Any]]:
    found = list(getattr(value, "__dict__", {}).items())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if (member := kind.__dict__.get(slot)) is not None and hasattr(member, "__get__"):
                try:
                    found.append((slot, member.__get__(value, type(value))))
                except AttributeError:
                    continue
    return found


def _closed_over(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a function of the script took from the function around it."""
    if is_of_script(function.__code__.co_filename):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            yield f".{name}", cell.cell_contents
