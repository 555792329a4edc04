"use strict";
// The numbers: what is alive in each stretch of a phase, as sums of formulas in the lengths. Must say what
// experiments/plan/fit_terms.py and experiments/plan/sharding.py say.

const DATA = JSON.parse(document.getElementById("data").textContent);
const GIB = 2 ** 30;
const ARMS = ["stock", "stock-accumulate", "shared"];
const PHASES = ["load", "generate", "score", "train", "optimizer"];
const SHARDED = ["parameters", "reference", "gradients", "optimizer state"];
const WEIGHT = 2; // bytes of a weight that FSDP2 gathers: bfloat16
const MODELS = new Map(DATA.models.map((model) => [model.name, model]));

/** Tokens that the cache of a shared prompt has room for at the end, and before it last grew; and those of the prompt
 *  that it keeps. `window`: tokens that a layer sees which slides, else 0. */
function rooms(prompt, completion, window) {
  let [size, before, kept, steps, prefix] = [DATA.first_room, 0, 1, 1, prompt];
  const last = Math.max(completion - 2, 1);
  while (steps < last) {
    if (kept === size) {
      if (window && prompt + steps > window) {
        kept = Math.min(kept, window - 1);
        prefix = Math.min(prompt, Math.max(0, window - steps));
      }
      before = size;
      size = kept + Math.max(DATA.first_room, Math.floor(kept / 8));
    }
    const filled = Math.min(size - kept, last - steps);
    kept += filled;
    steps += filled;
  }
  return [size, before, prefix];
}

// What a formula can call
const FUNCTIONS = {
  min: Math.min,
  room: (...lengths) => rooms(...lengths)[0],
  before: (...lengths) => rooms(...lengths)[1],
  prefix: (...lengths) => rooms(...lengths)[2],
  block,
};

/** Tokens of completions that attend to the prompt together. */
function block(prompt, completion) {
  const tokens = DATA.per_pass * completion;
  return 4 * tokens <= prompt ? tokens : completion;
}

const compiled = new Map();

/** The function of (P, C, k, W) that a formula is. */
function formula(text) {
  if (!compiled.has(text)) {
    const made = new Function(...Object.keys(FUNCTIONS), `"use strict"; return (P, C, k, W) => +(${text});`);
    compiled.set(text, made(...Object.values(FUNCTIONS)));
  }
  return compiled.get(text);
}

const prepared = new Map();

/** What is trained of a model in one arm: its formulas, each once, and its stretches as lists of numbers. Those of a
 *  regime count where its formula `when` is 1. */
function curves(model, trained, arm) {
  const key = `${model.name} ${trained} ${arm}`;
  if (!prepared.has(key)) {
    const names = [];
    const place = (term) => (names.includes(term) ? names.indexOf(term) : names.push(term) - 1);
    const listed = (kinds) => Object.entries(kinds).filter(([kind]) => kind !== "host").map(([kind, terms]) => ({
      kind, sharded: SHARDED.includes(kind), places: Object.keys(terms).map(place), bytes: Object.values(terms),
    }));
    const each = Object.entries(model.trained[trained][arm]);
    const phases = each.map(([phase, regimes]) => ({
      phase, regimes: regimes.map(({ when, stretches }) => ({ when: place(when), stretches: stretches.map(listed) })),
    }));
    prepared.set(key, { formulas: names.map(formula), phases });
  }
  return prepared.get(key);
}

/** Bytes of one of `choice.cards` devices in a stretch, by the values of the formulas. Each kind's go to `see`. */
function held(stretch, values, choice, see = null) {
  let total = 0;
  for (const { kind, sharded, places, bytes } of stretch) {
    if (kind === "reference" && !choice.reference) continue;
    let size = 0;
    for (let i = 0; i < places.length; i++) size += bytes[i] * values[places[i]];
    if (sharded && choice.cards > 1) size = Math.ceil(size / choice.cards);
    if (see) see(kind, size);
    total += size;
  }
  return total;
}

/** What FSDP2 gathers while a phase computes: one layer, the next, and the weights that belong to no layer; in a
 *  backward also the gradients of one layer and of those. */
function gathered(model, choice, phase) {
  if (choice.cards === 1 || phase === "load" || phase === "optimizer") return { parameters: 0, gradients: 0 };
  const { largest_layer: layer, other_weights: rest } = model;
  const backward = phase === "train" && choice.trained === "all";
  return { parameters: (2 * layer + rest) * WEIGHT, gradients: backward ? (layer + rest) * WEIGHT : 0 };
}

/** Of each phase [its name, bytes of the stretch that holds most, that stretch], and the values of the formulas. */
function tops(model, choice, arm) {
  const { formulas, phases } = curves(model, choice.trained, arm);
  const values = formulas.map((f) => f(choice.prompt, choice.completion, choice.k, model.window || 0));
  return [phases.map(({ phase, regimes }) => {
    let [most, top] = [-1, null];
    for (const { when, stretches } of regimes) {
      if (!values[when]) continue;
      for (const stretch of stretches) {
        const size = held(stretch, values, choice);
        if (size > most) [most, top] = [size, stretch];
      }
    }
    const { parameters, gradients } = gathered(model, choice, phase);
    return [phase, most + parameters + gradients, top];
  }), values];
}

/** {phase: {total, kinds}} in bytes. */
function peaks(model, choice, arm) {
  const [found, values] = tops(model, choice, arm);
  return Object.fromEntries(found.map(([phase, total, stretch]) => {
    const { parameters, gradients } = gathered(model, choice, phase);
    const kinds = { ...(parameters && { parameters }), ...(gradients && { gradients }) };
    held(stretch, values, choice, (kind, size) => (kinds[kind] = (kinds[kind] || 0) + size));
    return [phase, { total, kinds }];
  }));
}

/** {phase, total, kinds} of the highest phase. */
function highest(found) {
  const [phase, peak] = Object.entries(found).reduce((a, b) => (b[1].total > a[1].total ? b : a));
  return { phase, ...peak };
}

/** Bytes that a training may take on a card. */
const limit = (choice) => Math.floor(choice.card * GIB) - DATA.reserve_bytes;

/** The least and the most of "k", "prompt" or "completion" on this page, the others as chosen, and its step. */
function span(model, choice, name) {
  if (name === "k") return { least: DATA.least.k, most: DATA.most.k, step: DATA.per_pass };
  const other = choice[name === "prompt" ? "completion" : "prompt"];
  return { least: DATA.least[name], most: Math.min(DATA.most[name], model.positions - other), step: 1 };
}

/** The largest k, prompt or completion whose highest peak is within the limit and one step more is not; 0 where the
 *  least is not. Peaks grow, but for the places where the LM head or the cache begins anew: so it looks from above at
 *  places all over the span, bisects, and looks at what comes next. */
function largest(model, choice, arm, name) {
  const { least, most, step } = span(model, choice, name);
  const [last, may] = [Math.floor((most - least) / step), limit(choice)];
  const fits = (n) =>
    tops(model, { ...choice, [name]: least + n * step }, arm)[0].every(([, total]) => total <= may);
  const places = [0];
  for (let n = 1; n < last; n = n * 2) places.push(n);
  places.push(last);
  const reached = places.findLastIndex(fits);
  if (reached < 0) return 0;
  let [low, high] = [places[reached], places[Math.min(reached + 1, places.length - 1)]];
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    if (fits(middle)) low = middle;
    else high = middle;
  }
  for (let n = low + 1; n <= Math.min(low + 16, last); n++) if (fits(n)) low = n;
  return least + low * step;
}
