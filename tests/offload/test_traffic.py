"""The bytes that an engine moves are those of its operation list, and those of the formulas."""

from __future__ import annotations

from collections import Counter

import pytest

import holdfast
from combined import one_in
from holdfast.schedule.operations import as_guessed, traffic
from holdfast.schedule.step_builder import REDO_SLOTS
from holdfast.schedule.work import StepShape
from support.grouped import grouped
from training import CONTEXT, adamw, batches, decoder

WIDTH, ROWS = 64, 2
INPUT_BYTES = ROWS * CONTEXT * WIDTH * 4
"""Of one micro-batch in fp32: one page."""
PLACEMENTS = {
    "ssd": {"activations_on_host": 0.0},
    "host": {"params_on_host": 1.0, "optimizer_on_host": 1.0},
    "mixed": {"params_on_host": 0.5, "optimizer_on_host": 0.34, "activations_on_host": 0.5},
}
TURNED = [("plain", 0.5, 0.0), ("plain", 1.0, 1.0), ("snake", 0.0, 0.5), ("snake", 0.25, 1.0)]
"""Orders with what is delayed and what is computed again."""


def model(blocks):
    """Every matrix is a multiple of 16 KiB, so that files have hardly any filler."""
    return decoder(blocks=blocks, width=WIDTH, kv_heads=2, hidden=128)


def offload(directory, blocks, dtype="fp32", **options):
    made = model(blocks)
    made.blocks[0].mlp.up.weight.requires_grad_(False)
    return holdfast.offload(
        made, adamw(made), directory, **grouped(dtype=dtype, sample=batches(0, 1)[0], **options)
    )


def moved_by(engine, call):
    """Bytes by (lane, what) of ``call`` and all that it leaves to be done. Setting up and verifying came
    before."""
    before = engine.traffic()
    call()
    engine.wait()
    moved = Counter(engine.traffic())
    moved.subtract(before)
    return {key: nbytes for key, nbytes in moved.items() if nbytes}


def listed(engine, schedule, **shape):
    """The same of an operation list."""
    return dict(traffic(engine.operations[schedule, StepShape(**shape)]))


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize(
    "blocks, schedule, placement, clip_norm",
    one_in(3, [1, 2, 4], ["vertical", "horizontal"], PLACEMENTS, [None, 1.0]),
)
def test_a_step_moves_the_bytes_of_its_list(tmp_path, blocks, schedule, placement, clip_norm):
    with offload(
        tmp_path, blocks, schedule=schedule, clip_norm=clip_norm, commit_every=2, **PLACEMENTS[placement]
    ) as engine:
        for step, count in enumerate((1, 3, 2, 2)):
            moved = moved_by(engine, lambda step=step, count=count: engine.step(batches(step, count)))
            clipping = "none" if clip_norm is None else "defer"
            shape = {"micro_batches": count, "clipping": clipping, "commit": step % 2 == 1}
            assert moved == listed(engine, schedule, **shape), (step, count)
        moved = moved_by(engine, lambda: engine.evaluate(batches(0, 3)))
        assert moved == listed(engine, "evaluate", micro_batches=3)


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("blocks, placement, turned", one_in(2, [1, 4], PLACEMENTS, TURNED))
def test_a_delayed_or_turned_step_moves_the_bytes_of_its_list(tmp_path, blocks, placement, turned):
    order, delayed_fraction, recomputed_fraction = turned
    way = {
        "order": order,
        "delayed_fraction": delayed_fraction,
        "recomputed_fraction": recomputed_fraction,
    }
    with offload(tmp_path, blocks, commit_every=2, **way, **PLACEMENTS[placement]) as engine:
        for step, count in enumerate((1, 3, 2)):
            moved = moved_by(engine, lambda step=step, count=count: engine.step(batches(step, count)))
            shape = {"micro_batches": count, "commit": step % 2 == 1, **way}
            assert moved == listed(engine, "vertical", **shape), (step, count)
        moved = moved_by(engine, lambda: engine.evaluate(batches(0, 3)))
        assert moved == listed(engine, "evaluate", micro_batches=3)


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize(
    "clipping, delayed_fraction", [("speculate", 0.0), ("speculate", 0.5), ("per_block", 0.5)]
)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_step_that_guesses_moves_the_bytes_of_its_list_and_where_it_was_right_no_others(
    tmp_path, placement, clipping, delayed_fraction
):
    shape = {"micro_batches": 2, "clipping": clipping, "delayed_fraction": delayed_fraction}
    for bound, right in ((1e-3, False), (1e3, True)):
        options = {"clipping": clipping, "delayed_fraction": delayed_fraction, **PLACEMENTS[placement]}
        with offload(tmp_path / str(bound), 4, clip_norm=bound, **options) as engine:
            for step in range(3):
                engine.trace(spans := [])
                moved = moved_by(engine, lambda step=step: engine.step(batches(step, 2)))
                made = engine.operations["vertical", StepShape(**shape)]
                assert sum(span.nbytes for span in spans) == sum(moved.values())
                assert moved == dict(traffic(as_guessed(made) if right else made)), step
            most = max(unit.state_bytes for unit in engine._run.blocks)
            held = engine.last["buffers"].get("redone state", 0)
            assert held <= (0 if right or clipping == "per_block" else REDO_SLOTS * most)


@pytest.mark.slow
def test_delaying_moves_nothing_twice_and_a_snake_saves_three_transfers_per_turn(tmp_path):
    """And the input of the last block for its first micro-batch, which is used at once, needs not be kept."""
    n, count, moved = 4, 3, {}
    for name, way in (("plain", {}), ("delayed", {"delayed_fraction": 0.5}), ("snake", {"order": "snake"})):
        with offload(tmp_path / name, n, **PLACEMENTS["ssd"], **way) as engine:
            engine.step(batches(0, count))
            engine.wait()
            moved[name] = moved_by(engine, lambda engine=engine: engine.step(batches(1, count)))
    assert moved["delayed"] == moved["plain"]
    saved = {
        key: nbytes - moved["snake"][key]
        for key, nbytes in moved["plain"].items()
        if nbytes != moved["snake"][key]
    }
    assert saved == {
        ("upload", "upload_input"): (n - 1) * INPUT_BYTES,
        ("download", "download_input"): INPUT_BYTES,
        ("upload", "upload_input_grad"): (n - 1) * INPUT_BYTES,
        ("download", "download_input_grad"): (n - 1) * INPUT_BYTES,
    }


@pytest.mark.slow
def test_a_skipped_step_moves_the_bytes_of_its_list_less_what_did_not_change(tmp_path):
    with offload(tmp_path, 3) as engine:
        engine.step(batches(0, 2))
        engine.wait()
        handle = engine._run.model.head.register_forward_hook(lambda *hooked: hooked[2] * float("nan"))
        moved = moved_by(engine, lambda: engine.step(batches(1, 2)))
        handle.remove()
        expected = listed(engine, "vertical", micro_batches=2)
        resident = engine._run.resident.state_bytes
        assert moved["ssd_write", "store_resident"] == resident
        assert ("ssd_write", "store_params") not in moved and ("ssd_write", "store_state") not in moved
        assert all(moved[key] == nbytes for key, nbytes in expected.items() if key[0] != "ssd_write")


def rounded(nbytes, unit=4096):
    """Whole pages: how much a file or a copy may be larger than what it holds."""
    return pytest.approx(nbytes, abs=unit)


@pytest.mark.slow
@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("count", [5, 1, 2])
def test_vertical_traffic_is_that_of_the_formulas(tmp_path, count):
    """Of n equal blocks of P parameters in bf16, with inputs of S bytes: parameters cross 2n - 1 times and
    gradients n times whatever M; inputs and their gradients (5n - 4) M times. On the SSD, parameters are read as
    often: they are 2 P of 12.125 P bytes of state, of which an update reads the others and writes all. Inputs of n - 1
    blocks are read and written."""
    n = 4
    with offload(tmp_path, n, dtype="bf16", **PLACEMENTS["ssd"]) as engine:
        engine.step(batches(0, count))
        engine.wait()
        moved = moved_by(engine, lambda: engine.step(batches(1, count)))
        elements = [sum(p.numel() for p in block.parameters()) for block in model(n).blocks]
        frozen = model(n).blocks[0].mlp.up.weight.numel()
        resident = sum(p.numel() for p in model(n).parameters()) - sum(elements)
    total, last, s = sum(elements), elements[-1], INPUT_BYTES // 2
    trained = total - frozen
    filler = (
        2 + 2 * 3
    ) * 16384  # of a file: header and counters; what follows a norm starts at the next 16 KiB
    assert moved["upload", "upload_params"] == rounded(2 * (2 * total - last), 16 * 4096)
    assert moved["download", "download_grads"] == rounded(4 * trained, n * 4096)
    assert moved["download", "download_input"] == n * count * s
    assert moved["upload", "upload_input"] == (2 * n - 2) * count * s
    assert moved["download", "download_input_grad"] == moved["upload", "upload_input_grad"]
    assert moved["download", "download_input_grad"] == (n - 1) * count * s
    assert moved["ssd_read", "load_params"] == moved["upload", "upload_params"]
    assert ("ssd_write", "store_params") not in moved
    assert moved["ssd_read", "load_state"] == rounded(10.125 * trained, n * filler)
    assert moved["ssd_write", "store_state"] == rounded(12.125 * trained, n * filler)
    not_read = moved["ssd_write", "store_state"] - moved["ssd_read", "load_state"]
    assert not_read == rounded(2 * trained, n * 3 * 4096)  # with two pages of header, and the rest of one
    assert moved["ssd_write", "store_resident"] == rounded(12 * resident, filler)
    assert moved["ssd_read", "load_input"] == moved["ssd_write", "store_input"] == (n - 1) * count * 4096


@pytest.mark.slow
def test_horizontal_traffic_is_that_of_the_formulas(tmp_path):
    """Parameters cross (2n - 1) M times and the sum of gradients 2 M - 1 times, inputs twice but for the last
    block's, their gradients never."""
    n, count = 4, 3
    with offload(tmp_path, n, dtype="bf16", schedule="horizontal") as engine:
        once = moved_by(engine, lambda: engine.step(batches(0, 1)))
        moved = moved_by(engine, lambda: engine.step(batches(1, count)))
    s = INPUT_BYTES // 2
    assert moved["upload", "upload_params"] == count * once["upload", "upload_params"]
    assert moved["ssd_read", "load_params"] == count * once["ssd_read", "load_params"]
    assert moved["download", "download_grads"] == count * once["download", "download_grads"]
    assert moved["upload", "upload_grads"] == (count - 1) * once["download", "download_grads"]
    assert moved["download", "download_input"] == moved["upload", "upload_input"] == (n - 1) * count * s
    assert ("download", "download_input_grad") not in moved
    assert ("ssd_write", "store_params") not in moved
    assert moved["ssd_write", "store_state"] == once["ssd_write", "store_state"]
    assert moved["ssd_read", "load_state"] == once["ssd_read", "load_state"]


@pytest.mark.slow
def test_inputs_that_are_no_whole_pages_take_whole_pages_on_the_ssd(tmp_path):
    with offload(tmp_path, 3, **PLACEMENTS["ssd"]) as engine:
        tokens = [{name: t[:, :5] for name, t in batch.items()} for batch in batches(0, 2)]
        moved = moved_by(engine, lambda: engine.step(tokens))
        assert moved["download", "download_input"] == 3 * 2 * ROWS * 5 * WIDTH * 4
        assert moved["ssd_write", "store_input"] == moved["ssd_read", "load_input"] == 2 * 2 * 4096


def test_tensors_that_code_between_blocks_makes_are_counted_by_themselves(tmp_path):
    made = model(3)
    for block in made.blocks[:2]:
        block.register_forward_hook(lambda module, args, output: output * 2)
    with holdfast.offload(made, adamw(made), tmp_path, precision="fp32") as engine:
        moved = moved_by(engine, lambda: engine.step(batches(0, 2)))
    assert moved["download", "between"] == 2 * 2 * INPUT_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("on_host", [0.0, 0.5, 1.0])
def test_a_save_writes_what_stays_in_memory_and_nothing_else(tmp_path, on_host):
    with offload(tmp_path, 4, commit_every=0, optimizer_on_host=on_host) as engine:
        engine.step(batches(0, 1))
        engine.wait()
        run = engine._run
        moved = moved_by(engine, engine.save)
        stays = sum(unit.state_bytes for unit, here in zip(run.blocks, run.placement.optimizer) if here)
        expected = {
            ("ssd_write", "store_state"): stays,
            ("ssd_write", "store_resident"): run.resident.state_bytes,
        }
        assert moved == {key: nbytes for key, nbytes in expected.items() if nbytes}


@pytest.mark.slow
def test_setting_up_writes_everything_once_and_resuming_reads_it(tmp_path):
    with offload(tmp_path, 3) as engine:
        files = sum(path.stat().st_size for path in tmp_path.glob("data/*.0.safetensors"))
        copies = sum(unit.copy_bytes for unit in engine._run.blocks)
        assert engine.traffic() == {("ssd_write", "state"): files, ("ssd_write", "params"): copies}
    with offload(tmp_path, 3) as engine:
        moved = engine.traffic()
        assert moved["ssd_read", "verify"] == moved["ssd_read", "state"] == files
        assert moved["ssd_write", "params"] == copies
        assert ("ssd_write", "state") not in moved


@pytest.mark.slow
def test_the_preflight_says_what_a_step_reads_and_writes(tmp_path):
    for number, options in enumerate(({}, PLACEMENTS["ssd"], PLACEMENTS["host"], {"schedule": "horizontal"})):
        with offload(tmp_path / str(number), 3, micro_batches=2, **options) as engine:
            moved = moved_by(engine, lambda engine=engine: engine.step(batches(0, 2)))
            for lane, said in (
                ("ssd_read", engine.preflight.read_bytes_per_step),
                ("ssd_write", engine.preflight.written_bytes_per_step),
            ):
                assert sum(nbytes for (where, _), nbytes in moved.items() if where == lane) == said
