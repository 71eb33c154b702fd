"""Optimizers of other packages under a Checkpointer: killed twice, resumed, and compared bit for bit.

    python benchmarks/package_optimizers.py [--only NAME ...] [--keep] [--small]

Each optimizer trains a small model in three ways, in processes of their own: without a Checkpointer; with one, killed
by SIGKILL after the step of an iteration; and resumed, killed again and resumed again. Weights and optimizer state of
the last step are compared with those of the first way. "bit-equal", "refused: TEXT", "told: TEXT" where they are others
and a warning said so, "WRONG" where nobody did. What is not installed is left out, and named.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import torch
from common import finish, options_of, table
from torch import nn

import holdfast

STEPS = 16
KILLS = (6, 11)
"""Steps after which the process is killed."""
TOGGLES = (4, 9)
"""Steps after which an optimizer with train() and eval() is evaluated."""


class Case:
    """``kind`` of ``package``, made with ``options``.

    Args:
        of: "parameters", "named" for names and parameters, "matrices" for groups of which the first has matrices, with
            the ``more`` options of that group, "model", or "wrap" for an optimizer around one of torch.
        closure: Whether ``step`` takes a closure.
    """

    def __init__(
        self,
        package: str,
        kind: str,
        of: str = "parameters",
        closure: bool = False,
        more: Any = None,
        **options: Any,
    ):
        self.package, self.kind, self.of, self.closure = package, kind, of, closure
        self.more, self.options = more or {}, options

    @property
    def name(self) -> str:
        return f"{self.package}.{self.kind}"

    def make(self, model: nn.Module) -> torch.optim.Optimizer:
        kind: Any = importlib.import_module(self.package)
        for part in self.kind.split("."):
            kind = getattr(kind, part)
        parameters = list(model.parameters())
        if self.of == "named":
            return kind(model.named_parameters(), **self.options)
        if self.of == "model":
            return kind(model, **self.options)
        if self.of == "wrap":
            return kind(torch.optim.SGD(parameters, lr=0.01, momentum=0.9), **self.options)
        if self.of == "base":
            return kind(parameters, torch.optim.SGD, **self.options)
        if self.of == "matrices":
            matrices = [p for p in parameters if p.dim() == 2]
            rest = [p for p in parameters if p.dim() != 2]
            first, other = self.more
            return kind([{"params": matrices, **first}, {"params": rest, **other}], **self.options)
        return kind(parameters, **self.options)


RATE = {"lr": 0.01}
PROJECTED = ({"rank": 2, "update_proj_gap": 3, "scale": 0.25, "proj_type": "std"}, {})
CASES = [
    Case("schedulefree", "AdamWScheduleFree", **RATE),
    Case("schedulefree", "SGDScheduleFree", **RATE),
    Case("schedulefree", "RAdamScheduleFree", **RATE),
    Case("schedulefree", "ScheduleFreeWrapper", of="wrap"),
    Case("prodigyopt", "Prodigy"),
    Case("lion_pytorch", "Lion", **RATE),
    Case("dadaptation", "DAdaptAdam"),
    Case("dadaptation", "DAdaptSGD"),
    Case("dadaptation", "DAdaptLion"),
    Case("galore_torch", "GaLoreAdamW", of="matrices", more=PROJECTED, **RATE),
    Case(
        "apollo_torch",
        "APOLLOAdamW",
        of="matrices",
        more=(
            {
                "rank": 2,
                "update_proj_gap": 3,
                "scale": 1,
                "proj": "random",
                "proj_type": "std",
                "scale_type": "channel",
            },
            {},
        ),
        **RATE,
    ),
    Case("came_pytorch", "CAME", **RATE),
    Case("adam_mini", "Adam_mini", of="named", dim=8, n_heads=2, **RATE),
    Case("adabelief_pytorch", "AdaBelief", print_change_log=False, **RATE),
    Case(
        "muon", "SingleDeviceMuonWithAuxAdam", of="matrices", more=({"use_muon": True}, {"use_muon": False})
    ),
    Case("sophia_opt", "SophiaG", **RATE),
    Case("pytorch_lamb", "Lamb", **RATE),
    Case("ranger21", "Ranger21", num_epochs=2, num_batches_per_epoch=8, **RATE),
    Case("madgrad", "MADGRAD", **RATE),
    Case("grokadamw", "GrokAdamW", **RATE),
    Case("optimi", "StableAdamW", **RATE),
    Case("optimi", "Adan", **RATE),
    Case("optimi", "Ranger", **RATE),
    Case("torch_optimizer", "Shampoo", **RATE),
    Case("torch_optimizer", "SWATS", **RATE),
    Case("torch_optimizer", "AggMo", **RATE),
    Case("torch_optimizer", "Lookahead", of="wrap"),
    Case("pytorch_optimizer", "SOAP", precondition_frequency=3, **RATE),
    Case("pytorch_optimizer", "Shampoo", **RATE),
    Case(
        "pytorch_optimizer",
        "ScalableShampoo",
        start_preconditioning_step=3,
        preconditioning_compute_steps=2,
        **RATE,
    ),
    Case("pytorch_optimizer", "SPAM", update_proj_gap=4, **RATE),
    Case("pytorch_optimizer", "StableSPAM", **RATE),
    Case("pytorch_optimizer", "AdaShift", **RATE),
    Case("pytorch_optimizer", "Adan", **RATE),
    Case("pytorch_optimizer", "ADOPT", **RATE),
    Case("pytorch_optimizer", "AdEMAMix", **RATE),
    Case("pytorch_optimizer", "MARS", **RATE),
    Case("pytorch_optimizer", "Kron", **RATE),
    Case("pytorch_optimizer", "Muon", of="matrices", more=({"use_muon": True}, {"use_muon": False})),
    Case("pytorch_optimizer", "Ranger", **RATE),
    Case("pytorch_optimizer", "Prodigy"),
    Case("pytorch_optimizer", "ScheduleFreeAdamW", **RATE),
    Case("pytorch_optimizer", "Fira", **RATE),
    Case("pytorch_optimizer", "VSGD", **RATE),
    Case("pytorch_optimizer", "EmoNavi", **RATE),
    Case("pytorch_optimizer", "Lookahead", of="wrap"),
    Case("pytorch_optimizer", "SAM", of="base", closure=True, **RATE),
    Case("pytorch_optimizer", "RACS", **RATE),
    Case("heavyball", "SOAP", **RATE),
    Case("heavyball", "Muon", **RATE),
    Case("heavyball", "AdamW", **RATE),
    Case("heavyball", "PSGDKron", **RATE),
    Case("torchao.optim", "AdamW8bit", **RATE),
    Case("torchao.optim", "AdamW4bit", **RATE),
    Case("torchao.optim", "AdamWFp8", **RATE),
    Case("bitsandbytes.optim", "Adam8bit", min_8bit_size=1, **RATE),
    Case("bitsandbytes.optim", "Lion8bit", min_8bit_size=1, **RATE),
    Case("torch.optim", "LBFGS", closure=True),
]
SMALL = ("torch.optim.LBFGS",)


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 64), nn.Tanh(), nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)
    )


def iterate(case: Case, model: nn.Module, optimizer: Any, i: int) -> None:
    """Do what an iteration does up to the optimizer's step."""
    x, y = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(i))

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward(create_graph=case.kind == "AdaHessian")
        return loss

    if case.closure:
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def train(case: Case, run: str | None, until: int, out: Path, kill: bool) -> None:
    """Train to step ``until``, with a Checkpointer in ``run`` if that is given. Write what there is then to ``out``, or
    be killed there after the step of the iteration."""
    model = model_of()
    optimizer: Any = case.make(model)
    switches = hasattr(optimizer, "train") and hasattr(optimizer, "eval")
    ckpt = None if run is None else holdfast.Checkpointer(run, model=model, optimizer=optimizer, base_every=4)
    start = 0 if ckpt is None else ckpt.resume()
    if switches:
        optimizer.train()
    for i in range(start, until):
        iterate(case, model, optimizer, i)
        if ckpt is not None:
            if kill and i == until - 1:
                ckpt.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            ckpt.step()
        if switches and i + 1 in TOGGLES:
            optimizer.eval()
            optimizer.train()
    if ckpt is not None:
        ckpt.close()
    torch.save([p.detach().clone() for p in model.parameters()], out)


def forked(work: Callable[[], None]) -> dict[str, Any]:
    """Do ``work`` in a process of its own, and return how that ended: ``status``, ``told`` and ``error``."""
    with tempfile.NamedTemporaryFile("r") as report:
        child = os.fork()
        if child == 0:
            told: list[str] = []
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # some say how they were made
            with warnings.catch_warnings(record=True) as each, open(report.name, "w") as file:
                warnings.simplefilter("always")
                code, error, ours = 0, "", False
                try:
                    work()
                except BaseException as found:
                    code, error, ours = (
                        1,
                        f"{type(found).__name__}: {found}",
                        isinstance(found, holdfast.HoldfastError),
                    )
                    if os.environ.get("SHOW"):
                        traceback.print_exc()
                told = [
                    str(w.message)
                    for w in each
                    if "holdfast" in (w.filename or "") or _is_ours(str(w.message))
                ]
                json.dump({"error": error, "ours": ours, "told": told}, file)
            os._exit(code)
        _, status = os.waitpid(child, 0)
        text = report.read()
    found = json.loads(text) if text else {"error": "", "ours": False, "told": []}
    return {
        **found,
        "killed": os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL,
        "code": status,
    }


def _is_ours(text: str) -> bool:
    return any(
        part in text for part in ("a resume would not", "changed otherwise than by", "resuming after step")
    )


def tried(case: Case, folder: str) -> dict[str, Any]:
    """What becomes of one optimizer."""
    run, outs = f"{folder}/run", [Path(folder, f"{n}.pt") for n in range(2)]
    whole = forked(lambda: train(case, None, STEPS, outs[0], kill=False))
    if whole["error"] or not outs[0].exists():
        return {"outcome": "not run", "text": whole["error"] or f"ended with status {whole['code']}"}
    told: list[str] = []
    for number, until in enumerate((*KILLS, STEPS)):
        found = forked(lambda until=until: train(case, run, until, outs[1], kill=until != STEPS))
        told += found["told"]
        if found["error"]:
            early = number == 0 and found["ours"]
            return {"outcome": "refused" if early else "WRONG", "text": found["error"]}
        if until != STEPS and not found["killed"]:
            return {"outcome": "WRONG", "text": f"ended with status {found['code']}"}
    a, b = (torch.load(out) for out in outs)
    same = all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    text = "; ".join(dict.fromkeys(told))
    return {"outcome": "bit-equal" if same else "told" if told else "WRONG", "text": text}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--only", nargs="+", default=[], help="parts of names")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    chosen = [case for case in CASES if not options.only or any(part in case.name for part in options.only)]
    if options.small:
        chosen = [case for case in CASES if case.name in SMALL]
    found: dict[str, dict[str, Any]] = {}
    absent = []
    warm_up()
    for case in chosen:
        try:
            kind: Any = importlib.import_module(case.package)
            getattr(kind, case.kind)
        except Exception as error:
            absent.append(f"{case.name} ({type(error).__name__})")
            continue
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            found[case.name] = tried(case, folder)
        print(
            case.name,
            found[case.name]["outcome"],
            found[case.name]["text"][:150],
            file=sys.stderr,
            flush=True,
        )
    rows = [["optimizer", "outcome", "said"]]
    table(rows + [[name, each["outcome"], each["text"][:90]] for name, each in found.items()])
    counts = {
        o: sum(each["outcome"] == o for each in found.values())
        for o in ("bit-equal", "refused", "told", "WRONG", "not run")
    }
    print(f"\n{counts}; absent: {', '.join(absent) or 'none'}")
    finish(
        "package_optimizers", {"versions": versions(chosen), "counts": counts, "found": found}, options.keep
    )


def warm_up() -> None:
    """Import what the first optimizer and the first Checkpointer of a process import, before it is forked."""
    import torch._dynamo

    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _ = holdfast.Checkpointer
    iterate(Case("torch.optim", "SGD"), model, optimizer, 0)


def versions(cases: list[Case]) -> dict[str, str]:
    """By package, which version was tried."""
    there = packages_distributions()
    names = {name for case in cases for name in there.get(case.package.partition(".")[0], ())}
    return {name: version(name) for name in sorted(names)}


if __name__ == "__main__":
    main()
