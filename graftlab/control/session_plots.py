"""A session's figures: the functions of :mod:`graftlab.plots` applied to its rows and kept pairs."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from graftlab import plots
from graftlab.base.tags import RESERVED_TAGS, plain
from graftlab.base.text import counted
from graftlab.control.core import SessionCore, internals_of
from graftlab.errors import SessionError
from graftlab.grafting.kept import OCCURRENCE
from graftlab.plots import explorer
from graftlab.plots.explorer import Canvas, without_headline
from graftlab.plots.style import NotebookFigure
from graftlab.rows.schema import Row
from graftlab.verdict.conclusion import conclude_from, history_of, in_order_of, newest_rows, newest_run
from graftlab.verdict.facts import Facts
from graftlab.verdict.order import is_lost
from graftlab.verdict.summary import first_divergent_at, floor_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


F = TypeVar("F", bound=Callable[..., Any])


def _like(function: Callable[..., Any], leaving_out: str) -> Callable[[F], F]:
    """Give a method the options and the docstring of the plot function that it calls."""

    def show(method: F) -> F:
        # A wrapper, because some tools read a method's defaults from its source, where these options are missing.
        def call(self: SessionPlots, /, *args: Any, **options: Any) -> Any:
            return method(self, *args, **options)

        for name in ("__module__", "__name__", "__qualname__", "__annotations__"):
            setattr(call, name, getattr(method, name))
        own = inspect.signature(method).parameters.values()
        first = [each for each in own if each.kind is not inspect.Parameter.VAR_KEYWORD]
        given = {each.name for each in first}
        signature = inspect.signature(function)
        options = [each for name, each in signature.parameters.items() if name != leaving_out and name not in given]
        call.__signature__ = signature.replace(parameters=[*first, *options])  # type: ignore[attr-defined]
        call.__doc__ = f"{inspect.cleandoc(method.__doc__ or '')}\n\n{inspect.cleandoc(function.__doc__ or '')}"
        return cast(F, call)

    return show


class SessionPlots:
    """``session.plot``. Each method takes the keywords of the function of the same name in :mod:`graftlab.plots`."""

    def __init__(self, session: SessionCore) -> None:
        self._session = session

    @_like(plots.divergence, leaving_out="frames")
    def divergence(self, *, step: int | None = None, **options: Any) -> Figure:
        """Each tap's difference in one step of the newest run with rows, in execution order; by default the last step.

        While the run is in progress, the default is the last step that every rank has ended. By default the line of
        ``noise_floor`` is the floor assumed for these dtypes; None leaves it out.

        >>> figure = session.plot.divergence(noise_floor=1e-5)
        """
        frame = newest_run(self._session.frame, internals_of(self._session).set_aside)
        if not len(frame):
            return plots.divergence(frame, **options)
        steps = np.unique(frame["step"])
        if step is None:
            step = int(self._last_ended(steps))
        elif step not in steps:
            raise _no_rows(frame, f"step {step}")
        return _divergence_of_step(self._session, frame, step, options)

    @_like(plots.over_steps, leaving_out="frame")
    def over_steps(self, *, steps: range | None = None, **options: Any) -> Figure:
        """The taps of the newest run with rows, over all its steps or those of ``steps``.

        >>> figure = session.plot.over_steps()
        """
        frame = newest_run(self._session.frame, internals_of(self._session).set_aside)
        if steps is not None and len(frame):
            chosen = frame[frame["step"].isin([step for step in frame["step"].unique().tolist() if step in steps])]
            if not len(chosen):
                is_open = steps.stop == sys.maxsize
                raise _no_rows(frame, f"step {steps.start}{' or later' if is_open else f' to {steps.stop - 1}'}")
            frame = chosen.reset_index(drop=True)
        return plots.over_steps(frame, **options)

    def _last_ended(self, steps: Any) -> Any:
        """The last of these steps; during a run the one before, since the last may still lack taps."""
        runs = self._session.runs
        in_progress = bool(runs) and not runs[-1].done
        return sorted(steps)[-2] if in_progress and len(steps) > 1 else steps.max()

    @_like(plots.history, leaving_out="frame")
    def history(self, name: str, **options: Any) -> Figure:
        """One tap over all steps so far, without those that a verdict ran under its own plans.

        >>> figure = session.plot.history("hidden", layer=3)
        """
        return plots.history(self._plain_rows(), name, **options)

    @_like(plots.ranks, leaving_out="frame")
    def ranks(self, name: str, **options: Any) -> Figure:
        """One tap over the receiving ranks: which shard is wrong. Steps of a verdict are left out, as in `history`.

        >>> figure = session.plot.ranks("hidden", layer=3)
        """
        return plots.ranks(self._plain_rows(), name, **options)

    def _plain_rows(self) -> pd.DataFrame:
        """The rows of the runs that were started under the session's plan."""
        frame = self._session.frame
        is_aside = frame["run"].isin(internals_of(self._session).set_aside).to_numpy(dtype=bool)
        return frame[~is_aside].reset_index(drop=True) if is_aside.any() else frame

    def verdict(self, tap: str | None = None, **options: Any) -> Figure:
        """The newest verdict, or with a tap, a map of that culprit's tensors. See :meth:`Verdict.plot`.

        Raises :class:`SessionError` where the session has judged nothing yet.

        >>> _ = session.verdict(forward, forward, args=(x,))
        >>> figure = session.plot.verdict()
        """
        verdicts = internals_of(self._session).verdicts
        verdict = verdicts[-1] if verdicts else None
        if verdict is None:
            raise SessionError(
                "session.plot.verdict: nothing was judged yet; session.verdict(f, g) judges two functions"
            )
        return verdict.plot(tap, **options)

    def heatmap(self, name: str, *, dims: Sequence[int] | None = None, **tags: Any) -> Figure:
        """``|baseline - target|`` of a kept pair; see :meth:`Session.tensors` for the tags.

        ``dims`` are the one or two dimensions that are drawn, by default the last two; of the others, each cell has the
        largest difference. Raises :class:`SessionError` where no such pair is kept, or the tensor lacks a dimension.

        >>> figure = session.plot.heatmap("hidden", layer=3)
        """
        chosen, title = self._newest_pair(name, tags)
        return plots.draw_difference_map(self._session.difference_map(name, dims=dims, **chosen), title=title)

    def histogram(self, name: str, **tags: Any) -> Figure:
        """The value distributions of a kept pair, and of its difference.

        >>> figure = session.plot.histogram("hidden", layer=3)
        """
        chosen, title = self._newest_pair(name, tags)
        return plots.histogram(*self._session.tensors(name, **chosen), title=title)

    def scatter(self, name: str, **tags: Any) -> Figure:
        """Baseline against target values of a kept pair.

        >>> figure = session.plot.scatter("hidden", layer=3)
        """
        chosen, title = self._newest_pair(name, tags)
        return plots.scatter(*self._session.tensors(name, **chosen), title=title)

    def _newest_pair(self, name: str, tags: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """The tags that choose the newest of these pairs, and a title with its step.

        A run that keeps no pair of the tap leaves an older one to be drawn, so the title says which run it is not of.
        """
        others = {tag: value for tag, value in tags.items() if tag != "rank"}
        internals = internals_of(self._session)
        found = internals.pairs.newest(name, tags.get("rank"), others)
        if found is None:
            # The session raises the reason.
            return tags, name
        pinned = {tag: found[tag] for tag in ("step", OCCURRENCE) if tag in found}
        own = {tag: value for tag, value in found.items() if tag not in RESERVED_TAGS}
        title = _title(name, {**own, **tags, **pinned})
        if any(run.first_step > found["step"] for run in self._session.runs):
            newest = newest_run(self._session.frame, internals.set_aside)
            if len(newest) and found["step"] < newest["step"].min():
                title += f", not of run {newest['run'].iloc[0]}"
        return {**tags, **pinned}, title


def divergence_of_run(session: SessionCore, number: int) -> Figure:
    """Each tap's difference in the last step of a run that has ended, to be shown below the run's summary."""
    frame = session.frame_of(number)
    figure = _divergence_of_step(session, frame, int(frame["step"].max()), {})
    if isinstance(figure, NotebookFigure) and (shown := figure.interactive) is not None:
        figure.interactive = lambda: without_headline(shown())
    return figure


def _divergence_of_step(session: SessionCore, frame: pd.DataFrame, step: int, options: dict[str, Any]) -> Figure:
    run = frame["run"].iloc[0]
    facts = Facts(frame)
    options.setdefault("noise_floor", floor_of(facts)[0])
    at = first_divergent_at(facts, math.inf if options["noise_floor"] is None else options["noise_floor"])
    # The first divergent tap may be in another step than the shown one.
    first = None if at is None else int(frame["step"].iloc[at])
    elsewhere = f" (the first divergent tap is in step {first})" if first not in (None, step) else ""
    shown = frame[frame["step"] == step].reset_index(drop=True)
    lost = int((frame["status"].map(is_lost).astype(bool) & (frame["step"] != step)).sum())
    elsewhere += f"; {counted(lost, 'row')} of other steps not compared" if lost else ""
    figure = plots.divergence(shown, **options)
    if options.get("ax") is None:
        [ax] = figure.axes
        ax.set_xlabel(f"{ax.get_xlabel()}; run {run}, step {step}{elsewhere}")
    # The canvas only shows the default value, with a floor.
    if isinstance(figure, NotebookFigure) and options.keys() <= {"noise_floor"} and options["noise_floor"]:
        figure.interactive = partial(_canvas, session, frame, step, options["noise_floor"])
    return figure


def _canvas(session: SessionCore, frame: pd.DataFrame, step: int, noise_floor: float) -> Canvas:
    """One step of a run as the interactive canvas, which also shows where the run first diverged."""
    shown = in_order_of(session.taps, newest_rows(frame[frame["step"] == step]))
    rows = [line.row for line in conclude_from(shown).lines]

    def state(floor: float | None) -> dict[str, Any]:
        above = floor_of(Facts(frame))[0] if floor is None else floor
        found = conclude_from(shown, history_of(frame, above), floor)
        return {**explorer.taps(found), **explorer.figures(found)}

    return Canvas(state(noise_floor), lambda tap: figures_of_pair(session, rows[tap], step=rows[tap].step), state)


def figures_of_pair(session: SessionCore, row: Row, **narrower: Any) -> dict[str, Figure]:
    """Pictures of the pair that a row's rank keeps of its tap, by title.

    Raises :class:`SessionError` where none is kept.
    """
    # NaN does not equal itself, so it cannot select a pair.
    own = {
        tag: plain(value)
        for tag, value in row.tags.items()
        if tag not in RESERVED_TAGS and tag not in ("dims", "self") and value == value
    }
    chosen = {**own, "side": row.side, "rank": row.rank, **narrower}
    figures = SessionPlots(session)
    return {
        "where the pair differs": figures.heatmap(row.name, **chosen),
        "values and differences": figures.histogram(row.name, **chosen),
    }


def _no_rows(frame: pd.DataFrame, wanted: str) -> SessionError:
    first, last = frame["step"].min(), frame["step"].max()
    has = f"step {first}" if first == last else f"steps {first} to {last}"
    return SessionError(f"run {frame['run'].iloc[0]} has no rows of {wanted}; it has rows of {has}")


def _title(name: str, tags: dict[str, Any]) -> str:
    return ", ".join([name, *(f"{tag}={value}" for tag, value in tags.items())])
