"""The benchmarks for a device run in their small form; where there is none they say so, or do what they can."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.warm_python import environment_of, run_python

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


def run(script, *arguments):
    """Run a benchmark to its end, without a device in a fork of a process that has torch."""
    if not torch.cuda.is_available():
        return run_python(FOLDER / script, *arguments, env=environment_of(), modules=[], timeout=280)
    return subprocess.run(
        [sys.executable, str(FOLDER / script), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_survive_runs_in_its_small_form(tmp_path):
    done = run("survive.py", "--small", "--folder", tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["benchmark"] == "gpu/survive"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
@pytest.mark.parametrize("script", ["survive.py", "fits.py", "facts.py"])
def test_without_a_device_they_are_imported_and_say_that_there_is_none(tmp_path, script):
    done = run(script, "--small", "--folder", tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("no CUDA device here")


def check_fits(device, folder):
    done = run("fits.py", "--small", "--device", device, "--folder", folder)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = {line["measurement"]: line for line in lines}
    assert list(found) == ["speed", "overlap", "memory", "curves", "kill"]
    assert all(line["benchmark"] == "gpu/fits" and line["commit"] and line["device"] for line in lines)
    assert done.stdout.splitlines()[-1].startswith("summary gpu/fits tiny: speed: resident ")
    assert all(rate > 0 for rate in found["speed"]["tokens_per_second"].values())
    assert len(found["curves"]["losses"]["resident"]) == 7 and found["curves"]["furthest_apart"] < 0.01
    assert found["kill"]["equal"] and 0 < found["kill"]["killed_after"] <= found["kill"]["resumed_from"] + 1
    assert list(folder.iterdir()) == []
    return found


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_fits_runs_in_its_small_form(tmp_path):
    found = check_fits("cuda", tmp_path)
    assert 0 <= found["overlap"]["overlap"]["HtoD"]["hidden"] <= 1
    assert all(both["measured"] and both["planned"] for both in found["memory"]["memory"].values())


@pytest.mark.campaign
@pytest.mark.timeout(300)
def test_all_of_fits_but_what_needs_a_device_runs_on_the_host(tmp_path):
    found = check_fits("cpu", tmp_path)
    assert found["overlap"]["overlap"] == {}


@pytest.mark.campaign
@pytest.mark.timeout(300)
def test_large_models_runs_in_its_small_form(tmp_path):
    pytest.importorskip("bitsandbytes")
    done = run("large_models.py", "--small", "--folder", tmp_path)
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout.splitlines()[-1])["cases"]
    assert list(cases) == ["8b", "70b"] and all(one["host"]["measured"] for one in cases.values())
    assert list(tmp_path.iterdir()) == []


def test_facts_that_need_no_device_are_measured(tmp_path):
    done = run("facts.py", "--small", "--device", "cpu", "--folder", tmp_path)
    assert done.returncode == 0, done.stderr
    *_, line, summary = [line for line in done.stdout.splitlines() if line.startswith(("{", "summary"))]
    found = json.loads(line)
    assert found["ssd"]["read MB/s"] > 0 and "failed" not in found["alignment"]
    assert summary.startswith("summary gpu/facts: alignment: at 64 bytes")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_facts_of_a_device_are_measured(tmp_path):
    done = run("facts.py", "--small", "--folder", tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert not [name for name, one in found.items() if isinstance(one, dict) and "failed" in one]
    assert "dc" in found["pinning"]["flags"].split()


def test_copies_are_hidden_as_far_as_kernels_run_beside_them():
    """Two kernels that overlap, from 0 to 10; copies of 4 of which 4, and of 8 of which 2 are beside."""
    sys.path.insert(0, str(FOLDER))
    sys.path.insert(0, str(FOLDER.parent))
    try:
        import fits
    finally:
        del sys.path[:2]
    events = [
        {"cat": "kernel", "name": "gemm", "ts": 0, "dur": 6},
        {"cat": "kernel", "name": "add", "ts": 5, "dur": 5},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 3, "dur": 4},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "ts": 8, "dur": 8},
        {"cat": "cpu_op", "name": "HtoD", "ts": 0, "dur": 99},
        {"ph": "M", "name": "process_name"},
    ]
    assert fits.hidden(events) == {
        "HtoD": {"hidden": 1.0, "seconds": 4e-6},
        "DtoH": {"hidden": 0.25, "seconds": 8e-6},
    }
