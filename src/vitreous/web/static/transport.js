// How the page reaches its server: over the network, unless a notebook or a saved page uses another way.

/** The browser itself. Another transport has the same three functions. */
const network = {
  /** The Response to a request. */
  ask: (path, init) => fetch(path, init),

  /** Server-sent events: heard(name, data) for each of `names`; lost() if no more will come. */
  listen(path, names, heard, lost) {
    const source = new EventSource(path);
    for (const name of names) source.addEventListener(name, (event) => heard(name, JSON.parse(event.data)));
    source.onerror = () => source.readyState === EventSource.CLOSED && lost();
    return source;
  },

  /** An address that an <img> can load. */
  source: (path) => path,
};

let current = network;

/** Go another way from now on; before the page starts. */
export const travel = (transport) => (current = transport);

/** Go through another transport, which is given the present one. */
export const wrap = (make) => (current = make(current));

/** Whether the answers are those of a saved page, and nothing can be computed. */
export const still = () => Boolean(current.still);

export const ask = (path, init) => current.ask(path, init);
export const listen = (...given) => current.listen(...given);

/** Let an <img> show what the server has at a path; the newest path wins. */
export async function show(img, path) {
  img.dataset.path = path;
  const found = current.source(path); // a promise where it takes a question
  const source = typeof found === "string" ? found : await found.catch(() => "");
  if (img.dataset.path !== path) return;
  if (source) img.src = source;
  else img.dispatchEvent(new Event("error"));
}
