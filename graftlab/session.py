"""The public session, and the functions that open one."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from graftlab.base import jupyter, limits
from graftlab.base.world import Side
from graftlab.config import Endpoint, GraftConfig
from graftlab.control.core import SessionCore, internals_of
from graftlab.control.past_runs import prune
from graftlab.control.run_folder import describe_session, make_run_folder
from graftlab.errors import LaunchError, PlanError, SessionError
from graftlab.jobs.rendezvous import Rendezvous
from graftlab.jobs.session_server import open_session_server
from graftlab.plan.plan import GraftPlan
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.launcher import launch_ranks
from graftlab.ranks.options import LaunchOptions
from graftlab.recordings.recorded_side import RecordedSide
from graftlab.rows.store import RowStore

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from graftlab.control.replay import Replay
    from graftlab.control.session_plots import SessionPlots
    from graftlab.control.verdicts import Verdict
    from graftlab.judging.compiled_comparison import CompiledComparison
    from graftlab.judging.replica_check import ReplicaCheck
    from graftlab.judging.tap_lines import TapLines
    from graftlab.matching.proposal import Proposal
    from graftlab.ranks.remote_functions import Callee
    from graftlab.taps.compiled_calls import GradMode
    from graftlab.widgets.dashboard import Dashboard
    from graftlab.widgets.filter_editor import FilterEditor
    from graftlab.widgets.match_editor import MatchEditor
    from graftlab.widgets.transform_editor import TransformEditor


def _show_canvas(figure: Any, canvas: Any) -> None:
    from graftlab.widgets.figure_view import show_canvas

    show_canvas(figure, canvas)


jupyter.show_canvas = _show_canvas


def open_launched(
    baseline: int | RecordedSide,
    target: int | RecordedSide,
    plan: GraftPlan | None,
    folder: str | Path | None,
    append: bool,
    **options: Any,
) -> Session:
    """Start ranks and open their session; see :func:`graftlab.launching.launch`. ``options`` are further options."""
    if plan is not None and not isinstance(plan, GraftPlan):
        raise PlanError(f"plan={plan!r}: give a graftlab.GraftPlan, such as GraftPlan().edit(b2t=...)")
    chosen = LaunchOptions(_ranks_of(baseline), _ranks_of(target), **options)
    made = make_run_folder(folder)
    if folder is None:
        prune()
    session = open_session(chosen, plan or GraftPlan(), made, launch_ranks, append=append)
    sides = {"baseline": baseline, "target": target}
    internals_of(session).default_callees = {
        name: side for name, side in sides.items() if isinstance(side, RecordedSide)
    }
    return session


def open_session(
    options: LaunchOptions,
    plan: GraftPlan,
    folder: Path,
    start: Callable[[LaunchOptions, Path, GraftPlan], Sequence[RankHandle]],
    *,
    append: bool = False,
) -> Session:
    """Open a session of the ranks that ``start`` starts, with its rows in this folder. Raises :class:`LaunchError`."""
    try:
        rows = RowStore(folder, append=append, keep_rows=options.keep_rows)
    except (SessionError, OSError) as error:
        raise LaunchError(str(error)) from error
    try:
        describe_session(folder, (options.baseline, options.target), rows.first_run)
        return Session(options, start(options, folder, plan), plan, rows, folder)
    except BaseException:
        with contextlib.suppress(SessionError):
            rows.close()
        raise


def _ranks_of(side: int | RecordedSide) -> int:
    return side.world_size if isinstance(side, RecordedSide) else side


def listen(
    baseline: int = 1,
    target: int = 1,
    *,
    plan: GraftPlan | None = None,
    timeout: float = limits.TIMEOUT,
    folder: str | Path | None = None,
    append: bool = False,
    address: str | None = None,
    token: str | None = None,
    buffer_budget: int = limits.BUFFER_BUDGET,
    keep_budget: int = limits.KEEP_BUDGET,
    keep_rows: int | None = None,
    tap_timeout: float | None = None,
) -> Session:
    """Listen for jobs that another launcher starts; returns their :class:`Session` and prints how to start them.

    A job joins if its environment asks for it, or with :func:`attach`. When all ranks of both sides have joined, they
    begin one run, which lasts as long as the jobs. Meanwhile plans are edited and rows arrive as in a launched session,
    and kept tensors, figures and widgets work. Only running code on the ranks, and interrupting it, does not. When the
    session closes, or this process ends, the jobs continue: another :func:`listen` with the same ``folder`` and
    ``append=True`` takes them over.

    ``baseline`` and ``target`` are the numbers of ranks of each job; the others are as for :func:`launch`, and the jobs
    find this session by its ``folder``. Only processes of the same user on this machine can join, unless an ``address``
    is given, such as ``"tcp://10.0.0.5:29500"``, at which other machines reach this one: then every process with the
    ``token`` can. The token is printed, and kept in the folder. By default it is taken from ``GRAFTLAB_TOKEN``, the
    file ``GRAFTLAB_TOKEN_FILE``, or the folder, or else made.

    Raises :class:`LaunchError` if a session listens in that folder already, or the address cannot be listened at.

    >>> with gl.listen(baseline=1, target=2) as other:
    ...     other.status()["state"].tolist()
    start each job with these variables, and its own command:
      baseline: GRAFTLAB_ENABLE=1 GRAFTLAB_ROLE=baseline ...
      target: GRAFTLAB_ENABLE=1 GRAFTLAB_ROLE=target ...
    ['not joined yet', 'not joined yet', 'not joined yet']
    """
    if plan is not None and not isinstance(plan, GraftPlan):
        raise PlanError(f"plan={plan!r}: give a graftlab.GraftPlan, such as GraftPlan().edit(b2t=...)")
    options = LaunchOptions(
        baseline,
        target,
        timeout=timeout,
        buffer_budget=buffer_budget,
        keep_budget=keep_budget,
        tap_timeout=tap_timeout,
        keep_rows=keep_rows,
    )
    where = make_run_folder(folder)
    listen_at = None if address is None else (_own_endpoint(address), token or GraftConfig.from_env().join_token())
    session, server = open_session_server(
        Session, options, plan or GraftPlan(), where, Rendezvous(where), append=append, listen_at=listen_at
    )
    sys.stdout.write(f"start each job with these variables, and its own command:\n{server.invitation}\n")
    return session


def _own_endpoint(address: str) -> Endpoint:
    endpoint = Endpoint.parse(address) if isinstance(address, str) else None
    if endpoint is None or endpoint.host in ("0.0.0.0", "::"):
        raise LaunchError(
            f"address={address!r}: give the address at which other machines reach this one, such as tcp://10.0.0.5:29500"
        )
    return endpoint


class Session(SessionCore):
    """Live ranks of both sides, the plan in force, and every row so far. Made by :func:`launch` or :func:`listen`.

    Methods may be called from any thread (widgets do).

    >>> session
    <Session 1+1: 2 ranks alive, ...>
    """

    def environment(self, side: Side) -> dict[str, str]:
        """The environment variables with which a job of this side joins a session that :func:`listen` has made.

        For launchers that take a dict, such as ``runtime_env={"env_vars": session.environment("target")}`` of Ray, or
        ``subprocess.Popen(env={**os.environ, ...})``. A session that listens at an address has a token, which these
        variables do not contain: they name its file, which the job's machine must have too.

        Raises :class:`SessionError` for a session that was launched.

        >>> with gl.listen(baseline=1, target=2) as other:
        ...     other.environment("target")["GRAFTLAB_ROLE"]
        start each job with these variables, and its own command:
        ...
        'target'
        """
        environment_of = internals_of(self).environment_of
        if environment_of is None:
            raise SessionError("session.environment: this session was launched, and no job can join it; use gl.listen")
        if side not in ("baseline", "target"):
            raise SessionError(f"session.environment({side!r}): a side is 'baseline' or 'target'")
        return environment_of(side)

    def replay(
        self,
        path: str | Path,
        baseline: Callable[[list[Any]], Sequence[Any]] | str,
        target: Callable[[list[Any]], Sequence[Any]] | str,
        *,
        batch_size: int = 1,
        limit: int | None = None,
        noise_floor: float | Literal["dtype"] = "dtype",
        trusted: bool = False,
    ) -> Replay:
        """Feed recorded requests to both sides, one batch per step, and report which diverge, the worst first.

        ``path`` is a file of a :class:`~graftlab.requests.RequestDumper`, read as :func:`~graftlab.requests.load_dump`
        reads it, or a folder of such files. ``baseline`` and ``target`` are functions, or expressions for a function in
        the namespace of ``%%graft`` cells. A function gets a list of up to ``batch_size`` requests as they were
        recorded, and returns as many outputs (token ids, text, a tensor, or a dict with ``output_ids`` and perhaps
        ``logits``). Only the first ``limit`` requests are replayed. Rows carry the tag ``rid``; taps above
        ``noise_floor`` (``rel_l2``) diverge, by default the rounding of the coarsest dtype of the request's taps. The
        taps of a batch belong to all of its requests.

        A damaged request is reported and skipped; a request for which a function raises has the status ``failed``.
        Raises :class:`DumpError` for a file that cannot be read, :class:`RequestError` when it holds nothing to replay,
        and what :meth:`run` raises.

        >>> from graftlab.requests import RequestDumper
        >>> dumper = RequestDumper(session.folder / "requests")
        >>> dumper.add({"rid": "req-0", "ids": [1, 2]}, {"output_ids": [3]}, created=0.0, finished=1.0)
        True
        >>> dumper.close()
        True
        >>> def generate(requests):
        ...     return [{"output_ids": [sum(request["ids"])]} for request in requests]
        >>> session.replay(session.folder / "requests", generate, generate).summary["same_tokens"].tolist()
        [True]
        """
        self._require_workers("run code on")
        from graftlab.control.replay import replay

        return replay(
            self,
            path,
            baseline,
            target,
            batch_size=batch_size,
            limit=limit,
            noise_floor=noise_floor,
            trusted=trusted,
        )

    def verdict(
        self,
        baseline: Callee | None = None,
        target: Callee | None = None,
        output: str | None = None,
        floor: float | Literal["auto"] = "auto",
        exact: Callee | None = None,
        threshold: float = 5.0,
        explain: bool = True,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        steps: int = 1,
        graft_weights: bool = False,
    ) -> Verdict:
        """Find which computation differs on the target, whether it is the cause, and which taps only inherit the error.

        ``baseline`` and ``target`` are what :meth:`run` takes, and are called several times; each call must begin from
        the same state and be repeatable. Every tap is grafted b2t, so that its difference is the error that arose at
        it. The floor is what rounding adds there, measured by running the baseline against its own record. Taps are
        grouped by name, apart from numbers in their path. A group is named if one of its taps adds more than
        ``threshold`` times its floor. With ``explain``, groups are then swapped: the output is computed with the
        target's code at some of the named groups and the baseline's at the others, which shows the effect of each.

        A baseline may be a :class:`Recording`. It computes nothing, so a floor is assumed for the dtypes unless
        ``floor`` is given, nothing is swapped, and the text states that. A target cannot be a recording.

        ``output`` is the tap at which effects are measured, in its last call. By default it is the last tap whose
        numbers round, and the first part of a result with several: logits, neither the token chosen by them, which
        seldom shows a mistake, nor a cache. ``floor`` is ``"auto"`` or a ``rel_l2`` for all taps, such as 3e-4 where
        the target multiplies in TF32. ``exact`` is the baseline in float64, with the same taps, also run on the
        baseline's ranks: its distance is added to the floor. The verdict replaces
        the plan's filters, and restores them afterwards; the transform and the renaming stay in force.

        For jobs, give no functions: the verdict waits until all have joined, at most the session's ``timeout`` for the
        next one, and judges them in the steps that they make anyway. Each run of the verdict is then ``steps`` whole
        steps of theirs, beginning at a multiple of that number. If the baseline shows the same values in each, the
        floor is measured and code is swapped, as above. If it does not, as in training, a floor is assumed for the
        dtypes unless ``floor`` is given, nothing is swapped, and the text states that. Weights and the state of
        optimizers are not grafted, unless ``graft_weights`` gives the target the baseline's, permanently.

        Raises what :meth:`run` raises, and :class:`SessionError` if no tap is named ``output``, or a job ends before
        the verdict is done.

        >>> session.verdict(forward, forward, args=(x,)).text
        'No tap adds more than rounding (2 groups of taps, at most 0 x the floor, threshold 5).'
        """
        from graftlab.judging.judge import judge
        from graftlab.judging.verdict_request import VerdictRequest

        request = VerdictRequest(
            baseline, target, output, floor, exact, threshold, explain, args, kwargs, steps, graft_weights
        )
        return judge(self, request)

    @property
    def verdicts(self) -> list[Verdict]:
        """Every verdict of this session, oldest first, whether a cell, a magic or the dashboard asked for it.

        >>> session.verdicts[-1].named
        []
        """
        return list(internals_of(self).verdicts)

    def lines(
        self,
        tap: str,
        baseline: Callee | None = None,
        target: Callee | None = None,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        threshold: float = 5.0,
    ) -> TapLines:
        """Find the lines of source at which one tap's error arises, without a verdict.

        ``tap`` is the name of a tap, or of a group of taps such as ``layers.*.attn``. Both sides run a few times, with
        every tap grafted from the baseline, so that what differs at this tap arose after the taps before it. The lines
        are found and confirmed as those of a verdict, and ``threshold`` is its threshold, over the rounding of the
        tap's dtype. The code is given as for :meth:`run`; it must be repeatable. Jobs are given no code: they are
        traced in steps that they make anyway, as for :meth:`verdict`.

        Raises what :meth:`run` raises, and :class:`SessionError` for a tap that no call measured, and for a baseline
        that is a recording.

        >>> session.lines("hidden", forward, forward, args=(x,)).text
        "'hidden' adds no more than rounding: from equal inputs, both sides compute the same."
        """
        from graftlab.judging.tap_lines import lines_of_tap
        from graftlab.judging.verdict_request import VerdictRequest

        request = VerdictRequest(baseline, target, threshold=threshold, args=args, kwargs=kwargs)
        return lines_of_tap(self, tap, request)

    def post_mortem(self, on: str, command: str = "") -> str:
        """Run a pdb command in the frames of the last failure on a rank, such as ``"target[1]"``; returns its output.

        Without a command it returns the exception and where it was raised. ``w`` shows the frames, ``u`` and ``d`` move
        up and down, ``l`` shows the source and ``p EXPR`` a value. The frames are the real ones, on the rank, with all
        their variables. They are kept until the next run begins.

        Raises :class:`SessionError` if nothing has failed, and for commands that would resume the code.

        >>> def fails(scale):
        ...     raise ValueError(f"no such scale: {scale}")
        >>> session.run(target=fails, args=(3,))
        Traceback (most recent call last):
        graftlab.errors.RunError: run ... failed on target[0]
        ...
        >>> session.post_mortem("target[0]", "p scale + 1")
        '4'
        """
        from graftlab.control.post_mortems import post_mortem

        return post_mortem(self.select(on), on, command, self._ask)

    def report(self, path: str | Path = "report.html", *, tensors: bool = False) -> Path:
        """Write what this session did and found as one page, to attach to an issue; returns its path.

        It has the conclusion and the newest verdict, the taps of the newest run as a figure and a table that can be
        sorted and searched, the worst taps with their figures, failed transforms and notes, the plan, the code that was
        run, and the versions of what it ran on. It opens from disk and loads nothing. It shows values of tensors, as
        pictures of the kept pairs, only with ``tensors=True``; messages of exceptions and the code are included
        unchanged.

        Raises :class:`SessionError` when it cannot be written.

        >>> session.report(session.folder / "report.html").name
        'report.html'
        """
        from graftlab.control.report import write_report

        return write_report(self, path, self.verdicts[-1] if self.verdicts else None, tensors)

    def match(
        self,
        baseline: Callee | None = None,
        target: Callee | None = None,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        rounds: int = 12,
        budget: int = 1 << 30,
    ) -> Proposal:
        """Find by value which tap of the target corresponds to which of the baseline, and in which layout.

        ``baseline`` and ``target`` are what :meth:`run` takes. Both sides run once and record their taps, up to
        ``budget`` bytes per rank; of the rest they record only sketches. Weights are not part of it, except those that
        are computed from codes. Matches are grafted into the target, which runs again, until nothing changes or
        ``rounds`` are over: behind a fault no value matches until the fault is grafted away. So the target's code must
        begin from the same state each time. The plan is not used, and no rows are made.

        Where the session listens for jobs, call it without arguments: taps are recorded in a step that the jobs make
        anyway, and each round is another step, in which a plan of the match's own grafts. Those grafts make rows, and
        the target's job continues with the grafted values, except for weights and states of optimizers.

        The :class:`Proposal` shows the pairs, how sure each is, and the taps without a partner with the reason; its
        ``notices`` name rows that one side has in another order. After an interrupt it has what was known by then. To
        apply it: ``session.edit(pairs=proposal)``. Raises what :meth:`run` raises.

        >>> def mine(x):
        ...     return gl.tap("h.scaled", x * 2)
        >>> def theirs(x):
        ...     return gl.tap("layers.out", (x * 2).T)
        >>> proposal = session.match(mine, theirs, args=(torch.randn(4, 6),))
        >>> [(pair.baseline, pair.target, pair.layout.text) for pair in proposal.pairs]
        [('h.scaled', 'layers.out', 'a b -> b a')]
        >>> plan = session.edit(pairs=proposal)
        >>> session.run(mine, theirs, args=(torch.randn(4, 6),)).frame["rel_l2"].tolist()
        [0.0]
        >>> plan = session.edit(pairs=None)
        """
        from graftlab.judging.match_runs import match

        return match(self, baseline, target, args=args, kwargs=kwargs, rounds=rounds, budget=budget)

    def compare_compiled(
        self,
        function: Callee,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        threshold: float = 5.0,
        grad_mode: GradMode | None = None,
        **options: Any,
    ) -> CompiledComparison:
        """Find whether this function computes the same when it is compiled, and if not, where it differs.

        The baseline calls it as it is and the target as ``torch.compile(function, **options)``: ``backend``,
        ``fullgraph``, ``dynamic``, ``mode``. It is a function or an expression, as for :meth:`run`; both sides need
        the same state, and each call must be repeatable. A :meth:`verdict`, with the taps in the graph, says which
        computation differs. Since a tap keeps the compiler from fusing across it, the results without any tap are
        compared too. If they differ only without taps, the tap that makes the difference is found by leaving taps out
        of the graph, which compiles the function a few more times. Fused code rounds less often, so how far rounding
        alone moves the eager result is measured, with the taps moved by one unit in the last place and in float64, and
        is part of every floor.

        What is compiled depends on whether gradients are computed: ``grad_mode`` is ``"grad"``, ``"no_grad"`` or
        ``"inference_mode"``; by default the call decides. If it computes gradients that it does not use, it is tried
        without them too, judged where the compiled result is wrong, and the text says which was judged. If torch
        cannot compile the call as a whole, the modules that it calls are compiled. If the compiled result is wrong,
        ever smaller parts of the call are compiled, and the lines of source whose compiled code is wrong are named
        (``lines``). If it is inductor's, its switches (``torch._inductor.config.pattern_matcher`` and others) are
        tried, and the fewest that together make it right are named.

        Raises what :meth:`verdict` raises.

        >>> print(session.compare_compiled(forward, args=(x,), backend="eager").text)
        Compiled, its result is equal to the eager one, without taps and with them.
        No tap adds more than rounding (2 groups of taps, at most 0 x the floor, threshold 5).
        """
        self._require_workers("run code on")
        from graftlab.judging.compiled_comparison import compare_compiled

        return compare_compiled(self, function, args, kwargs, options, threshold, grad_mode)

    def check(
        self,
        target: Callee | None = None,
        baseline: Callee | None = None,
        *,
        layouts: Mapping[str, str] | None = None,
        mesh: Mapping[str, int] | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> ReplicaCheck:
        """Find where the ranks of one side should agree and do not; no other side is needed.

        ``target`` (or ``baseline``) is what :meth:`run` takes, and runs once, on that side alone. The check finds
        copies that differ (activations, and with ``gl.watch(params=True)`` and ``gl.watch_training`` weights, gradients
        and optimizer state), partial sums that were not reduced, and inputs that differ. Which taps are copies is read
        from the placements of DTensors. For other taps ``layouts`` declares it, with a layout for a filter over
        ``name``, such as ``{"search('q_proj', name)": "shard(dim=-1, mesh='tp')"}``, on ``mesh`` (``{"tp": 2}``, by
        default one dimension), or ``gl.tap(layout=)`` at the tap. On a mesh of several dimensions, such as
        ``{"dp": 2, "tp": 2}``, the check also looks for copies along one of them: a weight that is sharded over ``tp``
        has to be equal within each ``dp`` group, and values computed from one group's inputs within each ``tp`` group.
        For all other taps it infers copies: tensors that are near to each other, those whose counterparts in another
        layer are equal, and gradients of weights that are copies.

        Raises what :meth:`run` raises, and :class:`SessionError` for a side of one rank.

        >>> session.check(target=forward, args=(x,))
        Traceback (most recent call last):
        graftlab.errors.SessionError: check: the target has one rank, and a check compares several; launch ...
        """
        self._require_workers("run code on")
        from graftlab.judging.replica_check import check

        return check(self, baseline, target, layouts=layouts, mesh=mesh, args=args, kwargs=kwargs)

    @property
    def plot(self) -> SessionPlots:
        """Figures of this session: ``session.plot.divergence()``, ``session.plot.heatmap("attn_out", layer=3)``, ...

        >>> figure = session.plot.divergence(noise_floor=1e-5)
        >>> figure = session.plot.heatmap("hidden", layer=3)
        """
        from graftlab.control.session_plots import SessionPlots

        return SessionPlots(self)

    def _draw(self, number: int) -> Figure:
        from graftlab.control.session_plots import divergence_of_run

        return divergence_of_run(self, number)

    def dashboard(self) -> Dashboard:
        """A widget that shows every rank and tap live, with the divergence figure, both editors and the logs.

        >>> session.dashboard().close()
        """
        from graftlab.widgets.dashboard import Dashboard

        return Dashboard(self)

    def filter_editor(self) -> FilterEditor:
        """A widget that edits the plan's four filters, and shows what each matches, while the ranks run.

        >>> session.filter_editor().close()
        """
        from graftlab.widgets.filter_editor import FilterEditor

        return FilterEditor(self)

    def match_editor(self, proposal: Proposal) -> MatchEditor:
        """A widget for a proposal's pairs: shows both sides' taps, accepts and rejects pairs, and applies the rest.

        Its ``proposal`` has the pairs that were not rejected.

        >>> session.match_editor(session.match(forward, forward, args=(x,))).close()
        """
        from graftlab.widgets.match_editor import MatchEditor

        return MatchEditor(self, proposal)

    def transform_editor(self) -> TransformEditor:
        """A widget that edits the transform, tries drafts on kept pairs, and applies them while the ranks run.

        >>> session.transform_editor().close()
        """
        from graftlab.widgets.transform_editor import TransformEditor

        return TransformEditor(self)
