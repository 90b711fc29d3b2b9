"""The rank's part of a comparison with compiled code: calls in a grad mode, and the search for the mistake."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graftlab.diffs.results import distance, tensors_of
from graftlab.errors import GraphError
from graftlab.ranks.compiled_pieces import PieceSearch, search_pieces
from graftlab.ranks.remote_functions import Callee, bind_callee
from graftlab.taps.compiled_calls import CompiledCall, GradMode, in_mode

# The settings of torch._inductor.config that change the code, with the value under which inductor does less.
_SWITCHES: dict[str, object] = {
    "pattern_matcher": False,
    "use_pre_grad_passes": False,
    "use_joint_graph_passes": False,
    "use_post_grad_passes": False,
    "joint_graph_constant_folding": False,
    "split_cat_fx_passes": False,
    "batch_fusion": False,
    "group_fusion": False,
    "permute_fusion": False,
    "efficient_conv_bn_eval_fx_passes": False,
    "decompose_mem_bound_mm": False,
    "layout_optimization": False,
    "comprehensive_padding": False,
    "shape_padding": False,
    "reorder_for_locality": False,
    "loop_ordering_after_fusion": False,
    "inplace_buffers": False,
    "epilogue_fusion": False,
    "prologue_fusion": False,
    "max_fusion_size": 1,
    "cpp.simdlen": 1,
    "emulate_precision_casts": True,
    "fallback_random": True,
}


@dataclass(frozen=True)
class CallInMode:
    """A call of a side's code in a grad mode; None means the caller's mode."""

    callee: Callee
    mode: GradMode | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with in_mode(self.mode):
            return bind_callee(self.callee, args, kwargs)()


def runs_without_gradients(callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Run the callee; return whether its results require gradients although it also runs without computing any."""
    if not any(tensor.requires_grad for tensor in tensors_of(bind_callee(callee, args, kwargs)())):
        return False
    try:
        CallInMode(callee, "no_grad")(*args, **kwargs)
    except Exception:  # a backward pass inside raises, and so may anything that the user's code does about it
        return False
    return True


def why_not_compiled_whole(call: CompiledCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Compile and call once; return None if torch can compile the call as a whole.

    Otherwise return torch's reason, if the modules that it calls can be compiled instead. Raises :class:`GraphError` if
    it calls none.
    """
    from torch._dynamo.utils import counters

    def fault_of(attempt: CompiledCall) -> str | None:
        counters.clear()
        try:
            attempt.called_anew(args, kwargs)
        except Exception as error:  # the compiler raises errors of any class, its own assertions included
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return " ".join([f"{type(error).__name__}:", *lines[:2]]).rstrip(".")
        # Where torch compiles nothing it runs the call eagerly, which compares nothing.
        return None if counters["stats"].get("unique_graphs") else "torch found nothing to compile in it"

    reason = fault_of(call)
    if reason is None:
        return None
    # If the call also fails uncompiled, this raises its exception.
    modules = call.modules(args, kwargs)
    if not modules or fault_of(replace(call, by_modules=True)) is not None:
        raise GraphError(
            f"compare_compiled: torch.compile cannot compile this call: {reason}. Compare the function in it that you "
            "compile; grad_mode= says under which mode, so that torch.inference_mode() need not be part of it"
        ) from None
    return reason


@dataclass(frozen=True)
class CompilerSearch:
    """The step of the compiler, and the lines of source, that make a compiled result wrong.

    ``settings`` are the switches of inductor that make the result right, the fewest of them together
    (``{"pattern_matcher": False}``); empty if no switch does. ``stage`` is torch's most complete backend with the right
    result, where no setting of inductor gives it. ``pieces`` has the lines of source whose compiled code is wrong.
    ``compilations`` is the number of compilations that it took.
    """

    settings: Mapping[str, object]
    stage: str | None
    pieces: PieceSearch
    compilations: int


_STAGES = ("aot_eager_decomp_partition", "aot_eager", "eager")
"""Backends that do less and less of inductor's work: without its code, without decompositions, only captured."""


def search_compiler(
    callee: Callee, call: CompiledCall, limit: float, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CompilerSearch:
    """Compile the callee in other ways, to see which step of the compiler and which lines of source are wrong.

    ``call`` compiles it, without taps; a result is right if its rel_l2 from the eager one is at most ``limit``.
    """
    expected = [tensors_of(CallInMode(callee, call.mode)(*args, **kwargs))]
    compilations = 0

    def is_right(attempt: CompiledCall) -> bool | None:
        nonlocal compilations
        compilations += 1
        try:
            found = attempt.called_anew(args, kwargs)
        except Exception:  # the compiler raises errors of any class
            return _on_all_ranks(None)
        apart = distance(expected, [tensors_of(found)])
        return _on_all_ranks(apart <= limit)

    backend = call.options.get("backend", "inductor")
    settings: Mapping[str, object] = {}
    stage = None
    if not isinstance(backend, str) or backend == "inductor":
        settings = _search_switches(call, is_right)
    if backend == "inductor" and not settings:
        kept = {name: value for name, value in call.options.items() if name not in ("mode", "options")}
        ways = (replace(call, options={**kept, "backend": stage}) for stage in _STAGES)
        stage = next((str(way.options["backend"]) for way in ways if is_right(way)), None)
    pieces = search_pieces(call, is_right)
    return CompilerSearch(settings, stage, pieces, compilations)


def _on_all_ranks(answer: bool | None) -> bool | None:
    """Whether this is true on all ranks of the side; None if any rank has no answer.

    All ranks must compile the same code next, or a collective hangs.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return answer
    answers: list[bool | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(answers, answer)
    return None if None in answers else all(answers)


def _search_switches(call: CompiledCall, is_right: Callable[[CompiledCall], bool | None]) -> Mapping[str, object]:
    """Return the fewest switches that together make the result right."""
    config = _inductor_config()
    usable = {name: value for name, value in _SWITCHES.items() if _setting(config, name) not in (value, _ABSENT)}

    def is_right_with(names: Sequence[str]) -> bool:
        patch = {name: usable[name] for name in names}
        if hasattr(config, "force_disable_caches"):
            patch["force_disable_caches"] = True
        with config.patch(patch), warnings.catch_warnings():
            # Profiles are not cached either, which is intended.
            warnings.filterwarnings("ignore", "dynamo_pgo force disabled")
            return bool(is_right(call))

    left = list(usable)
    if not left or is_right_with(()) or not is_right_with(left):
        return {}
    needed: list[str] = []
    while not needed or not is_right_with(needed):
        # The last switch of the shortest beginning of the list that suffices is needed.
        wrong, right = 0, len(left)
        while right - wrong > 1:
            middle = (wrong + right) // 2
            wrong, right = (wrong, middle) if is_right_with([*needed, *left[:middle]]) else (middle, right)
        needed.append(left[right - 1])
        left = left[: right - 1]
        if not left:
            break
    return {name: usable[name] for name in usable if name in needed}


_ABSENT = object()


def _inductor_config() -> Any:
    import torch._inductor.config

    return torch._inductor.config


def _setting(config: Any, name: str) -> object:
    """Return a setting's value; a sentinel if this release of torch lacks it."""
    value = config
    for part in name.split("."):
        value = getattr(value, part, _ABSENT)
    return value
