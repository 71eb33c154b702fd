"""A script of torchrun without a fault."""

import os
import time

import torch
import torch.distributed as dist

import holdfast


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    pause = float(os.environ.get("PAUSE", "0"))
    run = os.environ.get("RUN", "runs/torch_ranks")
    bases = {"base_every": int(os.environ["BASE_EVERY"])} if "BASE_EVERY" in os.environ else {}
    with holdfast.Checkpointer(
        run, model=model, optimizer=optimizer, wait_each_step=True, **bases
    ) as checkpointer:
        for step in range(checkpointer.resume(), int(os.environ.get("STEPS", "40"))):
            while "HELD" in os.environ and os.path.exists(f"{os.environ['HELD']}/{step}"):
                time.sleep(0.01)  # until a test has what it waits for
            source = torch.Generator().manual_seed(2 * step + dist.get_rank())
            model(torch.randn(4, 6, generator=source)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
            if dist.get_rank() == 0:
                print(step + 1, os.getpid(), flush=True)
            time.sleep(pause)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
