"""A step's loss by tokens is the mean over all its target tokens, as the model itself counts them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import BadInput
from support.grouped import grouped

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def llama():
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config)


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)).eval()


def classifier():
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, num_labels=3)).eval()


DECODER = {
    "vocab_size": 64, "d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 24,
    "max_position_embeddings": 32, "pad_token_id": 1, "dropout": 0.0,
}  # fmt: skip


def marian():
    """A causal model that does not shift, whatever its name says."""
    return transformers.MarianForCausalLM(transformers.MarianConfig(**DECODER, tie_word_embeddings=False))


def bart():
    """An encoder and a decoder, which gets its inputs of the labels."""
    encoder = {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24}
    config = transformers.BartConfig(
        **DECODER, **encoder, decoder_start_token_id=2, tie_word_embeddings=False
    )
    return transformers.BartForConditionalGeneration(config).eval()


def masked(rows: int, places: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """A micro-batch in which the labels at ``places`` count."""
    tokens = torch.randint(0, 64, (rows, 6), generator=torch.Generator().manual_seed(rows))
    labels = torch.full_like(tokens, -100)
    for place in places:
        labels[place] = tokens[place]
    return {"input_ids": tokens, "labels": labels}


FEW, MANY = masked(1, [(0, 2)]), masked(2, [(0, 0), (0, 3), (1, 0), (1, 5), (1, 1)])
ONE_CLASS, THREE_CLASSES = (
    {"input_ids": torch.randint(0, 64, (n, 6)), "labels": torch.arange(n)} for n in (1, 3)
)


@pytest.mark.parametrize(
    "make, micro_batches, counts",
    [
        (llama, [FEW, MANY], [1, 3]),  # the first of a row is predicted by nothing
        (bert, [FEW, MANY], [1, 5]),
        (marian, [FEW, MANY], [1, 5]),
        (bart, [FEW, MANY], [1, 5]),
        (classifier, [ONE_CLASS, THREE_CLASSES], [1, 3]),
    ],
    ids=["shifted", "not shifted", "causal and not shifted", "an encoder and a decoder", "classes"],
)
def test_labels_are_counted_as_the_models_loss_counts_them(tmp_path, make, micro_batches, counts):
    torch.manual_seed(0)
    model = make()
    model.config.use_cache = False
    blocks = [
        module
        for module in model.modules()
        if type(module).__name__ in ("BartEncoderLayer", "BartDecoderLayer")
    ]
    with torch.no_grad():
        losses = [float(model(**batch).loss) for batch in micro_batches]
    mean = sum(n * loss for n, loss in zip(counts, losses, strict=True)) / sum(counts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options = {"dtype": "fp32", "normalize": "tokens", "blocks": blocks or None}
    with holdfast.offload(model, optimizer, tmp_path, **grouped(**options)) as engine:
        assert engine.step(micro_batches) == pytest.approx(mean, rel=1e-5)


class Shifting(nn.Module):
    """Shifts labels, adds something to its loss, and knows nothing of the next token yet."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 4), nn.Linear(4, 64)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        nn.init.zeros_(self.head.weight)

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits, targets = self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        summed = nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        return summed / (targets != -100).sum().clamp(min=1) + 0.5


@pytest.mark.parametrize("first", ["step", "evaluate"])
def test_model_of_unknown_class_is_asked(tmp_path, first):
    torch.manual_seed(0)
    model = Shifting()
    losses = [model(**batch).item() for batch in (FEW, MANY)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with holdfast.offload(model, optimizer, tmp_path, precision="fp32", normalize="tokens") as engine:
        found = getattr(engine, first)([FEW, MANY])
        passes = sum(kind == "evaluate" for kind, _ in engine.operations)
        assert engine.step([FEW, MANY]) == found == pytest.approx((losses[0] + 3 * losses[1]) / 4)
        assert sum(kind == "evaluate" for kind, _ in engine.operations) == passes


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x, labels):
        for block in self.blocks:
            x = block(x)
        return (x.mean(-1) - labels).square().mean()


def opened(root, normalize) -> holdfast.Engine:
    torch.manual_seed(0)
    model = Plain()
    return holdfast.offload(
        model, torch.optim.SGD(model.parameters(), lr=0.0), root, precision="fp32", normalize=normalize
    )


ROWS = [{"x": torch.ones(n, 4), "labels": torch.full((n,), float(n))} for n in (1, 3)]


class Strict(Shifting):
    """Knows no label of -100."""

    def forward(self, input_ids, labels):
        assert labels.min() >= 0, "a negative label"
        return super().forward(input_ids, labels)


def test_model_that_cannot_answer_needs_a_function(tmp_path):
    model = Strict()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    tokens = torch.randint(0, 64, (2, 6))
    batch = {"input_ids": tokens, "labels": tokens}
    with holdfast.offload(model, optimizer, tmp_path / "a", precision="fp32", normalize="tokens") as engine:
        with pytest.raises(BadInput, match=r"(?s)the model failed: a negative label.* Pass a function"):
            engine.step([batch])
        assert engine.steps_done == 0
    with opened(tmp_path / "b", lambda batch: len(batch["x"])) as engine:
        found = engine.step(ROWS)
        one, three, all_of_them = (engine.evaluate(rows) for rows in (ROWS[:1], ROWS[1:], ROWS))
    assert found == pytest.approx((one + 3 * three) / 4)
    assert all_of_them == pytest.approx(found) and all_of_them != pytest.approx((one + three) / 2)


def test_an_evaluation_leaves_out_what_counts_nothing(tmp_path):
    nothing = {"x": torch.ones(0, 4), "labels": torch.ones(0)}
    with opened(tmp_path, lambda batch: len(batch["x"])) as engine:
        assert engine.evaluate([nothing, *ROWS]) == engine.evaluate(ROWS)
        assert math.isnan(engine.evaluate([nothing]))
    with opened(tmp_path / "same", "micro_batches") as engine:
        one, three, all_of_them = (engine.evaluate(rows) for rows in (ROWS[:1], ROWS[1:], ROWS))
        assert all_of_them == (one + three) / 2
        assert math.isnan(engine.evaluate([nothing, *ROWS]))


@pytest.mark.parametrize("count", [-1, float("nan"), "many"])
def test_a_function_that_gives_no_count_is_refused_and_the_engine_goes_on(tmp_path, count):
    counts = iter([1, count, 1, 1])
    with opened(tmp_path, lambda batch: next(counts)) as engine:
        with pytest.raises(BadInput, match=r"normalize= gave .* for micro-batch 1"):
            engine.step(ROWS)
        engine.step(ROWS)
