"""Folders of arrays that other programs wrote, as one side of a session."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.examples import examples
from kit.limits import limited

import graftlab as gl
from graftlab.__main__ import main
from graftlab.recordings import array_files
from graftlab.recordings.file_format import IndexEnd, StoredTensor, TapEntry, end_of

VALUES = torch.arange(6.0).view(2, 3)


def write(path: Path, arrays: Mapping[str, torch.Tensor]) -> None:
    """Write arrays in the format of the suffix; one alone where the format has no names."""
    if path.suffix == ".npy":
        (array,) = arrays.values()
        np.save(path, array.numpy())
    elif path.suffix == ".npz":
        np.savez(path, **{name: array.numpy() for name, array in arrays.items()})
    elif path.suffix == ".safetensors":
        safetensors.torch.save_file(dict(arrays), path)
    else:
        torch.save(dict(arrays), path)


def taps(folder: Path, pattern: str | None = None, *columns: str) -> list[Any]:
    frame = gl.Recording.from_files(folder, pattern=pattern).frame
    return [tuple(row) for row in frame[[*columns, "name"]].itertuples(index=False)] if columns else [*frame["name"]]


# ---- what is read ---------------------------------------------------------------------------------------------------


def test_each_format_gives_the_arrays_by_their_names(tmp_path: Path) -> None:
    for suffix in (".npz", ".safetensors", ".pt", ".pth"):
        folder = tmp_path / suffix[1:]
        folder.mkdir()
        write(folder / f"dump{suffix}", {"layer.2": VALUES, "layer.10": VALUES + 1})
        recording = gl.Recording.from_files(folder)
        assert recording.frame["name"].tolist() == ["layer.2", "layer.10"], suffix
        assert torch.equal(recording.tensor("layer.10"), VALUES + 1)
        assert taps(folder, "{name}") == ["dump.layer.2", "dump.layer.10"]
    write(tmp_path / "hidden.npy", {"": VALUES})
    assert torch.equal(gl.Recording.open(tmp_path).tensor("hidden"), VALUES)


def test_a_folder_of_arrays_may_be_given_by_the_home_of_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "arrays").mkdir()
    np.save(tmp_path / "arrays" / "x.npy", VALUES.numpy())
    recording = gl.Recording.from_files("~/arrays")
    assert recording.folder == tmp_path / "arrays"
    assert torch.equal(recording.tensor("x"), VALUES)


def test_nested_values_of_a_torch_file_are_named_by_the_way_to_them(tmp_path: Path) -> None:
    torch.save({"layers": [{"out": VALUES}, {"out": VALUES + 1}], "text": "a prompt"}, tmp_path / "dump.pt")
    recording = gl.Recording.from_files(tmp_path)
    assert recording.frame["name"].tolist() == ["layers.0.out", "layers.1.out"]
    assert recording.left_out == ["tap 'text' of dump.pt: it is str, not an array"]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">f4").reshape(2, 3),
        np.asfortranarray(VALUES),
        np.float64(2.0),
        np.zeros((0, 3)),
        np.arange(6)[::-2],
    ],
    ids=["big-endian", "column-major", "scalar", "empty", "reversed"],
)
def test_any_array_of_numpy_comes_back_with_its_values(tmp_path: Path, array: Any) -> None:
    np.save(tmp_path / "x.npy", array)
    found = gl.Recording.from_files(tmp_path).tensor("x")
    assert tuple(found.shape) == np.shape(array)
    assert np.array_equal(found.numpy(), array)


def test_a_dtype_that_torch_lacks_is_left_out_with_the_remedy(tmp_path: Path) -> None:
    write(tmp_path / "a.npy", {"": VALUES})
    np.save(tmp_path / "b.npy", np.zeros(3, dtype="V2"))
    (said,) = gl.Recording.from_files(tmp_path).left_out
    assert said.startswith("tap 'b' of b.npy: its dtype |V2 does not exist in torch")


def test_the_pattern_gives_steps_calls_ranks_order_and_tags(tmp_path: Path) -> None:
    names = ["07.step5.r0.L10.attn.c1", "03.step5.r0.L10.attn.c0", "01.step7.r0.L2.attn.c0", "02.step5.r1.L2.attn.c0"]
    for place, name in enumerate(names):
        write(tmp_path / f"{name}.npy", {"": VALUES + place})
    recording = gl.Recording.from_files(tmp_path, pattern="{index}.step{step}.r{rank}.L{layer}.{name}.c{call}")
    assert recording.world_size == 2
    frame = recording.frame
    assert frame[["rank", "step", "name", "layer"]].values.tolist() == [
        [0, 0, "attn", 10],
        [0, 0, "attn", 10],
        [0, 2, "attn", 2],
        [1, 0, "attn", 2],
    ]
    assert [tensor[0, 0].item() for _, tensor, _ in recording.taps(0)] == [1.0, 0.0, 2.0]


def test_taps_of_one_name_that_differ_in_a_tag_are_no_calls_of_each_other(tmp_path: Path) -> None:
    for layer in range(3):
        write(tmp_path / f"attn_{layer}.npy", {"": VALUES + layer})
    assert taps(tmp_path, "{name}_{layer}", "layer") == [(0, "attn"), (1, "attn"), (2, "attn")]


def test_files_that_differ_in_their_place_alone_are_calls_of_one_tap(tmp_path: Path) -> None:
    for place in (10, 2):
        write(tmp_path / f"{place}-a.npy", {"": VALUES + place})
    side = gl.Recording.from_files(tmp_path, pattern="{index}-{name}")
    assert [(entry.name, tensor[0, 0].item()) for entry, tensor, _ in side.taps(0)] == [("a", 2.0), ("a", 10.0)]


def test_a_folder_travels_to_the_ranks_without_its_arrays(tmp_path: Path) -> None:
    write(tmp_path / "a.npy", {"": torch.zeros(10_000)})
    side = gl.Recording.from_files(tmp_path)
    assert side.tensor("a").numel() == 10_000
    sent = pickle.dumps(side)
    assert len(sent) < 2_000
    assert torch.equal(pickle.loads(sent).tensor("a"), torch.zeros(10_000))


def test_a_file_may_take_eight_times_its_size_in_memory(tmp_path: Path) -> None:
    sizes = []
    for count in (0, 1000):
        (tmp_path / "file").write_bytes(bytes(count))
        with (tmp_path / "file").open("rb", buffering=0) as file:
            sizes.append(array_files.most_bytes(file))
    assert sizes[1] - sizes[0] == 8000
    assert sizes[0] > 0


def test_numbers_in_names_are_ordered_as_numbers(tmp_path: Path) -> None:
    for name in ("block10", "block2", "head"):
        write(tmp_path / f"{name}.npy", {"": VALUES})
    assert taps(tmp_path) == ["block2", "block10", "head"]


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "pattern", "message"),
    [
        (["a"], "step{step}", r"a\.npy does not fit pattern='step\{step\}'"),
        (["a"], "{name", "expected '}' before end of string"),
        (["a"], "{name}{name}", "occurs twice"),
        (["a"], "{name:3}", "is not a field"),
        (["a"], "{side}_{name}", "'side' cannot be a tag"),
        (["a"], "{grad}_{name}", "'grad' cannot be a tag"),
        (["a"], "a", "it has no field"),
        (["a-1", "a-2"], "{name}-{rank}", "has files of ranks up to 2, but none of \\[0\\]"),
        (["a-65535"], "{name}-{rank}", "has files of ranks up to 65535, but none of"),
        (["a-65536"], "{name}-{rank}", r"a-65536\.npy: there is no rank 65536"),
        (["a-1", "a-1000002"], "{name}-{step}", r"a-1000002\.npy is of step 1000002, more than 1,000,000 after"),
        # A call that was not written must not shift those after it to other calls of the other side.
        (["a-0", "a-2"], "{name}-{call}", r"tap 'a' has the calls 0, 2 in a-0\.npy"),
        (["a-0", "b-1"], "{name}-{call}", r"tap 'b' has the calls 1 in b-1\.npy"),
        (["0-a-1", "1-a-0"], "{index}-{name}-{call}", r"tap 'a' has the calls 1, 0 in 0-a-1\.npy"),
        (["a-1", "a-01"], "{name}-{step}", r"both have tap 'a' of the same step and call"),
    ],
)
def test_names_that_do_not_say_which_call_a_file_is_of_are_refused(
    tmp_path: Path, files: list[str], pattern: str, message: str
) -> None:
    for name in files:
        write(tmp_path / f"{name}.npy", {"": VALUES})
    with pytest.raises(gl.RecordingError, match=message):
        gl.Recording.from_files(tmp_path, pattern=pattern)


def test_arrays_of_the_same_name_in_two_files_need_a_pattern(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / f"{name}.npz", {"out": VALUES})
    with pytest.raises(gl.RecordingError, match=r"one\.npz and two\.npz both have tap 'out'"):
        gl.Recording.from_files(tmp_path)
    assert taps(tmp_path, "{name}") == ["one.out", "two.out"]


def test_a_folder_without_arrays_and_one_that_is_absent_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("none")
    with pytest.raises(gl.RecordingError, match=r"has no array files: \.npy"):
        gl.Recording.from_files(tmp_path)
    with pytest.raises(gl.RecordingError, match="absent cannot be read: No such file"):
        gl.Recording.from_files(tmp_path / "absent")
    np.save(tmp_path / "b.npy", np.zeros(3, dtype="V2"))
    np.save(tmp_path / "c.npy", np.zeros(3, dtype="V2"))
    with pytest.raises(gl.RecordingError, match="no array that can be compared: tap 'b'"):
        gl.Recording.from_files(tmp_path)


class Runs:
    """Code that a pickle runs when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("was-run",)


def pickled_npy(folder: Path) -> Path:
    np.save(folder / "bad.npy", np.array([Runs()], dtype=object), allow_pickle=True)
    return folder / "bad.npy"


def pickle_as_npy(folder: Path) -> Path:
    (folder / "bad.npy").write_bytes(pickle.dumps(Runs()))
    return folder / "bad.npy"


def pickled_npz(folder: Path) -> Path:
    np.savez(folder / "bad.npz", x=np.array([Runs()], dtype=object))
    return folder / "bad.npz"


def array_as_npz(folder: Path) -> Path:
    np.save(folder / "bad.npy", VALUES.numpy())
    return (folder / "bad.npy").rename(folder / "bad.npz")


def pickled_pt(folder: Path) -> Path:
    torch.save({"x": Runs()}, folder / "bad.pt")
    return folder / "bad.pt"


def pickle_as_pth(folder: Path) -> Path:
    (folder / "bad.pth").write_bytes(pickle.dumps(Runs(), protocol=2))
    return folder / "bad.pth"


def compressed_pt(folder: Path) -> Path:
    torch.save({"x": torch.zeros(1 << 16)}, folder / "plain")
    with (
        zipfile.ZipFile(folder / "plain") as plain,
        zipfile.ZipFile(folder / "bad.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for part in plain.namelist():
            packed.writestr(part, plain.read(part))
    return folder / "bad.pt"


def huge_header(folder: Path) -> Path:
    np.save(folder / "bad.npy", np.zeros(4))
    content = (folder / "bad.npy").read_bytes()
    (folder / "bad.npy").write_bytes(content.replace(b"(4,), }" + b" " * 12, b"(4000000000000,), }"))
    return folder / "bad.npy"


def huge_safetensors(folder: Path) -> Path:
    header = json.dumps({"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    (folder / "bad.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder / "bad.safetensors"


def truncated(suffix: str) -> Callable[[Path], Path]:
    def fill(folder: Path) -> Path:
        write(folder / f"bad{suffix}", {"x": torch.zeros(1000)})
        os.truncate(folder / f"bad{suffix}", 2000)
        return folder / f"bad{suffix}"

    return fill


def list_of_itself(folder: Path) -> Path:
    within: list[Any] = []
    within.append(within)
    torch.save(within, folder / "bad.pt")
    return folder / "bad.pt"


def many_from_few(folder: Path) -> Path:
    """Lists of two references to one list, 40 deep."""
    value: list[Any] = []
    for _ in range(40):
        value = [value, value]
    torch.save(value, folder / "bad.pt")
    return folder / "bad.pt"


def same_name_twice(folder: Path) -> Path:
    torch.save({"a.b": VALUES, "a": {"b": VALUES}}, folder / "bad.pt")
    return folder / "bad.pt"


def link(folder: Path) -> Path:
    np.save(folder / "elsewhere", VALUES.numpy())
    (folder / "elsewhere.npy").rename(folder / "elsewhere")
    (folder / "bad.npy").symlink_to(folder / "elsewhere")
    return folder / "bad.npy"


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "bad.npz")
    return folder / "bad.npz"


def subfolder(folder: Path) -> Path:
    (folder / "bad.safetensors").mkdir()
    return folder / "bad.safetensors"


@pytest.mark.parametrize(
    "fill",
    [
        pickled_npy, pickle_as_npy, pickled_npz, array_as_npz, pickled_pt, pickle_as_pth, compressed_pt, huge_header,
        *map(truncated, (".npy", ".npz", ".safetensors", ".pt")),
        huge_safetensors, list_of_itself, many_from_few, same_name_twice, link, pipe, subfolder,
    ],
)  # fmt: skip
def test_a_damaged_or_hostile_file_is_refused_by_its_name(
    tmp_path: Path, fill: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(array_files, "_MOST_VALUES", 10_000)
    write(tmp_path / "a.npy", {"": VALUES})
    bad = fill(tmp_path)
    with pytest.raises(gl.RecordingError, match=rf"{bad} is damaged, or has more than arrays and plain data: \S"):
        gl.Recording.from_files(tmp_path)
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize("left", [200, 1000])
def test_a_truncated_file_of_torch_is_called_truncated(tmp_path: Path, left: int) -> None:
    path = tmp_path / "x.pt"
    torch.save(torch.linspace(0, 1, 256), path)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(gl.RecordingError, match=rf"{path} is damaged, or has more than .*: it is truncated: its table"):
        gl.Recording.from_files(tmp_path)


def expanded_pt(folder: Path) -> None:
    """A kilobyte that stands for a GiB."""
    torch.save(torch.ones(1).expand(1 << 28), folder / "x.pt")


def many_expanded_pt(folder: Path) -> None:
    one = torch.ones(1)
    torch.save([one.expand(1 << 24) for _ in range(16)], folder / "x.pt")


def expanded_dump(folder: Path) -> None:
    content = {"value": torch.ones(1).expand(1 << 28), "meta": {}}
    torch.save(content, folder / "step=0___rank=0___dump_index=2___name=x.pt")


def packed_npz(folder: Path) -> None:
    quickly = zipfile.ZipFile(folder / "x.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1)
    with quickly as archive, archive.open("a.npy", "w") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (1 << 28,)})
        for _ in range(1 << 8):
            file.write(bytes(4 << 20))


# What torch's restricted unpickler runs: bytearray(1 << 30).
BYTEARRAY = b"\x80\x02cbuiltins\nbytearray\nJ\x00\x00\x00\x40\x85R."


def bytearray_pt(folder: Path) -> None:
    pickle_of(folder, BYTEARRAY)


def bytearray_old_pt(folder: Path) -> None:
    torch.save(torch.ones(1), folder / "x.pt", _use_new_zipfile_serialization=False)
    parts = pickle.dumps(torch.serialization.MAGIC_NUMBER, 2) + pickle.dumps(torch.serialization.PROTOCOL_VERSION, 2)
    (folder / "x.pt").write_bytes(parts + pickle.dumps({}, 2) + BYTEARRAY + pickle.dumps([], 2))


def pickle_of(folder: Path, data: bytes) -> None:
    torch.save(torch.ones(1), folder / "whole")
    with zipfile.ZipFile(folder / "whole") as whole, zipfile.ZipFile(folder / "x.pt", "w") as archive:
        for part in whole.infolist():
            archive.writestr(part.filename, data if part.filename.endswith(".pkl") else whole.read(part))


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02c" + b"[" * 100_000 + b"\nx\n.",
        b"\x80\x02X" + (100_000).to_bytes(4, "little") + b"[" * 100_000 + b")R.",
    ],
    ids=["a name", "a function"],
)
def test_a_file_whose_refusal_takes_torch_minutes_is_refused_before_it(tmp_path: Path, data: bytes) -> None:
    pickle_of(tmp_path, data)
    with limited(), pytest.raises(gl.RecordingError, match="names of many thousand characters"):
        gl.Recording.from_files(tmp_path)


@pytest.mark.parametrize(
    "fill", [expanded_pt, many_expanded_pt, expanded_dump, packed_npz, bytearray_pt, bytearray_old_pt]
)
def test_a_small_file_cannot_fill_the_memory(tmp_path: Path, fill: Callable[[Path], None]) -> None:
    fill(tmp_path)
    with (
        limited(),
        pytest.raises(gl.RecordingError, match=r"is damaged, or has more than .*(bytes in memory|bytearray)"),
    ):
        gl.Recording.open(tmp_path)


def test_tensors_that_share_memory_and_a_packed_archive_are_read(tmp_path: Path) -> None:
    shared = torch.arange(1000.0)
    torch.save({"a": shared, "b": shared[::2], "c": shared[:1].expand(1000)}, tmp_path / "x.pt")
    torch.save(shared, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    np.savez_compressed(tmp_path / "y.npz", zeros=np.zeros(1 << 20), names=np.array(["bytearray"]))
    recording = gl.Recording.from_files(tmp_path)
    assert torch.equal(recording.tensor("a"), shared)
    assert torch.equal(recording.tensor("b"), shared[::2])
    assert torch.equal(recording.tensor("c"), torch.zeros(1000))
    assert torch.equal(recording.tensor("old"), shared)
    assert recording.tensor("zeros").shape == (1 << 20,)


@pytest.fixture(scope="module")
def whole_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A file of each format, by its suffix."""
    folder = tmp_path_factory.mktemp("whole")
    for suffix in (".npy", ".npz", ".safetensors", ".pt", ".pth"):
        write(folder / f"x{suffix}", {"": VALUES} if suffix == ".npy" else {"x": VALUES})
    torch.save({"x": VALUES}, folder / "x.pth", _use_new_zipfile_serialization=False)
    return {path.suffix: path.read_bytes() for path in folder.iterdir()}


@examples(200)
@given(st.sampled_from([".npy", ".npz", ".safetensors", ".pt", ".pth"]), st.data())
def test_any_damage_of_a_file_of_arrays_is_a_recording_error_that_names_it(
    whole_files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory, suffix: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    written = whole_files[suffix]
    start = data.draw(st.integers(0, len(written)))
    stop = data.draw(st.integers(start, min(len(written), start + 20)))
    inserted = data.draw(st.one_of(st.binary(max_size=12), st.sampled_from([b"[" * 100_000, b"\xff" * 8, b"9" * 50])))
    path = folder / f"x{suffix}"
    path.write_bytes(written[:start] + inserted + written[stop:])
    refused, found = "", []
    with limited():
        try:
            found = [tensor for _, tensor, _ in gl.Recording.from_files(folder).taps(0)]
        except gl.RecordingError as error:
            refused = str(error)
    # One whose arrays all are left out is named by its folder.
    assert all(isinstance(each, torch.Tensor) for each in found) if found else str(folder) in refused


def test_the_end_of_an_index_counts_its_taps_and_all_steps_to_the_last() -> None:
    stored = StoredTensor("x.npy", "", "float32", (2,), 0)
    entries = [TapEntry(step, "x", {}, stored) for step in (0, 3)]
    assert end_of(entries, ["y"]) == IndexEnd(2, 4, ["y"])
    assert end_of([], []) == IndexEnd(0, 1, [])


def test_hidden_files_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "x.npy", {"": VALUES})
    # As a copy from another system leaves them.
    (tmp_path / "._x.npy").write_bytes(b"attributes")
    assert [entry.name for entry, _, _ in gl.Recording.from_files(tmp_path).taps(0)] == ["x"]


def test_a_file_that_changes_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "x.npy", {"": VALUES})
    recording = gl.Recording.from_files(tmp_path)
    write(tmp_path / "x.npy", {"": VALUES + 1})
    with pytest.raises(
        gl.RecordingError, match=r"tap 'x' of step 0 on rank 0: .*x\.npy has changed since it was opened"
    ):
        recording.tensor("x")
    recording = gl.Recording.from_files(tmp_path)
    # What torch has no dtype for.
    np.save(tmp_path / "x.npy", np.zeros(2, "V2"))
    with pytest.raises(gl.RecordingError, match="has changed since it was opened"):
        recording.tensor("x")


# ---- as a side ------------------------------------------------------------------------------------------------------

MODEL = """
import torch
from torch import nn

def load(eps=1e-5):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16, eps=eps), nn.GELU(), nn.Linear(16, 8))

def wrong():
    return load(eps=0.3)

def batch():
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
"""


def write_by_numpy(folder: Path) -> None:
    """What MODEL computes, in float64 and without torch's modules, in other names than the model's."""
    scope: dict[str, Any] = {}
    exec(MODEL, scope)
    weights = {name: value.double().numpy() for name, value in scope["load"]().state_dict().items()}
    x = scope["batch"]().double().numpy()
    fc = x @ weights["0.weight"].T + weights["0.bias"]
    norm = (fc - fc.mean(-1, keepdims=True)) / np.sqrt(fc.var(-1, keepdims=True) + 1e-5)
    act = norm * (1 + torch.erf(torch.from_numpy(norm) / 2**0.5).numpy()) / 2
    logits = act @ weights["3.weight"].T + weights["3.bias"]
    for index, (name, value) in enumerate({"tokens": x, "fc": fc, "norm": norm, "act": act, "logits": logits}.items()):
        np.save(folder / f"{index}_{name}.npy", value.astype(np.float32))


@pytest.mark.ranks
def test_a_folder_of_arrays_is_compared_with_a_model_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump = tmp_path / "dump"
    dump.mkdir()
    write_by_numpy(dump)
    model = tmp_path / "model.py"
    model.write_text(MODEL)

    def compared(function: str) -> Any:
        words = [
            str(dump),
            f"{model}:{function}",
            "--inputs",
            f"{model}:batch",
            "--pattern",
            "{index}_{name}",
            "--json",
        ]
        code = main(["compare", *words, "--folder", str(tmp_path / f"run-{function}")])
        answer = json.loads(capsys.readouterr().out)
        assert answer["exit_code"] == code
        return answer

    found = compared("wrong")
    assert (found["answer"], found["named"]) == ("differ", ["norm"])
    # The values in the middle agree, and clear nothing.
    (dump / "4_logits.npy").unlink()
    found = compared("load")
    assert found["answer"] == "inconclusive"
    assert found["text"].startswith("The output was not compared")
