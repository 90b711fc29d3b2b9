"""Functions and values are pickled by value with their source, stay small, and are named if they cannot be pickled."""

from __future__ import annotations

import functools
import linecache
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit import warm
from kit.refusals import exactly
from kit.support import run_cell

import graftlab as gl
from graftlab.base import shipping
from graftlab.base.shipping import LARGE, Packed, pack_call, pack_function, pack_result, unpack_call, unpack_result
from graftlab.base.sources import install_source

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128),
)

CANNOT = """
    import functools
    import threading

    lock = threading.Lock()

    def plain(): return lock
    def calls_plain(): return plain()
    def comprehends(): return [lock for _ in range(2)]
    def nests():
        def inner():
            return (lambda: lock)()
        return inner()
    def encloses():
        mine = threading.Lock()
        def inner(): return mine
        return inner
    def encloses_what_is_not_there_yet():
        def inner(): return later, lock
        if False:
            later = 1
        return inner
    def recurs(n): return recurs(n - 1) if n else lock
    def defaults(a, b=lock): pass

    def decorator(function):
        @functools.wraps(function)
        def wrapper(*args): return function(*args), lock
        return wrapper
    @decorator
    def decorated(): pass

    class Holder:
        def __init__(self): self.held = [1, lock]
        def method(self): pass
    class Shared:
        shared = lock
        def method(self): pass
    class Uses:
        def method(self): return lock
"""


# ---- what cannot go -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "culprit"),
    [
        ("plain", "variable 'lock' used by plain()"),
        ("calls_plain", "variable 'lock' used by plain()"),
        ("comprehends", "variable 'lock' used by comprehends()"),
        ("nests", "variable 'lock' used by nests()"),
        ("encloses()", "variable 'mine' used by inner()"),
        ("encloses_what_is_not_there_yet()", "variable 'lock' used by inner()"),
        ("recurs", "variable 'lock' used by recurs()"),
        ("defaults", "variable 'b' used by defaults()"),
        ("decorated", "variable 'lock' used by decorated()"),
        ("Holder().method", "the baseline function.__self__.held[1]"),
        ("Shared().method", "Shared.shared"),
        ("Uses().method", "variable 'lock' used by method()"),
        ("functools.partial(plain)", "variable 'lock' used by plain()"),
        ("functools.partial(print, lock)", "the baseline function.args[0]"),
        ("functools.partial(print, end=lock)", "the baseline function.keywords['end']"),
    ],
)
def test_unpicklable_captured_variable_is_named_as_in_the_source(function: str, culprit: str) -> None:
    cell = run_cell(CANNOT)
    with pytest.raises(gl.ShippingError) as caught:
        pack_call(eval(function, cell), (), {}, what="the baseline function")
    assert str(caught.value).startswith(f"{culprit} cannot be sent to the ranks: cannot pickle '_thread.lock' object")
    assert "Create it on the ranks instead" in str(caught.value)


def test_parts_of_arguments_are_named_by_their_place() -> None:
    lock, cell = threading.Lock(), run_cell(CANNOT)
    circle: list[Any] = [lock]
    circle.append(circle)
    for args, kwargs, culprit in (
        ((1, lock), {}, "positional argument 1"),
        (([0, {"a": (lock,)}],), {}, "positional argument 0[1]['a'][0]"),
        ((), {"handle": lock}, "argument 'handle'"),
        ((), {"handles": {3: lock}}, "argument 'handles'[3]"),
        ((cell["Holder"](),), {}, "positional argument 0.held[1]"),
        ((circle,), {}, "positional argument 0[0]"),
        (((number for number in range(3)),), {}, "positional argument 0"),
    ):
        with pytest.raises(gl.ShippingError) as caught:
            pack_call(print, args, kwargs)
        assert str(caught.value).startswith(f"{culprit} cannot be sent"), culprit


def test_unpicklable_transform_is_named_like_any_function() -> None:
    with pytest.raises(gl.ShippingError, match=r"variable 'lock' used by plain\(\)"):
        gl.GraftPlan().edit(transform=run_cell(CANNOT)["plain"])


def test_a_name_that_is_only_an_attribute_is_not_blamed() -> None:
    cell = run_cell(
        "import threading\nlock, other = threading.Lock(), threading.Lock()\ndef f(x): return x.lock, other"
    )
    with pytest.raises(gl.ShippingError, match=r"^variable 'other' used by f\(\)"):
        pack_call(cell["f"], (), {})


# ---- what goes ------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_cell_function_runs_in_a_fresh_process_with_its_source_in_tracebacks(tmp_path: Any) -> None:
    cell = run_cell(
        """
        SCALE = 3

        def helper(x):
            return x / 0  # the planted line

        def outer(x, *, fail=False):
            return helper(x) if fail else x * SCALE
        """
    )
    (tmp_path / "blob").write_bytes(pack_call(cell["outer"], (2,), {}))
    code = f"""
import traceback
from pathlib import Path
from graftlab.base.shipping import unpack_call
function, args, kwargs = unpack_call(Path({str(tmp_path / "blob")!r}).read_bytes())
print(function(*args, **kwargs))
try:
    function(*args, fail=True)
except ZeroDivisionError:
    print(traceback.format_exc())
"""
    done = warm.run("-c", code, cwd=_root())
    assert done.stdout.startswith("6\n"), done.stderr
    assert "return x / 0  # the planted line" in done.stdout


def _root() -> str:
    """Where the graftlab that is being tested can be imported, installed or not."""
    return str(gl.__path__[0]).rpartition("/")[0]


def test_only_sources_without_a_file_travel() -> None:
    cell = run_cell("def small(): return 1")
    small, of_a_file = pack_function(cell["small"]), pack_function(importable)
    assert b"return 1" in small
    assert b"an importable function" not in of_a_file


def importable() -> str:
    return "an importable function"


def test_an_importable_function_travels_by_name() -> None:
    assert unpack_call(pack_call(importable, (), {}))[0] is importable


def test_installed_sources_show_in_tracebacks_and_survive_checkcache() -> None:
    install_source("<a cell>", "def f():\n    raise ValueError('planted')\n")
    namespace: dict[str, Callable[[], None]] = {}
    exec(compile("def f():\n    raise ValueError('planted')\n", "<a cell>", "exec"), namespace)
    linecache.checkcache()
    with pytest.raises(ValueError, match="planted") as caught:
        namespace["f"]()
    assert "    raise ValueError('planted')" in "".join(traceback.format_tb(caught.tb))


# ---- sizes ----------------------------------------------------------------------------------------------------------


def warned(pack: Callable[[], bytes]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        pack()
    return found


@pytest.mark.slow
def test_large_captured_value_is_named_in_a_warning_at_the_users_line() -> None:
    cell = run_cell(
        f"""
        import torch

        weights = torch.zeros({LARGE // 4})
        small = torch.zeros(10)

        def uses(): return weights, small
        def calls(): return uses()
        """
    )
    large = torch.zeros(LARGE // 4)
    for function, args, named in (
        (cell["calls"], (), "variable 'weights' used by uses()"),
        (print, (1, [2, large]), "positional argument 1[1]"),
        (functools.partial(print, large), (), "the target function.args[0]"),
    ):
        (warning,) = warned(functools.partial(pack_call, function, args, {}, what="the target function"))
        assert warning.category is gl.GraftWarning
        assert str(warning.message) == (
            f"the target function takes 16 MiB along to every rank, most of it in {named}; "
            f"create large values on the ranks instead"
        )
        assert warning.filename == __file__


def test_many_middling_parts_are_not_blamed_on_one() -> None:
    thirds = tuple(torch.zeros(LARGE // 8) for _ in range(3))
    (warning,) = warned(lambda: pack_call(print, thirds, {}))
    assert "most of it" not in str(warning.message)


def test_small_values_are_sent_without_a_warning() -> None:
    assert warned(lambda: pack_call(print, (torch.zeros(LARGE // 8),), {})) == []


# ---- calls that are sent many times ---------------------------------------------------------------------------------


class Counted:
    """Counts how often it was pickled."""

    pickled = 0

    def __reduce__(self) -> Any:
        Counted.pickled += 1
        return Counted, ()


def test_calls_packed_together_are_pickled_once_and_share_what_they_read() -> None:
    cell = run_cell(
        """
        seen = []

        def adds(each): seen.append(each)
        def reads(each): return seen, each
        """
    )
    Counted.pickled = 0
    functions = {"the baseline function": cell["adds"], "the exact function": cell["reads"]}
    adds, reads = shipping.pack_together(functions, (Counted(),), {})
    for _ in range(2):
        function, (first, second), _ = unpack_call(pack_call(print, (adds, reads), {}))
        assert function is print
        first()
        seen, argument = second()
        assert seen == [argument]
    assert Counted.pickled == 1
    assert reads()[0] == cell["seen"] == []


def test_a_call_that_cannot_be_packed_is_named_and_a_large_one_warns_once() -> None:
    lock, large = threading.Lock(), torch.zeros(LARGE // 4)
    for args, named in (((lock,), "positional argument 0"), ((), "argument 'x'")):
        with pytest.raises(gl.ShippingError, match=named):
            shipping.pack_together({"the baseline function": print}, args, {"x": lock})
    made: list[shipping.PackedCall] = []
    (warning,) = warned(lambda: made.extend(shipping.pack_together({"the target function": print}, (large,), {})))
    assert str(warning.message).startswith("the target function takes 16 MiB along to every rank, most of it in posit")
    assert warned(lambda: pack_call(print, (made[0], torch.zeros(LARGE // 8)), {})) == []


def test_a_large_value_of_the_package_arrives_as_itself_without_a_warning() -> None:
    large = {"x": torch.arange(LARGE // 4, dtype=torch.float32)}
    blobs: list[bytes] = []
    assert warned(lambda: blobs.append(pack_call(print, (Packed.of(large), 5), {}))) == []
    _, (arrived, five), _ = unpack_call(blobs[0])
    assert torch.equal(arrived["x"], large["x"])
    assert five == 5
    assert len(warned(lambda: pack_call(print, (Packed.of(large), large), {}))) == 1


def test_several_values_of_the_package_are_not_counted_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "LARGE", 4096)
    parts = [Packed.of(bytes(3000)), Packed.of(bytes(3000))]
    assert warned(lambda: pack_call(print, (*parts, bytes(3000)), {})) == []
    assert len(warned(lambda: pack_call(print, (*parts, bytes(5000)), {}))) == 1


# ---- results --------------------------------------------------------------------------------------------------------


@given(data=st.data())
def test_results_arrive_bit_exact_in_every_dtype_and_layout(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    tensor = raw.view(dtype).squeeze(-1) if raw.numel() else torch.empty(shape, dtype=dtype)
    tensor = tensor.reshape(shape)
    if len(shape) > 1 and data.draw(st.booleans()):
        tensor = tensor.transpose(0, 1)
    found = unpack_result(pack_result(tensor))
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert found.is_contiguous()
    same = found.reshape(-1).view(torch.uint8).equal(tensor.contiguous().reshape(-1).view(torch.uint8))
    assert same or not tensor.numel()


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "uint16", "uint32", "uint64", "complex32"]
)
def test_arguments_arrive_in_dtypes_that_torch_does_not_unpickle(dtype: str) -> None:
    if not hasattr(torch, dtype):
        pytest.skip("this release of torch has no such dtype")
    made = torch.arange(48, dtype=torch.uint8).view(getattr(torch, dtype))
    needs_grad = made.is_floating_point()
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(made, requires_grad=needs_grad)
    strided = made[1:5].view(2, 2).t()
    strided.requires_grad_(needs_grad)
    strided.tag = "kept"  # type: ignore[attr-defined]
    _, (arrived, view, empty, meta), _ = unpack_call(
        pack_call(print, (model, strided, made[:0], torch.empty(2, dtype=made.dtype, device="meta")), {})
    )
    assert (arrived.weight.dtype, arrived.weight.requires_grad) == (made.dtype, needs_grad)
    assert arrived.weight.detach().view(torch.uint8).tolist() == list(range(48))
    assert (view.dtype, view.stride(), view.tag) == (made.dtype, strided.stride(), "kept")
    assert (view.requires_grad, view.is_leaf) == (needs_grad, True)
    view, strided = view.detach(), strided.detach()
    assert view.contiguous().view(torch.uint8).equal(strided.contiguous().view(torch.uint8))
    assert (empty.dtype, empty.shape, meta.dtype, meta.shape) == (made.dtype, (0,), made.dtype, (2,))


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_result_arrives_with_its_scale_and_meta_and_nested_ones_as_such() -> None:
    made = torch.quantize_per_tensor(torch.tensor([1.0, -2.0]), 0.5, 1, torch.qint8)
    arrived = unpack_result(pack_result(made))
    assert (arrived.q_scale(), arrived.q_zero_point()) == (0.5, 1)
    assert arrived.dequantize().tolist() == [1.0, -2.0]
    meta = unpack_result(pack_result(torch.ones(2, 3, device="meta", dtype=torch.float16)))
    assert (meta.device.type, meta.shape, meta.dtype) == ("meta", (2, 3), torch.float16)
    nested = unpack_result(pack_result(torch.nested.nested_tensor([torch.ones(1), torch.zeros(2)])))
    assert [each.tolist() for each in nested.unbind()] == [[1.0], [0.0, 0.0]]


def test_result_tensor_has_only_its_own_bytes_and_no_autograd_history() -> None:
    base = torch.zeros(1_000_000, requires_grad=True)
    blob = pack_result({"view": (base * 2)[3:5], "parameter": torch.nn.Parameter(torch.ones(2))})
    assert len(blob) < 2000
    found = unpack_result(blob)
    assert not found["view"].requires_grad
    assert type(found["parameter"]) is torch.Tensor
    found["view"] += 1


def test_unpicklable_result_arrives_as_its_repr_with_the_reason() -> None:
    found = unpack_result(pack_result({"lock": threading.Lock()}))
    assert isinstance(found, shipping.UnshippedValue)
    assert repr(found).startswith("{'lock': <unlocked _thread.lock object")
    assert "cannot pickle '_thread.lock' object" in found.why
    assert found.kind == "dict"


def test_a_result_whose_repr_fails_too_does_not_end_the_rank() -> None:
    class Sulks:
        def __reduce__(self) -> Any:
            raise TypeError("stays here")

        def __repr__(self) -> str:
            raise RuntimeError("and shows nothing")

    found = unpack_result(pack_result(Sulks()))
    assert isinstance(found, shipping.UnshippedValue)
    assert "stays here" in found.why


def test_a_long_repr_of_a_value_that_stays_is_cut() -> None:
    class Long:
        def __reduce__(self) -> Any:
            raise TypeError("stays here")

        def __repr__(self) -> str:
            return "x" * 1_000_000

    assert repr(unpack_result(pack_result(Long()))) == "x" * 2000


def test_a_value_that_cannot_be_loaded_is_named_and_an_interrupt_is_none() -> None:
    class Raises:
        def __init__(self, error: BaseException) -> None:
            self.error = error

        def __reduce__(self) -> Any:
            return _raise, (self.error,)

    found = unpack_result(pack_result(Raises(ImportError("no module of that name"))))
    assert isinstance(found, shipping.UnshippedValue)
    assert found.why == "no module of that name"
    interrupted = pack_result(Raises(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        unpack_result(interrupted)


def _raise(error: BaseException) -> None:
    raise error


def test_value_nested_too_deep_is_named() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(
        gl.ShippingError,
        match=exactly(
            "positional argument 1 cannot be sent to the ranks: it nests deeper than pickle can follow. "
            "Flatten it, or create it on the ranks instead"
        ),
    ):
        shipping.pack_call(print, (1, deep), {})
