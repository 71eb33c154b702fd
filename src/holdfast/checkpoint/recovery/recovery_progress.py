"""The progress of a recovery: its predicted duration, how far it is, and what it took.

The prediction comes from the bytes to load and the records to replay, at the rates that the snapshot names. Updated
while snapshots load and records are replayed; read by progress bars and the event log. Seconds, bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ...quantities import counted, format_bytes, format_seconds
from ...store.format.manifest import Manifest
from ...store.log.chain import Chain

READ_BYTES_PER_SECOND = 500_000_000.0
REPLAY_BYTES_PER_SECOND = 1_000_000_000.0
"""Bytes of gradients that an optimizer applies in a second.

Both rates are assumed until a recovery of the run was timed.
"""


class RecoveryProgress:
    """The progress of one recovery. ``tell`` is called with this object whenever it has advanced."""

    def __init__(
        self,
        tell: Callable[[RecoveryProgress], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._tell, self._clock = tell, clock
        self._rates: dict[str, float] = {}
        self._began = self._loaded_at = self._ended_at = clock()
        self.base_step = self.to_step = 0
        self.base_bytes = self.loaded_bytes = 0
        self.num_records = self.replayed_records = 0
        self.record_bytes = 0
        self.predicted_seconds = 0.0
        self.reached: int | None = None
        """The step that the state was at before, as that of a standby is; None where a snapshot is loaded."""
        self.over = False
        self.is_approximate = False
        """True if records were replayed with other arithmetic than training had."""

    @property
    def text(self) -> str:
        """A description of the work, for a person.

        >>> recovery = RecoveryProgress()
        >>> recovery.base_bytes, recovery.num_records, recovery.predicted_seconds = 1_500_000_000, 100, 12.0
        >>> recovery.text
        'loading 1.4 GiB and replaying 100 steps, about 12.0 s'
        """
        about = format_seconds(self.predicted_seconds)
        if self.reached is not None:
            return f"at step {self.reached:,}, replaying {counted(self.num_records, 'step')}, about {about}"
        replaying = f" and replaying {counted(self.num_records, 'step')}" if self.num_records else ""
        return f"loading {format_bytes(self.base_bytes)}{replaying}, about {about}"

    @property
    def done_share(self) -> float:
        """The completed share of the predicted time, from 0 to 1."""
        whole = self.base_bytes / self._read_rate + self.num_records * self._replay_seconds
        done = self.loaded_bytes / self._read_rate + self.replayed_records * self._replay_seconds
        return 1.0 if self.over or not whole else min(done / whole, 1.0)

    @property
    def rates(self) -> dict[str, float]:
        """The rates that predict the next recovery: measured by this one where possible."""
        rates = dict(self._rates)
        if self.loaded_bytes and self.load_seconds > 0:
            rates["read_bytes_per_second"] = self.loaded_bytes / self.load_seconds
        if self.replayed_records:
            rates["replay_seconds"] = self.replay_seconds / self.replayed_records
        return rates

    @property
    def load_seconds(self) -> float:
        return self._loaded_at - self._began

    @property
    def replay_seconds(self) -> float:
        return self._ended_at - self._loaded_at

    def begins(self, base: Manifest, chains: Sequence[Chain], reached: int | None = None) -> None:
        """Begin with the snapshot ``base`` and the records of its ``chains``, or with those after step ``reached``.

        Called again for another snapshot if this one is damaged.
        """
        self._rates = dict(base.progress_of(chains[0].stream).get("rates", {}))
        self.base_step, self.to_step = base.step, chains[0].last.step
        self.reached = reached
        records = [r for chain in chains for r in chain.records if reached is None or r.step > reached]
        self.base_bytes, self.num_records = base.total_bytes if reached is None else 0, len(records)
        self.record_bytes = sum(record.payload_bytes for record in records)
        self.loaded_bytes = self.replayed_records = 0
        self._began = self._loaded_at = self._ended_at = self._clock()
        self.predicted_seconds = self.base_bytes / self._read_rate + self.num_records * self._replay_seconds
        self._told()

    def loaded(self, nbytes: int) -> None:
        self.loaded_bytes += nbytes
        self._loaded_at = self._ended_at = self._clock()
        self._told()

    def replayed(self, records: int = 1) -> None:
        self.replayed_records += records
        self._ended_at = self._clock()
        self._told()

    def ended(self) -> None:
        self.over = True
        self._told()

    def facts(self) -> dict[str, Any]:
        """Return the facts for the event at the end of the recovery."""
        return {
            "base_step": self.base_step, "base_bytes": self.base_bytes, "records": self.replayed_records,
            "predicted_seconds": self.predicted_seconds, "load_seconds": self.load_seconds,
            "replay_seconds": self.replay_seconds, "approximate": self.is_approximate,
        }  # fmt: skip

    @property
    def _read_rate(self) -> float:
        return self._rates.get("read_bytes_per_second") or READ_BYTES_PER_SECOND

    @property
    def _replay_seconds(self) -> float:
        each = self.record_bytes / max(self.num_records, 1)
        return self._rates.get("replay_seconds") or each / REPLAY_BYTES_PER_SECOND

    def _told(self) -> None:
        if self._tell is not None:
            self._tell(self)


def announced(
    emit: Callable[..., None], show: Callable[[RecoveryProgress], None] | None
) -> Callable[[RecoveryProgress], None]:
    """Return a callback that passes progress to ``show``, and announces the recovery in the log by ``emit``."""

    def tell(recovery: RecoveryProgress) -> None:
        if not recovery.loaded_bytes and not recovery.over:
            emit(
                "recovering", base_step=recovery.base_step, to_step=recovery.to_step, text=recovery.text,
                predicted_seconds=recovery.predicted_seconds,
            )  # fmt: skip
        if show is not None:
            show(recovery)

    return tell
