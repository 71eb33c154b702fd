"""Planted fault: noise from a generator of the script's own, which no resume brings back."""

import torch

import holdfast


def noises():
    source = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(4, 6, generator=source)


def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    noise = noises()
    with holdfast.Checkpointer("runs/own_generator", model=model, optimizer=optimizer) as checkpointer:
        for _ in range(checkpointer.resume(), 12):
            model(1 + next(noise)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()


if __name__ == "__main__":
    main()
