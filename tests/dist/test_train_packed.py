"""``holdfast train`` on packed conversations under torchrun: the same rows on any number of ranks."""

from __future__ import annotations

import pytest

from cli.test_chats import CONTEXT, write_chat_folder, write_chats
from dist.test_train_ranks import losses, train, validations

pytestmark = pytest.mark.timeout(400)


def test_packed_rows_are_shared_by_ranks(tmp_path):
    folder, chats = write_chat_folder(tmp_path / "folder"), write_chats(tmp_path / "chats.jsonl", 40)
    sizes = {
        "model.path": folder, "model.context": CONTEXT, "train.micro_batches": 2, "train.micro_batch_size": 2,
        "train.dtype": "fp32", "train.warmup_steps": 0, "train.learning_rate": 0.01, "data.packing": "on",
        "offload.host_budget": "8GiB", "io.direct": "false",
    }  # fmt: skip
    for ranks in (1, 2):
        out = train(ranks, tmp_path / f"{ranks}", chats, sizes=sizes, train__steps=3)
        assert out.count("Samples are packed into rows") == 1
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)
    assert validations(tmp_path / "2") == pytest.approx(validations(tmp_path / "1"), rel=1e-5)
    assert len(losses(tmp_path / "2")) == 3
