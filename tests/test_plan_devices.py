"""What several devices, and the wrappers that spread a training over them, leave on each."""

import json
from dataclasses import replace

import pytest

from rloo_memory.errors import ConfigError
from rloo_memory.models import meta_model, named_config
from rloo_memory.plan.accuracy.cards import cards
from rloo_memory.plan.scale_up.extrapolate import phase_peaks
from rloo_memory.plan.setups import Setup, check
from rloo_memory.settings import profiles

OPTIONS = ("--model", "qwen3-8-layers", "--prompt", 64, "--completion", 16, "--k", 4, "--beta", 0, "--arms", "stock")
FOLDER = profiles.FOLDER.parent / "accelerate"


@pytest.fixture
def spread(planned, tmp_path):
    """The phases of a plan with one of the accelerate files, a word of it changed; and what is said."""

    def run(name, old, new, *options):
        path, result = tmp_path / "devices.yaml", tmp_path / "plan.json"
        path.write_text((FOLDER / f"{name}.yaml").read_text().replace(old, new))
        done = planned(*OPTIONS, *options, "--accelerate", path, "--json", result)
        assert done.returncode == 0, done.stderr
        (plan,) = json.loads(result.read_text())["predictions"]
        return {phase["phase"]: phase["kinds"] | {"host": phase["host"]} for phase in plan["phases"]}, done.stdout

    return run


def weights() -> int:
    return sum(parameter.numel() for parameter in meta_model(named_config("qwen3-8-layers")).parameters())


def test_fsdp2_on_one_device_is_planned_as_on_several(spread):
    eight = "num_processes: 8"
    one, two = (spread("fsdp2", eight, f"num_processes: {number}")[0] for number in (1, 2))
    assert one["load"]["parameters"] == pytest.approx(4 * weights(), rel=0.01), "float32 shards"
    for kind, size in one["optimizer"].items():
        assert two["optimizer"].get(kind, 0) == pytest.approx(size / 2, rel=0.01), kind
    on_host, said = spread("fsdp2_offload", eight, "num_processes: 1")
    assert "float32 shards" in said and "parameters" not in on_host["load"]
    assert on_host["optimizer"]["host"] == pytest.approx(16 * weights(), rel=0.01)
    eight_bits, _ = spread("fsdp2", eight, "num_processes: 1", "--optim", "adamw_bnb_8bit")
    assert eight_bits["optimizer"]["optimizer state"] < 6 * weights(), "its state is as large beside any dtype"


@pytest.mark.parametrize("name, stage, of_all, of_each", [
    ("zero3", 2, 2, 18), ("zero3", 3, 0, 20), ("zero3_offload", 2, 2, 0), ("zero3_offload", 3, 0, 0),
])  # fmt: skip
def test_zero_takes_what_deepspeeds_own_estimators_say(spread, name, stage, of_all, of_each):
    """`estimate_zero2_model_states_mem_needs` and `estimate_zero3_...`: bytes a weight, of all and of a share. That of
    ZeRO-3 leaves out the share of 16-bit weights. The bucket of gradients and gathered weights come on top."""
    kinds, said = spread(name, "zero_stage: 3", f"zero_stage: {stage}")
    states = sum(kinds["optimizer"].get(kind, 0) for kind in ("parameters", "gradients", "optimizer state"))
    assert states == pytest.approx((of_all + of_each / 8) * weights(), rel=0.01)
    assert sum(kinds["train"].values()) > states and kinds["train"]["other"] == 2 * 500_000_000
    assert (kinds["optimizer"]["host"] > 0) == ("offload" in name)
    assert f"ZeRO-{stage}: by formulas" in said and "float32 shards" in said
    whole, gathered = 2 * weights(), kinds["generate"].get("parameters", 0)
    assert gathered == pytest.approx(whole if stage == 2 or "offload" in name else whole * 9 / 8, rel=0.01)


def test_on_a_cpu_nothing_waits_on_the_host():
    """Which is the device there."""
    config, model = named_config("tiny-qwen3"), {"reward_model": "policy", "device": "cpu", "zero_stage": 3}
    here = Setup(64, 16, num_generations=4, per_device_train_batch_size=4, optim="adamw_bnb_8bit", **model)
    away = dict.fromkeys(("offload_reference", "offload_reward", "offload_parameters", "offload_optimizer"), True)
    assert phase_peaks(replace(here, optim="paged_adamw_8bit", **away), config) == phase_peaks(here, config)
    with pytest.raises(ConfigError, match="activation_offloading takes activations from a GPU"):
        check(replace(here, activation_offloading=True), config)


def test_the_smallest_cards_hold_it_and_smaller_ones_do_not(planned):
    options = ("--model", "Qwen/Qwen3-4B", "--lora", 8, "--prompt", 3000, "--completion", 256, "--k", 4)
    both = planned(*options, "--arms", "stock,shared", "--cards").stdout
    found = [line.split("  ") for line in both.splitlines()]
    found = {words[0]: [float(x.split()[0]) for x in words[1:] if x] for words in found[-2:]}
    assert all(len(sizes) == 4 and sizes == sorted(sizes, reverse=True) for sizes in found.values()), found
    assert found["shared"][0] < found["stock"][0]
    sizes = [card.seen or card.sold for card in cards()]
    place = sizes.index(found["shared"][0])
    assert place > 0
    for size, fits in ((sizes[place], True), (sizes[place - 1], False)):
        said = planned(*options, "--arms", "shared", "--device-memory", f"{size}GiB").stdout
        (verdict,) = [line.split("  ")[-1].strip() for line in said.splitlines() if line.startswith("shared ")]
        assert (verdict == "yes") == fits, (size, verdict)
    for option in (("--device", "cpu"), ("--accelerate", FOLDER / "fsdp2.yaml")):
        refused = planned(*options, "--cards", *option)
        assert refused.returncode == 2 and "--cards" in refused.stderr
