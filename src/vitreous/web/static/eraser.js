// Paint patches away and watch what the model still says.

import * as api from "./api.js";
import { asks } from "./help.js";
import { Holes } from "./holes.js";
import { onTurn } from "./moment.js";
import { state } from "./state.js";
import { table, whose } from "./take.js";
import {
  announce, arrow, beside, button, el, frame, number, percent, placeOf, problem, segments, under,
} from "./ui.js";
import { classOf, here, model, nameOf, photo, regresses, shareOf, short, world } from "./world.js";

const well = el("div");
const rows = el("div.bars.traced");
const words = el("p.extras");
const trouble = el("div");
const undo = button("Undo", () => back());
const reset = button("Reset", () => paint(() => new Set()));
const numbers = table("What the model says of the image without these patches", () => [
  ["model", "image", "removed", "label", "before", "now"],
  ...(now ? told() : []).map(({ label, old, value, score }) =>
    [...whose(), [...gone].join(" "), label, old, value ?? score]),
]);
const csv = button("CSV", () => numbers.run(), { title: numbers.title });
let holes = null;
let hair = null;
let gone = new Set();
let past = [];
let before = null; // the answer for the whole photo
let now = null;
let brush = 1;
let cursor = 0;
let place = "";
let answered = null; // the patches without which the bars are shown

export const eraser = {
  begin(panel) {
    onTurn(() => holes?.turn(photo()));
    const size = segments("Brush", [[1, "1 patch"], [3, "3 × 3"]], brush, (value) => size.show((brush = value)));
    panel.append(el("h3", { id: "eraser-head" }, "Eraser", asks("eraser")),
      el("p.quiet",
        "Paint over patches to remove them; start on a removed patch to restore it. Keyboard: arrow keys and Space."),
      el("div.panels",
        el("div.panel.side", well, el("div.row", size, undo, reset, csv)), el("div.panel.wide", rows, words, trouble)));
    panel.addEventListener("keydown", (event) => {
      if (event.key !== "z" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      back();
    });
  },

  update() {
    const next = JSON.stringify(here());
    if (next !== place) {
      place = next;
      gone = new Set();
      past = [];
      before = now = null;
      build();
    }
    if (world.classes.length || world.why) ask();
  },

  /** What is removed, and the classes that are listed. */
  taken: () => ({ removed: [...gone], classes: (now?.classes ?? []).map((one) => one.index) }),
  /** Remove exactly these patches. */
  erase: (removed) => paint(() => new Set(removed)),
  /** Whether the bars are those of the patches that are gone now. */
  settled: () => answered === [...gone].join(),
};

function build() {
  const { grid, size } = model();
  holes = new Holes(photo(), grid, size);
  hair = el("div.hair", { hidden: true });
  const { node } = holes;
  node.append(hair);
  Object.assign(node, { tabIndex: 0, id: "eraser" });
  node.setAttribute("role", "application");
  node.ariaRoleDescription = "eraser";
  holes.show(gone, "cut");
  let stroke = null;
  const at = (event) => under(event, node, grid);
  node.addEventListener("pointerdown", (event) => {
    event.preventDefault();
    node.focus();
    node.setPointerCapture(event.pointerId);
    const restore = gone.has(holes.before + at(event));
    past.push(new Set(gone));
    stroke = { restore, last: at(event) };
    touch(stroke.last, restore);
  });
  node.addEventListener("pointermove", (event) => {
    point(at(event));
    if (!stroke) return;
    for (const patch of way(stroke.last, at(event), grid)) touch(patch, stroke.restore);
    stroke.last = at(event);
  });
  for (const name of ["pointerup", "pointercancel"]) node.addEventListener(name, () => (stroke = null));
  for (const name of ["pointerleave", "blur"]) node.addEventListener(name, () => (hair.hidden = !stroke));
  node.addEventListener("keydown", keys);
  well.replaceChildren(node);
}

/** The patches from one to another: a quick hand leaves no gaps. */
function way(from, to, [, w]) {
  const [down, across] = [Math.floor(to / w) - Math.floor(from / w), (to % w) - (from % w)];
  const steps = Math.max(Math.abs(down), Math.abs(across), 1);
  return Array.from({ length: steps }, (_, i) => {
    const t = (i + 1) / steps;
    return Math.round(Math.floor(from / w) + down * t) * w + Math.round((from % w) + across * t);
  });
}

function point(patch) {
  cursor = patch;
  frame(hair, patch, holes.grid);
}

function keys(event) {
  const move = arrow(event);
  if (move) {
    point(beside(cursor, move, holes.grid));
    announce(`${placeOf(cursor, holes.grid)}${gone.has(holes.before + cursor) ? ", removed" : ""}`);
  } else if (event.key === " " || event.key === "Enter") {
    event.preventDefault();
    point(cursor);
    past.push(new Set(gone));
    touch(cursor, gone.has(holes.before + cursor));
  }
}

/** The patches under the brush go, or come back. */
function touch(patch, restore) {
  const [h, w] = holes.grid;
  const reach = (brush - 1) / 2;
  const [row, column] = [Math.floor(patch / w), patch % w];
  const size = gone.size;
  for (let y = Math.max(0, row - reach); y <= Math.min(h - 1, row + reach); y++) {
    for (let x = Math.max(0, column - reach); x <= Math.min(w - 1, column + reach); x++) {
      const number = holes.before + y * w + x;
      if (restore) gone.delete(number);
      else gone.add(number);
    }
  }
  if (gone.size !== size) changed();
}

function paint(made) {
  past.push(new Set(gone));
  gone = made(gone);
  changed();
}

function back() {
  if (!past.length) return;
  gone = past.pop();
  changed();
}

function changed() {
  holes.show(gone, now?.way === "pixels" ? "mean" : "cut");
  ask();
}

const ask = api.latest(async () => {
  const where = here();
  const chosen = state.targets.map(classOf).filter((one) => one !== null);
  const listed = [...new Set([...world.classes.map((one) => one.index), ...chosen])];
  const targets = state.targets.filter((one) => classOf(one) === null && !/^top-?\d+$/.test(one));
  const body = { ...where, classes: listed.slice(0, 20), targets };
  const removed = [...gone];
  try {
    const whole = JSON.stringify(body);
    if (before?.whole !== whole) before = { whole, ...(await api.post("erase", { ...body, removed: [] })) };
    const told = removed.length ? await api.post("erase", { ...body, removed }) : before;
    if (where.image !== state.image || where.model !== here().model) return;
    now = told;
    answered = removed.join();
    trouble.replaceChildren();
    show();
  } catch (error) {
    trouble.replaceChildren(problem(error));
  }
});

/** What is listed: a probability (value) or a score, now and before. */
function told() {
  const classes = now.classes.map(({ label, probability, value }, i) => regresses()
    ? { label: short(label), score: value, old: before.classes[i].value }
    : { label: short(label), value: probability, old: before.classes[i].probability });
  const scores = now.scores.map(({ target, score }, i) =>
    ({ label: nameOf(target), score, old: before.scores[i].score }));
  return [...classes, ...scores];
}

/** Bars that move, each with a mark where it began. */
function show() {
  if (now.way === "pixels" && holes.way !== "mean") holes.show(gone, "mean");
  undo.disabled = !past.length;
  reset.disabled = !gone.size;
  const listed = told();
  while (rows.children.length > listed.length) rows.lastChild.remove();
  listed.forEach((one, i) => {
    const row = rows.children[i]
      ?? rows.appendChild(el("div.bar", el("span.fill"), el("span.was"), el("span.label"), el("span.value")));
    const [fill, was, label, value] = row.children;
    const score = one.value === undefined;
    fill.style.width = `${score ? 0 : 100 * one.value}%`;
    was.style.left = `${score ? 0 : 100 * one.old}%`;
    was.hidden = score;
    label.textContent = one.label;
    const text = score ? number : percent;
    const current = text(score ? one.score : one.value);
    const old = text(one.old);
    value.textContent = current === old ? current : `${old} → ${current}`;
  });
  const best = now.top[0];
  const said = [`${gone.size} of ${holes.whole} patches removed`,
    best && `top ${regresses() ? "output" : "class"} now: ${short(best.label)} ${shareOf(best)}`,
    now.way === "pixels"
      ? `their pixels are replaced by the mean colour: ${now.why}`
      : "their tokens are removed from the sequence"];
  words.textContent = said.filter(Boolean).join(" · ");
}
