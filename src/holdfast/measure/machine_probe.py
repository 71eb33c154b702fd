"""The profile of this machine: measured as a whole within a time, kept between runs, and corrected by measured steps.

A profile names the source of each figure. What cannot be measured here (such as the life of an SSD) is assumed and
marked so. It lies in ``$XDG_CACHE_HOME/holdfast`` (``~/.cache/holdfast``), one file for each host, device and file
system; ``holdfast plan --machine`` reads the same files. ``HOLDFAST_MACHINE`` names another profile to use instead,
which is never written.

Called by ``holdfast probe``, and by ``offload`` on the first run on a machine.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import xxhash

from .. import accelerators
from ..accelerators import is_accelerator, name_of
from ..errors import ConfigError, DoesNotFit, HoldfastError
from ..optim.torch_threads import update_threads
from ..profiles import MachineProfile, Precision, load_machine, to_toml
from ..quantities import MiB, format_bytes
from ..store.disk import Disk, write_durably
from .drive_rates import LEAST_BYTES, Ssd, measure_ssd
from .free_memory import free_host_bytes
from .hardware_rates import WORKERS, Copies, measure_checks, measure_copies, measure_update

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
    precision: Precision


def precision_of(dtype: torch.dtype) -> Precision:
    """Return the precision of a profile for computations in ``dtype``; bf16 stands for 16 bits."""
    return "fp32" if dtype.itemsize > 2 else "bf16"


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
        precision=block.precision,
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
        "device.precision": "of what was measured, and of compute copies",
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


VARIABLE = "HOLDFAST_MACHINE"

SECONDS = 4.0
"""The seconds that a probe takes."""

FILE_BYTES = 512 * MiB

CORRECTED = dict.fromkeys(
    (
        "device.factor", "device.upload", "device.download", "device.copies",
        "host.update", "ssd.read", "ssd.write", "ssd.mixed", "ssd.sync",
    ),
    "measured, and corrected by measured steps",
)  # fmt: skip
"""The source that a profile names for figures that a run has corrected."""


@dataclass(frozen=True)
class CachedProfile:
    """The profile of this machine. Host memory and disk space are those that are free now."""

    profile: MachineProfile
    path: Path | None
    """The file of the profile; None if it belongs to the user or could not be written."""
    name: str
    """The profile's name for messages."""
    measured_now: bool


def machine_at(
    directory: Path,
    device: torch.device,
    time_block: Callable[[float], BlockTimes],
    say: Callable[[str], object],
    needed_bytes: int = 0,
) -> CachedProfile:
    """Return the profile of this machine with its state in ``directory``, measured if there is none yet.

    Args:
        directory: The directory of the state, which exists.
        time_block: Times one block within the given seconds.
        say: Receives a message before each measurement.
        needed_bytes: The least disk space of the run; a lack of it is reported first.

    Raises:
        DoesNotFit: The disk cannot hold ``needed_bytes``.
        ConfigError: The disk has too little room for the measurement, or a named profile is wrong.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return CachedProfile(_now(load_machine(named), directory), None, named, False)
    path = _path(directory, device)
    with suppress(ConfigError):
        return CachedProfile(_now(load_machine(str(path)), directory), path, str(path), False)
    free = shutil.disk_usage(directory).free
    if free // MOST_OF_DISK < LEAST_BYTES:
        if needed_bytes > free:
            raise DoesNotFit(
                f"the run does not fit: {directory} needs at least {format_bytes(needed_bytes)} ({needed_bytes} bytes),"
                f" and {format_bytes(free)} are free. Free some, or choose another directory."
            )
        raise ConfigError(
            f"there is too little room in {directory} to measure its SSD: {format_bytes(free)} are free, and "
            f"{format_bytes(MOST_OF_DISK * LEAST_BYTES)} are needed. Name a profile of the machine in the "
            f"environment, {VARIABLE}=cpu-2-core or a file of `holdfast probe`, or give all fractions yourself."
        )
    found = probe_machine(
        directory,
        device,
        free_host_bytes(),
        file_bytes=FILE_BYTES,
        seconds=SECONDS,
        time_block=time_block,
        say=lambda what: say(f"measuring this machine for a few seconds, once: {what}"),
    )
    kept = keep(path, found.profile, found.sources)
    return CachedProfile(found.profile, path if kept else None, str(path), True)


def keep(path: Path, profile: MachineProfile, sources: dict[str, str]) -> bool:
    """Write ``profile`` and return True; where that fails, warn and return False."""
    try:
        disk = Disk(path.parent)
        disk.makedirs("")
        write_durably(disk, path.name, to_toml(profile, sources).encode(), why="profile of the machine")
        return True
    except (OSError, HoldfastError) as error:
        warnings.warn(
            f"the profile of this machine is not kept, and will be measured again: {error}", stacklevel=2
        )
        return False


def _now(profile: MachineProfile, directory: Path) -> MachineProfile:
    free = shutil.disk_usage(directory).free
    return replace(profile, host_memory_bytes=free_host_bytes(), ssd_capacity_bytes=free)


def _path(directory: Path, device: torch.device) -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    name = name_of(device) if is_accelerator(device) else f"cpu {torch.get_num_threads()}"
    identity = f"{platform.node()}|{name}|{os.stat(directory).st_dev}"
    return Path(home, "holdfast", f"machine-{xxhash.xxh3_64_hexdigest(identity.encode())}.toml")
