"""A folder of 1.2 billion parameters trained whole within 4 GiB, and its 4-bit copy with adapters within 2 GiB.

    python benchmarks/one_billion.py [--only WAY] [--folder FOLDER] [--keep] [--small]

The folder is a Llama of the sizes of Llama-3.2-1B (128,256 words) with random weights in bf16; bitsandbytes makes the
copy (NF4, quantised scales). Processes train each under a hard limit (a memory cgroup of version 1, as root;
if there can be none, the result says `held: false`):

1. The first trains three steps, and is killed in the middle of the next.
2. The second continues that run for a step. An adapter is then exported by `save_pretrained`.
3. The third exports a whole model by `holdfast convert`.

Then transformers and PEFT load what was exported, without a limit. The loss that they find is shown beside that of the
run, for the same batch. The time of a step is the least of the three. The peak is the most that a process holds. It
includes files that the process has mapped, which the limit does not count, so it can be above the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from common import fast_precision, finish, hard_limit, memory_of_process, options_of, table

GIB = 1024**3
STEPS, MICRO_BATCHES = 3, 2
LLAMA = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
TINY = LLAMA | {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
                "num_key_value_heads": 1, "vocab_size": 512}  # fmt: skip
LIMITS = {"whole": 4 * GIB, "adapters": 2 * GIB}


def batches(step: int, sizes: dict) -> list[dict]:
    generator = torch.Generator().manual_seed(step)
    shape = (MICRO_BATCHES, 1, 128)
    return [
        {"input_ids": one, "labels": one}
        for one in torch.randint(0, sizes["vocab_size"], shape, generator=generator)
    ]


def write_folders(folder: Path, sizes: dict) -> None:
    """Write the folder "whole" in bf16, and its copy in NF4, "adapters"."""
    import transformers

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, bos_token_id=0, eos_token_id=1))
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder / "whole")
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    packed = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "whole", quantization_config=config, dtype=torch.bfloat16, device_map="cpu"
    )
    packed.save_pretrained(folder / "adapters")


# One process under a limit: prints a JSON object per event


def train(kind: str, folder: Path, sizes: dict, precision: str, steps: int, dies: bool) -> None:
    """Train to the step ``steps``, and die in the middle of the next one."""
    import holdfast
    from holdfast import failpoints

    model, weights = holdfast.pretrained(folder / kind)
    if kind == "adapters":
        import peft

        model = peft.get_peft_model(
            model, peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    parameters = [p for p in model.parameters() if p.requires_grad]
    engine = holdfast.offload(
        model,
        torch.optim.AdamW(parameters, lr=1e-4),
        folder / f"{kind}-run",
        source=weights,
        precision=precision,
        budget=holdfast.Budget(host=f"{LIMITS[kind] // 2**20}MiB"),
        durability=holdfast.Durability(retain=1),
        sample=batches(0, sizes)[0],
        micro_batches=MICRO_BATCHES,
        say=lambda line: None,
    )
    say(predicted=engine.preflight.host_bytes_predicted, begun=engine.steps_done)
    seconds = []
    while engine.steps_done < steps:
        start = time.perf_counter()
        engine.step(batches(engine.steps_done, sizes))
        engine.wait()
        seconds.append(time.perf_counter() - start)
    say(durable=engine.durable_step, seconds=min(seconds), read=engine.preflight.read_bytes_per_step)
    say(loss=float(engine.evaluate(batches(STEPS + 9, sizes))), peak=memory_of_process("VmHWM"))
    if dies:
        failpoints.armed = "before_data_sync:1"
        engine.step(batches(engine.steps_done, sizes))
    if kind == "adapters":
        model.save_pretrained(folder / "adapters-export", state_dict=engine.state_dict(trained=True))
    engine.close()
    say(peak=memory_of_process("VmHWM"))


def convert(kind: str, folder: Path) -> None:
    from holdfast.cli.main import main as command

    run, out = str(folder / f"{kind}-run"), str(folder / f"{kind}-export")
    sys.argv = ["holdfast", "convert", run, out, "--to", "huggingface", "--model", str(folder / kind)]
    try:
        command()
    except SystemExit as end:
        assert not end.code, end.code
    say(peak=memory_of_process("VmHWM"))


def loss_of_export(kind: str, folder: Path, sizes: dict) -> float:
    """Return the loss that the other libraries find with what was exported."""
    import transformers

    base = folder / ("whole-export" if kind == "whole" else "adapters")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, device_map="cpu")
    if kind == "adapters":
        import peft

        model = peft.PeftModel.from_pretrained(model, folder / "adapters-export")
    with torch.no_grad():
        found = [float(model.eval()(**batch).loss) for batch in batches(STEPS + 9, sizes)]
    return sum(found) / len(found)


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


# The processes


def run(group: Path | None, **order: object) -> tuple[int, dict]:
    """Return the exit code of a process in ``group``, and its events in one dict, with the highest peak."""
    procs = None if group is None else group / "cgroup.procs"
    done = subprocess.run(
        [sys.executable, __file__, "--measure", json.dumps(order)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        preexec_fn=None if procs is None else lambda: procs.write_text(str(os.getpid())),
    )
    assert done.returncode in (0, -9), f"{order}: exit code {done.returncode}"
    said: dict = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            told = json.loads(line)
            said |= told | ({"peak": max(told["peak"], said.get("peak", 0))} if "peak" in told else {})
    return done.returncode, said


def figures(kind: str, folder: Path, order: dict) -> dict:
    """Return the limit, bytes, seconds and losses of one way of training."""
    order = {**order, "kind": kind, "folder": str(folder)}
    with hard_limit(LIMITS[kind]) as group:
        code, first = run(group, **order, what="train", steps=STEPS, dies=True)
        assert code == -9 and first.get("durable") == STEPS, (kind, code, first)
        code, again = run(group, **order, what="train", steps=STEPS + 1, dies=False)
        assert code == 0 and again["durable"] == STEPS + 1 and again["begun"] >= STEPS, (kind, code, again)
        peaks = [first["peak"], again["peak"]]
        if kind == "whole":
            code, exported = run(group, **order, what="convert")
            assert code == 0, code
            peaks.append(exported["peak"])
    loaded = run(None, **order, what="load")[1]["loss"]
    assert abs(loaded - again["loss"]) < 0.01 * again["loss"], (kind, loaded, again["loss"])
    return {
        "limit": LIMITS[kind], "held": group is not None, "predicted": first["predicted"], "peak": max(peaks),
        "seconds_per_step": first["seconds"], "read_bytes_per_step": first["read"],
        "loss": again["loss"], "loss_of_export": loaded,
    }  # fmt: skip


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--only", choices=LIMITS)
    parser.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.measure:
        measure(**options.measure)
        return
    precision = fast_precision()
    order, found = {"small": options.small, "precision": precision}, {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        assert run(None, **order, kind="", folder=folder, what="write")[0] == 0
        for kind in [options.only] if options.only else LIMITS:
            found[kind] = figures(kind, Path(folder), order)
            shutil.rmtree(Path(folder) / f"{kind}-run")
    rows = [["MiB", "limit", "predicted", "peak", "s / step", "loss", "of the export"]]
    for kind, one in found.items():
        sizes = [f"{one[key] / 2**20:.0f}" for key in ("limit", "predicted", "peak")]
        rows.append(
            [kind, *sizes, *(f"{one[k]:.4f}" for k in ("seconds_per_step", "loss", "loss_of_export"))]
        )
    table(rows)
    finish("one_billion", {"precision": precision, "ways": found}, options.keep)


def measure(
    small: bool, precision: str, kind: str, folder: str, what: str, steps: int = 0, dies: bool = False
) -> None:
    place, sizes = Path(folder), TINY if small else LLAMA
    if what == "write":
        write_folders(place, sizes)
    elif what == "convert":
        convert(kind, place)
    elif what == "load":
        say(loss=loss_of_export(kind, place, sizes))
    else:
        train(kind, place, sizes, precision, steps, dies)


if __name__ == "__main__":
    main()
