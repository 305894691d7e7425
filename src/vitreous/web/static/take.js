// Taking results away: all maps of a view, the view as it is drawn, its numbers.

import * as api from "./api.js";
import { nameOfPhoto } from "./rail.js";
import { snapshot } from "./snapshot.js";
import { state } from "./state.js";
import { byId, save, toast } from "./ui.js";
import { model, world } from "./world.js";

const named = (ending) => `${nameOfPhoto().replace(/\.\w+$/, "")}-${state.tab}.${ending}`;

/** The view as it is drawn; what made it stands in the file. */
export const drawn = {
  id: "png", label: "PNG", title: "This view as it is drawn",
  async run() {
    const about = { model: model().name, image: nameOfPhoto(), view: location.hash, vitreous: world.info.version };
    const words = `${about.image} · ${about.model} · vitreous ${about.vitreous}`;
    save(await snapshot(byId(state.tab), words, { Software: "vitreous", "vitreous view": JSON.stringify(about) }),
      named("png"));
  },
};

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

function csv(rows) {
  const field = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => `${row.map(field).join(",")}\r\n`).join("");
}

export const whose = () => [model().name, nameOfPhoto()];
