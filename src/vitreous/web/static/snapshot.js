// The view of a tab as an image: photos, maps, charts and words as they are drawn, without the controls.

const SCALE = 2; // pixels of the image for each of the page
const EDGE = 16;
const LEFT_OUT =
  "button:not(.thumb, .name), select, input, .field, .toggle, .segments, .progress, .hair, .badge, form, title";

/** A PNG of an element, with words below it and a note in the file of where it comes from. */
export async function snapshot(node, words, note) {
  const pieces = [...gather(node)];
  const boxes = pieces.map(({ box }) => box);
  const left = Math.min(...boxes.map((box) => box.left)) - EDGE;
  const top = Math.min(...boxes.map((box) => box.top)) - EDGE;
  const width = Math.max(...boxes.map((box) => box.right)) - left + EDGE;
  const height = Math.max(...boxes.map((box) => box.bottom)) - top + EDGE + 20;
  const canvas = Object.assign(document.createElement("canvas"), { width: SCALE * width, height: SCALE * height });
  const context = canvas.getContext("2d");
  context.scale(SCALE, SCALE);
  context.fillStyle = getComputedStyle(document.body).backgroundColor;
  context.fillRect(0, 0, width, height);
  for (const { box, draw } of pieces) {
    context.save();
    draw(context, box.left - left, box.top - top, box.width, box.height);
    context.restore();
  }
  context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  context.fillStyle = getComputedStyle(document.body).color;
  context.fillText(words, EDGE, height - 12);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  return noted(new Uint8Array(await blob.arrayBuffer()), note);
}

/** What there is to draw, from back to front: {box, draw(context, x, y, width, height)}. */
function* gather(node) {
  if (node.nodeType === Node.TEXT_NODE) return void (yield* lines(node));
  if (node.nodeType !== Node.ELEMENT_NODE || node.matches(LEFT_OUT)) return;
  const style = getComputedStyle(node);
  const box = node.getBoundingClientRect();
  if (style.display === "none" || style.visibility === "hidden") return;
  if (node.tagName === "IMG" || node.tagName === "CANVAS") return void (yield raster(node, style, box));
  if (node instanceof SVGElement && node.tagName !== "text") yield* shape(node, style);
  else if (box.width && box.height && !/^(transparent|rgba\(.*, 0\))$/.test(style.backgroundColor)) {
    yield { box, draw: (context, ...at) => {
      context.fillStyle = style.backgroundColor;
      context.fillRect(...at);
    } };
  }
  for (const child of node.childNodes) yield* gather(child);
}

function raster(node, style, box) {
  return { box, draw: (context, ...at) => {
    if (node.tagName === "IMG" && !node.naturalWidth) return;
    if (style.filter !== "none" && "filter" in context) context.filter = style.filter;
    context.imageSmoothingEnabled = style.imageRendering !== "pixelated";
    context.drawImage(node, ...at);
  } };
}

function* shape(node, style) {
  const get = (name) => Number(node.getAttribute(name));
  const outline = {
    line: () => new Path2D(`M${get("x1")} ${get("y1")}L${get("x2")} ${get("y2")}`),
    rect: () => new Path2D(`M${get("x")} ${get("y")}h${get("width")}v${get("height")}h${-get("width")}Z`),
    path: () => new Path2D(node.getAttribute("d")),
    circle: () => {
      const made = new Path2D();
      made.arc(get("cx"), get("cy"), get("r"), 0, 2 * Math.PI);
      return made;
    },
  }[node.tagName];
  if (!outline) return;
  const { left, top, right, bottom, width, height } = node.ownerSVGElement.getBoundingClientRect();
  yield { box: { left, top, right, bottom, width, height }, draw: (context, x, y) => {
    context.translate(x, y);
    context.globalAlpha = Number(style.opacity);
    if (style.fill !== "none") {
      context.fillStyle = style.fill;
      context.fill(outline());
    }
    if (style.stroke === "none") return;
    context.strokeStyle = style.stroke;
    context.lineWidth = parseFloat(style.strokeWidth);
    context.setLineDash((style.strokeDasharray.match(/[\d.]+/g) ?? []).map(Number));
    context.stroke(outline());
  } };
}

/** The words of a text, line by line as the page breaks them. */
function* lines(text) {
  const range = document.createRange();
  const found = [];
  for (const { 0: word, index } of text.data.matchAll(/\S+/g)) {
    range.setStart(text, index);
    range.setEnd(text, index + word.length);
    const box = range.getBoundingClientRect();
    if (!box.width) continue;
    const last = found.at(-1);
    if (last && Math.abs(last.box.top - box.top) < 3) {
      last.words += ` ${word}`;
      last.box = new DOMRect(last.box.left, last.box.top, box.right - last.box.left, box.height);
    } else found.push({ words: word, box });
  }
  const parent = text.parentElement;
  const style = getComputedStyle(parent);
  for (const { words, box } of found) {
    yield { box, draw: (context, x, y, _, height) => {
      context.font = `${style.fontStyle} ${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
      context.fillStyle = parent instanceof SVGElement ? style.fill : style.color;
      const { fontBoundingBoxAscent: up, fontBoundingBoxDescent: down } = context.measureText(words);
      context.fillText(words, x, y + (height + up - down) / 2);
    } };
  }
}

// ------------------------------------------------------------------------------------------------- notes within a PNG

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
