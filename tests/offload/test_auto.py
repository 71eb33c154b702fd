"""``budget="auto"``: the machine decides, says so, is right about explicit fractions, and changes no number."""

import json
import math
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import BadInput, DoesNotFit
from holdfast.events import EventLog, read_events
from holdfast.models.decoder import Decoder, DecoderConfig
from holdfast.offload import profile_correction
from holdfast.offload.executor import Span
from holdfast.offload.memory.device import open_device
from holdfast.offload.model.blocks import find_blocks
from holdfast.offload.profile_correction import correct, covered, ratios
from holdfast.offload.setup import step_planning
from holdfast.offload.setup.automatic_placement import with_times, within
from holdfast.offload.setup.model_timing import MicroBatchTimes, time_model
from holdfast.profiles import load_machine, to_toml
from support.grouped import grouped

CONFIG = DecoderConfig(blocks=3, width=32, heads=2, kv_heads=2, context=16, dropout=0.0)
TOKENS = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
KEY: Any = None
BATCH = {"tokens": TOKENS, "targets": TOKENS}


def engine(path, **options):
    torch.manual_seed(0)
    model = Decoder(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"dtype": "fp32", "sample": BATCH, "micro_batches": 2, "say": lambda text: None} | options
    return holdfast.offload(model, optimizer, path, **grouped(**options))


def events_of(path, kind):
    return [event for event in read_events(path / "events.jsonl") if event["event"] == kind]


def losses(path, steps=3, **options):
    with engine(path, **options) as made:
        return [made.step([BATCH] * 2) for _ in range(steps)]


@pytest.mark.slow
def test_what_is_chosen_changes_no_number(tmp_path):
    said = []
    chosen = losses(tmp_path / "auto", budget="auto", say=said.append)
    assert chosen == losses(tmp_path / "fixed")
    (plan,) = events_of(tmp_path / "auto", "plan")
    assert plan["stated"] == [] and plan["machine"] == "cpu-2-core" and not plan["measured_now"]
    assert set(plan["on_host"]) == {"params", "optimizer", "activations", "gradients"}
    assert plan["step_seconds"] > 0 and len(plan["times"]) == 3
    assert plan["busiest"] in ("ssd", "cores")
    assert len(said) == 1 and said[0].startswith("plan: 100% of parameters, ")
    assert events_of(tmp_path / "fixed", "plan") == []


@pytest.mark.slow
def test_given_fractions_win_and_the_others_are_chosen(tmp_path):
    with engine(tmp_path, budget="auto", params_on_host=0.0, delayed_fraction=1.0) as made:
        placement = made._plan.placement
        assert placement.params == (False, False, False) and placement.optimizer == (True, True, True)
        made.step([BATCH] * 2)
        assert next(iter(made.operations))[1].delayed_fraction == 1.0
    (plan,) = events_of(tmp_path, "plan")
    assert plan["stated"] == ["params", "delayed"]
    with engine(tmp_path / "other") as made:  # without "auto" what is not given is as it was
        assert made._plan.placement.optimizer == (False, False, False)
        assert made.preflight.prediction is None


def test_a_fraction_that_does_not_fit_is_an_error(tmp_path):
    with pytest.raises(DoesNotFit, match=r"optimizer_on_host=1\.0"):
        engine(tmp_path, budget=holdfast.Budget(host="1MiB"), optimizer_on_host=1.0, params_on_host="auto")
    assert list(tmp_path.iterdir()) == []


def test_without_a_sample_nothing_can_be_planned(tmp_path):
    with pytest.raises(BadInput, match="pass sample="):
        engine(tmp_path, budget="auto", sample=None)
    with pytest.raises(BadInput, match='or be "auto"'):
        engine(tmp_path, delayed_fraction="most")


@pytest.mark.slow
def test_auto_is_less_than_what_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(step_planning, "free_host_bytes", lambda: 10**12)
    with engine(tmp_path, budget="auto") as made:
        assert 0.9 * 10**12 < made.preflight.host_budget < 0.92 * 10**12


@pytest.mark.slow
def test_a_machine_is_measured_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.delenv("HOLDFAST_MACHINE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("holdfast.measure.machine_probe.SECONDS", 0.2)
    monkeypatch.setattr("holdfast.measure.machine_probe.FILE_BYTES", 128 * 2**20)
    # so small a step may wait for the disk alone
    monkeypatch.setattr(profile_correction, "LEAST_BUSY_FRACTION", 0.0)
    said = []
    engine(tmp_path / "one", budget="auto", say=said.append).close()
    assert said[0] == "measuring this machine for a few seconds, once: the SSD"
    (kept,) = (tmp_path / "cache" / "holdfast").iterdir()
    before = load_machine(str(kept))
    said.clear()
    with engine(tmp_path / "two", budget="auto", say=said.append) as made:
        for _ in range(10):
            made.step([BATCH] * 2)
    assert [text[:5] for text in said] == ["plan:"]
    plans = [event for name in ("one", "two") for event in events_of(tmp_path / name, "plan")]
    assert [plan["measured_now"] for plan in plans] == [True, False]
    (corrected,) = events_of(tmp_path / "two", "corrected")
    after, found = load_machine(str(kept)), corrected["ratios"]
    assert corrected["steps"] == 4
    computing = found.get("cores") or found["compute"]  # on one core they take turns with updates
    assert after.compute_factor == pytest.approx(math.sqrt(min(max(computing, 0.5), 2.0)), rel=1e-3)
    assert after == replace(
        correct(before, found),
        host_memory_bytes=after.host_memory_bytes,
        ssd_capacity_bytes=after.ssd_capacity_bytes,
    )
    assert "corrected by measured steps" in kept.read_text()


@pytest.mark.slow
def test_a_disk_that_is_nearly_full_is_measured_by_a_small_file(tmp_path, monkeypatch):
    monkeypatch.delenv("HOLDFAST_MACHINE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("holdfast.measure.machine_probe.SECONDS", 0.2)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100 * 2**20))
    engine(tmp_path / "run", budget="auto").close()
    (kept,) = (tmp_path / "cache" / "holdfast").iterdir()
    assert re.search(r"file of (16|20|24)\.0 MiB", kept.read_text())
    kept.unlink()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=60 * 2**20))
    with pytest.raises(BadInput, match=r"60.0 MiB are free, and 64.0 MiB are needed"):
        engine(tmp_path / "other", budget="auto")


def test_what_a_run_needs_is_said_before_the_probe(tmp_path, monkeypatch):
    monkeypatch.delenv("HOLDFAST_MACHINE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**10))
    with pytest.raises(DoesNotFit, match=r"the run does not fit: .* needs at least"):
        engine(tmp_path / "run", budget="auto")


@pytest.mark.slow
def test_a_broken_profile_is_measured_again_and_a_named_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_MACHINE", str(tmp_path / "absent.toml"))
    with pytest.raises(BadInput, match=r"absent.toml cannot be read"):
        engine(tmp_path / "run", budget="auto")
    assert not (tmp_path / "run").exists()
    mine = tmp_path / "mine.toml"
    mine.write_text(to_toml(load_machine("cpu-2-core")))
    before = mine.read_bytes()
    monkeypatch.setenv("HOLDFAST_MACHINE", str(mine))
    losses(tmp_path / "run", steps=10, budget="auto")
    assert mine.read_bytes() == before
    assert events_of(tmp_path / "run", "corrected") == []


def test_what_nobody_waits_for_is_not_corrected():
    """Half of the step's time bounds nothing, whatever longer it took beside the rest."""
    servers = {"compute": "cores", "ssd_read": "ssd"}
    prediction: Any = SimpleNamespace(
        choice=SimpleNamespace(
            step_seconds=1.0, simulation=SimpleNamespace(machine=SimpleNamespace(server=servers.get))
        ),
        busy_seconds={"cores": 0.9, "ssd": 0.4},
        ssd_adjusted=False,
    )
    ops = [Span(KEY, "compute", 0.0, 1.35), Span(KEY, "ssd_read", 0.1, 1.4)]
    assert ratios(prediction, ops, [(0.0, 1.5)]) == {"cores": pytest.approx(1.5)}
    prediction.busy_seconds["ssd"] = 0.65
    assert ratios(prediction, ops, [(0.0, 1.5)])["ssd"] == pytest.approx(2.0)


def test_correcting_goes_half_way():
    machine = load_machine("cpu-2-core")
    slower = correct(machine, {"ssd": 1.44, "cores": 0.81})
    assert slower.ssd_read_bytes_per_second == pytest.approx(machine.ssd_read_bytes_per_second / 1.2)
    assert slower.ssd_mixed_bytes_per_second is None
    assert slower.compute_factor == pytest.approx(0.9)
    assert slower.update_elements_per_second == pytest.approx(machine.update_elements_per_second / 0.9)
    assert correct(machine, {"ssd": 100.0}).ssd_write_bytes_per_second == pytest.approx(
        machine.ssd_write_bytes_per_second / math.sqrt(2)
    )
    assert correct(machine, {}) == machine
    assert covered([(0, 4), (1, 2), (3, 5), (9, 20)], 2, 10) == 4


def test_limits_are_those_of_the_machine_that_is_planned_for():
    machine = load_machine("cpu-2-core")
    both = within(machine, (None, None, 10**8))
    assert (both.ssd_read_bytes_per_second, both.ssd_write_bytes_per_second) == (10**8, 10**8)
    one = within(machine, (10**7, None, None))
    assert one.ssd_write_bytes_per_second == machine.ssd_write_bytes_per_second
    assert one.ssd_read_bytes_per_second == 10**7


def test_timing_a_model_changes_nothing():
    torch.manual_seed(0)
    with holdfast.empty_parameters():
        model = Decoder(CONFIG)
    before = {name: (id(p), p.device.type) for name, p in model.named_parameters()}
    state = torch.random.get_rng_state()
    times = time_model(model, find_blocks(model), BATCH, torch.bfloat16, open_device("cpu"), seconds=0.1)
    assert min(times.forward_seconds, times.backward_seconds, times.head_seconds) > 0
    assert {name: (id(p), p.device.type) for name, p in model.named_parameters()} == before
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    assert all("forward" not in block.__dict__ for block in find_blocks(model).modules)


def test_times_become_operations_at_the_machines_rate():
    from holdfast.schedule.work import BlockWork, Work

    block = BlockWork(
        elements=1, param_bytes=1, trained_param_bytes=1, state_bytes=1, grad_bytes=1, forward_flop=10.0
    )
    work = Work(
        blocks=(block, block), input_bytes=1, resident_state_bytes=1, resident_param_bytes=1,
        resident_elements=1, unified=True,
    )  # fmt: skip
    machine = load_machine("cpu-2-core")
    times = MicroBatchTimes(forward_seconds=1.0, backward_seconds=5.0, head_seconds=2.0)
    timed = with_times(work, times, machine)
    rate = machine.device_flop_per_second
    assert [b.forward_flop for b in timed.blocks] == [rate, rate]
    assert timed.blocks[1].backward_work == 5 * rate and timed.head_flop == 2 * rate


@pytest.mark.slow
def test_an_event_is_plain_json(tmp_path):
    with engine(tmp_path, budget="auto", events=EventLog(None)) as made:
        text = json.dumps(made.preflight.prediction.event())
    assert "NaN" not in text
