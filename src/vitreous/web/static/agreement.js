// Beside a comparison: the difference of two of its maps, and figures of how far all of them agree.

import * as api from "./api.js";
import { ends, MapView } from "./draw.js";
import { set, state } from "./state.js";
import { button, el, problem, segments } from "./ui.js";
import { model } from "./world.js";

const MEASURES = [
  ["correlation", "Rank correlation", "Spearman's correlation over the patches: 1 is the same order, 0 is none"],
  ["overlap", "Top tenth", "The tenths of the patches with the highest values, intersection over union"],
  ["distance", "Distance", "The share of the relevance that lies elsewhere: 0 is the same, 1 is none in common"],
];
const WAYS = [["shares", "Shares"], ["values", "Values"]];
const WORDS = {
  shares: "Each map is divided by its sum of magnitudes first, so that models of other scales can be subtracted.",
  values: "The values as they are, in the units of the method.",
};

const asked = api.remembered((maps) => api.post("agreement", { maps }), 40);
const subtracted = api.remembered(async (one, other, of) => {
  const { buffer, shape } = await api.raw("difference", { one, other, of });
  return { shape, values: new Float32Array(buffer) };
}, 60);
const sentence = (text) => text.replace(/^[a-z]+(?=[ ,])/, (word) => word[0].toUpperCase() + word.slice(1)); // names of models stay
const written = (name, value) => (value === null ? "–" : name === "correlation" ? value.toFixed(2).replace("-", "−") : value.toFixed(2));

/** The panel; `cellAt("row.column")` gives a cell of the comparison. */
export function agreement({ cellAt, columnsOf, rowsOf, nameOfImage }) {
  const matrix = el("table.matrix");
  const words = el("p.quiet");
  const notes = el("div");
  const about = el("p.extras");
  const figure = el("div");
  const figures = el("p.extras");
  const ways = segments("Difference of", WAYS, state.of, (of) => set({ of }, true));
  const measures = segments("Measure", MEASURES.map(([key, name]) => [key, name]), state.measure, (measure) => set({ measure }, true));
  const node = el("aside.beside", { "aria-label": "Difference and agreement" },
    el("h3", "Agreement"), el("div.head", measures), words, el("div.scroll", matrix), notes,
    el("h3", "Difference, A − B"), el("div.head", ways), figure, about, figures);
  let pairs = new Map(); // "id id": figures
  let view = null;

  const cellsOf = (row) => columnsOf().map((_, i) => cellAt(`${row}.${i}`));
  const pairOf = (a, b) => pairs.get(`${a.meta.id} ${b.meta.id}`) ?? pairs.get(`${b.meta.id} ${a.meta.id}`);
  const label = (i) => {
    const all = columnsOf();
    return new Set(all.map((one) => one.model)).size > 1 ? all[i].model : all[i].one.name;
  };

  /** The mean of a measure over the images of which both maps are there. */
  const mean = (i, j, name) => {
    const found = rowsOf().map((_, row) => [cellAt(`${row}.${i}`), cellAt(`${row}.${j}`)])
      .filter(([a, b]) => a?.meta && b?.meta).map(([a, b]) => (a.meta.id === b.meta.id ? null : pairOf(a, b)?.[name]))
      .filter((value) => value !== null && value !== undefined);
    return { value: found.length ? found.reduce((sum, one) => sum + one, 0) / found.length : null, count: found.length };
  };

  const learn = api.latest(async () => {
    const ids = [...new Set(rowsOf().flatMap((_, row) => cellsOf(row)).filter((cell) => cell?.meta).map((cell) => cell.meta.id))];
    if (ids.length > 1) {
      const found = await asked(ids.slice(0, 128));
      pairs = new Map(found.map((one) => [`${one.one} ${one.other}`, one]));
    }
    draw();
  });

  function draw() {
    const count = columnsOf().length;
    const measure = MEASURES.find(([key]) => key === state.measure) ?? MEASURES[0];
    measures.show(measure[0]);
    const rows = rowsOf().length;
    words.textContent = count < 2 ? "Agreement needs two columns: add a model, or a method in Explain."
      : `${measure[2]}.${rows > 1 ? ` Means over ${rows} images.` : ""}`;
    matrix.hidden = count < 2;
    const numbers = [...Array(count).keys()];
    matrix.replaceChildren(
      el("thead", el("tr", el("td"), numbers.slice(1).map((j) => el("th", { scope: "col" }, label(j))))),
      el("tbody", numbers.slice(0, -1).map((i) => el("tr", el("th", { scope: "row" }, label(i)),
        numbers.slice(1).map((j) => el("td", j > i && entry(i, j, measure)))))));
    const said = [...new Set([...pairs.values()].filter((one) => rowsOf().length).flatMap(({ how, targets, why }) => [how, targets, why]).filter(Boolean))];
    notes.replaceChildren(...said.slice(0, 4).map((one) => el("p.quiet", `${sentence(one)}.`)));
  }

  /** A figure of the matrix, a button that subtracts these two columns. */
  function entry(i, j, [name, title]) {
    const { value, count } = mean(i, j, name);
    const row = state.one.split(".")[0];
    const knob = button(written(name, value), () => set({ one: `${row}.${i}`, other: `${row}.${j}` }),
      { title: `${label(i)} and ${label(j)}: ${title.toLowerCase()} ${written(name, value)}, ${count} ${count === 1 ? "image" : "images"}` });
    knob.ariaLabel = `${knob.title}; show the difference`;
    knob.style.setProperty("--share", `${Math.round(60 * Math.max(0, name === "distance" ? 1 - (value ?? 1) : (value ?? 0)))}%`);
    return knob;
  }

  const subtract = api.latest(async () => {
    const [a, b] = [cellAt(state.one), cellAt(state.other)];
    ways.show(state.of);
    const clear = (told, isProblem = false) => {
      view?.remove();
      view = null;
      figure.replaceChildren();
      figures.textContent = "";
      about.replaceChildren(isProblem ? problem(told) : told);
    };
    if (!a || !b) return clear("Choose two maps of one image, A and B.");
    if (a.failed || b.failed) return clear("There is no difference: one of the two maps cannot be made, as said in its place.");
    if (!a.meta || !b.meta) return clear("The difference is drawn when both maps are there.");
    if (a.image !== b.image) {
      return clear("A and B explain different images: a patch of one has no counterpart in the other, so there is no difference. Choose two maps of one image.", true);
    }
    try {
      const { values, shape } = await subtracted(a.meta.id, b.meta.id, state.of);
      view?.remove();
      const { size } = a.info;
      view = new MapView({ photo: api.view(a.image, a.column.model), grid: model().grid, size, name: `A minus B: ${a.name} minus ${b.name}` });
      view.show(values, { shape, signed: true, ends: ["more in B", "more in A"], limits: ends(values, true) });
      figure.replaceChildren(el("div.difference", view.node, view.legend.node));
      about.replaceChildren(el("b", "A"), ` ${a.name}. `, el("b", "B"), ` ${b.name}. ${WORDS[state.of]}`);
      const pair = pairOf(a, b);
      figures.textContent = pair
        ? [...MEASURES.map(([key, name]) => `${name.toLowerCase()} ${written(key, pair[key])}`), pair.how].filter(Boolean).join(" · ") : "";
    } catch (error) {
      clear(error, true);
    }
  });

  /** For a file: every two maps of an image. */
  const rows = () => {
    const found = [["image", "model_a", "method_a", "target_a", "model_b", "method_b", "target_b",
      "correlation", "overlap", "distance", "rows", "columns", "how", "targets"]];
    rowsOf().forEach((image, row) => {
      const here = cellsOf(row);
      here.forEach((a, i) => here.slice(i + 1).forEach((b) => {
        const pair = a?.meta && b?.meta && pairOf(a, b);
        if (!pair) return;
        found.push([nameOfImage(image), a.column.model, a.column.one.name, a.meta.title, b.column.model, b.column.one.name, b.meta.title,
          pair.correlation, pair.overlap, pair.distance, ...pair.grid, pair.how, pair.targets]);
      }));
    });
    return found;
  };

  return {
    node,
    rows,
    async update() {
      draw();
      await learn();
      subtract();
    },
  };
}
