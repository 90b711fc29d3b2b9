"""Captured graphs: the cost of filling their static buffers, and of taps in a replay."""

from __future__ import annotations

import time
import timeit
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

import graftlab as gl
from benchmarks import worlds
from benchmarks.lines import Budget, Line, Setup, Spread
from benchmarks.loops import finish_work_on
from graftlab.engine import DecodeGraphRunner, Engine, ForwardBatch, Request, build_model
from graftlab.graphs import build_decode_registry
from graftlab.requests.identity import IDENTITIES

_BATCH = 8
_STEPS = 60
# The batch's size and the padded size: one case with padding to reset, one without.
_SIZES = {"40 of 64 rows": (40, 64), "64 of 64 rows": (64, 64)}
_PLANS: dict[str, dict[str, Any]] = {
    "no tap wanted": {},
    "one tap wanted": {"compare": "name == 'mlp_out' and layer == 1"},
    "all taps wanted": {"compare": "True"},
    "one tap grafted": {"b2t": "name == 'mlp_out' and layer == 1"},
}


def measure(setup: Setup) -> list[Line]:
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return [line for device in devices for line in [*_fills(setup, device), *_replays(setup, device)]]


# ---- fills ----------------------------------------------------------------------------------------------------------


def _fills(setup: Setup, device: str) -> list[Line]:
    lines = []
    for name, (raw, padded) in _SIZES.items():
        ours, by_hand = _fill_both_ways(setup, device, raw, padded)
        ratio = Spread.of(mine / other for mine, other in zip(ours, by_hand, strict=True))
        lines.append(
            Line(
                "graphs",
                f"fill_from against copies by hand, 10 slots, {name}, {device}",
                "x",
                ratio,
                budgets=(Budget("figure", "at most", 1.3),),
                note=f"times as long as copies written by hand, {1e6 * Spread.of(by_hand).median:.0f} us",
                in_docs=padded > raw,
            )
        )
    return lines


def _fill_both_ways(setup: Setup, device: str, raw: int, padded: int) -> tuple[list[float], list[float]]:
    """Seconds of one fill by the registry and by hand, in turns, after a check that both write the same."""
    registry = build_decode_registry(device, padded)
    for identity in IDENTITIES:
        registry.enable_slot(identity)
    own = {name: registry.get_slot(name).buffer for name in registry.slot_names()}
    buffers = {name: buffer for name, buffer in own.items() if buffer is not None}
    batch = SimpleNamespace(
        **{
            name: torch.randint(1, 99, (3, raw) if buffer.dim() == 2 else (raw,), device=buffer.device)
            for name, buffer in buffers.items()
        }
    )
    copies = SimpleNamespace(**{name: buffer.clone() for name, buffer in buffers.items()})
    ways: dict[str, Callable[[], None]] = {
        "ours": partial(
            registry.fill_from, batch, raw_bs=raw, padded_bs=padded, raw_num_tokens=raw, padded_num_tokens=padded
        ),
        "by hand": partial(_fill_by_hand, copies, batch, raw, padded),
    }
    for fill in ways.values():
        fill()
    for name, buffer in buffers.items():
        assert torch.equal(buffer, getattr(copies, name)), name
    taken: dict[str, list[float]] = {way: [] for way in ways}
    number = setup.repeats(1000, 10)
    for _ in range(setup.repeats(9, 2)):
        for way, fill in ways.items():
            finish_work_on(device)
            taken[way].append(timeit.timeit(fill, number=number) / number)
    return taken["ours"], taken["by hand"]


def _fill_by_hand(buffers: SimpleNamespace, batch: SimpleNamespace, raw: int, padded: int) -> None:
    """Fill the buffers as a runner without a registry does."""
    if raw != padded:
        buffers.input_ids[raw:padded].zero_()
        buffers.positions[raw:padded].zero_()
        buffers.out_cache_loc[raw:padded].zero_()
        buffers.req_pool_indices[raw:padded].zero_()
        buffers.seq_lens[raw:padded].fill_(1)
        buffers.seq_lens_cpu[raw:padded].fill_(1)
        buffers.mrope_positions[:, raw:padded].zero_()
        buffers.encoder_lens[raw:padded].zero_()
        buffers.rids_int[raw:padded].zero_()
        buffers.bootstrap_room_ids_int[raw:padded].fill_(-1)
    buffers.input_ids[:raw].copy_(batch.input_ids)
    buffers.positions[:raw].copy_(batch.positions)
    buffers.out_cache_loc[:raw].copy_(batch.out_cache_loc)
    buffers.req_pool_indices[:raw].copy_(batch.req_pool_indices)
    buffers.seq_lens[:raw].copy_(batch.seq_lens)
    buffers.seq_lens_cpu[:raw].copy_(batch.seq_lens_cpu)
    buffers.mrope_positions[:, :raw].copy_(batch.mrope_positions)
    buffers.encoder_lens[:raw].copy_(batch.encoder_lens)
    buffers.rids_int[:raw].copy_(batch.rids_int)
    buffers.bootstrap_room_ids_int[:raw].copy_(batch.bootstrap_room_ids_int)


# ---- replays --------------------------------------------------------------------------------------------------------


def _replays(setup: Setup, device: str) -> list[Line]:
    steps = setup.repeats(_STEPS, 3)
    forwards = partial(_decode, device, steps)
    with worlds.session(setup, device=device) as session:
        # While one side runs alone, its taps do nothing.
        session.run(target=forwards)
        bare = Spread.of(session.run(target=forwards).target[0])
        lines = [Line("graphs", f"captured decode of {_BATCH} requests, one side alone, {device}", "s", bare)]
        for name, plan in _PLANS.items():
            with warnings.catch_warnings():
                # One of the plans does nothing, and is meant to.
                warnings.simplefilter("ignore", gl.GraftWarning)
                session.edit(**{"b2t": None, "compare": None, **plan})
            # The first run captures the graph with these taps.
            session.run(forwards, forwards)
            run = session.run(forwards, forwards)
            relative = Spread.of(each / bare.median for each in run.target[0])
            shown = run.frame.groupby("step").size().max() if len(run.frame) else 0
            note = f"times as long; {shown} rows a step"
            lines.append(Line("graphs", f"captured decode, {name}, {device}", "x", relative, note=note))
    return lines


def _decode(device: str, steps: int) -> list[float]:
    """Seconds of each decode of a full batch, one a step, by an engine that lives as long as the rank."""
    torch.set_num_threads(1)
    me = gl.here()
    assert me is not None
    engine: Engine = me.vars.get("engine") or Engine(
        build_model("tiny", device=device),
        runner=partial(DecodeGraphRunner, batch_sizes=[_BATCH]),
        max_requests=_BATCH,
        on_step=lambda batch: gl.step(),
    )
    me.vars["engine"] = engine
    runner, taken = engine.runner, []
    forward = runner.forward

    def timed(batch: ForwardBatch) -> torch.Tensor:
        began = time.perf_counter()
        logits = forward(batch)
        finish_work_on(device)
        if batch.mode == "decode":
            taken.append(time.perf_counter() - began)
        return logits

    runner.forward = timed  # type: ignore[method-assign]
    try:
        engine.generate([Request(f"r{i}", (i, 1, 2), steps + 3) for i in range(_BATCH)])
    finally:
        runner.forward = forward  # type: ignore[method-assign]
    return taken[2:]
