"""A session's figures: the functions of :mod:`graftlab.plots` on what this session has recorded and kept."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from graftlab import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from graftlab.control.core import SessionCore


F = TypeVar("F", bound=Callable[..., Any])


def _like(function: Callable[..., Any], leaving_out: str) -> Callable[[F], F]:
    """Let help and completion show the options of a function that a method hands its ``options`` to, and its text."""

    def show(method: F) -> F:
        own = inspect.signature(method).parameters.values()
        first = [each for each in own if each.kind is not inspect.Parameter.VAR_KEYWORD]
        given = {each.name for each in first}
        signature = inspect.signature(function)
        options = [each for name, each in signature.parameters.items() if name != leaving_out and name not in given]
        method.__signature__ = signature.replace(parameters=[*first, *options])  # type: ignore[attr-defined]
        method.__doc__ = f"{inspect.cleandoc(method.__doc__ or '')}\n\n{inspect.cleandoc(function.__doc__ or '')}"
        return method

    return show


class SessionPlots:
    """``session.plot``. Each method takes the keywords of the function of the same name in :mod:`graftlab.plots`."""

    def __init__(self, session: SessionCore) -> None:
        self._session = session

    @_like(plots.divergence, leaving_out="frames")
    def divergence(self, **options: Any) -> Figure:
        """The newest run that has rows: each tap's difference, in execution order.

        >>> figure = session.plot.divergence(noise_floor=1e-5)
        """
        frame = self._session.frame
        newest = frame["run"].max() if len(frame) else None
        return plots.divergence(frame[frame["run"] == newest] if newest is not None else frame, **options)

    @_like(plots.history, leaving_out="frame")
    def history(self, name: str, **options: Any) -> Figure:
        """One tap over all steps so far.

        >>> figure = session.plot.history("hidden", layer=3)
        """
        return plots.history(self._session.frame, name, **options)

    @_like(plots.ranks, leaving_out="frame")
    def ranks(self, name: str, **options: Any) -> Figure:
        """One tap over the receiving ranks: which shard is wrong.

        >>> figure = session.plot.ranks("hidden", layer=3)
        """
        return plots.ranks(self._session.frame, name, **options)

    def heatmap(self, name: str, *, dims: tuple[int, int] | None = None, **tags: Any) -> Figure:
        """``|baseline - target|`` of a kept pair; see :meth:`Session.tensors` for the tags.

        >>> figure = session.plot.heatmap("hidden", layer=3)
        """
        found = self._session.difference_map(name, dims=dims, **tags)
        return plots.draw_difference_map(found, title=_title(name, tags))

    def histogram(self, name: str, **tags: Any) -> Figure:
        """The value distributions of a kept pair, and of its difference.

        >>> figure = session.plot.histogram("hidden", layer=3)
        """
        return plots.histogram(*self._session.tensors(name, **tags), title=_title(name, tags))

    def scatter(self, name: str, **tags: Any) -> Figure:
        """Baseline against target values of a kept pair.

        >>> figure = session.plot.scatter("hidden", layer=3)
        """
        return plots.scatter(*self._session.tensors(name, **tags), title=_title(name, tags))


def _title(name: str, tags: dict[str, Any]) -> str:
    return ", ".join([name, *(f"{tag}={value}" for tag, value in tags.items())])
