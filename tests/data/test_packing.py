"""Several samples in one row: each once, apart from the others, by any division of a step; mixtures are seen."""

from __future__ import annotations

import json

import pytest
import torch

from holdfast.data.packing import PackedLoader, packed_batch, packed_rows, packing_fault, takes_positions
from holdfast.data.tokens import IGNORED, encoded

transformers = pytest.importorskip("transformers")

import tiny_folders  # noqa: E402  (needs transformers)

PAD = 319


class Bytes:
    begin, end, pad, digest = [256], [257], PAD, "bytes"

    def encode_with_ends(self, texts):
        return [(list(text.encode()), list(range(1, len(text) + 1))) for text in texts]


@pytest.fixture
def text(tmp_path):
    """Pairs of 4 to 20 tokens."""
    lines = [{"prompt": f"{n}", "completion": chr(97 + n) * (1 + n * 7 % 17)} for n in range(25)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return encoded(str(tmp_path / "pairs.jsonl"), Bytes(), tmp_path / "kept", context=32)


def rows_of(batches):
    """The samples in the rows of micro-batches, as their ids."""
    found = []
    for batch in batches:
        for ids, positions in zip(batch["input_ids"].tolist(), batch["position_ids"].tolist(), strict=True):
            row = []
            for each, position in zip(ids, positions, strict=True):
                if position == 0:
                    row.append([])
                row[-1].append(each)
            found.append([each for each in row if each[0] != PAD])
    return found


def test_each_sample_is_in_one_row(text):
    loader = PackedLoader(text, 2, 3, seed=5)
    seen = []
    while loader.consumed < 100:
        rows = rows_of(next(loader))
        assert len(rows) == 6 and all(0 < sum(map(len, row)) <= 32 for row in rows)
        seen += [tuple(sample) for row in rows for sample in row]
    assert len(seen) == loader.consumed
    once = {tuple(text.training[n]["input_ids"].tolist()) for n in range(25)}
    assert all(seen[:100].count(sample) >= 1 for sample in once) and set(seen) == once


def test_rows_are_nearly_full(text):
    loader = PackedLoader(text, 4, 4)
    batches = next(loader)
    real = sum(int((batch["input_ids"] != PAD).sum()) for batch in batches)
    assert real > 0.85 * 16 * 32


@pytest.mark.parametrize(("size", "count", "world"), [(1, 12, 1), (3, 2, 2), (2, 2, 3), (4, 1, 3)])
def test_ranks_and_micro_batches_share_the_same_rows(text, size, count, world):
    whole = PackedLoader(text, 6, 2, seed=1)
    shares = [PackedLoader(text, size, count, seed=1, rank=rank, world_size=world) for rank in range(world)]
    for _ in range(3):
        found = [row for share in shares for row in rows_of(next(share))]
        assert found == rows_of(next(whole))
        assert {share.consumed for share in shares} == {whole.consumed}


def test_position_continues_packed_and_sorted(text):
    """Also where a run changes from one to the other, and back."""
    first = PackedLoader(text, 2, 2, seed=3)
    next(first)
    state = first.state_dict()
    again = PackedLoader(text, 2, 2)
    again.load_state_dict(state)
    assert rows_of(next(again)) == rows_of(next(first))
    plain = PackedLoader(text, 2, 2, packs=False)
    plain.load_state_dict(state)
    batches = next(plain)
    assert plain.consumed == state["consumed"] + 4
    lengths = [int(each) for batch in batches for each in batch["attention_mask"].sum(1)]
    assert lengths == sorted(lengths) and len(lengths) == 4


def test_first_tokens_are_no_targets(text):
    row = [text.training[0] | {"labels": text.training[0]["input_ids"]}, text.training[1]]
    batch = packed_batch([row, row[:1]], PAD)
    first, second = (len(sample["labels"]) for sample in row)
    assert "attention_mask" not in batch
    assert batch["position_ids"].tolist() == [
        [*range(first), *range(second)],
        [*range(first), *range(second)],
    ]
    assert batch["labels"][:, [0, first]].tolist() == [[IGNORED] * 2] * 2
    assert batch["labels"][0, 1:first].tolist() == row[0]["labels"][1:].tolist()
    assert batch["labels"][1, first:].tolist() == [IGNORED] * second
    assert row[0]["labels"][0] != IGNORED, "the sample stays as it is"


def test_step_ends_before_the_first_sample_without_room():
    assert packed_rows(lambda n: 3, 7, 2, 7) == ([[7, 8], [9, 10]], 4)


def losses(model, batch):
    """The loss of each target, in the order of the batch's samples."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    with torch.no_grad():
        logits = model(**inputs).logits[:, :-1]
    wanted = batch["labels"][:, 1:]
    found = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
    return found[wanted.flatten() != IGNORED]


@pytest.mark.parametrize("make", tiny_folders.EVERY.values(), ids=tiny_folders.EVERY)
def test_every_token_has_its_unpacked_loss(text, make):
    torch.manual_seed(0)
    model = make().eval()
    model.config.use_cache = (
        False  # as the engine sets it: with a cache, transformers does not look at positions
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # so that a mixture shows
    rows = [[text.training[n] for n in row] for row in ([0, 1, 2], [3, 4], [5])]
    packed = losses(model, packed_batch(rows, PAD))
    alone = losses(model, text.stack([sample for row in rows for sample in row]))
    torch.testing.assert_close(packed, alone, rtol=2e-5, atol=2e-5)
    assert len(packed) == sum(int((sample["labels"] != IGNORED).sum()) for row in rows for sample in row)


class Mixing(torch.nn.Module):
    """A model that takes positions and does not heed all of them."""

    def __init__(self, model, heeded):
        super().__init__()
        self.model, self.heeded = model, heeded

    def forward(self, input_ids, labels, position_ids=None, attention_mask=None):
        mask = attention_mask
        if position_ids is not None and self.heeded == "positions":
            mask = torch.ones_like(input_ids)  # with a mask, transformers does not look at them for attention
        elif position_ids is not None and self.heeded == "one row" and len(input_ids) > 1:
            mask = torch.ones_like(input_ids)  # as with flash attention of transformers
        elif position_ids is not None and self.heeded == "attention":
            edges = (position_ids[:, :, None] == 0).cumsum(1).transpose(1, 2)
            same = edges == edges.transpose(1, 2)
            mask = (same & torch.ones(same.shape[-2:]).tril().bool())[:, None]
            position_ids = torch.arange(input_ids.shape[1])[None]
        return self.model(input_ids=input_ids, labels=labels, position_ids=position_ids, attention_mask=mask)


def fault(text, model, num_rows=1):
    def loss_of(batch):
        with torch.no_grad():
            return float(model(**batch).loss)

    samples = [text.training[n] for n in (3, 7)]
    return packing_fault(loss_of, samples, text, tiny_folders.VOCABULARY, exact=True, num_rows=num_rows)


def test_model_that_mixes_samples_is_seen(text):
    torch.manual_seed(0)
    model = tiny_folders.gpt2().eval()
    model.config.use_cache = False
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    assert fault(text, model) == ""
    assert "by what stands before it" in fault(text, Mixing(model, "positions").eval())
    assert "alone" in fault(text, Mixing(model, "attention").eval())
    assert fault(text, Mixing(model, "one row").eval()) == fault(text, model, num_rows=3) == ""
    assert "by what stands before it" in fault(text, Mixing(model, "one row").eval(), num_rows=3)


def test_model_without_positions_is_known():
    bloom = transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=32, hidden_size=8, n_layer=1, n_head=2)
    )
    assert not takes_positions(bloom) and takes_positions(tiny_folders.llama())
