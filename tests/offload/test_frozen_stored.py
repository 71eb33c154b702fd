"""Frozen parameters lie on the SSD once, in the dtype of the model, and are read from there for computing."""

from __future__ import annotations

import pytest
import torch

import holdfast
from holdfast.errors import BadInput
from holdfast.offload.setup.model_values import newest_values
from holdfast.store.run_store import LocalStore
from training import adamw, batches, decoder, differing, read_atoms

STEPS = 4


def rounded(dtype=torch.bfloat16):
    """A decoder whose parameters are values of bf16, held in ``dtype``; the matrices of its blocks are frozen."""
    model = decoder(blocks=3, width=32, hidden=48)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().to(dtype)
    for parameter in model.blocks.parameters():
        parameter.requires_grad_(parameter.dim() == 1)
    return model


def train(directory, model, steps, precision="bf16", **options):
    """The losses of ``steps`` by number, all parameters in fp32, and the engine's account of itself."""
    optimizer = adamw(model)
    with holdfast.offload(
        model, optimizer, directory, precision=precision, sample=batches(0, 1)[0], micro_batches=2, **options
    ) as engine:
        losses = [engine.step(batches(step, 2)) for step in steps]
        values = {name: value.clone() for name, value in engine.state_dict().items()}
        return losses, values, engine


def frozen_files(directory):
    manifest = LocalStore.read(directory, direct=False).head()
    assert manifest is not None
    return [file for name, file in manifest.files.items() if ".frozen" in name]


@pytest.mark.parametrize("placement", [{}, {"params_on_host": 1.0}, {"activations_on_host": 0.0}])
@pytest.mark.slow
def test_bits_do_not_depend_on_the_dtype_in_which_frozen_parameters_lie(tmp_path, placement):
    there = holdfast.Placement(**placement)
    wide = train(tmp_path / "wide", rounded(torch.float32), range(STEPS), placement=there)
    narrow = train(tmp_path / "narrow", rounded(), range(STEPS), placement=there)
    assert narrow[0] == wide[0]
    assert differing(narrow[1], wide[1]) == []


def test_a_frozen_parameter_takes_two_bytes_on_the_ssd_and_two_of_a_pass(tmp_path):
    _, _, engine = train(tmp_path, rounded(), range(STEPS))
    assert len(frozen_files(tmp_path)) == 3
    atoms = read_atoms(tmp_path)
    frozen = [f"{name}/param" for name, p in rounded().named_parameters() if not p.requires_grad]
    assert {atoms[key].dtype for key in frozen} == {torch.bfloat16}
    assert (
        engine._plan.param_scratch_bytes == 0
    )  # the vectors, which are trained, are in the files of their state
    assert engine.last["read_bytes"] == engine.preflight.read_bytes_per_step


@pytest.mark.slow
def test_a_run_with_frozen_parameters_in_fp32_goes_on_in_their_own_dtype_and_back(tmp_path):
    losses, values, _ = train(tmp_path / "whole", rounded(), range(STEPS))
    found = train(tmp_path / "run", rounded(torch.float32), range(1))[0]
    assert [file.bytes > 20_000 for file in frozen_files(tmp_path / "run")] == [True] * 3
    found += train(tmp_path / "run", rounded(), range(1, 2))[0]
    narrow = [file.bytes for file in frozen_files(tmp_path / "run")]
    resumed = train(tmp_path / "run", rounded(torch.float32), range(2, STEPS))
    assert found + resumed[0] == losses
    assert differing(resumed[1], values) == []
    assert all(a > b for a, b in zip((file.bytes for file in frozen_files(tmp_path / "run")), narrow))


@pytest.mark.slow
def test_values_that_the_models_dtype_does_not_hold_are_refused(tmp_path):
    model = rounded(torch.float32)
    with torch.no_grad():
        model.blocks[1].mlp.up.weight[3, 3] = 1 + 2**-12
    train(tmp_path / "run", model, range(2))
    with pytest.raises(
        BadInput,
        match=r"blocks\.1\.mlp\.up\.weight is .* Build the model with this parameter in torch.float32",
    ):
        train(tmp_path / "run", rounded(), range(2, 3))
    with pytest.raises(BadInput, match=r"blocks\.1\.mlp\.up\.weight"):
        train(tmp_path / "other", rounded(), range(1), source=holdfast.From(tmp_path / "run"))
    _, values, _ = train(tmp_path / "run", rounded(torch.float32), range(2, 3))
    assert values["blocks.1.mlp.up.weight"][3, 3] == 1 + 2**-12


def test_frozen_parameters_in_an_order_of_their_own_have_the_same_bits(tmp_path):
    """A transposed matrix is stored in the order of its dims, and computes in its own."""

    def turned(dtype):
        model = rounded(dtype)
        weight = model.blocks[1].mlp.up.weight
        weight.data = weight.data.t().contiguous().t()
        return model

    wide = train(tmp_path / "wide", turned(torch.float32), range(2))
    narrow = train(tmp_path / "narrow", turned(torch.bfloat16), range(2))
    assert narrow[0] == wide[0]
    assert differing(narrow[1], wide[1]) == []


def test_frozen_values_are_read_from_the_newest_commit(tmp_path):
    model = rounded()
    expected = {name: value.float() for name, value in model.state_dict().items()}
    engine = holdfast.offload(model, adamw(model), tmp_path, precision="bf16")
    engine.step(batches(0, 1))
    engine.save()
    found = newest_values(engine._run, {"blocks.1.mlp.up.weight", "blocks.0.attention_norm.weight"})
    engine.close()
    assert found["blocks.1.mlp.up.weight"].dtype == torch.float32
    assert torch.equal(found["blocks.1.mlp.up.weight"], expected["blocks.1.mlp.up.weight"])
