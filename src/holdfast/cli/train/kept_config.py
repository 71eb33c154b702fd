"""The latest training configuration of a run, kept as ``config.toml`` in its directory.

Where ``offload.ssd`` puts the state elsewhere, a copy lies beside the state, so that no other run takes the state for
its own. The record is durable before the first commit, and binds nothing until then. A continued run keeps its
identity: keys marked ``fixed`` in ``config.py`` keep their values, keys marked ``stated`` change only by ``--set``
(``train.clipping`` also where no bit changes), and the state stays where it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

from ...config import Config, Dtype, changed_keys, is_marked, literal, load_config, to_toml
from ...errors import ConfigError, NoCommit, RunMismatch
from ...store.disk import Disk, write_durably
from ...store.run_store import LocalStore

NAME = "config.toml"
PLACES = ("run.dir", "offload.ssd")
"""Keys that tell where a run is, not what it is."""


def write_record(config: Config) -> None:
    """Store ``config`` in the run's directory and beside its state, durably.

    A file with equal content stays, with its comments.
    """
    config = _with_rate(config)
    run, state = Path(config.run.dir), state_directory(Path(config.run.dir), config)
    if config.offload.ssd:  # an absolute path works from any working directory
        config = replace(config, offload=replace(config.offload, ssd=str(state.absolute())))
    config = _with_absolute_paths(config)
    for directory in dict.fromkeys((state, run)):
        disk = Disk(directory)
        disk.makedirs("")
        with suppress(ConfigError, OSError):
            if (
                load_config(directory / NAME) == config
            ):  # its writer may have been killed before a sync, or nobody synced the copy
                disk.sync(NAME, why="configuration")
                disk.sync_dir("", why="configuration directory")
                continue
        write_durably(disk, NAME, to_toml(config).encode(), why="configuration")


def read_record(directory: Path) -> Config | None:
    """Return the configuration kept in ``directory``. Warns and returns None if it cannot be read."""
    path = directory / NAME
    try:
        return _with_rate(load_config(path)) if path.is_file() else None
    except ConfigError as error:
        warnings.warn(f"the run's own configuration is not considered: {error}", stacklevel=2)
        return None


def record_of_run(run: Path, state: Path) -> Config | None:
    """Return the configuration of ``run``, whose state is in ``state``. None if it has none, or no first commit."""
    return _binding_record(run) or _binding_record(state)


def _binding_record(directory: Path) -> Config | None:
    """Return the configuration kept in ``directory``, unless its run was interrupted before the first commit.

    The copy beside the state shows that the disk of the state is mounted, and that there is no commit.
    """
    record = read_record(directory)
    if record is None:
        return None
    state = state_directory(directory, record)
    if not _has_commits(state) and (state / NAME).is_file():
        return None
    if record.train.micro_batches == "auto":
        raise RunMismatch(
            f'{directory / NAME} has train.micro_batches = "auto", and a run keeps the number that it was begun with.'
            " Write that number there."
        )
    return record


def kept_dtype(config: Config) -> Dtype | None:
    """Return the compute dtype of the run that ``config`` continues; None if there is no such run.

    It comes from the run's record, or from its newest commit if the record is gone.
    """
    from ...offload.setup.engine_resume import dtype_of_run  # imports torch, which other verbs do without

    run = Path(config.run.dir)
    state = state_directory(run, config)
    kept = record_of_run(run, state)
    if kept is not None and kept.train.dtype != "auto":
        return kept.train.dtype
    return dtype_of_run(state)


def kept_micro_batches(config: Config) -> int | None:
    """Return the number of micro-batches of the run that ``config`` continues; None if there is no such run.

    Raises ``RunMismatch`` if the run is there and its record is gone: another number would give other numbers.
    """
    run = Path(config.run.dir)
    state = state_directory(run, config)
    kept = record_of_run(run, state)
    if kept is not None:
        return kept.train.num_micro_batches
    if _has_commits(state):
        raise RunMismatch(
            f"{state} holds a run, and {run / NAME}, which has the number that was chosen for train.micro_batches ="
            ' "auto", is not there. Give the number, with --set train.micro_batches=N.'
        )
    return None


def kept_packing(config: Config) -> str | None:
    """Return ``data.packing`` of the run that ``config`` continues; None if there is no such run."""
    run = Path(config.run.dir)
    kept = record_of_run(run, state_directory(run, config))
    return None if kept is None else kept.data.packing


def state_directory(run: Path, config: Config | None) -> Path:
    """Return where the state of ``run`` is, according to its configuration."""
    return Path(config.offload.ssd) if config is not None and config.offload.ssd else run


def changes_to_run(config: Config, stated: Collection[str]) -> dict[str, tuple[Any, Any]]:
    """Return what ``config`` changes in the run that it continues: ``{key: (old value, new value)}``.

    ``stated`` are the keys given by ``--set``. Raises ``RunMismatch`` for a change that is not allowed.
    """
    config, run = _with_rate(_with_absolute_paths(config)), Path(config.run.dir)
    state = state_directory(run, config)
    record = _binding_record(run)
    if record is not None:
        _refuse_another_place(run, state_directory(run, record), state)
    beside = _binding_record(state) if state != run else None
    for directory, kept in ((run, record), (state, beside)):
        if kept is not None:
            _refuse_another_run(directory, changed_keys(kept, config))
    record = record or beside
    if record is None:
        return {}
    changed = {key: pair for key, pair in changed_keys(record, config).items() if key not in PLACES}
    unstated = {k: v for k, v in changed.items() if is_marked(k, "stated") and k not in stated}
    _refuse_unstated(run, {k: v for k, v in unstated.items() if not _keeps_bits(k, v)})
    _refuse_other_samples(run, config, changed)
    return changed


def _keeps_bits(key: str, change: tuple[Any, Any]) -> bool:
    """Return whether a run has the same bits after ``change``. Most ways of clipping differ in time alone."""
    return key == "train.clipping" and "per_block" not in change


def _with_rate(config: Config) -> Config:
    """Return ``config`` with the number for "auto", which a run keeps even if a later version changes the default."""
    return replace(config, train=replace(config.train, learning_rate=config.train.highest_rate))


def _with_absolute_paths(config: Config) -> Config:
    """Return ``config`` with absolute paths of the drives, which work from any working directory."""
    drives = tuple(str(Path(drive).absolute()) for drive in config.offload.drives)
    return replace(config, offload=replace(config.offload, drives=drives))


def describe(changed: dict[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{key} {literal(before)} -> {literal(now)}" for key, (before, now) in changed.items())


def _refuse_another_run(directory: Path, changed: dict[str, tuple[Any, Any]]) -> None:
    for key, (before, now) in changed.items():
        if is_marked(key, "fixed"):
            raise RunMismatch(
                f"{directory} is another run: its {key} is {literal(before)}, and {literal(now)} was asked for. Give "
                f"the same value (--set {quote(f'{key}={_as_word(before)}')}; what is not given is the default), or"
                " another directory with --set run.dir=..."
            )


def _refuse_unstated(run: Path, changed: dict[str, tuple[Any, Any]]) -> None:
    if changed:
        before, now = (
            " ".join(f"--set {quote(f'{key}={_as_word(pair[i])}')}" for key, pair in changed.items())
            for i in (0, 1)
        )
        raise RunMismatch(
            f"{run} was trained otherwise: {describe(changed)}. Say {before} to go on as before, or {now} to change "
            "it from here on; another run needs another directory, --set run.dir=..."
        )


def _refuse_other_samples(run: Path, config: Config, changed: dict[str, tuple[Any, Any]]) -> None:
    """Raise ``RunMismatch`` if the share that is held out of the trained text would change."""
    before, now = changed.get("data.validation", ("", ""))
    if config.data.validation_fraction and bool(before) != bool(now):
        raise RunMismatch(
            f"{run} was trained with data.validation = {before!r}, not {now!r}. A share of data.text is held out only"
            f" without that text (data.validation_fraction = {config.data.validation_fraction}), so other samples"
            f" would be trained on. Say --set {quote(f'data.validation={before}')} to go on as before; another run"
            " needs another directory, --set run.dir=..."
        )


def _as_word(value: Any) -> Any:
    """Return ``value`` as ``--set`` accepts it from a shell."""
    return f"[{','.join(value)}]" if isinstance(value, tuple) else value


def _refuse_another_place(run: Path, there: Path, here: Path) -> None:
    """Raise ``RunMismatch`` if the state is not ``here`` but where it was at the last training, ``there``."""
    same = there.resolve() == here.resolve()
    if _has_commits(here) and (same or not _has_commits(there)):  # it was moved
        return
    if same or not _has_commits(there):
        raise RunMismatch(
            f"{run} was trained with its state in {there}, and there is none in {here}. Is its disk mounted? To "
            f"begin anew give another directory with --set run.dir=..., or remove {run / NAME}."
        )
    back = '--set offload.ssd=""' if there == run else f"--set offload.ssd={there}"
    raise RunMismatch(
        f"{run} has its state in {there}, and offload.ssd = {literal(str(here))} would begin another run there. Say "
        f"{back}, or move commits, data, index and timelines there first; another run needs another run.dir."
    )


def _has_commits(directory: Path) -> bool:
    try:
        return bool(LocalStore.read(directory).commits())
    except NoCommit:
        return False
