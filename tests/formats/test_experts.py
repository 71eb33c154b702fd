"""Folders of mixtures of experts begin runs of models that hold all experts of a layer in one tensor."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

from formats.test_saved import exact  # noqa: E402
from holdfast.checkpointer import Checkpointer  # noqa: E402
from holdfast.errors import Damaged, RunMismatch  # noqa: E402
from holdfast.formats.foreign_formats import open_source  # noqa: E402
from holdfast.formats.restore import read_tensors  # noqa: E402
from holdfast.sources import From, under_names_of  # noqa: E402
from holdfast.state.layout.regions import Region  # noqa: E402
from tiny_folders import EXPERTS, SIZES, mixtral  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:beginning from")

SPARSE = {**SIZES, **EXPERTS, "moe_intermediate_size": 8}


def qwen3_moe():
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SPARSE, num_experts=12, head_dim=8))


def deepseek_v3():
    """With latent attention, a dense layer in front, and experts that all tokens share."""
    sizes = {
        "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    }  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(**SPARSE | {"num_key_value_heads": 2}, **sizes)
    )


def glm4_moe():
    sizes = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 8}
    return transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**SPARSE, **sizes))


def gpt_oss():
    """Stored as it is held."""
    return transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**SIZES, **EXPERTS, num_local_experts=4, head_dim=8)
    )


@pytest.fixture(scope="module", params=[qwen3_moe, deepseek_v3, glm4_moe, gpt_oss, mixtral])
def stored(request, tmp_path_factory):
    """What makes a model, one that it made, and its folder."""
    torch.manual_seed(1)
    model = request.param()
    folder = tmp_path_factory.mktemp(request.param.__name__)
    model.save_pretrained(folder)
    return request.param, model, folder


def test_a_run_begins_from_a_folder_of_experts(stored, tmp_path):
    make, there, folder = stored
    torch.manual_seed(2)
    here = make()
    optimizer = torch.optim.AdamW(here.parameters())
    with Checkpointer(tmp_path / "run", model=here, optimizer=optimizer) as checkpointer:
        checkpointer.resume(source=folder)
    assert exact(here.state_dict()) == exact(there.state_dict())


def test_each_of_three_ranks_reads_its_rows(stored):
    make, there, folder = stored
    source = under_names_of(make(), open_source(folder))
    for name, whole in there.named_parameters():
        found = source.atoms[f"{name}/param"]
        for part, rows in enumerate(torch.arange(len(whole)).tensor_split(3)):
            start, stop = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
            box = Region((start, *[0] * (whole.dim() - 1)), (stop, *whole.shape[1:]))
            assert torch.equal(read_tensors(source, [(found, box)])[0], whole.detach()[start:stop]), part


def test_a_folder_under_names_of_its_own_stays_as_it_is(tmp_path):
    model = gpt_oss()
    model.save_pretrained(tmp_path)
    source = open_source(tmp_path)
    assert under_names_of(model, source) is source
    assert under_names_of(torch.nn.Linear(2, 2), source) is source


def test_a_lost_expert_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    model = qwen3_moe()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = "model.layers.1.mlp.experts.11.up_proj.weight"
    save_file(
        {k: v for k, v in tensors.items() if k != lost}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(Damaged, match="do not fit together"):
        under_names_of(qwen3_moe(), open_source(tmp_path))


def test_fewer_experts_of_all_kinds_are_refused(tmp_path):
    """The folder's tensors fit together, and not the model."""
    model = qwen3_moe()
    model.save_pretrained(tmp_path / "folder")
    here = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SPARSE, num_experts=6, head_dim=8))
    run = Checkpointer(tmp_path / "run", model=here, optimizer=torch.optim.AdamW(here.parameters()))
    with run, pytest.raises(RunMismatch, match=r"gate_up_proj is \[12"):
        run.resume(source=From(tmp_path / "folder"))
