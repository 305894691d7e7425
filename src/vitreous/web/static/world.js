// What the server has and what it said of the photo; shared by all tabs.

import * as api from "./api.js";
import { state } from "./state.js";
import { number, percent } from "./ui.js";

export const world = { info: null, classes: [], why: null, seen: null, concepts: [], files: new Map() };

const labels = new Map(); // model and class: label

export const model = () => world.info.models.find((one) => one.name === state.model) ?? world.info.models[0];
/** A regression: its outputs have values, not probabilities. */
export const regresses = () => model().output === "value";
/** The probability of a class, or the value of an output. */
export const shareOf = ({ probability, value }) => (regresses() ? number(value) : percent(probability));
export const method = (name) => world.info.methods.find((one) => one.name === name);
export const photo = (image = state.image) => api.view(image, model().name);
export const here = () => ({ model: model().name, image: state.image });
export const short = (label) => label.split(",")[0];

/** A method's line colour, one that is also seen on a dark page. */
export const line = (name) => `var(--c${(method(name)?.colour ?? "#8a8f98").slice(1).toLowerCase()})`;

export function learn(index, label) {
  labels.set(`${model().name} ${index}`, short(label));
}

const labelled = (index) => labels.get(`${model().name} ${index}`);

/** A target for people. */
export function nameOf(target) {
  const text = String(target);
  const rank = /^top-?(\d+)$/i.exec(text);
  if (rank) return world.classes[rank[1] - 1] ? short(world.classes[rank[1] - 1].label) : text;
  if (/^\d+$/.test(text)) return labelled(text) ?? `${regresses() ? "output" : "class"} ${text}`;
  const two = /^(\d+)-(\d+)$/.exec(text);
  if (two) return `${nameOf(two[1])} rather than ${nameOf(two[2])}`;
  if (text.startsWith("concept:")) return world.concepts.find((one) => one.id === text.slice(8))?.name ?? text.slice(8);
  return text.startsWith("text:") ? `“${text.slice(5)}”` : text;
}

/** The class that a target is, if it is one. */
export function classOf(target) {
  const rank = /^top-?(\d+)$/i.exec(target);
  if (rank) return world.classes[rank[1] - 1]?.index ?? null;
  return /^\d+$/.test(target) ? Number(target) : null;
}

/** The labels of the classes that the chosen targets name by number. */
export async function learnTargets() {
  const unknown = state.targets.flatMap((one) => (/^\d+(-\d+)?$/.test(one) ? one.split("-") : []))
    .filter((index) => !labelled(index));
  await Promise.all(unknown.map(async (index) => {
    const found = await api.get("labels", { model: model().name, q: index, limit: 5 }).catch(() => []);
    for (const one of found) if (String(one.index) === index) learn(one.index, one.label);
  }));
  return unknown.length > 0;
}

export async function predict() {
  const asked = here();
  const told = await api.post("predict", { ...asked, top: 5 });
  if (asked.image !== state.image || asked.model !== model().name) return;
  Object.assign(world, told);
  for (const { index, label } of told.classes) learn(index, label);
}

export async function loadConcepts() {
  world.concepts = await api.get("concepts");
}
