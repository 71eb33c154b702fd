"""Runs that an earlier library wrote are resumed bit for bit, and go on as they would have gone on there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from golden import make_runs
from holdfast.store.log.chain import verify_records
from holdfast.store.reader import RunReader
from support.warm_python import call, environment_of

GOLDEN = Path(__file__).parent / "runs_v1"


@pytest.fixture(params=list(make_runs.KINDS))
def run(request, tmp_path):
    shutil.copytree(GOLDEN / request.param, tmp_path / request.param)
    return tmp_path / request.param


def expected(kind):
    return json.loads((GOLDEN / f"{kind}.json").read_text())


def gone_on(run, steps):
    """Two ranks are forked from a process that has run nothing but imports."""
    if run.name == "ranks":
        return call("golden.make_runs", "go_on", env=environment_of(), kind=run.name, run=run, steps=steps)
    return make_runs.KINDS[run.name](run, steps)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as dcp.load says in one process
def test_a_golden_run_resumes_bit_for_bit(run):
    ends = expected(run.name)
    assert gone_on(run, 0) == ends["end"]
    if "later" in ends:
        assert gone_on(run, make_runs.LATER) == ends["later"]


@pytest.mark.parametrize("kind", ["engine_whole", "engine_split"])
def test_a_golden_run_in_bf16_stays_in_it_though_fp32_is_fast(tmp_path, monkeypatch, kind):
    """A warning, which is an error here, would tell of another dtype."""
    shutil.copytree(GOLDEN / kind, tmp_path / kind)
    seconds = {"float32": 1.0, "bfloat16": 9.0}
    monkeypatch.setattr("holdfast.measure.hardware_rates.product_seconds", seconds.__getitem__)
    assert make_runs.engine_bf16(tmp_path / kind, make_runs.LATER, "auto") == expected(kind)["later"]


def test_a_golden_run_is_whole(run):
    with RunReader(run) as reader:
        for ref in reader.commits():
            manifest = reader.load(ref)
            assert reader.verify(manifest) == [] and verify_records(reader, manifest)[1] == []
            assert json.loads((run / ref.path).read_text())["version"] == 1
