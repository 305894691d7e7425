// A concept from a handful of pictures, and its map.

import * as api from "./api.js";
import { addTarget } from "./chosen.js";
import { MapView } from "./draw.js";
import { asks } from "./help.js";
import { set, state } from "./state.js";
import { code, drawn, mapsOf, table, valuesOf } from "./take.js";
import { button, choice, droppable, el, field, link, problem, progress } from "./ui.js";
import { here, loadConcepts, model, nameOf, photo, picture, world } from "./world.js";

const examples = []; // {file, url}
const pictures = el("div.examples");
const trouble = el("div");
const busy = el("p.quiet", { role: "status" });
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
      button(picture(one.id, one.name), () => addSample(one), { title: `Add ${one.name}` });
    const samples = el("div.samples", { role: "group", "aria-label": "Samples" }, world.info.samples.map(sample));
    const kinds = [["dot", "dot product"], ["cosine", "cosine"], ["l2", "distance"]];
    const likeness = choice("Similarity", kinds, similarity, (value) => (similarity = value));
    const form = el("form.panel.form", { onsubmit: make },
      el("h3", "A new concept"),
      el("p.quiet", "A few images of one thing define a direction in the model's embedding: a target to explain."),
      pick, well, samples, ...packaged(), pictures, field("Name", name), likeness, build, busy, trouble);
    droppable(form, add);
    pickMethod = choice("Method", [how], how, (value) => {
      how = value;
      this.update(new Set());
    });
    const lead = el("p.lead", el("b", "Where the model sees a concept. "),
      "Add example images, name the concept and build it.");
    panel.append(el("div.head", lead, bar, pickMethod, asks("concepts")),
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

  /** The map of a concept, once it is there. */
  shown(id) {
    const view = views.get(id)?.view;
    return view?.values ? { values: view.values, shape: view.meta.shape } : null;
  },

  exports: [
    drawn,
    mapsOf(() => [...views.values()].map((one) => one.id).filter(Boolean)),
    table("The value of every map at every patch", () => [
      ["model", "image", "method", "concept", "time", "row", "column", "value"],
      ...valuesOf([...views].map(([id, { view }]) => ({ head: [how, nameOf(`concept:${id}`)], view }))),
    ]),
    code(() => views.size && {
      body: { ...here(), methods: [{ name: how, options: {} }], targets: [...views.keys()].map((id) => `concept:${id}`) },
    }),
  ],
};

function add(files) {
  const room = world.info.limits.examples - examples.length;
  const most = `A concept takes at most ${world.info.limits.examples} examples.`;
  trouble.replaceChildren(...(files.length > room ? [problem(most)] : []));
  for (const file of files.slice(0, room)) examples.push({ file, url: URL.createObjectURL(file) });
  drawExamples();
}

async function fileOf({ id, name: title }) {
  const blob = await api.file(photo(id).slice("/api/".length));
  return new File([blob], `${title}.webp`, { type: blob.type });
}

const addSample = async (one) => add([await fileOf(one)]);

const packagedNames = () => [...new Set(world.info.examples.map((one) => one.concept))];

/** Take the packaged examples of a concept into the form. */
async function takePackaged(concept) {
  for (const one of world.info.examples.filter((other) => other.concept === concept)) await addSample(one);
  name.value = concept;
}

/** A link for each concept whose examples are in the package. */
const packaged = () =>
  packagedNames().map((concept) => link(`Take the packaged examples of ${concept}`, () => takePackaged(concept)));

/** Where there is no concept yet: the packaged examples, and a button that builds one of them. */
function offers() {
  return packagedNames().flatMap((concept) => {
    const shown = world.info.examples.filter((one) => one.concept === concept);
    const start = button(`Build “${concept}” from these ${shown.length} images`, async () => {
      start.disabled = true;
      await construct(concept, () => Promise.all(shown.map(fileOf)));
      start.disabled = false;
    }, { className: "strong" });
    return [el("div.offer",
      el("p", el("b", "No concepts yet. "), "Try it with images that are packaged with vitreous: a concept is built of them,",
        ` and a map shows where the model sees ${concept} in your image.`),
      el("div.gallery", shown.map((one) => picture(one.id, `${concept}: ${one.name}`))), start)];
  });
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
  build.disabled = true;
  if (await construct(name.value.trim(), () => examples.map(({ file }) => file))) {
    examples.splice(0).forEach((one) => URL.revokeObjectURL(one.url));
    drawExamples();
    name.value = "";
  }
  build.disabled = !examples.length;
}

/** Build a concept of these files and make it a target; whether that went well. */
async function construct(title, files) {
  trouble.replaceChildren();
  try {
    const form = new FormData();
    form.append("name", title);
    form.append("model", model().name);
    form.append("similarity", similarity);
    const all = await files();
    for (const file of all) form.append("files", file, file.name);
    busy.textContent = `Building “${title}” from ${all.length} image${all.length > 1 ? "s" : ""} …`;
    const made = await api.post("concepts", form);
    await loadConcepts();
    addTarget(`concept:${made.id}`);
    concepts.update(new Set());
    return true;
  } catch (error) {
    trouble.replaceChildren(problem(error));
    return false;
  } finally {
    busy.textContent = "";
  }
}

function draw(mine) {
  for (const one of views.values()) one.view.remove();
  views.clear();
  const { grid, size } = model();
  list.replaceChildren(...(mine.length ? [] : offers()),
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
