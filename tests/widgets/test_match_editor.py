"""The widget for pairs without a browser: what it is sent of a proposal, and what accept, reject and Apply do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.pages import Browser, Screen
from kit.support import reset

import graftlab as gl
from graftlab.layouts import parse_layout
from graftlab.matching.pair import Pair
from graftlab.matching.proposal import Proposal
from graftlab.widgets import snapshot
from graftlab.widgets.match_editor import MatchEditor, _in_order

LAYOUT = "a b -> b a"
PAIRS = [
    Pair("emb", "tokens", sureness="exact", rel=0.0),
    *(
        Pair(f"h.{n}.qkv", f"blocks.{n + 1}.q", parse_layout(LAYOUT), sureness="near", rel=1e-7 * (n + 1))
        for n in range(12)
    ),
    *(Pair(f"h.{n}.out", f"blocks.{n + 1}.mixed", sureness="rule") for n in range(12)),
    Pair("head", "logits", sureness="guess", note="by name"),
]
ORDER = {
    "baseline": ("emb", *(f"h.{n}.{part}" for n in range(12) for part in ("extra", "qkv", "out")), "head"),
    "target": ("tokens", *(f"blocks.{n + 1}.{part}" for n in range(12) for part in ("q", "mixed")), "logits", "lonely"),
}
PROPOSAL = Proposal(
    tuple(PAIRS),
    {f"h.{n}.extra": "no value of the target is equal" for n in range(12)},
    {"lonely": "constant"},
    ("q and k are swapped",),
    order=ORDER,  # type: ignore[arg-type]
)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gl.Session]:
    """A session whose plan can be edited; its jobs have not started."""
    folder: Path = tmp_path_factory.mktemp("session")
    with gl.listen(1, 1, folder=folder / "run") as session:
        yield session


class Editing:
    """The editor, as a person who looks at its page acts on it."""

    def __init__(self, session: gl.Session, browser: Browser, proposal: Proposal = PROPOSAL) -> None:
        self.editor = MatchEditor(session, proposal)
        self.browser = browser
        self.screen = Screen(browser, self.editor)

    def act(self, what: str, *targets: str, value: Any = None) -> None:
        self.browser.send(self.editor.view.comm.comm_id, {"what": what, "targets": list(targets), "value": value})
        self.browser.kernel_works()


@pytest.fixture
def editing(session: gl.Session, simulated: Browser) -> Iterator[Editing]:
    made = Editing(reset(session), simulated)
    yield made
    made.editor.close()


def labels(state: dict[str, Any], side: str) -> list[tuple[str, int]]:
    return [(tap["label"], tap["count"]) for tap in state[side]]


def test_layers_are_folded_in_execution_order_with_unmatched_taps_explained(editing: Editing) -> None:
    state = editing.editor.view.state
    assert labels(state, "baseline") == [
        ("emb", 1),
        ("h.0.extra … h.11.extra", 12),
        ("h.{n}.qkv", 12),
        ("h.{n}.out", 12),
        ("head", 1),
    ]
    assert labels(state, "target") == [
        ("tokens", 1),
        ("blocks.{n+1}.q", 12),
        ("blocks.{n+1}.mixed", 12),
        ("logits", 1),
        ("lonely", 1),
    ]
    assert state["target"][-1]["why"] == "constant"
    [link] = [link for link in state["links"] if link["target"] == "blocks.{n+1}.q"]
    assert (link["sureness"], link["count"], link["rel"]) == ("near", 12, pytest.approx(1.2e-6))
    assert link["layout"] == LAYOUT
    assert state["problems"] == ["q and k are swapped"]
    assert "h.{n}.qkv" in state["code"]


def test_a_terminal_shows_the_proposal_as_text(editing: Editing, monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[dict[str, str]] = []
    monkeypatch.setattr(snapshot, "publish_display_data", lambda data, **more: published.append(data))
    editing.editor._ipython_display_()
    assert [data["text/plain"] for data in published] == ["", repr(editing.editor.proposal)]


def test_unfolded_every_tap_has_a_line(editing: Editing) -> None:
    editing.browser.send(editing.editor.view.comm.comm_id, {"what": "fold", "value": False})
    editing.browser.kernel_works()
    state = editing.editor.view.state
    assert [label for label, _ in labels(state, "target")] == list(ORDER["target"])
    assert [label for label, _ in labels(state, "baseline")] == list(ORDER["baseline"])


def test_pairs_are_accepted_rejected_and_undone(editing: Editing) -> None:
    rules = tuple(f"blocks.{n + 1}.mixed" for n in range(12))
    editing.act("accept", *rules)
    assert editing.screen.message == "12 taps accepted. Apply puts the pairs into the plan."
    assert {pair.sureness for pair in editing.editor.proposal.pairs if pair.target in rules} == {"confirmed"}
    editing.act("reject", "logits")
    assert editing.screen.message == "1 tap rejected. Apply puts the pairs into the plan."
    state = editing.editor.view.state
    assert ("logits", 1) in labels(state, "target")
    assert [tap["why"] for tap in state["target"] if tap["label"] == "logits"] == ["rejected"]
    assert state["can_undo"]
    editing.act("undo")
    editing.act("undo")
    assert editing.editor.proposal == PROPOSAL
    assert not editing.editor.view.state["can_undo"]
    # A click that was on its way.
    editing.act("undo")
    assert (editing.editor.proposal, editing.editor.message) == (PROPOSAL, "Undid the last change.")


def test_taps_of_several_layers_stand_where_the_first_of_them_runs() -> None:
    taps = [{"names": ["norm"]}, {"names": ["layers.1", "layers.0"]}, {"names": ["elsewhere"]}, {"names": ["head"]}]
    ordered = _in_order(taps, ["layers.0", "norm", "head", "layers.1"])
    assert [each["names"][0] for each in ordered] == ["layers.1", "norm", "head", "elsewhere"]


def test_apply_puts_the_pairs_into_the_plan_and_reports_omitted_guesses(session: gl.Session, editing: Editing) -> None:
    editing.act("apply")
    assert len(session.plan.pairs) == len(PAIRS) - 1
    assert editing.editor.message == (
        f"Plan {session.plan.version} has 25 pairs. 1 guess is left out until it is accepted."
    )
    assert editing.editor.view.state["is_applied"]
    editing.act("accept", "logits")
    assert not editing.editor.view.state["is_applied"]
    editing.act("apply")
    assert len(session.plan.pairs) == len(PAIRS)
    assert editing.editor.message == f"Plan {session.plan.version} has 26 pairs."
    assert editing.editor.status == "good"
    session.edit(pairs=None)


def test_several_guesses_that_are_left_out_are_counted(session: gl.Session, simulated: Browser) -> None:
    pairs = (Pair("a", "b"), Pair("c", "d", sureness="guess"), Pair("e", "f", sureness="guess"))
    editing = Editing(session, simulated, Proposal(pairs, {}, {}))
    editing.act("apply")
    assert editing.editor.message.endswith("has 1 pairs. 2 guesses are left out until they are accepted.")
    editing.editor.close()
    session.edit(pairs=None)


def test_a_link_has_its_worst_difference_its_layout_and_each_note_once(session: gl.Session, simulated: Browser) -> None:
    part, turned = parse_layout("a b -> (a b)"), parse_layout(LAYOUT)
    pairs = (
        Pair("qkv", "q", part, whole="baseline", note="first"),
        *(
            Pair(f"h.{n}.x", f"b.{n}.x", turned, whole="target", rel=(5e-3, 1e-3)[n], note=("", "each")[n])
            for n in range(2)
        ),
        Pair("same", "equal", whole="target"),
        *(Pair("shared", f"e.{n}") for n in range(2)),
    )
    left = {"one": "constant", "l.0.c": "lost", "l.1.c": "lost", "l.2.c": "other"}
    order = {"baseline": ("h.0.x", "h.1.x", "same", "qkv"), "target": ("equal",)}
    editing = Editing(session, simulated, Proposal(pairs, left, {}, order=order))  # type: ignore[arg-type]
    state = editing.editor.view.state
    shown = {link["baseline"]: [link[key] for key in ("rel", "layout", "note", "count")] for link in state["links"]}
    assert shown == {
        "qkv": [None, part.text, "first", 1],
        "h.{n}.x": [5e-3, f"{LAYOUT} of the target's", "each", 2],
        "same": [None, Pair("a", "b").layout.text, "", 1],
        "shared": [None, Pair("a", "b").layout.text, "", 1],
    }
    assert {"label": "shared", "count": 1, "why": ""} in state["baseline"]
    assert state["baseline"][:3] == [
        {"label": "h.{n}.x", "count": 2, "why": ""},
        {"label": "same", "count": 1, "why": ""},
        {"label": "qkv", "count": 1, "why": ""},
    ]
    assert [tap for tap in state["baseline"] if tap["why"]] == [
        {"label": "one", "count": 1, "why": "constant"},
        {"label": "l.0.c … l.1.c", "count": 2, "why": "lost"},
        {"label": "l.2.c", "count": 1, "why": "other"},
    ]
    assert state["folded"]
    assert editing.screen.all("match") == [editing.editor]
    assert "l.2.c" in editing.editor.static_html()
    editing.editor.close()


@pytest.mark.ranks
def test_a_match_of_two_functions_knows_the_order_in_which_their_taps_ran() -> None:
    def mine(x: torch.Tensor) -> None:
        gl.tap("zero", x)
        gl.tap("a.only", torch.arange(3.0))
        gl.tap("last", x * 2)

    def theirs(x: torch.Tensor) -> None:
        gl.tap("first", x)
        gl.tap("end", x * 2)

    with gl.launch(1, 1) as session:
        proposal = session.match(mine, theirs, args=(torch.randn(8, 5),))
    assert list(proposal.order["baseline"]) == ["zero", "a.only", "last"]
    assert list(proposal.order["target"]) == ["first", "end"]


@pytest.mark.parametrize(
    "content",
    [
        None,
        "apply",
        {},
        {"what": "accept", "targets": 5},
        {"what": "accept", "targets": ["lonely"]},
        {"what": "accept", "targets": ["x" * (1 << 20)]},
        {"what": "fold"},
        {"what": "undo"},
        {"what": "__class__", "targets": ["logits"]},
    ],
    ids=lambda content: repr(content)[:40],
)
def test_a_forged_message_changes_no_pair(editing: Editing, content: Any) -> None:
    before = editing.editor.proposal
    editing.browser.send(editing.editor.view.comm.comm_id, content)
    editing.browser.kernel_works()
    assert editing.editor.proposal.pairs == before.pairs
    assert editing.editor.session.plan.pairs == ()
    assert len(editing.editor.message) < 2000
    editing.act("accept", "logits")
    assert "1 tap accepted" in editing.editor.message
