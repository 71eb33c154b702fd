"""The rest of a checkpoint of the Trainer of transformers, beside the weights of its folder.

``optimizer.pt`` knows parameters by number: the Trainer puts those that weight decay applies to in front, each group in
the order of the model. That order is in no file, so the model that ``config.json`` describes is built without memory,
by transformers. Names are given only if every tensor of the optimizer has a shape that its parameter allows, under one
way of grouping. Otherwise the weights alone are read, and ``unread`` says why. Step, schedule and random numbers come
from the other files, and must agree with the optimizer's steps. Called by ``formats.readers``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from ...errors import Damaged, HoldfastError
from ...quantities import MiB
from ...state.encoding import decode, encode
from ...state.layout.fragments import Fragments
from ...state.tensor_entries import TensorEntry
from ..entry_keys import ShapeAndType, name_all
from ..source import ReadFiles, Source, SourceTensor
from ..state_dict_progress import SMALL_BYTES, check_progress, check_random, progress_of, state_dict_of
from ..torch_archive.archives import Archive, Plain, array_of_pickle, bytes_of, check_inside, piece_of
from ..torch_archive.pickles import Tensor
from .safetensors_files import SafetensorsFiles
from .torch_save import QUANTISED, TorchSave, leaves_of

OPTIMIZER, SCHEDULER, RANDOM, STATE = "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"
CONFIG, STATE_BYTES = "config.json", 256 * MiB
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
"""Names that configurations have for the number of layers, which bounds the work of building the model."""
_KEPT = ("epoch", "max_steps", "num_train_epochs", "train_batch_size", "best_metric")
"""Values of the Trainer that go to ``extra``."""
_NORM = re.compile(r"LayerNorm|RMSNorm")
NOT_READ = ("rng_state_", "scaler")
"""Beginnings of the names of files with random states of several ranks, and of loss scalers, which are not read."""
Groups = list[list[str]]
"""Names of parameters, by group of the optimizer."""


def open_weights(path: Path) -> Source:
    """Open weights in safetensors, with the state of the Trainer beside them if ``path`` is a checkpoint of it.

    Raises ``Damaged`` if a file is damaged, or if the files are not of one step.
    """
    return _with_state(SafetensorsFiles(path), path)


def open_saved(path: Path) -> Source:
    """Open what ``torch.save`` wrote, as ``open_weights``."""
    return _with_state(TorchSave(path), path)


def _with_state(source: ReadFiles, path: Path) -> Source:
    if path.is_dir() and (path / OPTIMIZER).is_file() and (path / STATE).is_file():
        with state_dict_of(str(path)):
            _add_state(source, path)
    return source


def _add_state(source: ReadFiles, path: Path) -> None:
    archive = Archive(path / OPTIMIZER)
    saved, told = archive.content, trainer_state(path)
    is_state = isinstance(saved, dict) and saved.get("state") and isinstance(saved.get("param_groups"), list)
    if not is_state:
        return
    names = _names_of(saved, source, path)
    if isinstance(names, str):
        source.unread = tuple(f"{each} ({names})" if each == OPTIMIZER else each for each in source.unread)
        return
    schedule = _schedule_of(path)
    _refuse_another_step(path, archive, told, schedule)
    _add_optimizer(source, archive, named_state(saved, names), schedule)
    source.progress["step"] = told["global_step"]
    source.progress["extra"] = {
        **source.progress.get("extra", {}),
        "trainer": {k: told.get(k) for k in _KEPT},
    }
    if (path / RANDOM).is_file():
        source.progress["random"] = _random_of(path / RANDOM)
    check_progress({name: value for name, value in source.progress.items() if name != "extra"})
    source.unread = ()
    if others := sorted(each.name for each in path.iterdir() if each.name.startswith(NOT_READ)):
        source.progress["extra"]["not_carried"] = others
    source.writer = f"the Trainer, {source.writer}" if source.writer else "the Trainer"


def trainer_state(path: Path) -> dict[str, Any]:
    """Return the content of ``trainer_state.json``. Raises ``Damaged`` if it has no step."""
    file = path / STATE
    try:
        if file.stat().st_size > STATE_BYTES:
            raise ValueError(f"it has {file.stat().st_size} bytes")
        told = json.loads(file.read_text(encoding="utf-8"))
        if told and (type(told["global_step"]) is not int or told["global_step"] < 0):
            raise ValueError(f"{told['global_step']!r} is no step")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Damaged(
            f"{file} is not the state of a Trainer ({type(error).__name__}: {error})", path=str(file)
        ) from error
    return {"global_step": 0} | told


def _schedule_of(path: Path) -> Any:
    """Return the state of the schedule as JSON; None if there is none."""
    if not (path / SCHEDULER).is_file():
        return None
    archive = Archive(path / SCHEDULER)
    return Plain(archive, SMALL_BYTES)(archive.content)


def _refuse_another_step(path: Path, archive: Archive, told: Mapping[str, Any], schedule: Any) -> None:
    """Raise ``Damaged`` if optimizer, schedule and Trainer count different steps.

    A loss scaler may leave out steps of the optimizer and of the schedule, and then the Trainer alone counts on.
    """
    step = told["global_step"]
    taken = max(_steps_in(archive), default=None)
    counted = schedule.get("last_epoch") if isinstance(schedule, dict) and "base_lrs" in schedule else None
    counts = [each for each in (taken, counted) if each is not None]
    if any(each > step for each in counts) or len(set(counts)) > 1:
        raise Damaged(
            f"{path}: {STATE} is of step {step}, the optimizer has taken {taken} steps and the schedule {counted}: the"
            " files are of different saves. Take all files of one.",
            path=str(path),
        )


def _steps_in(archive: Archive) -> Iterator[int]:
    """Yield the steps that the optimizer has counted, by parameter."""
    for held in archive.content["state"].values():
        step = held.get("step") if isinstance(held, dict) else None
        if isinstance(step, Tensor) and step.shape == () and step.storage.dtype in ("F32", "I64"):
            kind = np.float32 if step.storage.dtype == "F32" else np.int64
            yield int(np.frombuffer(bytes_of(archive, step), kind)[0])
        elif type(step) is int:
            yield step


def _add_optimizer(source: ReadFiles, archive: Archive, saved: dict[str, Any], schedule: Any) -> None:
    """Add the optimizer's tensors and values, by names, to ``source``."""
    held: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    plain = Plain(archive, SMALL_BYTES)
    weights = {
        f"model.{each.atom.name}": ShapeAndType(each.atom.shape, each.atom.dtype)
        for each in source.atoms.values()
    }
    ways: dict[str, tuple[Any, ...]] = {key: ("model", key.removeprefix("model.")) for key in weights}
    for way, value in leaves_of(saved, ("optimizer",)):
        key = ".".join(map(str, way))
        ways[key] = way
        if isinstance(value, Tensor):
            held[key] = value
        else:
            values[key] = plain(value, key)
    if schedule is not None:
        ways["scheduler"], values["scheduler"] = ("scheduler",), schedule
    kinds = {key: ShapeAndType(tensor.shape, tensor.storage.dtype) for key, tensor in held.items()}
    named = name_all(weights | kinds, ways, values, source.path)
    for key, tensor in held.items():
        name, slot = named.tensors[key]
        number = archive.part_in(source, tensor.storage)
        check_inside(key, tensor, source.parts[number])
        pieces = Fragments.of([piece_of(tensor, number)], len(tensor.shape))
        source.add(SourceTensor(TensorEntry(name, slot, *kinds[key]), pieces))
    source.progress |= progress_of(values, ways, named, source.path)


def named_state(saved: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Return the state dict of an optimizer with the names of its parameters in place of their numbers."""
    groups = [{**group, "params": [names[n] for n in group["params"]]} for group in saved["param_groups"]]
    return {
        **{key: value for key, value in saved.items() if key not in ("state", "param_groups")},
        "state": {names[number]: held for number, held in saved["state"].items()},
        "param_groups": [{k: v for k, v in group.items() if k != "param_names"} for group in groups],
    }


def _names_of(saved: Mapping[str, Any], source: Source, path: Path) -> list[str] | str:
    """Return the name of each number of the optimizer, or the reason for which they cannot be told."""
    groups = saved["param_groups"]
    numbers = [group["params"] for group in groups]
    listed = [number for group in numbers for number in group]
    if listed != list(range(len(listed))) or not saved["state"].keys() <= set(listed):
        return "its parameters are not numbered one after the other"
    if all(isinstance(group.get("param_names"), list) for group in groups):
        ways: list[Groups] | str = [[group["param_names"] for group in groups]]
    else:
        ways = _ways_to_group(path, len(source.atoms))
    if isinstance(ways, str):
        return ways
    shapes = {each.atom.name: each.atom.shape for each in source.atoms.values()}
    found: list[list[str]] = []
    for way in ways:
        names = [name for group in way for name in group]
        fits = [len(group) for group in way if group] == [len(group) for group in numbers if group]
        if fits and all(_fits(shapes.get(name), saved["state"].get(n)) for n, name in enumerate(names)):
            found += [names] if names not in found else []
    if len(found) != 1:
        count = "several orders" if found else "no order"
        return f"{count} of the model's parameters in {len(numbers)} groups fits the shapes of its tensors"
    return found[0]


def _fits(shape: tuple[int, ...] | None, state: Any) -> bool:
    """Return whether ``state`` of an optimizer may belong to a parameter of ``shape``, which the folder must have.

    One of its tensors has that shape, or all are factors of it, as Adafactor's are.
    """
    if shape is None:
        return False
    if state is None:
        return True
    held = {**state, **(state.get(QUANTISED) or {})}
    tensors = [value for value in held.values() if isinstance(value, Tensor) and value.shape]
    factors = {shape[:-1], shape[:-2] + shape[-1:]}
    return (
        not tensors
        or any(tensor.shape == shape for tensor in tensors)
        or all(tensor.shape in factors for tensor in tensors)
    )


def _ways_to_group(path: Path, num_tensors: int) -> list[Groups] | str:
    """Return the ways in which a Trainer groups the parameters of the model in ``path``, or why they are unknown."""
    model = _empty_model(path, num_tensors)
    if isinstance(model, str):
        return model
    from transformers import Trainer
    from transformers.trainer_pt_utils import get_parameter_names

    order = [name for name, _ in model.named_parameters()]
    norms = tuple({type(each) for each in model.modules() if _NORM.search(type(each).__name__)})
    # transformers 4
    earlier = {name for name in get_parameter_names(model, list(norms)) if "bias" not in name}
    found: list[Groups] = [[order]]
    for decayed in (set(Trainer.get_decay_parameter_names(cast(Any, None), model)), earlier):
        found.append([[n for n in order if n in decayed], [n for n in order if n not in decayed]])
    return found


def _empty_model(path: Path, num_tensors: int) -> Any:
    """Return the model that ``config.json`` describes, without memory for its parameters, or why it cannot be built.

    No code that lies in the folder is run.
    """
    try:
        told = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{CONFIG} cannot be read: {error}"
    if not isinstance(told, dict) or told.get("auto_map") or not told.get("architectures"):
        return f"{CONFIG} names no model of transformers"
    if max(_layers_in(told), default=0) > num_tensors:
        return f"{CONFIG} has more layers than the folder has tensors"
    try:
        import torch
        import transformers
    except ImportError as error:
        return f"its order is that of the model, which takes transformers: {error}; pip install 'holdfast[models]'"
    made = getattr(transformers, str(told["architectures"][0]), None)
    if not isinstance(made, type) or not issubclass(made, transformers.PreTrainedModel):
        return f"transformers {transformers.__version__} has no {told['architectures'][0]}"
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            return made(config)
    except Exception as error:  # of many classes, by what is wrong in the file
        return f"transformers cannot build {made.__name__}: {type(error).__name__}"


def _layers_in(told: dict[str, Any]) -> Iterator[int]:
    """Yield the numbers of layers that a configuration names, also for parts of the model."""
    for name, value in told.items():
        if isinstance(value, dict):
            yield from _layers_in(value)
        elif name in _LAYERS and type(value) is int:
            yield value


def _random_of(path: Path) -> dict[str, Any]:
    """Return the states of the generators of Python, NumPy and torch, in the form of ``state.progress``.

    Raises ``Damaged`` if the file has others.
    """
    archive = Archive(path)
    try:
        version, words, gauss = archive.content["python"]
        name, keys, *rest = archive.content["numpy"]
        words = np.array(words, dtype=np.uint32)
        found = {
            "python": encode((version, words, gauss)),
            "numpy": encode((name, array_of_pickle(keys), *rest)),
            "torch": Plain(archive)(archive.content["cpu"]),
        }
        check_random(decode(found))
        return found
    except HoldfastError:
        raise
    except Exception as error:  # of any kind: the generators say what is wrong
        raise Damaged(
            f"{path} has no states of random generators ({type(error).__name__}: {error})", path=str(path)
        ) from error
