"""What a model holds is known by the names it has without wrappers, or refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast.errors import ModelNotSupported
from holdfast.state.capture import capture


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module, name: str = "module") -> None:
        super().__init__()
        self.add_module(name, module)


def compiled(model: nn.Module) -> nn.Module:
    """Named as ``torch.compile`` does it."""
    return Wrapper(model, "_orig_mod")


def captured(model: nn.Module):
    return capture(model, torch.optim.SGD(model.parameters(), lr=0.1))


def names(model: nn.Module) -> list[str]:
    return [parameter.name for parameter in captured(model).parameters]


def test_wrappers_leave_no_trace_in_names():
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    for wrapped in (model, Wrapper(model), nn.DataParallel(Wrapper(model)), compiled(model)):
        assert names(wrapped) == ["0.weight"]
    inside = nn.Sequential(compiled(nn.Linear(2, 2, bias=False)))
    assert names(inside) == ["0.weight"]


def test_a_module_called_module_beside_others_keeps_its_name():
    student = Wrapper(nn.Linear(2, 2, bias=False))
    student.weight = nn.Parameter(torch.ones(2, 2))
    student.register_buffer("seen", torch.zeros(()))
    student.module.register_buffer("seen", torch.ones(()))
    assert names(student) == ["weight", "module.weight"]
    assert list(captured(student).buffers) == ["seen", "module.seen"]


@pytest.mark.parametrize("kind", ["parameters", "buffers", "a parameter and a buffer"])
def test_two_tensors_of_one_name_are_refused(kind):
    model = nn.Sequential(nn.Linear(2, 2))
    model._orig_mod = nn.Sequential(nn.Module())
    for module, parameter in ((model[0], kind == "parameters"), (model._orig_mod[0], kind != "buffers")):
        if parameter:
            module.scale = nn.Parameter(torch.ones(2))
        else:
            module.register_buffer("scale", torch.ones(2))
    with pytest.raises(ModelNotSupported, match=r"0\.scale and .*0\.scale would both be stored as 0\.scale"):
        captured(model)


def test_state_outside_of_tensors_is_refused_by_name():
    class Scaled(nn.Linear):
        def get_extra_state(self):
            return {"scale": 1.0}

    with pytest.raises(ModelNotSupported, match=r"^1 \(Scaled\) keeps state by get_extra_state"):
        captured(nn.Sequential(nn.Linear(2, 2), Scaled(2, 2)))


@pytest.mark.parametrize("dtype", [torch.complex128, torch.uint1], ids=str)
def test_a_buffer_of_a_type_that_cannot_be_stored_is_refused_by_name(dtype):
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.empty(4, dtype=dtype), persistent=False)
    captured(model)
    model.register_buffer("table", torch.empty(4, dtype=dtype))
    with pytest.raises(ModelNotSupported, match=rf"buffer table is {dtype}.*persistent=False"):
        captured(model)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_on_meta_is_refused_by_name(persistent):
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.zeros(4, device="meta"), persistent=persistent)
    with pytest.raises(ModelNotSupported, match=r"buffer table is on meta.*empty_parameters"):
        captured(model)


def test_fsdp1_model_is_refused():
    model = nn.Sequential(Wrapper(nn.Linear(2, 2), "_fsdp_wrapped_module"))
    with pytest.raises(ModelNotSupported, match=r"^0 is of FullyShardedDataParallel \(FSDP1\).*fully_shard"):
        capture(model)
