"""The peak of each phase, from simulations of a few layers and a few passes.

Where all layers are alike, a model of 3 and one of 4 layers are simulated and the rest follows: at one allocation,
what is alive is a straight line in the number of layers. Which allocation is the highest can depend on that number, so
each is extended on its own, and the highest is taken afterwards. Where layers of two kinds alternate (sliding and full
attention), the same is done with whole rounds of them. (Where activations are offloaded, with 7 layers and more: the
inputs of five layers are on their way at a time.) Many passes of a shared prompt follow from few in the same way.
"""

import copy
import itertools
import math
from collections import Counter
from dataclasses import dataclass
from typing import TypeAlias

from rloo_memory.errors import ConfigError
from rloo_memory.models import meta_model
from rloo_memory.plan.checkpoint import quantized
from rloo_memory.plan.peaks import PredictedPeak
from rloo_memory.plan.scale_up.sharding import as_computed, spread, weights_by_place
from rloo_memory.plan.simulation.building import decoder_layers
from rloo_memory.plan.simulation.events import REFERENCE
from rloo_memory.plan.simulation.heads import TOKENS
from rloo_memory.plan.simulation.simulate import PHASES, Simulation
from rloo_memory.plan.simulation.work import along_line


def phase_peaks(setup, hf_config) -> list[PredictedPeak]:
    """The peak of each phase of one step, in the order of `PHASES`, once the optimizer has its state."""
    tasks = simulations(setup, hf_config)
    return combine(setup, hf_config, tasks, [simulate(*task) for task in tasks])


def simulations(setup, hf_config) -> list[tuple]:
    """Arguments of the calls of `simulate` that the peaks of a setup follow from. They can run at the same time."""
    few, more = passes_that_tell(setup)
    setup = as_computed(setup.as_run)
    setups = [(setup, True)]
    if more:  # generation has no passes
        setups = [(setup.with_k(few), True), (setup.with_k(more), True), (setup, False)]
    # Where the first layers get features of the tower (Qwen3-VL), there must be some behind them
    of_images = hf_config.vision_config if setup.images else None
    with_features = len(getattr(of_images, "deepstack_visual_indexes", None) or ())
    rounds = Rounds.of(hf_config, max(7 if setup.activation_offloading else 3, with_features + 2))
    configs = [with_layers(hf_config, count) for count in (rounds.few, rounds.more)] if rounds else [hf_config]
    return [(each, config, passes) for each, passes in setups for config in configs]


# What `Simulation.run` gives, and the `Work` of its phases
Simulated: TypeAlias = tuple[dict[tuple, dict[str, int]], dict[str, Counter]]


def simulate(setup, hf_config, passes: bool) -> Simulated:
    """Raises `ConfigError` where prefix sharing refuses the model, or anything fails."""
    try:
        simulation = Simulation(setup, hf_config)
        return simulation.run(passes), simulation.work.counted
    except ConfigError:
        raise
    except Exception as error:  # most often a model whose code looks at values, or takes another mask than most
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"a model of type {hf_config.model_type} could not be run without values, so it cannot be planned: "
            f"{type(error).__name__}: {reason}"
        ) from error


def combine(setup, hf_config, tasks: list[tuple], results: list[Simulated]) -> list[PredictedPeak]:
    """The peaks of a setup from the results of its `simulations`, in the order of these `tasks`."""
    stretches = stretches_of(setup, hf_config, tasks, results)
    peaks, sharded = [], setup.fully_sharded or setup.zero_stage
    weights = weights_by_place(hf_config) if sharded else None
    # All of them are there when the optimizer steps
    gradients = max(kinds.get("gradients", 0) for place, kinds in stretches.items() if place[0] == "optimizer")
    for phase in PHASES:
        each = [
            spread(setup, weights, gradients, phase, kinds) for place, kinds in stretches.items() if place[0] == phase
        ]
        kinds = {kind: size for kind, size in max(each, key=on_device).items() if size and kind != "host"}
        peaks.append(PredictedPeak(phase, on_device(kinds), kinds, max(map(on_host, each))))
    return peaks


def stretches_of(setup, hf_config, tasks: list[tuple], results: list[Simulated]) -> dict[tuple, dict[str, int]]:
    """The bytes by kind at the peak of each (phase, event, layer, role), with all layers and all passes, from the
    results of these `tasks`, the `simulations` of a setup."""
    few, more = passes_that_tell(setup)
    each = [stretches for stretches, _ in results]
    if rounds := Rounds.of_tasks(tasks, hf_config):
        each = [rounds.all_layers(*pair) for pair in zip(each[::2], each[1::2], strict=True)]
    stretches, *others = [highest(result) for result in each]
    if more:
        again, generation = others
        x = (setup.num_generations - few) / (more - few)
        both = {place: place[2] for place in map(of_event, again) if place in stretches}
        stretches = extended(stretches, again, both, x) | generation
    return stretches


def work_of(setup, hf_config, tasks: list[tuple], results: list[Simulated]) -> dict[str, Counter]:
    """The work of an update, its scoring and its training, with all layers and all passes, likewise."""
    few, more = passes_that_tell(setup)
    each = [work for _, work in results]
    if rounds := Rounds.of_tasks(tasks, hf_config):
        x = (rounds.layers - rounds.few) / (rounds.more - rounds.few)
        each = [work_along_line(*pair, x) for pair in zip(each[::2], each[1::2], strict=True)]
    if more:
        return work_along_line(each[0], each[1], (setup.num_generations - few) / (more - few))
    return each[0]


def work_along_line(few: dict[str, Counter], more: dict[str, Counter], x: float) -> dict[str, Counter]:
    return {phase: Counter(along_line(few[phase], more[phase], x)) for phase in few.keys() & more.keys()}


def passes_that_tell(setup) -> tuple[int, int]:
    """Two numbers of completions from whose peaks that of `num_generations` follows, or (0, 0) if it has few passes,
    or passes of whole rows that mix prompts.

    The LM head works on tiles of some tokens, so all three must fill one tile, or none must."""
    setup = setup.as_run
    tile, k, per_forward = TOKENS, setup.num_generations, setup.rows_per_pass
    rows = setup.per_device_train_batch_size
    mixed = not setup.prefix_sharing and rows > k
    if per_forward is None or mixed or rows % k:  # parts of groups do not grow along a line
        return 0, 0
    tokens = rows * setup.max_completion_length // k  # for each of k
    # Four are the fewest that have one of each kind: the first, the last, and two between, as what comes at the end of
    # a pass depends on whether the next is the last
    passes = 4 if tokens * k <= tile else max(4, -(-tile // (tokens * per_forward)))
    few, step = passes * per_forward, per_forward
    if setup.device == "cpu" and tokens * k > tile:
        # Without Triton, folding a tile takes several times its size: what is left for the last one must be the same
        step = math.lcm(per_forward, tile // math.gcd(tokens, tile))
        few += (k - few) % step
    return (few, few + step) if k > few + step else (0, 0)


@dataclass(frozen=True)
class Rounds:
    """Models of `few` and of `more` layers that stand for one of `layers`. They are a round apart: layers after which
    the kinds of layers repeat."""

    few: int
    more: int
    layers: int

    @classmethod
    def of(cls, hf_config, least: int) -> "Rounds | None":
        """With at least so many layers. None where all must be simulated: they are few, or the shapes of their
        weights do not repeat."""
        text_config = hf_config.get_text_config()
        if (already := quantized(hf_config)) and already.by_layer:
            return None
        count = text_config.num_hidden_layers
        types = getattr(text_config, "layer_types", None) or ["full_attention"] * count
        rotates = getattr(text_config, "no_rope_layers", None) or [1] * count  # 0 where a layer has no positions
        kinds = list(zip(types, rotates, strict=True))
        length = next(n for n in range(1, count + 1) if kinds[n:] == kinds[:-n])
        few = max(3 if length < 3 else 2, -(-least // length)) * length + count % length
        if few + few + length >= count:
            return None
        shapes = shapes_of_layers(hf_config)
        if len(shapes) != count or shapes[length:] != shapes[:-length]:
            return None
        # With the first of different layers, the configuration must still make them: some have fields of their own
        if len(set(shapes)) > 1 and shapes_of_layers(with_layers(hf_config, few)) != shapes[:few]:
            return None
        return cls(few, few + length, count)

    @classmethod
    def of_tasks(cls, tasks: list[tuple], hf_config) -> "Rounds | None":
        """Those that `simulations` chose for these tasks."""
        if tasks[0][1] is hf_config:
            return None
        return cls(*(config.get_text_config().num_hidden_layers for config in (tasks[0][1], tasks[1][1], hf_config)))

    def all_layers(self, few: dict, more: dict) -> dict[tuple, dict[str, int]]:
        """What is alive between events, see `Simulation.run`, with all layers, from what it is with few and more."""
        # The first rounds and the last ones stand for all: along the layers between it is a straight line, too
        length = self.more - self.few
        first = (self.few // length - 1) * length
        stands_for = {}
        for place in map(of_event, more):
            layer = place[2]
            if layer is None or layer < first:
                stands_for[place] = layer
            elif layer >= 2 * length:
                stands_for[place] = layer - length
        return extended(few, more, stands_for, (self.layers - self.few) / length)


def extended(few: dict, more: dict, stands_for: dict[tuple, int | None], x: float) -> dict[tuple, dict[str, int]]:
    """What is alive at `x` of the straight lines from `few` at 0 to `more` at 1: at each allocation that both have,
    behind the events of `stands_for`, which says with which layer of `few` they go."""
    of_few, of_more = behind_events(few), behind_events(more)
    stretches = {}
    for (phase, event, layer, visit), source in stands_for.items():
        names = of_few[phase, event, source, visit], of_more[phase, event, layer, visit]
        for one, other in same_allocations(*names):
            sizes = along_line(few[phase, one, source, visit], more[phase, other, layer, visit], x)
            stretches[phase, one, layer, visit] = {kind: round(size) for kind, size in sizes.items()}
    return stretches


def behind_events(stretches: dict) -> dict[tuple, list[str]]:
    """For each (phase, event, layer, visit), its own name and those of the allocations behind it, in their order."""
    names: dict[tuple, list[str]] = {}
    for place in stretches:
        names.setdefault(of_event(place), []).append(place[1])
    return names


def same_allocations(few: list[str], more: list[str]) -> list[tuple[str, str]]:
    """Pairs of names that stand for the same allocation with few and with more layers or passes: where more have some
    more, those in front of these and those behind them, whose numbers that shifts. Not those that can be either: in a
    row of the same operation, nothing tells which ones are new. Otherwise only the event itself."""

    def alike(one: list[str], other: list[str]) -> int:
        pairs = zip(map(operation_of, one), map(operation_of, other), strict=False)
        return len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])

    before, after = alike(few, more), alike(few[::-1], more[::-1])
    shorter = min(len(few), len(more))
    if before + after < shorter:
        return [(name, name) for name in few if event_of(name) == name]
    if len(few) == len(more):
        return list(zip(few, more, strict=True))
    front, back = shorter - after, shorter - before
    return [*zip(few[:front], more[:front], strict=True), *zip(few[-back:], more[-back:], strict=True)]


# Visits that are not like the others: in generation the prompt's, and the last time that a cache grows; in a backward
# the one whose activations stayed and the one that ends the gradients of shared keys; behind the last layer the one
# that puts all passes together
ALONE = {
    "grow": ("last",),
    "forward": ("first",),
    "logits": ("first",),
    "backward": ("first", "last"),
    "behind": ("last",),
    "forward again": ("last",),
    "behind again": ("last",),
}


def role_of(event: str, visit: int, visits: int) -> str:
    """Of one of so many visits to a layer: "first" or "last" as in `ALONE`; of the others, along which what is alive
    rises or falls, "early" for the first one, "late" for the last, "between" for the rest."""
    alone = ALONE.get(event.removeprefix(REFERENCE), ())
    if visit == 0 and "first" in alone:
        return "first"
    if visit == visits - 1 and "last" in alone:
        return "last"
    if visit == ("first" in alone):
        return "early"
    return "late" if visit == visits - 1 - ("last" in alone) else "between"


def highest(stretches: dict[tuple, dict[str, int]]) -> dict[tuple, dict[str, int]]:
    """For each (phase, event, layer, role of the visit), the visit with most on the device, and the most on the host
    of any of them. Allocations that only some of these visits have are left out: their numbers name other ones where
    visits differ."""
    visits = Counter((phase, name, layer) for phase, name, layer, _ in stretches if event_of(name) == name)
    best: dict[tuple, dict[str, int]] = {}
    found: Counter[tuple] = Counter()
    for (phase, name, layer, visit), kinds in stretches.items():
        event = event_of(name)
        place = (phase, name, layer, role_of(event, visit, visits[phase, event, layer]))
        found[place] += 1
        before = best.get(place, {})
        host = max(on_host(before), on_host(kinds))
        best[place] = max(before, kinds, key=on_device) | {"host": host}
    return {place: kinds for place, kinds in best.items() if found[place] == found[of_event(place)]}


def event_of(name: str) -> str:
    """The event of an allocation behind it."""
    return name.partition(":")[0]


def of_event(place: tuple) -> tuple:
    """The (phase, event, layer, role) that an allocation is behind; an event's own is the same."""
    phase, name, *rest = place
    return (phase, event_of(name), *rest)


def operation_of(name: str) -> str:
    """An allocation's name without its number."""
    return name.rpartition(" ")[0] or name


def on_device(kinds: dict[str, int]) -> int:
    return sum(size for kind, size in kinds.items() if kind != "host")


def on_host(kinds: dict[str, int]) -> int:
    return kinds.get("host", 0)


def shapes_of_layers(hf_config) -> list[tuple]:
    """Names and shapes of the weights of each layer."""
    layers = decoder_layers(meta_model(hf_config))
    return [tuple((name, p.shape) for name, p in layer.named_parameters()) for layer in layers]


def with_layers(hf_config, count: int):
    """The same configuration with the first `count` layers."""
    config = copy.deepcopy(hf_config)
    text_config = config.get_text_config()
    text_config.num_hidden_layers = count
    # Not every family has it, and of some it follows from the number of layers
    if len(getattr(text_config, "layer_types", None) or ()) > count:
        text_config.layer_types = text_config.layer_types[:count]
    return config
