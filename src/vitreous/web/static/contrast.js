// One target rather than another, by two lists and a button.

import * as api from "./api.js";
import { addTarget } from "./chosen.js";
import { state } from "./state.js";
import { button, choice, el, problem } from "./ui.js";
import { classOf, here, model, nameOf, world } from "./world.js";

const trouble = el("div");
let one = "";
let other = "";
let first = null;
let second = null;

export function contrastTools() {
  first = choice("Explain", [""], "", (value) => (one = value));
  second = choice("rather than", [""], "", (value) => (other = value));
  return el("details.tool.contrast", el("summary", "Contrast two targets"), first, second,
    el("div.row", button("Add the contrast", add)), trouble);
}

const single = (target) => !/^(\d+|top-?\d+)-\d+$/.test(target) && !/\S\s*-\s*\S+:/.test(target) && !/@[^-]*-.*@/.test(target);

/** What can be contrasted: the chosen targets, the best classes, the words of an answer. */
export function showContrast() {
  const words = world.answer?.words.map(({ target }) => target) ?? [];
  const classes = world.classes.map(({ index }) => String(index));
  const classed = (target) => String(classOf(target) ?? target);
  const listed = [...new Set([...state.targets.filter(single).map(classed), ...classes, ...words])];
  if (!listed.includes(one)) one = listed[0] ?? "";
  if (!listed.includes(other) || other === one) other = listed.find((target) => target !== one) ?? "";
  const shown = listed.map((target) => [target, nameOf(target)]);
  first.show(one, shown);
  second.show(other, shown);
  trouble.replaceChildren();
}

async function add() {
  trouble.replaceChildren();
  if (one === other) return trouble.replaceChildren(problem("Choose two different targets."));
  const text = `${one}-${other}`;
  const { model: asked, image } = here();
  try {
    await api.get("target", { model: asked, image, q: text });
    if (image === state.image && asked === here().model) addTarget(text);
  } catch (error) {
    const turned = /^(text|concept|neuron|latent):/.test(one) && !/^(text|concept|neuron|latent|word|token):/.test(other);
    trouble.replaceChildren(problem(turned ? `A class comes first: explain ${nameOf(other)} rather than ${nameOf(one)}.` : error));
  }
}

/** Whether the model can contrast anything. */
export const contrasts = () => !model().kinds.contrasts;
