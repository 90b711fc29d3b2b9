// The browser's half of graftlab.widgets.code_mirror, which says what the messages and the traits mean.

import { acceptCompletion, autocompletion } from "@codemirror/autocomplete";
import { indentLess, indentMore } from "@codemirror/commands";
import { python, pythonLanguage } from "@codemirror/lang-python";
import { indentUnit } from "@codemirror/language";
import { Annotation, Compartment, EditorSelection, EditorState, Prec } from "@codemirror/state";
import { EditorView, keymap } from "@codemirror/view";
import { basicSetup } from "codemirror";

import { errorMarks, markedLine, markError } from "./error_marks.js";
import { look, watchTheme } from "./look.js";

const PAUSE = 300; // ms without a key before the kernel hears of a change
const PAGE = Math.random().toString(36).slice(2); // crypto.randomUUID is missing where there is no https
const INDENT = "    ";
const MODIFIER = /Mac|iPhone|iPad/.test(navigator.platform) ? "\u2318" : "Ctrl-";

const fromElsewhere = Annotation.define(); // a change that did not come from this view's person

// The text of one widget in this page, whatever the number of its views.
class Draft {
  constructor(model) {
    this.model = model;
    this.views = new Map(); // to their footers
    this.serial = 0;
    this.pause = null;
    this.waiting = null; // {serial, action} of a submit that the kernel has not acknowledged
    this.status = "";
    const { text, revision } = model.get("document");
    this.text = text;
    this.revision = revision;
    model.on("change:document", () => this.take(model.get("document")));
    model.on("change:acknowledged", () => this.acknowledged(model.get("acknowledged")));
    model.on("change:request", () => {
      const { number, action } = model.get("request");
      this.submit(action, number);
    });
  }

  typed(text, view) {
    this.text = text;
    this.show(view);
    if (!this.waiting) this.say("");
    clearTimeout(this.pause);
    this.pause = setTimeout(() => this.send("changed"), PAUSE);
  }

  // Tells the kernel at once what it would hear after the pause.
  flush() {
    if (this.pause !== null) this.send("changed");
  }

  submit(action, request = null) {
    const serial = this.send("submit", { action, request });
    this.waiting = { serial, action };
    this.say(`${action}: waiting for the kernel`);
  }

  send(type, more = {}) {
    clearTimeout(this.pause);
    this.pause = null;
    // After a reload, or beside another page, the kernel may have seen higher numbers than this page has given.
    this.serial = Math.max(this.serial, this.model.get("acknowledged")) + 1;
    const { text, serial, revision } = this;
    this.model.send({ type, text, serial, revision, page: PAGE, ...more });
    return serial;
  }

  acknowledged(serial) {
    if (!this.waiting || serial < this.waiting.serial) return;
    const { action } = this.waiting;
    this.waiting = null;
    this.say(`${action}: received`);
  }

  // A text from the kernel, or from another page by way of the kernel. This page's own is older than what it shows.
  take({ text, revision, page, over }) {
    if (page === PAGE) {
      this.revision = revision;
      return;
    }
    const offered = over !== null;
    if (offered && this.text !== over) return; // what was typed is on its way to the kernel
    clearTimeout(this.pause);
    this.pause = null;
    this.text = text;
    this.revision = revision;
    this.show();
    // What was sent and then taken back, just before the offer came, would look to the kernel as if it was declined.
    if (offered && this.serial > this.model.get("acknowledged")) this.send("changed");
  }

  show(except) {
    for (const view of this.views.keys()) {
      if (view !== except) replaceText(view, this.text);
    }
  }

  say(status) {
    this.status = status;
    for (const footer of this.views.values()) footer.refresh();
  }
}

// Changes only what differs, so that the cursor and the scroll position stay where they can.
function replaceText(view, text) {
  const old = view.state.doc.toString();
  if (old === text) return;
  const most = Math.min(old.length, text.length);
  let start = 0;
  while (start < most && old[start] === text[start]) start++;
  let end = 0;
  while (end < most - start && old[old.length - 1 - end] === text[text.length - 1 - end]) end++;
  view.dispatch({
    changes: { from: start, to: old.length - end, insert: text.slice(start, text.length - end) },
    annotations: fromElsewhere.of(true),
  });
}

// Spaces up to the next stop at the cursor; whole lines where something is selected.
function indent(view) {
  const { state } = view;
  if (state.readOnly) return false;
  if (state.selection.ranges.some((range) => !range.empty)) return indentMore(view);
  view.dispatch(
    state.changeByRange((range) => {
      const column = range.head - state.doc.lineAt(range.head).from;
      const insert = INDENT.slice(column % INDENT.length);
      return { changes: { from: range.head, insert }, range: EditorSelection.cursor(range.head + insert.length) };
    }),
    { scrollIntoView: true, userEvent: "input" },
  );
  return true;
}

function completeNames(model) {
  return (context) => {
    const word = context.matchBefore(/[\w.]+/);
    const names = model.get("completions");
    if (!names.length || (!word && !context.explicit)) return null;
    const options = names.map((label) => ({ label, type: label.includes(".") ? "property" : "variable", boost: 1 }));
    return { from: word ? word.from : context.pos, options, validFor: /^[\w.]*$/ };
  };
}

// JupyterLab listens for keys on the document: without this, Shift-Enter would run the cell. Only saving is for it.
function keepKeys(root) {
  root.addEventListener("keydown", (event) => {
    const save = (event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "s";
    if (!save) event.stopPropagation();
  });
}

// The line under the text: the error, or else the keys; and what became of the last submit.
class Footer {
  constructor(model, draft, view) {
    this.model = model;
    this.draft = draft;
    this.view = view;
    this.dom = document.createElement("div");
    this.dom.className = "graftlab-footer";
    this.message = this.dom.appendChild(document.createElement("span"));
    this.status = this.dom.appendChild(document.createElement("span"));
    this.status.className = "graftlab-status";
    this.status.setAttribute("aria-live", "polite");
    this.refresh();
  }

  refresh() {
    const { message } = this.model.get("error");
    const line = markedLine(this.view.state);
    const failed = line !== null || message !== "";
    this.message.className = failed ? "graftlab-error" : "graftlab-hint";
    this.message.role = failed ? "alert" : null;
    const keys = this.model.get("read_only") ? "read-only" : `${MODIFIER}Enter applies \u00b7 Esc, Tab leaves`;
    const text = failed ? (line === null ? message : `line ${line}: ${message}`) : keys;
    // What has not changed is not set again, or a screen reader would say it with every key.
    if (this.message.textContent !== text) this.message.textContent = text;
    // That the kernel has the text is no success: what it made of it is in the error, or in the panel's message.
    this.status.textContent = failed && this.draft.waiting === null ? "" : this.draft.status;
    this.status.classList.toggle("graftlab-waiting", this.draft.waiting !== null);
  }
}

function render(model, draft, el) {
  const root = document.createElement("div");
  root.className = "graftlab-editor";
  root.style.setProperty("--gl-lines", model.get("lines"));
  keepKeys(root);

  const submits = (action) => () => {
    if (!model.get("read_only")) draft.submit(action);
    return true;
  };
  const dark = new Compartment();
  const readOnly = new Compartment();
  const names = { autocomplete: completeNames(model) }; // beside the language's own
  const language = model.get("language");
  const oneLine = language === "filter";
  root.classList.toggle("graftlab-one-line", oneLine);
  const highlighting = { python: python(), filter: pythonLanguage }[language] ?? []; // a filter is no place for print()
  const keys = oneLine
    ? [
        { key: "Enter", run: (target) => acceptCompletion(target) || true },
        { key: "Tab", run: acceptCompletion },
      ]
    : [{ key: "Tab", run: (target) => acceptCompletion(target) || indent(target), shift: indentLess }];
  const view = new EditorView({
    parent: root,
    state: EditorState.create({
      doc: draft.text,
      extensions: [
        Prec.highest(
          keymap.of([
            { key: "Mod-Enter", run: submits("apply") },
            { key: "Mod-Shift-Enter", run: submits("try") },
            ...keys,
          ]),
        ),
        basicSetup,
        autocompletion({ icons: false }), // they need fonts that are not everywhere
        indentUnit.of(INDENT),
        EditorState.tabSize.of(INDENT.length),
        highlighting,
        oneLine ? EditorView.lineWrapping : [],
        EditorState.languageData.of(() => [names]),
        EditorView.contentAttributes.of({
          "aria-label": `${model.get("label")}${oneLine ? "" : "; press Escape, then Tab to leave it"}`,
        }),
        readOnly.of(EditorState.readOnly.of(model.get("read_only"))),
        dark.of([]),
        look,
        errorMarks,
        EditorView.domEventHandlers({ blur: () => draft.flush() }),
        EditorView.updateListener.of((update) => {
          const typed = update.docChanged && !update.transactions.some((one) => one.annotation(fromElsewhere));
          if (typed) draft.typed(update.state.doc.toString(), view);
          if (update.docChanged) footer.refresh(); // the marked line may have another number now
        }),
      ],
    }),
  });
  const footer = new Footer(model, draft, view);
  root.append(footer.dom);
  draft.views.set(view, footer);

  const showError = () => {
    markError(view, model.get("error").line);
    footer.refresh();
  };
  const setReadOnly = () => {
    view.dispatch({ effects: readOnly.reconfigure(EditorState.readOnly.of(model.get("read_only"))) });
    footer.refresh();
  };
  model.on("change:error", showError);
  model.on("change:read_only", setReadOnly);
  showError();
  const unwatch = watchTheme(
    root,
    () => model.get("dark"),
    (isDark) => view.dispatch({ effects: dark.reconfigure(EditorView.darkTheme.of(isDark)) }),
  );
  model.on("change:dark", unwatch.refresh);
  el.append(root);

  return () => {
    model.off("change:error", showError);
    model.off("change:read_only", setReadOnly);
    model.off("change:dark", unwatch.refresh);
    unwatch();
    draft.flush();
    draft.views.delete(view);
    view.destroy();
  };
}

// anywidget calls this once for each widget, before it draws the first view.
export default () => {
  let draft;
  return {
    initialize({ model }) {
      draft = new Draft(model);
    },
    render({ model, el }) {
      return render(model, draft, el);
    },
  };
};
