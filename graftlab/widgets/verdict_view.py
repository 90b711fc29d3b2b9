"""The verdict on the dashboard: an expression, a button, and what it came to."""

from __future__ import annotations

import html
from functools import partial

import ipywidgets as widgets

from graftlab.control.judging import judge
from graftlab.errors import SessionError
from graftlab.widgets.inputs import TextInput
from graftlab.widgets.panel import Panel, row, update


class VerdictView(Panel):
    """Judges an expression that both sides evaluate, as ``%graft verdict EXPR`` does, while the page stays usable."""

    def __init__(self, host: Panel) -> None:
        super().__init__(host.session, host=host)
        self._expression = TextInput(
            placeholder="an expression, such as model(x)",
            description="Verdict on",
            continuous_update=False,
            layout={"width": "34em", "max_width": "100%"},
            style={"description_width": "max-content"},
        )
        self._expression.add_class("graftlab-verdict-expression")
        # Jobs run their own code, which is judged as it is.
        self._of_jobs = not all(rank.takes_work for rank in host.session.ranks)
        if self._of_jobs:
            self._expression.placeholder = "what the jobs do"
        tooltip = "Run both sides several times, and tell which computation differs"
        self._result = widgets.HTML().add_class("graftlab-verdict-text")
        # The expression on the screen may still be held back when the click comes, and the one before it judged.
        ask = partial(self._expression.fetch, "judge", self.guarded(self._judge))
        self._button = self.button("Judge", "judge", tooltip, self._judge_jobs if self._of_jobs else ask)
        self._open([row(self._expression, self._button), self._result])

    def _show(self) -> None:
        # Nothing of its own is in the message line, which is the host's.
        closed = self.session.closed
        update(self._expression, disabled=closed or self._of_jobs)
        update(self._button, disabled=closed)

    def _judge_jobs(self) -> None:
        update(self._result, value="judging the jobs …")
        self.in_background(self._judge_now, None)

    def _judge(self, typed: str) -> None:
        expression = typed.strip()
        if not expression:
            raise SessionError("write the expression that both sides are to evaluate, such as model(x)")
        # What was wrong with the one before says nothing of this one.
        self.say("")
        update(self._result, value=f"judging <code>{html.escape(expression)}</code> …")
        self.in_background(self._judge_now, expression)

    def _judge_now(self, expression: str | None) -> None:
        try:
            shown = judge(self.session, expression, expression)._repr_mimebundle_()["text/html"]
        except BaseException:
            # Why is said in the panel's message.
            update(self._result, value="")
            raise
        update(self._result, value=shown)
