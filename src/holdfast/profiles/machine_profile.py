"""The profile of a machine: its sizes in bytes and the rates that it attains per second.

Rates must be those attained, not those printed on the box, because the planner trusts them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .profile_keys import key


@dataclass(frozen=True, kw_only=True)
class MachineProfile:
    """One device that computes, its host, and its SSDs, which are equal and used together."""

    description: str = key("description", "text", "what it is, for a person")
    device_memory_bytes: int = key(
        "device.memory", "bytes", "of the device, that training may take; 0 with shares_host", 0
    )
    device_flop_per_second: float = key("device.flops", "number", "attained by a block in the training dtype")
    device_shares_host: bool = key(
        "device.shares_host",
        "flag",
        "it computes in host memory, on the cores that step the optimizer: a CPU",
        False,
    )
    upload_bytes_per_second: int | None = key(
        "device.upload", "rate", "host to device, from pinned memory", None
    )
    download_bytes_per_second: int | None = key("device.download", "rate", "device to host", None)
    copy_bytes_per_second: int | None = key(
        "device.copies", "rate", "both ways at once, in all; without it they take turns", None
    )
    compute_factor: float = key(
        "device.factor", "number", "that computing takes in a run, of what a block takes by itself", 1.0
    )
    compute_threads: int = key("device.threads", "count", "that compute, if the host does; 0 is all cores", 0)
    host_memory_bytes: int = key("host.memory", "bytes", "of the host, that training may take")
    update_elements_per_second: float = key("host.update", "number", "parameters that the host's Adam steps")
    host_cores: int = key("host.cores", "count", "of the host; 0 is as many as compute, if it computes", 0)
    check_bytes_per_second: int | None = key(
        "host.checks",
        "rate",
        "that a core checksums, as all is that the SSD moves; without it for nothing",
        None,
    )
    ssd_count: int = key("ssd.count", "count", "SSDs; what is below is of each", 1)
    ssd_read_bytes_per_second: int = key("ssd.read", "rate", "of large reads alone, sustained")
    ssd_write_bytes_per_second: int = key("ssd.write", "rate", "of large writes alone, sustained")
    ssd_mixed_bytes_per_second: int | None = key(
        "ssd.mixed", "rate", "half reads and half writes, in all; without it they take turns", None
    )
    ssd_capacity_bytes: int = key("ssd.capacity", "bytes", "that the run may fill")
    ssd_sync_seconds: float = key("ssd.sync", "seconds", "until a small write is durable", 0.0)
    ssd_rated_bytes: int = key("ssd.rated", "bytes", "that it may be written in its life (TBW)", 600 * 10**12)

    def __post_init__(self) -> None:
        if self.ssd_count < 1:
            raise ValueError(f"ssd.count = {self.ssd_count}: there must be one")
        if self.device_shares_host:
            return
        for path, value in (
            ("device.memory", self.device_memory_bytes),
            ("device.upload", self.upload_bytes_per_second),
            ("device.download", self.download_bytes_per_second),
        ):
            if not value:
                raise ValueError(f"{path} must be given, unless device.shares_host = true")

    @property
    def spare_cores(self) -> int:
        """The number of cores that do not compute; 0 if unknown."""
        return max(self.host_cores - self.compute_threads, 0) if self.compute_threads else 0

    def with_more(self, *, host_bytes: int = 0, ssds: int = 0) -> MachineProfile:
        """Return the same machine with more host memory and more SSDs of the same kind."""
        return replace(
            self, host_memory_bytes=self.host_memory_bytes + host_bytes, ssd_count=self.ssd_count + ssds
        )
