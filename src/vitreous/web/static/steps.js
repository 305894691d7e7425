// The eight steps of the tour: what each needs, how the page is set, and what is told of this run.

import * as api from "./api.js";
import { concepts } from "./concepts.js";
import { eraser } from "./eraser.js";
import { explain } from "./explain.js";
import { faithfulness } from "./faithfulness.js";
import { number, percent, placeOf } from "./ui.js";
import { here, loadConcepts, model, short, world } from "./world.js";

const AIMED = ["centred_lrp", "attn_lrp", "gae", "gradcam", "occlusion"];
const TOWERS = [[4, 2, 13, 4], [4, 10, 13, 12]]; // rows and columns of 14: top, left, bottom, right
const ROCKET = [[4, 6, 13, 8]];
const SKY = [[1, 2, 4, 14]];

/** Wait until something is there; a step that was left ends with LEFT. */
export async function arrived(look, stays, patience = 90_000) {
  for (const end = Date.now() + patience; Date.now() < end;) {
    if (!stays()) throw arrived.LEFT;
    const found = look();
    if (found) return found;
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  throw new Error("The numbers of this step did not arrive. Close the tour and check whether the page shows an error.");
}
arrived.LEFT = new Error("another step is shown");

/** So many patches: a share of all, at least one. */
const part = (share) => Math.max(1, Math.round(share * model().grid[0] * model().grid[1]));
const sample = (name) => world.info.samples.find((one) => one.id === `sample:${name}`);
const aimed = () => AIMED.find((name) => world.info.methods.some((one) => one.name === name) && !model().unsupported[name]);
const chosen = (...names) => names.map((name) => ({ name, options: {} }));
const follows = () => model().heads.length > 0 && !model().unsupported.attention;

/** Why a step cannot be shown, or nothing. */
function lacks(photo, { attention = false, classes = false, method = false }) {
  const { name, classifies, form } = model();
  if (!sample(photo)) return `This server does not have the packaged photo ${photo}.`;
  if (attention && !follows()) return `Attention from token to token cannot be followed in ${name}, so this step is left out.`;
  if (classes && !(classifies && form === "vector")) return `${name} does not choose one class for an image, so this step is left out.`;
  if (method && !aimed()) return `No class-specific method of the tour supports ${name}.`;
  return null;
}

const classesOf = (stays) => arrived(() => world.classes.length > 0 && world.classes, stays);
const best = async (stays) => short((await classesOf(stays))[0].label);

async function mapOf(name, target, stays) {
  const fits = (cell) => cell.one.name === name && (cell.target === target || cell.target === null);
  const found = await arrived(() => {
    const cell = explain.maps().find(fits);
    return cell?.view.values && { values: cell.view.values, shape: cell.meta.shape };
  }, stays);
  return found;
}

/** The patches of the largest values. */
const highest = (values, count = part(0.1)) =>
  [...values.keys()].sort((a, b) => values[b] - values[a]).slice(0, count);

/** A map on the grid of patches. */
function patches({ values, shape: [h, w] }) {
  const [rows, columns] = model().grid;
  const out = new Float32Array(rows * columns);
  values.forEach((v, i) => {
    const row = Math.floor((Math.floor(i / w) * rows) / h);
    out[row * columns + Math.floor(((i % w) * columns) / w)] += v;
  });
  return out;
}

/** The patches whose centres lie in boxes. */
function within(boxes) {
  const [h, w] = model().grid;
  return [...Array(h * w).keys()].filter((i) => {
    const [y, x] = [((Math.floor(i / w) + 0.5) / h) * 14, (((i % w) + 0.5) / w) * 14];
    return boxes.some(([top, left, bottom, right]) => y > top && y < bottom && x > left && x < right);
  });
}

/** The probability of the first class without some patches, and what the model then says. */
async function without(removed, stays) {
  const [{ index }] = await classesOf(stays);
  const told = await api.post("erase", { ...here(), removed, classes: [index], targets: [] });
  return { share: told.classes[0].probability, top: told.top[0] };
}

/** How much of the positive evidence lies in the upper half. */
function upper({ values, shape: [h, w] }) {
  const sum = (part) => part.reduce((a, v) => a + Math.max(0, v), 0);
  return sum(values.subarray(0, Math.floor(h / 2) * w)) / sum(values);
}

function correlation(a, b) {
  const mean = (values) => values.reduce((x, v) => x + v, 0) / values.length;
  const [ma, mb] = [mean(a), mean(b)];
  let [ab, aa, bb] = [0, 0, 0];
  a.forEach((v, i) => {
    ab += (v - ma) * (b[i] - mb);
    aa += (v - ma) ** 2;
    bb += (b[i] - mb) ** 2;
  });
  return ab / Math.sqrt(aa * bb);
}

const looks = (image) => ({ ...here(), image: `sample:${image}` });

async function readout(layer) {
  const asked = { ...here(), layer, head: "mean", token: "readout", direction: "reads" };
  const { buffer, shape } = await api.raw("attention/row", asked);
  return new Float32Array(buffer, 0, shape[0] * shape[1]);
}

const at = (image, more) => ({ image: `sample:${image}`, patch: null, ...more });

export const steps = [
  {
    title: "Attention",
    place: "#attention .panel.main .map",
    able: () => lacks("photographer", { attention: true }),
    state: () => at("photographer", { tab: "attention", layer: -1, head: "mean", direction: "reads" }),
    async say() {
      const { share, layers } = await api.post("attention", looks("photographer"));
      const values = await readout(layers - 1);
      const top = highest(values, 1)[0];
      const { cls, registers, patches: rest } = share.at(-1);
      const others = [cls > 0 && `${percent(cls)} to the CLS token`, registers > 0 && `${percent(registers)} to registers`];
      return [
        `You see the last of ${layers} layers: how much the token that the classifier reads attends to each patch.`,
        `${percent(rest)} of this attention goes to patches${others.some(Boolean) ? `, ${others.filter(Boolean).join(" and ")}` : ""}. ` +
        `The brightest patch, in ${placeOf(top, model().grid)}, has ${percent(values[top])}.`,
      ];
    },
    task: "Point at a patch of the image (or move there with the arrow keys) to see what that patch attends to.",
  },
  {
    title: "Why attention is not the reason",
    place: "#explain .scroll",
    able: () => lacks("photographer", { attention: true, classes: true, method: true }),
    state: () => at("photographer", { tab: "explain", methods: chosen("attention", aimed()), targets: ["top-1"] }),
    async say(stays) {
      const name = await best(stays);
      const whole = world.classes[0].probability;
      const [looked, meant] = [await mapOf("attention", "top-1", stays), await mapOf(aimed(), "top-1", stays)];
      const first = await without(highest(patches(looked)), stays);
      const second = await without(highest(patches(meant)), stays);
      const less = second.share < first.share
        ? `Part of what the model needs for ${name} is therefore not where it attends most.`
        : "On this model both find what is needed; the Faithfulness tab measures it more closely.";
      return [
        `The model predicts ${name} (${percent(whole)}). The attention map shows where it looks, whatever the class; ${aimed()} shows what speaks for ${name}.`,
        `The model was run again without ${part(0.1)} of the ${model().grid[0] * model().grid[1]} patches. Without those that get the most attention, ${name} has ${percent(first.share)}; ` +
        `without those that ${aimed()} marks most, ${percent(second.share)}. ${less}`,
      ];
    },
    task: "Move the pointer over the legs of the tripod and compare the two values at the same patch.",
  },
  {
    title: "A map for each class",
    place: "#explain .scroll",
    able: () => lacks("cat_and_coffee", { classes: true, method: true }),
    state: () => at("cat_and_coffee", { tab: "explain", targets: ["top-1", "top-2"],
      methods: chosen(...(follows() ? ["attention"] : []), aimed()) }),
    async say(stays) {
      const [one, two] = await classesOf(stays);
      const [first, second] = [await mapOf(aimed(), "top-1", stays), await mapOf(aimed(), "top-2", stays)];
      const said = (which, map) => `${percent(upper(map))} of the evidence for ${short(which.label)} lies in the upper half`;
      return [
        `The cup is in the upper half of this photo, the cat in the lower one. ${said(one, first)}; ${said(two, second)}.`,
        `The two maps of ${aimed()} have a correlation of ${number(correlation(first.values, second.values))}.` +
        (follows() ? " Attention has only one map: it is the same for every class." : ""),
      ];
    },
    task: "Click another of the top classes; a third row shows its map.",
  },
  {
    title: "Does the map find what the model needs?",
    place: "#faithfulness .chart",
    able: () => lacks("photographer", { classes: true, method: true }),
    state: () => at("photographer", { tab: "faithfulness", metric: "deletion", subject: "", targets: ["top-1"],
      methods: chosen(...(follows() ? ["attention"] : []), aimed()) }),
    async say(stays) {
      const name = await best(stays);
      const { curves, random } = await arrived(() => faithfulness.measured(follows() ? 2 : 1), stays);
      const listed = curves.map((one) => `${one.name} ${number(one.value)}`).join(", ");
      const [low] = [...curves].sort((a, b) => a.value - b.value);
      return [
        `Patches are hidden in the order of each map, and the curve is the probability of ${name}. A good map makes it fall at once.`,
        `The areas under the curves are: ${listed}; random maps ${number(random)}. Lower is better, and ` +
        (low.value < random ? `${low.name} is the lowest.` : "no map is better than chance here."),
      ];
    },
    task: "Move along a curve with the pointer or the arrow keys: the image shows which patches are hidden there.",
  },
  {
    title: "The eraser: ask the model itself",
    place: "#eraser",
    able: () => lacks("photographer", { classes: true, method: true }),
    state: () => at("photographer", { tab: "faithfulness", targets: ["top-1"], methods: chosen(aimed()) }),
    async say(stays) {
      const name = await best(stays);
      const whole = world.classes[0].probability;
      eraser.erase([]);
      const map = patches(await mapOf(aimed(), "top-1", stays));
      const most = await without(highest(map, part(0.05)), stays);
      const least = await without(highest(map.map((v) => -Math.abs(v)), part(0.05)), stays);
      return [
        `A map is a claim; the eraser tests it. The model says ${name} with ${percent(whole)}.`,
        `Without the 5% of patches that have the most evidence, ${name} has ${percent(most.share)}; without as many patches whose evidence is nearest to zero, ` +
        `${percent(least.share)}. Both were computed just now.`,
      ];
    },
    task: "Paint over the tripod (keyboard: arrow keys and Space) and watch the bars; Undo brings a patch back.",
  },
  {
    title: "A concept without a label",
    place: "#concepts .concepts",
    able: () => lacks("cat_and_coffee", { method: true })
      ?? (world.info.examples.some((one) => one.concept === "coffee") ? null : "This server has no packaged examples of a concept."),
    state: () => at("cat_and_coffee", { tab: "concepts" }),
    async say(stays) {
      const made = await coffee();
      const found = await arrived(() => concepts.shown(made.id), stays);
      const share = upper(found);
      return [
        `Five images of one cup define the concept “coffee”: a direction in the embedding of ${model().name}. The map shows where the photo resembles it.`,
        `${percent(share)} of the evidence for it lies in the upper half, where the cup is. ` +
        "All five examples come from one photograph, so this is a concept of this cup rather than of coffee.",
      ];
    },
    task: "Choose the photo of the cat among the samples: the concept is explained there too, although no cup is in it.",
  },
  {
    title: "Registers and outliers",
    place: "#attention .heads",
    able: () => lacks("coffee", { attention: true }),
    state: () => at("coffee", { tab: "attention", layer: -1, head: "mean", direction: "reads" }),
    async say() {
      const { share, layers } = await api.post("attention", looks("coffee"));
      const registers = share.map((one) => one.registers);
      const values = await readout(layers - 1);
      const sorted = [...values].sort((a, b) => b - a);
      const few = Math.max(1, Math.round(values.length / 20));
      const held = sorted.slice(0, few).reduce((a, v) => a + v, 0) / sorted.reduce((a, v) => a + v, 0);
      const times = sorted[0] / sorted[Math.floor(sorted.length / 2)];
      const outliers = `Of the attention on patches, ${percent(held)} goes to a twentieth of them, and the brightest patch has ${number(times)} times the median.`;
      if (!registers.some((one) => one > 0)) {
        return [`${model().name} has no registers. Models without them often use a few patches as memory. ${outliers}`,
          "Large attention on a plain background is a sign of such outliers, not of something to be seen there."];
      }
      const least = Math.min(...registers);
      return [
        `${model().name} has registers: tokens that belong to no patch, in which it keeps what concerns the whole image. The bars on the right show their share ` +
        `in each layer: ${percent(least)} in layer ${registers.indexOf(least)}, ${percent(registers.at(-1))} in the last one.`,
        `${outliers} Without registers, models often use patches of the background as memory, and attention maps show those.`,
      ];
    },
    task: "Choose a layer in the middle of the table, and compare its bar with that of the last layer.",
  },
  {
    title: "A shortcut",
    place: "#eraser",
    able: () => lacks("rocket", { classes: true, method: true }),
    state: () => at("rocket", { tab: "faithfulness", targets: ["top-1"], methods: chosen(aimed()) }),
    async say(stays) {
      const name = await best(stays);
      const whole = world.classes[0].probability;
      const [towers, rocket, sky] = [within(TOWERS), within(ROCKET), within(SKY)];
      const some = [];
      for (const gone of [towers, rocket, sky]) some.push(await without(gone, stays));
      if (!stays()) throw arrived.LEFT;
      eraser.erase(towers);
      await arrived(() => eraser.settled(), stays);
      const [no, bare, other] = some.map((one) => percent(one.share));
      const more = some[0].share < some[1].share && some[0].share < some[2].share;
      return [
        `A rocket stands between two lattice towers. The model says ${name} (${percent(whole)}). The eraser has taken the towers away: ${name} has ${no} now. ` +
        `Without the rocket instead it has ${bare}, without as much sky ${other}.`,
        more ? `So the towers, which are no part of the rocket, count most for ${name}. A model that decides by what merely stands beside the object takes a shortcut.`
          : `Here the towers are not what counts most for ${name}: this model does not take this shortcut.`,
      ];
    },
    task: "Press Reset, then erase only the rocket: what does the model say then?",
  },
];

/** The concept of the packaged examples; built if the server does not have it yet. */
async function coffee() {
  await loadConcepts();
  const known = world.concepts.find((one) => one.name === "coffee" && one.model === model().name);
  if (known) return known;
  const form = new FormData();
  form.append("name", "coffee");
  form.append("model", model().name);
  form.append("similarity", "dot");
  for (const one of world.info.examples.filter((other) => other.concept === "coffee")) {
    const blob = await api.file(`images/${one.id}/view`, undefined, { model: model().name });
    form.append("files", blob, `${one.name}.webp`);
  }
  const made = await api.post("concepts", form);
  await loadConcepts();
  concepts.update(new Set());
  return made;
}
