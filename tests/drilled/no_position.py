"""Planted fault: a DataLoader that no resume sets to its place."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import holdfast


def main():
    torch.manual_seed(0)
    data = TensorDataset(torch.arange(96.0).reshape(16, 6) / 96)
    batches = DataLoader(data, batch_size=1)
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with holdfast.Checkpointer("runs/no_position", model=model, optimizer=optimizer) as checkpointer:
        done = checkpointer.resume()
        for (rows,), _ in zip(batches, range(done, 12)):
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()


if __name__ == "__main__":
    main()
