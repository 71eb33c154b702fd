"""Adapters on a Llama of 8 and of 70 billion parameters, with a part of a device's memory.

    python benchmarks/gpu/large_models.py [--only 8b|70b] [--steps 2] [--folder /dev/shm] [--keep] [--small]

* 8b: the sizes of Llama-3-8B in bf16, a sequence of 49,152 tokens, 24 GB of the device and 16 GB of the host
* 70b: the sizes of Llama-3-70B in NF4 (bitsandbytes, quantised scales), a sequence of 2,048 tokens, 24 GB of the device
  and 32 GB of the host

Adapters have rank 16, on every linear layer of a block. The base is read from its folder in each pass. Its values are
random, and those of all blocks are the same, since one is made and written again under other names. torch's allocator
refuses more than the case's part of the device. ``--folder`` is the "SSD": a folder in memory (``/dev/shm``) takes
17 and 40 GB there. The first step, which allocates, is not in the median. A case runs in a process of its own.
With ``--small`` both cases are tiny, and it runs where there is no device, too. It has not been run on a device yet.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import finish, memory_of_process, options_of, table

GB = 10**9
WRITERS = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of a Llama and of its only micro-batch, and the memory that it may take."""

    width: int
    mlp_width: int
    blocks: int
    heads: int
    key_value_heads: int
    vocabulary: int = 128_256
    tokens: int
    in_nf4: bool
    device_bytes: int = 24 * GB
    host_bytes: int

    def config(self, blocks: int) -> dict:
        return {
            "hidden_size": self.width, "intermediate_size": self.mlp_width, "num_hidden_layers": blocks,
            "num_attention_heads": self.heads, "num_key_value_heads": self.key_value_heads,
            "vocab_size": self.vocabulary, "max_position_embeddings": self.tokens, "tie_word_embeddings": False,
            "bos_token_id": 0, "eos_token_id": 1,
        }  # fmt: skip


CASES = {
    "8b": Case(width=4096, mlp_width=14336, blocks=32, heads=32, key_value_heads=8, tokens=49_152, in_nf4=False,
               host_bytes=16 * GB),
    "70b": Case(width=8192, mlp_width=28672, blocks=80, heads=64, key_value_heads=8, tokens=2_048, in_nf4=True,
                host_bytes=32 * GB),
}  # fmt: skip
SMALL = {
    name: Case(
        width=64, mlp_width=128, blocks=3, heads=2, key_value_heads=1, vocabulary=512, tokens=64, in_nf4=in_nf4,
        device_bytes=2 * GB, host_bytes=4 * GB,
    )
    for name, in_nf4 in {"8b": False, "70b": True}.items()
}  # fmt: skip


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.small:
        sys.exit("no CUDA device here: --small runs on the host")
    if options.case:
        warnings.simplefilter("ignore")
        run_case((SMALL if options.small else CASES)[options.case], Path(options.folder), options.steps)
        return
    found = {}
    for name in [options.only] if options.only else CASES:
        folder = tempfile.mkdtemp(dir=options.folder, prefix="holdfast-bench-")
        try:
            found[name] = in_a_child(name, folder, options)
        finally:
            shutil.rmtree(folder)
    rows = [["", "tokens/s", "s / step", "device GB", "planned", "host GB", "planned"]]
    for name, one in found.items():
        sizes = [*one["device"].values(), *one["host"].values()]
        rows.append(
            [name, f"{one['tokens_per_second']:.0f}", f"{statistics.median(one['seconds']):.2f}",
             *("none" if size is None else f"{size / GB:.2f}" for size in sizes)]
        )  # fmt: skip
    table(rows)
    print("summary gpu/large_models: " + "; ".join(" ".join(row) for row in rows[1:]))
    finish("gpu/large_models", {"device": device_name(), "cases": found}, options.keep)


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def in_a_child(name: str, folder: str, options: argparse.Namespace) -> dict:
    """Return the last line that a case printed; the ones before are shown."""
    command = [sys.executable, __file__, "--case", name, "--folder", folder, "--steps", str(options.steps)]
    with subprocess.Popen(
        [*command, *(["--small"] if options.small else [])],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("{"):
                return json.loads(line)
            print(f"{name}: {line}", end="", flush=True)  # what is known if the time runs out
    sys.exit(f"{name} ended with {child.returncode}")


def run_case(case: Case, folder: Path, steps: int) -> None:
    import peft

    import holdfast

    start = time.perf_counter()
    write_folder(case, folder / "base")
    print(f"the base is written after {time.perf_counter() - start:.1f} s", flush=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(case.device_bytes / whole, 1.0))
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model, weights = holdfast.pretrained(folder / "base", reference=True)
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    with holdfast.offload(
        model,
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4),
        folder / "run",
        source=weights,
        device=device,
        precision="bf16",
        budget=holdfast.Budget(
            host=case.host_bytes, device=None if device == "cpu" else case.device_bytes - GB
        ),
        sample=batch(case, 0),
        micro_batches=1,
        say=lambda line: print(line, flush=True),
    ) as engine:
        print(f"the engine is there after {time.perf_counter() - start:.1f} s", flush=True)
        seconds, losses = [], []
        for step in range(steps + 1):
            begun = time.perf_counter()
            losses.append(engine.step([batch(case, step)]))
            engine.wait()
            seconds.append(time.perf_counter() - begun)
            print(f"step {step + 1}: loss {losses[-1]:.4f}, {seconds[-1]:.2f} s", flush=True)
        plan = engine.preflight
        print(json.dumps({
            "tokens": case.tokens, "losses": losses, "seconds": seconds[1:],
            "tokens_per_second": case.tokens / statistics.median(seconds[1:]),
            "device": {"measured": engine.last.get("device_bytes"), "planned": plan.device_bytes_predicted},
            "host": {"measured": memory_of_process("VmHWM"), "planned": plan.host_bytes_predicted},
            "device_limit": case.device_bytes, "read_bytes_per_step": plan.read_bytes_per_step,
        }), flush=True)  # fmt: skip


def batch(case: Case, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, case.vocabulary, (1, case.tokens), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def write_folder(case: Case, folder: Path) -> None:
    """Write the folder of a model: make one block and store it under the name of every block."""
    import transformers

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    there = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with there:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**case.config(blocks=1)))
    torch.set_default_dtype(torch.float32)
    plain = folder.with_name("plain")
    model.save_pretrained(plain, max_shard_size="1TB")
    if case.in_nf4:
        del model
        settings = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_pretrained(
            plain, quantization_config=settings, dtype=torch.bfloat16, device_map={"": there}
        )
        shutil.rmtree(plain)
        model.save_pretrained(plain, max_shard_size="1TB")
    del model
    folder.mkdir()
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": case.blocks}))
    repeat_block(plain / "model.safetensors", folder, case.blocks)
    shutil.rmtree(plain)


def repeat_block(file: Path, folder: Path, blocks: int) -> None:
    """Write a file of what is outside the block, and one for each block."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    first = ".layers.0."
    outside = {name: tensor for name, tensor in tensors.items() if first not in name}
    save_file(outside, folder / "outside.safetensors", {"format": "pt"})
    places = dict.fromkeys(outside, "outside.safetensors")
    block = {name: tensor for name, tensor in tensors.items() if first in name}
    save_file(block, folder / "block-000.safetensors", {"format": "pt"})
    content = memoryview((folder / "block-000.safetensors").read_bytes())
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(bytes(content[8 : 8 + length])), content[8 + length :]

    def write(number: int) -> None:
        renamed = {name.replace(first, f".layers.{number}."): value for name, value in header.items()}
        text = json.dumps(renamed).encode()
        text += b" " * (-len(text) % 8)
        with (folder / f"block-{number:03}.safetensors").open("wb", buffering=0) as out:
            out.write(len(text).to_bytes(8, "little") + text)
            rest = data
            while rest:
                rest = rest[out.write(rest) :]

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write, range(1, blocks)))
    for number in range(blocks):
        places |= {
            name.replace(first, f".layers.{number}."): f"block-{number:03}.safetensors" for name in block
        }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


if __name__ == "__main__":
    main()
