"""Sentences with figures in README and docs, made here from the committed results: a page that says otherwise fails.
Tables are made by `visualization.tables`, which has its own test."""

import json
import math
import re
from statistics import median

import pandas as pd
import pytest

from experiments.config import ROOT
from rloo_memory.plan.accuracy.cards import cards
from rloo_memory.plan.accuracy.measured import times_faster
from rloo_memory.shapes import SHAPES
from visualization.charts.audit import POINTS_2025, fit
from visualization.legacy import PUBLISHED, PUBLISHED_BUDGET
from visualization.load import load_machine
from visualization.page.answers import side_by_side
from visualization.pages.check_tables import emulated_shares
from visualization.pages.gpu_peaks import read_peaks
from visualization.pages.predictions import read_check
from visualization.pages.side_by_side import CELL, faster, limits_of, read_bench, ways_of
from visualization.runs import IN_SHORT, LEARN, MIB, TIMES, cells

REFERENCE = ROOT / "results" / "reference-cpu-2-cores"


def says(page: str, sentence: str) -> None:
    """The page has this sentence, wherever its lines are broken and whatever it links."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", (ROOT / page).read_text())
    assert " ".join(sentence.split()) in " ".join(text.split()), f"{page} should say: {sentence}"


def table_of(page, heading):
    """The figures of the table that begins so: [cell, ...] of each line, without thousands separators."""
    lines = (ROOT / page).read_text().partition(f"\n{heading}")[2].partition("\n\n")[0].splitlines()[2:]
    assert lines, heading
    return [[re.sub(r"(?<=\d),(?=\d)", "", cell.strip()) for cell in line.strip("|").split("|")] for line in lines]


@pytest.fixture(scope="module")
def runs():
    return load_machine(REFERENCE)


@pytest.fixture(scope="module")
def bench(runs):
    """(arm, k) -> cell of the scale `bench`."""
    return {(cell.arm, cell.k): cell for cell in cells([run for run in runs if run.scale == "bench"])}


def resident(cell, phase: str) -> float:
    """Median over the runs of the highest resident bytes in that phase."""
    return median(run.phases[run.phases.phase == phase].peak_resident_bytes.max() for run in cell.runs)


def test_the_step_of_the_bench(bench):
    """Against the strongest rival, which is so in both."""
    stock, whole, one, micro, shared = (bench[arm, 8] for arm in ("stock", *IN_SHORT, "shared"))
    ratio = f"{shared.seconds().times_faster(one.seconds()):.1f}"
    sizes = [cell.median("above_start_bytes") / 2**30 for cell in (one, shared)]
    assert one.seconds().median < whole.seconds().median and one.above < whole.above
    says("README.md", f"as released, on this CPU: {stock.seconds().median:.1f} s, {stock.above / 2**30:.2f} GiB")
    lengths = "With P = 3,000 prompt tokens, C = 100 completion tokens and k = 8 completions"
    says("docs/faq.md", f"{lengths}, a step was {ratio} times faster than TRL with one completion at a time")
    rival = "TRL with one completion at a time and logits of completions only"
    says("docs/worth.md", f"at P = 3,000, C = 100, k = 8 a step is {ratio} times faster than {rival}")
    says("docs/worth.md", f"It needs {sizes[1] / sizes[0]:.2f} of its memory, because of generation")
    says("docs/memory_guide.md", "from {:.2f} to {:.2f} GiB".format(*sizes))
    assert {run.peak_phase for run in one.runs} == {"generate"}
    ours, theirs = (sum(cell.seconds(phase).median for phase in ("score", "train")) for cell in (micro, one))
    says("docs/faq.md", f"scoring and training took {ours:.1f} s in place of the {theirs:.1f} s")
    says("README.md", "needs no more memory to train than prefix sharing, but more to generate")
    assert 0.99 * resident(micro, "train") < resident(one, "train") <= resident(micro, "train")


def test_the_peak_hardly_grows_with_k(bench):
    def grows(arm, between):
        few, many = (bench[arm, k].median("peak_bytes") / MIB for k in (2, 64))
        return f"from {few:,.0f} to {many:,.0f} MiB in {between} of two ({many / few:.2f} times)"

    says("docs/worth.md", grows("shared", "passes"))
    says("docs/worth.md", grows("shared-accumulate", "micro-batches"))
    few, many = (bench["shared-accumulate", k] for k in (2, 64))
    loaded = (resident(many, "load") - resident(few, "load")) / MIB
    says("docs/worth.md", f"Of what micro-batches grow by, {loaded:.0f} MiB are there before")


def test_lengths_at_which_training_gains_little():
    worth = read_bench(REFERENCE, "worth")
    found, steps = faster(worth, "train"), faster(worth, "step")
    square = found.xs((1000, 1000), level=("prompt_tokens", "completion_tokens"))
    span = f"{square.min(axis=None):.1f} to {square.max(axis=None):.1f} times faster"
    says("docs/faq.md", f"At P = C = 1,000, training was {span}")
    says("docs/worth.md", f"training is {span} at P = C = 1,000")
    says("README.md", f"training is {span} at 1,000 and 1,000 tokens")
    train, step = (each.xs((200, 1000), level=("prompt_tokens", "completion_tokens")) for each in (found, steps))
    slow = "At P = 200, C = 1,000 it was {:.1f} to {:.1f} times as fast, and a whole step {:.1f} to {:.1f} times"
    ends = (end for each in (train, step) for end in (each.min(axis=None), each.max(axis=None)))
    says("docs/faq.md", slow.format(*ends))
    narrow = found.loc["narrow"]["shared"]
    first, second = narrow[1000, 1000], narrow[200, 1000]
    says(
        "docs/alternatives.md",
        f"the training pass was {first:.2f} times faster than whole rows at P = C = 1,000, k = 8, and {second:.2f} "
        "times at P = 200, C = 1,000",
    )


def test_lengths_at_which_training_is_faster():
    at = {each.ratio: f"{each.low:.1f} to {each.high:.1f}" for each in times_faster()}
    says(
        "docs/memory_guide.md",
        f"at r = 6.5 (P = 3,000, C = 100) {at[6.5]} times as fast, at 4.9 (1,000, 100) {at[4.9]}, at 2.4 (200, 100) "
        f"{at[2.4]}, at 1.8 (1,000, 1,000) {at[1.8]} and at 1.2 (200, 1,000) {at[1.2]}",
    )


def test_where_sharing_takes_longer():
    """Whole steps, training in passes of two, and generation."""
    worth = read_bench(REFERENCE, "worth")
    train = faster(worth, "train")
    longer = 100 * (1 / train - 1)
    most = math.ceil(10 * longer[["shared", "shared-micro-2"]].max(axis=None)) / 10
    says("docs/worth.md", f"took at most {most} % longer** than whole rows at any of these lengths")
    says("docs/features.md", f"training at most {most} % longer than untouched TRL at any length of the table")
    limits = limits_of(worth)
    reached = math.floor(100 * (train["shared"] / limits)[limits > 1.5].min()) / 100
    says("docs/worth.md", f"Where the limit is above 1.5, training together reached at least {reached} of it")
    says("docs/features.md", f"and, where the limit is above 1.5, together at least {reached} of it")
    assert faster(worth, "step").min(axis=None) > 1, "a whole step was faster at each"
    narrow, wide = (longer["shared-2"][model, 200, 1000] for model in ("narrow", "wide"))
    says(
        "docs/worth.md",
        f"training takes {narrow:.0f} % longer than whole rows in the narrow model, {wide:.0f} % in the wide one",
    )
    slow, less_slow = sorted(train["shared-2"][model, 200, 1000] for model in ("narrow", "wide"))
    says("docs/features.md", f"passes of two reach {slow:.2f} to {less_slow:.2f} of its speed at P = 200, C = 1,000")
    found = {}
    for cell, rows in read_bench(REFERENCE, "decoding").groupby(CELL):
        whole, shared = (ways_of(rows)[way].seconds("generate_seconds").answer for way in ("whole", "shared"))
        found[cell] = 100 * (shared / whole - 1)
    behind_20, behind_100 = (found.pop(("narrow", *lengths)) for lengths in ((20, 100, 8), (100, 100, 2)))
    says(
        "docs/worth.md",
        f"In the narrow model generation took {behind_20:.0f} % longer behind 20 tokens, and {behind_100:.0f} % "
        "longer behind 100 tokens with k = 2; elsewhere it was faster",
    )
    assert max(found.values()) < 0
    says("docs/features.md", f"generation of the narrow model {1 / (1 + behind_100 / 100):.2f} at P = C = 100, k = 2")


def test_ways_to_compute_one_group():
    rivals = read_bench(REFERENCE, "rivals")
    at = {
        cell[1]: {name: way.median("train_seconds") for name, way in ways_of(rows).items()}
        for cell, rows in rivals.groupby(CELL)
    }
    long, short = at[3000], at[16]
    says(
        "docs/alternatives.md",
        f"whole rows {long['whole']:.2f} s, prefix-grouper {long['prefix-grouper 0.0.1.post1']:.2f} s, this project "
        f"{long['shared']:.2f} s together and {long['shared-2']:.2f} s in passes of two",
    )
    longer = sorted(100 * (short[name] / short["whole"] - 1) for name in ("shared", "shared-2"))
    says("docs/worth.md", "(C = 512, k = 2): training takes {:.0f} to {:.0f} % longer".format(*longer))
    says("docs/faq.md", "At P = 16, C = 512, k = 2, training took {:.0f} to {:.0f} % longer".format(*longer))


def test_what_the_published_change_and_the_honest_one_save(runs):
    lean, base, string = (
        {cell.k: cell.median("above_start_bytes") for cell in cells(runs) if (cell.arm, cell.scale) == (arm, "cpu")}
        for arm in ("classic-lean", "classic-baseline", "classic-string")
    )
    gib, less = 2**30, {k: f"{1 - lean[k] / base[k]:.0%}".replace("%", " %") for k in (2, 4)}
    says("README.md", f"saves {less[2]} at k = 2")
    theirs = [PUBLISHED[arm, 2].above_gib for arm in ("classic-string", "classic-baseline")]
    published, ours = (f"{100 * (1 - a / b):.0f} %" for a, b in (theirs, (string[2], base[2])))
    says("README.md", f"({published} of what is above the start level; rebuilt, it saves {ours} there)")
    says(
        "docs/findings.md",
        f"{base[2] / gib:.2f} to {lean[2] / gib:.2f} at k=2 ({less[2]} less), {base[4] / gib:.2f} to "
        f"{lean[4] / gib:.2f} at k=4 ({less[4]} less), and {lean[8] / gib:.2f} at k=8",
    )


def test_how_near_the_published_figures_are(runs):
    """GiB above the start level, the smaller vocabulary and budget multiplied back."""
    ours = {
        (cell.arm, cell.k): cell.above * PUBLISHED_BUDGET / cell.first("budget_bytes") / 2**30
        for cell in cells([run for run in runs if run.scale == "cpu"])
        if cell.above
    }
    theirs = {cell: found.above_gib for cell, found in PUBLISHED.items() if found.above_gib}
    base = [("classic-baseline", k) for k in (2, 4)]
    assert all(ours[cell] < theirs[cell] for cell in base)
    off = sorted(ours[cell] - theirs[cell] for cell in theirs if cell[0] == "classic-string")
    most = math.ceil(10 * max(abs(ours[cell] - theirs[cell]) for cell in theirs)) / 10
    says(
        "docs/findings.md", f"Multiplied by 8, our figures meet all five published ones above start within {most} GiB"
    )
    met = ", ".join(f"{ours[cell]:.2f} for {theirs[cell]:.2f}" for cell in base)
    says(
        "docs/findings.md",
        f"The baseline is met from below ({met}), the published change from above by {off[0]:.1f} to {off[-1]:.1f}",
    )


def test_what_was_published():
    """And what follows from it alone."""
    published = {cell: found for cell, found in PUBLISHED.items() if found.peak_gib}
    above = {cell: found.above_gib for cell, found in published.items()}
    less = [100 * (1 - above["classic-string", k] / above["classic-baseline", k]) for k in (2, 4)]
    says("docs/findings.md", "reduction of what the training itself took is {:.1f} and {:.1f} %".format(*less))
    slope, intercept, squared = fit(*zip(*(point[2:] for point in POINTS_2025), strict=True))
    assert abs(intercept) < 0.01
    says("docs/findings.md", f"on one line too, through zero: {slope:.2f} GiB per 1,000 tokens, R² {squared:.4f}")
    steeper, flatter = (
        round((published[arm, 4].peak_gib - published[arm, 2].peak_gib) / 2 + 1e-9, 2)
        for arm in ("classic-baseline", "classic-string")
    )
    says("docs/findings.md", f"per completion, {steeper} / {flatter} = {steeper / flatter:.2f}, is the ratio of the")
    table = table_of("docs/findings.md", "| k | baseline |")
    assert len(table) == 3
    for k, *cells_of_k in table:
        base, string = ((arm, int(k)) for arm in ("classic-baseline", "classic-string"))
        if base in published:
            reduction = f"{100 * (1 - published[string].peak_gib / published[base].peak_gib):.1f} %"
            found = [f"{published[base].peak_gib:.2f}", reduction, f"{above[base]:.2f}"]
        else:
            found = ["out of memory", "-", "-"]
        found = [found[0], f"{published[string].peak_gib:.2f}", *found[1:], f"{above[string]:.2f}"]
        assert cells_of_k == found, k


def furthest(runs, arm, scale, *names):
    """How far an arm's logged values are from the baseline's at most, over all k, repeats and updates."""
    found = side_by_side([cell for cell in cells(runs) if cell.scale == scale])
    (beside,) = [each for each in found if (each.arm, each.first) == (arm, "classic-baseline")]
    return [beside.differences[name] for name in names]


def test_how_far_trainings_are_from_the_baseline(runs):
    reward, loss = furthest(runs, "classic-string-exact", "cpu", "reward", "loss")
    assert reward == 0
    says("docs/findings.md", f"has the baseline's peak and rewards, and its losses to {loss:.0e}")
    reward, lean = furthest(runs, "classic-lean", "cpu", "reward", "loss")
    assert reward == 0
    says("docs/findings.md", f"in float32, three seeds: rewards equal in every digit, losses to {lean:.0e}")
    reward, kl, loss = furthest(runs, "classic-lean", LEARN, "reward", "kl", "loss")
    assert reward == 0
    says("docs/findings.md", f"float64: identical rewards, KL equal to {kl:.0e} and losses to {loss:.0e}")


def test_how_far_repeats_are_apart(runs):
    """Of memory: not the runs that are there for their seconds, where malloc keeps what is freed."""

    def apart(name):
        spread = [
            (max(values) - min(values)) / median(values)
            for cell in cells([run for run in runs if not run.scale.endswith(TIMES)])
            if (values := cell.values(name))
        ]
        return math.ceil(1000 * max(spread)) / 10

    says(
        "docs/measuring.md",
        f"repeats agree within {apart('peak_bytes')} % of the process's peak, and within "
        f"{apart('above_start_bytes')} % of what is above the start level",
    )


def test_the_cases_that_are_predicted_worst():
    rows = read_check(REFERENCE).set_index(["case", "phase"])
    more = [
        rows.measured_bytes[case, "score"] / rows.predicted_bytes[case, "score"] - 1
        for case in ("shared-k32", "shared-two-prompts")
    ]
    percent = "{:.0f} and {:.0f} %".format(*(100 * each for each in more))
    says(
        "docs/predictions.md",
        f"Scoring of `shared-k32` and `shared-two-prompts` is measured {percent} higher than predicted",
    )


def test_the_limit_of_a_pass():
    worth = read_bench(REFERENCE, "worth")
    limits, found = limits_of(worth), faster(worth, "train")["shared"]
    narrow, wide = ((model, 3000, 100) for model in ("narrow", "wide"))
    says(
        "docs/prefix_sharing.md",
        f"at r = 6.5 it is {limits[narrow]:.1f} in a narrow model, where {found[narrow]:.1f} was measured, and "
        f"{limits[wide]:.1f} in a wide one, where {found[wide]:.1f} was",
    )


def test_shares_of_an_emulated_device():
    rows = emulated_shares(ROOT / "results" / "emulated-cuda")
    shares = rows[~rows.expandable & ~rows.case.isin(["stock-k8", "shared-parts"])].share  # these two are in float32
    says(
        "docs/emulated_cuda.md",
        f"shares of the trainings in bfloat16 scatter from {shares.min():.2f} to {shares.max():.2f}",
    )


def test_published_peaks_of_gpus():
    rows = read_peaks(ROOT / "results" / "published")
    held = rows[(rows.metric == "allocated") & (rows.not_held == "") & ~rows.card.str.contains("FSDP2")]
    off = math.ceil(1000 * max(abs(held.ratio - 1))) / 1000
    figures = f"within {off * 100:.1f} % of {len(held)} allocated peaks of untouched TRL and torchtune on GPUs"
    says("README.md", f"The planner below is {figures}")


def test_what_the_plan_of_the_readme_says():
    """The tutorial has all of it, and a test runs that."""
    said = (ROOT / "docs" / "tutorial.md").read_text()
    short = re.search(r"^stock .*short by (\S+) GiB$", said, re.M)[1]
    peak = re.search(r"^shared .* (\S+)\* .*yes$", said, re.M)[1]
    one = re.search(r"^stock-accumulate .*short by (\S+) GiB$", said, re.M)[1]
    (card,) = (each for each in cards() if each.names == "RTX 4090")
    says(
        "README.md",
        f"on an RTX 4090, of which PyTorch sees {card.seen} GiB, TRL is short by {short} GiB, by {one} with",
    )
    says("README.md", f"with one completion at a time, and prefix sharing fits with a peak of {peak}.")


def test_kernels_that_an_update_launches():
    rows = pd.read_csv(ROOT / "results" / "emulated-cuda" / "launches.csv").set_index("way").launches_a_layer
    whole, checkpointed, shared = (
        rows[name] * (5 / 4 if "whole" in name else 1)
        for name in (
            "whole rows, two a micro-batch",
            "whole rows, two a micro-batch, checkpointed",
            "shared, two a micro-batch",
        )
    )
    says(
        "docs/emulated_cuda.md",
        f"Five passes of whole rows launch {whole:,.0f} kernels a layer, {checkpointed:,.0f} checkpointed; sharing "
        f"launches {shared / whole:.2f} times as many",
    )


def test_how_many_models_there_are():
    text = (ROOT / "docs" / "models.md").read_text()
    counts = [
        int(number)
        for number in re.search(r"(\d+) share prompts exactly, (\d+) are .*?, (\d+) could .*?, (\d+)", text).groups()
    ]
    says("README.md", f"on {counts[0]} of transformers' {sum(counts)} classes for text and images")
    says("docs/faq.md", f"{sum(counts)} classes: {counts[0]} share, {counts[1]} are refused")
    says("docs/faq.md", f"in float64, for {counts[0]} model classes")
    says("docs/alternatives.md", f"Of {sum(counts)} model classes {counts[1]} are refused")
    known = [name for name in SHAPES if not name.startswith("tiny") and not name.endswith("-layers")]
    says("README.md", f"The commands know {len(known)} by name")
    says("docs/tutorial.md", f"{len(known)} models are known by name")
    says("docs/memory_guide.md", f"one of {len(known)} built-in shapes")
    data = json.loads((ROOT / "docs" / "fit.json").read_text())
    says("README.md", f"it answers for {len(data['models'])} models")
    says("docs/memory_guide.md", f"It answers for {len(data['models'])} models")
    says("docs/predictions.md", f"{len(data['models'])} models, your lengths and k")
