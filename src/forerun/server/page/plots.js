// Live figures of the engine: tokens per second and per round, batch size, acceptance by position.
const $ = (id) => document.getElementById(id);
const LENGTH = 60; // seconds that are shown
const history = [];
let last = null;

function shown(value) {
  return Number.isInteger(value) || value >= 10 ? value.toFixed(0) : value.toFixed(2);
}

function label(svg, x, y, text, anchor) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", "text");
  for (const [name, value] of Object.entries({ x, y, "text-anchor": anchor })) node.setAttribute(name, value);
  node.textContent = text;
  svg.append(node);
}

// A box of the svg's own size in pixels, so that text is not stretched.
function box(svg) {
  const width = svg.clientWidth || 280, height = svg.clientHeight || 72;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  return [width, height];
}

function plotLine(id, name, values) {
  const svg = $(id), [width, height] = box(svg), most = Math.max(1e-9, ...values), now = values.at(-1) ?? 0;
  const at = (v, i) => `${(width * (LENGTH - values.length + i)) / (LENGTH - 1)},${height - 6 - ((height - 24) * v) / most}`;
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  line.setAttribute("class", "line");
  line.setAttribute("points", values.map(at).join(" "));
  svg.append(line);
  label(svg, 4, 12, `most ${shown(most)}`, "start");
  svg.previousElementSibling.textContent = `${name}: ${shown(now)}`;
  svg.setAttribute("aria-label", `${name} over the last minute: now ${shown(now)}, most ${shown(most)}`);
}

function plotBars(id, shares) {
  const svg = $(id), [width, height] = box(svg), wide = Math.min(40, width / Math.max(1, shares.length));
  shares.forEach((share, i) => {
    const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect"), tall = (height - 28) * share;
    const sizes = { class: "bar", x: i * wide + 1, width: Math.max(1, wide - 2), y: height - 14 - tall, height: tall };
    for (const [name, value] of Object.entries(sizes)) bar.setAttribute(name, value);
    svg.append(bar);
    if (i % Math.ceil(22 / wide)) return; // labels of narrow bars would run into each other
    label(svg, Math.min((i + 0.5) * wide, width - 8), height - 3, String(i + 1), "middle");
    if (wide >= 30) label(svg, (i + 0.5) * wide, height - 17 - tall, `${Math.round(100 * share)}%`, "middle");
  });
  const said = shares.map((share, i) => `${i + 1}: ${Math.round(100 * share)}%`).join(", ");
  svg.setAttribute("aria-label", `Share of drafted tokens accepted, by position in the draft: ${said || "none yet"}`);
}

function add(stats) {
  if (last && stats.uptime > last.uptime) {
    // an engine that was started again counts from 0
    const before = stats.tokens < last.tokens ? { tokens: 0, sequence_rounds: 0 } : last;
    const spent = stats.uptime - last.uptime, rounds = stats.sequence_rounds - before.sequence_rounds;
    const written = stats.tokens - before.tokens;
    history.push({ rate: written / spent, round: rounds ? written / rounds : history.at(-1)?.round ?? 0, batch: stats.running });
    if (history.length > LENGTH) history.shift();
  }
  last = stats;
}

function show(stats) {
  plotLine("plot-rate", "Tokens per second", history.map((one) => one.rate));
  plotLine("plot-round", "Tokens per round", history.map((one) => one.round));
  plotLine("plot-batch", "Sequences in the batch", history.map((one) => one.batch));
  plotBars("plot-position", stats.accepted_per_position);
  const forms = Object.entries(stats.forms).map(([form, count]) => `${count} ${form}`).join(", ");
  const rows = { running: stats.running, waiting: stats.waiting, "KV slots": stats.used_slots, drafter: stats.drafter, tokens: stats.tokens, rounds: forms || "0" };
  $("now").replaceChildren(...Object.entries(rows).flatMap(([name, value]) => {
    const dt = document.createElement("dt"), dd = document.createElement("dd");
    dt.textContent = name; dd.textContent = value;
    return [dt, dd];
  }));
}

// Ask for figures every second, for as long as the page is open.
export async function watch(ask) {
  try {
    const stats = await ask();
    add(stats);
    show(stats);
    if ($("model").textContent.startsWith("no connection")) $("model").textContent = document.title.replace("Forerun: ", "");
  } catch (error) { $("model").textContent = `no connection: ${error.message}`; }
  setTimeout(() => watch(ask), 1000);
}
