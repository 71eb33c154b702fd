"""Profile files: those that come with the library, by name, and any other, by its path."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

from ..config import literal
from ..errors import ConfigError
from ..regular_files import home_path
from .config_json import model_of_folder
from .machine_profile import MachineProfile
from .model_profile import ModelProfile
from .profile_keys import from_document, path_of

Profile = TypeVar("Profile", MachineProfile, ModelProfile)

HERE = __name__.rpartition(".")[0]
FOLDERS = {MachineProfile: "machines", ModelProfile: "models"}


def known(kind: type[MachineProfile] | type[ModelProfile]) -> list[str]:
    """Return the names of the profiles that come with the library."""
    folder = files(HERE) / FOLDERS[kind]
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml"))


def load_machine(name: str) -> MachineProfile:
    """Load a machine profile by its name, or from the TOML file at that path. Raises ``ConfigError``."""
    return _load(MachineProfile, name, "machine")


def load_model(name: str) -> ModelProfile:
    """Load a model profile by name, from a TOML file, or from a transformers model folder. Raises ``ConfigError``."""
    if (folder := home_path(name)).is_dir() and name not in known(ModelProfile):
        return model_of_folder(folder)
    return _load(ModelProfile, name, "model")


def to_toml(machine: MachineProfile, comments: dict[str, str] | None = None) -> str:
    """Return ``machine`` as TOML that ``load_machine`` reads back equal.

    ``comments``, by path of the key, stand behind the values.
    """
    lines, section = [], ""
    for declared in fields(machine):
        value, kind = getattr(machine, declared.name), declared.metadata["kind"]
        *sections, name = path_of(declared).split(".")
        if value == declared.default and (value in (None, 0) or kind == "number"):
            continue
        if sections and sections[0] != section:
            section = sections[0]
            lines += ["", f"[{section}]"]
        shown = _shown(value, kind)
        comment = (comments or {}).get(path_of(declared), declared.metadata["doc"])
        lines.append(f"{f'{name} = {shown}':<30} # {comment}")
    return "\n".join([*lines, ""])


def _shown(value: object, kind: str) -> str:
    """Return ``value`` as TOML writes it."""
    if isinstance(value, float):
        return f"{value:.12g}"
    if isinstance(value, int) and kind in ("bytes", "rate"):
        return literal(_size(value) + "/s" * (kind == "rate"))
    return literal(value)


def _size(count: int) -> str:
    """Return ``count`` bytes exactly, in the largest unit that needs no fraction."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count % size == 0:
            return f"{count // size}{unit}"
    return f"{count}B"


def _load(kind: type[Profile], name: str, noun: str) -> Profile:
    here = known(kind)
    if name in here:
        text = (files(HERE) / FOLDERS[kind] / f"{name}.toml").read_text()
    elif name.endswith(".toml") or "/" in name:
        text = _read(home_path(name), noun)
    else:
        close = get_close_matches(name, here, n=1)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise ConfigError(
            f"there is no {noun} {name!r}{hint} There are: {', '.join(here)}; or give the path of a TOML file "
            "(docs/plan.md)"
        )
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{noun} {name} is not TOML: {error}") from error
    return from_document(kind, document, f"{noun} {name}")


def _read(path: Path, noun: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{noun} {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{noun} {path} is not TOML: {error}") from error
