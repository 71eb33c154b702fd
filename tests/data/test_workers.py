"""Workers read ahead, and nothing else changes: not the samples, the position, the draws, nor the trainer's streams."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, default_collate

from holdfast.data.loader import SampleLoader
from holdfast.errors import BadInput


class Augmented:
    """Each sample with a draw from every generator that code reaches for."""

    def __len__(self):
        return 7

    def __getitem__(self, index):
        return index, random.random(), np.random.rand(), torch.rand(())


def masked(samples):
    """Collates as a masked language model's collator does: with draws of its own."""
    return [*default_collate(samples), torch.rand(len(samples))]


class Broken:
    """Sample 3 cannot be read."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        if index == 3:
            raise OSError("gone")
        return index


def take(loader, batches):
    return [[part.tolist() for part in batch] for batch in itertools.islice(loader, batches)]


def streams():
    numpy = np.random.get_state()
    return random.getstate(), [str(numpy[0]), numpy[1].tolist(), *numpy[2:]], torch.get_rng_state().tolist()


def nothing_is_left():
    pinning = [t for t in threading.enumerate() if "pin" in t.name.lower()]
    return not multiprocessing.active_children() and not pinning


@pytest.mark.parametrize("batch_size", [1, 3, 10])
def test_workers_give_what_the_trainer_itself_reads(batch_size):
    one = take(SampleLoader(Augmented(), batch_size, seed=2, collate=masked), 6)
    loader = SampleLoader(Augmented(), batch_size, 2, seed=2, collate=masked)
    assert take(loader, 6) == one
    assert len(multiprocessing.active_children()) == 2
    loader.close()
    assert nothing_is_left()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_streams_of_the_trainer_are_not_moved(num_workers):
    before = streams()
    loader = SampleLoader(Augmented(), 3, num_workers, collate=masked)
    take(loader, 3)
    loader.close()
    take(loader, 1)
    loader.close()
    assert streams() == before


def test_a_sample_draws_the_same_in_any_batch_and_others_in_the_next_epoch():
    def draws(batch_size, batches):
        found = take(SampleLoader(Augmented(), batch_size, seed=4), batches)
        return [sample for batch in found for sample in zip(*batch, strict=True)]

    by_one, by_seven = draws(1, 14), draws(7, 2)
    assert by_one == by_seven
    first, second = ({s[0]: s[1:] for s in half} for half in (by_one[:7], by_one[7:]))
    assert all(a != b for index in range(7) for a, b in zip(first[index], second[index], strict=True))
    assert len({draw for sample in first.values() for draw in sample}) == 21


@pytest.mark.parametrize("before, after", [(0, 2), (2, 0), (2, 1)])
@pytest.mark.parametrize("cut", [0, 1, 2, 4])
def test_a_run_goes_on_with_another_number_of_workers_batch_size_and_world_size(before, after, cut):
    def numbers(loader, batches):
        return [batch.tolist() for batch in itertools.islice(loader, batches)]

    whole = [n for batch in numbers(SampleLoader(range(11), 1, seed=3), 40) for n in batch]
    first = SampleLoader(range(11), 4, before, seed=3)
    assert [n for batch in numbers(first, cut) for n in batch] == whole[: 4 * cut]
    state = first.state_dict()
    first.close()
    assert state["consumed"] == 4 * cut
    ranks = [SampleLoader(range(11), 3, after, rank=rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
    pairs = zip(*(numbers(rank, 4) for rank in ranks), strict=True)
    assert [n for pair in pairs for batch in pair for n in batch] == whole[4 * cut : 4 * cut + 24]
    for rank in ranks:
        rank.close()
    assert nothing_is_left()


def test_a_state_loaded_in_mid_stream_forgets_what_was_read_ahead():
    loader = SampleLoader(range(9), 2, 2, seed=1)
    first = [next(loader).tolist() for _ in range(2)]
    state = loader.state_dict()
    rest = [next(loader).tolist() for _ in range(3)]
    loader.load_state_dict(state)
    assert [next(loader).tolist() for _ in range(3)] == rest != first
    loader.close()
    assert nothing_is_left()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_at_the_end_no_worker_is_left_and_it_stays_the_end(num_workers):
    loader = SampleLoader(range(5), 2, num_workers, epochs=2)
    assert [len(batch) for batch in loader] == [2] * 5
    assert nothing_is_left()
    assert list(loader) == []
    assert nothing_is_left()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_that_cannot_be_read_is_tried_again_and_no_worker_outlives_it(num_workers):
    loader = SampleLoader(Broken(), 1, num_workers, seed=0)
    read = []
    with pytest.raises(OSError, match="gone") as caught:
        for batch in loader:
            read.append(batch.item())
    assert nothing_is_left()  # although the traceback is still there
    assert caught.tb is not None and loader.consumed == len(read) < 5
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            next(loader)
    assert loader.consumed == len(read)


def test_options_of_torchs_loader_are_handed_on():
    read = SampleLoader(range(50), 1, 1, prefetch_factor=5, multiprocessing_context="fork")
    next(read)
    assert read._batches._prefetch_factor == 5
    read.close()


@pytest.mark.parametrize(
    "option", ["shuffle", "sampler", "batch_sampler", "drop_last", "generator", "collate_fn"]
)
def test_what_the_loader_decides_itself_is_refused_with_the_way_out(option):
    with pytest.raises(BadInput, match=f"{option}= .*(pass collate=|follows from seed=)"):
        SampleLoader(range(5), 2, **{option: None})


@pytest.mark.parametrize(
    "wrong, says",
    [({"num_workers": -1}, "num_workers = -1"), ({"seed": -1}, "seed = -1"), ({"seed": 1 << 64}, "seed = ")],
)
def test_what_is_out_of_range_is_refused(wrong, says):
    with pytest.raises(BadInput, match=says):
        SampleLoader(range(5), 2, **wrong)


def test_a_stream_without_indices_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    for stream in (Stream(), iter(range(3))):
        with pytest.raises(BadInput, match="no length and no items by index"):
            SampleLoader(stream, 2)


def test_rank_and_world_size_are_those_of_torch_distributed(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    shares = [next(SampleLoader(range(9), 2, rank=rank)).tolist() for rank in (0, None)]
    monkeypatch.undo()
    alone = SampleLoader(range(9), 4)
    assert (alone.rank, alone.world_size) == (0, 1)
    assert shares[0] + shares[1] == next(alone).tolist()


def test_a_collator_draws_anew_for_each_batch_even_if_the_dataset_seeds_for_itself():
    class Seeding(Augmented):
        def __getitem__(self, index):
            torch.manual_seed(0)
            return super().__getitem__(index)

    masks = [tuple(batch[-1]) for batch in take(SampleLoader(Seeding(), 2, collate=masked), 5)]
    assert len(set(masks)) == 5


def dies_as_its_worker_begins(method, pids, went_on):
    """A trainer that is killed when torch's worker is there and has looked at nothing."""

    def waits_for_the_end(name):
        pids.put(os.getpid())
        while os.getppid() == trainer:
            time.sleep(0.01)

    trainer = os.getpid()
    torch.multiprocessing._set_thread_name = waits_for_the_end  # the first that a worker calls
    threading.Timer(0.5, os.kill, [trainer, signal.SIGKILL]).start()
    options = {"multiprocessing_context": method} if method else {}
    next(SampleLoader(Augmented(), 2, num_workers=1, worker_init_fn=went_on.put, **options))


@pytest.mark.parametrize("method", [None, "fork"])
def test_a_worker_whose_trainer_was_killed_as_it_began_ends(method):
    """torch's own look at their parent comes later, and would take the parent that they have got for theirs."""
    context = multiprocessing.get_context("fork")
    pids, went_on = context.SimpleQueue(), context.SimpleQueue()
    trainer = context.Process(target=dies_as_its_worker_begins, args=(method, pids, went_on))
    trainer.start()
    trainer.join()
    assert trainer.exitcode == -signal.SIGKILL
    pid, ends = pids.get(), time.monotonic() + 30
    try:
        while is_alive(pid):
            assert time.monotonic() < ends, "it stayed"
            time.sleep(0.01)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert went_on.empty()


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_worker_of_a_trainer_that_lives_goes_on_and_calls_the_scripts_own_beginning():
    called = multiprocessing.get_context("fork").SimpleQueue()
    loader = SampleLoader(Augmented(), 2, num_workers=2, worker_init_fn=called.put)
    next(loader)
    loader.close()
    assert {called.get(), called.get()} == {0, 1}
