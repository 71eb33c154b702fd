"""Records without rows of zeros: their bytes, the bits that come back from them, and what is refused."""

from __future__ import annotations

import copy
import warnings
from functools import partial

import pytest
import torch

from checkpoint.loops import same
from checkpoint.touching import Touching, batch, dense_bytes, touched_bytes
from holdfast.checkpoint.capture.staging_buffers import tensors_of
from holdfast.checkpoint.compression import touched_rows
from holdfast.checkpoint.compression.codecs import Exact, ShardingMismatch, decode
from holdfast.checkpoint.compression.touched_rows import TOUCHED, VALUES, leave_out_rows, order_of
from holdfast.checkpointer import Checkpointer
from holdfast.cli.diff import diff
from holdfast.cli.inspect import verify
from holdfast.distributed import stream_of
from holdfast.errors import Damaged
from holdfast.state.plain_tensors import TO_NAME
from holdfast.store.commit.retention import Keep
from holdfast.store.format.payload_layout import METADATA, Layout
from holdfast.store.log.chain import read_journal
from holdfast.store.run_store import LocalStore
from training import same_bits

SHAPES = {
    "embed": ((1003, 33), torch.float32), "narrow": ((5000, 3), torch.bfloat16), "stack": ((9, 40, 30), torch.float64),
    "flat": ((5000,), torch.float32), "small": ((3, 5), torch.float32), "scalar": ((), torch.float32),
    "none": ((0, 4), torch.float32), "bytes": ((4001, 2), torch.float8_e4m3fn),
}  # fmt: skip


def dense_part(grads, filler=b"\xa5"):
    """What the staging buffer holds; the memory of fillers and absent gradients holds anything."""
    names = sorted(grads, key=lambda name: order_of(name, grads[name].shape))
    kinds = [(f"{name}/grad", TO_NAME[grads[name].dtype], tuple(grads[name].shape)) for name in names]
    layout = Layout.build(kinds, METADATA)
    part = memoryview(bytearray(layout.file_bytes))
    part[:] = filler * len(part)
    part[: len(layout.header)] = layout.header
    for name, view in tensors_of(part, "/grad").items():
        view.copy_(grads[name])
    return part


def gradients(density, seed=0):
    """Of each shape, with so many of its rows touched."""
    torch.manual_seed(seed)
    grads = {}
    for name, (shape, dtype) in SHAPES.items():
        rows = shape[0] if len(shape) > 1 else 1
        mask = (
            (torch.rand(rows) < density).view(-1, *[1] * (len(shape) - 1))
            if shape
            else torch.rand(()) < density
        )
        grads[name] = torch.where(mask, torch.randn(shape), 0.0).to(dtype)
    return grads


def back(packed, grads, without=(), spreads=None):
    part, codec = packed
    spreads = {} if spreads is None else spreads
    return decode({"codec": codec, "without": list(without)}, part, grads, spreads)


def held_bytes(grads):
    rows = [
        g.contiguous().view(len(g) if g.dim() > 1 else 1, -1).view(torch.uint8) for g in grads if g.numel()
    ]
    return sum(int(each.any(1).sum()) * each.shape[1] for each in rows)


@pytest.mark.parametrize("piece", [64, touched_rows.PIECE])
@pytest.mark.parametrize("density", [0.0, 0.02, 0.5, 0.9])
def test_rows_come_back_bit_for_bit_and_zeros_take_nothing(monkeypatch, density, piece):
    monkeypatch.setattr(touched_rows, "PIECE", piece)  # rows that are moved one by one
    grads = gradients(density)
    without = ["flat"]
    present = {name: grad for name, grad in grads.items() if name not in without}
    packed = leave_out_rows(dense_part(grads), without)
    assert packed is not None and len(packed[0]) % 4096 == 0
    assert leave_out_rows(dense_part(grads, b"\0"), without) == packed  # all of it is determined
    bits = sum(-(-(len(g) if g.dim() > 1 else 1) // 8) for g in present.values())
    small = 64 * len(grads) + grads["small"].nbytes + 4
    assert len(packed[0]) <= held_bytes(present.values()) + bits + small + 2 * 4096
    found = back(packed, grads, without)
    assert found.keys() == present.keys()
    assert all(same_bits(found[name], grad) for name, grad in present.items())


@pytest.mark.parametrize("value", [-0.0, float("nan"), 1e-45])
@pytest.mark.parametrize("column", [0, 20, 32])
def test_only_rows_whose_bits_are_all_zero_are_left_out(value, column):
    grad = torch.zeros(1003, 33)
    grad[17, column] = value
    packed = leave_out_rows(dense_part({"embed": grad}), [])
    assert packed is not None and len(packed[0]) < 3 * 4096
    assert same_bits(back(packed, {"embed": grad})["embed"], grad)


@pytest.mark.parametrize("density", [1.0, 0.995])
def test_dense_gradients_stay_as_they_are(density):
    part = dense_part(gradients(density))
    before = bytes(part)
    assert leave_out_rows(part, []) is None and bytes(part) == before


def test_memory_is_used_again_whatever_became_of_it():
    """Optimizers write over gradients, and a row may be touched in one step and not in the next."""
    spreads = {}
    for seed, density in enumerate([0.02, 0.3, 0.0, 1.0, 0.02, 0.5]):
        grads = gradients(density, seed)
        packed = leave_out_rows(dense_part(grads), [])
        if packed is None:
            continue
        found = back(packed, grads, spreads=spreads)
        assert all(same_bits(found[name], grad) for name, grad in grads.items()), seed
        if seed % 2:
            torch._foreach_add_([found["embed"], found["stack"]], 1.0)
    assert len(spreads) == 5


# What contradicts itself


def array(part, key):
    entry = Layout.parse(part)[key]
    return part[entry.offset : entry.end]


def one_row_more(part):
    array(part, TOUCHED)[3] ^= 1


def one_row_fewer(part):
    bits = array(part, TOUCHED)
    bits[[*bits].index(max(bits))] = 0


def a_row_that_is_not_there(part):
    """In place of one that is."""
    one_row_fewer(part)
    array(part, TOUCHED)[1003 // 8] |= 0x80


def cut(part, **lengths):
    """The arrays with other lengths, behind a header that fits them."""
    kept = {key: bytes(array(part, key)) for key in (VALUES, TOUCHED)}
    kept = {key: data[: lengths.get(key[:4])] for key, data in kept.items()}
    layout = Layout.build([(key, "U8", (len(data),)) for key, data in kept.items()], METADATA)
    part[:] = bytes(len(part))
    part[: len(layout.header)] = layout.header
    for key, data in kept.items():
        part[layout[key].offset : layout[key].end] = data


def other_arrays(part):
    layout = Layout.build([("values/U8", "U8", (64,)), ("rows/U8", "U8", (1,))], METADATA)
    part[: len(layout.header)] = layout.header


def rows_of_another_type(part):
    layout = Layout.build([("values/U8", "F32", (16,)), (TOUCHED, "U8", (126,))], METADATA)
    part[: len(layout.header)] = layout.header


def arrays_beyond_the_part(part):
    layout = Layout.build([(VALUES, "U8", (1 << 20,)), (TOUCHED, "U8", (126,))], METADATA)
    part[: len(layout.header)] = layout.header


def no_header(part):
    part[:8] = b"\xff" * 8


HOSTILE = [
    one_row_more, one_row_fewer, a_row_that_is_not_there, partial(cut, valu=-64), partial(cut, touc=-1),
    partial(cut, valu=0), partial(cut, touc=0), other_arrays, rows_of_another_type, arrays_beyond_the_part, no_header,
]  # fmt: skip


@pytest.mark.parametrize("spoil", HOSTILE)
def test_a_part_that_contradicts_itself_is_refused(spoil):
    torch.manual_seed(0)
    grad = torch.zeros(1003, 16)
    grad[::50] = torch.randn(21, 16)
    part, codec = leave_out_rows(dense_part({"embed": grad}), [])
    spoil(part)
    with pytest.raises(Damaged):
        back((part, codec), {"embed": grad})


@pytest.mark.parametrize("other", [{"embed": (16, 1003)}, {"embed": (1003, 17)}, {"word": (1003, 16)}])
def test_a_part_of_other_shapes_or_names_is_not_used(other):
    packed = leave_out_rows(dense_part({"embed": torch.zeros(1003, 16)}), [])
    with pytest.raises(ShardingMismatch):
        back(packed, {name: torch.zeros(shape) for name, shape in other.items()})


# Runs


OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "nesterov": partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
}


class Run:
    """A model that is trained, its Checkpointer, and the state and the touched bytes of each step."""

    def __init__(self, root, optimizer="adamw", seed=0, scaled=False, step=None, **options):
        torch.manual_seed(seed)
        self.model = Touching()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
        options = {"base_every": 1000, "keep": Keep(9), **options}
        self.checkpointer = Checkpointer(
            root,
            model=self.model,
            optimizer=self.optimizer,
            scaler=self.scaler,
            **options,
        )
        self.done = self.checkpointer.resume(step=step)
        self.states, self.touched = {self.done: self.state()}, {}

    def state(self):
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()["state"]))

    def train(self, steps):
        for step in range(self.done + 1, steps + 1):
            loss = self.model(*batch(self.model, step))
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            self.touched[step] = touched_bytes(self.model)
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.optimizer.zero_grad()
            self.checkpointer.step()
            self.states[step] = self.state()
        return self


def came_back(root, run, steps, **options):
    """Each of ``steps`` has the bits that it had in ``run``."""
    for step in steps:
        again = Run(root, seed=1, step=step, **options)
        assert again.done == step and same(again.state(), run.states[step])
        again.checkpointer.close(save=False)


def records_of(root):
    with LocalStore.read(root) as reader:
        return read_journal(reader, stream_of(0)).records


def kinds_of(record):
    return [update["codec"]["kind"] for update in record.about["updates"]]


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("optimizer, scaled", [("adamw", False), ("fused", True), ("nesterov", False)])
def test_steps_that_touch_little_take_little_and_come_back(tmp_path, optimizer, scaled):
    """A record takes, beside its JSON, the bytes of touched rows and at most 5 % more."""
    run = Run(tmp_path, optimizer, scaled=scaled).train(6)
    run.checkpointer.close(save=False)  # nothing is saved that a kill would not leave
    records = records_of(tmp_path)
    assert [*records] == [*range(1, 7)]
    for step, record in records.items():
        assert kinds_of(record) == ["rows"]
        assert record.payload_bytes <= 1.05 * run.touched[step] < 0.3 * dense_bytes(run.model)
    assert verify(str(tmp_path), as_json=True)
    assert not diff(f"{tmp_path}@4", f"{tmp_path}@5", as_json=True)
    assert diff(f"{tmp_path}@5", f"{tmp_path}@5", as_json=True)
    came_back(tmp_path, run, [6, 3], optimizer=optimizer, scaled=scaled)


def test_what_is_compressed_has_no_rows_of_zeros_either(tmp_path):
    run = Run(tmp_path, codec=Exact(compress=True)).train(3)
    run.checkpointer.close(save=False)
    for step, record in records_of(tmp_path).items():
        assert kinds_of(record) == ["squeezed"]
        assert record.payload_bytes <= 1.05 * run.touched[step]


def test_dense_steps_between_others_come_back(tmp_path):
    """The buffer that a shortened record was written from holds the next one whole."""
    run = Run(tmp_path)
    for step in range(1, 13):
        run.model(*batch(run.model, step)).backward()
        if step % 3 == 0:
            for parameter in run.model.parameters():
                parameter.grad = torch.randn_like(parameter)
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.checkpointer.step()
        run.states[step] = run.state()
    run.checkpointer.close(save=False)
    records = records_of(tmp_path)
    assert [kinds_of(records[step]) for step in range(1, 7)] == [["rows"], ["rows"], ["exact"]] * 2
    came_back(tmp_path, run, [12, 10])


def test_a_record_whose_rows_contradict_it_ends_the_run_at_the_step_before(tmp_path, monkeypatch):
    """One that some program wrote so, with checksums that hold."""
    real, calls = leave_out_rows, []

    def spoilt(part, without):
        packed = real(part, without)
        calls.append(1)
        if len(calls) == 5:
            one_row_more(packed[0])
        return packed

    monkeypatch.setattr("holdfast.checkpoint.compression.codecs.leave_out_rows", spoilt)
    run = Run(tmp_path).train(6)
    run.checkpointer.close(save=False)
    with pytest.warns(UserWarning, match="The run continues after step 4"):
        again = Run(tmp_path, seed=1)
    assert again.done == 4 and same(again.state(), run.states[4])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.train(6)
        again.checkpointer.close()
    assert same(again.states[6], run.states[6])


def test_intervals_are_chosen_by_what_records_take_on_the_disk(tmp_path):
    """Before the first record of a new process, by those that it has read."""
    run = Run(tmp_path).train(6)
    tuner = run.checkpointer._backend.pace.tuner
    run.checkpointer.wait()
    written = sum(record.payload_bytes for record in records_of(tmp_path).values()) / 6
    run.train(7)
    assert tuner.measured.record_bytes == pytest.approx(written, rel=0.1)
    assert written < 0.3 * dense_bytes(run.model)
    assert tuner.measured.staged_bytes >= dense_bytes(run.model)
    run.checkpointer.close(save=False)
    again = Run(tmp_path)
    assert again.checkpointer._backend.pace.tuner.measured.record_bytes == pytest.approx(written, rel=0.1)
    again.checkpointer.close(save=False)
