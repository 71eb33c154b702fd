"""A step's loss by tokens is the mean over all its target tokens, as the model itself counts them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import BadInput
from holdfast.offload.weights import shifts_labels

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
        (classifier, [ONE_CLASS, THREE_CLASSES], [1, 3]),
    ],
    ids=["shifted", "not shifted", "classes"],
)
def test_labels_are_counted_as_the_models_loss_counts_them(tmp_path, make, micro_batches, counts):
    torch.manual_seed(0)
    model = make()
    model.config.use_cache = False
    with torch.no_grad():
        losses = [float(model(**batch).loss) for batch in micro_batches]
    mean = sum(n * loss for n, loss in zip(counts, losses, strict=True)) / sum(counts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with holdfast.offload(model, optimizer, tmp_path, dtype="fp32", normalize="tokens") as engine:
        assert engine.step(micro_batches) == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize(
    "name, shifts",
    [
        ("MistralForCausalLM", True),
        ("GPT2LMHeadModel", True),
        ("XLMWithLMHeadModel", False),
        ("BertForMaskedLM", False),
        ("ViTForImageClassification", False),
        ("Mine", None),
    ],
)
def test_whether_labels_are_shifted_is_told_by_the_kind_of_model(name, shifts):
    model = type(name, (nn.Module,), {})()
    assert shifts_labels(model) == shifts
    assert shifts_labels(nn.DataParallel(model)) == shifts


@pytest.mark.parametrize("encoder", [True, False])
def test_conditional_generation_shifts_labels_where_there_is_no_encoder(encoder):
    model = type("SomeForConditionalGeneration", (nn.Module,), {})()
    model.config = transformers.PretrainedConfig(is_encoder_decoder=encoder)
    assert shifts_labels(model) == (not encoder)


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
        model, torch.optim.SGD(model.parameters(), lr=0.0), root, dtype="fp32", normalize=normalize
    )


ROWS = [{"x": torch.ones(n, 4), "labels": torch.full((n,), float(n))} for n in (1, 3)]


def test_a_model_that_does_not_say_how_it_counts_is_asked_for_a_function(tmp_path):
    asked = pytest.raises(BadInput, match="does not know whether this model shifts")
    with opened(tmp_path / "a", "tokens") as engine, asked:
        engine.step(ROWS)
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
