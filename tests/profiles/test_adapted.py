"""Models under adapters: their linear layers, and what they store, read and compute."""

from dataclasses import replace

import pytest

from holdfast.profiles import BASES, AdaptedModel, load_model
from holdfast.profiles.profile_types import LinearLayer

LLAMA = replace(load_model("llama-3-70b"), sequence=2048, micro_batch=1)


def adapted(base="bf16", rank=16, model=LLAMA) -> AdaptedModel:
    return AdaptedModel(profile=model, rank=rank, base=BASES[base])


def test_llama_3_70b_has_seven_linear_layers_a_block():
    width, keys, hidden = 8192, 1024, 28672
    assert LLAMA.linear_layers == (
        (width, width), (width, keys), (width, keys), (width, width), (width, hidden), (width, hidden), (hidden, width)
    )  # fmt: skip


def test_fused_layers_are_fewer_and_have_as_many_weights():
    fused = replace(LLAMA, fused=True)
    assert fused.linear_layers == ((8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192))
    assert fused.block_parameters == LLAMA.block_parameters


def test_adapters_alone_are_trained():
    model = adapted()
    in_and_out = sum(layer.inputs + layer.outputs for layer in LLAMA.linear_layers)
    assert model.trained_block_parameters == 16 * in_and_out
    assert model.adapter_parameters == 80 * 16 * in_and_out == 207_093_760
    assert model.resident_parameters == 0
    assert model.parameters == LLAMA.parameters


@pytest.mark.parametrize(
    "base, nbytes",
    [
        ("bf16", 2 * 256 * 200),
        ("fp8", 256 * 200 + 4 * 2 * 2),  # tiles of 128 x 128
        ("int8", 256 * 200 + 4 * 200),
        ("nf4", 256 * 200 // 2 + 800 + 4 * 4),  # 800 scales, in groups of 256
    ],
)
def test_a_layer_takes_its_weights_and_scales(base, nbytes):
    assert BASES[base].layer_bytes(LinearLayer(256, 200)) == nbytes


def test_nf4_has_4_127_bits_a_weight():
    assert adapted("nf4").weight_bits == pytest.approx(4.127, abs=1e-4)
    assert adapted("bf16").weight_bits == 16


def test_norms_and_biases_are_stored_in_16_bits():
    assert adapted("bf16").frozen_block_bytes == 2 * LLAMA.block_parameters
    assert adapted("nf4").frozen_block_bytes - adapted("nf4").linear_bytes == 2 * 2 * 8192
    gpt = load_model("gpt2")
    model = adapted("int8", model=gpt)
    assert model.frozen_block_bytes - model.linear_bytes == 2 * (gpt.block_parameters - 12 * 768**2)


def test_embedding_and_head_are_stored_in_16_bits():
    assert adapted("nf4").frozen_resident_bytes == 2 * LLAMA.resident_parameters


def test_frozen_layers_have_no_gradients_to_compute():
    model, tokens = adapted(), 2048
    products = 2.0 * LLAMA.block_parameters * tokens
    adapters = 2.0 * model.trained_block_parameters * tokens
    attention = LLAMA.forward_flop - products
    assert model.forward_flop == pytest.approx(products + adapters + attention)
    assert model.backward_flop == pytest.approx(2 * products + 3 * (adapters + attention))
    assert model.head_flop == pytest.approx(4 * 128256 * 8192 * tokens)


def test_one_weight_is_unpacked_at_a_time():
    saved = {base: adapted(base).workspace_bytes(2) for base in BASES}
    largest = 2 * 8192 * 28672
    assert {saved[base] - saved["bf16"] for base in ("fp8", "int8", "nf4")} == {largest}


def test_a_frozen_head_has_no_sum_of_gradients():
    assert adapted().workspace_bytes(2) == 34 * 2048 * 8192 + 2 * 2048 * 16 * 7 + (2 * 261 + 16 * 65) * 128256
