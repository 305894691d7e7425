// What is shown, kept in the address: the same link gives the same view.

const DISPLAY = { opacity: 85, limits: 100, threshold: 0, cells: false, bare: false, same: false, ramp: "magma" };
const PLAIN = {
  tab: "explain", model: "", image: "",
  ...DISPLAY,
  layer: -1, head: "mean", patch: null, direction: "reads",
  discard: 0, heads: "mean", residual: 0.5,
  basis: "image", // of the colours of features
  metric: "deletion", subject: "", // subject: the target of curves and heads; nothing: the first
};
export const FIRST = {
  methods: [], // those that the server names for its first model
  targets: ["top-1", "top-2"],
};

const NAMED = { model: true, image: true }; // always in the address

export const state = { ...PLAIN, ...FIRST };
const listeners = [];
let kept = null;

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
  history[how](null, "", hash || location.pathname + location.search);
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
  const options = pairs.map((pair) => pair.split(/=(.*)/s)).map(([key, value]) => [key, parsed(value ?? "")]);
  return { name, options: Object.fromEntries(options) };
}

/** What an address says; everything that it does not say is as at first. */
function read(hash) {
  const told = new URLSearchParams(hash.replace(/^#/, ""));
  const found = { ...PLAIN, ...FIRST };
  for (const [key, plain] of Object.entries(PLAIN)) {
    const text = told.get(key);
    if (text === null) continue;
    const number = Number(text);
    if (typeof plain === "number" || key === "patch") found[key] = Number.isFinite(number) ? number : plain;
    else found[key] = typeof plain === "boolean" ? text === "true" : text;
  }
  if (told.has("method")) found.methods = told.getAll("method").map(readMethod);
  if (told.has("target")) found.targets = [...new Set(told.getAll("target"))];
  return found;
}

function load() {
  kept = location.hash;
  const found = read(location.hash);
  const changed = Object.keys(found).filter((key) => !same(state[key], found[key]));
  Object.assign(state, found);
  return new Set(changed);
}

let turn = 0;

/** Read the address now, and again whenever the reader goes back or forward; `mend()` then gives what must change. */
export function begin(mend) {
  load();
  addEventListener("popstate", async () => {
    if (location.hash === kept) return;
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
