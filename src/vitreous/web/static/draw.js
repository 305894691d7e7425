// Colours and maps. The ramps are those of the figures (plot/colour.py, plot/overlay.py).

import { slice, stepOf } from "./moment.js";
import { state } from "./state.js";
import { show } from "./transport.js";
import { arrow, beside, el, frame, number, under } from "./ui.js";

const TINT = 0.35; // the faintest signed value on a photo already shows its hue
const EASE = 0.75; // below 1, the middle of an unsigned map is seen better
const MIDDLE = 0.965; // lightness of the neutral middle
const SIDE = 224; // a smooth map has about so many points a side
const LAST = 1023; // of a table of colours

const MAGMA =
  "00000402020b0504160907200e0b2b140e361a104221114e29115a311165390f6e420f754a107952137c5a167e6219806a1c81721f81792282" +
  "812581892881912b81992d80a1307eaa337db2357bba3878c23b75ca3e72d2426fd9466be04c67e75263ec5860f1605df4695cf7725cf97b5d" +
  "fb8560fc8e64fd9869fea16efeaa74feb47bfebd82fec68afecf92fed89afde2a3fdebacfcf4b6fcfdbf";
const VIRIDIS =
  "44015446085c471063481769481d6f482475472a7a46307e453781433d844142873f48893d4e8a3a538b38598c355e8d33638d31688e2e6d8e" +
  "2c718e2a768e297b8e27808e25848e23898e218e8d20928c1f978b1e9c891fa18821a58524aa8328ae802eb37c35b7793dbc7446c06f50c46a" +
  "5ac86465cb5e70cf577cd25089d54895d840a2da37b0dd2fbddf26cae11fd8e219e5e419f1e51dfde725";

const stops = (text) => text.match(/.{6}/g).map((hex) => [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16)));

function oklch(l, c, h) {
  const a = c * Math.cos((h * Math.PI) / 180);
  const b = c * Math.sin((h * Math.PI) / 180);
  const [x, y, z] = [
    l + 0.3963377774 * a + 0.2158037573 * b,
    l - 0.1055613458 * a - 0.0638541728 * b,
    l - 0.0894841775 * a - 1.291485548 * b,
  ].map((cone) => cone ** 3);
  return [
    4.0767416621 * x - 3.3077115913 * y + 0.2309699292 * z,
    -1.2684380046 * x + 2.6097574011 * y - 0.3413193965 * z,
    -0.0041960863 * x - 0.7034186147 * y + 1.707614701 * z,
  ].map((v) => {
    const linear = Math.min(1, Math.max(0, v));
    return 255 * (linear <= 0.0031308 ? 12.92 * linear : 1.055 * linear ** (1 / 2.4) - 0.055);
  });
}

/** From the neutral middle to one end: lightness falls evenly, colour comes early. */
const arm = (lightness, chroma, from, to) =>
  Array.from({ length: 129 }, (_, i) => {
    const t = i / 128;
    return oklch(MIDDLE + (lightness - MIDDLE) * t, chroma * Math.sin((t * Math.PI) / 2), from + (to - from) * t);
  });

const RAMPS = {
  signed: [...arm(0.47, 0.14, 245, 253).reverse().slice(0, -1), ...arm(0.64, 0.165, 68, 51)],
  magma: stops(MAGMA),
  viridis: stops(VIRIDIS),
  grey: [[10, 10, 10], [247, 247, 247]],
};

function mixed(ramp, place) {
  const at = place * (ramp.length - 1);
  const i = Math.min(ramp.length - 2, Math.floor(at));
  return ramp[i].map((v, c) => v + (ramp[i + 1][c] - v) * (at - i));
}

const tables = new Map();

/** For each place 0…1 between the limits a colour, alpha included, as the canvas wants it. */
function table(signed, control, bare, { ramp, opacity, threshold } = state) {
  const key = [signed, control, bare, ramp, bare || opacity, threshold].join();
  if (!tables.has(key)) {
    if (tables.size > 64) tables.clear();
    const colours = RAMPS[control ? "grey" : signed ? "signed" : ramp] ?? RAMPS.magma;
    const made = new Uint32Array(LAST + 1);
    for (let i = 0; i <= LAST; i++) {
      let place = i / LAST;
      const size = signed ? Math.abs(2 * place - 1) : place;
      let alpha = (signed ? size : size ** EASE) * (opacity / 100);
      if (bare) alpha = 1;
      else if (signed) place = (1 + Math.sign(2 * place - 1) * (TINT + (1 - TINT) * size)) / 2;
      if (size < threshold / 100) alpha = 0;
      const [r, g, b] = mixed(colours, place);
      made[i] = (Math.round(255 * alpha) << 24) | (Math.round(b) << 16) | (Math.round(g) << 8) | Math.round(r);
    }
    tables.set(key, made);
  }
  return tables.get(key);
}

/** Values [h w] to a canvas of that size, coloured between the limits; what is no number stays clear. */
function fill(canvas, values, width, height, [low, high], colours) {
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  const out = new Uint32Array(image.data.buffer);
  const scale = LAST / (high - low || 1);
  for (let i = 0; i < out.length; i++) {
    const v = values[i];
    if (v === v) out[i] = colours[v <= low ? 0 : v >= high ? LAST : ((v - low) * scale + 0.5) | 0];
  }
  context.putImageData(image, 0, 0);
}

/** Bilinear, between the centres of the cells. */
function enlarge(values, [h, w], times) {
  const out = new Float32Array(h * w * times * times);
  const along = (n) =>
    Array.from({ length: n * times }, (_, i) => {
      const at = Math.min(n - 1, Math.max(0, (i + 0.5) / times - 0.5));
      return [Math.floor(at), Math.min(n - 1, Math.floor(at) + 1), at % 1];
    });
  const columns = along(w);
  let place = 0;
  for (const [top, bottom, v] of along(h)) {
    for (const [left, right, u] of columns) {
      const upper = values[top * w + left] * (1 - u) + values[top * w + right] * u;
      const lower = values[bottom * w + left] * (1 - u) + values[bottom * w + right] * u;
      out[place++] = upper * (1 - v) + lower * v;
    }
  }
  return out;
}

/** A small bare map, sharp. */
export function thumb(canvas, values, [h, w], limits, signed = false) {
  fill(canvas, values, w, h, limits, table(signed, false, true, { ...state, threshold: 0 }));
}

/** Red, green, blue of each patch. */
export function colours(canvas, bytes, [h, w]) {
  Object.assign(canvas, { width: w, height: h });
  const image = canvas.getContext("2d").createImageData(w, h);
  for (let i = 0; i < h * w; i++) image.data.set([bytes[3 * i], bytes[3 * i + 1], bytes[3 * i + 2], 255], 4 * i);
  canvas.getContext("2d").putImageData(image, 0, 0);
}

/** Least and most, as plot/colour.py: zero at the dark end, the 99.5th percentile at the other. */
export function ends(values, signed = false) {
  const known = Array.from(values).filter(Number.isFinite).map((v) => (signed ? Math.abs(v) : v)).sort((a, b) => a - b);
  if (!known.length) return [0, 1];
  const at = 0.995 * (known.length - 1);
  const low = known[Math.floor(at)];
  const high = low + (known[Math.ceil(at)] - low) * (at % 1) || known.at(-1) || 1;
  return signed ? [-high, high] : [Math.min(0, known[0]), high];
}

// ---------------------------------------------------------------------------------------------------- the cross-hair

export const cursor = { patch: null, held: null }; // what is pointed at, and what stays when the pointer leaves
const views = new Set();
const dirty = new Set();
const followers = [];
let coming = 0;

export const onCursor = (heard) => followers.push(heard);

/** Move the cross-hair on all maps; `hold` keeps it there. */
export function point(patch, hold = false) {
  if (hold) cursor.held = patch;
  const next = patch ?? cursor.held;
  if (next === cursor.patch && !hold) return;
  cursor.patch = next;
  redraw(false);
  for (const heard of followers) heard(next, hold);
}

/** Draw everything that is seen at the next frame; `colour`: with new colours, not only the cross-hair. */
export function redraw(colour = true) {
  for (const one of views) one.soon(colour);
}

/** Another frame of a clip, on every map and under it. */
export function turnViews(photo) {
  for (const one of views) one.turn(photo);
}

function flush() {
  coming = 0;
  for (const one of dirty) one.paint();
  dirty.clear();
}

/** A photo, a map on it and the cross-hair: arrow keys move it, Enter or a click holds it, Escape lets go. */
export class MapView {
  constructor({ photo = "", grid, size, name = "image" }) {
    Object.assign(this, { grid, name, meta: null, values: null, smooth: null, stale: true, limits: [0, 1] });
    this.image = el("img", { alt: "", draggable: false, onerror: () => (this.image.hidden = true) });
    if (photo) show(this.image, photo);
    this.moves = /[?&]frame=/.test(photo);
    this.canvas = el("canvas");
    this.hair = el("div.hair", { hidden: true });
    this.badge = el("span.badge", { hidden: true });
    const parts = [this.image, this.canvas, this.hair, this.badge];
    this.node = el("div.map", { tabIndex: 0, role: "application" }, parts);
    this.legend = legend();
    this.node.ariaRoleDescription = "map";
    if (size) this.node.style.aspectRatio = `${size[1]} / ${size[0]}`;
    this.listen();
    this.describe();
    views.add(this);
    this.soon();
  }

  remove() {
    views.delete(this);
    this.node.remove();
  }

  listen() {
    const on = (name, heard) => this.node.addEventListener(name, heard);
    on("pointermove", (event) => point(under(event, this.node, this.grid)));
    on("pointerleave", () => point(null));
    on("click", (event) => point(under(event, this.node, this.grid), true));
    on("keydown", (event) => this.key(event));
  }

  key(event) {
    const move = arrow(event);
    const [h, w] = this.grid;
    const middle = Math.floor(h / 2) * w + Math.floor(w / 2);
    if (move) point(cursor.patch === null ? middle : beside(cursor.patch, move, this.grid), true);
    else if (event.key === "Enter") point(cursor.patch ?? middle, true);
    else if (event.key === "Escape") point(null, true);
  }

  /** Show another map. */
  show(values, meta) {
    Object.assign(this, { all: values, meta, limits: meta.limits });
    this.turn();
  }

  /** Of a clip, the map and the image of the frame that is shown. */
  turn(photo = "") {
    if (photo && this.moves) show(this.image, photo);
    if (!this.meta || (photo && !this.moves)) return;
    const { shape, times } = this.meta;
    const step = shape.length === 3 ? stepOf(times) : 0;
    this.values = step < 0 ? null : slice(this.all, shape, step);
    this.smooth = null;
    if (!this.values) this.canvas.width = 0;
    this.describe();
    this.soon();
  }

  describe() {
    this.node.ariaLabel = `${this.name}${this.values ? `: ${inWords(this.values, this.meta)}` : ""}`;
  }

  soon(colour = true) {
    this.stale ||= colour;
    dirty.add(this);
    coming ||= requestAnimationFrame(flush);
  }

  /** The colour limits as drawn. */
  get drawn() {
    const [low, high] = this.limits;
    const share = state.limits / 100;
    return this.meta?.signed ? [low * share, high * share] : [low, low + (high - low) * share];
  }

  paint() {
    if (!this.node.isConnected || this.node.closest("[hidden]")) return;
    frame(this.hair, cursor.patch, this.grid);
    this.badge.hidden = !this.values || cursor.patch === null;
    if (!this.badge.hidden) this.badge.textContent = number(this.at(cursor.patch));
    if (!this.stale || !this.values) return;
    this.stale = false;
    const { signed, control, shape } = this.meta;
    const [h, w] = shape.slice(-2);
    const lut = table(signed, control, state.bare);
    this.node.classList.toggle("bare", state.bare);
    this.node.classList.toggle("cells", state.cells);
    const times = state.cells ? 1 : Math.max(1, Math.round(SIDE / Math.max(h, w)));
    if (times > 1) this.smooth ??= enlarge(this.values, [h, w], times);
    fill(this.canvas, times > 1 ? this.smooth : this.values, w * times, h * times, this.drawn, lut);
    this.legend.show(this);
  }

  /** The value at a patch: the mean of its pixels where the map is finer than the grid. */
  at(patch) {
    if (!this.values || patch === null) return null;
    const [h, w] = this.meta.shape.slice(-2);
    const [gh, gw] = this.grid;
    const down = Math.max(1, Math.floor(h / gh));
    const across = Math.max(1, Math.floor(w / gw));
    const top = Math.floor((Math.floor(patch / gw) * h) / gh);
    const left = Math.floor(((patch % gw) * w) / gw);
    let sum = 0;
    for (let y = top; y < top + down; y++) for (let x = left; x < left + across; x++) sum += this.values[y * w + x];
    return sum / (down * across);
  }
}

// ----------------------------------------------------------------------------------------------------------- in words

/** "highest at the upper left: 0.42" */
export function inWords(values, { shape, signed }) {
  const [h, w] = shape.slice(-2);
  let most = 0;
  let least = 0;
  values.forEach((v, i) => {
    if (v > values[most]) most = i;
    if (v < values[least]) least = i;
  });
  const told = `highest at the ${where(most, h, w)}: ${number(values[most])}`;
  return signed && values[least] < 0 ? `${told}, lowest at the ${where(least, h, w)}: ${number(values[least])}` : told;
}

function where(place, h, w) {
  const third = (share) => Math.min(2, Math.floor(share * 3));
  const down = ["upper", "", "lower"][third((Math.floor(place / w) + 0.5) / h)];
  const across = ["left", "", "right"][third(((place % w) + 0.5) / w)];
  if (!down && !across) return "centre";
  return down && across ? `${down} ${across}` : across ? `middle ${across}` : `${down} middle`;
}

/** A bar of the colours between the limits, with numbers. */
function legend() {
  const bar = el("canvas", { width: 128, height: 1 });
  const low = el("span");
  const high = el("span");
  const node = el("div.legend", bar, low, high);
  const places = Float32Array.from({ length: 128 }, (_, i) => i / 127);
  return {
    node,
    show(view) {
      const { signed, control, evidence = signed, ends: words = evidence ? ["against", "evidence"] : ["", ""] } = view.meta;
      const [from, to] = view.drawn;
      fill(bar, places, 128, 1, [0, 1], table(signed, control, true));
      low.textContent = `${number(from)} ${words[0]}`.trim();
      high.textContent = `${number(to)} ${words[1]}`.trim();
    },
  };
}
