"""Hugging Face models, unmodified, with random weights, train out of core with the bits of a plain loop."""

from __future__ import annotations

import math

import pytest
import torch

import holdfast
from holdfast.errors import ModelNotSupported
from support.grouped import grouped
from training import differing, state_of, stored

transformers = pytest.importorskip("transformers")

STEPS, COUNT, ROWS, TOKENS, VOCABULARY = 3, 3, 2, 10, 50
SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "use_cache": False,
    "tie_word_embeddings": False,
}  # fmt: skip


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attention_dropout=0.1))


def qwen2():
    sliding = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, **sliding))


def qwen3():
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=8))


def gpt2(tied=True):
    """With its usual dropout of 0.1."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=16, n_layer=3, n_head=2, vocab_size=VOCABULARY, n_positions=32, use_cache=False,
            tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def gpt2_untied():
    return gpt2(tied=False)


def mistral():
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=4))


def gpt_neox():
    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    dropout = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes, **dropout))


EXPERTS = {"num_experts_per_tok": 2}


def mixtral(**options):
    config = transformers.MixtralConfig(**SIZES, **EXPERTS, num_local_experts=4, **options)
    return transformers.MixtralForCausalLM(config)


def qwen2_moe():
    """With an expert that all tokens share."""
    sizes = {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    return transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**SIZES, **EXPERTS, **sizes))


def gemma3():
    """Whose layers take one of two tables and one of two masks, by turns."""
    config = transformers.Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=4, layer_types=TURNS)
    return transformers.Gemma3ForCausalLM(config)


TURNS = ["sliding_attention", "full_attention", "sliding_attention"]


def t5():
    """An encoder and a decoder that share an embedding. Position biases are made in the first block of each, and have
    a gradient in every block: torch's fused attention computes such a bias otherwise where no graph is made, as in a
    block's first run, so attention is the model's own."""
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=16, d_kv=8, d_ff=24, num_layers=3, num_decoder_layers=2, num_heads=2, vocab_size=VOCABULARY,
            dropout_rate=0.0, decoder_start_token_id=0, tie_word_embeddings=False, use_cache=False,
            attn_implementation="eager",
        )
    )  # fmt: skip


def build(make):
    torch.manual_seed(0)
    return make().train()


def micro_batches(step):
    """Of different lengths, the first row of each with padding."""
    found = []
    for m in range(COUNT):
        generator = torch.Generator().manual_seed(100 * step + m)
        tokens = torch.randint(0, VOCABULARY, (ROWS, TOKENS - m), generator=generator)
        mask = torch.ones_like(tokens)
        mask[0, :2] = 0
        labels = tokens.masked_fill(mask == 0, -100)
        found.append({"input_ids": tokens, "labels": labels, "attention_mask": mask})
    return found


def adamw(parameters, **options):
    return torch.optim.AdamW(parameters, lr=1e-2, **options)


def plain_loop(model, clip_norm=0.5, steps=STEPS, sum_gradients=None):
    """Losses and state. ``sum_gradients`` replaces the accumulation of ``.grad`` over micro-batches: it gets
    the gradients of each, by name."""
    optimizer, losses = adamw(model.parameters(), fused=True), []
    with holdfast.keyed_rng(model) as keys:
        for step in range(steps):
            total, apart = 0.0, []
            for m, batch in enumerate(micro_batches(step)):
                keys.at(step, m)
                loss = model(**batch).loss
                (loss / COUNT).backward()
                total += loss.item()
                if sum_gradients is not None:
                    apart.append({name: p.grad for name, p in model.named_parameters()})
                    model.zero_grad()
            if sum_gradients is not None:
                sum_gradients(model, apart)
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total / COUNT)
    return losses, state_of(model, optimizer)


def offloaded(directory, model, clip_norm=0.5, steps=STEPS, **options):
    with holdfast.offload(
        model, adamw(model.parameters()), directory, **grouped(dtype="fp32", clip_norm=clip_norm, **options)
    ) as engine:
        losses = [engine.step(micro_batches(step)) for step in range(steps)]
    return losses, stored(directory)


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize(
    "way", [{"schedule": "vertical"}, {"schedule": "horizontal"}, {"recomputed_fraction": 0.0}], ids=str
)
@pytest.mark.parametrize(
    "make", [llama, qwen2, qwen3, gpt2_untied, mistral, gpt_neox, mixtral, qwen2_moe, gemma3]
)
def test_every_bit_equals_a_plain_loop(tmp_path, make, way):
    losses, expected = plain_loop(build(make))
    found_losses, found = offloaded(tmp_path, build(make), activations_on_host=0.5, **way)
    assert found_losses == losses
    assert differing(found, expected) == []


@pytest.mark.parametrize("clip_norm", [0.5, None])
def test_a_micro_batch_without_targets_adds_nothing(tmp_path, monkeypatch, clip_norm):
    """Its loss is NaN, as in memory, and its gradient zero."""

    def some_without(step, complete=micro_batches):
        batches = complete(step)
        batches[step] |= {"labels": torch.full_like(batches[step]["labels"], -100)}
        return batches

    monkeypatch.setitem(globals(), "micro_batches", some_without)
    losses, expected = plain_loop(build(llama), clip_norm)
    found_losses, found = offloaded(tmp_path, build(llama), clip_norm)
    assert all(map(math.isnan, losses + found_losses))
    assert differing(found, expected) == []


@pytest.mark.parametrize("make, recomputed", [(llama, 1.0), (llama, 0.0), (gpt_neox, 1.0), (mixtral, 1.0)])
def test_steps_under_autocast_equal_a_loop_whose_forward_alone_is_under_it(tmp_path, make, recomputed):
    """As torch has it: a backward pass under autocast has other bits, here that of attention with dropout."""
    plain = build(make)
    forward = plain.forward

    def under_autocast(**batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return forward(**batch)

    plain.forward = under_autocast
    losses, expected = plain_loop(plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found_losses, found = offloaded(tmp_path, build(make), recomputed_fraction=recomputed)
    assert found_losses == losses
    assert differing(found, expected) == []


# The matrix that encoder and decoder of T5 share has two gradients in every micro-batch, too.

SHARED = "shared.weight"


def both(model):
    return [*model.encoder.block, *model.decoder.block]


@pytest.mark.campaign(cover=True)
@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
@pytest.mark.parametrize("blocks", [both, lambda model: model.encoder.block])
def test_an_encoder_and_a_decoder_equal_a_plain_loop(tmp_path, monkeypatch, schedule, blocks):
    monkeypatch.setattr(f"{__name__}.COUNT", 1)
    losses, expected = plain_loop(build(t5))
    model = build(t5)
    found_losses, found = offloaded(tmp_path, model, blocks=blocks(model), schedule=schedule)
    assert found_losses == losses
    assert differing(found, expected) == []


def test_of_an_encoder_and_a_decoder_only_the_shared_matrix_differs_with_several_micro_batches(tmp_path):
    losses, expected = plain_loop(build(t5), clip_norm=None, steps=1)
    model = build(t5)
    found_losses, found = offloaded(tmp_path, model, clip_norm=None, steps=1, blocks=both(model))
    assert found_losses == losses
    assert set(differing(found, expected)) <= {f"{SHARED}/{s}" for s in ("param", "exp_avg", "exp_avg_sq")}


def test_of_an_encoder_beside_a_streamed_decoder_only_the_shared_matrix_differs(tmp_path, monkeypatch):
    """Where nobody names blocks, the larger list is streamed, and its inputs' gradients come with the encoder's."""
    monkeypatch.setattr(f"{__name__}.COUNT", 1)
    losses, expected = plain_loop(build(t5), clip_norm=None, steps=1)
    with pytest.warns(UserWarning, match=r"blocks are decoder\.block\.0 .* to stream both, pass blocks="):
        found_losses, found = offloaded(tmp_path, build(t5), clip_norm=None, steps=1)
    assert found_losses == losses
    assert set(differing(found, expected)) <= {f"{SHARED}/{s}" for s in ("param", "exp_avg", "exp_avg_sq")}


ROUTERS = {"output_router_logits": True, "router_aux_loss_coef": 0.1}


@pytest.mark.slow
def test_experts_are_balanced_as_in_a_plain_loop(tmp_path):
    """The setting of the configuration changes the numbers of both alike."""
    losses, expected = plain_loop(build(lambda: mixtral(**ROUTERS)), steps=2)
    assert losses != plain_loop(build(mixtral), steps=2)[0]
    for way in ({"schedule": "vertical"}, {"schedule": "horizontal"}, {"recomputed_fraction": 0.0}):
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        found_losses, found = offloaded(directory, build(lambda: mixtral(**ROUTERS)), steps=2, **way)
        assert found_losses == losses
        assert differing(found, expected) == []


def test_experts_are_balanced_where_the_micro_batch_asks_for_it(tmp_path, monkeypatch):
    own = micro_batches
    monkeypatch.setattr(
        f"{__name__}.micro_batches",
        lambda step: [batch | {"output_router_logits": True} for batch in own(step)],
    )
    losses, expected = plain_loop(build(mixtral), steps=2)
    found_losses, found = offloaded(tmp_path, build(mixtral), steps=2)
    assert found_losses == losses
    assert differing(found, expected) == []


def test_evaluations_and_predictions_have_the_balancing_loss(tmp_path):
    model, plain = build(lambda: mixtral(**ROUTERS)), build(lambda: mixtral(**ROUTERS)).eval()
    with torch.no_grad():
        expected = [plain(**batch).loss.item() for batch in micro_batches(7)]
    with holdfast.offload(
        model, adamw(model.parameters()), tmp_path, precision="fp32", sample=micro_batches(0)[0],
        micro_batches=COUNT, budget=holdfast.Budget(host="8GiB"),
    ) as engine:  # fmt: skip
        assert engine.preflight.host_bytes_predicted
        assert engine.evaluate(micro_batches(7)) == sum(expected) / COUNT


@pytest.mark.parametrize("setting", ["output_hidden_states", "output_attentions"])
def test_values_of_every_block_are_refused_by_name(tmp_path, setting):
    model = build(llama)
    model.set_attn_implementation("eager")
    setattr(model.config, setting, True)
    with pytest.raises(ModelNotSupported, match=rf"{setting} keeps values of every block .* = False"):
        offloaded(tmp_path, model)
    assert not any(path.is_file() and path.name != "lock" for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("why", ["is compiled", "records in another way"])
def test_routers_that_nobody_would_hear_are_refused_by_name(tmp_path, monkeypatch, why):
    model = build(lambda: mixtral(**ROUTERS))
    if why == "is compiled":
        model.model.layers[1].compile(backend="eager")
    else:
        monkeypatch.delattr("transformers.utils.output_capturing._active_collector")
    with pytest.raises(ModelNotSupported, match=rf"output_router_logits .* {why}.* = False"):
        offloaded(tmp_path, model)
    assert not any(path.is_file() and path.name != "lock" for path in tmp_path.rglob("*"))


def test_layers_that_are_skipped_at_random_are_refused_by_name(tmp_path):
    sizes = {
        "hidden_size": 16,
        "ffn_dim": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "vocab_size": 50,
    }
    config = transformers.OPTConfig(**sizes, word_embed_proj_dim=16, layerdrop=0.1, use_cache=False)
    with pytest.raises(ModelNotSupported, match=r"layerdrop = 0\.1 skips layers at random"):
        offloaded(tmp_path, build(lambda: transformers.OPTForCausalLM(config)))
    assert not any(path.is_file() and path.name != "lock" for path in tmp_path.rglob("*"))


# The tied matrix of GPT-2 has two gradients in every micro-batch: from the head and from the embedding. A
# plain loop adds the two and then adds up micro-batches; out of core, each is added to the sum when it comes.

TIED, HEAD = "transformer.wte.weight", "lm_head.weight"


def in_the_order_they_come(schedule):
    """All heads' gradients come before the embeddings', or one after the other."""

    def order(apart):
        heads, embeddings = [g[HEAD] for g in apart], [g[TIED] for g in apart]
        if schedule == "vertical":
            return heads + embeddings
        return [gradient for pair in zip(heads, embeddings, strict=True) for gradient in pair]

    return order


def plain_loop_with_the_matrix_twice(order, **options):
    """GPT-2 with its matrix held twice, whose two gradients are added up in ``order``."""
    model = build(gpt2_untied)
    model.lm_head.weight.data = model.transformer.wte.weight.data

    def sum_gradients(model, apart):
        for name, p in model.named_parameters():
            terms = order(apart) if name == TIED else [g[name] for g in apart]
            p.grad = terms[0].clone()
            for term in terms[1:]:
                p.grad += term
        model.lm_head.weight.grad = None

    return plain_loop(model, sum_gradients=sum_gradients, **options)


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_tied_embeddings_equal_a_plain_loop_that_adds_in_the_same_order(tmp_path, schedule):
    """Nothing but the order of that one sum differs: with it, all bits of all steps are the same."""
    losses, expected = plain_loop_with_the_matrix_twice(in_the_order_they_come(schedule))
    del expected[f"{HEAD}/param"]
    found_losses, found = offloaded(tmp_path, build(gpt2), schedule=schedule)
    assert found_losses == losses
    assert differing(found, expected) == []
    assert HEAD not in {key.split("/")[0] for key in found}


def test_after_one_step_only_the_tied_matrix_differs_and_by_roundings(tmp_path):
    """A sum of 2 M terms in another order: each addition rounds once, by half an eps of what it adds to."""
    losses, expected = plain_loop(build(gpt2), clip_norm=None, steps=1)
    found_losses, found = offloaded(tmp_path, build(gpt2), clip_norm=None, steps=1)
    assert found_losses == losses
    differ = set(differing(found, expected))
    assert differ <= {f"{TIED}/{slot}" for slot in ("param", "exp_avg", "exp_avg_sq")}
    terms = []
    plain_loop_with_the_matrix_twice(
        lambda apart: terms.append([g[name] for g in apart for name in (HEAD, TIED)]) or terms[0],
        clip_norm=None, steps=1,
    )  # fmt: skip
    size = sum(term.abs() for term in terms[0])
    bound = 2 * (2 * COUNT - 1) * torch.finfo(torch.float32).eps / 2 * size
    difference = (found[f"{TIED}/exp_avg"] - expected[f"{TIED}/exp_avg"]).abs() / 0.1  # of the gradients
    assert (difference <= bound * 1.01).all()


@pytest.mark.slow
def test_a_tied_matrix_stays_close_over_many_steps(tmp_path):
    losses, expected = plain_loop(build(gpt2))
    found_losses, found = offloaded(tmp_path, build(gpt2))
    assert found_losses == pytest.approx(losses, rel=1e-5)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_a_key_value_cache_is_switched_off_with_a_warning(tmp_path):
    model = build(gpt2)
    model.config.use_cache = True
    with pytest.warns(UserWarning, match=r"model\.config\.use_cache was switched off"):
        engine = holdfast.offload(model, adamw(model.parameters()), tmp_path, precision="fp32")
    with engine:
        engine.step(micro_batches(0))
        assert model.config.use_cache is False
    assert model.config.use_cache is True


def paligemma():
    """Its text model has a configuration of its own, which says that it keeps a cache."""
    text = {
        "model_type": "gemma", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": VOCABULARY,
    }  # fmt: skip
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
        "num_attention_heads": 2, "image_size": 8, "patch_size": 4,
    }  # fmt: skip
    return transformers.PaliGemmaForConditionalGeneration(
        transformers.PaliGemmaConfig(
            text_config=text,
            vision_config=vision,
            projection_dim=16,
            image_token_index=4,
            tie_word_embeddings=False,
        )
    )


def test_caches_of_inner_configurations_are_switched_off(tmp_path):
    """And on again."""
    tokens = torch.randint(5, VOCABULARY, (2, 10), generator=torch.Generator().manual_seed(0))
    tokens[:, :4] = 4
    batch = {"input_ids": tokens, "labels": tokens, "pixel_values": torch.randn(2, 3, 8, 8),
             "token_type_ids": torch.ones_like(tokens), "attention_mask": torch.ones_like(tokens)}  # fmt: skip
    expected = build(paligemma)(**batch).loss.item()
    model = build(paligemma)
    text = model.config.text_config
    text.use_cache = True
    layers = [*model.model.language_model.layers]
    with pytest.warns(UserWarning, match=r"text_config\.use_cache .* switched off"):
        engine = holdfast.offload(model, adamw(model.parameters()), tmp_path, precision="fp32", blocks=layers)
    with engine:
        assert not text.use_cache
        assert engine.step([batch]) == expected
    assert text.use_cache


@pytest.mark.parametrize("make", [llama, gpt2])
def test_evaluation_and_generation_equal_the_models_own(tmp_path, make):
    model, plain = build(make), build(make).eval()
    with holdfast.offload(model, adamw(model.parameters()), tmp_path, precision="fp32") as engine:
        engine.step(micro_batches(0))
        plain.load_state_dict(engine.state_dict())
        with torch.no_grad():
            expected = [plain(**batch).loss.item() for batch in micro_batches(7)]
        assert engine.evaluate(micro_batches(7)) == sum(expected) / COUNT
        assert model.training
        prompt = torch.tensor([[3, 1, 4]])
        likeliest = engine.generate(prompt, 5, temperature=0)
        own = plain.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False, pad_token_id=0,
            eos_token_id=None,
        )  # fmt: skip
        assert torch.equal(likeliest, own)
        drawn = engine.generate(prompt, 5, temperature=0.8, top_k=10, seed=1)
        assert torch.equal(drawn, engine.generate(prompt, 5, temperature=0.8, top_k=10, seed=1))
        assert engine.step(micro_batches(1)) > 0
