// A button that opens a list of actions: Enter or an arrow key opens it, arrow keys go through it, Escape closes it.

import { button, el, toast } from "./ui.js";

const STEPS = { ArrowDown: 1, ArrowUp: -1 };

export function menu(title, id) {
  const list = el("ul.menu", { role: "menu", id: `${id}-list`, hidden: true, "aria-labelledby": id });
  const knob = button(title, () => open(list.hidden), {
    id, "aria-haspopup": "menu", "aria-expanded": "false", "aria-controls": list.id,
  });
  const node = el("div.actions", knob, list);
  const seen = (one) => one.getClientRects().length > 0; // in a notebook some are hidden
  const parts = () => [...list.querySelectorAll("button")].filter(seen);

  function open(shown, last = false) {
    list.hidden = !shown;
    knob.ariaExpanded = String(shown);
    if (shown) parts().at(last ? -1 : 0)?.focus();
    else if (list.contains(document.activeElement)) knob.focus();
  }

  knob.addEventListener("keydown", (event) => {
    if (!(event.key in STEPS)) return;
    event.preventDefault();
    open(true, event.key === "ArrowUp");
  });
  list.addEventListener("keydown", (event) => {
    const all = parts();
    const at = all.indexOf(document.activeElement);
    const next = { Home: 0, End: all.length - 1 }[event.key]
      ?? (event.key in STEPS ? (at + STEPS[event.key] + all.length) % all.length : null);
    if (event.key === "Escape") {
      event.stopPropagation();
      knob.focus();
      open(false);
    } else if (event.key === "Tab") open(false);
    else if (next !== null) {
      event.preventDefault();
      all[next].focus();
    }
  });
  document.addEventListener("pointerdown", (event) => node.contains(event.target) || open(false));

  const item = ({ id: name, label, title: told, run }) => {
    const act = () => {
      knob.focus();
      open(false);
      Promise.resolve().then(run).catch((error) => toast(error.message));
    };
    return el("li", { role: "none" },
      button([el("span", label), el("small", told)], act, { id: name, role: "menuitem", tabIndex: -1 }));
  };
  return { node, offer: (actions) => list.replaceChildren(...actions.map(item)) };
}
