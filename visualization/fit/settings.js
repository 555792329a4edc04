// What a choice is called in settings: for this project's launcher (YAML), for Python, and as commands.

const FSDP2 = "rloo_memory/settings/accelerate/fsdp2.yaml"; // for 8 cards
const BETA = "0.05";

/** Settings that both forms have, by TRL's names: micro-batches; on several cards whole groups in passes. */
function shared(choice) {
  const [together, micro] = choice.cards > 1 ? [choice.k, 1] : [DATA.together, choice.k / DATA.together];
  return {
    bf16: true,
    beta: choice.reference ? BETA : "0.0",
    prefix_sharing: true,
    num_generations: choice.k,
    ...(choice.cards > 1 ? { tokens_per_forward: DATA.together * (choice.completion + 1) } : {}),
    per_device_train_batch_size: together,
    gradient_accumulation_steps: micro,
    steps_per_generation: micro,
    max_completion_length: choice.completion,
    gradient_checkpointing: true,
    optim: "adamw_torch_fused",
  };
}

const ABOUT = {
  bf16: "computing in bfloat16",
  prefix_sharing: "each prompt once for all its completions",
  max_prompt_tokens: "a dataset with a longer one is refused",
};
const ON_ONE_CARD = {
  per_device_train_batch_size: "completions that go through the model together",
  gradient_accumulation_steps: "an update has all k completions of a prompt",
};
const ON_CARDS = {
  tokens_per_forward: `${DATA.together} completions of full length go through the model together`,
  per_device_train_batch_size: "one prompt with its k completions; fewer would keep whole gradients on each card",
};
const ALL = { dtype: "bfloat16 would round most updates of 1e-6 to nothing" };
const ALL_ON_CARDS = { dtype: "as loaded and gathered; FSDP2 keeps shards of trained weights in float32" };

/** The dtype in which weights are loaded. */
const dtypeOf = ({ trained, cards }) => (trained === "all" && cards === 1 ? "float32" : "bfloat16");

/** Of a choice, the comment behind a setting. */
function commentsOf({ trained, cards }) {
  const [usual, all] = cards > 1 ? [ON_CARDS, ALL_ON_CARDS] : [ON_ONE_CARD, ALL];
  const about = { ...ABOUT, ...usual, ...(trained === "all" && all) };
  return (name) => (name in about ? `  # ${about[name]}` : "");
}

function yaml(choice) {
  const lora = { use_peft: true, lora_r: 16, lora_target_modules: "all-linear", lora_dropout: "0.0" };
  const bits = { load_in_4bit: true, bnb_4bit_quant_type: "nf4", use_bnb_nested_quant: true };
  const settings = {
    model_name_or_path: choice.model,
    dtype: dtypeOf(choice),
    ...(choice.trained === "all" ? {} : lora),
    ...(choice.trained === "lora-4-bits" ? bits : {}),
    ...shared(choice),
    max_prompt_tokens: choice.prompt,
  };
  const comment = commentsOf(choice);
  return Object.entries(settings).map(([name, value]) => `${name}: ${value}${comment(name)}\n`).join("");
}

function python(choice) {
  const lora = choice.trained !== "all";
  const bits = choice.trained === "lora-4-bits";
  const written = (value) => (value === true ? "True" : value === false ? "False" : value);
  const settings = Object.entries({ ...shared(choice), optim: '"adamw_torch_fused"' });
  const comment = commentsOf(choice);
  return [
    ...(lora ? ["from peft import LoraConfig"] : []),
    ...(bits ? ["from transformers import BitsAndBytesConfig"] : []),
    "from trl import RLOOConfig, RLOOTrainer  # or GRPOConfig, GRPOTrainer: this project's wheel, see README.md",
    "",
    "args = RLOOConfig(",
    `    model_init_kwargs={"dtype": "${dtypeOf(choice)}"},${comment("dtype")}`,
    ...settings.map(([name, value]) => `    ${name}=${written(value)},${comment(name)}`),
    ")",
    ...(lora ? [
      "lora = LoraConfig(",
      '    r=16, lora_alpha=32, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM"',
      ")",
    ] : []),
    ...(bits ? [
      "bits = BitsAndBytesConfig(",
      '    load_in_4bit=True,\n    bnb_4bit_quant_type="nf4",',
      '    bnb_4bit_use_double_quant=True,\n    bnb_4bit_compute_dtype="bfloat16",',
      ")",
    ] : []),
    "",
    `# my_dataset: prompts of at most ${choice.prompt} tokens, TRL does not cut them. my_reward: see docs/launch.md`,
    `trainer = RLOOTrainer(\n    "${choice.model}",`,
    "    reward_funcs=my_reward,\n    args=args,\n    train_dataset=my_dataset,",
    ...(lora ? ["    peft_config=lora,"] : []),
    ...(bits ? ["    quantization_config=bits,"] : []),
    ")",
    "trainer.train()",
    "",
  ].join("\n");
}

function commands(choice) {
  const own = choice.cards === 8 ? FSDP2 : `.build/fsdp2_${choice.cards}.yaml`;
  const data = `--model_name_or_path hub:${choice.model} --dataset_name prompts.jsonl --reward_funcs my_rewards:score`;
  const plan = "rloo-memory plan --profile fit.yaml " +
    `--prompt ${choice.prompt} --device-memory ${choice.card}GiB`;
  if (choice.cards === 1) return `${plan}\nrloo-memory launch fit.yaml ${data}\n`;
  return [
    ...(choice.cards === 8 ? [] : [`sed 's/num_processes: 8/num_processes: ${choice.cards}/' ${FSDP2} > ${own}`]),
    `${plan} --accelerate ${own}`,
    `accelerate launch --config_file ${own} -m rloo_memory.launch fit.yaml ${data}`,
    "",
  ].join("\n");
}
