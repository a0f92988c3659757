// The list of responses: search, pages, columns, and the line about the runs.
const LOOK_MS = 1500; // between two requests for the state of the runs
// a column with `isNumber` has a range among the filters, whose parameters query.py names
const LIST_COLUMNS = [
  { name: "prompt", heading: "Prompt", css: "" },
  { name: "response", heading: "Response", css: "" },
  { name: "score", heading: "Score", isNumber: true, css: "short number" },
  { name: "correct", heading: "Right", css: "short more" },
  { name: "length", heading: "Tokens", isNumber: true, css: "short number more" },
  { name: "finish", heading: "Ended", css: "short more" },
  { name: "mismatch", heading: "Mismatch", unit: "nats", isNumber: true, css: "short number more" },
  { name: "clipped", heading: "Clipped", isNumber: true, css: "short number more" },
  { name: "advantage", heading: "Advantage", isNumber: true, css: "short number more" },
  { name: "iteration", heading: "Iteration", isNumber: true, css: "short number more" },
  { name: "run", heading: "Run", css: "run more" },
];
const listBody = document.querySelector("#list tbody");

const shownColumns = () => LIST_COLUMNS.filter(({ name }) => name !== "correct" || someRunJudges());
const grouped = (count) => count.toLocaleString("en");

async function search() {
  const query = currentQuery();
  showAddress(query);
  const page = await ask("responses", { ...query, offset: state.offset });
  if (!page) return;
  if (!page.rows.length && state.offset && page.total) {
    searchAgain();
    return;
  }
  state.rows = page.rows;
  state.limit = page.limit;
  at("summary").textContent = summaryOf(page);
  at("earlier").disabled = page.offset === 0;
  at("later").disabled = page.offset + page.rows.length >= page.total;
  showRows();
}

// searches from the first page on
function searchAgain() {
  state.offset = 0;
  search();
}

function turnPage(by) {
  state.offset = Math.max(0, state.offset + by * state.limit);
  search();
}

// writes the query into the address of the page and into the link to the CSV file
function showAddress(query) {
  const address = new URLSearchParams({ token, ...query });
  if (state.offset) address.set("offset", state.offset);
  history.replaceState(null, "", "?" + address);
  at("csv").href = "/api/csv?" + new URLSearchParams({ ...query, token });
}

function summaryOf({ total, offset, rows, runs, score, correct }) {
  if (!total) return "No response matches.";
  const shown = grouped(offset + 1) + " to " + grouped(offset + rows.length);
  const allJudged = runs.every((number) => state.runs.get(number)?.judged);
  const right = allJudged && correct !== null ? ", " + say(100 * correct, 3) + " % right" : "";
  return shown + " of " + grouped(total) + " responses; mean score " + say(score, 4) + right;
}

function showRows() {
  const hadFocus = listBody.contains(document.activeElement);
  const current = Math.max(0, state.rows.findIndex((row) => isSame(row, state.chosen)));
  listBody.replaceChildren(...state.rows.map((row, i) => lineOf(row, i, i === current)));
  if (hadFocus && listBody.rows[current]) listBody.rows[current].focus();
}

function lineOf(row, i, isCurrent) {
  const line = make("tr", undefined, isSame(row, state.marked) ? "marked" : "");
  line.tabIndex = isCurrent ? 0 : -1;
  line.dataset.i = i;
  line.setAttribute("aria-selected", String(Boolean(isSame(row, state.chosen))));
  line.append(...shownColumns().map((column) => cellOf(row, column)));
  return line;
}

function cellOf(row, { name, css }) {
  const cell = make("td", undefined, css);
  if (name === "response") return putHighlighted(cell, row.response, form.elements.text.value, 40);
  if (name === "prompt") return putHighlighted(cell, row.prompt, form.elements.prompt.value, 40);
  if (name === "correct") {
    cell.className += " " + judgement(row);
    cell.textContent = JUDGEMENTS[judgement(row)];
  } else if (name === "run") {
    const run = state.runs.get(row.run);
    cell.textContent = visible(runName(row));
    if (run) cell.title = visible([run.folder, run.whole, run.tags.join(" "), run.notes].filter(Boolean).join("\n"));
  } else {
    cell.textContent = visible(say(row[name], 4));
  }
  return cell;
}

function showHeads() {
  document.querySelector("#list thead tr").replaceChildren(...shownColumns().map(headOf));
}

function headOf({ name, heading, css }) {
  const isSorted = state.sort === name;
  const arrow = state.order === "asc" ? " ▲" : " ▼";
  const head = make("th", undefined, css);
  const button = make("button", heading + (isSorted ? arrow : ""));
  button.type = "button";
  button.dataset.sort = name;
  head.scope = "col";
  if (isSorted) head.setAttribute("aria-sort", state.order === "asc" ? "ascending" : "descending");
  head.append(button);
  return head;
}

function sortBy(name) {
  state.order = state.sort === name && state.order === "desc" ? "asc" : "desc";
  state.sort = name;
  showHeads();
  document.querySelector("#list [data-sort='" + name + "']").focus();
  searchAgain();
}

// asks for the state of the runs again and again; a new version of the server's table is searched again
async function followRuns() {
  const index = await ask("state");
  if (index) {
    showError("index", index.failure);
    state.runs = new Map(index.runs.map((run) => [run.number, run]));
    at("runs").textContent = lineAboutRuns(index);
    if (index.version !== state.version) {
      showHeads();
      fillChoices(index);
      state.version = index.version;
      await search();
    }
  }
  setTimeout(followRuns, LOOK_MS);
}

function lineAboutRuns({ runs, others, damaged }) {
  const sum = (name) => grouped(runs.reduce((total, run) => total + run[name], 0));
  const counted = (name) => runs.filter((run) => run.state === name).length + " " + name;
  const states = [...new Set(runs.map((run) => run.state))].map(counted).join(", ");
  return [
    runs.length + (runs.length === 1 ? " run (" : " runs (") + states + "), ",
    sum("read") + " of " + sum("iterations") + " iterations read",
    runs.some((run) => run.state === "running") ? "; following" : "",
    others ? "; " + others + " other folders have no responses" : "",
    damaged.length ? "; not readable: " + damaged.map(visible).join("; ") : "",
  ].join("");
}

function fillChoices({ runs, finishes }) {
  const label = (run) => nameOf(run) + (nameOf(run) === run.folder ? "" : " (" + run.folder + ")");
  const choices = runs.map((run) => [run.number, visible(label(run))]);
  at("judged").hidden = !someRunJudges();
  fill(form.elements.run, [["", "all"], ...choices], state.choices.run);
  fill(form.elements.finish, [["", "all"], ...finishes.map((name) => [name, name])], state.choices.finish);
}
