// The page: reads the choice from the form or the address, and shows what sums.js finds.

const WAYS = { "stock": "TRL as it is", "stock-accumulate": "One completion at a time", "shared": "Prefix sharing" };
// [GiB, who has it]: what PyTorch sees of a card, or "nominal", as it is sold, where nobody has said; it has a little less
const CARDS = DATA.cards.map(({ names, sold, seen }) => [seen ?? sold, `${names} (${seen ? `${sold} GB` : "nominal"})`]);
const CARD = { least: 8, most: 192 };
const NUMBERS = { prompt: "Prompt", completion: "Completion", k: "k", card: "Memory of a card" };
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

let asked = { ...FIRST }; // as the form or the address has it: text, maybe wrong

/** What the address asks for, and what is wrong with it in words. What it leaves out is as at first. */
function fromAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const wrong = [...new Set(given.keys())].flatMap((name) => {
    if (!NAMES.includes(name))
      return [`The address has ${quoted(name)}, which is no name of this page (${NAMES.join(", ")}). Take it out.`];
    return given.getAll(name).length > 1 ? [`The address has ${name} more than once: leave one.`] : [];
  });
  return [{ ...FIRST, ...Object.fromEntries([...given].filter(([name]) => NAMES.includes(name))) }, wrong];
}

const quoted = (text) => `“${text.length > 40 ? `${text.slice(0, 40)}…` : text}”`;

const LISTED = {
  model: [...MODELS.keys()], trained: Object.keys(DATA.trained), cards: ["1", "2", "4", "8"], reference: ["0", "1"],
};

/** [the choice, null where something is wrong; what is wrong, in words by name]. */
function checked() {
  const wrong = {};
  for (const [name, values] of Object.entries(LISTED)) {
    const which = name === "model" ? `of the ${values.length} in the list` : `of ${values.join(", ")}`;
    if (!values.includes(asked[name]))
      wrong[name] = `${name} is ${quoted(asked[name])}, which is not on this page: choose one ${which}.`;
  }
  for (const name of Object.keys(NUMBERS)) {
    const words = wrongNumber(name, asked[name].trim());
    if (words) wrong[name] = `${NUMBERS[name]} is ${words}.`;
  }
  if (Object.keys(wrong).length) return [null, wrong];
  const { model, trained } = asked;
  const choice = { model, trained, cards: Number(asked.cards), reference: asked.reference === "1" };
  for (const name of Object.keys(NUMBERS)) choice[name] = Number(asked[name]);
  const { positions } = MODELS.get(choice.model);
  const tokens = choice.prompt + choice.completion;
  if (tokens > positions)
    wrong.prompt = `A prompt of ${count(choice.prompt)} and a completion of ${count(choice.completion)} are ` +
      `${count(tokens)} tokens, more than the ${count(positions)} positions of ${model}: take less of one.`;
  if (choice.cards > 1 && DATA.trained[trained].one_card)
    wrong.cards = `${choice.cards} cards with ${DATA.trained[trained].called}: this page has no formula for them. ` +
      "Take 1 card, or LoRA on 16 bits.";
  return Object.keys(wrong).length ? [null, wrong] : [choice, wrong];
}

/** What is wrong with the text of a number, its limits and the remedy; "" for one that is right. */
function wrongNumber(name, text) {
  const ofCard = name === "card";
  const { least, most } = ofCard ? CARD : { least: DATA.least[name], most: DATA.most[name] };
  const remedy = `write a ${ofCard ? "" : "whole "}number from ${count(least)} to ${count(most)}`;
  const value = Number(text);
  if (!text) return `empty or no number: ${remedy}`;
  if (!(ofCard ? /^\d{1,9}(\.\d{1,9})?$/ : /^\d{1,15}$/).test(text)) return `${quoted(text)}: ${remedy}`;
  if (value < least) return `${count(value)}, less than this page’s ${count(least)}: ${remedy}`;
  if (value > most) return `${count(value)}, more than this page’s ${count(most)}: ${remedy}`;
  const odd = name === "k" && value % DATA.together;
  return odd ? `${value}, which is odd: completions go two at a time here, so write ${value - 1} or ${value + 1}` : "";
}

// -- what is shown -------------------------------------------------------------------------------------------------

/** All of the page but the form, from `asked`. `wrong`: of the address. */
function show(wrong = []) {
  const [choice, problems] = checked();
  const lines = [...wrong, ...Object.values(problems)];
  for (const name of NAMES) {
    const control = by(name);
    if (name in problems) control.setAttribute("aria-invalid", "true");
    else control.removeAttribute("aria-invalid");
  }
  const oneCard = Boolean(DATA.trained[asked.trained]?.one_card);
  by("reference-hint").hidden = asked.trained === "all";
  by("published-hint").hidden = !asked.model.startsWith("openai/gpt-oss");
  by("cards-hint").hidden = !oneCard;
  for (const option of by("cards").options) option.disabled = oneCard && option.value !== "1";
  by("problem").textContent = lines.join("\n");
  by("found").hidden = lines.length > 0;
  if (lines.length) {
    for (const id of ["asked", "answer", "older", "bars", "numbers", "yaml", "command", "python"]) by(id).replaceChildren();
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
  by("python").textContent = python(choice);
}

function showWhatIsAlwaysSo() {
  const measured = `${MEASURED.peaks} measured peaks on a ${MEASURED.devices} were ${MEASURED.low.toFixed(2)} to ` +
    `${MEASURED.high.toFixed(2)} of the predicted ones`;
  const { peaks, apart } = DATA.published;
  const published = `${peaks} peaks of GPUs that others published, of TRL and torchtune as they are, within ` +
    `${Math.ceil(1000 * apart) / 10} % of the predicted ones.`;
  by("how-sure").append(element("strong", {}, "These are predictions."), ` ${measured}, ${published}`);
  by("errors").textContent = `${measured}. A peak stands for that range. Those ${published} No GPU has run this project: ` +
    "TRL’s fused LM head (1.15 and newer) was compared with two published figures, 2 % above the predicted ones, prefix " +
    "sharing with none.";
  if (DATA.compared) {
    const [apart, below] = ["apart", "below"].map((name) => Math.max(0.01, 100 * DATA.compared[name]).toFixed(2));
    by("compared").textContent = `At ${DATA.compared.choices} random choices this page was at most ${apart} % from the ` +
      `planner, and at most ${below} % below it, in any phase. `;
  }
  by("reserve").textContent = `${gib(DATA.reserve_bytes)} of a card are kept free for CUDA’s context and cuBLAS. The allocator is ` +
    `expected to waste ${DATA.fragments} of what comes and goes: of all but weights, gradients and optimizer state. Both ` +
    "are from published figures of GPUs. “Does not fit”: the peak alone is above the line. “Just fits”: it is below, but " +
    "not with the allocator’s part, or not at the high end of its range. The largest k, prompt and completion have room " +
    "for the allocator’s part.";
  const { least, most } = DATA;
  by("ends").textContent = `k of ${most.k}, prompts of ${count(most.prompt)} tokens, completions of ` +
    `${count(most.completion)}, and the model’s positions`;
  by("versions").textContent = DATA.versions;
  for (const name of ["prompt", "completion", "k"])
    Object.assign(by(name), { min: least[name], max: most[name], step: name === "k" ? DATA.together : 1 });
  Object.assign(by("card"), { min: CARD.least, max: CARD.most, step: "any" });
  for (const owner of new Set([...MODELS.keys()].map((name) => name.split("/")[0]))) {
    const mine = DATA.models.filter(({ name }) => name.startsWith(`${owner}/`));
    by("model").append(element("optgroup", { label: owner }, ...mine.map(({ name, weights }) =>
      element("option", { value: name }, `${name.split("/")[1]} (${(weights / 1e9).toFixed(1)} billion weights)`))));
  }
  by("trained").append(...Object.entries(DATA.trained).map(([name, { called }]) =>
    element("option", { value: name }, called)));
  by("named").append(
    ...CARDS.map(([size, who]) => element("option", { value: size }, `${who}: ${size} GiB`)),
    element("option", { value: "" }, "another: its memory is beside"));
}

// -- what happens --------------------------------------------------------------------------------------------------

/** The form as `asked` is. What a control cannot hold leaves it empty. */
function fill() {
  for (const name of NAMES) {
    const text = by(name).type !== "number" || /^-?\d{1,15}(\.\d{1,9})?$/.test(asked[name]) ? asked[name] : "";
    if (by(name).value !== text) by(name).value = text;
  }
  nameCard();
}

function nameCard() {
  by("named").value = CARDS.some(([size]) => String(size) === asked.card) ? asked.card : "";
}

const escaped = (text) => encodeURIComponent(text).replaceAll("%2F", "/");
const address = () => `#${NAMES.map((name) => `${name}=${escaped(asked[name])}`).join("&")}`;

let told = null; // the address that the page shows
let typingIn = null; // the control whose changes since it was last left are one step back

function changed(control) {
  if (control === by("named")) {
    if (!control.value) return by("card").focus();
    by("card").value = control.value;
  }
  for (const name of NAMES) asked[name] = by(name).value;
  nameCard();
  show();
  told = address();
  if (typingIn === control) history.replaceState(null, "", told);
  else location.hash = told;
  typingIn = control;
}

/** From the address, when the page begins and when the address was changed by anything but the form. */
function read() {
  if (location.hash === told) return;
  let wrong;
  [asked, wrong] = fromAddress();
  [told, typingIn] = [location.hash, null];
  fill();
  show(wrong);
}

async function copy(button) {
  const name = button.dataset.copies;
  const text = name === "address" ? location.href.split("#")[0] + address() : by(name).textContent;
  const done = await navigator.clipboard?.writeText(text).then(() => true, () => false); // none without encryption
  const what = { address: "link", yaml: "YAML", command: "commands", python: "Python" }[name];
  by("copied").textContent = done ? `Copied: the ${what}.` :
    "The browser does not let this page copy: select the text and copy it by hand.";
}

by("choice").addEventListener("input", (event) => changed(event.target));
by("choice").addEventListener("focusout", () => (typingIn = null));
by("choice").addEventListener("submit", (event) => event.preventDefault());
for (const button of document.querySelectorAll("button[data-copies]"))
  button.addEventListener("click", () => copy(button));
addEventListener("hashchange", read);
showWhatIsAlwaysSo();
read();
