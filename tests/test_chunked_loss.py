"""A head's loss in chunks of tokens, against the whole loss and against a plain loop over the same chunks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import holdfast
from holdfast import chunked_loss, token_chunks
from holdfast.chunked_loss import COLLECTOR, PartCollector
from holdfast.errors import BadInput
from holdfast.models.decoder import Decoder, DecoderConfig
from training import same_bits

ROWS, TOKENS, WIDTH, VOCABULARY = 3, 11, 16, 50
CHUNK = 4
"""Tokens of a chunk where a test makes chunks small; the last of 33 tokens is alone."""


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(token_chunks, "LOGITS_PER_CHUNK", CHUNK * VOCABULARY)
    monkeypatch.setattr(token_chunks, "LOGITS_AT_ONCE", 3 * VOCABULARY)  # changes no bit


@pytest.fixture
def small_tiles(small_chunks, monkeypatch):
    """Three tiles of 16 words, and one of two."""
    monkeypatch.setattr(token_chunks, "WORDS_PER_TILE", 16)


def example(dtype=torch.float32):
    """Hidden states, weight and bias that require gradients, and targets, some of which do not count."""
    generator = torch.Generator().manual_seed(0)
    shapes = (ROWS, TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,)
    tensors = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    targets = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator)
    targets[0, :6] = -100
    return (*tensors, targets)


def whole(hidden, weight, bias, targets, **options):
    logits = F.linear(hidden, weight, bias).float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), **options)


def chunked(hidden, weight, bias, targets, **options):
    return holdfast.chunked_cross_entropy(hidden, weight, targets, bias=bias, **options)


def plain_loop(hidden, weight, bias, targets, reduction, factor):
    """The loss, and its gradients times ``factor``: chunk by chunk, summed in fp32."""
    hidden, targets = hidden.detach().flatten(0, 1), targets.flatten()
    share = 1.0 if reduction == "sum" else 1.0 / (targets != -100).sum()
    loss, by_token = torch.zeros(()), []
    sums = [torch.zeros(weight.shape), torch.zeros(bias.shape)]
    for part, aims in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True):
        part.requires_grad_()
        each = F.cross_entropy(F.linear(part, weight, bias).float(), aims, reduction="sum")
        grads = torch.autograd.grad(each * share, [part, weight, bias])
        loss = loss + each.detach()
        by_token.append(grads[0])
        sums = [total + grad.float() for total, grad in zip(sums, grads[1:], strict=True)]
    made = [torch.cat(by_token).view(ROWS, TOKENS, WIDTH), *sums]
    loss = loss if reduction == "sum" else loss / (targets != -100).sum()
    return [loss, *((each * factor).to(weight.dtype) for each in made)]


def loss_and_gradients(function, dtype=torch.float32, factor=1.0, **options):
    *tensors, targets = example(dtype)
    loss = function(*tensors, targets, **options)
    return [loss.detach(), *torch.autograd.grad(loss * factor, tensors)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_chunk_has_the_bits_of_the_whole(dtype, reduction):
    found = loss_and_gradients(chunked, dtype, 0.3, reduction=reduction)
    expected = loss_and_gradients(whole, dtype, 0.3, reduction=reduction)
    assert all(map(same_bits, found, expected))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_chunks_are_close_to_the_whole(small_chunks, reduction):
    found = loss_and_gradients(chunked, reduction=reduction)
    for one, other in zip(found, loss_and_gradients(whole, reduction=reduction), strict=True):
        assert (one - other).norm() <= 1e-6 * other.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_chunks_have_the_bits_of_a_plain_loop(small_chunks, dtype, reduction):
    found = loss_and_gradients(chunked, dtype, 0.3, reduction=reduction)
    factor = torch.tensor(0.3)
    assert all(map(same_bits, found, plain_loop(*example(dtype), reduction, factor)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_have_the_bits_of_a_plain_loop(small_tiles, dtype):
    hidden, weight, bias, targets = example(dtype)
    found = chunked(hidden, weight, bias, targets, reduction="sum")
    loss, by_token, by_word = torch.zeros(()), [], torch.zeros(weight.shape)
    for part, aims in zip(
        hidden.detach().flatten(0, 1).split(CHUNK), targets.flatten().split(CHUNK), strict=True
    ):
        tiles = zip(weight.detach().split(16), bias.detach().split(16), strict=True)
        out = torch.cat([F.linear(part, *tile) for tile in tiles], 1).requires_grad_()
        each = F.cross_entropy(out.float(), aims, reduction="sum")
        (grad,) = torch.autograd.grad(each, [out])
        loss, by_token = loss + each.detach(), [*by_token, grad.mm(weight.detach())]
        by_word += torch.cat([words.contiguous().t().mm(part) for words in grad.split(16, 1)])
    expected = [loss, torch.cat(by_token).view(hidden.shape), by_word.to(dtype)]
    assert all(map(same_bits, [found.detach(), *torch.autograd.grad(found, [hidden, weight])], expected))


def collected(weight, function):
    """What ``function`` returns with a collector on ``weight``, and the gradients that the collector got."""
    parts = []
    setattr(weight, COLLECTOR, PartCollector(parts.extend))
    try:
        return function(), parts
    finally:
        delattr(weight, COLLECTOR)


@pytest.mark.campaign(cover=2)
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"softcap": 2.0, "logit_scale": 0.5}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 1e3, "all ignored", "autocast"])
def test_a_collector_gets_the_bits_of_the_whole_gradient(small_tiles, dtype, options, size):
    hidden, weight, bias, targets = example(dtype)
    if size == "all ignored":
        targets.fill_(-100)
    large = hidden.detach() * (size if isinstance(size, float) else 1.0)

    def run():
        inputs = [large.clone().requires_grad_(), weight, bias]
        with torch.autocast("cpu", torch.bfloat16, enabled=size == "autocast"):
            loss = chunked(*inputs, targets, **options)
        weight.grad = bias.grad = None
        (loss * 0.3).backward()
        return [loss.detach(), *(each.grad for each in inputs)]

    (loss, by_token, none, of_bias), parts = collected(weight, run)
    assert none is None and [rows.start for (rows, _), _ in parts] == [0, 16, 32, 48]
    found = [loss, by_token, torch.cat([grad for _, grad in parts]), of_bias]
    for one, other in zip(found, run(), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_a_weight_of_two_losses_gets_its_gradient_from_autograd(small_tiles):
    hidden, weight, bias, targets = example(torch.bfloat16)

    def twice():
        loss = chunked(hidden, weight, bias, targets) + chunked(hidden * 2, weight, None, targets)
        return gradient_of_weight(loss, weight)

    (first, then, alone), parts = collected(weight, lambda: (twice(), twice(), loss_of_weight(weight)))
    assert same_bits(first, twice()) and same_bits(then, first)
    assert alone is None and len(parts) == 4


def loss_of_weight(weight):
    hidden, _, bias, targets = example(weight.dtype)
    return gradient_of_weight(chunked(hidden, weight, bias, targets), weight)


def gradient_of_weight(loss, weight):
    """What a backward pass of ``loss`` gives ``weight``, None where a collector gets it."""
    weight.grad = None
    loss.backward()
    return weight.grad


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_checkpoint_around_chunks_changes_no_bit(small_tiles, dtype, reentrant):
    hidden, weight, bias, targets = example(dtype)
    expected = loss_of_weight(weight)

    def loss(hidden):
        return chunked(hidden, weight, bias, targets)

    def run(times=1):
        losses = [checkpoint(loss, hidden, use_reentrant=reentrant) for _ in range(times)]
        return gradient_of_weight(sum(losses), weight)

    assert same_bits(run(), expected)
    (alone, twice), parts = collected(weight, lambda: (run(), run(2)))
    assert alone is None and same_bits(torch.cat([grad for _, grad in parts[:4]]), expected)
    # two uses: autograd sums them, or each has a backward pass of its own
    found = [twice] if not reentrant else [sum(torch.cat([g for _, g in parts[n : n + 4]]) for n in (4, 8))]
    assert len(parts) == (12 if reentrant else 4) and same_bits(found[0], run(2))


def test_a_backward_pass_for_others_collects_nothing(small_tiles):
    hidden, weight, bias, targets = example(torch.bfloat16)
    expected = loss_of_weight(weight)

    def run():
        loss = chunked(hidden, weight, bias, targets)
        torch.autograd.grad(loss, [hidden], retain_graph=True)
        loss.backward(inputs=[hidden], retain_graph=True)
        (asked,) = torch.autograd.grad(loss, [weight], retain_graph=True)
        return asked, gradient_of_weight(loss, weight)

    (asked, left), parts = collected(weight, run)
    assert same_bits(asked, expected) and left is None
    assert len(parts) == 4 and same_bits(torch.cat([grad for _, grad in parts]), expected)


def test_fp16_gradients_do_not_underflow(small_chunks):
    """The loss's own gradient, in which a loss scale is, comes before the rounding to fp16."""

    def small(function):
        return lambda hidden, weight, bias, targets: function(hidden, weight * 1e-4, bias, targets)

    found = loss_and_gradients(small(chunked), torch.float16, factor=2.0**16)[1]
    expected = loss_and_gradients(small(whole), torch.float16, factor=2.0**16)[1]
    assert (found - expected).norm() <= 1e-3 * expected.norm()


def test_autocast_computes_in_its_dtype(small_chunks):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = loss_and_gradients(chunked)
    assert found[2].dtype == torch.float32
    assert not same_bits(found[2], found[2].bfloat16().float())  # the sum was not rounded
    *tensors, targets = example()
    low = chunked(*(each.detach().bfloat16() for each in tensors), targets)
    assert same_bits(found[0], low)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_without_gradients_only_the_loss_is_computed(small_chunks, monkeypatch, reduction):
    expected = loss_and_gradients(chunked, reduction=reduction)[0]
    monkeypatch.setattr(torch.autograd, "grad", None)
    with torch.no_grad():
        assert same_bits(chunked(*example(), reduction=reduction), expected)


def test_a_frozen_weight_gets_no_gradient(small_chunks, monkeypatch):
    hidden, weight, bias, targets = example()
    (expected,) = torch.autograd.grad(chunked(hidden, weight, bias, targets), [hidden])
    monkeypatch.setattr(chunked_loss, "_add", None)  # by which all of its gradients are summed
    loss = chunked(hidden, weight.detach(), bias.detach(), targets)
    assert same_bits(torch.autograd.grad(loss, [hidden])[0], expected)


def test_targets_that_all_do_not_count_give_nan(small_chunks):
    hidden, weight, bias, targets = example()
    loss = chunked(hidden, weight, bias, targets.fill_(-100))
    assert loss.isnan()
    assert not torch.autograd.grad(loss, [hidden])[0].any()
    assert chunked(hidden, weight, bias, targets, reduction="sum") == 0


def test_scale_and_softcap_are_applied(small_chunks):
    hidden, weight, bias, targets = example()
    found = chunked(hidden, weight, bias, targets, logit_scale=0.5, softcap=2.0)
    logits = 2.0 * torch.tanh(F.linear(hidden, weight, bias) * 0.5 / 2.0)
    torch.testing.assert_close(found, F.cross_entropy(logits.flatten(0, 1), targets.flatten()))


@pytest.mark.parametrize(
    "change",
    [
        {"reduction": "none"},
        {"targets": torch.zeros(ROWS, TOKENS - 1, dtype=torch.int64)},
        {"targets": torch.zeros(ROWS, TOKENS, dtype=torch.int32)},
        {"weight": torch.zeros(VOCABULARY, WIDTH + 1)},
        {"weight": torch.zeros(VOCABULARY, WIDTH, dtype=torch.bfloat16)},
        {"bias": torch.zeros(VOCABULARY - 1)},
    ],
)
def test_arguments_that_do_not_fit_are_refused(change):
    hidden, weight, bias, targets = example()
    given = {"hidden": hidden, "weight": weight, "targets": targets, "bias": bias} | change
    with pytest.raises(BadInput):
        holdfast.chunked_cross_entropy(**given)


def test_a_target_out_of_range_is_torchs_error(small_chunks):
    *tensors, targets = example()
    targets[2, 3] = VOCABULARY
    with pytest.raises(IndexError, match=f"Target {VOCABULARY} is out of bounds"):
        chunked(*tensors, targets)


def test_fake_tensors_pass_through(small_chunks):
    with FakeTensorMode(allow_non_fake_inputs=True):
        hidden = torch.empty(ROWS, TOKENS, WIDTH, requires_grad=True)
        weight = torch.empty(VOCABULARY, WIDTH, requires_grad=True)
        loss = chunked(hidden, weight, None, torch.zeros(ROWS, TOKENS, dtype=torch.int64))
        loss.backward()
    assert weight.grad.shape == weight.shape


def test_a_decoder_takes_chunks(small_chunks):
    config = DecoderConfig(vocabulary=VOCABULARY, blocks=1, width=WIDTH, heads=2, kv_heads=1, context=TOKENS)
    model, (_, _, _, targets) = Decoder(config), example()
    tokens = targets.clamp(min=0)
    loss = model(tokens, targets)
    assert type(loss.grad_fn).__name__ == "_WithGradientsBackward"
    torch.testing.assert_close(
        loss, whole(model.norm(_last(model, tokens)), model.head.weight, None, targets)
    )


def _last(model, tokens):
    return model.blocks[0](model.embed(tokens), model.cos[:TOKENS], model.sin[:TOKENS])


def test_a_head_with_a_hook_is_called(small_chunks):
    config = DecoderConfig(vocabulary=VOCABULARY, blocks=1, width=WIDTH, heads=2, kv_heads=1, context=TOKENS)
    model, (_, _, _, targets) = Decoder(config), example()
    model.head.register_forward_hook(lambda module, args, out: out * 0)
    assert model(targets.clamp(min=0), targets).item() == pytest.approx(torch.tensor(50.0).log().item())
