"""MeZO out of core has the bits of a plain loop of it, and moves each block once each way per step."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

import holdfast
from holdfast.errors import BadInput
from holdfast.offload.setup import run_planning, step_planning
from holdfast.schedule.operations import traffic
from holdfast.schedule.work import StepShape
from plain_loops import PLACEMENTS, by_tokens, model_with_a_frozen_parameter, ragged
from streams import Apart
from training import VOCABULARY, adamw, batches, decoder, differing, stored, warm_up
from zeroth_loops import STEPS, mezo, of_trained, offload, plain_loop, reference

transformers = pytest.importorskip("transformers")


def llama():
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=VOCABULARY, attention_dropout=0.1, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2():
    """With tied embeddings."""
    config = transformers.GPT2Config(
        n_embd=16, n_layer=3, n_head=2, vocab_size=VOCABULARY, n_positions=32, use_cache=False, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def build(make):
    torch.manual_seed(0)
    return make().train()


def of_transformers(step):
    return [{"input_ids": batch["tokens"], "labels": batch["tokens"]} for batch in batches(step, 3)]


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("num_micro_batches", [3, 1, 4])
def test_steps_have_every_bit_of_a_plain_loop(tmp_path, num_micro_batches, placement):
    """With dropout, a frozen parameter, a schedule and two groups."""
    losses, states = reference(num_micro_batches)
    model = model_with_a_frozen_parameter(dropout=0.1)
    with offload(model, tmp_path, **PLACEMENTS[placement]) as engine:
        found = [engine.step(batches(step, num_micro_batches)) for step in range(STEPS)]
    assert found == losses
    assert differing(stored(tmp_path), states[-1]) == []
    given_back = {f"{name}/param": parameter for name, parameter in model.named_parameters()}
    assert differing(given_back, {k: v for k, v in states[-1].items() if k in given_back}) == []


@pytest.mark.slow
@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_on_a_separate_device_copies_cross_and_the_bits_are_the_same(tmp_path, monkeypatch, placement):
    monkeypatch.setattr(run_planning, "open_device", lambda name: Apart())
    losses, states = reference(3)
    model = model_with_a_frozen_parameter(dropout=0.1)
    with offload(model, tmp_path, sample=batches(0, 1)[0], **PLACEMENTS[placement]) as engine:
        assert [engine.step(batches(step, 3)) for step in range(STEPS - 1)] == losses[:-1]
        check_traffic(engine, 3, STEPS - 1)
    assert differing(stored(tmp_path), states[-1]) == []


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1, 2])
def test_a_model_of_one_or_two_blocks_has_them_too(tmp_path, blocks):
    losses, states = plain_loop(decoder(blocks), lambda step: batches(step, 2))
    with offload(decoder(blocks), tmp_path) as engine:
        assert [engine.step(batches(step, 2)) for step in range(STEPS)] == losses
    assert differing(stored(tmp_path), states[-1]) == []


@pytest.mark.slow
@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("make", [gpt2, llama])
def test_hugging_face_models_have_them_too_with_tied_embeddings(tmp_path, make):
    losses, states = plain_loop(build(make), of_transformers)
    with offload(build(make), tmp_path) as engine:
        assert [engine.step(of_transformers(step)) for step in range(STEPS)] == losses
    assert differing(stored(tmp_path), states[-1]) == []


@pytest.mark.slow
def test_micro_batches_count_by_their_tokens(tmp_path):
    losses, states = plain_loop(decoder(3), lambda step: ragged(step, 3), weights=by_tokens)
    with offload(decoder(3), tmp_path, normalize="tokens") as engine:
        assert [engine.step(ragged(step, 3)) for step in range(STEPS)] == losses
    assert differing(stored(tmp_path), states[-1]) == []


@pytest.mark.slow
def test_in_bf16_masters_are_displaced_in_fp32_and_rounded(tmp_path):
    master, model, kept = decoder(3), decoder(3), []
    optimizer = mezo(master)
    scheduler = warm_up(optimizer)

    def loss(step):
        for parameter, value in zip(model.parameters(), master.parameters()):
            parameter.data = value.data.bfloat16()  # which MeZO has displaced
        return sum(float(model(**batch)) for batch in batches(step, 2)) / 2

    with torch.no_grad():
        for step in range(STEPS):
            kept.append(optimizer.step(lambda step=step: loss(step)))
            scheduler.step()
    with offload(decoder(3), tmp_path, dtype="bf16") as engine:
        assert [engine.step(batches(step, 2)) for step in range(STEPS)] == kept
    assert differing(stored(tmp_path), of_trained(master, optimizer)) == []


# Bytes and memory


def check_traffic(engine, count, step=STEPS):
    """What a step moves is what its list says. Nothing of the step before is under way."""
    engine.wait()
    before = engine.traffic()
    engine.step(batches(step, count))
    engine.wait()
    moved = Counter(engine.traffic())
    moved.subtract(before)
    listed = dict(traffic(engine.operations["zeroth", StepShape(micro_batches=count)]))
    between = {("download", "download_input"), ("upload", "upload_input")}  # of whole pages in the list
    found, listed = (
        {key: nbytes for key, nbytes in each.items() if nbytes and key not in between}
        for each in (moved, listed)
    )
    assert found == listed
    return found


@pytest.mark.slow
@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("count", [4, 1])
def test_on_the_ssd_each_block_is_read_once_and_written_once_and_nothing_else_is(tmp_path, count):
    with offload(decoder(4, width=64, hidden=128), tmp_path, sample=batches(0, 1)[0]) as engine:
        engine.step(batches(0, count))
        moved = check_traffic(engine, count)
        files = sum(unit.state_bytes for unit in engine._run.blocks)
        assert {key: n for key, n in moved.items() if key[0].startswith("ssd")} == {
            ("ssd_read", "load_state"): files,
            ("ssd_write", "store_state"): files,
            ("ssd_write", "store_resident"): engine._run.resident.state_bytes,
        }
        parameters = sum(m.elements for unit in engine._run.blocks for m in unit.members)
        assert files == pytest.approx(4 * parameters, abs=4 * 12 * 16384)  # headers, filler and counters
        assert all(block.grad_bytes == 0 for block in engine._plan.work.blocks)


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_stays_on_the_host_and_what_never_changes_is_not_moved(tmp_path, placement):
    model = model_with_a_frozen_parameter()
    with offload(model, tmp_path, sample=batches(0, 1)[0], **PLACEMENTS[placement]) as engine:
        engine.step(batches(0, 2))
        moved = check_traffic(engine, 2)
    on_host = placement == "host"
    assert (("ssd_read", "load_state") in moved) != on_host
    assert (("ssd_read", "load_frozen") in moved) != (placement != "ssd")  # block 2's, with half of them kept
    assert not [key for key in moved if key[1] in ("load_params", "store_params", "download_grads")]


@pytest.mark.slow
@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_run_holds_no_more_than_was_predicted(tmp_path, placement):
    model = model_with_a_frozen_parameter()
    with offload(
        model, tmp_path, sample=batches(0, 1)[0], micro_batches=3, **PLACEMENTS[placement]
    ) as engine:
        for step in range(4):
            engine.step(batches(step, 3))
        engine.evaluate(batches(0, 3))
        most, predicted = engine._run.residency.pool.most_by_kind, engine._plan.memory.at("host")
        pages = 2 * 4096
        assert most["displaced parameters"] <= predicted["displaced_resident"] + pages
        stays = predicted.get("params_on_host", 0)
        assert most["parameters"] <= predicted.get("params", 0) + stays + 6 * pages
        assert most["optimizer state"] <= predicted.get("state", 0) + predicted.get("optimizer_on_host", 0)
        assert "gradients" not in most and predicted.get("grads", 0) == 0


@pytest.mark.slow
@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("device", ["host", "apart"])
@pytest.mark.parametrize("between", ["evaluate", "save"])
def test_what_a_step_takes_and_what_an_evaluation_takes_is_not_held_together(
    tmp_path, monkeypatch, between, device
):
    if device == "apart":
        monkeypatch.setattr(run_planning, "open_device", lambda name: Apart())
    with offload(decoder(4, width=64, hidden=128), tmp_path, sample=batches(0, 1)[0]) as engine:
        pool, held = engine._run.residency.pool, []
        kept, take = pool.in_use_bytes, pool.take

        def watched(nbytes, kind):
            taken = take(nbytes, kind)
            held.append(pool.in_use_bytes + pool.idle_bytes - kept)
            return taken

        monkeypatch.setattr(pool, "take", watched)
        for step in range(0, 6, 2):
            engine.step(batches(step, 2))
            engine.step(batches(step + 1, 2))
            engine.evaluate(batches(0, 1)) if between == "evaluate" else engine.save()
            assert pool.idle_bytes == 0
        flows = ("params", "state", "displaced_resident", "inputs", "kept_inputs")
        planned = sum(engine._plan.memory.at("host").get(what, 0) for what in flows)
        assert max(held) <= planned + 8 * 4096  # inputs are smaller than the pages that they take


@pytest.mark.slow
def test_activations_are_predicted_for_forward_passes_alone(tmp_path):
    taken = {}
    for kind in (mezo, adamw):
        model, sample = decoder(2, width=64, hidden=128), batches(0, 1, rows=64)[0]
        with holdfast.offload(model, kind(model), tmp_path / kind.__name__, sample=sample) as engine:
            taken[kind] = engine._plan.work
    assert 0 < taken[mezo].workspace_bytes < 0.7 * taken[adamw].workspace_bytes
    assert taken[mezo].input_bytes == taken[adamw].input_bytes
    assert taken[mezo].blocks[0].forward_flop == taken[adamw].blocks[0].forward_flop


@pytest.mark.slow
def test_displaced_copies_of_embedding_and_head_are_pinned_and_planned(tmp_path, monkeypatch):
    device, taken = Apart(), []
    monkeypatch.setattr(run_planning, "open_device", lambda name: device)
    with offload(decoder(3), tmp_path, sample=batches(0, 1)[0], micro_batches=2) as engine:
        pool = engine._run.residency.pool
        take = pool.take
        monkeypatch.setattr(pool, "take", lambda *args: taken.append(take(*args)) or taken[-1])
        engine.step(batches(0, 2))
        engine.wait()
        displaced = {id(buffer): buffer for buffer in taken if buffer.kind == "displaced parameters"}
        assert displaced and all(buffer.unpin for buffer in displaced.values())
        planned = engine._plan.memory
        inputs = 2 * 2 * 3 * 4096  # smaller than the pages that they take
        crossing = ("params", "displaced_resident", "inputs")
        assert planned.pinned_bytes == sum(planned.at("host")[what] for what in crossing)
        assert 0.7 * planned.pinned_bytes < pool.pinned_bytes <= planned.pinned_bytes + inputs
    assert device.pinned == {}


@pytest.mark.parametrize("device", ["host", "apart"])
def test_an_engine_that_failed_holds_no_displaced_weights(tmp_path, monkeypatch, device):
    if device == "apart":
        monkeypatch.setattr(run_planning, "open_device", lambda name: Apart())
    model = decoder(3)
    engine = offload(model, tmp_path)
    engine.step(batches(0, 2))
    zeroth, held = engine._run.zeroth, []

    def fail(*_):
        held.append(len(zeroth.leaves))
        raise RuntimeError("out of luck")

    block = model.blocks[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        engine.step(batches(1, 2))
    block.remove()
    assert held == [2]
    assert (zeroth.leaves, zeroth.copies, zeroth.resident) == ([], None, None)


# What it cannot do


@pytest.mark.parametrize("epsilons", [(1e-3, 1e-2), (0.0, 0.0)])
def test_groups_that_cannot_share_an_epsilon_are_refused_with_nothing_written(tmp_path, epsilons):
    model = decoder(2)
    optimizer = mezo(model)
    for group, epsilon in zip(optimizer.param_groups, epsilons, strict=True):
        group["epsilon"] = epsilon
    with pytest.raises(BadInput, match="epsilon is one for all parameter groups, and positive; these have"):
        holdfast.offload(model, optimizer, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_auto_keeps_in_host_memory_what_fits_and_measures_nothing(tmp_path):
    """No bit depends on it."""
    losses, states = reference(3)
    sample, auto = (
        batches(0, 1)[0],
        {"params_on_host": "auto", "optimizer_on_host": "auto", "delayed_fraction": "auto"},
    )
    kept = {}
    for name, options in (
        ("much", {"budget": "auto"}),
        ("asked", {**auto, "budget": holdfast.Budget(host="8GiB")}),
    ):
        model = model_with_a_frozen_parameter(dropout=0.1)
        with offload(model, tmp_path / name, sample=sample, micro_batches=3, **options) as engine:
            assert [engine.step(batches(step, 3)) for step in range(3)] == losses[:3]
            kept[name] = engine.last["read_bytes"]
        assert differing(stored(tmp_path / name), states[2]) == []
    assert kept == {"much": 0, "asked": 0}
    with offload(decoder(2), tmp_path / "given", optimizer_on_host=0.5, delayed_fraction="auto") as engine:
        assert engine.preflight.plan is None  # nothing was chosen
    with pytest.raises(holdfast.errors.DoesNotFit):
        offload(
            model_with_a_frozen_parameter(dropout=0.1), tmp_path / "none", sample=sample, micro_batches=3,
            budget=holdfast.Budget(host=1024), optimizer_on_host="auto",
        )  # fmt: skip
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_with_little_memory_a_part_of_the_state_stays_and_no_working_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(
        step_planning, "process_bytes", lambda: 300 << 20
    )  # as it grows, it is no measure here
    wide, sample = {"width": 256, "hidden": 768, "blocks": 8}, batches(0, 1)[0]
    needed = []
    for kept in (0.0, 1.0):
        fractions = {"params_on_host": kept, "optimizer_on_host": kept}
        with offload(decoder(**wide), tmp_path / f"{kept}", sample=sample, **fractions) as engine:
            needed.append(engine.preflight.host_bytes_predicted)
    least, most = needed
    little = holdfast.Budget(host=least + (most - least) // 4)
    auto = {"params_on_host": "auto", "optimizer_on_host": "auto"}
    with offload(decoder(**wide), tmp_path / "little", sample=sample, budget=little, **auto) as engine:
        assert re.match(r"0% of parameters, (25|38|50|62|75)% of optimizer state, ", engine.preflight.plan)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"schedule": "horizontal"}, "schedule = 'horizontal' is not of MeZO"),
        ({"order": "snake"}, "order = 'snake' is not of MeZO"),
        ({"delayed_fraction": 0.5}, "delayed_fraction = 0.5 is not of MeZO"),
        ({"clip_norm": 1.0}, "norm = 1.0 is not of MeZO"),
        ({"clipping": "speculate"}, "mode = 'speculate' is not of MeZO"),
        ({"dtype": "fp16"}, "losses are not scaled"),
    ],
)
def test_what_speaks_of_gradients_is_refused_with_nothing_written(tmp_path, options, said):
    with pytest.raises(BadInput, match=said):
        offload(decoder(2), tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
