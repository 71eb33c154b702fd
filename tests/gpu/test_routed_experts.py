"""Experts that are read one by one on a separate device."""

from __future__ import annotations

import pytest

from training import differing, stored

pytest.importorskip("transformers")

from routed_runs import EXPERT_BYTES, mixture, train


@pytest.mark.slow
@pytest.mark.usefixtures("same_bits")
def test_experts_come_to_the_device_through_few_buffers(tmp_path, device):
    slots, short = 4, {"num_hidden_layers": 2}
    whole, _ = train(tmp_path / "whole", range(1), None, model=mixture(**short), device=device)
    found, engine = train(tmp_path / "routed", range(1), slots, model=mixture(**short), device=device)
    assert found == whole
    assert differing(stored(tmp_path / "routed"), stored(tmp_path / "whole")) == []
    work = engine._plan.work
    assert work.expert_bytes == slots * EXPERT_BYTES
    assert work.expert_staging_bytes == min(slots, 3) * EXPERT_BYTES
    assert engine.last["buffers"]["experts"] <= work.expert_staging_bytes
