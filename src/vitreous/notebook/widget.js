// The notebook's side of the page: a frame, and messages between it and the kernel.

const WAITING = "Waiting for the kernel. If it has ended, run this cell again.";

/** Whether the notebook is dark: JupyterLab says so; elsewhere the colour behind the output tells. */
function dark(node) {
  const said = document.body.dataset.jpThemeLight;
  if (said !== undefined) return said === "false";
  for (let at = node; at; at = at.parentElement) {
    const [r, g, b, alpha = 1] = (getComputedStyle(at).backgroundColor.match(/[\d.]+/g) ?? []).map(Number);
    if (alpha > 0.5) return 0.3 * r + 0.6 * g + 0.1 * b < 110;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

/** The page may run scripts, save files, open links in new tabs, and nothing else: it has an origin of its own. */
function framed(html) {
  const frame = document.createElement("iframe");
  frame.setAttribute("sandbox", "allow-scripts allow-downloads allow-popups allow-popups-to-escape-sandbox");
  frame.allow = "clipboard-write";
  frame.title = "vitreous";
  Object.assign(frame.style, { width: "100%", height: "100%", border: "0", display: "block" });
  frame.srcdoc = html;
  return frame;
}

function render({ model, el }) {
  const id = crypto.randomUUID?.() ?? String(Math.random());
  let turn = 0; // the frame loads again when the notebook moves it
  let view = `${id}/0`;
  let frame = null;
  let port = null;

  const box = document.createElement("div");
  box.className = "vitreous-view";
  Object.assign(box.style, { border: "1px solid rgba(128, 128, 128, 0.4)", boxSizing: "border-box", width: "100%" });
  box.textContent = WAITING;
  el.append(box);

  const tell = (told) => port?.postMessage(told);
  const tellTheme = () => tell({ kind: "theme", dark: dark(el) });
  const tellAddress = () => tell({ kind: "address", address: model.get("address") });
  const resize = () => (box.style.height = frame ? `${model.get("height")}px` : "auto");
  const leave = () => {
    port?.close();
    port = null;
    model.send({ kind: "close", view });
  };

  /** What the page in the frame says. */
  const said = ({ data: { body, ...told } }) => {
    if (told.kind !== "address") return model.send({ ...told, view }, undefined, body ? [body] : []);
    model.set("address", told.address);
    model.save_changes();
  };

  /** The page has loaded: it gets a channel that nobody else hears. */
  const greet = (event) => {
    if (!frame || event.source !== frame.contentWindow || event.data !== "vitreous") return;
    if (port) leave();
    view = `${id}/${++turn}`;
    const channel = new MessageChannel();
    port = channel.port1;
    port.onmessage = said;
    const first = { address: model.get("address"), recorded: model.get("recorded"), dark: dark(el) };
    frame.contentWindow.postMessage(first, "*", [channel.port2]);
  };

  const heard = (told, buffers) => {
    if (told.view !== view) return;
    if (told.kind !== "page") return tell({ ...told, body: buffers[0] && bytes(buffers[0]) });
    frame = framed(new TextDecoder().decode(buffers[0]));
    box.replaceChildren(frame);
    resize();
  };

  const themes = new MutationObserver(tellTheme);
  for (const node of [document.documentElement, document.body]) themes.observe(node, { attributes: true });
  addEventListener("message", greet);
  addEventListener("pagehide", leave);
  model.on("msg:custom", heard);
  model.on("change:address", tellAddress);
  model.on("change:height", resize);
  model.send({ kind: "open", view });

  return () => {
    leave();
    themes.disconnect();
    removeEventListener("message", greet);
    removeEventListener("pagehide", leave);
    model.off("msg:custom", heard);
    model.off("change:address", tellAddress);
    model.off("change:height", resize);
  };
}

/** A buffer of its own. */
const bytes = (view) => view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);

export default { render };
