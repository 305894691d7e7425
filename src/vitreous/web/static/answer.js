// A question to a model that answers in words: each word of the answer is a button that makes it a target.

import * as api from "./api.js";
import { toggleTarget } from "./chosen.js";
import { correct, set, state } from "./state.js";
import { button, el, field, percent, problem, progress } from "./ui.js";
import { model, world } from "./world.js";

const USUAL = "What is this?";
const FIRST = 4; // words that are explained at first
const words = el("div.words", { role: "group", "aria-label": "Words of the answer" });
const trouble = el("div");
const bar = progress();
const question = el("input", { id: "question", type: "text", maxLength: 300, required: true, placeholder: USUAL });
const given = el("input", { id: "answer", type: "text", maxLength: 300, placeholder: "the model's own" });

export function answerTools() {
  const ask = (event) => {
    event.preventDefault();
    const asked = { question: question.value.trim() || USUAL, answer: given.value.trim() };
    if (asked.question === (state.question || USUAL) && asked.answer === state.answer) return;
    set({ ...asked, targets: [] });
  };
  return el("div.tool", el("form.asking", { onsubmit: ask }, field("Question", question), field("Answer", given),
    el("div.row", el("button", { type: "submit", className: "strong" }, "Ask"), bar)), words, trouble);
}

/** Whether the model answers questions and has not answered this one. */
export const unanswered = () => model().form === "words" && world.answer === null;

/** Ask the question of the address about the image; the promise comes true with the answer. */
export function ask() {
  const asked = { model: model().name, image: state.image, question: state.question || USUAL };
  const worded = state.targets.filter((one) => /^(word:|token:|answer$)/.test(one));
  if (worded.length < state.targets.length) correct({ targets: worded });
  if (state.answer) asked.answer = state.answer;
  question.value = asked.question;
  given.value = state.answer;
  trouble.replaceChildren();
  words.replaceChildren(el("p.quiet", "The model answers …"));
  return new Promise((resolve) => {
    bar.run(api.job("answers", asked), (name, told) => {
      if (name === "answer") {
        world.answer = told;
        settle();
        show(told);
        resolve(true);
      } else if (name !== "done" && world.answer === null) {
        words.replaceChildren();
        if (name !== "left") trouble.replaceChildren(problem(name === "cancelled" ? "Cancelled." : told));
        resolve(false);
      }
    });
  });
}

/** Targets that the answer has. */
function settle() {
  const count = world.answer.words.length;
  const known = state.targets.filter((one) =>
    [...one.matchAll(/(?:word:|@)(\d+)/g)].every(([, number]) => Number(number) < count));
  const first = world.answer.words.slice(0, FIRST).map((one) => one.target);
  if (known.length !== state.targets.length || !known.length) correct({ targets: known.length ? known : first });
}

function show({ words: each }) {
  words.replaceChildren(...each.map((one) =>
    button(one.text || "␣", () => toggleTarget(one.target), { "data-target": one.target, title: `${percent(one.probability)} likely here` })),
  button("the whole answer", () => toggleTarget("answer"), { "data-target": "answer", className: "quiet-button" }));
  markWords();
}

/** Show which words are targets. */
export function markWords() {
  for (const node of words.querySelectorAll("button")) node.ariaPressed = String(state.targets.includes(node.dataset.target));
}
