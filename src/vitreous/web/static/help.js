// Help: a “?” on each view opens a panel beside it: what it shows, when to believe it, and its methods in full.

import * as api from "./api.js";
import { state } from "./state.js";
import { KEYS, TEXTS } from "./texts.js";
import { button, byId, el, link, problem } from "./ui.js";
import { method, world } from "./world.js";

const MATHS = "http://www.w3.org/1998/Math/MathML";
const SET = new Set([ // what trees of the server may be made of
  "math", "mi", "mo", "mn", "mtext", "mrow", "mspace", "msub", "msup", "msubsup", "mfrac", "msqrt", "mover",
]);
const WORDS = new Set(["span", "p", "code", "em"]);
const FIRST = { faithfulness: "curves" }; // the help of a tab whose parts have their own
const full = api.remembered((kind, name) => api.get(`${kind}/${encodeURIComponent(name)}`));
let from = null; // what had the focus

/** The “?” of a view. */
export function asks(key) {
  const knob = button("?", () => open(key, knob), { className: "asks", ariaLabel: `Help: ${TEXTS[key].title}` });
  knob.dataset.help = key;
  knob.title = `What ${TEXTS[key].title} shows, and when to believe it`;
  return knob;
}

/** The “?” of a method. */
export function asksOf(name) {
  const knob = button("?", () => openMethod("methods", name, knob),
    { className: "asks", ariaLabel: `Help: the method ${name}`, title: "Formula, source and known limits" });
  return knob;
}

export function begin() {
  byId("help").addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    close();
  });
  byId("ask").addEventListener("click", () => toggle(byId("ask")));
  document.addEventListener("keydown", (event) => {
    if (event.key !== "?" || event.ctrlKey || event.metaKey || byId("dialog").open) return;
    if (event.target.matches?.("input:not([type=range], [type=checkbox]), textarea, select")) return;
    event.preventDefault();
    toggle(document.activeElement);
  });
}

const toggle = (knob) => (byId("help").hidden ? open(nearest(knob), knob) : close());

const follows = (node, knob) => Boolean(knob.compareDocumentPosition(node) & Node.DOCUMENT_POSITION_FOLLOWING);

/** The view in which something lies; the tab if it lies in none. */
function nearest(node) {
  for (let at = node; at && at.id !== "stage" && at !== document.body; at = at.parentElement) {
    const before = [...at.querySelectorAll(":scope > .asks, :scope > :is(h2, h3, .head) .asks")]
      .filter((knob) => knob.dataset.help && (knob === node || follows(node, knob)));
    if (before.length) return before.at(-1).dataset.help;
  }
  return FIRST[state.tab] ?? (state.tab in TEXTS ? state.tab : "explain");
}

export function open(key, knob) {
  const { title, shows, believe, doubt, methods = [], metrics = [] } = TEXTS[key];
  const named = methods === "shown" ? [...new Set(state.methods.map((one) => one.name))] : methods;
  const pages = [
    ...named.filter((name) => method(name)).map((name) => ["methods", name]),
    ...metrics.filter((name) => world.info.metrics.some((one) => one.name === name)).map((name) => ["metrics", name]),
  ];
  const again = () => open(key, null);
  fill(title, knob, [
    el("h3", "What it shows"), el("p", shows),
    el("h3", "Believe it when"), el("p", believe),
    el("h3", "Do not believe it when"), el("p", doubt),
    pages.length > 0 && el("h3", "In full"),
    pages.length > 0 && el("ul.pages", pages.map(([kind, name]) =>
      el("li", link(name, () => openMethod(kind, name, null, again)), el("small", ` ${kind.slice(0, -1)}`)))),
    el("h3", "Keyboard"), keys(),
  ]);
  byId("help").dataset.help = key;
}

const keys = () => el("dl.keys", KEYS.flatMap(([key, does]) => [el("dt", el("kbd", key)), el("dd", does)]));

/** A method or a metric in full; `back` leads to where it was asked for. */
export async function openMethod(kind, name, knob, back = null) {
  const body = el("div", el("p.quiet", "…"));
  fill(name, knob, [back && link("‹ Back", back), body]);
  delete byId("help").dataset.help;
  try {
    body.replaceChildren(...about(await full(kind, name)));
  } catch (error) {
    body.replaceChildren(problem(error));
  }
}

/** The parts of what the server says of a method or metric. */
function about({ summary, formula, facts, reference, options, limits, family }) {
  const told = { family: family.replaceAll("_", " "), ...facts, ...(reference && { reference }) };
  return [
    el("p", summary),
    el("h3", "Formula"), el("p.formula", { tabIndex: 0, role: "group", "aria-label": "Formula" }, grown(formula)),
    el("dl", Object.entries(told).flatMap(([name, said]) => [el("dt", name), el("dd", said)])),
    options.length > 0 && el("h3", "Options"),
    options.length > 0 && el("dl", options.flatMap(({ name, default: plain, takes, help }) =>
      [el("dt", el("code", name)), el("dd", help, el("small", ` Default ${plain}; takes ${takes}.`))])),
    limits.length > 0 && el("h3", "Known limits"),
    ...limits.map(grown),
  ].filter(Boolean);
}

/** What can be unfolded below a method in a list. */
export function unfold(kind, name) {
  const body = el("div.full");
  const node = el("details", el("summary", "Formula, source and known limits"), body);
  node.addEventListener("toggle", async () => {
    if (!node.open || body.childElementCount) return;
    try {
      body.replaceChildren(...about(await full(kind, name)).slice(1));
    } catch (error) {
      body.replaceChildren(problem(error));
    }
  });
  return node;
}

/** Elements of a tree [name, attributes, …children]; names that are not expected stay words. */
function grown([name, attributes, ...children]) {
  const node = SET.has(name) ? document.createElementNS(MATHS, name)
    : document.createElement(WORDS.has(name) ? name : "span");
  for (const [key, value] of Object.entries(attributes)) {
    if (SET.has(name) && /^[a-z]+$/.test(key) && !key.startsWith("on")) node.setAttribute(key, value);
  }
  node.append(...children.map((child) => (Array.isArray(child) ? grown(child) : child)));
  return node;
}

function fill(title, knob, parts) {
  const panel = byId("help");
  if (knob) from = knob;
  const head = el("h2", { id: "help-title", tabIndex: -1 }, title);
  panel.replaceChildren(
    el("header", head, button("×", close, { className: "close", ariaLabel: "Close help" })), ...parts.filter(Boolean));
  panel.hidden = false;
  panel.scrollTop = 0;
  beside();
  head.focus({ preventScroll: true });
}

function close() {
  byId("help").hidden = true;
  delete byId("help").dataset.help;
  beside();
  (from?.isConnected && from !== document.body ? from : byId("ask")).focus();
}

/** Make room for the panels beside the stage. */
export function beside() {
  const open = !byId("help").hidden || !byId("tour").hidden;
  document.body.classList.toggle("helped", open);
  byId("ask").ariaExpanded = String(!byId("help").hidden);
}
