"""What README.md and docs/findings.md say, checked against the committed results that the README's tables name."""

import re
from statistics import median

import pytest

from experiments.config import ROOT
from experiments.run_record import stored_runs

README = (ROOT / "README.md").read_text()
MACHINES = sorted({ROOT / name for name in re.findall(r"<!-- table:\w+ (results/\S+)", README)})


@pytest.fixture(params=MACHINES, ids=lambda path: path.name)
def runs(request):
    """Finished and failed runs of one machine: {(arm, scale, k): [record, ...]}."""
    found = {}
    for run in stored_runs(request.param):
        record = run.record
        found.setdefault((record["arm"], record["scale"], record["k"]), []).append(record)
    return found


def above_start(records):
    assert [record["status"] for record in records] == ["ok"] * len(records)
    main = "peak_device_used_bytes" if records[0]["device_kind"] == "cuda" else "peak_resident_bytes"
    return median(record[main] - record["start_bytes"] for record in records)


def scale_of(runs):
    return "seed" if ("classic-baseline", "seed", 2) in runs else "cpu"


def test_the_published_change_saves_only_what_it_cuts(runs):
    scale = scale_of(runs)
    for k in (2, 4):
        arms = ("classic-baseline", "classic-string", "classic-string-exact")
        baseline, string, exact = (runs[arm, scale, k] for arm in arms)
        assert {record["prompt_tokens_fed_min"] for record in baseline + exact} <= {2999, 3000}  # one prompt has 2,999
        assert {record["prompt_tokens_fed_max"] for record in string} == {1024}
        tokens = (1024 + 100) / (3000 + 100)
        assert above_start(string) / above_start(baseline) == pytest.approx(tokens, abs=0.05)
        assert above_start(exact) == pytest.approx(above_start(baseline), rel=0.02), "nothing cut, nothing saved"
    short = [above_start(runs[arm, "short", 2]) for arm in ("classic-baseline", "classic-string")]
    assert short[1] == pytest.approx(short[0], rel=0.02)


def test_in_float64_every_figure_agrees_at_full_length_and_a_learnable_reward_rises_the_same_way(runs):
    """Beyond float32's rounding: 3,000 + 100 tokens, two rollouts of three updates. And 30 rollouts of short ones."""
    for scale, k, rounding in (("exact", 2, 1e-9), ("learn", 4, 1e-5)):
        lean, baseline = (runs[arm, scale, k][0] for arm in ("classic-lean", "classic-baseline"))
        assert lean["config"]["precision"] == baseline["config"]["precision"] == "float64"
        for name in ("reward", "loss", "kl", "grad_norm") if scale == "exact" else ("reward", "kl"):
            ours, theirs = ([step[name] for step in run["trace"]] for run in (lean, baseline))
            assert ours == pytest.approx(theirs, rel=rounding, abs=min(rounding, 1e-6)), name
    rewards = [step["reward"] for step in lean["trace"]]
    assert len(rewards) == 30 and median(rewards[-5:]) > 2 * median(rewards[:5])
