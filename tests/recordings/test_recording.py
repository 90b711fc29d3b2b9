"""A recording returns every tensor bit by bit, and names the tap of what is damaged, truncated or left out."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.examples import examples
from kit.grafters import become_rank
from kit.limits import limited
from kit.mailboxes import MIB
from kit.refusals import exactly

import graftlab as gl
from graftlab.base.tensor_bytes import as_bytes
from graftlab.grafting import decisions
from graftlab.layouts import Layout, Mesh, parse_layout
from graftlab.recordings import tensor_file, writer
from graftlab.recordings.file_format import ChecksumChain, IndexLine, StoredLayout, TapEntry
from graftlab.recordings.recorded_side import _layout_of
from graftlab.taps import calls

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16]


def index_of(folder: Path) -> Path:
    return folder / "rank-00000" / "index.jsonl"


def record_two_steps(folder: Path) -> None:
    with gl.record(folder, filter="name != 'secret'"):
        for step in range(2):
            for layer in range(2):
                gl.tap("hidden", torch.full((3,), 10.0 * step + layer), layer=layer)
            gl.tap("secret", torch.ones(1))
            gl.step()


def test_taps_come_back_with_their_tags_and_steps(tmp_path: Path) -> None:
    record_two_steps(tmp_path)
    recording = gl.Recording(tmp_path)
    assert recording.frame[["step", "name", "layer"]].values.tolist() == [
        [step, "hidden", layer] for step in range(2) for layer in range(2)
    ]
    assert torch.equal(recording.tensor("hidden", step=1, layer=1), torch.full((3,), 11.0))
    assert recording.left_out == []
    for rank in (1, -1):
        with pytest.raises(gl.RecordingError, match=f"is of 1 rank, and has no rank {rank}"):
            recording.tensor("hidden", rank=rank)
    with pytest.raises(gl.RecordingError, match="no tap 'hidden', layer=1 of step 2 was recorded on rank 0"):
        recording.tensor("hidden", step=2, layer=1)
    # Readable by anybody.
    plain = safetensors.torch.load_file(tmp_path / "rank-00000" / "000000.safetensors")
    first = json.loads(index_of(tmp_path).read_text().splitlines()[0])
    assert torch.equal(plain[first["tensor"]["key"]], torch.zeros(3))
    assert gl.here() is None


@examples(25)
@given(st.sampled_from(DTYPES), st.sampled_from([(), (0,), (3,), (2, 0, 3), (4, 5)]), st.booleans())
def test_every_dtype_and_shape_comes_back_bit_by_bit(
    tmp_path_factory: pytest.TempPathFactory, dtype: torch.dtype, shape: tuple[int, ...], transposed: bool
) -> None:
    folder = tmp_path_factory.mktemp("recording")
    size = int(torch.Size(shape).numel()) * dtype.itemsize
    value = torch.randint(0, 2, (size,), dtype=torch.uint8).view(dtype).view(shape)
    if transposed:
        value = value.permute(list(reversed(range(value.dim()))))
    with gl.record(folder):
        gl.tap("x", value)
    found = gl.Recording(folder).tensor("x")
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert torch.equal(as_bytes(found), as_bytes(value))


def test_the_tensor_is_recorded_as_it_was_at_the_tap(tmp_path: Path) -> None:
    x = torch.ones(4)
    with gl.record(tmp_path):
        gl.tap("x", x, extras={"rids": torch.arange(2), "phase": "decode"})
        x.zero_()
    recording = gl.Recording(tmp_path)
    ((_, tensor, extras),) = recording.taps(0)
    assert torch.equal(tensor, torch.ones(4))
    assert extras["phase"] == "decode"
    assert torch.equal(extras["rids"], torch.arange(2))


@pytest.mark.parametrize(
    ("extras", "why"),
    [
        ({"object": object()}, "they are not plain data"),
        # JSON has no tuples, and no keys but texts.
        ({"lens": (3, 4)}, "JSON does not return them unchanged"),
        ({0: 3}, "JSON does not return them unchanged"),
    ],
)
def test_extras_that_cannot_come_back_are_left_out_with_a_warning(tmp_path: Path, extras: Any, why: str) -> None:
    with gl.record(tmp_path), pytest.warns(gl.GraftWarning, match=f"not recorded: extras of tap 'x': {why}"):
        gl.tap("x", torch.ones(1), extras=extras)
    recording = gl.Recording(tmp_path)
    assert recording.left_out[0].startswith(f"extras of tap 'x': {why}")
    assert [found for _, _, found in recording.taps(0)] == [None]


def test_taps_whose_names_or_tags_json_lacks_are_left_out_and_others_stay(tmp_path: Path) -> None:
    def job() -> None:
        with gl.record(tmp_path):
            gl.tap("half \ud800", torch.ones(1))
            gl.tap("x", torch.ones(1), text="half \ud800")
            gl.tap("y", torch.ones(1), seed=1 << 80)

    with pytest.warns(gl.GraftWarning, match="cannot be written as JSON") as said:
        job()
    assert len(said) == 2
    recording = gl.Recording(tmp_path)
    assert recording.frame[["name", "seed"]].values.tolist() == [["y", 1 << 80]]
    assert [each.partition(":")[0] for each in recording.left_out] == ["tap 'half \\ud800'", "tap 'x'"]


def test_what_checkpointing_computes_again_is_recorded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gl.record(tmp_path):
        gl.tap("x", torch.ones(2))
        monkeypatch.setattr(decisions, "recompute_status", lambda: "recompute")
        with pytest.warns(gl.GraftWarning, match="backward pass recomputes the forward pass"):
            gl.tap("x", torch.ones(2))
    assert gl.Recording(tmp_path).frame["name"].tolist() == ["x"]


def test_a_taps_own_tag_is_recorded_rather_than_that_of_a_block_around_it(tmp_path: Path) -> None:
    with gl.record(tmp_path), gl.tags(layer=1, head=5):
        gl.tap("h", torch.ones(1), layer=2)
    assert gl.Recording(tmp_path).frame[["layer", "head"]].values.tolist() == [[2, 5]]


def test_a_recording_inside_a_recording_is_refused(tmp_path: Path) -> None:
    with gl.record(tmp_path / "outer"):
        with (
            pytest.raises(
                gl.RecordingError, match=exactly("this process is already recording; end that recording first")
            ),
            gl.record(tmp_path / "inner"),
        ):
            pass
        gl.tap("x", torch.ones(1))
    assert len(gl.Recording(tmp_path / "outer").frame) == 1
    assert not (tmp_path / "inner").exists()


def test_taps_in_a_session_still_reach_it_while_they_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grafter = become_rank(monkeypatch, "target")
    monkeypatch.setattr(grafter, "may_take", lambda path: path == "seen")
    taken: list[Any] = []
    monkeypatch.setattr(grafter, "tap", lambda *given: taken.append(given) or given[-1])
    with gl.record(tmp_path / "recording", filter="name == 'recorded'"):
        recorder = calls.grafter()
        assert recorder is not None
        assert [recorder.may_take(path) for path in ("recorded", "seen", "other")] == [True, True, False]
        # A run of the session is a new moment too.
        before, step = recorder.moment, grafter.next_step
        monkeypatch.setattr(type(grafter), "moment", property(lambda _: "next run"), raising=False)
        assert recorder.moment != before
        gl.step()
        assert grafter.next_step == step + 1
        value = torch.ones(1)
        assert [recorder.tap("recorded", value, None, {}, each) for each in (True, False)] == [True, False]
    assert taken == [("recorded", value, None, {}, True), ("recorded", value, None, {}, False)]
    assert calls.grafter() is grafter
    # Its ranks are those of the session.
    assert msgspec.json.decode((tmp_path / "recording" / "rank-00000" / "rank.json").read_bytes())["side"] == "target"


def record_ranks(monkeypatch: pytest.MonkeyPatch, folder: Path, size: int, **tap: Any) -> None:
    """As a job's processes would, one after another."""
    monkeypatch.setenv("WORLD_SIZE", str(size))
    for rank in range(size):
        monkeypatch.setenv("RANK", str(rank))
        with gl.record(folder):
            gl.tap("x", torch.ones(2), **tap)


@pytest.mark.parametrize(
    ("layout", "mesh"),
    [
        ("s[cp] h[tp]", [("cp", 2), ("tp", 2)]),
        # Its ranks are in another order than the sizes alone would say.
        ("s[tp] h[cp]", None),
    ],
)
def test_the_sizes_of_a_layouts_axes_are_recorded_where_they_suffice(
    layout: str, mesh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAFTLAB_MESH", "cp=2, tp=2")
    record_ranks(monkeypatch, tmp_path, 4, layout=layout)
    lines = [msgspec.json.decode(index_of(tmp_path).read_bytes().splitlines()[0])]
    assert [line["layout"] for line in lines] == [{"text": layout, "mesh": mesh and [*map(list, mesh)]}]


def test_a_layout_that_is_an_object_is_recorded_with_its_mesh_and_read_again(tmp_path: Path) -> None:
    layout = parse_layout("shard(dim=0, mesh='tp')", mesh={"tp": 2})
    swapped = Layout(layout.steps, Mesh((("tp", 2),), (1, 0)))
    with gl.record(tmp_path):
        gl.tap("x", torch.ones(2), layout=layout)
        with pytest.warns(gl.GraftWarning, match="not recorded: the layout of tap 'y': .* cannot be written as text"):
            gl.tap("y", torch.ones(2), layout=swapped)
        gl.tap("z", torch.ones(2))
    [(entries, _)] = gl.Recording(tmp_path)._ranks
    assert [_layout_of(entry) for entry in entries] == [layout, None, None]
    lost = msgspec.structs.replace(entries[0], layout=StoredLayout("shard(dim=0", [("tp", 2)]))
    with pytest.raises(gl.RecordingError, match="has a layout that cannot be read"):
        _layout_of(lost)


def test_a_recording_of_many_bytes_is_in_several_files_each_with_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_SHARD", 24)
    record_two_steps(tmp_path)
    files = sorted((tmp_path / "rank-00000").glob("*.safetensors"))
    assert [len(safetensors.torch.load_file(each)) for each in files] == [2, 2]
    assert [tensor[0].item() for _, tensor, _ in gl.Recording(tmp_path).taps(0)] == [0.0, 1.0, 10.0, 11.0]


def test_the_bytes_of_a_tap_include_those_of_its_extras() -> None:
    assert writer.PendingTap(0, "h", {}, torch.zeros(4), extra_tensors={"ids": torch.zeros(2)}).nbytes == 24


def test_a_truncated_recording_is_opened_in_part_by_any_of_its_names(tmp_path: Path) -> None:
    record_two_steps(tmp_path)
    index = index_of(tmp_path)
    index.write_text("".join(f"{line}\n" for line in index.read_text().splitlines()[:3]))
    assert len(gl.Recording.open(tmp_path, partial=True).frame) == 3


def test_a_file_of_tensors_with_a_header_beyond_any_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_two_steps(tmp_path)
    monkeypatch.setattr(tensor_file, "_LONGEST_HEADER", 50)
    path = tmp_path / "rank-00000" / "000000.safetensors"
    with path.open("rb", buffering=0) as file, pytest.raises(ValueError, match="cut short or not safetensors"):
        tensor_file.tensor_places(file)


@pytest.mark.filterwarnings("ignore::graftlab.GraftWarning")
def test_what_every_rank_left_out_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_ranks(monkeypatch, tmp_path, 2, extras={"lens": (3, 4)})
    assert len(gl.Recording(tmp_path).left_out) == 1


def test_ranks_of_jobs_of_different_sizes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_ranks(monkeypatch, tmp_path, 2)
    header = tmp_path / "rank-00001" / "rank.json"
    header.write_text(header.read_text().replace('"world_size":2', '"world_size":3'))
    with pytest.raises(gl.RecordingError, match="its ranks are of different recordings"):
        gl.Recording(tmp_path)


def test_a_partial_recording_is_still_one_on_a_rank(tmp_path: Path) -> None:
    record_two_steps(tmp_path)
    index = index_of(tmp_path)
    index.write_text("".join(f"{line}\n" for line in index.read_text().splitlines()[:3]))
    recording = pickle.loads(pickle.dumps(gl.Recording(tmp_path, partial=True)))
    assert len(list(recording.taps(0))) == 3


def test_a_recording_without_taps_warns_and_is_no_baseline_of_a_comparison(tmp_path: Path) -> None:
    with pytest.warns(gl.GraftWarning, match="nothing was recorded"), gl.record(tmp_path, filter="name == 'other'"):
        gl.tap("x", torch.ones(1))
    with pytest.raises(gl.RecordingError, match=r"0 taps, .* has nothing to compare with"):
        gl.compare(tmp_path, torch.nn.Identity, torch.ones(1))


def test_a_changed_tensor_names_its_tap(tmp_path: Path) -> None:
    record_two_steps(tmp_path)
    path = tmp_path / "rank-00000" / "000000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(gl.RecordingError, match=r"tap 'hidden', layer=1 of step 1 on rank 0: .* have changed"):
        list(gl.Recording(tmp_path).taps(0))


def test_a_truncated_file_names_the_tap(tmp_path: Path) -> None:
    record_two_steps(tmp_path)
    path = tmp_path / "rank-00000" / "000000.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(gl.RecordingError, match=r"tap 'hidden', layer=0 of step 0 on rank 0 cannot be read"):
        gl.Recording(tmp_path).tensor("hidden")


def test_large_tensors_use_memory_again_only_when_no_tensor_is_in_it(tmp_path: Path) -> None:
    size = 2 * MIB  # of float32
    with gl.record(tmp_path):
        for layer in range(6):
            gl.tap("hidden", torch.full((size,), float(layer)), layer=layer)
    recording = gl.Recording(tmp_path)
    kept = recording.tensor("hidden", layer=0)[1:3]  # a view alone
    places = set()
    for entry, tensor, _ in recording.taps(0):
        assert tensor.eq(entry.tags["layer"]).all()
        places.add(tensor.untyped_storage().data_ptr())
    # One for the tensor, and one for that before it.
    assert len(places) == 2
    assert kept.untyped_storage().data_ptr() not in places
    assert kept.tolist() == [0.0, 0.0]
    every = [tensor for _, tensor, _ in recording.taps(0)]
    assert [tensor[0].item() for tensor in every] == [0, 1, 2, 3, 4, 5]


def test_a_file_that_is_truncated_while_it_is_read_is_a_recording_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gl.record(tmp_path):
        gl.tap("hidden", torch.arange(1000.0))
    path = tmp_path / "rank-00000" / "000000.safetensors"
    recording = gl.Recording(tmp_path)
    recording.tensor("hidden")
    monkeypatch.setattr(tensor_file, "_PIECE", 1024)
    read = os.preadv

    def truncates(descriptor: int, memory: Any, start: int) -> int:
        count = read(descriptor, memory, start)
        os.truncate(path, 2000)
        return count

    monkeypatch.setattr(os, "preadv", truncates)
    with pytest.raises(gl.RecordingError, match=r"tap 'hidden' of step 0 on rank 0 cannot .* cut short to 2,000 bytes"):
        recording.tensor("hidden")


def test_a_tensor_that_was_read_does_not_need_its_file_any_longer(tmp_path: Path) -> None:
    value = torch.arange(1 << 18)
    with gl.record(tmp_path / "recorded"):
        gl.tap("hidden", value)
    arrays = tmp_path / "arrays"
    arrays.mkdir()
    safetensors.torch.save_file({"hidden": value}, arrays / "all.safetensors")
    found = [gl.Recording.open(folder).tensor("hidden") for folder in (tmp_path / "recorded", arrays)]
    for path in tmp_path.rglob("*.safetensors"):
        # A mapped file would now end this process.
        os.truncate(path, 0)
    assert all(torch.equal(each, value) for each in found)


@pytest.mark.parametrize("count", [1024, 3000, 4096, 10_001])
def test_parts_of_a_tensor_are_read_and_checked_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(3))
    monkeypatch.setattr(tensor_file, "_PIECE", 256)
    monkeypatch.setattr(tensor_file, "_PART", 512)
    value = torch.randint(0, 256, (count,), dtype=torch.uint8)
    with gl.record(tmp_path):
        gl.tap("hidden", value)
    assert torch.equal(gl.Recording(tmp_path).tensor("hidden"), value)
    path = tmp_path / "rank-00000" / "000000.safetensors"
    written = path.read_bytes()
    for at in (0, count // 2, count - 1):
        data = bytearray(written)
        data[len(data) - count + at] ^= 1
        path.write_bytes(data)
        with pytest.raises(gl.RecordingError, match="have changed since it was recorded"):
            gl.Recording(tmp_path).tensor("hidden")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda lines: lines[:-1], r"is truncated: the last complete tap is tap 'hidden', layer=1 of step 1"),
        (lambda lines: [*lines[:1], *lines[2:]], r"line 2: tap 'hidden', layer=0 of step 1 is not what was recorded"),
        (lambda lines: [lines[1], lines[0], *lines[2:]], r"line 1: tap 'hidden', layer=1 of step 0 is not what was"),
        (lambda lines: [lines[0].replace('"layer":0', '"layer":1'), *lines[1:]], r"line 1: tap 'hidden', layer=1 of"),
        (lambda lines: [*lines[:3], lines[2], lines[4]], r"line 4: tap 'hidden', layer=0 of step 1 is not what was"),
        (lambda lines: [*lines[:4], lines[4].replace('"steps":3', '"steps":2')], r"line 5: the end is not what was"),
        (
            lambda lines: [_without_checksum(lines[0]), *lines[1:]],
            r"line 1: tap 'hidden', layer=0 of step 0 is not what",
        ),
        (lambda lines: [_without_checksum(line) for line in lines], r"line 1: tap 'hidden', layer=0 of step 0 is not"),
        (lambda lines: ["{}", *lines], r"line 1: this is not a tap"),
        (lambda lines: [*lines, lines[0]], r"line 6: the index continues after its end"),
    ],
)
def test_a_truncated_or_edited_index_is_refused(tmp_path: Path, edit: Any, message: str) -> None:
    record_two_steps(tmp_path)
    index = index_of(tmp_path)
    index.write_text("".join(f"{line}\n" for line in edit(index.read_text().splitlines())))
    with pytest.raises(gl.RecordingError, match=message):
        gl.Recording(tmp_path)


def _without_checksum(line: str) -> str:
    return line.rpartition(',"check"')[0] + "}"


def test_recordings_of_the_first_releases_without_checksums_can_be_read(tmp_path: Path) -> None:
    record_two_steps(tmp_path)
    header = tmp_path / "rank-00000" / "rank.json"
    header.write_text(header.read_text().replace('"format":2', '"format":1'))
    index = index_of(tmp_path)
    lines = [_without_checksum(line) for line in index.read_text().splitlines()]
    index.write_text("".join(f"{line}\n" for line in lines))
    assert len(list(gl.Recording(tmp_path).taps(0))) == 4
    index.write_text("".join(f"{line}\n" for line in [*lines[:1], *lines[2:]]))
    with pytest.raises(gl.RecordingError, match=r"should have 4 taps and has 3; it was edited"):
        gl.Recording(tmp_path)


def test_a_truncated_recording_can_be_used_up_to_its_last_whole_tap(tmp_path: Path) -> None:
    record_two_steps(tmp_path)
    index = index_of(tmp_path)
    index.write_text("".join(f"{line}\n" for line in index.read_text().splitlines()[:3]))
    recording = gl.Recording(tmp_path, partial=True)
    assert len(recording.frame) == 3
    assert recording.left_out == ["the taps after its truncation"]


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    record_two_steps(tmp_path)
    path = tmp_path / "rank-00000" / "rank.json"
    path.write_text(path.read_text().replace('"world_size":1', '"world_size":2'))
    with pytest.raises(gl.RecordingError, match=r"rank-00001/rank.json cannot be read"):
        gl.Recording(tmp_path)
    path.write_text(path.read_text().replace('"world_size":2', '"world_size":0'))
    with pytest.raises(gl.RecordingError, match=r"rank 0 of 0"):
        gl.Recording(tmp_path)


def test_an_edited_header_and_ranks_of_two_recordings_are_refused(tmp_path: Path) -> None:
    record_two_steps(tmp_path)
    path = tmp_path / "rank-00000" / "rank.json"
    header = path.read_text()
    path.write_text(header.replace("baseline", "target"))
    with pytest.raises(gl.RecordingError, match=r"line 1: tap 'hidden'.* or rank.json was edited"):
        gl.Recording(tmp_path)
    path.write_text(header)
    (tmp_path / "rank-00001").mkdir()
    with pytest.raises(gl.RecordingError, match=r"is of 1 rank by its rank.json, but has a folder of rank 1"):
        gl.Recording(tmp_path)


def test_a_header_of_a_later_format_or_of_another_rank_is_refused(tmp_path: Path) -> None:
    record_two_steps(tmp_path)
    path = tmp_path / "rank-00000" / "rank.json"
    header = path.read_text()
    path.write_text(header.replace('"format":2', '"format":99'))
    with pytest.raises(gl.RecordingError, match="is of format 99 and rank 0 of 1, not of format 2 and rank 0"):
        gl.Recording(tmp_path)
    path.write_text(header.replace('"rank":0', '"rank":1').replace('"world_size":1', '"world_size":2'))
    with pytest.raises(gl.RecordingError, match="is of format 2 and rank 1 of 2, not of format 2 and rank 0"):
        gl.Recording(tmp_path)


def test_a_folder_that_cannot_be_written_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(gl.RecordingError, match=r"cannot record to .*file: .*Not a directory"),
        gl.record(tmp_path / "file"),
    ):
        pass


def test_a_folder_is_recorded_to_once(tmp_path: Path) -> None:
    record_two_steps(tmp_path)
    with pytest.raises(gl.RecordingError, match="already has a recording of rank 0"), gl.record(tmp_path):
        pass
    assert gl.tap("x", 1) == 1


@pytest.mark.parametrize("shard", [1, writer._SHARD], ids=["in between", "at the end"])
@pytest.mark.parametrize("problem", [OSError(errno.ENOSPC, "full"), RuntimeError("No space left on device")])
def test_a_full_disk_ends_the_recording_and_not_the_job(
    problem: Exception, shard: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: object, path: Path) -> None:
        raise problem

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    monkeypatch.setattr(writer, "_SHARD", shard)

    def job() -> None:
        with gl.record(tmp_path):
            for _ in range(100):
                assert gl.tap("x", torch.ones(1 << 10)).sum() == 1 << 10

    with pytest.warns(gl.GraftWarning, match="the recording ended: .*No space left on device") as said:
        job()
    assert sum("ended" in str(each.message) for each in said) == 1
    with pytest.raises(gl.RecordingError, match="is truncated: it has no complete tap"):
        gl.Recording(tmp_path)


@pytest.mark.parametrize(("number", "taken"), [(errno.EDQUOT, False), (errno.EINVAL, True)])
def test_a_disk_that_reports_being_full_only_at_sync_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, taken: bool
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fdatasync", refuse)
    if taken:
        # A file system that has no such call.
        record_two_steps(tmp_path)
        assert len(gl.Recording(tmp_path).frame)
        return
    with pytest.warns(gl.GraftWarning, match="the recording ended: .*quota"):
        record_two_steps(tmp_path)
    with pytest.raises(gl.RecordingError, match="is truncated"):
        gl.Recording(tmp_path)


def test_the_bytes_that_wait_for_the_disk_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    put = writer.RecordingWriter.put

    def watched(self: writer.RecordingWriter, taken: writer.PendingTap) -> None:
        nonlocal most
        put(self, taken)
        most = max(most, self._waiting)

    monkeypatch.setattr(writer.RecordingWriter, "put", watched)
    monkeypatch.setattr(writer, "_WAITING", 10_000)
    with gl.record(tmp_path):
        for number in range(50):
            gl.tap("x", torch.full((1_000,), float(number)))
    assert 0 < most <= 10_000
    assert len(gl.Recording(tmp_path).frame) == 50


def chain(faults: dict[str, float]) -> None:
    x = torch.arange(1.0, 9.0)
    for name in "abc":
        x = gl.tap(name, torch.sin(x) * faults.get(name, 1.0))


def test_a_replay_makes_the_steps_and_taps_of_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gl.record(tmp_path):
        gl.step()
        gl.tap("x", torch.ones(2), extras={"ids": torch.arange(2), "note": "a"}, layout="same", layer=3)
        gl.step()
        gl.step()
        gl.tap("x", torch.zeros(2), layer=4)
    recording = gl.Recording(tmp_path)
    with pytest.raises(
        gl.RecordingError,
        match=exactly("a recording replays its taps on a rank of a session: session.run(recording, f)"),
    ):
        recording()
    grafter, shown = become_rank(monkeypatch, "baseline"), list[Any]()

    def tap(name: str, value: Any, extras: Any = None, layout: Any = None, **tags: Any) -> None:
        shown.append((grafter.next_step, name, value.tolist(), extras, layout, tags))

    monkeypatch.setattr(calls, "tap", tap)
    patience = Mock(side_effect=contextlib.nullcontext)
    monkeypatch.setattr(grafter, "patiently", patience, raising=False)
    assert recording("for the other side", other=1) == 2
    # It is ahead of a side that computes.
    patience.assert_called_once_with()
    (first, second), (_, _, _, extras, layout, _) = shown, shown[0]
    assert (first[:3], first[5]) == ((1, "x", [1.0, 1.0]), {"layer": 3})
    assert extras["ids"].tolist() == [0, 1]
    assert (extras["note"], layout) == ("a", "same")
    assert second == (3, "x", [0.0, 0.0], None, None, {"layer": 4})
    recording.world_size = 2
    with pytest.raises(gl.RecordingError, match=r"recorded on 2 ranks, but this side has 1; launch it with gl\.launch"):
        recording()


@pytest.mark.ranks
def test_one_recording_serves_targets_as_a_live_baseline_does(tmp_path: Path) -> None:
    def baseline() -> None:
        for step in range(2):
            gl.tap("hidden", torch.arange(8.0) + step, layer=3)
            gl.step()

    def target(scale: float) -> float:
        me = gl.here()
        assert me is not None
        total = 0.0
        for step in range(2):
            x = ((torch.arange(8.0) + step) * scale).chunk(me.world_size)[me.rank].clone()
            total += gl.tap("hidden", x, layer=3).sum().item()
            gl.step()
        return total

    with gl.record(tmp_path / "recorded"):
        baseline()
    columns = ["step", "name", "layer", "side", "rank", "status", "senders", "rel_l2", "aligned_by"]
    with gl.launch(baseline=1, target=2) as live:
        run = live.run(baseline, lambda: target(1.25))
        expected = run.frame[columns]
    with gl.launch(baseline=gl.Recording(tmp_path / "recorded"), target=2) as session:
        for number, scale in enumerate((1.25, 1.0)):
            run = session.run(target=lambda scale=scale: target(scale))
            assert run.baseline == [2]
            found = run.frame[columns].assign(step=run.frame["step"] - run.first_step)
            if number == 0:
                assert found.equals(expected)
            else:
                assert set(found["rel_l2"]) == {0.0}
        session.edit(b2t="layer == 3")
        run = session.run(target=lambda: target(1.25))
        assert sum(run.target) == pytest.approx(28.0 + 36.0)
        assert not any("recording" in said for said in run.summary)
        # What comes after a graft into it would seem to say that the graft cures nothing.
        session.edit(b2t=None, t2b="layer == 3")
        with pytest.warns(gl.GraftWarning, match="t2b grafts into the baseline, which is a recording"):
            run = session.run(target=lambda: target(1.25))
        assert run.summary[0].startswith("t2b grafts into the baseline, which is a recording: it computes nothing")
        session.edit(t2b=None)
        # It computes nothing of what is grafted: no floor can be measured with it, and no code swapped.
        with gl.record(tmp_path / "chain"):
            chain({})
        recording = gl.Recording(tmp_path / "chain")
        verdict = session.verdict(recording, lambda: chain({"a": 1.01, "b": 1 + 4e-7, "c": 1.01}))
        labels = dict(zip(verdict.frame["name"], verdict.frame["label"], strict=True))
        assert labels == {"a": "culprit", "b": "inherited", "c": "culprit"}
        based = "\nThe baseline is a recording, which computes nothing. So the floor is not measured "
        assert based in verdict.text
        assert "the output" not in verdict.text.replace("what moves the output", "")
        assert "Not checked: whether both sides have the same weights, which no tap shows" in verdict.text
        assert "No line of source is named: a recording has no operations" in verdict.text
        # A recording returns the number of its taps, which is no result of the model.
        right = session.verdict(recording, lambda: chain({}) or torch.tensor(0.5))
        assert right.text.startswith("Nothing that was checked adds more than")
        assert "the result" not in right.text
        with pytest.raises(gl.SessionError, match="lines: the baseline is a recording, which has no operations"):
            session.lines("a", recording, lambda: chain({"a": 1.01}))
        with pytest.raises(gl.SessionError, match="the target is a recording, which computes nothing"):
            session.verdict(lambda: chain({}), recording)


# ---- a recording of another author ----------------------------------------------------------------------------------


def place_link(path: Path, elsewhere: Path) -> None:
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def place_pipe(path: Path, _: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def place_folder(path: Path, _: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("place", [place_link, place_pipe, place_folder])
@pytest.mark.parametrize("name", ["rank.json", "index.jsonl", "000000.safetensors"])
def test_only_regular_files_of_a_recording_are_opened(tmp_path: Path, name: str, place: Any) -> None:
    record_two_steps(tmp_path / "one")
    place(tmp_path / "one" / "rank-00000" / name, tmp_path / "elsewhere")
    with pytest.raises(gl.RecordingError, match=rf"{name}.*: .*(it is a link|it is not a regular file)"):
        gl.Recording(tmp_path / "one").tensor("hidden")


def test_a_rank_folder_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    record_two_steps(tmp_path / "one")
    place_link(tmp_path / "one" / "rank-00000", tmp_path / "elsewhere")
    with pytest.raises(gl.RecordingError, match=r"rank.json cannot be read"):
        gl.Recording(tmp_path / "one")


def rewrite_index(folder: Path, edit: Any) -> None:
    """Edit the taps of an index as its author could, with fitting checksums."""
    rank = folder / "rank-00000"
    chain = ChecksumChain((rank / "rank.json").read_bytes())
    lines = (rank / "index.jsonl").read_bytes().splitlines()
    entries = [msgspec.json.decode(line, type=IndexLine) for line in lines]
    edited = [edit(each) if isinstance(each, TapEntry) else each for each in entries]
    (rank / "index.jsonl").write_bytes(b"".join(map(chain.sealed, edited)))


@pytest.mark.parametrize("shard", ["../../secret.safetensors", "/etc/passwd", "..", "", "a\0b", "rank-00000/x"])
def test_an_index_names_no_file_outside_of_its_folder(tmp_path: Path, shard: str) -> None:
    record_two_steps(tmp_path / "one")
    (tmp_path / "one" / "rank-00000" / "000000.safetensors").rename(tmp_path / "secret.safetensors")
    place = msgspec.structs.replace
    rewrite_index(tmp_path / "one", lambda tap: place(tap, tensor=place(tap.tensor, shard=shard)))
    with pytest.raises(gl.RecordingError, match=r"is not the name of a file in the folder"):
        gl.Recording(tmp_path / "one").tensor("hidden")


@pytest.mark.parametrize(
    "change",
    [
        lambda tap: msgspec.structs.replace(tap, step=10**15),
        lambda tap: msgspec.structs.replace(tap, step=-1),
        lambda tap: msgspec.structs.replace(tap, tags={"extras": 1}),
        lambda tap: msgspec.structs.replace(tap, extras=[1], extra_tensors={"x": tap.tensor}),
    ],
)
def test_a_tap_that_no_recording_has_is_refused_by_its_line(tmp_path: Path, change: Any) -> None:
    record_two_steps(tmp_path)
    rewrite_index(tmp_path, change)
    with pytest.raises(gl.RecordingError, match=r"index.jsonl, line 1: this is not a tap"):
        gl.Recording(tmp_path)


FILES = ["rank.json", "index.jsonl", "000000.safetensors"]
DEEP = b"[" * 100_000


@examples(150)
@given(st.sampled_from(FILES), st.data())
def test_any_damage_of_a_recording_is_a_recording_error(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    record_two_steps(folder)
    path = folder / "rank-00000" / name
    written = path.read_bytes()
    start = data.draw(st.integers(0, len(written)))
    stop = data.draw(st.integers(start, min(len(written), start + 20)))
    inserted = data.draw(st.one_of(st.binary(max_size=12), st.sampled_from([DEEP, b"\xff" * 8, b"9" * 5000, b"1e999"])))
    path.write_bytes(written[:start] + inserted + written[stop:])
    found: list[torch.Tensor] = []
    with limited(), contextlib.suppress(gl.RecordingError):
        found = [tensor for _, tensor, _ in gl.Recording(folder).taps(0)]
    assert all(torch.equal(each, torch.full((3,), float(each[0]))) for each in found)
    assert len(found) in (0, 4)


def test_a_sparse_index_of_a_terabyte_is_refused_before_it_is_read(tmp_path: Path) -> None:
    record_two_steps(tmp_path)
    os.truncate(index_of(tmp_path), 1 << 40)
    with pytest.raises(gl.RecordingError, match=r"index.jsonl cannot be read: it has 1,048,576 MiB"):
        gl.Recording(tmp_path)


def fill_rank(folder: Path) -> None:
    (folder / "step=0___rank=999999999999___dump_index=2___name=x.pt").write_bytes(b"")


def fill_pipe(folder: Path) -> None:
    os.mkfifo(folder / "step=0___rank=0___dump_index=2___name=x.pt")


def fill_compressed(folder: Path) -> None:
    """A mebibyte of zeros in a kilobyte."""
    dump = folder / "step=0___rank=0___dump_index=2___name=x.pt"
    torch.save({"value": torch.zeros(MIB), "meta": {}}, dump)
    with zipfile.ZipFile(dump) as plain:
        parts = {part: plain.read(part) for part in plain.namelist()}
    with zipfile.ZipFile(dump, "w", zipfile.ZIP_DEFLATED) as packed:
        for part, content in parts.items():
            packed.writestr(part, content)


@pytest.mark.parametrize(
    ("fill", "message"),
    [(fill_rank, "no rank 999999999999"), (fill_pipe, "not a regular file"), (fill_compressed, "it is compressed")],
)
def test_a_hostile_folder_of_dumps_is_refused_by_the_file(tmp_path: Path, fill: Any, message: str) -> None:
    torch.save({"value": torch.ones(2), "meta": {}}, tmp_path / "step=0___rank=0___dump_index=1___name=x.pt")
    assert torch.equal(gl.Recording.open(tmp_path).tensor("x"), torch.ones(2))
    fill(tmp_path)
    with pytest.raises(gl.RecordingError, match=rf"dump_index=2___name=x\.pt.*{message}"):
        gl.Recording.open(tmp_path)
