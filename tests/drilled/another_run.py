"""Planted fault: a directory of a new name in every start, so that nothing is ever resumed."""

import time

import torch

import holdfast


def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = f"runs/{time.time_ns()}"
    with holdfast.Checkpointer(run, model=model, optimizer=optimizer) as checkpointer:
        for step in range(checkpointer.resume(), 12):
            model(torch.ones(4, 6) * step).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()


if __name__ == "__main__":
    main()
