"""Functions that the notebook sends to ranks by their names. Each runs a side's code there, and returns its findings.

They are not with their callers, because a rank imports the module of a function that it receives: the notebook's
modules would bring pandas into every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from graftlab.base.text import counted
from graftlab.errors import RequestError
from graftlab.grafting import active
from graftlab.grafting.filled_memory import Repetition, has_compiled, repeat_with_filled_memory
from graftlab.grafting.in_float64 import in_float64
from graftlab.grafting.self_graft import (
    RoundedResults,
    SelfGraft,
    graft_self,
    rounded_results,
    without_dependents,
)
from graftlab.grafting.sketches import sketch_taps
from graftlab.grafting.unseen_choices import UnseenChoices, unseen_choices
from graftlab.layouts.replicas import TapSketch
from graftlab.plan.plan import GraftPlan
from graftlab.taps.calls import here, step, tags
from graftlab.taps.module_inputs import ModuleCall, ModuleInputs
from graftlab.transforms import user_traceback

Callee = Callable[..., Any] | str
"""A side's code: a function, or an expression that is evaluated where ``%%graft`` cells run."""

Feed = Callable[[list[Any]], Sequence[Any]] | str
"""A function of a list of requests that returns one output for each, or an expression for such a function."""


def bind_callee(callee: Callee, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Callable[[], Any]:
    """Return a function without arguments that runs the callee on this rank."""
    if isinstance(callee, str):
        return partial(eval, callee, _namespace())
    return partial(callee, *args, **(kwargs or {}))


def _namespace() -> dict[str, Any]:
    me = here()
    assert me is not None
    return me.vars


# ---- a verdict ------------------------------------------------------------------------------------------------------


def graft_baseline_into_itself(
    baseline: Callee,
    exact: Callee | None,
    dtypes: dict[str, str],
    plan: GraftPlan,
    budget: int,
    keep: list[str],
    doubtful: list[str],
) -> SelfGraft:
    """Call :func:`graftlab.grafting.self_graft.graft_self`. ``plan`` renames the baseline's taps."""
    return graft_self(
        bind_callee(baseline),
        dtypes,
        paired_names=partial(plan.paired_names, "baseline"),
        budget=budget,
        exact=None if exact is None else bind_callee(exact),
        keep=keep,
        doubtful=doubtful,
    )


def find_unseen_choices(callee: Callee, taps: list[str], sees_result: bool) -> UnseenChoices:
    """Call :func:`graftlab.grafting.unseen_choices.unseen_choices`, unless code would be compiled anew for it."""
    return UnseenChoices() if has_compiled() else unseen_choices(bind_callee(callee), taps, sees_result=sees_result)


def repeat_callee(callee: Callee, budget: int) -> Repetition:
    """Call :func:`graftlab.grafting.filled_memory.repeat_with_filled_memory`."""
    return repeat_with_filled_memory(bind_callee(callee), budget=budget)


def call_until_exception(callee: Callee) -> Any:
    """Run the callee up to its exception, if it raises one; then the result is None."""
    try:
        return bind_callee(callee)()
    except Exception:  # the run before this one has reported it
        return None


def call_with_module_inputs(
    callee: Callee, wanted: list[str], known: list[str], renamed: dict[str, dict[str, str]]
) -> dict[str, ModuleCall]:
    """Run the callee with the inputs of modules as taps; see :class:`graftlab.taps.module_inputs.ModuleInputs`."""
    with ModuleInputs(wanted, known, renamed) as inputs:
        bind_callee(callee)()
    return inputs.calls


def call_with_lent_weights(callee: Callee) -> Any:
    """Run the callee; weights that are grafted meanwhile are put back afterwards."""
    grafter = active.grafter()
    assert grafter is not None
    with grafter.restoring_data():
        return bind_callee(callee)()


def find_without_dependents(callee: Callee, groups: list[str], plan: GraftPlan, budget: int) -> list[str]:
    """Call :func:`graftlab.grafting.self_graft.without_dependents`. ``plan`` renames the baseline's taps."""
    return without_dependents(
        bind_callee(callee),
        groups,
        budget=budget,
        paired_names=partial(plan.paired_names, "baseline"),
    )


# ---- a check of one side --------------------------------------------------------------------------------------------


def sketch_callee(callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[TapSketch], list[str]]:
    """Run the callee; returns a sketch of each of its taps, and the names of taps without a tensor."""
    return sketch_taps(bind_callee(callee, args, kwargs))


# ---- a comparison with compiled code --------------------------------------------------------------------------------


def round_callee(callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any], budget: int) -> RoundedResults:
    """Run the callee with its taps moved by one rounding, and in float64."""
    return rounded_results(bind_callee(callee, args, kwargs), budget=budget)


def call_in_float64(callee: Callee, *args: Any, **kwargs: Any) -> Any:
    with in_float64():
        return bind_callee(callee, args, kwargs)()


# ---- a replay -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchAnswer:
    """One rank's answer to a batch: an output for each request, or its function's exception with the traceback.

    ``step`` is the step in which the batch began; None outside a session.
    """

    outputs: list[Any]
    error: str | None = None
    step: int | None = None


def feed_batches(function: Feed, batches: list[tuple[str, list[Any]]]) -> list[BatchAnswer]:
    """Give a rank's function one batch after another, each in a new step. An exception fails only its batch."""
    if isinstance(function, str):
        function = eval(function, _namespace())
    if not callable(function):
        raise RequestError(f"replay: {function!r} cannot be called; give a function of a list of requests")
    fed = []
    for number, (rid, requests) in enumerate(batches):
        if number:
            step()
        grafter = active.grafter()
        # The function may end steps itself, as an engine does after each forward pass.
        began = None if grafter is None or grafter.moment is None else grafter.moment[1]
        try:
            with tags(rid=rid):
                outputs = list(function(requests))
            if len(outputs) != len(requests):
                raise RequestError(
                    f"the function returned {counted(len(outputs), 'output')} for {counted(len(requests), 'request')}; "
                    "return one for each"
                )
            fed.append(BatchAnswer(outputs, step=began))
        except (Exception, SystemExit) as error:
            # A table shows the beginning.
            told = f"{type(error).__name__}: {error}\n{user_traceback(error)}"
            fed.append(BatchAnswer([None] * len(requests), told, began))
    return fed
