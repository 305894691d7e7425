// The best detections: a list, and their boxes on the photo; each is a button that makes it a target.

import * as api from "./api.js";
import { toggleTarget } from "./chosen.js";
import { state } from "./state.js";
import { button, el, percent, problem } from "./ui.js";
import { here, learn, short, world } from "./world.js";

const list = el("div.bars", { role: "group", "aria-label": "Detections" });
let found = [];

export const detectionTools = () => el("div.tool", el("p.quiet", "The best detections; choose one in the list or on the image."), list);

/** Ask for the detections in the image, and draw them. */
export async function showDetections(photo) {
  const where = here();
  found = [];
  list.replaceChildren(el("p.quiet", "…"));
  try {
    const told = await api.get("detections", where);
    if (where.image !== here().image || where.model !== here().model) return;
    found = told;
    for (const { index, label, target } of found) {
      learn(index, label);
      world.meanings.set(JSON.stringify([where, target]), { title: `${short(label)} (query ${target.split(":")[1]})`, places: [] });
    }
    list.replaceChildren(...found.map(row));
    photo.querySelector(".boxes")?.remove();
    photo.append(el("div.boxes", { "aria-hidden": "true" }, found.map(frame)));
    markDetections();
  } catch (error) {
    list.replaceChildren(problem(error));
  }
}

function row(one) {
  const fill = el("span.fill");
  fill.style.width = `${100 * (one.probability ?? 0)}%`;
  const light = (on) => () => document.querySelectorAll(`[data-query="${one.query}"]`).forEach((node) => node.classList.toggle("lit", on));
  return button([fill, el("span.label", short(one.label), el("small", ` query ${one.query}`)), el("span.value", percent(one.probability))],
    () => toggleTarget(one.target), {
      className: "bar", "data-query": one.query, onpointerenter: light(true), onpointerleave: light(false),
      onfocus: light(true), onblur: light(false),
    });
}

function frame(one) {
  const [left, top, right, bottom] = one.box;
  const made = button("", (event) => {
    event.stopPropagation();
    toggleTarget(one.target);
  }, { className: "box", tabIndex: -1, title: `${short(one.label)} ${percent(one.probability)}, query ${one.query}`, "data-query": one.query });
  const sides = { left, top, width: right - left, height: bottom - top };
  for (const [side, share] of Object.entries(sides)) made.style[side] = `${100 * share}%`;
  return made;
}

/** Show which of them are targets. */
export function markDetections() {
  for (const node of document.querySelectorAll("#rail [data-query]")) {
    const one = found.find(({ query }) => String(query) === node.dataset.query);
    node.ariaPressed = String(Boolean(one) && state.targets.includes(one.target));
  }
}
