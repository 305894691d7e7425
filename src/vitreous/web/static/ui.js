// Small helpers for elements, numbers and messages.

/** An element, "name.class.class", with properties (names with a dash are attributes) and children. */
export function el(name, ...given) {
  const [kind, ...classes] = name.split(".");
  const node = document.createElement(kind);
  if (classes.length) node.className = classes.join(" ");
  const properties = given[0]?.constructor === Object ? given.shift() : {};
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key.includes("-") || key === "role" || key === "list") node.setAttribute(key, value);
    else node[key] = value;
  }
  node.append(...given.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(name, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value);
  }
  node.append(...children.flat());
  return node;
}

export const byId = (id) => document.getElementById(id);
export const link = (label, onclick, more = {}) => button(label, onclick, { className: "link", ...more });
export const button = (label, onclick, more = {}) => el("button", { type: "button", onclick, ...more }, label);

/** Three figures, a true minus. */
export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const far = size >= 1000 || size < 0.001;
  const text = far ? value.toExponential(1) : String(Number(value.toPrecision(size < 0.1 ? 2 : 3)));
  return text.replace("e+", "e").replaceAll("-", "−");
}

export function percent(value) {
  if (value === null || value === undefined) return "–";
  const share = 100 * value;
  return `${share >= 9.95 || share === 0 ? share.toFixed(0) : share >= 0.1 ? share.toFixed(1) : "<0.1"}%`;
}

export function seconds(value) {
  if (value < 1) return `${Math.max(0.1, value).toFixed(1)} s`;
  return value < 90 ? `${Math.round(value)} s` : `${Math.round(value / 60)} min`;
}

/** A labelled control in one line. */
export const field = (label, control, value = null) => el("label.field", el("span", label), control, value);

export function slider(label, { value, min = 0, max = 100, step = 1, unit = "%" }, heard) {
  const shown = el("output", `${value}${unit}`);
  const input = el("input", { type: "range", min, max, step, value });
  input.addEventListener("input", () => {
    shown.textContent = `${input.value}${unit}`;
    heard(Number(input.value));
  });
  const node = field(label, input, shown);
  node.show = (now) => {
    input.value = now;
    shown.textContent = `${now}${unit}`;
  };
  return node;
}

export function choice(label, options, value, heard) {
  const select = el("select", { onchange: () => heard(select.value) });
  const node = field(label, select);
  node.show = (now, given = options) => {
    const pairs = given.map((one) => (Array.isArray(one) ? one : [one, one]));
    select.replaceChildren(...pairs.map(([key, text]) => el("option", { value: key }, text)));
    select.value = now;
  };
  node.show(value);
  return node;
}

export function toggle(label, checked, heard) {
  const input = el("input", { type: "checkbox", checked, onchange: () => heard(input.checked) });
  const node = el("label.toggle", input, label);
  node.show = (now) => (input.checked = now);
  return node;
}

/** One of a few, as a row of buttons. */
export function segments(label, options, value, heard) {
  const node = el("div.segments", { role: "group", "aria-label": label });
  const parts = options.map(([key, text]) => button(text, () => heard(key)));
  node.append(...parts);
  node.show = (now) => parts.forEach((part, i) => (part.ariaPressed = String(options[i][0] === now)));
  node.show(value);
  return node;
}

/** Words where something went wrong, and a way to try again unless that cannot help. */
export function problem(told, again = null) {
  const words = typeof told === "string" ? told : (told.detail ?? told.message);
  const hopeless = [404, 415, 422].includes(told.status);
  return el("p.problem", { role: "alert" }, words, again && !hopeless && link("Try again", again));
}

const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

/** Rows and columns that an arrow key asks for; the page does not scroll then. */
export function arrow(event) {
  const move = event.ctrlKey || event.metaKey || event.altKey ? null : MOVES[event.key];
  if (move) event.preventDefault();
  return move;
}

export const between = (least, value, most) => Math.min(most, Math.max(least, value));

/** The patch so many rows and columns further. */
export function beside(patch, [down, across], [h, w]) {
  return between(0, Math.floor(patch / w) + down, h - 1) * w + between(0, (patch % w) + across, w - 1);
}

/** The patch under the pointer. */
export function under({ clientX, clientY }, node, [h, w]) {
  const box = node.getBoundingClientRect();
  const row = between(0, Math.floor(((clientY - box.top) / box.height) * h), h - 1);
  return row * w + between(0, Math.floor(((clientX - box.left) / box.width) * w), w - 1);
}

/** Put a frame around a patch. */
export function frame(node, patch, [h, w]) {
  node.hidden = patch === null || patch >= h * w;
  if (node.hidden) return;
  const [width, height] = [100 / w, 100 / h];
  const box = { left: (patch % w) * width, top: Math.floor(patch / w) * height, width, height };
  for (const [side, share] of Object.entries(box)) node.style[side] = `${share}%`;
}

export const placeOf = (patch, [, w]) => `row ${Math.floor(patch / w) + 1}, column ${(patch % w) + 1}`;

/** Read aloud, not shown. */
export const announce = (text) => (byId("live").textContent = text);

let leaving = 0;

/** A short word at the bottom. */
export function toast(text) {
  const node = byId("toast");
  node.textContent = text;
  node.hidden = false;
  clearTimeout(leaving);
  leaving = setTimeout(() => (node.hidden = true), 4000);
}

const ENDS = { done: "Done.", cancelled: "Cancelled.", failed: "It failed." };
const queued = ({ place, seconds_left: left }) =>
  `${place} ahead in the queue${left ? `, about ${seconds(left)} to wait` : ""}`;

let current = null; // the bar whose job runs: a page has one job at a time

/** End the job of this page, whatever it is: the question is no longer asked. */
export const leave = () => current?.leave();
/** End it unless it is that of one of these panels. */
export const leaveOthers = (panels) => panels.includes(current?.closest("section")?.id) || leave();

/** A bar with what is done and what is left; it comes after 300 ms and has a button that ends the work. */
export function progress() {
  const bar = el("progress", { max: 1, value: 0, "aria-label": "progress" });
  const words = el("span");
  const node = el("div.progress", { hidden: true }, bar, words, button("Cancel", () => running?.cancel()));
  let running = null;
  let tell = null;
  let timer = 0;
  const show = ({ what, done, total, seconds_left: left, step, steps }) => {
    const many = steps > 1 ? `${step} of ${steps}: ` : "";
    words.textContent = `${many}${what}${total > 1 ? ` ${done}/${total}` : ""}${left ? `, ${seconds(left)} left` : ""}`;
    bar.value = steps ? (step - 1 + done / total) / steps : done / total;
  };
  /**
   * Do one job, after the one before was ended, here or in another tab: heard(name, data); the last name is done,
   * cancelled, failed, or left if another question took its place.
   */
  node.run = (start, heard) => {
    node.stop();
    leave();
    current = node;
    tell = heard;
    words.textContent = "waiting for the server …";
    bar.value = 0;
    timer = setTimeout(() => {
      node.hidden = false;
      announce("The model is computing.");
    }, 300);
    const mine = start((name, told) => {
      if (running !== mine) return;
      if (name === "queued") words.textContent = queued(told);
      else if (name === "progress") show(told);
      else {
        if (["done", "cancelled", "failed"].includes(name)) {
          if (!node.hidden) announce(ENDS[name]);
          clear();
        }
        heard(name, told);
      }
    });
    running = mine;
  };
  const clear = () => {
    clearTimeout(timer);
    node.hidden = true;
    running = null;
    if (current === node) current = null;
  };
  /** End it without a word. */
  node.stop = () => {
    const old = running;
    clear();
    old?.cancel();
  };
  node.leave = () => {
    node.stop();
    tell("left", {});
  };
  node.ended = () => running?.ended;
  return node;
}

export function save(blob, name) {
  const link = el("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Files that are dropped on a place. */
export function droppable(node, heard) {
  node.addEventListener("dragover", (event) => {
    event.preventDefault();
    node.classList.add("over");
  });
  node.addEventListener("dragleave", () => node.classList.remove("over"));
  node.addEventListener("drop", (event) => {
    event.preventDefault();
    event.stopPropagation();
    node.classList.remove("over");
    if (event.dataTransfer.files.length) heard([...event.dataTransfer.files]);
  });
}
