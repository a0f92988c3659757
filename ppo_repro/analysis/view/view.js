// The page over all responses. Texts enter it by textContent alone.
(() => {
  const RANGES = { score: "Score", length: "Tokens", mismatch: "Mismatch, nats", clipped: "Clipped", advantage: "Advantage", iteration: "Iteration" };
  const LIST = [
    ["prompt", "Prompt", ""], ["response", "Response", ""], ["score", "Score", "short number"], ["correct", "Right", "short more"],
    ["length", "Tokens", "short number more"], ["finish", "Ended", "short more"], ["mismatch", "Mismatch", "short number more"],
    ["clipped", "Clipped", "short number more"], ["advantage", "Advantage", "short number more"],
    ["iteration", "Iteration", "short number more"], ["run", "Run", "run more"],
  ];
  const MARKS = { right: "✓ right", wrong: "✗ wrong", unjudged: "–" };
  const EACH = 50;
  const LOOK_MS = 1500;
  const form = at("query");
  const body = document.querySelector("#list tbody");
  const asked = new URLSearchParams(location.search);
  const token = asked.get("token");
  const state = { sort: asked.get("sort") || "iteration", order: asked.get("order") || "desc", offset: Number(asked.get("offset") || 0) };
  Object.assign(state, { rows: [], chosen: null, marked: null, version: -1, runs: new Map(), calls: {}, errors: {} });

  // a later request of the same kind makes an earlier one void
  async function ask(name, params = {}) {
    if (state.calls[name]) state.calls[name].abort();
    const call = (state.calls[name] = new AbortController());
    try {
      const reply = await fetch("/api/" + name + "?" + new URLSearchParams({ ...params, token }), { signal: call.signal });
      const found = await reply.json();
      wrong(name, found.error || "");
      return found.error ? null : found;
    } catch (error) {
      if (error.name !== "AbortError") wrong(name, "No answer: the server has ended; start `ppo-repro view` again.");
      return null;
    }
  }

  function wrong(name, text) {
    state.errors[name] = text;
    at("said").textContent = visible([...new Set(Object.values(state.errors))].filter(Boolean).join(" "));
  }

  function filters() {
    const found = { sort: state.sort, order: state.order };
    for (const [name, value] of new FormData(form)) if (value !== "") found[name] = value;
    return found;
  }

  const place = (row) => ({ run: row.run, iteration: row.iteration, sequence: row.sequence });
  const same = (a, b) => a && b && a.run === b.run && a.iteration === b.iteration && a.sequence === b.sequence;
  // what a person called the run, else what it differs in, else its folder
  const called = (run) => run.name || run.short || run.folder;
  const runName = (row) => (state.runs.has(row.run) ? called(state.runs.get(row.run)) : String(row.run));
  const isJudged = () => [...state.runs.values()].some((run) => run.judged);
  const about = (run) => [run.folder, run.whole, run.tags.join(" "), run.notes].filter(Boolean).join("\n");
  const judged = (row) => (state.runs.has(row.run) && !state.runs.get(row.run).judged ? "unjudged" : row.correct ? "right" : row.answer === "" ? "unjudged" : "wrong");

  const mark = (row, word) => (judged(row) === "unjudged" ? "" : word + ", ");

  // the text, with what was searched for marked
  function put(node, text, needle, around) {
    const from = needle ? text.toLowerCase().indexOf(needle.toLowerCase()) : -1;
    const start = around && from > around ? from - around : 0;
    const shown = (start ? "… " : "") + text.slice(start);
    const parts = [];
    let rest = around ? shown.slice(0, 8 * around).replace(/\n/g, "↵") : shown;
    const low = needle ? needle.toLowerCase() : "";
    for (let i = low ? rest.toLowerCase().indexOf(low) : -1; i >= 0; i = rest.toLowerCase().indexOf(low)) {
      parts.push(visible(rest.slice(0, i)), make("mark", visible(rest.slice(i, i + low.length))));
      rest = rest.slice(i + low.length);
    }
    node.replaceChildren(...parts, visible(rest));
    node.dir = "auto";
    return node;
  }

  async function search() {
    const query = filters();
    const address = new URLSearchParams({ token, ...query });
    if (state.offset) address.set("offset", state.offset);
    history.replaceState(null, "", "?" + address);
    at("csv").href = "/api/csv?" + new URLSearchParams({ ...query, token });
    const found = await ask("responses", { ...query, offset: state.offset, limit: EACH });
    if (!found) return;
    if (!found.rows.length && state.offset && found.total) {
      state.offset = 0;
      search();
      return;
    }
    state.rows = found.rows;
    const last = found.offset + found.rows.length;
    at("found").textContent = found.total
      ? (found.offset + 1).toLocaleString("en") + " to " + last.toLocaleString("en") + " of " + found.total.toLocaleString("en") +
        " responses; mean score " + say(found.score, 4) + ([...state.runs.values()].every((run) => run.judged) ? ", " + say(100 * found.correct, 3) + " % right" : "")
      : "No response matches.";
    at("earlier").disabled = found.offset === 0;
    at("later").disabled = last >= found.total;
    list();
  }

  function list() {
    const focused = body.contains(document.activeElement);
    const text = form.elements.text.value;
    const index = Math.max(0, state.rows.findIndex((row) => same(row, state.chosen)));
    body.replaceChildren(...state.rows.map((row, i) => {
      const line = make("tr", undefined, same(row, state.marked) ? "marked" : "");
      line.tabIndex = i === index ? 0 : -1;
      line.dataset.i = i;
      line.setAttribute("aria-selected", String(Boolean(same(row, state.chosen))));
      for (const [name, , kind] of columns()) {
        const cell = make("td", undefined, kind + (name === "correct" ? " " + judged(row) : ""));
        if (name === "response") put(cell, row.response, text, 40);
        else if (name === "prompt") put(cell, row.prompt, form.elements.prompt.value, 40);
        else cell.textContent = name === "run" ? visible(runName(row)) : name === "correct" ? MARKS[judged(row)] : visible(say(row[name], 4));
        if (name === "run" && state.runs.has(row.run)) cell.title = visible(about(state.runs.get(row.run)));
        line.append(cell);
      }
      return line;
    }));
    if (focused && body.rows[index]) body.rows[index].focus();
  }

  const columns = () => LIST.filter(([name]) => name !== "correct" || isJudged());

  function heads() {
    document.querySelector("#list thead tr").replaceChildren(...columns().map(([name, label, kind]) => {
      const head = make("th", undefined, kind);
      head.scope = "col";
      const button = make("button", label + (state.sort === name ? (state.order === "asc" ? " ▲" : " ▼") : ""));
      button.type = "button";
      button.dataset.sort = name;
      if (state.sort === name) head.setAttribute("aria-sort", state.order === "asc" ? "ascending" : "descending");
      head.append(button);
      return head;
    }));
  }

  async function choose(i, focus) {
    const row = state.rows[i];
    if (!row) return;
    state.chosen = place(row);
    list();
    if (focus) body.rows[i].focus();
    await open(state.chosen);
  }

  async function open(where) {
    const found = await ask("response", where);
    if (!found) return;
    const row = found.row;
    state.chosen = place(row);
    at("title").textContent = visible(runName(row)) + ": iteration " + row.iteration + ", sequence " + row.sequence + " (" + mark(row, judged(row)) + "score " + say(row.score, 4) + ")";
    at("rendered").textContent = visible(found.rendered === null ? row.prompt : found.rendered);
    at("answer").textContent = visible(row.answer);
    const count = found.samples.length;
    at("samples-title").textContent = count === 1 ? "The response" : "All " + count + " samples of this prompt in this iteration";
    const opened = found.samples.filter((sample) => same(sample, row));
    const others = found.samples.filter((sample) => !same(sample, row));
    at("samples").replaceChildren(...[...opened, ...others].map((sample) => card(sample, row)));
    const run = state.runs.get(row.run);
    at("about").textContent = run ? visible([run.folder, run.tags.join(" "), run.notes].filter(Boolean).join("; ")) : "";
    at("about").title = run ? visible(run.whole) : "";
    at("difference").hidden = true;
    at("diff").disabled = !state.marked || same(state.marked, row);
    at("one").hidden = false;
    tokenView.load(found.tokens, tokenView.column());
    // the list becomes low, so that the window has both: the list and the response
    document.body.classList.add("opened");
    const line = body.querySelector("[aria-selected='true']");
    if (line) line.scrollIntoView({ block: "nearest" });
    scrollTo({ top: scrollY + at("found").getBoundingClientRect().top });
  }

  function card(sample, row) {
    const box = make("div", undefined, "card " + judged(sample) + (same(sample, row) ? " this" : ""));
    const head = make("div", undefined, judged(sample));
    head.textContent = mark(sample, MARKS[judged(sample)]) + "score " + say(sample.score, 4) + ", " + sample.length + (sample.length === 1 ? " token, " : " tokens, ") + sample.finish + ", advantage " + say(sample.advantage, 3) + " ";
    if (!same(sample, row)) {
      const button = make("button", "Open");
      button.type = "button";
      button.addEventListener("click", () => open(place(sample)));
      head.append(button);
    }
    box.append(head, put(make("p", undefined, "text"), sample.response, form.elements.text.value));
    return box;
  }

  function remember() {
    if (!state.chosen) return;
    state.marked = state.chosen;
    at("diff").disabled = true;
    list();
  }

  async function difference() {
    const other = { other_run: state.chosen.run, other_iteration: state.chosen.iteration, other_sequence: state.chosen.sequence };
    const found = await ask("diff", { ...state.marked, ...other });
    if (!found) return;
    const tags = { "=": "span", "-": "del", "+": "ins" };
    document.querySelector("#difference p").replaceChildren(...found.parts.map(([kind, text]) => make(tags[kind], visible(text))));
    at("difference").hidden = false;
  }

  async function look() {
    const found = await ask("state");
    if (found) {
      wrong("index", found.failure);
      state.runs = new Map(found.runs.map((run) => [run.number, run]));
      const works = found.runs.filter((run) => run.state === "running").length;
      const read = found.runs.reduce((sum, run) => sum + run.read, 0);
      const all = found.runs.reduce((sum, run) => sum + run.iterations, 0);
      const states = [...new Set(found.runs.map((run) => run.state))].map((name) => found.runs.filter((run) => run.state === name).length + " " + name);
      at("runs").textContent = found.runs.length + (found.runs.length === 1 ? " run (" : " runs (") + states.join(", ") + "), " + read.toLocaleString("en") + " of " + all.toLocaleString("en") + " iterations read" +
        (works ? "; following" : "") + (found.others ? "; " + found.others + " other folders have no responses" : "") +
        (found.damaged.length ? "; not readable: " + found.damaged.map(visible).join("; ") : "");
      if (found.version !== state.version) {
        heads();
        at("judged").hidden = !isJudged();
        fill(form.elements.run, [["", "all"], ...found.runs.map((run) => [run.number, visible(called(run) + (called(run) === run.folder ? "" : " (" + run.folder + ")"))])], form.elements.run.value || asked.get("run") || "");
        fill(form.elements.finish, [["", "all"], ...found.finishes.map((name) => [name, name])], form.elements.finish.value || asked.get("finish") || "");
        state.version = found.version;
        await search();
      }
    }
    setTimeout(look, LOOK_MS);
  }

  function turn(by) {
    state.offset = Math.max(0, state.offset + by * EACH);
    search();
  }

  function again() {
    state.offset = 0;
    search();
  }

  const keys = {
    "/": () => form.elements.text.focus(),
    n: () => at("later").disabled || turn(1),
    p: () => at("earlier").disabled || turn(-1),
    m: remember,
    Escape: () => body.rows.length && (body.querySelector("[tabindex='0']") || body.rows[0]).focus(),
  };

  function key(event) {
    const typing = event.target.closest("input, select");
    if (event.altKey || event.ctrlKey || event.metaKey || (typing && event.key !== "Escape")) return;
    const by = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
    if (body.contains(event.target) && (by || event.key === "Enter")) {
      const i = Number(event.target.closest("tr").dataset.i);
      if (by) choose(Math.max(0, Math.min(state.rows.length - 1, i + by)), true);
      else choose(i, false).then(() => at("title").focus());
    } else if (keys[event.key]) {
      keys[event.key]();
    } else {
      return;
    }
    event.preventDefault();
  }

  let waiting = 0;
  function soon() {
    clearTimeout(waiting);
    waiting = setTimeout(again, 200);
  }

  at("ranges").append(...Object.entries(RANGES).map(([name, label]) => {
    const group = make("span", undefined, "control");
    group.append(make("span", label));
    for (const [end, word] of [["min", "at least"], ["max", "at most"]]) {
      const input = make("input");
      Object.assign(input, { name: name + "_" + end, inputMode: "decimal", placeholder: word });
      input.setAttribute("aria-label", label + " " + word);
      group.append(input);
    }
    return group;
  }));
  for (const [name, value] of asked) if (form.elements[name] && form.elements[name].tagName === "INPUT") form.elements[name].value = value;
  at("more").open = window.innerWidth > 800 || Object.keys(RANGES).some((name) => asked.has(name + "_min") || asked.has(name + "_max"));
  form.elements.correct.value = asked.get("correct") || "";
  form.addEventListener("input", soon);
  form.addEventListener("submit", (event) => { event.preventDefault(); again(); });
  form.addEventListener("reset", () => setTimeout(again));
  document.addEventListener("keydown", key);
  document.querySelector("#list thead").addEventListener("click", (event) => {
    const name = event.target.dataset.sort;
    if (!name) return;
    state.order = state.sort === name && state.order === "desc" ? "asc" : "desc";
    state.sort = name;
    heads();
    document.querySelector("#list [data-sort='" + name + "']").focus();
    again();
  });
  body.addEventListener("click", (event) => choose(Number(event.target.closest("tr").dataset.i), true));
  at("earlier").addEventListener("click", () => turn(-1));
  at("later").addEventListener("click", () => turn(1));
  at("mark").addEventListener("click", remember);
  at("diff").addEventListener("click", difference);
  at("same").addEventListener("click", async () => {
    const row = state.rows.find((each) => same(each, state.chosen)) || (await ask("response", state.chosen)).row;
    form.reset();
    form.elements.prompt_key.value = row.prompt_key;
    again();
  });
  at("as-snippet").addEventListener("click", async () => {
    const found = await ask("snippet", filters());
    if (found) document.querySelector("#snippet pre").textContent = found.snippet;
    at("snippet").hidden = !found;
  });
  heads();
  look();
})();
