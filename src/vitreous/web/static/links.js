// Links that name what the server no longer has: one sentence, and a page that works.

import * as api from "./api.js";
import { FIRST, state } from "./state.js";
import { button, byId, el } from "./ui.js";
import { here, method, model, world } from "./world.js";

/** What must change in the state so that everything in it exists; what is left out is said in one sentence. */
export async function mend() {
  const lost = [];
  const change = { ...mendModel(lost), ...mendMethods(lost) };
  const place = { ...here(), ...change.model && { model: change.model } };
  if (!(await held(place))) {
    lost.push("its image is no longer on the server (uploads are kept in memory only: choose it again)");
    place.image = change.image = world.info.samples[0].id;
    change.patch = null;
  }
  Object.assign(change, await mendTargets(place, lost));
  byId("notice").replaceChildren(...(lost.length ? [said(lost)] : []));
  return change;
}

function said(lost) {
  const close = button("×", () => byId("notice").replaceChildren(), { className: "close", ariaLabel: "Dismiss" });
  return el("p.problem", { role: "alert" }, `This link cannot be shown as it was: ${lost.join("; ")}`, close);
}

function mendModel(lost) {
  if (!state.model || world.info.models.some((one) => one.name === state.model)) return {};
  lost.push(`there is no model ${state.model}`);
  return { model: world.info.models[0].name };
}

function mendMethods(lost) {
  const known = state.methods.filter((one) => method(one.name));
  if (known.length === state.methods.length) return {};
  const unknown = state.methods.filter((one) => !method(one.name)).map((one) => one.name);
  lost.push(`there is no method ${unknown.join(", ")}`);
  return { methods: known.length ? known : FIRST.methods };
}

async function held(place) {
  if (world.info.samples.some((one) => one.id === place.image)) return true;
  return api.post("predict", { ...place, top: 1 }).then(() => true, ({ status }) => ![404, 422].includes(status));
}

async function mendTargets(place, lost) {
  const { classes, classifies } = world.info.models.find((one) => one.name === place.model) ?? model();
  const plain = (target) => {
    const [, rank, one, other] = /^(top-?)?(\d+)(?:-(\d+))?$/i.exec(target) ?? [];
    if (one === undefined) return false;
    return !classifies || (rank ? one >= 1 && one <= classes : one < classes && Number(other ?? 0) < classes);
  };
  const problems = await Promise.all(state.targets.map((target) => plain(target) ? null
    : api.get("target", { ...place, q: target }).then(() => null, (error) => error)));
  const refused = problems.map((error) => error?.status === 422 || error?.status === 404);
  if (!refused.includes(true)) return {};
  lost.push(...problems.filter((error, i) => refused[i]).map((error) => error.message));
  const known = state.targets.filter((target, i) => !refused[i]);
  return { targets: known.length ? known : FIRST.targets };
}
