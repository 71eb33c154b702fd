"""The command ``holdfast``: its verbs, their options, and the exit codes.

A verb imports what it needs when it runs, so that ``holdfast ls`` does not import torch. Every error, of usage too, is
one clear line on stderr and an exit code (``EXIT_CODES``); ``HOLDFAST_DEBUG=1`` adds the traceback. All help is plain
text that can be read in a pipe and in any width, so sections of options are written by ``GroupedCommand`` instead of by
rich.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from .. import __version__
from ..errors import ConfigError, HoldfastError
from .machine import launched
from .plan import plan_commands
from .plan.plan_commands import AsJson

EXIT_CODES = (
    "Exit codes: 0 good; 1 what was asked about is not so (damage, a difference); 2 bad usage or configuration, "
    "nothing was written; 3 the disk or the machine failed, what was acknowledged is safe; 130 and 143 left at once, "
    "on SIGINT and SIGTERM; 141 nobody reads the output any more. `train` commits its step on a first Ctrl-C or "
    "SIGTERM and ends with 0; a second one leaves at once."
)


class GroupedCommand(TyperCommand):
    """A command whose options are listed by panel; those without a panel come last."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then a section of options for each panel in order of appearance."""
        sections: dict[str, list[tuple[str, str]]] = {}
        others: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            panel = getattr(param, "rich_help_panel", None)
            if param.param_type_name == "argument":
                panel = "Arguments"
            if (record := param.get_help_record(ctx)) is not None:
                (sections.setdefault(panel, []) if panel else others).append(record)
        rest = "Other options" if sections.keys() - {"Arguments"} else "Options"
        for title, records in (*sections.items(), (rest, others)):
            with formatter.section(title):
                formatter.write_dl(records)


app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
)
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
Commit = Annotated[
    str, typer.Argument(metavar="RUN[@STEP]", help="A run directory, and a step of it; else its newest.")
]
Values = Annotated[
    Path | None,
    typer.Option("--values", metavar="JSON", help="Numbers that the rules name, such as a config.json."),
]


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """Train a language model out of core, with every step durable, and look at what a run holds."""
    if version:
        print(f"holdfast {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def train(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG.toml", help="What to train; every key has a default.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", metavar="FOLDER", help="A Hugging Face folder to fine-tune, as model.path does."
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Set a key, such as train.steps=200; may be repeated."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds",
            min=1,
            metavar="S",
            help="Size a new run without CONFIG.toml, --model and keys of [model] and [train] to end in about this "
            "time; 180 if not given.",
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the configuration, every key explained, and leave.")
    ] = False,
) -> None:
    """Train a language model, or continue the run where it was.

    Ctrl-C ends the step, commits it and leaves; the same command goes on from there. Without a configuration, a new
    run has the size that this machine trains in three minutes. On several ranks: torchrun --standalone
    --nproc-per-node=N -m holdfast train ..., with any number that divides train.micro_batches.
    """
    from ..config import key_of, literal, load_config, to_toml
    from .output import Enduring, Visible, beside

    began = time.perf_counter()
    if config is not None and seconds is not None:
        raise ConfigError(f"--seconds chooses the size, and {config} gives it. Leave one of the two out.")
    if model is not None:
        sets = [*(sets or ()), f"model.path={literal(str(model))}"]
    chosen = load_config(config, sets or ())
    if print_config:
        if launched()[0] == 0:
            print(to_toml(chosen), end="")
        return
    # a run continues after the reader of its output has left
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    sys.stdout = Visible(Enduring(beside(sys.stdout)))  # type: ignore[assignment]
    sys.stderr = Visible(Enduring(beside(sys.stderr)))  # type: ignore[assignment]
    from .train.sizing import Wish
    from .train.train_job import train as run

    run(chosen, {key_of(text) for text in sets or ()}, None if config else Wish(seconds, began))


@app.command()
def ls(run: Run, json: AsJson = False) -> None:
    """List the commits of a run, newest first."""
    from .inspect import ls as list_commits

    list_commits(run, as_json=json)


@app.command()
def show(commit: Commit, json: AsJson = False) -> None:
    """Show what a step of a run, or a state of another library, holds."""
    from .inspect import show as show_commit

    show_commit(commit, as_json=json)


@app.command()
def verify(
    commit: Commit,
    repair: Annotated[
        str | None,
        typer.Option("--repair", metavar="COPY", help="Replace damaged files by those of a copy of the run."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Read every byte of a state again; exit 1 if any is damaged."""
    from .inspect import verify as verify_commit

    raise typer.Exit(0 if verify_commit(commit, as_json=json, repair_from=repair) else 1)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A[@STEP]", help="A run directory and step.")],
    b: Annotated[str, typer.Argument(metavar="B[@STEP]", help="Another, or another step of the same.")],
    json: AsJson = False,
) -> None:
    """Compare two states tensor by tensor; exit 1 if any bit differs."""
    from .diff import diff as compare

    raise typer.Exit(0 if compare(a, b, as_json=json) else 1)


@app.command()
def prune(
    run: Run,
    keep_last: Annotated[
        int,
        typer.Option("--keep-last", min=1, metavar="N", help="Newest bases kept, with the records since."),
    ],
    every: Annotated[
        int | None, typer.Option("--every", min=1, metavar="K", help="Keep a base of each K steps, too.")
    ] = None,
    hours: Annotated[
        float | None, typer.Option("--hours", metavar="H", help="Keep a base of each H hours, too.")
    ] = None,
    best: Annotated[
        int | None, typer.Option("--best", min=1, metavar="K", help="Keep the best K by --metric, too.")
    ] = None,
    metric: Annotated[
        str | None, typer.Option("--metric", metavar="NAME", help="A value that the script gave at steps.")
    ] = None,
    largest: Annotated[bool, typer.Option("--largest", help="Larger values of it are better.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    json: AsJson = False,
) -> None:
    """Remove old bases and records of a run that nobody writes."""
    from ..store.commit.retention import Keep
    from .maintenance import prune_run

    keep = Keep(keep_last, every, hours, best, metric, "max" if largest else "min")
    prune_run(run, keep, dry_run=dry_run, as_json=json)


@app.command()
def compact(
    run: Run,
    to: Annotated[
        int | None,
        typer.Option(
            "--to", min=1, metavar="STEP", help="Drop what it took to get to this step; else nothing."
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Make a base of a later step, so that recovery is quicker.

    It is made of the base before it and the log records.
    """
    from .maintenance import compact_run

    compact_run(run, to, as_json=json)


@app.command()
def push(
    run: Run,
    destination: Annotated[str, typer.Argument(metavar="s3://BUCKET/PREFIX", help="Where the copy is.")],
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on copying what the run writes, until Ctrl-C.")
    ] = False,
    keep_last: Annotated[
        int | None,
        typer.Option(
            "--keep-last",
            min=1,
            metavar="N",
            help="Remove all but the N newest bases there, and their records.",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Copy a run, which may be training, to a bucket.

    Copies what is not there yet, and verifies every block on its way. RUN of other verbs may then be
    s3://BUCKET/PREFIX.
    """
    from .maintenance import push_run

    good = push_run(run, destination, keep_last=keep_last, follow=follow, as_json=json)
    raise typer.Exit(0 if good else 1)


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC", help="RUN, RUN@STEP, or a state of another library: `holdfast show` says."
        ),
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="What is made; not there yet.")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="holdfast, huggingface, peft, safetensors, dcp, deepspeed or torch.",
        ),
    ],
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="bf16", help="Of floating-point parameters; else as they are."),
    ] = None,
    file_size: Annotated[
        str, typer.Option("--file-size", metavar="5GB", help="Limit of one file, for huggingface.")
    ] = "5GB",
    stage: Annotated[
        int | None,
        typer.Option("--stage", min=1, max=3, help="Of ZeRO, for deepspeed: the one that will load it."),
    ] = None,
    rules: Annotated[
        str | None,
        typer.Option(
            "--rules", metavar="RULES", help="A file or pack of rules: other names, joined, split, permuted."
        ),
    ] = None,
    values: Values = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            metavar="FOLDER",
            help="Hugging Face's folder of the model or adapter that a script trained.",
        ),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge adapters into the weights, for huggingface.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Write a training state, or its parameters, in another format. Reads and writes a window at a time."""
    from .convert import ConvertOptions
    from .convert import convert as convert_state

    how = ConvertOptions(
        to=to, dtype=dtype, file_size=file_size, stage=stage, rules=rules, values=values, model=model,
        merge=merge,
    )  # fmt: skip
    convert_state(source, destination, how, as_json=json)


for verb in (plan_commands.plan, plan_commands.simulate, plan_commands.probe):
    app.command(cls=GroupedCommand)(verb)


@app.command()
def report(
    run: Run,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.html", help="The page; else RUN/report.html.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE.json", help="Write a trace for Perfetto instead, or as well."),
    ] = None,
    predicted: Annotated[
        str | None, typer.Option("--predicted", metavar="0.85s", help="Time of a step that was planned.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Write what a run did as one HTML page.

    It shows loss, times, lanes, traffic, memory, commits, and wear of the SSD.
    """
    from .monitoring import report as write_report

    write_report(run, out=out, trace=trace, predicted=predicted, as_json=json)


@app.command()
def watch(
    run: Run,
    once: Annotated[bool, typer.Option("--once", help="Show how it is now, and leave.")] = False,
    json: AsJson = False,
) -> None:
    """Watch a run that another process trains, until Ctrl-C.

    It shows steps, lanes, memory, and what is durable.
    """
    from .monitoring import watch as watch_run

    watch_run(run, once=once, as_json=json)


@app.command(context_settings={"allow_interspersed_args": False})
def drill(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND", help="After --: the command that starts and resumes the script; torchrun too."
        ),
    ],
    kills: Annotated[
        int, typer.Option("--kills", min=0, metavar="N", help="Number of kills, at random moments.")
    ] = 3,
    until: Annotated[
        int,
        typer.Option(
            "--until",
            min=2,
            metavar="STEP",
            help="Step after which each start ends, unless the script ends before.",
        ),
    ] = 20,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the moments of the kills.")] = 0,
    tolerance: Annotated[
        float,
        typer.Option(
            "--tolerance",
            min=0.0,
            metavar="X",
            help="Largest difference accepted between final values; 0: equal bits.",
        ),
    ] = 0.0,
    timeout: Annotated[
        float,
        typer.Option("--timeout", min=1.0, metavar="S", help="Longest wait for the next step, in seconds."),
    ] = 300.0,
    keep: Annotated[
        Path | None,
        typer.Option("--keep", metavar="FOLDER", help="New folder in which runs and outputs are kept."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Kill and resume a script; exit 1 if any bit differs.

    The script runs three times, to the same step: twice without interruption, and once with kills. The results are
    compared. Run directories are replaced by temporary ones; other files that the script writes are written as ever.
    """
    from .drilling import DrillOptions
    from .drilling import drill as drill_script

    options = DrillOptions(
        kills=kills, until=until, seed=seed, tolerance=tolerance, timeout=timeout, keep=keep
    )  # fmt: skip
    raise typer.Exit(0 if drill_script(command, options, as_json=json) else 1)


@app.command(context_settings={"allow_interspersed_args": False})
def standby(
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND", help="After --: the command that starts the script; torchrun too."),
    ],
    restarts: Annotated[
        int,
        typer.Option(
            "--restarts", min=0, metavar="N", help="Number of deaths after which the standby takes over."
        ),
    ] = 10,
) -> None:
    """Train with another process ready to take over.

    The script is started twice. The second process waits where it would open the run, and continues at once if the
    first dies. SIGINT and SIGTERM go to the process that trains, and then nobody takes over. Ends with the exit code
    of the process that trained last.
    """
    from .standby_job import stand_by

    raise typer.Exit(stand_by(command, restarts=restarts))


rules = typer.Typer(
    help="Rules, for layouts that a format does not record: docs/rules.md.", no_args_is_help=True
)
app.add_typer(rules, name="rules")


@rules.command("infer")
def rules_infer(commit: Commit) -> None:
    """Print the rules that a run is cut by, to edit."""
    from .foreign_states import infer

    infer(commit)


@rules.command("check")
def rules_check(
    file: Annotated[str, typer.Argument(metavar="RULES", help="A file of rules, or the name of a pack.")],
    commit: Commit,
    values: Values = None,
    json: AsJson = False,
) -> None:
    """Apply rules to what the ranks of a run stored; exit 1 if any tensor would lie otherwise than it does."""
    from .foreign_states import check

    raise typer.Exit(0 if check(file, commit, values, as_json=json) else 1)


@rules.command("packs")
def rules_packs(
    name: Annotated[str | None, typer.Argument(metavar="PACK", help="Print this one.")] = None,
) -> None:
    """List the packs of rules that come with this."""
    from .foreign_states import show_packs

    show_packs(name)


def main() -> None:
    """Run ``holdfast``; the entry point of the script."""
    from .output import names_shown

    warnings.showwarning = show_warning
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a command that only prints ends when its reader leaves
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal of any encoding can show a path or a sample
    with names_shown():
        sys.exit(_run())


def _run() -> int:
    """Run the command and return its exit code, after one line for an error."""
    try:
        return app(args=[_at_home(text) for text in sys.argv[1:]], standalone_mode=False) or 0
    except typer.Abort:  # Ctrl-C, where nothing has to be finished
        return 128 + signal.SIGINT
    except Exception as error:
        if os.environ.get("HOLDFAST_DEBUG"):
            traceback.print_exc()
        rank, _ = launched()
        print(f"error{f' on rank {rank}' if rank else ''}: {text_of(error)}", file=sys.stderr)
        return getattr(error, "exit_code", 3)


def _at_home(text: str) -> str:
    """Return an argument in which a leading ``~``, or one after the first ``=``, is the home directory."""
    name, separator, value = text.partition("=")
    if separator and value.startswith("~"):
        return f"{name}={os.path.expanduser(value)}"
    return os.path.expanduser(text)


def text_of(error: Exception) -> str:
    """Return one line for an error. An error that is neither ours nor the system's is named as a probable bug."""
    if hasattr(error, "format_message"):  # an error of usage
        text = error.format_message()
        return (
            f"{text}{'' if text[-1:] in '.?' else '.'} `holdfast --help` and `holdfast VERB --help` say more."
        )
    text = " ".join(str(error).split())
    if isinstance(error, (HoldfastError, OSError)):
        return text
    return f"{type(error).__name__}: {text} (unexpected; HOLDFAST_DEBUG=1 shows where)"


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as one line on stderr."""
    print(f"warning: {message}", file=sys.stderr)
