"""Diffusion transformers of diffusers train out of core with the bits of a plain loop.

In memory, killed and resumed; what was trained is written into a folder that diffusers loads.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import holdfast as library
from holdfast.errors import ModelNotSupported
from killed import Killed
from support.grouped import grouped
from training import differing, state_of, stored

diffusers = pytest.importorskip("diffusers")

STEPS, ROWS = 3, 2


def dit():
    """After its blocks it computes with the first one's embedding of the time, whose gradient is a sum of two parts.

    The order of that sum depends on the number of micro-batches, so that one has a plain loop's bits.
    """
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=3, sample_size=8, patch_size=2,
        num_embeds_ada_norm=10,
    )  # fmt: skip


def pixart():
    """Blocks are found, with self-attention and cross-attention."""
    return diffusers.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=3, sample_size=8,
        patch_size=2, cross_attention_dim=16, caption_channels=16, use_additional_conditions=False,
    )  # fmt: skip


def flux():
    """Two lists of blocks of two classes, each of which returns text and image."""
    return diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(2, 2, 4),
    )  # fmt: skip


def stable_diffusion():
    """The last block returns the image alone."""
    return diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=3, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4,
        pos_embed_max_size=8,
    )  # fmt: skip


def of_classes(random):
    return {"class_labels": torch.randint(0, 10, (ROWS,), generator=random)}


def of_text(random):
    return {
        "encoder_hidden_states": torch.randn(ROWS, 5, 16, generator=random),
        "pooled_projections": torch.randn(ROWS, 16, generator=random),
    }


def of_captions(random):
    return {
        "encoder_hidden_states": torch.randn(ROWS, 5, 16, generator=random),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def of_positions(random):
    return of_text(random) | {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(5, 3)}


def all_but_the_first(model):
    return list(model.transformer_blocks[1:])


def both_lists(model):
    return [*model.transformer_blocks, *model.single_transformer_blocks]


MODELS = {
    "dit": (dit, (ROWS, 4, 8, 8), of_classes, all_but_the_first, 1),
    "pixart": (pixart, (ROWS, 4, 8, 8), of_captions, None, 2),
    "flux": (flux, (ROWS, 16, 4), of_positions, both_lists, 2),
    "sd3": (stable_diffusion, (ROWS, 4, 8, 8), of_text, None, 2),
}


class WithLoss(nn.Module):
    """A script's own module around the model: noise is added to an image, and the model's guess of it compared."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.transformer = model

    def forward(self, image, noise, timestep, given):
        share = (timestep.float() / 1000).view(-1, *[1] * (image.dim() - 1))
        mixed = (1 - share) * image + share * noise
        guess = self.transformer(hidden_states=mixed, timestep=timestep, **given).sample
        return nn.functional.mse_loss(guess[:, : image.shape[1]], noise)


def make(name):
    torch.manual_seed(0)
    model = MODELS[name][0]()
    for parameter in model.parameters():  # some begin at zero, so that a block does nothing
        nn.init.normal_(parameter, std=0.1)
    return WithLoss(model.train())


def micro_batches(name, step):
    _, shape, given, _, count = MODELS[name]
    random = torch.Generator().manual_seed(step)
    return [
        {
            "image": torch.randn(shape, generator=random),
            "noise": torch.randn(shape, generator=random),
            "timestep": torch.randint(0, 1000, (ROWS,), generator=random),
            "given": given(random),
        }
        for _ in range(count)
    ]


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def blocks(name, model):
    of = MODELS[name][3]
    return {"blocks": of(model.transformer)} if of else {}


def plain_loop(name):
    model, losses, count = make(name), [], MODELS[name][4]
    optimizer = adamw(model, fused=True)
    with library.keyed_rng(model, **blocks(name, model)) as keys:
        for step in range(STEPS):
            total = 0.0
            for m, batch in enumerate(micro_batches(name, step)):
                keys.at(step, m)
                loss = model(**batch)
                (loss / count).backward()
                total += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total / count)
    return losses, state_of(model, optimizer), model


def opened(name, run):
    model = make(name)
    return library.offload(model, adamw(model), run, **grouped(dtype="fp32", **blocks(name, model)))


def steps(name, engine, stop=STEPS):
    return [engine.step(micro_batches(name, step)) for step in range(engine.steps_done, stop)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_diffusion_transformer_has_the_bits_of_a_plain_loop(tmp_path, kill_at, name):
    losses, expected, model = plain_loop(name)
    engine = opened(name, tmp_path / "run")
    found = steps(name, engine, STEPS - 1)
    engine.wait()
    kill_at("after_manifest_sync")
    with pytest.raises((Killed, library.HoldfastError)):
        steps(name, engine)
        engine.wait()
    engine.give_up()
    kill_at("")
    with opened(name, tmp_path / "run") as engine:
        assert engine.steps_done == STEPS - 1
        assert found + steps(name, engine) == losses
        trained = make(name)
        trained.load_state_dict(engine.state_dict())
    assert differing(stored(tmp_path / "run"), expected) == []
    trained.transformer.save_pretrained(tmp_path / "folder")
    loaded = type(trained.transformer).from_pretrained(tmp_path / "folder")
    assert differing(loaded.state_dict(), model.transformer.state_dict()) == []


def test_block_whose_parameters_are_used_after_the_blocks_is_refused_by_name(tmp_path):
    model = WithLoss(dit())
    image, random = torch.zeros(ROWS, 4, 8, 8), torch.Generator().manual_seed(0)
    batch = {
        "image": image, "noise": image, "timestep": torch.tensor([1, 2]), "given": of_classes(random),
    }  # fmt: skip
    with (
        library.offload(model, adamw(model), tmp_path / "run", **grouped(dtype="fp32")) as engine,
        pytest.raises(
            ModelNotSupported, match=r"blocks\.0.*was used after.*or leave the block out of blocks="
        ),
    ):
        engine.step([batch])
