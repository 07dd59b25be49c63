// What the explorers share: numbers from site/data, words from the page (so that they are translated with it), SVG.

const root = document.documentElement.lang === "en" ? "../data/" : "../../data/";
const kept = new Map();

/** The numbers of one file of site/data. */
export function load(name) {
  if (!kept.has(name))
    kept.set(name, fetch(new URL(`${root}${name}.json`, import.meta.url)).then((answer) => answer.json()));
  return kept.get(name);
}

const said = new Map();
for (const term of document.querySelectorAll(".words dt")) said.set(term.textContent.trim(), term.nextElementSibling.textContent.trim());

/** The words of the page under this key, with {name} replaced. */
export function say(key, values = {}) {
  const words = said.get(key) ?? key;
  return words.replace(/\{(\w+)\}/g, (_, name) => values[name] ?? "");
}

const SVG = "http://www.w3.org/2000/svg";

/** An SVG element with attributes and children; a string is text. */
export function draw(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** An HTML element with attributes and children. */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** Where rank r of P stands on a circle: rank 0 above, then clockwise. */
export function place(r, P, radius, x, y) {
  const angle = (2 * Math.PI * r) / P - Math.PI / 2;
  return P === 1 ? [x, y] : [x + radius * Math.cos(angle), y + radius * Math.sin(angle)];
}

/** A line with a head from one point to another, both ends cut by `gap`. */
export function arrow([x0, y0], [x1, y1], gap, attributes) {
  const length = Math.hypot(x1 - x0, y1 - y0) || 1;
  const [ux, uy] = [(x1 - x0) / length, (y1 - y0) / length];
  const [bx, by, ex, ey] = [x0 + ux * gap, y0 + uy * gap, x1 - ux * gap, y1 - uy * gap];
  const tip = [[ex, ey], [ex - 9 * ux - 5 * uy, ey - 9 * uy + 5 * ux], [ex - 9 * ux + 5 * uy, ey - 9 * uy - 5 * ux]];
  return draw("g", attributes,
    draw("line", { x1: bx, y1: by, x2: ex - 8 * ux, y2: ey - 8 * uy }),
    draw("polygon", { points: tip.map((point) => point.join(",")).join(" ") }));
}

/** A table with a caption, heads and rows; a cell is text or an element, and the first of a row is its head. */
export function table(caption, heads, rows, attributes = {}) {
  const body = rows.map((row) => make("tr", row.attributes ?? {}, ...(row.cells ?? row).map((cell, i) =>
    make(i ? "td" : "th", i ? {} : { scope: "row" }, cell))));
  return make("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": caption },
    make("p", { class: "heading" }, caption),
    make("table", { "aria-label": caption, ...attributes },
      make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))),
      make("tbody", {}, ...body)));
}

/** Buttons and a slider that step through a film. `show(step)` draws; returns { reset(last, at), go(step) }. */
export function player(home, show) {
  let at = 0, last = 0, timer = null;
  const back = make("button", { type: "button", id: "back" }, `◀ ${say("back")}`);
  const play = make("button", { type: "button", id: "play" });
  const next = make("button", { type: "button", id: "step" }, `${say("step")} ▶`);
  const scrub = make("input", { type: "range", id: "scrub", min: 0, step: 1, "aria-label": say("scrub") });
  const stop = () => { clearInterval(timer); timer = null; play.textContent = `▶ ${say("play")}`; };
  const go = (step) => {
    at = Math.max(0, Math.min(last, step));
    scrub.value = at;
    back.disabled = at === 0;
    next.disabled = at === last;
    if (document.activeElement === document.body && at === last) back.focus(); // a button that ends keeps the focus near
    if (at === last) stop();
    show(at);
  };
  back.onclick = () => { stop(); go(at - 1); };
  next.onclick = () => { stop(); go(at + 1); };
  scrub.oninput = () => { stop(); go(Number(scrub.value)); };
  play.onclick = () => {
    if (timer) return stop();
    if (at === last) go(0);
    timer = setInterval(() => go(at + 1), 1300);
    play.textContent = `⏸ ${say("pause")}`;
  };
  stop();
  home.replaceChildren(back, play, next, scrub);
  return { go, at: () => at, reset(steps, step = 0) { stop(); last = steps; scrub.max = steps; go(step); } };
}

/** The settings of a form, kept in the address, so that a link shows what its sender saw. */
export function settings(form, changed) {
  const preset = form.closest(".explorer").dataset.settings ?? "";
  for (const [name, value] of new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : preset)) {
    for (const field of form.querySelectorAll(`[name="${CSS.escape(name)}"]`)) {
      if (field.type === "checkbox") field.checked = value === "on";
      else if (field.type === "radio") field.checked = field.value === value;
      else { if (field.tagName === "SELECT" && ![...field.options].some((o) => o.value === value)) field.dataset.want = value; field.value = value; }
    }
  }
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => {
    history.replaceState(null, "", `#${new URLSearchParams(new FormData(form))}`);
    changed(event.target.name);
  });
}

for (const element of document.querySelectorAll("[data-say]")) element.textContent = say(element.dataset.say);
