// The opened response: its prompt, the other samples, its tokens, and its difference from a marked response.
async function choose(i, takesFocus) {
  const row = state.rows[i];
  if (!row) return;
  state.chosen = placeOf(row);
  showRows();
  if (takesFocus) listBody.rows[i].focus();
  await openResponse(state.chosen);
}

async function openResponse(place) {
  const opened = await ask("response", place);
  if (!opened) return;
  state.chosen = placeOf(opened.row);
  showTexts(opened);
  showSamples(opened);
  at("difference").hidden = true;
  at("diff").disabled = !state.marked || isSame(state.marked, opened.row);
  at("response").hidden = false;
  tokenView.load(opened.tokens, tokenView.column());
  scrollToResponse();
}

function showTexts({ row, rendered }) {
  const where = visible(runName(row)) + ": iteration " + row.iteration + ", sequence " + row.sequence;
  const run = state.runs.get(row.run);
  at("title").textContent = where + " (" + ifJudged(row, judgement(row)) + "score " + say(row.score, 4) + ")";
  at("rendered").textContent = visible(rendered === null ? row.prompt : rendered);
  at("answer").textContent = visible(row.answer);
  at("about").textContent = run ? visible([run.folder, run.tags.join(" "), run.notes].filter(Boolean).join("; ")) : "";
  at("about").title = run ? visible(run.whole) : "";
}

function showSamples({ row, samples }) {
  const several = "All " + samples.length + " samples of this prompt in this iteration";
  const opened = samples.filter((sample) => isSame(sample, row));
  const others = samples.filter((sample) => !isSame(sample, row));
  at("samples-title").textContent = samples.length === 1 ? "The response" : several;
  at("samples").replaceChildren(...[...opened, ...others].map((sample) => cardOf(sample, isSame(sample, row))));
}

function cardOf(sample, isOpened) {
  const card = make("div", undefined, "card " + judgement(sample) + (isOpened ? " this" : ""));
  const tokens = sample.length + (sample.length === 1 ? " token, " : " tokens, ");
  const numbers = "score " + say(sample.score, 4) + ", " + tokens + sample.finish + ", advantage " + say(sample.advantage, 3);
  const head = make("div", undefined, judgement(sample));
  head.textContent = ifJudged(sample, JUDGEMENTS[judgement(sample)]) + numbers + " ";
  if (!isOpened) {
    const button = make("button", "Open");
    button.type = "button";
    button.addEventListener("click", () => openResponse(placeOf(sample)));
    head.append(button);
  }
  card.append(head, putHighlighted(make("p", undefined, "text"), sample.response, form.elements.text.value));
  return card;
}

function scrollToResponse() {
  // the list becomes low, so that the window has both: the list and the response
  document.body.classList.add("opened");
  const line = listBody.querySelector("[aria-selected='true']");
  if (line) line.scrollIntoView({ block: "nearest" });
  scrollTo({ top: scrollY + at("summary").getBoundingClientRect().top });
}

function markForDiff() {
  if (!state.chosen) return;
  state.marked = state.chosen;
  at("diff").disabled = true;
  showRows();
}

async function showDifference() {
  const { run, iteration, sequence } = state.chosen;
  const other = { other_run: run, other_iteration: iteration, other_sequence: sequence };
  const difference = await ask("diff", { ...state.marked, ...other });
  if (!difference) return;
  const tags = { "=": "span", "-": "del", "+": "ins" };
  const parts = difference.parts.map(([kind, text]) => make(tags[kind], visible(text)));
  document.querySelector("#difference p").replaceChildren(...parts);
  at("difference").hidden = false;
}

async function searchItsPrompt() {
  const shown = state.rows.find((row) => isSame(row, state.chosen));
  const opened = shown ? { row: shown } : await ask("response", state.chosen);
  if (!opened) return;
  form.reset();
  form.elements.prompt_key.value = opened.row.prompt_key;
  searchAgain();
}
