"""Rules that are wrong, or do not fit what is stored: one clear error each."""

from __future__ import annotations

import pytest

from holdfast.errors import RuleError
from holdfast.state.rules.assembly import assemble
from holdfast.state.rules.rule_language import Rules
from holdfast.state.rules.rule_matching import StoredTensor
from ruled import rule_of

W = {"tp": (0, 2)}, {"tp": (1, 2)}
PAIR = [("w", (2,), at) for at in W]
UNEQUAL = [("w", (2,), W[0]), ("w", (3,), W[1])]
SCALARS = [("w", (), at) for at in W]
VW = [{"name": "v", "shape": [4]}]
ONE = [("w", (2,), {})]
SEVEN = [("w", (7,), {})]
HALVES = {"dim": 0, "names": ["a", "b"]}
FUSE = {"dim": 0, "from": "block", "to": "interleaved", "kv_heads": 2}
TWO_RULES = rule_of(match="w") + "\n[[rule]]\nmatch = 'u'\nrename = 'w'"


HUGE = f"""version = 1
[values]
n = {"9" * 18}
[[rule]]
match = "w"
rename = "{{{"*".join("n" * 18)}}}"
"""
"""An expression above the largest float."""


@pytest.mark.parametrize(
    "text, stored, says",
    [
        (rule_of(match="w"), [("v", (2,), {}), ("u", (), {})], "no rule matches v/param [2], u/param []"),
        (rule_of(), PAIR, "parts along the axis 'tp', and nothing says"),
        (rule_of(unique="tp"), PAIR, "unique over tp: 2 of 2 have it, at 0, 1"),
        (rule_of(replicate="tp"), [PAIR[1]], "replicate over tp: there is none at 0 of 2"),
        (rule_of(replicate="tp"), UNEQUAL, "do not fit together: F32 [2] and F32 [3]"),
        (rule_of(average="tp"), [PAIR[0]], "average over tp: there is none at 1 of 2"),
        (rule_of(shard="tp", dim=1), PAIR, "[2] has no dim 1"),
        (rule_of(shard="tp", dim=0, widths="even"), UNEQUAL, "5 is not divided evenly by 2"),
        (rule_of(shard="tp", dim=0, widths="ceil"), UNEQUAL, "at 0 of 2 is 2 wide along dim 0, and should be 3"),
        (rule_of(shard="tp", dim=0, widths=[1]), PAIR, "1 widths are given, of 2 ranks"),
        (rule_of(shard="tp", dim=0), [*PAIR, PAIR[0]], "2 stored tensors (w) are at one place"),
        (rule_of(shard="tp", dim=0), [("w", (2,), {}), PAIR[1]], "axis tp is said to be 1 and 2 long"),
        (rule_of(blocks="tp", dim=0, sizes=[3, 2]), UNEQUAL, "3 is not divided evenly by 2"),
        (rule_of(blocks="tp", dim=0, sizes=[2, 2]), UNEQUAL, "is 3 wide along dim 0, and should be 2"),
        (rule_of(blocks="tp", dim=0, sizes=[4], widths=[[1, 1]]), PAIR, "a block of 4 are 2 in all"),
        (rule_of(boxes="tp", at=[[[0], [2]], []]), PAIR, "1 of 2 should hold None, and holds [2]"),
        (rule_of(boxes="tp", at=[[[0], [2]]]), PAIR, "1 boxes are given, of 2 ranks"),
        (rule_of(flat="tp", shape=[5]), PAIR, "have 4 elements, and [5] has 5"),
        (rule_of(flat="tp", shape=[2]), SCALARS, "the part at 0 of 2 is [], and a flat one has one dim"),
        (rule_of(flat="tp", tensors=VW, align=0), PAIR, "nothing is a multiple of 0"),
        (rule_of(flat="tp", tensors=VW, tensor_align=0), PAIR, "nothing is a multiple of 0"),
        (rule_of(shard="tp", dim=0, widths={"repeat": 0}), PAIR, "0 heads are shared by 2: repeat is"),
        (rule_of(blocks="tp", dim=0, sizes=[4], widths=[{"repeat": 0}]), PAIR, "0 heads are shared by 2"),
        (rule_of(flat="tp", tensors=[{"name": "v", "shape": [9]}]), PAIR, "at 0 of 2 is [2]; its share of"),
        (rule_of(flat="tp", tensors=[{"name": "v", "shape": [1]}]), PAIR, "has 1 elements, and 1 with padding"),
        (rule_of(pad={"dim": 0, "size": 3}), ONE, "3 cannot be its length without padding"),
        (rule_of(split=HALVES, rename="{part}"), SEVEN, "7 long, and not the sum of [3, 3]"),
        (rule_of(split=HALVES, rename="v"), ONE, "makes 'v' twice"),
        (rule_of(join={"dim": 0, "names": ["v", "w"], "part": "w"}), ONE, "v is missing"),
        (rule_of(join={"dim": 0, "names": ["v"], "part": "w"}), ONE, "v is missing"),
        (rule_of(stacked={"dim": 0, "index": "3"}), ONE, "0, 1, 2 is missing"),
        (rule_of(stacked={"dim": 0, "index": "x"}), ONE, "slice 'x' of a stack, which is no number"),
        (rule_of(stacked={"dim": 2, "index": "0"}), ONE, "stacks [2] along dim 2"),
        (rule_of(unstack={"dim": 1}), ONE, "[2] has no dim 1"),
        (rule_of(transpose=True), ONE, "is transposed, and [2] has 1 dims"),
        (rule_of(permute=FUSE | {"heads": 3}), SEVEN, "3 query heads are not shared by 2"),
        (rule_of(permute=FUSE | {"heads": 2}), SEVEN, "7 long, which 2 query heads and twice 2"),
        (rule_of(rename="x"), [*ONE, ("v", (2,), {})], "2 stored tensors (w, v) are at one place"),
        (rule_of(rename="{1}"), ONE, "nothing says what $1 is: the regex has no such group"),
        (rule_of(rename="{layers + 1}"), ONE, "nothing says what layers is: give it under [values]"),
        (rule_of(rename="{1 // 0 + 1}", match="w(.*)"), ONE, "'$1 // 0 + 1' divides by zero"),
        (rule_of(rename=f"{{{'9' * 18} * 999 + pp}}", match="w"), ONE, "nothing says what $999999999999999999 is"),
        (rule_of(rename=f"{{(0 + {'9' * 18}) * 999}}", match="w"), ONE, "is larger than any tensor"),
        (HUGE, ONE, "is larger than any tensor"),
        (rule_of(match="(w)", rename="{1 + 1}"), ONE, "works with $1, which is 'w' and no number"),
        (rule_of(alias_of="v"), ONE, "an alias of v/param, which is made by no rule"),
        (TWO_RULES, [*ONE, ("u", (2,), {})], "would be w/param, which rule 1 has made of another"),
        (rule_of(), [("w", (2,), {"tp": (2, 2)})], "said to be at tp 2 of 2"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_their_rules_are_refused_by_name(text, stored, says):
    rows = [StoredTensor(n, name, shape, "F32", at=at) for n, (name, shape, at) in enumerate(stored)]
    with pytest.raises(RuleError) as raised:
        assemble(Rules.parse(text, "rules.toml"), rows)
    assert says in str(raised.value) and "\n" not in str(raised.value)


def test_parts_of_two_dtypes_are_no_tensor():
    rows = [StoredTensor(n, "w", (2,), dtype, at=W[n]) for n, dtype in enumerate(("F32", "BF16"))]
    with pytest.raises(RuleError, match=r"F32 \[2\] and BF16 \[2\]"):
        assemble(Rules.parse(rule_of(shard="tp", dim=0)), rows)


def test_of_many_tensors_without_a_rule_some_are_named_and_the_rest_counted():
    rows = [StoredTensor(n, f"w{n}", (), "F32") for n in range(12)]
    with pytest.raises(RuleError, match=r"w0/param \[\], w1/.*w9/param \[\] and 2 more\. Write a rule"):
        assemble(Rules.parse(rule_of(match="w")), rows)


HEAD = "version = 1\n[[rule]]\nmatch = 'w'\n"
SHARD = HEAD + "shard = 'tp'\ndim = 0\n"
VALUES = "version = 1\nrule = [{match = 'w'}]\n[values]\n"
FLAT = "flat = 'dp', tensors = [{name = 'a', shape = [1]}]"


@pytest.mark.parametrize(
    "text, says",
    [
        ("version = 1\n[[rule]\n", "rules.toml is not TOML: "),
        ("[[rule]]\nmatch = 'w'", "rules.toml lacks `version`"),
        ("version = 2\n[[rule]]\nmatch = 'w'", "has version 2, and 1 is the one that is known"),
        ("version = 1", "has no rule"),
        ("version = 1\nrule = 3", "rule = 3, which should be a list"),
        ("version = 1\nrules = 3\n[[rule]]\nmatch = 'w'", "'rules', which nothing reads here"),
        ("version = 1\n\n[[rule]]\nrename = 'w'", "rules.toml, rule 1 (line 3) lacks `match`"),
        (HEAD + "[[rule]]\nmatch = '('", "rule 2 (line 4) (match '(') has match = '(', which is no regex"),
        (HEAD + "shards = 'tp'", "'shards', which nothing reads here. It may have: alias_of, average, blocks,"),
        (HEAD + "shard = 'tp'", "lacks `dim`"),
        (HEAD + "shard = 'tp'\ndim = -1", "dim = -1, which no tensor has"),
        (HEAD + "shard = 'tp'\ndim = true", "dim = True, which should be a number"),
        (HEAD + "shard = 3\ndim = 0", "shard = 3, which should be text"),
        (SHARD + "widths = 'odd'", "widths 'odd': even, ceil, balanced, a list"),
        (SHARD + "size = 4", "`size` without `widths`"),
        (SHARD + "sizes = [4]", "gives `sizes`, which is nothing to `shard`"),
        (SHARD + "replicate = 'dp'", "names replicate and shard of the kinds of cuts"),
        (HEAD + "cut = [{shard = 'tp', dim = 0}]\nreplicate = 'dp'", "both `cut` and `replicate`"),
        (HEAD + "cut = [{dim = 0}]", "cut names none of the kinds of cuts"),
        (HEAD + "cut = [{shard = 'tp', dim = 0, at = 1}]", "gives `at`, which is nothing to `shard`"),
        (HEAD + "cut = [{unique = 'tp', odd = 1}]", "cut has 'odd', which nothing reads here"),
        (HEAD + "cut = [3]", "cut is 3, which should be a table"),
        (HEAD + "dim = 0", "'dim', which nothing reads here"),
        (HEAD + "grid = ['x', 'y']\ndims = [0]", "2 axes, 1 dims"),
        (HEAD + "blocks = 'tp'\ndim = 0\nsizes = [1, 2]\nwidths = ['even']", "2 blocks, and widths of 1"),
        (HEAD + "boxes = 'tp'\nat = [[[0], [-1]]]", "which is no box"),
        (HEAD + FLAT.replace(", t", "\nt") + "\nbuckets = [2]", "1 tensors, and buckets of 2"),
        (HEAD + f"cut = [{{replicate = 'tp'}}, {{{FLAT}}}]", "beside a flat partition"),
        (HEAD + "dtype = 'float32'", "dtype = 'float32', which should be one of BOOL"),
        (HEAD + "rename = 'a{1'", "rename: 'a{1' has a brace without its other one"),
        (HEAD + "rename = 'a{1 +}'", "rename: '$1 +' lacks a number or a name"),
        (HEAD + "rename = 'a{1 ** 2}'", "rename: '$1 ** 2' lacks a number or a name"),
        (HEAD + "rename = 'a{__import__(1)}'", "goes on with '(' where it should end"),
        (HEAD + "rename = 'a{x.y}'", "has '.' where a number, a name"),
        (HEAD + "rename = 'a{(x}'", "has a '(' without its ')'"),
        (HEAD + "pad = {dim = 0, size = [1]}", "size = [1], which should be a number"),
        (HEAD + "pad = {dim = 0, size = '4 4'}", "size: '4 4' goes on with '4'"),
        (HEAD + "split = {dim = 0, names = ['a', 'a']}", "names one of its parts twice"),
        (HEAD + "split = {dim = 0, names = ['a', 'b'], sizes = [1]}", "2 names and 1 sizes"),
        (HEAD + "split = [{dim = 0, names = ['a']}, {dim = 1, names = ['b']}]", "has 2 of `split`, and 1 can be"),
        (HEAD + "permute = {dim = 0, from = 'block', to = 'block', heads = 1, kv_heads = 1}", "changes nothing"),
        (HEAD + "transpose = [0, 0]", "no order of dims"),
        (HEAD + "where = {pp = 'x'}", "pp = 'x', which should be numbers"),
        (HEAD + "drop = 'yes'", "drop = 'yes', which should be true or false"),
        ("version = 1\n[axes]\ndp = 'shard'\n[[rule]]\nmatch = 'w'", "[axes] has dp = 'shard'"),
        (VALUES + "a = 'b'\nb = 1", "[values] has a = 'b', which names b before it is given"),
        (VALUES + f"a = '{'(' * 300}'", "'... has 300 characters, and 200 are the most"),
        (VALUES + f"a = '{' + '.join('x' * 40)}'\nb = '{' + '.join('a' * 20)}'", "is too long with its values put in"),
        (VALUES + "a = 1.5", "[values] has a = 1.5, which should be a number"),
        ("version = 1\n[patterns]\na = '('\n[[rule]]\nmatch = 'w'", "[patterns] has a = '(', which is no regex"),
    ],
)  # fmt: skip
def test_a_rule_file_that_is_wrong_is_one_clear_error_that_says_where(text, says):
    with pytest.raises(RuleError) as raised:
        Rules.parse(text, "rules.toml")
    assert says in str(raised.value)
    assert str(raised.value).startswith("rules.toml") and "\n" not in str(raised.value)
