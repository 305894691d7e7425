// Several images at once: files, folders and drops become images of the server, refused ones are named.

import * as api from "./api.js";
import { el, problem } from "./ui.js";
import { world } from "./world.js";

const AT_A_TIME = 2;
const NAMED = 5; // refused files that a sentence names
const PICTURE = /\.(jpe?g|png|webp|gif|bmp|tiff?|npy|npz)$/i;

/** All files of a drop, those in its folders too. */
export async function dropped(transfer) {
  const entries = [...transfer.items].map((one) => one.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.some((one) => one.isDirectory)) return [...transfer.files];
  return (await Promise.all(entries.map(within))).flat();
}

async function within(entry) {
  if (entry.isFile) return [await new Promise((resolve, reject) => entry.file(resolve, reject))];
  const reader = entry.createReader();
  const found = [];
  for (;;) {
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!some.length) break; // a reader gives a hundred at a time
    found.push(...some);
  }
  return (await Promise.all(found.map(within))).flat();
}

const plain = (name) => !name.startsWith(".") && !/^(Thumbs\.db|desktop\.ini)$/i.test(name);

/** What there is to send, by name, images first; hidden files are nobody's images. */
function ordered(files) {
  const kept = files.filter((one) => plain(one.name));
  const path = (one) => one.webkitRelativePath || one.name;
  const order = (a, b) => PICTURE.test(b.name) - PICTURE.test(a.name) || path(a).localeCompare(path(b), "en", { numeric: true });
  return kept.length > 1 ? kept.sort(order) : kept;
}

/** Where uploads tell how far they are; `send(files, room)` gives the ids of those that the server took. */
export function uploads() {
  const bar = el("progress", { max: 1, value: 0, "aria-label": "uploads" });
  const words = el("span");
  const line = el("p.sending", { hidden: true }, bar, words);
  const said = el("div");
  const node = el("div", line, said);

  node.send = async (files, room) => {
    const all = ordered(files);
    const most = world.info.limits.sheet;
    const taken = all.slice(0, room);
    const refused = [];
    const ids = new Array(taken.length).fill(null);
    let next = 0;
    let done = 0;
    const show = () => {
      words.textContent = `${done} of ${taken.length} images uploaded …`;
      bar.value = done / taken.length;
    };
    line.hidden = taken.length === 0;
    show();
    await Promise.all(Array.from({ length: AT_A_TIME }, async () => {
      while (next < taken.length) {
        const mine = next++;
        await sent(taken[mine]).then((id) => (ids[mine] = id), (error) => refused.push(reason(taken[mine], error)));
        done += 1;
        show();
      }
    }));
    line.hidden = true;
    const left = all.length - taken.length;
    const parts = [told(refused, taken.length), left > 0 && `${left} more did not fit: a comparison has at most ${most} images.`];
    said.replaceChildren(...parts.filter(Boolean).map((one) => problem(one)));
    return [...new Set(ids.filter(Boolean))];
  };
  return node;
}

async function sent(file) {
  const { upload_bytes: most } = world.info.limits;
  if (file.size > most) throw new api.Problem(413, `larger than ${most / 1e6} MB`);
  const form = new FormData();
  form.append("file", file, file.name);
  const { id, name } = await api.post("images", form);
  world.files.set(id, name);
  return id;
}

const reason = (file, { message }) => (message.startsWith(file.name) ? message : `${file.name}: ${message}`);

function told(refused, count) {
  if (!refused.length) return null;
  const more = refused.length > NAMED ? `; and ${refused.length - NAMED} more` : "";
  const one = refused.length === 1;
  return `${refused.length} of ${count} ${count === 1 ? "file" : "files"} ${one ? "was" : "were"} refused (${refused.slice(0, NAMED).join("; ")}${more}).`;
}
