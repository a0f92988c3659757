// The list of responses: search, pages, columns, and the line about the runs.
const LOOK_MS = 1500;
const LIST_COLUMNS = [
  // name, heading, class
  ["prompt", "Prompt", ""],
  ["response", "Response", ""],
  ["score", "Score", "short number"],
  ["correct", "Right", "short more"],
  ["length", "Tokens", "short number more"],
  ["finish", "Ended", "short more"],
  ["mismatch", "Mismatch", "short number more"],
  ["clipped", "Clipped", "short number more"],
  ["advantage", "Advantage", "short number more"],
  ["iteration", "Iteration", "short number more"],
  ["run", "Run", "run more"],
];
const listBody = document.querySelector("#list tbody");

const columns = () => LIST_COLUMNS.filter(([name]) => name !== "correct" || someRunJudges());
const grouped = (count) => count.toLocaleString("en");

async function search() {
  const query = filters();
  showAddress(query);
  const found = await ask("responses", { ...query, offset: state.offset, limit: EACH });
  if (!found) return;
  if (!found.rows.length && state.offset && found.total) {
    searchAgain();
    return;
  }
  state.rows = found.rows;
  at("found").textContent = summaryOf(found);
  at("earlier").disabled = found.offset === 0;
  at("later").disabled = found.offset + found.rows.length >= found.total;
  showRows();
}

function searchAgain() {
  state.offset = 0;
  search();
}

function turnPage(by) {
  state.offset = Math.max(0, state.offset + by * EACH);
  search();
}

// writes the query into the address of the page and into the link to the CSV file
function showAddress(query) {
  const address = new URLSearchParams({ token, ...query });
  if (state.offset) address.set("offset", state.offset);
  history.replaceState(null, "", "?" + address);
  at("csv").href = "/api/csv?" + new URLSearchParams({ ...query, token });
}

function summaryOf(found) {
  if (!found.total) return "No response matches.";
  const shown = grouped(found.offset + 1) + " to " + grouped(found.offset + found.rows.length);
  const allJudged = found.runs.every((number) => state.runs.get(number)?.judged);
  const right = allJudged && found.correct !== null ? ", " + say(100 * found.correct, 3) + " % right" : "";
  return shown + " of " + grouped(found.total) + " responses; mean score " + say(found.score, 4) + right;
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
  line.append(...columns().map(([name, , kind]) => cellOf(row, name, kind)));
  return line;
}

function cellOf(row, name, kind) {
  const cell = make("td", undefined, kind);
  if (name === "response") return putMarked(cell, row.response, form.elements.text.value, 40);
  if (name === "prompt") return putMarked(cell, row.prompt, form.elements.prompt.value, 40);
  if (name === "correct") {
    cell.className += " " + judgement(row);
    cell.textContent = MARKS[judgement(row)];
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
  document.querySelector("#list thead tr").replaceChildren(...columns().map(headOf));
}

function headOf([name, label, kind]) {
  const isSorted = state.sort === name;
  const arrow = state.order === "asc" ? " ▲" : " ▼";
  const head = make("th", undefined, kind);
  const button = make("button", label + (isSorted ? arrow : ""));
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
  const found = await ask("state");
  if (found) {
    showError("index", found.failure);
    state.runs = new Map(found.runs.map((run) => [run.number, run]));
    at("runs").textContent = lineAboutRuns(found);
    if (found.version !== state.version) {
      showHeads();
      fillChoices(found);
      state.version = found.version;
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
  const called = (run) => nameOf(run) + (nameOf(run) === run.folder ? "" : " (" + run.folder + ")");
  const choices = runs.map((run) => [run.number, visible(called(run))]);
  at("judged").hidden = !someRunJudges();
  fill(form.elements.run, [["", "all"], ...choices], state.choices.run);
  fill(form.elements.finish, [["", "all"], ...finishes.map((name) => [name, name])], state.choices.finish);
}
