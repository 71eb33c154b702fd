"""The threads that write beside training run on CPUs of their own where there are any, and no other thread is moved."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import holdfast
from holdfast.checkpoint import options
from holdfast.checkpoint.options import chosen_cpus
from holdfast.distributed import Ranks
from holdfast.errors import BadInput
from holdfast.io.threads import allowed_cpus
from support.warm_python import environment_of, run_python

CPUS = sorted(allowed_cpus())
CHILD = """
import json, os, sys, threading
root, mask, given = json.loads(sys.argv[1])
os.sched_setaffinity(0, mask)  # as taskset does
import torch
import holdfast
wait = threading.Event()
own = threading.Thread(target=wait.wait, name="own")
own.start()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
with holdfast.Checkpointer(root, model=model, optimizer=optimizer, helper_cpus=given) as ckpt:
    ckpt.resume()
    for _ in range(2):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        ckpt.step()
    ckpt.wait()
    numbers = {each.name: each.native_id for each in threading.enumerate()}
    numbers["MainThread"] = os.getpid()  # of a fork; Python 3.11 still has that of its parent
    found = {name: sorted(os.sched_getaffinity(number)) for name, number in numbers.items()}
wait.set()
print(json.dumps(found))
"""


def masks(root, mask, given):
    """Those of the threads of a process that was started with ``mask``: of the helpers, and of all others."""
    script = root.with_name(root.name + ".py")
    script.write_text(CHILD)
    child = run_python(script, json.dumps([str(root), mask, given]), env=environment_of(), timeout=60)
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout)
    helpers = {
        name: cpus for name, cpus in found.items() if name.startswith(("holdfast-recorder", "holdfast-io"))
    }
    assert len(helpers) == 5
    others = {name: cpus for name, cpus in found.items() if name not in helpers}
    assert {"MainThread", "own"} <= others.keys()
    return {tuple(cpus) for cpus in helpers.values()}, {tuple(cpus) for cpus in others.values()}


def test_helpers_leave_the_cores_that_a_process_was_confined_to(tmp_path):
    """To those that are left, if any are."""
    helpers, others = masks(tmp_path, CPUS[:1], "auto")
    assert helpers == {tuple(CPUS[1:] or CPUS)} and others == {tuple(CPUS[:1])}


@pytest.mark.slow
def test_helpers_stay_where_they_are_if_training_may_use_every_core_or_nothing_is_asked(tmp_path):
    assert masks(tmp_path / "a", CPUS, "auto") == ({tuple(CPUS)}, {tuple(CPUS)})
    assert masks(tmp_path / "b", CPUS[:1], None) == ({tuple(CPUS[:1])}, {tuple(CPUS[:1])})


@pytest.mark.slow
def test_helpers_go_to_the_cpus_that_are_given(tmp_path):
    assert masks(tmp_path, CPUS, CPUS[-1:]) == ({tuple(CPUS[-1:])}, {tuple(CPUS)})


class Four(Ranks):
    """The first rank of four, two of them on another host."""

    rank, world_size = 0, 4

    def __init__(self, said):
        self.said = said

    alone = False

    def all_do(self, what):
        return [what()]

    def everyone(self, value):
        host = value[1] if isinstance(value, tuple) and len(value) == 3 else ""
        return [value, *((value[0], here or host, cpus) for here, cpus in self.said)]


def test_cores_of_other_ranks_of_the_host_are_not_spare(monkeypatch):
    monkeypatch.setattr(options, "used_cpus", lambda: {0, 1})
    monkeypatch.setattr(options, "allowed_cpus", lambda: set(range(8)))
    ranks = Four([("", [2, 3]), ("elsewhere", [4, 5]), ("elsewhere", [6, 7])])
    assert chosen_cpus("auto", ranks, False) == (4, 5, 6, 7)
    assert chosen_cpus(None, ranks, False) == ()


@pytest.mark.parametrize(
    "given, options, text",
    [
        ("all", {}, 'neither "auto" nor a list of CPU numbers'),
        ([], {}, 'neither "auto" nor a list of CPU numbers'),
        ([0.5], {}, 'neither "auto" nor a list of CPU numbers'),
        (7, {}, 'neither "auto" nor a list of CPU numbers'),
        ([100_000], {}, "the system allows this process the CPUs"),
        ("auto", {"replica": True}, "helper_cpus= with replica= is not offered"),
    ],
)
def test_what_is_no_list_of_allowed_cpus_is_refused(tmp_path, given, options, text):
    model = nn.Linear(3, 3)
    with pytest.raises(BadInput, match=text):
        holdfast.Checkpointer(
            tmp_path / "run",
            model=model,
            optimizer=torch.optim.SGD(model.parameters()),
            helper_cpus=given,
            **options,
        )
    assert not (tmp_path / "run").exists()
