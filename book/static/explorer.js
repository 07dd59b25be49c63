// What the explorers share: numbers from site/data, words from the page (so that they are translated with it), SVG, and
// messages that wait for their receivers. Plain scripts, no modules: so they run from a file too.

window.explorer = (() => {
  const root = new URL(document.documentElement.lang === "en" ? "../data/" : "../../data/", document.currentScript.src);
  const kept = new Map(), waiting = new Map();

  /** The numbers of one file of site/data: a script that calls `explorer.take(name, numbers)`. */
  function load(name) {
    if (!kept.has(name)) kept.set(name, new Promise((done, failed) => {
      waiting.set(name, done);
      document.head.append(Object.assign(make("script", { src: new URL(`${name}.js`, root) }), { onerror: failed }));
    }));
    return kept.get(name);
  }
  const take = (name, numbers) => waiting.get(name)(numbers);

  const said = new Map();
  for (const term of document.querySelectorAll(".words dt")) said.set(term.textContent.trim(), term.nextElementSibling.textContent.trim());

  /** The words of the page under this key, with {name} replaced. */
  function say(key, values = {}) {
    return (said.get(key) ?? key).replace(/\{(\w+)\}/g, (_, name) => values[name] ?? "");
  }

  /** An element with attributes and children; a string is text. `draw` makes SVG, `make` HTML. */
  function build(element, attributes, children) {
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }
  const draw = (name, attributes = {}, ...children) => build(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
  const make = (name, attributes = {}, ...children) => build(document.createElement(name), attributes, children);

  /** Where rank r of P stands on a circle: rank 0 above, then clockwise. */
  function place(r, P, radius, x, y) {
    const angle = (2 * Math.PI * r) / P - Math.PI / 2;
    return P === 1 ? [x, y] : [x + radius * Math.cos(angle), y + radius * Math.sin(angle)];
  }

  /** A line with a head from one point to another, both ends cut by `gap`. */
  function arrow([x0, y0], [x1, y1], gap, attributes) {
    const length = Math.hypot(x1 - x0, y1 - y0) || 1;
    const [ux, uy] = [(x1 - x0) / length, (y1 - y0) / length];
    const [bx, by, ex, ey] = [x0 + ux * gap, y0 + uy * gap, x1 - ux * gap, y1 - uy * gap];
    const tip = [[ex, ey], [ex - 9 * ux - 5 * uy, ey - 9 * uy + 5 * ux], [ex - 9 * ux + 5 * uy, ey - 9 * uy - 5 * ux]];
    return draw("g", attributes,
      draw("line", { x1: bx, y1: by, x2: ex - 8 * ux, y2: ey - 8 * uy }),
      draw("polygon", { points: tip.map((point) => point.join(",")).join(" ") }));
  }

  /** A table with a caption, heads and rows; a cell is text or an element, and the first of a row is its head. */
  function table(caption, heads, rows, attributes = {}) {
    const body = rows.map((row) => make("tr", row.attributes ?? {}, ...(row.cells ?? row).map((cell, i) =>
      make(i ? "td" : "th", i ? {} : { scope: "row" }, cell))));
    return make("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": caption },
      make("p", { class: "heading" }, caption),
      make("table", { "aria-label": caption, ...attributes },
        make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))),
        make("tbody", {}, ...body)));
  }

  /** Buttons and a slider that step through a film. `show(step)` draws; returns { reset(last, at), go(step), at() }. */
  function player(home, show) {
    let at = 0, last = 0, timer = null;
    const back = make("button", { type: "button", id: "back" }, `◀ ${say("back")}`);
    const play = make("button", { type: "button", id: "play" });
    const next = make("button", { type: "button", id: "step" }, `${say("step")} ▶`);
    const scrub = make("input", { type: "range", id: "scrub", min: 0, step: 1, "aria-label": say("scrub") });
    const stop = () => { clearInterval(timer); timer = null; play.textContent = `▶ ${say("play")}`; };
    const go = (step) => {
      at = Math.max(0, Math.min(last, step));
      scrub.value = at;
      back.setAttribute("aria-disabled", at === 0); // not `disabled`: a button that ends keeps the focus
      next.setAttribute("aria-disabled", at === last);
      if (at === last) stop();
      show(at);
    };
    back.onclick = () => { stop(); if (at > 0) go(at - 1); };
    next.onclick = () => { stop(); if (at < last) go(at + 1); };
    scrub.oninput = () => { stop(); go(Number(scrub.value)); };
    play.onclick = () => {
      if (timer) return stop();
      if (at === last) go(0);
      timer = setInterval(() => go(at + 1), 1300);
      play.textContent = `❚❚ ${say("pause")}`;
    };
    stop();
    home.replaceChildren(back, play, next, scrub);
    return { go, at: () => at, reset(steps, step = 0) { stop(); last = steps; scrub.max = steps; go(step); } };
  }

  /** Keep the settings of a form in the address, so that a link shows what its sender saw. */
  function keep(form) {
    history.replaceState(null, "", `#${new URLSearchParams([...new FormData(form)].filter(([, value]) => typeof value === "string"))}`);
  }

  /** Read the settings of a form from the address, or from what the chapter asks for; say what is wrong in an address. */
  function settings(form, changed) {
    const home = form.closest(".explorer"), wrong = [];
    const given = location.hash.includes("=") ? location.hash.slice(1) : home.dataset.settings ?? "";
    for (const [name, value] of new URLSearchParams(given)) {
      const fields = [...form.querySelectorAll(`[name="${CSS.escape(name)}"]`)];
      let fits = false;
      for (const field of fields) {
        if (field.type === "checkbox") { field.checked = value === "on"; fits ||= ["on", "off"].includes(value); }
        else if (field.type === "radio") { fits ||= field.value === value; if (field.value === value) field.checked = true; }
        else if (field.tagName === "SELECT" && ![...field.options].some((option) => option.value === value)) {
          field.dataset.want = value; // its options may come later
          fits ||= /^[\w. -]*$/.test(value);
        } else { field.value = value; fits ||= field.value === value.replaceAll("\r\n", "\n"); }
      }
      if (!fits) wrong.push(`${name}=${value}`);
    }
    if (wrong.length) home.prepend(make("p", { class: "sick", role: "alert" }, say("bad address", { wrong: wrong.join(", ") })));
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", (event) => { keep(form); changed(event.target.name); });
  }

  /** Run a program on each rank, as simulate_messages of ringlab does. A step is [["S", to], ["R", source], ...]: one
   *  message, or several at the same time; a third word says what the message carries, or what is done with it. In each phase every message moves whose two ranks are ready.
   *  Returns { moves: [[phase, from, to, its third word]], waits: {rank: peer}, circle: [ranks] }. */
  function simulate(programs) {
    const left = programs.map((program) => program.map((step) => [...step]));
    const moves = [];
    for (let phase = 0; ; phase++) {
      const now = left.map((program) => program[0] ?? []);
      const ready = now.flatMap((step, from) => step.filter(([what, to]) => what === "S" && now[to]?.some(([other, source]) => other === "R" && source === from))
        .map((message) => [from, message]));
      if (!ready.length) break;
      for (const [from, message] of ready) {
        const to = message[1], [taken] = now[to].splice(now[to].findIndex(([what, source]) => what === "R" && source === from), 1);
        now[from].splice(now[from].indexOf(message), 1);
        moves.push([phase, from, to, message[2] ?? taken[2]]);
      }
      for (const program of left) if (program.length && !program[0].length) program.shift();
    }
    const waits = Object.fromEntries(left.flatMap((program, rank) => (program.length ? [[rank, program[0][0][1]]] : [])));
    for (const first of Object.keys(waits).map(Number)) {
      const path = [first];
      while (waits[path.at(-1)] !== undefined && !path.includes(waits[path.at(-1)])) path.push(waits[path.at(-1)]);
      if (waits[path.at(-1)] === first) return { moves, waits, circle: path };
    }
    return { moves, waits, circle: [] };
  }

  /** The ranks in a ring after `step` steps of an outcome: step n shows phase n - 1, the last one who still waits. */
  function messages(outcome, P, step, words) {
    const at = (r) => place(r, P, 150, 200, 190);
    const phases = outcome.moves.length ? outcome.moves.at(-1)[0] + 1 : 0;
    const done = step > phases, stuck = Object.keys(outcome.waits).length > 0;
    const lines = draw("g");
    for (const [phase, from, to, what] of outcome.moves.filter(([phase]) => phase < step)) {
      const moving = phase === step - 1 && !done, [a, b] = [at(from), at(to)];
      lines.append(arrow(a, b, 34, { class: moving ? "moves" : "moved" }));
      if (moving && what) lines.append(draw("text", { x: a[0] + (b[0] - a[0]) * 0.4, y: a[1] + (b[1] - a[1]) * 0.4 - 8, "text-anchor": "middle", class: "bold halo" }, what));
    }
    if (done) for (const [rank, peer] of Object.entries(outcome.waits))
      lines.append(arrow(at(Number(rank)), at(peer), 34, { class: outcome.circle.includes(Number(rank)) ? "waits circle" : "waits" }));
    const picture = draw("svg", { viewBox: "0 0 400 380", role: "img" }, lines);
    for (let r = 0; r < P; r++) {
      const [x, y] = at(r);
      picture.append(draw("g", { class: done && outcome.waits[r] !== undefined ? "rank stuck" : "rank" },
        draw("circle", { cx: x, cy: y, r: 30 }),
        draw("text", { x, y: words ? y - 2 : y + 5, "text-anchor": "middle", class: "bold" }, String(r)),
        draw("text", { x, y: y + 14, "text-anchor": "middle", class: "small" }, words?.(r) ?? "")));
    }
    picture.append(draw("text", { x: 200, y: 195, "text-anchor": "middle", class: "bold halo" },
      done ? (stuck ? `✗ ${say("stops")}` : `✓ ${say("runs")}`) : step ? say("phase", { n: step - 1 }) : say("ready")));
    const moving = outcome.moves.filter(([phase]) => phase === step - 1).map(([, from, to, what]) => `${from} → ${to}${what ? `: ${what}` : ""}`);
    const circle = [...outcome.circle, outcome.circle[0]].join(" → ");
    const told = !step ? say("begin") : !done ? say("in phase", { n: step - 1, moves: moving.join(", ") })
      : stuck ? `${say("stuck", { n: outcome.moves.length })} ${outcome.circle.length ? say("circle", { circle }) : say("no circle")}`
        : say("ran", { phases, n: outcome.moves.length });
    picture.setAttribute("aria-label", told);
    return { picture, told, done, last: phases + 1 };
  }

  for (const element of document.querySelectorAll("[data-say]")) element.textContent = say(element.dataset.say);
  return { load, take, say, draw, make, place, arrow, table, player, keep, settings, simulate, messages };
})();
