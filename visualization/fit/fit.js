// The page: reads the choice from the form or the address, and shows what sums.js finds.

const WAYS = { "stock": "TRL as it is", "stock-accumulate": "One completion at a time", "shared": "Prefix sharing" };
const NAMES = ["model", "trained", "prompt", "completion", "k", "card", "cards", "reference"]; // in the address
const KINDS = ["parameters", "reference", "gradients", "optimizer state", "KV cache", "activations", "logits", "other"];
const MEASURED = DATA.measured_over_predicted;
const FIRST = {
  model: MODELS.has("Qwen/Qwen3-8B") ? "Qwen/Qwen3-8B" : DATA.models[0].name, trained: "lora", prompt: "3000",
  completion: "512", k: "8", card: "23.5", cards: "1", reference: "1",
};

const by = (id) => document.getElementById(id);
const count = (n) => n.toLocaleString("en-US");
const inGib = (bytes) => (bytes / GIB).toFixed(2);
const gib = (bytes) => `${inGib(bytes)}\u00a0GiB`;
const slug = (kind) => kind.toLowerCase().replaceAll(" ", "-");

/** A new element; the children are elements or text. */
function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// -- what is asked -------------------------------------------------------------------------------------------------

const quoted = (text) => `“${text.length > 40 ? `${text.slice(0, 40)}…` : text}”`;

/** The choice in the form. What the browser itself cannot know to be wrong is set at the control. */
function chosen() {
  const choice = Object.fromEntries(NAMES.map((name) => [name, by(name).value]));
  for (const name of ["prompt", "completion", "k", "card", "cards"]) choice[name] = Number(choice[name]);
  choice.reference = choice.reference === "1";
  const positions = MODELS.get(choice.model)?.positions;
  const tokens = choice.prompt + choice.completion;
  by("prompt").setCustomValidity(tokens > positions ? `with the completion ${count(tokens)} tokens, more than the ` +
    `${count(positions)} positions of ${choice.model}: take less of one` : "");
  const oneCard = Boolean(DATA.trained[choice.trained]?.one_card);
  by("cards").setCustomValidity(oneCard && choice.cards > 1 ? "4-bit weights on several cards have no formula on this " +
    "page: take 1 card, or LoRA on 16 bits" : "");
  for (const option of by("cards").options) option.disabled = oneCard && option.value !== "1";
  return choice;
}

/** What is wrong with the form, a line for each control, in the browser's words. */
function problems() {
  return NAMES.map(by).filter((control) => !control.validity.valid).map((control) =>
    `${control.labels[0].textContent}: ${control.validationMessage}`);
}

// -- what is shown -------------------------------------------------------------------------------------------------

/** All of the page but the form. `wrong`: of the address. */
function show(wrong = []) {
  const choice = chosen();
  const lines = [...wrong, ...problems()];
  by("reference-hint").hidden = choice.trained === "all";
  by("published-hint").hidden = !choice.model.startsWith("openai/gpt-oss");
  by("cards-hint").hidden = !DATA.trained[choice.trained]?.one_card;
  by("problem").textContent = lines.join("\n");
  by("found").hidden = lines.length > 0;
  if (lines.length) {
    for (const id of ["asked", "answer", "older", "bars", "numbers", "yaml", "command"]) by(id).replaceChildren();
    return said("");
  }
  const model = MODELS.get(choice.model);
  const found = Object.fromEntries(ARMS.map((arm) => [arm, peaks(model, choice, arm)]));
  showAnswer(model, choice, found);
  showParts(choice, found);
  showSettings(choice, found.shared);
}

let later;

/** For screen readers, when typing has paused. */
function said(words) {
  clearTimeout(later);
  later = setTimeout(() => (by("said").textContent = words), 500);
}

/** {fits: "yes", "just" or "no", words} of the peaks of all phases: as the planner says it. */
function verdict(found, choice) {
  const { total } = highest(found);
  const spare = limit(choice) - total;
  if (spare < 0) return { fits: "no", words: `does not fit: short by ${gib(Math.max(-spare, GIB / 100))}` };
  const less = needed(found) > limit(choice) ? "the allocator’s part" : total * MEASURED.high > limit(choice) && "the error";
  if (less) return { fits: "just", words: `just fits: ${gib(spare)} to spare, less than ${less}` };
  return { fits: "yes", words: `fits: ${gib(spare)} to spare` };
}

/** As text, with a word where the search ended and not the memory. */
function largestInWords(model, choice, arm, name) {
  const value = largest(model, choice, arm, name);
  const { least, most, step } = span(model, choice, name);
  if (!value) return `less than ${count(least)}`;
  if (value + step <= most) return count(value);
  return most < DATA.most[name] ? `${count(value)}, all positions` : `${count(value)} or more`;
}

function showAnswer(model, choice, found) {
  by("asked").textContent =
    `${choice.model}, ${DATA.trained[choice.trained].called}, prompts of ${count(choice.prompt)} tokens, ` +
    `completions of ${count(choice.completion)}, k = ${choice.k}, ${choice.reference ? "with" : "without"} a reference, ` +
    `on ${choice.cards > 1 ? `each of ${choice.cards} cards` : "a card"} with ${choice.card} GiB.` +
    (model.experts ? ` A mixture of ${model.experts} experts.` : "");
  const sentences = [];
  const rows = ARMS.map((arm) => {
    const peak = highest(found[arm]);
    const { fits, words } = verdict(found[arm], choice);
    sentences.push(`${WAYS[arm]} ${words}.`);
    const range = `${inGib(peak.total * MEASURED.low)} to ${gib(peak.total * MEASURED.high)}`;
    return [
      element("span", {}, WAYS[arm], code(arm)),
      element("span", { class: `verdict ${fits}` }, words),
      element("span", {}, `${gib(peak.total)} in ${peak.phase}`,
        element("span", { class: "quiet line" }, `stands for ${range}`)),
      ...["k", "prompt", "completion"].map((name) => largestInWords(model, choice, arm, name)),
    ];
  });
  const head = ["Way", "Answer", "Highest peak", "Largest k", "Largest prompt", "Largest completion"];
  by("answer").replaceChildren(table("Largest: with all else as chosen.", head, rows));
  const more = (copies) => `${copies} × ${choice.k} × ${count(choice.completion)} × ${count(model.vocabulary)} × 4 bytes ` +
    `= ${gib(copies * choice.k * choice.completion * model.vocabulary * 4)}`;
  by("older").textContent = "“TRL as it is” is TRL 1.15 or newer. TRL 1.0 to 1.13 keeps full logits of all k completions. " +
    `By a formula, not a run, that is up to so much more: ${more(4)} in 1.0 to 1.9, ${more(3)} in 1.10 to 1.13. ` +
    "The planner’s figures: --arms stock-1.9,stock-1.13.";
  said(sentences.join(" "));
}

const code = (text) => element("code", { class: "quiet line" }, text);

/** A table whose rows a narrow screen stacks; the first cell of a row names it. The roles are for browsers that forget
 *  them where the layout is no table's. */
function table(caption, head, rows) {
  const cell = (content, i) => (i === 0 ?
    element("th", { scope: "row", role: "rowheader" }, content) :
    element("td", { role: "cell", "data-head": head[i], ...(content === "0.00" && { class: "nothing" }) }, content));
  const heads = head.map((words) => element("th", { scope: "col", role: "columnheader" }, words));
  return element("table", { role: "table", class: "stacks" }, element("caption", {}, caption),
    element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, ...heads)),
    element("tbody", { role: "rowgroup" }, ...rows.map((row) => element("tr", { role: "row" }, ...row.map(cell)))));
}

const VISIBLE = GIB / 200; // bytes: less is no part of a bar

function showParts(choice, found) {
  const may = limit(choice);
  const most = Math.max(...ARMS.map((arm) => highest(found[arm]).total));
  const scale = Math.min(Math.max(most, may) * 1.05, may * 3); // bytes that a bar's place is wide
  const all = ARMS.flatMap((arm) => Object.values(found[arm]).map(parts));
  const kinds = KINDS.filter((kind) => all.some((sizes) => sizes[kind] > VISIBLE));
  by("parts-about").textContent =
    `The line is what the card has for torch: ${choice.card} GiB less ${gib(DATA.reserve_bytes)}, ${gib(may)}. ` +
    "What the allocator wastes is in no bar." +
    (most > scale ? ` Bars that end in an arrow go on beyond ${gib(scale)}.` : "");
  by("legend").replaceChildren(...kinds.map((kind) =>
    element("li", {}, element("span", { class: `part kind-${slug(kind)}` }), kind)));
  by("bars").replaceChildren(...ARMS.map((arm) => element("div", { class: "way" },
    element("h3", {}, `${WAYS[arm]} `, code(arm)),
    ...Object.entries(found[arm]).map(([phase, peak]) => bar(phase, peak, may, scale)))));
  by("numbers").replaceChildren(...ARMS.map((arm) =>
    table(`${WAYS[arm]}, GiB`, ["phase", ...kinds, "in all"], Object.entries(found[arm]).map(([phase, peak]) =>
      [phase, ...kinds.map((kind) => inGib(parts(peak)[kind])), inGib(peak.total)]))));
}

function bar(phase, peak, may, scale) {
  const each = Object.entries(parts(peak)).filter(([, size]) => size > VISIBLE);
  const over = peak.total > may;
  const drawn = element("div", {
    class: peak.total > scale ? "bar beyond" : "bar",
    role: "img",
    "aria-label": `${phase}: ${each.map(([kind, size]) => `${kind} ${gib(size)}`).join(", ")}`,
  });
  for (const [kind, size] of each)
    drawn.append(element("span", { class: `part kind-${slug(kind)}`, style: `width:${100 * size / scale}%` }));
  drawn.append(element("span", { class: "limit", style: `left:${100 * may / scale}%` }));
  return element("div", { class: "phase" }, element("span", {}, phase),
    element("span", { class: over ? "size failed" : "size" }, gib(peak.total), over ? ", over" : ""), drawn);
}

/** The kinds of a peak, in the order of the legend, adding up to it: what rounding leaves below nothing is taken off
 *  the largest. */
function parts(peak) {
  const sizes = Object.fromEntries(KINDS.map((kind) => [kind, 0]));
  for (const [kind, size] of Object.entries(peak.kinds)) sizes[kind in sizes ? kind : "other"] += size;
  const most = KINDS.reduce((a, b) => (sizes[b] > sizes[a] ? b : a));
  for (const kind of KINDS) if (sizes[kind] < 0) [sizes[most], sizes[kind]] = [sizes[most] + sizes[kind], 0];
  return sizes;
}

function showSettings(choice, found) {
  const { fits, words } = verdict(found, choice);
  by("settings-about").textContent = `These settings are for prefix sharing, which ${words}. ` +
    (fits === "no" ? "They are what the numbers above are of, to be changed. " : "") +
    "What they do not name, such as the learning rate, is as TRL has it.";
  by("yaml").textContent = yaml(choice);
  by("command").textContent = commands(choice);
}

// -- what happens --------------------------------------------------------------------------------------------------

function nameCard() {
  const known = [...by("named").options].some(({ value }) => value === by("card").value);
  by("named").value = known ? by("card").value : "";
}

const escaped = (text) => encodeURIComponent(text).replaceAll("%2F", "/");
const address = () => `#${NAMES.map((name) => `${name}=${escaped(by(name).value)}`).join("&")}`;

function changed({ target }) {
  if (target === by("named")) {
    if (!target.value) return by("card").focus();
    by("card").value = target.value;
  }
  nameCard();
  show();
  history.replaceState(null, "", address());
}

/** From the address. What it leaves out is as at first; what a control cannot hold leaves it empty, which is told. */
function read() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const name of NAMES) {
    const text = given.get(name) ?? FIRST[name];
    by(name).value = by(name).type !== "number" || /^-?\d{1,15}(\.\d{1,9})?$/.test(text) ? text : "";
  }
  nameCard();
  show([...given.keys()].filter((name) => !NAMES.includes(name)).map((name) =>
    `The address has ${quoted(name)}, which is no name of this page (${NAMES.join(", ")}). Take it out.`));
}

async function copy(button) {
  const name = button.dataset.copies;
  const text = name === "address" ? location.href.split("#")[0] + address() : by(name).textContent;
  const done = await navigator.clipboard?.writeText(text).then(() => true, () => false); // none without encryption
  const what = { address: "link", yaml: "YAML", command: "commands" }[name];
  by("copied").textContent = done ? `Copied: the ${what}.` :
    "The browser does not let this page copy: select the text and copy it by hand.";
}

by("choice").addEventListener("input", changed);
by("choice").addEventListener("submit", (event) => event.preventDefault());
for (const button of document.querySelectorAll("button[data-copies]"))
  button.addEventListener("click", () => copy(button));
addEventListener("hashchange", read);
read();
