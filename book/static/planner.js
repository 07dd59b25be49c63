// The planner's answers, computed by ring-plan: site/data/planner-MODEL.js. The scoreboard: site/data/scoreboard.js.

(async () => {
const { load, make, say, settings, table } = explorer;
const form = document.querySelector("#planner-form");
const status = document.querySelector("#planner-status");
const its = await load("planner");
let model = null; // the answers and thresholds of the model that is chosen
const count = (number) => Math.round(number).toLocaleString("en");
/** A number with as many digits as ring-plan prints. */
function digits(number, most = 3) {
  const rounded = Number(number.toPrecision(most));
  return rounded >= 10 ** (most - 1) ? count(rounded) : rounded.toString();
}

function options(select, names, first) {
  select.replaceChildren(...(first ? [make("option", { value: "" }, first)] : []), ...names.map((name) => make("option", { value: name }, name)));
}

/** The answers of the model and GPU that are chosen: by hosts, by length; nothing where no way fits. */
const answers = () => model.answers[form.gpu.value];

/** A table of all hosts and lengths; the chosen row is marked. */
function all() {
  const rows = its.hosts.flatMap((hosts, i) => its.lengths.map((S, j) => {
    const found = answers()[i][j];
    const cells = [`${hosts} x 8`, count(S), ...(found ? [digits(found.speed, 4), digits(found.seconds, 4), digits(found.gib), found.way] : ["–", "–", "–", say("does not fit")])];
    const chosen = String(hosts) === form.hosts.value && String(S) === form.seq_len.value;
    return { attributes: chosen ? { class: "now" } : {}, cells };
  }));
  return table(say("answers"), ["hosts", "seq_len", "speed", "seconds", "held", "way"].map((head) => say(head)), rows, { id: "ways" });
}

/** From which chunk on a hop of a ring is hidden, in training. */
function thresholds() {
  const found = model.thresholds[form.gpu.value], P = 8 * Number(form.hosts.value);
  const rows = Object.entries(found).map(([wire, chunk]) => [say(wire), count(chunk), count(chunk * P)]);
  return table(say("thresholds"), ["wire", "smallest chunk", "smallest sequence"].map((head) => say(head)), rows, { id: "thresholds" });
}

async function change() {
  const home = document.querySelector("#planner");
  home.dataset.ready = "no";
  const asked = form.model.value, loaded = await load(`planner-${asked}`);
  if (form.model.value !== asked) return;
  model = loaded;
  const hosts = Number(form.hosts.value), S = Number(form.seq_len.value);
  const found = answers()[its.hosts.indexOf(hosts)][its.lengths.indexOf(S)];
  const words = found ? { ...found, speed: digits(found.speed, 4), seconds: digits(found.seconds, 4), gib: digits(found.gib) } : {};
  status.replaceChildren(make("strong", {}, say(found ? "advice" : "nothing fits", words)));
  const known = found?.interval ? say("interval", { low: digits(found.interval[0]), high: digits(found.interval[1]), rows: found.interval[2] }) : say("not known");
  const indexer = model.indexer ? say("indexer", { keys: count(model.indexer) }) : "";
  document.querySelector("#planner-facts").textContent = `${found ? known : ""} ${indexer}`.trim();
  document.querySelector("#planner-ways").replaceChildren(all());
  document.querySelector("#planner-thresholds").replaceChildren(thresholds());
  document.querySelector("#planner-command").textContent =
    `ring-plan --model ${form.model.value} --gpu ${form.gpu.value} --hosts ${hosts} --seq-len ${S}`;
  home.dataset.ready = "yes";
}

// The scoreboard -------------------------------------------------------------------------------------------------------

async function scoreboard() {
  const board = await load("scoreboard"), choose = document.querySelector("#scoreboard-form");
  const home = document.querySelector("#scoreboard-table table"), lines = [...home.tBodies[0].rows];
  const words = (line, column) => line.cells[column].textContent.trim(), [WAY, MEASURED, ERROR, SOURCE] = [1, 2, 4, 5];
  const percent = (share) => (100 * share).toFixed(1);
  const { errors } = board;
  document.querySelector("#scoreboard-summary").textContent = say("scoreboard summary", {
    n: board.times, median: percent(errors.median), nine: percent(errors["nine in ten"]), worst: percent(errors.worst), right: board.right, questions: board.questions });
  for (const [select, column] of [[choose.way, WAY], [choose.source, SOURCE]])
    options(select, [...new Set(lines.map((line) => words(line, column)))], say("all"));
  for (const option of choose.way.options) if (["steps", "serving"].includes(option.value)) option.textContent = say(option.value);
  const filter = () => {
    for (const line of lines) line.hidden = ![[choose.way, WAY], [choose.source, SOURCE]].every(([select, column]) => !select.value || select.value === words(line, column));
    document.querySelector("#scoreboard-status").textContent = say("shown", { n: lines.filter((line) => !line.hidden).length, of: lines.length });
  };
  [...home.tHead.rows[0].cells].forEach((head, column) => {
    const name = head.textContent.trim(), button = make("button", { type: "button", "aria-label": say("sort by", { column: name }) }, name);
    const key = (line) => (MEASURED <= column && column <= ERROR ? parseFloat(words(line, column).replaceAll(",", "")) : words(line, column));
    button.onclick = () => {
      const down = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      for (const each of home.tHead.rows[0].cells) each.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down > 0 ? "ascending" : "descending");
      home.tBodies[0].append(...[...lines].sort((a, b) => down * (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0)));
    };
    head.replaceChildren(button);
  });
  choose.addEventListener("submit", (event) => event.preventDefault());
  choose.addEventListener("input", filter);
  document.querySelector("#scoreboard").hidden = false;
  filter();
}

options(form.gpu, its.gpus);
options(form.model, its.models);
options(form.hosts, its.hosts);
options(form.seq_len, its.lengths);
form.gpu.value = "h100";
form.model.value = "llama-3.1-8b";
form.seq_len.value = "131072";
settings(form, change);
document.querySelector("#planner").hidden = false;
document.querySelector("#planner-still")?.remove(); // another page has none
if (document.querySelector("#scoreboard")) await scoreboard();
await change();
})();
