// What the server has and what it said of the photo; shared by all tabs.

import * as api from "./api.js";
import { state } from "./state.js";
import { show } from "./transport.js";
import { el, number, percent } from "./ui.js";

export const world = {
  info: null, classes: [], why: null, seen: null, concepts: [], answer: null,
  files: new Map(), meanings: new Map(), refused: new Map(), // of uploads: the models that do not take them, and why
};

const labels = new Map(); // model and class: label

export const model = () => world.info.models.find((one) => one.name === state.model) ?? world.info.models[0];
/** A regression: its outputs have values, not probabilities. */
export const regresses = () => model().output === "value";
/** The probability of a class, or the value of an output. */
export const shareOf = ({ probability, value }) => (regresses() ? number(value) : percent(probability));
export const method = (name) => world.info.methods.find((one) => one.name === name);
/** Of the photo itself, the frame that is shown, where it is a clip. */
export const photo = (image = null) =>
  api.view(image ?? state.image, model().name, image === null && model().frames ? state.frame ?? 0 : null);
/** The packaged images or clips that a model takes. */
export const samplesOf = ({ frames }) => (frames ? world.info.clips : world.info.samples);
/** An <img> of an image. */
export function picture(image, alt) {
  const node = el("img", { alt });
  show(node, photo(image));
  return node;
}
/** The model and the image of a question; a model that answered is called by its answer. */
export const here = () => ({ model: world.answer?.model ?? model().name, image: state.image });
export const meaningOf = (target) => world.meanings.get(JSON.stringify([here(), target]));
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
  if (rank && model().form === "detections") return meaningOf(text)?.title ?? text; // a detection, not a class
  if (rank) return world.classes[rank[1] - 1] ? short(world.classes[rank[1] - 1].label) : text;
  if (/^\d+$/.test(text)) return labelled(text) ?? `${regresses() ? "output" : "class"} ${text}`;
  const two = /^(\d+)-(\d+)$/.exec(text);
  if (two) return `${nameOf(two[1])} rather than ${nameOf(two[2])}`;
  const word = /^word:(\d+)$/.exec(text);
  if (word && world.answer) return `“${world.answer.words[word[1]]?.text ?? word[1]}”`;
  if (text === "answer") return "the whole answer";
  const told = meaningOf(text);
  if (told) return told.title;
  const located = /^([^@]+)@([^@]+)$/.exec(text);
  if (located) return `${nameOf(located[1])} ${whereOf(located[2])}`;
  if (/^latent:[^#]+#\d+$/i.test(text)) return `latent ${text.slice(7)}`;
  if (text.startsWith("concept:")) return world.concepts.find((one) => one.id === text.slice(8))?.name ?? text.slice(8);
  return text.startsWith("text:") ? `“${text.slice(5)}”` : text;
}

/** A place for people. */
function whereOf(place) {
  if (place === "predicted") return "where it is predicted";
  if (place.startsWith("mask:")) return "in the drawn region";
  return place.startsWith("query:") ? `(query ${place.slice(6)})` : `at ${place}`;
}

/** The class that a target is, if it is one. */
export function classOf(target) {
  const rank = /^top-?(\d+)$/i.exec(target);
  if (rank) return model().form === "detections" ? null : world.classes[rank[1] - 1]?.index ?? null;
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
  return (await learnPlaces()) || unknown.length > 0;
}

const PLACED = ["dense", "detections"];
const HELD = 400; // meanings that are remembered

/** What targets that are no plain classes mean in this image, and where they are. */
async function learnPlaces() {
  const where = here();
  const placed = PLACED.includes(model().form);
  const unknown = state.targets.filter((one) => (placed || /latent:/i.test(one)) && !meaningOf(one)?.target);
  await Promise.all(unknown.map(async (target) => {
    const told = await api.get("target", { ...where, q: target }).catch(() => null);
    if (!told) return;
    const share = /,? [\d.<]+%/g;
    const title = told.title.replace(/mask:[0-9a-f]+/g, "the drawn region").replace(share, "");
    world.meanings.set(JSON.stringify([where, target]), { ...told, title });
    if (world.meanings.size > HELD) world.meanings.delete(world.meanings.keys().next().value);
  }));
  return unknown.length > 0;
}

export async function predict() {
  const asked = here();
  const told = await api.post("predict", { ...asked, top: 5 });
  if (asked.image !== state.image || asked.model !== here().model) return;
  Object.assign(world, told);
  for (const { index, label } of told.classes) learn(index, label);
}

export async function loadConcepts() {
  world.concepts = await api.get("concepts");
}
