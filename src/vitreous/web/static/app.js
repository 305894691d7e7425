// The page: who is told when something changes.

import * as additions from "./additions.js";
import * as api from "./api.js";
import { ask, unanswered } from "./answer.js";
import { attention } from "./attention.js";
import * as clip from "./clip.js";
import { compare } from "./compare.js";
import { concepts } from "./concepts.js";
import { cursor, onCursor, point, redraw } from "./draw.js";
import { explain } from "./explain.js";
import { faithfulness } from "./faithfulness.js";
import { features } from "./features.js";
import * as help from "./help.js";
import { inside } from "./inside.js";
import { mend } from "./links.js";
import * as rail from "./rail.js";
import { record } from "./recorder.js";
import * as addresses from "./state.js";
import { onChange, set, state } from "./state.js";
import { arrive, arrived } from "./share.js";
import * as strip from "./strip.js";
import * as tour from "./tour.js";
import { still } from "./transport.js";
import { byId, el, leave, leaveOthers, problem } from "./ui.js";
import { learnTargets, loadConcepts, model, predict, samplesOf, world } from "./world.js";

const TABS = { explain, compare, attention, concepts, faithfulness, inside, features };
const PHOTO = ["model", "image"];
const ASKED = [...PHOTO, "question", "answer"]; // what the model says of the image depends on these
const DRAWN = ["opacity", "limits", "threshold", "cells", "bare", "same", "ramp"];

const NEEDED = { faithfulness: ["faithfulness", "explain"] }; // whose jobs a tab goes on with: curves are those of maps

const THEME = "theme";

/** The theme of the last visit; a frame may have no storage. */
function remembered() {
  try {
    return localStorage.getItem(THEME);
  } catch {
    return null;
  }
}

function remember(theme) {
  try {
    localStorage.setItem(THEME, theme);
  } catch {
    // it holds for this visit
  }
}

function themes() {
  const knob = byId("theme");
  const root = document.documentElement;
  const wish = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : wish.matches);
  const show = () => {
    knob.textContent = dark() ? "Light" : "Dark";
    knob.ariaLabel = `Switch to the ${dark() ? "light" : "dark"} theme`;
  };
  const kept = remembered();
  if (kept) root.dataset.theme = kept;
  knob.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    remember(root.dataset.theme);
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
  if (!Object.hasOwn(TABS, state.tab)) state.tab = "explain";
  for (const name of Object.keys(TABS)) {
    const chosen = name === state.tab;
    byId(name).hidden = !chosen;
    const tab = byId(`tab-${name}`);
    tab.ariaSelected = String(chosen);
    tab.tabIndex = chosen ? 0 : -1;
    if (chosen) byId("tabs").scrollLeft = tab.offsetLeft - byId("tabs").offsetLeft - 64;
  }
  document.body.dataset.tab = state.tab;
  shut();
  document.title = `vitreous · ${byId(`tab-${state.tab}`).textContent}`;
}

/** A view that the model does not have says why; the others are as they were. */
function shut() {
  const { closed } = model();
  for (const name of Object.keys(TABS)) {
    byId(`tab-${name}`).classList.toggle("off", Boolean(closed[name]));
    byId(`tab-${name}`).title = closed[name] ?? "";
    byId(name).classList.toggle("shut", Boolean(closed[name]));
    byId(name).querySelector(":scope > .why")?.remove();
    if (closed[name]) byId(name).prepend(el("p.why", `${closed[name]}.`));
  }
  strip.offer(closed[state.tab] ? [] : TABS[state.tab].exports.filter(({ only }) => !only || only()));
}

/** Tell the tab that is shown, unless the model does not have it. */
const update = (what) => model().closed[state.tab] || TABS[state.tab].update(what);

/** A photo and a model that are there. */
function settle() {
  const { models } = world.info;
  const samples = samplesOf(models[0]);
  addresses.settle({ model: models[0].name, image: samples[0].id }, models[0].first);
  if (!state.model) state.model = models[0].name;
  if (!state.image) state.image = samples[0].id;
  byId("model").value = state.model;
  const [h, w] = model().grid;
  if (state.patch >= h * w) state.patch = null;
}

async function newPhoto() {
  Object.assign(world, { classes: [], why: null, seen: null, answer: null });
  rail.showPhoto();
  rail.showClasses();
  try {
    if (unanswered() && !(await ask())) return;
    await predict();
    await learnTargets();
    rail.showClasses();
  } catch (error) {
    world.why = error.message;
    rail.showClasses(error.message);
  }
  update(new Set(world.answer ? [...PHOTO, "classes"] : ["classes"]));
}

function changed(what) {
  const has = (names) => names.some((name) => what.has(name));
  if (what.size === 1 && what.has("frame")) return void clip.update();
  if (has(ASKED)) {
    leave();
    settle();
    shut();
    clip.update();
    rail.fitTargets(what);
    newPhoto();
  } else if (what.has("targets")) {
    rail.showClasses();
    learnTargets().then((more) => more && rail.showClasses());
  }
  if (what.has("tab")) {
    showTab();
    leaveOthers(NEEDED[state.tab] ?? [state.tab]);
  }
  if (has(["patch", "model"]) && state.patch !== cursor.held) point(state.patch, true);
  strip.show();
  if (!unanswered()) update(what);
  if (what.has("frame")) clip.update();
  if (has(DRAWN) || what.has("tab")) redraw();
  if (what.has("tour")) tour.update();
}

async function start() {
  if (!still()) record();
  themes();
  tabs();
  const carried = arrive();
  addresses.begin(mend);
  world.info = await api.get("info");
  const taken = await carried();
  await loadConcepts().catch(() => {});
  additions.begin();
  settle();
  if (taken) addresses.correct({ image: taken });
  addresses.correct(await mend());
  if (taken) byId("notice").append(arrived());
  settle();
  rail.begin();
  strip.begin();
  help.begin();
  clip.begin();
  clip.update();
  tour.begin();
  for (const [name, tab] of Object.entries(TABS)) {
    byId(name).append(el("h2.unseen", byId(`tab-${name}`).textContent));
    tab.begin(byId(name));
  }
  showTab();
  onChange(changed);
  onCursor((patch, hold) => hold && set({ patch }, true));
  if (state.patch !== null) point(state.patch, true);
  newPhoto();
  if (!unanswered()) update(new Set(PHOTO));
  tour.update();
}

start().catch((error) => {
  byId("stage").prepend(problem(error.message, () => location.reload()));
  throw error;
});
