// Methods × targets, filled map by map.

import * as api from "./api.js";
import { list, relist } from "./clip.js";
import { cursor, MapView, onCursor, redraw } from "./draw.js";
import { asks, asksOf } from "./help.js";
import { mark } from "./marks.js";
import { choose } from "./methods.js";
import { nameOfPhoto } from "./rail.js";
import { set, state, written } from "./state.js";
import { code, drawn, mapsOf, table, valuesOf } from "./take.js";
import { announce, button, byId, el, number, placeOf, problem, progress, save, toast } from "./ui.js";
import { here, method, model, nameOf, photo, shareOf, short, world } from "./world.js";

const cells = new Map(); // method|target: cell
const lead = el("p.lead");
const trouble = el("div");
const bar = progress();
const board = el("table.grid");
const FILMED = 8; // maps in one film
let done = ""; // the question that is answered or being answered
let focused = null;
let heads = [];

const free = (one) => method(one.name) !== undefined && !model().aimed.includes(one.name); // of targets
const keyOf = (one, target) => `${written(one)}|${free(one) ? "" : target}`;
const question = () => JSON.stringify([here(), state.methods, state.targets]);

/** What the server is asked for, in the order in which it answers. */
const wanted = () =>
  state.targets.flatMap((target, i) =>
    state.methods.filter((one) => i === 0 || !free(one)).map((one) => ({ one, target, key: keyOf(one, target) })));

export const explain = {
  begin(panel) {
    panel.append(el("div.head", lead, bar, button("Methods …", () => open(), { id: "methods" }), asks("explain")),
      trouble, el("div.scroll", board));
    onCursor(() => speak());
  },

  /** Ask for what is missing, and draw. */
  update(what) {
    if (["classes", "model", "image", "tab"].some((name) => what.has(name))) tell();
    if (question() !== done) this.run();
    else if (what.has("classes")) heads.forEach((head) => head());
    rescale();
  },

  run() {
    const old = done ? JSON.parse(done)[0] : null;
    const where = here();
    done = question();
    bar.stop();
    trouble.replaceChildren();
    if (old?.image !== where.image || old?.model !== where.model) forget();
    const asked = wanted();
    build(asked);
    const missing = asked.filter(({ key }) => !cells.get(key).meta);
    if (!missing.length) return;
    let next = 0;
    bar.run(api.job("explain", { ...where, methods: state.methods, targets: state.targets }), (name, told) => {
      if (name === "map") return cells.get(asked[next++]?.key)?.fill(told);
      if (name === "problem") return cells.get(asked[next++]?.key)?.fail(told);
      for (const { key } of asked.slice(next)) cells.get(key)?.stop();
      if (name === "left") done = ""; // asked again when the reader comes back
      else if (name !== "done") trouble.replaceChildren(problem(name === "cancelled" ? "Cancelled." : told, again));
    });
  },

  /** The maps that are shown, in order. */
  maps: () => [...new Set(wanted().map(({ key }) => cells.get(key)))].filter((cell) => cell?.meta),
  busy: () => bar.ended(),

  exports: [
    drawn,
    {
      id: "figure", label: "Figure", title: "All maps as one figure, as vitreous explain draws it",
      async run() {
        const maps = shownMaps();
        if (!maps.length) return toast("There is no map yet.");
        const name = nameOfPhoto().replace(/\.\w+$/, "");
        save(await api.file("figure", { maps, cells: state.cells }), `${name}-vitreous.png`);
      },
    },
    {
      id: "film", label: "GIF", title: "A film: every frame under the map of its tubelet", only: () => model().frames,
      async run() {
        const maps = shownMaps().slice(0, FILMED);
        if (!maps.length) return toast("There is no map yet.");
        save(await api.file("film", { maps, cells: state.cells }), `${nameOfPhoto().replace(/\.\w+$/, "")}-vitreous.gif`);
      },
    },
    mapsOf(() => shownMaps()),
    table("The value of every map at every patch", () => [
      ["model", "image", "method", "target", "time", "row", "column", "value"],
      ...valuesOf(explain.maps().map(({ one, target, view }) =>
        ({ head: [written(one), target === null ? "" : nameOf(target)], view }))),
    ]),
    ...code(() => ({ body: { ...here(), methods: state.methods, targets: state.targets } })),
  ],
};

const shownMaps = () => explain.maps().map((cell) => cell.meta.id);

function again() {
  done = "";
  explain.run();
}

function open(first = null) {
  choose((methods) => set({ methods }), first);
}

function tell() {
  const best = world.classes[0];
  if (world.answer) {
    return lead.replaceChildren(el("b", `${model().name} answers: ${world.answer.text}`),
      " Each row explains one word; choose others in the answer at the left.");
  }
  lead.replaceChildren(...(best
    ? [el("b", `${model().name} predicts ${short(best.label)} (${shareOf(best)}).`),
       " Orange is evidence for the target, blue is evidence against it.",
       " Point at a patch to compare the maps there; click a class to add it as a target."]
    : [world.why ?? `Running ${model().name} on the image …`]));
}

function forget() {
  for (const cell of cells.values()) cell.view.remove();
  cells.clear();
  focused = null;
}

/** Rows and columns; cells that stay keep their maps. */
function build(asked) {
  const held = new Set(asked.map(({ key }) => key));
  for (const [key, cell] of cells) {
    if (held.has(key)) continue;
    cell.view.remove();
    cells.delete(key);
  }
  for (const { one, key, target } of asked) {
    if (!cells.has(key)) cells.set(key, new Cell(one, free(one) ? null : target));
    else if (!cells.get(key).meta) cells.get(key).wait();
  }
  if (!focused || ![...cells.values()].includes(focused)) focus(cells.get(asked[0].key));
  heads = [];
  const columns = state.methods.map((one) => el("th", { scope: "col" }, columnHead(one)));
  const rows = state.targets.map((target, row) => {
    const head = el("th", { scope: "row" });
    heads.push(() => head.replaceChildren(...rowHead(target)));
    heads.at(-1)();
    const parts = state.methods.flatMap((one) => {
      if (free(one) && row > 0) return [];
      const { td } = cells.get(keyOf(one, target));
      td.rowSpan = free(one) ? state.targets.length : 1;
      return [td];
    });
    return el("tr", head, ...parts);
  });
  board.replaceChildren(el("thead", el("tr", el("td"), columns)), el("tbody", rows));
  const high = state.methods.every(free) ? 1 : state.targets.length; // maps one below the other
  board.classList.toggle("lone", state.methods.length === 1 && high > 1);
  board.style.setProperty("--columns", state.methods.length);
  board.style.setProperty("--rows", Math.min(2, high));
}

function columnHead(one) {
  const options = Object.entries(one.options).map(([key, value]) => `${key} ${value}`).join(", ");
  const others = state.methods.filter((other) => other !== one);
  const { family = "", summary = "", formula = "" } = method(one.name) ?? {};
  const note = options || (free(one) ? "same for all targets" : family.replace("_", " "));
  const drop = () => {
    set({ methods: others });
    byId("methods").focus();
  };
  return el("div.column",
    button([one.name, el("small", note)], () => open(one.name), { className: "name", title: `${summary}\n${formula}` }),
    asksOf(one.name), others.length > 0 && button("×", drop, { className: "close", ariaLabel: `Remove ${one.name}` }));
}

function rowHead(target) {
  const title = state.methods.map((one) => cells.get(keyOf(one, target))?.meta?.title).find(Boolean);
  const found = /^(.*) (\d+%)$/.exec(title ?? "");
  const rank = /^top-?\d+$/.test(target) ? el("small", target) : "";
  if (!found || found[1].includes("rather than") || model().form !== "vector") return [el("span", title ?? nameOf(target)), rank];
  return [el("span", short(found[1])), el("small", found[2]), rank];
}

function focus(cell) {
  focused?.td.classList.remove("focused");
  focused = cell;
  cell?.td.classList.add("focused");
  list(cell?.view);
}

/** One map of the grid. */
class Cell {
  constructor(one, target) {
    Object.assign(this, { one, target, meta: null });
    const { grid, size } = model();
    this.view = new MapView({ photo: photo(), grid, size, name: this.name });
    this.note = el("div.note");
    this.td = el("td", this.view.node, this.view.legend.node, this.note);
    this.td.addEventListener("focusin", () => focus(this));
    this.td.addEventListener("click", () => focus(this));
    this.wait();
  }

  get name() {
    return this.target === null ? this.one.name : `${this.one.name} for ${nameOf(this.target)}`;
  }

  wait() {
    this.td.className = `${this.td.classList.contains("focused") ? "focused " : ""}waiting`;
    this.note.replaceChildren();
  }

  async fill(meta) {
    this.meta = meta;
    try {
      const values = await api.map(meta.id);
      this.td.classList.remove("waiting");
      this.view.name = this.name;
      this.view.show(values, meta);
      if (this === focused) relist(this.view);
      mark(this.view.node, meta.places);
      const notes = Object.entries(meta.notes).map(([key, value]) => `${key}: ${JSON.stringify(value)}`);
      const range = `from ${number(meta.min)} to ${number(meta.max)}`;
      this.view.legend.node.title = [range, `${meta.seconds.toFixed(2)} s`, ...notes].join("\n");
      heads.forEach((head) => head());
      rescale();
    } catch (error) {
      this.fail(error);
    }
  }

  fail(told) {
    this.meta = null;
    this.td.classList.remove("waiting");
    this.td.classList.add("failed");
    this.note.replaceChildren(problem(told));
  }

  stop() {
    if (!this.meta) this.td.classList.remove("waiting");
  }
}

/** Limits of each map, or one pair for all maps of a method. */
function rescale() {
  const shown = explain.maps();
  for (const cell of shown) {
    const alike = state.same ? shown.filter((other) => other.one.name === cell.one.name) : [cell];
    const ends = alike.flatMap((one) => one.meta.limits);
    cell.view.limits = [Math.min(...ends), Math.max(...ends)];
  }
  redraw();
}

/** The values under the cross-hair, read aloud where keys moved it. */
function speak() {
  if (state.tab !== "explain" || cursor.patch === null || !document.activeElement?.matches(".map")) return;
  const told = explain.maps().map((cell) => `${cell.name} ${number(cell.view.at(cursor.patch))}`);
  announce(`${placeOf(cursor.patch, model().grid)}: ${told.join(", ")}`);
}
