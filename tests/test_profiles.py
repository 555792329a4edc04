"""What profiles and accelerate's files may say, and what is said of one that may not; every profile trains."""

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
from rloo_memory.settings import grammar, profiles
from rloo_memory.settings.arguments import LaunchArguments

ROOT = Path(__file__).resolve().parent.parent


def refusal(function, *arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


PROFILES = {
    b"prefix_sharin: true": ["line 1", "prefix_sharin", "did you mean prefix_sharing?"],
    b"beta: 0.0\nload_in_4bit: true\n": ["line 2", "load_in_4bit needs use_peft"],
    b"use_peft: true\nload_in_4bit: true\nload_in_8bit: true\n": ["line 2", "contradicts load_in_8bit (line 3)"],
    b"beta: 0.1\nbeta: 0.2\n": ["line 2", "'beta'", "first on line 1"],
    b"completions_per_forward: 2\n": ["line 1", "unknown setting", "write tokens_per_forward: N * (max_completion"],
    b"vllm_gpu_memory_utilization: 0.3\n": ["line 1", "needs use_vllm"],
    b"- beta\n": ["name: value"],
    # what is no text
    b"beta: 0.0\nseed: 1\0\n": ["line 2", "0x00", "remove it"],
    b"beta: 0.0\nrun_name: caf\xe9\n": ["line 2", "0xe9", "UTF-8"],
    b"beta: 0\n---\nbeta: 1\n": ["line 2", "another document"],
    # values of another type
    b"learning_rate:\n": ["learning_rate is None"],
    b"beta: .nan\n": ["line 1", "beta is nan", "a finite number"],
    b"run_name: 2024-13-45\n": ["line 1", "'run_name'", "month must be"],
    b"num_generations: 8.0\n": ["num_generations is 8.0", "whole number"],
    b"num_generations: 100000000000000000000000\n": ["num_generations is 1000"],
    b"prefix_sharing: 1\n": ["prefix_sharing is 1", "true or false"],
    b"save_strategy: no\n": ["save_strategy is False", "in quotes"],
    b"reward_weights: [1.0, x]\n": ["reward_weights is [1.0, 'x']", "a list"],
    b"model_init_kwargs: 5\n": ["model_init_kwargs is 5", "a mapping"],
    # YAML's own tools
    b"beta: !!python/object/apply:os.system ['true']\n": ["line 1", "'beta'", "os.system"],
    b"? [a]\n: 1\n": ["line 1", "expected a name"],
    b"model_init_kwargs: " + b"[" * 3000 + b"]" * 3000: ["nested too deeply"],
    b"#" * 2**20 + b"\nbeta: 0.0\n": ["1024 KiB"],
    # out of range, and several at once
    b"max_completion_length: -5\nnum_generations: 1\ntemperature: 0\nseed: -1\nlora_r: 0\n": [
        "line 1: max_completion_length is -5", "line 2: num_generations is 1: it must be at least 2",
        "line 3: temperature is 0", "line 4: seed is -1", "line 5: lora_r is 0",
    ],
    b"max_steps: 0\nbata: 1\nload_in_4bit: true\n": ["line 1: max_steps is 0", "line 2: unknown", "line 3"],
    b"".join(b"setting%d: 1\n" % i for i in range(20)): ["line 8", "and 12 more"],
}  # fmt: skip


@pytest.mark.torch
def test_mistakes_in_a_profile_are_named_with_line_and_key(tmp_path):
    for number, (text, parts) in enumerate(PROFILES.items()):
        path = tmp_path / f"{number}.yaml"
        path.write_bytes(text)
        line = refusal(profiles.load_profile, str(path))
        assert line.startswith(str(path)) and all(part in line for part in parts), (line, parts)
    (tmp_path / "folder.yaml").mkdir()
    assert "folder.yaml is not a file" in refusal(profiles.load_profile, str(tmp_path / "folder.yaml"))
    gone = refusal(profiles.load_profile, str(tmp_path / "gone.yaml"))
    assert "gone.yaml' is not here" in gone and str(tmp_path) in gone


@pytest.mark.torch
def test_what_yaml_reads_as_text_is_the_number_that_it_says(tmp_path):
    path = tmp_path / "profile.yaml"
    path.write_text("learning_rate: 1e-6\nper_device_train_batch_size: &k 8\nnum_generations: *k\nrun_name: '5'\n")
    expected = {"learning_rate": 1e-6, "per_device_train_batch_size": 8, "num_generations": 8, "run_name": "5"}
    assert profiles.load_profile(str(path)) == expected
    for name in profiles.names():
        assert profiles.load_profile(name)["learning_rate"] > 0, name


ACCELERATE = {
    b"distributed_type: MULTI_GPU\nnum_processes: 0\n": ["num_processes is 0"],
    b"distributed_type: [1]\n": ["distributed_type [1]"],
    b"distributed_type: FSDP\nfsdp_config: [1]\n": ["fsdp_config is [1]", "mapping"],
    b"distributed_type: FSDP\nfsdp_config: {fsdp_version: [2]}\n": ["fsdp_version: 2"],
    b"distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_offload_params: maybe}\n": ["is 'maybe'", "true or"],
}  # fmt: skip


def test_mistakes_in_an_accelerate_file_are_named(tmp_path):
    path = tmp_path / "devices.yaml"
    for text, parts in ACCELERATE.items():
        path.write_bytes(text)
        line = refusal(profiles.devices_from, path)
        assert str(path) in line and all(part in line for part in parts), (line, parts)
    path.write_text("distributed_type: NO\n")  # which YAML reads as false
    assert profiles.devices_from(path)["num_devices"] == 1
    for file in (profiles.FOLDER.parent / "accelerate").glob("*.yaml"):
        if file.name.startswith("zero3"):
            assert "no formula for distributed_type 'DEEPSPEED'" in refusal(profiles.devices_from, file)
            continue
        assert profiles.devices_from(file)["fully_sharded"] == file.name.startswith("fsdp2")


@pytest.mark.torch
def test_every_loss_type_is_one_that_the_trainer_knows():
    grammar.fields()  # puts the fork on the path
    from trl.trainer import grpo_trainer

    source = Path(grpo_trainer.__file__).read_text()
    known = set(re.findall(r'"(\w+)"', " ".join(re.findall(r"self\.loss_type (?:==|in) (.*?):", source))))
    assert known == set(grammar.CHOICES["loss_type"])


WORDS = """--use_cpu true --activation_offloading false --max-steps=3 --beta 1e-2 --no_gradient_checkpointing
--log_completions --top_k 0 --lora_target_modules q_proj v_proj --reward_weights 1 0.5 --report_to none
--save_strategy no --reward_funcs a.b c.d --dataset_name rows --dataset_train_split test --model_name_or_path .
--generation_kwargs {"do_sample":true}""".split()


@pytest.mark.torch
def test_trls_own_script_makes_the_same_of_every_profile_and_of_a_command_line(monkeypatch):
    grammar.trainer_classes("rloo")  # puts the fork on the path
    from trl.scripts.rloo import RLOOScriptArguments, make_parser

    monkeypatch.delenv("MODEL_PATH", raising=False)
    of_trl = grammar.types_of(RLOOScriptArguments).keys() & grammar.types_of(LaunchArguments).keys()
    assert len(of_trl) == 5
    for name in profiles.names():
        for words in (["--use_cpu", "true", "--activation_offloading", "false"], WORDS):
            given = ["--config", str(profiles.profile_path(name)), *words]
            script, *expected, _ = make_parser().parse_args_and_config(given)
            settings = command_line.read([name, *words])
            launch, problems = command_line.launch_arguments(settings)
            config, model = command_line.parse(settings, launch)
            assert not problems and [config.to_dict(), model] == [expected[0].to_dict(), expected[1]], name
            if words is WORDS:
                assert {x: getattr(launch, x) for x in of_trl} == {x: getattr(script, x) for x in of_trl}


@pytest.mark.torch
def test_the_guide_names_every_setting_that_trls_script_does_not_know():
    known = {name for cls in grammar.trainer_classes("rloo") for name in grammar.types_of(cls)}
    from trl.scripts.rloo import RLOOScriptArguments

    own = grammar.types_of(LaunchArguments).keys() - known - grammar.types_of(RLOOScriptArguments).keys()
    guide = (ROOT / "docs" / "launch.md").read_text()
    (listed,) = re.findall(r"`trl rloo` does not know (.*?):", guide, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", listed)) == own


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
    from safetensors.torch import load_file

    shapes = [tensor.numel() for tensor in load_file(Path(policy) / "model.safetensors").values()]
    trained = json.loads(result.stdout.splitlines()[-1])
    assert sorted(trained) == profiles.names()
    assert {name: run["code"] for name, run in trained.items()} == dict.fromkeys(trained, 0)
    assert result.stdout.count("trained 1 update in ") == result.stdout.count("\npeak    ") == len(trained)
    said = re.findall(r"^model .*, (\w+)( in 4 bits)?: ([\d,]+) weights, (all|LoRA)", result.stdout, re.MULTILINE)
    assert {weights for _, _, weights, _ in said} == {f"{sum(shapes):,}"}  # also where two are packed in a byte
    quantized = [bool(profiles.load_profile(name).get("load_in_4bit")) for name in profiles.names()]
    assert [bool(bits) for _, bits, _, _ in said] == quantized
    gradients = re.findall(r"'grad_norm': '([^']+)'", result.stdout)
    assert len(gradients) == len(trained) and all(float(gradient) > 0 for gradient in gradients), gradients
    for name, run in trained.items():
        settings = profiles.load_profile(name)
        assert run["bits"] == (4 if settings.get("load_in_4bit") else 16), name
        assert run["arguments"]["optim"] == settings["optim"], name
        assert (run["trained"] < 1) == settings.get("use_peft", False), name


def test_every_line_of_a_profile_says_what_it_buys_or_costs():
    for name in profiles.names():
        lines = profiles.profile_path(name).read_text().splitlines()
        bare = [x for x in lines if x and "#" not in x and not x.startswith(("learning_rate", "logging"))]
        assert not bare, (name, bare)


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
        result = subprocess.run(
            [Path(sys.executable).parent / program, *words, "--output_dir", folder],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, result.stderr[-3000:]
        assert "'rewards/by_length/mean'" in result.stdout + result.stderr
    ours, theirs, before = (
        Path(tmp_path, folder, "model.safetensors").read_bytes() for folder in ("ours", "theirs", policy)
    )
    assert ours == theirs != before
