"""``holdfast train --model`` on a device: adapters on bases of every kind, packed conversations; stopped and continued.

Where there is no device, each case runs on the host.
"""

from __future__ import annotations

import pytest

from support.adapter_runs import losses, stored_adapter, train_adapters
from training import differing, stored

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

from cli.test_chats import arguments, folder, interrupted, write_chats  # noqa: E402, F401
from formats.test_experts import qwen3_moe  # noqa: E402
from tiny_folders import TEXT, write_folder, write_quantised, write_tokenizer  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("same_bits"),
    pytest.mark.filterwarnings("ignore:MatMul8bitLt", "ignore:.is_gradient_checkpointing"),
]

PACKED = {"fp8": ("fp8",), "torchao": ("torchao",), "experts in fp8": ("fp8", qwen3_moe)}
SETTINGS = {
    "plain": (),
    "nf4": ("quantization.bits=4",),
    "int8": ("quantization.bits=8",),
    "fp8": ("lora.dora=true",),
    "torchao": ("lora.dora=true",),
    "experts in fp8": ("lora.targets=[q_proj,v_proj]",),
}


SUPPORTED = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)
"""Experts that a folder has one by one are joined by rules that older versions of transformers have in another form."""


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind,
            marks=pytest.mark.skipif(
                kind == "experts in fp8" and not SUPPORTED, reason="transformers is older than 5.23"
            ),
        )
        for kind in SETTINGS
    ],
)
def test_adapters_train_and_continue_bit_for_bit(tmp_path, holdfast, cuda_or_host, kind):
    if kind in ("nf4", "int8"):
        pytest.importorskip("bitsandbytes")
    base = write_quantised(tmp_path, *PACKED[kind]) if kind in PACKED else write_folder(tmp_path / "folder")
    if kind in PACKED:
        write_tokenizer(base)
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 12)

    def train(run, steps, where):
        sets = (f"offload.device={where}", "lora.rank=4", "lora.dropout=0.1", *SETTINGS[kind])
        result = train_adapters(holdfast, text, tmp_path / run, base, steps, *sets)
        assert result.code == 0, result.err + result.out

    for steps in (1, 3):
        train("run", steps, cuda_or_host)
    train("whole", 3, cuda_or_host)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert differing(stored_adapter(tmp_path / "run"), stored_adapter(tmp_path / "whole")) == []
    assert holdfast("verify", tmp_path / "run").code == 0
    train("here", 1, "cpu")  # dropout draws other numbers there
    assert losses(tmp_path / "whole")[1] == pytest.approx(losses(tmp_path / "here")[1], rel=0.02)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_packed_conversations_train_and_continue_bit_for_bit(
    tmp_path,
    holdfast,
    folder,  # noqa: F811
    interrupted,  # noqa: F811
    cuda_or_host,
    dtype,
):
    chats = write_chats(tmp_path / "chats.jsonl", 40)
    sets = ("data.packing=on", f"offload.device={cuda_or_host}", f"train.dtype={dtype}")

    def train(run):
        return holdfast("train", "--model", folder, *arguments(tmp_path / run, chats, *sets))

    result = train("whole")
    assert result.code == 0, result.err
    assert "Samples are packed into rows" in result.out, result.out
    interrupted(3)
    assert train("run").code != 0
    interrupted()
    result = train("run")
    assert result.code == 0, result.err
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert differing(stored(tmp_path / "run"), stored(tmp_path / "whole")) == []
