"""A past run read from its folder: its rows as a frame, a report of them, and a verdict on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from graftlab.control.run_folder import sizes_of
from graftlab.errors import SessionError
from graftlab.rows import loading
from graftlab.rows.rendering import RowsFrame, bounded_repr
from graftlab.rows.schema import MEASURED

if TYPE_CHECKING:
    from graftlab.control.verdicts import Verdict


def load_run(folder: str | Path) -> LoadedRun:
    """The rows in a session's run folder as a frame. Half a line at the end, as a killed session leaves, is ignored.

    Every function of :mod:`graftlab.plots` that takes a frame takes this one. ``report`` writes the rows as a page,
    ``verdict`` names the computation that differs.

    Raises :class:`SessionError` when there are no rows to read, a line in the middle is damaged, or the checksum of a
    line or a block does not match.

    >>> loaded = gl.load_run(session.folder)
    >>> len(loaded) == len(session.frame)
    True
    >>> loaded.report(session.folder / "rows.html").name
    'rows.html'
    """
    loaded = LoadedRun(loading.load_run(folder))
    loaded.folder = Path(folder).expanduser()
    return loaded


class LoadedRun(pd.DataFrame):
    """The frame that :func:`graftlab.load_run` returns. Frames derived from it are plain pandas frames."""

    _metadata = ["folder"]  # noqa: RUF012
    folder: Path
    """The folder of its rows."""

    @property
    def _constructor(self) -> Callable[..., pd.DataFrame]:
        return pd.DataFrame

    def __repr__(self) -> str:
        return bounded_repr(self)

    def _repr_html_(self) -> str | None:
        return RowsFrame(self)._repr_html_()

    def report(self, path: str | Path = "report.html", *, verdict: Verdict | None = None) -> Path:
        """Write a report of the newest run in the folder as one page; returns its path.

        Like that of :meth:`graftlab.Session.report`, without the plan, the code, the tensors and the environment, which
        rows do not have. Raises :class:`SessionError` when it cannot be written.
        """
        from graftlab.control.report import write_report_of_rows

        return write_report_of_rows(self.folder, path, verdict)

    def verdict(
        self,
        *,
        floor: float | None = None,
        threshold: float = 5.0,
        run: int | None = None,
        step: int | None = None,
    ) -> Verdict:
        """Name the computation that differs on the target, judging only the rows.

        It needs a step in which every tap was grafted b2t, as with ``GRAFTLAB_B2T_FILTER=True``: there the difference
        at each tap is the error that arose at it. By default it takes the last such step of the newest run that has
        one; ``run`` and ``step`` choose another. The text reports other such steps that show more. ``floor`` is a
        ``rel_l2``; by default it is assumed for the dtypes. Nothing is run, so the text lists what remains unknown.

        Raises :class:`SessionError` if no step has every tap grafted.
        """
        from graftlab.judging.judge import judge_rows
        from graftlab.verdict.model_data import data_of_run

        chosen: Any = self if run is None else self[self["run"] == run]
        of_step = chosen if step is None else chosen[chosen["step"] == step]
        found = _last_step(of_step, "grafted")
        if found is None:
            this = "this run" if run is None else f"run {run}"
            in_none = "in no step of {} was every tap" if step is None else f"in step {step} of {{}} not every tap was"
            raise SessionError(
                f"verdict: {in_none.format(this)} grafted from the baseline, so the rows do not show "
                f"where each error arose. "
                f"{_what_to_do(of_step)}"
            )
        number, step, grafted = found
        of_run: Any = self[self["run"] == number]
        before = _last_step(of_run, "compared")
        compared = self.iloc[:0] if before is None else before[2]
        where = f"step {step} of run {number}, in which every tap was grafted"
        shown = data_of_run(of_run, compared, grafted)
        others = of_run[of_run["step"].isin(_whole_steps(of_run, "grafted").index.get_level_values(1))]
        others = others[others["step"] != step]
        whole = _whole_steps(of_run, "compared")
        return judge_rows(
            compared,
            grafted,
            others,
            shown,
            sizes_of(self.folder, number),
            ungrafted=of_run[of_run["step"].isin(whole.index.get_level_values(1))],
            floor=floor,
            threshold=threshold,
            where=where,
        )


def _last_step(rows: pd.DataFrame, status: str) -> tuple[int, int, pd.DataFrame] | None:
    """The last step in which every measured row except weights and settings has this status.

    Only the run's steps with the most rows count, since the last step may be incomplete.
    """
    whole = _whole_steps(rows, status)
    if not len(whole):
        return None
    whole = whole.loc[[whole.index.get_level_values(0).max()]]
    run, step = whole[whole["size"] == whole["size"].max()].index[-1]
    return int(run), int(step), rows[(rows["run"] == run) & (rows["step"] == step)]


def _whole_steps(rows: pd.DataFrame, status: str) -> pd.DataFrame:
    """The steps in which every measured row has this status: their numbers of rows, by run and step."""
    from graftlab.verdict.model_data import without_data

    computed = without_data(rows[rows["status"].isin(MEASURED)])
    wanted = (computed["status"] == status) & ((computed["direction"] == "b2t") | (status == "compared"))
    steps = wanted.groupby([computed["run"], computed["step"]]).agg(["all", "size"])
    whole: pd.DataFrame = steps[steps["all"].astype(bool)]
    return whole


def _what_to_do(rows: pd.DataFrame) -> str:
    from graftlab.verdict.added import unseen_of
    from graftlab.verdict.model_data import without_data

    if not len(rows):
        return "It has no rows"
    if len(without_data(rows[rows["status"].isin(MEASURED)])):
        return "Let the jobs run with GRAFTLAB_B2T_FILTER=True; graftlab.plots shows the differences as they are"
    return f"No tap was measured on both sides: {' '.join(unseen_of(rows)).rstrip('.')}"
