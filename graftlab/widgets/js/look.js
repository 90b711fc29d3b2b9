// Colours and sizes. In JupyterLab they are those of its theme, elsewhere a light or a dark palette of our own.

import { HighlightStyle, syntaxHighlighting } from "@codemirror/language";
import { EditorView } from "@codemirror/view";
import { tags } from "@lezer/highlight";

// name: [JupyterLab's variable, light, dark]
const COLOURS = {
  background: ["cell-editor-background", "#f7f8fa", "#1b1e23"],
  text: ["content-font-color1", "#1f2328", "#dde1e6"],
  faint: ["ui-font-color2", "#6b7280", "#8b949e"],
  line: ["border-color2", "#e1e4e8", "#343941"],
  border: ["cell-editor-border-color", "#d0d7de", "#444c56"],
  focus: ["brand-color1", "#1976d2", "#58a6ff"],
  cursor: ["editor-cursor-color", "#1f2328", "#dde1e6"],
  selection: ["editor-selected-focused-background", "#cfe3fb", "#2b4a6f"],
  popup: ["layout-color1", "#ffffff", "#24282e"],
  error: ["error-color1", "#c62828", "#ff7b72"],
  keyword: ["mirror-editor-keyword-color", "#a0287f", "#ff7ab2"],
  name: ["mirror-editor-def-color", "#1250b8", "#79b8ff"],
  string: ["mirror-editor-string-color", "#a3381f", "#ffab70"],
  number: ["mirror-editor-number-color", "#1b6e3c", "#a5d6a7"],
  comment: ["mirror-editor-comment-color", "#5d7f78", "#7d9a94"],
  operator: ["mirror-editor-operator-color", "#7a3fb5", "#c9a5ff"],
  property: ["mirror-editor-property-color", "#2a5d8f", "#9ecbff"],
  meta: ["mirror-editor-meta-color", "#8a3fd1", "#d2a8ff"],
};

const colour = (name) => `var(--gl-${name})`;
const tint = (name, percent) => `color-mix(in srgb, ${colour(name)} ${percent}%, transparent)`;

function palette(choose) {
  return Object.fromEntries(Object.entries(COLOURS).map(([name, of]) => [`--gl-${name}`, choose(of)]));
}

const PALETTES = {
  jupyter: palette(([variable, light]) => `var(--jp-${variable}, ${light})`),
  light: palette(([, light]) => light),
  dark: palette(([, , dark]) => dark),
};

const codeFont = "var(--jp-code-font-family, ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace)";

const theme = EditorView.theme({
  // JupyterLab has a rule for .cm-editor, which this has to outdo.
  "&.cm-editor": {
    height: "calc(var(--gl-lines) * 1.45em + 10px)",
    minHeight: "4em",
    resize: "vertical",
    overflow: "hidden",
    fontSize: "var(--jp-code-font-size, 13px)",
    color: colour("text"),
    backgroundColor: colour("background"),
  },
  "&.cm-focused": { outline: "none" }, // the ring is drawn around the whole widget
  ".cm-scroller": { fontFamily: codeFont, lineHeight: "1.45", overflow: "auto" },
  ".cm-content": { padding: "5px 0", caretColor: colour("cursor") },
  ".cm-line": { padding: "0 8px 0 6px" },
  ".cm-cursor, .cm-dropCursor": { borderLeftColor: colour("cursor"), borderLeftWidth: "1.6px" },
  "&.cm-focused > .cm-scroller > .cm-selectionLayer .cm-selectionBackground, .cm-selectionBackground": {
    background: colour("selection"),
  },
  ".cm-gutters": {
    backgroundColor: "transparent",
    color: colour("faint"),
    border: "none",
    borderRight: `1px solid ${colour("line")}`,
  },
  ".cm-lineNumbers .cm-gutterElement": { padding: "0 4px 0 10px", minWidth: "2em" },
  ".cm-foldGutter .cm-gutterElement": { padding: "0 4px 0 0", opacity: "0.55" },
  ".cm-activeLine": { backgroundColor: "transparent" },
  ".cm-activeLineGutter": { backgroundColor: "transparent" },
  "&.cm-focused .cm-activeLine": { backgroundColor: tint("focus", 7) },
  "&.cm-focused .cm-activeLineGutter": { backgroundColor: tint("focus", 7), color: colour("text") },
  "&.cm-focused .cm-matchingBracket, .cm-matchingBracket": {
    backgroundColor: tint("focus", 22),
    outline: `1px solid ${tint("focus", 45)}`,
  },
  "&.cm-focused .cm-nonmatchingBracket": { backgroundColor: tint("error", 22) },
  ".cm-selectionMatch": { backgroundColor: tint("focus", 14) },
  ".cm-foldPlaceholder": { backgroundColor: "transparent", border: `1px solid ${colour("line")}`, color: colour("faint") },
  ".cm-panels": { backgroundColor: colour("popup"), color: colour("text"), borderColor: colour("line") },
  ".cm-tooltip": {
    backgroundColor: colour("popup"),
    color: colour("text"),
    border: `1px solid ${colour("border")}`,
    borderRadius: "3px",
    boxShadow: "0 2px 8px rgba(0, 0, 0, 0.25)",
  },
  ".cm-tooltip.cm-tooltip-autocomplete > ul": { fontFamily: codeFont },
  ".cm-tooltip.cm-tooltip-autocomplete > ul > li": { padding: "2px 8px" },
  ".cm-tooltip-autocomplete ul li[aria-selected]": { backgroundColor: tint("focus", 25), color: colour("text") },
  ".cm-completionMatchedText": { textDecoration: "none", fontWeight: "bold" },
  // After the active line, which would hide the mark while the cursor is on it.
  ".cm-line.graftlab-error-line, &.cm-focused .cm-line.graftlab-error-line": {
    backgroundColor: tint("error", 14),
    boxShadow: `inset 2px 0 0 ${colour("error")}`,
  },
  ".cm-gutterElement.graftlab-error-number, &.cm-focused .cm-gutterElement.graftlab-error-number": {
    backgroundColor: tint("error", 14),
    color: colour("error"),
    fontWeight: "bold",
  },
});

const code = HighlightStyle.define([
  { tag: [tags.keyword, tags.bool, tags.null], color: colour("keyword"), fontWeight: "bold" },
  { tag: tags.definition(tags.variableName), color: colour("text") },
  {
    tag: [tags.function(tags.definition(tags.variableName)), tags.definition(tags.className)],
    color: colour("name"),
  },
  { tag: [tags.string, tags.special(tags.string)], color: colour("string") },
  { tag: tags.number, color: colour("number") },
  { tag: tags.comment, color: colour("comment"), fontStyle: "italic" },
  { tag: tags.operator, color: colour("operator") },
  { tag: tags.propertyName, color: colour("property") },
  { tag: tags.meta, color: colour("meta") },
  { tag: tags.invalid, color: colour("error"), textDecoration: "underline" },
]);

export const look = [theme, syntaxHighlighting(code)];

const frame = `
.graftlab-editor {
  border: 1px solid var(--gl-border); border-radius: 3px; overflow: hidden; margin: 2px;
  background: var(--gl-background);
}
.graftlab-editor:focus-within { border-color: var(--gl-focus); box-shadow: 0 0 0 1px var(--gl-focus); }
.graftlab-footer {
  display: flex; align-items: baseline; gap: 1em; justify-content: space-between; padding: 3px 8px;
  border-top: 1px solid var(--gl-line); color: var(--gl-faint);
  font: 12px/1.4 var(--jp-ui-font-family, system-ui, sans-serif);
}
.graftlab-footer .graftlab-error {
  color: var(--gl-error); white-space: pre-wrap; overflow-wrap: anywhere; overflow-y: auto; max-height: 8.4em;
}
.graftlab-footer .graftlab-status { color: var(--gl-faint); white-space: nowrap; }
.graftlab-footer .graftlab-waiting { font-style: italic; }
/* Completions hang out of a line. */
.graftlab-one-line { position: relative; overflow: visible; }
.graftlab-one-line .cm-editor.cm-editor { height: auto; min-height: 0; resize: none; overflow: visible; }
.graftlab-one-line .cm-editor.cm-editor .cm-scroller { max-height: 9em; }
.graftlab-one-line .cm-gutters.cm-gutters { display: none; }
.graftlab-one-line .cm-editor.cm-focused .cm-line.cm-activeLine { background: transparent; }
.graftlab-one-line .graftlab-hint { display: none; }
/* Over the end of the line: a footer that comes and goes would move what is below. */
.graftlab-one-line .graftlab-footer:not(:has(.graftlab-error)) {
  position: absolute; right: 0; bottom: 0; border: none; background: var(--gl-background); pointer-events: none;
  visibility: hidden;
}
.graftlab-one-line .graftlab-footer:not(:has(.graftlab-error)):has(.graftlab-waiting) {
  visibility: visible; animation: graftlab-appear 0.2s 0.5s both;
}
@keyframes graftlab-appear { from { opacity: 0; } }
`;

// Gives the root its colours now and whenever the theme changes. `wanted` answers true, false, or null for
// "as JupyterLab has it"; `tell` hears whether it is dark. Returns what stops it, with `refresh` on it.
export function watchTheme(root, wanted, tell) {
  const style = document.createElement("style");
  style.textContent = frame;
  root.prepend(style);
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  let known = null;

  const refresh = () => {
    const jupyter = document.body.getAttribute("data-jp-theme-light");
    const asked = wanted();
    const dark = asked ?? (jupyter === null ? system.matches : jupyter === "false");
    const likeJupyter = jupyter !== null && dark === (jupyter === "false");
    const colours = likeJupyter ? PALETTES.jupyter : dark ? PALETTES.dark : PALETTES.light;
    for (const [name, value] of Object.entries(colours)) root.style.setProperty(name, value);
    if (dark !== known) tell(dark);
    known = dark;
  };
  const observer = new MutationObserver(refresh);
  observer.observe(document.body, { attributeFilter: ["data-jp-theme-light", "data-jp-theme-name"] });
  system.addEventListener("change", refresh);
  refresh();

  const stop = () => {
    observer.disconnect();
    system.removeEventListener("change", refresh);
  };
  stop.refresh = refresh;
  return stop;
}
