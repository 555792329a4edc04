// What a choice is called in settings: for this project's launcher (YAML), for Python, and as commands.

const FSDP2 = "experiments/settings/accelerate/fsdp2.yaml"; // for 8 cards
const BETA = "0.05";

/** Settings that both forms have, by TRL's names. */
function shared(choice) {
  return {
    bf16: choice.trained !== "all" || choice.cards > 1,
    beta: choice.reference ? BETA : "0.0",
    prefix_sharing: true,
    num_generations: choice.k,
    completions_per_forward: DATA.per_pass,
    per_device_train_batch_size: choice.k,
    gradient_accumulation_steps: 1,
    steps_per_generation: 1,
    max_completion_length: choice.completion,
    gradient_checkpointing: true,
    optim: "adamw_torch_fused",
  };
}

const ABOUT = {
  prefix_sharing: "each prompt once for all its completions",
  completions_per_forward: "completions that go together; more is faster",
  per_device_train_batch_size: "one prompt with its k completions",
  gradient_accumulation_steps: "more prompts an update; costs no memory",
  max_prompt_tokens: "a dataset with a longer one is refused",
};
const ALL = {
  dtype: "most updates round to nothing at rates such as 1e-6: prefer float32",
  bf16: "no autocast: bfloat16 weights compute in bfloat16",
};
const ALL_ON_CARDS = { dtype: "as loaded and gathered", bf16: "FSDP2 keeps shards of trained weights in float32" };
const aboutOf = ({ trained, cards }) => ({ ...ABOUT, ...(trained === "all" && (cards > 1 ? ALL_ON_CARDS : ALL)) });

function yaml(choice) {
  const lora = { use_peft: true, lora_r: 16, lora_target_modules: "all-linear", lora_dropout: "0.0" };
  const bits = { load_in_4bit: true, bnb_4bit_quant_type: "nf4", use_bnb_nested_quant: true };
  const settings = {
    model_name_or_path: choice.model,
    dtype: "bfloat16",
    ...(choice.trained === "all" ? {} : lora),
    ...(choice.trained === "lora-4-bits" ? bits : {}),
    ...shared(choice),
    max_prompt_tokens: choice.prompt,
  };
  const about = aboutOf(choice);
  const comment = (name) => (name in about ? `  # ${about[name]}` : "");
  return Object.entries(settings).map(([name, value]) => `${name}: ${value}${comment(name)}\n`).join("");
}

function python(choice) {
  const lora = choice.trained !== "all";
  const bits = choice.trained === "lora-4-bits";
  const written = (value) => (value === true ? "True" : value === false ? "False" : value);
  const settings = Object.entries({ ...shared(choice), optim: '"adamw_torch_fused"' });
  const about = aboutOf(choice);
  return [
    ...(lora ? ["from peft import LoraConfig"] : []),
    ...(bits ? ["from transformers import BitsAndBytesConfig"] : []),
    "from trl import RLOOConfig, RLOOTrainer  # or GRPOConfig, GRPOTrainer: this project's wheel, see README.md",
    "",
    "args = RLOOConfig(",
    `    model_init_kwargs={"dtype": "bfloat16"},${about.dtype ? `  # ${about.dtype}` : ""}`,
    ...settings.map(([name, value]) => `    ${name}=${written(value)},${name in about ? `  # ${about[name]}` : ""}`),
    ")",
    ...(lora ? [
      "lora = LoraConfig(",
      '    r=16, lora_alpha=32, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM"',
      ")",
    ] : []),
    ...(bits ? [
      "bits = BitsAndBytesConfig(",
      '    load_in_4bit=True,',
      '    bnb_4bit_quant_type="nf4",',
      "    bnb_4bit_use_double_quant=True,",
      '    bnb_4bit_compute_dtype="bfloat16",',
      ")",
    ] : []),
    "",
    `# my_dataset: prompts of at most ${choice.prompt} tokens, TRL does not cut them. my_reward: see docs/launch.md`,
    "trainer = RLOOTrainer(",
    `    "${choice.model}",`,
    "    reward_funcs=my_reward,",
    "    args=args,",
    "    train_dataset=my_dataset,",
    ...(lora ? ["    peft_config=lora,"] : []),
    ...(bits ? ["    quantization_config=bits,"] : []),
    ")",
    "trainer.train()",
    "",
  ].join("\n");
}

function commands(choice) {
  const own = choice.cards === 8 ? FSDP2 : `.build/fsdp2_${choice.cards}.yaml`;
  const data = `--model_name_or_path hub:${choice.model} --dataset prompts.jsonl --reward my_rewards:score`;
  const plan = ".venv/bin/python -m experiments.plan --profile fit.yaml " +
    `--prompt ${choice.prompt} --device-memory ${choice.card}GiB`;
  if (choice.cards === 1) return `${plan}\n./launch_single_gpu.sh fit.yaml ${data}\n`;
  return [
    ...(choice.cards === 8 ? [] : [`sed 's/num_processes: 8/num_processes: ${choice.cards}/' ${FSDP2} > ${own}`]),
    `${plan} --accelerate ${own}`,
    `.venv/bin/accelerate launch --config_file ${own} -m experiments.launch fit.yaml ${data}`,
    "",
  ].join("\n");
}
