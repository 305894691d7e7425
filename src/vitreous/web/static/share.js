// What can be taken away from every tab: a link, a link with the photo in it, and the page itself.

import * as api from "./api.js";
import { nameOfPhoto } from "./rail.js";
import { recorded } from "./recorder.js";
import { address } from "./state.js";
import { copied } from "./take.js";
import { still } from "./transport.js";
import { byId, el, problem, save, toast } from "./ui.js";
import { photo, world } from "./world.js";

const CARRIED = "photo"; // the key of an image within an address
const MOST = 64_000; // bytes of an image within an address
const LONGEST = 96_000; // characters of base64 that are accepted
const KINDS = { webp: "image/webp", jpeg: "image/jpeg" };
const here = () => location.href.split("#")[0];

// ------------------------------------------------------------------------------------------------- a link with a photo

const canvasBlob = (canvas, kind, quality) => new Promise((resolve) => canvas.toBlob(resolve, kind, quality));

/** What the model sees of the image, small enough for an address. */
async function reduced() {
  const seen = await createImageBitmap(await api.file(photo().slice("/api/".length)));
  for (const side of [512, 384, 256, 192]) {
    const scale = Math.min(1, side / Math.max(seen.width, seen.height));
    const size = { width: Math.round(seen.width * scale), height: Math.round(seen.height * scale) };
    const canvas = Object.assign(document.createElement("canvas"), size);
    canvas.getContext("2d").drawImage(seen, 0, 0, size.width, size.height);
    for (const quality of [0.9, 0.75, 0.5]) {
      for (const kind of Object.values(KINDS)) {
        const blob = await canvasBlob(canvas, kind, quality);
        if (blob?.type === kind && blob.size <= MOST) return blob;
      }
    }
  }
  throw new Error("This image cannot be made small enough for a link.");
}

async function encoded(blob) {
  const bytes = new Uint8Array(await blob.arrayBuffer());
  const text = btoa(Array.from(bytes, (one) => String.fromCharCode(one)).join(""));
  const kind = Object.keys(KINDS).find((one) => KINDS[one] === blob.type);
  return `${kind}.${text.replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "")}`;
}

function decoded(text) {
  const [kind, body] = text.split(".");
  if (text.length > LONGEST || !(kind in KINDS) || !/^[\w-]+$/.test(body ?? "")) throw new Error("damaged");
  const bytes = Uint8Array.from(atob(body.replaceAll("-", "+").replaceAll("_", "/")), (one) => one.charCodeAt(0));
  return new File([bytes], `link.${kind}`, { type: KINDS[kind] });
}

/** Take the photo out of the address, now; what is returned sends it to the server and gives its id. */
export function arrive() {
  const told = new URLSearchParams(still() ? "" : location.hash.slice(1));
  const text = told.get(CARRIED);
  if (text === null) return async () => null;
  told.delete(CARRIED);
  history.replaceState(null, "", `#${told}`);
  return async () => {
    try {
      const form = new FormData();
      const file = decoded(text);
      await createImageBitmap(file);
      form.append("file", file, `${told.get("name") ?? "image"}.${file.type.slice(6)}`);
      const { id, name } = await api.post("images", form);
      world.files.set(id, name);
      return id;
    } catch {
      byId("stage").prepend(problem("The image in this link is damaged, so it cannot be shown; ask for the link again."));
      return null;
    }
  };
}

/** Said when a photo came with the link. */
export const arrived = () => el("p.quiet", { role: "status" },
  "The image came with the link, reduced to what the model sees: its maps differ slightly from those of the original.");

// ------------------------------------------------------------------------------------------------------ the whole page

/** The page as one file: its modules, and what was answered in this session. */
async function page() {
  const [shell, held] = await Promise.all([api.file("page").then((blob) => blob.text()), recorded()]);
  const told = { ...held, address: address(), date: new Date().toISOString().slice(0, 16).replace("T", " "),
    files: [...world.files] };
  const [empty, ...rest] = [">null</script>", JSON.stringify(told).replaceAll("<", "\\u003c")];
  const name = `${nameOfPhoto().replace(/\.\w+$/, "")}-vitreous.html`;
  save(new Blob([shell.replace(empty, () => `>${rest[0]}</script>`)], { type: "text/html" }), name);
}

const live = (run) => () => (still() ? toast("This works on the live page only.") : run());

export const shared = [
  {
    id: "page", label: "Save page", run: live(page),
    title: "One HTML file with the views of this session, about 40 MB at most; it opens without a server",
  },
  {
    id: "link", label: "Copy link", title: "The address of this view",
    run: live(() => copied(here() + (address() || "#"), "Link", "Link copied.")),
  },
  {
    id: "link-image", label: "Copy link with the image",
    title: "The image travels in the address, reduced to what the model sees and 64 KB",
    run: live(async () => {
      const blob = await reduced();
      const hash = address().replace(/(^#|&)image=[^&]*/, "$1").replace("#&", "#").replace("&&", "&");
      const name = new URLSearchParams({ name: nameOfPhoto().replace(/\.\w+$/, "") });
      const long = `${here()}${hash || "#"}&${name}&${CARRIED}=${await encoded(blob)}`;
      await copied(long, "Link", `Link copied, with the image reduced to ${Math.ceil(blob.size / 1000)} KB.`);
    }),
  },
];
