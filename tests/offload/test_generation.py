"""``Engine.generate``: texts are continued together, each as it would be alone."""

from __future__ import annotations

import pytest
import torch

import holdfast
from holdfast.errors import BadInput
from training import VOCABULARY, adamw, decoder


@pytest.fixture
def engine(tmp_path):
    model = decoder()
    with holdfast.offload(model, adamw(model), tmp_path, precision="fp32") as made:
        yield made


def texts(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize("lengths", [(5, 5, 5), (3, 5, 3, 4)], ids=["of one length", "of several"])
def test_each_text_goes_on_as_alone(engine, lengths):
    rows = texts(*lengths)
    options = {"temperature": 0.9, "top_k": 12, "context": 6}
    together = engine.generate(rows, 4, seed=7, **options)
    for i, row in enumerate(rows):
        alone = engine.generate(row[None], 4, seed=7 + i, **options)
        assert torch.equal(together[i], alone[0]) and torch.equal(together[i][: len(row)], row)
    assert len({tuple(row[-4:].tolist()) for row in together}) > 1


def test_texts_of_one_tensor_come_back_as_one(engine):
    rows = torch.stack(texts(*[4] * 20))
    found = engine.generate(rows, 3, temperature=0)
    assert found.shape == (20, 7) and torch.equal(found[:, :4], rows)
    assert torch.equal(found[17:18], engine.generate(rows[17:18], 3, temperature=0))


def test_many_texts_take_as_many_passes_as_one(engine):
    def read(count):
        before = engine.traffic()
        engine.generate(torch.stack(texts(*[4] * count)), 3)
        return {
            key: value - before.get(key, 0) for key, value in engine.traffic().items() if "params" in key[1]
        }

    assert read(1) == read(30) and sum(read(1).values()) > 0


@pytest.mark.parametrize(
    "tokens",
    [torch.zeros(3, dtype=torch.int64), torch.zeros(1, 3), [], [torch.zeros(0, dtype=torch.int64)], [[1, 2]]],
    ids=["one dimension", "floats", "none", "empty", "lists"],
)
def test_what_is_no_text_is_refused(engine, tokens):
    with pytest.raises(BadInput, match=r"one tensor of integers of shape \(texts, length\), or a list"):
        engine.generate(tokens, 1)
