"""A separate device in pure Python, "played": the engine's own class of a device drives it, unchanged.

Its tensors wrap tensors of the host. They do not mix with the host's, and autograd runs their backward on a thread of
its own. What torch asks of a device's module (streams, events, the current device of a thread, pinning, random numbers)
is answered here, and kept in ``PLAYED`` for tests to look at.

Everything is done at once, so results are those of the host. ``Order`` in ``access_order.py`` listens to who reads and
writes which memory, and finds what is in no order.

A process that imports this has such a device from then on, and cannot get rid of it: it is available while a test that
uses the fixture ``played`` runs (``PLAYED.on``), and at no other time.
"""

from __future__ import annotations

import itertools
import sys
import threading
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from torch.utils._python_dispatch import get_alias_info, return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import holdfast.offload.api  # noqa: F401 - loaded before any of it is patched
from holdfast.checkpoint.capture import optimizer_attributes
from holdfast.state import encoding, live_state, prepared_models
from holdfast.state import plain_tensors as plain_tensors

if torch.cuda.is_available():
    raise ImportError(
        "a CUDA device is here, and torch has one kind of accelerator in a process: nothing can be played"
    )
KIND = "played"
aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default, aten._foreach_copy_.default)
ASKING = (
    "_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim",
    "unique_consecutive", "bincount",
)  # fmt: skip
"""Operations whose results the host has to know, in value or in size: a device is waited for, without an event."""


class Stream:
    """A stream, and the context in which a thread's operations go to it."""

    ids = itertools.count(1)

    def __init__(self, device=None, name=None):
        self.name = name or f"stream {next(self.ids)}"

    @property
    def device(self):
        return HERE

    def wait_event(self, event):
        PLAYED.listener.waits(self, event)


class Event:
    def __init__(self, blocking=False, enable_timing=False):
        self.blocking = blocking
        PLAYED.events.append(blocking)

    def record(self, stream):
        self.told = PLAYED.listener.records(stream)

    def synchronize(self):
        PLAYED.asks("waits for an event")
        PLAYED.syncs.append(threading.current_thread().name)
        PLAYED.listener.synchronizes(self)


class Silent:
    """Listens to nothing."""

    def waits(self, stream, event): ...
    def records(self, stream): ...
    def synchronizes(self, event): ...
    def computes(self, func, args, kwargs, made): ...
    def copies(self, target, source): ...
    def allocates(self, tensor, on_host=False): ...
    def used_by(self, tensor, stream): ...


class Runtime:
    """What ``cudart`` is to CUDA. ``refuses``: the error of the next registrations."""

    def __init__(self):
        self.pinned, self.pins, self.refuses, self.last_error = {}, 0, 0, 0

    def cudaHostRegister(self, address, nbytes, flags):
        PLAYED.asks("pins memory")
        if self.refuses:
            self.last_error = self.refuses
            return self.refuses
        assert address not in self.pinned and address % 4096 == 0
        self.pinned[address] = nbytes
        self.pins += 1
        return 0

    def cudaHostUnregister(self, address):
        del self.pinned[address]
        return 0

    def cudaGetLastError(self):
        error, self.last_error = self.last_error, 0
        return error


class Module:
    """What ``torch.cuda`` is to CUDA."""

    Stream, Event = Stream, Event

    def __init__(self):
        self.reset()
        self.on = False

    def reset(self):
        self.here = threading.local()
        self.default, self.runtime, self.listener = Stream(name="compute"), Runtime(), Silent()
        self.events, self.syncs, self.without_device, self.seeds = [], [], [], []
        self.hidden_waits = []
        self.state, self.bf16 = torch.zeros(16, dtype=torch.uint8), True
        self.captures = False

    def asks(self, what):
        """A thread that has never said which device is its own would make a context on device 0 by this."""
        if (
            not getattr(self.here, "is_set", False)
            and threading.current_thread() is not threading.main_thread()
        ):
            self.without_device.append(f"{threading.current_thread().name} {what}")

    def is_available(self):
        return self.on

    is_initialized = is_available

    def _is_in_bad_fork(self):
        return False

    def device_count(self):
        return 1

    def current_device(self):
        return 0

    def get_device_name(self, device=None):
        return "a device that is played"

    def set_device(self, device):
        self.here.is_set = True

    @contextmanager
    def device(self, device):
        before, self.here.is_set = getattr(self.here, "is_set", False), True
        yield
        self.here.is_set = before

    @contextmanager
    def stream(self, stream):
        before, self.here.stream = getattr(self.here, "stream", None), stream
        with self.device(stream.device):
            yield
        self.here.stream = before

    def current_stream(self, device=None):
        return getattr(self.here, "stream", None) or self.default

    def is_current_stream_capturing(self):
        return self.captures

    def synchronize(self, device=None): ...
    def empty_cache(self): ...

    def cudart(self):
        return self.runtime

    def mem_get_info(self, device=None):
        return 2**40, 2**40

    def max_memory_allocated(self, device=None):
        return 1

    def memory_allocated(self, device=None):
        return 0

    memory_reserved = memory_allocated

    def get_rng_state(self, device=None):
        return self.state.clone()

    def get_rng_state_all(self):
        return [self.state.clone()]

    def set_rng_state(self, state, device=None):
        self.state = state.clone()

    def manual_seed(self, seed):
        self.seeds.append(seed)

    manual_seed_all = manual_seed

    def is_bf16_supported(self, including_emulation=True):
        return self.bf16 or including_emulation

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]


class Hook(torch._C._acc.PrivateUse1Hooks):
    """What torch's own code asks of a device that is made elsewhere."""

    def is_available(self):
        return PLAYED.on

    def has_primary_context(self, device_id):
        return True

    def is_built(self):
        return True


PLAYED = Module()
_setup_privateuseone_for_python_backend(KIND, backend_module=PLAYED, hook=Hook())
HERE = torch.device(KIND, 0)


class Played(torch.Tensor):
    """A tensor of the device: ``held`` is what it wraps."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=HERE
        )  # fmt: skip

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})

    def record_stream(self, stream):
        PLAYED.listener.used_by(self.held, stream)

    def untyped_storage(self):
        return self.held.untyped_storage()

    def __repr__(self):
        return f"Played({self.held!r})"


def run(func, args, kwargs):
    """Do ``func`` on the host. Raises ``RuntimeError`` where tensors of the host and of the device would mix."""
    tensors = tensors_in((*args, *kwargs.values()))
    to = kwargs.get("device")
    crosses = func in COPIES or to is not None
    odd = [x for x in tensors if not isinstance(x, Played) and x.dim()]
    if odd and len(odd) < len(tensors) and not crosses:
        raise RuntimeError(
            f"{func}: expected all tensors to be on the same device, found {HERE} and {odd[0].device}"
        )
    if func in (aten.is_pinned.default,):
        return False
    if waits(func, args, kwargs, bool(odd)):
        PLAYED.hidden_waits.append(f"{func} of {threading.current_thread().name}")
    host_args, host_kwargs = [plain(x) for x in args], {name: plain(x) for name, x in kwargs.items()}
    out = func(*host_args, **host_kwargs)
    if func is aten.copy_.default:
        PLAYED.listener.copies(*host_args[:2])
        return args[0]
    if func is aten._foreach_copy_.default:
        for pair in zip(*host_args[:2], strict=True):
            PLAYED.listener.copies(*pair)
        return None
    if crosses and func is aten._to_copy.default and len(odd) + (to is not None):
        PLAYED.listener.allocates(out, on_host=torch.device(to or HERE).type != KIND)
        PLAYED.listener.copies(out, host_args[0])
    else:
        PLAYED.listener.computes(func, host_args, host_kwargs, out)
    if to is not None and torch.device(to).type != KIND:
        return out
    if written := written_by(func):
        found = [args[place] if place < len(args) else kwargs[name] for place, name in written]
        return found[0] if len(found) == 1 else tuple(found)
    out = there(out)
    if func is aten.detach.default or to is not None:
        return out
    return return_and_correct_aliasing(func, args, kwargs, out)


def tensors_in(values):
    """The tensors of nested lists."""
    found = []
    for x in values:
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            found += tensors_in(x)
    return found


@cache
def written_by(func):
    """Place and name of each argument that ``func`` writes and returns, where it leaves their shapes as they are."""
    about = get_alias_info(func)
    if about.is_inplace_view_op:
        return []
    return [
        next((place, arg.name) for place, arg in enumerate(about.args) if alias in arg.alias_set)
        for alias in about.outs_write_aliases or ()
    ]


def waits(func, args, kwargs, mixed):
    """Whether the host would wait for the device in ``func``, as ``torch.cuda.set_sync_debug_mode`` finds it."""
    if func is aten._to_copy.default and "device" in kwargs:
        source = args[0].device.type
        return source != torch.device(kwargs["device"]).type and not kwargs.get("non_blocking")
    if func in COPIES:
        positional = args[2] if len(args) > 2 else False
        return mixed and not kwargs.get("non_blocking", positional)
    name = name_of(func)
    if name in ("index", "index_put", "index_put_"):
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    return name in ASKING


@cache
def name_of(func):
    return func._schema.name.removeprefix("aten::")


def plain(x):
    """Return what ``x``, or each part of a list, is on the host."""
    if isinstance(x, Played):
        return x.held
    if isinstance(x, (list, tuple)):
        return [plain(y) for y in x]
    return torch.device("cpu") if isinstance(x, torch.device) else x


def there(x):
    """Return what ``x``, or each part of it, is on the device."""
    if isinstance(x, torch.Tensor):
        return Played(x)
    return type(x)(map(there, x)) if isinstance(x, (list, tuple)) else x


class _TypeOf(type):
    def __call__(cls, x):
        if not isinstance(x, Played):
            return type(x)
        return torch.nn.Parameter if isinstance(x, torch.nn.Parameter) else torch.Tensor

    def __instancecheck__(cls, x):
        return isinstance(x, type)


class TypeOf(metaclass=_TypeOf):
    """In place of ``type``: the class that a tensor would have on a device that is not made in Python."""


def made(op):
    def make(*args, **kwargs):
        held = op(*args, **{**kwargs, "device": "cpu", "pin_memory": False})
        PLAYED.listener.allocates(held)
        return Played(held)

    return make


LIB = torch.library.Library("aten", "IMPL", "PrivateUse1")
LIB.impl("empty.memory_format", made(aten.empty.memory_format))
LIB.impl("empty_strided", made(aten.empty_strided.default))


def copied_from(source, target, non_blocking=False):
    """What ``torch.tensor(..., device=)`` and others make of a copy."""
    plain(target).copy_(plain(source))
    PLAYED.listener.copies(plain(target), plain(source))
    return target


LIB.impl("_copy_from", copied_from)
AUTOCAST = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
AUTOCAST.fallback(torch.library.fallthrough_kernel)  # it can be on, and casts nothing


@pytest.fixture
def played(monkeypatch):
    """The device is available, and as new."""
    PLAYED.reset()
    monkeypatch.setattr(PLAYED, "on", True)
    for module in (
        encoding,
        optimizer_attributes,
        live_state,
        plain_tensors,
    ):  # which refuse classes that compute otherwise
        monkeypatch.setattr(module, "type", TypeOf, raising=False)
    monkeypatch.setattr(
        torch.Tensor, "pin_memory", lambda tensor: tensor.clone()
    )  # torch asks a device in C++ for it
    _taken_for_plain(monkeypatch)
    yield PLAYED
    PLAYED.reset()


def _taken_for_plain(monkeypatch):
    """Classes of tensors of their own are refused. A wrapper is the only one that Python can play a device with."""
    ours = prepared_models._computes_otherwise
    monkeypatch.setattr(
        prepared_models, "PARAMETERS", tuple(p for p in prepared_models.PARAMETERS if p.found is not ours)
    )
    modules = [module for name, module in sys.modules.items() if name.startswith("holdfast.")]
    for name in ("unsupported_kind", "is_plain"):
        for module in modules:
            if hasattr(module, name):
                asked = getattr(module, name)
                monkeypatch.setattr(module, name, lambda tensor, asked=asked: asked(plain(tensor)))
