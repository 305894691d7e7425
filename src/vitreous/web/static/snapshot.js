// The view of a tab as a figure: photos, maps, charts and words as they are drawn, without the controls.

import { CanvasPen, SvgPen } from "./pens.js";

const EDGE = 16;
const LEFT_OUT = "button:not(.thumb, .name), select, input, .field, .toggle, .segments, .progress, .hair, .badge, " +
  "form, title, .unseen, .help";
const measure = document.createElement("canvas").getContext("2d");

/** A PNG of an element, with words below it and a note in the file of where it comes from. */
export const snapshot = (node, words, note) => drawn(new CanvasPen(note), node, words);

/** The same as an SVG: photos and maps are images within it, charts are shapes and words are text. */
export const vectors = (node, words, note) => drawn(new SvgPen(note), node, words);

async function drawn(pen, node, words) {
  const pieces = [...gather(node)];
  const boxes = pieces.map(({ box }) => box);
  const left = Math.min(...boxes.map((box) => box.left)) - EDGE;
  const top = Math.min(...boxes.map((box) => box.top)) - EDGE;
  const width = Math.ceil(Math.max(...boxes.map((box) => box.right)) - left + EDGE);
  const height = Math.ceil(Math.max(...boxes.map((box) => box.bottom)) - top + EDGE + 20);
  const style = getComputedStyle(document.body);
  pen.begin(width, height, style.backgroundColor, words);
  for (const { box, draw } of pieces) draw(pen, box.left - left, box.top - top, box.width, box.height);
  const font = { style: "normal", weight: "400", size: "12px", family: style.fontFamily };
  pen.text(words, EDGE, height - 12, 0, font, style.color);
  return pen.finish();
}

/** What there is to draw, from back to front: {box, draw(pen, x, y, width, height)}. */
function* gather(node) {
  if (node.nodeType === Node.TEXT_NODE) return void (yield* lines(node));
  if (node.nodeType !== Node.ELEMENT_NODE || node.matches(LEFT_OUT)) return;
  const style = getComputedStyle(node);
  const box = node.getBoundingClientRect();
  if (style.display === "none" || style.visibility === "hidden") return;
  if (node.tagName === "IMG" || node.tagName === "CANVAS") return void (yield raster(node, style, box));
  if (node instanceof SVGElement && node.tagName !== "text") yield* shape(node, style);
  else if (box.width && box.height) yield* ground(node, style, box);
  for (const child of node.childNodes) yield* gather(child);
}

/** The background of an element, and the frame around what is chosen. */
function* ground(node, style, box) {
  const radius = parseFloat(style.borderTopLeftRadius) || 0;
  if (!/^(transparent|rgba\(.*, 0\))$/.test(style.backgroundColor)) {
    yield { box, draw: (pen, ...at) => pen.shape(rounded(...at, radius), { fill: style.backgroundColor }) };
  }
  if (!node.matches(".thumb[aria-pressed=true]")) return;
  const colour = getComputedStyle(document.documentElement).getPropertyValue("--accent");
  const around = new DOMRect(box.x - 1, box.y - 1, box.width + 2, box.height + 2);
  yield { box: around, draw: (pen, ...at) => pen.shape(rounded(...at, radius), { stroke: resolved(colour), width: 2 }) };
}

const rounded = (x, y, width, height, radius) => {
  const r = Math.min(radius, width / 2, height / 2);
  if (r < 0.5) return `M${x} ${y}h${width}v${height}h${-width}Z`;
  const corner = (dx, dy) => `a${r} ${r} 0 0 1 ${dx} ${dy}`;
  return `M${x + r} ${y}h${width - 2 * r}${corner(r, r)}v${height - 2 * r}${corner(-r, r)}` +
    `h${2 * r - width}${corner(-r, -r)}v${2 * r - height}${corner(r, -r)}Z`;
};

/** A colour of a variable in the theme that is chosen. */
function resolved(colour) {
  const node = document.createElement("span");
  node.style.color = colour;
  document.body.append(node);
  const found = getComputedStyle(node).color;
  node.remove();
  return found;
}

function raster(node, style, box) {
  return { box, draw: (pen, ...at) => {
    const [width, height] = node.tagName === "IMG" ? [node.naturalWidth, node.naturalHeight] : [node.width, node.height];
    if (!width || !height || !box.width || !box.height) return;
    pen.image(node, ...at, { filter: style.filter, smooth: style.imageRendering !== "pixelated" });
  } };
}

/** A shape of a chart as a path. */
function outline(node) {
  const get = (name) => Number(node.getAttribute(name));
  const oval = (x, y, a, b) => `M${x - a} ${y}a${a} ${b} 0 1 0 ${2 * a} 0a${a} ${b} 0 1 0 ${-2 * a} 0Z`;
  const points = () => node.getAttribute("points").trim().replace(/\s*,\s*/g, " ");
  return {
    line: () => `M${get("x1")} ${get("y1")}L${get("x2")} ${get("y2")}`,
    rect: () => rounded(get("x"), get("y"), get("width"), get("height"), get("rx")),
    path: () => node.getAttribute("d"),
    circle: () => oval(get("cx"), get("cy"), get("r"), get("r")),
    ellipse: () => oval(get("cx"), get("cy"), get("rx"), get("ry")),
    polyline: () => `M${points()}`,
    polygon: () => `M${points()}Z`,
  }[node.tagName]?.();
}

function* shape(node, style) {
  const path = outline(node);
  if (!path) return;
  const box = node.ownerSVGElement.getBoundingClientRect();
  const { a, b, c, d, e, f } = node.getCTM();
  const look = {
    fill: style.fill, stroke: style.stroke, width: parseFloat(style.strokeWidth), opacity: Number(style.opacity),
    fillOpacity: Number(style.fillOpacity), dash: (style.strokeDasharray.match(/[\d.]+/g) ?? []).map(Number),
  };
  yield { box, draw: (pen, x, y) => pen.shape(path, look, [a, b, c, d, e + x, f + y]) };
}

/** The words of a text, line by line as the page breaks them. */
function* lines(text) {
  const range = document.createRange();
  const found = [];
  for (const { 0: word, index } of text.data.matchAll(/\S+/g)) {
    range.setStart(text, index);
    range.setEnd(text, index + word.length);
    const box = range.getBoundingClientRect();
    if (!box.width) continue;
    const last = found.at(-1);
    if (last && Math.abs(last.box.top - box.top) < 3) {
      last.words += ` ${word}`;
      last.box = new DOMRect(last.box.left, last.box.top, box.right - last.box.left, box.height);
    } else found.push({ words: word, box });
  }
  const parent = text.parentElement;
  const { fontStyle: style, fontWeight: weight, fontSize: size, fontFamily: family, fill, color } = getComputedStyle(parent);
  for (const { words, box } of found) {
    yield { box, draw: (pen, x, y, width, height) => {
      measure.font = `${style} ${weight} ${size} ${family}`;
      const { fontBoundingBoxAscent: up, fontBoundingBoxDescent: down } = measure.measureText(words);
      const colour = parent instanceof SVGElement ? fill : color;
      pen.text(words, x, y + (height + up - down) / 2, width, { style, weight, size, family }, colour);
    } };
  }
}
