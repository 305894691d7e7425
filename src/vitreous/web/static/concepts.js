// A concept from a handful of pictures, and its map.

import * as api from "./api.js";
import { MapView } from "./draw.js";
import { addTarget } from "./rail.js";
import { set, state } from "./state.js";
import { drawn, mapsOf } from "./take.js";
import { button, choice, droppable, el, field, link, problem, progress } from "./ui.js";
import { here, loadConcepts, model, photo, world } from "./world.js";

const examples = []; // {file, url}
const pictures = el("div.examples");
const trouble = el("div");
const list = el("div.concepts");
const bar = progress();
const name = el("input", { type: "text", maxLength: 40, id: "concept-name", placeholder: "stripes" });
const build = el("button", { type: "submit", className: "strong" }, "Build the concept");
const views = new Map();
let similarity = "dot";
let how = "cdam";
let done = "";
let pickMethod = null;

export const concepts = {
  begin(panel) {
    const pick = el("input.unseen", { type: "file", accept: "image/*,.npy,.npz", multiple: true, id: "example-files" });
    pick.addEventListener("change", () => {
      add([...pick.files]);
      pick.value = "";
    });
    const words = [el("b", "Add examples"), el("span", "or drop images here")];
    const well = el("label.pick", { htmlFor: "example-files" }, words);
    const sample = (one) =>
      button(el("img", { src: photo(one.id), alt: one.name }), () => addSample(one), { title: `Add ${one.name}` });
    const samples = el("div.samples", { role: "group", "aria-label": "Samples" }, world.info.samples.map(sample));
    const kinds = [["dot", "dot product"], ["cosine", "cosine"], ["l2", "distance"]];
    const likeness = choice("Similarity", kinds, similarity, (value) => (similarity = value));
    const form = el("form.panel.form", { onsubmit: make },
      el("h3", "A new concept"),
      el("p.quiet", "A few images of one thing define a direction in the model's embedding: a target to explain."),
      pick, well, samples, ...packaged(), pictures, field("Name", name), likeness, build, trouble);
    droppable(form, add);
    pickMethod = choice("Method", [how], how, (value) => {
      how = value;
      this.update(new Set());
    });
    const lead = el("p.lead", el("b", "Where the model sees a concept. "),
      "Add example images, name the concept and build it.");
    panel.append(el("div.head", lead, bar, pickMethod),
      el("div.panels", form, el("div.panel.wide", list)));
    drawExamples();
  },

  async update(what) {
    if (what.has("tab")) await loadConcepts().catch(() => {});
    const able = world.info.methods.filter((one) => one.targeted && !one.control).map((one) => one.name)
      .filter((one) => !model().unsupported[one]);
    if (!able.includes(how)) how = able[0];
    pickMethod.show(how, able);
    const mine = world.concepts.filter((one) => one.model === model().name);
    const asked = JSON.stringify([here(), how, mine.map((one) => one.id)]);
    if (asked === done) return;
    done = asked;
    draw(mine);
    run(mine);
  },

  exports: [drawn, mapsOf(() => [...views.values()].map((one) => one.id).filter(Boolean))],
};

function add(files) {
  const room = world.info.limits.examples - examples.length;
  const most = `A concept takes at most ${world.info.limits.examples} examples.`;
  trouble.replaceChildren(...(files.length > room ? [problem(most)] : []));
  for (const file of files.slice(0, room)) examples.push({ file, url: URL.createObjectURL(file) });
  drawExamples();
}

async function addSample({ id, name: title }) {
  const blob = await (await fetch(photo(id))).blob();
  add([new File([blob], `${title}.webp`, { type: blob.type })]);
}

/** A link for each concept whose examples are in the package. */
function packaged() {
  const given = world.info.examples;
  return [...new Set(given.map((one) => one.concept))].map((concept) =>
    link(`Take the packaged examples of ${concept}`, async () => {
      for (const one of given.filter((other) => other.concept === concept)) await addSample(one);
      name.value = concept;
    }));
}

function drawExamples() {
  pictures.replaceChildren(...examples.map((one) =>
    el("span", el("img", { src: one.url, alt: one.file.name }),
      button("×", () => {
        URL.revokeObjectURL(one.url);
        examples.splice(examples.indexOf(one), 1);
        drawExamples();
      }, { ariaLabel: `Remove ${one.file.name}` }))));
  build.disabled = !examples.length;
}

async function make(event) {
  event.preventDefault();
  trouble.replaceChildren();
  build.disabled = true;
  try {
    const form = new FormData();
    form.append("name", name.value.trim());
    form.append("model", model().name);
    form.append("similarity", similarity);
    for (const { file } of examples) form.append("files", file, file.name);
    const made = await api.post("concepts", form);
    await loadConcepts();
    examples.splice(0).forEach((one) => URL.revokeObjectURL(one.url));
    drawExamples();
    name.value = "";
    addTarget(`concept:${made.id}`);
    concepts.update(new Set());
  } catch (error) {
    trouble.replaceChildren(problem(error));
  }
  build.disabled = !examples.length;
}

function draw(mine) {
  for (const one of views.values()) one.view.remove();
  views.clear();
  const { grid, size } = model();
  const none = "No concepts yet. To try it out, take the packaged examples and build the concept.";
  list.replaceChildren(...(mine.length ? [] : [el("p.quiet", none)]),
    ...mine.map((one) => {
      const view = new MapView({ photo: photo(), grid, size, name: `${how} for the concept ${one.name}` });
      const note = el("div");
      views.set(one.id, { view, note });
      const target = `concept:${one.id}`;
      const count = `${one.examples.length} example${one.examples.length > 1 ? "s" : ""}`;
      return el("figure.concept",
        el("figcaption", el("b", one.name), el("small", `${count}, ${one.similarity}`)),
        view.node, view.legend.node, note,
        el("div.row", link("Use as target", () => addTarget(target)),
          link("Delete", () => forget(one), { ariaLabel: `Delete ${one.name}` })));
    }));
}

function run(mine) {
  bar.stop();
  if (!mine.length) return;
  const some = mine.slice(-world.info.limits.targets);
  let next = 0;
  const body = { ...here(), methods: [{ name: how, options: {} }], targets: some.map((one) => `concept:${one.id}`) };
  bar.run(api.job("explain", body), (event, told) => {
    if (event === "failed") return trouble.replaceChildren(problem(told));
    if (event === "left") done = "";
    if (event !== "map" && event !== "problem") return;
    const shown = views.get(some[next++].id);
    const { view, note } = shown;
    if (event === "problem") return note.replaceChildren(problem(told));
    shown.id = told.id;
    api.map(told.id).then((values) => view.show(values, told), (error) => note.replaceChildren(problem(error)));
  });
}

async function forget(one) {
  await api.remove(`concepts/${one.id}`).catch((error) => trouble.replaceChildren(problem(error)));
  await loadConcepts();
  const left = state.targets.filter((target) => !target.includes(one.id));
  if (left.length !== state.targets.length) set({ targets: left.length ? left : ["top-1"] });
  concepts.update(new Set());
}
