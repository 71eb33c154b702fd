"""What others rely on changes on purpose only: then ``contract.json`` is written anew (``contract.py`` says how)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from golden import contract, make_runs

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found():
    return contract.contract()


@pytest.fixture(scope="module")
def kept():
    return json.loads((HERE / "contract.json").read_text())


def test_public_names_and_signatures_are_those_kept(found, kept):
    assert found["names"] == kept["names"]
    assert found["integrations"] == kept["integrations"]


def test_help_texts_are_those_kept(found, kept):
    assert found["help"] == kept["help"]


def test_no_summary_of_a_command_is_cut(found):
    lines = found["help"]["holdfast"]
    commands = lines[lines.index("Commands:") + 1 :]
    assert len(commands) > 15 and not [line for line in commands if line.endswith("...")]


@pytest.mark.parametrize("kind", ["plain", "engine"])
def test_documents_and_events_have_the_keys_of_the_golden_run(tmp_path, kind):
    make_runs.KINDS[kind](tmp_path / kind, 3)
    assert contract.documents(tmp_path / kind) == contract.documents(HERE / "runs_v1" / kind)
