"""The example as its first lines say: four ranks, killed; three, killed; one out of core; exported and sampled."""

from __future__ import annotations

import json
import os
import runpy
import time
from pathlib import Path

import pytest
import torch

from crash.test_torchrun import kill
from support.warm_python import LAUNCHED, run_python, start_torchrun

HERE = Path(__file__).parent.parent.parent
SCRIPT = str(HERE / "examples" / "elastic.py")
ENV = {
    **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(HERE / "src"),
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}  # fmt: skip


def told(path):
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


def train_until_killed(folder, ranks, until):
    """Kill all of it once a step from ``until`` on is durable; what it told."""
    out = folder / f"out-{ranks}"
    arguments = [
        f"--nproc-per-node={ranks}", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1", SCRIPT, "train", "--folder", str(folder), "--steps", "100000",
    ]  # fmt: skip
    with out.open("w") as file, (folder / "errors").open("a") as errors:
        process = start_torchrun(*arguments, env=ENV, stdout=file.fileno(), stderr=errors.fileno())
        try:
            end = time.monotonic() + 120
            while not any(line["durable"] >= until for line in told(out)):
                assert process.poll() is None and time.monotonic() < end, (folder / "errors").read_text()[
                    -4000:
                ]
                time.sleep(0.1)
        finally:
            kill(process)
            process.wait()
    return told(out)


def run(folder, *arguments):
    done = run_python(SCRIPT, *arguments, "--folder", folder, env=ENV, modules=LAUNCHED)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def loss_of_llama(folder, step):
    """Of transformers' model of what was exported, on the batch of a step, as the example makes it."""
    from transformers import AutoModelForCausalLM

    tokens, targets = runpy.run_path(SCRIPT)["batch_of"](step)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))


@pytest.mark.crash
@pytest.mark.timeout(400)
def test_four_ranks_then_three_then_one_out_of_core_then_a_llama_that_talks(tmp_path):
    four = train_until_killed(tmp_path, 4, 20)
    three = train_until_killed(tmp_path, 3, four[-1]["step"] + 20)
    assert {line["ranks"] for line in three} == {3}
    assert four[-1]["durable"] < three[0]["step"] <= four[-1]["step"] + 2
    assert three[0]["loss"] < four[0]["loss"] / 1.3
    last = three[-1]["step"] + 20
    alone = [json.loads(line) for line in run(tmp_path, "out-of-core", "--steps", str(last)).splitlines()]
    assert three[-1]["durable"] < alone[0]["step"] <= three[-1]["step"] + 2 and alone[-1]["step"] == last
    assert alone[-1]["loss"] < four[0]["loss"] / 1.5
    run(tmp_path, "export")
    [after] = map(json.loads, run(tmp_path, "out-of-core", "--steps", str(last + 1)).splitlines())
    assert loss_of_llama(tmp_path / "llama", last) == pytest.approx(after["loss"], rel=1e-4)
    said = run(tmp_path, "sample")
    assert said.startswith("def ") and len(said) > len("def ") + 20
