"""Rules find every element where an oracle put it: tensors are cut here with NumPy alone, and with NaN as padding."""

from __future__ import annotations

import json
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import RuleError
from holdfast.state.assembly import assemble
from holdfast.state.matching import StoredTensor
from holdfast.state.rules import Rules

SHAPES = st.lists(st.integers(0, 17), max_size=4).map(tuple)
NAN = float("nan")


class Ranks:
    """What ranks stored: arrays by part, and the rows that describe them."""

    def __init__(self):
        self.parts, self.rows = [], []

    def store(self, name, array, slot="param", **at):
        self.rows.append(StoredTensor(len(self.parts), name, array.shape, "F64", slot, at))
        self.parts.append(np.ascontiguousarray(array, dtype=np.float64).reshape(-1))

    def by(self, text, **values):
        return assemble(Rules.parse(text, "rules.toml", values), self.rows)

    def tensor(self, ruled):
        """What the pieces say, and each of the copies; the mean of all where it is to be averaged."""
        found = [self._gathered(pieces, ruled.atom.shape) for pieces in (ruled.pieces, *ruled.copies)]
        if ruled.average:
            return np.mean(found, axis=0)
        for other in found[1:]:
            np.testing.assert_array_equal(found[0], other)
        return found[0]

    def tensors(self, text, **values):
        made = self.by(text, **values)
        return {key: self.tensor(ruled) for key, ruled in made.atoms.items()}

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
    """A file of one rule for all, with these keys."""
    return "version = 1\n[[rule]]\nmatch = '.*'\n" + "\n".join(f"{k} = {toml(v)}" for k, v in keys.items())


def toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


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
    return tensor, {"cut": tables, "pad": pads}, locals_


@given(nested(), st.randoms())
def test_nested_cuts_of_padded_tensors_are_put_together(case, chance):
    tensor, keys, locals_ = case
    ranks = Ranks()
    chance.shuffle(locals_)
    for at, array in locals_:
        ranks.store("w", array, **at)
    [(key, found)] = ranks.tensors(rule_of(**keys)).items()
    assert key == "w/param"
    np.testing.assert_array_equal(found, tensor)


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
    return tensors, keys, stored


@given(flat_group(), st.integers(1, 3))
def test_tensors_are_found_in_flat_partitions_whose_tensor_parallel_parts_are_put_together(case, tp):
    tensors, keys, stored = case
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


@given(HEADS, st.sampled_from([1, 2, 3, 4]), st.integers(1, 3))
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


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_key_value_heads_that_ranks_share_are_copies(kv_heads, repeats, head_dim):
    tp = kv_heads * repeats
    q, kv = numbered((tp * head_dim, 2)), numbered((kv_heads * head_dim, 2)) + 1000
    ranks = Ranks()
    for number in range(tp):
        held = np.split(kv, kv_heads)[number * kv_heads // tp]
        ranks.store("qkv", np.concatenate([np.split(q, tp)[number], held, held]), tp=(number, tp))
        ranks.store("k", held, tp=(number, tp))
    text = f"""
        version = 1
        [[rule]]
        match = 'qkv'
        blocks = "tp"
        dim = 0
        sizes = [{len(q)}, {len(kv)}, {len(kv)}]
        widths = ["even", {{repeat = {kv_heads}}}, {{repeat = {kv_heads}}}]
        [[rule]]
        match = 'k'
        shard = "tp"
        dim = 0
        widths = {{repeat = {kv_heads}}}
    """
    made = ranks.by(text)
    assert len(made.atoms["qkv/param"].copies) == repeats - 1
    np.testing.assert_array_equal(ranks.tensor(made.atoms["qkv/param"]), np.concatenate([q, kv, kv]))
    np.testing.assert_array_equal(ranks.tensor(made.atoms["k/param"]), kv)
    ranks.parts[-1][:] += 1  # the last one's key is another
    if repeats > 1:
        with pytest.raises(AssertionError):
            ranks.tensor(ranks.by(text).atoms["k/param"])


def test_the_mean_of_what_ranks_hold_is_the_value_and_says_so():
    ranks = Ranks()
    for number in range(3):
        ranks.store("norm", numbered((4,)) * number, tp=(number, 3))
    made = ranks.by(rule_of(average="tp")).atoms["norm/param"]
    assert made.average
    np.testing.assert_array_equal(ranks.tensor(made), numbered((4,)))


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_the_four_dimensions_of_axonn_are_put_together(x, y, z):
    """A weight lies on a grid of x by y; each of its blocks is divided over z, flat; all of it is there for each data."""
    weight, ranks = numbered((3 * x, 2 * y)), Ranks()
    for i, rows in enumerate(np.split(weight, x)):
        for j, block in enumerate(np.split(rows, y, axis=1)):
            flat = np.concatenate([block.reshape(-1), np.full(-block.size % z, NAN)])
            for k, share in enumerate(np.split(flat, z)):
                for d in range(2):
                    ranks.store("w", share, x=(i, x), y=(j, y), z=(k, z), data=(d, 2))
    cuts = [{"replicate": "data"}, {"grid": ["x", "y"], "dims": [0, 1]}, {"flat": "z", "shape": [3, 2]}]
    made = ranks.by(rule_of(cut=cuts)).atoms["w/param"]
    np.testing.assert_array_equal(ranks.tensor(made), weight)
    assert len(made.copies) == 1


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_experts_are_stacked_and_taken_apart_wherever_they_were(ep, each, tp):
    """Of Mixtral: experts of their own on one side, fused gate and up in one stack on the other."""
    experts = ep * each
    gate, up = numbered((experts, 2 * tp, 3)), numbered((experts, 2 * tp, 3)) + 1000
    ranks = Ranks()
    for rank in range(ep):
        for local in range(each):
            expert = rank * each + local
            ranks.store(f"l.{local}.w1", gate[expert], ep=(rank, ep))
            ranks.store(f"l.{local}.w3", up[expert], ep=(rank, ep))
        for t in range(tp):
            at = {"ep": (rank, ep), "tp": (t, tp)}
            mine = slice(rank * each, rank * each + each)
            fused = [np.split(half[mine], tp, axis=1)[t] for half in (gate, up)]
            ranks.store("fused", np.concatenate(fused, axis=1), **at)
            rows = [np.split(gate[e], tp)[t] for e in range(experts)]  # [E * O, I], divided along O
            ranks.store("flat_experts", np.concatenate(rows), tp=(t, tp))
    text = f"""
        version = 1
        [[rule]]
        match = 'l[.](\\d+)[.](w1|w3)'
        rename = "stack"
        stacked = {{dim = 0, index = "{{1 + {each} * ep}}", count = {experts}}}
        join = {{dim = 0, names = ["w1", "w3"], part = "{{2}}"}}
        [[rule]]
        match = 'fused'
        rename = "experts.{{index}}.{{part}}"
        cut = [{{shard = "ep", dim = 0}}, {{blocks = "tp", dim = 1, sizes = ["size // 2", "size // 2"]}}]
        unstack = {{dim = 0}}
        split = {{dim = 0, names = ["w1", "w3"]}}
        [[rule]]
        match = 'flat_experts'
        blocks = "tp"
        dim = 0
        sizes = [{2 * tp}]
        count = {experts}
    """
    found = ranks.tensors(text)
    np.testing.assert_array_equal(found["stack/param"], np.concatenate([gate, up], axis=1))
    np.testing.assert_array_equal(found["flat_experts/param"], gate.reshape(-1, 3))
    for expert in range(experts):
        np.testing.assert_array_equal(found[f"experts.{expert}.w1/param"], gate[expert])
        np.testing.assert_array_equal(found[f"experts.{expert}.w3/param"], up[expert])


def test_pipeline_stages_and_their_virtual_ones_get_global_numbers():
    ranks, stages, chunks, layers = Ranks(), 3, 2, 2
    for stage in range(stages):
        for chunk in range(chunks):
            for local in range(layers):
                number = (chunk * stages + stage) * layers + local
                ranks.store(f"model{chunk}.layers.{local}.w", np.full(2, number), pp=(stage, stages))
    text = rule_of(rename="h.{($1 * pp_count + pp) * 2 + $2}.w").replace(
        "'.*'", r"'model(\d+)[.]layers[.](\d+)[.]w'"
    )
    found = ranks.tensors(text)
    assert {key: int(value[0]) for key, value in found.items()} == {f"h.{n}.w/param": n for n in range(12)}


def test_a_tied_tensor_is_one_with_an_alias_and_a_copy_to_compare():
    ranks = Ranks()
    ranks.store("embed.w", numbered((4, 2)), pp=(0, 2))
    ranks.store("head.w", numbered((4, 2)), pp=(1, 2))
    text = """
        version = 1
        [axes]
        pp = "unique"
        [[rule]]
        match = 'head[.](.*)'
        alias_of = "embed.{1}"
        [[rule]]
        match = '.*'
    """
    made = ranks.by(text)
    assert made.aliases == {"head.w": "embed.w"} and list(made.atoms) == ["embed.w/param"]
    assert len(made.atoms["embed.w/param"].copies) == 1
    np.testing.assert_array_equal(ranks.tensor(made.atoms["embed.w/param"]), numbered((4, 2)))
    ranks.parts[1][0] = 7
    with pytest.raises(AssertionError):
        ranks.tensor(ranks.by(text).atoms["embed.w/param"])


def test_a_step_that_all_parts_of_a_tensor_have_is_one_number():
    ranks = Ranks()
    for number, part in enumerate(np.split(numbered((8, 3)), 2)):
        ranks.store("qkv", part, tp=(number, 2))
        ranks.store("qkv", np.array(5.0), slot="step", tp=(number, 2))
    found = ranks.tensors(
        rule_of(shard="tp", dim=0, split={"dim": 0, "names": ["q", "kv"], "sizes": [4, 4]}, rename="{part}")
    )
    assert found["q/step"] == found["kv/step"] == 5 and found["kv/param"].shape == (4, 3)


def test_a_rank_that_stored_nothing_may_be_absent_where_widths_say_so():
    ranks = Ranks()
    ranks.store("w", numbered((4, 2)), tp=(0, 3))
    ranks.store("w", numbered((1, 2)) + 8, tp=(2, 3))
    for keys in ({"widths": [4, 0, 1]},):
        found = ranks.tensors(rule_of(shard="tp", dim=0, **keys))
        np.testing.assert_array_equal(found["w/param"], numbered((5, 2)))
    with pytest.raises(RuleError, match="is missing"):
        ranks.by(rule_of(shard="tp", dim=0))
    with pytest.raises(RuleError, match="is not there along dim 0, and should be 1"):
        ranks.by(rule_of(shard="tp", dim=0, widths=[4, 1, 1]))
    short = Ranks()
    for number in range(3):
        short.store("w", numbered((2, 1)), tp=(number, 4))
    assert short.by(rule_of(shard="tp", dim=0, widths="ceil", size=6)).atoms["w/param"].atom.shape == (6, 1)
    with pytest.raises(RuleError, match="should be 1"):
        short.by(rule_of(shard="tp", dim=0, widths="ceil", size=7))


def test_boxes_say_exactly_what_each_rank_has():
    tensor, ranks = numbered((3, 4)), Ranks()
    ranks.store("w", tensor[:2, 1:], rank=(0, 3))
    ranks.store("w", tensor[:, :1], rank=(2, 3))
    ranks.store("v", tensor, rank=(1, 3))
    at = [[[0, 1], [2, 4]], [], [[0, 0], [3, 1]]]
    text = rule_of(boxes="rank", at=at).replace("'.*'", "'w'") + "\n[[rule]]\nmatch = 'v'\nunique = 'rank'"
    with pytest.raises(AssertionError):  # the last row has its first element alone
        ranks.tensors(text)
    ranks.rows[1] = StoredTensor(1, "w", (3, 1), "F64", "param", {"rank": (2, 3)})
    ranks.store("w", tensor[2:, 1:], rank=(1, 3))
    found = ranks.tensors(text.replace("[], ", "[[2, 1], [3, 4]], "))
    np.testing.assert_array_equal(found["w/param"], tensor)
    np.testing.assert_array_equal(found["v/param"], tensor)


def test_the_first_rule_holds_and_what_is_ambiguous_unused_or_dropped_is_reported():
    ranks = Ranks()
    for name in ("a", "b", "rotary.inv_freq"):
        ranks.store(name, numbered((2,)))
    text = """
        version = 1
        [[rule]]
        match = 'a'
        rename = "first"
        [[rule]]
        match = '[ab]'
        rename = "second.{$0}"
        [[rule]]
        match = 'never'
        [[rule]]
        match = 'rotary.*'
        drop = true
        [[rule]]
        match = '.*'
    """.replace(".{$0}", "")
    made = ranks.by(text)
    assert list(made.atoms) == ["first/param", "second/param"]
    assert made.ambiguous == {"a": (1, 2)}
    assert made.unused == (3, 5)
    assert made.dropped == ("rotary.inv_freq",)


def test_bits_are_of_the_dtype_that_a_rule_says():
    rows = [StoredTensor(0, "w", (2,), "U16")]
    made = assemble(Rules.parse(rule_of(dtype="BF16")), rows)
    assert made.atoms["w/param"].atom.dtype == "BF16"
    with pytest.raises(RuleError, match="elements of U16, which are no F32"):
        assemble(Rules.parse(rule_of(dtype="F32")), rows)


W = {"tp": (0, 2)}, {"tp": (1, 2)}


@pytest.mark.parametrize(
    "text, stored, says",
    [
        (rule_of().replace(".*", "w"), [("v", (2,), {}), ("u", (), {})], r"no rule matches v/param \[2\], u/param \[\]"),
        (rule_of(), [("w", (2,), at) for at in W], "axis 'tp', and nothing says"),
        (rule_of(unique="tp"), [("w", (2,), at) for at in W], "2 of 2 have it, at 0, 1"),
        (rule_of(replicate="tp"), [("w", (2,), W[1])], "none at 0 of 2"),
        (rule_of(replicate="tp"), [("w", (2,), W[0]), ("w", (3,), W[1])], "do not fit together"),
        (rule_of(average="tp"), [("w", (2,), W[0])], "none at 1 of 2"),
        (rule_of(shard="tp", dim=1), [("w", (2,), at) for at in W], "has no dim 1"),
        (rule_of(shard="tp", dim=0, widths="even"), [("w", (2,), W[0]), ("w", (3,), W[1])], "5 is not divided evenly by 2"),
        (rule_of(shard="tp", dim=0, widths="ceil"), [("w", (2,), W[0]), ("w", (3,), W[1])], "at 0 of 2 is 2 wide along dim 0, and should be 3"),
        (rule_of(shard="tp", dim=0, widths=[1]), [("w", (2,), at) for at in W], "1 widths are given, of 2 ranks"),
        (rule_of(shard="tp", dim=0), [("w", (2,), W[0]), ("w", (2,), W[0]), ("w", (2,), W[1])], "2 stored tensors .w. are at one place"),
        (rule_of(shard="tp", dim=0), [("w", (2,), {"tp": (0, 1)}), ("w", (2,), W[1])], "axis tp is said to be 1 and 2 long"),
        (rule_of(blocks="tp", dim=0, sizes=[3, 2]), [("w", (3,), W[0]), ("w", (2,), W[1])], "3 is not divided evenly"),
        (rule_of(blocks="tp", dim=0, sizes=[2, 2]), [("w", (2,), W[0]), ("w", (3,), W[1])], "is 3 wide along dim 0, and should be 2"),
        (rule_of(blocks="tp", dim=0, sizes=[4], widths=[[1, 1]]), [("w", (2,), at) for at in W], "of a block of 4 are 2 in all"),
        (rule_of(flat="tp", shape=[5]), [("w", (2,), at) for at in W], r"have 4 elements, and \[5\] has 5"),
        (rule_of(flat="tp", tensors=[{"name": "v", "shape": [9]}]), [("w", (2,), at) for at in W], r"part at 0 of 2 is \[2\]; its share of these tensors has 5"),
        (rule_of(pad={"dim": 0, "size": 3}), [("w", (2,), {})], "3 cannot be its length without padding"),
        (rule_of(split={"dim": 0, "names": ["a", "b"]}, rename="{part}"), [("w", (3,), {})], r"not the sum of \[1, 1\]"),
        (rule_of(split={"dim": 0, "names": ["a", "b"]}, rename="v"), [("w", (2,), {})], "makes 'v' twice"),
        (rule_of(join={"dim": 0, "names": ["v", "w"], "part": "w"}), [("w", (2,), {})], "v is missing"),
        (rule_of(stacked={"dim": 0, "index": "3"}), [("w", (2,), {})], "0, 1, 2 is missing"),
        (rule_of(stacked={"dim": 0, "index": "x"}), [("w", (2,), {})], "slice 'x' of a stack, which is no number"),
        (rule_of(transpose=True), [("w", (2,), {})], r"is transposed, and \[2\] has 1 dims"),
        (rule_of(permute={"dim": 0, "from": "block", "to": "interleaved", "heads": 3, "kv_heads": 2}), [("w", (7,), {})], "3 query heads are not shared by 2"),
        (rule_of(permute={"dim": 0, "from": "block", "to": "interleaved", "heads": 2, "kv_heads": 2}), [("w", (7,), {})], "7 long, which 2 query heads and twice 2"),
        (rule_of(rename="x"), [("w", (2,), {}), ("v", (2,), {})], "are at one place"),
        (rule_of(rename="{1}"), [("w", (2,), {})], "nothing says what .1 is: the regex has no such group"),
        (rule_of(rename="{layers + 1}"), [("w", (2,), {})], "nothing says what layers is: give it under .values."),
        (rule_of(alias_of="v"), [("w", (2,), {})], "alias of v/param, which is made by no rule"),
        (rule_of().replace(".*", "(w|v)") + "\n[[rule]]\nmatch = 'u'\nrename = 'w'", [("w", (2,), {}), ("u", (2,), {})], "which rule 1 has made of another"),
        (rule_of(), [("w", (2,), {"tp": (2, 2)})], "said to be at tp 2 of 2"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_their_rules_are_refused_by_name(text, stored, says):
    rows = [StoredTensor(n, name, shape, "F32", at=at) for n, (name, shape, at) in enumerate(stored)]
    with pytest.raises(RuleError, match=says) as raised:
        assemble(Rules.parse(text, "rules.toml"), rows)
    assert "\n" not in str(raised.value)


def test_parts_of_two_dtypes_are_no_tensor():
    rows = [StoredTensor(n, "w", (2,), dtype, at=W[n]) for n, dtype in enumerate(("F32", "BF16"))]
    with pytest.raises(RuleError, match=r"F32 \[2\] and BF16 \[2\]"):
        assemble(Rules.parse(rule_of(shard="tp", dim=0)), rows)


RULE = "version = 1\n[[rule]]\nmatch = 'w'\n"


@pytest.mark.parametrize(
    "text, says",
    [
        ("version = 1\n[[rule]\n", r"rules.toml is not TOML: .*line 2"),
        ("[[rule]]\nmatch = 'w'", "lacks `version`"),
        ("version = 2\n[[rule]]\nmatch = 'w'", "has version 2, and 1 is the one that is known"),
        ("version = 1", "has no rule"),
        ("version = 1\nrule = 3", "rule = 3, which should be a list"),
        ("version = 1\nrules = 3\n[[rule]]\nmatch = 'w'", "'rules', which nothing reads here"),
        ("version = 1\n\n[[rule]]\nrename = 'w'", r"rule 1 \(line 3\) lacks `match`"),
        (RULE + "[[rule]]\nmatch = '('", r"rule 2 \(line 4\) .match '\(') has match = '\(', which is no regex"),
        (RULE + "shards = 'tp'", "'shards', which nothing reads here. It may have: .*shard"),
        (RULE + "shard = 'tp'", "lacks `dim`"),
        (RULE + "shard = 'tp'\ndim = -1", "dim = -1, which no tensor has"),
        (RULE + "shard = 'tp'\ndim = true", "dim = True, which should be a number"),
        (RULE + "shard = 3\ndim = 0", "shard = 3, which should be text"),
        (RULE + "shard = 'tp'\ndim = 0\nwidths = 'odd'", "widths 'odd': even, ceil, balanced, a list"),
        (RULE + "shard = 'tp'\ndim = 0\nsize = 4", "`size` without `widths`"),
        (RULE + "shard = 'tp'\ndim = 0\nsizes = [4]", "gives `sizes`, which is nothing to `shard`"),
        (RULE + "shard = 'tp'\nreplicate = 'dp'\ndim = 0", "names replicate and shard of the kinds of cuts"),
        (RULE + "cut = [{shard = 'tp', dim = 0}]\nreplicate = 'dp'", "both `cut` and `replicate`"),
        (RULE + "cut = [{dim = 0}]", "cut names none of the kinds of cuts"),
        (RULE + "cut = [{shard = 'tp', dim = 0, at = 1}]", "gives `at`, which is nothing to `shard`"),
        (RULE + "cut = [3]", "cut is 3, which should be a table"),
        (RULE + "grid = ['x', 'y']\ndims = [0]", "2 axes, 1 dims"),
        (RULE + "blocks = 'tp'\ndim = 0\nsizes = [1, 2]\nwidths = ['even']", "2 blocks, and widths of 1"),
        (RULE + "boxes = 'tp'\nat = [[[0], [-1]]]", "which is no box"),
        (RULE + "flat = 'dp'\ntensors = [{name = 'a', shape = [1]}]\nbuckets = [2]", "1 tensors, and buckets of 2"),
        (RULE + "cut = [{replicate = 'tp'}, {flat = 'dp', tensors = [{name = 'a', shape = [1]}]}]", "beside a flat partition"),
        (RULE + "dtype = 'float32'", "dtype = 'float32', which should be one of BOOL"),
        (RULE + "rename = 'a{1'", "rename: 'a{1' has a brace without its other one"),
        (RULE + "rename = 'a{1 +}'", "rename: '.1 .' lacks a number or a name"),
        (RULE + "rename = 'a{1 ** 2}'", "lacks a number or a name"),
        (RULE + "rename = 'a{__import__(1)}'", "goes on with '\\(' where it should end"),
        (RULE + "rename = 'a{x.y}'", "has '.' where a number, a name"),
        (RULE + "rename = 'a{(1}'", "'.' without its '.'"),
        (RULE + "pad = {dim = 0, size = [1]}", "size = \\[1\\], which should be a number"),
        (RULE + "pad = {dim = 0, size = '4 4'}", "size: '4 4' goes on with '4'"),
        (RULE + "split = {dim = 0, names = ['a', 'a']}", "names one of its parts twice"),
        (RULE + "split = {dim = 0, names = ['a', 'b'], sizes = [1]}", "2 names and 1 sizes"),
        (RULE + "permute = {dim = 0, from = 'block', to = 'block', heads = 1, kv_heads = 1}", "changes nothing"),
        (RULE + "transpose = [0, 0]", "no order of dims"),
        (RULE + "where = {pp = 'x'}", "pp = 'x', which should be numbers"),
        ("version = 1\n[axes]\ndp = 'shard'\n[[rule]]\nmatch = 'w'", r"\[axes\] has dp = 'shard'"),
        ("version = 1\n[values]\na = 'b // 0'\nb = 1\n[[rule]]\nmatch = 'w'", r"\[values\], a: nothing says what b is"),
        ("version = 1\n[values]\na = '1 // 0'\n[[rule]]\nmatch = 'w'", "divides by zero"),
        ("version = 1\n[values]\na = '" + "9" * 18 + " * 999999'\n[[rule]]\nmatch = 'w'", "no tensor is as large"),
        ("version = 1\n[values]\na = '" + "(" * 300 + "'\n[[rule]]\nmatch = 'w'", "has 300 characters"),
    ],
)  # fmt: skip
def test_a_rule_file_that_is_wrong_is_one_clear_error_that_says_where(text, says):
    with pytest.raises(RuleError, match=says) as raised:
        Rules.parse(text, "rules.toml")
    assert str(raised.value).startswith("rules.toml") and "\n" not in str(raised.value)


def test_a_rule_may_be_of_some_ranks_or_slots_alone():
    ranks = Ranks()
    for stage in range(2):
        ranks.store("flat", numbered((4,)) + stage, pp=(stage, 2))
    ranks.store("w", numbered((2, 3)), slot="exp_avg_sq")
    ranks.store("w", numbered((2,)), slot="exp_avg_sq_row")
    text = """
        version = 1
        [[rule]]
        match = 'flat'
        where = {pp = 0}
        flat = "dp"
        tensors = [{name = "first", shape = [2, 2]}]
        [[rule]]
        match = 'flat'
        where = {pp = [1, 2]}
        flat = "dp"
        tensors = [{name = "second", shape = [3]}, {name = "third", shape = []}]
        [[rule]]
        match = 'w'
        slots = '.*_row'
        slot = "row"
        [[rule]]
        match = 'w'
        transpose = true
        [[rule]]
        match = '.*'
        unique = "pp"
    """
    found = ranks.tensors(text)
    assert {key: value.shape for key, value in found.items()} == {
        "w/exp_avg_sq": (3, 2), "w/row": (2,), "first/param": (2, 2), "second/param": (3,), "third/param": (),
    }  # fmt: skip
    assert found["third/param"] == 4
