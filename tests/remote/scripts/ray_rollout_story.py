"""Two trainers and two rollout engines that live in Ray already: they join a session, and a stale cache is found.

Run by tests/remote/test_ray_soak.py, in separate namespaces for network and processes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray_story import HEAD, Node, note, wait_until

import graftlab as gl

VOCABULARY, WIDTH, STEPS = 32, 16, 6
# Actors of each group; each has its own samples.
ACTORS = 2


class Policy(torch.nn.Module):
    """The next token from the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embedding(tokens))
        return logits


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits[:-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]


class Member:
    """An actor of a group whose ranks are connected as those of any training job."""

    def join(self, rank: int, store: str) -> None:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ACTORS)
        self.rank = rank


class Trainer(Member):
    """Makes the tokens that its group is given more likely. Each actor of it has the same weights."""

    def __init__(self) -> None:
        self.policy = Policy()
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.5)

    def train(self, tokens: torch.Tensor) -> Any:
        logprobs = logprobs_of(self.policy(tokens), tokens)
        gl.tap("head", self.policy.head.weight.detach())
        gl.tap("logprobs", logprobs.detach())
        gl.step()
        self.optimizer.zero_grad()
        (-logprobs.mean()).backward()
        for parameter in self.policy.parameters():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        return ray.put({name: value.clone() for name, value in self.policy.state_dict().items()})


class Rollout(Member):
    """Samples from a table of all logits, as an engine that has folded its weights. ``refolds`` after each update."""

    def __init__(self, refolds: bool) -> None:
        self.policy, self.refolds = Policy(), refolds
        self.fold()

    @torch.no_grad()
    def fold(self) -> None:
        self.table = self.policy(torch.arange(VOCABULARY))

    def update(self, reference: list[Any]) -> None:
        self.policy.load_state_dict(ray.get(reference[0]))
        if self.refolds:
            self.fold()

    def sample(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.rank)
        tokens = [0]
        for _ in range(24):
            tokens.append(int(torch.multinomial(self.table[tokens[-1]].softmax(-1), 1, generator=generator)))
        return torch.tensor(tokens)

    def score(self, tokens: torch.Tensor) -> None:
        gl.tap("head", self.policy.head.weight.detach())
        gl.tap("logprobs", logprobs_of(self.table[tokens], tokens))
        gl.step()


def differing_steps(folder: Path, refolds: bool) -> dict[str, list[int]]:
    """The steps at which each tap differs, of a training run whose engine folds its weights again, or does not."""
    with gl.listen(ACTORS, ACTORS, folder=folder, address="tcp://127.0.0.1:0", timeout=240) as session:
        # Each trainer has the samples of the engine with its rank, with which graftlab compares it by default.
        def group(side: gl.session.Side, actor: type[Member], *arguments: object) -> list[Any]:
            # Of these variables Ray's dashboard shows all, so the token is in a file.
            environment = {"env_vars": session.environment(side)}
            made = [ray.remote(actor).options(runtime_env=environment).remote(*arguments) for _ in range(ACTORS)]
            ray.get([each.join.remote(rank, f"{folder}-{side}") for rank, each in enumerate(made)])
            return made

        trainers, engines = group("baseline", Trainer), group("target", Rollout, refolds)
        for _ in range(STEPS):
            samples = ray.get([engine.sample.remote() for engine in engines])
            scored = [engine.score.remote(tokens) for engine, tokens in zip(engines, samples, strict=True)]
            trained = [trainer.train.remote(tokens) for trainer, tokens in zip(trainers, samples, strict=True)]
            reference, *_ = ray.get(trained)
            ray.get(scored)
            # All trainers have the same weights; each engine reads the first one's from the object store.
            ray.get([engine.update.remote([reference]) for engine in engines])
        wait_until(lambda: session.row_count >= 2 * ACTORS * STEPS, "the last row")
        frame = session.frame
        frame = frame[frame["status"] == "compared"]
        assert set(zip(frame["name"], frame["rank"], strict=True)) == {
            (name, rank) for name in ("head", "logprobs") for rank in range(ACTORS)
        }, frame
        assert len(frame) == 2 * ACTORS * STEPS, frame
        for actor in (*trainers, *engines):
            ray.kill(actor)
    different = frame[frame["rel_l2"] > 1e-5]
    return {name: sorted(set(different.loc[different["name"] == name, "step"])) for name in ("head", "logprobs")}


def main(folder: Path) -> None:
    head = Node(
        folder, "127.0.0.1", "--head", "--port=6399", "--include-dashboard=false", "--num-cpus=4",
        f"--temp-dir={folder}/ray",
    )  # fmt: skip
    try:
        ray.init(HEAD, logging_level="ERROR")
        found = differing_steps(folder / "right", refolds=True)
        assert found == {"head": [], "logprobs": []}, found
        note("an engine that folds its weights after each update agrees")
        found = differing_steps(folder / "wrong", refolds=False)
        # The weights arrive, and what is computed from them does not follow.
        assert found == {"head": [], "logprobs": list(range(1, STEPS))}, found
        note("a stale cache is found")
    finally:
        # Ray ends a process that has lost its cluster, before it could say what was wrong.
        ray.shutdown()
        head.kill()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
