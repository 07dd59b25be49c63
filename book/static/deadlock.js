// Deadlock: who sends first, and what moves then. The simulator is that of explorer.js; a test compares it with ringlab's.

(() => {
  const { keep, make, messages, player, say, settings, simulate, table } = explorer;
  const home = document.querySelector("#deadlock"), form = document.querySelector("#deadlock-form");
  let order = [..."SSSS"], outcome = null;

  const word = (letter) => (letter === "S" ? say("sends") : say("receives"));

  /** One button a rank: who sends first. */
  function change() {
    const P = Number(form.P.value);
    form.querySelector("output").textContent = P;
    while (order.length < P) order.push(form.dataset.odd === "yes" && order.length % 2 ? "R" : "S");
    order.length = P;
    form.order.value = order.join("");
    document.querySelector("#orders").replaceChildren(...order.map((letter, r) => {
      const button = make("button", { type: "button", "data-rank": r }, say("order of", { r, order: word(letter) }));
      button.onclick = () => { order[r] = order[r] === "S" ? "R" : "S"; change(); keep(form); document.querySelector(`#orders [data-rank="${r}"]`).focus(); };
      return button;
    }));
    outcome = simulate(order.map((letter, r) => {
      const hop = [[["S", (r + 1) % P]], [["R", (r - 1 + P) % P]]];
      return letter === "S" ? hop : hop.reverse();
    }));
    film.reset(messages(outcome, P, 0).last);
  }

  function show(step) {
    const P = order.length;
    const { picture, told, done } = messages(outcome, P, step, (r) => (order[r] === "S" ? "S R" : "R S"));
    picture.id = "deadlock-picture";
    document.querySelector("#deadlock-stage").replaceChildren(picture);
    document.querySelector("#deadlock-status").textContent = told;
    const rows = order.map((letter, r) => {
      const peer = outcome.waits[r];
      return [say("rank", { r }), say(`program ${letter}`, { next: (r + 1) % P, prev: (r - 1 + P) % P }),
        !done ? "…" : peer === undefined ? `✓ ${say("ended")}` : `✗ ${say("waits for", { peer })}`];
    });
    document.querySelector("#deadlock-table").replaceChildren(table(say("programs"), [say("rank head"), say("its program"), say("at the end")], rows, { id: "programs" }));
  }

  /** Who sends first, for all ranks at once. */
  function all(letters, odd) {
    form.dataset.odd = odd;
    order = order.map((_, r) => letters[r % 2]);
    change();
    keep(form);
  }

  const film = player(document.querySelector("#deadlock-player"), show);
  settings(form, () => { change(); keep(form); });
  if (/^[SR]{2,8}$/.test(form.order.value)) { order = [...form.order.value]; form.P.value = order.length; }
  document.querySelector("#all-send").onclick = () => all("SS", "");
  document.querySelector("#even-odd").onclick = () => all("SR", "yes");
  home.hidden = false;
  document.querySelector("#deadlock-still")?.remove(); // a chapter has none
  change();
  home.dataset.ready = "yes";
})();
