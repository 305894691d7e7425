// The left rail: photo, samples, the model's best classes, search, chosen targets.

import * as api from "./api.js";
import { addTarget, toggleTarget } from "./chosen.js";
import { MapView } from "./draw.js";
import { asks } from "./help.js";
import { correct, FIRST, set, state } from "./state.js";
import { bound, markTargets, showTools, targetTools } from "./targets.js";
import { show } from "./transport.js";
import { button, byId, droppable, el, link, problem } from "./ui.js";
import {
  classOf, here, learn, model, nameOf, photo, picture, regresses, samplesOf, shareOf, short, world,
} from "./world.js";

const well = el("div.well");
const samples = el("div.samples", { role: "group", "aria-label": "Sample images" });
const invite = el("b", "Choose an image");
const said = el("div");
const best = el("h2", "Top classes");
const bars = el("div.bars");
const chips = el("ul.chips", { "aria-label": "Targets" });
const more = el("div.more");
let view = null;
let offered = null; // the samples that are shown
let drawn = null; // the classes that are shown

export function begin() {
  const pick = el("input", { type: "file", accept: "image/*,.npy,.npz", className: "unseen", id: "file" });
  pick.addEventListener("change", () => {
    if (pick.files.length) upload(pick.files[0]);
    pick.value = "";
  });
  const drop = el("label.pick", { htmlFor: "file" }, invite, el("span", "or drop or paste one"));
  byId("rail").append(
    el("div.sheet-head", el("h2", "Image and targets"), button("Done", () => openSheet(false))),
    el("div.sight", well, samples), el("div.sources", pick, drop), said,
    best, bars,
    el("h2", "Targets", asks("targets")), finder(), chips, more, ...targetTools(),
  );
  droppable(document.body, ([first]) => upload(first));
  document.addEventListener("paste", (event) => {
    const found = [...event.clipboardData.files].find((one) => one.type.startsWith("image/"));
    if (found) upload(found);
  });
  byId("sheet").addEventListener("click", () => openSheet(byId("sheet").ariaExpanded !== "true"));
  document.addEventListener("keydown", (event) => event.key === "Escape" && openSheet(false));
}

function openSheet(open) {
  if (byId("sheet").ariaExpanded === String(open)) return;
  byId("sheet").ariaExpanded = String(open);
  byId("rail").classList.toggle("open", open);
  (open ? byId("rail").querySelector(".sheet-head button") : byId("sheet")).focus();
}

export async function upload(given) {
  said.replaceChildren(el("p.quiet", `Uploading ${given.name || "the image"} …`));
  try {
    const { upload_bytes: most } = world.info.limits;
    if (given.size > most) {
      throw new api.Problem(413, `${given.name}: larger than ${most / 1e6} MB; reduce its size first`);
    }
    const form = new FormData();
    form.append("file", given, given.name || "pasted.png");
    const told = await api.post("images", form);
    world.refused.set(told.id, told.refused);
    if (told.refused[model().name]) throw new api.Problem(415, told.refused[model().name]);
    world.files.set(told.id, told.name);
    said.replaceChildren(...(told.note && !model().frames ? [el("p.quiet", told.note)] : []));
    set({ image: told.id, patch: null });
  } catch (error) {
    said.replaceChildren(problem(error.message));
  }
}

/** Draw the photo and what belongs to it. */
export function showPhoto() {
  view?.remove();
  const { grid, size } = model();
  document.documentElement.style.setProperty("--ratio", size[1] / size[0]);
  view = new MapView({ photo: photo(), grid, size, name: `image ${nameOfPhoto()}` });
  well.replaceChildren(view.node);
  showTools(view.node);
  byId("file").accept = model().frames ? world.info.endings.join() : "image/*,.npy,.npz";
  invite.textContent = model().frames ? "Choose a clip" : "Choose an image";
  if (offered !== samplesOf(model())) samples.replaceChildren();
  offered = samplesOf(model());
  samples.ariaLabel = model().frames ? "Sample clips" : "Sample images";
  offered.forEach(({ id, name }, i) => {
    const made = () => button(el("img", { alt: name }), () => set({ image: id, patch: null }), { title: name });
    const knob = samples.children[i] ?? samples.appendChild(made());
    show(knob.firstChild, photo(id));
    knob.ariaPressed = String(id === state.image);
  });
}

export const nameOfPhoto = () =>
  samplesOf(model()).find((one) => one.id === state.image)?.name ?? world.files.get(state.image) ?? "image";

/** The five best classes, each a button that makes it a target. */
export function showClasses(trouble = null) {
  best.hidden = bars.hidden = model().form === "words" && !trouble;
  if (trouble) bars.replaceChildren(problem(trouble));
  else if (!world.classes.length) bars.replaceChildren(el("p.quiet", world.why ?? "…"));
  else if (drawn !== world.classes) bars.replaceChildren(...world.classes.map(barOf));
  drawn = trouble ? null : world.classes;
  const chosen = state.targets.map(classOf);
  world.classes.forEach(({ index }, i) => (bars.children[i].ariaPressed = String(chosen.includes(index))));
  showTargets();
}

function barOf(one) {
  const fill = el("span.fill");
  fill.style.width = `${100 * (one.probability ?? 0)}%`;
  const title = `${one.label} (${regresses() ? "output" : "class"} ${one.index})`;
  return button([fill, el("span.label", short(one.label)), el("span.value", shareOf(one))],
    () => toggleClass(one.index), { className: "bar", title });
}

const toggleClass = (index) => toggleTarget(String(index), (one) => classOf(one) === index);

/** Of another image or model, only the targets that it has. */
export function fitTargets(what) {
  if (what.has("targets")) return;
  const { classes, classifies, form, kinds } = model();
  const there = (target) => {
    const [, rank, one, other] = /^(top-?)?(\d+)(?:-(\d+))?$/i.exec(target) ?? [];
    if (form === "words") return /^(word|token):|^answer$/.test(target);
    if (one !== undefined) return !classifies || (rank ? Number(one) <= classes : Math.max(one, other ?? 0) < classes);
    if (!what.has("model")) return !bound(target);
    return !bound(target) && (!/^latent:/i.test(target) || !kinds.latents) && target !== "answer";
  };
  const left = state.targets.filter(there);
  if (left.length < state.targets.length) correct({ targets: left.length ? left : FIRST.targets });
}

function showTargets() {
  chips.replaceChildren(...state.targets.map((target) =>
    el("li.chip", el("span", { title: target }, nameOf(target)),
      state.targets.length > 1 && button("×", () => dropTarget(target), { ariaLabel: `Remove ${nameOf(target)}` }))));
  const numbers = [...new Set(state.targets.map(classOf).filter((one) => one !== null))].slice(0, 2);
  const contrast = numbers.join("-");
  const offered = numbers.length === 2 && !state.targets.includes(contrast);
  more.replaceChildren(...(offered ? [link(`+ ${nameOf(contrast)}`, () => addTarget(contrast))] : []));
  markTargets();
  byId("sheet").replaceChildren(picture(state.image, ""),
    el("span", el("b", nameOfPhoto()), ` ${state.targets.map(nameOf).join(", ")}`), el("span.quiet", "Change"));
}

function dropTarget(target) {
  set({ targets: state.targets.filter((one) => one !== target) });
  byId("find").focus();
}

// ------------------------------------------------------------------------------------------------------------- search

function finder() {
  const list = el("ul", { role: "listbox", id: "found", hidden: true, "aria-label": "Classes" });
  const input = el("input", {
    id: "find", type: "text", role: "combobox", autocomplete: "off", spellcheck: false,
    placeholder: "Search, or enter a - b",
    "aria-expanded": "false", "aria-controls": "found", "aria-autocomplete": "list", "aria-label": "Add a target",
  });
  const trouble = el("div");
  let options = [];
  let active = -1;

  const mark = (next) => {
    active = next;
    [...list.children].forEach((node, i) => (node.ariaSelected = String(i === active)));
    list.children[active]?.scrollIntoView({ block: "nearest" });
    input.setAttribute("aria-activedescendant", active < 0 ? "" : `found-${active}`);
  };
  const open = (shown) => {
    list.hidden = !shown;
    input.ariaExpanded = String(shown);
  };
  const take = (target) => {
    input.value = "";
    refuse();
    open(false);
    addTarget(target);
  };
  const refuse = (error = null) => {
    trouble.replaceChildren(...(error ? [problem(error)] : []));
    input.ariaInvalid = String(error !== null);
  };
  /** Words that nobody offered: the server says what they mean, or that they mean nothing. */
  const enter = async (words) => {
    open(false);
    try {
      const target = await meant(words);
      if (words === input.value.trim()) take(target);
    } catch (error) {
      if (words === input.value.trim()) refuse(error);
    }
  };
  const pick = ({ target, sure }) => (sure ? take(target) : ((input.value = target), enter(target)));
  const search = api.latest(async (words) => {
    options = await offers(words);
    if (words !== input.value.trim()) return;
    list.replaceChildren(...options.map((one, i) =>
      el("li", { role: "option", id: `found-${i}`, onpointerdown: (event) => (event.preventDefault(), pick(one)) },
        el("span", one.text), el("span.quiet", one.kind))));
    mark(-1);
    open(options.length > 0);
  });
  input.addEventListener("input", () => {
    refuse();
    if (input.value.trim()) search(input.value.trim());
    else open(false);
  });
  input.addEventListener("blur", () => open(false));
  input.addEventListener("keydown", (event) => {
    const steps = { ArrowDown: 1, ArrowUp: -1 };
    if (event.key in steps && options.length) {
      event.preventDefault();
      open(true);
      mark((active + steps[event.key] + options.length) % options.length);
    } else if (event.key === "Enter" && input.value.trim()) {
      if (active >= 0 && !list.hidden) pick(options[active]);
      else enter(input.value.trim());
    } else if (event.key === "Escape") {
      event.stopPropagation();
      open(false);
    }
  });
  return el("div", el("div.finder", input, list), trouble);
}

/** A target as it is kept: classes by their numbers, all others as they were entered. */
async function meant(words) {
  const { target } = await api.get("target", { ...here(), q: words });
  return /^\d+(-\d+)?$/.test(target) && !/^top-?\d+$/i.test(words) ? target : words;
}

/** What words can mean: labels, concepts, a text, a contrast. */
async function offers(words) {
  const { name, texts, classifies } = model();
  const found = classifies ? await api.get("labels", { model: name, q: words, limit: 12 }) : [];
  for (const { index, label } of found) learn(index, label);
  const low = words.toLowerCase();
  const concepts = world.concepts.filter((one) => one.model === name && one.name.toLowerCase().includes(low));
  const offered = [
    ...concepts.map((one) => ({ target: `concept:${one.id}`, text: one.name, kind: "concept", sure: true })),
    ...found.map(({ index, label }) => ({ target: String(index), text: label, kind: String(index), sure: true })),
  ];
  if (texts && !low.includes(":")) offered.push({ target: `text:${words}`, text: `“${words}”`, kind: "text" });
  if (/\S\s*-\s*\S/.test(words)) {
    offered.push({ target: words, text: words.replace(/\s*-\s*/, " rather than "), kind: "contrast" });
  }
  return offered;
}
