"""What profiles and accelerate's files may say, and what is said of one that may not; every profile trains."""

import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from small_profile import small_profile
from trl.scripts.rloo import RLOOScriptArguments, make_parser

from rloo_memory.errors import ConfigError
from rloo_memory.launch import __main__ as launch
from rloo_memory.launch import command_line
from rloo_memory.settings import profiles, trl_parser
from rloo_memory.settings.arguments import LaunchArguments
from rloo_memory.settings.trl_parser import Sharing


def refusal(function, *arguments, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        function(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


PROFILES = {
    b"prefix_sharin: true\n": "'prefix_sharin'; did you mean prefix_sharing?",
    b"beta: 0.0\nrun_name: caf\xe9\n": "0xe9",
    b"learning_rate:\n": "learning_rate has no value",
    b"num_generations: 8.0\n": "num_generations: invalid int value: '8.0'",
    b"save_strategy: no\n": "save_strategy is False, which YAML reads for no, off, yes and on: put quotes",
    b"lora_target_modules: [yes]\n": "put quotes around the word",
    b"run_name: off\n": "put quotes around the word",
    b"learning-rate: 1e-5\n": "unknown setting 'learning-rate'; write learning_rate",
    b"beta: 0.1\nseed: 1\nbeta: 0.2\n": "beta is in it 2 times",
    b"max_steps: 1:30\n": "1:30 is 90 in YAML",
    b"run_name: 010\n": "010 is 8 in YAML",
    b"max_steps: [1, 2]\n": "max_steps is [1, 2]: it must be one value",
    b"weight_decay: -.inf\n": "weight_decay is -inf: it must be a finite number",
    b"num_generations: 1\n": "num_generations is 1: it must be at least 2",
}


def test_mistakes_in_a_profile_are_named(tmp_path):
    for number, (text, part) in enumerate(PROFILES.items()):
        path = tmp_path / f"{number}.yaml"
        path.write_bytes(text)
        line = refusal(profiles.load_profile, str(path))
        assert str(path) in line and part in line, (line, part)
    assert "gone.yaml' is not here" in refusal(profiles.load_profile, str(tmp_path / "gone.yaml"))


def test_what_yaml_reads_as_text_is_the_number_that_it_says(tmp_path):
    path = tmp_path / "profile.yaml"
    path.write_text("learning_rate: 1e-6\nper_device_train_batch_size: &k 8\nnum_generations: *k\nrun_name: 5\n")
    expected = {"learning_rate": 1e-6, "per_device_train_batch_size": 8, "num_generations": 8, "run_name": "5"}
    assert profiles.load_profile(str(path)) == expected


def test_no_setting_is_nan_and_infinite_is_what_then_has_no_limit():
    settings = [field for config in trl_parser.TRAINERS.values() for field in dataclasses.fields(config)]
    names = {field.name for field in settings if "float" in str(field.type)}
    assert len(names) > 35 and trl_parser.UNLIMITED < names
    for name in names:
        assert f"{name} is nan: it must be a finite number" in trl_parser.out_of_range(name, [math.nan, 1.0])
        assert ("is inf" in (trl_parser.out_of_range(name, math.inf) or "")) == (name not in trl_parser.UNLIMITED)
    assert trl_parser.typed({"reward_clip_range": [-math.inf, 1.0]}) == {"reward_clip_range": [-math.inf, 1.0]}


FSDP2 = "distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_version: 2}\n"


def test_an_accelerate_file_is_planned_with_its_devices_or_refused_by_name(tmp_path):
    path = tmp_path / "devices.yaml"
    for text, said in (
        ("distributed_type: MULTI_GPU\nnum_processes: 0\n", "num_processes is 0"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 1}\n", "fsdp_version: 2"),
        ("distributed_type: TPU\n", "no formula for distributed_type 'TPU'"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 1}\n", "zero_stage 2 or 3"),
        ("distributed_type: MULTI_GPU\nparallelism_config: {parallelism_config_tp_size: 4}\n", "tp_size: 4"),
        (FSDP2 + "parallelism_config: {parallelism_config_cp_size: 2}\n", "cp_size: 2"),
        (FSDP2 + "parallelism_config: {parallelism_config_dp_shard_size: 2}\n", "dp_shard_size: 2"),
        (FSDP2.replace("_version", "_auto_wrap_policy: NO_WRAP, fsdp_version"), "NO_WRAP"),
        (FSDP2.replace("_version", "_activation_checkpointing: true, fsdp_version"), "set gradient_checkpointing"),
        ("dynamo_config: {dynamo_backend: INDUCTOR}\n", "INDUCTOR"),
        ("parallelism_config: [1]\n", "parallelism_config is [1]: it must be `name: value` lines"),
    ):
        path.write_text(text)
        assert str(path) in (line := refusal(profiles.devices_from, path)) and said in line, line
    path.write_text(f"{FSDP2}parallelism_config: {{parallelism_config_dp_shard_size: 4}}\nmixed_precision: fp8\n")
    assert profiles.devices_from(path)["num_devices"] == 4, "the settings' bf16 goes before the file's fp8"
    assert "fp8" in refusal(profiles.devices_from, path, autocast=False)
    path.write_text("mixed_precision: bf16\nuse_cpu: true\ndynamo_config: {dynamo_backend: NO}\n")
    of_file = {"bf16": True, "device": "cpu"}
    assert of_file.items() <= profiles.devices_from(path, autocast=False).items()
    path.write_text(FSDP2.replace("version: 2", "version: '2', fsdp_offload_params: 'true'"))
    assert profiles.devices_from(path)["offload_parameters"]
    path.write_text("distributed_type: NO\n")  # which YAML reads as false
    assert profiles.devices_from(path)["num_devices"] == 1
    for name in ("ddp", "fsdp2", "fsdp2_offload", "zero3", "zero3_offload"):
        found = profiles.devices_from(profiles.FOLDER.parent / "accelerate" / f"{name}.yaml")
        assert (found["fully_sharded"], found["offload_parameters"]) == ("fsdp2" in name, "offload" in name)
        assert found.get("zero_stage", 0) == (3 if "zero3" in name else 0)


WORDS = """--use_cpu true --max-steps=3 --beta 1e-2 --no_gradient_checkpointing
--log_completions --top_k 0 --lora_target_modules q_proj v_proj --reward_weights 1 0.5 --report_to none
--save_strategy no --reward_funcs a.b c.d --dataset_name rows --dataset_train_split test --model_name_or_path .
--generation_kwargs {"do_sample":true}""".split()


def test_trls_own_script_makes_the_same_of_every_profile_and_of_a_command_line(tmp_path, monkeypatch):
    """But for the three settings that TRL has not."""
    ours = {field.name for field in dataclasses.fields(Sharing)}

    monkeypatch.delenv("MODEL_PATH", raising=False)
    names = {field.name for field in dataclasses.fields(LaunchArguments)}
    of_trl = names & {field.name for field in dataclasses.fields(RLOOScriptArguments)}
    for name in profiles.names():
        path, settings = tmp_path / f"{name}.yaml", profiles.load_profile(name)
        profiles.dump_profile(path, {key: value for key, value in settings.items() if key not in ours}, [])
        for words in (["--use_cpu", "true"], WORDS):
            script, config, model, _ = make_parser().parse_args_and_config(["--config", str(path), *words])
            launched, *of_both = command_line.parse([name, "--activation_offloading", "false", *words])
            values = {key: value for key, value in of_both[0].to_dict().items() if key not in ours}
            assert [values, of_both[1]] == [config.to_dict(), model], name
        assert {name: getattr(launched, name) for name in of_trl} == {name: getattr(script, name) for name in of_trl}


# Only what a CPU does not have (a GPU to offload from) and what would take long is overridden
QUICK = """--max_steps=1 --max_completion_length=6 --prompt_tokens=48 --learning_rate=0.01 --logging_steps=1
--activation_offloading=false --save_strategy=no --report_to=none --disable_tqdm=true --predict_memory=false""".split()


@pytest.mark.slow
@pytest.mark.parametrize("name", profiles.names())
def test_every_profile_trains_a_tiny_model_on_a_cpu(policy, tmp_path, monkeypatch, capsys, name):
    monkeypatch.setenv("MODEL_PATH", policy)
    settings = profiles.load_profile(name)
    steps = max(1, settings["num_generations"] // settings["per_device_train_batch_size"])
    words = [f"--gradient_accumulation_steps={steps}", f"--output_dir={tmp_path}"]
    assert launch.main([name, *QUICK, *words]) == 0
    record, said = json.loads((tmp_path / "memory.json").read_text()), capsys.readouterr().out
    assert float(re.search(r"'grad_norm': '([^']+)'", said)[1]) > 0
    for setting in ("load_in_4bit", "optim", "use_peft"):
        assert record["settings"].get(setting) == settings.get(setting)
    assert (record["trained_parameters"] < record["parameters"]) == settings.get("use_peft", False)


FILE = small_profile(
    4, 8, dataset_name="rows", reward_funcs=["some_rewards.by_place"], beta=0.05, max_steps=2,
    per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2, save_strategy="steps",
    use_cpu=True,
)  # fmt: skip
REWARD = "def by_place(completions, **kwargs): return [float(place) for place in range(len(completions))]"


@pytest.mark.slow
def test_a_file_trains_the_same_model_with_trls_own_command(policy, tmp_path, monkeypatch):
    monkeypatch.delenv("MODEL_PATH", raising=False)
    (tmp_path / "file.yaml").write_text(f"model_name_or_path: {policy}\n{FILE}")
    (tmp_path / "some_rewards.py").write_text(REWARD)
    (tmp_path / "rows").mkdir()
    rows = [json.dumps({"prompt": f"Say the word {number}."}) + "\n" for number in range(8)]
    (tmp_path / "rows" / "train.jsonl").write_text("".join(rows))
    commands = {"ours": "rloo-memory launch file.yaml --predict_memory false", "theirs": "trl rloo --config file.yaml"}
    models = [Path(policy, "model.safetensors").read_bytes()]
    for folder, command in commands.items():
        program, *words = [*command.split(), "--output_dir", folder]
        subprocess.run([Path(sys.executable).parent / program, *words], cwd=tmp_path, check=True, timeout=300)
        models.append((tmp_path / folder / "model.safetensors").read_bytes())
    assert models[1] == models[2] != models[0]
