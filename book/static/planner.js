// The planner: planning.js computes what ringlab/planning computes. The scoreboard: site/data/scoreboard.json.

import { draw, load, make, say, settings, table } from "./explorer.js";
import { blockFlops, digits, hiddenShare, hopBytes, overComputing, plan } from "./planning.js";

const MOST = 512; // devices on this page: every hop is simulated
const form = document.querySelector("#planner-form");
const results = document.querySelector("#planner-results");
const status = document.querySelector("#planner-status");
const presets = await load("planner");
const OF_GPU = { flops: 1e12, bandwidth: 1e9, host_bandwidth: 1e9, memory: 1e9 }; // and the units of their fields
const OF_MODEL = ["heads", "kv_heads", "head_dim", "layers"];
const WHOLE = ["hosts", "per_host", ...OF_MODEL, "seq_len"];
const bytes = { flops: "e12", bandwidth: "e9", host_bandwidth: "e9", memory: "e9" };
const count = (number) => Math.round(number).toLocaleString("en");

// The form -------------------------------------------------------------------------------------------------------------

const label = (field) => field.closest("label").querySelector("span").textContent;

/** A slider below each number that has one: as long a way for each factor of two. */
function sliders() {
  for (const field of form.querySelectorAll("[data-range]")) {
    const grain = Number(field.dataset.range) || 0, [least, most] = [Math.max(Number(field.min), grain || 0.5), Number(field.max)];
    const slider = make("input", { type: "range", min: 0, max: 200, "aria-label": say("slider", { of: label(field) }) });
    slider.oninput = (event) => {
      event.stopPropagation();
      const value = least * (most / least) ** (slider.value / 200);
      field.value = grain ? grain * Math.round(value / grain) : Number(value.toPrecision(2));
      field.dispatchEvent(new Event("input", { bubbles: true }));
    };
    field.after(slider);
    field.slide = () => {
      slider.setAttribute("aria-valuetext", field.value);
      if (document.activeElement !== slider) slider.value = (200 * Math.log(field.value / least)) / Math.log(most / least);
    };
  }
}

function options(select, names, first) {
  select.replaceChildren(...(first ? [make("option", { value: "" }, first)] : []), ...names.map((name) => make("option", { value: name }, name)));
}

/** Fill the numbers of a name, or forget the name when a number changes. */
function named(name) {
  if (name === "gpu" && form.gpu.value)
    for (const [field, unit] of Object.entries(OF_GPU)) form[field].value = Number((presets.gpus[form.gpu.value][field] / unit).toPrecision(3));
  if (name === "model" && form.model.value)
    for (const field of OF_MODEL) form[field].value = presets.models[form.model.value][field];
  if (name in OF_GPU) form.gpu.value = "";
  if (OF_MODEL.includes(name)) form.model.value = "";
}

/** Why these numbers are refused, in a sentence; else nothing. */
function refused() {
  for (const field of form.querySelectorAll("input[type=number]")) {
    const whole = WHOLE.includes(field.name) && !Number.isInteger(Number(field.value));
    const bad = !field.checkValidity() || field.value === "" || whole;
    field.setAttribute("aria-invalid", bad);
    if (bad) return say("refused", { name: label(field), value: field.value || "–", least: field.min, most: count(field.max) });
  }
  const its = Object.fromEntries(WHOLE.map((name) => [name, Number(form[name].value)])), n = its.hosts * its.per_host;
  if (its.heads % its.kv_heads) return say("a multiple", its);
  if (n > MOST) return say("too many devices", { ...its, n, most: MOST });
  return its.seq_len < n ? say("too few tokens", { S: its.seq_len, P: n }) : "";
}

/** What planning.js takes. A number with its unit is read as a terminal reads it: 680 and e12. */
function input() {
  const of = (name) => Number(`${form[name].value}${bytes[name] ?? ""}`);
  const cluster = { hosts: of("hosts"), perHost: of("per_host"), flops: of("flops"), bandwidth: of("bandwidth"), hostBandwidth: of("host_bandwidth") };
  const layer = { heads: of("heads"), kvHeads: of("kv_heads"), headDim: of("head_dim"), itemsize: presets.itemsize[form.dtype.value] };
  return { cluster, layer, layers: of("layers"), seqLen: of("seq_len"), memory: of("memory") };
}

/** The commands that print the same, and the plan of the whole step. */
function commands({ cluster, layer }) {
  const rate = (name) => `${form[name].value}${bytes[name]}`;
  const hosts = `--hosts ${cluster.hosts} --per-host ${cluster.perHost}`, tokens = `--seq-len ${form.seq_len.value}`;
  const wires = `--bandwidth ${rate("bandwidth")}${cluster.hosts > 1 ? ` --host-bandwidth ${rate("host_bandwidth")}` : ""}`;
  const model = `--layers ${form.layers.value} --hidden ${layer.heads * layer.headDim} --heads ${layer.heads} --kv-heads ${layer.kvHeads} --dtype ${form.dtype.value}`;
  const ideal = [`ring-plan ${hosts} ${tokens}`, `--flops ${rate("flops")} --memory ${rate("memory")}`, wires, model].join(" \\\n    ");
  const whole = form.gpu.value && form.model.value ? `ring-plan --model ${form.model.value} --gpu ${form.gpu.value} ${hosts} ${tokens}` : `# ${say("no names")}`;
  return `${ideal}\n\n${whole}`;
}

// Curves ---------------------------------------------------------------------------------------------------------------

const LEFT = 58, RIGHT = 12, TOP = 24, BOTTOM = 44;

/** Both axes logarithmic. x and y are { least, most, title, ticks: [[value, words]] }. `fill` draws with the scales. */
function curves(home, words, x, y, fill) {
  const width = Math.max(290, Math.min(760, home.clientWidth || 640)), height = Math.round(Math.min(380, 200 + width / 4));
  const scale = (axis, from, to) => (value) => from + ((to - from) * Math.log(value / axis.least)) / Math.log(axis.most / axis.least);
  const X = scale(x, LEFT, width - RIGHT), Y = scale(y, height - BOTTOM, TOP);
  const picture = draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": words, class: "curves" });
  const spread = (ticks, room, at) => ticks.filter((_, i) => i % Math.ceil((ticks.length * room) / Math.abs(at(ticks.at(-1)[0]) - at(ticks[0][0]) || 1)) === 0);
  for (const [value, label] of spread(x.ticks, 56, X))
    picture.append(draw("line", { x1: X(value), x2: X(value), y1: TOP, y2: height - BOTTOM, class: "grid" }),
      draw("text", { x: X(value), y: height - BOTTOM + 17, "text-anchor": "middle", class: "small" }, label));
  for (const [value, label] of spread(y.ticks, 26, Y))
    picture.append(draw("line", { x1: LEFT, x2: width - RIGHT, y1: Y(value), y2: Y(value), class: "grid" }),
      draw("text", { x: LEFT - 6, y: Y(value) + 5, "text-anchor": "end", class: "small" }, label));
  picture.append(draw("text", { x: (LEFT + width - RIGHT) / 2, y: height - 8, "text-anchor": "middle", class: "small" }, x.title),
    draw("text", { x: 2, y: 14, class: "small" }, y.title));
  const inside = draw("g");
  picture.append(inside);
  const line = (kind, f, from = x.least, to = x.most) => {
    const points = [...Array(65).keys()].map((i) => from * (to / from) ** (i / 64)).map((at) => [X(at), Y(f(at))]).filter(([, at]) => at >= TOP - 1 && at <= height - BOTTOM + 1);
    inside.append(draw("polyline", { points: points.map((point) => point.map((n) => n.toFixed(1)).join(",")).join(" "), class: `curve ${kind}` }));
  };
  const through = (kind, points) =>
    inside.append(draw("polyline", { points: points.map(([at, value]) => `${X(at).toFixed(1)},${Y(value).toFixed(1)}`).join(" "), class: `curve ${kind}` }));
  const upright = (at, label) => {
    const left = X(at) > width - 120;
    inside.append(draw("line", { x1: X(at), x2: X(at), y1: TOP, y2: height - BOTTOM, class: "yours" }),
      draw("text", { x: X(at) + (left ? -5 : 5), y: TOP + 12, "text-anchor": left ? "end" : "start", class: "bold small halo" }, label));
  };
  const point = (at, value, label, above) => {
    inside.append(draw("circle", { cx: X(at), cy: Y(value), r: 5, class: "crossing" }),
      draw("text", { x: X(at) + (above ? -9 : 9), y: Y(value) + (above ? -7 : 17), "text-anchor": above ? "end" : "start", class: "small halo" }, label));
  };
  fill({ line, through, upright, point });
  return picture;
}

/** What each kind of line means. */
function legend(kinds) {
  return make("ul", { class: "legend" }, ...kinds.map(([kind, words]) => make("li", {},
    draw("svg", { width: 34, height: 12, "aria-hidden": "true" }, draw("line", { x1: 1, x2: 33, y1: 6, y2: 6, class: `curve ${kind}` })), words)));
}

const tokensTicks = (least, most) => [...Array(40).keys()].map((i) => 2 ** i).filter((n) => n >= least && n <= most)
  .map((n) => [n, n < 1024 ? String(n) : n < 2 ** 20 ? `${n / 1024}K` : `${n / 2 ** 20}M`]);
/** Powers of ten; between near ones, 2 and 5 times them too. */
const powers = (least, most) => [...Array(40).keys()].map((i) => i - 15).flatMap((i) => (most / least < 300 ? [1, 2, 5] : [1])
  .map((n) => [Number(`${n}e${i}`), i > 3 || i < -3 ? `${n}e${i}` : String(Number(`${n}e${i}`))])).filter(([n]) => n >= least && n <= most);

/** Milliseconds of a block and of its hops, against the chunk. */
function hiddenPicture(home, { cluster, layer }, { chunk, thresholds }) {
  const backward = form.pass.value === "backward", its = thresholds.filter((each) => each.backward === backward);
  const computing = (C) => (1e3 * blockFlops(layer, (1 / 2) * C ** 2, backward)) / cluster.flops;
  const all = [chunk, ...its.map((each) => each.chunk)];
  const x = { least: Math.max(1, Math.min(...all) / 8), most: Math.max(...all) * 8, title: say("chunk axis") };
  x.ticks = tokensTicks(x.least, x.most);
  const hop = ({ rate }) => (C) => (1e3 * hopBytes(layer, C, backward)) / rate;
  const values = [computing, ...its.map(hop)].flatMap((f) => [f(x.least), f(x.most)]);
  const y = { least: Math.min(...values), most: Math.max(...values), title: "ms" };
  y.ticks = powers(y.least, y.most);
  const points = its.map((each) => say(`crossing ${each.link}`, { C: count(each.chunk) })).join(" ");
  const picture = curves(home, say("hidden picture", { points, chunk: count(chunk) }), x, y, ({ line, upright, point }) => {
    line("computing", computing);
    for (const each of its) line(each.link, hop(each));
    upright(chunk, say("your chunk", { C: count(chunk) }));
    const ordered = [...its].sort((a, b) => b.chunk - a.chunk); // labels on both sides in turn: two may be near
    ordered.forEach((each, i) => point(each.chunk, computing(each.chunk), count(each.chunk), i % 2));
  });
  home.replaceChildren(picture, legend([["computing", say("computing line")], ...its.map(({ link }) => [link, say(`${link} line`)])]));
}

/** GB of a device in a ring, against the tokens. */
function memoryPicture(home, { layer, layers, seqLen, memory }, { P, state, token, longest }) {
  const row = layers * layer.itemsize * layer.heads * layer.headDim, x = { title: say("tokens axis") };
  x.least = Math.max(1, Math.min(seqLen, longest || seqLen) / 64);
  x.most = 8 * Math.max(seqLen, longest);
  x.ticks = tokensTicks(x.least, x.most);
  const held = (S) => (state + (S / P) * token) / 1e9, inputs = (S) => ((S / P) * row) / 1e9, one = (S) => ((S / P) * (token - row)) / 1e9;
  const y = { least: Math.min(state / 1e9, held(x.least)) / 8, most: Math.max(2 * memory / 1e9, held(x.most)), title: "GB" };
  y.ticks = powers(y.least, y.most);
  const words = say("memory picture", { memory: digits(memory / 1e9), longest: count(longest), held: digits(held(seqLen)) });
  const picture = curves(home, words, x, y, ({ line, upright, point }) => {
    line("state", () => state / 1e9);
    line("inputs", inputs);
    line("layer", one);
    line("device", () => memory / 1e9);
    line("held", held);
    upright(seqLen, say("your tokens", { S: count(seqLen) }));
    if (longest) point(longest, held(longest), count(longest), true);
  });
  home.replaceChildren(picture, legend(["held", "device", "state", "inputs", "layer"].map((kind) => [kind, say(`${kind} line`)])));
}

const WAYS = ["ring", "double ring", "all-gather", "all-to-all", "hybrid"];
const FREE = 1.05; // times computing alone
let drawing = 0; // counts the pictures of lengths: a newer one stops an older one

/** The time of each way against the tokens, in times of computing alone: a length at a time, so that the page stays awake. */
async function lengthsPicture(home, its, { P }) {
  const mine = ++drawing, lengths = [...Array(15).keys()].map((i) => 2 ** (i + 10)).filter((S) => S >= P);
  const points = Object.fromEntries(WAYS.map((way) => [way, []]));
  home.setAttribute("aria-busy", true);
  for (const S of lengths) {
    await new Promise((done) => setTimeout(done));
    if (mine !== drawing) return;
    for (const [way, times] of Object.entries(overComputing(say, { ...its, seqLen: S }))) points[way].push([S, times]);
  }
  const shown = WAYS.filter((way) => points[way].length), most = Math.max(2, ...shown.flatMap((way) => points[way].map(([, times]) => times)));
  const free = (way) => points[way].findIndex((_, i) => points[way].slice(i).every(([, times]) => times <= FREE));
  const from = shown.map((way) => (free(way) < 0 ? say("never free", { way }) : say("nearly free", { way, S: count(points[way][free(way)][0]) })));
  const x = { least: lengths[0], most: lengths.at(-1), title: say("tokens axis"), ticks: tokensTicks(lengths[0], lengths.at(-1)) };
  const y = { least: 1, most, title: say("times axis"), ticks: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10000].filter((n) => n <= most).map((n) => [n, count(n)]) };
  const picture = curves(home, say("lengths picture", { points: from.join(" ") }), x, y, ({ through, upright }) => {
    for (const way of shown) through(way.replace(" ", "-"), points[way]);
    if (its.seqLen >= x.least && its.seqLen <= x.most) upright(its.seqLen, say("your tokens", { S: count(its.seqLen) }));
  });
  home.replaceChildren(picture, legend(shown.map((way, i) => [way.replace(" ", "-"), from[i]])));
  home.setAttribute("aria-busy", false);
}

// Tables ---------------------------------------------------------------------------------------------------------------

function thresholds({ P, chunk, thresholds: all }) {
  const rows = all.map((each) => [say(each.link), say(each.backward ? "backward" : "forward"), count(Math.ceil(each.chunk)), count(Math.ceil(each.chunk) * P), `${(100 * hiddenShare(chunk, each.chunk)).toFixed(0)} %`]);
  return table(say("thresholds"), [say("wire"), say("of pass"), say("smallest chunk"), say("smallest sequence"), say("share")], rows, { id: "thresholds" });
}

function ways({ rows, computing }) {
  if (!rows.length) return make("p", { class: "muted" }, say("no ways"));
  const slowest = Math.max(...rows.filter((row) => row.seconds < Infinity).map((row) => row.seconds));
  const shown = rows.map((row, i) => {
    if (row.seconds === Infinity) return [row.name, "–", "–", "–", "–", "–", say("not possible", { why: row.why })];
    const words = row.sequences > 1 ? say("at once", { n: row.sequences, each: digits((1e3 * row.seconds) / row.sequences), why: row.why }) : row.why;
    const time = make("span", { class: "meter", style: `--share:${row.seconds / slowest}` }, digits(1e3 * row.seconds));
    const over = row.seconds - row.sequences * computing, exposed = over > 1e-9 * row.seconds ? over : 0;
    return { attributes: i ? {} : { class: "now" }, cells: [row.name, time, digits(1e3 * exposed), digits(row.inHost / 1e9), digits(row.between / 1e9), digits(row.held / 1e9), words] };
  });
  const heads = ["way", "ms", "exposed", "in host", "between hosts", "held", "why"].map((head) => say(head));
  return table(say("ways"), heads, shown, { id: "ways" });
}

// All of it ------------------------------------------------------------------------------------------------------------

let timer = null;

function change() {
  for (const field of form.querySelectorAll("[data-range]")) field.slide();
  const fault = refused();
  results.hidden = Boolean(fault);
  clearTimeout(timer);
  drawing += 1;
  if (fault) {
    status.textContent = fault;
    results.setAttribute("aria-busy", false);
    return;
  }
  results.setAttribute("aria-busy", true);
  timer = setTimeout(show, 60);
}

function show() {
  const its = input(), found = plan(say, its);
  status.replaceChildren(make("strong", {}, say("advice head", { advice: found.advice })));
  const facts = [say("chunk fact", { P: found.P, chunk: count(found.chunk) }), say("longest fact", { longest: count(found.longest) }), say("rings fact", { advice: found.ofRing })];
  if (found.many) facts.push(say("many fact", { many: found.many }));
  document.querySelector("#planner-facts").replaceChildren(...facts.map((fact) => make("li", {}, fact)));
  const hidden = document.querySelector("#planner-hidden");
  if (found.thresholds.length) hiddenPicture(hidden, its, found);
  else hidden.replaceChildren(make("p", { class: "muted" }, say("nothing travels")));
  document.querySelector("#planner-thresholds").replaceChildren(...(found.thresholds.length ? [thresholds(found)] : []));
  memoryPicture(document.querySelector("#planner-memory"), its, found);
  document.querySelector("[data-say='ways words']").textContent = found.rows.length ? say("ways words", { computing: digits(1e3 * found.computing) }) : "";
  document.querySelector("#planner-ways").replaceChildren(ways(found));
  document.querySelector("#planner-command").textContent = commands(its);
  const lengths = document.querySelector("#planner-lengths");
  if (found.P > 1) lengthsPicture(lengths, its, found);
  else lengths.replaceChildren(make("p", { class: "muted" }, say("nothing travels")));
  results.setAttribute("aria-busy", false);
}

// The scoreboard -------------------------------------------------------------------------------------------------------

const SHAPES = { ring: "M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0", "double ring": "M0,-6L6,0L0,6L-6,0z", "all-gather": "M-5,-5h10v10h-10z", "all-to-all": "M0,-6L6,5h-12z", hybrid: "M-2,-6h4v4h4v4h-4v4h-4v-4h-4v-4h4z" };

async function scoreboard() {
  const board = await load("scoreboard"), choose = document.querySelector("#scoreboard-form");
  const home = document.querySelector("#scoreboard-table table"), lines = [...home.tBodies[0].rows];
  const percent = (share) => (100 * share).toFixed(1);
  const { errors } = board;
  document.querySelector("#scoreboard-summary").textContent = say("scoreboard summary", {
    n: board.attention, median: percent(errors.median), nine: percent(errors["nine in ten"]), worst: percent(errors.worst), right: board.right, questions: board.questions });
  options(choose.way, [...new Set(board.rows.map((row) => row.way))], say("all"));
  for (const option of choose.way.options) if (["steps", "serving"].includes(option.value)) option.textContent = say(option.value);
  options(choose.source, [...new Set(board.rows.map((row) => row.source))], say("all"));
  const picture = () => {
    const ofTime = board.rows.filter((row) => row.way in SHAPES), at = document.querySelector("#scoreboard-picture");
    const seen = ofTime.filter((row) => matches(row)), kinds = [...new Set(ofTime.map((row) => row.way))];
    at.replaceChildren(...(seen.length ? [scatter(at, ofTime, seen), shapes(kinds)] : []));
  };
  const matches = (row) => (!choose.way.value || row.way === choose.way.value) && (!choose.source.value || row.source === choose.source.value);
  const filter = () => {
    board.rows.forEach((row, i) => { lines[i].hidden = !matches(row); });
    document.querySelector("#scoreboard-status").textContent = say("shown", { n: board.rows.filter(matches).length, of: board.rows.length });
    picture();
  };
  const keys = ["case", "way", "measured", "predicted", "error", "source"];
  [...home.tHead.rows[0].cells].forEach((head, column) => {
    const words = head.textContent.trim(), button = make("button", { type: "button", "aria-label": say("sort by", { column: words }) }, words);
    button.onclick = () => {
      const down = head.getAttribute("aria-sort") === "ascending" ? -1 : 1, key = keys[column];
      for (const each of home.tHead.rows[0].cells) each.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down > 0 ? "ascending" : "descending");
      const order = board.rows.map((_, i) => i).sort((a, b) => down * (board.rows[a][key] < board.rows[b][key] ? -1 : board.rows[a][key] > board.rows[b][key] ? 1 : 0));
      home.tBodies[0].append(...order.map((i) => lines[i]));
    };
    head.replaceChildren(button);
  });
  choose.addEventListener("submit", (event) => event.preventDefault());
  choose.addEventListener("input", filter);
  addEventListener("resize", picture);
  document.querySelector("#scoreboard").hidden = false;
  filter();
}

/** Measured times of attention, and the error of each prediction; those that are not chosen are pale. */
function scatter(home, all, seen) {
  const width = Math.max(290, Math.min(760, home.clientWidth || 640)), height = 300, times = all.map((row) => row.measured);
  const [least, most] = [Math.min(...times) / 1.5, Math.max(...times) * 1.5], reach = 10 * Math.ceil(10 * Math.max(...all.map((row) => Math.abs(row.error))));
  const X = (at) => LEFT + ((width - LEFT - RIGHT) * Math.log(at / least)) / Math.log(most / least);
  const Y = (error) => (TOP + height - BOTTOM) / 2 - ((height - TOP - BOTTOM) / 2) * ((100 * error) / reach);
  const errors = seen.map((row) => 100 * row.error), sign = (n) => `${n > 0 ? "+" : n < 0 ? "−" : ""}${Math.abs(n).toFixed(0)}`;
  const words = say("scoreboard picture", { n: seen.length, least: sign(Math.min(...errors)), most: sign(Math.max(...errors)) });
  const picture = draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": words, class: "curves" });
  for (const [value, label] of powers(least, most))
    picture.append(draw("line", { x1: X(value), x2: X(value), y1: TOP, y2: height - BOTTOM, class: "grid" }),
      draw("text", { x: X(value), y: height - BOTTOM + 17, "text-anchor": "middle", class: "small" }, label));
  for (const error of [-reach, -reach / 2, 0, reach / 2, reach])
    picture.append(draw("line", { x1: LEFT, x2: width - RIGHT, y1: Y(error / 100), y2: Y(error / 100), class: error ? "grid" : "axis" }),
      draw("text", { x: LEFT - 6, y: Y(error / 100) + 5, "text-anchor": "end", class: "small" }, sign(error)));
  picture.append(draw("text", { x: (LEFT + width - RIGHT) / 2, y: height - 8, "text-anchor": "middle", class: "small" }, say("measured axis")),
    draw("text", { x: 2, y: 14, class: "small" }, say("error axis")));
  for (const row of [...all].sort((a, b) => seen.includes(a) - seen.includes(b)))
    picture.append(draw("path", { d: SHAPES[row.way], transform: `translate(${X(row.measured).toFixed(1)} ${Y(row.error).toFixed(1)})`, class: seen.includes(row) ? "mark-of-way" : "mark-of-way pale" },
      draw("title", {}, `${row.case}: ${digits(row.measured)} ms, ${digits(row.predicted)} ms`)));
  return picture;
}

function shapes(kinds) {
  return make("ul", { class: "legend" }, ...kinds.map((kind) => make("li", {},
    draw("svg", { width: 16, height: 14, viewBox: "-8 -7 16 14", "aria-hidden": "true" }, draw("path", { d: SHAPES[kind], class: "mark-of-way" })), kind)));
}

options(form.gpu, Object.keys(presets.gpus), say("own numbers"));
options(form.model, Object.keys(presets.models), say("own numbers"));
options(form.dtype, Object.keys(presets.itemsize));
form.gpu.value = "h100";
form.model.value = "llama-3.1-8b";
form.dtype.value = "bf16";
named("gpu");
named("model");
sliders();
form.addEventListener("input", (event) => named(event.target.name));
settings(form, change);
document.querySelector("#planner").hidden = false;
document.querySelector("#planner-still").hidden = true;
let wide = innerWidth;
addEventListener("resize", () => { if (innerWidth !== wide) { wide = innerWidth; change(); } });
change();
await scoreboard();
document.querySelector("#planner").dataset.ready = "yes";
