"""What graphs show of their slots, decide for all ranks of a side, and capture, before grafters in this process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.grafters import GrafterWorld
from kit.graph_buffers import buffer_of, extract, fill, make, ones, registry_of
from kit.recorded_kernels import record_kernels
from kit.refusals import exactly
from kit.values import assert_values
from torch import Tensor

import graftlab as gl
from graftlab.errors import FilterError, GraphError
from graftlab.graphs import FillContext, ForwardInputBuffers
from graftlab.graphs.capture import CpuCapturer, CudaCapturer, capturer_for
from graftlab.graphs.tap_sites import Site, Slot, TapDecision, cut, decide, new_slot, rows_of, write_through
from graftlab.taps import calls


def tapping(monkeypatch: pytest.MonkeyPatch, **plan: Any) -> GrafterWorld:
    """This process taps as the baseline does."""
    world = GrafterWorld(1, 1, **plan)
    for name, value in (
        ("_grafter", world.baseline.grafter),
        ("_handler", world.baseline.grafter),
    ):
        monkeypatch.setattr(calls, name, value)
    return world


# ---- slots as taps --------------------------------------------------------------------------------------------------


def shown(world: GrafterWorld) -> dict[tuple[str, str], list[int]]:
    """What was published since the last look."""
    found = {
        (key.name, str(dict(key.tags)["part"])): sent[0].tensor.tolist()
        for key, sent in world.post.sent.items()
        if sent.get(0) is not None
    }
    world.post.sent.clear()
    return found


def test_slots_are_tapped_after_each_fill_what_the_batch_filled_and_what_is_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = tapping(monkeypatch, compare="True")
    registry = registry_of(make("a"), make("b"), make("c", axis="tokens"))
    watch = registry.watch(include="name != 'slot.c'")
    assert watch.names == ["slot.a", "slot.b"]
    fill(registry, 2, 4, a=ones(2), b=ones(2, 5), c=ones(2))
    found = shown(world)
    assert found.keys() == {("slot.a", "head"), ("slot.a", "tail"), ("slot.b", "head"), ("slot.b", "tail")}
    assert (found["slot.a", "head"], found["slot.b", "head"]) == ([1, 1], [5, 5])
    # Nothing is padded in a batch of the captured size, and an absent field is not shown.
    fill(registry, 4, 4, a=ones(4), b=None)
    assert shown(world) == {("slot.a", "head"): [1] * 4}
    watch.remove()
    fill(registry, 4, 4, a=ones(4), b=ones(4))
    assert shown(world) == {}


def test_slots_are_chosen_by_their_names_and_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    world = tapping(monkeypatch, compare="True")
    registry = registry_of(make("a"), make("b", axis="tokens"), make("off", enabled=False))
    assert registry.watch().names == ["slot.a", "slot.b"]
    assert registry.watch("t.", include="type == 'tokens'").names == ["t.b"]
    assert registry.watch("n.", exclude="type == 'tokens'").names == ["n.a"]
    with pytest.raises(FilterError):
        registry.watch(include="name ==")
    with pytest.raises(
        GraphError,
        match=exactly(
            "include='nothing' and exclude=None leave no slot to watch; they are expressions over `name`, "
            "one of ['slot.a', 'slot.b'], and `type`, the slot's axis"
        ),
    ):
        registry.watch(include="nothing")
    with registry.watch("w."):
        pass
    fill(registry, 2, 2, a=ones(2), b=ones(2))
    assert {name for name, _ in shown(world)} == {"slot.a", "slot.b", "t.b", "n.a"}


def test_a_view_of_the_buffers_has_each_under_its_slots_name() -> None:
    registry = registry_of(make("a"), make("off", enabled=False))
    buffers = ForwardInputBuffers(registry)
    assert buffers.a is buffer_of(registry, "a")
    assert buffers.off is None
    assert dir(buffers) == ["a", "off"]
    assert repr(buffers) == "<ForwardInputBuffers ['a', 'off']>"
    with pytest.raises(AttributeError, match=r"there is no buffer 'b'; the buffers are \['a', 'off'\]"):
        _ = buffers.b
    with pytest.raises(
        AttributeError, match=exactly("buffer 'a' cannot be another tensor: graphs read this one. Write into it")
    ):
        buffers.a = torch.zeros(1)


def test_an_enabled_slot_takes_its_old_place_and_is_in_the_next_batch() -> None:
    registry = registry_of(make("a"), make("late", enabled=False), make("z"))
    fill(registry, 2, a=ones(2), late=ones(2), z=ones(2))
    slot = registry.enable_slot("late")
    assert (registry.slot_names(), slot.enabled) == (["a", "late", "z"], True)
    assert registry.enable_slot("late") is slot
    template = fill(registry, 2, a=ones(2), late=ones(2, 9), z=ones(2))
    assert extract(registry, template).late[:2].tolist() == [9, 9]


# ---- what the plan says of a tap, for all ranks of a side -----------------------------------------------------------


def decided(world: GrafterWorld, name: str = "x", rank: int = 0, **tags: Any) -> TapDecision:
    return decide(world.targets[rank].grafter, Site(name, tags, (name,)))


def test_a_tap_that_no_filter_wants_is_left_out() -> None:
    assert decided(GrafterWorld(1, 1, compare="name == 'other'")) == TapDecision(None, False, False)
    assert decided(GrafterWorld(1, 2, compare="name == 'other'")) == TapDecision(None, False, False)


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_rank_decides_alone_what_all_ranks_decide_alike(ranks: int) -> None:
    for plan, is_received in (({"compare": "True"}, False), ({"b2t": "True"}, True), ({"t2b": "True"}, False)):
        found = decided(GrafterWorld(1, ranks, **plan))
        assert (found.is_wanted, found.is_received) == (True, is_received), plan
        assert found.action is not None


def test_what_another_rank_does_counts_for_all_of_its_side() -> None:
    world = GrafterWorld(1, 2, b2t="name == 'x' and rank == 1", compare=None)
    for rank in (0, 1):
        found = decided(world, rank=rank)
        assert (found.is_wanted, found.is_received) == (True, True)
        assert found.action is not None
        assert found.action.graft == (rank == 1)
    assert not decided(world, "y").is_wanted
    sends = GrafterWorld(1, 2, t2b="rank == 1", compare=None)
    assert (decided(sends).is_wanted, decided(sends).is_received) == (True, False)


def test_a_decision_that_only_other_ranks_can_make_is_refused() -> None:
    world = GrafterWorld(1, 2, compare="tp_rank == 0")
    with pytest.raises(
        GraphError,
        match=exactly(
            "the plan's filters look at ['tp_rank'] of tap 'x' on target[0], and other ranks have other "
            "values; ranks that compute together must capture and replay alike. Filter by `rank` or by "
            "tags that all ranks of a side share, or set `eager` on the runner"
        ),
    ):
        decided(world, tp_rank=0)
    # A single rank is all there is.
    assert decided(GrafterWorld(1, 1, compare="tp_rank == 0"), tp_rank=0).is_wanted


# ---- memory of a tap ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_rows", [True, False])
def test_a_taps_slot_is_like_its_value_and_switched_off(has_rows: bool) -> None:
    own = torch.ones(3, 2, dtype=torch.bfloat16)
    with torch.inference_mode():
        slot = new_slot(own, has_rows)
    assert (slot.value.shape, slot.graft.shape, slot.value.dtype, slot.graft.dtype) == (
        *[own.shape] * 2,
        *[own.dtype] * 2,
    )
    assert (slot.switch.shape, slot.switch.dtype, slot.switch.any().item()) == (
        (3, 1) if has_rows else (1, 1),
        torch.bool,
        False,
    )
    assert not slot.value.is_inference()


def test_rows_are_recognized_by_the_first_dimension_and_cut_to_the_batch() -> None:
    sizes = FillContext(raw_bs=2, padded_bs=4, raw_num_tokens=5, padded_num_tokens=8)
    for shape, rows, left in (((4, 8), "requests", 2), ((8, 4), "tokens", 5), ((3,), None, 3)):
        value = torch.zeros(shape)
        assert rows_of(value, sizes) == rows
        assert len(cut(value, rows_of(value, sizes), sizes)) == left
    assert rows_of(torch.tensor(4.0), sizes) is None
    assert rows_of(torch.nn.Parameter(torch.zeros(4)), sizes) is None


def test_an_expanded_tensor_takes_a_value_only_where_all_of_its_places_agree() -> None:
    nan = float("nan")
    for value, written in (([[5.0, 5.0], [nan, nan]], [5.0, nan]), ([[5.0, 5.0], [6.0, 7.0]], [1.0, 2.0])):
        own = torch.tensor([[1.0], [2.0]]).expand(2, 2)
        write_through(own, torch.tensor(value))
        assert str(own.tolist()) == str([[number] * 2 for number in written])


# ---- capturing ------------------------------------------------------------------------------------------------------


def test_a_graph_of_the_cpu_runs_its_function_into_one_memory() -> None:
    buffer, runs = torch.ones(2), []

    def function() -> tuple[Tensor, ...]:
        runs.append(1)
        return (buffer * 2,)

    capturer = capturer_for(torch.device("cpu"))
    assert isinstance(capturer, CpuCapturer)
    assert capturer.on_host(torch.neg) is torch.neg
    with torch.inference_mode():
        graph = capturer.capture(function)
    (first,) = graph.replay()
    buffer.fill_(3)
    (second,) = graph.replay()
    assert first is second
    assert (second.tolist(), len(runs)) == ([6.0, 6.0], 3)


def test_graphs_of_kernels_run_with_the_hosts_parts_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    record_kernels(monkeypatch)
    capturer = CudaCapturer(torch.device("cpu"))
    buffer, seen, runs = torch.ones(2), [], []

    def on_host(value: Tensor, plus: float) -> Tensor:
        seen.append(value.tolist())
        return value + plus

    def function() -> tuple[Tensor, ...]:
        runs.append(1)
        doubled = buffer * 2
        return (capturer.on_host(on_host)(doubled, 10.0) * 3, doubled)

    graph = capturer.capture(function)
    # Three runs to warm up, in which the host's part is an ordinary call, and the capture.
    assert (len(runs), seen) == (4, [[2.0, 2.0]] * 4)
    for value in (4.0, 5.0):
        buffer.fill_(value)
        outputs = graph.replay()
        assert [each.tolist() for each in outputs] == [[3 * (2 * value + 10)] * 2, [2 * value] * 2]
    assert len(runs) == 4
    assert seen[4:] == [[8.0, 8.0], [10.0, 10.0]]
    # Outside of a capture it is called as it is.
    assert capturer.on_host(on_host)(torch.zeros(1), 1.0).tolist() == [1.0]


def test_a_hosts_part_that_gives_its_argument_back_costs_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    record_kernels(monkeypatch)
    capturer = CudaCapturer(torch.device("cpu"))
    buffer = torch.ones(2)
    same = capturer.on_host(lambda value: value.mul_(2))
    graph = capturer.capture(lambda: (same(buffer + 1) + 0,))
    buffer.fill_(4.0)
    assert graph.replay()[0].tolist() == [10.0, 10.0]


def test_a_capture_that_fails_leaves_the_next_one_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    record_kernels(monkeypatch)
    capturer = CudaCapturer(torch.device("cpu"))
    runs: list[int] = []

    def fails() -> tuple[Tensor, ...]:
        runs.append(1)
        if len(runs) == 4:
            raise ValueError("in the capture")
        return (torch.zeros(1),)

    with pytest.raises(ValueError, match="in the capture"):
        capturer.capture(fails)
    assert capturer._recording is None
    assert capturer.capture(lambda: (torch.ones(1) + 1,)).replay()[0].tolist() == [2.0]


def test_values_of_the_room_cannot_be_changed() -> None:
    assert_values(FillContext, Slot, TapDecision)
    assert Slot(torch.ones(2), torch.ones(2), torch.ones(2)) != Slot(torch.ones(2), torch.ones(2), torch.ones(2))


def test_a_tap_around_a_fill_has_the_tags_that_are_set_there(monkeypatch: pytest.MonkeyPatch) -> None:
    world = tapping(monkeypatch, compare="True")
    registry = registry_of(make("a"))
    registry.watch()
    with gl.tags(phase="decode"):
        fill(registry, 2, 2, a=ones(2))
    (key,) = world.post.sent
    assert dict(key.tags) == {"phase": "decode", "part": "head"}
