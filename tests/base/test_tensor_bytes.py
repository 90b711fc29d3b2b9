"""Tensors to bytes and back: every dtype and layout, bit by bit."""

from __future__ import annotations

import math

import pytest
import torch
from kit.tensors import DTYPES, bits, layouts

from graftlab.base.tensor_bytes import (
    DTYPE_NAMES,
    as_bytes,
    assembled,
    copyable,
    dtype_named,
    from_bytes,
    memory_of,
    to_bytes,
)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_to_bytes_and_back_is_bit_exact(dtype: torch.dtype) -> None:
    for name, tensor in layouts(dtype).items():
        data = to_bytes(tensor)
        back = from_bytes(data, dtype, tuple(tensor.shape))
        assert len(data) == tensor.numel() * dtype.itemsize, name
        assert (back.shape, back.dtype) == (tensor.shape, dtype), name
        assert torch.equal(bits(back), bits(tensor)), name


def test_lazy_views_and_tensors_with_gradients_become_bytes_of_their_values() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    assert to_bytes(value.conj()) == to_bytes(torch.tensor([1 - 2j, 3 + 4j]))
    assert to_bytes(value.conj().imag) == to_bytes(torch.tensor([-2.0, 4.0]))
    assert to_bytes(torch.ones(2, requires_grad=True)) == to_bytes(torch.ones(2))
    bits_of = torch._neg_view(torch.tensor([1.0, -2.0]))
    assert to_bytes(bits_of) == to_bytes(torch.tensor([-1.0, 2.0]))


def test_views_share_their_memory_and_tensors_without_any_have_none() -> None:
    whole = torch.arange(6.0)
    assert memory_of(whole) == memory_of(whole[3:]) == memory_of(whole.view(2, 3).t()) == whole.data_ptr()
    for without in (
        torch.ones(0),
        torch.ones(2, device="meta"),
        torch.eye(2).to_sparse(),
        torch.eye(2).to_sparse_csr(),
    ):
        assert memory_of(without) is None
    seen: list[int | None] = []
    torch.func.vmap(lambda row: seen.append(memory_of(row)) or row)(torch.ones(2, 3))
    assert seen == [None]


def test_a_bytearray_becomes_the_tensors_memory_and_bytes_are_copied() -> None:
    data = bytearray(8)
    made = from_bytes(data, torch.float32, (2,))
    copy = from_bytes(bytes(data), torch.float32, (2,))
    data[:4] = b"\0\0\x80\x3f"
    assert (made.tolist(), copy.tolist()) == ([1.0, 0.0], [0.0, 0.0])


@pytest.mark.parametrize("offset", [0, 2, 8, 16])
def test_one_piece_is_used_as_it_is_only_where_it_is_aligned(offset: int) -> None:
    source = torch.zeros(64, dtype=torch.uint8)
    start = -source.data_ptr() % 16
    piece = memoryview(source.numpy())[start + offset : start + offset + 16]
    made = assembled([piece], 16, torch.float64, (2,))
    assert (made.data_ptr() == source.data_ptr() + start + offset) is (offset % 16 == 0)
    assert made.data_ptr() % 16 == 0


def test_a_copy_is_made_only_where_the_elements_do_not_lie_row_by_row() -> None:
    matrix = torch.arange(6, dtype=torch.int16).view(2, 3)
    assert as_bytes(matrix).data_ptr() == matrix.data_ptr()
    assert as_bytes(matrix.t()).tolist() == [0, 0, 3, 0, 1, 0, 4, 0, 2, 0, 5, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_can_be_copied_by_its_bytes(dtype: torch.dtype) -> None:
    source = layouts(dtype)["sliced"]
    into = torch.empty_like(copyable(source)).view(dtype)
    copyable(into).copy_(copyable(source))
    assert torch.equal(bits(into), bits(source))


@pytest.mark.parametrize(("data", "shape"), [(b"", (2,)), (b"123", (1,)), (b"1234", (2,))])
def test_bytes_that_are_not_the_tensor_are_refused(data: bytes, shape: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match=r"invalid for input of size|must be divisible"):
        from_bytes(data, torch.float32, shape)


def test_every_dtype_of_torch_has_a_name_and_nothing_else_of_torch_is_one() -> None:
    assert {dtype_named(name) for name in DTYPE_NAMES.values()} == set(DTYPE_NAMES) >= set(DTYPES)
    assert dtype_named("float") is torch.float32
    for name in ("float3", "load", "__name__", ""):
        with pytest.raises(ValueError, match=f"torch has no dtype '{name}'"):
            dtype_named(name)


def test_bytes_become_a_tensor_on_the_cpu_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        for shape in ((0, 3), (2, 3)):
            data = bytes(4 * math.prod(shape))
            for made in (
                assembled([memoryview(data)[:5], memoryview(data)[5:]], len(data), torch.float32, shape),
                from_bytes(data, torch.float32, shape),
            ):
                assert (made.device.type, tuple(made.shape)) == ("cpu", shape)
