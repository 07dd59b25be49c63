// Deadlock: every outcome is from site/data/deadlock.json, which simulate_messages of ringlab computed.

import { arrow, draw, load, make, place, player, say, settings, table } from "./explorer.js";

const form = document.querySelector("#deadlock-form");
const stage = document.querySelector("#deadlock-stage");
const outcomes = await load("deadlock");
const puzzles = await load("puzzles");
let order = [..."SSSS"];
let outcome = null;
let programs = null; // of a puzzle

const word = (letter) => (letter === "S" ? say("sends") : say("receives"));

/** One button a rank: who sends first. */
function buttons() {
  const P = Number(form.P.value);
  form.querySelector("output").textContent = P;
  while (order.length < P) order.push(form.dataset.odd === "yes" && order.length % 2 ? "R" : "S");
  order.length = P;
  document.querySelector("#orders").replaceChildren(...order.map((letter, r) => {
    const button = make("button", { type: "button", "data-rank": r }, say("order of", { r, order: word(letter) }));
    button.onclick = () => { order[r] = order[r] === "S" ? "R" : "S"; keep(); buttons(); document.querySelector(`#orders [data-rank="${r}"]`).focus(); };
    return button;
  }));
  const puzzle = puzzles[form.puzzle.value];
  for (const its of [form.P, ...form.querySelectorAll("button")]) its.disabled = Boolean(puzzle);
  document.querySelector("#who-first").hidden = Boolean(puzzle);
  programs = puzzle?.programs;
  outcome = puzzle ?? outcomes[order.join("")];
  film.reset(Math.max(...outcome.moves.map(([phase]) => phase + 1), 0) + 1);
}

function keep() {
  form.order.value = order.join("");
  history.replaceState(null, "", `#${new URLSearchParams(new FormData(form))}`);
}

/** What a rank sends (S) and receives (R), in its order. */
function letters(r) {
  if (!programs) return order[r] === "S" ? "S R" : "R S";
  return programs[r].map(([letter]) => letter).join(programs[r].length > 2 ? "" : " ") || "–";
}

function program(r, P) {
  if (!programs) return say(`program ${order[r]}`, { next: (r + 1) % P, prev: (r - 1 + P) % P });
  return programs[r].map(([letter, peer]) => say(letter === "S" ? "send to" : "receive from", { peer })).join(" · ") || say("no messages");
}

/** Step n: the messages of phase n - 1 have moved; the last step shows who still waits. */
function show(step) {
  const P = programs?.length ?? order.length;
  const at = (r) => place(r, P, 150, 220, 200);
  const phases = Math.max(...outcome.moves.map(([phase]) => phase + 1), 0);
  const done = step > phases;
  const stuck = Object.keys(outcome.waits).length > 0;
  const picture = draw("svg", { viewBox: "0 0 440 400", role: "img", id: "deadlock-picture" });
  const moved = outcome.moves.filter(([phase]) => phase < step);
  const lines = draw("g");
  for (const [phase, from, to] of moved)
    lines.append(arrow(at(from), at(to), 34, { class: phase === step - 1 && !done ? "moves" : "moved" }));
  if (done) for (const [rank, peer] of Object.entries(outcome.waits)) {
    const inside = outcome.circle.includes(Number(rank));
    const [a, b] = [at(Number(rank)), at(peer)];
    lines.append(arrow(a, b, 34, { class: inside ? "waits circle" : "waits" }));
  }
  picture.append(lines);
  for (let r = 0; r < P; r++) {
    const [x, y] = at(r);
    const waiting = done && outcome.waits[r] !== undefined;
    picture.append(draw("g", { class: waiting ? "rank stuck" : "rank" },
      draw("circle", { cx: x, cy: y, r: 30 }),
      draw("text", { x, y: y - 2, "text-anchor": "middle", class: "bold" }, String(r)),
      draw("text", { x, y: y + 14, "text-anchor": "middle", class: "small" }, letters(r))));
  }
  picture.append(draw("text", { x: 220, y: 205, "text-anchor": "middle", class: "bold" },
    done ? (stuck ? `✗ ${say("stops")}` : `✓ ${say("runs")}`) : step ? say("phase", { n: step - 1 }) : say("ready")));
  const list = (moves) => moves.map(([, from, to]) => `${from} → ${to}`).join(", ") || say("nothing");
  const circle = [...outcome.circle, outcome.circle[0]].join(" → ");
  const words = done
    ? stuck ? `${say("stuck", { n: outcome.moves.length })} ${outcome.circle.length ? say("circle", { circle }) : say("no circle")}`
      : say("ran", { phases, n: outcome.moves.length })
    : step ? say("in phase", { n: step - 1, moves: list(outcome.moves.filter(([phase]) => phase === step - 1)) }) : say("begin");
  picture.setAttribute("aria-label", words);
  stage.replaceChildren(picture);
  document.querySelector("#deadlock-status").textContent = words;
  const rows = [...Array(P).keys()].map((r) => {
    const peer = outcome.waits[r];
    const state = !done ? "…" : peer === undefined ? `✓ ${say("ended")}` : `✗ ${say("waits for", { peer })}`;
    return [say("rank", { r }), program(r, P), state];
  });
  document.querySelector("#deadlock-table").replaceChildren(table(say("programs"), [say("rank head"), say("its program"), say("at the end")], rows, { id: "programs" }));
}

form.puzzle.append(...Object.keys(puzzles).map((name) => make("option", { value: name }, say(name))));
const film = player(document.querySelector("#deadlock-player"), show);
settings(form, () => { buttons(); keep(); });
if (/^[SR]{2,8}$/.test(form.order.value)) { order = [...form.order.value]; form.P.value = order.length; }
document.querySelector("#all-send").onclick = () => { form.dataset.odd = ""; order = order.map(() => "S"); keep(); buttons(); };
document.querySelector("#even-odd").onclick = () => { form.dataset.odd = "yes"; order = order.map((_, r) => (r % 2 ? "R" : "S")); keep(); buttons(); };
document.querySelector("#deadlock").hidden = false;
document.querySelector("#deadlock-still")?.remove(); // a chapter has none
buttons();
document.querySelector("#deadlock").dataset.ready = "yes";
