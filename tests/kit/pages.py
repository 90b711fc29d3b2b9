"""A browser made of dicts: it holds widgets as ipywidgets does, and both code editors as a person sees them."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from graftlab.widgets.code_editor import CodeEditor, CodeMirrorEditor, TextareaEditor


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


class TextareaPage:
    """A text area and the error under it, as a person sees them."""

    def __init__(self, browser: Browser, editor: TextareaEditor) -> None:
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
        return re.sub("<code>.*</code>|<[^>]*>", "", shown)

    @property
    def locked(self) -> bool:
        return bool(self.browser.models[self.child(0)]["disabled"])


class Desk:
    """An editor, the page that shows it, and what its callbacks were told."""

    def __init__(self, browser: Browser, editor: CodeEditor) -> None:
        self.browser = browser
        self.editor = editor
        self.page = (
            MirrorPage(browser, editor) if isinstance(editor, CodeMirrorEditor) else TextareaPage(browser, editor)
        )
        self.events: list[tuple[str, ...]] = []
        editor.on_submit(lambda text, action: self.events.append((action, text)))
        editor.on_change(lambda text: self.events.append(("changed", text)))

    @property
    def submitted(self) -> list[tuple[str, ...]]:
        return [event for event in self.events if event[0] != "changed"]

    def click(self, action: str) -> None:
        """A click on a button of the caller's, which comes to the kernel without being held back."""
        self.browser.queue.append(lambda: self.editor.submit(action))
