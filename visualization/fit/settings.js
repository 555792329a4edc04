// What a choice is called in settings, and the commands that take them.

const FSDP2 = "rloo_memory/settings/accelerate/fsdp2.yaml"; // for 8 cards
const UPDATES = "bfloat16 would round most updates of 1e-6 to nothing";
const SHARDS = "as loaded and gathered; FSDP2 keeps shards of trained weights in float32";
const GROUP = "one prompt with its k completions; fewer would keep whole gradients on each card";

/** [name, value, what it is for]: micro-batches; on several cards whole groups in passes. */
function settings(choice) {
  const several = choice.cards > 1;
  const all = choice.trained === "all";
  const micro = several ? 1 : choice.k / DATA.together;
  const lora = [["use_peft", true], ["lora_r", 16], ["lora_target_modules", "all-linear"], ["lora_dropout", "0.0"]];
  const bits = [["load_in_4bit", true], ["bnb_4bit_quant_type", "nf4"], ["use_bnb_nested_quant", true]];
  return [
    ["model_name_or_path", choice.model],
    ["dtype", all && !several ? "float32" : "bfloat16", all ? (several ? SHARDS : UPDATES) : ""],
    ...(all ? [] : lora),
    ...(choice.trained === "lora-4-bits" ? bits : []),
    ["bf16", true, "computing in bfloat16"],
    ["beta", choice.reference ? "0.05" : "0.0"],
    ["prefix_sharing", true, "each prompt once for all its completions"],
    ["num_generations", choice.k],
    ...(several ? [["tokens_per_forward", DATA.together * (choice.completion + 1), "two completions of full length"]] : []),
    ["per_device_train_batch_size", several ? choice.k : DATA.together, several ? GROUP : "completions at a time"],
    ["gradient_accumulation_steps", micro, several ? "" : "an update has all k completions of a prompt"],
    ["steps_per_generation", micro],
    ["max_completion_length", choice.completion],
    ["gradient_checkpointing", true],
    ["optim", "adamw_torch_fused"],
    ["max_prompt_tokens", choice.prompt, "a dataset with a longer one is refused"],
  ];
}

function yaml(choice) {
  return settings(choice).map(([name, value, about]) => `${name}: ${value}${about ? `  # ${about}` : ""}\n`).join("");
}

function commands(choice) {
  const own = choice.cards === 8 ? FSDP2 : `fsdp2_${choice.cards}.yaml`;
  const data = `--model_name_or_path hub:${choice.model} --dataset_name prompts.jsonl --reward_funcs my_rewards:score`;
  const plan = `rloo-memory plan --profile fit.yaml --prompt ${choice.prompt} --device-memory ${choice.card}GiB`;
  if (choice.cards === 1) return `${plan}\nrloo-memory launch fit.yaml ${data}\n`;
  return [
    ...(choice.cards === 8 ? [] : [`sed 's/num_processes: 8/num_processes: ${choice.cards}/' ${FSDP2} > ${own}`]),
    `${plan} --accelerate ${own}`,
    `accelerate launch --config_file ${own} -m rloo_memory.launch fit.yaml ${data}`,
    "",
  ].join("\n");
}
