"""The model of ``model.path`` as the sections ``[lora]`` and ``[quantization]`` have it trained.

It is the model itself, or adapters on it; the frozen model under adapters may be quantised by bitsandbytes here, or lie
quantised in its folder. Nothing is written before all has been compared with the model. Called by ``recipe``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from ...config import Config
from ...errors import ConfigError
from ...models.keeping import CONFIG, checked
from ...models.lora_adapters import adapter_config, set_magnitudes, with_adapters
from ...models.pretrained import Weights, empty_model
from ...models.quantise_folder import is_made_of, quantise_folder, refuse_lack_of_bitsandbytes
from ...offload.model.quantised_layers import are_unpacked_here
from ..machine import launched

BASE = "base"
"""The directory beside the state for the model that this run has quantised."""


class FolderBase:
    """The model in a folder, to be trained whole or under adapters."""

    def __init__(self, config: Config, described: Path, base: Path) -> None:
        """Build the model on ``meta``, and refuse settings that do not fit it.

        Args:
            config: The configuration.
            described: The folder with the configuration of the model: that of ``model.path``, or the run's copy of it.
            base: The directory for a model that is quantised here.

        Raises:
            ConfigError: A setting of [lora] or [quantization] does not fit the model.
            ModelNotSupported: The model cannot be trained, or not whole.
        """
        self._config, self._base, self._folder = config, base, Path(config.model.path)
        self._packed = _is_quantised(described)
        if self._packed and config.lora.are_wanted:
            described = checked(self._folder)  # the headers of its files have the shapes of packed weights
        self.model: nn.Module = empty_model(described, quantised=config.lora.are_wanted)
        self._refuse_unfit()
        self._weights = Weights(self._folder, self.model)  # read by a run without a commit
        self._adapted: Any = None
        if config.lora.are_wanted:
            packs = config.quantization.is_wanted
            self._adapted = with_adapters(self.model, config.lora, self._folder, packs=packs)

    def trained(self, *, begins: bool, say: Callable[[str], None]) -> tuple[nn.Module, Weights]:
        """Return the model that is trained, and the weights that it begins with.

        Args:
            begins: Whether the run has no commit yet.
            say: Called with a line before something that takes long.
        """
        config, folder = self._config, self._folder
        if config.quantization.is_wanted:
            # a begun run keeps its base: its commits refer to it, and the folder may be gone
            if not (self._base / CONFIG).is_file() or (
                begins and not is_made_of(self._base, checked(folder), config.quantization)
            ):
                say(f"quantising {folder} to {config.quantization.bits} bits")
                quantise_folder(checked(folder), self._base, config.quantization)
            packed = empty_model(self._base, quantised=True)
            self._weights = Weights(self._base, packed, reference=launched()[1] == 1)
            self._adapted = with_adapters(packed, config.lora, folder)
        elif config.lora.dora and begins:
            set_magnitudes(self._adapted, self._weights)
        return self.model if self._adapted is None else self._adapted, self._weights

    def adapter_config(self) -> bytes:
        """Return the ``adapter_config.json`` of the adapters; empty if there are none."""
        return b"" if self._adapted is None else adapter_config(self._adapted, self._folder)

    def _refuse_unfit(self) -> None:
        lora, quantization = self._config.lora, self._config.quantization
        if quantization.is_wanted and self._packed:
            raise ConfigError(
                f"quantization.bits = {quantization.bits}: the weights in {self._folder} are quantised already. Leave"
                " [quantization] out."
            )
        if lora.dora and (quantization.is_wanted or not are_unpacked_here(self.model)):
            raise ConfigError(
                "lora.dora = true: its magnitudes begin with the norms of the weights, which bitsandbytes has packed or"
                " will pack. Train LoRA on such a base, or DoRA on the folder that it was made from."
            )
        if quantization.is_wanted:
            refuse_lack_of_bitsandbytes(quantization)


def _is_quantised(folder: Path) -> bool:
    """Return whether the weights in ``folder`` are quantised, as far as its configuration can be read."""
    try:
        told = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError):
        return False  # which building the model reports
    return isinstance(told, dict) and bool(told.get("quantization_config"))
