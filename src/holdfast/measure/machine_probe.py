"""The measurement of a whole machine within a time, as a profile that names the source of each figure.

What cannot be measured here (such as the life of an SSD) is assumed and marked so. Called by ``holdfast probe``, and by
``offload`` on the first run on a machine.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import accelerators
from ..optim.torch_threads import update_threads
from ..profiles import MachineProfile
from ..quantities import format_bytes
from .hardware_rates import WORKERS, Copies, measure_checks, measure_copies, measure_update
from .ssd import Ssd, measure_ssd

SHARES = {"ssd": 0.5, "block": 0.2, "copies": 0.15, "update": 0.1, "checks": 0.02}
"""Fractions of the given time; the rest passes between measurements."""
MB = 10**6
MOST_OF_DISK = 4
"""The file takes at most the free space divided by this."""


@dataclass(frozen=True)
class BlockTimes:
    """The times of one micro-batch through one block."""

    forward_seconds: float
    backward_seconds: float
    """The seconds of the backward pass, with the recomputation."""
    flop_per_second: float
    what: str
    """A description of the block that was timed, for a person."""


@dataclass(frozen=True)
class Probed:
    """The result of a probe."""

    profile: MachineProfile
    sources: dict[str, str]
    """The source of each key of the profile, by the key's path."""
    ssd: Ssd
    block: BlockTimes
    copies: Copies | None
    seconds: float
    """The seconds that the probe took."""


def probe_machine(
    directory: Path,
    device: torch.device,
    host_memory_bytes: int,
    *,
    file_bytes: int,
    seconds: float,
    time_block: Callable[[float], BlockTimes],
    say: Callable[[str], object] = lambda what: None,
) -> Probed:
    """Measure the machine for about ``seconds``.

    ``time_block`` receives the seconds that it may take; ``say`` receives the name of each measurement before it
    begins.
    """
    began = time.perf_counter()
    free = shutil.disk_usage(directory).free
    say("the SSD")
    ssd = measure_ssd(directory, min(file_bytes, free // MOST_OF_DISK), SHARES["ssd"] * seconds)
    say("a block")
    block = time_block(SHARES["block"] * seconds)
    say("copies")
    copies = measure_copies(device, SHARES["copies"] * seconds)
    say("the host's optimizer")
    threads = update_threads(copies is None, WORKERS)
    update = measure_update(SHARES["update"] * seconds, threads=threads)
    checks = measure_checks(SHARES["checks"] * seconds)
    profile = MachineProfile(
        description=_description(device),
        device_memory_bytes=_whole(accelerators.unclaimed_bytes(device)) if copies else 0,
        device_flop_per_second=_rounded(block.flop_per_second),
        device_shares_host=copies is None,
        upload_bytes_per_second=_whole(copies.upload) if copies else None,
        download_bytes_per_second=_whole(copies.download) if copies else None,
        copy_bytes_per_second=_whole(copies.both) if copies else None,
        host_memory_bytes=_whole(host_memory_bytes),
        update_elements_per_second=_rounded(update),
        host_cores=os.cpu_count() or 0,
        compute_threads=0 if copies else torch.get_num_threads(),
        check_bytes_per_second=_whole(checks),
        ssd_read_bytes_per_second=_whole(ssd.read),
        ssd_write_bytes_per_second=_whole(ssd.write),
        ssd_mixed_bytes_per_second=_whole(ssd.mixed),
        ssd_capacity_bytes=_whole(free),
        ssd_sync_seconds=_rounded(ssd.sync_seconds),
    )
    return Probed(
        profile, _sources(ssd, block, WORKERS * threads), ssd, block, copies, time.perf_counter() - began
    )


def _description(device: torch.device) -> str:
    if accelerators.is_accelerator(device):
        return f"{accelerators.name_of(device)}, measured by holdfast probe"
    return f"a CPU with {torch.get_num_threads()} threads, measured by holdfast probe"


def _whole(count: float) -> int:
    """Return ``count`` bytes rounded down to whole MB, at least one."""
    return max(int(count) // MB, 1) * MB


def _rounded(rate: float) -> float:
    """Return ``rate`` rounded to four digits, since no measurement has more."""
    return float(f"{rate:.4g}")


def _sources(ssd: Ssd, block: BlockTimes, threads: int) -> dict[str, str]:
    how = "O_DIRECT" if ssd.direct else "through the page cache, so these are rates of memory"
    on_ssd = f"measured, {how}, file of {format_bytes(ssd.file_bytes)}"
    return {
        "device.memory": "free now",
        "device.flops": f"measured: {block.what}",
        "device.upload": "measured, pinned memory",
        "device.download": "measured, pinned memory",
        "device.copies": "measured, both at once",
        "host.memory": "free now",
        "host.cores": "counted",
        "host.checks": "measured: xxh3 of what is in no cache, one core",
        "device.threads": "torch's, when it was measured",
        "host.update": f"measured: AdamW in fp32 with a bf16 copy, {threads} threads",
        "ssd.count": "what is below is of the directory that was measured, whatever it consists of",
        "ssd.read": on_ssd,
        "ssd.write": on_ssd,
        "ssd.mixed": on_ssd,
        "ssd.capacity": "free now",
        "ssd.sync": "measured, a small write",
        "ssd.rated": "assumed: look up what yours is rated for",
    }
