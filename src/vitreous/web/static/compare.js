// Images × models side by side: one method, one target, one scale.

import { add, onModels } from "./additions.js";
import { agreement } from "./agreement.js";
import * as api from "./api.js";
import { Cell } from "./compared.js";
import { cursor, onCursor, redraw } from "./draw.js";
import { asks } from "./help.js";
import { dropped, uploads } from "./sheet.js";
import { FIRST, same, set, state, written } from "./state.js";
import { drawn, maps, table as exported } from "./take.js";
import { announce, button, byId, choice, el, number, placeOf, problem, progress, toast, toggle } from "./ui.js";
import { model, nameOf, picture, world } from "./world.js";

const cells = new Map(); // key: cell
const trouble = el("div");
const bar = progress();
const table = el("table.grid");
const samples = el("div.samples", { role: "group", "aria-label": "Sample images of the comparison" });
const sending = uploads();
const lead = el("p.lead", el("b", "The same question, side by side. "),
  "Choose two maps of one image, A and B, to see where they differ: with the buttons below a map, or the keys A and B on it.");
const side = agreement({ cellAt, columnsOf: columns, rowsOf: rows, nameOfImage });
const suited = new Map(); // models: the method that works on all of them
const PAIR = { one: "0.0", other: "0.1" }; // the first two maps of the first image
let asking = "";
let knobs = {};
let done = ""; // the question that is answered or being answered
let adding = "";

// ------------------------------------------------------------------------------------------------------ what is compared

const split = (text) => (text ? [...new Set(text.split(";"))] : []);
const known = (name) => world.info.models.find((one) => one.name === name);

/** The models of the columns; where an address names none, that of the page and another. */
export function models() {
  const named = split(state.models).filter(known);
  if (named.length) return named;
  const others = world.info.models.map((one) => one.name).filter((name) => name !== model().name);
  return [model().name, ...others].slice(0, 2);
}

/** The images of the rows; where an address names none, that of the page and a sample. */
function rows() {
  const named = split(state.images);
  if (named.length) return named.slice(0, world.info.limits.sheet);
  const others = world.info.samples.map((one) => one.id).filter((id) => id !== state.image);
  return [state.image, ...others].slice(0, 2);
}

/** Of one model its methods stand side by side, of several models one method. */
function columns() {
  const all = models();
  if (all.length === 1) return state.methods.map((one) => ({ model: all[0], one }));
  return all.map((name) => ({ model: name, one: chosen() }));
}

/** The method of all models: the one that was chosen here or in Explain, else one that works on all of them. */
function chosen() {
  const name = state.by || suited.get(models().join(";"));
  const mine = state.methods.find((one) => one.name === name);
  if (mine) return mine;
  if (world.info.methods.some((one) => one.name === name)) return { name, options: {} };
  const all = models().map(known);
  const able = state.methods.filter((one) => all.every(({ unsupported }) => !(one.name in unsupported)));
  return able.find((one) => all.every(({ aimed }) => aimed.includes(one.name))) ?? able[0] ?? state.methods[0];
}

/** Ask which method works on all models, where nobody chose one; true if the answer is still to come. */
function asksMethod() {
  const names = models();
  const key = names.join(";");
  if (state.by || names.length === 1 || suited.has(key) || !same(state.methods, FIRST.methods)) return false;
  if (asking !== key) {
    asking = key;
    api.post("compare/method", { models: names }).then(({ method }) => method, () => "").then((method) => {
      suited.set(key, method);
      asking = "";
      if (state.tab === "compare") compare.update(new Set(["models"]));
    });
  }
  return true;
}

function nameOfImage(id) {
  const sample = [...world.info.samples, ...world.info.examples].find((one) => one.id === id);
  return sample?.name ?? world.files.get(id) ?? `image ${rows().indexOf(id) + 1}`;
}

/** Which class is explained, and whose number it is: that of the first column, of each model, or of the page's model. */
function aimed() {
  if (state.aim === "own") return { target: "top-1", own: true };
  if (state.aim === "first" || !state.aim) return { target: "top-1", whose: models()[0] };
  return { target: state.aim, whose: model().name };
}

const keyOf = (image, { model: name, one }) => JSON.stringify([image, name, written(one), aimed()]);
const question = () => JSON.stringify([rows(), columns(), aimed()]);
const all = () => rows().flatMap((image, row) => columns().map((column, i) => ({ image, column, row, i, key: keyOf(image, column) })));

function cellAt(place) {
  const [row, i] = place.split(".").map(Number);
  const [image, column] = [rows()[row], columns()[i]];
  return image && column ? cells.get(keyOf(image, column)) : undefined;
}

// ----------------------------------------------------------------------------------------------------------------- tab

export const compare = {
  begin(panel) {
    knobs = {
      by: choice("Method", [], "", (by) => set({ by })),
      aim: choice("Target", [], "", (aim) => set({ aim })),
      across: toggle("One scale", state.across, (across) => set({ across }, true)),
      add: choice("Add a model", [], "", () => {}),
      take: button("Add", () => addModel(knobs.add.querySelector("select").value), { id: "add-model" }),
    };
    knobs.across.title = "The same colours mean the same values in all maps of a method";
    const files = picker("compare-files", { multiple: true, accept: "image/*,.npy,.npz" });
    const folder = picker("compare-folder", { webkitdirectory: true });
    panel.append(el("div.head", lead, bar, asks("compare")),
      el("div.head.asked", knobs.by, knobs.aim, knobs.across, el("div.row.add", knobs.add, knobs.take)),
      el("div.head.sheet", samples, files.node, files.label("Add images"), folder.node, folder.label("Add a folder"),
        el("span.quiet", "or drop images or a folder here")),
      sending, trouble, el("div.sides", el("div.scroll", table), side.node));
    panel.addEventListener("dragover", (event) => event.preventDefault());
    panel.addEventListener("drop", async (event) => {
      event.preventDefault();
      event.stopPropagation();
      document.body.classList.remove("over");
      addFiles(await dropped(event.dataTransfer));
    });
    onCursor(() => speak());
    onModels(() => state.tab === "compare" && this.update(new Set(["models"])));
  },

  update(what) {
    follow(what);
    missing();
    show();
    if (asksMethod()) return;
    if (question() !== done) this.run();
    rescale();
    side.update(what);
  },

  run() {
    done = question();
    bar.stop();
    build();
    const open = all().map(({ key }) => cells.get(key)).filter((cell) => !cell.meta && !cell.failed);
    if (!open.length) return;
    bar.run(several(open), (name, told) => {
      for (const cell of open) cell.stop();
      if (name === "left") done = ""; // asked again when the reader comes back
      else if (name !== "done") trouble.replaceChildren(problem(name === "cancelled" ? "Cancelled." : told, again));
    });
  },

  exports: [
    drawn,
    maps(() => shown().length && { path: "compare/maps.npz", body: { maps: [...new Set(shown().map(({ meta }) => meta.id))] } }),
    exported("How far the maps agree, two by two", () => side.rows()),
  ],
};

const shown = () => all().map(({ key }) => cells.get(key)).filter((cell) => cell?.meta);

function again() {
  done = "";
  for (const cell of cells.values()) cell.failed = false;
  trouble.replaceChildren();
  compare.run();
}

/** An image or a model that is chosen elsewhere on the page joins the comparison. */
function follow(what) {
  if (state.tab !== "compare" || what.has("tab")) return;
  if (what.has("image") && state.images && !what.has("images") && !rows().includes(state.image)) addImages([state.image], true);
  if (what.has("model") && state.models && !what.has("models") && !models().includes(state.model)) {
    set({ models: [...models(), state.model].join(";") }, true);
  }
}

/** Models of a link that are not here: those that may be added are. */
function missing() {
  const names = split(state.models).filter((name) => !known(name));
  if (names.join() === adding) return;
  adding = names.join();
  const lost = names.filter((name) => !world.info.allowed.includes(name));
  trouble.replaceChildren(...(lost.length ? [problem(`There is no model ${lost.join(", ")} here.`)] : []));
  for (const name of names) if (!lost.includes(name)) load(name);
}

async function load(name) {
  const words = el("p.quiet", { role: "status" });
  trouble.replaceChildren(words);
  knobs.take.disabled = true;
  try {
    await add(name, (told) => (words.textContent = told));
    words.remove();
    return true;
  } catch (error) {
    trouble.replaceChildren(problem(error));
    return false;
  } finally {
    knobs.take.disabled = false;
  }
}

async function addModel(name) {
  if (!name || (!known(name) && !(await load(name)))) return;
  set({ models: [...models(), name].join(";") });
  announce(`${name} joined the comparison`);
}

function addImages(ids, quietly = false) {
  const now = rows();
  const room = world.info.limits.sheet - now.length;
  const fresh = ids.filter((id) => !now.includes(id));
  if (fresh.length > room) toast(`A comparison has at most ${world.info.limits.sheet} images.`);
  if (fresh.length && room > 0) set({ images: [...now, ...fresh.slice(0, room)].join(";") }, quietly);
}

async function addFiles(files) {
  if (!files.length) return;
  addImages(await sending.send(files, world.info.limits.sheet - rows().length));
}

function drop(list, key, gone) {
  set({ [key]: list.filter((one) => one !== gone).join(";"), ...PAIR });
  byId("compare-files").focus();
}

function picker(id, more) {
  const node = el("input.unseen", { type: "file", id, ...more });
  node.addEventListener("change", () => {
    addFiles([...node.files]);
    node.value = "";
  });
  return { node, label: (words) => el("label.pick", { htmlFor: id }, el("b", words)) };
}

// ------------------------------------------------------------------------------------------------------------ controls

function show() {
  const names = world.info.methods.map((one) => one.name);
  const used = state.methods.map((one) => one.name);
  knobs.by.show(chosen().name, [...new Set([...used, ...names])]);
  knobs.by.hidden = models().length === 1;
  const named = state.targets.filter((one) => !/^top-?1$/i.test(one)).map((one) => [one, nameOf(one)]);
  const first = models().length > 1 ? `Top class of ${models()[0]}` : "Top class";
  const own = models().length > 1 ? [["own", "Each model's own top class"]] : [];
  const other = named.some(([key]) => key === state.aim) || ["first", "own"].includes(state.aim) ? [] : [[state.aim, nameOf(state.aim)]];
  knobs.aim.show(state.aim, [["first", first], ...own, ...named, ...other]);
  knobs.across.show(state.across);
  const free = world.info.models.map((one) => one.name).filter((name) => !models().includes(name));
  knobs.add.show(free[0] ?? world.info.allowed[0] ?? "",
    [...free, ...world.info.allowed.map((name) => [name, `${name} (will be loaded)`])]);
  knobs.add.hidden = knobs.take.hidden = !free.length && !world.info.allowed.length;
  const inside = rows();
  samples.replaceChildren(...world.info.samples.map(({ id, name }) => {
    const here = inside.includes(id);
    const turn = () => {
      if (!here) return addImages([id]);
      if (inside.length === 1) return toast("At least one image is needed; add another one first.");
      drop(inside, "images", id);
    };
    return button(picture(id, name), turn, { title: here ? `Take ${name} out` : `Add ${name}`, ariaPressed: String(here) });
  }));
}

function build() {
  const wanted = all();
  const held = new Set(wanted.map(({ key }) => key));
  for (const [key, cell] of cells) {
    if (held.has(key)) continue;
    cell.view.remove();
    cells.delete(key);
  }
  for (const { image, column, key } of wanted) {
    if (!cells.has(key)) cells.set(key, new Cell(image, column, aimed(), nameOfImage, filled));
    else if (!cells.get(key).meta) cells.get(key).wait();
  }
  const heads = columns();
  const body = rows().map((image, row) => el("tr", el("th", { scope: "row" }, rowHead(image)),
    ...heads.map((column, i) => {
      const cell = cells.get(keyOf(image, column));
      cell.place(`${row}.${i}`, pick);
      return cell.td;
    })));
  table.replaceChildren(el("thead", el("tr", el("td"), heads.map((one) => el("th", { scope: "col" }, columnHead(one))))),
    el("tbody", body));
  table.style.setProperty("--columns", heads.length);
  mark();
}

function columnHead({ model: name, one }) {
  const [list, title] = models().length > 1 ? [models(), name] : [null, one.name];
  const note = list ? one.name : name;
  return el("div.column", el("span.name", el("b", title), el("small", note)),
    list && button("×", () => drop(list, "models", name), { className: "close", ariaLabel: `Remove ${name}` }));
}

function rowHead(image) {
  const list = rows();
  return el("div.column", el("span.name", nameOfImage(image)),
    list.length > 1 && button("×", () => drop(list, "images", image), { className: "close", ariaLabel: `Remove ${nameOfImage(image)}` }));
}

/** A or B of the difference. */
function pick(which, place) {
  set({ [which]: place });
  announce(`${cellAt(place)?.name} is ${which === "one" ? "A" : "B"}`);
}

function mark() {
  for (const { key, row, i } of all()) cells.get(key)?.mark(`${row}.${i}`);
}

function filled() {
  rescale();
  side.update(new Set(["maps"]));
}

/** Limits of each map, or one pair for all maps of a method. */
function rescale() {
  const here = shown();
  mark();
  for (const cell of here) {
    const alike = state.across ? here.filter((other) => written(other.column.one) === written(cell.column.one)) : [cell];
    const ends = alike.flatMap((one) => one.meta.limits);
    cell.view.limits = [Math.min(...ends), Math.max(...ends)];
  }
  redraw();
}

function speak() {
  if (state.tab !== "compare" || cursor.patch === null || !document.activeElement?.matches("#compare .map")) return;
  const told = shown().map((cell) => `${cell.name} ${number(cell.view.at(cursor.patch))}`);
  announce(`${placeOf(cursor.patch, model().grid)}: ${told.join(", ")}`);
}

// ---------------------------------------------------------------------------------------------------------------- jobs

/** One job for each cell: those of a model one after the other, the models at the same time. */
const several = (open) => (on) => {
  const began = performance.now();
  const running = new Set();
  let count = 0;
  let over = false;
  let finish;
  const ended = new Promise((resolve) => (finish = resolve));
  const end = (name, told) => {
    if (over) return;
    over = true;
    on(name, told);
    finish(name);
  };
  const tell = (cell, { done: part = 0, total = 1 } = {}) => {
    const left = count ? ((performance.now() - began) / 1000 / count) * (open.length - count) : null;
    on("progress", { what: cell.name, done: part, total, seconds_left: left, step: count + 1, steps: open.length });
  };
  const queue = async (mine) => {
    for (const cell of mine) {
      if (over) return;
      tell(cell);
      await cell.run(running, (told) => tell(cell, told), () => over);
      count += 1;
    }
  };
  const names = [...new Set(open.map(({ column }) => column.model))];
  const queues = names.map((name) => open.filter(({ column }) => column.model === name));
  Promise.resolve().then(() => Promise.all(queues.map(queue)))
    .then(() => end("done", {}), (error) => end("failed", { detail: error.message }));
  return {
    ended,
    cancel() {
      end("cancelled", {});
      for (const one of running) one.cancel();
    },
  };
};
