"""The models in folders of Hugging Face: built on ``meta`` from ``config.json``, with the weights as a source.

The model is never whole in memory. Its modules are built empty, and each tensor of its files goes directly to where the
run keeps it. transformers is imported when a folder is opened, and nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ..errors import BadInput, ModelNotSupported, RunMismatch
from ..formats.entry_matching import Allowed
from ..formats.naming import Converted, by_model
from ..formats.readers.safetensors_files import SafetensorsFiles, is_safetensors
from ..formats.restore import read_tensors
from ..formats.source import StoredArray
from ..libraries import library
from ..offload.exit_hook import deferred
from ..offload.model.blocks import configurations, empty_parameters
from ..offload.model.peft_adapters import copied_modules
from ..quantities import first_line, shown
from ..sources import OpenedSource
from ..state.capture import Captured, join
from ..state.layout.regions import Region
from ..state.plain_tensors import FROM_NAME
from . import quantised_weights
from .keeping import CONFIG, OTHER_WEIGHTS, checked


def pretrained(folder: str | Path, *, reference: bool = False) -> tuple[nn.Module, Weights]:
    """Return the model in ``folder``, with parameters on ``meta``, and its weights for ``offload``.

    ``folder`` is as ``save_pretrained`` writes it. The model is of the class that was saved; of a model without a head
    it is the causal language model. With ``reference``, a run of one process reads frozen weights from there in every
    pass, verified, and has no copy of them: it needs the folder, unchanged, as long as it is used.
    Weights that bitsandbytes has quantised, torchao in int8, or those in fp8, stay packed and frozen: give it adapters.
    Raises ``BadInput`` if it is no such folder, or transformers or bitsandbytes is not installed.
    Raises ``ModelNotSupported`` if its weights are quantised in another way, or it needs code of its own.

        model, weights = holdfast.pretrained("llama")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        engine = holdfast.offload(model, optimizer, "runs/tuned", source=weights)
    """
    path = checked(folder)
    refuse_other_formats(path)
    model = empty_model(path, kind="trained", quantised=True)
    return model, Weights(path, model, reference=reference)


def transformers_for(what: str) -> Any:
    """Return the transformers library. Raises ``BadInput`` if it is not installed."""
    with deferred():  # an interrupted import would report a package as not installed
        return library("transformers", what, "pip install 'holdfast[models]'")


def empty_model(
    path: Path,
    *,
    kind: Literal["causal", "saved", "trained"] = "causal",
    quantised: bool = False,
    plain: bool = False,
) -> nn.Module:
    """Return the model that ``config.json`` describes, in training mode, with its parameters on ``meta``.

    It is the causal language model; with the kind "saved" one of the class that was saved, if ``config.json`` names
    that; with "trained" the same, unless that class has no head. Raises ``ModelNotSupported`` for models that need code
    of their own, and for quantised weights. With ``quantised``, weights that bitsandbytes has quantised and those in
    fp8 are accepted. With ``plain``, the model is the one that was quantised.
    """
    transformers = transformers_for(f"the model in {path}")
    told = _told(path)
    if (packed := told.get("quantization_config")) and not (quantised or plain):
        raise ModelNotSupported(
            f"{path} holds quantised weights (quantization_config), which cannot be trained. Give the folder that they"
            " were made from, or train adapters on it: --set lora.rank=16, or holdfast.pretrained(FOLDER) and PEFT."
        )
    if packed and not plain:
        quantised_weights.refuse_unknown(path, packed)
    if told.get("auto_map"):
        raise ModelNotSupported(
            f"{path} needs Python code that lies in it (auto_map), which is not run here. Build the model yourself"
            " under holdfast.empty_parameters() and pass source=holdfast.From(folder, partial=True, cast=True)."
        )
    made = None
    try:
        with deferred(), empty_parameters():
            config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
            made = None if kind == "causal" else _saved_class(transformers, config, bare=kind == "saved")
            if made is None:
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            else:
                model = made._from_config(config, dtype=torch.float32)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise ModelNotSupported(
            f"{path} is no {made.__name__ if made else 'causal language model'} that transformers"
            f" {transformers.__version__} knows:"
            f" {first_line(error)}"
        ) from error
    for _, each in configurations(model):
        if getattr(each, "use_cache", False):
            each.use_cache = False
    if packed and not plain:
        with deferred(), empty_parameters():
            quantised_weights.insert_quantised_layers(model, path)
    return model.train()


def _saved_class(transformers: Any, config: Any, bare: bool) -> Any:
    """Return the class of transformers that ``config`` names; None if it is of another configuration.

    Unless ``bare``, also None if it is the model without a head.
    """
    made = getattr(transformers, str((config.architectures or [""])[0]), None)
    if not isinstance(config, getattr(made, "config_class", None) or ()):
        return None
    headless = transformers.AutoModel._model_mapping.get(type(config), None)
    return made if bare or made is not headless else None


def _told(path: Path) -> dict[str, Any]:
    """Return the content of ``config.json``. Raises ``BadInput`` if it is not a JSON object."""
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path / CONFIG} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise BadInput(f"{path / CONFIG} is no JSON object")
    return config


def refuse_other_formats(path: Path) -> None:
    """Raise ``BadInput`` if the folder ``path`` has no weights in safetensors."""
    if is_safetensors(path):
        return
    others = sorted(each.name for each in path.iterdir() if each.suffix in OTHER_WEIGHTS)
    held = f" but {others[0]}" if others else ""
    raise BadInput(
        f"{path} has no model.safetensors and no index of several{held}. Load it with transformers once and save it"
        " again with save_pretrained(), which writes safetensors."
    )


class Weights:
    """The parameters and buffers of a folder, as the state that a fresh run of ``offload`` begins from.

    ``model`` may be wrapped or given adapters afterwards; its parameters are found again.
    """

    def __init__(self, path: Path, model: nn.Module, *, reference: bool = False) -> None:
        self.path, self._model, self._shapes = path, model, model.state_dict()
        self.reference = reference
        """True if a run is to read frozen weights from the folder, in place of a copy."""
        self._named = dict(model.named_parameters(remove_duplicate=False))
        self._own = {id(parameter) for parameter in self._named.values()}
        modules = model.named_modules(remove_duplicate=False)
        self._buffers = {
            (id(module), end): join(path, end) for path, module in modules for end in module._buffers
        }

    def dtypes(self) -> dict[int, torch.dtype]:
        """Return the dtype in which the folder has the values of each parameter, by the parameter's id.

        It is known if all floating-point tensors of the folder have one dtype of 16 bits. What quantised layers
        compute with does not count.
        """
        atoms = [stored.atom for stored in SafetensorsFiles(self.path).atoms.values()]
        found = {atom.dtype for atom in atoms if not quantised_weights.unpacks_weight(atom.name)}
        known = [FROM_NAME[name] for name in found if name in FROM_NAME]
        narrow = [dtype for dtype in known if dtype.is_floating_point and dtype.itemsize > 1]
        if len(narrow) != 1 or narrow[0] not in (torch.bfloat16, torch.float16):
            return {}
        return {id(parameter): narrow[0] for parameter in self._named.values()}

    def places(self) -> dict[int, StoredArray]:
        """Return where each parameter lies that the folder has as it is, by the parameter's id."""
        source = by_model(SafetensorsFiles(self.path), self._model, self._shapes)
        found = {name: source.place(name) for name in self._named}
        return {id(self._named[name]): place for name, place in found.items() if place is not None}

    def has(self, parameter: nn.Parameter) -> bool:
        """Return whether ``parameter`` is one that the model had from the beginning."""
        return id(parameter) in self._own

    def read(self, parameters: Iterable[nn.Parameter]) -> Iterator[torch.Tensor]:
        """Yield the values that the folder has for each of the model's ``parameters``, in the parameter's dtype.

        Raises ``RunMismatch`` if it has none.
        """
        source = by_model(SafetensorsFiles(self.path), self._model, self._shapes)
        names = {id(each): name for name, each in reversed(self._named.items())}
        for parameter in parameters:
            name = names[id(parameter)]
            if (stored := source.atoms.get(f"{name}/param")) is None:
                raise RunMismatch(f"{self.path} has no {name}. Is its config.json of other weights?")
            [value] = read_tensors(source, [(stored, Region.whole(stored.atom.shape))])
            yield value.to(parameter.dtype)

    def open(self) -> OpenedSource:
        """Return the state. Raises ``BadInput`` if there are no weights, ``Damaged`` if the files are not whole."""
        refuse_other_formats(checked(self.path))
        source = by_model(SafetensorsFiles(self.path), self._model, self._shapes)
        return _Begins(source, self._named, self._buffers, self.path)


class _Begins(OpenedSource):
    """An initial state of weights alone: the optimizer's state, the schedule and the rest begin with the run."""

    fresh = True

    def __init__(
        self,
        source: Converted,
        named: dict[str, nn.Parameter],
        buffers: dict[tuple[int, str], str],
        place: Path,
    ) -> None:
        super().__init__(source, Allowed(partial=True, cast=True), place)
        self._converted, self._named, self._buffers = source, named, buffers

    def match(self, captured: Captured, optimizer: torch.optim.Optimizer) -> list[str]:
        """Match the folder's tensors to the captured parameters, and return notes on unused ones.

        Raises ``RunMismatch`` if the folder lacks a parameter that the model had from the beginning. Parameters that
        were added since are initialised as in any fresh run, but copies of the model's own modules (PEFT's
        ``modules_to_save``) have the values of these.
        """
        names = {id(each.parameter): each.names for each in captured.parameters}
        now = {name: names.get(id(parameter), (name,)) for name, parameter in self._named.items()}
        for name, (module, end) in captured.buffers.items():
            now[self._buffers.get((id(module), end), name)] = (name,)
        self._converted.rename({name: others[0] for name, others in now.items() if name not in others})
        self._converted.copy(copied_modules(captured))
        super().match(captured, optimizer)
        of_folder = {id(parameter) for parameter in self._named.values()}
        ours = {each.name for each in captured.parameters if id(each.parameter) in of_folder}
        missing = [name for name in self._match.missing if name in ours]
        if missing:
            raise RunMismatch(
                f"{self.path} has no {shown(missing, 1)}, so the model would begin with random values there. Is its"
                " config.json of other weights?"
            )
        self.kept = {}
        return [f"nothing here wants its {name}" for name in self._match.unused]

    def set_hyper_parameters(self, groups: list[dict[str, Any]], names: list[list[str]]) -> bool:
        """Return True, which leaves the hyper-parameters to the script."""
        return True
