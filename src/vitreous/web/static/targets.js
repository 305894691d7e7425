// The kinds of targets: tools for what the model can answer, and the reason for the rest.

import { answerTools, markWords } from "./answer.js";
import { contrasts, contrastTools, showContrast } from "./contrast.js";
import { detectionTools, markDetections, showDetections } from "./detections.js";
import { latentTools, markLatents, showLatents } from "./found.js";
import { asks } from "./help.js";
import { mark } from "./marks.js";
import { drawable, regionTools } from "./region.js";
import { state } from "./state.js";
import { el } from "./ui.js";
import { meaningOf, model } from "./world.js";

const NAMES = {
  classes: "Classes", regions: "Regions of the image", boxes: "Boxes of detections", words: "Words of an answer",
  texts: "Texts", concepts: "Concepts from examples", latents: "Concepts found (latents)", neurons: "Single outputs",
  contrasts: "Contrasts",
};
const TOOLS = [
  { kind: "words", help: "words", title: "Question", make: answerTools },
  { kind: "regions", help: "regions", title: "Draw a region", make: regionTools, photo: drawable },
  { kind: "boxes", help: "regions", title: "Detections", make: detectionTools, photo: showDetections },
  { kind: "latents", help: "latents", title: "Concepts found", make: latentTools, photo: showLatents },
];

const tools = el("div.tools");
const contrast = el("div");
const others = el("details.others");
let made = "";
let photo = null;

export const targetTools = () => [tools, contrast, others];

const taken = (kind) => model().kinds?.[kind] === null;

/** The tools of the model, on a photo. */
export function showTools(node) {
  photo = node;
  if (made !== model().name) {
    made = model().name;
    const able = TOOLS.filter(({ kind }) => taken(kind));
    tools.replaceChildren(...able.flatMap(({ title, help, make }) => [el("h2", title, asks(help)), make()]));
    contrast.replaceChildren(...(contrasts() ? [contrastTools()] : []));
    const refused = Object.entries(model().kinds).filter(([, why]) => why);
    others.hidden = !refused.length;
    others.replaceChildren(el("summary", "Other targets"),
      el("ul", refused.map(([kind, why]) => el("li", el("b", `${NAMES[kind] ?? kind}: `), why))));
  }
  for (const { kind, photo: use } of TOOLS) if (use && taken(kind)) use(node);
}

/** What depends on the chosen targets. */
export function markTargets() {
  if (taken("boxes")) markDetections();
  if (taken("words")) markWords();
  if (taken("latents")) markLatents();
  if (contrasts()) showContrast();
  const placed = state.targets.filter((target) => target.includes("@") && !target.endsWith("@predicted"));
  if (photo) mark(photo, placed.flatMap((target) => meaningOf(target)?.places ?? []));
}

/** Targets that are at a place of one image, or of one answer: another image does not have them. */
export const bound = (target) => /@(?!predicted)|^(word|token):/.test(target);
