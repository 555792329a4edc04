"""Sentences with headline figures, made here from the committed results: a page that says otherwise fails. Then what
README.md and docs/findings.md say in words. Tables are made by `visualization.tables`."""

import math
import re
from statistics import median

import pandas as pd
import pytest

from experiments.config import ROOT
from experiments.run_record import stored_runs
from visualization.charts.audit import POINTS_2025, fit
from visualization.published_2025 import PUBLISHED, PUBLISHED_BUDGET
from visualization.report.answers import differences
from visualization.results import GIB, IN_SHORT, MIB, load
from visualization.tables.of_bench import faster, read_bench, seconds_of
from visualization.tables.of_plans import allocated, read_peaks

REFERENCE = ROOT / "results" / "reference-cpu-2-cores"
RESULTS = load(REFERENCE)
BENCH = RESULTS.of("bench").cells.xs(8, level="k")
CPU = RESULTS.of("cpu").cells.above_bytes / GIB
WORTH = read_bench(REFERENCE, "worth")
TRAIN = faster(WORTH, "train")


def spanned(ratios):
    return " to ".join(dict.fromkeys(f"{end:.1f}" for end in (min(ratios), max(ratios)))) + " times faster"


def at(ratios, *lengths):
    return ratios.xs(lengths, level=("prompt_tokens", "completion_tokens")).to_numpy().flatten()


def sentences():
    """(page, sentence)."""
    one, micro = (BENCH.loc[arm] for arm in list(IN_SHORT)[1:])
    lengths, rival = "P = 3,000, C = 100, k = 8", "TRL with one completion at a time and logits of completions only"
    for page in ("docs/worth.md", "docs/faq.md", "CHANGELOG.md"):
        yield page, f"{lengths} a step is {one.step / micro.step:.1f} times faster than {rival}"
    yield "docs/worth.md", f"It needs {micro.above_bytes / one.above_bytes:.2f} of its memory, because of generation"
    longer = f"longer: {micro['first']:.1f} s in place of {micro.step:.1f} in the README's table"
    yield "docs/prefix_sharing.md", longer
    ours, theirs = (arm.score + arm.train for arm in (micro, one))
    yield "docs/faq.md", f"these took {ours:.1f} s in place of the {theirs:.1f} s of TRL with one completion at a time"
    span = spanned(at(TRAIN, 1000, 1000))
    yield "README.md", f"Training is {span} with prompts and completions of 1,000"
    yield "docs/worth.md", f"training is {span} at P = C = 1,000"
    train, step = (spanned(at(faster(WORTH, phase), 200, 1000)) for phase in ("train", "step"))
    train, step = train.removesuffix(" times faster"), step.replace("faster", "as fast")
    yield "README.md", f"{train} with prompts of 200 and completions of 1,000"
    yield "docs/faq.md", f"At P = 200, C = 1,000, training is {train} and a whole step {step}"
    least = math.floor(1000 * (TRAIN.min(axis=None) - 1)) / 10
    assert least >= 0, "say how much longer it took"
    yield "docs/worth.md", f"was faster by at least {least} %** at each of these lengths"
    took = seconds_of(read_bench(REFERENCE, "lengths"), "train")
    took = took[took.index.get_level_values("model").str.endswith("/spread")]
    found = [*took["whole"] / took["shared"], *took["whole-micro-2"] / took["shared-micro-2"]]
    span = spanned(found)
    yield "README.md", f"with completions of 47 to 1,008 tokens behind prompts of 200, training is {span}"
    yield "docs/worth.md", f"With those lengths, training is {span} than whole rows"
    took = seconds_of(read_bench(REFERENCE, "alike"), "train").xs("qwen3-8-layers/2000", level="model")
    times = (took["shared-all-each"] / took["shared-all"]).item()
    yield "README.md", f"with one of 2,000 tokens, training is {times:.1f} times faster again"
    saved = 1 - CPU["classic-lean", 2] / CPU["classic-baseline", 2]
    yield "README.md", f"saves {100 * saved:.0f} % at k = 2"
    budget = RESULTS.of("cpu").cells.budget_bytes
    most = (CPU * PUBLISHED_BUDGET / budget - PUBLISHED.set_index(["arm", "k"]).above).abs().max()
    met = f"our figures meet all five published ones above start within {math.ceil(10 * most) / 10} GiB"
    yield "docs/findings.md", f"Multiplied by 8, {met}"
    slope, _, squared = fit(POINTS_2025)
    yield "docs/findings.md", f"on one line too, through zero: {slope:.2f} GiB per 1,000 tokens, R² {squared:.4f}"
    far = differences(RESULTS, "learn", ["classic-lean"], "classic-baseline")[["reward", "kl", "loss"]].max()
    assert far.reward == 0
    yield "docs/findings.md", f"float64: identical rewards, KL equal to {far.kl:.0e} and losses to {far.loss:.0e}"
    held, _ = allocated(read_peaks(ROOT / "results" / "published"))
    off = math.ceil(1000 * max(abs(held - 1))) / 10
    yield "README.md", f"The planner is within {off:.1f} % of {len(held)} allocated peaks of single GPUs"
    series, rivals = "trl/first/0001-prefix-sharing.patch", read_bench(REFERENCE, "rivals")
    took = seconds_of(rivals, "train")
    long, short = (took.xs(prompt, level="prompt_tokens").iloc[0] for prompt in (3000, 16))
    peaks = rivals[rivals.metric == "train_peak_bytes"].set_index(["prompt_tokens", "way"])["median"][3000] / MIB
    yield series, f"train {long.whole / long['one-row']:.2f} times as fast as whole rows"
    yield series, f"their peak is {peaks['one-row']:.0f} MiB above the start in place of {peaks.whole:.0f}"
    yield series, f"{short['one-row'] / short.whole:.2f} times as long in training with prompts of 16 tokens"
    upstream = pd.read_csv(REFERENCE / "upstream_tests.csv").query("untouched == 'passed'")
    passed, refused = ((upstream.called == outcome).sum() for outcome in ("passed", "failed"))
    sharing = f"{passed} pass with `share_prompts`, and {refused} are refused"
    yield "README.md", f"Of {len(upstream)} tests of TRL's trainers that pass on a CPU, {sharing}"


@pytest.mark.parametrize("page, sentence", list(sentences()))
def test_the_page_has_the_sentence_with_the_figure_of_the_results(page, sentence):
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", (ROOT / page).read_text())  # whatever it links
    assert " ".join(sentence.split()) in " ".join(text.split()), f"{page} should say: {sentence}"


def test_the_published_change_saves_only_what_it_cuts():
    fed, short = RESULTS.of("cpu").runs.set_index("arm"), RESULTS.of("short").cells.above_bytes
    whole = fed.loc[["classic-baseline", "classic-string-exact"]]
    assert set(whole.prompt_tokens_fed_min) <= {2999, 3000}  # one prompt has 2,999
    assert set(fed.loc[["classic-string"]].prompt_tokens_fed_max) == {1024}
    for k in (2, 4):
        baseline, string, exact = (CPU[f"classic-{arm}", k] for arm in ("baseline", "string", "string-exact"))
        assert string / baseline == pytest.approx((1024 + 100) / (3000 + 100), abs=0.05)
        assert exact == pytest.approx(baseline, rel=0.02), "nothing cut, nothing saved"
    assert short["classic-string", 2] == pytest.approx(short["classic-baseline", 2], rel=0.02)


def test_in_float64_every_figure_agrees_at_full_length_and_a_learnable_reward_rises():
    """Beyond float32's rounding: 3,000 + 100 tokens, two rollouts of three updates. And 30 rollouts of short ones."""
    runs = {run.record["run_id"]: run.record for run in stored_runs(REFERENCE)}
    lean, baseline = (runs[f"classic-{arm}_exact_k2_r0"] for arm in ("lean", "baseline"))
    assert lean["config"]["precision"] == baseline["config"]["precision"] == "float64"
    for name in ("reward", "loss", "kl", "grad_norm"):
        ours, theirs = ([step[name] for step in run["trace"]] for run in (lean, baseline))
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-9), name
    rewards = [step["reward"] for step in runs["classic-lean_learn_k4_r0"]["trace"]]
    assert len(rewards) == 30 and median(rewards[-5:]) > 2 * median(rewards[:5])
