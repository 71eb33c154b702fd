"""Under the engine a loss of many tokens is computed in chunks: bits, memory, and what is left whole."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import holdfast
from holdfast import token_chunks
from holdfast.errors import ModelNotSupported
from holdfast.models.decoder import Decoder, DecoderConfig
from holdfast.offload.model import chunked_head
from holdfast.offload.model.blocks import find_blocks
from holdfast.offload.model.chunked_head import ChunkedHead, PendingLogits
from holdfast.offload.setup.block_measurement import measure
from support.grouped import grouped
from training import adamw, batches, decoder, differing, same_bits, state_of, stored

transformers = pytest.importorskip("transformers")

VOCABULARY, ROWS, TOKENS, STEPS = 50, 3, 11, 3
SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": VOCABULARY, "max_position_embeddings": 512, "use_cache": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(token_chunks, "LOGITS_PER_CHUNK", 4 * VOCABULARY)


def llama(tied=False):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)).train()


def gemma2():
    """Its logits are divided, pass through tanh and are multiplied."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=0.5)
    return transformers.Gemma2ForCausalLM(config).train()


def granite():
    torch.manual_seed(0)
    return transformers.GraniteForCausalLM(transformers.GraniteConfig(**SIZES, logits_scaling=3.0)).train()


def micro_batch(step=0):
    """Tokens and labels, some of which do not count."""
    tokens = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(step))
    labels = tokens.clone()
    labels[0, :4] = -100
    return {"input_ids": tokens, "labels": labels}


def resident_loss(model, batch):
    """The loss of a causal model by the public function: as many rows as tokens, the last of which do not count."""
    hidden = model.model(input_ids=batch["input_ids"]).last_hidden_state
    targets = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    return holdfast.chunked_cross_entropy(hidden, model.lm_head.weight, targets)


def gradients(model, loss):
    return dict(
        zip(dict(model.named_parameters()), torch.autograd.grad(loss, model.parameters()), strict=True)
    )


def plain_loop(model, optimizer, step_batches, loss_of):
    losses = []
    for step in range(STEPS):
        total = 0.0
        for batch in step_batches(step):
            loss = loss_of(model, batch)
            (loss / len(step_batches(step))).backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / len(step_batches(step)))
    return losses, state_of(model, optimizer)


def test_a_decoder_in_chunks_has_the_bits_of_a_plain_loop(tmp_path):
    model = decoder(blocks=3)
    losses, state = plain_loop(
        model, adamw(model, fused=True), lambda step: batches(step, 2), lambda model, batch: model(**batch)
    )
    model = decoder(blocks=3)
    with holdfast.offload(model, adamw(model), tmp_path, **grouped(dtype="fp32")) as engine:
        assert [engine.step(batches(step, 2)) for step in range(STEPS)] == losses
    assert differing(stored(tmp_path), state) == []


@pytest.mark.parametrize("tied", [False, True])
def test_a_causal_model_has_the_bits_of_the_same_chunks(tmp_path, tied):
    model = llama(tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses, state = plain_loop(model, optimizer, lambda step: [micro_batch(step)], resident_loss)
    model = llama(tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with holdfast.offload(model, optimizer, tmp_path, **grouped(dtype="fp32")) as engine:
        assert [engine.step([micro_batch(step)]) for step in range(STEPS)] == losses
        assert "forward" not in vars(model.lm_head)
    assert differing(stored(tmp_path), state) == []


@pytest.mark.parametrize("make", [llama, gemma2, granite])
@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 7}, {"ignore_index": 3}], ids=str)
def test_a_models_own_loss_is_kept(make, options):
    model, batch = make(), micro_batch()
    batch["labels"][batch["labels"] == -100] = options.get("ignore_index", -100)
    whole = model(**batch, **options).loss
    head = ChunkedHead(model)
    with head.applied():
        loss = model(**batch, **options).loss
    assert "_WithGradients" in str(_nodes(loss)) and head.is_verified
    torch.testing.assert_close(loss, whole, rtol=1e-6, atol=0)
    expected = gradients(model, whole)
    for name, found in gradients(model, loss).items():
        assert (found - expected[name]).norm() <= 1e-6 * expected[name].norm(), name


def _nodes(loss):
    return [loss.grad_fn, *(each for each, _ in loss.grad_fn.next_functions)]


def test_one_chunk_leaves_the_model_as_it_is(monkeypatch):
    monkeypatch.setattr(token_chunks, "LOGITS_PER_CHUNK", ROWS * TOKENS * VOCABULARY)
    model = llama()
    whole = model(**micro_batch())
    with ChunkedHead(model).applied():
        found = model(**micro_batch())
    assert type(found.logits) is torch.Tensor
    assert same_bits(found.loss, whole.loss)


def test_evaluations_take_chunks_and_generation_does_not(tmp_path, monkeypatch):
    model, kinds, own = llama(), [], chunked_head.cross_entropy_of
    monkeypatch.setattr(chunked_head, "cross_entropy_of", lambda *args: kinds.append("loss") or own(*args))
    with torch.no_grad():
        expected = resident_loss(model, micro_batch()).item()
        token = model(micro_batch()["input_ids"][1:2]).logits[0, -1].argmax()
    optimizer = torch.optim.AdamW(model.parameters())
    with holdfast.offload(model, optimizer, tmp_path, **grouped(dtype="fp32")) as engine:
        assert engine.evaluate([micro_batch()]) == expected
        assert kinds
        kinds.clear()
        made = engine.generate(micro_batch()["input_ids"][1:2], 1, temperature=0)
        assert made[0, -1] == token and not kinds


def test_autocast_is_that_of_the_head():
    """Also where the loss, or another use of the logits, comes after the context."""
    model, batch = llama(), micro_batch()

    def computed():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(batch["input_ids"]).logits
        return F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten()), logits.amax(-1)

    expected = computed()
    with ChunkedHead(model).applied(), pytest.warns(UserWarning, match="amax needs them"):
        found = computed()
    assert expected[1].dtype == torch.bfloat16
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
    assert same_bits(found[1], expected[1])


def smoothed(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def weighted(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), torch.arange(1.0, VOCABULARY + 1))


def in_place(logits, labels):
    logits[..., 3] = -5.0
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def read_before(logits, labels):
    return (
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 1e-4 * logits.logsumexp(-1).square().mean()
    )


def read_after_a_view(logits, labels):
    flat = logits.flatten(0, 1)
    logits[..., 3] = -5.0
    return F.cross_entropy(flat, labels.flatten())


@pytest.mark.parametrize(
    ("loss_of", "name"),
    [
        (smoothed, "cross_entropy"),
        (weighted, "cross_entropy"),
        (in_place, "__setitem__"),
        (read_before, "logsumexp"),
        (read_after_a_view, "__setitem__"),
    ],
)
def test_other_uses_get_the_logits_whole(loss_of, name):
    model, batch = llama(), micro_batch()
    labels = batch["labels"]
    expected = loss_of(model(batch["input_ids"]).logits, labels)
    with pytest.warns(UserWarning, match=rf"computed whole.*{name} needs them"), ChunkedHead(model).applied():
        found = loss_of(model(batch["input_ids"]).logits, labels)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    wanted = gradients(model, expected)
    for key, grad in gradients(model, found).items():
        torch.testing.assert_close(grad, wanted[key], rtol=1e-5, atol=1e-8)


def test_a_change_in_place_of_what_was_copied_is_refused():
    model, batch = llama(), micro_batch()
    with ChunkedHead(model).applied(), pytest.warns(UserWarning, match="mul_ needs them"):
        logits = model(batch["input_ids"]).logits
        halved = logits / 2
        logits.mul_(3)
        with pytest.raises(ModelNotSupported, match="changes its logits in place"):
            halved.sum()


def test_a_shift_of_the_logits_is_noted():
    """Older models shift logits, not labels."""
    model, batch = llama(), micro_batch()

    def shifted(logits):
        targets = batch["labels"][:, 1:].flatten()
        return F.cross_entropy(logits[..., :-1, :].contiguous().float().view(-1, VOCABULARY), targets)

    expected = shifted(model(batch["input_ids"]).logits)
    with ChunkedHead(model).applied():
        found = shifted(model(batch["input_ids"]).logits)
    assert "_WithGradients" in str(found.grad_fn)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_slices_of_the_vocabulary_are_not_noted():
    model, batch = llama(), micro_batch()
    expected = model(batch["input_ids"]).logits[..., :20]
    with pytest.warns(UserWarning, match="__getitem__"), ChunkedHead(model).applied():
        found = model(batch["input_ids"]).logits[..., :20]
    assert same_bits(found, expected)


def as_without(loss_of):
    """The loss and the gradients under the patch are those without it."""
    model, batch = llama(), micro_batch()
    labels = batch["labels"] % VOCABULARY
    expected = loss_of(model(batch["input_ids"]).logits, labels)
    with warnings.catch_warnings(), ChunkedHead(model).applied():
        warnings.simplefilter("ignore", UserWarning)
        found = loss_of(model(batch["input_ids"]).logits, labels)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    wanted = gradients(model, expected)
    for key, grad in gradients(model, found).items():
        torch.testing.assert_close(grad, wanted[key], rtol=1e-5, atol=1e-8)


def cut_vocabulary(logits, labels):
    return F.cross_entropy(logits[:, :, :20, ...].flatten(0, 1), labels.flatten() % 20)


def under_no_grad(logits, labels):
    with torch.no_grad():
        halved = logits / 2
    return F.cross_entropy(halved.flatten(0, 1), labels.flatten()) + logits.mean()


def read_in_inference(logits, labels):
    with torch.inference_mode():
        (logits.argmax(-1) == labels).float().mean()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("loss_of", [cut_vocabulary, under_no_grad, read_in_inference])
def test_unusual_losses_are_as_without(loss_of):
    as_without(loss_of)


def test_a_copy_is_no_alias():
    model, batch = llama(), micro_batch()
    with warnings.catch_warnings(), ChunkedHead(model).applied():
        warnings.simplefilter("ignore", UserWarning)
        logits = model(batch["input_ids"]).logits
        copied = logits[:, :-1].contiguous()
        copied[..., 3] = -5.0
        assert (copied[..., 3] == -5.0).all() and (logits[:, :, 3] != -5.0).all()
        with pytest.raises(ModelNotSupported, match="changes its logits in place"):
            chosen = model(batch["input_ids"]).logits[:, :-1]
            flat = chosen.reshape(-1, VOCABULARY)
            chosen[..., 3] = 5.0
            flat.sum()


class Fused(torch.autograd.Function):
    """A cross entropy that computes its gradient by itself, as fused ones do."""

    @staticmethod
    def forward(ctx, logits, labels):
        with torch.enable_grad():
            inner = logits.detach().requires_grad_()
            loss = F.cross_entropy(inner.flatten(0, 1), labels.flatten())
            (ctx.grad,) = torch.autograd.grad(loss, inner)
        return loss.detach()

    @staticmethod
    def backward(ctx, grad):
        return ctx.grad * grad, None


def test_a_fused_loss_is_refused_instead_of_training_nothing():
    model, batch = llama(), micro_batch()
    with warnings.catch_warnings(), ChunkedHead(model).applied():
        warnings.simplefilter("ignore", UserWarning)
        with pytest.raises(ModelNotSupported, match="chunked_cross_entropy"):
            Fused.apply(model(batch["input_ids"]).logits, batch["labels"]).backward()


def test_hidden_states_that_change_after_the_head_are_refused():
    head = nn.Linear(8, VOCABULARY)
    model = nn.Module()
    model.get_output_embeddings = lambda: head
    hidden = torch.randn(ROWS, TOKENS, 8)
    with ChunkedHead(model).applied():
        logits = head(hidden)
        hidden.mul_(0)
        with pytest.raises(ModelNotSupported, match="input of its output head in place"):
            F.cross_entropy(logits.flatten(0, 1), torch.zeros(ROWS * TOKENS, dtype=torch.int64))


def test_a_bias_is_no_change_in_place():
    head = nn.Linear(8, VOCABULARY)
    model = nn.Module()
    model.get_output_embeddings = lambda: head
    hidden = torch.randn(ROWS, TOKENS, 8)[:, :-1]
    expected = (head(hidden) * 2.0).logsumexp(-1)
    with ChunkedHead(model).applied(), pytest.warns(UserWarning, match="logsumexp"):
        assert same_bits((head(hidden) * 2.0).logsumexp(-1), expected)


class OwnForward(transformers.LlamaForCausalLM):
    """A model with code of its own around its logits."""


@pytest.mark.parametrize("own", ["a forward", "a loss_fn"])
def test_code_of_the_users_own_gets_ordinary_logits(tmp_path, own):
    torch.manual_seed(0)
    model = OwnForward(transformers.LlamaConfig(**SIZES)).train() if own == "a forward" else llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_fn = None if own == "a forward" else lambda out, labels: Fused.apply(out.logits, labels)
    batch = micro_batch() if loss_fn is None else (micro_batch()["input_ids"], micro_batch()["labels"])
    with holdfast.offload(model, optimizer, tmp_path, **grouped(dtype="fp32")) as engine:
        first = engine.step([batch], loss_fn)
        assert engine.step([batch], loss_fn) < first


class Scaled(nn.Linear):
    def forward(self, hidden):
        return 2 * super().forward(hidden)


def test_a_head_that_is_not_linear_is_left_and_said(tmp_path):
    model = llama()
    model.lm_head = Scaled(16, VOCABULARY, bias=False)
    expected = model(**micro_batch()).loss.item()
    with holdfast.offload(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), tmp_path, **grouped(dtype="fp32")
    ) as engine:
        with pytest.warns(UserWarning, match="not a plain nn.Linear"):
            assert engine.step([micro_batch()]) == expected
        engine.step([micro_batch()])  # said once


def test_a_loss_that_differs_in_chunks_is_left_whole(monkeypatch):
    model = llama()
    expected = model(**micro_batch()).loss
    monkeypatch.setattr(chunked_head, "BOUNDS", {torch.float32: -1.0})
    head = ChunkedHead(model)
    with pytest.warns(UserWarning, match="in chunks the loss of 4 tokens is"), head.applied():
        assert same_bits(model(**micro_batch()).loss, expected)
    with head.applied():
        assert same_bits(model(**micro_batch()).loss, expected)


def wide_llama():
    config = transformers.LlamaConfig(**SIZES | {"vocab_size": 2000}, tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config), ("input_ids", "labels")


def wide_decoder():
    config = DecoderConfig(vocabulary=2000, blocks=2, width=16, heads=2, kv_heads=1, context=8)
    return Decoder(config), ("tokens", "targets")


@pytest.mark.parametrize("make", [wide_llama, wide_decoder])
@pytest.mark.slow
def test_predicted_memory_of_the_head_is_flat_in_tokens(make, monkeypatch):
    """Beyond the activations of a block and two hidden states, of 64 bytes each, for each token."""
    model, names = make()

    def head_bytes(rows):
        tokens = torch.zeros(rows, 8, dtype=torch.int64)
        found = measure(model, find_blocks(model), dict.fromkeys(names, tokens), torch.float32)
        return found.last_bytes - found.block_bytes

    def growth():
        return (head_bytes(100) - head_bytes(50)) / (50 * 8)

    monkeypatch.setattr(token_chunks, "LOGITS_PER_CHUNK", 64 * 2000)
    assert growth() <= 500
    monkeypatch.setattr(token_chunks, "LOGITS_PER_CHUNK", 10**9)
    assert growth() >= 2 * 4 * 2000


def test_pending_logits_have_a_shape_and_a_dtype():
    model = llama().bfloat16()
    with ChunkedHead(model).applied():
        logits = model(micro_batch()["input_ids"]).logits
    assert isinstance(logits, PendingLogits)
    assert (logits.shape, logits.dtype) == ((ROWS, TOKENS, VOCABULARY), torch.bfloat16)
    assert logits.float().view(-1, VOCABULARY).shape == (ROWS * TOKENS, VOCABULARY)
