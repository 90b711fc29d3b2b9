// The marked line: tinted, with a red number. The mark moves with the text that is typed above it.

import { RangeSet, StateEffect, StateField } from "@codemirror/state";
import { Decoration, EditorView, GutterMarker, gutterLineClass } from "@codemirror/view";

const setMark = StateEffect.define(); // the start of the line, or null

const line = Decoration.line({ class: "graftlab-error-line" });
const number = new (class extends GutterMarker {
  elementClass = "graftlab-error-number";
})();

function marksWith(value, pos) {
  return pos === null ? RangeSet.empty : RangeSet.of([value.range(pos)]);
}

export const errorMarks = StateField.define({
  create: () => null,
  update(pos, transaction) {
    for (const effect of transaction.effects) {
      if (effect.is(setMark)) return effect.value;
    }
    if (pos === null || !transaction.docChanged) return pos;
    return transaction.state.doc.lineAt(transaction.changes.mapPos(pos, 1)).from;
  },
  provide: (field) => [
    EditorView.decorations.compute([field], (state) => marksWith(line, state.field(field))),
    gutterLineClass.compute([field], (state) => marksWith(number, state.field(field))),
  ],
});

// Marks the 1-based line, or none. Python may name a line after the last one; then the last one is marked.
export function markError(view, lineNumber) {
  const { doc } = view.state;
  const pos = lineNumber === null ? null : doc.line(Math.min(lineNumber, doc.lines)).from;
  const effects = [setMark.of(pos)];
  if (pos !== null) effects.push(EditorView.scrollIntoView(pos, { yMargin: 20 }));
  view.dispatch({ effects });
}

// The 1-based number of the marked line as the text is now, or null.
export function markedLine(state) {
  const pos = state.field(errorMarks);
  return pos === null ? null : state.doc.lineAt(pos).number;
}
