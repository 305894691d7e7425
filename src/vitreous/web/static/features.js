// Patch features as colours, layer by layer, and which patches are similar to the one pointed at.

import * as api from "./api.js";
import { layerOf } from "./attention.js";
import { colours, cursor, MapView, onCursor } from "./draw.js";
import { asks } from "./help.js";
import { set, state } from "./state.js";
import { code, drawn, maps, table, whose } from "./take.js";
import { button, el, percent, placeOf, problem, segments, slider } from "./ui.js";
import { here, model, photo, world } from "./world.js";

const BASES = [["image", "This image"], ["samples", "All sample photos"]];
const told = el("p.extras");
const trouble = el("div");
const parts = el("div.triple");
const others = el("div.layers.photos", { role: "group", "aria-label": "Sample photos in the same colours" });
const lead = el("p.lead", el("b", "Patches with similar features have similar colours. "),
  "The first three principal components of the patch tokens after a layer are red, green and blue. " +
  "Point at a patch to see which others are similar to it.");
let place = "";
let pick = {};
let views = null;

const coloured = api.remembered(async (query) => {
  const { buffer, shape } = await api.raw("features", query);
  return { shape, shares: new Float32Array(buffer, 0, 3), bytes: new Uint8Array(buffer, 12) };
});
const similar = api.remembered(async (query) => {
  const { buffer, shape } = await api.raw("features/similarity", query);
  return { shape, values: new Float32Array(buffer) };
}, 1000);

const active = () => state.tab === "features" && views !== null;
const layer = () => layerOf(model().layers);
const basis = () => (BASES.some(([key]) => key === state.basis) ? state.basis : "image");
const middle = ([h, w]) => Math.floor(h / 2) * w + Math.floor(w / 2);
const patch = () => cursor.patch ?? middle(model().grid);
const asked = () => ({ ...here(), layer: layer(), among: basis() });

export const features = {
  begin(panel) {
    pick = { layer: el("span"), basis: segments("Basis", BASES, basis(), (key) => set({ basis: key })) };
    panel.append(el("div.head", lead, asks("features")),
      el("div.head", pick.layer, el("div.field", el("span", "Basis of"), pick.basis)), told, trouble, others, parts);
    onCursor(() => active() && compare());
  },

  update(what) {
    const now = JSON.stringify(here());
    if (now !== place) {
      place = now;
      build();
    }
    if (!["layer", "basis", "tab", "patch", "model", "image"].some((name) => what.has(name))) return;
    pick.layer.show(layer());
    pick.basis.show(basis());
    draw();
    compare();
  },

  exports: [
    drawn,
    maps(() => views && { path: "features/maps.npz", query: { ...asked(), patch: patch() } }),
    code(() => views && { view: "features", body: { ...asked(), patch: patch() } }),
    table("The share of the variance along each component", () => [
      ["model", "image", "layer", "basis", "component", "share"],
      ...(views?.shares ?? []).map((share, i) => [...whose(), layer(), basis(), i, share]),
    ]),
  ],
};

function build() {
  for (const view of [views?.colours, views?.similar]) view?.remove();
  const { size, grid, layers } = model();
  const knob = slider("Layer", { value: layer(), max: Math.max(0, layers - 1), unit: "" },
    (value) => set({ layer: value }, true));
  pick.layer.replaceWith(knob);
  pick.layer = knob;
  const make = (name) => new MapView({ photo: photo(), grid, size, name });
  views = { colours: make("components as colours"), similar: make("similarity"), shares: [] };
  views.colours.node.classList.add("bare", "cells");
  const figure = (view, title, words, more = "") =>
    el("figure", el("figcaption", el("b", title), el("small", words)), view.node, more);
  parts.replaceChildren(
    figure(views.colours, "Components", "red, green and blue: the first, second and third"),
    figure(views.similar, "Similarity", "cosine with the selected patch", views.similar.legend.node));
}

const draw = api.latest(async () => {
  const query = asked();
  try {
    const found = await coloured(query);
    if (JSON.stringify(here()) !== place) return;
    views.shares = [...found.shares];
    colours(views.colours.canvas, found.bytes, found.shape);
    const share = views.shares.map(percent).join(" · ");
    const where = basis() === "image" ? "this image" : "the sample photos, the same for every image";
    told.textContent = `Layer ${query.layer}: ${share} of the variance, in a basis of ${where}.`;
    trouble.replaceChildren();
    await neighbours(query);
  } catch (error) {
    parts.hidden = true;
    told.textContent = "";
    others.replaceChildren();
    trouble.replaceChildren(problem(error));
    return;
  }
  parts.hidden = false;
});

/** The sample photos in the same basis: equal colours are equal components. */
async function neighbours(query) {
  if (query.among !== "samples") return void others.replaceChildren();
  const all = await Promise.all(world.info.samples.map(async ({ id, name }) => {
    const found = await coloured({ ...query, image: id });
    const canvas = el("canvas");
    colours(canvas, found.bytes, found.shape);
    const more = { className: "thumb", ariaLabel: `show ${name}`, ariaPressed: String(id === state.image) };
    return button([canvas, el("span", name)], () => set({ image: id, patch: null }), more);
  }));
  others.replaceChildren(...all);
}

const compare = api.latest(async () => {
  const query = { ...here(), layer: layer(), patch: patch() };
  try {
    const { values, shape } = await similar(query);
    if (!views || JSON.stringify(here()) !== place) return;
    views.similar.name = `similarity to the patch in ${placeOf(query.patch, model().grid)}`;
    views.similar.show(values, { shape, signed: true, evidence: false, limits: [-1, 1] });
  } catch {
    return; // said by the colours
  }
});
