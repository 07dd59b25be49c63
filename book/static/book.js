// On every page: the glossary's words explain themselves, and the road remembers what was read. Without it, all works.


(() => {
let tip = null;

function open(link) {
  close();
  tip = Object.assign(document.createElement("div"), { className: "tip", id: "tip", textContent: link.dataset.term });
  tip.setAttribute("role", "tooltip");
  document.body.append(tip);
  link.setAttribute("aria-describedby", "tip");
  const at = link.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - tip.offsetWidth - 8)) + scrollX}px`;
  const below = at.bottom + tip.offsetHeight + 8 < innerHeight;
  tip.style.top = `${(below ? at.bottom + 6 : at.top - tip.offsetHeight - 6) + scrollY}px`;
}

function close() {
  document.querySelector("[aria-describedby=tip]")?.removeAttribute("aria-describedby");
  tip?.remove();
  tip = null;
}

for (const link of document.querySelectorAll("a.term")) {
  link.addEventListener("mouseenter", () => open(link));
  link.addEventListener("mouseleave", close);
  link.addEventListener("focus", () => open(link));
  link.addEventListener("blur", close);
}
addEventListener("keydown", (event) => event.key === "Escape" && close());

// The command that gets the code says where this site is.
for (const line of document.querySelectorAll("#get-the-code pre"))
  for (const part of [line, ...line.querySelectorAll("*")].flatMap((each) => [...each.childNodes]).filter((each) => each.data))
    part.data = part.data.replace("ADDRESS/", new URL(document.documentElement.lang === "en" ? "." : "..", location).href);

// Which chapters were read to the end: kept in this browser only.
const KEY = "ring-chapters-read";
let read = [];
try { read = JSON.parse(localStorage.getItem(KEY) ?? "[]"); } catch { /* no storage: nothing is remembered */ }
const chapter = location.pathname.match(/notebooks\/(\d\d)_/)?.[1];

function mark() {
  for (const link of document.querySelectorAll(".sidebar-tree a, .toctree-wrapper a")) {
    const of = link.pathname.match(/notebooks\/(\d\d)_/)?.[1];
    link.classList.toggle("read", read.includes(of));
  }
}

const end = [...document.querySelectorAll("article section")].at(-1)?.lastElementChild;
if (chapter && end)
  new IntersectionObserver((seen) => {
    if (!seen[0].isIntersecting || read.includes(chapter)) return;
    read.push(chapter);
    try { localStorage.setItem(KEY, JSON.stringify(read)); } catch { /* the same */ }
    mark();
  }).observe(end);
mark();

// Code can be copied, without the prompts of a terminal; the film can be stopped.
const WORDS = document.documentElement.lang === "en" ? ["copy", "copied", "❚❚ stop", "▶ play"] : ["复制", "已复制", "❚❚ 暂停", "▶ 播放"];
function button(words, home) {
  const made = Object.assign(document.createElement("button"), { type: "button", className: "small", textContent: words });
  home.append(made);
  return made;
}
for (const code of document.querySelectorAll("article :not(.output) > div[class^='highlight-'] > .highlight")) {
  const copy = button(WORDS[0], code);
  copy.onclick = async () => {
    const text = code.querySelector("pre").textContent, lines = text.split("\n");
    await navigator.clipboard.writeText(/^\$ /m.test(text) ? lines.filter((line) => line.startsWith("$ ")).map((line) => line.slice(2)).join("\n") : text);
    copy.textContent = WORDS[1];
  };
}
for (const film of document.querySelectorAll("picture:has(img[src$='.gif'])")) {
  let plays = !matchMedia("(prefers-reduced-motion: reduce)").matches;
  const image = film.querySelector("img");
  const stop = button(WORDS[plays ? 2 : 3], film.closest("figure, p"));
  stop.onclick = () => {
    plays = !plays;
    const now = (image.currentSrc || image.src).replace(/\.\w+$/, plays ? ".gif" : ".svg"); // the width that is shown; no currentSrc while it loads
    for (const source of film.querySelectorAll("source")) source.remove();
    image.src = now;
    stop.textContent = WORDS[plays ? 2 : 3];
  };
}
})();
