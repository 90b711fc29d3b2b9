"""Files of requests read without trust: data comes back as it was, and nothing that a file names is run."""

from __future__ import annotations

import collections
import copyreg
import dataclasses
import datetime
import enum
import io
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit import warm
from kit.limits import limited

import graftlab as gl
from graftlab.base.text import counted
from graftlab.errors import DumpError
from graftlab.graphs.slots import FillContext
from graftlab.requests import Opaque, RecordedRequest, RequestDumper, load_dump, rebuilding
from graftlab.requests.pickling import tensor_from_bytes
from graftlab.requests.served import FinishedRequest, Request
from graftlab.requests.unpickling import PickleReader, PickleReadError

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


def read(value: Any, protocol: int = pickle.HIGHEST_PROTOCOL) -> Any:
    return PickleReader().read(pickle.dumps(value, protocol))


def file_of(path: Path, request: Any, protocol: int = pickle.HIGHEST_PROTOCOL) -> Path:
    """A file as another program may have written it, by plain pickle."""
    path.write_bytes(pickle.dumps({"requests": [(request, None, 1.0, 2.0)]}, protocol))
    return path


# ---- data comes back as it was --------------------------------------------------------------------------------------

keys = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False)
values = st.recursive(
    keys | st.complex_numbers(allow_nan=False) | st.binary().map(bytearray),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.sets(keys)
        | st.frozensets(keys | st.tuples(keys, keys))
    ),
    max_leaves=30,
)


@given(values, st.sampled_from(PROTOCOLS))
def test_builtin_data_of_every_protocol_is_read_as_plain_pickle_reads_it(value: Any, protocol: int) -> None:
    found = read(value, protocol)
    assert found == value
    assert repr(found) == repr(pickle.loads(pickle.dumps(value, protocol)))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", [range(1, 10, 2), slice(1, None, 3), ..., float, {"dtype": int}, 10**5000 % 10**300])
def test_rarer_builtin_data_is_read_too(value: Any, protocol: int) -> None:
    assert read(value, protocol) == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_is_in_several_places_or_in_itself_stays_so(protocol: int) -> None:
    shared = [1]
    loop: list[Any] = [shared, {"again": shared}, bytearray(b"x")]
    loop.append((loop, {"loop": loop}))
    found = read(loop, protocol)
    assert found[0] is found[1]["again"]
    assert found[3][0] is found
    assert found[3][1]["loop"] is found


ARRAYS = [
    np.arange(6, dtype="<f4").reshape(2, 3),
    np.arange(6, dtype=">i8").reshape(3, 2).T,
    np.array(1.5),
    np.empty((0, 3)),
    np.array([True, False]),
    np.array(["a", "bcd"]),
    np.array([b"x", b"yz"]),
    np.array([1, None, {"a": [2]}], dtype=object),
    np.array([[1, None, "a"], [2, {}, "b"]], dtype=object).T,
    np.array(["2020-01-01", "NaT"], dtype="datetime64[D]"),
    np.array([3], dtype="timedelta64[25us]"),
    np.array([(1.5, 2)], dtype=[("a", ">f4"), ("b", "i8")]),
    np.arange(20, dtype=np.float16)[::3],
    np.array([1 + 2j]),
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("index", range(len(ARRAYS)))
def test_numpy_arrays_come_back(index: int, protocol: int) -> None:
    value = ARRAYS[index]
    first, second = read([value, value], protocol)
    assert first is second
    assert type(first) is np.ndarray
    assert (first.dtype, first.shape) == (value.dtype, value.shape)
    np.testing.assert_array_equal(first, value)
    assert first.flags.writeable


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_numpy_scalars_and_dtypes_come_back(protocol: int) -> None:
    big = np.dtype(">f8")
    found = read([np.float32(1.5), np.int64(-3), big, np.dtype("f8"), np.dtype(">f8"), big], protocol)
    assert found == [1.5, -3, big, np.dtype("f8"), big, big]
    assert type(found[0]) is np.float32


@pytest.mark.parametrize("value", [np.arange(3), np.float32(2)])
@pytest.mark.parametrize("package", [b"numpy.core", b"numpy._core"])
def test_numpy_of_any_version_can_have_written_the_file(value: Any, package: bytes) -> None:
    data = pickle.dumps(value, 2)
    found = PickleReader().read(data.replace(b"numpy._core", package).replace(b"numpy.core", package))
    assert found.tolist() == value.tolist()


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_tensors_that_plain_pickle_wrote_come_back(dtype: torch.dtype, protocol: int) -> None:
    base = torch.arange(12).to(dtype).view(3, 4)
    for value in (base, base.t(), base[1:, ::2], base[0, 0], base[:0], torch.nn.Parameter(torch.ones(2))):
        found = read([value], protocol)[0]
        assert type(found) is torch.Tensor
        assert (found.dtype, found.shape, found.stride()) == (value.dtype, value.shape, value.stride())
        assert torch.equal(found, value)


def test_a_parameter_of_a_file_holds_a_tensor() -> None:
    class Odd:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_parameter, ("no tensor", True, collections.OrderedDict())

    assert type(read(Odd())) is Opaque


def test_what_goes_with_tensors_comes_back() -> None:
    value = [torch.float16, torch.Size([2, 3]), torch.device("cuda", 1)]
    assert read(value) == value


DTYPES = [
    torch.float64,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.uint16,
    torch.int8,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_tensors_of_every_dtype_come_back_bit_by_bit(
    tmp_path: Path, dtype: torch.dtype, trusted: bool
) -> None:
    bits = torch.arange(64, dtype=torch.uint8)
    base = (bits % 2 if dtype == torch.bool else bits).view(dtype).view(2, -1)
    values = [base, base.t(), base[:, 1:], base[0, 0], base[:0], base.expand(3, *base.shape)]
    dumper = RequestDumper(tmp_path)
    dumper.add({"values": values, "grad": torch.ones(2, requires_grad=True)}, None, 1.0, 2.0)
    dumper.close()
    (path,) = tmp_path.iterdir()
    request = load_dump(path, trusted=trusted)["requests"][0].request
    for found, value in zip(request["values"], values, strict=True):
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert found.reshape(-1).view(torch.uint8).tolist() == value.reshape(-1).view(torch.uint8).tolist()
    assert torch.equal(request["grad"], torch.ones(2))


def test_bytes_that_are_no_such_tensor_are_an_error() -> None:
    for arguments in ((b"abc", "float32", (1,)), (b"", "float32", (2,)), (b"abcd", "load", (1,)), (b"a", "nope", (1,))):
        with pytest.raises(ValueError, match=r"."):
            tensor_from_bytes(*arguments)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_kits_own_requests_come_back(protocol: int) -> None:
    request = Request("r", (1, 2), stop_token_ids=(3,))
    finished = FinishedRequest(request, {"text": "", "output_ids": [], "meta_info": {}}, 1.0, 2.0)
    found = read([finished, RecordedRequest({"rid": "a"}, None, 1.0, 2.0)], protocol)
    assert found == [finished, RecordedRequest({"rid": "a"}, None, 1.0, 2.0)]
    assert type(found[1]) is RecordedRequest
    assert read(request, protocol) == request
    opaque = read(Opaque("a.B", (1,), {"x": 2}, [3]), protocol)
    assert vars(opaque) == {"class_name": "a.B", "args": (1,), "state": {"x": 2}, "items": [3]}
    assert vars(read(Opaque("a.B"), protocol)) == {"class_name": "a.B", "args": None, "state": None, "items": []}


@pytest.mark.parametrize(
    ("field", "value"), [("class_name", 1), ("args", [1]), ("args", 0), ("args", ""), ("items", (1,)), ("items", None)]
)
def test_an_opaque_object_of_a_file_has_fields_of_their_own_types(field: str, value: object) -> None:
    odd = Opaque("a.B", (1,), {"x": 2}, [3])
    setattr(odd, field, value)
    with pytest.raises(PickleReadError, match=f"a {type(value).__name__} was not expected"):
        read(odd)


def test_only_torchs_own_names_are_dtypes() -> None:
    assert PickleReader().read(b"ctorch\nfloat32\n.") is torch.float32
    assert isinstance(PickleReader().read(b"celsewhere\nfloat32\n."), Opaque)


def cold(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=60)


@pytest.mark.ranks
@pytest.mark.parametrize("module", ["graftlab.requests.served", "graftlab.engine.request"])
@pytest.mark.parametrize("before", ["", "import graftlab.engine"])
def test_a_file_with_requests_of_the_engine_loads_equally_whatever_was_imported(
    module: str, before: str, tmp_path: Path
) -> None:
    """Also one that was written when they were defined in the engine."""
    data = pickle.dumps({"requests": [(Request("r", (1, 2)), None, 1.0, 2.0), (gl.GraftPlan(), None, 1.0, 2.0)]}, 0)
    (tmp_path / "r.pkl").write_bytes(data.replace(b"graftlab.requests.served", module.encode()))
    code = f"""
import sys
{before}
from graftlab.requests import load_dump
found = load_dump(sys.argv[1])["requests"]
print([(type(each.request).__module__, type(each.request).__name__) for each in found], found[0].request)
"""
    # Without torch, unless the engine imports it anyway.
    ran = (warm.run if before else cold)("-c", code, tmp_path / "r.pkl")
    assert ran.returncode == 0, ran.stderr
    kinds = [("graftlab.requests.served", "Request"), ("graftlab.requests.records", "Opaque")]
    assert ran.stdout == f"{kinds} {Request('r', (1, 2))}\n"


# ---- anything else becomes a placeholder ----------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # As most Pythons do; the first of 3.11 write getattr(Colour, "RED").
        return type(self), (self.value,)


@dataclasses.dataclass
class Foreign:
    rid: str
    ids: list[int]


@dataclasses.dataclass(frozen=True)
class Slotted:
    __slots__ = ("rid",)
    rid: str


class Listed(list):  # type: ignore[type-arg]
    pass


class Mapped(dict):  # type: ignore[type-arg]
    pass


Named = collections.namedtuple("Named", "a b")


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize(
    ("value", "name", "args", "state", "items"),
    [
        (Foreign("r", [1]), "Foreign", (), {"rid": "r", "ids": [1]}, []),
        (Slotted("r"), "Slotted", (), (None, {"rid": "r"}), []),
        (Colour.RED, "Colour", (1,), None, []),
        (Named(1, 2), "Named", (1, 2), None, []),
        (Listed([1, 2]), "Listed", (), None, [1, 2]),
        (Mapped(a=1), "Mapped", (), None, [("a", 1)]),
        (Foreign, "Foreign", None, None, []),
        (collections.OrderedDict(a=1), "collections.OrderedDict", (), None, [("a", 1)]),
        (collections.Counter("a"), "collections.Counter", ({"a": 1},), None, []),
        (datetime.timedelta(1), "datetime.timedelta", (1, 0, 0), None, []),
        (ValueError("no"), "builtins.ValueError", ("no",), None, []),
        (os.getcwd, f"{os.name}.getcwd", None, None, []),
    ],
)
def test_anything_else_becomes_a_placeholder_with_what_the_file_says_about_it(
    value: Any, name: str, args: Any, state: Any, items: Any, protocol: int
) -> None:
    found, again = read([value, value], protocol)
    assert found is again
    assert type(found) is Opaque
    assert found.class_name in (name, f"{__name__}.{name}")
    assert (found.args, found.state, found.items) == (args, state, items)
    assert repr(found) == f"Opaque({found.class_name!r})"


@dataclasses.dataclass(frozen=True, slots=True)
class _Slotted:
    rid: str
    number: int = 0


@dataclasses.dataclass
class _Plain:
    rid: str


def test_fields_are_set_as_a_file_has_them_and_only_by_their_names() -> None:
    for state in (["a", 3], {"rid": "a", "number": 3, "unknown": 5}, (None, {"rid": "a", "number": 3})):
        made = object.__new__(_Slotted)
        rebuilding._fill(made, state)
        assert (made.rid, made.number) == ("a", 3)
        assert not hasattr(made, "unknown")
    plain = object.__new__(_Plain)
    rebuilding._fill(plain, {"rid": "b", "later": 4})
    assert vars(plain) == {"rid": "b", "later": 4}
    for wrong in ({3: "a"}, "rid", ["a", "b"]):
        with pytest.raises((TypeError, ValueError)):
            rebuilding._fill(plain, wrong)


def test_a_dataclass_of_the_kit_that_no_file_holds_is_not_made() -> None:
    # This module has imported it; what a file gives is no matter of that.
    found = read(FillContext(1, 2, 3, 4), 4)
    assert type(found) is Opaque
    assert found.class_name == "graftlab.graphs.slots.FillContext"


@pytest.mark.parametrize("protocol", [0, 1])
def test_old_protocols_name_the_class_as_well(protocol: int) -> None:
    found = read(Foreign("r", [1]), protocol)
    assert found.class_name.endswith(".Foreign")
    assert found.state == {"rid": "r", "ids": [1]}


def test_a_request_of_another_program_keeps_its_id(tmp_path: Path) -> None:
    (record,) = load_dump(file_of(tmp_path / "f", Foreign("abc", [])))["requests"]
    assert isinstance(record.request, Opaque)
    assert record.rid == "abc"


def test_a_class_of_a_missing_module_is_no_obstacle(tmp_path: Path) -> None:
    module = types.ModuleType("nowhere_to_be_found")
    exec("class Thing:\n    def __init__(self):\n        self.rid = 'x'", module.__dict__)
    sys.modules[module.__name__] = module
    try:
        path = file_of(tmp_path / "f", module.Thing())
    finally:
        del sys.modules[module.__name__]
    (record,) = load_dump(path)["requests"]
    assert record.request.class_name == "nowhere_to_be_found.Thing"
    assert record.rid == "x"
    with pytest.raises(DumpError, match=r"plain pickle: ModuleNotFoundError.*nowhere_to_be_found"):
        load_dump(path, trusted=True)


# ---- nothing is imported or called ----------------------------------------------------------------------------------

ran: list[Any] = []


def trap(*args: Any, **kwargs: Any) -> list[Any]:
    ran.append(args)
    return ran


class _Reduces:
    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


class Trapped:
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        trap()
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        trap()

    def append(self, item: Any) -> None:
        trap()

    extend = append

    def __setitem__(self, key: Any, value: Any) -> None:
        trap()

    def __reduce__(self) -> Any:
        new: Any = copyreg.__newobj_ex__  # type: ignore[attr-defined]
        return new, (Trapped, (1,), {"a": 2}), {"b": 3}, iter([4]), iter({5: 6}.items())


def stack_global(module: str, name: str) -> bytes:
    parts = [b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name)]
    return b"".join(parts) + b"\x93"


LONG_RANGE = stack_global("builtins", "range") + b"J\xff\xff\xff\x7f\x85R"

# What a file can say to run something, as the bytes between PROTO and STOP.
HOSTILE: dict[str, bytes] = {
    "os.system": stack_global("os", "system") + b"\x8c\x09touch bad\x85R",
    "posix.system": b"cposix\nsystem\n(S'touch bad'\ntR",
    "eval": stack_global("builtins", "eval") + b"\x8c\x04ran!\x85R",
    "exec": b"c__builtin__\nexec\n(S'raise SystemExit'\ntR",
    "getattr": stack_global("builtins", "getattr") + stack_global("os", "path") + b"\x8c\x08__dict__\x86R",
    "__import__": stack_global("builtins", "__import__") + b"\x8c\x0bantigravity\x85R",
    "open": stack_global("builtins", "open") + b"\x8c\x03bad\x8c\x01w\x86R",
    "dotted name": stack_global("builtins", "dict.fromkeys.__self__") + b")R",
    "dotted into os": stack_global("graftlab.requests.loading", "Path.cwd") + b")R",
    "module of the kit": stack_global("graftlab.demo", "x"),
    "through a module of the kit": stack_global("graftlab.base.shipping", "pickle.loads") + b"C\x02N.\x85R",
    "function of the kit": stack_global("graftlab.base.shipping", "unpack_result") + b"C\x02N.\x85R",
    "class of the kit that is no dataclass": stack_global("graftlab.requests.dump", "RequestDumper")
    + b"\x8c\x03bad\x85R",
    "INST": b"(S'touch bad'\nios\nsystem\n",
    "OBJ": b"(" + stack_global("os", "system") + b"\x8c\x09touch bado",
    "NEWOBJ": stack_global(__name__, "Trapped") + b")\x81",
    "import of a module": stack_global("antigravity", "x"),
    "torch.load": stack_global("torch", "load") + b"\x8c\x03bad\x85R",
    "torch hub": stack_global("torch.hub", "load") + b"\x8c\x03bad\x85R",
    "a module through sys": stack_global("sys", "modules"),
    "list of a range": stack_global("builtins", "list") + LONG_RANGE + b"\x85R",
    "set of a range": stack_global("builtins", "set") + LONG_RANGE + b"\x85R",
    "much memory": stack_global("builtins", "bytearray") + b"J\xff\xff\xff\x7f\x85R",
    "a tensor of no bytes": stack_global("graftlab.requests.pickling", "tensor_from_bytes")
    + b"C\x00\x8c\x07float32J\xff\xff\xff\x7f\x85\x87R",
    "persistent id": b"\x8c\x03badQ",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_cannot_run_anything(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    modules = set(sys.modules)
    ran.clear()
    found = PickleReader().read(b"\x80\x04" + HOSTILE[name] + b".")
    assert type(found) is Opaque
    assert ran == []
    assert list(tmp_path.iterdir()) == []
    assert "antigravity" not in sys.modules
    assert set(sys.modules) == modules


@pytest.mark.parametrize("protocol", range(2, 6))
def test_no_method_of_a_foreign_class_runs(protocol: int) -> None:
    data = pickle.dumps(Trapped(), protocol)
    ran.clear()
    found = PickleReader().read(data)
    assert ran == []
    if protocol >= 4:  # those before say it by functools.partial
        assert found.class_name.endswith(".Trapped")
        assert found.args == (1, {"a": 2})
    assert found.state == {"b": 3}
    assert found.items == [4, (5, 6)]
    pickle.loads(data)
    assert ran, "the trap must work for the test to prove something"


def test_a_reduce_of_any_callable_is_not_called() -> None:
    ran.clear()
    for reduced in ((trap, (1,)), (trap, (), {"state": 1}), (trap, (), None, iter([1])), (print, ("x",))):
        assert type(read(_Reduces(*reduced))) is Opaque
    assert ran == []


@pytest.mark.parametrize("code", [1, 300, 70_000])
@pytest.mark.parametrize("cached", [False, True])
def test_extension_codes_are_not_looked_up(code: int, cached: bool) -> None:
    copyreg.add_extension(__name__, "trap", code)
    try:
        data = pickle.dumps(_Reduces(trap, (1,)), 4)
        assert b"trap" not in data
        if cached:
            pickle.loads(data)
        ran.clear()
        found = PickleReader().read(data)
    finally:
        copyreg.remove_extension(__name__, "trap", code)
    assert ran == []
    assert found.class_name == f"copyreg extension {code}"


def test_a_file_cannot_change_classes_of_this_process() -> None:
    before = dict(vars(Request)), dict(vars(Opaque))
    state = pickle.dumps((None, {"__init__": 1, "rid": 2}), 4)[2:-1]
    for named in (
        stack_global("graftlab.requests.served", "Request"),
        stack_global("graftlab.requests.records", "Opaque"),
    ):
        with pytest.raises(PickleReadError, match="no state"):
            PickleReader().read(b"\x80\x04" + named + state + b"b.")
    assert (dict(vars(Request)), dict(vars(Opaque))) == before


def test_a_storage_that_runs_code_is_not_run(tmp_path: Path) -> None:
    """Plain pickle hands a tensor's storage to torch.load, which runs what is in it."""
    evil = io.BytesIO()
    torch.save(_Reduces(trap, (1,)), evil, _use_new_zipfile_serialization=False)
    ran.clear()
    found = read(_Reduces(torch.storage._load_from_bytes, (evil.getvalue(),)))
    assert ran == []
    assert type(found) is Opaque


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"ctorch\nFloatStorage\n", b"itorch\nFloatStorage\n"),
        (b"X\x07\0\0\0storage", b"X\x07\0\0\0another"),
    ],
    ids=["an opcode", "a word"],
)
def test_a_storage_that_differs_from_what_torch_writes_is_not_read(old: bytes, new: bytes) -> None:
    file = io.BytesIO()
    torch.save(torch.ones(3)._typed_storage(), file, _use_new_zipfile_serialization=False)
    data = file.getvalue()
    assert type(read(_Reduces(torch.storage._load_from_bytes, (data,)))) is torch.TypedStorage
    changed = data.replace(old, new, 1)
    assert changed != data
    for wrong in (changed, data + b"x"):
        assert type(read(_Reduces(torch.storage._load_from_bytes, (wrong,)))) is Opaque


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    ],
    ids=str,
)
def test_a_pickled_tensor_of_each_dtype_comes_back_as_it_was(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1, 2], [3, 4, 120]]).to(dtype)
    found = read(tensor)
    assert found.dtype is dtype
    assert torch.equal(found, tensor)


def test_a_tensor_that_is_lazily_negative_is_not_read_with_the_wrong_sign() -> None:
    tensor = torch.tensor([1.0, 2.0])
    assert torch.equal(read(tensor), tensor)
    assert type(read(torch._neg_view(tensor))) is Opaque


def test_arrays_and_tensors_do_not_reach_outside_of_their_bytes() -> None:
    _reconstruct, scalar = np.ones(1).__reduce__()[0], np.float64(1).__reduce__()[0]
    reduced: list[tuple[Any, ...]] = [
        (_reconstruct, (np.ndarray, (0,), b"b"), (1, (1000,), np.dtype("f8"), False, b"12345678")),
        (_reconstruct, (np.ndarray, (0,), b"b"), (1, (-1,), np.dtype("f8"), False, b"")),
        (_reconstruct, (np.ndarray, (0,), b"b"), (1, (1,), np.dtype("O"), False, b"12345678")),
        (_reconstruct, (np.ndarray, (0,), b"b"), "nonsense"),
        (_reconstruct, (np.ndarray, (0,), b"b"), {}),
        (scalar, (np.dtype("f8"), b"1")),
        (scalar, (np.dtype("O"), b"12345678")),
        (np.dtype, ("f8", False, True), (3, "<", (np.dtype("f4"), (1 << 40,)), None, None, -1, -1, 0)),
        (np.dtype, ("V8", False, True), (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 27)),
    ]
    for case in reduced:
        assert type(read(_Reduces(*case))) is Opaque, case
    tensor = torch.arange(4.0)
    rebuild, arguments = tensor.__reduce_ex__(4)
    for offset, size, stride in [(0, (1 << 40,), (1,)), (4, (1,), (1,)), (-1, (1,), (1,)), (0, (2,), (1 << 60,))]:
        assert type(read(_Reduces(rebuild, (arguments[0], offset, size, stride, *arguments[4:])))) is Opaque


def test_a_tensor_may_show_its_numbers_again_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebuilding, "_LARGEST_VIEW", 4)
    numbers = torch.arange(6.0)
    for tensor in (numbers, numbers.reshape(2, 3), numbers[:2].clone().expand(2, 2)):
        assert torch.equal(read(tensor), tensor)
    assert type(read(numbers[:1].clone().expand(5))) is Opaque


def test_trusted_is_plain_pickle(tmp_path: Path) -> None:
    ran.clear()
    path = file_of(tmp_path / "f", [Foreign("r", [1]), _Reduces(trap, (1,))])
    (record,) = load_dump(path, trusted=True)["requests"]
    assert record.request[0] == Foreign("r", [1])
    assert len(ran) == 1


# ---- damaged and foreign files --------------------------------------------------------------------------------------


def test_a_truncated_file_reports_how_far_it_is_readable_and_yields_that_part(tmp_path: Path) -> None:
    dumper = RequestDumper(tmp_path / "dumps", server_args={"requests": ["misleading"]})
    for index in range(8):
        dumper.add({"rid": f"r{index}", "ids": list(range(10)), "t": torch.ones(2)}, {"text": "x"}, 1.0, 2.0)
    dumper.close()
    (path,) = (tmp_path / "dumps").iterdir()
    data = path.read_bytes()
    cut = tmp_path / "cut.pkl"
    counts = []
    for length in [*range(0, len(data), 3), len(data) - 1]:
        cut.write_bytes(data[:length])
        with pytest.raises(DumpError) as caught:
            load_dump(cut)
        error = caught.value
        assert error.offset is not None
        assert error.offset <= length
        assert [record.rid for record in error.requests] == [f"r{index}" for index in range(len(error.requests))]
        assert f"byte {error.offset} of {length}" in str(error)
        assert f"with {counted(len(error.requests), 'whole request')} before it" in str(error)
        counts.append(len(error.requests))
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 8)
    assert set(counts) == set(range(9))


@pytest.mark.parametrize("requests", [5, None, 2.5, "text", {"a": 1}], ids=repr)
def test_a_truncated_file_of_something_else_is_a_clear_error_too(requests: Any, tmp_path: Path) -> None:
    path = tmp_path / "other.pkl"
    path.write_bytes(pickle.dumps({"requests": requests})[:-1])
    with pytest.raises(DumpError, match="with 0 whole requests before it") as caught:
        load_dump(path)
    assert caught.value.requests == []


def test_a_truncated_file_is_a_clear_error_under_trust_too(tmp_path: Path) -> None:
    path = file_of(tmp_path / "f", {"rid": "a"})
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DumpError, match="readable up to byte") as caught:
        load_dump(path, trusted=True)
    assert caught.value.offset is not None


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "byte 0 of 0"),
        (b"PK\x03\x04 a zip file", "byte 0"),
        (b"\x89PNG\r\n", "byte 6 of 6"),
        (b'{"requests": []}', "byte 0"),
        (b"\x80\x04" + os.urandom(0) + b"\xff\xff", "byte 2"),
        (pickle.dumps([1, 2]), "readable to its end, but .* a list"),
        (pickle.dumps({"a": 1}), "readable to its end, but .*'a'"),
        (pickle.dumps({"requests": 5}), "readable to its end, but"),
        (b"\x80\x04b.", "byte 2"),
        (b"\x80\x04h\x05.", "byte 2.*5"),
        (b"\x80\x04]]s.", "byte 4"),
        (b"\x80\x04}(]K\x01u.", "byte 7"),
        (b"\x80\x04K\x01a.", "byte 4"),
        (b"\x80\x04N)R" + b"R.", "byte"),
        (b"\x80\x04NN\x93.", "byte 4"),
        (b"\x80\x05\x97.", "byte 2"),
    ],
)
def test_a_foreign_file_is_a_clear_error(tmp_path: Path, data: bytes, text: str) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(data)
    for trusted in (False, True):
        with pytest.raises(DumpError, match=text) as caught:
            load_dump(path, trusted=trusted)
        assert str(path) in str(caught.value)


@given(st.binary(max_size=300), st.integers(0, 200))
def test_any_bytes_are_read_or_refused_and_nothing_else(noise: bytes, at: int) -> None:
    data = pickle.dumps({"requests": [({"rid": "a", "t": np.arange(3), "d": Foreign("x", [1])}, {1, 2}, 1.0, 2.0)] * 2})
    for mixed in (noise, data[:at] + noise + data[at + len(noise) :]):
        try:
            with limited():
                PickleReader().read(mixed)
        except PickleReadError as error:
            assert 0 <= error.offset <= len(mixed)  # noqa: PT017


def test_the_requests_of_a_cut_file_are_found_behind_arrays(tmp_path: Path) -> None:
    data = pickle.dumps({"server_args": np.ones(2), "requests": [({"rid": "a"}, {}, 1.0, 2.0)], "more": 1})
    (tmp_path / "cut.pkl").write_bytes(data[:-4])
    with pytest.raises(DumpError) as raised:
        load_dump(tmp_path / "cut.pkl")
    assert [record.rid for record in raised.value.requests] == ["a"]


def test_a_tuple_of_more_than_there_is_is_refused() -> None:
    with pytest.raises(PickleReadError, match="it pops more than it pushed"):
        PickleReader().read(b"\x80\x04N\x86.")


def test_a_missing_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_dump(tmp_path / "nothing")


def test_an_item_that_is_no_record_keeps_its_place(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(pickle.dumps({"requests": [({"rid": "a"}, {}, 2.0, 3.0), "damaged", [1, 2]]}))
    dump = load_dump(path)
    assert dump["requests"] == [({"rid": "a"}, {}, 2.0, 3.0), ("damaged", None, None, None), ([1, 2], None, None, None)]
    assert (dump["server_args"], dump["launch_command"], dump["dropped"]) == (None, "", [])


@pytest.mark.slow
def test_a_file_of_any_depth_does_not_end_the_process() -> None:
    levels = 200_000  # the hash of that many tuples overflows the stack
    deep_list = b"\x80\x04" + b"]" * levels + b"a" * (levels - 1) + b"."
    found = PickleReader().read(deep_list)
    for _ in range(levels - 1):
        (found,) = found
    with pytest.raises(PickleReadError, match="nested tuples"):
        PickleReader().read(b"\x80\x04}" + b")" + b"\x85" * levels + b"Ns.")
    deep_tuple = b")" + b"\x85" * 1000
    for data in (b"\x8f(" + deep_tuple + b"\x90.", b"(" + deep_tuple + b"\x91.", b"(" + deep_tuple + b"Nd."):
        with pytest.raises(PickleReadError, match="nested tuples"):
            PickleReader().read(b"\x80\x04" + data)
    opaque = stack_global("a", "B") + b")R" + (stack_global("a", "B") + b")R") * 20_000 + b"b" * 20_000
    assert repr(PickleReader().read(b"\x80\x04" + opaque + b".")) == "Opaque('a.B')"


@pytest.mark.parametrize("request_", [{"rid": 5}, {}, None, 3, Opaque("a.B"), Opaque("a.B", state=[1]), object()])
def test_a_request_without_an_id_has_none(request_: Any) -> None:
    assert RecordedRequest(request_).rid is None


# ---- tuples of other programs ---------------------------------------------------------------------------------------

REQUEST, RESPONSE = {"text": "a"}, {"text": "b", "output_ids": [1]}


def loaded(tmp_path: Path, *records: Any) -> list[RecordedRequest]:
    path = tmp_path / "r.pkl"
    path.write_bytes(pickle.dumps({"requests": list(records)}))
    return load_dump(path)["requests"]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ((REQUEST, RESPONSE, 12.5, 13.0), (REQUEST, RESPONSE, 12.5, 13.0)),
        ((REQUEST, None, 12.5, None), (REQUEST, None, 12.5, None)),
        ((REQUEST, None, None, 12.5), (REQUEST, None, None, 12.5)),
        ((REQUEST, "text", 12.5, 13), (REQUEST, "text", 12.5, 13)),
        ((REQUEST, True, 12.5, 13), (REQUEST, True, 12.5, 13)),
        ((REQUEST, [RESPONSE], 12.5, 13), (REQUEST, [RESPONSE], 12.5, 13)),
        ((REQUEST, 12.5, RESPONSE, "r1"), ({**REQUEST, "rid": "r1"}, RESPONSE, 12.5, None)),
        (({**REQUEST, "rid": "r1"}, 12.5, RESPONSE, "r1"), ({**REQUEST, "rid": "r1"}, RESPONSE, 12.5, None)),
        ((REQUEST, 12.5, None, "r1"), ({**REQUEST, "rid": "r1"}, None, 12.5, None)),
        ((REQUEST, 12.5, 13.0, RESPONSE), (REQUEST, RESPONSE, 12.5, 13.0)),
        ((REQUEST, 12.5, RESPONSE), (REQUEST, RESPONSE, 12.5, None)),
        ((REQUEST, RESPONSE), (REQUEST, RESPONSE, None, None)),
        ((REQUEST, RESPONSE, 12.5, 13.0, "r1"), ({**REQUEST, "rid": "r1"}, RESPONSE, 12.5, 13.0)),
    ],
)
def test_a_record_is_recognised_by_what_it_holds(
    record: tuple[Any, ...], expected: tuple[Any, ...], tmp_path: Path
) -> None:
    assert loaded(tmp_path, record) == [RecordedRequest(*expected)]


def test_the_id_beside_a_request_of_an_unknown_class_is_kept(tmp_path: Path) -> None:
    (found,) = loaded(tmp_path, (types.SimpleNamespace(text="a"), 12.5, RESPONSE, "r1"))
    assert (found.rid, found.request.state["text"], found.response, found.created) == ("r1", "a", RESPONSE, 12.5)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ((12.5, REQUEST, RESPONSE), r"a tuple of \(float, dict, dict\) does not begin with a request"),
        (("r1", REQUEST, RESPONSE, 12.5, 13.0), r"a tuple of \(str, dict, dict, float, float\) does not begin"),
        ((REQUEST, RESPONSE, {"more": 1}, 12.5), "has 1 times, 0 ids and 2 responses"),
        ((REQUEST, 12.5, 13.0, 14.0), "has 3 times"),
        ((REQUEST, 13.0, 12.5, RESPONSE), "the later one first"),
        ((REQUEST, 12.5, "a", "b"), "2 ids"),
        (({"rid": "x"}, 12.5, RESPONSE, "r1"), "own id is 'x', and the tuple has 'r1'"),
        ((), "does not begin"),
    ],
)
def test_an_unrecognised_record_is_an_error_that_carries_the_other_records(
    record: tuple[Any, ...], why: str, tmp_path: Path
) -> None:
    with pytest.raises(DumpError, match=rf"number 1: .*{why}.* \(1 of 2\); the others") as raised:
        loaded(tmp_path, (REQUEST, RESPONSE, 1.0, 2.0), record)
    assert raised.value.requests == [RecordedRequest(REQUEST, RESPONSE, 1.0, 2.0)]


def test_times_of_no_unit_are_read_too() -> None:
    for value in (np.array(["NaT"], "m8"), np.array([3], "m8"), np.array(["NaT"], "M8"), np.array([3], "m8[5ms]")):
        found = read(value)
        assert found.dtype == value.dtype
        assert found.tolist() == value.tolist()
