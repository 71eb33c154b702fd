"""The probe measures, in the time it is given, and leaves nothing behind. What it measures is another matter."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from holdfast.cli.plan.probing import measure_block
from holdfast.errors import BadInput, DiskFull
from holdfast.measure.drive_rates import LEAST_BYTES, _Sweep, measure_ssd
from holdfast.measure.hardware_rates import measure_copies, measure_update, median_seconds
from holdfast.measure.machine_probe import probe_machine
from holdfast.profiles import load_machine, load_model, to_toml
from holdfast.quantities import MiB

CPU = torch.device("cpu")


def a_block(seconds):
    return measure_block(CPU, None, seconds, torch.float32)


def test_products_take_time_in_both_dtypes(product_seconds):
    assert product_seconds("float32") > 0 and product_seconds("bfloat16") > 0


@pytest.mark.slow
def test_a_machine_is_measured_in_about_the_time_given(tmp_path):
    said = []
    began = time.perf_counter()
    found = probe_machine(
        tmp_path, CPU, 8 * 2**30, file_bytes=LEAST_BYTES, seconds=0.3, time_block=a_block, say=said.append
    )
    assert time.perf_counter() - began < 30
    assert said == ["the SSD", "a block", "copies", "the host's optimizer"]
    assert os.listdir(tmp_path) == []
    machine = found.profile
    assert machine.device_shares_host
    assert machine.host_memory_bytes == 8 * 2**30 // 10**6 * 10**6
    rates = (
        machine.ssd_read_bytes_per_second,
        machine.ssd_write_bytes_per_second,
        machine.ssd_mixed_bytes_per_second,
    )
    assert all(10**6 <= rate < 10**12 for rate in rates)
    assert 10**8 < machine.device_flop_per_second < 10**14
    assert 10**6 < machine.update_elements_per_second < 10**11
    assert found.ssd.file_bytes == LEAST_BYTES
    assert 0 < machine.ssd_sync_seconds < 5


def test_what_was_measured_is_a_profile_with_its_sources(tmp_path):
    found = probe_machine(tmp_path, CPU, 8 * 2**30, file_bytes=LEAST_BYTES, seconds=0.2, time_block=a_block)
    path = tmp_path / "machine.toml"
    path.write_text(to_toml(found.profile, found.sources))
    assert load_machine(str(path)) == found.profile
    lines = {line.split(" = ")[0]: line for line in path.read_text().splitlines()}
    assert "# measured, " in lines["mixed"]
    assert "# assumed: look up what yours is rated for" in lines["rated"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_the_block_of_a_model_is_timed_unless_that_takes_too_long(dtype):
    model = replace(load_model("gpt-46m"), width=128, sequence=64)  # fast enough on any machine
    small = measure_block(CPU, model, 0.2, dtype)
    assert small.what == f"a block of width 128, 64 tokens, in {str(dtype)[6:]}"
    timed = replace(model, gated=True, biases=False)
    assert small.flop_per_second == pytest.approx(
        4 * timed.forward_flop / (small.forward_seconds + small.backward_seconds)
    )
    with pytest.warns(UserWarning, match="a block of GPT of 175 billion parameters would take about"):
        other = measure_block(CPU, load_model("gpt-175b"), 0.2, dtype)
    assert other.what == f"a block of width 512, 256 tokens, in {str(dtype)[6:]}"


def test_a_cpu_has_no_copies():
    assert measure_copies(CPU, 0.1) is None


def test_threads_that_come_later_compute_with_as_many_as_before():
    def count():
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.get_num_threads).result()

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert measure_update(0.05, elements=8192) > 0
        assert (torch.get_num_threads(), count()) == (3, 3)
    finally:
        torch.set_num_threads(before)


def test_a_file_is_large_enough_however_little_time_there_is(tmp_path):
    assert measure_ssd(tmp_path, 2 * 128 * MiB, 0.0).file_bytes == 128 * MiB


@pytest.mark.parametrize("mib", [16, 20, 40, 127])
def test_a_small_file_is_measured_by_in_smaller_parts(tmp_path, mib):
    found = measure_ssd(tmp_path, mib * MiB, 0.1)
    assert mib * MiB * 3 / 4 <= found.file_bytes <= mib * MiB
    assert min(found.read, found.write, found.mixed) > 10**6


def test_a_probe_that_is_killed_leaves_nothing(tmp_path, monkeypatch):
    seen, rate = [], _Sweep.rate

    def watched(self, *args):
        seen.append((os.listdir(tmp_path), os.fstat(self.file.fd).st_size))
        return rate(self, *args)

    monkeypatch.setattr(_Sweep, "rate", watched)
    measure_ssd(tmp_path, LEAST_BYTES, 0.0)
    assert seen == [([], LEAST_BYTES)] * 3


def test_a_file_too_small_to_measure_by_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"15.0 MiB is too small to measure by; give 16.0 MiB"):
        measure_ssd(tmp_path, 15 * MiB, 1.0)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(DiskFull, match="no space left"):
        measure_ssd(tmp_path, LEAST_BYTES, 0.2)
    assert os.listdir(tmp_path) == []


def test_a_median_is_of_what_fits_and_the_first_does_not_count():
    calls = []

    def action():
        calls.append(len(calls))
        if len(calls) == 1:
            time.sleep(0.2)

    assert median_seconds(action, 0.0) < 0.1
    assert len(calls) == 2
