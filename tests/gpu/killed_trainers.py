"""Scripts of three trainers that Holdfast records in memory, on a device, as processes that are killed.

    python killed_trainers.py KIND DEVICE PRECISION ROOT [KILL_AT]

Prints the losses that this process computed and the digest of everything at its end, as a line of JSON. Kills itself in
step KILL_AT.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from survive_run import digest

STEPS = 16


def on_host(value: Any) -> Any:
    """Return ``value`` with its tensors in host memory, as ``digest`` reads them."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: on_host(each) for key, each in value.items()}
    return [on_host(each) for each in value] if isinstance(value, (list, tuple)) else value


def die_in(step: int, at: int | None) -> None:
    if step == at:
        time.sleep(0.5)  # until the steps before are on the disk
        os.kill(os.getpid(), signal.SIGKILL)


def by_trainer(device: str, precision: str, root: Path, at: int | None, adapted: bool = False) -> Any:
    from transformers import TrainerCallback

    import offloaded_script
    import trainer_run
    from holdfast.integrations.transformers import HoldfastCallback

    class Dies(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            die_in(state.global_step, at)

    options = {
        "callbacks": [Dies(), HoldfastCallback(root / "run", base_every=4)],
        "use_cpu": device == "cpu", "dataloader_pin_memory": device != "cpu",
        **({} if precision == "fp32" else {precision: True}),
    }  # fmt: skip
    if adapted:
        import peft

        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, init_lora_weights=False
        )
        net = peft.get_peft_model(offloaded_script.model(), config)
        options |= {"model": net, "num_train_epochs": 4, "disable_tqdm": True}
        trainer = offloaded_script.make(trainer_run.Told, root / "out", **options)
    else:
        trainer = trainer_run.make(root / "out", data=trainer_run.Texts(noise=True), **options)
    trainer.train()
    assert trainer.args.device.type == device
    return trainer.losses, [trainer_run.everything(trainer), device_random(device)]


def by_lora(device: str, precision: str, root: Path, at: int | None) -> Any:
    return by_trainer(device, precision, root, at, adapted=True)


def by_accelerate(device: str, precision: str, root: Path, at: int | None) -> Any:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from dist.accelerated import Points
    from holdfast.integrations.accelerate import AcceleratedCheckpointer

    accelerator = Accelerator(cpu=device == "cpu", mixed_precision="no" if precision == "fp32" else precision)
    torch.manual_seed(5)
    net = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Dropout(0.3), torch.nn.Linear(13, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    loader = DataLoader(Points(noise=True), 3, shuffle=True, pin_memory=device != "cpu")
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    losses = []
    with AcceleratedCheckpointer(root / "run", accelerator, loader, base_every=4) as checkpointer:
        checkpointer.resume()
        for _ in range(checkpointer.batches.epoch, 2):
            for batch in checkpointer.batches:
                assert batch.device.type == device
                loss = net(batch).float().pow(2).mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                die_in(checkpointer.steps_done + 1, at)
                checkpointer.step()
    scale = None if accelerator.scaler is None else accelerator.scaler.state_dict()
    return losses, [
        net.state_dict(),
        optimizer.state_dict(),
        scale,
        torch.get_rng_state(),
        device_random(device),
    ]


def by_lightning(device: str, precision: str, root: Path, at: int | None) -> Any:
    import lightning as L
    from torch.utils.data import DataLoader

    from dist.lightened import Net, Points
    from holdfast.integrations.lightning import HoldfastCallback

    class Dies(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            die_in(trainer.global_step, at)

    torch.manual_seed(5)
    trainer = L.Trainer(
        accelerator="cpu" if device == "cpu" else "gpu", devices=1, max_epochs=2, logger=False,
        precision={"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[precision],  # type: ignore
        callbacks=[Dies(), HoldfastCallback(root / "run", base_every=4)], enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0, default_root_dir=root,
    )  # fmt: skip
    module = Net(plateau=False, by_hand=False)
    loaders = [
        DataLoader(Points(noise), 3, shuffle=noise, pin_memory=device != "cpu") for noise in (True, False)
    ]
    trainer.fit(module, *loaders)
    optimizer = trainer.optimizers[0].state_dict()
    return list(module.losses), [module.state_dict(), optimizer, torch.get_rng_state(), device_random(device)]


def device_random(device: str) -> Any:
    return None if device == "cpu" else torch.get_device_module(device).get_rng_state()


KINDS = {"Trainer": by_trainer, "LoRA": by_lora, "accelerate": by_accelerate, "Lightning": by_lightning}

if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    kind, device, precision, root, *at = sys.argv[1:]
    losses, end = KINDS[kind](device, precision, Path(root), int(at[0]) if at else None)
    print(json.dumps({"losses": losses, "digest": digest(on_host(end))}), flush=True)
