"""``probe``: a profile that ``plan`` takes, and what is refused before anything is measured."""

import json

import pytest

from holdfast.profiles import load_machine

pytestmark = pytest.mark.filterwarnings("ignore:.*does not take direct I/O")
QUICK = ["--seconds", "1", "--size", "128MiB", "--device", "cpu"]


@pytest.mark.slow
def test_a_profile_is_written_that_plan_takes(holdfast, tmp_path):
    out = tmp_path / "machine.toml"
    result = holdfast("probe", "--dir", tmp_path, "--out", out, *QUICK)
    assert result.code == 0, result.err
    assert result.out.splitlines()[-1] == f"  holdfast plan --model gpt-46m --machine {out}"
    assert load_machine(str(out)).device_shares_host
    planned = holdfast("plan", "--model", "gpt-46m", "--machine", out, "--micro-batches", "2")
    assert planned.code == 0, planned.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["machine.toml"]


@pytest.mark.slow
def test_without_a_file_it_is_printed_and_as_json_with_what_was_measured(holdfast, tmp_path):
    printed = holdfast("probe", "--dir", tmp_path, *QUICK)
    path = tmp_path / "m.toml"
    path.write_text(printed.out)
    assert load_machine(str(path)).device_flop_per_second > 0
    found = json.loads(holdfast("probe", "--dir", tmp_path, *QUICK, "--json").out)
    assert found["copies"] is None
    assert found["block"]["backward_seconds"] > 0
    assert found["profile"]["ssd_write_bytes_per_second"] > 0
    assert found["sources"]["ssd.rated"].startswith("assumed")


@pytest.mark.slow
@pytest.mark.parametrize("slower, dtype", [(0.5, "float32"), (0.9, "bfloat16")])
def test_the_block_is_timed_in_what_train_would_compute_in(holdfast, tmp_path, monkeypatch, slower, dtype):
    times = {"float32": slower, "bfloat16": 1.0}
    monkeypatch.setattr("holdfast.measure.hardware_rates.product_seconds", times.get)
    found = json.loads(holdfast("probe", "--dir", tmp_path, *QUICK, "--json").out)
    assert found["sources"]["device.flops"].endswith(f", in {dtype}")
    assert found["profile"]["precision"] == {"float32": "fp32", "bfloat16": "bf16"}[dtype]


@pytest.mark.parametrize(
    "options, text",
    [
        (["--dir", "/absent"], "--dir /absent is no directory"),
        (["--out", "/absent/m.toml"], "there is no directory /absent; make it first"),
        (["--size", "large"], "--size: 'large' is not a number of bytes"),
        (["--size", "1MiB"], "is too small to measure by; give 16.0 MiB"),
        (["--model", "gpt-66b"], "there is no model 'gpt-66b'"),
        (["--device", "tpu"], "device 'tpu' is not"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_exit_2(holdfast, tmp_path, options, text):
    result = holdfast("probe", "--dir", tmp_path, *options)
    assert (result.code, result.out) == (2, "")
    assert len(result.err.splitlines()) == 1
    assert text in result.err
    assert list(tmp_path.iterdir()) == []
