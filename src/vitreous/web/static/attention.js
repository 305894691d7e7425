// Layer × head × patch: what each reads and who reads it, live.

import * as api from "./api.js";
import { cursor, ends, MapView, onCursor, point, thumb } from "./draw.js";
import { asks } from "./help.js";
import { set, state } from "./state.js";
import { code, drawn, maps, table as csvOf, whose } from "./take.js";
import { arrow, between, button, choice, el, link, number, percent, placeOf, problem, segments, slider } from "./ui.js";
import { here, model, photo } from "./world.js";

const ROLLOUT = ["discard", "heads", "residual"];
const lead = el("p.lead");
const body = el("div.attention");
const heads = el("table.heads");
const extras = el("p.extras");
let about = null; // what /api/attention said
let loaded = "";
let shift = false;
let view = null;
let rolled = null;
let shown = {};
let drawThumbs = () => {};
let ramp = state.ramp;

const row = api.remembered(async (query) => {
  const { buffer, shape, extra } = await api.raw("attention/row", query);
  const count = shape[0] * shape[1];
  return { values: new Float32Array(buffer, 0, count), extra: new Float32Array(buffer, 4 * count, extra), shape };
}, 2000);

/** The chosen layer, counted from 0. */
export const layerOf = (layers) => between(0, state.layer < 0 ? layers + state.layer : state.layer, layers - 1);
export const headOf = (count) => (state.head === "mean" || Number(state.head) >= count ? "mean" : state.head);
const active = () => state.tab === "attention" && about !== null;
const direction = () => (shift === (state.direction === "reads") ? "read_by" : "reads");

export const attention = {
  begin(panel) {
    const ways = [["reads", "Attends to"], ["read_by", "Attended by"]];
    const way = segments("Direction", ways, state.direction, (key) => set({ direction: key }));
    way.title = "Hold Shift for the other direction";
    shown = { direction: way };
    panel.append(el("div.head", lead, way, asks("attention")), body);
    onCursor(() => active() && ask());
    const onShift = (down) => (event) => {
      if (event.key !== "Shift" || !active()) return;
      shift = down;
      ask();
    };
    addEventListener("keydown", onShift(true));
    addEventListener("keyup", onShift(false));
    addEventListener("blur", () => (shift = false));
  },

  update(what) {
    const key = JSON.stringify(here());
    if (key !== loaded) return void load(key);
    if (!active()) return;
    shown.direction.show(state.direction);
    if (["tab", "layer", "head", "direction", "patch"].some((name) => what.has(name))) {
      mark();
      ask();
    }
    if (["tab", ...ROLLOUT].some((name) => what.has(name))) {
      ROLLOUT.forEach((name) => shown[name].show(name === "discard" ? Math.round(100 * state[name]) : state[name]));
      roll();
    }
    if (ramp !== state.ramp) drawThumbs((ramp = state.ramp));
  },

  exports: [
    drawn,
    maps(() => about && {
      path: "attention/maps.npz",
      query: { ...which(), discard: state.discard, heads: state.heads, residual: state.residual },
    }),
    code(() => about && { view: "attention",
      body: { ...which(), token: String(which().token), discard: state.discard, heads: state.heads, residual: state.residual } }),
    csvOf("Where the read-out of each layer looks", () => [
      ["model", "image", "layer", "cls", "registers", "patches"],
      ...(about?.share ?? []).map(({ cls, registers, patches }, i) => [...whose(), i, cls, registers, patches]),
    ]),
  ],
};

/** The map that is chosen. */
function which() {
  const layer = layerOf(about.layers);
  const token = cursor.patch ?? "readout";
  return { ...here(), layer, head: headOf(about.heads[layer]), token, direction: direction() };
}

async function load(key) {
  loaded = key;
  about = null;
  lead.textContent = "Loading the attention of every head …";
  try {
    const [told, small] = await Promise.all([api.post("attention", here()), api.raw("attention/thumbs", here())]);
    if (key !== loaded) return;
    about = told;
    build(small);
    mark();
    ask();
    roll();
  } catch (error) {
    if (key !== loaded) return;
    loaded = "";
    lead.textContent = "";
    body.replaceChildren(problem(error));
  }
}

function build(small) {
  view?.remove();
  rolled?.remove();
  const { size } = model();
  const grid = about.grid;
  view = new MapView({ photo: photo(), grid, size, name: "attention" });
  const release = link("Back to the read-out", () => point(null, true));
  const main = el("div.panel.main", view.node, view.legend.node, extras, release);

  rolled = new MapView({ photo: photo(), grid, size, name: "rollout" });
  const share = (key) => (value) => set({ [key]: value }, true);
  const discard = { value: Math.round(100 * state.discard), max: 99 };
  shown.discard = slider("Discard", discard, (value) => share("discard")(value / 100));
  shown.heads = choice("Heads", ["mean", "min", "max"], state.heads, share("heads"));
  shown.residual = slider("Residual", { value: state.residual, max: 1, step: 0.05, unit: "" }, share("residual"));
  const roll = el("div.panel.rollout", el("h3", "Rollout", asks("rollout")), el("p.quiet", "Attention multiplied over all layers."),
    el("div.rolled", rolled.node, rolled.legend.node), el("div.knobs", shown.discard, shown.residual, shown.heads));

  table(small);
  body.replaceChildren(main, el("div.panels", el("div.panel.table", el("div.scroll", heads)), roll));
}

/** The L × H table: a thumbnail for each head, the layer's mean, and where the read-out looks. */
function table({ buffer, shape: [count, h, w] }) {
  const most = new Float32Array(buffer, 0, count);
  const bytes = new Uint8Array(buffer, 4 * count);
  const wide = Math.max(...about.heads);
  const painters = [];
  let first = 0;
  const rows = about.heads.map((many, layer) => {
    const start = first;
    first += many;
    const mean = new Float32Array(h * w);
    const parts = Array.from({ length: wide }, (_, head) => {
      if (head >= many) return el("td");
      const values = Float32Array.from(bytes.subarray((start + head) * h * w, (start + head + 1) * h * w));
      values.forEach((v, i) => (mean[i] += (v / 255) * most[start + head] / many));
      const [cell, canvas] = small(layer, String(head));
      painters.push(() => thumb(canvas, values, [h, w], [0, 255]));
      return cell;
    });
    const [cell, canvas] = small(layer, "mean");
    painters.push(() => thumb(canvas, mean, [h, w], [0, Math.max(...mean)]));
    return el("tr", el("th", { scope: "row" }, String(layer)), ...parts, cell, stacked(about.share[layer]));
  });
  const registers = about.share.some((one) => one.registers > 0);
  const key = [["cls", "CLS"], registers && ["registers", "registers"], ["patches", "patches"]].filter(Boolean)
    .map(([kind, text]) => el("span", { className: kind }, text));
  const names = [...Array(wide).keys()].map((head) => el("th", { scope: "col" }, String(head)));
  heads.replaceChildren(
    el("thead",
      el("tr.over", el("td"), el("th", { colSpan: wide }, "head"), el("td"), el("th", "read-out attends to")),
      el("tr", el("th", "layer"), ...names, el("th", "mean"), el("td.key", ...key))),
    el("tbody", ...rows));
  heads.classList.toggle("many", wide > 6);
  heads.onkeydown = walk;
  drawThumbs = () => painters.forEach((paint) => paint());
  drawThumbs();
}

function small(layer, head) {
  const canvas = el("canvas");
  const ariaLabel = `layer ${layer}, ${head === "mean" ? "mean of the heads" : `head ${head}`}`;
  const knob = button(canvas, () => set({ layer, head }, true), { className: "thumb", tabIndex: -1, ariaLabel });
  Object.assign(knob.dataset, { layer, head });
  return [el("td", knob), canvas];
}

function stacked({ cls, registers, patches }) {
  const node = el("div.stack", { role: "img" });
  const others = registers > 0 ? `registers ${percent(registers)}, ` : "";
  const said = `CLS ${percent(cls)}, ${others}patches ${percent(patches)}`;
  node.ariaLabel = said;
  node.title = said;
  for (const [kind, value] of Object.entries({ cls, registers, patches })) {
    const part = el("span", { className: kind });
    part.style.width = `${100 * value}%`;
    node.append(part);
  }
  return el("td", node);
}

/** Arrow keys go from head to head. */
function walk(event) {
  const move = arrow(event);
  if (!move) return;
  const layer = layerOf(about.layers);
  const order = (many) => [...Array(many).keys()].map(String).concat("mean");
  const next = between(0, layer + move[0], about.layers - 1);
  const now = order(about.heads[next]);
  const at = now.indexOf(headOf(about.heads[next])) + move[1];
  set({ layer: next, head: now[between(0, at, now.length - 1)] }, true);
  heads.querySelector(".thumb[aria-pressed=true]")?.focus();
}

function mark() {
  const layer = layerOf(about.layers);
  const head = headOf(about.heads[layer]);
  for (const knob of heads.querySelectorAll(".thumb")) {
    const chosen = Number(knob.dataset.layer) === layer && knob.dataset.head === head;
    knob.ariaPressed = String(chosen);
    knob.tabIndex = chosen ? 0 : -1;
  }
}

const ask = api.latest(async () => {
  const where = which();
  const { layer, head, direction: way } = where;
  const patch = cursor.patch;
  const readout = `the read-out (what the classifier reads: ${about.readout})`;
  const token = patch === null ? readout : `the patch in ${placeOf(patch, about.grid)}`;
  const question = way === "reads" ? `what ${token} attends to` : `which tokens attend to ${token}`;
  const name = `Layer ${layer}, ${head === "mean" ? "mean of the heads" : `head ${head}`}: `;
  try {
    const { values, extra, shape } = await row(where);
    lead.replaceChildren(el("b", name), `${question}.`,
      patch === null ? " Point at a patch to see its attention; hold Shift for the other direction." : "");
    view.name = `${name}${question}`;
    view.show(values, { shape, signed: false, limits: ends(values) });
    const names = [...about.prefix, ...about.suffix];
    const listed = names.map((name, i) => `${name}: ${number(extra[i])}`);
    const sum = values.reduce((a, b) => a + b, 0);
    extras.textContent = [`all patches: ${number(sum)}`, ...listed].join(" · ");
  } catch (error) {
    lead.replaceChildren(problem(error));
  }
});

const roll = api.latest(async () => {
  const asked = { ...here(), discard: state.discard, heads: state.heads, residual: state.residual };
  try {
    const { buffer, shape } = await api.raw("rollout", {}, asked);
    const values = new Float32Array(buffer);
    rolled.show(values, { shape, signed: false, limits: ends(values) });
  } catch (error) {
    rolled.node.after(problem(error));
  }
});
