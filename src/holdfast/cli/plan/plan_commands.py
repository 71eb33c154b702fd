"""The options of ``plan``, ``simulate`` and ``probe`` on the command line.

Each command checks its options and calls the module that implements it, which is imported only then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
Quantity = str | None
"""Bytes or seconds, with a unit."""
PLACEMENT = "Placement of a model on a machine"
CADENCE = "How often a base is made, with --cadence"
LIMITS = "Limits, with --cadence"
"""Titles under which ``--help`` lists the options."""


def _placement(flag: str, meaning: str, **other: Any) -> Any:
    return typer.Option(flag, help=meaning, rich_help_panel=PLACEMENT, **other)


def _fraction(flag: str, meaning: str) -> Any:
    return _placement(flag, meaning, min=0, max=1, metavar="0..1")


def _measure(flag: str, example: str, meaning: str, panel: str | None = CADENCE) -> Any:
    return typer.Option(flag, metavar=example, help=meaning, rich_help_panel=panel)


def _limit(flag: str, example: str, meaning: str) -> Any:
    return _measure(flag, example, meaning, LIMITS)


Model = Annotated[
    str | None,
    _placement(
        "--model",
        "A model that comes with this, a TOML file, or a model folder.",
        metavar="NAME|TOML|FOLDER",
    ),
]
Machine = Annotated[
    str | None, _placement("--machine", "A machine that comes with this, or a file.", metavar="NAME|TOML")
]
MicroBatches = Annotated[
    int | None, _placement("--micro-batches", "Of a step; else the fewest that do.", min=1, metavar="M")
]
MicroBatchSize = Annotated[
    int | None, _placement("--micro-batch-size", "Sequences of a micro-batch; else the model's.", min=1)
]
Sequence = Annotated[int | None, _placement("--sequence", "Tokens of a sequence; else the model's.", min=1)]
Delayed = Annotated[
    float | None,
    _fraction("--delayed", "Part of each update that is done in the next forward pass; else the best."),
]
Clipping = Annotated[
    str, _placement("--clipping", "auto, as a run clips; or none, defer, speculate or per_block.")
]
Order = Annotated[str, _placement("--order", "plain or snake.")]
CommitEvery = Annotated[int, _placement("--commit-every", "Steps; 0 is never.", min=0, metavar="N")]
Lora = Annotated[
    int | None,
    _placement(
        "--lora",
        "Train adapters of this rank on every linear layer of the blocks, and nothing else.",
        min=1,
        metavar="R",
    ),
]
Base = Annotated[
    str | None,
    _placement(
        "--base",
        "With --lora, what frozen linear layers are stored in: bf16, fp8, int8 or nf4.",
        metavar="FORMAT",
    ),
]
ExpertSlots = Annotated[
    int | None,
    _placement(
        "--expert-slots",
        "With --lora, experts in memory at once, each read where tokens go; else those of a block.",
        min=1,
        metavar="N",
    ),
]
Host = Annotated[Quantity, _placement("--host", "Host memory; else the machine's.", metavar="256GB")]
Ssds = Annotated[int | None, _placement("--ssds", "How many SSDs; else the machine's.", min=1)]
SsdSteps = Annotated[
    int | None, _placement("--ssd-steps", "Steps that the SSDs must live for.", min=1, metavar="N")
]


def plan(
    context: typer.Context,
    model: Model = None,
    machine: Machine = None,
    micro_batches: MicroBatches = None,
    micro_batch_size: MicroBatchSize = None,
    sequence: Sequence = None,
    lora: Lora = None,
    base: Base = None,
    expert_slots: ExpertSlots = None,
    delayed: Delayed = None,
    clipping: Clipping = "auto",
    order: Order = "plain",
    commit_every: CommitEvery = 1,
    host: Host = None,
    ssds: Ssds = None,
    ssd_steps: SsdSteps = None,
    retain: Annotated[
        int | None,
        typer.Option("--retain", min=1, help="Newest whole steps kept; with --cadence, bases. Else 2."),
    ] = None,
    cadence: Annotated[
        bool,
        typer.Option(
            "--cadence",
            help="How often to make a base, so that failures cost least. Needs --step, --state and --write.",
            rich_help_panel=CADENCE,
        ),
    ] = False,
    step_seconds: Annotated[Quantity, _measure("--step", "0.5s", "Time of one optimizer step.")] = None,
    full_bytes: Annotated[
        Quantity, _measure("--state", "1.5GB", "Size of the whole state, which is a base.")
    ] = None,
    frozen_bytes: Annotated[
        Quantity,
        _measure("--frozen", "14GB", "Size of frozen parameters, beside --state; no base writes them again."),
    ] = None,
    write_bytes_per_second: Annotated[Quantity, _measure("--write", "2GB/s", "Write bandwidth.")] = None,
    read_bytes_per_second: Annotated[Quantity, _measure("--read", "2GB/s", "Read bandwidth.")] = None,
    record_bytes: Annotated[
        Quantity, _measure("--record", "500MB", "Size of the record of one step.")
    ] = None,
    base_stall_seconds: Annotated[
        Quantity, _measure("--base-stall", "0.3s", "Time that training waits for one base.")
    ] = None,
    base_steps: Annotated[
        int | None,
        typer.Option(
            "--base-steps", min=1, help="Steps over which a base is copied.", rich_help_panel=CADENCE
        ),
    ] = None,
    record_stall_seconds: Annotated[
        Quantity, _measure("--record-stall", "5ms", "Time that training waits for one record.")
    ] = None,
    sync_seconds: Annotated[
        Quantity, _measure("--sync", "10ms", "Time of a write, besides its bytes.")
    ] = None,
    write_slowdown: Annotated[
        float | None,
        typer.Option(
            "--write-slowdown",
            min=0,
            help="Seconds that training loses per second of writing.",
            rich_help_panel=CADENCE,
        ),
    ] = None,
    replay_seconds: Annotated[Quantity, _measure("--replay", "50ms", "Time to apply one record.")] = None,
    restart_seconds: Annotated[
        Quantity, _measure("--restart", "1min", "Time from a failure to the load.")
    ] = None,
    mean_seconds_between_failures: Annotated[
        Quantity, _measure("--mtbf", "12h", "Mean time between failures.")
    ] = None,
    recovery_seconds: Annotated[
        Quantity, _limit("--max-recovery", "5min", "Limit of load and replay.")
    ] = None,
    storage_bytes: Annotated[
        Quantity, _limit("--max-storage", "30GB", "Limit of bases and records; else 20 times the state.")
    ] = None,
    host_bytes: Annotated[Quantity, _limit("--max-memory", "4GiB", "Limit of copies that wait.")] = None,
    bandwidth_share: Annotated[
        float | None,
        typer.Option(
            "--max-share",
            help="Limit of the share of the write bandwidth, such as 0.5.",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Plan a run before it is started.

    Says what stays where, for a model on a machine; with --cadence, how often a Checkpointer makes a base. docs/plan.md
    explains both.
    """
    from .interval_plan import plan as show_plan

    show_plan(context.params, {option.name: option.opts[0] for option in context.command.params})


def simulate(
    context: typer.Context,
    model: Model = None,
    machine: Machine = None,
    micro_batches: MicroBatches = None,
    micro_batch_size: MicroBatchSize = None,
    sequence: Sequence = None,
    lora: Lora = None,
    base: Base = None,
    expert_slots: ExpertSlots = None,
    clipping: Clipping = "auto",
    commit_every: CommitEvery = 1,
    host: Host = None,
    ssds: Ssds = None,
    params_on_host: Annotated[
        float | None, _fraction("--params-on-host", "Of the compute copies; else planned.")
    ] = None,
    optimizer_on_host: Annotated[
        float | None, _fraction("--optimizer-on-host", "Of the optimizer's state; else planned.")
    ] = None,
    activations_on_host: Annotated[
        float | None, _fraction("--activations-on-host", "Of what flows between blocks; else planned.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=2, help="That are played.")] = 6,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Write a trace for chrome://tracing or Perfetto."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Play the steps of a plan, beside ordinary accumulation.

    Plays operation by operation, as the engine runs them.
    """
    from .simulating import simulate as play

    play(context.params)


def probe(
    directory: Annotated[
        Path,
        typer.Option("--dir", metavar="DIR", help="On the SSD to measure; files of it are removed again."),
    ] = Path("."),
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the profile here, for --machine.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="NAME|TOML|FOLDER", help="Time a block of this model; else of a small one."
        ),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:N, or auto.")] = "auto",
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="About how long it may measure.")] = 30.0,
    size: Annotated[str, _measure("--size", "1GiB", "Of the file that is read and written.", None)] = "1GiB",
    json: AsJson = False,
) -> None:
    """Measure this machine: device, host, copies, SSD. Prints a profile for `holdfast plan --machine`."""
    from .probing import probe as measure

    measure(directory, out, model=model, device=device, seconds=seconds, size=size, as_json=json)
