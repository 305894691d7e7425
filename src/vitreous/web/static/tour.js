// A tour of eight steps on the packaged photos: each sets the view, and tells what this model computed just now.

import { arrived, steps } from "./steps.js";
import { beside } from "./help.js";
import { set, state } from "./state.js";
import { announce, button, byId, el, link, problem } from "./ui.js";

const COUNT = steps.length;
let turn = 0; // of the step that is shown: what a former one still computes is not told
let shown = 0;
let from = null;

export function begin() {
  const knob = byId("take");
  knob.hidden = !location.protocol.startsWith("http"); // saved pages cannot compute
  knob.addEventListener("click", () => go(1, knob));
  byId("tour").addEventListener("keydown", keys);
  document.addEventListener("keydown", (event) => event.target === document.body && shown && keys(event));
  if (!knob.hidden) offer();
}

/** Show the step of the address, or none. */
export function update() {
  const wanted = Number.isInteger(state.tour) && state.tour >= 1 && state.tour <= COUNT ? state.tour : 0;
  if (wanted === shown) return;
  if (wanted) show(wanted);
  else hide();
}

function go(step, knob = null) {
  if (knob) from = knob;
  remember();
  byId("offer")?.remove();
  if (step < 1 || step > COUNT) return close();
  set({ tour: step });
}

function close() {
  set({ tour: 0 });
  (from?.isConnected ? from : byId("take")).focus();
}

function keys(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (event.key === "Escape") close();
  else if (step && shown + step >= 1 && shown + step <= COUNT) go(shown + step);
  else return;
  event.preventDefault();
  event.stopPropagation();
}

function hide() {
  turn += 1;
  shown = 0;
  byId("tour").hidden = true;
  light(null);
  beside();
}

async function show(number) {
  const mine = ++turn;
  const here = () => mine === turn;
  shown = number;
  const step = steps[number - 1];
  const words = el("div.words", el("p.quiet", "The model is computing …"));
  frame(number, step, words);
  light(null);
  const why = step.able();
  if (why) {
    words.replaceChildren(el("p", why));
    return;
  }
  set(step.state(), true);
  light(step.place);
  try {
    const said = await step.say(here);
    if (!here()) return;
    words.replaceChildren(...said.map((one) => el("p", one)), el("p.task", el("b", "Try it: "), step.task));
    light(step.place);
    announce(said.join(" "));
  } catch (error) {
    if (here() && error !== arrived.LEFT) words.replaceChildren(problem(error));
  }
}

function frame(number, step, words) {
  const panel = byId("tour");
  const last = number === COUNT;
  const head = el("h2", { id: "tour-title", tabIndex: -1 }, step.title);
  panel.replaceChildren(
    el("header", el("div", el("p.quiet", `Tour, ${number} of ${COUNT}`), head),
      button("×", close, { className: "close", ariaLabel: "Close the tour" })),
    el("progress.steps", { max: COUNT, value: number, "aria-label": "steps of the tour" }),
    words,
    el("footer", button("Back", () => go(number - 1), { disabled: number === 1 }),
      button(last ? "Finish" : "Next", () => go(number + 1), { className: "strong" })));
  panel.hidden = false;
  panel.scrollTop = 0;
  beside();
  head.focus({ preventScroll: true });
}

/** Frame the place that a step speaks of. */
function light(place) {
  for (const node of document.querySelectorAll(".toured")) node.classList.remove("toured");
  const node = place && document.querySelector(place);
  if (!node) return;
  node.classList.add("toured");
  node.scrollIntoView({ block: "nearest" });
}

function remember() {
  try {
    localStorage.setItem("toured", "yes");
  } catch {
    return; // no storage: it is offered again
  }
}

/** Whether it was offered before; a frame of a notebook has no storage, and is no first visit. */
function known() {
  try {
    return localStorage.getItem("toured");
  } catch {
    return "yes";
  }
}

/** One quiet line at the first visit. */
function offer() {
  if (state.tour || known() || location.hash) return;
  const away = () => {
    remember();
    byId("offer").remove();
    byId("take").focus();
  };
  byId("notice").before(el("p.invite", { id: "offer" },
    el("span", "New here? ", link("Take the tour", () => go(1, byId("take"))),
      " of eight steps on the packaged photos."),
    button("×", away, { className: "close", ariaLabel: "Do not offer the tour" })));
}
