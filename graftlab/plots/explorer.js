// Taps as a linked figure and table, without dependencies: the dashboard and the figures of a notebook show it as a
// widget, and a report contains it in its page.
//
// mount(root, act, actions) fills an element and returns {show(state), say(text)}. graftlab.plots.explorer makes the
// state. act is called with (what, value) for actions that need a kernel; a tap has a button for each of the actions.
// With a table that is folded, a click on a point also opens its pair.

const COLOURS = {
  compared: "#0072b2", grafted: "#009e73", failed: "#d55e00", timeout: "#cc79a7", missing: "#e69f00", unmatched: "#c8b400",
  // the labels of a verdict
  culprit: "#d55e00", minor: "#e69f00", cancels: "#cc79a7", "rounds differently": "#0072b2", clean: "#009e73", inherited: "#009e73",
};
// Blue is hard to see on a dark page.
const ON_DARK = { ...COLOURS, compared: "#56b4e9", "rounds differently": "#56b4e9" };
const AT_THE_TOP = new Set(["failed", "timeout"]);
const AT_THE_BOTTOM = new Set(["missing", "unmatched", "recomputed"]);
const ACTIONS = {
  open: ["Open the pair", "Show where both tensors differ, and their values"],
  keep: ["Keep this tap", "Keep the tensors of this tap from the next step on"],
  graft: ["Graft this", "Add this tap to the b2t filter; Apply there publishes it"],
};
// Columns that are hidden while all their cells are empty, or all the same.
const FOLDED_IF_EMPTY = new Set(["nonfinite", "since", "note", "alone"]);
const FOLDED_IF_SAME = new Set(["way", "plan", "step"]);
const ROW = 22; // pixels of a line of the table, see STYLE
const LEFT = 62, RIGHT = 10, TOP = 22; // pixels around the figure
const SLANTED = 88, LEVEL = 34; // pixels below it, for names
const NOTE = 15; // pixels of a line of text above it
const HEIGHT = 330;
const TILT = 0.6; // of the names below the figure, in radians

const STYLE = `
.gle { font: 13px/1.5 var(--jp-ui-font-family, system-ui, sans-serif); color: var(--jp-ui-font-color1, var(--vscode-foreground, inherit)) }
.gle .bar { display: flex; flex-wrap: wrap; gap: 6px 10px; align-items: center; margin: 4px 0 }
.gle canvas { display: block; width: 100%; height: ${HEIGHT}px; touch-action: pan-y; cursor: crosshair }
.gle button, .gle input, .gle select {
  font: inherit; color: inherit; background: color-mix(in srgb, currentColor 7%, transparent);
  border: 1px solid color-mix(in srgb, currentColor 30%, transparent); border-radius: 3px; padding: 1px 8px;
}
.gle button { cursor: pointer }
.gle button:disabled { opacity: .5; cursor: default }
.gle :focus-visible { outline: 2px solid var(--jp-brand-color1, var(--vscode-focusBorder, #1976d2)); outline-offset: 1px }
.gle input.floor { width: 7em } .gle input.find { width: 18em }
.gle .quiet { color: color-mix(in srgb, currentColor 78%, transparent) }
.gle .refused { color: color-mix(in srgb, #e5484d 80%, currentColor) }
.gle [aria-invalid=true] { border-color: #e5484d }
.gle .key span { margin-right: .8em; white-space: nowrap }
.gle .plot { position: relative }
.gle .tip {
  position: absolute; pointer-events: none; display: none; max-width: 60ch; padding: 3px 8px; z-index: 2; border-radius: 3px;
  background: var(--gle-paper); white-space: pre-line;
  border: 1px solid color-mix(in srgb, currentColor 40%, transparent); overflow-wrap: anywhere;
}
.gle .chosen { border-left: 3px solid var(--jp-brand-color1, #1976d2); padding: 2px 8px; margin: 4px 0; overflow-wrap: anywhere }
.gle .lines { max-height: 330px; overflow: auto; border: 1px solid color-mix(in srgb, currentColor 25%, transparent) }
.gle table { border-collapse: collapse; width: 100%; font-size: 12px }
.gle thead th { position: sticky; top: 0; z-index: 1; background: var(--gle-paper); padding: 0 }
.gle thead button { border: 0; background: none; font-weight: 600; padding: 2px 6px; width: 100%; text-align: left; white-space: nowrap }
.gle th.number button, .gle td.number { text-align: right; font-variant-numeric: tabular-nums }
.gle tbody tr { height: ${ROW}px; cursor: pointer }
.gle tbody tr:hover { background: color-mix(in srgb, currentColor 8%, transparent) }
.gle tbody tr[aria-selected=true] { background: color-mix(in srgb, var(--jp-brand-color1, #1976d2) 25%, transparent) }
.gle td { padding: 0 6px; white-space: nowrap; line-height: ${ROW}px; max-width: 46ch; overflow: hidden; text-overflow: ellipsis }
.gle [hidden] { display: none }
.gle td.bad { font-weight: 600; color: color-mix(in srgb, #e5484d 80%, currentColor) }
`;

// In the usual notation: 1e-5, 0.02, 100.
const plainly = (v) => (v > 0 && (v < 1e-3 || v >= 1e6) ? v.toExponential() : String(v));
const scientific = (v) => (v === null || v === undefined ? "-" : v >= 1e307 ? "inf" : v.toExponential(2));
const times = (v) => (v >= 1e6 ? v.toExponential(1) : v >= 10 ? Math.round(v).toLocaleString("en") : v.toFixed(1));

// Names differ at their ends more often than in their middles.
export function shortened(text, limit) {
  const half = Math.floor(limit / 2);
  return text.length <= limit ? text : `${text.slice(0, half - 1)}…${text.slice(text.length - half)}`;
}

// The layer of "model.layers.3.mlp" is "model.layers.3", that of "h layer=3" its tag; otherwise the first part of the name.
export function layerOf(label) {
  const [name, ...tags] = label.split(" ");
  const parts = name.split(".");
  const at = parts.findIndex((part) => /^\d+$/.test(part));
  if (at >= 0) return parts.slice(0, at + 1).join(".");
  const tag = tags.find((each) => /^(layer|block|stage)\w*=/.test(each));
  return tag ?? parts[0];
}

function element(tag, name, text = "") {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.textContent = text;
  return made;
}

export function mount(root, act = null, actions = [], isFoldable = false) {
  let state = { label: [], columns: [], notes: [] };
  let points = []; // the points of the figure: taps, or layers
  let range = [0, 1]; // the visible points, as numbers from 0 to points.length
  let sort = { column: "badness", up: false };
  let lines = []; // the taps that the table lists, in its order
  let chosen = null; // the label of a tap
  let dragged = null;

  root.classList.add("gle");
  const style = element("style"); style.textContent = STYLE;
  const headline = element("div", "headline"); headline.setAttribute("role", "status");
  const tools = element("div", "bar");
  const plot = element("div", "plot"), canvas = element("canvas"), tip = element("div", "tip");
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  const detail = element("div", "chosen"); detail.setAttribute("aria-live", "polite"); detail.hidden = true;
  const search = element("div", "bar");
  const asked = element("div", "quiet asked"); asked.setAttribute("role", "status");
  const scroller = element("div", "lines"); scroller.tabIndex = 0; scroller.setAttribute("aria-label", "Taps");
  const table = element("table"), head = element("thead"), body = element("tbody");
  plot.append(canvas, tip); table.append(head, body); scroller.append(table);
  root.replaceChildren(style, headline, tools, plot, detail, asked, search, scroller);

  // ---- controls ---------------------------------------------------------------------------------------------------

  function control(made, title, parent = tools) {
    made.title = title;
    // A button is named by its text, and the title explains it; a symbol needs a label.
    if (made.textContent.length < 3) made.setAttribute("aria-label", title);
    parent.append(made); return made;
  }
  // The buttons act on the chosen tap and stay: one that is replaced while it is pressed gets no click, and loses the focus.
  const chosenInWords = element("div");
  detail.append(chosenInWords);
  if (act && actions.length) {
    const buttons = element("div", "bar");
    for (const what of actions) {
      const [text, title] = ACTIONS[what];
      control(element("button", what, text), title, buttons).addEventListener("click", () => ask(what));
    }
    detail.append(buttons);
  }
  const caption = element("label", "", "Floor ");
  const floor = control(element("input", "floor"), "Noise floor: taps above it diverge", caption);
  const refused = element("span", "refused", "enter a number of at least 0, such as 1e-5; empty: assumed from the dtypes");
  refused.setAttribute("role", "alert");
  tools.append(caption, refused);
  function refuse(yes) { refused.hidden = !yes; floor.setAttribute("aria-invalid", String(yes)); }
  refuse(false);
  floor.addEventListener("change", () => {
    const given = floor.value.trim() === "" ? null : Number(floor.value);
    refuse(given !== null && !(given >= 0 && given < Infinity));
    if (!refused.hidden) return;
    if (act) act("floor", given); else if (given !== null) { state.floor = given; draw(); }
  });
  const layers = element("input", "layers"); layers.type = "checkbox";
  const layersLabel = element("label", ""); layersLabel.append(layers, " one point per layer"); tools.append(layersLabel);
  layers.addEventListener("change", () => { arrange(); whole(); });
  control(element("button", "in", "+"), "Zoom in").addEventListener("click", () => zoom(0.5));
  control(element("button", "out", "−"), "Zoom out").addEventListener("click", () => zoom(2));
  control(element("button", "all", "All"), "Show all taps").addEventListener("click", () => whole());
  tools.append(element("span", "quiet", "drag to zoom, Shift-wheel to scroll, arrow keys to step"));
  const key = element("span", "key"); tools.append(key);
  const find = control(element("input", "find"), "Find taps by words of their names and tags", search);
  find.placeholder = "words of a tap's name or tags";
  find.addEventListener("input", () => list());
  const worst = control(element("button", "worst", "Worst first"), "Sort by difference, worst first", search);
  worst.addEventListener("click", () => { sort = { column: "badness", up: false }; list(); });
  const count = element("span", "count quiet"); search.append(count);

  const unfold = element("button", "unfold", "Table"); unfold.title = "Show or hide the table of taps";
  function fold(yes) { search.hidden = scroller.hidden = yes; unfold.setAttribute("aria-expanded", String(!yes)); if (!yes) fill(); }
  if (isFoldable) tools.insertBefore(unfold, key);
  unfold.addEventListener("click", () => fold(!scroller.hidden));

  const titles = element("tr");
  let columns = [];
  function title([title, column, kind]) {
    const isNumber = kind !== "text";
    const cell = element("th", isNumber ? "number" : ""), button = element("button", "", title);
    cell.scope = "col"; cell.dataset.column = column; cell.append(button); titles.append(cell);
    button.addEventListener("click", () => {
      // Numbers sort from the largest, text from A.
      const first = isNumber && column !== "order" && column !== "step" && column !== "since";
      sort = { column, up: sort.column === column ? !sort.up : !first };
      list();
    });
  }
  head.append(titles);

  // ---- display ----------------------------------------------------------------------------------------------------

  function show(next) {
    const before = points.length;
    const wasWhole = range[0] <= 0 && range[1] >= before;
    state = next;
    if (JSON.stringify(columns) !== JSON.stringify(state.columns)) {
      columns = state.columns; titles.replaceChildren(); columns.forEach(title);
    }
    caption.hidden = state.floor === null;
    headline.textContent = state.headline ?? "";
    canvas.setAttribute("aria-label", `rel_l2 of each tap in execution order. ${state.headline ?? ""}`);
    // A refused input stays until it is corrected.
    if (document.activeElement !== floor && refused.hidden && state.floor !== null) floor.value = plainly(state.floor);
    arrange();
    if (wasWhole || range[1] > points.length || before === 0) range = [0, Math.max(points.length, 1)];
    list(); tell(); draw();
  }

  function arrange() {
    const taps = state.label.map((label, i) => ({ label, taps: [i], at: i }));
    if (!layers.checked) { points = taps; return; }
    const found = new Map();
    for (const tap of taps) {
      const layer = layerOf(tap.label);
      if (!found.has(layer)) found.set(layer, { label: layer, taps: [], at: tap.at });
      found.get(layer).taps.push(tap.at);
    }
    points = [...found.values()];
    for (const point of points) for (const i of point.taps) if (state.badness[i] > state.badness[point.at]) point.at = i;
  }

  function whole() { range = [0, Math.max(points.length, 1)]; draw(); }

  function zoom(by, around = (range[0] + range[1]) / 2) {
    const span = Math.min(Math.max((range[1] - range[0]) * by, 4), Math.max(points.length, 4));
    move(around - (around - range[0]) * (span / (range[1] - range[0])), span);
  }

  function move(first, span = range[1] - range[0]) {
    first = Math.max(0, Math.min(first, points.length - span));
    range = [first, first + span];
    draw();
  }

  function scale() {
    const values = [...state.value, ...(state.before ?? []), ...(state.floors ?? []), state.floor];
    const logs = values.filter((v) => v > 0 && v < 1e307).map(Math.log10);
    let low = Infinity, high = -Infinity;
    for (const v of logs) { low = Math.min(low, v); high = Math.max(high, v); }
    if (!logs.length) { low = -8; high = 0; }
    low = Math.floor(low); high = Math.max(Math.ceil(high), low + 1);
    const bottom = HEIGHT - below, band = 16, top = TOP + NOTE * Math.max(0, state.notes.length - 1);
    const inner = [top + 1.8 * band, bottom - 2.8 * band];
    const y = (log) => inner[1] - ((log - low) / (high - low)) * (inner[1] - inner[0]);
    return { low, high, y, top: top + band / 2, exact: bottom - 1.5 * band, bottom: bottom - band / 2 };
  }

  function place(i, s) {
    const value = state.value[i];
    if (AT_THE_TOP.has(state.status[i])) return s.top;
    if (AT_THE_BOTTOM.has(state.status[i])) return s.bottom;
    if (value === null || (state.nonfinite[i] > 0 && value === 0)) return s.top;
    return height(value, s);
  }
  const height = (value, s) => (value >= 1e307 ? s.top : value === 0 ? s.exact : s.y(Math.log10(value)));
  const floorOf = (i) => state.floors?.[i] ?? state.floor;

  const across = () => canvas.clientWidth - LEFT - RIGHT;
  const xOf = (n) => LEFT + ((n + 0.5 - range[0]) / (range[1] - range[0])) * across();
  const nOf = (x) => range[0] + ((x - LEFT) / across()) * (range[1] - range[0]);

  // Overlays need the background colour of the page, for which no variable exists everywhere.
  function paper() {
    for (let each = root; each; each = each.parentElement) {
      const colour = getComputedStyle(each).backgroundColor;
      if (!/^(transparent|rgba\(.*, 0\))$/.test(colour)) return colour;
    }
    return "Canvas";
  }

  let below = LEVEL; // pixels below the axis
  let drawn = ""; // the text colour of the last drawing
  function draw() {
    root.style.setProperty("--gle-paper", paper());
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
    if (!width) return;
    canvas.width = width * ratio; canvas.height = HEIGHT * ratio;
    const g = canvas.getContext("2d"), ink = drawn = getComputedStyle(root).color;
    const colours = (ink.match(/\d+/g) ?? [0]).slice(0, 3).every((part) => part > 127) ? ON_DARK : COLOURS;
    g.scale(ratio, ratio);
    g.font = "12px system-ui, sans-serif";
    if (!points.length) { g.fillStyle = ink; g.fillText("no taps to show: nothing was compared yet", LEFT, HEIGHT / 2); return; }
    const first = Math.max(0, Math.floor(range[0])), last = Math.min(points.length, Math.ceil(range[1]));
    const naming = namesOf(g, first, last);
    below = naming === "slanted" ? SLANTED : LEVEL;
    const s = scale(), right = width - RIGHT;
    g.strokeStyle = g.fillStyle = ink; g.textAlign = "right"; g.textBaseline = "middle";
    const every = Math.ceil((s.high - s.low) / 9);
    const line = (y, alpha, dash = []) => {
      g.globalAlpha = alpha; g.setLineDash(dash); g.beginPath(); g.moveTo(LEFT, y); g.lineTo(right, y); g.stroke();
      g.globalAlpha = 1; g.setLineDash([]);
    };
    g.fillText("rel_l2", LEFT - 6, TOP - 14);
    for (let log = s.low; log <= s.high; log += every) { line(s.y(log), 0.15); g.fillText(`1e${log}`, LEFT - 6, s.y(log)); }
    const odd = state.status.some((each, i) => place(i, s) === s.top);
    if (odd) g.fillText(state.status.some((each) => AT_THE_TOP.has(each)) ? "no value" : "not finite", LEFT - 6, s.top);
    g.fillText("0 (exact)", LEFT - 6, s.exact);
    if (state.status.some((each) => AT_THE_BOTTOM.has(each))) g.fillText("no pair", LEFT - 6, s.bottom);
    if (state.floor > 0) {
      line(s.y(Math.log10(state.floor)), 0.9, [6, 4]);
      g.textAlign = "right"; g.fillText(`floor ${plainly(state.floor)}`, right, s.y(Math.log10(state.floor)) - 7);
    }
    const size = last - first > 400 ? 2.2 : last - first > 80 ? 3.2 : 4.5;
    g.save(); g.beginPath(); g.rect(LEFT - 6, 0, right - LEFT + 12, HEIGHT); g.clip();
    if (state.floors) band(g, s, first, last, ink);
    for (let n = first; n < last; n++) {
      const i = points[n].at, x = xOf(n), y = place(i, s), before = state.before?.[i] ?? null;
      if (before !== null) { g.strokeStyle = colours.compared; g.beginPath(); g.arc(x, height(before, s), size, 0, 7); g.stroke(); }
      if (state.before && state.value[i] === null) continue;
      g.strokeStyle = g.fillStyle = colours[state.status[i]] ?? "#888";
      g.beginPath(); g.arc(x, y, size, 0, 7);
      if (state.value[i] === 0 && y === s.exact && !state.before) g.stroke(); else g.fill();
      if (state.nonfinite[i] > 0) { g.strokeStyle = COLOURS.failed; g.lineWidth = 2; g.beginPath(); g.arc(x, y, size + 4, 0, 7); g.stroke(); g.lineWidth = 1; }
      if (state.label[i] === chosen || (points[n].taps.length > 1 && points[n].taps.some((t) => state.label[t] === chosen))) {
        g.strokeStyle = ink; g.lineWidth = 2; g.strokeRect(x - size - 4, y - size - 4, 2 * size + 8, 2 * size + 8); g.lineWidth = 1;
      }
    }
    state.notes.forEach(([i, text], level) => {
      const n = points.findIndex((point) => point.taps.includes(i));
      if (n < range[0] - 1 || n >= range[1]) return;
      // Later taps have their notes nearer to the axis, so that no line crosses the text of another.
      const x = Math.min(Math.max(xOf(n), LEFT), right), y = place(i, s), at = TOP - 14 + NOTE * level;
      g.strokeStyle = g.fillStyle = ink; g.beginPath(); g.moveTo(x, at + 7); g.lineTo(x, y - size - 2); g.stroke();
      g.textAlign = x < LEFT + across() / 3 ? "left" : x > LEFT + (2 * across()) / 3 ? "right" : "center";
      g.fillText(shortened(text, Math.floor(across() / 8)), x, at);
    });
    if (dragged) { g.globalAlpha = 0.15; g.fillStyle = ink; g.fillRect(dragged[0], TOP, dragged[1] - dragged[0], HEIGHT - TOP - below); g.globalAlpha = 1; }
    g.restore();
    name(g, naming, first, last, ink);
    legend(s, colours);
  }

  // What rounding adds at each tap, and the limit of what is named.
  function band(g, s, first, last, ink) {
    const edges = (factor) => {
      g.beginPath();
      for (let n = first; n < last; n++) {
        const y = height((state.floors[points[n].at] ?? 0) * factor, s);
        g.lineTo(xOf(n - 0.5), y); g.lineTo(xOf(n + 0.5), y);
      }
    };
    g.strokeStyle = g.fillStyle = ink;
    g.globalAlpha = 0.12; edges(1); g.lineTo(xOf(last - 0.5), s.bottom); g.lineTo(xOf(first - 0.5), s.bottom); g.fill();
    g.globalAlpha = 0.6; g.setLineDash([6, 4]); edges(state.limit); g.stroke();
    g.globalAlpha = 1; g.setLineDash([]);
  }

  // The colours, and hollow points for zeros.
  function legend(s, colours) {
    const named = new Map(); // by colour, since labels that add nothing at a tap have one
    for (const each of new Set(state.status)) {
      const colour = colours[each] ?? "#888";
      named.set(colour, [...(named.get(colour) ?? []), each]);
    }
    const entries = [...named].map(([colour, labels]) => ["●", colour, labels.join(", ")]);
    if (state.before) entries.push(["○", colours.compared, "error without grafts"], ["╌", "currentColor", `${state.limit} x the floor`]);
    else if (state.value.some((v, i) => v === 0 && place(i, s) === s.exact)) entries.push(["○", colours.compared, "equal"]);
    if (state.nonfinite.some((n) => n > 0)) entries.push(["◯", COLOURS.failed, "not finite on one side"]);
    const said = JSON.stringify(entries);
    if (key.dataset.said === said) return;
    key.dataset.said = said;
    key.replaceChildren(...entries.map(([sign, colour, text]) => {
      const dot = element("b", "", sign), entry = element("span"); dot.style.color = colour; dot.setAttribute("aria-hidden", "true");
      entry.append(dot, ` ${text}`);
      return entry;
    }));
  }

  // Names below the axis while they fit; otherwise the layers, as brackets.
  function namesOf(g, first, last) {
    const slot = across() / (last - first);
    if (slot < 13) return "layers";
    // Slanted text is harder to read, and a slanted "x" looks like a "+".
    return points.slice(first, last).every((point) => g.measureText(point.label).width + 12 <= slot) ? "level" : "slanted";
  }

  function name(g, naming, first, last, ink) {
    const base = HEIGHT - below + 4;
    g.fillStyle = g.strokeStyle = ink; g.textBaseline = "top";
    if (naming === "level") {
      g.textAlign = "center";
      for (let n = first; n < last; n++) {
        if (xOf(n) >= LEFT && xOf(n) <= LEFT + across()) g.fillText(points[n].label, xOf(n), base);
      }
      return;
    }
    if (naming === "slanted") {
      g.textAlign = "right";
      for (let n = first; n < last; n++) {
        const x = xOf(n) + 3;
        if (x < LEFT || x > LEFT + across() + 3) continue;
        // As long as fits to the left edge.
        const room = (x - 6) / Math.cos(TILT);
        let limit = 24, text = shortened(points[n].label, limit);
        while (limit > 5 && g.measureText(text).width > room) text = shortened(points[n].label, --limit);
        g.save(); g.translate(x, base); g.rotate(-TILT); g.fillText(text, 0, 0); g.restore();
      }
      return;
    }
    g.save(); g.beginPath(); g.rect(LEFT - 6, base, across() + 12, below); g.clip();
    g.textAlign = "left";
    let from = first, free = -Infinity;
    for (let n = first + 1; n <= last; n++) {
      const layer = layerOf(points[from].label);
      if (n < last && layerOf(points[n].label) === layer) continue;
      const x = xOf(from - 0.5), end = xOf(n - 0.5);
      g.globalAlpha = 0.5; g.beginPath(); g.moveTo(x + 1, base); g.lineTo(x + 1, base + 4); g.lineTo(end - 1, base + 4); g.stroke(); g.globalAlpha = 1;
      const text = shortened(layer, 24), wide = g.measureText(text).width;
      // The last one ends at the edge rather than being cut off.
      const left = Math.min(x + 1, LEFT + across() + 6 - wide);
      if (left >= free) { g.fillText(text, left, base + 8); free = left + wide + 10; }
      from = n;
    }
    g.restore();
  }

  // ---- the table --------------------------------------------------------------------------------------------------

  function list() {
    const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    lines = state.label.map((_, i) => i).filter((i) => words.every((word) => state.label[i].toLowerCase().includes(word)));
    const column = state[sort.column] ?? [], sign = sort.up ? 1 : -1;
    lines.sort((a, b) => {
      const one = column[a], other = column[b];
      // Rows without a value come last in both orders.
      if (one === null || other === null) return one === other ? a - b : one === null ? 1 : -1;
      return (one < other ? -sign : one > other ? sign : 0) || a - b;
    });
    for (const cell of titles.children) {
      const sorted = cell.dataset.column === sort.column;
      cell.setAttribute("aria-sort", sorted ? (sort.up ? "ascending" : "descending") : "none");
      cell.firstChild.textContent = columns.find((each) => each[1] === cell.dataset.column)[0] + (sorted ? (sort.up ? " ▲" : " ▼") : "");
    }
    worst.disabled = sort.column === "badness";
    const all = state.label.length, taps = `${all.toLocaleString("en")} ${all === 1 ? "tap" : "taps"}`;
    const of = lines.length === all ? taps : `${lines.length.toLocaleString("en")} of ${taps}`;
    count.textContent = [of, state.count].filter(Boolean).join("; ");
    fill();
  }

  function isFolded(column) {
    const cells = state[column] ?? [];
    if (FOLDED_IF_EMPTY.has(column)) return !cells.some((each) => each !== null && each !== "" && each !== 0);
    if (column === "highest") return cells.every((each, i) => each === null || each === state.value[i]);
    return FOLDED_IF_SAME.has(column) && cells.every((each) => each === cells[0]);
  }

  // Only visible lines are in the page; spacers replace the others.
  function fill() {
    const first = Math.max(0, Math.floor(scroller.scrollTop / ROW) - 8);
    const last = Math.min(lines.length, first + Math.ceil(330 / ROW) + 16);
    const made = [spacer(first)], shown = columns.filter((each) => !isFolded(each[1]));
    for (const cell of titles.children) cell.hidden = isFolded(cell.dataset.column);
    for (const i of lines.slice(first, last)) {
      const row = element("tr"); row.dataset.tap = i;
      row.setAttribute("aria-selected", String(state.label[i] === chosen));
      for (const [, column, kind] of shown) {
        const text = said(i, column, kind), isBad = column === "nonfinite" ? text !== "" : text === "not finite";
        const isLost = column === "status" && (AT_THE_TOP.has(text) || text === "missing" || text === "culprit");
        const classes = [kind === "text" ? "" : "number", isBad || isLost ? "bad" : ""];
        const cell = element("td", classes.join(" ").trim(), column === "label" ? shortened(text, 70) : text);
        if (column === "label" || column === "note") cell.title = text;
        row.append(cell);
      }
      made.push(row);
    }
    made.push(spacer(lines.length - last));
    body.replaceChildren(...made);
  }

  // The text of a tap in a column.
  function said(i, column, kind) {
    const value = state[column][i];
    if (column === "value" && state.nonfinite[i] > 0) return "not finite";
    if (column === "nonfinite") return value ? String(value) : "";
    return kind === "number" ? scientific(value) : String(value ?? "");
  }

  function spacer(count) {
    const row = element("tr"); row.setAttribute("aria-hidden", "true");
    row.style.cssText = `height:${Math.max(0, count) * ROW}px;background:none`;
    if (count <= 0) row.style.display = "none";
    return row;
  }

  scroller.addEventListener("scroll", fill);
  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr[data-tap]");
    if (row) choose(Number(row.dataset.tap), true);
  });
  scroller.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!by || !lines.length) return;
    event.preventDefault(); event.stopPropagation();
    const at = lines.findIndex((i) => state.label[i] === chosen);
    const next = Math.max(0, Math.min(lines.length - 1, at + by));
    choose(lines[next], true);
    scrollTo(next);
  });

  function scrollTo(n) {
    const y = n * ROW;
    if (y < scroller.scrollTop || y > scroller.scrollTop + 330 - 3 * ROW) scroller.scrollTop = Math.max(0, y - 140);
    fill();
  }

  // ---- the chosen tap ----------------------------------------------------------------------------------------------

  function choose(i, fromTable = false) {
    chosen = state.label[i];
    if (!fromTable) {
      let n = lines.indexOf(i);
      if (n < 0) { find.value = ""; list(); n = lines.indexOf(i); }
      scrollTo(n);
    } else {
      const n = points.findIndex((point) => point.taps.includes(i));
      if (n < range[0] || n >= range[1]) move(n - (range[1] - range[0]) / 2);
    }
    tell(); fill(); draw();
    if (act) act("chosen", chosen);
  }

  function figures(i) {
    const parts = [];
    for (const [title, column, kind] of columns) {
      const text = said(i, column, kind), floor = floorOf(i);
      if (["label", "order"].includes(column) || text === "" || text === "-") continue;
      if (column === "highest" && !(state.highest[i] > (state.value[i] ?? -1))) continue;
      parts.push(["status", "note"].includes(column) ? text : column === "nonfinite" ? `${text} elements are non-finite on one side only` : `${title} ${text}`);
      if (column === "value" && floor > 0 && state.value[i] > floor && state.value[i] < 1e307) parts.push(`${times(state.value[i] / floor)} x the floor`);
    }
    return parts.join(", ");
  }

  function tell() {
    const i = chosen === null ? -1 : state.label.indexOf(chosen);
    detail.hidden = i < 0;
    if (i < 0) return;
    const figuresOfTap = ` ${figures(i)}`;
    if (chosenInWords.textContent !== chosen + figuresOfTap) chosenInWords.replaceChildren(element("b", "", chosen), figuresOfTap);
  }

  // The kernel's answer replaces the text.
  function ask(what) {
    if (root.closest(".jupyter-widgets-disconnected")) { say("The kernel has ended. Run the notebook from the cell that opens the session."); return; }
    say("asking the kernel …");
    act(what, chosen);
  }

  function say(text) { asked.textContent = text; }

  // ---- pointer and keys -------------------------------------------------------------------------------------------

  function nearest(event) {
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const s = scale(), around = Math.ceil(8 / (across() / (range[1] - range[0]))) + 1;
    let best = -1, least = Infinity;
    for (let n = Math.max(0, Math.floor(nOf(x)) - around); n <= Math.min(points.length - 1, Math.floor(nOf(x)) + around); n++) {
      const d = (xOf(n) - x) ** 2 + ((place(points[n].at, s) - y) / 3) ** 2;
      if (d < least) { least = d; best = n; }
    }
    return { n: best, x, y };
  }

  canvas.addEventListener("pointermove", (event) => {
    if (!points.length) return;
    const { n, x } = nearest(event);
    if (dragged) { dragged[1] = x; draw(); return; }
    tip.style.display = n < 0 ? "none" : "block";
    if (n < 0) return;
    const i = points[n].at, many = points[n].taps.length;
    tip.textContent = `${many > 1 ? `${points[n].label}: ${many} taps, the worst: ` : ""}${state.label[i]}\n${figures(i)}`;
    const left = Math.min(xOf(n) + 12, canvas.clientWidth - tip.offsetWidth - 4);
    tip.style.left = `${Math.max(0, left)}px`; tip.style.top = `${place(i, scale()) + 12}px`;
  });
  canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
  canvas.addEventListener("pointerdown", (event) => {
    if (!points.length || event.button !== 0) return;
    const x = event.clientX - canvas.getBoundingClientRect().left;
    dragged = [x, x]; canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (!dragged) return;
    const [from, to] = dragged.map(nOf).sort((a, b) => a - b), far = Math.abs(dragged[1] - dragged[0]);
    dragged = null;
    tip.style.display = "none";
    if (far > 6) { range = [Math.max(0, from), Math.min(points.length, Math.max(to, from + 4))]; move(range[0]); return; }
    const { n } = nearest(event);
    if (n < 0) return;
    if (points[n].taps.length > 1) { // into the layer
      const inside = points[n].taps;
      layers.checked = false; arrange(); range = [inside[0], Math.max(inside.at(-1) + 1, inside[0] + 4)];
      move(range[0]); choose(points[inside[0]] ? inside.reduce((a, b) => (state.badness[b] > state.badness[a] ? b : a)) : inside[0]);
      return;
    }
    choose(points[n].at);
    if (act && isFoldable) ask("open");
  });
  canvas.addEventListener("dblclick", whole);
  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) { event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : 0.8, nOf(event.offsetX)); }
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault(); move(range[0] + ((event.deltaX || event.deltaY) / across()) * (range[1] - range[0]));
    }
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const at = points.findIndex((point) => state.label[point.at] === chosen);
    const to = { ArrowRight: at + 1, ArrowLeft: at < 0 ? 0 : at - 1, Home: 0, End: points.length - 1 }[event.key];
    if (to !== undefined && points.length) {
      const n = Math.max(0, Math.min(points.length - 1, to));
      choose(points[n].at);
      if (n < range[0] || n >= range[1]) move(n - (range[1] - range[0]) / 2);
    } else if (event.key === "Enter" && act && chosen !== null && actions.includes("open")) ask("open");
    else if (event.key === "+" || event.key === "=") zoom(0.5);
    else if (event.key === "-") zoom(2);
    else if (event.key === "0" || event.key === "Escape") whole();
    else return;
    event.preventDefault(); event.stopPropagation();
  });
  // Keep key presses from the notebook.
  root.addEventListener("keydown", (event) => event.stopPropagation());
  new ResizeObserver(() => { draw(); fill(); }).observe(canvas);
  // The page shows the name of a new theme before its style sheets have loaded and the old ones are gone.
  const recolour = () => { if (getComputedStyle(root).color !== drawn) draw(); };
  document.addEventListener("load", (event) => { if (event.target.tagName === "LINK") recolour(); }, true);
  for (const each of [document.head, document.body]) {
    new MutationObserver(recolour).observe(each, { childList: true, attributeFilter: ["data-jp-theme-light", "class"] });
  }
  fold(isFoldable);
  return { show, say };
}

// The entry point for anywidget. Names of taps are a separate trait from their values, which change more often.
export default {
  render({ model, el }) {
    const view = mount(el, (what, value) => model.send({ what, value }), model.get("actions"), model.get("foldable"));
    const show = () => view.show({ ...model.get("taps"), ...model.get("figures") });
    model.on("change:figures", show);
    // The pair is a widget of its own, below a table that may fill the screen.
    model.on("msg:custom", ({ what }) => {
      view.say("");
      if (what !== "opened") return;
      const around = el.closest(".graftlab-dashboard, .graftlab-canvas") ?? el.getRootNode();
      requestAnimationFrame(() => around.querySelector(".graftlab-pair")?.scrollIntoView({ block: "nearest" }));
    });
    show();
  },
};
