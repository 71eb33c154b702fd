"""The document of rules: its examples can be read and do what it says, and it says all that there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.formats import packs
from holdfast.state.rules.assembly import assemble
from holdfast.state.rules.rule_language import KINDS, OPTIONS, Rules
from holdfast.state.rules.rule_matching import StoredTensor

DOCUMENT = (Path(__file__).parents[2] / "docs" / "rules.md").read_text()
EXAMPLES = re.findall(r"```toml\n(.*?)```", DOCUMENT, re.DOTALL)
MODIFIERS = [
    "cut",
    "pad",
    "join",
    "split",
    "stacked",
    "unstack",
    "permute",
    "transpose",
    "rename",
    "alias_of",
    "dtype",
]
LINES = [
    line for line in DOCUMENT.splitlines() if line.startswith("|") and " = " in line and "..." not in line
]
NEEDED = {"shard": ["dim = 0"], "blocks": ["dim = 0", "sizes = [1]"], "grid": ["dims = [0, 1]"],
          "flat": ["shape = [1]"], "boxes": ["at = [[]]"]}  # fmt: skip


def rule_in(line):
    """The rule that a line of a table gives, and what it leaves to the reader; None if it gives none."""
    given = {key: text for text, key in re.findall(r"`((\w+) = [^`]*)`", line)}
    kind = next((key for key in given if key in (*KINDS, *MODIFIERS)), None)
    if kind is None:
        return None
    options = OPTIONS.get(kind, set())
    lines = [given[kind], *(text for key, text in given.items() if key in options or key == "pad" != kind)]
    lines += [text for text in NEEDED.get(kind, []) if text.split(" =")[0] not in given]
    return "version = 1\n[[rule]]\nmatch = 'w'\n" + "\n".join(dict.fromkeys(lines))


@pytest.mark.parametrize("text", EXAMPLES + [rule for line in LINES if (rule := rule_in(line))])
def test_the_examples_are_rules(text):
    assert Rules.parse(text, values={"vocab_size": 37}).rules


def test_the_example_of_virtual_stages_gives_layers_their_numbers_in_the_whole_model():
    [text] = [text for text in EXAMPLES if "virtual_stages" in text]
    rules = Rules.parse(text, values={"num_hidden_layers": 12, "virtual_stages": 2})
    rows = [StoredTensor(n, "model1.layers.1.mlp.w", (n,), "F32", at={"pp": (n, 3)}) for n in range(3)]
    shapes = {key: ruled.atom.shape for key, ruled in assemble(rules, rows).atoms.items()}
    assert shapes == {f"layers.{2 * (3 + n) + 1}.mlp.w/param": (n,) for n in range(3)}


def test_every_kind_option_and_pack_is_in_the_document():
    assert len(LINES) > 25
    for word in {*KINDS, *MODIFIERS, *(option for options in OPTIONS.values() for option in options)}:
        assert f"`{word}" in DOCUMENT or f"{word} = " in DOCUMENT, word
    for pack in packs.names():
        family = pack.replace("-to-megatron", "-").replace("megatron-to-", "-")
        assert f"`{pack}`" in DOCUMENT or f"`{family}`" in DOCUMENT, pack
