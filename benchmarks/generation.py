"""Texts continued at once against one after another, where the SSD binds: tokens per second of ``Engine.generate``.

    python benchmarks/generation.py [--texts 16] [--new 4] [--pairs 5] [--limit 200000000] [--folder FOLDER] [--keep]
                                    [--small]

The compute copies are on an SSD of ``--limit`` bytes per second, and every token takes a pass over them.
"""

from __future__ import annotations

import statistics
import tempfile
import time

import torch
from common import finish, options_of, paired_ratio, table

import holdfast
from holdfast.models.decoder import Decoder, DecoderConfig


def main() -> None:
    parser = options_of(__doc__)
    for name, default in (("texts", 16), ("new", 4), ("pairs", 5), ("limit", 200_000_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    config = DecoderConfig(blocks=12, width=512, heads=8, kv_heads=8, context=64)
    if options.small:
        config, options.pairs = DecoderConfig(blocks=2, width=32, heads=2, kv_heads=2, context=64), 1
    with holdfast.empty_parameters():
        model = Decoder(config)
    prompts = torch.randint(0, config.vocabulary, (options.texts, 16))
    rates: dict[str, list[float]] = {"together": [], "one by one": []}
    with (
        tempfile.TemporaryDirectory(dir=options.folder, prefix="holdfast-bench-") as folder,
        holdfast.offload(
            model, torch.optim.AdamW(model.parameters(), lr=1e-4), folder, precision="fp32",
            io=holdfast.IO(read_limit=options.limit),
        ) as engine,
    ):  # fmt: skip
        engine.generate(prompts, 1)
        for _ in range(options.pairs):
            start = time.perf_counter()
            engine.generate(prompts, options.new)
            rates["together"].append(options.texts * options.new / (time.perf_counter() - start))
            start = time.perf_counter()
            engine.generate(prompts[:1], options.new)  # one of them stands for all
            rates["one by one"].append(options.new / (time.perf_counter() - start))
    ratio = paired_ratio(rates["together"], rates["one by one"])
    rows = [["", "tokens/s"], *([name, f"{statistics.median(found):.1f}"] for name, found in rates.items())]
    table([*rows, ["ratio", f"{ratio:.1f}"]])
    sizes = {name: getattr(options, name) for name in ("texts", "new", "pairs", "limit")}
    finish("generation", {**sizes, "tokens_per_second": rates, "ratio": ratio}, options.keep)


if __name__ == "__main__":
    main()
