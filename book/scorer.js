// How the search cuts a query into words, and which pages come first: docs for use, then chapters, then the rest.

const FIRST = [[/^docs\/(?!glossary)/, 14], [/^notebooks\/0[1-8]_/, 12], [/^(docs\/|notebooks\/\d\d_|index$|README$)/, 9], [/^(ring|deadlock|xray|planner|notebooks\/)/, 6],
  [/^(tests|bench|ring_doctor\/patients|ringlab\/hugging_face\/EVERY|notebooks\/appendix)/, -4]];

var Scorer = {
  score: ([page, , anchor, , score, , kind]) =>
    score + (kind === "title" && !anchor ? 15 : 0) + (FIRST.find(([pages]) => pages.test(page))?.[1] ?? 0),
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};

// Chinese has no spaces: each two characters that follow one another are a word, as in conf.py, which makes the index.
var splitQuery = (query) => (query.match(/[\u4e00-\u9fff]+|[^\s\u4e00-\u9fff]+/gu) ?? []).flatMap((run) =>
  /[\u4e00-\u9fff]/.test(run) && run.length > 2 ? [...run].slice(1).map((character, i) => run[i] + character)
    : run.split(/[^\p{L}\p{N}_\p{Emoji_Presentation}-]+/gu).filter((word) => word && !/^[\u4e00-\u9fff]$/.test(word)));
