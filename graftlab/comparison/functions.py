"""``compare``: compares two functions that return models, called with the same inputs, or two scripts."""

from __future__ import annotations

import contextlib
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from graftlab.base import limits
from graftlab.base.uninterrupted import uninterrupted
from graftlab.comparison.answers import Answer, Comparison, ComparisonStopped, answer_of, known_at
from graftlab.comparison.held_calls import judge_held_calls
from graftlab.comparison.recorded_calls import judge_against_recording
from graftlab.comparison.repeats import JudgingChoice, Repeats, described
from graftlab.comparison.scripts import ScriptChoice, compare_scripts
from graftlab.comparison.sides import command_of, function_in_file, kind_of_sides, names_function
from graftlab.errors import ConfigError, RecordingError, WaitInterrupted
from graftlab.jobs.script_launcher import ScriptSettings
from graftlab.judging.compiled_comparison import CompiledComparison
from graftlab.launching import launch
from graftlab.ranks.held_call import WatchChoice
from graftlab.ranks.held_functions import CALL, FunctionInFile, define_call, hold_callee, load_and_hold
from graftlab.ranks.holding import drop_call
from graftlab.ranks.remote_functions import Callee
from graftlab.recordings.condensing import condense
from graftlab.recordings.recorded_side import RecordedSide
from graftlab.recordings.recorder import record_held_call
from graftlab.recordings.recording import Recording
from graftlab.session import Session

# The least time, in seconds, that a script has to reach a call of its model.
_SCRIPT_TIMEOUT = 600.0


def compare(
    baseline: Callable[[], Any] | RecordedSide | str | Path,
    target: Callable[[], Any] | str | Path,
    inputs: Any = None,
    *,
    backward: bool = False,
    match: bool | None = None,
    output: str | None = None,
    floor: float | Literal["auto"] = "auto",
    threshold: float = 5.0,
    include: str | None = None,
    functions: Sequence[str] = (),
    inside: str | None = None,
    device: str | None = None,
    timeout: float = limits.TIMEOUT,
    folder: str | Path | None = None,
) -> Comparison:
    """Load two models in separate processes, call both with the same inputs, and judge the target.

    ``baseline`` and ``target`` are functions, each called once on its rank, that return a ``torch.nn.Module`` or a
    function of the inputs. A function that takes arguments is itself called with the inputs. ``inputs`` is a tensor, a
    tuple or list of positional arguments, a mapping of named ones, or a function that returns one of these on each
    rank. A baseline may also be a recording of such a call, or its folder; then a floor is assumed, and no code is
    swapped. Before a function is called, and before the inputs are made, the random numbers of torch, numpy and Python
    are seeded alike. Models are called without gradients; with ``backward`` a backward pass follows each call, from
    random gradients of the results. Call ``model.eval()`` in the function if dropout is not wanted.

    Sides may also be texts, as for ``graftlab compare``: ``"FILE.py:FUNCTION"``, for the inputs too, or two scripts or
    commands. These make their own inputs and choose their devices, and wait in the calls of their models.

    The outputs of all modules, the model's inputs and its weights are tapped: ``include`` chooses modules,
    ``functions`` names torch functions that are tapped too, and ``inside`` modules whose forward is tapped line by
    line, as for :func:`watch`. Taps are paired by name, or by value if their names do not pair; ``match`` chooses one
    of these. ``output``, ``floor`` and ``threshold`` are as for
    :meth:`Session.verdict`, ``device``, ``timeout`` and ``folder`` as for :func:`launch`. Each run of the verdict
    repeats the call from the same state: buffers, attributes, caches among the arguments, random numbers.

    Returns the verdict, which also has the ``answer`` (``"agree"``, ``"differ"`` or ``"inconclusive"``), the
    ``session``, which stays open, and the ``match``. Raises :class:`ConfigError` for sides that cannot be compared,
    :class:`RecordingError` for a recording without taps, and the exceptions of :func:`launch` and :meth:`Session.run`.

    >>> def reference():
    ...     return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    >>> def port():
    ...     return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(approximate="tanh"))
    >>> comparison = gl.compare(reference, port, torch.ones(2, 4))
    >>> comparison.answer, comparison.named
    ('differ', ['*'])
    >>> comparison.session.close()
    """
    judging = JudgingChoice(match, output, floor, threshold)
    target = str(target) if isinstance(target, Path) else target
    if isinstance(target, str) and not names_function(target):
        if inputs is not None or backward or device is not None:
            raise ConfigError("inputs, backward and device are for two functions; scripts choose these themselves")
        settings = ScriptSettings(WatchChoice(include, tuple(functions), inside), timeout=max(timeout, _SCRIPT_TIMEOUT))
        return _compare_commands(baseline, target, ScriptChoice(settings, judging, folder=folder))
    for name, given in (("baseline", baseline), ("target", target)):
        _refuse_no_side(name, given)
    recording = _side_of(baseline)
    port, inputs = _named_function(target), _named_function(inputs)
    recorded = isinstance(recording, RecordedSide)
    choice = WatchChoice(include, tuple(functions), inside, params=not recorded)
    side = recording if isinstance(recording, RecordedSide) else 1
    if isinstance(recording, RecordedSide) and recording.frame.empty:
        raise RecordingError(f"{recording} has nothing to compare with; record a call of a model that has taps")
    session = launch(baseline=side, target=1, device=device, timeout=timeout, folder=folder)
    with _closed_on_failure(session):
        theirs = partial(load_and_hold, port, inputs, choice, backward)
        if isinstance(recording, RecordedSide):
            held = session.run(target=theirs).target
            return judge_against_recording(session, recording, held, judging)
        ours = partial(load_and_hold, recording, inputs, choice, backward)
        return judge_held_calls(Repeats(session), *described(session.run(ours, theirs)), judging)


def _refuse_no_side(name: str, given: object) -> None:
    if isinstance(given, torch.nn.Module):
        raise ConfigError(
            f"compare: the {name} is a model ({type(given).__name__}); give a function that makes it and returns it, "
            f"or lambda: model for one that exists"
        )
    if not callable(given) and not isinstance(given, (str, Path, RecordedSide)):
        raise ConfigError(f"compare: the {name} is {given!r}; give a function that returns a model, or two scripts")


@contextlib.contextmanager
def _closed_on_failure(session: Session) -> Iterator[None]:
    """Close the session of a comparison that fails or is stopped; otherwise it stays open."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        session.close()
        raise ComparisonStopped(known_at(interrupt)) from None
    except BaseException:
        session.close()
        raise


def _compare_commands(baseline: object, target: str, choice: ScriptChoice) -> Comparison:
    if not isinstance(baseline, (str, Path)):
        raise ConfigError(
            f"the target {target!r} is a script or a command, and the baseline is neither; give two scripts, or two "
            "functions"
        )
    kind_of_sides(str(baseline), target)
    return compare_scripts(command_of(str(baseline), None), command_of(target, None), choice)


def _side_of(baseline: Callable[[], Any] | RecordedSide | str | Path) -> Callable[[], Any] | RecordedSide:
    found = _named_function(baseline)
    return Recording.open(found) if isinstance(found, (str, Path)) else found


def _named_function(given: Any) -> Any:
    """The function that a text names; anything else is returned unchanged."""
    return function_in_file(given) if isinstance(given, str) and names_function(given) else given


def compare_with_compiled(
    function: FunctionInFile,
    inputs: Any,
    options: Mapping[str, Any],
    *,
    include: str | None = None,
    threshold: float = 5.0,
    device: str | None = None,
    timeout: float = limits.TIMEOUT,
    folder: str | Path | None = None,
) -> tuple[Session, CompiledComparison, Answer]:
    """Judge the code that ``torch.compile`` makes of a function in a file; see :meth:`Session.compare_compiled`.

    ``options`` are those of ``torch.compile``. Returns the session too, which stays open, and the answer.
    """
    session = launch(baseline=1, target=1, device=device, timeout=timeout, folder=folder)
    with _closed_on_failure(session):
        work = partial(define_call, function, inputs, include)
        session.run(work, work)
        found = session.compare_compiled(CALL, threshold=threshold, **options)
    answer = answer_of(found.verdict.findings, trusted=True, results_compared=not math.isnan(found.untapped))
    if answer == "agree" and found.untapped > threshold * found.floor:
        answer = "differ"
    return session, found, answer


def record_reference(
    load: Callee, inputs: Any, folder: str | Path, *, include: str | None = None, limit: int
) -> list[str]:
    """Load a model in a separate process, call it with these inputs, and record its taps in this folder.

    The recording has at most ``limit`` bytes; returns the taps that it has only as sketches. Raises
    :class:`RecordingError` when the folder has a recording already, or the limit is too small.
    """
    with launch(baseline=1, target=1) as session, tempfile.TemporaryDirectory(dir=session.folder) as whole:
        session.run(partial(load_and_hold, load, inputs, WatchChoice(include, params=False), False))
        session.run(partial(record_held_call, whole))
        return condense(Path(whole), Path(folder).absolute(), limit)


def compare_expression(session: Session, expression: str) -> Comparison:
    """Judge the target's result of an expression, evaluated on both sides where ``%%graft`` cells run.

    The models that it calls are tapped meanwhile, unless it reaches taps of its own. If taps have to be paired by
    value, the pairs stay in the session's plan. Raises the exceptions of :meth:`Session.run`.
    """
    work = partial(hold_callee, expression, (), {}, WatchChoice())
    before = len(session.runs)
    try:
        return judge_held_calls(Repeats(session), *described(session.run(work, work)), JudgingChoice())
    except KeyboardInterrupt as interrupt:
        raise WaitInterrupted(
            " ".join(["the comparison was stopped, and its code on the ranks was interrupted.", *known_at(interrupt)])
        ) from None
    finally:
        if len(session.runs) > before:
            uninterrupted("the models on the ranks are as before the comparison", partial(_drop_call, session))


def _drop_call(session: Session) -> None:
    """End the held call on all ranks, whose models it has changed, after the run that the stop button may have left."""
    if not session.runs[-1].done:
        session.interrupt()
        session.runs[-1].wait_steps(sys.maxsize)
    if not session.closed and all(rank.alive for rank in session.ranks):
        session.run(drop_call, drop_call)
