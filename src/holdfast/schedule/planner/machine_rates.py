"""The machine as the simulator sees it: the speed of each lane.

Rates are per second. What costs no time (a transfer on a device that computes in host memory) has an infinite rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf

from ..operations import COMMIT, COMPUTE, DOWNLOAD, EXCHANGE, SSD_READ, SSD_WRITE, UPDATE, UPLOAD, Op

SSD, BUS, CORES = "ssd", "bus", "cores"
"""Names of the resources that serve two lanes where these compete."""
SHARED_BY = {SSD_READ: SSD, SSD_WRITE: SSD, UPLOAD: BUS, DOWNLOAD: BUS, COMPUTE: CORES, UPDATE: CORES}
"""The resource that serves a lane where it is shared."""
RESOURCE_NAMES = {
    SSD: "the SSD",
    BUS: "copies",
    CORES: "cores",
    COMPUTE: "computing",
    UPDATE: "the optimizer",
}
"""Readable names of the resources that serve lanes."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Measured or assumed speeds."""

    ssd_read_bytes_per_second: float = inf
    ssd_write_bytes_per_second: float = inf
    upload_bytes_per_second: float = inf
    """Rate from host to device."""
    download_bytes_per_second: float = inf
    compute_flop_per_second: float = inf
    update_elements_per_second: float = inf
    """Rate of the host optimizer, all its workers together."""
    commit_seconds: float = 0.0
    """Seconds to publish a manifest, once its files are synced."""
    shared_ssd: bool = False
    """True if reads and writes compete: only one of them moves at a time. Otherwise each always has its full rate."""
    shared_bus: bool = False
    """True if uploads and downloads compete in the same way."""
    shared_cores: bool = False
    """True if computing and updates compete in the same way: on a CPU the same cores do both."""

    @cached_property
    def _rates(self) -> dict[str, float]:
        return {
            SSD_READ: self.ssd_read_bytes_per_second,
            SSD_WRITE: self.ssd_write_bytes_per_second,
            UPLOAD: self.upload_bytes_per_second,
            DOWNLOAD: self.download_bytes_per_second,
            COMPUTE: self.compute_flop_per_second,
            UPDATE: self.update_elements_per_second,
            EXCHANGE: inf,
        }

    def seconds(self, op: Op) -> float:
        """Return how long ``op`` occupies its lane."""
        if op.lane == COMMIT:
            return self.commit_seconds
        amount = op.work if op.lane in (COMPUTE, UPDATE) else op.nbytes
        return amount / self._rates[op.lane]

    def by_server(self, busy: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds that each resource works, given those of its lanes.

        A shared resource works for one lane at a time.
        """
        found: dict[str, float] = {}
        for lane, seconds in busy.items():
            found[self.server(lane)] = found.get(self.server(lane), 0.0) + seconds
        return found

    def server(self, lane: str) -> str:
        """Return the resource that serves ``lane``: the lane itself, or the one that it shares."""
        shared = SHARED_BY.get(lane, lane)
        return shared if getattr(self, f"shared_{shared}", False) else lane
