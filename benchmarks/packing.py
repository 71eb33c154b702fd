"""How many real tokens a second a run has with packing, sorted lengths and padding, on chats of very unlike lengths.

    python benchmarks/packing.py [--width 128] [--blocks 4] [--context 1024] [--rows 8] [--steps 4] [--folder FOLDER]
                                 [--keep] [--small]

Conversations are made up: one turn or a few, with lengths that are log-normal. Most are short and a few are as long as
the context. A Llama of transformers trains on them out of core in fp32, all arms in turn in the same engine, with the
same rows in a micro-batch: ``padded`` as samples come, ``lengths`` with the samples of a step sorted, ``packed``, and
``whole mask``: packed, with the attention of transformers as it is. Real tokens are those that are not padding. Seconds
of a core count what the process worked, whatever else the machine did. Prints a table (median of the steps), the
difference between the losses of the first packed step and of its samples alone, and one line of JSON with every
measurement.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import finish, options_of, table

import holdfast
from holdfast.data.loader import SampleLoader, micro_batches_of, step_loader
from holdfast.data.packing import PackedLoader
from holdfast.data.tokens import Tokens, encoded
from holdfast.models.packed_attention import attend_by_sample

SAMPLES, MICRO_BATCHES = 4000, 2
PAD = 300
ROLES = {"user": 256, "assistant": 257}
END = 258


class Bytes:
    """A byte is a token, and a turn is its role, its bytes and an end mark."""

    pad, digest, template_digest = PAD, "bytes", "roles"

    def __init__(self) -> None:
        self.begin: list[int] = []
        self.end: list[int] = []

    def encode(self, texts: list[str]) -> list[list[int]]:
        raise NotImplementedError

    def encode_with_ends(self, texts: list[str]) -> None:
        raise NotImplementedError

    def encode_chat(
        self, messages: list[dict[str, Any]], tools: Any, where: str
    ) -> tuple[list[int], list[bool]]:
        ids: list[int] = []
        targets: list[bool] = []
        for message in messages:
            own = [*message["content"].encode(), END]
            ids += [ROLES[message["role"]], *own]
            targets += [False, *[message["role"] == "assistant"] * len(own)]
        return ids, targets


def write_chats(path: Path, count: int) -> None:
    made = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            messages: list[dict[str, str]] = []
            while not messages or made.random() < 0.3:
                for role, middle in (("user", 2.5), ("assistant", 3.5)):
                    length = int(made.lognormvariate(middle, 1.2)) + 1
                    messages.append(
                        {"role": role, "content": "".join(made.choices("etaoin shrdlu", k=length))}
                    )
            file.write(json.dumps({"messages": messages}) + "\n")


def real_tokens(batches: list[dict[str, torch.Tensor]]) -> int:
    return sum(int((batch["input_ids"] != PAD).sum()) for batch in batches)


def difference(engine: Any, text: Tokens, rows: int) -> float:
    """Return the difference between the mean loss of a packed step and that of its samples alone."""
    loader = PackedLoader(text, rows, MICRO_BATCHES)
    packed = next(loader)
    alone = micro_batches_of([loader.sample(n) for n in range(loader.consumed)], rows, text.stack)
    return abs(engine.evaluate(packed) - engine.evaluate(alone))


def measure(options: Any, folder: Path) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    write_chats(folder / "chats.jsonl", options.samples)
    text = encoded(str(folder / "chats.jsonl"), Bytes(), folder / "tokens", context=options.context)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=options.width, intermediate_size=3 * options.width, num_hidden_layers=options.blocks,
        num_attention_heads=4, num_key_value_heads=4, vocab_size=PAD + 1, max_position_embeddings=options.context,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    arms: dict[str, SampleLoader] = {
        "padded": step_loader(text, options.rows, MICRO_BATCHES, stack=text.stack),
        "lengths": PackedLoader(text, options.rows, MICRO_BATCHES, packs=False),
        "packed": PackedLoader(text, options.rows, MICRO_BATCHES),
        "whole mask": PackedLoader(text, options.rows, MICRO_BATCHES),
    }
    whole = ALL_ATTENTION_FUNCTIONS["sdpa"]
    attend_by_sample()
    by_sample = ALL_ATTENTION_FUNCTIONS["sdpa"]
    found: dict[str, list[tuple[int, float, float]]] = {name: [] for name in arms}
    with holdfast.offload(model, optimizer, folder / "run", precision="fp32", normalize="tokens") as engine:
        apart = difference(engine, text, options.rows)
        for turn in range(options.steps + 1):  # the first one touches what the others find
            for name, loader in arms.items():
                batches = next(loader)
                ALL_ATTENTION_FUNCTIONS.register("sdpa", whole if name == "whole mask" else by_sample)
                engine.wait()
                started, worked = time.perf_counter(), time.process_time()
                engine.step(batches)
                engine.wait()
                if turn:
                    seconds = time.perf_counter() - started
                    found[name].append((real_tokens(batches), seconds, time.process_time() - worked))
    return {
        "real_tokens": {name: [count for count, *_ in steps] for name, steps in found.items()},
        "real_tokens_per_second": {name: [n / wall for n, wall, _ in steps] for name, steps in found.items()},
        "real_tokens_per_processor_second": {
            name: [n / worked for n, _, worked in steps] for name, steps in found.items()
        },
        "loss_difference": apart,
    }


def main() -> None:
    parser = options_of(__doc__ or "")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=8, help="of a micro-batch")
    parser.add_argument("--steps", type=int, default=4, help="of each arm")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    options = parser.parse_args()
    if options.small:
        options.width, options.blocks, options.context = 32, 2, 512
        options.rows, options.steps, options.samples = 4, 1, 300
    folder = Path(tempfile.mkdtemp(dir=options.folder, prefix="holdfast-bench-"))
    try:
        found = measure(options, folder)
    finally:
        shutil.rmtree(folder)
    rows = [["", "real tokens a step", "real tokens/s", "of one core"]]
    kinds = ("real_tokens", "real_tokens_per_second", "real_tokens_per_processor_second")
    for name in found["real_tokens"]:
        rows.append([name, *(f"{statistics.median(found[kind][name]):,.0f}" for kind in kinds)])
    table(rows)
    sizes = {key: getattr(options, key) for key in ("width", "blocks", "context", "rows", "steps")}
    finish("packing", {**sizes, "micro_batches": MICRO_BATCHES, **found}, options.keep)


if __name__ == "__main__":
    main()
