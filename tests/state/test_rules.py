"""Rules find every element where an oracle put it: tensors are cut here with NumPy alone, and with NaN as padding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ruled import NAN, Ranks, numbered, rule_of, toml


class Case:
    """What is drawn together: arrays, which are too long to be printed."""

    def __init__(self, *parts):
        self.parts = parts


SHAPES = st.lists(st.integers(0, 17), max_size=4).map(tuple)


def widths(rule, size, count):
    """The oracle of the three rules that divide a length."""
    if rule == "ceil":
        width = -(-size // count)
        return [len(range(size)[n * width : (n + 1) * width]) for n in range(count)]
    if rule == "balanced":
        return [len(part) for part in np.array_split(np.arange(size), count)]
    assert size % count == 0
    return [size // count] * count


def split(array, sizes, dim):
    return np.split(array, np.cumsum(sizes)[:-1], axis=dim)


@st.composite
def level(draw, shape, outermost):
    """One cut over a mesh axis of 1 to 9: its table, and what divides an array in the same way."""
    count = draw(st.integers(1, 9))
    kind = draw(st.sampled_from(["replicate", "shard", "shard", "blocks"] if shape else ["replicate"]))
    if kind == "replicate":
        return count, {"replicate": None}, lambda array: [array] * count
    dim = draw(st.integers(0, len(shape) - 1))
    rules = ["ceil", "balanced", *(["given"] if outermost else []), *([None] if kind == "shard" else [])]
    rule = draw(st.sampled_from(rules))

    def divided(size):
        """Explicit widths, zeros too; of a nested cut by rule, since each local tensor has another size."""
        if rule != "given":
            return widths(rule or "balanced", size, count)
        ends = sorted(draw(st.integers(0, size)) for _ in range(count - 1))
        return np.diff([0, *ends, size]).tolist()

    if kind == "shard":
        sizes = divided(shape[dim]) if outermost else None
        table = {"shard": None, "dim": dim} | ({"widths": sizes if rule == "given" else rule} if rule else {})
        return (
            count, table, lambda array: split(array, sizes or widths(rule or "balanced", array.shape[dim], count), dim)
        )  # fmt: skip
    blocks = draw(st.integers(1, 3))
    table = {"blocks": None, "dim": dim, "sizes": [f"(size + {n}) // {blocks}" for n in range(blocks)]}
    outer = [divided((shape[dim] + n) // blocks) for n in range(blocks)] if outermost else []
    table["widths"] = outer if rule == "given" else rule

    def cut(array):
        sizes = [(array.shape[dim] + n) // blocks for n in range(blocks)]
        parts = [
            split(block, outer[n] if outer else widths(rule, size, count), dim)
            for n, (block, size) in enumerate(zip(split(array, sizes, dim), sizes))
        ]
        return [np.concatenate([part[number] for part in parts], axis=dim) for number in range(count)]

    return count, table, cut


@st.composite
def nested(draw):
    """A tensor, its rule, and the local arrays of all ranks: up to three cuts, one within the other, of padded dims."""
    shape = draw(SHAPES)
    padded = tuple(n + draw(st.integers(0, 3)) for n in shape)
    pads = [{"dim": d, "size": n} for d, n in enumerate(shape) if n != padded[d]]
    tensor = numbered(shape)
    held = np.full(padded, NAN)
    held[tuple(map(slice, shape))] = tensor
    locals_, tables = [({}, held)], []
    for number in range(draw(st.integers(0, 3))):
        count, table, cut = draw(level(padded, number == 0))
        if len(locals_) * count > 60:
            continue
        [kind] = [key for key, value in table.items() if value is None]
        tables.append({**table, kind: f"axis{number}"})
        axis = f"axis{number}"
        locals_ = [
            ({**at, axis: (index, count)}, part) for at, array in locals_ for index, part in enumerate(cut(array))
        ]  # fmt: skip
    return Case(tensor, {"cut": tables, "pad": pads}, locals_)


@settings(deadline=None)
@given(nested(), st.randoms())
def test_nested_cuts_of_padded_tensors_are_put_together(case, chance):
    tensor, keys, locals_ = case.parts
    ranks = Ranks()
    chance.shuffle(locals_)
    for at, array in locals_:
        ranks.store("w", array, **at)
    made = ranks.by(rule_of(**keys))
    assert list(made.atoms) == ["w/param"]
    np.testing.assert_array_equal(ranks.tensor(made.atoms["w/param"]), tensor)
    counts = {axis: count for axis, (_, count) in locals_[0][0].items()}
    replicas = [counts[table["replicate"]] for table in keys["cut"] if "replicate" in table]
    assert len(made.atoms["w/param"].copies) == np.prod(replicas, dtype=int) - 1 or not tensor.size


@settings(deadline=None)
@given(SHAPES, st.integers(1, 9), st.integers(0, 8), st.sampled_from([1, 2, 3]))
def test_flat_parts_of_one_tensor_are_put_together(shape, world, padding, replicas):
    tensor, ranks = numbered(shape), Ranks()
    flat = np.concatenate([tensor.reshape(-1), np.full(padding, NAN)])
    for number, part in enumerate(np.array_split(flat, world)):
        for replica in range(replicas):
            ranks.store("w", part, fsdp=(number, world), dp=(replica, replicas))
    made = ranks.by(rule_of(cut=[{"replicate": "dp"}, {"flat": "fsdp", "shape": shape}]))
    assert len(made.atoms["w/param"].copies) == replicas - 1
    np.testing.assert_array_equal(ranks.tensor(made.atoms["w/param"]), tensor)


@st.composite
def flat_group(draw):
    """Tensors in the flat partitions of a group, bucket by bucket, NaN between them."""
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=6))
    world, tensor_align = draw(st.integers(1, 9)), draw(st.sampled_from([1, 1, 2, 4]))
    align = world * draw(st.integers(1, 3))
    cuts = sorted(
        {draw(st.integers(0, len(shapes))) for _ in range(draw(st.integers(0, 3)))} | {0, len(shapes)}
    )
    buckets = np.diff(cuts).tolist()
    tensors, parts, first = [], [[] for _ in range(world)], 0
    for number in buckets:
        flat = []
        for shape in shapes[first : first + number]:
            tensors.append(numbered(shape) + 1000 * len(tensors))
            flat += [tensors[-1].reshape(-1), np.full(-tensors[-1].size % tensor_align, NAN)]
        bucket = np.concatenate(flat)
        bucket = np.concatenate([bucket, np.full(-bucket.size % align, NAN)])
        for part, share in zip(parts, np.split(bucket, world)):
            part.append(share)
        first += number
    stored = [np.concatenate(part) for part in parts]
    if len(buckets) == 1 and tensor_align == 1 and draw(st.booleans()):  # as DeepSpeed stores them
        stored = [part[~np.isnan(part)] for part in stored]
    listed = [{"name": f"t{n}.w", "shape": list(shape)} for n, shape in enumerate(shapes)]
    keys = {"tensors": listed, "buckets": buckets, "align": align, "tensor_align": tensor_align}
    return Case(tensors, keys, stored)


@settings(deadline=None)
@given(flat_group(), st.integers(1, 3))
@pytest.mark.slow
def test_tensors_are_found_in_flat_partitions_whose_tensor_parallel_parts_are_put_together(case, tp):
    tensors, keys, stored = case.parts
    ranks = Ranks()
    for number, part in enumerate(stored):
        for at in range(tp):
            ranks.store("flat.0.exp_avg", part, dp=(number, len(stored)), tp=(at, tp))
    text = f"""
        version = 1
        [[rule]]
        match = 'flat[.]0[.](.*)'
        slot = '{{1}}'
        flat = "dp"
        {chr(10).join(f"{key} = {toml(value)}" for key, value in keys.items())}
        [[rule]]
        match = 't(\\d+)[.]w'
        rename = "layers.{{1 + 5}}.w"
        replicate = "tp"
    """
    found = ranks.tensors(text)
    assert list(found) == [f"layers.{n + 5}.w/exp_avg" for n in range(len(tensors))]
    for tensor, other in zip(tensors, found.values()):
        np.testing.assert_array_equal(tensor, other)


HEADS = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
"""Queries of each key-value head, key-value heads, and the elements of a head."""


def interleaved(qkv, heads, kv_heads, head_dim):
    """The oracle of Megatron's order, of the blocks [Q; K; V]."""
    rest = qkv.shape[1:]
    blocks = split(qkv, [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], 0)
    groups = [block.reshape(kv_heads, -1, head_dim, *rest) for block in blocks]
    return np.concatenate(groups, axis=1).reshape(qkv.shape)


@settings(deadline=None)
@given(HEADS, st.integers(1, 3), st.booleans())
def test_both_layouts_of_fused_projections_are_permutations_and_inverse_to_each_other(sizes, width, bias):
    queries, kv_heads, head_dim = sizes
    heads = queries * kv_heads
    shape = ((heads + 2 * kv_heads) * head_dim, *(() if bias else (width,)))
    block = numbered(shape)
    permute = {"dim": 0, "heads": "heads", "kv_heads": "kv_heads"}
    for before, after, other in (("block", "interleaved", block), ("interleaved", "block", None)):
        stored = interleaved(block, heads, kv_heads, head_dim) if other is None else block
        wanted = block if other is None else interleaved(block, heads, kv_heads, head_dim)
        ranks = Ranks()
        ranks.store("qkv", stored)
        text = rule_of(permute={**permute, "from": before, "to": after})
        found = ranks.tensors(text, heads=heads, kv_heads=kv_heads)["qkv/param"]
        np.testing.assert_array_equal(found, wanted)


@settings(deadline=None)
@given(HEADS, st.sampled_from([1, 2, 3, 4]), st.integers(1, 3))
@pytest.mark.slow
def test_fused_projections_of_tensor_parallel_ranks_become_separate_ones_and_back(sizes, tp, width):
    queries, kv_heads, head_dim = sizes
    kv_heads *= tp
    heads = queries * kv_heads
    names = dict(zip("qkv", split(numbered(((heads + 2 * kv_heads) * head_dim, width)),
                                  [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], 0)))  # fmt: skip
    block = np.concatenate(list(names.values()))
    inter = interleaved(block, heads, kv_heads, head_dim)
    ranks = Ranks()
    for number, part in enumerate(np.split(inter, tp)):
        ranks.store("a.inter", part, tp=(number, tp))
    for number in range(tp):
        ranks.store(
            "b.block", np.concatenate([np.split(names[n], tp)[number] for n in "qkv"]), tp=(number, tp)
        )
    for name in "qkv":
        ranks.store(f"c.{name}_proj", names[name].T)
    text = f"""
        version = 1
        [values]
        heads = {heads}
        kv_heads = {kv_heads}
        head_dim = {head_dim}
        [[rule]]
        match = 'a.inter'
        shard = "tp"
        dim = 0
        permute = {{dim = 0, from = "interleaved", to = "block", heads = "heads", kv_heads = "kv_heads"}}
        split = {{dim = 0, names = ["q", "k", "v"],
                  sizes = ["heads * head_dim", "kv_heads * head_dim", "kv_heads * head_dim"]}}
        rename = "a.{{part}}"
        [[rule]]
        match = 'b.block'
        blocks = "tp"
        dim = 0
        sizes = ["heads * head_dim", "kv_heads * head_dim", "kv_heads * head_dim"]
        split = {{dim = 0, names = ["q", "k", "v"],
                  sizes = ["heads * head_dim", "kv_heads * head_dim", "kv_heads * head_dim"]}}
        rename = "b.{{part}}"
        [[rule]]
        match = 'c.(.)_proj'
        join = {{dim = 1, names = ["q", "k", "v"], part = "{{1}}"}}
        permute = {{dim = 1, from = "block", to = "interleaved", heads = "heads", kv_heads = "kv_heads"}}
        transpose = true
        rename = "c.qkv"
    """.replace("\n                  ", " ")
    found = ranks.tensors(text)
    for name in "qkv":
        np.testing.assert_array_equal(found[f"a.{name}/param"], names[name])
        np.testing.assert_array_equal(found[f"b.{name}/param"], names[name])
    np.testing.assert_array_equal(found["c.qkv/param"], inter)
