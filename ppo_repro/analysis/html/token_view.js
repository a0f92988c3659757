"use strict";
// report/data/token_view.py makes the JSON that this draws.
// Everything shown enters the page as text, never as markup.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff\ufffe\uffff]/g;
const at = (id) => document.getElementById(id);

function make(tag, text, name) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (name) node.className = name;
  return node;
}

// what a reader could not see gets a visible name
function visible(text) {
  const named = text.replace(HIDDEN, (c) => "⟨U+" + c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0") + "⟩");
  return /^\p{M}/u.test(named) ? "◌" + named : named;
}

function say(value, digits = 6) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const rounded = Number(value.toPrecision(digits));
  return rounded !== 0 && Math.abs(rounded) < 1e-3 ? rounded.toExponential() : String(rounded);
}

function fill(select, options, chosen) {
  select.replaceChildren(...options.map(([key, label]) => {
    const option = make("option", label);
    option.value = key;
    option.selected = String(key) === String(chosen);
    return option;
  }));
}

// The token view of the responses in `data`, which `load` sets.
const tokenView = (() => {
  const LEVELS = 4;
  const ONE_SIDED = { sequential: 1, negative: -1 };
  let data = null;
  const view = {
    root: at("token-view"), column: at("tv-column"), iteration: at("tv-iteration"),
    sequence: at("tv-sequence"), about: at("tv-about"), prompt: at("tv-prompt"), answer: at("tv-answer"),
    legend: at("tv-legend"), tokens: at("tv-tokens"), detail: at("tv-detail"), jumps: at("tv-jumps"),
  };
  const state = { response: 0, token: 0, spans: [] };

  function shown(response, i) {
    const text = response.texts[i];
    if (response.special[i]) {
      const ends = i === response.texts.length - 1 && response.finish === "stop";
      return "⟨" + (ends ? "end" : "special") + " " + response.ids[i] + "⟩";
    }
    if (text === "") return "⟨part " + response.ids[i] + "⟩";
    return visible(text).replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/ /g, "␣");
  }

  function levelName(column, level) {
    if (level === 0) return "";
    return (column.scale in ONE_SIDED ? "q" : level > 0 ? "p" : "n") + Math.abs(level);
  }

  function flagClass(name) {
    const known = data.flags.find((flag) => flag.name === name);
    return known ? known.class : "odd";
  }

  function shade(column, value) {
    if (column.scale === "category") return value === null ? "" : flagClass(value);
    if (typeof value === "string") return "odd";
    if (value === null || column.limit === 0) return "";
    const size = column.scale === "ratio" ? (value > 0 ? Math.log(value) : -Infinity) : value;
    const level = Math.min(LEVELS, Math.round((Math.abs(size) / column.limit) * LEVELS));
    if (level === 0) return "";
    return levelName(column, size > 0 ? level : -level);
  }

  function value(response, column, i) {
    return (response.columns[column.key] || [])[i] ?? null;
  }

  function column() {
    return data.columns[view.column.selectedIndex];
  }

  function paint() {
    const response = data.responses[state.response];
    const chosen = column();
    state.spans.forEach((span, i) => {
      const name = shade(chosen, value(response, chosen, i));
      span.className = name ? "token " + name : "token";
      if (response.special[i]) span.classList.add("special");
    });
    legend(chosen);
    detail(state.token);
  }

  function swatch(name, label) {
    const item = make("li");
    const sample = make("span", "", "token " + name);
    sample.setAttribute("aria-hidden", "true");
    item.append(sample, make("span", label));
    return item;
  }

  function legend(chosen) {
    const items = [];
    const unit = chosen.unit ? " " + chosen.unit : "";
    if (chosen.scale === "category") {
      for (const flag of data.flags) items.push(swatch(flag.class, flag.name + ": " + flag.words));
    } else if (chosen.limit === 0) {
      items.push(swatch("", (chosen.scale === "ratio" ? "1" : "0") + " everywhere"));
    } else {
      const least = chosen.scale in ONE_SIDED ? 0 : -LEVELS;
      for (let k = least; k <= LEVELS; k += 1) {
        const part = (k / LEVELS) * chosen.limit * (ONE_SIDED[chosen.scale] || 1);
        const edge = say(chosen.scale === "ratio" ? Math.exp(part) : part, 3);
        const beyond = Math.abs(k) < LEVELS ? "" : part > 0 ? " and more" : " and less";
        items.push(swatch(levelName(chosen, k), edge + beyond + (k === LEVELS ? unit : "")));
      }
    }
    view.legend.replaceChildren(...items);
  }

  function detail(i) {
    const response = data.responses[state.response];
    const rows = [["text", shown(response, i)], ["position", i], ["token id", response.ids[i]]];
    for (const each of data.columns) rows.push([each.label, say(value(response, each, i)), each.unit, each === column()]);
    const body = rows.map(([name, text, unit, strong]) => {
      const row = make("tr", undefined, strong ? "chosen" : "");
      const head = make("th", unit ? name + " [" + unit + "]" : name);
      head.scope = "row";
      const cell = make("td");
      const inner = make("bdi", String(text));
      inner.dir = "auto";
      cell.append(inner);
      row.append(head, cell);
      return row;
    });
    view.detail.replaceChildren(...body);
  }

  function focusable(i) {
    const old = state.spans[state.token];
    if (old) {
      old.tabIndex = -1;
      old.setAttribute("aria-selected", "false");
    }
    state.token = i;
    state.spans[i].tabIndex = 0;
    state.spans[i].setAttribute("aria-selected", "true");
    detail(i);
  }

  function draw() {
    const response = data.responses[state.response];
    const pieces = document.createDocumentFragment();
    state.spans = response.texts.map((text, i) => {
      const span = make("bdi", shown(response, i), "token");
      span.dir = "auto";
      span.tabIndex = -1;
      span.dataset.i = i;
      span.setAttribute("role", "option");
      span.setAttribute("aria-selected", "false");
      pieces.append(span);
      if (text.includes("\n")) pieces.append(make("br"));
      return span;
    });
    view.tokens.replaceChildren(pieces);
    state.token = Math.min(state.token, state.spans.length - 1);
    paint();
    focusable(state.token);
  }

  function reasons(response) {
    return response.why.map((key) => data.reasons[key]).join(", ");
  }

  function show(index) {
    const response = data.responses[index];
    state.response = index;
    state.token = 0;
    const iterations = [...new Set(data.responses.map((r) => r.iteration))];
    fill(view.iteration, iterations.map((i) => [i, String(i)]), response.iteration);
    const same = data.responses.map((r, i) => [r, i]).filter(([r]) => r.iteration === response.iteration);
    fill(view.sequence, same.map(([r, i]) => [i, r.sequence + " (" + reasons(r) + ")"]), index);
    view.about.textContent =
      (data.responses.length > 1 ? "Response " + (index + 1) + " of " + data.responses.length + " shown here: i" : "I") + "teration " + response.iteration +
      ", sequence " + response.sequence + "; " + response.texts.length + (response.texts.length === 1 ? " token, score " : " tokens, score ") + say(response.score) +
      ", ended by " + response.finish + ", largest mismatch " + say(response.mismatch) + " nats, " +
      response.clipped + " clipped token updates" + (response.why.length ? "; chosen as " + reasons(response) : "") + ".";
    view.prompt.textContent = visible(response.prompt);
    view.answer.textContent = visible(response.answer);
    draw();
  }

  function step(by) {
    const count = data.responses.length;
    show((state.response + by + count) % count);
  }

  function best(key) {
    const all = data.responses.map((r, i) => [r, i]).filter(([r]) => r.why.includes(key));
    // a word, such as inf or nan, is a difference that is not finite
    const size = (delta) => (typeof delta === "string" ? Infinity : Math.abs(delta));
    const worth = { mismatch: (r) => size(r.mismatch), clipped: (r) => r.clipped, best: (r) => r.score, worst: (r) => -r.score };
    const rank = worth[key] || (() => 0);
    show(all.reduce((a, b) => (rank(b[0]) > rank(a[0]) ? b : a))[1]);
    if (key !== "mismatch") return;
    const sizes = data.responses[state.response].columns.delta.map(size);
    focusable(sizes.reduce((largest, one, i) => (one > sizes[largest] ? i : largest), 0));
  }

  function onKey(event) {
    const last = state.spans.length - 1;
    const i = state.token;
    const moves = {
      ArrowRight: () => Math.min(i + 1, last), ArrowLeft: () => Math.max(i - 1, 0), Home: () => 0, End: () => last,
    };
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "PageDown" || event.key === "PageUp") {
      step(event.key === "PageDown" ? 1 : -1);
    } else if (moves[event.key]) {
      focusable(moves[event.key]());
    } else {
      return;
    }
    event.preventDefault();
    state.spans[state.token].focus();
  }

  const tokenAt = (event) => event.target.closest("[data-i]");

  function listen() {
    view.column.addEventListener("change", paint);
    view.iteration.addEventListener("change", () =>
      show(data.responses.findIndex((r) => String(r.iteration) === view.iteration.value)));
    view.sequence.addEventListener("change", () => show(Number(view.sequence.value)));
    at("tv-previous").addEventListener("click", () => step(-1));
    at("tv-next").addEventListener("click", () => step(1));
    view.tokens.addEventListener("keydown", onKey);
    view.tokens.addEventListener("mouseover", (event) => tokenAt(event) && detail(Number(tokenAt(event).dataset.i)));
    view.tokens.addEventListener("mouseleave", () => detail(state.token));
    view.tokens.addEventListener("click", (event) => {
      if (!tokenAt(event)) return;
      focusable(Number(tokenAt(event).dataset.i));
      state.spans[state.token].focus();
    });
  }

  // `chosen`: the column to colour by, if the data has it
  function load(found, chosen) {
    data = found;
    // where sampler and trainer agree there is no mismatch to show
    const limit = (key) => (data.columns.find((c) => c.key === key) || { limit: 0 }).limit;
    const first = limit("delta") === 0 && limit("advantages") > 0 ? "advantages" : data.columns[0].key;
    fill(view.column, data.columns.map((c) => [c.key, c.label]), data.columns.some((c) => c.key === chosen) ? chosen : first);
    const jumps = Object.entries(data.reasons).map(([key, label]) => {
      const button = make("button", label[0].toUpperCase() + label.slice(1));
      button.type = "button";
      button.disabled = !data.responses.some((r) => r.why.includes(key));
      button.addEventListener("click", () => best(key));
      return button;
    });
    view.jumps.replaceChildren(...jumps);
    const opening = ["mismatch", "best", ...Object.keys(data.reasons)];
    const reason = opening.find((key) => data.responses.some((r) => r.why.includes(key)));
    for (const node of document.querySelectorAll(".tv-many")) node.hidden = data.responses.length < 2;
    view.root.hidden = false;
    if (reason) best(reason);
    else show(0);
  }

  if (view.root) listen();
  return { load, column: () => (data ? view.column.value : undefined) };
})();

if (at("token-data")) tokenView.load(JSON.parse(at("token-data").textContent));
