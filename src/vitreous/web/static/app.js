// The page: who is told when something changes.

import * as api from "./api.js";
import { attention } from "./attention.js";
import { concepts } from "./concepts.js";
import { cursor, onCursor, point, redraw } from "./draw.js";
import { explain } from "./explain.js";
import { faithfulness } from "./faithfulness.js";
import { features } from "./features.js";
import { inside } from "./inside.js";
import { mend } from "./links.js";
import * as rail from "./rail.js";
import * as addresses from "./state.js";
import { onChange, set, state } from "./state.js";
import * as strip from "./strip.js";
import { byId, el, leave, problem } from "./ui.js";
import { learnTargets, loadConcepts, model, predict, world } from "./world.js";

const TABS = { explain, attention, concepts, faithfulness, inside, features };
const PHOTO = ["model", "image"];
const DRAWN = ["opacity", "limits", "threshold", "cells", "bare", "same", "ramp"];

function themes() {
  const knob = byId("theme");
  const root = document.documentElement;
  const wish = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : wish.matches);
  const show = () => {
    knob.textContent = dark() ? "Light" : "Dark";
    knob.ariaLabel = `Switch to the ${dark() ? "light" : "dark"} theme`;
  };
  const kept = localStorage.getItem("theme");
  if (kept) root.dataset.theme = kept;
  knob.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    localStorage.setItem("theme", root.dataset.theme);
    show();
  });
  wish.addEventListener("change", show);
  show();
}

function tabs() {
  const all = [...byId("tabs").children];
  all.forEach((tab, i) => {
    const name = tab.getAttribute("aria-controls");
    tab.addEventListener("click", () => set({ tab: name }));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const next = all[(i + step + all.length) % all.length];
      next.focus();
      next.click();
    });
  });
}

function showTab() {
  if (!(state.tab in TABS)) state.tab = "explain";
  for (const name of Object.keys(TABS)) {
    const chosen = name === state.tab;
    byId(name).hidden = !chosen;
    const tab = byId(`tab-${name}`);
    tab.ariaSelected = String(chosen);
    tab.tabIndex = chosen ? 0 : -1;
    if (chosen) byId("tabs").scrollLeft = tab.offsetLeft - byId("tabs").offsetLeft - 64;
  }
  document.body.dataset.tab = state.tab;
  strip.offer(TABS[state.tab].exports);
  document.title = `vitreous · ${byId(`tab-${state.tab}`).textContent}`;
}

/** A photo and a model that are there. */
function settle() {
  const { models, samples } = world.info;
  addresses.settle({ model: models[0].name, image: samples[0].id }, models[0].first);
  if (!state.model) state.model = models[0].name;
  if (!state.image) state.image = samples[0].id;
  byId("model").value = state.model;
}

async function newPhoto() {
  Object.assign(world, { classes: [], why: null, seen: null });
  rail.showPhoto();
  rail.showClasses();
  try {
    await predict();
    await learnTargets();
    rail.showClasses();
  } catch (error) {
    world.why = error.message;
    rail.showClasses(error.message);
  }
  TABS[state.tab].update(new Set(["classes"]));
}

function changed(what) {
  const has = (names) => names.some((name) => what.has(name));
  if (has(PHOTO)) {
    leave();
    settle();
    newPhoto();
  } else if (what.has("targets")) {
    rail.showClasses();
    learnTargets().then((more) => more && rail.showClasses());
  }
  if (what.has("tab")) showTab();
  if (what.has("patch") && state.patch !== cursor.held) point(state.patch, true);
  strip.show();
  TABS[state.tab].update(what);
  if (has(DRAWN) || what.has("tab")) redraw();
}

async function start() {
  themes();
  tabs();
  addresses.begin(mend);
  world.info = await api.get("info");
  await loadConcepts().catch(() => {});
  byId("model").replaceChildren(...world.info.models.map(({ name }) => el("option", { value: name }, name)));
  byId("model").addEventListener("change", (event) =>
    set({ model: event.target.value, patch: null, layer: -1, head: "mean" }));
  byId("model").disabled = world.info.models.length === 1;
  settle();
  addresses.correct(await mend());
  byId("model").value = model().name;
  if (state.patch !== null && state.patch >= model().grid[0] * model().grid[1]) state.patch = null;
  rail.begin();
  strip.begin();
  for (const [name, tab] of Object.entries(TABS)) tab.begin(byId(name));
  showTab();
  onChange(changed);
  onCursor((patch, hold) => hold && set({ patch }, true));
  if (state.patch !== null) point(state.patch, true);
  newPhoto();
  TABS[state.tab].update(new Set(PHOTO));
}

start().catch((error) => {
  byId("stage").prepend(problem(error.message, () => location.reload()));
  throw error;
});
