"""Commits that are no longer in the directory: newer steps that were durable are told."""

from __future__ import annotations

import warnings

import holdfast
from training import adamw, batches, decoder


def trained(root, steps):
    """The step that was gone on from, and what was warned of."""
    model = decoder(blocks=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with holdfast.offload(model, adamw(model), root, dtype="fp32") as engine:
            first = engine.steps_done
            while engine.steps_done < steps:
                engine.step(batches(engine.steps_done, 1))
    return first, " ".join(str(each.message) for each in told)


def test_newer_commits_that_were_durable_and_are_gone_are_told_once(tmp_path):
    root = tmp_path / "run"
    trained(root, 3)
    max((root / "commits").iterdir()).unlink()
    first, told = trained(root, 2)
    assert first == 2 and "resuming from step 2" in told and "says that step 3 was durable" in told
    assert trained(root, 3) == (2, "")
