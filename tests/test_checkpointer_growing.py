"""A text that grows with the run, as a log does: each record has what was added, and each step comes back with all."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from torch import nn

from checkpoint.loops import cut_small
from holdfast.checkpoint.recovery.compaction import compact
from holdfast.checkpoint.recovery.lineage import Lineage
from holdfast.checkpoint.replica import replica_process
from holdfast.checkpointer import Checkpointer
from holdfast.errors import NoCommit
from holdfast.state.encoding import ADDED, lengthen, shorten
from holdfast.store.commit.pruning import prune
from holdfast.store.commit.retention import Keep
from holdfast.store.log.chain import read_journal
from holdfast.store.run_store import LocalStore
from replica_run import Forked
from support.live_copy import copy_of_live_run

STEPS = 40


class Log:
    """Of which the script writes a line at every step."""

    def __init__(self, change=None):
        self.text, self._change = "", change

    def add(self, step):
        self.text += f"{step}: " + 1000 * "." + "\n"
        if self._change is not None:
            self.text = self._change(step, self.text)

    def state_dict(self):
        return {"lines": self.text.count("\n"), "text": self.text}

    def load_state_dict(self, state):
        self.text = state["text"]
        assert state["lines"] == self.text.count("\n")


def train(root, steps, change=None, after=None, step=None, log=None, **options):
    """The text after each step that this process did, and after the one that it went on from."""
    torch.manual_seed(0)
    log = Log(change) if log is None else log
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"base_every": 1000, "keep": Keep(last=99)} | options
    checkpointer = Checkpointer(root, model=model, optimizer=optimizer, also={"log": log}, **options)
    with checkpointer:
        texts = {checkpointer.resume(step=step): log.text}
        while checkpointer.steps_done < steps:
            model(torch.randn(4, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            log.add(checkpointer.steps_done)
            checkpointer.step()
            texts[checkpointer.steps_done] = log.text
            if after is not None:
                after(checkpointer, log, texts)
    return texts


def resumed(root, step=None, **options):
    """The step, and the text that a script has after a resume."""
    [(step, text)] = train(root, 0, step=step, **options).items()
    return step, text


def as_json(text):
    """Two halves of a character are one there."""
    return json.loads(json.dumps(text))


def come_back(root, texts):
    """Each of ``texts``, as their steps are read, and some by a resume."""
    with LocalStore.read(root) as store:
        for step, text in texts.items():
            base = next(store.load(ref) for ref in store.line() if ref.step <= step)
            line = Lineage.of(store, base, step)
            assert (line.step, line.progress(0)["things"]["log"]["text"]) == (step, as_json(text))
    steps = sorted(texts)
    for step in steps[len(steps) // 2 :: len(steps) // 2]:
        assert resumed(copy_of(root), step) == (step, as_json(texts[step]))


def copy_of(root):
    """Another directory with the same run, since to go back begins another line."""
    copies = len(list(root.parent.iterdir()))
    return copy_of_live_run(root, root.with_name(f"{root.name}-{copies}"))


def recorded(root):
    """Of each record the characters that its progress has of the log."""
    with LocalStore.read(root) as store:
        records = read_journal(store, "rank-00000").records
        return {step: len(json.dumps(r.about["progress"]["things"]["log"])) for step, r in records.items()}


@pytest.mark.slow
def test_records_do_not_grow_with_a_text_that_goes_on(tmp_path):
    texts = train(tmp_path, STEPS)
    sizes = recorded(tmp_path)
    assert max(size for step, size in sizes.items() if step > 10) < 1200
    assert sum(sizes.values()) < 2 * len(texts[STEPS])
    come_back(tmp_path, texts)


@pytest.mark.slow
def test_every_step_has_all_after_every_resume(tmp_path):
    texts = {}
    for steps in (9, 14, 20):
        texts |= train(tmp_path, steps, base_every=6)
        assert recorded(tmp_path)[steps] < 1200
    come_back(tmp_path, texts)


def test_of_bases_whose_units_are_of_several_steps(tmp_path, monkeypatch):
    cut_small(monkeypatch)
    texts = train(tmp_path, STEPS, base_every=15)
    with LocalStore.read(tmp_path) as store:
        bases = [store.load(ref) for ref in store.line()]
    assert any(base.oldest_step < base.step for base in bases)
    come_back(tmp_path, texts)


CHANGES = {
    "begun anew": lambda step, text: text[-1005:] if step == 15 else text,
    "another beginning": lambda step, text: "new" + text[3:] if step in (15, 16) else text,
    "left as it is": lambda step, text: text.split("12:")[0] if 12 <= step < 17 else text,
    "emptied": lambda step, text: "" if step == 15 else text,
    "halves of a character": lambda step, text: text + "\ud83d" if step == 6 else text,
    "and the other half": lambda step, text: text + {6: "\ud83d", 7: "\ude00"}.get(step, ""),
    "both halves": lambda step, text: text + "\ud83d\ude00" * (step == 6),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_text_that_is_changed_otherwise_is_recorded_whole(tmp_path, how):
    texts = train(tmp_path, 22, CHANGES[how], base_every=9)
    come_back(tmp_path, texts)


def test_a_base_that_has_another_text_than_the_record_of_its_step(tmp_path):
    def save(checkpointer, log, texts):
        if checkpointer.steps_done in (11, 12, 17):
            before, log.text = log.text, f"saved at {checkpointer.steps_done}" + log.text
            checkpointer.save()
            texts[checkpointer.steps_done] = log.text
            if checkpointer.steps_done != 12:
                log.text = before

    texts = train(tmp_path, 22, after=save)
    come_back(tmp_path, texts)


def test_a_line_that_was_left_and_the_one_that_went_on(tmp_path):
    left = train(tmp_path, 16, base_every=7)
    other = train(tmp_path, 20, lambda step, text: text.replace(f"{step}:", f"{step} again:"), step=12)
    assert other[14] != left[14]
    come_back(tmp_path, other)


@pytest.mark.slow
def test_compacted_and_pruned_all_that_is_left_comes_back(tmp_path):
    texts = train(tmp_path, STEPS, base_every=9)
    with LocalStore.read(tmp_path) as store:
        first = min(ref.step for ref in store.line())
    compact(tmp_path, first + 5)
    come_back(tmp_path, {step: text for step, text in texts.items() if step >= first + 5})
    prune(tmp_path, Keep(last=1))
    gone = {step for step in texts if not_there(tmp_path, step)}
    assert gone and STEPS not in gone
    come_back(tmp_path, {step: text for step, text in texts.items() if step not in gone})


def not_there(root, step):
    try:
        return resumed(copy_of(root), step, keep=Keep(last=1)) is None
    except NoCommit:
        return True


def test_where_the_newest_base_is_damaged_an_older_one_leads_to_the_same(tmp_path):
    texts = train(tmp_path, STEPS, base_every=9)
    with LocalStore.read(tmp_path) as store:
        newest = store.load(store.line()[0])
    (tmp_path / newest.path).unlink()
    come_back(tmp_path, {step: texts[step] for step in (newest.step, STEPS)})


@pytest.mark.slow
def test_with_a_replica_beside(tmp_path, monkeypatch):
    monkeypatch.setattr(replica_process, "start_process", Forked)
    (tmp_path / "memory").mkdir()
    texts = train(tmp_path / "run", 9, replica=tmp_path / "memory")
    assert resumed(tmp_path / "run") == (9, texts[9])


def test_a_record_that_goes_on_another_text_is_told():
    texts = [{"things": {"log": {"text": count * "."}}} for count in (5000, 6000, 7000)]
    second, third = (shorten(now, before) for before, now in pairwise(texts))
    assert lengthen([texts[0], second, third]) == texts[2]
    with pytest.raises(ValueError, match="goes on a text of 6000 characters, and there are 5000"):
        lengthen([texts[0], third])


class Odd(Log):
    """Has in its state what looks like an addition."""

    def state_dict(self):
        return {"lines": {ADDED: "x", "to": 7}, "text": self.text}

    def load_state_dict(self, state):
        assert state["lines"] == {ADDED: "x", "to": 7}
        self.text = state["text"]


def test_what_a_script_says_itself_is_not_taken_for_an_addition(tmp_path):
    texts = train(tmp_path, 12, log=Odd())
    assert train(tmp_path, 0, log=Odd()) == {12: texts[12]}
