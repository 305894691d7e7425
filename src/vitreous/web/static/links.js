// Links that name what the server no longer has: one sentence, and a page that works.

import * as api from "./api.js";
import { different, FIRST, state } from "./state.js";
import { still } from "./transport.js";
import { button, byId, el } from "./ui.js";
import { here, method, model, samplesOf, world } from "./world.js";

const LONG = 80; // characters of a name that is not known

/** What must change in the state so that everything in it exists; what is left out is said in one sentence. */
export async function mend() {
  if (still()) return {}; // each view says by itself what a saved page does not hold
  const lost = [];
  const change = { ...mendModel(lost), ...mendMethods(lost) };
  const place = { ...here(), ...change.model && { model: change.model } };
  const why = await missing(place);
  if (why) {
    lost.push(why);
    place.image = change.image = samplesOf(served(place))[0].id;
    change.patch = null;
  }
  const { frames } = served(place);
  if (frames && !(state.frame >= 0 && state.frame < frames)) {
    lost.push(`there is no frame ${state.frame}`);
    change.frame = 0;
  }
  Object.assign(change, await mendTargets(place, lost), await mendImages(lost));
  Object.assign(change, await mendOptions(place, { ...state, ...change }, lost));
  byId("notice").replaceChildren(...(lost.length ? [said(lost)] : []));
  return change;
}

function said(lost) {
  const close = button("×", () => byId("notice").replaceChildren(), { className: "close", ariaLabel: "Dismiss" });
  return el("p.problem", { role: "alert" }, `This link cannot be shown as it was: ${lost.join("; ")}`, close);
}

function mendModel(lost) {
  if (!state.model || world.info.models.some((one) => one.name === state.model)) return {};
  lost.push(`there is no model ${state.model.slice(0, LONG)}`);
  return { model: world.info.models[0].name };
}

function mendMethods(lost) {
  const known = few(state.methods.filter((one) => method(one.name)), "methods", lost);
  if (known.length === state.methods.length) return {};
  const unknown = state.methods.filter((one) => !method(one.name)).map((one) => one.name);
  if (unknown.length) lost.push(`there is no method ${unknown.join(", ").slice(0, LONG)}`);
  return { methods: known.length ? known : FIRST.methods };
}

/** As many as the server explains at a time. */
function few(listed, what, lost) {
  const most = world.info.limits[what];
  if (listed.length > most) lost.push(`${most} ${what} are all that this server explains at a time`);
  return listed.slice(0, most);
}

const served = (place) => world.info.models.find((one) => one.name === place.model) ?? model();

/** Why a model cannot be shown this image; null if it can. */
export async function missing(place) {
  const { frames, name } = served(place);
  if (samplesOf({ frames }).some((one) => one.id === place.image)) return null;
  const other = samplesOf({ frames: !frames }).find((one) => one.id === place.image);
  if (other && frames) return `${name} takes videos, and ${other.name} is a single image`;
  if (other) return `${name} takes images, and ${other.name} is a clip`;
  const refused = world.refused.get(place.image)?.[name];
  if (refused) return refused;
  try {
    await api.post("predict", { ...place, top: 1 });
    return null;
  } catch ({ status, message }) {
    if (status === 415) return message;
    const lost = "its image is no longer on the server (uploads are kept in memory only: choose it again)";
    return [404, 422].includes(status) ? lost : null;
  }
}

/** Another model; an image that it does not take gives way to a sample, which one sentence says. */
export async function switchTo(name) {
  const place = { model: name, image: state.image };
  const why = await missing(place);
  const close = button("×", () => byId("notice").replaceChildren(), { className: "close", ariaLabel: "Dismiss" });
  byId("notice").replaceChildren(...(why ? [el("p.problem", { role: "alert" }, `${why}. A sample is shown.`, close)] : []));
  return why ? { image: samplesOf(served(place))[0].id } : {};
}

async function mendTargets(place, lost) {
  const { classes, classifies, form } = served(place);
  if (form === "words") return {}; // known when the question is answered
  const plain = (target) => {
    const [, rank, one, other] = /^(top-?)?(\d+)(?:-(\d+))?$/i.exec(target) ?? [];
    if (one === undefined) return false;
    return !classifies || (rank ? one >= 1 && one <= classes : one < classes && Number(other ?? 0) < classes);
  };
  const why = async (target) => (plain(target) ? null : refusal(api.get("target", { ...place, q: target })));
  const aim = ["first", "own", ""].includes(state.aim) ? null : await why(state.aim);
  const refused = await Promise.all(state.targets.map(why));
  lost.push(...new Set([...refused, aim].filter(Boolean)));
  const known = few(state.targets.filter((target, i) => !refused[i]), "targets", lost);
  return {
    ...known.length < state.targets.length && { targets: known.length ? known : FIRST.targets },
    ...aim && { aim: "first" },
  };
}

/** What the server says against a question; null if it has an answer, or none now. */
const refusal = (asked) => asked.then(() => null, ({ status, message }) => ([404, 422].includes(status) ? message : null));

/** The images of Compare that are still there. */
async function mendImages(lost) {
  const { samples, clips, examples } = world.info;
  const packaged = new Set([...samples, ...clips, ...examples].map((one) => one.id));
  const named = state.images.split(";").filter(Boolean);
  const gone = await Promise.all(named.map(async (id) => {
    if (packaged.has(id)) return false;
    return !/^[0-9a-f]{32}$/.test(id) || Boolean(await refusal(api.file(api.view(id).slice("/api/".length))));
  }));
  const count = gone.filter(Boolean).length;
  if (!count) return {};
  lost.push(`${count} of the images to compare ${count > 1 ? "are" : "is"} no longer on the server`);
  return { images: named.filter((id, i) => !gone[i]).join(";") };
}

/** Methods whose options the server refuses, with the usual ones. */
async function mendOptions(place, { methods, targets }, lost) {
  const given = (one) => Object.keys(one.options).length > 0;
  if (served(place).form === "words" || !methods.some(given)) return {};
  const why = async (one) => (given(one) ? refusal(api.post("snippet", { ...place, methods: [one], targets })) : null);
  const refused = await Promise.all(methods.map(why));
  if (!refused.some(Boolean)) return {};
  lost.push(...refused.filter(Boolean));
  return { methods: different(methods.map((one, i) => (refused[i] ? { ...one, options: {} } : one))) };
}
