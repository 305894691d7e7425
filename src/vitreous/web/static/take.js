// Taking results away: all maps of a view, the view as it is drawn, its numbers.

import * as api from "./api.js";
import { nameOfPhoto } from "./rail.js";
import { snapshot, vectors } from "./snapshot.js";
import { address, state } from "./state.js";
import { button, byId, el, save, toast } from "./ui.js";
import { model, world } from "./world.js";

const named = (ending) => `${nameOfPhoto().replace(/\.\w+$/, "")}-${state.tab}.${ending}`;

/** What is shown, for the note in a figure. */
const about = () => ({ model: model().name, image: nameOfPhoto(), view: address(), vitreous: world.info.version });

const figure = (kind, title, draw) => ({
  id: kind, label: kind.toUpperCase(), title,
  async run() {
    const told = about();
    const words = `${told.image} · ${told.model} · vitreous ${told.vitreous}`;
    save(await draw(byId(state.tab), words, told), named(kind));
  },
});

/** The view as it is drawn, as pixels and as shapes; what made it stands in the file. */
export const drawn = [
  figure("png", "This view as it is drawn, as pixels", snapshot),
  figure("svg", "This view as it is drawn, as shapes and text for other programs", vectors),
];

/** All maps of a view in one file; `ask` gives the path, and its query or what is sent. */
export const maps = (ask) => ({
  id: "npz", label: "NPZ", title: "The values of all maps shown, with their provenance",
  async run() {
    const asked = ask();
    if (!asked) return toast("There is no map yet.");
    save(await api.file(asked.path, asked.body, asked.query), named("npz"));
  },
});

/** Maps that have an id. */
export const mapsOf = (ids) => maps(() => ids().length && { path: "maps.npz", body: { maps: ids() } });

/** The table of a view: the names of its columns, then rows of the same. */
export const table = (title, rows) => ({
  id: "csv", label: "CSV", title,
  async run() {
    const found = rows();
    if (found.length < 2) return toast("There are no numbers yet.");
    save(new Blob([csv(found)], { type: "text/csv" }), named("csv"));
  },
});

/** The rows of maps, {head, view}: what stands before, then time (of a video), row, column and value. */
export const valuesOf = (maps) => maps.flatMap(({ head, view }) => Array.from(view.values ?? [], (value, i) => {
  const [high, wide] = view.meta.shape.slice(-2);
  const time = view.meta.shape.length > 2 ? Math.floor(i / (high * wide)) : "";
  return [...whose(), ...head, time, Math.floor(i / wide) % high, i % wide, value];
}));

function csv(rows) {
  const field = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => `${row.map(field).join(",")}\r\n`).join("");
}

export const whose = () => [model().name, nameOfPhoto()];

/** Words into the clipboard, or into a dialog where the browser does not allow it. */
export async function copied(text, title, said = `${title} copied (${text.trim().split("\n").length} lines).`) {
  try {
    await navigator.clipboard.writeText(text);
    toast(said);
  } catch {
    const dialog = byId("dialog");
    dialog.replaceChildren(el("h2", { id: "dialog-title" }, title), el("pre", { tabIndex: 0 }, text),
      el("footer", button("Close", () => dialog.close(), { className: "strong" })));
    dialog.showModal();
  }
}

/** Python and commands that compute what a view shows; `ask` gives the path below snippet and what is sent. */
export function code(ask, cli = "Commands that compute the same") {
  const run = (kind, title) => async () => {
    const asked = ask();
    if (!asked) return toast("There is nothing to compute yet.");
    return copied((await api.post(["snippet", asked.view].filter(Boolean).join("/"), asked.body))[kind], title);
  };
  return [
    { id: "python", label: "Copy Python", title: "Python that computes the same", run: run("python", "Python") },
    { id: "cli", label: "Copy CLI", title: cli, run: run("cli", "Command") },
  ];
}
