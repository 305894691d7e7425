// A place on the photo, drawn by hand or by keys: a point, a box, a free-hand region, single patches.

import * as api from "./api.js";
import { addTarget } from "./chosen.js";
import { cursor, point } from "./draw.js";
import { mark, packed } from "./marks.js";
import { announce, arrow, beside, button, choice, el, link, placeOf, problem, save, segments, under } from "./ui.js";
import { here, learn, model, shareOf, short, world } from "./world.js";

const STILL = 5; // pixels that a click may move
const FINE = 192; // pixels of the longer side of a free-hand region
const BEST = "top-1";
const HOW = {
  place: "Click a place or drag a box. Keys: arrows move, Shift+arrows draw a box, Enter takes it.",
  lasso: "Draw around a part of the image.",
  patches: "Paint patches, then take them. Keys: arrows move, Space paints, Enter takes them.",
};

let way = "place";
let cls = BEST;
let node = null; // the photo
let patches = new Set();
let corner = null; // of a box that keys draw
let drawn = null; // what is being drawn, as places
const trouble = el("div");
const hint = el("p.quiet");
const take = el("div.row");
let ways = null;
let classes = null;

/** The controls of regions; the class is that which is explained at the place. */
export function regionTools() {
  ways = segments("How a region is drawn", [["place", "Point, box"], ["lasso", "Free-hand"], ["patches", "Patches"]], way,
    (value) => begin(value));
  classes = choice("Class there", [[BEST, "the best one there"]], cls, (value) => (cls = value));
  take.replaceChildren(button("Take the patches", () => takePatches(), { className: "strong" }), link("Clear", () => begin(way)));
  begin(way);
  fillClasses();
  return el("div.tool", { role: "group", "aria-label": "Regions" }, ways, hint, take, classes,
    link("+ where it is predicted", () => addTarget(`${cls}@predicted`)), trouble);
}

/** The classes of the image first, then all others. */
async function fillClasses() {
  const { name } = model();
  const all = await api.get("labels", { model: name, limit: 200 }).catch(() => []);
  if (name !== model().name) return;
  for (const { index, label } of all) learn(index, label);
  const first = world.classes.filter((one) => one.probability || one.value);
  const rest = all.filter(({ index }) => !first.some((one) => one.index === index));
  const told = (one) => [String(one.index), `${short(one.label)}${"probability" in one ? `, ${shareOf(one)} of the image` : ""}`];
  if (![BEST, ...all.map((one) => String(one.index))].includes(cls)) cls = BEST;
  classes.show(cls, [[BEST, "the best one there"], ...[...first, ...rest].map(told)]);
}

function begin(chosen) {
  way = chosen;
  patches = new Set();
  corner = null;
  ways.show(way);
  hint.textContent = HOW[way];
  take.hidden = way !== "patches";
  trouble.replaceChildren();
  sketch(null);
}

/** Show what is being drawn. */
function sketch(places) {
  drawn = places;
  if (node?.isConnected) mark(layer(), drawn ?? []);
}

const layer = () => node.querySelector(".sketch") ?? node.appendChild(el("div.sketch"));

/** Let visitors draw on the photo. */
export function drawable(photo) {
  node = photo;
  photo.classList.add("drawing");
  let from = null;
  let line = [];
  const at = (event) => {
    const { left, top, width, height } = photo.getBoundingClientRect();
    return [[event.clientX - left, width], [event.clientY - top, height]]
      .map(([place, whole]) => Math.min(Math.max(place / whole, 0), 1 - 1e-6));
  };
  const boxTo = (to) => [...from.share.map((one, i) => Math.min(one, to[i])), ...from.share.map((one, i) => Math.max(one, to[i]))];
  const moved = (event) => Math.hypot(event.clientX - from.x, event.clientY - from.y) > STILL;
  const paint = (event) => {
    const patch = under(event, photo, model().grid);
    if (from.paints) patches.add(patch);
    else patches.delete(patch);
    sketch(patchPlaces());
  };
  photo.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    from = { x: event.clientX, y: event.clientY, share: at(event), paints: !patches.has(under(event, photo, model().grid)) };
    line = [from.share];
    photo.setPointerCapture(event.pointerId);
    if (way === "patches") paint(event);
  });
  photo.addEventListener("pointermove", (event) => {
    if (!from) return;
    if (way === "patches") return paint(event);
    if (way === "lasso") {
      line.push(at(event));
      return sketch([maskOf(line)]);
    }
    sketch(moved(event) ? [{ kind: "box", sides: boxTo(at(event)) }] : null);
  });
  photo.addEventListener("pointerup", (event) => {
    if (!from) return;
    const shares = moved(event) ? boxTo(at(event)) : from.share;
    from = null;
    if (way === "patches") return;
    sketch(null);
    if (way === "place") addPlace(shares);
    else if (line.length > 2) hold(maskOf(line));
  });
  photo.addEventListener("pointercancel", () => {
    from = null;
    sketch(null);
  });
  photo.addEventListener("keydown", key, true);
}

function key(event) {
  const { grid } = model();
  const middle = Math.floor(grid[0] / 2) * grid[1] + Math.floor(grid[1] / 2);
  const now = cursor.patch ?? middle;
  const done = () => {
    event.preventDefault();
    event.stopImmediatePropagation();
  };
  if (event.shiftKey && way === "place" && event.key.startsWith("Arrow")) {
    corner ??= { from: now, to: now };
    corner.to = beside(corner.to, arrow(event), grid);
    point(corner.to, true);
    sketch([{ kind: "box", sides: cellBox() }]);
    announce(`Box from ${placeOf(corner.from, grid)} to ${placeOf(corner.to, grid)}`);
    done();
  } else if (event.key === " " && way === "patches") {
    point(now, true);
    if (!patches.delete(now)) patches.add(now);
    sketch(patchPlaces());
    announce(`${placeOf(now, grid)} ${patches.has(now) ? "painted" : "cleared"}, ${patches.size} patches`);
    done();
  } else if (event.key === "Enter" && way !== "lasso") {
    if (way === "patches") takePatches();
    else addPlace(corner ? cellBox() : cellBox({ from: now, to: now }).slice(0, 2).map((one, i) => one + 0.5 / grid[1 - i]));
    done();
  } else if (event.key === "Escape") {
    begin(way);
  } else if (event.key.startsWith("Arrow")) {
    corner = null;
    if (way === "place") sketch(null);
  }
}

/** The box around two patches, as shares. */
function cellBox({ from, to } = corner) {
  const [h, w] = model().grid;
  const rows = [from, to].map((one) => Math.floor(one / w));
  const columns = [from, to].map((one) => one % w);
  return [Math.min(...columns) / w, Math.min(...rows) / h, (Math.max(...columns) + 1) / w, (Math.max(...rows) + 1) / h];
}

/** A point or a box becomes a target. */
function addPlace(shares) {
  corner = null;
  sketch(null);
  if (world.seen) addTarget(`${cls}@${placeIn(world.seen, shares)}`);
}

function patchPlaces() {
  const { grid } = model();
  const inside = Uint8Array.from({ length: grid[0] * grid[1] }, (_, i) => Number(patches.has(i)));
  return [{ kind: "mask", shape: grid, runs: packed(inside) }];
}

function takePatches() {
  if (patches.size) hold(patchPlaces()[0]);
  else trouble.replaceChildren(problem("No patch is painted yet."));
}

/** The inside of a line that closes itself. */
function maskOf(line) {
  const [high, wide] = model().size;
  const scale = FINE / Math.max(high, wide);
  const [width, height] = [Math.max(1, Math.round(wide * scale)), Math.max(1, Math.round(high * scale))];
  const canvas = el("canvas", { width, height });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.beginPath();
  for (const [x, y] of line) context.lineTo(x * width, y * height);
  context.closePath();
  context.fill();
  const { data } = context.getImageData(0, 0, width, height);
  const inside = Uint8Array.from({ length: width * height }, (_, i) => Number(data[4 * i + 3] > 127));
  return { kind: "mask", shape: [height, width], runs: packed(inside) };
}

/** The server keeps a drawn region; its id is the target. */
async function hold({ shape: [height, width], runs }) {
  const where = here();
  try {
    const { id } = await api.post("masks", { ...where, width, height, runs });
    if (where.image !== here().image || where.model !== here().model) return;
    begin(way);
    addTarget(`${cls}@mask:${id}`);
    trouble.replaceChildren(link("Save the region as PNG", async () => save(await api.file(`masks/${id}.png`), `mask-${id}.png`)));
  } catch (error) {
    trouble.replaceChildren(problem(error));
  }
}

/** A place in pixels of the image; `seen` is what the model sees of it. */
export function placeIn([left, top, right, bottom], shares) {
  const pixels = shares.map((share, i) => (i % 2 ? top + share * (bottom - top) : left + share * (right - left)));
  const whole = shares.length === 2 ? pixels.map(Math.floor) : [...pixels.slice(0, 2).map(Math.floor), ...pixels.slice(2).map(Math.ceil)];
  return whole.map((one) => Math.max(0, one)).join(",");
}
