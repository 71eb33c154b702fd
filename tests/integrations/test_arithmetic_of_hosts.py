"""A trainer whose run comes from another kind of processor is refused, and goes on if its callback allows it."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")
lightning = pytest.importorskip("lightning.pytorch")

from holdfast.errors import OtherArithmetic  # noqa: E402
from holdfast.integrations import lightning as of_lightning  # noqa: E402
from holdfast.integrations import transformers as of_transformers  # noqa: E402
from integrations_interrupt import Interrupt, Interrupted  # noqa: E402
from support.other_processor import other_processor  # noqa: E402
from trainer_run import make  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # of Lightning, about workers and the like
STEPS, AT = 4, 3


class Module(lightning.LightningModule):
    def __init__(self, stops):
        super().__init__()
        self.layer, self._stops = torch.nn.Linear(4, 1), stops

    def training_step(self, batch, index):
        if self._stops and index == AT:
            raise Interrupted
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def with_trainer(root, stops, **options):
    callbacks = [of_transformers.HoldfastCallback(root / "run", **options), *[Interrupt(AT)] * stops]
    trainer = make(root / "output", callbacks=callbacks, max_steps=STEPS, optim="adamw_torch")
    trainer.train()
    return trainer.state.global_step


def with_lightning(root, stops, **options):
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        max_steps=STEPS, callbacks=[of_lightning.HoldfastCallback(root / "run", **options)], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(Module(stops), torch.utils.data.DataLoader(torch.ones(8, 4)))
    return trainer.global_step


@pytest.mark.parametrize("train", [with_trainer, with_lightning])
def test_the_callback_takes_an_approximate_resume(tmp_path, monkeypatch, train):
    monkeypatch.chdir(tmp_path)
    with other_processor(), pytest.raises(Interrupted):
        train(tmp_path, stops=True)
    with pytest.raises(OtherArithmetic, match=r"HoldfastCallback\(\) take"):
        train(tmp_path, stops=False)
    with pytest.warns(UserWarning, match="arithmetic of this machine"):
        assert train(tmp_path, stops=False, exactness="approximate") == STEPS
