"""What a live engine takes that no engine on a CPU has: a dynamic loss scale. The rest is in ``tests/peers``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from holdfast.errors import BadInput, OptimizerNotSupported
from holdfast.formats.source import Source
from holdfast.integrations.deepspeed import _count, _scale, load, save
from holdfast.integrations.zero_state import refuse_unknown


def source_with(**extra):
    return Source("there", "deepspeed", progress={"step": 4, "extra": extra})


def scaler():
    return SimpleNamespace(
        dynamic=True, cur_scale=2.0**16, cur_iter=0, last_overflow_iter=-1, scale_window=1000
    )


FIELDS = {"cur_scale": 512.0, "cur_iter": 9, "last_overflow_iter": 7, "scale_window": 5, "cur_hysteresis": 2}


@pytest.mark.parametrize(
    "told", [{"__object__": "deepspeed.DynamicLossScaler", "fields": FIELDS}, FIELDS], ids=["zero", "saved"]
)
def test_a_dynamic_loss_scale_goes_on_and_its_options_stay(told):
    own = scaler()
    assert _scale(SimpleNamespace(loss_scaler=own), source_with(loss_scaler=told)) == []
    assert vars(own) == {
        "dynamic": True, "cur_scale": 512.0, "cur_iter": 9, "last_overflow_iter": 7, "scale_window": 1000
    }  # fmt: skip


@pytest.mark.parametrize("extra", [{}, {"loss_scaler": 3}, {"loss_scaler": {"fields": {"cur_scale": "x"}}}])
def test_a_dynamic_loss_scale_that_is_not_there_is_told(extra):
    own = scaler()
    [told] = _scale(SimpleNamespace(loss_scaler=own), source_with(**extra))
    assert "no dynamic loss scale" in told and vars(own) == vars(scaler())


def test_a_scale_that_is_not_dynamic_is_the_scripts():
    own = SimpleNamespace(dynamic=False, cur_scale=1.0)
    assert _scale(SimpleNamespace(loss_scaler=own), source_with(loss_scaler=FIELDS)) == []
    assert own.cur_scale == 1.0 and _scale(SimpleNamespace(), source_with()) == []


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"global_samples": 50, "skipped_steps": 1}, (4, 50, 1, 8)),
        ({}, (4, 48, 0, 8)),
        ({"global_samples": "x"}, (4, 48, 0, 8)),
    ],
)
def test_counters_are_those_of_the_source_or_what_its_step_means_here(extra, expected):
    engine = SimpleNamespace(train_batch_size=lambda: 12, gradient_accumulation_steps=lambda: 2)
    assert _count(engine, source_with(**extra)) == 4
    assert (engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps) == expected


def test_what_is_no_engine_is_refused(tmp_path):
    with pytest.raises(BadInput, match="is no engine of DeepSpeed"):
        load(object(), tmp_path)
    with pytest.raises(BadInput, match="is no engine of DeepSpeed"):
        save(object(), tmp_path / "run")
    with pytest.raises(BadInput, match="from 0 on"):
        save(object(), tmp_path / "run", step=-1)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("module", "name", "known"),
    [
        ("deepspeed.ops.adam.fused_adam", "FusedAdam", True),
        ("deepspeed.ops.adam.cpu_adam", "DeepSpeedCPUAdam", True),
        ("apex.optimizers.fused_adam", "FusedAdam", False),
        ("deepspeed.ops.adam.zenflow_cpu_adam", "ZenFlowCPUAdam", False),
        ("deepspeed.ops.lion.fused_lion", "FusedLion", False),
    ],
)
def test_optimizers_are_known_by_class_and_module(module, name, known):
    made = type(name, (torch.optim.AdamW,), {"__module__": module})([nn.Parameter(torch.ones(1))])
    if known:
        return refuse_unknown(made)
    with pytest.raises(
        OptimizerNotSupported, match=f"{name}, and what it keeps is known of .* FusedAdam and"
    ):
        refuse_unknown(made)
