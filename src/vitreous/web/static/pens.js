// Two ways to draw the same pieces: onto a canvas for a PNG, and as the elements of an SVG.

const SCALE = 2; // pixels of an image for each of the page
const JPEG = 0.92;

const sheet = (width, height) => Object.assign(document.createElement("canvas"), { width, height });

// ---------------------------------------------------------------------------------------------------------------- PNG

export class CanvasPen {
  constructor(note) {
    this.note = note;
  }

  begin(width, height, ground) {
    this.canvas = sheet(SCALE * width, SCALE * height);
    this.context = this.canvas.getContext("2d");
    this.context.scale(SCALE, SCALE);
    this.context.fillStyle = ground;
    this.context.fillRect(0, 0, width, height);
  }

  shape(path, look, matrix = [1, 0, 0, 1, 0, 0]) {
    const { fill = "none", stroke = "none", width = 1, opacity = 1, fillOpacity = 1, dash = [] } = look;
    const { context } = this;
    const made = new Path2D(path);
    context.save();
    context.transform(...matrix);
    if (fill !== "none") {
      context.globalAlpha = opacity * fillOpacity;
      context.fillStyle = fill;
      context.fill(made);
    }
    if (stroke !== "none") {
      context.globalAlpha = opacity;
      Object.assign(context, { strokeStyle: stroke, lineWidth: width });
      context.setLineDash(dash);
      context.stroke(made);
    }
    context.restore();
  }

  image(node, x, y, width, height, { filter, smooth }) {
    this.context.save();
    put(this.context, node, x, y, width, height, filter, smooth);
    this.context.restore();
  }

  text(words, x, y, width, { style, weight, size, family }, colour) {
    this.context.font = `${style} ${weight} ${size} ${family}`;
    this.context.fillStyle = colour;
    this.context.fillText(words, x, y);
  }

  async finish() {
    const blob = await new Promise((resolve) => this.canvas.toBlob(resolve, "image/png"));
    const mark = { Software: "vitreous", vitreous: marked(this.note), "vitreous view": JSON.stringify(this.note) };
    return noted(new Uint8Array(await blob.arrayBuffer()), mark);
  }
}

function put(context, node, x, y, width, height, filter, smooth) {
  if (filter !== "none" && "filter" in context) context.filter = filter;
  context.imageSmoothingEnabled = smooth;
  context.drawImage(node, x, y, width, height);
}

/** The mark that the library reads in every file of its own. */
const marked = ({ vitreous: version, ...note }) => JSON.stringify({ vitreous: 2, version, ...note });

const HEAD = 33; // bytes of the signature and of the first chunk

/** The PNG with a text, {keyword: words}, in an iTXt chunk each. */
function noted(bytes, note) {
  const chunks = Object.entries(note).map(([keyword, words]) => chunk("iTXt", `${keyword}\0\0\0\0\0${words}`));
  return new Blob([bytes.subarray(0, HEAD), ...chunks, bytes.subarray(HEAD)], { type: "image/png" });
}

function chunk(kind, text) {
  const body = new TextEncoder().encode(kind + text);
  const made = new Uint8Array(body.length + 8);
  const view = new DataView(made.buffer);
  view.setUint32(0, body.length - 4);
  made.set(body, 4);
  view.setUint32(body.length + 4, checksum(body));
  return made;
}

function checksum(bytes) {
  let sum = 0xffffffff;
  for (const byte of bytes) {
    sum ^= byte;
    for (let bit = 0; bit < 8; bit++) sum = (sum >>> 1) ^ (sum & 1 ? 0xedb88320 : 0);
  }
  return (sum ^ 0xffffffff) >>> 0;
}

// ---------------------------------------------------------------------------------------------------------------- SVG

const NAMES = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"';
const RDF = "http://www.w3.org/1999/02/22-rdf-syntax-ns#";
const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const CONTROLS = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g; // XML has none

const safe = (text) => String(text).replace(CONTROLS, "").replace(/[&<>"]/g, (one) => ENTITIES[one]);
const short = (value) => String(Number(value.toFixed(2)));
const attributes = (given) =>
  Object.entries(given).filter(([, value]) => value !== null).map(([key, value]) => ` ${key}="${safe(value)}"`).join("");

export class SvgPen {
  constructor(note) {
    Object.assign(this, { note, held: new Map(), defs: [], parts: [] });
  }

  begin(width, height, ground, words) {
    this.head = `<svg ${NAMES} width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" role="img">` +
      `<title>${safe(words)}</title><metadata><rdf:RDF xmlns:rdf="${RDF}" xmlns:dc="http://purl.org/dc/elements/1.1/">` +
      `<rdf:Description rdf:about=""><dc:creator>vitreous</dc:creator>` +
      `<dc:description>${safe(marked(this.note))}</dc:description></rdf:Description></rdf:RDF></metadata>`;
    this.shape(`M0 0h${width}v${height}h${-width}Z`, { fill: ground });
  }

  shape(path, look, matrix = null) {
    const { fill = "none", stroke = "none", width = 1, opacity = 1, fillOpacity = 1, dash = [] } = look;
    const inner = ink(fill);
    const outer = ink(stroke);
    this.parts.push(`<path${attributes({
      d: path.replace(/-?\d+\.\d{3,}/g, (text) => short(Number(text))),
      transform: matrix && `matrix(${matrix.map(short).join(" ")})`,
      fill: inner.colour, "fill-opacity": seen(inner.alpha * fillOpacity),
      stroke: outer.colour === "none" ? null : outer.colour, "stroke-opacity": seen(outer.alpha),
      "stroke-width": outer.colour === "none" ? null : short(width),
      "stroke-dasharray": dash.length ? dash.join(" ") : null, opacity: seen(opacity),
    })}/>`);
  }

  image(node, x, y, width, height, { filter, smooth }) {
    const { name, wide, high } = this.embedded(node, width, height, filter, smooth);
    const scale = `scale(${width / wide} ${height / high})`;
    this.parts.push(`<use xlink:href="#${name}" transform="translate(${short(x)} ${short(y)}) ${scale}"/>`);
  }

  /** An image once, however often it is drawn: the photo lies below every map. */
  embedded(node, width, height, filter, smooth) {
    const photo = node.tagName === "IMG";
    const own = photo ? [node.naturalWidth, node.naturalHeight] : [node.width, node.height];
    const most = [Math.round(SCALE * width), Math.round(SCALE * height)];
    const [wide, high] = own.map((side, i) => Math.max(1, smooth ? Math.min(side, most[i]) : most[i]));
    const canvas = sheet(wide, high);
    put(canvas.getContext("2d"), node, 0, 0, wide, high, filter, smooth);
    const data = photo ? canvas.toDataURL("image/jpeg", JPEG) : canvas.toDataURL("image/png");
    if (!this.held.has(data)) {
      const name = `image${this.held.size}`;
      this.held.set(data, name);
      this.defs.push(`<image id="${name}" width="${wide}" height="${high}" preserveAspectRatio="none" xlink:href="${data}"/>`);
    }
    return { name: this.held.get(data), wide, high };
  }

  text(words, x, y, width, { style, weight, size, family }, colour) {
    const { colour: fill, alpha } = ink(colour);
    this.parts.push(`<text${attributes({
      x: short(x), y: short(y), fill, "fill-opacity": seen(alpha), "font-size": parseFloat(size),
      "font-family": /mono/i.test(family) ? "monospace" : "sans-serif",
      "font-weight": weight === "400" ? null : weight, "font-style": style === "normal" ? null : style,
      textLength: width > 0 ? short(width) : null, lengthAdjust: width > 0 ? "spacingAndGlyphs" : null,
    })}>${safe(words)}</text>`);
  }

  async finish() {
    const defs = this.defs.length ? `<defs>${this.defs.join("")}</defs>` : "";
    const text = `<?xml version="1.0" encoding="UTF-8"?>\n${this.head}${defs}${this.parts.join("\n")}</svg>\n`;
    return new Blob([text], { type: "image/svg+xml" });
  }
}

const seen = (alpha) => (alpha === 1 ? null : short(alpha));
const known = new Map();

/** Any colour of CSS as #rrggbb and an opacity, which every program reads. */
function ink(colour) {
  if (colour === "none") return { colour, alpha: 1 };
  if (!known.has(colour)) {
    const context = sheet(1, 1).getContext("2d");
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
    const hex = [r, g, b].map((value) => value.toString(16).padStart(2, "0")).join("");
    known.set(colour, { colour: `#${hex}`, alpha: a / 255 });
  }
  return known.get(colour);
}
