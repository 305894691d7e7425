"use strict";
(() => {
  const find = (what) => document.querySelector(what);
  const table = find("table.folder");
  if (!table) return;
  const scale = table.dataset.percent === "1" ? 100 : 1;
  const number = (text) => (text.trim() === "" ? NaN : Number(text));
  const rows = [...table.tBodies[0].rows].map((row, place) => ({
    row,
    place,
    name: row.dataset.name,
    label: row.dataset.label,
    confidence: number(row.dataset.confidence) * scale,
    agreement: number(row.dataset.agreement),
    words: row.textContent.toLowerCase(),
    link: row.querySelector("a[data-figure]"),
  }));
  const heads = [...table.querySelectorAll("th button")];
  const inOrder = new Intl.Collator(undefined, { numeric: true, sensitivity: "base" });

  const compare = (by, sign) => (one, other) => {
    const [a, b] = [one[by], other[by]];
    if (typeof a === "string") {
      if (!a !== !b) return a ? -1 : 1;
      return sign * inOrder.compare(a, b) || one.place - other.place;
    }
    if (Number.isNaN(a) !== Number.isNaN(b)) return Number.isNaN(a) ? 1 : -1; // without a number: last, either way
    return (Number.isNaN(a) ? 0 : sign * (a - b)) || one.place - other.place;
  };

  function sort(head) {
    const cell = head.closest("th");
    const numbers = cell.classList.contains("number");
    const now = cell.getAttribute("aria-sort");
    const next = now === "none" ? (numbers ? "descending" : "ascending") : now === "ascending" ? "descending" : "ascending";
    for (const other of heads) other.closest("th").setAttribute("aria-sort", "none");
    cell.setAttribute("aria-sort", next);
    rows.sort(compare(head.dataset.by, next === "ascending" ? 1 : -1));
    table.tBodies[0].append(...rows.map((one) => one.row));
  }

  const within = (value, name) => {
    const [from, to] = ["from", "to"].map((end) => number(find(`#${name}-${end}`).value));
    if (Number.isNaN(from) && Number.isNaN(to)) return true;
    return !(Number.isNaN(value) || value < from || value > to);
  };

  function filter() {
    const words = find("#words").value.toLowerCase().split(/\s+/).filter(Boolean);
    const label = find("#class").value;
    let count = 0;
    for (const one of rows) {
      const shown =
        words.every((word) => one.words.includes(word)) &&
        (!label || one.label === label) &&
        within(one.confidence, "confidence") &&
        within(one.agreement, "agreement");
      one.row.hidden = !shown;
      count += shown;
    }
    find("#count").textContent = `${count} of ${rows.length}`;
    find("#nothing").hidden = count > 0;
  }

  const dialog = find("dialog");
  const figure = dialog.querySelector("img");
  let current = null;

  const seen = () => rows.filter((one) => !one.row.hidden && one.link);

  function show(one) {
    if (!one) return;
    const all = seen();
    current = one;
    figure.src = one.link.href;
    figure.alt = `${one.name}, ${one.label || "no class"}: ${[...one.row.querySelectorAll(".map")].map((m) => m.textContent).join("; ")}`;
    find("#open").href = one.link.href;
    find("#shown").textContent = one.name;
    find("#place").textContent = `${all.indexOf(one) + 1} of ${all.length}`;
    if (!dialog.open) dialog.showModal();
  }

  function go(steps) {
    const all = seen();
    show(all[(all.indexOf(current) + steps + all.length) % all.length]);
  }

  heads.forEach((head) => head.addEventListener("click", () => sort(head)));
  const form = find(".filters");
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", filter);
  form.addEventListener("reset", () => setTimeout(filter));
  table.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-figure]");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    show(rows.find((one) => one.link === link));
  });
  find("#before").addEventListener("click", () => go(-1));
  find("#after").addEventListener("click", () => go(1));
  find("#close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => current?.link.focus());
  dialog.addEventListener("keydown", (event) => {
    if (event.key === "ArrowLeft") go(-1);
    if (event.key === "ArrowRight") go(1);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !dialog.open && !event.target.closest("input, select")) {
      event.preventDefault();
      find("#words").focus();
    }
  });
  filter(); // a browser may have kept what was typed before the page was loaded again
})();
