// A photo with some patches gone: filled with its mean colour, blurred, or cut out.

import { stepOf } from "./moment.js";
import { show } from "./transport.js";
import { el } from "./ui.js";
import { model } from "./world.js";

const SIDE = 448;

export class Holes {
  constructor(photo, grid, size) {
    this.grid = grid;
    this.canvas = el("canvas", { width: SIDE, height: Math.round((SIDE * size[0]) / size[1]) });
    this.node = el("div.map.holes", { role: "img" }, this.canvas);
    this.image = new Image();
    this.image.onload = () => {
      this.colour = this.soft = null;
      this.draw();
    };
    show(this.image, photo);
    this.gone = new Set();
    this.way = "cut";
  }

  /** How many patches lie in the tubelets before the one that is shown. */
  get before() {
    return model().frames ? Math.max(0, stepOf(model().times)) * this.grid[0] * this.grid[1] : 0;
  }

  /** How many patches there are; of a clip, in all its tubelets. */
  get whole() {
    return this.grid[0] * this.grid[1] * (model().times.length || 1);
  }

  /** Another frame of a clip. */
  turn(photo) {
    show(this.image, photo);
  }

  show(gone, way) {
    Object.assign(this, { gone: new Set(gone), way });
    this.node.ariaLabel = `image without ${this.gone.size} of ${this.whole} patches`;
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
    });
  }

  draw() {
    if (!this.image.complete || !this.image.naturalWidth) return;
    const { canvas, grid: [h, w] } = this;
    const context = canvas.getContext("2d");
    context.drawImage(this.image, 0, 0, canvas.width, canvas.height);
    const edge = (i, n, side) => Math.round((i * side) / n);
    for (const number of this.gone) {
      const patch = number - this.before;
      if (patch < 0 || patch >= h * w) continue; // of another tubelet
      const [row, column] = [Math.floor(patch / w), patch % w];
      const [x, y] = [edge(column, w, canvas.width), edge(row, h, canvas.height)];
      const box = [x, y, edge(column + 1, w, canvas.width) - x, edge(row + 1, h, canvas.height) - y];
      if (this.way === "cut") context.clearRect(...box);
      else if (this.way === "blur") context.drawImage(this.blurred, ...box, ...box);
      else {
        context.fillStyle = this.mean;
        context.fillRect(...box);
      }
    }
  }

  get mean() {
    if (!this.colour) {
      const one = el("canvas", { width: 32, height: 32 }).getContext("2d");
      one.drawImage(this.image, 0, 0, 32, 32);
      const { data } = one.getImageData(0, 0, 32, 32);
      const mean = [0, 1, 2].map((c) => data.filter((_, i) => i % 4 === c).reduce((a, b) => a + b, 0) / 1024);
      this.colour = `rgb(${mean.map(Math.round).join()})`;
    }
    return this.colour;
  }

  get blurred() {
    if (!this.soft) {
      const { width, height } = this.canvas;
      const small = el("canvas", { width: 12, height: 12 });
      small.getContext("2d").drawImage(this.image, 0, 0, 12, 12);
      this.soft = el("canvas", { width, height });
      this.soft.getContext("2d").drawImage(small, 0, 0, width, height);
    }
    return this.soft;
  }
}
