// The X-ray: the tiles of a doctor's report (ring-doctor ... --json report.json). The file stays in the browser.

(async () => {
const { load, make, say, settings, table } = explorer;
const home = document.querySelector("#xray-report");
const form = document.querySelector("#xray-form");
const drop = document.querySelector("#drop");

function tile(label) {
  const kind = label === "ok" ? "ok" : label === "-" ? "hidden" : "bad";
  const words = label === "-" ? `· ${say("masked")}` : kind === "ok" ? "✓ ok" : `✗ ${label}`;
  return make("span", { class: `tile ${kind}` }, words);
}

function show(report) {
  const parts = [make("p", { class: "heading" }, report.name ?? say("report"))];
  for (const remark of report.remarks ?? []) parts.push(make("p", {}, remark));
  if (report.when) parts.push(make("p", {}, report.when));
  if (!report.grids.length) parts.push(make("p", { class: "muted" }, say("no xray")));
  for (const { title, tiles, holds } of report.grids) {
    const rows = tiles.map((labels, rank) => [`rank ${rank}`, ...labels.map(tile)]);
    if (rows.length) parts.push(table(title, ["", ...tiles.map((_, j) => `KV${j}`)], rows, { class: "tiles" }));
    else parts.push(make("p", {}, title));
    if (holds.length) parts.push(make("ul", {}, ...holds.map((line) => make("li", {}, line))));
  }
  home.replaceChildren(...parts);
  tell(`${report.healthy ? "✓" : "✗"} ${report.verdict}`, report.healthy);
}

function tell(words, well) {
  const status = document.querySelector("#xray-status");
  status.textContent = words;
  status.className = `status ${well ? "well" : "sick"}`;
}

async function read(file) {
  try {
    const report = JSON.parse(await file.text());
    if (typeof report.verdict !== "string" || !Array.isArray(report.grids)) throw new Error(say("no report"));
    show(report);
  } catch (error) {
    tell(say("unreadable", { name: file.name, why: error.message }));
    home.replaceChildren();
  }
}

/** Show the example that is chosen. */
async function example() {
  document.querySelector("#xray").dataset.ready = "no";
  const chosen = form.example.value, report = await load(chosen);
  if (form.example.value !== chosen) return;
  show(report);
  document.querySelector("#xray").dataset.ready = "yes";
}

settings(form, (name) => name === "example" && example());
form.file.addEventListener("change", () => form.file.files.length && read(form.file.files[0]));
for (const name of ["dragover", "dragenter"]) drop.addEventListener(name, (event) => { event.preventDefault(); drop.classList.add("over"); });
drop.addEventListener("dragleave", () => drop.classList.remove("over"));
drop.addEventListener("drop", (event) => {
  event.preventDefault();
  drop.classList.remove("over");
  if (event.dataTransfer.files.length) read(event.dataTransfer.files[0]);
});
document.querySelector("#xray").hidden = false;
await example();
})();
