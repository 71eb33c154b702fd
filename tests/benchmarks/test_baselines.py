"""Each baseline gives back what it claims, whenever the process dies: the bits of a step that it called durable, or,
where it says so, something near them."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
import traceback

import baselines
import pytest
import snapshots
from arms import ARMS
from baselines import Arm, Gemini, NaiveDiff, _step_of
from trainings import resnet18, tiny, vgg11

from checkpoint.loops import same
from holdfast.checkpoint.log.recorder import BOUND

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # which DCP says in a thread

LAST = 18
OTHERS = {"none", "sparse", "bases", "auto", "replica", "topk"}
"""That keep nothing, or are a ``Checkpointer`` whose options have tests of their own."""
NAMES = [name for name in ARMS if name not in OTHERS]


def states(steps):
    """Of a training that is never interrupted, by step."""
    training = tiny()
    found = [None]
    for _ in range(steps):
        training.step()
        found.append(copy.deepcopy(training.state()))
    return found


@pytest.fixture(scope="module")
def reference():
    return states(LAST)


@pytest.fixture
def arm(tmp_path):
    """Makes arms of a name on one folder, and removes what they keep anywhere."""
    made = []

    def make(name, **options):
        made.append(ARMS[name](tmp_path / "run", tiny(), **options))
        return made[-1]

    yield make
    for each in made:
        each.remove()


def killed_after(make, name, steps, **options):
    """A process that takes ``steps`` steps and is killed. Returns the last step that it saw durable."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            arm = make(name, **options)
            arm.resume()
            while arm.training.steps_done < steps:
                arm.training.step()
                arm.step()
                os.write(writing, bytes([arm.durable_step]))
            os.kill(os.getpid(), signal.SIGKILL)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writing)
    seen = b""
    while data := os.read(reading, 1000):
        seen += data
    os.close(reading)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    return max(seen)


@pytest.mark.campaign(cover=True)
@pytest.mark.filterwarnings("ignore:resuming after step")  # a record that was being written is torn
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", [1, 5, 14])
def test_killed_and_resumed_it_goes_on_from_what_it_called_durable(arm, reference, name, steps):
    durable = killed_after(arm, name, steps)
    again = arm(name)
    found = again.resume()
    assert durable <= found <= steps and found >= steps - (BOUND if name == "exact" else 2)
    assert again.training.steps_done == found
    if found:
        assert same(again.training.state(), reference[found]) == (again.exact or found == 1)
    while again.training.steps_done < LAST:
        again.training.step()
        again.step()
    again.close()
    assert same(again.training.state(), reference[LAST]) == (again.exact or found <= 1)
    last = arm(name)
    assert last.resume() == LAST
    assert same(last.training.state(), reference[LAST]) == again.exact
    last.close()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "exact"])
def test_it_saves_every_so_many_steps(arm, reference, name):
    first = arm(name, every=3)
    first.resume()
    for _ in range(8):
        first.training.step()
        first.step()
    first.close()
    again = arm(name, every=3)
    assert again.resume() == 6 == first.durable_step
    assert same(again.training.state(), reference[6]) == again.exact
    again.close()


@pytest.mark.parametrize("name", NAMES)
def test_keeping_changes_no_number_of_the_training(arm, reference, name):
    kept = arm(name)
    assert kept.resume() == 0
    for _ in range(6):
        kept.training.step()
        kept.step()
        assert kept.stall_seconds > 0
    kept.close()
    assert same(kept.training.state(), reference[6])


def test_the_difference_of_states_says_that_it_is_lossy_and_is_near(arm, reference):
    first = arm("naive", share=0.2)
    first.resume()
    for _ in range(9):
        first.training.step()
        first.step()
    first.close()
    again = arm("naive", share=0.2)
    assert again.resume() == 9 and not again.exact and all(ARMS[n].exact for n in NAMES if n != "naive")
    found, true, begin = (s["model"] for s in (again.training.state(), reference[9], reference[1]))
    for name, tensor in true.items():
        moved = (tensor - begin[name]).norm()
        assert moved == 0 or (found[name] - tensor).norm() < 0.9 * moved
    again.close()


def test_the_difference_of_states_begins_anew_with_a_base(arm, reference):
    first = arm("naive", base_every=4)
    first.resume()
    for _ in range(9):
        first.training.step()
        first.step()
        if first.training.steps_done == 5:
            assert not list(first.folder.glob("difference-*"))
    first.close()
    again = arm("naive", base_every=4)
    assert again.resume() == 9 and same(again.training.state(), reference[9])
    again.close()


def test_a_copy_in_memory_that_was_being_made_is_not_taken(arm, reference):
    first = arm("gemini")
    first.resume()
    for _ in range(5):
        first.training.step()
        first.step()
    first.close()
    newest = max(first.slots, key=_step_of)
    with open(newest, "r+b") as file:
        file.write(bytes(8))
    again = arm("gemini")
    assert again.resume() == 4 and same(again.training.state(), reference[4])
    again.close()


def test_what_is_in_memory_is_gone_with_the_machine_and_the_file_is_not(arm, reference):
    first = arm("gemini", persist_every=3)
    first.resume()
    for _ in range(5):
        first.training.step()
        first.step()
    first.close()
    for slot in first.slots:
        slot.unlink()
    again = arm("gemini")
    assert again.resume() == 3 and same(again.training.state(), reference[3])
    again.close()


@pytest.mark.slow
@pytest.mark.parametrize("make", [resnet18, vgg11])
def test_a_model_with_buffers_comes_back_bit_for_bit(tmp_path, make):
    training = make(batch=2)
    arm = ARMS["checkfreq"](tmp_path, training)
    for _ in range(2):
        training.step()
        arm.step()
    arm.close()
    was = copy.deepcopy(training.state())
    again = ARMS["checkfreq"](tmp_path, make(batch=2))
    assert again.resume() == 2 and same(again.training.state(), was)
    again.close()


def test_no_arm_is_nothing(tmp_path):
    arm = Arm(tmp_path, tiny())
    arm.step()
    assert arm.resume() == arm.durable_step == 0 and isinstance(ARMS["naive"], type)
    assert issubclass(ARMS["gemini"], Gemini) and issubclass(ARMS["naive"], NaiveDiff)


def slowly(monkeypatch, module, name, seconds=0.1):
    """Let a function of a module take its time in other threads than the main one."""
    quick = getattr(module, name)

    def slow(*arguments):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(seconds)
        return quick(*arguments)

    monkeypatch.setattr(module, name, slow)


@pytest.mark.parametrize("name", ["checkfreq", "gemini"])
def test_an_update_waits_until_the_state_before_it_is_copied(arm, reference, monkeypatch, name):
    slowly(monkeypatch, snapshots, "_copy", seconds=0.3)
    first = arm(name, every=3)
    for _ in range(4):
        first.training.step()
        first.step()
    assert first.stall_seconds > 0.05
    first.close()
    again = arm(name, every=3)
    assert again.resume() == 3 and same(again.training.state(), reference[3])
    again.close()


@pytest.mark.slow
def test_a_slot_in_memory_is_not_whole_while_it_is_written(arm, monkeypatch):
    first = arm("gemini")
    for _ in range(3):
        first.training.step()
        first.step()
    first._snapshots.wait()
    assert sorted(map(_step_of, first.slots)) == [2, 3]
    slowly(monkeypatch, snapshots, "_copy", 1.0)
    first.training.step()
    first.step()
    assert sorted(map(_step_of, first.slots)) == [0, 3]
    first.close()
    assert sorted(map(_step_of, first.slots)) == [3, 4]


def test_closed_it_has_said_what_is_durable(arm, monkeypatch):
    slowly(monkeypatch, baselines, "sync")
    first = arm("dcp")
    first.training.step()
    first.step()
    first.close()
    assert first.durable_step == 1


def test_the_difference_of_states_is_that_from_what_a_resume_would_give(arm):
    first, again = arm("naive"), arm("naive")
    for _ in range(6):
        first.training.step()
        first.step()
    first.close()
    assert again.resume() == 6
    assert same(first._kept, {name: p.detach() for name, p in again.training.model.named_parameters()})
    again.close()


@pytest.mark.slow
def test_a_resumed_arm_leaves_the_copy_in_memory_alone_until_there_is_another(arm, reference, monkeypatch):
    first, second, third = arm("gemini"), arm("gemini"), arm("gemini")
    for _ in range(3):
        first.training.step()
        first.step()
    first.close()
    assert second.resume() == 3
    second.training.step()
    slowly(monkeypatch, snapshots, "_copy", 1.0)
    second.step()
    assert third.resume() == 3 and same(third.training.state(), reference[3])
    second.close()
    third.close()
