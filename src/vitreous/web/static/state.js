// What is shown, kept in the address: the same link gives the same view.

const DISPLAY = { opacity: 85, limits: 100, threshold: 0, cells: false, bare: false, same: false, ramp: "magma" };
const PLAIN = {
  tab: "explain", model: "", image: "",
  ...DISPLAY,
  frame: 0, // of a clip
  layer: -1, head: "mean", patch: null, direction: "reads",
  discard: 0, heads: "mean", residual: 0.5,
  basis: "image", // of the colours of features
  models: "", images: "", by: "", aim: "first", across: true, // Compare: lists with ";" between
  one: "0.0", other: "0.1", of: "shares", measure: "correlation", // … the two cells of its difference, "row.column"
  question: "", answer: "", // to a model that answers in words; nothing: the usual question, its own answer
  tour: 0, // the step of the tour
  metric: "deletion", subject: "", // subject: the target of curves and heads; nothing: the first
};
export const FIRST = {
  methods: [], // those that the server names for its first model
  targets: ["top-1", "top-2"],
};

/** What an address may say; anything else is as if it said nothing. */
const ALLOWED = {
  opacity: [0, 100], limits: [10, 200], threshold: [0, 95], discard: [0, 0.99], residual: [0, 1], // numbers between
  frame: "whole", layer: "whole", patch: "whole", tour: "whole",
  head: /^(mean|\d{1,4})$/, direction: /^(reads|read_by)$/, heads: /^(mean|min|max)$/, basis: /^(image|samples)$/,
  ramp: /^(magma|viridis|grey)$/, of: /^(shares|values)$/, measure: /^(correlation|overlap|distance)$/,
  metric: /^(deletion|insertion|token_deletion)$/, one: /^\d+\.\d+$/, other: /^\d+\.\d+$/,
};

const NAMED = { model: true, image: true }; // always in the address

export const state = { ...PLAIN, ...FIRST };
const listeners = [];
let kept = null;

/** Where the address is kept: in that of the browser, unless a notebook or a saved page has another place. */
let keeper = {
  read: () => location.hash,
  write: (hash, how) => history[how](null, "", hash || location.pathname + location.search),
  onBack: (heard) => addEventListener("popstate", heard),
};
export const keepIn = (other) => (keeper = other);

/** The model, the photo and the methods where an address names none. */
export function settle(given, methods) {
  Object.assign(PLAIN, given);
  FIRST.methods = methods.map((name) => ({ name, options: {} }));
  if (!state.methods.length) state.methods = FIRST.methods;
}

/** Call `heard(changed)` with the names of what changed. */
export const onChange = (heard) => listeners.push(heard);

/** Change some of it; `quietly` replaces the entry in the history, as sliders do. */
export function set(change, quietly = false) {
  const changed = Object.keys(change).filter((key) => !same(state[key], change[key]));
  if (!changed.length) return;
  Object.assign(state, change);
  write(quietly);
  for (const heard of listeners) heard(new Set(changed));
}

export const same = (a, b) => a === b || JSON.stringify(a) === JSON.stringify(b);

let pending = 0;

/** To the address; quick quiet changes together, for browsers limit how often. */
function write(quietly) {
  if (!quietly) {
    clearTimeout(pending);
    pending = 0;
    put("pushState");
  } else if (!pending) {
    pending = setTimeout(() => {
      pending = 0;
      put("replaceState");
    }, 200);
  }
}

function put(how) {
  const hash = address();
  if (hash === kept) return;
  kept = hash;
  keeper.write(hash, how);
}

export function address() {
  const told = new URLSearchParams();
  for (const [key, plain] of Object.entries(PLAIN)) {
    if (key in NAMED || !same(state[key], plain)) told.append(key, state[key]);
  }
  if (!same(state.methods, FIRST.methods)) for (const one of state.methods) told.append("method", written(one));
  if (!same(state.targets, FIRST.targets)) for (const one of state.targets) told.append("target", one);
  const text = told.toString().replaceAll("%3A", ":").replaceAll("%3B", ";").replaceAll("%3D", "=");
  return text ? `#${text}` : "";
}

/** rollout;discard=0.9;heads=max */
export const written = (method) =>
  [method.name, ...Object.entries(method.options).map(([key, value]) => `${key}=${stringify(value)}`)].join(";");

const stringify = (value) => (typeof value === "string" ? value : JSON.stringify(value));

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

function readMethod(text) {
  const [name, ...pairs] = text.split(";");
  const options = pairs.map((pair) => pair.split(/=(.*)/s)).filter(([key]) => key).map(([key, value]) => [key, parsed(value ?? "")]);
  return { name, options: Object.fromEntries(options) };
}

function allowed(key, text, value) {
  const rule = ALLOWED[key];
  if (rule === "whole") return /^-?\d{1,9}$/.test(text) && (key !== "patch" || value >= 0);
  if (Array.isArray(rule)) return text !== "" && value >= rule[0] && value <= rule[1];
  return !rule || rule.test(text);
}

/** Each method once. */
export const different = (methods) => [...new Map(methods.map((one) => [written(one), one])).values()];

/** What an address says; everything that it does not say is as at first. */
function read(hash) {
  const told = new URLSearchParams(hash.replace(/^#/, ""));
  const found = { ...PLAIN, ...FIRST };
  for (const [key, plain] of Object.entries(PLAIN)) {
    const text = told.get(key);
    if (text === null) continue;
    const value = typeof plain === "boolean" ? text === "true" : typeof plain === "string" ? text : Number(text);
    found[key] = allowed(key, text, value) ? value : plain;
  }
  const methods = told.getAll("method").map(readMethod).filter(({ name }) => name);
  const targets = told.getAll("target").filter(Boolean);
  if (methods.length) found.methods = different(methods);
  if (targets.length) found.targets = [...new Set(targets)];
  return found;
}

function load() {
  kept = keeper.read();
  const found = read(kept);
  const changed = Object.keys(found).filter((key) => !same(state[key], found[key]));
  Object.assign(state, found);
  return new Set(changed);
}

let turn = 0;

/** Read the address now, and again whenever the reader goes back or forward; `mend()` then gives what must change. */
export function begin(mend) {
  load();
  keeper.onBack(async () => {
    if (keeper.read() === kept) return;
    const changed = load();
    const mine = ++turn;
    const change = await mend();
    if (mine !== turn) return;
    correct(change);
    for (const key of Object.keys(change)) changed.add(key);
    if (changed.size) for (const heard of listeners) heard(changed);
  });
}

/** Change what the address says without a step in the history. */
export function correct(change) {
  if (!Object.keys(change).length) return;
  Object.assign(state, change);
  put("replaceState");
}
