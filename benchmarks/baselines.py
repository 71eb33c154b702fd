"""Other ways to keep a training's state, each at its best and each in a few lines, beside Holdfast's.

All have one form: ``resume`` puts the training where it can go on and returns its step, ``step`` is called after every
step of the training and saves every so many of them, ``close`` returns when nothing is under way. ``exact`` says
whether what comes back is what training had. Bytes, seconds.

=============  ========================================================================================================
``Save``       ``torch.save`` of everything, with fsync and rename: training waits for the disk
``Dcp``        ``torch.distributed.checkpoint.async_save`` from a thread, staged into memory that is used again
``CheckFreq``  two phases: a snapshot beside the next forward and backward, then persisted by a thread; one at a time
``Gemini``     a copy in /dev/shm, two slots in turn, which outlives the process but not the machine; on disk seldom
``NaiveDiff``  a full state now and then, and between them the largest 1 % of the parameters' differences, with the
               optimizer's state whole; lossy
=============  ========================================================================================================
"""

from __future__ import annotations

import hashlib
import pickle
import shutil
import struct
import threading
import time
import warnings
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from snapshots import Snapshots, Tensors, put_together, save_durably, sync, take_apart
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from trainings import Training

from holdfast.checkpoint.replica.shared_memory import MEMORY, place_of

warnings.filterwarnings(
    "ignore", "torch.distributed is disabled"
)  # there is one process, as DCP says in a thread


class Arm:
    """One way to keep the state of ``training`` in ``folder``, every ``every`` steps. By itself: no way at all."""

    exact = True
    is_settled = True
    """Whether it keeps steps as it will go on to."""

    def __init__(self, folder: Path, training: Training, every: int = 1) -> None:
        self.folder, self.training, self.every = Path(folder), training, every
        self.folder.mkdir(parents=True, exist_ok=True)
        self.durable_step = 0
        """The newest step that would come back, were the process killed now."""
        self.stall_seconds = 0.0
        """That the training thread spent or waited for this arm in the last step."""

    @property
    def lag(self) -> int:
        """Steps that would not come back."""
        return self.training.steps_done - self.durable_step

    def resume(self) -> int:
        return 0

    def step(self) -> None:
        started = time.perf_counter()
        if self.training.steps_done % self.every == 0:
            self.save()
        self.stall_seconds = time.perf_counter() - started

    def save(self) -> None:
        """The present step."""

    def close(self) -> None:
        """Return when nothing is under way."""

    def remove(self) -> None:
        """All that is kept anywhere."""
        clear(self.folder)


class Save(Arm):
    """The whole state in one file, durable before the next step."""

    def __init__(self, folder: Path, training: Training, every: int = 1) -> None:
        super().__init__(folder, training, every)
        self._path = self.folder / "state.pt"

    def resume(self) -> int:
        if self._path.exists():
            self.durable_step = self.training.load(torch.load(self._path, mmap=True))
        return self.durable_step

    def save(self) -> None:
        save_durably(self.training.state(), self._path)
        self.durable_step = self.training.steps_done


class Dcp(Arm):
    """The whole state staged, and written by a thread; the next one waits for it, as the manual of torch has it."""

    def __init__(self, folder: Path, training: Training, every: int = 1) -> None:
        super().__init__(folder, training, every)
        self._future: Future | None = None
        self._settled = threading.Event()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=True,
                use_async_staging=False, use_non_blocking_copy=False,
            )
        )  # fmt: skip

    def resume(self) -> int:
        whole = [path for path in self.folder.glob("step-*") if (path / ".metadata").exists()]
        if whole:
            newest = max(whole, key=lambda path: int(path.name.removeprefix("step-")))
            found = dcp.FileSystemReader(newest).read_metadata().state_dict_metadata
            state: dict[str, Any] = {
                key: torch.empty(about.size, dtype=about.properties.dtype) if hasattr(about, "size") else None
                for key, about in found.items()
            }
            dcp.load(state, checkpoint_id=newest, no_dist=True)
            self.durable_step = self.training.load(put_together(pickle.loads(state.pop("frame")), state))
        return self.durable_step

    def save(self) -> None:
        self.wait()
        self._settled.clear()
        step = self.training.steps_done
        tensors, frame = take_apart(self.training.state())
        self._future = dcp.async_save(
            {**tensors, "frame": pickle.dumps(frame)},
            storage_writer=dcp.FileSystemWriter(self._path(step)),
            async_stager=self._stager, no_dist=True,
        )  # type: ignore[assignment]  # fmt: skip
        self._future.add_done_callback(partial(self._saved, step))

    def _saved(self, step: int, future: Future) -> None:
        """In the thread: the checkpoint before the last is not needed any more."""
        if future.exception() is None:
            sync(self._path(step))
            sync(self.folder)
            old, self.durable_step = self.durable_step, step
            shutil.rmtree(self._path(old), ignore_errors=True)
        self._settled.set()

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def wait(self) -> None:
        future, self._future = self._future, None
        if future is not None:
            future.result()
            self._settled.wait()  # the result is there before the callback has been called

    def close(self) -> None:
        self.wait()
        self._stager.close()


class CheckFreq(Arm):
    """A snapshot beside the next iteration, then persisted beside training; the next snapshot waits for that."""

    def __init__(self, folder: Path, training: Training, every: int = 1) -> None:
        super().__init__(folder, training, every)
        self._path = self.folder / "state.pt"
        self._copies: Tensors = {}
        self._snapshots = Snapshots(training)

    def resume(self) -> int:
        if self._path.exists():
            self.durable_step = self.training.load(torch.load(self._path, mmap=True))
        return self.durable_step

    def step(self) -> None:
        super().step()
        self.stall_seconds += self._snapshots.waited_seconds
        self._snapshots.waited_seconds = 0.0

    def save(self) -> None:
        self._snapshots.take(self.training.state(), self._target, self._persist)

    def _target(self, tensors: Tensors, frame: Any) -> Tensors:
        if self._copies.keys() != tensors.keys():
            self._copies = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        return self._copies

    def _persist(self, copies: Tensors, frame: Any) -> None:
        save_durably(put_together(frame, copies), self._path)
        self.durable_step = frame["step"]

    def close(self) -> None:
        self._snapshots.close()


class Gemini(CheckFreq):
    """A copy in memory that another process reaches, and a file every ``persist_every`` steps for the machine's death.

    With one machine there is no peer to hold it: /dev/shm stands for one, at the cost of a copy and not of a network.
    """

    ROOM = 1 << 20
    """For what is no tensor, at the beginning of a slot. The first 8 bytes are the step, 0 while it is not whole."""

    def __init__(self, folder: Path, training: Training, every: int = 1, persist_every: int = 1000) -> None:
        super().__init__(folder, training, every)
        self.persist_every = persist_every
        self.slots = slots_of(self.folder)
        self._memory: list[torch.Tensor] = []
        self._turn = 0

    def resume(self) -> int:
        whole = [path for path in self.slots if path.exists() and _step_of(path)]
        memory = torch.load(self._path, mmap=True) if self._path.exists() else None
        if whole:
            newest = max(whole, key=_step_of)
            self._turn = 1 - self.slots.index(newest)  # the other one is written next
            memory = torch.from_file(str(newest), shared=True, size=newest.stat().st_size, dtype=torch.uint8)
        if memory is not None:
            length = int(memory[8:16].view(torch.int64))
            frame, places = pickle.loads(memory[16 : 16 + length].numpy().tobytes())
            copies = {name: view.clone() for name, view in _views(memory, places).items()}
            self.durable_step = self.training.load(put_together(frame, copies))
        return self.durable_step

    def _target(self, tensors: Tensors, frame: Any) -> Tensors:
        places, end = {}, self.ROOM
        for name, tensor in tensors.items():
            places[name] = (end, tensor.dtype, tuple(tensor.shape))
            end += -(-tensor.nbytes // 64) * 64
        if not self._memory:
            self._memory = [
                torch.from_file(str(path), shared=True, size=end, dtype=torch.uint8) for path in self.slots
            ]
            for memory in self._memory:
                memory[self.ROOM :: 4096].max()  # faults it in; it may hold the only copy there is
        memory = self._memory[self._turn]
        about = pickle.dumps((frame, places))
        assert len(about) + 16 <= self.ROOM
        memory[:16] = _bytes_of(0, len(about))
        memory[16 : 16 + len(about)] = torch.frombuffer(bytearray(about), dtype=torch.uint8)
        return _views(memory, places)

    def _persist(self, copies: Tensors, frame: Any) -> None:
        memory = self._memory[self._turn]
        memory[:8] = _bytes_of(frame["step"])
        self._turn = 1 - self._turn
        self.durable_step = frame["step"]
        if frame["step"] % self.persist_every == 0:
            save_durably(memory, self._path)


class NaiveDiff(Arm):
    """Differences of states: the state of the optimizer is dense and written whole, that of the parameters is cut.

    Kept are the new values of the ``share`` of each parameter's elements that differ most from what a resume would
    give so far, so that what is left out now may come later. A resume gives the parameters approximately.
    """

    exact = False

    def __init__(
        self, folder: Path, training: Training, every: int = 1, share: float = 0.01, base_every: int = 50
    ) -> None:
        super().__init__(folder, training, every)
        self.share, self.base_every = share, base_every
        self._base_path, self._dense_path = self.folder / "base.pt", self.folder / "dense.pt"
        self._base = 0
        self._kept: Tensors = {}
        """The parameters as a resume would give them."""
        self._copies: Tensors = {}
        self._snapshots = Snapshots(training)

    def resume(self) -> int:
        if not self._base_path.exists():
            return 0
        state = torch.load(self._base_path)
        self._base = state["step"]
        newest = torch.load(self._dense_path) if self._dense_path.exists() else state
        if newest["step"] > self._base:
            for step in range(self._base + self.every, newest["step"] + 1, self.every):
                for name, (where, values) in torch.load(self._difference(step)).items():
                    state["model"][name].view(-1)[where.long()] = values
            state |= newest | {"model": state["model"] | newest["model"]}
        self.durable_step = self.training.load(state)
        self._kept = {name: p.detach().clone() for name, p in self.training.model.named_parameters()}
        return self.durable_step

    def step(self) -> None:
        super().step()
        self.stall_seconds += self._snapshots.waited_seconds
        self._snapshots.waited_seconds = 0.0

    def save(self) -> None:
        step, state = self.training.steps_done, self.training.state()
        if not self._kept or step - self._base >= self.base_every * self.every:
            self._save_base(step, state)
            return
        self._snapshots.wait()  # before _kept is changed: what fails now was not kept
        differences = {name: self._largest(name, p) for name, p in self.training.model.named_parameters()}
        rest = {
            name: state["model"][name]
            for name, _ in self.training.model.named_buffers()
            if name in state["model"]
        }
        self._snapshots.take(state | {"model": rest}, self._target, partial(self._persist, differences))

    def _save_base(self, step: int, state: dict[str, Any]) -> None:
        self._snapshots.wait()
        save_durably(state, self._base_path)
        self._kept = {name: p.detach().clone() for name, p in self.training.model.named_parameters()}
        self._base = self.durable_step = step
        for path in self.folder.glob("difference-*.pt"):
            path.unlink()

    def _largest(self, name: str, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the parameter differs most from what is kept, and its values there, which are kept from here on."""
        now, kept = parameter.detach().reshape(-1), self._kept[name].view(-1)
        distance = (now - kept).abs_()
        where = (distance > _threshold(distance, self.share)).nonzero().view(-1)
        values = now[where]
        kept[where] = values
        return where.int(), values

    def _target(self, tensors: Tensors, frame: Any) -> Tensors:
        if self._copies.keys() != tensors.keys():
            self._copies = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        return self._copies

    def _persist(self, differences: dict, copies: Tensors, frame: Any) -> None:
        """The difference first: a step counts when the dense part of it is there."""
        save_durably(differences, self._difference(frame["step"]))
        save_durably(put_together(frame, copies), self._dense_path)
        self.durable_step = frame["step"]

    def _difference(self, step: int) -> Path:
        return self.folder / f"difference-{step:08d}.pt"

    def close(self) -> None:
        self._snapshots.close()


def clear(folder: Path) -> None:
    """Remove all that an arm has kept of ``folder``, anywhere."""
    shutil.rmtree(folder, ignore_errors=True)
    for slot in slots_of(folder):
        slot.unlink(missing_ok=True)
    for copy in MEMORY.glob(f"{place_of(folder, MEMORY).name}*"):
        shutil.rmtree(copy, ignore_errors=True)


def slots_of(folder: Path) -> list[Path]:
    """Where a copy of the run in ``folder`` lies in memory."""
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return [Path("/dev/shm") / f"holdfast-bench-{name}-{number}" for number in range(2)]


def _threshold(distance: torch.Tensor, share: float) -> torch.Tensor:
    """About ``share`` of ``distance`` is above: by a sample, since an exact selection costs ten times a copy."""
    sample = distance[:: max(1, distance.numel() // 16384)]
    return sample.kthvalue(max(1, int((1 - share) * sample.numel()))).values


def _views(memory: torch.Tensor, places: dict[str, tuple]) -> Tensors:
    sizes = {
        name: torch.empty(shape, dtype=dtype, device="meta").nbytes
        for name, (_, dtype, shape) in places.items()
    }
    return {
        name: memory[at : at + sizes[name]].view(dtype).view(shape)
        for name, (at, dtype, shape) in places.items()
    }


def _bytes_of(*numbers: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(struct.pack(f"<{len(numbers)}q", *numbers)), dtype=torch.uint8)


def _step_of(slot: Path) -> int:
    """Of the copy that is in it, 0 if that is not whole."""
    with open(slot, "rb") as file:
        return struct.unpack("<q", file.read(8))[0]
