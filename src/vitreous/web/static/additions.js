// The models of the server: the picker of the page, and adding those that the server allows.

import * as api from "./api.js";
import { switchTo } from "./links.js";
import { set } from "./state.js";
import { announce, byId, el, toast } from "./ui.js";
import { model, world } from "./world.js";

const NEW = { patch: null, layer: -1, head: "mean" }; // what depends on the model
const listeners = [];
const loading = new Map(); // name: a promise, true once it is there

/** Call `heard()` when a model was added. */
export const onModels = (heard) => listeners.push(heard);

export function begin() {
  byId("model").addEventListener("change", ({ target }) => {
    if (world.info.models.some((one) => one.name === target.value)) change(target.value);
    else take(target.value);
  });
  show();
}

function show() {
  const { models, allowed } = world.info;
  const options = (names) => names.map((name) => el("option", { value: name }, name));
  byId("model").replaceChildren(...options(models.map(({ name }) => name)),
    ...(allowed.length ? [el("optgroup", { label: "Can be added" }, ...options(allowed))] : []));
  byId("model").value = model().name;
  byId("model").disabled = models.length + allowed.length === 1;
}

/** Show another model, with an image that it takes. */
const change = async (name) => set({ model: name, ...NEW, ...await switchTo(name) });

async function take(name) {
  toast(`Loading ${name} …`);
  try {
    await add(name);
    await change(name);
  } catch (error) {
    toast(error.message);
  }
  byId("model").value = model().name;
}

/** Let the server load a model that it allows; `told(words)` hears how far it is. */
export function add(name, told = () => {}) {
  if (!loading.has(name)) loading.set(name, load(name, told).finally(() => loading.delete(name)));
  return loading.get(name);
}

async function load(name, told) {
  told(`Loading ${name} …`);
  await new Promise((resolve, reject) => {
    api.job("models", { name })((event, { detail, status, place }) => {
      if (event === "queued") told(`Loading ${name}: ${place} ahead in the queue …`);
      else if (event === "done") resolve();
      else if (event === "failed") reject(new api.Problem(status, detail));
      else if (event === "cancelled") reject(new api.Problem(0, `${name} was not loaded.`));
    });
  });
  world.info = { ...world.info, ...await news() };
  show();
  announce(`${name} was added`);
  for (const heard of listeners) heard();
}

async function news() {
  const { models, allowed } = await api.get("info");
  return { models, allowed };
}
