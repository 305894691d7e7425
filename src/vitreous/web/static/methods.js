// The dialog that chooses methods; its forms come from the JSON schema of their options.

import { unfold } from "./help.js";
import { same, state } from "./state.js";
import { button, byId, el, link, toast } from "./ui.js";
import { model, world } from "./world.js";

const FAMILIES = {
  attention: "Attention", attention_gradient: "Attention and gradient", gradient: "Gradient", lrp: "Relevance (LRP)",
  cam: "Class activation (CAM)", perturbation: "Perturbation", arbitration: "Arbitration",
  text: "Image and text", control: "Controls without information",
};

/** Let the reader choose; `done(methods)` gets the new list. */
export function choose(done, first = null) {
  const chosen = structuredClone(state.methods);
  const dialog = byId("dialog");
  const left = el("p.quiet");
  const count = () => (left.textContent = `${chosen.length} of at most ${world.info.limits.methods} selected`);
  const families = [...new Set(world.info.methods.map((one) => one.family))];
  const order = Object.keys(FAMILIES);
  families.sort((a, b) => (order.indexOf(a) + 99) % 99 - ((order.indexOf(b) + 99) % 99));
  const body = families.map((family) =>
    el("fieldset", el("legend", FAMILIES[family] ?? family),
      ...world.info.methods.filter((one) => one.family === family).map((one) => entry(one, chosen, count))));
  const apply = () => {
    if (!chosen.length) return toast("Select at least one method.");
    if (!dialog.querySelector("form").reportValidity()) return;
    dialog.close();
    done(chosen);
  };
  const onsubmit = (event) => {
    event.preventDefault();
    apply();
  };
  dialog.replaceChildren(el("form.methods", { onsubmit, onkeydown: step },
    el("header", el("h2", { id: "dialog-title" }, "Methods"), el("small", "Arrow keys: the next method"), left),
    el("div.families", ...body),
    el("footer", button("Cancel", () => dialog.close()), el("button.strong", { type: "submit" }, "Show these"))));
  count();
  dialog.showModal();
  const opened = first && dialog.querySelector(`[data-method="${CSS.escape(first)}"]`);
  opened?.scrollIntoView({ block: "center" });
  const inside = opened?.querySelector(".options input, .options select, input");
  (inside ?? dialog.querySelector("input:not(:disabled)"))?.focus();
}

/** Arrow keys, Home and End lead from method to method, where no option has the focus. */
function step(event) {
  const stops = [...event.currentTarget.querySelectorAll(".method")]
    .map((one) => one.querySelector(":scope > label > input:enabled") ?? one.querySelector("summary"));
  const at = stops.findIndex((stop) => stop.closest(".method") === event.target.closest(".method"));
  const places = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: stops.length - 1 };
  if (!(event.key in places) || !event.target.matches(".method > label > input, .method > details > summary")) return;
  event.preventDefault();
  stops[places[event.key]]?.focus();
}

function entry(one, chosen, count) {
  const why = model().unsupported[one.name];
  const forms = el("div");
  const mine = () => chosen.filter((other) => other.name === one.name);
  const box = el("input", { type: "checkbox", checked: mine().length > 0, disabled: Boolean(why) && !mine().length });
  const draw = () => {
    box.checked = mine().length > 0;
    const settings = Object.keys(one.options).length > 0;
    const several = mine().length > 1;
    forms.replaceChildren(...mine().map((instance) => form(one, instance, several && (() => drop(instance)))));
    if (box.checked && settings) forms.append(link("Add again with other options", () => add()));
    count();
  };
  const add = () => {
    if (chosen.length >= world.info.limits.methods) toast(`Select at most ${world.info.limits.methods} methods.`);
    else chosen.push({ name: one.name, options: {} });
    draw();
  };
  const drop = (instance) => {
    chosen.splice(chosen.indexOf(instance), 1);
    draw();
  };
  box.addEventListener("change", () => {
    if (box.checked) return add();
    for (const instance of mine()) chosen.splice(chosen.indexOf(instance), 1);
    draw();
  });
  draw();
  const kinds = [one.signed && "signed", !one.targeted && "the same for all targets"].filter(Boolean).join(", ");
  const node = el("div", { className: `method${why ? " off" : ""}` },
    el("label", box, el("span", el("b", one.name), kinds && el("small", ` ${kinds}`),
      el("span.summary", why ?? one.summary))), unfold("methods", one.name), forms);
  node.dataset.method = one.name;
  return node;
}

function form(one, instance, remove) {
  const rows = Object.entries(one.options).map(([name, schema]) => {
    const plain = schema.default;
    const control = controlOf(schema, instance.options[name] ?? plain, (value) => {
      if (same(value, plain)) delete instance.options[name];
      else instance.options[name] = value;
    });
    control.title = schema.description ?? "";
    return el("label", el("span", name), control, el("small", schema.description ?? ""));
  });
  return rows.length ? el("div.options", ...rows, remove && link("Remove this one", remove)) : "";
}

/** A control for one option. */
function controlOf(schema, value, heard) {
  const kinds = schema.anyOf ?? [schema];
  if (schema.type === "boolean") {
    const box = el("input", { type: "checkbox", checked: value, onchange: () => heard(box.checked) });
    return box;
  }
  if (kinds.length === 1 && schema.enum) {
    const select = el("select", { onchange: () => heard(schema.enum[select.selectedIndex]) },
      ...schema.enum.map((one) => el("option", { selected: one === value }, String(one))));
    return select;
  }
  if (kinds.length === 1 && ["integer", "number"].includes(schema.type)) return numeric(schema, value, heard);
  return free(kinds, value, heard);
}

function numeric(schema, value, heard) {
  const whole = schema.type === "integer";
  const input = el("input", {
    type: "number", value, step: whole ? 1 : "any", required: true,
    min: schema.minimum ?? schema.exclusiveMinimum ?? "", max: schema.maximum ?? schema.exclusiveMaximum ?? "",
  });
  input.addEventListener("input", () => input.value !== "" && heard(Number(input.value)));
  return input;
}

/** Words, a number, a list or nothing, as the schema allows. */
function free(kinds, value, heard) {
  const words = kinds.flatMap((one) => one.enum ?? (one.const ? [one.const] : one.type === "null" ? ["none"] : []));
  const shown = value === null ? "none" : Array.isArray(value) ? value.join(", ") : String(value);
  const id = `words-${Math.random().toString(36).slice(2)}`;
  const input = el("input", { type: "text", value: shown, list: id, spellcheck: false });
  const takes = (type) => kinds.some((one) => one.type === type);
  input.addEventListener("input", () => {
    const text = input.value.trim();
    const parts = text.split(/[\s,;]+/).map(Number);
    const numbers = text !== "" && parts.every(Number.isFinite);
    input.setCustomValidity("");
    if (words.includes(text)) heard(text === "none" && takes("null") ? null : text);
    else if (numbers && parts.length === 1 && (takes("integer") || takes("number"))) heard(parts[0]);
    else if (numbers && takes("array")) heard(parts);
    else if (kinds.some((one) => one.type === "string" && !one.enum && !one.const)) heard(text);
    else input.setCustomValidity(`Enter one of: ${[...words, takes("array") ? "numbers" : "a number"].join(", ")}.`);
  });
  return el("span", input, el("datalist", { id }, ...words.map((one) => el("option", { value: one }))));
}
