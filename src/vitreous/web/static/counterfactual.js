// What would change it: the patches whose removal turns the decision, put back and removed one by one.

import * as api from "./api.js";
import { asks } from "./help.js";
import { Holes } from "./holes.js";
import { state } from "./state.js";
import { table, whose } from "./take.js";
import {
  announce, arrow, beside, button, choice, el, frame, percent, placeOf, problem, progress, svg, under,
} from "./ui.js";
import { classOf, here, model, nameOf, photo, short, world } from "./world.js";

const RUNNER_UP = "runner-up";
const well = el("div");
const rows = el("div.bars.turned");
const words = el("p.extras");
const said = el("p.lead");
const chart = el("div.chart");
const trouble = el("div");
const bar = progress();
const find = button("Find", () => search());
const back = button("Put one back", () => step(-1), { title: "The last removed patch of the set comes back" });
const on = button("Remove the next", () => step(1));
const reset = button("The whole set", () => show(new Set(found.patches)));
const numbers = table("The probabilities along the set, patch by patch", () => [
  ["model", "image", "removed", "patch", "from", "p(from)", "to", "p(to)"],
  ...(found ? found.path.to.map((to, i) => [...whose(), i, found.patches[i - 1], short(found.source.label),
    found.path.source[i], short(found.to.label), to]) : []),
]);
const csv = button("CSV", () => numbers.run(), { title: numbers.title });
const whole = el("div");
const shut = el("p.quiet", { hidden: true });
let pick = null;
let wanted = RUNNER_UP;
let sought = RUNNER_UP; // the class that was wanted when the set was found
let holes = null;
let hair = null;
let found = null;
let gone = new Set();
let now = null; // what the model says of the image without them
let cursor = 0;
let place = "";
let searching = false;
let resume = null; // what to do after a search, which takes the place of other jobs

export const counterfactual = {
  begin(panel, after) {
    resume = after;
    pick = choice("To", [], wanted, (value) => (wanted = value));
    panel.append(el("h3", { id: "counterfactual-head" }, "What would change it?", asks("counterfactual")), shut);
    whole.append(
      el("p.quiet", "A small set of patches whose removal changes the decision. Click a patch to put it back or to ",
        "remove another; the model runs again each time. Keyboard: arrow keys and Space."),
      el("div.head", said, bar, pick, find), trouble,
      el("div.panels", el("div.panel.side", well, el("div.row", back, on, reset, csv)),
        el("div.panel.wide", rows, words, chart)));
    panel.append(whole);
    new ResizeObserver(() => draw()).observe(chart);
  },

  update() {
    const why = model().closed.counterfactual;
    whole.hidden = Boolean(why);
    shut.hidden = !why;
    shut.textContent = why ?? "";
    if (why) return;
    const next = JSON.stringify(here());
    if (next !== place) {
      place = next;
      found = now = null;
      wanted = RUNNER_UP;
      bar.stop();
      searching = false;
      trouble.replaceChildren();
      said.replaceChildren();
      build();
      show(new Set());
    }
    const own = world.classes[0]?.index;
    const chosen = state.targets.map(classOf).filter((one) => one !== null && one !== own);
    const listed = [...new Set([...world.classes.map((one) => one.index), ...chosen])].filter((one) => one !== own);
    const { form, output } = model();
    const able = form === "vector" && output !== "value" && listed.length > 0;
    find.disabled = !able;
    if (!able && world.classes.length) said.textContent = "This model makes no decision between classes for the image.";
    pick.show(wanted, [[RUNNER_UP, "the second best class"], ["any", "any other class"],
      ...listed.map((index) => [String(index), nameOf(String(index))])]);
  },
};

/** Whether a set was found, the class that was wanted, and its patches. */
export const taken = () => ({ turned: found !== null, ...(found && sought !== RUNNER_UP ? { to: sought } : {}) });
export const isSearching = () => searching;
export const patchesFound = () => found?.patches ?? [];

function search() {
  sought = wanted;
  searching = true;
  trouble.replaceChildren();
  const asked = { ...here(), ...(wanted === RUNNER_UP ? {} : { to: wanted }) };
  bar.run(api.job("counterfactual", asked), (name, told) => {
    searching = name === "counterfactual" || name === "problem";
    if (name === "counterfactual") heard(told);
    else if (name === "cancelled") trouble.replaceChildren(problem("Cancelled.", search));
    else if (name !== "done" && name !== "left") trouble.replaceChildren(problem(told, search));
    if (!searching && name !== "left") resume();
  });
}

function heard(told) {
  found = told;
  const sure = told.optimal ? "All smaller sets were run: none does it."
    : told.minimal ? `No single one can be put back; no set of fewer than ${told.bound} does it.` : "";
  said.replaceChildren(el("b", `${told.sentence}. `), told.certified ? sure
    : told.impossible ? "All sets were run: none turns the decision." : "");
  draw();
  show(new Set(told.patches));
}

function build() {
  const { grid, size } = model();
  holes = new Holes(photo(), grid, size);
  hair = el("div.hair", { hidden: true });
  const { node } = holes;
  node.append(hair);
  Object.assign(node, { tabIndex: 0, id: "counterfactual", ariaRoleDescription: "patches that can be removed" });
  node.setAttribute("role", "application");
  node.addEventListener("pointermove", (event) => point(under(event, node, grid)));
  node.addEventListener("click", (event) => toggle(under(event, node, grid)));
  for (const name of ["pointerleave", "blur"]) node.addEventListener(name, () => (hair.hidden = true));
  node.addEventListener("keydown", (event) => {
    const move = arrow(event);
    if (move) {
      point(beside(cursor, move, grid));
      announce(`${placeOf(cursor, grid)}${gone.has(cursor) ? ", removed" : ""}`);
    } else if (event.key === " " || event.key === "Enter") {
      event.preventDefault();
      toggle(cursor);
    }
  });
  well.replaceChildren(node);
}

function point(patch) {
  cursor = patch;
  frame(hair, patch, holes.grid);
}

function toggle(patch) {
  const next = new Set(gone);
  if (!next.delete(patch)) next.add(patch);
  point(patch);
  show(next);
}

/** One patch of the set comes back, the last first, or the next one goes. */
function step(way) {
  const next = new Set(gone);
  const [set, backwards] = [found.patches, [...found.patches].reverse()];
  const patch = way < 0 ? backwards.find((one) => gone.has(one)) : set.find((one) => !gone.has(one));
  if (patch === undefined) return;
  if (way < 0) next.delete(patch);
  else next.add(patch);
  show(next);
}

function show(next) {
  gone = next;
  holes.show(gone, found?.way === "pixels" ? "mean" : "cut");
  back.disabled = !found?.patches.some((one) => gone.has(one));
  on.disabled = !found?.patches.some((one) => !gone.has(one));
  reset.disabled = csv.disabled = !found;
  mark();
  if (found) ask();
  else {
    rows.replaceChildren();
    words.textContent = "";
    draw();
  }
}

const ask = api.latest(async () => {
  const [where, asked, removed] = [here(), found, [...gone]];
  try {
    const told = await api.post("erase", { ...where, removed, classes: [asked.source.index, asked.to.index] });
    if (asked !== found || JSON.stringify(where) !== place) return;
    now = told;
    trouble.replaceChildren();
    tell();
  } catch (error) {
    trouble.replaceChildren(problem(error));
  }
});

/** The two classes now, each with a mark where it began. */
function tell() {
  const both = [found.source, found.to];
  rows.replaceChildren(...now.classes.map(({ label, probability }, i) => {
    const [fill, was] = [el("span.fill"), el("span.was")];
    fill.style.width = `${100 * probability}%`;
    was.style.left = `${100 * both[i].before}%`;
    const change = `${percent(both[i].before)} → ${percent(probability)}`;
    return el("div.bar", fill, was, el("span.label", short(label)), el("span.value", change));
  }));
  const [h, w] = holes.grid;
  const best = now.top[0];
  const turned = best.index !== found.source.index;
  words.replaceChildren(`${gone.size} of ${h * w} patches removed · the decision is `, el("b", short(best.label)),
    turned ? "" : ", as before", now.way === "pixels" ? ` · hidden by the mean colour: ${now.why}` : "");
  announce(words.textContent);
}

// -------------------------------------------------------------------------------------------------------------- chart

let geometry = null;

/** Both probabilities along the set, bold, and along the order of the contrast map, thin. */
function draw() {
  if (!found) return void chart.replaceChildren();
  const width = chart.clientWidth;
  const height = Math.max(180, Math.min(260, width * 0.45));
  const names = [short(found.source.label), short(found.to.label)];
  const box = { left: 44, right: 16, top: 46, bottom: 40 };
  const end = Math.max(2, Math.min(found.curve.to.length - 1, 3 * found.patches.length + 3));
  const high = Math.max(0.01, ...found.curve.source, ...found.curve.to, ...found.path.to);
  const x = (v) => box.left + (v / end) * (width - box.left - box.right);
  const y = (v) => height - box.bottom - (v / high) * (height - box.top - box.bottom);
  const told = `${names[0]} and ${names[1]} while ${found.patches.length} patches are removed`;
  const node = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": told });
  for (const v of [0, high / 2, high]) {
    node.append(svg("line", { x1: box.left, x2: width - box.right, y1: y(v), y2: y(v), class: "rule" }),
      svg("text", { x: box.left - 6, y: y(v) + 4, "text-anchor": "end" }, percent(v)));
  }
  for (const v of new Set([0, found.patches.length, end])) {
    node.append(svg("text", { x: x(v), y: height - box.bottom + 18, "text-anchor": "middle" }, String(v)));
  }
  const path = (values) => values.slice(0, end + 1).map((v, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${y(v).toFixed(1)}`).join("");
  const colours = ["var(--c33bbee)", "var(--accent)"];
  ["source", "to"].forEach((side, i) => {
    for (const [course, thick] of [[found.curve, 1], [found.path, 3]]) {
      const stroke = svg("path", { d: path(course[side]), class: "curve" });
      Object.assign(stroke.style, { stroke: colours[i], strokeWidth: thick, opacity: thick === 1 ? 0.6 : 1 });
      node.append(stroke);
    }
    const label = svg("text", { x: box.left + (i * (width - box.left - box.right)) / 2, y: 34, class: "name" }, names[i]);
    label.style.fill = colours[i];
    node.append(label);
  });
  node.append(svg("text", { x: 4, y: 14, class: "title" }, "probability; bold: this set, thin: the map's order"),
    svg("text", { x: (box.left + width - box.right) / 2, y: height - 6, "text-anchor": "middle" },
      found.way === "tokens" ? "tokens removed" : "patches hidden"));
  geometry = { x, height, box, mark: svg("g") };
  node.append(geometry.mark);
  chart.replaceChildren(node);
  mark();
}

/** Where the image stands on the bold lines, if what is gone is a beginning of the set. */
function mark() {
  if (!geometry || !found) return;
  const { x, height, box } = geometry;
  const along = found.patches.slice(0, gone.size).every((one) => gone.has(one)) && gone.size <= found.patches.length;
  const at = x(gone.size);
  geometry.mark.replaceChildren(...(along
    ? [svg("line", { x1: at, x2: at, y1: box.top, y2: height - box.bottom, class: "guide" })] : []));
}
