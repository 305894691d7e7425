// One cell of a comparison: what a model answers about an image, and its map.

import * as api from "./api.js";
import { MapView } from "./draw.js";
import { state } from "./state.js";
import { button, el, number, percent, problem } from "./ui.js";
import { model, short, world } from "./world.js";

const BUSY = 429;
const TRIES = 10;
const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));

const predicted = api.remembered((where) => api.post("predict", { ...where, top: 1 }));
/** What a target of one model is called in another. */
const matched = api.remembered(async (image, target, whose, name) =>
  (await api.post("match", { image, target, models: [...new Set([whose, name])] })).at(-1));

export class Cell {
  constructor(image, column, aim, nameOfImage, filled) {
    Object.assign(this, { image, column, aim, filled, meta: null, failed: false, answer: "" });
    this.info = world.info.models.find((one) => one.name === column.model);
    this.title = `${column.one.name}, ${column.model}, ${nameOfImage(image)}`;
    const seen = api.view(image, column.model);
    // one grid for all, so that the cross-hair is at the same place of each view
    this.view = new MapView({ photo: seen, grid: model().grid, size: this.info.size, name: this.title });
    this.said = el("div.said");
    this.note = el("div.note");
    this.a = button("A", () => {}, { className: "mark" });
    this.b = button("B", () => {}, { className: "mark" });
    this.td = el("td", this.view.node, this.view.legend.node,
      el("div.under", this.said, el("span.pair", { role: "group", "aria-label": `Difference, ${this.title}` }, this.a, this.b)), this.note);
    this.td.addEventListener("keydown", (event) => {
      const which = { a: "one", b: "other" }[event.key.toLowerCase()];
      if (!which || event.ctrlKey || event.metaKey || event.altKey || !event.target.matches(".map")) return;
      this.pick?.(which, this.at);
    });
    this.wait();
  }

  get name() {
    return this.title;
  }

  place(at, pick) {
    Object.assign(this, { at, pick });
    this.a.onclick = () => pick("one", at);
    this.b.onclick = () => pick("other", at);
    this.a.ariaLabel = `A: ${this.title}`;
    this.b.ariaLabel = `B: ${this.title}`;
  }

  mark(at) {
    const [a, b] = [state.one === at, state.other === at];
    this.a.ariaPressed = String(a);
    this.b.ariaPressed = String(b);
    this.td.classList.toggle("focused", a || b);
  }

  wait() {
    this.td.classList.add("waiting");
    this.td.classList.remove("failed");
    this.note.replaceChildren();
  }

  stop() {
    this.td.classList.remove("waiting");
  }

  /** Ask for the answer of the model, the meaning of the target and the map. */
  async run(running, told, over) {
    try {
      const where = { model: this.column.model, image: this.image };
      this.tell(await predicted(where));
      const why = this.info.unsupported[this.column.one.name];
      if (why) throw new api.Problem(422, why);
      const target = await this.target();
      for (let tries = 0; !over(); tries++) {
        const body = { ...where, methods: [this.column.one], targets: [target] };
        const problem = await this.once(api.job("explain", body), running, told);
        if (!problem || over()) return;
        if (problem.status !== BUSY || tries >= TRIES) throw problem;
        await pause(2);
      }
    } catch (error) {
      if (!over()) this.fail(error);
    }
  }

  async target() {
    const { target, whose, own } = this.aim;
    const free = !this.info.aimed.includes(this.column.one.name);
    if (free || own || whose === this.column.model) return target;
    const found = await matched(this.image, target, whose, this.column.model);
    if (found.target === null) throw new api.Problem(422, found.why);
    return found.target;
  }

  /** One job; the promise gives its problem, or nothing. */
  once(start, running, told) {
    return new Promise((resolve) => {
      let problem = null;
      let work = null;
      const job = start((name, data) => {
        if (name === "progress") told(data);
        else if (name === "map") work = this.fill(data);
        else if (name === "problem" || name === "failed") problem = data;
        if (!["done", "failed", "cancelled"].includes(name)) return;
        running.delete(job);
        Promise.resolve(work).then(() => resolve(problem));
      });
      running.add(job);
    });
  }

  tell({ classes, why }) {
    const [best] = classes;
    const share = best && (best.value === null || best.value === undefined ? percent(best.probability) : number(best.value));
    this.answer = best ? `predicts ${short(best.label)} (${share})` : (why ?? "");
    this.said.replaceChildren(this.answer);
  }

  async fill(meta) {
    const values = await api.map(meta.id);
    this.meta = meta;
    this.stop();
    const target = meta.title ? `for ${meta.title}` : "for no class";
    this.said.replaceChildren(el("span", this.answer), el("small", `map ${target}`));
    this.view.name = `${this.title}, ${target}, ${this.answer}`;
    this.view.show(values, meta);
    this.filled();
  }

  fail(told) {
    this.failed = true;
    this.stop();
    this.td.classList.add("failed");
    this.note.replaceChildren(problem(told));
  }
}
