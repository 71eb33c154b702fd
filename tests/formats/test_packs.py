"""The packs of rules, against models of transformers as it saves them, and Megatron's parts of them made by hand."""

from __future__ import annotations

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file

from holdfast.errors import BadInput, RuleError
from holdfast.formats import packs
from ruled import NAN, Ranks

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 37,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
MODELS = {
    "llama": transformers.LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True),
    "qwen2": transformers.Qwen2Config(**GROUPED),
    "qwen3": transformers.Qwen3Config(**GROUPED, head_dim=8),
    "mixtral": transformers.MixtralConfig(**GROUPED, num_local_experts=4),
    "gpt2": transformers.GPT2Config(n_embd=16, n_layer=4, n_head=4, vocab_size=37, n_positions=8),
    "gpt-neox": transformers.GPTNeoXConfig(**SIZES),
}
PACK = {"qwen2": "llama", "qwen3": "llama"}
KV = {"gpt2": 4, "gpt-neox": 4}


@pytest.fixture(scope="module", params=MODELS)
def saved(request, tmp_path_factory):
    """A model's name, the values of its configuration, and its tensors by the names in its file, all different."""
    config = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    chance = np.random.default_rng(1)
    tensors = {name: chance.random(tensor.shape) for name, tensor in sorted(tensors.items())}
    values = {name: n for name, n in config.to_dict().items() if type(n) is int}
    return request.param, values, tensors


def interleaved(q, k, v, kv_heads):
    """Of each key-value head its queries, its key, its value."""
    rest = q.shape[1:]
    groups = [block.reshape(kv_heads, len(block) // kv_heads, *rest) for block in (q, k, v)]
    return np.concatenate(groups, axis=1).reshape(-1, *rest)


def of_llama(tensors, kv_heads):
    """The same by Megatron's names: the oracle of the packs."""
    made, found = {}, dict(tensors)
    whole = {"model.embed_tokens.weight": "embedding.word_embeddings.weight", "lm_head.weight": "output_layer.weight",
             "model.norm.weight": "decoder.final_layernorm.weight"}  # fmt: skip
    for name, other in whole.items():
        made[other] = found.pop(name)
    for n in range(4):
        here, there = f"model.layers.{n}.", f"decoder.layers.{n}."
        moe = f"{here}block_sparse_moe.gate.weight" in found
        made[f"{there}self_attention.linear_qkv.layer_norm_weight"] = found.pop(
            f"{here}input_layernorm.weight"
        )
        second = "pre_mlp_layernorm.weight" if moe else "mlp.linear_fc1.layer_norm_weight"
        made[there + second] = found.pop(f"{here}post_attention_layernorm.weight")
        for kind in ("weight", "bias"):
            if f"{here}self_attn.q_proj.{kind}" in found:
                qkv = [found.pop(f"{here}self_attn.{head}_proj.{kind}") for head in "qkv"]
                made[f"{there}self_attention.linear_qkv.{kind}"] = interleaved(*qkv, kv_heads)
            if f"{here}self_attn.o_proj.{kind}" in found:
                made[f"{there}self_attention.linear_proj.{kind}"] = found.pop(
                    f"{here}self_attn.o_proj.{kind}"
                )
            if f"{here}mlp.gate_proj.{kind}" in found:
                halves = [found.pop(f"{here}mlp.{half}_proj.{kind}") for half in ("gate", "up")]
                made[f"{there}mlp.linear_fc1.{kind}"] = np.concatenate(halves)
                made[f"{there}mlp.linear_fc2.{kind}"] = found.pop(f"{here}mlp.down_proj.{kind}")
        for head in "qk":
            if f"{here}self_attn.{head}_norm.weight" in found:
                norm = found.pop(f"{here}self_attn.{head}_norm.weight")
                made[f"{there}self_attention.{head}_layernorm.weight"] = norm
        if moe:
            made[f"{there}mlp.router.weight"] = found.pop(f"{here}block_sparse_moe.gate.weight")
            for e in range(4):
                w1, w2, w3 = (found.pop(f"{here}block_sparse_moe.experts.{e}.w{i}.weight") for i in (1, 2, 3))
                made[f"{there}mlp.experts.local_experts.{e}.linear_fc1.weight"] = np.concatenate([w1, w3])
                made[f"{there}mlp.experts.local_experts.{e}.linear_fc2.weight"] = w2
    assert not found
    return made


def of_gpt(tensors, kv_heads):
    """GPT-2, whose weights are the other way round and in blocks, and GPT-NeoX."""
    made, found = {}, dict(tensors)
    gpt2 = "transformer.wte.weight" in found
    start, end = (
        ("transformer.h.", "transformer.ln_f") if gpt2 else ("gpt_neox.layers.", "gpt_neox.final_layer_norm")
    )
    parts = {"ln_1": "self_attention.linear_qkv.layer_norm_", "ln_2": "mlp.linear_fc1.layer_norm_",
             "attn.c_attn": "self_attention.linear_qkv.", "attn.c_proj": "self_attention.linear_proj.",
             "mlp.c_fc": "mlp.linear_fc1.", "mlp.c_proj": "mlp.linear_fc2."}  # fmt: skip
    names = ("input_layernorm", "post_attention_layernorm", "attention.query_key_value", "attention.dense",
             "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")  # fmt: skip
    embed, position = ("transformer.wte", "transformer.wpe") if gpt2 else ("gpt_neox.embed_in", "")
    made["embedding.word_embeddings.weight"] = found.pop(f"{embed}.weight")
    if gpt2:
        made["embedding.position_embeddings.weight"] = found.pop(f"{position}.weight")
    else:
        made["output_layer.weight"] = found.pop("embed_out.weight")
    for kind in ("weight", "bias"):
        made[f"decoder.final_layernorm.{kind}"] = found.pop(f"{end}.{kind}")
        for n in range(4):
            for name, (part, other) in zip(names, parts.items()):
                tensor = found.pop(f"{start}{n}.{part if gpt2 else name}.{kind}")
                tensor = tensor.T if gpt2 else tensor
                if gpt2 and part == "attn.c_attn":
                    tensor = interleaved(*np.split(tensor, 3), kv_heads)
                made[f"decoder.layers.{n}.{other}{kind}"] = tensor
    assert not found
    return made


def megatron_of(name, tensors, values):
    kv_heads = KV.get(name) or values["num_key_value_heads"]
    return (of_gpt if name in KV else of_llama)(tensors, kv_heads)


def divided(name, tensor, tp, gated):
    """The parts of Megatron's tensor parallel ranks; the vocabulary is padded."""
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        tensor = np.concatenate([tensor, np.full((-len(tensor) % (2 * tp), tensor.shape[1]), NAN)])
        return np.split(tensor, tp)
    if "layer_norm" in name or "layernorm" in name or "router" in name or "position" in name:
        return [tensor] * tp
    if "linear_fc1" in name and gated:
        return [np.concatenate(pair) for pair in zip(*(np.split(half, tp) for half in np.split(tensor, 2)))]
    if "linear_qkv" in name or "linear_fc1" in name:
        return np.split(tensor, tp)
    return np.split(tensor, tp, axis=1) if name.endswith("weight") else [tensor] * tp


def spread(tensors, *, tp, pp, virtual, ep, gated, dp=1):
    """What the ranks store: layers by stages and their virtual ones, experts with numbers of their own."""
    ranks, each = Ranks(), 4 // (pp * virtual)
    for name, tensor in tensors.items():
        stage, chunk, local = (
            (pp - 1, virtual - 1, name) if "final" in name or "output" in name else (0, 0, name)
        )
        if name.startswith("decoder.layers."):
            _, _, number, rest = name.split(".", 3)
            block, first = divmod(int(number), each)
            chunk, stage = divmod(block, pp)
            local = f"decoder.layers.{first}.{rest}"
        experts = range(ep)
        if "local_experts" in name:
            before, number = local.split("local_experts.")
            number, rest = number.split(".", 1)
            owner, mine = divmod(int(number), 4 // ep)
            experts, local = [owner], f"{before}local_experts.{mine}.{rest}"
        model = f"model{chunk}." if virtual > 1 else "model."
        for t, part in enumerate(divided(name, tensor, tp, gated)):
            for e in experts:
                for d in range(dp):
                    at = {"tp": (t, tp), "pp": (stage, pp), "ep": (e, ep), "dp": (d, dp)}
                    ranks.store(model + local, part, **at)
    return ranks


def same(found, wanted):
    assert sorted(found) == sorted(f"{name}/param" for name in wanted)
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(found[f"{name}/param"], tensor)


def made_by(pack, ranks, values):
    return ranks.tensors_by(packs.load(pack, values))


@pytest.mark.parametrize(
    "tp, pp, virtual, ep, dp", [(1, 1, 1, 1, 1), (2, 2, 1, 2, 2), (1, 2, 2, 4, 1), (2, 4, 1, 1, 1)]
)
def test_parts_of_megatron_become_the_tensors_of_transformers(saved, tp, pp, virtual, ep, dp):
    name, values, tensors = saved
    ep = ep if name == "mixtral" else 1
    ranks = spread(
        megatron_of(name, tensors, values), tp=tp, pp=pp, virtual=virtual, ep=ep, dp=dp, gated=name not in KV
    )
    ranks.store("model.decoder.layers.0.mlp._extra_state", np.zeros(3))
    found = made_by(f"megatron-to-{PACK.get(name, name)}", ranks, values | {"virtual_stages": virtual})
    same(found, tensors)


def test_parts_of_megatron_become_whole_tensors_of_megatron(saved):
    name, values, tensors = saved
    gated = name not in KV
    whole = megatron_of(name, tensors, values)
    values = values | {"num_hidden_layers": 4, "virtual_stages": 2, "gated": int(gated)}
    ranks = spread(whole, tp=2, pp=2, virtual=2, ep=2 if name == "mixtral" else 1, gated=gated)
    same(made_by("megatron-gpt", ranks, values), whole)


def test_tensors_of_transformers_become_those_of_megatron(saved):
    name, values, tensors = saved
    ranks = Ranks()
    for key, tensor in tensors.items():
        ranks.store(key, tensor)
    same(made_by(f"{PACK.get(name, name)}-to-megatron", ranks, values), megatron_of(name, tensors, values))


def halves_of(name, key, tensor):
    """What two tensor parallel ranks have of a tensor of transformers."""
    columns = ("embed", "wte", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3", "c_fc.bias",
               "query_key_value", "dense_h_to_4h", "c_proj.weight")  # fmt: skip
    rows = "o_proj.weight", "down_proj.weight", "w2", "c_fc.weight", "dense.weight", "dense_4h_to_h.weight"
    if "c_attn" in key:
        blocks = [np.split(block, 2, axis=-1) for block in np.split(tensor, 3, axis=-1)]
        return [np.concatenate([block[n] for block in blocks], axis=-1) for n in range(2)]
    if any(part in key for part in columns):
        tensor = np.concatenate([tensor, np.full((len(tensor) % 2, *tensor.shape[1:]), NAN)])
        return np.split(tensor, 2)
    return np.split(tensor, 2, axis=1) if any(part in key for part in rows) else [tensor] * 2


def test_tensor_parallel_parts_by_the_names_of_transformers_become_whole(saved):
    name, values, tensors = saved
    ranks = Ranks()
    for key, tensor in tensors.items():
        for number, half in enumerate(halves_of(name, key, tensor)):
            if "experts" in key:
                ranks.store(key, half, tp=(number, 2), ep=(int(key.split(".")[5]) // 2, 2))
            else:
                for expert in range(2):
                    ranks.store(key, half, tp=(number, 2), ep=(expert, 2))
    found = made_by(PACK.get(name, name), ranks, values)
    same({key: value[:37] if len(value) == 38 else value for key, value in found.items()}, tensors)


def test_a_tied_head_on_the_last_stage_is_an_alias():
    ranks = Ranks()
    for name, stage in (("embedding.word_embeddings.weight", 0), ("output_layer.weight", 1)):
        ranks.store(name, np.arange(8.0).reshape(4, 2), pp=(stage, 2))
    made = ranks.assembled(packs.load("megatron-to-gpt2", {"vocab_size": 3}))
    assert made.aliases == {"lm_head.weight": "transformer.wte.weight"}
    [atom] = made.atoms.values()
    assert atom.atom.shape == (3, 2) and len(atom.copies) == 1


def test_all_packs_can_be_read_and_say_what_they_are_for():
    assert len(packs.names()) == 14
    for name, purpose in packs.names().items():
        assert packs.load(name).rules and len(purpose) > 20
    with pytest.raises(BadInput, match="no pack 'bert' of rules; there are: decoder-to-llama, gpt-neox, "):
        packs.load("bert")
    with pytest.raises(
        BadInput, match=r"^megatron-to-lama is no file, and no pack of rules; .*megatron-to-llama"
    ):
        packs.find("megatron-to-lama", None)


def test_a_value_that_is_missing_is_named():
    ranks = Ranks()
    ranks.store("embedding.word_embeddings.weight", np.zeros((4, 2)))
    with pytest.raises(RuleError, match=r"pack megatron-to-llama, rule 2 .*nothing says what vocab_size is"):
        ranks.assembled(packs.load("megatron-to-llama"))
