// Talking to the server: JSON, raw numbers, jobs. Errors are Problems whose message is a sentence for the user.

import * as transport from "./transport.js";

export class Problem extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

async function ask(path, init) {
  let answer;
  try {
    answer = await transport.ask(`/api/${path}`, init);
  } catch {
    throw new Problem(0, "The server does not respond. Is it still running?");
  }
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => ({}));
  throw new Problem(answer.status, told.detail || `The server responded with status ${answer.status}.`);
}

function search(query = {}) {
  const pairs = Object.entries(query).filter(([, value]) => value !== null && value !== undefined);
  return pairs.length ? `?${new URLSearchParams(pairs)}` : "";
}

const sent = (body, method = "POST") =>
  body instanceof FormData
    ? { method, body }
    : { method, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };

export const get = async (path, query) => (await ask(path + search(query))).json();
export const post = async (path, body) => (await ask(path, sent(body))).json();
export const remove = (path) => ask(path, { method: "DELETE" });
export const file = async (path, body, query) => (await ask(path + search(query), body && sent(body))).blob();
/** The path of an image as a model sees it; show() of transport.js puts it into an <img>. */
export const view = (image, model, frame = null) => `/api/images/${image}/view${search({ model, frame })}`;

/** Raw numbers: {buffer, shape, extra}. */
export async function raw(path, query, body) {
  const answer = await ask(path + search(query), body && sent(body));
  const shape = answer.headers.get("X-Shape").split(",").map(Number);
  return { buffer: await answer.arrayBuffer(), shape, extra: Number(answer.headers.get("X-Extra") || 0) };
}

/** Remembers what a question gave, the last `most` of them; a failure is forgotten. */
export function remembered(work, most = 400) {
  const known = new Map();
  return (...given) => {
    const key = JSON.stringify(given);
    if (!known.has(key)) {
      const answer = work(...given);
      answer.catch(() => known.delete(key));
      known.set(key, answer);
      if (known.size > most) known.delete(known.keys().next().value);
    }
    return known.get(key);
  };
}

export const map = remembered(async (id) => new Float32Array((await raw(`maps/${id}`)).buffer));

/** One question at a time; of those that come meanwhile only the last is asked. */
export function latest(work) {
  let busy = false;
  let next = null;
  return async (...given) => {
    next = given;
    if (busy) return;
    busy = true;
    while (next) {
      const now = next;
      next = null;
      await work(...now, () => next !== null).catch(console.warn);
    }
    busy = false;
  };
}

const open = new Set(); // jobs that are not done

addEventListener("pagehide", () => {
  for (const id of open) transport.ask(`/api/jobs/${id}`, { method: "DELETE", keepalive: true });
});

const EVENTS = ["queued", "progress", "answer", "map", "curve", "counterfactual", "inside", "problem", "done", "cancelled", "failed"];

/** How to start a job and listen, on(name, data). The promise `ended` comes true at its end; `cancel` stops it. */
export const job = (path, body) => (on) => {
  let id = null;
  let stream = null;
  let finish;
  let over = false;
  const ended = new Promise((resolve) => (finish = resolve));
  const end = (name, data) => {
    if (over) return;
    over = true;
    open.delete(id);
    stream?.close();
    on(name, data);
    finish(name);
  };
  const stop = () => id && remove(`jobs/${id}`).catch(() => {});
  post(path, body).then(
    (started) => {
      id = started.job;
      if (over) return void stop();
      open.add(id);
      const heard = (name, data) => {
        if (over) return;
        if (["done", "cancelled", "failed"].includes(name)) end(name, data);
        else on(name, data);
      };
      const lost = () => end("failed", { detail: "The connection to the server was lost. Try again." });
      stream = transport.listen(`/api/jobs/${id}/events`, EVENTS, heard, lost);
    },
    (problem) => end("failed", { status: problem.status, detail: problem.message }),
  );
  return {
    ended,
    cancel() {
      stop();
      end("cancelled", {});
    },
  };
};
