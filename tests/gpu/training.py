"""An ordinary script on a CUDA device, or on the CPU where there is none, each number of which is reproducible.

    python training.py ROOT STEPS [KILL_AT]

Prints a line of JSON per step, and kills itself once step KILL_AT is durable; where the environment has REPLICA, once
a replica has it. OPTIONS, as JSON, are more options of the Checkpointer. With COPIES the state is copied into memory,
where every second step survives a kill. With SIGTERM_AT the script sends itself that signal in that step.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import time
from typing import Any

import torch
from torch import nn

from holdfast.checkpointer import Checkpointer
from support.switching import copy_often

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIMIZERS = {
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "foreach AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "loop SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, foreach=False),
}


class Net(nn.Module):
    """Odd shapes, buffers that change in every step, and random numbers of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(31, 257), nn.Linear(257, 5, bias=False)
        self.norm, self.dropout = nn.BatchNorm1d(257), nn.Dropout(0.2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.dropout(torch.relu(self.norm(self.first(x))))) * self.scale


class Script:
    """``step(i)`` is one iteration, without what a Checkpointer adds. With ``scaled``, in fp16 and with a loss scale;
    the loss of step 3 is infinite then."""

    def __init__(self, optimizer: str = "fused AdamW", scaled: bool = False, unscale: bool = False) -> None:
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(0)
        self.model = Net().to(DEVICE)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, enabled=scaled)
        self._scaled, self._unscale = scaled, unscale

    def step(self, i: int) -> torch.Tensor:
        x = torch.randn(16, 31, generator=torch.Generator().manual_seed(i)).to(DEVICE)
        with torch.autocast(DEVICE, torch.float16, enabled=self._scaled):
            loss = self.model(x).pow(2).mean()
        infinite = self._scaled and i == 3
        self.scaler.scale(loss * float("inf") if infinite else loss).backward()
        if self._unscale:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of parameters, buffers and what the optimizer holds."""
        found = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        for number, slots in enumerate(self.optimizer.state_dict()["state"].values()):
            found |= {
                f"{number}/{slot}": value for slot, value in copy.deepcopy(slots).items() if value is not None
            }
        return found

    def checkpointer(self, root: Any, **options: Any) -> Checkpointer:
        scaler = {"scaler": self.scaler} if self._scaled else {}
        return Checkpointer(root, model=self.model, optimizer=self.optimizer, **scaler, **options)


def main(root: str, steps: int, kill_at: int | None) -> None:
    script, replica = Script(), bool(os.environ.get("REPLICA"))
    options = {"replica": replica, **json.loads(os.environ.get("OPTIONS", "{}"))}
    if "every" not in options:
        options = {"base_every": 100 if replica else 4, **options}
    copies, sigterm_at = bool(os.environ.get("COPIES")), int(os.environ.get("SIGTERM_AT", "-1"))
    if copies:
        copy_often("/dev/shm")
    with script.checkpointer(root, **options) as checkpointer:
        for i in range(checkpointer.resume(), steps):
            loss = script.step(i)
            script.optimizer.zero_grad()
            if i + 1 == sigterm_at:
                os.kill(os.getpid(), signal.SIGTERM)
            print(json.dumps({"step": i + 1, "loss": float(loss)}), flush=True)
            checkpointer.step()
            if copies:
                checkpointer._backend.recorder.drain()  # so that the choice of copies comes at one step
            if i + 1 == kill_at:
                if not replica and not copies:
                    checkpointer.wait()
                while checkpointer.replica_step < kill_at - copies:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
    print(
        json.dumps({"sums": {name: float(t.double().sum()) for name, t in script.state().items()}}),
        flush=True,
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
