"""The vertical order against the horizontal one, where the SSD binds.

    python benchmarks/order.py [--pairs 15] [--micro-batches 8 16] [--limit 120MB] [--keep] [--small]

Both engines live in one process and take turns; state and bf16 parameters are on the SSD, whose reads and
writes share one limit, and micro-batches are small enough for I/O to bind. By bytes the horizontal order
takes (4M + 26) / 30 times as long (bf16, 12 bytes of state per parameter). Prints a table and one line of
JSON.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile

import torch
from common import finish, interleaved, options_of, paired_ratio, table

import holdfast
from holdfast.models.decoder import Decoder, DecoderConfig
from holdfast.quantities import format_bytes, parse_bytes


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--limit", type=parse_bytes, default=parse_bytes("120MB"), help="bytes per second")
    options = parser.parse_args()
    blocks, width = (8, 256) if not options.small else (3, 64)
    if options.small:
        options.pairs, options.micro_batches = 1, [2]
    rows = [
        [
            "micro-batches",
            "vertical s",
            "horizontal s",
            "ratio",
            "by bytes",
            "of it",
            "vert./lane",
            "hor./lane",
        ]
    ]
    result = {}
    for m in options.micro_batches:
        found = measure(options, blocks, width, m)
        rows.append([str(m), *(f"{found[name]:.2f}" for name in found)])
        result[m] = found
    print(f"SSD limited to {format_bytes(options.limit)}/s, {options.pairs} pairs, medians\n")
    table(rows)
    finish(
        "order", {"pairs": options.pairs, "limit": options.limit, "by_micro_batches": result}, options.keep
    )


def measure(options: argparse.Namespace, blocks: int, width: int, m: int) -> dict[str, float]:
    """Medians of seconds per step, their ratio, and how each compares with its bytes at the limit."""
    folders, engines = [], {}
    config = DecoderConfig(blocks=blocks, width=width, heads=4, kv_heads=4, context=16, dropout=0.0)
    for schedule in ("vertical", "horizontal"):
        with holdfast.empty_parameters():
            model = Decoder(config)
        folders.append(tempfile.mkdtemp(dir=options.folder, prefix="holdfast-bench-"))
        engines[schedule] = holdfast.offload(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-4),
            folders[-1],
            precision="bf16",
            schedule=schedule,
            placement=holdfast.Placement(recomputed_fraction=1.0),
            io=holdfast.IO(total_limit=options.limit),
        )
    torch.set_num_threads(1)  # the SSD binds; two threads only collide on a busy machine
    tokens = torch.randint(0, 256, (1, 16))
    batches = [{"tokens": tokens, "targets": tokens}] * m

    def settle(engine: holdfast.Engine) -> None:
        engine.step(batches)
        engine.wait()

    seconds = interleaved(
        {name: lambda e=engine: settle(e) for name, engine in engines.items()}, options.pairs
    )
    moved = {}
    for name, engine in engines.items():
        before = engine.traffic()
        settle(engine)
        after = engine.traffic()
        moved[name] = sum(n - before.get(key, 0) for key, n in after.items() if key[0].startswith("ssd"))
        engine.close()
    for folder in folders:
        shutil.rmtree(folder)
    vertical, horizontal = (statistics.median(seconds[name]) for name in engines)
    ratio, by_bytes = paired_ratio(seconds["horizontal"], seconds["vertical"]), (4 * m + 26) / 30
    return {
        "vertical": vertical,
        "horizontal": horizontal,
        "ratio": ratio,
        "by_bytes": by_bytes,
        "of_it": ratio / by_bytes,
        "vertical_to_lane": vertical / (moved["vertical"] / options.limit),
        "horizontal_to_lane": horizontal / (moved["horizontal"] / options.limit),
    }


if __name__ == "__main__":
    main()
