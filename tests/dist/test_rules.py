"""Rules that are inferred of what several ranks stored make the same tensors of it."""

from __future__ import annotations

import pytest

from dist.world import finished
from holdfast.formats.rules_source import check, infer
from holdfast.state.rules.rule_language import Rules
from holdfast.store.reader import RunReader


@pytest.mark.parametrize("kind, ranks", [("ddp", 2), ("fsdp", 3), ("hsdp", 4)])
def test_rules_inferred_of_ranks_fit_them(world, tmp_path, kind, ranks):
    finished(world.run(ranks, kind=kind, root=tmp_path, steps=2, base_every=2))
    reader = RunReader(tmp_path, direct=False)
    manifest = reader.head()
    assert manifest is not None and len(manifest.streams) == ranks
    text = infer(reader, manifest)
    assert ("shard = " in text) == (kind != "ddp")
    found, otherwise = check(Rules.parse(text), reader, manifest)
    assert not otherwise and sorted(found.atoms) == sorted(reader.atoms(manifest))
    wrong = text.replace("widths = [", "widths = [1, ") if kind != "ddp" else text.replace('"rank"', '"tp"')
    with pytest.raises(ValueError, match=r"widths are given|along the axis 'rank'"):
        check(Rules.parse(wrong), reader, manifest)
