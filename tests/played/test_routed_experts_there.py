"""Experts that are read one by one on a separate device."""

from __future__ import annotations

import pytest

from played_device import played  # noqa: F401
from training import differing, stored

pytest.importorskip("transformers")

from routed_runs import EXPERT_BYTES, micro_batches, train


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("slots", [1, 4])
def test_experts_come_to_the_device_through_few_buffers(tmp_path, slots):
    sample = {"device": "played", "sample": micro_batches(0)[0], "micro_batches": 2}
    whole, _ = train(tmp_path / "whole", range(3), None, **sample)
    found, engine = train(tmp_path / "routed", range(3), slots, **sample)
    assert found == whole
    assert differing(stored(tmp_path / "routed"), stored(tmp_path / "whole")) == []
    ahead = min(slots, 3)
    assert engine._plan.memory.at("device")["experts"] == slots * EXPERT_BYTES
    assert engine.last["buffers"]["experts"] <= engine._plan.memory.at("host")["expert_staging"]
    assert engine._plan.memory.at("host")["expert_staging"] == ahead * EXPERT_BYTES
