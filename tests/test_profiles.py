"""What profiles and accelerate's files may say, and what is said of one that may not; every profile trains."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from small_profile import small_profile

from rloo_memory.errors import ConfigError
from rloo_memory.launch import command_line
from rloo_memory.settings import profiles
from rloo_memory.settings.arguments import LaunchArguments

ROOT = Path(__file__).resolve().parent.parent


def refusal(function, *arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


PROFILES = {
    b"prefix_sharin: true\nbeta: much\n": ["'prefix_sharin'; did you mean prefix_sharing?", "beta: invalid float"],
    b"beta: 0.0\nrun_name: caf\xe9\n": ["cannot read", "0xe9", "UTF-8"],
    b"learning_rate:\n": ["learning_rate has no value"],
    b"num_generations: 8.0\n": ["num_generations: invalid int value: '8.0'"],
    b"save_strategy: no\n": ["save_strategy: invalid choice: 'False'"],
    b"max_completion_length: -5\nnum_generations: 1\ntemperature: 0\n": [
        "max_completion_length is -5", "num_generations is 1: it must be at least 2", "temperature is 0",
    ],
    b"".join(b"setting%d: 1\n" % i for i in range(20)): ["and 12 more"],
}  # fmt: skip


@pytest.mark.torch
def test_mistakes_in_a_profile_are_named(tmp_path):
    for number, (text, parts) in enumerate(PROFILES.items()):
        path = tmp_path / f"{number}.yaml"
        path.write_bytes(text)
        line = refusal(profiles.load_profile, str(path))
        assert str(path) in line and all(part in line for part in parts), (line, parts)
    assert "gone.yaml' is not here" in refusal(profiles.load_profile, str(tmp_path / "gone.yaml"))


@pytest.mark.torch
def test_what_yaml_reads_as_text_is_the_number_that_it_says(tmp_path):
    path = tmp_path / "profile.yaml"
    path.write_text("learning_rate: 1e-6\nper_device_train_batch_size: &k 8\nnum_generations: *k\nrun_name: 5\n")
    expected = {"learning_rate": 1e-6, "per_device_train_batch_size": 8, "num_generations": 8, "run_name": "5"}
    assert profiles.load_profile(str(path)) == expected


def test_mistakes_in_an_accelerate_file_are_named(tmp_path):
    path = tmp_path / "devices.yaml"
    for text, said in (
        ("distributed_type: MULTI_GPU\nnum_processes: 0\n", "num_processes is 0"),
        ("distributed_type: FSDP\nfsdp_config: [1]\n", "fsdp_config is [1]"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 1}\n", "fsdp_version: 2"),
    ):
        path.write_text(text)
        line = refusal(profiles.devices_from, path)
        assert str(path) in line and said in line, line
    path.write_text("distributed_type: NO\n")  # which YAML reads as false
    assert profiles.devices_from(path)["num_devices"] == 1
    for file in (profiles.FOLDER.parent / "accelerate").glob("*.yaml"):
        if file.name.startswith("zero3"):
            assert "no formula for distributed_type 'DEEPSPEED'" in refusal(profiles.devices_from, file)
            continue
        assert profiles.devices_from(file)["fully_sharded"] == file.name.startswith("fsdp2")


@pytest.mark.torch
def test_every_loss_type_is_one_that_the_trainer_knows(shared_fork):
    from trl.trainer import grpo_trainer

    from rloo_memory.settings.trl_parser import CHOICES

    source = Path(grpo_trainer.__file__).read_text()
    known = set(re.findall(r'"(\w+)"', " ".join(re.findall(r"self\.loss_type (?:==|in) (.*?):", source))))
    assert known == set(CHOICES["loss_type"])


WORDS = """--use_cpu true --activation_offloading false --max-steps=3 --beta 1e-2 --no_gradient_checkpointing
--log_completions --top_k 0 --lora_target_modules q_proj v_proj --reward_weights 1 0.5 --report_to none
--save_strategy no --reward_funcs a.b c.d --dataset_name rows --dataset_train_split test --model_name_or_path .
--generation_kwargs {"do_sample":true}""".split()


@pytest.mark.torch
def test_trls_own_script_makes_the_same_of_every_profile_and_of_a_command_line(monkeypatch, shared_fork):
    from trl.scripts.rloo import RLOOScriptArguments, make_parser

    monkeypatch.delenv("MODEL_PATH", raising=False)
    names = {field.name for field in dataclasses.fields(LaunchArguments)}
    of_trl = names & {field.name for field in dataclasses.fields(RLOOScriptArguments)}
    for name in profiles.names():
        for words in (["--use_cpu", "true", "--activation_offloading", "false"], WORDS):
            script, config, model, _ = make_parser().parse_args_and_config(
                ["--config", str(profiles.profile_path(name)), *words]
            )
            for before in ([name], ["--config", str(profiles.profile_path(name))]):
                launch, *ours = command_line.parse([*before, *words])
                assert [ours[0].to_dict(), ours[1]] == [config.to_dict(), model], name
            if words is WORDS:
                assert {x: getattr(launch, x) for x in of_trl} == {x: getattr(script, x) for x in of_trl}


@pytest.mark.slow
@pytest.mark.torch
def test_every_profile_trains_a_tiny_model_on_a_cpu(policy, tmp_path):
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "tests/probes/profiles.py", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MODEL_PATH": str(policy)},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    trained = json.loads(result.stdout.splitlines()[-1])
    assert {name: run["code"] for name, run in trained.items()} == dict.fromkeys(profiles.names(), 0)
    gradients = re.findall(r"'grad_norm': '([^']+)'", result.stdout)
    assert len(gradients) == len(trained) and all(float(gradient) > 0 for gradient in gradients), gradients
    for name, run in trained.items():
        settings = profiles.load_profile(name)
        assert run["bits"] == (4 if settings.get("load_in_4bit") else 16), name
        assert run["arguments"]["optim"] == settings["optim"], name
        assert (run["trained"] < 1) == settings.get("use_peft", False), name


FILE = small_profile(
    4, 8, dataset_name="rows", reward_funcs=["some_rewards.by_place", "some_rewards.by_length"], beta=0.05,
    reward_weights=[1.0, 0.5], prefix_sharing=True, per_device_train_batch_size=2, gradient_accumulation_steps=2,
    max_steps=2, learning_rate=1e-2, save_strategy="steps", use_cpu=True,
)  # fmt: skip
FUNCTIONS = """
def by_place(completions, answer, **kwargs): return [float(place) for place in range(len(completions))]
def by_length(completions, **kwargs): return [float(len(text)) for text in completions]
"""


@pytest.mark.slow
@pytest.mark.torch
def test_a_file_trains_the_same_model_with_trls_own_command(policy, tmp_path):
    (tmp_path / "file.yaml").write_text(f"model_name_or_path: {policy}\n{FILE}")
    (tmp_path / "some_rewards.py").write_text(FUNCTIONS)
    (tmp_path / "rows").mkdir()
    rows = [json.dumps({"prompt": f"Say the word {number}.", "answer": "a"}) + "\n" for number in range(8)]
    (tmp_path / "rows" / "train.jsonl").write_text("".join(rows))
    commands = {"ours": "rloo-memory launch file.yaml --predict_memory false", "theirs": "trl rloo --config file.yaml"}
    environment = {name: value for name, value in os.environ.items() if name != "MODEL_PATH"}
    for folder, command in commands.items():
        program, *words = command.split()
        words = [Path(sys.executable).parent / program, *words, "--output_dir", folder]
        result = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr[-3000:]
    ours, theirs, before = (
        Path(tmp_path, folder, "model.safetensors").read_bytes() for folder in ("ours", "theirs", policy)
    )
    assert ours == theirs != before
