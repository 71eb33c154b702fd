"""``holdfast train`` under torchrun: what it computes, prints and keeps on several ranks, and how it stops."""

from __future__ import annotations

import random
import signal

import psutil
import pytest

from cli.test_train import TINY, events_of, wait_for_steps
from crash.test_torchrun import free_port, kill
from holdfast.store.run_store import LocalStore
from support.warm_python import environment_of, start_python, start_torchrun

pytestmark = pytest.mark.timeout(400)

SIZES = TINY | {"train.micro_batches": 4, "train.steps": 6}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Enough that 64 samples are held out."""
    path = tmp_path_factory.mktemp("text") / "text"
    words = ["def ", "return ", "self", "(", ")", ":\n", "    "]
    path.write_text("".join(random.Random(0).choices(words, k=4000))[:14000])
    return path


def words_of(run, text, sizes=SIZES, **sets):
    keys = sizes | {"run.dir": run, "data.text": text} | {k.replace("__", "."): v for k, v in sets.items()}
    return [
        "-m",
        "holdfast",
        "train",
        *(word for key, value in keys.items() for word in ("--set", f"{key}={value}")),
    ]


def start_ranks(ranks, run, text, **sets):
    """The command under torchrun."""
    words = ["--standalone", "--nproc-per-node", ranks, *words_of(run, text, **sets)]
    return start_torchrun(*words, env=environment_of(GLOO_SOCKET_IFNAME="lo"))


def ended(process):
    try:
        out, err = process.communicate(timeout=180)
    except BaseException:
        kill(process)
        raise
    return process.returncode, out, err


def run_torchrun(*args, **sets):
    return ended(start_ranks(*args, **sets))


def run_ranks(ranks, run, text, **sets):
    """The command as so many processes that find in their environment what torchrun says there: the greatest exit
    code, and all that they wrote."""
    environment = environment_of(GLOO_SOCKET_IFNAME="lo")
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GROUP_WORLD_SIZE": "1"}
    shared |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    told = (
        [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        if ranks > 1
        else [{}]
    )
    processes = [start_python(*words_of(run, text, **sets), env=environment | each) for each in told]
    try:
        said = [process.communicate(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    outs, errs = zip(*said, strict=True)
    return max(process.returncode for process in processes), "".join(outs), "".join(errs)


def train(*args, how=run_ranks, **sets):
    code, out, err = how(*args, **sets)
    assert code == 0, err
    return out


def losses(run):
    return {event["step"]: event["loss"] for event in events_of(run, "step")}


def validations(run):
    return {f"{n}: step {e['step']}": e["loss"] for n, e in enumerate(events_of(run, "validation"))}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, text):
    """Of one process; and what it printed."""
    run = tmp_path_factory.mktemp("alone") / "run"
    return run, train(1, run, text)


@pytest.fixture(scope="module")
def two(tmp_path_factory, text):
    """Of two ranks, under torchrun; and what they printed."""
    run = tmp_path_factory.mktemp("two") / "run"
    return run, train(2, run, text, how=run_torchrun)


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_step_is_the_same_on_any_number_of_ranks(tmp_path, text, alone, two, ranks):
    """The same samples, the same draws of dropout; sums of gradients are formed in another order."""
    whole, printed = alone
    run, out = two if ranks == 2 else (tmp_path / "run", train(ranks, tmp_path / "run", text))
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5) and len(losses(run)) == 6
    assert validations(run) == pytest.approx(validations(whole), rel=1e-5)
    assert {event["tokens"] for event in events_of(run, "step")} == {4 * 2 * 16}
    assert out.count("Finished step 6 of 6, which is durable") == printed.count("Finished step 6 of 6") == 1
    assert f"ranks    {ranks}; SSD, wear and memory are those of the first" in out
    assert f" --standalone --nproc-per-node {ranks} -m holdfast train " in out
    assert len(LocalStore.read(run).head().streams) == ranks


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path, text):
    """2, then 1; and then there is nothing left to do."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    sets = {"train__micro_batch_size": 3}  # so that held-out text cannot be shared out
    for ranks, steps in ((2, 2), (1, 4)):  # with a schedule of its own each
        train(ranks, run, text, **sets, train__steps=steps)
        train(1, whole, text, **sets, train__steps=steps)
    assert validations(run) == pytest.approx(validations(whole), rel=1e-5)
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5) and len(losses(run)) == 4
    out = train(2, run, text, **sets, train__steps=4)
    assert "is finished: step 4 is durable and whole" in out


def test_ranks_over_drives_have_the_losses_of_ranks_without(tmp_path, text, two):
    """And are told at a resume that gives no drives."""
    run, (other, _), drive = tmp_path / "run", two, f"[{tmp_path / 'drive'}]"
    out = train(2, run, text, offload__drives=drive)
    assert str(tmp_path / "drive") in "".join(out.split()), "its space is announced"
    assert (losses(run), validations(run)) == (losses(other), validations(other)) and len(losses(run)) == 6
    assert any("drive_1/rank-00001" in ref.path for ref in LocalStore.read(run).head().files.values())
    code, _, err = run_ranks(2, run, text, train__steps=8)
    assert code and f"Say --set 'offload.drives={drive}' to go on" in err


def test_ranks_stop_together_and_go_on(tmp_path, text):
    """One of them alone is asked to."""
    run = tmp_path / "run"
    process = start_ranks(2, run, text, train__steps=3000)
    try:
        wait_for_steps(run, process, 3)
        last_rank_of(process).send_signal(signal.SIGTERM)
    except BaseException:
        kill(process)
        raise
    code, out, err = ended(process)
    assert code == 0, err
    stopped = events_of(run, "stopped")[-1]
    assert stopped["signal"] == "SIGTERM" and stopped["step"] == stopped["durable_step"] >= 3
    assert out.count("Stopped by SIGTERM") == 1
    train(2, run, text, train__steps=stopped["step"] + 2)
    assert max(losses(run)) == stopped["step"] + 2


def test_micro_batches_that_cannot_be_shared_out_are_refused(tmp_path, text):
    code, _, err = run_ranks(2, tmp_path / "run", text, train__micro_batches=3)
    assert code and "train.micro_batches = 3 cannot be shared out evenly among 2 ranks" in err
    assert not (tmp_path / "run").exists()


def test_a_budget_that_holds_nothing_is_refused(tmp_path, text):
    code, _, err = run_ranks(2, tmp_path / "run", text, offload__host_budget="1KiB")
    assert code and ("error: " in err or "error on rank 1: " in err) and "its budget is 1.0 KiB" in err
    assert not (tmp_path / "run" / "commits").exists()


def last_rank_of(process):
    """The process of torchrun's last rank, which it starts last."""
    return max(psutil.Process(process.pid).children(), key=lambda child: child.create_time())
