"""Adapters on a quantised base on a separate device."""

from __future__ import annotations

import pytest
import torch

import holdfast
from training import differing, read_atoms

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from tiny_folders import VOCABULARY, write_quantised  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:MatMul8bitLt", "ignore:`is_gradient_checkpointing`")


def train(folder, run, steps, device, **options):
    model, weights = holdfast.pretrained(folder)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (2, 2, 10), generator=generator)
    batches = [{"input_ids": each, "labels": each} for each in tokens]
    with holdfast.offload(model, optimizer, run, source=weights, device=device, **options) as engine:
        return [engine.step(batches) for _ in range(steps)]


ON_SSD = holdfast.Placement(
    params_on_host=0.0, optimizer_on_host=0.0, activations_on_host=0.0, recomputed_fraction=1.0
)
KEPT = holdfast.Placement(params_on_host=1.0, optimizer_on_host=1.0, recomputed_fraction=0.0)


@pytest.mark.usefixtures("same_bits")
@pytest.mark.parametrize("kind", ["nf4", "int8", "fp8"])
def test_bits_depend_on_no_placement_and_no_resume(tmp_path, device, kind):
    """The device rounds otherwise than the host, in attention and in products of 8 bits."""
    if kind != "fp8":
        pytest.importorskip("bitsandbytes")
    folder, runs = write_quantised(tmp_path / "folder", kind), [tmp_path / "kept", tmp_path / "ssd"]
    expected = train(folder, runs[0], 3, device, precision="fp32", placement=KEPT)
    found = train(folder, runs[1], 2, device, precision="fp32", placement=ON_SSD)
    found += train(folder, runs[1], 1, device, precision="fp32", placement=ON_SSD)
    assert found == expected
    assert differing(*map(read_atoms, runs)) == []
    on_host = train(folder, tmp_path / "host", 3, "cpu", precision="fp32")
    assert found == pytest.approx(on_host, rel=1e-3 if kind == "int8" else 1e-5)
