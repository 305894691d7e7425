// Concepts that were found (latents): a picker by number or name, and the map of one latent's activation.

import * as api from "./api.js";
import { addTarget, toggleTarget } from "./chosen.js";
import { ends, MapView } from "./draw.js";
import { state } from "./state.js";
import { button, choice, el, field, number, problem } from "./ui.js";
import { here, model, photo } from "./world.js";

const list = el("div.words", { role: "group", "aria-label": "Latents that are most active in the image" });
const trouble = el("div");
const sight = el("figure.active");
const wanted = el("input", { type: "number", min: 0, step: 1, id: "latent", "aria-label": "Number of a latent" });
let dictionaries = [];
let name = "";
let view = null;
let pick = null;

export function latentTools() {
  pick = choice("Latents", [""], "", (value) => {
    name = value;
    draw();
  });
  const add = (event) => {
    event.preventDefault();
    trouble.replaceChildren();
    const { count } = dictionaries.find((one) => one.name === name);
    if (wanted.value === "" || !wanted.checkValidity()) {
      return trouble.replaceChildren(problem(`${name} has latents 0 to ${count - 1}.`));
    }
    addTarget(`latent:${name}#${Number(wanted.value)}`);
  };
  wanted.addEventListener("input", () => wanted.value !== "" && wanted.checkValidity() && preview(Number(wanted.value)));
  return el("div.tool", pick, el("p.quiet", "Most active in this image:"), list,
    el("form.row", { onsubmit: add, noValidate: true }, field("Number", wanted), el("button", { type: "submit" }, "Add")), trouble, sight);
}

/** Ask for the latents of the model and their activations in the image. */
export async function showLatents() {
  const where = here();
  try {
    const told = await api.get("latents", where);
    if (where.image !== here().image || where.model !== here().model) return;
    dictionaries = told.filter((one) => !one.why);
    if (!dictionaries.some((one) => one.name === name)) name = dictionaries[0]?.name ?? "";
    pick.show(name, dictionaries.map((one) => [one.name, `${one.name}: ${one.count} of layer ${one.layer}`]));
    draw();
  } catch (error) {
    trouble.replaceChildren(problem(error));
  }
}

function draw() {
  const { active = [], count = 0 } = dictionaries.find((one) => one.name === name) ?? {};
  wanted.max = count - 1;
  list.replaceChildren(...active.map((one) => button(one.label, () => toggleTarget(`latent:${name}#${one.index}`), {
    "data-target": `latent:${name}#${one.index}`, title: `mean activation ${number(one.mean)}`,
    onpointerenter: () => preview(one.index), onfocus: () => preview(one.index),
  })));
  if (!active.length) list.replaceChildren(el("p.quiet", "none"));
  markLatents();
  view?.remove();
  view = null;
  sight.replaceChildren();
  if (active.length) preview(active[0].index);
}

/** The activation of one latent in every patch. */
const preview = api.latest(async (index) => {
  const where = { ...here(), name, index };
  try {
    const { buffer, shape } = await api.raw("latents/map", where);
    if (where.image !== here().image || where.model !== here().model || where.name !== name) return;
    const values = new Float32Array(buffer);
    if (!view) {
      view = new MapView({ photo: photo(), grid: model().grid, size: model().size });
      sight.replaceChildren(view.node, view.legend.node, el("figcaption"));
    }
    view.name = `activation of latent ${index} of ${name}`;
    view.show(values, { signed: false, control: false, shape, limits: ends(values) });
    sight.lastChild.textContent = `Activation of #${index} in each patch`;
    trouble.replaceChildren();
  } catch (error) {
    trouble.replaceChildren(problem(error));
  }
});

/** Show which of them are targets. */
export function markLatents() {
  for (const node of list.querySelectorAll("button")) node.ariaPressed = String(state.targets.includes(node.dataset.target));
}
