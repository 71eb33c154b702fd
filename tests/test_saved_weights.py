"""Copies of weights: what they hold, who reads them, and that none of them is a step to resume."""

from __future__ import annotations

import os
import signal
import warnings

import pytest
import torch
from safetensors.torch import load_file

from checkpoint.loops import make, same
from holdfast.checkpointer import Checkpointer
from holdfast.cli.convert import ConvertOptions, convert
from holdfast.cli.inspect import ls, show, verify
from holdfast.errors import BadInput, NoCommit
from holdfast.opening import is_weights_alone
from holdfast.sources import From
from holdfast.store.commit.retention import Keep, used_bytes
from holdfast.store.disk import Disk
from test_checkpointer import ADAMW, go_on, reference, start

WEIGHTS = Keep(1, weights=2)


def trained(root, steps, feature="batchnorm", keep=WEIGHTS, resume=None, **options):
    loop, checkpointer = start(root, feature, keep=keep, base_every=1000, **options)
    with checkpointer:
        checkpointer.resume(step=resume)
        go_on(loop, checkpointer, steps)
        checkpointer.save()
    return loop


def copies(root):
    return sorted(path.name for path in (root / "weights").iterdir())


def copy_of(root, step, timeline=1):
    return root / "weights" / f"step-{step:012d}.t{timeline:04d}.safetensors"


def test_copies_hold_the_weights_of_their_steps(tmp_path):
    states, _ = reference(5)
    trained(tmp_path, 5)
    assert copies(tmp_path) == [copy_of(tmp_path, step).name for step in (2, 4)]
    for step in (2, 4):
        assert same(load_file(copy_of(tmp_path, step)), states[step]["model"])


def test_copies_are_read_where_states_are(tmp_path, capsys):
    trained(tmp_path / "run", 5)
    ls(tmp_path / "run", as_json=False)
    assert "weights: steps 2, 4" in capsys.readouterr().out
    show(str(copy_of(tmp_path / "run", 2)), as_json=False)
    assert "first.weight" in capsys.readouterr().out
    assert verify(str(copy_of(tmp_path / "run", 2)), as_json=False)
    options = ConvertOptions(to="safetensors")
    for name in (f"{tmp_path}/run@2", str(copy_of(tmp_path / "run", 2))):
        out = tmp_path / f"{len(name)}.safetensors"
        convert(name, out, options, as_json=False)
        assert same(load_file(out), load_file(copy_of(tmp_path / "run", 2)))


def test_copy_is_no_step_to_resume_and_a_training_may_begin_from_it(tmp_path):
    states, _ = reference(5)
    trained(tmp_path / "run", 5)
    _, checkpointer = start(tmp_path / "run", keep=WEIGHTS)
    with pytest.raises(
        NoCommit, match=r"Its weights alone are in .*step-000000000002.t0001.*no step to resume"
    ):
        checkpointer.resume(step=2)
    for source in (f"{tmp_path}/run@2", From(copy_of(tmp_path / "run", 2))):
        loop = make(ADAMW, "batchnorm", seed=3)
        root = tmp_path / str(type(source).__name__)
        with Checkpointer(root, model=loop.model, optimizer=loop.optimizers) as checkpointer:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                assert checkpointer.resume(source=source) == 0
            assert any("no optimizer state" in str(each.message) for each in told)
            assert same(loop.model.state_dict(), states[2]["model"])


def test_a_step_of_an_abandoned_timeline_with_its_records_is_no_weights_alone(tmp_path):
    """Its base is on the present line too, which does not lead as far."""
    states, _ = reference(5)
    keep = Keep(9, weights=2)
    trained(tmp_path / "run", 5, keep=keep)
    trained(tmp_path / "run", 3, keep=keep, resume=1)
    assert copy_of(tmp_path / "run", 4).exists() and not is_weights_alone(tmp_path / "run", 4, 1)
    loop, checkpointer = start(tmp_path / "other")
    with checkpointer:
        assert checkpointer.resume(source=f"{tmp_path}/run@4.t1") == 4
    assert same(loop.state(), states[4])


def test_frozen_parameters_are_left_out(tmp_path):
    trained(tmp_path, 2, "frozen")
    assert "first.bias" not in load_file(copy_of(tmp_path, 2))
    assert "first.weight" in load_file(copy_of(tmp_path, 2))


def test_tied_weights_are_there_once_and_load_under_both_names(tmp_path):
    loop = trained(tmp_path / "run", 2, "tied")
    assert "third.weight" not in load_file(copy_of(tmp_path / "run", 2))
    other = make(ADAMW, "tied", seed=3)
    with Checkpointer(tmp_path / "other", model=other.model, optimizer=other.optimizers) as checkpointer:
        with pytest.warns(UserWarning):
            checkpointer.resume(source=copy_of(tmp_path / "run", 2))
        assert torch.equal(other.model.third.weight, loop.model.third.weight)


def test_kill_before_a_copy_is_whole_is_made_good_at_the_resume(tmp_path):
    states, _ = reference(4)
    trained(tmp_path, 3)
    half = tmp_path / "weights" / (copy_of(tmp_path, 4).name + ".tmp")
    half.write_bytes(b"half")
    copy_of(tmp_path, 2).unlink()
    trained(tmp_path, 2, resume=3)
    assert copies(tmp_path) == []
    trained(tmp_path, 4)
    assert [name.split(".")[0] for name in copies(tmp_path)] == ["step-000000000004"]
    copy_of(tmp_path, 4, 3).unlink()
    trained(tmp_path, 4)
    assert copies(tmp_path) == [copy_of(tmp_path, 4, 4).name]
    assert same(load_file(copy_of(tmp_path, 4, 4)), states[4]["model"])


def test_copies_of_abandoned_steps_go_when_the_new_line_has_come_so_far(tmp_path):
    trained(tmp_path, 5, keep=Keep(9, weights=2))
    loop, checkpointer = start(tmp_path, keep=Keep(9, weights=2), base_every=1000)
    with checkpointer:
        checkpointer.resume(step=3)
        assert copies(tmp_path) == [copy_of(tmp_path, step).name for step in (2, 4)]
        torch.manual_seed(9)
        go_on(loop, checkpointer, 4)
        assert copies(tmp_path) == [copy_of(tmp_path, 2).name, copy_of(tmp_path, 4, 2).name]
        assert same(load_file(copy_of(tmp_path, 4, 2)), dict(loop.model.state_dict()))


def test_copies_stay_when_the_process_was_restarted_often(tmp_path):
    """Timelines whose commits and records are gone still lead to copies."""
    for process in range(8):
        trained(tmp_path, 2 * process + 2)
    assert len(copies(tmp_path)) == 8
    assert copies(tmp_path)[0] == copy_of(tmp_path, 2).name


def test_copies_count_and_the_oldest_goes_before_a_best_base(tmp_path):
    keep = Keep(1, weights=1, best=1, metric="loss")
    loop, checkpointer = start(tmp_path, keep=keep, base_every=1000)
    with checkpointer:
        checkpointer.resume()
        loop.iteration(0, lambda: checkpointer.step(metrics={"loss": 1.0}))
        go_on(loop, checkpointer, 4)
        checkpointer.save()
        loop.iteration(4, checkpointer.step)
        checkpointer.save()
        store = checkpointer._store
        before = used_bytes(Disk(str(tmp_path)))
        size = copy_of(tmp_path, 1).stat().st_size
        assert store.drop_oldest().step == 1 and not copy_of(tmp_path, 1).exists()
        assert before - used_bytes(Disk(str(tmp_path))) == size
        assert [store.drop_oldest().step for _ in range(4)] == [2, 3, 4, 5]
        assert store.drop_oldest() is None


def test_copy_that_does_not_fit_is_left_out_with_a_warning(tmp_path):
    _, checkpointer = start(tmp_path, keep=WEIGHTS, base_every=1000)
    with checkpointer:
        checkpointer.resume()
        checkpointer._store.cap_bytes = 1
        with pytest.warns(UserWarning, match="weights of step 2 are not kept"):
            checkpointer._store.make_room = lambda nbytes: False
            checkpointer._weights.make(checkpointer._training.state, 2)


def test_no_copy_after_a_sigterm(tmp_path):
    loop, checkpointer = start(tmp_path, keep=WEIGHTS, base_every=1000)
    checkpointer.resume()
    go_on(loop, checkpointer, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        go_on(loop, checkpointer, 2)
    assert not (tmp_path / "weights").exists()
    trained(tmp_path, 3)
    assert copies(tmp_path) == [copy_of(tmp_path, 2, 2).name]


@pytest.mark.parametrize("options", [{"weights": 0}, {"weights": 1.5}])
def test_bad_numbers_are_refused(options):
    with pytest.raises(BadInput, match="weights"):
        Keep(**options)
