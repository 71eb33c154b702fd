"""The verb ``plan --model --machine``: placement of the state, time of a step, the bottleneck, and what would help.

The plan is shown as the linear program finds it, and in whole blocks as an engine would run it. Machine and model are
profiles, so neither has to be here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...errors import ConfigError, DoesNotFit
from ...garbage import without_collection
from ...profiles import BASES, AdaptedModel, MachineProfile, ModelProfile, load_machine, load_model
from ...quantities import MiB, counted, format_bytes, format_seconds, parse_bytes
from ...schedule.operation_lists import fit, play
from ...schedule.planner import formulas
from ...schedule.planner.formulas import FRACTIONS
from ...schedule.planner.linear_program import Solution
from ...schedule.planner.machine_rates import RESOURCE_NAMES
from ...schedule.planner.plan_search import (
    Case,
    Found,
    Life,
    WhatIf,
    binding,
    life,
    memory_is_full,
    search,
    streamed_where_needed,
    what_if,
)
from ...schedule.planner.training_setting import Method
from ...schedule.simulate import Simulation
from ...schedule.work import ClippingMode
from ..output import console, parsed, plain_table, print_facts, print_json, print_table

SIZES = {
    "params": "parameters",
    "optimizer": "optimizer state",
    "activations": "block inputs",
    "gradients": "waiting gradients",
}
Engine = tuple[Solution, Simulation] | DoesNotFit
"""The engine's version of a plan and its simulated steps, or the reason why it does not fit."""
ON_HOST = ("params", "optimizer", "activations")
"""The kinds of which a run gets fractions to hold in host memory."""
BYTES = ("host_bytes", "device_bytes", "ssd_bytes")
WHOLE_BLOCKS = "In whole blocks, as the engine places and delays them,"


@without_collection()
def plan_placement(given: Mapping[str, Any]) -> None:
    """Print the plan for a model on a machine."""
    case = case_of(given)
    if given["delayed"] is not None and case.method.delayed is not None:
        raise ConfigError(
            "--delayed says what --clipping defer decides, as a run clips without a commit at each step: with it every"
            " update waits. Leave --delayed out, or give --clipping none"
        )
    try:
        found = search(case, given["micro_batches"], delayed=given["delayed"])
    except DoesNotFit:
        if given["clipping"] != "auto" or case.method.clipping == "defer" or given["delayed"] is not None:
            raise
        waiting = replace(case, method=replace(case.method, clipping="defer"))  # as a run does then
        found = search(waiting, given["micro_batches"])
    changes, engine = what_if(case, found.best), _on_engine(found)
    if given["json"]:
        print_json(_document(found, changes, engine))
    else:
        _print(found, changes, engine)


def case_of(given: Mapping[str, Any]) -> Case:
    """Return the machine, model and method that the options name. Raises ``ConfigError``."""
    missing = [flag for flag in ("model", "machine") if given[flag] is None]
    if missing:
        raise ConfigError(
            f"--{missing[0]} is missing: a plan needs --model and --machine, names or TOML files"
        )
    if given["clipping"] == "speculate" and given["commit_every"] != 1:
        raise ConfigError(
            f"--commit-every {given['commit_every']} with --clipping speculate: a wrong guess is undone from the commit"
            " of the step before. Give --commit-every 1, or --clipping defer"
        )
    clipping = given["clipping"]
    if clipping == "auto":
        clipping = _usual_clipping(given["commit_every"])
    model = load_model(given["model"])
    changed = {"micro_batch": given["micro_batch_size"], "sequence": given["sequence"]}
    model = replace(model, **{name: value for name, value in changed.items() if value is not None})
    machine = _machine(given)
    whole = machine.precision == "fp32" and given["lora"] is None  # adapters are planned in 16 bits
    try:
        method = Method(
            clipping=clipping,
            commit_every=given["commit_every"],
            retain=given.get("retain") or 2,
            order=given.get("order", "plain"),
            least_steps=given.get("ssd_steps") or 0,
            param_bytes=4 if whole else 2,
            is_split=not whole,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return streamed_where_needed(Case(machine=machine, model=_under_adapters(model, given), method=method))


def _usual_clipping(commit_every: int) -> ClippingMode:
    """Return how a run clips that is not told how, where few steps are clipped."""
    return "speculate" if commit_every == 1 else "defer"


def on_host(solution: Solution) -> dict[str, float]:
    """Return the fractions in host memory, without those of nothing."""
    waits = formulas.waiting_bytes(solution.setting)
    return {name: solution.fractions[name] for name in FRACTIONS if name != "gradients" or waits}


def rate_text(rate: float) -> str:
    """Format a rate as a whole number, or with three digits."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


# -- helpers ----------------------------------------------------------------------------------------


def _under_adapters(model: ModelProfile, given: Mapping[str, Any]) -> ModelProfile | AdaptedModel:
    """Return ``model``, under adapters if --lora is given. Raises ``ConfigError`` for what cannot be used with it."""
    rank, base = given["lora"], given["base"]
    if rank is None and base is not None:
        raise ConfigError(
            f"--base {base} is the format of frozen layers, and without --lora all layers are trained. Give --lora R"
        )
    if base is not None and base not in BASES:
        raise ConfigError(f"--base is {' or '.join(BASES)}, not {base!r}")
    slots = given["expert_slots"]
    if slots is not None and (rank is None or not model.experts):
        why = "experts are trained without --lora" if rank is None else f"{model.description} has no experts"
        raise ConfigError(f"--expert-slots {slots}: {why}, so none are read one by one. Leave it out")
    if rank is None:
        return model
    return AdaptedModel(profile=model, rank=rank, base=BASES[base or "bf16"], expert_slots=slots or 0)


def _machine(given: Mapping[str, Any]) -> MachineProfile:
    machine = load_machine(given["machine"])
    if given["ssds"] is not None:
        machine = replace(machine, ssd_count=given["ssds"])
    if given["host"] is not None:
        nbytes = parsed("--host", parse_bytes, given["host"])
        if given["host"].strip().isdigit() and nbytes < MiB:
            raise ConfigError(f"--host {given['host']} is {nbytes} bytes; write {nbytes}GB if that is meant")
        machine = replace(machine, host_memory_bytes=nbytes)
    return machine


def _on_engine(found: Found) -> Engine:
    """Return the plan in whole blocks, as the engine would run it."""
    setting = found.best.setting
    try:
        solution, placement = fit(found.case, setting.micro_batches, setting.delayed_fraction)
    except DoesNotFit as error:
        return error
    return solution, play(solution.setting, placement)


def _document(found: Found, changes: list[WhatIf], engine: Engine) -> dict[str, Any]:
    case, lives = found.case, life(found.best)
    return {
        "model": case.model.description,
        "machine": case.machine.description,
        "parameters": case.model.parameters,
        "adapters": _adapters_document(case.model),
        "clipping": case.method.clipping,
        "commit_every": case.method.commit_every,
        "precision": case.method.precision,
        "embedding_and_head": "streamed" if case.method.streams_all else "resident",
        "chosen": document_of(found.best),
        "tried": [
            {
                "micro_batches": s.setting.micro_batches,
                "delayed_fraction": s.setting.delayed_fraction,
                "step_seconds": s.step_seconds,
                "tokens_per_second": s.tokens_per_second,
            }
            for s in found.tried
        ],
        "what_if": [
            {"change": c.what, "fits": c.solution is not None, "gain": c.gain if c.solution else None}
            for c in changes
        ],
        "ssd_life": {
            "written_bytes_per_step": lives.written_bytes_per_step,
            "rated_bytes": lives.rated_bytes,
            "steps": lives.steps,
            "days": lives.days,
        },
        "in_whole_blocks": _engine_document(engine),
    }


def _adapters_document(model: ModelProfile | AdaptedModel) -> dict[str, Any] | None:
    """Return the adapters and the format of the frozen base as JSON; None if all parameters are trained."""
    if not isinstance(model, AdaptedModel):
        return None
    return {
        "rank": model.rank,
        "linear_layers_per_block": len(model.profile.linear_layers),
        "parameters": model.adapter_parameters,
        "base": model.base.name,
        "base_bits_per_weight": model.weight_bits,
        "base_bytes": model.blocks * model.frozen_block_bytes,
        **({"expert_slots": model.expert_slots} if model.expert_slots else {}),
    }


def _base_document(solution: Solution) -> dict[str, float]:
    """Return the bytes of a frozen base that a step moves, in all and for each of its parameters."""
    model = solution.setting.model
    if not isinstance(model, AdaptedModel):
        return {}
    moved, read = (solution.of(each) for each in (formulas.frozen_moved_bytes, formulas.frozen_read_bytes))
    parameters = model.blocks * model.profile.block_parameters
    return {
        "base_moved_bytes_per_step": moved,
        "base_moved_bytes_per_parameter": moved / parameters,
        "base_read_bytes_per_step": read,
        "base_read_bytes_per_parameter": read / parameters,
    }


def _engine_document(engine: Engine) -> dict[str, Any]:
    if isinstance(engine, DoesNotFit):
        return {"error": str(engine)}
    solution, simulation = engine
    seconds = simulation.seconds_per_step
    simulated = {
        "step_seconds": seconds,
        "tokens_per_second": solution.setting.tokens / seconds,
        "busiest_lane": simulation.busiest()[0],
        "speed_of_light": simulation.speed_of_light,
    }
    return {**document_of(solution), "simulated": simulated}


def document_of(solution: Solution) -> dict[str, Any]:
    """Return a solution as JSON."""
    setting = solution.setting
    return {
        "micro_batches": setting.micro_batches,
        "micro_batch_size": setting.model.micro_batch,
        "sequence": setting.model.sequence,
        "delayed_fraction": setting.delayed_fraction,
        "on_host": on_host(solution),
        "grad_slots": setting.saving.grad_slots,
        "resident_state_on_host": setting.saving.resident_state,
        "keeps_copies": setting.saving.keeps_copies,
        "loads_ahead": setting.saving.loads_ahead,
        "step_seconds": solution.step_seconds,
        "tokens_per_second": solution.tokens_per_second,
        "forward_seconds_per_block": solution.forward_seconds,
        "backward_seconds_per_block": solution.backward_seconds,
        "busy_seconds": solution.busy_seconds,
        "busiest_lane": solution.busiest,
        "speed_of_light": solution.speed_of_light,
        "binds": binding(solution),
        "host_bytes": solution.of(formulas.host_bytes),
        "host_memory_full": memory_is_full(solution),
        "device_bytes": solution.of(formulas.device_bytes),
        "ssd_bytes": solution.of(formulas.ssd_bytes),
        "read_bytes_per_step": solution.of(formulas.read_bytes),
        "written_bytes_per_step": solution.of(formulas.written_bytes),
        **_base_document(solution),
    }


def _print(found: Found, changes: list[WhatIf], engine: Engine) -> None:
    best, model, machine, out = found.best, found.case.model, found.case.machine, console()
    setting, lives = best.setting, life(best)
    print(f"{model.description}, {counted(model.blocks, 'block')}, on {machine.description}\n")
    print(
        f"{setting.micro_batches} micro-batch{'es' * (setting.micro_batches > 1)} of "
        f"{model.micro_batch} x {model.sequence:,} tokens, {setting.delayed_fraction:.0%} of each update delayed: "
        f"{format_seconds(best.step_seconds)} a step, {rate_text(best.tokens_per_second)} tokens/s. The busiest lane "
        f"is {best.busiest}, {best.speed_of_light:.0%} of the time.\n"
    )
    _print_places(best)
    print()
    _print_lanes(best)
    print()
    print_facts(
        out,
        {
            **_adapters_facts(best),
            "computes in": setting.method.precision,
            **({"embedding, head": _STREAMED[model.tied]} if setting.method.streams_all else {}),
            "what binds": _binds_text(best),
            "memory": _memory_text(best),
            "what would help": "; ".join(map(_change_text, changes)),
            "SSD life": _life_text(lives),
            "micro-batches": _tried_text(found),
            "speed of light": _light_text(best, engine),
            "the engine": _engine_text(engine),
        },
    )
    if isinstance(engine, DoesNotFit):
        return
    if not isinstance(model, AdaptedModel):
        _print_settings(engine[0])
    else:
        _print_call(engine[0])


_STREAMED = {
    False: "streamed, each by itself: the device could not hold them together with a block",
    True: "one matrix, which is streamed: the device could not hold it together with a block",
}
"""Text for separate tables, and for tied ones (True)."""


def _adapters_facts(best: Solution) -> dict[str, str]:
    """Describe adapters, and the frozen base with the bytes of it that a step moves; empty if all is trained."""
    model = best.setting.model
    if not isinstance(model, AdaptedModel):
        return {}
    layers, moved = len(model.profile.linear_layers), _base_document(best)
    return {
        "adapters": f"of rank {model.rank} on all {layers} linear layers of each block: "
        f"{counted(model.adapter_parameters, 'parameter')}; nothing else is trained",
        "base": f"these layers in {model.base.name}, {model.weight_bits:.4g} bits a weight; "
        f"{format_bytes(model.blocks * model.frozen_block_bytes)} in the blocks. A step brings "
        f"{moved['base_moved_bytes_per_parameter']:.2f} bytes a parameter of them to the device, "
        f"{moved['base_read_bytes_per_parameter']:.2f} from the SSDs",
        **_experts_facts(best),
    }


def _experts_facts(best: Solution) -> dict[str, str]:
    """Describe the experts that are read one by one; empty if there are none."""
    setting, routed = best.setting, best.setting.model.routed
    if not routed.slots:
        return {}
    nbytes = routed.count * routed.nbytes
    return {
        "experts": f"{routed.slots} in memory at once, {format_bytes(setting.slot_bytes)}, of "
        f"{routed.count} in each block, {format_bytes(nbytes)}; each is read where tokens go. Bytes and times "
        "are the worst: each micro-batch uses all"
    }


def _print_places(best: Solution) -> None:
    """Print what stays in host memory, and how much of the total it is."""
    setting = best.setting
    whole = {
        "params": setting.blocks * setting.param_bytes,
        "optimizer": setting.blocks * setting.state_bytes,
        "activations": setting.blocks * setting.micro_batches * setting.input_bytes,
        "gradients": formulas.waiting_bytes(setting),
    }
    table = plain_table("", ">in all", ">on the host")
    for name, part in on_host(best).items():
        table.add_row(SIZES[name], format_bytes(whole[name]), f"{part:.0%}")
    print_table(console(), table)


def _print_lanes(best: Solution) -> None:
    table = plain_table("lane", ">s/step", ">of the step", ">ms/block forward", ">backward")
    for name, seconds in sorted(best.busy_seconds.items(), key=lambda item: -item[1]):
        forward, backward = best.lane_seconds[name]
        table.add_row(
            name,
            f"{seconds:.1f}",
            f"{seconds / best.step_seconds:.0%}",
            f"{forward * 1e3:.1f}",
            f"{backward * 1e3:.1f}",
        )
    print_table(console(), table)


def _binds_text(best: Solution) -> str:
    passes = [f"{name.partition('_')[0]}: {' and '.join(which)}" for name, which in binding(best).items()]
    full = "host memory is full" if memory_is_full(best) else "host memory is not all used"
    return f"{'; '.join(passes)}; {full}"


def _memory_text(best: Solution) -> str:
    machine, used = best.setting.machine, {n: format_bytes(best.of(getattr(formulas, n))) for n in BYTES}
    places = [f"{used['host_bytes']} of {format_bytes(machine.host_memory_bytes)} on the host"]
    if not machine.device_shares_host:
        places.append(
            f"about {used['device_bytes']} of {format_bytes(machine.device_memory_bytes)} on the device"
        )
    saved = best.setting.saving.describe()
    saving = f"; to save memory: {', '.join(saved)}" if saved else ""
    return ", ".join([*places, f"{used['ssd_bytes']} on the SSDs"]) + saving


def _change_text(change: WhatIf) -> str:
    if change.solution is None:
        return f"{change.what}: does not fit"
    gain = round(change.gain, 3) + 0.0  # no minus before a zero
    return f"{change.what}: {gain:+.1%}"


def _life_text(found: Life) -> str:
    if found.written_bytes_per_step == 0:
        return "nothing is written"
    return (
        f"{format_bytes(found.written_bytes_per_step)} written a step; rated for {found.rated_bytes / 1e12:,.0f} TB "
        f"they last {found.steps:,.0f} steps, {found.days:,.1f} days of this"
    )


def _tried_text(found: Found) -> str:
    """Describe tokens per second at counts that double, and at the chosen one."""
    chosen = found.best.setting.micro_batches
    shown = [s for s in found.tried if s.setting.micro_batches in (chosen, *(2**k for k in range(20)))]
    rates = ", ".join(f"{s.setting.micro_batches}: {rate_text(s.tokens_per_second)}" for s in shown)
    if len(found.tried) == 1:
        return f"{rates} tokens/s, as asked"
    return f"{rates} tokens/s; {chosen} is the least within 1 % of the best up to {len(found.tried)}"


def _light_text(best: Solution, engine: Engine) -> str:
    """Describe how much of a step the busiest lane works: simulated if the engine can run the plan."""
    if isinstance(engine, DoesNotFit):
        lane, light, how, seconds = best.busiest, best.speed_of_light, "by the formulas", best.step_seconds
    else:
        simulation = engine[1]
        lane = RESOURCE_NAMES.get(simulation.busiest()[0], simulation.busiest()[0])
        light, how, seconds = simulation.speed_of_light, "simulated", simulation.seconds_per_step
    alone, whole = format_seconds(light * seconds), format_seconds(seconds)
    return f"{light:.0%}, {how}: {lane} alone takes {alone} of the {whole} of a step"


def _engine_text(engine: Engine) -> str:
    if isinstance(engine, DoesNotFit):
        return f"{WHOLE_BLOCKS} it does not fit: {engine}"
    solution, simulation = engine
    seconds = simulation.seconds_per_step
    return (
        f"{WHOLE_BLOCKS} the simulator has {format_seconds(seconds)} a step, "
        f"{rate_text(solution.setting.tokens / seconds)} tokens/s (the formulas above: "
        f"{rate_text(solution.tokens_per_second)}), set so:"
    )


def _settings(engine: Solution) -> dict[str, dict[str, str]]:
    """Return the settings by section of the configuration, as TOML; what is the default is left out."""
    setting, method = engine.setting, engine.setting.method
    train = {
        "micro_batches": f"{setting.micro_batches}",
        "clip_norm": "0" if method.clipping == "none" else "1.0",
    }
    if method.clipping not in ("none", _usual_clipping(method.commit_every)):
        train["clipping"] = f'"{method.clipping}"'
    if method.precision == "fp32":  # the fractions are of copies of this size
        train["dtype"] = '"fp32"'
    offload = {} if method.order == "plain" else {"order": f'"{method.order}"'}
    if method.delayed is None and setting.delayed_fraction:
        offload["delayed_fraction"] = f"{setting.delayed_fraction:g}"
    offload |= {f"{name}_on_host": f"{engine.fractions[name]:g}" for name in ON_HOST}
    if method.streams_all:
        offload["embedding_and_head"] = '"streamed"'
    if setting.model.routed.slots:
        offload["expert_slots"] = f"{setting.model.routed.slots}"
    durability = {} if method.commit_every == 1 else {"every": f"{method.commit_every}"}
    return {"train": train, "offload": offload, "durability": durability}


def _print_settings(engine: Solution) -> None:
    """Print the settings for the configuration of ``holdfast train``, whose names ``holdfast.offload`` shares."""
    for section, values in _settings(engine).items():
        if values:
            print(f"\n  [{section}]", *(f"  {name} = {value}" for name, value in values.items()), sep="\n")


def _print_call(engine: Solution) -> None:
    """Print the settings of a model under adapters as arguments of ``holdfast.offload``."""
    train, offload, durability = _settings(engine).values()
    options = ['precision="bf16"' if engine.setting.machine.device_shares_host else 'device="cuda"']
    options.append(f"micro_batches={train['micro_batches']}")
    if "clipping" in train:
        options.append(f"clipping=holdfast.Clipping(1.0, {train['clipping']})")
    elif train["clip_norm"] != "0":
        options.append("clipping=1.0")
    if "order" in offload:
        options.append(f"order={offload.pop('order')}")
    if durability:
        options.append(f"durability=holdfast.Durability(commit_every={durability['every']})")
    print(f"\n  holdfast.offload(\n      model, optimizer, run, {', '.join(options)},")
    print(f"      placement=holdfast.Placement({', '.join(map('='.join, offload.items()))}),\n  )")
