"use strict";
// The numbers: what is alive in each stretch of a phase, as sums of formulas in the lengths. Must say what
// experiments/fitting/fit_terms.py, rloo_memory/plan/scale_up/sharding.py and rloo_memory/plan/accuracy/reserve.py say.

const DATA = JSON.parse(document.getElementById("data").textContent);
const GIB = 2 ** 30;
const ARMS = ["stock", "stock-accumulate", "shared"];
const PHASES = ["load", "generate", "score", "train", "optimizer"];
const SHARDED = ["parameters", "reference", "gradients", "optimizer state"];
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
};

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

/** What is trained of a model in one arm, on one card or on several: its formulas, each once, and its stretches as lists
 *  of numbers. Those of a regime count where its formula `when` is 1. */
function curves(model, trained, arm, cards) {
  const several = cards > 1 && arm in (model.several[trained] || {});
  const key = `${model.name} ${trained} ${arm} ${several}`;
  if (!prepared.has(key)) {
    const names = [];
    const place = (term) => (names.includes(term) ? names.indexOf(term) : names.push(term) - 1);
    const { widened } = DATA.trained[trained];
    const sharded = (kind, phase) => SHARDED.includes(kind) || (kind === "activations" && phase === "optimizer");
    const listed = (kinds, phase) => Object.entries(kinds).filter(([kind]) => kind !== "host").map(([kind, terms]) => ({
      kind, wider: sharded(kind, phase) ? widened[kind] : 0, places: Object.keys(terms).map(place),
      bytes: Object.values(terms),
    }));
    const each = Object.entries((several ? model.several : model.trained)[trained][arm]);
    const phases = each.map(([phase, regimes]) => ({
      phase, regimes: regimes.map(({ when, stretches }) => ({
        when: place(when), stretches: stretches.map((kinds) => listed(kinds, phase)),
      })),
    }));
    prepared.set(key, { formulas: names.map(formula), phases });
  }
  return prepared.get(key);
}

/** Bytes of one of `choice.cards` devices in a stretch, by the values of the formulas. Each kind's go to `see`. */
function held(stretch, values, choice, see = null) {
  let total = 0;
  for (const { kind, wider, places, bytes } of stretch) {
    if (kind === "reference" && !choice.reference) continue;
    let size = 0;
    for (let i = 0; i < places.length; i++) size += bytes[i] * values[places[i]];
    if (wider && choice.cards > 1) size = Math.ceil(size * wider / choice.cards);
    if (see) see(kind, size);
    total += size;
  }
  return total;
}

/** {kind: bytes} that FSDP2 gathers while a phase computes. */
const gathered = (model, choice, phase) => (choice.cards === 1 ? {} : model.gathered[choice.trained][phase]);

/** {phase: {total, kinds}} in bytes: what the stretch that holds most has. */
function peaks(model, choice, arm) {
  const { formulas, phases } = curves(model, choice.trained, arm, choice.cards);
  const values = formulas.map((f) => f(choice.prompt, choice.completion, choice.k, model.window || 0));
  return Object.fromEntries(phases.map(({ phase, regimes }) => {
    let [most, top] = [-1, null];
    for (const { when, stretches } of regimes) {
      if (!values[when]) continue;
      for (const stretch of stretches) {
        const size = held(stretch, values, choice);
        if (size > most) [most, top] = [size, stretch];
      }
    }
    const kinds = { ...gathered(model, choice, phase) };
    const whole = Object.values(kinds).reduce((sum, size) => sum + size, 0);
    held(top, values, choice, (kind, size) => (kinds[kind] = (kinds[kind] || 0) + size));
    return [phase, { total: most + whole, kinds }];
  }));
}

/** {phase, total, kinds} of the highest phase. */
function highest(found) {
  const [phase, peak] = Object.entries(found).reduce((a, b) => (b[1].total > a[1].total ? b : a));
  return { phase, ...peak };
}

/** Bytes of full logits, which TRL 1.0 to 1.13 keeps `copies` of in float32, of all k completions. By this formula. */
const fullLogits = (model, choice, copies) => copies * choice.k * choice.completion * model.vocabulary * 4;

/** Bytes that a card has for torch. */
const limit = (choice) => Math.floor(choice.card * GIB) - DATA.reserve_bytes;

/** Bytes that torch is expected to reserve for the highest phase: its allocator wastes some of what comes and goes. */
function needed(found) {
  return Math.max(...Object.values(found).map(({ total, kinds }) => {
    const stays = DATA.stays.reduce((sum, kind) => sum + (kinds[kind] || 0), 0);
    return total + Math.round(DATA.fragments * Math.max(0, total - stays));
  }));
}

/** The least and the most of "k", "prompt" or "completion" on this page, the others as chosen, and its step. */
function span(model, choice, name) {
  if (name === "k") return { least: DATA.least.k, most: DATA.most.k, step: DATA.together };
  const other = choice[name === "prompt" ? "completion" : "prompt"];
  return { least: DATA.least[name], most: Math.min(DATA.most[name], model.positions - other), step: 1 };
}

/** The largest k, prompt or completion that needs no more than the limit, and one step more does; 0 where the
 *  least is not. Peaks grow, but for the places where the LM head or the cache begins anew: so it looks from above at
 *  places all over the span, bisects, and looks at what comes next. */
function largest(model, choice, arm, name) {
  const { least, most, step } = span(model, choice, name);
  const [last, may] = [Math.floor((most - least) / step), limit(choice)];
  const fits = (n) => needed(peaks(model, { ...choice, [name]: least + n * step }, arm)) <= may;
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
