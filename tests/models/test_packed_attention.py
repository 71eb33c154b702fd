"""Attention of packed rows: each sample has the result that it has alone, and no kernel is given a larger mask."""

from __future__ import annotations

import pytest
import torch

from holdfast.data.packing import packed_batch
from holdfast.models.packed_attention import BySample, attend_by_sample, diagonal_blocks

transformers = pytest.importorskip("transformers")
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402  (needs transformers)

LENGTHS = [[5, 9, 1, 8], [7, 4, 9]]


@pytest.fixture
def whole():
    """The attention of transformers as it is; that by samples is in its place."""
    kept = ALL_ATTENTION_FUNCTIONS["sdpa"]
    attend_by_sample()
    attend_by_sample()
    yield kept
    ALL_ATTENTION_FUNCTIONS.register("sdpa", kept)


@pytest.fixture
def seen(monkeypatch):
    """The tokens and masks of all calls of the kernel."""
    calls, kernel = [], torch.nn.functional.scaled_dot_product_attention

    def spy(query, *rest, attn_mask=None, **options):
        calls.append((query.shape[2], attn_mask is not None))
        return kernel(query, *rest, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    return calls


def model_of(kind="Llama", **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=50, max_position_embeddings=64, attn_implementation="sdpa", use_cache=False, **options,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def rows_of(lengths=LENGTHS):
    chance = torch.Generator().manual_seed(1)
    made = [[torch.randint(1, 50, (n,), generator=chance) for n in row] for row in lengths]
    return [[{"input_ids": ids, "labels": ids} for ids in row] for row in made]


def outcome(model, batch):
    """Logits, and the gradients of their squares."""
    model.zero_grad()
    logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    logits.square().mean().backward()
    return [logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def test_samples_have_the_result_that_they_have_alone(whole, seen):
    model, rows = model_of(), rows_of()
    batch = packed_batch(rows, 0)
    with torch.no_grad():
        packed = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        calls, seen[:] = list(seen), []
        for row, logits in zip(rows, packed, strict=True):
            begin = 0
            for sample in row:
                end = begin + len(sample["input_ids"])
                alone = model(input_ids=sample["input_ids"][None]).logits[0]
                # products of other shapes may round otherwise
                assert torch.allclose(logits[begin:end], alone, atol=1e-6, rtol=0)
                begin = end
    padding = sum(LENGTHS[0]) - sum(LENGTHS[1])
    assert calls == [(n, False) for n in [*LENGTHS[0], *LENGTHS[1], padding]] * 2, (
        "no mask, and no larger one"
    )


@pytest.mark.parametrize(("kind", "options"), [("Llama", {}), ("Mistral", {"sliding_window": 4})])
def test_gradients_are_those_of_the_whole_mask(whole, seen, kind, options):
    model, batch = model_of(kind, **options), packed_batch(rows_of(), 0)
    found = outcome(model, batch)
    assert max(tokens for tokens, _ in seen) == max(map(max, LENGTHS))
    assert any(masked for _, masked in seen) == bool(options), "a window is a mask within its sample"
    ALL_ATTENTION_FUNCTIONS.register("sdpa", whole)
    for got, wanted in zip(found, outcome(model, batch), strict=True):
        assert torch.allclose(got, wanted, atol=1e-6, rtol=1e-5)


def test_rows_of_several_masks_each_have_their_own_blocks(whole, seen):
    """One mask for all rows, one for each, and one that is written again in the same memory."""
    query = torch.randn(4, 2, 6, 8)
    first = torch.block_diag(torch.ones(2, 2), torch.ones(4, 4)).bool()[None, None]
    second = torch.block_diag(torch.ones(5, 5), torch.ones(1, 1)).bool()[None, None]
    module = torch.nn.Module()
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    four = torch.cat([first, second, second, first])
    for mask in (first, four):
        got, wanted = (each(module, query, query, query, mask)[0] for each in (attend, whole))
        assert torch.allclose(got, wanted, atol=1e-6)
    seen.clear()
    attend(module, query, query, query, four)
    assert [tokens for tokens, _ in seen] == [2, 4, 5, 1, 5, 1, 2, 4]
    four.copy_(second)
    got, wanted = (each(module, query, query, query, four)[0] for each in (attend, whole))
    assert torch.allclose(got, wanted, atol=1e-6)


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(torch.ones(1, 1, 6, 6).tril().bool(), id="one block"),
        pytest.param(torch.zeros(1, 1, 6, 6), id="numbers that are added"),
        pytest.param(torch.eye(6).bool().expand(1, 2, 6, 6), id="a mask for each head"),
        pytest.param(torch.eye(6).bool()[None, None].to("meta"), id="no values"),
        pytest.param(None, id="none"),
    ],
)
def test_other_masks_are_left_whole(mask):
    given = []
    attend = BySample(lambda module, *tensors, **options: given.append((tensors, options)))
    query = torch.randn(1, 2, 6, 8)
    attend(torch.nn.Module(), query, query, query, mask, scaling=2.0)
    [(tensors, options)] = given
    assert tensors[0] is query and tensors[3] is mask and options == {"scaling": 2.0}


def test_evaluation_without_version_counters_is_computed_whole(whole, seen):
    model, batch = model_of().eval(), packed_batch(rows_of(), 0)
    del batch["labels"]
    with torch.no_grad():
        wanted = model(**batch).logits
    seen.clear()
    with torch.inference_mode():
        assert torch.allclose(model(**batch).logits, wanted, atol=1e-6)
    assert all(masked for _, masked in seen)


@pytest.mark.parametrize("option", ["position_bias", "cache"])
def test_what_a_call_of_each_block_would_do_otherwise_is_left_whole(option):
    given = []
    attend = BySample(lambda module, *tensors, **options: given.append((tensors, options)))
    query, mask = torch.randn(1, 2, 6, 8), torch.eye(6).bool()[None, None]
    attend(torch.nn.Module(), query, query, query, mask, **{option: query})
    [(tensors, options)] = given
    assert tensors[0] is query and options[option] is query


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_attended_to_outside_of_a_block(seed):
    """On masks of any kind: blocks cover all that is True, and cannot be divided."""
    chance = torch.Generator().manual_seed(seed)
    for _ in range(30):
        mask = torch.zeros(9, 9).bool()
        begin = 0
        while begin < 9:
            size = int(torch.randint(1, 10 - begin, (), generator=chance))
            mask[begin : begin + size, begin : begin + size] = torch.rand(size, size, generator=chance) < 0.5
            begin += size
        if chance.initial_seed() % 2:
            mask |= torch.eye(9).bool()
        blocks = diagonal_blocks(mask)
        inside = torch.block_diag(*(torch.ones(end - begin, end - begin) for begin, end, _ in blocks)).bool()
        assert inside.shape == mask.shape and not (mask & ~inside).any()
        rows = mask.any(1)
        for begin, end, _ in blocks:
            for cut in range(begin + 1, end):
                joined = mask[cut:end, begin:cut].any() or mask[begin:cut, cut:end].any()
                assert joined or not rows.all(), (mask.int(), blocks)
