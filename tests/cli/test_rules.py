"""``rules``: infer, check and packs."""

import json

import pytest

from holdfast.state.rules.rule_language import Rules
from tiny_run import TinyRun


@pytest.fixture
def run(tmp_path):
    with TinyRun(tmp_path / "run") as tiny:
        tiny.take_step()
    return tmp_path / "run"


def test_rules_inferred_of_a_run_fit_it(run, tmp_path, holdfast):
    inferred = holdfast("rules", "infer", run)
    assert inferred.code == 0 and Rules.parse(inferred.out).rules
    (tmp_path / "rules.toml").write_text(inferred.out)
    checked = holdfast("rules", "check", tmp_path / "rules.toml", run)
    assert checked.code == 0 and "tensors made of what" in checked.out and len(checked.out.splitlines()) == 1


def test_rules_that_make_something_else_of_a_run_are_told(run, tmp_path, holdfast):
    (tmp_path / "rules.toml").write_text(
        "version = 1\n[[rule]]\nmatch = '(.*)'\nslots = 'param'\nrename = 'other.{1}'\n"
        "[[rule]]\nmatch = '.*w.*'\n[[rule]]\nmatch = '.*'\n[[rule]]\nmatch = 'nothing'"
    )
    checked = holdfast("rules", "check", tmp_path / "rules.toml", f"{run}@1", "--json")
    told = json.loads(checked.out)
    assert checked.code == 1 and told["unused"][-1] == 4
    assert told["otherwise"] and all(key.endswith("/param") for key in told["otherwise"])
    text = holdfast("rules", "check", tmp_path / "rules.toml", run).out
    assert "ambiguous: " in text and "is matched by rules 1, 2; the first holds" in text
    assert "unused: " in text and "rule 4 (line 10) (match 'nothing')" in text
    assert "not as the run records it: " in text


def test_rules_that_do_not_fit_a_run_are_an_error(run, tmp_path, holdfast):
    for content, says in (
        (b"version = 1\n[[rule]]\nmatch = 'none'", "no rule matches"),
        (b"\xff", "text file"),
    ):
        (tmp_path / "rules.toml").write_bytes(content)
        checked = holdfast("rules", "check", tmp_path / "rules.toml", run)
        assert checked.code == 2 and says in checked.err and len(checked.err.splitlines()) == 1
    missing = holdfast("rules", "check", tmp_path / "absent.toml", run)
    assert missing.code == 2 and "absent.toml cannot be read" in missing.err


def test_packs_are_listed_printed_and_take_values_from_a_configuration(run, tmp_path, holdfast):
    listed = holdfast("rules", "packs")
    assert listed.code == 0 and "megatron-to-llama" in listed.out
    printed = holdfast("rules", "packs", "llama")
    assert "[[rule]]" in printed.out
    (tmp_path / "config.json").write_text('{"vocab_size": 37, "name": "x", "tied": true}')
    checked = holdfast("rules", "check", "llama", run, "--values", tmp_path / "config.json")
    assert checked.code == 2 and "no rule matches" in checked.err
    (tmp_path / "config.json").write_text("[1]")
    refused = holdfast("rules", "check", "llama", run, "--values", tmp_path / "config.json")
    assert refused.code == 2 and "holds no table" in refused.err


def test_rules_that_put_elements_elsewhere_are_told(tmp_path, holdfast):
    with TinyRun(tmp_path / "run", tensors={"block": [("qkv/param", "F32", (6, 2))]}, frozen={}) as tiny:
        tiny.take_step()
    (tmp_path / "rules.toml").write_text(
        "version = 1\n[[rule]]\nmatch = 'qkv'\n"
        "permute = {dim = 0, from = 'block', to = 'interleaved', heads = 2, kv_heads = 2}"
    )
    checked = holdfast("rules", "check", tmp_path / "rules.toml", tmp_path / "run")
    assert checked.code == 1 and "not as the run records it: qkv/param" in checked.out
