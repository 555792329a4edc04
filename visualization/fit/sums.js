"use strict";
// The numbers: what is alive in each stretch of a phase, as sums of terms in the lengths. What a phase holds on several
// cards is as rloo_memory/plan/scale_up/sharding.py has it, what the allocator needs as accuracy/reserve.py has it.

const DATA = JSON.parse(document.getElementById("data").textContent);
const GIB = 2 ** 30;
const ARMS = ["stock", "stock-accumulate", "shared"];
const SHARDED = ["parameters", "reference", "gradients", "optimizer state"];
const MODELS = new Map(DATA.models.map((model) => [model.name, model]));

/** [size, before]: tokens that the cache of a shared prompt has room for at the end, and before it last grew. */
function rooms(completion) {
  let [size, before] = [DATA.first_room, 0];
  while (size < completion - 2) [size, before] = [size + Math.max(DATA.first_room, Math.floor(size / 8)), size];
  return [size, before];
}

// A term is a formula in a prompt P, a completion C, k and a window W, that Python and JavaScript read alike
const NAMES_IN_TERMS = ["P", "C", "k", "W", "min", "max", "room", "roomBefore"];
const TERMS = DATA.terms.map((term) => new Function(...NAMES_IN_TERMS, `return +(${term})`));
const valuesAt = ({ prompt, completion, k }, window) => {
  const [size, before] = rooms(completion);
  return TERMS.map((term) => term(prompt, completion, k, window, Math.min, Math.max, () => size, () => before));
};

/** {kind: bytes} of one of `choice.cards` devices in a stretch, from the values of all terms. */
function held(stretch, values, choice, phase) {
  const { widened } = DATA.trained[choice.trained];
  const sizes = {};
  for (const [kind, bytes] of Object.entries(stretch)) {
    if (kind === "reference" && !choice.reference) continue;
    let size = 0;
    for (const term in bytes) size += bytes[term] * values[term];
    const shard = SHARDED.includes(kind) || (kind === "activations" && phase === "optimizer");
    sizes[kind] = choice.cards > 1 && shard ? Math.ceil(size * widened[kind] / choice.cards) : size;
  }
  return sizes;
}

const sumOf = (sizes) => Object.values(sizes).reduce((sum, size) => sum + size, 0);

/** {phase: {total, kinds}} in bytes: what the stretch that holds most has, and what FSDP2 gathers. */
function peaks(model, choice, arm) {
  const values = valuesAt(choice, model.window || 0);
  const phases = (choice.cards > 1 ? model.several : model.trained)[choice.trained][arm];
  return Object.fromEntries(Object.entries(phases).map(([phase, stretches]) => {
    const each = stretches.map((stretch) => held(stretch, values, choice, phase));
    const kinds = each.reduce((a, b) => (sumOf(b) > sumOf(a) ? b : a));
    const gathered = choice.cards > 1 ? model.gathered[choice.trained][phase] : {};
    for (const [kind, size] of Object.entries(gathered)) kinds[kind] = (kinds[kind] || 0) + size;
    return [phase, { total: sumOf(kinds), kinds }];
  }));
}

/** {phase, total, kinds} of the highest phase. */
function highest(found) {
  const [phase, peak] = Object.entries(found).reduce((a, b) => (b[1].total > a[1].total ? b : a));
  return { phase, ...peak };
}

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

/** The largest k, prompt or completion that needs no more than the limit, and one step more does; 0 where the least
 *  is not. */
function largest(model, choice, arm, name) {
  const { least, most, step } = span(model, choice, name);
  const fits = (n) => needed(peaks(model, { ...choice, [name]: least + n * step }, arm)) <= limit(choice);
  let [low, high] = [-1, Math.floor((most - least) / step) + 1];
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    if (fits(middle)) low = middle;
    else high = middle;
  }
  return low < 0 ? 0 : least + low * step;
}
