// Two lists of taps in execution order, with links between them styled by certainty. Plain DOM and SVG, without
// dependencies. graftlab.widgets.match_editor sends `state`; messages to it request actions.

const ROW = 24; // pixels of a line, see STYLE
const GAP = 180; // pixels between the lists
// Colour and dashes: certain pairs have solid lines.
const LOOKS = {
  exact: ["#009e73", ""], near: ["#0072b2", ""], confirmed: ["#56b4e9", "10 3"], rule: ["#e69f00", "6 4"], guess: ["#cc79a7", "2 4"],
};

const STYLE = `
.glm { font: 13px/1.5 var(--jp-ui-font-family, system-ui, sans-serif); color: var(--jp-ui-font-color1, var(--vscode-foreground, inherit)) }
.glm .bar { display: flex; flex-wrap: wrap; gap: 6px 10px; align-items: center; margin: 6px 0 }
.glm button, .glm input[type=text] {
  font: inherit; color: inherit; background: color-mix(in srgb, currentColor 7%, transparent);
  border: 1px solid color-mix(in srgb, currentColor 30%, transparent); border-radius: 3px; padding: 1px 8px;
}
.glm button { cursor: pointer } .glm button:disabled { opacity: .5; cursor: default }
.glm :focus-visible { outline: 2px solid var(--jp-brand-color1, var(--vscode-focusBorder, #1976d2)); outline-offset: -2px }
.glm .lists { display: grid; grid-template-columns: minmax(0, 1fr) ${GAP}px minmax(0, 1fr); max-height: 460px; overflow: auto;
  border: 1px solid color-mix(in srgb, currentColor 25%, transparent) }
.glm .lists > div { display: flex; flex-direction: column }
.glm .title { height: ${ROW}px; font-weight: 600; padding: 0 6px; line-height: ${ROW}px }
.glm .tap { height: ${ROW}px; line-height: ${ROW - 2}px; border: 0; border-radius: 0; background: none; text-align: left; padding: 0 6px;
  overflow: hidden; text-overflow: ellipsis; white-space: nowrap; flex: none }
.glm .baseline .tap { text-align: right }
.glm .tap:hover { background: color-mix(in srgb, currentColor 8%, transparent) }
.glm .tap[aria-pressed=true] { background: color-mix(in srgb, var(--jp-brand-color1, #1976d2) 25%, transparent) }
.glm .alone { opacity: .75; font-style: italic }
.glm .count { opacity: .75 }
.glm svg { display: block; width: ${GAP}px }
.glm path { fill: none; stroke-width: 1.6 } .glm path.chosen { stroke-width: 4 }
.glm .key { display: inline-flex; align-items: center; gap: 4px }
.glm .detail { border-left: 3px solid var(--jp-brand-color1, #1976d2); padding: 2px 8px; margin: 6px 0; overflow-wrap: anywhere }
.glm .problem { color: color-mix(in srgb, #e5484d 80%, currentColor) }
.glm pre { max-height: 220px; overflow: auto; margin: 4px 0; padding: 6px; font-size: 12px; user-select: all;
  background: color-mix(in srgb, currentColor 7%, transparent); color: inherit }
`;

function element(tag, name = "", text = "") {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.textContent = text;
  return made;
}

function svg(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

export function mount(root, act) {
  let state = { baseline: [], target: [], links: [], problems: [], meanings: [] };
  let chosen = null; // ["baseline" | "target", label]

  root.classList.add("glm");
  const style = element("style"); style.textContent = STYLE;
  const summary = element("b", "summary"); summary.setAttribute("role", "status");
  const problems = element("div");
  const tools = element("div", "bar"), keys = element("div", "bar"), lists = element("div", "lists");
  const detail = element("div", "detail"); detail.setAttribute("aria-live", "polite");
  const code = element("pre"); code.tabIndex = 0; code.setAttribute("aria-label", "The pairs as code"); code.hidden = true;
  root.replaceChildren(style, summary, problems, tools, keys, lists, detail, code);

  function button(text, name, title, press) {
    const made = element("button", name, text); made.title = title;
    made.addEventListener("click", press);
    return made;
  }
  const fold = element("input", "fold"); fold.type = "checkbox";
  const folding = element("label"); folding.append(fold, " fold layers");
  fold.addEventListener("change", () => { chosen = null; act("fold", [], fold.checked); });
  const apply = button("Apply", "apply", "Put these pairs into the plan, without the guesses", () => act("apply"));
  const undo = button("Undo", "undo", "Undo the last change", () => act("undo"));
  const unsure = button("Accept rules", "accept-rules", "Accept every pair found by a rule", () => {
    act("accept", state.links.filter((link) => link.sureness === "rule").flatMap((link) => link.targets));
  });
  const show = button("Show code", "show-code", "session.edit(pairs=[...]), ready to paste", () => {
    code.hidden = !code.hidden;
    show.textContent = code.hidden ? "Show code" : "Hide code";
  });
  const copy = button("Copy code", "copy", "Copy session.edit(pairs=[...])", async () => {
    try { await navigator.clipboard.writeText(state.code); copy.textContent = "Copied"; }
    catch { code.hidden = false; copy.textContent = "Copy it below"; }
  });
  tools.append(folding, unsure, undo, apply, show, copy);

  function of(side, label) { return state.links.filter((link) => link[side] === label); }
  function isChosen(link) { return chosen !== null && link[chosen[0]] === chosen[1]; }

  function draw() {
    summary.textContent = state.summary;
    problems.replaceChildren(...state.problems.map((each) => element("div", "problem", each)));
    fold.checked = state.folded; undo.disabled = !state.can_undo; apply.disabled = state.is_applied;
    unsure.disabled = !state.links.some((link) => link.sureness === "rule");
    copy.textContent = "Copy code"; code.textContent = state.code;
    keys.replaceChildren(...state.meanings.map(([sureness, meaning]) => {
      const key = element("span", "key"), line = svg("svg", { width: 26, height: 8, "aria-hidden": "true" });
      line.style.width = "26px";
      line.append(stroke("M0,4L26,4", sureness));
      key.title = meaning;
      key.append(line, `${sureness} ${state.links.filter((link) => link.sureness === sureness).reduce((n, link) => n + link.count, 0)}`);
      return key;
    }));
    const columns = ["baseline", "target"].map((side) => column(side));
    const height = ROW * (1 + Math.max(state.baseline.length, state.target.length));
    const drawn = svg("svg", { width: GAP, height, role: "img", "aria-label": `${state.links.length} links between the lists: ${state.summary}` });
    const place = (side, label) => ROW * (1.5 + state[side].findIndex((tap) => tap.label === label));
    for (const link of [...state.links].sort((a, b) => isChosen(a) - isChosen(b))) {
      const [from, to] = [place("baseline", link.baseline), place("target", link.target)];
      const path = stroke(`M0,${from}C${GAP / 2},${from} ${GAP / 2},${to} ${GAP},${to}`, link.sureness);
      if (isChosen(link)) path.classList.add("chosen");
      else if (chosen !== null) path.setAttribute("opacity", 0.5);
      drawn.append(path);
    }
    const middle = element("div"); middle.append(drawn);
    const top = lists.scrollTop;
    lists.replaceChildren(columns[0], middle, columns[1]);
    lists.scrollTop = top;
    tell();
  }

  function stroke(d, sureness) {
    const [colour, dashes] = LOOKS[sureness] ?? ["#888", ""];
    const made = svg("path", { d, "stroke-dasharray": dashes });
    made.style.stroke = `color-mix(in srgb, ${colour} 80%, currentColor)`;
    return made;
  }

  function column(side) {
    const made = element("div", side);
    made.append(element("div", "title", side));
    for (const tap of state[side]) {
      const line = element("button", tap.why ? "tap alone" : "tap", tap.label);
      line.title = tap.why ? `${tap.label}: ${tap.why}` : tap.label;
      if (tap.count > 1) line.append(element("span", "count", ` x${tap.count}`));
      line.setAttribute("aria-label", `${side} ${tap.label}${tap.count > 1 ? `, ${tap.count} taps` : ""}`);
      line.setAttribute("aria-pressed", String(chosen !== null && chosen[0] === side && chosen[1] === tap.label));
      line.dataset.label = tap.label;
      line.addEventListener("click", () => { choose(side, tap.label); });
      line.addEventListener("keydown", (event) => {
        const to = { ArrowDown: line.nextElementSibling, ArrowUp: line.previousElementSibling }[event.key];
        if (to?.classList.contains("tap")) { to.focus(); event.preventDefault(); }
      });
      made.append(line);
    }
    return made;
  }

  function choose(side, label) {
    chosen = chosen !== null && chosen[0] === side && chosen[1] === label ? null : [side, label];
    draw();
    [...lists.querySelectorAll(`.${side} .tap`)].find((line) => line.dataset.label === label)?.focus();
  }

  function tell() {
    if (chosen === null) { detail.replaceChildren(element("span", "", "Choose a tap to see its pairs, and to accept or reject them.")); return; }
    const [side, label] = chosen, links = of(side, label), alone = state[side].find((tap) => tap.label === label);
    if (!links.length) { detail.replaceChildren(element("b", "", label), ` has no partner: ${alone?.why ?? ""}`); return; }
    const parts = [];
    for (const link of links) {
      const words = element("div");
      words.append(element("b", "", `${link.baseline} → ${link.target}`));
      const facts = [link.sureness, link.rel === null ? "" : `rel_l2 ${link.rel.toExponential(1)}`, `layout ${link.layout}`, link.count > 1 ? `${link.count} layers` : "", link.note];
      words.append(` ${facts.filter(Boolean).join(", ")}`);
      parts.push(words);
    }
    const targets = [...new Set(links.flatMap((link) => link.targets))], bar = element("div", "bar");
    const sure = links.every((link) => ["exact", "near", "confirmed"].includes(link.sureness));
    const accept = button("Accept", "accept", "Accept these pairs", () => act("accept", targets));
    accept.disabled = sure;
    bar.append(accept, button("Reject", "reject", "Reject these pairs", () => { chosen = null; act("reject", targets); }));
    detail.replaceChildren(...parts, bar);
  }

  // Keep key presses from the notebook.
  root.addEventListener("keydown", (event) => event.stopPropagation());
  return { show(next) { state = next; draw(); } };
}

export default {
  render({ model, el }) {
    const view = mount(el, (what, targets = [], value = null) => model.send({ what, targets, value }));
    model.on("change:state", () => view.show(model.get("state")));
    view.show(model.get("state"));
  },
};
