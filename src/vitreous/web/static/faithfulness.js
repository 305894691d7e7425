// Does the model lose what the map points at? Curves beside chance, and an eraser.

import * as api from "./api.js";
import { counterfactual, isSearching, patchesFound, taken } from "./counterfactual.js";
import { eraser } from "./eraser.js";
import { explain } from "./explain.js";
import { asks } from "./help.js";
import { Holes } from "./holes.js";
import { onTurn } from "./moment.js";
import { set, state } from "./state.js";
import { code, drawn, maps, table, whose } from "./take.js";
import { announce, arrow, between, choice, el, number, percent, problem, progress, segments, svg } from "./ui.js";
import { classOf, here, line, model, nameOf, photo, regresses, world } from "./world.js";

const METRICS = { deletion: "Deletion", insertion: "Insertion", token_deletion: "Token deletion" };
const WAYS = { deletion: "mean", insertion: "blur", token_deletion: "cut" };
const AXIS = { deletion: "patches hidden", insertion: "patches shown", token_deletion: "tokens removed" };
const lead = el("p.lead");
const bar = progress();
const trouble = el("div");
const chart = el("div.chart", { tabIndex: 0, role: "application" });
const preview = el("div");
const caption = el("p.extras");
const areas = el("p.areas");
const known = new Map(); // map, metric, target: curve
const bands = new Map(); // photo, metric, target: what random maps do
let holes = null;
let shown = []; // {cell, curve}
let at = { curve: 0, point: null };
let asked = "";
let place = "";
let parts = {};

export const subject = () => (state.targets.includes(state.subject) ? state.subject : state.targets[0]);
const bandKey = () => `${place} ${state.metric} ${subject()}`;
const keyOf = (cell) => `${cell.meta.id} ${state.metric} ${cell.target === null ? subject() : ""}`;

export const faithfulness = {
  begin(panel) {
    const usable = world.info.metrics.filter((one) => one.usable).map((one) => one.name);
    const able = Object.entries(METRICS).filter(([name]) => usable.includes(name));
    parts = {
      metric: segments("Metric", able, state.metric, (metric) => set({ metric })),
      subject: choice("Target", [], "", (value) => set({ subject: value })),
    };
    onTurn(() => holes?.turn(photo()));
    chart.ariaLabel = "Curves: the left and right arrow keys move along a curve, up and down switch curves";
    chart.addEventListener("pointermove", hover);
    chart.addEventListener("click", hover);
    chart.addEventListener("keydown", walk);
    new ResizeObserver(() => draw()).observe(chart);
    panel.append(el("div.head", lead, bar, parts.metric, parts.subject, asks("curves")), trouble,
      el("div.panels", el("div.panel.wide", chart, areas), el("div.panel.side", preview, caption)));
    eraser.begin(panel);
    counterfactual.begin(panel, () => this.update(new Set()));
  },

  async update(what) {
    parts.metric.show(state.metric);
    parts.subject.show(subject(), state.targets.map((one) => [one, nameOf(one)]));
    const now = JSON.stringify(here());
    if (now !== place) {
      place = now;
      holes = new Holes(photo(), model().grid, model().size);
      preview.replaceChildren(holes.node);
      at = { curve: 0, point: null };
    }
    eraser.update(what);
    counterfactual.update();
    explain.update(what);
    await explain.busy();
    if (state.tab !== "faithfulness" || isSearching()) return;
    const cells = explain.maps().filter((cell) => cell.target === null || cell.target === subject());
    const wanted = JSON.stringify([now, state.metric, subject(), cells.map((cell) => cell.meta.id)]);
    if (wanted !== asked) measure(cells, wanted);
  },

  /** The areas under so many curves, once all of them and those of random maps are there. */
  measured(count) {
    const band = bands.get(bandKey());
    if (!band || shown.length !== count) return null;
    return { curves: shown.map(({ cell, curve }) => ({ name: cell.one.name, value: curve.value })), random: band.value };
  },

  exports: [
    drawn,
    maps(() => (shown.length || eraser.taken().removed.length) && {
      path: "faithfulness/maps.npz",
      body: { ...here(), maps: shown.map(({ cell }) => cell.meta.id), removed: eraser.taken().removed, turned: patchesFound() },
    }),
    code(() => shown.length && {
      view: "curves",
      body: { ...here(), methods: shown.map(({ cell }) => cell.one), targets: [subject()], metric: state.metric,
        ...eraser.taken(), ...taken() },
    }, "The command that finds what would change it; curves and the eraser of one image have none"),
    table("The curves", () => [
      ["model", "image", "metric", "target", "method", "options", "share", "value", "least", "most", "auc", "better"],
      ...shown.flatMap(({ cell, curve }) => points(curve, cell.one.name, settings(cell.one), curve, curve.better)),
      ...(shown.length && bands.get(bandKey())
        ? points(shown[0].curve, "random", "", chance(bands.get(bandKey())), shown[0].curve.better) : []),
    ]),
  ],
};

const settings = ({ options }) => Object.entries(options).map(([key, value]) => `${key}=${value}`).join(" ");
const titleOf = ({ one }) => [one.name, settings(one)].filter(Boolean).join(" ");
const chance = ({ mean, low, high, value }) => ({ values: mean, low, high, value });

/** The rows of one curve; where it is a mean, with the least and the most. */
function points({ at: xs, target }, name, options, { values, low, high, value }, better) {
  return (xs ?? []).map((share, i) =>
    [...whose(), state.metric, target, name, options, share, values[i], low?.[i], high?.[i], value, better]);
}

/** First the curves of the maps, then those of random ones. */
function measure(cells, wanted) {
  asked = wanted;
  bar.stop();
  trouble.replaceChildren();
  const fresh = () => {
    shown = cells.filter((cell) => known.has(keyOf(cell))).map((cell) => ({ cell, curve: known.get(keyOf(cell)) }));
    draw();
  };
  fresh();
  const missing = cells.filter((cell) => !known.has(keyOf(cell)));
  const failed = [];
  const question = bandKey();
  const again = () => {
    if (bandKey() === question) measure(cells, wanted);
    else asked = ""; // another address: what it asks comes when it is mended
  };
  if (missing.length) {
    ask(missing, 0, (told) => {
      for (const cell of missing) if (cell.meta.id === told.map) known.set(keyOf(cell), told);
      fresh();
    }, failed, again);
  } else if (cells.length && !bands.has(bandKey())) {
    ask(cells.slice(0, 1), 5, (told) => {
      bands.set(bandKey(), told.random);
      draw();
    }, failed, again);
  }
}

function ask(cells, random, heard, failed, again) {
  const body = { maps: cells.map((cell) => cell.meta.id), metric: state.metric, target: subject(), random };
  bar.run(api.job("curves", body), (name, told) => {
    if (name === "curve") return heard(told);
    if (name === "left") return void (asked = "");
    if (name === "cancelled") failed.push({ detail: "Cancelled." });
    else if (name !== "done" && !failed.some((one) => one.detail === told.detail)) failed.push(told);
    if (name === "problem") return;
    trouble.replaceChildren(...failed.map((one) => problem(one, again)));
    if (!failed.length) again();
  });
}

// -------------------------------------------------------------------------------------------------------------- chart

let geometry = null;

function draw() {
  const curves = shown.filter(({ curve }) => curve.at && curve.values);
  const name = nameOf(subject());
  const unit = regresses() ? "value" : classOf(subject()) === null ? "score" : "probability";
  const better = curves[0]?.curve.better ?? "lower";
  const summary = world.info.metrics.find((one) => one.name === state.metric)?.summary ?? "";
  lead.replaceChildren(el("b", `${METRICS[state.metric]}. `), summary,
    curves.length && bands.has(bandKey()) ? " The grey band shows random maps." : "");
  const none = "The curves of the maps on the Explain tab appear here.";
  areas.replaceChildren();
  if (!curves.length) return chart.replaceChildren(el("p.quiet", none));
  const width = chart.clientWidth;
  const height = Math.max(240, Math.min(340, width * 0.5));
  const named = (title, value) => (width < 480 ? title : `${title} AUC ${number(value)}`); // all are listed below
  const longest = Math.max(6, ...curves.map(({ cell, curve }) => named(titleOf(cell), curve.value).length));
  const box = { left: 44, right: 24 + 7.6 * longest, top: 28, bottom: 40 };
  const band = bands.get(bandKey());
  const all = [...curves.flatMap(({ curve }) => curve.values), ...(band?.low ?? []), ...(band?.high ?? [])]
    .filter((v) => v !== null);
  const [low, high, step] = scale(Math.min(0, ...all), Math.max(...all, 0.001));
  const end = Math.max(...curves[0].curve.at);
  const x = (v) => box.left + (v / end) * (width - box.left - box.right);
  const y = (v) => height - box.bottom - ((v - low) / (high - low)) * (height - box.top - box.bottom);
  geometry = { curves, x, y, width, height, box };
  const text = (where, words, more = {}) => svg("text", { ...where, ...more }, words);
  const node = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" });
  for (let v = low; v <= high + step / 2; v += step) {
    node.append(svg("line", { x1: box.left, x2: width - box.right, y1: y(v), y2: y(v), class: "rule" }),
      text({ x: box.left - 6, y: y(v) + 4, "text-anchor": "end" }, number(Number(v.toFixed(6)))));
  }
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    if (share > end + 0.01) continue;
    node.append(text({ x: x(share), y: height - box.bottom + 18, "text-anchor": "middle" }, `${100 * share}%`));
  }
  node.append(text({ x: 4, y: 14 }, `${unit} of ${name}`, { class: "title" }),
    text({ x: (box.left + width - box.right) / 2, y: height - 6, "text-anchor": "middle" }, AXIS[state.metric]));
  const place = (v, value, i) => (value === null ? "" : `${i ? "L" : "M"}${x(v).toFixed(1)} ${y(value).toFixed(1)}`);
  const path = (xs, ys) => xs.map((v, i) => place(v, ys[i], i)).join("");
  const labels = [];
  if (band?.mean.length) {
    const xs = curves[0].curve.at;
    const back = path([...xs].reverse(), [...band.low].reverse()).replace("M", "L");
    node.append(svg("path", { d: `${path(xs, band.high)}${back}Z`, class: "band" }),
      svg("path", { d: path(xs, band.mean), class: "chance" }));
    labels.push({ words: named("random", band.value), y: y(band.mean.at(-1) ?? low), colour: "var(--grey)" });
  }
  curves.forEach(({ cell, curve }, i) => {
    const { name: title } = cell.one;
    const twin = curves.slice(0, i).some((other) => other.cell.one.name === title);
    const stroke = svg("path", { d: path(curve.at, curve.values), class: twin ? "curve twin" : "curve" });
    stroke.style.stroke = line(title);
    node.append(stroke);
    labels.push({ words: named(titleOf(cell), curve.value), y: y(curve.values.at(-1) ?? low), colour: line(title) });
  });
  for (const label of spread(labels, box.top + 6, height - box.bottom)) {
    const from = x(end) + 2;
    const leader = svg("path", { d: `M${from} ${label.y}L${from + 10} ${label.at}`, class: "leader" });
    const words = text({ x: from + 14, y: label.at + 4 }, label.words, { class: "name" });
    words.style.fill = label.colour;
    node.append(leader, words);
  }
  const chances = band ? [["random", band.value]] : [];
  const listed = [...curves.map(({ cell, curve }) => [titleOf(cell), curve.value]), ...chances];
  const kind = METRICS[state.metric];
  areas.replaceChildren(el("b", `${kind} AUC (${better} is better): `),
    listed.map(([name, value]) => `${name} ${number(value)}`).join(", "),
    el("small", " AUC: the area under the curve."));
  geometry.mark = svg("g");
  node.append(geometry.mark);
  chart.replaceChildren(node);
  select(at.curve, at.point ?? Math.round(0.3 * (curves[0].curve.at.length - 1)));
}

/** Round ends and steps of an axis. */
function scale(low, high) {
  const rough = (high - low) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough - 1e-12);
  return [Math.floor(low / step) * step, Math.ceil(high / step - 1e-9) * step, step];
}

/** Labels at the curves' ends, pushed apart. */
function spread(labels, top, bottom) {
  const sorted = [...labels].sort((a, b) => a.y - b.y);
  const gap = 16;
  sorted.forEach((one, i) => (one.at = Math.max(one.y, i ? sorted[i - 1].at + gap : top)));
  sorted.reverse().forEach((one, i) => (one.at = Math.min(one.at, i ? sorted[i - 1].at - gap : bottom)));
  return sorted;
}

function hover(event) {
  if (!geometry) return;
  const { curves, x, y } = geometry;
  const box = chart.getBoundingClientRect();
  const [px, py] = [event.clientX - box.left, event.clientY - box.top];
  const points = curves[0].curve.at;
  const point = points.reduce((best, v, i) => (Math.abs(x(v) - px) < Math.abs(x(points[best]) - px) ? i : best), 0);
  const far = ({ curve }) => Math.abs(y(curve.values[point] ?? 0) - py);
  select(curves.reduce((best, one, i) => (far(one) < far(curves[best]) ? i : best), 0), point);
}

function walk(event) {
  const move = geometry && arrow(event);
  if (!move) return;
  select(at.curve + move[0], at.point + move[1]);
  announce(caption.textContent);
}

/** Mark one point of one curve, and show the photo as it was there. */
function select(which, wanted) {
  const { curves, x, y, height, box, mark } = geometry;
  const index = between(0, which, curves.length - 1);
  const { cell, curve } = curves[index];
  const point = between(0, wanted, curve.at.length - 1);
  at = { curve: index, point };
  const value = curve.values[point];
  const [px, py] = [x(curve.at[point]), y(value ?? 0)];
  const dot = svg("circle", { cx: px, cy: py, r: 4.5, class: "dot" });
  dot.style.fill = line(cell.one.name);
  mark.replaceChildren(svg("line", { x1: px, x2: px, y1: box.top, y2: height - box.bottom, class: "guide" }), dot);
  const count = Math.floor(curve.at[point] * curve.order.length + 1e-6);
  const first = state.metric === "insertion" ? curve.order.slice(count) : curve.order.slice(0, count);
  holes.show(first, WAYS[state.metric]);
  const told = classOf(subject()) === null || regresses() ? number(value) : percent(value);
  const gone = `${percent(curve.at[point])} of the ${AXIS[state.metric]}`;
  caption.replaceChildren(el("b", cell.one.name), `: ${gone}, ${nameOf(subject())} ${told}`);
}
