"""``holdfast train`` on packed conversations under torchrun: the same rows on any number of ranks."""

from __future__ import annotations

import pytest

from cli.test_chats import CONTEXT, write_chat_folder, write_chats
from dist.test_train_ranks import losses, train, validations

pytestmark = pytest.mark.timeout(400)


def test_packed_run_continues_with_another_number_of_ranks(tmp_path):
    folder, chats = write_chat_folder(tmp_path / "folder"), write_chats(tmp_path / "chats.jsonl", 40)
    sizes = {
        "model.path": folder, "model.context": CONTEXT, "train.micro_batches": 2, "train.micro_batch_size": 2,
        "train.dtype": "fp32", "train.warmup_steps": 0, "train.learning_rate": 0.01, "data.packing": "on",
        "offload.host_budget": "8GiB", "io.direct": "false",
    }  # fmt: skip
    for ranks, steps in ((2, 2), (1, 4)):
        out = train(ranks, tmp_path / "run", chats, sizes=sizes, train__steps=steps)
        assert out.count("Samples are packed into rows") == (steps == 2)
    train(1, tmp_path / "whole", chats, sizes=sizes, train__steps=2)
    train(1, tmp_path / "whole", chats, sizes=sizes, train__steps=4)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    assert validations(tmp_path / "run") == pytest.approx(validations(tmp_path / "whole"), rel=1e-5)
    assert len(losses(tmp_path / "run")) == 4
