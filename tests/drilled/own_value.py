"""Planted fault: a running mean that the training uses, and that is no part of the run."""

import torch

import holdfast


class Damping:
    """Smaller updates after large losses."""

    def __init__(self):
        self.mean = 1.0

    def factor(self, loss):
        self.mean = 0.9 * self.mean + 0.1 * loss
        return 1 / (1 + self.mean)


def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    damping = Damping()
    with holdfast.Checkpointer("runs/own_value", model=model, optimizer=optimizer) as checkpointer:
        for step in range(checkpointer.resume(), 12):
            batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            loss = model(batch).square().mean()
            (loss * damping.factor(float(loss.detach()))).backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()


if __name__ == "__main__":
    main()
