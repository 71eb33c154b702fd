"""Which tensors have a plain value, and the bytes of those."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from holdfast.errors import BadInput, ModelNotSupported
from holdfast.state.capture import capture
from holdfast.state.encoding import decode, encode
from holdfast.state.plain_tensors import flat_bytes, host_bytes, repeats_itself, tensor_of, unsupported_kind

EYE = torch.eye(4)

VIEWS = {
    "one of four": torch.arange(8.0)[5::4],
    "one element, odd strides": torch.arange(8.0).as_strided((1, 1), (5, 3), 2),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "every other column": torch.arange(8, dtype=torch.int16).view(2, 4)[:, ::2],
    "expanded": torch.arange(3.0).expand(2, 3),
    "sliding window": torch.arange(6.0).unfold(0, 3, 1),
    "number": torch.tensor(2.5, dtype=torch.bfloat16),
    "nothing": torch.empty(0, 3).t(),
    "conjugate": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj(),
    "one conjugate of odd stride": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)[::2].conj(),
    "imaginary part of a conjugate": torch.tensor([1 + 2j], dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("view", VIEWS)
def test_bytes_are_those_of_values(view):
    tensor = VIEWS[view]
    wanted = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    assert host_bytes(tensor).tobytes() == bytes(wanted.contiguous().untyped_storage())
    assert torch.equal(tensor_of(flat_bytes(tensor), tensor.dtype, tensor.shape), wanted)
    assert torch.equal(decode(encode(tensor)), wanted)


def test_bytes_share_memory_where_possible():
    tensor = torch.zeros(8)[3::8]
    flat_bytes(tensor).fill_(255)
    assert tensor.isnan().all()


@pytest.mark.parametrize(
    "tensor, repeats",
    [
        (torch.arange(6.0).unfold(0, 3, 1), True),
        (torch.zeros(3).expand(2, 3), True),
        (torch.zeros(6).as_strided((3, 2), (1, 3)), False),
        (torch.zeros(12).as_strided((3, 2), (2, 3)), False),  # only counting tells
        (torch.zeros(12).as_strided((2, 2, 2), (4, 2, 2)), True),
        (torch.zeros(1).expand(1), False),
    ],
)
def test_elements_that_share_memory_are_found(tensor, repeats):
    assert repeats_itself(tensor) == repeats


ODD = {
    "sparse (torch.sparse_coo)": lambda: EYE.to_sparse(),
    "sparse (torch.sparse_csr)": lambda: EYE.to_sparse_csr(),
    "sparse (torch.sparse_csc)": lambda: EYE.to_sparse_csc(),
    "sparse (torch.sparse_bsr)": lambda: EYE.to_sparse_bsr((2, 2)),
    "sparse (torch.sparse_bsc)": lambda: EYE.to_sparse_bsc((2, 2)),
    "of the tensor class TwoTensor": lambda: TwoTensor(EYE, EYE.clone()),
    "of a transform of torch.func": lambda: torch._to_functional_tensor(EYE),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}
if torch.backends.mkldnn.is_available():
    ODD["of the layout (torch._mkldnn)"] = lambda: EYE.to_mkldnn()


class Holding(nn.Linear):
    """A layer that has ``tensor`` besides, as a parameter or a buffer."""

    def __init__(self, tensor, how):
        super().__init__(6, 3)
        if how == "parameter":
            self.held = nn.Parameter(tensor, requires_grad=False)
        else:
            self.register_buffer("held", tensor, persistent=how == "buffer")


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("how", ["parameter", "buffer"])
def test_odd_tensors_are_refused_by_name(kind, how):
    with pytest.raises(ModelNotSupported) as refused:
        capture(Holding(ODD[kind](), how))
    assert f"{how} held is {kind}" in str(refused.value) and "persistent=False" in str(refused.value)
    capture(Holding(ODD[kind](), "not persistent"))
    with pytest.raises(BadInput, match=r"state\['a'\] holds a tensor that is"):
        encode({"a": ODD[kind]()}, "state")


def test_a_shard_is_odd_as_its_part():
    shard = TwoTensor(EYE, EYE.clone())
    shard.to_local = shard.clone
    for part, kind in ((EYE, None), (EYE.to_sparse(), "sparse (torch.sparse_coo)")):
        shard._local_tensor = part
        assert unsupported_kind(shard) == kind


def test_a_parameter_that_overlaps_itself_is_refused():
    with pytest.raises(
        ModelNotSupported, match=r"parameter held has several elements that are one in memory"
    ):
        capture(Holding(torch.zeros(6).unfold(0, 3, 1), "parameter"))
    with pytest.raises(ModelNotSupported, match=r"parameter held is torch.complex128"):
        capture(Holding(torch.zeros(2, dtype=torch.complex128), "parameter"))
