// The chosen targets: one more, one less.

import { set, state } from "./state.js";
import { announce, toast } from "./ui.js";
import { nameOf, world } from "./world.js";

export function addTarget(text) {
  const target = text.trim();
  if (!target || state.targets.includes(target)) return;
  if (state.targets.length >= world.info.limits.targets) {
    return toast(`Choose at most ${world.info.limits.targets} targets.`);
  }
  set({ targets: [...state.targets, target] });
  announce(`${nameOf(target)} added as a target`);
}

/** Add a target, or remove it, but not the last one; `same(target)`: whether one of those chosen is it. */
export function toggleTarget(text, same = (one) => one === text) {
  const left = state.targets.filter((one) => !same(one));
  if (left.length === state.targets.length) addTarget(text);
  else if (left.length) set({ targets: left });
  else toast("At least one target is needed; add another one first.");
}
