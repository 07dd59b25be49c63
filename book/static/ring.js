// The ring: every number is from site/data/ring-P-S.js, which book/data.py computes.

(async () => {
const { arrow, draw, load, make, place, player, say, settings, table } = explorer;
const form = document.querySelector("#ring-form");
const stage = document.querySelector("#ring-stage");
const book = await load("book");
let asked = null; // the round whose numbers are explained
let now = null; // what is shown: { file, layout, one, P, step }

const shown = (x, none = "NaN") => (x === null ? none : x.toFixed(4));
const pair = (a, b) => `[${shown(a)}, ${shown(b)}]`;
const colour = (j) => book.colours[j % book.colours.length];

function chip(j, words = `KV${j}`) {
  const [back, ink] = colour(j);
  return make("span", { class: "chip", style: `background:${back};color:${ink}` }, words);
}

function fill(select, options, wanted) {
  const before = wanted ?? select.dataset.want ?? select.value;
  delete select.dataset.want;
  select.replaceChildren(...options.map(([value, words]) => make("option", { value }, words)));
  select.value = options.some(([value]) => String(value) === String(before)) ? before : options[0][0];
}

/** Read the form, load its numbers, and begin at round 0. */
async function change(step = 0) {
  const P = Number(form.P.value), home = document.querySelector("#ring");
  home.dataset.ready = "no";
  form.querySelector("output").textContent = P;
  fill(form.S, book.seq_lens[P].map((S) => [S, S]));
  const S = form.S.value, file = await load(`ring-${P}-${S}`);
  if (Number(form.P.value) !== P || form.S.value !== S) return; // a reader who is faster than the network has chosen others
  for (const radio of form.layout) {
    const refused = file.layouts[radio.value].refused;
    radio.disabled = Boolean(refused);
    radio.parentElement.title = refused ?? "";
    if (refused && radio.checked) form.layout.value = "contiguous";
  }
  const notes = Object.values(file.layouts).map((each) => each.refused).filter(Boolean);
  document.querySelector("#refused").textContent = notes.join(". ");
  form.window.disabled = !form.causal.checked;
  const mask = ["causal", "documents", "window"].filter((name) => form[name].checked && !form[name].disabled).join(" ");
  const one = file.cases[`${form.layout.value}, ${mask || "none"}`];
  const backward = form.pass.value === "backward";
  const names = Object.keys(one.wrong).filter((name) => book.backward.includes(name) === backward);
  fill(form.mistake, [["", say("no mistake")], ...names.map((name) => [name, say(name)])]);
  fill(form.token, file.tokens.map((x, s) => [s, say("token", { s, x: `[${x.join(", ")}]` })]));
  const { positions } = file.layouts[form.layout.value];
  now = { file, one, P, S: file.S, positions, lengths: positions.map((at) => at.length), backward };
  prepare();
  films.reset(one.hops + (backward && one.hops > 0 ? 1 : 0), step);
  home.dataset.ready = "yes";
}

const CARD = [100, 60];

/** The ring itself: cards that stay and blocks that move. */
function prepare() {
  const { P, positions } = now;
  const picture = draw("svg", { viewBox: "0 0 400 372", role: "img", id: "ring-picture" });
  const at = (r) => place(r, P, 146, 200, 186);
  now.links = draw("g", { class: "links" });
  const cards = draw("g");
  for (let r = 0; r < P; r++) {
    const [x, y] = at(r);
    const tokens = positions[r].length > 2 ? `${positions[r][0]} … ${positions[r].at(-1)}` : positions[r].join(" ");
    const card = draw("g", { transform: `translate(${x - CARD[0] / 2} ${y - CARD[1] / 2})`, class: "at" },
      draw("rect", { width: CARD[0], height: CARD[1], rx: 7, class: "card" }),
      draw("text", { x: 8, y: 16, class: "bold" }, say("rank", { r })),
      draw("text", { x: CARD[0] - 7, y: 16, class: "muted small", "text-anchor": "end" }, `Q ${tokens}`));
    card.onclick = () => look(r); // the list of tokens does the same, with the keys
    cards.append(card);
  }
  now.blocks = [...Array(P).keys()].map((j) => {
    const [back, ink] = colour(j);
    return draw("g", { class: "block" },
      draw("rect", { x: -CARD[0] / 2 + 6, y: -7, width: CARD[0] - 12, height: 30, rx: 5, fill: back }),
      draw("text", { x: 0, y: 14, "text-anchor": "middle", class: "bold", style: `fill:${ink}` }, `KV${j}`));
  });
  now.blocks.forEach((block, j) => { block.onclick = () => look(now.hand.indexOf(j)); });
  now.marks = draw("g");
  picture.append(now.links, cards, ...now.blocks, now.marks);
  stage.replaceChildren(picture);
  now.picture = picture;
  now.at = at;
}

/** Look at the first token of a rank; once more, at its next one. */
function look(r) {
  const tokens = now.positions[r];
  form.token.value = tokens[(tokens.indexOf(Number(form.token.value)) + 1) % tokens.length];
  form.token.dispatchEvent(new Event("input", { bubbles: true }));
}

/** Bytes that a rank has sent when it computes in round t: its blocks, and backward also the sums of their gradients. */
function sent(r, step) {
  const { P, one, lengths, file, backward } = now;
  let tokens = 0;
  for (let t = 0; t < Math.min(step, one.hops); t++) tokens += lengths[(((r - t) % P) + P) % P] * (backward ? 2 : 1);
  if (backward && step > one.hops) tokens += lengths[(((r - one.hops) % P) + P) % P];
  return tokens * file.bytes;
}

function show(step) {
  const { P, one, at, backward, lengths } = now;
  const home = step > one.hops; // backward: the sums have come home
  const t = Math.min(step, one.hops);
  const hand = (r) => (((r - t) % P) + P) % P;
  now.hand = [...Array(P).keys()].map(hand);
  for (let r = 0; r < P; r++) {
    const [x, y] = at(home ? hand(r) : r);
    now.blocks[hand(r)].style.transform = `translate(${x}px, ${y}px)`;
  }
  now.links.replaceChildren();
  if (t < one.hops) for (let r = 0; r < P; r++)
    now.links.append(arrow(at(r), at((r + 1) % P), P > 5 ? 46 : 60, { class: "hop", style: `--c:${colour(hand(r))[0]}` }));
  const token = Number(form.token.value);
  const owner = now.positions.findIndex((tokens) => tokens.includes(token));
  const [x, y] = at(owner);
  now.marks.replaceChildren(draw("rect", { x: x - CARD[0] / 2 - 3, y: y - CARD[1] / 2 - 3, width: CARD[0] + 6, height: CARD[1] + 6, rx: 9, class: "mark" }));

  const words = home ? say("home", { n: one.hops + 1 })
    : say(t === one.hops ? "last round" : "round words", { t, last: one.hops, r: owner, j: hand(owner), s: token });
  now.picture.setAttribute("aria-label", `${words} ${[...Array(P).keys()].map((r) => say("has", { r, j: hand(r) })).join(" ")}`);
  document.querySelector("#ring-status").textContent = words;

  document.querySelector("#ring-token").replaceChildren(backward ? gradients(t, token, owner) : states(t, token, owner));
  document.querySelector("#ring-ranks").replaceChildren(ranks(step, t));
  document.querySelector("#ring-rounds").replaceChildren(rounds(t));
  document.querySelector("#ring-wrong").replaceChildren(mistake(token));
  document.querySelector("#ring-time").replaceChildren(lanes());
  document.querySelector("#ring-hops").textContent = say("hops", { P, hops: one.hops, rounds: one.hops + 1, sums: one.hops ? one.hops + 1 : 0, chunk: Math.max(...lengths) });
}

/** The running (m, l, o) of a token, round by round. */
function states(t, token, owner) {
  const { P, one } = now;
  const rows = [...Array(t + 1).keys()].map((i) => {
    const [m, l, a, b, c, d] = one.states[i][token];
    const j = (((owner - i) % P) + P) % P;
    return { attributes: i === t ? { class: "now" } : {}, cells: [round(i), chip(j), shown(m, "−∞"), shown(l), pair(a, b), l ? pair(c, d) : "–"] };
  });
  return explained(say("running", { s: token, r: owner }), [say("round"), say("block"), "m", "l", "o", "o / l"], rows, (at) => why(at, token, owner), t);
}

/** The number of a round, to press: its numbers are explained. */
function round(i) {
  const button = make("button", { type: "button", class: "number", "aria-pressed": asked === i, "data-round": i }, String(i));
  button.onclick = () => { asked = i; show(films.at()); document.querySelector(`[data-round="${i}"]`).focus(); };
  return button;
}

/** Whether the mask lets a query see a key. */
function sees(query, key) {
  const { documents: [first], window } = now.file;
  return (!form.causal.checked || key <= query) && (!form.documents.checked || (key < first) === (query < first))
    && (form.window.disabled || !form.window.checked || key > query - window);
}

const list = (numbers) => numbers.map((each) => shown(each)).join(", ");
const dot = (a, b) => a[0] * b[0] + a[1] * b[1];
const score = (a, b) => dot(a, b) / Math.SQRT2;
const sum = (all, of = (each) => each) => all.reduce((so_far, each) => so_far + of(each), 0);

/** Where the numbers of a token come from in round t: the scores of its block, and the update, as in online_softmax. They
 * are computed from the tokens: those of the file are rounded to four digits, and the last digit would be another. */
function why(t, token, owner) {
  const { P, one, file: { tokens: x }, positions } = now;
  const scores = (i) => positions[(((owner - i) % P) + P) % P].filter((key) => sees(token, key)).map((key) => score(x[token], x[key]));
  const j = (((owner - t) % P) + P) % P, keys = positions[j].filter((key) => sees(token, key));
  if (!keys.length) return say("why nothing", { t, j, s: token });
  const earlier = [...Array(t).keys()].flatMap(scores), before = Math.max(...earlier), m = Math.max(before, ...scores(t));
  const weights = scores(t).map((each) => Math.exp(each - m));
  return say("why", { t, j, keys: keys.join(", "), scores: list(scores(t)), m: shown(m), f: shown(Math.exp(before - m)), weights: list(weights),
    before: shown(sum(earlier, (each) => Math.exp(each - before))), sum: shown(sum(weights)), l: shown(one.states[t][token][1]) });
}

/** Where dK and dV of a token come from in round t: the queries of the rank that has its block, as in backward. */
function whyBack(t, token, owner) {
  const { P, one, file: { tokens: x }, positions } = now;
  const r = (owner + t) % P, queries = positions[r].filter((query) => sees(query, token));
  if (!queries.length) return say("why no gradient", { t, j: owner, r, s: token });
  const rows = queries.map((query) => {
    const keys = x.filter((_, key) => sees(query, key)), weight = (key) => Math.exp(score(x[query], key)), l = sum(keys, weight);
    const p = weight(x[token]) / l, delta = sum(keys, (key) => weight(key) * dot(x[query], key)) / l;
    return [p, p * (dot(x[query], x[token]) - delta)];
  });
  const before = t ? one.backward[t - 1][token] : Array(6).fill(0), after = one.backward[t][token];
  return say("why gradient", { t, j: owner, r, s: token, queries: queries.join(", "), weights: list(rows.map(([p]) => p)), scores: list(rows.map(([, ds]) => ds)),
    k: pair(before[2], before[3]), dk: pair(after[2], after[3]), v: pair(before[4], before[5]), dv: pair(after[4], after[5]) });
}

/** A table of the rounds so far, and where the numbers of the round that was pressed come from. */
function explained(words, heads, rows, told, t) {
  return make("div", {}, table(words, heads, rows, { id: "states" }),
    make("p", { class: "note", id: "why", "aria-live": "polite" }, asked !== null && asked <= t ? told(asked) : say("ask")));
}

/** The sums of a token's gradients, round by round. */
function gradients(t, token, owner) {
  const rows = [...Array(t + 1).keys()].map((i) => {
    const [a, b, c, d, e, f] = now.one.backward[i][token];
    return { attributes: i === t ? { class: "now" } : {}, cells: [round(i), pair(a, b), pair(c, d), pair(e, f)] };
  });
  const heads = [say("round"), `dQ · ${say("stays")}`, `dK · ${say("travels")}`, `dV · ${say("travels")}`];
  return explained(say("gradients", { s: token, r: owner }), heads, rows, (at) => whyBack(at, token, owner), t);
}

function bar(share, words) {
  return make("span", { class: "meter", style: `--share:${share}` }, words);
}

/** What each rank has sent and computed so far, and how long it waits in the whole run. */
function ranks(step, t) {
  const { P, one } = now;
  const time = one.time[form.wire.value];
  const most = Math.max(...[...Array(P).keys()].map((r) => one.pairs.reduce((sum, row) => sum + row[r], 0)), 1);
  const rows = [...Array(P).keys()].map((r) => {
    const done = one.pairs.slice(0, t + 1).reduce((sum, row) => sum + row[r], 0);
    return [say("rank", { r }), `${sent(r, step)} B`, bar(done / most, String(done)), bar(time.idle[r], `${(100 * time.idle[r]).toFixed(0)} %`)];
  });
  return table(say("ranks so far"), [say("rank head"), say("sent"), say("pairs"), say("idle")], rows, { id: "ranks" });
}

/** The block and the pairs of every rank in every round. */
function rounds(t) {
  const { P, one } = now;
  const rows = one.pairs.map((row, i) => ({
    attributes: i === t ? { class: "now" } : i > t ? { class: "later" } : {},
    cells: [String(i), ...row.map((n, r) => chip((((r - i) % P) + P) % P, `KV${(((r - i) % P) + P) % P} · ${n}`))],
  }));
  return table(say("rounds"), [say("round"), ...[...Array(P).keys()].map((r) => say("rank", { r }))], rows, { id: "rounds" });
}

/** What the rows of a token become with a mistake. */
function mistake(token) {
  const name = form.mistake.value;
  if (!name) return make("p", { class: "muted" }, say("choose a mistake"));
  const { one, S, backward } = now;
  const found = one.wrong[name];
  const right = backward ? one.backward.at(-1)[token] : one.out[token];
  const row = found.rows[token];
  const cells = (x) => (backward ? [pair(x[0], x[1]), pair(x[2], x[3]), pair(x[4], x[5])] : [pair(x[0], x[1])]);
  const verdict = found.tokens ? say("wrong rows", { n: found.tokens, S, off: found.off === null ? "NaN" : found.off.toFixed(4) }) : say("same rows");
  return make("div", {}, make("p", { class: found.tokens ? "sick" : "well" }, `${found.tokens ? "✗" : "✓"} ${verdict}`),
    table(say("compared", { s: token }), ["", ...(backward ? ["dQ", "dK", "dV"] : ["out"])], [[say("right"), ...cells(right)], [say("with it"), ...cells(row)]], { id: "wrong" }));
}

/** Who computes, sends and waits when: a lane for each rank. */
function lanes() {
  const { P, one } = now;
  const time = one.time[form.wire.value];
  const home = document.querySelector("#ring-time"), left = 58, lane = 30;
  const width = Math.max(250, Math.min(640, home.clientWidth - left - 8)); // text keeps its size in a narrow window
  const x = (at) => left + (width * at) / (time.end || 1);
  const idle = time.idle.map((share, r) => say("idle words", { r, share: (100 * share).toFixed(0) })).join(" ");
  const picture = draw("svg", { viewBox: `0 0 ${left + width + 8} ${lane * P + 34}`, role: "img", id: "lanes", "aria-label": `${say("lanes")} ${idle}` });
  picture.append(draw("defs", {}, draw("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    draw("line", { x1: 0, y1: 0, x2: 0, y2: 6, class: "hatch" }))));
  for (let r = 0; r < P; r++) {
    picture.append(draw("text", { x: 2, y: lane * r + 19, class: "small" }, say("rank", { r })));
    picture.append(draw("line", { x1: left, x2: left + width, y1: lane * r + 27, y2: lane * r + 27, class: "lane" }));
  }
  for (const [r, what, , block, begin, end] of time.events) {
    const w = Math.max(x(end) - x(begin) - 1, 0.5);
    const [back, ink] = colour(block);
    if (what === "send") picture.append(draw("rect", { x: x(begin), y: lane * r + 23, width: w, height: 4, fill: back }));
    else picture.append(draw("rect", { x: x(begin), y: lane * r + 5, width: w, height: 17, rx: 2, fill: what === "wait" ? "url(#hatch)" : back }));
    if (what === "compute" && w > 30) picture.append(draw("text", { x: x(begin) + w / 2, y: lane * r + 18, "text-anchor": "middle", class: "small", style: `fill:${ink}` }, `KV${block}`));
  }
  picture.append(draw("text", { x: left, y: lane * P + 24, class: "small muted" }, say("units", { end: time.end })));
  return picture;
}

const films = player(document.querySelector("#ring-player"), show);
settings(form, (name) => change(["token", "wire", "mistake"].includes(name) ? films.at() : 0)); // these keep the round
document.querySelector("#ring").hidden = false;
document.querySelector("#ring-still")?.remove(); // a chapter has none
addEventListener("resize", () => document.querySelector("#ring-time").replaceChildren(lanes()));
await change();
})();
