"""Embedding and head that are streamed like blocks: the bits of those that stay, in less memory."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import holdfast
from holdfast import token_chunks
from holdfast.chunked_loss import COLLECTOR, PartCollector
from holdfast.errors import BadInput, DoesNotFit, ModelNotSupported
from holdfast.models.decoder import Decoder, DecoderConfig
from holdfast.offload.memory.residency import Residency
from holdfast.offload.model import embedding_gradients
from holdfast.offload.model.blocks import find_blocks, with_embedding_and_head
from holdfast.offload.model.microbatches import RESIDENT
from holdfast.offload.setup import step_planning
from holdfast.quantities import MiB
from support.grouped import grouped
from training import VOCABULARY, adamw, batches, decoder, differing, read_atoms, stored
from zeroth_loops import mezo

transformers = pytest.importorskip("transformers")

KINDS = ("resident", "streamed")
STREAMED = {"embedding_and_head": "streamed"}


@pytest.fixture
def tiles(monkeypatch):
    """A loss in chunks of four tokens and tiles of 8 words; returns what counts the gradients that come in parts."""
    monkeypatch.setattr(token_chunks, "LOGITS_PER_CHUNK", 4 * VOCABULARY)
    monkeypatch.setattr(token_chunks, "WORDS_PER_TILE", 8)
    monkeypatch.setattr(embedding_gradients, "EMBEDDED_AT_ONCE", 5 * VOCABULARY)  # columns of 16
    found, own = [], Residency._collect_parts
    monkeypatch.setattr(Residency, "_collect_parts", lambda *args: found.append(args[3].name) or own(*args))
    return found


def test_nothing_is_left_on_the_device(tmp_path):
    model = decoder(blocks=2)
    with offloaded(model, tmp_path) as engine:
        assert engine.preflight.streamed_parameters == engine.preflight.parameters
        assert not engine._run.resident.members


def offloaded(model, directory, **options):
    return holdfast.offload(
        model, options.pop("optimizer", None) or adamw(model), directory,
        **grouped(**{"dtype": "fp32", **STREAMED, **options}),
    )  # fmt: skip


# Going on


@pytest.mark.slow
def test_a_run_goes_on_with_them_streamed_and_resident_by_turns(tmp_path, tiles):
    """Where nothing is given, they stay as the run has them."""
    expected = losses_of(decoder(blocks=3), tmp_path / "plain", range(6), embedding_and_head="resident")
    found = []
    for start, way in enumerate(["resident", "streamed", None, "resident", None, "streamed"]):
        model = decoder(blocks=3)
        with offloaded(model, tmp_path / "turns", embedding_and_head=way) as engine:
            names = [unit.name for unit in engine._run.units]
            streamed = way == "streamed" or (way is None and start == 2)
            assert (names[0] == "embed", "epilogue" in names) == (streamed, streamed)
            found += [engine.step(batches(start, 2))]
    assert found == expected
    assert differing(read_atoms(tmp_path / "turns"), read_atoms(tmp_path / "plain")) == []
    assert tiles.count("head.weight") == tiles.count("embed.weight") == 6  # two micro-batches of three steps


def losses_of(model, directory, steps, **options):
    with offloaded(model, directory, **options) as engine:
        return [engine.step(batches(step, 2)) for step in steps]


def test_a_run_that_ends_without_a_commit_of_the_new_files_goes_on_from_the_old_ones(tmp_path):
    first = losses_of(decoder(blocks=2), tmp_path / "run", range(2), embedding_and_head="resident")
    with pytest.raises(KeyboardInterrupt), offloaded(decoder(blocks=2), tmp_path / "run", commit_every=0):
        raise KeyboardInterrupt
    found = losses_of(decoder(blocks=2), tmp_path / "run", range(2, 4), embedding_and_head=None)
    expected = losses_of(decoder(blocks=2), tmp_path / "plain", range(4), embedding_and_head="resident")
    assert [*first, *found] == expected


def test_files_of_former_units_go_with_their_last_commit(tmp_path):
    losses_of(decoder(blocks=2), tmp_path, range(2), embedding_and_head="resident")
    losses_of(decoder(blocks=2), tmp_path, range(2, 6))
    names = {path.name.partition(".")[0] for path in (tmp_path / "data").iterdir()}
    assert "epilogue" in names and "resident" not in names, names


# Models


def llama(**options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=VOCABULARY, use_cache=False, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def of_transformers(step):
    return [{"input_ids": batch["tokens"], "labels": batch["tokens"]} for batch in batches(step, 3)]


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("chunked", [True, False])
def test_a_model_of_transformers_has_the_bits_of_those_that_stay(tmp_path, request, chunked, dtype):
    in_parts = request.getfixturevalue("tiles") if chunked else []
    found = {}
    for way in ("resident", "streamed"):
        model = llama()
        with offloaded(model, tmp_path / way, embedding_and_head=way, dtype=dtype, clip_norm=0.5) as engine:
            losses = [engine.step(of_transformers(step)) for step in range(3)]
            losses += [engine.evaluate(of_transformers(7))]
            text = engine.generate(batches(9, 1)[0]["tokens"][:1, :3], 3, temperature=0.0).tolist()
        found[way] = losses, text
    assert found["streamed"] == found["resident"]
    assert differing(stored(tmp_path / "streamed"), stored(tmp_path / "resident")) == []
    assert in_parts.count("lm_head.weight") == in_parts.count("model.embed_tokens.weight") == 9 * chunked


def test_a_trained_part_of_the_epilogue_may_be_beside_a_frozen_one(tmp_path):
    for way in ("resident", "streamed"):
        model = llama()
        model.model.embed_tokens.weight.requires_grad_(False)
        model.model.norm.weight.requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
        with offloaded(model, tmp_path / way, embedding_and_head=way, optimizer=optimizer) as engine:
            for step in range(3):
                engine.step(of_transformers(step))
    assert differing(stored(tmp_path / "streamed"), stored(tmp_path / "resident")) == []


def test_a_loss_function_that_reads_the_weight_of_the_head_finds_it(tmp_path):
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.whole = llama()

        def forward(self, tokens):
            return self.whole.model(tokens).last_hidden_state

    def loss_fn(hidden, targets):
        return holdfast.chunked_cross_entropy(hidden, model.whole.lm_head.weight, targets)

    found = {}
    for way in ("resident", "streamed"):
        model = Hidden()
        with offloaded(model, tmp_path / way, embedding_and_head=way) as engine:
            found[way] = [
                engine.step([(b["tokens"], b["targets"]) for b in batches(step, 2)], loss_fn)
                for step in range(2)
            ]
    assert found["streamed"] == found["resident"]


def test_mezo_has_the_bits_of_those_that_stay(tmp_path):
    found = {}
    for way in ("resident", "streamed"):
        model = decoder(blocks=3)
        with offloaded(model, tmp_path / way, embedding_and_head=way, optimizer=mezo(model)) as engine:
            found[way] = [engine.step(batches(step, 2)) for step in range(3)]
    assert found["streamed"] == found["resident"]
    assert differing(stored(tmp_path / "streamed"), stored(tmp_path / "resident")) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"padding_idx": -3}, {"scale_grad_by_freq": True}], ids=str)
def test_columns_of_an_embedding_have_the_bits_of_its_gradient(tiles, options, dtype):
    torch.manual_seed(0)
    module = nn.Embedding(VOCABULARY, 16, dtype=dtype, **options)
    tokens, parts = torch.randint(0, VOCABULARY, (9, 40)), []
    expected = module(tokens)
    setattr(module.weight, COLLECTOR, PartCollector(parts.extend))
    with embedding_gradients.EmbeddingInParts():
        found = module(tokens)
    assert torch.equal(found, expected)
    by_token = torch.randn_like(found)
    (whole,) = torch.autograd.grad(expected, [module.weight], by_token)
    assert torch.equal(torch.autograd.grad(found, [module.weight], by_token, retain_graph=True)[0], whole)
    found.backward(by_token)
    assert module.weight.grad is None
    assert len(parts) == 4 and torch.equal(torch.cat([grad for _, grad in parts], 1), whole)


# Tied ones


@pytest.mark.campaign(keep=4)
@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 0.5, "clipping": "speculate"}, {"dtype": "bf16"}, {"chunked": True, "dtype": "bf16"}, {},
        {"schedule": "horizontal", "clip_norm": 0.5}, {"clip_norm": 0.5},
        {"delayed_fraction": 1.0, "params_on_host": 1.0, "recomputed_fraction": 0.0}, {"activations_on_host": 0.0},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.slow
def test_a_tied_embedding_has_the_bits_of_one_that_stays(tmp_path, request, options):
    found, options = {}, {**options}
    chunked = options.pop("chunked", False)
    in_parts = request.getfixturevalue("tiles") if chunked else []
    for way in KINDS:
        model = llama(tie_word_embeddings=True)
        with offloaded(model, tmp_path / way, embedding_and_head=way, **options) as engine:
            losses = [engine.step(of_transformers(step)) for step in range(4)]
            losses += [engine.evaluate(of_transformers(7))]
            text = engine.generate(batches(9, 1)[0]["tokens"][:1, :3], 3, temperature=0.0).tolist()
            streamed = [unit.name for unit in engine._run.blocks]
        assert ("model.embed_tokens" in streamed, "epilogue" in streamed) == (way == "streamed",) * 2
        found[way] = losses, text
    assert found["streamed"] == found["resident"]
    assert differing(stored(tmp_path / "streamed"), stored(tmp_path / "resident")) == []
    assert in_parts == ["model.embed_tokens.weight"] * 24 * chunked


# Which they are


@pytest.mark.slow
def test_a_run_goes_on_with_a_tied_embedding_streamed_and_resident_by_turns(tmp_path):
    def trained(way, directory, steps):
        with offloaded(llama(tie_word_embeddings=True), directory, embedding_and_head=way) as engine:
            return [engine.step(of_transformers(step)) for step in steps]

    expected = trained("resident", tmp_path / "plain", range(6))
    ways = ["resident", "streamed", None, "resident", "streamed", "streamed"]
    found = [loss for step, way in enumerate(ways) for loss in trained(way, tmp_path / "turns", [step])]
    assert found == expected
    assert differing(read_atoms(tmp_path / "turns"), read_atoms(tmp_path / "plain")) == []


def test_an_evaluation_that_fails_in_a_tied_head_leaves_nothing_behind(tmp_path):
    model, failing = llama(tie_word_embeddings=True), []

    def fail(*_):
        if failing:
            raise ZeroDivisionError

    model.lm_head.register_forward_hook(fail)
    with offloaded(model, tmp_path / "run") as engine:
        expected = [engine.evaluate(of_transformers(0))]
        failing.append(True)
        with pytest.raises(ZeroDivisionError):
            engine.evaluate(of_transformers(0))
        failing.clear()
        assert not engine._run.residency.loaded and not engine._run.residency.on_device
        assert engine.evaluate(of_transformers(0)) == expected[0]
        engine.step(of_transformers(0))


@pytest.mark.slow
def test_a_tied_embedding_that_is_frozen_is_used_at_both_ends(tmp_path):
    for way in KINDS:
        model = llama(tie_word_embeddings=True)
        model.lm_head.weight.requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
        with offloaded(
            model, tmp_path / way, embedding_and_head=way, optimizer=optimizer, dtype="bf16"
        ) as engine:
            for step in range(3):
                engine.step(of_transformers(step))
    assert differing(stored(tmp_path / "streamed"), stored(tmp_path / "resident")) == []


def test_a_tied_weight_stays_where_the_optimizer_displaces_it(tmp_path):
    model = llama(tie_word_embeddings=True)
    with pytest.raises(ModelNotSupported, match="share a parameter"):
        offloaded(model, tmp_path / "run", optimizer=mezo(model))
    assert not (tmp_path / "run").exists()


def test_a_tied_weight_belongs_to_the_embedding_or_stays():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(9, 8)
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.wide = nn.Linear(8, 64)
            self.head = nn.Linear(8, 9, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    blocks = with_embedding_and_head(model, find_blocks(model), tied=False)
    assert (blocks.embeddings, blocks.unit_names) == (0, ("blocks.0", "blocks.1", "epilogue"))
    for optimizer, held in ((mezo(model), "rest"), (adamw(model), "embed")):
        parts = import_module("holdfast.offload.model.model_parts").ModelParts.of(
            model, optimizer, "fp32", None, streams_all=True
        )
        holders = {m.name: unit.name for unit in parts.all_units for m in unit.members}
        assert holders["embed.weight"] == held
        assert [m.name for m in parts.units[-1].members] == ["wide.weight", "wide.bias"]


def test_a_weight_that_a_third_module_shares_stays():
    model = llama(tie_word_embeddings=True)
    model.model.layers[0].again = nn.Linear(16, VOCABULARY, bias=False)
    model.model.layers[0].again.weight = model.lm_head.weight
    with pytest.raises(ModelNotSupported, match="share a parameter"):
        with_embedding_and_head(model, find_blocks(model))


def test_small_ones_stay():
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(2, 8)
            self.position = nn.Embedding(200, 8)
            self.blocks = nn.ModuleList(nn.Linear(8, 64) for _ in range(2))
            self.head = nn.Linear(8, 2)

    model = Small()
    assert with_embedding_and_head(model, find_blocks(model)).unit_names == (
        "position",
        "blocks.0",
        "blocks.1",
    )


# What is chosen


@pytest.mark.slow
def test_a_budget_that_could_not_be_kept_to_otherwise_streams_them(tmp_path, monkeypatch):
    monkeypatch.setattr(step_planning, "process_bytes", lambda: 100 * MiB)  # it grows from engine to engine

    def streams(budget, way=None):
        directory = tmp_path / f"{way} {budget}"
        with offloaded(
            wide_vocabulary(), directory, embedding_and_head=way, budget=holdfast.Budget(host=budget),
            params_on_host=0.0, optimizer_on_host=0.0, **SAMPLE,
        ) as engine:  # fmt: skip
            assert engine.preflight.host_bytes_predicted <= budget
            return engine._run.epilogue is not None

    budget = 272 * MiB
    while not streams(budget):
        budget -= 8 * MiB
    assert budget < 272 * MiB
    with pytest.raises(DoesNotFit):
        streams(budget, "resident")
    model = llama(tie_word_embeddings=True)
    with pytest.raises(DoesNotFit):
        offloaded(
            model, tmp_path / "tied", embedding_and_head=None, budget=holdfast.Budget(host="1MiB"),
            sample=of_transformers(0)[0],
        )  # fmt: skip


def wide_vocabulary():
    torch.manual_seed(0)
    return Decoder(
        DecoderConfig(vocabulary=20_000, blocks=2, width=64, heads=2, kv_heads=1, hidden=6000, context=8)
    )


SAMPLE = {"sample": batches(0, 1)[0], "micro_batches": 2}


def test_what_is_no_way_is_refused(tmp_path):
    with pytest.raises(BadInput, match="embedding_and_head = 'both' must be"):
        offloaded(decoder(), tmp_path / "run", embedding_and_head="both")
    for options in ({"clipping": "per_block", "clip_norm": 1.0}, {"order": "snake"}):
        with pytest.raises(BadInput, match="would change the numbers"):
            offloaded(decoder(), tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


class Awkward(nn.Module):
    """``way`` is where a parameter is used besides the usual place."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.late, self.head = nn.Linear(16, 16), nn.Linear(16, VOCABULARY)

    def forward(self, tokens, targets):
        penalty = self.embed.weight.pow(2).sum() if self.way == "penalty" else 0.0
        if self.way == "masked at random":
            tokens = torch.where(torch.rand(tokens.shape) < 0.3, 0, tokens)
        x = self.embed(tokens)
        if self.way == "described":
            width = torch.ones(x.shape[-1], device=self.head.weight.device, dtype=self.embed.weight.dtype)
            x = x * width + torch.finfo(self.head.weight.dtype).eps
        if self.way == "embedding twice":
            x = x + self.embed(targets)
        if self.way == "before":
            x = self.late(x)
        first = x
        for block in self.blocks:
            x = torch.tanh(block(x))
            if self.way == "between":
                x = self.late(x)
        if self.way == "skipping":
            x = x + first
        if self.way == "embedding after":
            x = x + self.embed.weight.mean()
        if self.way == "embedding by its weight":
            x = x + x @ self.embed.weight.detach().T @ self.embed.weight.detach()
        logits = self.head(x)
        if self.way == "head twice":
            logits = logits + self.head(first)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) + penalty


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("way", ["head twice", "described"])
def test_what_passes_the_blocks_by_arrives(tmp_path, way, dtype):
    found = {
        kind: losses_of(Awkward(way), tmp_path / kind, range(3), embedding_and_head=kind, dtype=dtype)
        for kind in KINDS
    }
    assert found["streamed"] == found["resident"]
    assert differing(stored(tmp_path / "streamed"), stored(tmp_path / "resident")) == []


@pytest.mark.parametrize(
    "way",
    [
        "embedding twice", "before", "between", "embedding after", "embedding by its weight", "penalty",
        "masked at random",
    ],
)  # fmt: skip
def test_a_model_that_uses_them_elsewhere_is_refused_in_its_first_step(tmp_path, way):
    with pytest.raises(ModelNotSupported, match="embedding_and_head"):
        losses_of(Awkward(way), tmp_path / "run", range(1))
    if way != "masked at random":  # an evaluation may draw
        engine = offloaded(Awkward(way), tmp_path / "evaluated")
        with pytest.raises(ModelNotSupported, match="embedding_and_head"), engine:
            engine.evaluate(batches(0, 2))
    found = losses_of(Awkward(way), tmp_path / "run", range(1), embedding_and_head="resident")
    assert found == losses_of(Awkward(way), tmp_path / "plain", range(1), embedding_and_head="resident")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("names", [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]], ids=str)
def test_trained_copies_of_peft_have_the_bits_of_those_that_stay(tmp_path, names):
    """``modules_to_save``: the frozen original of an embedding is not called, and stays."""
    peft = pytest.importorskip("peft")
    found = {}
    for way in KINDS:
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=names, task_type="CAUSAL_LM")
        torch.manual_seed(0)
        model = peft.get_peft_model(llama(), config)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
        with offloaded(model, tmp_path / way, optimizer=optimizer, embedding_and_head=way) as engine:
            found[way] = [engine.step(of_transformers(step)) for step in range(3)]
            units = [unit.name.rpartition("model.")[2] for unit in engine._run.units]
    assert found["streamed"] == found["resident"]
    assert differing(stored(tmp_path / "streamed"), stored(tmp_path / "resident")) == []
    copied = ".modules_to_save.default" if "embed_tokens" in names else ""
    assert (units[0], units[-2]) == (f"embed_tokens{copied}", "epilogue")


def test_embedded_tokens_are_refused_before_the_step(tmp_path):
    given = [{"inputs_embeds": torch.randn(2, 8, 16), "labels": batches(0, 1)[0]["targets"]}]
    expected = [losses_of_llama(tmp_path / "plain", [of_transformers(0)])]
    model = llama()
    with offloaded(model, tmp_path / "run") as engine:
        for call in (engine.step, engine.evaluate):
            with pytest.raises(
                BadInput, match=r"inputs_embeds.* model\.embed_tokens.* input_ids, or embedding_and"
            ):
                call(given)
        assert [[engine.step(of_transformers(0))]] == expected
    losses_of_llama(tmp_path / "resident", [given], embedding_and_head="resident")


def losses_of_llama(directory, steps, **options):
    with offloaded(llama(), directory, **options) as engine:
        return [engine.step(given) for given in steps]


class Called(Awkward):
    """``way`` is how the embedding is called."""

    def forward(self, tokens, targets):
        if self.way == "not at all":
            x = torch.ones(*tokens.shape, 16)
        elif self.way == "without gradients":
            with torch.no_grad():
                x = self.embed(tokens)
        elif self.way == "in a reentrant checkpoint":
            scale = torch.ones(16, requires_grad=True)
            x = checkpoint(
                lambda tokens, scale: self.embed(tokens) * scale, tokens, scale, use_reentrant=True
            )
        else:
            scale = torch.ones(16, requires_grad=True)
            x = checkpoint(lambda tokens: self.embed(tokens) * scale, tokens, use_reentrant=False)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    "way, said",
    [
        ("not at all", r"called block 1 before it called embed, a streamed embedding"),
        ("without gradients", r"called block 0 \(embed\) under torch\.no_grad\(\)"),
        ("in a reentrant checkpoint", r"called block 0 \(embed\) under .* use_reentrant=False"),
        ("in a checkpoint", r"embed was called apart from .* torch\.utils\.checkpoint"),
    ],
)
def test_another_call_of_an_embedding_is_refused_by_name(tmp_path, way, said):
    with pytest.raises(ModelNotSupported, match=f"{said}.*{RESIDENT}"):
        losses_of(Called(way), tmp_path / "run", range(1))
    losses_of(Called(way), tmp_path / "run", range(2), embedding_and_head="resident")
