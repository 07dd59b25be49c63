// The planner's formulas for ideal devices, whose rounds cost nothing beside their products. Every function does what the
// function of the same name does in ringlab/planning; book/test_planner.py compares them on 1,000 random inputs.
// A layer is { heads, kvHeads, headDim, itemsize }, a cluster { hosts, perHost, flops, bandwidth, hostBandwidth }: a NIC
// for each device. Words are those of the page: say(key, values).

const STATE = 16, NEAR = 1.02, SAME = 1e-12;
const PASSES = [false, true]; // backward?

// hidden_communication.py ----------------------------------------------------------------------------------------------

const hidden = (layer) => layer.heads * layer.headDim;
const devices = (cluster) => cluster.hosts * cluster.perHost;

export function blockFlops(layer, pairs, backward) {
  return (backward ? 10 : 4) * pairs * hidden(layer);
}

function gradientBytes(layer, chunk) {
  return 2 * chunk * layer.kvHeads * layer.headDim * Math.max(layer.itemsize, 4);
}

export function hopBytes(layer, chunk, backward = false) {
  const block = 2 * chunk * layer.kvHeads * layer.headDim * layer.itemsize;
  return backward ? block + gradientBytes(layer, chunk) : block;
}

/** The smallest chunk that hides its messages; half of the pairs are visible: causal, in zigzag. */
export function minOverlapChunk(flops, bandwidth, layer, backward) {
  const computing = blockFlops(layer, 1 / 2, backward) / flops;
  return hopBytes(layer, 1, backward) / bandwidth / computing;
}

export function hiddenShare(chunk, minChunk) {
  return Math.min(1, chunk / minChunk);
}

function passSeconds(layer, chunk, P, flops, bandwidth, backward) {
  const computing = blockFlops(layer, (1 / 2) * chunk ** 2, backward) / flops;
  const message = hopBytes(layer, chunk, backward) / bandwidth;
  const home = backward && P > 1 ? gradientBytes(layer, chunk) / bandwidth : 0;
  return computing + (P - 1) * Math.max(computing, message) + home;
}

// ring_memory.py -------------------------------------------------------------------------------------------------------

function peakBytesBackward(layer, chunk) {
  const [H, G, w] = [layer.heads, layer.kvHeads, layer.itemsize];
  const tensors = 3 * H + 2 * G + 4 * G + (H + 2 * G), sums = H + 4 * G;
  return (tensors * w + sums * Math.max(w, 4)) * chunk * layer.headDim;
}

export function paramCount(layer, layers) {
  return layers * (10 * hidden(layer) ** 2 + 2 * hidden(layer) * layer.kvHeads * layer.headDim);
}

/** Bytes of a token of a rank in training: the input of every layer, and one layer's backward pass. */
export function tokenBytes(layer, layers) {
  return layers * (layer.itemsize * hidden(layer)) + peakBytesBackward(layer, 1);
}

export function longestContext(memory, layer, layers, P) {
  const left = memory - (STATE * paramCount(layer, layers)) / P;
  return P * Math.max(0, Math.trunc(left / tokenBytes(layer, layers)));
}

function minDevices(memory, layer, layers, seqLen) {
  const room = memory - tokenBytes(layer, layers);
  if (room <= 0) return null;
  let low = 1, high = seqLen + Math.ceil((STATE * paramCount(layer, layers)) / room);
  while (low < high) {
    const middle = Math.floor((low + high) / 2);
    if (longestContext(memory, layer, layers, middle) < seqLen) low = middle + 1;
    else high = middle;
  }
  return low;
}

// ways.py --------------------------------------------------------------------------------------------------------------

/** (query heads, K/V heads) of each of the ranks that exchange heads: split_heads.py. */
function shares(layer, ranks) {
  const { heads, kvHeads } = layer, parts = ranks % kvHeads === 0 ? kvHeads : 1, served = heads / kvHeads;
  const split = (first, size, n) => {
    const found = [], [each, more] = [Math.floor(size / n), size % n];
    for (let i = 0; i < n; i++) {
      const length = each + (i < more ? 1 : 0);
      found.push([first, length]);
      first += length;
    }
    return found;
  };
  return split(0, heads, parts).flatMap(([first, size]) => split(first, size, ranks / parts)).map(([first, size]) => {
    const keys = Math.floor((first + size - 1) / served) + 1 - Math.floor(first / served);
    return { ...layer, heads: size, kvHeads: keys };
  });
}

function splits(layer, cluster) {
  const P = devices(cluster), found = [];
  for (let ranks = 1; ranks <= Math.min(layer.heads, P); ranks++) if (P % ranks === 0) found.push(ranks);
  return found;
}

function named(way, cluster, split) {
  if (way === "ring per host") return `${cluster.hosts} rings of ${cluster.perHost}`;
  return split ? `${way} ${devices(cluster) / split} x ${split}` : way;
}

function exchangedBytes(layer, chunk, mine, theirs, backward) {
  const head = chunk * layer.headDim * layer.itemsize;
  return backward ? [theirs.heads * head, (mine.heads + 2 * mine.kvHeads) * head]
    : [(theirs.heads + 2 * theirs.kvHeads) * head, mine.heads * head];
}

/** The number of ranks that stand for all. */
function alike(layer, cluster, ranks) {
  const { perHost } = cluster;
  if (perHost % ranks === 0) return perHost;
  const [first, ...rest] = shares(layer, ranks);
  const equal = rest.every((each) => each.heads === first.heads && each.kvHeads === first.kvHeads);
  return ranks % perHost === 0 && equal ? perHost : devices(cluster);
}

const hostOf = (cluster, rank) => Math.floor(rank / cluster.perHost);
const exchangeRanks = (way, cluster, split) => (way === "all-to-all" ? devices(cluster) : split ?? 1);

/** Bytes that the busiest device sends inside its host, and the busiest NIC to other hosts, in one pass. */
export function traffic(way, layer, chunk, cluster, backward, split) {
  const { hosts, perHost } = cluster, P = devices(cluster), g = exchangeRanks(way, cluster, split);
  const kv = hopBytes(layer, chunk), gradients = backward ? gradientBytes(layer, chunk) : 0;
  if (way === "all-gather") {
    const size = (P - 1) * (kv + gradients), between = hosts > 1 ? size / perHost : 0;
    return [size - between, between];
  }
  const inside = new Map(), between = new Map();
  const send = (source, target, size) => {
    const crosses = hostOf(cluster, source) !== hostOf(cluster, target);
    const sums = crosses ? between : inside;
    if (source !== target) sums.set(source, (sums.get(source) ?? 0) + size);
  };
  const each = shares(layer, g);
  for (let rank = 0; rank < alike(layer, cluster, g); rank++) {
    if (way === "double ring" || way === "ring per host") {
      const host = hostOf(cluster, rank) * perHost, turns = way === "double ring" ? hosts : 1;
      send(rank, host + ((rank + 1) % perHost), turns * ((perHost - 1) * kv + perHost * gradients));
      if (way === "double ring") send(rank, (rank + perHost) % P, (hosts - 1) * kv + hosts * gradients);
      continue;
    }
    const mine = each[rank % g], first = Math.floor(rank / g) * g;
    for (let target = first; target < first + g; target++) {
      const [one, other] = exchangedBytes(layer, chunk, mine, each[target % g], backward);
      send(rank, target, one + other);
    }
    const hop = hopBytes(mine, g * chunk), back = backward ? gradientBytes(mine, g * chunk) : 0;
    send(rank, (rank + g) % P, (P / g - 1) * hop + (P / g) * back);
  }
  return [Math.max(0, ...inside.values()), Math.max(0, ...between.values())];
}

/** Peak memory of a rank in attention's backward pass. */
export function trainingBytes(way, layer, chunk, cluster, split) {
  const g = exchangeRanks(way, cluster, split), { headDim: D, itemsize: w } = layer;
  const twoBuffers = (heads, tokens) => 2 * (2 * heads * tokens * D * w + 2 * heads * tokens * D * Math.max(w, 4));
  const buffers = twoBuffers(layer.kvHeads, chunk);
  if (way === "all-gather")
    return peakBytesBackward(layer, chunk) - buffers + (3 / 2) * twoBuffers(1, devices(cluster) * chunk);
  if (way === "double ring") return peakBytesBackward(layer, chunk) + (cluster.hosts > 1 ? buffers : 0);
  return Math.max(...shares(layer, g).map((share) => {
    const peak = peakBytesBackward(share, g * chunk) + (g > 1 ? layer.heads * chunk * D * w : 0);
    return way === "all-to-all" ? peak + (gradientBytes(share, g * chunk) - twoBuffers(share.kvHeads, g * chunk)) : peak;
  }));
}

// shared_links.py ------------------------------------------------------------------------------------------------------

/** The seconds at which the last of the tasks ends. A task { size, after, links, alike } computes or is a message. */
function play(tasks, rates) {
  const followers = tasks.map(() => []), waits = tasks.map(({ after }) => new Set(after).size);
  tasks.forEach(({ after }, i) => { for (const before of new Set(after)) followers[before].push(i); });
  const left = new Map(), users = rates.map(() => 0), due = [];
  let now = 0, ready = [...tasks.keys()].filter((i) => waits[i] === 0);
  const later = ([t, i], [u, j]) => t > u || (t === u && i > j);
  const push = (at) => { // the earliest is the last
    let low = 0, high = due.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (later(due[middle], at)) low = middle + 1;
      else high = middle;
    }
    due.splice(low, 0, at);
  };
  while (ready.length || due.length || left.size) {
    for (const i of ready) {
      const { size, links, alike: count } = tasks[i];
      if (size > 0 && links.length) {
        left.set(i, size);
        for (const link of links) users[link] += count;
      } else push([links.length ? now : now + size, i]);
    }
    const ends = new Map();
    let then = due.length ? due.at(-1)[0] : Infinity;
    for (const [i, bytes] of left) {
      let rate = Infinity;
      for (const link of tasks[i].links) rate = Math.min(rate, rates[link] / users[link]);
      ends.set(i, now + bytes / rate);
      then = Math.min(then, ends.get(i));
    }
    const ended = [];
    for (const [i, at] of ends) if (at <= then * (1 + SAME)) ended.push(i);
    for (const i of ended) {
      left.delete(i);
      for (const link of tasks[i].links) users[link] -= tasks[i].alike;
    }
    for (const [i, bytes] of left) left.set(i, bytes * ((ends.get(i) - then) / (ends.get(i) - now)));
    ready = [];
    now = then;
    while (due.length && due.at(-1)[0] <= now * (1 + SAME)) ended.push(due.pop()[1]);
    for (const i of ended) for (const following of followers[i]) if (--waits[following] === 0) ready.push(following);
  }
  return now;
}

/** By rank: the tasks of all these lists. */
const waitFor = (...lists) => lists[0].map((_, r) => lists.flatMap((each) => each[r]));

// two_speeds.py --------------------------------------------------------------------------------------------------------

/** The tasks of one pass of a layer. The first n of P ranks may stand for all: a message to rank r goes to rank r mod n. */
class ClusterTasks {
  constructor(cluster, layer, chunk, ranks, backward) {
    Object.assign(this, { cluster, layer, chunk, ranks, backward, tasks: [], rates: [], names: new Map() });
    this.start = [...Array(ranks)].map(() => []);
  }

  link(direction, rank, crosses) {
    const name = `${direction} ${crosses} ${rank}`;
    if (!this.names.has(name)) this.names.set(name, this.rates.push(crosses ? this.cluster.hostBandwidth : this.cluster.bandwidth) - 1);
    return this.names.get(name);
  }

  /** The links of a message: out of one device and into the other, or of their NICs. */
  way(source, target) {
    const crosses = hostOf(this.cluster, source) !== hostOf(this.cluster, target);
    return [this.link("out", source % this.ranks, crosses), this.link("in", target % this.ranks, crosses)];
  }

  compute(seconds, ready) {
    const first = this.tasks.length;
    for (let r = 0; r < this.ranks; r++) this.tasks.push({ size: seconds[r], after: ready[r], links: [], alike: 1 });
    return ready.map((_, r) => [first + r]);
  }

  /** Messages [source, target, bytes]: each begins when its two ranks are ready. */
  send(messages, ready) {
    const ofRank = ready.map(() => []), found = new Map();
    for (const [source, target, size] of messages) {
      const links = this.way(source, target), to = target % this.ranks, key = `${source} ${to} ${size} ${links}`;
      if (found.has(key)) found.get(key).alike += 1;
      else found.set(key, { source, to, size, links, alike: 1 });
    }
    for (const { source, to, size, links, alike: count } of found.values()) {
      for (const rank of new Set([source, to])) ofRank[rank].push(this.tasks.length);
      this.tasks.push({ size, after: [...ready[source], ...ready[to]], links, alike: count });
    }
    return ofRank;
  }

  hop(onward, sizes, ready) {
    return this.send(sizes.map((size, r) => [r, onward(r), size]), ready);
  }

  turn(ready, onward, rounds, seconds, kv, gradients, afterFirst = (done) => done) {
    let underWay = this.start;
    const all = [...Array(this.ranks).keys()];
    for (let t = 0; t < rounds; t++) {
      const hops = t < rounds - 1 ? this.hop(onward, all.map(kv), ready) : this.start;
      const done = waitFor(this.compute(all.map(seconds), ready), underWay);
      if (gradients && rounds > 1) underWay = this.hop(onward, all.map(gradients), done);
      ready = waitFor(t === 0 ? afterFirst(done) : done, hops);
    }
    return [ready, underWay];
  }

  computing(share, tokens) {
    return blockFlops(share, (1 / 2) * tokens ** 2, this.backward) / this.cluster.flops;
  }

  /** All-gather or reduce-scatter of `size` bytes of each rank, in a ring for each NIC. */
  collect(size, ready) {
    const { hosts, perHost } = this.cluster, P = devices(this.cluster), nics = hosts > 1 ? perHost : 1;
    if (P === 1) return ready;
    const after = [...new Set(ready.flat())];
    for (let nic = 0; nic < nics; nic++) {
      const first = nic * perHost / nics, ring = [];
      for (let host = 0; host < this.ranks; host += perHost)
        for (let i = 0; i < perHost; i++) ring.push(host + ((first + i) % perHost));
      ring.push((ring[0] + this.ranks) % P);
      const links = new Set();
      for (let i = 1; i < ring.length; i++) for (const link of this.way(ring[i - 1], ring[i])) links.add(link);
      this.tasks.push({ size: ((P - 1) / nics) * size, after, links: [...links], alike: 1 });
    }
    return ready.map(() => [...Array(nics).keys()].map((i) => this.tasks.length - nics + i));
  }

  /** An exchange of heads in groups of `ranks`, then rings of P / `ranks`: ring, hybrid and all-to-all. */
  rings(ranks) {
    const P = devices(this.cluster), tokens = ranks * this.chunk, each = shares(this.layer, ranks);
    const exchange = (back, ready) => {
      if (ranks === 1) return ready;
      const messages = [];
      for (let r = 0; r < this.ranks; r++) {
        const first = Math.floor(r / ranks) * ranks;
        for (let target = first; target < first + ranks; target++) {
          const sizes = exchangedBytes(this.layer, this.chunk, each[r % ranks], each[target % ranks], this.backward);
          if (target !== r) messages.push([r, target, sizes[back]]);
        }
      }
      return waitFor(ready, this.send(messages, ready));
    };
    const [ready, home] = this.turn(
      exchange(0, this.start),
      (r) => (r + ranks) % P,
      P / ranks,
      (r) => this.computing(each[r % ranks], tokens),
      (r) => hopBytes(each[r % ranks], tokens),
      this.backward ? (r) => gradientBytes(each[r % ranks], tokens) : null,
    );
    exchange(1, waitFor(ready, home));
  }

  nextDevice(rank) {
    const { perHost } = this.cluster;
    return hostOf(this.cluster, rank) * perHost + ((rank + 1) % perHost);
  }

  /** A ring of the layer's blocks in each host. */
  hostTurn(ready, afterFirst) {
    const gradients = gradientBytes(this.layer, this.chunk), kv = hopBytes(this.layer, this.chunk);
    const computing = this.computing(this.layer, this.chunk);
    return this.turn(ready, (r) => this.nextDevice(r), this.cluster.perHost, () => computing, () => kv,
      this.backward ? () => gradients : null, afterFirst);
  }

  doubleRing() {
    const { hosts, perHost } = this.cluster, P = devices(this.cluster);
    const kv = this.start.map(() => hopBytes(this.layer, this.chunk));
    const gradients = this.start.map(() => gradientBytes(this.layer, this.chunk));
    const nextHost = (r) => (r + perHost) % P;
    let ready = this.start, home = this.start, between = this.start;
    const passOn = (done) => {
      const added = waitFor(done, home, between);
      between = this.hop(nextHost, gradients, added);
      return added;
    };
    for (let u = 0; u < hosts; u++) {
      const slow = u < hosts - 1 ? this.hop(nextHost, kv, ready) : this.start;
      [ready, home] = this.hostTurn(ready, this.backward && u > 0 ? passOn : undefined);
      ready = waitFor(ready, slow);
    }
    if (this.backward && hosts > 1) passOn(ready);
  }

  /** One K/V head after the other. */
  allGather() {
    const P = devices(this.cluster), heads = this.layer.kvHeads, S = P * this.chunk;
    const kv = hopBytes(this.layer, this.chunk) / heads, gradients = gradientBytes(this.layer, this.chunk) / heads;
    const one = { ...this.layer, heads: this.layer.heads / heads, kvHeads: 1 };
    const block = blockFlops(one, this.chunk * ((1 / 2) * S), this.backward) / this.cluster.flops;
    let ready = this.start, summed = this.start, arriving = this.collect(kv, this.start), last = arriving;
    for (let head = 0; head < heads; head++) {
      const here = arriving;
      if (head < heads - 1) last = arriving = this.collect(kv, waitFor(ready, last));
      const done = this.compute(this.start.map(() => block), waitFor(ready, here));
      ready = waitFor(done, summed);
      if (this.backward) last = summed = this.collect(gradients, waitFor(done, last));
    }
  }
}

/** Seconds of a pass of a layer. */
export function simulate(way, cluster, layer, chunk, backward, split) {
  const ranks = exchangeRanks(way, cluster, split);
  const tasks = new ClusterTasks(cluster, layer, chunk, alike(layer, cluster, ranks), backward);
  if (way === "double ring") tasks.doubleRing();
  else if (way === "all-gather") tasks.allGather();
  else if (way === "ring per host") tasks.hostTurn(tasks.start);
  else tasks.rings(ranks);
  return play(tasks.tasks, tasks.rates);
}

// ranking.py -----------------------------------------------------------------------------------------------------------

const thousands = (number) => String(number).replace(/\B(?=(\d{3})+$)/g, ",");

/** The mantissa and the power of ten of a number. A number in the middle of two goes to the even one, as in Python. */
function rounded(number, places) {
  const [exact, power] = number.toExponential(100).split("e"), cut = exact.slice(0, 2 + places);
  const tie = /^50*$/.test(exact.slice(2 + places)) && Number(cut.at(-1)) % 2 === 0;
  return tie ? [cut, power] : number.toExponential(places).split("e");
}

/** Three digits of a number, or all before the point: 0.0179, 5.89, 3,804. */
export function digits(number) {
  if (number === 0) return "0";
  const [mantissa, power] = rounded(number, number >= 100 ? String(Math.trunc(number)).length - 1 : 2);
  const value = Number(`${mantissa}e${power}`);
  if (number >= 100) return thousands(value);
  return Number(power) < -4 ? `${mantissa.replace(/\.?0+$/, "")}e-${power.slice(1).padStart(2, "0")}` : String(value);
}

export function computingSeconds(cluster, layer, chunk) {
  const pairs = (devices(cluster) * chunk ** 2) / 2;
  const [forward, backward] = PASSES.map((each) => blockFlops(layer, pairs, each) / cluster.flops);
  return forward + backward;
}

function why(say, way, cluster, layer, chunk, split) {
  const { hosts, perHost, bandwidth, hostBandwidth } = cluster, P = devices(cluster);
  if (way === "ring per host") return why(say, "ring", { ...cluster, hosts: 1 }, layer, chunk, null);
  if (P === 1) return say("nothing travels");
  if (way === "all-to-all") return say("both exchanges");
  const share = shares(layer, split ?? 1).reduce((most, each) => (each.heads > most.heads ? each : most));
  const tokens = chunk * (split ?? 1);
  let computing = blockFlops(share, tokens ** 2 / 2, true) / cluster.flops, message, rest = "";
  if (way === "all-gather") {
    const [inHost, between] = traffic(way, layer, chunk, cluster, true);
    message = Math.max(inHost / bandwidth, between / hostBandwidth) / layer.kvHeads;
    computing *= P / layer.kvHeads;
    rest = message <= computing ? say("first and last") : "";
  } else {
    computing *= way === "double ring" ? perHost : 1;
    message = hopBytes(share, tokens, true) / bandwidth;
    rest = split ? say("an exchange") : "";
    if (hosts > 1) {
      message *= bandwidth / hostBandwidth;
      rest = say("cards", { n: way === "double ring" ? perHost : Math.min(perHost, split ?? 1), nics: perHost }) + rest;
    }
  }
  const key = `${way === "all-gather" ? "gathers" : "hops"} ${message <= computing ? "hidden" : "exposed"}`;
  return say(key, { message: digits(1e3 * message), computing: digits(1e3 * computing) }) + rest;
}

/** A row for each way and split: those that fit first, then by time; a ring per host last. */
export function rankWays(say, cluster, layer, layers, chunk, memory) {
  const { hosts, perHost } = cluster, P = devices(cluster);
  const ways = [["ring"], ["double ring"], ["all-gather"], ["all-to-all"]].filter(([way]) => way !== "double ring" || Math.min(hosts, perHost) > 1);
  for (const g of splits(layer, cluster)) if (1 < g && g < P && (perHost % g === 0 || g % perHost === 0)) ways.push(["hybrid", g]);
  if (hosts > 1) ways.push(["ring per host"]);
  const state = (STATE * paramCount(layer, layers)) / P;
  const rows = ways.map(([way, split]) => {
    const sequences = way === "ring per host" ? hosts : 1, name = named(way, cluster, split), tokens = sequences * chunk;
    if (way === "all-to-all" && P > layer.heads)
      return { name, way, why: say("too many ranks", { P, heads: layer.heads }), seconds: Infinity, inHost: 0, between: 0, held: Infinity, sequences };
    const held = state + layers * layer.itemsize * hidden(layer) * tokens + trainingBytes(way, layer, tokens, cluster, split);
    const [forward, backward] = PASSES.map((each) => simulate(way, cluster, layer, tokens, each, split));
    const [one, other] = PASSES.map((each) => traffic(way, layer, tokens, cluster, each, split));
    const words = why(say, way, cluster, layer, tokens, split);
    return { name, way, why: held <= memory ? words : say("does not fit, because", { words }), seconds: forward + backward, inHost: one[0] + other[0], between: one[1] + other[1], held, sequences };
  });
  return rows.sort((a, b) => a.sequences - b.sequences || (a.held > memory) - (b.held > memory) || (a.seconds === b.seconds ? 0 : a.seconds - b.seconds));
}

// cost_model.py --------------------------------------------------------------------------------------------------------

/** The time of each way for S tokens, in times of computing alone; of hybrid, that of its fastest mesh. */
export function overComputing(say, { cluster, layer, layers, seqLen }) {
  const chunk = Math.ceil(seqLen / devices(cluster)), least = computingSeconds(cluster, layer, chunk), found = {};
  for (const row of rankWays(say, cluster, layer, layers, chunk, Infinity))
    if (row.sequences === 1 && row.seconds < Infinity) found[row.way] = Math.min(found[row.way] ?? Infinity, row.seconds / least);
  return found;
}

/** What to do with S tokens and rings of one speed: `bandwidth` is that of the slowest link. */
export function advice(say, seqLen, longest, layer, layers, P, flops, bandwidth, memory) {
  if (!(0 < seqLen && seqLen <= longest)) {
    const enough = minDevices(memory, layer, layers, Math.max(1, seqLen));
    return enough === null ? say("never fits", { megabytes: digits(tokenBytes(layer, layers) / 1e6) }) : say("does not fit", { devices: thousands(enough) });
  }
  if (P === 1) return say("fits on one");
  const milliseconds = (ring) => {
    const [forward, backward] = PASSES.map((each) => passSeconds(layer, Math.ceil(seqLen / ring), ring, flops, bandwidth, each));
    return 1e3 * (forward + backward);
  };
  const rings = [];
  for (let ring = 1; ring <= P; ring++) if (P % ring === 0 && Math.ceil(seqLen / ring) <= Math.floor(longest / P)) rings.push(ring);
  const fastest = rings.reduce((best, ring) => (milliseconds(ring) < milliseconds(best) ? ring : best)), smallest = rings[0];
  const best = { ring: fastest, ms: digits(milliseconds(fastest)) };
  if (smallest === P) return say("one ring only", best);
  return say("one or many", { ...best, rings: P / smallest, smallest, each: digits((milliseconds(smallest) * smallest) / P) });
}

/** Which way is the fastest, in one line. */
export function adviceOnWays(say, rows, memory) {
  const [first, ...rest] = rows.filter((row) => row.sequences === 1);
  const near = rest.filter((row) => row.held <= memory && row.seconds <= NEAR * first.seconds).map((row) => row.name);
  const ring = rows.find((row) => row.name === "ring");
  const away = first.name !== "ring" && !near.includes("ring");
  const key = `advice${near.length ? " near" : ""}${away ? " ring" : ""}`;
  return say(key, { name: first.name, ms: digits(1e3 * first.seconds), near: near.join(", "), ring: digits(1e3 * ring.seconds) });
}

/** A line for a ring in each host, where it is the faster for many sequences. */
export function manySequences(say, rows, memory) {
  const first = rows.find((row) => row.sequences === 1), row = rows.find((each) => each.sequences > 1);
  if (!row || row.held > memory || row.seconds / row.sequences >= first.seconds) return "";
  return say("many sequences", { name: row.name, each: digits((1e3 * row.seconds) / row.sequences), all: digits(1e3 * row.seconds) });
}

/** The links that a ring uses: inside a host; from host to host, each hop during one block or during a turn of blocks. */
function links({ hosts, perHost, bandwidth, hostBandwidth }) {
  const found = perHost > 1 ? [["inside", bandwidth]] : [];
  if (hosts > 1) found.push(["between", hostBandwidth]);
  return hosts > 1 && perHost > 1 ? [...found, ["turn", perHost * hostBandwidth]] : found;
}

/** All that the page shows of one input. */
export function plan(say, { cluster, layer, layers, seqLen, memory }) {
  const { flops, bandwidth, hostBandwidth, hosts } = cluster, P = devices(cluster), chunk = Math.ceil(seqLen / P);
  const longest = longestContext(memory, layer, layers, P), slowest = hosts > 1 ? Math.min(bandwidth, hostBandwidth) : bandwidth;
  const found = {
    P, chunk, longest, slowest,
    thresholds: links(cluster).flatMap(([link, rate]) => PASSES.map((backward) => ({ link, rate, backward, chunk: minOverlapChunk(flops, rate, layer, backward) }))),
    state: (STATE * paramCount(layer, layers)) / P,
    token: tokenBytes(layer, layers),
    ofRing: advice(say, seqLen, longest, layer, layers, P, flops, slowest, memory),
  };
  if (seqLen > longest) return { ...found, rows: [], many: "", advice: found.ofRing };
  const rows = rankWays(say, cluster, layer, layers, chunk, memory);
  return { ...found, rows, computing: computingSeconds(cluster, layer, chunk), many: manySequences(say, rows, memory), advice: adviceOnWays(say, rows, memory) };
}
