"""A script without a fault: what a step draws is restored, and its batch follows from the step."""

import os
import time

import torch

import holdfast

RUN, STEPS = os.environ.get("RUN", "runs/sound"), int(os.environ.get("STEPS", "12"))
PAUSE, DEVICE = float(os.environ.get("PAUSE", "0")), os.environ.get("DEVICE", "cpu")

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with holdfast.Checkpointer(RUN, model=model, optimizer=optimizer) as checkpointer:
    for step in range(checkpointer.resume(), STEPS):
        while step == 9 and not os.path.exists(
            os.environ.get("UNTIL", "/")
        ):  # until a test has what it waits for
            time.sleep(0.01)
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step()
        print(step + 1, os.getpid(), flush=True)
        time.sleep(PAUSE)
