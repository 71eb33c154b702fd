"""Compute copies are planned with the bytes that an engine counts, in each precision of a machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import holdfast
from holdfast.cli.plan.placing import case_of
from holdfast.measure.machine_probe import BlockTimes
from holdfast.models.decoder import Decoder, DecoderConfig
from holdfast.offload.setup import automatic_placement
from holdfast.profiles import load_machine, load_model, to_toml
from holdfast.schedule.operation_lists import work_of
from holdfast.schedule.planner.training_setting import Setting
from training import adamw

ROWS, TOKENS = 2, 256
MODEL = replace(
    load_model("gpt-46m"),
    blocks=2, width=256, heads=4, kv_heads=2, hidden=768, gated=True, biases=False, fused=False, positions=0,
    vocabulary=4096, tied=False, sequence=TOKENS, micro_batch=ROWS,
)  # fmt: skip


def planned(tmp_path, monkeypatch, precision):
    """The case and the work of a step on a CPU whose rates are of ``precision``, as ``holdfast plan`` counts it."""
    path = tmp_path / "machine.toml"
    path.write_text(to_toml(replace(load_machine("cpu-2-core"), precision=precision)))
    monkeypatch.setattr("holdfast.cli.plan.placing.load_model", lambda name: MODEL)
    names = "micro_batch_size sequence lora base expert_slots ssds host retain ssd_steps"
    given = dict.fromkeys(names.split()) | {"model": "mine", "machine": str(path), "clipping": "auto"}
    given["commit_every"] = 1
    case = case_of(given)
    return case, work_of(Setting(machine=case.machine, model=case.model, method=case.method, micro_batches=1))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_planned_bytes_are_those_of_the_engine(tmp_path, monkeypatch, precision):
    case, expected = planned(tmp_path, monkeypatch, precision)
    assert case.method.precision == precision
    model = Decoder(
        DecoderConfig(blocks=2, width=256, heads=4, kv_heads=2, hidden=768, context=TOKENS, vocabulary=4096)
    )
    words = torch.randint(4096, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    with holdfast.offload(
        model, adamw(model), tmp_path / "run", precision=precision, sample=(words, words)
    ) as engine:
        counted = engine._plan.work
    for block, plan in zip(counted.blocks, expected.blocks, strict=True):
        for name in ("elements", "param_bytes", "trained_param_bytes", "state_bytes", "grad_bytes"):
            assert getattr(block, name) == pytest.approx(getattr(plan, name), rel=0.03), name
        assert block.is_split == plan.is_split == (precision == "bf16")
    for name in ("input_bytes", "resident_param_bytes", "resident_elements", "resident_grad_bytes"):
        assert getattr(counted, name) == pytest.approx(getattr(expected, name), rel=0.03), name
    # an estimate, which counts four tensors of logits that live at once where three do, and no gate of an MLP
    assert counted.workspace_bytes == pytest.approx(expected.workspace_bytes, rel=0.25)


@pytest.mark.parametrize("dtype, precision", [(torch.float32, "fp32"), (torch.bfloat16, "bf16")])
def test_a_model_without_times_is_measured_by_a_product_in_its_dtype(monkeypatch, dtype, precision):
    made, ones = [], torch.ones

    def spied(*size, **options):
        made.append(options["dtype"])
        return ones(64, 64, dtype=options["dtype"])

    monkeypatch.setattr(torch, "ones", spied)
    times = automatic_placement._of_a_product(torch.device("cpu"), dtype)
    assert (times.precision, made) == (precision, [dtype])


def test_a_kept_rate_of_another_precision_is_not_used(monkeypatch):
    """A profile is kept for a machine, whose runs may compute in either."""
    machine = replace(load_machine("cpu-2-core"), precision="fp32", device_flop_per_second=7e10)
    found = BlockTimes(1.0, 3.0, 5e8, "a matrix product", "bf16")
    monkeypatch.setattr(automatic_placement, "_of_a_product", lambda device, dtype: found)
    cpu = torch.device("cpu")
    assert automatic_placement.in_dtype(machine, cpu, torch.float32) == machine
    other = automatic_placement.in_dtype(machine, cpu, torch.bfloat16)
    assert (other.precision, other.device_flop_per_second) == ("bf16", 5e8)
