"""The reference decoder, exported, is a Llama of Hugging Face's library that computes the same."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import holdfast
from holdfast.formats import packs
from holdfast.formats.readers.huggingface import write_huggingface
from holdfast.formats.rules_source import UnderRules
from holdfast.models.decoder import Decoder, DecoderConfig
from holdfast.models.exports import PACK, llama_config
from holdfast.opening import source_of


@pytest.mark.parametrize("file_bytes", [10**9, 5000])
def test_an_exported_decoder_is_a_llama_with_the_same_logits(tmp_path, file_bytes):
    torch.manual_seed(0)
    config = DecoderConfig(vocabulary=37, blocks=2, width=32, heads=4, kv_heads=2, context=16)
    model = Decoder(config)
    optimizer = torch.optim.AdamW(model.parameters())
    with holdfast.Checkpointer(tmp_path / "run", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.resume()
    source = UnderRules(source_of(str(tmp_path / "run")), packs.load(PACK))
    write_huggingface(source, tmp_path / "llama", file_bytes=file_bytes)
    (tmp_path / "llama" / "config.json").write_text(json.dumps(llama_config(config)))
    llama, report = AutoModelForCausalLM.from_pretrained(tmp_path / "llama", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = torch.randint(0, 37, (3, 16))
    with torch.no_grad():
        torch.testing.assert_close(llama(tokens).logits, model(tokens), rtol=1e-5, atol=1e-6)
