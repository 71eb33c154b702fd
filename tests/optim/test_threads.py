"""Threads that work beside the model compute by themselves, and leave to all others the threads that they have."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from holdfast.optim.torch_threads import keep_torch_threads, one_torch_thread


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def on_a_thread(do):
    found = []
    thread = threading.Thread(target=lambda: found.append(do()))
    thread.start()
    thread.join()
    return found[0]


def test_the_thread_itself_computes_alone(two_threads):
    assert on_a_thread(lambda: (one_torch_thread(), torch.get_num_threads())[1]) == 1


def test_the_caller_and_threads_to_come_are_as_they_were(two_threads):
    on_a_thread(one_torch_thread)
    assert torch.get_num_threads() == 2
    assert on_a_thread(torch.get_num_threads) == 2


def test_many_at_once_do_not_see_what_another_has_set(two_threads):
    threads = [threading.Thread(target=one_torch_thread) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert on_a_thread(torch.get_num_threads) == 2


@pytest.mark.parametrize("keeps", [True, False])
def test_who_has_kept_its_threads_has_them_in_the_moment_in_which_another_sets_its_own(two_threads, keeps):
    def found():
        if keeps:
            keep_torch_threads()
        on_a_thread(lambda: torch.set_num_threads(1))  # as far as a thread comes that is held up there
        return torch.get_num_threads()

    assert on_a_thread(found) == (2 if keeps else 1)


FIRST_STEPS = """
import os, random, sys, threading, time, torch, torch._dynamo  # which a first step would import
from holdfast.optim.torch_threads import keep_torch_threads

def first_step():
    random.seed()
    torch.set_num_threads(2)
    model = torch.nn.Linear(384, 512, bias=False)
    before = model.weight.detach().clone()
    model(torch.randn(8, 384)).pow(2).mean().backward()
    gradient = model.weight.grad.clone()
    if sys.argv[1] == "keeps":
        keep_torch_threads()
    for _ in range(2):
        threading.Thread(target=lambda: (time.sleep(random.random() * 0.002), torch.set_num_threads(1))).start()
    torch.optim.AdamW(model.parameters()).step()
    again = torch.nn.Parameter(before)
    again.grad = gradient
    torch.optim.AdamW([again]).step()
    return torch.equal(again, model.weight)

for _ in range(int(sys.argv[2])):
    process = os.fork()
    if not process:
        os._exit(0 if first_step() else 1)
    if os.waitpid(process, 0)[1]:
        print("differs")
"""


@pytest.mark.campaign  # what one in a hundred shows; the test above has the moment itself
def test_the_first_step_has_the_bits_of_any_other_whatever_threads_set_meanwhile():
    """MKL chooses its code in a process's first root: each is one of a process that has not computed yet."""
    command = [sys.executable, "-c", FIRST_STEPS, "keeps", "100"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""
