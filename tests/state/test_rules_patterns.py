"""Each pattern that a parallelism leaves behind has a rule, and the rule finds every element."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import RuleError
from holdfast.state.rules.assembly import assemble
from holdfast.state.rules.rule_language import Rules
from holdfast.state.rules.rule_matching import StoredTensor
from ruled import NAN, Ranks, numbered, rule_of


@settings(deadline=None)
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


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_the_four_dimensions_of_axonn_are_put_together(x, y, z):
    """A weight lies on a grid of x by y; its blocks are divided over z, flat; each data rank has all of it."""
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


@settings(deadline=None)
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
    for t in range(tp):
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
    match = r"model(\d+)[.]layers[.](\d+)[.]w"
    text = rule_of(match=match, rename="h.{($1 * pp_count + pp) * 2 + $2}.w")
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
    halves = {"dim": 0, "names": ["q", "kv"], "sizes": [4, 4]}
    found = ranks.tensors(rule_of(shard="tp", dim=0, split=halves, rename="{part}"))
    assert found["q/step"] == found["kv/step"] == 5 and found["kv/param"].shape == (4, 3)


def test_a_rank_that_stored_nothing_may_be_absent_where_widths_say_so():
    ranks = Ranks()
    ranks.store("w", numbered((4, 2)), tp=(0, 3))
    ranks.store("w", numbered((1, 2)) + 8, tp=(2, 3))
    found = ranks.tensors(rule_of(shard="tp", dim=0, widths=[4, 0, 1]))
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
    text = rule_of(match="w", boxes="rank", at=at) + "\n[[rule]]\nmatch = 'v'\nunique = 'rank'"
    with pytest.raises(RuleError, match=r"boxes do not cover \[3, 4\] once"):
        ranks.tensors(text)
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
        rename = "second"
        [[rule]]
        match = 'never'
        [[rule]]
        match = 'rotary.*'
        drop = true
        [[rule]]
        match = '.*'
    """
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


@pytest.mark.parametrize("buckets", ["each", [7]])
def test_groups_of_zero_are_as_deepspeed_divides_them(buckets):
    """Sizes that DeepSpeed had on four ranks: 222 elements each under ZeRO-3, 220 and at last 217 under ZeRO-1."""
    sizes, ranks = [370, 130, 13, 91, 7, 7, 259], Ranks()
    tensors = [numbered((n,)) + 1000 * number for number, n in enumerate(sizes)]
    parts = [[], [], [], []]
    if buckets == "each":
        for tensor in tensors:
            padded = np.concatenate([tensor, np.full(-len(tensor) % 4, NAN)])
            for part, share in zip(parts, np.split(padded, 4)):
                part.append(share)
    else:
        flat = np.concatenate(tensors)
        parts = [[flat[220 * n : 220 * n + 220]] for n in range(4)]
    for number, part in enumerate(parts):
        ranks.store("group", np.concatenate(part), dp=(number, 4))
    lengths = [row.shape[0] for row in ranks.rows]
    assert lengths == ([222] * 4 if buckets == "each" else [220, 220, 220, 217])
    listed = [{"name": f"t{n}", "shape": [size]} for n, size in enumerate(sizes)]
    align = "dp_count" if buckets == "each" else "2 * dp_count"
    text = rule_of(match="group", flat="dp", tensors=listed, buckets=buckets, align=align)
    found = ranks.tensors(text + "\n[[rule]]\nmatch = '.*'")
    for number, tensor in enumerate(tensors):
        np.testing.assert_array_equal(found[f"t{number}/param"], tensor)


def test_experts_that_ranks_number_alike_need_a_rule_and_do_not_take_each_others_place():
    ranks = Ranks()
    for rank in range(2):
        ranks.store("experts.0.w", numbered((2,)) + rank, ep=(rank, 2))
    with pytest.raises(RuleError, match="axis 'ep', and nothing says"):
        ranks.by(rule_of())
    with pytest.raises(RuleError, match="2 of 2 have it"):
        ranks.by(rule_of(unique="ep"))
    with pytest.raises(AssertionError):
        ranks.tensors(rule_of(replicate="ep"))
    found = ranks.tensors(rule_of(match=r"experts\.(\d+)\.w", rename="experts.{1 + ep}.w"))
    assert found["experts.1.w/param"].tolist() == [1, 2]


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2))
def test_stacks_may_be_along_any_dim_and_cuts_over_several_axes(a, b, dim):
    """The last of the axes runs fastest. A stack is taken apart along a dim, and put together along it."""
    shape = [2, 3, 2]
    shape[dim] = 5
    whole, ranks = numbered(shape), Ranks()
    rows = np.array_split(whole, a * b, axis=1)
    for i in range(a):
        for j in range(b):
            ranks.store("stack", rows[i * b + j], a=(i, a), b=(j, b))
    for n in range(5):
        ranks.store(f"{n}.slice", np.take(whole, n, axis=dim))
    text = f"""
        version = 1
        [[rule]]
        match = 'stack'
        shard = ["a", "b"]
        dim = 1
        widths = "balanced"
        unstack = {{dim = {dim}}}
        rename = "slice.{{index}}"
        [[rule]]
        match = '(.)[.]slice'
        stacked = {{dim = {dim}, index = "{{1}}"}}
        rename = "whole"
    """
    found = ranks.tensors(text)
    np.testing.assert_array_equal(found["whole/param"], whole)
    for n in range(5):
        np.testing.assert_array_equal(found[f"slice.{n}/param"], np.take(whole, n, axis=dim))


def test_tensors_of_a_flat_partition_are_in_none_themselves():
    ranks = Ranks()
    ranks.store("all", numbered((6,)))
    text = rule_of(flat="dp", tensors=[{"name": "all.a", "shape": [2, 2]}, {"name": "all.b", "shape": [2]}])
    found = ranks.tensors(text + "\n[[rule]]\nmatch = 'all[.](.)'\nrename = '{1}'")
    assert found["a/param"].tolist() == [[0, 1], [2, 3]] and found["b/param"].tolist() == [4, 5]
