// Which heads look where the class is; attention layer by layer; queries and keys.

import * as api from "./api.js";
import { headOf, layerOf } from "./attention.js";
import { colours, cursor, ends, MapView, onCursor, thumb } from "./draw.js";
import { subject } from "./faithfulness.js";
import { asks } from "./help.js";
import { set, state } from "./state.js";
import { code, drawn, maps, table, whose } from "./take.js";
import { button, choice, el, number, problem, progress, svg } from "./ui.js";
import { here, model, nameOf, photo } from "./world.js";

const bar = progress();
const trouble = el("div");
const chart = el("div.chart");
const told = el("p.extras");
const strip = el("div.layers", { role: "group", "aria-label": "Layers" });
const parts = el("div.triple");
const qkTrouble = el("div");
const scores = new Map(); // question: scores
let asked = "";
let place = "";
let pick = {};
let views = null;
let painted = [];
let ramp = "";

const qk = api.remembered(async (query) => {
  const { buffer, shape } = await api.raw("inside/qk", query);
  const count = shape[0] * shape[1];
  const bytes = (from) => new Uint8Array(buffer, from * count, 3 * count);
  return { shape, dots: new Float32Array(buffer, 0, count), queries: bytes(4), keys: bytes(7) };
}, 1000);

const active = () => state.tab === "inside" && views !== null;

export const inside = {
  begin(panel) {
    pick = {
      subject: choice("Target", [], "", (value) => set({ subject: value })),
      layer: choice("Layer", [], "", (value) => set({ layer: Number(value) }, true)),
      head: choice("Head", [], "", (value) => set({ head: value }, true)),
    };
    const lead = el("p.lead", el("b", "Which attention heads look where the class is. "),
      "CASS: the similarity of a head's attention to the target's saliency. Click a bar to select that head.");
    panel.append(
      el("div.head", lead, bar, pick.subject, asks("inside")),
      trouble, chart, told,
      el("h3", "Layer by layer", asks("layers")),
      el("p.quiet", "Attention of the tokens that the classifier reads, averaged over the heads."), strip,
      el("div.head", el("h3", "Queries and keys", asks("qk")), pick.layer, pick.head), qkTrouble, parts);
    new ResizeObserver(() => draw()).observe(chart);
    onCursor(() => active() && ask());
  },

  update(what) {
    pick.subject.show(subject(), state.targets.map((one) => [one, nameOf(one)]));
    const now = JSON.stringify(here());
    if (now !== place) {
      place = now;
      for (const view of Object.values(views ?? {})) view.remove();
      views = null;
      layers(now);
    }
    const question = JSON.stringify([now, subject()]);
    if (question !== asked) measure(question);
    if (!views) return;
    if (["layer", "head", "tab", "patch"].some((name) => what.has(name))) {
      mark();
      draw();
      ask();
    }
    if (ramp !== state.ramp) painted.forEach((paint) => paint((ramp = state.ramp)));
  },

  exports: [
    drawn,
    maps(() => views && { path: "inside/maps.npz", query: which() }),
    code(() => views && { view: "inside", body: { ...which(), token: String(which().token), target: subject() } },
      "Commands for the scores and the layers; queries and keys of one patch have none"),
    table("The similarity of every head", () => [
      ["model", "image", "target", "layer", "head", "cass"],
      ...(scores.get(asked)?.scores ?? []).flatMap((row, layer) =>
        row.map((value, head) => [...whose(), nameOf(subject()), layer, head, value])),
    ]),
  ],
};

/** The query that is chosen. */
function which() {
  const { heads } = model();
  const layer = layerOf(heads.length);
  return { ...here(), layer, head: headOf(heads[layer]), token: cursor.patch ?? "readout" };
}

// --------------------------------------------------------------------------------------------------------------- CASS

function measure(question) {
  asked = question;
  bar.stop();
  trouble.replaceChildren();
  draw();
  if (scores.has(question)) return;
  bar.run(api.job("inside", { ...here(), target: subject() }), (name, said) => {
    if (name === "inside") scores.set(question, said);
    else if (name === "left") asked = "";
    else if (name !== "done") {
      trouble.replaceChildren(problem(name === "cancelled" ? "Cancelled." : said, () => measure(question)));
    }
    draw();
  });
}

/** A bar for each head, a line for each layer's mean. */
function draw() {
  const found = scores.get(asked);
  if (!found) return void chart.replaceChildren(el("p.quiet", bar.ended() ? "Measuring …" : ""));
  const rows = found.scores;
  const width = Math.max(chart.clientWidth, rows.length * 24);
  const [height, left, top, bottom] = [200, 44, 24, 24];
  const all = rows.flat().filter((v) => v !== null);
  const low = Math.min(0, ...all);
  const high = Math.max(0.01, ...all);
  const y = (v) => top + ((high - v) / (high - low)) * (height - top - bottom);
  const group = (width - left) / rows.length;
  const box = { viewBox: `0 0 ${width} ${height}`, width, height };
  const node = svg("svg", { ...box, role: "img", "aria-label": inWords(rows) });
  node.append(svg("text", { x: 4, y: 14, class: "title" }, `similarity to the saliency of ${found.title}`));
  for (const v of [0, high, ...(low < 0 ? [low] : [])]) {
    node.append(svg("line", { x1: left, x2: width, y1: y(v), y2: y(v), class: "rule" }),
      svg("text", { x: left - 6, y: y(v) + 4, "text-anchor": "end" }, number(v)));
  }
  const layer = layerOf(rows.length);
  rows.forEach((row, l) => {
    const wide = Math.min(16, (group - 8) / row.length);
    const start = left + l * group + (group - wide * row.length) / 2;
    row.forEach((v, h) => {
      if (v === null) return;
      const chosen = l === layer && headOf(row.length) === String(h);
      const bar = svg("rect", {
        x: start + h * wide + 0.5, width: Math.max(1, wide - 1),
        y: Math.min(y(v), y(0)), height: Math.max(1, Math.abs(y(v) - y(0))),
        class: chosen ? "headbar chosen" : "headbar", onclick: () => set({ layer: l, head: String(h) }, true),
      });
      bar.append(svg("title", {}, `layer ${l}, head ${h}: ${number(v)}`));
      node.append(bar);
    });
    const known = row.filter((v) => v !== null);
    const mean = known.reduce((a, b) => a + b, 0) / (known.length || 1);
    const stop = start + wide * row.length;
    const line = svg("line", { x1: start - 2, x2: stop + 2, y1: y(mean), y2: y(mean), class: "mean" });
    line.append(svg("title", {}, `layer ${l}, mean: ${number(mean)}`));
    node.append(line,
      svg("text", { x: (start + stop) / 2, y: height - bottom + 16, "text-anchor": "middle" }, String(l)));
  });
  node.append(svg("text", { x: 4, y: height - bottom + 16 }, "layer"));
  chart.replaceChildren(node);
  told.textContent = `A bar for each head, a line for each layer's mean. ${inWords(rows)}`;
}

function inWords(rows) {
  const all = rows.flatMap((row, l) => row.map((v, h) => ({ v: v ?? -Infinity, l, h })));
  const best = all.sort((a, b) => b.v - a.v).slice(0, 3);
  return `Most similar: ${best.map(({ v, l, h }) => `layer ${l} head ${h} (${number(v)})`).join(", ")}.`;
}

// ---------------------------------------------------------------------------------------------- layers, queries, keys

async function layers(now) {
  strip.replaceChildren();
  parts.replaceChildren();
  qkTrouble.replaceChildren();
  for (const one of [pick.layer, pick.head]) one.hidden = !model().heads.length;
  try {
    const { buffer, shape: [count, h, w] } = await api.raw("inside/layers", here());
    if (now !== place) return;
    painted = Array.from({ length: count }, (_, layer) => {
      const values = new Float32Array(buffer, 4 * layer * h * w, h * w);
      const canvas = el("canvas");
      const shown = [canvas, el("span", String(layer))];
      strip.append(button(shown, () => set({ layer }, true), { className: "thumb", ariaLabel: `layer ${layer}` }));
      return () => thumb(canvas, values, [h, w], ends(values));
    });
    painted.forEach((paint) => paint());
    build();
  } catch (error) {
    if (now === place) qkTrouble.replaceChildren(problem(error));
  }
}

function build() {
  const { size, grid } = model();
  const make = (name) => new MapView({ photo: photo(), grid, size, name });
  views = { dots: make("query times key"), queries: make("queries"), keys: make("keys") };
  for (const one of [views.queries, views.keys]) one.node.classList.add("bare", "cells");
  const figure = (view, title, words, more = "") =>
    el("figure", el("figcaption", el("b", title), el("small", words)), view.node, more);
  parts.replaceChildren(
    figure(views.dots, "Query × key", "before the softmax, for the selected patch", views.dots.legend.node),
    figure(views.queries, "Queries", "similar colours: similar queries"),
    figure(views.keys, "Keys", "similar colours: similar keys"));
  mark();
  ask();
}

function mark() {
  const { heads } = model();
  const layer = layerOf(heads.length);
  const number = [...Array(heads[layer]).keys()].map(String);
  pick.layer.show(layer, heads.map((_, i) => [i, i]));
  pick.head.show(headOf(heads[layer]), ["mean", ...number]);
  [...strip.children].forEach((knob, i) => (knob.ariaPressed = String(i === layer)));
}

const ask = api.latest(async () => {
  try {
    const found = await qk(which());
    if (!views) return;
    views.dots.show(found.dots, { shape: found.shape, signed: true, evidence: false, limits: ends(found.dots, true) });
    colours(views.queries.canvas, found.queries, found.shape);
    colours(views.keys.canvas, found.keys, found.shape);
    qkTrouble.replaceChildren();
  } catch (error) {
    qkTrouble.replaceChildren(problem(error));
  }
});
