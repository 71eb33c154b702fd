"""The reference decoder against ten-line references, on the meta device, and in bf16."""

import math

import pytest
import torch
from torch import nn

from holdfast.errors import BadInput
from holdfast.models.decoder import Decoder, DecoderConfig, rotary_table, rotate

TINY = DecoderConfig(vocabulary=17, blocks=3, width=32, heads=4, kv_heads=2, context=12)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Decoder(TINY)


def tokens(batch=2, length=12, seed=1):
    return torch.randint(0, 17, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_logits_are_fp32_and_the_loss_is_their_cross_entropy(model):
    logits = model(tokens())
    assert logits.shape == (2, 12, 17)
    assert logits.dtype == torch.float32
    expected = -logits.log_softmax(-1).gather(2, tokens(seed=2)[..., None]).mean()
    torch.testing.assert_close(model(tokens(), tokens(seed=2)), expected)


def test_an_untrained_model_is_as_uncertain_as_its_vocabulary_is_large(model):
    assert abs(model(tokens(8), tokens(8, seed=2)).item() - math.log(17)) < 0.1


@pytest.mark.parametrize("position", [0, 5, 11])
def test_a_token_changes_nothing_before_it(model, position):
    changed = tokens()
    changed[:, position] = (changed[:, position] + 1) % 17
    before, after = model(tokens()), model(changed)
    torch.testing.assert_close(before[:, :position], after[:, :position])
    assert not torch.allclose(before[:, position], after[:, position])


def test_attention_equals_softmax_written_out_with_repeated_key_heads(model):
    attention = model.blocks[0].attention
    x = torch.randn(2, 12, 32)
    q = rotate(attention.query(x).view(2, 12, 4, 8).transpose(1, 2), model.cos, model.sin)
    k = rotate(attention.key(x).view(2, 12, 2, 8).transpose(1, 2), model.cos, model.sin)
    v = attention.value(x).view(2, 12, 2, 8).transpose(1, 2)
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    scores = (q @ k.transpose(2, 3) / 8**0.5).masked_fill(torch.ones(12, 12).triu(1).bool(), -math.inf)
    expected = attention.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 12, 32))
    torch.testing.assert_close(attention(x, model.cos, model.sin), expected)


def test_rotated_products_depend_on_the_distance_only():
    cos, sin = rotary_table(20, 8, 10000.0)
    q, k = torch.randn(2, 1, 1, 1, 8).expand(2, 1, 1, 20, 8)
    products = (rotate(q, cos, sin) @ rotate(k, cos, sin).transpose(2, 3))[0, 0]
    for distance in range(20):
        diagonal = products.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_rotating_position_zero_changes_nothing():
    cos, sin = rotary_table(1, 8, 10000.0)
    x = torch.randn(1, 1, 1, 8)
    assert torch.equal(rotate(x, cos, sin), x)


def test_on_meta_the_parameters_are_empty_and_the_table_is_real():
    with torch.device("meta"):
        model = Decoder(TINY)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(model.cos, rotary_table(12, 8, 10000.0)[0])
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_blocks_made_one_by_one_equal_the_whole_model_made_at_once(model):
    with torch.device("meta"):
        apart = Decoder(TINY)
    apart.to_empty(device="cpu")
    apart.cos, apart.sin = model.cos, model.sin
    for part in (apart, model):
        torch.manual_seed(3)
        for module in part.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    for name, parameter in model.state_dict().items():
        assert torch.equal(parameter, apart.state_dict()[name]), name


def test_initial_spreads_are_those_documented():
    torch.manual_seed(0)
    block = Decoder(DecoderConfig(blocks=8, width=256, heads=8, kv_heads=4)).blocks[0]
    assert block.attention.query.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.attention.out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert torch.equal(block.mlp_norm.weight, torch.ones(256))


def test_bf16_parameters_give_an_fp32_loss_near_the_fp32_one(model):
    expected = model(tokens(), tokens(seed=2))
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    loss = model(tokens(), tokens(seed=2))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=0, atol=0.02)
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in model.parameters())


def test_dropout_acts_in_training_only():
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(vocabulary=17, blocks=2, width=32, heads=4, kv_heads=2, dropout=0.5))
    assert not torch.equal(model(tokens()), model(tokens()))
    model.eval()
    assert torch.equal(model(tokens()), model(tokens()))


def test_every_parameter_is_a_matrix_or_a_norm(model):
    """The optimizer's two groups are told apart by dimension."""
    vectors = {name for name, p in model.named_parameters() if p.dim() < 2}
    norms = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.RMSNorm)}
    assert vectors == norms


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ({"width": 100}, "a width of 100 does not divide into 8 heads of even size"),
        ({"kv_heads": 3}, "8 heads cannot share 3 key/value heads evenly"),
        ({"blocks": 0}, "blocks = 0: it must be at least 1"),
    ],
)
def test_impossible_sizes_are_refused(sizes, expected):
    with pytest.raises(BadInput, match=expected):
        DecoderConfig(**sizes)


def test_more_tokens_than_the_context_are_refused(model):
    with pytest.raises(BadInput, match="13 tokens in a sequence; the model's context is 12"):
        model(tokens(length=13))


@pytest.mark.parametrize("width, hidden", [(24, 64), (192, 512), (256, 704), (512, 1408)])
def test_the_mlp_is_eight_thirds_wide_rounded_up(width, hidden):
    assert DecoderConfig(width=width, heads=4, kv_heads=4).hidden_width == hidden
