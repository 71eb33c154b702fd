"""Planted fault: two runs of it differ, without any kill, since nothing seeds the order of its data."""

import random

import torch

import holdfast


def main():
    torch.manual_seed(0)
    rows = torch.arange(96.0).reshape(16, 6) / 96
    order = random.SystemRandom().sample(range(16), 16)
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with holdfast.Checkpointer("runs/unlike_itself", model=model, optimizer=optimizer) as checkpointer:
        for step in range(checkpointer.resume(), 12):
            batch = rows[order[step]]
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()


if __name__ == "__main__":
    main()
