"""The machine's profile, kept between runs: measured if absent, corrected by measured steps.

It lies in ``$XDG_CACHE_HOME/holdfast`` (``~/.cache/holdfast``), one file for each host, device and file system;
``holdfast plan --machine`` reads the same files. ``HOLDFAST_MACHINE`` names another profile to use instead, which is
never written.
"""

from __future__ import annotations

import os
import platform
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import xxhash

from ..accelerators import is_accelerator, name_of
from ..errors import ConfigError, DoesNotFit, HoldfastError
from ..profiles import MachineProfile, load_machine, to_toml
from ..quantities import MiB, format_bytes
from ..store.disk import Disk, write_durably
from .host_memory import free_host_bytes
from .machine_probe import MOST_OF_DISK, BlockTimes, probe_machine
from .ssd import LEAST_BYTES

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
