// The page in a frame of a notebook: its questions are messages, and its address is kept there.

import { keepIn } from "./state.js";
import { travel } from "./transport.js";

const MOST = 200; // images that are remembered
const NO_BODY = [204, 304];
const open = new Map(); // number of a question: what happens with what is said to it
const images = new Map(); // path: promise of a data address
let port = null;
let address = "";
let moved = () => {};
let last = 0;

function question(told, heard) {
  const number = ++last;
  open.set(number, heard);
  port.postMessage({ ...told, number }, told.body ? [told.body] : []);
  return number;
}

async function ask(path, init = {}) {
  const sent = new Response(init.body); // names the type of a form and its boundary
  const body = init.body ? await sent.arrayBuffer() : null;
  const type = sent.headers.get("Content-Type");
  const headers = { ...(body && type && { "content-type": type }), ...lower(init.headers) };
  return new Promise((resolve) => {
    const number = question({ kind: "ask", path, method: init.method ?? "GET", headers, body }, (told) => {
      open.delete(number);
      const kept = { status: told.status, headers: told.headers };
      resolve(new Response(NO_BODY.includes(told.status) ? null : told.body, kept));
    });
  });
}

const lower = (headers = {}) => Object.fromEntries(Object.entries(headers).map(([key, value]) => [key.toLowerCase(), value]));

function listen(path, names, heard, lost) {
  const number = question({ kind: "listen", path }, (told) => {
    if (told.kind === "event") return names.includes(told.name) && heard(told.name, told.data);
    open.delete(number);
    lost();
  });
  return {
    close() {
      if (open.delete(number)) port.postMessage({ kind: "stop", number });
    },
  };
}

async function read(path) {
  const answer = await ask(path);
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  const blob = await answer.blob();
  return new Promise((resolve) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.readAsDataURL(blob);
  });
}

/** An image as a data address. */
function source(path) {
  if (!images.has(path)) {
    const found = read(path);
    found.catch(() => images.delete(path));
    images.set(path, found);
    if (images.size > MOST) images.delete(images.keys().next().value);
  }
  return images.get(path);
}

const theme = (dark) => (document.documentElement.dataset.theme = dark ? "dark" : "light");

function heard({ data: told }) {
  if (told.kind === "theme") theme(told.dark);
  else if (told.kind === "address") {
    if (told.address === address) return;
    address = told.address;
    moved();
  } else open.get(told.number)?.(told);
}

const keeper = {
  read: () => address,
  write(hash) {
    address = hash;
    port.postMessage({ kind: "address", address });
  },
  onBack: (back) => (moved = back),
};

/** The notebook gives the channel, once; nobody else is heard. */
function begin(event) {
  if (event.source !== parent || !event.ports.length) return;
  removeEventListener("message", begin);
  [port] = event.ports;
  port.onmessage = heard;
  address = event.data.address;
  theme(event.data.dark);
  document.body.classList.add("framed");
  document.body.classList.toggle("recorded", event.data.recorded);
  travel({ ask, listen, source });
  keepIn(keeper);
  import("./app.js");
}

addEventListener("message", begin);
parent.postMessage("vitreous", "*");
