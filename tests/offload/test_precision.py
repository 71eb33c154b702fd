"""Without ``precision=`` a fresh run computes in what is fast, and a run that exists in what it was begun with."""

from __future__ import annotations

import pytest

import holdfast
from holdfast.errors import BadInput
from holdfast.offload import api
from holdfast.offload.engine_progress import UserState
from holdfast.store.run_store import LocalStore
from support.grouped import grouped
from training import adamw, batches, decoder, differing, stored, warm_up


@pytest.fixture
def measured(monkeypatch):
    """``measured("fp32")``: from here on this processor is measured to be fast in fp32."""

    def set_fast(dtype):
        seconds = {"float32": 1.0, "bfloat16": 3.0 if dtype == "fp32" else 1.0}
        monkeypatch.setattr("holdfast.measure.hardware_rates.product_seconds", seconds.__getitem__)

    return set_fast


def opened(directory, **options):
    model = decoder(blocks=3)
    optimizer = adamw(model)
    return holdfast.offload(model, optimizer, directory, **grouped(scheduler=warm_up(optimizer), **options))


def trained(directory, stop, **options):
    """Go on to step ``stop``, and return the preflight."""
    with opened(directory, **options) as engine:
        while engine.steps_done < stop:
            engine.step(batches(engine.steps_done, 2))
        return engine.preflight


def newest(directory):
    return LocalStore.read(directory, direct=False).head()


@pytest.mark.parametrize("fast", ["fp32", "bf16"])
def test_a_fresh_run_computes_in_what_is_measured_to_be_fast(tmp_path, measured, fast):
    measured(fast)
    sizes, said = {"sample": batches(0, 1)[0], "micro_batches": 2}, []
    found = trained(tmp_path / "run", 2, say=said.append, **sizes)
    expected = trained(tmp_path / "asked", 2, dtype=fast, say=said.append, **sizes)
    assert (found.dtype, expected.dtype) == (fast, fast)
    assert newest(tmp_path / "run").progress["settings"]["dtype"] == fast
    assert differing(stored(tmp_path / "run"), stored(tmp_path / "asked")) == []
    assert len(said) == (fast == "fp32")
    assert all("fp32, in which this processor is faster than in bf16" in line for line in said)
    for each in ("state_bytes", "read_bytes_per_step", "written_bytes_per_step", "needed_bytes"):
        assert getattr(found, each) == getattr(expected, each)


@pytest.mark.parametrize("begun", ["fp32", "bf16", "fp16", "auto"])
def test_a_run_keeps_its_dtype_though_another_is_fast_now(tmp_path, measured, begun):
    """No warning comes, which would be an error here."""
    first = "fp32" if begun == "auto" else begun
    measured("bf16" if first == "bf16" else "fp32")
    trained(tmp_path / "whole", 4, dtype=first)
    trained(tmp_path / "run", 2, dtype=begun)
    measured("fp32" if first == "bf16" else "bf16")
    assert trained(tmp_path / "run", 4).dtype == first
    assert differing(stored(tmp_path / "run"), stored(tmp_path / "whole")) == []


def test_another_dtype_by_request_is_warned_of_and_kept_then(tmp_path, measured):
    measured("bf16")
    trained(tmp_path, 1)
    with pytest.warns(UserWarning, match="precision was bf16 and is fp32"):
        assert trained(tmp_path, 2, dtype="fp32").dtype == "fp32"
    assert trained(tmp_path, 3).dtype == "fp32"


def test_a_loss_scale_that_moves_otherwise_is_warned_of(tmp_path):
    trained(tmp_path, 1, dtype="fp16", loss_scale=holdfast.LossScale(growth_interval=3))
    with pytest.warns(UserWarning, match="loss_scale_rules was .*'growth_interval': 3.* and is .*2000"):
        trained(tmp_path, 2)


def test_what_fp16_cannot_is_refused_where_the_run_is_in_it(tmp_path):
    trained(tmp_path, 1, dtype="fp16")
    before = newest(tmp_path).ref
    with pytest.raises(BadInput, match="per_block"):
        opened(tmp_path, clip_norm=1.0, clipping="per_block")
    assert newest(tmp_path).ref == before


@pytest.mark.parametrize("lost", ["the index", "the newest manifest"])
def test_the_dtype_is_found_in_a_damaged_run(tmp_path, measured, lost):
    trained(tmp_path, 3, dtype="bf16")
    manifests = sorted((tmp_path / "commits").iterdir())
    files = list((tmp_path / "index").iterdir()) if lost == "the index" else manifests[-1:]
    assert files and len(manifests) == 2
    for path in files:
        path.write_bytes(b"")
    measured("fp32")
    with pytest.warns(UserWarning) as warned:
        assert trained(tmp_path, 4).dtype == "bf16"
    assert not [each for each in warned if "other settings" in str(each.message)]


def test_a_run_of_the_first_versions_is_in_bf16(tmp_path, measured, monkeypatch):
    with monkeypatch.context() as earlier:
        now = UserState.now
        earlier.setattr(
            UserState, "now", lambda self: {k: v for k, v in now(self).items() if k != "settings"}
        )
        trained(tmp_path, 1, dtype="bf16")
    assert "settings" not in newest(tmp_path).progress
    measured("fp32")
    assert trained(tmp_path, 2).dtype == "bf16"


def test_a_run_that_another_process_has_begun_meanwhile_keeps_its_dtype(tmp_path, measured, monkeypatch):
    """It had no run while this process planned."""

    def wait(*_):
        monkeypatch.undo()
        trained(tmp_path / "run", 2, dtype="bf16")

    trained(tmp_path / "whole", 3, dtype="bf16")
    measured("fp32")
    monkeypatch.setattr(api, "wait_for_run", wait)
    assert trained(tmp_path / "run", 3).dtype == "bf16"
    assert differing(stored(tmp_path / "run"), stored(tmp_path / "whole")) == []


def test_mezo_and_another_run_as_source_are_measured_too(tmp_path, measured):
    """A fresh directory is a fresh run, whatever it begins from."""
    trained(tmp_path / "before", 1, dtype="bf16")
    measured("fp32")
    assert trained(tmp_path / "run", 0, source=holdfast.From(tmp_path / "before")).dtype == "fp32"
    model = decoder(blocks=2)
    with holdfast.offload(model, holdfast.optim.MeZO(model.parameters()), tmp_path / "mezo") as engine:
        engine.step(batches(0, 1))
        assert engine.preflight.dtype == "fp32"
