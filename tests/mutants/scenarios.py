"""Small fixed programs of the soak: two healthy steps, one episode of a given kind, two healthy steps, in a few worlds."""

from dataclasses import dataclass, field, replace

from megabucket.chaos.loopback_soak.drafts import Maker
from megabucket.chaos.loopback_soak.kinds import KINDS
from megabucket.chaos.loopback_soak.soak import SoakedWorld, make_episode
from megabucket.chaos.loopback_soak.worlds import draw_world

NUM_WORLDS = 3
HEALTHY = {"nonfinite_gradients": "error", "unused_parameters": "error", "skipped_forwards": "error", "grad_reduction": "mean"}
ALL_REDUCE = {"use_distributed_optimizer": False, "overlap_param_gather": False, "finish": "auto"}
EXPLICIT = {**ALL_REDUCE, "finish": "explicit"}
SHARDED = {"use_distributed_optimizer": True, "finish": "auto"}
SHARDED_EXPLICIT = {"use_distributed_optimizer": True, "finish": "explicit"}
OVERLAPS = {"overlap_grad_reduce": True, "bucket_size": 1, "bucket_groups": "per_bucket"}


@dataclass(frozen=True)
class Scenario:
    """One kind of episode, at a place whose description contains ``place``, under a config."""

    kind: str
    switches: dict = field(default_factory=dict)
    place: str = ""

    def worlds(self):
        """The first worlds that have such an episode, each with its episodes."""
        found = 0
        for seed in range(2_000):
            spec = replace(draw_world(seed, **{**HEALTHY, **self.switches}), takes_turns=True)
            maker = Maker(spec)
            before = [KINDS["healthy"](maker) for _ in range(2)]
            episode = make_episode(maker, self.kind)
            if episode is None or self.place not in episode.place:
                continue
            yield spec, [*before, episode, *(KINDS["healthy"](maker) for _ in range(2))]
            found += 1
            if found == NUM_WORLDS:
                return
        raise AssertionError(f"no world has {self}")

    def run(self):
        """Return the first judgement that is not good, and the kind of episode it is about; None if all are good."""
        for spec, episodes in self.worlds():
            judgements = SoakedWorld(spec).run(episodes)
            if not judgements[-1].verdict.is_good:
                return episodes[len(judgements) - 1].kind, judgements[-1]
        return None
