// The page of a Forerun server: a chat whose tokens show where they came from. Live figures are in plots.js.
import { watch } from "./plots.js";

const $ = (id) => document.getElementById(id);
const state = { messages: [], turns: [], control: null, model: "" };
const headers = { "Content-Type": "application/json" };
const key = new URLSearchParams(location.hash.slice(1)).get("key");
if (key) headers.Authorization = `Bearer ${key}`; // http://host:8000/#key=... for servers that want one

// Browsers say "Failed to fetch", "Load failed" or the like where nobody answers.
async function ask(path, more = {}) {
  try { return await fetch(path, { headers, ...more }); }
  catch (error) { throw error.name === "AbortError" ? error : new Error("the server does not answer"); }
}

async function getJson(path) {
  const response = await ask(path);
  if (!response.ok) throw new Error(await errorText(response));
  return response.json();
}

async function errorText(response) {
  try { return (await response.json()).error.message; } catch { return `HTTP ${response.status}`; }
}

async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

// What the boxes below the message ask for.
function options() {
  const read = (id, what) => {
    try { return JSON.parse($(id).value.trim() || "null"); } catch { throw new Error(`${what} is not JSON`); }
  };
  const schema = read("schema", "the schema"), tools = read("tools", "the list of tools");
  const prediction = $("prediction").value, thinking = $("thinking").value;
  return {
    ...(schema === null ? {} : { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } }),
    ...(tools === null ? {} : { tools }), ...(thinking === "" ? {} : { max_thinking_tokens: Number(thinking) }),
    ...(prediction.trim() ? { prediction: { type: "content", content: prediction } } : {}),
  };
}

function body(messages, speculative, extra) {
  const seed = $("seed").value;
  return {
    model: state.model, messages, stream: true, temperature: Number($("temperature").value),
    max_tokens: Number($("tokens").value), logprobs: true, top_logprobs: 3, speculative,
    stream_options: { include_usage: true, include_speculative: true, include_rejected: true },
    ...(seed === "" ? {} : { seed: Number(seed) }), ...options(), ...extra,
  };
}

const emptyAnswer = () => ({ text: "", thinking: "", calls: [], rounds: [], tokens: [], metrics: null, seconds: 0, first: null });

// Fills the answer as it comes, so that the caller has what there is of it when it is stopped.
async function write(messages, speculative, text, facts, signal, extra = {}, answer = emptyAnswer()) {
  const started = performance.now();
  const request = { method: "POST", signal, body: JSON.stringify(body(messages, speculative, extra)) };
  const response = await ask("v1/chat/completions", request);
  if (!response.ok) throw new Error(await errorText(response));
  const parts = new Parts(text), decoder = new TextDecoder(); // a character may be in several tokens: it is shown with its last one
  try {
    for await (const chunk of readEvents(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      const piece = chunk.choices[0];
      if (chunk.metrics) answer.metrics = chunk.metrics.speculative_decoding;
      if (chunk.speculative) {
        answer.first ??= performance.now() - started;
        showPiece(parts, answer, piece, chunk.speculative, decoder);
      } else if (piece?.delta) takeDelta(parts, answer, piece.delta);
    }
    if ($("schema").value.trim()) showJson(text, answer.text);
  } finally {
    parts.last?.append(decoder.decode()); // part of a character, at the end
    answer.seconds = (performance.now() - started) / 1000;
    const atEnd = isAtEnd();
    if (answer.tokens.length) facts.textContent = factsOf(answer);
    if (atEnd) showEnd();
  }
  return answer;
}

const MARKS = /<\/think>|\[\/THINK\]|<\|end\|>/; // behind which thinking has ended

// The parts of an answer: what was thought, what is said, calls of tools. Tokens of which it is not known yet what
// they belong to (the head of a call, say) are moved once it is.
class Parts {
  constructor(text) { Object.assign(this, { text, kind: "content", place: text, held: [], last: null, thought: false, tail: "" }); }

  begin(kind, title) {
    const isThere = kind === this.kind && kind !== "call", isOver = kind === "thinking" && this.thought;
    const isEarly = kind === "content" && this.kind === "thinking"; // the mark comes first, in one token or several
    if (isThere || isOver || isEarly) { this.held = []; return; }
    this.kind = kind;
    this.place = this.text;
    if (kind !== "content") {
      const box = document.createElement(kind === "call" ? "div" : "details"), head = document.createElement(kind === "call" ? "h4" : "summary");
      box.className = kind;
      box.open = true;
      head.textContent = title;
      box.append(head);
      this.text.append(box);
      this.place = box;
    }
    this.place.append(...this.held);
    this.held = [];
  }

  add(node, written) {
    this.tail = (this.tail + written).slice(-16);
    this.place.append(node);
    this.last = node;
    this.held.push(node);
    if (this.kind === "thinking" && MARKS.test(this.tail)) Object.assign(this, { kind: "content", place: this.text, held: [], thought: true });
  }
}

function takeDelta(parts, answer, delta) {
  if (delta.reasoning_content) {
    answer.thinking += delta.reasoning_content;
    parts.begin("thinking", "Thinking");
  }
  if (delta.content) {
    answer.text += delta.content;
    parts.begin("content");
  }
  for (const call of delta.tool_calls ?? []) {
    if (call.function.name) {
      answer.calls.push({ id: call.id, type: "function", function: { name: call.function.name, arguments: "" } });
      parts.begin("call", `Calls ${call.function.name}`);
    }
    answer.calls.at(-1).function.arguments += call.function.arguments ?? "";
    parts.held = [];
  }
}

function showJson(text, said) {
  const box = document.createElement("details"), head = document.createElement("summary"), shown = document.createElement("pre");
  box.className = "json";
  try { shown.textContent = JSON.stringify(JSON.parse(said), null, 2); head.textContent = "As JSON"; }
  catch { head.textContent = "Not whole JSON: raise Tokens"; }
  box.append(head, shown);
  text.append(box);
}

function showPiece(parts, answer, piece, spec, decoder) {
  const atEnd = isAtEnd();
  answer.rounds.push({ ...spec, tokens: (piece.logprobs?.content ?? []).map((entry) => entry.token) });
  (piece.logprobs?.content ?? []).forEach((entry, i) => {
    const token = { ...entry, round: answer.rounds.length, place: i, drafted: i < spec.accepted, predicted: spec.predicted?.[i] ?? false };
    answer.tokens.push(token);
    const shown = entry.bytes ? decoder.decode(new Uint8Array(entry.bytes), { stream: true }) : entry.token;
    parts.add(tokenNode(token, answer, shown), entry.token);
  });
  takeDelta(parts, answer, piece.delta);
  if (atEnd) showEnd(); // whoever has scrolled up is reading there
}

function isAtEnd() {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 40;
}

function showEnd() {
  const log = $("log");
  log.scrollTop = log.scrollHeight;
}

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)}%`;
const SPECIAL = /^<[|/].*>$/; // ends of texts and turns: not part of what the model said

function tokenNode(token, answer, shown) {
  const node = document.createElement("span");
  const source = token.drafted ? (token.predicted ? "predicted" : "drafted") : "own";
  node.className = `token ${source}${SPECIAL.test(token.token) ? " special" : ""}`;
  node.textContent = shown;
  node.tabIndex = answer.tokens.length === 1 ? 0 : -1; // one stop of the Tab key; arrows move from there
  node.setAttribute("role", "button");
  const about = `${{ predicted: "drafted from the prediction and accepted", drafted: "drafted and accepted", own: "the target's own" }[source]}, probability ${percent(token.logprob)}, round ${token.round}`;
  node.setAttribute("aria-label", `${token.token}: ${about}`);
  node.addEventListener("click", () => showRound(token, answer.rounds[token.round - 1]));
  for (const kind of ["focus", "pointerenter"]) node.addEventListener(kind, () => showTip(node, `${JSON.stringify(token.token)}: ${about}`));
  for (const kind of ["blur", "pointerleave"]) node.addEventListener(kind, () => { $("tip").hidden = true; });
  node.addEventListener("keydown", (event) => moveFrom(node, event));
  return node;
}

function showTip(node, text) {
  const tip = $("tip"), first = node.getClientRects()[0];
  tip.textContent = text;
  tip.hidden = false;
  const left = Math.min(first.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
  tip.style.left = `${Math.max(8, left) + scrollX}px`;
  tip.style.top = `${first.top + scrollY - tip.offsetHeight - 4}px`;
}

function moveFrom(node, event) {
  if (event.key === "Enter" || event.key === " ") { event.preventDefault(); node.click(); return; }
  const next = { ArrowRight: node.nextElementSibling, ArrowLeft: node.previousElementSibling }[event.key];
  if (!next) return;
  event.preventDefault();
  node.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function showRound(token, round) {
  const area = $("round-body");
  $("round-title").textContent = `Round ${token.round}`;
  area.replaceChildren();
  const add = (title, lines) => {
    const head = document.createElement("h3"), list = document.createElement("pre");
    head.textContent = title;
    list.textContent = lines.length ? lines.join("\n") : "nothing";
    area.append(head, list);
  };
  const spelt = (tokens) => tokens.map((one) => JSON.stringify(one)).join(" ");
  add(`Written: ${round.accepted} drafted and accepted, ${round.tokens.length - round.accepted} of the target's own`, [spelt(round.tokens)]);
  add("Drafted and rejected", (round.rejected ?? []).map((branch) => `after ${branch.after ? spelt(round.tokens.slice(0, branch.after)) : "the text so far"}:  ${spelt(branch.texts)}`));
  add(`Likeliest tokens where ${JSON.stringify(token.token)} stands`, token.top_logprobs.map((other) => `${percent(other.logprob).padStart(6)}  ${JSON.stringify(other.token)}`));
  $("round").showModal();
}

function factsOf(answer) {
  const count = answer.tokens.length, m = answer.metrics;
  const rate = (count / answer.seconds).toFixed(1);
  const accepted = () => `${Math.round(100 * m.draft_acceptance_rate)}% of ${m.num_draft_tokens} drafted accepted (${m.drafter})`;
  const spec = m ? `, ${m.mean_acceptance_length.toFixed(2)} tokens per round, ${m.num_draft_tokens ? accepted() : "nothing drafted"}` : "";
  return `${count} tokens in ${answer.seconds.toFixed(2)} s (${rate}/s), first after ${Math.round(answer.first ?? 0)} ms${spec}`;
}

const said = (answer) => ({ role: "assistant", content: answer.text, ...(answer.calls.length ? { tool_calls: answer.calls } : {}) });

function addTurn(role, parent = $("log")) {
  const turn = document.createElement("div");
  turn.className = "turn";
  const head = document.createElement("h3"), text = document.createElement("div"), facts = document.createElement("p");
  head.textContent = role; text.className = "text"; facts.className = "facts";
  turn.append(head, text, facts);
  parent.append(turn);
  return { turn, text, facts };
}

// One answer or comparison at a time. A message that came to nothing goes back into its box.
async function run(messages, work) {
  state.control = new AbortController();
  for (const id of ["send", "compare", "reset"]) $(id).disabled = true;
  $("stop").disabled = false;
  try { await work(state.control.signal); }
  catch (error) {
    const note = addTurn("");
    note.text.classList.add("error");
    note.text.textContent = error.name === "AbortError" ? "stopped" : `failed: ${error.message}`;
    showEnd();
    const isKept = state.turns.at(-1)?.messages === messages;
    if (!isKept && !$("prompt").value) $("prompt").value = messages.at(-1).content;
  } finally {
    state.control = null;
    for (const id of ["send", "compare", "reset"]) $(id).disabled = false;
    $("stop").disabled = true;
    $("prompt").focus();
  }
}

function speculative() {
  const name = $("drafter").value;
  return name === "" ? "on" : name === "none" ? "off" : { drafter: name };
}

function takePrompt() {
  const prompt = $("prompt").value.trim();
  if (!prompt || state.control) return null; // while an answer is written, the next message stays in its box
  if (!$("ask").reportValidity()) return null; // the browser says which field is wrong
  $("prompt").value = "";
  addTurn("You").text.textContent = prompt;
  showEnd();
  return [...state.messages, { role: "user", content: prompt }];
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const messages = takePrompt();
  if (!messages) return;
  run(messages, async (signal) => {
    const { turn, text, facts } = addTurn("Model"), answer = emptyAnswer();
    const keep = (more) => {
      state.messages = [...messages, said(answer)];
      state.turns.push({ messages, answer, ...more });
    };
    try { await write(messages, speculative(), text, facts, signal, {}, answer); }
    catch (error) {
      if (error.name === "AbortError" && answer.text) keep({ stopped: true });
      if (!answer.tokens.length) turn.remove();
      throw error;
    }
    keep({});
  });
});

$("compare").addEventListener("click", () => {
  const messages = takePrompt();
  if (!messages) return;
  run(messages, async (signal) => {
    const { turn, text, facts } = addTurn("With and without speculation");
    text.className = "sides";
    const left = addTurn("With drafts", text), right = addTurn("Plain", text);
    const chosen = speculative() === "off" ? "on" : speculative();
    // one seed for both, so that drawn texts are equal too; a salt for each, so that neither finds the other's prompt cached
    const seed = $("seed").value === "" ? Math.floor(Math.random() * 2 ** 31) : Number($("seed").value);
    const extra = () => ({ seed, cache_salt: crypto.getRandomValues(new Uint32Array(2)).join("") });
    const a = await write(messages, chosen, left.text, left.facts, signal, extra());
    const b = await write(messages, "off", right.text, right.facts, signal, extra());
    const equal = a.text === b.text, ratio = (b.seconds / a.seconds).toFixed(2);
    const drawn = Number($("temperature").value) > 0 ? ` (drawn with seed ${seed})` : "";
    facts.textContent = `${equal ? "The texts are equal" : "THE TEXTS DIFFER"}${drawn}. ${a.seconds.toFixed(2)} s with drafts, ${b.seconds.toFixed(2)} s without: ${ratio}x as fast.`;
    turn.classList.add(equal ? "equal" : "error");
    showEnd();
    state.messages = [...messages, said(a)];
    state.turns.push({ messages, answer: a, plain: b, equal });
  });
});

$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); $("ask").requestSubmit(); }
});
$("stop").addEventListener("click", () => state.control?.abort());
$("reset").addEventListener("click", () => { state.messages = []; state.turns = []; $("log").replaceChildren(); $("prompt").focus(); });
$("export").addEventListener("click", () => {
  const data = new Blob([JSON.stringify({ model: state.model, turns: state.turns }, null, 2)], { type: "application/json" });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(data);
  link.download = "forerun-chat.json";
  link.click();
  URL.revokeObjectURL(link.href);
});

async function start() {
  try {
    state.model = (await getJson("v1/models")).data[0].id;
    const { drafters, drafter } = await getJson("stats");
    $("model").textContent = state.model;
    document.title = `Forerun: ${state.model}`;
    $("drafter").replaceChildren(new Option(`server's choice (${drafter})`, ""), ...drafters.map((name) => new Option(name === "none" ? "none (plain decoding)" : name, name)));
  } catch (error) { $("model").textContent = error.message.includes("API key") ? "this server wants an API key: open the page as …/#key=KEY" : `no connection: ${error.message}`; }
  watch(() => getJson("stats"));
  $("prompt").focus();
}
start();
