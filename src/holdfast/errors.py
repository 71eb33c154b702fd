"""Errors of this library, each with a way out.

The text of an error says what happened, to which thing, the numbers, and what to do. ``exit_code`` is what the command
line returns for it: 1 if the state that was checked is not as expected, 2 for bad usage or configuration, 3 if the disk
or the machine failed (the state on disk is then recoverable).
"""

from __future__ import annotations


class HoldfastError(Exception):
    """The root of all errors of this library that concern the state of the world."""

    exit_code = 3


class BadInput(HoldfastError, ValueError):
    """The caller asked for something that cannot be done. Nothing was written."""

    exit_code = 2


class ConfigError(BadInput):
    """A configuration key or value is wrong."""


class RuleError(BadInput):
    """A rule file is wrong, or does not fit the tensors that it is applied to."""


class ModelNotSupported(BadInput):
    """The model has no repeated blocks, or its blocks cannot be run out of core."""


class BlockInputChanged(BadInput):
    """A block changed one of its inputs while it ran, so its recomputation would differ."""


class OptimizerNotSupported(BadInput):
    """The optimizer is neither known to be elementwise nor one that is updated tensor by tensor."""


class DoesNotFit(BadInput):
    """A memory budget or a disk is too small. The text says what is needed."""


class RunMismatch(BadInput):
    """The run directory holds another model, optimizer or text than the one given."""


class OtherArithmetic(BadInput):
    """Records were written by another kind of processor or device, or torch, whose last bits differ from this one's.

    Nothing is damaged. ``step`` is the newest one that needs no record and can be resumed here; None without one.
    """

    def __init__(self, text: str, step: int | None = None) -> None:
        super().__init__(text)
        self.step = step


class RunLocked(BadInput):
    """Another process writes to the run directory."""


class StaleCommit(HoldfastError):
    """The run no longer belongs to this writer.

    A newer timeline was opened, or the directory or its lock was replaced.
    """


class DiskFailed(HoldfastError):
    """A read, a write or a sync failed. Steps that were durable before still are."""


class Unreadable(DiskFailed):
    """The device does not return data that later steps than ``step`` may need."""

    def __init__(self, error: object, step: int) -> None:
        super().__init__(
            f"{error} Later steps than {step} may need it, so none was given up and nothing was changed: run again when"
            f" it can be read, or go on without it by resume(step={step})."
        )
        self.error, self.step = error, step


class DiskFull(DiskFailed):
    """No space left. The text names the directory, the bytes needed and the bytes free."""


class Damaged(HoldfastError):
    """Stored bytes differ from those written: ``nbytes`` at ``offset`` of ``path``, which hold ``atoms``."""

    exit_code = 1

    def __init__(
        self, text: str, *, path: str = "", offset: int = 0, nbytes: int = 0, atoms: tuple[str, ...] = ()
    ) -> None:
        super().__init__(text)
        self.path, self.offset, self.nbytes, self.atoms = path, offset, nbytes, atoms


class ChunkCorrupt(Damaged):
    """A checksum block of a file does not match the manifest."""


class ManifestCorrupt(Damaged):
    """A manifest or an index file fails its own digest, or cannot be parsed."""


class FileMissing(Damaged):
    """A file that a manifest names is absent or has another size."""


class NoCommit(HoldfastError):
    """The run has no commit, or none at the requested step."""

    exit_code = 2


class CommitRetired(NoCommit):
    """The writer has retired the commit, or published it again: its files now hold other bytes."""


class EngineFailed(HoldfastError):
    """An earlier step failed; the engine is closed. Resume from the newest commit."""


class Diverged(HoldfastError):
    """The loss stayed bad after as many rollbacks as a guard may make. Every recorded step is kept."""


class PoolExhausted(HoldfastError):
    """A block has no free generation file left. The text says what holds them."""


class WriterHung(HoldfastError):
    """Nothing was written for longer than the deadline. Steps that were durable before still are."""


class RankFailed(HoldfastError):
    """Another rank of the training failed, ended, or does not answer. The text names the rank."""


class ReplicaDied(HoldfastError):
    """The replica process has ended. Steps that it had made durable still are."""


class QueueClosed(HoldfastError):
    """The I/O queue was closed before this transfer was done."""
