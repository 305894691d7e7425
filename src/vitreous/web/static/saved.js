// A saved page: the answers of its session instead of a server.

import { keyOf, NOT_HELD, partsOf } from "./recorder.js";
import { keepIn } from "./state.js";
import { travel } from "./transport.js";
import { el } from "./ui.js";
import { world } from "./world.js";

const session = JSON.parse(document.getElementById("session").textContent);
const about = JSON.parse(document.getElementById("about").textContent);
const answers = new Map(session.answers);
const parts = new Map(session.parts);
const images = new Map(session.images);
const jobs = []; // the parts of each that was asked for

const json = (status, told) =>
  new Response(JSON.stringify(told), { status, headers: { "Content-Type": "application/json" } });
const missing = () => json(404, { detail: NOT_HELD });

function answered({ kind, body, shape, extra }) {
  if (kind.startsWith("application/json")) return new Response(body, { headers: { "Content-Type": kind } });
  const headers = { "Content-Type": kind, ...(shape && { "X-Shape": shape }), ...(extra && { "X-Extra": extra }) };
  return new Response(Uint8Array.from(atob(body), (one) => one.charCodeAt(0)), { headers });
}

/** A job whose parts are held, or some of them. */
function started(path, body) {
  const keys = partsOf(path, body, session.info);
  if (!keys.some((key) => parts.has(key))) return missing();
  return json(202, { job: String(jobs.push(keys) - 1) });
}

const asString = (body) => (typeof body === "string" ? body : "");

travel({
  still: true,
  async ask(path, init = {}) {
    if (init.method === "DELETE") return path.startsWith("/api/jobs/") ? new Response(null, { status: 204 }) : missing();
    const held = answers.get(keyOf(path, { ...init, body: asString(init.body) }));
    if (held) return answered(held);
    return init.method === "POST" && typeof init.body === "string" ? started(path, init.body) : missing();
  },
  listen(path, names, heard) {
    const keys = jobs[path.split("/")[3]];
    let open = true;
    queueMicrotask(() => {
      for (const key of keys) {
        const { name, data } = parts.get(key) ?? { name: "problem", data: { status: 404, detail: NOT_HELD } };
        if (open) heard(name, data);
      }
      if (open) heard("done", { seconds: 0 });
    });
    return { close: () => (open = false) };
  },
  source: (path) => images.get(path) ?? Promise.reject(new Error(NOT_HELD)),
});

let place = session.address;
keepIn({
  read: () => place,
  write: (hash) => (place = hash),
  onBack: () => {},
});
for (const [id, name] of session.files) world.files.set(id, name);

/** When, by what and from which weights; how to open it live. */
function told() {
  const models = session.info.models.map(({ name }) => [name, about.models[name]]).filter(([, one]) => one);
  const rows = [
    ["Saved", `${session.date}, by vitreous ${about.version}`],
    ...models.flatMap(([name, { weights, serve }]) => [[name, weights], ["Open it live", el("code", `${serve}`)]]),
    ["View", el("code", session.address || "#")],
  ];
  return el("details.saved",
    el("summary", `A page saved on ${session.date.slice(0, 10)}. ${NOT_HELD}`),
    el("dl", rows.flatMap(([term, value]) => [el("dt.quiet", term), el("dd", value)])));
}

document.getElementById("stage").prepend(told());
import("./app.js");
