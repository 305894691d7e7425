// The scrubber of a clip, which moves all maps and the photo together, and every map of it at a glance.

import * as api from "./api.js";
import { thumb, turnViews } from "./draw.js";
import { asks } from "./help.js";
import { onTurn, slice, spoken, stepOf, turn } from "./moment.js";
import { set, state } from "./state.js";
import { show as load } from "./transport.js";
import { between, button, byId, el, percent } from "./ui.js";
import { here, model, photo } from "./world.js";

const PACE = 160; // milliseconds of a frame, as in the films that are saved
const CALM = 640; // … for readers who want less motion
const slide = el("input", { type: "range", min: 0, step: 1, id: "frame", "aria-label": "Frame" });
const play = button("Play", () => (timer ? pause() : start()), { id: "play", ariaLabel: "Play the clip" });
const words = el("p.told");
const strip = el("div.moments", { role: "group", "aria-label": "All maps of the clip" });
const about = el("p.quiet");
const told = api.remembered((image, name) => api.get(`images/${image}/clip`, { model: name }));
let timer = 0;
let loaded = []; // the frames, held so that none is asked for twice
let place = "";
let clip = null; // what the server says of it
let shown = null; // the map whose parts are listed

export function begin() {
  byId("clip").append(el("div.scrubber", play, slide, words, asks("video")), about, strip);
  slide.addEventListener("input", () => go(Number(slide.value)));
  slide.addEventListener("keydown", (event) => {
    if (event.key !== " ") return;
    event.preventDefault();
    play.click();
  });
  document.addEventListener("visibilitychange", () => document.hidden && pause());
  onTurn(() => turnViews(photo()));
  onTurn(mark);
}

/** Show the scrubber where the model takes videos; `state.frame` may have changed. */
export function update() {
  const { frames, name } = model();
  byId("clip").hidden = !frames;
  if (!frames) return pause();
  state.frame = between(0, Math.trunc(state.frame), frames - 1);
  slide.max = frames - 1;
  const now = JSON.stringify(here());
  if (now !== place) {
    pause();
    [place, clip, shown] = [now, null, null];
    strip.replaceChildren();
    about.replaceChildren();
    loaded = Array.from({ length: frames }, (_, frame) => {
      const image = new Image();
      load(image, api.view(state.image, name, frame));
      return image;
    });
    told(state.image, name).then((found) => {
      if (now !== place) return;
      clip = found;
      mark();
    }, () => {});
  }
  turn();
}

/** Another frame, by hand. */
function go(frame) {
  pause();
  set({ frame }, true);
}

function start() {
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  play.textContent = "Pause";
  play.ariaLabel = "Pause the clip";
  timer = setInterval(() => {
    state.frame = (state.frame + 1) % model().frames; // to the address when it stops
    turn();
  }, calm ? CALM : PACE);
}

function pause() {
  if (!timer) return;
  clearInterval(timer);
  timer = 0;
  play.textContent = "Play";
  play.ariaLabel = "Play the clip";
  const { frame } = state;
  state.frame = null;
  set({ frame }, true);
}

/** What is shown now, in words, and which of the maps it is. */
function mark() {
  const { frames, times } = model();
  const { frame } = state;
  if (frame === null || !frames) return;
  slide.value = frame;
  const tubelet = stepOf(times);
  const parts = [`Frame ${frame + 1} of ${frames}`];
  if (times.length && times.length < frames) {
    parts.push(tubelet < 0 ? "in no tubelet" : `tubelet ${tubelet + 1} of ${times.length} (${spoken(times[tubelet])})`);
  }
  if (clip && clip.count !== frames) parts.push(`frame ${clip.picked[frame] + 1} of ${clip.count} in the clip`);
  words.textContent = parts.join(" · ");
  slide.ariaValueText = parts.join(", ");
  const step = shown ? stepOf(shown.meta.times) : -1;
  [...strip.children].forEach((one, i) => {
    if (one.ariaPressed !== String(i === step)) one.ariaPressed = String(i === step);
  });
  const chosen = strip.children[step];
  if (!chosen || strip.scrollWidth <= strip.clientWidth) return;
  strip.scrollLeft = chosen.offsetLeft - strip.offsetLeft - strip.clientWidth / 2;
}

/** List the parts of a map, each with its share of the sum of all absolute values. */
export function list(view) {
  if (view?.meta?.shape.length !== 3 || view === shown) return;
  shown = view;
  const { all, meta } = view;
  const parts = meta.times.map((_, step) => slice(all, meta.shape, step));
  const sums = parts.map((part) => part.reduce((sum, v) => sum + Math.abs(v), 0));
  const whole = sums.reduce((a, b) => a + b, 0) || 1;
  const kind = meta.times.some(([start, end]) => end - start > 1) ? "tubelet" : "frame";
  about.replaceChildren(el("b", view.name), `: the share of each ${kind} in the whole map (sum of absolute values)`);
  strip.replaceChildren(...parts.map((part, step) => {
    const canvas = el("canvas");
    thumb(canvas, part, meta.shape.slice(-2), meta.limits, meta.signed);
    const share = percent(sums[step] / whole);
    const span = spoken(meta.times[step]);
    return button([canvas, el("span", span.replace(/^frames? /, "")), el("small", share)],
      () => go(meta.times[step][0]), { className: "moment", title: `${span}: ${share}`, ariaLabel: `${span}: ${share} of the map` });
  }));
  mark();
}

/** List it again, where its values are others. */
export function relist(view) {
  if (view === shown) shown = null;
  list(view);
}
