// A place on the photo, drawn by hand: a click is a point, a drag is a box.

import { el } from "./ui.js";

const STILL = 5; // pixels that a click may move

/** Call `made(shares)` with [x, y] or [left, top, right, bottom], as shares of the node, whenever one is drawn. */
export function drawable(node, made) {
  const frame = el("div.region", { hidden: true });
  node.append(frame);
  let from = null;
  const at = (event) => {
    const { left, top, width, height } = node.getBoundingClientRect();
    return [[event.clientX - left, width], [event.clientY - top, height]]
      .map(([place, whole]) => Math.min(Math.max(place / whole, 0), 1 - 1e-6));
  };
  const boxTo = (to) => [...from.share.map((one, i) => Math.min(one, to[i])), ...from.share.map((one, i) => Math.max(one, to[i]))];
  const moved = (event) => Math.hypot(event.clientX - from.x, event.clientY - from.y) > STILL;
  node.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    from = { x: event.clientX, y: event.clientY, share: at(event) };
    node.setPointerCapture(event.pointerId);
  });
  node.addEventListener("pointermove", (event) => {
    frame.hidden = !from || !moved(event);
    if (frame.hidden) return;
    const [left, top, right, bottom] = boxTo(at(event)).map((share) => 100 * share);
    Object.assign(frame.style, { left: `${left}%`, top: `${top}%`, width: `${right - left}%`, height: `${bottom - top}%` });
  });
  node.addEventListener("pointerup", (event) => {
    if (!from) return;
    const shares = moved(event) ? boxTo(at(event)) : from.share;
    from = null;
    frame.hidden = true;
    made(shares);
  });
  node.addEventListener("pointercancel", () => {
    from = null;
    frame.hidden = true;
  });
}

/** The target for the best class at a place; `seen` is what the model sees, in pixels of the image. */
export function placeIn([left, top, right, bottom], shares) {
  const pixels = shares.map((share, i) => (i % 2 ? top + share * (bottom - top) : left + share * (right - left)));
  const whole = shares.length === 2 ? pixels.map(Math.floor) : [...pixels.slice(0, 2).map(Math.floor), ...pixels.slice(2).map(Math.ceil)];
  return `top-1@${whole.map((one) => Math.max(0, one)).join(",")}`;
}
