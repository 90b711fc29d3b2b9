"""Request ids and bootstrap rooms as numbers: the same everywhere, and never two alike in one batch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.refusals import exactly

from graftlab.errors import RequestError
from graftlab.requests.identity import (
    REQUEST_IDS_VARIABLE,
    bootstrap_rooms_tensor,
    is_switched_on,
    request_ids_tensor,
)
from graftlab.requests.request_id import request_id_to_int

VECTORS = {"": -5426141060434712860, "req-0": -8966579018032821426, "请求-1": 188416781982650042}

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]


@pytest.mark.parametrize("request_id", VECTORS)
def test_an_id_has_the_number_that_other_programs_give_it(request_id: str) -> None:
    assert request_id_to_int(request_id) == VECTORS[request_id]


@pytest.mark.ranks
def test_another_process_with_another_hash_seed_gives_the_same_numbers() -> None:
    code = "from graftlab.requests import request_id_to_int as f; print(*map(f, ['', 'req-0', '请求-1']))"
    for seed in ("0", "4711"):
        environ = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
        assert [int(number) for number in done.stdout.split()] == list(VECTORS.values())


@pytest.mark.parametrize(
    ("text", "on"), [(" True\n", True), ("YES", True), ("on", True), ("Off", False), ("0", False), ("", False)]
)
def test_the_environment_switches_ids_on_in_several_words(text: str, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUEST_IDS_VARIABLE, text)
    assert is_switched_on() is on


def test_ids_are_given_once_under_either_name() -> None:
    assert torch.equal(request_ids_tensor(["a"]), request_ids_tensor(rids=["a"]))
    for both in ({}, {"request_ids": ["a"], "rids": ["a"]}):
        with pytest.raises(
            TypeError, match=exactly("request_ids_tensor() takes the ids once, as request_ids or as rids")
        ):
            request_ids_tensor(**both)


@pytest.mark.parametrize("device", DEVICES)
def test_ids_and_rooms_are_int64_on_the_batchs_device(device: str) -> None:
    ids = request_ids_tensor(list(VECTORS), device)
    rooms = bootstrap_rooms_tensor([7, None, -(2**63), 2**63 - 1], device)

    assert ids.tolist() == list(VECTORS.values())
    assert rooms.tolist() == [7, -1, -(2**63), 2**63 - 1]
    for tensor in (ids, rooms, request_ids_tensor([], device), bootstrap_rooms_tensor([], device)):
        assert tensor.dtype == torch.int64
        assert tensor.device.type == device
        assert tensor.dim() == 1
    # Of a device without memory, it would be this process's default.
    assert request_ids_tensor([""], "meta").device.type == "meta"


def test_a_batch_without_requests_gives_empty_tensors() -> None:
    assert request_ids_tensor([]).shape == bootstrap_rooms_tensor([]).shape == (0,)


@given(st.lists(st.text(st.characters(codec="utf-8")), unique=True, max_size=30))
def test_different_ids_have_different_numbers_in_the_batchs_order(ids: list[str]) -> None:
    numbers = request_ids_tensor(ids).tolist()
    assert numbers == [request_id_to_int(each) for each in ids]
    assert len(set(numbers)) == len(ids)


def test_a_request_may_be_in_a_batch_several_times() -> None:
    number = request_id_to_int("b")
    assert request_ids_tensor(["b", "a", "b"]).tolist() == [number, request_id_to_int("a"), number]


def test_two_ids_of_one_number_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlab.requests.identity.request_id_to_int", len)
    with pytest.raises(
        RequestError,
        match=exactly("request ids [['b', 'c']] share a number; rows could not be told apart: rename one of each"),
    ):
        request_ids_tensor(["b", "aa", "c", "b"])


def test_an_id_with_the_number_of_the_padding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlab.requests.identity.request_id_to_int", lambda rid: 0 if rid == "b" else 7)
    with pytest.raises(RequestError, match=exactly("the request id 'b' has the padding's number; rename it")):
        request_ids_tensor(["a", "b"])


@pytest.mark.parametrize("bad", [7, None, b"req-0"])
def test_only_strings_are_ids(bad: object) -> None:
    with pytest.raises(RequestError, match=f"a string, not {type(bad).__name__}"):
        request_ids_tensor(["a", bad])  # type: ignore[list-item]


def test_an_id_without_utf8_is_refused_with_the_reason() -> None:
    with pytest.raises(RequestError, match="cannot be written in UTF-8: surrogates"):
        request_id_to_int("\ud800")


@pytest.mark.parametrize("room", [2**63, -(2**63) - 1])
def test_a_room_beyond_int64_is_named(room: int) -> None:
    with pytest.raises(
        RequestError, match=rf"bootstrap room {room} \(request 1 of the batch\) does not fit into int64"
    ):
        bootstrap_rooms_tensor([0, room])


@pytest.mark.parametrize("room", ["7", 7.0, True])
def test_a_room_is_an_integer(room: object) -> None:
    with pytest.raises(RequestError, match="is not an integer"):
        bootstrap_rooms_tensor([room])  # type: ignore[list-item]


@pytest.mark.ranks
def test_the_package_has_identities_and_loads_torch_only_for_them() -> None:
    program = """
import sys
import graftlab.requests
assert "torch" not in sys.modules
from graftlab.requests import bootstrap_rooms_tensor, request_id_to_int, request_ids_tensor
assert request_ids_tensor(["req-0"]).item() == request_id_to_int("req-0")
try:
    graftlab.requests.nothing
except AttributeError:
    pass
else:
    raise AssertionError("there is something called nothing")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
