// What the page shows now, its requests to the server, and its words for runs and responses.
// server.py joins html/token_view.js, which has at, make, visible, say and fill, state.js, list.js, response.js and
// view.js to one script, in this order.
const JUDGEMENTS = { right: "✓ right", wrong: "✗ wrong", unjudged: "–" };
const form = at("query");
const opening = new URLSearchParams(location.search); // the query and the token with which the page was opened
const token = opening.get("token");
const state = {
  sort: opening.get("sort") || "iteration",
  order: opening.get("order") || "desc",
  offset: Number(opening.get("offset") || 0),
  limit: 0, // responses of a page, as the server says
  choices: { run: opening.get("run"), finish: opening.get("finish") }, // until the server names the run or the ending
  rows: [], // responses of the list
  chosen: null, // place of the opened response
  marked: null, // place of the response marked for a diff
  version: -1, // of the server's table
  runs: new Map(), // by number
  requests: {}, // the newest of each kind, to abort it
  errors: {}, // one line of each kind
};

// the JSON of a request, or null after an error; a later request of the same kind makes an earlier one void
async function ask(name, parameters = {}) {
  if (state.requests[name]) state.requests[name].abort();
  const request = (state.requests[name] = new AbortController());
  try {
    const address = "/api/" + name + "?" + new URLSearchParams({ ...parameters, token });
    const reply = await fetch(address, { signal: request.signal });
    const isJson = (reply.headers.get("Content-Type") || "").startsWith("application/json");
    const answer = isJson ? await reply.json() : { error: await reply.text() }; // a refused token is plain text
    showError(name, answer.error || "");
    return answer.error ? null : answer;
  } catch (error) {
    if (error.name !== "AbortError") showError(name, "No answer: the server has ended; start `ppo-repro view` again.");
    return null;
  }
}

function showError(name, text) {
  state.errors[name] = text;
  at("error").textContent = visible([...new Set(Object.values(state.errors))].filter(Boolean).join(" "));
}

// the search: the filters of the form, and the order
function currentQuery() {
  const query = { sort: state.sort, order: state.order };
  for (const [name, value] of new FormData(form)) if (value !== "") query[name] = value;
  return query;
}

const placeOf = (row) => ({ run: row.run, iteration: row.iteration, sequence: row.sequence });
const isSame = (a, b) => a && b && a.run === b.run && a.iteration === b.iteration && a.sequence === b.sequence;

// what a person called the run, else what it differs in, else its folder
const nameOf = (run) => run.name || run.short || run.folder;
const runName = (row) => (state.runs.has(row.run) ? nameOf(state.runs.get(row.run)) : String(row.run));

// whether any run judges its responses right or wrong; the responses of the others are unjudged
const someRunJudges = () => [...state.runs.values()].some((run) => run.judged);

function judgement(row) {
  if (row.correct === null) return "unjudged";
  return row.correct ? "right" : "wrong";
}

// `word` before other words; nothing for a response that is neither right nor wrong
const ifJudged = (row, word) => (judgement(row) === "unjudged" ? "" : word + ", ");

// puts a text into a node with every `needle` marked; `around`, if given, is how many characters before the first stay
function putHighlighted(node, text, needle, around) {
  // not by lower case: a text may become longer in it, as "İ" does
  const pattern = needle ? new RegExp("(" + needle.replace(/[\^$\\.*+?()[\]{}|]/g, "\\$&") + ")", "iu") : null;
  const from = pattern ? text.search(pattern) : -1;
  const start = around && from > around ? from - around : 0;
  const shown = (start ? "… " : "") + text.slice(start);
  const whole = around ? shown.slice(0, 8 * around).replace(/\n/g, "↵") : shown;
  const parts = pattern ? whole.split(pattern) : [whole]; // every second one is a needle
  node.replaceChildren(...parts.map((part, i) => (i % 2 ? make("mark", visible(part)) : visible(part))));
  node.dir = "auto";
  return node;
}
