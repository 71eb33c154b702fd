"""What ranks stored, as arrays of NumPy, and what rules make of it: for the tests of rules."""

from __future__ import annotations

import json
from math import prod

import numpy as np

from holdfast.state.rules.assembly import assemble
from holdfast.state.rules.rule_language import Rules
from holdfast.state.rules.rule_matching import StoredTensor

NAN = float("nan")


class Ranks:
    """What ranks stored: arrays by part, and the rows that describe them."""

    def __init__(self):
        self.parts, self.rows = [], []

    def store(self, name, array, slot="param", **at):
        self.rows.append(StoredTensor(len(self.parts), name, array.shape, "F64", slot, at))
        self.parts.append(np.array(array, dtype=np.float64, order="C").reshape(-1))

    def assembled(self, rules):
        return assemble(rules, self.rows)

    def by(self, text, **values):
        return self.assembled(Rules.parse(text, "rules.toml", values))

    def tensor(self, ruled):
        """What the pieces say, and each of the copies; the mean of all where it is to be averaged."""
        found = [self._gathered(pieces, ruled.atom.shape) for pieces in (ruled.pieces, *ruled.copies)]
        if ruled.average:
            return np.mean(found, axis=0)
        for other in found[1:]:
            np.testing.assert_array_equal(found[0], other)
        return found[0]

    def tensors(self, text, **values):
        return self.tensors_by(Rules.parse(text, "rules.toml", values))

    def tensors_by(self, rules):
        return {key: self.tensor(ruled) for key, ruled in self.assembled(rules).atoms.items()}

    def _gathered(self, pieces, shape):
        result, times = np.full(shape, NAN), np.zeros(shape, dtype=int)
        for box, part, offset, strides in pieces:
            index = np.indices(box.shape, sparse=True)
            places = offset + sum(i * stride for i, stride in zip(index, strides, strict=True))
            places = np.broadcast_to(places, box.shape)
            assert box.elements == 0 or places.min() >= 0
            result[box.slices] = self.parts[part][places]
            times[box.slices] += 1
        assert (times == 1).all()  # a disjoint cover
        assert pieces.overlap() is None
        return result


def numbered(shape):
    return np.arange(prod(shape), dtype=np.float64).reshape(shape)


def rule_of(**keys):
    """A file of one rule, for all if there is no ``match``, with these keys."""
    keys = {"match": ".*"} | keys
    return "version = 1\n[[rule]]\n" + "\n".join(f"{k} = {toml(v)}" for k, v in keys.items())


def toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)
