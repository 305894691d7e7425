// The bottom strip: how maps are drawn, and taking them away.

import { menu } from "./menu.js";
import { shared } from "./share.js";
import { set, state } from "./state.js";
import { byId, choice, el, segments, slider, toggle } from "./ui.js";

const quietly = (key) => (value) => set({ [key]: value }, true);
const actions = menu("Export", "export");
let controls = {};

export function begin() {
  controls = {
    opacity: slider("Opacity", { value: state.opacity }, quietly("opacity")),
    limits: slider("Limits", { value: state.limits, min: 10, max: 200, step: 5 }, quietly("limits")),
    threshold: slider("Threshold", { value: state.threshold, max: 95 }, quietly("threshold")),
    cells: segments("Patches", [[false, "Smooth"], [true, "Cells"]], state.cells, quietly("cells")),
    bare: segments("Background", [[false, "On image"], [true, "Map only"]], state.bare, quietly("bare")),
    ramp: choice("Colours", ["magma", "viridis", "grey"], state.ramp, quietly("ramp")),
    same: toggle("Same scale", state.same, quietly("same")),
  };
  controls.ramp.title = "Colours of unsigned maps; signed maps are orange and blue, controls are grey";
  controls.same.title = "One colour scale for all maps of a method";
  byId("strip").append(el("div.controls", ...Object.values(controls)), actions.node);
}

/** What can be taken away from a tab, a list of {id, label, title, run}, and from all of them. */
export const offer = (exports) => actions.offer([...exports, ...shared].flat());

export function show() {
  for (const [key, control] of Object.entries(controls)) control.show(state[key]);
}
