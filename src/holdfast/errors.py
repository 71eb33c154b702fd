"""What can go wrong, each with a way out.

An error says what happened, to which thing, the numbers, and what to do. ``exit_code`` is what the
command line returns for it: 1 the thing asked about is not so, 2 bad usage or configuration,
3 the world failed (and the state on disk is recoverable).
"""

from __future__ import annotations


class HoldfastError(Exception):
    """The root of every error of this library about the state of the world."""

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


class RunLocked(BadInput):
    """Another process writes to the run directory."""


class StaleCommit(HoldfastError):
    """The run is not this writer's any more: a newer timeline was opened, or the directory or its lock replaced."""


class DiskFailed(HoldfastError):
    """A read, a write or a sync failed. What was acknowledged before is still durable."""


class Unreadable(DiskFailed):
    """What leads on from ``step``, and may be of the newest step, is not given back by the device."""

    def __init__(self, error: object, step: int) -> None:
        super().__init__(
            f"{error} Later steps than {step} may need it, so none was given up and nothing was changed: run again when"
            f" it can be read, or go on without it by resume(step={step})."
        )
        self.error, self.step = error, step


class DiskFull(DiskFailed):
    """No space left. The text names the directory, the bytes needed and the bytes free."""


class Damaged(HoldfastError):
    """Stored bytes are not those written: ``nbytes`` at ``offset`` of ``path``, which hold ``atoms``."""

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
    """The run has no commit, or none at the step asked for."""

    exit_code = 2


class CommitRetired(NoCommit):
    """The commit was there and has been retired, or published again, by its writer since: its files hold other bytes by
    now."""


class EngineFailed(HoldfastError):
    """An earlier step failed; the engine is closed. Resume from the newest commit."""


class PoolExhausted(HoldfastError):
    """A unit has no free generation file left. The text says what holds them."""


class WriterHung(HoldfastError):
    """Nothing was written for longer than the deadline. What was acknowledged before is still durable."""


class RankFailed(HoldfastError):
    """Another rank of the training failed, ended, or does not answer. The text names it."""


class ReplicaDied(HoldfastError):
    """The process that holds the replica has ended. What it had persisted is still durable."""


class QueueClosed(HoldfastError):
    """The I/O queue was closed before this transfer was done."""
