// Starts the page over all responses, and says which event calls what. Texts enter the page by textContent alone.
const RANGES = LIST_COLUMNS.filter((column) => column.isNumber);
const KEYS = {
  "/": () => form.elements.text.focus(),
  n: () => at("later").disabled || turnPage(1),
  p: () => at("earlier").disabled || turnPage(-1),
  m: markForDiff,
  Escape: () => listBody.rows.length && (listBody.querySelector("[tabindex='0']") || listBody.rows[0]).focus(),
};
const STEPS = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 };

function pressed(event) {
  const isTyping = event.target.closest("input, select");
  if (event.altKey || event.ctrlKey || event.metaKey || (isTyping && event.key !== "Escape")) return;
  const by = STEPS[event.key];
  if (listBody.contains(event.target) && (by || event.key === "Enter")) {
    const i = Number(event.target.closest("tr").dataset.i);
    if (by) choose(Math.max(0, Math.min(state.rows.length - 1, i + by)), true);
    else choose(i, false).then(() => at("title").focus());
  } else if (KEYS[event.key]) {
    KEYS[event.key]();
  } else {
    return;
  }
  event.preventDefault();
}

let waiting = 0;
function searchSoon() {
  clearTimeout(waiting);
  waiting = setTimeout(searchAgain, 200);
}

function rangeOf({ name, heading, unit }) {
  const label = heading + (unit ? ", " + unit : "");
  const group = make("span", undefined, "control");
  group.append(make("span", label));
  for (const [end, word] of [["min", "at least"], ["max", "at most"]]) {
    const input = make("input");
    Object.assign(input, { name: name + "_" + end, inputMode: "decimal", placeholder: word });
    input.setAttribute("aria-label", label + " " + word);
    group.append(input);
  }
  return group;
}

// fills the form from the address; the lists of runs and endings are filled when the server has named them
function fillForm() {
  at("ranges").append(...RANGES.map(rangeOf));
  for (const [name, value] of opening) {
    const field = form.elements[name];
    if (field && field.tagName === "INPUT") field.value = value;
  }
  const isLimited = ({ name }) => opening.has(name + "_min") || opening.has(name + "_max");
  at("more").open = window.innerWidth > 800 || RANGES.some(isLimited);
  form.elements.correct.value = opening.get("correct") || "";
}

async function showSnippet() {
  const answer = await ask("snippet", currentQuery());
  if (answer) document.querySelector("#snippet pre").textContent = answer.snippet;
  at("snippet").hidden = !answer;
}

function listen() {
  document.addEventListener("keydown", pressed);
  form.addEventListener("input", ({ target }) => {
    if (target.name in state.choices) state.choices[target.name] = target.value;
    searchSoon();
  });
  form.addEventListener("submit", (event) => { event.preventDefault(); searchAgain(); });
  form.addEventListener("reset", () => {
    state.choices = { run: "", finish: "" };
    setTimeout(searchAgain);
  });
  document.querySelector("#list thead").addEventListener("click", (event) => {
    if (event.target.dataset.sort) sortBy(event.target.dataset.sort);
  });
  listBody.addEventListener("click", (event) => choose(Number(event.target.closest("tr").dataset.i), true));
  at("earlier").addEventListener("click", () => turnPage(-1));
  at("later").addEventListener("click", () => turnPage(1));
  at("mark").addEventListener("click", markForDiff);
  at("diff").addEventListener("click", showDifference);
  at("same-prompt").addEventListener("click", searchItsPrompt);
  at("as-snippet").addEventListener("click", showSnippet);
}

fillForm();
listen();
showHeads();
followRuns();
