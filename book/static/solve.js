// Puzzles that the page judges: a reader writes the messages of four ranks, or deals out tokens. Mistakes have names.

(() => {
  const { make, messages, player, say, settings, simulate, table } = explorer;
  const P = 4, RANKS = [0, 1, 2, 3], S = 16;
  const home = document.querySelector("#solve"), form = document.querySelector("#solve-form");
  const FIRST = { // the first tries of the notebook, and chunks as they come
    hop: "0: send 1, recv 3\n1: send 2, recv 0\n2: send 3, recv 1\n3: send 0, recv 2",
    gather: "0: recv 1, recv 2, recv 3, send 1 x0, send 1 x2, send 1 x3, send 2 x0\n1: send 0 x1, recv 0, recv 0, recv 0\n2: send 0 x2, recv 0\n3: send 0 x3",
    sums: "0: send 1 p1 + recv 3\n1: send 2 p2 + recv 0\n2: send 3 p3 + recv 1\n3: send 0 p0 + recv 2",
    token: "0: recv 1 add, recv 2 add, recv 3 add\n1: send 0\n2: send 0\n3: send 0",
    tokens: "0: 0 1 2 3\n1: 4 5 6 7\n2: 8 9 10 11\n3: 12 13 14 15",
  };
  const GOALS = { hop: 2, gather: 3, sums: 3, token: 2 };
  const WORD = { gather: { send: /^x[0-3]$/ }, sums: { send: /^p[0-3]$/ }, token: { recv: /^(merge|add)$/ } }; // what a message carries, or what is done with it
  const EXAMPLE = { gather: "send 1 x0, or recv 3", sums: "send 1 p1, or recv 3", token: "send 1, or recv 3 merge" };
  let outcome = null, held = [];

  /** The lines of the text, one a rank; a sentence for the first that cannot be read. */
  function parse(text, one) {
    const programs = RANKS.map(() => []);
    for (const line of text.split("\n").filter((each) => each.trim())) {
      const [, rank, rest] = line.match(/^\s*([0-3])\s*:(.*)$/) ?? [];
      if (rank === undefined) return { fault: say("no line", { line: line.trim() }) };
      programs[rank] = rest.split(",").map((step) => step.trim()).filter(Boolean).map((step) => one(step, Number(rank)));
      const bad = programs[rank].find((step) => typeof step === "string");
      if (bad) return { fault: bad };
    }
    return { programs };
  }

  /** `send 1 x0 + recv 3` as the messages of one step, or a sentence. */
  function step(text, rank) {
    const found = [];
    for (const part of text.split("+").map((each) => each.trim())) {
      const [, what, peer, word] = part.match(/^(send|recv)\s+(\d+)(?:\s+(\w+))?$/) ?? [];
      const wants = WORD[form.puzzle.value]?.[what];
      if (!what || (wants ? !wants.test(word ?? "") : word)) return say("no step", { step: part, r: rank, example: EXAMPLE[form.puzzle.value] ?? "send 1, or recv 3" });
      if (Number(peer) >= P || Number(peer) === rank) return say("no peer", { step: part, r: rank });
      found.push([what === "send" ? "S" : "R", Number(peer), word]);
    }
    return found;
  }

  /** What each rank has after each phase, and the mistakes: a list of sentences. */
  function follow(kind) {
    const mistakes = [];
    let has = RANKS.map((r) => (kind === "sums" ? RANKS.map(() => [r]) : kind === "hop" ? null : [r])); // sums: the shares in each part
    held = [has];
    for (let phase = 0; phase <= (outcome.moves.at(-1)?.[0] ?? -1); phase++) {
      const next = structuredClone(has);
      for (const [, from, to, word] of outcome.moves.filter(([at]) => at === phase)) {
        const n = Number(word?.[1]);
        if (kind === "hop") next[to] = from;
        else if (kind === "sums") next[to][n] = [...next[to][n], ...has[from][n]];
        else if (kind === "token") {
          next[to] = [...next[to], ...has[from]];
          if (word === "add") mistakes.push(say("averages added", { r: to, from }));
        } else if (!has[from].includes(n)) mistakes.push(say("not held", { r: from, block: word }));
        else if (!next[to].includes(n)) next[to].push(n);
      }
      held.push(has = next);
    }
    for (const r of RANKS) {
      const before = (r + P - 1) % P;
      if (kind === "hop" && has[r] === null) mistakes.push(say("no x", { r, before }));
      else if (kind === "hop" && has[r] !== before) mistakes.push(say("wrong x", { r, found: has[r], before }));
      for (const s of RANKS) {
        if (kind === "gather" && !has[r].includes(s)) mistakes.push(say("no block", { r, s }));
        const shares = kind === "sums" ? has[r][r] : kind === "token" && r === 0 ? has[0] : [s];
        const times = shares.filter((share) => share === s).length;
        if (times !== 1) mistakes.push(say({ sums: times ? "share twice" : "no share", token: times ? "keys twice" : "no keys" }[kind], { r, s, times }));
      }
    }
    return mistakes;
  }

  /** Chunks of tokens under a causal mask: each token once, and what the ring waits for. */
  function deal(chunks) {
    const mistakes = [], of = [...Array(S).keys()].map((token) => RANKS.filter((r) => chunks[r].includes(token)));
    of.forEach((ranks, token) => { if (ranks.length !== 1) mistakes.push(say(ranks.length ? "token twice" : "no token", { token, ranks: ranks.join(", ") })); });
    for (const r of RANKS) if (new Set(chunks[r]).size !== S / P) mistakes.push(say("uneven", { r, n: new Set(chunks[r]).size, wanted: S / P }));
    const pairs = RANKS.map((t) => RANKS.map((r) => chunks[r].reduce((sum, query) => sum + chunks[(r - t + P) % P].filter((key) => key <= query).length, 0)));
    const time = pairs.reduce((sum, row) => sum + Math.max(...row), 0);
    const rows = pairs.map((row, t) => [String(t), ...row.map(String), String(Math.max(...row))]);
    return { mistakes, time, rows };
  }

  function verdict(mistakes, well) {
    document.querySelector("#solve-verdict").replaceChildren(...(mistakes.length ? mistakes.slice(0, 6).map((words) => make("p", { class: "sick" }, `✗ ${words}`)) : [make("p", { class: "well" }, `✓ ${well}`)]));
  }

  function change() {
    const kind = form.puzzle.value, film = kind !== "tokens";
    document.querySelector("#solve-task").textContent = say(`task ${kind}`);
    const { fault, programs } = parse(form.text.value, film ? step : (words, r) => (words.split(/\s+/).every((token) => /^\d+$/.test(token) && token < S) ? words.split(/\s+/).map(Number) : say("no tokens", { words, r })));
    document.querySelector("#solve-film").classList.toggle("old", Boolean(fault)); // it stays, so that nothing jumps while one writes
    if (fault) return verdict([fault]);
    for (const part of ["player", "stage", "status"]) document.querySelector(`#solve-${part}`).hidden = !film;
    if (!film) {
      const { mistakes, time, rows } = deal(programs.map((steps) => steps.flat()));
      document.querySelector("#solve-table").replaceChildren(table(say("pairs"), [say("round"), ...RANKS.map((r) => say("rank", { r })), say("longest")], rows, { id: "dealt" }));
      return verdict(mistakes, say("dealt", { time, least: (S * (S + 1)) / 2 / P }) + (time <= 40 ? ` ${say("goal")}` : ""));
    }
    outcome = simulate(programs);
    const stuck = Object.entries(outcome.waits).map(([r, peer]) => say(outcome.waits[peer] === undefined ? "waits for ended" : "waits for ever", { r, peer }));
    const mistakes = stuck.length ? stuck : follow(kind), phases = (outcome.moves.at(-1)?.[0] ?? -1) + 1;
    if (stuck.length) follow(kind); // the film shows what each rank has
    verdict(mistakes, say("right", { n: phases, best: GOALS[kind] }) + (phases <= GOALS[kind] ? ` ${say("goal")}` : ""));
    films.reset(messages(outcome, P, 0).last);
  }

  /** What rank r has, in words: blocks, or the shares of its own part. */
  function owned(r, has) {
    if (form.puzzle.value === "hop") return has === null ? "–" : `x${has}`;
    if (form.puzzle.value !== "sums") return has.map((s) => `${form.puzzle.value === "token" ? "KV" : "x"}${s}`).join(" ");
    return has.map((shares, part) => `p${part}: ${shares.join(" + ")}`).join(" · ");
  }

  function show(at) {
    const { picture, told } = messages(outcome, P, at);
    document.querySelector("#solve-stage").replaceChildren(picture);
    document.querySelector("#solve-status").textContent = told;
    const now = held[Math.min(at, held.length - 1)];
    document.querySelector("#solve-table").replaceChildren(table(say("what each has"), [say("rank head"), say("has")], RANKS.map((r) => [say("rank", { r }), owned(r, now[r])]), { id: "held" }));
  }

  const films = player(document.querySelector("#solve-player"), show);
  settings(form, (name) => { if (name === "puzzle") form.text.value = FIRST[form.puzzle.value]; change(); explorer.keep(form); });
  form.text.value ||= FIRST[form.puzzle.value];
  home.hidden = false;
  change();
  home.dataset.ready = "yes";
})();
