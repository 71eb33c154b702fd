"""Values come back with their type and value, or are refused by name."""

from __future__ import annotations

import datetime
import enum
import io
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.errors import BadInput
from holdfast.state.encoding import decode, encode


class Mode(enum.Enum):
    FAST = "fast"


class Level(enum.IntEnum):
    HIGH = 3


class Text(str):
    """A text with a type of its own."""


class Number(int):
    """A number with a type of its own."""


class Marked(torch.Tensor):
    """A tensor with a type of its own."""


class Things(list):
    """A list with a type of its own."""


def ordered():
    made = OrderedDict(b=1, a=torch.ones(2))
    made._metadata = {"": {"version": 2}}
    return made


ZONE = datetime.timezone(datetime.timedelta(hours=2))
VALUES = [
    None,
    True,
    0,
    -7,
    2**63,
    -(10**5000),
    -0.0,
    math.inf,
    1e-320,
    "",
    "\ud800 \N{SNOWMAN}",
    b"\0\xff",
    bytearray(b"ab"),
    1 - 2j,
    (1, (2.0, "x")),
    [],
    {},
    {1: "a", "__x__": 2, (1, 2): 3, None: 4},
    {"__tensor__": 1},
    {1, 2},
    frozenset({"a"}),
    range(1, 9, 3),
    Decimal("0.10"),
    Fraction(1, 3),
    Path("/a/b"),
    datetime.date(2026, 1, 2),
    datetime.time(1, 2, 3, 4),
    datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=ZONE),
    datetime.datetime(2026, 1, 2, fold=1),
    datetime.timedelta(-1, 2, 3),
    deque([1, [2]], maxlen=3),
    deque(),
    Counter("abca"),
    defaultdict(list, {"a": [1]}),
    defaultdict(None, {1: 2}),
    OrderedDict(b=1, a=2),
    Mode.FAST,
    Level.HIGH,
    torch.float16,
    torch.device("cpu"),
    torch.device("cuda", 1),
    torch.strided,
    torch.channels_last,
    torch.Size([2, 3]),
    np.float64(0.1),
    np.int64(3),
    np.bool_(True),
    np.complex128(1 + 2j),
    np.arange(3, dtype=">i4"),
    np.asfortranarray(np.ones((2, 3))),
    np.zeros((0, 2)),
    torch.ones(2, 3).t(),
    torch.zeros(0, 3),
    torch.tensor(2.0),
    torch.ones(3, dtype=torch.complex64).conj(),
    torch.ones(2, 1).expand(2, 4),
    torch.ones(4, 4)[:, :2],
    torch.arange(6.0).unfold(0, 3, 1),
    torch.arange(9.0).as_strided((2, 2, 2), (4, 2, 2)),
    torch.ones(2, 1).expand(2, 3).unfold(0, 2, 1),
    torch.empty_strided((1, 3), (7, 1)).fill_(1),
    torch.nn.Parameter(torch.ones(2), requires_grad=False),
    torch.ones(2, requires_grad=True),
]


def alike(one, other):
    """Whether both have the same type and value, and tensors the same place for each element."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        laid = one.stride() == other.stride() and one.requires_grad == other.requires_grad
        return one.dtype == other.dtype and torch.equal(one, other) and laid
    if isinstance(one, np.ndarray):
        laid = not one.size or one.strides == other.strides
        return one.dtype == other.dtype and np.array_equal(one, other) and laid
    if isinstance(one, dict):
        more = getattr(one, "__dict__", None) == getattr(other, "__dict__", None)
        return more and list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == other and (type(one) is int or repr(one) == repr(other))  # of -0.0 and 0.0 repr() tells


@pytest.mark.parametrize("value", [*VALUES, ordered()], ids=lambda value: type(value).__name__)
def test_value_comes_back_with_its_type(value):
    assert alike(decode(json.loads(json.dumps(encode(value)))), value)
    assert alike(decode(json.loads(json.dumps(encode({"in": [value]})))), {"in": [value]})


def test_nan_and_shape_of_containers_stay():
    found = decode(json.loads(json.dumps(encode([math.nan, np.float32("nan"), defaultdict(int)]))))
    assert math.isnan(found[0]) and type(found[1]) is np.float32 and found[2].default_factory is int
    assert decode(encode(deque(maxlen=4))).maxlen == 4
    file = io.BytesIO(b"abc")
    file.seek(2)
    assert decode(encode(file)).read() == b"c"


@pytest.mark.parametrize(
    "value",
    [
        Text("a"),
        Number(1),
        Things([1]),
        {Text("a"): 1},
        namedtuple("Pair", "a b")(1, 2),
        defaultdict(lambda: 0),
        np.array(["a"]),
        np.str_("a"),
        np.ma.array([1]),
        np.datetime64("2020"),
        torch.ones(2).to_sparse(),
        torch.ones(1, dtype=torch.complex128),
        torch.empty(2, device="meta"),
        torch.ones(2).as_subclass(Marked),
        object(),
        len,
        enum.Enum("Local", "A").A,
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_types_are_refused_by_name(value):
    with pytest.raises(BadInput, match=r"scheduler\['x'\]\[0\] holds a .*cannot be stored by value"):
        encode({"x": [value]}, "scheduler")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=2), "CEST")),
            "time zone",
        ),
        (slice(True), "bool"),
        (slice(0, 2**63), "int"),
    ],
    ids=["zone", "flag", "large"],
)
def test_parts_of_values_are_refused(value, said):
    with pytest.raises(BadInput, match=rf"a (time|slice) holds a .*{said}"):
        encode(value)


def test_constants_of_other_kinds_are_refused():
    with pytest.raises(ValueError, match=r"torch\.load is no dtype"):
        decode({"__torch__": ["dtype", "load"]})


def test_value_that_holds_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(BadInput, match="holds itself"):
        encode(value)


def test_member_of_unknown_enumeration_is_refused():
    told = {"__enum__": ["a.module.nobody.imported", "Mode", "FAST"]}
    assert decode(told, strict=False) == told
    with pytest.raises(BadInput, match="import what defines it"):
        decode(told)


def test_values_of_version_1_still_read():
    """Marks as earlier versions wrote them, literally."""
    old = {
        "a": {"__tensor__": "F32", "shape": [2], "bytes": "AACAPwAAAEA="},
        "b": {"__array__": {"__tensor__": "I64", "shape": [1], "bytes": "AQAAAAAAAAA="}},
        "c": {"__number__": {"__tensor__": "F64", "shape": [], "bytes": "AAAAAAAA8D8="}},
        "d": {"__counter__": {"__dict__": [[2, 1]]}},
        "e": {"__tuple__": [1, {"__bytes__": "YQ=="}]},
    }
    found = decode(old)
    assert alike(found["a"], torch.tensor([1.0, 2.0])) and alike(found["b"], np.array([1]))
    assert alike(found["c"], np.float64(1)) and found["d"] == Counter({2: 1}) and found["e"] == (1, b"a")


def test_numbers_beyond_64_bits_are_marked_in_lists_too():
    for most in (2**63, -(2**63) - 1):
        assert encode([1, most]) == [1, encode(most)] != [1, most]
