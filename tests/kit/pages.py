"""A browser made of dicts: it holds widgets as ipywidgets does, and both code editors as a person sees them."""

from __future__ import annotations

import html
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from graftlab.widgets.code_editor import CodeEditor, CodeMirrorEditor, TextAreaEditor
from graftlab.widgets.panel import Panel
from kit.support import wait_until


class Comm:
    """The kernel's end of one widget's line to the browser."""

    def __init__(self, browser: Browser, comm_id: str) -> None:
        self.browser = browser
        self.comm_id = comm_id
        self.deliver: Callable[[Any], None] | None = None

    def on_msg(self, callback: Callable[[Any], None]) -> None:
        self.deliver = callback

    def send(self, data: dict[str, Any], buffers: Any = None) -> None:
        if data["method"] == "update":
            self.browser.updated(self.comm_id, data["state"])

    def close(self) -> None:
        del self.browser.comms[self.comm_id]


class Browser:
    """Holds the models as ipywidgets' JavaScript does: a model's next state waits until the kernel took the last one.

    ``kernel_works`` lets the kernel take what has been sent; until then it is busy.
    """

    def __init__(self, in_a_thread: bool) -> None:
        self.in_a_thread = in_a_thread
        self.comms: dict[str, Comm] = {}
        self.models: dict[str, dict[str, Any]] = {}
        self.on_update: list[Callable[[str, dict[str, Any]], None]] = [self.follow_links]
        self.queue: deque[tuple[str, dict[str, Any]] | Callable[[], None]] = deque()
        self.under_way: set[str] = set()
        self.held_back: dict[str, dict[str, Any]] = {}

    def create_comm(self, *, data: dict[str, Any], comm_id: str | None = None, **_: Any) -> Comm:
        comm = Comm(self, comm_id or f"comm{len(self.models)}")
        self.comms[comm.comm_id] = comm
        self.models[comm.comm_id] = dict(data["state"])
        return comm

    def updated(self, comm_id: str, state: dict[str, Any]) -> None:
        changed = {name: new for name, new in state.items() if self.models[comm_id].get(name) != new}
        self.models[comm_id].update(changed)
        for react in self.on_update:
            react(comm_id, changed)

    def follow_links(self, comm_id: str, changed: dict[str, Any]) -> None:
        for link in [self.models[name] for name in self.comms]:
            if link["_model_name"] == "DirectionalLinkModel":
                (source, name), (target, copy) = link["source"], link["target"]
                if source == f"IPY_MODEL_{comm_id}" and name in changed:
                    self.save(target.removeprefix("IPY_MODEL_"), **{copy: changed[name]})

    def save(self, comm_id: str, **state: Any) -> None:
        self.models[comm_id].update(state)
        if comm_id in self.under_way:
            self.held_back.setdefault(comm_id, {}).update(state)
        else:
            self.under_way.add(comm_id)
            self.queue.append((comm_id, {"method": "update", "state": state}))

    def send(self, comm_id: str, content: Any) -> None:
        self.queue.append((comm_id, {"method": "custom", "content": content}))

    def kernel_works(self) -> None:
        if self.in_a_thread:
            worker = threading.Thread(target=self.take_all)
            worker.start()
            worker.join()
        else:
            self.take_all()

    def take_all(self) -> None:
        while self.queue:
            message = self.queue.popleft()
            if callable(message):
                message()
                continue
            comm_id, data = message
            if (comm := self.comms.get(comm_id)) is not None:
                assert comm.deliver is not None
                comm.deliver({"content": {"data": data}, "buffers": []})
            if data["method"] == "update":
                self.under_way.discard(comm_id)
                if comm_id in self.comms and comm_id in self.held_back:
                    self.save(comm_id, **self.held_back.pop(comm_id))


class MirrorPage:
    """What js/editor.js does with one widget."""

    def __init__(self, browser: Browser, editor: CodeMirrorEditor, name: str = "page") -> None:
        self.browser = browser
        self.id = editor.children[0].comm.comm_id
        self.name = name
        self.state = browser.models[self.id]
        self.text, self.revision = self.state["document"]["text"], self.state["document"]["revision"]
        self.serial = 0
        browser.on_update.append(self.react)

    def react(self, comm_id: str, changed: dict[str, Any]) -> None:
        if comm_id == self.id and "document" in changed:
            self.take(**changed["document"])
        if comm_id == self.id and "request" in changed:
            self.submit(changed["request"]["action"], changed["request"]["number"])

    def take(self, text: str, revision: int, page: str, over: str | None) -> None:
        if page == self.name:
            self.revision = revision
        elif over in (None, self.text):
            self.text, self.revision = text, revision
            if over is not None and self.serial > self.state["acknowledged"]:
                self.send("changed")

    def type(self, text: str) -> None:
        self.text = text
        self.send("changed")

    def submit(self, action: str, request: int | None = None) -> None:
        self.send("submit", action=action, request=request)

    def send(self, kind: str, **more: Any) -> None:
        self.serial = max(self.serial, self.state["acknowledged"]) + 1
        message = {"text": self.text, "serial": self.serial, "revision": self.revision, "page": self.name}
        self.browser.send(self.id, {"type": kind, **message, **more})

    @property
    def error(self) -> str:
        line, message = self.state["error"]["line"], self.state["error"]["message"]
        return message if line is None else f"line {line}: {message}"

    @property
    def locked(self) -> bool:
        return bool(self.state["read_only"])


class TextAreaPage:
    """A text area and the error under it, as a person sees them."""

    def __init__(self, browser: Browser, editor: TextAreaEditor) -> None:
        self.browser = browser
        self.box = browser.models[editor.comm.comm_id]

    def child(self, number: int) -> str:
        return str(self.box["children"][number]).removeprefix("IPY_MODEL_")

    def type(self, text: str) -> None:
        self.browser.save(self.child(0), value=text)

    @property
    def text(self) -> str:
        return str(self.browser.models[self.child(0)]["value"])

    @property
    def error(self) -> str:
        shown = self.browser.models[self.child(1)]["value"]
        return re.sub("<[^>]*>", "", shown)

    @property
    def locked(self) -> bool:
        return bool(self.browser.models[self.child(0)]["disabled"])


def page_of(browser: Browser, editor: CodeEditor) -> MirrorPage | TextAreaPage:
    """The page that shows this editor."""
    return MirrorPage(browser, editor) if isinstance(editor, CodeMirrorEditor) else TextAreaPage(browser, editor)


class EditorScreen:
    """An editor, the page that shows it, and the calls of its callbacks."""

    def __init__(self, browser: Browser, editor: CodeEditor) -> None:
        self.browser = browser
        self.editor = editor
        self.page = page_of(browser, editor)
        self.events: list[tuple[str, ...]] = []
        editor.on_submit(lambda text, action: self.events.append((action, text)))
        editor.on_change(lambda text: self.events.append(("changed", text)))

    @property
    def submitted(self) -> list[tuple[str, ...]]:
        return [event for event in self.events if event[0] != "changed"]

    def click(self, action: str) -> None:
        """Click a button of the caller; the browser does not hold clicks back."""
        self.browser.queue.append(lambda: self.editor.submit(action))


class Screen:
    """A panel as a person sees it, in one page of a simulated browser."""

    def __init__(self, browser: Browser, panel: Panel) -> None:
        self.browser = browser
        self.panel = panel

    def state(self, widget: Any) -> dict[str, Any]:
        """What the browser has of a widget."""
        return self.browser.models[widget.comm.comm_id]

    def all(self, name: str, within: Any = None) -> list[Any]:
        """The widgets with the class ``graftlab-NAME``, in the order in which they stand."""
        shown = descendants(within or self.panel)
        return [each for each in shown if f"graftlab-{name}" in self.state(each).get("_dom_classes", ())]

    def find(self, name: str, within: Any = None) -> Any:
        """The one widget with the class ``graftlab-NAME``."""
        [found] = self.all(name, within)
        return found

    def click(self, name: str, within: str | None = None) -> None:
        """Click on a button that can be clicked; the kernel hears of it when it works."""
        button = self.find(name, None if within is None else self.find(within))
        assert not button.disabled
        self.browser.send(button.comm.comm_id, {"event": "click"})

    def enter(self, name: str, value: Any) -> None:
        """Enter into a box."""
        self.browser.save(self.find(name).comm.comm_id, value=value)

    def choose(self, name: str, label: str) -> None:
        """Choose from a menu or a row of buttons."""
        [index] = [n for n, shown in enumerate(self.options(name)) if shown == label]
        self.browser.save(self.find(name).comm.comm_id, index=index)

    def options(self, name: str) -> list[str]:
        return list(self.state(self.find(name))["_options_labels"])

    def chosen(self, name: str) -> str | None:
        index = self.state(self.find(name))["index"]
        return None if index is None else self.options(name)[index]

    def markup(self, name: str, within: str | None = None) -> str:
        """The HTML of a widget, as it was sent."""
        return str(self.state(self.find(name, None if within is None else self.find(within)))["value"])

    def shown(self, name: str, within: str | None = None) -> str:
        """The words of a widget."""
        return words(self.markup(name, within))

    def lines(self, name: str) -> list[list[str]]:
        """The cells of the table in a widget."""
        body = self.markup(name).partition("<tbody>")[2]
        rows = re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)
        return [[html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)] for row in rows]

    @property
    def message(self) -> str:
        """What the panel says, and none of those in it; the same as the trait of that name."""
        [own] = [each for each in self.panel.children if "graftlab-message" in self.state(each).get("_dom_classes", ())]
        shown = words(self.state(own)["value"])
        assert shown == " ".join(self.panel.message.split())
        return shown

    def settle(self) -> None:
        """Let the kernel take what was sent, and wait until nothing is going on any more."""
        for _ in range(2):
            self.browser.kernel_works()
            wait_until(lambda: not self.panel.busy, "the end of the work in the background")
            self.browser.kernel_works()
            self.panel.refresh()
        wait_until(lambda: not self.panel.busy, "the end of the work in the background")
        self.browser.kernel_works()


def descendants(widget: Any) -> Iterator[Any]:
    """A widget, and all that is in it."""
    yield widget
    for child in getattr(widget, "children", ()):
        yield from descendants(child)


def words(markup: str) -> str:
    """What is read of HTML."""
    shown = re.sub(r'<style>.*?</style>|<span class="unseen".*?</span>', "", markup, flags=re.DOTALL)
    return html.unescape(re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", shown))).strip().replace(" .", ".")
