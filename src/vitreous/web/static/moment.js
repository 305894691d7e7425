// Which map of a clip belongs to the frame that is shown.

import { state } from "./state.js";

const heard = [];

/** Call `turned()` when another frame is shown. */
export const onTurn = (turned) => heard.push(turned);
export const turn = () => heard.forEach((one) => one());

/** The number of the map that a frame belongs to; −1: none. `times`: the frames of each map, the end not included. */
export const stepOf = (times, frame = state.frame) =>
  times.findIndex(([start, end]) => start <= frame && frame < end);

/** The values of one map of a clip. */
export function slice(values, shape, step) {
  const size = shape.at(-2) * shape.at(-1);
  return values.subarray(step * size, (step + 1) * size);
}

/** "frame 3", "frames 3–4": people count from one. */
export const spoken = ([start, end]) => (end - start === 1 ? `frame ${end}` : `frames ${start + 1}–${end}`);
