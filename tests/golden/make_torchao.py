"""Makes ``torchao_int8.safetensors``: layers that torchao has quantised, and what they compute.

Needs torchao (made with 0.18), which is no part of the development environment: torchao does not compute on what
``holdfast`` keeps, and is not imported by it.

    python tests/golden/make_torchao.py
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

OUT = Path(__file__).parent / "torchao_int8.safetensors"


def main() -> None:
    torchao: Any = import_module("torchao.quantization")
    torch.manual_seed(0)
    x, gradient = torch.randn(5, 32), torch.randn(5, 12)
    found = {"x": x, "gradient": gradient}
    kinds = {"rows": torchao.PerRow(), "groups": torchao.PerGroup(8), "one": torchao.PerTensor()}
    for kind, granularity in kinds.items():
        layer = torch.nn.Linear(32, 12, bias=False).bfloat16()
        torchao.quantize_(layer, torchao.Int8WeightOnlyConfig(granularity=granularity))
        weight: Any = layer.weight
        parts = {"qdata": weight.qdata, "scale": weight.scale, "zero_point": weight.zero_point}
        found |= {f"{kind}._weight_{name}": part for name, part in parts.items() if part is not None}
        for dtype in (torch.float32, torch.bfloat16):
            name, own = f"{kind}.{str(dtype).removeprefix('torch.')}", x.clone().to(dtype).requires_grad_()
            out = layer(own)
            out.backward(gradient.to(dtype))
            found |= {f"{name}.weight": weight.dequantize(dtype), f"{name}.out": out}
            assert own.grad is not None
            found[f"{name}.of_input"] = own.grad
    save_file({name: value.detach().clone().contiguous() for name, value in found.items()}, OUT)


if __name__ == "__main__":
    main()
