"""Profiles by name or path: those that come with the library, TOML files, and model folders of transformers.

``holdfast plan --model FOLDER`` takes the folder that ``holdfast train --model FOLDER`` trains. Only architectures
whose parameters the profile counts within one percent (tests/profiles/test_pretrained.py) are accepted. A written
profile is read back equal. Called by the planning commands and by measurements that are kept.
"""

from __future__ import annotations

import tomllib
from dataclasses import fields
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from ..config import literal
from ..errors import ConfigError
from ..regular_files import home_path
from .profile_types import MachineProfile, ModelProfile, from_document, path_of

Profile = TypeVar("Profile", MachineProfile, ModelProfile)
HERE = __name__.rpartition(".")[0]
FOLDERS = {MachineProfile: "machines", ModelProfile: "models"}
GATED = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "granite",
    "olmo2",
    "smollm3",
)
"""Architectures whose MLP has three matrices, and whose matrices have few biases or none."""
PLAIN = ("gpt2", "gpt_neox")
"""Architectures whose MLP has two matrices, and whose matrices and norms have biases."""
LEARNED_POSITIONS = ("gpt2",)
FUSED = ("gpt2", "gpt_neox", "phi3")
"""Architectures with one linear layer for queries, keys and values, and with one for gate and up if gated."""
DEFAULT_SEQUENCE = 2048
"""The tokens of one sequence, or fewer where the model is limited to fewer."""


def load_machine(name: str) -> MachineProfile:
    """Load a machine profile by its name, or from the TOML file at that path. Raises ``ConfigError``."""
    return _load(MachineProfile, name, "machine")


def load_model(name: str) -> ModelProfile:
    """Load a model profile by name, from a TOML file, or from a transformers model folder. Raises ``ConfigError``."""
    if (folder := home_path(name)).is_dir() and name not in known(ModelProfile):
        return model_of_folder(folder)
    return _load(ModelProfile, name, "model")


def known(kind: type[MachineProfile] | type[ModelProfile]) -> list[str]:
    """Return the names of the profiles that come with the library."""
    folder = files(HERE) / FOLDERS[kind]
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml"))


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


def model_of_folder(folder: Path) -> ModelProfile:
    """Return the profile of the model in ``folder``.

    Raises ``ConfigError`` where transformers is missing, the configuration cannot be read, or the architecture is
    not one that a profile describes.
    """
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ConfigError(
            f"reading {folder} takes transformers: pip install transformers; or describe the model in a TOML file"
            " (docs/plan.md)"
        ) from error
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many classes, by what is wrong in the file
        raise ConfigError(f"{folder} has no configuration that transformers reads: {error}") from error
    return model_of_config(config.get_text_config(), f"the model in {folder}")


def model_of_config(config: Any, what: str) -> ModelProfile:
    """Return the profile of a decoder with the transformers configuration ``config``; errors name it ``what``."""
    kind = config.model_type
    if kind not in GATED + PLAIN:
        raise ConfigError(
            f"{what} is of type {kind!r}, whose blocks no profile describes. Types that are read:"
            f" {', '.join(sorted(GATED + PLAIN))}. Describe it in a TOML file (docs/plan.md)"
        )
    plain = kind in PLAIN
    hidden = getattr(config, "n_inner", None) if kind == "gpt2" else config.intermediate_size
    longest = config.max_position_embeddings
    return ModelProfile(
        description=f"{kind} of {Path(config.name_or_path).name or 'a folder'}",
        blocks=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or 0,
        head_size=getattr(config, "head_dim", None) or 0,
        hidden=hidden or 0,
        gated=not plain,
        biases=plain,
        fused=kind in FUSED,
        vocabulary=config.vocab_size,
        tied=bool(config.tie_word_embeddings),
        positions=longest if kind in LEARNED_POSITIONS else 0,
        sequence=min(DEFAULT_SEQUENCE, longest),
        micro_batch=1,
    )


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
