"""Threads that work beside the model compute by themselves, and leave to all others the threads that they have."""

from __future__ import annotations

import threading

import pytest
import torch

from holdfast.update.threads import keep_torch_threads, one_torch_thread


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
