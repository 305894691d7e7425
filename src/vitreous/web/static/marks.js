// Where a target is, drawn on the photo and on its maps: points, boxes, regions.

import { el } from "./ui.js";
import { model } from "./world.js";

const SIDE = 640; // pixels of the longer side of what is drawn
const LINES = [["#000", 7], ["#fff", 3]]; // dark below light: seen on every image

/** Draw these places on a map, [{kind, sides, shape, runs}]; those before are gone. */
export function mark(node, places) {
  let canvas = node.querySelector(":scope > .marks");
  if (!places.length) return void canvas?.remove();
  const [high, wide] = model().size; // not as it is laid out: it may be hidden
  if (!canvas) node.append((canvas = el("canvas.marks")));
  const scale = SIDE / Math.max(wide, high);
  Object.assign(canvas, { width: wide * scale, height: high * scale });
  const context = canvas.getContext("2d");
  for (const [colour, width] of LINES) {
    Object.assign(context, { strokeStyle: colour, lineWidth: width, lineJoin: "round" });
    for (const one of places) context.stroke(DRAWN[one.kind](one, canvas.width, canvas.height));
  }
}

const DRAWN = {
  point({ sides: [x, y] }, wide, high) {
    const path = new Path2D();
    path.arc(x * wide, y * high, 14, 0, 2 * Math.PI);
    return path;
  },
  box({ sides: [left, top, right, bottom] }, wide, high) {
    const path = new Path2D();
    path.rect(left * wide, top * high, (right - left) * wide, (bottom - top) * high);
    return path;
  },
  /** The edges between what is inside and what is outside. */
  mask({ shape: [rows, columns], runs }, wide, high) {
    const inside = unpacked(runs);
    const at = (y, x) => y >= 0 && x >= 0 && y < rows && x < columns && inside[y * columns + x] === 1;
    const path = new Path2D();
    const [across, down] = [wide / columns, high / rows];
    const line = (x0, y0, x1, y1) => {
      path.moveTo(x0 * across, y0 * down);
      path.lineTo(x1 * across, y1 * down);
    };
    for (let y = 0; y <= rows; y++) {
      for (let x = 0; x <= columns; x++) {
        if (at(y, x) !== at(y - 1, x)) line(x, y, x + 1, y);
        if (at(y, x) !== at(y, x - 1)) line(x, y, x, y + 1);
      }
    }
    return path;
  },
};

/** Lengths of runs, first of what is outside, to one number for each place. */
function unpacked(runs) {
  const found = new Uint8Array(runs.reduce((sum, one) => sum + one, 0));
  let start = 0;
  runs.forEach((length, i) => {
    if (i % 2) found.fill(1, start, start + length);
    start += length;
  });
  return found;
}

/** The reverse. */
export function packed(inside) {
  const runs = [0];
  let value = 0;
  for (const one of inside) {
    if (one !== value) {
      runs.push(0);
      value = one;
    }
    runs[runs.length - 1]++;
  }
  return runs;
}
