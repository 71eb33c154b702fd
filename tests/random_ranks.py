"""Random trainings of several ranks under a Checkpointer, by seed: worlds that do anything, are killed, and resume.

A *sequence* is one tiny run in several *lives*, each a world of ranks forked from one process and joined over gloo. All
ranks of a life have the same list of operations; each writes what it does to a file of its own, which outlives it: a
digest of its state before a step ends, and what it has seen durable after it. A life ends by closing, by a kill of
some ranks, or by a signal or a mistake of one. After each resume and rollback:

* all ranks are at one step, and the state is the one that was noted for that step;
* the step is not before the newest that any rank has seen durable, nor, while all replicas live, in memory;
* between lives ``holdfast verify`` calls the run whole;
* no life hangs.

    python tests/random_ranks.py 1 100            # seeds, until one fails, which prints its operations
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import json
import os
import random
import re
import shutil
import signal
import time
import traceback
import warnings
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import random_runs
from dist.training import CODECS, Forked, whole_tensors, wrapped
from dist.world import use_one_gloo_thread
from holdfast import failpoints
from holdfast.checkpoint.nodes.local_disks import LocalDisks
from holdfast.checkpoint.replica import replica_client, replica_process
from holdfast.checkpointer import Checkpointer
from holdfast.cli import inspect as cli_inspect
from holdfast.errors import BadInput, NoCommit, RankFailed
from holdfast.store.commit.retention import Keep
from random_runs import POINTS, delays, difference, in_child, prepare
from support.switching import copy_often, switch_often
from support.warm_python import PR_SET_CHILD_SUBREAPER
from survive_run import digest

DEADLINE_SECONDS = 10.0
"""How long a rank waits for one that says nothing."""
LIFE_SECONDS = 60.0
"""How long a life may take: one that takes longer hangs."""
ORDER = ("may", "went", "ref", "durable", "log", "over")
"""In which order what ranks say of one operation is heard."""


@dataclass(frozen=True)
class Plan:
    """What stays the same in all lives of a run."""

    unit_bytes: int
    groups_per_segment: int
    drives: bool
    nodes: bool
    replica: bool
    copies: bool
    scaler: bool
    best: bool
    codec: tuple[str, float] | None
    optimizer: str

    @classmethod
    def of(cls, chance: random.Random) -> Plan:
        place, codec = chance.random(), chance.choice([None, None, None, None, ("topk", 0.2), ("int8", 16)])
        has_replica = 0.12 < place < 0.4
        return cls(
            chance.choice([100, 300, 2000]), chance.choice([1, 2, 3, 64]), place < 0.12, place > 0.75, has_replica,
            chance.random() < 0.5, chance.random() < 0.3, chance.random() < 0.25 and not has_replica,
            None if has_replica else codec, chance.choice(["adamw", "sgd"]),
        )  # fmt: skip


@dataclass
class Order:
    """A life, as all of its ranks are told."""

    number: int
    kind: str
    nodes: list[int]
    """By rank the number of its node."""
    options: dict[str, Any]
    ask: dict[str, int]
    ops: list[dict[str, Any]]
    end: dict[str, Any]
    slow: bool

    @property
    def world_size(self) -> int:
        return len(self.nodes)


class Rank:
    """One rank of a life."""

    def __init__(self, plan: Plan, order: Order, place: Path, rank: int) -> None:
        self.plan, self.order, self.place, self.rank, self.at = plan, order, place, rank, -1
        self.said = os.open(place / f"said-{order.number}-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def say(self, kind: str, *what: Any) -> None:
        """Write a line that outlives this process, whatever ends it."""
        os.write(self.said, json.dumps([self.at, kind, *what]).encode() + b"\n")

    def main(self) -> None:
        order = self.order
        errors = open(self.place / f"errors-{order.number}-{self.rank}", "w")  # noqa: SIM115 (until the end)
        os.dup2(errors.fileno(), 2)
        faulthandler.enable(errors)
        faulthandler.dump_traceback_later(LIFE_SECONDS - 10, exit=True, file=errors)
        os.environ |= {"RANK": str(self.rank), "WORLD_SIZE": str(order.world_size)}
        warnings.showwarning = lambda message, *_: self.say("log", f"warning: {message}")
        try:
            self.arrange()
            self.train()
        except SystemExit as error:
            assert error.code == 128 + signal.SIGTERM
            self.say("durable", self.ckpt.steps_done, self.ckpt.steps_done)
            self.say("over", "term")
        except BaseException as error:
            self.say("over", f"{type(error).__name__}: {error}", traceback.format_exc())
        else:
            self.say("over", "closed")
        finally:
            os._exit(0)

    def arrange(self) -> None:
        """Have this process kill itself where it is to, and cut files small."""
        order, end = self.order, self.order.end
        use_one_gloo_thread()
        kill = (end["point"], end["count"]) if end["how"] == "point" and self.rank in end["who"] else None
        delays(random.Random(self.rank), kill, None, order.slow)
        prepare(self.plan, self.place)
        if order.options.get("replica"):
            replica_client.LINGER_SECONDS = 60.0
            replica_process.start_process = Forked
            Forked.prepare()
        if order.options["every"] == "auto":
            copy_often(self.place / "memory") if self.plan.copies else switch_often()

    def make(self, **options: Any) -> Checkpointer:
        if "codec" in options:
            name, value = options["codec"]
            options["codec"] = CODECS[name](value)
        options["keep"] = Keep(**options["keep"])
        run = self.place / "run"
        if self.plan.nodes:
            node = self.order.nodes[self.rank]
            options["nodes"], run = LocalDisks(node=node), self.place / f"run-{node}"
        return Checkpointer(
            run, model=self.model, optimizer=self.optimizer, scheduler=self.schedule, scaler=self.scaler,
            deadline_seconds=DEADLINE_SECONDS, **options,
        )  # fmt: skip

    def train(self) -> None:
        order, size = self.order, self.order.world_size
        rendezvous = f"file://{self.place}/rendezvous-{order.number}"
        dist.init_process_group("gloo", init_method=rendezvous, rank=self.rank, world_size=size)
        self.say("log", "joined")
        self.model = wrapped(order.kind, size)
        make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[self.plan.optimizer]
        more = {"momentum": 0.9} if self.plan.optimizer == "sgd" else {}
        self.optimizer = make(self.model.parameters(), lr=0.01, **more)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.scaler = None
        if self.plan.scaler:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        torch.manual_seed(100 + self.rank)
        done = self.resume(dict(order.options), order.ask)
        self.say("went", done, self.state())
        self.tell_durable()
        with self.ckpt:
            for self.at, op in enumerate(order.ops):
                getattr(self, f"do_{op['what']}")(op)
                self.tell_durable()
            self.at = len(order.ops)
        self.say("durable", self.ckpt.steps_done, self.ckpt.steps_done)

    def resume(self, options: dict[str, Any], ask: dict[str, int]) -> int:
        """Begin with what is asked for, or with what a refusal says."""
        until = time.monotonic() + 2 * DEADLINE_SECONDS
        while True:
            try:
                self.ckpt = self.make(**options)
                if ask:
                    self.say("may", *ask.values())
                return self.ckpt.resume(**ask)
            except (BadInput, NoCommit, RankFailed) as error:
                text = f"{type(error).__name__}: {error}"
                if (
                    "RunLocked: " in text and time.monotonic() < until
                ):  # replicas without trainers make a base
                    time.sleep(0.2)
                    continue
                self.say("log", f"refused: {text}")
                if "NoCommit: " in text and ask:
                    ask = {}
                elif without := re.search(r"call resume\(step=(\d+)\) to go on without", text):
                    ask = {"step": int(without[1])}
                elif "memory =" not in text or options.pop("memory", None) is None:
                    raise

    def state(self) -> dict[str, Any]:
        """Return digests of everything that a resume has to bring back: what all ranks have in common, and the rest."""
        common = {name: digest(value) for name, value in whole_tensors(self.model, self.optimizer).items()}
        common["schedule"] = digest(self.schedule.state_dict())
        common["groups"] = digest(
            [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        )
        if self.scaler is not None:
            common["scaler"] = digest(self.scaler.state_dict())
        own = {name.removeprefix("module."): digest(b) for name, b in self.model.named_buffers()}
        return {"common": common, "own": own | {"random": digest(torch.get_rng_state())}}

    def tell_durable(self) -> None:
        self.say("durable", self.ckpt.durable_step, self.ckpt.replica_step)

    # Operations

    def do_step(self, op: dict[str, Any]) -> None:
        step = self.ckpt.steps_done + 1
        time.sleep(op["sleeps"][self.rank])
        for _ in range(op["micro"]):
            loss = self.model(torch.randn(5, 7)).pow(2).mean()
            if self.scaler is not None:
                loss = self.scaler.scale(loss * (float("inf") if op["skip"] else 1.0))
            loss.backward()
        if self.order.kind == "plain":
            for p in self.model.parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad)
        if self.order.end.get("at") == self.at and self.rank in self.order.end["who"]:
            raise ZeroDivisionError("a mistake of the script")
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.say("ref", step, self.state())
        self.ckpt.step(None if op["metric"] is None else {"m": op["metric"]})
        assert self.ckpt.steps_done == step, (self.ckpt.steps_done, step)

    def do_wait(self, op: dict[str, Any]) -> None:
        self.ckpt.wait()
        assert self.ckpt.durable_step == self.ckpt.steps_done

    def do_save(self, op: dict[str, Any]) -> None:
        self.ckpt.save()
        assert self.ckpt.durable_step == self.ckpt.steps_done

    def do_pause(self, op: dict[str, Any]) -> None:
        time.sleep(op["sleeps"][self.rank])

    def do_rollback(self, op: dict[str, Any]) -> None:
        at = self.ckpt.steps_done
        step = at if op["back"] is None else max(0, at - op["back"])
        self.say("may", step)
        try:
            self.ckpt.rollback(None if op["back"] is None else step)
        except NoCommit as error:
            self.say("log", f"refused: {error}")
            assert self.ckpt.steps_done == at
            return
        assert self.ckpt.steps_done == step
        self.say("went", step, self.state())


# What a life is


def operations(chance: random.Random, plan: Plan, world_size: int, number: int) -> list[dict[str, Any]]:
    ops = []
    for _ in range(number):
        weights = [70, 6, 6, 6, 0 if plan.codec else 6]  # nothing leads back with residuals
        what = chance.choices(["step", "wait", "save", "pause", "rollback"], weights)[0]
        slow = chance.random() < 0.3
        ops.append({
            "what": what, "sleeps": [chance.uniform(0, 0.05) * slow for _ in range(world_size)],
            "micro": chance.choice([1, 1, 1, 2]), "skip": chance.random() < 0.2, "back": chance.choice([None, 1, 2, 5]),
            "metric": chance.random() if plan.best and chance.random() < 0.3 else None,
        })  # fmt: skip
    return ops


def options_of(chance: random.Random, plan: Plan, place: Path) -> dict[str, Any]:
    keep: dict[str, Any] = {"last": chance.choice([1, 1, 2, 3])}
    if chance.random() < 0.2:
        keep["every"] = chance.choice([2, 5])
    has_replica = plan.replica and chance.random() < 0.85
    every = 1 if plan.codec or has_replica else chance.choice([1, 1, 1, 1, 2, 3, "auto"])
    if plan.best:
        keep |= {"best": 2, "metric": "m", "mode": "min"}
    options = {"keep": keep, "every": every, "when_behind": chance.choice(["block", "block", "commit"])}
    if every == 1:
        options["base_every"] = chance.choice([None, 1, 2, 3, 5, 1000])
        options["wait_each_step"] = not has_replica and chance.random() < 0.1
    if chance.random() < 0.2:
        options["memory"] = chance.choice([30_000, 100_000, 500_000])
    if has_replica:
        options["replica"] = True
    if plan.codec:
        options["codec"] = plan.codec
    if plan.drives:
        options["drives"] = [str(place / f"drive-{name}") for name in chance.choice(["a", "ab", "b", "ba"])]
    return options


def end_of(chance: random.Random, options: dict[str, Any], plan: Plan, size: int, ops: int) -> dict[str, Any]:
    one = [chance.randrange(size)]
    how = chance.choice(
        ["close", "kill all", "kill all", "kill one", "kill one", "point", "point", "term", "raise"]
    )
    end: dict[str, Any] = {"how": how, "who": list(range(size)) if how == "kill all" else one}
    if how == "point":
        points = [*POINTS, *failpoints.RANKS, *(failpoints.NODES * 3 if plan.nodes else ())]
        points += failpoints.REPLICA * 3 if options.get("replica") else ()
        points += failpoints.MEMORY * 3 if options["every"] == "auto" and plan.copies else ()
        end |= {"point": chance.choice(points), "count": chance.choice([1, 1, 2, 3, 5, 8])}
    elif how == "raise":
        end["at"] = chance.randrange(ops)
    elif how != "close":  # once a rank has said so many lines, after some time
        lines = chance.choice(
            [1, chance.randint(2, 3 * ops)]
        )  # the first is of a rank that has joined the others
        end |= {"lines": lines, "seconds": chance.uniform(0, 0.05 if lines > 1 else 1.0)}
    return end


# What has happened


@dataclass
class Version:
    """A state of a step: what all ranks have in common, and by rank what each has of its own in a world of a shape."""

    common: dict[str, str]
    shape: tuple[str, int]
    own: dict[int, dict[str, str]] = field(default_factory=dict)

    def difference(self, state: dict[str, Any], shape: tuple[str, int], rank: int) -> list[str]:
        found = difference(self.common, state["common"])
        if shape == self.shape and rank in self.own:
            found += difference(self.own[rank], state["own"])
        return found


class Wrong(AssertionError):
    """A promise was not kept, or this tester is wrong."""


class History:
    """What is known of a run from what its ranks have said."""

    def __init__(self) -> None:
        self.refs: dict[int, list[Version]] = {}
        self.floor = self.kept = -1
        self.survivor: tuple[str, int] | None = None
        """The shape of the last life, if all that its processes kept in memory has survived."""

    def hear(self, order: Order, said: list[list[list[Any]]]) -> None:
        """Follow what the ranks of a life said. Raises ``Wrong``."""
        shape, arrived = (order.kind, order.world_size), dict[int, int]()
        every = [
            (at, ORDER.index(kind), rank, what)
            for rank, lines in enumerate(said)
            for at, kind, *what in lines
        ]
        words = [what[0] for _, number, _, what in every if ORDER[number] == "log"]
        for at, number, rank, what in sorted(every, key=lambda each: each[:3]):
            kind = ORDER[number]
            if kind == "may":
                self.floor, self.kept = min(self.floor, *what), min(self.kept, *what)
            elif kind == "durable":
                self.floor, self.kept = max(self.floor, what[0]), max(self.kept, *what)
            elif kind == "went":
                step, state = what
                if at not in arrived:
                    self.arrive(order, step, at, words)
                    arrived[at] = step
                if arrived[at] != step:
                    raise Wrong(f"rank {rank} is at step {step}, and another at {arrived[at]}")
                self.compare(step, state, shape, rank)
            elif kind == "ref":
                step, state = what
                if at not in arrived:
                    arrived[at] = step
                    self.refs = {s: v for s, v in self.refs.items() if s < step}
                    self.refs[step] = [Version(state["common"], shape)]
                [version] = self.refs[step]
                if texts := difference(version.common, state["common"]):
                    raise Wrong(f"ranks differ after step {step}: {texts}")
                version.own[rank] = state["own"]

    def arrive(self, order: Order, step: int, at: int, words: list[str]) -> None:
        if not self.refs:
            if step:
                raise Wrong(f"a fresh run begins at step {step}")
            return
        if step not in self.refs:
            raise Wrong(f"step {step} was never done or was abandoned")
        if at == -1 and step < self.floor:
            raise Wrong(f"resumed step {step}, and step {self.floor} had been durable")
        if at == -1 and step < self.kept:
            keeps = order.options.get("replica") or order.options["every"] == "auto"
            if keeps and self.survivor == (order.kind, order.world_size):
                raise Wrong(f"resumed step {step}, and step {self.kept} had been in memory: {words}")
        self.refs = {s: v for s, v in self.refs.items() if s <= step}
        self.floor, self.kept = min(self.floor, step), step

    def compare(self, step: int, state: dict[str, Any], shape: tuple[str, int], rank: int) -> None:
        versions = self.refs.setdefault(step, [])
        texts = [version.difference(state, shape, rank) for version in versions]
        if versions and all(texts):
            raise Wrong(f"rank {rank} has at step {step} none of {len(versions)} states: {texts}")
        if not versions or versions[-1].shape != shape:
            versions.append(Version(state["common"], shape))
        versions[-1].own.setdefault(rank, state["own"])


# A sequence


class Sequence:
    """All lives of one run."""

    def __init__(self, seed: int, place: Path) -> None:
        self.seed, self.place, self.lines = seed, place, list[str]()
        self.past, self.lives, self.kills = History(), 0, 0
        self.nodes: list[int] = []
        self.kind = ""
        self.is_whole = True
        """False while a node may lack what only its partner has."""

    def play(self) -> str:
        """Returns what was wrong, or nothing."""
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # of replicas that outlive their ranks
        chance = random.Random(self.seed)
        self.plan = Plan.of(chance)
        self.lines.append(f"seed {self.seed}: {self.plan}")
        lives = chance.randint(2, 5)
        try:
            for number in range(lives):
                own = random.Random(f"{self.seed} {number}")
                self.live(self.draw(own, number, is_last=number == lives - 1))
                self.between(own)
        except Wrong as error:
            return f"{error}\n{self.errors()}"
        finally:
            end_children()
        return ""

    def errors(self) -> str:
        """Return what the ranks of the last life wrote to standard error."""
        files = sorted(self.place.glob(f"errors-{self.lives - 1}-*"))
        return "\n".join(f"{path.name}: {path.read_text()[-6000:]}" for path in files)

    def draw(self, chance: random.Random, number: int, is_last: bool) -> Order:
        plan = self.plan
        if not self.nodes or (self.is_whole and chance.random() < 0.35):
            size = chance.choice([2, 2, 2, 3, 3, 4])
            nodes = list(range(size))
            if plan.nodes and size > 2 and chance.random() < 0.4:
                nodes = [0, *sorted(chance.choice([0, 1]) for _ in range(size - 2)), 2]
            gone = {*self.nodes} - {*nodes} if plan.nodes else set()
            if len(gone) < 2:  # what two nodes had may be nowhere else
                self.is_whole, self.nodes = self.is_whole and not gone, nodes
        options = options_of(chance, plan, self.place)
        ops = operations(chance, plan, len(self.nodes), 3 if is_last else chance.randint(2, 14))
        steps = sorted(self.past.refs)
        ask = {"step": chance.choice(steps)} if steps and chance.random() < 0.12 else {}
        end = {"how": "close", "who": []}
        if not is_last:
            end = end_of(chance, options, plan, len(self.nodes), len(ops))
        if not self.kind or chance.random() < 0.4:  # what is kept in memory is of use to the same parallelism
            self.kind = chance.choice(["ddp", "fsdp", "plain"])
        return Order(number, self.kind, self.nodes, options, ask, ops, end, chance.random() < 0.3)

    def live(self, order: Order) -> None:
        self.lines.append(
            f"life {order.number}: {order.kind} {order.nodes} {order.options} {order.ask} {order.end}"
        )
        pids = []
        for rank in range(order.world_size):
            pid = os.fork()
            if not pid:
                Rank(self.plan, order, self.place, rank).main()
            pids.append(pid)
        self.lives += 1
        codes, fired = self.watch(pids, order)
        said = []
        for rank in range(order.world_size):
            path = self.place / f"said-{order.number}-{rank}"
            said.append([json.loads(line) for line in path.read_text().splitlines()] if path.exists() else [])
            for at, kind, *what in said[-1]:
                if kind in ("went", "ref"):
                    self.lines.append(f"  {rank} {at} {kind} {what[0]}")
                else:
                    self.lines.append(f"  {rank} {at} {kind} {' '.join(map(str, what))}")
        self.lines.append(f"  codes {codes} fired {fired}")
        self.past.hear(order, said)
        self.judge(order, codes, fired, [(lines or [[0, "", ""]])[-1] for lines in said])

    def watch(self, pids: list[int], order: Order) -> tuple[list[int], bool]:
        """Wait for the ranks, and end those that are to be ended. Returns their exit codes, and whether that was."""
        codes, end, fired, due = dict[int, int](), order.end, False, None
        limit = time.monotonic() + LIFE_SECONDS
        signals = {"kill all": signal.SIGKILL, "kill one": signal.SIGKILL, "term": signal.SIGTERM}
        number = signals.get(end["how"])
        while len(codes) < len(pids):
            for pid in pids:
                if pid not in codes:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    codes |= {pid: os.waitstatus_to_exitcode(status)} if done else {}
            now = time.monotonic()
            if number is not None and not fired:
                path = self.place / f"said-{order.number}-{end['who'][0]}"
                if due is None and path.exists() and path.read_bytes().count(b"\n") >= end["lines"]:
                    due = now + end["seconds"]
                if due is not None and now > due:
                    living = [pids[rank] for rank in end["who"] if pids[rank] not in codes]
                    for pid in living:
                        os.kill(pid, number)
                    fired, number = bool(living), None
            if now > limit:
                for pid in set(pids) - set(codes):
                    os.kill(pid, signal.SIGKILL)
                raise Wrong("a life took too long")
            time.sleep(0.003)
        return [codes[pid] for pid in pids], fired

    def judge(self, order: Order, codes: list[int], fired: bool, last: list[list[Any]]) -> None:
        """Tell whether the ranks ended as they may."""
        how = order.end["how"]
        if 1 in codes and "in _new_process_group_helper" in self.errors():
            self.lines.append("gloo waits for a rank that ended while a group was made")
            return
        if 1 in codes:
            raise Wrong("a rank hung")
        died = any(codes)
        disturbed = died or how == "raise" or (how == "point" and order.options.get("replica"))
        for rank, (_, kind, *what) in enumerate(last):
            if codes[rank]:
                continue
            if kind != "over":
                raise Wrong(f"rank {rank} ended with {codes[rank]}, and said {kind} {what}")
            text = what[0]
            if text in ("closed", "term"):
                continue
            mine = how == "raise" and rank in order.end["who"] and text.startswith("ZeroDivisionError")
            if not mine and not (disturbed and text.startswith(ENDED)):
                raise Wrong(f"rank {rank}: {what}")
        if all(what == ["closed"] for _, _, *what in last):
            self.is_whole = True
        self.kills += died
        is_left = how in ("kill all", "kill one") and died
        self.past.survivor = (order.kind, order.world_size) if is_left else None

    def between(self, chance: random.Random) -> None:
        if self.plan.nodes and self.is_whole and chance.random() < 0.3:
            node = chance.choice(self.nodes)
            self.lines.append(f"node {node} is lost")
            shutil.rmtree(self.place / f"run-{node}", ignore_errors=True)
            self.is_whole = False
        if children():  # replicas that keep what they have
            return
        runs = [self.place / "run"] if not self.plan.nodes else sorted(self.place.glob("run-*"))
        where, past = ",".join(map(str, runs)), self.past

        def verify(send: Any) -> None:
            with redirect_stdout(io.StringIO()) as out, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    sound = cli_inspect.verify(where, as_json=False)
                except (NoCommit, BadInput) as error:
                    assert past.floor < 0, f"{type(error).__name__}: {error}"
                else:
                    # a kill may cut in two the write of a record, whose payload then fails
                    cut = re.search(r"record of step .*Step (\d+) is the newest that can be", out.getvalue())
                    assert sound or (cut and int(cut[1]) >= past.floor), out.getvalue()

        outcome = in_child(verify, lambda *_: None, None)
        if outcome.failure or not outcome.ended:
            raise Wrong(f"verify: {outcome.failure or outcome.code}")


def children() -> list[int]:
    """The processes that this one has started or inherited."""
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for pid in map(int, found):
        os.waitpid(pid, os.WNOHANG)
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def end_children() -> None:
    """End what lives of a sequence's processes: ranks, and replicas that outlive theirs."""
    while left := children():
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


ENDED = (
    "RankFailed", "RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionError",
    "ConnectionResetError", "BrokenPipeError", "ReplicaDied", "EngineFailed",
)  # fmt: skip
"""Errors by which a rank ends where another has."""


def play_some(first: int, last: int) -> list[str]:
    """Play the sequences of some seeds. Returns the operations of each that went wrong, and what was wrong."""
    return random_runs.play_some(first, last, Sequence)


if __name__ == "__main__":
    random_runs.main(Sequence)
