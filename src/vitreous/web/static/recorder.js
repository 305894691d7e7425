// What the server answered in this session, for a page that is saved: bounded, the newest kept.

import { wrap } from "./transport.js";

export const LASTING = 24e6; // characters of answers; of those to a moving pointer a third of it
const PASSING = /^\/api\/(attention\/row|inside\/qk|features\/similarity|erase|rollout)\b/;
const LEFT_OUT = /^\/api\/(jobs\/|images\b|figure|film|snippet|page)|\.npz/;
const ENDS = ["done", "cancelled", "failed"];
export const NOT_HELD = "This saved page holds only what was computed in its session.";

/** The newest entries, as many as fit. */
class Shelf {
  constructor(most) {
    Object.assign(this, { most, size: 0, held: new Map() });
  }

  put(key, value) {
    const size = key.length + (value.body?.length ?? JSON.stringify(value).length);
    if (size > this.most / 2) return;
    this.drop(key);
    this.held.set(key, { value, size });
    this.size += size;
    while (this.size > this.most) this.drop(this.held.keys().next().value);
  }

  drop(key) {
    this.size -= this.held.get(key)?.size ?? 0;
    this.held.delete(key);
  }

  get entries() {
    return [...this.held].map(([key, { value }]) => [key, value]);
  }
}

const answers = new Shelf(LASTING);
const passing = new Shelf(LASTING / 3);
const parts = new Shelf(LASTING / 3); // of jobs
const images = new Set();
const jobs = new Map(); // job: the keys of its parts
let info = null;

export const keyOf = (path, { method = "GET", body = "" } = {}) => `${method} ${path} ${body}`;

/** A job's parts, each of which ends in one event: a map, a curve; of other jobs the whole is one part. */
export function partsOf(path, body, known) {
  const asked = JSON.parse(body || "{}");
  if (path === "/api/explain") {
    const { aimed = [] } = known.models.find((one) => one.name === asked.model) ?? known.models[0];
    return asked.targets.flatMap((target, i) => asked.methods
      .filter(({ name }) => i === 0 || aimed.includes(name))
      .map((one) => JSON.stringify([path, asked.model, asked.image, one, aimed.includes(one.name) ? target : null])));
  }
  if (path === "/api/curves") {
    const { maps, metric, target, random } = asked;
    return maps.map((map) => JSON.stringify([path, map, metric, target, random]));
  }
  return [keyOf(path, { method: "POST", body })];
}

const base64 = (bytes) => {
  let text = "";
  for (let i = 0; i < bytes.length; i += 0x8000) text += String.fromCharCode(...bytes.subarray(i, i + 0x8000));
  return btoa(text);
};

async function noted(path, init, answer) {
  const [kind, shape, extra] = ["Content-Type", "X-Shape", "X-Extra"].map((name) => answer.headers.get(name));
  if (kind?.startsWith("application/json")) {
    const body = await answer.text();
    const told = JSON.parse(body);
    if (path === "/api/info") info = told;
    if (told?.job) return void jobs.set(told.job, partsOf(path, init.body, info));
    return (PASSING.test(path) ? passing : answers).put(keyOf(path, init), { kind, body });
  }
  const body = base64(new Uint8Array(await answer.arrayBuffer()));
  (PASSING.test(path) ? passing : answers).put(keyOf(path, init), { kind, shape, extra, body });
}

let way = null; // to the server

const recording = (before) => ({
  ...before,
  async ask(path, init = {}) {
    const answer = await before.ask(path, init);
    const plain = typeof (init.body ?? "") === "string" && init.method !== "DELETE";
    if (!answer.ok || !plain || LEFT_OUT.test(path)) return answer;
    const done = noted(path, init, answer.clone()).catch(() => {});
    if (answer.status === 202) await done; // the events of the job come next
    return answer;
  },
  listen(path, names, heard, lost) {
    const keys = jobs.get(path.split("/")[3]) ?? [];
    let next = 0;
    return before.listen(path, names, (name, data) => {
      if (!ENDS.includes(name) && !["queued", "progress"].includes(name) && keys[next]) {
        parts.put(keys[next], { name, data });
        if (next < keys.length - 1) next++;
      }
      heard(name, data);
    }, lost);
  },
  source(path) {
    images.delete(path);
    images.add(path);
    return before.source(path);
  },
});

/** Remember from now on. */
export const record = () => wrap((before) => recording((way = before)));

/** What was answered: {info, answers, parts, images}. */
export async function recorded(most = 40) {
  const found = await Promise.all([...images].slice(-most).map(async (path) => {
    const answer = await way.ask(path).catch(() => null);
    if (!answer?.ok) return null;
    const body = base64(new Uint8Array(await answer.arrayBuffer()));
    return [path, `data:${answer.headers.get("Content-Type")};base64,${body}`];
  }));
  return {
    info, answers: [...answers.entries, ...passing.entries], parts: parts.entries, images: found.filter(Boolean),
  };
}
